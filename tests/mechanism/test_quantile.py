"""Clipping to a quantile: the threshold follows the norms by noisy counts, and σ covers gradients and counts together.

σ_g is compared with published figures and with dp_accounting; steps with a float64 loop that clips to the threshold,
adds up, and divides by it.
"""

import dataclasses
import math
import re

import dp_accounting
import numpy as np
import pytest
import scipy.stats
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from torch import nn

from dpllm import PrivacyConfig, make_plan
from dpllm.config import ConfigError
from dpllm.data.units import UnitIndex
from dpllm.engines.processes import Processes
from dpllm.ghost.sums import clip_factors
from dpllm.mechanism.catalogue import clipping_of
from dpllm.mechanism.clipping import QuantileClipping
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.limits import MAX_CLIP_NORM, MIN_CLIP_NORM
from dpllm.mechanism.parts import AdaptiveClipping, Draw, Mechanism, Spec, gradient_noise_multiplier
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.report.definition import mechanism
from dpllm.report.verify import thresholds_found
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun
from dpllm.training.step import StepStatistic, Threshold
from tests.memory_ledger import MemoryLedger
from tests.mutations import kills
from tests.training.test_run import loss_of, network, plan_of, rows_of

pytestmark = pytest.mark.usefixtures("rows_not_compared")

C, B = 0.5, 8  # of `plan_of`


def quantile_plan(noise_multiplier=0.0, num_steps=4, noise=None, seeded=False, **options):
    clipping = Spec.of({"kind": "quantile", **options})
    plan = plan_of(noise_multiplier, num_steps=num_steps, seeded=seeded)
    return dataclasses.replace(plan, clipping=clipping, noise=Spec.of(noise or "independent"))


def run_of(folder, plan, model, lr=0.3):
    """A run of the public loop on CPU in float64; `test_run`'s users have one to three rows, some of them held."""
    run = PrivateRun.start(folder, plan, rows_of(max_rows=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run.attach(model, optimizer)
    return run, optimizer


def wide_loss(model, inputs):
    return loss_of(model, {"rows": inputs["rows"].double()})


def statistic_of(before, after, rate=0.2, quantile=0.5):
    """The noisy sum of the units' shares, from two thresholds of which one follows the other."""
    return B * ((math.log(before) - math.log(after)) / rate + quantile - 0.5)


@pytest.mark.parametrize(
    ("sigma", "count_noise", "expected"), [(0.71758, 51.2, 0.717598), (0.71758, 10, 0.718042), (1.0, 10, 1.001252)]
)
def test_the_noise_multiplier_of_the_gradients(sigma, count_noise, expected):
    """(σ⁻² - (2σ_b)⁻²)^(-½)."""
    assert gradient_noise_multiplier(sigma, count_noise) == pytest.approx(expected, abs=5e-7)


@kills(
    "the count of a quantile is not charged",
    "dpllm/mechanism/parts.py",
    "return self.gradient_noise_multiplier * self.clipping.clip_norm",
    "return self.noise_multiplier * self.clipping.clip_norm",
)
def test_gradients_and_count_are_together_one_event_of_sigma_by_dp_accounting():
    """A Poisson sample of the composition of both Gaussians, 0.8 as large a σ_b as refused to make the count dear."""
    sigma, count_noise, rate, steps, delta = 0.9, 0.55, 0.05, 60, 1e-5
    sigma_g = gradient_noise_multiplier(sigma, count_noise)
    assert sigma_g > 1.5  # half of the budget goes to the count
    both = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(sigma_g), dp_event.GaussianDpEvent(2 * count_noise)])
    found = []
    for one in (both, dp_event.GaussianDpEvent(sigma)):
        accountant = dp_accounting.rdp.RdpAccountant()
        accountant.compose(one, steps)
        found.append(accountant.get_epsilon(delta))
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    accountant = PLDAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)), steps)
    plan = make_plan(
        PrivacyConfig(
            noise_multiplier=sigma,
            clip_norm=C,
            expected_batch_size=10,
            max_batch_size=200,
            delta=delta,
            clipping={"kind": "quantile", "count_noise": count_noise},
        ),
        200,
        steps,
    )
    assert plan.epsilon == pytest.approx(accountant.get_epsilon(delta), rel=1e-3)
    assert plan.event.noise_multiplier == sigma and plan.noise_stddev == sigma_g * C


@pytest.mark.parametrize(("sigma", "count_noise"), [(1.0, 0.5), (1.0, 0.4), (0.81, None)])
def test_a_count_that_would_cost_more_than_the_step_is_refused(sigma, count_noise):
    """σ >= 2 σ_b; with b = 8 the default of σ_b is 0.4."""
    settings = {"noise_multiplier": sigma, "clip_norm": C, "expected_batch_size": 8}
    clipping = {"kind": "quantile", "count_noise": count_noise} if count_noise else "quantile"
    with pytest.raises(ValueError, match=r"clipping\.count_noise") as raised:
        make_plan(PrivacyConfig(**settings, clipping=clipping), 40, 3)
    assert "\n" not in str(raised.value)
    draw = Draw(num_units=40, population=40, expected_batch_size=8, max_batch_size=20)
    with pytest.raises(ValueError, match="count alone"):
        Mechanism(draw, QuantileClipping(C, count_noise=count_noise), plan_of().mechanism.noise, sigma)


@pytest.mark.parametrize(
    "options",
    [
        {"quantile": 0.0},
        {"rate": 0.0},
        {"start": 0.0},
        {"count_noise": 0.0},
    ],
)
def test_options_out_of_range_are_refused(options):
    """When the recipe is read; the message names the option."""
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is .*; it must be between"):
        PrivacyConfig(
            noise_multiplier=1.0, clip_norm=C, expected_batch_size=64, clipping={"kind": "quantile", **options}
        )


@kills(
    "a unit that is not finite counts as below the threshold",
    "dpllm/mechanism/clipping.py",
    "(norm_U <= self.threshold)",
    "(~(norm_U > self.threshold))",
)
def test_a_unit_that_is_not_finite_counts_as_clipped_and_contributes_nothing():
    """-½, and the factor 0; at the threshold a unit counts as below it."""
    clipping = QuantileClipping(C, start=2.0)
    norms = torch.tensor([0.0, 2.0, 2.1, math.inf, math.nan], dtype=torch.float64)
    assert clipping.statistic(norms).tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert clip_factors(clipping, norms.square()[None])[0, 3:].tolist() == [0, 0]
    torch.testing.assert_close(clipping.factors(norms[:3]), torch.tensor([0.25, 0.25, 0.5 / 2.1], dtype=torch.float64))


@pytest.mark.parametrize("noisy", [1e300, -1e300, 50.0, -3.0])
def test_a_threshold_stays_within_the_bounds_of_a_clip_norm(noisy):
    """Whatever the noise is, no factor overflows."""
    after = QuantileClipping(C, rate=1.0).updated(noisy, 1).threshold
    assert after == pytest.approx(min(max(C * math.exp(-max(min(noisy, 700), -700)), MIN_CLIP_NORM), MAX_CLIP_NORM))


def norms_and_gradients(model):
    """Each unit's gradient by autograd, as one vector, and its norm."""
    rows = rows_of()
    found = []
    for unit in range(rows.units.num_units):
        numbers = np.flatnonzero(np.repeat(np.arange(40), 1 + np.arange(40) % 3) == unit)
        loss = wide_loss(model, rows.collate(rows.fetch(numbers))).sum()
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    gradients = torch.stack(found)
    return gradients, gradients.norm(dim=1)


STEPS = [[0, 1, 2, 7, 11, 23, 30], [5, 8, 12], [], list(range(20)), [3, 39, 14, 22]]
"""Realised sizes that differ from b = 8."""


@kills(
    "the count of a quantile is divided by the realised batch",
    "dpllm/training/step.py",
    ".clamp(-0.5, 0.5).sum()",
    ".clamp(-0.5, 0.5).mean().nan_to_num() * self._plan.expected_batch_size",
)
@kills(
    "a step is clipped to another threshold than it is charged with",
    "dpllm/training/run.py",
    "            self._threshold.give_to(attached.clipper, self.plan)\n",
    "            pass\n",
)
def test_each_step_is_that_of_a_loop_that_clips_to_the_threshold_and_divides_by_it(tmp_path):
    """Users of several rows; the count is divided by b, not by the size of the batch; the threshold moves after it."""
    model, same = network().double(), network().double()  # hooks keep autograd from the weights of the first
    plan = quantile_plan(num_steps=len(STEPS), start=3.0, rate=0.7, quantile=0.6, count_noise=3.0)
    run, optimizer = run_of(tmp_path, plan, model)
    threshold, path, clipped = 3.0, [], 0
    for units in STEPS:
        same.load_state_dict(model.state_dict())
        gradients, norms = norms_and_gradients(same)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        path.append(threshold)
        expected = torch.zeros_like(weights)
        for unit in units:
            expected += gradients[unit] * min(1.0, threshold / float(norms[unit]))
        expected *= C / (threshold * B)
        chosen = run.choose(units)
        run._attached.clipper.clipping = plan.mechanism.clipping.at(99.0)  # the ledger's threshold holds
        done = run.step(chosen, wide_loss)
        optimizer.step()
        optimizer.zero_grad()
        below = sum(float(norms[unit]) <= threshold for unit in units)
        assert done.num_clipped == len(units) - below
        clipped += done.num_clipped
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close((weights - after) / 0.3, expected, rtol=2e-5, atol=1e-12)
        share = 0.5 + (below - len(units) / 2) / B
        threshold *= math.exp(-0.7 * (share - 0.6))
        assert run.ledger.threshold == pytest.approx(threshold, rel=1e-12)
    assert 5 < clipped < sum(map(len, STEPS)) - 5
    run.finish()
    assert read_ledger(tmp_path / LEDGER_FILE).notes.thresholds == pytest.approx(path, rel=1e-12)


@pytest.mark.parametrize("start", [0.5, 3.0])
def test_one_unit_moves_gradients_and_count_by_at_most_one_standard_deviation_over_sigma(start):
    """Both together, measured in their noise: 1/σ when a unit leaves, 2/σ when another takes its place."""
    sigma, count_noise, units = 1.0, 0.6, list(range(0, 40, 4))
    noisy = quantile_plan(sigma, start=start, count_noise=count_noise).mechanism
    plan, model = quantile_plan(num_steps=999, start=start, count_noise=count_noise), network().double()
    run = PrivateRun(plan, rows_of(max_rows=2), Counts(plan))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def released(chosen, other=None):
        """One step's sum of gradients and count, without noise; the loss of the rows of ``other`` is negated."""
        run.ledger.moved = Threshold(start)  # every measurement begins at the same threshold
        run._threshold = run.ledger.moved

        def loss(model, inputs):
            losses = wide_loss(model, inputs)
            if other is None:
                return losses
            own = (inputs["rows"][:, None] == other).all(dim=2).any(dim=1)
            return torch.where(own, -losses, losses)

        run.step(run.choose(chosen), loss)
        total = torch.cat([p.grad.flatten() for p in model.parameters()]) * B
        model.zero_grad()
        count = statistic_of(start, run.ledger.threshold)
        return torch.cat([total / noisy.noise_stddev, total.new_tensor([count / count_noise])])

    whole, moved, replaced = released(units), [], []
    owner = np.repeat(np.arange(40), 1 + np.arange(40) % 3)
    for unit in units:
        moved.append(float((whole - released([u for u in units if u != unit])).norm()))
        rows = torch.stack(rows_of().fetch(np.flatnonzero(owner == unit)))
        replaced.append(float((whole - released(units, other=rows)).norm()))
    run.detach()
    assert max(moved) <= (1 + 1e-6) / sigma and min(moved) >= 0.5 / count_noise * (1 - 1e-6)
    assert max(replaced) <= (2 + 1e-6) / sigma
    assert max(moved) > 0.999 / sigma and max(replaced) > 1.09 / sigma


@kills(
    "the count of a quantile gets no noise",
    "dpllm/training/step.py",
    "        self._noise.add_share_(STATISTIC, total, deviation, processes.rank, processes.size)\n",
    "",
)
def test_the_count_gets_noise_of_its_standard_deviation_once():
    """Empty steps: the movement of the threshold is only noise, N(0, σ_b²); that of the gradients is σ_g C."""
    steps, deviation = 150, B / 20
    plan = quantile_plan(0.7, steps)
    run, model = PrivateRun(plan, rows_of(), Counts(plan)), network()
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    nobody, counts, gradients = np.zeros(40, dtype=bool), [], []
    for unit_ids in run.draws(steps, nobody):
        before = run.ledger.threshold
        run.step(unit_ids, loss_of)
        counts.append(statistic_of(before, run.ledger.threshold))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    run.detach()
    assert scipy.stats.kstest(np.array(counts) / deviation, "norm").pvalue > 1e-8
    assert np.std(counts) == pytest.approx(deviation, rel=6 / (2 * steps) ** 0.5)
    noise = torch.stack(gradients) * B / C
    expected = gradient_noise_multiplier(0.7, deviation)
    assert float(noise.std()) == pytest.approx(expected, rel=6 / (2 * noise.numel()) ** 0.5)
    assert expected > 2 * 0.7  # so that the line before distinguishes it from σ


class Counts(MemoryLedger):
    """One with a threshold that moves."""

    def __init__(self, plan):
        super().__init__()
        self.moved = Threshold(plan.mechanism.first_threshold)

    @property
    def threshold(self):
        return self.moved.value

    def hand_over_threshold(self):
        return self.moved


@pytest.mark.parametrize("strategy", [{}, {"strategy": "geometric", "ratio": 0.9}], ids=["free", "geometric"])
def test_banded_noise_on_the_count_has_the_strategy_of_the_gradients(strategy):
    """Its covariance over steps is σ_b² (MᵀM)⁻¹, as that of every gradient entry, so one event covers both."""
    bands, steps, runs, count_noise = 2, 3, 1500, 2.0
    plan = quantile_plan(0.7, steps, {"kind": "banded", "bands": bands, **strategy}, count_noise=count_noise)
    counts = np.empty((runs, steps))
    for number in range(runs):
        stream = plan.mechanism.noise.stream(NoiseSource(number), steps)
        clipper = _Holder(plan.mechanism.clipping)
        for step in range(steps):
            before = clipper.clipping.threshold
            stream.begin(step)
            StepStatistic(clipper, plan, stream).finish(Processes())
            counts[number, step] = statistic_of(before, clipper.clipping.threshold) / count_noise
    matrix = scipy.linalg.toeplitz([*plan.mechanism.noise.column(steps), 0.0], np.zeros(steps))
    expected = np.linalg.inv(matrix.T @ matrix)
    found = counts.T @ counts / runs
    spread = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / runs)
    assert (np.abs(found - expected) < 6 * spread).all()
    assert abs(expected[0, 1]) > 10 * spread[0, 1]  # unlike independent noise
    assert plan.event.noise_multiplier == 0.7 and plan.mechanism.gradient_noise_multiplier > 0.7


@dataclasses.dataclass
class _Holder:
    """The part of a GhostClipper that a step's statistic uses."""

    clipping: AdaptiveClipping


def test_a_clipper_of_another_quantile_is_refused_and_one_with_another_threshold_is_not(tmp_path):
    """The threshold is the state of a run; the other options are the plan's."""
    mechanism_ = quantile_plan(quantile=0.4, start=2.0).mechanism
    assert mechanism_.allows(mechanism_.clipping.at(0.1))
    assert not mechanism_.allows(QuantileClipping(C, quantile=0.5, start=2.0))
    assert not mechanism_.allows(QuantileClipping(2 * C, quantile=0.4, start=2.0))
    assert not mechanism_.allows(clipping_of(Spec("flat"), C))
    assert not quantile_plan().mechanism.allows(clipping_of(Spec("flat"), C))


def test_a_plan_is_saved_and_read_back_and_its_report_names_both_noises(tmp_path):
    """σ_g, σ_b and σ."""
    plan = quantile_plan(0.7, quantile=0.3, start=2.0)
    plan.save(tmp_path / PLAN_FILE)
    again = PrivacyPlan.load(tmp_path / PLAN_FILE)
    assert again == plan and again.hash == plan.hash
    assert again.mechanism.clipping == QuantileClipping(C, quantile=0.3, start=2.0)
    assert again.event == plan_of(0.7).event and "σ_g C = 0.722957 (σ_g = 1.44591;" in mechanism(again)


def ledger_with(folder, plan, *thresholds):
    """A ledger whose steps carry these thresholds, as a loop of one's own could write it; None: a resume."""
    path = folder / LEDGER_FILE
    ledger = Ledger.create(path, plan)
    for threshold in thresholds:
        if threshold is None:
            ledger.close()
            ledger = Ledger.open(path, plan)
        else:
            ledger.append_step(ledger.num_steps, plan.event, threshold)
    ledger.close()
    return path


@kills(
    "a second run may move the threshold",
    "dpllm/training/shared_ledger.py",
    "        if self._handed_over:\n",
    "        if False:\n",
)
def test_only_the_run_moves_the_threshold_of_its_ledger(tmp_path):
    """A loop's own value may depend on private rows. No public name of the ledger takes one, and no second run does."""
    run, _ = run_of(tmp_path, quantile_plan(0.7), network().double())
    ledger = run.ledger
    assert ledger.threshold == C
    with pytest.raises(AttributeError):
        ledger.threshold = 3.0
    with pytest.raises(LedgerError, match=r"PrivateRun\.resume"):
        ledger.hand_over_threshold()
    with pytest.raises(LedgerError, match="moves the clip"):
        PrivateRun(run.plan, run.rows, ledger)
    run.step(next(run.draws(1)), wide_loss)
    moved = ledger.threshold
    assert moved != C and moved == run._attached.clipper.clipping.threshold
    assert next(run.draws(1)) is not None and read_ledger(ledger.path).notes.thresholds == [C, moved]
    run.detach()


FURTHEST = math.exp(0.2 * (30 / 2 + 10 * 0.4) / B)
"""The factor by which a step can move the threshold: half of B_max units, and ten standard deviations of the noise."""


@kills(
    "verify takes any movement of a threshold",
    "dpllm/report/verify.py",
    "    return (wrong is None, f",
    "    return (True, f",
)
@pytest.mark.parametrize(
    ("thresholds", "found"),
    [
        ([C, C * FURTHEST * 0.999, C, C / FURTHEST * 1.001], "4 steps have one$"),
        ([C, C, C * 1.1], "3 steps have one$"),  # a draw without a step
        ([C, C * 1.1, None, C * 1.1, C], "4 steps have one$"),
        ([C, C * FURTHEST * 1.001], "number 2 is .* something else changed it"),
        ([C, C * 1.1, C / FURTHEST], "number 3 is .* something else changed it"),
        ([C * 1.1, C], "not as the plan says"),
        ([C, C * 1.1, None, C], f"number 3 is {C} after a resume, but the last one charged was {C * 1.1:g}"),
    ],
)
def test_a_threshold_that_no_noisy_count_gives_is_found(thresholds, found, tmp_path):
    """By `dpllm verify`: it may hold private values."""
    plan = quantile_plan(0.7, 9)
    assert plan.max_batch_size == 30 and plan.mechanism.statistic_stddev == 0.4
    ok, words = thresholds_found(plan, read_ledger(ledger_with(tmp_path, plan, *thresholds)))
    assert ok == found.endswith("have one$") and re.search(found, words), words


def test_the_noise_of_a_count_that_is_correlated_over_steps_may_move_it_further(tmp_path):
    """By its largest standard deviation."""
    plan = quantile_plan(0.7, 9, {"kind": "banded", "bands": 2})
    furthest = math.exp(0.2 * (30 / 2 + 10 * 0.4 * plan.mechanism.noise.variance(8, 9) ** 0.5) / B)
    assert furthest > 1.03 * FURTHEST
    for name, factor, sound in (("near", 0.999, True), ("far", 1.001, False)):
        folder = tmp_path / name
        folder.mkdir()
        path = ledger_with(folder, plan, C, C * furthest * factor)
        assert thresholds_found(plan, read_ledger(path))[0] == sound


@pytest.mark.parametrize("start", [0.02, 20.0])
def test_the_threshold_reaches_the_quantile_of_the_norms(start):
    """From far above and from far below, with all the noise of a run of σ = 1."""
    num_units, batch, steps, quantile = 1000, 100, 90, 0.7
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_units, 4, generator=generator) * torch.rand(num_units, 1, generator=generator)
    privacy = PrivacyConfig(
        noise_multiplier=1.0,
        clip_norm=C,
        expected_batch_size=batch,
        clipping={"kind": "quantile", "quantile": quantile, "start": start},
    )
    plan = make_plan(privacy, num_units, steps)
    data = TrainingRows(
        units=UnitIndex.one_row_per_unit(num_units),
        lengths=np.ones(num_units, dtype=np.int64),
        fetch=lambda numbers: [rows[int(number)] for number in numbers],
        collate=lambda rows: {"rows": torch.stack(rows)},
        max_rows=num_units,
    )
    model = nn.Linear(4, 1, bias=False)
    run = PrivateRun(plan, data, Counts(plan))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    path = []
    for unit_ids in run.draws(steps):
        path.append(run.ledger.threshold)
        run.step(unit_ids, lambda model, inputs: model(inputs["rows"]).squeeze(1))
        model.zero_grad()
    run.detach()
    aim = float(rows.norm(dim=1).quantile(quantile))  # the gradient of a row is the row
    print(f"quantile {aim:.3f}; thresholds", *[f"{value:.3f}" for value in [*path[::10], path[-1]]])  # pytest -s
    assert np.log(path[-20:]).mean() == pytest.approx(math.log(aim), abs=0.15)
