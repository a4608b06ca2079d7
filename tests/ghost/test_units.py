"""Units, padding and losses: what a unit releases is bounded, and what has no unit releases nothing."""

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, GhostError, per_sequence_loss
from dpllm.ghost import NormMethod
from tests.ghost.loop import Net
from tests.mutations import kills


def x(rows=5):
    return torch.randn(rows, 3)


@pytest.mark.parametrize(
    ("losses", "match"),
    [
        (lambda net: net(x()).mean(), r"shape \(\).*one loss per row"),
        (lambda net: net(x())[:, None], r"shape \(5, 1\)"),
        (lambda net: net(x()).detach(), "no graph"),
        (lambda net: net(x())[:0], r"shape \(0,\)"),
    ],
    ids=["scalar", "column", "no graph", "empty"],
)
def test_losses_of_another_form_are_refused(losses, match):
    """A batch mean or a broadcast column cannot be clipped per unit."""
    net = Net()
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=match):
        clipper.backward(losses(net))


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (torch.zeros(4, dtype=torch.int64), r"shape \(4,\)"),
        (torch.zeros(5), "dtype torch.float32"),
        (torch.tensor([0, 1, -2, 0, 1]), "contains -2"),
    ],
)
def test_a_wrong_unit_index_is_refused(index, match):
    """Rows must be assigned to units one by one."""
    net = Net()
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=match):
        clipper.backward(net(x()), index)


@kills(
    "padding rows stay in the sum",
    "dpllm/ghost/receivers.py",
    "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 0, 0)",
    "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 1.0, 1.0)",
)
def test_padding_rows_get_no_gradient_even_if_they_are_not_finite():
    """unit_index -1: weight 0, also for a row whose forward pass overflows."""
    net, inputs = Net(), x(3)
    clipper = GhostClipper(net, 0.5)
    clipper.backward(net(inputs[:2]))
    alone = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    inputs[2] = float("inf")
    result = clipper.backward(net(inputs), torch.tensor([0, 1, -1]))
    assert result.norms.shape == (2,)
    for p, a in zip(net.parameters(), alone, strict=True):
        torch.testing.assert_close(p.grad, a)


@kills(
    "padding rows get weight 1",
    "dpllm/ghost/clipper.py",
    "weight_B = (one.rows.unit_B >= 0).to(loss_B.dtype)",
    "weight_B = torch.ones_like(loss_B)",
)
def test_the_loss_of_a_padding_row_is_not_differentiated():
    """The backward pass gives it no gradient, before any factor is applied."""
    seen = []

    class Seen(nn.Module):
        def forward(self, h):
            if h.requires_grad:
                h.register_hook(lambda grad: seen.append(grad.flatten(1).any(1).tolist()))
            return h * 1.0

    net = Net(Seen())
    clipper = GhostClipper(net, 1.0)
    for _ in range(2):  # the first call compares rows too
        seen.clear()
        clipper.backward(net(x(3)), torch.tensor([0, -1, 1]))
    assert seen == [[True, False, True]]


def test_only_padding_rows_leave_zero_gradients():
    """An empty step still has a gradient to add noise to."""
    net = Net()
    clipper = GhostClipper(net, 0.5)
    result = clipper.backward(net(x(1)), torch.tensor([-1]))
    assert result.norms.numel() == 0
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("passes", [1, 2])
def test_a_nonfinite_unit_contributes_exactly_zero(tiny_llama, passes):
    """And every other unit contributes the same as without it."""
    ids = torch.randint(3, 61, (3, 6))
    clipper = GhostClipper(tiny_llama, 0.1, NormMethod(backward_passes=passes))
    clipper.backward(per_sequence_loss(tiny_llama(input_ids=ids[:2]).logits, ids[:2]))
    alone = [p.grad.clone() for p in tiny_llama.parameters()]
    tiny_llama.zero_grad()
    scale = torch.tensor([1.0, 1.0, float("nan")])
    result = clipper.backward(per_sequence_loss(tiny_llama(input_ids=ids).logits, ids) * scale)
    assert result.num_nonfinite == 1 and float(result.factors[2]) == 0.0
    for p, a in zip(tiny_llama.parameters(), alone, strict=True):
        torch.testing.assert_close(p.grad, a, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tokens", [4, 1500])
@pytest.mark.parametrize("several", [False, True], ids=["one row", "two rows"])
def test_what_a_unit_releases_through_a_large_layer_is_within_the_bound(tokens, several):
    """A million entries in one weight, as factors and as instance: the released norm is at most C and close to it."""
    torch.manual_seed(0)
    model = nn.Linear(1024, 1536)
    rows = 2 if several else 1
    clipper = GhostClipper(model, clip_norm=0.5)
    losses = model(torch.ones(rows, tokens, 1024)).sum((1, 2))
    result = clipper.backward(losses, torch.zeros(rows, dtype=torch.long))
    clipper.remove()
    released = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm()
    assert 0.5 * (1 - 2e-3) <= float(released) <= 0.5
    exact = rows * tokens * (1536 * 1024 + 1536) ** 0.5
    assert result.norms.tolist() == pytest.approx([exact], rel=1e-5)
