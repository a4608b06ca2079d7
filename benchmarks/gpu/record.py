"""The figures of a visit: one JSON file, rewritten after every part and method, for interrupted visits.

A part of a step fills in its `Figures`. It fails by raising, or by a figure outside its bounds (`Figures.check`). Its
earlier figures are kept, and the next part runs.
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

OK, WRONG, SKIPPED, NOT_REACHED, RUNNING = "ok", "WRONG", "skipped", "not reached", "running"

TRUSTED, DOUBTFUL, AVOIDED = "trusted", "doubtful", "avoided"
"""The Triton kernels: measured; measured after the PyTorch forms, since a check was WRONG; not run again."""


class Skipped(Exception):
    """Error: a part cannot run here; the message gives the reason."""


class Figures(dict[str, Any]):
    """The figures of a part.

    Attributes:
        wrong: a sentence for each figure outside its bounds.
        lines: the printed lines.
    """

    def __init__(self, save: Callable[[], None] = lambda: None, earlier: dict[str, Any] | None = None) -> None:
        """Start with the figures of an earlier attempt, if there was one.

        Args:
            save: writes the file.
            earlier: figures of a process that ended in this part.
        """
        super().__init__(earlier or {})
        self.save = save
        self.wrong: list[str] = []
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Print a line at once, and keep it."""
        print(f"   {line}", flush=True)
        self.lines.append(line)
        self.save()

    def check(self, name: str, value: float, at_least: float = -math.inf, at_most: float = math.inf) -> None:
        """Keep a figure, and print whether it is within its bounds; NaN is outside of any.

        >>> figures = Figures()
        >>> figures.check("error", 1e-7, at_most=1e-5)
           error: 1e-07 ok
        >>> figures.check("clipped", math.nan, at_most=9)
           clipped: nan WRONG, outside -inf to 9
        >>> figures.wrong
        ['clipped: nan, outside -inf to 9']
        """
        self[name] = value
        if at_least <= value <= at_most:
            self.say(f"{name}: {value:.4g} {OK}")
        else:
            outside = f"outside {at_least:g} to {at_most:g}"
            self.wrong.append(f"{name}: {value:.4g}, {outside}")
            self.say(f"{name}: {value:.4g} {WRONG}, {outside}")

    def require(self, holds: bool, otherwise: str) -> None:
        """Note a problem unless a condition holds."""
        if not holds:
            self.wrong.append(otherwise)
            self.say(f"{WRONG}: {otherwise}")


class Record:
    """The JSON file of all figures.

    Attributes:
        values: its contents: ``machine``, ``kernels`` (whether the Triton kernels are `TRUSTED` here, and why not), and
            ``steps``: for each step its parts, for each part its state, seconds, figures, lines and problems.
    """

    def __init__(self, path: Path) -> None:
        """Continue with the contents of the file."""
        self.path = path
        empty: dict[str, Any] = {"machine": {}, "kernels": {"state": TRUSTED, "why": ""}, "steps": {}}
        self.values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else empty

    def save(self) -> None:
        """Write the file; a reader sees either the old contents or the new."""
        scratch = self.path.with_suffix(".part")
        scratch.write_text(json.dumps(self.values, indent=1) + "\n")
        os.replace(scratch, self.path)

    def part(self, step: str, name: str) -> dict[str, Any] | None:
        """Return a part's entry, if it has begun."""
        return self.values["steps"].get(step, {}).get(name)

    def enter(self, step: str, name: str, **values: Any) -> dict[str, Any]:
        """Replace a part's entry, and write the file."""
        entry: dict[str, Any] = {"seconds": 0.0, "figures": {}, "lines": [], "wrong": [], **values}
        self.values["steps"].setdefault(step, {})[name] = entry
        self.save()
        return entry

    def doubt_kernels(self, state: str, why: str) -> None:
        """Note why the Triton kernels are no longer `TRUSTED`, and write the file."""
        if self.values["kernels"]["state"] != AVOIDED:
            self.values["kernels"] = {"state": state, "why": why}
        self.save()

    def running(self) -> tuple[str, str] | None:
        """Return the step and the name of the part that runs."""
        for step, parts in self.values["steps"].items():
            for name, entry in parts.items():
                if entry["state"] == RUNNING:
                    return step, name
        return None


def run_part(record: Record, step: str, name: str, function: Callable[[Figures], None]) -> str:
    """Run a part, keep its figures, and return its state. No exception of the part escapes."""
    earlier = record.part(step, name)
    entry = record.enter(step, name, state=RUNNING, began=time.time())
    figures = Figures(record.save, earlier and earlier["figures"])
    entry |= {"figures": figures, "lines": figures.lines, "wrong": figures.wrong}
    record.save()
    print(f"-- {step}: {name}", flush=True)
    begin, state = time.monotonic(), OK
    try:
        function(figures)
    except Skipped as why:
        state, entry["error"] = SKIPPED, str(why)
    except Exception as error:
        state, entry["error"] = WRONG, brief(error)
        figures.wrong.append(brief(error))
        entry["traceback"] = traceback.format_exc()[-3000:]
        print(entry["traceback"], flush=True)
    entry["seconds"] = round(time.monotonic() - begin, 2)
    entry["state"] = WRONG if figures.wrong else state
    record.save()
    tail = f": {entry['error']}" if "error" in entry else ""
    print(f"   {entry['state']} ({entry['seconds']:.1f} s){tail}", flush=True)
    return entry["state"]


def brief(error: BaseException) -> str:
    r"""The kind and the first line of an error.

    >>> brief(ValueError("first\nsecond"))
    'ValueError: first'
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


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
