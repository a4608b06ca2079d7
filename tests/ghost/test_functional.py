"""Parameters that functions use, not modules with a rule: every use has its exact per-row gradient, or is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpllm import GhostClipper, GhostError
from dpllm.ghost import NormMethod
from tests.ghost.loop import assert_is_the_loop, perturbed
from tests.mutations import kills

TOKENS, WIDTH = 6, 4
UNITS = torch.tensor([0, 1, 0, 2])


def batch_of(rows=4, tokens=TOKENS):
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(rows, tokens, WIDTH, generator=generator, dtype=torch.float64)}


def losses(model, batch):
    return model(batch["x"])


class Middle(nn.Module):
    """Holds parameters of several shapes; one of the functions below uses them."""

    def __init__(self, use):
        super().__init__()
        self.use = use
        self.vector, self.heads = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(2) + 0.5)
        self.matrix, self.number = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.tensor(0.7))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.places = nn.Embedding(9, WIDTH)

    def forward(self, h):
        return self.use(self, h), h


class Net(nn.Module):
    """A middle part between two linear layers; it returns a tuple."""

    def __init__(self, use, first=True):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.middle, self.last = Middle(use), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x))[0])).square().flatten(1).sum(1)


def in_steps(m, h):
    """A recurrence that uses its decay in every step."""
    state, out = torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state = state * torch.sigmoid(m.vector) + h[:, t]
        out.append(state)
    return torch.stack(out, 1)


def with_sinks(m, h):
    """As gpt-oss: one logit for each head beside those of the keys."""
    q = h.unflatten(2, (2, 2)).transpose(1, 2)
    scores = q @ q.mT
    sinks = m.heads.reshape(1, -1, 1, 1).expand(len(h), -1, h.shape[1], -1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ q).transpose(1, 2).flatten(2)


def assigned(m, h):
    """Writes a part of a tensor."""
    out = torch.zeros_like(h) * h
    out[:, 1:] = h[:, 1:] * m.vector
    return out + h


def convolved(m, h):
    """A depthwise convolution with the weight of a module that is not called, as in Mamba."""
    weight = m.conv.weight.squeeze(1)
    out = F.conv1d(h.transpose(1, 2), weight.unsqueeze(1), m.conv.bias, padding=2, groups=WIDTH)
    return F.silu(out[:, :, : h.shape[1]]).transpose(1, 2)


def twice(m, h):
    """One value of a parameter, used twice."""
    value = m.vector.exp()
    return h * value + value


USES = {
    "one value twice": twice,
    "scale": lambda m, h: h * m.vector + m.vector,
    "scale in place": lambda m, h: h.mul_(1.0).clone().mul_(m.vector).add_(m.vector),
    "gate of a derived value": lambda m, h: h * -torch.exp(m.vector.float().double()),
    "one number": lambda m, h: h * m.number,
    "softplus of a sum": lambda m, h: F.softplus(h + m.vector),
    "where": lambda m, h: torch.where(h > 0, h, m.vector),
    "power": lambda m, h: h.abs().clamp_min(0.1) ** m.vector,
    "by heads": lambda m, h: (h.unflatten(2, (2, 2)) * m.heads[:, None]).flatten(2),
    "product": lambda m, h: h @ m.matrix,
    "product, transposed": lambda m, h: h @ m.matrix.T,
    "linear with a bias": lambda m, h: F.linear(h, m.matrix, m.vector),
    "linear of flattened rows": lambda m, h: F.linear(h.flatten(0, 1), m.matrix, m.vector).view_as(h),
    "matrix before the rows": lambda m, h: (m.matrix @ h.mT).mT,
    "derived matrix": lambda m, h: F.linear(h, m.matrix * m.vector),
    "einsum": lambda m, h: torch.einsum("btd,de->bte", h, m.matrix),
    "heads before tokens": lambda m, h: (
        torch.baddbmm(m.heads[:, None, None], h.reshape(-1, 2, 2).permute(1, 0, 2), m.matrix.view(2, 2, 4)[..., :2])
        .permute(1, 0, 2)
        .reshape(h.shape)
    ),
    "layer norm": lambda m, h: F.layer_norm(h, (WIDTH,), m.vector, m.vector),
    "convolution by hand": convolved,
    "convolution by its module": lambda m, h: m.conv(h.mT)[..., : h.shape[1]].mT,
    "steps": in_steps,
    "sinks": with_sinks,
    "assignment": assigned,
    "positions": lambda m, h: h + m.places(torch.arange(h.shape[1])),
    "distances": lambda m, h: h + m.places((torch.arange(6)[:, None] - torch.arange(6)).abs()).sum(1),
    "prefix": lambda m, h: torch.cat([m.matrix[None].expand(len(h), -1, -1), h], 1)[:, : h.shape[1]],
    "two parameters": lambda m, h: torch.addcmul(h, h, m.vector) * (m.vector @ m.matrix),
}


def only_used(net):
    """Freeze the parameters of the middle that have no part in the loss."""
    net(batch_of(2)["x"]).sum().backward()
    for parameter in net.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
    return net


@kills(
    "the parts of a value that was expanded have each the gradient of all rows",
    "dpllm/ghost/origins.py",
    "            alone = torch.zeros_like(grad)\n",
    "            alone = grad.clone()\n",
)
@pytest.mark.parametrize("name", USES)
def test_every_way_of_using_a_parameter_is_the_loop(name):
    """Norms and sum, with units of several rows, over several microbatches."""
    net = only_used(perturbed(Net(USES[name])))
    assert_is_the_loop(net, losses, batch_of(), unit_index=UNITS, microbatches=2)


@kills(
    "a value computed from a parameter counts as one use, however often it is used",
    "dpllm/ghost/uses.py",
    "self._host.note_uses(parameters + parameters)",
    "self._host.note_uses(parameters)",
)
@pytest.mark.parametrize("name", ["one value twice", "product", "convolution by hand", "steps", "sinks", "positions"])
def test_two_passes_are_the_loop(name):
    """Where the number of uses must be known."""
    net = only_used(perturbed(Net(USES[name])))
    assert_is_the_loop(net, losses, batch_of(), NormMethod(backward_passes=2))


@pytest.mark.parametrize("name", ["scale", "product", "convolution by hand", "where", "sinks", "positions"])
def test_a_parameter_below_all_taps_is_the_loop(name):
    """No gradient shows there which tensors have the rows."""
    assert_is_the_loop(only_used(perturbed(Net(USES[name], first=False))), losses, batch_of())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["scale", "product", "convolution by hand", "steps", "sinks", "two parameters"])
def test_a_checkpointed_module_is_the_loop(name, reentrant):
    """Its functions run again in the backward pass, where they are served as well."""

    class Checkpointed(Net):
        def forward(self, x):
            h = checkpoint(self.middle, self.first(x), use_reentrant=reentrant)[0]
            return self.last(torch.tanh(h)).square().flatten(1).sum(1)

    assert_is_the_loop(only_used(perturbed(Checkpointed(USES[name]))), losses, batch_of(), microbatches=2)


def test_a_checkpointed_function_that_uses_a_parameter_is_refused_with_the_remedy():
    """It runs outside of modules, where its recomputation is not seen."""

    class Checkpointed(Net):
        def part(self, x):
            return (self.first(x) * self.middle.vector) @ self.middle.matrix

        def forward(self, x):
            return self.last(checkpoint(self.part, x, use_reentrant=False)).square().flatten(1).sum(1)

    net = only_used(perturbed(Checkpointed(USES["scale"])))
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match="checkpoint a module"):
        clipper.backward(losses(net, batch_of()))
    clipper.remove()
    assert all(parameter.grad is None for parameter in clipper.parameters.values())


def test_a_tied_weight_has_the_uses_of_its_layer_and_of_functions():
    """The cross term between them is a part of the norm."""

    class Tied(Net):
        def forward(self, x):
            h = self.first(x)
            return (F.linear(h.tanh(), self.first.weight) + self.first.weight.sum()).square().flatten(1).sum(1)

    net = perturbed(Tied(USES["scale"]))
    net.middle.requires_grad_(False)
    net.last.requires_grad_(False)
    assert_is_the_loop(net, losses, batch_of(), unit_index=UNITS)
    net.zero_grad()
    assert_is_the_loop(net, losses, batch_of(), NormMethod("gram", backward_passes=2))


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_a_batch_as_long_as_another_dimension_is_the_loop(rows):
    """Heads, tokens or features as many as rows must not be taken for rows."""
    net = only_used(perturbed(Net(lambda m, h: with_sinks(m, h * m.vector) @ m.matrix)))
    assert_is_the_loop(net, losses, batch_of(rows, tokens=rows))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["convolution by hand", "two parameters", "sinks"])
def test_a_share_in_bfloat16_is_within_the_bound(name, autocast):
    """A unit's share of the sum is at most C, whatever the model's arithmetic."""
    net = only_used(Net(USES[name]).double()).to(torch.float32 if autocast else torch.bfloat16)
    clipper = GhostClipper(net, 1e-3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = net(batch_of(1)["x"].to(net.last.weight.dtype))
    clipper.backward(value.float() if autocast else value)
    total = torch.cat([p.grad.flatten().double() for p in clipper.parameters.values()]).norm()
    assert 0.99e-3 < float(total) <= 1e-3


class Kernel(torch.autograd.Function):
    """An operation that is no function of PyTorch's."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


KERNELS = {
    "of the parameter": lambda m, h: Kernel.apply(h, m.vector),
    "of a value computed from it": lambda m, h: Kernel.apply(h, m.vector * 2),
    "beside a use that is seen": lambda m, h: Kernel.apply(h, m.vector) * m.vector,
}


@kills(
    "a use that begins between watched calls is not seen",
    "dpllm/ghost/uses.py",
    "                raise unseen_use(name) if self.active else late_use(name)\n",
    "                pass\n",
)
@kills(
    "a gradient that reaches a parameter past all rules is dropped",
    "dpllm/ghost/origins.py",
    "            raise unseen_use(self.name)\n",
    "            pass\n",
)
@pytest.mark.parametrize("how", ["plain", "recomputed", "recomputed, reentrant"])
@pytest.mark.parametrize("name", KERNELS)
def test_an_operation_that_cannot_be_seen_is_refused(name, how):
    """A kernel of a library would silently leave a part of the gradient out."""

    class Checkpointed(Net):
        def forward(self, x):
            h = self.first(x)
            if how == "plain":
                return self.last(self.middle(h)[0]).flatten(1).sum(1)
            return self.last(checkpoint(self.middle, h, use_reentrant="reentrant" in how)[0]).flatten(1).sum(1)

    net = only_used(Checkpointed(KERNELS[name]).double())
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=r"middle\.vector"):
        clipper.backward(net(batch_of()["x"]))
    assert all(p.grad is None for p in net.parameters())


def test_rows_that_are_written_into_a_shared_value_are_refused():
    """The model would go on with the value, and a copy would have the rows: another output, and no gradient of them."""

    def prefixed(m, h):
        out = torch.zeros(len(h), 2 + h.shape[1], WIDTH, dtype=h.dtype)
        out[:, :2] = m.vector
        out[:, 2:] = h
        return out

    clipper = GhostClipper(net := only_used(perturbed(Net(prefixed))), 1.0)
    with pytest.raises(GhostError, match="__setitem__"):
        clipper.backward(net(batch_of()["x"]))


@kills(
    "a module may be called with another tensor in place of its weight",
    "dpllm/ghost/rules.py",
    "            if live is not own and not isinstance(own, DTensor):\n",
    "            if False:\n",
)
@pytest.mark.parametrize("derived", [False, True])
def test_a_module_that_is_called_with_another_tensor_in_place_of_its_weight_is_refused(derived):
    """The rule of the module would take the gradient of that tensor for the one of the weight."""

    def use(m, h):
        weight = m.matrix * 2 if derived else m.matrix
        return torch.func.functional_call(m.inner, {"weight": weight}, (h,)) + m.inner(h) @ m.matrix

    net = Net(use)
    net.middle.inner = nn.Linear(WIDTH, WIDTH)
    clipper = GhostClipper(net := only_used(perturbed(net)), 1.0)
    with pytest.raises(GhostError, match=r"middle\.inner"):
        clipper.backward(net(batch_of()["x"]))


@pytest.mark.parametrize("where", ["function", "kernel", "loss"])
@pytest.mark.parametrize("call", [3, 5, 6, 7])
def test_a_use_that_begins_between_watched_calls_is_refused(call, where):
    """A model with rules only is not watched in these calls, but no gradient may reach a parameter in any pass."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    clipper, weight = GhostClipper(net, 1.0), net[2].weight
    for _ in range(call - 1):
        clipper.backward(losses(net, batch_of()).flatten(1).sum(1))
    if where == "function":
        net[1].forward = lambda h: h * weight[0]
    if where == "kernel":
        net[1].forward = lambda h: Kernel.apply(h, weight[0])
    value = losses(net, batch_of()).flatten(1).sum(1)
    if where == "loss":
        value = value + net[2].weight.sum()
    with pytest.raises(GhostError, match=r"2\.weight"):
        clipper.backward(value)


@kills(
    "a value of the form of a matrix is taken for the matrix",
    "dpllm/ghost/experiments.py",
    "            if turned(usage.tensors[place]) is None:\n",
    "            if False:\n",
)
def test_a_value_of_the_form_of_a_parameter_is_not_taken_for_it():
    """A product was known for the matrix itself; the same function then gets a slice of it, and its tanh."""

    def use(m, h):
        h = F.linear(h, m.matrix)
        return F.linear(F.linear(h, m.matrix.tanh()), m.matrix.T * 2)

    assert_is_the_loop(only_used(perturbed(Net(use))), losses, batch_of(), unit_index=UNITS)


@kills(
    "a function that begins later is not measured for rows that depend on each other",
    "dpllm/ghost/functional.py",
    "            self.host.measure_rows_again()\n",
    "            pass\n",
)
def test_a_function_that_begins_later_is_served_and_its_rows_are_measured():
    """Rows that depend on each other through it are found in that pass."""
    net = only_used(Net(USES["two parameters"]).double())
    clipper = GhostClipper(net, 1.0)
    clipper.backward(net(batch_of()["x"]))
    net.middle.use = lambda m, h: (h.flip(0) * m.vector) @ m.matrix
    with pytest.raises(GhostError, match="0 depends"):
        clipper.backward(net(batch_of()["x"]))


def test_a_gradient_that_reaches_no_rows_is_refused():
    """The value is added to the sum of all rows' losses."""

    class Added(Net):
        def forward(self, x):
            return super().forward(x) + 0 * self.last.bias.sum() * len(x)

    class Alone(Net):
        def forward(self, x):
            super().forward(x)
            return self.middle.vector.square()

    net = only_used(perturbed(Added(USES["scale"])))
    assert_is_the_loop(net, losses, batch_of())
    clipper = GhostClipper(net := Alone(USES["scale"]), 1.0)
    with pytest.raises(GhostError, match=r"middle\.vector"):
        clipper.backward(net(batch_of()["x"].float()))


def test_a_cache_is_not_filled_by_recognising_a_module():
    """A module that is given an object is not tried beforehand, since the call could change the object."""

    class Counting:
        calls = 0

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.rand(WIDTH) + 1)

        def forward(self, h, cache):
            cache.calls += 1
            return h * self.scale

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Cached()

        def forward(self, x):
            cache = Counting()
            out = self.inner(x, cache)
            assert cache.calls == 1
            return out.square().flatten(1).sum(1)

    assert_is_the_loop(perturbed(Caching()), losses, batch_of())
