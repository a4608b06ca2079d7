"""The section ``predict`` of a recipe: text drawn token by token from a public model that reads private records.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.predict` carries it out. All values
are public.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dpllm.config.sections import Count, Number, OneOf, OwnFile, Text, section

PREDICTIONS = ("invisible-ink", "logits")
MAX_TEMPERATURE = 100.0
MAX_LOGIT_CLIP = 1e4
_MOST_TOKENS = 1_000_000


@section
class PredictConfig:
    """How texts are made from private records.

    The noise multiplier of a token is s τ/c. One of `group_size`, `temperature` and `clip` may follow from the noise:
    the first that is left out, in the order clip, group_size, temperature for "invisible-ink", and group_size,
    temperature, clip for "logits". The others have defaults: 8, 1 and, for "logits", a temperature of 2 and a clip
    of 10.
    """

    kind: Annotated[str, OneOf(PREDICTIONS)] = "invisible-ink"
    """The quantity that is clipped: invisible-ink, the difference to the logits of the model without a record
    (arXiv:2507.02974), or logits, a record's logits themselves (arXiv:2407.12108)."""
    texts: Annotated[Count, Field(le=_MOST_TOKENS)] = 20
    """The number of texts. More than one text of each group costs more; `dpllm plan` says how many cost the same."""
    max_new_tokens: Annotated[Count, Field(le=_MOST_TOKENS)] = 64
    """T: the most tokens of a text. All of them are charged, however long the texts become."""
    group_size: Count | None = None
    """s: the units whose logits are averaged for a text."""
    temperature: Annotated[Number, Field(ge=1e-6, le=MAX_TEMPERATURE)] | None = None
    """τ: the sum is divided by it before the softmax."""
    clip: Annotated[Number, Field(ge=1e-6, le=MAX_LOGIT_CLIP)] | None = None
    """c: the most that one unit adds to the logit of a token, or takes off it, before the division by s."""
    top_k: Count | None = 50
    """Draw only from the model's k likeliest tokens without a record, and those within 2c/s of them; costs no ε.
    null: from all tokens."""
    context: Text | None = None
    """The text before the prompt for one record, with names of columns in braces, such as "Review: {text}". null: the
    text columns of data, and an end of line. A context longer than data.max_length tokens loses its end."""
    public_context: str = ""
    """The same for the model without a record."""
    prompts: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: [""])
    """Public beginnings of the texts, used in turn."""
    stop: Annotated[str, Field(min_length=1)] | None = "\n"
    """A text ends before this. null: only where the model ends it."""
    rows_per_pass: Count = 32
    """The most records of one forward pass; fewer need less memory."""
    cached: bool = True
    """Keep keys and values of all records of a group in memory. false: compute them again for every token."""
    file: Annotated[Text, OwnFile(".jsonl")] = "texts.jsonl"
    """Name of the released file, in the run's folder."""
