"""Membership inference: the results of attacks, beside the bound for any attack."""

import numpy as np
import pytest

from dpllm.audit.bounds import AuditError
from dpllm.audit.result import highest_fpr
from dpllm.audit.scores import (
    TokenScores,
    bounds_of,
    check_exchangeable,
    judge_attack,
    membership_rows,
    membership_scores,
)
from dpllm.mechanism.events import Step
from dpllm.privacy.risk import attack_risk

HISTORY = [(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)]


def tokens(rng, num_records, shift=0.0):
    """Records of 5 to 20 tokens; log-probabilities `shift` higher than their distribution's mean."""
    lengths = rng.integers(5, 20, size=num_records)
    means = tuple(-3 + rng.normal(size=length) for length in lengths)
    log_probs = tuple(mean + shift + rng.normal(size=len(mean)) for mean in means)
    return TokenScores(log_probs, means, tuple(np.ones(length) for length in lengths))


def both(members, others):
    return TokenScores(
        *((*getattr(members, name), *getattr(others, name)) for name in ("log_probs", "means", "stddevs"))
    )


def test_every_attack_finds_members_whose_tokens_became_likelier():
    """And none finds any where nothing was learnt."""
    rng = np.random.default_rng(0)
    included = np.arange(400) < 200
    texts = [f"text number {number}" for number in range(400)]
    for shift, low, high in ((1.0, 0.8, 1.0), (0.0, 0.42, 0.58)):
        tuned = both(tokens(rng, 200, shift), tokens(rng, 200))
        reference = TokenScores(tuned.means, tuned.means, tuned.stddevs)
        scores = membership_scores(tuned, texts, reference)
        assert list(scores) == ["loss", "zlib", "Min-K%", "Min-K%++", "reference ratio"]
        for name, values in scores.items():
            assert low <= judge_attack(name, values, included).auroc.value <= high, name
    assert "reference ratio" not in membership_scores(tuned, texts)


def test_the_bounds_are_those_of_the_ledger():
    """The bound from the run's history is printed beside the result of each attack."""
    limits = {rate: highest_fpr(2000, rate) for rate in (0.01, 0.001)}
    bounds = bounds_of(HISTORY, 2000)
    found = attack_risk(HISTORY, "zero-out", tuple(limits.values()), (0.5,)).true_positive_rate
    assert bounds == {rate: found[limit] for rate, limit in limits.items()}
    assert list(bounds_of(HISTORY, 500)) == [0.01]
    included = np.arange(40) < 20
    results = [judge_attack("loss", np.arange(40.0), included)]
    _, rows = membership_rows(results, bounds)
    assert rows[0][0] == "loss" and rows[0][1].startswith("0.000")
    assert all(0 <= float(shown) - bounds[rate] < 1e-3 for shown, rate in zip(rows[1][2:], (0.01, 0.001), strict=True))
    assert 0.096 < bounds[0.01] < 0.14 and 0.02 < bounds[0.001] < 0.06
    assert len(membership_rows(results, None)[1]) == 1


def test_a_rate_that_so_few_records_can_not_show_is_not_shown():
    """A threshold that none of 120 exceeds may accuse 2 % of others: that is no figure for 0.1 %."""
    scores, included = np.arange(240.0), np.arange(240) >= 120
    result = judge_attack("loss", scores, included)
    assert list(result.true_positive_rate) == [0.01] and result.true_positive_rate[0.01].value == 1
    assert membership_rows([result], None)[1][0][3] == "too few records"


def test_records_that_differ_before_any_training_are_refused():
    """Separating easy texts from hard ones is not membership inference."""
    rng = np.random.default_rng(0)
    included = np.arange(400) < 200
    found = check_exchangeable(both(tokens(rng, 200), tokens(rng, 200)), included)
    assert found.low < 0.5 < found.high
    for shift in (0.5, -0.5):
        with pytest.raises(AuditError, match=r"data\.eval\)"):
            check_exchangeable(both(tokens(rng, 200, shift), tokens(rng, 200)), included)


def test_a_score_that_is_no_number_is_refused():
    """A model whose loss was NaN cannot be attacked, and does not pass for private."""
    with pytest.raises(AuditError, match="1 records"):
        judge_attack("loss", np.array([1.0, np.nan]), np.array([True, False]))


def test_the_scores_of_single_records_are_not_written_out():
    """They are properties of private records."""
    found = judge_attack("loss", np.arange(40.0), np.arange(40) < 20).to_dict()
    assert set(found) == {"attack", "auroc", "true_positive_rate"} and found["true_positive_rate"] == {}
