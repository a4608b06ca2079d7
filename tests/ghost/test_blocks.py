"""Compiled blocks: exact for every kind of checkpoint and layout, few graphs, and no graph without taps."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpllm import GhostClipper, GhostError
from dpllm.ghost import NormMethod
from dpllm.mechanism.clipping import PerLayerClipping
from tests.ghost.loop import flat, perturbed, row_gradients
from tests.mutations import kills

pytestmark = [  # of PyTorch's compiler; it hides the first where warnings are no errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
BACKEND = "aot_eager"  # the whole way of a graph without a compiler of C++
WIDTH, ENTRIES = 8, 11


@pytest.fixture(autouse=True)
def without_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Attention within rows and a layer behind it."""

    def __init__(self):
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.mix, self.up, self.down = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH, bias=False),
        )

    def forward(self, x, mask=None):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.down(torch.tanh(self.up(self.after(x))))


class Twice(Block):
    """Calls a layer twice."""

    def forward(self, x, mask=None):
        return super().forward(x, mask) + self.down(torch.sin(self.up(x)))


class Gate(Block):
    """Uses a parameter in a way that no tap knows."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, mask=None):
        return super().forward(x, mask) * torch.cos(self.gate)


class Position(Block):
    """Has a table of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, x, mask=None):
        return super().forward(x + self.table(torch.arange(x.shape[1])[None].expand(x.shape[:2])), mask)


class Flattened(Block):
    """Its second half gets rows and tokens in one dimension, as in OPT."""

    def forward(self, x, mask=None):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        flat = self.after(x.reshape(-1, WIDTH))
        return x + self.down(torch.tanh(self.up(flat))).view(x.shape)


class First(Block):
    """Reads the first four tokens only, in one layer."""

    def forward(self, x, mask=None):
        return super().forward(x, mask) + self.down(torch.tanh(self.up(x[:, :4]))).sum(1, keepdim=True)


class FirstOnly(nn.Module):
    """A block whose only layer reads the first four tokens, or a single one four times."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        return x + torch.tanh(self.up(x[:, :4].expand(-1, 4, -1))).sum(1, keepdim=True)


class TwiceLater(Block):
    """Calls a layer twice where there are more than five tokens."""

    def forward(self, x, mask=None):
        x = super().forward(x, mask)
        return x + torch.tanh(self.down(self.up(x))) if x.shape[1] > 5 else x


class Dropping(Block):
    """Draws random numbers, and changes its input in place, which does not go with checkpoints."""

    in_place = False

    def forward(self, x, mask=None):
        x = x.mul_(0.5) if self.in_place else x
        return x + F.dropout(super().forward(x, mask), 0.5)


class Net(nn.Module):
    """A table, blocks and a head."""

    def __init__(self, kind=Block, reentrant=None, depth=2):
        super().__init__()
        self.table, self.head = nn.Embedding(ENTRIES, WIDTH), nn.Linear(WIDTH, ENTRIES)
        self.layers = nn.ModuleList(kind() for _ in range(depth))
        self.reentrant = reentrant

    def forward(self, ids, cu_seq_lens_q=None):
        x, mask = self.table(ids), None
        if cu_seq_lens_q is not None:
            row = torch.bucketize(torch.arange(ids.shape[1]), cu_seq_lens_q[1:], right=True)
            mask = row[:, None] == row[None]
        for layer in [layer for layer in self.layers if layer is not None]:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = layer(x, mask)
            else:
                x = checkpoint(layer, x, mask, use_reentrant=self.reentrant)
        return self.head(x)


def made(kind=Block, reentrant=None, depth=2):
    torch.manual_seed(0)
    return perturbed(Net(kind, reentrant, depth))


def losses(model, batch):
    return token_losses(model(batch["ids"]), batch["ids"]).sum(1)


def token_losses(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def batch_of(rows, tokens):
    ids = torch.randint(0, ENTRIES, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"ids": ids}


def attached(model, backend=BACKEND, passes=1, **options):
    """Return a clipper, and a copy of the model without it, and without checkpoints."""
    plain = copy.deepcopy(model)
    plain.reentrant = None
    clipper = GhostClipper(model, 0.5, NormMethod(backward_passes=passes))
    clipper.compile(backend, **options)
    return clipper, plain


def assert_exact(clipper, model, plain, shapes=((4, 5), (3, 7), (4, 6)), losses=losses):
    """Norms and sums of microbatches of these (rows, tokens) are those of a loop of single rows."""
    parameters = list(clipper.parameters.values())
    for rows, tokens in shapes:
        batch = batch_of(rows, tokens)
        expected_BP = row_gradients(plain, losses, batch)
        model.zero_grad()
        result = clipper.backward(losses(model, batch))
        torch.testing.assert_close(result.norms.double(), expected_BP.norm(dim=1), rtol=1e-6, atol=0)
        total, expected = flat([p.grad for p in parameters], parameters), result.factors.double() @ expected_BP
        assert float((total - expected).norm()) <= 1e-6 * float(expected.norm())
    model.zero_grad()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["no_checkpoints", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("passes", [1, 2])
def test_exact_with_every_kind_of_checkpoint(reentrant, passes):
    """In one pass and in two, over microbatches of different shapes."""
    model = made(reentrant=reentrant)
    clipper, plain = attached(model, passes=passes)
    assert_exact(clipper, model, plain)
    assert clipper.compiled.blocks == ("layers.0", "layers.1") and not clipper.compiled.eager
    assert clipper.compiled.graphs >= 1 and not torch._dynamo.utils.counters["graph_break"]


def test_group_wise_clipping():
    """A group is finished when its last gradient arrives, also from a graph."""
    model = made(reentrant=False)
    results = []
    for backend in (None, BACKEND):
        clipper = GhostClipper(model, clipping=PerLayerClipping(0.5))
        if backend:
            clipper.compile(backend)
        result = clipper.backward(losses(model, batch_of(4, 6)))
        results.append((result, [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
        clipper.remove()
    torch.testing.assert_close(results[1][0].factors, results[0][0].factors)
    torch.testing.assert_close(results[1][1], results[0][1])


@pytest.mark.parametrize("kind", ["full", *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("lora", "conv1d"))])
def test_models_of_transformers(kind):
    """A decoder with all parameters trained, one with LoRA, and one of Conv1D."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "conv1d":
        model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=ENTRIES, n_positions=16))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": ENTRIES}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model = perturbed(model)

    def losses(model, batch):
        return token_losses(model(input_ids=batch["ids"]).logits, batch["ids"]).sum(1)

    clipper, plain = attached(model)
    assert_exact(clipper, model, plain, ((3, 5), (3, 7)), losses)
    assert len(clipper.compiled.blocks) == 2 and not clipper.compiled.eager


def test_packed_rows():
    """Cut by their lengths on arrival; the first microbatch is not packed."""
    model = made()
    clipper, plain = attached(model)
    clipper.backward(losses(model, batch_of(4, 5)))
    parameters = list(model.parameters())
    for lengths in ((4, 3, 5), (6, 2, 3, 4)):
        rows = [batch_of(1, length)["ids"] for length in lengths]
        packed = torch.cat(rows, dim=1)
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        model.zero_grad()
        logits = model(packed, cu_seq_lens_q=bounds)
        parts = [
            token_losses(logits[:, b - n : b], row).sum()
            for n, b, row in zip(lengths, bounds[1:].tolist(), rows, strict=True)
        ]
        result = clipper.backward(torch.stack(parts))
        expected_BP = torch.cat([row_gradients(plain, losses, {"ids": row}) for row in rows])
        torch.testing.assert_close(result.norms.double(), expected_BP.norm(dim=1), rtol=1e-6, atol=0)
        total, expected = flat([p.grad for p in parameters], parameters), result.factors.double() @ expected_BP
        assert float((total - expected).norm()) <= 1e-6 * float(expected.norm())
    assert len(clipper.compiled.blocks) == 2


def test_autocast():
    """The same as eager taps up to the rounding of bf16; and exact again without it."""
    torch.manual_seed(0)
    model = Net().train()
    norms = []
    for backend in (None, BACKEND):
        clipper = GhostClipper(model, 0.5)
        if backend:
            clipper.compile(backend)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                found = losses(model, batch_of(4, 6))
            norms.append(clipper.backward(found).norms)
        norms.append(clipper.backward(losses(model, batch_of(4, 6))).norms)
        model.zero_grad()
        if backend:
            assert len(clipper.compiled.blocks) == 2, str(clipper.compiled)
        clipper.remove()
    torch.testing.assert_close(norms[3], norms[0], rtol=0.02, atol=0)
    torch.testing.assert_close(norms[4], norms[3], rtol=0, atol=0)
    torch.testing.assert_close(norms[5], norms[2], rtol=1e-5, atol=0)


def test_no_more_graphs_than_without_privacy():
    """Over 20 shapes: one more at most, and none is broken."""
    shapes = [(4, 5), (3, 7), (4, 9), (1, 6), (2, 8), (5, 4), (4, 12), (1, 3), (6, 10), (3, 3)]
    shapes += [(4, tokens) for tokens in range(13, 23)]

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    plain = made()
    forward = torch.compile(Block.forward, fullgraph=True, backend=BACKEND)
    for layer in plain.layers:
        layer.forward = forward.__get__(layer)
    for rows, tokens in shapes:
        losses(plain, batch_of(rows, tokens)).sum().backward()
    without = graphs()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = made()
    clipper, _ = attached(model)
    for rows, tokens in shapes:
        clipper.backward(losses(model, batch_of(rows, tokens)))
    assert graphs() == clipper.compiled.graphs <= without + 1
    assert not torch._dynamo.utils.counters["graph_break"]


@kills("a tap after a flattened one is taken for flattened", "dpllm/ghost/blocks.py", "hand.flattens = False", "pass")
def test_blocks_that_flatten_rows_and_tokens_in_a_part():
    """Each tap says by itself what it got."""
    model = made(Flattened)
    clipper, plain = attached(model)
    assert_exact(clipper, model, plain)
    assert len(clipper.compiled.blocks) == 2


def test_a_list_of_blocks_with_a_gap():
    """``nn.ModuleList`` may hold None."""
    model = made(depth=3)
    model.layers[1] = None
    clipper, plain = attached(model)
    assert_exact(clipper, model, plain)


def test_evaluation_in_between():
    """Without gradients the model computes what it computed before, and the next step is exact."""
    model = made(reentrant=False)
    batch = batch_of(2, 6)
    with torch.no_grad():
        before = model(batch["ids"])
    clipper, plain = attached(model)
    assert_exact(clipper, model, plain, ((4, 5),))
    with torch.no_grad():
        torch.testing.assert_close(model(batch["ids"]), before)
    assert_exact(clipper, model, plain, ((3, 6),))


@pytest.mark.parametrize("kind, word", [(Twice, "twice"), (Gate, "row by row"), (Position, "table"), (First, "shape")])
def test_blocks_that_stay_eager(kind, word):
    """They are listed with the reason, and exact."""
    model = made(kind)
    clipper, plain = attached(model)
    assert_exact(clipper, model, plain)
    assert not clipper.compiled.blocks and set(clipper.compiled.eager) == {"layers.0", "layers.1"}
    assert all(word in reason for reason in clipper.compiled.eager.values())


@kills(
    "a leaf of another shape than the module's input is taken",
    "dpllm/ghost/taps.py",
    "        if leaf_y.shape[:-1] != x.shape[:-1] or leaf_x.shape != x.shape:",
    "        if False:",
    case="FirstOnly",
)
@kills(
    "two calls of a module in a compiled block have one leaf",
    "dpllm/ghost/taps.py",
    "port.pop(), port.pop(), port.pop(), port.pop()\n",
    "port[3], port[2], port[1], port[0]\n",
    case="TwiceLater",
)
@pytest.mark.parametrize("kind", [FirstOnly, TwiceLater])
def test_leaves_that_do_not_fit_in_a_later_call(kind, caplog):
    """A layer's tokens are not those of the block, or it is called twice: the class goes back to eager, exactly."""
    model = made(kind)
    model.layers.extend(nn.ModuleList([Block().double()]))
    clipper, plain = attached(model)

    def losses(model, batch):  # a single token has no next one
        return model(batch["ids"]).square().sum((1, 2))

    with caplog.at_level(logging.WARNING, "dpllm"):
        assert_exact(clipper, model, plain, ((3, 4), (3, 1), (3, 6), (4, 7), (3, 4)), losses)
    assert clipper.compiled.blocks == ("layers.2",)
    assert sum(kind.__name__ in record.message for record in caplog.records) == 1


@kills(
    "the run that shows the shapes of leaves moves the random numbers",
    "dpllm/ghost/blocks.py",
    "            state.restore()\n",
    "            pass\n",
    case="non_reentrant",
)
@kills(
    "the run that shows the shapes of leaves writes to the block's input",
    "dpllm/ghost/blocks.py",
    "    return value.clone() if isinstance(value, Tensor) else",
    "    return value if isinstance(value, Tensor) else",
    case="no_checkpoints",
)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["no_checkpoints", "non_reentrant", "reentrant"])
def test_a_block_is_computed_and_recomputed_as_without_a_clipper(reentrant):
    """With the same random numbers and inputs, in the loss that compiles it too: the sum is that of autograd."""
    model = made(Dropping, reentrant)
    for block in model.layers:
        block.in_place = reentrant is None
    plain = copy.deepcopy(model)
    clipper = GhostClipper(model, 1e6)
    clipper.compile(BACKEND)
    for tokens in (5, 6):
        for one, backward in ((plain, lambda loss_B: loss_B.sum().backward()), (model, clipper.backward)):
            one.zero_grad()
            torch.manual_seed(7)
            backward(losses(one, batch_of(4, tokens)))
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
    assert len(clipper.compiled.blocks) == 2


def test_too_many_graphs(caplog):
    """PyTorch's limit of graphs sends a class back to eager, with one warning, and the microbatch is exact."""
    model = made(reentrant=False)
    clipper, plain = attached(model, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), caplog.at_level(logging.WARNING, "dpllm"):
        assert_exact(clipper, model, plain, ((4, 5), (3, 7), (4, 6), (4, 8)))
    assert not clipper.compiled.blocks and len(clipper.compiled.eager) == 2
    assert sum(record.name.startswith("dpllm") for record in caplog.records) == 1


# ------------------------------------------------------------------------------------- graphs of the user


@kills(
    "a block that was compiled before keeps a graph that its taps are not in",
    "dpllm/ghost/tapped_model.py",
    "            self.blocks.take_over()\n",
    "            pass\n",
    case="in_place-before",
)
@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("how", ["in_place", "wrapped"])
def test_blocks_that_the_user_compiled(how, when):
    """They are taken over, with their backend; `remove` gives them back. A graph of theirs was traced before."""
    model = made()
    before = losses(model, batch_of(3, 4)).detach()
    called = []

    def backend(graph, inputs):
        called.append(graph)
        return graph.forward

    def compile_blocks():
        for number, block in enumerate(model.layers):
            if how == "in_place":
                block.compile(backend=backend)
            else:
                model.layers[number] = torch.compile(block, backend=backend)

    if when == "before":
        compile_blocks()
        losses(model, batch_of(4, 5)).sum().backward()
        model.zero_grad()
    clipper = GhostClipper(model, 0.5)
    if when == "between":
        assert_exact(clipper, model, made(), ((4, 5),))
    if when != "before":
        compile_blocks()
    called.clear()
    assert_exact(clipper, model, made(), ((4, 5), (3, 7)))
    assert len(clipper.compiled.blocks) == 2 and called
    clipper.remove()
    called.clear()
    torch.testing.assert_close(losses(model, batch_of(3, 4)).detach(), before)
    assert called or when == "before"


def test_a_compiled_module_that_is_no_block():
    """It runs without its graph, which is listed, and has it again after `remove`."""
    model = made()
    model.head.compile(backend=BACKEND)
    before = dict(vars(model.head))
    clipper = GhostClipper(model, 0.5)
    assert_exact(clipper, model, made(), ((4, 5),))
    assert list(clipper.compiled.eager) == ["head"]
    clipper.remove()
    assert vars(model.head) == before


@pytest.mark.parametrize("how", ["in_place", "wrapped"])
def test_a_whole_compiled_model_is_refused(how):
    """The error names what to call instead."""
    model = made()
    compiled = torch.compile(model, backend=BACKEND)
    if how == "in_place":
        model.compile(backend=BACKEND)
        compiled = model
    with pytest.raises(GhostError, match=r"compile\(\)"):
        GhostClipper(compiled, 0.5)


def test_a_missed_use_beside_a_graph_raises():
    """A block's parameter that is used elsewhere from step 3 on: its gradient is not dropped in silence."""
    model = made()
    clipper, _ = attached(model)
    for _ in range(2):
        clipper.backward(losses(model, batch_of(4, 5)))
    loss = losses(model, batch_of(4, 5)) + model.layers[0].up.weight.square().sum()
    with pytest.raises(GhostError, match=r"layers\.0\.up\.weight"):
        clipper.backward(loss)


def test_remove_gives_the_model_back():
    """Classes, attributes and values are those before."""
    model = made()
    kinds, names = [type(m) for m in model.modules()], [sorted(vars(m)) for m in model.modules()]
    clipper, plain = attached(model)
    assert_exact(clipper, model, plain, ((4, 5),))
    assert type(copy.deepcopy(model).layers[0]) is Block
    clipper.remove()
    assert [type(m) for m in model.modules()] == kinds and [sorted(vars(m)) for m in model.modules()] == names
    losses(model, batch_of(4, 5)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.deep
def test_inductor_differentiates_twice():
    """Its graphs keep their buffers for the second pass and for the check of rows."""
    model = made()
    clipper, plain = attached(model, "inductor", passes=2)
    assert_exact(clipper, model, plain)
    assert len(clipper.compiled.blocks) == 2
