"""Step of the second visit: the engines of several processes with one: on a GPU over NCCL, in the toy over gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from real_records import quiet

from gpu.real_run import place_of
from gpu.record import Figures
from gpu.setting import Setting, free_memory
from tests.distributed.matrix import real
from tests.distributed.world import environment, free_port, tools


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


def engine(figures: Figures, setting: Setting, name: str) -> None:
    """Compare the clipped sum that an engine releases, on pretrained weights and real text, with a plain process's."""
    if name.startswith("zero"):
        setting.needs("deepspeed")
    quiet()
    place = place_of(setting)
    join(setting)
    figures["backend"] = dist.get_backend()
    ((error, reach),) = real(
        [name], str(place / "stories15M"), str(place / "e2e" / "devset.csv"), device=setting.device.type
    )
    figures.check("sum against one process", error, at_most=1e-5 if setting.toy else 1e-4)
    figures.check("norm over C times units", reach, at_least=0.01, at_most=1)
    free_memory()
