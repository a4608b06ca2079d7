"""A stack of matrices of which each token meets a few: norms and sums by segments of unit and expert."""

from __future__ import annotations

import pytest
import torch

from dpllm.ghost import NormMethod
from dpllm.ghost.experts import Routed
from dpllm.ghost.norms import join, merge
from dpllm.ghost.sums import Sum, Weights
from dpllm.ghost.unit_gradients import Outer, RowGradients, Rows
from tests.ghost.loop import squared_norms
from tests.mutations import kills

EXPERTS, LEFT, RIGHT, CHOICES = 3, 4, 5, 2
UNIT_B = torch.tensor([0, 2, 0, -1, 1])
LAYOUTS = ("stacked", "flat", "interleaved")


def use_of(layout="stacked", tokens=6, seed=0, dtype=torch.float64, index=None, experts=EXPERTS):
    """A use of five rows; the right factor is shared by the choices of a token."""
    generator = torch.Generator().manual_seed(seed)
    if index is None:
        index = torch.randint(-1, experts, (len(UNIT_B), tokens * CHOICES), generator=generator)
    left = torch.randn(*index.shape, LEFT, generator=generator, dtype=dtype)
    right = torch.randn(len(index), tokens, RIGHT, generator=generator, dtype=dtype)
    return Routed(index, left, right, experts, layout)


def row_gradients(use):
    """(B, *parameter shape), one slot after another."""
    grads = torch.zeros(len(use.index_BS), use.num_experts, LEFT, RIGHT, dtype=torch.float64)
    for row, slots in enumerate(use.index_BS.tolist()):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                right = use.right_BTR[row, slot // (len(slots) // use.right_BTR.shape[1])]
                grads[row, expert] += torch.outer(use.left_BTL[row, slot], right).double()
    if use.layout == "flat":
        return grads.flatten(1, 2)
    return grads.permute(0, 2, 3, 1).flatten(2) if use.layout == "interleaved" else grads


def unit_gradients(use):
    """(U, *parameter shape)."""
    grads, keep = row_gradients(use), UNIT_B >= 0
    return grads.new_zeros(3, *grads.shape[1:]).index_add(0, UNIT_B[keep], grads[keep])


@kills(
    "the norm of experts is deleted",
    "dpllm/ghost/experts.py",
    "both_U2.index_add_(0, number_M // self.num_experts, torch.stack([sq_norm_M, slack * mass_M], 1))",
    "pass",
)
@kills(
    "a unit's tokens in different experts are one segment",
    "dpllm/ghost/experts.py",
    "unit_B1 * self.num_experts + self.index_BS, -1",
    "unit_B1 * self.num_experts + 0 * self.index_BS, -1",
)
@kills(
    "the tokens of an expert all get the factor of the first row",
    "dpllm/ghost/experts.py",
    "slot_N // self.index_BS.shape[1]",
    "0 * slot_N",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_sums_and_instances_are_those_of_the_slots(layout):
    """Rows of one unit in one expert are one segment; a padding row belongs to none."""
    use, rows = use_of(layout), Rows.of(UNIT_B, 3)
    expected_U = unit_gradients(use)
    torch.testing.assert_close(use.instance(rows), expected_U)
    for algorithm in ("gram", "tiled"):
        sq_norm_U, slack_U = use.norms(rows, NormMethod(algorithm))
        torch.testing.assert_close(sq_norm_U, expected_U.square().flatten(1).sum(1))
        assert bool((slack_U >= 0).all())
    factor_B = torch.rand(len(UNIT_B), dtype=torch.float64)
    total = torch.ones(expected_U.shape[1:], dtype=torch.float64)
    use.add_weighted_(Sum.onto(total), Weights(factor_B), NormMethod())
    torch.testing.assert_close(total - 1, torch.tensordot(factor_B, row_gradients(use), dims=1))


@kills(
    "a second use of experts is forgotten",
    "dpllm/ghost/experts.py",
    "whole = [use.per_slot() for use in uses]",
    "whole = [use.per_slot() for use in uses[:1]]",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_uses_are_one_with_the_slots_of_both(layout):
    """Cross terms of experts that two layers share, or two calls of the model, are part of the norm."""
    one, two, rows = use_of(layout), use_of(layout, tokens=3, seed=1), Rows.of(UNIT_B, 3)
    expected_U = unit_gradients(one) + unit_gradients(two)
    (merged,) = merge([one, two], rows, NormMethod("gram"))
    sq_norm_U, _ = squared_norms([merged], rows, NormMethod("gram"))
    torch.testing.assert_close(sq_norm_U, expected_U.square().flatten(1).sum(1))
    torch.testing.assert_close(merged.instance(rows), expected_U)


def test_a_use_beside_one_of_another_kind_becomes_an_instance():
    """Their sum is formed first, so no cross term is missing."""
    use, rows = use_of("flat"), Rows.of(UNIT_B, 3)
    other = RowGradients(torch.randn(5, EXPERTS * LEFT, RIGHT, dtype=torch.float64))
    left, right = (torch.randn(5, 2, width, dtype=torch.float64) for width in (EXPERTS * LEFT, RIGHT))
    outer = Outer(left, right, "right")
    (merged,) = merge([use, outer], rows, NormMethod("gram"))
    torch.testing.assert_close(merged.instance(rows), use.instance(rows) + outer.instance(rows))
    assert other.instance(rows).shape == merged.instance(rows).shape


@pytest.mark.parametrize("algorithm", ["gram", "instance"])
def test_a_unit_in_several_passes_is_one_segment_in_each_expert(algorithm):
    """Rows that are held keep their cross terms with the rows that follow."""
    one, two = use_of(), use_of(tokens=3, seed=1)
    method, whole = NormMethod(algorithm), Rows.one_unit(torch.device("cpu"))
    joined = join(join([], [one], method), [two], method)
    expected = row_gradients(one).sum(0) + row_gradients(two).sum(0)
    sq_norm_U, _ = squared_norms(merge(joined, whole, method), whole, method)
    torch.testing.assert_close(sq_norm_U, expected.square().sum()[None])


def test_a_unit_that_is_not_finite_stays_by_itself():
    """Segments never mix units, so its values do not reach the norms or the sum of others."""
    use, rows = use_of(), Rows.of(UNIT_B, 3)
    clean, _ = use.norms(rows, NormMethod("gram"))
    use.left_BTL[1] = float("nan")  # unit 2
    sq_norm_U, _ = use.norms(rows, NormMethod("gram"))
    assert bool(torch.isnan(sq_norm_U[2]))
    torch.testing.assert_close(sq_norm_U[:2], clean[:2])
    total = torch.zeros(EXPERTS, LEFT, RIGHT, dtype=torch.float64)
    kept_B = torch.tensor([1, 0, 1, 0, 1], dtype=torch.float64)
    use.add_weighted_(Sum.onto(total), Weights(kept_B), NormMethod())
    torch.testing.assert_close(total, row_gradients(use)[::2].sum(0))


@pytest.mark.parametrize("index", [0, -1], ids=["all in one expert", "in none"])
def test_an_expert_without_slots_has_no_gradient(index):
    """Its part of norm, sum and instance is exactly zero."""
    use, rows = use_of(index=torch.full((5, 12), index)), Rows.of(UNIT_B, 3)
    sq_norm_U, _ = use.norms(rows, NormMethod("gram"))
    torch.testing.assert_close(sq_norm_U, unit_gradients(use).square().flatten(1).sum(1))
    assert not bool(use.instance(rows)[:, 1:].any())
    assert bool(use.instance(rows).any()) == (index == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_microbatch_of_padding_only_has_no_units(layout):
    """A process whose share of the draw is empty computes one, so that all take part in collective operations."""
    use, rows = use_of(layout), Rows.of(torch.full((5,), -1), 0)
    assert use.instance(rows).shape == (0, *row_gradients(use).shape[1:])
    assert use.norms(rows, NormMethod("gram"))[0].shape == (0,)
    total = torch.zeros(row_gradients(use).shape[1:], dtype=torch.float64)
    use.add_weighted_(Sum.onto(total), Weights(torch.zeros(5, dtype=torch.float64)), NormMethod())
    assert not bool(total.any())


def test_float32_norms_are_within_their_slack():
    """The rounding error of a segment scales with the sizes of its terms."""
    wide, rows = use_of(tokens=200), Rows.of(UNIT_B, 3)
    narrow = Routed(wide.index_BS, wide.left_BTL.float(), wide.right_BTR.float(), EXPERTS)
    exact_U, _ = wide.norms(rows, NormMethod("gram"))
    for algorithm in ("gram", "tiled"):
        sq_norm_U, slack_U = narrow.norms(rows, NormMethod(algorithm))
        # the factors themselves were rounded too: two units in the last place of each product
        assert bool(((sq_norm_U - exact_U).abs() <= 2 * slack_U).all())
        assert bool((slack_U <= 1e-3 * exact_U).all())
