"""Synthetic text by votes of private records on texts of a public model (`dpllm evolve`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.methods.evolve.section import EvolveConfig
from dpllm.methods.evolve.words import EVOLUTION
from dpllm.registry import Method

if TYPE_CHECKING:
    import typer


def _commands(app: typer.Typer) -> None:
    from dpllm.methods.evolve.command import register

    register(app)


def _query() -> Any:
    from dpllm.methods.evolve.command import QUERY

    return QUERY


def _show_plan(recipe: Path, overrides: list[str], as_json: bool) -> None:
    from dpllm.methods.queries.command import show_query_plan

    show_query_plan(recipe, overrides, as_json)


METHOD = Method(
    name="evolve",
    section=EvolveConfig,
    words=(EVOLUTION,),
    commands=_commands,
    query=_query,
    show_plan=_show_plan,
)
