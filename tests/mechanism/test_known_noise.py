"""The noise that an optimizer is told of is that of the run's gradients, and of their first moment."""

import numpy as np
import pytest

from dpllm import PrivacyConfig
from dpllm.mechanism.strategies import KnownNoise
from dpllm.privacy.plan import make_plan

STEPS = 24
BANDED = {"kind": "banded", "bands": 4}


def plan_of(**changes):
    """A plan of 400 units, 20 in a step."""
    settings = {"noise_multiplier": 1.3, "clip_norm": 0.4, "expected_batch_size": 20}
    return make_plan(PrivacyConfig(**settings | changes), 400, STEPS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"noise": BANDED},
        {"noise": BANDED | {"strategy": "free"}},
        {"noise": "blt"},
        {"randomness": "discrete"},
        {"clipping": "per-layer"},
        {"clipping": "quantile"},
        {"noise": BANDED, "clipping": "quantile"},
    ],
    ids=str,
)
def test_the_variances_are_those_that_the_guard_expects_of_each_step(changes):
    """σC/b of the plan, for clippings that adapt the larger σ_g, and the noise's own variance of each step."""
    plan = plan_of(**changes)
    found = KnownNoise.of(plan.mechanism, STEPS).variances()
    want = [plan.mechanism.noise.variance(step, STEPS) * (plan.noise_stddev / 20) ** 2 for step in range(STEPS)]
    np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_noise_of_the_first_moment_is_that_of_dense_matrices(decay):
    """diag(A M⁻¹ M⁻ᵀ Aᵀ) for the averages A and the matrix M of the noise; ρ is the ratio of root mean squares."""
    plan = plan_of(noise=BANDED)
    column = plan.mechanism.noise.column(STEPS)
    apart = np.subtract.outer(np.arange(STEPS), np.arange(STEPS))
    padded = np.array([*column, *[0.0] * STEPS])
    matrix = np.where(apart >= 0, padded[np.abs(apart)], 0.0)
    averages = np.where(apart >= 0, (1 - decay) * decay ** np.abs(apart), 0.0)
    response = np.linalg.inv(matrix) * plan.noise_stddev / 20
    noise = KnownNoise.of(plan.mechanism, STEPS)
    of_gradient, of_moment = (((a @ response) ** 2).sum(axis=1) for a in (np.eye(STEPS), averages))
    np.testing.assert_allclose(noise.variances(), of_gradient, rtol=1e-9)
    np.testing.assert_allclose(noise.averaged(decay).variances(), of_moment, rtol=1e-9)
    np.testing.assert_allclose(noise.averaged_share(decay), np.sqrt(of_moment.mean() / of_gradient.mean()), rtol=1e-9)


def test_correlated_noise_leaves_less_in_the_first_moment():
    """The share of the E2E plan of benchmarks/results.md, 16 bands of ratio .988 over 160 steps: .0720."""
    plan = make_plan(
        PrivacyConfig(
            noise_multiplier=1.0417,
            clip_norm=0.1,
            expected_batch_size=128,
            noise={"kind": "banded", "bands": 16, "ratio": 0.988, "strategy": "geometric"},
        ),
        5000,
        160,
    )
    assert KnownNoise.of(plan.mechanism, 160).averaged_share(0.9) == pytest.approx(0.07201, abs=1e-5)


def test_without_noise_the_variances_are_0():
    """A run without privacy; the share is that of the noise it would have."""
    noise = KnownNoise.of(plan_of(noise_multiplier=0).mechanism, STEPS)
    assert noise.stddev == 0 and not noise.variances().any()
    assert noise.averaged_share(0.9) == KnownNoise.of(plan_of().mechanism, STEPS).averaged_share(0.9)
