"""The part of the trainer that makes rows of raw columns, for training and for evaluation (`dpllm.data.raw_rows`).

Place in the flow: between `dpllm.training.training_log` and `dpllm.DPTrainer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Never, TypedDict

from torch import nn
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from dpllm.config import ConfigError, PrivacyConfig, nearest, read_section
from dpllm.config.values import shown
from dpllm.data.chat import ChatTemplate
from dpllm.data.lengths import input_of
from dpllm.data.raw_rows import LONGEST, RowMaker, is_raw, is_stored
from dpllm.data.records import chats_in
from dpllm.engines.processes import Processes
from dpllm.models.given import names_of_classes
from dpllm.models.inputs import num_positions
from dpllm.models.tasks import task_of
from dpllm.models.writing import also_end_with
from dpllm.training.averaging import Averaging
from dpllm.training.checks.row_sample import refuse_reading
from dpllm.training.fetching import refuse_unreadable
from dpllm.training.trainer_run import TrainerRun
from dpllm.training.training_log import CoveredTrainer

logger = logging.get_logger(__name__)


class AveragedTrainer(CoveredTrainer):
    """A Trainer that may release an average of the weights after its steps (`dpllm.training.averaging`).

    During the training the model holds the weights of the last step, and the average is shown only for an evaluation.
    After it the model holds the average, so that whatever is evaluated or saved is what is released. A checkpoint holds
    the weights of its step and the average beside them.
    """

    _run: TrainerRun | None

    @property
    def averaging(self) -> Averaging | None:
        """The average of the present or the last run. None: the weights after the last step are released."""
        return None if self._run is None else self._run.averaging

    def attach(self) -> None:
        """Hook the model."""
        raise NotImplementedError

    def weights_to_release(self) -> AbstractContextManager[None]:
        """Have the weights in the model that are released, while a block runs; on all processes together.

        During the training these are the average, if the run has one; afterwards they are in the model anyway.
        """
        return contextlib.nullcontext() if self.averaging is None else self.averaging.shown()

    def last_weights(self) -> AbstractContextManager[None]:
        """Have the weights after the last step in the model, while a block runs; on all processes together."""
        return contextlib.nullcontext() if self.averaging is None else self.averaging.hidden()

    @property
    def _keeps_last(self) -> bool:
        return self.averaging is not None and self.averaging.average.keep_last

    def _release_average(self) -> None:
        """Have the average in the model after the training."""
        if self.averaging is not None:
            self.attach()  # a resume without a step left has not
            self.averaging.release()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as ``Trainer`` does, with the average where ``average.evaluate`` asks for it."""
        shows = self.averaging is not None and self.averaging.average.evaluate == "average"
        with self.weights_to_release() if shows else contextlib.nullcontext():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint, and the average in it."""
        super()._save_checkpoint(model, trial)
        if self.averaging is not None:
            self.averaging.save(Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}")


def read_privacy(privacy: Any) -> PrivacyConfig:
    """Return the privacy guarantee of a Trainer, from an object or from the keys of a recipe's section ``privacy``.

    Raises:
        ConfigError: there is none, or it is of another kind; a key is unknown, missing or unusable.
    """
    if isinstance(privacy, PrivacyConfig):
        return privacy
    if isinstance(privacy, Mapping):
        return read_section(PrivacyConfig, privacy, "DPTrainer", "privacy")
    given = "missing" if privacy is None else f"of type {type(privacy).__name__}"
    raise ConfigError(
        f"privacy is {given}: pass dpllm.PrivacyConfig(target_epsilon=..., clip_norm=..., expected_batch_size=...), or "
        "these as a dictionary"
    )


def require_arguments(args: Any) -> TrainingArguments:
    """Return the arguments of a Trainer.

    Raises:
        ConfigError: there are none, or they are of another kind.
    """
    if isinstance(args, TrainingArguments):
        return args
    given = "missing" if args is None else f"of type {type(args).__name__}"
    raise ConfigError(
        f"args is {given}: pass transformers.TrainingArguments(output_dir=..., max_steps=...); model, ledger and "
        "report go into output_dir"
    )


class Unknown(TypedDict, total=False):
    """Arguments of other Trainers, and of earlier releases, that `DPTrainer` answers with a remedy."""

    tokenizer: Never
    formatting_func: Never
    dataset_text_field: Never
    max_seq_length: Never
    packing: Never


_REMEDIES = {
    "tokenizer": "pass it as processing_class",
    "formatting_func": "apply it before: train_dataset.map(lambda row: {'text': formatting_func(row)})",
    "max_seq_length": "its name is max_length, an option of SFTConfig; for DPTrainer data={'max_length': ...}",
    "packing": "pass pack_rows=True, which keeps the rows of a microbatch apart",
}


def refuse_unknown(given: Iterable[str], trainer: type, args: Any) -> None:
    """Refuse arguments that a Trainer does not have, and say where each belongs.

    Args:
        given: their names.
        trainer: the class that was called.
        args: of the training, or None.

    Raises:
        TypeError: there is one.
    """
    for name in given:
        options = {field.name for field in dataclasses.fields(args)} if isinstance(args, TrainingArguments) else set()
        if name in _REMEDIES:
            remedy = _REMEDIES[name]
        elif name in options:
            remedy = f"it is an option of {type(args).__name__}: pass it in args"
        else:
            remedy = f"leave it out{nearest(name, inspect.signature(trainer).parameters)}".removesuffix(".")
        raise TypeError(f"{trainer.__name__} has no argument {name!r}: {remedy}")


def require_functions(**given: Any) -> None:
    """Check the arguments of a Trainer that it calls, before any of them is called.

    Args:
        given: by name; None: not given.

    Raises:
        ConfigError: one cannot be called.
    """
    for name, one in given.items():
        if one is not None and not callable(one):
            raise ConfigError(f"{name} is {shown(one)}, which cannot be called: pass a function, or leave {name} out")


class RowsTrainer(AveragedTrainer):
    """A Trainer that may be given raw columns."""

    eval_is_public: bool
    _maker: RowMaker | None = None
    _made: Sequence[tuple[Any, Any]] = ()
    """The data sets of the constructor with the rows that were made of them."""

    def row_maker(self, model: Any, tokenizer: Any, keys: Mapping[str, Any]) -> RowMaker | None:
        """Return the object that makes rows of raw columns; None in a trainer that makes its rows itself.

        Args:
            model: to train.
            tokenizer: or None.
            keys: of a recipe's section ``data``.
        """
        return RowMaker(
            tokenizer=tokenizer,
            task=task_of(model),
            source=input_of(model, ""),
            num_labels=getattr(getattr(model, "config", None), "num_labels", None),
            class_names=names_of_classes(model),
            longest=num_positions(model) or LONGEST,
            keys=keys,
        )

    def _make_rows(self, train: Any, evaluation: Any, privacy: PrivacyConfig, collator: Any) -> tuple[Any, Any]:
        """Return the rows of the private data and those for evaluation, on all processes together.

        Raises:
            ConfigError: raw columns cannot be used with a collator of the caller's own.
            DataError: raw records depend on others that were read before them, or on random numbers.
        """
        keep = [privacy.unit_column] if privacy.unit == "user" and privacy.unit_column else []
        rows = self._rows_of_raw(train, "train_dataset", keep)
        if collator is not None and is_raw(train, rows):
            raise ConfigError(
                "train_dataset has raw columns, which are tokenised and padded here, and a data_collator is given as "
                "well: leave data_collator out, or tokenise the rows before"
            )
        if is_raw(train, rows) and not is_stored(train):
            Processes().together(lambda: refuse_reading(train.__getitem__, len(train)))
        self._made = ((train, rows),)
        held_out = self._rows_of_raw(evaluation, "eval_dataset")
        several = isinstance(evaluation, Mapping)
        self._made += tuple((evaluation[key], held_out[key]) for key in evaluation) if several else ()
        self._made += ((evaluation, held_out),)
        if self.eval_is_public and is_raw(train, rows):
            public = [raw for raw, made in self._made[1:] if _is_made_of(raw, made)]
            Processes().together(lambda: self._note_public_rows(rows, train, public, keep))
        return rows, held_out

    def _end_with_turns(self, model: Any, tokenizer: Any, rows: Any) -> list[int]:
        """Have a model that is trained on conversations end its texts where a turn ends.

        The template is described in the log, where it does what people do not expect.

        Returns:
            The tokens that end a text; none if the rows were made of something else.
        """
        made = chats_in(rows)
        if made is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
            return []
        template = ChatTemplate(tokenizer)
        for note in template.notes(masked=made == "turns") if Processes().is_main else ():
            logger.warning("%s.", note)
        end = template.turn_end()
        return also_end_with(model, [] if end is None else [end])

    def _note_public_rows(self, rows: Any, train: Any, public: Sequence[Any], keep: Sequence[str]) -> None:
        for raw in public:
            if self._maker is not None:
                self._maker.note_public_rows(rows, train, raw, keep)

    def _rows_of_raw(self, dataset: Any, words: str, keep: Sequence[str] = ()) -> Any:
        """Return rows; those that need no change, names of data sets and None are returned as they are."""
        if dataset is None or isinstance(dataset, str) or self._maker is None:
            return dataset
        for raw, rows in self._made:
            if dataset is raw or dataset is rows:
                return rows
        if isinstance(dataset, Mapping) and words != "train_dataset":
            return {key: self._rows_of_raw(one, f"{words}[{key!r}]") for key, one in dataset.items()}
        if words != "train_dataset" and not _has_columns(dataset):
            return dataset  # a stream, or rows of another kind, as `Trainer` evaluates them
        refuse_unreadable(dataset, words)
        maker = self._maker
        return Processes().together(lambda: maker.rows(dataset, words, keep))

    def _make_later_rows(self) -> None:
        """Make rows of evaluation data that were set after the constructor."""
        self.eval_dataset = self._rows_of_raw(self.eval_dataset, "eval_dataset")

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as ``Trainer`` does, also on raw columns; the ledger counts it, unless the rows are public."""
        self._make_later_rows()
        return super().evaluate(self._rows_of_raw(eval_dataset, "eval_dataset"), ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predict as ``Trainer`` does, also on raw columns; the ledger counts it, unless the rows are public."""
        self._make_later_rows()
        return super().predict(self._rows_of_raw(test_dataset, "test_dataset"), ignore_keys, metric_key_prefix)


def _is_made_of(raw: Any, rows: Any) -> bool:
    """Whether rows were made of the raw columns of one data set."""
    return raw is not None and not isinstance(raw, str | Mapping) and _has_columns(raw) and is_raw(raw, rows)


def _has_columns(dataset: Any) -> bool:
    """Whether rows can be read by number and are dictionaries, or texts, which are refused."""
    if hasattr(dataset, "column_names"):
        return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return False
    return len(dataset) > 0 and isinstance(dataset[0], Mapping | str)
