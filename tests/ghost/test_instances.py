"""Gradients of units side by side: norms and sums are those of a loop, and free places and other slots never count."""

import copy

import pytest
import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.ghost import NormMethod, instances
from dpllm.ghost.instances import Pool, Widths
from tests.ghost.loop import flat, row_gradients
from tests.mutations import kills

CPU = torch.device("cpu")
KIND = (0, torch.float64, CPU)


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
    "in_order = np.array_equal(unit, np.arange(num_units))",
    "in_order = len(unit) == num_units",
)
@pytest.mark.parametrize("unit_of_row", [[0, 1, 2], [2, 0, 1], [1, 0, 1], [0, -1, 1]])
def test_norms_and_sums_of_several_microbatches_are_those_of_a_loop(unit_of_row):
    """The first microbatch teaches the widths; then rows of another length change which parameters have a place."""
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


def test_one_block_holds_the_parameters_of_a_group_as_soon_as_they_are_known():
    """A second pass has one block per group; a parameter that is missing then leaves no place that counts."""
    widths = Widths()
    for count in (3, 2):
        pool = Pool(widths, tokens=10, num_units=2, norm_method=NormMethod())
        slots = [pool.take(key, (key % 2, *KIND[1:]), torch.Size((3, key)), 100.0, 1.0) for key in range(1, count + 1)]
        for slot in slots:
            slot.value_U.fill_(1.0)
        blocks = pool.pop(1)
        assert len(blocks) == (2 if count == 3 else 1)
        assert sum(block.value_UP.sum() for block in blocks) == 2 * sum(s.shape.numel() for s in slots[::2])
        assert pool.pop(1) == [] and len(pool.pop(0)) == 1
    assert widths.of(10, 2, NormMethod()) == {(1, *KIND[1:]): 12, (0, *KIND[1:]): 6}
    assert widths.of(0, 2, NormMethod()) == {}  # factors of so few tokens would take less memory


def test_blocks_of_a_large_model_are_limited_and_hold_no_more_than_is_expected(monkeypatch):
    """Memory grows with the gradients that have arrived, by a block at a time, up to what all of them need."""
    monkeypatch.setattr(instances, "_BLOCK_BYTES", 2 * 10 * 8)  # ten entries of two units
    widths = Widths()
    for known in (False, True):
        pool = Pool(widths, tokens=10, num_units=2, norm_method=NormMethod())
        rooms = [pool.take(key, KIND, torch.Size((4,)), 100.0, 1.0).block.room for key in range(5)]
        large = pool.take(5, KIND, torch.Size((20,)), 100.0, 1.0)
        assert large.block.room == 0 and large.block.value_UP.shape == (2, 20)
        assert rooms == ([6, 2, 6, 2, 6] if known else [0] * 5)
    assert [block.value_UP.shape[1] for block in pool.pop(0)] == [8, 8, 4, 20]


def test_a_unit_with_factor_0_contributes_nothing_even_if_it_is_not_finite():
    """Not 0 * inf, for any parameter of the block."""
    pool = Pool(Widths(), tokens=1, num_units=2, norm_method=NormMethod())
    one, other = (pool.take(len(shape), KIND, torch.Size(shape), 1.0, 1.0) for shape in ((2, 2), ()))
    one.value_U.copy_(torch.tensor([[[1.0, 2], [3, 4]], [[float("inf"), float("nan")], [0, 1]]]))
    other.value_U.copy_(torch.tensor([5.0, float("-inf")]))
    factor_U = torch.tensor([0.5, 0.0]).double()
    assert torch.equal(one.weighted(factor_U), torch.tensor([[0.5, 1], [1.5, 2]]).double())
    assert torch.equal(other.weighted(factor_U), torch.tensor(2.5).double())
