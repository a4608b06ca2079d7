"""Whether the clip thresholds in a ledger are those of the plan's adaptive clipping: for `dpllm verify`.

Place in the flow: under `dpllm.report.verify`. A threshold moves by the noisy statistic of its step only. The statistic
itself is in no file, but the units of a step and their noise bound it, and so the next threshold. A threshold that
something else moved, such as a loop of one's own, can hold private values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dpllm.mechanism.parts import AdaptiveClipping
from dpllm.privacy.ledger_reader import LedgerContents
from dpllm.privacy.plan import PrivacyPlan

_DEVIATIONS = 10.0  # of the noise; a sound step exceeds them with a probability below 2e-23
_SAME = 1e-9  # relative; machines differ in the last digits of a logarithm


def thresholds_found(plan: PrivacyPlan, contents: LedgerContents) -> tuple[bool, str] | None:
    """Compare the thresholds of a ledger's steps with the plan's clipping.

    Args:
        plan: of the run.
        contents: of its ledger.

    Returns:
        Whether they are as the plan says, and the finding in words; None: none is needed and there is none.
    """
    clipping, path = plan.mechanism.clipping, contents.notes.thresholds
    if not isinstance(clipping, AdaptiveClipping):
        return (False, f"{len(path)} steps do: not as the plan says") if path else None
    carried = contents.num_steps - contents.torn_steps
    first_is_due = path[:1] in ([], [clipping.threshold]) or contents.torn_steps > 0
    if len(path) != carried or not first_is_due:
        return False, f"{len(path)} steps do: not as the plan says"
    wrong = next(_wrong(plan, clipping, path, contents.notes.begun_at), None)
    return (wrong is None, f"{len(path)} steps do" + ("" if wrong is None else f": {wrong}"))


def _wrong(plan: PrivacyPlan, clipping: AdaptiveClipping, path: list[float], begun_at: list[int]) -> Iterator[str]:
    """Yield each threshold that no noisy statistic of the step before can give."""
    furthest, begun = _largest_statistic(plan), set(begun_at)
    for at in range(1, len(path)):
        before, now = path[at - 1], path[at]
        if math.isclose(now, before, rel_tol=_SAME):  # the step before was drawn and not taken
            continue
        if at in begun:
            yield f"step {at + 1} of them has {now:g} after a resume, and {before:g} was charged last"
            continue
        moved = [
            clipping.at(before).updated(statistic, plan.expected_batch_size).threshold
            for statistic in (-furthest, furthest)
        ]
        if not min(moved) * (1 - _SAME) <= now <= max(moved) * (1 + _SAME):
            yield (
                f"step {at + 1} of them has {now:g}, and the noisy count of the step before moves {before:g} to "
                f"{min(moved):g} at least and {max(moved):g} at most: something else moved it"
            )


def _largest_statistic(plan: PrivacyPlan) -> float:
    """Return a bound on the size of a step's noisy statistic, in units."""
    chosen = plan.seeded or plan.noise_multiplier == 0  # such a run may take more units than it draws
    units = plan.num_units if chosen else plan.max_batch_size
    noise = plan.mechanism.noise
    variance = max(noise.variance(step, plan.num_steps) for step in (0, plan.num_steps - 1))
    return units / 2 + _DEVIATIONS * plan.mechanism.statistic_stddev * math.sqrt(variance)
