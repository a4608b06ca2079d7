"""PATE: teachers on disjoint private units label public texts by a noisy vote, and a student learns the labels.

Place in the flow: beside tuning and audit, above training and query runs.
"""

from __future__ import annotations

from dpllm.methods.pate.section import TeachConfig
from dpllm.methods.pate.words import TEACH, TEACH_TOKENS
from dpllm.registry import Method

METHOD = Method(
    name="teach",
    section=TeachConfig,
    holds_records_out=True,
    words=(TEACH, TEACH_TOKENS),
    commands=("dpllm.methods.pate.command:register",),
    query="dpllm.methods.pate.teach:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
)
