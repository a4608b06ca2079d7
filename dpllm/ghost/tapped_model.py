"""A model with taps: its calls, and its clipper's backward passes.

Two hooks on the model itself mark the beginning and the end of a call; no inner module has one. The first call, and
later ones with new layouts, determine how each module is tapped (`dpllm.ghost.weights_check`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dpllm.ghost.attach import Ladder, another_clipper
from dpllm.ghost.blocks import Blocks
from dpllm.ghost.model_calls import ModelCalls, rows_of_call, tokens_of_call
from dpllm.ghost.parameters import TrainedParameters, state_of_gradient
from dpllm.ghost.refusals import GhostError, MissedUseError, NoRuleError, refuse_compiled
from dpllm.ghost.taps import Call, NoTapError, Target
from dpllm.ghost.weights_check import Inputs, WeightsCheck

if TYPE_CHECKING:
    from dpllm.ghost.clipper import GhostClipper


class _RootHook:
    """A hook on the model; in a copy or a pickle of the model it does nothing, and needs no clipper."""

    def __init__(self, owner: TappedModel, run: Callable[..., Any]) -> None:
        self.owner, self._run = owner, run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments and returns None


def refuse_clipped(modules: Iterable[nn.Module], other_than: TappedModel | None = None) -> None:
    """Check that no clipper is attached to these modules, except one.

    Raises:
        GhostError: a different clipper is attached, and would receive the gradients of this one's losses.
    """
    hooks = (hook for module in modules for hook in module._forward_pre_hooks.values())
    if any(isinstance(hook, _RootHook) and hook.owner is not other_than for hook in hooks):
        raise another_clipper("The model")


class TappedModel:
    """The taps of one model; it is their `dpllm.ghost.taps.Host`.

    Args:
        model: any module whose inputs and outputs have the batch's rows first.
        trained: its trained parameters.
        receiver: receives the taps' uses.

    Attributes:
        call: the last call of the model, until its backward pass ends.
        calls: the calls since the last backward pass.
        in_forward: whether the model's forward pass is running.
        in_backward: whether a backward pass of the clipper is running.
        uses: how often these calls used each parameter, by its name.
        ladder: how each module is tapped.
        blocks: the compiled blocks.

    Raises:
        GhostError: see `dpllm.ghost.attach.Ladder`.
    """

    def __init__(self, model: nn.Module, trained: TrainedParameters, receiver: GhostClipper) -> None:
        """Find the trained parameters; modules are swapped in the model's first call."""
        self.model, self.trained, self.receiver = model, trained, receiver
        self.record = receiver.record
        self.call: Call | None = None
        self.calls = ModelCalls(model)
        self.in_forward = self.in_backward = False
        self.uses: Counter[str] = Counter()
        self._uses_before: Counter[str] = Counter()  # this call of the model
        self._is_first = True  # of the calls for a loss
        self._is_stale = False  # whether modules are tapped differently than in an earlier call for the same loss
        # Taps of parameters whose modules got several tokens of each row in their first dimension only in this call.
        self._unseen: set[tuple[str, int, str]] = set()
        self._is_own = False  # whether the model is called again from within
        self._computes_again = False  # because its own forward was swapped after the call had begun
        self._is_settled = False  # whether no later call, on any process, can reveal more
        self.ladder = Ladder(model, self, trained.by_name)
        self.blocks = Blocks(model, self, self.ladder)
        self._check = WeightsCheck(self)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_RootHook(self, self._begin), prepend=True, with_kwargs=True),
            model.register_forward_hook(_RootHook(self, self._end), with_kwargs=True, always_call=True),
        ]
        if not trained.sharded:
            self._handles += [p.register_hook(self._guard(name)) for name, p in trained.by_name.items()]

    def _guard(self, name: str) -> Callable[[Tensor | None], None]:
        """Return a hook that raises for a parameter's gradient, before DeepSpeed's own hook receives it."""

        def refuse(gradient: Tensor | None) -> None:
            if gradient is not None and self.in_backward:  # engines may pass sums through autograd at other times
                raise MissedUseError(name)

        refuse.is_guard = True  # type: ignore[attr-defined]  # for clippers of other models that share the parameter
        return refuse

    # ------------------------------------------------------------------------------------ interface for taps

    def expect(self, parameter: nn.Parameter) -> None:
        """See `dpllm.ghost.GhostClipper.expect`."""
        if not self.in_forward or self._check.runs:
            raise GhostError("A parameter use is announced outside a call of the model. Announce it during the call.")
        self.uses[self.ladder.target_of(parameter).name] += 1

    def refuse_bypass(self, path: str) -> None:
        """See `dpllm.ghost.taps.Host`."""
        if not WeightsCheck.plain_passes:
            raise NoRuleError(
                f"{path} was called directly, with gradients enabled. Call the model passed to GhostClipper, so that "
                "every parameter use is seen; wrap evaluation in torch.no_grad()."
            )

    def flattens(self, targets: Sequence[Target], way: str = "tap") -> None:
        """See `dpllm.ghost.taps.Host`."""
        found = {(target.name, self.ladder.rungs.get(target.name, 0), way) for target in targets}
        if self._check.runs:
            self._check.flat |= found
        elif not self.trained.sharded and not found <= self._check.flat:
            if not self.in_forward:
                raise NoTapError(targets, "a module's tensor has several tokens of each row in its first dimension")
            self._unseen |= found

    # ------------------------------------------------------------------------------------------------- calls

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._is_own or not torch.is_grad_enabled():
            return
        self.break_off()
        refuse_clipped([model], other_than=self)
        refuse_compiled(model)
        first = self._is_first = self.calls.begin(args, kwargs)
        if first:
            self._is_stale = False
            self.blocks.take_over()
        self._computes_again = False
        self._settle_once(args, kwargs, again=first and self._check.begin_loss())
        if first:
            self.blocks.attach()
            self.uses.clear()
        self._uses_before = self.uses.copy()
        self._unseen.clear()
        self.start(self.calls.rows or 1)

    def start(self, rows: int) -> None:
        """Begin a call with these input rows."""
        packed, lengths = self.calls.packed, self.calls.lengths
        self.call, self.in_forward = Call(self, rows, packed, lengths, settles=self._check.runs), True
        self.receiver.begin_call(self.call)

    def own(self, inputs: Inputs) -> Any:
        """Call the model again, without its hooks treating this as a separate call."""
        self._is_own = True
        # DeepSpeed's hook on the model ends the recorded order in which ZeRO-3 gathers. A record of a forward pass
        # alone would make it release each weight after its forward, in all later steps (its sets are cached).
        is_partitioned = any(hasattr(p, "ds_id") for p in self.trained.by_name.values())
        run: Any = self.model.forward if is_partitioned and not self.model._parameters else self.model
        try:
            return run(*inputs.args, **inputs.kwargs)
        finally:
            self._is_own = False

    def _end(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._is_own or not self.in_forward:
            return output
        if output is not None and (self._unseen or self._computes_again):
            output = self._compute_again(Inputs(args, kwargs, self.calls.rows or 1))
        self.in_forward = False
        if output is not None:
            self.calls.end()
        return output

    def _compute_again(self, inputs: Inputs) -> Any:
        """Repeat a call of the model, after a comparison if a module got its rows in a new layout."""
        if self._unseen:
            unseen = self._unseen.copy()
            self._settle(inputs)
            self._check.flat |= unseen  # a few rows may not reproduce it
            self.receiver.check_rows_again()
            if self._is_first:
                self.blocks.attach()
        self.uses = self._uses_before.copy()
        self.start(inputs.rows)
        return self.own(inputs)

    def break_off(self) -> None:
        """End a call of the model that Ctrl-C interrupted: PyTorch runs hooks only after an `Exception`."""
        self.in_forward, self.call = False, None

    def stop(self) -> None:
        """Release the tensors of a pass."""
        self.blocks.tell()
        self.calls.packed.stop()
        if self.call is not None:
            self.call.forget()

    def prepare(self, kwargs: dict) -> None:
        """Choose the rungs for a call with these inputs, before the first call of a loss."""
        rows = rows_of_call((), kwargs)
        if rows is not None and not self._check.covers(rows, tokens_of_call((), kwargs), is_packed=False):
            self._is_first = self.calls.begin((), kwargs)
            try:
                self._settle_once((), kwargs)
            finally:
                self.calls.spend()

    def _settle_once(self, args: tuple, kwargs: dict, again: bool = False) -> None:
        """Choose the rungs if no previous call was as informative, or again on request."""
        packed = len(self.calls.packed.lengths)
        rows = packed or self.calls.rows
        if rows is None:
            return
        needed = again or not self._check.covers(rows, self.calls.tokens, packed > 0)
        if self.receiver.any_of is not None and not self._is_settled:
            # A comparison runs the model again, and processes that shard it communicate then: all of them run it, or
            # none.
            needed, is_open = self.receiver.any_of([needed, not self._check.covers(2, 2, packed > 0)])
            self._is_settled = not needed and not is_open
        if needed:
            self._settle(Inputs(args, kwargs, rows))

    def _settle(self, inputs: Inputs) -> None:
        before, was_compiled = dict(self.ladder.rungs), bool(self.blocks.compiled.blocks)
        self.blocks.detach()
        self._check.settle(inputs)
        self._is_stale |= not self._is_first and (was_compiled or self.ladder.rungs != before)
        self._computes_again = self.ladder.touches(self.model)

    # ---------------------------------------------------------------------------------------- backward passes

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Enter a backward pass of the clipper, with taps in recomputed modules.

        Raises:
            MissedUseError: a sharded parameter's gradient was written.
        """
        watched = dict(self.trained.by_name) if self.trained.sharded else {}
        before = {name: state_of_gradient(parameter) for name, parameter in watched.items()}
        self.in_backward = True
        is_stale = self._is_stale and not self._check.runs
        try:
            with _refused_recomputation(self.model) if is_stale else contextlib.nullcontext():
                yield
        except NoTapError as error:
            if self._check.runs:
                raise
            raise NoRuleError(
                f"{error}. This differs from the call in which the taps were compared with the model. Run backward for "
                "each loss before the next call of the model, or freeze these parameters."
            ) from error
        finally:
            self.in_backward = False
        for name, parameter in watched.items():
            if state_of_gradient(parameter) != before[name]:
                parameter.grad = None
                raise MissedUseError(name)

    def remove(self) -> None:
        """Restore every module's class, and remove the hooks."""
        self.break_off()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.blocks.remove()
        self.ladder.detach()


@contextlib.contextmanager
def _refused_recomputation(model: nn.Module) -> Iterator[None]:
    """Refuse recomputation of modules in a backward pass whose taps have changed since their forward pass."""
    own = {id(module) for module in model.modules()}

    def refuse(module: nn.Module, _: tuple) -> None:
        if id(module) in own:
            raise GhostError(
                "A model call for this loss had rows and tokens in a new shape, so the taps were compared with plain "
                "autograd and chosen again, and activation checkpointing now recomputes an earlier call with the new "
                "taps. Compute the losses again: the taps now fit all of these calls."
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
