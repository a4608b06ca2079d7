"""The verdict: which claims are refuted, which are not, and the words for it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dpllm.audit.bounds import AuditError, NoiseTest, one_run_bounds, plan_family, power, power_in_words
from dpllm.audit.result import (
    CONSISTENT,
    FAIL,
    NO_CLAIM,
    allowed_rates,
    highest_fpr,
    json_text,
    judge,
    plot_audit,
    tpr_at,
    tpr_confidence,
)
from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from tests.audit.test_bounds import gaussian_scores

CLAIM = [(Step(sampling_rate=1.0, noise_multiplier=2.0), 1)]  # μ = 1/2
DELTA = 1e-5


def audit(mu: float, history=CLAIM, num: int = 1000, **options):
    scores, coins = gaussian_scores(num, mu, seed=3)
    return judge({"loss": scores}, coins, delta=DELTA, history=history, canary_kind="random tokens", **options)


def test_a_sound_run_is_consistent_and_a_broken_one_fails():
    """The claim of μ = 1/2 is kept for a mechanism that satisfies it, and refuted for one of μ = 3."""
    sound, broken = audit(0.5), audit(3.0)
    assert sound.verdict == CONSISTENT and not sound.failed
    assert sound.epsilon_lower <= sound.claimed_epsilon == pytest.approx(epsilon(CLAIM, DELTA))
    assert broken.verdict == FAIL and broken.failed
    assert broken.claimed_epsilon < broken.epsilon_lower < broken.ceiling
    assert "do not release" in broken.summary() and broken.summary().startswith("FAIL")
    assert sound.summary().startswith("consistent, not proof: 1,000 canaries (random tokens)")


def test_what_is_printed_says_what_was_done():
    """The unit, the canaries and the number of tests, by which the error is divided."""
    rows = dict(audit(0.5, unit="user", repetitions=4, details={"exposure": "1.3 bits"}).rows())
    text = "\n".join(rows.values())
    assert "one user" in text and "1,000 (random tokens), 4 row(s) each" in text and "Bonferroni over 16" in text
    assert rows["exposure"] == "1.3 bits"


@pytest.mark.parametrize("mu", [0.5, 3.0], ids=["sound", "broken"])
def test_claims_are_printed_rounded_up_and_bounds_rounded_down(mu):
    """In the table and in the sentence for the report: every "at least" is below its bound, every claim above."""
    result = audit(mu)
    rows = dict(result.rows())
    text = "\n".join([*rows.values(), result.summary()])
    claims = [float(found) for found in re.findall(r"(?:the claim is|ε =|but) (\d+\.\d{4})", text)]
    least = [float(found) for found in re.findall(r"at least (\d+\.\d+)", text)]
    most = [float(found) for found in re.findall(r"(?:could show at most|ceiling) (\d+\.\d+)", text)]
    assert len(claims) == (3 if result.failed else 1) and len(least) >= 3 and len(most) >= 2
    assert all(result.claimed_epsilon <= claim < result.claimed_epsilon + 1e-4 for claim in claims)
    assert all(shown <= result.epsilon_lower for shown in least)
    assert float(rows["ε at least"].split()[0]) <= result.epsilon_lower < float(rows["ε at least"].split()[0]) + 1e-4
    assert max(most) >= result.ceiling
    allowed = re.search(r"the claim allows (\d\.\d+)", text)
    assert allowed and float(allowed[1]) >= min(result.tpr_bounds.values())


@pytest.mark.parametrize(
    "history", [None, [], [(Step(sampling_rate=0.1, noise_multiplier=0.0), 5)]], ids=["none", "empty", "no noise"]
)
def test_without_privacy_nothing_is_claimed_and_the_bound_is_still_stated(history):
    """A model trained without noise has no ε to refute; a perfect attack reaches the ceiling of the coins."""
    coins = np.random.default_rng(0).random(400) < 0.5
    result = judge({"loss": coins * 1.0}, coins, delta=DELTA, history=history, canary_kind="random tokens")
    assert result.verdict == NO_CLAIM and result.claimed_epsilon is None and result.tpr_bounds == {}
    assert result.epsilon_lower > 0.85 * result.ceiling > 4
    assert ("claimed", "nothing") in result.rows()


def test_files_hold_everything(tmp_path):
    """The JSON can be read by anyone, and the picture is one."""
    result = audit(0.5)
    values = json.loads(result.save(tmp_path).read_text())
    assert values["verdict"] == CONSISTENT and values["num_canaries"] == 1000 and values["format"] == 1
    assert values["attacks"][0]["bounds"][0]["method"] == "one run, (ε, δ)"
    assert set(values["attacks"][0]["tpr"]) == set(values["tpr_bounds"]) == {"0.01"}
    scores, coins = gaussian_scores(1000, 0.5, seed=3)
    picture = plot_audit(result, {"loss": scores}, coins, tmp_path / "audit.png", CLAIM)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 20_000


def test_independent_runs_are_judged_by_their_own_bounds():
    """One canary per run: the tighter method, under the same verdict."""
    result = audit(0.5, independent_runs=True)
    assert [bound.method[:16] for bound in result.attacks[0].bounds] == ["independent runs"] * 2
    assert result.verdict == CONSISTENT


def test_no_score_is_refused():
    """There has to be an attack."""
    with pytest.raises(AuditError, match="judge"):
        judge({}, np.ones(3, dtype=bool), delta=DELTA, history=None, canary_kind="x")


def test_a_rate_that_so_few_can_not_show_is_left_out():
    """With 500 non-members no threshold shows a rate of 0.1 %; with 2 000 one does."""
    assert list(audit(0.5).attacks[0].tpr) == [0.01]
    assert list(audit(0.5, num=4000).attacks[0].tpr) == [0.001, 0.01]


def test_a_sound_run_is_not_accused_by_its_true_positive_rates():
    """The best attack on 300 sound runs is within the limit of the claim, up to the stated error."""
    history, mu, num = [(Step(sampling_rate=1.0, noise_multiplier=0.5), 1)], 2.0, 400
    accused = naive = 0
    for seed in range(300):
        scores, coins = gaussian_scores(num, mu, seed=seed)
        others = int((~coins).sum())
        level = tpr_confidence(0.95, 1, 1)
        found = tpr_at(scores, coins, 0.01, level)
        limit = highest_fpr(others, 0.01, level)
        accused += found.low > stats.norm.sf(stats.norm.isf(limit) - mu)
        naive += found.value > stats.norm.sf(stats.norm.isf(0.01) - mu)
    assert accused <= 15 and naive > 60
    allowed = allowed_rates(history, (0.01,), 200, 0.95)[0.01]
    exact = stats.norm.sf(stats.norm.isf(highest_fpr(200, 0.01)) - mu)
    assert exact <= allowed < exact + 0.01


def test_a_run_fails_exactly_when_its_own_curve_is_refuted():
    """The printed bound of a refuted claim is never below it, that of any other never above."""
    history = [(Step(sampling_rate=0.1, noise_multiplier=1.0), 40)]
    claimed = epsilon(history, DELTA)
    assert plan_family(history, DELTA).member(1.0).price == claimed < plan_family(history, DELTA).member(1.0).epsilon
    verdicts = set()
    for mu in np.linspace(1.6, 3.4, 10):
        scores, coins = gaussian_scores(400, float(mu), seed=7)
        for bound in one_run_bounds(scores, coins, DELTA, history=history):
            assert (bound.epsilon >= claimed) == bound.refutes
            verdicts.add(bound.refutes)
    assert verdicts == {True, False}


def test_noise_that_is_too_small_fails():
    """Beside the bounds: a standard deviation a tenth too small shows in 1600 projections."""
    rng = np.random.default_rng(0)
    sound, weak = (NoiseTest.of(rng.normal(0, ratio, 1600), 1.0, 0.01) for ratio in (1.0, 0.9))
    result = audit(0.5)
    assert not replace(result, noise=sound).failed
    failed = replace(result, noise=weak)
    assert failed.verdict == FAIL and "standard deviation of at most 0.9" in dict(failed.rows())["verdict"]
    assert json.loads(json_text(failed.to_dict()))["noise"]["num"] == 1600
    refuted = [NoiseTest.of(rng.normal(0, 1.0, 400), 1.0, 0.05).refuted for _ in range(400)]
    assert sum(refuted) <= 35  # 5 % of sound runs, and no more
    assert sound.power()["σ/√2"] > 0.999
    few = NoiseTest.of(rng.normal(0, 1.0, 20), 1.0, 0.05).power()
    shares = [NoiseTest.of(rng.normal(0, 2**-0.5, 20), 1.0, 0.05).refuted for _ in range(400)]
    assert abs(np.mean(shares) - few["σ/√2"]) < 0.1


@pytest.mark.deep
def test_the_power_that_is_printed_is_that_of_the_audit():
    """Simulated audits of a run with half the noise fail as often as it says; a wide claim can hardly be refuted."""
    history = [(Step(sampling_rate=1.0, noise_multiplier=1.0), 1)]
    shares = power(history, DELTA, in_one_run=300)
    failed = []
    for seed in range(40):
        scores, coins = gaussian_scores(300, 2.0, seed=seed)
        failed.append(any(bound.refutes for bound in one_run_bounds(scores, coins, DELTA, history=history)))
    assert abs(np.mean(failed) - shares["σ/2"]) <= 0.3 and shares["σ/√2"] <= shares["σ/2"]
    wide = power([(Step(sampling_rate=1.0, noise_multiplier=0.3), 1)], DELTA, in_one_run=60)
    assert "this audit can hardly fail" in power_in_words(wide)
    assert power(history, DELTA, in_trials=1000)["σ/√2"] >= 0.3  # one canary in each of 1000 blocks
    assert power(history, DELTA, in_trials=200, in_one_run=1600, tests=4)["σ/√2"] <= 0.1  # eight in each of 200
