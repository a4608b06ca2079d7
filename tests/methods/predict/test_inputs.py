"""Inputs of private prediction: disjoint secret groups, and models whose rows are independent."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from dpllm.config import ConfigError
from dpllm.methods.predict.inputs import checked_groups, require_independent_rows, secret_groups
from dpllm.models.writing import Continuation
from tests.conftest import tiny_llama_config
from tests.mutations import kills


def test_groups_are_disjoint_and_secret():
    """They cover what they need, and two divisions differ."""
    one, other = (secret_groups(1000, 30, 33) for _ in range(2))
    units = np.concatenate(one)
    assert len(one) == 33 and all(len(group) == 30 for group in one)
    assert len(np.unique(units)) == 990 and units.min() >= 0 and units.max() < 1000
    assert any((first != second).any() for first, second in zip(one, other, strict=True))


def test_every_unit_is_as_likely_to_be_used():
    """A group of half of the units."""
    counts = sum(np.bincount(secret_groups(10, 5, 1)[0], minlength=10) for _ in range(2000))
    assert counts.min() > 800 and counts.max() < 1200


@pytest.mark.parametrize(("num_units", "size", "count"), [(10, 6, 2), (10, 0, 1), (10, 5, 0)])
def test_too_few_units(num_units, size, count):
    """A unit is never used twice to fill a group."""
    with pytest.raises(ValueError, match="cannot be in two groups"):
        secret_groups(num_units, size, count)


@kills(
    "a unit may be in two groups of a private prediction",
    "dpllm/methods/predict/inputs.py",
    "if len(np.unique(units)) < len(units):",
    "if False:",
)
@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0, 0], [1, 2]]])
def test_a_record_in_two_groups_is_refused(groups):
    """Planted: parallel composition would not hold."""
    with pytest.raises(ValueError, match="two groups"):
        checked_groups([np.array(group) for group in groups])


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config(vocab_size=48, initializer_range=0.3)).eval()


class _Coupled(nn.Module):
    """Subtracts the mean over the rows of a pass, as batch norm does."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, **inputs):
        found = self.inner(**inputs)
        found.logits = found.logits - found.logits.mean(dim=0)
        return found


class _Forgetful(_Coupled):
    """Ignores its cache."""

    def forward(self, **inputs):
        for name in ("cache", "past_key_values"):  # the second before transformers 5.24
            inputs.pop(name, None)
        length = inputs["input_ids"].shape[1]
        inputs["attention_mask"] = inputs["attention_mask"][:, -length:]
        return self.inner(**inputs)


class _ByTheLongest(_Coupled):
    """Scales short rows by the longest row of a pass, and the longest row by nothing."""

    def forward(self, **inputs):
        found = self.inner(**inputs)
        tokens_R = inputs["attention_mask"].sum(dim=1)
        found.logits = found.logits * (tokens_R / tokens_R.max())[:, None, None]
        return found


class Linear8bitLt(nn.Module):
    """Stands in for the module of bitsandbytes, whose outlier columns are chosen over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(threshold=6.0)


@kills(
    "a model whose rows depend on each other predicts privately",
    "dpllm/methods/predict/inputs.py",
    "if not apart <= _RELATIVE:",
    "if False:",
)
def test_independence_is_measured():
    """A model whose rows couple, and one whose cache is wrong, are refused; a sound one passes."""
    require_independent_rows(llama(), 8, 4, 2)
    with pytest.raises(ConfigError, match="on the other rows"):
        require_independent_rows(_Coupled(copy.deepcopy(llama())), 8, 4, 2)
    with pytest.raises(ConfigError, match="on the other rows"):
        require_independent_rows(_ByTheLongest(llama()), 8, 4, 2)
    coarse = llama()
    coarse.model.layers[0].mlp.up_proj = Linear8bitLt()
    with pytest.raises(ConfigError, match="up_proj"):
        require_independent_rows(coarse, 8, 4, 2)
    with pytest.raises(ConfigError, match="on the cache"):
        require_independent_rows(_Forgetful(llama()), 8, 4, 2)


def test_position_embeddings_that_follow_the_longest_row_are_refused_by_name():
    """With longrope, a record beyond the first length moved the logits of the short rows beside it by 85 %."""
    rope = {
        "rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    }  # fmt: skip
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = tiny_llama_config(vocab_size=48, initializer_range=0.3, rope_parameters=rope, **sizes)
    model = LlamaForCausalLM(config).eval()

    def beside(other):
        return next(Continuation(model, [list(range(12)), list(range(other))], 40, 2).logits())[1][0]

    assert (beside(40) - beside(12)).abs().max() > 0.1 * beside(12).abs().max()
    with pytest.raises(ConfigError, match="41 tokens"):
        require_independent_rows(model, 40, 4, 1)
    require_independent_rows(model, 14, 4, 2)


def test_experts_with_a_capacity_are_refused_by_name():
    """Tokens of other rows use it up; public tokens need not show that."""
    model = llama()
    model.model.layers[0].mlp.expert_capacity = 4
    with pytest.raises(ConfigError, match="drops"):
        require_independent_rows(model, 8, 2, 2)
