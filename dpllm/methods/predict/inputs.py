"""The inputs of a release without training: private records in units, and the public model that reads them.

Place in the flow: first, for private prediction and for answers of groups. The model is used as it is, and what can be
refused about it is refused before anything is charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from dpllm import registry
from dpllm.config import ConfigError, ModelConfig
from dpllm.config.formats.record_format import Completion, Text, TextLabel
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.records import DataError, check_column, column_faults, load_records
from dpllm.data.rows import unit_index_of
from dpllm.data.shared_records import refuse_private_parts
from dpllm.data.units import Int64Array, UnitIndex
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.predict.prompts import Template
from dpllm.models.load import load_base_model, load_tokenizer
from dpllm.models.starting_point import check_start


@dataclass(frozen=True)
class PrivateRecords:
    """The records of a recipe, in units, and the template of their contexts."""

    records: datasets.Dataset
    units: UnitIndex
    template: Template

    @property
    def num_units(self) -> int:
        """N."""
        return self.units.num_units

    def contexts(self, group: Int64Array) -> list[list[str]]:
        """Return, for each unit of a group, the contexts of its records."""
        rows, place = self.units.rows_of(group)
        found: list[list[str]] = [[] for _ in group]
        for row, unit in zip(rows.tolist(), place.tolist(), strict=True):
            found[unit].append(self.template.of(self.records[row]))
        return found


def read_records(recipe: QueryRecipe) -> PrivateRecords:
    """Read the records of a recipe, whose section has a ``context``.

    Raises:
        ConfigError: the template names a column that they lack.
        DataError: they cannot be read; or they are CSV or JSON files of the Hub, and a column of the template holds no
            text: `datasets` guesses its type from all records, so one record could change the contexts of the others.
    """
    name = f"{recipe.method}.context"
    context = recipe.options.context or _usual_context(recipe, name)
    records = load_records(recipe.data, recipe.privacy)
    refuse_private_parts(recipe, records)
    template = Template(context, [*records.column_names, *column_faults(records)], name)
    for column in template.columns:
        check_column(records.column_names, column, recipe.data.path, records)
    for column in template.columns if records.info.builder_name in ("csv", "json") else ():
        if getattr(records.features[column], "dtype", None) not in ("string", "large_string"):
            raise DataError(
                f"{name} names the column '{column}' of {recipe.data.path}, whose type was guessed from all records, "
                "so one record could change the contexts of the others. Download its files, give their folder as "
                "data.path, and each record's value is read by itself"
            )
    return PrivateRecords(records, unit_index_of(records, recipe.privacy, secret_rng()), template)


def model_section(recipe: QueryRecipe) -> ModelConfig:
    """Return the section of the model.

    Raises:
        ConfigError: there is none, or it describes a model to be trained.
    """
    model, words = recipe.model, registry.method(recipe.method).invocation
    if model is None or model.name is None:
        raise ConfigError(f"{words} needs a pretrained public model: give model.name")
    if model.task != "causal_lm" or model.adapter is not None or model.freeze:
        raise ConfigError(
            f"{words} uses a causal language model as it is: leave model.task, model.adapter and "
            "model.freeze out of the recipe"
        )
    return model


def load_public_model(recipe: QueryRecipe) -> tuple[Any, PreTrainedTokenizerBase, list[str]]:
    """Return the model on its device, its tokenizer, and open points about it.

    Raises:
        ConfigError: it cannot be loaded, or holds a private run.
    """
    section = model_section(recipe)
    tokenizer = load_tokenizer(section)
    model: Any = load_base_model(section, tokenizer).eval()
    points = check_start(model, None, section.start_is_independent)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return model if device is None else model.to(device), tokenizer, points


def _usual_context(recipe: QueryRecipe, name: str) -> str:
    """Return the template of a recipe without one: the text columns of a record, and an end of line."""
    form = recipe.data.form
    if form.holds not in (Text, Completion, TextLabel):
        raise ConfigError(
            f"data.format={recipe.data.format!r} has no usual context: give {name} with names of columns in "
            'braces, such as "{text}\\n"'
        )
    return "".join(f"{{{column}}}" for column in form.texts) + "\n"
