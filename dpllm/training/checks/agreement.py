"""Facts that must be identical on every process, since they determine its computation.

Place in the flow: beside `dpllm.training.run`, which compares them (`dpllm.engines.processes.Processes.agree`):
software and rows when a run begins, training arguments before data are read, model and optimizer when they are
attached. All facts are texts or numbers that do not depend on Python's hash seed or on memory addresses.
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
_COLLATED = 8
"""Rows that are also compared after collation. The rows themselves and the collator's code and settings are compared
already, so this finds a collator that works differently on one machine: another tokenizer, another padding token. Such
a difference shows in the first rows with padding or special tokens, and every call is one of the user's own function.
"""
_TOKENS = 1 << 25  # most tokens compared, which takes seconds; of larger data, evenly spaced rows are compared
_FETCHED = 1024  # rows fetched together
_STATE = 0  # of the random generators: transforms and collators that draw numbers are compared from one state
_DEEPEST, _DEEPEST_UNKNOWN = 4, 2
_OWN = re.compile("^_|rank|process|pid|path|time")  # attributes of unknown objects that may differ between processes
# Training arguments that name places or set how a process reports, and do not influence the computation.
_OF_ONE_PROCESS = {
    *("output_dir", "logging_dir", "run_name", "report_to", "disable_tqdm", "log_level", "log_level_replica"),
    *("log_on_each_node", "logging_nan_inf_filter", "local_rank", "hub_token", "hub_model_id", "push_to_hub"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "trackio_space_id", "project"),
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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
    parameters = list(model.parameters())
    config = getattr(model, "config", None)
    return {
        "the devices of the parameters": described({_device(p) for p in parameters}),
        "the dtypes of the parameters": _hash(repr([str(p.dtype) for p in parameters])),
        "the attention implementation": str(getattr(config, "_attn_implementation", None)),
        "the model's class": f"{type(model).__module__}.{type(model).__qualname__}",
        "mixed precision": _mixed_precision(),
        "the precision of float32 products": _float32_precision(),
        **_optimizer(optimizer),
    }


def rows(
    units: UnitIndex,
    lengths: np.ndarray,
    fetch: Callable[[np.ndarray], Sequence[Any]],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    limits: Mapping[str, Any],
    hash_of_contents: str,
) -> dict[str, Any]:
    """Return facts of a run's rows, their units and their microbatches, and of eight rows after collation.

    Args:
        units: index of the rows of each unit.
        lengths: (num_rows,) tokens of every row.
        fetch: row numbers to rows.
        collate: rows to the model's inputs.
        limits: the bounds of a microbatch, by name.
        hash_of_contents: hash of the rows (`contents`).
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

    Args:
        lengths: (num_rows,) tokens of every row.
        fetch: row numbers to rows.
    """
    digest = hashlib.sha256()
    with same_randomness(_STATE):
        for _, row in _read(lengths, fetch):
            _add(digest, row)
    digest.update(str(len(lengths)).encode())
    return digest.hexdigest()


def first_with_other_columns(lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]]) -> int | None:
    """Return the number of the first row whose columns are not those of the first one; None: there is none.

    Args:
        lengths: (num_rows,) tokens of every row.
        fetch: row numbers to rows; the rows of `contents` are read.
    """
    return _first_other(lengths, fetch, lambda row: frozenset(row) if isinstance(row, Mapping) else None)


def first_with_other_counts(
    lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]], tokens: Sequence[int]
) -> int | None:
    """Return the number of the first row that has more or fewer of these tokens than row 0; None: there is none.

    Args:
        lengths: (num_rows,) tokens of every row.
        fetch: row numbers to rows; the rows of `contents` are read.
        tokens: ids of tokens, in ``input_ids``.
    """

    def count(row: Any) -> int:
        return int(np.isin(row["input_ids"], tokens).sum()) if isinstance(row, Mapping) and "input_ids" in row else 0

    return _first_other(lengths, fetch, count)


def _first_other(
    lengths: np.ndarray, fetch: Callable[[np.ndarray], Sequence[Any]], of: Callable[[Any], Any]
) -> int | None:
    """Return the number of the first row of which something is not what it is of row 0."""
    first: list[Any] = []
    with same_randomness(_STATE):
        for number, row in _read(lengths, fetch):
            found = of(row)
            if found != (first := first or [found])[0]:
                return number
    return None


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
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        _add(digest, value.tolist())
    else:
        digest.update(described(value).encode())


@functools.cache
def _name_of(kind: np.dtype) -> str:
    """Return the name of a kind of numbers; numpy takes longer to make it than to hash a short row."""
    return str(kind)


def _numbers(value: Any) -> np.ndarray | None:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


def described(value: Any, depth: int = 0) -> str:
    """Return a text that is equal for objects with equal settings.

    Primitive values, containers, data classes and functions are described completely, to a depth of 4. Other objects
    are described by their class and, to a depth of 2, by public attributes with primitive values. The order of sets and
    memory addresses have no influence.

    >>> described({"b", "a"}), described(len)
    ("{'a', 'b'}", 'builtins.len')
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Tensor | np.ndarray):
        digest = hashlib.sha256()
        _add(digest, value)
        return f"{type(value).__name__} {digest.hexdigest()[:12]}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if depth > _DEEPEST:
        return type(value).__qualname__
    return _described_whole(value, depth)


def _described_whole(value: Any, depth: int) -> str:
    def inner(item: Any) -> str:
        return described(item, depth + 1)

    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{inner(name)}: {inner(item)}" for name, item in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inner, value)) + "]"
    if isinstance(value, functools.partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    if inspect.ismethod(value):
        return f"{inner(value.__func__)} of {inner(value.__self__)}"
    if inspect.isroutine(value):
        return _described_function(value, inner)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    else:
        attributes = getattr(value, "__dict__", {}) if depth < _DEEPEST_UNKNOWN else {}
        fields = {key: item for key, item in attributes.items() if _is_setting(item) and not _OWN.search(key)}
    return f"{name}({', '.join(f'{key}={inner(item)}' for key, item in sorted(fields.items()))})"


def _is_setting(value: Any) -> bool:
    """Return whether an attribute of an unknown object is a setting, rather than a cache or a handle."""
    return value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum | torch.dtype)


def _described_function(function: Any, inner: Callable[[Any], str]) -> str:
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(inner(cell.cell_contents))
        except ValueError:  # not filled yet
            cells.append("empty")
    constants = [item for item in code.co_consts if _is_setting(item)]
    parts = [code.co_code.hex(), repr(constants), repr(code.co_names), inner(function.__defaults__), *cells]
    return f"{name} {_hash(' '.join(parts))}"


def _optimizer(optimizer: Any) -> dict[str, str]:
    base = innermost(optimizer)
    facts = {"the optimizer": f"{type(base).__module__}.{type(base).__qualname__}"}
    groups = getattr(base, "param_groups", [])
    for name in sorted({key for group in groups for key in group} - {"params"}):
        facts[f"the optimizer's {name}"] = described([group.get(name) for group in groups])
    return facts


def _mixed_precision() -> str:
    """Return accelerate's mixed precision, also on one process of several."""
    from accelerate.state import AcceleratorState

    return str(AcceleratorState._shared_state.get("_mixed_precision", "none"))


def _float32_precision() -> str:
    kinds: dict[str, Any] = {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn}
    return ", ".join(f"{name} {getattr(kind, 'fp32_precision', '?')}" for name, kind in kinds.items())


def _device(parameter: Tensor) -> str:
    if parameter.device.type != "cuda":
        return parameter.device.type
    return f"cuda ({torch.cuda.get_device_name(parameter.device)})"


def _hash(text: str) -> str:
    return hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:12]
