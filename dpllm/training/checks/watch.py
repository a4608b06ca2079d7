"""Watch weights, buffers and gradients: only the engine's noisy gradient may change what a run releases.

The guarantee covers the noisy sum that a private step passes to the optimizer. Private data could reach the weights in
other ways: a running statistic in a buffer, a parameter unfrozen during the run, a loss with its own parameter, a
second optimizer, an average that is copied back. Each is refused before the next update or save:

* Buffers, frozen parameters and scales of quantised weights stay as they were at `PrivateRun.attach`. Equal values may
  be written, and a cache that is not saved may grow.
* Trained parameters change only within the optimizer's ``step``, without a closure.
* The optimizer receives exactly the gradients of the private step, and none for any other parameter.
* Trainable tensors outside the model, such as a head within the loss, do not change while losses depend on them.
* No parameter is unfrozen, frozen, replaced, added, removed or tied to another one.

A *stamp* is the address and version counter of each local piece of a tensor; comparing stamps needs no device. A write
through ``.data`` raises no counter, so a snapshot also has a *sample* of each piece, at most 64 evenly spaced entries.
Stamps are compared before a step, when the private gradient is complete, and before the update; samples when the
gradient is complete, so each device is read once. The weights' samples from just before the update are
compared in the next step, since the update itself accepts new weights. No step reads whole weights: checksums of the
frozen tensors are computed when a model is attached, and compared at each save and at the end. A save also takes a
checksum of the trained weights: until the next update, writing the same weights is accepted.

A step returns the exact mean loss of private rows to its loop (`dpllm.training.step.StepDiagnostics`). A learning rate
that follows it, or an evaluation on private rows, would carry these figures into the weights, which ε does not cover.
So the rates of all updates are computed from the scheduler before the first step, and an update with a different rate
is refused (`LearningRates`). A loop that names no scheduler has an open point, or a declaration. Schedulers whose
``step`` takes metrics are refused by type (`dpllm.models.starting_point.refuse_steering`).
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dpllm.engines.checksums import Checksum, pieces, values
from dpllm.engines.guard import innermost
from dpllm.ghost.parameters import leaves_of
from dpllm.ghost.refusals import scales_of

Stamp = tuple[tuple[int, int], ...]
"""Address and version of each piece of a tensor on this process."""
Samples = dict[tuple[torch.device, torch.dtype], Tensor]
"""Samples of many tensors, as integers, by device and width."""
_Views = dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]]
_SAMPLED = 64  # entries sampled from a piece
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FROZEN, _BUFFER, _SCALE, _OUTSIDE = "frozen parameter", "buffer", "scale of a quantised weight", "outside tensor"
_BETWEEN = "between two private steps, not by optimizer.step()"
_DURING = "during a private step, by the model's forward pass, the loss or the collator"
_SINCE_UPDATE = "between two updates, not by optimizer.step()"
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
        tensors: the tensors by key; sharded or quantised tensors and None are allowed.
        before: an earlier snapshot, whose views of the memory are reused if no tensor has moved.

    Attributes:
        stamps: the stamp of each tensor.
        samples: copies of the samples.

    >>> weights = {"weight": torch.zeros(9)}
    >>> before = Snapshot(weights)
    >>> weights["weight"].data += 1
    >>> before.written(weights), before.changed(before.read())
    ([], ['weight'])
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Any], before: Snapshot | None = None) -> None:
        """Read the stamps, and queue copies of the samples."""
        self.stamps = {key: stamp_of(tensor) for key, tensor in tensors.items()}
        stays = before is not None and _addresses(before.stamps) == _addresses(self.stamps)
        self._views: _Views = before._views if before is not None and stays else _views_of(tensors)
        self.samples = self.read()

    @torch.no_grad()
    def written(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return the keys of tensors that are new, written or replaced, judged by their stamps; reads no device."""
        return [key for key, tensor in tensors.items() if stamp_of(tensor) != self.stamps.get(key)]

    def read(self) -> Samples:
        """Queue copies of the current samples, from the memory that the tensors had at the moment of the snapshot."""
        return {kind: torch.cat([view for _, view in parts]) for kind, parts in self._views.items()}

    def changed(self, samples: Samples) -> list[str]:
        """Return the keys of the tensors whose samples differ from `samples` (by `read`); waits for devices."""
        keys: dict[str, None] = {}
        for kind, parts in self._views.items():
            lengths = [len(view) for _, view in parts]
            pairs = zip(self.samples[kind].split(lengths), samples[kind].split(lengths), strict=True)
            keys |= {key: None for (key, _), pair in zip(parts, pairs, strict=True) if not torch.equal(*pair)}
        return list(keys)


@dataclass
class _Fixed:
    """A tensor that must not change.

    Attributes:
        name: its path in the model.
        kind: frozen parameter, buffer, scale of a quantised weight, or outside tensor.
        tensor: returns the tensor; None: it no longer exists.
        saved: whether it is part of the saved state.
        shape: shape when it was accepted.
        checksum: checksum when it was accepted; None: it is new.
    """

    name: str
    kind: str
    tensor: Callable[[], Any]
    saved: bool
    shape: tuple[int, ...] = ()
    checksum: int | None = None

    @property
    def key(self) -> str:
        """Kind and name: a module may hold tensors of two kinds under one name, such as a weight and its scale."""
        return f"{self.kind} {self.name}"


class Watch:
    """Watches one attached run, from `PrivateRun.attach` to `PrivateRun.detach`.

    Args:
        model: the module inside its engine's wrapper.
        optimizer: the prepared optimizer; wrappers are removed.
        trainable: the clipped parameters, by name.
        hands_in: for an engine that updates within the private step and takes gradients through autograd (DeepSpeed):
            returns whether it is passing them at the moment; any other gradient is refused. None: the private step
            leaves gradients for the optimizer, which are compared before each update.
        several: whether there are other processes, which wait for this one in the next collective: a changed gradient
            is dropped, this process makes no update, and the error is raised in the next step or save, which all
            processes enter together. False: the error is raised at once.
        before_update: called before each update by the optimizer; its `WatchError` is treated like the watch's own.
        after_update: called after each update by the optimizer; None: no call.

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
        after_update: Callable[[], None] | None = None,
    ) -> None:
        """Store the state of all watched tensors, and hook the optimizer."""
        self._model, self._trainable, self._hands_in = model, dict(trainable), hands_in
        self._several, self._before, self._after = several, before_update, after_update
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
        self._weights = Snapshot({})  # of the last update's results
        self._at_save: Checksum | None  # of the weights, if a save has compared them since the last update
        self._fixed: dict[str, _Fixed] = {}
        self.rebase()

    def rebase(self) -> None:
        """Store the current state for later comparisons, after a checkpoint was loaded."""
        outside = {key: fixed for key, fixed in self._fixed.items() if fixed.kind == _OUTSIDE}
        self._fixed = outside | {fixed.key: fixed for fixed in self._find_fixed()}
        self._note_places()
        self._accept_weights()
        self._fixed_state = Snapshot({})
        self._at_updates: list[tuple[Snapshot, Samples]] = []  # weights just before updates, to be compared
        self._gradients: dict[str, tuple[Tensor | None, Stamp]] = {}
        self._compare(_BETWEEN)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ------------------------------------------------------------------ steps

    def before_step(self) -> None:
        """Compare with the state after the previous step; reads no device.

        Raises:
            WatchError: a tensor was written, unfrozen or frozen in between.
        """
        if self._deferred is not None:
            raise self._deferred
        self._compare(_BETWEEN)
        self._gradients = {}

    def complete(self) -> None:
        """Compare when the private gradient is complete, before any update; reads each device once.

        Raises:
            WatchError: forward or backward pass, loss or collator wrote to a watched tensor.
        """
        self._compare(_DURING)
        self._compare_samples(_SINCE_UPDATE)
        if received := [name for name, one in self._frozen().items() if getattr(one, "grad", None) is not None]:
            raise WatchError(
                f"{received[0]} is not trained but has a gradient, which is neither clipped nor noised. Set "
                "requires_grad of all parameters, and .grad of frozen ones to None, before the run is attached"
            )

    def note_gradients(self) -> None:
        """Store the gradients of the private step in ``.grad``; the optimizer must receive exactly these."""
        if self._hands_in is not None:
            self._accept_weights()
            return
        grads = {name: parameter.grad for name, parameter in self._trainable.items()}
        self._gradients = {name: (grad, stamp_of(grad)) for name, grad in grads.items() if grad is not None}

    def look(self, loss_B: Tensor) -> Tensor:
        """Return the losses, and watch the trainable tensors outside the model on which they depend."""
        for leaf in leaves_of(loss_B) if isinstance(loss_B, Tensor) else ():
            if id(leaf) in self._known:
                continue
            fixed = _Fixed(str(id(leaf)), _OUTSIDE, weakref.ref(leaf), saved=True)
            watched = self._fixed.get(fixed.key)
            if watched is None or watched.tensor() is not leaf:
                self._watch(fixed)
        return loss_B

    def is_written(self) -> bool:
        """Return whether a trained parameter changed since the last update, by stamps and samples; reads devices."""
        return bool(self._weights.written(self._trainable) or self._weights.changed(self._weights.read()))

    def accept_restored(self) -> None:
        """Accept the stamps of weights that the run's own average replaced and restored, if no sample differs."""
        now = Snapshot(self._trainable)
        if not self._weights.changed(now.samples):
            self._weights = now

    def check_everything(self) -> None:
        """Compare all tensors, untrained ones by full checksums; before each save and at the end.

        Raises:
            WatchError: a tensor changed since the run was attached, or something other than the optimizer wrote to a
                trained parameter.
        """
        if self._deferred is not None:
            raise self._deferred
        self._compare(_AT_SAVE, by_checksums=True)
        self._compare_samples(_AT_SAVE)
        self._at_save = Checksum(self._trainable.values())

    # ------------------------------------------------------------ comparisons

    def _compare(self, when: str, by_checksums: bool = False) -> None:
        """Check the set of parameters, compare the stamps, and accept new tensors, equal values and grown caches.

        Args:
            when: the moment, for the error.
            by_checksums: compare all tensors that are not trained by their checksums.

        Raises:
            WatchError: a tensor has different values, or the model has or trains different parameters.
        """
        self._check_parameters()
        self._compare_weights(when)
        self._compare_fixed(when, by_checksums)
        self._check_places()

    def _compare_fixed(self, when: str, by_checksums: bool) -> None:
        self._fixed = {key: one for key, one in self._fixed.items() if one.kind != _OUTSIDE or one.tensor() is not None}
        tensors = {key: fixed.tensor() for key, fixed in self._fixed.items()}
        written = list(tensors) if by_checksums else self._fixed_state.written(tensors)
        if not written and tensors.keys() == self._fixed_state.stamps.keys():
            return
        accepted = [self._fixed[key] for key in written]
        for fixed, total in zip(accepted, _checksums(accepted), strict=True):
            if fixed.checksum not in (None, total) and not _has_grown(fixed):
                raise self._refusal(fixed.key, when)
            fixed.checksum, fixed.shape = total, tuple(getattr(fixed.tensor(), "shape", ()))
        for key in self._fixed_state.changed(self._fixed_state.read()):
            if key in tensors and key not in written:
                raise self._refusal(key, when)
        self._fixed_state = Snapshot(tensors)

    def _compare_weights(self, when: str) -> None:
        if not (written := self._weights.written(self._trainable)):
            return
        if self._at_save is None or values([self._at_save]) != values([Checksum(self._trainable.values())]):
            raise self._refusal(written[0], when)
        self._weights = Snapshot(self._trainable)  # DeepSpeed rewrites the same weights when it saves them

    def _accept_weights(self) -> None:
        self._weights, self._at_save = Snapshot(self._trainable, self._weights), None

    def _compare_samples(self, when: str) -> None:
        """Compare the samples, with one wait per device; the stamps have just been compared.

        Raises:
            WatchError: samples differ.
        """
        compared = [(state, samples, _UNTIL_UPDATE) for state, samples in self._at_updates]
        compared += [(state, state.read(), when) for state in (self._weights, self._fixed_state)]
        flags = defaultdict(list)
        for state, samples, _ in compared:
            for kind, first in state.samples.items():
                flags[first.device].append((first != samples[kind]).any())
        if any(any(torch.stack(each).tolist()) for each in flags.values()):
            raise next(self._refusal(key, at) for state, samples, at in compared for key in state.changed(samples))
        self._at_updates.clear()

    def _refusal(self, key: str, when: str) -> WatchError:
        """Return the error about a tensor that changed."""
        if key in self._trainable:
            return WatchError(
                f"{key} was written {when}, so it differs from its value after the last update, and the guarantee "
                "covers only weights that change by the noisy gradient. Remove the code that writes to it (a callback, "
                'a second optimizer, max_norm of an embedding); for an average of the weights, use average="ema" of '
                "DPTrainer or averaging of PrivateRun.attach, and evaluate other weights in copy.deepcopy(model). Load "
                "checkpoints before attach(), or register the run: accelerator.register_for_checkpointing(run)"
            )
        if (fixed := self._fixed[key]).kind == _OUTSIDE:
            return WatchError(
                f"A trainable tensor of shape {fixed.shape}, on which the losses depend but which the model does not "
                f"hold, was written {when}, perhaps by its own optimizer. Its gradients are neither clipped nor "
                "noised, so private rows would reach all later losses through it. Make it a part of the model, train "
                "it on public data only, or, if it follows the private weights, set requires_grad_(False)"
            )
        return WatchError(
            f"The {key} changed {when}. Values computed from private rows may reach the model only through "
            "the noisy gradient, not through running statistics, max_norm of an embedding, or weights written by a "
            "callback. Freeze the statistic, remove max_norm, or remove the callback; do not release any output of "
            "this run"
        )

    # -------------------------------------------------------------- the model

    def _check_places(self) -> None:
        """Check that every parameter is where it was, and watch buffers that a forward pass has made.

        Raises:
            WatchError: a parameter was replaced, added or removed; or a new buffer is saved or trainable.
        """
        if self._sharded or self._layout() == self._noted_layout:
            return
        now = dict(self._model.named_parameters(remove_duplicate=False))
        for name in sorted(self._places.keys() | now.keys()):
            if self._places.get(name) is not now.get(name):
                raise WatchError(
                    f"{name} is a different parameter than when the run was attached: it, or a module that holds it, "
                    "was replaced, added, removed or tied, and no noise covers the new one. Change the model before "
                    "the run is attached, or after it has ended, in a copy that is saved elsewhere"
                )
        for fixed in self._find_fixed():
            if fixed.kind == _BUFFER and fixed.key not in self._fixed and (fixed.saved or fixed.tensor().requires_grad):
                raise WatchError(
                    f"The buffer {fixed.name} was added to the model after the run was attached and would be saved "
                    "or trained without noise. Register it before the run starts, or with persistent=False"
                )
            if fixed.key not in self._fixed:
                self._watch(fixed)
        self._note_places()

    def _watch(self, fixed: _Fixed) -> None:
        """Watch a tensor from now on; the next comparison takes its sample."""
        (fixed.checksum,), fixed.shape = _checksums([fixed]), tuple(fixed.tensor().shape)
        self._fixed[fixed.key] = fixed

    def _check_parameters(self) -> None:
        """Check that the same parameters are trained as at the start.

        Raises:
            WatchError: a parameter was unfrozen or frozen.
        """
        frozen = self._frozen()
        what = [f"{name} was unfrozen" for name, tensor in frozen.items() if getattr(tensor, "requires_grad", 0)]
        what += [f"{name} was frozen" for name, parameter in self._trainable.items() if not parameter.requires_grad]
        if what:
            raise WatchError(
                f"{what[0]} after the run was attached: the clip norm covers only parameters that were trainable then. "
                "Set requires_grad before training starts; to change it, end the run and start another one"
            )

    def _frozen(self) -> dict[str, Any]:
        return {one.name: one.tensor() for one in self._fixed.values() if one.kind == _FROZEN}

    def _note_places(self) -> None:
        """Store the places of parameters and buffers; references keep the ids of `_layout` from being reused."""
        self._modules = list(self._model.modules())
        self._places = {} if self._sharded else dict(self._model.named_parameters(remove_duplicate=False))
        self._noted_layout = self._layout()

    def _layout(self) -> list[int | str]:
        """Return the id of each module and parameter, and the names of buffers, which compare faster than paths."""
        held = (parts for module in self._modules for parts in (module._modules, module._parameters))
        layout: list[int | str] = [id(part) for parts in held for part in parts.values()]
        buffers = (named for module in self._modules for named in module._buffers.items())
        return layout + [name for name, buffer in buffers if buffer is not None]

    def _find_fixed(self) -> Iterator[_Fixed]:
        seen = set(self._known)
        for path, module in self._model.named_modules():
            of_kind = {_FROZEN: module._parameters, _BUFFER: module._buffers, _SCALE: scales_of(module)}
            for kind, members in of_kind.items():
                for attribute, tensor in members.items():
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    # The names of the saved buffers: a public list of them would gather the whole state.
                    saved = attribute not in module._non_persistent_buffers_set
                    held: Callable[[], Any] = functools.partial(getattr, module, attribute, None)
                    if kind == _SCALE:
                        held = functools.partial(members.get, attribute)
                    if isinstance(tensor, DTensor):  # FSDP2 replaces the attribute temporarily
                        held = weakref.ref(tensor)
                    yield _Fixed(f"{path}.{attribute}".removeprefix("."), kind, held, saved)

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
                "missing), so it would use up part of the clip norm but never be trained. Give the run one optimizer "
                "with all trainable parameters (several can be joined in a torch.optim.Optimizer whose step() calls "
                "theirs), or freeze the parameter before the run is attached"
            )

    def _before_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        try:
            if any(callable(given) for given in (*args[1:], kwargs.get("closure"))):
                raise WatchError(
                    "optimizer.step() was called with a closure, which runs within the update and could replace "
                    "the private gradients. Call optimizer.step() without arguments"
                )
            self._refuse_extra(optimizer)
            self._compare_weights(_UNTIL_UPDATE)
            self._compare_fixed(_UNTIL_UPDATE, by_checksums=False)
            self._at_updates.append((self._weights, self._weights.read()))
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
                    f"optimizer.step() was called, and {name} has a gradient that no private step computed: the last "
                    "step failed, or a checkpoint was loaded after it. It would reach the weights without clipping and "
                    "noise. Do not step the optimizer after a failed step; resume from a checkpoint"
                )
            if (own is not None and own is not grad) or (grad is not None and stamp_of(grad) != stamp):
                raise WatchError(
                    f"The gradient of {name} changed after the private step computed it: something wrote to it, "
                    "replaced it or removed it (a second backward pass, gradient clipping, a callback). Run nothing "
                    "that touches .grad between the private step and optimizer.step(), and call zero_grad() after it"
                )

    def _after_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        del optimizer, args, kwargs
        self._accept_weights()
        # Only the stamps, to free the memory of the gradients.
        self._gradients = {name: (None, stamp) for name, (_, stamp) in self._gradients.items()}
        if self._after is not None:
            self._after()

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._hands_in is not None and not self._hands_in():
            name = self._known.get(id(parameter), "A parameter")
            raise WatchError(
                f"{name} received a gradient from a backward pass that is not part of a private step; DeepSpeed would "
                "add it to the private sum without noise. Run only private steps on this model while a run is "
                "attached, or use torch.no_grad()"
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter]]:
    yield from enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_grown(fixed: _Fixed) -> bool:
    """Return whether a cache that is not saved grew along one dimension and still begins with the old values."""
    tensor = fixed.tensor()
    if fixed.saved or tensor is None or len(tensor.shape) != len(fixed.shape):
        return False
    if sum(new != old for new, old in zip(tensor.shape, fixed.shape, strict=True)) != 1:
        return False
    start = tensor[tuple(map(slice, fixed.shape))]
    return start.shape == fixed.shape and Checksum([start]).value() == fixed.checksum


def _checksums(all_fixed: list[_Fixed]) -> list[int]:
    """Return the checksum of each tensor, with one read per device."""
    return values([Checksum([fixed.tensor()]) for fixed in all_fixed])


def _addresses(stamps: Mapping[str, Stamp]) -> list[tuple[str, list[int]]]:
    return [(key, [address for address, _ in stamp]) for key, stamp in stamps.items()]


def _views_of(tensors: Mapping[str, Any]) -> _Views:
    """Return views of at most 64 entries of each piece, as integers, by device and width."""
    views: _Views = defaultdict(list)
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
            views[part.device, part.dtype].append((key, part))
    return dict(views)


# ------------------------------------------------------------------------------------------------ learning rates


DECLARED = "learning rates and other decisions of the loop"
"""Name of the fact about a loop whose author has declared them independent of the private rows."""
INDEPENDENT = "declared independent of the private rows"
OWN_LOOP = (
    "The training uses a custom loop around the private steps. Its hyperparameters, such as the learning rate, and its "
    "decisions to update, load a checkpoint or stop must not depend on losses, evaluations or other figures of private "
    "rows (as with ReduceLROnPlateau): confirm it. For the next run, "
    "PrivateRun.attach(schedule_is_independent=True) declares it."
)
"""The open point of a run whose loop has not declared it."""
UNKNOWN = (
    "The learning rates of {kind} could not be computed before the training ({error}), so the ledger records them, but "
    "nothing checked them. Confirm that they depend on no loss, evaluation or other figure of private rows."
)
"""The open point of a run with a scheduler that cannot be copied."""
_TOLERANCE = 1e-9  # relative


class Ledger(Protocol):
    """Where the rates are recorded."""

    @property
    def num_steps(self) -> int:
        """Number of steps charged so far."""
        ...

    def note_rate(self, rate: str) -> None:
        """Record the learning rates of the last step's update."""
        ...

    def append_open_point(self, text: str) -> None:
        """Note a reason not to release."""
        ...


class LearningRates:
    """The rates with which an optimizer makes its updates.

    A rate that is a tensor on a device other than the CPU is read only in updates 1, 2, 4, 8, …, since reading it
    waits for the device.

    Args:
        optimizer: as prepared; wrappers are removed.
        ledger: ledger of the run.
    """

    def __init__(self, optimizer: Any, ledger: Ledger) -> None:
        """Begin without a schedule."""
        self._optimizer, self._ledger = innermost(optimizer), ledger
        self._scheduler: Any = None
        self._expected: list[list[float | None]] = []
        self._updates = 0

    def expect(self, scheduler: Any, num_updates: int) -> None:
        """Compute the rates of all future updates; add an open point if that is impossible.

        Args:
            scheduler: scheduler of the optimizer, in its state before the next update; it steps once after each update.
            num_updates: number of future updates.
        """
        self._scheduler, self._updates, self._expected = scheduler, 0, []
        self._refuse_other_base(scheduler)
        try:
            self._expected = scheduled_rates(scheduler, self._optimizer, num_updates)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._ledger.append_open_point(UNKNOWN.format(kind=type(scheduler).__name__, error=words))

    def expect_again(self, num_updates: int) -> None:
        """Recompute the rates of the future updates, after a checkpoint was loaded into the scheduler."""
        if self._scheduler is not None:
            self.expect(self._scheduler, num_updates)

    def _refuse_other_base(self, scheduler: Any) -> None:
        """Check that a schedule starts from the rates with which its optimizer was made.

        Raises:
            WatchError: something changed them, such as a learning-rate finder at the start of the training.
        """
        inside = getattr(scheduler, "scheduler", scheduler)
        given = [group.get("initial_lr") for group in self._optimizer.param_groups]
        base_lrs = inside.base_lrs if isinstance(inside, LambdaLR) else []  # all of transformers' schedules
        for base, initial in zip(base_lrs, given, strict=False):
            if initial is not None and not math.isclose(float(base), float(initial), rel_tol=_TOLERANCE):
                raise WatchError(
                    f"The scheduler starts from the learning rate {float(base):.10g}, but its optimizer was made with "
                    f"{float(initial):.10g}: a callback or the loop changed it, perhaps from figures of private rows "
                    "that ε does not cover. Set the rate in the optimizer (learning_rate)"
                )

    def note(self) -> None:
        """Record the rates of the next update, after comparing them with the schedule.

        Raises:
            WatchError: a rate differs from the schedule.
        """
        number, self._updates = self._updates, self._updates + 1
        reads = self._updates & number == 0
        rates = _rates_of(self._optimizer, reads)
        expected = self._expected[number] if number < len(self._expected) else [None] * len(rates)
        for rate, planned in zip(rates, expected, strict=False):
            if rate is None or planned is None or math.isclose(rate, planned, rel_tol=_TOLERANCE):
                continue
            raise WatchError(
                f"The learning rate of step {self._ledger.num_steps} is {rate:.10g}, but the schedule at the start of "
                f"the training planned {planned:.10g}: a callback or the loop changed it, perhaps from figures of "
                "private rows that ε does not cover, or the scheduler does not step once after each update. Remove "
                "that code, and pass the schedule to the trainer: optimizers=(optimizer, scheduler)"
            )
        if words := ", ".join(dict.fromkeys(f"{rate:.10g}" for rate in rates if rate is not None)):
            self._ledger.note_rate(words)


def scheduled_rates(scheduler: Any, optimizer: Any, num_updates: int) -> list[list[float | None]]:
    """Return the learning rates of each group in all future updates, from a copy of the scheduler.

    Args:
        scheduler: scheduler of the optimizer; accelerate's wrapper, which steps once for each process, is allowed.
        optimizer: the optimizer without wrappers.
        num_updates: number of updates.

    Raises:
        ValueError: the optimizer has relative steps, whose rates are in its state.
        Exception: raised by a scheduler that cannot be copied or needs its own optimizer.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    >>> scheduled_rates(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer, 3)
    [[0.5], [0.25], [0.125]]
    """
    if any(group.get("relative_step") for group in optimizer.param_groups):
        raise ValueError("the optimizer sets its rates from its own state")  # Adafactor, AdafactorSchedule
    times = 1
    if isinstance(scheduler, AcceleratedScheduler):
        if scheduler.step_with_optimizer and not scheduler.split_batches:
            times = AcceleratorState().num_processes
        scheduler = scheduler.scheduler
    stub = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in optimizer.param_groups], lr=0.0)
    for group, own in zip(stub.param_groups, optimizer.param_groups, strict=True):
        group |= {name: copy.deepcopy(value) for name, value in own.items() if name != "params"}
    optimizers = (optimizer, getattr(scheduler, "optimizer", None))
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps before the first update
        copied = copy.deepcopy(scheduler, {id(one): stub for one in optimizers if one is not None})
        for group, rate in zip(stub.param_groups, copied.get_last_lr(), strict=True):
            group["lr"] = rate
        for _ in range(num_updates):
            rates.append(_rates_of(stub, reads=True))
            for _ in range(times):
                if getattr(copied, "_step_count", 0) <= getattr(copied, "total_steps", math.inf):
                    copied.step()
    return rates


def _rates_of(optimizer: Any, reads: bool) -> list[float | None]:
    """Return the rate of each group; None: it has none, or it would have to be read from a device."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    unread = [rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu" and not reads) for rate in rates]
    return [None if skipped else float(rate) for rate, skipped in zip(rates, unread, strict=True)]
