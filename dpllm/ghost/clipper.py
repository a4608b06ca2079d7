"""GhostClipper: exact per-unit clipping for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpllm.ghost.book import Book
from dpllm.ghost.errors import GhostError
from dpllm.ghost.factors import clip_factors
from dpllm.ghost.groups import numbered
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.norm_method import NormMethod
from dpllm.mechanism.clipping import FlatClipping
from dpllm.mechanism.parts import Clipping


@dataclass(frozen=True)
class ClipResult:
    """Norms and clip factors of the units of one microbatch.

    They depend on the data: released, they aren't covered by any guarantee.

    Attributes:
        norms: (U,) float32, each unit's gradient norm over all trainable parameters.
        factors: (U,) float32, what its gradient was multiplied by; exactly 0 for a non-finite one. (G, U) where the
            clipping has several groups of parameters.
        parameter_norms: name to (U,) float32, each unit's norm in one parameter; empty unless asked for.
    """

    norms: Tensor
    factors: Tensor
    parameter_norms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_nonfinite(self) -> int:
        """How many units had a non-finite gradient and therefore contributed zero."""
        return int((~torch.isfinite(self.norms)).sum())


class GhostClipper:
    """Puts the sum of clipped per-unit gradients into ``.grad``, from one backward pass.

    Guarantee: after `backward`, each unit's share of ``.grad`` has an l2 norm of at most ``clip_norm`` over all
    trainable parameters together, in every dtype; leaving a unit out changes the sum by exactly its share.

    Args:
        model: any module whose inputs and outputs have the rows of the batch first; a transformers model,
            PEFT-wrapped or not.
        clip_norm: C > 0, where clipping is flat.
        norm_method: how norms are computed; the default takes what costs least.
        clipping: another way to bound a contribution, in place of ``clip_norm``: one of `dpllm.mechanism.catalogue`, or
            one of your own, whose factors are then checked against its sensitivity in each call.
        parameter_norms: also return each unit's norm in each parameter (`ClipResult.parameter_norms`). They depend on
            the data and are not private.

    Raises:
        ValueError: both of ``clip_norm`` and ``clipping``, or neither.
        GhostError: the model has a part whose per-row gradient can't be had exactly, with its path and the reason.

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
        self._group_P: Tensor | None = None  # of each parameter, where norms of parameters are told apart
        if parameter_norms:
            self._num_groups, numbers = numbered(groups, self.parameters)
            self._group_P = torch.tensor([numbers[id(p)] for p in self.parameters.values()])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return self._book.parameters

    def backward(self, losses: Tensor, unit_index: Tensor | None = None) -> ClipResult:
        """Differentiate, clip each unit, and add the clipped sum to ``.grad``.

        Args:
            losses: (B,) one loss per row, with a graph, each depending on its own row alone
                (`dpllm.per_sequence_loss`).
            unit_index: (B,) integers: the unit of each row, 0 <= unit < U; a unit's gradient is the sum of its rows'.
                -1 marks a padding row of weight 0. None: a row is a unit.

        Returns:
            The units' norms and factors.

        Raises:
            GhostError: losses of another shape or without a graph; a unit index of another shape; a parameter that
                received no norm.
        """
        result = self.clip(losses, unit_index)
        for parameter in self.parameters.values():
            self.add_clipped_sum_(parameter, _accumulator(parameter))
        return result

    def hold(self, losses: Tensor) -> None:
        """Take some rows of one unit that has more rows than fit into memory at once.

        Its gradient is complete, and clipped as one, with the next `clip` or `backward`, which must be given the rest
        of that unit's rows and no others. In between, no more is held than the smaller of the unit's activations and
        one gradient of the whole model.

        Args:
            losses: (B,) one loss per row, with a graph, all of the same unit.

        Raises:
            GhostError: losses of another shape or without a graph.
        """
        self._check(losses, None)
        self._book.hold(losses)

    def clip(self, losses: Tensor, unit_index: Tensor | None = None) -> ClipResult:
        """As `backward`, without forming the sum: `add_clipped_sum_` does that, one parameter at a time.

        For engines that shard the model, where no process can hold the sum of all parameters.
        """
        unit_B, num_units = self._check(losses, unit_index)
        sq_norm_GU, slack_GU = self._book.backward(losses, unit_B, num_units)
        by_parameter: dict[str, Tensor] = {}
        if self._group_P is not None:
            by_parameter = dict(zip(self.parameters, sq_norm_GU.clamp_min(0).sqrt().float(), strict=True))
            sq_norm_GU, slack_GU = self._grouped(sq_norm_GU), self._grouped(slack_GU)
        factor_GU = clip_factors(self.clipping, sq_norm_GU, slack_GU)
        factors = factor_GU.float() if len(factor_GU) > 1 else factor_GU[0].float()
        result = ClipResult(sq_norm_GU.sum(dim=0).clamp_min(0).sqrt().float(), factors, by_parameter)
        # Last: where memory runs out before it, the microbatch can be taken anew.
        self._book.weigh(factor_GU if self._group_P is None else factor_GU[self._group_P.to(factor_GU.device)])
        return result

    def _grouped(self, value_PU: Tensor) -> Tensor:
        """Add the values of parameters up to those of the clipping's groups, (G, U)."""
        assert self._group_P is not None, "norms of parameters were asked for"
        total_GU = value_PU.new_zeros(self._num_groups, value_PU.shape[1])
        return total_GU.index_add_(0, self._group_P.to(value_PU.device), value_PU)

    @property
    def rows_checked(self) -> bool:
        """Whether it was measured that a row's loss has no gradient in other rows."""
        return self._book.checked.rows

    def check_rows(self, losses_of_row: Callable[[], Tensor], unit_index: Tensor) -> None:
        """Measure that a row's loss has no gradient in other rows, by a forward and backward pass of its own each.

        `backward` does this by itself on the first batch, keeping the graph for several passes. An engine that frees
        weights after their first use in a backward pass (ZeRO-3) can't do that. Of packed rows it is measured here
        alone that values which aren't finite don't pass from one row to another.

        Args:
            losses_of_row: runs the model and returns the losses (B,), anew at each call.
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
        """Forget a microbatch whose forward or backward pass broke off, so that its rows can be taken anew.

        What `hold` keeps of the rows before it stays. Nothing of the microbatch may have been added to a sum yet.

        Raises:
            GhostError: it broke off while it was joined to what is held, which can't be undone.
        """
        self._book.forget()

    @staticmethod
    def _check(losses: Tensor, unit_index: Tensor | None) -> tuple[Tensor, int]:
        if losses.ndim != 1 or losses.numel() == 0:
            raise GhostError(
                f"The loss has shape {tuple(losses.shape)}; one loss per row (B,) is needed, each from its own row "
                f"alone. Don't average "
                "over the batch: see dpllm.per_sequence_loss."
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
        """Undo the hooks; the model is as before."""
        self._book.remove()


def _one_by_one(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    return [[name] for name in shapes]


def _accumulator(parameter: nn.Parameter) -> Tensor:
    """Return ``.grad`` in the accumulation dtype, made where there is none.

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
