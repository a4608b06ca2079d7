"""GhostClipper: per-unit gradient norms and the clipped sum from one backward pass, for a custom training loop.

While a clipper is attached, trained weights are detached where modules use them, so autograd computes no weight
gradients. The modules' taps pass the clipper the input and the output gradient of each use, from which it computes
exact norms. Once the clip factors are known, it computes the clipped sum, at the cost of autograd's own weight
gradients (book-keeping, Bu et al. 2023, arXiv:2210.00038).

Shape suffixes: B rows, G groups of parameters, P parameters, U units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.blocks import CompiledBlocks
from dpllm.ghost.norm_method import Flows, NormMethod
from dpllm.ghost.norms import NormTally
from dpllm.ghost.parameters import Passes
from dpllm.ghost.receivers import AddUp, AddUpGroups, HeldUnit, Measure, Pass, Receiver
from dpllm.ghost.refusals import GhostError, NoRuleError, refuse_for_one_pass
from dpllm.ghost.sums import Finish, GroupFactors, Sum, clip_factors
from dpllm.ghost.tapped_model import TappedModel
from dpllm.ghost.taps import Call, Target
from dpllm.ghost.unit_clipper import ClipResult, UnitClipper, incomplete_unit, units_of
from dpllm.ghost.unit_gradients import Layouts, Rows, Use
from dpllm.ghost.weights_check import Checked, SpreadProbe, row_probes
from dpllm.mechanism.parts import Clipping


class GhostClipper(UnitClipper):
    """Puts the sum of clipped per-unit gradients into ``.grad``, from one backward pass.

    Guarantee: after `backward`, each unit's share of ``.grad`` has an l2 norm of at most ``clip_norm`` over all
    trainable parameters together, in every dtype; omitting a unit changes the sum by exactly its share.

    Args:
        model: any module whose inputs and outputs have the rows of the batch first; a transformers model,
            PEFT-wrapped or not.
        clip_norm: C > 0, for flat clipping.
        norm_method: how norms are computed; the default chooses the cheapest method.
        clipping: a different bound on contributions, instead of ``clip_norm``: one of `dpllm.mechanism.catalogue`, or
            your own class, whose factors are then checked against its sensitivity in each call.
        parameter_norms: also return each unit's norm in each parameter (`ClipResult.parameter_norms`). They depend on
            the data and are not private.

    Raises:
        ValueError: both ``clip_norm`` and ``clipping`` are given, or neither.
        GhostError: the exact per-row gradient of a part of the model cannot be computed; names its path and the reason.

    >>> import torch
    >>> from dpllm import GhostClipper
    >>> model = torch.nn.Linear(3, 1)
    >>> clipper = GhostClipper(model, clip_norm=1.0)
    >>> result = clipper.backward(model(torch.randn(4, 3)).squeeze(1) ** 2)
    >>> result.norms.shape, bool(model.weight.grad.norm() <= 4.0)
    (torch.Size([4]), True)
    >>> clipper.remove()
    """

    def __init__(
        self,
        model: nn.Module,
        clip_norm: float | None = None,
        norm_method: NormMethod | None = None,
        clipping: Clipping | None = None,
        parameter_norms: bool = False,
    ) -> None:
        """Check the model and attach to it."""
        refuse_for_one_pass(model)
        super().__init__(model, clip_norm, clipping, parameter_norms)
        self.norm_method = norm_method or NormMethod()
        trained = self._trained
        if trained.sharded and self.norm_method.backward_passes == 2:
            raise GhostError(
                "Two backward passes (NormMethod(backward_passes=2)) need unsharded parameters and one process that "
                "holds the whole model's gradient, but this model's parameters are sharded. Use "
                "NormMethod(backward_passes=1) with smaller microbatches, or a replicated model."
            )
        # Norms are per parameter group, or per parameter: their number, and each parameter's norm index by its id.
        self._num_norms, self._norm_of = trained.num_groups, trained.groups
        if self._by_parameter:
            self._num_norms = len(trained.by_name)
            self._norm_of = {id(p): number for number, p in enumerate(trained.by_name.values())}
        self._flows = Flows()
        self._held = HeldUnit()
        self._layouts = Layouts()
        self._memory = Passes(model)
        self._checked = Checked()
        self._poisoned_B: Tensor | None = None  # packed rows that are NaN in the call of the model that runs
        self._pass: Pass | None = None
        self._receiver: Receiver | None = None
        self._num_rows = 0  # of the losses that are differentiated
        self._is_exact = False  # whether products are exact in that pass without further ado
        self._again: tuple[Tensor, Tensor] | None = None  # losses to differentiate again, and upper bounds of norms
        self._longer: Tensor | None = None  # whether a second pass since `settle` gave a unit a longer gradient
        self._tapped = TappedModel(model, trained, self)

    def compile(self, backend: Any = "inductor", **options: Any) -> None:
        """Compile the forward passes of the model's blocks as full graphs, from the next loss on.

        A block is a child of an outermost ``nn.ModuleList``, such as a decoder layer. The forward of each class is
        compiled once. Blocks that do not fit into a graph stay eager, and `compiled` states the reason: trained tables
        and experts, modules that run row by row or twice, parameters that ZeRO-3 gathers, and code that PyTorch cannot
        trace. Blocks that the user compiled (``block.compile()``, ``torch.compile(block)``) are compiled this way
        without this call, with their own backend.

        Args:
            backend: the backend of ``torch.compile``.
            options: other arguments of ``torch.compile``, such as ``mode`` or ``dynamic``.
        """
        self._tapped.blocks.compile(backend, options)

    @property
    def compiled(self) -> CompiledBlocks:
        """The compiled blocks, those that stay eager, and the number of graphs; empty before the next call."""
        return self._tapped.blocks.compiled

    @property
    def row_by_row(self) -> dict[str, list[str]]:
        """The modules that run row by row, by path, each with the parameters for which no tap is exact.

        They need one launch per row. Empty before the model's first call.
        """
        splits = self._tapped.ladder.splits
        return {path: [target.name for target in split.targets] for path, split in splits.items()}

    # ------------------------------------------------------------------ uses that a caller computes by itself

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Choose each module's taps for calls with such inputs; otherwise the first call chooses them.

        Required before a call with `expect`, since the modules are compared with a plain pass of the model.

        Args:
            inputs: the model's inputs, with rows first.

        Raises:
            GhostError: see the class.
        """
        self._tapped.prepare(dict(inputs))

    @property
    def takes_uses(self) -> bool:
        """Whether `expect` and `take` are supported: no module runs row by row, and no parameter is sharded."""
        return not self._trained.sharded and not self._tapped.ladder.splits

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on."""
        return self._memory.recomputes

    def expect(self, parameter: nn.Parameter) -> None:
        """Announce, during a call of the model, that a function with its own gradient uses a trained parameter.

        The function detaches the parameter, and calls `take` in its backward pass. The parameter's clipped sum is
        formed only after this use has arrived.

        Raises:
            GhostError: no call of the model is running with gradients enabled.
        """
        self._tapped.expect(parameter)

    def take(self, parameter: nn.Parameter, use: Use) -> None:
        """Receive a use that `expect` announced: its contribution to the gradient of each row.

        Args:
            parameter: a trained parameter.
            use: with the rows of the model's call.

        Raises:
            GhostError: the backward pass is not the clipper's, or the use has different rows.
        """
        self.record(self._tapped.ladder.target_of(parameter), use)

    # ------------------------------------------------------------------------------ norms, factors and sums

    def _clip(self, loss_B: Tensor, unit_B: Tensor, num_units: int, finish: Finish | None = None) -> ClipResult:
        early = None if self._by_parameter else GroupFactors.of(self._fitted, self._num_norms)
        sq_norm_GU, slack_GU = self._norms(loss_B, unit_B, num_units, early, finish)
        sq_norm_PU = None
        if self._by_parameter:
            sq_norm_PU, sq_norm_GU = sq_norm_GU, self._trained.grouped(sq_norm_GU)
            slack_GU = self._trained.grouped(slack_GU)
        factor_GU = clip_factors(self._fitted, sq_norm_GU, slack_GU)
        if early is not None:
            factor_GU = early.joined(factor_GU)
        result = self._result(sq_norm_GU, factor_GU, sq_norm_PU)
        # Last: if memory runs out before it, the microbatch can be retried.
        self._weigh(factor_GU[self._trained.group_P] if self._by_parameter else factor_GU)
        return result

    def _norms(
        self,
        loss_B: Tensor,
        unit_B: Tensor,
        num_units: int,
        early: GroupFactors | None = None,
        finish: Finish | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the backward pass and return each unit's squared gradient norm.

        Args:
            loss_B: (B,) losses with a graph, each depending only on its own row.
            unit_B: (B,) int64 unit of each row, best on the CPU; -1 for a padding row, whose loss gets weight 0.
            num_units: U.
            early: factors of independent groups. A group's sum may then be formed before the gradients of other groups
                arrive, if that takes less memory.
            finish: receives the sums formed during a backward pass; `add_clipped_sum_` adds the others.

        Returns:
            ``(sq_norm_GU, slack_GU)`` in float32 (float64 for a float64 model): squared norms of each group of
            parameters, and an upper bound of the rounding error in the square of a unit's share of the clipped sum.
        """
        if self._held and (num_units != 1 or bool((unit_B != 0).any())):
            raise GhostError(
                f"The clipper holds the first rows of a unit, but this microbatch has rows of {num_units} units, or "
                "padding. Pass the remaining rows of that unit as unit 0, in a call without other rows."
            )
        one = self._begin(loss_B, unit_B, num_units)
        one.finish = finish
        receiver: Pass | Measure | AddUpGroups = one
        if early is not None and self._forms_groups(loss_B, finish):
            every = self._trained.by_name.values()
            receiver = AddUpGroups(
                one, self._tapped.ladder.used_once, every, lambda: self._tally(one, num_norms=1), early
            )
        elif not self._held and self._passes(loss_B) == 2:
            receiver = Measure(one, self._tapped.ladder.used_once, self._tally(one, max_waiting=1))
        with self._passes_to(receiver, one, loss_B) as weight_B:
            torch.autograd.backward(loss_B, weight_B, retain_graph=isinstance(receiver, Measure))
        if self._held:
            one = self._pass = self._held.complete(one, loss_B.device)
        seen = set() if isinstance(receiver, Pass) else receiver.seen
        self._trained.refuse_missing(seen | one.contributions.keys())
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_GU, slack_GU = one.add_norms(receiver.tally if isinstance(receiver, Measure) else self._tally(one))
        if isinstance(receiver, AddUpGroups):
            for group, (sq_norm_U, slack_U) in receiver.norms.items():
                sq_norm_GU[group], slack_GU[group] = sq_norm_U, slack_U
        elif isinstance(receiver, Measure):
            one.contributions.clear()
            self._again = loss_B, sq_norm_GU + slack_GU
        others = self._is_packed and not self._checked.spread and bool((unit_B != unit_B[0]).any())
        if others and not bool(torch.isfinite(sq_norm_GU).all()):
            raise GhostError(
                "A unit's gradient is not finite, and no check has shown that non-finite values stay within their "
                "packed row, so they may have reached other units. Call GhostClipper.check_rows() before the first "
                "step, or do not pack the rows (microbatch.pack: false)."
            )
        return sq_norm_GU, slack_GU

    def _forms_groups(self, loss_B: Tensor, finish: Finish | None) -> bool:
        """Return whether the groups' sums are formed during the backward pass."""
        if self._trained.sharded or self._held or self.norm_method.backward_passes == 2:
            return False
        calls = self._tapped.calls
        return self._memory.sums_are_smaller(calls.rows or len(loss_B), calls.tokens, finish is not None)

    def _passes(self, loss_B: Tensor) -> int:
        """Return the number of backward passes."""
        if self.norm_method.backward_passes != "auto":
            return self.norm_method.backward_passes
        calls = self._tapped.calls
        sharded = self._trained.sharded
        return 1 if sharded else self._memory.needed(calls.rows or len(loss_B), calls.tokens, loss_B.device)

    def _begin(self, loss_B: Tensor, unit_B: Tensor, num_units: int) -> Pass:
        self._tapped.calls.differentiated(len(loss_B))
        rows = self._layouts.of(unit_B, num_units, loss_B.device)
        self._pass = Pass(rows, self.norm_method, groups=self._norm_of)
        return self._pass

    def _tally(self, one: Pass, max_waiting: int | None = None, num_norms: int | None = None) -> NormTally:
        return NormTally(
            one.rows,
            self.norm_method,
            self._trained.norm_dtype,
            lambda: self._flows.slack_factor(self.norm_method),
            max_waiting,
            num_norms or self._num_norms,
        )

    @contextlib.contextmanager
    def _passes_to(self, receiver: Receiver, one: Pass, loss_B: Tensor) -> Iterator[Tensor]:
        """Send the contributions of a backward pass to the receiver; the first time, check that rows are independent.

        The context is that of the backward pass, and gets the weights (B,) of the losses. A function around the pass
        would be one more frame of each tap's stack.
        """
        weight_B = (one.rows.unit_B >= 0).to(loss_B.dtype)
        try:
            if len(one.rows.real) > 1 and not (self._checked.packed if self._is_packed else self._checked.rows):
                self.refuse_coupled(loss_B, weight_B > 0)
                self._checked.note(self._is_packed)
            with self._receiving(receiver, len(loss_B)):
                yield weight_B
        finally:
            self._tapped.stop()

    @contextlib.contextmanager
    def _receiving(self, receiver: Receiver, num_rows: int) -> Iterator[None]:
        # Read once for a backward pass, in which no module changes the settings of products.
        self._receiver, self._num_rows, self._is_exact = receiver, num_rows, kernels.is_exact()
        try:
            with self._tapped.backward():
                yield
        finally:
            self._receiver = None

    def _run_backward(self, loss_B: Tensor, weight_B: Tensor, receiver: Receiver, retain_graph: bool = False) -> None:
        with self._receiving(receiver, len(loss_B)):
            torch.autograd.backward(loss_B, weight_B, retain_graph=retain_graph)

    def _weigh(self, factor_GU: Tensor) -> None:
        """Fix the factors (G, U) of the clipped sum; with two passes, run the second.

        The second pass adds each layer's weighted gradient as it arrives, and checks its norm. A unit with factor 0
        contributes exactly zero, even if its gradient is not finite.
        """
        one = self._last_pass()
        one.weigh(factor_GU)
        self._held.joining = False
        if self._again is None:
            return
        (loss_B, upper_GU), self._again = self._again, None
        one = self._pass = Pass(
            one.rows, self.norm_method, weights=one.weights, groups=self._norm_of, finish=one.finish
        )
        add_up = AddUp(one, self._tapped.ladder.used_once, self._tally(one, max_waiting=1))
        with self._passes_to(add_up, one, loss_B) as weight_B:
            torch.autograd.backward(loss_B, weight_B)
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_GU, _ = one.add_norms(add_up.tally)
        longer = ((sq_norm_GU > upper_GU) & (factor_GU > 0)).any()
        self._longer = longer if self._longer is None else self._longer | longer

    def settle(self) -> None:
        """See `UnitClipper.settle`."""
        longer, self._longer = self._longer, None
        if longer is not None and bool(longer):
            raise GhostError(
                "The second backward pass gave a unit a longer gradient than the first pass, which determined its "
                "clip factor, so an operation is not deterministic. Call torch.use_deterministic_algorithms(True), or "
                "clip in one pass (NormMethod(backward_passes=1))."
            )

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """See `UnitClipper.add_clipped_sum_`.

        Guarantee: the sum is formed in the dtype of ``total`` from the same factors whose norms were returned; no
        rounding to the parameter's dtype takes place.
        """
        with kernels.exact_matmul():
            self._last_pass().add_clipped_sum_(parameter, total)

    def _formed(self, parameter: nn.Parameter) -> Tensor | None:
        return self._last_pass().formed(parameter)

    def _last_pass(self) -> Pass:
        assert self._pass is not None, "a microbatch was differentiated"
        return self._pass

    def hold(self, losses: Tensor) -> None:
        """See `UnitClipper.hold`."""
        units_of(losses, None)
        one = self._begin(losses, torch.zeros(len(losses), dtype=torch.int64), 1)
        with self._passes_to(one, one, losses) as weight_B:
            torch.autograd.backward(losses, weight_B)
        self._held.add(one)

    def forget(self) -> None:
        """See `UnitClipper.forget`."""
        self._tapped.break_off()
        self._tapped.stop()
        self._tapped.calls.spend()
        self._pass = self._again = None
        if self._held.joining:
            raise incomplete_unit("train fewer parameters (LoRA), or shard the model")

    def remove(self) -> None:
        """Restore every module's class; the model is as it was before attachment."""
        self._tapped.remove()
        self._held = HeldUnit()
        self.forget()

    # -------------------------------------------------------------------------------- independence of rows

    @property
    def _is_packed(self) -> bool:
        """Whether the model's last call had rows laid end to end."""
        return bool(self._tapped.calls.packed.lengths)

    @property
    def rows_checked(self) -> bool:
        """Whether a check has shown that a row's loss has no gradient in other rows."""
        return self._checked.rows

    def check_rows(self, losses_of_row: Callable[[], Tensor], unit_index: Tensor) -> None:
        """See `UnitClipper.check_rows`; uses a separate forward and backward pass per probe.

        `backward` runs this check itself on the first batch, and keeps the graph for several passes. An engine that
        frees weights after their first use in a backward pass (ZeRO-3) cannot do that. Only this method checks, for
        packed rows, that non-finite values do not pass from one row to another.
        """

        def losses() -> Tensor:
            loss_B = losses_of_row()
            units_of(loss_B, unit_index)
            self._tapped.calls.differentiated(len(loss_B))
            return loss_B

        done, count, finite = 0, 1, []
        while done < count:  # as many as the rows of the call need, packed or not
            loss_B = losses()
            probes = row_probes(unit_index >= 0, self._is_packed)
            probe, count, done = probes[done], len(probes), done + 1
            self._run_backward(loss_B, _ones_at(probe.rows, loss_B), probe)
            finite += [] if probe.finite_B is None else [probe.finite_B]
        if finite:
            self._check_spread(losses, unit_index, SpreadProbe(torch.stack(finite).all(dim=0)))
        self._checked.note(self._is_packed)

    def _check_spread(self, losses: Callable[[], Tensor], unit_index: Tensor, probe: SpreadProbe) -> None:
        """Check that non-finite values stay within their packed row, forward and backward."""
        self._poisoned_B = probe.poisoned_B
        try:
            loss_B = losses()
        finally:
            self._poisoned_B = None
        self._run_backward(loss_B, _ones_at(unit_index >= 0, loss_B), probe)
        # A process with a single row has nothing to check, and relies on the others.
        self._checked.spread = len(loss_B) == 1 or bool(probe.healthy_B.any())

    # ------------------------------------------------------- interface of the taps, see `dpllm.ghost.tapped_model`

    def begin_call(self, call: Call) -> None:
        """Record that a call of the model begins."""
        call.poisoned_B = self._poisoned_B
        self._pass = self._again = None

    def check_rows_again(self) -> None:
        """Probe the independence of rows again in the next backward pass."""
        self._checked.rows = False

    def record(self, target: Target, use: Use) -> None:
        """Receive the contribution of one use of a parameter to the gradient of each row.

        Raises:
            GhostError: the backward pass is not the clipper's, or the use has a different number of rows.
        """
        if self._receiver is None:
            raise GhostError(
                "backward() was called on a loss directly, or the model has a second clipper. Pass the per-row losses "
                "to GhostClipper.backward(), which clips them, and call remove() on any clipper that is no longer "
                "used."
            )
        grad = use.grad
        self._flows.note(grad)
        if grad.shape[0] != self._num_rows:
            raise self._other_rows(target.name, grad.shape)
        if self._is_exact:
            self._receiver.take(target.name, target.parameter, use)
        else:
            with kernels.exact_matmul():
                self._receiver.take(target.name, target.parameter, use)

    def _other_rows(self, name: str, shape: torch.Size) -> GhostError:
        if self._is_packed:
            return NoRuleError(
                f"{name}: a module that uses it works on shape {tuple(shape)}, which cannot be split into the packed "
                "rows. Freeze the parameter, or do not pack the rows (microbatch.pack: false)."
            )
        return NoRuleError(
            f"{name}: a module that uses it works on {shape[0]} rows, but there are {self._num_rows} losses. Every "
            "module with trainable parameters must keep the batch's rows as its first dimension, and all model calls "
            "behind a loss must use the same rows. Otherwise freeze these parameters."
        )

    def weighted_sums(self, loss_B: Tensor, weight_B: Tensor) -> Callable[[str], Tensor]:
        """Run backward through the taps; return, by name, a parameter's sum of row gradients with these weights."""
        rows = Rows.of(torch.arange(len(loss_B)), len(loss_B), loss_B.device)
        one = Pass(rows, self.norm_method, groups=self._norm_of)
        with torch.autocast(loss_B.device.type, enabled=False):
            self._run_backward(loss_B, torch.ones_like(loss_B), one)
            with kernels.exact_matmul(), torch.no_grad():
                one.add_norms(self._tally(one))
        one.weigh(weight_B.to(loss_B.device, self._trained.norm_dtype).expand(self._num_norms, -1))

        def weighted(name: str) -> Tensor:
            parameter = self._trained.by_name[name]
            total = Sum.of(parameter)
            with torch.autocast(loss_B.device.type, enabled=False), kernels.exact_matmul():
                if one.has(parameter):
                    one.add_clipped_sum_(parameter, total)
                return total.filled()

        return weighted

    def refuse_coupled(self, loss_B: Tensor, real_B: Tensor | None = None) -> None:
        """Raise `CoupledError` if a selected row's loss (B,) has a gradient in another row; default: all rows."""
        for probe in row_probes(torch.ones_like(loss_B) > 0 if real_B is None else real_B, self._is_packed):
            self._run_backward(loss_B, _ones_at(probe.rows, loss_B), probe, retain_graph=True)


def _ones_at(rows: Tensor, loss_B: Tensor) -> Tensor:
    """Return loss weights: 1 for these rows, given as indices or as a mask, 0 for the others."""
    weight_B = torch.zeros_like(loss_B)
    weight_B[rows] = 1
    return weight_B
