"""The guarantee of a query run for programs: the block of metadata in its card.

Place in the flow: under `dpllm.report.model_card`.
"""

from __future__ import annotations

import math
from typing import Any

from dpllm.privacy.rounding import up


def queries_metadata(report: Any) -> dict[str, Any]:
    """Return the guarantee of a query run; one that is not private has an infinite ε.

    Args:
        report: of a query run.
    """
    statement, accounting, plan = report.statement, report.accounting, report.checkable.plan

    def number(value: float) -> float | str:
        return float(up(value)) if statement.private and math.isfinite(value) else "infinite"

    return {
        "private": statement.private,
        "epsilon": number(statement.epsilon),
        "delta": statement.delta,
        "unit": "record" if statement.unit == "sequence" else "user",
        "adjacency": statement.adjacency,
        "epsilon_by_adjacency": {name: number(value) for name, value in accounting.epsilon.items()},
        "mechanism": f"{plan.method}: {accounting.event}",
        "accountant": f"PLD, {accounting.tool} {accounting.tool_version}",
        "num_answers": accounting.steps.stated,
        "num_units": accounting.parameters.num_units,
        **({} if plan.after is None else {"together_with_the_model_of": plan.after["folder"]}),
    }
