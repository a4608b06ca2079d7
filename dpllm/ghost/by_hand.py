"""Matrices that a module multiplies with by hand, ``F.linear(x, self.weight)`` or ``torch.bmm(x, self.weight)``.

The module may be of any class and return anything: the product itself is tapped, not the module's output. Routers of
mixtures of experts are such modules (transformers 5 returns logits, scores and indices from them), and Llama 4's
experts. A parameter is served here only if its module uses it in no other way, which is watched in every call.

ZeRO-3 replaces ``F.linear`` by a ``torch.autograd.Function`` of its own. Only the functions inside it are seen, with
gradients off. Its output is then tapped where it is used next, or where the module returns it.

Shape suffixes: N tokens of all rows, E experts, D and P widths, B rows, T tokens, S = T * E.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpllm.ghost.call import flatten_tensors
from dpllm.ghost.contributions import Outer, RowGradients
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.experts import Host
from dpllm.ghost.kernels import sum_tokens
from dpllm.ghost.linear import as_tokens
from dpllm.ghost.routed import Routed

_CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.bfloat16, Tensor.half)
_MATMULS = (torch.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_LINEAR = torch._C._nn.linear  # F.linear, whatever another library puts in its place


class ByHandRule:
    """Taps the products inside one module.

    Args:
        path: of the module.
        module: the module.
        trainable: its trainable parameters by name.
        book: receives the recorded uses.

    Attributes:
        served: the parameters that the module uses in such products only; None before its first call has ended.
    """

    def __init__(self, path: str, module: nn.Module, trainable: Mapping[str, nn.Parameter], book: Host) -> None:
        """Start without a call."""
        self.path, self.module, self.trainable, self.book = path, module, dict(trainable), book
        self.served: frozenset[str] | None = None
        self._running: list[_Products] = []

    @classmethod
    def of(cls, path: str, module: nn.Module, trainable: Mapping[str, nn.Parameter], book: Host) -> ByHandRule | None:
        """Return the rule of a module of unknown class; None if it holds no matrix, or only such as others hold."""
        inside = {id(p) for m in module.modules() if m is not module for p in m.parameters(recurse=False)}
        own = {name: p for name, p in trainable.items() if "." not in name and id(p) not in inside}
        # A parameter that ZeRO-3 has partitioned keeps its shape in ``ds_shape``.
        sizes = [len(getattr(p, "ds_shape", p.shape)) for p in own.values()]
        return cls(path, module, own, book) if 2 in sizes or 3 in sizes else None

    def enter(self) -> None:
        """Begin to watch: the module is about to run."""
        if self.served is None or self.served:
            live = {id(getattr(self.module, name)): name for name in self.trainable}
            self._running.append(_Products(self, live))
            self._running[-1].__enter__()

    def leave(self, output: Any) -> Any:
        """Stop watching.

        Args:
            output: of the module; None if it raised.

        Returns:
            The output, tapped where it is itself a product.

        Raises:
            NoRuleError: it uses a parameter in another way than in its first call.
        """
        if not self._running:
            return output
        products = self._running.pop()
        products.__exit__(None, None, None)
        if output is None:
            return None
        if self.served is None:
            self.served = frozenset(products.counts.keys() - products.others.keys())
        for name in self.served & products.others.keys():
            raise NoRuleError(
                f"{self.path} ({type(self.module).__name__}) uses {name} in {products.others[name]}(), and used it in "
                "a product only at its first call, so its per-row gradient is not known. Freeze it."
            )
        for name in self.served:  # one call counts as one use already
            for _ in range(products.counts[name] - 1):
                self.book.note_uses([self.trainable[name]])
        return products.tapped(output)

    def tap_linear(self, output: Tensor, x: Tensor, weight: str | None, bias: str | None) -> Tensor:
        """Tap ``F.linear(x, weight, bias)``."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = x.to(output.dtype)  # the tensor that the product read

        def receive(grad: Tensor, saved: list[Tensor]) -> None:
            grad = self.book.by_rows(grad)
            for parameter in self._served(bias):
                self.book.record(parameter, RowGradients(sum_tokens(grad)))
            for parameter in self._served(weight):
                x_BTD = as_tokens(self.book.by_rows(saved[0]))
                self.book.record(parameter, Outer(as_tokens(grad), x_BTD, input_side="right"))

        return self.book.tap(output, receive, *([x] if weight else []))

    def tap_batched(self, output_ENP: Tensor, x_END: Tensor, weight: str) -> Tensor:
        """Tap ``torch.bmm(x, weight)``: every expert is given every token."""
        num_experts = len(x_END)

        def rows_of(x_ENC: Tensor) -> Tensor:
            x_BTC = as_tokens(self.book.by_rows(x_ENC.movedim(0, 1).flatten(1)))
            return x_BTC.unflatten(2, (num_experts, -1)).flatten(1, 2)

        def receive(grad_ENP: Tensor, saved: list[Tensor]) -> None:
            for parameter in self._served(weight):
                left_BSD, right_BSP = rows_of(saved[0]), rows_of(grad_ENP)
                index_S = torch.arange(left_BSD.shape[1], device=left_BSD.device) % num_experts
                index_BS = index_S.expand(len(left_BSD), -1)
                use = Routed(index_BS, left_BSD, right_BSP, num_experts, input_side="left")
                self.book.record(parameter, use)

        return self.book.tap(output_ENP, receive, x_END)

    def _served(self, name: str | None) -> list[nn.Parameter]:
        """Return the parameter of this name, if there is one and it is served."""
        return [] if name is None or name not in (self.served or ()) else [self.trainable[name]]


class _Products(TorchFunctionMode):
    """One call of a module: taps its products, and notes its other uses of parameters.

    Attributes:
        counts: products with each parameter.
        others: the function of another use of each parameter.
    """

    def __init__(self, rule: ByHandRule, name_of: dict[int, str]) -> None:
        super().__init__()
        self._rule, self._name_of = rule, name_of
        self._copies: list[Tensor] = []  # of other dtypes, or transposed; kept, so that their ids stay theirs
        self._transposed: dict[int, str] = {}
        self._grad_enabled = torch.is_grad_enabled()
        self._inside: dict[int, _Product] = {}  # of a function with gradients off, by the ids of their outputs
        self.counts: Counter[str] = Counter()
        self.others: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = self.tapped((args, kwargs or {}))
        result = func(*args, **kwargs)
        names = list(self._names(args, kwargs))
        if not names or not isinstance(result, Tensor):
            return result
        if func is _LINEAR:
            x, weight, bias = _arguments(args, kwargs, ("input", "weight", "bias"))
            if self._name(x) is None:
                return self._linear(result, x, self._name(weight), self._name(bias))
        if func is Tensor.t and self._name(args[0]):
            self._transposed[id(result)] = names[0]
            self._copies.append(result)
            return result
        if func in _MATMULS and id(args[-1]) in self._transposed and self._name(args[-2]) is None:
            *biases, x, weight = args
            return self._multiplied(result, x, self._transposed[id(weight)], self._name(biases[0]) if biases else None)
        if (
            getattr(func, "__name__", "") in ("__iadd__", "add_")
            and id(args[0]) in self._inside
            and (bias := self._name(args[1]))
        ):
            self._inside[id(result)].bias = bias
            return result
        if func in (torch.bmm, Tensor.bmm):
            x, weight = _arguments(args, kwargs, ("input" if func is torch.bmm else "self", "mat2"))
            name = self._name(weight)
            if name is not None and self._name(x) is None:
                self.counts[name] += 1
                return self._rule.tap_batched(result, x, name) if torch.is_grad_enabled() else result
        if func in _CASTS and self._name(args[0]) is not None:
            self._name_of.setdefault(id(result), names[0])
            self._copies.append(result)
            return result
        for name in names:
            self.others.setdefault(name, getattr(func, "__name__", str(func)))
        return result

    def _multiplied(self, result: Tensor, x: Tensor, weight: str, bias: str | None) -> Tensor:
        """Tap a product with a transposed matrix; later, if it is formed within a function with gradients off."""
        if torch.is_grad_enabled() or not self._grad_enabled:
            return self._linear(result, x, weight, bias)
        self._inside[id(result)] = _Product(result, x, weight, bias)
        return result

    def tapped(self, value: Any) -> Any:
        """Return nested tuples, lists and dicts of tensors with the outputs of such a function tapped."""
        if not self._inside or not torch.is_grad_enabled():
            return value
        if type(value) in (tuple, list):
            return type(value)(self.tapped(item) for item in value)
        if type(value) is dict:
            return {key: self.tapped(item) for key, item in value.items()}
        found = self._inside.get(id(value))
        if found is None:
            return value
        if found.tapped is None:
            found.tapped = self._linear(value, found.x, found.weight, found.bias)
        return found.tapped

    def _linear(self, result: Tensor, x: Tensor, weight: str | None, bias: str | None) -> Tensor:
        self.counts.update(name for name in (weight, bias) if name is not None)
        return self._rule.tap_linear(result, x, weight, bias) if torch.is_grad_enabled() else result

    def _name(self, value: Any) -> str | None:
        return self._name_of.get(id(value))

    def _names(self, args: tuple, kwargs: dict) -> Iterator[str]:
        known = self._transposed | self._name_of
        return (known[id(t)] for t in flatten_tensors((args, kwargs)) if id(t) in known)


@dataclass
class _Product:
    """A product within a function with gradients off.

    Attributes:
        output: the product; kept, so that its id stays its own.
        x: the factor that is no parameter.
        weight: the name of the matrix.
        bias: the name of the bias.
        tapped: the output as the module uses it.
    """

    output: Tensor
    x: Tensor
    weight: str | None
    bias: str | None
    tapped: Tensor | None = None


def _arguments(args: tuple, kwargs: dict, names: tuple[str, ...]) -> list[Any]:
    """Return the arguments of a function by position or by name; None where there is none."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
