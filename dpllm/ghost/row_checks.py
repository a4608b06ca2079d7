"""The measurement that rows are independent: gradients of some rows' losses, in which other rows must have none.

Place in the flow: `dpllm.ghost.GhostClipper` differentiates the losses of the first microbatch for each probe. A probe
takes the contributions in the place of the receivers that keep or add them up (`dpllm.ghost.receivers`).

Shape suffixes: B rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpllm.data.labels import BOUNDARIES
from dpllm.ghost import kernels
from dpllm.ghost.contributions import Use
from dpllm.ghost.errors import CoupledError, GhostError


@dataclass
class Checked:
    """What was measured of the independence of rows.

    Attributes:
        rows: whether a row's loss was seen to have no gradient in another row of the model's call.
        packed: the same, for packed rows.
        spread: whether values that are not finite were seen to stay within their packed row.
    """

    rows: bool = False
    packed: bool = False
    spread: bool = False

    def note(self, packed: bool) -> None:
        """Note that rows are independent in a call with packed rows, or without."""
        self.rows = True
        self.packed |= packed


@dataclass
class RowProbe:
    """Receives the gradients of some rows' losses; any gradient in another row is an error.

    Attributes:
        rows: the numbers of the rows whose losses are differentiated.
        packed: whether rows were laid end to end.
        finite_B: packed rows that received only finite values; None before the first gradient.
    """

    rows: Tensor
    packed: bool
    finite_B: Tensor | None = None

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Check the gradient that one use of a parameter received."""
        others = kernels.entries(use.grad.detach()).clone()
        if self.packed:
            finite_B = torch.isfinite(others).all(1)
            self.finite_B = finite_B if self.finite_B is None else self.finite_B & finite_B
        others[self.rows] = 0
        touched = (torch.isfinite(others) & (others != 0)).any(1)
        if not bool(touched.any()):
            return
        other = int(torch.nonzero(touched)[0])
        if self.packed:
            raise CoupledError(
                f"A packed row's loss depends on the packed row {other} (seen at {name}), so a unit cannot "
                "be bounded: something in the model mixes tokens across the end of a row. Do not pack the "
                f"rows of this model (pack_rows: false), or give it an attention that reads {BOUNDARIES}."
            )
        raise CoupledError(
            f"The loss of row {int(self.rows[0])} depends on row {other} of the batch (seen at {name}), so a unit "
            "cannot be bounded. Remove the parts that couple rows: batch statistics, in-batch negatives, several "
            "units packed into one row, a loss normalised over the batch."
        )


def row_probes(real_B: Tensor, packed: bool) -> list[RowProbe]:
    """Return the probes that show every dependence between rows.

    Unpacked: the first row and the last row. Packed: every other row, then the remaining ones. A dependence across a
    boundary goes from one set to the other, so every boundary of the microbatch is tested. The third set is the last
    row: a dependence that skips a whole row reaches it as well.

    Args:
        real_B: (B,) true for rows that are not padding.
        packed: whether the rows were laid end to end.
    """
    (real,) = torch.nonzero(real_B, as_tuple=True)
    if real.numel() == 0:
        real = real.new_zeros(1)
    sets = [real[::2], real[1::2], real[-1:]] if packed else [real[:1], real[-1:]]
    return [RowProbe(rows, packed) for rows in sets]


class SpreadProbe:
    """Receives the gradients of packed rows of which some were made NaN; any such value in another row is an error.

    A gradient does not show such a path: attention that multiplies masked values by zero separates finite rows, but
    0 * NaN is NaN, and one unit that overflows would remove all its neighbours from the sum.

    Attributes:
        poisoned_B: the rows that are made NaN.
        healthy_B: the rows that have to stay finite. Those that are not finite by themselves give no information; a
            batch of only such rows measures nothing.
    """

    def __init__(self, finite_B: Tensor) -> None:
        """Choose every other row to be NaN; ``finite_B``: the rows that are finite by themselves."""
        self.poisoned_B = torch.zeros_like(finite_B)
        self.poisoned_B[1::2] = True
        self.healthy_B = finite_B & ~self.poisoned_B

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Check the gradient that one use of a parameter received."""
        if not bool(torch.isfinite(kernels.entries(use.grad.detach())[self.healthy_B]).all()):
            raise GhostError(
                f"A value that is not finite reaches other packed rows (seen at {name}): the attention masks by "
                "multiplying with zero, so one unit that overflows would change the contributions of the others. Use "
                "an attention that runs each row separately (dpllm.models.packing, flash_attention_2), or do not pack "
                "the rows (pack_rows: false)."
            )
