"""Counts of public classes with noise (`dpllm methods count`)."""

from __future__ import annotations

from dpllm.methods.count.words import LABEL_COUNTS
from dpllm.registry import Method

METHOD = Method(
    name="count",
    section="dpllm.methods.count.section:CountConfig",
    words=(LABEL_COUNTS,),
    query="dpllm.methods.count.counting:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="Count the records of each public class, with noise.",
    examples=("dpllm methods count label_counts privacy.epsilon=0.5",),
)
