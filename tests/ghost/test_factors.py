"""Clip factors bound the released contribution in floating point, for every clipping."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from dpllm.ghost.refusals import GhostError
from dpllm.ghost.sums import clip_factors
from dpllm.mechanism.clipping import FlatClipping, sensitivity_of
from dpllm.mechanism.parts import OneGroup
from tests.mechanism.kinds import CLIPPING_KINDS, clipping
from tests.mutations import kills


@kills(
    "the clip is deleted",
    "dpllm/mechanism/clipping.py",
    "return (self.clip_norm / norm_GU).clamp_max(1)",
    "return 0 * norm_GU + 1",
)
def test_a_unit_is_scaled_to_the_clip_norm_or_left_alone():
    """min(1, C / norm)."""
    factors = clip_factors(FlatClipping(2.0), torch.tensor([[16.0, 4.0, 1.0, 0.0]]))
    torch.testing.assert_close(factors[0], torch.tensor([0.5, 1.0, 1.0, 1.0]), rtol=1e-5, atol=0)


@kills(
    "gradients below the threshold keep their length while the others are scaled",
    "dpllm/mechanism/clipping.py",
    "self.clip_norm / norm_GU.clamp_min(self.threshold)",
    "self.clip_norm / norm_GU.clamp_max(self.threshold)",
)
@kills(
    "adaptive scaling divides by less than the norm",
    "dpllm/mechanism/clipping.py",
    "(norm_GU + self.stability / (norm_GU + self.stability))",
    "(norm_GU - self.stability / (norm_GU + self.stability)).clamp_min(1e-9)",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CLIPPING_KINDS, ids=str)
def test_the_scaled_norm_never_exceeds_the_bound(kind, dtype):
    """Also after rounding, over sixty orders of magnitude."""
    norms = torch.logspace(-15, 15, 4001, dtype=dtype)
    (factors,) = clip_factors(clipping(kind, 0.3), norms.square()[None])
    released = factors.double() * norms.double()
    assert (released <= 0.3).all()
    clipped = norms > 3000
    assert (released[clipped] >= 0.3 * (1 - 1e-5)).all()


def test_flat_clipping_leaves_short_gradients_alone():
    """A factor of exactly 1."""
    norms = torch.logspace(-15, 15, 4001)
    assert (clip_factors(FlatClipping(0.3), norms.square()[None])[0, norms < 0.3 * (1 - 1e-5)] == 1).all()


def test_entries_whose_squares_underflow_do_not_add_up_to_more_than_the_bound():
    """A billion entries of 2e-23 have the norm 6e-19, and the sum of their squares is 0; a threshold may be as low."""
    entry, count = torch.tensor(2e-23), 1 << 30
    (factors,) = clip_factors(FlatClipping(2e-20), count * entry.square()[None, None])
    assert float(factors[0]) * float(entry) * math.sqrt(count) <= 2e-20


def test_slack_lowers_the_factor():
    """The rounding error that the norm may have lost is added before the root."""
    sq_norm = torch.tensor([[4.0]])
    assert float(clip_factors(FlatClipping(1.0), sq_norm, torch.tensor([[5.0]]))) == pytest.approx(1 / 3, rel=1e-5)


@kills(
    "non-finite units stay in the sum",
    "dpllm/ghost/sums.py",
    "finite_GU = torch.isfinite(upper_GU)\n",
    "finite_GU = torch.ones_like(upper_GU, dtype=torch.bool)\n",
)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", CLIPPING_KINDS, ids=str)
def test_a_nonfinite_unit_counts_exactly_zero(kind, bad):
    """The step continues without it."""
    (factors,) = clip_factors(clipping(kind, 1.0), torch.tensor([[bad, 1.0]]))
    assert float(factors[0]) == 0.0 and float(factors[1]) > 0


@dataclass(frozen=True)
class Doubled(OneGroup):
    """A user's own clipping, which may exceed its bound."""

    kind: ClassVar[str] = "doubled"
    clip_norm: float
    by: float

    def factors(self, norm_GU):
        return self.by * self.clip_norm / norm_GU

    def sensitivity(self, adjacency):
        return sensitivity_of(self.clip_norm, adjacency)

    def words(self):
        return "is scaled"


@pytest.mark.parametrize("by", [1.01, 2.0, -0.5, math.nan])
def test_factors_beyond_the_sensitivity_are_refused(by):
    """The noise is scaled to the sensitivity that the clipping states."""
    with pytest.raises(GhostError, match="doubled"):
        clip_factors(Doubled(0.5, by), torch.tensor([[4.0, 1.0]]))


def test_a_clipping_of_ones_own_within_its_sensitivity_is_used():
    """Its factors are used."""
    factors = clip_factors(Doubled(0.5, 0.5), torch.tensor([[4.0]]))
    assert float(factors) == pytest.approx(0.125, rel=1e-5)


def test_factors_of_another_shape_are_refused():
    """One factor per unit."""

    class One(Doubled):
        def factors(self, norm_GU):
            return norm_GU.new_ones(())

    with pytest.raises(GhostError, match="Return factors"):
        clip_factors(One(0.5, 1.0), torch.tensor([[4.0, 1.0]]))


class Batchy(Doubled):
    """Each factor is within the sensitivity, and depends on all units."""

    def factors(self, norm_GU):
        return self.clip_norm * (norm_GU < 5 * norm_GU.median()).all() / norm_GU


class Summed(Doubled):
    """A bound on the norm over all units."""

    def factors(self, norm_GU):
        return self.clip_norm / norm_GU.square().sum().sqrt().expand_as(norm_GU)


@pytest.mark.parametrize("kind", [Batchy, Summed])
def test_a_factor_that_depends_on_other_units_is_refused(kind):
    """One unit could change the contributions of all others."""
    sq_norm_GU = torch.ones(1, 50)
    sq_norm_GU[0, 7] = 1e4
    with pytest.raises(GhostError, match="different factor") as raised:
        clip_factors(kind(1.0, 1.0), sq_norm_GU)
    assert "\n" not in str(raised.value)
    assert float(clip_factors(kind(1.0, 1.0), sq_norm_GU[:, :1])) == pytest.approx(1, rel=1e-5)


class InPlace(Doubled):
    """Shortens the norms that it is given, so that its factors look small enough beside them."""

    def factors(self, norm_GU):
        return self.clip_norm / norm_GU.clamp_(max=self.clip_norm)


@kills(
    "a clipping may change the norms that its factors are checked with",
    "dpllm/ghost/sums.py",
    "clipping.factors(norm_GU.clone()), [clipping.factors(column.clone()) for column in columns]",
    "clipping.factors(norm_GU), [clipping.factors(column) for column in columns]",
)
def test_norms_that_a_clipping_changes_stay_as_they_were():
    """The check compares with the true norm."""
    with pytest.raises(GhostError, match="exceeds its sensitivity"):
        clip_factors(InPlace(1.0, 1.0), torch.tensor([[100.0, 0.25]]))


def test_factors_over_several_groups_are_those_of_single_units():
    """A sum over groups is a unit's own; without units there are no factors."""

    class Own(Doubled):
        def factors(self, norm_GU):
            return (self.clip_norm / norm_GU.square().sum(dim=0).sqrt()).expand_as(norm_GU)

    sq_norm_GU = torch.rand(37, 501, generator=torch.Generator().manual_seed(0))
    factor_GU = clip_factors(Own(0.5, 1.0), sq_norm_GU)
    for unit in (0, 250, 500):
        assert torch.equal(factor_GU[:, unit], clip_factors(Own(0.5, 1.0), sq_norm_GU[:, [unit]])[:, 0])
    assert clip_factors(Own(0.5, 1.0), sq_norm_GU[:, :0]).shape == (37, 0)
