"""Attacks on a released model or text: shadow models, extraction, exposure, and audits of query runs."""

from __future__ import annotations

from dpllm.registry import Method

METHOD = Method(
    name="attacks",
    commands=tuple(f"dpllm.methods.attacks.command:{name}" for name in ("attack", "exposure", "answers", "texts")),
)
