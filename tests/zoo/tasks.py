"""The tasks of the zoo: their classes, the rows of each, and one loss per row.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from dpllm import config as recipes
from dpllm.data.labels import END, IGNORE, START
from dpllm.models.losses import token_classification_loss
from dpllm.models.tasks import row_loss_of
from dpllm.training.row_losses import RowLosses

from .toy import FIRST_WORD, LAST_WORD, NUM_LABELS

LENGTHS = (8, 5, 7)
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        title: in the table.
        mapping: the part of the name of transformers' mapping of classes, such as "CAUSAL_LM".
        loss: model outputs and labels to one loss per row, (B,).
        peft: the task's name in PEFT; None if it has none.
    """

    title: str
    mapping: str
    loss: Callable[[Any, Tensor], Tensor]
    peft: str | None

    @classmethod
    def of_recipes(cls, name: str, title: str) -> Task:
        """Return one of `dpllm.config.TASKS`."""
        about = recipes.TASKS[name]
        return cls(title, about.mapping, row_loss_of(name), about.peft)

    def classes(self) -> list[str]:
        """Return the names of the classes that transformers has for this task, each once, in alphabetical order."""
        mapping: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{self.mapping}_MAPPING_NAMES")
        names = {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}
        return sorted(names)

    def model_class(self, name: str) -> Any:
        """Return the class of this name."""
        return getattr(transformers, name)


TASKS: dict[str, Task] = {
    "causal_lm": Task.of_recipes("causal_lm", "Causal language models"),
    "seq2seq_lm": Task.of_recipes("seq2seq_lm", "Sequence to sequence"),
    "masked_lm": Task("Masked language models", "MASKED_LM", lambda o, y: token_classification_loss(o.logits, y), None),
    "sequence_classification": Task.of_recipes("sequence_classification", "Sequence classification"),
    "token_classification": Task.of_recipes("token_classification", "Token classification"),
    "question_answering": Task.of_recipes("question_answering", "Question answering"),
}


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the labels are the decoder's; a language model that hears speech continues its own input."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def losses(model: Any, task: str, batch: Batch) -> Tensor:
    """Return one loss per row, (B,), as a run computes it."""
    rule = "causal_lm" if task == "seq2seq_lm" and not is_encoder_decoder(model) else task
    return RowLosses(TASKS[rule].loss, packed=False)(model, batch)


def rows_of(task: str, model: nn.Module) -> list[Batch]:
    """Return single rows (1, T) of different lengths, without padding, with what this model takes."""
    generator = torch.Generator().manual_seed(1)
    text: Any = model.config.get_text_config()
    end = getattr(text, "eos_token_id", None)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(FIRST_WORD, LAST_WORD + 1, (1, length), generator=generator)
        if isinstance(end, int) and task in ("sequence_classification", "seq2seq_lm"):
            ids[:, -1] = end  # Bart classifies at the end of the text
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_more(model, ids)}
        rows.append({**row, **_targets(task, model, ids, generator)})
    return rows


def _targets(task: str, model: nn.Module, ids: Tensor, generator: torch.Generator) -> Batch:
    length = ids.shape[1]
    if task == "causal_lm" or (task == "seq2seq_lm" and not is_encoder_decoder(model)):
        return {"labels": ids}
    if task == "seq2seq_lm":
        return {"labels": torch.randint(FIRST_WORD, LAST_WORD + 1, (1, length - 2), generator=generator)}
    if task == "masked_lm":
        labels = torch.full_like(ids, IGNORE)
        labels[:, 1::2] = ids[:, 1::2]
        return {"labels": labels}
    if task == "sequence_classification":
        return {"labels": torch.randint(0, NUM_LABELS, (1,), generator=generator)}
    if task == "token_classification":
        return {"labels": torch.randint(0, NUM_LABELS, (1, length), generator=generator)}
    labels = torch.zeros_like(ids)
    labels[0, 1], labels[0, length // 2] = START, END
    return {"labels": labels}


def _more(model: nn.Module, ids: Tensor) -> Batch:
    """Return the other inputs without which a class cannot be called."""
    takes = inspect.signature(model.forward).parameters
    more: Batch = {}
    kind = type(model).__name__
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in takes and kind.startswith(("Gemma", "T5Gemma2")):
            more[name] = torch.zeros_like(ids)
    if kind.startswith("Bros"):
        more["bbox"] = torch.zeros(*ids.shape, 8)
    return more


PADDING: dict[str, int] = {"labels": IGNORE, "attention_mask": 0}


def collate(rows: list[Batch], pad: int) -> Batch:
    """Put rows into one batch, short ones padded at the end."""
    batch: Batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if values[0].ndim > 1 and len({value.shape[1] for value in values}) > 1:
            longest = max(value.shape[1] for value in values)
            fill = PADDING.get(name, pad if name.endswith("input_ids") else 0)
            values = [_padded(value, longest, fill) for value in values]
        batch[name] = torch.cat(values)
    return batch


def _padded(value: Tensor, longest: int, fill: int) -> Tensor:
    room = value.new_full((1, longest - value.shape[1], *value.shape[2:]), fill)
    return torch.cat([value, room], dim=1)
