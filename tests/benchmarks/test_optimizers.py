"""benchmarks/optimizers.py: the experiments compute their formulas, with the noise of the run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpllm import PrivacyConfig
from dpllm.privacy.plan import make_plan
from tests.benchmarks.material import program

optimizers = program("optimizers")
STEPS, SLOW, SLOWER = 5, 0.8, 0.95


def plan(noise, steps: int):
    """A plan of 400 units, 20 in a step."""
    return make_plan(
        PrivacyConfig(noise_multiplier=1.3, clip_norm=0.4, expected_batch_size=20, noise=noise), 400, steps
    )


def trained(make, starts, gradients):
    """The parameters after each of the gradients."""
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    optimizer = make(parameters)
    for step in range(STEPS):
        for parameter, of_steps in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(of_steps[step])
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters], optimizer


@pytest.fixture
def problem():
    """A matrix and a vector, and gradients whose signal exceeds the noise in some rows only."""
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=shape) for shape in ((3, 4), (5,))]
    gradients = [rng.normal(size=(STEPS, *start.shape)) for start in starts]
    gradients[0] *= np.array([0.3, 1.0, 5.0])[:, None]
    return starts, gradients


def averages(values, decay):
    """Exponential averages that begin at 0, as explicit sums."""
    return [sum((1 - decay) * decay ** (t - s) * values[s] for s in range(t + 1)) for t in range(STEPS)]


@pytest.mark.parametrize(
    "of, by_row, floor", [("gradient", False, 0.1), ("gradient", True, 0.5), ("momentum", True, 1)]
)
def test_the_noise_is_subtracted_from_the_second_moment(problem, of, by_row, floor):
    """Updates equal the formula, computed from sums over all steps; some second moments are at the floor, not all."""
    starts, gradients = problem
    noise = optimizers.KnownNoise((1.0, -0.6, 0.2, 0.0, 0.1))
    found, optimizer = trained(
        lambda parameters: optimizers.NoiseCorrectedAdam(parameters, 0.1, noise, (SLOW, SLOWER), of, by_row, floor),
        starts,
        gradients,
    )
    correlating = np.array([[noise.response[t - s] if t >= s else 0.0 for s in range(STEPS)] for t in range(STEPS)])
    momentum = np.array([[(1 - SLOW) * SLOW ** (t - s) if t >= s else 0.0 for s in range(STEPS)] for t in range(STEPS)])
    seen_noise = correlating if of == "gradient" else momentum @ correlating
    variances = averages((seen_noise**2).sum(axis=1), SLOWER)
    low = 0
    for start, given, end in zip(starts, gradients, found, strict=True):
        first = averages(given, SLOW)
        second = averages(np.square(given if of == "gradient" else first), SLOWER)
        at = start.copy()
        for t in range(STEPS):
            scale = 1 - SLOWER ** (t + 1)
            moment = second[t]
            if by_row:
                moment = moment.mean(axis=-1, keepdims=True)
            excess = (moment - variances[t]) / scale
            least = floor * variances[t] / scale
            step = first[t] / (1 - SLOW ** (t + 1)) if of == "gradient" else first[t]
            at = at - 0.1 * step / np.sqrt(np.maximum(excess, least))
        low += int((excess <= least).sum())
        np.testing.assert_allclose(end, at, rtol=1e-12)
    entries = 3 + 1 if by_row else 12 + 5
    assert 0 < low < entries and optimizer.at_floor == pytest.approx(low / entries)


def test_a_step_more_than_the_noise_is_known_for_is_refused(problem):
    """Its variance would be a guess."""
    with pytest.raises(ValueError, match="2 steps"):
        trained(lambda given: optimizers.NoiseCorrectedAdam(given, 0.1, optimizers.KnownNoise((1.0, 0.0))), *problem)


@pytest.mark.parametrize("noise", ["independent", {"kind": "banded", "bands": 4}])
def test_the_known_noise_is_that_of_the_plan(noise):
    """Its variances are those that the guard of a run expects; with bands they differ between steps."""
    run = plan(noise, 40)
    known = optimizers.KnownNoise.of(run)
    unit = (run.noise_stddev / 20) ** 2
    expected = [run.mechanism.noise.variance(step, 40) * unit for step in range(40)]
    np.testing.assert_allclose(known.variances(), expected, rtol=1e-12)
    assert (expected[5] > 1.1 * expected[0]) == (noise != "independent")


def test_the_noise_of_a_first_moment_is_smaller_where_steps_cancel():
    """Noise that takes back the step before is nearly gone in the first moment; independent noise is not."""
    cancelling = optimizers.KnownNoise((1.0, -1.0) + (0.0,) * 98).averaged(0.9).variances()[-1]
    independent = optimizers.KnownNoise((1.0,) + (0.0,) * 99).averaged(0.9).variances()[-1]
    assert independent == pytest.approx(0.1**2 / (1 - 0.9**2), rel=1e-6)
    assert cancelling == pytest.approx(0.1**2 * (1 + 0.1**2 / (1 - 0.9**2)), rel=1e-6)


@pytest.mark.parametrize("kappa", [0.7, 1.0])
def test_disk_filters_gradients_taken_ahead(kappa):
    """On a quadratic, whose gradient depends on the point, it equals the formula; with κ = 1 it is Adam."""
    start, curvature = np.array([1.0, -2.0]), np.array([3.0, 0.5])
    parameter = torch.nn.Parameter(torch.tensor(start))
    optimizer = optimizers.DiSK([parameter], 0.1, STEPS, kappa, (SLOW, SLOWER))
    for _ in range(STEPS):
        parameter.grad = torch.tensor(curvature) * parameter.detach()
        optimizer.step()
    at, before, ahead = start.copy(), start.copy(), (1 - kappa) / kappa
    given, filtered = [], []
    for t in range(STEPS):
        given.append(curvature * (at + ahead * (at - before)))
        filtered.append(sum(kappa * (1 - kappa) ** (t - s) * given[s] for s in range(t + 1)))
        first = sum((1 - SLOW) * SLOW ** (t - s) * filtered[s] for s in range(t + 1)) / (1 - SLOW ** (t + 1))
        second = sum((1 - SLOWER) * SLOWER ** (t - s) * filtered[s] ** 2 for s in range(t + 1)) / (
            1 - SLOWER ** (t + 1)
        )
        at, before = at - 0.1 * first / (np.sqrt(second) + 1e-8), at
    np.testing.assert_allclose(parameter.detach().numpy(), at, rtol=1e-12)
    if kappa == 1:
        other = torch.nn.Parameter(torch.tensor(start))
        adam = torch.optim.Adam([other], lr=0.1, betas=(SLOW, SLOWER))
        for _ in range(STEPS):
            other.grad = torch.tensor(curvature) * other.detach()
            adam.step()
        np.testing.assert_allclose(parameter.detach().numpy(), other.detach().numpy(), rtol=1e-12)


def test_every_experiment_has_an_arm():
    """The names of utility.py's arms are those of the experiments, and another name is refused."""
    arms = program("utility").ARMS
    assert [arm.optimizer for arm in arms.values() if arm.optimizer] == list(optimizers.EXPERIMENTS)
    parameter = torch.nn.Parameter(torch.zeros(2))
    for name in optimizers.EXPERIMENTS:
        assert optimizers.experiment(name, [parameter], 0.1, plan("independent", 3)).param_groups[0]["lr"] == 0.1
    with pytest.raises(ValueError, match="experiment"):
        optimizers.experiment("Adam", [parameter], 0.1, plan("independent", 3))
