"""PATE: teachers on disjoint private units label public texts by a noisy vote, and a student learns the labels.

Place in the flow: beside tuning and audit, above training and query runs.
"""

from __future__ import annotations

from dpllm.methods.pate.words import PATE, PATE_TOKENS
from dpllm.registry import Method

METHOD = Method(
    name="pate",
    section="dpllm.methods.pate.section:PateConfig",
    holds_records_out=True,
    words=(PATE, PATE_TOKENS),
    query="dpllm.methods.pate.teach:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="""Public texts labelled by a noisy vote of teachers, for a student.

    The teachers are trained without privacy, one after the other, over one base model in memory. Their votes are
    private. Each label or token costs privacy, and the student none. `dpllm plan RECIPE` prints the cost.
    """,
    examples=("dpllm methods pate pate_sst2 privacy.epsilon=4",),
)
