"""Find the task of a model by its class, and the row loss that fits the task.

`dpllm.training.trainer` uses it before any data are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from dpllm.config import TASKS, ConfigError
from dpllm.models.losses import (
    classification_loss,
    multi_label_loss,
    per_sequence_loss,
    regression_loss,
    seq2seq_loss,
    span_loss,
    token_classification_loss,
)

_LIBRARIES = {
    *("abc", "builtins", "typing", "contextlib", "torch", "transformers", "peft", "accelerate", "dpllm"),
    *("bitsandbytes", "torchao", "gptqmodel", "awq", "hqq", "trl"),
}
"""Packages whose modules a transformers model may contain."""
RowLoss = Callable[[Any, Tensor], Tensor]
"""Function from model outputs and labels to one loss per row (B,), each computed only from its own row."""

_NAMES = {
    task: frozenset(
        name
        for value in getattr(modeling_auto, f"MODEL_FOR_{about.mapping}_MAPPING_NAMES").values()
        for name in ([value] if isinstance(value, str) else value)
    )
    for task, about in TASKS.items()
}

# Models that write text about images or sound; their rows have tokens or labels like a language model's.
_WRITERS = frozenset(
    name
    for mapping in ("IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")
    for name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values()
)


def task_of(model: Any) -> str | None:
    """Return the task of `dpllm.config.TASKS` of the model's class, None for any other class.

    A head for sequences serves several tasks: ``config.problem_type`` decides, and without it the number of labels.
    A model that writes text about images or sound has the task of its decoder.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return task_of_class(type(inner).__name__, getattr(inner, "config", None))


def task_of_class(name: str, config: Any) -> str | None:
    """Return the task of a class with this name and configuration; None for a class without a task."""
    found = [task for task, names in _NAMES.items() if name in names]
    if not found:  # a class in the model's own folder, which names the corresponding class of transformers
        own = {str(code).rpartition(".")[2]: auto for auto, code in (getattr(config, "auto_map", None) or {}).items()}
        found = [task for task, about in TASKS.items() if about.auto_class == own.get(name)]
    if len(found) > 1:
        one_value = getattr(config, "num_labels", 2) == 1
        problem = getattr(config, "problem_type", None) or ("regression" if one_value else None)
        found = [task for task in found if TASKS[task].problem_type == problem] or found
    if not found and name in _WRITERS:
        found = ["seq2seq_lm" if getattr(config, "is_encoder_decoder", False) else "causal_lm"]
    return found[0] if found else None


def is_of_transformers(model: Any) -> bool:
    """Return whether a model and its parts come from known libraries; otherwise loading it needs further code."""
    kind = getattr(transformers, type(model).__name__.removeprefix("FSDP"), None)  # FSDP2 makes its own class
    if not isinstance(kind, type) or not issubclass(type(model), kind):
        return False
    bases = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
    return all(base.__module__.partition(".")[0] in _LIBRARIES for base in bases)


def loading_class(model: Any) -> str:
    """Return the name of the transformers class that loads a model: that of its task, or its own.

    The class of a task may load a different class for this configuration, or none: for instance a decoder of sounds.
    """
    own, task = type(model).__name__.removeprefix("FSDP"), task_of(model)
    if task is None:
        return own
    mapping = getattr(transformers, f"MODEL_FOR_{TASKS[task].mapping}_MAPPING")
    kinds = mapping.get(type(model.config), None)
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return TASKS[task].auto_class if own in (getattr(kind, "__name__", None) for kind in kinds) else own


_IN_WORDS = {
    "causal_lm": "a language model",
    "seq2seq_lm": "a sequence-to-sequence language model",
    "sequence_classification": "a text classifier",
    "multi_label_classification": "a text classifier",
    "regression": "a model that rates texts",
    "token_classification": "a model that labels words",
    "question_answering": "a model that finds answers in texts",
}


def trained_words(model: Any) -> str:
    """Return a description of a model and its trained weights for the report."""
    config = getattr(model, "active_peft_config", None)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = getattr(getattr(inner, "config", None), "model_type", None) or type(inner).__name__
    words = f"{_IN_WORDS.get(task_of(model) or '', 'a model')} ({kind})"
    if config is not None:
        name = str(getattr(config.peft_type, "value", config.peft_type)).replace("_", " ").lower()
        return f"an adapter ({'LoRA' if name == 'lora' else name}) for {words}"
    whole = all(parameter.requires_grad for parameter in model.parameters())
    return words if whole else f"a part of {words}"


_ROW_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal_lm": per_sequence_loss,
    "seq2seq_lm": seq2seq_loss,
    "sequence_classification": classification_loss,
    "multi_label_classification": multi_label_loss,
    "regression": regression_loss,
    "token_classification": token_classification_loss,
}


def default_row_loss(model: nn.Module) -> RowLoss:
    """Return the row loss that fits the model's task.

    Raises:
        ConfigError: the task has no default loss; pass ``compute_loss_func``.
    """
    task = task_of(model)
    if task is None:
        raise ConfigError(
            f"There is no default loss per row for {type(model).__name__}. Pass compute_loss_func=(outputs, labels) "
            f"-> (B,), which computes each row's loss "
            "from that row only."
        )
    return row_loss_of(task, bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)))


def row_loss_of(task: str, has_prompt: bool = False) -> RowLoss:
    """Return the row loss of a task.

    Args:
        task: one of `dpllm.config.TASKS`.
        has_prompt: whether the model prepends the tokens of a soft prompt, which have no labels, to those of a row.
    """
    if TASKS[task].labels == "span":

        def of_spans(outputs: Any, labels: Tensor) -> Tensor:
            own = slice(-labels.shape[1], None) if has_prompt else slice(None)
            return span_loss(outputs.start_logits[:, own], outputs.end_logits[:, own], labels)

        return of_spans
    loss = _ROW_LOSSES[task]
    if has_prompt and TASKS[task].labels in ("text", "tokens"):
        return lambda outputs, labels: loss(outputs.logits[:, -labels.shape[1] :], labels)
    return lambda outputs, labels: loss(outputs.logits, labels)
