"""Make the trainer of a recipe with ``train.trainer``: its records have TRL's shapes, and ``train`` has TRL's options.

`dpllm.training.finetune` calls it instead of tokenizing and making a `dpllm.DPTrainer`. The columns that the recipe
names get the names that TRL gives them; the rest is in `dpllm.DPSFTTrainer` and `dpllm.DPDPOTrainer`.
"""

from __future__ import annotations

import json
from typing import Any

import datasets

from dpllm.config import ConfigError, DataConfig, Recipe
from dpllm.data.messages import BESIDE, OPTIONS, read_beside
from dpllm.data.rows import RowCollator
from dpllm.training.dpo_trainer import DPDPOTrainer
from dpllm.training.evaluation import HeldOut, HeldOutRows
from dpllm.training.pair_losses import HeldOutPairs, PairLosses
from dpllm.training.sft_trainer import DPSFTTrainer
from dpllm.training.trainer import DPTrainer

_TRAINERS: dict[str, type[DPTrainer]] = {"sft": DPSFTTrainer, "dpo": DPDPOTrainer}


def trainer_of(
    recipe: Recipe,
    args: Any,
    model: Any,
    tokenizer: Any,
    train_records: datasets.Dataset,
    eval_records: datasets.Dataset | None,
    **options: Any,
) -> tuple[DPTrainer, HeldOut | HeldOutPairs | None]:
    """Return the trainer of a recipe with ``train.trainer``, and its held-out records.

    Args:
        recipe: the recipe.
        args: its ``train`` section as TRL's configuration.
        model: model to train, with its adapter.
        tokenizer: tokenizer of the model.
        train_records: the private records.
        eval_records: the held-out records.
        options: other arguments of `dpllm.DPTrainer`.
    """
    args.max_length = recipe.data.max_length
    kind: Any = _TRAINERS[recipe.train["trainer"]]
    made: DPTrainer = kind(
        model=model,
        args=args,
        privacy=recipe.privacy,
        train_dataset=renamed(train_records, recipe.data, recipe.privacy.unit),
        eval_dataset=None if eval_records is None else renamed(eval_records, recipe.data, None),
        processing_class=tokenizer,
        **options,
    )
    if eval_records is None:
        return made, None
    rows: Any = made.eval_dataset
    if isinstance(made, DPDPOTrainer):
        return made, HeldOutPairs(PairLosses(made.loss), rows, made.collator)
    collator = RowCollator(pad_token_id=tokenizer.pad_token_id)
    return made, HeldOut(HeldOutRows(eval_records, rows, collator, recipe.data, tokenizer))


def renamed(records: datasets.Dataset, config: DataConfig, unit_column: str | None) -> datasets.Dataset:
    """Return the columns that a recipe names, under TRL's names, and the column of units.

    Args:
        records: the records.
        config: format and columns.
        unit_column: column of the units' ids; None: there is none.

    Raises:
        ConfigError: the column of units has a name that TRL gives to another column.
    """
    names = {own: its for own, its in config.form.trl_names.items() if own in records.column_names}
    if unit_column in names or unit_column in names.values():
        raise ConfigError(
            f"data.columns.unit={unit_column!r} is also the name of a text column ({', '.join(names)}): rename the "
            "column with the ids"
        )
    for name in (*BESIDE, "ref_chosen_logps", "ref_rejected_logps", unit_column):
        if name is not None and name in records.column_names:
            names[name] = name
    taken = records.select_columns(list(names))
    taken = taken.rename_columns({own: its for own, its in names.items() if own != its})
    if not config.chat_template_kwargs:
        return taken
    own = taken[OPTIONS] if OPTIONS in names else [None] * len(taken)
    merged = [
        json.dumps(config.chat_template_kwargs | read_beside({OPTIONS: one}, f"record {number}").get(OPTIONS, {}))
        for number, one in enumerate(own)
    ]
    return (taken.remove_columns(OPTIONS) if OPTIONS in names else taken).add_column(OPTIONS, merged)
