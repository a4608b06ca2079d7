"""Operations in float64, to tell rounding from a dependence on other rows.

Place in the flow: below `dpllm.training.checks.independence`, which repeats passes that differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_UNCHANGED = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}


@contextlib.contextmanager
def float64_operations() -> Iterator[None]:
    """Compute each operation of the block in float64 and round its results to the dtypes they have outside of it.

    Passes that differ by more than the bound are repeated so, to find out whether the difference is rounding. A matrix
    product may add the terms of a row in a different order for one row than for many, and an ill-conditioned model
    amplifies the rounding error, for instance in an RMSNorm of a short vector. In a small Llama with random LoRA
    factors, the float32 gradients of a row alone and with others differ by up to 1.5e-3, while its losses agree to
    1e-7. The norms are those of these gradients to 1e-7.

    The order of terms within an operation then changes its result only where the float64 values lie on two sides of a
    rounding boundary: about one number in 10^7. A function of other rows remains one: each operation reads the same
    tensors and returns the same dtypes. Rounding between operations remains, too: a loss that adds rows in chunks
    differs as before.

    Operations that PyTorch does not define, and those without a float64 kernel, run as they are. Views, random numbers
    and whole numbers do not change. Attention runs as matrix products and a softmax; any other operation takes the
    memory of its tensors in float64 while it runs.

    >>> x, w = torch.rand(1, 999), torch.rand(999, 1)
    >>> with float64_operations():
    ...     product = x @ w
    >>> torch.equal(product, (x.double() @ w.double()).float())
    True
    """
    with sdpa_kernel(SDPBackend.MATH), _Float64():
        yield


class _Float64(TorchDispatchMode):
    """The mode of `float64_operations`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation, and replace the values of its results by the rounded values of float64."""
        kwargs = kwargs or {}
        wide = _in_float64(func, args, kwargs)
        result = func(*args, **kwargs)
        if wide is not None:
            for one, exact in zip(tree_leaves(result), tree_leaves(wide), strict=True):
                if isinstance(one, Tensor) and one.is_floating_point():
                    one.copy_(exact)
        return result


def _in_float64(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the results of an operation in float64; None if it stays as it is."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if func.namespace != "aten" or func.is_view or not _UNCHANGED.isdisjoint(func.tags):
        return None
    if not any(map(_is_narrow, tensors)):
        return None

    def widened(one: Any) -> Any:
        if isinstance(one, torch.dtype):
            return torch.float64 if one.is_floating_point else one
        if not isinstance(one, Tensor):
            return one
        if _is_narrow(one):
            return one.double()
        return one.clone() if func._schema.is_mutable else one  # the operation itself writes into the tensor

    try:
        return func(*tree_map(widened, args), **tree_map(widened, kwargs))
    except RuntimeError:
        return None


def _is_narrow(one: Tensor) -> bool:
    return one.is_floating_point() and one.dtype != torch.float64
