"""The figures of one or several runs as a section of benchmarks/results.md."""

from __future__ import annotations

from typing import Any

from gpu.record import FAILED, NOT_REACHED, PASSED, SKIPPED, shown

SAME = ("device", "torch", "triton", "transformers", "source", "toy")
"""Names that must agree in all parts of one section."""
OPTIONAL, ABSENT = ("deepspeed", "bitsandbytes", "opacus", "fastDP"), "not installed"


def merged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one; of a stage that several have, the last.

    Raises:
        ValueError: no run, or runs of different machines, versions or code.
    """
    if not records:
        raise ValueError("Give at least one gpu.json.")
    for record in records[1:]:
        for name in SAME:
            ours, theirs = records[0]["machine"].get(name), record["machine"].get(name)
            if ours != theirs:
                raise ValueError(f"The runs cannot be one section: {name} is {ours} in one and {theirs} in another.")
    stages = {number: stage for record in records for number, stage in record["stages"].items()}
    return {"machine": records[0]["machine"], "stages": dict(sorted(stages.items(), key=lambda item: int(item[0])))}


def as_markdown(records: list[dict[str, Any]]) -> str:
    """Return the section: machine, targets met and missed, all figures, and the failures.

    Raises:
        ValueError: as of `merged`.
    """
    record = merged(records)
    lines = ["## On a GPU", "", *_machine(record["machine"]), ""]
    stages = record["stages"]
    lines += _overview(stages)
    if "2" in stages:
        lines += ["", *_targets(stages["2"]["steps"])]
    for stage in stages.values():
        lines += ["", f"### {stage['title'].capitalize()}", "", *_figures(stage["steps"])]
    return "\n".join(lines)


def _machine(machine: dict[str, Any]) -> list[str]:
    packages = ("torch", "triton", "transformers", "accelerate", "peft", *OPTIONAL)
    there = [name for name in packages if machine.get(name, ABSENT) != ABSENT]
    versions = ", ".join(f"{name} {machine[name]}" for name in there)
    code = f"commit {machine.get('commit')} (source {machine.get('source')})"
    lines = [f"`benchmarks/gpu.sh`, {code}, on {machine.get('device')}; Python {machine.get('python')}, {versions}."]
    if machine.get("toy"):
        lines += ["", "**Tiny sizes on the CPU: the script ran, and no figure says anything about speed.**"]
    return lines


def _overview(stages: dict[str, Any]) -> list[str]:
    lines = ["| stage | passed | failed | skipped | not reached | s |", "|---|---:|---:|---:|---:|---:|"]
    for number, stage in stages.items():
        steps = list(stage["steps"].values())
        states = [step["state"] for step in steps]
        counts = [str(states.count(state)) for state in (PASSED, FAILED, SKIPPED, NOT_REACHED)]
        seconds = sum(step.get("seconds", 0.0) for step in steps)
        lines.append(f"| {number}, {stage['title']} | {' | '.join(counts)} | {seconds:.0f} |")
    failures = [
        f"- stage {number}, {name}: {_cell(step['error'])}"
        for number, stage in stages.items()
        for name, step in stage["steps"].items()
        if step["state"] in (FAILED, NOT_REACHED)
    ]
    return [*lines, "", *(failures or ["Nothing failed."])]


def _targets(steps: dict[str, Any]) -> list[str]:
    """Every row that was measured, and whether it meets its target."""
    lines = [
        "| model, mode, B×T | target speed | speed | target memory | memory | non-private ms | ms | opacus | fastdp |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, step in steps.items():
        figures = step["figures"]
        if "target_speed" not in figures:
            continue
        ms = {method: sorted(times)[len(times) // 2] for method, times in figures["ms"].items()}
        cells = [
            name,
            _target("≥", figures["target_speed"]),
            _met(figures["speed_ratio"], figures["target_speed"], 1),
            _target("≤", figures["target_memory"]),
            _met(figures["memory_ratio"], figures["target_memory"], -1),
            *(f"{ms[method]:.1f}" for method in ("non-private", "dpllm")),
            *(_peer(steps.get(f"{other}: {name}")) for other in ("opacus", "fastdp")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _target(sign: str, value: float | None) -> str:
    return "-" if value is None else f"{sign} {value:g}"


def _met(value: float, target: float | None, direction: int) -> str:
    """The figure, and whether it reaches the target (1: from below) or stays within it (-1).

    >>> _met(0.94, 0.95, 1), _met(1.0, 1.1, -1), _met(0.5, None, 1)
    ('0.940, missed', '1.000, met', '0.500')
    """
    if target is None:
        return f"{value:.3f}"
    return f"{value:.3f}, {'met' if direction * (value - target) >= 0 else 'missed'}"


def _peer(step: dict[str, Any] | None) -> str:
    if step is None:
        return "-"
    figures = step["figures"]
    if "speed_ratio" in figures:
        return f"{figures['speed_ratio']:.3f} / {figures['memory_ratio']:.3f}"
    return _cell(figures.get("refused") or step.get("error") or step["state"])


def _figures(steps: dict[str, Any]) -> list[str]:
    """All steps with their figures; a list of tables as one line each."""
    lines = ["| step | | figures |", "|---|---|---|"]
    for name, step in steps.items():
        parts = []
        for key, value in step["figures"].items():
            rows = value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]
            parts += [f"{key}: {shown(row)}" for row in rows]
        text = "<br>".join(_cell(part) for part in parts) or _cell(step.get("error", ""))
        lines.append(f"| {_cell(name)} | {step['state']} | {text} |")
    return lines


def _cell(text: str) -> str:
    """Text that fits into a table: one line, and no bar."""
    return " ".join(str(text).replace("|", "/").split())[:600]
