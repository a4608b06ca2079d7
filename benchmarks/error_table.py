"""How exact the clipped sum is: model x mode x dtype against a float64 loop of single-row autograd.

    python benchmarks/error_table.py [--models gpt2 llama] [--modes full] [--dtypes float64 bfloat16]
                                     [--checkpointing none reentrant] [--json errors.json]

Models are tiny random instances of the architectures (tests/reference/zoo.py). A cell says

    error / released

error: relative l2 error of the clipped sum against the loop's, formed with the factors that the clipper used; the
largest over heads (tied, untied) and checkpointing. In bfloat16 this is the rounding of the activations, which any
training in bfloat16 has; in brackets the same against autograd in the same precision, on the same activations.
released: the largest norm of one unit's contribution, over C, for units whose gradient is larger than C. It must
not exceed 1.

"-": with dropout on, a float64 loop does not draw the numbers that the model drew; the value in brackets counts.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dpllm.ghost.refusals import GhostError
from tests.reference.oracle import compare, released_over_clip_norm
from tests.reference.zoo import CHECKPOINTING, DTYPES, FAMILIES, MODES, Case, is_meaningful

LOW_PRECISION = ("bfloat16", "autocast")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--checkpointing", nargs="+", choices=CHECKPOINTING, default=["none"])
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    return parser.parse_args(arguments)


def cases_of(arguments: argparse.Namespace) -> Iterator[Case]:
    """Return every meaningful requested combination."""
    for model in arguments.models:
        for mode in arguments.modes:
            for dtype in arguments.dtypes:
                for tied in FAMILIES[model].heads:
                    for checkpointing in arguments.checkpointing:
                        if is_meaningful(model, mode, tied):
                            yield Case(model, mode, tied, dtype, checkpointing)


def measure(case: Case) -> dict:
    """Return the errors and released norm of one case; None if there is nothing to compare with."""
    row = {
        "model": case.family,
        "mode": case.mode,
        "tied": case.tied,
        "dtype": case.dtype,
        "checkpointing": case.checkpointing,
        "sum_error": None,
        "norm_error": None,
        "sum_error_same_precision": None,
        "released_over_clip_norm": None,
        "refused": None,
    }
    try:
        if case.dtype == "float64" or not case.has_dropout:
            comparison = compare(case)
            row["sum_error"], row["norm_error"] = comparison.sum_error, comparison.norm_error
        if case.dtype in LOW_PRECISION or (case.has_dropout and case.dtype != "float64"):
            row["sum_error_same_precision"] = compare(case, same_precision=True).sum_error
        row["released_over_clip_norm"] = released_over_clip_norm(case)[1]
    except GhostError as error:
        row["refused"] = str(error)
    return row


def _largest(rows: list[dict], key: str) -> float | None:
    """Return the largest value, None if there is none; a NaN counts as the largest."""
    values = [row[key] for row in rows if row[key] is not None]
    return max(values, key=lambda value: math.inf if math.isnan(value) else value) if values else None


def _cell(rows: list[dict]) -> str:
    if not rows:
        return ""
    if any(row["refused"] for row in rows):
        return "refused"
    error, same, released = (
        _largest(rows, key) for key in ("sum_error", "sum_error_same_precision", "released_over_clip_norm")
    )
    text = "-" if error is None else f"{error:.1e}"
    if same is not None:
        text += f" [{same:.1e}]"
    return f"{text} / {released:.6f}"


def markdown(rows: list[dict], dtypes: list[str]) -> str:
    """Return the table, one line per model and mode, and a last line with the largest values."""
    lines = ["| model | mode | " + " | ".join(dtypes) + " |", "|---|---|" + "---|" * len(dtypes)]
    kinds = list(dict.fromkeys((row["model"], row["mode"]) for row in rows))
    for model, mode in kinds:
        of_kind = [row for row in rows if (row["model"], row["mode"]) == (model, mode)]
        cells = [_cell([row for row in of_kind if row["dtype"] == dtype]) for dtype in dtypes]
        lines.append(f"| {model} | {mode} | " + " | ".join(cells) + " |")
    served = [row for row in rows if not row["refused"]]
    cells = [_cell([row for row in served if row["dtype"] == dtype]) for dtype in dtypes]
    lines.append("| **all** | **largest** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # tiny matrices
    rows = []
    for case in cases_of(options):
        rows.append(measure(case))
        if sys.stderr.isatty():
            print(f"\r{len(rows)} {case!s:80}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(markdown(rows, options.dtypes))
    refusals = {f"{row['model']}, {row['mode']}": row["refused"] for row in rows if row["refused"]}
    for where, reason in refusals.items():
        print(f"\nrefused: {where}: {reason}")
    print(f"\n{len(rows)} cases")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
