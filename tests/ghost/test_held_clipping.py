"""A clipper refuses a clipping that is not as it was when the clipper was made."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, GhostError
from dpllm.mechanism.automatic import AutomaticClipping
from dpllm.mechanism.clipping import FlatClipping, NormBound
from dpllm.mechanism.per_layer import PerLayerClipping
from dpllm.mechanism.quantile import QuantileClipping

C = 0.7


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
    clipper.clipping = second
    with pytest.raises(GhostError, match="no ε covers a clipping that follows the data"):
        step(clipper, model)


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
    clipper.clipping = dataclasses.replace(clipping, clip_norm=0.5)
    with pytest.raises(GhostError, match=r"and now has clip_norm=0\.5"):
        step(clipper, model)


def test_the_object_of_a_step_may_not_be_changed():
    """The threshold of an adaptive clipping moves by replacement only."""
    clipper, model = made(Updated(C))
    step(clipper, model)
    clipper.clipping = clipper.clipping.updated(0.0, 4)
    step(clipper, model)
    with pytest.raises(dataclasses.FrozenInstanceError):
        clipper.clipping.threshold = 9.0
