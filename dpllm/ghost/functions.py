"""Matrix products and lookups with a trained parameter that are called as functions, by any module.

Routers, tied heads and layers of other libraries call ``F.linear(x, self.weight)`` or ``F.embedding``. While such a
module runs, a mode sees these functions and computes them with taps. Biases that they take are served too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpllm.ghost.taps import LINEAR, Call, Host, LinearSite, SpreadSite, TableSite, Target, is_own

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


@dataclass
class Functions:
    """The trained parameters that a module hands to functions.

    Attributes:
        host: the clipper.
        held: the parameters, each with a module that holds it and its name there.
        sites: the products and lookups that were seen so far.
    """

    host: Host
    held: list[tuple[Target, nn.Module, str]]
    sites: dict[tuple, LinearSite | TableSite | SpreadSite] = field(default_factory=dict)

    @property
    def targets(self) -> list[Target]:
        """The parameters."""
        return [target for target, *_ in self.held]

    def uses_of(self, name: str) -> int:
        """Return how often the calls of the model used a parameter."""
        return sum(site.uses for site in self.sites.values() if any(target.name == name for target in site.targets))

    def mode(self, call: Call) -> TorchFunctionMode:
        """Return the mode under which the module runs in a call of the model."""
        return _Mode(self, call)

    def linear(self, weight: Target | None, bias: Target | None) -> LinearSite:
        """Return the site of a product with these parameters."""
        key = (weight, bias)
        if key not in self.sites:
            self.sites[key] = LinearSite(weight, bias)
        return self.sites[key]  # type: ignore[return-value]

    def bias(self, bias: Target) -> SpreadSite:
        """Return the site of a bias that is added to a product with a computed matrix."""
        if (bias,) not in self.sites:
            self.sites[(bias,)] = SpreadSite(bias)
        return self.sites[(bias,)]  # type: ignore[return-value]

    def product(
        self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, own: Target | None, own_bias: Target | None
    ) -> Tensor:
        """Compute a product in a call of the model.

        A matrix or a bias that is computed from parameters, or the copy of one for a row, stays in autograd.

        Args:
            call: the call.
            x: the input.
            weight: the matrix.
            bias: None: there is none.
            own: the trained parameter that the matrix is; None: it is another tensor.
            own_bias: the same of the bias.
        """
        if own is None and weight.requires_grad:
            assert own_bias is not None and bias is not None, "one of them is trained"
            y: Tensor = LINEAR(x, weight)
            return y + self.bias(own_bias).read(call, bias, y.shape).to(y.dtype)
        if own_bias is None and bias is not None and bias.requires_grad:
            y = self.linear(own, None).run(call, x, weight, None)
            return y + bias.to(y.dtype)
        return self.linear(own, own_bias).run(call, x, weight, bias)

    def table(self, weight: Target, padding_idx: int | None) -> TableSite:
        """Return the site of a lookup in this table."""
        key = (weight, padding_idx)
        if key not in self.sites:
            self.sites[key] = TableSite(weight, padding_idx)
        return self.sites[key]  # type: ignore[return-value]


class _Mode(TorchFunctionMode):
    """Computes functions of held parameters with taps; `Functions` has the parameters."""

    def __init__(self, functions: Functions, call: Call) -> None:
        super().__init__()
        self._functions, self._call = functions, call
        # By their present identity: FSDP2 puts other tensors in their places while a module runs.
        self._held = {
            id(now): target for target, m, name in functions.held if is_own(target, now := m._parameters.get(name))
        }

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is LINEAR:
            x, weight, bias = _arguments(args, kwargs, ("input", "weight", "bias"))
            own, own_bias = self._held.get(id(weight)), self._held.get(id(bias))
            if own is not None or own_bias is not None:
                return self._functions.product(self._call, x, weight, bias, own, own_bias)
        elif func is F.embedding:
            index, weight, padding_idx = _arguments(args, kwargs, ("input", "weight", "padding_idx"))
            if (table := self._held.get(id(weight))) is not None:
                return self._functions.table(table, padding_idx).run(self._call, index, weight)
        return func(*args, **kwargs)


def _arguments(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> list[Any]:
    given: list[Any] = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
    return given


def takes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], parameter: Tensor) -> bool:
    """Whether a mode serves the parameter as an argument of this function."""
    if func is LINEAR:
        return any(one is parameter for one in _arguments(args, kwargs, ("input", "weight", "bias"))[1:])
    if func is F.embedding:
        _, weight, _, max_norm, _, by_count, sparse = _arguments(args, kwargs, _EMBEDDING)
        return weight is parameter and max_norm is None and not by_count and not sparse
    return False
