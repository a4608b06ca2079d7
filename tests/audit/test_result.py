"""The verdict: who is refuted, who isn't, and what is said of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dpllm.accounting import Step, epsilon
from dpllm.audit.bounds import AuditError
from dpllm.audit.figure import plot_audit
from dpllm.audit.result import CONSISTENT, FAIL, NO_CLAIM, judge
from tests.audit.test_bounds import gaussian_scores

CLAIM = [(Step(None, 1.0, None, 2.0), 1)]  # μ = 1/2
DELTA = 1e-5


def audit(mu: float, history=CLAIM, num: int = 1000, **options):
    scores, coins = gaussian_scores(num, mu, seed=3)
    return judge({"loss": scores}, coins, delta=DELTA, history=history, canary_kind="random tokens", **options)


def test_a_sound_run_is_consistent_and_a_broken_one_fails():
    """The claim of μ = 1/2 stands for a mechanism that keeps it, and falls for one of μ = 3."""
    sound, broken = audit(0.5), audit(3.0)
    assert sound.verdict == CONSISTENT and not sound.failed
    assert sound.epsilon_lower <= sound.claimed_epsilon == pytest.approx(epsilon(CLAIM, DELTA))
    assert broken.verdict == FAIL and broken.failed
    assert broken.claimed_epsilon < broken.epsilon_lower < broken.ceiling
    assert "do not release the model" in broken.summary() and broken.summary().startswith("FAIL")
    assert sound.summary().startswith("consistent, not proof: 1,000 canaries (random tokens)")


def test_what_is_printed_says_what_was_done():
    """Claim, unit, adjacency, canaries, inclusion, AUROC, rates beside their bounds, bounds, correction and ceiling."""
    result = audit(0.5, unit="user", repetitions=4, details={"exposure": "1.3 bits"})
    text = "\n".join(f"{name}: {value}" for name, value in result.rows())
    for needed in (
        "claimed: ε = ",
        "zero-out adjacency",
        "one user",
        "1,000 (random tokens), 4 row(s) each",
        "by independent fair coins",
        "attack: loss: AUROC 0.",
        "found at FPR 0.1 %",
        "found at FPR 1 %",
        "; the claim allows 0.0",
        "one run, (ε, δ): ε at least",
        "one run, curve of the run's own steps",
        "correction: Bonferroni over 16",
        "ceiling: ",
        "exposure: 1.3 bits",
        "verdict: consistent, not proof",
    ):
        assert needed in text, needed


@pytest.mark.parametrize("history", [None, [], [(Step(None, 0.1, None, 0.0), 5)]], ids=["none", "empty", "no noise"])
def test_without_privacy_nothing_is_claimed_and_the_bound_is_still_stated(history):
    """A model trained without noise has no ε to refute; a perfect attack shows what the coins can show."""
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
    assert set(values["attacks"][0]["tpr"]) == set(values["tpr_bounds"]) == {"0.001", "0.01"}
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
    with pytest.raises(AuditError, match="no score to judge"):
        judge({}, np.ones(3, dtype=bool), delta=DELTA, history=None, canary_kind="x")
