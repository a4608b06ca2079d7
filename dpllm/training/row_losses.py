"""Compute the losses of a microbatch's rows from the model's inputs.

`dpllm.DPTrainer` makes the object, and `dpllm.training.run.PrivateRun.step` calls it for each microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.data.labels import BOUNDARIES
from dpllm.models.inputs import attention_by_row
from dpllm.models.losses import (
    next_packed_tokens,
    next_tokens,
    packed_row_means,
    packed_sequence_loss,
    row_means,
    take_labels,
)
from dpllm.models.tasks import RowLoss, task_of
from dpllm.training.head_losses import HeadLosses


def _is_decoded(model: Any) -> bool:
    """Return whether the labels are the text that a decoder writes, not the classes of a classifier on top of it."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(is_encoder_decoder) and task_of(model) in (None, "seq2seq_lm")


class RowLosses:
    """Runs the model on a microbatch and returns one loss per row (B,), each computed only from its own row.

    Args:
        row_loss: ``(outputs, labels) -> (B,)``; not used for packed rows.
        packed: whether rows are concatenated without padding.
        head: computes the losses of a causal language model's tokens without all logits, where it can; ``row_loss`` is
            then their mean. None: the model computes all logits.
    """

    def __init__(self, row_loss: RowLoss, packed: bool, head: HeadLosses | None = None) -> None:
        """Store the loss and the layout."""
        self._row_loss, self._packed, self._head = row_loss, packed, head

    def attention(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the model's attention processes packed rows separately."""
        return attention_by_row(model) if self._packed else contextlib.nullcontext()

    def after(self, prepare: Callable[[Any], Any]) -> Callable[[Any, Mapping[str, Any]], Tensor]:
        """Return this function on inputs that are prepared first, for instance moved to the model's device."""

        def after(model: Any, inputs: Mapping[str, Any]) -> Tensor:
            tensors = {n: torch.from_numpy(one) if isinstance(one, np.ndarray) else one for n, one in inputs.items()}
            return self(model, prepare(tensors))

        after.__wrapped__ = self._row_loss  # type: ignore[attr-defined]  # for checks of the user's function
        return after

    def __call__(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return the losses (B,) with a graph.

        Args:
            model: the model to run.
            inputs: the collator's result on the model's device, with labels.
        """
        inputs = dict(inputs)
        labels = take_labels(inputs)
        bounds = inputs[BOUNDARIES] if self._packed else None
        if self._head is not None:
            target = next_tokens(labels) if bounds is None else next_packed_tokens(labels, bounds)
            outputs, loss_BT = self._head(model, inputs, target)
            if loss_BT is not None:
                return row_means(loss_BT, target) if bounds is None else packed_row_means(loss_BT, target, bounds)
        else:
            if bounds is None and "decoder_input_ids" not in inputs and _is_decoded(model):
                shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)  # M2M100 shifts labels itself
                inputs.update({"labels": labels} if shift is None else {"decoder_input_ids": shift(labels)})
            outputs = model(**inputs)
        if bounds is not None:
            return packed_sequence_loss(outputs.logits, labels, bounds)
        return self._row_loss(outputs, labels)
