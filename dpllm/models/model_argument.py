"""Make the model of a Trainer from its caller's argument: a name, a description, a function, or the model itself.

`dpllm.DPTrainer` does this first, before any data are read. All ways end in a model with its tokenizer, and
nothing about them may depend on private rows: neither the weights, nor the adapters, nor the names of the classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn
from transformers import AutoConfig, set_seed

from dpllm.config import TASKS, ConfigError, ModelConfig, read_section
from dpllm.config.tasks import labels_of
from dpllm.models.load import load_base_model, load_tokenizer, not_loaded, prepare_model, with_adapter
from dpllm.models.tasks import task_of, task_of_class


@dataclass(frozen=True)
class GivenModel:
    """The model to train.

    Attributes:
        model: model with its adapters.
        tokenizer: tokenizer as passed, or that of the model's name. None: there is none.
    """

    model: nn.Module
    tokenizer: Any

    @classmethod
    def of(
        cls,
        model: Any,
        model_init: Callable[[], nn.Module] | None,
        peft_config: Any,
        tokenizer: Any,
        class_names: Sequence[str] | None,
        seed: int,
        private: Sequence[Any],
    ) -> GivenModel:
        """Make the model once.

        Args:
            model: the model; its folder or its name on the Hub; or a mapping with the keys of a recipe's section
                ``model``. A name without a task has the task for which the model was saved.
            model_init: a function without arguments that returns the model, instead of ``model``.
            peft_config: describes an adapter for the model. None: it is trained without a new adapter.
            tokenizer: None: for a model given by name, the tokenizer stored with its weights.
            class_names: names of the classes, in order; public facts. They are written into the model's configuration.
            seed: seed for new weights, the same on all processes.
            private: the data sets; a function that reads one is refused.

        Raises:
            ConfigError: neither or both are given, the model cannot be loaded, or it would depend on private rows.
        """
        if isinstance(tokenizer, str):
            raise ConfigError(
                f"processing_class is the string {tokenizer!r}: pass the tokenizer, "
                f"AutoTokenizer.from_pretrained({tokenizer!r})"
            )
        if (model is None) == (model_init is None):
            given = "neither" if model is None else "both"
            raise ConfigError(
                f"give exactly one of model and model_init, got {given}: model is a model, its folder or its name on "
                "the Hub, and model_init is a function that returns a model"
            )
        if not isinstance(model, nn.Module):
            set_seed(seed)
        if model_init is not None:
            model = _made_by(model_init, private)
        elif isinstance(model, str | Mapping):
            described = _described(model, peft_config)
            tokenizer = load_tokenizer(described) if tokenizer is None else tokenizer
            base = load_base_model(described, tokenizer, None if class_names is None else len(class_names))
            model = base if peft_config is not None else prepare_model(base, described)
        if not isinstance(model, nn.Module):
            source = "model is" if model_init is None else "model_init returned an object"
            raise ConfigError(
                f"{source} of type {type(model).__name__}: pass the model itself, as from_pretrained returns it"
            )
        if hasattr(model, "_orig_mod"):
            raise ConfigError(
                "the model was compiled with torch.compile, which hides its layers: pass the model itself (model = "
                "compiled._orig_mod); torch_compile=True in the arguments compiles its layers"
            )
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"the model is wrapped in {type(model).__name__}: pass the model itself (model.module); with several "
                "GPUs, start one process for each (accelerate launch)"
            )
        if class_names is not None:
            name_classes(model, class_names)
        if peft_config is not None:
            set_seed(seed)
            model = with_adapter(model, peft_config, task_of(model))
        return cls(model, tokenizer)


def names_of_classes(model: Any) -> list[str] | None:
    """Return the names of a model's classes; None if they are only numbers ("LABEL_0")."""
    names = getattr(getattr(model, "config", None), "id2label", None) or {}
    if labels_of(task_of(model)) not in ("class", "tokens") or names == _numbered(len(names)):
        return None
    try:
        return [str(names[number]) for number in range(len(names))]
    except KeyError:
        return None


def _described(model: str | Mapping[str, Any], peft_config: Any) -> ModelConfig:
    if isinstance(model, Mapping) and peft_config is not None:
        raise ConfigError(
            "model is a description, and peft_config is given as well: describe the adapter in "
            "model={'adapter': ...}, or pass the model's name as a string"
        )
    keys: dict[str, Any] = {"name": model} if isinstance(model, str) else dict(model)
    if keys.get("task") is None and isinstance(keys.get("name"), str) and keys["name"]:
        keys["task"] = _saved_task(keys["name"], keys.get("trust_remote_code") is True)
    return read_section(ModelConfig, keys, "DPTrainer", "model")


def _saved_task(name: str, trusted: bool) -> str:
    """Return the task for which a model was saved, according to its config.json.

    Args:
        name: a folder, or a name on the Hub.
        trusted: whether code in the folder may run.

    Raises:
        ConfigError: it cannot be read, or the class belongs to no task, such as an encoder without a head.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trusted)
    except Exception as error:  # any, as for the weights
        raise not_loaded("model", name, error) from error
    classes = [str(one) for one in getattr(config, "architectures", None) or ()]
    task = task_of_class(classes[0], config) if classes else None
    if task is None:
        saved = f"was saved as {classes[0]}, which has no task" if classes else "names no class in its config.json"
        raise ConfigError(
            f"the model {name!r} {saved}: add the task, model={{'name': {name!r}, 'task': ...}}, one of "
            f"{', '.join(TASKS)}. A classifier needs data={{'class_names': [...]}} or 'num_labels'"
        )
    return task


def name_classes(model: Any, class_names: Sequence[str], own: bool = False) -> None:
    """Write the names of the classes into a model's configuration, so that the released model answers with them.

    Args:
        model: a transformers model.
        class_names: in the order of the labels' numbers; public facts.
        own: whether these names replace the model's, as in a recipe, whose labels they number.

    Raises:
        ConfigError: the model has a different number of classes, different names, or no classes.
    """
    if labels_of(task_of(model)) not in ("class", "tokens", "numbers") or task_of(model) == "regression":
        raise ConfigError(
            f"data.class_names names classes, but a {type(model).__name__} has none: leave it out, or give the task "
            "(model={'name': ..., 'task': 'sequence_classification'})"
        )
    names = {number: str(name) for number, name in enumerate(class_names)}
    known = dict(model.config.id2label)
    others = known not in (_numbered(len(known)), names) and not own
    if len(known) != len(names) or others:
        raise ConfigError(
            f"data.class_names names {len(names)} classes ({', '.join(names.values())}), but the model has "
            f"{len(known)} ({', '.join(map(str, known.values()))}). Use the model's names in its order, or load it "
            "with num_labels and id2label of your classes (in a recipe: leave model.num_labels out)"
        )
    model.config.id2label = names
    model.config.label2id = {name: number for number, name in names.items()}


def _numbered(count: int) -> dict[int, str]:
    return {number: f"LABEL_{number}" for number in range(count)}


def _made_by(model_init: Callable[..., Any], private: Sequence[Any]) -> Any:
    """Call a function that makes the model.

    Raises:
        ConfigError: it takes arguments, or reads a private data set.
    """
    if not callable(model_init):
        raise ConfigError(f"model_init is of type {type(model_init).__name__}: pass a function that returns the model")
    needed = [
        name
        for name, parameter in inspect.signature(model_init).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"model_init takes the argument {needed[0]!r}, as a hyperparameter search passes it, but each training "
            "of a search costs privacy. Pass a function without arguments"
        )
    if any(_is_one_of(value, private) for value in _read_by(model_init)):
        raise ConfigError(
            "model_init reads a private data set, so the initial weights or their shapes may depend on its rows, which "
            "epsilon does not cover. Use public facts instead, such as the number of classes"
        )
    return model_init()


def _is_one_of(value: Any, private: Sequence[Any]) -> bool:
    inner = list(value.values()) if isinstance(value, dict) else []  # several splits
    return any(one is dataset for one in (value, *inner) for dataset in private)


def _read_by(function: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the objects that a function, or one of its module that it calls, reads by name or has as an argument."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    seen = set() if seen is None else seen
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    names = inspect.getclosurevars(function)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for value in (*names.nonlocals.values(), *names.globals.values(), *defaults):
        yield value
        if getattr(value, "__module__", None) == function.__module__:
            yield from _read_by(value, seen)
