"""Run the steps of a stage one after another, and save the figures after each.

A step fills in figures. It fails by raising, or by a figure outside its bounds (`Figures.check`); the figures that it
had found until then is kept, and the next step goes on. Nothing is retried, and nothing that failed is left out.
"""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, NOT_REACHED, RUNNING = "passed", "failed", "skipped", "not reached", "running"


class Skipped(Exception):
    """Error: a step cannot run here; the message gives the reason."""


class Figures(dict[str, Any]):
    """The figures of a step.

    Attributes:
        wrong: a sentence for each figure that is not as it should be.
    """

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.wrong: list[str] = []

    def check(self, name: str, value: float, at_least: float = -math.inf, at_most: float = math.inf) -> None:
        """Keep a figure, and note if it is outside its bounds; NaN is outside of any.

        >>> figures = Figures()
        >>> figures.check("error", 1e-7, at_most=1e-5)
        >>> figures.check("clipped", math.nan, at_most=9)
        >>> figures.wrong
        ['clipped is nan, outside -inf to 9']
        """
        self[name] = value
        if not at_least <= value <= at_most:
            self.wrong.append(f"{name} is {value:.4g}, outside {at_least:g} to {at_most:g}")

    def require(self, holds: bool, otherwise: str) -> None:
        """Note a problem unless a condition holds."""
        if not holds:
            self.wrong.append(otherwise)


class Record:
    """The JSON file of all figures, rewritten after every change, so that an interrupted run keeps its figures."""

    def __init__(self, path: Path) -> None:
        """Continue with the contents of the file."""
        self._path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": {}, "stages": {}}

    def save(self) -> None:
        """Write the file; a reader sees the old one or the new one."""
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps(self.values, indent=1) + "\n")
        os.replace(scratch, self._path)

    def stage(self, number: int, title: str) -> dict[str, Any]:
        """Return an empty entry of a stage: a stage that is run again replaces its old entry."""
        entry = self.values["stages"][str(number)] = {"title": title, "steps": {}}
        self.save()
        return entry

    def close(self, numbers: list[int], why: str) -> None:
        """Note where the process of some stages ended: in the steps that ran, or before the first of a stage."""
        stages = self.values["stages"]
        steps = [step for stage in stages.values() for step in stage["steps"].values() if step["state"] == RUNNING]
        missing = [number for number in numbers if str(number) not in stages]
        if not steps:
            at = stages.setdefault(str((missing or numbers[-1:])[0]), {"title": "", "steps": {}})
            steps = [at["steps"].setdefault("the stage's process", {"figures": {}})]
        for step in steps:
            step |= {"state": FAILED, "error": why}
        for number in missing:
            stages.setdefault(str(number), {"title": "", "steps": {}})
        self.save()

    def failed(self, number: int) -> int:
        """How many steps of a stage failed."""
        return sum(step["state"] == FAILED for step in self.values["stages"][str(number)]["steps"].values())


Step = Callable[[Figures, Any], None]


def run_stage(
    record: Record,
    number: int,
    title: str,
    steps: list[tuple[str, Step]],
    setting: Any,
    seconds: float,
    device_is_lost: Callable[[], bool] = lambda: False,
) -> None:
    """Run all steps; after `seconds` the remaining ones are noted as not reached.

    Args:
        record: where the figures go.
        number: of the stage.
        title: in words.
        steps: names and functions.
        setting: argument of the functions.
        seconds: for the whole stage.
        device_is_lost: asked after a failure; nothing can be run any more then.
    """
    entry = record.stage(number, title)
    begin, lost = time.monotonic(), False
    print(f"\n== stage {number}: {title}", flush=True)
    for name, function in steps:
        if lost or time.monotonic() - begin > seconds:
            why = "the device is lost" if lost else f"the {seconds:.0f} s of this stage were over"
            entry["steps"][name] = {"state": NOT_REACHED, "error": why, "figures": {}}
        else:
            _run(record, entry, name, function, setting)
            lost = entry["steps"][name]["state"] == FAILED and device_is_lost()
        record.save()
        _print(name, entry["steps"][name])


def _run(record: Record, entry: dict[str, Any], name: str, function: Step, setting: Any) -> None:
    figures, begin = Figures(), time.monotonic()
    step: dict[str, Any] = {"state": RUNNING, "figures": figures}
    entry["steps"][name] = step
    record.save()
    try:
        function(figures, setting)
    except Skipped as why:
        step |= {"state": SKIPPED, "error": str(why)}
    except Exception as error:
        lines = str(error).splitlines()
        step |= {"state": FAILED, "error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        step["traceback"] = traceback.format_exc()
    else:
        step["state"] = PASSED
    if figures.wrong:  # also beside an error
        wrong = "; ".join(figures.wrong)
        step |= {"state": FAILED, "error": f"{wrong}; {step['error']}" if "error" in step else wrong}
    step["seconds"] = round(time.monotonic() - begin, 3)


def _print(name: str, step: dict[str, Any]) -> None:
    tail = f": {step['error']}" if step.get("error") else ""
    print(f"-- {name}: {step['state']} ({step.get('seconds', 0):.1f} s){tail}", flush=True)
    for key, value in step["figures"].items():
        print(f"     {key}: {shown(value)}", flush=True)
    if "traceback" in step:
        print(step["traceback"], flush=True)


def shown(value: Any) -> str:
    """A figure in a few digits; a table in one line.

    >>> shown({"a": 0.123456, "b": [1, 2.5]})
    'a 0.1235, b 1 2.5'
    """
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
