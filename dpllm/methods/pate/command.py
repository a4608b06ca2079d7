"""`dpllm teach`: labels or completions of public texts by a noisy vote of teachers, and a student.

Place in the flow: a method of `dpllm.methods.queries.command`.
"""

from __future__ import annotations

from dpllm.methods.queries.command import command_of

register = command_of(
    "teach",
    """Label or continue public texts by a noisy vote of models trained on disjoint units (PATE), and train a student.

    The teachers are trained without privacy, one after the other, over one base model in memory. Their votes are
    private. Each label or token costs privacy, and the student none. `dpllm plan RECIPE` prints the cost.
    """,
    "dpllm teach teach_sst2 privacy.target_epsilon=4",
)
