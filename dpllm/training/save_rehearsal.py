"""Rehearse saving, loading and generating before a run's first step, and wait for disk space at its end.

`dpllm.DPTrainer` calls `rehearse` before the ledger is opened. Whatever only a save, a load or a first generated token
would reveal is then an error while nothing is charged. After the training the weights exist only in memory and have
cost all ε, so `until_there_is_room` waits if the disk is full.

The rehearsal reads no private row. It writes into a folder inside the output folder, which it removes, and restores the
model's weights, buffers and modes and all random states. The written amount is bounded: an adapter is saved
whole, a larger model with those of its layers that fit into `WHOLE_UP_TO`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging as transformers_logging

from dpllm.config import TASKS, ConfigError
from dpllm.config.output_folder import REPORTS, size_in_words
from dpllm.models.inputs import model_pad_id, num_positions
from dpllm.models.load import NO_CODE, changes_of_base, load_adapter, one_line
from dpllm.models.merging import merged
from dpllm.models.start_weights import new_heads
from dpllm.models.tasks import is_of_transformers, loading_class, task_of

logger = transformers_logging.get_logger(__name__)

WHOLE_UP_TO = 256 * 1024**2
"""A model of at most this many bytes is saved and loaded whole; of a larger one, layers of this size are saved."""
SAVED_STATE = {"adamw_torch": 2, "adamw_torch_fused": 2, "adafactor": 0, "sgd": 0}
"""Numbers that a checkpoint stores for each trained parameter, by ``args.optim``; for others none are counted."""
_TEXT = "The people read."
_PAUSE = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
Save = Callable[[str, dict[str, Any] | None], None]
"""Saves the model with a state into a folder, as the end of the run does; None: the model's own state."""


def rehearse(
    model: Any,
    save: Save,
    args: TrainingArguments,
    tokenizer: Any = None,
    merges: bool = False,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> str:
    """Save an untrained model, load it as its card will describe, and generate a token; for one process.

    Args:
        model: model to train; not yet distributed.
        save: saves it as the end of the run will.
        args: arguments of the training.
        tokenizer: tokenizer saved with the model. None: there is none.
        merges: whether the run also writes the model with its adapter merged.
        context: context in which the model computes, such as autocast.

    Returns:
        A description of what was done.

    Raises:
        ConfigError: saving, loading or generating fails; the message has the cause and the remedy.
    """
    model = getattr(model, "_orig_mod", model)
    if not is_whole(model):
        return "saving was not rehearsed, since the model is sharded over processes"
    folder = Path(str(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    with (
        _untouched(model),
        quiet(),
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(prefix=".rehearsal-", dir=folder) as place,
    ):
        warnings.simplefilter("ignore")  # the save at the end shows them
        saved = Path(place) / "model"
        state = _part_of_state(model)
        with _stage(lambda error: _cause(error, model, tokenizer, args, Path(place) / "cause")):
            save(str(saved), state)
        with _stage(lambda error: (f"the adapter cannot be merged: {_words(error)}", "Leave merge_adapter out")):
            if merges:
                _save_merged(model, tokenizer, Path(place) / "merged")
        done.append("saved")
        _require_all_saved(model)
        with _stage(lambda error: (f"what was saved cannot be loaded: {_words(error)}", _AS_PUBLISHED)):
            if _loads(model, saved, whole=state is None):
                done.append("loaded")
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            with _stage(lambda error: (f"the saved tokenizer cannot be loaded: {_words(error)}", _OTHER_TOKENIZER)):
                _load_tokenizer(tokenizer, saved)
        with context():
            done.append(_one_output(model, tokenizer, args.per_device_train_batch_size))
    return f"rehearsal: {', '.join(done)}"


_AS_PUBLISHED = "Compare the model's configuration with that of its published files, and correct it"
_OTHER_TOKENIZER = "Use a tokenizer that from_pretrained loads unchanged after save_pretrained"


@contextlib.contextmanager
def _stage(cause: Callable[[Exception], tuple[str, str]]) -> Iterator[None]:
    """Turn an error of the block into one sentence with its cause and one with the remedy."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any: libraries raise arbitrary errors, and nothing is charged yet
        what, remedy = cause(error)
        raise ConfigError(f"The run would have no result: {what}. {remedy}. Nothing was charged") from error


def _words(error: Exception) -> str:
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)}"


def _cause(error: Exception, model: Any, tokenizer: Any, args: Any, place: Path) -> tuple[str, str]:
    """Find the part that cannot be saved: each is saved alone."""
    inner = _inside(model)
    parts = [
        ("model.generation_config", getattr(inner, "generation_config", None), "Correct this value in it"),
        ("model.config", getattr(inner, "config", None), "Correct this value in it"),
        ("the tokenizer", tokenizer, _OTHER_TOKENIZER),
    ]
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        return f"processing_class is of type {type(tokenizer).__name__}, without save_pretrained", _OTHER_TOKENIZER
    for name, part, remedy in parts:
        if hasattr(part, "save_pretrained"):
            try:
                part.save_pretrained(str(place))
            except Exception as found:  # any, as above
                return f"{name} cannot be saved: {_words(found)}", remedy
    try:
        pickle.dumps(args)
    except Exception as found:  # any: an attribute of a user's class
        return f"the training arguments cannot be saved: {_words(found)}", "Remove the value that cannot be pickled"
    if isinstance(error, RuntimeError) and "share" in str(error):
        remedy = "Copy one of them (nn.Parameter(weight.clone())), or name them in the class's _tied_weights_keys"
        return f"weights that several layers share cannot be saved: {_words(error)}", remedy
    return f"the weights cannot be saved: {_words(error)}", "Give the model weights that safetensors can write"


# ------------------------------------------------------------------------ saving


def is_whole(model: nn.Module) -> bool:
    """Return whether this process has all weights of a model; with ZeRO-3 even a model that it loads is sharded."""
    return not is_deepspeed_zero3_enabled() and not any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") or parameter.is_meta
        for parameter in model.parameters()
    )


def _inside(model: Any) -> Any:
    """Return the model below an adapter, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _part_of_state(model: nn.Module) -> dict[str, Any] | None:
    """Return the smallest layers of a large model, and all weights that share memory; None: the model is saved whole.

    The layers of a block stay together, since transformers joins their weights for some models when it saves them.
    """
    if isinstance(model, PeftModel) or _size(model.parameters()) <= WHOLE_UP_TO:
        return None
    state, blocks, places = model.state_dict(), dict[str, list[str]](), dict[Any, list[str]]()
    for name, value in state.items():
        parts = name.split(".")
        first = next((number for number, part in enumerate(parts) if part.isdigit()), len(parts))
        blocks.setdefault(".".join(parts[: first + 1]), []).append(name)
        if isinstance(value, Tensor):
            places.setdefault((value.device, value.untyped_storage().data_ptr()), []).append(name)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    declared = {*tied, *tied.values()}
    kept = {name for names in places.values() if len(names) > 1 and not declared.issuperset(names) for name in names}
    room = WHOLE_UP_TO
    for names in sorted(blocks.values(), key=lambda names: _sizes_of(state, names)):
        room -= _sizes_of(state, names)
        kept |= set(names) if room >= 0 else set()
    return {name: state[name] for name in state if name in kept}


def _sizes_of(state: Mapping[str, Any], names: list[str]) -> int:
    return _size(state[name] for name in names if isinstance(state[name], Tensor))


def _save_merged(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save the parts of a merged model; its weights only if a copy of them is small."""
    if _size(model.parameters()) <= WHOLE_UP_TO:
        merged(model).save_pretrained(folder)
    else:
        base = model.get_base_model()
        base.config.save_pretrained(folder)
        if base.can_generate():
            base.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _require_all_saved(model: Any) -> None:
    """Refuse trained or new weights next to an adapter that are not saved with it.

    Raises:
        ConfigError: there are such weights.
    """
    if not isinstance(model, PeftModel) or model.active_peft_config.is_prompt_learning:
        return
    states = [get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config]
    state = {name: value for one in states for name, value in one.items() if isinstance(value, Tensor)}
    places = {value.untyped_storage().data_ptr() for value in state.values()}
    prefix = getattr(model.base_model, "prefix", "") or "lora_"
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and prefix not in name and parameter.untyped_storage().data_ptr() not in places
    ]
    if lost:
        raise ConfigError(
            f"{lost[0]} is trained, and PEFT saves only the adapter, without it ({len(lost)} such weights). Freeze it, "
            "or name its module in modules_to_save of the adapter's configuration. Nothing was charged"
        )
    task = task_of(_inside(model))
    heads = new_heads(model) if task is not None and TASKS[task].labels != "text" else []
    if lost := [name for name in heads if prefix not in name and f"base_model.model.{name}" not in state]:
        raise ConfigError(
            f"{lost[0]} is new, but PEFT saves only the adapter, so each load would make another one. Name "
            "its module in modules_to_save of the adapter's configuration. Nothing was charged"
        )


# ----------------------------------------------------------------------- loading


def _loads(model: Any, folder: Path, whole: bool) -> bool:
    """Load the files of a model as its card describes, and compare; False: this needs the model's own code.

    Raises:
        ConfigError: the loaded weights differ from the saved ones.
    """
    inner = _inside(model)
    if not isinstance(inner, PreTrainedModel) or not is_of_transformers(inner):
        return False
    kind: Any = getattr(transformers, loading_class(inner))
    if isinstance(model, PeftModel):
        return _loads_adapter(model, kind, folder)
    if not whole:
        config = AutoConfig.from_pretrained(str(folder), **NO_CODE)
        with torch.device("meta"):
            made = _made_of(kind, config)
        _require_same_names(_trained(model), made.state_dict())
        return True
    loaded, info = kind.from_pretrained(str(folder), dtype="auto", output_loading_info=True, **NO_CODE)
    wrong = [str(key) for name in ("missing_keys", "mismatched_keys") for key in sorted(info.get(name) or (), key=str)]
    if wrong:
        raise ValueError(f"the files of the model lack {wrong[0]}, which would be random after loading")
    if getattr(model, "hf_quantizer", None) is None:
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        _require_equal(_trained(model), loaded.state_dict(), padding)
    return True


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights, including those with two names; others belong to the public start."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: value.detach() for name, value in named if value.requires_grad}


def _loads_adapter(model: PeftModel, kind: Any, folder: Path) -> bool:
    name, inner = model.active_adapter, _inside(model)
    config: Any = model.peft_config.get(name) if isinstance(name, str) else None
    if config is None or len(model.peft_config) > 1 or config.is_prompt_learning:
        return False
    if getattr(inner, "hf_quantizer", None) is not None:
        return False  # its layers cannot be made without a device
    arguments, added = changes_of_base(model)
    if added is not None and getattr(config, "trainable_token_indices", None):
        return False  # PEFT needs the base's values below tokens that were added
    try:
        base_config = AutoConfig.from_pretrained(config.base_model_name_or_path or "", **NO_CODE, **arguments)
    except Exception:  # any: the base was made from a configuration, or moved; only its own configuration exists
        base_config = inner.config
    with torch.device("meta"):
        base = _made_of(kind, base_config)
    place = folder if name == "default" else folder / str(name)
    loaded = load_adapter(base, place, torch_device="cpu", low_cpu_mem_usage=True)
    rows = [getattr(one.get_input_embeddings(), "num_embeddings", None) for one in (inner, _inside(loaded))]
    if rows[0] != rows[1]:
        raise ValueError(
            f"the embedding has {rows[0]} rows here but {rows[1]} in the base model's files, and the adapter does not "
            "hold the added ones (name the embedding in modules_to_save)"
        )
    _require_same_names(get_peft_model_state_dict(model, adapter_name=str(name)), get_peft_model_state_dict(loaded))
    return True


def _made_of(kind: Any, config: Any) -> Any:
    return kind.from_config(config, **NO_CODE) if kind.__name__.startswith("Auto") else kind(config)


def _require_same_names(saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    for name, value in saved.items():
        if name not in loaded:
            raise ValueError(f"{name} is not loaded")
        if isinstance(value, Tensor) and value.shape != loaded[name].shape:
            raise ValueError(f"{name} has the shape {tuple(value.shape)} here but {tuple(loaded[name].shape)} there")


def _require_equal(saved: Mapping[str, Any], loaded: Mapping[str, Any], padding: int | None = None) -> None:
    """Compare weights; some classes set an embedding's row of the padding to zero when they are loaded."""
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            continue
        other = loaded.get(name)
        if other is None or other.is_meta:
            raise ValueError(f"{name} is not loaded")
        differs = value.detach().to(device="cpu", dtype=other.dtype) != other.detach().cpu()
        if differs.dim() == 2 and padding is not None and 0 <= padding < len(differs):
            differs[padding] = False
        if differs.any():
            raise ValueError(f"{name} has different values after loading")


def _load_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    own = not type(tokenizer).__module__.startswith("transformers.")
    kind: Any = type(tokenizer) if own else AutoTokenizer
    loaded = kind.from_pretrained(str(folder), **NO_CODE)
    ids = [one(_TEXT, add_special_tokens=True)["input_ids"] for one in (tokenizer, loaded)]
    if ids[0] != ids[1] or len(tokenizer) != len(loaded):
        raise ValueError("it makes different tokens from the same text after loading")


# ------------------------------------------------------------------------ output


@torch.no_grad()
def _one_output(model: Any, tokenizer: Any, rows: int) -> str:
    """Let the model answer a public text, and return a description of what it did.

    Some models need more than a text, such as an image, which a user's program passes to them. A model that
    returns no output is therefore only reported; it is refused if its own generation configuration is the reason.

    Raises:
        ConfigError: it generates text, but not with its generation configuration; or it classifies one row but not
            several, since it has no padding token.
    """
    inner, task = _inside(model), task_of(model)
    if task is None or getattr(inner, "main_input_name", "input_ids") != "input_ids":
        return "no output tried"
    ends = getattr(inner.config, "eos_token_id", None)
    ids = tokenizer(_TEXT)["input_ids"] if isinstance(tokenizer, PreTrainedTokenizerBase) else []
    ids = ids or [0, *(ends if isinstance(ends, list) else [] if ends is None else [ends])[:1]]
    ids = ids[-((num_positions(inner) or len(ids) + 1) - 1) :]  # leaves room for a token
    ids_1T = torch.tensor([ids], device=next(model.parameters()).device)
    inputs = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
    model.eval()
    writes = TASKS[task].labels == "text"
    if writes and not inner.can_generate():
        return "no token generated, since its class cannot generate"
    try:
        if writes:
            model.generate(**inputs, max_new_tokens=1, disable_compile=True)
            return "one token generated"
        model(**inputs)
        if rows > 1 and model_pad_id(inner) is None and getattr(tokenizer, "pad_token_id", None) is None:
            _classify_two(model, inputs)
        return "one row classified"
    except (ConfigError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any, as above
        if writes and _writes_by_default(model, inputs):
            raise ConfigError(
                f"The run would have no result: with its model.generation_config the model cannot generate text: "
                f"{_words(error)}. Correct this value in it. Nothing was charged"
            ) from error
        return f"no output for a text ({_words(error)[:120]})"


def _classify_two(model: Any, inputs: Mapping[str, Tensor]) -> None:
    try:
        model(**{name: value.repeat(2, 1) for name, value in inputs.items()})
    except Exception as error:  # any, as above
        raise ConfigError(
            "model.config.pad_token_id is None, but without it the classifier cannot take several rows "
            f"({_words(error)}): set model.config.pad_token_id = tokenizer.pad_token_id. Nothing was charged"
        ) from error


def _writes_by_default(model: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Return whether a model generates text with a generation configuration that only names its tokens."""
    own = model.generation_config
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    tokens = {name: getattr(own, name, None) for name in names}
    config = GenerationConfig(max_new_tokens=1, do_sample=False, num_beams=1, **tokens)
    with contextlib.suppress(Exception):  # any: then its configuration is not the reason
        model.generate(**inputs, generation_config=config)
        return True
    return False


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore the random states and every module's training mode."""
    modes = [(module, module.training) for module in model.modules()]
    numpy_state, python_state = np.random.get_state(), random.getstate()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            for module, mode in modes:
                module.training = mode


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages about files that are deleted again, and restore the log levels."""
    own = logging.getLogger("dpllm")
    level, verbosity = own.level, transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    own.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        own.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# -------------------------------------------------------------------------- room


def bytes_to_write(
    model: nn.Module, args: TrainingArguments, num_steps: int, merges: bool, seals_start: bool = False
) -> int:
    """Return the smallest number of bytes that a run writes: its model, the merged one, checkpoints and reports.

    Args:
        model: model to train.
        args: arguments of the training.
        num_steps: T.
        merges: whether the model is also written with its adapter merged.
        seals_start: whether the weights before the first step are saved. The first checkpoint replaces them, so they
            count only where no checkpoint is expected.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    whole = _size(model.parameters())
    saved = _size(trained) if isinstance(model, PeftModel) else whole
    every = args.save_steps if args.save_steps >= 1 else max(1, round(args.save_steps * num_steps))
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    count = {"steps": num_steps // int(every), "epoch": 1}.get(strategy, 0)
    if args.save_total_limit:
        count = min(count, args.save_total_limit + 1)  # a new one is complete before an old one is deleted
    kept = SAVED_STATE.get(str(getattr(args.optim, "value", args.optim)), 0) * (not args.save_only_model)
    start = saved if seals_start and not count else 0
    return REPORTS + saved + start + (whole if merges else 0) + count * (saved + kept * _size(trained))


def until_there_is_room(
    write: Callable[[], None], folder: Path, needed: int, spare: Callable[[Path], None] | None
) -> None:
    """Write the results of a run; if the disk is full, keep a copy elsewhere and try again until there is room.

    The steps are charged, and only this process has the weights. It waits without limit, since ending it loses them.

    Args:
        write: writes the results; it may be called again after a failure.
        folder: the folder that is written to.
        needed: bytes that will be written there.
        spare: writes the weights into another folder; None: this process does not have them all.
    """
    copy, told, before = None, False, _weights_in(folder)
    try:
        while True:
            try:
                write()
                return
            except Exception as error:  # any: safetensors raises its own error on a full disk
                if not is_full(error):
                    raise
            for path, state in _weights_in(folder).items():
                if before.get(path) != state:  # it is incomplete, and fills the disk
                    path.unlink(missing_ok=True)
            if not told:
                copy, told = _spare_copy(folder, needed, spare), True
                kept = (
                    f"A copy of the trained weights is in {copy}"
                    if copy is not None
                    else "The trained weights are only in this process's memory, and ending it loses them"
                )
                logger.error(
                    "The disk of %s is full, and %s are needed. All steps of the run are charged. %s. Free some space; "
                    "the files are then written automatically",
                    *(folder, size_in_words(needed), kept),
                )
            time.sleep(_PAUSE)
    except BaseException:
        copy = None  # the copy is no longer needed
        raise
    finally:
        if copy is not None:
            shutil.rmtree(copy, ignore_errors=True)


def _weights_in(folder: Path) -> dict[Path, tuple[int, int]]:
    paths = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return {path: ((status := path.stat()).st_mtime_ns, status.st_size) for path in paths}


def is_full(error: BaseException) -> bool:
    """Return whether an error means that a disk is full or a quota is used up."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    words = str(error)
    return any(f"os error {number}" in words or os.strerror(number) in words for number in _FULL)


def _spare_copy(folder: Path, needed: int, spare: Callable[[Path], None] | None) -> Path | None:
    """Write the weights to another disk, and return the place; None: no other disk has room for them."""
    if spare is None:
        return None
    disk = os.stat(folder).st_dev
    in_memory = {part.mountpoint for part in psutil.disk_partitions(all=True) if part.fstype in ("tmpfs", "ramfs")}
    for parent in (Path(tempfile.gettempdir()), Path.home(), Path.cwd()):
        with contextlib.suppress(Exception):  # any: the next place, or none
            mount = next(str(place) for place in (parent.resolve(), *parent.resolve().parents) if place.is_mount())
            if os.stat(parent).st_dev == disk or mount in in_memory or shutil.disk_usage(parent).free < 2 * needed:
                continue
            place = Path(tempfile.mkdtemp(prefix="dpllm-weights-", dir=parent))
            try:
                spare(place)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            return place
    return None
