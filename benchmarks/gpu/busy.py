"""Step 4: where the time of a step goes: whether the GPU is busy or waits for launches, and the slowest kernels."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from methods import METHODS, PLAIN, own
from throughput import batch_of, build_model, timed, twin

from gpu.record import Figures, brief
from gpu.setting import Setting, free_memory, synchronize

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
STEPS_PROFILED = 3
TOP = 10
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


def profile(figures: Figures, setting: Setting, number: int) -> None:
    """Profile training without privacy and this library on row ``number`` of the target table, each by itself."""
    target, settings = setting.row(number)
    free_memory()
    model: Any = build_model(settings)
    ids_BT = batch_of(settings, model.config.vocab_size)
    for name in (PLAIN, target.method):
        try:
            if name == PLAIN or setting.fused:
                step: Any = METHODS[name](twin(model))
            else:
                step = own(twin(model), name, fused=False)
                figures.say(f"{name}: PyTorch forms")
            for _ in range(settings.warmup):
                timed(step, ids_BT)
            without = sorted(timed(step, ids_BT) for _ in range(3))[1]
            figures[name] = with_time(profiled(step, ids_BT, setting.device), without)
            for line in lines_of(name, figures[name]):
                figures.say(line)
        except Exception as error:  # the other method
            figures.require(False, f"{name}: {brief(error)}")
        step = None
        free_memory()
    found = {name: figures[name] for name in (PLAIN, target.method) if name in figures}
    figures["summary"] = "profile " + "; ".join(
        f"{name} busy {one['share_of_step_busy']:.3f}, {one['launches']:.0f} launches" for name, one in found.items()
    )
    del model
    free_memory()


def lines_of(name: str, profile: dict[str, Any]) -> list[str]:
    """Return a profile as lines: the shares, then the slowest kernels."""
    head = (
        f"{name}: {profile['step_ms']:.1f} ms a step, busy {profile['busy_ms']:.1f} ms "
        f"({profile['share_of_step_busy']:.3f}), {profile['launches']:.0f} launches"
    )
    return [head, *(f"  {one['ms']:8.3f} ms {one['calls']:6.0f}× {one['name'][:80]}" for one in profile["top"])]
