"""Comparison of rows for collators that draw random numbers, for example to mask tokens.

Place in the flow: below `dpllm.training.checks.independence`. Such a collator gives a row different values in every
call, since its numbers depend on how many were drawn before. So the rows of a check are collated once, and each pass
takes its rows out of that batch, cut to their own length. A mixture of rows by the collator shows in its result:
beside another row of the same length, from the same random state, a row must have the same values. Whether the model
reads padding can be checked only if rows can be cut to their own length, so the batch must mark padding.

Beside longer rows, and beside several, other numbers are drawn for the same row. There its values are compared in
distribution (`changed`): every column of a row, cut to the row's own length, has to come out alike by itself and in
company, over many random states. A column without random numbers has to be equal.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpllm.data.labels import IGNORE
from dpllm.data.transfer import own_copy
from dpllm.training.checks.repeatable import generator_states, same_randomness, seed_between

_PAIRS = 64  # times that a row is collated by itself and in company
_FAR, _FAR_UNCUT = 5.5, 3.5
"""Where two distributions are taken for different; at most `sqrt(_PAIRS)`. By chance one figure in more than a million
lies beyond the first. The second is for the length of rows of which no mask ever cuts anything off."""
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_GATES = 8  # random states: an effect in at least one of eight microbatches is found with certainty
_MOST = 1 << 20
_FEW = 8  # numbers of a token that are columns of their own
_LARGE = 1e30  # in the place of infinite values, and of larger ones, whose squares are no numbers
_SIZE = "its size"

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
    "The collator gives rows other values each time, also from the same random state, so it cannot be measured whether "
    "it mixes rows. Either it creates a generator in each call (np.random.default_rng(), os.urandom): draw from the "
    "global ones (np.random.rand, random.random, torch.rand), which are seeded from the operating system in every "
    "step. Or it counts its calls: how many there are depends on the units that are drawn, so leave that out"
)
UNTOLD = (
    "The collator draws random numbers, and '{name}' of a row is padded beside longer rows in a way that its batch "
    "does not mark, so it cannot be measured whether the row's loss depends on padding, which other rows decide. "
    "Return an attention_mask (B, T) that is 0 at padding, and labels that are -100 there"
)

CHANGED = (
    "The collator draws random numbers, and '{name}' of a row comes out differently beside other rows than by itself: "
    "{figure} is {alone:.6g} by itself and {beside:.6g} beside {others} other row(s), on average over {states} random "
    "states. A unit cannot be bounded then, and ε would not hold. Compute every value of a row from that row only: "
    "count, weigh and number its own tokens, and take nothing from the batch's width or from its other rows"
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
        """Collate each row separately; twice, if no generator moves and the values are the same."""
        batches: list[list[Mapping[str, Any]]] = []
        is_moved = False
        for part in range(_GATES):
            with same_randomness(seed_between(part / _GATES, (part + 1) / _GATES)):
                before = generator_states()
                batches.append([collate([own_copy(row)]) for row in rows])
                is_moved = is_moved or generator_states() != before
            if part == 1 and not is_moved and not cls(batches).differ():
                break
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

    def figures(self, batch: Mapping[str, Any], place: int) -> dict[str, tuple[float, float]]:
        """Return figures of the row at a place of a batch, cut to its own length, by column."""
        columns = _taken_apart(part_of(batch, [place], self.labels_apart()))
        return {f"'{name}' ({what})": one for name in columns for what, one in _figures(columns[name], []).items()}

    def changed(self, collate: Collate, rows: Sequence[Any], part: Mapping[str, Any]) -> str | None:
        """Return a message where the first row has other values beside the other rows than by itself.

        Figures of each column (`_figures`) are taken by itself and in company, each time from another random state, in
        pairs. While a row's values have one distribution, the sign of each difference d is a fair coin, and
        Σd / sqrt(Σd²) exceeds `_FAR` with a probability of less than 2 exp(-_FAR²/2), whatever the distribution
        (Hoeffding's inequality). Two constants that differ give sqrt(_PAIRS). A row that is always equally long by
        itself may not be longer in ``part`` either: it holds padding that nothing tells.

        Args:
            collate: rows to a batch.
            rows: the first row of this object at place 0, and those beside it; it has every place in turn.
            part: the first row, taken out of the batch of a check by `part_of`.
        """
        row, *others = rows
        apart, pairs = self.labels_apart(), []
        is_cut: set[str] = set()
        for number in range(_PAIRS if others else 0):
            place = number % len(rows)
            two: dict[bool, dict[str, Any]] = {}
            for is_beside in ((False, True), (True, False))[
                secrets.SystemRandom().getrandbits(1)
            ]:  # collators may count calls
                given = [*others[:place], row, *others[place:]] if is_beside else [row]
                with same_randomness(secrets.SystemRandom().getrandbits(32)):
                    batch = collate(own_copy(given))
                two[is_beside] = part_of(batch, [place if is_beside else 0], apart)
                if is_beside:
                    is_cut |= {name for name in two[True] if _width(batch, name) != _width(two[True], name)}
            pairs.append((_taken_apart(two[False]), _taken_apart(two[True])))
        part = _taken_apart(part)
        usual = [_taken_apart(part_of(batches[0], [0], apart)) for batches in self.batches]
        for name, value in part.items():
            widths = [_width(one, name) for one in (*usual, *(alone for alone, _ in pairs))]
            known = {width for width in widths if width is not None}
            if isinstance(value, Tensor) and value.ndim > 1 and len(known) == 1 and value.shape[1] > known.pop():
                return UNTOLD.format(name=name)
        for name in dict.fromkeys(name for pair in pairs for one in pair for name in one):
            message = _first_change(name, pairs, usual, name.partition("[")[0] in is_cut, len(others))
            if message is not None:
                return message
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
    is_mixed = False
    for part in range(_GATES):
        seed, batches = seed_between(part / _GATES, (part + 1) / _GATES), []
        for other in (others[0], *others):
            with same_randomness(seed):
                batches.append(collate([own_copy(row), own_copy(other)]))
        again, first, second = batches
        if not _same_row(again, first, any_shape=False):
            return OWN_NUMBERS
        is_mixed |= not _same_row(first, second, any_shape=True)
    return MIXED if is_mixed else None  # after all states: a short row may draw the same numbers twice by chance


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
    place = int(places[secrets.SystemRandom().randrange(len(places))])
    return int(order[place]), int(order[place + 1])


def _taken_apart(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose values (B, T, few) are several columns: large numbers of one would hide small ones."""
    columns: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, Tensor) and value.ndim > 2 and 1 < value.shape[-1] <= _FEW:
            columns |= {f"{name}[..., {number}]": value[..., number] for number in range(value.shape[-1])}
        else:
            columns[name] = value
    return columns


def _first_change(
    name: str,
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    usual: Sequence[Mapping[str, Any]],
    is_cut: bool,
    others: int,
) -> str | None:
    """Return a message where a figure of one column is another one in company; see `Alone.changed`."""
    references = [_Numbers.of(one[name]) for one in usual if name in one]
    seen = []
    for alone, beside in pairs:
        if _all_used(name, alone, beside):
            continue
        seen.append([_figures(one[name], references) if name in one else {} for one in (alone, beside)])
    for figure in dict.fromkeys(figure for two in seen for one in two for figure in one):
        values = np.array([[one.get(figure, (0.0, 0.0)) for one in two] for two in seen])
        d = values[:, 0, 0] - values[:, 1, 0]
        d[np.abs(d) <= values[:, :, 1].max(1)] = 0.0
        length = math.sqrt(float(d @ d))
        is_size = figure == _SIZE
        if length and abs(d.sum()) / length > (_FAR_UNCUT if is_size and not is_cut else _FAR):
            means = values[:, :, 0].mean(0)
            if is_size and means[1] > means[0] and isinstance(pairs[0][1].get(name), Tensor):
                return UNTOLD.format(name=name)
            words = {"figure": figure, "alone": means[0], "beside": means[1], "states": len(pairs)}
            return CHANGED.format(name=name, others=others, **words)
    return None


def _all_used(name: str, *both: Mapping[str, Any]) -> bool:
    """Whether a mask that one of two batches lacks has nothing but ones in the other: that says the same."""
    values = [one[name] for one in both if name in one]
    return (
        len(values) == 1 and name.endswith("attention_mask") and isinstance(values[0], Tensor) and bool(values[0].all())
    )


def _figures(value: Any, references: Sequence[_Numbers]) -> dict[str, tuple[float, float]]:
    """Numbers that describe one value of a row, each with the difference that rounding explains.

    Args:
        value: of a column, cut to the row.
        references: values of the same column from other random states.
    """
    own = _Numbers.of(value)
    figures = {"the number of times that it is there": (1.0, 0.0)}
    if own.array is not None:
        room = max(own.rounding, 1e-12) * float(np.abs(own.array).sum())
        weights = np.arange(1, len(own.array) + 1) * math.sqrt(2) % 1
        figures[_SIZE] = (float(len(own.array)), 0.0)
        figures["the number of its values that are -100"] = (float((own.array == IGNORE).sum()), 0.0)
        figures["its sum"] = (float(own.array.sum()), room)
        figures["the sum of its magnitudes"] = (float(np.abs(own.array).sum()), room)
        figures["its sum with irregular weights"] = (float(own.array @ weights), room)
    share = sum(own.agreement(other) for other in references) / max(1, len(references))
    return {**figures, "the share of it that is as usual": (share, 1e-9)}


@dataclass(frozen=True)
class _Numbers:
    """What can be compared of a value.

    Attributes:
        value: itself.
        array: its numbers as one row of finite float64; None where it holds other things.
        rounding: of these numbers, relative.
    """

    value: Any
    array: np.ndarray | None = None
    rounding: float = 0.0

    @classmethod
    def of(cls, value: Any) -> _Numbers:
        if isinstance(value, list | tuple) and value and all(isinstance(one, Tensor) for one in value):
            value = torch.cat([one.flatten() for one in value])
        if isinstance(value, Tensor):
            rounding, array = _ROUNDING.get(value.dtype, 0.0), value.detach().cpu().double().numpy()
        else:
            try:
                array = np.asarray(value)
            except ValueError:  # lists of different lengths
                return cls(value)
            rounding = _ROUNDING[torch.float32] if array.dtype.kind == "f" else 0.0
        if array.dtype.kind not in "biuf":
            return cls(value)
        array = np.nan_to_num(array.astype(float).ravel(), nan=-_LARGE, posinf=_LARGE, neginf=-_LARGE)
        return cls(value, array.clip(-_LARGE, _LARGE), rounding)

    def agreement(self, other: _Numbers) -> float:
        """The share of two values that is equal, but for rounding; 0 where they have other sizes."""
        if self.array is None or other.array is None:
            return float(self.array is other.array and repr(self.value) == repr(other.value))
        if self.array.shape != other.array.shape:
            return 0.0
        room = self.rounding * np.maximum(np.abs(self.array), np.abs(other.array))
        return float((np.abs(self.array - other.array) <= room).mean()) if len(self.array) else 1.0


def _same_row(one: Mapping[str, Any], other: Mapping[str, Any], any_shape: bool) -> bool:
    """Return whether the first rows of two batches are equal; ``any_shape`` skips values of different shapes."""
    names = [name for name, value in one.items() if isinstance(value, Tensor) and value.ndim > 0]
    pairs = [(one[name], other[name]) for name in names if isinstance(other.get(name), Tensor)]
    return all(torch.equal(a[:1], b[:1]) for a, b in pairs if a.shape == b.shape or not any_shape)


def _width(inputs: Mapping[str, Any], name: str) -> int | None:
    value = inputs.get(name)
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 1 else None


def part_of(inputs: Mapping[str, Any], places: Sequence[int], labels_apart: bool = False) -> dict[str, Any]:
    """Return some rows of a collated batch, in this order, without the columns that are padding in all of them.

    Args:
        inputs: rows first; columns are cut if there is an ``attention_mask`` (B, T). Numbers, texts and lists of
            another length than B stay as they are.
        places: positions of the rows.
        labels_apart: whether ``labels`` (B, T) have their own length, up to the last target; the decoder's inputs have
            the same length.
    """
    rows = next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), None)
    part = {name: _picked(value, places, rows) for name, value in inputs.items()}
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


def _picked(value: Any, places: Sequence[int], rows: int | None) -> Any:
    """The places of a value that has one entry for each of the rows; any other value as it is."""
    if isinstance(value, Tensor) and value.ndim:
        return value[list(places)]
    if isinstance(value, list | tuple) and len(value) == rows:
        return [value[place] for place in places]
    return value


def _cut(value: Any, low: int, high: int, width: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    for dim in range(1, value.ndim):
        if value.shape[dim] == width:
            value = value.narrow(dim, low, high - low)
    return value
