"""The figures of one or several visits, complete or not, as a section of benchmarks/results.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpu.plan import COMMANDS, COMPILED, FULL_1B, LORA_8B, OURS, PLAIN
from gpu.record import NOT_REACHED, OK, SKIPPED, WRONG, shown
from gpu.summary import line_of

SAME = ("device", "torch", "triton", "transformers", "source", "toy")
"""Names that must agree in all parts of one section."""
OPTIONAL, ABSENT = ("deepspeed", "bitsandbytes", "opacus", "fastDP"), "not installed"
GOALS = (
    ("headline", FULL_1B, OURS, 0.95),
    ("headline", f"{FULL_1B}, compiled", COMPILED[1], 0.92),
    ("headline", LORA_8B, OURS, 0.985),
    ("headline", f"{LORA_8B}, compiled", COMPILED[1], 0.95),
)
"""Step, part, method, and the least speed over training without privacy, both eager or both compiled."""
NONE = "-"


def main(paths: list[str]) -> int:
    """Print the section; return the exit status."""
    try:
        print(as_markdown([json.loads(Path(path).read_text()) for path in paths]))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several visits as one; of a part that several have, the last that has figures.

    Raises:
        ValueError: no visit, or visits of different machines, versions or code.
    """
    if not records:
        raise ValueError("Give at least one gpu.json.")
    for record in records[1:]:
        for name in SAME:
            ours, theirs = records[0]["machine"].get(name), record["machine"].get(name)
            if ours != theirs:
                raise ValueError(f"The visits cannot be one section: {name} is {ours} in one and {theirs} in another.")
    steps: dict[str, Any] = {}
    for name in (step for command in COMMANDS.values() for step in command.steps):
        for record in records:
            for part, entry in record["steps"].get(name, {}).items():
                earlier = steps.setdefault(name, {}).get(part)
                if earlier is None or entry["figures"] or not earlier["figures"]:
                    steps[name][part] = entry
    return {"machine": records[0]["machine"], "steps": steps}


def as_markdown(records: list[dict[str, Any]]) -> str:
    """Return the section: machine, goals, rows, whole steps, all figures, and the problems.

    Raises:
        ValueError: as of `merged`.
    """
    record = merged(records)
    steps = record["steps"]
    lines = [
        "## On a GPU",
        "",
        *_machine(record["machine"]),
        "",
        *_overview(steps),
        "",
        *_goals(steps),
        "",
        *_rows(steps),
    ]
    for step, parts in steps.items():
        lines += ["", f"### {step.capitalize()}", "", *_figures(parts)]
    return "\n".join(lines)


def _machine(machine: dict[str, Any]) -> list[str]:
    packages = ("torch", "triton", "transformers", "accelerate", "peft", *OPTIONAL)
    there = [name for name in packages if machine.get(name, ABSENT) != ABSENT]
    versions = ", ".join(f"{name} {machine[name]}" for name in there)
    code = f"commit {machine.get('commit')} (source {machine.get('source')})"
    lines = [f"`benchmarks/gpu.sh`, {code}, on {machine.get('device')}; Python {machine.get('python')}, {versions}."]
    if machine.get("toy"):
        lines += ["", "**Tiny sizes on the CPU: the commands ran, and no figure says anything about speed.**"]
    return lines


def _overview(steps: dict[str, Any]) -> list[str]:
    states = (OK, WRONG, SKIPPED, NOT_REACHED)
    lines = [f"| step | {' | '.join(states)} | s |", "|---|---:|---:|---:|---:|---:|"]
    for step, parts in steps.items():
        found = [part["state"] for part in parts.values()]
        seconds = sum(part["seconds"] for part in parts.values())
        lines.append(f"| {step} | {' | '.join(str(found.count(state)) for state in states)} | {seconds:.0f} |")
    problems = [
        f"- {step}, {name}: {_cell(text)}"
        for step, parts in steps.items()
        for name, part in parts.items()
        for text in part["wrong"] or [part.get("error", "")]
        if part["state"] not in (OK, SKIPPED)
    ]
    return [*lines, "", *(problems or ["Nothing is WRONG."])]


def _goals(steps: dict[str, Any]) -> list[str]:
    """The speeds that the library has to reach."""
    lines = ["| | goal | speed over non-private | Opacus | fastDP |", "|---|---|---|---|---|"]
    for step, name, method, goal in GOALS:
        methods = steps.get(step, {}).get(name, {}).get("figures", {}).get("methods", {})
        peers = [_ratio(methods.get(peer), "speed_ratio") for peer in ("opacus", "fastdp")]
        speed = _ratio(methods.get(method), "speed_ratio", goal, 1)
        lines.append(f"| {_cell(name)} | ≥ {goal:g} | {speed} | {' | '.join(peers)} |")
    for name in (FULL_1B, LORA_8B):
        figures = steps.get("whole step", {}).get(name, {}).get("figures", {})
        goal = figures.get("goal", 0.93 if name == FULL_1B else 0.97)
        lines.append(f"| {name}, whole step | ≥ {goal:g} | {_ratio(figures, 'speed_ratio', goal, 1)} | - | - |")
    return lines


def _rows(steps: dict[str, Any]) -> list[str]:
    """Every row and method that was measured."""
    lines = [
        "| model, mode, B×T | method | target speed | speed | target memory | memory | ms | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for parts in steps.values():
        for name, part in parts.items():
            targets = part["figures"].get("targets", {})
            for method, found in part["figures"].get("methods", {}).items():
                own = targets.get(method, {})
                cells = [
                    _cell(name),
                    method,
                    _target("≥", own.get("speed")),
                    "1" if method == PLAIN else _ratio(found, "speed_ratio", own.get("speed"), 1),
                    _target("≤", own.get("memory")),
                    "1" if method == PLAIN else _ratio(found, "memory_ratio", own.get("memory"), -1),
                    f"{found['median_ms']:.1f}" if "median_ms" in found else NONE,
                    f"{found['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in found else NONE,
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _target(sign: str, value: float | None) -> str:
    return NONE if value is None else f"{sign} {value:g}"


def _ratio(figures: dict[str, Any] | None, name: str, target: float | None = None, direction: int = 1) -> str:
    """Return a ratio, and whether it reaches the target (1: from below) or stays within it (-1); else the reason.

    >>> _ratio({"speed_ratio": 0.94}, "speed_ratio", 0.95), _ratio({"error": "refused"}, "speed_ratio")
    ('0.940, missed', 'refused')
    """
    if not figures or name not in figures:
        return _cell((figures or {}).get("error", NONE))[:80]
    value = figures[name]
    if target is None:
        return f"{value:.3f}"
    return f"{value:.3f}, {'met' if direction * (value - target) >= 0 else 'missed'}"


def _figures(parts: dict[str, Any]) -> list[str]:
    """All parts with their lines."""
    lines = ["| part | | figures |", "|---|---|---|"]
    for name, part in parts.items():
        told = part["lines"] or [line_of(name, part["figures"])]
        text = "<br>".join(_cell(line) for line in told if line) or _cell(part.get("error", NONE))
        lines.append(f"| {_cell(name)} | {part['state']} | {text} |")
    return lines


def _cell(text: Any) -> str:
    """Text that fits into a table: one line, and no bar."""
    return " ".join(shown(text).replace("|", "/").split())[:600]
