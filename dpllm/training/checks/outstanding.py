"""The outstanding draw: the only draw that the next step may use, and only once.

Place in the flow: between the sampler and `dpllm.training.step`. ε holds for units drawn by the plan's sampler. Steps
over other units (a shuffled epoch, a unit twice, a chosen batch) have another ε, and so have steps over draws that
somebody inspected and then kept or dropped. So a draw is charged when it is made, and a step takes the last unused
draw, completely and unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.mechanism.events import Event
from dpllm.privacy.plan import PrivacyPlan

LEFT_OUT = (
    "Units were left out of draws by hand (present_N). The guarantee covers that only where it does not depend on the "
    "records, their losses or anything else that was computed from them: confirm it."
)
"""The open point of a run with draws from which units were left out."""


class DrawError(ValueError):
    """A step was requested over other units than those of the outstanding draw."""


class Charges(Protocol):
    """The ledger that steps are charged to: `Ledger`, or `SharedLedger` for several processes."""

    @property
    def num_steps(self) -> int:
        """Number of steps charged so far."""
        ...

    @property
    def steps_planned(self) -> int | None:
        """Number of steps of all starts: the plan's, or the number that a resume allows. None: the plan's."""
        ...

    def append_step(self, step_number: int, step: Event) -> None:
        """Charge a step durably."""
        ...


@dataclass
class Charged:
    """The charge of one draw, in the form that `private_step` needs: already on the disk, and valid for one step."""

    num_steps: int
    """Number of the step, equal to the number of steps charged before it."""
    step: Event
    """The step that was charged."""
    used: bool = False
    steps_planned: int | None = None

    def append_step(self, step_number: int, step: Event) -> None:
        """Confirm that the step is the one that was charged when its units were drawn.

        Raises:
            DrawError: the step was taken before, or is another step.
        """
        if step != self.step:
            raise DrawError(
                f"The draw was charged with {self.step}, but the step to take is {step}: the plan was changed after "
                "the run began. Make a new run with the other plan"
            )
        if self.used or step_number != self.num_steps:
            raise DrawError(f"Step {step_number} was not charged with this draw, or was taken before. Draw its units")
        self.used = True


class Outstanding:
    """The outstanding draw: each draw is charged when it is made, and used by one step.

    Args:
        plan: the plan whose steps are charged.
        ledger: the ledger to charge.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Charges) -> None:
        """Begin without a draw."""
        self._plan, self._ledger = plan, ledger
        self._unit_ids: NDArray[np.int64] | None = None
        self._charged: Charged | None = None

    def require_steps(self) -> None:
        """Check that the plan has a step left.

        Raises:
            ValueError: all steps are charged.
        """
        planned = self._ledger.steps_planned or self._plan.num_steps
        if self._ledger.num_steps >= planned:
            raise ValueError(
                f"All {planned} steps of the plan are taken and charged; another step would exceed its "
                "epsilon. Make a plan with more steps."
            )

    def made(self, unit_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Charge a draw and store it; an unused draw before it is lost and stays charged.

        Args:
            unit_ids: (U,) the units, no two equal.

        Returns:
            A copy; `take` compares it with the charged draw.

        Raises:
            ValueError: the plan has no step left.
            DrawError: a unit is there twice; nothing is charged.
            LedgerError: it cannot be charged.
        """
        self.require_steps()
        if len(np.unique(unit_ids)) != len(unit_ids):
            raise DrawError("A draw holds a unit twice: it would be clipped twice and exceed the clip norm")
        self._unit_ids, number = None, self._ledger.num_steps
        self._ledger.append_step(number, self._plan.event)
        self._unit_ids, self._charged = (
            np.array(unit_ids, dtype=np.int64),
            Charged(number, self._plan.event, steps_planned=self._ledger.steps_planned),
        )
        return self._unit_ids.copy()

    def take(self, unit_ids: ArrayLike) -> tuple[NDArray[np.int64], Charged]:
        """Return the outstanding draw and its charge, and leave none.

        Args:
            unit_ids: (U,) the units for which the caller requests a step.

        Raises:
            DrawError: there is no outstanding draw, or these are other units; the draw is then not used up.
        """
        if self._unit_ids is None or self._charged is None:
            raise DrawError(
                "There is no draw to step over: each draw of `draws` is for one step, and this one was used, or none "
                "was made. Take each step's units from `for unit_ids in run.draws(num_steps)`, one step per draw"
            )
        given = np.asarray(unit_ids)
        if given.shape != self._unit_ids.shape or not np.array_equal(given, self._unit_ids):
            raise DrawError(
                f"These {given.size} units are not the outstanding draw: ε holds for the units that the plan's sampler "
                "drew, and for no others (no shuffled epochs, no unit twice, no chosen batch). Pass the last draw of "
                "`draws`, unchanged"
            )
        drawn, charged, self._unit_ids, self._charged = self._unit_ids, self._charged, None, None
        return drawn, charged
