"""The model's calls between two backward passes: their rows, the row layout, and immediate refusals.

A contrastive or preference loss calls the model twice and runs one backward pass. Gradients can be assigned to rows
only if all calls use one row layout.

Shape suffixes: B rows, T tokens of the longest row, N tokens of all packed rows together.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.data.labels import BOUNDARIES
from dpllm.data.transfer import host_values
from dpllm.ghost.refusals import GhostError, NoRuleError

_ROW_ARGUMENTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "attention_mask", "pixel_values", "input_features")
_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_token_(id|index)$")
_KEPT = 2  # one output gradient, and the input that several layers share


class PackedRows:
    """Splits modules' tensors into the rows of the model's last call; does nothing if the rows were not packed.

    Rows of different lengths can go through a model without padding, as one row of all their tokens with block-diagonal
    attention. The model's argument ``cu_seq_lens_q`` holds the boundaries, which the attention needs as well
    (transformers' ``FlashAttentionKwargs``). Tensors are split into (B, T, ...) with exact zeros after short rows,
    which change no sum over tokens, so all later steps are the same as for padded rows.

    Args:
        kwargs: the keyword arguments of the call.

    Attributes:
        lengths: tokens of each row; empty if the rows were not packed.

    Raises:
        GhostError: the boundaries do not describe one or more rows of at least one token each.
    """

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        """Read where the rows begin."""
        self.lengths: list[int] = []
        self._row_N = self._slot_N = torch.empty(0, dtype=torch.int64)
        self._token_dim: dict[int, int | None] = {}  # by the number of dimensions of a tensor; None: it varies
        self._recent: list[tuple[tuple, Tensor, Tensor]] = []
        boundaries = kwargs.get(BOUNDARIES)
        if boundaries is None:
            return
        known = host_values(boundaries).tolist() if boundaries.ndim == 1 else []
        self.lengths = [end - begin for begin, end in itertools.pairwise(known)]
        if not self.lengths or known[0] != 0 or min(self.lengths) < 1:
            raise GhostError(
                f"{BOUNDARIES} is {boundaries.tolist()}. It must list the offsets at which packed rows begin, "
                "increasing from 0, followed by the total number of tokens."
            )
        device, tokens, longest = boundaries.device, known[-1], max(self.lengths)
        lengths_B, rows = boundaries.diff().long(), torch.arange(len(self.lengths), device=device)
        self._row_N = torch.repeat_interleave(rows, lengths_B, output_size=tokens)
        begin_N = torch.repeat_interleave(boundaries[:-1].long(), lengths_B, output_size=tokens)
        self._slot_N = self._row_N * longest + torch.arange(tokens, device=device) - begin_N

    def stop(self) -> None:
        """Release the tensors that were split."""
        self._recent = []

    def cut(self, x: Tensor) -> Tensor:
        """Return (1, N, ...), (1, H, N, D) or (N, ...) as (B, T, ...); any other tensor unchanged."""
        dim = self._dim_of_tokens(x)
        if dim is None:
            return x
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        for known, _, rows in self._recent:
            if known == key:
                return rows
        x_N = x if dim == 0 else x[0].movedim(dim - 1, 0)
        num_rows, longest = len(self.lengths), max(self.lengths)
        if num_rows * longest == len(x_N):
            rows_BT = x_N.unflatten(0, (num_rows, longest))
        else:
            slots = x_N.new_zeros(num_rows * longest, *x_N.shape[1:])
            rows_BT = slots.index_copy_(0, self._slot_N, x_N).unflatten(0, (num_rows, longest))
        # Layers that read one input must get the same tensor; holding x prevents reuse of its address.
        self._recent = [*self._recent[1 - _KEPT :], (key, x, rows_BT)]
        return rows_BT

    def fill(self, x: Tensor, rows_B: Tensor, value: float) -> Tensor:
        """Set all entries of the marked rows (B,) to one value."""
        dim = self._dim_of_tokens(x)
        if dim is None:
            return x
        return x.masked_fill(rows_B[self._row_N].view(-1, *[1] * (x.ndim - 1 - dim)), value)

    def _dim_of_tokens(self, x: Tensor) -> int | None:
        """Return the dimension that runs over the tokens of all rows; None if there is none."""
        tokens = len(self._row_N)
        if not self.lengths or x.ndim < 2 or (len(self.lengths) == 1 and x.shape[0] == 1):
            return None
        if x.shape[0] == tokens:
            return 0
        found = [dim for dim in range(1, x.ndim - 1) if x.shape[dim] == tokens] if x.shape[0] == 1 else []
        if len(found) == 1:
            same = self._token_dim.setdefault(x.ndim, found[0]) == found[0]
            self._token_dim[x.ndim] = found[0] if same else None
            return found[0]
        if found and self._token_dim.get(x.ndim) not in found:
            raise NoRuleError(
                f"The shape {tuple(x.shape)} does not show which dimension holds the packed rows' {tokens} tokens. Do "
                "not pack this model's rows (microbatch.pack: false)."
            )
        return self._token_dim[x.ndim] if found else None


class ModelCalls:
    """The state of a model's calls since the last backward pass.

    Attributes:
        packed: how the rows of the last call are laid end to end.
        rows: the number of rows in the last call; None if unknown.
        tokens: the tokens of each of its rows.
        lengths: the second dimensions of all its inputs.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start without calls."""
        self.packed = PackedRows({})
        self.rows: int | None = None
        self.tokens, self.lengths = 1, frozenset[int]()
        self._most_tokens, self._placeholders = tokens_by_themselves(model), placeholders_of(model)
        self._layouts: set[tuple[int | None, tuple[int, ...]]] = set()
        self._spent = True

    def begin(self, args: tuple, kwargs: dict) -> bool:
        """Record that a call begins; return whether it is the first since the last backward pass.

        Raises:
            GhostError: rows are too long, packed wrongly, or could take each other's images.
        """
        refuse_shared_media(kwargs, self._placeholders)
        packed = PackedRows(kwargs)
        tensors = list(flatten_tensors((args, kwargs)))
        lengths = [tensor.shape[1] for tensor in tensors if tensor.ndim > 1]
        self.rows, self.tokens, self.packed = rows_of_call(args, kwargs), lengths[0] if lengths else 1, packed
        self.lengths = frozenset(lengths)
        refuse_long_rows(max(packed.lengths, default=self.tokens), self._most_tokens)
        first, self._spent = self._spent, False
        if first:
            self._layouts.clear()
        return first

    def end(self) -> None:
        """Record that the call returned."""
        self._layouts.add((self.rows, tuple(self.packed.lengths)))

    def spend(self) -> None:
        """Record that a loss was differentiated or dropped: the model's next call belongs to a new loss."""
        self._spent = True

    def differentiated(self, num_losses: int) -> None:
        """Record that losses are about to be differentiated.

        Raises:
            GhostError: the losses do not match the packed rows, or the calls had different layouts.
        """
        self.spend()
        packed = sorted({lengths for _, lengths in self._layouts})
        if len(packed) > 1:
            raise NoRuleError(
                f"The model was called {len(packed)} times since the last backward pass with rows packed differently "
                f"(lengths {list(packed[0])} and {list(packed[1])}), so gradients cannot be assigned to rows. Use one "
                "layout for all calls behind a loss, and torch.no_grad() for all other calls."
            )
        own = len(self.packed.lengths)
        if own and own != num_losses:
            raise GhostError(
                f"The model was called with {own} packed rows, but there are {num_losses} losses. Return one loss per "
                "row: see dpllm.packed_sequence_loss."
            )
        if not own and len({rows for rows, _ in self._layouts}) > 1:
            self.rows = num_losses


def used_again(name: str) -> GhostError:
    """Return the error for a use of a parameter outside the calls since the last backward pass."""
    return NoRuleError(
        f"{name} is used more often in the loss than in the model's calls since the last backward pass. Compute the "
        "losses from calls made after that pass, or clip in one pass (NormMethod(backward_passes=1))."
    )


def rows_of_call(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Return the number of rows in a model call: the first dimension of its main input, or of its first tensor."""
    for named in (kwargs, *(value for value in (*args, *kwargs.values()) if isinstance(value, Mapping))):
        for name in _ROW_ARGUMENTS:
            if isinstance(named.get(name), Tensor):
                return int(named[name].shape[0])
    given = next((value for value in flatten_tensors((*args, *kwargs.values())) if value.ndim > 0), None)
    return None if given is None else given.shape[0]


def tokens_of_call(args: tuple, kwargs: dict) -> int:
    """Return the tokens of each row, from the first input with rows and tokens; 1 if there is none."""
    return next((t.shape[1] for t in flatten_tensors((args, kwargs)) if t.ndim >= 2), 1)


def tokens_by_themselves(model: nn.Module) -> int | None:
    """Return the row length up to which position embeddings do not depend on other rows; None: any length.

    Rotary embeddings of the types "dynamic" and "longrope" choose their frequencies by the longest row of the batch
    (transformers, ``modeling_rope_utils.py``): beyond the model's original training length, a row's loss depends on
    the length of the other rows, which no gradient shows. "dynamic" keeps the frequencies of the longest row until a
    short one arrives, so it depends on earlier batches as well.
    """

    def limits(section: dict, longest: int | None) -> Iterator[int]:
        longest = section.get("max_position_embeddings", longest)
        kind = str(section.get("rope_type", section.get("type", "")))
        if "dynamic" in kind or kind == "longrope":
            yield section.get("original_max_position_embeddings") or longest or 0
        for value in section.values():
            if isinstance(value, dict):
                yield from limits(value, longest)

    return min(limits(_described(model), None), default=None)


def refuse_long_rows(longest: int, most: int | None) -> None:
    """Raise `GhostError` for rows longer than `tokens_by_themselves` allows."""
    if most is not None and longest > most:
        raise GhostError(
            f"The batch has rows of {longest} tokens. Beyond {most} tokens this model's position embeddings (dynamic "
            "or longrope) depend on the longest row of this or an earlier batch, so a row's loss depends on other "
            f"rows. Set data.max_length={most}, or choose another rope type."
        )


def placeholders_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ids of the tokens that a model replaces by features of images or sound."""
    config = _described(model).items()
    return tuple(sorted({token for name, token in config if _PLACEHOLDER.match(name) and type(token) is int}))


def _described(model: nn.Module) -> dict[str, Any]:
    """Return the contents of a model's config; empty if it has none."""
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def refuse_shared_media(kwargs: Mapping[str, Any], placeholders: Sequence[int]) -> None:
    """Raise `GhostError` if a row could take another row's image: features fill the placeholders of all rows in order.

    The models compare the numbers of features and placeholders only over the whole batch (``masked_scatter`` in
    transformers), so a row with too few placeholders passes the rest of its image on to the next row.
    """
    ids = kwargs.get("input_ids")
    tensors = [value for value in kwargs.values() if isinstance(value, Tensor)]
    media = [value for value in tensors if value.ndim > 2 or (value.ndim == 2 and value.is_floating_point())]
    if not placeholders or not isinstance(ids, Tensor) or not media:
        return
    places_B = torch.isin(ids, torch.tensor(placeholders, device=ids.device)).sum(dim=1)
    # Some models skip all-zero images, which pad a row with fewer images than another (B, images, C, H, W).
    images_B = [(value != 0).flatten(2).any(dim=2).sum(dim=1) for value in media if value.ndim > 4]
    if any(bool((count_B != count_B[0]).any()) for count_B in (places_B, *images_B)):
        raise GhostError(
            f"The rows of a call have different numbers of images, or of image or audio tokens: {int(places_B.min())} "
            f"to {int(places_B.max())} tokens. The model fills these positions in row order, so a row could receive "
            "another unit's image. Give every row the same number (a fixed image size, no image splitting in the "
            "processor), or train one unit at a time (privacy.gradients=per_unit)."
        )


def tensors_in(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    for key, item in items_of(value):
        yield from tensors_in(item, (*path, key))


def flatten_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the same tensors without their paths."""
    return (tensor for _, tensor in tensors_in(value))


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a tuple, list, mapping or dataclass with their keys; empty for any other value."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, Mapping):  # before dataclasses: the outputs of transformers are both
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (each.name for each in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return []


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tuple, list, mapping or dataclass with each item changed; any other value unchanged."""
    items = [(key, change(item)) for key, item in items_of(value)]
    if isinstance(value, (tuple, list)):
        new = [item for _, item in items]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, dict) and dataclasses.is_dataclass(value):
        return type(value)(**dict(items))
    if all(item is getattr(value, str(key), None) for key, item in items) and not isinstance(value, dict):
        return value
    other = copy.copy(value)
    for key, item in items:
        if isinstance(value, Mapping):
            other[key] = item
        else:
            object.__setattr__(other, key, item)
    return other
