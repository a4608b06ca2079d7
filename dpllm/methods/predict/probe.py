"""The probe of private prediction for the audit: a unit whose logits are as extreme as logits can be.

Place in the flow: beside the run. The charge, the division into groups, clipping, averaging and the exact draw are
those of the command. The logits are made up, over a vocabulary of two tokens that are equally likely without the
canary: with more tokens, or others, it moves the draws less.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dpllm.data.units import Int64Array
from dpllm.methods.predict.run import (
    AROUND_PUBLIC,
    CHARGE,
    CLIP,
    GROUP_SIZE,
    QUANTITY,
    TEMPERATURE,
    TEXTS_OF_GROUP,
    TOKENS,
    TokenPlan,
    charged_texts,
)
from dpllm.methods.predict.sampler import Scoring, drawn_tokens
from dpllm.methods.queries.probe import Probe, made_units
from dpllm.methods.queries.run import QueryRun
from dpllm.privacy.query_plan import QueryPlan

_GROUPS = 2
_EXTREME = 1e4  # a logit far above any clip
_CANARY = 0  # number of the unit, whose rows come first
_STOP = (1,) * 3
"""A text that begins with these tokens ends after them, so that the lengths of texts differ."""


class _Known:
    """Rows with the same logits for every token."""

    def __init__(self, logits_RV: Tensor) -> None:
        self._logits_RV = logits_RV

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows at once."""
        yield slice(0, len(self._logits_RV)), self._logits_RV

    def append(self, token: int) -> None:
        """Do nothing: the logits do not depend on tokens."""


def token_probe(plan: QueryPlan) -> Probe:
    """Return the probe of a plan of `dpllm.methods.predict.run`.

    The score is the number of tokens that the canary makes likelier, less that of the others, in the texts of groups
    that it is in. Texts of the other groups do not depend on it, and are not drawn.

    Args:
        plan: of a private prediction.
    """
    settings = dict(plan.settings)
    scoring = Scoring(
        clip=float(settings[CLIP]),
        units=int(settings[GROUP_SIZE]),
        temperature=float(settings[TEMPERATURE]),
        around_public=settings[QUANTITY] == AROUND_PUBLIC,
    )
    per_group = int(settings[TEXTS_OF_GROUP])
    tokens = TokenPlan(scoring, _GROUPS, per_group, int(settings[TOKENS]))
    charge = plan.charge(CHARGE)
    if (charge.event, charge.count) != (tokens.event, tokens.tokens):
        raise ValueError("the settings of this plan are not those that it charges: make it with plan_prediction")
    index = made_units(plan, _GROUPS * scoring.units - 1, canary=True)
    public_V = torch.zeros(2)

    def answer(run: QueryRun, there: bool) -> float:
        def made(_: int, group: Int64Array) -> list[int]:
            if _CANARY not in group:
                return []
            held = group if there else group[group != _CANARY]
            unit_R = index.rows_of(held)[1]
            rows_of_unit = np.bincount(unit_R, minlength=len(held))[unit_R].tolist()
            canary_R = torch.from_numpy(held[unit_R] == _CANARY)
            extreme_V = torch.tensor([_EXTREME, -_EXTREME])
            logits_RV = torch.where(canary_R[:, None], extreme_V, public_V)
            rows, public = _Known(logits_RV), _Known(public_V[None])
            return drawn_tokens(
                scoring, rows, public, rows_of_unit, tokens.max_new_tokens, stopped=lambda found: tuple(found) == _STOP
            )

        texts = charged_texts(run, tokens, index.num_units, _GROUPS * per_group, made)
        return float(sum(1 - 2 * token for text in texts for token in text))

    return Probe("a unit with logits beyond every clip", answer)
