"""Prompt encoders: modules that compute one value for all rows of a batch.

PEFT's soft prompts (prompt tuning, p-tuning) are computed once, as (1, T, D), and repeated for every row. No module
inside sees the rows, so a tap there has no gradient per row. Here the encoder runs outside the graph of the model, on
copies of its parameters, and returns a `Shared` tensor. The first result that combines it with the rows of the batch is
tapped. Each row's gradient there is then propagated through the encoder separately. This is exact for any encoder,
LSTMs included; it costs one small backward pass per row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpllm.ghost.call import call_with, flatten_tensors, replace_tensors
from dpllm.ghost.contributions import RowGradients
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.kernels import widen
from dpllm.ghost.tap import Recorder


class Host(Recorder, Protocol):
    """The interface of the book that the encoders' hooks need."""

    @property
    def sharded(self) -> bool:
        """Whether processes hold parts of the parameters."""
        ...

    @property
    def rows_in_pass(self) -> int | None:
        """Rows of the current call of the model; None outside a call, or where they are not known."""
        ...

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which modules are not tapped."""
        ...

    def note_uses(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count a use of each parameter in this call of the model."""
        ...


def prompt_encoders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that PEFT keeps as prompt encoders, with trainable parameters, and their paths."""
    for path, module in model.named_modules():
        encoders = getattr(module, "prompt_encoder", None)
        if isinstance(encoders, nn.ModuleDict):
            for name, encoder in encoders.items():
                if any(p.requires_grad for p in encoder.parameters()):
                    yield f"{path}.prompt_encoder.{name}".lstrip("."), encoder


def attach(model: nn.Module, host: Host) -> list[Any]:
    """Attach hooks to the prompt encoders; to be called before hooks are attached to the modules inside them."""
    handles: list[Any] = []
    for path, encoder in prompt_encoders(model):
        hooks = _Encoder(path, encoder, host)
        handles += [
            encoder.register_forward_pre_hook(hooks.before, with_kwargs=True),
            encoder.register_forward_hook(hooks.after, with_kwargs=True, always_call=True),
        ]
    return handles


class _Encoder:
    """The hooks of one encoder. If it is called with the rows of the batch, the rules of its modules apply instead."""

    def __init__(self, path: str, encoder: nn.Module, host: Host) -> None:
        self.path, self.host = path, host
        self.trainable = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        self._rows = 0
        self._paused: contextlib.ExitStack | None = None

    def before(self, encoder: nn.Module, args: tuple, kwargs: dict) -> None:
        rows = self.host.rows_in_pass
        if not rows or not torch.is_grad_enabled() or any(t.shape[:1] != (1,) for t in flatten_tensors((args, kwargs))):
            return
        if self.host.sharded:
            raise GhostError(
                f"{self.path} computes one prompt for all rows, and its parameters are sharded. Train it on an engine "
                "that keeps parameters whole (DDP, ZeRO-1, ZeRO-2)."
            )
        for _ in range(2):  # one call may lead to several uses, so it never counts as a single one
            self.host.note_uses(self.trainable.values())
        self._rows = rows
        self._paused = contextlib.ExitStack()
        self._paused.enter_context(self.host.pause())

    def after(self, encoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._paused is None:
            return None
        try:
            if output is None:  # the call failed
                return None
            leaves = {name: encoder.get_parameter(name).detach().requires_grad_() for name in self.trainable}
            value = call_with(encoder, leaves, args, kwargs)
            if not isinstance(value, Tensor) or value.shape[:1] != (1,):
                raise NoRuleError(
                    f"{self.path} ({type(encoder).__name__}) returns {type(value).__name__}; a prompt that all rows "
                    "share has to be one tensor (1, T, D). Freeze it, or train another kind of adapter (LoRA)."
                )
        finally:
            self._paused.close()
            self._paused = None
        return _Source(self.path, self._rows, self._tap_rows(leaves)).give(value)

    def _tap_rows(self, leaves: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        def tap_rows(value_B: Tensor) -> Tensor:
            def receive(grad_B: Tensor, _: list[Tensor]) -> None:
                rows = []
                for row in range(len(grad_B)):
                    alone_B = torch.zeros_like(grad_B)
                    alone_B[row] = grad_B[row]
                    rows.append(
                        torch.autograd.grad(
                            value_B, list(leaves.values()), alone_B, retain_graph=True, materialize_grads=True
                        )
                    )
                for parameter, *grads in zip(self.trainable.values(), *rows, strict=True):
                    self.host.record(parameter, RowGradients(widen(torch.stack(grads))))

            return self.host.tap(value_B.detach(), receive)

        return tap_rows


class _Source:
    """The origin of a shared tensor; decides how results computed from it continue."""

    def __init__(self, path: str, rows: int, tap_rows: Callable[[Tensor], Tensor]) -> None:
        self.path, self.rows, self.tap_rows = path, rows, tap_rows

    def give(self, value: Any) -> Any:
        """Return the tensor for the model: tapped if it has the rows of the batch, `Shared` before that."""
        if type(value) in (tuple, list):
            return type(value)(self.give(item) for item in value)
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        if value.shape[:1] == (self.rows,):
            return self.tap_rows(value)
        if value.shape[:1] == (1,):
            return Shared.of(value, self)
        raise NoRuleError(
            f"{self.path}: a prompt that all rows share was changed to the shape {tuple(value.shape)}, in which its "
            f"{self.rows} rows cannot be found. Keep the rows of the batch as its first dimension."
        )

    def spread(self, value: Tensor) -> Tensor:
        """Return a copy for every row."""
        return self.tap_rows(value.expand(self.rows, *value.shape[1:]).contiguous())


class Shared(Tensor):
    """A tensor (1, ...) that all rows of the batch share; its operations detect where it is combined with the rows."""

    _value: Tensor
    _source: _Source

    @staticmethod
    def of(value: Tensor, source: _Source) -> Shared:
        """Mark a tensor that has its own graph."""
        shared = value.detach().as_subclass(Shared)
        shared._value, shared._source = value, source
        return shared

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with the value while no other input has a gradient, and with a copy for each row from then on."""
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = list(flatten_tensors((args, kwargs)))
            shared = [t for t in tensors if isinstance(t, Shared)]
            source = shared[0]._source
            together = any(t.requires_grad for t in tensors if not isinstance(t, Shared))

            def plain(t: Tensor) -> Tensor:
                if not isinstance(t, Shared):
                    return t
                return source.spread(t._value) if together else t._value

            args, kwargs = replace_tensors((args, kwargs), iter([plain(t) for t in tensors]))
            result = func(*args, **kwargs)
            return result if together else source.give(result)
