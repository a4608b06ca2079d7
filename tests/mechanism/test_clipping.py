"""A clipping refuses bounds that bound nothing, and its sensitivity follows from them."""

import math

import pytest

from dpllm.mechanism.clipping import FlatClipping


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan, "1"])
def test_a_bound_that_bounds_nothing_is_refused(clip_norm):
    """Infinite sensitivity has no epsilon."""
    for clipping in (FlatClipping,):
        with pytest.raises(ValueError, match="clip_norm is"):
            clipping(clip_norm)


def test_sensitivity_by_adjacency():
    """Zero-out changes the sum by C, replace-one by 2C."""
    for clipping in (FlatClipping(0.5),):
        assert clipping.sensitivity("zero-out") == 0.5
        assert clipping.sensitivity("replace-one") == 1.0
        with pytest.raises(ValueError, match="adjacency is 'add'"):
            clipping.sensitivity("add")
