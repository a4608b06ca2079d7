"""Values within ZeRO-3's own linear function, which DeepSpeed puts in the place of ``F.linear``.

It is a ``torch.autograd.Function``: only the functions inside it are seen, with gradients off. A *twin* of each value
that it computes from trainable parameters is computed with gradients, as ``F.linear`` would compute it. Where the value
is used next, its twin takes its place, so no gradient reaches the function. A gradient that does is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpllm.ghost.call import flatten_tensors, replace_tensors
from dpllm.ghost.origins import unseen_use

_REPLACES_LINEAR = "deepspeed.runtime.zero.linear"  # the module that defines the function


@dataclass
class _Hidden:
    """A value that was computed with gradients off.

    Attributes:
        value: kept, so that its id stays its own.
        twin: the same value with a graph.
        names: of the parameters from which it was computed.
        shown: whether a graph that leads to the value would show that these are trained.
        followed: whether another value with a twin was computed from it.
    """

    value: Tensor
    twin: Tensor
    names: tuple[str, ...]
    shown: bool
    followed: bool = False


class Twins:
    """The values of one call of the model that have twins."""

    def __init__(self) -> None:
        """Start without one."""
        self._by_id: dict[int, _Hidden] = {}

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._by_id)

    def clear(self) -> None:
        """Forget all."""
        self._by_id.clear()

    def names_of(self, tensors: Iterable[Tensor]) -> set[str]:
        """Return the names of the parameters from which these values were computed within the function."""
        return {name for t in tensors if id(t) in self._by_id for name in self._by_id[id(t)].names}

    def twin_of(self, tensor: Tensor) -> Tensor:
        """Return the twin of a value within the function; any other tensor as it is."""
        found = self._by_id.get(id(tensor))
        return tensor if found is None else found.twin

    def add(self, value: Tensor, twin: Tensor, names: Iterable[str], shown: bool, sources: Iterable[Tensor]) -> None:
        """Remember a value's twin.

        Args:
            value: computed with gradients off.
            twin: the same with gradients.
            names: of the parameters from which it was computed.
            shown: whether autograd would show in a graph of the value that they are trained.
            sources: the tensors from which it was computed.
        """
        hidden = [self._by_id[id(source)] for source in sources if id(source) in self._by_id]
        for one in hidden:
            one.followed = True
        shown = shown and all(one.shown for one in hidden)
        self._by_id[id(value)] = _Hidden(value, twin, tuple(sorted(names)), shown)

    def replaced(self, value: Any) -> Any:
        """Return a tensor, or nested tuples, lists and dicts, with the outputs of the function replaced by their twins.

        Raises:
            NoRuleError: a value comes from another library's function, whose own derivative is not known.
        """
        tensors = list(flatten_tensors(value)) if self._by_id else []
        if not any(id(t) in self._by_id for t in tensors):
            return value
        replaced = replace_tensors(value, iter([self._outside(t) for t in tensors]))
        return type(value)(**replaced) if isinstance(value, dict) else replaced

    def _outside(self, tensor: Tensor) -> Tensor:
        found = self._by_id.get(id(tensor))
        if found is None:
            return tensor
        if tensor.grad_fn is None and found.shown:
            return tensor  # a constant, computed with gradients off on purpose
        if getattr(getattr(tensor.grad_fn, "_forward_cls", None), "__module__", "") != _REPLACES_LINEAR:
            raise unseen_use(found.names[0])
        found.followed = True
        return found.twin

    def settle(self) -> None:
        """Make sure that no gradient can reach a value that has a twin; forget the twins.

        Raises:
            NoRuleError: it cannot be told whether a value is a constant.
        """
        found, self._by_id = self._by_id, {}
        for one in found.values():
            if one.value.requires_grad:
                one.value.register_hook(_refuse(one.names[0]))
            elif not one.followed and not one.shown:
                raise unseen_use(one.names[0])


def _refuse(name: str) -> Any:
    def refuse(_: Tensor) -> None:
        raise unseen_use(name)

    return refuse
