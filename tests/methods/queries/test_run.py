"""A query run charges before it answers, and neither folder, ledger nor budget can be made to count less."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.mechanism.query import Query
from dpllm.methods.queries.run import QueryRun, Randomness, prior_release
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import BudgetError, budget_rows, charge, read_budget, settle
from dpllm.privacy.compose import compose
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, read_ledger
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.query_plan import Charge
from dpllm.privacy.run_folder import settle_crashed
from dpllm.privacy.stated import stated_history
from dpllm.report.verify import verify
from tests.methods.queries.making import DELTA, OTHER, VOTE, budget_in, query_plan, train
from tests.mutations import kills

FULL = {"expected_batch_size": 1000, "noise_multiplier": 60.0}


def asked(folder: Path, votes: int = 4, others: int = 2, independent: bool = False, **more) -> QueryRun:
    """Carry out a run with some of its charges."""
    run = QueryRun.begin(folder, more.pop("plan", None) or query_plan(), dataset="chats", **more)
    if votes:
        run.charge("votes", votes)
    if others:
        run.charge("others", others)
    run.finish(independent)
    return run


def spent(path: Path) -> float:
    return read_budget(path).spent


def test_a_charge_is_on_the_disk_before_the_answer(tmp_path: Path) -> None:
    """The ledger names the answers, their event and their number when `charge` returns."""
    run = QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats")
    run.charge("votes", 3)
    contents = read_ledger(tmp_path / "run" / LEDGER_FILE)
    assert contents.history == [(VOTE, 3)] and contents.notes.answers == {("votes", VOTE): 3}
    assert run.left("votes") == 1 and run.left("others") == 2
    run.charge("others", 2)
    run.finish()
    contents = read_ledger(tmp_path / "run" / LEDGER_FILE)
    assert contents.end == "stopped early" and contents.history == [(VOTE, 3), (OTHER, 2)] and contents.num_steps == 5
    assert isinstance(contents.history[0][0], Query) and (tmp_path / "run" / PLAN_FILE).is_file()


@kills(
    "a query run charges more answers than it planned",
    "dpllm/methods/queries/run.py",
    "        if count > self._left[name]:",
    "        if False:",
)
@pytest.mark.parametrize(
    ("name", "count", "text"),
    [
        ("votes", 5, "5 more answers 'votes' were asked for, and the plan has 4 of 4 left"),
        ("vote", 1, "no charge 'vote'"),
        ("votes", 0, "a whole number of times, at least 1, got 0"),
        ("votes", -3, "at least 1, got -3"),
        ("votes", 1.5, "a whole number"),
        ("votes", True, "a whole number"),
    ],
)
def test_no_more_than_planned_is_charged(tmp_path: Path, name: str, count, text: str) -> None:
    """A charge that the plan does not have would not be in the printed ε."""
    with QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats") as run:
        with pytest.raises(ValueError, match=text):
            run.charge(name, count)
        run.charge("votes", 4)
        with pytest.raises(ValueError, match="4 left"):
            run.charge("votes")
    with pytest.raises(LedgerError, match="has ended"):
        run.charge("others")


@kills(
    "a second query run in a folder hides the first",
    "dpllm/methods/queries/run.py",
    "        if is_used(path) or",
    "        if",
)
def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    """It would hide the answers of the first: also where only its plan is left, or another process writes there."""
    asked(tmp_path / "run")
    with pytest.raises(LedgerError, match="earlier run"):
        QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats")
    (tmp_path / "run" / LEDGER_FILE).unlink()
    with pytest.raises(LedgerError, match="earlier run"):
        QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats")
    going = QueryRun.begin(tmp_path / "going", query_plan(), dataset="chats")
    with pytest.raises(LedgerError, match="earlier run"):
        QueryRun.begin(tmp_path / "going", query_plan(), dataset="chats")
    going.finish()
    train(tmp_path / "trained")
    with pytest.raises(LedgerError, match="earlier run"):
        QueryRun.begin(tmp_path / "trained", query_plan(), dataset="chats")


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_a_result_that_exists_is_refused_before_a_charge(tmp_path: Path, kind: str) -> None:
    """The answers would be paid for, and could not be written; or a file of the user would be lost."""
    folder, budget = tmp_path / "run", budget_in(tmp_path)
    folder.mkdir()
    place = folder / "counts.json"
    {"file": place.touch, "folder": place.mkdir}.get(kind, lambda: place.symlink_to("elsewhere"))()
    with pytest.raises(ValueError, match=r"counts\.json"):
        QueryRun.begin(folder, query_plan(), dataset="chats", budget=budget, results=["counts.json"])
    assert [path.name for path in folder.iterdir()] == ["counts.json"] and not read_budget(budget).entries


def test_a_run_that_asked_nothing_makes_way(tmp_path: Path) -> None:
    """Its reservation returns, and the folder can be used."""
    budget = budget_in(tmp_path)
    asked(tmp_path / "run", 0, 0, budget=budget)
    assert spent(budget) == 0.0
    asked(tmp_path / "run", budget=budget)
    assert spent(budget) == query_plan().epsilon


@kills(
    "a query run drops the disclosures of the run whose place it takes",
    "dpllm/methods/queries/run.py",
    "            ledger.append_disclosure(what, count)\n        plan.save",
    "            pass\n        plan.save",
)
def test_what_a_run_without_answers_wrote_out_is_listed_by_the_run_in_its_place(tmp_path: Path) -> None:
    """Exact results were shown before a charge, or `dpllm methods evaluate` measured there: ε covers neither."""
    with pytest.raises(RuntimeError), QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats") as bad:
        bad.disclose("exact figures", 3)
        raise RuntimeError
    asked(tmp_path / "run")
    assert read_ledger(tmp_path / "run" / LEDGER_FILE).disclosures == {"exact figures": 3}
    assert "exact figures" in (tmp_path / "run" / "privacy_report.md").read_text()


@kills(
    "the answers of a query run are charged to no budget",
    "dpllm/privacy/budget.py",
    "        put((*budget.entries, *prior, entry))",
    "        put((*budget.entries, *prior))",
)
@kills(
    "a query run that stopped early states the answers that it gave",
    "dpllm/privacy/query_plan.py",
    "contents.history if self.stops_independently(contents) else self.own_history",
    "contents.history",
)
def test_the_whole_plan_is_charged_to_the_budget_before_the_first_answer(tmp_path: Path) -> None:
    """It stays charged after a stop that may follow from the answers, and after an error."""
    budget, plan = budget_in(tmp_path), query_plan()
    run = QueryRun.begin(tmp_path / "run", plan, dataset="chats", budget=budget)
    assert spent(budget) == plan.epsilon
    run.charge("votes")
    run.finish()
    assert spent(budget) == plan.epsilon
    with pytest.raises(RuntimeError), QueryRun.begin(tmp_path / "failed", plan, dataset="chats", budget=budget) as bad:
        bad.charge("votes")
        raise RuntimeError
    assert spent(budget) == epsilon([*plan.history, *plan.history], DELTA)
    contents = read_ledger(tmp_path / "failed" / LEDGER_FILE)
    assert contents.end == "failed" and stated_history(plan, contents) == tuple(plan.history)
    assert "answers charged" in dict(budget_rows(read_budget(budget)))["run 1"]


def test_an_independent_stop_returns_what_was_not_charged(tmp_path: Path) -> None:
    """Report and budget then state the charged answers; without a declaration those of the plan."""
    budget, plan = budget_in(tmp_path), query_plan()
    asked(tmp_path / "run", 1, 0, independent=True, budget=budget)
    contents = read_ledger(tmp_path / "run" / LEDGER_FILE)
    assert stated_history(plan, contents) == ((VOTE, 1),) and spent(budget) == epsilon([(VOTE, 1)], DELTA)


def test_a_budget_that_is_too_small_refuses_the_run(tmp_path: Path) -> None:
    """Before anything is written; the error has the numbers."""
    budget = budget_in(tmp_path, epsilon=query_plan().epsilon * 1.2)
    asked(tmp_path / "one", budget=budget)
    before = budget.read_bytes()
    with pytest.raises(BudgetError, match="would by itself"):
        QueryRun.begin(tmp_path / "two", query_plan(), dataset="chats", budget=budget)
    with pytest.raises(BudgetError, match="Use more noise"):
        charge(budget, query_plan(), "chats")
    assert budget.read_bytes() == before and not (tmp_path / "two" / LEDGER_FILE).exists()


def test_two_runs_at_the_same_time_do_not_both_fit(tmp_path: Path) -> None:
    """The file is locked while a run is charged: of four, only one fits."""
    budget = budget_in(tmp_path, epsilon=query_plan().epsilon * 1.2)
    found: list[str] = []

    def begin(number: int) -> None:
        try:
            found.append(charge(budget, query_plan(), "chats"))
        except BudgetError:
            found.append("")

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(bool, found)) == [False, False, False, True] and spent(budget) == query_plan().epsilon


@pytest.mark.parametrize(
    ("change", "text"),
    [({"dataset": "letters"}, "dataset is"), ({"num_units": 999}, "num_units is"), ({"unit": "user"}, "unit is")],
)
def test_the_budget_of_other_people_is_refused(tmp_path: Path, change, text: str) -> None:
    """Nothing is charged to it."""
    if "unit" in change:
        change = {"unit": "user", "unit_column": "id", "max_rows_per_unit": 2, "rows_kept": "first"}
    plan = query_plan(**change)
    budget = budget_in(tmp_path)
    with pytest.raises(BudgetError, match=text):
        QueryRun.begin(tmp_path / "run", plan, dataset=str(plan.dataset), budget=budget)
    assert spent(budget) == 0.0


def test_a_run_names_the_data_set_of_its_plan(tmp_path: Path) -> None:
    """Another name, or a budget without a name, is refused."""
    with pytest.raises(ValueError, match="letters"):
        QueryRun.begin(tmp_path / "run", query_plan(), dataset="letters")
    with pytest.raises(ValueError, match="is that of a data set with a name"):
        QueryRun.begin(tmp_path / "run", query_plan(dataset=None), dataset=None, budget=budget_in(tmp_path))
    assert not (tmp_path / "run").exists()


@kills(
    "the model that a query run builds on is not in the budget",
    "dpllm/privacy/budget.py",
    "        prior = _prior_entry(budget, plan)",
    "        prior = ()",
)
def test_a_trained_model_is_in_the_budget_exactly_once(tmp_path: Path) -> None:
    """By its own entry, or by one that the first run on it adds; the run states both together."""
    budget = budget_in(tmp_path)
    held = train(tmp_path / "held", budget, **FULL)
    after = prior_release(tmp_path / "held")
    assert after.budget is not None
    plan = query_plan(after=after)
    asked(tmp_path / "one", budget=budget, plan=plan)
    assert spent(budget) == epsilon([*held.history, *plan.own_history], DELTA) == plan.epsilon
    new = train(tmp_path / "new", **FULL, clip_norm=2.0)
    later = query_plan(after=prior_release(tmp_path / "new"))
    for number in range(2):
        asked(tmp_path / f"later{number}", budget=budget, plan=later)
    once = [*held.history, *plan.own_history, *new.history, *later.own_history, *later.own_history]
    assert spent(budget) == pytest.approx(epsilon(once, DELTA), rel=1e-9)
    assert len(read_budget(budget).entries) == 5


def test_an_entry_that_holds_less_than_the_model_does_not_count_for_it(tmp_path: Path) -> None:
    """A file in which the model's entry was settled lower is charged the whole model."""
    budget = budget_in(tmp_path)
    trained = train(tmp_path / "held", budget, **FULL)
    after = prior_release(tmp_path / "held")
    assert read_budget(budget).entries[0].id == after.budget[1]
    (tmp_path / "other").mkdir()
    other = budget_in(tmp_path / "other")
    plan = query_plan(after=after)
    asked(tmp_path / "run", budget=other, plan=plan)  # another file, without the entry
    assert spent(other) == pytest.approx(epsilon([*trained.history, *plan.own_history], DELTA), rel=1e-9)


def test_the_budget_of_a_crashed_run_is_settled(tmp_path: Path) -> None:
    """The plan stays charged, unless people declare the crash independent; a torn line counts as the whole plan."""
    budget, plan = budget_in(tmp_path), query_plan()
    run = QueryRun.begin(tmp_path / "run", plan, dataset="chats", budget=budget)
    run.charge("votes")
    with pytest.raises(BudgetError, match="being written"):
        settle_crashed(budget, tmp_path / "run")
    run.ledger.close()  # as a killed process leaves it
    assert settle_crashed(budget, tmp_path / "run") == 1 and spent(budget) == plan.epsilon
    torn = tmp_path / "run" / LEDGER_FILE
    result = CliRunner().invoke(app, ["budget", "settle", str(budget), str(tmp_path / "run"), "--independent"])
    assert result.exit_code == 0, result.output
    assert spent(budget) == epsilon([(VOTE, 1)], DELTA)
    with open(torn, "ab") as file:
        file.write(b'{"kind": "charge", "name": "oth')
    contents = read_ledger(torn)
    assert contents.torn_steps == 1 and stated_history(plan, contents) == tuple(plan.history)


def test_an_entry_is_not_settled_with_more_than_it_reserved(tmp_path: Path) -> None:
    """Nor as a training run's, nor from another run's ledger."""
    budget, plan = budget_in(tmp_path), query_plan()
    small = query_plan(charges=(Charge(name="votes", event=VOTE, count=1),))
    entry = charge(budget, small, "chats")
    asked(tmp_path / "run", 2, 0, independent=True)
    with pytest.raises(BudgetError, match="reserved less"):
        settle(budget, entry, read_ledger(tmp_path / "run" / LEDGER_FILE).history)
    train(tmp_path / "trained", budget, **FULL)
    trained = read_budget(budget).entries[-1]
    with pytest.raises(BudgetError, match="belongs to a training run"):
        settle(budget, trained.id, read_ledger(tmp_path / "run" / LEDGER_FILE).history)
    with pytest.raises(BudgetError, match="cannot be settled"):
        settle(budget, entry, 2)
    assert plan.num_steps == 6


def test_a_ledger_that_another_process_changes_ends_the_run(tmp_path: Path) -> None:
    """No further answer is charged to it, so none may be computed."""
    run = QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats")
    path = tmp_path / "run" / LEDGER_FILE
    shutil.copyfile(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    with pytest.raises(LedgerError, match="replaced by another file"):
        run.charge("votes")
    run.ledger.close()


def test_an_answer_outside_a_run_or_of_no_number_is_refused(tmp_path: Path) -> None:
    """The ledger itself refuses them, whoever writes to it."""
    asked(tmp_path / "run")
    with Ledger.annotate(tmp_path / "run" / LEDGER_FILE) as ledger, pytest.raises(LedgerError, match="has ended"):
        ledger.append_charge("votes", VOTE)
    run = QueryRun.begin(tmp_path / "other", query_plan(), dataset="chats")
    with pytest.raises(ValueError, match="at least 1"):
        run.ledger.append_charge("votes", VOTE, 0)
    run.finish()


@pytest.mark.parametrize("kind", ["outside", "missing", "private", "link"])
def test_only_files_of_the_folder_are_released(tmp_path: Path, kind: str) -> None:
    """Not one from elsewhere, one that is missing, one that is not for release, or a link."""
    with QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats") as run:
        (tmp_path / "else.json").write_text("1")
        (run.private_folder / "exact.json").write_text("1")
        assert run.private_folder.stat().st_mode & 0o077 == 0
        (run.folder / "link.json").symlink_to(tmp_path / "else.json")
        file = {
            "outside": tmp_path / "else.json",
            "missing": run.folder / "nothing.json",
            "private": run.private_folder / "exact.json",
            "link": run.folder / "link.json",
        }[kind]
        with pytest.raises(ValueError, match=r"only files of the run's folder|not a file in|not_for_release"):
            run.release(file)
        (run.folder / "counts.json").write_text("{}")
        run.release("counts.json")
        with pytest.raises(ValueError, match="released already"):
            run.release(run.folder / "counts.json")
    (*_, last) = read_ledger(tmp_path / "run" / LEDGER_FILE).notes.released
    assert set(last["files"]) == {"counts.json"}


def test_a_file_of_a_later_call_that_was_edited_is_found(tmp_path: Path) -> None:
    """Files that were released one by one are held to their hashes together, each as it was then."""
    with QueryRun.begin(tmp_path / "run", query_plan(), dataset="chats") as run:
        for name in ("counts.json", "texts.jsonl"):
            (run.folder / name).write_text("{}")
            run.release(name)
    assert verify(tmp_path / "run").ok
    (tmp_path / "run" / "texts.jsonl").write_text("{ }")
    assert not verify(tmp_path / "run").ok


@kills(
    "a composition counts the steps that a model had at the first run on it, and not those taken since",
    "dpllm/privacy/compose.py",
    "            if known is None or cost(plan.after.history) > cost(known):",
    "            if known is None:",
)
def test_a_model_that_was_trained_on_between_two_runs_is_composed_with_all_its_steps(tmp_path: Path) -> None:
    """The first run knows 5 steps of it, and the second one 20: whoever has both has seen the result of 20."""
    trained = train(tmp_path / "trained", steps=20, stop_after=5)
    early = query_plan(after=prior_release(tmp_path / "trained"))
    asked(tmp_path / "early", plan=early)
    with Ledger.open(tmp_path / "trained" / LEDGER_FILE, trained) as ledger:
        for number in range(5, 20):
            ledger.append_step(number, trained.event)
        ledger.append_end("completed")
    late = query_plan(after=prior_release(tmp_path / "trained"))
    asked(tmp_path / "late", plan=late)
    assert early.after is not None and sum(count for _, count in early.after.history) == 5
    both = [*trained.history, *early.own_history, *late.own_history]
    for names in (("early", "late"), ("late", "early"), ("trained", "early", "late")):
        found = compose([tmp_path / name for name in names])
        assert found.epsilon == pytest.approx(epsilon(both, DELTA), rel=1e-9), names


def test_runs_on_one_model_compose_to_one_training(tmp_path: Path) -> None:
    """The training is counted once, whether its folder is given or not; a run of other people is refused."""
    trained = train(tmp_path / "trained", **FULL)
    plan = query_plan(after=prior_release(tmp_path / "trained"))
    for name in ("a", "b"):
        asked(tmp_path / name, plan=plan)
    both = [*trained.history, *plan.own_history, *plan.own_history]
    for folders in (("a", "b"), ("trained", "a", "b"), ("b", "trained", "a")):
        found = compose([tmp_path / name for name in folders])
        assert found.epsilon == pytest.approx(epsilon(both, DELTA), rel=1e-9), folders
    alone = next(run for run in compose([tmp_path / "a", tmp_path / "b"]).runs if run.folder.name == "b")
    assert alone.epsilon == plan.epsilon and alone.num_steps == 6
    asked(tmp_path / "others", plan=query_plan(num_units=999))
    with pytest.raises(ValueError, match="used different"):
        compose([tmp_path / "a", tmp_path / "others"])
    path = tmp_path / "trained" / LEDGER_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ValueError, match="lacks lines"):
        compose([tmp_path / "trained", tmp_path / "a"])


def test_randomness_comes_from_the_operating_system(tmp_path: Path) -> None:
    """No two draws are equal, also in the same run; no seed can be given; the deviation is as asked."""
    source = Randomness()
    assert not np.array_equal(source.gaussian(100, 1.0), source.gaussian(100, 1.0))
    assert not np.array_equal(source.uniform((3, 4)), source.uniform((3, 4)))
    assert 1.9 < source.gaussian(20_000, 2.0).std() < 2.1
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stddev"):
            source.gaussian(3, wrong)
    with pytest.raises(ValueError, match="the plan has no discrete noise"):
        source.noisy([1], 1.0, 1.0)


def test_discrete_noise_is_exact_and_of_the_planned_size() -> None:
    """A multiple of 1/m with a deviation of at least σΔ; other noise is refused in its place."""
    source = Randomness("discrete")
    drawn = np.array(source.noisy([7] * 20_000, 2.0, 3.0))
    assert abs(drawn.mean() - 7) < 0.2 and 5.85 < drawn.std() < 6.15
    assert source.noisy([10**12], 10.0, 1.0) != source.noisy([10**12], 10.0, 1.0)
    for arguments, text in (
        (([1.5], 1.0, 1.0), "whole numbers only"),
        (([1], 0.0, 1.0), "above 0 and at most"),
    ):
        with pytest.raises(ValueError, match=text):
            source.noisy(*arguments)
    with pytest.raises(ValueError, match="add it with noisy"):
        source.gaussian(3, 1.0)
