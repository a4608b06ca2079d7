"""Measures every class, and writes the table in docs/models.md.

python -m tests.zoo                                     # all classes, three minutes on one idle core
python -m tests.zoo --only Mamba2ForCausalLM            # prints this class, and writes no table
    python -m tests.zoo --kept outcomes.json --only ...     # as before, except for these; writes both
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from .measure import MODES, Outcome, Result, measure
from .table import DOCUMENT, document
from .tasks import TASKS


def main() -> None:
    """Measure and print; write the table if no class was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="*", metavar="CLASS")
    parser.add_argument("--kept", type=Path, help="outcomes of earlier calls, to which those of this one are added")
    options = parser.parse_args()
    known = read(options.kept) if options.kept else {}
    for task in options.task:
        for name in TASKS[task].classes():
            if options.only is None or name in options.only:
                for one in [measure(task, name, mode) for mode in MODES]:
                    known[one.task, one.name, one.mode] = one
                    print(in_a_line(one), flush=True)
                if options.kept:
                    options.kept.write_text(json.dumps([asdict(one) for one in known.values()]), encoding="utf-8")
    every = [(task, name, mode) for task in TASKS for name in TASKS[task].classes() for mode in MODES]
    if all(key in known for key in every):
        DOCUMENT.write_text(document([known[key] for key in every]), encoding="utf-8")
        print(f"wrote {DOCUMENT}")


def read(path: Path) -> dict[tuple[str, str, str], Outcome]:
    """Return the outcomes in a file; none if there is no file."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    results = [{method: Result(**result) for method, result in one.pop("results").items()} for one in found]
    outcomes = [Outcome(**one, results=of_methods) for one, of_methods in zip(found, results, strict=True)]
    return {(one.task, one.name, one.mode): one for one in outcomes}


def in_a_line(one: Outcome) -> str:
    """Return an outcome in words."""
    found = "; ".join(f"{method} {r.kind} {r.error:.0e} {r.reason}".strip() for method, r in one.results.items())
    return f"{one.task:24} {one.name:42} {one.mode:5} {one.seconds:5.2f} s  {found or f'not built: {one.not_built}'}"


if __name__ == "__main__":
    main()
