"""Clip factors bound what is released, in floating point, and the sensitivity follows from them."""

import math

import pytest
import torch

from dpllm.mechanism.clipping import FlatClipping


def test_a_unit_is_scaled_to_the_clip_norm_or_left_alone():
    """min(1, C / norm)."""
    factors = FlatClipping(2.0).factors(torch.tensor([16.0, 4.0, 1.0, 0.0]))
    torch.testing.assert_close(factors, torch.tensor([0.5, 1.0, 1.0, 1.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scaled_norm_never_exceeds_the_bound(dtype):
    """Also after rounding, over sixty orders of magnitude."""
    norms = torch.logspace(-15, 15, 4001, dtype=dtype)
    clip_norm = 0.3
    factors = FlatClipping(clip_norm).factors(norms.square())
    released = factors.double() * norms.double()
    assert (released <= clip_norm).all()
    clipped = norms > clip_norm
    assert (released[clipped] >= clip_norm * (1 - 1e-5)).all()
    assert (factors[norms < clip_norm * (1 - 1e-5)] == 1).all()


def test_slack_lowers_the_factor():
    """What rounding may have taken from the norm is added before the root."""
    sq_norm = torch.tensor([4.0])
    assert float(FlatClipping(1.0).factors(sq_norm, torch.tensor([5.0]))) == pytest.approx(1 / 3, rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_unit_counts_exactly_zero(bad):
    """The step goes on without it."""
    factors = FlatClipping(1.0).factors(torch.tensor([bad, 1.0]))
    assert float(factors[0]) == 0.0 and float(factors[1]) > 0


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan, "1"])
def test_a_bound_that_bounds_nothing_is_refused(clip_norm):
    """Infinite sensitivity has no epsilon."""
    with pytest.raises(ValueError, match="clip_norm is"):
        FlatClipping(clip_norm)


def test_sensitivity_by_adjacency():
    """Zero-out changes the sum by C, replace-one by 2C."""
    assert FlatClipping(0.5).sensitivity("zero-out") == 0.5
    assert FlatClipping(0.5).sensitivity("replace-one") == 1.0
    with pytest.raises(ValueError, match="adjacency is 'add'"):
        FlatClipping(0.5).sensitivity("add")
