"""The plan of a query run is fixed, read back as written, and composed with the release that it builds on."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from dpllm.mechanism.query import Query
from dpllm.methods.queries.run import prior_release
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.calibration import least_noise
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.query_plan import Charge, QueryPlan, load_plan, training_plan
from tests.methods.queries.making import DELTA, OTHER, UNITS, VOTE, query_plan, train
from tests.mutations import kills


def test_a_plan_is_read_back_and_costs_all_its_charges(tmp_path: Path) -> None:
    """ε is that of every charge, as often as planned; `load_plan` knows both kinds of plans."""
    plan = query_plan()
    plan.save(tmp_path / PLAN_FILE)
    again = load_plan(tmp_path / PLAN_FILE)
    assert again == plan and again.hash == plan.hash and isinstance(again, QueryPlan)
    assert plan.epsilon == epsilon([(VOTE, 4), (OTHER, 2)], DELTA) and plan.num_steps == 6
    assert plan.epsilon_under("replace-one") == epsilon([(VOTE, 4), (OTHER, 2)], DELTA, "replace-one")
    assert load_plan(tmp_path / PLAN_FILE).to_dict()["format"] == 1
    trained = train(tmp_path / "trained")
    assert load_plan(tmp_path / "trained" / PLAN_FILE) == trained == training_plan(tmp_path / "trained", "A test")
    with pytest.raises(ValueError, match="test needs"):
        training_plan(tmp_path, "A test")


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda raw: raw["charges"][0].update(count=1), "was edited"),
        (lambda raw: raw["settings"].update(clip=0.1), "was edited"),
        (lambda raw: raw.update(delta=1e-9), "was edited"),
    ],
)
def test_an_edited_plan_is_refused(tmp_path: Path, edit, text: str) -> None:
    """Every number is covered by the hash."""
    path = tmp_path / PLAN_FILE
    query_plan().save(path)
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=text):
        load_plan(path)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    """Missing, not JSON, or another thing."""
    for text in (None, "{", "[]", '{"format": 1}', '{"format": 1, "hash": 2}', '{"format": 6, "hash": 2}'):
        path = tmp_path / PLAN_FILE
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=r"cannot be read|is not|of format 6"):
            QueryPlan.load(path)
        with pytest.raises(ValueError, match=r"cannot be read|is not|of format 6"):
            load_plan(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"method": "exact counts"}, "method in"),
        ({"num_units": 0}, "num_units >= 1"),
        ({"delta": 1e-3}, "0 < delta < 1/num_units"),
        ({"charges": ()}, "at least one charge"),
        ({"charges": (Charge(name="a", event=VOTE, count=1),) * 2}, "charges with different names"),
        ({"randomness": "seeded"}, "randomness in"),
    ],
)
def test_impossible_plans_are_refused(change, text: str) -> None:
    """Each broken rule is named."""
    with pytest.raises(ValueError, match=text):
        query_plan(**change)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": ""}, "must be one line"),
        ({"count": 0}, "must be charged between 1 and"),
        ({"event": Query(noise_multiplier=0.0)}, "has no noise"),
    ],
)
def test_impossible_charges_are_refused(fields, text: str) -> None:
    """An answer without noise cannot be planned."""
    with pytest.raises(ValueError, match=text):
        Charge(**{"name": "votes", "event": VOTE, "count": 1, **fields})


@kills(
    "a query run states only its own answers, and not the model that it builds on",
    "dpllm/privacy/plan.py",
    "        return [*(() if self.after is None else self.after.history), *self.own_history]",
    "        return self.own_history",
)
def test_a_run_on_a_model_costs_both(tmp_path: Path) -> None:
    """ε is that of the training and of the answers together, from the ledger of the trained run."""
    trained = train(tmp_path / "trained")
    plan = query_plan(after=prior_release(tmp_path / "trained"))
    assert plan.epsilon == epsilon([*trained.history, *plan.own_history], DELTA) > query_plan().epsilon
    plan.save(tmp_path / PLAN_FILE)
    assert QueryPlan.load(tmp_path / PLAN_FILE) == plan
    raw = json.loads((tmp_path / PLAN_FILE).read_text())
    raw["after"]["history"][0][1] -= 1
    (tmp_path / PLAN_FILE).write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="was edited"):
        load_plan(tmp_path / PLAN_FILE)


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": "letters"},
        {"num_units": UNITS + 1},
        {"unit": "user", "unit_column": "id", "max_rows_per_unit": 2, "rows_kept": "first"},
        {"dataset": None},
    ],
)
def test_a_model_of_other_people_is_refused(tmp_path: Path, change) -> None:
    """One ε for different units would mean nothing."""
    train(tmp_path / "trained")
    after = prior_release(tmp_path / "trained")
    with pytest.raises(ValueError, match="of the prior run"):
        query_plan(after=after, **change)


def test_calibrated_noise_keeps_to_the_target(tmp_path: Path) -> None:
    """With and without a release before; a target that the release alone exceeds is refused."""
    train(tmp_path / "trained", expected_batch_size=UNITS, noise_multiplier=40.0)  # the quickest to account for
    after = prior_release(tmp_path / "trained")
    alone = epsilon(after.history, DELTA)

    def cost(sigma: float, prior=()) -> float:
        return epsilon([*prior, (Query(noise_multiplier=sigma), 3)], DELTA)

    for target, prior in ((0.5, None), (alone + 0.3, after)):
        sigma = least_noise(
            target, DELTA, lambda at: [(Query(noise_multiplier=at), 3)], before=() if prior is None else prior.history
        )
        before = () if prior is None else prior.history
        assert cost(sigma, before) <= target < cost(sigma * (1 - 1e-3), before)
    with pytest.raises(ValueError, match="alone cost"):
        least_noise(alone / 2, DELTA, lambda at: [(Query(noise_multiplier=at), 3)], before=after.history)
    for target in (0.0, math.nan, 1e9):
        with pytest.raises(ValueError, match="target_epsilon"):
            least_noise(target, DELTA, lambda at: [(Query(noise_multiplier=at), 3)])


def test_only_a_finished_private_run_is_a_prior_release(tmp_path: Path) -> None:
    """One that may still take steps, was seeded, or is a query run is refused."""
    train(tmp_path / "running", end=False)
    with pytest.raises(ValueError, match="has not ended"):
        prior_release(tmp_path / "running")
    train(tmp_path / "seeded", seed=3)
    with pytest.raises(ValueError, match="fixed seed"):
        prior_release(tmp_path / "seeded")
    (tmp_path / "query").mkdir()
    query_plan().save(tmp_path / "query" / PLAN_FILE)
    with pytest.raises(ValueError, match="needs the folder"):
        prior_release(tmp_path / "query")
    train(tmp_path / "stopped", end=False)
    with Ledger.annotate(tmp_path / "stopped" / LEDGER_FILE) as ledger:
        ledger.append_end("stopped early", independent=True)
    assert prior_release(tmp_path / "stopped").history
    shutil.copytree(tmp_path / "stopped", tmp_path / "copy")
    with pytest.raises(LedgerError, match="is a copy of the file that the run wrote"):
        prior_release(tmp_path / "copy")
    selection = {"kind": "logarithmic", "mean": 5}
    train(tmp_path / "candidate", selection=selection, noise_multiplier=2.0)
    with pytest.raises(ValueError, match="has not selected it"):
        prior_release(tmp_path / "candidate")


def test_an_unknown_charge_is_named() -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="charge 'vote"):
        query_plan().charge("vote")


def test_every_field_of_a_plan_changes_its_hash() -> None:
    """So that no number can be changed under the same ledger."""
    plan = query_plan()
    changes = {"num_units": 999, "delta": 2e-5, "target_epsilon": 3.0, "adjacency": "replace-one", "dataset": "x"}
    hashes = {dataclasses.replace(plan, **{name: value}).hash for name, value in changes.items()}
    assert len(hashes | {plan.hash}) == len(changes) + 1
