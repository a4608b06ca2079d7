"""Plans, runs and trained runs for the tests of query runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpllm.config import PrivacyConfig
from dpllm.mechanism.query import Query
from dpllm.privacy.budget import charge, create_budget, mark, settle
from dpllm.privacy.ledger import LEDGER_FILE, Ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.privacy.query_plan import Charge, QueryPlan

UNITS, DELTA = 1000, 1e-5
VOTE = Query(noise_multiplier=12.0, replaced=1.0)
OTHER = Query(noise_multiplier=30.0)


def query_plan(**change: Any) -> QueryPlan:
    """Return a plan of four votes and two other answers."""
    fields: dict[str, Any] = {
        "method": "label counts",
        "unit": "sequence",
        "adjacency": "zero-out",
        "num_units": UNITS,
        "delta": DELTA,
        "dataset": "chats",
        "charges": (Charge(name="votes", event=VOTE, count=4), Charge(name="others", event=OTHER, count=2)),
        "settings": (("clip", 0.5), ("classes", "a, b")),
    }
    return QueryPlan(**{**fields, **change})


def budget_in(folder: Path, epsilon: float = 3.0, **change: Any) -> Path:
    """Return a new budget file of the data set."""
    fields: dict[str, Any] = {"dataset": "chats", "epsilon": epsilon, "delta": DELTA, "unit": "sequence"}
    path = folder / "chats.budget.json"
    create_budget(path, **{**fields, "num_units": UNITS, **change})
    return path


def train(
    folder: Path,
    budget: Path | None = None,
    steps: int = 5,
    end: bool = True,
    stop_after: int | None = None,
    **change: Any,
) -> PrivacyPlan:
    """Write the plan and the ledger of a training run with all its steps, or stopped earlier for another reason."""
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 20, "delta": DELTA}
    plan = make_plan(PrivacyConfig(**{**settings, "dataset": "chats", **change}), UNITS, steps)
    folder.mkdir(parents=True)
    plan.save(folder / PLAN_FILE)
    entry = None if budget is None else charge(budget, plan, "chats")
    named = None if budget is None or entry is None else {"file": budget.name, "entry": entry}
    with Ledger.create(folder / LEDGER_FILE, plan, budget=named) as ledger:
        for number in range(steps if stop_after is None else stop_after):
            ledger.append_step(number, plan.event)
        if end:
            ledger.append_end(
                "completed" if stop_after is None else "stopped early", independent=stop_after is not None
            )
        if budget is not None and entry is not None:
            mark(budget, entry, ledger.head)
            settle(budget, entry, steps, ledger.head)
    return plan
