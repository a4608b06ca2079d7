"""Answers of a public model for groups of private records, combined with noise (`dpllm methods aggregate`)."""

from __future__ import annotations

from dpllm.methods.aggregate.words import AGGREGATED
from dpllm.registry import Method

METHOD = Method(
    name="aggregate",
    section="dpllm.methods.aggregate.section:AggregateConfig",
    events=("dpllm.methods.aggregate.thresholded:ThresholdedCounts",),
    words=(AGGREGATED,),
    query="dpllm.methods.aggregate.aggregate:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="""Noisy answers of a public model about groups of records.

    The answers are numbers in a public range, one of listed answers, or short answers that many groups give (sample and
    aggregate). Nothing is trained. `dpllm plan RECIPE` prints the cost.
    """,
    examples=("dpllm methods aggregate aggregate_e2e privacy.epsilon=1",),
)
