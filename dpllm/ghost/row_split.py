"""Run modules row by row: exact for any module that computes each of its rows independently.

Each row gets its own copy of the parameters without a tap, so the copies' gradients are the rows' gradients. Inner
modules stay tapped; the uses recorded in single rows are combined when the last of them has arrived. This costs one
launch per row, in this module only.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpllm.ghost.experts import Routed
from dpllm.ghost.model_calls import items_of, rebuilt, tensors_in
from dpllm.ghost.taps import Call, Host, NoTapError, SpreadSite, Target, call_of, is_own
from dpllm.ghost.unit_gradients import Lookup, RowGradients, Use, sum_of

Held = tuple[Target, list[tuple[nn.Module, str]]]
"""A parameter, and the modules that hold it, each with the parameter's attribute name."""


class Split:
    """A module that runs row by row.

    Args:
        host: the clipper.
        path: of the module.
        held: the parameters that are copied for each row.
    """

    def __init__(self, host: Host, path: str, held: list[Held]) -> None:
        """Start without calls."""
        self.host, self.path, self.held = host, path, held
        self.targets = [target for target, _ in held]
        self._without_rows: set[tuple] = set()  # arguments, by name, that were once passed without the call's rows

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the module's forward during a call of the model, row by row."""
        call = call_of(self.host, self.path)
        if call is None:
            return forward(*args, **kwargs)
        present = [  # unless an enclosing module has put a copy there
            (target, places)
            for target, places in self.held
            if all(is_own(target, module._parameters.get(name)) for module, name in places)
        ]
        if call.place is not None:  # an enclosing module runs row by row
            with _in_place(present, _copies(call, present, 1), 0):
                return forward(*args, **kwargs)
        if len(call.packed.lengths) > 1:
            raise NoTapError(self.targets, "the rows are packed, so the module cannot run row by row")
        arguments = _Arguments(forward, without_cache(args), without_cache(kwargs), call.rows, self._without_rows)
        if not arguments.has_rows:
            raise NoTapError(self.targets, f"no argument has {call.rows} rows as its first dimension")
        if arguments.flattens and call.host.in_forward:
            call.host.flattens(self.targets, "row by row")
        gathered, anchor = _Gathered(call), call.anchor
        copies = _copies(call, present, call.rows)
        # In autograd's order, the gate follows everything that the rows recorded.
        gate = _Gate.apply(anchor, gathered) if torch.is_grad_enabled() else anchor
        outputs = []
        call.inside.append(self.targets)  # and remains if the module raises
        try:
            call.anchor, call.place = gate, gathered.add
            for row in range(call.rows):
                call.row = row
                own_args, own_kwargs = arguments.of(row)
                with _in_place(present, copies, row):
                    outputs.append(forward(*own_args, **own_kwargs))
        finally:
            call.anchor, call.place = anchor, None
        call.inside.pop()
        return joined(outputs)


def _copies(call: Call, present: Sequence[Held], rows: int) -> list[tuple[Tensor, ...]]:
    """Return the copies of each parameter, one per row."""
    copies = []
    for target, ((module, name), *_) in present:
        weight = module._parameters[name]
        assert weight is not None, "it was trained when the clipper was attached"
        copies.append(SpreadSite(target).copies(call, weight, torch.Size((rows, *weight.shape))).unbind(0))
    return copies


@contextlib.contextmanager
def _in_place(present: Sequence[Held], copies: Sequence[tuple[Tensor, ...]], row: int) -> Iterator[None]:
    """Replace the parameters by a row's copies, keeping their order in the modules."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (_, places), copy in zip(present, copies, strict=True):
            for module, name in places:
                # Recurrent layers hold their parameters in additional lists, and write to them.
                for attribute in ("_flat_weights", "_flat_weight_refs"):
                    if isinstance(module, nn.RNNBase) and attribute in vars(module):
                        held.append((module.__dict__, attribute, vars(module)[attribute]))
                        module.__dict__[attribute] = list(vars(module)[attribute])
                held.append((module._parameters, name, module._parameters[name]))
                module._parameters[name] = copy[row]  # type: ignore[assignment]
        yield
    finally:
        for values, name, value in reversed(held):
            values[name] = value


class _Gate(torch.autograd.Function):
    """An anchor whose backward runs after everything that it anchors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gathered: _Gathered) -> Tensor:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        ctx.gathered.hand_over()
        return None, None


class _Gathered:
    """The uses recorded in single rows of one call of a module."""

    def __init__(self, call: Call) -> None:
        self._host, self._rows = call.host, call.rows
        self._found: dict[tuple[Target, type], dict[int, list[Use]]] = {}

    def add(self, target: Target, row: int, use: Use) -> None:
        """Record the use of one row."""
        self._found.setdefault((target, type(use)), {}).setdefault(row, []).append(use)

    def hand_over(self) -> None:
        """Pass the clipper one use over all rows for each parameter."""
        found, self._found = self._found, {}
        for (target, _), by_row in found.items():
            self._host.record(target, _together(by_row, self._rows))


def _together(by_row: dict[int, list[Any]], rows: int) -> Use:
    """Combine the uses of single rows into one use over all rows; a row without a use gets zeros."""
    like = next(iter(by_row.values()))[0]
    if isinstance(like, RowGradients):
        none = torch.zeros_like(like.value_B)
        return RowGradients(
            torch.cat([sum_of(u.value_B for u in by_row[b]) if b in by_row else none for b in range(rows)])
        )
    if isinstance(like, Routed):
        by_row = {b: [Routed.cat(uses).per_slot()] for b, uses in by_row.items()}

    def laid(name: str, fill: int = 0) -> Tensor:
        """Lay the tokens of each row end to end, (B, longest, ...)."""
        found = {b: torch.cat([getattr(use, name) for use in uses], 1) for b, uses in by_row.items()}
        none, longest = next(iter(found.values()))[:, :0], max(x.shape[1] for x in found.values())
        per_row = [found.get(b, none) for b in range(rows)]
        return torch.cat([F.pad(x, (0, 0) * (x.ndim - 2) + (0, longest - x.shape[1]), value=fill) for x in per_row])

    if isinstance(like, Lookup):
        return replace(like, index_BT=laid("index_BT"), right_BTR=laid("right_BTR"))
    index = {"index_BS": laid("index_BS", -1)} if isinstance(like, Routed) else {}
    both: Use = replace(next(iter(by_row.values()))[0], left_BTL=laid("left_BTL"), right_BTR=laid("right_BTR"), **index)
    return both


class _Arguments:
    """The arguments of a call, split into rows.

    An argument has rows if its first dimension equals the number of the call's rows. If there are as many tokens as
    rows, this is ambiguous; an argument that was once passed without rows, such as positions (T,), then has none. An
    argument is identified by its name, since calls may omit others.
    """

    def __init__(
        self, forward: Callable[..., Any], args: tuple, kwargs: dict, rows: int, without_rows: set[tuple]
    ) -> None:
        names = _names_of(forward)
        named = [(names[i] if i < len(names) else i, value) for i, value in enumerate(args)]
        paths = [(path, t.shape[0] if t.ndim else 0) for path, t in tensors_in({**dict(named), **kwargs})]
        some_have = any(size == rows and path not in without_rows for path, size in paths)
        for path, size in paths:
            if rows > 1 and size != rows and (some_have or not (size and size % rows == 0)):
                without_rows.add(path)
        whole = [size == rows and path not in without_rows for path, size in paths]
        # Rows and tokens in one dimension, rows first: only if no argument has the rows themselves.
        flat = [0 if any(whole) or size % rows else size // rows for _, size in paths]
        self._each = [1 if has else n for has, n in zip(whole, flat, strict=True)]
        self._parts, self.has_rows = [args, kwargs], any(self._each)
        self.flattens = rows > 1 and any(n > 1 for n in self._each)

    def of(self, row: int) -> Any:
        """Return the arguments of one row."""
        each = iter(self._each)

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                n = next(each)
                return value[row * n : (row + 1) * n] if n else value
            return rebuilt(value, cut)

        return [cut(part) for part in self._parts]


def _names_of(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a forward's positional parameters."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def without_cache(value: Any) -> Any:
    """Replace empty key-value caches by None; otherwise each row would continue the tokens of the first."""
    length = getattr(value, "get_seq_length", None)
    if callable(length):
        return None if length() == 0 else value
    return rebuilt(value, without_cache) if isinstance(value, tuple | dict) else value


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of all rows as one output, nested like the first."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.ndim else sum_of(outputs)
    parts = [joined(items) for items in zip(*([item for _, item in items_of(one)] for one in outputs), strict=True)]
    following = iter(parts)
    return rebuilt(first, lambda _: next(following))
