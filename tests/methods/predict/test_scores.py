"""Tests of dpllm.methods.predict.sampler: one unit moves no score by more than c/s, whatever its logits are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpllm.methods.predict.sampler import MOST, STEPS, Scoring
from tests.mutations import kills

V = 40
EXTREME = [float("inf"), float("-inf"), float("nan"), 1e30, -1e30, 0.0, 3.7]


def scorings():
    """Both kinds, with and without a set of tokens."""
    return [
        Scoring(clip=0.6, units=8, temperature=1.1, around_public=True, top_k=7),
        Scoring(clip=0.6, units=8, temperature=0.3, around_public=True),
        Scoring(clip=10.0, units=50, temperature=2.0),
        Scoring(clip=10.0, units=50, temperature=2.0, top_k=7),
    ]


def some_logits(rows, seed):
    """Return rows of which some have extreme entries."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = 30 * torch.randn(rows, V, generator=generator)
    for number, value in enumerate(EXTREME):
        logits_RV[number % rows, (3 * number) % V] = value
    logits_RV[rows - 1] = 1e6 * torch.randn(V, generator=generator)
    return logits_RV


@kills(
    "the scores of a private prediction are not clipped",
    "dpllm/methods/predict/sampler.py",
    ".round().clamp(-MOST, MOST).long()",
    ".clamp(-1e15, 1e15).round().long()",
)
@kills(
    "each record of a user adds to the scores as much as a whole user may",
    "dpllm/methods/predict/sampler.py",
    'torch.div(steps_RV, rows_of_unit_R[:, None], rounding_mode="trunc")',
    "steps_RV",
)
@pytest.mark.parametrize("scoring", scorings())
@pytest.mark.parametrize("rows_of_unit", [1, 3])
def test_a_unit_is_bounded_and_moves_the_average_by_no_more(scoring, rows_of_unit):
    """Neighbours: the sum with and without the unit, by exact whole numbers; and the log-weights that follow."""
    public_V = 5 * torch.randn(V)
    counts_R = torch.full((rows_of_unit,), rows_of_unit)
    others_V = scoring.contributions(some_logits(7, 1), public_V, torch.ones(7, dtype=torch.long)).sum(dim=0)
    for seed in range(20):
        unit_V = scoring.contributions(some_logits(rows_of_unit, seed), public_V, counts_R).sum(dim=0)
        assert unit_V.dtype == torch.int64 and int(unit_V.abs().max()) <= MOST < STEPS
        without = scoring.log_weights(others_V, public_V).numpy()
        with_unit = scoring.log_weights(others_V + unit_V, public_V).numpy()
        drawn = without > -np.inf
        assert (drawn == (with_unit > -np.inf)).all()  # the set of tokens is public
        normalised = [logs[drawn] - np.log(np.exp(logs[drawn]).sum()) for logs in (without, with_unit)]
        moved = normalised[1] - normalised[0]
        assert moved.max() - moved.min() <= 2 / scoring.noise_multiplier


def test_a_unit_reaches_its_bound():
    """So the test above can fail: an extreme unit moves a score by almost c/s."""
    scoring = Scoring(clip=10.0, units=50, temperature=2.0)
    row = torch.full((1, V), -1e9)
    row[0, 3] = 1e9
    unit_V = scoring.contributions(row, torch.zeros(V), torch.ones(1, dtype=torch.long))[0]
    assert int(unit_V[3]) == MOST and int(unit_V[0]) == -MOST


def test_private_logits_are_shifted_and_clipped_as_in_the_paper():
    """clip(z - max z + c) to [-c, c], averaged over the public s, divided by τ (arXiv:2407.12108)."""
    scoring = Scoring(clip=10.0, units=4, temperature=2.0)
    logits_RV = 8 * torch.randn(4, V, dtype=torch.float64)
    mean_V = (logits_RV - logits_RV.amax(1, keepdim=True) + 10).clamp(-10, 10).sum(0) / 4 / 2
    sums_V = scoring.contributions(logits_RV, torch.zeros(V), torch.ones(4, dtype=torch.long)).sum(0)
    found_V = scoring.log_weights(sums_V, torch.zeros(V))
    assert torch.allclose(found_V, mean_V - mean_V.amax(), atol=1e-3)


def test_differences_to_the_public_logits_are_clipped():
    """φ_pub + (1/s) Σ clip(φ_i - φ_pub), over the tokens within 2c/s of the k-th public one (arXiv:2507.02974)."""
    scoring = Scoring(clip=0.6, units=4, temperature=1.5, around_public=True, top_k=5)
    logits_RV, public_V = 3 * torch.randn(4, V, dtype=torch.float64), 3 * torch.randn(V, dtype=torch.float64)
    mean_V = (public_V + (logits_RV - public_V).clamp(-0.6, 0.6).sum(0) / 4) / 1.5
    kept_V = public_V >= public_V.sort(descending=True).values[4] - 2 * 0.6 / 4
    sums_V = scoring.contributions(logits_RV, public_V, torch.ones(4, dtype=torch.long)).sum(0)
    found_V = scoring.log_weights(sums_V, public_V)
    assert (found_V[~kept_V] == -torch.inf).all() and 5 <= int(kept_V.sum()) < V
    assert torch.allclose(found_V[kept_V], (mean_V - mean_V[kept_V].amax())[kept_V], atol=1e-4)


def test_few_units_count_as_the_public_size():
    """The sum is divided by s, and not by the number of rows that are there."""
    scoring = Scoring(clip=10.0, units=100, temperature=1.0)
    row_RV = torch.full((1, V), -100.0)
    row_RV[0, 0] = 0.0
    sums_V = scoring.contributions(row_RV, torch.zeros(V), torch.ones(1, dtype=torch.long))[0]
    logs_V = scoring.log_weights(sums_V, torch.zeros(V))
    assert float(logs_V[1]) == pytest.approx(-20 / 100, rel=1e-3)
