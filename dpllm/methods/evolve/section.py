"""The section ``evolve`` of a recipe: Private Evolution, synthetic text from a public model and noisy votes.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.evolve.evolution` carries it out.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dpllm.config.sections import Count, Number, OneOf, Text, section
from dpllm.config.values import ConfigError

FILE_FORMATS = ("jsonl", "parquet")
_PLACE = "{label}"
_Most = Annotated[Count, Field(le=1_000_000)]
_Part = Annotated[Number, Field(ge=0, le=1)]


@section
class EvolveConfig:
    """The texts of an evolution: how many, after which prompts, how they are drawn, and how the evolution goes."""

    number: _Most = 200
    """Texts of the result."""
    prompts: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: [""])
    """Public beginnings of the texts, which share them evenly; one with {label} if there are classes."""
    classes: Annotated[list[Text], Field(min_length=2)] | None = None
    """Public classes of the records. A record votes among texts of its own class; the classes share the texts
    evenly."""
    label_column: Text | None = None
    """Column of the private records that holds the class; needed with classes."""
    max_new_tokens: _Most = 64
    """The most tokens of a text after its prompt."""
    temperature: Annotated[Number, Field(gt=0, le=100)] = 1.0
    """1 draws from the model's own distribution."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Draw from the likeliest tokens with this much probability together."""
    file_format: Annotated[str, OneOf(FILE_FORMATS)] = "jsonl"
    """Of the file of texts: jsonl or parquet."""
    steps: Annotated[Count, Field(le=10_000)] = 10
    """T: histograms of votes. Each costs privacy."""
    variations: Annotated[Count, Field(le=1000)] = 3
    """Variations of each kept text that are candidates of the next step, beside the text itself."""
    keep_from: _Part = 0.2
    """A variation keeps at least this share of the words of a text, from its beginning."""
    keep_to: _Part = 0.8
    """A variation keeps at most this share."""
    embedding: Text | None = None
    """Public model whose embeddings decide which text is nearest: a folder or a Hub id. null: model.name."""
    batch_size: Count = 32
    """The most texts that are made together."""

    def __post_init__(self) -> None:
        """Check what belongs together."""
        if self.keep_from > self.keep_to:
            raise ConfigError(
                f"keep_from={self.keep_from:g} is above keep_to={self.keep_to:g}: a variation keeps a share between "
                "them"
            )
        if self.classes is None:
            if self.label_column is not None:
                raise ConfigError("label_column needs classes: list all public classes, or leave it out")
            return
        if len(set(self.classes)) < len(self.classes):
            raise ConfigError(f"classes must be at least two different names, got {self.classes!r}")
        if self.label_column is None:
            raise ConfigError("classes needs label_column, the column of the records that holds the class")
        if len(self.prompts) != 1 or _PLACE not in self.prompts[0]:
            raise ConfigError(f"prompts must be one prompt with {_PLACE} for all classes, got {self.prompts!r}")
