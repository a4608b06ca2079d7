"""Tests of dpllm.methods.attacks.answers: trials of private answers, with and without a canary, through a real
ledger."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from dpllm.audit.bounds import AuditError, Claim
from dpllm.cli.program import app
from dpllm.mechanism.query import Query
from dpllm.methods.attacks.answers import MEMORY, run_trials
from dpllm.methods.attacks.probes import EXCESS, PROBES, Probe, count_probe, made_units
from dpllm.methods.count import counting
from dpllm.methods.queries.run import prior_release
from dpllm.privacy.query_plan import Charge, QueryPlan
from dpllm.registry import release_words
from dpllm.report.verify import verify
from tests import tiers
from tests.methods.queries.making import DELTA, UNITS, train

EVENT = Query(noise_multiplier=1.0, replaced=2**0.5, discrete=True)


def plan_of(*charges, **changes):
    """The plan of a small run; of one histogram unless charges are given."""
    fields = {"unit": "sequence", "adjacency": "zero-out", "num_units": 100, "delta": 1e-3, "settings": ()}
    charges = charges or (Charge(name="label counts", event=EVENT, count=1),)
    return QueryPlan(**{**fields, "method": "label counts", "charges": charges, "randomness": "discrete", **changes})


def users(**changes):
    return plan_of(unit="user", unit_column="person", max_rows_per_unit=3, rows_kept="first", **changes)


def refuted(found):
    return Claim(found.history, 1e-3, 0.999, 1).refuted_in_trials(found.scores, found.included)


def test_every_method_has_a_probe():
    """A new way of release brings its audit."""
    assert set(PROBES) == set(release_words())


@pytest.mark.parametrize("plan", [plan_of(), users()], ids=["sequence", "user"])
def test_noisy_counts_are_consistent_and_exact_ones_refuted(plan, monkeypatch):
    """The same trials, of the code as it is and of counts without noise."""
    found = run_trials(plan, count_probe(plan), 300)
    shift = found.scores[found.included].mean() - found.scores[~found.included].mean()
    assert shift == pytest.approx(plan.max_rows_per_unit or 1, rel=0.6)  # the canary is there, with k rows of many
    assert found.history == [(EVENT, 1)] and not refuted(found)
    with monkeypatch.context() as patched:
        patched.setattr(counting.QueryRun, "randomness", property(lambda self: Exact()))
        assert refuted(run_trials(plan, count_probe(plan), 300))


class Exact:
    """Planted: no noise."""

    def noisy(self, counts, noise_multiplier, change):
        return list(counts)


def test_a_canary_has_more_rows_than_count():
    """So that a bound that is not kept shows; the others are the same with and without it."""
    with_it, without = (made_units(users(), 5, there) for there in (True, False))
    assert with_it.num_units == 6 and len(with_it.rows) == 5 + 3 and with_it.rows_dropped == 3 * (EXCESS - 1)
    assert without.num_units == len(without.rows) == 5


def test_the_claim_is_the_least_that_a_trial_charged():
    """A charge that depends on the answer could be shown as small as its smallest."""
    plan = plan_of(Charge(name="votes", event=Query(noise_multiplier=5.0), count=4))
    asked = iter(range(100))

    def answer(run, there):
        count = 1 + next(asked) % 4
        run.charge("votes", count)
        return float(count)

    found = run_trials(plan, Probe("a unit", answer), 20)
    assert found.history == [(Query(noise_multiplier=5.0), 1)]
    assert "the least of 4 different charges" in found.charged


def test_answers_without_a_charge_are_no_audit(monkeypatch):
    """A ledger would show nothing of them."""
    before = set(MEMORY.iterdir()) if MEMORY.is_dir() else set()
    with pytest.raises(AuditError, match="released without"):
        run_trials(plan_of(), Probe("a unit", lambda run, there: float(there)), 20)
    assert not MEMORY.is_dir() or not {one for one in set(MEMORY.iterdir()) - before if "dpllm-audit" in one.name}


def test_what_cannot_be_audited_is_refused(tmp_path):
    """Before a trial: a plan without answers of its own, too few trials, too many."""
    train(tmp_path / "trained")
    public = plan_of(
        after=prior_release(tmp_path / "trained"), charges=(), num_units=UNITS, delta=DELTA, dataset="chats"
    )
    nothing = Probe("a unit", lambda run, there: 0.0)
    many = plan_of(Charge(name="votes", event=Query(noise_multiplier=5.0), count=1_000_000))
    for plan, trials, message in (
        (public, 20, "no private answers of its own"),
        (plan_of(), 9, "takes 10 to"),
        (many, 11, "takes 10 to 10 trials"),
    ):
        with pytest.raises(AuditError, match=message):
            run_trials(plan, nothing, trials)


def test_trials_neither_need_nor_touch_the_records_budget_or_folder_of_a_run(tmp_path):
    """The plan of a finished run suffices; its data set is not charged for made-up records."""
    plan = plan_of(dataset="notes", target_epsilon=8.0)
    assert len(run_trials(plan, count_probe(plan), 10).scores) == 10
    assert not list(tmp_path.iterdir())


@pytest.fixture
def recipe(tmp_path):
    """The path of a recipe that counts three classes of 60 records."""
    lines = (json.dumps({"text": f"note {number}", "label": number % 3}) + "\n" for number in range(60))
    (tmp_path / "records.jsonl").write_text("".join(lines))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"data: {{path: {tmp_path}/records.jsonl, format: classification, class_names: [a, b, c]}}\n"
        f"privacy: {{noise_multiplier: 1.0, delta: 1.0e-3}}\ncount: {{}}\noutput_dir: {tmp_path}/run\n"
    )
    return path


@tiers.deep
def test_the_command_audits_a_finished_run_and_its_report_has_the_verdict(recipe, tmp_path):
    """The folder still matches its ledger, and the table says what was tested."""
    assert CliRunner().invoke(app, ["methods", "count", str(recipe)]).exit_code == 0
    done = CliRunner().invoke(app, ["methods", "answers", str(tmp_path / "run"), "--trials", "60", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["verdict"] == "consistent, not proof" and found["num_canaries"] == 60
    assert found["details"] == {"method": "label counts", "charged in a trial": "1 x label counts"}
    assert verify(tmp_path / "run").ok and (tmp_path / "run" / "audit.png").stat().st_size > 10_000
    assert "consistent, not proof: 60 canaries" in (tmp_path / "run" / "privacy_report.md").read_text()
    done = CliRunner().invoke(app, ["methods", "answers", str(tmp_path / "run"), "privacy.delta=0.1"])
    assert done.exit_code == 2 and "the plan of a finished run is fixed" in done.output


@tiers.deep
def test_the_command_audits_a_recipe_and_fails_with_exit_code_1(recipe, tmp_path, monkeypatch):
    """The results go where they are asked to go; nothing is charged."""
    monkeypatch.setattr(counting.QueryRun, "randomness", property(lambda self: Exact()))
    arguments = ["methods", "answers", str(recipe), "--trials", "80", "--output", str(tmp_path / "audit")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and "FAIL" in done.stdout
    assert json.loads((tmp_path / "audit" / "audit.json").read_text())["verdict"] == "FAIL"
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_training_run_is_sent_to_other_audits(tmp_path):
    """Its steps are no answers."""
    train(tmp_path / "run")
    done = CliRunner().invoke(app, ["methods", "answers", str(tmp_path / "run")])
    assert done.exit_code == 2 and "holds a training run" in done.output and "audit gradient" in done.output


def test_coins_are_fair():
    """And are drawn for each trial."""
    found = run_trials(plan_of(), count_probe(plan_of()), 400)
    assert abs(found.included.mean() - 0.5) < 0.13 and len(np.unique(found.scores)) > 2
