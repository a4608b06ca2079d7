"""The rounding error of this machine's products is within the slack of the clip factors, or training stops."""

import pytest
import torch

from dpllm import GhostClipper
from dpllm.ghost import GhostError, NormMethod, kernels, norm_method, triton_launch
from dpllm.ghost.norm_method import _SHAPES, shortfalls, slack_factor
from dpllm.ghost.norms import NormTally
from dpllm.ghost.unit_gradients import Outer, Rows

# On a GPU the kernels take no tensor of the CPU; training and benchmarks/gpu.sh measure their rounding there.
FUSED = [False, pytest.param(True, marks=pytest.mark.skipif(not triton_launch.INTERPRETED, reason="no interpreter"))]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [*_SHAPES, (1, 256), (17, 200)])
def test_norms_of_one_signed_terms_are_within_the_slack(size, dtype, fused):
    """Every algorithm, at the length at which cut-off bits add up."""
    if fused and triton_launch.INTERPRETED:
        size = (min(size[0], 64), min(size[1], 300))
    excess = shortfalls(NormMethod(fused=fused), torch.device("cpu"), dtype, *size)
    assert excess.keys() == {"gram norms", "tiled norms", "lookup norms", "clipped sums", "finished sums"}
    assert max(excess.values()) <= 1


def test_a_machine_that_rounds_as_allowed_needs_no_more_slack():
    """And is measured once."""
    assert slack_factor(NormMethod(fused=False), torch.device("cpu"), torch.bfloat16) == 1.0
    assert slack_factor.cache_info().currsize >= 1


def careless(error):
    """Products whose last bits are cut off, term after term."""
    exact = kernels._products

    def products(x_BTD, y_BSD):
        if x_BTD.dtype == torch.float64:
            return exact(x_BTD, y_BSD)
        return (x_BTD.to(torch.float32) @ y_BSD.to(torch.float32).mT) * (1 - error)

    return products


def test_a_machine_that_rounds_more_gets_twice_the_slack_it_needs(monkeypatch):
    """Norms 2 x 1e-6 too small, about twice the slack: it is multiplied by about four."""
    monkeypatch.setattr(kernels, "_products", careless(1e-6))
    factor = slack_factor.__wrapped__(NormMethod(fused=False), torch.device("cpu"), torch.bfloat16)
    assert 3.5 < factor < 8


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_machine_that_computes_something_else_is_refused(monkeypatch, error):
    """An error too large for rounding stops the run and names the device and the quantity."""
    monkeypatch.setattr(kernels, "_products", careless(error))
    with pytest.raises(GhostError, match=r"torch\.bfloat16"):
        slack_factor.__wrapped__(NormMethod(fused=False), torch.device("cpu"), torch.bfloat16)


def test_slack_is_what_a_unit_is_clipped_by():
    """A tally with a larger slack returns it; the norms do not change."""
    rows, uses = Rows.of(torch.arange(2), 2), [Outer(torch.randn(2, 3, 4), torch.randn(2, 3, 5), "right")]
    tallies = [NormTally(rows, NormMethod(), torch.float32, slack) for slack in (None, lambda: 6.0)]
    for tally in tallies:
        tally.add(uses)
    (norm_GU, slack_GU), (same_GU, more_GU) = (tally.total() for tally in tallies)
    assert torch.equal(norm_GU, same_GU) and (slack_GU > 0).all()
    torch.testing.assert_close(more_GU, 6 * slack_GU)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_dtypes_that_flow_are_the_ones_that_are_measured(monkeypatch, autocast):
    """Under autocast with float32 weights norms of products are computed from bfloat16."""
    asked = []

    def factor(norm_method, device, dtype):
        asked.append((device.type, dtype))
        return 5.0 if dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(norm_method, "is_measured", lambda x: x.is_floating_point())
    monkeypatch.setattr(norm_method, "slack_factor", factor)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    slacks = []
    for _ in range(2):
        clipper = GhostClipper(net, 1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            losses = net(torch.ones(2, 5, 3)).float().square().sum((1, 2))
        slacks.append(clipper._norms(losses, torch.arange(2), 2)[1])
        clipper.remove()
        monkeypatch.setattr(norm_method, "slack_factor", lambda *_: 1.0)
    # Gradients of biases are summed over tokens in float32 before they are measured.
    assert set(asked) == {("cpu", dtype) for dtype in ({torch.bfloat16} if autocast else set()) | {torch.float32}}
    torch.testing.assert_close(slacks[0], (5.0 if autocast else 1.0) * slacks[1])
