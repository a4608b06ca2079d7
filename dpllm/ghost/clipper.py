"""GhostClipper: exact per-unit clipping for a custom training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpllm.ghost.book import Book
from dpllm.ghost.errors import GhostError
from dpllm.ghost.factors import GroupFactors, clip_factors
from dpllm.ghost.groups import numbered, shapes_of
from dpllm.ghost.held_clipping import HeldClipping
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.norm_method import NormMethod
from dpllm.mechanism.clipped import forget_clipper, note_clipper
from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.parts import AdaptiveClipping, Clipping


@dataclass(frozen=True)
class ClipResult:
    """Norms and clip factors of the units of one microbatch.

    They depend on the data: no guarantee covers them if they are released.

    Attributes:
        norms: (U,) float32, each unit's gradient norm over all trainable parameters.
        factors: (U,) float32, the factor of each unit's gradient; exactly 0 for a non-finite one. (G, U) if the
            clipping has several groups of parameters: 0 in a group that is not finite.
        parameter_norms: name to (U,) float32, each unit's norm in one parameter; empty unless requested.
    """

    norms: Tensor
    factors: Tensor
    parameter_norms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_nonfinite(self) -> int:
        """The number of units that had a non-finite gradient and therefore contributed zero, at least in its group."""
        return int((~torch.isfinite(self.norms)).sum())


class GhostClipper:
    """Puts the sum of clipped per-unit gradients into ``.grad``, from one backward pass.

    Guarantee: after `backward`, each unit's share of ``.grad`` has an l2 norm of at most ``clip_norm`` over all
    trainable parameters together, in every dtype; leaving a unit out changes the sum by exactly its share.

    Args:
        model: any module whose inputs and outputs have the rows of the batch first; a transformers model,
            PEFT-wrapped or not.
        clip_norm: C > 0, where clipping is flat.
        norm_method: how norms are computed; the default is the cheapest method.
        clipping: another way to bound a contribution, instead of ``clip_norm``: one of `dpllm.mechanism.catalogue`, or
            your own class, whose factors are then checked against its sensitivity in each call.
        parameter_norms: also return each unit's norm in each parameter (`ClipResult.parameter_norms`). They depend on
            the data and are not private.

    Raises:
        ValueError: both of ``clip_norm`` and ``clipping``, or neither.
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
        """Attach to the model."""
        if (clip_norm is None) == (clipping is None):
            raise ValueError("Give one of clip_norm (flat clipping) and clipping (another kind).")
        self.clipping: Clipping = FlatClipping(clip_norm) if clip_norm is not None else clipping  # type: ignore[assignment]
        groups = self.clipping.groups
        self._book = Book(model, norm_method, _one_by_one if parameter_norms else groups)
        self._group_P: Tensor | None = None  # of each parameter, if norms of parameters are separate
        if parameter_norms:
            self._num_groups, numbers = numbered(groups, self.parameters)
            self._group_P = torch.tensor([numbers[id(p)] for p in self.parameters.values()])
        self._held = HeldClipping(self.clipping, shapes_of(self.parameters))
        self._calls = 0  # of `backward`; engines call `clip`, and the run's watch sees other gradients
        note_clipper(self)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return self._book.parameters

    @property
    def threshold(self) -> float:
        """The norm above which a gradient is scaled down: C, or the present threshold of an adaptive clipping."""
        return self.clipping.threshold if isinstance(self.clipping, AdaptiveClipping) else self.clipping.clip_norm

    def backward(self, losses: Tensor, unit_index: Tensor | None = None) -> ClipResult:
        """Differentiate, clip each unit, and add the clipped sum to ``.grad``.

        Args:
            losses: (B,) one loss per row, with a graph, each depending only on its own row
                (`dpllm.per_sequence_loss`).
            unit_index: (B,) integers: the unit of each row, 0 <= unit < U; a unit's gradient is the sum of its rows'.
                -1 marks a padding row of weight 0. None: a row is a unit.

        Returns:
            The units' norms and factors.

        Raises:
            GhostError: losses of another shape or without a graph; a unit index of another shape; a parameter that
                received no norm; the clipping is not as it was when the clipper was made; a parameter would receive a
                gradient that is not clipped. Parameters outside the model are searched for in the calls 1, 2, 4, 8, ….
        """
        self._check(losses, unit_index)
        self._calls += 1
        self._book.refuse_unclipped(losses, outside=self._calls & (self._calls - 1) == 0)
        result = self.clip(losses, unit_index)
        for parameter in self.parameters.values():
            self.add_clipped_sum_(parameter, _accumulator(parameter))
        return result

    def hold(self, losses: Tensor) -> None:
        """Process some rows of one unit that has more rows than fit in memory at once.

        The next `clip` or `backward` must get the other rows of that unit and no others. It completes the unit's
        gradient, which is clipped as one. In between, the memory held is at most the smaller of the unit's activations
        and one gradient of the whole model.

        Args:
            losses: (B,) one loss per row, with a graph, all of the same unit.

        Raises:
            GhostError: losses of another shape or without a graph.
        """
        self._check(losses, None)
        self._book.hold(losses)

    def clip(self, losses: Tensor, unit_index: Tensor | None = None) -> ClipResult:
        """Do the same as `backward` without the sum, which `add_clipped_sum_` forms one parameter at a time.

        For engines that shard the model, where no process can hold the sum of all parameters.
        """
        unit_B, num_units = self._check(losses, unit_index)
        clipping = self._held.for_model(self.clipping)
        early = GroupFactors.of(clipping, self._book.num_groups) if self._group_P is None else None
        sq_norm_GU, slack_GU = self._book.backward(losses, unit_B, num_units, early)
        by_parameter: dict[str, Tensor] = {}
        if self._group_P is not None:
            by_parameter = dict(zip(self.parameters, sq_norm_GU.clamp_min(0).sqrt().float(), strict=True))
            sq_norm_GU, slack_GU = self._grouped(sq_norm_GU), self._grouped(slack_GU)
        factor_GU = clip_factors(clipping, sq_norm_GU, slack_GU)
        if early is not None:
            factor_GU = early.joined(factor_GU)
        self._held.require(self.clipping, sq_norm_GU)
        factors = factor_GU.float() if len(factor_GU) > 1 else factor_GU[0].float()
        result = ClipResult(sq_norm_GU.sum(dim=0).clamp_min(0).sqrt().float(), factors, by_parameter)
        # Last: if memory runs out before it, the microbatch can be retried.
        self._book.weigh(factor_GU if self._group_P is None else factor_GU[self._group_P.to(factor_GU.device)])
        return result

    def _grouped(self, value_PU: Tensor) -> Tensor:
        """Sum the values of parameters over the clipping's groups, (G, U)."""
        assert self._group_P is not None, "norms of parameters were requested"
        total_GU = value_PU.new_zeros(self._num_groups, value_PU.shape[1])
        return total_GU.index_add_(0, self._group_P.to(value_PU.device), value_PU)

    @property
    def rows_checked(self) -> bool:
        """Whether it was measured that a row's loss has no gradient in other rows."""
        return self._book.checked.rows

    def check_rows(self, losses_of_row: Callable[[], Tensor], unit_index: Tensor) -> None:
        """Measure that a row's loss has no gradient in other rows, with a separate forward and backward pass per set.

        `backward` does this by itself on the first batch and keeps the graph for several passes. An engine that frees
        weights after their first use in a backward pass (ZeRO-3) cannot do that. Only this method measures, for packed
        rows, that values which are not finite do not pass from one row to another.

        Args:
            losses_of_row: runs the model again at each call and returns the losses (B,).
            unit_index: (B,), -1 for a padding row.

        Raises:
            GhostError: a row's loss depends on another row.
        """
        done, sets = 0, 1
        while done < sets:
            losses = losses_of_row()
            unit_B, num_units = self._check(losses, unit_index)
            sets = self._book.probe(losses, done, unit_B, num_units)
            done += 1
        if self._book.is_packed:
            self._book.probe_spread(losses_of_row, unit_B, num_units)
        self._book.note_rows_checked()

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Add one parameter's share of the clipped sum of the last `clip` to ``total``, once.

        Args:
            parameter: one of `parameters`.
            total: of the parameter's full shape, float32 (float64 for a float64 parameter), not rounded to its dtype.
        """
        self._book.add_clipped_sum_(parameter, total)

    def forget(self) -> None:
        """Forget a microbatch whose forward or backward pass failed, so that its rows can be processed again.

        Rows that `hold` took before are kept. Nothing of the microbatch may have been added to a sum yet.

        Raises:
            GhostError: the pass failed while it was joined to the held rows, which cannot be undone.
        """
        self._book.forget()

    @staticmethod
    def _check(losses: Tensor, unit_index: Tensor | None) -> tuple[Tensor, int]:
        if not isinstance(losses, Tensor):
            raise GhostError(
                f"The loss is of the type {type(losses).__name__}; a tensor with one loss per row (B,) is needed. "
                "Return it from the loss function, for instance dpllm.per_sequence_loss(outputs.logits, labels)"
            )
        if losses.ndim != 1 or losses.numel() == 0:
            raise GhostError(
                f"The loss has shape {tuple(losses.shape)}; one loss per row (B,) is needed, each from only "
                "its own row. Do not average over the batch: see dpllm.per_sequence_loss."
            )
        if not losses.requires_grad:
            raise GhostError(
                "The losses carry no graph. Compute them with gradients on, from the model given to GhostClipper."
            )
        rows = losses.shape[0]
        if unit_index is None:
            return torch.arange(rows), rows
        if unit_index.shape != losses.shape or unit_index.is_floating_point() or unit_index.dtype == torch.bool:
            raise GhostError(
                f"unit_index has shape {tuple(unit_index.shape)} and dtype {unit_index.dtype}; integers of shape "
                f"({rows},) are needed, the unit "
                "of each row."
            )
        lowest, highest = int(unit_index.min()), int(unit_index.max())
        if lowest < -1:
            raise GhostError(f"unit_index contains {lowest}; units are numbered from 0, and -1 marks a padding row.")
        return unit_index.long(), highest + 1

    def remove(self) -> None:
        """Remove the hooks; the model is as before."""
        forget_clipper(self)
        self._book.remove()


def _one_by_one(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    return [[name] for name in shapes]


def _accumulator(parameter: nn.Parameter) -> Tensor:
    """Return ``.grad`` in the accumulation dtype; create it if there is none.

    A sum kept in bfloat16 would be rounded by up to its own size times 2^-9, more than one unit may change it.
    """
    dtype = accumulation_dtype(parameter.dtype)
    grad = parameter.grad
    if grad is None or grad.dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype
        start = torch.zeros_like(parameter, dtype=dtype) if grad is None else grad.to(dtype)
        parameter.grad = grad = start
    return grad
