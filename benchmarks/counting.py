"""Count the floating-point operations and the bytes of live tensors of a piece of work while it runs."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.flop_counter as flop_counter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _product(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Operations of a matrix, batched or matrix-vector product or of an inner product."""
    columns = b[-1] if len(b) > 1 else 1
    rows = a[-2] if len(a) > 1 else 1
    batch = a[0] if len(a) == 3 else 1
    return 2 * batch * rows * a[-1] * columns


def _added_product(_: torch.Size, a: torch.Size, b: torch.Size, *__: Any, **___: Any) -> int:
    return _product(a, b)


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _attention_backward(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    return flop_counter.sdpa_backward_flop_count(grad, query, key, value)


# FlopCounterMode leaves out in-place products (which form a clipped sum), products with a vector, and attention
# on the CPU. Its own formula for bmm fails if an output dtype is given.
FORMULAS: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((aten.bmm, aten.mv, aten.dot, aten.vdot), _product),
    **dict.fromkeys((aten.addmm_, aten.baddbmm_, aten.addbmm, aten.addbmm_, aten.addmv, aten.addmv_), _added_product),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_CONTRACTION = re.compile(r"(^|_)(add|badd)?b?(mm|mv|dot|vdot)(_|$)|matmul|attention|conv|linear|einsum|cdist")


class _Seen(TorchDispatchMode):
    """Remembers which operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operations.add(func._overloadpacket)
        return func(*args, **(kwargs or {}))


def count_flops(function: Callable[[], Any]) -> dict[str, int]:
    """Floating-point operations by name of the operation.

    Raises:
        RuntimeError: an operation that looks like a product and has no formula: the total would be too small.
    """
    with _Seen() as seen, flop_counter.FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        function()
    unknown = [
        str(op)
        for op in seen.operations - counter.flop_registry.keys()
        if _CONTRACTION.search(str(op).removeprefix("aten."))
    ]
    if unknown:
        raise RuntimeError(f"No FLOP formula for {sorted(unknown)}: add one to FORMULAS, or the count is too small.")
    return {str(op): int(flops) for op, flops in counter.get_flop_counts().get("Global", {}).items()}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors alive, from the storages that operations return until they are freed."""

    def __init__(self) -> None:
        """Start from nothing."""
        super().__init__()
        self.current = self.peak = 0
        self._known: dict[int, int] = {}

    def watch(self, value: Any) -> None:
        """Count the storages of a tensor or of the tensors in a list or tuple, each once."""
        if isinstance(value, (tuple, list)):
            for item in value:
                self.watch(item)
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known[key] = size
        weakref.finalize(storage, self._free, key).atexit = False
        self.current += size
        self.peak = max(self.peak, self.current)

    def _free(self, key: int) -> None:
        self.current -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(result)
        return result
