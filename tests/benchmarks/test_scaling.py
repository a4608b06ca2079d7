"""benchmarks/scaling.py: a scaled model computes the same, and its gradients are the scaled ones."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.benchmarks.material import program
from tests.conftest import tiny_llama_config

scaling = program("scaling")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    """A tiny Llama in float64."""
    torch.manual_seed(1)
    return LlamaForCausalLM(tiny_llama_config(tie_word_embeddings=request.param)).double()


def batches():
    """Two batches of two rows."""
    pick = torch.Generator().manual_seed(2)
    for _ in range(2):
        rows = torch.randint(1, 40, (2, 7), generator=pick)
        yield {"input_ids": rows, "labels": rows}


def loss_of(output):
    """The model's own loss."""
    return output.loss


def test_factors_are_those_of_adafactor():
    """r_i c_j is 1 / sqrt(R_i C_j / mean(R)); a row without gradients is scaled as one with 1 % of the mean."""
    squares = np.random.default_rng(0).uniform(0.5, 2, size=(3, 4))
    rows, columns = scaling.factors_of(torch.tensor(squares))
    expected = (squares.mean(1)[:, None] * squares.mean(0)[None, :] / squares.mean()) ** -0.5
    np.testing.assert_allclose(np.outer(rows, columns), expected, rtol=1e-12)
    squares[1] = 0
    rows, _ = scaling.factors_of(torch.tensor(squares))
    assert rows[1].item() == pytest.approx(10)


def test_a_scaled_model_computes_the_same_and_has_scaled_gradients(model):
    """Gradients by V are s times those by W, also of a weight with two uses, and merging restores every weight."""
    plain = copy.deepcopy(model)
    squares = scaling.public_squares(model, batches(), loss_of)
    assert all(p.grad is None for p in model.parameters())
    scaling.scale(model, squares)
    batch = next(batches())
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-10, atol=1e-12)
    model(**batch).loss.backward()
    plain(**batch).loss.backward()
    total = entries = 0
    for name, value in squares.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        scales = torch.outer(module.rows, module.columns)
        expected = scaling.factors_of(value)
        assert torch.allclose(scales / scales[0, 0], torch.outer(*expected) / (expected[0][0] * expected[1][0]))
        torch.testing.assert_close(module.weight.grad, scales * plain.get_parameter(name).grad, rtol=1e-9, atol=1e-14)
        total, entries = total + scales.square().sum().item(), entries + scales.numel()
    assert total / entries == pytest.approx(1)
    scaling.merge(model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def test_an_update_in_scaled_coordinates_is_scaled_again(model):
    """A change of V by d changes W by s · d."""
    before = copy.deepcopy(model)
    scaling.scale(model, scaling.public_squares(model, batches(), loss_of))
    name = "model.layers.0.mlp.up_proj"
    module = model.get_submodule(name)
    scales = torch.outer(module.rows, module.columns)
    with torch.no_grad():
        module.weight.add_(0.1)
    scaling.merge(model)
    change = model.get_submodule(name).weight - before.get_submodule(name).weight
    torch.testing.assert_close(change, 0.1 * scales, rtol=1e-9, atol=1e-12)


def test_a_layer_with_a_bias_is_refused():
    """Its bias would be scaled with the output."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match="type Linear"):
        scaling.scale(model, {"0.weight": torch.ones(3, 2)})
    model = torch.nn.ModuleDict({"a": torch.nn.ParameterDict({"b": torch.nn.Parameter(torch.ones(2, 2))})})
    with pytest.raises(ValueError, match="1 matrices"):
        scaling.scale(model, {"a.b": torch.ones(2, 2)})
