"""Rows that are declared public are not the rows of the private data."""

import pytest
from datasets import Dataset, concatenate_datasets

from dpllm.data.own_rows import refuse_own_rows
from dpllm.data.records import DataError

PRIVATE = Dataset.from_dict({"input_ids": [[n, n + 1, 7] for n in range(20)], "labels": [[0, 0, 0]] * 20})
PUBLIC = Dataset.from_dict({"input_ids": [[n, 8] for n in range(10)]})


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        (PRIVATE, "declares eval_dataset public, and 20 of its 20 rows"),
        (PRIVATE.select([4, 9]), "2 of its 2 rows are rows of train_dataset, which is private"),
        (PRIVATE.shuffle(seed=1).remove_columns("labels"), "20 of its 20 rows"),
        ({"val": PUBLIC, "train": PRIVATE}, r"declares eval_dataset\['train'\] public"),
        (concatenate_datasets([PRIVATE.remove_columns("labels"), PUBLIC]), "20 of its 30 rows"),
        (PRIVATE.to_list()[:3], "3 of its 3 rows"),
    ],
)
def test_training_rows_that_are_declared_public_are_refused(evaluation, says):
    with pytest.raises(DataError, match=says):
        refuse_own_rows(evaluation, PRIVATE)
    with pytest.raises(DataError, match=says):
        refuse_own_rows(evaluation, PRIVATE.to_list() if evaluation is not PRIVATE else PRIVATE)


@pytest.mark.parametrize(
    "evaluation",
    [
        None,
        PUBLIC,
        {"a": PUBLIC, "b": None},
        PUBLIC.to_list(),
        [],
        concatenate_datasets([PUBLIC, PRIVATE.select(range(9)).remove_columns("labels")]),  # short texts are in both
        [{"pixel_values": [1.0]}],
        PUBLIC.with_transform(lambda rows: rows),
    ],
)
def test_other_rows_may_be_public(evaluation):
    refuse_own_rows(evaluation, PRIVATE)


def test_rows_that_are_computed_when_read_are_recognised_as_the_same_object():
    computed = PRIVATE.with_transform(lambda rows: rows)
    with pytest.raises(DataError, match="20 of its 20 rows"):
        refuse_own_rows({"all": computed}, computed)
