"""The end of a visit's output: every WRONG line, then one line for each part that has a figure to compare."""

from __future__ import annotations

from typing import Any

from gpu.record import NOT_REACHED, OK, SKIPPED, WRONG

MOST = 4000  # characters; only the end of a long output may come back
_WRONG, _LINE = 1800, 260  # characters for the WRONG lines together, and for any line


def text_of(values: dict[str, Any], steps: list[str], tail: str) -> str:
    """Return the summary of some steps, in at most `MOST` characters.

    Args:
        values: the contents of gpu.json.
        steps: names of the steps, in order.
        tail: the end of the first line.
    """
    parts = [(step, name, part) for step in steps for name, part in values["steps"].get(step, {}).items()]
    states = [part["state"] for _, _, part in parts]
    counts = ", ".join(f"{states.count(state)} {state}" for state in (OK, WRONG, SKIPPED, NOT_REACHED))
    head = [f"== {values['machine'].get('device', 'no device')}: {counts}; {tail}"]
    if values["kernels"]["why"]:
        head.append(f"Triton kernels {values['kernels']['state']}: {values['kernels']['why']}")
    missing = [f"{step}: {name}" for step, name, part in parts if part["state"] == NOT_REACHED]
    head += [f"not reached: {'; '.join(missing)}"] if missing else []
    wrong = [f"{WRONG} {step}, {name}: {sentence}" for step, name, part in parts for sentence in part["wrong"]]
    lines = _fitting(wrong, _WRONG, f"more {WRONG} lines in gpu.json")
    lines = [*(_cut(line) for line in head), *lines]
    left = MOST - sum(len(line) + 1 for line in lines)
    tables = [line for _, name, part in parts if (line := line_of(name, part["figures"]))]
    return "\n".join(lines + _fitting(tables, left, "more lines in gpu.json"))


def _cut(line: str) -> str:
    one = " ".join(line.split())
    return one if len(one) <= _LINE else one[: _LINE - 1] + "…"


def _fitting(lines: list[str], most: int, more: str) -> list[str]:
    """Return the lines that fit, and the number of the others.

    >>> _fitting(["abc", "def", "ghi"], 20, "more")
    ['abc', 'def', 'ghi']
    >>> _fitting(["abc", "def", "ghi" * 4], 20, "more")
    ['abc', 'def', '1 more']
    """
    cut = [_cut(line) for line in lines]
    if sum(len(line) + 1 for line in cut) <= most:
        return cut
    room, lines_kept = most - len(more) - 5, []
    for line in cut:
        room -= len(line) + 1
        if room < 0:
            break
        lines_kept.append(line)
    return [*lines_kept, f"{len(cut) - len(lines_kept)} {more}"]


def line_of(name: str, figures: dict[str, Any]) -> str:
    """Return a part's line; none if it has nothing to compare."""
    if "methods" not in figures:
        return f"{name}: {figures['summary']}" if "summary" in figures else ""
    targets = figures.get("targets", {})
    return f"{name}: {'; '.join(_method(one, of, targets.get(one, {})) for one, of in figures['methods'].items())}"


def _method(name: str, figures: dict[str, Any], target: dict[str, Any]) -> str:
    """One method: its speed and memory over its base with their targets, or its time, or its error.

    >>> _method("dpllm", {"speed_ratio": 0.95, "memory_ratio": 1.0}, {"speed": 0.95, "memory": 1.1})
    'dpllm 0.950/1.000 (≥ 0.95/≤ 1.1)'
    """
    if "speed_ratio" in figures:
        wanted = "/".join(f"{sign} {target[one]}" for one, sign in (("speed", "≥"), ("memory", "≤")) if target.get(one))
        ratios = f"{name} {figures['speed_ratio']:.3f}/{figures['memory_ratio']:.3f}"
        return f"{ratios} ({wanted})" if wanted else ratios
    if "median_ms" in figures:
        return f"{name} {figures['median_ms']:.1f} ms {figures['peak_bytes'] / 2**30:.1f} GiB"
    return f"{name} {figures.get('error', '')[:50]}"
