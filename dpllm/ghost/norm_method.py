"""The choice between equivalent algorithms for a norm, and between PyTorch and fused kernels.

Place in the flow: between the arithmetic (`kernels` in PyTorch, `triton_launch` fused) and the contributions of a
layer (`contributions`). The gradient of a matrix for one unit is sum_t a_t (x) g_t over its T tokens, D x P. Its norm
can be computed from

* the **Gram** matrices of a and g: T^2 (D + P) operations by symmetry, and only the factors are held;
* the **instance** (the instantiated per-unit gradient): D x P entries, formed and held instead of the factors. Norm and
  sum both use it, so the norm has no further cost;
* the **tiled** instance: 2 T D P operations; no entry of it is held, only the factors.

The choice is made from the shapes at each call, since lengths vary. All algorithms are exact: the choice changes a norm
only by rounding.

Shape suffixes: B rows, U units, T tokens, D, L, R, P widths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dpllm.ghost import kernels, triton_launch
from dpllm.ghost.sums import Sum, Weights

NormAlgorithm = Literal["auto", "gram", "instance", "tiled"]


@dataclass(frozen=True)
class NormMethod:
    """How norms of matrices are computed, and how often the backward pass runs for them.

    Attributes:
        algorithm: "gram", "instance" or "tiled" (see the module), or "auto": the cheapest for the given shape.
        fused: True: the Triton kernels. False: the PyTorch functions. None: the kernels on CUDA if Triton is installed
            and supports the dtype, and one of them was compiled and ran; otherwise a warning says why not.
        backward_passes: the number of backward passes. 1: the factors of all layers are kept from the beginning of
            the pass to the clipped sum. 2: the first pass computes the norms and holds one layer's factors at a time;
            the second computes the sum, and its norms are compared with the first's. Two passes compute the activation
            gradients twice, and under activation checkpointing also the recomputed forward pass (about 6 units of work
            instead of 4); they need one float32 gradient of the model where microbatches accumulate. They are worth it
            for full fine-tuning under activation checkpointing with long rows, where the factors take most of the
            memory. LoRA keeps very little in either case. "auto": 2 only under activation checkpointing, where one
            pass would not fit in a GPU's free memory.

    Raises:
        ValueError: an unknown algorithm; fused kernels that cannot run here.

    >>> NormMethod(algorithm="gram", fused=False).fuses(torch.zeros(1))
    False
    """

    algorithm: NormAlgorithm = "auto"
    fused: bool | None = None
    backward_passes: Literal["auto", 1, 2] = "auto"

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.algorithm not in get_args(NormAlgorithm):
            raise ValueError(f"algorithm is {self.algorithm!r}; choose one of {', '.join(get_args(NormAlgorithm))}.")
        if self.backward_passes not in ("auto", 1, 2):
            raise ValueError(f"backward_passes is {self.backward_passes!r}; choose auto, 1 or 2.")
        if self.fused and not triton_launch.available():
            raise ValueError(
                "fused=True needs the Triton kernels, which cannot run here: Triton or a CUDA device is missing. "
                "Leave fused=None; the PyTorch functions compute the same."
            )

    def fuses(self, *tensors: Tensor) -> bool:
        """Whether the kernels work on these tensors."""
        if self.fused is not None:
            return self.fused
        if not triton_launch.available():
            return False
        return all(t.is_cuda and t.dtype in triton_launch.DTYPES and triton_launch.is_usable(t.device) for t in tensors)

    def holds_instance(self, factor_bytes: float, instance_bytes: float) -> bool:
        """Whether a gradient is held as an instance rather than as factors: if that takes no more memory.

        It then costs no more operations either: the Gram norm would add T^2 (D + P). That is below the 2 T D P of
        the clipped sum only while T < 2 D P / (D + P), where the factors of 16 bits are smaller.

        Args:
            factor_bytes: the bytes of the factors of all rows.
            instance_bytes: the bytes of the gradients of all units.
        """
        if self.algorithm == "auto":
            return instance_bytes <= factor_bytes
        return self.algorithm == "instance"

    def outer_norms(self, shared_BTD: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the squared norms of the gradients of layers that read one input, as `kernels.gram_norms`.

        By tiles of the gradients themselves where this takes fewer operations than Gram matrices.
        """
        ((sq_norm_B, mass_B),) = self.grouped_outer_norms([(shared_BTD, grads)])
        return sq_norm_B, mass_B

    def grouped_outer_norms(self, groups: Sequence[tuple[Tensor, list[Tensor]]]) -> list[tuple[Tensor, Tensor]]:
        """Return `outer_norms` of several groups of layers; the kernels take all of them in one launch.

        Without the kernels, those with small inputs are computed together, see `kernels.grouped_gram_norms`.

        Args:
            groups: inputs (B, T_i, D_i), each with the output gradients (B, T_i, P_ij) of the layers that read it.
        """
        norms: list[tuple[Tensor, Tensor] | None] = [None] * len(groups)
        fused: list[int] = []
        stacked: dict[tuple, list[int]] = {}
        for i, (shared_BTD, grads) in enumerate(groups):
            if self._tiles(shared_BTD, grads):
                norms[i] = self._tiled_norms(shared_BTD, grads)
            elif self.fuses(shared_BTD, *grads) and all(grad.dtype == grads[0].dtype for grad in grads):
                fused.append(i)
            elif kernels.is_small(shared_BTD) and kernels.is_short(shared_BTD.shape[1]):
                stacked.setdefault((shared_BTD.shape[:2], shared_BTD.dtype), []).append(i)
            else:
                norms[i] = kernels.gram_norms(shared_BTD, grads)
        for together in stacked.values():
            for i, both in zip(together, kernels.grouped_gram_norms([groups[i] for i in together]), strict=True):
                norms[i] = both
        if fused:
            sq_norm_NB, mass_NB = triton_launch.grouped_gram_norms([groups[i] for i in fused])
            for i, sq_norm_B, mass_B in zip(fused, sq_norm_NB, mass_NB, strict=True):
                norms[i] = sq_norm_B, mass_B
        return [found for found in norms if found is not None]

    def _tiles(self, shared_BTD: Tensor, grads: list[Tensor]) -> bool:
        if self.algorithm != "auto":
            return self.algorithm == "tiled"
        tokens, width = shared_BTD.shape[1:]
        outputs = sum(grad.shape[2] for grad in grads)
        return 2 * tokens * width * outputs < tokens * tokens * (width + outputs)

    def _tiled_norms(self, shared_BTD: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        dtype = kernels.accumulation_dtype(shared_BTD.dtype)
        norms = triton_launch.instance_norms if self.fuses(shared_BTD, *grads) else kernels.instance_norms
        sq_norm_B = shared_BTD.new_zeros(shared_BTD.shape[0], dtype=dtype)
        mass_B = torch.zeros_like(sq_norm_B)
        least = math.sqrt(kernels.least_square(dtype))
        size_BT = torch.linalg.vector_norm(shared_BTD, dim=2, dtype=dtype).clamp_min_(least)
        for grad_BTP in grads:
            sq_norm_B += norms(shared_BTD, grad_BTP)
            grad_size_BT = torch.linalg.vector_norm(grad_BTP, dim=2, dtype=dtype).clamp_min_(least)
            mass_B += (size_BT * grad_size_BT).sum(1).square()
        return sq_norm_B, mass_B

    def add_weighted_outer_(
        self, total: Sum, left_BTL: Tensor, right_BTR: Tensor, weights: Weights, input_side: str = "right"
    ) -> None:
        """Add ``sum_b factor_b sum_t left_bt (x) right_bt`` to ``total``; the fused kernel may finish it.

        Args:
            total: the sum.
            left_BTL: factor along the first dimension of the parameter.
            right_BTR: factor along its second.
            weights: of the rows.
            input_side: "left" or "right", whichever holds the input, which layers may share.
        """
        narrow = left_BTL.element_size() == right_BTR.element_size() == 2  # cuBLAS is best for wider ones
        narrow = narrow and total.dtype == torch.float32
        if not (narrow and self.fuses(left_BTL, right_BTR)):
            if narrow and kernels.on_tensor_cores(left_BTL, right_BTR):
                left_BTL, right_BTR, factor_B = weights.kept(left_BTL, right_BTR)
                kernels.add_weighted_outer_(total.total, left_BTL, right_BTR, factor_B, total.is_empty)
            else:
                self._add_scaled_outer_(total, left_BTL, right_BTR, weights, input_side)
        elif total.takes_last:
            gradient, scale = total.begin_gradient()
            start = None if total.is_empty else total.total
            triton_launch.weighted_outer_(gradient, start, left_BTL, right_BTR, weights.factor, scale)
            total.gradient = gradient
        else:
            start = None if total.is_empty else total.total
            triton_launch.weighted_outer_(total.total, start, left_BTL, right_BTR, weights.factor)
        total.is_empty = False

    def _add_scaled_outer_(
        self, total: Sum, left_BTL: Tensor, right_BTR: Tensor, weights: Weights, input_side: str
    ) -> None:
        """Add the product of scaled inputs and output gradients, in the dtype of the sum."""
        x, grad = (left_BTL, right_BTR) if input_side == "left" else (right_BTR, left_BTL)
        x_ND, grad_NP = weights.scaled(x, total.dtype), weights.kept(grad)[0].to(total.dtype).flatten(0, 1)
        left_NL, right_NR = (x_ND, grad_NP) if input_side == "left" else (grad_NP, x_ND)
        kernels.add_product_(total.total, left_NL.mT, right_NR, total.is_empty)

    def lookup_norms(
        self, index_BT: Tensor, right_BTR: Tensor, unit_B: Tensor, num_units: int, num_entries: int
    ) -> Tensor:
        """Return the squared norm of each unit's gradient of a lookup table, (U,); see `kernels.lookup_norms`."""
        norms = triton_launch.lookup_norms if self.fuses(right_BTR) else kernels.lookup_norms
        return norms(index_BT, right_BTR, unit_B, num_units, num_entries)
