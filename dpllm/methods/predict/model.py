"""Checks of a public model before private prediction: rows do not depend on each other, and memory suffices.

Place in the flow: after the model is loaded, and before anything is charged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpllm.config import ConfigError
from dpllm.ghost.model_calls import tokens_by_themselves
from dpllm.ghost.refusals import coupling
from dpllm.models.writing import Continuation

_RELATIVE = 1e-3
"""The largest difference of a row's logits by other rows, relative to its largest logit."""


def require_independent_rows(model: Any, length: int, rows_per_pass: int, new_tokens: int) -> None:
    """Measure with public tokens that a row's logits depend neither on other rows nor on the cache.

    Position embeddings that couple from some number of tokens on are refused by name.

    Args:
        model: as for `Continuation`.
        length: of the rows.
        rows_per_pass: rows of a forward pass.
        new_tokens: the most tokens that are appended to a row.

    Raises:
        ConfigError: they do: the bound of one unit's contribution would not hold.
    """
    for name, module in model.named_modules():
        if reason := coupling(module):
            raise ConfigError(f"{name}: {reason}")
    most = tokens_by_themselves(model)
    if most is not None and length + new_tokens > most:
        raise ConfigError(
            f"records, prompt and answer are up to {length + new_tokens:,} tokens together: beyond {most:,} this "
            "model chooses its position embeddings by the longest row of a pass (dynamic or longrope), so a unit would "
            f"change the scores of others. Keep to {most:,} tokens: lower data.max_length, the size of a group, or "
            "max_new_tokens"
        )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    long = [(7 * place + 3) % vocabulary for place in range(length)]
    short = [(11 * place + 5) % vocabulary for place in range(max(1, length // 2))]
    count = max(2, min(rows_per_pass, 4))
    for row, other, cached in ((long, short, False), (short, long, False), (long, long, True)):
        wanted = _two_tokens(Continuation(model, [row] * count, length, count, cached=False))
        found = _two_tokens(Continuation(model, [row, *[other] * (count - 1)], length, count, cached=cached))
        apart = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        if not apart <= _RELATIVE:
            what = "on the cache of keys and values" if cached else "on the other rows of a pass"
            raise ConfigError(
                f"the logits of a row depend {what}, by {apart:.2g} of the largest logit: a unit would change the "
                "scores of others, and no ε would hold. Take a model of another architecture"
            )


def _two_tokens(rows: Continuation) -> Tensor:
    """Return (2, V): the first row's logits of the next token, and after a public token of the one after it."""
    found = []
    for _ in range(2):
        found.append(next(rows.logits())[1][0].float())
        rows.append(1)
    return torch.stack(found)


def require_memory(model: Any, length: int, rows: int, rows_per_pass: int, cached: bool) -> None:
    """Run one pass of public tokens with the sizes of a group at its longest.

    Args:
        model: as for `Continuation`.
        length: of the rows, with all new tokens.
        rows: of one group.
        rows_per_pass: rows of a forward pass.
        cached: as for `Continuation`.

    Raises:
        ConfigError: they do not fit into memory.
    """
    try:
        for _ in Continuation(model, [[1] * length] * rows, length, rows_per_pass, cached).logits():
            pass
    except torch.OutOfMemoryError as error:
        remedy = "set predict.cached=false" if cached else "take a smaller model, or a GPU with more memory"
        raise ConfigError(
            f"{rows:,} rows of {length:,} tokens do not fit into memory, {rows_per_pass} in a pass: lower "
            f"predict.rows_per_pass, or {remedy}"
        ) from error
