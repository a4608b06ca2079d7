"""The draws of a run: charged when they are made, used by one step, and the same on every process.

ε holds for units drawn by the plan's sampler. Steps on other units (a shuffled epoch, a unit twice, a chosen batch)
have a different ε, and so do steps on draws that somebody inspected and then kept or dropped. A draw is therefore
charged when it is made, and a step takes the last unused draw, completely and unchanged.

A process that is one call ahead of the others, or takes a step on other units, would add sums of different draws. A
unit could then be in two shares of one step. Each call therefore begins with one small collective of the same shape.
Processes that are out of step detect each other there and stop, before any charge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from dpllm.engines.processes import DisagreementError, OtherProcessError, Processes, told_by_rank
from dpllm.mechanism.events import Event
from dpllm.mechanism.noise import UnitsApart
from dpllm.privacy.plan import PrivacyPlan

LEFT_OUT = (
    "Units were left out of draws by hand (present_N). The guarantee covers that only where it does not depend on the "
    "records, their losses or anything else that was computed from them: confirm it."
)
"""The open point of a run with draws from which units were left out."""
_DRAW, _STEP, _SAVE, _END = 1.0, 2.0, 3.0, 4.0
_NAMES = {
    _DRAW: "draws the units of step {}",
    _STEP: "takes step {}",
    _SAVE: "checks the weights before a save or the end, where step {} is next",
    _END: "ends the run, where step {} is next",
}


class DrawError(ValueError):
    """A step was requested on units that are not the outstanding draw."""


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
            DrawError: the step was already taken, or is a different one.
        """
        if step != self.step:
            raise DrawError(
                f"The draw was charged with {self.step}, but the step to take is {step}: the plan was changed after "
                "the run began. Start a new run with the new plan"
            )
        if self.used or step_number != self.num_steps:
            raise DrawError(f"Step {step_number} was not charged with this draw, or was already taken. Draw its units")
        self.used = True


class Draws:
    """The draws of a run, the same on every process: rank 0 makes them, and each is charged when it is made.

    A step takes the outstanding draw: the last one, if it was not used yet. All processes call each method together.
    It raises a DisagreementError on every process if they are at different points of the run.

    Args:
        plan: plan of the run.
        ledger: the ledger to charge.
        processes: all processes of the run.
        drawn: the sampler's draws; rank 0's are used.
    """

    def __init__(
        self, plan: PrivacyPlan, ledger: Charges, processes: Processes, drawn: Iterator[NDArray[np.int64]]
    ) -> None:
        """Begin without a draw."""
        self._plan, self._processes = plan, processes
        self._ledger, self._drawn = ledger, drawn
        self._uncharged: NDArray[np.int64] | None = None  # made on rank 0, and seen by nobody
        self._outstanding: tuple[NDArray[np.int64], Charged] | None = None
        self._apart = UnitsApart(plan.mechanism.noise.separation(plan.mechanism.draw))

    def next(self, present_N: np.ndarray | None = None) -> NDArray[np.int64]:
        """Draw and charge the units of the next step; errors as for `dpllm.training.run.PrivateRun.draws`.

        An earlier unused draw is lost and stays charged.

        Args:
            present_N: (N,) bool, the units present. None: all.

        Returns:
            A copy; `take` compares it with the charged draw.
        """
        self._require_steps()
        drawn = self._from_main(self._draw)
        self._apart.check(drawn)  # all processes have the same units, so it raises on all of them
        made = self._charge(drawn if present_N is None else drawn[present_N[drawn]])
        self._uncharged = None
        self._apart.take(drawn)
        return made

    def chosen(self, unit_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Charge these units as a draw; for runs that are not private.

        Args:
            unit_ids: (U,) the units, no two equal; rank 0's are used.

        Returns:
            A copy; `take` compares it with the charged draw.

        Raises:
            ValueError: the plan has no step left.
            DrawError: a unit occurs twice; nothing is charged.
            LedgerError: the draw cannot be charged.
        """
        return self._charge(self._from_main(lambda: unit_ids))

    def take(self, unit_ids: ArrayLike, mode: str, error: Exception | None) -> tuple[NDArray[np.int64], Charged]:
        """Return the outstanding draw and its charge, for one step, and leave none.

        Args:
            unit_ids: (U,) the units for which the caller requests a step.
            mode: settings that determine the computation and may change from step to step.
            error: the reason why this process cannot take the step.

        Raises:
            DisagreementError: the processes take different steps, use different units or another mode; on every
                process.
            DrawError: there is no outstanding draw, or the units differ from it; the draw is then not used up.
            Exception: the error of the first process that has one; on every process.
        """
        given = np.asarray(unit_ids)
        self._compare_steps(given, mode, error)
        if self._outstanding is None:
            raise DrawError(
                "No draw is outstanding: each draw of `draws` is for one step, and this one was already used or none "
                "was made. Take each step's units from `for unit_ids in run.draws(num_steps)`, one step per draw"
            )
        draw = self._outstanding
        if not np.array_equal(given, draw[0]):
            raise DrawError(
                f"These {given.size} units are not the outstanding draw: ε holds only for the units that the plan's "
                "sampler drew (no shuffled epochs, no unit twice, no chosen batch). Pass the last draw of "
                "`draws`, unchanged"
            )
        self._outstanding = None
        return draw

    def save(self, num_steps: int) -> None:
        """Check that all processes compare their weights next, before a save or the end.

        Args:
            num_steps: number of steps charged so far.

        Raises:
            DisagreementError: they make different calls; on every process.
        """
        self._meet(_SAVE, num_steps, [])

    def end(self, num_steps: int) -> None:
        """Check that all processes end the run.

        Args:
            num_steps: number of steps charged so far.

        Raises:
            DisagreementError: they make different calls; on every process.
        """
        self._meet(_END, num_steps, [])

    def _require_steps(self) -> None:
        """Check that the plan has a step left; raise a ValueError if all steps are charged."""
        planned = self._ledger.steps_planned or self._plan.num_steps
        if self._ledger.num_steps >= planned:
            raise ValueError(
                f"All {planned} steps of the plan are taken and charged; another step would exceed its "
                "epsilon. Make a plan with more steps."
            )

    def _draw(self) -> NDArray[np.int64]:
        """Make a draw, or return the one that could not be charged: a sampler counts its draws as steps."""
        if self._uncharged is None:
            self._uncharged = next(self._drawn)
        return self._uncharged

    def _from_main(self, draw_on_main: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the units that `draw_on_main` draws on rank 0, sent to the others."""
        drawn = draw_on_main() if self._processes.is_main else np.empty(0, dtype=np.int64)
        everywhere = self._meet(_DRAW, self._ledger.num_steps, [float(len(drawn))])
        return self._processes.int64s_from_main(drawn, int(everywhere[0][2]))

    def _charge(self, unit_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Charge a draw, which becomes the outstanding one; return a copy."""
        self._require_steps()
        if len(np.unique(unit_ids)) != len(unit_ids):
            raise DrawError("A draw contains a unit twice: it would be clipped twice and exceed the clip norm")
        self._outstanding, number, event = None, self._ledger.num_steps, self._plan.event
        self._ledger.append_step(number, event)
        charged = Charged(number, event, steps_planned=self._ledger.steps_planned)
        self._outstanding = np.array(unit_ids, dtype=np.int64), charged
        return self._outstanding[0].copy()

    def _compare_steps(self, unit_ids: np.ndarray, mode: str, error: Exception | None) -> None:
        """Check that all processes take one step, on the same units and in one mode, before it is computed."""
        if self._processes.size == 1:
            self._processes.raise_found(error, [float(error is not None)])
            return
        units, settings = np.ascontiguousarray(unit_ids, dtype=np.int64).tobytes(), mode.encode()
        mine = [float(len(unit_ids)), *_words(units), *_words(settings), float(error is not None)]
        everywhere = self._meet(_STEP, self._ledger.num_steps - 1, mine)  # its draw is already charged
        self._processes.raise_found(error, [one[7] for one in everywhere])
        for what, part in (("the units of this step", slice(2, 5)), ("autocast or training mode", slice(5, 7))):
            if any(one[part] != everywhere[0][part] for one in everywhere):
                hashes = [f"{int(one[3]):012x}" for one in everywhere]
                shown = told_by_rank(hashes if part.start == 2 else self._processes.gather(mode))
                raise DisagreementError(
                    f"The processes differ in {what} ({shown}), so their sums would not belong to one draw. No "
                    "further step is charged. Pass every draw of PrivateRun.draws to PrivateRun.step unchanged, in "
                    "the same order and with the same settings, on every process"
                )

    def _meet(self, kind: float, step: int, rest: list[float]) -> list[list[float]]:
        """Return the numbers of all processes, after checking that all are at the same point."""
        try:
            everywhere = self._processes.gather_numbers([kind, float(step), *(rest + [0.0] * 6)[:6]])
        except OtherProcessError as error:
            if error.is_told:
                raise
            raise DisagreementError(
                f"This process {_NAMES[kind].format(step + 1)}, but another one has ended or cannot be reached "
                f"({error}). No further step is charged. Call next() on "
                "PrivateRun.draws, PrivateRun.step and PrivateRun.finish on every process, not only on the main one"
            ) from error
        if any(one[:2] != everywhere[0][:2] for one in everywhere):
            names = [_NAMES.get(one[0], "makes another call") for one in everywhere]
            shown = told_by_rank([name.format(int(one[1]) + 1) for name, one in zip(names, everywhere, strict=True)])
            raise DisagreementError(
                f"The processes are at different points of the run ({shown}): one of them took an extra draw, skipped "
                "a step, or stopped by itself. No further step is charged. Call next() on PrivateRun.draws, "
                "PrivateRun.step and PrivateRun.finish equally often, and in the same order, on every process; decide "
                "on a stop on one process and send the decision to the others"
            )
        return everywhere


def mode_now(training: bool) -> str:
    """Return the settings that influence a forward pass and that a context manager may change."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    cast = [f"{kind} autocast {torch.get_autocast_dtype(kind)}" for kind in kinds if torch.is_autocast_enabled(kind)]
    return ", ".join([*cast, "training" if training else "evaluation mode"])


def _words(data: bytes) -> list[float]:
    """Return 96 bits of a hash as two numbers that float64 represents exactly."""
    digest = hashlib.sha256(data).digest()
    return [float(int.from_bytes(digest[at : at + 6], "little")) for at in (0, 6)]
