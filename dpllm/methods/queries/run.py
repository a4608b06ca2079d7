"""A query run: a private release that is no training run, from its recipe and plan to its report.

The methods of private release (count, predict, aggregate, evolve, pate, synthesize) build on it. A charge cannot be
undone: an answer is charged before it is computed, and the budget holds all planned answers before the first one.

    with QueryRun.begin("runs/counts", plan, dataset="chats", budget="chats.budget.json") as run:
        run.charge("label counts")                     # on the disk before the answer exists
        noisy = run.randomness.noisy(counts, noise_multiplier, change)
        path.write_text(json.dumps(noisy))
        run.release(path)

The people in a training run whose model a query run builds on bear the ε of both, so plan and report state them
together (`prior_release`).
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.config import RECIPE_FILE
from dpllm.config.files import write_file
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.units import UnitIndex
from dpllm.mechanism.chacha20 import KEY_BYTES
from dpllm.mechanism.discrete_gaussian import DEVIATION_BITS, DiscreteGaussians
from dpllm.mechanism.events import Event
from dpllm.privacy import checkpoints
from dpllm.privacy.budget import charge, new_entry_id, read_budget, settle
from dpllm.privacy.calibration import least_noise
from dpllm.privacy.compose import check_run
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerError, is_being_written, read_ledger, require_own_file
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.private_folder import PRIVATE_FOLDER, note_writer, private_path
from dpllm.privacy.query_plan import Charge, PriorRelease, QueryPlan, Value, training_plan
from dpllm.privacy.rounding import format_delta, format_epsilon
from dpllm.privacy.run_folder import COMPLETED, STOPPED_EARLY, charging, is_used, make_way
from dpllm.privacy.stated import stated_history
from dpllm.registry import release_words
from dpllm.report.definition import selection_points
from dpllm.report.model_card import write_release_card
from dpllm.report.release_notes import ReleaseNotes
from dpllm.report.statement import write_report

_GRID = 1 << DEVIATION_BITS
Shape = int | tuple[int, ...]


class Randomness:
    """Random numbers from the operating system."""

    def __init__(self, level: str = "os") -> None:
        """Store the level."""
        self._level = level

    def generator(self) -> np.random.Generator:
        """Return a new generator with 256 bits of the operating system's entropy, for draws other than noise."""
        return np.random.Generator(np.random.PCG64DXSM(secrets.randbits(8 * KEY_BYTES)))

    def uniform(self, shape: Shape) -> NDArray[np.float64]:
        """Return independent numbers, uniform in [0, 1)."""
        return self.generator().random(shape)

    def gaussian(self, shape: Shape, stddev: float) -> NDArray[np.float64]:
        """Draw independent Gaussian noise with this standard deviation.

        Raises:
            ValueError: the standard deviation is not positive and finite, or the plan has discrete noise.
        """
        if self._level == "discrete":
            raise ValueError(
                "the plan has randomness='discrete', and its report says that the noise is exact: add it with noisy(), "
                "or plan the run with randomness='os'"
            )
        if not 0 < stddev < np.inf:
            raise ValueError(f"stddev must be above 0 and finite, got {stddev}: without noise nothing is private")
        return self.generator().normal(0.0, stddev, shape)

    def noisy(self, counts: Sequence[int] | NDArray[Any], noise_multiplier: float, change: float) -> list[float]:
        """Add exact discrete Gaussian noise to whole numbers.

        The noise is a multiple of 1/m, with m the largest whole number for which its standard deviation 2^40/m is at
        least ``noise_multiplier * change``. The whole numbers are multiples of 1/m too, so nothing is rounded before
        the noise is added; the result is rounded once, to 64 bits, which is post-processing.

        Args:
            counts: whole numbers, (n,).
            noise_multiplier: σ/Δ of the event that is charged (`dpllm.mechanism.query.Query`, discrete).
            change: Δ, the largest change of the numbers by one unit, in l2 norm.

        Raises:
            ValueError: a number is not whole, the standard deviation is not positive, or the plan does not have
            discrete noise.
        """
        if self._level != "discrete":
            raise ValueError("the plan has no discrete noise: plan the run with randomness='discrete'")
        values = [int(count) for count in counts]
        if any(value != count for value, count in zip(values, counts, strict=True)):
            raise ValueError("discrete noise is added to whole numbers only: round them before their change is bounded")
        stddev = noise_multiplier * change
        if not 0 < stddev <= _GRID:
            raise ValueError(f"the noise has a standard deviation above 0 and at most 2^40, got {stddev}")
        per_one = int(_GRID // stddev)
        if per_one * stddev > _GRID:  # rounded up by the division
            per_one -= 1
        drawn = DiscreteGaussians(secrets.token_bytes(KEY_BYTES)).draw(len(values))
        return [(value * per_one + int(noise)) / per_one for value, noise in zip(values, drawn, strict=True)]


FAILED = "failed"
"""The reason of an end by an error."""


class QueryRun:
    """A query run; `begin` starts it.

    Guarantee: the ledger charges every answer, if the caller computes answers only after `charge`, and records all
    other private values that it writes with `disclose`. Used as a context manager, the run ends with the block: as
    completed or stopped early, or after an exception as failed.
    """

    def __init__(
        self,
        folder: Path,
        plan: QueryPlan,
        ledger: Ledger,
        entry: tuple[Path, str] | None,
        notes: ReleaseNotes | None = None,
    ) -> None:
        """Store the open ledger; use `begin`."""
        self._notes = notes
        self.folder = folder
        self.plan = plan
        self._ledger = ledger
        self._entry = entry
        self._left = {charge.name: charge.count for charge in plan.charges}
        self._released: dict[str, dict[str, Any]] = {}
        self._ended = False

    @classmethod
    def begin(
        cls,
        folder: str | Path,
        plan: QueryPlan,
        *,
        dataset: str | None,
        budget: str | Path | None = None,
        recipe_text: str | None = None,
        notes: ReleaseNotes | None = None,
        results: Sequence[str] = (),
    ) -> QueryRun:
        """Start a run: charge all its planned answers to the budget, and write the plan and the ledger.

        Args:
            folder: folder of the run; it is created, and must not hold a run.
            plan: the plan.
            dataset: public name of the data set; required with a budget.
            budget: the budget file of the data set; None: no budget is charged.
            recipe_text: text of the recipe, to store in the folder.
            notes: facts about the release that only people know, for the report.
            results: files and folders that the run will write in its folder.

        Raises:
            ValueError: the plan names a different data set, or a result exists already, so that it could not be
            written. LedgerError: the folder holds a run. BudgetError: the budget is too small, or belongs to different
            data.
        """
        folder = Path(folder)
        if plan.dataset != dataset:
            raise ValueError(f"the plan is for the data set {plan.dataset!r}, and this run asks about {dataset!r}")
        if budget is not None and dataset is None:
            raise ValueError(f"the budget {budget} is that of a data set with a name: plan the run with its name")
        path = folder / LEDGER_FILE
        if is_used(path) or ((folder / PLAN_FILE).exists() and not path.exists()):
            raise LedgerError(
                f"{folder} holds an earlier run, whose answers stay charged: a second run there would hide them. "
                "Choose an empty output folder"
            )
        for name in results:
            if os.path.lexists(folder / name):
                raise ValueError(
                    f"{folder / name} exists already, and it is not replaced: choose an empty output folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        written_out = make_way(path, None if budget is None else str(budget))
        entry = None if budget is None else (Path(budget), new_entry_id())
        named = None if entry is None else {"file": entry[0].name, "entry": entry[1]}
        if entry is not None:
            read_budget(entry[0])  # a file that cannot be read is refused before anything is written
        ledger = Ledger.create(path, plan, budget=named)
        if entry is not None:
            with charging(ledger, *entry):
                charge(entry[0], plan, str(dataset), entry[1])
        for what, count in written_out.items():
            ledger.append_disclosure(what, count)
        plan.save(folder / PLAN_FILE)
        note_writer(folder)
        if recipe_text is not None:
            write_file(folder / RECIPE_FILE, recipe_text)
        return cls(folder, plan, ledger, entry, notes)

    @property
    def randomness(self) -> Randomness:
        """Random numbers from the operating system."""
        return Randomness(self.plan.randomness)

    @property
    def ledger(self) -> Ledger:
        """The ledger, for entries that charge nothing."""
        return self._ledger

    def charge(self, name: str, count: int = 1) -> None:
        """Charge answers; call it before any of them is computed.

        Guarantee: when the call returns, the charge is on the disk.

        Raises:
            ValueError: the plan has no such charge, or too few answers are left.
            LedgerError: the run has ended, or the ledger was replaced, cut or written by another process.
        """
        planned = self.plan.charge(name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name!r} is charged a whole number of times, at least 1, got {count!r}")
        if count > self._left[name]:
            raise ValueError(
                f"{count} more answers {name!r} were asked for, and the plan has {self._left[name]} of {planned.count} "
                "left. End the run here, or plan more answers in a new run"
            )
        self._ledger.append_charge(name, planned.event, count)
        self._left[name] -= count

    def left(self, name: str) -> int:
        """Return how many answers of a charge are left."""
        self.plan.charge(name)
        return self._left[name]

    def disclose(self, what: str, count: int = 1) -> None:
        """Record that a value was written that depends on the private data and that ε does not cover."""
        self._ledger.append_disclosure(what, count)

    def fact(self, name: str, value: str | int | float) -> None:
        """Record a fact of the run for the report; it may depend on the private data only in ways that ε covers."""
        self._ledger.append_fact(name, value)

    def open_point(self, text: str) -> None:
        """Record a reason not to release before people have resolved it."""
        self._ledger.append_open_point(text)

    def note_units(self, units: UnitIndex) -> None:
        """Record the reasons to doubt that a unit holds all records of one person."""
        for doubt in units.doubts(self.plan.unit_column):
            self.open_point(doubt)

    @property
    def private_folder(self) -> Path:
        """The folder for files that are not for release, created if missing, readable by its owner only."""
        return private_path(self.folder, f"{PRIVATE_FOLDER}/any").parent

    def release(self, *files: str | Path) -> None:
        """Record files of the folder that may be published, by size and hash; they must not change afterwards.

        The ledger gets one entry with all of them at the end of the run: with an entry per call, a folder in which a
        later file was edited would still match the earlier entry.

        Raises:
            ValueError: a file is not in the folder, is missing, may never be released, or is released already.
        """
        names = [self._name(Path(file)) for file in files]
        if known := sorted(set(names) & set(self._released)):
            raise ValueError(f"{known[0]} is released already: release each file once")
        self._released |= checkpoints.seal(self.folder, names)

    def _name(self, file: Path) -> str:
        """Return the name of a file relative to the folder; refuse one that cannot be released."""
        inside = file if file.is_absolute() else (file if file.exists() else self.folder / file)
        try:
            name = inside.resolve().relative_to(self.folder.resolve()).as_posix()
        except ValueError as error:
            raise ValueError(f"{file} is not in {self.folder}: only files of the run's folder are released") from error
        if not (self.folder / name).is_file() or (self.folder / name).is_symlink():
            raise ValueError(f"{file} is not a file in {self.folder}: write it before it is released")
        if name.split("/")[0] == PRIVATE_FOLDER:
            raise ValueError(f"{file} is in {PRIVATE_FOLDER}/, which ε does not cover. Release other files")
        return name

    def finish(self, independent: bool = False) -> None:
        """End the run: settle the budget, and write report and card. A second call does nothing.

        Args:
            independent: declares that the run stopped before its planned answers for a reason that depends neither on
                the private data nor on its answers. Its ε is then that of the charged answers.
        """
        early = any(self._left.values())
        self._end(STOPPED_EARLY if early else COMPLETED, early and independent)

    def _end(self, reason: str, independent: bool) -> None:
        if self._ended:
            return
        self._ended = True
        if self._released:
            self._ledger.append_released(self.folder.resolve().name, self._released)
        self._ledger.append_end(reason, independent)
        self._ledger.close()
        contents = read_ledger(self._ledger.path)
        if self._entry is not None:
            keep = not contents.answers_end_independently
            settle(*self._entry, contents.history, contents.head, keep_reserved=keep)
        write_release_card(self.folder, write_report(self.folder, self.plan, contents, self._notes))

    def __enter__(self) -> QueryRun:
        """Return the run itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run: after an exception as failed, with all that was charged."""
        if error is None:
            self.finish()
        else:
            self._end(FAILED, independent=False)


@dataclasses.dataclass(frozen=True)
class QueryCommand:
    """One method: from its recipe to its release."""

    reading: str
    """Message while `read` runs."""
    read: Callable[[QueryRecipe], Any]
    """Reads the data that plan and run need."""
    plan: Callable[[QueryRecipe, Any], Any]
    """Plans the run from the recipe and the data; nothing is charged."""
    carry_out: Callable[[QueryRecipe, Any, Any, Callable[[str], None]], dict[str, Any]]
    """Runs the recipe with data, plan and a function that prints a line; returns the values to show at the end."""


def prior_release(folder: str | Path) -> PriorRelease:
    """Read the released training run of a folder, for `QueryPlan.after`.

    Guarantee: the history is that whose ε the run's own report states. A run whose ε may still grow, or does not hold,
    is refused.

    Raises:
        ValueError: the folder holds no training run, plan and ledger do not belong together, the run was not private,
            has not ended, or is one of a private tuning that did not select it.
        LedgerError: the ledger is missing or was edited; or it is a copy of one whose stop was declared independent,
            and the original may have been resumed since.
    """
    folder = Path(folder)
    plan = training_plan(folder, "A run that builds on a model")
    ledger = folder / LEDGER_FILE
    contents = read_ledger(ledger)
    check_run(folder, plan, contents)
    if contents.end is None or is_being_written(ledger):
        raise ValueError(
            f"the run in {folder} has not ended, or crashed: it may still take steps, and its ε would grow. Let it "
            "end, or resume it"
        )
    if contents.notes.stopped_independently:
        require_own_file(contents)  # a copy from before a resume states fewer steps than were taken
    if points := selection_points(plan, contents):
        raise ValueError(f"{folder}: {points[0]}")
    budget = contents.runs[0].get("budget")
    return PriorRelease(
        folder=folder.resolve().name,
        run=str(contents.runs[0]["run"]),
        plan_hash=plan.hash,
        chain=contents.chain,
        history=tuple(stated_history(plan, contents)),
        unit=plan.unit,
        unit_column=plan.unit_column,
        num_units=plan.num_units,
        dataset=plan.dataset,
        budget=None if budget is None else (str(budget["file"]), str(budget["entry"])),
    )


def plan_from(
    recipe: QueryRecipe,
    method: str,
    num_units: int,
    charges_of: Callable[[float], Sequence[tuple[str, Event, int]]],
    *,
    settings: Sequence[tuple[str, Value]] = (),
    randomness: str = "os",
) -> QueryPlan:
    """Plan a recipe with its noise multiplier, or with noise calibrated to its target ε.

    Args:
        recipe: of the run.
        method: of `dpllm.registry.release_words`.
        num_units: N.
        charges_of: maps σ/Δ to the charges: name, event, count.
        settings: public settings that determine sensitivity and events.
        randomness: "os" or "discrete".

    Raises:
        ValueError: δ is out of range, or no noise reaches the target.
    """
    privacy, delta = recipe.privacy, recipe.privacy.delta_for(num_units)
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.epsilon is not None
        sigma = least_noise(
            privacy.epsilon,
            delta,
            lambda at: [(event, count) for _, event, count in charges_of(at)],
            privacy.adjacency,
        )
    return plan_with(recipe, method, num_units, charges_of(sigma), settings=settings, randomness=randomness)


def plan_with(
    recipe: QueryRecipe,
    method: str,
    num_units: int,
    charges: Sequence[tuple[str, Event, int]],
    *,
    settings: Sequence[tuple[str, Value]] = (),
    randomness: str = "os",
) -> QueryPlan:
    """Plan a recipe whose charges are known; arguments as for `plan_from`.

    Raises:
        ValueError: δ is out of range.
    """
    privacy = recipe.privacy
    return QueryPlan(
        unit=privacy.protects,
        adjacency=privacy.adjacency,
        max_rows_per_unit=privacy.max_rows_per_unit,
        unit_column=privacy.unit,
        rows_kept=privacy.rows_kept if privacy.protects == "user" else None,
        dataset=privacy.dataset,
        method=method,
        num_units=num_units,
        charges=tuple(Charge(name=name, event=event, count=count) for name, event, count in charges),
        settings=tuple(settings),
        delta=privacy.delta_for(num_units),
        target_epsilon=privacy.epsilon,
        randomness=randomness,
    )


def begin_from(recipe: QueryRecipe, plan: QueryPlan, **more: Any) -> QueryRun:
    """Begin the run of a recipe with its folder, budget, recipe file and release notes.

    Raises:
        ValueError: as `QueryRun.begin`.
    """
    return QueryRun.begin(
        recipe.output_dir,
        plan,
        dataset=recipe.privacy.dataset,
        budget=recipe.privacy.budget_file,
        recipe_text=recipe.to_yaml(),
        notes=ReleaseNotes(**dataclasses.asdict(recipe.release)),
        **more,
    )


def format_query_plan(plan: QueryPlan) -> list[tuple[str, str]]:
    """Format a plan as (name, value) rows."""
    unit = plan.unit if plan.unit == "sequence" else f"user (column {plan.unit_column})"
    rows = [
        ("release", release_words()[plan.method].result),
        ("unit of privacy", unit),
        ("units N", f"{plan.num_units:,}"),
    ]
    if plan.max_rows_per_unit is not None:
        rows.append(("rows of one user at most", f"{plan.max_rows_per_unit} ({plan.rows_kept})"))
    rows += [
        (f"{charge.name}, at most", f"{charge.count:,}, each {charge.event.words().accounted_as}")
        for charge in plan.charges
    ]
    rows += [(name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in plan.settings]
    if plan.after is not None:
        rows.append(("builds on the model of", f"{plan.after.folder}; ε is that of both together"))
    rows += [
        ("δ", format_delta(plan.delta)),
        ("ε, zero-out", format_epsilon(plan.epsilon_under("zero-out"))),
        ("ε, replace-one", format_epsilon(plan.epsilon_under("replace-one"))),
        ("adjacency of the headline", plan.adjacency),
        ("randomness of the noise", plan.randomness),
    ]
    return rows
