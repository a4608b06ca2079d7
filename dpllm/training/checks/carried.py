"""Values of a row that depend on the row made before it: tokens that a collator or a data set carries between calls.

Place in the flow: below `dpllm.training.checks.independence`. A collator that puts left-over tokens of one call into
the next, and a data set that begins a row with the end of the row read before, couple rows of different microbatches.
With one row per microbatch, no comparison of a row alone and in a batch shows this.

One row is made after a first row and after a second one, from the same random state, and its values are compared. The
user's functions are only called, as a training calls them. Nothing of what they store is read, written or restored.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpllm.data.records import DataError
from dpllm.data.transfer import own_copy
from dpllm.training.checks.companies import Sample
from dpllm.training.checks.repeatable import same_randomness, seed_between
from dpllm.training.checks.sharing import same_values

if TYPE_CHECKING:
    from dpllm.training.rows import TrainingRows

COLLATOR, DATA_SET = "The collator", "The data set"
_STATES = 8  # random states: an effect in at least one of eight readings is found with certainty
_READ = 4  # rows that are read again
_CONFIRMED = 12  # more comparisons of each kind, before a difference counts: numbers of a collator's own give 2^-23
_REPEATS = 3

CARRIED = (
    "{who} gives a row other values after another row was {done} before it: it carries tokens or numbers from one call "
    "to the next. Which row comes before depends on the units that are drawn, so a unit cannot be bounded, and ε would "
    "not hold. Make each row from that row only; to fill rows up, join the texts of one record before the training"
)
UNSTEADY = (
    "The collator gives a row other values each time, also from the same random state, so it draws from numbers of its "
    "own, or takes values in turn (itertools.cycle, a generator). Confirm that it draws them afresh for each row, from "
    "the operating system's randomness: which call a row gets depends on the units that are drawn"
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


def carried_by(rows: TrainingRows, sample: Sample) -> str | None:
    """Return a message if the data set or the collator carries something from one call to the next.

    Args:
        rows: rows of the run.
        sample: rows of the check; its shortest row and a long one are made after others.
    """

    def read(number: int) -> Any:
        return rows.fetch(np.array([number]))[0]

    def length(number: int) -> int:
        return int(rows.lengths[number])

    for who, done, make in ((DATA_SET, "read", read), (COLLATOR, "collated", _collating(rows, sample))):
        for row in dict.fromkeys((sample.together[0], max(sample.rows, key=length))):
            others = sorted({*sample.before, row}, key=lambda number: (number == row, -length(number)))
            if len(others) > 1 and after_others(make, row, (others[0], others[-1])):
                return CARRIED.format(who=who, done=done)
    return None


def doubts(rows: TrainingRows, sample: Sample) -> Iterator[str]:
    """Yield open points of the report: rows whose own random numbers hide what else they depend on."""
    if rows.max_rows == 1 and not is_steady(_collating(rows, sample), sample.together[0]):
        yield UNSTEADY
    if not sample.refetched:
        yield REREAD


def _collating(rows: TrainingRows, sample: Sample) -> Callable[[int], Any]:
    return lambda number: rows.collate([own_copy(sample.rows[number])])  # collators may modify rows


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
        if len(rows) > 1 and after_others(read, row, (rows[place - 1], row)):
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


def is_steady(make: Callable[[int], Any], row: int) -> bool:
    """Return whether a row is made alike several times in a row, from the same random state.

    Args:
        make: the number of a row to its values.
        row: the row.
    """
    seed, found = seed_between(0, 1), []
    for _ in range(_REPEATS):
        with same_randomness(seed):
            found.append(make(row))
    return all(same_values(one, found[-1]) for one in found[1:])  # the first may follow another row


def after_others(make: Callable[[int], Any], row: int, others: Sequence[int]) -> bool:
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
