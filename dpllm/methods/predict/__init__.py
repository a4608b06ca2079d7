"""Private prediction: text drawn token by token from a public model that reads private records, in secret groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.methods.predict.section import PredictConfig
from dpllm.methods.predict.words import PREDICTED_TEXT
from dpllm.registry import Method

if TYPE_CHECKING:
    import typer

    from dpllm.mechanism.events import Event


def _events() -> tuple[type[Event], ...]:
    from dpllm.methods.predict.token_draw import TokenDraw

    return (TokenDraw,)


def _commands(app: typer.Typer) -> None:
    from dpllm.methods.predict.command import register

    register(app)


def _query() -> Any:
    from dpllm.methods.predict.command import QUERY

    return QUERY


def _show_plan(recipe: Path, overrides: list[str], as_json: bool) -> None:
    from dpllm.methods.queries.command import show_query_plan

    show_query_plan(recipe, overrides, as_json)


METHOD = Method(
    name="predict",
    section=PredictConfig,
    events=_events,
    words=(PREDICTED_TEXT,),
    commands=_commands,
    query=_query,
    show_plan=_show_plan,
)
