"""An audit of the draws: a test for membership, from the tokens alone, shows no more than ε allows.

The worst case of a toy with few tokens: the canary's logits are extreme, and the other units' are flat.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpllm.audit.bounds import claimed_epsilon, trial_bounds
from dpllm.methods.predict.sampler import Scoring, draw_index
from dpllm.methods.predict.token_draw import TokenDraw

TOKENS, DELTA, RUNS, V = 10, 1e-3, 2000, 4


class Unclipped(Scoring):
    """Planted: contributions are on the grid, and not clipped."""

    def contributions(self, logits_RV, public_V, rows_of_unit_R):
        """Return what a row adds, without a bound."""
        return super().contributions(logits_RV, public_V, rows_of_unit_R) * 5


def bounds(scoring):
    """Return ε of the plan, and the lower bounds from runs with and without the canary."""
    public_V, one = torch.zeros(V), torch.ones(1, dtype=torch.long)
    canary_V = torch.full((1, V), -50.0)
    canary_V[0, 0] = 50.0
    canary_V = scoring.contributions(canary_V, public_V, one)[0]
    logs = {held: scoring.log_weights(canary_V * held, public_V).numpy() for held in (0, 1)}
    coins = np.random.default_rng(0).integers(0, 2, RUNS)
    scores = np.array([sum(draw_index(logs[coin]) == 0 for _ in range(TOKENS)) for coin in coins], dtype=np.float64)
    history = [(TokenDraw(noise_multiplier=scoring.noise_multiplier), TOKENS)]
    return claimed_epsilon(history, DELTA), trial_bounds(scores, coins.astype(bool), DELTA, history=history)


@pytest.mark.deep
@pytest.mark.parametrize("around_public", [True, False])
def test_tokens_show_no_more_than_the_accounting_allows_and_without_clipping_refute_it(around_public):
    """The bound is well above 0, so it can fail, and below ε; the same test, on a planted bug."""
    options = {"clip": 1.0, "units": 2, "temperature": 1.0, "around_public": around_public}
    claim, found = bounds(Scoring(**options))
    assert not any(bound.refutes for bound in found)
    assert 0.15 * claim < max(bound.epsilon for bound in found) <= claim
    claim, found = bounds(Unclipped(**options))
    assert any(bound.refutes for bound in found) and max(bound.epsilon for bound in found) > claim
