"""Tests of dpllm.audit.canaries: the texts of canaries."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dpllm.audit.bounds import AuditError
from dpllm.audit.canaries import distinct, random_tokens, rare_suffix, readable_tokens, sampled
from tests.small_model import WORDS


@pytest.fixture(scope="module")
def tokenizer(base_model: Path):
    return AutoTokenizer.from_pretrained(base_model)


@pytest.fixture(scope="module")
def model(base_model: Path):
    return AutoModelForCausalLM.from_pretrained(base_model)


def test_readable_tokens_survive_decoding(tokenizer):
    """Any string of them is a text that can be encoded and decoded again; special tokens are none of them."""
    tokens = readable_tokens(tokenizer)
    assert not set(tokens) & set(tokenizer.all_special_ids) and len(tokens) > 100
    for start in range(0, len(tokens), 20):
        text = tokenizer.decode(tokens[start : start + 20])
        assert "\ufffd" not in text and text.isprintable()
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_random_tokens_are_uniform(tokenizer):
    """Each readable token is drawn about equally often, the length is as asked, and a prefix is split off."""
    tokens = readable_tokens(tokenizer)
    pairs = random_tokens(tokenizer, (2, 6), np.random.default_rng(0))(2000)
    assert all(prefix and text for prefix, text in pairs[:50])
    letters = Counter(text[-1] for _, text in pairs if len(text) > 1)
    expected = Counter(tokenizer.decode([token]).strip()[-1] for token in tokens)
    for letter, count in expected.items():
        assert letters[letter] / len(pairs) == pytest.approx(count / len(tokens), abs=0.02)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in pairs]
    assert np.mean(lengths) == pytest.approx(6, abs=1)


def test_rare_tokens_are_those_that_public_text_lacks(tokenizer):
    """No suffix holds a word of the public text; every prefix is the beginning of one."""
    public = [" ".join(WORDS), "a red house"]
    for prefix, text in rare_suffix(tokenizer, (3, 5), public, np.random.default_rng(0))(100):
        assert any(line.startswith(prefix) for line in public) and not set(text.split()) & set(WORDS)


def test_samples_are_the_models_own(model, tokenizer):
    """Near temperature 0 the sample is the likeliest readable token at each position; above, the seed decides."""
    ((_, text),) = sampled(model, tokenizer, (0, 6), 1e-4, seed=1)(1)
    ids, allowed = [tokenizer.bos_token_id], readable_tokens(tokenizer)
    for _ in range(6):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(allowed[int(logits[allowed].argmax())])
    assert text == tokenizer.decode(ids[1:]).strip()
    hot = [sampled(model, tokenizer, (2, 4), 1.5, seed=seed)(70) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2] and len(set(hot[0])) > 60


def test_the_temperature_is_that_of_the_distribution(model, tokenizer):
    """First tokens follow the softmax of the logits over the temperature."""
    allowed = readable_tokens(tokenizer)
    logits = model(input_ids=torch.tensor([[tokenizer.bos_token_id]])).logits[0, -1, allowed].detach()
    scaled = 8 * model.lm_head.weight.detach()
    sharper = AutoModelForCausalLM.from_config(model.config)
    sharper.load_state_dict({**model.state_dict(), "lm_head.weight": scaled})
    found = Counter(text for _, text in sampled(sharper, tokenizer, (0, 1), 4.0, seed=0)(3000))
    for token, p in zip(allowed, (2 * logits).softmax(-1).tolist(), strict=True):
        if p > 0.01:
            assert found[tokenizer.decode([token]).strip()] / 3000 >= 0.7 * p


@pytest.mark.parametrize(("special", "message"), [(False, "fewer than two tokens"), (True, "bos_token or eos_token")])
def test_tokenizers_that_will_not_do(model, tokenizer, special, message):
    """One without readable tokens, and one without a beginning."""
    if special:
        bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>")
        with pytest.raises(AuditError, match=message):
            sampled(model, bare, (0, 4), 1.0, seed=0)
        return
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"\n": 0, "\x07": 1}, unk_token="\n")))
    with pytest.raises(AuditError, match=message):
        readable_tokens(empty)


def test_no_canary_is_made_twice():
    """Texts that repeat are drawn again, empty ones too; when nothing new comes, that is an error."""
    numbers = itertools.chain(["a", "a", "", "b"], itertools.repeat("b"))
    assert distinct(lambda num: [("", next(numbers)) for _ in range(num)], 2) == [("", "a"), ("", "b")]
    with pytest.raises(AuditError, match="2 canaries"):
        distinct(lambda num: [("", "b")] * num, 2)
