"""A clipping refuses invalid bounds, and its sensitivity follows from its bound."""

import math

import pytest
import torch

from dpllm.ghost.factors import clip_factors
from dpllm.mechanism.automatic import AutomaticClipping
from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.per_layer import PerLayerClipping


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan, "1"])
def test_a_bound_that_bounds_nothing_is_refused(clip_norm):
    """Infinite sensitivity has no epsilon."""
    for clipping in (FlatClipping, AutomaticClipping, PerLayerClipping):
        with pytest.raises(ValueError, match="clip_norm is"):
            clipping(clip_norm)


def test_sensitivity_by_adjacency():
    """Zero-out changes the sum by C, replace-one by 2C."""
    for clipping in (FlatClipping(0.5), AutomaticClipping(0.5), PerLayerClipping(0.5)):
        assert clipping.sensitivity("zero-out") == 0.5
        assert clipping.sensitivity("replace-one") == 1.0
        with pytest.raises(ValueError, match="adjacency is 'add'"):
            clipping.sensitivity("add")


def test_automatic_clipping_scales_nearly_all_gradients_to_the_clip_norm():
    """C / (norm + stability), AUTO-S; a gradient much shorter than the stability stays short."""
    factors = AutomaticClipping(2.0, stability=0.1).factors(torch.tensor([9.9, 0.1, 1e-6], dtype=torch.float64))
    torch.testing.assert_close(factors, torch.tensor([0.2, 10.0, 2 / (0.1 + 1e-6)], dtype=torch.float64))


@pytest.mark.parametrize("stability", [0.0, -1.0, 1e-10, 1e-30, math.inf, math.nan, 10**400, "1", True])
def test_a_stability_that_is_none_is_refused(stability):
    """With 0 a nearly flat loss would count as much as a steep one."""
    with pytest.raises(ValueError, match="stability is") as raised:
        AutomaticClipping(1.0, stability)
    assert len(str(raised.value)) < 200


def test_every_factor_of_automatic_clipping_is_finite():
    """Also of a zero gradient: an infinite one times zero would make the release NaN."""
    with pytest.raises(ValueError, match="at least 1e-05 is needed"):
        AutomaticClipping(1e25, 1e-6)
    (factors,) = clip_factors(AutomaticClipping(1e20, 1e-9), torch.zeros(1, 1))
    assert torch.isfinite(factors).all()
