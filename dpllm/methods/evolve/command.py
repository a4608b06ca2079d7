"""`dpllm evolve`: synthetic text by votes of private records.

Place in the flow: a method of `dpllm.methods.queries.command`.
"""

from __future__ import annotations

from dpllm.methods.queries.command import command_of

register = command_of(
    "evolve",
    "Make synthetic text without training: a public model writes, and private records vote with noise.",
    "dpllm evolve evolve_e2e privacy.target_epsilon=2",
)
