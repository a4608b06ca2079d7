"""Taps: modules that record what their rows' gradients consist of, in one backward pass and without hooks.

While a clipper is attached, a module with trained parameters has a subclass of its own class (`dpllm.ghost.attach`).
Its forward calls an autograd function with the weight *detached*: autograd computes no weight gradient, and the
function's backward passes its input and output gradient to the clipper. A gradient that reaches a trained parameter
therefore belongs to a use without a tap, and is an error.

* Eager modules pass their tensors on directly, for any shape and any number of calls. An *anchor* that requires grad
  makes the function part of the graph if its input is not.
* A compiled block may have no side effects. Its functions return the same tensors as the gradients of *leaves*, outputs
  of one `Sink` that is created just before the compiled forward (`dpllm.ghost.blocks`). Leaves take no memory.

Shape suffixes: B rows, T tokens, D inputs, P outputs.
"""

from __future__ import annotations

import copyreg
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.ghost import kernels
from dpllm.ghost.model_calls import PackedRows
from dpllm.ghost.refusals import NoRuleError
from dpllm.ghost.unit_gradients import Lookup, Outer, RowGradients, Use

LINEAR: Any = torch._C._nn.linear
"""DeepSpeed's ``zero.Init`` permanently replaces ``F.linear`` by a function that no mode intercepts."""

AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)
_KEPT = 2  # inputs in the autocast dtype: one that several layers read, and one read by a layer between them


class Target(NamedTuple):
    """A trained parameter and its name in the model."""

    name: str
    parameter: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """The full shape: ZeRO-3 leaves a parameter without entries between its uses."""
        return torch.Size(getattr(self.parameter, "ds_shape", self.parameter.shape))


def is_own(target: Target | None, tensor: Any) -> bool:
    """Return whether a tensor in a parameter's place is the parameter, or what FSDP2 gathered of it.

    A different tensor (``torch.func.functional_call``) stays in autograd: its gradient is not the parameter's.
    """
    if target is None or tensor is None:
        return tensor is None or not tensor.requires_grad
    return tensor is target.parameter or (isinstance(target.parameter, DTensor) and isinstance(tensor, nn.Parameter))


class Host(Protocol):
    """The interface of the clipper that taps use.

    Attributes:
        call: the model call that is running, or whose graph is in its backward pass; None: neither.
        in_forward: whether the model's forward pass is running.
        in_backward: whether a backward pass of the clipper is running, in which modules may be recomputed.
        uses: how often the model's calls used each parameter, by its name.
    """

    call: Call | None
    in_forward: bool
    in_backward: bool
    uses: Counter[str]

    def record(self, target: Target, use: Use) -> None:
        """Receive the contribution of one use of a parameter to the gradient of each row.

        Raises:
            GhostError: the backward pass is not the clipper's.
        """
        ...

    def refuse_bypass(self, path: str) -> None:
        """Raise `GhostError`: a module with trained parameters is called outside the model, with gradients enabled."""
        ...

    def flattens(self, targets: Sequence[Target], way: str = "tap") -> None:
        """Record that a module gets several tokens of each row in its first dimension.

        The row order is known there only if the taps were compared with the model in such a call.

        Args:
            targets: the module's parameters.
            way: how it is tapped.

        Raises:
            NoTapError: they were not compared, and the backward pass has begun.
        """
        ...


class NoTapError(RuntimeError):
    """A module whose tensors do not show their rows: it, or an enclosing module, must run row by row."""

    def __init__(self, targets: Sequence[Target], reason: str) -> None:
        """Name the parameters that need a different rung."""
        super().__init__(f"{', '.join(target.name for target in targets)}: {reason}")
        self.targets = list(targets)


@dataclass(slots=True, eq=False)
class Call:
    """One call of the model, from its forward to its backward pass.

    Attributes:
        host: the clipper.
        rows: the number of rows in the call's inputs.
        packed: how rows are laid end to end.
        tokens: the token counts of the call's inputs.
        settles: whether the taps are being compared with the model.
        anchor: a scalar that requires a gradient and gets none.
        place: collects uses, each with its row, while one row runs alone (`dpllm.ghost.attach`); None: the host
            does.
        row: the index of that row.
        poisoned_B: packed rows whose outputs become NaN, for a check; None: none.
        inside: the parameters of the modules that are running row by row.
        autocast: the dtype of products under autocast, once one was computed; None: not yet, or without autocast.
        widened: tables whose index was the same for all rows, so that their output was expanded to the call's rows.
    """

    host: Host
    rows: int
    packed: PackedRows
    tokens: frozenset[int] = frozenset()
    settles: bool = False
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    place: Callable[[Target, int, Use], None] | None = None
    row: int = 0
    poisoned_B: Tensor | None = None
    inside: list[list[Target]] = field(default_factory=list)
    autocast: torch.dtype | None = None
    widened: list[Target] = field(default_factory=list)
    _recent: list[tuple[Tensor, int, bool, Tensor]] = field(default_factory=list)

    @property
    def rows_together(self) -> int:
        """The number of rows that a module receives at once."""
        return self.rows if self.place is None else 1

    def count(self, *targets: Target | None) -> None:
        """Count a use of parameters in the forward pass, but not in its recomputation."""
        if self.host.in_forward:
            for target in targets:
                if target is not None:
                    self.host.uses[target.name] += 1

    def note(self, shape: Sequence[int], *targets: Target | None) -> None:
        """Record an input of a module that has several tokens of each row in its first dimension."""
        is_alone = self.place is not None or self.packed.lengths or self.rows == 1
        if not is_alone and shape[0] != self.rows and shape[0] % self.rows == 0 and self.host.in_forward:
            self.host.flattens([target for target in targets if target is not None])

    def poison(self, y: Tensor) -> Tensor:
        """Fill the packed rows that a check must not find in any other row."""
        return y if self.poisoned_B is None else self.packed.fill(y, self.poisoned_B, math.nan)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an input in the autocast dtype; layers that read the same tensor get the same cast tensor.

        Their inputs then share a Gram matrix, and only one copy is kept.
        """
        with_grad = torch.is_grad_enabled()
        for known, version, had_grad, made in self._recent:
            if known is x and version == x._version and made.dtype == dtype and had_grad == with_grad:
                return made
        made = x.to(dtype)
        self._recent = [*self._recent[1 - _KEPT :], (x, x._version, with_grad, made)]
        return made

    def by_rows(self, x: Tensor) -> Tensor:
        """View a module's tensor as (B, T, ...): from flattened rows and tokens, packed rows, or a single row."""
        if self.place is not None:
            return x
        if self.packed.lengths:
            return self.packed.cut(x)
        if x.ndim == 2 and x.shape[0] != self.rows and x.shape[0] % self.rows == 0:
            return x.unflatten(0, (self.rows, -1))
        return x

    def forget(self) -> None:
        """Release the tensors that are cached for other layers."""
        self._recent = []


class Hand:
    """Passes the results of one use of a module's parameters to the clipper.

    Attributes:
        call: the call of the model.
        receive: called with this object, the output gradient and the saved tensors.
        place: see `Call.place`.
        row: see `Call.row`.
        flattens: whether a tensor of the module has several tokens of each row in its first dimension.
        weight: a parameter that ZeRO-3 gathers and frees. A detached alias would keep the gathered weight until the
            backward pass, and as an input of the function it would be an edge to DeepSpeed's gradient hooks.
    """

    __slots__ = ("call", "flattens", "place", "receive", "row", "weight")

    def __init__(self, call: Call, receive: Callable[..., None], weight: Any = None) -> None:
        """Store the state of the call."""
        if torch._C._are_functorch_transforms_active():
            raise NoRuleError(
                "The model calls a module with trained parameters inside a torch.func transform (vmap, grad, jvp), "
                "which hides the rows' gradients. Call the module outside the transform, or freeze its parameters."
            )
        self.call, self.receive, self.place, self.row = call, receive, call.place, call.row
        self.flattens = False
        self.weight = weight if hasattr(weight, "ds_id") else None

    def give(self, target: Target, use: Use) -> None:
        """Pass on one use of a parameter."""
        if self.place is None:
            if self.flattens:
                self.call.host.flattens([target])
            self.call.host.record(target, use)
        else:
            self.place(target, self.row, use)

    @property
    def has_rows(self) -> bool:
        """Whether the module's tensors have the rows of the call, which are not packed."""
        return self.place is None and not self.call.packed.lengths

    def view(self, x: Tensor) -> Tensor:
        """View a tensor of the module with its rows first."""
        if self.place is not None:  # everything belongs to one row
            return x if x.ndim > 1 and x.shape[0] == 1 else x[None]
        call = self.call
        if x.shape[0] == call.rows and not call.packed.lengths:
            return x
        y = call.by_rows(x)
        self.flattens |= y is not x and call.rows > 1 and not call.packed.lengths
        return y


def leaf_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a linear layer computes with an input of this dtype."""
    if dtype in AUTOCAST and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def as_tokens(x: Tensor) -> Tensor:
    """View (B, D) or (B, ..., D) as (B, T, D)."""
    if x.is_neg():  # ``z.conj().imag`` is where ``z.imag`` is, of equal shape and stride, and not equal
        x = x.resolve_neg()
    if x.ndim == 3:
        return x
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


# ---------------------------------------------------------------------------------------------- autograd functions


class Sink(torch.autograd.Function):
    """Creates leaves like these tensors, and passes on their gradients, once."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hand: Hand, like: Sequence[Tensor]) -> Any:
        """Create the leaves: views of ``like``, which take no memory if it has none."""
        ctx.hand = hand
        ctx.set_materialize_grads(False)
        return tuple([x.detach() for x in like])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Pass on the gradients."""
        ctx.hand.receive(ctx.hand, grads)
        return None, None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
    """Return x W^T + b, or x W + b for a transposed weight (D, P)."""
    y: Tensor = LINEAR(x, weight.mT if is_transposed else weight, bias)
    if torch.compiler.is_compiling() or not y._is_view():
        return y
    return torch.ops.aten._unsafe_view(y, y.shape)  # the model may modify it in place


def saved_by(ctx: Any) -> tuple[Tensor, ...]:
    """Return a tap's saved tensors.

    Raises:
        NoRuleError: the model modified one of them.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise NoRuleError(
            f"The model modified a trained module's input in place after the module had read it ({error}). Replace the "
            "operation with one that returns a new tensor (x = x + y), or freeze the module."
        ) from error


class _OuterTap(torch.autograd.Function):
    """y = x W^T + b in an eager module, which records input and output gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, anchor: Tensor, hand: Hand, is_transposed: bool
    ) -> Tensor:
        ctx.hand, ctx.is_transposed = hand, is_transposed
        ctx.save_for_backward(*(x,) if hand.weight is not None else (x, weight))
        return product(x, weight, bias, is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hand, grad_x = ctx.hand, None
        x, *weights = saved_by(ctx)
        if ctx.needs_input_grad[0]:
            weight = weights[0] if weights else hand.weight.detach().to(x.dtype)
            grad_x = grad @ (weight.mT if ctx.is_transposed else weight)
        hand.receive(hand, grad, x)
        return grad_x, None, None, None, None, None


class _Tap(torch.autograd.Function):
    """Returns the result of ``compute``, and records its gradient with the saved tensors.

    ``x`` is the output of a module that computes itself; None: only parameters have a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor | None, anchor: Tensor, compute: Any, hand: Hand, *saved: Tensor) -> Tensor:
        ctx.hand = hand
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        y: Tensor = compute()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        saved = saved_by(ctx)
        if grad is not None:  # otherwise the function has no derivative for the parameter, which counts as untrained
            ctx.hand.receive(ctx.hand, grad, *saved)
        return grad if ctx.needs_input_grad[0] else None, None, None, None, *(None for _ in saved)


def apply_of(function: Any) -> Any:
    """Return `Function.apply` without its search for torch.func transforms, which is as slow as the rest of a tap."""
    return super(torch.autograd.Function, function).apply


_outer, _tap, sink = apply_of(_OuterTap), apply_of(_Tap), apply_of(Sink)


def tap_output(
    call: Call, output: Tensor, receive: Callable[[Hand, Tensor, list[Tensor]], None], *saved: Tensor
) -> Tensor:
    """Return an output whose backward calls ``receive(hand, gradient, saved tensors)``.

    Args:
        call: the call of the model.
        output: of a module that detached its trained parameters.
        receive: called once per backward pass through this use.
        saved: kept for that call, and freed and recomputed by activation checkpointing like any other tensor.
    """
    hand = Hand(call, lambda hand, grad, *saved: receive(hand, grad, list(saved)))
    compute = functools.partial(output.view_as, output)
    y: Tensor = _tap(output, call.anchor, compute, hand, *(t.detach() for t in saved))
    return y


class LeafError(RuntimeError):
    """A compiled block calls a module with an input, or a number of times, that its leaves were not made for."""


class _OuterLeaves(torch.autograd.Function):
    """y = x W^T + b in a compiled block: input and output gradient are the gradients of two leaves."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, leaf_x: Tensor, leaf_y: Tensor, is_transposed: bool
    ) -> Tensor:
        if leaf_y.shape[:-1] != x.shape[:-1] or leaf_x.shape != x.shape:  # autograd would sum silently
            raise LeafError("a module's input has a different shape than its leaf")
        if leaf_x.dtype != x.dtype:  # and cast silently
            raise LeafError("a module's input has a different dtype than its leaf")
        ctx.is_transposed = is_transposed
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias, is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ (weight.mT if ctx.is_transposed else weight) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, x.detach(), grad, None


class _SpreadLeaf(torch.autograd.Function):
    """One copy of a parameter per row in a compiled block: the copies' gradients are those of a leaf."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, leaf: Tensor) -> Tensor:
        return weight.expand(leaf.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


# --------------------------------------------------------------------------------------------------- sites


@dataclass(slots=True, eq=False)
class LinearSite:
    """A matrix product whose weight or bias is trained.

    Attributes:
        weight: None if it is frozen.
        bias: None if it is frozen, or there is none.
        is_transposed: whether the weight is (inputs, outputs), as in ``Conv1D`` of transformers.
        frozen: the ids of the module's frozen parameters. One that is unfrozen later stays out of autograd.
        follows: whether it gets all tokens of the call, with the rows first, in one dimension.
    """

    weight: Target | None
    bias: Target | None
    is_transposed: bool = False
    frozen: Collection[int] = ()
    follows: bool = False

    @property
    def targets(self) -> list[Target]:
        """The trained parameters."""
        return [target for target in (self.weight, self.bias) if target is not None]

    def serves(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether these tensors are the site's own parameters."""
        return (is_own(self.weight, weight) or id(weight) in self.frozen) and (
            is_own(self.bias, bias) or id(bias) in self.frozen
        )

    def receive(self, hand: Hand, grad: Tensor, x: Tensor) -> None:
        """Record the output gradient and the input of one call."""
        if hand.has_rows and x.shape[0] != hand.call.rows:
            self._check(hand.call, x)
        grad = hand.view(grad)
        if self.bias is not None:
            hand.give(self.bias, RowGradients(kernels.sum_tokens(grad)))
        if self.weight is not None:
            x_BTD, grad_BTP = as_tokens(hand.view(x)), as_tokens(grad)
            left, right = (x_BTD, grad_BTP) if self.is_transposed else (grad_BTP, x_BTD)
            hand.give(self.weight, Outer(left, right, "left" if self.is_transposed else "right"))

    def _check(self, call: Call, x: Tensor) -> None:
        """Check that an input without rows first has rows and tokens in one dimension.

        Runs in the backward pass, because a module may be called for a result without a gradient (the norms of DoRA).
        A module may also get only the unmasked tokens; if none was masked in the first call, rows could not be
        distinguished in a later one.

        Raises:
            NoTapError: it does not, or it had all tokens when the taps were compared, but now has different ones.
        """
        if x.ndim > 2 or x.shape[0] % call.rows:
            raise NoTapError(self.targets, f"an input of shape {tuple(x.shape)} does not begin with {call.rows} rows")
        if x.ndim == 2:
            has_all = x.shape[0] // call.rows in call.tokens
            if call.settles:
                self.follows = has_all
            elif self.follows and not has_all:
                raise NoTapError(
                    self.targets, f"an input of shape {tuple(x.shape)} has different tokens than the {call.rows} rows"
                )

    def run(self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product during a call of the model."""
        call.count(self.weight, self.bias)
        if x.ndim and x.shape[0] != call.rows:
            call.note(x.shape, self.weight, self.bias)
        given = weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            if x.dtype in AUTOCAST:
                x, call.autocast = x if x.dtype == dtype else call.cast(x, dtype), dtype
                weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if not torch.is_grad_enabled():
            return product(x, weight, bias, self.is_transposed)
        bias, hand = None if bias is None else bias.detach(), Hand(call, self.receive, given)
        return call.poison(_outer(x, weight.detach(), bias, call.anchor, hand, self.is_transposed))


@dataclass(slots=True, eq=False)
class TableSite:
    """A table in which rows look up entries.

    Attributes:
        weight: the table.
        padding_idx: an entry that is not trained.
    """

    weight: Target
    padding_idx: int | None

    @property
    def targets(self) -> list[Target]:
        """The trained parameter."""
        return [self.weight]

    def receive(self, hand: Hand, grad: Tensor, index: Tensor) -> None:
        """Record the output gradient and the index of one call."""
        if self.padding_idx is not None:
            grad = grad.masked_fill((index == self.padding_idx)[..., None], 0)
        index_BTk, grad_BTD = as_tokens(hand.view(index[..., None])), as_tokens(hand.view(grad))
        hand.give(self.weight, Lookup(index_BTk[..., 0], grad_BTD, self.weight.shape[0]))

    def run(self, call: Call, index: Tensor, weight: Tensor) -> Tensor:
        """Look up during a model call. An index shared by all rows, (T,) or (1, T), is expanded to the call's rows."""
        call.count(self.weight)
        rows = call.rows_together
        if index.ndim == 1:
            index = index[None]
        # Without gradients too: a reentrant checkpoint compares the shapes of both its passes.
        if not call.packed.lengths and rows > 1 and index.ndim and index.shape[0] == 1:
            index = index.expand(rows, *index.shape[1:])
            call.widened.append(self.weight)
        if not torch.is_grad_enabled():
            return F.embedding(index, weight)
        if not call.packed.lengths and (index.ndim == 0 or index.shape[0] != rows):
            raise NoTapError(self.targets, f"an index of shape {tuple(index.shape)} does not begin with {rows} rows")
        look_up = functools.partial(F.embedding, index, weight.detach())
        return call.poison(_tap(None, call.anchor, look_up, Hand(call, self.receive), index))


@dataclass(slots=True, eq=False)
class SpreadSite:
    """A parameter that is read as one copy per row or token and enters by broadcasting, as in norm layers."""

    weight: Target

    @property
    def targets(self) -> list[Target]:
        """The trained parameter."""
        return [self.weight]

    def receive(self, hand: Hand, grad: Tensor) -> None:
        """Record the gradient of all copies, one per row or one per token."""
        shape, grad = self.weight.shape, hand.view(grad)
        rows = grad.shape[0]
        if hand.has_rows and rows != hand.call.rows:
            raise NoTapError(
                self.targets, f"a use of shape {tuple(grad.shape)} does not begin with {hand.call.rows} rows"
            )
        if grad.numel() != rows * shape.numel():
            grad = kernels.widen(grad).reshape(rows, -1, *shape).sum(1)
        hand.give(self.weight, RowGradients(kernels.widen(grad.reshape(rows, *shape))))

    def read(self, call: Call, weight: Tensor, x_shape: torch.Size) -> Tensor:
        """Return copies that broadcast against a module's input of this shape."""
        if x_shape[0] != call.rows:
            call.note(x_shape, self.weight)
        if torch.is_grad_enabled():
            return self.copies(call, weight, self.shape_of_copies(call, weight, x_shape))
        call.count(self.weight)  # a reentrant checkpoint
        return weight

    def shape_of_copies(self, call: Call, weight: Tensor, x_shape: Sequence[int]) -> torch.Size:
        """Return the shape of copies that broadcast against a module's input of this shape."""
        ndim = weight.ndim
        if call.packed.lengths or x_shape[0] != call.rows_together:
            return torch.Size((*x_shape[: len(x_shape) - ndim], *weight.shape))
        return torch.Size((call.rows_together, *(1,) * (len(x_shape) - 1 - ndim), *weight.shape))

    def copies(self, call: Call, weight: Tensor, shape: torch.Size) -> Tensor:
        """Return copies of the parameter in the leading dimensions of ``shape``, without memory."""
        call.count(self.weight)
        y: Tensor = _tap(None, call.anchor, functools.partial(weight.detach().expand, shape), Hand(call, self.receive))
        return y


Site = LinearSite | TableSite | SpreadSite


# --------------------------------------------------------------------------------------------------- classes


def is_hooked(module: nn.Module) -> bool:
    """Return whether calling a module does more than its class's forward."""
    held = module.__dict__
    return bool(
        held["_forward_pre_hooks"]
        or held["_forward_hooks"]
        or held["_backward_pre_hooks"]
        or held["_backward_hooks"]
        or "forward" in held
    )


def active(module: Any) -> Call | None:
    """Return the model call in which a tapped module runs; None if it computes as usual.

    Without a clipper it computes as usual: a tapped module's forward may outlive its clipper.
    """
    host = vars(module).get("_tap_host")
    return None if host is None else call_of(host, module._tap_path)


def call_of(host: Host, path: str) -> Call | None:
    """Return the model call in which the module at a path runs; None if it computes as usual.

    Raises:
        GhostError: it is called outside the model, with gradients enabled.
    """
    if host.call is not None and (host.in_forward or host.in_backward):
        return host.call
    if torch.is_grad_enabled():
        host.refuse_bypass(path)
    return None


PLAIN: tuple[()] = ()
"""The port of a module in a compiled block that runs without gradients; None is the port of an eager one.

With gradients, a linear layer's port is a list [leaf of the input, leaf of the output, weight, bias], and a norm
layer's port holds (leaf, parameter) by the parameter's name. The parameters are detached before the graph, so it has no
edge to them: a compiled graph would send None along it, which would trigger other hooks.
"""


class TapLinear(nn.Linear):
    """``nn.Linear``, tapped."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the same as ``nn.Linear``."""
        return _linear(self, input, False)


def conv1d_forward(self: Any, x: Tensor) -> Tensor:
    """Compute the same as transformers' ``Conv1D``, tapped."""
    return _linear(self, x, True)


def _linear(module: Any, x: Tensor, is_transposed: bool) -> Tensor:
    port, parameters = module.__dict__.get("_tap_port"), module._parameters
    if port is not None and port is not PLAIN:
        return _through_leaves(port, x, is_transposed)
    # `nn.Module.__getattr__` is slow, so it is used only if a different tensor replaces the parameter.
    weight: Any = parameters["weight"] if "weight" in parameters else module.weight  # noqa: SIM401
    bias: Any = parameters["bias"] if "bias" in parameters else module.bias  # noqa: SIM401
    call = active(module) if port is None else None
    if call is None or not module._tap_site.serves(weight, bias):
        return LINEAR(x, weight.mT if is_transposed else weight, bias)
    y: Tensor = module._tap_site.run(call, x, weight, bias)
    return y


def _through_leaves(port: Any, x: Tensor, is_transposed: bool) -> Tensor:
    if not port:
        raise LeafError("a module is called twice, or was not called when the leaves were planned")
    bias, weight, leaf_y, leaf_x = port.pop(), port.pop(), port.pop(), port.pop()
    if torch.is_autocast_enabled(x.device.type) and x.dtype in AUTOCAST:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y: Tensor = _OuterLeaves.apply(x, weight, bias, leaf_x, leaf_y, is_transposed)
    return y


class TapEmbedding(nn.Embedding):
    """``nn.Embedding``, tapped; a subclass that calls this forward, such as a scaled table, is tapped inside."""

    _tap_site: TableSite

    def forward(self, input: Tensor) -> Tensor:
        """Compute the same as ``nn.Embedding``."""
        call = active(self)
        if call is None or not is_own(self._tap_site.weight, self.weight):
            return F.embedding(input, self.weight, self.padding_idx)
        return self._tap_site.run(call, input, self.weight)


def _read(module: Any, name: str) -> Any:
    """Return a norm layer's parameter; during its forward in a model call, one copy per row."""
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
    """Return the subclass of a norm layer of any class whose named parameters are read as one copy per row."""
    fused = {nn.LayerNorm.forward: F.layer_norm, nn.RMSNorm.forward: F.rms_norm}.get(kind.forward)

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        port = self.__dict__.get("_tap_port")
        if port is not None:
            if type(port) is tuple:
                return kind.forward(self, x, *args, **kwargs)
            for leaf, _ in port.values():
                if leaf.shape[0] != x.shape[0] or leaf.ndim != x.ndim:
                    raise LeafError("a norm layer's input has a different shape than its leaf")
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
    """Return the subclass of a module's class, the same for all its modules, so that blocks share a compiled graph.

    It keeps the class name, which libraries use (``_no_split_modules``, wrap policies). A copy, or a pickle, of a
    module has the original class. ``super().forward`` in the class reaches the forward of ``base``.

    Args:
        kind: the class.
        way: a word for what the subclass does; with the tuples among ``members`` it distinguishes a class's subclasses.
        base: a tapped class of PyTorch from which ``kind`` is derived.
        members: the members of the subclass.
    """
    key = (kind, way, base, *((name, member) for name, member in members.items() if isinstance(member, tuple)))
    if key not in _CLASSES:
        bases = (kind,) if base is None else (base,) if base.__mro__[1] is kind else (kind, base)
        # The compiler treats everything it reads from PyTorch's modules as constant, including the shapes of leaves.
        home = __name__ if kind.__module__.startswith("torch.") else kind.__module__
        named = {"__qualname__": kind.__qualname__, "__module__": home, "__doc__": kind.__doc__}
        _CLASSES[key] = type(kind.__name__, bases, {**named, "_tap_kind": kind, "__reduce_ex__": _reduced, **members})
    return _CLASSES[key]


def wrap(module: nn.Module, way: str, run: Callable[[Callable[..., Any], tuple, dict], Any]) -> None:
    """Make a module's forward run within ``run(forward, args, kwargs)``.

    Args:
        module: the module.
        way: a word for what ``run`` does; it is stored in the module as ``_tap_<way>``.
        run: called with the module's forward and its arguments.
    """
    own, kind, attribute = vars(module).get("forward"), type(module), f"_tap_{way}"
    if own is not None:
        module.__dict__.setdefault("_tap_forward", own)  # for copies of the module
        module.__class__ = subclass(kind, "own_forward")
        module.__dict__["forward"] = lambda *args, **kwargs: run(own, args, kwargs)
        return

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (wrapper := vars(self).get(attribute)) is None:  # this forward was kept, or FSDP2 derived a class from it
            return kind.forward(self, *args, **kwargs)
        return wrapper(functools.partial(kind.forward, self), args, kwargs)

    module.__class__ = subclass(kind, way, forward=forward)
    module.__dict__[attribute] = run


def _reduced(module: Any, protocol: Any) -> Any:
    """Reduce a module to its original class, without the taps' state."""
    kind = module._tap_kind
    while hasattr(kind, "_tap_kind"):
        kind = kind._tap_kind
    state = {name: value for name, value in vars(module).items() if not name.startswith("_tap_")}
    if "_tap_forward" in vars(module):
        state["forward"] = vars(module)["_tap_forward"]
    return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]
