"""Under autocast, layers that read one tensor keep one cast of it, until it changes."""

import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.ghost.hooks import Casts
from tests.ghost.loop import flat, row_gradients


class TwoReaders(nn.Module):
    """Two layers that read one tensor, as query and key do."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.query, self.key = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)
        self.changes = changes

    def forward(self, x):
        x = self.first(x).float()
        query = self.query(x)
        if self.changes:
            x.mul_(2.0)
        return (query * self.key(x)).float().square().sum(dim=(1, 2))


def losses(net, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(batch["x"])


def inputs_kept(net, batch):
    """The addresses of the inputs from which the norms of query and key are computed, and the result."""
    clipper, found = GhostClipper(net, 1.0), {}
    record = clipper._book.record

    def watched(parameter, use):
        if parameter.ndim == 2:
            found[next(name for name, p in net.named_parameters() if p is parameter)] = use.right_BTR.data_ptr()
        record(parameter, use)

    clipper._book.record = watched
    result = clipper.backward(losses(net, batch))
    clipper.remove()
    return found, result


def test_one_cast_serves_all_layers_that_read_a_tensor():
    """Their keys are equal, so the Gram matrix of the input is computed once."""
    net, batch = TwoReaders(changes=False), {"x": torch.randn(3, 4, 6)}
    rows = row_gradients(net, losses, batch)
    found, result = inputs_kept(net, batch)
    assert found["query.weight"] == found["key.weight"] != found["first.weight"]
    torch.testing.assert_close(result.norms.double(), rows.double().norm(dim=1), rtol=2e-2, atol=0)
    trained = list(net.parameters())
    total = flat([p.grad for p in trained], trained).double()
    expected = result.factors.double() @ rows.double()
    assert float((total - expected).norm()) <= 2e-2 * float(expected.norm())


def test_a_tensor_that_changed_in_place_is_cast_again():
    """The second layer read other values than the first, and its gradient is formed from these."""
    casts, x = Casts(), torch.randn(4)
    first = casts.cast(x, torch.bfloat16)
    assert casts.cast(x, torch.bfloat16) is first and casts.cast(x, torch.float16) is not first
    x.mul_(2.0)
    assert torch.equal(casts.cast(x, torch.bfloat16), x.bfloat16())
    net, batch = TwoReaders(changes=True), {"x": torch.randn(3, 4, 6)}
    rows = row_gradients(net, losses, batch)
    found, result = inputs_kept(net, batch)
    assert found["query.weight"] != found["key.weight"]
    torch.testing.assert_close(result.norms.double(), rows.double().norm(dim=1), rtol=2e-2, atol=0)


def test_nothing_is_kept_after_a_call_and_after_a_pass():
    """Activations of a finished call would otherwise stay in memory until the next one."""
    net, batch = TwoReaders(changes=False), {"x": torch.randn(3, 4, 6)}
    clipper = GhostClipper(net, 1.0)
    loss_B = losses(net, batch)
    assert not clipper._book._hooks.calls.casts._recent
    clipper.backward(loss_B)
    assert not clipper._book._hooks.calls.casts._recent
    clipper.remove()
