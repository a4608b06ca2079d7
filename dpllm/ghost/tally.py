"""Adds up the squared norms of all parameters' gradients.

Place in the flow: between the contributions of one microbatch, as the book receives them, and the clip factors.

Shape suffixes: G groups of parameters, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpllm.ghost import kernels
from dpllm.ghost.contributions import Contribution, Outer, Rows, shared_norms, squared_norms
from dpllm.ghost.norm_method import NormMethod

Part = tuple[Tensor, Tensor, float]
"""Squared norms (U,), the numbers that scale their rounding error (U,), and the multiple of these that is the slack."""


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
        self._dtype = dtype
        self._parts: list[list[Part]] = [[] for _ in range(num_groups)]
        self._waiting: dict[tuple, list[Outer]] = {}

    def add(self, contributions: Sequence[Contribution], group: int = 0) -> None:
        """Add one parameter's norm.

        Args:
            contributions: every use of it, as returned by `dpllm.ghost.contributions.merge`.
            group: the group of the parameter.
        """
        if len(contributions) > 1 or not isinstance(contributions[0], Outer):
            self.add_measured(group, *squared_norms(contributions, self._rows, self._norm_method))
            return
        self._waiting.setdefault((group, *contributions[0].input_key()), []).append(contributions[0])
        while self._max_waiting is not None and len(self._waiting) > self._max_waiting:
            self._measure([next(iter(self._waiting))])

    def total(self) -> tuple[Tensor, Tensor]:
        """Return ``(sq_norm_GU, slack_GU)``: squared norms of each group, and the error of a unit's share."""
        self._measure(list(self._waiting))
        both_G2U = torch.stack([self._sum(parts) for parts in self._parts])
        return both_G2U[:, 0], (self._slack() if self._slack else 1.0) * both_G2U[:, 1]

    def add_measured(self, group: int, sq_norm_U: Tensor, slack_U: Tensor) -> None:
        """Add the squared norms of one parameter that were computed elsewhere, and their slack before its multiple."""
        self._parts[group].append((sq_norm_U, slack_U, 1.0))

    def _measure(self, keys: list[tuple]) -> None:
        """Measure the layers that read these inputs."""
        if not keys:
            return
        sharing = [self._waiting.pop(key) for key in keys]
        norms = shared_norms(sharing, self._rows, self._norm_method)
        for (group, *_), uses, (sq_norm_U, mass_U) in zip(keys, sharing, norms, strict=True):
            self._parts[group].append((sq_norm_U, mass_U, kernels.rounding_slack(uses[0].input.dtype)))

    def _sum(self, parts: list[Part]) -> Tensor:
        """Return (2, U): the squared norms of one group, and their slack. Parts of one multiple are added together."""
        multiples = dict.fromkeys(multiple for *_, multiple in parts)
        sums_2U = torch.zeros(2, self._rows.num_units, dtype=self._dtype, device=self._rows.unit_B.device)
        for multiple in multiples:
            values = [value.to(self._dtype) for *both, own in parts if own == multiple for value in both]
            sum_2U = torch.stack(values).unflatten(0, (-1, 2)).sum(0)
            sum_2U[1] *= multiple
            sums_2U += sum_2U
        return sums_2U
