"""Extraction: verbatim training spans in a model's text."""

import datasets
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dpllm.audit.bounds import AuditError
from dpllm.config import ConfigError
from dpllm.data.rows import train_tokenizer
from dpllm.methods.attacks.extraction import (
    ExtractionSettings,
    SpanIndex,
    prefix_extraction,
    sample_hits,
    sampled_extraction,
    written,
)
from tests.conftest import tiny_llama_config


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a rose is a rose"], vocab_size=262, max_length=64)


@pytest.fixture(scope="module")
def rows():
    """Sixteen random rows; the first four tokens of each are a prompt."""
    ids = np.random.default_rng(0).integers(10, 250, size=(16, 24))
    ids[:, 0] = 1
    labels = ids.copy()
    labels[:, :4] = -100
    return datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


@pytest.fixture(scope="module")
def memorising(rows):
    """A model that was trained on the first eight rows until it knew them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama_config(vocab_size=262, hidden_size=32, intermediate_size=64))
    ids = torch.tensor(rows["input_ids"][:8])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.6  # which row it is, a model cannot know from the token all of them begin with
    return model.eval()


@pytest.mark.parametrize("span", [1, 3, 7])
def test_the_index_finds_what_a_search_finds(span):
    """No span is missed, none reaches over the end of a row, and none is made up."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 4, size=rng.integers(0, 12)).tolist() for _ in range(30)]
    index = SpanIndex(rows, span)
    spans = {tuple(row[start : start + span]) for row in rows for start in range(len(row) - span + 1)}
    assert len(index) == len(spans)
    text = [*rng.integers(0, 4, size=300).tolist(), *(token for row in rows[:9] for token in row)]
    expected = [tuple(text[start : start + span]) in spans for start in range(len(text) - span + 1)]
    assert index.find(text).tolist() == expected and any(expected)
    assert not any(SpanIndex([], span).find(text)) and index.find([]).tolist() == []


def test_equal_hashes_are_no_hit(monkeypatch):
    """Every counted span was compared token by token."""
    monkeypatch.setattr(SpanIndex, "_hashes", lambda self, tokens: np.zeros(max(0, len(tokens) - 1), dtype=np.uint64))
    assert SpanIndex([[1, 2]], span=2).find([1, 2, 3]).tolist() == [True, False]


def test_spans_are_counted_once_and_by_where_they_stand():
    """A span that is also in held-out text is not memory, and a span written twice is one span."""
    training, held_out = SpanIndex([[1, 2, 3], [4, 5]], 2), SpanIndex([[4, 5], [6, 7]], 2)
    hits = sample_hits("x", [[1, 2, 3], [9, 1, 2], [4, 5], [6, 7, 6, 7]], training, SpanIndex([[4, 5]], 2), held_out)
    assert (hits.num_samples, hits.num_tokens, hits.samples) == (4, 12, 2)
    assert (hits.training, hits.both, hits.thinned, hits.held_out) == (2, 1, 0, 1)


def test_a_model_that_knows_its_rows_continues_them_and_no_others(memorising, tokenizer, rows):
    """Prefixes tell memory from skill: nothing is guessed of random rows."""
    members, others = rows.select(range(8)), rows.select(range(8, 16))
    settings = ExtractionSettings(span=10, prefix=4)
    found = prefix_extraction(memorising, tokenizer, {"members": members, "non-members": others}, settings)
    assert [hits.num_records for hits in found] == [8, 8]
    assert found[0].continued >= 7 and found[1].continued == 0
    short = prefix_extraction(memorising, tokenizer, {"members": members}, ExtractionSettings(span=20, prefix=10))
    assert (short[0].num_records, short[0].continued) == (0, 0)


def test_samples_of_a_model_that_knows_its_rows_hold_training_spans_alone(memorising, tokenizer, rows):
    """Without a prompt it writes its rows; the kinds of prompt are separated, and the seed fixes the samples."""
    settings = ExtractionSettings(num_samples=12, new_tokens=16, span=6, temperature=0.7, repeats=5)
    arguments = (memorising, tokenizer, rows.select(range(8)), rows.select(range(8, 16)), settings)
    state = torch.random.get_rng_state()
    found = {hits.prompts: hits for hits in sampled_extraction(*arguments)}
    assert torch.equal(state, torch.random.get_rng_state())
    assert list(found) == ["nothing", "training prompts", "held-out prompts", "“company” repeated"]
    nothing = found["nothing"]
    assert nothing.num_samples == 12 and nothing.samples >= 6 and nothing.training > 20
    assert (nothing.held_out, nothing.both) == (0, 0) and nothing.thinned == nothing.training
    assert found["training prompts"].samples >= 10 and found["held-out prompts"].held_out == 0
    assert sampled_extraction(*arguments)[0] == nothing


def test_a_long_prompt_loses_its_beginning_and_a_span_that_does_not_fit_is_refused(memorising, tokenizer):
    """The model's context bounds both."""
    (text,) = written(memorising, tokenizer, [[5] * 100], 30, 20, ExtractionSettings(span=20))
    assert 0 < len(text) <= 30
    with pytest.raises(AuditError, match="too short"):
        written(memorising, tokenizer, [[5]], 64, 64, None)


def test_a_tokenizer_without_special_tokens_has_nothing_to_begin_with(memorising, tokenizer, rows):
    """Sampling from nothing needs a first token."""
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>")
    with pytest.raises(AuditError, match="beginning nor"):
        sampled_extraction(memorising, bare, rows, rows, ExtractionSettings())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_samples": 0}, "num_samples of the extraction must be at least 1"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"prefix": -1}, "cannot be negative"),
        ({"new_tokens": 10, "span": 20}, "holds no span of 20"),
        ({"word": " "}, "the word to repeat is empty"),
    ],
)
def test_settings_that_could_find_nothing_are_refused(values, message):
    """Before a model is loaded."""
    with pytest.raises(ConfigError, match=message):
        ExtractionSettings(**values)
