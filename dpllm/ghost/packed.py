"""Rows laid end to end: where each begins, and how the tensors of a module are cut into rows again.

Rows of different lengths can go through a model without padding, as one row of all their tokens whose attention is
block-diagonal. The argument ``cu_seq_lens_q`` gives the boundaries of the rows; the attention needs it as well
(transformers' ``FlashAttentionKwargs``). It is read from the call of the model. Inputs and output gradients are
cut into (B, T, ...) with exact zeros behind short rows. Zeros change no sum over tokens, so all later steps are the
same as for padded rows.

Shape suffixes: B rows, T tokens of the longest row, N tokens of all rows together.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from dpllm.data.labels import BOUNDARIES
from dpllm.data.transfer import host_values
from dpllm.ghost.errors import GhostError, NoRuleError

_KEPT = 2  # one output gradient, and the input that several layers share


class PackedRows:
    """Cuts the tensors of modules into the rows of the model's last call; does nothing if they were not packed.

    Attributes:
        lengths: tokens of each row; empty where the rows were not packed.
    """

    def __init__(self) -> None:
        """Start without packed rows."""
        self.lengths: list[int] = []
        self._row_N = torch.empty(0, dtype=torch.int64)
        self._slot_N = self._row_N
        self._token_dim: dict[int, int | None] = {}  # by the number of dimensions of a tensor; None: it varies
        self._recent: list[tuple[tuple, Tensor, Tensor]] = []

    def start(self, kwargs: dict[str, Any]) -> None:
        """Read where the rows begin from a call of the model.

        Raises:
            GhostError: boundaries that are not those of one or more rows of at least one token each.
        """
        self.lengths, self._recent = [], []
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
                "Do not pack the rows of this model (pack_rows: false)."
            )
        return self._token_dim[x.ndim] if found else None
