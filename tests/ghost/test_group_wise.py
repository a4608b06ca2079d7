"""Groups that are clipped separately: a group's sum is formed when its last gradient arrives, which frees memory."""

import math

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, NormMethod
from dpllm.ghost import parameters
from dpllm.ghost.refusals import GhostError
from dpllm.ghost.sums import GroupFactors
from dpllm.mechanism.catalogue import CLIPPINGS
from dpllm.mechanism.clipping import FlatClipping, GroupClipping, PerLayerClipping
from dpllm.mechanism.parts import SeparateGroups, SizedGroups, Spec
from tests.ghost.alive import Watch
from tests.ghost.loop import flat, row_gradients
from tests.ghost.test_groups import Halves
from tests.mechanism.kinds import CLIPPING_KINDS
from tests.mechanism.kinds import clipping as clipping_of_kind
from tests.mutations import kills
from tests.reference.oracle import LOSSES, relative_error
from tests.reference.zoo import Case, build_model, enable_checkpointing, make_batch
from tests.tiers import deep_case

CASES = [
    Case("llama", mode="lora-all-linear"),
    Case("gpt2-without-dropout", tied=True),
    deep_case(Case("bert")),
]
UNITS = [None, torch.tensor([1, 0, -1, 2, 0])]


def in_groups(clip_norm):
    return GroupClipping(clip_norm, {"attention": "*att*", "rest": "*"}, {"attention": 1, "rest": 3})


def clipped(case, clipping, passes, unit_index, checkpointing="none"):
    """Norms, factors and sum of two microbatches of rows that are long enough to free memory."""
    model = build_model(case)
    enable_checkpointing(model, checkpointing)
    batch = make_batch(case.spec, num_rows=5)
    clipper = GhostClipper(model, clipping=clipping, norm_method=NormMethod(backward_passes=passes))
    for _ in range(2):
        losses = LOSSES[case.spec.task](model(**batch.inputs).logits, batch.labels)
        result = clipper.backward(losses, unit_index)
    total = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    clipper.remove()
    return result, total


def always(monkeypatch, smaller=True):
    """The sums count as smaller (or never) than what they are formed from."""
    monkeypatch.setattr(parameters.Passes, "sums_are_smaller", lambda passes, *_: smaller)


class Stack(nn.Sequential):
    """Layers; ``between`` is applied before the layer ``at``, and ``skip`` leaves that layer out."""

    between, at, skip = nn.Identity(), 0, False

    def forward(self, x):
        for number, layer in enumerate(self):
            if number == self.at:
                x = self.between(x)
            x = x if self.skip and number == self.at else layer(x)
        return x


def stack(layers=6, width=8):
    torch.manual_seed(0)
    return Stack(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def losses_of(net, inputs):
    return net(inputs).square().sum((1, 2))


@kills(
    "a group that is clipped during the backward pass is not weighted",
    "dpllm/ghost/receivers.py",
    "self._pass.weigh_group(group, self._factors.one(group, *self.norms[group]))",
    "self._pass.weigh_group(group, self._factors.one(group, *self.norms[group]) * 0 + 1)",
)
@pytest.mark.parametrize("unit_index", UNITS, ids=["a row is a unit", "several rows"])
@pytest.mark.parametrize("clipping", [PerLayerClipping(0.1), GroupClipping(0.1, {"a": "*0.*", "b": "*"})], ids=str)
def test_norms_factors_and_sum_are_those_of_the_loop(monkeypatch, clipping, unit_index):
    """In float64, against autograd of single rows, with a layer that is used twice."""
    always(monkeypatch)
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            return self.net[2](self.net[0](torch.tanh(self.net[1](self.net[0](x)))))

    model, x = Net().double(), torch.randn(5, 4, 6, dtype=torch.float64)
    rows = row_gradients(model, lambda model, batch: losses_of(model, batch["x"]), {"x": x})
    if unit_index is not None:
        keep = unit_index >= 0
        rows = rows.new_zeros(3, rows.shape[1]).index_add(0, unit_index[keep], rows[keep])
    clipper = GhostClipper(model, clipping=clipping)
    result = clipper.backward(losses_of(model, x), unit_index)
    names = clipping.groups({name: p.shape for name, p in model.named_parameters()})
    group_of = {name: number for number, group in enumerate(names) for name in group}
    of_entry = torch.cat([torch.full((p.numel(),), group_of[name]) for name, p in model.named_parameters()])
    norm_GU = torch.stack([rows[:, of_entry == group].norm(dim=1) for group in range(len(names))])
    factor_GU = clipping.factors(norm_GU)
    torch.testing.assert_close(result.factors.double(), factor_GU, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.norms.double(), rows.norm(dim=1), rtol=1e-6, atol=0)
    expected = (factor_GU[of_entry].T * rows).sum(0)
    total = flat([p.grad for p in model.parameters()], list(model.parameters()))
    assert float((total - expected).norm()) <= 1e-6 * float(expected.norm())
    clipper.remove()


@pytest.mark.parametrize("checkpointing", ["none", deep_case("reentrant"), deep_case("nonreentrant")])
@pytest.mark.parametrize("unit_index", UNITS, ids=["a row is a unit", "several rows"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("make", [PerLayerClipping, in_groups], ids=["per-layer", "groups"])
def test_it_gives_what_a_pass_gives_that_keeps_everything(monkeypatch, make, case, unit_index, checkpointing):
    """With adapters and tied weights, over several microbatches."""
    found = []
    for smaller in (True, False):
        always(monkeypatch, smaller)
        found.append(clipped(case, make(0.5), 1, unit_index, checkpointing))
    (early, early_total), (late, late_total) = found
    torch.testing.assert_close(early.norms, late.norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(early.factors, late.factors, rtol=1e-9, atol=0)
    assert relative_error(early_total, late_total) <= 1e-9


@pytest.mark.parametrize(("rows", "held"), [(3, 1), (1, 6)], ids=["many rows", "few rows"])
def test_only_one_group_is_held_at_a_time(rows, held):
    """Where the sums take less memory than what they are formed from; with few short rows nothing is gained."""
    watch = Watch()
    net = nn.Sequential(*(part for layer in stack() for part in (layer, watch)))
    clipper = GhostClipper(net, clipping=PerLayerClipping(1.0), norm_method=NormMethod("gram"))
    for _ in range(2):  # the first call compares with autograd, and keeps more
        watch.most = 0
        clipper.backward(losses_of(net, torch.randn(rows, 4, 8)))
    assert held <= watch.most <= held + (held == 1)
    assert watch.alive() == 0
    clipper.remove()


class Overflow(torch.autograd.Function):
    """Passes its input on; the gradient of row 1 becomes infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[1] = math.inf
        return grad


@pytest.mark.parametrize("clipping", [PerLayerClipping(1e-3), GroupClipping(1e-3, {"a": "[03].*", "b": "*"})], ids=str)
@pytest.mark.parametrize("unit_index", [None, torch.tensor([0, 1, 1])], ids=["a row is a unit", "several rows"])
def test_the_share_of_a_unit_that_is_not_finite_does_not_depend_on_when_sums_are_formed(
    monkeypatch, clipping, unit_index
):
    """The rows of other units decide how much memory is needed, and so when sums are formed.

    Were it 0 in the groups that come later, one more unit could change the shares of many units.
    """
    sums, x = [], torch.randn(3, 4, 8)
    for early, passes in ((True, 1), (False, 1), (False, 2)):
        always(monkeypatch, early)
        net = stack(4)
        clipper = GhostClipper(net, clipping=clipping, norm_method=NormMethod(backward_passes=passes))
        clipper._checked.rows = True
        net.at, net.between = 1, Overflow.apply
        result = clipper.backward(losses_of(net, x), unit_index)
        assert result.num_nonfinite == 1
        sums.append([result.factors, *(p.grad for p in net.parameters())])
    for other in sums[1:]:
        for one, another in zip(sums[0], other, strict=True):
            assert torch.isfinite(one).all()
            torch.testing.assert_close(one, another)


def test_a_unit_that_is_not_finite_from_some_layer_on_stays_within_the_bound(monkeypatch):
    """Its gradient reaches the last layers first: their bounded share stays, that in the others is 0."""
    always(monkeypatch)
    net = stack(4)
    clipper = GhostClipper(net, clipping=PerLayerClipping(1e-3))
    clipper._checked.rows = True
    x = torch.randn(3, 4, 8)
    net.at, net.between = 2, Overflow.apply
    result = clipper.backward(losses_of(net, x))
    assert result.num_nonfinite == 1
    assert (result.factors[:2, 1] == 0).all() and (result.factors[2:, 1] > 0).all()
    assert (result.factors[:, [0, 2]] > 0).all()
    for layer, most in zip(net, (2, 2, 3, 3), strict=True):
        assert float(layer.weight.grad.norm()) <= most * 1e-3 / 2 * (1 + 1e-6)


def test_a_parameter_without_gradient_is_an_error(monkeypatch):
    """As in other passes."""
    always(monkeypatch)
    net = stack(3)
    net.at, net.skip = 1, True
    clipper = GhostClipper(net, clipping=PerLayerClipping(1.0))
    with pytest.raises(GhostError, match="reached 1"):
        clipper.backward(losses_of(net, torch.randn(2, 3, 8)))


def test_a_failed_pass_leaves_nothing_behind(monkeypatch):
    """A microbatch can be retried: no sum was added to a gradient."""
    always(monkeypatch)
    net, x = stack(3), torch.randn(3, 4, 8)
    expected = GhostClipper(net, clipping=PerLayerClipping(1e-2))
    expected.backward(losses_of(net, x))
    sums = [p.grad.clone() for p in net.parameters()]
    expected.remove()
    net.zero_grad()
    clipper = GhostClipper(net, clipping=PerLayerClipping(1e-2))

    def fail(_grad):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    def failing(middle):
        if middle.requires_grad:
            middle.register_hook(fail)
        return middle

    clipper.backward(losses_of(net, x))
    net.zero_grad()
    net.at, net.between = 2, failing
    with pytest.raises(torch.cuda.OutOfMemoryError):
        clipper.backward(losses_of(net, x))
    net.between = nn.Identity()
    clipper.forget()
    assert all(p.grad is None for p in net.parameters())
    clipper.backward(losses_of(net, x))
    for parameter, total in zip(net.parameters(), sums, strict=True):
        torch.testing.assert_close(parameter.grad, total)


IN_THREE = {"kind": "groups", "parameters": {"a": "0.*", "b": "1.*", "c": "2.*"}, "shares": {"a": 1, "b": 2, "c": 4}}
SEPARATE = [kind for kind in CLIPPING_KINDS if hasattr(CLIPPINGS[Spec.of(kind).kind], "group_factors")]


@pytest.mark.parametrize("kind", [*SEPARATE, IN_THREE], ids=str)
def test_the_factors_of_a_group_alone_are_those_beside_others(kind):
    """So a sum that is formed early is the one that would be formed late."""
    shapes = {f"{layer}.weight": (layer + 1, 3) for layer in range(3)}
    made = clipping_of_kind(kind, 0.7)
    groups = made.groups(shapes)
    if isinstance(made, SizedGroups):
        made = made.sized([sum(math.prod(shapes[name]) for name in group) for group in groups])
    assert isinstance(made, SeparateGroups)
    norm_GU = torch.logspace(-3, 2, 4 * len(groups)).view(len(groups), 4)
    whole_GU = made.factors(norm_GU)
    for group, norm_U in enumerate(norm_GU):
        assert torch.equal(made.group_factors(group, len(groups), norm_U), whole_GU[group]), "other bits"


def test_only_clippings_of_the_catalogue_are_taken_apart():
    """The factors of others are checked with all groups together; flat clipping has no groups to separate."""

    class Apart(Halves):
        def group_factors(self, group, num_groups, norm_U):
            return torch.ones_like(norm_U)

    assert GroupFactors.of(Apart(1.0), 2) is None
    assert GroupFactors.of(PerLayerClipping(1.0), 2) is not None and GroupFactors.of(FlatClipping(1.0), 1) is None


def test_a_held_unit_is_clipped_with_all_its_rows(monkeypatch):
    """Rows held before are part of each group's norm."""
    always(monkeypatch)
    found, x = [], torch.randn(4, 5, 8)
    for held in (False, True):
        net = stack(2)
        clipper = GhostClipper(net, clipping=PerLayerClipping(1e-2))
        if held:
            clipper.hold(losses_of(net, x[:2]))
        result = clipper.backward(
            losses_of(net, x[2:] if held else x), torch.zeros(2 if held else 4, dtype=torch.int64)
        )
        found.append((result.factors, *(p.grad for p in net.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
