"""A model with taps: its calls, the ladder that is settled in the first of them, and the passes that may reach it.

Place in the flow: between the model's call and the clipper, which takes what the taps hand over. Two hooks on the model
itself mark the beginning and the end of a call. No module inside has one.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dpllm.ghost import kernels
from dpllm.ghost import weights_check as check
from dpllm.ghost.attach import Ladder, another_clipper
from dpllm.ghost.blocks import Blocks
from dpllm.ghost.contributions import Use
from dpllm.ghost.errors import CoupledError, GhostError, NoRuleError, is_shortage
from dpllm.ghost.model_calls import ModelCalls, rows_of_call, tokens_of_call
from dpllm.ghost.parameters import TrainedParameters, nodes_of, state_of_gradient
from dpllm.ghost.refusals import refuse_compiled
from dpllm.ghost.taps import Call, NoTapError, Target

logger = logging.getLogger(__name__)

_PLAINLY: list[object] = []
"""Whose plain pass runs now: gradients may reach trained parameters, which models may share."""


class Receiver(Protocol):
    """What a tapped model needs of the clipper."""

    def arrived(self, *tensors: Tensor) -> None:
        """Note tensors that came out of a backward pass."""
        ...

    def record(self, target: Target, use: Use) -> None:
        """Take the contribution of one use of a parameter to the gradient of each row."""
        ...

    def weighted_sums(self, loss_B: Tensor, weight_B: Tensor) -> Callable[[str], Tensor]:
        """Differentiate losses by taps; return the sum of a parameter's row gradients with these weights, by name."""
        ...

    def refuse_coupled(self, loss_B: Tensor) -> None:
        """Raise `CoupledError` if the loss of one of some rows has a gradient in another row."""
        ...

    def begin_call(self, call: Call) -> None:
        """Note that a call of the model begins."""
        ...

    def check_rows_again(self) -> None:
        """Probe in the next backward pass, as in the first one, whether rows are independent."""
        ...


class MissedUseError(NoRuleError):
    """A trained parameter received a gradient that no tap saw."""

    def __init__(self, name: str) -> None:
        """Name the parameter."""
        super().__init__(
            f"{name} received a gradient that is not clipped, and it was dropped. Either backward() was called on a "
            "loss directly (pass the losses of the rows to GhostClipper.backward()), or the loss uses the parameter "
            "outside the model's call, or a module does so in a way that the first call of the model did not. Move the "
            "computation into the forward pass of the model, make GhostClipper after the last change of the model, or "
            "freeze the parameter."
        )
        self.name = name


class _RootHook:
    """A hook on the model; a copy or a pickle of the model has one that does nothing, and needs no clipper."""

    def __init__(self, owner: TappedModel, run: Callable[..., Any]) -> None:
        self.owner, self._run = owner, run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments and returns None


class _ReentrantError(Exception):
    """Activations are recomputed in a way that gives gradients to ``.grad`` only."""


@dataclass(frozen=True)
class _Plain:
    """What autograd gives without taps: numbers of the rows (B,), and gradients by name."""

    loss_B: Tensor
    gradients: dict[str, Tensor | None]

    @property
    def is_complete(self) -> bool:
        """Whether every row has a finite loss, and every parameter a gradient that is not zero."""
        return self.is_finite and all(g is not None and bool(g.any()) for g in self.gradients.values())

    @property
    def is_finite(self) -> bool:
        """Whether every row has a finite loss; otherwise the gradients show nothing."""
        return bool(torch.isfinite(self.loss_B).all())


_Layout = tuple[bool, bool, bool]
"""Whether rows are packed, and whether there are several rows, and several tokens."""


def _layout_of(rows: int, tokens: int, is_packed: bool) -> _Layout:
    """Return what a call shows: the order of rows and tokens in one dimension does not show where one of them is 1."""
    return is_packed, is_packed or rows > 1, is_packed or tokens > 1


_Inputs = tuple[tuple, dict, int]
"""The arguments of a call of the model, and its rows."""


class TappedModel:
    """The taps of one model; see `dpllm.ghost.taps.Host`.

    Args:
        model: any module whose inputs and outputs have the rows of the batch first.
        trained: its trained parameters.
        receiver: takes what the taps hand over.

    Attributes:
        call: the last call of the model, until its backward pass ends.
        calls: since the last backward pass.
        in_forward: whether the model's forward pass runs.
        in_backward: whether a backward pass of the clipper runs.
        ladder: which module is tapped in which way.
        blocks: which are compiled.

    Raises:
        GhostError: see `dpllm.ghost.attach.Ladder`.
    """

    def __init__(self, model: nn.Module, trained: TrainedParameters, receiver: Receiver) -> None:
        """Find what is trained; modules are swapped in the first call of the model."""
        self._model, self._trained, self._receiver = model, trained, receiver
        self.record = receiver.record  # see `dpllm.ghost.taps.Host`
        self.call: Call | None = None
        self.calls = ModelCalls(model)
        self.in_forward = self.in_backward = False
        self.uses: Counter[str] = Counter()
        self._compared: set[_Layout] = set()
        # Parameters of modules that get several tokens of each row in their first dimension, with their way: those that
        # were compared, those of the comparison that runs, and those of the call that runs which were not compared.
        self._flat: set[tuple[str, str]] = set()
        self._flat_now: set[tuple[str, str]] = set()
        self._flat_unseen: set[tuple[str, str]] = set()
        self._is_first = True  # of the calls for a loss
        self._is_stale = False  # whether modules are tapped in another way than in an earlier call for the same loss
        self._uses_before: Counter[str] = Counter()  # this call of the model
        # A part behind zeros (LoRA's at first) or an expert without tokens shows nothing: it is compared again later.
        self._is_complete, self._num_losses = False, 0
        self._zeros: list[nn.Parameter] = []  # that were zero when something showed no gradient
        self._is_own = self._settles = self._computes_again = False
        self._raised = ""  # by the model, while it was compared in the last of several ways
        self.ladder = Ladder(model, self, trained.by_name)
        self.blocks = Blocks(model, self, self.ladder)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_RootHook(self, self._begin), prepend=True, with_kwargs=True),
            model.register_forward_hook(_RootHook(self, self._end), with_kwargs=True, always_call=True),
        ]
        if not trained.sharded:
            self._handles += [p.register_hook(self._guard(name)) for name, p in trained.by_name.items()]

    def _guard(self, name: str) -> Callable[[Tensor | None], None]:
        """Return a hook that raises for a gradient of a parameter, before DeepSpeed's own hook takes the gradient."""

        def refuse(gradient: Tensor | None) -> None:
            if gradient is not None and self.in_backward:  # engines may hand in sums through autograd at other times
                raise MissedUseError(name)

        refuse.is_guard = True  # type: ignore[attr-defined]  # for other clippers of models that share the parameter
        return refuse

    # ------------------------------------------------------------------------------------ interface for taps

    def arrived(self, *tensors: Tensor) -> None:
        """See `dpllm.ghost.taps.Host`.

        Raises:
            GhostError: the backward pass is not one of the clipper.
        """
        if not self.in_backward:
            raise GhostError(
                "backward() was called on a loss directly, or the model has another clipper as well. Pass the per-row "
                "losses to GhostClipper.backward(), which clips, and call remove() on a clipper that is used no more."
            )
        self._receiver.arrived(*tensors)

    def expect(self, parameter: nn.Parameter) -> None:
        """Count a use of a parameter in the call that runs, for which no tap is needed: `take` gets it.

        Raises:
            GhostError: no call of the model runs, or its taps are being tried.
        """
        if not self.in_forward or self._settles:
            raise GhostError("A use of a parameter is announced outside a call of the model. Announce it within.")
        self.uses[self.ladder.target_of(parameter).name] += 1

    def take(self, parameter: nn.Parameter, use: Use) -> None:
        """Take a use that was announced by `expect`, in the backward pass."""
        self.arrived(use.grad)
        self._receiver.record(self.ladder.target_of(parameter), use)

    def refuse_bypass(self, path: str) -> None:
        """See `dpllm.ghost.taps.Host`."""
        if not _PLAINLY:
            raise NoRuleError(
                f"{path} was called directly, with gradients on. Call the model given to GhostClipper, so that every "
                "use of a parameter is seen; wrap evaluation in torch.no_grad()."
            )

    def flattens(self, targets: Sequence[Target], way: str = "tap") -> None:
        """See `dpllm.ghost.taps.Host`."""
        found = {(target.name, way) for target in targets}
        if self._settles:
            self._flat_now |= found
        elif not self._trained.sharded and not found <= self._flat:
            if not self.in_forward:
                raise NoTapError(targets, "several tokens of each row are in the first dimension of a module's tensor")
            self._flat_unseen |= found

    # ------------------------------------------------------------------------------------------------- calls

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._is_own or not torch.is_grad_enabled():
            return
        self.break_off()
        self._refuse_others(model)
        refuse_compiled(model)
        first = self._is_first = self.calls.begin(args, kwargs)
        if first:
            self._is_stale = False
            self.blocks.take_over()
        self._num_losses += first
        self._settle_once(args, kwargs, again=first and self._has_to_compare_again())
        if first:
            self.blocks.attach()
            self.ladder.begin_uses()
        self._uses_before = self.uses.copy()
        self._flat_unseen.clear()
        self._start(self.calls.rows or 1)

    def _has_to_compare_again(self) -> bool:
        """Whether parameters may have a gradient now that had none: a gate has opened, or some losses have passed."""
        if self._is_complete:
            return False
        is_power_of_two = self._num_losses.bit_count() == 1
        return is_power_of_two or any(bool(parameter.detach().any()) for parameter in self._zeros)

    def prepare(self, args: tuple, kwargs: dict) -> None:
        """Settle the ladder for a call with these inputs, before the first call of a loss."""
        rows = rows_of_call(args, kwargs)
        if rows is not None and not self._is_settled(_layout_of(rows, tokens_of_call(args, kwargs), is_packed=False)):
            self._is_first = self.calls.begin(args, kwargs)
            try:
                self._settle_once(args, kwargs)
            finally:
                self.calls.spend()

    def _settle_once(self, args: tuple, kwargs: dict, again: bool = False) -> None:
        """Settle the ladder in the first call, and in the first ones of several rows, of several tokens, and packed."""
        packed = len(self.calls.packed.lengths)
        rows = packed or self.calls.rows
        if rows is not None and (again or not self._is_settled(_layout_of(rows, self.calls.tokens, packed > 0))):
            self._settle(args, kwargs, rows)

    def _is_settled(self, layout: _Layout) -> bool:
        """Whether a call was compared that showed as much."""
        return any(one[0] == layout[0] and all(map(operator.ge, one, layout)) for one in self._compared)

    def _refuse_others(self, model: nn.Module) -> None:
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, _RootHook) and hook.owner is not self:
                raise another_clipper("The model")

    def _start(self, rows: int) -> None:
        self.call, self.in_forward = Call(self, rows, self.calls.packed, self.calls.lengths, self._settles), True
        self._receiver.begin_call(self.call)

    def _end(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._is_own or not self.in_forward:
            return output
        if self._flat_unseen and output is not None:
            self._settle_again(args, kwargs)
            self._computes_again = True
        if self._computes_again and output is not None:  # its own forward was swapped after this call had begun
            self._computes_again = False
            output = self._own(args, kwargs)
        self.in_forward = False
        if output is not None:
            self.calls.end()
        return output

    def _settle_again(self, args: tuple, kwargs: dict) -> None:
        """Settle the ladder after a call in which a module got its rows as in no comparison; the call is repeated."""
        unseen, self._flat_unseen = self._flat_unseen, set()
        rows = self.calls.rows or 1
        self._settle(args, kwargs, rows)
        self._flat |= unseen  # a few rows may not show it again
        self._receiver.check_rows_again()
        if self._is_first:
            self.blocks.attach()
        self.uses.clear()
        self.uses.update(self._uses_before)
        self._start(rows)

    def break_off(self) -> None:
        """End a call of the model that Ctrl-C broke off: PyTorch runs hooks after an `Exception` only."""
        self.in_forward, self.call = False, None

    def stop(self) -> None:
        """Release the tensors of a pass."""
        self.blocks.tell()
        self.calls.packed.stop()
        if self.call is not None:
            self.call.forget()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Enter a backward pass of the clipper, in which recomputed modules are tapped.

        Raises:
            MissedUseError: a gradient of a sharded parameter was written.
        """
        watched = dict(self._trained.by_name) if self._trained.sharded else {}
        before = {name: state_of_gradient(parameter) for name, parameter in watched.items()}
        self.in_backward = True
        stale = self._refused_recomputation() if self._is_stale else contextlib.nullcontext()
        try:
            with stale:
                yield
        except NoTapError as error:
            if self._settles:
                raise
            raise NoRuleError(
                f"{error}. When the taps were compared with the model it was not so. Differentiate each loss before "
                "the model is called for the next one, or freeze these parameters."
            ) from error
        finally:
            self.in_backward = False
        for name, parameter in watched.items():
            if state_of_gradient(parameter) != before[name]:
                parameter.grad = None
                raise MissedUseError(name)

    @contextlib.contextmanager
    def _refused_recomputation(self) -> Iterator[None]:
        """Refuse to run modules again in a backward pass, where their taps are not those of their forward pass."""
        own = {id(module) for module in self._model.modules()}

        def refuse(module: nn.Module, _: tuple) -> None:
            if id(module) in own:
                raise GhostError(
                    "A call of the model for this loss had rows and tokens in a shape that no call before had, so the "
                    "taps were compared with plain autograd and chosen again. Activation checkpointing now recomputes "
                    "an earlier call. Compute the losses again: the taps fit all of these calls now."
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    # -------------------------------------------------------------------------------------------- the ladder

    def _own(self, args: tuple, kwargs: dict) -> Any:
        """Call the model once more; its hooks do not take it for another call."""
        self._is_own = True
        model: Any = self._model
        # DeepSpeed's hook on the model ends the record of the order in which ZeRO-3 gathers. A record of a forward pass
        # alone would make it release each weight after its forward, in all later steps (its sets are cached).
        is_partitioned = any(hasattr(p, "ds_id") for p in self._trained.by_name.values())
        try:
            return (model.forward if is_partitioned and not model._parameters else model)(*args, **kwargs)
        finally:
            self._is_own = False

    def _settle(self, args: tuple, kwargs: dict, rows: int) -> None:
        """Find the rung of each parameter, by the values of a few rows.

        Raises:
            GhostError: there is no exact way for a parameter, or a row depends on others.
        """
        state = check.State(next(iter(self._trained.by_name.values())).device, self._model)
        before, was_compiled = dict(self.ladder.rungs), bool(self.blocks.compiled.blocks)
        self.blocks.detach()
        was_stale, self._is_stale = self._is_stale, False
        self.ladder.detach()
        few, is_packed = (args, kwargs, rows), bool(self.calls.packed.lengths)
        self._settles = True
        exact = contextlib.ExitStack()  # float32 products of fewer bits differ by more than the taps may
        exact.enter_context(kernels.exact_products())
        try:
            try:
                if not is_packed:
                    few = check.first_rows(args, kwargs, rows)
                output = self.ladder.discover(lambda: self._own(*few[:2]))
                if few[2] != rows and not check.has_rows(output, few[2]):
                    few = args, kwargs, rows  # the model has its rows in something that cannot be cut
            except Exception as error:
                if few[2] == rows or is_shortage(error):
                    raise
                few = args, kwargs, rows
                state.restore()
                self.ladder.discover(lambda: self._own(args, kwargs))
            is_random = state.has_moved
            state.restore()
            self._is_complete = self._climb(few, (args, kwargs, rows), state, is_random)
            every = [] if self._is_complete else self._trained.by_name.values()
            self._zeros = [parameter for parameter in every if not bool(parameter.detach().any())]
        except BaseException:
            self.ladder.detach()  # and the next call settles again
            self._compared.clear()
            raise
        finally:
            exact.close()
            self.call, self.in_forward, self._settles = None, False, False
            state.restore()
        changed = self.ladder.rungs != before
        self._flat = self._flat_now if changed else self._flat | self._flat_now
        self._is_stale = was_stale or (not self._is_first and (changed or was_compiled))
        self._compared.add(_layout_of(rows, self.calls.tokens, is_packed))
        self._computes_again = self.ladder.touches(self._model)
        self._tell()

    def _tell(self) -> None:
        if self.ladder.splits:
            paths = [path or "the model" for path in sorted(self.ladder.splits)]
            logger.info(
                "%d modules run row by row, with as many launches as rows, because no tap is exact: %s",
                len(paths),
                ", ".join(paths[:3]) + (", …" if len(paths) > 3 else ""),
            )

    def _climb(self, few: _Inputs, every: _Inputs, state: check.State, is_random: bool) -> bool:
        """Compare a few rows; if they leave a parameter without a gradient, such as an expert, all rows of the call.

        Returns:
            Whether every parameter had a gradient that could be compared.
        """
        args, kwargs, rows = few
        plain: _Plain | None = None
        with contextlib.ExitStack() as mode:
            if is_random:
                mode.enter_context(check.in_evaluation(self._model))
            if not self._trained.sharded:
                try:
                    plain = self._plainly(args, kwargs, rows)
                except AssertionError as error:  # a model that is only trained in training mode, with random numbers
                    raise NoRuleError(f"The model cannot be compared with plain autograd: {error}") from error
                except _ReentrantError:
                    mode.enter_context(check.in_evaluation(self._model))  # where transformers recomputes nothing
                    state.restore()
                    with contextlib.suppress(_ReentrantError):
                        plain = self._plainly(args, kwargs, rows)
                if plain is not None and rows < every[2] and not plain.is_complete:
                    args, kwargs, rows = every
                    state.restore()
                    plain = self._plainly(args, kwargs, rows)
            while True:
                state.restore()
                self._flat_now = set()
                self.ladder.attach()
                differing = self._differing(args, kwargs, rows, plain)
                if not differing:
                    # Of shards, and where nothing has a gradient, no later call shows more.
                    return plain is None or plain.is_complete
                spread = self.ladder.copied
                self.ladder.detach()
                if not self.ladder.climb(differing) and not self.ladder.climb(spread):
                    state.restore()
                    self._refuse_coupled(args, kwargs, rows)
                    names = ", ".join(sorted(target.name for target in differing)[:3])
                    raise NoRuleError(
                        f"The gradients of single rows are not those of the model, in one pass or row by row, for "
                        f"{len(differing)} parameters ({names}): rows depend on each other, or the model computes "
                        f"something else in each call{self._raised}. Freeze these parameters, or remove what couples "
                        "the rows."
                    )

    def _refuse_coupled(self, args: tuple, kwargs: dict, rows: int) -> None:
        """Say so if it is rows that depend on each other: no other way of clipping is meant then.

        Raises:
            CoupledError: a row's loss has a gradient in another row.
        """
        self.ladder.rungs.clear()
        self.ladder.attach()
        self._start(rows)
        try:
            values = check.values_of(self._own(args, kwargs), rows, self.calls.packed)
            self.in_forward = False
            self._receiver.refuse_coupled(check.losses_of(values))
        except CoupledError:
            raise
        except Exception as error:  # the probe needs taps that see the rows
            if is_shortage(error):
                raise
        finally:
            self.in_forward = False
            self.ladder.detach()

    def _plainly(self, args: tuple, kwargs: dict, rows: int) -> _Plain | None:
        """Return losses and weighted gradients by autograd; None if the model returns nothing that has a gradient."""
        _PLAINLY.append(self)
        try:
            found = check.losses_and_weights(self._own(args, kwargs), rows, self.calls.packed)
            if found is None:
                return None
            (loss_B, weight_B), parameters = found, self._trained.by_name
            if any("CheckpointFunction" in name for name in nodes_of(loss_B)):
                raise _ReentrantError
            with torch.autocast(loss_B.device.type, enabled=False):
                total = (loss_B * weight_B).sum()
                gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        finally:
            _PLAINLY.pop()
        return _Plain(loss_B.detach(), dict(zip(parameters, gradients, strict=True)))

    def _differing(self, args: tuple, kwargs: dict, rows: int, plain: _Plain | None) -> list[Target]:
        """Return the parameters for which the taps give other gradients than autograd, or none."""
        self._raised = ""
        self._start(rows)
        assert self.call is not None
        call = self.call
        try:
            output = self._own(args, kwargs)
            self.in_forward = False
            if plain is None or not plain.is_finite:
                return []
            found = check.losses_and_weights(output, rows, self.calls.packed)
            every = [Target(name, parameter) for name, parameter in self._trained.by_name.items()]
            if found is None:
                return self._suspects(call) or every
            loss_B, weight_B = found
            tolerance = check.tolerance(self._dtype(loss_B))
            if not bool((loss_B - plain.loss_B).abs().max() <= tolerance * (1 + plain.loss_B.abs().max())):
                return self._suspects(call) or every
            sums = self._receiver.weighted_sums(loss_B, weight_B)
            wrong = check.differ(plain.gradients, sums, self._dtype(loss_B))
        except NoTapError as error:
            return error.targets
        except MissedUseError as error:
            wrong = [error.name]
        except GhostError:
            raise
        except Exception as error:  # of the model, which has run before: by what taps changed
            suspects = self._suspects(call)
            if is_shortage(error) or not suspects:
                raise
            self._raised = f" ({type(error).__name__}: {error})"
            return suspects
        finally:
            self.in_forward = False
        return [Target(name, self._trained.by_name[name]) for name in wrong]

    def _suspects(self, call: Call) -> list[Target]:
        """Return the parameters of which modules may have computed something else than before."""
        if call.inside:
            return call.inside[-1]
        above = [target for split in self.ladder.splits.values() for target in split.targets]
        return above or call.widened or self.ladder.copied

    def _dtype(self, loss_B: Tensor) -> torch.dtype:
        if self.call is not None and self.call.autocast is not None:  # often within the model's forward only
            return self.call.autocast
        dtypes = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        return min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)

    @property
    def row_by_row(self) -> dict[str, list[str]]:
        """The parameters, by the path of the module that runs row by row because of them."""
        return {path: [target.name for target in split.targets] for path, split in self.ladder.splits.items()}

    def remove(self) -> None:
        """Give every module its class back, and remove the hooks."""
        self.break_off()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.blocks.remove()
        self.ladder.detach()
