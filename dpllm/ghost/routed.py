"""The gradient of a stack of matrices of which each token meets a few: the experts of a mixture.

For y_s = W[e_s] x_s, where *slot* s is one choice of one token, row b's gradient of W[e] is the sum of g_s (x) x_s over
the row's slots with e_s = e. Different experts are different entries of the parameter, so a unit's squared norm is the
sum over experts of the norm of its slots there: a *segment* is one unit in one expert. The clipped sum is one product
for each expert, in which each slot has the factor of its row.

The factors of LoRA on a stack of experts (PEFT's ``target_parameters``) are such stacks too, in another layout.

Shape suffixes: B rows, U units, T tokens of a row, S slots of a row (k for each token), E experts, L and R the two
dimensions of one expert's matrix, M segments, N slots of each segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from dpllm.ghost import kernels
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.sums import Sum, Weights

if TYPE_CHECKING:
    from dpllm.ghost.contributions import Rows

Layout = Literal["stacked", "flat", "interleaved"]
_STEPS = 4  # sizes in each doubling to which segments are padded


@dataclass(frozen=True)
class Routed:
    """Gradient of a stack of matrices: sum_s onehot(index_s) (x) left_s (x) right_s.

    Attributes:
        index_BS: the expert of each slot, the k slots of a token side by side; -1: none.
        left_BTL: factor along the first dimension of each matrix, of each slot or of each token, which its k slots
            share.
        right_BTR: factor along the second, likewise.
        num_experts: E.
        layout: of the parameter. "stacked": (E, L, R). "flat": (E * L, R) (PEFT's ``lora_A``). "interleaved":
            (L, R * E), the experts next to each other (PEFT's ``lora_B``).
        input_side: "left" or "right", whichever holds the input.
    """

    index_BS: Tensor
    left_BTL: Tensor
    right_BTR: Tensor
    num_experts: int
    layout: Layout = "stacked"
    input_side: str = "right"

    @property
    def grad(self) -> Tensor:
        """The output gradient of each slot."""
        return self.right_BTR if self.input_side == "left" else self.left_BTL

    def factor_bytes(self) -> int:
        """Return the bytes of the factors."""
        return self.left_BTL.nbytes + self.right_BTR.nbytes

    def instance_bytes(self, rows: Rows) -> int:
        """Return the bytes that the gradients of the units would take."""
        entries = rows.num_units * self.num_experts * self.left_BTL.shape[2] * self.right_BTR.shape[2]
        return entries * self._dtype.itemsize

    def instance(self, rows: Rows) -> Tensor:
        """Return the gradients of the units (U, *parameter shape)."""
        width = self.left_BTL.shape[2], self.right_BTR.shape[2]
        total = torch.zeros(rows.num_units * self.num_experts, *width, dtype=self._dtype, device=self.right_BTR.device)
        for number_M, left_MNL, right_MNR in self._segments(rows):
            total[number_M] = kernels.wide_bmm(left_MNL.mT, right_MNR)
        total_UELR = total.unflatten(0, (rows.num_units, self.num_experts))
        if self.layout == "interleaved":
            return total_UELR.permute(0, 2, 3, 1).flatten(2)
        return total_UELR.flatten(1, 2) if self.layout == "flat" else total_UELR

    def norms(self, rows: Rows, norm_method: NormMethod) -> tuple[Tensor, Tensor]:
        """Return ``(sq_norm_U, slack_U)``, as `dpllm.ghost.contributions.squared_norms`."""
        both_U2 = torch.zeros(rows.num_units, 2, dtype=self._dtype, device=self.right_BTR.device)
        slack = kernels.rounding_slack(self._dtype)
        for number_M, left_MNL, right_MNR in self._segments(rows):
            sq_norm_M, mass_M = norm_method.outer_norms(right_MNR, [left_MNL])
            both_U2.index_add_(0, number_M // self.num_experts, torch.stack([sq_norm_M, slack * mass_M], 1))
        return both_U2[:, 0], both_U2[:, 1]

    def add_weighted_(self, total: Sum, weights: Weights, norm_method: NormMethod) -> None:
        """Add the weighted gradients: ``total += sum_b factor_b g_b``."""
        order, counts = _sorted(self.index_BS.flatten(), self.num_experts)
        blocks_ELR = total.filled()
        if self.layout == "interleaved":
            blocks_ELR = blocks_ELR.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        elif self.layout == "flat":
            blocks_ELR = blocks_ELR.unflatten(0, (self.num_experts, -1))
        for block_LR, slot_N in zip(blocks_ELR, order.split(counts.tolist()), strict=True):
            if len(slot_N):  # each slot is a row of one token
                left_N1L, right_N1R = (self._taken(x, slot_N)[:, None] for x in (self.left_BTL, self.right_BTR))
                of_slots = Weights(weights.factor[slot_N // self.index_BS.shape[1]])
                norm_method.add_weighted_outer_(Sum.onto(block_LR), left_N1L, right_N1R, of_slots)

    def fold(self) -> Routed:
        """Return the same use with all tokens in a single row."""
        return self._with(*(x.flatten(0, 1)[None] for x in (self.index_BS, self.left_BTL, self.right_BTR)))

    @staticmethod
    def cat(uses: Sequence[Routed]) -> Routed:
        """Return uses of one parameter as one: a sum over the slots of all of them."""
        whole = [use.per_slot() for use in uses]
        columns = zip(*((use.index_BS, use.left_BTL, use.right_BTR) for use in whole), strict=True)
        return whole[0]._with(*(torch.cat(column, 1) for column in columns))

    def per_slot(self) -> Routed:
        """Return the same use with both factors repeated for each slot."""
        slots = self.index_BS.shape[1]
        each = (x.repeat_interleave(slots // x.shape[1], dim=1) for x in (self.left_BTL, self.right_BTR))
        return self._with(self.index_BS, *each)

    def _with(self, index_BS: Tensor, left_BTL: Tensor, right_BTR: Tensor) -> Routed:
        return replace(self, index_BS=index_BS, left_BTL=left_BTL, right_BTR=right_BTR)

    @property
    def _dtype(self) -> torch.dtype:
        return kernels.accumulation_dtype(torch.promote_types(self.left_BTL.dtype, self.right_BTR.dtype))

    def _segments(self, rows: Rows) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the segments of the units, those of similar size together; padding rows belong to none.

        Yields:
            Of each segment unit * E + expert (M,), and the two factors (M, N, L) and (M, N, R), zero behind a shorter
            segment.
        """
        unit_B1 = rows.unit_B[:, None]
        number_BS = torch.where((unit_B1 >= 0) & (self.index_BS >= 0), unit_B1 * self.num_experts + self.index_BS, -1)
        order, counts = _sorted(number_BS.flatten(), rows.num_units * self.num_experts)
        starts = np.cumsum(counts) - counts
        (occurring,) = np.nonzero(counts)
        sizes = _rounded_up(counts[occurring])
        for size in np.unique(sizes):
            number_M = occurring[sizes == size]
            count_M1, place_1N = counts[number_M][:, None], np.arange(size)[None]
            place_MN = starts[number_M][:, None] + np.minimum(place_1N, count_M1 - 1)
            arrays = number_M, place_MN, place_1N < count_M1
            number, place, is_real = (torch.from_numpy(x).to(order.device) for x in arrays)
            left, right = (self._taken(x, order[place]) * is_real[:, :, None] for x in (self.left_BTL, self.right_BTR))
            yield number, left, right

    def _taken(self, x_BTD: Tensor, slot: Tensor) -> Tensor:
        """Return the factors of the given slots, counted over all rows."""
        return x_BTD.flatten(0, 1)[slot // (self.index_BS.shape[1] // x_BTD.shape[1])]


def _sorted(number: Tensor, num_numbers: int) -> tuple[Tensor, np.ndarray]:
    """Return the slots that have a number, sorted by it, and how many have each; -1 leaves a slot out."""
    order = torch.argsort(number, stable=True)
    counts = torch.bincount(number + 1, minlength=num_numbers + 1).cpu().numpy()
    return order[int(counts[0]) :], counts[1:]


def _rounded_up(counts: np.ndarray) -> np.ndarray:
    """Round up to a grid of `_STEPS` sizes in each doubling, so that few sizes occur.

    >>> _rounded_up(np.array([1, 7, 8, 9, 33, 64]))
    array([ 1,  7,  8, 10, 40, 64])
    """
    steps = np.maximum(1, 2 ** np.floor(np.log2(np.maximum(counts, 1))).astype(np.int64) // _STEPS)
    return -(-counts // steps) * steps
