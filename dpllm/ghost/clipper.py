"""GhostClipper: exact per-unit clipping for a custom training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.ghost.blocks import CompiledBlocks
from dpllm.ghost.book import Book
from dpllm.ghost.contributions import Use
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.parameters import numbered, shapes_of
from dpllm.ghost.sums import Finish, GroupFactors, Sum, clip_factors
from dpllm.ghost.unit_clipper import ClipResult, UnitClipper
from dpllm.mechanism.parts import Clipping


class GhostClipper(UnitClipper):
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
        super().__init__(clip_norm, clipping)
        groups = self.clipping.groups
        self._book = Book(model, norm_method, _one_by_one if parameter_norms else groups)
        self._group_P: Tensor | None = None  # of each parameter, if norms of parameters are separate
        if parameter_norms:
            self._num_groups, numbers = numbered(groups, self.parameters)
            self._group_P = torch.tensor([numbers[id(p)] for p in self.parameters.values()])
        self._fit(shapes_of(self.parameters))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name, each once."""
        return self._book.parameters

    def compile(self, backend: Any = "inductor", **options: Any) -> None:
        """Compile the forward passes of the model's blocks as full graphs, from the next loss on.

        A block is a child of an outermost ``nn.ModuleList``, such as a decoder layer. The forward of each class is
        compiled once. Blocks that a graph cannot hold stay eager, and `compiled` has the reason: trained tables and
        experts, modules that run row by row or twice, parameters that ZeRO-3 gathers, and what PyTorch cannot trace.
        Blocks that were compiled by the user (``block.compile()``, ``torch.compile(block)``) are compiled in this way
        without this call, with their own backend.

        Args:
            backend: of ``torch.compile``.
            options: other arguments of ``torch.compile``, such as ``mode`` or ``dynamic``.
        """
        self._book.tapped.blocks.compile(backend, options)

    @property
    def compiled(self) -> CompiledBlocks:
        """The blocks that are compiled, those that stay eager, and the number of graphs; empty before the next call."""
        return self._book.tapped.blocks.compiled

    @property
    def row_by_row(self) -> dict[str, list[str]]:
        """The modules that run one row after another, by path, each with the parameters for which no tap is exact.

        They take as many launches as there are rows. Empty before the first call of the model.
        """
        return self._book.tapped.row_by_row

    def _refuse_unclipped(self, losses: Tensor, outside: bool) -> None:
        self._book.refuse_unclipped(losses, outside)

    def hold(self, losses: Tensor) -> None:
        """See `UnitClipper.hold`."""
        self._check(losses, None)
        self._book.hold(losses)

    def clip(self, losses: Tensor, unit_index: Tensor | None = None, finish: Finish | None = None) -> ClipResult:
        """See `UnitClipper.clip`."""
        result = self._clip(losses, unit_index, finish)
        self.settle()
        return result

    def _clip(self, losses: Tensor, unit_index: Tensor | None, finish: Finish | None) -> ClipResult:
        unit_B, num_units = self._check(losses, unit_index)
        clipping = self._fitted
        early = GroupFactors.of(clipping, self._book.num_groups) if self._group_P is None else None
        return self._weighed(*self._book.backward(losses, unit_B, num_units, early, finish), clipping, early)

    def run(
        self,
        loss_of: Callable[[Mapping[str, Any]], Tensor],
        inputs: Mapping[str, Any],
        unit_index: Tensor | None = None,
        finish: Finish | None = None,
    ) -> tuple[Tensor, ClipResult]:
        """See `UnitClipper.run`."""
        losses = loss_of(inputs)
        return losses.detach(), self._clip(losses, unit_index, finish)

    def settle(self) -> None:
        """See `UnitClipper.settle`."""
        self._book.settle()

    # ------------------------------------------------------------------ uses that a caller computes by itself

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Choose how each module is tapped in calls with such inputs, which the first call does by itself otherwise.

        Needed before a call with `expect`, since the modules are compared with a plain pass of the model.

        Args:
            inputs: of the model, with rows first.

        Raises:
            GhostError: see the class.
        """
        self._book.tapped.prepare((), dict(inputs))

    @property
    def takes_uses(self) -> bool:
        """Whether `expect` and `take` are possible: no module runs row by row, and no parameter is sharded."""
        return not self._book.sharded and not self._book.tapped.ladder.splits

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on."""
        return self._book.recomputes

    def expect(self, parameter: nn.Parameter) -> None:
        """Announce, within a call of the model, a use of a trained parameter by a function with its own gradient.

        The function detaches the parameter, and calls `take` in its backward pass. The parameter's clipped sum is
        formed when this use has arrived, too.

        Raises:
            GhostError: no call of the model runs with gradients on.
        """
        self._book.tapped.expect(parameter)

    def take(self, parameter: nn.Parameter, use: Use) -> None:
        """Take a use that `expect` announced: what it contributes to the gradient of each row.

        Args:
            parameter: a trained parameter.
            use: with the rows of the call of the model.

        Raises:
            GhostError: the backward pass is not one of the clipper; or the use has other rows.
        """
        self._book.tapped.take(parameter, use)

    def _weighed(
        self, sq_norm_GU: Tensor, slack_GU: Tensor, clipping: Clipping, early: GroupFactors | None
    ) -> ClipResult:
        """Fix the clip factors of the last pass."""
        by_parameter: dict[str, Tensor] = {}
        if self._group_P is not None:
            by_parameter = dict(zip(self.parameters, sq_norm_GU.clamp_min(0).sqrt().float(), strict=True))
            sq_norm_GU, slack_GU = self._grouped(sq_norm_GU), self._grouped(slack_GU)
        factor_GU = clip_factors(clipping, sq_norm_GU, slack_GU)
        if early is not None:
            factor_GU = early.joined(factor_GU)
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

    def row_norms(self, losses: Tensor, unit_index: Tensor) -> Tensor:
        """See `UnitClipper.row_norms`."""
        return self.clip(losses, unit_index).norms

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

    def add_clipped_sum_(self, parameter: nn.Parameter, total: Sum) -> None:
        """See `UnitClipper.add_clipped_sum_`."""
        self._book.add_clipped_sum_(parameter, total)

    def forget(self) -> None:
        """See `UnitClipper.forget`."""
        self._book.forget()

    def remove(self) -> None:
        """Give every module its class back; the model is as before."""
        self._book.remove()


def _one_by_one(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    return [[name] for name in shapes]
