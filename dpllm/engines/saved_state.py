"""The state in a checkpoint, by parameter name, whichever engine wrote it.

`dpllm.training.load_state` divides the state again for the engine of a resumed run. A reader maps the checkpoint's
files, or reads the requested entries; it changes nothing and needs no other process, so any number of processes may
read a checkpoint at the same time. No process holds more than one parameter at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dpllm.engines.engine_pairs import (
    DDP,
    FSDP2,
    FSDP2_MODEL,
    FSDP2_OPTIMIZER,
    FSDP2_WHOLE_MODEL,
    FSDP2_WHOLE_OPTIMIZER,
    OPTIMIZER_FILE,
    SINGLE,
    is_start,
    setup_of,
)
from dpllm.engines.errors import EngineError
from dpllm.engines.zero_checkpoint import ZeroState, is_zero_checkpoint
from dpllm.privacy.checkpoints import CheckpointError

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
    weights_only = is_start(checkpoint) or not _has_optimizer(checkpoint)
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


def _has_optimizer(checkpoint: Path) -> bool:
    names = (OPTIMIZER_FILE, FSDP2_OPTIMIZER, FSDP2_WHOLE_OPTIMIZER)
    return any((checkpoint / name).exists() for name in names) or is_zero_checkpoint(checkpoint)


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
