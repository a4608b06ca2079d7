"""The tables of the zoo in docs/models.md, and what they state about a class."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import transformers

from .measure import METHODS, MODES, RUNGS, Outcome
from .tasks import TASKS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
SAMPLE_SIZE = 30
HEADING = "## Every class of transformers"
"""The tables begin here. The page above it is written by hand."""
_VERSION = re.compile(r"transformers (\d+\.\d+)")
_REASON_WIDTH = 90
_SLOW = "†"

_HEAD = """
Every class that transformers {version} has for these tasks is built from its configuration at toy size. Norms and
clipped sum are compared with a float64 loop that differentiates one row at a time, by itself and without padding.
`python -m tests.zoo` writes this part of the page; `make test` repeats {sample} classes, `make test-deep` all.

- **full** trains every parameter; **LoRA** trains factors of rank 2 on all linear layers and experts except routers,
  and the head of a classifier. LoRA on a router is exact as well (`tests/zoo/test_zoo.py`).
- **ghost** is the default of `privacy.gradients`, one backward pass for all rows. **per_unit** runs one row at a time.
- **exact**: the relative error of norms and sum is below 1e-5 (1e-4 for the few classes that compute only in float32).
- **taps**, **functions**, **row by row** divide the classes that are exact by ghost. Every parameter is tapped; or one
  is tapped where a module passes it to a function; or a module runs one row at a time ({slow}), with as many launches
  as the microbatch has rows.
- **refused**: an error before a step is charged. **wrong**: neither exact nor refused. **not built**: the zoo cannot
  build or call the class; `python -m tests.zoo --only CLASS` prints why.
- BigBird and BigBird-Pegasus have `attention_type="original_full"`. Their block-sparse attention is refused, because a
  batch of short rows switches it off for all later ones.
- Parameters without a part in the loss are frozen first, as `privacy.unused_parameters: freeze` does.

| task | mode | classes | built | exact by ghost | taps | functions | row by row | exact by per_unit | refused by both \
| wrong |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def document(outcomes: Sequence[Outcome]) -> str:
    """Return the text of docs/models.md: the part that is written by hand, and the tables."""
    version = ".".join(transformers.__version__.split(".")[:2])
    text = DOCUMENT.read_text(encoding="utf-8").split(HEADING)[0] + HEADING + "\n"
    text += _HEAD.format(version=version, sample=SAMPLE_SIZE, slow=_SLOW)
    text += "".join(f"| {' | '.join(row)} |\n" for row in _summary(outcomes))
    for task, about in TASKS.items():
        full, lora = ([one for one in outcomes if (one.task, one.mode) == (task, mode)] for mode in MODES)
        text += f"\n### {about.title}\n{_classes(full)}{_differences(full, lora)}"
    return text


def _summary(outcomes: Sequence[Outcome]) -> Iterator[list[str]]:
    for task, about in TASKS.items():
        for mode in MODES:
            here = [one for one in outcomes if (one.task, one.mode) == (task, mode)]
            built = [one for one in here if one.results]
            exact = {method: sum(one.results[method].kind == "exact" for one in built) for method in METHODS}
            refused = sum(all(r.kind == "refused" for r in one.results.values()) for one in built)
            wrong = sum(any(r.kind in ("wrong", "crash") for r in one.results.values()) for one in built)
            share = f" ({exact['ghost'] / max(1, len(built)):.0%})"
            rungs = [sum(one.results["ghost"].rung == rung for one in built) for rung in RUNGS]
            numbers = [len(here), len(built), f"{exact['ghost']}{share}", *rungs, exact["per_unit"], refused, wrong]
            yield [about.title, "LoRA" if mode == "lora" else mode, *map(str, numbers)]


def _classes(full: Sequence[Outcome]) -> str:
    """Return the classes of a task under full fine-tuning: exact ones by name, the others with their reason."""
    names = [one.name + (_SLOW if _is_slow(one) else "") for one in full if _is_exact(one)]
    return f"\n{_wrapped('**Full, exact by ghost:** ' + (', '.join(names) or 'none'))}\n{_table(_others(full))}"


def _differences(full: Sequence[Outcome], lora: Sequence[Outcome]) -> str:
    """Return what LoRA changes."""
    exact = {one.name for one in full if _is_exact(one)}
    more = [one.name for one in lora if _is_exact(one) and one.name not in exact]
    slow = [one.name for one in lora if _is_slow(one)]
    text = "**LoRA, exact by ghost:** the same classes, except for those of the next table, if there is one"
    text += f"; and {', '.join(more)}" if more else ""
    text += f". Row by row: {', '.join(slow)}" if slow else ". Row by row: none"
    before = _others(full)
    return f"\n{_wrapped(text)}\n" + _table(
        {name: row for name, row in _others(lora).items() if before.get(name) != row}
    )


def _is_exact(one: Outcome) -> bool:
    return bool(one.results) and one.results["ghost"].kind == "exact"


def _is_slow(one: Outcome) -> bool:
    return bool(one.results) and one.results["ghost"].rung == RUNGS[-1]


def _others(here: Sequence[Outcome]) -> dict[str, tuple[str, str, str]]:
    """Return the cells of each class that is not exact by ghost."""
    cells = {}
    for one in here:
        if not one.results:
            cells[one.name] = ("not built", "", "")
        elif not _is_exact(one):
            ghost, per_unit = one.results["ghost"], one.results["per_unit"]
            cells[one.name] = (ghost.kind, per_unit.kind, _cell(_general(ghost.reason)))
    return cells


def _table(cells: dict[str, tuple[str, str, str]]) -> str:
    if not cells:
        return ""
    by_reason: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, row in cells.items():
        by_reason[row].append(name)
    order = sorted(by_reason.items(), key=lambda item: (item[0][0] == "not built", -len(item[1]), item[1]))
    rows = (f"| {', '.join(names)} | {' | '.join(row)} |\n" for row, names in order)
    return "\n| classes | ghost | per_unit | reason |\n| --- | --- | --- | --- |\n" + "".join(rows)


def _general(reason: str) -> str:
    """Return a reason without numbers of one measurement, so that equal reasons are one line."""
    return "the loss of a row depends on other rows" if reason.startswith("The loss of a row depends") else reason


def _cell(text: str) -> str:
    text = re.sub(r"(/[\w.-]+){2,}/", "", text)
    return textwrap.shorten(text, _REASON_WIDTH, placeholder=" …").replace("|", "\\|").replace("<", "&lt;")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def stated() -> tuple[str, dict[tuple[str, str, str], str]]:
    """Return the version of transformers of the page, and the kind of each (task, class, mode) by ghost."""
    text = DOCUMENT.read_text(encoding="utf-8").split(HEADING)[1]
    version = _VERSION.search(text)
    kinds: dict[tuple[str, str, str], str] = {}
    for task, about in TASKS.items():
        section = text.split(f"\n### {about.title}\n")[1].split("\n### ")[0]
        full, lora = section.split("\n**LoRA, exact by ghost:**")
        names = re.findall(r"\w+", full.split("\n**Full, exact by ghost:**")[1].split("\n\n")[0])
        of_full = dict.fromkeys(names, "exact") | _kinds(full)
        more = re.search(r";\s+and\s+([\w,\s]+)\.\s+Row\s", lora)
        of_lora = of_full | dict.fromkeys(re.findall(r"\w+", more[1]) if more else (), "exact") | _kinds(lora)
        for mode, found in (("full", of_full), ("lora", of_lora)):
            kinds |= {(task, name, mode): kind for name, kind in found.items()}
    return version.group(1) if version else "", kinds


def _kinds(text: str) -> dict[str, str]:
    rows = re.findall(r"^\| ([\w, ]+) \| (refused|wrong|crash|not built) \|", text, re.MULTILINE)
    return {name: kind for names, kind in rows for name in names.split(", ")}
