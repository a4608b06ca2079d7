"""Experiments on a function that uses shared values with rows of the batch: how its per-row gradients are computed.

A function is run on values of the same size as those of the batch, for all rows and for the first and last row by
themselves. Its name plays no part. What the experiments cannot tell, which dimension has the rows, is measured on the
same batch: a row's loss must have no gradient in another row (`dpllm.ghost.book.Book`).

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpllm.ghost.call import replace_tensors
from dpllm.ghost.origins import names_of, turned

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)  # of a function on other shapes
_SIDES = ("x W", "x W^T", "W x", "W^T x")


@dataclass(frozen=True)
class Usage:
    """One call of a function that uses shared values together with rows of the batch.

    Attributes:
        func: the function.
        frame: its arguments, without their tensors.
        tensors: their tensors. Those of `moved` have dimension ``dim`` first.
        shared: the places of shared values among these.
        rows: the places of tensors that have the rows of the batch, for certain.
        count: B.
        dim: the dimension in which the rows are looked for.
    """

    func: Callable[..., Any]
    frame: tuple[tuple, dict]
    tensors: Sequence[Tensor]
    shared: Sequence[int]
    rows: Sequence[int]
    count: int
    dim: int = 0

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.func, "__name__", self.func))

    @property
    def owners(self) -> str:
        """The names of the parameters that it uses."""
        return names_of([self.tensors[place] for place in self.shared])

    @property
    def in_place(self) -> bool:
        """Whether the function writes to one of its arguments, as its name says."""
        name = self.name
        hidden = name.startswith("__")
        writes = (name.endswith("_") and not hidden) or name.startswith("__i") or name == "__setitem__"
        return writes or self.frame[1].get("out") is not None

    @property
    def width(self) -> int:
        """The number of dimensions of the tensors that have the rows."""
        return max(self.tensors[place].ndim for place in self.rows)

    @property
    def length(self) -> int:
        """The length of the dimension in which the rows are looked for."""
        return max(t.shape[0] for place in self.rows if (t := self.tensors[place]).ndim == self.width)

    @property
    def chunk(self) -> int:
        """The length of one row in this dimension; more than 1 where rows and tokens are flattened, 0 for no rows."""
        return self.length // self.count if self.length % self.count == 0 else 0

    def by_tokens(self, tokens: int) -> Usage:
        """Return the same call with the tokens of packed rows in place of the rows."""
        return replace(self, count=tokens)

    def at(self, dim: int) -> Usage:
        """Return the same call with the rows in another dimension."""
        width = self.width
        moved = [t.movedim(dim, 0) if self._moves(place, t, width) else t for place, t in enumerate(self.tensors)]
        return replace(self, tensors=moved, dim=dim) if dim else self

    def _moves(self, place: int, tensor: Tensor, width: int) -> bool:
        return place not in self.shared and tensor.ndim == width

    def run(self, values: dict[int, Tensor], copies: bool = False) -> Any:
        """Call the function with other tensors in some places.

        Args:
            values: by their places.
            copies: whether those in the places of shared values were expanded to one for each row.

        Returns:
            Its output, with the dimension of the rows first.
        """
        tensors = [values.get(place, tensor) for place, tensor in enumerate(self.tensors)]
        if self.dim:
            width = self.width
            tensors = [
                t.movedim(0, self.dim) if self._moves(place, t, width) or (copies and place in self.shared) else t
                for place, t in enumerate(tensors)
            ]
        args, kwargs = replace_tensors(self.frame, iter(tensors))
        result = self.func(*args, **kwargs)
        result = tensors[0] if result is None else result  # an assignment to a part of a tensor returns nothing
        return result.movedim(self.dim, 0) if self.dim and isinstance(result, Tensor) else result

    def key(self) -> tuple:
        """Return a key that is equal for calls of the same form."""
        forms = tuple((t.ndim, place in self.shared, t.is_floating_point()) for place, t in enumerate(self.tensors))
        return self.func, self.owners, forms, tuple(self.rows), self.count > 1, _structure(self.frame)

    def cut_of(self, cut: Sequence[int], row: int) -> dict[int, Tensor]:
        """Return one row of the tensors in these places."""
        sizes = {place: self.tensors[place].shape[0] // self.count for place in cut}
        return {place: self.tensors[place][row * size : (row + 1) * size] for place, size in sizes.items()}


def _structure(value: Any) -> Any:
    """Return the arguments beside tensors in a form that can be a key."""
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, (tuple, list)):
        return tuple(_structure(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _structure(item)) for key, item in value.items())
    return value if isinstance(value, (float, str, bool, type(None))) else type(value)


@dataclass(frozen=True)
class Way:
    """How the calls of one form are served.

    Attributes:
        kind: "product": the rows are multiplied by a matrix. "stack": the same, by one matrix for each expert.
            "copies": the function does the same when each shared value is expanded to one copy for each row. "rows":
            it treats rows separately.
        dim: the dimension that has the rows.
        flattened: whether that dimension has rows and tokens.
        side: of the matrix, for a product.
        cut: the places of tensors that are cut into rows, for rows.
        parts: the places of shared values that have the rows already, for copies.
        packed: whether the rows are laid end to end.
    """

    kind: str
    dim: int = 0
    flattened: bool = False
    side: str = ""
    cut: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    packed: bool = False

    def fits(self, usage: Usage, tokens: int = 0) -> bool:
        """Whether the call has shapes of this form; of a product, whether the matrix is the parameter itself.

        Args:
            usage: the call.
            tokens: of all packed rows; 0 if they are not packed.
        """
        if self.kind in ("product", "stack"):
            place = max(usage.shared, key=lambda place: usage.tensors[place].ndim)
            if turned(usage.tensors[place]) is None:
                return False
        if self.kind == "stack":
            return usage.tensors[usage.rows[0]].shape[1] % usage.count == 0 or self.packed
        if self.kind == "product" and self.packed:
            return True
        if self.dim >= usage.width:
            return False
        usage = (usage.by_tokens(tokens) if self.packed else usage).at(self.dim)
        if not usage.chunk or (usage.chunk > 1) != self.flattened:
            return False
        if self.kind == "copies":
            return all(expanded(usage, place, place in self.parts) is not None for place in usage.shared)
        return all(usage.tensors[place].shape[0] % usage.count == 0 for place in self.cut)


def find_way(usage: Usage, tokens: int) -> Way | None:
    """Find out how a function's per-row gradients are computed; None if no way is known.

    Args:
        usage: the call.
        tokens: of all rows, if they are laid end to end: then only a product can be cut into rows, and a function that
            treats each token by itself. 0: they are not.
    """
    packed = tokens > 0
    with _aside(usage.tensors):
        if not usage.in_place and _is_stack(usage) and (way := Way("stack", packed=packed)).fits(usage):
            return way
        if not usage.in_place and (usage.chunk or packed) and (side := _product_side(usage)) is not None:
            return Way("product", flattened=usage.chunk > 1, side=side, packed=packed)
        for dim in range(usage.width):
            drawn = _drawn_of(usage.by_tokens(tokens) if packed else usage).at(dim)
            if not drawn.chunk or (packed and drawn.chunk > 1):
                continue
            flattened = drawn.chunk > 1
            for cut in _cuts(drawn):
                parts = () if packed else tuple(place for place in drawn.shared if _has_parts(drawn, place))
                if _copies_apply(drawn, cut, parts):
                    return Way("copies", dim, flattened, parts=parts, packed=packed)
            for cut in _cuts(drawn):
                if not packed and not usage.in_place and _rows_apply(drawn, cut):
                    return Way("rows", dim, flattened, cut=cut)
    return None


@contextlib.contextmanager
def _aside(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Experiment without a trace: no graph, and the random numbers of the model are as before."""
    devices = {t.device for t in tensors if t.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices), device_type=kind):
        yield


def _cuts(usage: Usage) -> Iterator[tuple[int, ...]]:
    """Yield the sets of tensors that may have rows in their first dimension: certain ones, with others or without."""
    certain = [place for place in usage.rows if usage.tensors[place].shape[0] == usage.length]
    possible = [
        place
        for place, t in enumerate(usage.tensors)
        if place not in usage.shared
        and place not in usage.rows
        and t.ndim
        and t.shape[0] in (usage.length, usage.count)
    ]
    yield tuple(certain + possible)
    for place in possible:
        yield tuple(certain + [other for other in possible if other != place])
    if len(possible) > 1:
        yield tuple(certain)


def expanded(usage: Usage, place: int, parts: bool) -> Tensor | None:
    """Return a shared value with the dimensions of the rows, one copy for each; None if its shape does not allow it.

    Args:
        usage: the call.
        place: of the value.
        parts: whether it has the rows already.
    """
    value, width = usage.tensors[place].detach(), usage.width
    if value.ndim > width or not value.is_floating_point():
        return None
    value = value.reshape((1,) * (width - value.ndim) + value.shape).movedim(usage.dim, 0)
    if parts:
        return value if value.shape[0] == usage.length else None
    return value.expand(usage.length, *value.shape[1:]) if value.shape[0] == 1 else None


def _has_parts(usage: Usage, place: int) -> bool:
    """Whether a shared value has the rows already, one part for each: after ``expand``, or added to a mask."""
    value = usage.tensors[place]
    if usage.dim or value.ndim != usage.width or value.shape[0] == 1 or value.shape[0] != usage.length:
        return False
    if getattr(value, "_dpllm_rows", False):
        return True
    with torch.no_grad():
        rows = value.detach().unflatten(0, (usage.count, -1))
        return torch.equal(rows, rows[:1].expand_as(rows))


def _drawn(like: Tensor) -> Tensor:
    """Return other values of the same sign and size, different in each entry."""
    return like * (0.5 + torch.rand_like(like, dtype=torch.float32)).to(like.dtype)


def _drawn_of(usage: Usage) -> Usage:
    """Return the call on values of the same sign and size as those of the batch, none of them 0."""
    tensors = list(usage.tensors)
    for place in usage.rows:
        x = tensors[place].detach()
        tensors[place] = _drawn(torch.where(x == 0, torch.ones_like(x), x))
    return replace(usage, tensors=tensors)


def _run(usage: Usage, values: dict[int, Tensor], copies: bool = False) -> Any:
    """Run the function on copies, because it may write to its arguments."""
    fresh = {place: values.get(place, t).detach().clone() for place, t in enumerate(usage.tensors)}
    return usage.run(fresh, copies)


def _agree(usage: Usage, whole: Tensor, alone: Any, row: int) -> bool:
    """Whether the function gives a row by itself the output that it gives the row in the batch."""
    if not isinstance(alone, Tensor) or whole.ndim == 0 or whole.shape[0] % usage.count != 0:
        return False
    size = whole.shape[0] // usage.count
    part = whole[row * size : (row + 1) * size]
    if part.shape != alone.shape or part.dtype != alone.dtype or not part.is_floating_point():
        return False
    finite = part[torch.isfinite(part)]
    if not finite.numel():
        return False
    tolerance = 16 * torch.finfo(part.dtype).eps * (1 + float(finite.abs().max()))
    return torch.allclose(part, alone, rtol=0, atol=tolerance, equal_nan=True)


def _copies_apply(usage: Usage, cut: Sequence[int], parts: Sequence[int]) -> bool:
    """Whether the function treats a different copy of the shared values for each row as that row's own value."""
    rows, chunk = usage.count, usage.chunk
    copies, own = {}, {}
    for place in usage.shared:
        copy, shape = expanded(usage, place, place in parts), usage.tensors[place].shape
        if copy is None:
            return False
        if place in parts:
            copies[place] = drawn = _drawn(copy)
            own[place] = [drawn[row * chunk : (row + 1) * chunk] for row in range(rows)]
        else:
            drawn = _drawn(copy[::chunk])
            copies[place] = drawn.repeat_interleave(chunk, 0)
            own[place] = [drawn[row : row + 1].movedim(0, usage.dim).reshape(shape) for row in range(rows)]
    try:
        whole = _run(usage, copies, copies=True)
        if not isinstance(whole, Tensor) or whole.ndim == 0 or whole.shape[0] != usage.length:
            return False
        return all(
            _agree(usage, whole, _run(usage, usage.cut_of(cut, row) | _of_row(own, row)), row) for row in {0, rows - 1}
        )
    except FAILURES:
        return False


def _of_row(own: dict[int, list[Tensor]], row: int) -> dict[int, Tensor]:
    return {place: values[row] for place, values in own.items()}


def _rows_apply(usage: Usage, cut: Sequence[int]) -> bool:
    """Whether the function computes each row from this row and the shared values only."""
    try:
        whole = _run(usage, {})
        if not isinstance(whole, Tensor):
            return False
        return all(_agree(usage, whole, _run(usage, usage.cut_of(cut, row)), row) for row in {0, usage.count - 1})
    except FAILURES:
        return False


def _is_stack(usage: Usage) -> bool:
    """Recognise a product (E, N, D) @ (E, D, P) of rows with a stack of matrices that is a parameter."""
    if len(usage.tensors) != 2 or len(usage.rows) != 1 or len(usage.shared) != 1:
        return False
    x, stack = usage.tensors[usage.rows[0]], usage.tensors[usage.shared[0]]
    if x.ndim != 3 or stack.ndim != 3 or len(x) != len(stack) or x.shape[2] != stack.shape[1]:
        return False
    if turned(stack) is None:
        return False
    x = torch.rand(x.shape, dtype=torch.float64, device=x.device)
    other = torch.randn(stack.shape, dtype=torch.float64, device=x.device)
    try:
        with torch.autocast(x.device.type, enabled=False):
            output = usage.run({usage.rows[0]: x, usage.shared[0]: other})
    except FAILURES:
        return False
    return isinstance(output, Tensor) and output.shape == (x @ other).shape and torch.allclose(output, x @ other)


def _product_side(usage: Usage) -> str | None:
    """Recognise a product of the rows with a matrix that is a parameter, and perhaps the addition of a vector."""
    by_size = sorted((usage.tensors[place].ndim, place) for place in usage.shared)
    if [ndim for ndim, _ in by_size] not in ([2], [1, 2]) or len(usage.tensors) != len(by_size) + 1:
        return None
    place, bias = by_size[-1][1], by_size[0][1] if len(by_size) == 2 else None
    (row_place,) = usage.rows
    if turned(usage.tensors[place]) is None or usage.tensors[row_place].ndim < 2:
        return None
    x = usage.tensors[row_place][: max(1, usage.chunk)].detach().double()

    def draw(size: torch.Size) -> Tensor:
        return torch.randn(size, dtype=torch.float64, device=x.device)

    values = {row_place: torch.where(x == 0, torch.ones_like(x), x), place: draw(usage.tensors[place].shape)}
    if bias is not None:
        values[bias] = draw(usage.tensors[bias].shape)
    x, matrix = values[row_place], values[place]
    try:
        with torch.autocast(x.device.type, enabled=False):
            output = usage.run(values)
    except FAILURES:
        return None
    for side in _SIDES:
        factor, before = matrix.mT if "^T" in side else matrix, side.startswith("W")
        if not isinstance(output, Tensor) or (before and (x.ndim < 3 or bias is not None)):
            continue
        try:
            expected = factor @ x if before else x @ factor
            expected = expected if bias is None else expected + values[bias]
        except FAILURES:
            continue
        if output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-12, atol=1e-10):
            return side
    return None
