"""The section ``aggregate`` of a recipe: questions that a public model answers for groups of private records.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.aggregate.aggregate` carries it out.
All values are public.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpllm.config import values
from dpllm.config.topics import Topic
from dpllm.config.values import ConfigError, nearest

KINDS = ("number", "choice", "open")
_FARTHEST = 1e12
_MOST_GROUPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, and how the groups' answers are combined.

    Raises:
        ConfigError: a value is missing, of the wrong kind or out of range.
    """

    name: str
    """Of the answer, in plan, report and file: a few words."""
    ask: str
    """The text after the records of a group; the model continues it, or answers it."""
    kind: str
    """"number": the mean of numbers in a public range. "choice": how many groups find each of the listed answers the
    likeliest. "open": answers of a few words that many groups give."""
    low: float | None = None
    """"number": the smallest number that counts; smaller ones count as this."""
    high: float | None = None
    """"number": the largest number that counts."""
    answers: tuple[str, ...] | None = None
    """"choice": all answers."""

    def __post_init__(self) -> None:
        """Check every value, and that a question has the values of its kind and no others."""
        if not isinstance(self.name, str) or not self.name or self.name != " ".join(self.name.split()):
            raise ConfigError(f"a question has a name of one line, got {values.shown(self.name)}")
        values.text(f"ask of {self.name!r}", self.ask)
        values.choice(f"kind of {self.name!r}", self.kind, KINDS)
        for names, kind in ((("low", "high"), "number"), (("answers",), "choice")):
            for name in names:
                if (getattr(self, name) is None) == (self.kind == kind):
                    verb = "needs" if self.kind == kind else "has no"
                    raise ConfigError(f"question {self.name!r} of the kind {self.kind!r} {verb} {name}")
        if self.low is not None and self.high is not None:
            for name in ("low", "high"):
                value = values.between(f"{name} of {self.name!r}", getattr(self, name), -_FARTHEST, _FARTHEST)
                object.__setattr__(self, name, value)
            if not self.low < self.high:
                raise ConfigError(f"question {self.name!r}: low={self.low:g} must be below high={self.high:g}")
        if self.answers is not None:
            listed = list(self.answers) if isinstance(self.answers, list | tuple) else []
            if len(listed) < 2 or not all(isinstance(one, str) and one.strip() for one in listed):
                raise ConfigError(
                    f"question {self.name!r}: answers must be a list of two texts or more, got "
                    f"{values.shown(self.answers)}"
                )
            if len(set(listed)) < len(listed):
                raise ConfigError(f"question {self.name!r} lists an answer twice: {values.shown(self.answers)}")
            object.__setattr__(self, "answers", tuple(listed))

    @classmethod
    def of(cls, value: Any, number: int) -> Question:
        """Return a question from a mapping of a recipe.

        Args:
            value: the mapping, or a question.
            number: of the question, for messages.

        Raises:
            ConfigError: it is no mapping, or a key is unknown or missing.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"question {number} must be a mapping with name, ask and kind, got {values.shown(value)}")
        known = [item.name for item in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                raise ConfigError(
                    f"question {number}: unknown key {key!r}{nearest(str(key), known)} Known here: {', '.join(known)}"
                )
        for key in ("name", "ask", "kind"):
            if value.get(key) is None:
                raise ConfigError(f"question {number}: missing key {key!r}; it has no default")
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class AnswerGroups(Topic):
    """The groups of units, and the questions that each of them answers."""

    groups: int = 200
    """m: the number of groups. A unit is in one at most. More groups have less noise, and need more time."""
    group_size: int = 4
    """s: the units of a group, whose records the model reads together."""
    questions: list[Any] = field(default_factory=list)
    """Each a mapping with name, ask, kind, and the values of its kind (`Question`). Every one costs privacy."""
    max_new_tokens: int = 16
    """The most tokens of an answer that the model writes."""
    max_words: int = 3
    """The most words of an answer to an open question that count."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        values.integer("groups", self.groups, 2, _MOST_GROUPS)
        values.integer("group_size", self.group_size, 1)
        values.integer("max_new_tokens", self.max_new_tokens, 1, 10_000)
        values.integer("max_words", self.max_words, 1, 100)
        if not isinstance(self.questions, list):
            raise ConfigError(f"questions must be a list, got {values.shown(self.questions)}")
        self._set("questions", [Question.of(value, number) for number, value in enumerate(self.questions, 1)])
        names = [question.name for question in self.questions]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two questions have the name {repeated[0]!r}: give each its own")


@dataclass(frozen=True, kw_only=True)
class AggregateConfig(AnswerGroups):
    """How groups of private records answer questions.

    Its keywords are those of `AnswerGroups` and these.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    context: str | None = None
    """The text for one record, with names of columns in braces, such as "Review: {text}\\n". None: the text columns of
    ``data``, and an end of line. A text longer than ``data.max_length`` tokens loses its end."""
    opening: str = ""
    """Public text before the records of a group."""
    rows_per_pass: int = 16
    """The most groups of one forward pass; fewer need less memory."""
    cached: bool = True
    """Keep keys and values of a pass in memory. False: compute them again for every token."""
    file: str = "answers.json"
    """Name of the released file, in the run's folder."""

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        if self.context is not None:
            values.text("context", self.context)
        if not isinstance(self.opening, str):
            raise ConfigError(f"opening must be a text, got {values.shown(self.opening)}")
        values.integer("rows_per_pass", self.rows_per_pass, 1)
        values.flag("cached", self.cached)
        values.own_file("file", self.file, ".json")
