"""Choose the engine and the number of processes for `dpllm train`, start the processes, and wait for them.

``accelerate launch`` starts the processes, as in `launch/local.sh`; a run of one process needs no launcher. Only
`Machine.here` imports torch, so that the command can print its first line before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dpllm.config import ConfigError, nearest
from dpllm.config.launched import EXIT_CODES, check_numbers, noted_exit_code, process_number
from dpllm.config.shipped import config_file, shipped_configs
from dpllm.config.values import integer
from dpllm.config.yaml12 import read_yaml

if TYPE_CHECKING:
    from dpllm.config import Recipe

_LAUNCHED = ("RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")  # by accelerate, torchrun or DeepSpeed
_FREE = 0.9
"""Share of a GPU's memory that a computed footprint may fill: context, fragmentation and buffers are not counted."""
_MEMORY = (
    "import torch; "
    "print(min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())))"
)


@dataclass(frozen=True)
class Machine:
    """The accelerators that this process sees.

    Attributes:
        gpus: their number.
        name: name of the only one.
        memory: bytes of the smallest of several. None: unknown.
    """

    gpus: int
    name: str = ""
    memory: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """Return the accelerators of this machine; imports torch."""
        import torch

        if not torch.accelerator.is_available():
            return cls(0)
        count = torch.accelerator.device_count()
        if not torch.cuda.is_available():
            return cls(count, str(torch.accelerator.current_accelerator()))
        if count == 1:
            return cls(count, torch.cuda.get_device_name(0))
        # A separate process, because a launcher must not hold memory of the GPUs that its workers need.
        found = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=False)
        return cls(count, memory=int(found.stdout) if found.returncode == 0 else None)


@dataclass(frozen=True)
class Launch:
    """The start of a run.

    Attributes:
        words: the choice and its reason, in one line.
        config: the accelerate config. None: the run is in this process, without a launcher.
        processes: their number. None: the config's.
        environment: variables that the config needs in addition.
    """

    words: str
    config: Path | None = None
    processes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, recipe: str, overrides: Sequence[str]) -> list[str]:
        """Return the command that starts the processes; a worker's error is printed by the worker only."""
        count = [] if self.processes is None else ["--num_processes", str(self.processes)]
        launcher = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(self.config),
            *count,
            "--quiet",
        ]
        return [*launcher, "-m", "dpllm.training", "--config", recipe, *overrides]


def is_first() -> bool:
    """Return whether this is the process that prints: the only one, or rank 0.

    Raises:
        ConfigError: the environment has the number of a process that is none.
    """
    check_numbers()
    return process_number("RANK") == 0


def choose(recipe: Recipe, config: str | None, processes: int | None, machine: Machine | None = None) -> Launch:
    """Return how to start a run.

    Args:
        recipe: the recipe.
        config: a path, or the name of a shipped accelerate config. None: chosen by what the machine has.
        processes: their number. None: one per GPU, or the number in a config of one's own.
        machine: the accelerators. None: those of this machine.

    Raises:
        ConfigError: config and number do not fit each other or the machine; the message has the remedy.
    """
    if processes is not None:
        integer("--processes", processes, 1)
    if any(name in os.environ for name in _LAUNCHED):
        if config is not None or processes is not None:
            raise ConfigError(
                "this process was started by a launcher, which has chosen the engine and the processes: leave --config "
                "and --processes out, or call dpllm train without the launcher"
            )
        return Launch("engine: as the launcher of this process says")
    machine = machine or Machine.here()
    if config is not None:
        return _by_config(config, processes, machine)
    if recipe.train.get("use_cpu"):
        machine = Machine(0)
    if machine.gpus == 0:
        return _on_cpu(processes)
    if processes is not None and processes > machine.gpus:
        raise ConfigError(f"--processes {processes}: {_seen(machine)}, and each process needs one of its own")
    if machine.gpus == 1:
        return Launch(f"engine: one process on the GPU ({machine.name})")
    if processes == 1:
        return Launch("engine: one process on the first GPU", shipped_configs()["single"], 1, _first_gpu())
    return _on_gpus(recipe, processes or machine.gpus, machine)


def _on_cpu(processes: int | None) -> Launch:
    if processes is None or processes == 1:
        return Launch("engine: one process on the CPU (no GPU is used)")
    words = f"engine: DDP, {processes} processes on the CPU (no GPU is used)"
    return Launch(words, shipped_configs()["cpu_ddp"], processes, _hidden("MULTI_GPU"))


def _on_gpus(recipe: Recipe, count: int, machine: Machine) -> Launch:
    """Choose DDP, or FSDP2 where a copy of the model with its states does not fit on a GPU."""
    from dpllm.planning.footprint import engines_for, footprint_of_recipe, format_bytes
    from dpllm.privacy.defaults import LARGEST_BATCH
    from dpllm.training.arguments import training_arguments
    from dpllm.training.preflight import PLAIN

    def chosen(name: str, reason: str) -> Launch:
        return Launch(f"engine: {name.upper()} on {count} GPUs ({reason})", shipped_configs()[name], count)

    if "fsdp2" not in engines_for(count, recipe.model.quantization is not None, recipe.privacy.gradients == "per_unit"):
        return chosen("ddp", "quantised weights and privacy.gradients=per_unit are not sharded")
    try:
        arguments = training_arguments({**PLAIN, **recipe.train})
        batch = recipe.privacy.expected_batch_size or LARGEST_BATCH
        need = footprint_of_recipe(recipe, arguments, batch, "ddp", count).total
    except ConfigError as error:
        return chosen("ddp", f"its memory is not computed: {error}")
    if machine.memory is None:
        return chosen("ddp", f"each holds the whole model, {format_bytes(need)} computed; their memory is unknown")
    of = f"{format_bytes(need)} of a GPU's {format_bytes(machine.memory)}, computed"
    if need <= _FREE * machine.memory:
        return chosen("ddp", f"the model with its states takes {of}")
    return chosen("fsdp2", f"without shards, the model with its states would take {of}")


def _by_config(given: str, processes: int | None, machine: Machine) -> Launch:
    path = config_file(given)
    values = _read(given, path)
    kind, on_cpu = str(values.get("distributed_type", "NO")), values.get("use_cpu") is True
    if _number(given, values, "num_machines") > 1:
        raise ConfigError(f"--config {given} is for several machines: start launch/torchrun.sh on each of them")
    if on_cpu and kind == "FSDP":
        raise ConfigError(f"--config {given}: accelerate shards on GPUs only; take cpu_ddp, or fsdp2 on GPUs")
    if kind == "NO":
        if processes not in (None, 1):
            raise ConfigError(f"--config {given} is for one process, not {processes}: take ddp or fsdp2")
        return Launch(f"engine: one process, as {path.name} says", path, 1, _first_gpu() if machine.gpus > 1 else {})
    if not on_cpu and machine.gpus == 0:
        raise ConfigError(
            f"--config {given} needs GPUs, and this machine shows none: leave it out, or take cpu_ddp for a trial"
        )
    if processes is None:
        shipped = path in shipped_configs().values()  # its number is an example
        processes = machine.gpus if shipped and not on_cpu else _number(given, values, "num_processes")
    if not on_cpu and processes > machine.gpus:
        raise ConfigError(f"--config {given} with {processes} processes: {_seen(machine)}; give --processes")
    words = f"engine: {path.stem}, {processes} processes, as --config says"
    return Launch(words, path, processes, _hidden(kind) if on_cpu else {})


def _number(given: str, values: Mapping[str, Any], name: str) -> int:
    value = values.get(name) or 1
    if not str(value).isdecimal():
        raise ConfigError(f"--config {given}: {name} must be a whole number above 0, got {value!r}")
    return int(value)


def _read(given: str, path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        known = ", ".join(shipped_configs())
        raise ConfigError(
            f"--config {given}: cannot be read{nearest(given, shipped_configs()) or '.'} "
            "Give the path of an accelerate "
            f"config, or one of {known}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {given} is no accelerate config: it must be a mapping, as ddp.yaml is")
    return values


def _seen(machine: Machine) -> str:
    return f"{machine.gpus} GPU{' is' if machine.gpus == 1 else 's are'} visible"


def _first_gpu() -> dict[str, str]:
    """Return the variable that shows only the first GPU; one process would otherwise spread over all."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def _hidden(kind: str) -> dict[str, str]:
    """Return the variables without which accelerate would use a GPU, or treat each process as the only one."""
    return {"CUDA_VISIBLE_DEVICES": "", **({} if kind == "DEEPSPEED" else {"ACCELERATE_USE_CPU": "true"})}


def attend(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a launcher to its end; signals go to its workers, once, and not to the launcher itself.

    The launcher would end with a traceback, or leave workers behind. The workers save a checkpoint and the report and
    end with 0. `launch/common.sh` does the same.

    Args:
        command: of the launcher.
        environment: variables in addition to those of this process.

    Returns:
        The exit code of the workers, which differs from the launcher's after a mistake; 128 + the signal's number after
        a signal and an orderly end.
    """
    asked: list[int] = []
    running: list[psutil.Process] = []

    def pass_on(number: int, _frame: Any) -> None:
        asked.append(number)
        for launcher in running:
            workers = _children(launcher) or [launcher]
            for worker in workers:
                _interrupt(worker)

    names = ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, pass_on) for number in signals}
    with tempfile.TemporaryDirectory(prefix="dpllm-") as folder:
        noted = Path(folder) / "exit_codes"
        try:
            # A process group of its own: the terminal sends Ctrl-C to this process only.
            own_group: dict[str, Any] = {"process_group": 0} if hasattr(os, "setpgid") else {}
            variables = {**os.environ, **environment, EXIT_CODES: str(noted)}
            process = subprocess.Popen(list(command), env=variables, **own_group)
            running.append(psutil.Process(process.pid))
            if asked:
                pass_on(asked[-1], None)
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if code > 0:
            code = noted_exit_code(noted, code)
    code = 128 - code if code < 0 else code  # ended by a signal itself
    return 128 + asked[-1] if asked and code == 0 else code


def _children(launcher: psutil.Process) -> list[psutil.Process]:
    try:
        return launcher.children()
    except psutil.Error:
        return []


def _interrupt(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error, ValueError):  # it has ended
        process.send_signal(signal.SIGINT)
