"""The rows of an independence check, each made by itself, and the groups (companies) in which they pass the model.

Place in the flow: `dpllm.training.checks.independence` draws a sample for each check and runs its companies. A sample
is drawn by the operating system's randomness from all rows, within the limits of a microbatch. It has the shortest row
with a target, because effects of padding are largest there, and one of the longest.

A collator and a data set are only ever asked for one row, so rows cannot mix. They could still carry tokens or numbers
from one call to the next: `carried_by` makes a row after two other rows, and compares. The user's functions are
only called, as a training calls them. Nothing of what they store is read, written or restored.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dpllm.data.labels import IGNORE
from dpllm.data.records import DataError
from dpllm.data.single_rows import same_values
from dpllm.training.checks.repeatable import generator_states, same_randomness, seed_between

if TYPE_CHECKING:
    from dpllm.training.rows import TrainingRows

_SEARCHED = 8  # rows searched for the shortest one with a target
_BEFORE = 3  # rows that are made before a compared one, and one of the longest
_MOST_CANDIDATES = 1 << 20  # the most rows from which those of a check are chosen
_STATES = 8  # random states: an effect in at least one of eight readings is found with certainty
_READ = 4  # rows that are read again
_CONFIRMED = 12  # more comparisons of each kind, before a difference counts: numbers of a collator's own give 2^-23

COLLATOR, DATA_SET = "The collator", "The data set"
CARRIED = (
    "{who} gives a row other values after another row was {done} before it: it carries tokens or numbers from one call "
    "to the next. Which row comes before depends on the units that are drawn, so a unit cannot be bounded, and ε would "
    "not hold. Make each row from that row only; to fill rows up, join the texts of one record before the training"
)
SEEDED = (
    "The collator sets a seed in each call ({names}). All numbers that the model or the loss draws "
    "afterwards would be public, and the same in every microbatch. Leave the seed out: the generators are seeded from "
    "the operating system in every step"
)
UNSTEADY = (
    "The collator gives a row other values each time, also from the same random state: it draws from a generator of "
    "its own (np.random.default_rng(), random.SystemRandom), counts its calls, takes values in turn, or keeps tokens "
    "or numbers of other rows. Which call a row gets depends on the units that are drawn, so a unit cannot be bounded, "
    "and ε would not hold. Make each row from that row only, and draw from the global generators (np.random.rand, "
    "random.random, torch.rand), which are seeded from the operating system in every step"
)
MADE_LATER = (
    "The collator gives a row other values at the end of a check than at its beginning, from the same random state: it "
    "counts its calls, or follows the rows that it has seen. Which call a row gets depends on the units that are "
    "drawn, so a unit cannot be bounded, and ε would not hold. Make each row from that row only; a curriculum can "
    "follow the number of the step, which a callback knows"
)
REREAD = (
    "The rows of the data set are made again at each reading, with random numbers. Confirm that a row is made from its "
    "own record only, with no text of other records (negatives, mixup, concatenation)"
)
DRAWN = (
    "The data set makes its rows with random numbers when they are read. Raw columns are read once, one row after the "
    "other: the numbers of a row depend on how many rows come before it, and ε would not hold. Leave the random "
    "numbers out; or tokenise in the data set as well, so that its rows have input_ids, and are made again in each step"
)


@dataclass(frozen=True)
class Company:
    """Rows that pass through the model together.

    Attributes:
        numbers: their row numbers.
        words: their relation to the rows of the pass before, in words.
    """

    numbers: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class Sample:
    """The rows of a check.

    Attributes:
        inputs: the rows that pass, by number, each made once and by itself.
        together: numbers; the shortest row comes first. With three rows or more it is also the last one: two equal
            records are ordinary, and a loss may count them.
        replaced: numbers of other rows, the first a long one, and rows of ``together`` in another order.
        crowd: numbers of as many rows as a microbatch has, first those of ``together`` that fit; empty if ``together``
            has as many.
        equals: the shortest row twice, for a pass of the first check if ``together`` has no room for it.
        before: numbers of rows that are made before a compared one, each by itself; two or more, at random and a long
            one. If there is only one row, it is its own predecessor.
        longest: number of the longest row that fits into a microbatch by itself; None: there is only one row.
    """

    inputs: Mapping[int, Mapping[str, Any]]
    together: tuple[int, ...]
    replaced: tuple[int, ...]
    crowd: tuple[int, ...] = ()
    equals: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    longest: int | None = None

    @classmethod
    def draw(cls, rows: TrainingRows, max_tokens: int | None, wanted: int, first: bool, crowd: int = 0) -> Sample:
        """Choose rows by the operating system's randomness, within the limits of a microbatch, and make them.

        Args:
            rows: rows of the run.
            max_tokens: the most tokens of a microbatch. None: ``rows.max_rows`` bounds it.
            wanted: the most rows of a pass.
            first: whether to take the longest row that fits; if false, a long one.
            crowd: rows of a process in a step, for one pass that is as large as a microbatch. 0: no such pass.
        """
        rng = np.random.default_rng(secrets.SystemRandom().getrandbits(128))
        numbers = _some(rows.units.rows, rng)
        lengths = np.maximum(1, rows.lengths[numbers])
        order = numbers[_smallest(lengths, _SEARCHED)]
        inputs = dict(zip(order.tolist(), rows.made(order), strict=True))
        short = next((n for n, one in inputs.items() if _has_target(one)), int(order[0]))
        shortest = max(1, int(rows.lengths[short]))
        most = min(wanted, len(numbers) if rows.max_rows is None else rows.max_rows)

        def others(size: int, without: Sequence[int]) -> list[int]:
            """Return rows that fit into a pass of ``size`` rows beside those it has already, in random order."""
            count = size - len(without)
            cap = math.inf if max_tokens is None else max_tokens // max(1, size)
            if count < 1 or cap < shortest:
                return []
            fitting = numbers[lengths <= cap] if cap < lengths.max() else numbers
            drawn = rng.choice(fitting, min(len(fitting), 2 * count + len(without) + 2), replace=False)
            return [n for n in dict.fromkeys(drawn.tolist()) if n not in without][:count]

        while most > 1 and max_tokens is not None and max_tokens // most < shortest:
            most -= 1
        together = [short, *others(most, [short])]
        size = min(crowd, len(numbers) if rows.max_rows is None else rows.max_rows)
        while size > most and max_tokens is not None and max_tokens // size < shortest:
            size -= 1
        # The draw of rows must not decide whether there is a pass: other processes draw other rows, and wait for it.
        room = math.inf if max_tokens is None else max_tokens // max(1, size)
        fit = [n for n in together if rows.lengths[n] <= room]
        crowded = [*fit, *others(size, fit)]
        crowded = crowded if len(crowded) > most else []
        equals = (short, short) if first and most > 1 and len(together) < 3 else ()
        if len(together) > 2:
            together[-1] = short
        few = min(most, 3 if wanted > 2 else 2)
        cap = math.inf if max_tokens is None else max_tokens // max(1, few)
        fitting = numbers[(lengths <= cap) & ~np.isin(numbers, together)] if few > 1 else numbers[:0]
        long: list[int] = []
        if len(fitting):
            drawn = fitting if first else rng.choice(fitting, min(4, len(fitting)), replace=False)
            long = [int(drawn[rows.lengths[drawn].argmax()])]
        kept = [n for n in together[1:2] if few > 2 or not long]
        kept = [n for n in kept if rows.lengths[n] <= cap]
        replaced = [*long, *kept, short]
        lone = numbers[lengths <= (math.inf if max_tokens is None else max_tokens)]
        lone = lone[lone != short]
        before = rng.choice(lone, min(_BEFORE, len(lone)), replace=False).tolist()
        longest = int(lone[rows.lengths[lone].argmax()]) if len(lone) else None
        before += [short if longest is None else longest]
        before = [*dict.fromkeys(before), short][: max(2, len(set(before)))]
        wished = {*together, *replaced, *crowded, *before, *([] if longest is None else [longest])}
        missing = np.array([n for n in wished if n not in inputs], dtype=numbers.dtype)
        inputs |= dict(zip(missing.tolist(), rows.made(missing), strict=True))
        return cls(inputs, tuple(together), tuple(replaced), tuple(crowded), equals, tuple(before), longest)

    def long(self, rows: TrainingRows) -> int:
        """Return the number of the longest row that was made: it takes the most random numbers."""
        return max(self.inputs, key=lambda number: int(rows.lengths[number]))

    @property
    def probed(self) -> tuple[int, ...]:
        """Numbers of the first rows that pass through the model together; `probe` measures them first."""
        return self.together if len(self.together) > 1 else self.equals

    def companies(self, first: bool) -> list[Company]:
        """Return the passes of a check, first the shortest row alone."""
        short = self.together[0]
        passes = [Company((short,), "alone")]
        if len(self.together) > 1:
            equal = ", one of them its equal" if short in self.together[1:] else ""
            passes.append(Company(self.together, f"beside {len(self.together) - 1} other row(s){equal}"))
        if len(self.replaced) > 1:
            words = f"beside {len(self.replaced) - 1} other row(s), replaced, longer and in another order"
            passes += [Company(self.replaced, words), Company(self.replaced[:1], "alone")]
        if self.crowd:
            passes.append(Company(self.crowd, f"beside {len(self.crowd) - 1} other row(s), as in a whole microbatch"))
        if self.equals:
            passes.append(Company(self.equals, "beside its equal"))
        if len(self.together) > 2 or first:
            passes += [Company((n,), "alone") for n in self.together[1:2]]
        if len(passes) < 3:  # never several rows: the only risk left is state that is carried from pass to pass
            for n in self.before[:2]:
                passes += [Company((n,), "alone"), Company((short,), "alone, after another row")]
                passes += [Company((short,), "alone, after itself")]  # what changes with every second call
            long = [] if self.longest is None else [Company((self.longest,), "alone, after another row")]
            for n in self.before[:2] if long else ():  # the shortest row may reset what others left
                passes += [*long, Company((n,), "alone, after the longest row")]
        return passes


def _some(rows: Any, rng: np.random.Generator) -> np.ndarray:
    """Return all row numbers, or a million of them drawn at random if there are more."""
    if len(rows) <= _MOST_CANDIDATES:
        return np.asarray(rows)
    places = np.unique(rng.integers(0, len(rows), _MOST_CANDIDATES))
    return rows.start + rows.step * places if isinstance(rows, range) else rows[places]


def _smallest(lengths: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the smallest few, in rising order."""
    if len(lengths) <= count:
        return np.argsort(lengths, kind="stable")
    few = np.argpartition(lengths, count)[:count]
    return few[np.argsort(lengths[few], kind="stable")]


def _has_target(inputs: Mapping[str, Any]) -> bool:
    """Return whether a row's loss can differ from 0, as far as its labels show."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return True
    return bool((labels[..., 1:] != IGNORE).any())


# ------------------------------------------------------------- values of a row that follow other calls


def carried_by(rows: TrainingRows, sample: Sample) -> str | None:
    """Return a message if the data set or the collator carries something from one row to the next, or sets a seed.

    Args:
        rows: rows of the run.
        sample: of the check; its shortest row and a long one are made after others.
    """
    read, collate = _makers(rows)
    for who, done, make in ((DATA_SET, "read", read), (COLLATOR, "collated", collate)):
        for row in dict.fromkeys((sample.together[0], sample.long(rows))):
            others = sorted({*sample.before, row}, key=lambda number: (number == row, -int(rows.lengths[number])))
            if len(others) > 1 and _follows(make, row, (others[0], others[-1])):
                return CARRIED.format(who=who, done=done)
    after = []
    for part in (0.0, 0.5):
        with same_randomness(seed_between(part, part + 0.5)):
            collate(sample.long(rows))
            after.append(generator_states())
    names = [name for name, state in after[0].items() if state == after[1][name]]
    if names:
        return SEEDED.format(names=f"{' and '.join(names)} global generator")
    return None if _is_steady(collate, sample.long(rows)) else UNSTEADY


def doubts(rows: TrainingRows, sample: Sample) -> list[str]:
    """Return open points of the report: random numbers of a data set, which hide what else a row depends on."""
    return [REREAD] if _is_drawn(_makers(rows)[0], sample.long(rows)) else []


def _makers(rows: TrainingRows) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return functions that read a row, and that collate a row which is read once."""

    @functools.cache
    def fetched(number: int) -> Any:
        return read(number)

    def read(number: int) -> Any:
        return rows.fetch(np.array([number]))[0]

    return read, lambda number: rows.collate.row(fetched(number))


def refuse_reading(read: Callable[[int], Any], num_rows: int) -> None:
    """Check the rows of a data set that are read once, in their order, and stored as they come out.

    Args:
        read: the number of a row to its values.
        num_rows: how many rows there are.

    Raises:
        DataError: a row depends on the row that was read before it, or is made with random numbers.
    """
    rows = secrets.SystemRandom().sample(range(num_rows), min(num_rows, _READ))
    for place, row in enumerate(rows):
        if len(rows) > 1 and _follows(read, row, (rows[place - 1], row)):
            raise DataError(CARRIED.format(who=DATA_SET, done="read"))
        if _is_drawn(read, row):
            raise DataError(DRAWN)


def _is_drawn(read: Callable[[int], Any], row: int) -> bool:
    """Return whether a row is made with random numbers: some change it, or it has numbers of its own."""
    found = []
    for part in range(_STATES):
        with same_randomness(seed_between(part / _STATES, (part + 1) / _STATES)):
            found.append(read(row))
    return not all(same_values(one, found[0]) for one in found[1:])


def _is_steady(make: Callable[[int], Any], row: int) -> bool:
    """Return whether a row is made alike three times in a row, from the same random state."""
    seed, found = seed_between(0, 1), []
    for _ in range(3):
        with same_randomness(seed):
            found.append(make(row))
    return all(same_values(one, found[-1]) for one in found[1:])  # the first may follow another row


def _follows(make: Callable[[int], Any], row: int, others: Sequence[int]) -> bool:
    """Return whether the values of a row depend on the row that was made before it.

    Makes four rows. Only if the row differs, more comparisons tell an effect of the row before from numbers that the
    function draws by itself in each call, such as those of `random.SystemRandom`.

    Args:
        make: the number of a row to its values.
        row: the row that is compared.
        others: two different rows, before it in turn.
    """
    seed = seed_between(0, 1)

    def after(other: int) -> Any:
        with same_randomness(seed):
            make(other)
        with same_randomness(seed):
            return make(row)

    expected = [after(other) for other in others]
    if same_values(*expected):
        return False
    order = [0, 1] * _CONFIRMED
    secrets.SystemRandom().shuffle(order)  # calls may be counted
    return all(same_values(after(others[place]), expected[place]) for place in order)
