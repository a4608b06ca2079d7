"""Any module is the loop: norms and clipped sum are those of autograd on single rows, however parameters are used."""

import logging

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dpllm import GhostClipper
from dpllm.ghost import NormMethod
from dpllm.models.losses import per_sequence_loss, seq2seq_loss
from tests.ghost.loop import Kernel, assert_is_the_loop, perturbed
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


def prefixed(m, h):
    """Writes a parameter into a tensor that has the rows."""
    out = torch.zeros(len(h), 2 + h.shape[1], WIDTH, dtype=h.dtype)
    out[:, :2] = m.vector
    out[:, 2:] = h
    return out


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
    "kernel of a library": lambda m, h: Kernel.apply(h, m.vector),
    "kernel of a value": lambda m, h: Kernel.apply(h, m.vector * 2) * m.vector,
    "written into a tensor": prefixed,
    "computed matrix, own bias": lambda m, h: F.linear(h, m.matrix * 2, m.vector),
    "own matrix, computed bias": lambda m, h: F.linear(h, m.matrix, m.vector * m.number),
    "a number for all rows": lambda m, h: F.linear(h, m.matrix) + m.matrix.norm(),
    "slices of a matrix": lambda m, h: F.linear(F.linear(F.linear(h, m.matrix), m.matrix.tanh()), m.matrix.T * 2),
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
    "rows that run alone read one copy of the parameter",
    "dpllm/ghost/attach.py",
    "module._parameters[name] = copy[row]",
    "module._parameters[name] = copy[0]",
    case="product",
)
@pytest.mark.parametrize("name", USES)
def test_every_way_of_using_a_parameter_is_the_loop(name):
    """Norms and sum, with units of several rows, over several microbatches."""
    net = only_used(perturbed(Net(USES[name])))
    assert_is_the_loop(net, losses, batch_of(), unit_index=UNITS, microbatches=2)


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
@pytest.mark.parametrize(
    "name", ["scale", "product", "convolution by hand", "steps", "sinks", "two parameters", "kernel of a value"]
)
def test_a_checkpointed_module_is_the_loop(name, reentrant):
    """Its functions run again in the backward pass, where they are served as well."""

    class Checkpointed(Net):
        def forward(self, x):
            h = checkpoint(self.middle, self.first(x), use_reentrant=reentrant)[0]
            return self.last(torch.tanh(h)).square().flatten(1).sum(1)

    assert_is_the_loop(only_used(perturbed(Checkpointed(USES[name]))), losses, batch_of(), microbatches=2)


def test_a_checkpointed_function_is_the_loop():
    """It is a method of the model, not a module."""

    class Checkpointed(Net):
        def part(self, x):
            return (self.first(x) * self.middle.vector) @ self.middle.matrix

        def forward(self, x):
            return self.last(checkpoint(self.part, x, use_reentrant=False)).square().flatten(1).sum(1)

    assert_is_the_loop(only_used(perturbed(Checkpointed(USES["scale"]))), losses, batch_of(), microbatches=2)


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


def test_a_module_that_is_given_an_object_runs_once_per_call():
    """The call may change the object."""

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


def test_the_model_returns_what_it_returned():
    """Values, shapes and dtypes of all outputs, with gradients on and off."""
    for name, use in USES.items():
        net = only_used(perturbed(Net(use)))
        expected = net(batch_of()["x"])
        clipper = GhostClipper(net, 1.0)
        torch.testing.assert_close(net(batch_of()["x"]), expected, msg=name)
        with torch.no_grad():
            torch.testing.assert_close(net(batch_of()["x"]), expected, msg=name)
        clipper.remove()


# -------------------------------------------------------------------------------------------------- scales and tables


class Halves(nn.Module):
    """Normalises two halves of the features apart from each other."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-6

    def forward(self, x):
        halves = x.unflatten(-1, (2, -1))
        return self.weight * (halves * (halves.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2)


class Gated(nn.Module):
    """Its scale depends on a second input too, in float32 as in Qwen3-Next."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x, gate=None):
        return self.gain * F.silu(x if gate is None else gate) * F.rms_norm(x, x.shape[-1:])


NORMS = {
    "rms of transformers": LlamaRMSNorm,
    "gemma": GemmaRMSNorm,
    "layer norm": nn.LayerNorm,
    "without bias": lambda width: nn.LayerNorm(width, bias=False),
    "rms of torch": nn.RMSNorm,
    "halves": Halves,
    "gated": Gated,
    "groups": lambda width: Rows(nn.GroupNorm(2, width)),
}


class Rows(nn.Module):
    """Features second."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(0, -2)).view_as(x) if x.ndim > 2 else self.inner(x)


@kills(
    "a copy of a norm's weight gets the gradient of the row before",
    "dpllm/ghost/taps.py",
    "        hand.give(self.weight, RowGradients(kernels.widen(grad.reshape(rows, *shape))))\n",
    "        hand.give(self.weight, RowGradients(kernels.widen(grad.reshape(rows, *shape)).roll(1, 0)))\n",
    case="layer norm-tokens",
)
@pytest.mark.parametrize(
    "shape", [(4, 6, 3), (4, 3), (4, 5, 2, 3), (4, 4, 3)], ids=["tokens", "one token", "heads", "tokens as rows"]
)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_any_class_is_the_loop(name, shape):
    """Tokens, heads, rows of one token, and as many tokens as rows."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.norm = nn.Linear(3, 12), NORMS[name](12)

        def forward(self, x):
            return torch.tanh(self.norm(self.inside(x))).square().flatten(1).sum(1)

    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_is_the_loop(perturbed(Normed()), losses, {"x": x}, unit_index=UNITS)


class Bag(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.last = nn.Linear(4, 1)

    def forward(self, index):
        found = self.table(index)
        return self.last(found[0] if isinstance(found, tuple) else found).sum((1, 2))


class ShiftedTable(nn.Embedding):
    """Its output is not a lookup."""

    def forward(self, index):
        return super().forward(index).cumsum(1)


class NormedTable(nn.Embedding):
    """Its output is normed, as Inkling's."""

    def forward(self, index):
        return F.rms_norm(super().forward(index), (4,))


class Both(nn.Embedding):
    """ProphetNet's position embeddings also return the positions."""

    def forward(self, index):
        return super().forward(index), index


class ByHand(nn.Embedding):
    """Selects entries."""

    def forward(self, index):
        return self.weight[index] + self.weight.mean(0)


@kills(
    "the padding entry of a table is trained",
    "dpllm/ghost/taps.py",
    "            grad = grad.masked_fill((index == self.padding_idx)[..., None], 0)\n",
    "            pass\n",
    case="3-Embedding",
)
@pytest.mark.parametrize("kind", [nn.Embedding, ShiftedTable, NormedTable, Both, ByHand])
@pytest.mark.parametrize("padding", [None, 3])
def test_a_table_of_any_class_is_the_loop(padding, kind, caplog):
    """Entries that several rows look up, several times each; the padding entry gets no gradient."""
    index = torch.randint(0, 5, (4, 6), generator=torch.Generator().manual_seed(0))
    net = perturbed(Bag(kind(7, 4, padding_idx=padding)))
    with caplog.at_level(logging.INFO, "dpllm"):
        assert_is_the_loop(net, lambda model, batch: model(batch["x"]), {"x": index}, unit_index=UNITS)
    assert kind is not nn.Embedding or "row by row" not in caplog.text


@kills(
    "an index that all rows share is not widened",
    "dpllm/ghost/taps.py",
    "            index = index.expand(rows, *index.shape[1:])\n",
    "            index = torch.cat([index, index.roll(1, 1).expand(rows - 1, *index.shape[1:])])\n",
)
@pytest.mark.parametrize("passes", [1, 2])
def test_positions_that_all_rows_share_are_the_loop(passes):
    """(T,), as in BERT, and (1, T), as in GPT-2, also where tokens are as many as rows."""

    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.last = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, x):
            places = torch.arange(x.shape[1])
            return self.last(torch.tanh(x + self.one(places) + self.two(places[None]))).square().sum((1, 2))

    for tokens in (6, 4):
        net, method = perturbed(Placed()), NormMethod(backward_passes=passes)
        assert_is_the_loop(net, losses, batch_of(tokens=tokens), method, unit_index=UNITS)


# ------------------------------------------------------------------------------------------------- products by hand


FIVE = torch.tensor([0, 1, 0, 2, 1])


class Router(nn.Module):
    """Returns a tuple, from flattened rows, as routers of transformers 5 do."""

    def __init__(self, cast=False, bias=True, uses=1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.randn(4)) if bias else None
        self.cast, self.uses = cast, uses

    def forward(self, x):
        x = x.reshape(-1, 6)
        weight = self.weight.type(torch.float32) if self.cast else self.weight
        logits = F.linear(x.to(weight.dtype), weight, self.bias if not self.cast else None)
        for _ in range(self.uses - 1):
            logits = logits.tanh() + F.linear(x.to(weight.dtype), weight=weight)
        return logits, logits.softmax(-1)


class Routed(nn.Module):
    """A router between two linear layers."""

    def __init__(self, router):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(3, 6), router, nn.Linear(4, 1)

    def forward(self, x):
        logits, weights = self.router(self.first(x).tanh())
        return self.last((logits * weights).to(x.dtype)).view(*x.shape[:2])


def routed_losses(model, batch):
    """One loss per row."""
    return model(batch["x"]).square().sum(1)


def routed_batch():
    """Five rows of three tokens."""
    return {"x": torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


@pytest.mark.parametrize("algorithm", ["gram", "instance"])
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"cast": True, "bias": False}, {"uses": 2}], ids=str)
def test_a_router_is_exact(settings, algorithm):
    """Its tuple, its flattened rows, its products in float32, and a matrix used twice."""
    torch.manual_seed(0)
    assert_is_the_loop(
        perturbed(Routed(Router(**settings))), routed_losses, routed_batch(), NormMethod(algorithm), FIVE
    )


class Dense(nn.Module):
    """Every expert is given every token, as in Llama 4."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 5)), nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x):
        tokens = x.reshape(-1, 6)
        inner = torch.bmm(tokens.repeat(3, 1).view(3, -1, 6), self.up).tanh()
        return torch.bmm(inner, self.down).sum(0), None


@pytest.mark.parametrize("algorithm", ["gram", "instance", "tiled"])
def test_batched_products_are_exact(algorithm):
    """The first dimension runs over experts, and rows lie within the second."""

    class DenseNet(Routed):
        def forward(self, x):
            return self.last(self.router(self.first(x))[0]).view(*x.shape[:2])

    torch.manual_seed(0)
    assert_is_the_loop(perturbed(DenseNet(Dense())), routed_losses, routed_batch(), NormMethod(algorithm), FIVE)


# ---------------------------------------------------------------------------------------------- entries that are chosen


class Picks(nn.Module):
    """A body, a selection, a frozen layer and a trained head."""

    def __init__(self, select, body=True, reentrant=None):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.body.requires_grad_(body)
        self.middle.requires_grad_(False)
        self.select, self.reentrant = select, reentrant

    def _pick(self, h, mask):
        return self.head(torch.tanh(self.middle(self.select(h, mask))))

    def forward(self, x, mask):
        h = torch.tanh(self.body(x))
        run = checkpoint if self.reentrant is not None else lambda function, *args, **_: function(*args)
        return run(self._pick, h, mask, use_reentrant=self.reentrant)


def picked_losses(model, batch):
    return model(**batch).square().unflatten(0, (len(batch["x"]), -1)).flatten(1).sum(1)


def picks_of(*counts):
    """Return a batch in which row b has ``counts[b]`` places to select."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.zeros(4, TOKENS, dtype=torch.bool)
    for row, count in enumerate(counts):
        mask[row, torch.randperm(TOKENS, generator=generator)[:count]] = True
    return {"x": x, "mask": mask}


def places(mask):
    return mask.flatten().nonzero()[:, 0]


CHOSEN = {
    "mask": lambda h, m: h[m],
    "masked_select": lambda h, m: h.masked_select(m[..., None]).view(-1, WIDTH),
    "numbers of tokens": lambda h, m: h.flatten(0, 1)[places(m)],
    "gather": lambda h, m: h.flatten(0, 1).gather(0, places(m)[:, None].expand(-1, WIDTH)),
    "embedding": lambda h, m: F.embedding(places(m), h.flatten(0, 1)),
    "tokens one by one": lambda h, m: torch.stack([h[b, t] for b, t in m.nonzero().tolist()]),
}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", CHOSEN)
def test_as_many_chosen_entries_of_each_row_are_the_loop(kind, count, reentrant):
    """One place in each row, as for a class, or two, which are cut into two for each."""
    model = perturbed(Picks(CHOSEN[kind], reentrant=reentrant))
    assert_is_the_loop(model, picked_losses, picks_of(*[count] * 4))


HARMLESS = {
    "last token": lambda h, m: h[torch.arange(len(h)), m.int().argmax(1)],
    "first token": lambda h, m: h[:, 0],
    "some tokens": lambda h, m: h.index_select(1, torch.tensor([3, 1])),
    "tokens in a list": lambda h, m: h[:, [0, 2]],
    "tokens of each": lambda h, m: h.gather(1, m.int().argsort(1)[..., None].expand_as(h)),
    "row after row": lambda h, m: torch.stack([row[mask].mean(0) for row, mask in zip(h, m, strict=True)]),
    "sorted and back": lambda h, m: h[(order := m.int().argmax(1).argsort())].tanh()[order.argsort()],
    "experts": lambda h, m: sorted_experts(h),
}


def sorted_experts(h):
    """Tokens sorted by an expert, multiplied in parts, and sorted back."""
    tokens = h.flatten(0, 1)
    expert = (tokens[:, 0] > 0).int()
    order = expert.argsort()
    ours, others = tokens[order].split([int((expert == 0).sum()), int(expert.sum())])
    return torch.cat([ours, 2 * others])[order.argsort()].view_as(h)


@pytest.mark.parametrize("kind", HARMLESS)
def test_entries_of_each_row_are_the_loop(kind):
    """Whatever the mask, each row gives its own entries."""
    assert_is_the_loop(perturbed(Picks(HARMLESS[kind])), picked_losses, picks_of(2, 1, 3, 1), microbatches=3)


# ------------------------------------------------------------------------------------------- models of transformers


SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES)),
    "albert": lambda: transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(**SIZES, embedding_size=8, classifier_dropout_prob=0.0)
    ),
    "electra": lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(**SIZES, embedding_size=16)),
    "deberta": lambda: transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**SIZES)),
}
FALCONS = {
    "parallel": {"parallel_attn": True, "bias": False},
    "parallel with biases": {"parallel_attn": True, "bias": True},
    "sequential": {"parallel_attn": False, "bias": True, "alibi": True},
    "new": {"new_decoder_architecture": True, "num_kv_heads": 1},
}


def token_batch(rows=4, tokens=9):
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(3, 61, (rows, tokens), generator=generator)
    labels = input_ids.clone()
    labels[1, :4] = -100
    return {"input_ids": input_ids, "labels": labels}


def masked_lm(model, batch):
    return seq2seq_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def causal_lm(model, batch):
    return per_sequence_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", HEADS)
def test_a_bias_tied_between_a_head_and_its_decoder_counts_once(name, passes):
    """Transformers' own tie: ``predictions.bias`` is ``predictions.decoder.bias``."""
    assert_is_the_loop(
        perturbed(HEADS[name]()), masked_lm, token_batch(), NormMethod(backward_passes=passes), microbatches=2
    )


def with_biases_only(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def with_checkpoints(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lora(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["query", "value"], bias="all"))


@pytest.mark.parametrize("units", [None, UNITS], ids=["rows", "units"])
@pytest.mark.parametrize("change", [with_biases_only, with_checkpoints, with_lora])
def test_a_tied_bias_counts_once_in_every_setting(change, units):
    """With cross terms of a unit's rows; a head of which only the bias is trained, is recomputed, or has LoRA too."""
    model = change(perturbed(HEADS["bert"]()))
    assert_is_the_loop(perturbed(model), masked_lm, token_batch(), NormMethod(backward_passes=2), units)


class Head(nn.Module):
    """Uses its own bias, which its decoder holds too, under two names; and a scale that it holds twice."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(4, 4)
        self.bias = self.again = self.decoder.bias
        self.scales = nn.ParameterDict({"one": nn.Parameter(torch.rand(4))})
        self.scale = self.scales["one"]

    def forward(self, h):
        return self.decoder(h) * self.scale + torch.tanh(h * self.again) * self.scales["one"] + self.bias


@pytest.mark.parametrize("passes", [1, 2])
def test_all_uses_of_a_parameter_add_up_whoever_makes_them(passes):
    """Used by the module, by the inner module, under several names and in a container: every use counts once."""
    net = perturbed(nn.Sequential(nn.Linear(3, 4), Head(), nn.Linear(4, 1)))

    def losses(model, batch):
        return model(batch["x"]).square().sum((1, 2))

    assert_is_the_loop(
        net, losses, {"x": torch.randn(4, 3, 3, dtype=torch.float64)}, NormMethod(backward_passes=passes)
    )


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("mode", ["full", "lora", "checkpoints"])
@pytest.mark.parametrize("name", FALCONS)
def test_a_model_that_adds_in_place_to_what_a_layer_returned(name, mode, passes):
    """Falcon adds the attention to the output of its MLP; its linear layers have a separate class."""
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES, use_cache=False, **FALCONS[name]))
    if mode == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    elif mode == "checkpoints":
        model = with_checkpoints(model)
    assert_is_the_loop(perturbed(model), causal_lm, token_batch(), NormMethod(backward_passes=passes))


class Written(nn.Module):
    """A module of unknown class, whose output is changed in place."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(4, 4) if "product" in kind else torch.rand(4) + 1)

    def forward(self, h):
        if self.kind == "product":
            return h @ self.weight.T
        if self.kind == "transposed product":
            return h @ self.weight + h
        return h * self.weight if self.kind == "scale" else torch.sin(h * self.weight)


@pytest.mark.parametrize("kind", ["product", "transposed product", "scale", "sine"])
def test_the_output_of_any_module_may_be_changed_in_place(kind):
    """For a recognised module, and for one that is run again row by row."""
    first, middle, last = nn.Linear(3, 4), Written(kind), nn.Linear(4, 1)

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = first, middle, last

        def forward(self, x):
            h = self.first(x)
            out = self.middle(h)
            out += h
            out.mul_(2.0)
            return self.last(out).square().sum((1, 2))

    batch = {"x": torch.randn(4, 3, 3, dtype=torch.float64)}
    assert_is_the_loop(perturbed(Adding()), lambda model, batch: model(batch["x"]), batch)


class Overwriting(nn.Module):
    """Adds its bias to its input in place."""

    def __init__(self, *size):
        super().__init__()
        self.bias = nn.Parameter(torch.rand(*size))

    def forward(self, h):
        h += self.bias.sum(0) if self.bias.ndim == 2 else self.bias
        return h


@pytest.mark.parametrize("size", [(4,), (2, 4)])
def test_a_module_that_overwrites_its_input_is_the_loop(size):
    """Its functions are served one by one, and an addition needs no input."""
    net = perturbed(nn.Sequential(nn.Linear(3, 4), Overwriting(*size), nn.Linear(4, 1)))
    batch = {"x": torch.randn(4, 3, 3, dtype=torch.float64)}
    assert_is_the_loop(net, lambda model, batch: model(batch["x"]).square().sum((1, 2)), batch)


class Bank(nn.Module):
    """Keeps a table that its two layers use; ``own``: and uses it itself."""

    def __init__(self, own=False):
        super().__init__()
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})
        self.first, self.last, self.own = Scaling(self.table), Scaling(self.table), own

    def forward(self, x):
        x = self.last(torch.tanh(self.first(x)))
        return (x * self.table["a"] if self.own else x).square().sum(1)


class Scaling(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x * self.table["a"]


@pytest.mark.parametrize("own", [False, True])
def test_a_use_by_the_module_that_keeps_the_table_counts(own):
    """Beside those of the layers that hold the table too."""
    batch = {"x": torch.randn(5, 4, dtype=torch.float64)}
    assert_is_the_loop(perturbed(Bank(own)), lambda model, batch: model(batch["x"]), batch)


def sequences(model, batch):
    logits = model(input_ids=batch["input_ids"], decoder_input_ids=batch["input_ids"][:, :6]).logits
    return seq2seq_loss(logits, batch["labels"][:, :6])


@pytest.mark.parametrize("attention", ["local", "transient-global"])
def test_a_relative_bias_for_blocks_is_the_loop(attention):
    """LongT5's differs from T5's: its table is looked up once for all rows, with an index (blocks, blocks)."""
    config = transformers.LongT5Config(
        vocab_size=61,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        local_radius=4,
        global_block_size=4,
        encoder_attention_type=attention,
        dropout_rate=0.0,
        use_cache=False,
    )
    assert_is_the_loop(
        perturbed(transformers.LongT5ForConditionalGeneration(config)), sequences, token_batch(tokens=12)
    )


def test_a_relative_bias_that_all_layers_make_is_the_loop():
    """UMT5 does not pass on the bias of its first layer: every layer has a table and ignores a given bias."""
    config = transformers.UMT5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False
    )
    assert_is_the_loop(perturbed(transformers.UMT5ForConditionalGeneration(config)), sequences, token_batch())
