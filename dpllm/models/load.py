"""Load the model and the tokenizer that a recipe names, and prepare them for training.

A model comes from the Hub, from a folder, or new from a configuration. The recipe then selects the trained parameters:
all, LoRA factors, or all but some frozen ones. Attaching the hooks later checks that each trainable part can be clipped
exactly.

transformers fills parts that are missing from the weights with random numbers, and drops parts that are missing from
the configuration; it only logs a line. Here both are errors, except for the new head of a classifier.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from dpllm.config import TASKS, ConfigError, ModelConfig, nearest
from dpllm.config.foreign_kinds import check_kinds
from dpllm.config.hub import refuse_lfs_pointer
from dpllm.config.values import between, integer
from dpllm.data.tokenization import train_tokenizer
from dpllm.models.inputs import align_padding
from dpllm.models.quantization import config_for, make_ready, refuse_other_form, stored_as
from dpllm.models.starting_point import DATA_DRIVEN_INIT
from dpllm.models.tasks import task_of
from dpllm.models.writing import complete_generation_config

NO_CODE = {"trust_remote_code": False}
"""Argument of every ``from_pretrained``: by default transformers asks on a terminal whether to run a folder's code."""
_SHOWN = 3
_POINTER = 1024  # bytes: a git-lfs pointer has fewer
_ADAPTER, _CONFIG = "adapter_config.json", "config.json"


def load_pretrained(auto: Any, name: str, new_head: bool, **options: Any) -> Any:
    """Return ``auto.from_pretrained(name, **options)``, and check that it is complete.

    Args:
        auto: a class of transformers, such as ``AutoModelForCausalLM``.
        name: a folder, or a name on the Hub.
        new_head: whether the task's head may be new (a classifier on a language model).
        options: options of ``from_pretrained``. Code in the folder does not run unless ``trust_remote_code`` is true.

    Raises:
        ConfigError: it cannot be read, or its weights do not fit its configuration.
    """
    try:
        model, info = auto.from_pretrained(name, output_loading_info=True, **{**NO_CODE, **options})
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any: damage raises SafetensorError, UnpicklingError, BadZipFile, ...
        raise not_loaded("model", name, error) from error
    refuse_mismatch(model, info, name, new_head)
    return model


def refuse_mismatch(model: nn.Module, info: Mapping[str, Any], name: str, new_head: bool) -> None:
    """Refuse weights that are missing from a folder, or that its configuration does not contain.

    Args:
        model: the loaded model.
        info: ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys`` of transformers.
        name: name of the folder, for the message.
        new_head: whether parts outside the base model may be new or left over.

    Raises:
        ConfigError: parts would be random or unused.
    """
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = getattr(model, prefix, None) if prefix else None
    inside = {prefix, *(child for child, _ in base.named_children())} if isinstance(base, nn.Module) else set()

    def counts(keys: Iterable[Any]) -> list[str]:
        names = sorted(str(key[0]) if isinstance(key, tuple | list) else str(key) for key in keys)
        if not new_head:
            return names
        return [key for key in names if key.split(".")[0] in inside and ".pooler." not in f".{key}"]

    missing, unexpected = counts(info.get("missing_keys", ())), counts(info.get("unexpected_keys", ()))
    # An unused head of another task is harmless; an unused layer is not.
    unexpected = [key for key in unexpected if key.split(".")[0] in inside and ".pooler." not in f".{key}"]
    mismatched = counts(info.get("mismatched_keys", ()))
    found = [
        f"{len(keys)} {words} ({', '.join(keys[:_SHOWN])}{', …' if len(keys) > _SHOWN else ''})"
        for keys, words in (
            (missing, "parameters are not in the files and would be random"),
            (unexpected, "parameters in the files do not exist in the model"),
            (mismatched, "parameters have a different shape in the files"),
        )
        if keys
    ]
    if found:
        raise ConfigError(
            f"the model {name!r} does not match its config.json ({type(model).__name__}): {'; '.join(found)}. Name a "
            "folder whose config.json belongs to its weights, or the task for which the model was saved (model.task)"
        )


def load_adapter(base: Any, folder: str | Path, **options: Any) -> PeftModel:
    """Return a model with the adapter of a folder, even if the adapter was trained with added tokens.

    Args:
        base: the model below the adapter, with the tokens with which it was published; it is changed.
        folder: folder of the adapter.
        options: options of ``PeftModel.from_pretrained``.
    """
    rows, table = _embedding_rows(base, Path(folder)), base.get_input_embeddings()
    if rows is not None and rows != table.num_embeddings:
        base.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has all rows
    adapted: PeftModel = PeftModel.from_pretrained(base, str(folder), **options)
    return adapted


def _embedding_rows(base: nn.Module, folder: Path) -> int | None:
    """Return the number of tokens in the embedding that an adapter's file contains; None: it contains none."""
    path, table = folder / SAFETENSORS_WEIGHTS_NAME, base.get_input_embeddings()  # type: ignore[operator]
    place = next((name for name, module in base.named_modules() if module is table), None)
    if place is None or not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        parts = (".weight", ".base_layer.weight", ".token_adapter.base_layer.weight")
        names = {f"base_model.model.{place}{part}" for part in parts} & set(file.keys())
        return int(file.get_slice(min(names)).get_shape()[0]) if names else None


def changes_of_base(model: Any) -> tuple[dict[str, Any], int | None]:
    """Return how the model below an adapter differs from its files, which the model card states.

    Returns:
        The arguments of ``from_pretrained`` that give the base model its head, classes and padding, and the
        number of rows of its embedding if tokens were added (None: as many as in its files).
    """
    inner = model.get_base_model()
    config: Any = getattr(inner, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return {}, None
    name = model.active_peft_config.base_model_name_or_path
    try:
        saved: Any = AutoConfig.from_pretrained(name, **NO_CODE) if name else None
    except Exception:  # any: the model does not exist, or its configuration has a user's class
        saved = None
    changes: dict[str, Any] = {}
    task, names = task_of(inner), dict(config.id2label or {})
    if task is not None and TASKS[task].needs_labels:
        changes["num_labels"] = config.num_labels
        if names != {number: f"LABEL_{number}" for number in range(len(names))}:
            changes |= {"id2label": names, "label2id": dict(config.label2id or {})}
        if config.problem_type is not None:
            changes["problem_type"] = config.problem_type
        if getattr(config, "pad_token_id", None) != getattr(saved, "pad_token_id", None):
            changes["pad_token_id"] = config.pad_token_id  # a decoder's head reads the last token before the padding
    had, table = _vocabulary(saved), inner.get_input_embeddings()
    parts: Any = table.modules() if isinstance(table, nn.Module) else ()  # PEFT wraps it
    rows: int | None = next((part.num_embeddings for part in parts if hasattr(part, "num_embeddings")), None)
    return changes, rows if had is not None and had != rows else None


def _vocabulary(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None)


def is_path(name: str) -> bool:
    """Return whether a name can only be a folder: a Hub id is ``name`` or ``owner/name``, and begins with a letter.

    >>> [is_path(name) for name in ("./model", "~/model", "/models/gpt2", "a/b/c", "models/", "openai-community/gpt2")]
    [True, True, True, True, True, False]
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith("/")


def require_folder(what: str, name: str) -> None:
    """Check that a name which can only be a path is that of a folder with a model; nothing is loaded.

    Args:
        what: "model" or "tokenizer", for the message.
        name: name in a recipe.

    Raises:
        ConfigError: there is no such folder, it is a file, or it holds only an adapter or git-lfs pointers.
    """
    folder = Path(name)
    if folder.is_file():
        raise ConfigError(f"the {what} {name!r} cannot be loaded: it is a file. Name the folder that contains it")
    if not folder.is_dir() and is_path(name):
        whole = folder.expanduser()
        remedy = f"Write the full path, {whole}" if whole.is_dir() else "Correct it, or give a Hub id (owner/name)"
        raise ConfigError(
            f"the {what} {name!r} cannot be loaded: there is no such folder (seen from {Path.cwd()}). {remedy}"
        )
    if what == "model" and (folder / _ADAPTER).is_file() and not (folder / _CONFIG).is_file():
        raise ConfigError(
            f"the model {name!r} cannot be loaded: the folder holds a LoRA adapter, not a whole model. Name the "
            "model on which it was trained"
        )
    for file in sorted(folder.glob("*")):
        if file.is_file() and file.stat().st_size < _POINTER:
            refuse_lfs_pointer(file, ConfigError)


def needs_code(error: Exception) -> bool:
    """Return whether transformers refused to load a folder because it holds code."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def not_loaded(what: str, name: str, error: Exception) -> ConfigError:
    """Return the error for a model or tokenizer that cannot be read, with the reason in one line."""
    try:
        require_folder(what, name)
    except ConfigError as missing:
        return missing
    if needs_code(error):
        return ConfigError(
            f"the {what} {name!r} comes with its own code (auto_map in its config.json), which runs only if you allow "
            "it. Read its .py files, then set model.trust_remote_code=true (DPSFTTrainer, DPDPOTrainer: "
            "args.trust_remote_code), or choose a model whose class is part of transformers"
        )
    local = Path(name).is_dir()
    offline = " (HF_HUB_OFFLINE is set, so only cached files are used)" if HF_HUB_OFFLINE else ""
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    if local and what == "tokenizer" and not any(Path(name).glob("*token*")):
        return ConfigError(
            f"the tokenizer {name!r} cannot be loaded: the folder holds none. Name its folder or Hub id in "
            "model.tokenizer, or copy the tokenizer files there"
        )
    if local:
        return ConfigError(
            f"the {what} {name!r} cannot be loaded: {kind}{one_line(error)}. Its files (config.json, weights, "
            "tokenizer files) are damaged or do not belong together: copy the folder again"
        )
    return ConfigError(
        f"the {what} {name!r} cannot be loaded{offline}: there is no local folder of this name, and the Hub returned "
        f"{kind}{one_line(error)}. Give a local folder, or a Hub name that can be reached. "
        "Without either, a recipe such as clinic_notes makes a small model itself (dpllm recipes)"
    )


def check_adapter_names(base: nn.Module, config: LoraConfig, source: str = "model.adapter") -> None:
    """Check that every module that LoRA names is in the model; peft silently skips unknown names.

    Raises:
        ConfigError: a name matches no module.
    """
    names = [name for name, _ in base.named_modules() if name]
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        wanted = getattr(config, key)
        if wanted is None or isinstance(wanted, str):
            continue  # a string is "all-linear" or a pattern; peft itself refuses it without a match
        for module in wanted:
            if not any(name == module or name.endswith(f".{module}") for name in names):
                last = {name.rsplit(".", 1)[-1] for name in names}
                raise ConfigError(
                    f"{source}: {key} names '{module}', but the model has no such module"
                    f"{nearest(str(module), last) or '.'} Its module names end in {', '.join(sorted(last)[:12])}"
                )


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line, at most 300 characters."""
    return " ".join(str(error).split())[:300].rstrip(".")


_CONTAINERS = (list, dict, set, deque)
_DATA = (bool, int, float, complex, str, bytes, type(None), *_CONTAINERS, tuple, Tensor, np.ndarray)
_COPIED = 1 << 12  # the largest number of entries of a container that is copied, one level deep
_PARTS = ("_buffers", "_parameters", "_modules")
_INTERNAL = frozenset(vars(nn.Module()))  # of every module, among them parameters, buffers and submodules


class StartingValues:
    """The attributes of all modules, and of their configurations, at one moment.

    A tensor or a container with more than 4096 entries that is changed in place is not restored.

    Args:
        model: a model that dpllm loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        """Store the values; containers are copied."""
        self._holders = _holders(model)
        self._values = [_data(holder) for holder in self._holders]
        self._entries = [
            {name: value.copy() for name, value in values.items() if _is_copied(value)} for values in self._values
        ]

    def restore(self) -> None:
        """Restore these values, and remove attributes that are new."""
        for holder, values, entries in zip(self._holders, self._values, self._entries, strict=True):
            for name in _data(holder).keys() - values.keys():
                del vars(holder)[name]
            parts = [vars(holder).get(part, ()) for part in _PARTS]  # an attribute would hide a part of the same name
            vars(holder).update({name: value for name, value in values.items() if not any(name in p for p in parts)})
            for name, copied in entries.items():
                container = values[name]
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(copied)


def _holders(model: nn.Module) -> list[Any]:
    """Return the modules and their configurations, each once."""
    modules = list(model.modules())
    configs = [vars(module).get("config") for module in modules]
    found = [*modules, *(config for config in configs if hasattr(config, "to_dict"))]
    return list({id(holder): holder for holder in found}.values())


def _data(holder: Any) -> dict[str, Any]:
    internal = _INTERNAL if isinstance(holder, nn.Module) else frozenset()
    return {name: value for name, value in vars(holder).items() if isinstance(value, _DATA) and name not in internal}


def _is_copied(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) and len(value) <= _COPIED


AUTO_MODEL: dict[str, Any] = {task: getattr(transformers, about.auto_class) for task, about in TASKS.items()}
_CLASSES: dict[str, Any] = {
    task: getattr(transformers, f"MODEL_FOR_{about.mapping}_MAPPING") for task, about in TASKS.items()
}
_HEADS = r"(.*\.)?(classifier|score|qa_outputs)"
"""Pattern of heads that PEFT trains whole and that "all-linear" would also adapt, which PEFT refuses."""
DTYPES: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": "auto"}

# Exceptions that transformers raises for a configuration from which no model can be built.
_UNBUILDABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError)


def load_tokenizer(model: ModelConfig, public_texts: Iterable[str] | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a recipe; a missing padding token becomes the end-of-sequence token.

    Args:
        model: `tokenizer_vocab_size` trains one on `public_texts`; otherwise `tokenizer`, or the model's own, is
            loaded.
        public_texts: public text, never private: a vocabulary reveals the words of its text.

    Raises:
        ConfigError: it cannot be loaded, none is named, or there is no public text to train one on.
    """
    if model.tokenizer_vocab_size is not None:
        if public_texts is None:
            raise ConfigError(
                "model.tokenizer_vocab_size trains a tokenizer on public text, but the recipe has no public_pretrain "
                "section: add one, or name a tokenizer with model.tokenizer"
            )
        return train_tokenizer(public_texts, model.tokenizer_vocab_size, _max_positions(model))
    name = model.tokenizer or model.name
    if name is None:
        raise ConfigError(
            "a model made from model.config has no tokenizer: set model.tokenizer (load one) or "
            "model.tokenizer_vocab_size (train one on the public text)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:  # any: tokenizers raises plain Exception for an unreadable file
        raise not_loaded("tokenizer", name, error) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"the tokenizer {name!r} has neither a padding nor an end-of-sequence token: set one in it"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, num_labels: int | None = None
) -> PreTrainedModel | PeftModel:
    """Return the model of a recipe, with its adapters and frozen parameters: `prepare_model` of `load_base_model`.

    Args:
        model: the recipe's section.
        tokenizer: as loaded by `load_tokenizer`.
        num_labels: number of classes if `model.num_labels` is not set, such as `dpllm.data.rows.num_labels_of`.

    Raises:
        ConfigError: one of the two functions raised it.
    """
    return prepare_model(load_base_model(model, tokenizer, num_labels), model)


def load_base_model(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, num_labels: int | None = None
) -> PreTrainedModel:
    """Return the model without adapters, every parameter trainable.

    Raises:
        ConfigError: it cannot be loaded; an unknown key or a bad value in `model.config`; a classifier without a
            number of classes; a vocabulary smaller than the tokenizer's; tied weights that cannot be (un)tied.
    """
    labels = _labels(model, num_labels)
    if model.config is not None:
        base = _from_config(model, tokenizer, labels)
    else:
        new_head = TASKS[model.task].labels != "text"
        options = {"dtype": DTYPES[model.dtype], "trust_remote_code": model.trust_remote_code, **labels}
        if model.quantization is not None:
            heads = _heads(model, labels) if new_head else None
            options["quantization_config"] = config_for(model.quantization, _dtype_of(model), heads)
        base = load_pretrained(AUTO_MODEL[model.task], str(model.name), new_head, **options)
        if model.quantization is not None:
            refuse_other_form(base, model.quantization)
        make_ready(base)
        _set_tying(base, model)
    table: Any = base.get_input_embeddings().weight
    rows = int(getattr(table, "ds_shape", table.shape)[0])  # ZeRO-3 keeps a partitioned table's shape there
    if rows < len(tokenizer):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has only {rows}: use the "
            "model's own tokenizer"
        )
    align_padding(base, tokenizer)
    complete_generation_config(base)
    return base


def _labels(model: ModelConfig, num_labels: int | None) -> dict[str, Any]:
    """Return the arguments of a configuration that set a head's size and its task.

    Raises:
        ConfigError: the number of classes is unknown.
    """
    about = TASKS[model.task]
    if not about.needs_labels:
        return {}
    known = model.num_labels or (1 if model.task == "regression" else num_labels)
    if known is None:
        raise ConfigError(
            "the number of classes is unknown: set model.num_labels, or list the classes in data.class_names. "
            "They must be public facts, so they are never counted in the private labels or in a private file's schema"
        )
    return {"num_labels": known, **({"problem_type": about.problem_type} if about.problem_type else {})}


def _dtype_of(model: ModelConfig) -> torch.dtype:
    """Return the dtype of the model's weights, also where the recipe takes it from the files."""
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    try:
        saved = _saved_config(model, {}).dtype
    except Exception as error:  # any, as for the weights
        raise not_loaded("model", str(model.name), error) from error
    return saved if isinstance(saved, torch.dtype) else torch.float32


def _heads(model: ModelConfig, labels: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts on top of a base model, which are new and trained and must not be quantised."""
    with torch.device("meta"):
        base = _without_weights(model, _saved_config(model, labels), torch.float32)
    return [name for name, _ in base.named_children() if name != base.base_model_prefix]


def skeleton(model: ModelConfig) -> PreTrainedModel | PeftModel:
    """Return the model of a recipe without weights, on the meta device, with its adapters and frozen parameters.

    Only its configuration is read: ``model.config``, or the config.json of ``model.name``. Without `model.num_labels`
    a classifier has two classes, so that it can be built.

    Raises:
        ConfigError: no model can be built from the configuration, or the adapters or patterns do not fit it.
    """
    labels = _labels(model, 2)
    dtype = torch.float32 if model.dtype == "auto" else DTYPES[model.dtype]
    where = "model.config" if model.config is not None else f"the config.json of the model {model.name!r}"
    try:
        with torch.device("meta"):
            if model.config is not None:
                kind, arguments = config_arguments(model)
                if model.tokenizer_vocab_size is not None:
                    arguments.setdefault("vocab_size", model.tokenizer_vocab_size)
                config = AutoConfig.for_model(kind, **{**arguments, **labels})
            else:
                config = _saved_config(model, labels)
            base = _without_weights(model, config, dtype)
    except ConfigError:
        raise
    except OSError as error:
        raise not_loaded("model", str(model.name), error) from error
    except _UNBUILDABLE as error:
        if needs_code(error):
            raise not_loaded("model", str(model.name), error) from error
        raise ConfigError(
            f"model.task={model.task} cannot be built from {where} ({type(error).__name__}: "
            f"{one_line(error)}). Correct the sizes, or restore the config.json that belongs to the weights"
        ) from error
    with torch.device("meta"):
        return prepare_model(base, model)


def _saved_config(model: ModelConfig, labels: Mapping[str, Any]) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(str(model.name), trust_remote_code=model.trust_remote_code, **labels)


def _without_weights(model: ModelConfig, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a configuration on the meta device, also if DeepSpeed's ZeRO-3 is set up.

    transformers would then shard its weights over the processes, but the meta device has no weights.
    """
    kind = _CLASSES[model.task].get(type(config), None) if is_deepspeed_zero3_enabled() else None
    if kind is None:
        return AUTO_MODEL[model.task].from_config(config, dtype=dtype, trust_remote_code=model.trust_remote_code)
    return (kind[0] if isinstance(kind, tuple) else kind)(config).to(dtype)


def config_arguments(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Return the model_type of ``model.config``, and a copy of its other keys, all valid for the type.

    Raises:
        ConfigError: an unknown model_type or key, with the nearest known one.

    >>> config_arguments(ModelConfig(config={"model_type": "gpt2", "n_embd": 16}))
    ('gpt2', {'n_embd': 16})
    """
    arguments = copy.deepcopy(dict(model.config or {}))
    kind = arguments.pop("model_type")
    try:
        default = AutoConfig.for_model(kind)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"model.config: transformers does not know model_type {kind!r}") from error
    known = {*default.to_dict(), *default.attribute_map, "num_labels"}
    if default.is_encoder_decoder:
        known.add("decoder_start_token_id")
    for key in arguments:
        if key not in known:
            raise ConfigError(f"model.config: {kind} configurations have no key '{key}'{nearest(str(key), known)}")
    return kind, arguments


def prepare_model(base: PreTrainedModel, model: ModelConfig) -> PreTrainedModel | PeftModel:
    """Add the recipe's adapters and freeze its frozen parameters.

    Raises:
        ConfigError: an unknown LoRA argument, or one whose value would come from the private data; no module to adapt;
            a freeze pattern without a match; no trainable parameter left.
    """
    prepared: PreTrainedModel | PeftModel = base
    if model.adapter is None and (stored := stored_as(base)) is not None:
        raise ConfigError(
            f"the weights of the model {model.name!r} are quantised ({stored}), so its weight matrices cannot be "
            "trained directly: set model.adapter, such as {r: 16, target_modules: all-linear}"
        )
    if model.adapter is not None:
        config = _lora_config(model)
        check_adapter_names(base, config)
        try:
            prepared = get_peft_model(base, config)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ConfigError(f"model.adapter does not fit this model: {one_line(error)}") from error
        _name_the_base_from_everywhere(prepared)
    names = [name for name, _ in prepared.named_parameters()]
    for pattern in model.freeze:
        matched = set(fnmatch.filter(names, pattern))
        if not matched:
            raise ConfigError(
                f"model.freeze: no parameter name matches '{pattern}'{nearest(pattern, names) or '.'} "
                f"Parameter names look like {', '.join(names[:3])}"
            )
        for name, parameter in prepared.named_parameters():
            if name in matched:
                parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in prepared.parameters()):
        raise ConfigError(
            "the model has no trainable parameter: remove patterns from model.freeze, or check model.adapter"
        )
    return prepared


def _name_the_base_from_everywhere(model: PeftModel) -> None:
    """Write the full path of a local base model into the adapter's configuration, which is read in another folder."""
    for config in model.peft_config.values():
        name = config.base_model_name_or_path
        if name and Path(name).expanduser().is_dir():
            config.base_model_name_or_path = str(Path(name).expanduser().resolve())


def with_adapter(base: nn.Module, config: Any, task: str | None) -> PeftModel:
    """Return a model with a new adapter, as the argument ``peft_config`` of a Trainer describes it.

    Args:
        base: model without an adapter.
        config: a `peft.PeftConfig`. It is not changed; a missing ``task_type`` is set for the model's task.
        task: one of `dpllm.config.TASKS`. None: unknown.

    Raises:
        ConfigError: the model has an adapter, or the adapter does not fit it or would start from private data.
    """
    name = "peft_config"
    if not isinstance(config, PeftConfig):
        raise ConfigError(
            f"{name} is of type {type(config).__name__}: pass a PEFT configuration, such as peft.LoraConfig(...)"
        )
    if isinstance(base, PeftModel):
        raise ConfigError(f"{name} describes an adapter, but the model already has one: leave {name} out")
    _refuse_data_driven(name, getattr(config, "init_lora_weights", None))
    config = copy.deepcopy(config)
    if task is not None:
        config.task_type = config.task_type or TASKS[task].peft
        if TASKS[task].label_per_token and getattr(config, "target_modules", None) == "all-linear":
            config.exclude_modules = getattr(config, "exclude_modules", None) or _HEADS
    if isinstance(config, LoraConfig):
        check_adapter_names(base, config, name)
    try:
        adapted: PeftModel = get_peft_model(base, config)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"{name} does not fit this model: {one_line(error)}") from error
    _name_the_base_from_everywhere(adapted)
    return adapted


def _refuse_data_driven(name: str, kind: Any) -> None:
    """Refuse an initialisation of LoRA that is computed from data."""
    if isinstance(kind, str) and kind.lower() in DATA_DRIVEN_INIT:
        raise ConfigError(
            f"{name}: init_lora_weights={kind!r} starts from statistics of the private data, which ε would not "
            "cover. Use true, 'gaussian', 'pissa' or 'olora'"
        )


_RANGES: Mapping[str, Any] = {
    "r": partial(integer, minimum=1),
    "lora_alpha": partial(between, least=0, above=True),
    "lora_dropout": partial(between, least=0, most=1, below=True),
}


def check_adapter(model: ModelConfig) -> None:
    """Check the names, kinds and ranges of ``model.adapter``, without a model.

    Raises:
        ConfigError: `peft.LoraConfig` does not have a name, or cannot use a value.
    """
    if model.adapter is not None:
        _lora_config(model)


def _lora_config(model: ModelConfig) -> LoraConfig:
    arguments = copy.deepcopy(dict(model.adapter or {}))
    known = [field.name for field in dataclasses.fields(LoraConfig)]
    for key in arguments:
        if key not in known:
            raise ConfigError(f"model.adapter.{key}: LoraConfig has no argument '{key}'{nearest(str(key), known)}")
    check_kinds("model.adapter", arguments, LoraConfig, {"lora_alpha": float}, ("init_lora_weights",))
    for key, check in _RANGES.items():
        if arguments.get(key) is not None:
            check(f"model.adapter.{key}", arguments[key])
    _refuse_data_driven("model.adapter", arguments.get("init_lora_weights"))
    arguments.setdefault("task_type", TASKS[model.task].peft)
    if TASKS[model.task].label_per_token and arguments.get("target_modules") == "all-linear":
        arguments.setdefault("exclude_modules", _HEADS)
    try:
        return LoraConfig(**arguments)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"model.adapter: {one_line(error)}") from error


def _from_config(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, labels: Mapping[str, Any]) -> PreTrainedModel:
    if model.dtype == "auto":
        raise ConfigError("model.dtype='auto' takes the dtype of saved weights, but model.config has none: use float32")
    kind, arguments = config_arguments(model)
    if AutoConfig.for_model(kind).is_encoder_decoder:
        arguments.setdefault("decoder_start_token_id", tokenizer.pad_token_id)
    arguments.setdefault("vocab_size", len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        arguments.setdefault(token, getattr(tokenizer, token))
    if model.tie_word_embeddings is not None:
        arguments["tie_word_embeddings"] = model.tie_word_embeddings
    try:
        config: PreTrainedConfig = AutoConfig.for_model(kind, **{**arguments, **labels})
        return AUTO_MODEL[model.task].from_config(config, dtype=DTYPES[model.dtype], **NO_CODE)
    except _UNBUILDABLE as error:
        raise ConfigError(f"model.config: {one_line(error)}") from error


def _set_tying(base: PreTrainedModel, model: ModelConfig) -> None:
    """Tie or untie head and input embedding, as the recipe requires, without changing the model's function."""
    wanted = model.tie_word_embeddings
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if wanted is None or wanted == tied:
        return
    if wanted:
        raise ConfigError(
            "model.tie_word_embeddings=true would discard the untied head of this pretrained model: leave it out"
        )
    if model.task != "causal_lm":
        raise ConfigError(f"model.tie_word_embeddings=false is for causal_lm only: leave it out for {model.task}")
    head.weight = nn.Parameter(head.weight.detach().clone())
    base.config.tie_word_embeddings = False
    base.all_tied_weights_keys = {}


def _max_positions(model: ModelConfig) -> int:
    config = model.config or {}
    for key in ("max_position_embeddings", "n_positions"):
        if key in config:
            return int(config[key])
    raise ConfigError("model.config needs max_position_embeddings, the longest row that the trained tokenizer may make")
