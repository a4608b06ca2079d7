"""Answers of a public model for groups of private records, combined with noise (`dpllm aggregate`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.methods.aggregate.section import AggregateConfig
from dpllm.methods.aggregate.words import AGGREGATED
from dpllm.registry import Method

if TYPE_CHECKING:
    import typer

    from dpllm.mechanism.events import Event


def _events() -> tuple[type[Event], ...]:
    from dpllm.methods.aggregate.thresholded import ThresholdedCounts

    return (ThresholdedCounts,)


def _commands(app: typer.Typer) -> None:
    from dpllm.methods.aggregate.command import register

    register(app)


def _query() -> Any:
    from dpllm.methods.aggregate.command import QUERY

    return QUERY


def _show_plan(recipe: Path, overrides: list[str], as_json: bool) -> None:
    from dpllm.methods.queries.command import show_query_plan

    show_query_plan(recipe, overrides, as_json)


METHOD = Method(
    name="aggregate",
    section=AggregateConfig,
    events=_events,
    words=(AGGREGATED,),
    commands=_commands,
    query=_query,
    show_plan=_show_plan,
)
