"""Make the model read its inputs as the collator made them: one padding token for both, and rows that fit.

A classifier finds the end of a row by ``config.pad_token_id``. If the collator pads with another token, it reads the
padding instead, whose length depends on other rows. A row with more tokens than the model's table of learned positions
would cause an index error within a step that was already charged.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import nn

from dpllm.config import ConfigError
from dpllm.data.lengths import TOKENS, input_of
from dpllm.data.rows import RowCollator
from dpllm.data.single_rows import RowByRow
from dpllm.models.tasks import task_of


def default_collator(tokenizer: Any, model: Any, task: str | None) -> RowCollator:
    """Pad to the longest row with the tokenizer's padding token, the model's, or the end-of-text token.

    Args:
        tokenizer: the tokenizer, or None.
        model: a transformers model, PEFT-wrapped or not, or any module.
        task: as in `dpllm.config.ModelConfig`; None is treated as "causal_lm".
    """
    pad, end = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    known = next((token for token in (pad, model_pad_id(model), end) if token is not None), 0)
    return RowCollator(pad_token_id=known, task=task or "causal_lm")


def row_by_row(collate: Any, tokenizer: Any, model: Any, columns: frozenset[str] | None = None) -> RowByRow:
    """Return a collator that makes rows one at a time, and pads with its own token, the tokenizer's or the model's.

    Args:
        collate: collator of several rows; its own tokenizer determines the padding side.
        tokenizer: the tokenizer, or None.
        model: a transformers model, PEFT-wrapped or not, or any module.
        columns: as for `RowByRow`.
    """
    own = RowByRow(collate, columns=columns, predicts_next=task_of(model) == "causal_lm")
    known = default_collator(tokenizer, model, None).pad_token_id
    return replace(own, pad_token_id=known) if own.pad_token_id is None else own


def model_pad_id(model: Any) -> int | None:
    """Return the padding token of a model's configuration; None if it has none.

    >>> model_pad_id(object()) is None
    True
    """
    config = _text_config(model)
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) else None


def refuse_other_padding(model: Any, tokenizer: Any, collator: Any) -> None:
    """Check that the collator pads with the model's padding token.

    A tokenizer passed to the ``Trainer`` sets the model's token when training begins.

    Raises:
        ConfigError: both are known, and differ.
    """
    if tokenizer is not None and getattr(tokenizer, "pad_token_id", None) is not None:
        expected, where = tokenizer.pad_token_id, "processing_class.pad_token_id"
    else:
        expected, where = model_pad_id(model), "model.config.pad_token_id"
    used = getattr(collator, "pad_token_id", None)
    if used is None:
        used = getattr(getattr(collator, "tokenizer", None), "pad_token_id", None)
    if isinstance(used, int) and isinstance(expected, int) and used != expected:
        raise ConfigError(
            f"data_collator pads with the token {used}, but {where} is {expected}: the model would treat padding as "
            "text, and a row's loss would depend on the length of the other rows. Make the collator with "
            f"pad_token_id={expected}, or set model.config.pad_token_id={used}"
            + (" and the tokenizer's" if where.startswith("processing") else "")
        )


def refuse_padding_outside(pad: Any, tokens: int | None) -> None:
    """Check that the padding token has a row in the model's embedding table.

    Args:
        pad: its id; None: no row is padded.
        tokens: rows of the table. None: unknown.

    Raises:
        ConfigError: it has none, for instance because it was added to the tokenizer only.
    """
    if isinstance(pad, int) and tokens is not None and not 0 <= pad < tokens:
        raise ConfigError(
            f"the padding token {pad} is outside the model's embedding table, 0..{tokens - 1}: call "
            "model.resize_token_embeddings(len(tokenizer)) first, or pad with a token in the table "
            "(tokenizer.pad_token = tokenizer.eos_token)"
        )


def align_padding(model: Any, tokenizer: Any) -> None:
    """Set the model's padding token to the tokenizer's, with which a recipe pads its rows."""
    if tokenizer.pad_token_id is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
        _text_config(model).pad_token_id = tokenizer.pad_token_id


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


_TABLE = re.compile(r"(?:^|\.)(?:wpe|embed_positions|position_embeddings?|pos_emb|positions_embed)$")


def num_positions(model: nn.Module) -> int | None:
    """Return the largest number of tokens in a row; None if positions are computed or relative.

    A tower for images or sound counts patches or frames, not tokens.

    >>> model = nn.ModuleDict({"wpe": nn.Embedding(16, 4)})
    >>> num_positions(model)
    16
    """
    config: Any = getattr(model, "config", None)
    stated = getattr(config, "max_position_embeddings", None)
    bounds = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _TABLE.search(name) and input_of(model, name) == TOKENS:
            rows = module.num_embeddings
            if module.padding_idx is not None:  # RoBERTa counts positions from after the padding index
                rows -= module.padding_idx + 1
            bounds.append(min(rows, stated) if isinstance(stated, int) and stated > 0 else rows)
    return min(bounds, default=None)
