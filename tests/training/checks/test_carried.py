"""Tokens and numbers that go from one row to the next through a collator, a data set or a loss are refused."""

import random

import numpy as np
import pytest
from datasets import Dataset
from transformers import TrainingArguments

from dpllm import DPTrainer, per_sequence_loss
from dpllm.data.rows import DataError, RowCollator
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.independence import IndependenceError
from tests import trl_data
from tests.mutations import kills
from tests.training.checks.test_independence import llama, trainer, unequal

COLLATE = RowCollator(pad_token_id=0)


def of_ids(rows):
    return COLLATE([{"input_ids": list(ids), "labels": list(ids)} for ids in rows])


class LeftOver:
    """Puts the last tokens of the row before in front of each row, as packing collators do with left-over tokens."""

    def __init__(self):
        self.left = [1]

    def __call__(self, rows):
        made = []
        for row in rows:
            ids = list(row["input_ids"])
            made.append([*self.left, *ids[: -len(self.left)]])
            self.left = ids[-2:]
        return of_ids(made)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_collator_that_carries_tokens_on_is_refused(batch, tmp_path):
    """The same row again and again shows nothing: the row before is then always itself."""
    with pytest.raises(IndependenceError, match="collator"):
        trainer(tmp_path, llama(), batch=batch, data_collator=LeftOver()).train()
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 1


class ReadAfter:
    """A data set whose rows begin with the end of the row read before."""

    def __init__(self, rows):
        self.rows, self.left = rows.to_list(), [1, 1]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        ids = self.rows[number]["input_ids"]
        made, self.left = [*self.left, *ids[:-2]], ids[-2:]
        return {"input_ids": made}


@pytest.mark.parametrize("batch", [1, 4])
def test_a_data_set_whose_rows_begin_with_the_row_read_before_is_refused(batch, tmp_path):
    with pytest.raises(IndependenceError, match="after it had read another row"):
        trainer(tmp_path, llama(), ReadAfter(unequal()), batch=batch).train()


def of_texts(folder, rows):
    """A trainer that makes rows of the texts of a data set."""
    args = trl_data.arguments(TrainingArguments, folder)
    return DPTrainer(trl_data.model(), args, trl_data.privacy(len(rows)), rows, processing_class=trl_data.tokenizer())


class TextAfter(ReadAfter):
    """The same with texts, which are read once."""

    def __init__(self, texts):
        self.rows, self.left = texts, ""

    def __getitem__(self, number):
        made, self.left = self.left + self.rows[number], self.rows[number][-9:]
        return {"text": made}


def mixed(batch):
    """Text of a random other row after each row."""
    return {"text": [f"{text} {random.choice(trl_data.texts(8))}" for text in batch["text"]]}


@kills(
    "texts are stored however the data set makes them",
    "dpllm/training/trainer.py",
    "if is_raw(train, rows) and not is_stored(train):",
    "if False:",
)
def test_texts_that_depend_on_those_read_before_are_refused(tmp_path):
    """They are tokenised once, so that no later check sees how they are read: the sum moved by 1.5 C and 2.4 C."""
    texts = trl_data.texts(8)
    plain = Dataset.from_dict({"text": texts})
    with pytest.raises(DataError, match="after it had read another row"):
        of_texts(tmp_path, TextAfter(texts))
    with pytest.raises(DataError, match="numbers when"):
        of_texts(tmp_path, plain.with_transform(mixed))
    for rows in (plain, plain.to_list(), plain.with_transform(lambda batch: {"text": batch["text"]})):
        assert len(of_texts(tmp_path, rows).train_dataset) == 8


class Previous:
    """Pulls a row's outputs towards those of the row before."""

    mean = None

    def __call__(self, outputs, labels):
        loss_B, mean_V = per_sequence_loss(outputs.logits, labels), outputs.logits.mean((0, 1))
        before, self.mean = mean_V.detach() if self.mean is None else self.mean, mean_V.detach()
        return loss_B + (mean_V - before).square().sum()


def test_a_loss_that_remembers_the_row_before_is_refused_with_one_row_per_microbatch(tmp_path):
    """Another row passes between two passes of the compared one: after itself its loss would always be the same."""
    with pytest.raises(IndependenceError, match="carries state"):
        trainer(tmp_path, llama(), batch=1, compute_loss_func=Previous()).train()


def masked(generator):
    def collate(rows):
        return of_ids([[4 if generator.random() < 0.4 else token for token in row["input_ids"]] for row in rows])

    return collate


class Memo:
    """Keeps the batches that it made; what it returns is a function of the row."""

    def __init__(self):
        self.made, self.last = {}, None

    def __call__(self, rows):
        key = tuple(tuple(row["input_ids"]) for row in rows)
        self.last = key
        if key not in self.made:
            self.made[key] = of_ids(key)
        return {name: value.clone() for name, value in self.made[key].items()}


@pytest.mark.parametrize(
    "collate",
    [COLLATE, masked(random), masked(np.random), Memo()],
    ids=["plain", "python", "numpy", "memo"],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_collator_of_single_rows_that_carries_nothing_on_passes(collate, batch, tmp_path):
    """With random numbers of each call, too: they are the row's own."""

    def single(rows):
        (row,) = rows  # a collator is given one row
        return collate([row])

    run = trainer(tmp_path, llama(), batch=batch, steps=2, data_collator=single)
    run.train()
    assert run.ledger.num_steps == 2
