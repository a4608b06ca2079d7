"""The section ``aggregate`` of a recipe: questions that a public model answers for groups of private records.

Place in the flow: a method section of `dpllm.config.query_recipe`; `dpllm.methods.aggregate.aggregate` carries it out.
All values are public.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dpllm.config.sections import Count, Number, OneOf, OwnFile, Text, Whole, section
from dpllm.config.values import ConfigError, nearest, shown

KINDS = ("number", "choice", "open")
_FARTHEST = 1e12
_MOST_GROUPS = 1_000_000
_Bound = Annotated[Number, Field(ge=-_FARTHEST, le=_FARTHEST)]


def _answers(given: Any) -> Any:
    if given is None:
        return None
    listed = list(given) if isinstance(given, list | tuple) else []
    if len(listed) < 2 or not all(isinstance(one, str) and one.strip() for one in listed):
        raise ValueError("must be a list of two texts or more")
    return tuple(listed)


@section
class Question:
    """A question, and how the groups' answers are combined.

    Raises:
        ConfigError: a value is missing, of the wrong kind or out of range.
    """

    name: Text
    """Of the answer, in plan, report and file: a few words."""
    ask: Text
    """The text after the records of a group; the model continues it, or answers it."""
    kind: Annotated[str, OneOf(KINDS)]
    """number: the mean of numbers in a public range. choice: how many groups find each of the listed answers the
    likeliest. open: answers of a few words that many groups give."""
    low: _Bound | None = None
    """number: the smallest number that counts; smaller ones count as this."""
    high: _Bound | None = None
    """number: the largest number that counts."""
    answers: Annotated[tuple[str, ...] | None, BeforeValidator(_answers)] = None
    """choice: all answers."""

    def __post_init__(self) -> None:
        """Check that a question has the values of its kind and no others."""
        if self.name != " ".join(self.name.split()):
            raise ConfigError(f"a question has a name of one line, got {shown(self.name)}")
        for names, kind in ((("low", "high"), "number"), (("answers",), "choice")):
            for name in names:
                if (getattr(self, name) is None) == (self.kind == kind):
                    verb = "needs" if self.kind == kind else "has no"
                    raise ConfigError(f"question {self.name!r} of the kind {self.kind!r} {verb} {name}")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"question {self.name!r}: low={self.low:g} must be below high={self.high:g}")
        if self.answers is not None and len(set(self.answers)) < len(self.answers):
            raise ConfigError(f"question {self.name!r} lists an answer twice: {shown(self.answers)}")

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
            raise ConfigError(f"question {number} must be a mapping with name, ask and kind, got {shown(value)}")
        known = [item.name for item in dataclasses.fields(cls)]
        for key in value:
            if key not in known:
                raise ConfigError(
                    f"question {number}: unknown key {key!r}{nearest(str(key), known)} Known here: {', '.join(known)}"
                )
        for key in ("name", "ask", "kind"):
            if value.get(key) is None:
                raise ConfigError(f"question {number}: missing key {key!r}; it has no default")
        try:
            return cls(**value)
        except ConfigError as error:
            words = str(error)
            raise ConfigError(words if "question" in words else f"question {number}: {words}") from error


def _questions(given: Any) -> Any:
    if not isinstance(given, list):
        raise ValueError("must be a list")
    made = [Question.of(value, number) for number, value in enumerate(given, 1)]
    names = [question.name for question in made]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two questions have the name {repeated[0]!r}: give each its own")
    return made


@section
class AggregateConfig:
    """How groups of private records answer questions.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    groups: Annotated[Whole, Field(ge=2, le=_MOST_GROUPS)] = 200
    """m: the number of groups. A unit is in one at most. More groups have less noise, and need more time."""
    group_size: Count = 4
    """s: the units of a group, whose records the model reads together."""
    questions: Annotated[list[Any], BeforeValidator(_questions)] = Field(default_factory=list)
    """Each a mapping with name, ask, kind, and the values of its kind: number (low, high), choice (answers) or open.
    Every one costs privacy."""
    max_new_tokens: Annotated[Count, Field(le=10_000)] = 16
    """The most tokens of an answer that the model writes."""
    max_words: Annotated[Count, Field(le=100)] = 3
    """The most words of an answer to an open question that count."""
    context: Text | None = None
    """The text for one record, with names of columns in braces, such as "Review: {text}\\n". null: the text columns of
    data, and an end of line. A text longer than data.max_length tokens loses its end."""
    opening: str = ""
    """Public text before the records of a group."""
    rows_per_pass: Count = 16
    """The most groups of one forward pass; fewer need less memory."""
    cached: bool = True
    """Keep keys and values of a pass in memory. false: compute them again for every token."""
    file: Annotated[Text, OwnFile(".json")] = "answers.json"
    """Name of the released file, in the run's folder."""
