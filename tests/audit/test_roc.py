"""Figures of an attack: the textbook's values, and intervals that cover."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.bounds import AuditError
from dpllm.audit.result import auroc, roc_curve, tpr_at


def test_the_area_is_the_share_of_pairs_in_order():
    """AUROC equals the count over all pairs, ties half, and the area under the curve's own points."""
    rng = np.random.default_rng(0)
    scores, coins = rng.integers(0, 12, 300).astype(float), rng.random(300) < 0.4
    pairs = np.sign(scores[coins][:, None] - scores[~coins][None, :])
    value = auroc(scores, coins).value
    assert value == pytest.approx((pairs + 1).mean() / 2)
    fpr, tpr = roc_curve(scores, coins)
    assert value == pytest.approx(np.trapezoid(tpr, fpr))
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)


def test_intervals_cover_the_truth():
    """Of 200 samples at least 180 intervals contain the true area and the true rate."""
    rng, area, inside = np.random.default_rng(1), stats.norm.cdf(1 / np.sqrt(2)), [0, 0]
    for _ in range(200):
        coins = rng.random(400) < 0.5
        scores = rng.standard_normal(400) + coins
        found = auroc(scores, coins)
        inside[0] += found.low <= area <= found.high
        rate = tpr_at(scores, coins, 0.5)
        inside[1] += rate.low <= stats.norm.cdf(1.0) <= rate.high
    assert 180 <= inside[0] <= 200 and 170 <= inside[1] <= 200


def test_a_perfect_attack_on_few_is_not_certain():
    """With three members and three others an area of 1 (or 0) leaves room."""
    scores, coins = np.arange(6.0), np.arange(6) >= 3
    assert auroc(scores, coins).high == 1.0 and auroc(scores, coins).low == pytest.approx(0.05 ** (1 / 3))
    assert auroc(-scores, coins).value == 0.0 and auroc(-scores, coins).high == pytest.approx(1 - 0.05 ** (1 / 3))


def test_true_positive_rates_never_accuse_more_than_allowed():
    """The threshold is the score of one of the others, which are not accused themselves."""
    scores, coins = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 3.0]), np.array([True, False, True, False, False, True])
    assert tpr_at(scores, coins, 0.0).value == pytest.approx(1 / 3)
    assert tpr_at(scores, coins, 1 / 3).value == 1.0
    assert tpr_at(scores, coins, 1.0).value == 1.0


def test_one_kind_alone_is_refused():
    """Without both kinds nothing can be judged; a rate must be between 0 and 1."""
    with pytest.raises(AuditError, match="3 members"):
        auroc(np.arange(3.0), np.ones(3, dtype=bool))
    with pytest.raises(AuditError, match="between 0"):
        tpr_at(np.arange(3.0), np.arange(3) > 1, 2)


@pytest.mark.parametrize(("num", "mu"), [(100, 0.0), (100, 3.0), (40, 2.0), (1000, 4.0)])
def test_the_interval_of_the_area_misses_seldom(num, mu):
    """Where the area is near 1 as well: of 400 intervals at 95 % about 20 miss, on the plain scale up to 65."""
    area = stats.norm.cdf(mu / np.sqrt(2))
    rng = np.random.default_rng(11)
    missed = 0
    for _ in range(400):
        coins = np.arange(num) % 2 == 0
        found = auroc(rng.standard_normal(num) + mu * coins, coins)
        assert 0 <= found.low <= found.value <= found.high <= 1
        missed += not found.low <= area <= found.high
    assert missed <= 36
