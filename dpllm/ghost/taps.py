"""Taps: modules that hand over what the gradients of their rows are made of, in one backward pass and without hooks.

While a clipper is attached, a module with trained parameters has a subclass of its own class (`dpllm.ghost.attach`).
Its forward calls an autograd function with the weight *detached*: autograd computes nothing for the weight, and the
function's backward hands its input and output gradient to the clipper. So a gradient that reaches a trained parameter
is a use that no tap saw, and an error.

* Eager modules hand over directly, for any shape and any number of calls. An *anchor* that requires grad makes the
  function a part of the graph where its input is not.
* A compiled block may have no side effect. Its functions return the same tensors as the gradients of *leaves*, outputs
  of one `Sink` that is made just before the compiled forward (`dpllm.ghost.blocks`). Leaves take no memory.

Shape suffixes: B rows, T tokens, D inputs, P outputs.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.ghost import kernels
from dpllm.ghost.contributions import Lookup, Outer, RowGradients, Use
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.packed import PackedRows

LINEAR: Any = torch._C._nn.linear
"""DeepSpeed's ``zero.Init`` replaces ``F.linear``, for good, by a function that no mode sees."""

_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
_KEPT = 2  # inputs in the dtype of autocast: one that several layers read, and one that a layer between them read


class Target(NamedTuple):
    """A trained parameter and its name in the model."""

    name: str
    parameter: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """The whole shape: ZeRO-3 leaves a parameter without entries between its uses."""
        return torch.Size(getattr(self.parameter, "ds_shape", self.parameter.shape))


def is_own(target: Target | None, tensor: Any) -> bool:
    """Whether a tensor in the place of a parameter is the parameter, or what FSDP2 gathered of it.

    Another one (``torch.func.functional_call``) stays in autograd: its gradient is not that of the parameter.
    """
    if target is None or tensor is None:
        return tensor is None or not tensor.requires_grad
    return tensor is target.parameter or (isinstance(target.parameter, DTensor) and isinstance(tensor, nn.Parameter))


class Host(Protocol):
    """What taps need of the clipper that they hand over to.

    Attributes:
        call: the call of the model that runs, or whose graph is being differentiated; None: neither.
        in_forward: whether the model's forward pass runs.
        in_backward: whether a backward pass of the clipper runs, in which modules may be recomputed.
    """

    call: Call | None
    in_forward: bool
    in_backward: bool

    def arrived(self, *tensors: Tensor) -> None:
        """Note tensors that came out of a backward pass, and make sure that it is one of the clipper's."""
        ...

    def record(self, target: Target, use: Use) -> None:
        """Take the contribution of one use of a parameter to the gradient of each row."""
        ...

    def refuse_bypass(self, path: str) -> None:
        """Raise `GhostError`: a module with trained parameters is called outside the model, with gradients on."""
        ...


class Place(Protocol):
    """Where a use goes while its module runs row by row; see `dpllm.ghost.row_split`."""

    def add(self, target: Target, row: int, use: Use) -> None:
        """Take the contribution of one use in one row, which runs alone."""
        ...


class NoTapError(RuntimeError):
    """A module whose tensors do not show their rows: it has to run row by row, or the module around it."""

    def __init__(self, targets: Sequence[Target], reason: str) -> None:
        """Name the parameters that need another way."""
        super().__init__(f"{', '.join(target.name for target in targets)}: {reason}")
        self.targets = list(targets)


class Call:
    """One call of the model, from its forward to its backward pass.

    Attributes:
        host: the clipper.
        rows: of the call's inputs.
        packed: how rows are laid end to end.
        anchor: a scalar that requires a gradient and gets none.
        place: where uses go while one row runs alone; None: to the host.
        row: the number of that row.
        poisoned_B: packed rows whose outputs become NaN, for a check; None: none.
        inside: the modules that run row by row now.
        tokens: the numbers of tokens that the inputs of the call have.
        settles: whether the taps are being compared with the model.
        autocast: the dtype of products under autocast, once one was computed; None: not yet, or without autocast.
        widened: tables whose index was the same for all rows, so that their output got the rows of the call.
    """

    __slots__ = (
        "_recent",
        "anchor",
        "autocast",
        "host",
        "inside",
        "packed",
        "place",
        "poisoned_B",
        "row",
        "rows",
        "settles",
        "tokens",
        "widened",
    )

    def __init__(self, host: Host, rows: int, packed: PackedRows) -> None:
        """Begin a call."""
        self.host, self.rows, self.packed = host, rows, packed
        self.anchor = torch.zeros((), requires_grad=True)
        self.place: Place | None = None
        self.row = 0
        self.poisoned_B: Tensor | None = None
        self.inside: list[Any] = []
        self.widened: list[Target] = []
        self.tokens: frozenset[int] = frozenset()
        self.settles = False
        self.autocast: torch.dtype | None = None
        self._recent: list[tuple[Tensor, int, bool, Tensor]] = []

    @property
    def rows_together(self) -> int:
        """Rows that a module gets now."""
        return self.rows if self.place is None else 1

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an input in the dtype of autocast; layers that read one tensor get one tensor.

        Their inputs then share a Gram matrix, and one copy is kept.
        """
        with_grad = torch.is_grad_enabled()
        for known, version, had_grad, made in self._recent:
            if known is x and version == x._version and made.dtype == dtype and had_grad == with_grad:
                return made
        made = x.to(dtype)
        self._recent = [*self._recent[1 - _KEPT :], (x, x._version, with_grad, made)]
        return made

    def by_rows(self, x: Tensor) -> Tensor:
        """View a tensor of a module as (B, T, ...): rows and tokens that it flattens, packed rows, one row alone."""
        if self.place is not None:
            return x
        if self.packed.lengths:
            return self.packed.cut(x)
        if x.ndim == 2 and x.shape[0] != self.rows and x.shape[0] % self.rows == 0:
            return x.unflatten(0, (self.rows, -1))
        return x

    def forget(self) -> None:
        """Release tensors that are kept for other layers."""
        self._recent = []


class Hand:
    """Gives what one call of a module found to the clipper.

    Attributes:
        call: the call of the model.
        site: the parameters of the module.
        place: see `Call.place`.
        row: see `Call.row`.
        weight: a parameter that ZeRO-3 gathers and frees. A detached alias would keep the gathered weight until the
            backward pass, and as an input of the function it would be an edge to DeepSpeed's gradient hooks.
    """

    __slots__ = ("call", "place", "row", "site", "weight")

    def __init__(self, call: Call, site: Any, weight: Any = None) -> None:
        """Keep the state of the call."""
        if torch._C._are_functorch_transforms_active():
            raise NoRuleError(
                "The model calls a module with trained parameters within a transform of torch.func (vmap, grad, jvp), "
                "where gradients of rows cannot be seen. Call the module outside the transform, or freeze its "
                "parameters."
            )
        self.call, self.site, self.place, self.row = call, site, call.place, call.row
        self.weight = weight if hasattr(weight, "ds_id") else None

    def give(self, target: Target, use: Use) -> None:
        """Give one use of a parameter."""
        if self.place is None:
            self.call.host.record(target, use)
        else:
            self.place.add(target, self.row, use)

    def require_rows(self, targets: Sequence[Target], x: Tensor) -> None:
        """Make sure that a tensor of the module shows its rows.

        In the backward pass, because a module may be called for something without a gradient (the norms of DoRA).

        Raises:
            NoTapError: it does not.
        """
        rows, size = self.call.rows, x.shape[0]
        if self.place is None and not self.call.packed.lengths and size != rows and (x.ndim > 2 or size % rows):
            raise NoTapError(targets, f"an input of shape {tuple(x.shape)} does not have {rows} rows first")

    def follows(self, targets: Sequence[Target], x: Tensor, before: bool) -> bool:
        """Return whether all rows of a tensor that flattens rows and tokens have the tokens of the call.

        A module may get the tokens that are not masked. Where none was masked in the first call, rows could not be told
        in a later one.

        Args:
            targets: the parameters of the module.
            x: an input of the module.
            before: whether it was so when the taps were compared with the model.

        Raises:
            NoTapError: it was so, and it is not now.
        """
        call = self.call
        if self.place is not None or call.packed.lengths or x.ndim != 2 or x.shape[0] == call.rows:
            return before
        now = x.shape[0] // call.rows in call.tokens
        if before and not now and not call.settles:
            raise NoTapError(targets, f"an input of shape {tuple(x.shape)} has other tokens than the {call.rows} rows")
        return now if call.settles else before

    def view(self, x: Tensor) -> Tensor:
        """View a tensor of the module with its rows first."""
        if self.place is not None:  # everything belongs to one row
            return x if x.ndim > 1 and x.shape[0] == 1 else x[None]
        return self.call.by_rows(x)


def leaf_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a linear layer computes with an input of this dtype."""
    if dtype in _AUTOCAST and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def as_tokens(x: Tensor) -> Tensor:
    """View (B, D) or (B, ..., D) as (B, T, D)."""
    if x.ndim == 3:
        return x
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


# ---------------------------------------------------------------------------------------------- autograd functions


class Sink(torch.autograd.Function):
    """Gives leaves of these (shape, dtype, device) without memory, and hands over their gradients, once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, receive: Callable[[Sequence[Tensor | None]], None], like: Any) -> Any:
        """Make the leaves."""
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple([torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in like])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Hand the gradients over."""
        ctx.receive(grads)
        return None, None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    """Return x W^T + b, or x W + b for a transposed weight (D, P)."""
    y: Tensor = LINEAR(x, weight.mT if is_transposed else weight, bias)
    if torch.compiler.is_compiling() or not y._is_view():
        return y
    return torch.ops.aten._unsafe_view(y, y.shape)  # the model may write to it in place


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise NoRuleError(
            f"The model changed the input of a trained module in place after the module had read it ({error}). "
            "Replace the operation by one that returns a new tensor (x = x + y), or freeze the module."
        ) from error


class _OuterTap(torch.autograd.Function):
    """y = x W^T + b in an eager module; input and output gradient are handed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, hand: Hand) -> Tensor:
        ctx.hand = hand
        ctx.save_for_backward(*(x,) if hand.weight is not None else (x, weight))
        return product(x, weight, bias, hand.site.is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hand, grad_x = ctx.hand, None
        x, *weights = _saved(ctx)
        if ctx.needs_input_grad[0]:
            weight = weights[0] if weights else hand.weight.detach().to(x.dtype)
            grad_x = grad @ (weight.mT if hand.site.is_transposed else weight)
        hand.site.receive(hand, x, grad)
        return grad_x, None, None, None, None


class LeafError(RuntimeError):
    """A compiled block calls a module with an input, or as often, as its leaves were not made for."""


class _OuterLeaves(torch.autograd.Function):
    """The same in a compiled block: input and output gradient are the gradients of two leaves."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, leaf_x: Tensor, leaf_y: Tensor, is_transposed: bool
    ) -> Tensor:
        if leaf_y.shape[:-1] != x.shape[:-1] or leaf_x.shape != x.shape:  # autograd would sum silently
            raise LeafError("a module met an input of another shape than its leaf")
        if leaf_x.dtype != x.dtype:  # and cast silently
            raise LeafError("a module met an input of another dtype than its leaf")
        ctx.is_transposed = is_transposed
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias, is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ (weight.mT if ctx.is_transposed else weight) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, x.detach(), grad, None


class _TableTap(torch.autograd.Function):
    """A lookup in a table; index and output gradient are handed over."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor, anchor: Tensor, hand: Hand) -> Tensor:
        ctx.hand = hand
        ctx.save_for_backward(index)
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = _saved(ctx)
        ctx.hand.site.receive(ctx.hand, index, grad)
        return None, None, None, None


class _SpreadTap(torch.autograd.Function):
    """One copy of a parameter for each row, without memory; the copies' gradients are handed over."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, anchor: Tensor, shape: Any, hand: Hand) -> Tensor:
        ctx.hand = hand
        ctx.set_materialize_grads(False)
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None:  # of a function without a derivative for the parameter, which then counts as untrained
            ctx.hand.site.receive(ctx.hand, grad)
        return None, None, None, None


class _SpreadLeaf(torch.autograd.Function):
    """The same in a compiled block: the copies' gradients are those of a leaf."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, leaf: Tensor) -> Tensor:
        return weight.expand(leaf.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class _OutputTap(torch.autograd.Function):
    """The identity on an output; its gradient and saved tensors are handed over."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, receive: Any, hand: Hand, *saved: Tensor) -> Tensor:
        ctx.receive, ctx.hand = receive, hand
        ctx.save_for_backward(*saved)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = list(_saved(ctx))
        ctx.hand.call.host.arrived(grad, *saved)
        ctx.receive(ctx.hand, grad, saved)
        return grad, None, None, None, *(None for _ in saved)


def _apply(function: Any) -> Any:
    """`Function.apply` without its search for transforms of torch.func, which takes as long as the rest of a tap."""
    return super(torch.autograd.Function, function).apply


_outer, _table, _spread, _output = map(_apply, (_OuterTap, _TableTap, _SpreadTap, _OutputTap))


def tap_output(
    call: Call, output: Tensor, receive: Callable[[Hand, Tensor, list[Tensor]], None], *saved: Tensor
) -> Tensor:
    """Return an output such that its backward calls ``receive(hand, gradient, saved tensors)``.

    Args:
        call: of the model.
        output: of a module that detached its trained parameters.
        receive: called once per backward pass through this use.
        saved: kept for that call, and freed and recomputed by activation checkpointing like any other tensor.
    """
    y: Tensor = _output(output, call.anchor, receive, Hand(call, None), *(t.detach() for t in saved))
    return y


# --------------------------------------------------------------------------------------------------- sites


class LinearSite:
    """A matrix product whose weight or bias is trained.

    Attributes:
        weight: None if it is frozen.
        bias: None if it is frozen, or there is none.
        is_transposed: whether the weight is (inputs, outputs), as in ``Conv1D`` of transformers.
        frozen: the ids of the module's parameters that are frozen. One that is unfrozen later stays out of autograd.
        follows: whether it gets all tokens of the call, with the rows first, in one dimension.
    """

    __slots__ = ("bias", "follows", "frozen", "is_transposed", "uses", "weight")

    def __init__(
        self,
        weight: Target | None,
        bias: Target | None,
        is_transposed: bool = False,
        frozen: Collection[int] = (),
    ) -> None:
        """Remember what is trained."""
        self.weight, self.bias, self.is_transposed, self.frozen = weight, bias, is_transposed, frozen
        self.uses, self.follows = 0, False

    @property
    def targets(self) -> list[Target]:
        """The trained parameters."""
        return [target for target in (self.weight, self.bias) if target is not None]

    def serves(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether these are the parameters, and no others in their places."""
        return (is_own(self.weight, weight) or id(weight) in self.frozen) and (
            is_own(self.bias, bias) or id(bias) in self.frozen
        )

    def receive(self, hand: Hand, x: Tensor, grad: Tensor) -> None:
        """Take the input and the output gradient of one call."""
        hand.call.host.arrived(grad, x)
        hand.require_rows(self.targets, x)
        self.follows = hand.follows(self.targets, x, self.follows)
        grad = hand.view(grad)
        if self.bias is not None:
            hand.give(self.bias, RowGradients(kernels.sum_tokens(grad)))
        if self.weight is not None:
            x_BTD, grad_BTP = as_tokens(hand.view(x)), as_tokens(grad)
            left, right = (x_BTD, grad_BTP) if self.is_transposed else (grad_BTP, x_BTD)
            hand.give(self.weight, Outer(left, right, "left" if self.is_transposed else "right"))

    def run(self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product in one call of the model."""
        if call.host.in_forward:
            self.uses += 1
        given = weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            if x.dtype in _AUTOCAST:
                x, call.autocast = x if x.dtype == dtype else call.cast(x, dtype), dtype
                weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if not torch.is_grad_enabled():
            return product(x, weight, bias, self.is_transposed)
        hand = Hand(call, self, given)
        y: Tensor = _outer(x, weight.detach(), None if bias is None else bias.detach(), call.anchor, hand)
        return y if call.poisoned_B is None else call.packed.fill(y, call.poisoned_B, math.nan)


class TableSite:
    """A table in which rows look up entries.

    Attributes:
        weight: the table.
        padding_idx: an entry that is not trained.
    """

    __slots__ = ("padding_idx", "uses", "weight")

    def __init__(self, weight: Target, padding_idx: int | None) -> None:
        """Remember the table."""
        self.weight, self.padding_idx = weight, padding_idx
        self.uses = 0

    @property
    def targets(self) -> list[Target]:
        """The trained parameter."""
        return [self.weight]

    def receive(self, hand: Hand, index: Tensor, grad: Tensor) -> None:
        """Take the index and the output gradient of one call."""
        hand.call.host.arrived(grad)
        if self.padding_idx is not None:
            grad = grad.masked_fill((index == self.padding_idx)[..., None], 0)
        index_BTk, grad_BTD = as_tokens(hand.view(index[..., None])), as_tokens(hand.view(grad))
        hand.give(self.weight, Lookup(index_BTk[..., 0], grad_BTD, self.weight.shape[0]))

    def run(self, call: Call, index: Tensor, weight: Tensor) -> Tensor:
        """Look up in one call of the model. An index that all rows share, (T,) or (1, T), gets the rows of the call."""
        if call.host.in_forward:
            self.uses += 1
        with_grad, rows = torch.is_grad_enabled(), call.rows_together
        if index.ndim == 1:
            index = index[None]
        # Without gradients too: a reentrant checkpoint compares the shapes of both of its passes.
        if not call.packed.lengths and rows > 1 and index.ndim and index.shape[0] == 1:
            index = index.expand(rows, *index.shape[1:])
            call.widened.append(self.weight)
        if not with_grad:
            return F.embedding(index, weight)
        if not call.packed.lengths and (index.ndim == 0 or index.shape[0] != rows):
            raise NoTapError(self.targets, f"an index of shape {tuple(index.shape)} does not have {rows} rows first")
        y: Tensor = _table(index, weight.detach(), call.anchor, Hand(call, self))
        return y if call.poisoned_B is None else call.packed.fill(y, call.poisoned_B, math.nan)


class SpreadSite:
    """A parameter that is read as one copy for each row, or for each token: it enters by broadcasting, as in norms."""

    __slots__ = ("uses", "weight")

    def __init__(self, weight: Target) -> None:
        """Remember the parameter."""
        self.weight = weight
        self.uses = 0

    @property
    def targets(self) -> list[Target]:
        """The trained parameter."""
        return [self.weight]

    def receive(self, hand: Hand, grad: Tensor) -> None:
        """Take the gradient of all copies: one for each row, or one for each token."""
        hand.call.host.arrived(grad)
        shape = self.weight.shape
        grad = hand.view(grad)
        rows = grad.shape[0]
        if hand.place is None and not hand.call.packed.lengths and rows != hand.call.rows:
            raise NoTapError(
                self.targets, f"a use of shape {tuple(grad.shape)} does not have {hand.call.rows} rows first"
            )
        if grad.numel() != rows * shape.numel():
            grad = kernels.widen(grad).reshape(rows, -1, *shape).sum(1)
        hand.give(self.weight, RowGradients(kernels.widen(grad.reshape(rows, *shape))))

    def read(self, call: Call, weight: Tensor, x_shape: torch.Size) -> Tensor:
        """Return copies that broadcast against a module's input of this shape."""
        if call.host.in_forward:
            self.uses += 1
        if not torch.is_grad_enabled():  # a reentrant checkpoint, whose uses are counted here
            return weight
        return self.copies(call, weight, self.shape_of_copies(call, weight, x_shape))

    def shape_of_copies(self, call: Call, weight: Tensor, x_shape: Sequence[int]) -> torch.Size:
        """Return the shape of copies that broadcast against a module's input of this shape."""
        ndim = weight.ndim
        if call.packed.lengths or x_shape[0] != call.rows_together:
            return torch.Size((*x_shape[: len(x_shape) - ndim], *weight.shape))
        return torch.Size((call.rows_together, *(1,) * (len(x_shape) - 1 - ndim), *weight.shape))

    def copies(self, call: Call, weight: Tensor, shape: torch.Size) -> Tensor:
        """Return copies of the parameter in the leading dimensions of ``shape``."""
        y: Tensor = _spread(weight.detach(), call.anchor, shape, Hand(call, self))
        return y


Site = LinearSite | TableSite | SpreadSite


# --------------------------------------------------------------------------------------------------- classes


def active(module: Any) -> Call | None:
    """Return the call of the model in which a tapped module runs; None where it computes as usual.

    Without a clipper it does: somebody may keep a tapped module's forward for longer than its clipper.
    """
    host = vars(module).get("_tap_host")
    return None if host is None else call_of(host, module._tap_path)


def call_of(host: Host, path: str) -> Call | None:
    """Return the call of the model in which the module at a path runs; None where it computes as usual.

    Raises:
        GhostError: it is called outside the model, with gradients on.
    """
    if host.call is not None and (host.in_forward or host.in_backward):
        return host.call
    if torch.is_grad_enabled():
        host.refuse_bypass(path)
    return None


PLAIN: tuple[()] = ()
"""The port of a module in a compiled block that runs without gradients; None is the port of an eager one.

With gradients, the port of a linear layer is a list [leaf of the input, leaf of the output, weight, bias], and that of
a norm layer holds (leaf, parameter) by the parameter's name. The parameters are detached before the graph, so it has no
edge to them: a compiled graph would send None along it, which sets off hooks of others.
"""


class TapLinear(nn.Linear):
    """``nn.Linear``, tapped."""

    _tap_site: LinearSite

    def forward(self, input: Tensor) -> Tensor:
        """Do the same as ``nn.Linear``."""
        port, parameters = self.__dict__.get("_tap_port"), self._parameters
        # By `nn.Module.__getattr__` only where another tensor is in the place of a parameter: it is slow.
        weight: Any = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias: Any = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        if port is not None:
            return _through_leaves(port, input, weight, bias, False)
        call = active(self)
        if call is None or not self._tap_site.serves(weight, bias):
            return LINEAR(input, weight, bias)
        return self._tap_site.run(call, input, weight, bias)


def _through_leaves(port: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    if type(port) is tuple:
        return LINEAR(x, weight.mT if is_transposed else weight, bias)
    if not port:
        raise LeafError("a module is called twice, or was not called when the leaves were planned")
    bias, weight, leaf_y, leaf_x = port.pop(), port.pop(), port.pop(), port.pop()
    if torch.is_autocast_enabled(x.device.type) and x.dtype in _AUTOCAST:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y: Tensor = _OuterLeaves.apply(x, weight, bias, leaf_x, leaf_y, is_transposed)
    return y


def conv1d_forward(self: Any, x: Tensor) -> Tensor:
    """Do the same as ``Conv1D`` of transformers, tapped."""
    port = self.__dict__.get("_tap_port")
    if port is not None:
        return _through_leaves(port, x, self.weight, self.bias, True)
    call = active(self)
    if call is None or not self._tap_site.serves(self.weight, self.bias):
        return LINEAR(x, self.weight.mT, self.bias)
    y: Tensor = self._tap_site.run(call, x, self.weight, self.bias)
    return y


class TapEmbedding(nn.Embedding):
    """``nn.Embedding``, tapped; a subclass that calls this forward, such as a scaled table, is tapped within."""

    _tap_site: TableSite

    def forward(self, input: Tensor) -> Tensor:
        """Do the same as ``nn.Embedding``."""
        call = active(self)
        if call is None or not is_own(self._tap_site.weight, self.weight):
            return F.embedding(input, self.weight, self.padding_idx)
        return self._tap_site.run(call, input, self.weight)


def _read(module: Any, name: str) -> Any:
    """Return a parameter of a norm layer: one copy for each row while its forward runs in a call of the model."""
    weight = module._parameters[name]
    port = module.__dict__.get("_tap_port")
    if port is not None:
        if type(port) is tuple:
            return weight
        leaf, weight = port[name]
        return _SpreadLeaf.apply(weight, leaf)
    x_shape = module.__dict__.get("_tap_shape")
    if x_shape is None or weight is None:
        return weight  # not from its forward: FSDP2 reads module.weight when it starts
    call, site = active(module), module._tap_sites[name]
    return weight if call is None or not is_own(site.weight, weight) else site.read(call, weight, x_shape)


def spread_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass of a norm layer of any name whose named parameters are read as one copy for each row."""
    fused = {nn.LayerNorm.forward: F.layer_norm, nn.RMSNorm.forward: F.rms_norm}.get(kind.forward)

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        port = self.__dict__.get("_tap_port")
        if port is not None:
            if type(port) is tuple:
                return kind.forward(self, x, *args, **kwargs)
            for leaf, _ in port.values():
                if leaf.shape[0] != x.shape[0] or leaf.ndim != x.ndim:
                    raise LeafError("a norm layer met an input of another shape than its leaf")
            if not port:
                raise LeafError("a norm layer was not called when the leaves were planned")
            return compute(self, x, *args, **kwargs)
        call = active(self)
        if call is None or not (torch.is_grad_enabled() or call.host.in_forward):
            return kind.forward(self, x, *args, **kwargs)
        self.__dict__["_tap_shape"] = x.shape
        try:
            return compute(self, x, *args, **kwargs)
        finally:
            del self.__dict__["_tap_shape"]

    def compute(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if fused is None:
            return kind.forward(self, x, *args, **kwargs)
        y = fused(x, self.normalized_shape, eps=self.eps)  # type: ignore[operator]  # it wants a weight of its shape
        if self._parameters["weight"] is not None:
            y = y * self.weight
        return y if self._parameters.get("bias") is None else y + self.bias

    def accessor(name: str) -> Any:
        return property(lambda self: _read(self, name), lambda self, value: self._parameters.__setitem__(name, value))

    return subclass(
        kind, "spread", _tap_names=names, forward=forward, **dict[str, Any]({name: accessor(name) for name in names})
    )


_CLASSES: dict[tuple[Any, ...], type[nn.Module]] = {}


def subclass(kind: type[nn.Module], way: str, base: type[nn.Module] | None = None, **members: Any) -> type[nn.Module]:
    """Return the subclass of a module's class, the same one for all its modules, so that blocks share a compiled graph.

    It keeps the name: libraries go by it (``_no_split_modules``, wrap policies). A copy, or a pickle, of a module is of
    the class before. ``super().forward`` in the class reaches the forward of ``base``.

    Args:
        kind: the class.
        way: a word for what the subclass does; with the tuples among ``members`` it tells subclasses of a class apart.
        base: a tapped class of PyTorch from which ``kind`` is derived.
        members: of the subclass.
    """
    key = (kind, way, base, *((name, member) for name, member in members.items() if isinstance(member, tuple)))
    if key not in _CLASSES:
        bases = (kind,) if base is None else (base,) if base.__mro__[1] is kind else (kind, base)
        # The compiler takes all that it reads from modules of PyTorch for constants, also the shapes of leaves.
        home = __name__ if kind.__module__.startswith("torch.") else kind.__module__
        named = {"__qualname__": kind.__qualname__, "__module__": home, "__doc__": kind.__doc__}
        _CLASSES[key] = type(kind.__name__, bases, {**named, "_tap_kind": kind, "__reduce_ex__": _reduced, **members})
    return _CLASSES[key]


def _reduced(module: Any, protocol: Any) -> Any:
    """Reduce a module to its class before, without what taps keep in it."""
    kind = module._tap_kind
    while hasattr(kind, "_tap_kind"):
        kind = kind._tap_kind
    state = {name: value for name, value in vars(module).items() if not name.startswith("_tap_")}
    if "_tap_forward" in vars(module):
        state["forward"] = vars(module)["_tap_forward"]
    return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]
