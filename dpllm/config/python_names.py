"""Say under which name a Python program gives a value that a message calls by its key in a recipe.

Place in the flow: around the classes and functions of the Python interface. One message serves recipes and programs: it
names keys, such as ``privacy.clip_norm`` or ``train.max_steps``. A program has no keys, so an error that leaves the
interface gets a note, which Python and notebooks print below the message. The command line prints no notes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from dpllm.config.data_section import DataConfig
from dpllm.config.privacy_section import PrivacyConfig
from dpllm.config.recipe import ModelConfig

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_BEGINNING = "In Python: "
_KEY = re.compile(r"(?<![\w./-])(privacy|train|data|model)\.([a-z][a-z0-9_]*)")
_SECTIONS = {"privacy": PrivacyConfig, "data": DataConfig, "model": ModelConfig}
_KNOWN = {name: {item.name for item in dataclasses.fields(kind)} for name, kind in _SECTIONS.items()}
_ROWS = "the rows that you pass as train_dataset"

OF_TRAINER: Mapping[str, str | None] = {
    "privacy": "PrivacyConfig({key}=...), or the key {key!r} of the dictionary",
    "train": "TrainingArguments({key}=...)",
    "train.average": "DPTrainer(average=...)",
    "train.resume_from_checkpoint": "train(resume_from_checkpoint=...)",
    "train.trainer": "the class: DPTrainer, DPSFTTrainer or DPDPOTrainer",
    "data": "DPTrainer(data={{{key!r}: ...}})",
    "data.eval_is_public": "DPTrainer(eval_is_public=...)",
    "data.eval_fraction": "the rows that you pass as eval_dataset",
    **{f"data.{key}": _ROWS for key in ("path", "split", "encoding", "format", "limit")},
    "data.metrics": "DPTrainer(compute_metrics=...)",
    "model": "DPTrainer(model={{{key!r}: ...}})",
    "model.name": "DPTrainer(model=...)",
    "model.config": None,  # an attribute of the model has this name
    "model.peft": "DPTrainer(peft_config=...)",
    "model.tokenizer": "DPTrainer(processing_class=...)",
    "model.start_is_independent": "DPTrainer(start_is_independent=...)",
}
"""The names of a Trainer's user: of a key, or of all keys of a section; None: no other name."""

OF_LOOP: Mapping[str, str | None] = {
    "privacy": "PrivacyConfig({key}=...)",
    "privacy.gradients": 'PrivateRun.attach(gradients=...); in a loop of parts, PerUnitClipper is "per_unit"',
    "privacy.unused_parameters": "PrivateRun.freeze_unused(...), or requires_grad_(False)",
    "privacy.budget_file": "PrivateRun.start(budget_file=...)",
    "train.max_steps": "num_steps of make_plan",
    "train.num_train_epochs": "num_steps of make_plan",
    "train.output_dir": "the folder that you give to PrivateRun.start",
    "train.resume_from_checkpoint": "PrivateRun.resume",
    "train.average": "PrivateRun.attach(averaging=...)",
    "train.per_device_train_batch_size": "TrainingRows(max_rows=...)",
    "train.gradient_checkpointing": "model.gradient_checkpointing_enable()",
    **{f"train.{key}": "of your optimizer" for key in ("learning_rate", "optim", "optim_args")},
    **{f"train.{key}": "of your schedule" for key in ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")},
    "data": "the rows of TrainingRows",
    "data.max_length": "TrainingRows(lengths=...), and the rows themselves",
    "model": "the model that you load",
    "model.config": None,
    "model.start_is_independent": "PrivateRun.attach(start_is_independent=...)",
}
"""The names in a loop of one's own: `dpllm.PrivateRun`, `dpllm.make_plan`, `dpllm.GhostClipper`."""


def named_in_python(
    names: Mapping[str, str | None],
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator: an error that leaves the function says how a program gives the keys that it names.

    Of several such functions within each other, the names of the outermost count: the one that the user called.

    Args:
        names: `OF_TRAINER` or `OF_LOOP`.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                _note(error, names)
                raise

        return call

    return decorate


def python_names(text: str, names: Mapping[str, str | None]) -> dict[str, str]:
    """Return the keys of a message, each with its name in a Python program.

    Args:
        text: the message.
        names: `OF_TRAINER` or `OF_LOOP`.

    >>> python_names("clipped to privacy.clip_norm; leave train.max_grad_norm 0", OF_LOOP)
    {'privacy.clip_norm': 'PrivacyConfig(clip_norm=...)'}
    """
    found = {}
    for match in _KEY.finditer(text):
        key, (section, word) = match.group(0), match.groups()
        name = names.get(key, names.get(section))
        if name is not None and (section == "train" or word in _KNOWN[section]):
            found[key] = name.format(key=word)
    return found


def _note(error: Exception, names: Mapping[str, str | None]) -> None:
    found = python_names(str(error), names)
    earlier = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_BEGINNING)]
    if hasattr(error, "__notes__"):
        error.__notes__ = earlier
    if found:
        error.add_note(_BEGINNING + "; ".join(f"{key} is {name}" for key, name in found.items()))
