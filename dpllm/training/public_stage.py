"""Train on public text, without privacy, before the private training.

`dpllm.training.finetune` uses it, and so does a rehearsal on public text (`dpllm.planning.rehearsal`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, Trainer, TrainerCallback

from dpllm.config import ModelConfig, Recipe
from dpllm.config.files import sync_files
from dpllm.data.rows import RowCollator, tokenize_records
from dpllm.models.load import load_base_model
from dpllm.training.arguments import training_arguments
from dpllm.training.preflight import PLAIN


def train_on_public_text(
    recipe: Recipe,
    records: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    num_labels: int | None,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Train the recipe's model on public records and save it. Called by all processes together.

    The model is saved and loaded again, so that no hooks and shards of this training's engine remain in it.

    Args:
        recipe: recipe with a section ``public_pretrain``.
        records: public records, to be read with ``public_pretrain.data``.
        tokenizer: tokenizer of the model.
        num_labels: number of classes, if the model is a classifier.
        folder: folder to save the model in.
        changes: values that replace those of ``public_pretrain.train``. A change of ``disable_tqdm`` to true also
            removes the printed lines.
        callbacks: as for ``Trainer``.
    """
    public = recipe.public_pretrain
    assert public is not None, "the caller has a public stage"
    args = training_arguments({"output_dir": str(folder), **PLAIN, **public.train, **(changes or {})})
    whole = dataclasses.replace(recipe.model, quantization=None)  # all of it is trained here, and quantised afterwards
    model: PreTrainedModel = load_base_model(whole, tokenizer, num_labels)
    with args.main_process_first(desc="tokenizing the public text"):
        rows = tokenize_records(records, tokenizer, public.data, task=recipe.model.task)
    collator: Any = RowCollator(pad_token_id=tokenizer.pad_token_id, task=recipe.model.task)
    trainer = Trainer(
        model=model, args=args, train_dataset=rows, data_collator=collator, callbacks=list(callbacks) or None
    )
    if (changes or {}).get("disable_tqdm"):
        trainer.remove_callback(PrinterCallback)
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if args.should_save:
        trainer.accelerator.unwrap_model(trainer.model_wrapped).save_pretrained(folder, state_dict=state)
        sync_files(folder)  # every resume of the private run begins with loading them
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()


def start_in(folder: Path, model: ModelConfig) -> ModelConfig:
    """Return the recipe's model section with the model that `train_on_public_text` saved as the start."""
    return dataclasses.replace(model, name=str(folder), config=None, tokenizer_vocab_size=None)
