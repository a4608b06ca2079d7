"""Adds up the squared norms of all parameters' gradients.

Place in the flow: between the contributions of one microbatch, as the book receives them, and the clip factors.

Shape suffixes: G groups of parameters, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpllm.ghost.contributions import Contribution, Outer, Rows, shared_norms, squared_norms
from dpllm.ghost.norm_method import NormMethod


class NormTally:
    """Squared norms over parameters, added as they arrive.

    Layers that read one input share its Gram matrix; they wait for each other.

    Args:
        rows: the units of the rows.
        norm_method: how norms are computed.
        dtype: in which the norms add up.
        slack: returns the allowed multiple of `dpllm.ghost.kernels.rounding_slack`; called by `total`, when all dtypes
            and devices are known.
        max_waiting: the most inputs whose layers wait at a time; None: all, until `total`. 1 frees activations one
            after another: layers that share an input follow each other in a backward pass.
        num_groups: G, the groups of parameters with separate norms.
    """

    def __init__(
        self,
        rows: Rows,
        norm_method: NormMethod,
        dtype: torch.dtype,
        slack: Callable[[], float] | None = None,
        max_waiting: int | None = None,
        num_groups: int = 1,
    ) -> None:
        """Start at zero."""
        self._rows, self._norm_method, self._slack, self._max_waiting = rows, norm_method, slack, max_waiting
        self._total_GU = torch.zeros(num_groups, rows.num_units, dtype=dtype, device=rows.unit_B.device)
        self._slack_GU = torch.zeros_like(self._total_GU)
        self._waiting: dict[tuple, list[Outer]] = {}

    def add(self, contributions: Sequence[Contribution], group: int = 0) -> None:
        """Add one parameter's norm.

        Args:
            contributions: every use of it, as returned by `dpllm.ghost.contributions.merge`.
            group: the group of the parameter.
        """
        if len(contributions) > 1 or not isinstance(contributions[0], Outer):
            self._add(group, *squared_norms(contributions, self._rows, self._norm_method))
            return
        self._waiting.setdefault((group, *contributions[0].input_key()), []).append(contributions[0])
        while self._max_waiting is not None and len(self._waiting) > self._max_waiting:
            self._add_waiting(next(iter(self._waiting)))

    def total(self) -> tuple[Tensor, Tensor]:
        """Return ``(sq_norm_GU, slack_GU)``: squared norms of each group, and the error of a unit's share."""
        for key in list(self._waiting):
            self._add_waiting(key)
        return self._total_GU, (self._slack() if self._slack else 1.0) * self._slack_GU

    def add_measured(self, group: int, sq_norm_U: Tensor, slack_U: Tensor) -> None:
        """Add the squared norms of one parameter that were computed elsewhere, and their slack before its multiple."""
        self._add(group, sq_norm_U, slack_U)

    def _add_waiting(self, key: tuple) -> None:
        self._add(key[0], *shared_norms(self._waiting.pop(key), self._rows, self._norm_method))

    def _add(self, group: int, sq_norm_U: Tensor, slack_U: Tensor) -> None:
        self._total_GU[group] += sq_norm_U
        self._slack_GU[group] += slack_U
