"""Ordinary training without privacy, of a teacher or of the student, and the classes that a model names.

Place in the flow: between the partition and the vote, and again after it. A teacher's training may do anything with the
teacher's own units; nothing of it is written or shown but the class that it names for each public text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer
from transformers.trainer_utils import set_seed
from transformers.utils import logging

from dpllm.data.rows import RowCollator
from dpllm.data.units import Int64Array
from dpllm.models.load import StartingValues
from dpllm.training.arguments import training_arguments

_ROWS = 64  # of a forward pass
_SEED_BITS = 32
QUIET = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "log_level": "error",  # the number of a teacher's rows would be logged, also with TRANSFORMERS_VERBOSITY=info
}
"""Options with which a training writes and shows nothing of its data."""
State = Mapping[str, Tensor]
"""Values of trainable parameters and buffers, by name: a teacher."""


def fresh_seed() -> int:
    """Return a seed from the operating system, so that no training's random numbers depend on another's data."""
    return secrets.randbits(_SEED_BITS)


def train_without_privacy(
    model: Any, rows: datasets.Dataset, collator: RowCollator, section: Mapping[str, Any], folder: Path
) -> Any:
    """Train the trainable parameters of a model on rows, without privacy, and return the model.

    Nothing is written, and nothing is shown. Random numbers come from a fresh seed.

    Args:
        model: on any device; it is trained in place.
        rows: tokenized.
        collator: of the rows.
        section: names of ``TrainingArguments``, without those of `QUIET`.
        folder: that ``TrainingArguments`` asks for.
    """
    seed = fresh_seed()
    fixed = {**QUIET, "output_dir": str(folder), "seed": seed, "data_seed": seed}
    args = training_arguments({"dataloader_pin_memory": torch.accelerator.is_available(), **section, **fixed})
    verbosity = logging.get_verbosity()
    try:
        trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collator)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    finally:
        logging.set_verbosity(verbosity)
    accelerator = trainer.accelerator
    trained = accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
    accelerator.free_memory()
    return trained


class OneBase:
    """One model in memory, whose trainable part starts again for every teacher.

    Guarantee: a training starts from the same values of every parameter and buffer that can change, and of what modules
    keep beside them (the longest row so far, a number of hash buckets), whatever was trained before.

    Args:
        model: with its adapters and frozen parameters, at its start.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy the values that a training may change: trainable parameters and buffers."""
        self.model = model
        changing = [*((name, p) for name, p in model.named_parameters() if p.requires_grad), *model.named_buffers()]
        self._start = {name: tensor.detach().clone().cpu() for name, tensor in changing}
        self._attributes = StartingValues(model)

    def begin(self) -> Any:
        """Return the model as it was at its start; its random numbers come from a fresh seed."""
        set_seed(fresh_seed())
        self._attributes.restore()
        return self.put()

    def state(self) -> State:
        """Return a copy of the present values of all that a training may change, on the model's device."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors() if name in self._start}

    @torch.no_grad()
    def put(self, state: State | None = None) -> Any:
        """Return the model with other values of all that a training may change.

        Args:
            state: as `state` returned it; None: that of the start.
        """
        values = self._start if state is None else state
        for name, tensor in self._tensors():
            if name in self._start:
                tensor.copy_(values[name])
        return self.model

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


@torch.no_grad()
def classes_of(model: Any, rows: datasets.Dataset, collator: RowCollator) -> Int64Array:
    """Return (N,) the class with the highest score of each row: a whole number, also where scores are not finite.

    Args:
        model: a classifier, on its device.
        rows: tokenized; their labels are not read.
        collator: of the rows.
    """
    lengths: Sequence[int] = [len(ids) for ids in rows["input_ids"]]
    order = np.argsort(lengths, kind="stable")
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    classes_N = np.empty(len(rows), dtype=np.int64)
    for start in range(0, len(rows), _ROWS):
        numbers = order[start : start + _ROWS]
        batch = collator(list(rows.select(numbers)))
        batch.pop("labels")
        logits_BC = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits.float()
        classes_N[numbers] = logits_BC.nan_to_num(nan=-torch.inf).argmax(dim=1).cpu().numpy()
    model.train(was_training)
    return classes_N
