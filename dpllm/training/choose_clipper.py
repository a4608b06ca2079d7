"""Choose how units' gradients are computed and which parameters to freeze, by trials on synthetic rows.

`dpllm.training.attached` makes the clipper of a run here, and the Trainer and `dpllm plan` check with this module that
the model can be clipped: all units of a microbatch in one pass, or one unit at a time. Both ways compute the same
clipped sum up to rounding, so ε does not depend on the choice.

``auto`` chooses before the first private step. Most structures without a rule are visible in the model's modules;
others show in a pass. Trainable parameters that take no part in the loss are named and, on request, frozen, since they
would be trained on noise alone: the pooler of BigBird, the encoder's embeddings of a decoder that is used alone. The
autograd graph shows whether a loss reaches a parameter.

Both decisions use synthetic rows, random numbers in the form of the private rows: the report states the decision, ε
does not cover it, and it is the same on every process. Of the private rows, only the form of the first one is used: its
columns, their types and their dimensions, and the number of its tokens that stand for parts of an image. Every
synthetic row has the same columns and as many such tokens, so no private row influences the trial.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.config.privacy_section import GRADIENTS
from dpllm.config.values import ConfigError, choice
from dpllm.data.transfer import send
from dpllm.engines.processes import Processes
from dpllm.ghost import CoupledError, GhostClipper, NormMethod, NoRuleError, PerUnitClipper, UnitClipper, UnreachedError
from dpllm.ghost.model_calls import placeholders_of
from dpllm.ghost.parameters import leaves_of
from dpllm.mechanism.parts import Clipping
from dpllm.training.rows import LossOf, TrainingRows

_SEED = 20161024  # public: the rows are the same on every process and after a resume
_ONES, _ZEROS = ("attention_mask",), ("token_type_ids", "special_tokens_mask", "labels")


class NotMadeUp(ValueError):
    """Synthetic rows of this form cannot be made."""


def made_up(rows: TrainingRows, model: nn.Module, lengths: Sequence[int], number: int = 0) -> Mapping[str, Any]:
    """Return the collator's inputs of synthetic rows, on the model's device.

    Args:
        rows: rows of the run.
        model: model from whose vocabulary the tokens are drawn.
        lengths: tokens of each row, where a row is a sequence; cut to the longest row of the run.
        number: number of the microbatch; each has different tokens.

    Raises:
        NotMadeUp: the first row has a column that is neither numbers nor a sequence of numbers, or that has no value;
            or other rows have different columns.
    """
    if (other := rows.other_columns) is not None:
        raise NotMadeUp(
            f"row {other} has different columns than row 0. Give every row the same columns, or remove those that only "
            "some rows have"
        )
    (form,) = rows.fetch(np.asarray(rows.units.rows[:1]))
    rng = np.random.default_rng([_SEED, number])
    most, tokens = int(rows.lengths.max()), _vocabulary(model)
    images = _Placeholders.of(form, placeholders_of(model))
    if images.kinds and number == 0 and (other := rows.first_with_other_counts(images.kinds)) is not None:
        raise NotMadeUp(
            f"row {other} has a different number of image tokens than row 0. Give every row as many, or set "
            "privacy.gradients=ghost or per_unit, and privacy.unused_parameters=error"
        )
    inputs = rows.collate([_like(form, max(1, min(length, most)), tokens, images, rng) for length in lengths])
    return send(inputs, next(model.parameters()).device)


@dataclass(frozen=True)
class _Placeholders:
    """The tokens of a row at whose places a model inserts the features of its image; a row without images has none."""

    kinds: Sequence[int]
    of_row: np.ndarray

    @classmethod
    def of(cls, form: Any, kinds: Sequence[int]) -> _Placeholders:
        ids = np.asarray(form["input_ids"] if kinds and isinstance(form, Mapping) and "input_ids" in form else [])
        return cls(kinds, ids[np.isin(ids, kinds)])

    def tokens(self, length: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Return synthetic tokens for a row of this length, or longer if it is too short for its image."""
        others = np.setdiff1d(np.arange(tokens), self.kinds)
        return np.concatenate([self.of_row, rng.choice(others, max(length - len(self.of_row), 2))])


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode for the duration of the block; random states do not change."""
    before = [(module, module.training) for module in model.modules()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    model.train(training)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in before:
            module.training = mode


def _vocabulary(model: nn.Module) -> int:
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    named = getattr(getattr(model, "config", None), "vocab_size", None)
    return int(named) if isinstance(named, int) else max(tables, default=2)


def _like(form: Any, length: int, tokens: int, images: _Placeholders, rng: np.random.Generator) -> Any:
    """Return a synthetic row."""
    ids = images.tokens(length, tokens, rng) if len(images.of_row) else rng.integers(0, tokens, length)
    length = len(ids)
    if not isinstance(form, Mapping):
        return _column("input_ids", form, length, ids, rng)
    return {name: _column(name, value, length, ids, rng) for name, value in form.items()}


def _column(name: str, value: Any, length: int, ids: np.ndarray, rng: np.random.Generator) -> Any:
    if value is None:  # whether a row has a value is private, and decides what the loss reaches
        raise NotMadeUp(f"the column '{name}' has no value in the first row. Remove the column, or give each row one")
    if isinstance(value, str):
        return ""
    try:
        shown = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise NotMadeUp(f"the column '{name}' holds lists of different lengths") from error
    if shown.dtype.kind not in "iubf":
        raise NotMadeUp(f"the column '{name}' holds {type(value).__name__}")
    if shown.ndim == 0:
        made: Any = np.zeros((), dtype=shown.dtype)
    elif shown.dtype.kind == "f":
        made = rng.standard_normal(shown.shape).astype(shown.dtype)
    elif shown.ndim > 1:
        made = np.zeros_like(shown)
    elif name in _ONES or name in _ZEROS:
        made = np.full(length, int(name in _ONES), dtype=shown.dtype)
    else:
        made = np.arange(length) if name == "position_ids" else ids
        made = made.astype(shown.dtype)
    if isinstance(value, Tensor):
        return torch.from_numpy(np.array(made)).to(value.dtype)
    return made if isinstance(value, np.ndarray) else made.tolist()


FROZEN = "trainable parameters that no loss reaches, and that were frozen"
"""Name of that fact in the ledger."""
_LENGTHS, _MICROBATCHES = (48, 17), 4


def unused(model: nn.Module, rows: TrainingRows, loss_of: LossOf) -> list[str]:
    """Return the names of the trainable parameters that losses of synthetic rows do not reach.

    Args:
        model: the module that computes the losses.
        rows: rows of the run.
        loss_of: called with the model and the inputs of synthetic rows.

    Raises:
        NotMadeUp: such rows cannot be made.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    reached: set[int] = set()
    # Evaluation mode first: it skips no layer at random, and activations are not recomputed.
    for training in (False, True):
        with in_mode(model, training):
            for number in range(_MICROBATCHES):
                reached.update(map(id, leaves_of(loss_of(model, made_up(rows, model, _LENGTHS, number)))))
        if all(id(p) in reached for p in trainable.values()):
            return []
    return [name for name, p in trainable.items() if id(p) not in reached]


def freeze_unused(model: nn.Module, rows: TrainingRows, loss_of: LossOf) -> list[str]:
    """Freeze the trainable parameters that losses do not reach; see `dpllm.training.run.PrivateRun.freeze_unused`.

    Args:
        model: the module that computes the losses, before it is distributed.
        rows: rows of the run.
        loss_of: called with the model and the inputs of synthetic rows.

    Returns:
        The names of these parameters.

    Raises:
        ConfigError: the parameters are sharded, synthetic rows cannot be made, or losses reach no parameter at all.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in trainable.values()):
        raise ConfigError(
            "privacy.unused_parameters=freeze runs the model before it is distributed, but its parameters are sharded "
            "already. Freeze them by hand (requires_grad_(False))"
        )
    try:
        names = unused(model, rows, loss_of)
    except NotMadeUp as error:
        raise ConfigError(
            f"privacy.unused_parameters=freeze needs synthetic rows, but {error}. Freeze the parameters that "
            "the error of privacy.unused_parameters=error names, by hand (requires_grad_(False))"
        ) from error
    if names and len(names) == len(trainable):
        raise ConfigError(
            "The losses of synthetic rows reach no trainable parameter, so privacy.unused_parameters=freeze would "
            "freeze all of them. Compute the losses from the model, with gradients on"
        )
    for name in names:
        trainable[name].requires_grad_(False)
    return names


def in_parts(names: list[str], most: int = 4000) -> Iterator[str]:
    """Yield the names, separated by commas, in strings of limited length for the ledger."""
    part = ""
    for name in names:
        if part and len(part) + len(name) > most:
            yield part
            part = ""
        part = f"{part}, {name}" if part else name
    if part:
        yield part


logger = logging.getLogger(__name__)

METHOD = "gradients of units"
"""Name of that fact in the ledger."""
GHOST = "norms and the clipped sum of all units of a microbatch in one backward pass"
PER_UNIT = "one unit at a time by plain autograd"
_TRIED = (13, 8)  # tokens of the rows of a trial
_TIMED, _TOKENS = 4, 256  # rows of the timed microbatch, and their tokens: the log must not reveal private lengths


def clipper_for(
    gradients: str, model: nn.Module, clipping: Clipping, norm_method: NormMethod | None = None
) -> UnitClipper:
    """Attach a clipper to a model.

    Args:
        gradients: "ghost", "per_unit", or "auto": "ghost" if every module has a rule, as far as this shows without a
            pass.
        model: the module that computes the losses.
        clipping: clipping of the plan.
        norm_method: for "ghost": how norms are computed.

    Raises:
        GhostError: the model cannot be clipped exactly in this way.
        ConfigError: ``gradients`` has another value.
    """
    choice("gradients", gradients, GRADIENTS)
    if gradients == "per_unit":
        return PerUnitClipper(model, clipping=clipping)
    try:
        return GhostClipper(model, norm_method=norm_method, clipping=clipping)
    except NoRuleError:
        if gradients == "ghost" or _is_sharded(model):
            raise
    return PerUnitClipper(model, clipping=clipping)


def chosen(
    gradients: str,
    model: nn.Module,
    rows: TrainingRows,
    loss_of: LossOf | None,
    processes: Processes,
) -> str:
    """Return "ghost" or "per_unit"; for "auto" after a trial, with one line in the log. Called by all together.

    Args:
        gradients: the recipe's value.
        model: the module that computes the losses, on its engine.
        rows: rows of the run.
        loss_of: called with the model and the inputs of synthetic rows. None: no pass is tried.
        processes: processes of the run.
    """
    choice("gradients", gradients, GRADIENTS)
    if gradients != "auto":
        return gradients
    if _is_sharded(model):
        return "ghost"
    reason = processes.from_main(lambda: _reason(model, rows, loss_of))
    if reason is None:
        return "ghost"
    cost = _cost(model, rows, loss_of)
    if processes.is_main:
        logger.warning("privacy.gradients=auto computes %s%s. %s", PER_UNIT, cost, reason)
    return "per_unit"


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(p, "ds_id") or hasattr(p, "placements") for p in model.parameters())


def _reason(model: nn.Module, rows: TrainingRows, loss_of: LossOf | None) -> str | None:
    """Return why the model cannot be clipped in one pass; None if it can, as far as a trial shows."""
    try:
        clipper = GhostClipper(model, clip_norm=1.0)
        try:
            if loss_of is not None:
                with in_mode(model, training=True):
                    clipper.clip(loss_of(model, made_up(rows, model, _TRIED)))
        finally:
            clipper.remove()
    except CoupledError:
        return None  # for a loss over the rows of a batch this means nothing; private rows show it, and it is refused
    except NoRuleError as error:
        return str(error).removesuffix(NoRuleError.REMEDY).strip()
    except UnreachedError as error:
        if loss_of is None or unused(model, rows, loss_of):
            raise
        return f"Some rows use different parameters than others. {error}"
    except Exception:  # the trial is inconclusive: rows of this form cannot be made, or the model does not accept them
        return None
    return None


def _cost(model: nn.Module, rows: TrainingRows, loss_of: LossOf | None) -> str:
    """Return a description of the cost of one unit at a time, measured on synthetic rows; empty if it is unknown."""
    if loss_of is None:
        return ""
    parameters = [p for p in model.parameters() if p.requires_grad]

    def seconds(microbatches: list[Any]) -> float:
        begin = time.perf_counter()
        for inputs in microbatches:
            torch.autograd.grad(loss_of(model, inputs).sum(), parameters, allow_unused=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    try:
        together = made_up(rows, model, [_TOKENS] * _TIMED)
        singly = [made_up(rows, model, [_TOKENS], number) for number in range(_TIMED)]
        with in_mode(model, training=True):
            seconds(singly[:1])  # libraries allocate at the first call
            ratio = seconds(singly) / seconds([together])
    except Exception:  # as in the trial: the model does not accept rows of this form
        return ""
    return (
        f", in {ratio:.1f} times the time that {_TIMED} rows of at most {_TOKENS} tokens take together without privacy"
    )


def in_words(clipper: UnitClipper) -> str:
    """Return the description of a clipper's method, as the report names it."""
    return PER_UNIT if clipper.one_unit else GHOST


def rows_of_calls(rows: TrainingRows, clipper: UnitClipper) -> TrainingRows:
    """Return the rows, with one row per call if each unit has one row and each call of the model has one unit.

    Rows that never share a call cannot depend on each other within it, so only state that is carried from call to call
    remains to be measured.
    """
    return replace(rows, max_rows=1) if clipper.one_unit and rows.units.max_rows == 1 else rows
