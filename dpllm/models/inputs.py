"""Make the model read its inputs as the collator made them: one padding token for both, and rows that fit.

A classifier finds the end of a row by ``config.pad_token_id``. If the collator pads with another token, it reads the
padding instead, whose length depends on other rows. A row with more tokens than the model's table of learned positions
would cause an index error within a step that was already charged.

**Packed rows.** `dpllm.data.rows.PackedCollator` concatenates the rows of a microbatch. Only the attention of a
transformer combines tokens. The attention registered here, under the name `ATTENTION`, reads the row boundaries from
``cu_seq_lens_q``, cuts queries, keys and values into rows, and passes them to PyTorch's scaled dot product attention as
a batch. The result equals that of ``flash_attention_2`` with the same arguments, which needs the flash-attn package and
a GPU. Both separate rows by never combining them. For its other implementations, transformers derives a mask over all N
x N pairs from ``position_ids``. Such a mask multiplies by zero, and 0 * NaN is NaN.

Shape suffixes: B rows, H heads, N tokens of all rows, T tokens of the longest row, D features of a head.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from dpllm.config import ConfigError
from dpllm.data.labels import BOUNDARIES
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


ATTENTION = "dpllm_packed"
"""The name of this attention in transformers (``attn_implementation``)."""

_BY_ROW = ("flash_attention_2", "flash_attention_3", "flash_attention_4", ATTENTION)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row, with the signature that transformers calls.

    Args:
        module: the attention layer.
        query: (1, H, N, D) of packed rows, or (B, H, T, D) of rows that are not packed.
        key: of the same shape, but with the number of heads of the keys.
        value: of the shape of the keys.
        attention_mask: (B, T), for rows that are not packed; True where a token is visible; or (B, 1, T, T), as
            PyTorch's scaled dot product attention takes it.
        dropout: dropout of the attention's weights.
        scaling: factor of the products; None: 1/sqrt(D).
        sliding_window: number of previous tokens that a token sees, including itself; None: all.
        is_causal: False is refused.
        cu_seq_lens_q: (B + 1,) starts of the packed rows, and their end; None: rows are not packed.
        max_length_q: T; None: read from ``cu_seq_lens_q``.
        kwargs: arguments for other implementations of attention.

    Returns:
        The output (1, N, H, D), or (B, T, H, D), and None for the weights.

    Raises:
        ValueError: the attention is not causal, or has sinks or a cap on its products.
    """
    needed = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if needed or not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise ValueError(
            f"{type(module).__name__} needs {needed or 'bidirectional attention'}, which {ATTENTION} does not "
            "support. Do not pack the rows of this model (microbatch.pack: false), or load it with flash_attention_2."
        )
    if cu_seq_lens_q is None:
        prepared = attention_mask is not None and attention_mask.ndim == 4
        mask = attention_mask if prepared else _mask(query, key, attention_mask, sliding_window)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)
    num_rows, longest = len(cu_seq_lens_q) - 1, max_length_q or int(cu_seq_lens_q.diff().max())
    slot_N = _slots(cu_seq_lens_q, query.shape[2], longest)
    query, key, value = (_rows(x, slot_N, num_rows, longest) for x in (query, key, value))
    mask = _mask(query, key, None, sliding_window)
    output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)
    return output.flatten(0, 1)[slot_N][None], None


def _slots(cu_seq_lens_q: Tensor, tokens: int, longest: int) -> Tensor:
    """Return (N,): the place of each token among B * T, without waiting for the device."""
    boundaries = cu_seq_lens_q.long()
    token_N = torch.arange(tokens, device=boundaries.device)
    row_N = torch.searchsorted(boundaries[1:], token_N, right=True)
    return row_N * longest + token_N - boundaries[row_N]


def _rows(x: Tensor, slot_N: Tensor, num_rows: int, longest: int) -> Tensor:
    """Return (1, H, N, D) as (B, H, T, D), with zeros after short rows: no token of a row sees later tokens."""
    x_NHD = x[0].transpose(0, 1)
    slots = x.new_zeros(num_rows * longest, *x_NHD.shape[1:]).index_copy(0, slot_N, x_NHD)
    return slots.unflatten(0, (num_rows, longest)).transpose(1, 2)


def _mask(query: Tensor, key: Tensor, seen_BT: Tensor | None, window: int | None) -> Tensor | None:
    """Return (B or 1, 1, T, S): the keys that each query sees; None for plain causal attention."""
    queries, keys = query.shape[2], key.shape[2]
    if seen_BT is None and queries == keys and (window is None or keys <= window):
        return None
    at = torch.arange(keys - queries, keys, device=query.device)[:, None]  # the positions of the queries among the keys
    other = torch.arange(keys, device=query.device)[None, :]
    visible = (other <= at) if window is None else (other <= at) & (other > at - window)
    if seen_BT is None:
        return visible[None, None]
    return (visible & seen_BT.bool()[:, None, None, -keys:]) | (other == at)  # a softmax over nothing is NaN


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, flash_attention_mask)  # it passes on only the mask for padding


def refuse_unpackable(model: nn.Module, task: str | None, collator: Any = None, loss: Any = None) -> None:
    """Check that a model accepts packed rows; the first batch checks whether it keeps them independent.

    Args:
        model: the model, PEFT-wrapped or not.
        task: the task of the training, as in `dpllm.config.ModelConfig`; None: another one.
        collator: the caller's own collator; None: the default.
        loss: the caller's own row loss; None: the default.

    Raises:
        ConfigError: the model is not a causal language model, accepts no positions or no boundaries, or has an
            attention that cannot be replaced; or a collator or a loss was made for padded rows.
    """
    inner: Any = _inside(model)
    name, taken = type(inner).__name__, inspect.signature(inner.forward).parameters
    rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    if task != "causal_lm":
        reason = f"{name} is not a causal language model, and only their rows can be concatenated"
    elif "position_ids" not in taken or not (rest or BOUNDARIES in taken):
        reason = f"{name} accepts no row boundaries: its forward has no position_ids or no {BOUNDARIES}"
    elif not isinstance(inner, PreTrainedModel) or not inner._supports_flash_attn:
        reason = f"{name} has a custom attention, which does not accept rows of different lengths"
    elif isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        reason = "a learned prompt would precede only the first row"
    elif collator is not None and not isinstance(collator, RowCollator):
        reason = "data_collator was made for padded rows; leave it out"
    elif loss is not None:
        reason = "compute_loss_func was made for padded rows; leave it out"
    else:
        return
    raise ConfigError(f"Rows cannot be packed: {reason}. Or set microbatch.pack to false")


@contextlib.contextmanager
def attention_by_row(model: nn.Module) -> Iterator[None]:
    """Make a model process each packed row separately within the block; ``flash_attention_2`` already does.

    Raises:
        ConfigError: the model's attention could not be replaced.
    """
    inner: Any = _inside(model)
    before = inner.config._attn_implementation
    if before not in _BY_ROW:
        inner.set_attn_implementation(ATTENTION)
    if inner.config._attn_implementation not in _BY_ROW:
        raise ConfigError(
            f"Rows cannot be packed: the attention of {type(inner).__name__} stays {before}. Set microbatch.pack: false"
        )
    try:
        yield
    finally:
        inner.set_attn_implementation(before)


def _inside(model: nn.Module) -> nn.Module:
    """Return the transformers model in a PEFT wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
