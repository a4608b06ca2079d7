"""A gradient that reaches a trained parameter past all taps is an error in every step, and nothing is released."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpllm import GhostClipper, GhostError
from dpllm.ghost import NoRuleError
from dpllm.mechanism.clipping import PerLayerClipping
from tests.ghost.loop import Kernel, assert_is_the_loop, perturbed
from tests.mutations import kills

X = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """Two linear layers, a norm and a scale; ``also`` uses a parameter in another way from some step on."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.rand(5) + 0.5)
        self.also = None

    def forward(self, h):
        out = self.last(torch.tanh(self.norm(self.first(h)))) * self.scale
        return out if self.also is None else self.also(self, h, out)


class Net(nn.Module):
    """Two layers, the second recomputed in the backward pass or not."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.reentrant = Layer(), Layer(), reentrant

    def forward(self, x):
        h = self.one(x)
        return self.two(h) if self.reentrant is None else checkpoint(self.two, h, use_reentrant=self.reentrant)


def losses(model):
    return model(X).square().sum((1, 2))


def instead(module, h, **tensors):
    """Run a module with other tensors in the places of its parameters."""
    return torch.func.functional_call(module, tensors, (h,))


LATER = {
    "a function": lambda layer, h, out: out + h * layer.first.weight.mean(0),
    "a product": lambda layer, h, out: out + F.linear(h, layer.first.weight),
    "a kernel": lambda layer, h, out: out + Kernel.apply(h, layer.norm.weight),
    "in place of a module": lambda layer, h, out: F.layer_norm(h, (5,), layer.norm.weight, layer.norm.bias) + out,
    "a bias": lambda layer, h, out: out + layer.last.bias,
    "a number": lambda layer, h, out: out + layer.last.weight.norm(),
    "another matrix": lambda layer, h, out: out + instead(layer.first, h, weight=layer.last.weight * 2),
    "another parameter": lambda layer, h, out: out + instead(layer.first, h, weight=layer.last.weight),
    "another bias": lambda layer, h, out: out + instead(layer.first, h, bias=layer.norm.weight),
    "another norm": lambda layer, h, out: out + instead(layer.norm, h, weight=layer.last.bias),
}

CLIPPINGS = {
    "flat": {"clip_norm": 0.1},
    "per layer": {"clipping": PerLayerClipping(0.1)},
}


@kills(
    "a use that begins in step 3 is not seen",
    "dpllm/ghost/tapped_model.py",
    "            if gradient is not None and self.in_backward:",
    "            if False:",
)
@kills(
    "the gradient of a tensor in place of a weight is taken for the weight's",
    "dpllm/ghost/taps.py",
    "    return tensor is target.parameter or (",
    "    return True or (",
    case="3-another matrix-kept-flat",
)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("use", LATER)
@pytest.mark.parametrize("step", [3, 6])
def test_a_use_that_begins_in_a_later_step_is_refused(step, use, reentrant, clipping):
    """Whatever it is, also where the module is recomputed; the step before was exact, and so is a step after."""
    model = Net(reentrant)
    clipper = GhostClipper(model, **CLIPPINGS[clipping])
    for _ in range(step - 1):
        clipper.backward(losses(model))
        model.zero_grad()
    expected = clipper.backward(losses(model)).norms
    model.zero_grad()
    model.two.also = LATER[use]
    with pytest.raises(NoRuleError):
        clipper.backward(losses(model))
    assert all(p.grad is None for p in model.parameters())
    model.two.also = None
    clipper.forget()
    torch.testing.assert_close(clipper.backward(losses(model)).norms, expected)
    clipper.remove()


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "recomputed", "reentrant"])
@pytest.mark.parametrize("kind", ["first", "norm"])
def test_a_module_that_is_exchanged_after_attaching_is_refused(kind, reentrant, shares):
    """With the parameters of the one before, or with its own."""
    model = Net(reentrant)
    clipper = GhostClipper(model, 0.1)
    clipper.backward(losses(model))
    model.zero_grad()
    before = getattr(model.two, kind)
    other = nn.LayerNorm(5) if kind == "norm" else nn.Linear(5, 5)
    if shares:
        other.weight, other.bias = before.weight, before.bias
    setattr(model.two, kind, other)
    with pytest.raises(GhostError):
        clipper.backward(losses(model))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("call", [1, 3, 5])
@pytest.mark.parametrize("use", ["of the loss", "of a submodule", "of a penalty"])
def test_a_use_outside_the_model_is_refused(use, call):
    """Its gradient would be missing from norm and sum."""
    model = Net()
    clipper = GhostClipper(model, 1.0)
    for _ in range(call - 1):
        clipper.backward(losses(model))
        model.zero_grad()
    outside = {
        "of the loss": lambda: (X @ model.one.first.weight).sum((1, 2)),
        "of a submodule": lambda: model.one.first(X).sum((1, 2)),
        "of a penalty": lambda: sum(p.square().sum() for p in model.parameters()),
    }
    with pytest.raises(NoRuleError):
        clipper.backward(losses(model) + outside[use]())
    assert all(p.grad is None for p in model.parameters())


def test_backward_on_the_loss_itself_is_refused():
    """It would bypass clipping; it gives no parameter a gradient."""
    model = Net()
    clipper = GhostClipper(model, 1.0)
    for _ in range(2):
        with pytest.raises(GhostError, match=r"GhostClipper\.backward"):
            losses(model).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        clipper.backward(losses(model))
        model.zero_grad()


@pytest.mark.parametrize("place", ["first", "norm", "table", "whole"])
def test_other_tensors_in_the_places_of_parameters_get_none_of_their_gradients(place):
    """In the first call too: the sum is that of the loop."""

    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.table = nn.Linear(5, 5), nn.LayerNorm(5), nn.Embedding(6, 5)

        def forward(self, x):
            ids = (x[..., 0] > 0).long()
            if place == "whole":
                h = instead(self.first, x, weight=self.table.weight[:5] * 2, bias=self.norm.bias.exp())
            else:
                module = getattr(self, place)
                h = instead(module, ids if place == "table" else x, weight=module.weight.detach().tanh())
            return h + self.norm(self.first(x) + self.table(ids))

    def of(model, batch):
        return model(batch["x"]).square().sum((1, 2))

    assert_is_the_loop(perturbed(Placed()), of, {"x": X.double()}, unit_index=torch.tensor([0, 1, 0, 2]))


@kills(
    "a module may be called outside the model",
    "dpllm/ghost/tapped_model.py",
    "        if not WeightsCheck.plain_passes:\n",
    "        if False:\n",
)
def test_a_module_called_on_its_own_is_refused():
    """With gradients on; without them it computes as usual."""
    model = Net()
    clipper = GhostClipper(model, 1.0)
    clipper.backward(losses(model))
    for module in (model.one, model.one.first, model.one.norm):
        with pytest.raises(GhostError, match="directly"):
            module(X)
        with torch.no_grad():
            module(X)


@pytest.mark.parametrize("there_and_back", [False, True])
@pytest.mark.parametrize("use", ["a function", "a kernel"])
def test_a_change_of_dtype_does_not_hide_it(use, there_and_back):
    """It gives parameters other nodes in autograd: raw gradients were released in call 5."""
    model = Net()
    clipper = GhostClipper(model, 1e-3)
    for _ in range(4):
        clipper.backward(losses(model))
        model.zero_grad()
    model.double()
    x = X.double()
    if there_and_back:
        model.float()
        x = X
    model.one.also = LATER[use]
    with pytest.raises(GhostError):
        clipper.backward(model(x).square().sum((1, 2)))
    assert all(p.grad is None for p in model.parameters())
    model.one.also = None
    clipper.backward(model(x).square().sum((1, 2)))
    assert float(sum(p.grad.double().square().sum() for p in model.parameters())) ** 0.5 <= 4e-3


@kills(
    "a changed input is an error without a remedy",
    "dpllm/ghost/taps.py",
    '        if "modified by an inplace operation" not in str(error):\n            raise\n',
    "        raise\n",
)
def test_an_input_that_is_overwritten_later_is_an_error_that_says_so():
    """As in PyTorch, and with the remedy."""

    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.calm = nn.Linear(5, 4), nn.Linear(4, 1), True

        def forward(self, x):
            h = self.first(x) * 1.0
            out = self.last(h)
            if not self.calm:
                h += 1
            return out

    model = Overwriting()
    clipper = GhostClipper(model, 1.0)
    clipper.backward(losses(model))
    model.zero_grad()
    model.calm = False
    with pytest.raises(NoRuleError, match="x = x"):
        clipper.backward(losses(model))
    assert all(p.grad is None for p in model.parameters())
