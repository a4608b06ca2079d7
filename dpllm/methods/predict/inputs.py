"""The inputs of a release without training: private records in secret groups, and the public model that reads them.

Used by private prediction and by sample-and-aggregate. The model is used as it is: rows of a pass must not depend on
each other, and they must fit into memory. Whatever can be refused is refused before anything is charged.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dpllm import registry
from dpllm.config import ConfigError, ModelConfig, nearest
from dpllm.config.formats.record_format import Completion, Text, TextLabel
from dpllm.config.query_recipe import QueryRecipe
from dpllm.data.records import DataError, check_column, column_faults, load_records
from dpllm.data.rows import unit_index_of
from dpllm.data.shared_records import refuse_private_parts
from dpllm.data.units import Int64Array, UnitIndex
from dpllm.data.values import own_value
from dpllm.ghost.model_calls import tokens_by_themselves
from dpllm.ghost.refusals import coupling
from dpllm.mechanism.sampling import secret_rng
from dpllm.models.load import load_base_model, load_tokenizer
from dpllm.models.starting_point import check_start
from dpllm.models.writing import Continuation


def secret_groups(num_units: int, size: int, count: int) -> list[Int64Array]:
    """Draw ``count`` disjoint groups of ``size`` units each, uniformly, with the operating system's randomness.

    Raises:
        ValueError: there are too few units.

    >>> [sorted(group.tolist()) for group in secret_groups(3, 3, 1)]
    [[0, 1, 2]]
    """
    if size < 1 or count < 1 or size * count > num_units:
        raise ValueError(
            f"{count:,} groups of {size:,} units need {count * size:,} units, and there are {num_units:,}: take fewer "
            "groups, or a smaller size. A unit cannot be in two groups"
        )
    order = np.array(random.SystemRandom().sample(range(num_units), size * count), dtype=np.int64)
    return checked_groups([order[start : start + size] for start in range(0, len(order), size)])


def checked_groups(groups: list[Int64Array]) -> list[Int64Array]:
    """Return the groups after checking that they are disjoint.

    Raises:
        ValueError: a unit is in two groups, or twice in one.
    """
    units = np.concatenate(groups)
    if len(np.unique(units)) < len(units):
        raise ValueError(
            "a unit is in two groups, or twice in one: its texts would cost it more than the ε of one group. Groups "
            "must be disjoint"
        )
    return groups


_FIELD = re.compile(r"\{(\w+)\}")


class Template:
    """A text with the names of columns in braces, such as "Review: {text}".

    Raises:
        ConfigError: it names no column, or one that the records lack.

    >>> Template("Review: {text}", ["text", "label"]).of({"text": "Good.", "label": 1})
    'Review: Good.'
    """

    def __init__(self, text: str, columns: Sequence[str], name: str = "predict.context") -> None:
        """Check the names."""
        self.text = text
        self.columns = list(dict.fromkeys(_FIELD.findall(text)))
        if not self.columns:
            raise ConfigError(
                f"{name}={text!r} names no column, so no text would depend on a record: write a column's "
                f"name in braces, one of {', '.join(columns)}"
            )
        if unknown := [name for name in self.columns if name not in columns]:
            raise ConfigError(
                f"{name} names the column {unknown[0]!r}, which the records lack"
                f"{nearest(unknown[0], columns)}: they have {', '.join(columns)}"
            )

    def of(self, record: Mapping[str, Any]) -> str:
        """Fill in the values of a record; a missing value becomes an empty text.

        Guarantee: the text does not depend on other records. A whole number has no fraction (30 for 30.0), and keys
        without a value are left out of an object (`dpllm.data.values.own_value`).
        """
        values = {name: own_value(record[name]) for name in self.columns}
        return _FIELD.sub(lambda found: "" if values[found[1]] is None else str(values[found[1]]), self.text)


class PublicModel:
    """A public causal language model with its tokenizer: from texts to tokens and back.

    Attributes:
        sees: the most tokens of a row; None: no limit.
        start: tokens that begin a text.
        ends: tokens that end a text.

    Raises:
        ConfigError: the model has an encoder and a decoder.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the tokens that begin and end a text."""
        if model.config.is_encoder_decoder:
            raise ConfigError("the model has an encoder and a decoder: take a causal language model (task: causal_lm)")
        self.model, self.tokenizer = model, tokenizer
        sees = getattr(model.config, "max_position_embeddings", None)
        self.sees = sees if isinstance(sees, int) and sees > 0 else None
        self.start = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
        ends = model.generation_config.eos_token_id
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.ends = {*own, *(ends if isinstance(ends, list) else [] if ends is None else [ends])}

    def encoded(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass(frozen=True)
class PrivateRecords:
    """The records of a recipe, their units, and the template of their contexts."""

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
        ConfigError: the template names a missing column.
        DataError: the records cannot be read; or they are CSV or JSON files of the Hub, and a column of the template
            does not hold text: `datasets` guesses its type from all records, so one record could change the contexts of
            the others.
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
        ConfigError: the section is missing, or describes a model to be trained.
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
    """Load the public model; return it on its device, its tokenizer, and open points about it.

    Raises:
        ConfigError: it cannot be loaded, or is the result of a private run.
    """
    section = model_section(recipe)
    tokenizer = load_tokenizer(section)
    model: Any = load_base_model(section, tokenizer).eval()
    points = check_start(model, None, section.start_is_independent)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return model if device is None else model.to(device), tokenizer, points


def _usual_context(recipe: QueryRecipe, name: str) -> str:
    """Return the default template: the text columns of a record, and an end of line."""
    form = recipe.data.form
    if form.holds not in (Text, Completion, TextLabel):
        raise ConfigError(
            f"data.format={recipe.data.format!r} has no usual context: give {name} with names of columns in "
            'braces, such as "{text}\\n"'
        )
    return "".join(f"{{{column}}}" for column in form.texts) + "\n"


_RELATIVE = 1e-3
"""The largest tolerated difference of a row's logits, relative to its largest logit."""


def require_independent_rows(model: Any, length: int, rows_per_pass: int, new_tokens: int) -> None:
    """Check with public tokens that a row's logits depend neither on other rows nor on the cache.

    Position embeddings that couple rows beyond some number of tokens are refused by name.

    Raises:
        ConfigError: the logits depend on them: the bound of one unit's contribution would not hold.
    """
    for name, module in model.named_modules():
        if reason := coupling(module):
            raise ConfigError(f"{name}: {reason}")
    most = tokens_by_themselves(model)
    if most is not None and length + new_tokens > most:
        raise ConfigError(
            f"records, prompt and answer are up to {length + new_tokens:,} tokens together: beyond {most:,} this "
            "model chooses its position embeddings by the longest row of a pass (dynamic or longrope), so a unit would "
            f"change the scores of others. Keep to {most:,} tokens: lower data.max_length, the size of a group, or "
            "max_new_tokens"
        )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    long = [(7 * place + 3) % vocabulary for place in range(length)]
    short = [(11 * place + 5) % vocabulary for place in range(max(1, length // 2))]
    count = max(2, min(rows_per_pass, 4))
    for row, other, cached in ((long, short, False), (short, long, False), (long, long, True)):
        wanted = _two_tokens(Continuation(model, [row] * count, length, count, cached=False))
        found = _two_tokens(Continuation(model, [row, *[other] * (count - 1)], length, count, cached=cached))
        apart = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
        if not apart <= _RELATIVE:
            what = "on the cache of keys and values" if cached else "on the other rows of a pass"
            raise ConfigError(
                f"the logits of a row depend {what}, by {apart:.2g} of the largest logit: a unit would change the "
                "scores of others, and no ε would hold. Take a model of another architecture"
            )


def _two_tokens(rows: Continuation) -> Tensor:
    """Return, (2, V), the first row's logits of the next token, and of the one after it, given a public token."""
    found = []
    for _ in range(2):
        found.append(next(rows.logits())[1][0].float())
        rows.append(1)
    return torch.stack(found)


def require_memory(model: Any, length: int, rows: int, rows_per_pass: int, cached: bool) -> None:
    """Run one pass of public tokens with the largest sizes of a group.

    Raises:
        ConfigError: the pass does not fit into memory.
    """
    try:
        for _ in Continuation(model, [[1] * length] * rows, length, rows_per_pass, cached).logits():
            pass
    except torch.OutOfMemoryError as error:
        remedy = "set predict.cached=false" if cached else "take a smaller model, or a GPU with more memory"
        raise ConfigError(
            f"{rows:,} rows of {length:,} tokens do not fit into memory, {rows_per_pass} in a pass: lower "
            f"predict.rows_per_pass, or {remedy}"
        ) from error
