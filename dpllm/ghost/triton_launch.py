"""Fused Triton kernels for the norm arithmetic, which replace the PyTorch code of `dpllm.ghost.kernels` on CUDA.

The PyTorch functions are the reference and the CPU path. The kernels compute the same numbers with fewer memory
transfers:

* `grouped_gram_norms`: ||sum_t a_t (x) g_t||^2 = sum_{s,t} <a_s, a_t> <g_s, g_t> (ghost norm, Li et al. 2022,
    arXiv:2110.05679). Both Gram matrices stay in registers, one tile pair at a time; only pairs with t <= s are
    computed, T^2 (D + P) operations instead of 2 T^2 (D + P).
* `instance_norms`: the same number from the (L, R) gradient, which is formed tile by tile, squared and never written;
  2 T L R operations, fewer than the Gram algorithm where T > 2 L R / (L + R).
* `weighted_outer_`: the clipped sum of a matrix, and with noise and scale the gradient, in one pass over memory.
* `lookup_norms`: embedding norms; equal tokens of a unit are adjacent after a sort, and each run is summed,
  squared and reduced without a slot per token.

Every product is accumulated in float32: bfloat16 and float16 inputs are multiplied exactly by the tensor cores, float32
ones in float32 and never in TF32. Tensor cores align the terms of a block with their running sum and truncate bits that
do not fit (Fasi et al. 2021, PeerJ Computer Science 7:e330, for V100, T4 and A100). A long sum of one sign is therefore
too small, and so is a norm. Sums are split after `CHUNK` terms, and the parts are added with rounding to nearest.
``benchmarks/kernel_times.py`` measures the remaining error against `dpllm.ghost.kernels.rounding_slack`.

Programs write one partial result each, and a second pass adds those in a fixed order, without atomics, so equal inputs
give equal bits.

Inputs are bfloat16, float16 or float32, of any strides and sizes, and never copied. Other dtypes raise `ValueError`.
Triton is optional. With ``TRITON_INTERPRET=1`` set before its first import, the kernels run on the CPU, slowly; the
tests use this without a GPU.

Shape suffixes: B rows, T tokens, U units, V table entries, D, L, R, P widths.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpllm.ghost import triton_programs as programs
from dpllm.ghost.kernels import least_square
from dpllm.ghost.refusals import is_shortage
from dpllm.ghost.triton_programs import Tile, tile_of

triton, tl = programs.triton, programs.tl
INTERPRETED = programs.INTERPRETED

CHUNK = 1024
"""Terms that a tensor core adds before their sum is added to a total with rounding to nearest."""

OLDEST = (8, 0)
"""The lowest supported compute capability, Ampere. On older GPUs programs spill kilobytes of registers."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON_DTYPES = {} if triton is None else dict(zip(DTYPES, (tl.bfloat16, tl.float16, tl.float32), strict=True))
_VECTOR = {"num_warps": 4, "enable_fp_fusion": True}  # compiler options of programs without products

Groups = Sequence[tuple[Tensor, list[Tensor]]]
"""Inputs (B, T_i, D_i), each with the output gradients (B, T_i, P_ij) of the layers that read it."""


def available() -> bool:
    """Return whether the kernels can run: Triton is installed, and there is a CUDA device or the interpreter."""
    return triton is not None and (INTERPRETED or torch.cuda.is_available())


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Return whether kernels run on a CUDA device with Triton installed; if not, warn once with the reason."""
    problem = _problem(device)
    if problem is not None:
        warnings.warn(
            f"The Triton kernels cannot run on {device}: {problem}. dpllm uses its PyTorch functions there, which "
            "return the same results but need more time and memory. Set NormMethod(fused=False) to choose them "
            "without this warning.",
            stacklevel=2,
        )
    return problem is None


def _problem(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return f"its compute capability is {'.'.join(map(str, capability))}, but they need at least 8.0 (Ampere)"
    try:
        found = probe(device)
    except Exception as error:  # of a compiler, an assembler, a linker, a driver or a cache folder
        if is_shortage(error):
            raise  # unrelated to Triton
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"Triton could not compile a program ({type(error).__name__}: {first_line}). It needs a C compiler, "
            "Python's header files (python3-dev) and a writable cache folder (TRITON_CACHE_DIR)"
        )
    return None if found == 3.0 else f"a program returned {found} instead of 3.0"


def probe(device: torch.device) -> float:
    """Compile and run the smallest program, which sums three ones, and return its result."""
    partial, total = torch.ones(3, device=device), torch.zeros(1, device=device)
    bounds = torch.tensor([0, 3], device=device)
    _launch(programs.segment_program, 1, total, (partial, bounds, total, 1), {"BLOCK": 1024, **_VECTOR})
    return float(total)


def grouped_gram_norms(groups: Groups) -> tuple[Tensor, Tensor]:
    """Return the squared gradient norms of layers that read one input, for N inputs, with one launch.

    The Gram tile of an input is formed once for all its layers. Inputs that differ in tokens, dtypes or alignment need
    one launch per class.

    Returns:
        ``(sq_norm_NB, mass_NB)`` in float32: squared norms summed over the layers, and (sum_t |a_t| |g_t|)^2 with |g_t|
        over all the layers, which scales their rounding error; lengths count as at least
        `dpllm.ghost.kernels.least_square`.

    Raises:
        ValueError: a group without a gradient, shapes that do not match, or gradients of two dtypes in a group.
    """
    if not groups or not all(grads for _, grads in groups):
        raise ValueError("gram_norms: there is no output gradient. Pass one (B, T, P) tensor per layer.")
    _require("gram_norms", *(x for shared, grads in groups for x in (shared, *grads)))
    classes: dict[tuple, list[int]] = {}
    for i, (shared, grads) in enumerate(groups):
        _require_same_tokens("gram_norms", shared, *grads)
        if shared.shape[0] != groups[0][0].shape[0] or any(grad.dtype != grads[0].dtype for grad in grads):
            raise ValueError(
                "gram_norms: the groups differ in rows, or a group's gradients differ in dtype. Pass them in separate "
                "calls."
            )
        aligned = all(map(_is_aligned, (shared, *grads)))
        classes.setdefault((shared.shape[1], shared.dtype, grads[0].dtype, aligned), []).append(i)
    results = [_gram_norms([groups[i] for i in members], key[3]) for key, members in classes.items()]
    if len(results) == 1:
        sums = results[0]
    else:
        places = [i for members in classes.values() for i in members]
        parts = dict(zip(places, (part for result in results for part in result.unbind(1)), strict=True))
        sums = torch.stack([parts[i] for i in range(len(groups))], 1)
    return sums[0], sums[1].square()


def _gram_norms(groups: Groups, aligned: bool) -> Tensor:
    """Return (2, N, B): the squared norms and the roots of the masses of groups of one class."""
    first, first_grad = groups[0][0], groups[0][1][0]
    rows, tokens, _ = first.shape
    if rows == 0 or tokens == 0:
        return _zeros(first, 2, len(groups), rows)
    tile, options = _tile(tokens, first, first_grad, aligned=aligned)
    blocks = -(-tokens // tile.block)
    pairs = blocks * (blocks + 1) // 2
    partial = torch.empty(2, len(groups), rows, pairs, dtype=torch.float32, device=first.device)
    options |= {
        "INPUT": _TRITON_DTYPES[first.dtype],
        "GRAD": _TRITON_DTYPES[first_grad.dtype],
        "BLOCK_T": tile.block,
        "BLOCK_K": tile.depth,
        "CHUNK_K": CHUNK,
        "LEAST": least_square(torch.float32),
    }
    arguments = _table(groups), len(groups), partial, rows, tokens, pairs, partial.stride(0)
    _launch(programs.gram_program, len(groups) * rows * pairs, partial, arguments, options)
    return partial.sum(3)


def _table(groups: Groups) -> Tensor:
    """Return the addresses of each group's tensors, as 64-bit integers.

    N entries: group indices, starting with the group with the most operations, so that the last programs are short.
    N + 1 entries: the offsets of each of these groups' tensors in the table, and the end of the last. Then for each
    tensor its address, three strides and width, with a group's input before its gradients.
    """
    device, tensors_of = groups[0][0].device, [(shared, *grads) for shared, grads in groups]
    order = sorted(range(len(groups)), key=lambda i: -sum(x.shape[2] for x in tensors_of[i]))
    begin = 2 * len(groups) + 1
    places, tensors = [begin], []
    for i in order:
        for x in tensors_of[i]:
            tensors += [x.data_ptr(), *x.stride(), x.shape[2]]
        places.append(begin + len(tensors))
    table = torch.tensor(order + places + tensors, dtype=torch.int64)
    if device.type != "cuda":
        return table
    with torch.cuda.device(device):
        # From pinned memory the copy does not block, and PyTorch keeps both memories until the launches have used them.
        return table.pin_memory().to(device, non_blocking=True)


def _is_aligned(x: Tensor) -> bool:
    """Return whether the last dimension is contiguous, and address, width and other strides are multiples of 16 bytes.

    Also requires that 128 tokens span less than 2^31 entries. The stride of another dimension of size 1 is ignored. An
    expanded last dimension is not contiguous: it holds one number, followed by unrelated memory.
    """
    units, width = 16 // x.element_size(), x.shape[-1]
    if width % units or x.stride(-1) != 1:
        return False
    if not x.is_contiguous():
        strides = [stride if size > 1 else 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]
        if strides[-1] >= 1 << 24 or any(stride % units for stride in strides):
            return False
    elif width >= 1 << 24:  # all other strides are multiples of the width
        return False
    return x.data_ptr() % 16 == 0


def instance_norms(left_BTL: Tensor, right_BTR: Tensor) -> Tensor:
    """Return the squared norms ||sum_t left_bt (x) right_bt||^2 from the gradient itself, without writing its entries.

    If tokens cancel, an entry of the gradient has a rounding error that scales with sum_t |left_t| |right_t|, not
    with the norm; the caller accounts for it.

    Args:
        left_BTL: factor (B, T, L) along the first dimension of the weight.
        right_BTR: factor (B, T, R) along its second dimension.

    Returns:
        (B,) float32.
    """
    _require("instance_norms", left_BTL, right_BTR)
    _require_same_tokens("instance_norms", left_BTL, right_BTR)
    rows, tokens, _ = left_BTL.shape
    if 0 in (*left_BTL.shape, right_BTR.shape[2]):
        return _zeros(left_BTL, rows)
    factors, tiles_l, tiles_r, options = _outer(left_BTL, right_BTR)
    partial = torch.empty(rows, tiles_l * tiles_r, dtype=torch.float32, device=left_BTL.device)
    squares = partial, None, None, 0, None, 0, 0, 1.0, 1  # of one row in each program
    arguments = *factors, *squares, tokens, tiles_l, tiles_r
    _launch(programs.outer_program, partial.numel(), partial, arguments, options)
    return partial.sum(1)


def weighted_outer_(
    out_LR: Tensor,
    start_LR: Tensor | None,
    left_BTL: Tensor,
    right_BTR: Tensor,
    factor_B: Tensor,
    scale: float = 1.0,
) -> None:
    """Write ``scale * (start + sum_b factor_b sum_t left_bt (x) right_bt)`` to ``out``, in one pass over memory.

    A factor multiplies a row's finished gradient, in float32 and in registers: neither factor nor product is rounded to
    the inputs' 16 bits, and no input is scaled. Rows with factor 0 contribute exactly zero, even if they are not
    finite, and the host need not know which they are.

    Args:
        out_LR: of the weight's shape, float32 or a dtype of the inputs, to which the result is rounded at the end.
        start_LR: float32, of the same shape and strides; may be ``out_LR`` itself. None: zeros, never read.
        left_BTL: factor (B, T, L) along the first dimension of the weight.
        right_BTR: factor (B, T, R) along its second dimension.
        factor_B: the factor of each row's gradient.
        scale: multiplies the sum in float32.
    """
    start = out_LR.new_empty(0, dtype=torch.float32) if start_LR is None else start_LR
    _require("weighted_outer_", left_BTL, right_BTR, out_LR, start)
    _require_same_tokens("weighted_outer_", left_BTL, right_BTR)
    rows, tokens, left = left_BTL.shape
    right = right_BTR.shape[2]
    same = start_LR is None or (start_LR.shape, start_LR.stride()) == (out_LR.shape, out_LR.stride())
    if out_LR.shape != (left, right) or not same or start.dtype != torch.float32 or factor_B.shape != (rows,):
        raise ValueError(
            f"weighted_outer_: out is {tuple(out_LR.shape)} with strides {out_LR.stride()}, start is "
            f"{tuple(start.shape)} with strides {start.stride()} in {start.dtype}, factor is {tuple(factor_B.shape)}. "
            f"Pass out ({left}, {right}), a float32 start with the same strides, and factor ({rows},)."
        )
    if 0 in (left, right):
        return
    factors, tiles_l, tiles_r, options = _outer(left_BTL, right_BTR, out_LR, *([] if start_LR is None else [start]))
    start_rows = 0 if start_LR is None else left
    sums = None, factor_B.to(torch.float32), start, start_rows, out_LR, *out_LR.stride(), scale, rows
    arguments = *factors, *sums, tokens, tiles_l, tiles_r
    _launch(programs.outer_program, tiles_l * tiles_r, out_LR, arguments, options)


def lookup_norms(index_BT: Tensor, right_BTR: Tensor, unit_B: Tensor, num_units: int, num_entries: int) -> Tensor:
    """Return each unit's squared gradient norm of a lookup table, sum_v ||sum of right_bt where index_bt = v||^2.

    A sort of the (unit, token) keys makes equal tokens of one unit adjacent, including those from different rows;
    nothing of the size of ``right_BTR`` or of the table is written, and the host does not wait.

    Args:
        index_BT: (B, T) integers in [0, V).
        right_BTR: the gradients of the looked-up entries, (B, T, R).
        unit_B: (B,) unit of each row; a negative one marks a padding row, which belongs to no unit.
        num_units: U.
        num_entries: V, rows of the table.

    Returns:
        (U,) float32; 0 for a unit without rows.
    """
    _require("lookup_norms", right_BTR)
    if index_BT.shape != right_BTR.shape[:2] or unit_B.shape != right_BTR.shape[:1]:
        raise ValueError(
            f"lookup_norms: index {tuple(index_BT.shape)}, gradient {tuple(right_BTR.shape)} and unit "
            f"{tuple(unit_B.shape)} do not match. Pass (B, T), (B, T, R) and (B,)."
        )
    rows, tokens, width = right_BTR.shape
    total_U = _zeros(right_BTR, num_units)
    if right_BTR.numel() == 0 or num_units == 0:
        return total_U
    unit_B1 = torch.where(unit_B >= 0, unit_B, num_units).long()[:, None]  # padding sorts behind every unit
    keys, order = torch.sort((unit_B1 * num_entries + index_BT).flatten(), stable=True)
    ends = torch.searchsorted(keys, keys, right=True)
    bounds = torch.searchsorted(keys, torch.arange(num_units + 1, device=keys.device) * num_entries)
    block_r = min(512, triton.next_power_of_2(width))
    tiles_r = -(-width // block_r)
    partial = torch.empty(rows * tokens, tiles_r, dtype=torch.float32, device=right_BTR.device)
    gradient = right_BTR, *right_BTR.stride()
    arguments = keys, order, ends, *gradient, partial, num_units * num_entries, tokens, width, tiles_r
    options = {"ALIGNED": _is_aligned(right_BTR), "BLOCK_J": 8, "BLOCK_R": block_r, **_VECTOR}
    _launch(programs.run_program, partial.numel(), partial, arguments, options)
    of_units = partial, bounds, total_U, tiles_r
    _launch(programs.segment_program, num_units, total_U, of_units, {"BLOCK": 1024, **_VECTOR})
    return total_U


def _launch(program: Any, grid: int, written: Tensor, arguments: tuple, options: dict[str, Any]) -> None:
    """Launch a program on the device of the tensor that it writes; options are its constants, by name."""
    with torch.cuda.device_of(written):
        program[(grid,)](*arguments, **options)


def _tile(size: int, one: Tensor, other: Tensor, aligned: bool) -> tuple[Tile, dict[str, Any]]:
    """Return the tile for the products of two tensors, and the options common to all products."""
    tile = tile_of(one.device, size, torch.float32 in (one.dtype, other.dtype), aligned)
    compiler = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return tile, compiler | {"ALIGNED": aligned}


def _outer(left_BTL: Tensor, right_BTR: Tensor, *sums: Tensor) -> tuple[tuple, int, int, dict[str, Any]]:
    """Return the arguments for a gradient's factors, its tiles along both dimensions, and the options.

    The program also reads or writes ``sums`` tile by tile.
    """
    left, right = left_BTL.shape[2], right_BTR.shape[2]
    aligned = all(map(_is_aligned, (left_BTL, right_BTR, *sums)))
    tile, options = _tile(min(left, right), left_BTL, right_BTR, aligned)
    options |= {"BLOCK": tile.block, "BLOCK_T": tile.depth, "CHUNK": max(1, CHUNK // tile.depth)}
    factors = left_BTL, *left_BTL.stride(), left, right_BTR, *right_BTR.stride(), right
    return factors, -(-left // tile.block), -(-right // tile.block), options


def _require(name: str, *tensors: Tensor) -> None:
    """Refuse tensors that the kernels would misread."""
    if not available():
        raise ValueError(
            f"{name}: Triton or a CUDA device is missing. Use the PyTorch function in dpllm.ghost, which returns the "
            "same result."
        )
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name}: an input is {tensor.dtype}, but the kernels take bfloat16, float16 and float32. Use the "
                "PyTorch function in dpllm.ghost, which takes any dtype."
            )
        if tensor.device != tensors[0].device or not (tensor.is_cuda or INTERPRETED):
            raise ValueError(
                f"{name}: an input is on {tensor.device}. Move all inputs to one CUDA device, or use the PyTorch "
                "function in dpllm.ghost."
            )


def _require_same_tokens(name: str, x: Tensor, *others: Tensor) -> None:
    for y in others:
        if x.ndim != 3 or y.ndim != 3 or x.shape[:2] != y.shape[:2]:
            raise ValueError(
                f"{name}: shapes {tuple(x.shape)} and {tuple(y.shape)} do not match. Pass (B, T, ·) tensors with equal "
                "B and T."
            )


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)
