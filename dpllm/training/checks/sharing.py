"""Random numbers that rows of a microbatch share: one coin, one masking rate or one dropout mask for all of them.

Clipping bounds a unit's contribution only if the random numbers of different units are independent. Which units are in
one microbatch depends on all units that were drawn. If rows of a microbatch share a number, then a unit which is
removed changes the groups of rows that share one, and so the joint law of the contributions of others, by several clip
norms. A comparison of rows alone and in company does not show this: each row for itself has the right distribution.

Place in the flow: `dpllm.training.checks.independence` runs these comparisons on copies of one row, each of them a
separate unit. There are three:

* **By number** (`shared_draws`, `shared_generators`): copies need as many times the numbers as one row. A draw of
  PyTorch that does not grow with the copies is shared, and so are the numbers of Python's or NumPy's generator if it is
  in the same state after one row and after several. For dropout this decides: every number of its mask acts.
* **By force** (`Sharing.force`): a shared draw is harmless if it has no influence. Only its numbers are changed, also
  to values that are rare; then no loss may change.
* **By chance** (`chance`): with really random numbers, dropout disabled, the values of copies must vary as much within
  a pass as between passes. This covers Python's and NumPy's generators, and numbers of one row that others use.

Shape suffixes: B copies, S random states.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.data.transfer import own_copy
from dpllm.ghost.memory import is_shortage
from dpllm.training.checks.repeatable import (
    NUMPY,
    PYTHON,
    TORCH,
    Draw,
    Numbers,
    Repeatable,
    generator_states,
    randomness,
    same_randomness,
)
from dpllm.training.out_of_memory import free_memory

COPIES = 4
"""Copies of a row in a comparison by shape."""
PLACES, STATES, FEWEST = 8, 48, 8
"""Copies of a row in a comparison by chance, and random states: for collators, and for models and later checks."""
_FORCED = (1e-6, 0.25, 0.5, 0.75, 1 - 1e-6)  # uniform numbers, also those of coins that are rarely one
_RESEEDED = 32  # random states in which a collator's shared numbers are changed
_CHANCE_MODEL, _CHANCE_COLLATOR = 5e-9, 1e-10
"""Probability with which sound rows fail one comparison by chance.

A model has four comparisons in a check (loss and norm, too similar and too dissimilar), a collator up to 14 for each
column of its batch. With 20 checks in a run and 20 columns, the probability of an alarm in a sound run is below 1e-6.
"""

_UNBOUNDED = (
    "Which rows share them depends on the units that are drawn, so a unit cannot be bounded, and ε would not hold. "
)
_REMEDY = (
    "Draw separate numbers for each row: torch.rand(B) for B rows, not one torch.rand(()) or random.random() for the "
    "batch; set rates that act on all rows at once to 0 (layerdrop, LoHa's and LoKr's rank_dropout and module_dropout, "
    "dropout of weights); or train with one row per microbatch (per_device_train_batch_size: 1)"
)
DROPPED = (
    "The model or the loss draws random numbers that all rows of a microbatch share: {name} at {where} drops numbers "
    "of a tensor of shape {shape}, which has no place for rows. " + _UNBOUNDED + "Set this dropout to 0 (dropout of "
    "relative positions as in DeBERTa: p of that module, or hidden_dropout_prob), or apply it to a tensor of shape "
    "(B, ...)"
)
FORCED = "{who} draws random numbers that all rows of a microbatch share: {what}, and {effect}. " + _UNBOUNDED + _REMEDY
SHARED = (
    "{who} draws random numbers that rows of a microbatch share{generators}: {copies} copies of one row have "
    "{relation} values of {figure} in each random state, and from state to state it varies between {least:.6g} and "
    "{most:.6g}; in {states} states, independent numbers give this with a probability of {chance:.0e}. "
    + _UNBOUNDED
    + _REMEDY
)
FAILS = (
    "The loss of a row fails for some random numbers and not for others ({error}). The row is alone in its microbatch, "
    "so the cause is neither padding nor another row. Correct the branch of the model or the loss that these numbers "
    "lead to"
)


@dataclass(frozen=True)
class Pass:
    """The result of one pass over copies of a row.

    Attributes:
        losses: (B,) loss of each copy.
        norms: (B,) norm of its gradient.
        draws: the calls that drew numbers, in order.
        moved: the states of those global generators that changed within the model and the loss, after it.
    """

    losses: Sequence[float]
    norms: Sequence[float]
    draws: Sequence[Draw]
    moved: Mapping[str, Any]


class Sharing:
    """The comparisons of one check for the model and the loss. Each method runs a fixed number of passes.

    Args:
        run: makes a pass over this many copies of a row, with these numbers.
        places: the most copies that a microbatch has room for.
        states: random states of the comparison by chance; the same on all processes.
        tolerance: the largest relative difference of a loss that rounding explains.
        in_lockstep: whether other processes run the same passes; otherwise fewer copies are taken if memory runs out.

    Attributes:
        message: what is wrong, in one line; None: nothing was found.
        shared: draws that do not grow with the number of copies.
        generators: names of generators whose numbers do not.
        is_random: whether numbers are drawn that shapes do not judge.
    """

    def __init__(
        self,
        run: Callable[[int, Numbers], Pass],
        places: int,
        states: int,
        tolerance: Callable[[], float],
        in_lockstep: bool = False,
    ) -> None:
        """Start without a result."""
        self._run, self._places, self._states, self._tolerance = run, places, states, tolerance
        self._in_lockstep = in_lockstep
        self._copies = min(COPIES, places)
        self.message: str | None = None
        self.shared: frozenset[Draw] = frozenset()
        self.generators: frozenset[str] = frozenset()
        self.is_random = False

    def look(self) -> None:
        """Compare the draws of one row with those of copies; two passes."""
        alone, self._usual = self._run(1, Numbers()), self._most(self._copies, Numbers())
        self._copies = len(self._usual.losses)
        found = shared_draws(alone.draws, self._usual.draws, self._copies)
        dropped = next((one for one in found if one.is_dropout), None)
        if dropped is not None:
            self.message = DROPPED.format(name=dropped.name, where=dropped.where, shape=dropped.shape)
        self.shared = frozenset(one for one in found if not one.is_dropout)
        self.generators = shared_generators(alone.moved, self._usual.moved) if self._copies > 1 else frozenset()
        explicit = [one for one in self._usual.draws if not one.is_dropout]
        is_unknown = TORCH in self._usual.moved and not explicit
        self.is_random = is_unknown or bool(self._usual.moved.keys() - {TORCH} or set(explicit) - self.shared)

    def _most(self, count: int, numbers: Numbers) -> Pass:
        """Return a pass over as many copies as memory has room for, at most ``count``."""
        while True:
            try:
                return self._run(count, numbers)
            except RuntimeError as error:
                if not is_shortage(error) or self._in_lockstep or count == 1:
                    raise
            free_memory()
            count //= 2

    def force(self) -> None:
        """Compare the losses of copies while only numbers that are shared change; five passes."""
        usual, tolerance = self._usual, self._tolerance()
        for to in _FORCED:
            try:
                forced = self._run(self._copies, Numbers(self.shared, self.generators, to))
            except Exception as error:
                if is_shortage(error):
                    raise
                self._tell(f"the loss fails for some of them ({type(error).__name__}: {error})")
                continue
            for figure, one, other in (("loss", usual.losses, forced.losses), ("norm", usual.norms, forced.norms)):
                room = tolerance * (1.0 if figure == "loss" else max(1.0, 1 / max(1e-30, abs(usual.losses[0]))))
                least = 1.0 if figure == "loss" else 1e-30
                if any(_differ(*two, room, least) for two in zip(one, other, strict=True)):
                    figure = "gradient norm" if figure == "norm" else figure
                    self._tell(f"the {figure} of a row follows them (from {one[0]:.6g} to {other[0]:.6g})")

    def _tell(self, effect: str) -> None:
        words = forced_words(self.shared, self.generators, self._copies)
        self.message = self.message or FORCED.format(who="The model or the loss", effect=effect, what=words)

    def compare(self) -> None:
        """Compare copies with really random numbers; one pass for each random state."""
        passes = [self._most(self._places, Numbers(is_real=True))]
        self._places = len(passes[0].losses)
        passes += [self._run(self._places, Numbers(is_real=True)) for _ in range(self._states - 1)]
        losses, norms = (np.array([getattr(one, name) for one in passes]) for name in ("losses", "norms"))
        moved = sorted(frozenset().union(*(one.moved for one in passes)))
        generators = f" (from {' and '.join(moved)} global generator)" if moved else ""
        size = np.abs(losses[np.isfinite(losses)])
        room = self._tolerance() * max(1.0, size.max(initial=0))
        small = self._tolerance() / max(1e-30, size.min(initial=1)) * norms.max(initial=0, where=np.isfinite(norms))
        for figure, values, least in (("the loss", losses, room), ("the gradient norm", norms, small)):
            told = related(values, float(least), _CHANCE_MODEL)
            if told is not None and self.message is None:
                words = {"who": "The model or the loss", "generators": generators, "figure": figure}
                self.message = SHARED.format(**words, **told)


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
    """Return Python's and NumPy's generator where they move, and as far for one row as for several.

    Args:
        alone: states after a pass over one row, of generators that moved.
        copies: states after a pass over copies of it, from the same state.
    """
    return frozenset(name for name in (NUMPY, PYTHON) if name in alone and alone[name] == copies.get(name))


def forced_words(shared: Iterable[Draw], generators: Iterable[str], copies: int) -> str:
    """Return words for the numbers that are shared: the first draw in the code, or the generators."""
    draws = sorted(shared, key=lambda one: one.where)
    if not draws:
        return f"{' and '.join(sorted(generators))} global generator gives as many numbers for one row as for {copies}"
    more = f" (or another of {len(draws)} draws)" if len(draws) > 1 else ""
    return f"{draws[0].name} at {draws[0].where} draws numbers of shape {draws[0].shape} for {copies} rows{more}"


def states_for(places: int, fewest: int) -> int:
    """Return the number of random states in which as many copies are seen as in ``fewest`` states of `PLACES`."""
    return math.ceil(fewest * PLACES / max(1, places))


def related(values_SB: np.ndarray, room: float, most: float) -> dict[str, Any] | None:
    """Return words for a message if values of copies depend on each other, None if they do not.

    Args:
        values_SB: a figure of each copy in each random state.
        room: a spread that rounding explains.
        most: the probability of an alarm where copies are independent.
    """
    values_SB = np.nan_to_num(values_SB, nan=1e30, posinf=1e30, neginf=-1e30)
    if values_SB.shape[1] < 2 or np.ptp(values_SB) <= room:
        return None
    alike, unlike = chance(values_SB)
    if min(alike, unlike) > most:
        return None
    return {
        "relation": "similar" if alike < unlike else "opposite",
        "states": len(values_SB),
        "copies": values_SB.shape[1],
        "least": values_SB.min(),
        "most": values_SB.max(),
        "chance": max(min(alike, unlike), 1e-99),
    }


def chance(values_SB: np.ndarray) -> tuple[float, float]:
    """Return the probabilities that independent copies vary at least this much between passes, and at most this much.

    The values are divided into high and low ones where this separates them best (Otsu, 1979); the division is a
    function of the values without their order. If copies are independent and alike, every order of all values has the
    same probability, so the numbers h of high values in the passes have a multivariate hypergeometric distribution.
    The probabilities of Σh² are exact.
    """
    high_SB = values_SB > _threshold(values_SB.ravel())
    states, places = high_SB.shape
    ways = _ways(states, places)[int(high_SB.sum())]
    square = int((high_SB.sum(1) ** 2).sum())
    return float(ways[square:].sum() / ways.sum()), float(ways[: square + 1].sum() / ways.sum())


def _threshold(values: np.ndarray) -> float:
    """Return the largest of the low values: two groups with the greatest distance of their means."""
    values = np.sort(values)
    low = np.arange(1, len(values))
    sums = np.cumsum(values)[:-1]
    distance = (sums / low - (values.sum() - sums) / (len(values) - low)) ** 2 * low * (len(values) - low)
    return float(values[np.where(np.diff(values) > 0, distance, -1).argmax()])


@functools.lru_cache(maxsize=8)
def _ways(states: int, places: int) -> np.ndarray:
    """Return the number of ways to have m high values with Σh² = q, as an array of m and q."""
    ways = np.ones((1, 1))
    for _ in range(states):
        rows, columns = ways.shape
        before, ways = ways, np.zeros((rows + places, columns + places**2))
        for h in range(places + 1):
            ways[h : h + rows, h * h : h * h + columns] += math.comb(places, h) * before
    return ways


def of_collator(
    collate: Callable[[list[Any]], Mapping[str, Any]],
    rows_of: Callable[[int], list[Any]],
    figures: Callable[[Mapping[str, Any], int], Mapping[str, tuple[float, float]]] | None,
    places: int,
    states: int,
) -> str | None:
    """Return a message if a collator, or the reading of rows, draws numbers that rows share.

    Args:
        collate: rows to a batch.
        rows_of: makes this many copies of a row.
        figures: figures of the row at a place of a batch, each with the difference that rounding explains. None: rows
            cannot be taken out of a batch, since it is packed.
        places: the most copies that a microbatch has room for.
        states: random states for `PLACES` copies.
    """
    if places < 2:
        return None
    first, copies = secrets.SystemRandom().getrandbits(32), min(COPIES, places)

    def made(count: int, numbers: Numbers, seed: int = first) -> tuple[Mapping[str, Any], list[Draw], dict[str, Any]]:
        with randomness(seed, numbers), Repeatable(False, seed, numbers) as mode:
            before = generator_states()
            batch = collate(rows_of(count))
            after = generator_states()
        return batch, mode.draws, {name: state for name, state in after.items() if state != before[name]}

    _, alone, moved = made(1, Numbers())
    usual, together, all_moved = made(copies, Numbers())
    shared = frozenset(shared_draws(alone, together, copies))
    generators = shared_generators(moved, all_moved)
    # Copies differ if a shared number is the seed of a generator that gives each row its own: chance decides there.
    is_apart = figures is not None and any(figures(usual, 0) != figures(usual, place) for place in range(1, copies))
    # A shared number may act only where a number of a row's own is close to it, so these vary too: no model runs here.
    for number in range(_RESEEDED if (shared or generators) and not is_apart else 0):
        seed = (first + number) % 2**32
        usual = made(copies, Numbers(), seed)[0]
        if any(not same_values(usual, made(copies, Numbers(shared, generators, to), seed)[0]) for to in _FORCED):
            words = forced_words(shared, generators, copies)
            return FORCED.format(who="The collator", what=words, effect="its batch follows them")
    seen = []
    for _ in range(states_for(places, states) if figures else 0):
        with same_randomness(secrets.SystemRandom().getrandbits(32)):
            batch = collate(rows_of(places))
        seen.append([figures(batch, place) for place in range(places)] if figures else [])
    for name in dict.fromkeys(name for batch in seen for one in batch for name in one):
        pairs = np.array([[one.get(name, (0.0, 0.0)) for one in batch] for batch in seen])
        told = related(pairs[..., 0], float(pairs[..., 1].max()), _CHANCE_COLLATOR)
        if told is not None:
            return SHARED.format(who="The collator", generators="", figure=name, **told)
    return None


def copied(row: Any) -> Callable[[int], list[Any]]:
    """Return a function that makes copies of a row; collators may modify them."""
    return lambda count: [own_copy(row) for _ in range(count)]


def _differ(one: float, other: float, room: float, least: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) != math.isfinite(other)
    return abs(one - other) > room * max(abs(one), abs(other), least)


def same_values(one: Any, other: Any) -> bool:
    """Return whether two batches, or two rows, hold the same values; NaN equals NaN in a tensor."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same_values(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    if isinstance(one, Tensor):
        one, other = (x.to_dense() if x.layout != torch.strided else x for x in (one, other))
        return one.shape == other.shape and bool(((one == other) | (one != one) & (other != other)).all())
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
