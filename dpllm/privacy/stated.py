"""Determine the steps whose ε is stated: the charged steps, or all planned steps.

All code that prints an ε uses this. `dpllm.privacy.plan` and `dpllm.privacy.query_plan` define these steps for their
kind of run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpllm.mechanism.events import Event
from dpllm.privacy.accounting import Guarantee, merge, of_starts
from dpllm.privacy.calibration import steps_within
from dpllm.privacy.ledger_reader import LedgerContents

if TYPE_CHECKING:
    from dpllm.privacy.plan import Plan, PrivacyPlan


def stated_guarantee(plan: Plan, contents: LedgerContents) -> Guarantee:
    """Return the guarantee of what a run has released so far: that of its stated steps (`stated_history`)."""
    return plan.guarantee.of(stated_history(plan, contents))


def stated_history(plan: Plan, contents: LedgerContents) -> tuple[tuple[Event, int], ...]:
    """Return the steps whose ε covers what a run has released so far: the charged steps, or all planned steps.

    The composition is proved for a number of steps that is fixed in advance. A person who stops at 3 of 20 steps
    because of the run's output, or who picks a checkpoint by its results, has used the outcome of a mechanism of up to
    20 steps. The ε of all planned steps covers every such choice. The ε of the charged steps holds in three cases: all
    planned steps were taken, none was taken, or people declared that the stop depends neither on the data nor on the
    run's releases. For the same reason, starts that cost less than the plan's steps without a resume are stated with
    the ε of the latter (`dpllm.privacy.accounting.of_starts`). A declaration concerns the last stop only; earlier
    resumes may have depended on the releases, so the starts are then stated with at least the ε of the same number of
    steps without a resume.

    A query run is stated together with the release on which it builds, whether or not it charged anything.
    """
    before = () if plan.after is None else plan.after.history
    return (*before, *plan.stated_steps(contents))


def claimed_history(plan: PrivacyPlan, contents: LedgerContents) -> Sequence[tuple[Event, int]]:
    """Return the steps whose ε an audit tests: those that the model has taken, or the selection among runs."""
    return contents.history if plan.selection is None else plan.history


def steps_of_selection(plan: PrivacyPlan, contents: LedgerContents) -> tuple[tuple[Event, int], ...]:
    """Return the selection among runs of the plan, which covers any stop of this run, for a run that took a step.

    A single start with at most the planned steps is the beginning of a run of the plan, although its rounds may differ:
    the rounds of noise that is correlated over all steps depend on the number of steps.

    Raises:
        ValueError: the run has more rounds than a run of the plan, so it is not one of those that are accounted for.
    """
    (event, taken), *later = contents.history
    if not later and event == plan.event and taken <= plan.num_steps:
        return tuple(plan.history)
    planned, charged = (dict(merge(history)) for history in (plan.history_of_run, contents.history))
    if any(count > planned.get(one, 0) for one, count in charged.items()):
        raise ValueError(
            f"{contents.path} charges more than a complete run of its plan, so the selection's ε does not cover it. Do "
            "not release this run"
        )
    return tuple(plan.history)


def stated_starts(
    history: Sequence[tuple[Event, int]], planned: int, begins: bool, steps_of_plan: int
) -> tuple[tuple[Event, int], ...]:
    """Return the steps whose ε covers a run that was not declared to be stopped independently.

    Args:
        history: the charged steps.
        planned: steps of all starts together.
        begins: whether the last start has taken no step yet.
        steps_of_plan: T, without a resume.
    """
    if not history:
        return ()
    taken = sum(count for _, count in history)
    found = tuple(history) if taken >= planned else with_planned(history, planned, begins)
    return _at_least_without_a_resume(found, steps_of_plan)


def taken_starts(history: Sequence[tuple[Event, int]]) -> tuple[tuple[Event, int], ...]:
    """Return the steps whose ε covers a run that took no step, or whose last stop was declared independent."""
    return _at_least_without_a_resume(tuple(history), None)


def _at_least_without_a_resume(
    starts: tuple[tuple[Event, int], ...], steps_of_plan: int | None
) -> tuple[tuple[Event, int], ...]:
    events = {event for event, _ in starts}
    if len(events) != 1:
        return starts  # of several events: the report refuses such a ledger
    return tuple(of_starts(events.pop(), [count for _, count in starts], steps_of_plan))


def with_planned(history: Sequence[tuple[Event, int]], planned: int, begins: bool) -> tuple[tuple[Event, int], ...]:
    """Return the charged steps and the remaining planned steps, by start.

    Args:
        history: the charged steps, at least one.
        planned: steps of all starts together, at least those charged.
        begins: whether the last start has taken no step yet. If a start begins a new cycle of noise, its planned steps
            are then counted separately.
    """
    *before, (event, taken) = history
    left = planned - sum(count for _, count in history)
    if begins and event.restarts:
        return (*history, (event, left))
    return (*before, (event, taken + left))


def planned_steps(plan: Plan, contents: LedgerContents) -> int:
    """Return the total number of steps of the run: the plan's, or fewer if a resume costs extra."""
    return min(plan.num_steps, plan.num_steps if contents.steps_allowed is None else contents.steps_allowed)


def steps_allowed(plan: PrivacyPlan, contents: LedgerContents) -> int | None:
    """Return the total number of steps that a run resumed now may take; None: all steps of the plan.

    A mechanism whose noise is correlated over steps restarts at a resume, which may cost one additional round. The run
    then ends before it exceeds its target ε or, without a target, its plan's ε.

    Raises:
        ValueError: no further step fits.
    """
    taken = contents.num_steps
    left = plan.num_steps - taken
    if not plan.event.restarts or taken == 0 or left <= 0:
        return None
    if plan.selection is not None:
        raise ValueError(
            f"{contents.path} has {taken} of {plan.num_steps} steps, and a resumed run starts a new noise cycle: it "
            "would cost more than the other runs of its selection. It counts as a failed run"
        )
    target = plan.target_epsilon if plan.target_epsilon is not None else plan.epsilon
    fits = steps_within(target, plan.delta, plan.event, left, plan.adjacency, contents.history)
    if fits == 0:
        raise ValueError(
            f"{contents.path} has {taken} of {plan.num_steps} steps, and a resumed run starts a new noise cycle: "
            f"no further step stays within ε = {target:g}. Release the model of the last checkpoint"
        )
    return None if fits == left else taken + fits
