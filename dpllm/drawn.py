"""Collators that draw random numbers, as for masked tokens: what of them can be compared.

Place in the flow: below `dpllm.independence`. Such a collator gives one row other values in every call, since its
numbers depend on how many were drawn before. So the rows of a check are collated once, and each pass takes its rows out
of that batch, cut to their own length. Whether the collator itself mixes rows is seen by its result: beside another
row of the same length, from the same random state, a row has to come out the same.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.repeatable import same_randomness, seed_between

_GATES = 8  # random states: what is done in one microbatch in eight or more is met for certain
_IGNORE = -100
_MOST = 1 << 20

MIXED = (
    "The collator draws random numbers, and gives a row other values beside another row of the same length: it mixes "
    "rows, or what it draws for one row depends on the others. A unit cannot be bounded then, and ε would not hold. "
    "Let it make each row from that row only"
)
UNMEASURED = (
    "The collator draws random numbers, and no two rows have one length, so it cannot be measured whether it mixes "
    "rows. Draw the numbers before the training, or train with one row per microbatch (per_device_train_batch_size: 1)"
)

Collate = Callable[[list[Any]], Mapping[str, Any]]


def draws_numbers(collate: Collate, rows: Sequence[Any]) -> bool:
    """Whether a collator gives single rows other values from another random state."""

    def with_seed(seed: int) -> list[Mapping[str, Any]]:
        with same_randomness(seed):
            return [collate([copy.deepcopy(row)]) for row in rows]

    one, other = (with_seed(seed_between(part, part + 0.5)) for part in (0.0, 0.5))
    return not all(_same_row(first, second, any_shape=False) for first, second in zip(one, other, strict=True))


def is_mixed(collate: Collate, row: Any, others: Sequence[Any]) -> bool:
    """Whether a row comes out differently beside one of two rows of the same length than beside the other.

    From the same random state, with the row first, the same numbers are drawn for it. Where the two batches have other
    shapes nothing is said.
    """
    for part in range(_GATES):
        seed, batches = seed_between(part / _GATES, (part + 1) / _GATES), []
        for other in others:
            with same_randomness(seed):
                batches.append(collate([copy.deepcopy(row), copy.deepcopy(other)]))
        first, second = batches
        if not _same_row(first, second, any_shape=True):
            return True
    return False


def equally_long(numbers: np.ndarray, lengths: np.ndarray) -> tuple[int, int] | None:
    """Two rows of one length, drawn at random, for `is_mixed`; None where there are none.

    Args:
        numbers: of the rows, each once; of more than a million, the first million are looked at.
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
    """Whether the first rows of two batches are equal; with ``any_shape`` as far as these have one shape."""
    names = [name for name, value in one.items() if isinstance(value, Tensor) and value.ndim > 0]
    pairs = [(one[name], other[name]) for name in names if isinstance(other.get(name), Tensor)]
    return all(torch.equal(a[0], b[0]) for a, b in pairs if a.shape == b.shape or not any_shape)


def part_of(inputs: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Some rows of a collated batch, in this order, without the columns that are padding in all of them.

    Args:
        inputs: rows first; columns are cut where there is an ``attention_mask`` (B, T).
        places: of the rows.
    """
    part = {
        name: value[list(places)] if isinstance(value, Tensor) else [value[place] for place in places]
        for name, value in inputs.items()
        if isinstance(value, Tensor | list | tuple)
    }
    mask = part.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not bool((mask != 0).any()):
        return part
    used = torch.nonzero((mask != 0).any(0)).flatten()
    low, high, width = int(used[0]), int(used[-1]) + 1, mask.shape[1]
    labels = part.get("labels")
    if isinstance(labels, Tensor) and labels.ndim == 2 and labels.shape[1] == width:
        outside = torch.cat([labels[:, :low], labels[:, high:]], 1)
        if bool((outside != _IGNORE).any()):  # of a decoder that happens to be as long, or targets at padding
            return part
    return {name: _cut(value, low, high, width) for name, value in part.items()}


def _cut(value: Any, low: int, high: int, width: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    for dim in range(1, value.ndim):
        if value.shape[dim] == width:
            value = value.narrow(dim, low, high - low)
    return value
