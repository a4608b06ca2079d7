"""The choice of how units' gradients are computed: all units of a microbatch in one pass, or one unit at a time.

Place in the flow: `dpllm.training.attached` makes the clipper of a run here, and the Trainer and `dpllm plan` check
with it that the model can be clipped. Both ways give the same clipped sum up to rounding, so ε does not depend on the
choice.

``auto`` chooses before the first private step. The model's modules show most structures without a rule; others show in
a pass. That pass has rows that are made up (`dpllm.training.made_up`), so the choice tells nothing of the private rows,
and it is the same on every process.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dpllm.config.privacy_section import GRADIENTS
from dpllm.config.values import choice
from dpllm.engines.processes import Processes
from dpllm.ghost import CoupledError, GhostClipper, NormMethod, NoRuleError, PerUnitClipper, UnitClipper, UnreachedError
from dpllm.mechanism.parts import Clipping
from dpllm.training.made_up import in_mode, made_up
from dpllm.training.rows import LossOf, TrainingRows
from dpllm.training.unused import unused

logger = logging.getLogger(__name__)

METHOD = "gradients of units"
"""The ledger's fact of that name."""
GHOST = "norms and the clipped sum of all units of a microbatch in one backward pass"
PER_UNIT = "one unit at a time by plain autograd"
_TRIED = (13, 8)  # tokens of the rows of a trial
_TIMED, _TOKENS = 4, 256  # rows of the microbatch that is timed, and their tokens: the log may not tell private lengths


def clipper_for(
    gradients: str, model: nn.Module, clipping: Clipping, norm_method: NormMethod | None = None
) -> UnitClipper:
    """Attach a clipper to a model.

    Args:
        gradients: "ghost", "per_unit", or "auto": the first if every module has a rule, as far as this shows without a
            pass.
        model: the module that computes the losses.
        clipping: of the plan.
        norm_method: for "ghost": how norms are computed.

    Raises:
        GhostError: the model cannot be clipped exactly in this way.
        ConfigError: another word.
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
        gradients: the word of the recipe.
        model: the module that computes the losses, on its engine.
        rows: rows of the run.
        loss_of: called with the model and the inputs of rows that are made up. None: no pass is tried.
        processes: of the run.
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
        return None  # a loss over the rows of a batch would mean something else; refused when private rows show it
    except NoRuleError as error:
        return str(error).removesuffix(NoRuleError.REMEDY).strip()
    except UnreachedError as error:
        if loss_of is None or unused(model, rows, loss_of):
            raise
        return f"Some rows use other parameters than others. {error}"
    except Exception:  # the trial says nothing: rows of this form cannot be made up, or the model does not take them
        return None
    return None


def _cost(model: nn.Module, rows: TrainingRows, loss_of: LossOf | None) -> str:
    """Return the cost of one unit at a time, measured on rows that are made up, in words; empty if it is not known."""
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
    except Exception:  # as in the trial: the model does not take rows of this form
        return ""
    return (
        f", in {ratio:.1f} times the time that {_TIMED} rows of at most {_TOKENS} tokens take together without privacy"
    )


def in_words(clipper: UnitClipper) -> str:
    """Return the method of a clipper, as the report names it."""
    return PER_UNIT if clipper.one_unit else GHOST


def rows_of_calls(rows: TrainingRows, clipper: UnitClipper) -> TrainingRows:
    """Return the rows; if each unit has one row, and each call of the model one unit, with one row for each call.

    Rows that never share a call cannot depend on each other within it; only state that is carried from call to call is
    left to be measured.
    """
    return replace(rows, max_rows=1) if clipper.one_unit and rows.units.max_rows == 1 else rows
