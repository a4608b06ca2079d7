"""Charge a query run to the budget of its data set, and settle it.

Place in the flow: beside `dpllm.privacy.budget`, which does the same for training runs. A query run is one entry with
one event: all of its planned answers (`dpllm.mechanism.several`). It is reserved before the first answer.

A run that builds on a trained model states the ε of both. The budget counts the trained model once: by its own entry,
if it was charged to the same file; otherwise by an entry that the first query run on it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpllm.mechanism.events import Event
from dpllm.mechanism.several import Several
from dpllm.privacy.accounting import merge
from dpllm.privacy.budget import (
    Budget,
    BudgetError,
    allowance,
    changing,
    check_data,
    entry_of,
    new_entry,
    with_entry,
)
from dpllm.privacy.budget_entry import Entry
from dpllm.privacy.ledger_reader import LedgerContents
from dpllm.privacy.query_plan import QueryPlan
from dpllm.privacy.rounding import format_epsilon


def charge_queries(path: str | Path, plan: QueryPlan, dataset: str, entry_id: str | None = None) -> str:
    """Reserve all planned answers of a run, before the first of them.

    Guarantee: when the call returns, the entry is on the disk, and all entries composed, with the release on which the
    run builds, cost at most the budget. Two runs that charge at the same time are charged one after the other.

    Args:
        path: the budget file.
        plan: the plan of the run.
        dataset: public name of the data set that the run asks about.
        entry_id: as in `dpllm.privacy.budget.charge`.

    Returns:
        The id of the entry.

    Raises:
        BudgetError: the run would exceed the budget, or uses other data than the file's.
    """
    with changing(path) as (budget, put):
        check_data(budget, plan, dataset)
        prior = _prior_entry(budget, plan)
        entry = new_entry(plan, plan.event, 1, entry_id)
        _check_fits(budget, prior, entry)
        put((*budget.entries, *prior, entry))
    return entry.id


def settle_queries(path: str | Path, entry_id: str, contents: LedgerContents) -> None:
    """Replace the reservation of a query run that has ended by the answers whose ε its report states.

    Without an answer, nothing stays charged. After a stop that was declared independent, the answers that its ledger
    charges. Otherwise all planned answers (`dpllm.privacy.stated.stated_answers`).

    Args:
        path: the budget file.
        entry_id: the id that `charge_queries` returned.
        contents: what the run's ledger says.

    Raises:
        BudgetError: the entry is not in the file, is of a training run, or reserved less than the ledger charges.
    """
    with changing(path) as (budget, put):
        entry = entry_of(budget, entry_id)
        if not isinstance(entry.step, Several):
            raise BudgetError(f"entry {entry_id} of {path} is that of a training run. Settle it as one")
        if contents.num_steps == 0 and entry.steps_before == 0:
            put(with_entry(budget, replace(entry, steps_charged=0, head=contents.head.to_dict())))
            return
        charged = entry.step
        if contents.notes.stopped_independently and not contents.torn_steps:
            charged = _charged(contents.history, entry, path)
        put(
            with_entry(
                budget,
                replace(entry, step=charged, steps_charged=1, steps_before=1, head=contents.head.to_dict()),
            )
        )


def _charged(history: Sequence[tuple[Event, int]], entry: Entry, path: str | Path) -> Several:
    """Return the answers that a ledger charges as one event; refuse more than the entry reserved."""
    charged = Several.of(history)
    assert isinstance(entry.step, Several)
    reserved = dict(entry.step.parts)
    if any(count > reserved.get(event, 0) for event, count in charged.parts):
        raise BudgetError(
            f"entry {entry.id} of {path} reserved less than the run's ledger charges; it cannot be settled so. Restore "
            "the latest copy of the file"
        )
    return charged


def _prior_entry(budget: Budget, plan: QueryPlan) -> tuple[Entry, ...]:
    """Return the entry to add for the release on which a run builds; none if the file holds it already."""
    after = plan.after
    if after is None or not after.history:
        return ()
    wanted, ids = merge(after.history), (after.run, None if after.budget is None else after.budget[1])
    for entry in budget.entries:
        if entry.id in ids and entry.plan_hash == after.plan_hash:
            held = dict(merge(entry.history))
            if all(held.get(one, 0) >= count for one, count in wanted):
                return ()
    added = new_entry(plan, Several.of(wanted), 1)
    return (replace(added, id=after.run, plan_hash=after.plan_hash, steps_charged=1, steps_before=1),)


def _check_fits(budget: Budget, prior: tuple[Entry, ...], entry: Entry) -> None:
    """Raise unless all entries, the release on which the run builds and the run together keep within the budget."""
    added = [part for one in (*prior, entry) for part in one.history]
    total = budget.cost([*budget.history, *added])
    if total <= budget.epsilon:
        return
    built = "with the release on which it builds, which the file does not hold yet, " if prior else ""
    raise BudgetError(
        f"{allowance(budget, budget.entries, budget.history)}. This run would by itself, {built}cost "
        f"ε = {format_epsilon(budget.cost(added))}, and bring the total to ε = {format_epsilon(total)}. Take more "
        "noise or fewer answers (a smaller target_epsilon), or use other data"
    )
