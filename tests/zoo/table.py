"""The table of the zoo, docs/models.md, and what it says of a class."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import transformers

from .measure import METHODS, MODES, RUNGS, Outcome
from .tasks import TASKS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_VERSION = re.compile(r"transformers (\d+\.\d+)")

_HEAD = """# Which models can be fine-tuned

Every class that transformers {version} has for these tasks, built from its configuration at toy size and clipped by
dpllm. Norms and clipped sum are compared with a loop in float64 that differentiates one row at a time, by itself
and without padding. `python -m tests.zoo` writes this file; `make test` repeats {sample} classes, `make test-deep` all.

- **full**: every parameter is trained; **LoRA**: factors of rank 2 on all linear layers and experts but not on
  routers, and the head of a classifier.
- **ghost**: `privacy.gradients: ghost`, the default, all rows in one backward pass. **per_unit**: one row at a time.
- **exact**: relative error of norms and sum below 1e-5 (1e-4 for the few classes that compute in float32 only).
- **taps**, **functions**, **row by row**: how many of the classes that are exact by ghost have every parameter tapped,
  have a parameter that is tapped where a module hands it to a function, or have a module that runs one row at a time,
  with as many launches as the microbatch has rows.
- LoRA on a router (PEFT's "all-linear" includes it for Mixtral and others) is exact as well; tests/zoo/test_zoo.py has
  the classes.
- **refused**: an error before a step is charged, with the reason below. **wrong**: neither exact nor refused.
- BigBird and BigBird-Pegasus have `attention_type="original_full"`: their block-sparse attention is refused, because
  a batch of short rows switches it off for all later ones.
- Parameters that have no part in the loss are frozen first, as `privacy.unused_parameters: freeze` does.

| task | mode | classes | built | exact by ghost | taps | functions | row by row | exact by per_unit | refused by both \
| wrong |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def document(outcomes: Sequence[Outcome]) -> str:
    """Return the text of docs/models.md."""
    version = ".".join(transformers.__version__.split(".")[:2])
    text = _HEAD.format(version=version, sample=SAMPLE_SIZE)
    text += "".join(f"| {' | '.join(row)} |\n" for row in _summary(outcomes))
    for task, about in TASKS.items():
        text += f"\n## {about.title}\n"
        for mode in MODES:
            text += _details([one for one in outcomes if (one.task, one.mode) == (task, mode)], mode)
    return text


SAMPLE_SIZE = 30


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


def _details(here: Sequence[Outcome], mode: str) -> str:
    """Return the classes of a task in one mode: exact ones by name, the others with their reason."""
    exact = [one.name for one in here if one.results and one.results["ghost"].kind == "exact"]
    text = f"\n**{'LoRA' if mode == 'lora' else 'Full'}, exact by ghost:** {', '.join(exact) or 'none'}\n"
    slow = [one.name for one in here if one.results and one.results["ghost"].rung == RUNGS[-1]]
    if slow:
        text += f"\nOf these with modules that run row by row: {', '.join(slow)}\n"
    others: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for one in here:
        if not one.results:
            others["not built", "", one.not_built].append(one.name)
        elif one.results["ghost"].kind != "exact":
            ghost, per_unit = one.results["ghost"], one.results["per_unit"]
            others[ghost.kind, f"{per_unit.kind}", _general(ghost.reason)].append(one.name)
    if others:
        text += "\n| classes | ghost | per_unit | reason |\n| --- | --- | --- | --- |\n"
    order = sorted(others.items(), key=lambda item: (item[0][0] == "not built", -len(item[1]), item[1]))
    for (ghost_kind, per_unit_kind, reason), names in order:
        text += f"| {', '.join(names)} | {ghost_kind} | {per_unit_kind} | {_cell(reason)} |\n"
    return text


def _general(reason: str) -> str:
    """Return a reason without numbers of one measurement, so that equal reasons are one line."""
    return "the loss of a row depends on other rows" if reason.startswith("The loss of a row depends") else reason


def _cell(text: str) -> str:
    text = re.sub(r"(/[\w.-]+){2,}/", "", text)
    return text.replace("|", "\\|").replace("<", "&lt;")


def stated() -> tuple[str, dict[tuple[str, str, str], str]]:
    """Return the version of transformers of the document, and the kind of each (task, class, mode) by ghost."""
    text = DOCUMENT.read_text(encoding="utf-8")
    version = _VERSION.search(text)
    kinds: dict[tuple[str, str, str], str] = {}
    for task, about in TASKS.items():
        section = text.split(f"\n## {about.title}\n")[1].split("\n## ")[0]
        full, lora = section.split("\n**LoRA, exact by ghost:**")
        for mode, part in (("full", full.split("\n**Full, exact by ghost:**")[1]), ("lora", lora)):
            for name in part.split("\n")[0].split(", "):
                kinds[task, name.strip(), mode] = "exact"
            for names, kind in re.findall(r"^\| ([\w, ]+) \| (refused|wrong|crash|not built) \|", part, re.MULTILINE):
                kinds.update({(task, name, mode): kind for name in names.split(", ")})
    return version.group(1) if version else "", kinds
