"""Two steps of a unit are as far apart as the noise has bands, whatever the sampler: wrong ones are refused."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from dpllm.mechanism.banded import BandedNoise, CyclicPoissonSampler
from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.noise import IndependentNoise, UnitsApart
from dpllm.mechanism.parts import Draw, Spec
from dpllm.mechanism.sampling import FixedOrderSampler, TruncatedPoissonSampler, seeded_rng
from dpllm.training.run import PrivateRun
from tests.mutations import kills
from tests.training.test_run import plan_of, rows_of

DRAW = Draw(num_units=40, population=40, expected_batch_size=8, max_batch_size=40)


class InTwoGroups(CyclicPoissonSampler):
    """Every group also takes the units of the next one."""

    def steps(self, rng):
        groups = np.array_split(rng.permutation(self.num_units), self.bands)
        while True:
            for number in range(self.bands):
                yield np.sort(np.concatenate([groups[number], groups[(number + 1) % self.bands]]))


class SplitAgain(CyclicPoissonSampler):
    """Another split in every cycle: a unit may be in the last group of one and the first of the next."""

    def steps(self, rng):
        while True:
            yield from map(np.sort, np.array_split(rng.permutation(self.num_units), self.bands))


class Twice(CyclicPoissonSampler):
    """A unit is twice in a draw."""

    def steps(self, rng):
        while True:
            yield np.array([3, 3])


WRONG = {
    "in two groups": lambda bands: InTwoGroups(40, bands, 8, 40),
    "another split in every cycle": lambda bands: SplitAgain(40, bands, 8, 40),
    "bands wider than groups": lambda bands: CyclicPoissonSampler(40, bands // 2, 8, 40),
    "plain Poisson sampling": lambda bands: TruncatedPoissonSampler(40, 0.5, 40),
    "twice in a draw": lambda bands: Twice(40, bands, 8, 40),
}
REFUSED = r"was drawn again after \d steps?, but the plan's noise needs at least 4 steps|contains a unit twice"


@kills(
    "a run does not compare the units of its draws",
    "dpllm/training/draws.py",
    "        self._apart.check(drawn)",
    "        ",
)
@kills(
    "a unit is twice in a draw of independent noise",
    "dpllm/mechanism/noise.py",
    "        if len(np.unique(unit_ids)) < len(unit_ids):",
    "        if False:",
)
@pytest.mark.parametrize("sampler", WRONG.values(), ids=WRONG)
def test_a_sampler_that_brings_a_unit_back_too_early_is_refused(sampler, monkeypatch, tmp_path):
    """In a run, before the draw is charged and handed out, at every attempt."""
    monkeypatch.setattr(BandedNoise, "sampler", lambda self, draw: sampler(self._number))
    plan = dataclasses.replace(plan_of(num_steps=20), noise=Spec.of({"kind": "banded", "bands": 4}))
    run = PrivateRun.start(tmp_path, plan, rows_of())
    with pytest.raises(ValueError, match=REFUSED):
        list(run.draws(20))
    charged = run.ledger.num_steps
    with pytest.raises(ValueError, match=REFUSED):
        next(run.draws(1))
    assert run.ledger.num_steps == charged < 20


@pytest.mark.parametrize(("given", "error"), [((3, 3, 5), "contains a unit twice"), ((-1, 5), "has the unit -1")])
def test_a_draw_with_a_unit_twice_is_refused(given, error, monkeypatch, tmp_path):
    """Also with independent noise: it would contribute up to 2 C. A number below 0 is another name of a unit."""
    drawing = SimpleNamespace(steps=lambda rng: iter([np.array(given, dtype=np.int64)]))
    monkeypatch.setattr(IndependentNoise, "sampler", lambda self, draw: drawing)
    run = PrivateRun.start(tmp_path, plan_of(num_steps=20), rows_of())
    with pytest.raises(ValueError, match=error):
        next(run.draws(1))
    assert run.ledger.num_steps == 0


def test_the_samplers_of_the_mechanisms_are_not_refused():
    """At the largest rate, over many cycles; and independent noise allows every draw."""
    for bands in (1, 2, 5):
        noise = BandedNoise(bands)
        drawn, apart = noise.sampler(DRAW).steps(seeded_rng(bands)), UnitsApart(noise.separation(DRAW))
        for _ in range(30):
            units = next(drawn)
            apart.check(units)
            apart.take(units)
    apart = UnitsApart(1)
    for units in ([0, 1], [0, 1], [1]):
        apart.check(np.array(units))
        apart.take(np.array(units))
    with pytest.raises(ValueError, match="a unit twice"):
        apart.check(np.array([1, 1]))


def test_a_unit_may_come_back_after_as_many_steps_as_there_are_bands():
    """Not one step earlier."""
    apart = UnitsApart(3)
    for units in ([0, 1], [2], [], [0]):
        apart.check(np.array(units, dtype=np.int64))
        apart.take(np.array(units, dtype=np.int64))
    with pytest.raises(ValueError, match="1 step"):
        apart.check(np.array([0, 7]))
    apart.check(np.array([2]))


class ShuffledPasses(FixedOrderSampler):
    """Another order in every pass: a unit may end one and begin the next."""

    def steps(self, rng):
        while True:
            yield from map(np.sort, np.array_split(rng.permutation(self.num_units), self.num_units // self.batch_size))


def test_an_order_that_changes_between_passes_is_refused(monkeypatch, tmp_path):
    """Ordinary epochs, shuffled again each time, under noise that is accounted for one order."""
    noise = {"kind": "blt", "buffers": 1, "decays": [0.9], "weights": [0.2], "scale": 0.5}
    plan = dataclasses.replace(plan_of(num_steps=20), noise=Spec.of(noise))
    draw = plan.mechanism.draw
    separation = draw.num_units // draw.expected_batch_size
    assert plan.mechanism.noise.separation(draw) == separation > 1
    right = FixedOrderSampler(draw.num_units, draw.expected_batch_size)
    monkeypatch.setattr(BltNoise, "sampler", lambda self, draw: right)
    assert len(list(PrivateRun.start(tmp_path / "right", plan, rows_of()).draws(20))) == 20
    wrong = ShuffledPasses(draw.num_units, draw.expected_batch_size)
    monkeypatch.setattr(BltNoise, "sampler", lambda self, draw: wrong)
    with pytest.raises(ValueError, match=rf"needs at least {separation} steps"):
        list(PrivateRun.start(tmp_path / "wrong", plan, rows_of()).draws(20))
