"""A model folder as input of the attacks: weights, tokenizer, recipe, records and, if there is one, the ledger.

Place in the flow: first of the attacks on a finished model. `load_released` reads the output of `dpllm train`
and `recipes/compare.py`; `draw_sample` draws records that were trained on and the same number that were not.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from dpllm.audit.bounds import AuditError
from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE, DataConfig, Recipe, load_recipe
from dpllm.config.recipe import refuse_trainer
from dpllm.data.messages import is_conversation, read_messages
from dpllm.data.records import required_columns
from dpllm.data.rows import RowCollator, load_train_and_eval, tokenize_records, unit_index_of
from dpllm.models.load import DTYPES, NO_CODE, load_tokenizer
from dpllm.privacy.accounting import History
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.stated import claimed_history

FEWEST_RECORDS = 20
"""Smallest number of members, and of non-members; with fewer, an attack's figures would be noise."""


@dataclass(frozen=True)
class Released:
    """A finished model with its recipe, tokenizer, plan and history."""

    folder: Path
    """Folder of the model."""
    recipe: Recipe
    """The recipe of its training."""
    model: Any
    """The model, with its adapter if it has one, in evaluation mode."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer."""
    plan: PrivacyPlan | None = None
    """The plan of a private run; None for a model that was trained without privacy."""
    history: History | None = None
    """The steps in the ledger of a private run."""

    @property
    def collator(self) -> RowCollator:
        """Pads rows for the model."""
        return RowCollator(pad_token_id=int(self.tokenizer.pad_token_id))

    def rows(self, records: datasets.Dataset) -> datasets.Dataset:
        """Tokenize records in the same way as the training."""
        return tokenize_records(records, self.tokenizer, self.recipe.data)


def load_released(folder: str | Path, device: str | torch.device | None = None) -> Released:
    """Read a model folder.

    Args:
        folder: a model in the format of transformers or peft, its tokenizer, and the recipe.yaml of its training; also
            plan and ledger if the training was private.
        device: device for the model; None: the accelerator, if there is one.

    Raises:
        AuditError: recipe, tokenizer or model is missing, or the model gives no probability to each token.
    """
    folder = Path(folder)
    if not (folder / RECIPE_FILE).is_file():
        raise AuditError(
            f"{folder} holds no {RECIPE_FILE}, so the model's training records are unknown. Give the output folder of "
            "dpllm train, or copy the recipe into this folder"
        )
    recipe = load_recipe(folder / RECIPE_FILE)
    refuse_trainer(recipe, "An attack on a released model")
    if recipe.model.task != "causal_lm":
        raise AuditError(
            f"{folder} holds a model for {recipe.model.task}. These attacks read the probability that a causal "
            "language model gives each token of a record; a classifier or an encoder-decoder needs other attacks"
        )
    if not (folder / "tokenizer_config.json").is_file():
        raise AuditError(f"{folder} holds no tokenizer (tokenizer_config.json): save the model's own beside it")
    own = dataclasses.replace(recipe.model, name=str(folder), config=None, tokenizer=None, tokenizer_vocab_size=None)
    tokenizer = load_tokenizer(own)
    model = load_causal_model(str(folder), recipe.model.dtype, tokenizer, device)
    if not (folder / LEDGER_FILE).is_file():
        return Released(folder, recipe, model, tokenizer)
    plan, contents = PrivacyPlan.load(folder / PLAN_FILE), read_ledger(folder / LEDGER_FILE)
    if plan.seeded or contents.seeded:
        raise AuditError(
            f"{folder} used a fixed seed, so nothing in it is private, and the bounds beside the attacks would be "
            "untrue: train without privacy.seed"
        )
    return Released(folder, recipe, model, tokenizer, plan, claimed_history(plan, contents))


def load_causal_model(
    name: str, dtype: str, tokenizer: PreTrainedTokenizerBase, device: str | torch.device | None = None
) -> Any:
    """Load a causal language model for evaluation.

    Args:
        name: a folder (of a model or of an adapter) or a Hub name.
        dtype: a dtype name of a recipe.
        tokenizer: tokenizer whose tokens the model must have.
        device: device for the model; None: the accelerator, if there is one.

    Raises:
        AuditError: it cannot be loaded, or has fewer tokens than the tokenizer.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=DTYPES[dtype], **NO_CODE)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise AuditError(f"the model {name} cannot be loaded: {reason}. Give a folder or a Hub name") from error
    known = int(model.get_input_embeddings().weight.shape[0])
    if known < len(tokenizer):
        raise AuditError(
            f"the model {name} has {known} tokens but the tokenizer has {len(tokenizer)}: they do not belong "
            "together. Name a reference that has the same tokenizer"
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return model.to(device or accelerator or "cpu").eval()


def starting_point(released: Released) -> str | None:
    """Return the folder or name of the private training's starting model; None if its weights were random."""
    if released.recipe.public_pretrain is not None:
        beside = (released.folder, Path(released.recipe.train.get("output_dir", released.folder)))
        for folder in beside:
            if (folder / PRETRAINED_FOLDER / "config.json").is_file():
                return str(folder / PRETRAINED_FOLDER)
        raise AuditError(
            f"{released.folder} lacks {PRETRAINED_FOLDER}/, the starting model of the private training. Put it "
            "there, or name a reference model"
        )
    return released.recipe.model.name


@dataclass(frozen=True)
class Sample:
    """Records that were trained on, and the same number that were not."""

    members: datasets.Dataset
    """(n,) records, drawn at random from those that were trained on."""
    non_members: datasets.Dataset
    """(n,) records, drawn at random from the held-out ones."""
    train: datasets.Dataset
    """All records that were trained on."""
    held_out: datasets.Dataset
    """All held-out records whose text was not trained on."""
    dropped: dict[str, int]
    """Reason -> number of records left out."""

    @property
    def records(self) -> datasets.Dataset:
        """(2n,) members, then non-members."""
        return datasets.concatenate_datasets([self.members, self.non_members])

    @property
    def included(self) -> np.ndarray:
        """(2n,) whether a record of `records` is a member."""
        return np.arange(2 * len(self.members)) < len(self.members)


def draw_sample(recipe: Recipe, num_records: int, seed: int = 0, leave_out: Collection[str] = ()) -> Sample:
    """Draw the same number of members and non-members, each text once.

    A bound on an attack holds for a record whose text entered the data once. It applies to an estimate only if members
    and non-members come from the same distribution. So texts in both, and texts that were trained on more than once,
    are left out and counted.

    Args:
        recipe: recipe that names the data.
        num_records: largest number of each kind.
        seed: seed of the draw.
        leave_out: `record_key` of records that are neither, such as canaries.

    Raises:
        AuditError: there are no held-out records, too few usable ones, or it is unknown which rows of a user were used.
    """
    train, held_out = load_train_and_eval(recipe.data, recipe.privacy)
    if held_out is None:
        raise AuditError(
            "the recipe holds out no records, so there is no non-member to compare with. Hold out a random share "
            "before the training: data.eval=0.1"
        )
    train = train.select(_rows_trained_on(recipe, train))
    train_keys, held_out_keys = _keys(train, recipe.data), _keys(held_out, recipe.data)
    times, skip, seen = Counter(train_keys), set(leave_out), set[str]()
    members = [number for number, key in enumerate(train_keys) if times[key] == 1 and key not in skip]
    non_members, distinct = [], []
    for number, key in enumerate(held_out_keys):
        if key not in times and key not in skip:
            non_members.append(number)
            if key not in seen:
                distinct.append(number)
                seen.add(key)
    dropped = {
        "trained on more than once": sum(count > 1 and key not in skip for key, count in times.items()),
        "held out, and trained on as well": sum(key in times and key not in skip for key in held_out_keys),
        "held out more than once": len(non_members) - len(distinct),
    }
    size = min(num_records, len(members), len(distinct))
    if size < FEWEST_RECORDS:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count) or "none left out"
        raise AuditError(
            f"{len(members)} members and {len(distinct)} non-members can be compared ({reasons}), of {num_records} "
            f"requested; fewer than {FEWEST_RECORDS} of each show nothing. Hold out more records "
            "(data.eval), and remove duplicates from the data before the training"
        )
    rng = np.random.default_rng(seed)
    chosen = [np.sort(rng.permutation(np.array(numbers))[:size]) for numbers in (members, distinct)]
    return Sample(train.select(chosen[0]), held_out.select(chosen[1]), train, held_out.select(non_members), dropped)


def record_key(values: Collection[Any]) -> str:
    """Return a key that identifies a record's text.

    Args:
        values: values of the columns of `dpllm.data.records.required_columns`.
    """
    plain = [read_messages(value, "a record") if is_conversation(value) else value for value in values]
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _keys(records: datasets.Dataset, config: DataConfig) -> list[str]:
    columns = records.select_columns(required_columns(config)).to_dict()
    return [record_key(values) for values in zip(*columns.values(), strict=True)]


def _rows_trained_on(recipe: Recipe, train: datasets.Dataset) -> np.ndarray:
    """Return the numbers of the records that the run could draw: of a user above the bound, only the first ones."""
    if recipe.privacy.protects != "user":
        return np.arange(len(train))
    units = unit_index_of(train, recipe.privacy)
    if recipe.privacy.rows_kept == "random" and units.rows_dropped:
        raise AuditError(
            f"{units.rows_dropped} records were left out of the training by a secret draw (privacy.rows_kept=random), "
            'so the members are unknown. Attack a run with privacy.rows_kept="first"'
        )
    return np.sort(np.asarray(units.rows))
