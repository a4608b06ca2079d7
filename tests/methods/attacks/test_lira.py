"""LiRA: likelihood ratios from shadow models."""

import datasets
import numpy as np
import pytest
import torch
from scipy import stats

from dpllm.audit.bounds import AuditError
from dpllm.audit.result import auroc
from dpllm.audit.scores import TokenScores
from dpllm.config import ConfigError, ModelConfig
from dpllm.data.rows import RowCollator
from dpllm.methods.attacks.lira import (
    OWN_VARIANCE,
    ShadowTraining,
    confidences,
    copies_of,
    draw_halves,
    lira_score,
    shadow_confidences,
)


def simulated(num_shadows, num_records=400, seed=0):
    """Records of different difficulty, confidences of IN models one above those of OUT models."""
    rng = np.random.default_rng(seed)
    hard_R = 5 * rng.normal(size=num_records)
    included_KR = draw_halves(num_shadows, num_records, rng)
    member_R = rng.random(num_records) < 0.5
    shadows_KR = hard_R + 1.5 * included_KR + rng.normal(size=included_KR.shape)
    return hard_R + 1.5 * member_R + rng.normal(size=num_records), shadows_KR, included_KR, member_R


@pytest.mark.parametrize(("num_shadows", "least"), [(2, 0.6), (16, 0.8), (OWN_VARIANCE, 0.8)])
def test_the_ratio_finds_what_the_confidence_alone_hides(num_shadows, least):
    """Records differ more than membership does; shadows take that out, the better the more there are."""
    target_R, shadows_KR, included_KR, member_R = simulated(num_shadows)
    alone = auroc(target_R, member_R).value
    found = auroc(lira_score(target_R, shadows_KR, included_KR), member_R).value
    assert alone < 0.62 < found + 0.02 and found > least
    if num_shadows > 2:  # known exactly: two Gaussians 1.5 standard deviations apart
        assert found == pytest.approx(stats.norm.cdf(1.5 / np.sqrt(2)), abs=0.06)


def test_offline_needs_models_that_saw_nothing_alone():
    """Without IN models the score is how far the target is above the OUT models."""
    target_R, shadows_KR, included_KR, member_R = simulated(16)
    out_KR = shadows_KR - 1.5 * included_KR
    found = auroc(lira_score(target_R, out_KR, np.zeros_like(included_KR)), member_R).value
    assert found > 0.8


def test_scores_are_those_of_scipy():
    """With variances of its own each record has the ratio of two fitted Gaussians."""
    target_R, shadows_KR, included_KR, _ = simulated(OWN_VARIANCE, num_records=5)
    found = lira_score(target_R, shadows_KR, included_KR)
    for number in range(5):
        inside, outside = (shadows_KR[mask, number] for mask in (included_KR[:, number], ~included_KR[:, number]))
        ratio = [stats.norm.logpdf(target_R[number], v.mean(), v.std(ddof=1)) for v in (inside, outside)]
        assert found[number] == pytest.approx(ratio[0] - ratio[1])


@pytest.mark.parametrize("num_shadows", [2, 5, 16])
def test_every_record_is_in_half_of_the_shadows(num_shadows):
    """So that both Gaussians are known; which half differs from record to record."""
    included_KR = draw_halves(num_shadows, 300, np.random.default_rng(0))
    counts = included_KR.sum(0)
    assert set(counts) == {num_shadows // 2, (num_shadows + 1) // 2}
    assert included_KR.mean(1).min() > 0.35 and included_KR.mean(1).max() < 0.65


def test_confidences_of_certainty_are_finite():
    """A record of probability 1 is the most confident, not infinitely so."""
    tokens = TokenScores((np.zeros(2), np.array([-0.1]), np.array([-50.0])), (), ())
    found = confidences(tokens)
    assert np.isfinite(found).all() and found[0] > found[1] > found[2]


def test_shadows_are_more_confident_of_what_they_saw(tiny_llama):
    """Trained adapters memorise their half; the model they start from stays as it was."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, 61, size=(24, 12)).tolist()
    numbers = [number // 2 for number in range(24)]  # two rows of each record
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids, "record": numbers})
    included_KR = draw_halves(2, 12, rng)
    before = {name: value.clone() for name, value in tiny_llama.state_dict().items()}
    training = ShadowTraining(num_epochs=30, learning_rate=3e-2, batch_size=6)
    arguments = (copies_of(tiny_llama), ModelConfig(name="x"), rows, RowCollator(pad_token_id=0), included_KR)
    found_KR = np.array(list(shadow_confidences(*arguments, training)))
    assert found_KR.shape == (2, 12)
    for found_R, included_R in zip(found_KR, included_KR, strict=True):
        assert found_R[included_R].min() > found_R[~included_R].max()
    assert all(torch.equal(before[name], value) for name, value in tiny_llama.state_dict().items())
    short = ShadowTraining(num_epochs=1)
    once, again = (next(shadow_confidences(*arguments, short)) for _ in range(2))
    np.testing.assert_array_equal(once, again)


def test_the_recipes_adapter_is_the_shadows(tiny_llama):
    """Shadows train the same parameters as the target."""
    rows = datasets.Dataset.from_dict({"input_ids": [[3, 4], [5, 6]], "labels": [[3, 4], [5, 6]], "record": [0, 1]})
    model = ModelConfig(name="x", adapter={"r": 2, "target_modules": ["nothing"]})
    arguments = (copies_of(tiny_llama), model, rows, RowCollator(pad_token_id=0), np.eye(2, dtype=bool))
    with pytest.raises(ConfigError, match="target_modules"):
        next(shadow_confidences(*arguments))


def test_too_few_shadows_and_what_does_not_fit_are_refused():
    """One model cannot be compared with itself, and a record needs both kinds."""
    with pytest.raises(AuditError, match="provide"):
        draw_halves(1, 10, np.random.default_rng(0))
    target_R, shadows_KR, included_KR, _ = simulated(4, num_records=10)
    with pytest.raises(AuditError, match="2 shadows"):
        lira_score(target_R, shadows_KR[:1], included_KR[:1])
    with pytest.raises(AuditError, match="value per"):
        lira_score(target_R[:3], shadows_KR, included_KR)
    included_KR[:, 4] = True
    with pytest.raises(AuditError, match="10 records"):
        lira_score(target_R, shadows_KR, included_KR)
    with pytest.raises(ConfigError, match="num_epochs"):
        ShadowTraining(num_epochs=0)
