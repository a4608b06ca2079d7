"""Private prediction: text drawn token by token from a public model that reads private records, in secret groups."""

from __future__ import annotations

from dpllm.methods.predict.section import PredictConfig
from dpllm.methods.predict.words import PREDICTED_TEXT
from dpllm.registry import Method

METHOD = Method(
    name="predict",
    section=PredictConfig,
    events=("dpllm.methods.predict.token_draw:TokenDraw",),
    words=(PREDICTED_TEXT,),
    commands=("dpllm.methods.predict.command:register",),
    query="dpllm.methods.predict.run:QUERY",
    show_plan="dpllm.methods.queries.command:show_query_plan",
)
