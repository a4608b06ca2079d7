"""Private tuning: runs with settings drawn from a public list, of which only the best is released."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpllm.registry import Method, MethodFolder

if TYPE_CHECKING:
    import typer

    from dpllm.report.verify import Verification

PRIVATE_FOLDER = "not_for_release"
RECORD_FILE = f"{PRIVATE_FOLDER}/tuning.jsonl"
"""Relative to the tuning's folder; readable by its owner only."""
RELEASED_FOLDER = "released"
"""The folder, inside that of the tuning, of the released model."""


def _commands(app: typer.Typer) -> None:
    from dpllm.methods.tune.command import register

    register(app)


def _verify(folder: Path) -> Verification:
    from dpllm.methods.tune.check import verify_tuning

    return verify_tuning(folder)


METHOD = Method(
    name="tune",
    commands=_commands,
    folder=MethodFolder(record=RECORD_FILE, what="a tuning", released=RELEASED_FOLDER, verify=_verify),
)
