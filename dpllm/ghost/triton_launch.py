"""Fused Triton kernels for the norm arithmetic, drop-ins for the PyTorch code of `dpllm.ghost.kernels` and its callers.

Place in the flow: activations and output gradients of one microbatch -> **squared norms per row or unit** -> clip
factors. The PyTorch functions are the reference and the CPU path; these are for CUDA. They compute the same numbers
with fewer transfers through memory:

* `gram_norms`: ||sum_t a_t (x) g_t||^2 = sum_{s,t} <a_s, a_t> <g_s, g_t> (ghost norm, Li et al. 2022,
  arXiv:2110.05679). Both Gram matrices stay in registers, one tile pair at a time; only pairs with t <= s are
  computed, T^2 (D + P) operations instead of 2 T^2 (D + P).
* `instance_norms`: the same number from the (L, R) gradient, which is formed tile by tile, squared and never written;
  2 T L R operations, fewer than the Gram algorithm where T > 2 L R / (L + R).
* `weighted_outer_`: the clipped sum of a matrix. The factor multiplies a row's gradient after its tokens are summed, in
  float32; scaling an input of 16 bits beforehand would round it and read it once more. With noise and scale it makes
  the gradient in the same pass.
* `lookup_norms`: embedding norms; equal tokens of a unit are adjacent after a sort, and each run is summed,
  squared and reduced without a slot per token.

Every product is accumulated in float32: bfloat16 and float16 inputs are multiplied exactly by the tensor cores, float32
ones in float32 and never in TF32. Tensor cores align the terms of a block with their running sum and cut off
bits that do not fit (Fasi et al. 2021, PeerJ Computer Science 7:e330, for V100, T4 and A100). A long sum of one sign is
therefore too small, and so is a norm. Sums are split after `CHUNK` terms, and the parts are added with rounding to
nearest. ``benchmarks/kernel_times.py`` measures the remaining error against `dpllm.ghost.kernels.rounding_slack`.

Programs write one partial result each, and a second pass adds those in a fixed order: no atomics, so equal inputs give
equal bits. Tile sizes follow from the shapes by fixed rules, not from timing, for the same reason.

Inputs are bfloat16, float16 or float32, of any strides and never copied; sizes may be any. Triton is imported if it is
installed. With ``TRITON_INTERPRET=1`` set before the first import of Triton in the process, the kernels
run on the CPU, slowly, which is how they are tested without a GPU.

Triton needs a C compiler and Python's header files when it first launches a program, and tensor cores that multiply
bfloat16. Where they are missing, the PyTorch functions compute the same.

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
from dpllm.ghost.errors import is_shortage
from dpllm.ghost.kernels import least_square
from dpllm.ghost.triton_programs import Tile, tile_of

triton, tl = programs.triton, programs.tl
INTERPRETED = programs.INTERPRETED

CHUNK = 1024
"""Terms that a tensor core adds up before its sum is added to a total with rounding to nearest."""

OLDEST = (8, 0)
"""The least compute capability, of Ampere. On older GPUs programs spill kilobytes of registers."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON_DTYPES = {} if triton is None else dict(zip(DTYPES, (tl.bfloat16, tl.float16, tl.float32), strict=True))


def available() -> bool:
    """Whether the kernels can run here: Triton is installed, and there is a CUDA device or the interpreter.

    >>> available() in (True, False)
    True
    """
    return triton is not None and (INTERPRETED or torch.cuda.is_available())


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Return whether kernels run on a CUDA device; if not, warn once and say why.

    Args:
        device: a CUDA device, on a machine on which Triton is installed.
    """
    problem = _problem(device)
    if problem is not None:
        warnings.warn(
            f"The Triton kernels cannot run on {device}: {problem}. dpllm uses its PyTorch functions there, which "
            "compute the same but take more time and memory. NormMethod(fused=False) does so without this warning.",
            stacklevel=2,
        )
    return problem is None


def _problem(device: torch.device) -> str | None:
    """Return what keeps the kernels from running, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return f"its compute capability is {'.'.join(map(str, capability))}, and they need at least 8.0 (Ampere)"
    try:
        found = probe(device)
    except Exception as error:  # of a compiler, an assembler, a linker, a driver or a folder for the cache
        if is_shortage(error):
            raise  # says nothing about Triton
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"Triton could not compile a program ({type(error).__name__}: {first_line}). It needs a C compiler, the "
            "header files of Python (python3-dev) and a folder that it can write to (TRITON_CACHE_DIR)"
        )
    return None if found == 3.0 else f"a program returned {found} instead of 3.0"


def probe(device: torch.device) -> float:
    """Compile and run the smallest program, which adds up three ones, and return its result."""
    partial, total = torch.ones(3, device=device), torch.zeros(1, device=device)
    bounds = torch.tensor([0, 3], device=device)
    with torch.cuda.device_of(partial):
        programs.segment_program[(1,)](partial, bounds, total, 1, BLOCK=1024, num_warps=4, enable_fp_fusion=True)
    return float(total)


def gram_norms(shared_BTD: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the squared norms of the gradients of several layers that read one input, summed over the layers.

    Drop-in for `dpllm.ghost.kernels.gram_norms`. The Gram tile of the input is formed once for all layers.

    Args:
        shared_BTD: the input (B, T, D) that all the layers read.
        grads: the output gradient (B, T, P_i) of each layer.

    Returns:
        ``(sq_norm_B, mass_B)`` in float32: squared norms, and (sum_t |a_t| |g_t|)^2 with |g_t| over all the layers,
        which scales their rounding error; lengths count as `dpllm.ghost.kernels.least_square` at least.

    Raises:
        ValueError: no gradient, shapes that do not fit, a dtype or device that the kernels do not take.
    """
    sq_norm_NB, mass_NB = grouped_gram_norms([(shared_BTD, grads)])
    return sq_norm_NB[0], mass_NB[0]


def grouped_gram_norms(groups: Sequence[tuple[Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor]:
    """Return `gram_norms` of several groups of layers, each with its own input, from one launch.

    One launch has enough tiles to occupy the device with large ones, and the host launches once, not once per group.
    Groups that differ in tokens, in dtypes or in being aligned take one launch for each such class.

    Args:
        groups: N inputs (B, T_i, D_i), each with the output gradients (B, T_i, P_ij) of the layers that read it; the
            gradients of a group have one dtype.

    Returns:
        ``(sq_norm_NB, mass_NB)``, as in `gram_norms`, of each group.

    Raises:
        ValueError: a group without gradient, shapes that do not fit, gradients of two dtypes, a dtype or device that
            the kernels do not take.
    """
    if not groups or not all(grads for _, grads in groups):
        raise ValueError("gram_norms: no output gradient. Give one (B, T, P) tensor per layer.")
    _require("gram_norms", *(x for shared, grads in groups for x in (shared, *grads)))
    classes: dict[tuple, list[int]] = {}
    for i, (shared, grads) in enumerate(groups):
        for grad in grads:
            _require_same_tokens("gram_norms", shared, grad)
        if shared.shape[0] != groups[0][0].shape[0] or any(grad.dtype != grads[0].dtype for grad in grads):
            raise ValueError(
                "gram_norms: groups differ in rows, or the gradients of a group in dtype. Give them in separate calls."
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


def _gram_norms(groups: Sequence[tuple[Tensor, list[Tensor]]], aligned: bool) -> Tensor:
    """Return (2, N, B): the squared norms and the roots of the masses of groups of one class."""
    first, first_grad = groups[0][0], groups[0][1][0]
    rows, tokens, _ = first.shape
    if rows == 0 or tokens == 0:
        return _zeros(first, 2, len(groups), rows)
    exact = torch.float32 in (first.dtype, first_grad.dtype)
    tile = tile_of(first.device, tokens, exact, aligned)
    blocks = -(-tokens // tile.block)
    pairs = blocks * (blocks + 1) // 2
    partial = torch.empty(2, len(groups), rows, pairs, dtype=torch.float32, device=first.device)
    _launch(
        "gram_program",
        len(groups) * rows * pairs,
        ([list(group) for group in groups], len(groups), partial, rows, tokens, pairs, partial.stride(0)),
        {
            "INPUT": _TRITON_DTYPES[first.dtype],
            "GRAD": _TRITON_DTYPES[first_grad.dtype],
            "ALIGNED": aligned,
            "BLOCK_T": tile.block,
            "BLOCK_K": tile.depth,
            "CHUNK_K": CHUNK,
            "LEAST": least_square(torch.float32),
            **_options(tile),
        },
        partial,
    )
    return partial.sum(3)


def _total_width(group: tuple[Tensor, list[Tensor]]) -> int:
    return group[0].shape[2] + sum(grad.shape[2] for grad in group[1])


def _table(groups: Sequence[tuple[Tensor, list[Tensor]]], device: torch.device) -> Tensor:
    """Return where the tensors of each group are, as 64-bit integers.

    N entries: the number of a group, that with the most operations first, so that the last programs to run are short.
    N + 1 entries: where the tensors of that group begin in the table, and where those of the last one end. Then of each
    tensor address, three strides and width; the input of a group before its gradients.
    """
    order = sorted(range(len(groups)), key=lambda i: -_total_width(groups[i]))
    begin = 2 * len(groups) + 1
    places, tensors = [begin], []
    for i in order:
        for x in (groups[i][0], *groups[i][1]):
            tensors += [x.data_ptr(), *x.stride(), x.shape[2]]
        places.append(begin + len(tensors))
    table = torch.tensor(order + places + tensors, dtype=torch.int64)
    # From pinned memory the copy waits for nothing, and PyTorch keeps both memories until the launches used them.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _is_aligned(x: Tensor) -> bool:
    """Whether the last dimension is contiguous, and address, width and all other strides are multiples of 16 bytes.

    Also whether 128 tokens span less than 2^31 entries. The stride of another dimension of size 1 does not matter. An
    expanded last dimension is not contiguous: one number is there, and behind it is memory of something else.
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
    """Return the squared norms ||sum_t left_bt (x) right_bt||^2 from the gradient itself, of which no entry is written.

    Args:
        left_BTL: factor (B, T, L) along the first dimension of the weight.
        right_BTR: factor (B, T, R) along its second.

    Returns:
        (B,) float32. Where tokens cancel, an entry of the gradient has a rounding error that scales with
        sum_t |left_t| |right_t| (`Outer.mass`), not with the norm; the caller allows for it.

    Raises:
        ValueError: shapes that do not fit, a dtype or device that the kernels do not take.
    """
    _require("instance_norms", left_BTL, right_BTR)
    _require_same_tokens("instance_norms", left_BTL, right_BTR)
    rows, tokens, left = left_BTL.shape
    right = right_BTR.shape[2]
    if 0 in (rows, tokens, left, right):
        return _zeros(left_BTL, rows)
    exact = torch.float32 in (left_BTL.dtype, right_BTR.dtype)
    aligned = _is_aligned(left_BTL) and _is_aligned(right_BTR)
    tile = tile_of(left_BTL.device, min(left, right), exact, aligned)
    tiles_r = -(-right // tile.block)
    tiles = -(-left // tile.block) * tiles_r
    partial = torch.empty(rows, tiles, dtype=torch.float32, device=left_BTL.device)
    _launch(
        "instance_program",
        rows * tiles,
        (left_BTL, *left_BTL.stride(), left, right_BTR, *right_BTR.stride(), right, partial, tokens, tiles, tiles_r),
        {
            "ALIGNED": aligned,
            "SAME_DTYPE": left_BTL.dtype == right_BTR.dtype,
            "BLOCK_L": tile.block,
            "BLOCK_R": tile.block,
            "BLOCK_T": tile.depth,
            "CHUNK_T": CHUNK,
            **_options(tile),
        },
        partial,
    )
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
    the inputs' 16 bits, and no input is scaled. Rows with factor 0 contribute exactly zero, also if they are not
    finite, and the host need not know which they are.

    Args:
        out_LR: of the weight's shape, float32 or a dtype of the inputs, to which the result is rounded at the end.
        start_LR: float32, of the same shape and strides; may be ``out_LR`` itself. None: zeros, never read.
        left_BTL: factor (B, T, L) along the first dimension of the weight.
        right_BTR: factor (B, T, R) along its second.
        factor_B: the factor of each row's gradient.
        scale: multiplies the sum in float32.

    Raises:
        ValueError: shapes that do not fit, a start that is not float32, a dtype or device that the kernels do not take.
    """
    start = out_LR.new_empty(0, dtype=torch.float32) if start_LR is None else start_LR
    _require("weighted_outer_", left_BTL, right_BTR, out_LR, start)
    _require_same_tokens("weighted_outer_", left_BTL, right_BTR)
    rows, tokens, left = left_BTL.shape
    right = right_BTR.shape[2]
    same = start_LR is None or (start_LR.shape, start_LR.stride()) == (out_LR.shape, out_LR.stride())
    if out_LR.shape != (left, right) or not same or start.dtype != torch.float32 or factor_B.shape != (rows,):
        raise ValueError(
            f"weighted_outer_: out is {tuple(out_LR.shape)} with strides {out_LR.stride()}, start {tuple(start.shape)} "
            f"with {start.stride()} in {start.dtype}, factor {tuple(factor_B.shape)}. Give ({left}, {right}), a "
            f"float32 start with the same strides, and ({rows},)."
        )
    if 0 in (left, right):
        return
    exact = torch.float32 in (left_BTL.dtype, right_BTR.dtype)
    tensors = (left_BTL, right_BTR, out_LR) if start_LR is None else (left_BTL, right_BTR, out_LR, start_LR)
    aligned = all(map(_is_aligned, tensors))
    tile = tile_of(out_LR.device, min(left, right), exact, aligned)
    tiles_l, tiles_r = -(-left // tile.block), -(-right // tile.block)
    _launch(
        "weighted_outer_program",
        tiles_l * tiles_r,
        (
            left_BTL,
            *left_BTL.stride(),
            left,
            right_BTR,
            *right_BTR.stride(),
            right,
            factor_B.to(torch.float32),
            start,
            0 if start_LR is None else left,
            out_LR,
            *out_LR.stride(),
            scale,
            rows,
            tokens,
            tiles_l,
            tiles_r,
        ),
        {
            "ALIGNED": aligned,
            "SAME_DTYPE": left_BTL.dtype == right_BTR.dtype,
            "BLOCK_L": tile.block,
            "BLOCK_R": tile.block,
            "BLOCK_T": tile.depth,
            "CHUNK": max(1, CHUNK // tile.depth),
            "GROUP": 8,
            **_options(tile),
        },
        out_LR,
    )


def lookup_norms(index_BT: Tensor, right_BTR: Tensor, unit_B: Tensor, num_units: int, num_entries: int) -> Tensor:
    """Return each unit's squared gradient norm of a lookup table, sum_v ||sum of right_bt where index_bt = v||^2.

    Drop-in for `dpllm.ghost.kernels.lookup_norms`. A sort of the (unit, token) keys brings equal tokens of one unit
    together, also from several rows; nothing of the size of ``right_BTR`` or of the table is written, and the host
    waits for nothing.

    Args:
        index_BT: (B, T) integers in [0, V).
        right_BTR: the gradient of the entry looked up, (B, T, R).
        unit_B: (B,) unit of each row; a negative one marks a padding row, which belongs to no unit.
        num_units: U.
        num_entries: V, rows of the table.

    Returns:
        (U,) float32; 0 for a unit without rows.

    Raises:
        ValueError: shapes that do not fit, a dtype or device that the kernels do not take.
    """
    _require("lookup_norms", right_BTR)
    if index_BT.shape != right_BTR.shape[:2] or unit_B.shape != right_BTR.shape[:1]:
        raise ValueError(
            f"lookup_norms: index {tuple(index_BT.shape)}, gradient {tuple(right_BTR.shape)} and unit "
            f"{tuple(unit_B.shape)} do not fit. Give them as (B, T), (B, T, R) and (B,)."
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
    count = rows * tokens
    partial = torch.empty(count, tiles_r, dtype=torch.float32, device=right_BTR.device)
    _launch(
        "run_program",
        count * tiles_r,
        (keys, order, ends, right_BTR, *right_BTR.stride(), partial, num_units * num_entries, tokens, width, tiles_r),
        {"ALIGNED": _is_aligned(right_BTR), "BLOCK_J": 8, "BLOCK_R": block_r, "num_warps": 4, "enable_fp_fusion": True},
        partial,
    )
    _launch(
        "segment_program",
        num_units,
        (partial, bounds, total_U, tiles_r),
        {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True},
        total_U,
    )
    return total_U


def _launch(name: str, grid: int, args: tuple, options: dict[str, Any], written: Tensor) -> None:
    """Launch a program.

    Args:
        name: of the program.
        grid: the number of programs.
        args: its arguments by position; where the first is a list of groups of tensors, the program gets their table.
        options: its arguments by name.
        written: the argument to which it writes.
    """
    first, *rest = args
    with torch.cuda.device_of(written):
        table = _table(first, written.device) if isinstance(first, list) else first
        getattr(programs, name)[(grid,)](table, *rest, **options)


def _options(tile: Tile) -> dict[str, Any]:
    """Return the options that all products have."""
    compiler = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return {"WIDEN": INTERPRETED, **compiler}


def _require(name: str, *tensors: Tensor) -> None:
    """Refuse tensors that the kernels would read wrongly."""
    if not available():
        raise ValueError(
            f"{name}: Triton or a CUDA device is missing. Use the PyTorch function in dpllm.ghost, which computes "
            "the same."
        )
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name}: an input is {tensor.dtype}; the kernels take bfloat16, float16 and float32. Use the PyTorch "
                "function in dpllm.ghost, which takes any."
            )
        if tensor.device != tensors[0].device or not (tensor.is_cuda or INTERPRETED):
            raise ValueError(
                f"{name}: an input is on {tensor.device}. Put all of them on one CUDA device, or use the PyTorch "
                "function in dpllm.ghost."
            )


def _require_same_tokens(name: str, x: Tensor, y: Tensor) -> None:
    if x.ndim != 3 or y.ndim != 3 or x.shape[:2] != y.shape[:2]:
        raise ValueError(
            f"{name}: shapes {tuple(x.shape)} and {tuple(y.shape)} do not fit. Give (B, T, ·) tensors of equal B and T."
        )


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)
