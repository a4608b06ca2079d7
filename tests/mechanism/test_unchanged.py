"""A clipping whose C or sensitivity changes is refused at the next use of its mechanism."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Mechanism, OneGroup

DRAW = Draw(num_units=100, population=100, expected_batch_size=10, max_batch_size=30)
USES = {
    "noise": lambda mechanism: mechanism.noise_stddev,
    "event": lambda mechanism: mechanism.event,
    "charge": lambda mechanism: mechanism.history(3),
    "releases": lambda mechanism: mechanism.release_stddevs(3),
}


@dataclass
class Adaptive(OneGroup):
    """A clipping of a researcher's own whose numbers can be set."""

    kind: ClassVar[str] = "adaptive"
    clip_norm: float
    factor: float = 1.0

    def factors(self, norm_GU):
        return (self.clip_norm / norm_GU).clamp_max(1)

    def sensitivity(self, adjacency):
        return self.factor * self.clip_norm * (2 if adjacency == "replace-one" else 1)

    def words(self):
        return "is clipped"


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("change", [{"clip_norm": 0.5}, {"factor": 0.25}], ids=["clip norm", "sensitivity"])
def test_a_bound_that_changes_is_refused_at_the_next_use(use, change):
    """One line with both numbers; unchanged, and set back, it is used."""
    clipping = Adaptive(8.0)
    mechanism = Mechanism(DRAW, clipping, IndependentNoise(), 1.0)
    use(mechanism)
    before = dict(vars(clipping))
    for name, value in change.items():
        setattr(clipping, name, value)
    with pytest.raises(ValueError, match=r"'adaptive' had clip_norm=8 and sensitivity 8, and now has .* no ε covers"):
        use(mechanism)
    for name, value in before.items():
        setattr(clipping, name, value)
    use(mechanism)


def test_the_record_is_no_part_of_the_specification():
    """Equal mechanisms are equal, and hashable where their clipping is."""
    one, other = (Mechanism(DRAW, FlatClipping(1.0), IndependentNoise(), 1.0) for _ in range(2))
    assert one == other and hash(one) == hash(other) and "bound" not in repr(one)
