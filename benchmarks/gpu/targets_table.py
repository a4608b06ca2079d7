"""Stage 2: the target table of time and memory, of this library first and of others afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import targets
from methods import OURS, PEERS, PLAIN, REPLAYED
from throughput import Settings

from gpu.record import Figures, Skipped, Step
from gpu.setting import Setting, free_memory

TITLE = "the target table"
ROUNDS = 6
TOY: dict[str, Any] = {"config": None, "hidden": 32, "layers": 2, "vocab": 97, "heads": 2, "batch": 2, "tokens": 8}
_found: dict[str, int] = {}  # peak bytes without privacy, by row; the steps of other libraries are compared with it


def settings_of(target: targets.Target, setting: Setting) -> Settings:
    """Return the settings for throughput.py; in the toy the same modes on a tiny model."""
    whole = target.settings(target.layers, setting.device.type, ROUNDS)
    return replace(whole, **TOY, rank=2, rounds=1, warmup=1) if setting.toy else whole


def row_of(target: targets.Target) -> Step:
    """This library and training without privacy."""

    def step(figures: Figures, setting: Setting) -> None:
        if setting.toy and target.speed is None and target.method == OURS:
            raise Skipped("in the toy the same as a row above")
        free_memory()
        row = targets.measured(settings_of(target, setting), target.method)
        figures |= {
            "speed_ratio": row["speed_ratio"],
            "memory_ratio": row["peak_bytes"][OURS] / row["peak_bytes"][PLAIN],
            "target_speed": target.speed,
            "target_memory": target.memory,
            "ms": row["ms"],
            "peak_bytes": row["peak_bytes"],
        }
        _found[target.name] = row["peak_bytes"][PLAIN]
        free_memory()

    return step


def peer_of(target: targets.Target, name: str) -> Step:
    """Another library, or this one with passes from a recording, and training without privacy."""

    def step(figures: Figures, setting: Setting) -> None:
        if name in PEERS:
            setting.needs(PEERS[name])
        if target.name not in _found:
            raise Skipped("its row was not measured")
        free_memory()
        figures |= targets.peer(settings_of(target, setting), name, _found[target.name])
        free_memory()

    return step


_RATED = [target for target in targets.TARGETS if target.speed is not None]
_FIRST = (_RATED[0], _RATED[3])  # full and LoRA: the rows at which others are looked at before everything else
_LATER = [target for target in _RATED if target not in _FIRST]
STEPS: list[tuple[str, Step]] = [
    *((target.name, row_of(target)) for target in _RATED),
    *((f"{name}: {target.name}", peer_of(target, name)) for target in _FIRST for name in (REPLAYED, *PEERS)),
    *((target.name, row_of(target)) for target in targets.TARGETS if target.speed is None),
    *((f"{name}: {target.name}", peer_of(target, name)) for target in _LATER for name in PEERS),
]
