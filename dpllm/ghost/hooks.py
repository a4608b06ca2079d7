"""Hooks on a model: they take trainable parameters out of autograd during a pass and tap the modules that hold them.

Place in the flow: between the model's call and the taps, which hand gradients to the book. Out of autograd means that
autograd computes no weight gradients: norms and sums are formed from the tensors at the taps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost import functional, memory, shared
from dpllm.ghost.call import tensors_of
from dpllm.ghost.calls import Calls
from dpllm.ghost.checks import (
    placeholders_of,
    refuse_long_rows,
    refuse_shared_media,
    rows_of_call,
    tokens_by_themselves,
)
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.experts import attach_partitioned
from dpllm.ghost.packed import PackedRows
from dpllm.ghost.rules import Served, find_sites, refuse_compiled
from dpllm.ghost.uses import Uses

_KEPT = 2  # the input that several layers read, and one that a layer between them read (the factors of LoRA)


class Casts:
    """The last casts of this call of the model: layers that read one tensor keep one copy of it in their dtype.

    Autocast casts the input of each linear layer by itself. Layers that read the same tensor (query, key and value;
    gate and up) share the Gram matrix of their input, and for this they must keep the same tensor.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._recent: list[tuple[Tensor, int, Tensor]] = []

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``x`` in a dtype, without a graph; the same tensor again until ``x`` changes in place."""
        for known, version, made in self._recent:
            if known is x and version == x._version and made.dtype == dtype:
                return made
        made = x.detach().to(dtype)
        self._recent = [*self._recent[1 - _KEPT :], (x, x._version, made)]
        return made

    def forget(self) -> None:
        """Release the tensors."""
        self._recent = []


class Host(shared.Host, functional.Host, Protocol):
    """The interface of the book that rules need."""


class ModelCalls:
    """The facts known about the calls of the model since the last backward pass.

    Attributes:
        counts: uses of parameters, and layouts of rows.
        packed: how the rows of the last call are laid end to end.
        casts: inputs of its layers in the dtype of autocast.
        rows: of the last call; None where they are not known.
        tokens: of each of its rows.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start without calls."""
        self.counts, self.packed, self.casts = Calls(), PackedRows(), Casts()
        self.rows: int | None = None
        self.tokens = 1
        self._most_tokens, self._placeholders = tokens_by_themselves(model), placeholders_of(model)

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Note that a call of the model begins.

        Raises:
            GhostError: rows that are too long, packed wrongly, or may take each other's images.
        """
        refuse_shared_media(kwargs, self._placeholders)
        self.counts.begin()
        self.rows, self.tokens = rows_of_call(args, kwargs), memory.tokens_of_call(args, kwargs)
        self.packed.start(kwargs)
        refuse_long_rows(max(self.packed.lengths, default=self.tokens), self._most_tokens)

    def end(self) -> None:
        """Note that the call returned."""
        self.counts.note(self.rows, self.packed.lengths)
        self.casts.forget()

    def stop(self) -> None:
        """Release the tensors of a pass."""
        self.packed.stop()
        self.casts.forget()

    def differentiated(self, num_losses: int) -> None:
        """Note that losses are about to be differentiated.

        Raises:
            GhostError: there are not as many as packed rows, or the calls had other layouts.
        """
        packed = len(self.packed.lengths)
        if packed and packed != num_losses:
            raise GhostError(
                f"The model was called with {packed} packed rows, and there are {num_losses} losses. One loss per row "
                "is needed: see dpllm.packed_sequence_loss."
            )
        self.rows = self.counts.rows(num_losses, self.packed.lengths, self.rows)


class Switch:
    """Takes parameters out of autograd for a while."""

    def __init__(self) -> None:
        """Start with every parameter in autograd."""
        self._off: dict[int, nn.Parameter] = {}
        self._stay: dict[int, nn.Parameter] = {}

    def keep_off(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take these parameters out in every pass, until its end.

        DeepSpeed frees what it partitioned only where no parameter that it gathered for a layer has a gradient.
        """
        self._stay.update({id(p): p for p in parameters if hasattr(p, "ds_id")})

    def off_in_pass(self) -> None:
        """Take out those that stay out; the others are taken out while a module with a rule runs."""
        self.off(self._stay.values())

    def off_in_module(self, parameter: nn.Parameter) -> None:
        """Take this parameter out while a module with a rule runs, or until the end of the pass if it stays out."""
        if parameter.requires_grad:
            parameter.requires_grad = False
            self._off[id(parameter)] = parameter
        if hasattr(parameter, "ds_id"):
            self._stay[id(parameter)] = parameter

    def off(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take these parameters out."""
        for parameter in parameters:
            parameter.requires_grad = False
            self._off[id(parameter)] = parameter

    def on_after_module(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put back these parameters, where they were taken out and do not stay out."""
        for parameter in parameters:
            if id(parameter) not in self._stay and self._off.pop(id(parameter), None) is not None:
                parameter.requires_grad = True

    def on(self) -> None:
        """Put back all that were taken out."""
        for parameter in self._off.values():
            parameter.requires_grad = True
        self._off.clear()


class _Paused:
    """Pauses hooks and the watch of functions; a class, because a generator costs more in every layer."""

    __slots__ = ("_before", "_hooks", "_off")

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __enter__(self) -> None:
        hooks, uses = self._hooks, self._hooks.uses
        self._before, self._off = hooks.paused, uses.off
        hooks.paused = uses.off = True

    def __exit__(self, *_: object) -> None:
        self._hooks.paused, self._hooks.uses.off = self._before, self._off


class Hooks:
    """The hooks on one model.

    Args:
        model: any module whose inputs and outputs have the rows of the batch first.
        host: the interface of taps and rules.
        parameters: the trainable ones by name.
        forget: called when another microbatch begins.

    Attributes:
        calls: of the model.
        uses: serves the uses of parameters outside the modules that have a rule.
        in_backward: whether a backward pass of the clipper is running.
        paused: whether a rule runs modules for itself.

    Raises:
        GhostError: a parameter without a rule.
    """

    def __init__(
        self, model: nn.Module, host: Host, parameters: Mapping[str, nn.Parameter], forget: Callable[[], None]
    ) -> None:
        """Attach the hooks to the model."""
        self.calls = ModelCalls(model)
        self.uses = Uses(model, parameters, host)
        self._forget, self._switch = forget, Switch()
        self._inner: list[tuple[Any, int, Any, int]] = []  # of each site: hooks before, own; after, own
        self._in_forward = self.in_backward = self.paused = False
        self._handles = shared.attach(model, host)
        try:
            for site in find_sites(model):
                self._attach_site(Served(site, host))
            self._handles += attach_partitioned(model, host)
        except BaseException:  # without a rule here, the model may be clipped in another way
            self.remove()
            raise
        self._handles += [
            model.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def break_off(self) -> None:
        """End a call of the model that Ctrl-C broke off: PyTorch runs hooks after an `Exception` only.

        The next call does it too. A model that calls itself is not served in any case.
        """
        if self._in_forward:
            self._end()

    def remove(self) -> None:
        """Undo the hooks."""
        self.break_off()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.uses.remove()

    def _attach_site(self, served: Served) -> None:
        module, path, own = served.site.module, served.site.path, tuple(served.site.trainable.values())
        within = served.experts is not None
        uses, switch = self.uses, self._switch
        if served.is_known:
            switch.keep_off(own)

        def enter(args: tuple, kwargs: dict) -> bool:
            parameters, tensors = served.present(), tensors_of(args, kwargs)
            owned = served.enter(args, kwargs, tensors, parameters)
            for parameter in parameters:
                uses.refuse_gradient_of(parameter)
                if owned:
                    switch.off_in_module(parameter)
            uses.enter(parameters if owned else (), within)
            if owned:
                uses.refuse_other_order(path, tensors)
                self.note_uses(own)
            return owned

        def leave(args: tuple, kwargs: dict, output: Any) -> Any:
            uses.leave()
            call = served.leave(args, kwargs, broke_off=output is None)
            switch.on_after_module(call.parameters)
            if output is None or not torch.is_grad_enabled():
                return None
            if not call.owned:
                return uses.replaced(output)  # before ZeRO-3's hooks put another tensor in its place
            return uses.found((args, kwargs), served.after(module, args, kwargs, output, self.calls.rows))

        def before(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if self.paused or not (self._in_forward or self.in_backward):
                self._refuse_bypass(served)
                return None
            if served.is_steady and not uses.is_watching:  # most calls: no function is seen, so nothing to pause
                enter(args, kwargs)
                return None
            given, (args, kwargs) = (args, kwargs), uses.replaced((args, kwargs))
            with _Paused(self):
                if enter(args, kwargs) and served.before is not None:
                    return served.before(module, args, kwargs, self.calls.rows)
            return None if args is given[0] and kwargs is given[1] else (args, kwargs)

        def after(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            if self.paused or not (self._in_forward or self.in_backward):
                return None
            if served.is_steady and not uses.is_watching:
                return leave(args, kwargs, output)
            with _Paused(self):
                return leave(args, kwargs, output)

        first = module.register_forward_pre_hook(before, with_kwargs=True)
        last = module.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=True)
        self._handles += [first, last, *([served.experts] if served.experts else [])]
        self._inner.append((module._forward_pre_hooks, first.id, module._forward_hooks, last.id))

    def _keep_innermost(self) -> None:
        """Put the hooks of sites inside all others, also those registered since.

        Hooks that gather a sharded module's weights run before them, and those that free these run after them. Another
        hook may use the module's parameters, which have to be in autograd then, or change its output.
        """
        for hooks_before, first, hooks_after, last in self._inner:
            if next(reversed(hooks_before), first) != first and first in hooks_before:
                hooks_before.move_to_end(first)
            if next(iter(hooks_after), last) != last and last in hooks_after:
                hooks_after.move_to_end(last, last=False)

    @property
    def in_pass(self) -> bool:
        """Whether a call of the model or a backward pass of the clipper is running."""
        return self._in_forward or self.in_backward

    @property
    def rows_in_pass(self) -> int | None:
        """Rows of the current call of the model; None outside a call, or where they are not known."""
        return self.calls.rows if self.in_pass and not self.paused else None

    def note_uses(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count a use of each parameter in this call of the model; a recomputed module was counted before."""
        if self._in_forward:
            self.calls.counts.note_uses(parameters)

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Pause the hooks: a module that a rule runs for itself is not a use of its parameters."""
        return _Paused(self)

    def _refuse_bypass(self, served: Served) -> None:
        if not self.paused and torch.is_grad_enabled() and any(p.requires_grad for p in served.site.trainable.values()):
            raise NoRuleError(
                f"{served.site.path} was called directly, with gradients on. Call the model given to GhostClipper, so "
                "that every use of a parameter is seen; wrap evaluation in torch.no_grad()."
            )

    def _begin_forward(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        self.break_off()
        if not torch.is_grad_enabled():
            return
        refuse_compiled("The model", model)
        self._keep_innermost()
        self._forget()
        self.calls.begin(args, kwargs)
        self._in_forward = True
        self.uses.begin(args, kwargs)
        self._switch.off_in_pass()

    def _end_forward(self, _: nn.Module, args: Any, output: Any) -> Any:
        return self._end(output) if self._in_forward else output

    def _end(self, output: Any = None) -> Any:
        """End the call of the model; return its output, None if it raised."""
        self._in_forward = False
        self._switch.on()
        output = self.uses.end(output)
        if output is not None:
            self.calls.end()
        return output

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Enter a backward pass of the clipper: parameters are out of autograd, and recomputed modules are tapped."""
        self.in_backward = True
        self._switch.off_in_pass()
        try:
            with self.uses.backward():
                yield
        finally:
            self.in_backward = False
            self._switch.on()
