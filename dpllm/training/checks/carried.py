"""Values of a row that depend on the row before it: tokens that a collator or a data set carries from call to call.

Place in the flow: below `dpllm.training.checks.independence`. A collator that puts left-over tokens of one call into
the next, and a data set that begins a row with the end of the row read before, couple rows of different microbatches.
With one row per microbatch a row has no others beside it, so that nothing else shows this.

One row is made after a first row and after a second one, from the same random state. The row before is the only
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpllm.data.records import DataError
from dpllm.training.checks import choices
from dpllm.training.checks.repeatable import same_randomness, seed_between
from dpllm.training.checks.sharing import same_values

GATES = 8
"""Random states: an effect in at least one of eight calls is found with certainty."""
_READ = 4  # rows that are read again
_CONFIRMED = 12  # more comparisons of each kind, before a difference counts: numbers of a collator's own give 2^-23

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


def refuse_reading(read: Callable[[int], Any], num_rows: int) -> None:
    """Check the rows of a data set that are read once, in their order, and stored as they come out.

    Args:
        read: the number of a row to its values.
        num_rows: how many rows there are.

    Raises:
        DataError: a row depends on the row that was read before it, or is made with random numbers.
    """
    rows = choices.source().sample(range(num_rows), min(num_rows, _READ))
    for row in rows:
        others = [*(number for number in rows if number != row), row]
        if len(others) > 1 and after_others(read, row, others):
            raise DataError(CARRIED.format(who="The data set", done="read"))
        if _is_drawn(read, row):
            raise DataError(DRAWN)


def _is_drawn(read: Callable[[int], Any], row: int) -> bool:
    """Return whether a row is made with random numbers: some change it, or it has numbers of its own."""
    found = []
    for part in range(GATES):
        with same_randomness(seed_between(part / GATES, (part + 1) / GATES)):
            found.append(read(row))
    return not all(same_values(one, found[0]) for one in found[1:])


def is_steady(make: Callable[[int], Any], row: int) -> bool:
    """Return whether a row is made alike several times in a row, from the same random state.

    Args:
        make: the number of a row to its values.
        row: the row.
    """
    seed, found = seed_between(0, 1), []
    for _ in range(GATES):
        with same_randomness(seed):
            found.append(make(row))
    return all(same_values(one, found[-1]) for one in found[1:])  # the first may follow another row


def after_others(make: Callable[[int], Any], row: int, others: Sequence[int], gates: int = GATES) -> bool:
    """Return whether the values of a row depend on the row that was made before it.

    A row that is not made alike twice after the same row, from the same random state, has numbers of its own; then
    nothing is found.

    Args:
        make: the number of a row to its values.
        row: the row that is compared.
        others: rows before it, at least two different ones; two in turn for each random state.
        gates: random states.
    """

    def after(other: int, seed: int) -> Any:
        with same_randomness(seed):
            make(other)
        with same_randomness(seed):
            return make(row)

    for part in range(gates):
        seed = seed_between(part / gates, (part + 1) / gates)
        one, two = others[part % len(others)], others[(part + 1) % len(others)]
        again, first, second = after(one, seed), after(one, seed), after(two, seed)
        if not same_values(again, first) or same_values(first, second):
            continue
        order = [False, True] * _CONFIRMED
        choices.source().shuffle(order)  # calls may be counted
        if all(same_values(after(two if is_two else one, seed), second if is_two else first) for is_two in order):
            return True
    return False
