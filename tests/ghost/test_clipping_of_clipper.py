"""The clipping of a clipper: it stays the one that was given, but for its threshold and the sizes of its groups."""

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, GhostError
from dpllm.ghost import parameters
from dpllm.ghost.sums import GroupFactors
from dpllm.mechanism.catalogue import CLIPPINGS
from dpllm.mechanism.clipping import AutomaticClipping, FlatClipping, NormBound, PerLayerClipping, QuantileClipping
from tests.mutations import kills

C = 0.7


@dataclass(frozen=True)
class BySize(NormBound):
    """Each module is clipped to C times the root of its share of the entries."""

    kind: ClassVar[str] = "by-size"
    sizes: tuple[int, ...] = field(default=(), init=False)

    def groups(self, shapes):
        modules = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
        return [[name for name in shapes if name.rpartition(".")[0] == module] for module in modules]

    def sized(self, sizes):
        other = dataclasses.replace(self)
        object.__setattr__(other, "sizes", tuple(sizes))
        return other

    def group_factors(self, group, num_groups, norm_U):
        return (self.clip_norm * math.sqrt(self.sizes[group] / sum(self.sizes)) / norm_U).clamp_max(1)

    def factors(self, norm_GU):
        return torch.stack([self.group_factors(group, len(norm_GU), norm_U) for group, norm_U in enumerate(norm_GU)])

    def words(self):
        return "is clipped in each module"


def model_of(*widths):
    """Linear layers with a bias, the last one frozen."""
    torch.manual_seed(0)
    layers = [nn.Linear(one, other) for one, other in itertools.pairwise(widths)]
    layers[-1].requires_grad_(False)
    return nn.Sequential(*layers).double()


def norms_of(model, clipper):
    """The norm of each trained layer's share of one long gradient."""
    model.zero_grad(set_to_none=True)
    clipper.backward(1e6 * model(torch.ones(1, model[0].in_features, dtype=torch.float64)).square().sum(1))
    return [float(torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()) for layer in model[:-1]]


def bounds(*sizes):
    """C √(d_k / d)."""
    return pytest.approx([C * math.sqrt(size / sum(sizes)) for size in sizes], rel=1e-4)


@pytest.mark.parametrize("catalogued", [False, True], ids=["own", "catalogue"])
def test_one_object_serves_two_models_with_as_many_layers(monkeypatch, catalogued):
    """Each model has its own sizes, which count weights and biases that are trained; also after the other is made."""
    if catalogued:  # then its sums are formed during the backward pass
        monkeypatch.setitem(CLIPPINGS, "by-size", BySize)
        monkeypatch.setattr(parameters.Passes, "sums_are_smaller", lambda passes, *_: True)
    assert (GroupFactors.of(BySize(C), 2) is not None) == catalogued
    clipping, one, other = BySize(C), model_of(4, 9, 3, 2), model_of(3, 2, 20, 2)
    first, second = (GhostClipper(model, clipping=clipping) for model in (one, other))
    for _ in range(2):
        assert norms_of(one, first) == bounds(45, 30)
        assert norms_of(other, second) == bounds(8, 60)
    assert clipping == BySize(C) == first.clipping
    total = torch.cat([p.grad.flatten() for p in one.parameters() if p.requires_grad]).norm()
    assert total <= C
    first.remove()
    second.remove()


def test_norms_of_parameters_change_nothing():
    """Norms of parameters are summed over the groups, which keep their sizes."""
    model = model_of(4, 9, 3, 2)
    clipper = GhostClipper(model, clipping=BySize(C), parameter_norms=True)
    assert norms_of(model, clipper) == bounds(45, 30)
    clipper.remove()


@dataclass(frozen=True)
class Flattened(BySize):
    """Becomes a clipping of the catalogue, which is not checked: with two groups it would reach √2 C."""

    def sized(self, sizes):
        return FlatClipping(self.clip_norm)


@dataclass(frozen=True)
class Wider(BySize):
    """Takes the norm of all models together."""

    def sized(self, sizes):
        return dataclasses.replace(self, clip_norm=3.0)


@kills(
    "a clipping may become another one when it gets the sizes of the groups",
    "dpllm/ghost/sums.py",
    "if type(sized) is not type(clipping):",
    "if False:",
)
@kills(
    "a clipping may raise its bound when it gets the sizes of the groups",
    "dpllm/ghost/sums.py",
    "if (norm, bound) != now:",
    "if False:",
)
@pytest.mark.parametrize(
    ("clipping", "words"),
    [
        (Flattened(C), r"'by-size'.* FlatClipping, .* Return a Flattened"),
        (Wider(C), r"had clip_norm=0\.7 and sensitivity 0\.7, but sized\(\) changed them to clip_norm=3"),
    ],
    ids=["class", "C"],
)
def test_a_clipping_that_has_another_bound_with_sizes_is_refused(clipping, words):
    """The noise is for the bound that it stated without them."""
    with pytest.raises(GhostError, match=words):
        GhostClipper(model_of(4, 9, 3, 2), clipping=clipping)


@dataclass(frozen=True)
class Threshold(NormBound):
    """It clips to a threshold and scales by C over it: C and the sensitivity stay when the threshold moves."""

    kind: ClassVar[str] = "adaptive"
    threshold: float = 1.0

    def factors(self, norm_GU):
        return self.clip_norm / len(norm_GU) ** 0.5 / norm_GU.clamp_min(self.threshold)

    def groups(self, shapes):
        return [list(shapes)]

    def words(self):
        return "is clipped"


@dataclass(frozen=True)
class Updated(Threshold):
    """The same, replaced after each step by `updated`, as the accounted kind is."""

    def statistic(self, norm_U):
        return (norm_U <= self.threshold).double() - 0.5

    def statistic_noise(self, expected_batch_size):
        return 10.0

    def at(self, threshold):
        return dataclasses.replace(self, threshold=threshold)

    def updated(self, noisy_statistic, expected_batch_size):
        return self.at(self.threshold * 0.9)


def step(clipper, model):
    return clipper.backward(model(torch.ones(3, 4)).squeeze(1))


def made(clipping):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    return GhostClipper(model, clipping=clipping), model


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FlatClipping(C), FlatClipping(0.5)),
        (PerLayerClipping(C), FlatClipping(C)),
        (AutomaticClipping(C, 0.01), AutomaticClipping(C, 0.1)),
        (Threshold(C), Threshold(C, threshold=0.5)),
    ],
    ids=["C", "groups", "options", "own"],
)
def test_another_clipping_in_its_place_is_refused(first, second):
    """It would be another mechanism than the one that is accounted."""
    clipper, model = made(first)
    step(clipper, model)
    with pytest.raises(GhostError, match="covers a clipping"):
        clipper.clipping = second


@pytest.mark.parametrize("clipping", [QuantileClipping(C), Updated(C)], ids=["catalogue", "own"])
def test_a_clipping_that_adapts_by_its_updates_goes_on(clipping):
    """With the same C and other options; the first object may come back."""
    clipper, model = made(clipping)
    for _ in range(3):
        step(clipper, model)
        step(clipper, model)  # a second microbatch
        clipper.clipping = clipper.clipping.updated(0.0, 4)
    step(clipper, model)
    clipper.clipping = clipping
    step(clipper, model)
    with pytest.raises(GhostError, match=r"clip_norm=0\.5"):
        clipper.clipping = dataclasses.replace(clipping, clip_norm=0.5)
