"""The rounding of this machine's products stays within what the clip factors allow for, or training stops."""

import pytest
import torch

from dpllm.ghost import Forms, GhostError, kernels, triton_kernels
from dpllm.ghost.rounding import _SHAPES, require_within_slack, shortfalls

FUSED = [False, pytest.param(True, marks=pytest.mark.skipif(not triton_kernels.available(), reason="no Triton"))]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [*_SHAPES, (1, 256), (17, 200)])
def test_norms_of_one_signed_terms_are_within_the_slack(size, dtype, fused):
    """Every form, at the length at which cut-off bits add up."""
    if fused and triton_kernels.INTERPRETED:
        size = (min(size[0], 64), min(size[1], 300))
    excess = shortfalls(Forms(fused=fused), torch.device("cpu"), dtype, *size)
    assert excess.keys() == {"gram", "tiled", "lookup"} and max(excess.values()) <= 1


def test_a_machine_that_rounds_as_allowed_is_accepted():
    """And measured once."""
    require_within_slack(Forms(fused=False), torch.device("cpu"), torch.bfloat16)


def test_a_machine_that_rounds_more_is_refused(monkeypatch):
    """Products whose last bits are cut off, term after term, stop the run with the device and the form."""

    exact = kernels._products

    def careless(x_BTD, y_BSD):
        if x_BTD.dtype == torch.float64:
            return exact(x_BTD, y_BSD)
        return (x_BTD.to(torch.float32) @ y_BSD.to(torch.float32).mT) * (1 - 1e-5)

    monkeypatch.setattr(kernels, "_products", careless)
    with pytest.raises(GhostError, match=r"On cpu, gram norms of torch.bfloat16 are off by .* times"):
        require_within_slack.__wrapped__(Forms(fused=False), torch.device("cpu"), torch.bfloat16)
