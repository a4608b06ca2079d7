"""The steps whose ε is stated: those charged, or all that were planned.

Place in the flow: between the ledger and all that prints an ε.
"""

from __future__ import annotations

from dpllm.mechanism.events import Event
from dpllm.privacy.calibration import steps_within
from dpllm.privacy.ledger import LedgerContents
from dpllm.privacy.plan import PrivacyPlan


def stated_history(plan: PrivacyPlan, contents: LedgerContents) -> tuple[tuple[Event, int], ...]:
    """Return the steps whose ε holds for what a run released so far: those charged, or all planned ones.

    The composition is proved for a number of steps that is fixed beforehand. Who stops at 3 of 20 steps because of what
    the run showed, or picks a checkpoint for its results, has used the outcome of a mechanism of up to 20 steps. The ε
    of all planned steps covers every such choice. That of the steps charged holds where all are taken, where none is,
    and where people declared that the stop depends neither on the data nor on what the run released.

    Args:
        plan: the plan of the run.
        contents: what its ledger says.
    """
    planned = planned_steps(plan, contents)
    if contents.num_steps == 0 or contents.num_steps >= planned or contents.notes.stopped_independently:
        return tuple(contents.history)
    *before, (event, taken) = contents.history  # the steps still planned follow the last of them without a new start
    return (*before, (event, taken + planned - contents.num_steps))


def planned_steps(plan: PrivacyPlan, contents: LedgerContents) -> int:
    """Return the steps that the run takes in all: those of the plan, or fewer where a resume costs more than going on.

    Args:
        plan: the plan of the run.
        contents: what its ledger says.
    """
    return min(plan.num_steps, plan.num_steps if contents.steps_allowed is None else contents.steps_allowed)


def steps_allowed(plan: PrivacyPlan, contents: LedgerContents) -> int | None:
    """Return how many steps a run that is resumed now may take in all; None: all that the plan has.

    A mechanism whose noise is correlated over steps begins anew at a resume, which may cost a round more than going on
    would have. The run then ends where its target ε, or without one the ε of its plan, would be exceeded.

    Args:
        plan: the plan of the run.
        contents: what its ledger says.

    Raises:
        ValueError: not one more step fits.
    """
    taken = contents.num_steps
    left = plan.num_steps - taken
    if not plan.event.restarts or taken == 0 or left <= 0:
        return None
    target = plan.target_epsilon if plan.target_epsilon is not None else plan.epsilon
    fits = steps_within(target, plan.delta, plan.event, left, plan.adjacency, contents.history)
    if fits == 0:
        raise ValueError(
            f"{contents.path} has {taken} of {plan.num_steps} steps, and a resumed run begins a new cycle of noise: "
            f"not one more step keeps to ε = {target:g}. Release the model of the last checkpoint"
        )
    return None if fits == left else taken + fits
