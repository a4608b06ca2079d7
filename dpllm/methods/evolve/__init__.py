"""Synthetic text by votes of private records on texts of a public model (`dpllm methods evolve`)."""

from __future__ import annotations

from dpllm.methods.evolve.words import EVOLUTION
from dpllm.registry import Method

METHOD = Method(
    name="evolve",
    section="dpllm.methods.evolve.section:EvolveConfig",
    words=(EVOLUTION,),
    query="dpllm.methods.evolve.evolution:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="Texts of a public model, chosen by noisy votes of private records.",
    examples=("dpllm methods evolve evolve_e2e privacy.epsilon=2",),
)
