"""Parameters that a function uses, not a module that has a rule: state space models, gates, sinks, convolutions.

``F.conv1d(x, conv.weight)``, ``x * self.gate`` or ``-torch.exp(self.A_log)`` use a parameter where no hook on a module
sees it. `dpllm.ghost.uses` sees these functions. A value computed from parameters and constants only is *shared* by all
rows (`dpllm.ghost.origins`). Where a shared value meets the rows of the batch, the use is served in the first of these
ways that applies:

* **product**: the function multiplies the rows by a matrix, or each expert's by one of a stack. The use is kept as its
  factors (`Outer`, `Routed`).
* **copies**: the function does the same when the shared value is expanded to one copy for each row, as arithmetic that
  broadcasts does. The gradient of the copies is the per-row gradient.
* **rows**: the function treats rows separately. It is differentiated again for each single row (convolutions).

Which one applies is found out by experiment (`dpllm.ghost.experiments`), and the independence of rows is measured on
the batch of the experiment. Each row's gradient is then propagated from the shared value to the parameters. A function
for which nothing applies is refused.

Shape suffixes: B rows, T tokens, N tokens of all rows, E experts, D and P widths, S = T * E.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost.contributions import Outer, RowGradients
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.experiments import FAILURES, Usage, Way, expanded, find_way
from dpllm.ghost.kernels import sum_tokens, widen
from dpllm.ghost.linear import as_tokens
from dpllm.ghost.origins import Origin, has_rows, names_of, origins_of, propagate, propagate_parts, turned
from dpllm.ghost.routed import Routed
from dpllm.ghost.tap import Recorder


class Host(Recorder, Protocol):
    """The interface of the book that these rules need."""

    @property
    def rows_in_pass(self) -> int | None:
        """Rows of the current call of the model; None outside a call, or where they are not known."""
        ...

    @property
    def rows_by_themselves(self) -> int | None:
        """The same; None for packed rows too."""
        ...

    @property
    def packed_tokens(self) -> int:
        """The tokens of all rows, if the model was last called with several rows laid end to end; otherwise 0."""
        ...

    def note_uses(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count a use of each parameter in this call of the model."""
        ...

    def measure_rows_again(self) -> None:
        """Measure the independence of rows in the next backward pass, whether it was measured before or not."""
        ...


def of_parameter(name: str, value: Tensor, parameter: nn.Parameter, host: Host) -> Origin:
    """Return the origin of a parameter.

    Args:
        name: of the parameter.
        value: its present value; of a sharded model, whole only while its module runs.
        parameter: the parameter that is clipped.
        host: the interface of the book.
    """

    def receive(grad_B: Tensor) -> None:
        host.record(parameter, RowGradients(widen(grad_B)))

    return Origin(name, value, receive, parameter)


class FunctionRule:
    """Serves the functions in which shared values meet the rows of the batch.

    Args:
        host: the interface of the book.
    """

    def __init__(self, host: Host) -> None:
        """Start without knowledge of any function."""
        self.host = host
        self._ways: dict[tuple, list[Way]] = {}
        self._decided: dict[tuple, list[int]] = {}

    def rows_of(self, func: Any, tensors: list[Tensor], shared: list[int], count: int | None) -> list[int]:
        """Return the places of the tensors whose first dimension has the rows of the batch.

        A tensor that is not shared and has a gradient has it from a tap. Below the first tap, a tensor of numbers that
        was computed from the inputs of the model has rows if its first dimension can be cut into as many.

        Raises:
            GhostError: a tensor had rows in one call and has none in another: its length may agree by chance.
        """
        others = [place for place in range(len(tensors)) if place not in shared]
        rows = [place for place in others if tensors[place].requires_grad]
        if rows or not count:
            return rows
        width = max(tensors[place].ndim for place in shared)
        below = [p for p in others if has_rows(tensors[p]) and tensors[p].is_floating_point() and tensors[p].ndim]
        rows = [p for p in below if tensors[p].ndim >= width and tensors[p].shape[0] % count == 0]
        if below and count > 1:
            owners = names_of([tensors[place] for place in shared])
            key = owners, func, tuple(t.ndim for t in tensors)
            if self._decided.setdefault(key, rows) != rows:
                shapes = [tuple(tensors[p].shape) for p in below]
                raise NoRuleError(
                    f"{owners} is used by {getattr(func, '__name__', func)}() with tensors of the shapes {shapes}: it "
                    f"cannot be told whether their first dimension has the {count} rows of the batch. Freeze the "
                    "parameter."
                )
        return rows

    def apply(self, usage: Usage) -> Any:
        """Call the function such that each row's gradient of the shared values is received.

        Raises:
            GhostError: no way is known, or the rows may be in two dimensions.
        """
        way = self._way(usage)
        if way.kind == "product":
            return self._product(usage, way)
        if way.kind == "stack":
            return self._stack(usage)
        usage = (usage.by_tokens(self.host.packed_tokens) if way.packed else usage).at(way.dim)
        return self._copies(usage, way) if way.kind == "copies" else self._rows(usage, way)

    def _way(self, usage: Usage) -> Way:
        """Return the way of calls of this form; find it in the first one, in which the rows are then measured."""
        tokens = self.host.packed_tokens
        known = self._ways.setdefault((tokens > 0, usage.key()), [])
        fitting = [way for way in known if way.fits(usage, tokens)]
        if len({(way.dim, way.flattened) for way in fitting}) > 1:
            raise _no_rows(usage, tokens > 0)
        if fitting:
            return fitting[0]
        way = find_way(usage, tokens)
        if way is None:
            raise _no_rows(usage, tokens > 0)
        known.append(way)
        if usage.count > 1 or tokens:
            self.host.measure_rows_again()
        return way

    def _product(self, usage: Usage, way: Way) -> Tensor:
        place, *biases = sorted(usage.shared, key=lambda place: -usage.tensors[place].ndim)
        matrix, bias = usage.tensors[place], usage.tensors[biases[0]] if biases else None
        x = usage.tensors[usage.rows[0]]
        output = usage.run({place: usage.tensors[place].detach() for place in usage.shared})
        if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
            x = self.host.cast(x, output.dtype)  # the values that the product read
        before = way.side.startswith("W")  # the matrix is before the rows
        outputs_first = (way.side in ("x W^T", "W x")) != turned(matrix)
        parameter = origins_of(matrix)[0].parameter
        assert parameter is not None, "a product is found for parameters only"
        book, rows, flattened = self.host, usage.count, way.flattened and not self.host.packed_tokens

        def receive(grad: Tensor, saved: list[Tensor]) -> None:
            grad, x = (t.unflatten(0, (rows, -1)) if flattened else book.by_rows(t) for t in (grad, saved[0]))
            if bias is not None:
                propagate(bias, sum_tokens(grad))
            x_BTR, grad_BTP = (as_tokens(t.mT if before else t) for t in (x, grad))
            left, right = (grad_BTP, x_BTR) if outputs_first else (x_BTR, grad_BTP)
            book.record(parameter, Outer(left, right, input_side="right" if outputs_first else "left"))

        return book.tap(output, receive, x)

    def _stack(self, usage: Usage) -> Tensor:
        """Tap a product x (E, N, D) with a stack of matrices (E, D, P): every expert is given every token."""
        (place,), (row_place,) = usage.shared, usage.rows
        parameter, x_END = origins_of(usage.tensors[place])[0].parameter, usage.tensors[row_place]
        assert parameter is not None, "a product is found for parameters only"
        output_ENP = usage.run({place: usage.tensors[place].detach()})
        if torch.is_autocast_enabled(x_END.device.type) and x_END.dtype == torch.float32:
            x_END = self.host.cast(x_END, output_ENP.dtype)
        book, num_experts = self.host, len(x_END)

        def rows_of(x_ENC: Tensor) -> Tensor:
            x_BTC = as_tokens(book.by_rows(x_ENC.movedim(0, 1).flatten(1)))
            return x_BTC.unflatten(2, (num_experts, -1)).flatten(1, 2)

        def receive(grad_ENP: Tensor, saved: list[Tensor]) -> None:
            left_BSD, right_BSP = rows_of(saved[0]), rows_of(grad_ENP)
            index_S = torch.arange(left_BSD.shape[1], device=left_BSD.device) % num_experts
            index_BS = index_S.expand(len(left_BSD), -1)
            book.record(parameter, Routed(index_BS, left_BSD, right_BSP, num_experts, input_side="left"))

        return book.tap(output_ENP, receive, x_END)

    def _copies(self, usage: Usage, way: Way) -> Any:
        copies = {place: self._copy_of(usage, place, way) for place in usage.shared}
        before = [copy._version for copy in copies.values()]
        result = usage.run(copies, copies=True)
        if [copy._version for copy in copies.values()] != before:
            raise NoRuleError(
                f"{usage.name}() writes rows of the batch into a tensor that was computed from {usage.owners} and is "
                "one value for all rows. Build the tensor with torch.cat or torch.where, or freeze the parameter."
            )
        return result.movedim(0, way.dim) if way.dim else result

    def _copy_of(self, usage: Usage, place: int, way: Way) -> Tensor:
        """Return a shared value with one copy for each row, or for each token of packed rows, tapped."""
        value, rows, chunk, parts = usage.tensors[place], usage.count, usage.chunk, place in way.parts
        book = self.host
        copy = expanded(usage, place, parts)
        assert copy is not None, "the experiment expanded it"

        def receive(grad: Tensor, _: list[Tensor]) -> None:
            if parts:
                propagate_parts(value, grad, rows)
                return
            if way.packed:
                grad_B = sum_tokens(book.by_rows(grad.reshape(rows, -1)))
            else:
                grad_B = grad.unflatten(0, (rows, chunk)).sum(1)  # in the dimension of the rows it has one
            propagate(value, grad_B.reshape(-1, *value.shape))

        return book.tap(copy, receive)

    def _rows(self, usage: Usage, way: Way) -> Tensor:
        """Tap the output; differentiate the function for each row by itself when the gradient arrives."""
        shared = [usage.tensors[place] for place in usage.shared]
        output = usage.run({place: usage.tensors[place].detach() for place in usage.shared})
        device = output.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        form = Usage(usage.func, usage.frame, (), usage.shared, usage.rows, usage.count, usage.dim)

        def receive(grad: Tensor, saved: list[Tensor]) -> None:
            with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
                grads = _by_row(form, saved, grad, way.cut)
            for value, grad_B in zip(shared, grads, strict=True):
                propagate(value, grad_B)

        # The copy serves a model that adds to the output in place.
        tapped = self.host.tap(output.clone(), receive, *usage.tensors)
        return tapped.movedim(0, way.dim) if way.dim else tapped


def _by_row(form: Usage, saved: list[Tensor], grad: Tensor, cut: Sequence[int]) -> list[Tensor]:
    """Return the gradient of each row, (B, ...), with respect to each shared value, from that of the output."""
    rows = form.count
    usage = Usage(form.func, form.frame, saved, form.shared, form.rows, rows, form.dim)
    weights = [saved[place] for place in form.shared]

    def one_row(grad: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        own = dict(zip(cut, parts, strict=True))

        def run(*values: Tensor) -> Tensor:
            return usage.run(own | dict(zip(form.shared, values, strict=True)))

        _, pull_back = torch.func.vjp(run, *weights)  # type: ignore[misc]
        return pull_back(grad)

    parts = [saved[place].unflatten(0, (rows, -1)) for place in cut]
    grad_B = grad.unflatten(0, (rows, -1))
    try:
        return list(torch.func.vmap(one_row, randomness="error")(grad_B, *parts))
    except torch.OutOfMemoryError:
        raise
    except FAILURES:  # the function has no batched form
        each = [one_row(grad_B[row], *(part[row] for part in parts)) for row in range(rows)]
        return [torch.stack(grads) for grads in zip(*each, strict=True)]


def _no_rows(usage: Usage, packed: bool) -> NoRuleError:
    """Return the error for a function in which the rows cannot be found."""
    shapes = [tuple(usage.tensors[place].shape) for place in usage.rows]
    rows = "packed rows" if packed else f"{usage.count} rows"
    remedy = "Do not pack the rows (pack_rows: false), or freeze" if packed else "Freeze"
    return NoRuleError(
        f"{usage.owners} is used by {usage.name}() with tensors of the shape {shapes[0]}, in which the {rows} "
        "of the batch cannot be told apart: it mixes rows, draws random numbers, or has them in more than one "
        f"possible dimension. {remedy} the parameter."
    )
