"""`dpllm predict`: private prediction, token by token.

Place in the flow: a method of `dpllm.methods.queries.command`.
"""

from __future__ import annotations

from dpllm.methods.queries.command import command_of

register = command_of(
    "predict",
    """Draw texts from a public model that reads private records, without training.

    Each text is made by a secret group of records, whose logits are clipped and averaged (private prediction,
    InvisibleInk). All tokens that the texts may have are charged before the first. `dpllm plan` prints the cost.
    """,
    "dpllm predict predict_e2e predict.texts=100",
    "dpllm predict mine.yaml predict.kind=logits privacy.target_epsilon=3 --output-dir runs/eps3",
)
