"""The calls of a model between two backward passes: their rows, how these are laid out, and what is refused at once.

A contrastive or preference loss calls the model twice and differentiates once. Gradients can be assigned to rows only
if all calls use one row layout.

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
from dpllm.ghost.errors import GhostError, NoRuleError

_ROW_ARGUMENTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "attention_mask", "pixel_values", "input_features")
_PLACEHOLDER = re.compile(r"(image|video|audio|speech)_token_(id|index)$")
_KEPT = 2  # one output gradient, and the input that several layers share


class PackedRows:
    """Cuts the tensors of modules into the rows of the model's last call; does nothing if they were not packed.

    Rows of different lengths can go through a model without padding, as one row of all their tokens whose attention is
    block-diagonal. The argument ``cu_seq_lens_q`` of the model has the boundaries, which the attention needs as well
    (transformers' ``FlashAttentionKwargs``). Tensors are cut into (B, T, ...) with exact zeros behind short rows, which
    change no sum over tokens, so all later steps are the same as for padded rows.

    Args:
        kwargs: of the call.

    Attributes:
        lengths: tokens of each row; empty where the rows were not packed.

    Raises:
        GhostError: boundaries that are not those of one or more rows of at least one token each.
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
                f"{BOUNDARIES} is {boundaries.tolist()}; the places where packed rows begin are needed, rising from 0, "
                "and finally the number of all their tokens."
            )
        device, tokens, longest = boundaries.device, known[-1], max(self.lengths)
        lengths_B, rows = boundaries.diff().long(), torch.arange(len(self.lengths), device=device)
        self._row_N = torch.repeat_interleave(rows, lengths_B, output_size=tokens)
        begin_N = torch.repeat_interleave(boundaries[:-1].long(), lengths_B, output_size=tokens)
        self._slot_N = self._row_N * longest + torch.arange(tokens, device=device) - begin_N

    def stop(self) -> None:
        """Release the tensors that were cut."""
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
        # Layers that read one input must get one tensor; holding x prevents reuse of its address.
        self._recent = [*self._recent[1 - _KEPT :], (key, x, rows_BT)]
        return rows_BT

    def fill(self, x: Tensor, rows_B: Tensor, value: float) -> Tensor:
        """Replace all entries of the marked rows (B,) by one value."""
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
                f"The shape {tuple(x.shape)} does not show which dimension has the {tokens} tokens of the packed rows. "
                "Do not pack the rows of this model (microbatch.pack: false)."
            )
        return self._token_dim[x.ndim] if found else None


class ModelCalls:
    """What is known of the calls of a model since the last backward pass.

    Attributes:
        packed: how the rows of the last call are laid end to end.
        rows: of the last call; None where they are not known.
        tokens: of each of its rows.
        lengths: the second dimensions of all of its inputs.
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
        """Note that a call begins; return whether it is the first since the last backward pass.

        Raises:
            GhostError: rows that are too long, packed wrongly, or may take each other's images.
        """
        refuse_shared_media(kwargs, self._placeholders)
        packed = PackedRows(kwargs)
        self.rows, self.tokens, self.packed = rows_of_call(args, kwargs), tokens_of_call(args, kwargs), packed
        self.lengths = frozenset(t.shape[1] for t in flatten_tensors((args, kwargs)) if t.ndim > 1)
        refuse_long_rows(max(packed.lengths, default=self.tokens), self._most_tokens)
        first, self._spent = self._spent, False
        if first:
            self._layouts.clear()
        return first

    def end(self) -> None:
        """Note that the call returned."""
        self._layouts.add((self.rows, tuple(self.packed.lengths)))

    def spend(self) -> None:
        """Note that a loss was differentiated or dropped: the next call of the model belongs to another loss."""
        self._spent = True

    def differentiated(self, num_losses: int) -> None:
        """Note that losses are about to be differentiated.

        Raises:
            GhostError: there are not as many as packed rows, or the calls had other layouts.
        """
        self.spend()
        packed = sorted({lengths for _, lengths in self._layouts})
        if len(packed) > 1:
            raise NoRuleError(
                f"The model was called {len(packed)} times since the last backward pass with rows packed differently "
                f"(lengths {list(packed[0])} and {list(packed[1])}), so gradients cannot be assigned to rows. Use one "
                "layout for all calls of a loss, and torch.no_grad() for calls that are not part of it."
            )
        own = len(self.packed.lengths)
        if own and own != num_losses:
            raise GhostError(
                f"The model was called with {own} packed rows, and there are {num_losses} losses. One loss per row "
                "is needed: see dpllm.packed_sequence_loss."
            )
        if not own and len({rows for rows, _ in self._layouts}) > 1:
            self.rows = num_losses


def used_again(name: str) -> GhostError:
    """Return the error for a use of a parameter outside the calls since the last backward pass."""
    return NoRuleError(
        f"{name} is used more often in the loss than in the calls of the model since the last backward pass. Compute "
        "the losses from calls of the model that follow that pass, or clip in one pass (NormMethod(backward_passes=1))."
    )


def rows_of_call(args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Return the number of rows in a call of the model: the first dimension of its main input, or first tensor."""
    for named in (kwargs, *(value for value in (*args, *kwargs.values()) if isinstance(value, Mapping))):
        for name in _ROW_ARGUMENTS:
            if isinstance(named.get(name), Tensor):
                return int(named[name].shape[0])
    given = next((value for value in flatten_tensors((*args, *kwargs.values())) if value.ndim > 0), None)
    return None if given is None else given.shape[0]


def tokens_of_call(args: tuple, kwargs: dict) -> int:
    """Return the tokens of each row, from the first input of a model that has rows and tokens; 1 if none has."""
    return next((t.shape[1] for t in flatten_tensors((args, kwargs)) if t.ndim >= 2), 1)


def tokens_by_themselves(model: nn.Module) -> int | None:
    """Return the tokens up to which a row's position embeddings do not depend on other rows; None: any number.

    Rotary embeddings of the types "dynamic" and "longrope" choose their frequencies by the longest row of the batch
    (transformers, ``modeling_rope_utils.py``): beyond the length that the model was first trained for, a row's loss
    depends on the length of the other rows, which no gradient shows. "dynamic" keeps the frequencies of the longest row
    until a short one comes, so that it depends on earlier batches as well.
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
    """Raise `GhostError` for rows of more tokens than `tokens_by_themselves` allows."""
    if most is not None and longest > most:
        raise GhostError(
            f"Rows of {longest} tokens: beyond {most} this model chooses its position embeddings by the longest row of "
            "the batch, or of a batch before (dynamic or longrope), so that a row's loss depends on the others. Set "
            f"data.max_length={most}, or another rope type."
        )


def placeholders_of(model: nn.Module) -> tuple[int, ...]:
    """Return the ids of the tokens in whose places a model puts what it computed of images or sound."""
    config = _described(model).items()
    return tuple(sorted({token for name, token in config if _PLACEHOLDER.match(name) and type(token) is int}))


def _described(model: nn.Module) -> dict[str, Any]:
    """Return what a model's config holds; nothing where it has none."""
    config: Any = getattr(model, "config", None)
    return config.to_dict() if hasattr(config, "to_dict") else {}


def refuse_shared_media(kwargs: Mapping[str, Any], placeholders: Sequence[int]) -> None:
    """Raise `GhostError` where a row may take another's image: features fill the placeholders of all rows in order.

    The models compare the number of features with that of placeholders over the whole batch only (``masked_scatter`` in
    transformers), so a row with too few passes on what is left of its image to the next.
    """
    ids = kwargs.get("input_ids")
    tensors = [value for value in kwargs.values() if isinstance(value, Tensor)]
    media = [value for value in tensors if value.ndim > 2 or (value.ndim == 2 and value.is_floating_point())]
    if not placeholders or not isinstance(ids, Tensor) or not media:
        return
    places_B = torch.isin(ids, torch.tensor(placeholders, device=ids.device)).sum(dim=1)
    # Some models leave out images of zeros, which pad a row with fewer images than another (B, images, C, H, W).
    images_B = [(value != 0).flatten(2).any(dim=2).sum(dim=1) for value in media if value.ndim > 4]
    if any(bool((count_B != count_B[0]).any()) for count_B in (places_B, *images_B)):
        raise GhostError(
            "The rows of a call have different numbers of images, or of tokens that stand for images or sound: "
            f"{int(places_B.min())} to {int(places_B.max())} tokens. The model puts features in their places in the "
            "order of the rows, so a row could take the image of another unit. Give all rows as many (a fixed size: no "
            "splitting of images in the processor), or train one unit at a time (privacy.gradients=per_unit)."
        )


def tensors_in(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order, with their places."""
    if isinstance(value, Tensor):
        yield path, value
    for key, item in items_of(value):
        yield from tensors_in(item, (*path, key))


def flatten_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the same tensors without their places."""
    return (tensor for _, tensor in tensors_in(value))


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what a tuple, list, mapping or dataclass holds, each with its place; nothing for any other value."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, Mapping):  # before dataclasses: the outputs of transformers are both
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (each.name for each in dataclasses.fields(value))
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return []


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tuple, list, mapping or dataclass with each item changed; any other value as it is."""
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
