"""Products that a module forms by hand with its own matrices: exact, whatever the module returns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpllm import GhostClipper, GhostError
from dpllm.ghost import NormMethod
from tests.ghost.loop import assert_is_the_loop, perturbed
from tests.mutations import kills

ALGORITHMS = ("gram", "instance")
UNITS = torch.tensor([0, 1, 0, 2, 1])


class Router(nn.Module):
    """Returns a tuple, from flattened rows, as routers of transformers 5 do."""

    def __init__(self, cast=False, bias=True, uses=1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.randn(4)) if bias else None
        self.cast, self.uses, self.also = cast, uses, None

    def forward(self, x):
        x = x.reshape(-1, 6)
        weight = self.weight.type(torch.float32) if self.cast else self.weight
        logits = F.linear(x.to(weight.dtype), weight, self.bias if not self.cast else None)
        for _ in range(self.uses - 1):
            logits = logits.tanh() + F.linear(x.to(weight.dtype), weight=weight)
        if self.also is not None:
            logits = logits + self.also(self.weight)
        return logits, logits.softmax(-1)


class Net(nn.Module):
    """A router between two linear layers."""

    def __init__(self, router):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(3, 6), router, nn.Linear(4, 1)

    def forward(self, x):
        logits, weights = self.router(self.first(x).tanh())
        return self.last((logits * weights).to(x.dtype)).view(*x.shape[:2])


def losses(model, batch):
    """One loss per row."""
    return model(batch["x"]).square().sum(1)


def batch():
    """Five rows of three tokens."""
    return {"x": torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"cast": True, "bias": False}, {"uses": 2}], ids=str)
def test_a_router_is_exact(settings, algorithm):
    """Its tuple, its flattened rows, its products in float32, and a matrix used twice."""
    torch.manual_seed(0)
    assert_is_the_loop(perturbed(Net(Router(**settings))), losses, batch(), NormMethod(algorithm), UNITS)


def test_another_use_of_the_matrix_counts():
    """Beside the product; a norm is one value for all rows."""
    torch.manual_seed(0)
    net = Net(Router())
    net.router.also = torch.linalg.norm
    assert_is_the_loop(perturbed(net), losses, batch(), unit_index=UNITS)


def test_another_use_that_starts_later_counts():
    """Every call is watched, not only the first."""
    torch.manual_seed(0)
    net = Net(Router()).double()
    clipper = GhostClipper(net, 1e6)
    for also in (None, torch.linalg.norm):
        net.router.also = also
        net.zero_grad()
        clipper.backward(losses(net, batch()))
    clipper.remove()
    found = net.router.weight.grad.clone()
    net.zero_grad()
    losses(net, batch()).sum().backward()
    torch.testing.assert_close(found, net.router.weight.grad, rtol=1e-5, atol=1e-8)


def test_a_call_that_fails_is_not_taken_for_the_first():
    """Its uses are incomplete."""
    torch.manual_seed(0)
    net = perturbed(Net(Router()))
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(RuntimeError, match="shape"):
        net(torch.randn(2, 3, 5, dtype=torch.float64))
    clipper.backward(losses(net, batch()))
    clipper.remove()


class Multiply(torch.autograd.Function):
    """A linear layer as ZeRO-3 computes it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(weight)
        if x.dim() == 2:
            return torch.addmm(bias, x, weight.t())
        output = x.matmul(weight.t())
        output += bias
        return output

    @staticmethod
    def backward(ctx, grad):
        return grad.matmul(ctx.saved_tensors[0]), None, None


def partitioned(net, there=True):
    """Mark the parameters as DeepSpeed marks those of ZeRO-3."""
    for parameter in net.parameters() if there else ():
        parameter.ds_id, parameter.ds_status = 0, None
    return net


@kills(
    "a use within a function of another library is taken for ZeRO-3's own",
    "dpllm/ghost/uses.py",
    "            raise unseen_use(found.names[0])\n",
    "            pass\n",
)
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_product_within_a_function_of_another_library_is_refused(dimensions, there):
    """Its own derivative is not known. A graph does not show the use of a partitioned weight, and the mode does."""

    class Inside(Router):
        def forward(self, x):
            x = x.reshape(-1, 6) if dimensions == 2 else x
            logits = Multiply.apply(x, self.weight, self.bias)
            return logits, logits.softmax(-1)

    net = partitioned(Net(Inside()).double(), there)
    clipper = GhostClipper(net, 0.1)
    with pytest.raises(GhostError, match="router"):
        clipper.backward(losses(net, batch()))
    assert all(p.grad is None for p in net.parameters())


def test_a_partitioned_weight_within_such_a_function_and_in_its_own_layer_is_refused():
    """The weight of a layer with a rule stays out of autograd under ZeRO-3, so that no graph shows its other use."""

    class Again(Net):
        def forward(self, x):
            return super().forward(x) + Multiply.apply(x, self.first.weight, self.first.bias).sum(-1)

    net = partitioned(Again(Router()).double())
    clipper = GhostClipper(net, 0.1)
    with pytest.raises(GhostError, match="operation that cannot"):
        clipper.backward(losses(net, batch()))


class Zero3(Multiply):
    """ZeRO-3's own linear function."""


Zero3.__module__ = "deepspeed.runtime.zero.linear"


class PartitionedRouter(Router):
    """Its products are inside ZeRO-3's function; a copy of it is not partitioned, and uses ``F.linear``."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def multiply(self, x, weight, bias):
        function = Zero3.apply if hasattr(self.weight, "ds_id") else F.linear
        return function(x, weight, bias)

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if self.place == "cast":
            weight, bias = weight.type(torch.float64), bias.to(torch.float64)
        logits = self.multiply(x if self.place == "rows" else x.reshape(-1, 6), weight, bias)
        return self.multiply(logits, weight[:, :4], bias) if self.place == "twice" else logits


class Partitioned(nn.Module):
    """Such a router between two layers; its output is that of the function."""

    def __init__(self, place):
        super().__init__()
        self.place, self.first, self.router = place, nn.Linear(3, 6), PartitionedRouter(place)
        self.last = nn.Identity() if place == "returned" else nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.place == "function":
            logits = checkpoint(self.router.forward, hidden, use_reentrant=True)
        elif self.place.startswith("reentrant"):
            logits = checkpoint(self.router, hidden, use_reentrant=self.place == "reentrant=True")
        else:
            logits = self.router(hidden)
        logits = logits if self.place in ("linear", "returned") else logits.tanh()
        return {"logits": self.last(logits)}


def partitioned_losses(model, batch):
    """One loss per row."""
    return model(batch["x"])["logits"].reshape(len(batch["x"]), -1).square().sum(1)


PLACES = ("tokens", "rows", "cast", "twice", "linear", "returned", "reentrant=True", "reentrant=False")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_product_within_zero3_s_own_function_is_exact(algorithm, place):
    """Its twin takes its place where it is used: by a function, a layer with a rule, the function itself, the loss."""
    torch.manual_seed(0)
    net = partitioned(perturbed(Partitioned(place)))
    assert_is_the_loop(net, partitioned_losses, batch(), NormMethod(algorithm), UNITS)


def test_a_product_within_zero3_s_own_function_that_is_recomputed_by_a_function_is_refused():
    """A recomputed function, not a module, is out of sight, so its gradient would be missing."""
    net = partitioned(perturbed(Partitioned("function")))
    clipper = GhostClipper(net, 0.1)
    with pytest.raises(GhostError, match="router"):
        clipper.backward(partitioned_losses(net, batch()))


class Dense(nn.Module):
    """Every expert is given every token, as in Llama 4."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 5)), nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x):
        tokens = x.reshape(-1, 6)
        inner = torch.bmm(tokens.repeat(3, 1).view(3, -1, 6), self.up).tanh()
        return torch.bmm(inner, self.down).sum(0), None


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "tiled"])
def test_batched_products_are_exact(algorithm):
    """The first dimension runs over experts, and rows lie within the second."""

    class DenseNet(Net):
        def forward(self, x):
            return self.last(self.router(self.first(x))[0]).view(*x.shape[:2])

    torch.manual_seed(0)
    assert_is_the_loop(perturbed(DenseNet(Dense())), losses, batch(), NormMethod(algorithm), UNITS)
