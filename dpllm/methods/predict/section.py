"""The section ``predict`` of a recipe: text drawn token by token from a public model that reads private records.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.predict` carries it out. All values
are public.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dpllm.config import values
from dpllm.config.topics import Topic
from dpllm.config.values import ConfigError

PREDICTIONS = ("invisible-ink", "logits")
MAX_TEMPERATURE = 100.0
MAX_LOGIT_CLIP = 1e4
_MOST_TOKENS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PredictedTokens(Topic):
    """The numbers on which ε rests.

    The noise multiplier of a token is s τ/c. One of `group_size`, `temperature` and `clip` may follow from the noise:
    the first that is left out, in the order clip, group_size, temperature for "invisible-ink", and group_size,
    temperature, clip for "logits". The others have defaults: 8, 1 and, for "logits", a temperature of 2 and a clip
    of 10.
    """

    kind: str = "invisible-ink"
    """The quantity that is clipped: "invisible-ink", the difference to the logits of the model without a record
    (arXiv:2507.02974), or "logits", a record's logits themselves (arXiv:2407.12108)."""
    texts: int = 20
    """The number of texts. More than one text of each group costs more; `dpllm plan` says how many cost the same."""
    max_new_tokens: int = 64
    """T: the most tokens of a text. All of them are charged, however long the texts become."""
    group_size: int | None = None
    """s: the units whose logits are averaged for a text."""
    temperature: float | None = None
    """τ: the sum is divided by it before the softmax."""
    clip: float | None = None
    """c: the most that one unit adds to the logit of a token, or takes off it, before the division by s."""
    top_k: int | None = 50
    """Draw only from the model's k likeliest tokens without a record, and those within 2c/s of them; costs no ε.
    None: from all tokens."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.choice("kind", self.kind, PREDICTIONS)
        values.integer("texts", self.texts, 1, _MOST_TOKENS)
        values.integer("max_new_tokens", self.max_new_tokens, 1, _MOST_TOKENS)
        for name in ("group_size", "top_k"):
            if getattr(self, name) is not None:
                values.integer(name, getattr(self, name), 1)
        for name, most in (("temperature", MAX_TEMPERATURE), ("clip", MAX_LOGIT_CLIP)):
            if getattr(self, name) is not None:
                self._set(name, values.between(name, getattr(self, name), 1e-6, most))


@dataclass(frozen=True, kw_only=True)
class PredictConfig(PredictedTokens):
    """How texts are made from private records.

    Its keywords are those of `PredictedTokens` and these.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    context: str | None = None
    """The text before the prompt for one record, with names of columns in braces, such as "Review: {text}". None: the
    text columns of ``data``, and an end of line. A context longer than ``data.max_length`` tokens loses its end."""
    public_context: str = ""
    """The same for the model without a record."""
    prompts: list[str] = field(default_factory=lambda: [""])
    """Public beginnings of the texts, used in turn."""
    stop: str | None = "\n"
    """A text ends before this. None: only where the model ends it."""
    rows_per_pass: int = 32
    """The most records of one forward pass; fewer need less memory."""
    cached: bool = True
    """Keep keys and values of all records of a group in memory. False: compute them again for every token."""
    file: str = "texts.jsonl"
    """Name of the released file, in the run's folder."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        if self.context is not None:
            values.text("context", self.context)
        if not isinstance(self.public_context, str):
            raise ConfigError(f"public_context must be a text, got {values.shown(self.public_context)}")
        if not isinstance(self.prompts, list) or not self.prompts or not all(isinstance(p, str) for p in self.prompts):
            raise ConfigError(f"prompts must be a list of texts, one at least, got {values.shown(self.prompts)}")
        if self.stop is not None and (not isinstance(self.stop, str) or not self.stop):
            raise ConfigError(f"stop must be a text that is not empty, or null, got {values.shown(self.stop)}")
        values.integer("rows_per_pass", self.rows_per_pass, 1)
        values.flag("cached", self.cached)
        values.own_file("file", self.file, ".jsonl")
