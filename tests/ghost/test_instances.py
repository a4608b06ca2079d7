"""Small parameters whose gradients of units lie side by side: norms and sums are those of a loop."""

import copy

import pytest
import torch
from torch import nn

from dpllm import GhostClipper
from tests.ghost.loop import flat, row_gradients
from tests.mutations import kills


class Net(nn.Module):
    """A narrow layer used twice, norms and biases; and a wide layer, whose factors are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(40, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.wide, self.last = nn.Linear(4, 400, bias=False), nn.Linear(400, 1)

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(self.norm(self.first(x)))))
        return self.last(torch.tanh(self.wide(x)))


def losses(net, batch):
    return net(batch["x"]).square().sum((1, 2))


@kills(
    "rows in another order than their units are taken for them",
    "dpllm/ghost/contributions.py",
    "one_each = np.array_equal(unit[real], np.arange(num_units)) and",
    "one_each = len(real) == num_units and",
)
@pytest.mark.parametrize("unit_of_row", [[0, 1, 2], [2, 0, 1], [1, 0, 1], [0, 0, 1], [0, -1, 1], [0, 1, -1]])
def test_norms_and_sums_of_several_microbatches_are_those_of_a_loop(unit_of_row):
    """The length of the rows decides which parameters are held as gradients; padding may be anywhere."""
    torch.manual_seed(0)
    net = Net().double()
    unhooked = copy.deepcopy(net)
    clipper = GhostClipper(net, 0.1)
    unit_B, parameters = torch.tensor(unit_of_row), list(net.parameters())
    for tokens in (30, 30, 7, 30):
        x = torch.randn(3, tokens, 40).double()
        net.zero_grad()
        of_rows = row_gradients(unhooked, losses, {"x": x})
        result = clipper.backward(losses(net, {"x": x}), unit_B)
        gradient_UP = torch.zeros(int(unit_B.max()) + 1, len(of_rows[0])).double()
        gradient_UP.index_add_(0, unit_B[unit_B >= 0], of_rows[unit_B >= 0])
        norm_U = gradient_UP.norm(dim=1)
        torch.testing.assert_close(result.norms.double(), norm_U, rtol=1e-6, atol=0)
        expected = (gradient_UP * (0.1 / norm_U)[:, None]).sum(0)
        torch.testing.assert_close(flat([p.grad for p in parameters], parameters), expected, rtol=1e-5, atol=1e-9)
    clipper.remove()
