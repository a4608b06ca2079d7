"""Overlap of synthetic texts with other texts: shared n-grams of words, the longest common run, the echo of canaries.

Place in the flow: part of the evaluation. Overlap with training records touches them, so the figures are not covered
by ε. Text of one language shares phrases whoever wrote it: compare the figure with the overlap between the training
records and text that the model never saw.

The echo is for a run on data that `dpllm audit prepare` made: whether texts repeat more of the canaries that were
trained on. About half of them were included by coin flips. Synthetic text from a private model repeats as much of the
others. The figure is no bound on ε: `dpllm methods texts` has bounds from the texts, and `dpllm audit run` from the
model itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpllm.config.values import ConfigError
from dpllm.methods.synthesize.filters import words_of

Words = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What two sets of texts share, word for word."""

    ngram: int
    """n."""
    shared: float
    """Share of the different n-grams of the texts that are in the others; 0 if they have none."""
    longest_median: float
    """Median over the texts of the longest run of words that is in one of the others."""
    longest: int
    """The longest such run of all texts, in words."""
    whole: float
    """Share of the texts that are in the others as a whole."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


class Runs:
    """The runs of words of some texts, and which of them other texts have too.

    A suffix automaton (Blumer et al. 1985) of the texts, one after the other. Others are read one by one and not
    kept, so memory grows with the texts only, and time with the words of both.

    >>> runs = Runs([["the", "red", "dog", "sleeps"], ["barks", "one"]])
    >>> runs.mark(["a", "red", "dog", "barks"])
    >>> runs.mark(["one", "dog", "sleeps"])
    >>> runs.longest()
    [2, 1]
    """

    def __init__(self, texts: Sequence[Words]) -> None:
        """Build the automaton; a separator that no text has keeps runs within one text."""
        self._texts = texts
        self._next: list[dict[str, int]] = [{}]
        self._link, self._length = [-1], [0]
        last = 0
        for number, words in enumerate(texts):
            for word in (*words, f"\0{number}"):
                last = self._extend(last, word)
        self._marked = [0] * len(self._length)

    def mark(self, words: Words) -> None:
        """Note the runs of another text."""
        state, length = 0, 0
        for word in words:
            while state and word not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if word in self._next[state]:
                state, length = self._next[state][word], length + 1
            self._marked[state] = max(self._marked[state], length)

    def longest(self) -> list[int]:
        """Return for each text the length of its longest run that one of the others has."""
        marked = list(self._marked)
        for state in sorted(range(1, len(marked)), key=self._length.__getitem__, reverse=True):
            if marked[state]:  # then its shorter suffixes were found too
                marked[self._link[state]] = self._length[self._link[state]]
        found = []
        for words in self._texts:
            state, most = 0, 0
            for word in words:
                state = self._next[state][word]
                longest = state
                while longest and not marked[longest]:
                    longest = self._link[longest]
                most = max(most, marked[longest] if longest else 0)
            found.append(most)
        return found

    def _extend(self, last: int, word: str) -> int:
        new = self._state(self._length[last] + 1, {}, 0)
        place = last
        while place != -1 and word not in self._next[place]:
            self._next[place][word] = new
            place = self._link[place]
        if place == -1:
            return new
        found = self._next[place][word]
        if self._length[found] == self._length[place] + 1:
            self._link[new] = found
            return new
        copy = self._state(self._length[place] + 1, dict(self._next[found]), self._link[found])
        while place != -1 and self._next[place].get(word) == found:
            self._next[place][word] = copy
            place = self._link[place]
        self._link[found] = self._link[new] = copy
        return new

    def _state(self, length: int, following: dict[str, int], link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        return len(self._length) - 1


def overlap(texts: Sequence[str], others: Iterable[str], ngram: int = 8) -> Overlap:
    """Compare texts with others, word for word; case and punctuation do not matter.

    Args:
        texts: at least one.
        others: such as the training records; read once.
        ngram: n, the number of words of a shared phrase.

    >>> overlap(["a red dog ran", "he slept"], ["A red dog sat.", "He slept!"], ngram=3)
    Overlap(ngram=3, shared=0.5, longest_median=2.5, longest=3, whole=0.5)
    """
    own = [words_of(text) for text in texts]
    grams = {gram for words in own for gram in _ngrams(words, ngram)}
    wholes = {tuple(words) for words in own}
    shared: set[tuple[str, ...]] = set()
    same: set[tuple[str, ...]] = set()
    runs = Runs(own)
    for other in others:
        words = words_of(other)
        shared.update(gram for gram in _ngrams(words, ngram) if gram in grams)
        if tuple(words) in wholes:
            same.add(tuple(words))
        runs.mark(words)
    longest = runs.longest()
    return Overlap(
        ngram=ngram,
        shared=len(shared) / len(grams) if grams else 0.0,
        longest_median=float(median(longest)),
        longest=max(longest),
        whole=fmean(tuple(words) in same for words in own),
    )


def _ngrams(words: Words, n: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + n]) for start in range(len(words) - n + 1))


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Longest runs of words that canaries share with synthetic texts."""

    included: int
    """Canaries that were trained on."""
    left_out: int
    """Canaries that were not."""
    run_included: float
    """Median over the included ones of the longest run, in words."""
    run_left_out: float
    """The same of the others."""
    auroc: float
    """Probability that an included canary has a longer run than one that was left out, ties counted half; 0.5 without
    memory."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return (
            f"Canaries: the longest run of words in the texts has a median of {self.run_included:g} words for the "
            f"{self.included:,} that were trained on, and of {self.run_left_out:g} for the {self.left_out:,} that were "
            f"not; AUROC {self.auroc:.3f} (0.5: no memory)."
        )


def echo(texts: Sequence[str], canaries: Sequence[str], included: Sequence[bool]) -> Echo:
    """Compare canaries that were trained on with those that were not, by their longest run in texts.

    Args:
        texts: synthetic.
        canaries: their texts.
        included: (len(canaries),) their coins.

    Raises:
        ConfigError: all were included, or none.

    >>> echo(["a red fox ran home"], ["my red fox ran", "one old dog sat"], [True, False]).auroc
    1.0
    """
    coins = np.asarray(included, dtype=bool)
    if coins.all() or not coins.any():
        raise ConfigError("the canaries are all included or all left out, so there is nothing to compare them with")
    longest = longest_runs(texts, canaries)
    ranks = stats.rankdata(longest)
    inside = int(coins.sum())
    above = float(ranks[coins].sum()) - inside * (inside + 1) / 2
    return Echo(
        included=inside,
        left_out=len(coins) - inside,
        run_included=float(median(longest[coins].tolist())),
        run_left_out=float(median(longest[~coins].tolist())),
        auroc=above / (inside * (len(coins) - inside)),
    )


def longest_runs(texts: Sequence[str], canaries: Sequence[str]) -> NDArray[np.float64]:
    """Return (len(canaries),) the number of words in each canary's longest run that a text has too.

    >>> longest_runs(["a red fox ran home"], ["my red fox ran", "one old dog sat"]).tolist()
    [3.0, 0.0]
    """
    runs = Runs([words_of(canary) for canary in canaries])
    for text in texts:
        runs.mark(words_of(text))
    return np.asarray(runs.longest(), dtype=np.float64)
