"""Synthetic text: data sets from released models, their evaluation, and Private Evolution without training."""

from __future__ import annotations

from dpllm.methods.synthesize.words import SYNTHETIC_TEXT
from dpllm.registry import Method

METHOD = Method(
    name="synthesize",
    words=(SYNTHETIC_TEXT,),
    commands=("dpllm.methods.synthesize.command:synthesize", "dpllm.methods.synthesize.evaluating:evaluate"),
)
