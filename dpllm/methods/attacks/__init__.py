"""Attacks on a released model or text: shadow models, extraction, exposure, and audits of query runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpllm.registry import Method

if TYPE_CHECKING:
    import typer


def _audit_commands(app: typer.Typer) -> None:
    from dpllm.methods.attacks.command import register

    register(app)


METHOD = Method(
    name="attacks",
    audit_commands=_audit_commands,
)
