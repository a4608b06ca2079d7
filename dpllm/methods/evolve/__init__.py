"""Synthetic text by votes of private records on texts of a public model (`dpllm evolve`)."""

from __future__ import annotations

from dpllm.methods.evolve.section import EvolveConfig
from dpllm.methods.evolve.words import EVOLUTION
from dpllm.registry import Method

METHOD = Method(
    name="evolve",
    section=EvolveConfig,
    words=(EVOLUTION,),
    commands=("dpllm.methods.evolve.command:register",),
    query="dpllm.methods.evolve.evolving:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
)
