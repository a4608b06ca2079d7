"""Counts of public classes with noise (`dpllm count`)."""

from __future__ import annotations

from dpllm.methods.count.section import CountConfig
from dpllm.methods.count.words import LABEL_COUNTS
from dpllm.registry import Method

METHOD = Method(
    name="count",
    section=CountConfig,
    words=(LABEL_COUNTS,),
    commands=("dpllm.methods.count.command:register",),
    query="dpllm.methods.count.counting:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
)
