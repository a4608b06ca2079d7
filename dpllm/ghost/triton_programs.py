"""The programs on the device, written in Triton, each for one tile, run or unit; `triton_kernels` launches them.

Place in the flow: see `dpllm.ghost.triton_kernels`, which checks shapes, chooses tiles and adds up the partial results.

Strides and widths come as tuples of integers, so that the compiler sees a size of 1 or a multiple of 16. Offsets
are 64-bit: rows x tokens x vocabulary exceeds 2^31 for the head of a model. A sum over tokens or widths runs in one
program from the first to the last, so its order is fixed.

Shape suffixes: M, N, K of a product; S, T tokens; L, R, D widths; J places in a sorted list. Parameters in capitals are
fixed at compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # optional: the PyTorch functions do not need it
    triton = tl = None

INTERPRETED: bool = triton is not None and triton.knobs.runtime.interpret
"""Whether the programs run in Triton's CPU interpreter; fixed when the module is imported."""


def jit_if_present(function: Callable) -> Any:
    """Compile the function if Triton is installed; otherwise return it unchanged, since nothing calls it."""
    return function if triton is None else triton.jit(function)


@jit_if_present
def product(
    left: tl.tensor,
    left_m: tl.tensor,
    left_k: tl.tensor,
    right: tl.tensor,
    right_n: tl.tensor,
    right_k: tl.tensor,
    m_M1: tl.tensor,
    n_1N: tl.tensor,
    size_m: tl.tensor,
    size_n: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SAME_DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Return the tile of sum_{start <= k < end} left[m, k] right[n, k], (M, N), in float32."""
    total_MN = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    k_K = start + tl.arange(0, BLOCK_K)
    left_MK = left + m_M1 * left_m + k_K.to(tl.int64)[None, :] * left_k
    right_KN = right + n_1N * right_n + k_K.to(tl.int64)[:, None] * right_k
    for k in range(start, end, BLOCK_K):
        inside_K = tl.arange(0, BLOCK_K) < end - k
        x_MK = tl.load(left_MK, mask=(m_M1 < size_m) & inside_K[None, :], other=0.0)
        y_KN = tl.load(right_KN, mask=(n_1N < size_n) & inside_K[:, None], other=0.0)
        # The interpreter multiplies the bit patterns of bfloat16; widening is exact, as are the tensor cores' products.
        if WIDEN or not SAME_DTYPE:
            x_MK = x_MK.to(tl.float32)
            y_KN = y_KN.to(tl.float32)
        total_MN = tl.dot(x_MK, y_KN, total_MN, input_precision="ieee")
        left_MK += BLOCK_K * left_k
        right_KN += BLOCK_K * right_k
    return total_MN


@jit_if_present
def gram_program(
    shared: tl.tensor,
    shared_strides: tl.tuple,
    shared_width: tl.tensor,
    grads: tl.tuple,
    grad_strides: tl.tuple,
    grad_widths: tl.tuple,
    partial: tl.tensor,
    plane: tl.tensor,
    tokens: tl.tensor,
    pairs: tl.tensor,
    NUM_GRADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Compute one tile pair (s, t), t <= s, of one row: its share of the squared norm and of the mass's root."""
    program = tl.program_id(0)
    pair = program % pairs
    row = (program // pairs).to(tl.int64)
    s = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)  # pair = s (s + 1) / 2 + t, up to rounding
    s = tl.where(s * (s + 1) // 2 > pair, s - 1, s)
    s = tl.where((s + 1) * (s + 2) // 2 <= pair, s + 1, s)
    t = pair - s * (s + 1) // 2
    block_T = tl.arange(0, BLOCK_T)
    s_S1 = (s * BLOCK_T + block_T).to(tl.int64)[:, None]
    t_1T = (t * BLOCK_T + block_T).to(tl.int64)[None, :]
    same_ST = block_T[:, None] == block_T[None, :]

    gram_ST = tl.full((BLOCK_T, BLOCK_T), 0.0, tl.float32)
    x = shared + row * shared_strides[0]
    for start in range(0, shared_width, CHUNK_K):
        end = tl.minimum(start + CHUNK_K, shared_width)
        gram_ST += product(
            x, shared_strides[1], shared_strides[2], x, shared_strides[1], shared_strides[2],
            s_S1, t_1T, tokens, tokens, start, end, BLOCK_T, BLOCK_T, BLOCK_K, True, WIDEN,
        )  # fmt: skip

    # Linear in the Gram matrix of the gradients, so their parts need not be added up first.
    norm_S = tl.full((BLOCK_T,), 0.0, tl.float32)
    size_S = tl.full((BLOCK_T,), 0.0, tl.float32)
    for i in tl.static_range(NUM_GRADS):
        g = grads[i] + row * grad_strides[i][0]
        for start in range(0, grad_widths[i], CHUNK_K):
            end = tl.minimum(start + CHUNK_K, grad_widths[i])
            part_ST = product(
                g, grad_strides[i][1], grad_strides[i][2], g, grad_strides[i][1], grad_strides[i][2],
                s_S1, t_1T, tokens, tokens, start, end, BLOCK_T, BLOCK_T, BLOCK_K, True, WIDEN,
            )  # fmt: skip
            norm_S += tl.sum(gram_ST * part_ST, axis=1)
            size_S += tl.sum(tl.where(same_ST, part_ST, 0.0), axis=1)
    twice = tl.where(s == t, 1.0, 2.0)
    tl.store(partial + program, tl.sum(norm_S, axis=0) * twice)
    size_S = size_S * tl.sum(tl.where(same_ST, gram_ST, 0.0), axis=1)
    size_S = tl.where(size_S < 0.0, 0.0, size_S)  # keeps NaN
    root = tl.sum(tl.sqrt(size_S), axis=0)
    tl.store(partial + plane + program, tl.where(s == t, root, 0.0))


@jit_if_present
def instance_program(
    left: tl.tensor,
    left_strides: tl.tuple,
    left_width: tl.tensor,
    right: tl.tensor,
    right_strides: tl.tuple,
    right_width: tl.tensor,
    partial: tl.tensor,
    tokens: tl.tensor,
    tiles: tl.tensor,
    tiles_r: tl.tensor,
    SAME_DTYPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK_T: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Sum of squares of one tile of one row's gradient."""
    program = tl.program_id(0)
    tile = program % tiles
    row = (program // tiles).to(tl.int64)
    l_L1 = ((tile // tiles_r) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)[:, None]
    r_1R = ((tile % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[None, :]
    total_LR = tl.full((BLOCK_L, BLOCK_R), 0.0, tl.float32)
    x = left + row * left_strides[0]
    y = right + row * right_strides[0]
    for start in range(0, tokens, CHUNK_T):
        end = tl.minimum(start + CHUNK_T, tokens)
        total_LR += product(
            x, left_strides[2], left_strides[1], y, right_strides[2], right_strides[1],
            l_L1, r_1R, left_width, right_width, start, end, BLOCK_L, BLOCK_R, BLOCK_T, SAME_DTYPE, WIDEN,
        )  # fmt: skip
    square_L = tl.sum(total_LR * total_LR, axis=1)
    tl.store(partial + program, tl.sum(square_L, axis=0))


@jit_if_present
def weighted_outer_program(
    left: tl.tensor,
    left_strides: tl.tuple,
    left_width: tl.tensor,
    right: tl.tensor,
    right_strides: tl.tuple,
    right_width: tl.tensor,
    factor: tl.tensor,
    start: tl.tensor,
    start_strides: tl.tuple,
    start_rows: tl.tensor,
    out: tl.tensor,
    out_strides: tl.tuple,
    scale: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    tiles_l: tl.tensor,
    tiles_r: tl.tensor,
    SAME_DTYPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK_T: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Compute one tile of the weighted sum over rows: a row's factor multiplies its complete gradient.

    Rows with factor 0 are left out, since they may not be finite. A sum that begins here has a start of no rows.
    """
    program = tl.program_id(0)
    # Tiles that run at the same time share their inputs: GROUP tiles of the left side by all of the right.
    first_l = (program // (GROUP * tiles_r)) * GROUP
    height = tl.minimum(GROUP, tiles_l - first_l)
    within = program % (GROUP * tiles_r)
    l_L1 = ((first_l + within % height) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)[:, None]
    r_1R = ((within // height) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[None, :]
    total_LR = tl.full((BLOCK_L, BLOCK_R), 0.0, tl.float32)
    x, y = left, right
    for row in range(0, rows):
        row_LR = tl.full((BLOCK_L, BLOCK_R), 0.0, tl.float32)
        weight = tl.load(factor + row)
        contributing = tl.where(weight == 0.0, 0, tokens)
        for first in range(0, contributing, CHUNK_T):
            end = tl.minimum(first + CHUNK_T, tokens)
            row_LR += product(
                x, left_strides[2], left_strides[1], y, right_strides[2], right_strides[1],
                l_L1, r_1R, left_width, right_width, first, end, BLOCK_L, BLOCK_R, BLOCK_T, SAME_DTYPE, WIDEN,
            )  # fmt: skip
        total_LR += weight * row_LR
        x += left_strides[0]
        y += right_strides[0]
    inside = (l_L1 < left_width) & (r_1R < right_width)
    start_LR = start + l_L1 * start_strides[0] + r_1R * start_strides[1]
    total_LR += tl.load(start_LR, mask=inside & (l_L1 < start_rows), other=0.0)
    out_LR = out + l_L1 * out_strides[0] + r_1R * out_strides[1]
    tl.store(out_LR, (scale * total_LR).to(out.dtype.element_ty), mask=inside)


@jit_if_present
def norm_layer_program(
    normed: tl.tensor,
    normed_strides: tl.tuple,
    grad: tl.tensor,
    grad_strides: tl.tuple,
    partial: tl.tensor,
    plane: tl.tensor,
    tokens: tl.tensor,
    inner: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    span: tl.tensor,
    tiles_d: tl.tensor,
    WITH_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Sum over a span of one row's tokens of normed * grad, and of grad, for one block of features."""
    program = tl.program_id(0)
    tile = program % tiles_d
    split = (program // tiles_d) % splits
    row = (program // (tiles_d * splits)).to(tl.int64)
    d_D = tile * BLOCK_D + tl.arange(0, BLOCK_D)
    weight_D = tl.full((BLOCK_D,), 0.0, tl.float32)
    bias_D = tl.full((BLOCK_D,), 0.0, tl.float32)
    x = normed + row * normed_strides[0] + d_D.to(tl.int64)[None, :] * normed_strides[3]
    g = grad + row * grad_strides[0] + d_D.to(tl.int64)[None, :] * grad_strides[3]
    end = tl.minimum((split + 1) * span, tokens)
    for start in range(split * span, end, BLOCK_T):
        t_T = start + tl.arange(0, BLOCK_T)
        inside_TD = (t_T < end)[:, None] & (d_D < width)[None, :]
        outer_T1 = (t_T // inner).to(tl.int64)[:, None]
        inner_T1 = (t_T % inner).to(tl.int64)[:, None]
        x_TD = tl.load(x + outer_T1 * normed_strides[1] + inner_T1 * normed_strides[2], mask=inside_TD, other=0.0)
        g_TD = tl.load(g + outer_T1 * grad_strides[1] + inner_T1 * grad_strides[2], mask=inside_TD, other=0.0)
        g_TD = g_TD.to(tl.float32)
        weight_D += tl.sum(x_TD.to(tl.float32) * g_TD, axis=0)
        if WITH_BIAS:
            bias_D += tl.sum(g_TD, axis=0)
    out = partial + (row * splits + split) * width + d_D
    tl.store(out, weight_D, mask=d_D < width)
    if WITH_BIAS:
        tl.store(out + plane, bias_D, mask=d_D < width)


@jit_if_present
def run_program(
    keys: tl.tensor,
    order: tl.tensor,
    ends: tl.tensor,
    right: tl.tensor,
    right_strides: tl.tuple,
    partial: tl.tensor,
    end_of_units: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    tiles_r: tl.tensor,
    BLOCK_J: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Compute the squared norm of the sum of each run of equal keys, at its first position; zero at the others."""
    program = tl.program_id(0)
    position = program // tiles_r
    r_R = (program % tiles_r) * BLOCK_R + tl.arange(0, BLOCK_R)
    key = tl.load(keys + position)
    before = tl.load(keys + position - 1, mask=position > 0, other=-1)
    end = tl.load(ends + position).to(tl.int32)
    # Only the start of a unit's run has something to add up.
    end = tl.where((key != before) & (key < end_of_units), end, position)
    sum_R = tl.full((BLOCK_R,), 0.0, tl.float32)
    for first in range(position, end, BLOCK_J):
        j_J = first + tl.arange(0, BLOCK_J)
        place_J = tl.load(order + j_J, mask=j_J < end, other=0)
        offset_J = (place_J // tokens) * right_strides[0] + (place_J % tokens) * right_strides[1]
        inside_JR = (j_J < end)[:, None] & (r_R < width)[None, :]
        g_JR = tl.load(
            right + offset_J[:, None] + r_R.to(tl.int64)[None, :] * right_strides[2], mask=inside_JR, other=0.0
        )
        sum_R += tl.sum(g_JR.to(tl.float32), axis=0)
    tl.store(partial + program, tl.sum(sum_R * sum_R, axis=0))


@jit_if_present
def segment_program(
    partial: tl.tensor, bounds: tl.tensor, total: tl.tensor, tiles_r: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Sum of the partial results of one unit, in the order of its keys."""
    unit = tl.program_id(0)
    start = tl.load(bounds + unit) * tiles_r
    end = tl.load(bounds + unit + 1) * tiles_r
    sum_N = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(start, end, BLOCK):
        n_N = first + tl.arange(0, BLOCK)
        sum_N += tl.load(partial + n_N, mask=n_N < end, other=0.0)
    tl.store(total + unit, tl.sum(sum_N, axis=0))
