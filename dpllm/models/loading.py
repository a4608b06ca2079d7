"""Load a pretrained model from a folder or the Hub, and refuse one that does not match its configuration.

Place in the flow: below `dpllm.models.load`. transformers fills parts that are missing from the weights with random
numbers, and drops parts that are missing from the configuration; it only logs a line. Here both are errors, except for
the new head of a classifier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_OFFLINE
from peft import LoraConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from dpllm.config import TASKS
from dpllm.config.hub import refuse_lfs_pointer
from dpllm.config.values import ConfigError, nearest
from dpllm.models.tasks import task_of

NO_CODE = {"trust_remote_code": False}
"""Argument of every ``from_pretrained``: by default transformers asks on a terminal whether to run a folder's code."""
_SHOWN = 3
_POINTER = 1024  # bytes: a git-lfs pointer has fewer
_ADAPTER, _CONFIG = "adapter_config.json", "config.json"


def load_pretrained(auto: Any, name: str, new_head: bool, **options: Any) -> Any:
    """Return ``auto.from_pretrained(name, **options)``, complete.

    Args:
        auto: a class of transformers, such as ``AutoModelForCausalLM``.
        name: a folder, or a name on the Hub.
        new_head: whether the task's head may be new (a classifier on a language model).
        options: of ``from_pretrained``. Code in the folder does not run unless ``trust_remote_code`` is true.

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
        model: as loaded.
        info: ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys`` of transformers.
        name: of the folder, for the message.
        new_head: whether parts outside the base model may be new or left over.

    Raises:
        ConfigError: parts would be random, or are not used.
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
            (unexpected, "parameters in the files have no place in the model"),
            (mismatched, "parameters have another shape in the files"),
        )
        if keys
    ]
    if found:
        raise ConfigError(
            f"the model {name!r} does not match its config.json ({type(model).__name__}): {'; '.join(found)}. Give a "
            "folder whose config.json belongs to its weights, or the task that it was saved for (model.task)"
        )


def load_adapter(base: Any, folder: str | Path, **options: Any) -> PeftModel:
    """Return a model with the adapter of a folder, also where the adapter was trained with added tokens.

    Args:
        base: the model below the adapter, with the tokens that it was published with; it is changed.
        folder: of the adapter.
        options: of ``PeftModel.from_pretrained``.
    """
    rows, table = _embedding_rows(base, Path(folder)), base.get_input_embeddings()
    if rows is not None and rows != table.num_embeddings:
        base.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has all rows
    adapted: PeftModel = PeftModel.from_pretrained(base, str(folder), **options)
    return adapted


def _embedding_rows(base: nn.Module, folder: Path) -> int | None:
    """Return the number of tokens in the embedding that an adapter's file holds; None: it holds none."""
    path, table = folder / SAFETENSORS_WEIGHTS_NAME, base.get_input_embeddings()  # type: ignore[operator]
    place = next((name for name, module in base.named_modules() if module is table), None)
    if place is None or not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        parts = (".weight", ".base_layer.weight", ".token_adapter.base_layer.weight")
        names = {f"base_model.model.{place}{part}" for part in parts} & set(file.keys())
        return int(file.get_slice(min(names)).get_shape()[0]) if names else None


def changes_of_base(model: Any) -> tuple[dict[str, Any], int | None]:
    """Return what an adapter's files lack and its model card states: how the model below it differs from its files.

    Args:
        model: with an adapter.

    Returns:
        The arguments of ``from_pretrained`` that give the base model its head, its classes and its padding, and the
        number of rows of its embedding if tokens were added (None: there are as many as in its files).
    """
    inner = model.get_base_model()
    config: Any = getattr(inner, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return {}, None
    name = model.active_peft_config.base_model_name_or_path
    try:
        saved: Any = AutoConfig.from_pretrained(name, **NO_CODE) if name else None
    except Exception:  # any: the model is not there, or its configuration is that of somebody's own class
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
    """Whether a name can only be that of a folder: a Hub id is ``name`` or ``owner/name``, and begins with a letter.

    >>> [is_path(name) for name in ("./model", "~/model", "/models/gpt2", "a/b/c", "models/", "openai-community/gpt2")]
    [True, True, True, True, True, False]
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or name.endswith("/")


def require_folder(what: str, name: str) -> None:
    """Make sure that a name which can only be a path is that of a folder with a model; nothing is loaded.

    Args:
        what: "model" or "tokenizer", for the message.
        name: of a recipe.

    Raises:
        ConfigError: there is no such folder, it is a file, or it holds only an adapter or git-lfs pointers.
    """
    folder = Path(name)
    if folder.is_file():
        raise ConfigError(f"the {what} {name!r} cannot be loaded: it is a file. Give the folder that holds it")
    if not folder.is_dir() and is_path(name):
        whole = folder.expanduser()
        remedy = f"Write the whole path, {whole}" if whole.is_dir() else "Correct it, or give a Hub id (owner/name)"
        raise ConfigError(
            f"the {what} {name!r} cannot be loaded: there is no such folder (seen from {Path.cwd()}). {remedy}"
        )
    if what == "model" and (folder / _ADAPTER).is_file() and not (folder / _CONFIG).is_file():
        raise ConfigError(
            f"the model {name!r} cannot be loaded: the folder holds a LoRA adapter and not a whole model. Give the "
            "model that it was trained on"
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
            f"the {what} {name!r} holds code of its own (auto_map in its config.json), which runs only if you ask for "
            "it. Read the .py files beside it, then set model.trust_remote_code=true (DPSFTTrainer, DPDPOTrainer: "
            "args.trust_remote_code), or take a model whose class is part of transformers"
        )
    local = Path(name).is_dir()
    offline = " (HF_HUB_OFFLINE is set: only files in the cache are found)" if HF_HUB_OFFLINE else ""
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    if local:
        return ConfigError(
            f"the {what} {name!r} cannot be loaded: {kind}{one_line(error)}. Its files are damaged or do not belong "
            "together (config.json, weights, tokenizer files): copy the folder again"
        )
    return ConfigError(
        f"the {what} {name!r} cannot be loaded{offline}: no folder here has this name, and the Hub does not give it: "
        f"{kind}{one_line(error)}. Give a local folder, or a Hub name that can be reached"
    )


def check_adapter_names(base: nn.Module, config: LoraConfig, source: str = "model.adapter") -> None:
    """Make sure that every module that LoRA names is in the model; peft skips unknown names silently.

    Args:
        base: to which the adapter is added.
        config: describes the adapter.
        source: name of the description, for the message.

    Raises:
        ConfigError: no module ends in a given name.
    """
    names = [name for name, _ in base.named_modules() if name]
    for key in ("target_modules", "modules_to_save", "exclude_modules"):
        wanted = getattr(config, key)
        if wanted is None or isinstance(wanted, str):
            continue  # one text is "all-linear" or a pattern; peft itself refuses it without a match
        for module in wanted:
            if not any(name == module or name.endswith(f".{module}") for name in names):
                last = {name.rsplit(".", 1)[-1] for name in names}
                raise ConfigError(
                    f"{source}: {key} names '{module}', and the model has no such module"
                    f"{nearest(str(module), last) or '.'} Its modules end in {', '.join(sorted(last)[:12])}"
                )


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line, at most 300 characters."""
    return " ".join(str(error).split())[:300].rstrip(".")
