"""Load the public text of a rehearsal: check that it is not the private data, make its rows, and load the start.

`dpllm.planning.rehearsal` trains on it. If the recipe has a public stage, the stage comes first, as before
the private run. If the rehearsal has only the text of the stage, one half trains the stage and the other half
is used for the rehearsal, since rows on which the model was already trained would favour small rates.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import TrainerCallback

from dpllm.config import DataConfig, HeldOut, Recipe
from dpllm.data.records import DataError, load_records, load_train_and_eval, shared_source
from dpllm.data.rows import RowCollator, num_labels_of, tokenize_records
from dpllm.data.shared_records import shared_records
from dpllm.data.tokenization import RECORD
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model
from dpllm.training.finetune import start_in, train_on_public_text
from dpllm.training.weight_size import WeightSize, size_of_parameters

QUIET = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "push_to_hub": False,
}
"""Options of trainings whose results are compared and whose files are deleted."""
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.1, 500
_SHUFFLE = 20240229  # a public constant


@dataclass(frozen=True)
class Material:
    """The public rows and the start of all trainings.

    Attributes:
        base: the model without adapters; it is copied for each training.
        tokenizer: its tokenizer.
        rows: rows to train on; each is a unit.
        held_out: rows to measure.
        collator: makes tensors from rows.
        source: name of the text.
        size: the size of the trained weights.
    """

    base: Any
    tokenizer: Any
    rows: datasets.Dataset
    held_out: datasets.Dataset
    collator: RowCollator
    source: str
    size: WeightSize


def public_section(recipe: Recipe, path: str | None) -> DataConfig:
    """Return the section with which a rehearsal reads public text.

    Args:
        recipe: its public stage is used if ``path`` is None.
        path: path of public text in the form of the private records; a .txt file has one text in each line.

    Raises:
        DataError: there is no public text; or it, or the text of the public stage, is a source of the private records.
            No file is opened for this.
    """
    if path is None and recipe.public_pretrain is None:
        raise DataError(
            "a rehearsal needs public text, and the recipe has no public_pretrain section: add --public FILE"
        )
    if path is None:
        assert recipe.public_pretrain is not None
        section = _stage_section(recipe, recipe.public_pretrain.data)
    else:
        own: dict[str, Any] = {"eval": HeldOut()}
        if path.endswith(".txt"):
            own |= {"format": "text", "columns": {"text": "text"}}
        section = dataclasses.replace(recipe.data, **own, path=path, name=None, split="train", limit=None)
    for text in _sections(recipe, section):
        same = shared_source(recipe.data, text)
        if same is not None:
            raise DataError(
                f"the public text of a rehearsal, {text.path}, is a source of the private records ({same}). A "
                "rehearsal spends no ε, so it may use none of them: give public text in separate files"
            )
    return section


def _sections(recipe: Recipe, section: DataConfig) -> list[DataConfig]:
    """Return all sections whose text a rehearsal trains on; the public stage's comes first."""
    stage = recipe.public_pretrain
    return [section] if stage is None or section == _stage_section(recipe, stage.data) else [stage.data, section]


def _stage_section(recipe: Recipe, data: DataConfig) -> DataConfig:
    """Return the section with which a rehearsal reads the text of the public stage."""
    return dataclasses.replace(data, eval=HeldOut(), max_length=recipe.data.max_length)


def refuse_private_records(recipe: Recipe, section: DataConfig, records: Sequence[Any]) -> None:
    """Check that the public text of a rehearsal, and that of the public stage, contain no private records.

    Args:
        recipe: its data section reads the private records.
        section: reads the text to rehearse on.
        records: private records, and held-out ones unless they are public.

    Raises:
        DataError: it contains some. The message omits their number, which depends on the private records.
    """
    stage = recipe.public_pretrain
    for text in _sections(recipe, section):
        of_stage = stage is not None and stage.data.path == text.path
        allowed = stage.max_shared_records if stage is not None and of_stage else 0
        public = load_records(text)
        if sum(shared_records(private, recipe.data, public, text) for private in records) > allowed:
            name = "public_pretrain.data.path=" if of_stage else ""
            remedy = "" if of_stage else ", or give other public text (--public)"
            raise DataError(
                f"the public text of a rehearsal, {name}{text.path}, contains private records of "
                f"data.path={recipe.data.path} ({allowed} are declared): remove them from the public text{remedy}"
            )


def load_material(recipe: Recipe, section: DataConfig, folder: Path, callbacks: Sequence[TrainerCallback]) -> Material:
    """Read the public text, run the recipe's public stage, and hold out rows to measure.

    Args:
        recipe: its private data are not read.
        section: made by `public_section`.
        folder: empty folder for the model after the public stage, to be deleted by the caller.
        callbacks: callbacks of the public stage.

    Raises:
        ConfigError, DataError: the text or the model cannot be loaded, or there are too few records.
    """
    records, held_out = load_train_and_eval(dataclasses.replace(section, eval=HeldOut(share=_HELD_OUT_SHARE)))
    assert held_out is not None, "a share is held out"
    stage, staged = recipe.public_pretrain, None
    texts = None
    if stage is not None:
        all_staged = load_records(stage.data)
        texts = all_staged[stage.data.column("text")] if recipe.model.tokenizer_vocab_size else None
        if section.path == stage.data.path:
            if len(records) < 2:
                raise DataError(f"{section.path} has too few records for a public stage and a rehearsal: use --public")
            order = np.random.default_rng(_SHUFFLE).permutation(len(records))
            half = len(records) // 2
            staged, records = records.select(np.sort(order[:half])), records.select(np.sort(order[half:]))
        else:
            staged = all_staged
    tokenizer = load_tokenizer(recipe.model, texts)
    task, num_labels, start = recipe.model.task, num_labels_of(records, section), recipe.model
    if staged is not None:
        train_on_public_text(recipe, staged, tokenizer, num_labels, folder, QUIET, callbacks)
        start = start_in(folder, recipe.model)
    base = load_base_model(start, tokenizer, num_labels)
    num_labels = base.config.num_labels

    def rows_of(part: datasets.Dataset) -> datasets.Dataset:
        rows = tokenize_records(part, tokenizer, section, (), task, num_labels)
        return rows.remove_columns(RECORD) if RECORD in rows.column_names else rows  # each row is a unit

    measured = rows_of(held_out)
    trained = prepare_model(copy.deepcopy(base), recipe.model).parameters()
    return Material(
        base=base,
        tokenizer=tokenizer,
        rows=rows_of(records),
        held_out=measured.select(range(min(len(measured), _MOST_HELD_OUT))),
        collator=RowCollator(pad_token_id=tokenizer.pad_token_id, task=task),
        source=section.path,
        size=size_of_parameters(trained, "of the trained weights at the start of the rehearsal"),
    )
