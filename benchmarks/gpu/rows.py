"""Steps 2, 3 and 6: rows of the target table, all methods of a row on one model, each measured by itself.

The methods share their weights. Each is built, warmed up, measured and dropped before the next one exists, so that no
other library's memory counts for it. Its times alternate with those of its base: training without privacy on the same
model, compiled where the method is compiled. An error, a lack of memory or the end of the part's time in one method
leaves the figures of the others as they are. If a process ends in a method, another one continues with the next.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from methods import COMPILED, METHODS, OURS_COMPILED, OWN, PEERS, PLAIN, Step, compile_blocks, own
from targets import TARGETS
from throughput import batch_of, build_model, peak_memory, timed, twin
from torch import Tensor, nn

from gpu.record import AVOIDED, DOUBTFUL, RUNNING, TRUSTED, Figures, brief
from gpu.setting import LOST, Setting, free_memory, is_lost

UNFUSED = ", PyTorch forms"
MOST_ROUNDS, SHORT_MS = 20, 2500.0  # rounds of at most this many milliseconds together are more than the least number
NO_TIME = "no time left"
Make = Callable[[nn.Module], Step]


def measure(figures: Figures, setting: Setting, number: int, methods: Sequence[str]) -> None:
    """Measure methods on row ``number`` of the target table; methods that have figures are not measured again."""
    target, settings = setting.row(number)
    figures["targets"] = {
        one.method: {"speed": one.speed, "memory": one.memory}
        for one in TARGETS
        if replace(one, method=target.method, speed=target.speed, memory=target.memory) == target
    }
    results: dict[str, Any] = figures.setdefault("methods", {})
    free_memory()
    begin = time.monotonic()
    model: Any = build_model(settings)
    ids_BT = batch_of(settings, model.config.vocab_size)
    figures["build_s"] = time.monotonic() - begin
    bases: dict[str, Step] = {}
    for name, make in forms(methods, setting.kernels, setting.toy):
        if not is_wanted(name, results):
            continue
        if setting.is_over():
            results.setdefault(name, {"error": NO_TIME})
            continue
        earlier = results.get(name)  # of a base that an earlier process measured
        results.setdefault(name, {"error": RUNNING})
        figures.save()
        try:
            step: Step | None = make(twin(model))
            assert step is not None
            base = COMPILED if name == OURS_COMPILED and COMPILED in bases else PLAIN
            fresh = times_and_memory(step, bases.get(base), ids_BT, settings.warmup, settings.rounds, setting)
            results[name] = earlier or fresh
            if name != base and base in bases and not earlier:
                compare(fresh, base, results[base])
            if name in (PLAIN, COMPILED):
                bases[name] = step
        except Exception as error:
            failed = {"error": brief(error), "traceback": traceback.format_exc()[-1500:]}
            if is_lost(setting.device):
                results[name] = failed | {"error": RUNNING, "reason": failed["error"]}
                figures.save()
                os._exit(LOST)  # a second process continues with the next method
            results[name] = earlier or failed
        step = None
        free_memory()
        figures.say(f"{name}: {in_words(results[name])}")
    figures.wrong += [f"{name}: {results[name]['error']}" for name in (PLAIN, *OWN) if "error" in results.get(name, {})]
    del bases, model
    if COMPILED in methods:
        torch._dynamo.reset()
    free_memory()


def is_wanted(name: str, results: dict[str, Any]) -> bool:
    """Return whether a method is measured: once, a base again, and PyTorch forms if the kernels have no figures.

    >>> is_wanted("dpllm, PyTorch forms", {"dpllm": {"median_ms": 3.0}}), is_wanted("dpllm", {})
    (False, True)
    """
    if name.endswith(UNFUSED) and "median_ms" in results.get(name.removesuffix(UNFUSED), {}):
        return False
    return name not in results or (name in (PLAIN, COMPILED) and "error" not in results[name])


def forms(methods: Sequence[str], kernels: str, toy: bool) -> list[tuple[str, Make]]:
    """Return each method with its maker.

    One of ours is followed by its PyTorch forms, which are only measured if it failed. They come first if the Triton
    kernels are doubtful, and instead of them if they are avoided. A peer that is not installed is left out.
    """
    backend = "eager" if toy else "inductor"
    makers: list[tuple[str, Make]] = []
    for name in methods:
        if name in OWN:
            fused: tuple[str, Make] = name, METHODS[name]
            unfused: tuple[str, Make] = name + UNFUSED, functools.partial(own, name=name, fused=False)
            makers += {TRUSTED: [fused, unfused], DOUBTFUL: [unfused, fused]}.get(kernels, [unfused])
        elif name in (COMPILED, OURS_COMPILED):
            private: Make = functools.partial(own, fused=False if kernels == AVOIDED else None)
            kind = private if name == OURS_COMPILED else METHODS[PLAIN]
            makers.append((name, functools.partial(_compiled, kind, backend)))
        elif name not in PEERS or importlib.util.find_spec(PEERS[name]) is not None:
            makers.append((name, METHODS[name]))
    return makers


def _compiled(kind: Make, backend: str, model: nn.Module) -> Step:
    return kind(compile_blocks(model, backend))


def times_and_memory(
    step: Step, base: Step | None, ids_BT: Tensor, warmup: int, rounds: int, setting: Setting
) -> dict[str, Any]:
    """Return the seconds of the first step, the peak, and times in turn with the base's, as far as time allows."""
    first = timed(step, ids_BT) / 1000  # compiles kernels, and makes the one-off checks
    for _ in range(warmup):
        timed(step, ids_BT)
    figures: dict[str, Any] = {"first_s": first, "peak_bytes": peak_memory(step, ids_BT), "ms": [], "base_ms": []}
    step.forget()
    if rounds > 1:  # more where a step is short
        rounds = max(rounds, min(MOST_ROUNDS, int(SHORT_MS / (2 * timed(step, ids_BT)))))
    for _ in range(rounds):
        if figures["ms"] and setting.is_over():
            break
        if base is not None:
            figures["base_ms"].append(timed(base, ids_BT))
        figures["ms"].append(timed(step, ids_BT))
    return figures | {"median_ms": statistics.median(figures["ms"])}


def compare(figures: dict[str, Any], base: str, of_base: dict[str, Any]) -> None:
    """Add the ratios: speed is base / method, memory is method / base."""
    figures["base"] = base
    figures["speed_ratio"] = statistics.median(figures["base_ms"]) / figures["median_ms"]
    figures["memory_ratio"] = figures["peak_bytes"] / of_base["peak_bytes"]


def in_words(figures: dict[str, Any]) -> str:
    """One method's figures in a line."""
    if "error" in figures:
        return figures["error"]
    ms, gib = f"{figures['median_ms']:.1f} ms", f"{figures['peak_bytes'] / 2**30:.2f} GiB"
    compared = ""
    if "base" in figures:
        ratios = f"speed {figures['speed_ratio']:.3f}, memory {figures['memory_ratio']:.3f}"
        compared = f"{ratios} of {figures['base']}, "
    return f"{compared}{ms}, {gib}, first step {figures['first_s']:.1f} s, {len(figures['ms'])} rounds"
