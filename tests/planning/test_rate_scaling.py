"""Tests of dpllm.planning.rehearsal: the factor against the exact best rates of noisy quadratic models."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpllm.mechanism.averages import average_of
from dpllm.mechanism.banded import BandedNoise
from dpllm.mechanism.noise import IndependentNoise
from dpllm.planning.rehearsal import rate_factor
from dpllm.training.workload import UpdateRule

STEPS, FEWER = 160, 48
NOISES = {"independent": IndependentNoise(), "banded": BandedNoise(bands=16, strategy="geometric", ratio=0.988)}


def schedule(steps: int) -> np.ndarray:
    """A constant rate after a warm-up of a tenth."""
    return np.minimum(1.0, np.arange(steps) / math.ceil(0.1 * steps))


def decay(steps: int) -> float:
    """The average has the same share of the steps."""
    return 1 - 0.05 * STEPS / steps


def rule(steps: int, divides: bool = True, averaged: bool = True) -> UpdateRule:
    average = average_of({"kind": "ema", "decay": decay(steps)}) if averaged else None
    return UpdateRule(tuple(schedule(steps).tolist()), 0.9, divides, divides, average)


def inverse(noise: str, steps: int) -> np.ndarray:
    """M⁻¹ as a dense matrix: row t is the noise of step t in terms of independent noise."""
    if noise == "independent":
        return np.eye(steps)
    column = np.where(np.arange(steps) < 16, 0.988 ** np.arange(steps), 0.0)
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    return np.linalg.inv(np.where(lags >= 0, column[lags] / np.linalg.norm(column), 0.0))


@np.errstate(over="ignore", invalid="ignore")
def best_rate(noise: str, steps: int, curvature: np.ndarray, start: np.ndarray, sigma: float) -> tuple[float, float]:
    """Return the best rate of Adam on a quadratic and the share of the loss that it leaves, by exact expectations.

    The noise feels the curvature here. Adam divides by the root of the running mean of the squared noise (β₂ = 0.999).
    """
    rates = np.geomspace(1e-3, 3.0, 21)[:, None]  # (R, 1); the largest diverge
    made = inverse(noise, steps)
    second = np.zeros(steps)
    for step, variance in enumerate((made**2).sum(1) * sigma**2):
        second[step] = 0.999 * (second[step - 1] if step else 0.0) + 0.001 * variance
    size = np.sqrt(second / (1 - 0.999 ** np.arange(1, steps + 1)))
    taken = schedule(steps) / size / (1 - 0.9 ** np.arange(1, steps + 1))
    share = decay(steps) ** np.arange(steps)[::-1]
    share /= share.sum()

    weights, moment = np.ones((len(rates), len(curvature))), 0.0
    released = np.zeros_like(weights)
    for step in range(steps):  # of the distance to the optimum
        moment = 0.9 * moment + 0.1 * curvature * weights
        weights = weights - rates * taken[step] * moment
        released += share[step] * weights
    to_weights = np.zeros_like(weights)
    to_moment = np.zeros_like(weights)
    response = np.zeros((steps, *weights.shape))
    for step in reversed(range(steps)):  # of the noise, by the adjoint recursion
        to_weights = to_weights + share[step]
        to_moment = to_moment - rates * taken[step] * to_weights
        response[step] = 0.1 * to_moment
        to_weights = to_weights + 0.1 * curvature * to_moment
        to_moment = 0.9 * to_moment
    spread = np.einsum("ts,trd->srd", made, response)
    losses = 0.5 * (curvature * (released**2 * start**2 + sigma**2 * (spread**2).sum(0))).sum(1)
    losses = np.where(np.isfinite(losses), losses, np.inf)
    at = int(losses.argmin())
    assert 0 < at < len(rates) - 1, "the best rate is inside the range"
    around = np.polyfit(np.log(rates[at - 1 : at + 2, 0]), losses[at - 1 : at + 2], 2)
    return math.exp(-around[1] / around[0] / 2), losses[at] / (0.5 * (curvature * start**2).sum())


@pytest.mark.parametrize("noise", ["banded", "independent"])
def test_the_factor_is_near_that_of_the_best_rates_of_noisy_quadratics(noise):
    """Within a half for each spectrum, and within 15 % on average; the rule for weights that hardly move is not."""
    found = []
    for power in (0.5, 1.0, 1.5, 2.0):
        curvature = np.arange(1.0, 41.0) ** -power
        start = np.full(40, 1 / math.sqrt(curvature.sum()))
        for sigma in (0.1, 0.3, 1.0):
            best, left = best_rate(noise, STEPS, curvature, start, sigma)
            if 0.01 < left < 0.4:  # training improves the model, and noise limits it
                found.append(best_rate(noise, FEWER, curvature, start, sigma)[0] / best)
    runs = rule(STEPS), rule(FEWER)
    factor = rate_factor(NOISES[noise], *runs)
    assert len(found) >= 8 and all(1 / 1.5 < ratio / factor < 1.5 for ratio in found)
    mean = math.exp(np.log(found).mean())
    assert 1 / 1.15 < mean / factor < 1.15
    whole, shorter = (item.workload() for item in runs)
    followed = sum(shorter.response) / sum(whole.response)
    less_noise = NOISES[noise].error(whole) / NOISES[noise].error(shorter)
    assert followed * less_noise * factor < mean / 1.5  # A S / N²


def test_the_factor_counts_the_size_of_a_step_only_for_optimizers_that_divide_by_it():
    """By dense matrices: SGD's rate follows the noise of the released weights, Adam's also that of a step."""
    released, step = {}, {}
    for steps in (STEPS, FEWER):
        made, rates = inverse("banded", steps), schedule(steps)
        moment = np.tril(0.1 * 0.9 ** np.abs(np.subtract.outer(np.arange(steps), np.arange(steps))))
        updates = rates @ moment  # of the last weights
        released[steps], step[steps] = np.linalg.norm(updates @ made), math.sqrt((made**2).sum() / steps)
    noise = NOISES["banded"]
    sgd = rate_factor(noise, rule(STEPS, False, False), rule(FEWER, False, False))
    assert sgd == pytest.approx(released[STEPS] / released[FEWER], rel=1e-6)
    adam = [UpdateRule(r.rates, 0.9, False, True, None) for r in (rule(STEPS), rule(FEWER))]
    assert rate_factor(noise, *adam) == pytest.approx(sgd * step[FEWER] / step[STEPS], rel=1e-6)
    assert step[FEWER] / step[STEPS] < 0.85  # the noise of earlier cycles is not yet in a step
