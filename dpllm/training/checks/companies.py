"""The rows of an independence check, and the groups (companies) in which they pass through the model.

Place in the flow: `dpllm.training.checks.independence` draws a sample for each check and runs its companies.
A sample is drawn by the operating system's randomness from all rows, within the limits of a microbatch. It has the
shortest row with a target, because effects of padding are largest there, and one of the longest.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from dpllm.data.labels import IGNORE
from dpllm.data.transfer import own_copy
from dpllm.training.checks.repeatable import same_randomness, seed_between
from dpllm.training.checks.sharing import same_values
from dpllm.training.microbatches import by_name

if TYPE_CHECKING:
    from dpllm.training.rows import TrainingRows

SHORTEST = 8
"""Number of rows searched for the shortest one with a target, and for random numbers in the reading of rows."""
_BEFORE = 3  # rows that are made before a compared one, and one of the longest
_MOST_CANDIDATES = 1 << 20  # the most rows from which those of a check are chosen


@dataclass(frozen=True)
class Company:
    """Rows that pass through the model together.

    Attributes:
        numbers: their row numbers.
        words: their relation to the rows of the pass before, in words.
    """

    numbers: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class Sample:
    """The rows of a check.

    Attributes:
        rows: the fetched rows by number.
        refetched: whether rows are fetched again for each pass, so that a fetch which changes a row by the others is
            found; a fetch that draws random numbers is not repeated.
        together: numbers; the shortest row comes first. With three rows or more it is also the last one: two equal
            records are ordinary, and a loss may count them.
        replaced: numbers of other rows, among them a long one, and rows of ``together`` in another order.
        crowd: numbers of as many rows as a microbatch has, first those of ``together`` that fit; empty if ``together``
            has as many.
        equals: the shortest row twice, for a pass of the first check if ``together`` has no room for it.
        before: numbers of rows that are made before a compared one, each by itself; two or more, at random and a long
            one. If there is only one row, it is its own predecessor.
        longest: number of the longest row that fits into a microbatch by itself; None: there is only one row.
    """

    rows: Mapping[int, Any]
    together: tuple[int, ...]
    replaced: tuple[int, ...]
    crowd: tuple[int, ...] = ()
    equals: tuple[int, ...] = ()
    refetched: bool = False
    before: tuple[int, ...] = ()
    longest: int | None = None

    def fetched(self, numbers: Sequence[int], fetch: Callable[[np.ndarray], Sequence[Any]]) -> list[Any]:
        """Return the rows of a pass; collators may modify them."""
        distinct = list(dict.fromkeys(numbers))
        found = dict(zip(distinct, fetch(np.array(distinct)), strict=True)) if self.refetched else self.rows
        return [own_copy(found[number]) for number in numbers]

    @classmethod
    def draw(cls, rows: TrainingRows, max_tokens: int | None, wanted: int, first: bool, crowd: int = 0) -> Sample:
        """Choose rows by the operating system's randomness, within the limits of a microbatch.

        Args:
            rows: rows of the run.
            max_tokens: the most tokens of a microbatch. None: ``rows.max_rows`` bounds it.
            wanted: the most rows of a pass.
            first: whether to take the longest row that fits; if false, a long one.
            crowd: rows of a process in a step, for one pass that is as large as a microbatch. 0: no such pass.
        """
        rng = np.random.default_rng(secrets.SystemRandom().getrandbits(128))
        numbers = _some(rows.units.rows, rng)
        lengths = np.maximum(1, rows.lengths[numbers])
        order = numbers[_smallest(lengths, SHORTEST)]
        fetched = dict(zip(order.tolist(), rows.fetch(order), strict=True))
        alone = ((n, by_name(rows.collate([own_copy(row)]))) for n, row in fetched.items())
        short = next((n for n, inputs in alone if _has_target(inputs)), int(order[0]))
        shortest = max(1, int(rows.lengths[short]))
        most = min(wanted, len(numbers) if rows.max_rows is None else rows.max_rows)

        def others(size: int, without: Sequence[int]) -> list[int]:
            """Return rows that fit into a pass of ``size`` rows beside those it has already, in random order."""
            count = size - len(without)
            cap = math.inf if max_tokens is None else max_tokens // max(1, size)
            if count < 1 or cap < shortest:
                return []
            fitting = numbers[lengths <= cap] if cap < lengths.max() else numbers
            drawn = rng.choice(fitting, min(len(fitting), 2 * count + len(without) + 2), replace=False)
            return [n for n in dict.fromkeys(drawn.tolist()) if n not in without][:count]

        while most > 1 and max_tokens is not None and max_tokens // most < shortest:
            most -= 1
        together = [short, *others(most, [short])]
        size = min(crowd, len(numbers) if rows.max_rows is None else rows.max_rows)
        while size > most and max_tokens is not None and max_tokens // size < shortest:
            size -= 1
        # The draw of rows must not decide whether there is a pass: other processes draw other rows, and wait for it.
        room = math.inf if max_tokens is None else max_tokens // max(1, size)
        fit = [n for n in together if rows.lengths[n] <= room]
        crowded = [*fit, *others(size, fit)]
        crowded = crowded if len(crowded) > most else []
        equals = (short, short) if first and most > 1 and len(together) < 3 else ()
        if len(together) > 2:
            together[-1] = short
        few = min(most, 3 if wanted > 2 else 2)
        cap = math.inf if max_tokens is None else max_tokens // max(1, few)
        fitting = numbers[(lengths <= cap) & ~np.isin(numbers, together)] if few > 1 else numbers[:0]
        long: list[int] = []
        if len(fitting):
            drawn = fitting if first else rng.choice(fitting, min(4, len(fitting)), replace=False)
            long = [int(drawn[rows.lengths[drawn].argmax()])]
        kept = [n for n in together[1:2] if few > 2 or not long]
        kept = [n for n in kept if rows.lengths[n] <= cap]
        replaced = [*long, *kept, short]
        lone = numbers[lengths <= (math.inf if max_tokens is None else max_tokens)]
        lone = lone[lone != short]
        before = rng.choice(lone, min(_BEFORE, len(lone)), replace=False).tolist()
        longest = int(lone[rows.lengths[lone].argmax()]) if len(lone) else None
        before += [short if longest is None else longest]
        before = [*dict.fromkeys(before), short][: max(2, len(set(before)))]
        wished = {*together, *replaced, *crowded, *before, *([] if longest is None else [longest])}
        missing = np.array([n for n in wished if n not in fetched], dtype=numbers.dtype)
        if len(missing):
            fetched.update(zip(missing.tolist(), rows.fetch(missing), strict=True))
        again = []  # the longest rows, where random numbers show most likely; each separately, or rows could mix
        for seed in (seed_between(0, 0.5), seed_between(0.5, 1)):
            with same_randomness(seed):
                picked = sorted(fetched, key=lambda n: -rows.lengths[n])[:SHORTEST]
                again.append([own_copy(rows.fetch(np.array([n], dtype=numbers.dtype))[0]) for n in picked])
        refetched = same_values(*again)
        return cls(fetched, tuple(together), tuple(replaced), tuple(crowded), equals, refetched, tuple(before), longest)

    @property
    def probed(self) -> tuple[int, ...]:
        """Numbers of the first rows that pass through the model together; `probe` measures them first."""
        return self.together if len(self.together) > 1 else self.equals

    def companies(self, first: bool) -> list[Company]:
        """Return the passes of a check, first the shortest row alone."""
        short = self.together[0]
        passes = [Company((short,), "alone")]
        if len(self.together) > 1:
            equal = ", one of them its equal" if short in self.together[1:] else ""
            passes.append(Company(self.together, f"beside {len(self.together) - 1} other row(s){equal}"))
        if len(self.replaced) > 1:
            words = f"beside {len(self.replaced) - 1} other row(s), replaced, longer and in another order"
            passes.append(Company(self.replaced, words))
        if self.crowd:
            passes.append(Company(self.crowd, f"beside {len(self.crowd) - 1} other row(s), as in a whole microbatch"))
        if self.equals:
            passes.append(Company(self.equals, "beside its equal"))
        if len(self.together) > 2 or first:
            passes += [Company((n,), "alone") for n in self.together[1:2]]
        if len(passes) < 3:  # never several rows: the only risk left is state that is carried from pass to pass
            for n in self.before[:2]:
                passes += [Company((n,), "alone"), Company((short,), "alone, after another row")]
                passes += [Company((short,), "alone, after itself")]  # what changes with every second call
            long = [] if self.longest is None else [Company((self.longest,), "alone, after another row")]
            for n in self.before[:2] if long else ():  # the shortest row may reset what others left
                passes += [*long, Company((n,), "alone, after the longest row")]
        return passes


def _some(rows: Any, rng: np.random.Generator) -> np.ndarray:
    """Return all row numbers, or a million of them drawn at random if there are more."""
    if len(rows) <= _MOST_CANDIDATES:
        return np.asarray(rows)
    places = np.unique(rng.integers(0, len(rows), _MOST_CANDIDATES))
    return rows.start + rows.step * places if isinstance(rows, range) else rows[places]


def _smallest(lengths: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the smallest few, in rising order."""
    if len(lengths) <= count:
        return np.argsort(lengths, kind="stable")
    few = np.argpartition(lengths, count)[:count]
    return few[np.argsort(lengths[few], kind="stable")]


def _has_target(inputs: Mapping[str, Any]) -> bool:
    """Return whether a row's loss can differ from 0, as far as its labels show."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return True
    return bool((labels[..., 1:] != IGNORE).any())
