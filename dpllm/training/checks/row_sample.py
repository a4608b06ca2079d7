"""Choose the rows of an independence check and the groups in which they pass the model, and make them.

`dpllm.training.checks.independence` draws a sample for each check and runs its companies, the groups of rows that pass
the model together. A sample is drawn from all rows with the operating system's randomness, within the limits of a
microbatch. It contains the shortest row with a target, because effects of padding are largest there, and one of
the longest.

A collator and a data set are only ever asked for one row, so rows cannot mix. They could still carry tokens or numbers
from one call to the next, so a check makes some rows again and compares them (`RowMaker`). The user's functions are
only called, as a training calls them. Nothing that they store is read, written or restored.
"""

from __future__ import annotations

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
from dpllm.ghost import GhostError
from dpllm.training.checks.repeatable import generator_states, same_randomness, seed_between

if TYPE_CHECKING:
    from dpllm.training.rows import TrainingRows

_SEARCHED = 8  # rows searched for the shortest one with a target
_MADE_BETWEEN = 4  # rows that a first check makes again, one after the other, before the shortest row passes again
_MOST_CANDIDATES = 1 << 20  # the largest number of rows from which those of a check are chosen
_STATES = 8  # random states: an effect in at least one of eight readings is found with certainty
_READ = 4  # rows that are read again
_CONFIRMED = 12  # further comparisons before a difference counts: a data set's own random numbers pass with 2^-23

CARRIED = (
    "The data set returned different values for a row after it had read another row: it carries tokens or numbers from "
    "one read to the next, so a unit's influence depends on the other drawn units, and ε would not hold. Make each row "
    "from that row only; to fill rows up, join the texts of one record before the training"
)
SEEDED = (
    "The collator sets a seed in each call ({names}). All numbers that the model or the loss draws "
    "afterwards would be public, and the same in every microbatch. Remove the seed; the generators are seeded from "
    "the operating system in every step"
)
UNSTEADY = (
    "The collator returned different values for a row when it was called again with the same random state, so a unit's "
    "influence depends on the other drawn units, and ε would not hold. Make each row from that row only, without "
    "tokens, counters or numbers from earlier calls, and draw from the global generators (np.random.rand, "
    "random.random, torch.rand), not from the collator's own (np.random.default_rng(), random.SystemRandom). To fill "
    "rows up, join the texts of one record before the training; a curriculum can follow the step number, which "
    "callbacks receive"
)
REREAD = (
    "The data set makes its rows at each read, with random numbers. Confirm that it makes each row from its "
    "own record only, with no text of other records (negatives, mixup, concatenation)"
)
DRAWN = (
    "The data set makes its rows with random numbers when they are read. Raw columns are read once, one row after the "
    "other, so the numbers of a row depend on how many rows come before it, and ε would not hold. Remove the random "
    "numbers, or tokenise in the data set as well, so that its rows have input_ids and are made again in each step"
)


class IndependenceError(GhostError):
    """A row's loss or gradient depends on other rows, so a unit's influence cannot be bounded.

    Attributes:
        finding: the finding without a private value; an open point of the report names it.
    """

    def __init__(self, message: str, finding: str = "rows of a microbatch were not independent of each other") -> None:
        """Store the finding; the message may hold losses of single rows."""
        super().__init__(message)
        self.finding = finding


class RowMaker:
    """Makes the rows of a check, each separately and from one random state, and compares rows that are made again.

    Args:
        rows: rows of the run.
        seed: seed of the random state.

    Attributes:
        seed: seed of the random state.
        inputs: the rows by number, as the collator first returned them.
        is_drawn: whether a row was made with numbers of the global generators.
    """

    def __init__(self, rows: TrainingRows, seed: int) -> None:
        """Start without rows."""
        self._rows, self.seed = rows, seed
        self._records: dict[int, Any] = {}
        self.inputs: dict[int, Mapping[str, Any]] = {}
        self.is_drawn = False

    def read(self, number: int) -> Any:
        """Read and return the record of a row."""
        return self._rows.fetch(np.array([number]))[0]

    def make(self, number: int) -> Mapping[str, Any]:
        """Return the inputs of a row, which is made only once."""
        if number not in self.inputs:
            with same_randomness(self.seed):
                before = generator_states()
                self._records[number] = self.read(number)
                self.is_drawn |= generator_states() != before
            with same_randomness(self.seed):
                self.inputs[number] = self._rows.collate.row(self._records[number])
                self.is_drawn |= generator_states() != before
        return self.inputs[number]

    def make_again(self, number: int) -> None:
        """Let the collator make a row of the sample again, from the same record and the same random state.

        Raises:
            IndependenceError: the values of the row differ from the first ones.
        """
        with same_randomness(self.seed):
            if not same_values(self.inputs[number], self._rows.collate.row(self._records[number])):
                raise IndependenceError(UNSTEADY)

    def refuse_seeds(self, number: int) -> None:
        """Check that the collator leaves the generators in a state that depends on the previous one.

        Raises:
            IndependenceError: the collator sets a seed.
        """
        after = []
        for seed in (self.seed, seed_between(0, 1)):
            with same_randomness(seed):
                self._rows.collate.row(self._records[number])
                after.append(generator_states())
        if names := [name for name, state in after[0].items() if state == after[1][name]]:
            raise IndependenceError(SEEDED.format(names=f"{' and '.join(names)} global generator"))


@dataclass(frozen=True)
class Company:
    """Rows that pass through the model together.

    Attributes:
        numbers: their row numbers.
        words: description of the other rows and the previous pass.
    """

    numbers: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class Sample:
    """The rows of a check.

    Attributes:
        short: number of the shortest row.
        longest: number of the longest row that fits into a microbatch by itself.
        companies: the passes of the check: the shortest row alone, then with other rows, then with others in a
            different order. In one of a first check it occurs twice: two equal records are ordinary, and a loss may
            count them. Where several rows never pass together, the passes only alternate.
        between: numbers of rows that are made again before the shortest row passes again.
    """

    short: int
    longest: int
    companies: tuple[Company, ...]
    between: tuple[int, ...]

    @property
    def alone(self) -> Company:
        """The pass of the shortest row alone."""
        return self.companies[0]

    @property
    def together(self) -> Company | None:
        """The first pass of several rows; None: rows never pass together."""
        return next((one for one in self.companies if len(one.numbers) > 1), None)

    @property
    def pair(self) -> Company | None:
        """The shortest row and another one of `together`."""
        words = "in a batch with another row and other random numbers"
        return None if self.together is None else Company((self.short, self.together.numbers[1]), words)

    @classmethod
    def draw(
        cls, rows: TrainingRows, maker: RowMaker, max_tokens: int | None, wanted: int, first: bool, crowd: int = 0
    ) -> Sample:
        """Choose rows with the operating system's randomness, within the limits of a microbatch, and make them.

        The number of passes does not depend on the draw: other processes draw other rows, and wait for each pass.

        Args:
            rows: rows of the run.
            maker: makes the rows.
            max_tokens: the largest number of tokens of a microbatch. None: ``rows.max_rows`` bounds it.
            wanted: the largest number of rows of a pass.
            first: whether the check is as complete as the first one of a process.
            crowd: rows of a process in a step, for one pass that is as large as a microbatch. 0: no such pass.
        """
        rng = np.random.default_rng(secrets.SystemRandom().getrandbits(128))
        numbers = _some(rows.units.rows, rng)
        lengths = np.maximum(1, rows.lengths[numbers])
        room = math.inf if max_tokens is None else max_tokens
        shortest = numbers[_smallest(lengths, _SEARCHED)].tolist()
        longest = int(numbers[::-1][np.where(lengths <= room, lengths, 0)[::-1].argmax()])  # the last of equal ones
        maker.make(longest)  # before all others: a collator may pad to the longest row so far
        short = next((n for n in shortest if _has_target(maker.make(n))), shortest[0])

        def size(most: int) -> int:
            """Return for how many rows, ``most`` or fewer, a microbatch with the shortest one has room."""
            most = min(most, len(numbers) if rows.max_rows is None else rows.max_rows)
            return max(1, int(min(most, room / max(1, int(rows.lengths[short])))))

        def fitting(count: int, without: Sequence[int] = ()) -> np.ndarray:
            """Return the rows that fit into a pass of ``count`` rows."""
            return numbers[(lengths <= room / count) & ~np.isin(numbers, without)]

        def filled(count: int, begin: Sequence[int]) -> list[int]:
            """Return these rows, where they fit into a pass of ``count`` rows, filled up with random ones."""
            begin, left = [n for n in begin if rows.lengths[n] <= room / count], fitting(count, begin)
            return [*begin, *rng.choice(left, max(0, min(len(left), count - len(begin))), replace=False).tolist()]

        most = size(wanted)
        together = filled(most, [short]) if most > 1 else [short]
        other = together[1:2]
        equal = ""
        if len(together) > 2:
            together[-1], equal = short, ", one of them identical"
        passes = [Company((short,), "alone")]
        if len(together) > 1:
            passes.append(Company(tuple(together), f"in a batch with {len(together) - 1} other row(s){equal}"))
        few = min(most, 3 if wanted > 2 else 2)
        if len(left := fitting(few, together)) and few > 1:
            left = left if first else rng.choice(left, min(4, len(left)), replace=False)
            replaced = (int(left[rows.lengths[left].argmax()]), *(other if few > 2 else ()), short)
        else:
            replaced = (*other, short)
        if len(replaced) > 1:
            words = f"in a batch with {len(replaced) - 1} replaced, longer row(s), in another order"
            passes += [Company(replaced, words), Company(replaced[:1], "alone")]
        if (whole := size(crowd)) > most and len(crowded := filled(whole, together[: -1 if equal else None])) > most:
            words = f"in a batch with {len(crowded) - 1} other row(s), as in a whole microbatch"
            passes.append(Company(tuple(crowded), words))
        if first and most > 1 and not equal:
            passes.append(Company((short, short), "in a batch with an identical row"))
        if other and (equal or first):
            passes.append(Company((other[0],), "alone"))
        if len(passes) < 3:
            rest = fitting(1, [short, longest])
            passes += _lone(short, int(rng.choice(rest)) if len(rest) else short, longest)
        between = list(dict.fromkeys(n for one in passes for n in one.numbers if n != short)) or [short]
        for number in between:
            maker.make(number)
        return cls(short, longest, tuple(passes), tuple(between[: _MADE_BETWEEN if first else 1]))


def _lone(short: int, other: int, longest: int) -> list[Company]:
    """Return passes of one row each: the only remaining risk is state that is carried from pass to pass."""
    passes = []
    for before in (other, longest):
        passes += [Company((before,), "alone"), Company((short,), "alone, after another row")]
        passes.append(Company((short,), "alone, after itself"))  # finds what changes with every second call
    for after in (other, short):  # the shortest row may reset the state that others left
        passes.append(Company((longest,), "alone, after another row"))
        passes.append(Company((after,), "alone, after the longest row"))
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


# ------------------------------------------------------------- rows of a data set that depend on earlier reads


def carries(read: Callable[[int], Any], row: int, others: tuple[int, int]) -> bool:
    """Return whether the values of a row depend on the row that was read before it.

    Reads four rows. Only if the row differs, further comparisons distinguish an effect of the previous row from numbers
    that the data set itself draws at each read, for instance with `random.SystemRandom`.

    Args:
        read: returns the values of a row by its number.
        row: the row that is compared.
        others: two rows, read before it in turn.
    """
    seed = seed_between(0, 1)

    def after(other: int) -> Any:
        with same_randomness(seed):
            read(other)
        with same_randomness(seed):
            return read(row)

    expected = [after(other) for other in others]
    if same_values(*expected):
        return False
    order = [0, 1] * _CONFIRMED
    secrets.SystemRandom().shuffle(order)  # the data set may count its calls
    return all(same_values(after(others[place]), expected[place]) for place in order)


def refuse_reading(read: Callable[[int], Any], num_rows: int) -> None:
    """Check a data set whose rows are read once, in order, and stored.

    Args:
        read: returns the values of a row by its number.
        num_rows: number of rows.

    Raises:
        DataError: a row depends on the row that was read before it, or is made with random numbers.
    """
    rows = secrets.SystemRandom().sample(range(num_rows), min(num_rows, _READ))
    for place, row in enumerate(rows):
        if len(rows) > 1 and carries(read, row, (rows[place - 1], row)):
            raise DataError(CARRIED)
        if is_drawn(read, row):
            raise DataError(DRAWN)


def is_drawn(read: Callable[[int], Any], row: int) -> bool:
    """Return whether a row is made with random numbers: global ones change it, or it has its own."""
    found = []
    for part in range(_STATES):
        with same_randomness(seed_between(part / _STATES, (part + 1) / _STATES)):
            found.append(read(row))
    return not all(same_values(one, found[0]) for one in found[1:])
