"""Facts that processes compare: equal for equal settings, and different for an honest mistake on one machine."""

import dataclasses
import functools
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from dpllm.data.units import UnitIndex
from dpllm.training.checks.agreement import contents, described
from dpllm.training.rows import TrainingRows
from tests.mutations import kills

LENGTHS = np.full(4, 3)


@dataclasses.dataclass
class Padding:
    pad_token_id: int = 0
    inner: Any = None

    def __call__(self, given):
        return {"input_ids": torch.tensor([row["input_ids"] for row in given]) + self.pad_token_id}


class Cutting:
    """A collator with a setting, a cache and what only its process knows."""

    def __init__(self, longest):
        self.longest, self.cache, self.rank, self._calls = longest, object(), longest, object()

    def __call__(self, given, more=None):
        return {"input_ids": torch.tensor([row["input_ids"][: self.longest] for row in given])}


def fetch(numbers):
    return [{"input_ids": [1, 2, int(number)]} for number in numbers]


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({"b", "a"}, {"a", "b"}, {"a"}),
        ({1: [2.5, None]}, UserDict({1: (2.5, None)}), {1: [2.5, 0]}),
        (np.int64(1), np.int64(1), np.int64(2)),
        (np.arange(3), np.arange(3), np.arange(1, 4)),
        (torch.tensor(0.1), torch.tensor(0.1), torch.tensor(0.2)),
        (Padding(), Padding(), Padding(1)),
        (Padding(inner=Cutting(4)), Padding(inner=Cutting(4)), Padding(inner=Cutting(5))),
        (Cutting(4).__call__, Cutting(4).__call__, Cutting(5).__call__),
        (functools.partial(Cutting(4), more=1), functools.partial(Cutting(4), more=1), functools.partial(Cutting(4))),
        (fetch, fetch, contents),
    ],
)
def test_a_description_is_equal_for_equal_settings_only(one, same, other):
    """It names no address of memory, so it is the same in every process."""
    assert described(one) == described(same) != described(other)
    assert " at 0x" not in described(one)


FACTS = {
    "the collator": {"collate": Cutting(1000)},
    "the bound max_rows of a microbatch": {"max_rows": 5},
    "the rows' lengths and units": {"lengths": np.array([3, 3, 3, 4])},
    "the rows as the collator leaves them": {"collate": Padding(1)},
    "the rows' contents or their order": {"fetch": lambda numbers: fetch(3 - numbers)},
}


@kills(
    "the rows after collation are not compared between processes",
    "dpllm/training/checks/agreement.py",
    "            _add(digest, dict(",
    "            (dict(",
)
@kills(
    "the rows' contents are not compared between processes",
    "dpllm/training/checks/agreement.py",
    "            _add(digest, row)\n",
    "            pass\n",
)
@pytest.mark.parametrize("name", FACTS)
def test_rows_that_differ_on_one_machine_differ_in_the_fact_that_says_so(name):
    """Another tokenizer or padding token shows after collation."""
    given = {"units": UnitIndex.one_row_per_unit(4), "lengths": LENGTHS, "fetch": fetch, "collate": Padding()}
    given |= {"max_rows": 4}
    facts, others = TrainingRows(**given).facts(), TrainingRows(**given | FACTS[name]).facts()
    assert facts[name] != others[name] and facts == TrainingRows(**given).facts()


@pytest.mark.parametrize("kind", [list, np.array, lambda texts: np.array(texts, dtype=object)])
def test_the_hash_of_rows_takes_text_in_any_form(kind):
    """Also as arrays, whose entries are no numbers."""

    def read(last):
        return lambda numbers: [{"text": kind(["a", last])} for _ in numbers]

    assert contents(LENGTHS, read("b")) == contents(LENGTHS, read("b")) != contents(LENGTHS, read("c"))


def test_the_first_row_with_other_columns_or_other_counts_is_named():
    """None, where all rows are like the first."""
    given = [{"input_ids": [7, 1]}, {"input_ids": [7, 2]}, {"input_ids": [7, 7]}, {"input_ids": [7], "more": 1}]

    def some(count):
        units, lengths = UnitIndex.one_row_per_unit(count), np.array([2, 2, 2, 1])[:count]
        return TrainingRows(units, lengths, lambda numbers: [given[number] for number in numbers], Padding(), 4)

    assert (some(4).other_columns, some(3).other_columns) == (3, None)
    assert (some(4).first_with_other_counts([7]), some(2).first_with_other_counts([7])) == (2, None)
