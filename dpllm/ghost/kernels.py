"""The arithmetic of book-keeping: inner products and weighted sums of per-row gradients.

Every per-row weight gradient here is a sum of outer products over tokens,

    g_b = sum_t  left[b, t] (x) right[b, t]          (L, R),

so its squared norm needs no (L, R) matrix (the *ghost norm* of Goodfellow 2015 and of Li et al. 2022,
arXiv:2110.05679),

    ||g_b||^2 = sum_{s,t} <left_s, left_t> <right_s, right_t>,

and the clipped sum of all rows is one ordinary matrix product (*book-keeping*, Bu et al. 2023, arXiv:2210.00038).

Shape suffixes: B rows, T tokens, L and R the two dimensions of a weight, N row pairs.

All products are accumulated in float32 (float64 for float64 inputs) for every dtype of the model. Norms rounded to
bfloat16 are up to 2 % too small, and the released gradient would then exceed the clip norm by as much.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Gram temporaries stay below this many entries: the rows are processed in chunks.
_MAX_GRAM_ENTRIES = 1 << 26
_MAX_TERMS = 128  # of an inner product, added at once; at 512, a unit with a single token exceeded the slack
_STRIP = 128  # tokens of a symmetric product that are formed together
# Tensors up to this size are copied next to each other for one product; above it the copy costs more than launches.
_SMALL = 1 << 16
_MAX_COPIED = 1 << 18  # entries of wide tensors whose parts become one product


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of parameters or activations of ``dtype`` are summed.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Return the tensor in its accumulation dtype."""
    return x if x.dtype == torch.float64 else x.float()


def entries(x_B: Tensor) -> Tensor:
    """View (B, ...) as (B, N); gradients of scalar parameters, (B,), become one column."""
    return x_B.unsqueeze(1).flatten(1)


def rounding_slack(dtype: torch.dtype) -> float:
    """Return the relative error allowed in a squared Gram norm, per unit of (sum_t |left_t| |right_t|)^2.

    A Gram norm sums terms that may cancel, so its rounding error scales with the sum of their sizes, not with the
    result. Sixteen units in the last place of the accumulator cover the error of a blocked matrix product over
    thousands of terms.
    """
    return 16 * torch.finfo(accumulation_dtype(dtype)).eps / 2


def least_square(dtype: torch.dtype) -> float:
    """Return the smallest squared length that counts as nonzero.

    Squares of smaller numbers underflow. A Gram norm multiplies the square of a short input by that of an output
    gradient, which may be large: a norm of 1e-4 was once computed as 0. The mass raises both squares to at least this
    value, so that the norm's slack covers the lost products.
    """
    kind = torch.finfo(accumulation_dtype(dtype))
    return kind.tiny / kind.eps**2


def exact_matmul() -> contextlib.AbstractContextManager[None]:
    """Keep float32 products in float32: no TF32, no bfloat16 and no autocast, for every setting of the process.

    Norms and clipped sums decide the sensitivity; the model's own forward and backward keep the user's setting.
    The setting may have been made through either of PyTorch's two interfaces
    (``set_float32_matmul_precision`` and ``allow_tf32``, or ``fp32_precision``), or both.

    No graph is recorded either.
    """
    return _ExactMatmul()


def is_exact() -> bool:
    """Return whether float32 products are currently exact without `exact_matmul`."""
    return not (_rounds() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(_accelerator()))


def _rounds() -> bool:
    of_cuda, of_mkldnn = _readers()
    return of_cuda() not in _EXACT or of_mkldnn() not in _EXACT


class _ExactMatmul:
    """A class instead of a generator, which would cost more, since it is entered for every layer."""

    __slots__ = ("_changed", "_with_grad")
    within = threading.local()

    def __enter__(self) -> None:
        """Change the settings; do nothing inside another instance."""
        depth = self.within.depth = getattr(self.within, "depth", 0) + 1
        if depth > 1:
            return
        self._changed: contextlib.ExitStack | None = None
        self._with_grad = torch.is_grad_enabled()
        if self._with_grad:
            torch.set_grad_enabled(False)
        if not is_exact():
            with contextlib.ExitStack() as changed:
                if _rounds():
                    changed.enter_context(exact_products())
                for device in ("cpu", _accelerator()):
                    changed.enter_context(torch.autocast(device, enabled=False))
                self._changed = changed.pop_all()

    def __exit__(self, *_: object) -> None:
        """Restore them."""
        self.within.depth -= 1
        if self.within.depth:
            return
        if self._changed is not None:
            self._changed.close()
        if self._with_grad:
            torch.set_grad_enabled(True)


_EXACT = ("ieee", "none")


def _matmul_flags() -> tuple[Any, Any]:
    """Return the settings that products read, through either interface."""
    backends: Any = torch.backends
    return backends.cuda.matmul, backends.mkldnn.matmul


@functools.cache
def _readers() -> tuple[Callable[[], str], Callable[[], str]]:
    """Return functions that read `_matmul_flags`: those behind the attributes, in a tenth of the time.

    In PyTorch versions without them, the attributes are read.
    """
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    if read is not None:
        return functools.partial(read, "cuda", "matmul"), functools.partial(read, "mkldnn", "matmul")
    of_cuda, of_mkldnn = _matmul_flags()
    return lambda: of_cuda.fp32_precision, lambda: of_mkldnn.fp32_precision


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products in float32, and restore all settings afterwards; autocast and graphs are unaffected.

    The older interface raises an error if the newer one disagrees with it, and is then left unchanged. Otherwise it
    is set as well, so that the two always agree.
    """
    flags = _matmul_flags()
    before = [flag.fp32_precision for flag in flags]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "highest"
    if older != "highest":
        torch.set_float32_matmul_precision("highest")
    for flag in flags:
        flag.fp32_precision = "ieee"
    try:
        yield
    finally:
        if older != "highest":
            torch.set_float32_matmul_precision(older)
        for flag, precision in zip(flags, before, strict=True):
            flag.fp32_precision = "none"  # follows the general setting
            if flag.fp32_precision != precision:
                flag.fp32_precision = precision


@functools.cache
def _accelerator() -> str:
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def _products(x_BTD: Tensor, y_BSD: Tensor) -> Tensor:
    """Return all inner products of the tokens of two sequences, (B, T, S), accumulated in float32 or float64.

    At most `_MAX_TERMS` terms are added at once, and their sums pairwise. Float32 sums of ten thousand terms of
    one sign were up to 76 units in the last place too small, more than `rounding_slack` allows.
    """
    terms = x_BTD.shape[2]
    if terms <= _MAX_TERMS:
        return wide_bmm(x_BTD, y_BSD.mT)
    whole = terms // _MAX_TERMS
    if whole > 2 and x_BTD.numel() + y_BSD.numel() <= _MAX_COPIED:
        x_NTD, y_NSD = (_cut(z[..., : whole * _MAX_TERMS]) for z in (x_BTD, y_BSD))
        total = wide_bmm(x_NTD, y_NSD.mT).unflatten(0, (-1, whole)).sum(1)
        rest = slice(whole * _MAX_TERMS, None)
        return total if terms == rest.start else total.add_(wide_bmm(x_BTD[..., rest], y_BSD[..., rest].mT))
    parts = [
        wide_bmm(x_BTD[..., start : start + _MAX_TERMS], y_BSD[..., start : start + _MAX_TERMS].mT)
        for start in range(0, terms, _MAX_TERMS)
    ]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [one.add_(other) for one, other in pairs] + parts[len(parts) // 2 * 2 :]
    return parts[0]


def _cut(x_BTD: Tensor) -> Tensor:
    """Return (B * K, T, `_MAX_TERMS`): the K parts of each row's features as rows."""
    return x_BTD.unflatten(2, (-1, _MAX_TERMS)).transpose(1, 2).flatten(0, 1)


def on_tensor_cores(*tensors: Tensor) -> bool:
    """Return whether the tensors' products are exact before their float32 addition: 16 bits each, on a GPU."""
    first = tensors[0].dtype
    return first in (torch.bfloat16, torch.float16) and all(t.is_cuda and t.dtype == first for t in tensors)


def wide_bmm(x_BMK: Tensor, y_BKN: Tensor) -> Tensor:
    """Return the batched matrix product, accumulated and returned in float32 (float64 for float64 inputs)."""
    if on_tensor_cores(x_BMK, y_BKN):
        return torch.bmm(x_BMK, y_BKN, out_dtype=torch.float32)
    dtype = accumulation_dtype(x_BMK.dtype)
    return torch.bmm(x_BMK.to(dtype), y_BKN.to(dtype))


def squared_norms(x_B: Tensor) -> Tensor:
    """Return the squared norms of the rows of ``x_B`` (B, ...), in its dtype, float32 or float64; (B,).

    ``torch.linalg.vector_norm`` of a long float32 row adds one entry after another on the CPU and was up to 2 % too
    small at 16 million entries; the released gradient would then exceed the clip norm. Here groups of 64 entries are
    added first, and then their sums, pairwise.

    >>> x = torch.full((1, 1 << 20), 0.1)
    >>> torch.allclose(squared_norms(x).double(), x.double().square().sum(1), rtol=1e-6)
    True
    """
    flat = entries(x_B)
    whole = flat.shape[1] // 64 * 64
    if whole == 0:
        return torch.linalg.vector_norm(flat, dim=1).square()
    sq_norm_B = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, 64)), dim=2).square().sum(1)
    if whole == flat.shape[1]:
        return sq_norm_B
    return sq_norm_B + torch.linalg.vector_norm(flat[:, whole:], dim=1).square()


def is_small(x: Tensor) -> bool:
    """Return whether copying a tensor costs less than a few launches."""
    return x.numel() <= _SMALL


def is_short(tokens: int) -> bool:
    """Return whether a Gram matrix over this many tokens is formed at once."""
    return tokens <= _STRIP


def gram_norms(shared_BTD: Tensor, grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the squared norms of the gradients of several layers that read one input, summed over the layers.

    The input's Gram matrix is formed once; those of the output gradients are added before the contraction. Both are
    symmetric: they are formed in strips of tokens, each only up to its diagonal.

    Args:
        shared_BTD: the input (B, T, D) that all the layers read.
        grads: the output gradient (B, T, P_i) of each layer.

    Returns:
        ``(sq_norm_B, mass_B)``: squared norms, and an upper bound of (sum_t |a_t| |g_t|)^2, which scales their
        rounding error; lengths count as at least `least_square`.

    >>> a, g = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    >>> sq, _ = gram_norms(a, [g])
    >>> instance = torch.einsum("btd,btp->bdp", a, g)
    >>> torch.allclose(sq, instance.square().sum((1, 2)), rtol=1e-4)
    True
    """
    tokens = shared_BTD.shape[1]
    chunk = max(1, _MAX_GRAM_ENTRIES // max(1, tokens * min(tokens, _STRIP)))
    chunks = zip(*(x_BTD.split(chunk) for x_BTD in (shared_BTD, *grads)), strict=True)
    norms, roots = zip(*(_chunk_norms(*of_rows) for of_rows in chunks), strict=True)
    return (norms[0], roots[0].square()) if len(norms) == 1 else (torch.cat(norms), torch.cat(roots).square())


def _chunk_norms(shared_BTD: Tensor, *grads: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norms (B,) and the roots of the masses (B,) of `gram_norms`."""
    sq_norms, roots = [], []
    for start in range(0, max(1, shared_BTD.shape[1]), _STRIP):
        input_gram, *grams = [_strip(x_BTD, start) for x_BTD in (shared_BTD, *grads)]
        sq_norm_B, root_B = _norms_and_roots(input_gram, functools.reduce(Tensor.add_, grams), start)
        sq_norms.append(sq_norm_B)
        roots.append(root_B)
    return functools.reduce(Tensor.add_, sq_norms), functools.reduce(Tensor.add_, roots)


def _norms_and_roots(input_gram: Tensor, grad_gram: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return the contributions of Gram matrix strips to squared norms (B,) and to the roots of their masses (B,)."""
    least, grams = least_square(input_gram.dtype), (input_gram, grad_gram)
    squares = [gram[..., start:].diagonal(dim1=1, dim2=2).clamp_min(least) for gram in grams]
    root_B = (squares[0] * squares[1]).sqrt_().sum(1)
    terms = input_gram.mul_(grad_gram)
    if start == 0:
        return terms.sum((1, 2)), root_B
    return terms[..., start:].sum((1, 2)).add_(terms[..., :start].sum((1, 2)), alpha=2), root_B


def joint_gram_norms(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return `gram_norms` of pairs of inputs (B_i, T, D_i) and output gradients (B_i, T, P_i), concatenated.

    Forms all their whole Gram matrices at once: T is at most `is_short`.
    """
    grams = zip(*((_products(x_BTD, x_BTD), _products(grad_BTP, grad_BTP)) for x_BTD, grad_BTP in pairs), strict=True)
    input_gram, grad_gram = (torch.cat(of_all) for of_all in grams)
    sq_norm_B, root_B = _norms_and_roots(input_gram, grad_gram)
    return sq_norm_B, root_B.square_()


def _strip(x_BTD: Tensor, start: int) -> Tensor:
    """Return the rows of a Gram matrix from token ``start`` on, up to the last of them on the diagonal."""
    if is_short(x_BTD.shape[1]):
        return _products(x_BTD, x_BTD)
    return _products(x_BTD[:, start : start + _STRIP], x_BTD[:, : start + _STRIP])


def instance_norms(left_BTL: Tensor, right_BTR: Tensor) -> Tensor:
    """Return the squared norms ||sum_t left_bt (x) right_bt||^2 from the gradient itself, a few rows at a time; (B,).

    Where tokens cancel, an entry of the gradient has a rounding error that scales with sum_t |left_t| |right_t|, not
    with the norm; the caller adds the slack for it.
    """
    dtype = accumulation_dtype(left_BTL.dtype)
    chunk = max(1, _MAX_GRAM_ENTRIES // max(1, left_BTL.shape[2] * right_BTR.shape[2]))
    parts = [
        squared_norms(wide_bmm(left_BTL[row : row + chunk].mT, right_BTR[row : row + chunk]))
        for row in range(0, left_BTL.shape[0], chunk)
    ]
    return torch.cat(parts) if parts else left_BTL.new_zeros(0, dtype=dtype)


def lookup_norms(index_BT: Tensor, right_BTR: Tensor, unit_B: Tensor, num_units: int, num_entries: int) -> Tensor:
    """Return each unit's squared gradient norm of a lookup table, sum_v ||sum of right_bt where index_bt = v||^2; (U,).

    Equal tokens of a unit are first summed, by sorted (unit, token) keys, and then squared, without a one-hot matrix or
    a table. There is one slot per token, so that no shape depends on the tokens.

    Args:
        index_BT: integers in [0, V).
        right_BTR: the gradients of the looked-up entries.
        unit_B: unit of each row; a negative one marks a padding row, which belongs to no unit.
        num_units: U.
        num_entries: V, rows of the table.
    """
    dtype = accumulation_dtype(right_BTR.dtype)
    unit_B1 = torch.where(unit_B >= 0, unit_B, num_units)[:, None]  # padding rows form an extra unit: nothing waits
    keys, order = torch.sort((unit_B1 * num_entries + index_BT).flatten(), stable=True)
    slot_sorted = torch.zeros_like(keys)
    slot_sorted[1:] = (keys[1:] != keys[:-1]).cumsum(0)
    slot = torch.empty_like(keys).scatter_(0, order, slot_sorted)
    unit_of_slot = torch.zeros_like(keys).scatter_(0, slot_sorted, keys // max(1, num_entries))
    slots = torch.zeros(keys.numel(), right_BTR.shape[2], dtype=dtype, device=right_BTR.device)
    slots.index_add_(0, slot, right_BTR.to(dtype).flatten(0, 1))
    total_U = torch.zeros(num_units + 1, dtype=dtype, device=slots.device)
    return total_U.index_add_(0, unit_of_slot, slots.square().sum(1))[:num_units]  # a slot without tokens adds 0


def short_lookup_norms(index_BT: Tensor, right_BTR: Tensor) -> Tensor:
    """Return (B, 2): each row's squared gradient norm of a lookup table, and sum_t |right_t|, from one Gram matrix.

    Args:
        index_BT: the entries looked up; T at most `is_short`.
        right_BTR: their gradients.
    """
    gram_BTT = _products(right_BTR, right_BTR)
    root_B = gram_BTT.diagonal(dim1=1, dim2=2).clamp_min(least_square(gram_BTT.dtype)).sqrt().sum(1)
    same_BTT = index_BT[:, :, None] == index_BT[:, None, :]
    return torch.stack([gram_BTT.masked_fill_(~same_BTT, 0).sum((1, 2)), root_B], 1)


def sum_tokens(grad: Tensor) -> Tensor:
    """Sum (B, ..., D) over all but the first and the last dimension, in the accumulation dtype."""
    middle = tuple(range(1, grad.ndim - 1))
    dtype = accumulation_dtype(grad.dtype)
    return grad.sum(middle, dtype=dtype) if middle else grad.to(dtype)


def lookup_outer_inner(index_NT: Tensor, right_NTR: Tensor, left_NSL: Tensor, right_NSR: Tensor) -> Tensor:
    """Return the inner products of lookup gradients with outer-product ones, the cross term of a tied head; (N,).

    The gradient of a lookup is sum_t onehot(index_t) (x) right_t, so <onehot(index_t), left_s> is left_s[index_t]: no
    (T, V) one-hot and no (V, R) matrix is formed.
    """
    pairs, tokens = index_NT.shape
    chunk = max(1, _MAX_GRAM_ENTRIES // max(1, tokens * left_NSL.shape[1]))
    parts = []
    for start in range(0, pairs, chunk):
        here = slice(start, start + chunk)
        picks_NST = left_NSL[here].gather(2, index_NT[here, None, :].expand(-1, left_NSL.shape[1], -1))
        right_NST = _products(right_NSR[here], right_NTR[here])
        parts.append((picks_NST.to(right_NST.dtype) * right_NST).sum((1, 2)))
    return torch.cat(parts) if parts else right_NTR.new_zeros(0, dtype=accumulation_dtype(right_NTR.dtype))


def add_weighted_outer_(
    total_LR: Tensor, left_BTL: Tensor, right_BTR: Tensor, factor_B: Tensor, is_empty: bool = False
) -> None:
    """Add ``sum_b factor_b sum_t left_bt (x) right_bt`` to ``total`` in place, in the dtype of ``total``.

    ``is_empty``: overwrite ``total`` without reading its entries.

    The factor multiplies only numbers of the accumulator's dtype: scaling in bfloat16 would round the released gradient
    away from the one whose norm was bounded. With tensor cores it multiplies the product over a row's tokens, a few
    rows at a time; otherwise it multiplies the narrower side, after its conversion.
    """
    if on_tensor_cores(left_BTL, right_BTR) and total_LR.dtype == torch.float32:
        chunk = max(1, _MAX_GRAM_ENTRIES // max(1, total_LR.numel()))
        for row in range(0, left_BTL.shape[0], chunk):
            here = slice(row, row + chunk)
            rows_BLR = wide_bmm(left_BTL[here].mT, right_BTR[here])
            part_LR = torch.tensordot(factor_B[here].to(total_LR.dtype), rows_BLR, dims=1)
            total_LR.copy_(part_LR) if is_empty and row == 0 else total_LR.add_(part_LR)
        if is_empty and left_BTL.shape[0] == 0:
            total_LR.zero_()
        return
    left_BTL, right_BTR = left_BTL.to(total_LR.dtype), right_BTR.to(total_LR.dtype)
    factor_B11 = factor_B.to(total_LR.dtype)[:, None, None]
    if left_BTL.shape[2] < right_BTR.shape[2]:
        left_BTL = left_BTL * factor_B11
    else:
        right_BTR = right_BTR * factor_B11
    add_product_(total_LR, left_BTL.flatten(0, 1).mT, right_BTR.flatten(0, 1), is_empty)


def add_product_(total_LR: Tensor, left_LN: Tensor, right_NR: Tensor, is_empty: bool) -> None:
    """Add a product of matrices of the dtype of ``total`` to it; ``is_empty``: as in `add_weighted_outer_`."""
    # With beta=0 a non-finite entry of the total has no effect.
    total_LR.addmm_(left_LN, right_NR, beta=0 if is_empty else 1)
