"""Private prediction: text drawn token by token from a public model that reads private records, in secret groups."""

from __future__ import annotations

from dpllm.methods.predict.words import PREDICTED_TEXT
from dpllm.registry import Method

METHOD = Method(
    name="predict",
    section="dpllm.methods.predict.section:PredictConfig",
    events=("dpllm.methods.predict.token_draw:TokenDraw",),
    words=(PREDICTED_TEXT,),
    query="dpllm.methods.predict.run:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
    carry_out="dpllm.methods.queries.command:run_method",
    help="""Texts of a public model that reads private records.

    Each text is made by a secret group of records, whose logits are clipped and averaged (private prediction,
    InvisibleInk). All tokens that the texts may have are charged before the first. `dpllm plan` prints the cost.
    """,
    examples=("dpllm methods predict predict_e2e predict.texts=100",),
)
