"""Perplexity and accuracy follow their definitions."""

import math

import datasets
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from dpllm.data.rows import DataError, RowCollator
from dpllm.training.evaluation import measure

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def llama(kind, **values):
    torch.manual_seed(0)
    return kind.from_config(AutoConfig.for_model("llama", vocab_size=20, pad_token_id=0, **SIZES, **values))


def rows(*examples):
    return datasets.Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in examples])


@pytest.mark.parametrize("max_rows", [1, 2, 64])
def test_perplexity_weighs_every_target_the_same(max_rows):
    """Batching, padding and the order of rows change nothing; masked tokens do not count."""
    model = llama(AutoModelForCausalLM)
    data = rows(([1, 5, 6, 7, 8], [-100, -100, 6, 7, 8]), ([1, 9], [1, 9]), ([1, 3, 3], [1, 3, 3]))
    losses = []
    for row in data:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        losses += nn.functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="none").tolist()
    losses = [loss for loss in losses if loss != 0.0]
    assert len(losses) == 6
    model.train()
    result = measure(model, data, RowCollator(pad_token_id=0), max_rows=max_rows)
    assert result.name == "perplexity" and model.training
    assert result.loss == pytest.approx(sum(losses) / 6, rel=1e-5)
    assert result.value == pytest.approx(math.exp(sum(losses) / 6), rel=1e-5)
    own = [sum(losses[:3]) / 3, losses[3], sum(losses[4:]) / 2]
    assert result.row_loss == pytest.approx(sum(own) / 3, rel=1e-5)


def test_accuracy_is_the_share_of_rows_classified_correctly():
    """Every record counts once."""
    model = llama(AutoModelForSequenceClassification, num_labels=3)
    ids = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    guesses = [int(model(input_ids=torch.tensor([row])).logits.argmax()) for row in ids]
    labels = [guesses[0], guesses[1], guesses[2], (guesses[3] + 1) % 3]
    result = measure(
        model, rows(*zip(ids, labels, strict=True)), RowCollator(pad_token_id=0, task="sequence_classification")
    )
    assert (result.name, result.value) == ("accuracy", 0.75)


def test_an_encoder_decoder_is_measured_on_its_labels():
    """Labels of an encoder-decoder are not shifted."""
    torch.manual_seed(0)
    config = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("t5", vocab_size=20, pad_token_id=0, **config)
    ).eval()
    data = rows(([3, 4], [5, 6, 7]), ([3], [8]))
    losses = [
        float(model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.detach())
        for row in data
    ]
    result = measure(model, data, RowCollator(pad_token_id=0, task="seq2seq_lm"))
    assert result.loss == pytest.approx((3 * losses[0] + losses[1]) / 4, rel=1e-5)


def test_rows_without_a_target_are_refused():
    """A data set without targets has no figure."""
    with pytest.raises(DataError, match="no held-out row has a target"):
        measure(llama(AutoModelForCausalLM), rows(([1, 2], [-100, -100])), RowCollator(pad_token_id=0))


class Rank:
    """One of several processes, simulated in turn: records its summands, and gets the sum of all the second time."""

    def __init__(self, rank, size, everybodys=()):
        self.rank, self.size, self.everybodys, self.own = rank, size, everybodys, None

    def sum(self, values):
        self.own = values
        return [sum(column) for column in zip(*self.everybodys, strict=True)] or values


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_rows_divided_over_processes_count_once(task, size):
    """The figure is that of one process, and every process runs the model equally often, also one without rows."""
    if task == "causal_lm":
        model = llama(AutoModelForCausalLM)
        data = rows(*(([1, 5, 6, 7, 8][:n], [1, 5, 6, 7, 8][:n]) for n in (5, 2, 3, 4, 5, 2, 3)))
    else:
        model = llama(AutoModelForSequenceClassification, num_labels=2)
        data = rows(*(([1, 5, 6, 7, 8][:n], n % 2) for n in (5, 2, 3, 4, 1, 2, 3)))
    collator = RowCollator(pad_token_id=0, task=task)
    alone = measure(model, data, collator, max_rows=2)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    first = [Rank(rank, size) for rank in range(size)]
    counts = []
    for rank in first:
        passes.clear()
        measure_or_nothing(model, data, collator, rank)
        counts.append(len(passes))
    assert set(counts) == {-(-4 // size)}
    for rank in range(size):
        found = measure(model, data, collator, 2, Rank(rank, size, [other.own for other in first]))
        assert (found.name, found.value) == (alone.name, pytest.approx(alone.value, rel=1e-6))
        assert (found.loss, found.row_loss) == pytest.approx((alone.loss, alone.row_loss), rel=1e-6)


def measure_or_nothing(model, data, collator, rank):
    """One process may have no row: its own sums give no figure; only the sum over all processes does."""
    try:
        measure(model, data, collator, 2, rank)
    except DataError:
        assert rank.own == [0.0] * 4
