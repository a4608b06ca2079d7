"""Stage 5: the engines of several processes with one: on a GPU over NCCL, in the toy over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from dpllm import load_recipe
from gpu.record import Figures, Skipped, Step
from gpu.setting import ROOT, Setting, free_memory
from gpu.whole_run import place_of
from tests.distributed.matrix import real
from tests.distributed.world import environment, free_port, tools

TITLE = "NCCL with one process"
CONFIGS = {"fsdp2": "fsdp2", "zero3": "zero3"}


def join(setting: Setting) -> None:
    """Form the group of one process; again for a step that finds it formed, nothing."""
    if dist.is_initialized():
        return
    own = environment(0, 1, free_port())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update({name: own[name] for name in names} | tools())
    if setting.device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo" if setting.toy else "nccl")


def engine(name: str) -> Step:
    """The clipped sum that an engine releases, on pretrained weights and real text, against a plain process's."""

    def step(figures: Figures, setting: Setting) -> None:
        if name.startswith("zero"):
            setting.needs("deepspeed")
        if setting.toy and name in ("ddp", "zero1"):
            raise Skipped("in the toy the same as at fsdp2 and zero3")
        place = place_of(setting)
        join(setting)
        figures["backend"] = dist.get_backend()
        ((error, reach),) = real(
            [name], str(place / "stories15M"), str(place / "e2e" / "devset.csv"), device=setting.device.type
        )
        figures.check("sum against one process", error, at_most=1e-5 if setting.toy else 1e-4)
        figures.check("norm over C times units", reach, at_least=0.01, at_most=1)
        free_memory()

    return step


def launched(name: str) -> Step:
    """The recipe program as people start it, with accelerate's file for this engine."""

    def step(figures: Figures, setting: Setting) -> None:
        folder = setting.folder / f"launched-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        recipe = write_recipe(folder, place_of(setting))
        load_recipe(recipe)
        setting.needs_cuda()
        if name.startswith("zero"):
            setting.needs("deepspeed")
        begin = time.monotonic()
        done = subprocess.run(
            command(CONFIGS[name], recipe),
            cwd=ROOT,
            env={**outside_a_group(), **tools()},
            capture_output=True,
            text=True,
            timeout=90,
        )
        figures["seconds"] = time.monotonic() - begin
        if done.returncode != 0:
            raise RuntimeError(f"status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        said = [line for line in done.stdout.splitlines() if "ε = " in line]
        figures["said"] = said[-1].strip() if said else ""
        figures.require(bool(said), "it stated no ε")

    return step


def write_recipe(folder: Path, place: Path) -> Path:
    """A short run on E2E that writes a checkpoint."""
    recipe = {
        "model": {"name": str(place / "stories15M")},
        "data": {
            "path": str(place / "e2e" / "trainset.csv"),
            "format": "prompt_completion",
            "prompt_column": "mr",
            "completion_column": "ref",
            "max_length": 128,
            "limit": 4000,
            "eval_fraction": 0.05,
        },
        "privacy": {"target_epsilon": 8, "delta": 1e-5, "clip_norm": 0.1, "expected_batch_size": 256},
        "train": {
            "output_dir": str(folder / time.strftime("%H%M%S")),
            "max_steps": 4,
            "per_device_train_batch_size": 64,
            "learning_rate": 1e-3,
            "bf16": True,
            "logging_steps": 2,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def command(config: str, recipe: Path) -> list[str]:
    """`accelerate launch` with one process."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        f"--config_file={ROOT / 'accelerate_configs' / config}.yaml",
        "--num_processes=1",
        f"--main_process_port={free_port()}",
        str(ROOT / "recipes" / "finetune.py"),
        f"--config={recipe}",
    ]


def outside_a_group() -> dict[str, str]:
    """Return the environment without the variables of `join`: the launcher sets them for its own process."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in own}


STEPS: list[tuple[str, Step]] = [
    *((name, engine(name)) for name in ("fsdp2", "zero3", "ddp", "zero1")),
    *((f"accelerate launch: {name}", launched(name)) for name in CONFIGS),
]
