"""Answers of a public model for groups of private records, combined with noise (`dpllm aggregate`)."""

from __future__ import annotations

from dpllm.methods.aggregate.section import AggregateConfig
from dpllm.methods.aggregate.words import AGGREGATED
from dpllm.registry import Method

METHOD = Method(
    name="aggregate",
    section=AggregateConfig,
    events=("dpllm.methods.aggregate.thresholded:ThresholdedCounts",),
    words=(AGGREGATED,),
    commands=("dpllm.methods.aggregate.command:register",),
    query="dpllm.methods.aggregate.aggregate:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
)
