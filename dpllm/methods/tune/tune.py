"""A private tuning: draw the runs, train all of them and release the best; its search file and its check.

The order is that of the theorem (`dpllm.mechanism.selection`): the budget is charged, then the number of runs K and the
candidate of each are drawn by the operating system's generator and written to the disk, then all K runs are trained. A
restart continues with the same draws. A failed run counts with the worst score and is not repeated. No run is skipped
because an earlier one was good enough.

K, the other runs and all scores are private. They stay in the folder `not_for_release`; the selected model is copied
into the folder `released`. `dpllm verify` checks the private folder (`verify_tuning`). Whoever has only the released
folder cannot see the number of runs, and verifies the report there.

The search file lists the distribution of the number of runs, and the candidates, which are public and fixed before the
runs:

    runs: {kind: logarithmic, mean: 10}
    candidates:
      train.learning_rate: [1.0e-3, 3.0e-3, 1.0e-2]
      privacy.clip_norm: [0.3, 1.0]

All combinations of the values are candidates, and each run draws one of them uniformly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.config import PRETRAINED_FOLDER, ConfigError, Recipe, load_recipe, save_recipe
from dpllm.config.recipe import refuse_trainer
from dpllm.config.recipe_file import recipe_to_dict
from dpllm.config.tasks import TASKS
from dpllm.config.values import nearest
from dpllm.config.versions import code_version
from dpllm.config.yaml12 import read_yaml
from dpllm.data.rows import load_train_and_eval, unit_index_of
from dpllm.mechanism.catalogue import to_fields
from dpllm.mechanism.parts import Spec
from dpllm.mechanism.selection import Selection
from dpllm.methods.tune import RECORD_FILE, RELEASED_FOLDER
from dpllm.methods.tune.record import DrawnRun, Record, TuningError, create_record, open_record, read_record
from dpllm.privacy.budget import BudgetError, charge, entry_of, mark, read_budget, settle
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, is_being_written, read_ledger
from dpllm.privacy.ledger_reader import LedgerHead
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.private_folder import known_writer
from dpllm.privacy.run_folder import is_finished
from dpllm.report.definition import SELECTED
from dpllm.report.model_card import note_selected
from dpllm.report.publishing import files_to_publish
from dpllm.report.verify import Check, Verification, verify
from dpllm.training.arguments import plan_for, training_arguments
from dpllm.training.preflight import check_recipe, to_plan
from dpllm.training.proposals import proposals

MAX_CANDIDATES = 10_000
_SECTIONS = ("model.", "train.", "public_pretrain.train.")
_OTHERS = ("privacy.clip_norm", "privacy.clipping")
_REFUSED = (
    *(
        "model.task",
        "model.start_is_independent",
        "train.output_dir",
        "train.resume_from_checkpoint",
        "train.report_to",
        "train.logging_dir",
    ),
    *("train.push_to_hub", "train.hub_model_id", "train.hub_strategy", "train.hub_token", "train.run_name"),
)


@dataclass(frozen=True)
class Search:
    """The contents of a search file.

    Raises:
        ConfigError: a key may not be searched, or has no values.
    """

    selection: Selection
    """The distribution of the number of runs."""
    values: Mapping[str, tuple[Any, ...]]
    """The values of each key of the recipe, as a dotted path."""

    def __post_init__(self) -> None:
        """Check the keys and the number of candidates."""
        number = 1
        for key, values in self.values.items():
            if key in _REFUSED or not (key in _OTHERS or key.startswith(_SECTIONS)):
                raise ConfigError(
                    f"candidates.{key} cannot be searched over: a search varies keys of {', '.join(_SECTIONS)} and "
                    f"{', '.join(_OTHERS)}, since all runs need the same data and the same ε, and their results stay "
                    "in one folder. Set it in the recipe"
                )
            if not values:
                raise ConfigError(f"candidates.{key} has no values: write a list, such as {key}: [0.1, 0.3]")
            number *= len(values)
        if number > MAX_CANDIDATES:
            raise ConfigError(f"the search has {number:,} candidates, more than {MAX_CANDIDATES:,}: give fewer values")

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """All combinations of the values, in a fixed order."""
        return [dict(zip(self.values, chosen, strict=True)) for chosen in itertools.product(*self.values.values())]


def load_search(path: str | Path) -> Search:
    """Read a search file.

    Raises:
        ConfigError: it cannot be read, or a key is missing, unknown or out of range.
    """
    try:
        raw = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    known = ("runs", "candidates")
    if not isinstance(raw, dict) or set(raw) != set(known):
        unknown = [key for key in raw if key not in known] if isinstance(raw, dict) else []
        hint = f"; {unknown[0]!r} is unknown{nearest(str(unknown[0]), known)}" if unknown else ""
        raise ConfigError(f"{path}: a search has the sections runs and candidates{hint}")
    candidates = raw["candidates"]
    if not isinstance(candidates, dict) or not candidates:
        raise ConfigError(f"{path}: candidates must be a mapping from keys of the recipe to lists of values")
    for key, values in candidates.items():
        if not isinstance(values, list):
            raise ConfigError(f"{path}: candidates.{key} must be a list of values, got {values!r}")
    try:
        selection = Selection.of(Spec.of(raw["runs"]))
    except ValueError as error:
        raise ConfigError(f"{path}: runs: {str(error).replace('selection', 'runs')}") from error
    try:
        return Search(selection, {str(key): tuple(values) for key, values in candidates.items()})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def overrides_of(candidate: Mapping[str, Any]) -> list[str]:
    """Return the recipe overrides that set a candidate's values.

    >>> overrides_of({"train.learning_rate": 0.003})
    ['train.learning_rate=0.003']
    """
    return [f"{key}={json.dumps(value)}" for key, value in candidate.items()]


_PARTIAL = f"{RELEASED_FOLDER}.partial"
Runner = Callable[[Path, Path], int]
"""Train a recipe (a file), write its output to a log file, and return the exit code."""
Tell = Callable[[str], None]


class SystemDraws:
    """The random choices of a tuning, by the operating system's generator."""

    def number_of_runs(self, selection: Selection) -> int:
        """Return K."""
        return selection.number_at(secrets.SystemRandom().random())

    def below(self, count: int) -> int:
        """Return a uniform whole number from 0 to ``count`` - 1."""
        return secrets.randbelow(count)


@dataclass(frozen=True)
class Tuning:
    """A tuning before its draws: the recipes of all candidates and their common plan."""

    folder: Path
    """train.output_dir of the recipe: the folder of the tuning."""
    search: Search
    recipes: tuple[Recipe, ...]
    """One for each candidate."""
    plan: PrivacyPlan
    """The plan of the runs; its ε is that of the release."""
    budget_file: str | None
    """The budget file that the tuning is charged to."""

    def words(self, candidate: int) -> str:
        """Describe a candidate."""
        return _words(self.search, candidate)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must not change when a tuning is continued, as JSON values."""
        recipes = json.dumps([recipe_to_dict(recipe) for recipe in self.recipes], sort_keys=True)
        return {
            "selected": selected_fields(self.plan),
            "delta": self.plan.delta,
            "candidates": [self.words(number) for number in range(len(self.recipes))],
            "recipes_sha256": hashlib.sha256(recipes.encode()).hexdigest(),
        }


def selected_fields(plan: PrivacyPlan) -> dict[str, Any]:
    """Return the event of a plan's selection as plain values, without its clip norm."""
    ((event, count),) = plan.history
    ((one, _),) = event.rounds(count)
    return to_fields(one)


def prepare(recipe_path: Path, overrides: Sequence[str], search: Search) -> Tuning:
    """Read the recipe, check it with every candidate, and plan the tuning; nothing is drawn or written.

    Raises:
        ConfigError: a tuning of this recipe has no accounting, or a candidate cannot be trained.
    """
    overrides = [*overrides, *(setting.override for setting in proposals(recipe_path, overrides))]
    plain = load_recipe(recipe_path, overrides)
    _check(plain)
    selection = json.dumps({"kind": search.selection.kind, "mean": search.selection.mean})
    own = [f"privacy.selection={selection}", "privacy.budget_file=null", "train.resume_from_checkpoint=auto"]
    recipes = [
        load_recipe(recipe_path, [*overrides, *overrides_of(candidate), *own]) for candidate in search.candidates
    ]
    plan = common_plan(recipes, lambda number: _words(search, number))
    if not math.isfinite(plan.epsilon):
        raise ConfigError("privacy.noise_multiplier=0 has no ε, so a tuning of such runs has none: add noise")
    folder = Path(str(plain.train["output_dir"])).expanduser()
    return Tuning(folder, search, tuple(recipes), plan, plain.privacy.budget_file)


def tune(tuning: Tuning, run: Runner, tell: Tell, draws: SystemDraws | None = None) -> Path | None:
    """Train all runs of a tuning, or the remaining ones, and release the best.

    Returns:
        The folder of the released model; None if every run failed, or none was drawn.

    Raises:
        TuningError: the record was edited or copied, or belongs to a different tuning; or a run has a different plan.
        BudgetError: the budget is too small, or its entry belongs to different draws.
    """
    draws = draws or SystemDraws()
    path = tuning.folder / RECORD_FILE
    if not path.exists():
        _draw(tuning, draws, path)
    else:
        tell("this tuning has begun: its draws are taken again")
    with _continued(tuning, path) as record:
        for number in range(len(record.runs)):
            if number not in record.scores:
                again = number in record.begun
                record.begin(number)
                # Repeating a deleted run would train more runs than were drawn.
                is_lost = again and not (record.folder_of(number) / LEDGER_FILE).exists()
                score = None if is_lost else _take(tuning, record, number, run)
                record.end(number, score)
                log = record.folder_of(number).with_suffix(".log")
                tell("a run has ended" if score is not None else f"a run has failed, and counts as such: see {log}")
        if not record.is_decided:
            record.decide(best_of(record, draws))
        released = None if record.selected is None else _release(tuning, record, record.selected)
        _settle(record)
    return released


def best_of(record: Record, draws: SystemDraws) -> int | None:
    """Return the number of the run with the best score, uniformly among equals; None if no run has a score."""
    scores = {number: score for number, score in record.scores.items() if score is not None}
    if not scores:
        return None
    best = [number for number, score in sorted(scores.items()) if score == max(scores.values())]
    return best[draws.below(len(best))]


def score_in(folder: Path, selected: Mapping[str, Any]) -> float | None:
    """Return the score of a run on its held-out rows, larger is better; None if the run did not finish.

    Args:
        folder: folder of the run.
        selected: the event of the selection, which its plan must match (`selected_fields`).

    Raises:
        TuningError: its plan does not match.
    """
    try:
        if not is_finished(folder):
            return None
        plan, contents = PrivacyPlan.load(folder / PLAN_FILE), read_ledger(folder / LEDGER_FILE)
    except (LedgerError, OSError, ValueError, KeyError, TypeError):
        return None
    if selected_fields(plan) != selected:
        raise TuningError(
            f"{folder} was trained under a different plan than this tuning accounts for: its data or settings "
            "changed. Restore them, or release nothing of this tuning; it stays charged"
        )
    if contents.num_steps != plan.num_steps:
        return None
    if contents.notes.score is None:
        if (contents.runs[-1]["version"], contents.runs[-1]["commit"]) != code_version()[:2]:
            raise TuningError(
                f"{folder} was finished by dpllm {contents.runs[-1]['version']}, whose ledgers hold no score: end the "
                "tuning with that version. It stays charged"
            )
        return None
    score, value = contents.notes.score
    return score.merit(value)


def _check(recipe: Recipe) -> None:
    """Refuse a recipe whose runs cannot be compared, or would leave the private folder."""
    refuse_trainer(recipe, "dpllm methods tune")
    if TASKS[recipe.model.task].score is None:
        scored = ", ".join(name for name, task in TASKS.items() if task.score is not None)
        raise ConfigError(
            f"model.task={recipe.model.task} has no score by which a tuning could compare its runs. Tune a recipe of "
            f"another task ({scored})"
        )
    if recipe.privacy.selection is not None:
        raise ConfigError(
            "privacy.selection is set by `dpllm methods tune` from the search file: leave it out of the recipe"
        )
    if not recipe.data.eval.public:
        raise ConfigError(
            "a tuning chooses by a score on held-out rows, and the ε of the release does not cover a score on private "
            "rows: give public rows as data.eval or data.eval.split, and declare them with "
            "data.eval.public=true"
        )
    if recipe.train.get("push_to_hub"):
        raise ConfigError("train.push_to_hub would upload every run of the tuning, and only one is covered: omit it")
    if recipe.train.get("report_to") not in (None, "none", []):
        raise ConfigError(
            "train.report_to would send the logs of every run out of the tuning's folder, and their number must stay "
            "secret: omit it"
        )
    if recipe.train.get("resume_from_checkpoint") not in (None, False):
        raise ConfigError("a tuning continues its runs by itself: omit train.resume_from_checkpoint")


def _words(search: Search, candidate: int) -> str:
    return ", ".join(overrides_of(search.candidates[candidate]))


def _draw(tuning: Tuning, draws: SystemDraws, path: Path) -> None:
    """Charge the budget, then draw K and the candidates and write them."""
    for name in (RELEASED_FOLDER, _PARTIAL):
        if (tuning.folder / name).exists():
            raise TuningError(
                f"{tuning.folder / name} exists, and {path} does not: the runs of that tuning cannot be drawn again. "
                "Set train.output_dir to another folder for another tuning, whose ε adds up with this one's"
            )
    entry, budget = None, tuning.budget_file
    if budget is not None:
        assert tuning.plan.dataset is not None  # the configuration requires it with a budget file
        entry = {
            "file": str(Path(budget).expanduser().resolve()),
            "entry": charge(budget, tuning.plan, tuning.plan.dataset, of_all_runs=True),
        }
    count = draws.number_of_runs(tuning.search.selection)
    runs = [DrawnRun(secrets.token_hex(8), draws.below(len(tuning.recipes))) for _ in range(count)]
    record = create_record(path, {**tuning.settings, "budget": entry}, runs)
    _mark(record)


def _mark(record: Record) -> None:
    budget = record.draws["budget"]
    if budget is not None:
        mark(budget["file"], budget["entry"], LedgerHead(record.draws_hash, 0))


def _settle(record: Record) -> None:
    budget = record.draws["budget"]
    if budget is not None:
        settle(budget["file"], budget["entry"], 1)


@contextlib.contextmanager
def _continued(tuning: Tuning, path: Path) -> Iterator[Record]:
    """Lock the record; check that it belongs to this tuning and that its draws are those that were charged."""
    record, file = open_record(path)
    with contextlib.closing(file):
        differing = [name for name, value in tuning.settings.items() if record.draws.get(name) != value]
        if differing:
            raise TuningError(
                f"{path} was drawn for other settings ({', '.join(differing)}): continue with the recipe and the "
                "search file of its start, or set train.output_dir to another folder for another tuning"
            )
        require_charged_draws(record)
        yield record


def require_charged_draws(record: Record) -> None:
    """Check that the draws are those that the budget was charged for.

    Raises:
        BudgetError: its entry is missing or has different draws.
    """
    budget = record.draws["budget"]
    if budget is None:
        return
    head = entry_of(read_budget(budget["file"]), budget["entry"]).head
    if head is None:  # a crash before the entry was marked, so no run had begun
        if record.begun:
            raise BudgetError(f"{budget['file']} is an older copy without the draws of {record.path}: restore it")
        _mark(record)
    elif LedgerHead.of(head).chain != record.draws_hash:
        raise BudgetError(
            f"entry {budget['entry']} of {budget['file']} was charged for draws different from those in {record.path}: "
            "the draws of a tuning are never repeated. Restore the record of the first start"
        )


def _take(tuning: Tuning, record: Record, number: int, run: Runner) -> float | None:
    """Train or continue one run; return its score, None if it failed."""
    drawn, folder = record.runs[number], record.folder_of(number)
    recipe, log = folder.with_suffix(".yaml"), folder.with_suffix(".log")
    if (folder / LEDGER_FILE).exists() and is_being_written(folder / LEDGER_FILE):
        raise TuningError(f"{folder} is being trained now{known_writer(folder)}: wait for its end, and start again")
    chosen = tuning.recipes[drawn.candidate]
    save_recipe(dataclasses.replace(chosen, train={**chosen.train, "output_dir": str(folder)}), recipe)
    code = run(recipe, log)
    return score_in(folder, tuning.settings["selected"]) if code == 0 else None


def run_of(folder: Path) -> Any:
    """Return the id of the run in a folder's ledger.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    return read_ledger(folder / LEDGER_FILE).runs[0]["run"]


def _release(tuning: Tuning, record: Record, number: int) -> Path:
    """Copy the files of the selected run that may be released; the ε of its report is that of the selection."""
    source, target = record.folder_of(number), tuning.folder / RELEASED_FOLDER
    if target.exists():
        if run_of(target) != run_of(source):
            raise TuningError(f"{target} is not the run that this tuning selected: restore it, or move it away")
        return target
    if SELECTED not in read_ledger(source / LEDGER_FILE).notes.facts:
        note_selected(source, tuning.words(record.runs[number].candidate))
    half = tuning.folder / _PARTIAL
    shutil.rmtree(half, ignore_errors=True)
    for name in files_to_publish(source, adapter=(source / "adapter_config.json").is_file()):
        place = half / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, place)
    if (source / PRETRAINED_FOLDER).is_dir():
        shutil.copytree(source / PRETRAINED_FOLDER, half / PRETRAINED_FOLDER)
    failed = [check for check in verify(half).checks if not check.ok]
    if failed:
        raise TuningError(
            f"the selected run does not pass `dpllm verify` ({failed[0].what}: {failed[0].detail}), and no other run "
            "may be released in its place. Restore its files"
        )
    os.replace(half, target)
    return target


_SAME = (
    *("history", "event", "num_steps", "delta", "adjacency", "unit", "unit_column", "num_units"),
    *("max_rows_per_unit", "rows_kept", "sampling", "num_examples", "dataset"),
)


def common_plan(recipes: Sequence[Recipe], words: Callable[[int], str]) -> PrivacyPlan:
    """Check that all recipes have the same event on the same data, and return the plan of the first.

    Each run is one execution of the same randomised algorithm.

    Raises:
        ConfigError: a candidate cannot be trained, or has a different cost.
    """
    privacy = recipes[0].privacy
    records, held_out = load_train_and_eval(recipes[0].data, privacy)
    if held_out is None:
        raise ConfigError(
            "a tuning compares its runs on held-out rows, and the recipe has none: set data.eval or "
            "data.eval.split to rows that are public, and data.eval.public=true"
        )
    units, first = unit_index_of(records, privacy), None
    for number, recipe in enumerate(recipes):
        try:
            check_recipe(recipe, to_train=False)
            arguments = training_arguments(to_plan(recipe.train))
            plan = plan_for(arguments, recipe.privacy, units, average=recipe.train.get("average"))
        except ValueError as error:
            raise ConfigError(f"the candidate {words(number)}: {error}") from error
        first = first or plan
        differing = [name for name in _SAME if _of(plan, name) != _of(first, name)]
        if differing:
            raise ConfigError(
                f"the candidate {words(number)} differs from {words(0)} in {', '.join(differing)} of its plan: all "
                "runs of a tuning need the same noise, sampling and number of steps, since ε is that of any of them. "
                "Leave it out, or tune it in a tuning of its own"
            )
    assert first is not None
    return first


def _of(plan: PrivacyPlan, name: str) -> object:
    value = getattr(plan, name)
    if name == "event":  # its clip norm does not change ε
        return value.rounds(plan.num_steps)
    return [(event.rounds(count)) for event, count in value] if name == "history" else value


_WHOLE = "the record of the tuning is there and its lines are chained"


def verify_tuning(folder: str | Path) -> Verification:
    """Check the record of a tuning, its runs, the choice of the released run, and the released folder."""
    folder = Path(folder)
    try:
        record = read_record(folder / RECORD_FILE)
    except TuningError as error:
        return Verification(folder, (Check(_WHOLE, False, str(error)),))
    checks = [Check(_WHOLE, True, f"drawn runs: {len(record.runs)} (private)")]
    checks += [_charged(record), _complete(record), _scores(record), _best(record)]
    released = folder / RELEASED_FOLDER
    if record.is_decided and record.selected is not None:
        checks.append(_own(record, released))
        checks += verify(released).checks
    elif released.exists():
        checks.append(Check("a model is released only after the choice", False, f"{released} exists"))
    return Verification(folder, tuple(checks))


def _charged(record: Record) -> Check:
    what = "the draws are those that the budget was charged for"
    if record.draws["budget"] is None:
        return Check(what, None, "no budget file")
    try:
        require_charged_draws(record)
    except (BudgetError, OSError) as error:
        return Check(what, False, str(error))
    return Check(what, True, f"entry {record.draws['budget']['entry']}")


def _complete(record: Record) -> Check:
    what = "every run that was drawn has ended"
    left = [run.folder for number, run in enumerate(record.runs) if number not in record.scores]
    if left:
        return Check(what, False, f"{len(left)} have not: release nothing before `dpllm methods tune` has trained them")
    return Check(what, True, f"{len(record.scores)} runs, failed ones included")


def _scores(record: Record) -> Check:
    what = "each score is that of its run's ledger"
    wrong = []
    for number, score in record.scores.items():
        if score is None:
            continue
        try:
            found = score_in(record.folder_of(number), record.draws["selected"])
        except TuningError as error:
            return Check(what, False, str(error))
        if found != score:
            wrong.append(f"{record.runs[number].folder} has {found} and was noted with {score}")
    return Check(what, not wrong, "; ".join(wrong) or "as noted")


def _best(record: Record) -> Check:
    what = "the released run has the best score"
    if not record.is_decided:
        return Check(what, None, "no run is released yet")
    scores = [score for score in record.scores.values() if score is not None]
    if record.selected is None:
        return Check(what, not scores, "no run is released" + (", but one has a score" if scores else ": all failed"))
    chosen = record.scores.get(record.selected)
    if chosen is None or chosen != max(scores):
        return Check(what, False, f"its score is {chosen}, and the best one is {max(scores, default=None)}")
    return Check(what, True, f"score {chosen:g} (private)")


def _own(record: Record, released: Path) -> Check:
    """Check that the released ledger is that of the selected run."""
    what, number = "the released model is that of the selected run", record.selected
    assert number is not None
    try:
        mine, there = (run_of(place) for place in (record.folder_of(number), released))
    except LedgerError as error:
        return Check(what, False, str(error))
    return Check(what, mine == there, f"run {there}" + ("" if mine == there else f", and the selected one is {mine}"))
