"""Buffers in which the gradients of the units in small parameters lie side by side: one norm and one sum for all.

Place in the flow: a pass has a `Pool`. Its LoRA factors, norm layers and biases are held as gradients of units, each in
its `Slot` of a `Block` of one group of parameters. The norm over all of a block's parameters is one reduction, and
their clipped sums are one matrix-vector product. `Widths` predicts how wide the blocks of the next pass will be.

Shape suffixes: U units, P entries of several parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpllm.ghost.norm_method import NormMethod

Kind = tuple[int, torch.dtype, torch.device]
"""The group of parameters, the dtype and the device of a block."""

_LENGTHS = 256  # of rows, for which widths are kept
# Under activation checkpointing, gradients of units take the memory that checkpoints leave, layer by layer. A block for
# the whole model would be there from the beginning; blocks of this size take little more than the gradients need.
_BLOCK_BYTES = 1 << 26


class Block:
    """Gradients of the units in several parameters of one group, (U, P).

    Args:
        num_units: U.
        width: the most entries of parameters that it can hold.
        dtype: the accumulation dtype.
        device: of the gradients.
    """

    def __init__(self, num_units: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Begin without a gradient."""
        self._buffer = torch.empty(num_units, width, dtype=dtype, device=device)
        self._used = 0
        self._sum_P: Tensor | None = None

    @property
    def room(self) -> int:
        """The entries that are still free."""
        return self._buffer.shape[1] - self._used

    @property
    def value_UP(self) -> Tensor:
        """The gradients that have a slot."""
        return self._buffer[:, : self._used]

    def take(self, shape: torch.Size) -> Slot:
        """Return the place of one more parameter."""
        start, self._used = self._used, self._used + shape.numel()
        return Slot(self, start, shape, self._buffer[:, start : self._used].view(-1, *shape))

    def weighted(self, factor_U: Tensor) -> Tensor:
        """Return (P,): ``sum_u factor_u g_u`` of all parameters, computed at the first call.

        A gradient with factor 0 contributes exactly zero, also if it is not finite; it is set to zero for this.
        """
        if self._sum_P is None:
            value_UP = self.value_UP.masked_fill_((factor_U == 0)[:, None], 0)
            self._sum_P = factor_U.to(value_UP.dtype) @ value_UP
        return self._sum_P


@dataclass(slots=True)  # not frozen, which takes three times as long, for each parameter of each pass
class Slot:
    """The place of one parameter in a block.

    Attributes:
        block: the block.
        start: of its entries.
        shape: of the parameter.
        value_U: the gradients of the units in it, (U, *shape); a view.
    """

    block: Block
    start: int
    shape: torch.Size
    value_U: Tensor

    def weighted(self, factor_U: Tensor) -> Tensor:
        """Return the clipped sum of this parameter; see `Block.weighted`."""
        return self.block.weighted(factor_U)[self.start : self.start + self.shape.numel()].view(self.shape)


class Pool:
    """The blocks of one pass. A block that is full is followed by another one.

    Args:
        widths: learns which parameters have a place; a parameter that it did not know gets a block of its own.
        tokens: of all rows.
        num_units: U.
        norm_method: decides which parameters have a place.
    """

    def __init__(self, widths: Widths, tokens: int, num_units: int, norm_method: NormMethod) -> None:
        """Begin without blocks."""
        self._learned, self._tokens, self._num_units = widths, tokens, num_units
        self._expected = dict(widths.of(tokens, num_units, norm_method))  # entries that have no slot yet
        self._blocks: dict[Kind, list[Block]] = {}

    def take(self, key: int, kind: Kind, shape: torch.Size, factor_bytes: float, instance_bytes: float) -> Slot:
        """Return the place of one parameter. The caller writes to all of it: its norm is counted.

        Args:
            key: its id.
            kind: of its block.
            shape: of the parameter.
            factor_bytes: of its factors.
            instance_bytes: of its gradients.
        """
        entries, expected = shape.numel(), self._expected.get(kind, 0)
        if key not in self._learned:
            per_token, per_unit = factor_bytes / max(1, self._tokens), instance_bytes / max(1, self._num_units)
            self._learned.note(key, _Held(kind, entries, per_token, per_unit))
        blocks = self._blocks.setdefault(kind, [])
        if not blocks or blocks[-1].room < entries:
            _, dtype, device = kind
            most = _BLOCK_BYTES // (max(1, self._num_units) * dtype.itemsize)
            blocks.append(Block(self._num_units, max(entries, min(most, expected)), dtype, device))
        self._expected[kind] = max(0, expected - entries)
        return blocks[-1].take(shape)

    def pop(self, group: int) -> list[Block]:
        """Return the blocks of a group, which takes no more parameters."""
        return [block for kind in list(self._blocks) if kind[0] == group for block in self._blocks.pop(kind)]


@dataclass(frozen=True)
class _Held:
    """A parameter that was held as the gradients of units.

    Attributes:
        kind: of its block.
        entries: of the parameter.
        factor_bytes: of the factors, for a token.
        instance_bytes: of the gradient, for a unit.
    """

    kind: Kind
    entries: int
    factor_bytes: float
    instance_bytes: float


class Widths:
    """Predicts the widths of blocks from the parameters that were held in passes before.

    A prediction that is too small costs more launches, one that is too large memory; neither changes a result.
    """

    def __init__(self) -> None:
        """Start without parameters; each then gets a block of its own."""
        self._held: dict[int, _Held] = {}
        self._known: dict[tuple[int, int], dict[Kind, int]] = {}

    def __contains__(self, key: int) -> bool:
        """Whether a parameter is known, by its id."""
        return key in self._held

    def note(self, key: int, one: _Held) -> None:
        """Note a parameter that is held, by its id."""
        self._held[key] = one
        self._known.clear()

    def of(self, tokens: int, num_units: int, norm_method: NormMethod) -> dict[Kind, int]:
        """Return the entries of each kind of a pass.

        Args:
            tokens: of all rows.
            num_units: U.
            norm_method: decides which parameters are held.
        """
        known = self._known.get((tokens, num_units))
        if known is None:
            known = {}
            for one in self._held.values():
                if norm_method.holds_instance(one.factor_bytes * tokens, one.instance_bytes * num_units):
                    known[one.kind] = known.get(one.kind, 0) + one.entries
            if len(self._known) == _LENGTHS:
                self._known.clear()
            self._known[tokens, num_units] = known
        return known
