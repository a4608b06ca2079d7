"""Compute the joint ε of several runs on the same data: ``dpllm epsilon run1 run2 …``.

A person who sees the models of several runs on one data set sees the result of all their steps, so the steps of all
ledgers are composed as one history. A budget file (`dpllm.privacy.budget`) does the same in advance, for future runs;
this module does it for finished runs.

The composition uses only public facts: plan, ledger, and the name of the data set. They do not show whether two data
sets share people, so the caller has to declare it: ``dataset=`` for runs without a name, ``shared_people=True`` for
data sets with different names or sizes, such as one that grew between two runs. That composition is valid: each step is
accounted for with its own run's N, and a person who is in only one of the data sets loses less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.mechanism.events import Event
from dpllm.mechanism.limits import ADJACENCIES
from dpllm.privacy import accounting
from dpllm.privacy.ledger import LEDGER_FILE, LedgerContents, read_ledger, refuse_lost_lines
from dpllm.privacy.ledger_reader import steps_at
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.query_plan import History, QueryPlan, load_plan
from dpllm.privacy.rounding import format_delta, format_delta_limit, format_epsilon
from dpllm.privacy.stated import stated_history


@dataclass(frozen=True, kw_only=True)
class ComposedRun:
    """One run of a composition."""

    folder: Path
    plan_hash: str
    runs: tuple[str, ...]
    """Ids in its ledger, of the first start and of each resumption."""
    history: tuple[tuple[Event, int], ...]
    """The steps that its ledger charges. If several query runs build on a model, its steps are in one of them only."""
    num_steps: int
    num_steps_planned: int
    ended: bool
    """Whether its ledger has an end. If not, the run crashed, or it is still running and may cost more."""
    epsilon: float
    """ε of this run alone, at the composition's δ; for a query run, including the model that it builds on."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Several runs on one data set, composed."""

    dataset: str
    unit: str
    unit_column: str | None
    num_units: int
    """N; the largest N if the data sets differ in size."""
    adjacency: str
    delta: float
    epsilon: float
    """ε of all steps of all runs, at `delta`; inf when one of them had no noise."""
    runs: tuple[ComposedRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, an infinite ε as the text "infinite"."""
        runs = [{**vars(run), "folder": str(run.folder), "runs": list(run.runs)} for run in self.runs]
        plain = {**vars(self), "runs": runs}
        for one in (plain, *runs):
            one["epsilon"] = _json_number(one["epsilon"])
            one.pop("history", None)
        return plain


def compose(
    folders: Sequence[str | Path],
    delta: float | None = None,
    adjacency: str | None = None,
    dataset: str | None = None,
    shared_people: bool = False,
) -> Composition:
    """Return the joint guarantee of several runs on one data set.

    Guarantee: against an observer of everything that all these runs released, each unit of the data set is
    (ε, δ)-private with the result's `epsilon`, by one privacy loss distribution over the steps of all ledgers.

    Args:
        folders: output folders of the runs, each with its plan and its ledger.
        delta: δ of the composition, below 1/N. None: the δ that all plans share.
        adjacency: "zero-out" or "replace-one". None: the adjacency that all plans share.
        dataset: name of the data set, declared by the caller, for runs whose plan has none.
        shared_people: the data sets may differ in name and size, and have people in common.

    Raises:
        ValueError: a folder is given twice, is a copy, or is a checkpoint; a ledger belongs to another plan; the runs
            use different data, or data without a name; δ or adjacency differ and are not given; a run is not private.
        LedgerError: a ledger is missing, was edited, or lost lines.
    """
    if not folders:
        raise ValueError("no run was given. Pass the output folders of the runs on one data set")
    paths = [Path(folder) for folder in folders]
    plans = [load_plan(path / PLAN_FILE) for path in paths]
    ledgers = [read_ledger(path / LEDGER_FILE) for path in paths]
    for path, plan, ledger in zip(paths, plans, ledgers, strict=True):
        check_run(path, plan, ledger)
    _check_distinct(paths, ledgers)
    name = _common_data(paths, plans, dataset, shared_people)
    adjacency = _common("adjacency", paths, [plan.adjacency for plan in plans]) if adjacency is None else adjacency
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(map(repr, ADJACENCIES))}, got {adjacency!r}")
    delta = delta if delta is not None else _common("delta", paths, [plan.delta for plan in plans])
    num_units = max(plan.num_units for plan in plans)
    if not (delta > 0 and delta * num_units < 1):
        raise ValueError(
            f"delta={format_delta(delta)} is not between 0 and 1/N = {format_delta_limit(1 / num_units)} for "
            f"N={num_units} units. At 1/N, publishing one unit outright would be allowed. "
            f"Set it to 1/(10 N) = {format_delta_limit(1 / (10 * num_units))}"
        )
    counted = _counted_once(paths, plans, ledgers, lambda history: accounting.epsilon(history, delta, adjacency))
    runs = tuple(
        ComposedRun(
            folder=path,
            plan_hash=plan.hash,
            runs=tuple(run["run"] for run in ledger.runs),
            history=history,
            num_steps=ledger.num_steps,
            num_steps_planned=plan.num_steps,
            ended=ledger.end is not None,
            epsilon=accounting.epsilon(stated_history(plan, ledger), delta, adjacency),
        )
        for path, plan, ledger, history in zip(paths, plans, ledgers, counted, strict=True)
    )
    return Composition(
        dataset=name,
        unit=plans[0].unit,
        unit_column=plans[0].unit_column,
        num_units=num_units,
        adjacency=adjacency,
        delta=delta,
        epsilon=accounting.epsilon([pair for run in runs for pair in run.history], delta, adjacency),
        runs=runs,
    )


def composition_rows(composition: Composition) -> list[tuple[str, str]]:
    """Return the composition as (name, value) rows for people."""
    unit = composition.unit
    if composition.unit_column is not None:
        unit = f"{unit} (column {composition.unit_column})"
    rows = [
        ("data set", composition.dataset),
        ("unit of privacy", f"one {unit} of {composition.num_units:,}"),
        ("adjacency", composition.adjacency),
        ("δ", format_delta(composition.delta)),
    ]
    for run in composition.runs:
        state = "" if run.ended else ", not ended: it may still cost more"
        steps = f"{run.num_steps:,} of {run.num_steps_planned:,} steps{state}"
        rows.append((f"ε of {run.folder} alone", f"{format_epsilon(run.epsilon)} ({steps})"))
    return [*rows, ("ε of all together", format_epsilon(composition.epsilon))]


def _json_number(value: float) -> float | str:
    return "infinite" if value == float("inf") else value


def _counted_once(
    paths: Sequence[Path],
    plans: Sequence[PrivacyPlan | QueryPlan],
    ledgers: Sequence[LedgerContents],
    cost: Callable[[History], float],
) -> list[tuple[tuple[Event, int], ...]]:
    """Return the steps of each run, and count the steps of a run that others build on only once.

    They are counted with the run itself, if it is given, and otherwise with the first run that builds on it. If it was
    resumed between two runs that build on it, the second one recorded more of its steps, and these are counted.

    Raises:
        ValueError: a given run has the id of the run that another builds on, but is not that run.
    """
    given = {ledger.runs[0]["run"]: path for path, ledger in zip(paths, ledgers, strict=True)}
    priors: dict[str, History] = {}
    for plan in plans:
        if plan.after is not None:
            known = priors.get(plan.after.run)
            if known is None or cost(plan.after.history) > cost(known):
                priors[plan.after.run] = plan.after.history
    seen: set[str] = set()
    histories = []
    for plan, ledger in zip(plans, ledgers, strict=True):
        own, after = plan.stated_steps(ledger), plan.after
        if after is not None and after.run in given:
            there = given[after.run] / LEDGER_FILE
            if steps_at(there, after.chain) is None:
                raise ValueError(
                    f"{there} lacks lines that it had when {ledger.path.parent} built on it: it was cut, or restored "
                    "from an older copy. Restore that run's ledger"
                )
        elif after is not None and after.run not in seen:
            seen.add(after.run)
            own = (*priors[after.run], *own)
        histories.append(own)
    return histories


def check_run(path: Path, plan: PrivacyPlan | QueryPlan, ledger: LedgerContents) -> None:
    """Raise unless the ledger belongs to the plan, is the run's own and lost no lines, and the run was private."""
    refuse_lost_lines(ledger)
    for run in ledger.runs:
        if run["plan_hash"] != plan.hash:
            raise ValueError(
                f"the ledger in {path} was written under the plan {run['plan_hash'][:12]}, but the plan in that folder "
                f"is {plan.hash[:12]}. Restore that run's plan"
            )
    above = Path(os.path.realpath(path)).parent
    if (above / LEDGER_FILE).exists() and read_ledger(above / LEDGER_FILE).runs[0]["run"] == ledger.runs[0]["run"]:
        raise ValueError(
            f"{path} is a checkpoint of the run in {above}: its copy of the ledger ends at the checkpoint, so later "
            "steps would not be counted. Pass the run's output folder"
        )
    if plan.seeded or ledger.seeded:
        raise ValueError(
            f"{path} used a fixed seed, so neither it nor a composition with it is private. Omit it only if nothing "
            "from it was released"
        )


def _check_distinct(paths: list[Path], ledgers: list[LedgerContents]) -> None:
    """Raise if a run would be counted twice: nothing shows which of two copies has all its steps."""
    folders: dict[str, int] = {}
    owners: dict[str, int] = {}
    for number, (path, ledger) in enumerate(zip(paths, ledgers, strict=True)):
        first = folders.setdefault(os.path.realpath(path), number)
        if first != number:
            raise ValueError(f"{path} and {paths[first]} are the same folder. Pass each run once")
        for run in ledger.runs:
            first = owners.setdefault(run["run"], number)
            if first != number:
                raise ValueError(
                    f"the ledgers in {path} and {paths[first]} hold the same run ({run['run']}): one is a copy of the "
                    "other, as in a checkpoint, or both continue it. Pass each run's output folder once"
                )


def _common_data(
    paths: list[Path], plans: Sequence[PrivacyPlan | QueryPlan], dataset: str | None, shared_people: bool
) -> str:
    """Return the name of the data set, or the names of the data sets, that all runs used."""
    if shared_people:
        units = {(plan.unit, plan.unit_column) for plan in plans}
        if len(units) > 1:
            raise ValueError(
                f"these runs protect different units ({', '.join(sorted(map(str, units)))}): an ε for records does not "
                "hold for a user with several records, so there is no common ε. Train again with the same unit"
            )
        return " and ".join(sorted({str(plan.dataset or dataset) for plan in plans} - {"None"})) or "without a name"
    nameless = [str(path) for path, plan in zip(paths, plans, strict=True) if plan.dataset is None]
    if nameless and dataset is None:
        raise ValueError(
            f"the plans in {', '.join(nameless)} name no data set, so nothing shows that these runs used the same "
            "one. Set privacy.dataset for future runs; for these runs, declare it with --dataset NAME"
        )
    facts = [(plan.dataset or dataset, plan.unit, plan.unit_column, plan.num_units) for plan in plans]
    names = {fact[0] for fact in facts} | ({dataset} if dataset is not None else set())
    if len(set(facts)) > 1 or len(names) > 1:
        listed = "; ".join(
            f"{path}: dataset {name!r}, unit {unit!r}, unit_column {column!r}, num_units {number}"
            for path, (name, unit, column, number) in zip(paths, facts, strict=True)
        )
        vouched = f" (declared: {dataset!r})" if dataset is not None else ""
        raise ValueError(
            f"these runs used different data or units{vouched}, so a common ε would be meaningless: {listed}. "
            "If the data sets share people, for example because one grew between the runs, compose them with "
            "--shared-people; the ε of a single run does not hold for a person who is in several"
        )
    (name,) = names
    assert name is not None
    return name


def _common(what: str, paths: list[Path], values: list[Any]) -> Any:
    if len(set(values)) > 1:
        listed = "; ".join(f"{path}: {value}" for path, value in zip(paths, values, strict=True))
        raise ValueError(f"the plans differ in {what} ({listed}). Choose one for the composition with --{what}")
    return values[0]
