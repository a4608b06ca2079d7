"""The watch over all changes of weights and saved state, in every step of a run.

Place in the flow: around each private step, and on the optimizer. The guarantee covers the noisy sum that a private
step leaves for the optimizer. Private data could reach the weights in other ways: a running statistic in a buffer, a
frozen embedding that is renormalised in its forward pass, a parameter that is unfrozen during the run, a loss with its
own parameter, a second optimizer. The watch refuses each of them when it happens:

* Buffers and frozen parameters do not change. Every step compares their version counters, which PyTorch raises at each
  write. A write through ``.data`` does not raise them, so a checksum of all of them is compared in the steps 1, 2, 4,
  8, … and before each save. A write that leaves the same values is allowed, and so is a cache that grows.
* Trained parameters change only within the optimizer's own ``step``, and not by its closure. Writes through ``.data``
  are found by sums over all bits, which every step compares on the device and every save reads
  (`dpllm.training.checks.written`). Other values may replace them temporarily, as averages do for an evaluation.
* The optimizer receives exactly the gradients of the private step, and none of another parameter.
* Trainable tensors outside the model, such as a head within the loss, do not change while losses depend on them: the
  graph of the independence check's losses is searched for them, in the steps 1, 2, 4, 8, ….
* The set of trainable parameters stays as it was when the run was attached, and no parameter or buffer is replaced by
  another: this is checked in the steps 1, 2, 4, 8, … and before each save.

Version counters are numbers on the host: the watch reads the device only when a checksum is due.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dpllm.engines.checksums import Checksum, pieces, values
from dpllm.engines.optimizers import innermost
from dpllm.ghost.graph import leaves_of
from dpllm.training.checks.written import Written

_DURING = "during a private step, by the model's forward pass, the loss or the collator"

Stamp = tuple[tuple[int, int], ...]
"""Address and version of each piece of a tensor on this process."""


class WatchError(ValueError):
    """Private data reached, or may have reached, weights or saved state outside of the mechanism."""


@dataclass
class _Fixed:
    """A tensor that must not change.

    Attributes:
        name: its path in the model.
        kind: "buffer" or "frozen parameter".
        holder: the module that has it.
        attribute: its name in that module.
        held: the object, if the engine replaces it temporarily (FSDP2). None: the holder's object.
        saved: whether it is part of the saved state.
        shape: its shape.
        stamp: see `Stamp`.
        checksum: checksum of its values.
    """

    name: str
    kind: str
    holder: nn.Module
    attribute: str
    held: Tensor | None
    saved: bool
    shape: tuple[int, ...] = ()
    stamp: Stamp = ()
    checksum: int = 0

    def tensor(self) -> Tensor | None:
        return self.held if self.held is not None else getattr(self.holder, self.attribute, None)


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
    ) -> None:
        """Store the state of all watched tensors, and hook the optimizer."""
        self._model, self._trainable, self._hands_in = model, dict(trainable), hands_in
        self._several = several
        self._deferred: WatchError | None = None
        self._known = {id(parameter): name for name, parameter in self._trainable.items()}
        self._sharded = any(isinstance(p, DTensor) for p in model.parameters())
        self._optimizer = innermost(optimizer)
        self._handles: list[Any] = []
        if hands_in is None:
            self._refuse_extra(self._optimizer)
            self._refuse_missing(self._optimizer)
            self._handles += [
                self._optimizer.register_step_pre_hook(self._before_update),
                self._optimizer.register_step_post_hook(self._after_update),
            ]
        else:
            self._handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._trainable.values()]
        self._steps = 0
        self._outside: dict[int, tuple[weakref.ref[Tensor], Stamp]] = {}
        self._weights, self._gradients = Written(), Written()
        self.rebase()

    def rebase(self) -> None:
        """Store the present state for later comparisons, after a checkpoint was loaded."""
        self._fixed = {(fixed.name, fixed.kind): fixed for fixed in self._find_fixed()}
        _take(self._fixed.values())
        self._stamps = self._trainable_stamps()
        self._places = self._find_places()
        self._weights.take(self._trainable.values())
        self._left: dict[int, tuple[Tensor | None, Stamp]] = {}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # ------------------------------------------------------------------ steps

    def before_step(self) -> None:
        """Compare with the state after the step before.

        Raises:
            WatchError: a tensor was written, unfrozen or frozen in between.
        """
        self._raise_deferred()
        self._check_trainable_set()
        self._check_fixed("between two private steps")
        self._check_weights("between two private steps, other than by optimizer.step()")
        self._check_outside()
        if self._is_due(self._steps + 1) or self._weights.at_hand:
            self._check_bits()
        self._left = {}

    def complete(self) -> None:
        """Compare when the private gradient is formed, before any update.

        Raises:
            WatchError: forward or backward pass, loss or collator wrote to a watched tensor.
        """
        self._steps += 1
        due = self._is_due(self._steps)
        self._check_trainable_set()
        if due:
            self._take_in_new_buffers()
            self._check_places()
        if self._hands_in is not None:  # the engine updates next
            self._weights.compare(self._trainable.values())
            if due or self._weights.at_hand:
                self._check_bits()
        self._check_fixed(_DURING, everything=due)
        self._check_weights(_DURING)
        for fixed in self._fixed.values():
            tensor = fixed.tensor() if fixed.kind == "frozen parameter" else None
            if tensor is not None and tensor.grad is not None:
                raise WatchError(
                    f"{fixed.name} is not trained and received a gradient {_DURING}: it is not clipped, and no noise "
                    "covers it. Set requires_grad of all parameters before the run is attached"
                )

    def explain(self) -> None:
        """Name a written tensor when the passes of a step have failed, since it is the likeliest cause.

        Raises:
            WatchError: a buffer or a frozen parameter changed.
        """
        self._check_fixed(_DURING, everything=True)

    def note_gradients(self) -> None:
        """Store the gradients of the private step in ``.grad``; the optimizer must receive exactly these."""
        if self._hands_in is not None:
            self._weights.take(self._trainable.values())
            return
        with torch.no_grad():
            self._left = {id(p): (p.grad, _stamp(p.grad)) for p in self._trainable.values() if p.grad is not None}
        self._gradients = Written()
        if self._is_due(self._steps):
            self._gradients.take(self._grads())

    def look(self, loss_B: Tensor) -> Tensor:
        """Return the losses, and watch the trainable tensors outside the model that they depend on."""
        self._outside = {key: one for key, one in self._outside.items() if one[0]() is not None}
        for leaf in leaves_of(loss_B) if isinstance(loss_B, Tensor) else ():
            if id(leaf) not in self._known:
                self._outside.setdefault(id(leaf), (weakref.ref(leaf), _stamp(leaf)))
        return loss_B

    def is_written(self) -> bool:
        """Return whether a trained parameter is not as the last update left it, to the bit; waits for the device."""
        return self._weights.differ(self._trainable.values())

    def check_everything(self) -> None:
        """Compare all buffers and frozen parameters by their values; before each save, and at the end.

        Raises:
            WatchError: one changed since the run was attached, or something other than the optimizer wrote to a trained
                parameter.
        """
        self._raise_deferred()
        self._check_fixed("after a private step, before weights were saved", everything=True)
        self._check_weights("after optimizer.step(), before weights were saved")
        self._check_places()
        self._weights.compare(self._trainable.values())
        self._check_bits()

    # ----------------------------------------------------------------- checks

    @staticmethod
    def _is_due(step: int) -> bool:
        """Return whether a step is 1, 2, 4, 8 and so on."""
        return step & (step - 1) == 0

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._trainable.values() if p.grad is not None]

    def _check_bits(self) -> None:
        if self._weights.found():
            raise WatchError(
                "A trained parameter was written between two updates past PyTorch's version counters (through .data, "
                "or another view of its memory). The guarantee covers only weights that change by the noisy gradient. "
                "Remove the code that writes to it (a model, loss, collator or callback that uses .data); do not "
                "release any output of this run"
            )

    def _find_places(self) -> dict[str, int]:
        """Return the tensor at each path of the model, except where the engine replaces it temporarily."""
        if self._sharded:
            return {}
        return {name: id(p) for name, p in self._model.named_parameters(remove_duplicate=False)}

    def _check_places(self) -> None:
        now = self._find_places()
        moved = [name for name in self._places.keys() | now.keys() if self._places.get(name) != now.get(name)]
        if moved:
            raise WatchError(
                f"{min(moved)} is another parameter than when the run was attached: it, or a module that holds it, was "
                "replaced, added or removed. No noise covers the new one. Change the model before the run is attached, "
                "or after it has ended, in a copy that is saved elsewhere"
            )

    def _find_fixed(self) -> list[_Fixed]:
        found, seen = [], set(self._known)
        for path, module in self._model.named_modules():
            for kind, members in (
                ("frozen parameter", module.named_parameters(recurse=False)),
                ("buffer", module.named_buffers(recurse=False)),
            ):
                for attribute, tensor in members:
                    if id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    # The names of the saved buffers: a public list of them would gather the whole state.
                    saved = attribute not in getattr(module, "_non_persistent_buffers_set", ())
                    held = tensor if isinstance(tensor, DTensor) else None
                    name = f"{path}.{attribute}" if path else attribute
                    found.append(_Fixed(name, kind, module, attribute, held, saved))
        return found

    def _take_in_new_buffers(self) -> None:
        """Watch buffers that a forward pass has made.

        Raises:
            WatchError: one is part of the saved state, or a trainable parameter was added.
        """
        if self._sharded:  # modules hold other tensors temporarily
            return
        new = [fixed for fixed in self._find_fixed() if (fixed.name, fixed.kind) not in self._fixed]
        for fixed in new:
            tensor = fixed.tensor()
            if fixed.saved or (tensor is not None and tensor.requires_grad):
                raise WatchError(
                    f"The {fixed.kind} {fixed.name} was added to the model after the run was attached, and it would be "
                    "saved or trained: no noise covers it. Register it before the run starts, or with persistent=False"
                )
        _take(new)
        self._fixed.update({(fixed.name, fixed.kind): fixed for fixed in new})

    def _check_fixed(self, when: str, everything: bool = False) -> None:
        with torch.no_grad():
            suspects = [f for f in self._fixed.values() if everything or _stamp(f.tensor()) != f.stamp]
            if not suspects:
                return
            for fixed, checksum in zip(suspects, _checksums([f.tensor() for f in suspects]), strict=True):
                tensor = fixed.tensor()
                if checksum != fixed.checksum and not _has_grown(fixed, tensor):
                    raise WatchError(
                        f"The {fixed.kind} {fixed.name} changed {when}. Values computed from private rows must reach "
                        "the model only through the noisy gradient, unlike running statistics, max_norm of an "
                        "embedding, or weights written by a callback. Freeze the statistic, leave max_norm out, or "
                        "remove the callback; do not release any output of this run"
                    )
                fixed.checksum, fixed.stamp, fixed.shape = checksum, _stamp(tensor), _shape(tensor)

    def _check_outside(self) -> None:
        for reference, stamp in self._outside.values():
            leaf = reference()
            if leaf is not None and _stamp(leaf) != stamp:
                raise WatchError(
                    f"A trainable tensor of shape {tuple(leaf.shape)}, which the losses depend on and the model does "
                    "not hold, was written between two private steps (perhaps by its own optimizer). Its gradients are "
                    "not clipped and get no noise, so private rows would reach all later losses through it. Make it a "
                    "part of the model, train it on public data only, or, if it follows the private weights, remove it "
                    "from the graph (requires_grad_(False))"
                )

    def _check_trainable_set(self) -> None:
        frozen = [name for name, p in self._trainable.items() if not p.requires_grad]
        unfrozen = [
            fixed.name
            for fixed in self._fixed.values()
            if fixed.kind == "frozen parameter" and (tensor := fixed.tensor()) is not None and tensor.requires_grad
        ]
        if frozen or unfrozen:
            what = f"{unfrozen[0]} was unfrozen" if unfrozen else f"{frozen[0]} was frozen"
            raise WatchError(
                f"{what} after the run was attached: the clip norm covers only parameters that were trainable then. "
                "Set requires_grad before training starts; to change it, end the run and start another one"
            )

    def _trainable_stamps(self) -> list[Stamp]:
        if self._hands_in is not None:
            return []
        with torch.no_grad():
            return [_stamp(parameter) for parameter in self._trainable.values()]

    def _check_weights(self, when: str) -> None:
        stamps = self._trainable_stamps()
        if self._stamps != stamps and not self.is_written():  # written, and put back
            self._stamps = stamps
        for name, before, now in zip(self._trainable, self._stamps, stamps, strict=False):
            if before != now:
                raise WatchError(
                    f"{name} was written {when}. The guarantee covers only weights that change by the noisy gradient. "
                    "Remove the code that writes to it (a callback, a second optimizer, max_norm of an embedding). "
                    "Load a checkpoint before attach(), or register the run with "
                    "accelerator.register_for_checkpointing(run)"
                )

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
        self._weights.compare(self._trainable.values())
        try:
            _refuse_closure(args, kwargs)
            self._check_update(optimizer)
        except WatchError as error:
            if not self._several:
                raise
            self._deferred = self._deferred or error
            for _, parameter in _parameters_of(optimizer):
                parameter.grad = None

    def _raise_deferred(self) -> None:
        if self._deferred is not None:
            raise self._deferred

    def _check_update(self, optimizer: Optimizer) -> None:
        self._refuse_extra(optimizer)
        if not self._left:  # before the first step, which the guard refuses
            return
        with torch.no_grad():
            for name, parameter in self._trainable.items():
                grad = parameter.grad
                left, stamp = self._left.get(id(parameter), (None, ()))
                if grad is None and left is None:
                    continue
                if grad is None:
                    raise WatchError(
                        f"The gradient of {name} was taken away between the private step and optimizer.step(): a "
                        "choice that follows private rows would reach the weights. Run nothing in between that "
                        "touches .grad, and zero_grad() after optimizer.step()"
                    )
                if stamp != _stamp(grad) or (left is not None and left is not grad):
                    raise WatchError(
                        f"The gradient of {name} is not the one that the private step left: something wrote to it or "
                        "replaced it (a second backward pass, gradient clipping, a callback). Run nothing between the "
                        "private step and optimizer.step() that touches .grad"
                    )
        self._check_weights("between the private step and optimizer.step()")
        if self._is_due(self._steps) or self._weights.at_hand:
            self._check_bits()
        self._gradients.compare(self._grads())
        if self._gradients.found():
            raise WatchError(
                "A gradient was written past PyTorch's version counters (through .grad.data) between the private step "
                "and optimizer.step(). Run nothing in between that touches .grad"
            )

    def _after_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        del optimizer, args, kwargs
        self._stamps = self._trainable_stamps()
        self._weights.take(self._trainable.values())
        self._gradients = Written()
        # References to the gradients are dropped here, since their memory is needed.
        with torch.no_grad():
            self._left = {key: (None, _stamp(grad)) for key, (grad, _) in self._left.items() if grad is not None}

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._hands_in is not None and not self._hands_in():
            name = self._known.get(id(parameter), "A parameter")
            raise WatchError(
                f"{name} received a gradient from a backward pass that is not part of a private step; DeepSpeed would "
                "add it to the private sum without noise. Run only private steps on this model while a run is "
                "attached, or use torch.no_grad()"
            )


def _refuse_closure(args: tuple, kwargs: dict) -> None:
    """Raise `WatchError` for ``optimizer.step(closure)``: ``args`` begins with the optimizer itself."""
    if any(callable(given) for given in (*args[1:], kwargs.get("closure"))):
        raise WatchError(
            "optimizer.step() was called with a closure, which runs within the update and could write other gradients "
            "than the private one. Call optimizer.step() without arguments"
        )


def _parameters_of(optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter]]:
    yield from enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])


def _stamp(tensor: Any) -> Stamp:
    return tuple((piece.data_ptr(), 0 if piece.is_inference() else piece._version) for piece in pieces(tensor))


def _shape(tensor: Any) -> tuple[int, ...]:
    return () if tensor is None else tuple(tensor.shape)


def _take(all_fixed: Iterable[_Fixed]) -> None:
    with torch.no_grad():
        taken = list(all_fixed)
        for fixed, checksum in zip(taken, _checksums([f.tensor() for f in taken]), strict=True):
            fixed.checksum, fixed.stamp = checksum, _stamp(fixed.tensor())
            fixed.shape = _shape(fixed.tensor())


def _has_grown(fixed: _Fixed, tensor: Any) -> bool:
    """Return whether a cache that is not saved grew along one dimension and still begins with the old values."""
    if fixed.saved or tensor is None or len(tensor.shape) != len(fixed.shape) or not fixed.shape:
        return False
    longer = [dim for dim, (new, old) in enumerate(zip(tensor.shape, fixed.shape, strict=True)) if new != old]
    if len(longer) != 1 or tensor.shape[longer[0]] < fixed.shape[longer[0]]:
        return False
    return _checksums([tensor.narrow(longer[0], 0, fixed.shape[longer[0]])]) == [fixed.checksum]


def _checksums(tensors: Iterable[Any]) -> list[int]:
    """Return the checksum of each tensor, with one read per device."""
    return values([Checksum([tensor]) for tensor in tensors])
