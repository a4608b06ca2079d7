"""The order in which correlated noise is drawn: steps one after the other, and every parameter once in each."""

from __future__ import annotations


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
