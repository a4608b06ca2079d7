"""Check that taps measure what plain autograd computes: by value in first calls, and for each pair of rows.

In a model's first call, `WeightsCheck` reduces the outputs of a few rows to one number per row, with fixed random
weights. One plain pass computes the gradients of the sum of these numbers, with a random weight per row. The taps
compute each row's gradient, and the production code sums them with the same weights. If both agree, every use is seen,
each gradient belongs to its row, and no row affects another row's part of a tensor. Parameters that differ move to the
next rung of the ladder (`dpllm.ghost.attach`).

`RowProbe` runs backward for the losses of some rows: the other rows must have no gradient. Neither detects coupling
before the first trained layer; `dpllm.training.checks` compares rows by value.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dpllm.data.labels import BOUNDARIES
from dpllm.ghost import kernels
from dpllm.ghost.model_calls import PackedRows, flatten_tensors, rebuilt
from dpllm.ghost.parameters import nodes_of
from dpllm.ghost.refusals import CoupledError, GhostError, MissedUseError, NoRuleError, is_shortage
from dpllm.ghost.taps import NoTapError, Target
from dpllm.ghost.unit_gradients import Use

if TYPE_CHECKING:
    from dpllm.ghost.tapped_model import TappedModel

logger = logging.getLogger(__name__)

ROWS = 3
"""The largest number of compared rows: more than two, so that fewer other dimensions have the same size."""

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
_SIXTEEN_BITS = 0.1
_MASKED = 1e30  # the least size of an entry that a model masks, with a dtype's lowest number or with infinity
_SMALL = 1e-3  # of the largest gradient: a parameter with a smaller gradient is compared with this
_LARGE = 1 << 20  # entries: larger buffers hold quantised weights, which no forward modifies


class State:
    """What a call changes, random numbers and small buffers of the model, so that the call can be repeated."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        """Store the state of the CPU's and the device's generator, and the model's buffers."""
        self._device = device
        self._generators = self._generator_states()
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.numel() <= _LARGE
        ]
        self._versions = [buffer._version for _, _, buffer, _ in self._buffers]

    def _generator_states(self) -> list[Tensor]:
        own = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *own]

    def restore(self) -> None:
        """Restore the stored state."""
        cpu, *own = self._generators
        torch.set_rng_state(cpu)
        for state in own:
            torch.cuda.set_rng_state(state, self._device)
        for number, (module, name, buffer, value) in enumerate(self._buffers):
            module._buffers[name] = buffer
            if buffer._version != self._versions[number]:
                with torch.no_grad():
                    buffer.copy_(value)
                self._versions[number] = buffer._version

    @property
    def has_moved(self) -> bool:
        """Return whether numbers were drawn since."""
        return not all(map(torch.equal, self._generators, self._generator_states()))


class Inputs(NamedTuple):
    """The arguments of a call of the model, and its rows."""

    args: tuple
    kwargs: dict
    rows: int


@dataclass(frozen=True)
class _Plain:
    """Autograd's results without taps: the numbers of the rows (B,), and gradients by name."""

    loss_B: Tensor
    gradients: dict[str, Tensor | None]

    @property
    def is_finite(self) -> bool:
        """Whether every row has a finite loss; otherwise the gradients prove nothing."""
        return bool(torch.isfinite(self.loss_B).all())

    @property
    def is_complete(self) -> bool:
        """Whether every parameter also has a nonzero gradient."""
        return self.is_finite and all(g is not None and bool(g.any()) for g in self.gradients.values())


class _ReentrantError(Exception):
    """Activations are recomputed in a way that writes gradients only to ``.grad``."""


class WeightsCheck:
    """Finds the rung of each parameter, by comparing the taps with plain autograd.

    A call is compared if no previous call was as informative: the first call, and the first ones with several rows,
    with several tokens, and packed. A single row or token does not show the order of rows and tokens in one dimension.

    Args:
        tapped: the model with its taps.

    Attributes:
        runs: whether a comparison is running.
        flat: rungs of parameters whose modules had several tokens of each row in their first dimension when compared.
        plain_passes: the plain passes that are running, of any model: their gradients may reach shared trained
            parameters.
    """

    plain_passes: ClassVar[int] = 0

    def __init__(self, tapped: TappedModel) -> None:
        """Start without comparisons."""
        self._tapped = tapped
        self.runs = False
        self.flat: set[tuple[str, int, str]] = set()
        self._layouts: set[tuple[bool, bool, bool]] = set()  # packed, several rows, several tokens
        # A part behind zeros (LoRA's at first) or an expert without tokens proves nothing: it is compared again later.
        self._is_complete, self._num_losses = False, 0
        self._zeros: list[nn.Parameter] = []  # that were zero when a gradient was missing
        self._raised = ""  # by the model, during the comparison of the last rung

    def covers(self, rows: int, tokens: int, is_packed: bool) -> bool:
        """Return whether a compared call was as informative as one with these rows and tokens."""
        layout = _layout_of(rows, tokens, is_packed)
        return any(one[0] == is_packed and all(map(operator.ge, one, layout)) for one in self._layouts)

    def begin_loss(self) -> bool:
        """Return whether the next loss may show a missing gradient: a gate is open, or losses passed."""
        self._num_losses += 1
        if self._is_complete:
            return False
        is_power_of_two = self._num_losses.bit_count() == 1
        return is_power_of_two or any(bool(parameter.detach().any()) for parameter in self._zeros)

    def settle(self, every: Inputs) -> None:
        """Find each parameter's rung, by the values of a few rows of a call; leave the model tapped.

        Raises:
            GhostError: a parameter has no exact rung, or a row depends on others.
        """
        tapped, parameters = self._tapped, self._tapped.trained.by_name.values()
        state = State(next(iter(parameters)).device, tapped.model)
        tapped.ladder.detach()
        self.runs = True
        try:
            with kernels.exact_products():  # products of fewer bits differ by more than the tolerance
                few, is_random = self._discover(every, state)
                self._is_complete = self._climb(few, every, state, is_random)
            self._zeros = [] if self._is_complete else [p for p in parameters if not bool(p.detach().any())]
        except BaseException:
            tapped.ladder.detach()  # and the next call settles again
            self._layouts.clear()
            self.flat.clear()
            raise
        finally:
            self.runs = False
            tapped.break_off()
            state.restore()
        self._layouts.add(_layout_of(every.rows, tapped.calls.tokens, bool(tapped.calls.packed.lengths)))
        if paths := [path or "the model" for path in sorted(tapped.ladder.splits)]:
            logger.info(
                "%d modules run row by row, with one launch per row, because no tap is exact: %s",
                len(paths),
                ", ".join(paths[:3]) + (", …" if len(paths) > 3 else ""),
            )

    def _discover(self, every: Inputs, state: State) -> tuple[Inputs, bool]:
        """Find the uses; return the first rows, or all if they cannot be split, and whether numbers were drawn."""
        ladder, own = self._tapped.ladder, self._tapped.own
        few = every if self._tapped.calls.packed.lengths else _first_rows(every)
        try:
            output = ladder.discover(lambda: own(few))
            values = [v for v in flatten_tensors(output) if v.ndim and v.is_floating_point()]
            inputs = few if any(len(value) == few.rows for value in values) else every
        except Exception as error:
            if few.rows == every.rows or is_shortage(error):
                raise
            inputs = every
            state.restore()
            ladder.discover(lambda: own(every))
        is_random = state.has_moved
        state.restore()
        return inputs, is_random

    def _climb(self, inputs: Inputs, every: Inputs, state: State, is_random: bool) -> bool:
        """Compare rows, or all rows if a few give a parameter no gradient; return whether all had a gradient."""
        tapped, ladder, plain = self._tapped, self._tapped.ladder, None
        with contextlib.ExitStack() as mode:
            if is_random:
                mode.enter_context(_in_evaluation(tapped.model))
            if not tapped.trained.sharded:
                try:
                    plain = self._plain(inputs)
                except AssertionError as error:  # from a model that trains only in training mode, with random numbers
                    raise NoRuleError(f"The model cannot be compared with plain autograd: {error}") from error
                except _ReentrantError:
                    mode.enter_context(_in_evaluation(tapped.model))  # in which transformers does not recompute
                    state.restore()
                    with contextlib.suppress(_ReentrantError):
                        plain = self._plain(inputs)
                if plain is not None and inputs.rows < every.rows and not plain.is_complete:
                    inputs = every
                    state.restore()
                    plain = self._plain(inputs)
            while True:
                state.restore()
                ladder.attach()
                differing = self._differing(inputs, plain)
                if not differing:
                    # With shards, and without any gradient, no later call is more informative.
                    return plain is None or plain.is_complete
                spread = ladder.copied
                ladder.detach()
                if not ladder.climb(differing) and not ladder.climb(spread):
                    state.restore()
                    self._refuse_coupled(inputs)
                    names = ", ".join(sorted(target.name for target in differing)[:3])
                    raise NoRuleError(
                        f"For {len(differing)} parameters ({names}) the gradients of single rows, in one pass or row "
                        "by row, differ from the model's: rows depend on each other, or the model computes something "
                        f"different in each call{self._raised}. Freeze these parameters, or remove what couples the "
                        "rows."
                    )

    def _refuse_coupled(self, inputs: Inputs) -> None:
        """Raise `CoupledError` if the cause is rows that depend on each other, since no other clipping applies then."""
        tapped = self._tapped
        tapped.ladder.rungs.clear()
        tapped.ladder.attach()
        try:
            values = _values_of(self._output(inputs), inputs.rows, tapped.calls.packed)
            tapped.receiver.refuse_coupled(_losses_of(values))
        except CoupledError:
            raise
        except Exception as error:  # the probe needs taps that see the rows
            if is_shortage(error):
                raise
        finally:
            tapped.ladder.detach()

    def _plain(self, inputs: Inputs) -> _Plain | None:
        """Return losses and weighted gradients by autograd; None if no output has a gradient."""
        WeightsCheck.plain_passes += 1
        try:
            found = _losses_and_weights(self._tapped.own(inputs), inputs.rows, self._tapped.calls.packed)
            if found is None:
                return None
            (loss_B, weight_B), parameters = found, self._tapped.trained.by_name
            if any("CheckpointFunction" in name for name in nodes_of(loss_B)):
                raise _ReentrantError
            with torch.autocast(loss_B.device.type, enabled=False):
                total = (loss_B * weight_B).sum()
                gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        finally:
            WeightsCheck.plain_passes -= 1
        return _Plain(loss_B.detach(), dict(zip(parameters, gradients, strict=True)))

    def _output(self, inputs: Inputs) -> Any:
        """Call the model with its taps."""
        self._tapped.start(inputs.rows)
        try:
            return self._tapped.own(inputs)
        finally:
            self._tapped.in_forward = False

    def _differing(self, inputs: Inputs, plain: _Plain | None) -> list[Target]:
        """Return the parameters for which the taps give different gradients than autograd, or none."""
        self._raised = ""
        by_name = self._tapped.trained.by_name
        try:
            output = self._output(inputs)
            if plain is None or not plain.is_finite:
                return []
            found, tolerance = _losses_and_weights(output, inputs.rows, self._tapped.calls.packed), self._tolerance()
            largest = tolerance * (1 + plain.loss_B.abs().max())
            if found is None or not bool((found[0] - plain.loss_B).abs().max() <= largest):
                return self._suspects() or [Target(name, parameter) for name, parameter in by_name.items()]
            wrong = _differ(plain.gradients, self._tapped.receiver.weighted_sums(*found), tolerance)
        except NoTapError as error:
            return error.targets
        except MissedUseError as error:
            wrong = [error.name]
        except GhostError:
            raise
        except Exception as error:  # from the model, which ran before: caused by the taps' changes
            suspects = self._suspects()
            if is_shortage(error) or not suspects:
                raise
            self._raised = f" ({type(error).__name__}: {error})"
            return suspects
        return [Target(name, by_name[name]) for name in wrong]

    def _suspects(self) -> list[Target]:
        """Return the parameters whose modules may compute something different than before."""
        call, ladder = self._tapped.call, self._tapped.ladder
        assert call is not None, "it was begun"
        if call.inside:
            return call.inside[-1]
        above = [target for split in ladder.splits.values() for target in split.targets]
        return above or call.widened or ladder.copied

    def _tolerance(self) -> float:
        """Return the relative difference that rounding explains, in the model's narrowest compute dtype."""
        call = self._tapped.call
        dtypes = {p.dtype for p in self._tapped.model.parameters() if p.is_floating_point()}
        if call is not None and call.autocast is not None:  # often within the model's forward only
            dtypes = {call.autocast}
        narrowest = min(dtypes, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
        return _TOLERANCE.get(narrowest, _SIXTEEN_BITS)


def _layout_of(rows: int, tokens: int, is_packed: bool) -> tuple[bool, bool, bool]:
    return is_packed, is_packed or rows > 1, is_packed or tokens > 1


@contextlib.contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation mode, in which dropout draws no numbers, and back."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def _first_rows(inputs: Inputs) -> Inputs:
    """Return the arguments of a call for its first `ROWS` rows."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[:ROWS] if value.ndim and value.shape[0] == inputs.rows else value
        return rebuilt(value, cut)

    return inputs if inputs.rows <= ROWS else Inputs(cut(inputs.args), cut(inputs.kwargs), ROWS)


def _values_of(output: Any, rows: int, packed: PackedRows) -> list[Tensor]:
    """Return an output's tensors with rows first and a gradient; if there are none, those that flatten rows."""
    values, flattened = [], []
    for value in flatten_tensors(output):
        if value.requires_grad and value.is_floating_point():
            by_row = packed.cut(value) if packed.lengths else value
            if by_row.ndim and by_row.shape[0] == rows:
                values.append(by_row)
            elif not packed.lengths and by_row.ndim and by_row.shape[0] and by_row.shape[0] % rows == 0:
                flattened.append(by_row.unflatten(0, (rows, -1)))
    return values or flattened


def _losses_of(values: list[Tensor]) -> Tensor:
    """Return one number per row (B,), from all unmasked entries of its outputs.

    The sum of masked entries may be infinite, and two such sums cannot be compared.
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


def _losses_and_weights(output: Any, rows: int, packed: PackedRows) -> tuple[Tensor, Tensor] | None:
    """Return the rows' numbers and their random weights (B,) in [½, 1½]; None if no output has a gradient.

    An output whose rows do not come first gives one number, shared equally by all rows: then sums over all rows are
    compared.
    """
    values = _values_of(output, rows, packed)
    if values:
        loss_B = _losses_of(values)
        weight_B = torch.rand(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
        return loss_B, weight_B.to(loss_B)
    others = [v for v in flatten_tensors(output) if v.requires_grad and v.is_floating_point()]
    if not others:
        return None
    loss = _losses_of([value[None] for value in others])
    return (loss / rows).expand(rows), loss.new_ones(rows)


def _differ(plain: Mapping[str, Tensor | None], tapped: Callable[[str], Tensor], tolerance: float) -> list[str]:
    """Return the parameters whose two gradients differ: autograd's, and the taps' sums by name."""
    top = max((float(g.double().norm()) for g in plain.values() if g is not None), default=0.0)
    wrong = []
    for name, gradient in plain.items():
        sum_ = tapped(name).detach().double()
        expected = torch.zeros_like(sum_) if gradient is None else gradient.double()
        scale = max(float(expected.norm()), _SMALL * top)
        difference = float((sum_ - expected).norm())
        is_number = math.isfinite(difference) or not bool(torch.isfinite(expected).all())
        if difference > tolerance * scale or not is_number:
            wrong.append(name)
    return wrong


# -------------------------------------------------------------------------------------------- independence of rows


@dataclass
class Checked:
    """The measured independence of rows.

    Attributes:
        rows: whether a row's loss was shown to have no gradient in another row of the model's call.
        packed: the same, for packed rows.
        spread: whether non-finite values were shown to stay within their packed row.
    """

    rows: bool = False
    packed: bool = False
    spread: bool = False

    def note(self, packed: bool) -> None:
        """Record that rows are independent in a call with packed rows, or without."""
        self.rows = True
        self.packed |= packed


@dataclass
class RowProbe:
    """Receives the gradients of some rows' losses; any gradient in another row is an error.

    Attributes:
        rows: the indices of the rows whose losses are differentiated.
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
                f"A packed row's loss depends on the packed row {other} (seen at {name}), so a unit cannot be bounded: "
                "part of the model mixes tokens across row boundaries. Do not pack this model's rows "
                f"(microbatch.pack: false), or give it an attention that reads {BOUNDARIES}."
            )
        raise CoupledError(
            f"The loss of row {int(self.rows[0])} depends on row {other} of the batch (seen at {name}), so a unit "
            "cannot be bounded. Remove whatever couples rows: batch statistics, in-batch negatives, several units "
            "packed into one row, a loss normalised over the batch."
        )


def row_probes(real_B: Tensor, packed: bool) -> list[RowProbe]:
    """Return the probes that reveal every dependence between the rows that are not padding (B,).

    Unpacked: the first row and the last row. Packed: every other row, then the remaining ones. A dependence across a
    boundary goes from one set to the other, so every boundary of the microbatch is tested. The third set is the last
    row: a dependence that skips a whole row reaches it as well.
    """
    (real,) = torch.nonzero(real_B, as_tuple=True)
    if real.numel() == 0:
        real = real.new_zeros(1)
    sets = [real[::2], real[1::2], real[-1:]] if packed else [real[:1], real[-1:]]
    return [RowProbe(rows, packed) for rows in sets]


class SpreadProbe:
    """Receives the gradients of packed rows of which every other one was set to NaN; NaN in another row is an error.

    A gradient does not reveal such a path: attention that multiplies masked values by zero separates finite rows, but
    0 * NaN is NaN, and one unit that overflows would remove all its neighbours from the sum.

    Args:
        finite_B: the rows that are finite by themselves. The others are not informative.

    Attributes:
        poisoned_B: the rows that are set to NaN.
        healthy_B: the rows that must stay finite. A batch without any measures nothing.
    """

    def __init__(self, finite_B: Tensor) -> None:
        """Choose the rows."""
        self.poisoned_B = torch.zeros_like(finite_B)
        self.poisoned_B[1::2] = True
        self.healthy_B = finite_B & ~self.poisoned_B

    def take(self, name: str, parameter: nn.Parameter, use: Use) -> None:
        """Check the gradient that one use of a parameter received."""
        if not bool(torch.isfinite(kernels.entries(use.grad.detach())[self.healthy_B]).all()):
            raise GhostError(
                f"A non-finite value reaches other packed rows (seen at {name}): the attention masks by multiplying "
                "with zero, so one unit that overflows would change other units' contributions. Use an attention that "
                "runs each row separately (dpllm.models.inputs, flash_attention_2), or do not pack the rows "
                "(microbatch.pack: false)."
            )
