"""Per-unit clipping by any method, and `PerUnitClipper`, the fallback for any model: one unit at a time by autograd.

Steps, engines and checks use only `UnitClipper`. `dpllm.ghost.GhostClipper` computes the units' gradients in one
backward pass for all units, `dpllm.ghost.PerUnitClipper` one unit after another, where they cannot be clipped in one
pass. Each call of the model gets the rows of
one unit (`dpllm.training.microbatches`, ``one_unit``). Autograd computes that unit's gradient of all trainable
parameters, its norm is computed in float32, and the scaled gradient is added to the step's sum. This is the microbatch
method of Abadi et al. 2016 (arXiv:1607.00133): exact for every structure, but slower, since one unit's rows do not fill
a device.

A unit's gradient depends only on its own rows if the model carries no state from call to call. Modules that keep
running statistics, and those known to keep a choice made by the length of earlier rows, are refused here; everything
else is checked by measurement (`dpllm.training.checks.independence`).

Shape suffixes: B rows, G groups of parameters, P parameters, U units (0 or 1 here).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.kernels import accumulation_dtype, exact_matmul
from dpllm.ghost.model_calls import PackedRows, refuse_long_rows, tokens_by_themselves, tokens_of_call
from dpllm.ghost.parameters import TrainedParameters, nodes_of, shapes_of, state_of_gradient
from dpllm.ghost.refusals import GhostError, refuse_for_one_unit
from dpllm.ghost.sums import Finish, Sum, clip_factors, with_sizes
from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.parts import AdaptiveClipping, Clipping, frozen_copy


@dataclass(frozen=True)
class ClipResult:
    """Norms and clip factors of the units of one microbatch.

    They depend on the data: no guarantee covers their release.

    Attributes:
        norms: (U,) float32, each unit's gradient norm over all trainable parameters.
        factors: (U,) float32, the factor of each unit's gradient; exactly 0 for a non-finite one. (G, U) if the
            clipping has several parameter groups: 0 in a group that is not finite.
        parameter_norms: name to (U,) float32, each unit's norm in one parameter; empty unless requested.
    """

    norms: Tensor
    factors: Tensor
    parameter_norms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_nonfinite(self) -> int:
        """The number of units with a non-finite gradient, which contributed zero, at least in its group."""
        return int((~torch.isfinite(self.norms)).sum())


class UnitClipper(abc.ABC):
    """Bounds the contribution of each unit to ``.grad``.

    Args:
        model: the model whose trainable parameters are clipped.
        clip_norm: C > 0, for flat clipping.
        clipping: a different bound on contributions, instead of ``clip_norm``.
        parameter_norms: whether results include each unit's norm in each parameter.

    Attributes:
        one_unit: whether each call of the model gets the rows of only one unit.

    Raises:
        ValueError: both ``clip_norm`` and ``clipping`` are given, or neither; or the clipping is not a frozen
            dataclass.
        GhostError: see `dpllm.ghost.parameters.TrainedParameters`.
    """

    one_unit: ClassVar[bool] = False
    any_of: Callable[[Sequence[bool]], list[bool]] | None = None
    """Returns for each flag whether it is set on any of the processes that call the model together, since their
    passes communicate; None: this process calls it alone. It is a collective."""

    def __init__(
        self, model: nn.Module, clip_norm: float | None, clipping: Clipping | None, parameter_norms: bool
    ) -> None:
        """Choose the clipping, and find the parameters."""
        if (clip_norm is None) == (clipping is None):
            raise ValueError("Pass either clip_norm (flat clipping) or clipping (another kind), not both.")
        self._clipping: Clipping = FlatClipping(clip_norm) if clip_norm is not None else frozen_copy(clipping)  # type: ignore[arg-type]
        self._trained = TrainedParameters(model, self._clipping.groups)
        self._by_parameter = parameter_norms
        self._fit()
        self._broken_off = False  # whether .grad may hold a part of a sum only
        self._calls = 0  # of `backward`; engines call `clip`, and the run's watch sees other gradients

    @property
    def clipping(self) -> Clipping:
        """How contributions are bounded. Only the threshold of an adaptive clipping may be replaced."""
        return self._clipping

    @clipping.setter
    def clipping(self, clipping: Clipping) -> None:
        before = self._clipping
        adapts = isinstance(before, AdaptiveClipping) and isinstance(clipping, AdaptiveClipping)
        if not adapts or clipping != before.at(clipping.threshold):  # type: ignore[attr-defined]
            raise GhostError(
                f"The clipper was created with {before} and cannot switch to {clipping}: noise and ε belong to the "
                "former, and no ε covers a clipping that follows the data. Choose C without the private rows. The "
                "kind 'quantile' follows the norms through noisy counts that ε covers"
            )
        self._clipping = clipping
        self._fit()

    def _fit(self) -> None:
        """Give the clipping this model's group sizes, if its factors depend on them."""
        self._fitted = with_sizes(self._clipping, shapes_of(self._trained.by_name))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return dict(self._trained.by_name)

    @property
    def threshold(self) -> float:
        """The norm above which a gradient is scaled down: C, or the current threshold of an adaptive clipping."""
        return self.clipping.threshold if isinstance(self.clipping, AdaptiveClipping) else self.clipping.clip_norm

    def backward(self, losses: Tensor, unit_index: Tensor | None = None) -> ClipResult:
        """Run backward, clip each unit, and add the clipped sum to ``.grad``.

        Args:
            losses: (B,) one loss per row, with a graph, each depending only on its own row
                (`dpllm.per_sequence_loss`).
            unit_index: (B,) integers: the unit of each row, 0 <= unit < U; a unit's gradient is the sum of its rows'.
                -1 marks a padding row of weight 0. None: a row is a unit.

        Returns:
            The units' norms and factors.

        Raises:
            GhostError: losses of a different shape or without a graph; a unit index of a different shape; a parameter
                that received no norm, or would receive a gradient that is not clipped; or the previous call failed
                while it added to ``.grad``. Parameters outside the model, and those added after the clipper was
                created, are searched for in the calls 1, 2, 4, 8, ….
        """
        unit_B, num_units = units_of(losses, unit_index)
        self._refuse_broken_off()
        self._calls += 1
        self._trained.refuse_others(losses, everywhere=self._calls & (self._calls - 1) == 0)
        result = self._clip(losses, unit_B, num_units)
        self.settle()
        self._broken_off = True
        with exact_matmul():
            for parameter in self._trained.by_name.values():
                self._add_to_grad(parameter)
        self._broken_off = False
        return result

    def _refuse_broken_off(self) -> None:
        """Raise `GhostError` if an error or Ctrl-C interrupted the last sum, and ``.grad`` still contains it."""
        gradients = [p.grad for p in self._trained.by_name.values()] if self._broken_off else []
        if any(grad is not None and bool(grad.any()) for grad in gradients):
            raise GhostError(
                "The last backward() failed while it added its sum to .grad, so some parameters already hold the "
                "gradients of its units, and a second attempt would add them again. Call "
                "optimizer.zero_grad(set_to_none=True), and compute all units of the step again."
            )

    def _add_to_grad(self, parameter: nn.Parameter) -> None:
        """Add a clipped sum to ``.grad``, in the accumulation dtype.

        A bfloat16 sum would be rounded by up to its own size times 2^-9, more than one unit's maximal change.
        """
        dtype, grad = accumulation_dtype(parameter.dtype), parameter.grad
        if grad is not None and grad.dtype == dtype:
            self.add_clipped_sum_(parameter, Sum.onto(grad))
            return
        gradient = self._formed(parameter) if grad is None else None
        if gradient is None or gradient.dtype != dtype or not gradient.is_contiguous():
            total = Sum(parameter.shape, dtype, parameter.device) if grad is None else Sum.onto(grad.to(dtype))
            if gradient is not None:
                total.take_(gradient)
            self.add_clipped_sum_(parameter, total)
            gradient = total.filled()
        if parameter.grad_dtype != dtype:
            parameter.grad = None
            parameter.grad_dtype = dtype
        parameter.grad = gradient.detach()  # of a sum of several: may be written to in place with gradients on

    def _formed(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a parameter's clipped sum, once, if nothing has to be added to it; None: use `add_clipped_sum_`."""
        return None

    @abc.abstractmethod
    def hold(self, losses: Tensor) -> None:
        """Process some rows of one unit that has more rows than fit in memory at once.

        The next `clip` or `backward` must get the unit's remaining rows and no others. It completes the unit's
        gradient, which is clipped as a whole. In between, the memory held is at most the smaller of the unit's
        activations (half as much again on a CPU) and one gradient of the whole model.

        Args:
            losses: (B,) one loss per row, with a graph, all of the same unit.

        Raises:
            GhostError: losses of another shape or without a graph.
        """

    def clip(self, losses: Tensor, unit_index: Tensor | None = None, finish: Finish | None = None) -> ClipResult:
        """Do the same as `backward` without the sum, which `add_clipped_sum_` forms one parameter at a time.

        For engines that shard the model, so that no process can hold the sum of all parameters.

        Args:
            losses: as in `backward`.
            unit_index: as in `backward`.
            finish: called within the backward pass for each parameter whose sum can be formed there, with several
                parameter groups or two passes. It takes the sum by `add_clipped_sum_`; the sums of the other parameters
                are taken afterwards. If this method raises, drop everything that ``finish`` made.
        """
        result = self._clip(losses, *units_of(losses, unit_index), finish)
        self.settle()
        return result

    def run(
        self,
        loss_of: Callable[[Mapping[str, Any]], Tensor],
        inputs: Mapping[str, Any],
        unit_index: Tensor | None = None,
        finish: Finish | None = None,
    ) -> tuple[Tensor, ClipResult]:
        """Compute a microbatch's losses, and do the same as `clip`, without waiting for the device.

        The values that `clip` reads from the device for its checks are read by `settle`, once for all microbatches of a
        step.

        Args:
            loss_of: maps the inputs to one loss per row (B,), with a graph.
            inputs: of the model and the loss.
            unit_index: as in `backward`.
            finish: as in `clip`.

        Returns:
            The losses (B,) without their graph, and the units' norms and factors.
        """
        losses = loss_of(inputs)
        return losses.detach(), self._clip(losses, *units_of(losses, unit_index), finish)

    @abc.abstractmethod
    def _clip(self, loss_B: Tensor, unit_B: Tensor, num_units: int, finish: Finish | None = None) -> ClipResult:
        """See `clip`, with the units as `units_of` returns them."""

    def _result(self, sq_norm_GU: Tensor, factor_GU: Tensor, sq_norm_PU: Tensor | None) -> ClipResult:
        """Return the units' norms and factors; ``sq_norm_PU`` is needed if parameter norms were requested."""
        by_parameter: dict[str, Tensor] = {}
        if self._by_parameter and sq_norm_PU is not None:
            by_parameter = dict(zip(self._trained.by_name, sq_norm_PU.clamp_min(0).sqrt().float(), strict=True))
        factors = factor_GU.float() if len(factor_GU) > 1 else factor_GU[0].float()
        return ClipResult(sq_norm_GU.sum(dim=0).clamp_min(0).sqrt().float(), factors, by_parameter)

    def settle(self) -> None:
        """Read what the calls of `run` have measured on the device. Call it before using their sums.

        Raises:
            GhostError: with two backward passes, the second gave a unit a longer gradient than the first, which
                determined its clip factor: no sum since this method's last call may be released.
        """
        return

    def row_norms(self, losses: Tensor, unit_index: Tensor) -> Tensor:
        """Return the gradient norm of each row (B,) by itself, for checks. Call `forget` afterwards.

        Args:
            losses: (B,) one loss per row, with a graph.
            unit_index: (B,) the rows' numbers, from 0.

        Returns:
            (B,) norms; -1 if a norm is unknown because another row is not finite. If run one unit at a time, such a row
            makes the unit's contribution zero in any case.
        """
        return self.clip(losses, unit_index).norms

    @property
    def rows_checked(self) -> bool:
        """Whether a check has shown that a row's loss has no gradient in other rows, or no other units' rows exist."""
        return self.one_unit

    def check_rows(self, losses_of_row: Callable[[], Tensor], unit_index: Tensor) -> None:
        """Check that a row's loss has no gradient in other rows, if rows of several units share a call.

        Args:
            losses_of_row: runs the model again at each call and returns the losses (B,).
            unit_index: (B,), -1 for a padding row.

        Raises:
            GhostError: a row's loss depends on another row.
        """
        return

    @abc.abstractmethod
    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """Add one parameter's share of the clipped sum of the last or current `clip` to ``total``, once.

        Args:
            parameter: one of `parameters`.
            total: of the parameter's full shape.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Drop a microbatch whose forward or backward pass failed, so that its rows can be processed again.

        Rows that `hold` received are kept. No part of the microbatch may have been added to a sum.

        Raises:
            GhostError: the pass failed while it was joined to the held rows, which cannot be undone.
        """

    @abc.abstractmethod
    def remove(self) -> None:
        """Restore the model."""


def units_of(losses: Tensor, unit_index: Tensor | None) -> tuple[Tensor, int]:
    """Return the unit of each row (B,), -1 for padding, and the number of units.

    Raises:
        GhostError: see `UnitClipper.backward`.
    """
    if not isinstance(losses, Tensor):
        raise GhostError(
            f"The loss is a {type(losses).__name__}, but a tensor with one loss per row (B,) is needed. Return it from "
            "the loss function, for instance dpllm.per_sequence_loss(outputs.logits, labels)"
        )
    if losses.ndim != 1 or losses.numel() == 0:
        raise GhostError(
            f"The loss has shape {tuple(losses.shape)}, but one loss per row (B,) is needed, each computed only from "
            "its own row. Do not average over the batch: see dpllm.per_sequence_loss."
        )
    if not losses.requires_grad:
        raise GhostError(
            "The losses have no graph. Compute them with gradients enabled, from the model passed to GhostClipper."
        )
    if unit_index is None:
        return torch.arange(len(losses)), len(losses)
    if unit_index.shape != losses.shape or unit_index.is_floating_point() or unit_index.dtype == torch.bool:
        raise GhostError(
            f"unit_index has shape {tuple(unit_index.shape)} and dtype {unit_index.dtype}. Pass integers of shape "
            f"{tuple(losses.shape)}, the unit of each row."
        )
    lowest, highest = int(unit_index.min()), int(unit_index.max())
    if lowest < -1:
        raise GhostError(f"unit_index contains {lowest}. Units are numbered from 0, and -1 marks a padding row.")
    return unit_index.long(), highest + 1


def incomplete_unit(remedies: str) -> GhostError:
    """Return the error for held rows to which a pass was only partly added."""
    return GhostError(
        "The parts of a unit that has more rows than fit at once could not be combined: out of memory. Allow fewer "
        f"rows per unit (max_rows_per_unit), {remedies}."
    )


# --------------------------------------------------------------------------------------------- one pass per unit


class PerUnitClipper(UnitClipper):
    """Adds the clipped gradient of one unit after another to ``.grad``.

    Guarantee: the same as `dpllm.GhostClipper`, for any model that computes a unit's losses only from that unit's rows
    and the weights. Parameters that a unit's losses do not reach have the gradient 0 for that unit.

    Args:
        model: any module; it may be compiled (``torch.compile``).
        clip_norm: C > 0, for flat clipping.
        clipping: a different bound on contributions, instead of ``clip_norm``.
        parameter_norms: also return each unit's norm in each parameter (`ClipResult.parameter_norms`).

    Raises:
        ValueError: both ``clip_norm`` and ``clipping`` are given, or neither.
        GhostError: a module keeps statistics of the rows it has processed, or lets them choose its attention; the model
            is sharded or wrapped for replication; or it has no trainable parameter, or one that is complex or has a
            gradient hook.

    >>> import torch
    >>> from dpllm import PerUnitClipper
    >>> model = torch.nn.Linear(3, 1)
    >>> clipper = PerUnitClipper(model, clip_norm=1.0)
    >>> for row in torch.randn(4, 1, 3):
    ...     result = clipper.backward(model(row).squeeze(1) ** 2)
    >>> result.norms.shape, bool(model.weight.grad.norm() <= 4.0)
    (torch.Size([1]), True)
    >>> clipper.remove()
    """

    one_unit = True

    def __init__(
        self,
        model: nn.Module,
        clip_norm: float | None = None,
        clipping: Clipping | None = None,
        parameter_norms: bool = False,
    ) -> None:
        """Find the trainable parameters; attach nothing to the model, unless it limits the length of rows."""
        refuse_for_one_unit(model)
        super().__init__(model, clip_norm, clipping, parameter_norms)
        if self._trained.sharded:
            raise GhostError(
                "privacy.gradients=per_unit needs a unit's whole gradient on one process, but this model's parameters "
                "are sharded (FSDP2, ZeRO-3). Use replicas (dpllm train --config ddp) or ZeRO-2 (dpllm train --config "
                "zero2), with LoRA if memory is short; or set privacy.gradients=ghost"
            )
        self._rows_held: dict[int, Tensor] | None = None  # by id, the sum of a unit's gradients over its previous calls
        self._joining = False  # rows are being added to the held ones, which a failure makes unusable
        self._gradients: dict[int, Tensor] = {}  # of the last unit, and the factors of its groups
        self._factor_G: list[float] = []
        self._reached: set[int] = set()  # by the losses of any unit
        self._handle = _limit_rows(model)

    def hold(self, losses: Tensor) -> None:
        """See `UnitClipper.hold`."""
        units_of(losses, None)
        self._hold(self._differentiate(losses, torch.ones_like(losses)))

    def _clip(self, loss_B: Tensor, unit_B: Tensor, num_units: int, finish: Finish | None = None) -> ClipResult:
        """Clip the only unit; ``finish`` is not called.

        Raises:
            GhostError: the call has rows of several units, or only padding rows while rows of a unit are held.
        """
        if num_units > 1:
            raise GhostError(
                f"This call has rows of {num_units} units, but PerUnitClipper takes one unit at a time, so that no "
                "other unit's row can influence its gradient. Call the model once per unit. If all rows belong to one "
                "unit, pass unit_index=torch.zeros(rows, dtype=torch.int64)"
            )
        if num_units == 0:
            if self._rows_held is not None:
                raise GhostError(
                    "The clipper holds the first rows of a unit, but this call has padding rows only. Pass the "
                    "remaining rows of that unit, as unit 0"
                )
            self._gradients, self._factor_G = {}, []
            none = loss_B.new_zeros(self._trained.num_groups, 0, dtype=torch.float32)
            return self._result(none, none, none.new_zeros(len(self.parameters), 0))
        gradients = self._differentiate(loss_B, (unit_B >= 0).to(loss_B))
        if self._rows_held is not None:
            self._hold(gradients)
            gradients, self._rows_held, self._joining = self._rows_held, None, True
        sq_norm_P1 = self._squared_norms(gradients, loss_B.device)
        sq_norm_G1 = self._trained.grouped(sq_norm_P1)
        factor_G1 = clip_factors(self._fitted, sq_norm_G1, kernels.rounding_slack(sq_norm_G1.dtype) * sq_norm_G1)
        result = self._result(sq_norm_G1, factor_G1, sq_norm_P1)
        # Last: if memory runs out before it, the unit can be retried, unless its held rows have already been joined.
        self._gradients, self._factor_G, self._joining = gradients, factor_G1[:, 0].tolist(), False
        return result

    def _hold(self, gradients: Mapping[int, Tensor]) -> None:
        """Add a call's gradients to those of the unit's previous calls, in the accumulation dtype."""
        self._joining = True
        held = {} if self._rows_held is None else self._rows_held
        for key, gradient in gradients.items():
            if key in held:
                held[key] += kernels.widen(gradient)
            else:  # a copy: autograd may return one tensor for several parameters
                held[key] = gradient.to(kernels.accumulation_dtype(gradient.dtype), copy=True)
        self._rows_held, self._joining = held, False

    def _differentiate(self, loss_B: Tensor, weight_B: Tensor, retain_graph: bool = False) -> dict[int, Tensor]:
        """Return the gradients of the weighted sum of losses; does not touch ``.grad`` or run its hooks."""
        by_name = self._trained.by_name
        for name, parameter in by_name.items():
            if parameter._backward_hooks or not parameter.requires_grad:
                what = "was frozen" if not parameter.requires_grad else "got a hook on its gradient"
                raise GhostError(
                    f"{name} {what} after PerUnitClipper was created, so the gradient that is clipped and noised would "
                    "not be the unit's. Set requires_grad and remove hooks before creating the clipper, and do not "
                    "change them afterwards"
                )
        parameters, written = list(by_name.values()), []
        before = {name: state_of_gradient(parameter) for name, parameter in by_name.items()}
        try:
            found = torch.autograd.grad(loss_B, parameters, weight_B, retain_graph=retain_graph, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise _reentrant() from error
        finally:
            for name, parameter in by_name.items():
                if state_of_gradient(parameter) != before[name]:
                    parameter.grad = None
                    written.append(name)
        if written:
            raise GhostError(
                f"The backward pass of one of the model's functions wrote to {written[0]}.grad, where the gradient "
                "would not be clipped. It calls backward() itself, as reversible layers do. Freeze the parameters "
                "that it uses, or use a version of the model without it"
            )
        reached = {id(p): grad.detach() for p, grad in zip(parameters, found, strict=True) if grad is not None}
        if len(reached) < len(parameters) and any("CheckpointFunction" in name for name in nodes_of(loss_B)):
            raise _reentrant()
        self._reached.update(reached)
        return {key: grad.to_dense() if grad.is_sparse else grad for key, grad in reached.items()}

    def _squared_norms(self, gradients: Mapping[int, Tensor], device: torch.device) -> Tensor:
        """Return (P, 1): the squared norm of each parameter's gradient, 0 if it has none."""
        norms = torch.zeros(len(self._trained.by_name), 1, dtype=self._trained.norm_dtype, device=device)
        with kernels.exact_matmul(), torch.no_grad():
            for norm, parameter in zip(norms, self._trained.by_name.values(), strict=True):
                if id(parameter) in gradients:
                    norm += kernels.squared_norms(kernels.widen(gradients[id(parameter)]).reshape(1, -1)).to(norm)
        return norms

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """See `UnitClipper.add_clipped_sum_`."""
        gradient = self._gradients.pop(id(parameter), None)
        if gradient is None:
            return
        factor = self._factor_G[self._trained.groups[id(parameter)]]
        if factor == 0:  # not multiplied: 0 * inf is NaN
            return
        with torch.no_grad():
            # Widened first: a product in bfloat16 would round the gradient away from the one whose norm was bounded.
            total.add_(gradient.to(total.dtype), alpha=factor)

    def row_norms(self, losses: Tensor, unit_index: Tensor) -> Tensor:
        """See `UnitClipper.row_norms`."""
        units_of(losses, unit_index)
        norms = []
        for row, weight_B in enumerate(torch.eye(len(losses), dtype=losses.dtype, device=losses.device)):
            gradients = self._differentiate(losses, weight_B, retain_graph=row + 1 < len(losses))
            norms.append(self._squared_norms(gradients, losses.device).sum().sqrt().float())
        norm_B = torch.stack(norms)
        if len(losses) == 1:
            return norm_B
        return torch.where(torch.isfinite(norm_B), norm_B, -1)  # 0 * inf is NaN, which may come from a different row

    @property
    def unreached(self) -> list[str]:
        """The names of the trainable parameters that no unit's losses have reached so far."""
        return [name for name, parameter in self.parameters.items() if id(parameter) not in self._reached]

    def forget(self) -> None:
        """See `UnitClipper.forget`."""
        self._gradients, self._factor_G = {}, []
        if self._joining:
            raise incomplete_unit("or train fewer parameters (LoRA)")

    def remove(self) -> None:
        """Drop all gradients; the model is unchanged."""
        self._gradients, self._factor_G, self._rows_held = {}, [], None
        if self._handle is not None:
            self._handle.remove()


def _limit_rows(model: nn.Module) -> Any:
    """Refuse rows whose length would change position embeddings for later units; return the hook, if one is needed."""
    most = tokens_by_themselves(model)
    if most is None:
        return None

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        packed = PackedRows(kwargs)
        if torch.is_grad_enabled():
            refuse_long_rows(max(packed.lengths, default=tokens_of_call(args, kwargs)), most)

    return model.register_forward_pre_hook(before, with_kwargs=True)


def _reentrant() -> GhostError:
    """Return the error for activation checkpointing that writes gradients to ``.grad`` instead of returning them."""
    return GhostError(
        "Activation checkpointing with use_reentrant=True writes gradients to .grad, where they would not be clipped. "
        'Set use_reentrant=False (gradient_checkpointing_kwargs={"use_reentrant": False})'
    )
