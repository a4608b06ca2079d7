"""The watch over all changes of weights and saved state, in every step of a run.

Place in the flow: around each private step, and on the optimizer. The guarantee covers the noisy sum that a private
step leaves for the optimizer. Private data could reach the weights in other ways: a running statistic in a buffer, a
frozen embedding that is renormalised in its forward pass, a parameter that is unfrozen during the run, a loss with its
own parameter, a second optimizer. The watch refuses each of them when it happens:

* Buffers and frozen parameters do not change. Every step compares their version counters, which PyTorch raises at each
  write. A write through ``.data`` does not raise them, so a checksum of all of them is compared in the steps 1, 2, 4,
  8, … and before each save. A write that leaves the same values is allowed, and so is a cache that grows.
* Trained parameters change only within the optimizer's own ``step``, and not by its closure: every step compares their
  version counters, and every save a checksum with that of the last update. Other values may replace them temporarily,
  as averages do for an evaluation.
* The optimizer receives exactly the gradients of the private step, and none of another parameter.
* Trainable tensors outside the model, such as a head within the loss, do not change while losses depend on them: the
  graph of the independence check's losses is searched for them, in the steps 1, 2, 4, 8, ….
* The set of trainable parameters stays as it was when the run was attached, and no parameter or buffer is replaced by
  another: this is checked in the steps 1, 2, 4, 8, … and before each save.

Version counters are numbers on the host: the watch reads the device only when a checksum is due.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpllm.engines.checksums import Checksum, values
from dpllm.engines.optimizers import innermost
from dpllm.ghost.graph import leaves_of
from dpllm.training.checks.fixed import FixedTensors
from dpllm.training.checks.stamps import Stamp, WatchError, stamp_of


class TrainedWeights:
    """The trained weights of a run, from one update to the next; they change only within the optimizer's ``step``.

    A checksum is queued right after an update, without a wait; it is read before a save, and where a version counter
    has moved: weights that were written and put back are the same.

    Args:
        trainable: the clipped parameters, by name.
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter]) -> None:
        """Store the present weights."""
        self._trainable = trainable
        self.take()

    def take(self) -> None:
        """Store the present weights, right after an update."""
        self._stamps = self._stamps_of_now()
        self._sum = self._sum_of_now()

    def is_written(self) -> bool:
        """Return whether a weight is not as the last update left it, to the bit; waits for the device."""
        before, now = values([self._sum, self._sum_of_now()])
        return before != now

    def check(self, when: str) -> None:
        """Compare the version counters; weights that were written and put back are accepted.

        Args:
            when: the moment of the write, for the message.

        Raises:
            WatchError: a weight was written.
        """
        stamps = self._stamps_of_now()
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

    def check_values(self) -> None:
        """Compare the values with those that the last update left; waits for the device.

        Raises:
            WatchError: a weight has another value.
        """
        if self.is_written():
            raise WatchError(
                "A trained parameter is not as the last update left it, and no version counter of PyTorch shows when "
                "it was written (through .data, or another view of its memory). The guarantee covers only weights that "
                "change by the noisy gradient. Remove the code that writes to it; do not release any output of this "
                "run"
            )

    def _sum_of_now(self) -> Checksum:
        with torch.no_grad():
            return Checksum(self._trainable.values())

    def _stamps_of_now(self) -> list[Stamp]:
        with torch.no_grad():
            return [stamp_of(parameter) for parameter in self._trainable.values()]


class PrivateGradients:
    """The gradients that a private step left in ``.grad``; the optimizer receives exactly these.

    Attributes:
        are_left: whether a step has left gradients.

    Args:
        trainable: the clipped parameters, by name.
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter]) -> None:
        """Begin without gradients."""
        self._trainable = trainable
        self._left: dict[int, tuple[Tensor | None, Stamp]] = {}

    @property
    def are_left(self) -> bool:
        """Whether a step has left gradients."""
        return bool(self._left)

    def forget(self) -> None:
        """Forget the gradients, before the next step."""
        self._left = {}

    def take(self) -> None:
        """Store the gradients of the private step."""
        with torch.no_grad():
            self._left = {id(p): (p.grad, stamp_of(p.grad)) for p in self._trainable.values() if p.grad is not None}

    def check(self) -> None:
        """Compare the gradients before an update.

        Raises:
            WatchError: one was written, replaced or taken away.
        """
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
                if stamp != stamp_of(grad) or (left is not None and left is not grad):
                    raise WatchError(
                        f"The gradient of {name} is not the one that the private step left: something wrote to it or "
                        "replaced it (a second backward pass, gradient clipping, a callback). Run nothing between the "
                        "private step and optimizer.step() that touches .grad"
                    )

    def drop(self) -> None:
        """Keep only the stamps after an update: the memory of the gradients is needed."""
        with torch.no_grad():
            self._left = {key: (None, stamp_of(grad)) for key, (grad, _) in self._left.items() if grad is not None}


class OutsideTensors:
    """The trainable tensors outside the model, such as a head within the loss, that losses were seen to depend on.

    Their gradients are neither clipped nor given noise, so they do not change while losses depend on them.

    Args:
        trained: the ids of the clipped parameters.
    """

    def __init__(self, trained: Collection[int]) -> None:
        """Begin without tensors."""
        self._trained = frozenset(trained)
        self._seen: dict[int, tuple[weakref.ref[Tensor], Stamp]] = {}

    def look(self, loss_B: Tensor) -> Tensor:
        """Return the losses, and watch the trainable tensors outside the model that they depend on."""
        self._seen = {key: one for key, one in self._seen.items() if one[0]() is not None}
        for leaf in leaves_of(loss_B) if isinstance(loss_B, Tensor) else ():
            if id(leaf) not in self._trained:
                self._seen.setdefault(id(leaf), (weakref.ref(leaf), stamp_of(leaf)))
        return loss_B

    def check(self) -> None:
        """Check that none was written.

        Raises:
            WatchError: one was, between two private steps.
        """
        for reference, stamp in self._seen.values():
            leaf = reference()
            if leaf is not None and stamp_of(leaf) != stamp:
                raise WatchError(
                    f"A trainable tensor of shape {tuple(leaf.shape)}, which the losses depend on and the model does "
                    "not hold, was written between two private steps (perhaps by its own optimizer). Its gradients are "
                    "not clipped and get no noise, so private rows would reach all later losses through it. Make it a "
                    "part of the model, train it on public data only, or, if it follows the private weights, remove it "
                    "from the graph (requires_grad_(False))"
                )


_DURING = "during a private step, by the model's forward pass, the loss or the collator"


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
        self._trainable, self._hands_in, self._several = dict(trainable), hands_in, several
        self._known = {id(parameter): name for name, parameter in self._trainable.items()}
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
        self._steps = 0
        self._fixed = FixedTensors(model, self._known)
        self._weights = TrainedWeights(self._trainable)
        self._gradients, self._outside = PrivateGradients(self._trainable), OutsideTensors(self._known)

    def rebase(self) -> None:
        """Store the present state for later comparisons, after a checkpoint was loaded."""
        self._fixed.rebase()
        self._weights.take()
        self._gradients.forget()

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
        self._fixed.check("between two private steps")
        self._weights.check("between two private steps, other than by optimizer.step()")
        self._outside.check()
        self._gradients.forget()

    def complete(self) -> None:
        """Compare when the private gradient is formed, before any update.

        Raises:
            WatchError: forward or backward pass, loss or collator wrote to a watched tensor.
        """
        self._steps += 1
        due = self._is_due(self._steps)
        self._check_trainable_set()
        if due:
            self._fixed.take_in_new()
            self._fixed.check_places()
        self._fixed.check(_DURING, everything=due)
        self._weights.check(_DURING)
        self._fixed.refuse_gradients(_DURING)

    def explain(self) -> None:
        """Name a written tensor when the passes of a step have failed, since it is the likeliest cause.

        Raises:
            WatchError: a buffer or a frozen parameter changed.
        """
        self._fixed.check(_DURING, everything=True)

    def note_gradients(self) -> None:
        """Store the gradients of the private step in ``.grad``; the optimizer must receive exactly these."""
        if self._hands_in is None:
            self._gradients.take()
        else:
            self._weights.take()

    def look(self, loss_B: Tensor) -> Tensor:
        """Return the losses, and watch the trainable tensors outside the model that they depend on."""
        return self._outside.look(loss_B)

    def is_written(self) -> bool:
        """Return whether a trained parameter is not as the last update left it, to the bit; waits for the device."""
        return self._weights.is_written()

    def check_everything(self) -> None:
        """Compare all buffers and frozen parameters by their values; before each save, and at the end.

        Raises:
            WatchError: one changed since the run was attached, or something other than the optimizer wrote to a trained
                parameter.
        """
        self._raise_deferred()
        self._fixed.check("after a private step, before weights were saved", everything=True)
        self._weights.check("after optimizer.step(), before weights were saved")
        self._fixed.check_places()
        self._weights.check_values()

    # ----------------------------------------------------------------- checks

    @staticmethod
    def _is_due(step: int) -> bool:
        """Return whether a step is 1, 2, 4, 8 and so on."""
        return step & (step - 1) == 0

    def _check_trainable_set(self) -> None:
        frozen = [name for name, p in self._trainable.items() if not p.requires_grad]
        unfrozen = self._fixed.unfrozen()
        if frozen or unfrozen:
            what = f"{unfrozen[0]} was unfrozen" if unfrozen else f"{frozen[0]} was frozen"
            raise WatchError(
                f"{what} after the run was attached: the clip norm covers only parameters that were trainable then. "
                "Set requires_grad before training starts; to change it, end the run and start another one"
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
        if not self._gradients.are_left:
            given = [name for name, parameter in self._trainable.items() if parameter.grad is not None]
            if given:  # the guard says so before the first step
                raise WatchError(
                    f"optimizer.step() was called, and {given[0]} has a gradient that no private step left: the last "
                    "step failed, or a checkpoint was loaded after it. It would reach the weights without clipping and "
                    "noise. Do not step the optimizer after a step that failed; resume from a checkpoint"
                )
            return
        self._gradients.check()
        self._weights.check("between the private step and optimizer.step()")

    def _after_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        del optimizer, args, kwargs
        self._weights.take()
        self._gradients.drop()

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
