"""One unit at a time by plain autograd: the same norms and sums as a float64 loop, for any structure."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BigBirdConfig, BigBirdForCausalLM, LlamaForCausalLM

from dpllm import ClipResult, GhostClipper, GhostError, PerUnitClipper, per_sequence_loss
from dpllm.mechanism.clipping import FlatClipping, PerLayerClipping
from tests.conftest import tiny_llama_config
from tests.ghost.loop import flat, perturbed
from tests.mutations import kills

FEATURES = 6


class Cube(torch.autograd.Function):
    """x³, with a backward pass of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Pair(nn.Module):
    """A block that returns a tuple, one parameter used by hand and one used twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.ones(FEATURES))

    def forward(self, x):
        return Cube.apply(self.inner(x) / 3) * self.gate, (x * self.gate).sum(-1)


class Odd(nn.Module):
    """Structures for which no rule exists: a tuple, an own autograd Function, a sum over the batch, a choice by value.

    The table is tied; which of the two experts a row uses depends on the row.
    """

    def __init__(self, recompute=False):
        super().__init__()
        self.table, self.block = nn.Embedding(7, FEATURES), Pair()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.recompute = recompute

    def forward(self, ids):
        x = self.table(ids)
        y, side = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        y = self.experts[int(ids[0, 0]) % 2](y) + y.mean(0, keepdim=True)  # couples the rows of a call
        return y @ self.table.weight.T + side[..., None]


def losses(model, ids):
    logits = model(ids)
    return (
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        .view(len(ids), -1)
        .sum(1)
    )


def units(count=6, seed=1):
    """Ids of the rows of each unit: one or two rows, of one length within a unit."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 7, (1 + n % 2, 3 + n), generator=generator) for n in range(count)]


def loop(model, rows_of_units):
    """Return (U, P): autograd of each unit by itself, in float64."""
    model = copy.deepcopy(model).double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = []
    for ids in rows_of_units:
        grads = torch.autograd.grad(losses(model, ids).sum(), parameters, allow_unused=True)
        found.append(flat(grads, parameters))
    return torch.stack(found)


def summed(model, clipper, rows_of_units):
    """Return the results of each unit, and the sum in ``.grad``."""
    results = []
    for ids in rows_of_units:
        results.append(clipper.backward(losses(model, ids), torch.zeros(len(ids), dtype=torch.int64)))
    parameters = [p for p in model.parameters() if p.requires_grad]
    return results, flat([p.grad for p in parameters], parameters)


@kills(
    "one unit at a time, a unit is not clipped",
    "dpllm/ghost/unit_clipper.py",
    "total.add_(gradient.to(total.dtype), alpha=factor)",
    "total.add_(gradient.to(total.dtype))",
)
@pytest.mark.parametrize("recompute", [False, True])
def test_norms_and_sums_are_those_of_a_loop_for_structures_without_a_rule(recompute):
    """Tied weights count once, a unit's rows are summed first, and an expert without tokens has gradient 0."""
    torch.manual_seed(0)
    model = perturbed(Odd(recompute)).double()
    gradients = loop(model, units())
    norms = gradients.norm(dim=1)
    clip_norm = float(norms.median()) * (1 + 1e-9)
    clipper = PerUnitClipper(model, clip_norm)
    results, total = summed(model, clipper, units())
    clipper.remove()
    torch.testing.assert_close(torch.cat([one.norms for one in results]).double(), norms, rtol=1e-6, atol=0)
    expected = (clip_norm / norms).clamp(max=1) @ gradients
    assert float((total - expected).norm()) <= 1e-6 * float(expected.norm())
    assert 0 < int((norms > clip_norm).sum()) < len(norms)


@kills(
    "one unit at a time, the rows that a unit had before are forgotten",
    "dpllm/ghost/unit_clipper.py",
    "held[key] += kernels",
    "held[key] = kernels",
)
def test_a_unit_in_several_calls_is_one_unit():
    """Its gradients are added before the norm is taken; what `hold` took is kept through a call that failed."""
    model, (ids,) = perturbed(Odd()), [torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 1]])]
    parameters = list(model.parameters())
    calls = [torch.autograd.grad(losses(model, ids[n : n + 1]).sum(), parameters, allow_unused=True) for n in range(3)]
    gradient = sum(flat(grads, parameters) for grads in calls)
    clipper = PerUnitClipper(model, 1e-3)
    clipper.hold(losses(model, ids[:1]))
    clipper.hold(losses(model, ids[1:2]))
    clipper.forget()
    result = clipper.backward(losses(model, ids[2:]))
    total = flat([p.grad for p in parameters], parameters)
    torch.testing.assert_close(result.norms.double(), gradient.norm()[None], rtol=1e-6, atol=0)
    torch.testing.assert_close(total, gradient * 1e-3 / gradient.norm(), rtol=1e-5, atol=1e-12)
    assert float(total.norm()) <= 1e-3
    clipper.backward(losses(model, ids[2:]))  # nothing of the unit before is left
    again = flat([p.grad for p in parameters], parameters) - total
    assert float(again.norm()) <= 1e-3
    torch.testing.assert_close(again / again.norm(), flat(calls[2], parameters) / flat(calls[2], parameters).norm())


@kills(
    "one unit at a time, the product is rounded to the parameters' dtype",
    "dpllm/ghost/unit_clipper.py",
    "total.add_(gradient.to(total.dtype), alpha=factor)",
    "total.add_((gradient * factor).to(total.dtype))",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_contribution_never_exceeds_the_clip_norm(dtype):
    """In float32, before it is rounded to the parameters' dtype, and for a unit with a large gradient it is C."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 1)).to(dtype)
    clip_norm = 0.37
    for scale in (1e-3, 1.0, 1e2):
        clipper = PerUnitClipper(model, clip_norm)
        clipper.backward(model(scale * torch.randn(1, 300).to(dtype)).squeeze(1) * 1.7)
        grads = [p.grad for p in model.parameters()]
        norm = float(torch.cat([g.double().flatten() for g in grads]).norm())
        assert all(g.dtype == torch.float32 for g in grads)
        assert norm <= clip_norm
        if scale >= 1:
            assert norm >= clip_norm * (1 - 1e-4)
        clipper.remove()
        for p in model.parameters():
            p.grad = None


def test_groups_are_clipped_apart_as_by_the_clipping():
    model = perturbed(Odd())
    ids = units()[1]
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(losses(model, ids).sum(), list(model.parameters()), allow_unused=True)
    gradients = dict(zip(names, grads, strict=True))
    clipping = PerLayerClipping(0.01)
    groups = clipping.groups({name: tuple(p.shape) for name, p in model.named_parameters()})
    clipper = PerUnitClipper(model, clipping=clipping)
    result = clipper.backward(losses(model, ids), torch.zeros(len(ids), dtype=torch.int64))
    assert result.factors.shape == (len(groups), 1)
    for number, group in enumerate(groups):
        norm = torch.cat(
            [gradients[name].flatten() for name in group if gradients[name] is not None] or [ids[:0] * 1.0]
        )
        for name in group:
            if gradients[name] is not None:
                factor = float(result.factors[number])
                assert factor <= 0.01 / len(groups) ** 0.5 / float(norm.norm()) * (1 + 1e-6)
                torch.testing.assert_close(dict(model.named_parameters())[name].grad, factor * gradients[name])


@kills(
    "one unit at a time, a unit that is not finite stays in the sum",
    "dpllm/ghost/unit_clipper.py",
    "        if factor == 0:",
    "        if False:",
)
def test_a_unit_that_is_not_finite_contributes_exactly_zero_and_the_next_one_its_share():
    model = nn.Linear(3, 1)
    clipper = PerUnitClipper(model, 1.0)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert clipper.backward(model(x * float("inf")).squeeze(1)).num_nonfinite == 1
    assert float(torch.cat([p.grad.flatten() for p in model.parameters()]).abs().sum()) == 0
    clipper.backward(model(x).squeeze(1))
    assert 0.99 < float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) <= 1.0


@kills(
    "one unit at a time, padding rows get weight 1",
    "dpllm/ghost/unit_clipper.py",
    "(unit_B >= 0).to(loss_B)",
    "torch.ones_like(loss_B)",
)
def test_padding_rows_have_weight_zero():
    """A padding row beside a unit's rows, and a call of padding rows only."""
    model = perturbed(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.randn(2, 3, dtype=torch.float64)
    clipper = PerUnitClipper(model, 1e-3)
    clipper.backward(model(x).squeeze(1), torch.tensor([0, -1]))
    padded = flat([p.grad for p in model.parameters()], model.parameters())
    model.zero_grad(set_to_none=True)
    clipper.backward(model(x[:1]).squeeze(1))
    torch.testing.assert_close(flat([p.grad for p in model.parameters()], model.parameters()), padded)
    before = flat([p.grad for p in model.parameters()], model.parameters()).clone()
    result = clipper.backward(model(x).squeeze(1), torch.tensor([-1, -1]))
    assert result.norms.shape == (0,)
    torch.testing.assert_close(flat([p.grad for p in model.parameters()], model.parameters()), before, rtol=0, atol=0)


def test_rows_of_several_units_in_a_call_are_refused():
    model = nn.Linear(3, 1)
    clipper = PerUnitClipper(model, 1.0)
    with pytest.raises(GhostError, match="once per unit"):
        clipper.backward(model(torch.randn(2, 3)).squeeze(1))
    clipper.hold(model(torch.randn(2, 3)).squeeze(1))
    with pytest.raises(GhostError, match="padding rows only"):
        clipper.clip(model(torch.randn(1, 3)).squeeze(1), torch.tensor([-1]))


def test_nothing_is_left_in_grad_but_the_clipped_sum():
    """Hooks that a replica's reducer or DeepSpeed puts on parameters do not see a unit's gradient."""
    model, seen = nn.Linear(3, 1), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    clipper = PerUnitClipper(model, 1.0)
    result = clipper.clip(model(torch.ones(1, 3)).squeeze(1))
    assert isinstance(result, ClipResult) and not seen and all(p.grad is None for p in model.parameters())


@kills(
    "running statistics are kept from unit to unit",
    "dpllm/ghost/refusals.py",
    'if getattr(module, "track_running_stats", False):',
    "if False:",
)
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "1 .BatchNorm1d. keeps running statistics"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)), "sums its statistics over the processes"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3, track_running_stats=True)), "running statistics"),
        (lambda: nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)), "max_norm"),
        (lambda: nn.DataParallel(nn.Linear(3, 3)), "DataParallel splits the batch"),
    ],
)
def test_what_keeps_something_of_the_rows_is_refused_by_name(make, match):
    with pytest.raises(GhostError, match=match):
        PerUnitClipper(make(), 1.0)


def test_normalisation_without_running_statistics_is_allowed():
    """With one unit in each call it normalises by that unit's rows only."""
    clipper = PerUnitClipper(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)), 1.0)
    clipper.remove()


def test_parameters_of_others_and_those_unfrozen_later_are_refused():
    model, other = nn.Linear(3, 1), nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    clipper = PerUnitClipper(model, 1.0)
    with pytest.raises(GhostError, match="not part of GhostClipper's model"):
        clipper.backward(other(model(torch.ones(1, 3))).squeeze(1))
    model.bias.requires_grad_(True)
    with pytest.raises(GhostError, match="unfrozen"):
        clipper.backward(model(torch.ones(1, 3)).squeeze(1))


@pytest.mark.parametrize("before", [nn.Identity(), nn.Linear(3, 3)])
def test_reentrant_checkpointing_is_refused_with_its_remedy(before):
    """Also where nothing trained is before it: autograd would then return no gradient of its parameters, silently."""
    model = nn.Sequential(before, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), nn.Linear(1, 1))
    x = torch.ones(1, 3, requires_grad=True)
    clipper = PerUnitClipper(model, 1.0)
    with pytest.raises(GhostError, match="use_reentrant=False"):
        clipper.backward(model[2](checkpoint(model[1], before(x), use_reentrant=True)).squeeze(1))
    assert all(p.grad is None for p in model.parameters())


def test_parameter_norms_and_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True)
    clipper = PerUnitClipper(table, 1e-2, parameter_norms=True)
    result = clipper.backward(table(torch.tensor([[1, 1, 3]])).sum((1, 2)))
    assert float(result.parameter_norms["weight"]) == pytest.approx((2 * 4 + 2) ** 0.5)
    assert float(table.weight.grad.norm()) == pytest.approx(1e-2, rel=1e-4)
    assert float(result.norms) == pytest.approx(float(result.parameter_norms["weight"]))


def test_a_clipping_that_is_replaced_is_refused():
    model = nn.Linear(3, 1)
    clipper = PerUnitClipper(model, 1.0)
    clipper.backward(model(torch.ones(1, 3)).squeeze(1))
    with pytest.raises(GhostError):
        clipper.clipping = FlatClipping(2.0)


def test_rows_that_leave_their_position_embeddings_to_later_units_are_refused():
    """Dynamic rotary embeddings keep the frequencies of the longest row: one unit more moved a step's sum by 3.7 C."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = LlamaForCausalLM(tiny_llama_config(max_position_embeddings=8, rope_parameters=rope))
    long = torch.randint(3, 61, (1, 24))
    short, middle = long[:, :7], long[:, :12]
    with torch.no_grad():
        fresh, _, after = (model(input_ids=ids).logits for ids in (middle, long, middle))
        assert float((fresh - after).abs().max()) > 1e-6  # the refused dependence is real
        model(input_ids=short)  # resets the frequencies
    clipper = PerUnitClipper(model, 1.0)
    assert clipper.backward(per_sequence_loss(model(input_ids=short).logits, short)).norms.shape == (1,)
    with pytest.raises(GhostError, match="earlier batch"):
        model(input_ids=middle)
    clipper.remove()
    model(input_ids=middle)


def test_a_model_that_a_short_row_switches_to_another_attention_is_refused():
    """BigBird leaves its block-sparse attention for good; with full attention from the start it is clipped."""
    config = BigBirdConfig(
        vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, block_size=2,
        num_random_blocks=1, max_position_embeddings=64, attention_type="block_sparse", is_decoder=False,
    )  # fmt: skip
    model = BigBirdForCausalLM(config).eval()
    long = torch.randint(3, 31, (1, 32))
    with torch.no_grad():
        fresh, _, after = (model(input_ids=ids).logits for ids in (long, long[:, :6], long))
    assert float((fresh - after).abs().max()) > 1e-6  # the refused dependence is real
    model.bert.set_attention_type("block_sparse")
    for kind in (PerUnitClipper, GhostClipper):
        with pytest.raises(GhostError, match="original_full"):
            kind(model, 1.0)
    model.bert.set_attention_type("original_full")
    PerUnitClipper(model, 1.0).remove()


class Halves(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self):
        super().__init__()
        self.inner, self.turn = nn.Linear(3, 2), nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(torch.view_as_complex(self.inner(x)) * self.turn).sum(-1)


@pytest.mark.parametrize("kind", [PerUnitClipper, GhostClipper])
def test_complex_parameters_are_refused(kind):
    """Only their real part had a norm, noise and an update."""
    with pytest.raises(GhostError, match="view_as_complex"):
        kind(Halves(), 1.0)


def test_a_unit_whose_parts_were_joined_when_memory_ran_out_is_not_tried_again(monkeypatch):
    """A second try of its last rows alone would silently leave out those held before."""
    model = nn.Linear(3, 1)
    clipper = PerUnitClipper(model, 1.0)
    clipper.hold(model(torch.ones(1, 3)).squeeze(1))

    def out_of_memory(*args):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(clipper, "_squared_norms", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        clipper.clip(model(torch.ones(1, 3)).squeeze(1))
    with pytest.raises(GhostError, match="could not be combined"):
        clipper.forget()


class Reversible(torch.autograd.Function):
    """A layer that is computed again in its backward pass, where it calls backward() itself."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_a_function_that_calls_backward_itself_is_refused(filled):
    """It adds to .grad what no clipper has seen."""
    first, inner = nn.Linear(3, 3), nn.Linear(3, 1)
    model = nn.Sequential(first, inner)
    clipper = PerUnitClipper(model, clip_norm=1.0)
    if filled:
        inner.weight.grad = torch.zeros_like(inner.weight)
    with pytest.raises(GhostError, match="where the gradient"):
        clipper.backward(Reversible.apply(first(torch.randn(1, 3)), inner).squeeze(1))


@pytest.mark.parametrize("change", ["hook", "frozen"])
def test_a_parameter_that_is_changed_later_is_refused(change):
    """A hook would see, or change, a gradient that is not clipped yet."""
    model = nn.Linear(3, 1)
    clipper = PerUnitClipper(model, 1.0)
    if change == "hook":
        model.weight.register_hook(lambda grad: grad * 1000)
    losses = model(torch.ones(1, 3)).squeeze(1)
    if change == "frozen":
        model.weight.requires_grad_(False)
    with pytest.raises(GhostError, match=r"weight (got a hook|was frozen)"):
        clipper.backward(losses)
    assert model.bias.grad is None
