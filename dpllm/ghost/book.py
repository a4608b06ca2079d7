"""The book: per-unit gradient norms and the clipped sum from one backward pass.

While a clipper is attached, trained weights are detached where modules use them, so autograd computes no weight
gradients. The modules' taps give the book the input and the output gradient of each use. The exact norms are computed
from these. Once the clip factors are known, so is the clipped sum, at the cost of autograd's own weight gradients
(book-keeping, Bu et al. 2023, arXiv:2210.00038).

Shape suffixes: B rows, G groups of parameters, U units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels, memory
from dpllm.ghost.checks import RowProbe, SpreadProbe, probed_rows, refuse_other_rows, unmeasured_spread
from dpllm.ghost.contributions import Layouts, Rows, Use
from dpllm.ghost.errors import GhostError
from dpllm.ghost.model_calls import not_repeatable
from dpllm.ghost.norm_method import Flows, NormMethod
from dpllm.ghost.norms import NormTally
from dpllm.ghost.parameters import Groups, TrainedParameters, one_group
from dpllm.ghost.receivers import AddUp, AddUpGroups, HeldUnit, Measure, Pass, Receiver
from dpllm.ghost.rules import (
    refuse_coupled_modules,
    refuse_skipped_layers,
    refuse_switching,
    refuse_wrapped,
    two_passes_over_shards,
)
from dpllm.ghost.sums import Finish, GroupFactors, Sum
from dpllm.ghost.tapped_model import TappedModel
from dpllm.ghost.taps import Call, Target


@dataclass
class Checked:
    """The measured facts about the independence of rows.

    Attributes:
        rows: whether a row's loss was seen to have no gradient in another row of the model's call.
        packed: the same, for packed rows.
        spread: whether values that are not finite were seen to stay within their packed row.
        finite_B: the packed rows that received finite values, while they are checked.
    """

    rows: bool = False
    packed: bool = False
    spread: bool = False
    finite_B: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))

    def note(self, packed: bool) -> None:
        """Note that rows are independent in the layout of the last call of the model, packed or not."""
        self.rows = True
        self.packed |= packed


@dataclass(frozen=True)
class Again:
    """Losses (B,) that are differentiated twice, and the norms of the first pass."""

    loss_B: Tensor
    sq_norm_GU: Tensor
    slack_GU: Tensor


class Book:
    """The norms and clipped sums of one microbatch after another.

    Args:
        model: any module whose inputs and outputs have the rows of the batch first.
        norm_method: how norms are computed.
        groups: returns the groups of parameter names that get separate norms, from all names and shapes; None: one
            group.

    Raises:
        GhostError: a module that couples rows, a parameter without a rule, no trainable parameter, a compiled or
            data-parallel model.
    """

    def __init__(self, model: nn.Module, norm_method: NormMethod | None = None, groups: Groups | None = None) -> None:
        """Check the model and attach the hooks."""
        self.norm_method = norm_method or NormMethod()
        refuse_wrapped(model)
        refuse_coupled_modules(model)
        refuse_skipped_layers(model)
        refuse_switching(model)
        self._trained = TrainedParameters(model, groups or one_group)
        if self.sharded and self.norm_method.backward_passes == 2:
            raise two_passes_over_shards()
        self._flows = Flows()
        self._held = HeldUnit()
        self._layouts = Layouts()
        self._pass: Pass | None = None
        self._receiver: Receiver | None = None
        self._num_rows = 0  # of the losses that are differentiated
        self._is_exact = False  # whether products are exact in that pass without further ado
        self._again: Again | None = None
        self._longer: Tensor | None = None  # whether a second pass since `settle` gave a unit a longer gradient
        self.checked = Checked()
        self._memory = memory.Passes(model)
        self.tapped = TappedModel(model, self._trained, self)

    # ----------------------------------------------------------------- interface of the tapped model

    @property
    def sharded(self) -> bool:
        """Whether processes hold parts of the parameters."""
        return self._trained.sharded

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on."""
        return self._memory.recomputes

    @property
    def num_groups(self) -> int:
        """G, the groups of parameters with separate norms."""
        return self._trained.num_groups

    def begin_call(self, call: Call) -> None:
        """See `dpllm.ghost.tapped_model.Receiver`."""
        if isinstance(self._receiver, SpreadProbe):
            call.poisoned_B = self._receiver.poisoned_B
        self._pass = self._again = None

    def arrived(self, *tensors: Tensor) -> None:
        """See `dpllm.ghost.tapped_model.Receiver`."""
        self._flows.note(tensors)

    def record(self, target: Target, use: Use) -> None:
        """See `dpllm.ghost.tapped_model.Receiver`."""
        assert self._receiver is not None, "gradients arrive in a backward pass"
        refuse_other_rows(target.name, use.grad.shape, self._num_rows, self.is_packed)
        if self._is_exact:
            self._receiver.take(target.name, target.parameter, use)
        else:
            with kernels.exact_matmul():
                self._receiver.take(target.name, target.parameter, use)

    def weighted_sums(self, loss_B: Tensor, weight_B: Tensor) -> Callable[[str], Tensor]:
        """See `dpllm.ghost.tapped_model.Receiver`."""
        rows = Rows.of(torch.arange(len(loss_B)), len(loss_B), loss_B.device)
        one = Pass(rows, self.norm_method, groups=self._trained.groups)
        with torch.autocast(loss_B.device.type, enabled=False):
            with self.tapped.backward(), self._receiving(one, len(loss_B)):
                torch.autograd.backward(loss_B, torch.ones_like(loss_B))
            with kernels.exact_matmul(), torch.no_grad():
                one.add_norms(self._tally(one))
        one.weigh(weight_B.to(loss_B.device, self._trained.norm_dtype).expand(self.num_groups, -1))

        def weighted(name: str) -> Tensor:
            parameter = self._trained.by_name[name]
            total = Sum.of(parameter)
            with torch.autocast(loss_B.device.type, enabled=False), kernels.exact_matmul():
                if id(parameter) in one.contributions:
                    one.add_clipped_sum_(parameter, total)
                return total.filled()

        return weighted

    # ----------------------------------------------------------------------- norms

    def backward(
        self,
        loss_B: Tensor,
        unit_B: Tensor,
        num_units: int,
        factors: GroupFactors | None = None,
        finish: Finish | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the backward pass and return each unit's squared gradient norm.

        Args:
            loss_B: (B,) losses with a graph, each depending only on its own row.
            unit_B: (B,) int64 unit of each row, best on the CPU; -1 for a padding row, whose loss gets weight 0.
            num_units: U.
            factors: of groups that do not depend on each other. The sum of a group may then be formed before the
                gradients of other groups arrive, where that takes less memory.
            finish: takes the sums that are formed during a backward pass; `add_clipped_sum_` adds the others.

        Returns:
            ``(sq_norm_GU, slack_GU)`` in float32 (float64 for a float64 model): squared norms of each group of
            parameters, and an upper bound of the rounding error in the square of a unit's share of the clipped sum.
        """
        if self._held and (num_units != 1 or bool((unit_B != 0).any())):
            raise GhostError(
                f"Rows of a unit are held, and this microbatch has rows of {num_units} units or padding. Pass the "
                "other rows of that unit in a call without other rows, as unit 0."
            )
        if factors is not None and self._by_groups(loss_B, finish):
            return self._groups_pass(loss_B, unit_B, num_units, factors, finish)
        if self._passes(loss_B) == 2 and not self._held:
            return self._first_pass(loss_B, unit_B, num_units, finish)
        one = self._begin(loss_B, unit_B, num_units)
        self._differentiate(one, loss_B, one)
        if self._held:
            one = self._pass = self._held.complete(one, loss_B.device)
        self._trained.refuse_missing(one.contributions.keys())
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_GU, slack_GU = one.add_norms(self._tally(one))
        return self._settled(unit_B, sq_norm_GU), slack_GU

    def _by_groups(self, loss_B: Tensor, finish: Finish | None) -> bool:
        """Whether the sums of groups are formed during the backward pass."""
        if self.sharded or self._held or self.norm_method.backward_passes == 2:
            return False
        calls = self.tapped.calls
        return self._memory.sums_are_smaller(calls.rows or len(loss_B), calls.tokens, finish is not None)

    def _groups_pass(
        self, loss_B: Tensor, unit_B: Tensor, num_units: int, factors: GroupFactors, finish: Finish | None
    ) -> tuple[Tensor, Tensor]:
        """Clip each group when its last gradient arrives; the rest as in one pass."""
        one = self._begin(loss_B, unit_B, num_units)
        one.finish = finish
        groups = AddUpGroups(
            one,
            self.tapped.ladder,
            self._trained.by_name.values(),
            lambda: self._tally(one, num_groups=1),
            factors,
        )
        self._differentiate(one, loss_B, groups)
        self._trained.refuse_missing(groups.seen | one.contributions.keys())
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_GU, slack_GU = one.add_norms(self._tally(one))
        for group, (sq_norm_U, slack_U) in groups.norms.items():
            sq_norm_GU[group], slack_GU[group] = sq_norm_U, slack_U
        return self._settled(unit_B, sq_norm_GU), slack_GU

    def refuse_unclipped(self, loss_B: Tensor, outside: bool) -> None:
        """Make sure that only clipped parameters will receive a gradient.

        Args:
            loss_B: (B,) losses with a graph.
            outside: whether to search their graph for parameters that the model does not hold.

        Raises:
            GhostError: another parameter would.
        """
        self._trained.refuse_others(added=outside)
        if outside:
            self._trained.refuse_outside(loss_B)

    def hold(self, loss_B: Tensor) -> None:
        """Run the backward pass of some rows of one unit, and keep their share of its gradient for the next pass.

        Args:
            loss_B: (B,) losses with a graph, all of the same unit.
        """
        one = self._begin(loss_B, torch.zeros(len(loss_B), dtype=torch.int64), 1)
        self._differentiate(one, loss_B, one)
        self._held.add(one)

    def _settled(self, unit_B: Tensor, sq_norm_GU: Tensor) -> Tensor:
        """Refuse norms that are not finite if the values may have come from other units."""
        several = self.is_packed and not self.checked.spread and bool((unit_B != unit_B[0]).any())
        if several and not bool(torch.isfinite(sq_norm_GU).all()):
            raise unmeasured_spread()
        return sq_norm_GU

    def _begin(self, loss_B: Tensor, unit_B: Tensor, num_units: int) -> Pass:
        return self._begin_over(self._layouts.of(unit_B, num_units, loss_B.device), loss_B)

    def _begin_over(self, rows: Rows, loss_B: Tensor) -> Pass:
        self.tapped.calls.differentiated(len(loss_B))
        self._pass = Pass(rows, self.norm_method, groups=self._trained.groups)
        return self._pass

    def _differentiate(self, one: Pass, loss_B: Tensor, receiver: Receiver, retain_graph: bool = False) -> None:
        """Pass the contributions of these rows to the receiver."""
        weight_B = (one.rows.unit_B >= 0).to(loss_B.dtype)
        try:
            with self.tapped.backward():
                if len(one.rows.real) > 1 and not self._rows_checked:
                    self._check_rows(loss_B, weight_B)
                with self._receiving(receiver, len(loss_B)):
                    torch.autograd.backward(loss_B, weight_B, retain_graph=retain_graph)
        finally:
            self.tapped.stop()

    @contextlib.contextmanager
    def _receiving(self, receiver: Receiver, num_rows: int) -> Iterator[None]:
        before = self._receiver, self._num_rows, self._is_exact
        # Read once for a backward pass, in which no module changes the settings of products.
        self._receiver, self._num_rows, self._is_exact = receiver, num_rows, kernels.is_exact()
        try:
            yield
        finally:
            self._receiver, self._num_rows, self._is_exact = before

    def _tally(self, one: Pass, max_waiting: int | None = None, num_groups: int | None = None) -> NormTally:
        trained, norm_method = self._trained, self.norm_method
        return NormTally(
            one.rows,
            norm_method,
            trained.norm_dtype,
            lambda: self._flows.slack_factor(norm_method),
            max_waiting,
            num_groups or trained.num_groups,
        )

    # ---------------------------------------------------------- independence of rows

    @property
    def _rows_checked(self) -> bool:
        return self.checked.packed if self.is_packed else self.checked.rows

    def refuse_coupled(self, loss_B: Tensor) -> None:
        """See `dpllm.ghost.tapped_model.Receiver`."""
        with self.tapped.backward():
            self._probe_rows(loss_B, torch.ones_like(loss_B))

    def _probe_rows(self, loss_B: Tensor, weight_B: Tensor) -> None:
        for rows in probed_rows(weight_B > 0, self.is_packed):
            self._backward_of(loss_B, rows, RowProbe(rows, self.is_packed), retain_graph=True)

    def _check_rows(self, loss_B: Tensor, weight_B: Tensor) -> None:
        """Measure once that a row's loss has no gradient in another row."""
        self._probe_rows(loss_B, weight_B)
        self.checked.note(self.is_packed)

    def probe(self, loss_B: Tensor, which: int, unit_B: Tensor, num_units: int) -> int:
        """Run the backward pass of some rows' losses and make sure that no other row receives a gradient.

        Args:
            loss_B: (B,) losses with a graph.
            which: the index of one of the row sets of `dpllm.ghost.checks.probed_rows`, from 0.
            unit_B: (B,) the rows' units, -1 for padding.
            num_units: U.

        Returns:
            The number of sets; the same for every microbatch, as long as all are packed or none is.
        """
        sets = probed_rows(unit_B >= 0, self.is_packed)
        probe = RowProbe(sets[which], self.is_packed)
        self._probe_backward(loss_B, unit_B, num_units, sets[which], probe)
        if probe.finite_B is not None:
            self.checked.finite_B = probe.finite_B if which == 0 else self.checked.finite_B & probe.finite_B
        return len(sets)

    def probe_spread(self, losses_of_row: Callable[[], Tensor], unit_B: Tensor, num_units: int) -> None:
        """Make sure that values that are not finite stay within their packed row, forward and backward.

        Rows that `probe` saw to be non-finite by themselves give no information; a batch of only such rows measures
        nothing.
        """
        poisoned_B = torch.zeros_like(self.checked.finite_B)
        poisoned_B[1::2] = True
        probe = SpreadProbe(poisoned_B, self.checked.finite_B)
        with self._receiving(probe, len(unit_B)):
            loss_B = losses_of_row()
        self._probe_backward(loss_B, unit_B, num_units, unit_B >= 0, probe)
        # A process with a single row has nothing to measure, and relies on the others.
        self.checked.spread = len(unit_B) == 1 or bool(probe.healthy_B.any())

    def note_rows_checked(self) -> None:
        """Note that rows are independent in the layout of the last call of the model."""
        self.checked.note(self.is_packed)

    def _probe_backward(
        self, loss_B: Tensor, unit_B: Tensor, num_units: int, rows: Tensor, probe: RowProbe | SpreadProbe
    ) -> None:
        self._begin(loss_B, unit_B, num_units)
        with self.tapped.backward():
            self._backward_of(loss_B, rows, probe, retain_graph=False)

    def _backward_of(self, loss_B: Tensor, rows: Tensor, probe: RowProbe | SpreadProbe, retain_graph: bool) -> None:
        weight_B = torch.zeros_like(loss_B)
        weight_B[rows] = 1
        with self._receiving(probe, len(loss_B)):
            torch.autograd.backward(loss_B, weight_B, retain_graph=retain_graph)

    # -------------------------------------------------------------------- two passes

    def _passes(self, loss_B: Tensor) -> int:
        if self.norm_method.backward_passes != "auto":
            return self.norm_method.backward_passes
        calls = self.tapped.calls
        return 1 if self.sharded else self._memory.needed(calls.rows or len(loss_B), calls.tokens, loss_B.device)

    def _first_pass(
        self, loss_B: Tensor, unit_B: Tensor, num_units: int, finish: Finish | None
    ) -> tuple[Tensor, Tensor]:
        """Measure each layer's norm as its gradient arrives; keep only parameters with several uses."""
        one = self._begin(loss_B, unit_B, num_units)
        one.finish = finish
        measure = Measure(one, self.tapped.ladder, self._tally(one, max_waiting=1))
        self._differentiate(one, loss_B, measure, retain_graph=True)
        self._trained.refuse_missing(measure.seen)
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_GU, slack_GU = one.add_norms(measure.tally)
        one.contributions.clear()
        self._again = Again(loss_B, sq_norm_GU, slack_GU)
        return self._settled(unit_B, sq_norm_GU), slack_GU

    def _second_pass(self, again: Again, factor_GU: Tensor) -> None:
        """Differentiate again, add up each layer's weighted gradient as it arrives, and check its norm."""
        first = self._of_now()
        one = self._begin_over(first.rows, again.loss_B)
        one.weights, one.finish = first.weights, first.finish
        add_up = AddUp(one, self.tapped.ladder, self._tally(one, max_waiting=1))
        self._differentiate(one, again.loss_B, add_up)
        with kernels.exact_matmul(), torch.no_grad():
            sq_norm_GU, _ = one.add_norms(add_up.tally)
        longer = ((sq_norm_GU > again.sq_norm_GU + again.slack_GU) & (factor_GU > 0)).any()
        self._longer = longer if self._longer is None else self._longer | longer

    def settle(self) -> None:
        """Read what the second passes since the last call have measured; the host waits for them.

        Raises:
            GhostError: one gave a unit a longer gradient than the first pass, from which its clip factor comes.
        """
        longer, self._longer = self._longer, None
        if longer is not None and bool(longer):
            raise not_repeatable()

    # ------------------------------------------------------------------ clipped sums

    def weigh(self, factor_GU: Tensor) -> None:
        """Fix the factors of the clipped sum, which `add_clipped_sum_` then forms one parameter at a time.

        Args:
            factor_GU: (G, U) clip factors; a unit with factor 0 contributes exactly zero, even if its gradient is
                not finite.

        Raises:
            GhostError: with two passes, the second gave other gradients than the first.
        """
        self._of_now().weigh(factor_GU)
        self._held.joining = False
        if self._again is not None:
            again, self._again = self._again, None
            self._second_pass(again, factor_GU)

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """Add sum_u factor_u g_u of one parameter to ``total``, once, and drop its contributions.

        Args:
            parameter: a trainable parameter.
            total: of its full shape.

        Guarantee: the sum is formed in the dtype of ``total`` from the same factors whose norm was returned by
        `backward`; no rounding to the parameter's dtype takes place.
        """
        with kernels.exact_matmul():
            self._of_now().add_clipped_sum_(parameter, total)

    def _of_now(self) -> Pass:
        assert self._pass is not None, "a microbatch was differentiated"
        return self._pass

    def forget(self) -> None:
        """Forget a microbatch whose pass failed; the rows of a unit held before it are kept.

        Raises:
            GhostError: the pass failed while it was joined to the held rows, which then contain only a part of it.
        """
        self.tapped.break_off()
        self._forget_pass()
        self.tapped.calls.spend()
        if self._held.joining:
            raise GhostError(
                "The parts of a unit that has more rows than fit at once could not be combined: out of memory. Allow "
                "fewer rows per unit (max_rows_per_unit), train fewer parameters (LoRA), or shard the model."
            )

    def _forget_pass(self) -> None:
        """Forget the last backward pass; the calls of the model since then stay part of the next one."""
        self.tapped.stop()
        self._pass = self._again = None

    @property
    def is_packed(self) -> bool:
        """Whether the model was last called with rows laid end to end."""
        return bool(self.tapped.calls.packed.lengths)

    @property
    def packed_tokens(self) -> int:
        """The tokens of all rows, if the model was last called with several rows laid end to end; otherwise 0."""
        lengths = self.tapped.calls.packed.lengths
        return sum(lengths) if len(lengths) > 1 else 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return dict(self._trained.by_name)

    def remove(self) -> None:
        """Undo the hooks."""
        self.tapped.remove()
        self._held.clear()
        self._forget_pass()
        self.tapped.calls.spend()
