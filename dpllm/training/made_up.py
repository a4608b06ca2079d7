"""Made-up rows: random numbers in the form of the private rows, for trials that must not depend on their contents.

Place in the flow: before the first private step. Whether a loss reaches a parameter, and whether a part of the model
has a rule, is decided on them: the report states the decision, and ε does not cover it.

Of the private rows, only the form of the first one is used: its columns, their kinds and their dimensions, and the
number of its tokens that stand for parts of an image. All rows have its columns and as many such tokens, so that no row
decides on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.data.transfer import send
from dpllm.ghost.checks import placeholders_of
from dpllm.training.rows import TrainingRows

_SEED = 20161024  # public: the rows are the same on every process and after a resume
_ONES, _ZEROS = ("attention_mask",), ("token_type_ids", "special_tokens_mask", "labels")


class NotMadeUp(ValueError):
    """Rows of this form cannot be made up."""


def made_up(rows: TrainingRows, model: nn.Module, lengths: Sequence[int], number: int = 0) -> Mapping[str, Any]:
    """Return the collator's inputs of rows that are made up, on the model's device.

    Args:
        rows: rows of the run.
        model: whose vocabulary the tokens are drawn from.
        lengths: tokens of each row, where a row is a sequence; cut to the longest row of the run.
        number: of the microbatch; others have other tokens.

    Raises:
        NotMadeUp: the first row has a column that is neither numbers nor a sequence of numbers, or without a value; or
            other rows have other columns.
    """
    if (other := rows.other_columns) is not None:
        raise NotMadeUp(
            f"row {other} has other columns than row 0. Give every row the same columns, or leave those out that only "
            "some rows have"
        )
    (form,) = rows.fetch(np.asarray(rows.units.rows[:1]))
    rng = np.random.default_rng([_SEED, number])
    most, tokens = int(rows.lengths.max()), _vocabulary(model)
    images = _Placeholders.of(form, placeholders_of(model))
    if images.kinds and number == 0 and (other := rows.first_with_other_counts(images.kinds)) is not None:
        raise NotMadeUp(
            f"row {other} has more or fewer tokens for images than row 0. Give every row as many; or set "
            "privacy.gradients=ghost or per_unit, and privacy.unused_parameters=error"
        )
    inputs = rows.collate([_like(form, max(1, min(length, most)), tokens, images, rng) for length in lengths])
    return send(inputs, next(model.parameters()).device)


@dataclass(frozen=True)
class _Placeholders:
    """The tokens of a row in whose places a model puts the features of its image; a row without images has none."""

    kinds: Sequence[int]
    of_row: np.ndarray

    @classmethod
    def of(cls, form: Any, kinds: Sequence[int]) -> _Placeholders:
        ids = np.asarray(form["input_ids"] if kinds and isinstance(form, Mapping) and "input_ids" in form else [])
        return cls(kinds, ids[np.isin(ids, kinds)])

    def tokens(self, length: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Return the made-up tokens of a row of this length or, if it is too short for its image, as long as needed."""
        others = np.setdiff1d(np.arange(tokens), self.kinds)
        return np.concatenate([self.of_row, rng.choice(others, max(length - len(self.of_row), 2))])


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode for the duration of the block; random states stay as they are."""
    before = [(module, module.training) for module in model.modules()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    model.train(training)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, mode in before:
            module.training = mode


def _vocabulary(model: nn.Module) -> int:
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    named = getattr(getattr(model, "config", None), "vocab_size", None)
    return int(named) if isinstance(named, int) else max(tables, default=2)


def _like(form: Any, length: int, tokens: int, images: _Placeholders, rng: np.random.Generator) -> Any:
    """Return a made-up row."""
    ids = images.tokens(length, tokens, rng) if len(images.of_row) else rng.integers(0, tokens, length)
    length = len(ids)
    if not isinstance(form, Mapping):
        return _column("input_ids", form, length, ids, rng)
    return {name: _column(name, value, length, ids, rng) for name, value in form.items()}


def _column(name: str, value: Any, length: int, ids: np.ndarray, rng: np.random.Generator) -> Any:
    if value is None:  # whether a row has a value is private, and decides what the loss reaches
        raise NotMadeUp(
            f"the column '{name}' has no value in the first row. Leave the column out, or give each row one"
        )
    if isinstance(value, str):
        return ""
    try:
        shown = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise NotMadeUp(f"the column '{name}' holds lists of different lengths") from error
    if shown.dtype.kind not in "iubf":
        raise NotMadeUp(f"the column '{name}' holds {type(value).__name__}")
    if shown.ndim == 0:
        made: Any = np.zeros((), dtype=shown.dtype)
    elif shown.dtype.kind == "f":
        made = rng.standard_normal(shown.shape).astype(shown.dtype)
    elif shown.ndim > 1:
        made = np.zeros_like(shown)
    elif name in _ONES or name in _ZEROS:
        made = np.full(length, int(name in _ONES), dtype=shown.dtype)
    else:
        made = np.arange(length) if name == "position_ids" else ids
        made = made.astype(shown.dtype)
    if isinstance(value, Tensor):
        return torch.from_numpy(np.array(made)).to(value.dtype)
    return made if isinstance(value, np.ndarray) else made.tolist()
