"""One clipped sum and one bound on what a unit changes, whichever way norms are computed, kernels on and off."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from dpllm import GhostClipper
from dpllm.ghost import NormMethod, triton_launch
from tests.reference.oracle import LOSSES, clipped_sum, relative_error, row_gradients, trainable, unit_gradients
from tests.reference.zoo import Case, build_model, float64_copy, forward_context, make_batch

NUM_ROWS = 5
SEVERAL_ROWS = torch.tensor([1, 0, -1, 2, 0])
CASES = [
    Case("gpt2-without-dropout", tied=True),
    Case("llama"),
    Case("llama", tied=True),
    Case("llama", mode="lora-all-linear"),
    Case("t5", tied=True),
]
FUSED = pytest.param(
    True, id="kernels", marks=pytest.mark.skipif(not triton_launch.available(), reason="Triton is not installed")
)
KERNELS = pytest.mark.parametrize("fused", [pytest.param(False, id="pytorch"), FUSED])
NORMS = pytest.mark.parametrize("norm", ["auto", "gram", "instance", "tiled"])
EVERY_CASE = pytest.mark.parametrize(
    "case",
    [case.but(dtype=dtype) for case, dtype in product((CASES[0], CASES[2], CASES[3]), ("float32", "bfloat16"))],
    ids=str,
)


@KERNELS
@NORMS
@pytest.mark.parametrize("unit_index", [None, SEVERAL_ROWS], ids=["a row is a unit", "several rows"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_form_matches_the_float64_loop(case, unit_index, norm, fused):
    """Norms and clipped sum in float32 are those of single-row autograd in float64."""
    case = case.but(dtype="float32")
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    gradient_UP = unit_gradients(row_gradients(float64_copy(model), case.spec.task, batch), unit_index)
    expected_U = gradient_UP.norm(dim=1)
    clip_norm = float(expected_U.median())
    result = clipped_sum(model, case, batch, clip_norm, unit_index, forms=NormMethod(norm, fused))
    torch.testing.assert_close(result.norms.double(), expected_U, rtol=1e-4, atol=0)
    assert relative_error(result.total, result.factors.double() @ gradient_UP) <= 1e-4


@KERNELS
@NORMS
@EVERY_CASE
def test_a_unit_contributes_at_most_the_clip_norm(case, norm, fused):
    """Sensitivity: the released share of a single unit is no longer than C, and nearly C where its norm is larger."""
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    for row in range(NUM_ROWS):
        result = clipped_sum(model, case, batch.rows([row]), 1e-3, forms=NormMethod(norm, fused))
        assert float(result.norms) > 1e-3
        assert 0.99 * 1e-3 <= float(result.total.norm()) <= 1e-3


@KERNELS
@NORMS
@EVERY_CASE
def test_an_update_moves_the_parameters_by_at_most_lr_clip_norm_batch(case, norm, fused):
    """With a tiny C and SGD, two microbatches of B units together move the parameters by at most lr * C * B."""
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    clip_norm, learning_rate = 1e-6, 1e10
    clipper = GhostClipper(model, clip_norm, NormMethod(norm, fused))
    before = [parameter.detach().double() for parameter in trainable(model).values()]
    for rows in ([0, 1, 2], [3, 4]):
        part = batch.rows(rows)
        with forward_context(case):
            logits = model(**part.inputs).logits
        clipper.backward(LOSSES[case.spec.task](logits, part.labels))
    clipper.remove()
    torch.optim.SGD(trainable(model).values(), lr=learning_rate).step()
    after = [parameter.detach().double() for parameter in trainable(model).values()]
    moved = math.sqrt(sum(float((b - a).square().sum()) for a, b in zip(before, after, strict=True)))
    bound = learning_rate * clip_norm * NUM_ROWS
    assert 0.1 * bound <= moved <= bound * (1 + 2**-8)


@KERNELS
@NORMS
@EVERY_CASE
def test_microbatches_and_row_order_do_not_change_the_sum(case, norm, fused):
    """Invariance: one sum from all rows at once, in another order, and from microbatches."""
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    forms = NormMethod(norm, fused)
    clip_norm = float(clipped_sum(model, case, batch, 1.0).norms.median())
    expected = clipped_sum(model, case, batch, clip_norm)
    order = [3, 1, 4, 0, 2]
    permuted = clipped_sum(model, case, batch.rows(order), clip_norm, forms=forms)
    parts = clipped_sum(model, case, [batch.rows([0, 1]), batch.rows([2]), batch.rows([3, 4])], clip_norm, forms=forms)
    # Rows of another microbatch are padded otherwise, which changes how bfloat16 rounds their activations.
    rounding = 1e-4 if case.dtype == "float32" else 3e-2
    torch.testing.assert_close(permuted.norms, expected.norms[order], rtol=rounding, atol=0)
    torch.testing.assert_close(parts.norms, expected.norms, rtol=rounding, atol=0)
    assert relative_error(permuted.total, expected.total) <= rounding
    assert relative_error(parts.total, expected.total) <= rounding


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of numpy, in Triton's interpreter
@KERNELS
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_nonfinite_unit_contributes_nothing(value, fused):
    """Whatever the form, its norm isn't finite, its factor is 0, and the others' shares are what they were."""
    case = Case("llama").but(dtype="float32")
    model, batch = build_model(case), make_batch(case.spec, num_rows=3)
    for norm in ("auto", "gram", "instance", "tiled"):
        clipper = GhostClipper(model, 1e-3, NormMethod(norm, fused))
        model.zero_grad(set_to_none=True)
        losses = LOSSES[case.spec.task](model(**batch.inputs).logits, batch.labels)
        result = clipper.backward(losses * torch.tensor([1, value, 1]))
        clipper.remove()
        assert not math.isfinite(float(result.norms[1])) and float(result.factors[1]) == 0
        total = torch.cat([p.grad.flatten() for p in trainable(model).values()])
        assert bool(torch.isfinite(total).all()) and 1e-3 < float(total.norm()) <= 2e-3
