"""`dpllm aggregate`: questions that a public model answers for groups of private records, combined with noise.

Place in the flow: a method of `dpllm.methods.queries.command`.
"""

from __future__ import annotations

from dpllm.methods.queries.command import command_of

register = command_of(
    "aggregate",
    """Answer questions about private records: a public model answers for each group, and noise is added.

    The answers are numbers in a public range, one of listed answers, or short answers that many groups give (sample and
    aggregate). Nothing is trained. `dpllm plan RECIPE` prints the cost.
    """,
    "dpllm aggregate aggregate_e2e privacy.target_epsilon=1",
)
