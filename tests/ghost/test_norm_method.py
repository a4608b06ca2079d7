"""The choice of the algorithm for a norm; every algorithm gives the same number."""

import pytest
import torch

from dpllm import GhostClipper
from dpllm.ghost import NormMethod, kernels, triton_launch
from tests.mutations import kills

needs_triton = pytest.mark.skipif(not triton_launch.available(), reason="Triton is not installed")


def exact(a, grads):
    """Squared norms summed over the layers, in float64."""
    return sum(torch.einsum("btd,btp->bdp", a.double(), g.double()).square().sum((1, 2)) for g in grads)


@kills(
    "a norm's strips are not mirrored",
    "dpllm/ghost/kernels.py",
    "terms[..., :start].sum((1, 2)), alpha=2)",
    "terms[..., :start].sum((1, 2)))",
)
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("norm", ["auto", "gram", "tiled"])
@pytest.mark.parametrize("tokens", [1, 17, 130, 300])
def test_algorithms_for_a_matrix_agree(tokens, norm, fused):
    """Norms are exact with every algorithm, and the mass bounds (sum_t |a_t| |g_t|)^2."""
    a, grads = torch.randn(2, tokens, 9), [torch.randn(2, tokens, 5), torch.randn(2, tokens, 12)]
    sq_norm_B, mass_B = NormMethod(norm, fused).outer_norms(a, grads)
    torch.testing.assert_close(sq_norm_B.double(), exact(a, grads), rtol=1e-4, atol=0)
    one_by_one = [(a.norm(dim=2) * g.norm(dim=2)).sum(1).square() for g in grads]
    assert (mass_B >= 0.999 * sum(one_by_one)).all()


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_triton)])
def test_groups_together_equal_each_by_itself(fused):
    """Whichever algorithm a group takes: tiles where rows are long, and PyTorch where gradients differ in dtype."""
    shapes = [(3, 8, (4, 5)), (40, 4, (4,)), (3, 6, (7,))]
    groups = [(torch.randn(2, t, d), [torch.randn(2, t, p) for p in widths]) for t, d, widths in shapes]
    groups.append((groups[0][0], [torch.randn(2, 3, 4), torch.randn(2, 3, 5).bfloat16()]))
    norms = NormMethod(fused=fused).grouped_outer_norms(groups)
    assert len(norms) == 4
    for (sq_norm_B, mass_B), (a, grads) in zip(norms, groups, strict=True):
        torch.testing.assert_close(sq_norm_B.double(), exact(a, grads), rtol=1e-4, atol=0)
        torch.testing.assert_close(mass_B, kernels.gram_norms(a, grads)[1], rtol=1.5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_small_inputs_together_equal_each_by_itself(tokens, dtype):
    """Inputs and gradients of equal and of different widths, more than are computed at a time."""
    widths = [(8, (8, 4)), (200, (8,)), (8, (300, 8)), (4, (4,))] * 10
    groups = [
        (torch.randn(4, tokens, d).to(dtype), [torch.randn(4, tokens, p).to(dtype) for p in outputs])
        for d, outputs in widths
    ]
    for (sq_norm_B, mass_B), (a, grads) in zip(NormMethod("gram").grouped_outer_norms(groups), groups, strict=True):
        close = 1e-12 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(sq_norm_B.double(), exact(a, grads), rtol=close, atol=0)
        masses = [(a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1).square() for g in grads]
        assert (mass_B.double() >= sum(masses) * (1 - 1e-5)).all()


class Scaled(torch.nn.Module):
    """A linear layer used once or more often, behind a small factor and in front of a large one."""

    def __init__(self, uses):
        super().__init__()
        self.layer, self.uses = torch.nn.Linear(64, 64, bias=False), uses

    def forward(self, x):
        return sum(1e18 * self.layer(1e-24 * (x + use)) for use in range(self.uses))


@kills(
    "a norm whose products underflow has no slack",
    "dpllm/ghost/kernels.py",
    ".diagonal(dim1=1, dim2=2).clamp_min(least) for gram in grams",
    ".diagonal(dim1=1, dim2=2).clamp_min(0) for gram in grams",
)
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("norm_method", [NormMethod("gram"), NormMethod("tiled"), NormMethod(backward_passes=2)])
def test_a_unit_whose_squares_underflow_is_clipped(norm_method, uses):
    """The squares of its inputs are 0 in float32; its gradient is not, and was released as it was (257 C)."""
    model = Scaled(uses)
    clipper = GhostClipper(model, 1e-6, norm_method=norm_method)
    clipper.backward(model(torch.rand(1, 8, 64)).sum((1, 2)))
    assert model.layer.weight.grad.double().norm() <= 1e-6


def test_the_tiled_algorithm_is_chosen_where_it_costs_less():
    """2 T D P operations against T^2 (D + P): T decides."""
    norm_method = NormMethod()
    for tokens, tiles in ((100, False), (300, True)):
        assert norm_method._tiles(torch.zeros(1, tokens, 128), 128) is tiles
    assert NormMethod("tiled")._tiles(torch.zeros(1, 1, 9), 9)
    assert not NormMethod("gram")._tiles(torch.zeros(1, 99, 2), 2)


def test_the_instance_is_held_where_it_takes_no_more_memory():
    """Or half as much again on a CPU; unless an algorithm is given."""
    assert NormMethod().holds_instance(factor_bytes=8, instance_bytes=8) and not NormMethod().holds_instance(7, 8)
    assert NormMethod().holds_instance(8, 12, on_cpu=True) and not NormMethod().holds_instance(8, 13, on_cpu=True)
    assert NormMethod("instance").holds_instance(1, 8) and not NormMethod("gram").holds_instance(8, 1)


def test_kernels_are_left_alone_on_the_cpu():
    """Triton's interpreter is for tests: on the CPU, PyTorch computes unless fused kernels are requested."""
    assert not NormMethod().fuses(torch.zeros(2))
    assert not NormMethod().fuses(torch.zeros(2, dtype=torch.float64))


@needs_triton
def test_kernels_can_be_asked_for():
    """And are then used: they refuse a float64 tensor, which they do not support."""
    with pytest.raises(ValueError, match="bfloat16"):
        NormMethod("gram", fused=True).outer_norms(torch.zeros(1, 2, 3).double(), [torch.zeros(1, 2, 3).double()])


def test_unknown_algorithms_are_refused():
    """A typo is not treated as the default."""
    with pytest.raises(ValueError, match="grams"):
        NormMethod(algorithm="grams")


def test_kernels_that_cannot_run_are_refused(monkeypatch):
    """Requesting unavailable kernels is an error; PyTorch does not replace them silently."""
    monkeypatch.setattr(triton_launch, "available", lambda: False)
    with pytest.raises(ValueError, match="CUDA device"):
        NormMethod(fused=True)
