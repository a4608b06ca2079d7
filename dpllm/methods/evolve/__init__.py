"""Synthetic text by votes of private records on texts of a public model (`dpllm evolve`)."""

from __future__ import annotations

from dpllm.methods.evolve.words import EVOLUTION
from dpllm.registry import Method

METHOD = Method(
    name="evolve",
    section="dpllm.methods.evolve.section:EvolveConfig",
    words=(EVOLUTION,),
    query="dpllm.methods.evolve.evolving:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="Make synthetic text without training: a public model writes, and private records vote with noise.",
    examples=("dpllm evolve evolve_e2e privacy.epsilon=2",),
)
