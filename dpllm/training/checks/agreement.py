"""Facts that must be identical on every process, since they determine its computation.

`dpllm.training.run` compares them (`dpllm.engines.processes.Processes.agree`): training arguments before data are read,
software and rows when a run begins, model and optimizer when they are attached. All facts are strings or numbers that
do not depend on Python's hash seed or on memory addresses.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dpllm
from dpllm.config.versions import installed_version
from dpllm.data.units import UnitIndex
from dpllm.engines.guard import innermost
from dpllm.training.checks.repeatable import same_randomness

_PACKAGES = ("numpy", "torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes")
_BLOCK = 1 << 20  # lengths hashed together
_SAMPLE = 256  # the smallest number of rows of large data to compare
_COLLATED = 8  # rows compared after collation, which detects a different tokenizer or padding token on one machine
_TOKENS = 1 << 25  # most tokens compared, which takes seconds; of larger data, evenly spaced rows are compared
_FETCHED = 1024  # rows fetched together
_STATE = 0  # seed of the random generators while rows are read, for transforms and collators that draw numbers
_PLAIN = (NoneType, bool, int, float, complex, str, bytes, enum.Enum, np.generic, torch.dtype, torch.device)
_OWN = re.compile("^_|rank|process|pid|path|time")  # attributes that may differ between processes
_name_of = functools.cache(str)  # NumPy takes longer to name a dtype than to hash a short row
# Training arguments that name places or set how a process reports, and do not influence the computation.
_OF_ONE_PROCESS = {
    *("output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "log_level", "log_level_replica"),
    *("log_on_each_node", "logging_nan_inf_filter", "local_rank", "hub_token", "hub_model_id", "push_to_hub"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "trackio_space_id", "project"),
}


def software() -> dict[str, str]:
    """Return the versions of the software, and a hash of dpllm's sources."""
    versions = {"the version of python": platform.python_version(), "the sources of dpllm": _hash_of_sources()}
    for package in _PACKAGES:
        versions[f"the version of {package}"] = installed_version(package) or "not installed"
    return versions


@functools.cache
def _hash_of_sources() -> str:
    digest = hashlib.sha256()
    folder = Path(dpllm.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def training(args: Any) -> dict[str, str]:
    """Return the options of a `TrainingArguments` that influence the computation, one fact per option."""
    options = [field.name for field in dataclasses.fields(args) if field.init and field.name not in _OF_ONE_PROCESS]
    facts = {f"train.{name}": described(getattr(args, name, None)) for name in options}
    return {**facts, "the kind of device": torch.device(args.device).type, "mixed precision": str(args.mixed_precision)}


def computation(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Return facts of a prepared model and its optimizer: devices, dtypes, attention, precision, hyperparameters.

    Args:
        model: the module inside the wrapper (`dpllm.engines.model_inside`).
        optimizer: the prepared optimizer; wrappers are removed.
    """
    from accelerate.state import AcceleratorState

    parameters, base = list(model.parameters()), innermost(optimizer)
    groups = getattr(base, "param_groups", [])
    names = sorted({name for group in groups for name in group} - {"params"})
    kinds: dict[str, Any] = {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn}
    return {
        "the devices of the parameters": described({_device(p) for p in parameters}),
        "the dtypes of the parameters": hashlib.sha256(repr([p.dtype for p in parameters]).encode()).hexdigest()[:12],
        "the attention implementation": str(getattr(getattr(model, "config", None), "_attn_implementation", None)),
        "the model's class": described(type(model)),
        "mixed precision": str(AcceleratorState._shared_state.get("_mixed_precision", "none")),
        "the precision of float32 products": described(
            {name: str(getattr(kind, "fp32_precision", "?")) for name, kind in kinds.items()}
        ),
        "the optimizer": described(type(base)),
        **{f"the optimizer's {name}": described([group.get(name) for group in groups]) for name in names},
    }


def _device(parameter: Tensor) -> str:
    if parameter.device.type != "cuda":
        return parameter.device.type
    return f"cuda ({torch.cuda.get_device_name(parameter.device)})"


def order(units: UnitIndex, lengths: np.ndarray) -> str:
    """Return a hash of the rows' units and lengths, which decide how draws are split into microbatches."""
    digest = hashlib.sha256()
    for block in units.blocks():
        digest.update(np.ascontiguousarray(block).data)
    for at in range(0, len(lengths), _BLOCK):
        digest.update(np.ascontiguousarray(lengths[at : at + _BLOCK], dtype=np.int64).data)
    return digest.hexdigest()[:12]


def contents(lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]]) -> str:
    """Return a hash of the rows in their order; it takes seconds.

    All rows are hashed if they have at most 2^25 tokens; of larger data, evenly spaced rows with this many tokens.
    """
    digest = hashlib.sha256()
    with same_randomness(_STATE):
        for _, row in _read(lengths, fetch):
            _add(digest, row)
    digest.update(str(len(lengths)).encode())
    return digest.hexdigest()


def first_other(
    lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]], of: Callable[[Any], Any]
) -> int | None:
    """Return the number of the first row for which `of` differs from row 0; None: there is none.

    The arguments are those of `contents`, which reads the same rows, and a function of a row.
    """
    with same_randomness(_STATE):
        values = ((number, of(row)) for number, row in _read(lengths, fetch))
        first = next(values, (0, None))[1]
        return next((number for number, value in values if value != first), None)


def _read(lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield all rows with their numbers if they have at most 2^25 tokens, or else evenly spaced ones with that many."""
    total = max(1, int(lengths.sum()))
    count = len(lengths) if total <= _TOKENS else max(_SAMPLE, len(lengths) * _TOKENS // total)
    numbers = _spaced(len(lengths), count)
    for at in range(0, len(numbers), _FETCHED):
        yield from zip(numbers[at : at + _FETCHED].tolist(), fetch(numbers[at : at + _FETCHED]), strict=True)


def collated(length: int, fetch: Callable, collate: Callable) -> str:
    """Return a hash of eight rows after collation, each collated separately.

    Raises:
        ConfigError: the collator does not return the inputs by name.
    """
    digest = hashlib.sha256()
    with same_randomness(_STATE):
        for number in _spaced(length, min(_COLLATED, length)):
            _add(digest, dict(collate(fetch(np.array([number])))))
    return digest.hexdigest()[:12]


def _spaced(length: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, count, dtype=np.int64))


def _add(digest: Any, value: Any) -> None:
    """Add a row or the inputs made from it to a hash."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(f"{name}:".encode())
            _add(digest, value[name])
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        own = value.detach().to_dense().cpu()
        own = own.clone(memory_format=torch.contiguous_format)  # one repeated number has stride 0
        digest.update(own.flatten().view(torch.uint8).numpy().data)
    elif (
        isinstance(value, list | tuple | np.ndarray | np.generic | int | float)
        and (array := _numbers(value)) is not None
    ):
        digest.update(f"{_name_of(array.dtype)}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    elif isinstance(value, np.ndarray):  # objects or text
        _add(digest, value.tolist())
    else:
        digest.update(described(value).encode())


def _numbers(value: Any) -> np.ndarray | None:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


def described(value: Any) -> str:
    """Return a text that is equal for objects with equal settings.

    Plain values, arrays, containers, data classes and partial functions are described completely; functions by their
    names; other objects by their class and public attributes with plain values. The order of sets has no influence.

    >>> described({"b", "a"}), described(functools.partial(len, key=1))
    ("{'a', 'b'}", "functools.partial(builtins.len, [], {'key': 1})")
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, type) or (inspect.isroutine(value) and not inspect.ismethod(value)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{described(key)}: {described(item)}' for key, item in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, Tensor | np.ndarray):
        digest = hashlib.sha256()
        _add(digest, value)
        parts = [digest.hexdigest()[:12]]
    elif isinstance(value, functools.partial):
        parts = list(map(described, (value.func, value.args, value.keywords)))
    elif inspect.ismethod(value):
        parts = list(map(described, (value.__func__, value.__self__)))
    elif dataclasses.is_dataclass(value):
        fields = sorted(field.name for field in dataclasses.fields(value))
        parts = [f"{name}={described(getattr(value, name, None))}" for name in fields]
    else:
        held = sorted(getattr(value, "__dict__", {}).items())
        parts = [f"{name}={item!r}" for name, item in held if isinstance(item, _PLAIN) and not _OWN.search(name)]
    return f"{described(type(value))}({', '.join(parts)})"
