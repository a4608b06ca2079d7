"""The device programs, written in Triton; each handles one tile, run or unit.

`dpllm.ghost.triton_launch` checks shapes, chooses tiles, launches programs and adds their partial results.

Triton recompiles a program whenever an integer argument becomes 1 or a multiple of 16, which takes seconds. Lengths
vary, so sizes and strides are excluded from this (`_VARYING`). Instead the caller states whether all tensors are
ALIGNED: the last stride is 1; addresses, other strides and widths are multiples of 16 bytes. Loads are then 16 bytes
wide.

Offsets are 64-bit: rows x tokens x vocabulary exceeds 2^31 for a model's head. A sum over tokens or widths runs in one
program from first to last, so its order is fixed.

Shape suffixes: M, N, K of a product; S, T tokens; L, R, D widths; J places in a sorted list. Parameters in capitals are
fixed at compilation.

Tile sizes follow from shape, dtype and compute capability by a fixed table, not from timing, so that results are
reproducible bit by bit. They are few, since each takes seconds to compile, and were chosen from compiled code only
(``benchmarks/registers.py``): no program spills registers, and its shared memory fits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # optional: the PyTorch functions do not need it
    triton = tl = None

INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret
"""Whether the programs run in Triton's CPU interpreter; fixed when the module is imported."""

_INTERPRETED = INTERPRETED if triton is None else tl.constexpr(INTERPRETED)  # for programs

# fmt: off
_VARYING = frozenset((
    "groups", "rows", "tokens", "width", "plane", "pairs", "tiles_l", "tiles_r", "end_of_units", "start_rows",
    "size_l", "size_r", "left_row", "left_token", "left_last", "right_row", "right_token", "right_last", "out_row",
))
# fmt: on


def jit_if_present(function: Callable) -> Any:
    """Compile the function if Triton is installed; otherwise return it unchanged, since nothing calls it."""
    if triton is None:
        return function
    varying = [name for name in inspect.signature(function).parameters if name in _VARYING]
    return triton.jit(function, do_not_specialize=varying, do_not_specialize_on_alignment=["partial"])


@jit_if_present
def multiple(value: tl.tensor, ALIGNED: tl.constexpr, NUMBER: tl.constexpr) -> tl.tensor:
    """Return the integer in 64 bits, marked as a multiple of the number for the compiler if tensors are aligned."""
    value = value.to(tl.int64)
    if ALIGNED:
        value = value // NUMBER * NUMBER  # not tl.multiple_of, whose hint is lost for loaded and passed integers
    return value


@jit_if_present
def add_product(x_MK: tl.tensor, y_KN: tl.tensor, total_MN: tl.tensor) -> tl.tensor:
    """Add a product to a sum in float32, without TF32.

    The interpreter multiplies the bit patterns of bfloat16; widening is exact, as are the tensor cores' products.
    """
    if _INTERPRETED or x_MK.dtype != y_KN.dtype:
        x_MK = x_MK.to(tl.float32)
        y_KN = y_KN.to(tl.float32)
    return tl.dot(x_MK, y_KN, total_MN, input_precision="ieee")


@jit_if_present
def gram_program(
    table: tl.tensor,
    groups: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    pairs: tl.tensor,
    plane: tl.tensor,
    INPUT: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_K: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """Compute one tile pair (s, t), t <= s, of one row of one group: its share of the squared norm and the mass's root.

    A group is an input and the output gradients of the layers that read it; `dpllm.ghost.triton_launch._table`
    describes the table of their addresses.
    """
    program = tl.program_id(0)
    pair = program % pairs
    row = ((program // pairs) % rows).to(tl.int64)
    place = program // (pairs * rows)
    first = tl.load(table + groups + place).to(tl.int32)
    last = tl.load(table + groups + place + 1).to(tl.int32)
    out = partial + tl.load(table + place) * (pairs * rows) + program % (pairs * rows)
    s = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)  # pair = s (s + 1) / 2 + t, up to rounding
    s = tl.where(s * (s + 1) // 2 > pair, s - 1, s)
    s = tl.where((s + 1) * (s + 2) // 2 <= pair, s + 1, s)
    t = pair - s * (s + 1) // 2
    block_T = tl.arange(0, BLOCK_T)
    same_ST = block_T[:, None] == block_T[None, :]
    s, t = s * BLOCK_T, t * BLOCK_T  # first tokens

    gram_ST = tl.full((BLOCK_T, BLOCK_T), 0.0, tl.float32)
    norm_S = tl.full((BLOCK_T,), 0.0, tl.float32)
    size_S = tl.full((BLOCK_T,), 0.0, tl.float32)
    width = tl.load(table + first + 4).to(tl.int32)
    for start in range(0, width, CHUNK_K):
        gram_ST += part_of_gram(
            table + first, INPUT, row, s, t, tokens, start, width, ALIGNED, BLOCK_T, BLOCK_K, CHUNK_K
        )
    # The square of a short input is LEAST, in the norm too; gradients use it in the mass only.
    gram_ST = tl.where(same_ST & (s == t) & (gram_ST < LEAST), LEAST, gram_ST)
    gram_ST = tl.where((block_T[:, None] < tokens - s) & (block_T[None, :] < tokens - t), gram_ST, 0.0)
    square_S = tl.sum(tl.where(same_ST, gram_ST, 0.0), axis=1)
    least_root = tl.sum(tl.sqrt(LEAST * tl.where(square_S < 0.0, 0.0, square_S)), axis=0)
    # Linear in the Gram matrix of the gradients, so its parts need not be added up first.
    for tensor in range(first + 5, last, 5):
        width = tl.load(table + tensor + 4).to(tl.int32)
        for start in range(0, width, CHUNK_K):
            part_ST = part_of_gram(
                table + tensor, GRAD, row, s, t, tokens, start, width, ALIGNED, BLOCK_T, BLOCK_K, CHUNK_K
            )
            part_ST *= gram_ST
            norm_S += tl.sum(part_ST, axis=1)
            size_S += tl.sum(tl.where(same_ST, part_ST, 0.0), axis=1)
    twice = tl.where(s == t, 1.0, 2.0)
    tl.store(out, tl.sum(norm_S, axis=0) * twice)
    size_S = tl.where(size_S < 0.0, 0.0, size_S)  # keeps NaN
    root = tl.sum(tl.sqrt(size_S), axis=0) + least_root
    tl.store(out + plane, tl.where(s == t, root, 0.0))


@jit_if_present
def part_of_gram(
    tensor: tl.tensor,
    DTYPE: tl.constexpr,
    row: tl.tensor,
    s: tl.tensor,
    t: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    width: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_K: tl.constexpr,
) -> tl.tensor:
    """Return a tile of the Gram matrix of the tensor at a place in the table, from CHUNK_K of its features.

    Beyond the last token it repeats that token, and the caller drops these entries. Loads then need no mask, which
    saves registers; so do 32-bit offsets within a tile, and the caller checks that they suffice if ALIGNED.
    """
    UNITS: tl.constexpr = 128 // DTYPE.primitive_bitwidth  # 16 bytes
    x = tl.load(tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    x += row * multiple(tl.load(tensor + 1), ALIGNED, UNITS)
    by_token = multiple(tl.load(tensor + 2), ALIGNED, UNITS)
    by_feature = 1 if ALIGNED else tl.load(tensor + 3)
    end = multiple(tl.minimum(start + CHUNK_K, width), ALIGNED, UNITS).to(tl.int32)
    x_s, x_t = x + s * by_token, x + t * by_token
    block_T, k_K = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    step = multiple(tl.load(tensor + 2).to(tl.int32), ALIGNED, UNITS).to(tl.int32) if ALIGNED else by_token
    s_SK = tl.minimum(block_T, tokens - 1 - s)[:, None] * step + k_K[None, :] * by_feature
    t_KT = tl.minimum(block_T, tokens - 1 - t)[None, :] * step + k_K[:, None] * by_feature
    total_ST = tl.full((BLOCK_T, BLOCK_T), 0.0, tl.float32)
    for k in range(start, end, BLOCK_K):
        inside_K = k_K < end - k
        x_SK = tl.load(x_s + k * by_feature + s_SK, mask=inside_K[None, :], other=0.0)
        y_KT = tl.load(x_t + k * by_feature + t_KT, mask=inside_K[:, None], other=0.0)
        total_ST = add_product(x_SK, y_KT, total_ST)
    return total_ST


@jit_if_present
def outer_program(
    left: tl.tensor,
    left_row: tl.tensor,
    left_token: tl.tensor,
    left_last: tl.tensor,
    size_l: tl.tensor,
    right: tl.tensor,
    right_row: tl.tensor,
    right_token: tl.tensor,
    right_last: tl.tensor,
    size_r: tl.tensor,
    partial: tl.tensor,
    factor: tl.tensor,
    start: tl.tensor,
    start_rows: tl.tensor,
    out: tl.tensor,
    out_row: tl.tensor,
    out_last: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    tiles_l: tl.tensor,
    tiles_r: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Compute one tile of the weighted sum over rows, or, if ``partial`` is not None, its square for one row.

    A row's factor multiplies its complete gradient. Rows with factor 0 are dropped, since they may not be finite. A sum
    that begins here has a start without rows; its strides are those of the result. One loop runs over the token blocks
    of all rows (for a square, of one): the first blocks of a row are loaded while the last blocks of the previous row
    are multiplied. The sum of CHUNK blocks is added to the total with rounding to nearest.
    """
    UNITS_L: tl.constexpr = 128 // left.dtype.element_ty.primitive_bitwidth  # 16 bytes
    UNITS_R: tl.constexpr = 128 // right.dtype.element_ty.primitive_bitwidth
    program = tl.program_id(0)
    tile = program % (tiles_l * tiles_r)
    GROUP: tl.constexpr = 8  # tiles of the left side by all of the right: those that run together share their inputs
    first_l = (tile // (GROUP * tiles_r)) * GROUP
    height = tl.minimum(GROUP, tiles_l - first_l)
    within = tile % (GROUP * tiles_r)
    l_L = (first_l + within % height) * BLOCK + tl.arange(0, BLOCK)
    r_R = (within // height) * BLOCK + tl.arange(0, BLOCK)
    t_T = tl.arange(0, BLOCK_T)
    width_l, width_r = multiple(size_l, ALIGNED, UNITS_L), multiple(size_r, ALIGNED, UNITS_R)
    by_x, by_y = multiple(left_token, ALIGNED, UNITS_L), multiple(right_token, ALIGNED, UNITS_R)
    x_TL = t_T.to(tl.int64)[:, None] * by_x + (l_L if ALIGNED else l_L.to(tl.int64) * left_last)[None, :]
    y_TR = t_T.to(tl.int64)[:, None] * by_y + (r_R if ALIGNED else r_R.to(tl.int64) * right_last)[None, :]

    total_LR = tl.full((BLOCK, BLOCK), 0.0, tl.float32)
    part_LR = tl.full((BLOCK, BLOCK), 0.0, tl.float32)
    blocks = tl.cdiv(tokens, BLOCK_T)
    first = program // (tiles_l * tiles_r) * blocks
    for step in range(first, first + rows * blocks):
        row, block = step // blocks, step % blocks
        inside_T1 = (t_T < tokens - block * BLOCK_T)[:, None]
        x = left + row * multiple(left_row, ALIGNED, UNITS_L) + block * BLOCK_T * by_x
        y = right + row * multiple(right_row, ALIGNED, UNITS_R) + block * BLOCK_T * by_y
        left_TL = tl.load(x + x_TL, mask=inside_T1 & (l_L < width_l)[None, :], other=0.0)
        right_TR = tl.load(y + y_TR, mask=inside_T1 & (r_R < width_r)[None, :], other=0.0)
        part_LR = add_product(tl.trans(left_TL), right_TR, part_LR)
        if (block + 1 == blocks) | (block % CHUNK == CHUNK - 1):
            if partial is None:
                weight = tl.load(factor + row)
                part_LR = tl.where(weight == 0.0, 0.0, weight * part_LR)
            total_LR += part_LR
            part_LR = tl.full((BLOCK, BLOCK), 0.0, tl.float32)

    if partial is not None:
        tl.store(partial + program, tl.sum(tl.sum(total_LR * total_LR, axis=1), axis=0))
    else:
        inside_LR = (l_L < size_l)[:, None] & (r_R < width_r)[None, :]
        place_LR = l_L.to(tl.int64)[:, None] * multiple(out_row, ALIGNED, UNITS_R)
        place_LR += (r_R if ALIGNED else r_R.to(tl.int64) * out_last)[None, :]
        total_LR += tl.load(start + place_LR, mask=inside_LR & (l_L < start_rows)[:, None], other=0.0)
        tl.store(out + place_LR, (scale * total_LR).to(out.dtype.element_ty), mask=inside_LR)


@jit_if_present
def run_program(
    keys: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    right: tl.tensor,
    right_row: tl.tensor,
    right_token: tl.tensor,
    right_last: tl.tensor,
    partial: tl.tensor,
    end_of_units: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    tiles_r: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Compute the squared norm of the sum of each run of equal keys, at its first position; zero elsewhere."""
    program = tl.program_id(0)
    position = program // tiles_r
    r_R = (program % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R)
    key = tl.load(keys + position)
    before = tl.load(keys + position - 1, mask=position > 0, other=-1)
    end = tl.load(ends + position).to(tl.int32)
    # Only the start of a unit's run has anything to add.
    end = tl.where((key != before) & (key < end_of_units), end, position)
    sum_R = tl.full((BLOCK_R,), 0.0, tl.float32)
    UNITS: tl.constexpr = 128 // right.dtype.element_ty.primitive_bitwidth  # 16 bytes
    by_row, by_token = multiple(right_row, ALIGNED, UNITS), multiple(right_token, ALIGNED, UNITS)
    inside_R = r_R < multiple(width, ALIGNED, UNITS)
    by_r = r_R if ALIGNED else r_R.to(tl.int64) * right_last
    for first in range(position, end, BLOCK_J):
        j_J = first + tl.arange(0, BLOCK_J)
        place_J = tl.load(order + j_J, mask=j_J < end, other=0)
        offset_J = (place_J // tokens) * by_row + (place_J % tokens) * by_token
        inside_JR = (j_J < end)[:, None] & inside_R[None, :]
        g_JR = tl.load(right + offset_J[:, None] + by_r[None, :], mask=inside_JR, other=0.0)
        sum_R += tl.sum(g_JR.to(tl.float32), axis=0)
    tl.store(partial + program, tl.sum(sum_R * sum_R, axis=0))


@jit_if_present
def segment_program(
    partial: tl.tensor, bounds: tl.tensor, total: tl.tensor, tiles_r: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Sum one unit's partial results, in the order of its keys."""
    unit = tl.program_id(0)
    start = tl.load(bounds + unit) * tiles_r
    end = tl.load(bounds + unit + 1) * tiles_r
    sum_N = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(start, end, BLOCK):
        n_N = first + tl.arange(0, BLOCK)
        sum_N += tl.load(partial + n_N, mask=n_N < end, other=0.0)
    tl.store(total + unit, tl.sum(sum_N, axis=0))


class Tile(NamedTuple):
    """The square tile of a program that multiplies matrices.

    Attributes:
        block: rows and columns of the result.
        depth: terms of the inner product that are read at a time.
        num_warps: warps of a program, 32 threads each.
        num_stages: concurrent reads.
    """

    block: int
    depth: int
    num_warps: int
    num_stages: int


_SMALL = Tile(64, 64, 4, 3)
_EXACT = Tile(64, 16, 4, 3)  # float32 outside of tensor cores
_SCATTERED = Tile(64, 32, 8, 3)  # tensors that are read entry by entry
# By the major number of the compute capability: 8 is Ampere and Ada, 9 Hopper, 10 and 12 Blackwell. At a depth of 64,
# the large Gram tile would spill on 8 and 12; these also have at most 99 KB of shared memory in some models.
_LARGE = {8: Tile(128, 32, 8, 4), 9: Tile(128, 64, 8, 3), 10: Tile(128, 64, 8, 3), 12: Tile(128, 32, 8, 4)}


def tile_of(device: torch.device, size: int, exact: bool, aligned: bool) -> Tile:
    """Return the tile for products on a device.

    Args:
        device: of the tensors.
        size: the tokens of a row for Gram matrices; the smaller side of a gradient, in features.
        exact: whether an input is float32.
        aligned: whether tensors can be read 16 bytes at a time.
    """
    return tile_for(_major(device), size, exact, aligned)


@functools.cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8


def tile_for(major: int, size: int, exact: bool, aligned: bool) -> Tile:
    """Return `tile_of` for a major compute capability; for an unlisted one, the tile that needs the least."""
    if exact or not aligned:
        return _EXACT if exact else _SCATTERED
    return _SMALL if size <= 64 else _LARGE.get(major, _LARGE[8])
