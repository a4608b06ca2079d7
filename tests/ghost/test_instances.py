"""Small parameters whose gradients of units lie side by side: norms and sums are those of a loop."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dpllm import GhostClipper
from dpllm.ghost import NormMethod
from dpllm.ghost.sums import Sum
from dpllm.mechanism.clipping import PerLayerClipping
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
    "dpllm/ghost/unit_gradients.py",
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


class Blocks(nn.Module):
    """Two blocks of equal shapes; in each, three layers read one input. All are small enough to be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(24, width, bias=False) for name, width in (("q", 24), ("k", 8), ("v", 8))})
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            q, k, v = (block[name](x) for name in "qkv")
            x = torch.tanh(q) + (k * v).repeat(1, 1, 3)
        return x


@kills(
    "a stack of several groups gets the factors of one",
    "dpllm/ghost/unit_gradients.py",
    "[of_groups[group].factor for group in self.groups]",
    "[of_groups[self.groups[0]].factor for group in self.groups]",
)
@kills(
    "a stack multiplies what is not finite by 0",
    "dpllm/ghost/unit_gradients.py",
    "if not all(of_group.all_count for of_group in of_groups.values()):",
    "if False:",
)
@kills(
    "layers of one input are taken for layers of one shape",
    "dpllm/ghost/unit_gradients.py",
    "use.input_side, x.data_ptr(), x.shape",
    "use.input_side, x.shape",
)
@pytest.mark.parametrize("clipping", ["flat", "per-layer", "per-layer with norms of parameters"])
@pytest.mark.parametrize("side", ["linear", "conv1d"])
@pytest.mark.parametrize("unit_of_row", [[0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 2, -1], [1, 0, 1, 1]], ids=str)
def test_small_layers_side_by_side_are_those_of_a_loop(unit_of_row, side, clipping):
    """Of one input and of several, in one group of parameters and in several, and with a unit that is not finite."""
    torch.manual_seed(0)
    net = Blocks().double()
    if side == "conv1d":
        for block in net.blocks:
            for name, layer in list(block.items()):
                block[name] = Conv1D(layer.out_features, layer.in_features).double()
                nn.init.normal_(block[name].weight, std=0.3)
                block[name].bias.requires_grad_(False)
    unhooked, parameters = copy.deepcopy(net), list(net.parameters())
    kind = {"clip_norm": 0.1} if clipping == "flat" else {"clipping": PerLayerClipping(0.1)}
    clipper = GhostClipper(net, norm_method=NormMethod("gram"), parameter_norms="norms" in clipping, **kind)
    unit_B = torch.tensor(unit_of_row)
    for worst in (None, 0, None):
        x = torch.randn(4, 6, 24).double()
        net.zero_grad()
        rows = row_gradients(unhooked, losses, {"x": x})
        units = rows.new_zeros(int(unit_B.max()) + 1, rows.shape[1]).index_add_(
            0, unit_B[unit_B >= 0], rows[unit_B >= 0]
        )
        if worst is not None:
            x[worst] = math.inf
            units[unit_B[worst]] = 0
        result = clipper.backward(losses(net, {"x": x}), unit_B)
        trained = [p for p in parameters if p.requires_grad]
        groups = [units] if clipping == "flat" else units.split(units.shape[1] // 2, 1)  # per-layer: of each block
        bound = 0.1 / len(groups) ** 0.5
        scaled = torch.cat([g * (bound / g.norm(dim=1)).nan_to_num(0, 0, 0).clamp(max=1)[:, None] for g in groups], 1)
        found = flat([p.grad for p in trained], trained)
        torch.testing.assert_close(found, scaled.sum(0), rtol=1e-5, atol=1e-9)
        assert result.num_nonfinite == (worst is not None)
    assert not clipper.row_by_row  # a wrong norm is seen in the first call, and mended
    clipper.remove()


class Sides(nn.Module):
    """A linear layer and one with the transposed weight read one input."""

    def __init__(self, outputs) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(24, outputs, bias=False), Conv1D(outputs, 24)
        nn.init.normal_(self.conv.weight, std=0.3)
        self.conv.bias.requires_grad_(False)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * torch.sigmoid(self.conv(x))


class Conjugates(nn.Module):
    """Two layers read tensors that lie in one place, with opposite signs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 16, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x):
        z = torch.complex(x, x.flip(2))
        return torch.tanh(self.first(z.imag)) + torch.sigmoid(self.second(z.conj().imag))


@kills(
    "layers of one input are stacked whichever way their weights lie",
    "dpllm/ghost/unit_gradients.py",
    "groups.get(key, 0), use.input_side, x.data_ptr()",
    "groups.get(key, 0), x.data_ptr()",
)
@kills("inputs of opposite signs are taken for one", "dpllm/ghost/taps.py", "if x.is_neg():", "if False:")
@pytest.mark.parametrize("make", [lambda: Sides(24), lambda: Sides(40), Conjugates], ids=["square", "wide", "signs"])
def test_layers_side_by_side_after_a_first_call_that_was_too_long_for_it(make):
    """The comparison of the first call does not see them there."""
    torch.manual_seed(0)
    net = make().double()
    clipper = GhostClipper(net, 0.1, norm_method=NormMethod("gram"))
    unhooked, parameters = copy.deepcopy(net), list(net.parameters())
    for tokens in (150, 6, 150, 6):
        x = torch.randn(3, tokens, 24).double()
        net.zero_grad()
        rows = row_gradients(unhooked, losses, {"x": x})
        result = clipper.backward(losses(net, {"x": x}))
        torch.testing.assert_close(result.norms.double(), rows.norm(dim=1), rtol=1e-6, atol=0)
        trained = [p for p in parameters if p.requires_grad]
        expected = (rows * (0.1 / rows.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
        torch.testing.assert_close(flat([p.grad for p in trained], trained), expected, rtol=1e-5, atol=1e-9)
    assert not clipper.row_by_row
    clipper.remove()


def test_gradients_that_lie_side_by_side_may_be_changed_in_place():
    """With gradients on, as an optimizer of one's own may do."""
    net = Blocks()
    GhostClipper(net, 0.1).backward(losses(net, {"x": torch.randn(4, 6, 24)}))
    before = [p.grad.clone() for p in net.parameters()]
    for parameter in net.parameters():
        parameter.grad += parameter.detach()
    for parameter, grad in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, grad + parameter.detach())


@pytest.mark.parametrize("method", [NormMethod("gram"), NormMethod()], ids=str)
@pytest.mark.parametrize("clipping", [None, PerLayerClipping(0.1)], ids=["flat", "per-layer"])
def test_a_microbatch_of_padding_only(method, clipping):
    """It has no unit, and adds nothing."""
    net = Blocks()
    clipper = GhostClipper(net, None if clipping else 0.1, clipping=clipping, norm_method=method)
    for units in (4, 0):
        unit_B = torch.arange(4) if units else torch.full((4,), -1)
        net.zero_grad()
        assert clipper.backward(losses(net, {"x": torch.randn(4, 6, 24)}), unit_B).norms.shape == (units,)
    assert not any(bool(p.grad.any()) for p in net.parameters())


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_sum_that_ran_out_of_memory_can_be_formed_again(where, monkeypatch):
    """What lies side by side is given up only when its sums exist."""
    net = Blocks()
    clipper = GhostClipper(net, 0.1, norm_method=NormMethod("gram"))
    clipper.backward(losses(net, {"x": torch.randn(4, 6, 24)}))
    batch = {"x": torch.randn(4, 6, 24)}
    net.zero_grad()
    clipper.backward(losses(net, batch))
    parameters = list(net.parameters()) if where == "first" else list(net.parameters())[::-1]
    clipper.clip(losses(net, batch))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "bmm", shortage)
        clipper.add_clipped_sum_(parameters[0], Sum.of(parameters[0]))
    for parameter in parameters:
        total = Sum.of(parameter)
        clipper.add_clipped_sum_(parameter, total)
        torch.testing.assert_close(total.filled(), parameter.grad)


def shortage(*_):
    raise torch.OutOfMemoryError("none left")
