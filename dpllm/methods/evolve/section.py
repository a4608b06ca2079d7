"""The section ``evolve`` of a recipe: Private Evolution, synthetic text from a public model and noisy votes.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.evolve.evolution` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dpllm.config import values
from dpllm.config.topics import Topic

FILE_FORMATS = ("jsonl", "parquet")
_PLACE = "{label}"


@dataclass(frozen=True, kw_only=True)
class EvolveTexts(Topic):
    """The texts of an evolution: how many, after which prompts, and how they are drawn."""

    number: int = 200
    """Texts of the result."""
    prompts: list[str] = field(default_factory=lambda: [""])
    """Public beginnings of the texts, which share them evenly; one with {label} if there are classes."""
    classes: list[str] | None = None
    """Public classes of the records. A record votes among texts of its own class; the classes share the texts
    evenly."""
    label_column: str | None = None
    """Column of the private records that holds the class; needed with `classes`."""
    max_new_tokens: int = 64
    """The most tokens of a text after its prompt."""
    temperature: float = 1.0
    """1 draws from the model's own distribution."""
    top_p: float = 1.0
    """Draw from the likeliest tokens with this much probability together."""
    file_format: str = "jsonl"
    """Of the file of texts: jsonl or parquet."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.integer("number", self.number, 1, 1_000_000)
        values.integer("max_new_tokens", self.max_new_tokens, 1, 1_000_000)
        values.between("temperature", self.temperature, 0, 100, above=True)
        values.between("top_p", self.top_p, 0, 1, above=True)
        values.choice("file_format", self.file_format, FILE_FORMATS)
        if (
            not isinstance(self.prompts, list)
            or not self.prompts
            or not all(isinstance(one, str) for one in self.prompts)
        ):
            raise values.ConfigError(f"prompts must be a list of texts, got {self.prompts!r}")
        if self.classes is None:
            if self.label_column is not None:
                raise values.ConfigError("label_column needs classes: list all public classes, or leave it out")
            return
        if not isinstance(self.classes, list) or not all(isinstance(one, str) and one.strip() for one in self.classes):
            raise values.ConfigError(f"classes must be a list of names, got {self.classes!r}")
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise values.ConfigError(f"classes must be at least two different names, got {self.classes!r}")
        if self.label_column is None:
            raise values.ConfigError("classes needs label_column, the column of the records that holds the class")
        values.text("label_column", self.label_column)
        if len(self.prompts) != 1 or _PLACE not in self.prompts[0]:
            raise values.ConfigError(f"with classes, prompts must be one prompt with {_PLACE}, got {self.prompts!r}")


@dataclass(frozen=True, kw_only=True)
class EvolveConfig(EvolveTexts):
    """How an evolution goes. Its keywords are those of `EvolveTexts` and these."""

    steps: int = 10
    """T: histograms of votes. Each costs privacy."""
    variations: int = 3
    """Variations of each kept text that are candidates of the next step, beside the text itself."""
    keep_from: float = 0.2
    """A variation keeps at least this share of the words of a text, from its beginning."""
    keep_to: float = 0.8
    """A variation keeps at most this share."""
    embedding: str | None = None
    """Public model whose embeddings decide which text is nearest: a folder or a Hub id. None: `model.name`."""
    batch_size: int = 32
    """The most texts that are made together."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.integer("steps", self.steps, 1, 10_000)
        values.integer("variations", self.variations, 1, 1000)
        values.integer("batch_size", self.batch_size, 1)
        values.between("keep_from", self.keep_from, 0, 1)
        values.between("keep_to", self.keep_to, 0, 1)
        if self.keep_from > self.keep_to:
            raise values.ConfigError(
                f"keep_from={self.keep_from:g} is above keep_to={self.keep_to:g}: a variation keeps a share between "
                "them"
            )
        if self.embedding is not None:
            values.text("embedding", self.embedding)
