"""Loads a DeepSpeed checkpoint on a different number of processes than the number that made it.

ZeRO's shards depend on the number of processes. DeepSpeed converts them into its universal format, one file per
parameter and optimizer state (deepspeed/checkpoint/ds_to_universal.py), which any number of processes loads when
``checkpoint.load_universal`` is configured. `prepare_to_load` converts a checkpoint if needed, before the
engine is built. `complete_load` corrects these faults of DeepSpeed's loading before the first step:

* ZeRO-3 gives every parameter group the options of the first one (weight decay is then applied to norms and biases),
  and all its sub-groups share one step counter, which each of them increments in every step
  (deepspeed/runtime/zero/stage3.py, ``load_hp_checkpoint_state_from_checkpoint_dir_stage3``);
* step counters stay on the CPU, but a fused optimizer expects them on the GPU;
* parameters that are not trained, and buffers, are not loaded (deepspeed/runtime/engine.py, ``_load_checkpoint``).

Nothing of DeepSpeed is replaced. The conversion reads every shard and writes the same amount again (temporarily
twice) into the checkpoint's folder, where it stays until the checkpoint is deleted. It runs once, in a separate process
that rank 0 starts. All ranks wait in short rounds, so that no collective reaches its time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from dpllm.engines.errors import EngineError
from dpllm.engines.optimizers import innermost
from dpllm.engines.processes import Processes
from dpllm.privacy.checkpoints import STAGING_FOLDER, CheckpointError, publish, verify

logger = logging.getLogger(__name__)

UNIVERSAL_FOLDER = "universal"
"""Within the checkpoint, beside DeepSpeed's own ``global_step<N>``; the name is also the tag that DeepSpeed loads."""

_TAG_FILE, _UNIVERSAL_TAG_FILE = "latest", "latest_universal"  # names that DeepSpeed gives
_OPTIMIZER_SHARDS = "*zero_pp_rank_*_optim_states.pt"
_MODEL_SHARDS = "zero_pp_rank_*_model_states.pt"  # only ZeRO-3
_MODEL = "mp_rank_00_model_states.pt"  # ZeRO-1 and -2
_WORKERS = 4
_ROUND = 20.0  # seconds


@dataclass(frozen=True)
class Layout:
    """How a DeepSpeed checkpoint is divided.

    Attributes:
        shards: the folder of the shards.
        num_processes: the number of processes that made it.
        whole_parameters: whether each of them held the whole model (ZeRO-1 and -2).
    """

    shards: Path
    num_processes: int
    whole_parameters: bool


def layout_of(checkpoint: str | Path) -> Layout:
    """Read the division of a checkpoint from its files; `dpllm.privacy.checkpoints` has verified their number.

    Raises:
        EngineError: DeepSpeed did not make it.
    """
    checkpoint = Path(checkpoint)
    tag = checkpoint / _TAG_FILE
    shards = checkpoint / tag.read_text(encoding="utf-8").strip() if tag.is_file() else checkpoint
    count = len(list(shards.glob(_OPTIMIZER_SHARDS)))
    if not count:
        raise EngineError(
            f"{checkpoint} holds no DeepSpeed optimizer state: resume with the accelerate config of the engine that "
            "made it"
        )
    return Layout(shards, count, not any(shards.glob(_MODEL_SHARDS)))


def prepare_to_load(checkpoint: str | Path, config: dict[str, Any], processes: Processes) -> None:
    """Convert a checkpoint for these processes, before the engine is built; all of them call this together.

    Args:
        checkpoint: whole, as ``dpllm.training.resume.checkpoint_to_resume`` returns it.
        config: the DeepSpeed configuration as a nested dictionary; its ``checkpoint.load_universal`` is set.
        processes: the processes that will load it.

    Raises:
        EngineError: DeepSpeed did not make it, it was sharded in another way, or it cannot be converted; the same on
            every rank.
    """
    checkpoint = Path(checkpoint)
    layout = processes.from_main(lambda: layout_of(checkpoint))
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if layout.whole_parameters != (stage < 3):
        made, now = ("ZeRO-1 or -2", "ZeRO-3") if layout.whole_parameters else ("ZeRO-3", f"ZeRO-{stage}")
        raise EngineError(
            f"{checkpoint} was made with {made}, and this run uses {now}: resume with the accelerate config that it "
            "was made with"
        )
    differs = layout.num_processes != processes.size
    if differs:
        _convert(checkpoint, layout, processes)
    config.setdefault("checkpoint", {})["load_universal"] = differs


def complete_load(engine: Any, checkpoint: str | Path, processes: Processes) -> None:
    """Correct the faults of DeepSpeed's loading of a universal checkpoint; see the module docstring.

    Call it on all processes after ``engine.load_checkpoint`` and before the first step. If the checkpoint was loaded
    without conversion, it does nothing.

    Args:
        engine: the return value of ``deepspeed.initialize``, configured by `prepare_to_load`.
        checkpoint: as for `prepare_to_load`.
        processes: as for `prepare_to_load`.
    """
    if not engine.load_universal_checkpoint():
        return
    folder = Path(checkpoint) / UNIVERSAL_FOLDER
    saved = processes.from_main(lambda: _read(folder / "zero" / "optimizer_state.pt")["param_groups"])
    optimizer = innermost(engine.optimizer)
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(step := state.get("step")):
            state["step"] = step.detach().clone().to(parameter.device if fused else "cpu")
    _load_untrained(engine, folder, processes)


def _read(path: Path) -> dict[str, Any]:
    """Load a file that DeepSpeed wrote; tensors are memory-mapped, not read."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return content


def _load_untrained(engine: Any, folder: Path, processes: Processes) -> None:
    """Load frozen parameters, as far as the checkpoint holds them (an adapter's does not), and buffers."""
    module: nn.Module = engine.module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if engine.zero_optimization_stage() < 3:
        values = _read(folder / _MODEL)["module"]
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        module.load_state_dict({name: v for name, v in values.items() if name not in trained}, strict=False)
        return
    shards = [_read(path) for path in sorted(folder.glob(_MODEL_SHARDS), key=_rank_of)]
    buffers = {name: value for name, value in shards[0]["module"].items() if name not in parameters}
    module.load_state_dict(buffers, strict=False)
    for name, fragments in _frozen(shards):
        _set_whole(parameters[name], fragments, processes)


def _rank_of(path: Path) -> int:
    return int(path.name.split("_")[3])


def _frozen(shards: list[dict[str, Any]]) -> Iterator[tuple[str, list[Tensor]]]:
    for name in shards[0].get("frozen_param_fragments") or {}:
        yield name, [shard["frozen_param_fragments"][name] for shard in shards]


def _set_whole(parameter: nn.Parameter, fragments: list[Tensor], processes: Processes) -> None:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if processes.is_main:
            whole = torch.cat([fragment.flatten() for fragment in fragments])
            parameter.copy_(whole[: parameter.numel()].view_as(parameter))  # the last shard is padded


# ------------------------------------------------------------------------------------------------- the conversion


def _convert(checkpoint: Path, layout: Layout, processes: Processes) -> None:
    """Create ``universal`` in a checkpoint's folder, completely or not at all; a complete one that exists is used."""
    final = checkpoint / UNIVERSAL_FOLDER
    if not processes.from_main(lambda: _is_whole(final)):
        conversion = _Conversion(checkpoint, layout, processes.size)
        try:
            processes.from_main(conversion.start)
            while processes.any(conversion.runs()):
                continue
            processes.from_main(conversion.finish)
        finally:
            conversion.stop()
    processes.from_main(lambda: _write_tag(checkpoint))


class _Conversion:
    """DeepSpeed's own program in a separate process, started only by rank 0."""

    def __init__(self, checkpoint: Path, layout: Layout, size: int) -> None:
        self._checkpoint, self._layout, self._size = checkpoint, layout, size
        # A unique name: the program of an earlier attempt whose run was killed may still be writing.
        self._staging = checkpoint / STAGING_FOLDER / f"{UNIVERSAL_FOLDER}-{uuid.uuid4().hex[:8]}"
        self._child: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(self) -> None:
        options = {
            "--input_folder": self._layout.shards,
            "--output_folder": self._staging,
            "--num_extract_workers": _WORKERS,
            "--num_merge_workers": _WORKERS,
        }
        words = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words, "--inject_missing_state"]
        off_the_gpu = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        logger.warning(
            "%s was made by %s: converting it for %d",
            self._checkpoint,
            _counted(self._layout.num_processes),
            self._size,
        )
        try:
            shutil.rmtree(self._staging.parent, ignore_errors=True)
            self._staging.mkdir(parents=True)
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by stop()
            self._child = subprocess.Popen(command, env=off_the_gpu, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise self._refusal(error) from error

    def runs(self) -> bool:
        """Wait for one round; return whether the program still runs."""
        if self._child is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_ROUND)
        return self._child.returncode is None

    def finish(self) -> None:
        assert self._child is not None and self._log is not None, "start() comes first"
        if self._child.returncode:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
            raise self._refusal(f"ds_to_universal ended with {self._child.returncode}, {said[:300].rstrip('.')}")
        try:
            publish(self._staging, self._checkpoint / UNIVERSAL_FOLDER)
        except (CheckpointError, OSError) as error:
            raise self._refusal(error) from error

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        if self._log is not None:
            self._log.close()
            shutil.rmtree(self._staging.parent, ignore_errors=True)

    def _refusal(self, why: object) -> EngineError:
        free = shutil.disk_usage(self._checkpoint).free / 1e6
        return EngineError(
            f"{self._checkpoint} was made by {_counted(self._layout.num_processes)} and could not be converted for "
            f"{self._size} ({why}). {free:,.1f} MB are free on this disk, and up to twice the checkpoint's size is "
            f"needed: free disk space, or resume with as many processes as made it, {self._layout.num_processes}"
        )


def _counted(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}"


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def _write_tag(checkpoint: Path) -> None:
    """Name the folder that DeepSpeed is to load."""
    draft = checkpoint / f"{_UNIVERSAL_TAG_FILE}.draft"
    draft.write_text(UNIVERSAL_FOLDER, encoding="utf-8")
    draft.replace(checkpoint / _UNIVERSAL_TAG_FILE)
