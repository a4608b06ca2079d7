"""Rows that are declared public are not the rows of the private data."""

import pytest
from datasets import Dataset, List, Value, concatenate_datasets
from torch.utils.data import ConcatDataset, Subset

from dpllm.data.records import DataError
from dpllm.data.shared_records import refuse_own_rows
from tests.mutations import kills

PRIVATE = Dataset.from_dict({"input_ids": [[n, n + 1, 7] for n in range(20)], "labels": [[0, 0, 0]] * 20})
PUBLIC = Dataset.from_dict({"input_ids": [[n, 8] for n in range(10)]})


@kills(
    "the training rows may be declared public for evaluation",
    "dpllm/data/shared_records.py",
    "if shared and 2 * shared > len(dataset):",
    "if False:",
)
@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        (PRIVATE, "declares eval_dataset public, and 20 of its 20 rows"),
        (PRIVATE.select([4, 9]), "2 of its 2 rows are rows of train_dataset, which is private"),
        (PRIVATE.shuffle(seed=1).remove_columns("labels"), "20 of its 20 rows"),
        ({"val": PUBLIC, "train": PRIVATE}, r"declares eval_dataset\['train'\] public"),
        (concatenate_datasets([PRIVATE.remove_columns("labels"), PUBLIC]), "20 of its 30 rows"),
        (PRIVATE.to_list()[:3], "3 of its 3 rows"),
        (Subset(PRIVATE, [4, 9]), "2 of its 2 rows"),
        (Subset(PRIVATE.to_list(), [4, 9]), "2 of its 2 rows"),
        (ConcatDataset([PRIVATE, PUBLIC]), "20 of its 30 rows"),
        (PRIVATE.cast_column("input_ids", List(Value("uint16"))), "20 of its 20 rows"),
        (PRIVATE.cast_column("input_ids", List(Value("int32"), length=3)), "20 of its 20 rows"),
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
        [{"input_ids": "text"}, {"input_ids": [[1], [2, 3]]}, {"input_ids": [1, None]}],
        PUBLIC.cast_column("input_ids", List(Value("uint8"))),
        Dataset.from_dict({"input_ids": [[None], [None]]}),
        Subset(PUBLIC, [0, 1]),
        PUBLIC.with_transform(lambda rows: rows),
    ],
)
def test_other_rows_may_be_public(evaluation):
    refuse_own_rows(evaluation, PRIVATE)


def test_rows_that_are_computed_when_read_are_recognised_as_the_same_object():
    computed = PRIVATE.with_transform(lambda rows: rows)
    with pytest.raises(DataError, match="20 of its 20 rows"):
        refuse_own_rows({"all": computed}, computed)


def test_parts_of_rows_that_are_computed_are_recognised_by_their_places():
    """The two parts of a split are different rows; a part of the training data is private."""
    computed = PRIVATE.with_transform(lambda rows: rows)
    held_out, training = Subset(computed, range(5)), Subset(computed, range(5, 20))
    refuse_own_rows(held_out, training)
    for evaluation, private in ((held_out, computed), (Subset(computed, range(4, 10)), training)):
        with pytest.raises(DataError, match="eval_dataset"):
            refuse_own_rows(evaluation, private)


@kills(
    "private pairs may be declared public",
    "dpllm/data/shared_records.py",
    'sorted(name for name in row if name.endswith("_input_ids"))',
    "[]",
)
def test_pairs_of_the_private_data_are_found():
    """A row of preferences has the tokens of two answers."""
    pairs = {"chosen_input_ids": [[1, 2], [3]] * 5, "rejected_input_ids": [[3], [1, 2]] * 5}
    private = Dataset.from_dict({**pairs, "pair": range(10)})
    with pytest.raises(DataError, match="10 of its 10 rows"):
        refuse_own_rows(Dataset.from_dict({**pairs, "pair": range(10, 20)}), private)
    refuse_own_rows(Dataset.from_dict({**pairs, "rejected_input_ids": [[9]] * 10}), private)
    refuse_own_rows([{"chosen_input_ids": [1], "rejected_input_ids": [2, 3]}], private)
