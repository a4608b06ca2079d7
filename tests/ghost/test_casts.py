"""Under autocast, layers that read one tensor keep one cast of it, until it changes."""

import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.ghost.model_calls import PackedRows
from dpllm.ghost.taps import Call
from tests.ghost.loop import flat, row_gradients
from tests.mutations import kills


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


def assert_is_nearly_the_loop(net):
    """In bfloat16."""
    batch = {"x": torch.randn(3, 4, 6)}
    rows = row_gradients(net, losses, batch)
    clipper = GhostClipper(net, 1.0)
    result = clipper.backward(losses(net, batch))
    clipper.remove()
    torch.testing.assert_close(result.norms.double(), rows.double().norm(dim=1), rtol=2e-2, atol=0)
    trained = list(net.parameters())
    total = flat([p.grad for p in trained], trained).double()
    expected = result.factors.double() @ rows.double()
    assert float((total - expected).norm()) <= 2e-2 * float(expected.norm())


def test_one_cast_serves_all_layers_that_read_a_tensor():
    """So the Gram matrix of the input is computed once, and one copy is kept."""
    call, x = Call(None, 4, PackedRows({})), torch.randn(4, 3)
    first = call.cast(x, torch.bfloat16)
    assert call.cast(x, torch.bfloat16) is first and call.cast(x, torch.float16) is not first
    assert_is_nearly_the_loop(TwoReaders(changes=False))


@kills(
    "a tensor that changed in place is not cast again",
    "dpllm/ghost/taps.py",
    "known is x and version == x._version and",
    "known is x and",
)
def test_a_tensor_that_changed_in_place_is_cast_again():
    """The second layer read other values than the first, and its gradient is formed from these."""
    call, x = Call(None, 4, PackedRows({})), torch.randn(4)
    call.cast(x, torch.bfloat16)
    x.mul_(2.0)
    assert torch.equal(call.cast(x, torch.bfloat16), x.bfloat16())
    assert_is_nearly_the_loop(TwoReaders(changes=True))


def test_a_cast_without_gradients_is_not_taken_for_one_with_them():
    """A module that is called within no_grad reads the same tensor."""
    call, x = Call(None, 4, PackedRows({})), torch.randn(4, requires_grad=True)
    with torch.no_grad():
        call.cast(x, torch.bfloat16)
    assert call.cast(x, torch.bfloat16).requires_grad
