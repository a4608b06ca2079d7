"""The part of per-unit clipping that is independent of how the units' gradients are computed.

`dpllm.ghost.GhostClipper` computes them in one backward pass for all units, `dpllm.ghost.PerUnitClipper` one unit after
another. Steps, engines and checks use only this class.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpllm.ghost.errors import GhostError
from dpllm.ghost.kernels import accumulation_dtype, exact_matmul
from dpllm.ghost.parameters import TrainedParameters, shapes_of
from dpllm.ghost.sums import Finish, Sum, with_sizes
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
