"""A private tuning: search files, draws, runs, choice and release."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dpllm.config import ConfigError, load_recipe
from dpllm.config.tasks import SQUARED_ERROR, TASKS
from dpllm.mechanism.selection import Selection
from dpllm.methods.tune import RECORD_FILE
from dpllm.methods.tune.record import TuningError, create_record, read_record
from dpllm.methods.tune.tune import (
    SystemDraws,
    Tuning,
    best_of,
    load_search,
    overrides_of,
    prepare,
    tune,
    verify_tuning,
)
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.budget import BudgetError, create_budget, read_budget
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.definition import SELECTED
from dpllm.report.publishing import PublishError, require_publishable
from dpllm.report.verify import Verification, verify
from tests import tiers
from tests.methods.tune.conftest import RECIPE
from tests.small_model import WORDS


def written(folder: Path, text: str) -> Path:
    path = folder / "search.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_combinations_are_candidates(search_file, recipe_file):
    """Two keys with two values each; a recipe takes their values as they are."""
    search = load_search(search_file)
    assert search.selection == Selection("logarithmic", 10)
    assert len({tuple(one.values()) for one in search.candidates}) == len(search.candidates) == 4
    recipe = load_recipe(recipe_file, overrides_of(search.candidates[0]))
    assert (recipe.train["learning_rate"], recipe.privacy.clip_norm) == (1e-4, 0.5)


RUNS = "runs: {kind: geometric, mean: 3}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("candidates: {train.learning_rate: [1]}", "sections runs and candidates"),
        (RUNS + "candidate: {train.learning_rate: [1]}", "did you mean 'candidates'"),
        (RUNS + "candidates: {}", "mapping from keys"),
        (RUNS + "candidates: {train.learning_rate: 0.1}", "must be a list"),
        (RUNS + "candidates: {train.learning_rate: []}", "has no values"),
        (RUNS + "candidates: {data.path: [a, b]}", "cannot be searched over"),
        (RUNS + "candidates: {train.output_dir: [a, b]}", "cannot be searched over"),
        (RUNS + "candidates: {train.report_to: [wandb]}", "cannot be searched over"),
        (RUNS + "candidates: {privacy.noise_multiplier: [1, 2]}", "cannot be searched over"),
        (RUNS + "candidates: {privacy.selection: [1]}", "cannot be searched over"),
        ("runs: {kind: fixed, mean: 3}\ncandidates: {train.learning_rate: [1]}", "logarithmic, geometric, poisson"),
        ("runs: {kind: geometric, mean: 0}\ncandidates: {train.learning_rate: [1]}", "between 1 and"),
        (RUNS + f"candidates: {{train.learning_rate: {list(range(10_001))}}}", "more than 10,000"),
        ("runs: [", "search.yaml"),
    ],
)
def test_other_searches_are_refused(tmp_path, text, words):
    """Data, noise and outputs are the same for all runs."""
    with pytest.raises(ConfigError, match=words):
        load_search(written(tmp_path, text))


pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")


@dataclass
class Draws(SystemDraws):
    """K is given, and counted, so that a second draw is seen; the candidates are drawn in turn."""

    number: int
    asked: list[str] = field(default_factory=list)

    def number_of_runs(self, selection: Selection) -> int:
        self.asked.append("runs")
        return self.number

    def below(self, count: int) -> int:
        self.asked.append("below")
        return (len(self.asked) - 2) % count


NEVER = Draws(-1)
NOISE = ["privacy.epsilon=null", "privacy.noise_multiplier=1"]


def never_run(recipe: Path, log: Path) -> int:
    raise AssertionError(f"{recipe} is trained")


def failing(recipe: Path, log: Path) -> int:
    return 1


def stopped(recipe: Path, log: Path) -> int:
    raise KeyboardInterrupt


@dataclass
class Told:
    """What a finished tuning of three runs left: one good, one interrupted and continued, one killed."""

    tuning: Tuning
    budget: Path
    released: Path | None
    lines: list[str]
    started: list[str]

    @property
    def folder(self) -> Path:
        return self.tuning.folder


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "search.yaml"
    path.write_text("runs: {kind: logarithmic, mean: 10}\ncandidates: {train.learning_rate: [1.0e-4, 3.0e-2]}\n")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, recipe_file: Path, search: Path, trained: Callable) -> Told:
    """Draw three runs; stop before the end of the second is noted, continue, and let the third be killed."""
    folder = tmp_path_factory.mktemp("tuning")
    budget = folder / "words.budget.json"
    create_budget(budget, dataset="words", epsilon=8.0, delta=1e-3, unit="sequence", num_units=100)
    given = [f"train.output_dir={folder / 'out'}", f"privacy.budget_file={budget}"]
    tuning = prepare(recipe_file, given, load_search(search))
    lines: list[str] = []
    started: list[str] = []

    def run(recipe: Path, log: Path) -> int:
        started.append(recipe.stem)
        code = 137 if len(started) == 4 else trained(recipe, log)
        if len(started) == 2:
            raise KeyboardInterrupt
        return code

    with pytest.raises(KeyboardInterrupt):
        tune(tuning, run, lines.append, Draws(3))
    never = Draws(-1)
    released = tune(tuning, run, lines.append, never)
    assert "runs" not in never.asked
    return Told(tuning, budget, released, lines, started)


@pytest.fixture
def copied(finished: Told, tmp_path: Path) -> Iterator[Path]:
    """A copy of the tuning's folder, whose files a test may change."""
    yield Path(shutil.copytree(finished.folder, tmp_path / "out"))


def failures(verification: Verification) -> dict[str, str]:
    return {check.what: check.detail for check in verification.checks if not check.ok}


class TestATuning:
    def test_the_target_is_the_epsilon_of_the_release(self, finished):
        """One run costs less than half of it, by itself."""
        plan = finished.tuning.plan
        assert 7.99 < plan.epsilon <= 8 and epsilon(plan.history_of_run, 1e-3) < 4
        assert {recipe.privacy.budget_file for recipe in finished.tuning.recipes} == {None}

    def test_the_draws_are_taken_again_and_only_the_interrupted_run_is_continued(self, finished):
        """Its folder is the same; a run that has ended is not taken again."""
        first, second, again, third = finished.started
        assert second == again and len({first, second, third}) == 3
        assert [run.folder for run in read_record(finished.folder / RECORD_FILE).runs] == [first, second, third]
        assert "this tuning has begun: its draws are taken again" in finished.lines

    def test_a_killed_run_counts_with_the_worst_score(self, finished):
        """It is drawn, it has ended, and it has no score."""
        record = read_record(finished.folder / RECORD_FILE)
        assert len(record.runs) == 3 and record.scores[2] is None
        assert record.selected in (0, 1) and record.scores[record.selected] == max(record.scores[0], record.scores[1])

    def test_the_released_report_states_the_selection(self, finished):
        """Its ε, its fact and its hyper-parameters; nothing is open that people could not fill in; it verifies."""
        assert finished.released == finished.folder / "released"
        assert verify(finished.released).ok
        report = json.loads((finished.released / "privacy_report.json").read_text())
        assert report["statement"]["epsilon"] == pytest.approx(finished.tuning.plan.epsilon, rel=1e-9)
        assert "best of a secret random number" in report["statement"]["words"]
        facts = {fact["name"]: fact["values"] for fact in report["definition"]["facts"]}
        record = read_record(finished.folder / RECORD_FILE)
        assert facts[SELECTED] == [finished.tuning.words(record.runs[record.selected].candidate)]
        assert not [point for point in report["open_points"] if "tuning" in point]
        card = (finished.released / "README.md").read_text()
        assert "best_of" in card and "mean: 10" in card

    def test_nothing_released_tells_the_number_of_runs(self, finished):
        """Only the selected run's own random name is in the files; no score, and no other run."""
        record = read_record(finished.folder / RECORD_FILE)
        others = [run.folder for number, run in enumerate(record.runs) if number != record.selected]
        for path in finished.released.rglob("*"):
            text = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else ""
            assert not [name for name in others if name in text], path
            assert "tuning.jsonl" not in text and '"run": 2' not in text
        assert not (finished.released / "not_for_release").exists()

    def test_the_budget_is_charged_once_for_the_selection(self, finished):
        """Not for three runs; its file still allows nothing more of this size."""
        budget = read_budget(finished.budget)
        assert len(budget.entries) == 1 and budget.entries[0].steps_charged == 1
        assert budget.spent == pytest.approx(finished.tuning.plan.epsilon, rel=1e-6)

    def test_the_whole_folder_verifies(self, finished):
        """Draws, ends, scores, choice, budget and the released model."""
        result = verify_tuning(finished.folder)
        assert result.ok, failures(result)

    def test_a_finished_tuning_is_not_taken_again(self, finished):
        """The same command returns the released folder, and starts no run."""
        assert tune(finished.tuning, never_run, finished.lines.append, NEVER) == finished.released

    def test_the_other_run_cannot_be_published(self, finished):
        """Its report states that no tuning selected it."""
        record = read_record(finished.folder / RECORD_FILE)
        other = record.folder_of(1 - record.selected)
        with pytest.raises(PublishError, match="has not selected it"):
            require_publishable(other)


class TestVerify:
    def test_an_edited_number_of_runs_is_found(self, copied):
        """One run fewer: the line's hash is wrong."""
        path = copied / RECORD_FILE
        lines = path.read_text().splitlines()
        head = json.loads(lines[0])
        head["runs"] = head["runs"][:2]
        path.write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n")
        assert (
            "line 1 was edited"
            in failures(verify_tuning(copied))["the record of the tuning is there and its lines are chained"]
        )

    def test_draws_that_were_made_again_with_right_hashes_are_found(self, copied, finished):
        """The budget's entry holds the hash of the first draws."""
        path = copied / RECORD_FILE
        before = read_record(path)
        path.unlink()
        draws = {name: value for name, value in before.draws.items() if name not in ("kind", "id", "file", "runs")}
        record = create_record(path, draws, before.runs[:2])
        for number in range(2):
            record.begin(number)
            record.end(number, before.scores[number])
        record.decide(before.selected)
        found = failures(verify_tuning(copied))
        assert "charged for draws different" in found["the draws are those that the budget was charged for"]

    def test_a_dropped_run_is_found(self, copied):
        """Its last line is cut off, and so is the choice."""
        path = copied / RECORD_FILE
        path.write_text("\n".join(path.read_text().splitlines()[:-2]) + "\n")
        assert "every run that was drawn has ended" in failures(verify_tuning(copied))

    def test_a_lost_folder_of_a_run_is_found(self, copied):
        """Its score has no ledger any more."""
        record = read_record(copied / RECORD_FILE)
        shutil.rmtree(record.folder_of(1 - record.selected))
        assert "each score is that of its run's ledger" in failures(verify_tuning(copied))

    def test_another_model_in_the_place_of_the_selected_one_is_found(self, copied):
        """The released ledger must be the selected run's."""
        record = read_record(copied / RECORD_FILE)
        shutil.rmtree(copied / "released")
        shutil.copytree(record.folder_of(1 - record.selected), copied / "released")
        assert "the released model is that of the selected run" in failures(verify_tuning(copied))

    def test_a_plan_with_another_number_of_runs_is_found(self, copied):
        """In the released folder, by whoever has no more than it."""
        path = copied / "released" / "privacy_plan.json"
        path.write_text(path.read_text().replace('"mean": 10.0', '"mean": 2.0'))
        assert "the plan is there and fits its hash" in failures(verify(copied / "released"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (["data.eval.public=false"], "data.eval.public=true"),
            (["data.eval=null", "data.eval.public=false"], "data.eval.public=true"),
            (["train.push_to_hub=true"], "push_to_hub"),
            (["train.report_to=tensorboard"], "report_to"),
            (["train.resume_from_checkpoint=true"], "resume_from_checkpoint"),
            (["privacy.seed=1"], "seed"),
            (["privacy.max_batch_size=30"], "max_batch_size"),
            (["privacy.noise_multiplier=1"], "both epsilon and noise_multiplier"),
            (["privacy.stop=independent"], "stop"),
            (["privacy.selection={kind: geometric, mean: 3}"], "leave it out of the recipe"),
            (["privacy.epsilon=null", "privacy.noise_multiplier=0"], "add noise"),
        ],
    )
    def test_recipes_that_no_tuning_covers(self, recipe_file, search, given, words):
        """Scores on private rows, logs that leave the folder, runs that are not alike."""
        with pytest.raises(ConfigError, match=words):
            prepare(recipe_file, given, load_search(search))

    @pytest.mark.parametrize(
        ("candidates", "words"),
        [
            ("train.max_steps: [2, 3]", r"train.max_steps=3 differs .* in history, event, num_steps"),
            ("train.lr_scheduler_type: [linear, no_such]", "got 'no_such'"),
        ],
    )
    def test_candidates_that_cost_something_else_or_cannot_be_trained(self, recipe_file, tmp_path, candidates, words):
        """All runs are one randomised algorithm; before anything is drawn."""
        path = tmp_path / "search.yaml"
        path.write_text(f"runs: {{kind: geometric, mean: 3}}\ncandidates: {{{candidates}}}\n")
        with pytest.raises(ConfigError, match=words):
            prepare(recipe_file, NOISE, load_search(path))


class TestDraws:
    @pytest.fixture
    def tuning(self, recipe_file, search, tmp_path) -> Tuning:
        """A tuning without a budget; nothing is trained."""
        return prepare(recipe_file, [*NOISE, f"train.output_dir={tmp_path / 'out'}"], load_search(search))

    def test_all_is_drawn_before_the_first_run(self, tuning):
        """When the first run begins, K and every candidate are on the disk; all K runs are taken, failed ones too."""
        seen = []

        def run(recipe: Path, log: Path) -> int:
            record = read_record(tuning.folder / RECORD_FILE)
            seen.append((len(record.runs), len(record.begun)))
            return 1

        assert tune(tuning, run, lambda line: None, Draws(4)) is None
        assert seen == [(4, 1), (4, 2), (4, 3), (4, 4)]
        assert not (tuning.folder / "released").exists() and verify_tuning(tuning.folder).ok

    def test_no_run_is_drawn(self, tuning):
        """A Poisson number may be 0: nothing is released."""
        assert tune(tuning, never_run, lambda line: None, Draws(0)) is None
        assert verify_tuning(tuning.folder).ok

    def test_a_restart_never_draws(self, tuning):
        """A run that was begun and left no ledger counts as failed: deleted, it would be one more than was drawn."""
        for draws in (Draws(2), NEVER):
            with pytest.raises(KeyboardInterrupt):
                tune(tuning, stopped, lambda line: None, draws)
        assert tune(tuning, never_run, lambda line: None, NEVER) is None
        record = read_record(tuning.folder / RECORD_FILE)
        assert record.scores == {0: None, 1: None} and NEVER.asked == []

    def test_a_tuning_whose_record_was_deleted_is_not_drawn_again(self, tuning):
        """The private folder may be deleted after the release; the same command must not begin another tuning."""
        for name in ("released", "released.partial"):
            (tuning.folder / name).mkdir(parents=True)
            with pytest.raises(TuningError, match=f"{name} exists, and .* does not: .* cannot be drawn again"):
                tune(tuning, never_run, lambda line: None, NEVER)
            (tuning.folder / name).rmdir()

    def test_other_settings_do_not_continue_it(self, tuning, recipe_file, tmp_path):
        """Another list of candidates is another tuning."""
        tune(tuning, failing, lambda line: None, Draws(1))
        path = tmp_path / "other.yaml"
        path.write_text("runs: {kind: logarithmic, mean: 10}\ncandidates: {train.learning_rate: [0.5]}\n")
        other = prepare(recipe_file, [*NOISE, f"train.output_dir={tuning.folder}"], load_search(path))
        with pytest.raises(TuningError, match="drawn for other settings"):
            tune(other, never_run, lambda line: None, NEVER)

    def test_a_copied_folder_is_not_continued(self, tuning, tmp_path):
        """Two copies would release two selections."""
        with pytest.raises(KeyboardInterrupt):
            tune(tuning, stopped, lambda line: None, Draws(2))
        tuning.folder.rename(tmp_path / "original")
        shutil.copytree(tmp_path / "original", tuning.folder)
        with pytest.raises(TuningError, match="is a copy"):
            tune(tuning, never_run, lambda line: None, NEVER)

    def test_ties_are_broken_by_chance(self, tuning):
        """Among the runs with the best score only."""
        tune(tuning, failing, lambda line: None, Draws(4))
        record = read_record(tuning.folder / RECORD_FILE)
        record.scores = {0: -2.0, 1: None, 2: -1.0, 3: -1.0}

        class Last(SystemDraws):
            def below(self, count: int) -> int:
                assert count == 2
                return 1

        assert best_of(record, Last()) == 3

    def test_the_systems_draws_are_uniform_and_of_the_distribution(self):
        """The chance that the mean of 1000 K leaves 10 ± 3, or a count of 2000 candidates 500 ± 120, is below 1e-8."""
        draws, selection = SystemDraws(), Selection("geometric", 10)
        numbers = [draws.number_of_runs(selection) for _ in range(1000)]
        assert min(numbers) >= 1 and 7 < sum(numbers) / 1000 < 13
        candidates = [draws.below(4) for _ in range(2000)]
        assert all(380 < candidates.count(one) < 620 for one in range(4))

    def test_a_full_budget_refuses_before_anything_is_drawn(self, recipe_file, search, tmp_path):
        """No record is written, and the budget is unchanged."""
        budget = tmp_path / "words.budget.json"
        create_budget(budget, dataset="words", epsilon=2.0, delta=1e-3, unit="sequence", num_units=100)
        given = [f"train.output_dir={tmp_path / 'out'}", f"privacy.budget_file={budget}"]
        tuning = prepare(recipe_file, given, load_search(search))
        with pytest.raises(BudgetError, match="smaller target_epsilon"):
            tune(tuning, never_run, lambda line: None, NEVER)
        assert NEVER.asked == [] and not (tmp_path / "out").exists() and read_budget(budget).entries == ()


@tiers.deep
def test_ten_runs_end_to_end(recipe_file, search, trained, tmp_path):
    """K = 10, each run trained by the program of recipes; the released model is the best and verifies."""
    tuning = prepare(recipe_file, [f"train.output_dir={tmp_path / 'out'}"], load_search(search))
    released = tune(tuning, trained, print, Draws(10))
    record = read_record(tuning.folder / RECORD_FILE)
    assert len(record.scores) == 10 and None not in record.scores.values()
    assert verify_tuning(tuning.folder).ok and released is not None
    assert read_ledger(released / LEDGER_FILE).num_steps == tuning.plan.num_steps


def test_the_runs_of_a_regression_are_compared_by_their_squared_error(
    tmp_path: Path, base_model: Path, search: Path, trained: Callable
) -> None:
    """None had a score: the runs were trained, the budget was charged, and nothing could be released."""
    for name, count in (("records", 100), ("public", 10)):
        lines = [json.dumps({"text": f"{WORDS[n % len(WORDS)]} {name}", "label": n / count}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = RECIPE.format(model=base_model, folder=tmp_path)
    recipe = recipe.replace("model: {", "model: {task: regression, ").replace(
        "data: {", "data: {format: classification, "
    )
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    tuning = prepare(tmp_path / "recipe.yaml", [f"train.output_dir={tmp_path / 'out'}"], load_search(search))
    released = tune(tuning, trained, lambda line: None, Draws(2))
    record = read_record(tuning.folder / RECORD_FILE)
    found = {number: json.loads((record.folder_of(number) / "privacy_report.json").read_text()) for number in (0, 1)}
    errors = {number: one["utility"]["held-out mean squared error after"] for number, one in found.items()}
    scores = {number: read_ledger(record.folder_of(number) / LEDGER_FILE).notes.score for number in (0, 1)}
    assert record.scores == {number: -value for number, (_, value) in scores.items()}
    assert errors == {number: f"{value:.4g}" for number, (_, value) in scores.items()}
    assert all(score == SQUARED_ERROR and value != float(errors[number]) for number, (score, value) in scores.items())
    assert released is not None and record.scores[record.selected] == max(record.scores.values())
    assert verify_tuning(tuning.folder).ok


def test_a_task_without_a_score_is_refused_before_anything_is_trained_or_charged(
    recipe_file: Path, search: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task has one; a new one without is refused by name."""
    assert all(task.score is not None for task in TASKS.values())
    bare = dataclasses.replace(TASKS["causal_lm"], score=None)
    monkeypatch.setitem(TASKS, "causal_lm", bare)
    with pytest.raises(ConfigError, match=r"model\.task=causal_lm has no score"):
        prepare(recipe_file, [], load_search(search))
