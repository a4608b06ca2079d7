"""Shared values: computed from parameters and constants only, so one value for all rows of the batch.

A shared value has a graph of its own that ends at copies of the parameters (`Origin`). A gradient reaches these copies
only through `propagate`, row by row. Any other gradient that arrives there comes from a use that no rule saw, and is an
error.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.ghost.call import flatten_tensors
from dpllm.ghost.errors import NoRuleError


class Origin:
    """A value from which shared values are computed: a parameter, or the output of a table with one index for all rows.

    Args:
        name: of the parameter.
        value: the value.
        receive: takes the gradient of each row, (B, *shape of the value).
        parameter: where the value is the parameter.

    Attributes:
        leaf: the value in the graph of shared values.
    """

    def __init__(
        self, name: str, value: Tensor, receive: Callable[[Tensor], None], parameter: nn.Parameter | None = None
    ) -> None:
        """Make the leaf."""
        self.name, self.receive, self.parameter = name, receive, parameter
        self.leaf = mark_shared(value.detach().requires_grad_(), [self])
        self._propagating = False
        self.leaf.register_hook(self._refuse)

    def _refuse(self, grad: Tensor) -> None:
        del grad
        if not self._propagating:
            raise unseen_use(self.name)

    @contextlib.contextmanager
    def propagate(self) -> Iterator[None]:
        """Allow gradients to reach the leaf."""
        before, self._propagating = self._propagating, True
        try:
            yield
        finally:
            self._propagating = before


def unseen_use(name: str) -> NoRuleError:
    """Return the error for a gradient that reached a parameter past all rules."""
    return NoRuleError(
        f"{name} is used by an operation that cannot be seen (a kernel of a library, a torch.autograd.Function or "
        "compiled code), or its value reaches the loss without the rows of the batch, so its per-row gradient is not "
        "known. Let the model run without that kernel, or freeze the parameter."
    )


def unseen_recomputation() -> NoRuleError:
    """Return the error for tensors that differ from those of the forward pass when they are recomputed."""
    return NoRuleError(
        "Activation checkpointing recomputed other tensors than the forward pass had. Either a function is "
        "checkpointed that uses a trainable parameter outside of a module, where the backward pass does not see the "
        "use (then checkpoint a module: checkpoint(self.block, x), or freeze the parameter), or the model is not "
        "deterministic."
    )


def late_use(name: str) -> NoRuleError:
    """Return the error for a use that was in no earlier call of the model."""
    return NoRuleError(
        f"{name} is used by the loss or by a function in this call, and was not in earlier ones, so its per-row "
        "gradient is not known. Make the same computation in every call from the first one on, or freeze the parameter."
    )


def origins_of(tensor: Tensor) -> tuple[Origin, ...]:
    """Return the origins of a shared value; nothing for any other tensor."""
    return getattr(tensor, "_dpllm_origins", ())


def mark_shared(tensor: Tensor, origins: Sequence[Origin]) -> Tensor:
    """Mark a tensor as a shared value with these origins, beside those that it has."""
    tensor._dpllm_origins = tuple(dict.fromkeys((*origins_of(tensor), *origins)))  # type: ignore[attr-defined]
    return tensor


def has_rows(tensor: Tensor) -> bool:
    """Whether a tensor was computed from the inputs of the model, as one with a gradient is if nothing is known."""
    known: bool | None = getattr(tensor, "_dpllm_rows", None)
    return known if known is not None else tensor.requires_grad and not origins_of(tensor)


def has_none(tensor: Tensor) -> bool:
    """Whether it is known that a tensor was not computed from the inputs of the model, though a module tapped it."""
    return getattr(tensor, "_dpllm_rows", None) is False


def mark_rows(value: Any, rows: bool = True) -> None:
    """Mark the tensors within a value as computed from the inputs of the model, or as not computed from them."""
    for tensor in flatten_tensors(value):
        if not isinstance(tensor, nn.Parameter):
            tensor._dpllm_rows = rows  # type: ignore[attr-defined]


def names_of(tensors: Sequence[Tensor]) -> str:
    """Return the names of the parameters from which shared values were computed."""
    return ", ".join(dict.fromkeys(origin.name for tensor in tensors for origin in origins_of(tensor)))


def propagate(value: Tensor, grad_B: Tensor) -> None:
    """Take the gradient of each row, (B, *shape of a shared value), to the origins of the value."""
    origins = origins_of(value)
    if len(origins) == 1 and value is origins[0].leaf:
        origins[0].receive(grad_B)
        return
    with _propagating(origins):
        try:
            grads = _back(value, grad_B, batched=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation has no batched form
            each = [_back(value, grad) for grad in grad_B]
            grads = tuple(torch.stack(of_leaf) for of_leaf in zip(*each, strict=True))
    for origin, grad in zip(origins, grads, strict=True):
        origin.receive(grad)


def propagate_parts(value: Tensor, grad: Tensor, rows: int) -> None:
    """Do the same for a value whose first dimension has the rows: the gradient of a row is 0 in the other parts."""
    origins, size = origins_of(value), value.shape[0] // rows
    each = []
    with _propagating(origins):
        for row in range(rows):
            alone = torch.zeros_like(grad)
            here = slice(row * size, (row + 1) * size)
            alone[here] = grad[here]
            each.append(_back(value, alone))
    for origin, grads in zip(origins, zip(*each, strict=True), strict=True):
        origin.receive(torch.stack(grads))


@contextlib.contextmanager
def _propagating(origins: Sequence[Origin]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for origin in origins:
            stack.enter_context(origin.propagate())
        yield


def _back(value: Tensor, grad: Tensor, batched: bool = False) -> tuple[Tensor, ...]:
    leaves = [origin.leaf for origin in origins_of(value)]
    return torch.autograd.grad(value, leaves, grad, retain_graph=True, is_grads_batched=batched, materialize_grads=True)


def turned(value: Tensor) -> bool | None:
    """Return whether a shared matrix is its parameter transposed; None if it is neither the parameter nor that.

    A stack of matrices is never taken for a transposed one.
    """
    origins = origins_of(value)
    if len(origins) != 1 or origins[0].parameter is None:
        return None
    leaf = origins[0].leaf
    if value is leaf:
        return False
    if value.ndim not in (2, 3) or leaf.ndim != value.ndim:
        return None
    probe = torch.rand(value.shape, dtype=torch.float32, device=value.device).to(value.dtype)
    with _propagating(origins), torch.enable_grad():
        (back,) = _back(value, probe)
    for is_turned, expected in ((False, probe), (True, probe.mT))[: 4 - value.ndim]:
        if back.shape == expected.shape and torch.equal(back, expected.to(back.dtype)):
            return is_turned
    return None
