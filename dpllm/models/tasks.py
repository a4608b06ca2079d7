"""The task of a model by its class, and the loss per row that fits the task.

Place in the flow: asked by `dpllm.training.trainer` before any data are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from dpllm.config import ConfigError
from dpllm.models.losses import classification_loss, per_sequence_loss, seq2seq_loss

RowLoss = Callable[[Any, Tensor], Tensor]
"""Function from model outputs and labels to one loss per row (B,), each computed only from its own row."""


def task_of(model: Any) -> str | None:
    """Return the task of `dpllm.config.ModelConfig` of the model's class, None for any other class."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = type(inner).__name__
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "causal_lm"
    if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        return "seq2seq_lm"
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values() and inner.config.num_labels > 1:
        return "sequence_classification"
    return None


_ROW_LOSSES = {
    "causal_lm": per_sequence_loss,
    "seq2seq_lm": seq2seq_loss,
    "sequence_classification": classification_loss,
}


def default_row_loss(model: nn.Module) -> RowLoss:
    """Return the loss per row that fits the model's task.

    Raises:
        ConfigError: the task has no default loss; pass ``compute_loss_func``.
    """
    task = task_of(model)
    if task is None:
        raise ConfigError(
            f"There is no default loss per row for {type(model).__name__}. Pass compute_loss_func=(outputs, labels) "
            f"-> (B,), each row's loss "
            "from that row only."
        )
    loss = _ROW_LOSSES[task]
    if task != "sequence_classification" and getattr(
        getattr(model, "active_peft_config", None), "is_prompt_learning", False
    ):  # a soft prompt's tokens come first in the logits, and have no labels
        return lambda outputs, labels: loss(outputs.logits[:, -labels.shape[1] :], labels)
    return lambda outputs, labels: loss(outputs.logits, labels)
