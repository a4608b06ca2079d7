"""A clipping refuses invalid bounds, and its sensitivity follows from its bound."""

import math
from dataclasses import FrozenInstanceError, dataclass, field
from typing import ClassVar

import pytest
import torch

from dpllm import GhostClipper, PerUnitClipper
from dpllm.ghost.sums import clip_factors
from dpllm.mechanism.clipping import AdaptiveScaleClipping, AutomaticClipping, FlatClipping
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Mechanism, OneGroup
from tests.mechanism.kinds import CLIPPING_KINDS, clipping


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan, "1"])
def test_a_bound_that_bounds_nothing_is_refused(clip_norm):
    """Infinite sensitivity has no epsilon."""
    for kind in CLIPPING_KINDS:
        with pytest.raises(ValueError, match="clip_norm is"):
            clipping(kind, clip_norm)


def test_sensitivity_by_adjacency():
    """Zero-out changes the sum by C, replace-one by 2C."""
    for each in (clipping(kind, 0.5) for kind in CLIPPING_KINDS):
        assert each.sensitivity("zero-out") == 0.5
        assert each.sensitivity("replace-one") == 1.0
        with pytest.raises(ValueError, match="adjacency is 'add'"):
            each.sensitivity("add")


def test_a_clipping_keeps_nothing_of_a_model_or_of_norms():
    """One object serves every model and every step, and the clipper of each relies on it."""
    for each in (clipping(kind, 0.5) for kind in CLIPPING_KINDS):
        before = dict(vars(each))
        each.groups({"0.weight": (2, 3), "1.weight": (4, 2)})
        each.factors(torch.ones(1, 3))
        assert vars(each) == before and hash(each) is not None, each


@dataclass
class Settable(OneGroup):
    """A researcher's clipping: `clipping.clip_norm = 0.5 * result.norms.median()` would publish the norms."""

    clip_norm: float
    kind: ClassVar[str] = "settable"

    def factors(self, norm_GU):
        return (self.clip_norm / norm_GU).clamp_max(1)

    def sensitivity(self, adjacency):
        return self.clip_norm


class Inherited(FlatClipping):
    """Its C cannot be set, but any other attribute that its factors read can."""


@dataclass(frozen=True)
class Listed(FlatClipping):
    scale: list[float] = field(default_factory=lambda: [1.0])


DRAW = Draw(num_units=100, population=100, expected_batch_size=10, max_batch_size=30)
USES = {
    "mechanism": lambda clipping: Mechanism(DRAW, clipping, IndependentNoise(), 1.0),
    "GhostClipper": lambda clipping: GhostClipper(torch.nn.Linear(3, 1), clipping=clipping),
    "PerUnitClipper": lambda clipping: PerUnitClipper(torch.nn.Linear(3, 1), clipping=clipping),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("kind", [Settable, Inherited])
def test_a_clipping_whose_numbers_can_be_set_is_refused(kind, use):
    """It could follow the norms of the private gradients, which no ε covers."""
    with pytest.raises(ValueError, match=f"{kind.__name__} is not a frozen dataclass, .* which no ε covers"):
        use(kind(8.0))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_clipping_is_copied(use):
    """What changes in the caller's object changes no bound; the copy's numbers cannot be set."""
    given = Listed(8.0)
    held = use(given).clipping
    given.scale[0] = 9.0
    assert held.scale == [1.0] and held == Listed(8.0)
    with pytest.raises(FrozenInstanceError):
        held.clip_norm = 0.5
    with pytest.raises(FrozenInstanceError):
        held.threshold = 0.5


def test_equal_mechanisms_are_equal_and_have_a_hash():
    one, other = (Mechanism(DRAW, FlatClipping(1.0), IndependentNoise(), 1.0) for _ in range(2))
    assert one == other and hash(one) == hash(other)


def test_automatic_clipping_scales_nearly_all_gradients_to_the_clip_norm():
    """C / (norm + stability), AUTO-S; a gradient much shorter than the stability stays short."""
    factors = AutomaticClipping(2.0, stability=0.1).factors(torch.tensor([9.9, 0.1, 1e-6], dtype=torch.float64))
    torch.testing.assert_close(factors, torch.tensor([0.2, 10.0, 2 / (0.1 + 1e-6)], dtype=torch.float64))


def test_adaptive_scaling_gives_short_gradients_a_smaller_factor_than_automatic_clipping():
    """C / (norm + r / (norm + r)), DP-PSAC: nearly C for long gradients, the factor C for the shortest ones."""
    norms, r = torch.tensor([100.0, 0.3, 1e-3, 1e-9], dtype=torch.float64), 0.04
    factors = AdaptiveScaleClipping(2.0, r).factors(norms)
    expected = [2 / (100 + r / (100 + r)), 2 / (0.3 + r / 0.34), 2 / (1e-3 + r / (1e-3 + r)), 2.0]
    torch.testing.assert_close(factors, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
    assert (factors[2:] < AutomaticClipping(2.0, r).factors(norms)[2:] / 20).all()
    largest = AdaptiveScaleClipping(2.0, r).factors(torch.linspace(1e-6, 1, 100_001, dtype=torch.float64)).max()
    assert float(largest) == pytest.approx(2 / (2 * r**0.5 - r), rel=1e-6)
    with pytest.raises(ValueError, match="stability"):
        AdaptiveScaleClipping(1.0, 1.5)


@pytest.mark.parametrize("stability", [0.0, -1.0, 1e-10, 1e-30, math.inf, math.nan, 10**400, "1", True])
def test_a_stability_that_is_none_is_refused(stability):
    """With 0 a nearly flat loss would count as much as a steep one."""
    with pytest.raises(ValueError, match="stability is") as raised:
        AutomaticClipping(1.0, stability)
    assert len(str(raised.value)) < 200


def test_every_factor_of_automatic_clipping_is_finite():
    """Also of a zero gradient: an infinite one times zero would make the release NaN."""
    with pytest.raises(ValueError, match="1e-05"):
        AutomaticClipping(1e25, 1e-6)
    (factors,) = clip_factors(AutomaticClipping(1e20, 1e-9), torch.zeros(1, 1))
    assert torch.isfinite(factors).all()
