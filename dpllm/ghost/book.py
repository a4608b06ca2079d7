"""The book: per-unit gradient norms and the clipped sum from one backward pass.

During a pass the trainable parameters are out of autograd, so it computes no weight gradients of its own; taps on the
modules that hold them give the book each use's input and output gradient. From these come the exact norms, and after
the clip factors are known, the clipped sum, which costs what autograd's own weight gradients would have cost
(book-keeping, Bu et al. 2023, arXiv:2210.00038).

Shape suffixes: B rows, U units.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.ghost import kernels, memory, shared
from dpllm.ghost.calls import Calls, not_repeatable, used_again
from dpllm.ghost.checks import (
    FunctionalUses,
    RowProbe,
    SpreadProbe,
    probed_rows,
    refuse_long_rows,
    refuse_missing,
    refuse_other_rows,
    refuse_uses_in_loss,
    rows_of_call,
    tokens_by_themselves,
    unmeasured_spread,
)
from dpllm.ghost.contributions import Contribution, Instance, Rows, Use, held, join, merge
from dpllm.ghost.errors import GhostError
from dpllm.ghost.forms import Forms
from dpllm.ghost.packed import PackedRows
from dpllm.ghost.rounding import is_measured, slack_factor
from dpllm.ghost.rules import (
    Served,
    find_sites,
    refuse_compiled,
    refuse_coupled_modules,
    refuse_skipped_layers,
    refuse_wrapped,
    trainable_parameters,
    two_passes_over_shards,
)
from dpllm.ghost.tally import NormTally, Weights
from dpllm.ghost.tap import Receive, tap


class Book:
    """Hooks on a model, and the contributions of one microbatch.

    Args:
        model: any module whose inputs and outputs have the rows of the batch first.
        forms: how norms are computed.

    Raises:
        GhostError: a module that couples rows, a parameter no rule can serve, no trainable parameter, a compiled or
            data-parallel model.
    """

    def __init__(self, model: nn.Module, forms: Forms | None = None) -> None:
        """Check the model and attach the hooks."""
        self.forms = forms or Forms()
        refuse_wrapped(model)
        refuse_coupled_modules(model)
        refuse_skipped_layers(model)
        self._parameters = trainable_parameters(model)
        self.sharded = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in self._parameters.values())
        if self.sharded and self.forms.passes == 2:
            raise two_passes_over_shards()
        self._name_of = {id(p): name for name, p in self._parameters.items()}
        self._switched_off: dict[int, nn.Parameter] = {}
        self._contributions: dict[int, list[Contribution]] = defaultdict(list)
        self._flows: set[tuple[torch.device, torch.dtype]] = set()  # of all that norms were computed from
        self._held: dict[int, list[Contribution]] = {}  # of a unit that has more rows than one pass takes
        self._joining = False
        self._rows: Rows | None = None
        self._weights: tuple[Weights, Weights] | None = None  # of the rows, of the units
        self._calls = Calls()  # of the model, since the last backward pass
        self._take: Callable[[nn.Parameter, Use], None] = self._keep
        self._again: tuple[Tensor, Tensor, Tensor] | None = None  # losses to differentiate twice, and what came out
        self._sums: dict[int, Tensor] = {}
        self._streamed: set[int] = set()  # parameters whose only use has arrived, in this one of two passes
        self._modules = list(model.modules())
        self._recomputing = [module for module in self._modules if memory.may_recompute(module)]
        self._most_tokens = tokens_by_themselves(model)
        self._batch_rows: int | None = None
        self._tokens = 1
        self._active: list[Served] = []
        self._in_forward = self._in_backward = self._paused = False
        self._packed = PackedRows()
        self._probe: RowProbe | SpreadProbe | None = None
        self._uses: FunctionalUses | None = FunctionalUses(model, self._name_of)
        self.rows_checked = self._packed_checked = self._spread_checked = False
        self._finite_B = torch.empty(0, dtype=torch.bool)  # packed rows, while they are checked
        self._handles: list[Any] = []
        self._attach(model)

    # ------------------------------------------------------------------ hooks

    def _attach(self, model: nn.Module) -> None:
        self._handles += shared.attach(model, self)
        for site in find_sites(model):
            self._attach_site(Served(site, self))
        self._handles += [
            model.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]

    def _attach_site(self, served: Served) -> None:
        module = served.site.module
        holders = served.site.holders()

        def before(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if self._paused or not self._in_pass():
                self._refuse_bypass(served)
                return None
            self._active.append(served)
            served.enter(args, kwargs)
            self.note_uses(served.site.trainable.values())
            # A sharded model (FSDP2) puts other tensors in place of its parameters while a module runs.
            self._switch_off(p for holder, name in holders if (p := getattr(holder, name)).requires_grad)
            if served.before is None:
                return None
            with self.pause():
                return served.before(module, args, kwargs, self._batch_rows)

        def after(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            if self._paused or not self._in_pass():
                return None
            if self._active and self._active[-1] is served:
                self._active.pop()
            served.leave(args, kwargs, broke_off=output is None)
            if output is None or not torch.is_grad_enabled():
                return None
            with self.pause():
                return served.after(module, args, kwargs, output, self._batch_rows)

        # Innermost: after whatever gathers a sharded module's weights, and before whatever frees them again.
        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True, prepend=True),
        ]

    def _in_pass(self) -> bool:
        return self._in_forward or self._in_backward

    @property
    def rows_in_pass(self) -> int | None:
        """Rows of the call of the model that is going on; None outside of one, or where they are not known."""
        return self._batch_rows if self._in_pass() and not self._paused else None

    def note_uses(self, parameters: Iterable[nn.Parameter]) -> None:
        """Count a use of each parameter in this call of the model; what is recomputed was counted before."""
        if self._in_forward:
            self._calls.note_uses(parameters)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Modules that a rule runs on its own account aren't uses of their parameters."""
        before, self._paused = self._paused, True
        with FunctionalUses.suspended(self._uses):
            try:
                yield
            finally:
                self._paused = before

    def _refuse_bypass(self, served: Served) -> None:
        if (
            not self._paused
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in served.site.trainable.values())
        ):
            raise GhostError(
                f"{served.site.path} was called on its own, with gradients on. Call the model that was given to "
                f"GhostClipper, so that "
                "every use of a parameter is seen; wrap evaluation in torch.no_grad()."
            )

    def _begin_forward(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._in_forward or not torch.is_grad_enabled():
            return
        refuse_compiled("The model", model)
        self._forget_pass()
        self._calls.begin()
        self._batch_rows, self._tokens = rows_of_call(args, kwargs), memory.tokens_of_call(args, kwargs)
        self._packed.start(kwargs)
        longest = max(self._packed.lengths, default=self._tokens)
        refuse_long_rows(longest, self._most_tokens)
        self._in_forward = True
        self._switch_off(self._parameters.values())
        if self._uses is not None:
            self._uses.start(self._active)

    def _end_forward(self, _: nn.Module, args: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._in_forward = False
        self._active.clear()
        self._switch_on()
        if self._uses is not None:
            self._uses.stop()
            if output is not None:  # a forward pass that broke off is watched again
                self._uses.raise_if_any()
        if output is not None:
            self._calls.note(self._batch_rows, self._packed.lengths)

    def _switch_off(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.requires_grad = False
            self._switched_off[id(parameter)] = parameter

    def _switch_on(self) -> None:
        for parameter in self._switched_off.values():
            parameter.requires_grad = True
        self._switched_off.clear()

    # --------------------------------------------------------------- backward

    def tap(self, output: Tensor, receive: Receive, *saved: Tensor) -> Tensor:
        """Tap a module's output; see `dpllm.ghost.tap`."""

        def receive_paused(grad: Tensor, tensors: list[Tensor]) -> None:
            if not self._in_backward:
                raise GhostError(
                    "backward() was called on a loss directly. Pass the per-row losses to GhostClipper.backward(), "
                    "which clips."
                )
            self._flows.update((t.device, t.dtype) for t in (grad, *tensors) if is_measured(t))
            with self.pause():
                receive(grad, tensors)

        if isinstance(self._probe, SpreadProbe):
            output = self._packed.fill(output, self._probe.poisoned_B, float("nan"))
        return tap(output, receive_paused, *saved)

    def by_rows(self, x: Tensor) -> Tensor:
        """View (B * T, D), what a module sees that flattens rows and tokens, as (B, T, D); cut packed rows apart.

        That the flattened order is rows first is part of what the check of the first batch establishes.
        """
        assert self._rows is not None
        if self.is_packed:
            return self._packed.cut(x)
        rows = self._rows.unit_B.numel()
        return x.unflatten(0, (rows, -1)) if x.ndim == 2 and x.shape[0] != rows and x.shape[0] % rows == 0 else x

    def record(self, parameter: nn.Parameter, use: Use) -> None:
        """Take note of what one use of a parameter contributes to its gradient."""
        assert self._rows is not None
        name = self._name_of[id(parameter)]
        refuse_other_rows(name, use.grad.shape, self._rows.unit_B.numel(), self.is_packed)
        if self._probe is not None:
            self._probe.look(name, use.grad)
            return
        with kernels.exact_matmul(), torch.no_grad():
            self._take(parameter, use)

    def _keep(self, parameter: nn.Parameter, use: Use) -> None:
        assert self._rows is not None
        self._contributions[id(parameter)].append(held(use, self._rows, self.forms))

    def backward(self, loss_B: Tensor, unit_B: Tensor, num_units: int) -> tuple[Tensor, Tensor]:
        """Run the backward pass and return each unit's squared gradient norm.

        Args:
            loss_B: (B,) losses with a graph, each depending on its own row alone.
            unit_B: (B,) int64 unit of each row, best on the CPU; -1 for a padding row, whose loss gets weight 0.
            num_units: U.

        Returns:
            ``(sq_norm_U, slack_U)`` in float32 (float64 for a float64 model): squared norms, and an upper bound of
            what rounding may add to the square of the clipped sum's share of a unit.
        """
        if self._held and (num_units != 1 or bool((unit_B != 0).any())):
            raise GhostError(
                f"Rows of a unit are held, and this microbatch has rows of {num_units} units or padding. Give the rest "
                "of that unit's rows by themselves, as unit 0."
            )
        if self._passes(loss_B) == 2 and not self._held:
            return self._first_pass(loss_B, unit_B, num_units)
        self._differentiate(loss_B, unit_B, num_units)
        if self._held:
            self._join()
            self._joining = True  # until its factor is fixed: what was held is no longer held by itself
            self._contributions, self._held = defaultdict(list, self._held), {}
            self._rows = Rows.one_unit(loss_B.device)
        refuse_missing(self._parameters, self._contributions.keys())
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_U, slack_U = self._add_norms(self._tally())
        return self._settled(unit_B, sq_norm_U), slack_U

    def _settled(self, unit_B: Tensor, sq_norm_U: Tensor) -> Tensor:
        """Refuse norms that aren't finite where they might be those of other units."""
        several = self.is_packed and not self._spread_checked and bool((unit_B != unit_B[0]).any())
        if several and not bool(torch.isfinite(sq_norm_U).all()):
            raise unmeasured_spread()
        return sq_norm_U

    def hold(self, loss_B: Tensor) -> None:
        """Run the backward pass of some rows of one unit, and hold their share of its gradient for the next pass.

        Args:
            loss_B: (B,) losses with a graph, all of the same unit.
        """
        self._differentiate(loss_B, torch.zeros(len(loss_B), dtype=torch.int64), 1)
        self._join()

    def _join(self) -> None:
        self._joining = True
        with kernels.exact_matmul(), torch.no_grad():
            for key, contributions in self._contributions.items():
                self._held[key] = join(self._held.get(key, []), contributions, self.forms)
        self._contributions.clear()
        self._joining = False

    def _differentiate(self, loss_B: Tensor, unit_B: Tensor, num_units: int, retain_graph: bool = False) -> None:
        """Fill the book with the contributions of these rows."""
        self._begin_backward(loss_B, unit_B, num_units)
        if self._uses is not None:
            refuse_uses_in_loss(loss_B, self._name_of)
        assert self._rows is not None
        weight_B = (self._rows.unit_B >= 0).to(loss_B.dtype)
        self._in_backward = True
        self._switch_off(self._parameters.values())
        try:
            checked = self._packed_checked if self.is_packed else self.rows_checked
            if not checked and int(weight_B.sum()) > 1:
                self._check_rows(loss_B, weight_B)
            torch.autograd.backward(loss_B, weight_B, retain_graph=retain_graph)
            self._uses = None  # every call of the model that the first losses come from was watched
        finally:
            self._in_backward = False
            self._packed.stop()
            self._switch_on()

    def _begin_backward(self, loss_B: Tensor, unit_B: Tensor, num_units: int) -> None:
        packed = len(self._packed.lengths)
        if packed and packed != len(loss_B):
            raise GhostError(
                f"The model was called with {packed} packed rows, and there are {len(loss_B)} losses. One loss per row "
                "is needed: see dpllm.packed_sequence_loss."
            )
        self._batch_rows = self._calls.rows(len(loss_B), self._packed.lengths, self._batch_rows)
        self._rows = Rows.of(unit_B, num_units, loss_B.device)

    def _check_rows(self, loss_B: Tensor, weight_B: Tensor) -> None:
        """Measure once that a row's loss has no gradient in another row."""
        for rows in probed_rows(weight_B > 0, self.is_packed):
            self._backward_of(loss_B, rows, RowProbe(rows, self.is_packed), retain_graph=True)
        self.note_rows_checked()

    def note_rows_checked(self) -> None:
        """Rows are independent, as they were given to the last call of the model: packed or not."""
        self.rows_checked = True
        self._packed_checked |= self.is_packed

    def probe(self, loss_B: Tensor, which: int, unit_B: Tensor, num_units: int) -> int:
        """Run the backward pass of some rows' losses and make sure that no other row receives a gradient.

        Args:
            loss_B: (B,) losses with a graph.
            which: one of the sets of rows that `dpllm.ghost.checks.probed_rows` names, from 0.
            unit_B: (B,) the rows' units, -1 for padding.
            num_units: U.

        Returns:
            How many sets there are; the same for every microbatch, as long as all are packed or none is.
        """
        sets = probed_rows(unit_B >= 0, self.is_packed)
        probe = RowProbe(sets[which], self.is_packed)
        self._probe_backward(loss_B, unit_B, num_units, sets[which], probe)
        if probe.finite_B is not None:
            self._finite_B = probe.finite_B if which == 0 else self._finite_B & probe.finite_B
        return len(sets)

    def probe_spread(self, losses_of_row: Callable[[], Tensor], unit_B: Tensor, num_units: int) -> None:
        """Make sure that values that aren't finite stay within their packed row, forward and backward.

        Rows that aren't finite by themselves, as `probe` saw, tell nothing; with these alone, nothing is measured.
        """
        poisoned_B = torch.zeros_like(self._finite_B)
        poisoned_B[1::2] = True
        probe = SpreadProbe(poisoned_B, self._finite_B)
        self._probe = probe
        try:
            loss_B = losses_of_row()
        finally:
            self._probe = None
        self._probe_backward(loss_B, unit_B, num_units, unit_B >= 0, probe)
        # A process with a single row has nothing to measure, and relies on the others.
        self._spread_checked = len(unit_B) == 1 or bool(probe.healthy_B.any())

    def _probe_backward(
        self, loss_B: Tensor, unit_B: Tensor, num_units: int, rows: Tensor, probe: RowProbe | SpreadProbe
    ) -> None:
        self._begin_backward(loss_B, unit_B, num_units)
        self._in_backward = True
        self._switch_off(self._parameters.values())
        try:
            self._backward_of(loss_B, rows, probe, retain_graph=False)
        finally:
            self._in_backward = False
            self._switch_on()

    def _backward_of(self, loss_B: Tensor, rows: Tensor, probe: RowProbe | SpreadProbe, retain_graph: bool) -> None:
        self._probe = probe
        weight_B = torch.zeros_like(loss_B)
        weight_B[rows] = 1
        try:
            torch.autograd.backward(loss_B, weight_B, retain_graph=retain_graph)
        finally:
            self._probe = None

    def _tally(self, max_waiting: int | None = None) -> NormTally:
        assert self._rows is not None
        wide = any(p.dtype == torch.float64 for p in self._parameters.values())
        dtype = torch.float64 if wide else torch.float32
        return NormTally(self._rows, self.forms, dtype, self._slack_factor, max_waiting)

    def _slack_factor(self) -> float:
        """The largest of all devices and dtypes that norms and sums were computed from."""
        return max((slack_factor(self.forms, *flow) for flow in self._flows), default=1.0)

    def _add_norms(self, tally: NormTally) -> tuple[Tensor, Tensor]:
        assert self._rows is not None
        for key, contributions in self._contributions.items():
            self._contributions[key] = merge(contributions, self._rows)
            tally.add(self._contributions[key])
        return tally.total()

    def weigh(self, factor_U: Tensor) -> None:
        """Fix the factors of the clipped sum, which `add_clipped_sum_` then forms one parameter at a time.

        Args:
            factor_U: (U,) clip factors; a unit with factor 0 contributes exactly zero, even if its gradient isn't
                finite.

        Raises:
            GhostError: with two passes, the second gave other gradients than the first.
        """
        assert self._rows is not None, "weigh() follows backward()"
        unit_B = self._rows.unit_B
        factor_B = torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 0, 0)
        self._weights = Weights.of(factor_B), Weights.of(factor_U)
        self._joining = False
        if self._again is not None:
            self._second_pass(factor_U)

    # -------------------------------------------------------------- two passes

    def _passes(self, loss_B: Tensor) -> int:
        if self.forms.passes != "auto":
            return self.forms.passes
        if self.sharded or not memory.recomputes(self._recomputing):
            return 1
        fits = memory.one_pass_fits(
            self._modules, self._batch_rows or len(loss_B), self._tokens, memory.free_bytes(loss_B.device)
        )
        return 1 if fits else 2

    def _first_pass(self, loss_B: Tensor, unit_B: Tensor, num_units: int) -> tuple[Tensor, Tensor]:
        """Measure each layer's norm as its gradient arrives, and hold nothing but what several uses contribute."""
        tally = None
        seen: set[int] = set()
        self._streamed.clear()

        def measure(parameter: nn.Parameter, use: Use) -> None:
            nonlocal tally
            tally = self._tally(max_waiting=1) if tally is None else tally
            seen.add(id(parameter))
            self._stream(parameter, use, tally)

        with self._taking(measure):
            self._differentiate(loss_B, unit_B, num_units, retain_graph=True)
        refuse_missing(self._parameters, seen)
        assert tally is not None, "there are parameters"
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_U, slack_U = self._add_norms(tally)
        self._contributions.clear()
        self._again = loss_B, sq_norm_U, slack_U
        return self._settled(unit_B, sq_norm_U), slack_U

    def _second_pass(self, factor_U: Tensor) -> None:
        """Differentiate again, add up each layer's weighted gradient as it arrives, and check its norm."""
        assert self._again is not None and self._rows is not None
        (loss_B, sq_norm_U, slack_U), self._again = self._again, None
        tally = self._tally(max_waiting=1)
        self._streamed.clear()

        def add(parameter: nn.Parameter, use: Use) -> None:
            contribution = self._stream(parameter, use, tally)
            if contribution is not None:
                dtype = kernels.accumulation_dtype(parameter.dtype)
                total = self._sums[id(parameter)] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
                self._add_weighted_(total, contribution)

        with self._taking(add):
            self._differentiate(loss_B, self._rows.unit_B, self._rows.num_units)
        with kernels.exact_matmul(), torch.no_grad():
            again_U, _ = self._add_norms(tally)
        if bool(((again_U > sq_norm_U + slack_U) & (factor_U > 0)).any()):
            raise not_repeatable()

    @contextlib.contextmanager
    def _taking(self, take: Callable[[nn.Parameter, Use], None]) -> Iterator[None]:
        self._take = take
        try:
            yield
        finally:
            self._take = self._keep

    def _stream(self, parameter: nn.Parameter, use: Use, tally: NormTally) -> Contribution | None:
        """Count what may be forgotten at once; None for a parameter of which there are other uses, which is kept."""
        assert self._rows is not None
        if not self._calls.used_once(parameter):
            self._keep(parameter, use)
            return None
        if id(parameter) in self._streamed:
            raise used_again(self._name_of[id(parameter)])
        self._streamed.add(id(parameter))
        contribution = held(use, self._rows, self.forms)
        tally.add([contribution])
        return contribution

    # ------------------------------------------------------------ clipped sums

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Add sum_u factor_u g_u of one parameter to ``total``, once, and forget what it was made of.

        Args:
            parameter: a trainable parameter.
            total: of its full shape, in float32 (float64 for float64 parameters).

        Guarantee: the sum is formed in the dtype of ``total`` from the very factors whose norm was returned by
        `backward`; no rounding to the parameter's dtype takes place.
        """
        with torch.no_grad(), kernels.exact_matmul():
            if id(parameter) in self._sums:
                total += self._sums.pop(id(parameter))
                return
            for contribution in self._contributions.pop(id(parameter)):
                self._add_weighted_(total, contribution)

    def _add_weighted_(self, total: Tensor, contribution: Contribution) -> None:
        assert self._weights is not None, "add_clipped_sum_() follows weigh()"
        of_rows, of_units = self._weights
        (of_units if isinstance(contribution, Instance) else of_rows).add_(total, contribution, self.forms)

    def forget(self) -> None:
        """Forget a microbatch whose pass broke off; what is held of a unit before it stays.

        Raises:
            GhostError: it broke off while it was joined to what is held, which is then neither with nor without it.
        """
        self.clear()
        if self._joining:
            raise GhostError(
                "The parts of a unit that has more rows than fit at once could not be brought together, for lack of "
                "memory. Allow fewer rows per unit (max_rows_per_unit), train fewer parameters (LoRA), or shard the "
                "model."
            )

    def clear(self) -> None:
        """Forget the microbatch."""
        self._forget_pass()
        self._calls.spend()

    def _forget_pass(self) -> None:
        """Forget the last backward pass; the calls of the model since then stay part of the next one."""
        self._contributions.clear()
        self._packed.stop()
        self._sums.clear()
        self._rows = self._weights = self._again = None

    @property
    def is_packed(self) -> bool:
        """Whether the model was last called with rows laid end to end."""
        return bool(self._packed.lengths)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return dict(self._parameters)

    def remove(self) -> None:
        """Undo the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._held.clear()
        self.clear()
