"""The order of rows: whether entry k of a tensor's first dimension comes from row k of the batch.

``hidden[mask]`` gives as many entries as the mask has trues. If there are as many as rows, a layer that is called with
them would take each for its row, although a row with two of them may be beside a row with none: norms would belong to
other units. `dpllm.ghost.uses` sees the functions of a call; here those that select entries of the first dimension are
repeated on the rows' numbers. The numbers follow the result to the layers with trained parameters, which refuse a
tensor whose entries are not in the order of the rows.

Shape suffixes: B rows, N entries of a first dimension, a whole number of them for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.ghost.errors import NoRuleError

_MIXED, _ANY = -2, -1  # entries that come from several rows, and those of which it is not known
_OF_FIRST = frozenset(("index_select", "masked_select", "gather", "take_along_dim", "embedding"))
_JOINS = frozenset(("cat", "concat", "concatenate", "stack"))
_VIEWS = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"))
_INDEXES = (Tensor, list, np.ndarray)
_WRITES = ("index_add", "index_copy", "index_put", "index_fill", "scatter", "masked_scatter", "masked_fill", "__set")


@dataclass(frozen=True)
class Order:
    """The rows that the entries of a tensor's first dimension come from, after a selection.

    Attributes:
        row_N: (N,) int64; None if entry k comes from row k, with equally many entries of each row.
        by_rows: whether whole rows were selected, not tokens of all rows.
        one_row: whether this is one row of the batch, picked by a number: its first dimension has no rows.
    """

    row_N: Tensor | None
    by_rows: bool
    one_row: bool = False


def order_of(tensor: Tensor) -> Order | None:
    """Return the order of a tensor that was computed from a selection; None for any other."""
    return getattr(tensor, "_dpllm_order", None)


def refuse_other_order(user: str, tensors: Iterable[Tensor], rows: int) -> None:
    """Make sure that a selection has the rows of the batch in order.

    Args:
        user: a name for the module or parameter that reads the tensors.
        tensors: the tensors.
        rows: B.

    Raises:
        GhostError: entry k is not of row k.
    """
    for tensor in tensors:
        order = order_of(tensor)
        if order is None or order.row_N is None or order.one_row or len(tensor) % rows:
            continue
        raise NoRuleError(
            f"{user} reads {len(tensor)} entries that were selected from the {rows} rows of the batch (by a mask, an "
            f"index or a gather), and they are not one row after the other: they come from rows "
            f"{order.row_N[:8].tolist()}{' …' if len(order.row_N) > 8 else ''}. Gradients would be taken for those of "
            "other rows, so a unit could not be bounded. Select the same number of entries from each row, compute the "
            "layer for all tokens and select afterwards, or clip one unit at a time (privacy.gradients=per_unit)."
        )


def needs_every_call(tensors: Iterable[Tensor]) -> bool:
    """Whether the order of one of these has to be looked at in every call: other data may give another.

    Experts select tokens and put them back; a tensor of tokens (B, T, D) after them is looked at in some calls only.
    """
    orders = [(t, order) for t in tensors if (order := order_of(t)) is not None and not order.one_row]
    return any(order.by_rows or t.ndim < 3 for t, order in orders)


def follow(func: Any, args: tuple, kwargs: dict, tensors: Sequence[Tensor], result: Any, rows: int | None) -> None:
    """Give the result of a function the order of its entries.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its arguments by name.
        tensors: the tensors among them.
        result: its result.
        rows: B; None if not known.
    """
    name = getattr(func, "__name__", "")
    selects = name in _OF_FIRST or name == "unbind" or (name == "__getitem__" and _is_selection(args[1]))
    if not rows or not (selects or any(order_of(t) is not None for t in tensors)):
        return
    if name == "__setitem__":
        _written(args)
    elif name == "unbind":
        whole = _is_whole(args[0], rows) and _dim(args, kwargs) == 0
        for row, part in enumerate(result if whole else ()):
            _mark(part, _one(row, part))
    elif name in _JOINS:
        _mark(result, _joined(name, args, kwargs, tensors, result, rows))
    elif any(map(name.startswith, _WRITES)):
        _mark(result, order_of(tensors[0]) if _alike(tensors[0], result) else None)
    elif name in _VIEWS and isinstance(result, Tensor):
        _mark(result, _viewed(tensors[0], result, rows))
    elif not (selects and _rearranges(_source(name, args, kwargs), result, rows) and name != "masked_select"):
        selected = _selected(func, name, args, kwargs, result, rows) if selects else None
        source = _source(name, args, kwargs) if selects else None
        if selected and selected.row_N is None and not _by_data(name, args, tensors, source):
            selected = None  # in order for any data: by numbers that no row decides, as in attention masks
        _mark(result, selected or _inherited(tensors, result))


def _by_data(name: str, args: tuple, tensors: Sequence[Tensor], source: Tensor | None) -> bool:
    """Whether rows may decide what is selected: by tensors made of them, or by numbers that went through Python."""
    if any(_has_rows(t) for t in tensors if t is not source):
        return True
    index = args[1] if name == "__getitem__" else ()
    return any(isinstance(item, (list, np.ndarray)) for item in (index if isinstance(index, tuple) else (index,)))


def _inherited(tensors: Sequence[Tensor], result: Any) -> Order | None:
    """Return the order of those arguments of a function that have as many entries as its result."""
    known = [order for t in tensors if _alike(t, result) and (order := order_of(t)) is not None]
    return next((order for order in known if order.row_N is not None), known[0] if known else None)


def _rearranges(source: Tensor | None, result: Any, rows: int) -> bool:
    """Whether a selection has as many entries as all tokens, or more: experts sort tokens, and sort them back.

    Between the two a tensor may be cut and joined, or go through a kernel, so the order of the second is not known.
    """
    if source is None or not isinstance(result, Tensor) or source.ndim > 2 or result.ndim == 0:
        return False
    of_tokens = source.is_floating_point() or source.ndim == 1 or len(source) != rows
    return of_tokens and len(result) >= len(source)


def _written(args: tuple) -> None:
    """Follow ``tensor[:] = value`` and ``tensor[:, k] = value``."""
    tensor, index, value = args
    if isinstance(value, Tensor) and (_is_all(_first(index)) or _first(index) is Ellipsis) and _alike(tensor, value):
        _mark(tensor, order_of(value))


def _mark(result: Any, order: Order | None) -> None:
    if order is not None and isinstance(result, Tensor) and result.ndim:
        result._dpllm_order = order  # type: ignore[attr-defined]


def _alike(tensor: Tensor, result: Any) -> bool:
    return isinstance(result, Tensor) and bool(tensor.ndim and result.ndim) and tensor.shape[0] == result.shape[0]


def _is_selection(index: Any) -> bool:
    """Whether an index selects by tensors, lists, or by a number in the first dimension; others keep rows in order."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    return _is_number(first) or any(isinstance(item, _INDEXES) for item in (first, *rest))


def _is_number(item: Any) -> bool:
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def _dim(args: tuple, kwargs: dict) -> Any:
    return kwargs.get("dim", args[1] if len(args) > 1 else 0)


def _source(name: str, args: tuple, kwargs: dict) -> Tensor | None:
    """Return the tensor that entries are selected from; None if its first dimension keeps its entries."""
    value = args[0] if args else kwargs.get("input")
    if name == "embedding":
        value = args[1] if len(args) > 1 else kwargs.get("weight")
    elif name in ("index_select", "gather", "take_along_dim"):
        place = 2 if name == "take_along_dim" else 1
        dim: Any = kwargs.get("dim", args[place] if len(args) > place else None)
        if dim is not None and isinstance(value, Tensor) and dim % max(value.ndim, 1):
            return None
    elif name == "__getitem__" and _keeps_first(args[1]):
        return None
    return value if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.ndim else None


def _keeps_first(index: Any) -> bool:
    """Whether an index leaves the first dimension as it is, ``x[:, index]``."""
    items = index if isinstance(index, tuple) else (index,)
    return _is_all(items[0]) and sum(isinstance(item, _INDEXES) for item in items) < 2


def _is_whole(source: Tensor | None, rows: int) -> bool:
    """Whether the first dimension of a tensor that was computed from the inputs is that of the rows."""
    return source is not None and order_of(source) is None and len(source) == rows and _has_rows(source)


def _has_rows(tensor: Tensor) -> bool:
    return getattr(tensor, "_dpllm_rows", False) or (tensor.requires_grad and not hasattr(tensor, "_dpllm_origins"))


def _one(row: int, part: Tensor) -> Order:
    return Order(torch.full((len(part) if part.ndim else 0,), row), by_rows=True, one_row=True)


def _numbers(tensor: Tensor, rows: int) -> Tensor | None:
    """Return (N,) the row of each entry; None if the tensor has no rows."""
    order = order_of(tensor)
    if order is not None and order.row_N is not None:
        return order.row_N.to(tensor.device)
    if not (order is not None or _has_rows(tensor)) or tensor.ndim == 0 or len(tensor) == 0 or len(tensor) % rows:
        return None
    return torch.arange(len(tensor), device=tensor.device) // (len(tensor) // rows)


def _settled(row: Tensor, rows: int, by_rows: bool, one_row: bool = False) -> Order:
    """Return the order of entries, of whose parts these are the rows (N, ...)."""
    row_NX = row.reshape(len(row), -1) if row.numel() else row.new_full((len(row), 1), _ANY)
    mine_N = row_NX[:, 0]
    if one_row:
        return Order(mine_N, by_rows, one_row)
    if len(row_NX) and len(row_NX) % rows == 0:
        own_N = torch.arange(len(row_NX), device=row.device) // (len(row_NX) // rows)
        own = (row_NX == own_N[:, None]) | (row_NX == _ANY)
        if bool(own.all()):
            return Order(None, by_rows)
    mine_N = torch.where((row_NX == mine_N[:, None]).all(1), mine_N, _MIXED)
    return Order(mine_N, by_rows)


def _selected(func: Any, name: str, args: tuple, kwargs: dict, result: Any, rows: int) -> Order | None:
    """Repeat a selection on the rows' numbers; None if it does not select from rows."""
    source = _source(name, args, kwargs)
    if source is None or not isinstance(result, Tensor) or result.ndim == 0:
        return None
    before = order_of(source)
    number: Any = _first(args[1]) if name == "__getitem__" else None
    if _is_number(number):
        return _one(number % rows, result) if _is_whole(source, rows) else None
    number_N = _numbers(source, rows)
    if number_N is None:
        return None
    if name == "embedding":
        row = number_N[args[0] if args else kwargs["input"]]
    else:
        depth = {"__getitem__": lambda: _indexed(args[1]), "index_select": lambda: 1}.get(name, lambda: source.ndim)()
        shape = [size if place < depth else 1 for place, size in enumerate(source.shape)]
        stand_in = number_N.reshape(-1, *[1] * (source.ndim - 1)).expand(shape)
        again_args, again_kwargs = _replaced(source, stand_in, args, kwargs)
        row = func(*again_args, **again_kwargs)
    if row.ndim == 0 or len(row) != len(result):  # one entry by a tensor without dimensions
        return Order(row.reshape(-1)[:1].expand(len(result)), by_rows=True, one_row=True)
    return _settled(row, rows, before.by_rows if before else len(source) == rows, before is not None and before.one_row)


def _replaced(source: Tensor, stand_in: Tensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Put another tensor in the place of the source, the first argument."""
    if args:
        return (stand_in, *args[1:]), kwargs
    return args, {name: stand_in if value is source else value for name, value in kwargs.items()}


def _is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _first(index: Any) -> Any:
    return index[0] if isinstance(index, tuple) else index


def _indexed(index: Any) -> int:
    """Return the dimensions that an index reads; all where it has an ellipsis."""
    items = index if isinstance(index, tuple) else (index,)
    if any(item is Ellipsis for item in items):
        return 64
    masks = sum(t.ndim - 1 for t in items if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8))
    lists = sum(8 for item in items if isinstance(item, (list, np.ndarray)))
    return sum(item is not None for item in items) + masks + lists


def _joined(name: str, args: tuple, kwargs: dict, tensors: Sequence[Tensor], result: Any, rows: int) -> Order | None:
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    known = [order for t in tensors if (order := order_of(t)) is not None]
    if dim not in (0, -getattr(result, "ndim", 0)):
        alike = [order for order in known if not order.one_row]
        return next((order for order in alike if order.row_N is not None), alike[0] if alike else None)
    parts = []
    for tensor in tensors:
        order = order_of(tensor)
        numbers = None if order is None else _numbers(tensor, rows) if not order.one_row else order.row_N
        if numbers is None or (not len(numbers) and name == "stack"):
            numbers = torch.full((len(tensor) if tensor.ndim else 1,), _ANY)
        numbers = numbers.cpu()
        if name == "stack":
            numbers = numbers[:1] if bool((numbers == numbers[0]).all()) else torch.tensor([_MIXED])
        parts.append(numbers)
    return _settled(torch.cat(parts), rows, all(order.by_rows for order in known)) if parts else None


def _viewed(tensor: Tensor, result: Tensor, rows: int) -> Order | None:
    """Return the order of the same entries in another shape."""
    order = order_of(tensor)
    if order is None or result.ndim == 0 or order.one_row:
        return order if order is not None and order.one_row and _alike(tensor, result) else None
    before, now = len(tensor), len(result)
    if before == now:
        return order
    if order.row_N is None and not (before % rows or now % rows):
        return order
    numbers_N = _numbers(tensor, rows)
    if numbers_N is None or not (before and now):
        return None
    if now % before == 0:
        return _settled(numbers_N.repeat_interleave(now // before), rows, order.by_rows)
    if before % now == 0:
        return _settled(numbers_N.view(now, -1), rows, order.by_rows)
    return Order(torch.full((now,), _MIXED), order.by_rows)
