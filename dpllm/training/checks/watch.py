"""The watch over weights, buffers and gradients: only the engine's noisy gradient may change what a run releases.

The guarantee covers the noisy sum that a private step leaves for the optimizer. Private data could reach the weights in
other ways: a running statistic in a buffer, a parameter unfrozen during the run, a loss with its own parameter, a
second optimizer, an average that is copied back. Each is refused before the next update or save:

* Buffers, frozen parameters and scales of quantised weights stay as they were at `PrivateRun.attach`. Equal values may
  be written, and a cache that is not saved may grow.
* Trained parameters change only within the optimizer's ``step``, without a closure.
* The optimizer receives exactly the gradients of the private step, and none of any other parameter.
* Trainable tensors outside the model, such as a head within the loss, stay as they are while losses depend on them.
* No parameter is unfrozen, frozen, replaced, added, removed or tied to another one.

One mechanism watches all tensors. A *stamp*, the address and version counter of each local piece, is compared on the
host several times in each step. A write through ``.data`` raises no counter, so at most 64 entries of each piece, a
*sample*, are compared as well; the device is read once, when the private gradient is complete. No step reads whole
weights: checksums of the frozen tensors are computed when a model is attached, and compared at each save and the end.
A save also takes one of the trained weights: until the next update, whoever writes the same weights is accepted.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dpllm.engines.checksums import Checksum, pieces, values
from dpllm.engines.optimizers import innermost
from dpllm.ghost.graph import leaves_of
from dpllm.ghost.refusals import scales_of

Stamp = tuple[tuple[int, int], ...]
"""Address and version of each piece of a tensor on this process."""
_Views = dict[tuple[torch.device, torch.dtype], list[tuple[Any, Tensor]]]
_SAMPLED = 64  # entries of a piece
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FROZEN = "frozen parameter"
_BETWEEN = "between two private steps, other than by optimizer.step()"
_DURING = "during a private step, by the model's forward pass, the loss or the collator"
_UNTIL_UPDATE = "between the private step and optimizer.step()"
_AT_SAVE = "after optimizer.step(), before weights were saved"


class WatchError(ValueError):
    """Private data reached, or may have reached, weights or saved state outside of the mechanism."""


def stamp_of(tensor: Any) -> Stamp:
    """Return the stamp of a tensor; PyTorch raises the version at each write, except through ``.data``."""
    return tuple((piece.data_ptr(), 0 if piece.is_inference() else piece._version) for piece in pieces(tensor))


class Snapshot:
    """Stamps and samples of tensors at one moment.

    Args:
        tensors: the tensors by key; sharded, quantised or None are allowed.
        before: an earlier snapshot, whose views of the memory are used again if no tensor has moved.

    Attributes:
        stamps: the stamp of each tensor.

    >>> weights = {"weight": torch.zeros(9)}
    >>> before = Snapshot(weights)
    >>> weights["weight"].data += 1
    >>> now = Snapshot(weights, before)
    >>> before.moved(now), before.changed(now)
    ([], ['weight'])
    """

    def __init__(self, tensors: Mapping[Any, Any], before: Snapshot | None = None) -> None:
        """Read the stamps, and queue copies of the samples."""
        with torch.no_grad():
            self.stamps = {key: stamp_of(tensor) for key, tensor in tensors.items()}
            stays = before is not None and _addresses(before.stamps) == _addresses(self.stamps)
            self._views: _Views = before._views if before is not None and stays else _views_of(tensors)
            self._values = {kind: torch.cat([view for _, view in parts]) for kind, parts in self._views.items()}

    def moved(self, now: Snapshot) -> list[Any]:
        """Return the keys of the tensors that were written or replaced since, by their stamps; reads no device."""
        return [key for key, stamp in now.stamps.items() if stamp != self.stamps.get(key)]

    def flags(self, now: Snapshot) -> Iterator[Tensor]:
        """Yield a bool () for each device and dtype, whether samples differ; does not wait for the device."""
        for kind in self._values.keys() | now._values.keys():
            first, second = self._values.get(kind), now._values.get(kind)
            if first is None or second is None or first.shape != second.shape:
                yield torch.tensor(True)
            else:
                yield (first != second).any()

    def changed(self, now: Snapshot) -> list[Any]:
        """Return the keys of this snapshot whose samples differ; waits for the devices."""
        first, second = self._read(), now._read()
        return [key for key in self.stamps if first.get(key) != second.get(key)]

    def _read(self) -> dict[Hashable, list[list[int]]]:
        read: dict[Hashable, list[list[int]]] = {}
        for kind, parts in self._views.items():
            entries = iter(self._values[kind].split([len(view) for _, view in parts]))
            for key, _ in parts:
                read.setdefault(key, []).append(next(entries).tolist())
        return read


def _addresses(stamps: Mapping[Any, Stamp]) -> list[tuple[Any, list[int]]]:
    return [(key, [address for address, _ in stamp]) for key, stamp in stamps.items()]


def _views_of(tensors: Mapping[Any, Any]) -> _Views:
    """Return views of at most 64 entries of each piece, as integers, by device and width."""
    views: _Views = {}
    for key, tensor in tensors.items():
        for piece in pieces(tensor):
            if not piece.numel():
                continue
            part = piece.detach().as_subclass(Tensor)
            part = torch.view_as_real(part) if part.is_complex() else part
            part = part.view(-1) if part.is_contiguous() else part
            while part.dim() > 1:  # transposed, for instance: one row
                part = part[len(part) // 2]
            part = part[:: -(-len(part) // _SAMPLED)].view(_AS_INTEGER[part.element_size()])
            views.setdefault((part.device, part.dtype), []).append((key, part))
    return views


@dataclass
class _Fixed:
    """A tensor that must not change.

    Attributes:
        name: its path in the model.
        kind: "buffer", "frozen parameter" or "scale of a quantised weight".
        tensor: returns it; None: it is gone.
        saved: whether it is part of the saved state.
    """

    name: str
    kind: str
    tensor: Callable[[], Any]
    saved: bool
    shape: tuple[int, ...] = ()
    checksum: int | None = None


class Watch:
    """Watches one attached run, from `PrivateRun.attach` to `PrivateRun.detach`.

    Args:
        model: the module inside its engine's wrapper.
        optimizer: the prepared optimizer; wrappers are removed.
        trainable: the clipped parameters, by name.
        hands_in: for an engine that updates within the private step and takes gradients through autograd (DeepSpeed):
            returns whether it passes them at the moment; any other gradient is refused. None: the private step leaves
            gradients for the optimizer, which are compared before each update.
        several: whether there are other processes, which wait for this one in the next collective: a changed gradient
            is dropped, this process takes no update, and the error is raised in the next step or save, which all
            processes enter together. False: the error is raised at once.
        before_update: called before each update by the optimizer; its `WatchError` is treated like the watch's own.

    Raises:
        WatchError: the optimizer holds a trainable parameter that is not clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        trainable: Mapping[str, nn.Parameter],
        hands_in: Callable[[], bool] | None = None,
        several: bool = False,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the state of all watched tensors, and hook the optimizer."""
        self._model, self._trainable, self._hands_in = model, dict(trainable), hands_in
        self._several, self._before = several, before_update
        self._known = {id(parameter): name for name, parameter in self._trainable.items()}
        self._sharded = any(isinstance(p, DTensor) for p in model.parameters())
        self._deferred: WatchError | None = None
        self._handles: list[Any] = []
        if hands_in is None:
            inner = innermost(optimizer)
            self._refuse_extra(inner)
            self._refuse_missing(inner)
            self._handles += [
                inner.register_step_pre_hook(self._before_update),
                inner.register_step_post_hook(self._after_update),
            ]
        else:
            self._handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._trainable.values()]
        self._outside: dict[int, tuple[weakref.ref[Tensor], Stamp]] = {}  # by number, in the order of appearance
        self._num_outside, self._outside_state = 0, Snapshot({})
        self.rebase()

    def rebase(self) -> None:
        """Store the present state for later comparisons, after a checkpoint was loaded."""
        self._fixed = {(fixed.name, fixed.kind): fixed for fixed in self._find_fixed()}
        self._places = self._find_places()
        self._fixed_state, self._weights = Snapshot({}), Snapshot(self._trainable)
        self._at_save: Checksum | None = None  # of the weights, since the last update
        self._accept(self._fixed, _BETWEEN)
        self._pending: list[tuple[str, Snapshot, Snapshot, list[Tensor]]] = []
        self._gradients: dict[str, tuple[Tensor | None, Stamp]] = {}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ------------------------------------------------------------------ steps

    def before_step(self) -> None:
        """Compare with the state after the step before; reads no device.

        Raises:
            WatchError: a tensor was written, unfrozen or frozen in between.
        """
        if self._deferred is not None:
            raise self._deferred
        self._check_trainable_set()
        self._compare(_BETWEEN)
        self._check_places(_BETWEEN)
        self._gradients = {}

    def complete(self) -> None:
        """Compare when the private gradient is formed, before any update; reads each device once.

        Raises:
            WatchError: forward or backward pass, loss or collator wrote to a watched tensor.
        """
        self._check_trainable_set()
        self._compare(_DURING)
        self._check_places(_DURING)
        self._settle()
        for name, parameter in self._frozen():
            if parameter.grad is not None:
                raise WatchError(
                    f"{name} is not trained and received a gradient {_DURING}: it is not clipped, and no noise covers "
                    "it. Set requires_grad of all parameters before the run is attached"
                )

    def explain(self) -> None:
        """Name a written tensor when the passes of a step have failed, since it is the likeliest cause.

        Raises:
            WatchError: a watched tensor changed.
        """
        self._compare(_DURING)
        self._settle()

    def note_gradients(self) -> None:
        """Store the gradients of the private step in ``.grad``; the optimizer must receive exactly these."""
        if self._hands_in is not None:
            self._weights, self._at_save = Snapshot(self._trainable, self._weights), None
            return
        with torch.no_grad():
            grads = {name: parameter.grad for name, parameter in self._trainable.items()}
            self._gradients = {name: (grad, stamp_of(grad)) for name, grad in grads.items() if grad is not None}

    def look(self, loss_B: Tensor) -> Tensor:
        """Return the losses, and watch the trainable tensors outside the model that they depend on."""
        seen = {id(leaf()) for leaf, _ in self._outside.values()} | self._known.keys()
        for leaf in leaves_of(loss_B) if isinstance(loss_B, Tensor) else ():
            if id(leaf) not in seen:
                self._num_outside += 1
                self._outside[self._num_outside] = weakref.ref(leaf), stamp_of(leaf)
                seen.add(id(leaf))
        return loss_B

    def is_written(self) -> bool:
        """Return whether a trained parameter differs from the last update, by stamps and samples; waits for devices."""
        now = Snapshot(self._trainable, self._weights)
        return bool(self._weights.moved(now) or self._weights.changed(now))

    def accept_restored(self) -> None:
        """Accept the stamps of weights that the run's own average has replaced and put back, if no sample differs."""
        now = Snapshot(self._trainable, self._weights)
        if not self._weights.changed(now):
            self._weights = now

    def check_everything(self) -> None:
        """Compare all tensors, those that are not trained by whole checksums; before each save, and at the end.

        Raises:
            WatchError: one changed since the run was attached, or something other than the optimizer wrote to a trained
                parameter.
        """
        if self._deferred is not None:
            raise self._deferred
        self._settle()
        self._accept(self._fixed, _AT_SAVE)
        self._compare(_AT_SAVE)
        self._check_places(_AT_SAVE)
        self._settle()
        self._at_save = self._sum_of_weights()

    # ------------------------------------------------------------ comparisons

    def _compare(self, when: str) -> None:
        """Compare the stamps, and queue the comparison of the samples."""
        fixed, weights = Snapshot(self._fixed_tensors(), self._fixed_state), Snapshot(self._trainable, self._weights)
        for name in self._weights.moved(weights):
            if self._at_save is None or values([self._at_save]) != values([self._sum_of_weights()]):
                raise self._refusal(name, when)
            self._weights = weights  # DeepSpeed writes the same weights when it saves them
            break
        if moved := self._fixed_state.moved(fixed):
            self._accept(moved, when)
            fixed = self._fixed_state
        outside = self._outside_now(when)
        for before, now in ((self._fixed_state, fixed), (self._weights, weights), (self._outside_state, outside)):
            self._pending.append((when, before, now, list(before.flags(now))))

    def _sum_of_weights(self) -> Checksum:
        with torch.no_grad():
            return Checksum(self._trainable.values())

    def _outside_now(self, when: str) -> Snapshot:
        """Compare the stamps of the tensors outside the model that are left, and return their samples."""
        self._outside = {number: one for number, one in self._outside.items() if one[0]() is not None}
        now = Snapshot({number: leaf() for number, (leaf, _) in self._outside.items()}, self._outside_state)
        for number, (_, stamp) in self._outside.items():
            if now.stamps[number] != stamp:
                raise self._refusal(number, when)
        if now.stamps.keys() != self._outside_state.stamps.keys():
            self._outside_state = now
        return now

    def _settle(self) -> None:
        """Read the queued comparisons, with one wait for each device.

        Raises:
            WatchError: samples differ.
        """
        pending, self._pending = self._pending, []
        flags: dict[torch.device, list[Tensor]] = {}
        for flag in (flag for *_, each in pending for flag in each):
            flags.setdefault(flag.device, []).append(flag)
        if any(any(torch.stack(each).tolist()) for each in flags.values()):
            for when, before, now, _ in pending:
                for key in before.changed(now):
                    error = self._refusal(key, when)
                    self._deferred = error if when == _UNTIL_UPDATE else None  # that update cannot be taken back
                    raise error

    def _accept(self, keys: Iterable[tuple[str, str]], when: str) -> None:
        """Accept new tensors, equal values and caches that have grown; waits for the device.

        Raises:
            WatchError: a tensor has other values.
        """
        accepted = {key: self._fixed[key] for key in keys}
        for (key, one), total in zip(accepted.items(), _checksums(accepted.values()), strict=True):
            if one.checksum not in (None, total) and not _has_grown(one):
                raise self._refusal(key, when)
            one.checksum, one.shape = total, tuple(getattr(one.tensor(), "shape", ()))
        before, now = self._fixed_state, Snapshot(self._fixed_tensors(), self._fixed_state)
        others = before.stamps.keys() - accepted.keys()  # their stamps stay
        for key in before.changed(now):
            if key in others:
                raise self._refusal(key, when)
        now.stamps |= {key: before.stamps[key] for key in others}
        self._fixed_state = now

    def _refusal(self, key: Any, when: str) -> WatchError:
        """Return the error about a tensor that changed."""
        if key in self._trainable:
            return WatchError(
                f"{key} was written {when}, so it is not as the last update left it, and only weights that change by "
                "the noisy gradient are covered. Remove the code that writes to it (a callback, a second optimizer, "
                'max_norm of an embedding); for an average of the weights, use average="ema" of DPTrainer or averaging '
                "of PrivateRun.attach, and evaluate other weights in copy.deepcopy(model). Load checkpoints before "
                "attach(), or register the run: accelerator.register_for_checkpointing(run)"
            )
        if isinstance(key, int):
            leaf = self._outside[key][0]()
            return WatchError(
                f"A trainable tensor of shape {tuple(getattr(leaf, 'shape', ()))}, which the losses depend on and the "
                f"model does not hold, was written {when}, perhaps by its own optimizer. Its gradients are not clipped "
                "and get no noise, so private rows would reach all later losses through it. Make it a part of the "
                "model, train it on public data only, or, if it follows the private weights, set requires_grad_(False)"
            )
        name, kind = key
        return WatchError(
            f"The {kind} {name} changed {when}. Values computed from private rows must reach the model only through "
            "the noisy gradient, unlike running statistics, max_norm of an embedding, or weights written by a "
            "callback. Freeze the statistic, leave max_norm out, or remove the callback; do not release any output of "
            "this run"
        )

    # -------------------------------------------------------------- the model

    def _check_trainable_set(self) -> None:
        what = [f"{name} was unfrozen" for name, parameter in self._frozen() if parameter.requires_grad]
        what += [f"{name} was frozen" for name, parameter in self._trainable.items() if not parameter.requires_grad]
        if what:
            raise WatchError(
                f"{what[0]} after the run was attached: the clip norm covers only parameters that were trainable then. "
                "Set requires_grad before training starts; to change it, end the run and start another one"
            )

    def _frozen(self) -> Iterator[tuple[str, Any]]:
        tensors = ((fixed.name, fixed.tensor()) for fixed in self._fixed.values() if fixed.kind == _FROZEN)
        yield from ((name, tensor) for name, tensor in tensors if tensor is not None)

    def _check_places(self, when: str) -> None:
        """Check that every parameter is where it was, and watch buffers that a forward pass has made.

        Raises:
            WatchError: a parameter was replaced, added or removed; or a new buffer is saved or trainable.
        """
        now = self._find_places()
        if now == self._places:
            return
        new = [fixed for fixed in self._find_fixed() if (fixed.name, fixed.kind) not in self._fixed]
        for fixed in new:
            if fixed.kind == "buffer" and (fixed.saved or fixed.tensor().requires_grad):
                raise WatchError(
                    f"The buffer {fixed.name} was added to the model after the run was attached, and it would be saved "
                    "or trained: no noise covers it. Register it before the run starts, or with persistent=False"
                )
        for name in sorted(self._places.keys() | now.keys()):
            if self._places.get(name) != now.get(name) and 0 not in (self._places.get(name), now.get(name)):
                raise WatchError(
                    f"{name} is another parameter than when the run was attached: it, or a module that holds it, was "
                    "replaced, added, removed or tied. No noise covers the new one. Change the model before the run "
                    "is attached, or after it has ended, in a copy that is saved elsewhere"
                )
        self._places, added = now, {(fixed.name, fixed.kind): fixed for fixed in new}
        self._fixed |= added
        self._accept(added, when)

    def _find_places(self) -> dict[str, int]:
        """Return the id of the parameter at each path, and 0 for each buffer; nothing where modules hold shards."""
        places: dict[str, int] = {}
        for path, module in () if self._sharded else self._model.named_modules(remove_duplicate=False):
            start = f"{path}." if path else ""
            places |= {start + name: id(p) for name, p in module._parameters.items() if p is not None}
            places |= {start + name: 0 for name, buffer in module._buffers.items() if buffer is not None}
        return places

    def _find_fixed(self) -> Iterator[_Fixed]:
        seen = set(self._known)
        for path, module in self._model.named_modules():
            start = f"{path}." if path else ""
            for kind, members in ((_FROZEN, module._parameters), ("buffer", module._buffers)):
                for attribute, tensor in members.items():
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    # The names of the saved buffers: a public list of them would gather the whole state.
                    saved = attribute not in getattr(module, "_non_persistent_buffers_set", ())
                    held = functools.partial(getattr, module, attribute, None)
                    if isinstance(tensor, DTensor):  # FSDP2 replaces the attribute temporarily
                        held = functools.partial(_itself, tensor)
                    yield _Fixed(start + attribute, kind, held, saved)
            for attribute, tensor in scales_of(module).items():
                held = functools.partial(_itself, tensor)
                yield _Fixed(start + attribute, "scale of a quantised weight", held, saved=True)

    def _fixed_tensors(self) -> dict[tuple[str, str], Any]:
        return {key: fixed.tensor() for key, fixed in self._fixed.items()}

    # -------------------------------------------------------------- optimizer

    def _refuse_extra(self, optimizer: Optimizer) -> None:
        for number, parameter in _parameters_of(optimizer):
            if id(parameter) in self._known:
                continue
            if parameter.requires_grad or parameter.grad is not None:
                raise WatchError(
                    f"The optimizer holds a trainable parameter of shape {tuple(parameter.shape)} (number {number}) "
                    "that is not clipped: it was not a trainable parameter of the model when the run was attached. "
                    "Its gradient would be released without noise. Make the optimizer from the model's own trainable "
                    "parameters, and set requires_grad before training starts"
                )

    def _refuse_missing(self, optimizer: Optimizer) -> None:
        held = {id(parameter) for _, parameter in _parameters_of(optimizer)}
        missing = [name for name, parameter in self._trainable.items() if id(parameter) not in held]
        if missing:
            raise WatchError(
                f"{missing[0]} is trainable, but the optimizer does not hold it ({len(missing)} parameter(s) are "
                "missing): it would take its share of the clip norm and never be trained. Give the run one optimizer "
                "with all trainable parameters (several can be joined in a torch.optim.Optimizer whose step() calls "
                "theirs), or freeze it before the run is attached"
            )

    def _before_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        try:
            if any(callable(given) for given in (*args[1:], kwargs.get("closure"))):
                raise WatchError(
                    "optimizer.step() was called with a closure, which runs within the update and could write other "
                    "gradients than the private one. Call optimizer.step() without arguments"
                )
            self._refuse_extra(optimizer)
            self._compare(_UNTIL_UPDATE)
            self._check_gradients()
            if self._gradients:
                self._before()
        except WatchError as error:
            if not self._several:
                raise
            self._deferred = self._deferred or error
            for _, parameter in _parameters_of(optimizer):
                parameter.grad = None

    def _check_gradients(self) -> None:
        for name, parameter in self._trainable.items():
            grad, (own, stamp) = parameter.grad, self._gradients.get(name, (None, ()))
            if grad is not None and not self._gradients:
                raise WatchError(
                    f"optimizer.step() was called, and {name} has a gradient that no private step left: the last "
                    "step failed, or a checkpoint was loaded after it. It would reach the weights without clipping and "
                    "noise. Do not step the optimizer after a step that failed; resume from a checkpoint"
                )
            if (own is not None and own is not grad) or (grad is not None and stamp_of(grad) != stamp):
                raise WatchError(
                    f"The gradient of {name} is not the one that the private step left: something wrote to it, "
                    "replaced it or took it away (a second backward pass, gradient clipping, a callback). Run nothing "
                    "that touches .grad between the private step and optimizer.step(), and zero_grad() after it"
                )

    def _after_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        del optimizer, args, kwargs
        self._weights, self._at_save = Snapshot(self._trainable, self._weights), None
        # Only the stamps: the memory of the gradients is needed.
        self._gradients = {name: (None, stamp) for name, (_, stamp) in self._gradients.items()}

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._hands_in is not None and not self._hands_in():
            name = self._known.get(id(parameter), "A parameter")
            raise WatchError(
                f"{name} received a gradient from a backward pass that is not part of a private step; DeepSpeed would "
                "add it to the private sum without noise. Run only private steps on this model while a run is "
                "attached, or use torch.no_grad()"
            )


def _itself(tensor: Any) -> Any:
    return tensor


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter]]:
    yield from enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_grown(fixed: _Fixed) -> bool:
    """Return whether a cache that is not saved grew along one dimension and still begins with the old values."""
    tensor = fixed.tensor()
    if fixed.saved or tensor is None or len(tensor.shape) != len(fixed.shape) or not fixed.shape:
        return False
    longer = [dim for dim, (new, old) in enumerate(zip(tensor.shape, fixed.shape, strict=True)) if new != old]
    if len(longer) != 1 or tensor.shape[longer[0]] < fixed.shape[longer[0]]:
        return False
    with torch.no_grad():
        return Checksum([tensor.narrow(longer[0], 0, fixed.shape[longer[0]])]).value() == fixed.checksum


def _checksums(all_fixed: Iterable[_Fixed]) -> list[int]:
    """Return the checksum of each tensor, with one read per device."""
    with torch.no_grad():
        return values([Checksum([fixed.tensor()]) for fixed in all_fixed])
