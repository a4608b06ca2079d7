"""One clipped sum, whatever way the rows were put through the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reference.oracle import Clipped, clipped_sum, relative_error
from tests.reference.zoo import CHECKPOINTING, Batch, Case, build_model, enable_checkpointing, make_batch

NUM_ROWS = 6
CASES = [
    Case("gpt2-without-dropout", tied=True),
    Case("llama"),
    Case("llama", tied=True, mode="lora-all-linear"),
    Case("gemma3", tied=True),
    Case("bert"),
    Case("t5", tied=True),
    Case("t5", mode="lora-all-linear"),
]
EVERY_CASE = pytest.mark.parametrize(
    "case", [case.but(dtype=dtype) for dtype in ("float64", "float32") for case in CASES], ids=str
)


def tolerance(case: Case) -> float:
    """In float32, factors are rounded down by a margin that depends on the shapes."""
    return 1e-6 if case.dtype == "float64" else 1e-4


@pytest.fixture(scope="module")
def whole():
    """The sum of the whole batch at once, for each case; C is the median norm."""
    known: dict[Case, tuple[nn.Module, Batch, float, Clipped]] = {}

    def of(case: Case) -> tuple[nn.Module, Batch, float, Clipped]:
        if case not in known:
            model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
            clip_norm = float(clipped_sum(model, case, batch, 1.0).norms.median())
            known[case] = model, batch, clip_norm, clipped_sum(model, case, batch, clip_norm)
        return known[case]

    return of


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@EVERY_CASE
def test_microbatch_size_does_not_change_the_sum(whole, case, size):
    """Microbatches of 1, 2, 3 or 4 rows add up to the sum of all at once; each unit keeps its norm."""
    model, batch, clip_norm, expected = whole(case)
    parts = [batch.rows(list(range(NUM_ROWS))[start : start + size]) for start in range(0, NUM_ROWS, size)]
    result = clipped_sum(model, case, parts, clip_norm)
    torch.testing.assert_close(result.norms, expected.norms, rtol=1e-5, atol=0)
    assert relative_error(result.total, expected.total) <= tolerance(case)


@EVERY_CASE
def test_row_order_does_not_change_the_sum(whole, case):
    """A permutation of the rows permutes the norms and leaves the sum."""
    model, batch, clip_norm, expected = whole(case)
    order = [3, 5, 0, 4, 2, 1]
    result = clipped_sum(model, case, batch.rows(order), clip_norm)
    torch.testing.assert_close(result.norms, expected.norms[order], rtol=1e-5, atol=0)
    assert relative_error(result.total, expected.total) <= tolerance(case)


@pytest.mark.parametrize("extra_padding", [1, 9])
@EVERY_CASE
def test_padding_does_not_change_the_sum(whole, case, extra_padding):
    """Longer padding on the right changes neither norms nor sum."""
    model, _, clip_norm, expected = whole(case)
    padded = make_batch(case.spec, num_rows=NUM_ROWS, extra_padding=extra_padding)
    result = clipped_sum(model, case, padded, clip_norm)
    torch.testing.assert_close(result.norms, expected.norms, rtol=1e-5, atol=0)
    assert relative_error(result.total, expected.total) <= tolerance(case)


@pytest.mark.parametrize("kind", [kind for kind in CHECKPOINTING if kind != "none"])
@EVERY_CASE
def test_checkpointing_does_not_change_the_sum(whole, case, kind):
    """Activations kept or recomputed, in one microbatch or in several: one sum."""
    _, batch, clip_norm, expected = whole(case)
    model = build_model(case)
    enable_checkpointing(model, kind)
    for parts in ([batch], [batch.rows([0, 1, 2, 3]), batch.rows([4, 5])]):
        result = clipped_sum(model, case, parts, clip_norm)
        torch.testing.assert_close(result.norms, expected.norms, rtol=1e-5, atol=0)
        assert relative_error(result.total, expected.total) <= tolerance(case)


@pytest.mark.parametrize("case", [Case("gpt2", tied=True), Case("llama", mode="lora-dropout")], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in CHECKPOINTING if kind != "none"])
def test_checkpointing_repeats_the_dropout_of_the_forward_pass(case, kind):
    """With dropout on, the recomputed activations are those the loss was computed from."""
    batch = make_batch(case.spec)
    model = build_model(case)
    clip_norm = float(clipped_sum(model, case, batch, 1.0, seed=3).norms.median())
    expected = clipped_sum(model, case, batch, clip_norm, seed=3)
    enable_checkpointing(model, kind)
    result = clipped_sum(model, case, batch, clip_norm, seed=3)
    assert relative_error(result.total, expected.total) <= tolerance(case)


@EVERY_CASE
def test_units_of_several_rows_have_one_sum(case):
    """Units give one sum whether their rows stand side by side, apart, or in microbatches of their own."""
    model, batch = build_model(case), make_batch(case.spec, num_rows=NUM_ROWS)
    apart = torch.tensor([0, 1, 0, 2, 1, 0])
    clip_norm = float(clipped_sum(model, case, batch, 1.0, apart).norms.median())
    expected = clipped_sum(model, case, batch, clip_norm, apart)
    side_by_side = clipped_sum(model, case, batch.rows([0, 2, 5, 1, 4, 3]), clip_norm, torch.tensor([0, 0, 0, 1, 1, 2]))
    renumbered = clipped_sum(model, case, batch, clip_norm, torch.tensor([2, 0, 2, 1, 0, 2]))
    by_unit = [batch.rows([0, 2, 5]), batch.rows([1, 4, 3])]
    separate = clipped_sum(model, case, by_unit, clip_norm, [torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1])])
    for result in (side_by_side, renumbered, separate):
        assert relative_error(result.total, expected.total) <= tolerance(case)
    torch.testing.assert_close(renumbered.norms, expected.norms[[1, 2, 0]], rtol=1e-5, atol=0)
    torch.testing.assert_close(separate.norms, expected.norms, rtol=1e-5, atol=0)


@EVERY_CASE
def test_a_second_clipper_gives_the_same_sum(whole, case):
    """Removing a clipper leaves the model as it was: another one gives the same norms and sum."""
    model, batch, clip_norm, expected = whole(case)
    result = clipped_sum(model, case, batch, clip_norm)
    torch.testing.assert_close(result.norms, expected.norms, rtol=0, atol=0)
    assert relative_error(result.total, expected.total) <= 1e-7
