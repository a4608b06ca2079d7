"""Find random numbers that rows of a microbatch share: one coin, one noise or one dropout mask for all of them.

Clipping bounds a unit's contribution only if the random numbers of different units are independent. Which units are in
one microbatch depends on all drawn units. If rows of a microbatch share a number, then removing a unit changes the
groups of rows that share one, and so the joint distribution of the other units' contributions, by several clip
norms. A comparison of rows alone and in a batch does not show this: each row's own distribution is right.
Collators are called with one row, so only models and losses can share a number.

`dpllm.training.checks.independence` runs these comparisons on copies of one row:

* **By number** (`shared_draws`, `shared_generators`): copies need as many times the numbers as one row. A draw of
  PyTorch that does not grow with the copies is shared, and so are the numbers of Python's or NumPy's generator if it is
  in the same state after one row and after several. For dropout this is decisive: every number of its mask acts.
* **By force** (`Sharing.force`): a shared draw is harmless if it has no influence. Only its numbers are changed, also
  to rare values, and then no loss may change.

Shape suffixes: B copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.ghost.errors import is_shortage
from dpllm.training.checks.differences import Seen, difference
from dpllm.training.checks.repeatable import DROPOUT, NUMPY, PYTHON, Draw, Numbers
from dpllm.training.out_of_memory import free_memory

COPIES = 4
"""Copies of a row in a comparison."""
_TRIED = (1e-6, 0.25, 0.5, 0.75, 1 - 1e-6)  # uniform numbers; the extreme ones flip coins that are rarely one
SHARED = (
    "The model or the loss draws random numbers that all rows of a microbatch share: {what}, and {effect}. A unit's "
    "influence then depends on the other drawn units, and ε would not hold. Draw "
    "separate numbers for each row (torch.rand(B) for B rows, not one torch.rand(()) or random.random() for the "
    "batch); set rates that act on all rows at once to 0 (layerdrop, LoHa's and LoKr's rank_dropout and "
    "module_dropout, dropout of weights or of relative positions as in DeBERTa); or train with one row per microbatch "
    "(per_device_train_batch_size: 1)"
)


@dataclass(frozen=True)
class Pass:
    """One pass of rows.

    Attributes:
        seen: results of the rows, in their order.
        draws: the calls that drew numbers, in order.
        moved: the states of the global generators that changed within the model and the loss, after the pass.
    """

    seen: list[Seen]
    draws: Sequence[Draw]
    moved: Mapping[str, Any]


class Sharing:
    """The comparisons of one check for the model and the loss. Each method runs a fixed number of passes.

    Args:
        run: makes a pass over this many copies of a row, with these numbers.
        copies: number of copies for which a microbatch has room.
        tolerance: the largest relative difference of a loss that rounding explains.
        in_lockstep: whether other processes run the same passes; otherwise fewer copies are taken if memory runs out.

    Attributes:
        message: the finding, in one line; None: nothing was found.
        shared: draws that do not grow with the number of copies.
        generators: names of generators whose numbers do not grow with it.
    """

    def __init__(self, run: Callable[[int, Numbers], Pass], copies: int, tolerance: float, in_lockstep: bool) -> None:
        """Start without a result."""
        self._run, self._copies, self._tolerance, self._in_lockstep = run, copies, tolerance, in_lockstep
        self.message: str | None = None
        self.shared: frozenset[Draw] = frozenset()
        self.generators: frozenset[str] = frozenset()

    def look(self) -> None:
        """Compare the draws of one row with those of copies; takes two passes."""
        alone, self._usual = self._run(1, Numbers()), self._fitting()
        self._copies = len(self._usual.seen)
        self.shared = frozenset(shared_draws(alone.draws, self._usual.draws, self._copies))
        self.generators = shared_generators(alone.moved, self._usual.moved) if self._copies > 1 else frozenset()
        if any(one.name == DROPOUT for one in self.shared):
            self._tell("every number of a mask acts")

    def _fitting(self) -> Pass:
        """Return a pass over as many copies as fit in memory."""
        while True:
            try:
                return self._run(self._copies, Numbers())
            except RuntimeError as error:
                if not is_shortage(error) or self._in_lockstep or self._copies == 1:
                    raise
            free_memory()
            self._copies //= 2

    def force(self) -> None:
        """Compare the losses of copies while only shared numbers change; takes five passes."""
        usual = self._usual.seen
        room = self._tolerance * max(1.0, 1 / max(1e-30, abs(usual[0].loss)))  # for a norm near a loss of 0
        for to in _TRIED:
            try:
                forced = self._run(self._copies, Numbers(self.shared, self.generators, to)).seen
            except Exception as error:
                if is_shortage(error):
                    raise
                self._tell(f"the loss fails for some of them ({type(error).__name__}: {error})")
                continue
            for one, other in zip(usual, forced, strict=True):
                if difference(one.loss, other.loss, 1.0) > self._tolerance:
                    self._tell(f"the loss of a row follows them (from {one.loss:.6g} to {other.loss:.6g})")
                if difference(one.norm, other.norm, 1e-30) > room:
                    self._tell(f"the gradient norm of a row follows them (from {one.norm:.6g} to {other.norm:.6g})")

    def _tell(self, effect: str) -> None:
        words = _words(self.shared, self.generators, self._copies)
        self.message = self.message or SHARED.format(effect=effect, what=words)


def shared_draws(alone: Sequence[Draw], copies: Sequence[Draw], count: int) -> list[Draw]:
    """Return the draws of a pass over copies that need fewer numbers than ``count`` single rows do.

    Args:
        alone: draws of the row alone.
        copies: draws of its copies together, compared one by one where as many calls were made, otherwise in total by
            function and place in the code: a loop over rows makes more calls for more rows.
        count: number of copies.
    """
    if count < 2:
        return []
    if [(one.name, one.where) for one in alone] == [(one.name, one.where) for one in copies]:
        pairs = zip(alone, copies, strict=True)
        return [other for one, other in pairs if other.count < count * one.count or (other.count and not one.count)]
    totals: list[Counter[tuple[str, str]]] = [Counter(), Counter()]
    for total, draws in zip(totals, (alone, copies), strict=True):
        for one in draws:
            total[one.name, one.where] += one.count
    return [one for one in copies if totals[1][one.name, one.where] < count * totals[0][one.name, one.where]]


def shared_generators(alone: Mapping[str, Any], copies: Mapping[str, Any]) -> frozenset[str]:
    """Return Python's and NumPy's generator if they move equally far for one row and for several.

    Args:
        alone: states after a pass over one row, of generators that moved.
        copies: states after a pass over copies of it, from the same state.
    """
    return frozenset(name for name in (NUMPY, PYTHON) if name in alone and alone[name] == copies.get(name))


def _words(shared: Iterable[Draw], generators: Iterable[str], copies: int) -> str:
    """Return a description of the shared numbers: the first draw in the code, or the generators."""
    draws = sorted(shared, key=lambda one: (one.name != DROPOUT, one.where))
    if not draws:
        return f"{' and '.join(sorted(generators))} global generator gives as many numbers for one row as for {copies}"
    more = f" (or another of {len(draws)} draws)" if len(draws) > 1 else ""
    return f"{draws[0].name} at {draws[0].where} draws numbers of shape {draws[0].shape} for {copies} rows{more}"
