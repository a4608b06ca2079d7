"""PerUnitClipper: the fallback for any model, one unit at a time by plain autograd.

It replaces `dpllm.ghost.GhostClipper` if units cannot be clipped in one pass. Each call of the model gets the rows of
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

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels
from dpllm.ghost.errors import GhostError
from dpllm.ghost.model_calls import PackedRows, refuse_long_rows, tokens_by_themselves, tokens_of_call
from dpllm.ghost.parameters import nodes_of, state_of_gradient
from dpllm.ghost.refusals import refuse_for_one_unit
from dpllm.ghost.sums import Finish, Sum, clip_factors
from dpllm.ghost.unit_clipper import ClipResult, UnitClipper, incomplete_unit, units_of
from dpllm.mechanism.parts import Clipping


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
