"""Comparison of rows for collators that draw random numbers, for example to mask tokens.

Place in the flow: below `dpllm.training.checks.independence`. Such a collator gives a row different values in every
call, since its numbers depend on how many were drawn before. So the rows of a check are collated once, and each pass
takes its rows out of that batch, cut to their own length. A mixture of rows by the collator shows in its result:
beside another row of the same length, from the same random state, a row must have the same values. Whether the model
reads padding can be checked only if rows can be cut to their own length, so the batch must mark padding.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.data.labels import IGNORE
from dpllm.training.checks.repeatable import same_randomness, seed_between

_GATES = 8  # random states: an effect in at least one of eight microbatches is found with certainty
_MOST = 1 << 20

MIXED = (
    "The collator draws random numbers, and gives a row other values beside another row of the same length: it mixes "
    "rows, or its numbers for one row depend on the others. A unit then cannot be bounded, and ε would not hold. "
    "Change it so that it makes each row from that row only"
)
UNMEASURED = (
    "The collator draws random numbers, but no two rows have the same length, so it cannot be measured whether it "
    "mixes rows. Draw the numbers before the training, or train with one row per microbatch "
    "(per_device_train_batch_size: 1)"
)
OWN_NUMBERS = (
    "The collator draws random numbers from a generator that it creates in each call "
    "(np.random.default_rng(), os.urandom), so it cannot be measured whether it mixes rows. Draw from the global "
    "generators (np.random.rand, random.random, torch.rand), which are seeded from the operating system in every step"
)
UNTOLD = (
    "The collator draws random numbers, and '{name}' of a row is padded beside longer rows in a way that its batch "
    "does not mark, so it cannot be measured whether the row's loss depends on padding, which other rows decide. "
    "Return an attention_mask (B, T) that is 0 at padding, and labels that are -100 there"
)

Collate = Callable[[list[Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Alone:
    """The batches that a collator makes of single rows, each from several random states.

    Attributes:
        batches: for each random state, the batches of the rows.
    """

    batches: Sequence[Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, collate: Collate, rows: Sequence[Any]) -> Alone:
        """Collate each row separately."""
        batches = []
        for part in range(_GATES):
            with same_randomness(seed_between(part / _GATES, (part + 1) / _GATES)):
                batches.append([collate([copy.deepcopy(row)]) for row in rows])
        return cls(batches)

    def differ(self) -> bool:
        """Return whether a row has other values from another random state: the collator draws numbers."""
        first, *others = self.batches
        return not all(_same_row(*two, any_shape=False) for other in others for two in zip(first, other, strict=True))

    def labels_apart(self) -> bool:
        """Return whether labels have their own lengths, as for an encoder-decoder, and are not class numbers."""
        every = [one for batches in self.batches for one in batches if _width(one, "labels") is not None]
        apart = any(_width(one, "labels") != _width(one, "input_ids") for one in every)
        return apart and len({_width(one, "labels") for one in every}) > 1

    def untold(self, part: Mapping[str, Any], place: int) -> str | None:
        """Return a message if a row taken out of a batch is longer than alone: it holds padding that is not marked.

        Args:
            part: the row, by `part_of`.
            place: its position among the rows of this object.
        """
        for name, value in part.items():
            widths = [_width(batches[place], name) for batches in self.batches]
            known = [width for width in widths if width is not None]
            if isinstance(value, Tensor) and value.ndim > 1 and known and value.shape[1] > max(known):
                return UNTOLD.format(name=name)
        return None


def unmeasured(
    collate: Collate, fetch: Callable[[np.ndarray], Sequence[Any]], row: int, numbers: np.ndarray, lengths: np.ndarray
) -> str | None:
    """Return a message if a collator that draws numbers mixes rows, or if that cannot be measured.

    Args:
        collate: rows to a batch.
        fetch: row numbers to rows.
        row: the row that others must not change.
        numbers: numbers of all rows.
        lengths: lengths of all rows.
    """
    pair = equally_long(numbers, lengths)
    return UNMEASURED if pair is None else mixing(collate, *fetch(np.array([row, *pair])))


def mixing(collate: Collate, row: Any, *others: Any) -> str | None:
    """Return a message if a row's values differ between batches with each of two rows of the same length.

    From the same random state, with the row first, the same numbers are drawn for it. If the two batches have different
    shapes, there is no message.
    """
    for part in range(_GATES):
        seed, batches = seed_between(part / _GATES, (part + 1) / _GATES), []
        for other in (others[0], *others):
            with same_randomness(seed):
                batches.append(collate([copy.deepcopy(row), copy.deepcopy(other)]))
        again, first, second = batches
        if not _same_row(again, first, any_shape=False):
            return OWN_NUMBERS
        if not _same_row(first, second, any_shape=True):
            return MIXED
    return None


def equally_long(numbers: np.ndarray, lengths: np.ndarray) -> tuple[int, int] | None:
    """Return two rows of the same length, drawn at random, for `mixing`; None if there are none.

    Args:
        numbers: numbers of the rows, each once; of more than a million, only the first million are used.
        lengths: (num_rows,) tokens of every row.
    """
    numbers = numbers[:_MOST]
    order = numbers[np.argsort(lengths[numbers], kind="stable")]
    (places,) = np.nonzero(np.diff(lengths[order]) == 0)
    if not len(places):
        return None
    place = int(places[secrets.randbelow(len(places))])
    return int(order[place]), int(order[place + 1])


def _same_row(one: Mapping[str, Any], other: Mapping[str, Any], any_shape: bool) -> bool:
    """Return whether the first rows of two batches are equal; ``any_shape`` skips values of different shapes."""
    names = [name for name, value in one.items() if isinstance(value, Tensor) and value.ndim > 0]
    pairs = [(one[name], other[name]) for name in names if isinstance(other.get(name), Tensor)]
    return all(torch.equal(a[0], b[0]) for a, b in pairs if a.shape == b.shape or not any_shape)


def _width(inputs: Mapping[str, Any], name: str) -> int | None:
    value = inputs.get(name)
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 1 else None


def part_of(inputs: Mapping[str, Any], places: Sequence[int], labels_apart: bool = False) -> dict[str, Any]:
    """Return some rows of a collated batch, in this order, without the columns that are padding in all of them.

    Args:
        inputs: rows first; columns are cut if there is an ``attention_mask`` (B, T).
        places: positions of the rows.
        labels_apart: whether ``labels`` (B, T) have their own length, up to the last target; the decoder's inputs have
            the same length.
    """
    part = {
        name: value[list(places)] if isinstance(value, Tensor) else [value[place] for place in places]
        for name, value in inputs.items()
        if isinstance(value, Tensor | list | tuple)
    }
    decoded = {name for name in part if labels_apart and (name == "labels" or name.startswith("decoder_"))}
    mask, labels = part.get("attention_mask"), part.get("labels")
    if "labels" in decoded and isinstance(labels, Tensor) and labels.ndim == 2 and bool((labels != IGNORE).any()):
        high, width = 1 + int(torch.nonzero((labels != IGNORE).any(0)).max()), labels.shape[1]
        part.update({name: _cut(part[name], 0, high, width) for name in decoded})
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask != 0).any()):
        return part
    used = torch.nonzero((mask != 0).any(0)).flatten()
    low, high, width = int(used[0]), int(used[-1]) + 1, mask.shape[1]
    if "labels" not in decoded and isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] == width:
        outside = torch.cat([labels[:, :low], labels[:, high:]], 1)
        if bool((outside != IGNORE).any()):  # targets at padding
            return part
    return {name: value if name in decoded else _cut(value, low, high, width) for name, value in part.items()}


def _cut(value: Any, low: int, high: int, width: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    for dim in range(1, value.ndim):
        if value.shape[dim] == width:
            value = value.narrow(dim, low, high - low)
    return value
