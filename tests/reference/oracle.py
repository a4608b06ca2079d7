"""The loop that every clipped sum is compared with: float64, one row at a time, plain autograd.

Shapes: U units, B rows, P trainable entries (all trainable parameters of a model, flattened and
concatenated in the order of `named_parameters`; a tied parameter occurs once).

Nothing here uses dpllm except `clipped_sum`, which runs the thing under test.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpllm import GhostClipper, per_sequence_loss
from dpllm.ghost import NormMethod
from dpllm.models.losses import classification_loss, seq2seq_loss

from .zoo import IGNORED, Batch, Case, build_model, enable_checkpointing, float64_copy, forward_context, make_batch

LOSSES = {
    "causal_lm": per_sequence_loss,
    "seq2seq_lm": seq2seq_loss,
    "sequence_classification": classification_loss,
}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _row_loss(task: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Loss of one row from its logits (T, V) or (K,): the mean over its own unmasked targets."""
    if task == "sequence_classification":
        return F.cross_entropy(logits, labels)
    if task == "causal_lm":
        logits, labels = logits[:-1], labels[1:]
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def _flat(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([gradient.reshape(-1).double() for gradient in gradients])


def row_gradients(model: nn.Module, task: str, batch: Batch) -> Tensor:
    """Gradient of every row's loss, (B, P), each from a forward pass of that row alone without padding."""
    parameters = list(trainable(model).values())
    rows = []
    for row in range(batch.num_rows):
        alone = batch.unpadded_row(row)
        loss = _row_loss(task, model(**alone.inputs).logits[0], alone.labels[0])
        rows.append(_flat(torch.autograd.grad(loss, parameters)))
    return torch.stack(rows)


def row_gradients_in_batch(model: nn.Module, case: Case, batch: Batch, seed: int) -> Tensor:
    """As `row_gradients`, from one forward pass of the batch with dropout drawn from `seed`.

    The model's own dtype is kept, and the case's autocast and checkpointing: in bfloat16 this shares the
    clipper's rounding of activations and differs from it in the rounding of weight gradients alone.
    """
    enable_checkpointing(model, case.checkpointing)
    torch.manual_seed(seed)
    with forward_context(case):
        logits = model(**batch.inputs).logits
    logits = logits if logits.dtype is torch.float64 else logits.float()
    rows = []
    for row in range(batch.num_rows):
        model.zero_grad(set_to_none=True)
        # Not autograd.grad, which reentrant checkpointing doesn't know.
        _row_loss(case.spec.task, logits[row], batch.labels[row]).backward(retain_graph=True)
        rows.append(_flat(tuple(parameter.grad for parameter in trainable(model).values())))
    return torch.stack(rows)


def unit_gradients(row_gradients_BP: Tensor, unit_index: Tensor | None) -> Tensor:
    """Sums the rows of each unit, (U, P). A row of unit -1 belongs to none."""
    if unit_index is None:
        return row_gradients_BP
    num_units = int(unit_index.max()) + 1
    kept = unit_index >= 0
    sums = row_gradients_BP.new_zeros(num_units, row_gradients_BP.shape[1])
    return sums.index_add(0, unit_index[kept], row_gradients_BP[kept])


def ideal_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """min(1, C / norm) without any margin."""
    return (clip_norm / norms).clamp(max=1.0)


@dataclass(frozen=True)
class Clipped:
    """What one backward pass of the clipper gave: norms and factors (U,), the sum (P,) in float64."""

    norms: Tensor
    factors: Tensor
    total: Tensor


def released(model: nn.Module) -> Tensor:
    """Concatenated `.grad` of all trainable parameters, (P,) in float64; each must have one of full precision."""
    for name, parameter in trainable(model).items():
        assert parameter.grad is not None, f"{name} has no gradient"
        expected = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        assert parameter.grad.dtype is expected, f"{name}.grad is {parameter.grad.dtype}"
    return _flat(tuple(parameter.grad for parameter in trainable(model).values()))


def clipped_sum(
    model: nn.Module,
    case: Case,
    batches: Batch | list[Batch],
    clip_norm: float,
    unit_index: Tensor | list[Tensor] | None = None,
    seed: int | None = None,
    forms: NormMethod | None = None,
) -> Clipped:
    """Runs the clipper under test over one microbatch, or over several that add up.

    Args:
        model: The model, with checkpointing switched on if wanted, on any device. Its gradients are dropped first.
        case: Says loss and autocast.
        batches: One microbatch, or a list of them.
        clip_norm: C.
        unit_index: As the clipper takes it; one per microbatch.
        seed: Seeds dropout before the first forward pass.
        forms: How norms are computed.
    """
    batches = batches if isinstance(batches, list) else [batches]
    indices = unit_index if isinstance(unit_index, list) else [unit_index] * len(batches)
    model.zero_grad(set_to_none=True)
    if seed is not None:
        torch.manual_seed(seed)
    clipper = GhostClipper(model, clip_norm, forms)
    results, device = [], next(model.parameters()).device
    try:
        for batch, index in zip([batch.to(device) for batch in batches], indices, strict=True):
            with forward_context(case, device.type):
                logits = model(**batch.inputs).logits
            losses = LOSSES[case.spec.task](logits, batch.labels)
            results.append(clipper.backward(losses, unit_index=index))
    finally:
        clipper.remove()
    norms = torch.cat([result.norms for result in results])
    factors = torch.cat([result.factors for result in results])
    return Clipped(norms.detach().cpu(), factors.detach().cpu(), released(model).cpu())


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||, in float64."""
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def worst_parameter(model: nn.Module, value: Tensor, reference: Tensor) -> tuple[float, str]:
    """The largest relative error of one parameter's part of the sum, and that parameter's name.

    Parts smaller than 1e-3 of the whole are measured against 1e-3 of the whole: some gradients are
    zero but for rounding, such as that of a key's bias.
    """
    floor = 1e-3 * float(reference.norm())
    worst, where, start = 0.0, "", 0
    for name, parameter in trainable(model).items():
        part = slice(start, start + parameter.numel())
        start = part.stop
        error = float((value[part] - reference[part]).norm()) / max(float(reference[part].norm()), floor)
        if not error <= worst:  # a NaN is the worst
            worst, where = error, name
    return worst, where


@dataclass(frozen=True)
class Comparison:
    """The clipper and the loop on one batch, C at the loop's median norm (lower of the middle two)."""

    case: Case
    clip_norm: float
    reference_norms: Tensor
    result: Clipped
    reference_total: Tensor  # the loop's sum, formed with the factors the clipper used
    worst_parameter: tuple[float, str]

    @property
    def norm_error(self) -> float:
        return float(((self.result.norms.double() - self.reference_norms) / self.reference_norms).abs().max())

    @property
    def sum_error(self) -> float:
        return relative_error(self.result.total, self.reference_total)

    @property
    def ideal_factors(self) -> Tensor:
        return ideal_factors(self.reference_norms, self.clip_norm)

    @property
    def num_clipped(self) -> int:
        return int((self.reference_norms > self.clip_norm).sum())


def compare(
    case: Case,
    unit_index: Tensor | None = None,
    *,
    seed: int = 0,
    num_rows: int = 5,
    stretch: int = 1,
    same_precision: bool = False,
    device: str = "cpu",
) -> Comparison:
    """Builds the case's model and batch, and runs both sides.

    Args:
        case: What to build. One with dropout should be in float64.
        unit_index: Row to unit, (B,); None: a row is a unit.
        seed: Of weights, rows and dropout.
        num_rows: B.
        stretch: Multiplies the rows' lengths.
        same_precision: Differentiates the model itself, with its checkpointing, instead of a float64 copy.
        device: Where the clipper runs; the loop runs on the CPU.
    """
    model, batch = build_model(case, seed), make_batch(case.spec, seed, num_rows, stretch=stretch)
    loop_model = copy.deepcopy(model) if same_precision else float64_copy(model)
    if same_precision:
        rows = row_gradients_in_batch(loop_model, case, batch, seed=17 + seed)
    elif case.has_dropout:
        rows = row_gradients_in_batch(
            loop_model, case.but(dtype="float64", checkpointing="none"), batch, seed=17 + seed
        )
    else:
        rows = row_gradients(loop_model, case.spec.task, batch)
    units = unit_gradients(rows, unit_index)
    norms = units.norm(dim=1)
    clip_norm = float(norms.median()) * (1 + 1e-9)
    enable_checkpointing(model, case.checkpointing)
    result = clipped_sum(model.to(device), case, batch, clip_norm, unit_index, seed=17 + seed)
    total = result.factors.double() @ units
    return Comparison(case, clip_norm, norms, result, total, worst_parameter(model, result.total, total))


def released_over_clip_norm(
    case: Case, seed: int = 0, fraction: float = 0.3, device: str = "cpu"
) -> tuple[float, float]:
    """Smallest and largest norm over C of what is released of one unit, over the batch's rows.

    Each row is run as the only unit, with C at `fraction` of the smallest norm, so that every one is clipped.
    """
    model, batch = build_model(case, seed).to(device), make_batch(case.spec, seed)
    enable_checkpointing(model, case.checkpointing)
    smallest = float(clipped_sum(model, case, batch, clip_norm=1.0, seed=17).norms.min())
    clip_norm = fraction * smallest
    ratios = [
        float(clipped_sum(model, case, batch.rows([row]), clip_norm, seed=17).total.norm()) / clip_norm
        for row in range(batch.num_rows)
    ]
    if not all(math.isfinite(ratio) for ratio in ratios):
        return math.nan, math.nan
    return min(ratios), max(ratios)
