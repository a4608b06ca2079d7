"""The privacy report as a page of Markdown.

Place in the flow: after `report`; everything printed here stands in the report's JSON, and nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NOT_FILLED = "**not filled in**"


def render_markdown(report: Mapping[str, Any]) -> str:
    """Return the page for a report made by `privacy_report`."""
    blocks = [
        f"# {title_of(report)}",
        report["statement"]["words"],
        *_open_points(report["open_points"]),
        *_strength(report["strength"]),
        *_setting(report["setting"], report["definition"]),
        *_definition(report["definition"]),
        *_accounting(report["accounting"]),
        *_utility(report["utility"]),
        *_checkable(report["checkable"]),
        *_checklist(report["checklist"]),
    ]
    return "\n\n".join(blocks) + "\n"


def title_of(report: Mapping[str, Any]) -> str:
    """Return the title of the page: whether there is a guarantee at all."""
    if report["statement"]["private"]:
        return "Privacy report"
    return "NOT PRIVATE: report of a run without a privacy guarantee"


def _list(lines: Iterable[str]) -> str:
    return "\n".join("- " + " ".join(line.split()) for line in lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_in_one_line(cell) for cell in line) + " |" for line in lines)


def _in_one_line(cell: Any) -> str:
    return " ".join(str(cell).split()).replace("|", "\\|")


def print_epsilon(value: float | str) -> str:
    """Print ε rounded up, and an infinite one in words."""
    if isinstance(value, str):
        return "infinite: no privacy"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"


def values_in_words(fact: Mapping[str, Any]) -> str:
    """Return the values of a fact of the run, in the order in which they were noted."""
    return ", then ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in fact["values"])


def _open_points(points: Sequence[str]) -> list[str]:
    if not points:
        return []
    return ["## Before you release", "Each of these is a reason not to release yet.", _list(points)]


def _strength(strength: Mapping[str, Any]) -> list[str]:
    return [
        "## How strong the guarantee is",
        f"Tier: **{strength['tier']}**. {strength['words']}",
        "What an attacker can achieve at most, who knows everything but one unit:",
        _list(strength["in_plain_words"]),
        "Advantage over guessing (true minus false positive rate): at most "
        f"{min(1.0, math.ceil(strength['advantage'] * 1e4 - 1e-9) / 1e4):.4f}. "
        f"Empirical audit: {strength['audit'] or 'none noted'}.",
    ]


def _setting(setting: Mapping[str, Any], definition: Mapping[str, Any]) -> list[str]:
    return [
        "## Setting",
        _list(
            (
                setting["model"],
                f"Data set: {definition['dataset'] or _NOT_FILLED}",
                f"Who holds the raw data: {setting['data_holder'] or _NOT_FILLED}",
                f"Who sees the released model: {setting['audience'] or _NOT_FILLED}",
            )
        ),
    ]


def _definition(definition: Mapping[str, Any]) -> list[str]:
    written = definition["written_out_and_not_covered"]
    return [
        "## What exactly is protected",
        _list(
            (
                f"Unit of privacy: {definition['unit']}.",
                f"Neighbouring data sets: {definition['adjacency']}.",
                f"Mechanism: {definition['mechanism']}.",
                f"Taken as public: {'; '.join(definition['public'])}.",
                f"Use of the data that is covered: {'; '.join(definition['data_accesses_covered'])}.",
                f"Other uses of the same data: {definition['other_uses_of_the_data'] or _NOT_FILLED}",
                f"Released under the guarantee: {'; '.join(definition['released_under_the_guarantee'])}.",
            )
        ),
        *_facts(definition["facts"]),
        "## What is not covered",
        "Written out by this run although it depends on the private data:",
        _table(("what", "times"), ((item["what"], item["count"]) for item in written))
        if written
        else "Nothing that the ledger knows of.",
        "Never covered by ε, and what to do about it:",
        _list(f"{item['what']}: {item['advice']}" for item in definition["never_covered"]),
    ]


def _facts(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    if not facts:
        return []
    return [
        "### Facts of the run",
        _table(("fact", "value"), ((fact["name"], values_in_words(fact)) for fact in facts)),
    ]


def _accounting(accounting: Mapping[str, Any]) -> list[str]:
    epsilon = accounting["epsilon"]
    rho = accounting["zcdp_rho"]
    return [
        "## Accounting",
        _table(
            ("adjacency", "ε"),
            (("zero-out", print_epsilon(epsilon["zero-out"])), ("replace-one", print_epsilon(epsilon["replace-one"]))),
        ),
        "The whole curve, at a few δ:",
        _table(
            ("δ", "ε, zero-out", "ε, replace-one"),
            (
                (f"{row['delta']:.3g}", print_epsilon(row["zero-out"]), print_epsilon(row["replace-one"]))
                for row in accounting["curve"]
            ),
        ),
        _list(
            (
                f"Kind: {accounting['kind']}; {accounting['tool']} {accounting['tool_version']}, discretization "
                f"{accounting['discretization']:g}.",
                f"Event of one step: {accounting['event']}.",
                f"Composition: {accounting['composition']}.",
                f"Steps: {accounting['steps']['words']}.",
                *(
                    f"Charged to the budget of the data set: entry {entry['entry']} of {entry['file']}."
                    for entry in accounting["budget"]
                ),
                f"ρ-zCDP, without the gain from sampling: {rho if isinstance(rho, str) else f'{rho:.6g}'}.",
            )
        ),
        "### Other accountants",
        _table(
            ("accountant", "ε", "bounds", "PLD of the same steps", "note"),
            (
                (
                    check["name"],
                    _optional(check["epsilon"]),
                    " to ".join(map(print_epsilon, check["bounds"])) if check["bounds"] else "-",
                    _optional(check["pld_of_the_same_steps"]),
                    check["note"],
                )
                for check in accounting["cross_checks"]
            ),
        ),
        "### Parameters",
        _table(("name", "value"), ((name, _cell(value)) for name, value in accounting["parameters"].items())),
        "### What the numbers rest on, and how this run ensured it",
        _table(
            ("assumption", "how it was ensured"),
            ((item["assumption"], item["how_ensured"]) for item in accounting["assumptions"]),
        ),
    ]


def _optional(value: float | str | None) -> str:
    return "-" if value is None else print_epsilon(value)


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _utility(utility: Mapping[str, Any] | None) -> list[str]:
    if utility is None:
        return ["## Utility", _NOT_FILLED]
    return ["## Utility", _table(("name", "value"), ((name, _cell(value)) for name, value in utility.items()))]


def _checkable(checkable: Mapping[str, Any]) -> list[str]:
    diagnostics = checkable["diagnostics_not_covered"]
    blocks = [
        "## Check it yourself",
        "The first command recomputes everything from the ledger and the plan, and fails on any difference; the second "
        "makes this report anew; the third computes ε from the numbers.",
        f"```\n{checkable['verify']}\n{checkable['recompute_from_the_ledger']}\n{checkable['recompute_from_the_numbers']}\n```",
        _list(
            (
                f"Plan, SHA-256: `{checkable['plan_hash']}`",
                f"Ledger, SHA-256: `{checkable['ledger_sha256']}`",
                f"Runs: {', '.join(run['run'] + ' started ' + run['started_at'] for run in checkable['runs'])}",
                f"Ended: {checkable['ended'] or 'no'}",
                f"Lines of the ledger torn by a crash: {', '.join(map(str, checkable['torn_lines'])) or 'none'}",
                "Versions: "
                + ", ".join(f"{name} {version}" for name, version in checkable["versions"].items() if version),
            )
        ),
    ]
    if diagnostics:
        blocks += [
            "### Diagnostics",
            "These counts depend on the private data and are not covered by ε; leave them out of what you publish.",
            _table(("what", "times"), diagnostics.items()),
        ]
    return blocks


def _checklist(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "## Checklist",
        "The questions of *How to DP-fy ML* (Ponomareva et al., 2023).",
        _table(
            ("question", "answer"),
            ((line["question"], line["answer"] if line["filled"] else _NOT_FILLED) for line in lines),
        ),
    ]
