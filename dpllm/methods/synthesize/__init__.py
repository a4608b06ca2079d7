"""Synthetic text: data sets from released models, their evaluation, and Private Evolution without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpllm.methods.synthesize.words import SYNTHETIC_TEXT
from dpllm.registry import Method

if TYPE_CHECKING:
    import typer


def _commands(app: typer.Typer) -> None:
    from dpllm.methods.synthesize import command, evaluating

    command.register(app)
    evaluating.register(app)


METHOD = Method(
    name="synthesize",
    words=(SYNTHETIC_TEXT,),
    commands=_commands,
)
