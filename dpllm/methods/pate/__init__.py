"""PATE: teachers on disjoint private units label public texts by a noisy vote, and a student learns the labels.

Place in the flow: beside tuning and audit, above training and query runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.methods.pate.section import TeachConfig
from dpllm.methods.pate.words import TEACH, TEACH_TOKENS
from dpllm.registry import Method

if TYPE_CHECKING:
    import typer


def _commands(app: typer.Typer) -> None:
    from dpllm.methods.pate.command import register

    register(app)


def _query() -> Any:
    from dpllm.methods.pate.command import QUERY

    return QUERY


def _show_plan(recipe: Path, overrides: list[str], as_json: bool) -> None:
    from dpllm.methods.queries.command import show_query_plan

    show_query_plan(recipe, overrides, as_json)


METHOD = Method(
    name="teach",
    section=TeachConfig,
    holds_records_out=True,
    words=(TEACH, TEACH_TOKENS),
    commands=_commands,
    query=_query,
    show_plan=_show_plan,
)
