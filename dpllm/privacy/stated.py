"""The steps whose ε is stated: those charged, or all that were planned.

Place in the flow: between the ledger and all that prints an ε.
"""

from __future__ import annotations

from dpllm.mechanism.events import Event
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
    if contents.num_steps == 0 or contents.num_steps >= plan.num_steps or contents.notes.stopped_independently:
        return tuple(contents.history)
    return ((plan.event, plan.num_steps),)
