"""Exposure of canaries, and the audit of synthetic texts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from dpllm.audit.bounds import AuditError
from dpllm.audit.canaries import CANARIES_FILE, CanarySet
from dpllm.cli.program import app
from dpllm.methods.attacks.exposure import Exposure, audit_texts, exposure, exposure_by_rank, exposure_extrapolated
from dpllm.methods.queries.run import QueryRun, prior_release
from dpllm.methods.synthesize.evaluation import longest_runs
from dpllm.privacy.query_plan import QueryPlan
from dpllm.report.verify import verify
from tests import tiers
from tests.audit.test_run import write_claim


def test_rank_among_others():
    """The best of n + 1 has log2(n + 1) bits, the worst none; half of the ties rank before."""
    reference = np.arange(1.0, 16.0)
    found = exposure_by_rank(np.array([99.0, 0.0, 14.0, 14.5]), reference)
    assert found == pytest.approx([4.0, 0.0, math.log2(16 / 2.5), 3.0])


def test_extrapolation_is_the_normal_tail_for_normal_scores():
    """With much normal reference, a score z deviations above has -log2 P[Z > z] bits, and any scale does."""
    reference = np.random.default_rng(0).normal(size=20_000)
    z = np.array([0.0, 1.0, 2.0, 3.0])
    expected = -stats.norm.logsf(z) / math.log(2)
    assert exposure_extrapolated(z, reference) == pytest.approx(expected, rel=0.1)
    assert exposure_extrapolated(z * 1e-3 + 7, reference * 1e-3 + 7) == pytest.approx(
        exposure_extrapolated(z, reference), rel=1e-3
    )


@pytest.mark.parametrize("skewed", [-3.0, 0.0, 3.0])
def test_extrapolation_far_out(skewed):
    """Where a probability underflows, bits continue to rise without a jump, as the square of the distance."""
    reference = stats.skewnorm.rvs(skewed, size=2000, random_state=1)
    bits = exposure_extrapolated(np.linspace(3, 60, 600), reference)
    assert np.isfinite(bits).all() and (np.diff(bits) > 0).all()
    assert np.abs(np.diff(bits, 2)).max() < 0.1 * bits[-1] / 100
    assert bits[-1] > 1500


def test_what_was_never_seen_has_a_median_of_one():
    """Scores of the same distribution as the reference have a median of one bit; memorised ones the most there is."""
    rng = np.random.default_rng(3)
    unseen = exposure(rng.normal(size=400), rng.normal(size=400))
    assert unseen.median_by_rank == pytest.approx(1, abs=0.2) == unseen.median_extrapolated
    memorised = exposure(rng.normal(size=400) + 20, rng.normal(size=400))
    assert memorised.median_by_rank == memorised.most_by_rank == math.log2(401)
    assert memorised.median_extrapolated > 100
    assert "bits by rank among 400 others" in str(memorised)
    assert Exposure(**memorised.to_dict()) == memorised


@pytest.mark.parametrize(
    ("included", "reference", "message"),
    [
        ([], np.arange(20.0), "no canary was included"),
        ([1.0], np.arange(9.0), "there are only 9: at least 10 are needed"),
        ([1.0], [*range(19), np.nan], "not finite"),
        ([1.0], np.ones(20), "the same score"),
    ],
)
def test_refusals(included, reference, message):
    """Scores without a reference to compare with are refused."""
    with pytest.raises(AuditError, match=message):
        exposure(np.array(included), np.array(reference))


@pytest.fixture
def trained(prepared, tmp_path):
    """A training's folder with plan, ledger and a file of weights, which no audit of texts reads."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(b"")
    return write_claim(tmp_path / "run", CanarySet.load(prepared / CANARIES_FILE))


def released(folder: Path, run: Path, texts: list[str]) -> Path:
    """A data set of the run's model."""
    after = prior_release(run)
    plan = QueryPlan(
        **{name: getattr(after, name) for name in ("unit", "unit_column", "num_units", "dataset")},
        method="synthetic text",
        adjacency="zero-out",
        charges=(),
        settings=(),
        delta=1e-3,
        after=after,
    )
    with QueryRun.begin(folder, plan, dataset=after.dataset) as made:
        path = folder / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        if texts:
            made.release(path)
    return folder


def command(folder, run, prepared):
    arguments = ["methods", "texts", folder, "--run", run, "--canaries", prepared / CANARIES_FILE, "--json"]
    return CliRunner().invoke(app, list(map(str, arguments)))


def texts_of(prepared, included):
    made = CanarySet.load(prepared / CANARIES_FILE)
    return [canary.records[0][1] for canary in made.canaries if canary.included in included]


@tiers.deep
def test_texts_that_repeat_the_canaries_of_the_training_refute_its_claim(prepared, trained, tmp_path):
    """Exit code 1, and the report of the data set says it; its ledger still matches."""
    folder = released(tmp_path / "copies", trained, [f"so {text} then" for text in texts_of(prepared, {True})])
    done = command(folder, trained, prepared)
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["verdict"] == "FAIL" and found["epsilon_lower"] > found["claimed_epsilon"]
    assert found["details"]["exposure"]["median_by_rank"] > 4
    assert verify(folder).ok
    assert "FAIL: 60 canaries" in (folder / "privacy_report.md").read_text(encoding="utf-8")


@tiers.deep
def test_texts_that_repeat_all_canaries_or_none_show_nothing(prepared, trained, tmp_path):
    """What was left out is repeated as much as what was included."""
    for name, texts in (("all", texts_of(prepared, {True, False})), ("none", ["the sun was low"])):
        done = command(released(tmp_path / name, trained, texts), trained, prepared)
        found = json.loads(done.stdout)
        assert done.exit_code == 0 and found["verdict"] == "consistent, not proof" and found["epsilon_lower"] == 0


def test_other_folders_are_refused(prepared, trained, tmp_path):
    """A training, a data set of another run, and edited texts: a verdict about them would be of something else."""

    def audited(folder, run):
        return audit_texts(folder, run, prepared / CANARIES_FILE, lambda own: longest_runs(["a"], own))

    with pytest.raises(AuditError, match="is not a data set of a trained model"):
        audited(trained, trained)
    folder = released(tmp_path / "texts", trained, ["a text"])
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"")
    write_claim(other, CanarySet.load(prepared / CANARIES_FILE))
    with pytest.raises(AuditError, match="written by the model of another run"):
        audited(folder, other)
    with pytest.raises(AuditError, match="released texts"):
        audited(released(tmp_path / "empty", trained, []), trained)
    (folder / "texts.jsonl").write_text('{"text": "edited"}\n', encoding="utf-8")
    with pytest.raises(AuditError, match=r"texts\.jsonl"):
        audited(folder, trained)


def test_a_run_is_counted_in_words():
    """Of the canary with most words in one text; words of two texts do not add up."""
    assert np.array_equal(longest_runs(["one two", "three four"], ["one two three four", "five"]), [2.0, 0.0])
