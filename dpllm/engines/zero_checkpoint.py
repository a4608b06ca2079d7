"""Read the state of a DeepSpeed checkpoint parameter by parameter, on any number of processes.

ZeRO divides float32 weights and optimizer state over the processes, so its files depend on their number and on the
stage. `ZeroState` maps the files of all ranks into memory and assembles a parameter from its parts on request. Nothing
is written, so a sealed checkpoint does not change, and no disk space is needed.

DeepSpeed documents the layout in its own converter (deepspeed/checkpoint/ds_to_universal.py). That program supports
only two moments, needs twice the checkpoint's size on disk, and loading its output loses options of parameter groups,
step counts and frozen parameters. Here every part is counted: an unknown layout is an error, never a parameter that
silently lacks entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpllm.engines.errors import EngineError

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
