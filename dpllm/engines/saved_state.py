"""The state in a checkpoint, by parameter name, whichever engine wrote it.

`dpllm.training.continued_trainer` divides the state again for the engine of a resumed run. A reader maps the
checkpoint's files, or reads the requested entries; it changes nothing and needs no other process, so any number of
processes may read a checkpoint at the same time. No process holds more than one parameter at a time.

How a run on one engine continues a checkpoint of another engine is a table of all pairs. An engine is named by the
accelerate config that selects it (``dpllm train --config zero3``). `ways` makes the whole decision: either the code
that saved a checkpoint loads it, or its state is read parameter by parameter and divided again.
`dpllm.training.resume.checkpoint_to_resume` decides before anything is charged and before the model is sharded.

ZeRO divides float32 weights and optimizer state over the processes, so its files depend on their number and on the
stage. `ZeroState` maps the files of all ranks into memory and assembles a parameter from its parts on request.
DeepSpeed documents the layout in its own converter (deepspeed/checkpoint/ds_to_universal.py). That program supports
only two moments, needs twice the checkpoint's size on disk, and loading its output loses options of parameter groups,
step counts and frozen parameters. Here every part is counted: an unknown layout is an error, never a parameter that
silently lacks entries.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dpllm.engines.guard import EngineError
from dpllm.privacy.checkpoints import CheckpointError, made_by
from dpllm.privacy.run_folder import steps_of_weights

_TAG_FILE = "latest"  # DeepSpeed's names
_OPTIMIZER_SHARDS = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
_MODEL_SHARDS = "zero_pp_rank_*_mp_rank_00_model_states.pt"  # only ZeRO-3
_MODEL = "mp_rank_00_model_states.pt"  # ZeRO-1 and -2
_WEIGHT = "weight"  # the key of the weights, next to those of the optimizer's states
Part = tuple[Mapping[str, Any], int, int]  # the states of a flat group on a rank, first entry, number of entries


def is_zero_checkpoint(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint holds DeepSpeed's optimizer shards."""
    return any(_folder(Path(checkpoint)).glob(_OPTIMIZER_SHARDS))


def divides_parameters(checkpoint: str | Path) -> bool:
    """Return whether the compute weights are sharded too, which only ZeRO-3 does."""
    return any(_folder(Path(checkpoint)).glob(_MODEL_SHARDS))


def _folder(checkpoint: Path) -> Path:
    tag = checkpoint / _TAG_FILE
    return checkpoint / tag.read_text(encoding="utf-8").strip() if tag.is_file() else checkpoint


class ZeroState:
    """The state in a DeepSpeed checkpoint, as `dpllm.engines.saved_state.SavedState` describes it.

    Args:
        checkpoint: a complete checkpoint, verified by `dpllm.privacy.checkpoints`.

    Raises:
        EngineError: the files do not have the layout of ZeRO-1, -2 or -3.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        """Map the files and find the parts of every parameter."""
        self._checkpoint, self._shards = Path(checkpoint), _folder(Path(checkpoint))
        self._is_stage_3 = divides_parameters(checkpoint)
        self._parts: dict[str, list[Part]] = {}
        self.groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]] = []
        try:
            optimizers = [_read(path)["optimizer_state_dict"] for path in _by_rank(self._shards, _OPTIMIZER_SHARDS)]
            (self._find_divided if self._is_stage_3 else self._find)(optimizers)
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, EOFError, OSError, ImportError) as error:
            raise self._unknown(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    def _unknown(self, why: str) -> EngineError:
        return EngineError(
            f"The DeepSpeed files in {self._shards} cannot be read parameter by parameter ({why}). Resume with the "
            "accelerate config, the number of processes and the DeepSpeed version that wrote them, or from another "
            "checkpoint"
        )

    def _find(self, optimizers: list[dict[str, Any]]) -> None:
        """Find the parts under ZeRO-1 and -2: one flat group for each group of parameters."""
        base = optimizers[0]["base_optimizer_state"]
        for number, group in enumerate(base["param_groups"]):
            names: dict[str, None] = {}
            for optimizer in optimizers:
                (index,) = optimizer["base_optimizer_state"]["param_groups"][number]["params"]
                weights = optimizer["single_partition_of_fp32_groups"][number]
                states = {_WEIGHT: weights, **optimizer["base_optimizer_state"]["state"].get(index, {})}
                for name, address in optimizer["param_slice_mappings"][number].items():
                    names[name] = None
                    self._parts.setdefault(name, []).append((states, address.start, address.numel))
            self.groups = [*self.groups, (list(names), _options(group))]
        shapes = [shape for group in self._model["param_shapes"] for shape in group.items()]
        self._shapes = {name: tuple(shape) for name, shape in shapes}

    def _find_divided(self, optimizers: list[dict[str, Any]]) -> None:
        """Find the parts under ZeRO-3: each rank has an equal part of each parameter, the last ones padded."""
        if any(optimizer.get("ds_zero_partition_groups") for optimizer in optimizers):
            raise self._unknown("parameters are sharded over only some of the processes")
        shapes, size = self._model["param_shapes"], len(optimizers)
        self._shapes = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        for rank, optimizer in enumerate(optimizers):
            for index, group in enumerate(shapes):
                states = {_WEIGHT: optimizer["fp32_flat_groups"][index]}
                states |= optimizer["optimizer_state_dict"]["state"].get(index, {})
                start = 0
                for name, shape in group.items():
                    count, whole = -(-shape.numel() // size), shape.numel()
                    held = max(0, min(count, whole - rank * count))
                    self._parts.setdefault(name, []).append((states, start, held))
                    start += count
        for group in optimizers[0]["optimizer_state_dict"]["param_groups"]:
            names = [name for index in group["params"] for name in shapes[index]]
            self.groups = [*self.groups, (names, _options(group))]

    @cached_property
    def _model(self) -> dict[str, Any]:
        """The states of the model on rank 0."""
        if self._is_stage_3:
            return _read(_by_rank(self._shards, _MODEL_SHARDS)[0])
        return _read(self._shards / _MODEL)

    @cached_property
    def _frozen(self) -> dict[str, list[Tensor]]:
        """The parts of the untrained parameters, under ZeRO-3."""
        shards = [_read(path) for path in _by_rank(self._shards, _MODEL_SHARDS)]
        return {
            name: [shard["frozen_param_fragments"][name] for shard in shards]
            for name in shards[0].get("frozen_param_fragments") or {}
        }

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a parameter's weights; None: they are not in the checkpoint."""
        value = self._parts[name][0][0][_WEIGHT] if name in self._parts else self._untrained(name)
        return None if value is None else value.dtype

    def weight(self, name: str) -> Tensor | None:
        """Return a parameter's weights, in float32 if it is trained, or a buffer; None: it is not there."""
        return self._whole(name, _WEIGHT) if name in self._parts else self._untrained(name)

    def state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a trained parameter, without padding."""
        keys = [key for key in self._parts[name][0][0] if key != _WEIGHT]
        return {key: self._whole(name, key) for key in keys}

    def _untrained(self, name: str) -> Tensor | None:
        if self._is_stage_3 and name in self._frozen:
            whole = torch.cat([part.flatten() for part in self._frozen[name]])
            shape = (self._model.get("frozen_param_shapes") or {}).get(name)
            return None if shape is None else whole[: shape.numel()].view(shape)  # the last part is padded
        value: Tensor | None = self._model["module"].get(name)
        return None if value is None or value.numel() == 0 else value

    def _whole(self, name: str, key: str) -> Any:
        parts = self._parts[name]
        first = parts[0][0][key]
        if not torch.is_tensor(first) or first.dim() == 0:
            return first
        try:
            whole = torch.cat([states[key][start : start + count] for states, start, count in parts])
            return whole.view(self._shapes[name])
        except (KeyError, RuntimeError) as error:
            raise self._unknown(f"{key} of {name} is incomplete: {error}") from error


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    def ranks() -> Iterator[tuple[int, Path]]:
        for path in folder.glob(pattern):
            yield int(path.name.partition("zero_pp_rank_")[2].partition("_")[0]), path

    return [path for _, path in sorted(ranks())]


def _read(path: Path) -> dict[str, Any]:
    """Load a file that DeepSpeed wrote; tensors are mapped, not read."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return content


# ------------------------------------------------------------------------------------------------- the pairs of engines


SINGLE, DDP, FSDP2, ZERO1, ZERO2, ZERO3 = CONFIGS = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
"""The engines."""
OPTIMIZER_FILE, SCHEDULER_FILE = "optimizer.pt", "scheduler.pt"  # the Trainer's names
FSDP2_OPTIMIZER, FSDP2_MODEL = "optimizer_0", "pytorch_model_fsdp_0"  # accelerate's folders
FSDP2_WHOLE_OPTIMIZER, FSDP2_WHOLE_MODEL = "optimizer.bin", "pytorch_model_fsdp.bin"  # under FULL_STATE_DICT
_CLASSES = {"SingleProcess": SINGLE, "DataParallel": DDP, "FullySharded": FSDP2}  # in manifests without a config


class Way(Enum):
    """How a checkpoint is continued."""

    LOAD = "load"
    """By the code of the engine that saved it."""
    CONVERT = "convert"
    """Parameter by parameter, by name, with optimizer and schedule."""
    WEIGHTS = "weights"
    """Only weights: the checkpoint is the start of a run, or ``save_only_model`` is set, so no other state exists."""


@dataclass(frozen=True)
class Setup:
    """An engine and its number of processes.

    Attributes:
        config: one of `CONFIGS`.
        processes: the number of processes.
    """

    config: str
    processes: int

    def __str__(self) -> str:
        """Return the text for a message."""
        return f"{self.config} on {self.processes} process{'es' if self.processes > 1 else ''}"


def ways(saved: str, now: str, same_number: bool) -> Way:
    """Return how a run on engine ``now`` continues a checkpoint of engine ``saved``.

    >>> ways("single", "ddp", False), ways("zero2", "zero2", True), ways("zero2", "zero2", False)
    (<Way.LOAD: 'load'>, <Way.LOAD: 'load'>, <Way.CONVERT: 'convert'>)
    >>> ways("fsdp2", "fsdp2", False), ways("fsdp2", "zero3", True)
    (<Way.LOAD: 'load'>, <Way.CONVERT: 'convert'>)

    Args:
        saved: one of `CONFIGS`.
        now: one of `CONFIGS`.
        same_number: whether the number of processes is the same.
    """
    if {saved, now} <= {SINGLE, DDP} or saved == now == FSDP2:
        return Way.LOAD
    return Way.LOAD if saved == now and same_number else Way.CONVERT


def setup_of(checkpoint: str | Path) -> Setup:
    """Return the engine that made a checkpoint; if the manifest has no config, from the files.

    Raises:
        CheckpointError: the manifest cannot be read, or names an engine that this version does not have.
    """
    made, checkpoint = made_by(checkpoint), Path(checkpoint)
    config = made.get("config") or _CLASSES.get(made.get("engine", "")) or _by_files(checkpoint)
    if config not in CONFIGS:
        raise CheckpointError(
            f"{checkpoint} was made by an engine {config!r}, which this version does not have. Resume with the dpllm "
            "version that made it"
        )
    return Setup(config, made.get("processes", 1))


def _by_files(checkpoint: Path) -> str:
    if is_zero_checkpoint(checkpoint):
        return ZERO3 if divides_parameters(checkpoint) else ZERO2
    sharded = (checkpoint / FSDP2_MODEL).is_dir() or (checkpoint / FSDP2_WHOLE_MODEL).is_file()
    return FSDP2 if sharded else SINGLE


def way_to_load(checkpoint: str | Path, now: Setup, weights_only: bool = False) -> Way:
    """Decide how a checkpoint is continued, from its manifest and the names of its files.

    Args:
        checkpoint: a complete checkpoint.
        now: engine and processes of this run.
        weights_only: whether this run saves and continues only weights (``save_only_model``).

    Raises:
        CheckpointError: the checkpoint lacks an optimizer or a schedule that this run would continue.
    """
    checkpoint, saved = Path(checkpoint), setup_of(checkpoint)
    if is_start(checkpoint):
        return Way.WEIGHTS
    lacks = _lacks(checkpoint, saved.config)
    if not lacks:
        return ways(saved.config, now.config, saved.processes == now.processes)
    if weights_only:
        return Way.WEIGHTS
    raise CheckpointError(
        f"{checkpoint} ({saved}) holds no {' and no '.join(lacks)}, so a resume would silently start these from "
        "scratch. Resume from another checkpoint, or, if it was saved with train.save_only_model=true, set that key "
        "to start them from scratch"
    )


def is_start(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint holds the weights before the first step, which have no other state."""
    return steps_of_weights(checkpoint) == 0


def _lacks(checkpoint: Path, config: str) -> list[str]:
    """Return descriptions of the states that a checkpoint lacks."""
    optimizers = {
        SINGLE: [checkpoint / OPTIMIZER_FILE],
        DDP: [checkpoint / OPTIMIZER_FILE],
        FSDP2: [checkpoint / FSDP2_OPTIMIZER, checkpoint / FSDP2_WHOLE_OPTIMIZER],
    }
    found = [path.exists() for path in optimizers.get(config, [])] or [is_zero_checkpoint(checkpoint)]
    lacking = [] if any(found) else ["optimizer state"]
    return lacking if (checkpoint / SCHEDULER_FILE).is_file() else [*lacking, "learning-rate schedule"]


# ---------------------------------------------------------------------------------------------------------- the readers


NAMES_FILE = "optimizer_names.json"
"""A file in a checkpoint: the names of the parameters in the optimizer's groups, which PyTorch only numbers."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # parts of names that torch adds
Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]


class SavedState(Protocol):
    """The contents of a checkpoint.

    Attributes:
        groups: the optimizer's groups: parameter names and options. Empty: there is no optimizer.
    """

    groups: Groups

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a parameter or buffer; None: the checkpoint does not hold it."""
        ...

    def weight(self, name: str) -> Tensor | None:
        """Return a whole parameter or buffer on the CPU; None: the checkpoint does not hold it."""
        ...

    def state(self, name: str) -> dict[str, Any]:
        """Return a trained parameter's optimizer state: whole tensors on the CPU, and its step count."""
        ...


def saved_state(checkpoint: str | Path, adapters: Sequence[str] = ()) -> SavedState:
    """Return the reader of a complete checkpoint.

    Args:
        checkpoint: the folder.
        adapters: names of the model's adapters, which PEFT omits from the names of saved weights.

    Raises:
        CheckpointError: the manifest cannot be read, or the state cannot be read parameter by parameter.
        EngineError: DeepSpeed's files have an unknown layout.
    """
    checkpoint, config = Path(checkpoint), setup_of(checkpoint).config
    optimizers = (OPTIMIZER_FILE, FSDP2_OPTIMIZER, FSDP2_WHOLE_OPTIMIZER)
    has_optimizer = any((checkpoint / name).exists() for name in optimizers) or is_zero_checkpoint(checkpoint)
    weights_only = is_start(checkpoint) or not has_optimizer
    if weights_only and _weight_files(checkpoint, adapters):
        return ReplicatedState(checkpoint, adapters, weights_only=True)
    if config in (SINGLE, DDP):
        return ReplicatedState(checkpoint, adapters)
    if config == FSDP2:
        return ShardedState(checkpoint, adapters)
    return ZeroState(checkpoint)


def _weight_files(checkpoint: Path, adapters: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the files of whole weights, each with the prefix of its names; an adapter may have its own folder."""
    found = [("", path) for path in sorted(checkpoint.glob("*.safetensors"))]
    for adapter in adapters:
        found += [(f"{adapter}/", path) for path in sorted((checkpoint / adapter).glob("*.safetensors"))]
    return found


def plain_name(name: str) -> str:
    """Return a parameter's name without torch's wrappers.

    >>> plain_name("model._orig_mod.layers.0.weight")
    'model.layers.0.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of_groups(optimizer: Any, model: nn.Module) -> list[list[str]]:
    """Return the names of the parameters in an optimizer's groups, before an engine replaces them.

    Args:
        optimizer: created from the model's own parameters.
        model: not yet divided over processes.

    Raises:
        EngineError: the optimizer has a parameter that is not in the model.
    """
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group):
        raise EngineError(
            "The optimizer holds a parameter that is not in the model, so its state cannot be saved by name. Create "
            "the optimizer from model.parameters()"
        )
    return [[name for name in group if name is not None] for group in groups]


def write_names(folder: str | Path, names: Sequence[Sequence[str]]) -> None:
    """Write `NAMES_FILE` into the folder of a checkpoint."""
    (Path(folder) / NAMES_FILE).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


class _Adapted:
    """Finds weights under the names that PEFT saves, without the names of adapters."""

    def __init__(self, names: Iterable[str], adapters: Sequence[str]) -> None:
        self._names, self._adapters = set(names), adapters

    def find(self, name: str) -> str | None:
        """Return the name under which a parameter was saved; None: it was not saved."""
        return next((one for one in self._candidates(name) if one in self._names), None)

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        for adapter in self._adapters:
            for inside in (f".modules_to_save.{adapter}", f".{adapter}"):
                if f"{inside}." in f"{name}.":
                    short = f"{name}.".replace(f"{inside}.", ".", 1).removesuffix(".")
                    yield from (f"{adapter}/{short}", short)


class ReplicatedState:
    """The state saved by one process, or by DDP: whole weights in safetensors, and the optimizer's state by number.

    Args:
        checkpoint: the folder.
        adapters: as for `saved_state`.
        weights_only: whether the checkpoint has no optimizer.

    Raises:
        CheckpointError: the optimizer's state has no parameter names, or the files do not match each other.
    """

    def __init__(self, checkpoint: Path, adapters: Sequence[str], weights_only: bool = False) -> None:
        """Open the files."""
        self._files: dict[str, Path] = {}
        for prefix, path in _weight_files(checkpoint, adapters):
            with safe_open(path, framework="pt") as file:
                self._files |= {f"{prefix}{name}": path for name in file.keys()}  # noqa: SIM118  # it is no dictionary
        self._saved = _Adapted(self._files, adapters)
        self.groups: Groups = []
        self._states: dict[str, dict[str, Any]] = {}
        if weights_only:
            return
        names = _names_in(checkpoint)
        optimizer = torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        groups = optimizer["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group) for group in names]:
            raise CheckpointError(
                f"{checkpoint / NAMES_FILE} does not match the parameters in {OPTIMIZER_FILE}. Resume from another "
                "checkpoint"
            )
        self.groups = [
            (own, {key: value for key, value in group.items() if key != "params"})
            for own, group in zip(names, groups, strict=True)
        ]
        for own, group in zip(names, groups, strict=True):
            numbered = zip(own, group["params"], strict=True)
            self._states |= {name: optimizer["state"].get(number, {}) for name, number in numbered}

    def dtype(self, name: str) -> torch.dtype | None:
        """See `SavedState`."""
        value = self.weight(name)
        return None if value is None else value.dtype

    def weight(self, name: str) -> Tensor | None:
        """See `SavedState`."""
        saved = self._saved.find(name)
        if saved is None:
            return None
        with safe_open(self._files[saved], framework="pt") as file:
            value: Tensor = file.get_tensor(saved.rpartition("/")[2])
        return value

    def state(self, name: str) -> dict[str, Any]:
        """See `SavedState`."""
        return self._states[name]


def _names_in(checkpoint: Path) -> list[list[str]]:
    try:
        names: list[list[str]] = json.loads((checkpoint / NAMES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        config = setup_of(checkpoint).config
        raise CheckpointError(
            f"{checkpoint} has no parameter names for its optimizer state, which comes from an earlier dpllm version "
            f"or a custom optimizer, so only {SINGLE} and {DDP} can resume it. Resume with dpllm train --config "
            f"{config}"
        ) from error
    return names


class ShardedState:
    """The state saved by FSDP2, in the format of torch.distributed.checkpoint or, at accelerate's request, whole.

    Args:
        checkpoint: the folder.
        adapters: as for `saved_state`.

    Raises:
        CheckpointError: the files hold no model, or no optimizer state.
    """

    def __init__(self, checkpoint: Path, adapters: Sequence[str]) -> None:
        """Read the files' metadata, but no tensor."""
        self._model = _entries(checkpoint, FSDP2_MODEL, FSDP2_WHOLE_MODEL, "model.")
        self._optimizer = _entries(checkpoint, FSDP2_OPTIMIZER, FSDP2_WHOLE_OPTIMIZER, "optimizer.")
        self._saved = _Adapted(self._model.keys, adapters)
        groups: dict[int, dict[str, Any]] = {}
        options = [key for key in self._optimizer.keys if key.startswith("param_groups.")]
        for key, value in self._optimizer.read(options).items():
            _, number, option = key.split(".", 2)
            groups.setdefault(int(number), {})[option] = value
        self.groups: Groups = [(groups[number].pop("params"), groups[number]) for number in sorted(groups)]
        self._keys: dict[str, list[str]] = {name: [] for names, _ in self.groups for name in names}
        for key in self._optimizer.keys:
            if key.startswith("state."):
                name, _, option = key.removeprefix("state.").rpartition(".")
                self._keys[name].append(option)

    def dtype(self, name: str) -> torch.dtype | None:
        """See `SavedState`."""
        saved = self._saved.find(name)
        return None if saved is None else self._model.keys[saved][1]

    def weight(self, name: str) -> Tensor | None:
        """See `SavedState`."""
        saved = self._saved.find(name)
        return None if saved is None else self._model.read([saved])[saved]

    def state(self, name: str) -> dict[str, Any]:
        """See `SavedState`."""
        found = self._optimizer.read([f"state.{name}.{option}" for option in self._keys[name]])
        return {option: found[f"state.{name}.{option}"] for option in self._keys[name]}


class _Distributed:
    """Entries in a folder of torch.distributed.checkpoint, by their names without a prefix."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self.keys: dict[str, tuple[torch.Size | None, torch.dtype | None]] = {}
        for key, entry in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
            tensor = entry if isinstance(entry, TensorStorageMetadata) else None
            described = (None, None) if tensor is None else (tensor.size, tensor.properties.dtype)
            self.keys[key.removeprefix(prefix)] = described

    def read(self, keys: Sequence[str]) -> dict[str, Any]:
        """Read whole entries, on this process only."""
        wanted: dict[str, Any] = {}
        for key in keys:
            size, dtype = self.keys[key]
            wanted[self._prefix + key] = None if size is None else torch.empty(size, dtype=dtype)
        if wanted:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no other process is needed here
                dcp.load(wanted, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        return {key.removeprefix(self._prefix): value for key, value in wanted.items()}


class _Whole:
    """Entries of a file that rank 0 wrote for all processes."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._values = dict(_flattened(content))
        self.keys = {
            key: (value.shape, value.dtype) if torch.is_tensor(value) else (None, None)
            for key, value in self._values.items()
        }

    def read(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return entries, mapped into memory."""
        return {key: self._values[key] for key in keys}


def _flattened(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries under the names of torch.distributed.checkpoint."""
    if not {"state", "param_groups"} <= content.keys():
        yield from content.items()
        return
    for name, states in content["state"].items():
        yield from ((f"state.{name}.{key}", value) for key, value in states.items())
    for number, group in enumerate(content["param_groups"]):
        yield from ((f"param_groups.{number}.{key}", value) for key, value in group.items())


def _entries(checkpoint: Path, folder: str, file: str, prefix: str) -> _Distributed | _Whole:
    if (checkpoint / folder).is_dir():
        return _Distributed(checkpoint / folder, prefix)
    if (checkpoint / file).is_file():
        return _Whole(torch.load(checkpoint / file, map_location="cpu", weights_only=True, mmap=True))
    raise CheckpointError(
        f"{checkpoint} holds neither {folder} nor {file}, so FSDP2 did not complete it. Resume from another checkpoint"
    )
