"""How norms and sums are computed: the choice between equivalent algorithms, and their measured rounding error.

The gradient of a matrix for one unit is sum_t a_t (x) g_t over its T tokens, D x P. Its norm can be computed from

* the **Gram** matrices of a and g: T^2 (D + P) operations by symmetry; only the factors are held;
* the **instance** (the instantiated per-unit gradient): D x P entries, formed and held instead of the factors. Norm and
  sum both use it, so the norm has no further cost;
* the **tiled** instance: 2 T D P operations; only the factors are held, and no entry of the instance.

The shapes decide at each call, since lengths vary. All algorithms are exact: the choice changes a norm only by
rounding.

Norms are accumulated in float32, and `kernels.rounding_slack` gives their allowed error. On a GPU the error depends on
how its tensor cores treat the last bits of a sum (Fasi et al. 2021, PeerJ Computer Science 7:e330), which differs
between generations. So the error is measured once per device, dtype and method, on the worst case that needs no private
data: long sums of terms of one sign, where the truncated bits add up.

Shape suffixes: B rows, U units, T tokens, D, L, R, P widths.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dpllm.ghost import kernels, triton_launch
from dpllm.ghost.refusals import GhostError
from dpllm.ghost.sums import Sum, Weights

_NARROW = 128  # the widths for sums: a matrix of this size in both dimensions
_MOST = 32.0  # times the slack
_MORE_ON_CPU = 1.5  # times the memory of factors, which instances may take
_SHAPES = ((256, 4096), (1, 300), (1, 512))  # tokens, width; with one token, errors do not average out

NormAlgorithm = Literal["auto", "gram", "instance", "tiled"]


@dataclass(frozen=True)
class NormMethod:
    """How norms of matrices are computed, and how often the backward pass runs for them.

    Attributes:
        algorithm: "gram", "instance" or "tiled" (see the module), or "auto": the cheapest for the given shape.
        fused: True: the Triton kernels. False: the PyTorch functions. None: the kernels on CUDA if Triton is installed,
            supports the dtype and could compile and run one of them; otherwise a warning states the reason.
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
                "fused=True needs the Triton kernels, but Triton or a CUDA device is missing. Leave fused=None: the "
                "PyTorch functions return the same results."
            )

    def fuses(self, *tensors: Tensor) -> bool:
        """Return whether the kernels support these tensors."""
        if self.fused is not None:
            return self.fused
        if not triton_launch.available():
            return False
        return all(t.is_cuda and t.dtype in triton_launch.DTYPES and triton_launch.is_usable(t.device) for t in tensors)

    def holds_instance(self, factor_bytes: float, instance_bytes: float, on_cpu: bool = False) -> bool:
        """Return whether a gradient is held as an instance instead of factors: if that takes no more memory.

        It then costs no more operations either: the Gram norm would add T^2 (D + P). That is below the 2 T D P of
        the clipped sum only while T < 2 D P / (D + P), where the factors of 16 bits are smaller.

        On a CPU, where operations cost more and memory less, the instance may take half as much memory again. A Llama
        of width 512 with rows of 256 tokens then trains in 1.11 times the time of ordinary training, and with Gram
        matrices in 1.20 times (``benchmarks/host_time.py``).

        Args:
            factor_bytes: the bytes of the factors of all rows.
            instance_bytes: the bytes of the gradients of all units.
            on_cpu: whether they are on the CPU.
        """
        if self.algorithm == "auto":
            return instance_bytes <= factor_bytes * (_MORE_ON_CPU if on_cpu else 1)
        return self.algorithm == "instance"

    def outer_norms(self, shared_BTD: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the squared gradient norms of layers that read one input, as `kernels.gram_norms`.

        Uses tiles of the gradients themselves if this takes fewer operations than Gram matrices.
        """
        return self.grouped_outer_norms([(shared_BTD, grads)])[0]

    def grouped_outer_norms(self, groups: Sequence[tuple[Tensor, list[Tensor]]]) -> list[tuple[Tensor, Tensor]]:
        """Return `outer_norms` of several groups of layers; the fused kernels handle all of them in one launch.

        Args:
            groups: inputs (B, T_i, D_i), each with the output gradients (B, T_i, P_ij) of the layers that read it.
        """
        norms: list[Any] = [None] * len(groups)
        fused = []
        for i, (shared_BTD, grads) in enumerate(groups):
            if self._tiles(shared_BTD, sum(grad.shape[2] for grad in grads)):
                norms[i] = self._tiled_norms(shared_BTD, grads)
            elif self.fuses(shared_BTD, *grads) and all(grad.dtype == grads[0].dtype for grad in grads):
                fused.append(i)
            else:
                norms[i] = kernels.gram_norms(shared_BTD, grads)
        if fused:
            found = zip(*triton_launch.grouped_gram_norms([groups[i] for i in fused]), strict=True)
            for i, both in zip(fused, found, strict=True):
                norms[i] = both
        return norms

    def stacks(self, x_BTD: Tensor, grad_BTP: Tensor, outputs: int) -> bool:
        """Return whether layers with such an input and gradient, of ``outputs`` in all, are batched with other layers.

        They are if a whole Gram matrix is formed at once, and not by a fused kernel, which handles many layers anyway.
        """
        is_short = kernels.is_short(x_BTD.shape[1])
        return is_short and not self._tiles(x_BTD, outputs) and not self.fuses(x_BTD, grad_BTP)

    def _tiles(self, shared_BTD: Tensor, outputs: int) -> bool:
        if self.algorithm != "auto":
            return self.algorithm == "tiled"
        tokens, width = shared_BTD.shape[1:]
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
        """Add ``sum_b factor_b sum_t left_bt (x) right_bt`` to ``total``; the fused kernel may complete the gradient.

        Args:
            total: the sum.
            left_BTL: factor along the first dimension of the parameter.
            right_BTR: factor along the parameter's second dimension.
            weights: the weights of the rows.
            input_side: "left" or "right", whichever holds the input, which several layers may share.
        """
        narrow = left_BTL.element_size() == right_BTR.element_size() == 2 and total.dtype == torch.float32
        if narrow and self.fuses(left_BTL, right_BTR):  # cuBLAS is best for wider ones
            out, scale = total.begin_gradient() if total.takes_last else (total.total, 1.0)
            start = None if total.is_empty else total.total
            triton_launch.weighted_outer_(out, start, left_BTL, right_BTR, weights.factor, scale)
            if total.takes_last:
                total.gradient = out
        elif narrow and kernels.on_tensor_cores(left_BTL, right_BTR):
            left_BTL, right_BTR, factor_B = weights.kept(left_BTL, right_BTR)
            kernels.add_weighted_outer_(total.total, left_BTL, right_BTR, factor_B, total.is_empty)
        else:
            x, grad = (left_BTL, right_BTR) if input_side == "left" else (right_BTR, left_BTL)
            x_ND, grad_NP = weights.scaled(x, total.dtype), weights.kept(grad)[0].to(total.dtype).flatten(0, 1)
            left_NL, right_NR = (x_ND, grad_NP) if input_side == "left" else (grad_NP, x_ND)
            kernels.add_product_(total.total, left_NL.mT, right_NR, total.is_empty)
        total.is_empty = False

    def lookup_norms(
        self, index_BT: Tensor, right_BTR: Tensor, unit_B: Tensor, num_units: int, num_entries: int
    ) -> Tensor:
        """Return each unit's squared gradient norm of a lookup table, (U,); see `kernels.lookup_norms`."""
        norms = triton_launch.lookup_norms if self.fuses(right_BTR) else kernels.lookup_norms
        return norms(index_BT, right_BTR, unit_B, num_units, num_entries)


# ------------------------------------------------------------------ the rounding error of this machine


def is_measured(x: Tensor) -> bool:
    """Return whether the rounding of norms and sums depends on the device for this tensor: below float64, on a GPU."""
    return x.is_cuda and x.is_floating_point() and x.dtype != torch.float64


@functools.cache
def slack_factor(norm_method: NormMethod, device: torch.device, dtype: torch.dtype) -> float:
    """Return the factor by which the norms' slack must exceed `kernels.rounding_slack` on this device.

    Guarantee: with it, the slack is twice the largest error measured here that rounding may subtract from a norm or add
    to a clipped sum. It reduces clip factors by a few millionths.

    Args:
        norm_method: how norms are computed.
        device: the device of the tensors.
        dtype: the dtype of activations and output gradients.

    Raises:
        GhostError: the error is too large for rounding.
    """
    measured = [found for shape in _SHAPES for found in shortfalls(norm_method, device, dtype, *shape).items()]
    what, worst = max(measured, key=lambda found: math.inf if math.isnan(found[1]) else found[1])
    if not worst <= _MOST:
        raise GhostError(
            f"On {device}, {what} of {dtype} are off by {worst:.1f} times the error that the clip factors allow. This "
            "is too large for rounding errors, and a unit could contribute more than the clip norm. Pass "
            "norm_method=NormMethod(fused=False), or train in float32"
        )
    return 1.0 if worst <= 1 else 2 * worst


class Flows:
    """The kinds of tensors behind norms and sums: the devices and dtypes whose rounding is measured."""

    def __init__(self) -> None:
        """Start without tensors."""
        self._seen: set[tuple[torch.device, torch.dtype]] = set()

    def note(self, tensor: Tensor) -> None:
        """Record the kind of a tensor."""
        if is_measured(tensor):
            self._seen.add((tensor.device, tensor.dtype))

    def slack_factor(self, norm_method: NormMethod) -> float:
        """Return the largest `slack_factor` of all recorded kinds."""
        return max((slack_factor(norm_method, *kind) for kind in self._seen), default=1.0)


def shortfalls(
    norm_method: NormMethod, device: torch.device, dtype: torch.dtype, tokens: int, width: int
) -> dict[str, float]:
    """Return the error of norms and sums of one-signed terms against float64, divided by the slack; at most 1 is sound.

    For sums the slack is that of a squared norm: 16 units in the last place of the terms' sum.
    """
    generator = torch.Generator().manual_seed(0)
    x_BTD, y_BTD = (torch.rand(1, tokens, width, generator=generator).to(device, dtype) for _ in range(2))
    excess = {}
    with kernels.exact_matmul(), torch.no_grad():
        exact_B, mass_B = kernels.gram_norms(x_BTD.double(), [y_BTD.double()])
        slack_B = kernels.rounding_slack(dtype) * mass_B
        for norm in ("gram", "tiled"):
            sq_norm_B, _ = NormMethod(norm, norm_method.fused).outer_norms(x_BTD, [y_BTD])
            excess[f"{norm} norms"] = float(((exact_B - sq_norm_B).abs() / slack_B).max())
        index_BT = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        unit_B = torch.zeros(1, dtype=torch.int64, device=device)
        lookup_B = norm_method.lookup_norms(index_BT, x_BTD, unit_B, 1, 1)
        exact_B = x_BTD.double().sum(1).square().sum(1)
        root = float(torch.linalg.vector_norm(x_BTD, dim=2, dtype=torch.float64).sum())
        excess["lookup norms"] = float((exact_B - lookup_B).abs().max()) / (kernels.rounding_slack(dtype) * root**2)
        excess |= _of_sums(norm_method, x_BTD[:, :, :_NARROW], y_BTD[:, :, :_NARROW])
    return excess


def _of_sums(norm_method: NormMethod, x_BTD: Tensor, y_BTD: Tensor) -> dict[str, float]:
    slack = 2 * kernels.rounding_slack(x_BTD.dtype)
    total = torch.zeros(
        x_BTD.shape[2], y_BTD.shape[2], dtype=kernels.accumulation_dtype(x_BTD.dtype), device=x_BTD.device
    )
    norm_method.add_weighted_outer_(Sum.onto(total), x_BTD, y_BTD, Weights(total.new_full((1,), 0.3)))
    exact = 0.3 * x_BTD[0].double().mT @ y_BTD[0].double()
    # As the last addend of a step: the guard of the first step sees a sum that is finished separately.
    last = Sum.onto(total.clone())
    last.finish_in(total.dtype, 0.5)
    norm_method.add_weighted_outer_(last, x_BTD, y_BTD, Weights(total.new_full((1,), 0.3)))
    return {
        "clipped sums": float(((exact - total).abs() / (slack * exact)).max()),
        "finished sums": float(((exact - last.finished()).abs() / (slack * exact)).max()),
    }
