"""Filters of generated texts: emptiness, length, duplicates among the generated, and a public list of words.

Place in the flow: between the model and the file. A filter reads generated texts and public settings only, so it is
post-processing and costs no ε. There is no filter that compares texts with private records: whether such a filter
drops a text would depend on one person's record, and no ε would cover it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpllm.config.values import ConfigError, integer

KEPT = "kept"
EMPTY, SHORT, LONG, DUPLICATE, BLOCKED = "empty", "too short", "too long", "a duplicate", "has a blocked word"
REASONS = (EMPTY, SHORT, LONG, DUPLICATE, BLOCKED)
"""Why a text can be left out, in the order in which it is asked."""

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
    """Whether a text may occur twice."""
    blocked: tuple[str, ...] = ()
    """Words or phrases that no text may have; upper and lower case are equal."""

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
    """The filters of one data set; it remembers the texts that were kept.

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
        """Return `KEPT`, or the first of `REASONS` to leave the text out; the text is counted."""
        found = self._verdict(text)
        self.counts[found] += 1
        if found == KEPT:
            self._seen.add(text.strip())
        return found

    @property
    def dropped(self) -> dict[str, int]:
        """Reason -> number of texts that were left out for it; reasons without a text are absent."""
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
    """Return the entries of a file of blocked words: a word or phrase on each line; ``#`` begins a comment.

    >>> blocked_words(["# public list", "", "Acme Corp", "acme corp"])
    ('acme corp',)
    """
    entries = (" ".join(line.partition("#")[0].split()).casefold() for line in lines)
    return tuple(dict.fromkeys(entry for entry in entries if entry))
