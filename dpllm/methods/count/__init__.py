"""Counts of public classes with noise (`dpllm count`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.methods.count.section import CountConfig
from dpllm.methods.count.words import LABEL_COUNTS
from dpllm.registry import Method

if TYPE_CHECKING:
    import typer


def _commands(app: typer.Typer) -> None:
    from dpllm.methods.count.command import register

    register(app)


def _query() -> Any:
    from dpllm.methods.count.command import QUERY

    return QUERY


def _show_plan(recipe: Path, overrides: list[str], as_json: bool) -> None:
    from dpllm.methods.queries.command import show_query_plan

    show_query_plan(recipe, overrides, as_json)


METHOD = Method(
    name="count",
    section=CountConfig,
    words=(LABEL_COUNTS,),
    commands=_commands,
    query=_query,
    show_plan=_show_plan,
)
