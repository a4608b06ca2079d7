"""Facts that must be identical on every process, since they determine its computation.

Place in the flow: `dpllm.training.run` compares them (`dpllm.engines.processes.Processes.agree`). It compares training
arguments before data are read, software and rows when a run begins, model and optimizer when they are attached. All
facts are texts or numbers that do not depend on Python's hash seed or on memory addresses.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dpllm
from dpllm.config import ConfigError
from dpllm.config.versions import installed_version
from dpllm.data.units import ONE_ROW, UnitIndex
from dpllm.engines.optimizers import innermost
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.checks.repeatable import same_randomness

_PACKAGES = ("numpy", "torch", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes")
_BLOCK = 1 << 20  # lengths hashed together
_SAMPLE = 256  # the fewest rows that are compared of large data
_COLLATED = 8  # rows compared after collation, which finds another tokenizer or padding token on one machine
_TOKENS = 1 << 25  # most tokens compared, which takes seconds; of larger data, evenly spaced rows are compared
_FETCHED = 1024  # rows fetched together
_STATE = 0  # seed of the random generators while rows are read, for transforms and collators that draw numbers
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


def rows(
    units: UnitIndex,
    lengths: np.ndarray,
    fetch: Callable[[np.ndarray], Sequence[Any]],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    limits: Mapping[str, Any],
    hash_of_contents: str,
) -> dict[str, Any]:
    """Return facts of a run's rows, their units and their microbatches, and of eight rows after collation.

    The arguments are those of `dpllm.training.rows.TrainingRows`, the bounds of a microbatch by name, and `contents`.
    """
    order = hashlib.sha256()
    for block in units.blocks():
        order.update(np.ascontiguousarray(block).data)
    for at in range(0, len(lengths), _BLOCK):
        order.update(np.ascontiguousarray(lengths[at : at + _BLOCK], dtype=np.int64).data)
    return {
        "the number of units": units.num_units,
        "the number of rows": len(lengths),
        "the rows' lengths and units": order.hexdigest()[:12],
        **{f"the bound {name} of a microbatch": value for name, value in limits.items()},
        "the collator": described(collate),
        "the rows' contents or their order": hash_of_contents[:12],
        "the rows as the collator leaves them": collated(len(lengths), fetch, collate),
    }


def check_rows(plan: PrivacyPlan, units: UnitIndex) -> None:
    """Check that a plan was made for these rows.

    Args:
        plan: plan of the run.
        units: units of the rows.

    Raises:
        ConfigError: the plan's event would not describe the run.
    """
    bound = plan.max_rows_per_unit
    if units.num_units != plan.population:
        what = "rows to draw" if plan.sampling == "example" else "units"
        raise ConfigError(
            f"The plan is for {plan.population} {what}, but the data have {units.num_units}, so q would be different. "
            "Make the plan with make_plan from these data"
        )
    if plan.unit == "user" and units.made_of == ONE_ROW:
        raise ConfigError(
            f"The plan protects users (column {plan.unit_column!r}), but the index makes each row a unit "
            "(UnitIndex.one_row_per_unit): ε would hold only for a single row. Make the index with "
            "UnitIndex.from_ids(ids, max_rows_per_unit, column=...) from the users' ids"
        )
    if units.rows_per_owner > plan.event.moves:
        raise ConfigError(
            f"Up to {units.rows_per_owner} rows of one user are drawn separately, but the plan accounts for "
            f"{plan.event.moves}. Make both from the same max_rows_per_unit and sampling"
        )
    if plan.sampling == "unit" and bound is not None and units.max_rows > bound:
        raise ConfigError(
            f"A user has {units.max_rows} rows, but the plan allows at most {bound}. Make the index with "
            "UnitIndex.from_ids(ids, max_rows_per_unit)"
        )


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


def first_with_other_columns(lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]]) -> int | None:
    """Return the number of the first row whose columns differ from row 0's, of the rows that `contents` reads."""
    return _first_other(lengths, fetch, lambda row: frozenset(row) if isinstance(row, Mapping) else None)


def first_with_other_counts(
    lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]], tokens: Sequence[int]
) -> int | None:
    """Return the number of the first row with more or fewer of these ``input_ids`` than row 0; None: there is none."""

    def count(row: Any) -> int:
        return int(np.isin(row.get("input_ids", ()), tokens).sum()) if isinstance(row, Mapping) else 0

    return _first_other(lengths, fetch, count)


def _first_other(
    lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]], of: Callable[[Any], Any]
) -> int | None:
    """Return the number of the first row for which a function returns another value than for row 0, or None."""
    with same_randomness(_STATE):
        values = ((number, of(row)) for number, row in _read(lengths, fetch))
        first = next(values, (0, None))[1]
        return next((number for number, value in values if value != first), None)


def _read(lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield all rows with their numbers if they have at most 2^25 tokens; else evenly spaced ones with this many."""
    total = max(1, int(lengths.sum()))
    count = len(lengths) if total <= _TOKENS else max(_SAMPLE, len(lengths) * _TOKENS // total)
    numbers = _spaced(len(lengths), count)
    for at in range(0, len(numbers), _FETCHED):
        yield from zip(numbers[at : at + _FETCHED].tolist(), fetch(numbers[at : at + _FETCHED]), strict=True)


def collated(length: int, fetch: Callable, collate: Callable) -> str:
    """Return a hash of eight rows after collation, each by itself.

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
    """Add a row or the inputs made of it to a hash."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(f"{name}:".encode())
            _add(digest, value[name])
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        value = value.to_dense() if value.layout != torch.strided else value
        own = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # one repeated number has stride 0
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
    elif isinstance(value, np.ndarray):  # of objects or text
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
    ("{'a', 'b'}", "partial(builtins.len, [], {'key': 1})")
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if _is_plain(value) or isinstance(value, complex | torch.device):
        return repr(value)
    if isinstance(value, Tensor | np.ndarray):
        digest = hashlib.sha256()
        _add(digest, value)
        return f"{type(value).__name__} {digest.hexdigest()[:12]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{described(key)}: {described(item)}" for key, item in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(described, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(described, value)) + "]"
    if isinstance(value, functools.partial):
        return f"partial({', '.join(map(described, (value.func, value.args, value.keywords)))})"
    if inspect.ismethod(value):
        return f"{described(value.__func__)} of {described(value.__self__)}"
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    else:
        attributes = getattr(value, "__dict__", {})
        fields = {name: item for name, item in attributes.items() if _is_plain(item) and not _OWN.search(name)}
    return f"{described(type(value))}({', '.join(f'{name}={described(fields[name])}' for name in sorted(fields))})"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | torch.dtype)
