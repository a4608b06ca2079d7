"""The order of correlated noise and of its units: each parameter once in each step, each unit in steps far apart."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray


class StepOrder:
    """Refuses noise that is drawn twice, too late, or not at all.

    The noise of a step is correlated with that of the steps before. A stream counts its steps here, so that each
    parameter gets the noise of each step exactly once.

    Attributes:
        step: the step that began last; -1 before the first.
    """

    def __init__(self) -> None:
        """Begin before the first step."""
        self.step = -1
        self._known: set[str] = set()
        self._added: set[str] = set()

    def begin(self, step: int) -> None:
        """Begin a step; steps may be skipped.

        Raises:
            ValueError: the step is not after the last one, or a parameter had no noise in the step before.
        """
        if step <= self.step:
            raise ValueError(
                f"the noise of step {step} was already drawn; the last step is {self.step}: take steps in order"
            )
        if missing := sorted(self._known - self._added):
            raise ValueError(f"{missing[0]} had no noise in step {self.step}: every parameter needs it in every step")
        self.step, self._added = step, set()

    def require_first(self, name: str) -> None:
        """Check that a parameter has no noise of this step yet.

        Raises:
            ValueError: it has.
        """
        if name in self._added:
            raise ValueError(f"{name} already had its noise of step {self.step}: add it once per step")

    def add(self, name: str) -> None:
        """Note that a parameter gets its noise of this step."""
        self._known.add(name)
        self._added.add(name)


class UnitsApart:
    """Refuses draws in which a unit comes back while the noise of its last step still reaches the present one.

    Noise with a strategy of b bands costs what its event states only if two steps of one unit are at least b apart: the
    columns of the strategy for these steps are then orthogonal. The sampler ensures this. Here it is checked with the
    bands of the noise itself, so that a sampler with other groups, or with a unit in two of them, is refused.

    Args:
        bands: the number of entries of the strategy's column; 1: nothing is checked.
    """

    def __init__(self, bands: int) -> None:
        """Begin without a draw."""
        self._bands = bands
        self._before: deque[NDArray[np.int64]] = deque(maxlen=bands - 1)

    def check(self, unit_ids: NDArray[np.int64]) -> None:
        """Check the next draw.

        Args:
            unit_ids: (U,) its units, each once.

        Raises:
            ValueError: a unit is in it twice, or was in one of the b - 1 draws before.
        """
        if self._bands == 1:
            return
        if len(np.unique(unit_ids)) < len(unit_ids):
            raise ValueError("A unit is twice in one draw: the sampler is not the one that the accounting assumes")
        for steps, before in enumerate(self._before, start=1):
            if len(again := np.intersect1d(unit_ids, before)):
                raise ValueError(
                    f"Unit {again[0]} was drawn again after {steps} step{'s' * (steps > 1)}, but the noise has "
                    f"{self._bands} bands, so two steps of one unit must be at least {self._bands} apart: ε would be "
                    "larger than stated. Draw with the sampler of the plan's mechanism, and report this if you did"
                )

    def take(self, unit_ids: NDArray[np.int64]) -> None:
        """Note a draw that is handed out."""
        if self._bands > 1:
            self._before.appendleft(np.array(unit_ids))
