"""Stage 3: where the time of a step goes: whether the GPU is busy or waits for launches, and the slowest kernels."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import targets
import torch
from methods import OURS, PLAIN
from throughput import Settings, prepare, timed

from gpu.record import Figures, Skipped, Step
from gpu.setting import Setting, free_memory, synchronize
from gpu.targets_table import settings_of

TITLE = "a profile"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
STEPS_PROFILED = 3
TOP = 12
BUSY = 0.95  # below this share the GPU waits for the CPU for more than a twentieth of the time

Event = tuple[str, float, float]  # name, begin, end


def events_of(trace: dict[str, Any], categories: Iterable[str]) -> list[Event]:
    """Return the events of these categories from a trace of torch.profiler; times in microseconds."""
    wanted = set(categories)
    return [
        (event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in wanted
    ]


def busy_time(events: list[Event]) -> float:
    """Return the time in which at least one of them ran.

    >>> busy_time([("a", 0, 4), ("b", 2, 6), ("c", 8, 9)])
    7.0
    """
    total, reached = 0.0, float("-inf")
    for _, begin, end in sorted(events, key=lambda event: event[1]):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def top(events: list[Event], steps: int, count: int = TOP) -> list[dict[str, Any]]:
    """Return the names that take most time, per step.

    >>> top([("a", 0, 1000), ("b", 0, 500), ("a", 5, 505)], steps=1, count=1)
    [{'name': 'a', 'ms': 1.5, 'calls': 2.0}]
    """
    time: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, begin, end in events:
        time[name] += end - begin  # type: ignore[assignment]
        calls[name] += 1
    return [
        {"name": name[:120], "ms": total / 1000 / steps, "calls": calls[name] / steps}
        for name, total in time.most_common(count)
    ]


def summarize(trace: dict[str, Any], steps: int, on_gpu: bool) -> dict[str, Any]:
    """Return the busy share under the profiler, launches, top kernels; without a GPU, of CPU operations."""
    events = events_of(trace, ON_GPU if on_gpu else ("cpu_op",))
    if not events:
        raise ValueError("The profile has no event of the device.")
    span = max(end for _, _, end in events) - min(begin for _, begin, _ in events)
    share = busy_time(events) / span
    return {
        "share_busy_profiled": share,
        "busy_ms": busy_time(events) / 1000 / steps,
        "span_ms": span / 1000 / steps,
        "launches": len(events) / steps,
        "top": top(events, steps),
    }


def with_time(profile: dict[str, Any], step_ms: float) -> dict[str, Any]:
    """Return the profile with the share of a step that was timed without the profiler, which slows the CPU.

    >>> with_time({"busy_ms": 70.0}, 80.0)["share_of_step_busy"]
    0.875
    """
    share = profile["busy_ms"] / step_ms
    return {"step_ms": step_ms, "share_of_step_busy": share, "launch_bound": share < BUSY, **profile}


def profiled(step: Any, ids_BT: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """Steps one after another under torch.profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS_PROFILED):
            step.forget()
            step.run(ids_BT)
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summarize(json.loads(path.read_text()), STEPS_PROFILED, device.type == "cuda")


def profile_of(target: targets.Target) -> Step:
    """Profile training without privacy and this library, with times without the profiler, which slows the CPU."""

    def step(figures: Figures, setting: Setting) -> None:
        if setting.toy and target is not targets.TARGETS[0]:
            raise Skipped("in the toy the same as the row above")
        free_memory()
        chosen: Settings = settings_of(target, setting)
        steps, _, ids_BT = prepare(chosen, [PLAIN, OURS])
        for name, one in steps.items():
            without = sorted(timed(one, ids_BT) for _ in range(3))[1]
            figures[name] = with_time(profiled(one, ids_BT, setting.device), without)
            one.forget()
        plain, ours = figures[PLAIN], figures[OURS]
        figures["launches over plain"] = ours["launches"] / plain["launches"]
        del steps
        free_memory()

    return step


STEPS: list[tuple[str, Step]] = [
    (target.name, profile_of(target)) for target in (targets.TARGETS[0], targets.TARGETS[3], targets.TARGETS[8])
]
