"""The choice of how units' gradients are computed: all units of a microbatch in one pass, or one unit at a time.

Place in the flow: `dpllm.training.attached` makes the clipper of a run here, and the Trainer and `dpllm plan` check
with it that the model can be clipped. Both ways give the same clipped sum up to rounding, so ε does not depend on the
choice.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from dpllm.config.privacy_section import GRADIENTS
from dpllm.config.values import choice
from dpllm.ghost import GhostClipper, NormMethod, PerUnitClipper, UnitClipper
from dpllm.mechanism.parts import Clipping
from dpllm.training.rows import TrainingRows

METHOD = "gradients of units"
"""The ledger's fact of that name."""
GHOST = "norms and the clipped sum of all units of a microbatch in one backward pass"
PER_UNIT = "one unit at a time by plain autograd"


def clipper_for(
    gradients: str, model: nn.Module, clipping: Clipping, norm_method: NormMethod | None = None
) -> UnitClipper:
    """Attach a clipper to a model.

    Args:
        gradients: "ghost" or "per_unit".
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
    return GhostClipper(model, norm_method=norm_method, clipping=clipping)


def in_words(clipper: UnitClipper) -> str:
    """Return the method of a clipper, as the report names it."""
    return PER_UNIT if clipper.one_unit else GHOST


def rows_of_calls(rows: TrainingRows, clipper: UnitClipper) -> TrainingRows:
    """Return the rows; if each unit has one row, and each call of the model one unit, with one row for each call.

    Rows that never share a call cannot depend on each other within it; only state that is carried from call to call is
    left to be measured.
    """
    return replace(rows, max_rows=1) if clipper.one_unit and rows.units.max_rows == 1 else rows
