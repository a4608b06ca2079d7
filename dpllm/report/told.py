"""What a report says in another way about training runs and query runs.

Place in the flow: between the two kinds of runs (`dpllm.report.statement`, `dpllm.report.query_statement`) and the
report, which is put together in the same way from either.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpllm.report.models import Assumption, CrossCheck, Definition, Parameters, Statement, Steps
from dpllm.report.models_plan import QueryParameters


@dataclass(frozen=True, kw_only=True)
class Told:
    """The parts of a report that depend on the kind of the run."""

    statement: Statement
    trusted: str
    """Who sees the data."""
    definition: Definition
    kind_of_accounting: str
    event: str
    composition: str
    cross_checks: tuple[CrossCheck, ...]
    steps: Steps
    parameters: Parameters | QueryParameters
    assumptions: tuple[Assumption, ...]
    open_points: tuple[str, ...]
    command: str | None
    """The command that computes ε from the numbers alone."""
