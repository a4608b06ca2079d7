"""The texts of a synthetic data set: labels and their shares, draws from a model after prompts, and filters.

Drawing from released weights is post-processing, however often it is repeated, and the filters read generated texts and
public settings only. So the number of draws costs no ε, and their seed is no secret. No filter compares texts with
private records: whether such a filter drops a text would depend on one person's record, and no ε would cover it.

A model that was tuned on prompts with a label writes texts for a label that it is given. The shares of the labels are a
second use of the private records: exact shares are not covered by ε. They are either public, given by the user, or
noisy counts over public classes, which the query run charges. Classes are never collected from the records: a class
that only one person has would reveal that person.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dpllm.config import ConfigError
from dpllm.config.values import integer
from dpllm.models.generation import Prompt, Sampling

KEPT = "kept"
EMPTY, SHORT, LONG, DUPLICATE, BLOCKED = "empty", "too short", "too long", "a duplicate", "has a blocked word"
REASONS = (EMPTY, SHORT, LONG, DUPLICATE, BLOCKED)
"""The reasons to drop a text, in the order of the checks."""

_WORD = re.compile(r"\w+")
_MOST_WORDS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Public settings of the filters.

    Raises:
        ConfigError: a number is out of range, or a blocked entry holds no word.
    """

    min_words: int = 1
    """Fewest words of a text."""
    max_words: int | None = None
    """Most words of a text; None: any number."""
    duplicates: bool = False
    """Whether a text may occur more than once."""
    blocked: tuple[str, ...] = ()
    """Words or phrases that no text may contain; case is ignored."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        integer("min_words", self.min_words, 0, _MOST_WORDS)
        if self.max_words is not None:
            integer("max_words", self.max_words, 1, _MOST_WORDS)
            if self.max_words < self.min_words:
                raise ConfigError(
                    f"max_words={self.max_words} is below min_words={self.min_words}, so no text would be kept: "
                    "raise max_words"
                )
        empty = next((number for number, entry in enumerate(self.blocked, 1) if not words_of(entry)), None)
        if empty is not None:
            raise ConfigError(
                f"entry {empty} of the blocked words holds no word: write a word or a phrase, or remove it"
            )


@dataclass
class TextFilter:
    """The filters of one data set; they store the kept texts.

    >>> kept = TextFilter(FilterSettings(min_words=2, blocked=("at home",)))
    >>> [kept.verdict(text) for text in ("", "One.", "A dog.", "a  DOG.", "Stay at  home!")]
    ['empty', 'too short', 'kept', 'kept', 'has a blocked word']
    >>> kept.verdict("A dog. "), kept.counts["kept"]
    ('a duplicate', 2)
    """

    settings: FilterSettings
    counts: Counter[str] = field(default_factory=Counter)
    """Verdict -> number of texts."""
    _seen: set[str] = field(default_factory=set)

    def verdict(self, text: str) -> str:
        """Count a text, and return `KEPT` or the first of `REASONS` to drop it."""
        found = self._verdict(text)
        self.counts[found] += 1
        if found == KEPT:
            self._seen.add(text.strip())
        return found

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> number of texts dropped for it; reasons without texts are absent."""
        return {reason: self.counts[reason] for reason in REASONS if self.counts[reason]}

    def _verdict(self, text: str) -> str:
        if not text.strip():
            return EMPTY
        words = words_of(text)
        if len(words) < self.settings.min_words:
            return SHORT
        if self.settings.max_words is not None and len(words) > self.settings.max_words:
            return LONG
        if not self.settings.duplicates and text.strip() in self._seen:
            return DUPLICATE
        joined = f" {' '.join(words)} "
        if any(f" {' '.join(words_of(entry))} " in joined for entry in self.settings.blocked):
            return BLOCKED
        return KEPT


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation.

    >>> words_of("The Eagle: cheap, near Burger-King.")
    ['the', 'eagle', 'cheap', 'near', 'burger', 'king']
    """
    return _WORD.findall(text.casefold())


def blocked_words(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of a file of blocked words: one word or phrase per line; ``#`` starts a comment.

    >>> blocked_words(["# public list", "", "Acme Corp", "acme corp"])
    ('acme corp',)
    """
    entries = (" ".join(line.partition("#")[0].split()).casefold() for line in lines)
    return tuple(dict.fromkeys(entry for entry in entries if entry))


PLACE = "{label}"
"""Placeholder of the label in a prompt."""

LabelShares = Mapping[str, float]
"""Class -> share of the texts; the shares sum to 1."""


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Check the public classes and return them.

    Raises:
        ConfigError: there are fewer than two, one is empty, or one occurs twice.
    """
    names = tuple(classes)
    if len(names) < 2:
        raise ConfigError(f"labels need at least two classes, got {len(names)}: name all public classes")
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise ConfigError("a label is empty or no text: name every class")
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"the label {twice!r} is named twice: name each class once")
    return names


def public_shares(weights: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares for public weights: class -> a number of at least 0, such as a share or a count.

    Raises:
        ConfigError: a weight is negative, not finite or not a number, or all are 0.

    >>> public_shares({"pub": 3, "restaurant": 1})
    {'pub': 0.75, 'restaurant': 0.25}
    """
    names = check_classes(list(weights))
    values = []
    for name in names:
        value = weights[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"the share of the label {name!r} is {value!r}: give a number of at least 0")
        values.append(float(value))
    return shares_of(names, np.array(values))


def shares_of(classes: Sequence[str], counts: NDArray[np.float64]) -> dict[str, float]:
    """Return the shares for noisy or public counts; a negative count becomes 0.

    Raises:
        ConfigError: no count is above 0.

    >>> shares_of(["a", "b"], np.array([-2.5, 40.0]))
    {'a': 0.0, 'b': 1.0}
    """
    above = np.clip(np.asarray(counts, dtype=np.float64), 0.0, None)
    total = float(above.sum())
    if not total > 0:
        raise ConfigError(
            "no label has a count above 0, so there are no shares: the noise is larger than the data. Give public "
            "shares, or all labels the same share"
        )
    return {name: float(value) / total for name, value in zip(classes, above, strict=True)}


def texts_of_each(shares: LabelShares, total: int) -> dict[str, int]:
    """Return the number of texts of each label: shares of ``total``, rounded so that they sum to it.

    >>> texts_of_each({"a": 0.5, "b": 0.3, "c": 0.2}, 5)
    {'a': 3, 'b': 1, 'c': 1}
    """
    exact = {name: share * total for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    order = sorted(exact, key=lambda name: counts[name] - exact[name])  # the largest remainders first
    for name in order[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def prompt_of(template: str, label: str) -> str:
    """Return the prompt of a label.

    Raises:
        ConfigError: the template has no placeholder.

    >>> prompt_of("food: {label}", "Thai")
    'food: Thai'
    """
    if PLACE not in template:
        raise ConfigError(
            f"the prompt {template!r} has no {PLACE}, where each label is put: write it as the model saw it in "
            f"training, such as 'food: {PLACE}'"
        )
    return template.replace(PLACE, label)


TEXT, LABEL, PROMPT = "text", "label", "prompt"
"""Columns of a synthetic data set."""
MOST_ROUNDS = 10
"""Texts that the filters drop are drawn again, at most this many times for each wanted text."""
_SEEDS = 2**63


class Writer(Protocol):
    """A model that continues prompts, such as `dpllm.models.generation.TextGenerator`."""

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, batch_size: int = 16) -> Iterator[list[str]]:
        """Yield the new texts of each batch of prompts, in their order."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A prompt and the number of texts to draw after it."""

    prompt: Prompt
    count: int
    label: str | None = None
    """The label in the prompt; None: prompts have no labels."""
    to_model: Prompt | None = None
    """The prompt in the format of the training, such as a chat; None: `prompt`."""


@dataclass(frozen=True)
class Made:
    """The texts of a data set, and the number of draws."""

    records: tuple[dict[str, Any], ...]
    """Each with "text", and "prompt" and "label" if there are any; prompts are evenly mixed."""
    drawn: int
    """Number of texts that the model wrote."""
    dropped: dict[str, int]
    """Reason of a filter -> number of texts."""
    missing: int
    """Number of texts still missing after `MOST_ROUNDS` draws for each."""


def make_texts(
    model: Writer,
    wanted: Sequence[Wanted],
    sampling: Sampling,
    filters: TextFilter,
    batch_size: int = 16,
    moved: Callable[[int], None] = lambda _: None,
) -> Made:
    """Draw texts until each prompt has its number of texts, or `MOST_ROUNDS` draws for each of them.

    The same model, prompts, filters, batch size and seed give the same texts on the same machine.

    Args:
        model: writes texts.
        wanted: prompts with their numbers.
        sampling: how to draw; the seed increases with each round, so that each round draws different texts.
        filters: of this data set; they store the kept texts.
        batch_size: the most prompts that are continued together.
        moved: called with the number of newly kept texts.

    Raises:
        ConfigError: the number of texts is 0, or a prompt leaves no room for a text.
    """
    if sum(one.count for one in wanted) < 1:
        raise ConfigError("no text is wanted: give a number of at least 1")
    kept: list[list[str]] = [[] for _ in wanted]
    drawn = 0
    for turn in range(MOST_ROUNDS):
        open_places = _mixed([one.count - len(own) for one, own in zip(wanted, kept, strict=True)])
        if not open_places:
            break
        seed = None if sampling.seed is None else (sampling.seed + turn) % _SEEDS
        prompts = [_given(wanted[place]) for place in open_places]
        texts = (
            text
            for batch in model.sample(prompts, dataclasses.replace(sampling, seed=seed), batch_size)
            for text in batch
        )
        before = sum(map(len, kept))
        for place, text in zip(open_places, texts, strict=True):
            drawn += 1
            if filters.verdict(text) == KEPT:
                kept[place].append(text.strip())
                moved(1)
        if sampling.temperature == 0 and sum(map(len, kept)) == before:
            break  # the likeliest text of a prompt is the same in every round
    order, taken = _mixed([len(own) for own in kept]), Counter[int]()
    records = []
    for place in order:
        records.append(_record(wanted[place], kept[place][taken[place]]))
        taken[place] += 1
    return Made(
        records=tuple(records),
        drawn=drawn,
        dropped=filters.dropped,
        missing=sum(one.count for one in wanted) - len(records),
    )


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records as JSON lines or Parquet, depending on the extension.

    Raises:
        ConfigError: the extension is unknown.
        FileExistsError: the file exists.
    """
    if path.suffix == ".jsonl":
        with open(path, "x", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif path.suffix == ".parquet":
        with open(path, "xb") as binary:
            pq.write_table(pa.Table.from_pylist(list(records)), binary)
    else:
        raise ConfigError(
            f"{path}: texts are written as .jsonl or .parquet, not as {path.suffix or 'a file without ending'}"
        )


def _given(one: Wanted) -> Prompt:
    return one.prompt if one.to_model is None else one.to_model


def _record(one: Wanted, text: str) -> dict[str, Any]:
    label = {} if one.label is None else {LABEL: one.label}
    prompt = {PROMPT: one.prompt} if one.prompt else {}
    return {**label, **prompt, TEXT: text}


def _mixed(counts: Sequence[int]) -> list[int]:
    """Return each place as often as its count, evenly mixed.

    >>> _mixed([4, 2, 0])
    [0, 1, 0, 0, 1, 0]
    """
    spread = [((number + 0.5) / count, place) for place, count in enumerate(counts) for number in range(count)]
    return [place for _, place in sorted(spread)]
