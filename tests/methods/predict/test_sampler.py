"""Tests of dpllm.methods.predict.sampler and prompts: neighbours through a real model, and the end of a text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from dpllm.config import ConfigError
from dpllm.methods.predict import sampler as module
from dpllm.methods.predict.inputs import Template
from dpllm.methods.predict.sampler import GroupSampler, Scoring, TextLimits
from tests.mutations import kills
from tests.small_model import save_small_model

RECORDS = [["the small dog"], ["a red house and the old man"], ["one bridge"], ["seven clouds under one bridge"]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A small model that is sure of its tokens, with its tokenizer."""
    folder = save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.lm_head.weight.data *= 40
    return model, AutoTokenizer.from_pretrained(folder)


def sampler_of(loaded, scoring=None, **limits):
    scoring = scoring or Scoring(clip=2.0, units=4, temperature=1.0, around_public=True)
    return GroupSampler(*loaded, scoring, TextLimits(**{"max_new_tokens": 5, **limits}), 12)


@pytest.fixture
def drawn(monkeypatch):
    """Keep the log-weights of every token; draw the likeliest."""
    seen = []

    def likeliest(log_weights):
        seen.append(log_weights)
        return int(log_weights.argmax())

    monkeypatch.setattr(module, "draw_index", likeliest)
    return seen


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(clip=2.0, units=4, temperature=1.0, around_public=True),
        Scoring(clip=2.0, units=4, temperature=1.0, around_public=True, top_k=20),
        Scoring(clip=2.0, units=4, temperature=1.0),
    ],
)
@pytest.mark.parametrize("one", [["clouds"], ["the old man", "walks over one bridge", "red"], ["seven clouds"]])
def test_neighbours_through_model_and_tokenizer(loaded, drawn, scoring, one):
    """Take a unit away, of one or of several records: log-probabilities move within a range of 2c/(sτ)."""
    limited = sampler_of(loaded, scoring, max_new_tokens=1, rows_per_unit=3)
    for group in ([*RECORDS[:3], one], RECORDS[:3]):
        limited.text(group, "the")
    logs = [log_weights - np.log(np.exp(log_weights).sum()) for log_weights in drawn]
    finite = np.isfinite(logs[0])
    assert (finite == np.isfinite(logs[1])).all()  # the set of tokens is public
    moved = logs[0][finite] - logs[1][finite]
    assert 0 < moved.max() - moved.min() <= 2 / scoring.noise_multiplier


@kills(
    "the number of a user's records shows in the shape of a pass",
    "dpllm/methods/predict/sampler.py",
    "            empty = most - len(unit)",
    "            empty = 0 if unit else most",
)
def test_the_rows_of_the_passes_are_public(loaded, monkeypatch):
    """Users with other numbers of records, or none, leave the shapes of all passes and the places of others alone."""
    given = []

    class Kept(module.Continuation):
        def __init__(self, model, rows, *others):
            given.append(rows)
            super().__init__(model, rows, *others)

    monkeypatch.setattr(module, "Continuation", Kept)
    limited = sampler_of(loaded, max_new_tokens=1, rows_per_unit=3, rows_per_pass=5)
    three = ["the small dog", "one bridge", "red"]
    for one in (three, three[:1], []):
        limited.text([["seven clouds"], one, three, ["a house"]], "the")
    first, second, third = given[::2]  # the others are of the public model
    assert len(first) == len(second) == len(third) == 4 * 3
    for other in (second, third):
        assert {place for place in range(12) if other[place] != first[place]} <= {3, 4, 5}
    with pytest.raises(ValueError, match="4 records"):
        limited.text([[*three, "old"]], "the")


def test_rows_continue_with_the_same_tokens(loaded, drawn):
    """Against the model on each whole row, one at a time."""
    model, _ = loaded
    limited = sampler_of(loaded, rows_per_pass=3)
    limited.text(RECORDS, "the")
    public = limited._row("", limited._public.encoded("the"))
    rows = [limited._row(one[0], limited._public.encoded("the")) for one in RECORDS]
    scoring, tokens = limited._scoring, []
    for found in drawn:
        with torch.no_grad():
            logits = [model(torch.tensor([[*row, *tokens]])).logits[0, -1].double() for row in (public, *rows)]
        mean = logits[0] + sum((one - logits[0]).clamp(-2, 2) for one in logits[1:]) / scoring.units
        assert np.allclose(found, (mean - mean.max()).numpy(), atol=1e-3)
        tokens.append(int(found.argmax()))
    assert 1 <= len(tokens) <= 5


def test_a_text_has_at_most_its_tokens_and_ends_before_the_stop(loaded, monkeypatch):
    """The end of a text is a public rule about the tokens drawn."""
    _, tokenizer = loaded
    word, end = tokenizer(" dog", add_special_tokens=False)["input_ids"][0], tokenizer.eos_token_id
    monkeypatch.setattr(module, "draw_index", lambda _: word)
    full = sampler_of(loaded).text(RECORDS, "the")
    assert len(tokenizer(full, add_special_tokens=False)["input_ids"]) == 5
    stop = full[2:4]
    assert sampler_of(loaded, stop=stop).text(RECORDS, "the") == full[: full.index(stop)]
    tokens = iter([word, end])
    monkeypatch.setattr(module, "draw_index", lambda _: next(tokens))
    assert sampler_of(loaded).text(RECORDS, "the") == tokenizer.decode([word])


def test_more_units_than_the_public_size(loaded):
    """The average would move further than is charged."""
    with pytest.raises(ValueError, match="public size"):
        sampler_of(loaded, Scoring(2.0, 3, 1.0, True)).text(RECORDS, "the")


def test_no_room_for_the_tokens(loaded):
    """Refused before anything is charged."""
    with pytest.raises(ConfigError, match="sees 64"):
        sampler_of(loaded, max_new_tokens=60).require_room(["the"])


def test_an_encoder_with_a_decoder(loaded):
    """Its context is not a prefix of the text."""
    model = T5ForConditionalGeneration(T5Config(vocab_size=320, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(ConfigError, match="causal language model"):
        sampler_of((model, loaded[1]))


def test_templates():
    """Columns by name, and nothing else of a record or of Python."""
    template = Template("{mr} -> {ref}{", ["mr", "ref"])
    assert template.of({"mr": "{ref}", "ref": None}) == "{ref} -> {"
    with pytest.raises(ConfigError, match="mean 'ref"):
        Template("{reff}", ["mr", "ref"])
    with pytest.raises(ConfigError, match="names no column"):
        Template("{} {0.__class__}", ["mr"])
