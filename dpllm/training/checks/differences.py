"""Compare a row's results alone and with other rows: how large rounding makes the differences, and how to report them.

`dpllm.training.checks.independence` runs the passes. No model runs here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dpllm.ghost import UnitClipper
from dpllm.ghost.parameters import shapes_of
from dpllm.training.checks.row_sample import Company


@dataclass(frozen=True)
class Bound:
    """The largest differences that rounding explains.

    Attributes:
        relative: for a row's loss, relative to the larger of it and 1, and for its gradient norm.
        step: added to it, divided by the row's number of targets: one step of a rounded logit. It moves the loss of a
            row with one target by that much, and averages out over many.
    """

    relative: float
    step: float = 0.0


FLOAT32, TF32, FLOAT16, BFLOAT16 = "float32", "TF32", "float16", "bfloat16"
CPU, GPU = "cpu", "gpu"
TOLERANCE = {
    # Sound toy models differ by at most 8e-6, coupled ones by at least 3.6e-5 (benchmarks/independence.py);
    # ill-conditioned ones by up to 1.5e-3, and then their passes are repeated in float64
    (CPU, FLOAT32): Bound(2e-5),
    (CPU, FLOAT16): Bound(5e-3),
    (CPU, BFLOAT16): Bound(3e-2),
    (CPU, "autocast to float16"): Bound(5e-3),
    (CPU, "autocast to bfloat16"): Bound(3e-2),
    # sums of thousands of terms in a different order, through tens of layers: about 4e-5
    (GPU, FLOAT32): Bound(1e-4),
    # a kernel for one row may multiply in float32 where the kernel for many rounds factors to 11 bits
    (GPU, TF32): Bound(1e-2),
    # twice the bound of a CPU; logits between 16 and 32 have steps of 2^-6
    (GPU, FLOAT16): Bound(1e-2, step=2**-6),
    (GPU, "autocast to float16"): Bound(1e-2, step=2**-6),
    # the same; steps of 2^-3
    (GPU, BFLOAT16): Bound(4e-2, step=2**-3),
    (GPU, "autocast to bfloat16"): Bound(4e-2, step=2**-3),
}
"""The largest differences that rounding explains, by kind of device and arithmetic.

The values for a CPU are measured. Those for a GPU are estimates, because one row and many may use different kernels
there: replace them with measurements of a device (`dpllm.training.run.PrivateRun.row_differences`). A bound that is too
tight refuses the first step of every run; one that is too wide passes a mistake with a small effect. With random
weights at toy size, a wrong padding token moves losses by 5e-2 and norms by 9e-2, mixed rows by 8e-3 and 4e-2.

float64 counts as float32. Autocast means that trained parameters have a finer dtype than the coarsest of the pass.
"""
_LOOSEST = 500  # times the tolerance, of C: the largest difference of two contributions if the loss is nearly 0
_LARGEST = 0.25  # of C: the same for every dtype; 500 times the tolerance of bfloat16 would allow any difference
UNKNOWN = -1.0
"""The norm of a row next to a row that is not finite (`dpllm.ghost.UnitClipper.row_norms`)."""
SAME = 1e-6
"""The largest difference between two runs of one pass: the first may compute a norm by a different method."""
NEAR = 0.1
"""The largest difference between a pass and the same pass in float64. A larger one, or NaN, is not rounding."""
_PADDING = (
    "The model or the loss reads padding: it pools at a padding token (wrong config.pad_token_id), counts positions "
    "from it (a tokenizer with padding_side='left' and absolute positions), attends to it (the collator returns no "
    "attention_mask), or counts it as targets (dpllm pads labels with -100)",
    "Set config.pad_token_id, pad on the right, return an attention_mask, and leave padding out of the loss "
    "(dpllm.per_sequence_loss), or train with one row per microbatch (per_device_train_batch_size: 1)",
)
_COMPANY = (
    "The loss or the model reads the whole batch: it divides by the batch's number of targets, counts equal rows, "
    "uses batch statistics, scales int8 or fp8 over all rows, or draws random numbers from a seed that is set within "
    "the step",
    "Compute each row's loss from its own row (dpllm.per_sequence_loss)",
)
_REPEATED = 4  # a row that is run alone again has the same shapes, so the tolerance is divided by this
_TRIED = 97  # grid of norms, four for each power of ten, of which the least that counts is taken


@dataclass(frozen=True)
class Seen:
    """The result of one pass for one row.

    Attributes:
        row: number of the row.
        place: its position in the microbatch.
        loss: loss of the row.
        norm: norm of its gradient over all trainable parameters, or `UNKNOWN`.
        company: the rows of the pass.
        targets: number of its targets, as far as its labels show. 0: unknown.
    """

    row: int
    place: int
    loss: float
    norm: float
    company: Company
    targets: int = 0


@dataclass(frozen=True)
class Differences:
    """The largest differences of a check, relative as defined by `Bound`. They are computed from private rows.

    They exceed the tolerance in a check that passed if the difference vanished in float64.

    Attributes:
        loss: difference of a row's loss alone and with other rows.
        norm: difference of its gradient norm; where a loss is nearly 0, divided by the slack that `compare` grants.
        tolerance: the largest difference that rounding explains. Where a row with few targets may differ by more, both
            differences are divided by that factor.
    """

    loss: float
    norm: float
    tolerance: float


@dataclass
class Precision:
    """The arithmetic of a group of passes.

    Attributes:
        dtype: the coarsest dtype of a result.
        weights: the finest dtype of a trained parameter.
        on_gpu: whether losses were on a GPU.
    """

    dtype: torch.dtype = torch.float64
    weights: torch.dtype = torch.float64
    on_gpu: bool = False

    def bound(self) -> Bound:
        """Return the largest differences that rounding explains."""
        return TOLERANCE[GPU if self.on_gpu else CPU, self.arithmetic]

    @property
    def arithmetic(self) -> str:
        """Return the name of the arithmetic in `TOLERANCE`."""
        name = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}.get(self.dtype)
        if name is None:
            return TF32 if self.on_gpu and self.dtype == torch.float32 and _rounds_products() else FLOAT32
        return f"autocast to {name}" if torch.finfo(self.weights).eps < torch.finfo(self.dtype).eps else name


def _rounds_products() -> bool:
    """Return whether float32 products are computed from rounded factors (TF32)."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the setting was made through both of torch's interfaces
        return True


def counting_norm(clipper: UnitClipper) -> float:
    """Return the least gradient norm, of a grid, whose contribution is at least half the largest possible one.

    With flat clipping it is about C/2. With automatic clipping it is about the stability constant, since gradients
    shorter than C are scaled up to it.
    """
    clipping = clipper.clipping
    count = len(clipping.groups(shapes_of(clipper.parameters)))
    norm_N = clipper.threshold * torch.logspace(-12, 12, _TRIED, dtype=torch.float64)
    norm_GN = (norm_N / math.sqrt(count)).expand(count, -1).clone()
    contribution_N = (clipping.factors(norm_GN.clone()) * norm_GN).square().sum(dim=0).sqrt()
    counting_N = norm_N[contribution_N >= clipping.clip_norm / 2]
    return float(counting_N[0]) if len(counting_N) else clipper.threshold


def compare(seen: Sequence[Seen], counting: float, bound: Bound) -> tuple[Differences, tuple[Seen, Seen] | None]:
    """Return the largest differences between passes for the same row, and the pair that exceeds rounding most.

    Losses are compared relative to the larger of their size and 1, which is the rounding of logits. A gradient norm
    near a loss of 0 is the small difference of numbers near 1, so its tolerance grows as 1/loss, up to a bound
    on the difference of the contributions, relative to C: a loss may also be small because of its scale, and then its
    gradients count as much as those of any loss with a smaller C. The bound is 1 % of C in float32, and a quarter of C
    in coarser arithmetic.

    Args:
        seen: the results.
        counting: the norm from which a gradient counts (`counting_norm`).
        bound: the largest differences that rounding explains.
    """
    tolerance = bound.relative
    alone: dict[int, Seen] = {}
    for one in sorted(seen, key=lambda one: len(one.company.numbers)):
        alone.setdefault(one.row, one)
    loosest = max(1.0, min(_LOOSEST, _LARGEST / tolerance))
    largest, worst, excess = [0.0, 0.0], None, (0, 1.0)
    for one in seen:
        first = alone[one.row]
        loss = difference(first.loss, one.loss, 1.0)
        norm = 0.0 if UNKNOWN in (first.norm, one.norm) else difference(first.norm, one.norm, 1e-30)
        if math.isfinite(first.loss):
            room = max(1.0, 1 / max(abs(first.loss), 1e-30))
            norm /= min(room, loosest * max(1.0, counting / max(first.norm, one.norm, 1e-30)))
        share = 1 + bound.step / tolerance / one.targets if one.targets else 1.0
        loss, norm = loss / share, norm / share
        largest = [max(largest[0], loss), max(largest[1], norm)]
        # Reported first: a row that ran alone twice, then one that also ran alone.
        times_alone = [len(first.company.numbers), len(one.company.numbers)].count(1)
        found = (times_alone, max(loss, norm) / _tolerance((first, one), tolerance))
        if found[1] > 1 and found > excess:
            worst, excess = (first, one), found
    return Differences(largest[0], largest[1], tolerance), worst


def agree(results: Sequence[Sequence[Seen]], again: Sequence[Sequence[Seen]], within: float) -> bool:
    """Return whether the same passes, run twice, had the same losses and norms, up to a relative difference."""
    pairs = [pair for first, second in zip(results, again, strict=True) for pair in zip(first, second, strict=True)]
    return all(
        max(difference(one.loss, other.loss, 1.0), difference(one.norm, other.norm, 1e-30)) <= within
        for one, other in pairs
    )


def difference(one: float, other: float, floor: float) -> float:
    """Return the difference of two numbers, relative to the larger one and to a floor; infinite if only one is finite.

    Args:
        one: a number.
        other: another number.
        floor: the least number to which the difference is relative.
    """
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    return abs(one - other) / max(abs(one), abs(other), floor)


def in_words(worst: tuple[Seen, Seen], tolerance: float, not_held: str, reads_padding: bool | None) -> str:
    """Return one line with the two passes that differ, by how much, the cause and the remedy.

    Args:
        worst: the two results of a row that differ most.
        tolerance: the largest difference that rounding explains.
        not_held: description of the random numbers that could not be fixed.
        reads_padding: whether padding alone makes the difference; None: unknown.
    """
    first, other = worst
    name = _figure(worst, tolerance)
    values = (first.loss, other.loss) if name == "loss" else (first.norm, other.norm)
    cause, remedy = _cause(other, not_held, reads_padding)
    explained = _tolerance(worst, tolerance)
    return (
        f"The {name} of a row depends on other rows: {values[0]:.6g} {first.company.words}, "
        f"{values[1]:.6g} {other.company.words} (dropout off; rounding explains {explained:.0e}), so a unit's "
        f"influence cannot be bounded and ε would not hold. {cause}. {remedy}"
    )


def finding_of(worst: tuple[Seen, Seen], tolerance: float) -> str:
    """Return the kind of difference, without a value of a row, for the open point of a report."""
    return f"the {_figure(worst, tolerance)} of a row alone and in a batch differed by more than rounding explains"


def _figure(worst: tuple[Seen, Seen], tolerance: float) -> str:
    by_loss = difference(worst[0].loss, worst[1].loss, 1.0) > _tolerance(worst, tolerance)
    return "loss" if by_loss else "gradient norm"


def _tolerance(pair: tuple[Seen, Seen], tolerance: float) -> float:
    """Return the largest difference that rounding explains; less for a row that ran alone twice."""
    is_repeated = all(len(one.company.numbers) == 1 for one in pair)
    return tolerance / _REPEATED if is_repeated else tolerance


def _cause(other: Seen, not_held: str, reads_padding: bool | None) -> tuple[str, str]:
    if not_held:
        return (
            "The same row, run alone with other random numbers, returned a different result, and the random numbers "
            f"of a row in a batch cannot be fixed ({not_held}), so the check cannot rule out a dependence on other "
            "rows",
            "Draw the random numbers of a model or a loss with torch.rand, torch.randn, torch.randint or "
            "torch.bernoulli, in shape (B, ...) for B rows",
        )
    if len(other.company.numbers) == 1:  # the same row alone, after another row
        return (
            "The same row, run alone, returned a different result the second time: the loss or the model carries "
            "state from one microbatch to the next or counts its calls, or the loss reads what the collator has "
            "stored, which by then belongs to the next rows",
            "Compute each row's loss from that row and the weights only, and let the collator return what it needs",
        )
    if reads_padding:
        return _PADDING
    if reads_padding is False:
        return _COMPANY
    return f"{_PADDING[0]}; or {_COMPANY[0][0].lower()}{_COMPANY[0][1:]}", f"{_PADDING[1]}; {_COMPANY[1]}"
