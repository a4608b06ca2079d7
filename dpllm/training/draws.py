"""The draws of a run: rank 0 makes them, each is charged when it is made, and each is used by one step.

Place in the flow: between the sampler and `dpllm.training.run.PrivateRun.step`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.engines.processes import Processes
from dpllm.mechanism.order import UnitsApart
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.checks.outstanding import Charged, Outstanding
from dpllm.training.checks.turns import Turns
from dpllm.training.shared_ledger import SharedLedger


class Draws:
    """The draws of a run, the same on every process.

    Args:
        plan: plan of the run.
        ledger: the ledger to charge.
        processes: all processes of the run; they call each method together.
        drawn: the sampler's draws; rank 0's are used.
    """

    def __init__(
        self, plan: PrivacyPlan, ledger: SharedLedger, processes: Processes, drawn: Iterator[NDArray[np.int64]]
    ) -> None:
        """Begin without a draw."""
        self._ledger, self._drawn = ledger, drawn
        self._uncharged: NDArray[np.int64] | None = None  # made on rank 0, and seen by nobody
        self._outstanding, self._turns = Outstanding(plan, ledger), Turns(processes)
        self._apart = UnitsApart(plan.mechanism.noise.separation(plan.mechanism.draw))

    def next(self, present_N: np.ndarray | None = None) -> NDArray[np.int64]:
        """Draw and charge the units of the next step.

        Args:
            present_N: (N,) bool, the units present. None: all.

        Raises:
            ValueError, LedgerError, DisagreementError: see `dpllm.training.run.PrivateRun.draws`.
        """
        self._outstanding.require_steps()
        drawn = self._turns.draw(self._draw, self._ledger.num_steps)
        self._apart.check(drawn)  # all processes have the same units, so it raises on all of them
        made = self._outstanding.made(drawn if present_N is None else drawn[present_N[drawn]])
        self._uncharged = None
        self._apart.take(drawn)
        return made

    def _draw(self) -> NDArray[np.int64]:
        """Make a draw, or return the one that could not be charged: a sampler counts its draws as steps."""
        if self._uncharged is None:
            self._uncharged = next(self._drawn)
        return self._uncharged

    def chosen(self, unit_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Charge these units as a draw; for runs that are not private."""
        return self._outstanding.made(self._turns.draw(lambda: unit_ids, self._ledger.num_steps))

    def meet_before_saving(self) -> None:
        """Check that all processes compare their weights now; see `Turns.save`."""
        self._turns.save(self._ledger.num_steps)

    def meet_at_the_end(self) -> None:
        """Check that all processes end the run now; see `Turns.end`."""
        self._turns.end(self._ledger.num_steps)

    def take(self, unit_ids: ArrayLike, mode: str, error: Exception | None) -> tuple[NDArray[np.int64], Charged]:
        """Return the outstanding draw and its charge, for one step.

        Args:
            unit_ids: (U,) the last result of `next`.
            mode: settings that determine the computation.
            error: the reason why this process cannot take the step; raised on every process.

        Raises:
            DrawError: these are other units, or the draw was used.
            DisagreementError: the processes take different steps.
        """
        self._turns.step(np.asarray(unit_ids), self._ledger.num_steps - 1, mode, error)
        return self._outstanding.take(unit_ids)
