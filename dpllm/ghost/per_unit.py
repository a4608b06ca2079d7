"""PerUnitClipper: the universal fallback, one unit at a time by plain autograd.

Place in the flow: it takes the place of `dpllm.ghost.GhostClipper` where a part of the model has no rule. Each call of
the model gets the rows of one unit (`dpllm.training.microbatches`, ``one_unit``). Autograd gives that unit's gradient
of all trainable parameters, its norm is taken in float32, and the scaled gradient is added to the step's sum. This is
the microbatch method of Abadi et al. 2016 (arXiv:1607.00133): exact for every structure, without hooks, and slower,
since one unit's rows do not fill a device.

A unit's gradient depends only on its own rows if the model carries no state from call to call. Modules that keep
running statistics, and those known to keep a choice made by the length of earlier rows, are refused here; everything
else is measured (`dpllm.training.checks.independence`).

Shape suffixes: B rows, G groups of parameters, P parameters, U units (0 or 1 here).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.ghost import kernels, memory
from dpllm.ghost.checks import refuse_long_rows, tokens_by_themselves
from dpllm.ghost.errors import GhostError
from dpllm.ghost.graph import nodes_of
from dpllm.ghost.own_sums import state_of_gradient
from dpllm.ghost.packed import PackedRows
from dpllm.ghost.parameters import TrainedParameters, shapes_of
from dpllm.ghost.refusals import is_fp8
from dpllm.ghost.rules import refuse_replicating, refuse_switching
from dpllm.ghost.sums import Finish, Sum, clip_factors
from dpllm.ghost.unit_clipper import ClipResult, UnitClipper
from dpllm.mechanism.parts import Clipping

Gradients = Mapping[int, Tensor]
"""The gradient of each parameter that a backward pass reached, by the parameter's id."""


class PerUnitClipper(UnitClipper):
    """Adds the clipped gradient of one unit after another to ``.grad``.

    Guarantee: that of `dpllm.GhostClipper`, for any model that computes a unit's losses from that unit's rows and the
    weights only. Parameters that a unit's losses do not reach have the gradient 0 for that unit.

    Args:
        model: any module; it may be compiled (``torch.compile``).
        clip_norm: C > 0, where clipping is flat.
        clipping: another way to bound a contribution, instead of ``clip_norm``.
        parameter_norms: also return each unit's norm in each parameter (`ClipResult.parameter_norms`).

    Attributes:
        reached: ids of the parameters that the losses of any unit have reached.

    Raises:
        ValueError: both of ``clip_norm`` and ``clipping``, or neither.
        GhostError: a module keeps statistics of the rows it has seen, or lets them choose its attention; the model is
            replicated by a wrapper or sharded; it has no trainable parameter, a hook on the gradient of one, or one of
            complex numbers.

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
        """Find the trainable parameters; nothing is attached to the model, unless it limits the length of rows."""
        super().__init__(clip_norm, clipping)
        refuse_replicating(model)
        refuse_statistics(model)
        refuse_switching(model)
        self._trained = TrainedParameters(model, self.clipping.groups)
        if self._trained.sharded:
            raise no_shards()
        self._by_parameter = parameter_norms
        self._fit(shapes_of(self.parameters))
        self._rows_held: dict[int, Tensor] | None = None  # the sum of a unit's gradients over its calls so far
        self._joining = False  # rows are being added to the held ones; after a failure those are not a unit's any more
        self._gradients: dict[int, Tensor] = {}  # of the last unit, and the factors of its groups
        self._factor_G: list[float] = []
        self.reached: set[int] = set()
        self._handle = _limit_rows(model)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return dict(self._trained.by_name)

    def _refuse_unclipped(self, losses: Tensor, outside: bool) -> None:
        self._trained.refuse_others()
        if outside:
            self._trained.refuse_outside(losses)

    # ------------------------------------------------------------------ one unit

    def hold(self, losses: Tensor) -> None:
        """See `UnitClipper.hold`."""
        self._check(losses, None)
        self._hold(self._differentiate(losses, torch.ones_like(losses)))

    def clip(self, losses: Tensor, unit_index: Tensor | None = None, finish: Finish | None = None) -> ClipResult:
        """See `UnitClipper.clip`; ``finish`` is not called.

        Raises:
            GhostError: rows of several units; or rows of a unit are held and this call has padding rows only.
        """
        unit_B, num_units = self._check(losses, unit_index)
        if num_units > 1:
            raise GhostError(
                f"This call has rows of {num_units} units. PerUnitClipper takes one unit at a time, so that no row of "
                "another unit can have a part in its gradient: call the model for each unit separately. If all rows "
                "belong to one unit, pass unit_index=torch.zeros(rows, dtype=torch.int64)"
            )
        if num_units == 0:
            return self._nothing(losses)
        gradients = self._differentiate(losses, (unit_B >= 0).to(losses))
        if self._rows_held is not None:
            self._hold(gradients)
            gradients, self._rows_held, self._joining = self._rows_held, None, True
        sq_norm_P1 = self._squared_norms(gradients, losses.device)
        sq_norm_G1 = self._grouped(sq_norm_P1)
        factor_G1 = clip_factors(self._fitted, sq_norm_G1, kernels.rounding_slack(sq_norm_G1.dtype) * sq_norm_G1)
        by_parameter = dict(zip(self.parameters, sq_norm_P1.sqrt().float(), strict=True)) if self._by_parameter else {}
        factors = factor_G1.float() if len(factor_G1) > 1 else factor_G1[0].float()
        result = ClipResult(sq_norm_G1.sum(dim=0).sqrt().float(), factors, by_parameter)
        # Last: if memory runs out before it, the unit can be retried, unless it had held rows, which are joined by now.
        self._gradients, self._factor_G, self._joining = gradients, factor_G1[:, 0].tolist(), False
        return result

    def _nothing(self, losses: Tensor) -> ClipResult:
        """Return the result of a call with padding rows only; nothing is differentiated."""
        if self._rows_held is not None:
            raise GhostError(
                "Rows of a unit are held, and this call has padding rows only. Pass the other rows of that unit, as "
                "unit 0"
            )
        self._gradients, self._factor_G = {}, []
        groups = self._trained.num_groups
        none = losses.new_zeros((groups, 0) if groups > 1 else 0, dtype=torch.float32)
        norms = losses.new_zeros(0, dtype=torch.float32)
        return ClipResult(norms, none, dict.fromkeys(self.parameters, norms) if self._by_parameter else {})

    def _hold(self, gradients: Gradients) -> None:
        """Add the gradients of a call to those of the unit's calls before, in the accumulation dtype."""
        self._joining = True
        held = {} if self._rows_held is None else self._rows_held
        for key, gradient in gradients.items():
            wide = kernels.widen(gradient)
            if key not in held:
                held[key] = wide.clone() if wide is gradient else wide
            else:
                held[key] += wide
        self._rows_held, self._joining = held, False

    def _differentiate(self, loss_B: Tensor, weight_B: Tensor, retain_graph: bool = False) -> dict[int, Tensor]:
        """Return the gradients of the weighted sum of losses; ``.grad`` stays as it is, and its hooks do not run."""
        parameters = list(self._trained.by_name.values())
        for name, parameter in self._trained.by_name.items():
            if parameter._backward_hooks or not parameter.requires_grad:
                what = "was frozen" if not parameter.requires_grad else "got a hook on its gradient"
                raise GhostError(
                    f"{name} {what} after PerUnitClipper was made, so a unit's gradient is not the one that is clipped "
                    "and given noise. Set requires_grad and remove hooks before, and do not change them in between"
                )
        before = [state_of_gradient(parameter) for parameter in parameters]
        try:
            found = torch.autograd.grad(loss_B, parameters, weight_B, retain_graph=retain_graph, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise _reentrant() from error
        for (name, parameter), state in zip(self._trained.by_name.items(), before, strict=True):
            if state_of_gradient(parameter) != state:
                raise _written(name)
        gradients = {id(p): _dense(g) for p, g in zip(parameters, found, strict=True) if g is not None}
        if len(gradients) < len(parameters) and any("CheckpointFunction" in name for name in nodes_of(loss_B)):
            raise _reentrant()
        self.reached.update(gradients)
        return gradients

    def _squared_norms(self, gradients: Gradients, device: torch.device) -> Tensor:
        """Return (P, 1): the squared norm of each parameter's gradient, 0 where it has none."""
        none = torch.zeros(1, dtype=self._trained.norm_dtype, device=device)
        norms = []
        with kernels.exact_matmul(), torch.no_grad():
            for parameter in self._trained.by_name.values():
                gradient = gradients.get(id(parameter))
                if gradient is None:
                    norms.append(none)
                else:
                    wide = kernels.widen(gradient)
                    norms.append(kernels.squared_norms(wide.reshape(1, -1)).to(none))
        return torch.stack(norms)

    def _grouped(self, value_P1: Tensor) -> Tensor:
        """Sum the values of parameters over the clipping's groups, (G, 1); in float64, so that no rounding adds up."""
        numbers = [self._trained.groups[id(p)] for p in self._trained.by_name.values()]
        total_G1 = value_P1.new_zeros(self._trained.num_groups, 1, dtype=torch.float64)
        total_G1.index_add_(0, torch.tensor(numbers, device=value_P1.device), value_P1.double())
        return total_G1.to(value_P1.dtype)

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """See `UnitClipper.add_clipped_sum_`."""
        gradient = self._gradients.pop(id(parameter), None)
        if gradient is None:
            return
        factor = self._factor_G[self._trained.groups[id(parameter)]]
        if factor == 0:  # not multiplied: 0 * inf is NaN
            return
        with torch.no_grad():
            # Widened first: a product in bfloat16 would be rounded away from the gradient whose norm was bounded.
            total.add_(gradient.to(total.dtype), alpha=factor)

    def settle(self) -> None:
        """Do nothing: `clip` has read what it measured."""

    # -------------------------------------------------------------------- checks

    def row_norms(self, losses: Tensor, unit_index: Tensor) -> Tensor:
        """See `UnitClipper.row_norms`."""
        self._check(losses, unit_index)
        norms = []
        for row in range(len(losses)):
            weight_B = torch.zeros_like(losses)
            weight_B[row] = 1
            gradients = self._differentiate(losses, weight_B, retain_graph=row + 1 < len(losses))
            norms.append(self._squared_norms(gradients, losses.device).sum().sqrt().float())
        norm_B = torch.stack(norms)
        if len(losses) == 1:
            return norm_B
        return torch.where(torch.isfinite(norm_B), norm_B, -1)  # 0 * inf is NaN: it may come from another row

    @property
    def rows_checked(self) -> bool:
        """True: no call has rows of several units."""
        return True

    def check_rows(self, losses_of_row: Callable[[], Tensor], unit_index: Tensor) -> None:
        """Do nothing: no call has rows of several units, so a gradient in another row is no other unit's."""

    @property
    def unreached(self) -> list[str]:
        """The names of the trainable parameters that the losses of no unit have reached so far."""
        return [name for name, parameter in self.parameters.items() if id(parameter) not in self.reached]

    def forget(self) -> None:
        """See `UnitClipper.forget`."""
        self._gradients, self._factor_G = {}, []
        if self._joining:
            raise GhostError(
                "The parts of a unit that has more rows than fit at once could not be combined: out of memory. Allow "
                "fewer rows per unit (max_rows_per_unit), or train fewer parameters (LoRA)."
            )

    def remove(self) -> None:
        """Forget all gradients; the model is as before."""
        self._gradients, self._factor_G, self._rows_held = {}, [], None
        if self._handle is not None:
            self._handle.remove()


def refuse_statistics(model: nn.Module) -> None:
    """Raise `GhostError` for a module that keeps something of the rows it has seen, or shares it between processes."""
    for path, module in model.named_modules():
        kind, reason = type(module).__name__, None
        if isinstance(module, nn.SyncBatchNorm):
            reason = "adds its statistics up over the processes, and so over units. Use layer or group normalisation"
        elif getattr(module, "track_running_stats", False):
            reason = (
                "keeps running statistics of the rows that it has seen; they would be saved without noise. Use layer "
                "or group normalisation, or statistics that do not change (a FrozenBatchNorm)"
            )
        elif getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            reason = "rewrites the rows of its table that a unit looks up (max_norm). Set max_norm=None"
        elif is_fp8(module):
            reason = "scales its products by what it has seen before (fp8). Train in bf16"
        if reason is not None:
            raise GhostError(f"{path or 'the model'} ({kind}) {reason}.")


def no_shards() -> GhostError:
    """Return the error for a model whose parameters are divided over processes."""
    return GhostError(
        "privacy.gradients=per_unit needs the whole gradient of a unit on one process, and this model's parameters are "
        "divided over processes (FSDP2, ZeRO-3). Use replicas (dpllm train --config ddp) or "
        "ZeRO-2 (dpllm train --config zero2), with LoRA if they do not fit; or privacy.gradients=ghost"
    )


def _limit_rows(model: nn.Module) -> Any:
    """Refuse rows that would leave position embeddings for later units; return the hook, None if no row can."""
    most = tokens_by_themselves(model)
    if most is None:
        return None

    def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
        packed = PackedRows()
        packed.start(kwargs)
        if torch.is_grad_enabled():
            refuse_long_rows(max(packed.lengths, default=memory.tokens_of_call(args, kwargs)), most)

    return model.register_forward_pre_hook(before, with_kwargs=True)


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach()


def _written(name: str) -> GhostError:
    """Return the error for a function whose backward pass differentiates a second time, by itself."""
    return GhostError(
        f"The backward pass of a function of the model wrote to {name}.grad, where the gradient would not be clipped: "
        "it calls backward() itself, as reversible layers do. Freeze the parameters that it uses, or use a version of "
        "the model without it"
    )


def _reentrant() -> GhostError:
    """Return the error for activation checkpointing that gives no gradients to a caller, only to ``.grad``."""
    return GhostError(
        "Activation checkpointing with use_reentrant=True writes gradients to .grad, where they would not be clipped. "
        'Set use_reentrant=False (gradient_checkpointing_kwargs={"use_reentrant": False})'
    )
