"""The clipper against a float64 loop of single-row autograd, on every architecture and mode."""

from __future__ import annotations

import pytest
import torch

from .oracle import Comparison, clipped_sum, compare, released_over_clip_norm
from .zoo import (
    CHECKPOINTING,
    DTYPES,
    FAMILIES,
    MODES,
    ROW_LENGTHS,
    TARGET_LENGTHS,
    Case,
    build_model,
    is_meaningful,
    make_batch,
)

ARCHITECTURES = [(name, tied) for name, family in FAMILIES.items() for tied in family.heads]
SOME_FAMILIES = ("gpt2", "llama", "qwen2", "bert", "t5")
LOW_PRECISION_FAMILIES = ("gpt2-without-dropout", "llama", "gemma3", "t5")
MAIN_MODES = ("full", "lora-all-linear")

MARGIN = 2e-3  # by how much a factor may stay below min(1, C / norm)
ROUNDING = 1e-6  # of a float32 factor or norm


def cases(families, modes=MAIN_MODES, **settings) -> list[Case]:
    """The meaningful combinations, with tied and untied heads."""
    return [
        Case(family, mode, tied, **settings)
        for family in families
        for tied in FAMILIES[family].heads
        for mode in modes
        if is_meaningful(family, mode, tied)
    ]


def check(comparison: Comparison, norm_tolerance: float, sum_tolerance: float, part_tolerance: float) -> None:
    """Norms, factors and sum agree with the loop, where some units are clipped and some are not.

    `part_tolerance` is for the worst single parameter, so that a small one can't hide behind the rest.
    """
    num_units = len(comparison.reference_norms)
    assert comparison.result.norms.shape == comparison.result.factors.shape == (num_units,)
    assert comparison.result.norms.dtype == comparison.result.factors.dtype == torch.float32
    assert 0 < comparison.num_clipped < num_units
    assert comparison.norm_error <= norm_tolerance
    factors, ideal = comparison.result.factors.double(), comparison.ideal_factors
    slack = MARGIN + norm_tolerance
    assert bool((factors >= ideal * (1 - slack)).all()), (factors, ideal)
    if norm_tolerance <= 1e-5:
        assert bool((factors <= ideal * (1 + ROUNDING)).all()), (factors, ideal)
    assert bool((factors <= 1).all())
    assert comparison.sum_error <= sum_tolerance
    assert comparison.worst_parameter[0] <= part_tolerance, comparison.worst_parameter


def check_float64(comparison: Comparison) -> None:
    check(comparison, norm_tolerance=1e-5, sum_tolerance=1e-6, part_tolerance=1e-5)


@pytest.mark.parametrize("case", cases(FAMILIES), ids=str)
def test_every_architecture_matches_the_loop(case):
    """Tied and untied, full fine-tuning and LoRA: the clipped sum is that of the loop over single rows."""
    check_float64(compare(case))


@pytest.mark.parametrize("case", cases(SOME_FAMILIES, [mode for mode in MODES if mode not in MAIN_MODES]), ids=str)
def test_every_mode_matches_the_loop(case):
    """Whatever is trained and however it is adapted, the clipped sum is that of the loop."""
    check_float64(compare(case))


@pytest.mark.parametrize("checkpointing", [kind for kind in CHECKPOINTING if kind != "none"])
@pytest.mark.parametrize(
    "case",
    cases(("gpt2", "llama", "bert", "t5", "mamba2", "falcon_h1"), ("full", "lora-all-linear", "frozen-lower")),
    ids=str,
)
def test_activation_checkpointing_matches_the_loop(case, checkpointing):
    """Recomputing activations in the backward pass changes neither norms nor sum."""
    check_float64(compare(case.but(checkpointing=checkpointing)))


@pytest.mark.parametrize("case", cases(("gpt2", "llama", "bert", "t5")), ids=str)
def test_rows_longer_than_the_model_is_wide_match_the_loop(case):
    """The norm of a layer is exact whichever way of computing it is the cheaper one."""
    check_float64(compare(case, stretch=3))


@pytest.mark.parametrize("num_rows", [max(ROW_LENGTHS), max(TARGET_LENGTHS)])
@pytest.mark.parametrize("case", cases(("gpt2", "llama", "bert", "t5")), ids=str)
def test_as_many_rows_as_tokens_match_the_loop(case, num_rows):
    """With B = T, nothing that runs over tokens is taken for rows: position tables, relative position biases."""
    check_float64(compare(case, num_rows=num_rows))


@pytest.mark.parametrize("case", cases(("gpt2", "llama", "gemma3", "bert", "t5")), ids=str)
@pytest.mark.parametrize("unit_index", [[1, 0, 2, 1, 0], [0, -1, 1, 0, 2]], ids=str)
def test_units_of_several_rows_match_the_loop(case, unit_index):
    """A unit's gradient is the sum over its rows, cross terms included, and a row of unit -1 counts nowhere."""
    check_float64(compare(case, unit_index=torch.tensor(unit_index)))


@pytest.mark.parametrize("case", cases(LOW_PRECISION_FAMILIES, dtype="float32"), ids=str)
def test_float32_matches_the_float64_loop(case):
    """A float32 model gives the sum of its float64 copy."""
    check(compare(case), norm_tolerance=1e-5, sum_tolerance=2e-5, part_tolerance=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
@pytest.mark.parametrize("case", cases(LOW_PRECISION_FAMILIES), ids=str)
def test_bfloat16_stays_near_the_float64_loop(case, dtype):
    """In bfloat16 norms and sum differ from the float64 loop by the rounding of activations, no more."""
    check(compare(case.but(dtype=dtype)), norm_tolerance=3e-2, sum_tolerance=6e-2, part_tolerance=0.3)


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
@pytest.mark.parametrize("case", cases(("gpt2", "qwen2", "gemma3", "bert", "t5"), MODES), ids=str)
def test_every_mode_matches_autograd_in_bfloat16(case, dtype):
    """On the same rounded activations, norms and sum differ from autograd by the rounding of weight gradients."""
    comparison = compare(case.but(dtype=dtype), same_precision=True)
    check(comparison, norm_tolerance=5e-3, sum_tolerance=1e-2, part_tolerance=3e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast"])
@pytest.mark.parametrize("checkpointing", [kind for kind in CHECKPOINTING if kind != "none"])
@pytest.mark.parametrize("case", cases(("gpt2", "llama", "t5")), ids=str)
def test_activation_checkpointing_matches_autograd_in_bfloat16(case, checkpointing, dtype):
    """Activations are recomputed in the precision of the forward pass."""
    comparison = compare(case.but(dtype=dtype, checkpointing=checkpointing), same_precision=True)
    check(comparison, norm_tolerance=5e-3, sum_tolerance=1e-2, part_tolerance=3e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(("gpt2", "llama", "gemma3", "bert", "t5")), ids=str)
def test_released_contribution_of_one_unit_is_bounded(case, dtype):
    """What is released of a unit whose gradient is larger than C has a norm of at most C, and hardly less."""
    smallest, largest = released_over_clip_norm(case.but(dtype=dtype))
    assert largest <= 1
    assert smallest >= 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases(("llama", "t5")), ids=str)
def test_released_contribution_of_a_unit_of_several_rows_is_bounded(case, dtype):
    """The bound is on the unit, not on each of its rows."""
    case = case.but(dtype=dtype)
    model, batch = build_model(case), make_batch(case.spec)
    one_unit = torch.zeros(batch.num_rows, dtype=torch.int64)
    clip_norm = 0.3 * float(clipped_sum(model, case, batch, 1.0, one_unit).norms)
    ratio = float(clipped_sum(model, case, batch, clip_norm, one_unit).total.norm()) / clip_norm
    assert 0.99 <= ratio <= 1


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("case", cases(("llama",), dtype="float32"), ids=str)
def test_released_contribution_is_bounded_whatever_the_matmul_precision(case, precision):
    """A process that allows float32 products in bfloat16 gets norms and sums in float32 all the same."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        smallest, largest = released_over_clip_norm(case)
    finally:
        torch.set_float32_matmul_precision(before)
    assert smallest >= 0.99
    assert largest <= 1
