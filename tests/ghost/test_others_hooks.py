"""Hooks and forward passes that a user puts on modules with a rule, in watched calls (1, 2, 4) and in others (3, 5)."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpllm import GhostClipper, GhostError
from tests.ghost.loop import flat


class Net(nn.Module):
    """Tokens to one number each; ``change`` is applied to the features between the layers."""

    def __init__(self, change=None):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(11, 4), nn.LayerNorm(4)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.change = change

    def forward(self, ids):
        h = torch.tanh(self.norm(self.table(ids)))
        h = self.first(h) if self.change is None else self.change(self.first, h)
        return self.last(torch.tanh(h))


IDS = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(1))


def losses(model, ids=IDS):
    return model(ids).square().sum((1, 2))


def warmed(call):
    """A model whose next call is the given one, and its clipper."""
    model = Net().double()
    clipper = GhostClipper(model, 0.05)
    for _ in range(1, call):
        clipper.backward(losses(model))
        model.zero_grad()
    return model, clipper


def assert_is_the_loop(model, clipper, change):
    """Norms and sum are those of autograd on another model that was changed in the same way."""
    other = Net().double()
    change(other)
    parameters = list(other.parameters())
    rows = torch.stack(
        [flat(torch.autograd.grad(losses(other, row[None]).sum(), parameters), parameters) for row in IDS]
    )
    result = clipper.backward(losses(model))
    torch.testing.assert_close(result.norms.double(), rows.norm(dim=1), rtol=1e-6, atol=0)
    found = flat([p.grad for p in model.parameters()], parameters)
    torch.testing.assert_close(found, result.factors.double() @ rows, rtol=1e-5, atol=1e-9)


def on_hook(model):
    model.first.register_forward_hook(lambda module, args, output: output * 2, prepend=True)


@pytest.mark.parametrize("call", [1, 3, 4])
def test_a_hook_that_was_registered_later_changes_the_output_behind_the_tap(call):
    """In front of ours, it changed the output before the gradient of it was taken for the module's own."""
    model, clipper = warmed(call)
    on_hook(model)
    assert_is_the_loop(model, clipper, on_hook)


def uses_before(model):
    model.first.register_forward_pre_hook(lambda module, args: (args[0] + module.weight.mean(0),))


def uses_after(model):
    model.first.register_forward_hook(lambda module, args, out: out + module.weight.sum(), prepend=True)


@pytest.mark.parametrize("change", [uses_before, uses_after])
def test_a_hook_that_was_registered_later_may_use_the_parameter(change):
    """It ran while the parameter was out of autograd, so that this use was missing; in call 3 it is refused."""
    model, clipper = warmed(1)
    change(model)
    assert_is_the_loop(model, clipper, change)
    model, clipper = warmed(3)
    change(model)
    with pytest.raises(GhostError, match=r"first\.weight"):
        clipper.backward(losses(model))


def twice(module, old, x):
    return 2 * old(x)


def another_forward(name, model):
    module = model.get_submodule(name)
    module.forward = functools.partial(twice, module, module.forward)


@pytest.mark.parametrize("name", ["first", "norm", "table"])
def test_a_forward_that_was_put_on_a_module_is_the_one_that_counts(name):
    """As accelerate puts one on modules that it moves; that of the class gave another gradient."""
    model = Net().double()
    another_forward(name, model)
    clipper = GhostClipper(model, 0.05)
    for _ in range(3):
        assert_is_the_loop(model, clipper, functools.partial(another_forward, name))
        model.zero_grad()
    clipper.remove()


@pytest.mark.parametrize("call", [1, 3])
def test_a_forward_that_is_put_on_a_module_later_is_refused(call):
    """Its rule was chosen by the one before."""
    model, _ = warmed(call)
    another_forward("first", model)
    with pytest.raises(GhostError, match="forward after"):
        losses(model)


def in_vmap(layer, h):
    return torch.func.vmap(layer)(h)


def in_grad(layer, h):
    return layer(h) + torch.func.grad(lambda x: layer(x).sum())(h).sum(-1, keepdim=True)


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("change", [in_vmap, in_grad])
def test_a_module_within_a_transform_is_refused_by_name(change, call):
    """It ended in an error of PyTorch about its own internals."""
    model, clipper = warmed(call)
    model.change = change
    with pytest.raises(GhostError, match=r"torch\.func"):
        losses(model)
    model.change = None
    assert_is_the_loop(model, clipper, lambda _: None)


def beside(layer, h):
    return layer(h + layer.weight.mean(0))


def instead(layer, h):
    return F.linear(h, layer.weight, layer.bias)


CHANGES = [(beside, "wrote a gradient that is not clipped to first.weight.grad"), (instead, "No gradient reached 2")]


@pytest.mark.parametrize("there_and_back", [False, True])
@pytest.mark.parametrize(("change", "error"), CHANGES)
def test_a_gradient_that_no_rule_saw_is_dropped(change, error, there_and_back):
    """A change of dtype gives parameters other nodes, without our hooks: raw gradients were released in call 5."""
    model = Net()
    clipper = GhostClipper(model, 1e-3)
    for _ in range(4):
        clipper.backward(losses(model))
        model.zero_grad()
    model.double()
    if there_and_back:
        model.float()
    model.change = change
    with pytest.raises(GhostError, match=error):
        clipper.backward(losses(model))
    assert all(p.grad is None for p in model.parameters())
    model.change = None
    clipper.backward(losses(model))
    assert float(flat([p.grad for p in model.parameters()], list(model.parameters())).norm()) <= 4e-3
