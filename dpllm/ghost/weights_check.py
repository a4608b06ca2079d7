"""The check by value, in the first call of a model: do taps give the gradients that autograd gives?

The outputs of a few rows become one number per row, by fixed random weights. One plain pass gives the gradients of the
sum of these numbers, each row with its own random weight. The taps give each row's gradient; the product's own code
sums them with the same weights. Equality means: every use is seen, each gradient is that of its row, and no row reaches
another row's part of a tensor. Parameters that differ take the next rung of the ladder (`dpllm.ghost.attach`).

Coupling before the first trained layer is not seen here; `dpllm.training.checks` compares rows by value.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpllm.data.labels import BOUNDARIES
from dpllm.ghost import kernels
from dpllm.ghost.contributions import Use
from dpllm.ghost.errors import CoupledError, GhostError
from dpllm.ghost.model_calls import PackedRows, flatten_tensors, rebuilt

ROWS = 3
"""The most rows that are compared: more than two, so that fewer other dimensions are as long."""

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
_SIXTEEN_BITS = 0.1
_MASKED = 1e30  # the least size of an entry that a model masks, with the lowest number of a dtype or with infinity
_SMALL = 1e-3  # of the largest gradient: below it, a parameter's difference is compared with this


_LARGE = 1 << 20  # entries: larger buffers hold quantised weights, which no forward writes


class State:
    """What a call changes, random numbers and small buffers of the model, so that it can be repeated from the same.

    Args:
        device: of the model.
        model: whose buffers are kept.
    """

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        """Keep the state."""
        self._device = device
        self._cpu = torch.get_rng_state()
        self._own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.numel() <= _LARGE
        ]
        self._versions = [buffer._version for _, _, buffer, _ in self._buffers]

    def restore(self) -> None:
        """Go back to the state."""
        torch.set_rng_state(self._cpu)
        if self._own is not None:
            torch.cuda.set_rng_state(self._own, self._device)
        for number, (module, name, buffer, value) in enumerate(self._buffers):
            module._buffers[name] = buffer
            if buffer._version != self._versions[number]:
                with torch.no_grad():
                    buffer.copy_(value)
                self._versions[number] = buffer._version

    @property
    def has_moved(self) -> bool:
        """Whether numbers were drawn since."""
        if not torch.equal(self._cpu, torch.get_rng_state()):
            return True
        return self._own is not None and not torch.equal(self._own, torch.cuda.get_rng_state(self._device))


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation, where dropout draws no numbers, and back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def first_rows(args: tuple, kwargs: dict, rows: int) -> tuple[tuple, dict, int]:
    """Return the arguments of a call for its first `ROWS` rows, and how many these are."""
    if rows <= ROWS:
        return args, kwargs, rows

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:ROWS] if value.ndim and value.shape[0] == rows else value
        return rebuilt(value, cut)

    return cut(args), cut(kwargs), ROWS


def has_rows(output: Any, rows: int) -> bool:
    """Whether an output has a tensor of numbers with this many rows."""
    return any(v.ndim and v.shape[0] == rows and v.is_floating_point() for v in flatten_tensors(output))


def values_of(output: Any, rows: int, packed: PackedRows) -> list[Tensor]:
    """Return the tensors of an output that have rows first and a gradient; without any, those that flatten rows."""
    values, flattened = [], []
    for value in flatten_tensors(output):
        if value.requires_grad and value.is_floating_point():
            by_row = packed.cut(value) if packed.lengths else value
            if by_row.ndim and by_row.shape[0] == rows:
                values.append(by_row)
            elif not packed.lengths and by_row.ndim and by_row.shape[0] and by_row.shape[0] % rows == 0:
                flattened.append(by_row.unflatten(0, (rows, -1)))
    return values or flattened


def losses_of(values: list[Tensor]) -> Tensor:
    """Return one number for each row (B,), from all entries of its outputs that are not masked.

    The sum of masked entries may be infinite, and no two such sums can be compared.
    """
    total: Tensor | None = None
    for number, value in enumerate(values):
        generator = torch.Generator().manual_seed(number)
        weight = torch.rand(value.shape[1:], generator=generator).to(value) + 0.5
        value = value.masked_fill(value.abs() >= _MASKED, 0)
        loss_B = (value * weight).reshape(len(value), -1).sum(1, dtype=torch.promote_types(value.dtype, torch.float32))
        loss_B = loss_B / max(1, weight.numel()) ** 0.5
        total = loss_B if total is None else total + loss_B
    assert total is not None, "there are values"
    return total


def losses_and_weights(output: Any, rows: int, packed: PackedRows) -> tuple[Tensor, Tensor] | None:
    """Return the numbers of the rows and their random weights (B,); None without an output that has a gradient.

    An output whose rows do not come first gives one number, of which each row gets the same share: then sums over all
    rows are compared.
    """
    values = values_of(output, rows, packed)
    if values:
        loss_B = losses_of(values)
        return loss_B, weights_of(rows).to(loss_B)
    others = [v for v in flatten_tensors(output) if v.requires_grad and v.is_floating_point()]
    if not others:
        return None
    loss = losses_of([value[None] for value in others])
    return (loss / rows).expand(rows), loss.new_ones(rows)


def weights_of(rows: int) -> Tensor:
    """Return the random weights of the rows, between 1/2 and 3/2 (B,)."""
    return torch.rand(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding explains."""
    return _TOLERANCE.get(dtype, _SIXTEEN_BITS)


def differ(plain: Mapping[str, Tensor | None], tapped: Callable[[str], Tensor], dtype: torch.dtype) -> list[str]:
    """Return the names of the parameters whose two gradients differ.

    Args:
        plain: the gradients of autograd; None: none.
        tapped: returns the weighted sum of a parameter's row gradients.
        dtype: in which the model computed.
    """
    top = max((float(g.double().norm()) for g in plain.values() if g is not None), default=0.0)
    most, wrong = tolerance(dtype), []
    for name, gradient in plain.items():
        sum_ = tapped(name).detach().double()
        expected = torch.zeros_like(sum_) if gradient is None else gradient.double()
        scale = max(float(expected.norm()), _SMALL * top)
        difference = float((sum_ - expected).norm())
        is_number = math.isfinite(difference) or not bool(torch.isfinite(expected).all())
        if difference > most * scale or not is_number:
            wrong.append(name)
    return wrong


# ----- independence of rows


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
