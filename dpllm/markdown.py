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
    statement = report["statement"]
    title = "Privacy report" if statement["private"] else "NOT PRIVATE: report of a run without a privacy guarantee"
    blocks = [
        f"# {title}",
        statement["words"],
        *_open_points(report["open_points"]),
        *_strength(report["strength"]),
        *_setting(report["setting"]),
        *_definition(report["definition"]),
        *_accounting(report["accounting"]),
        *_utility(report["utility"]),
        *_checkable(report["checkable"]),
    ]
    return "\n\n".join(blocks) + "\n"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _epsilon(value: float | str) -> str:
    """Print ε rounded up, and an infinite one in words."""
    if isinstance(value, str):
        return "infinite: no privacy"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"


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
        f"Advantage over guessing (true minus false positive rate): at most {strength['advantage']:.4f}.",
    ]


def _setting(setting: Mapping[str, Any]) -> list[str]:
    return [
        "## Setting",
        _list(
            (
                setting["model"],
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
                f"Taken as public: {'; '.join(definition['public'])}.",
                f"Use of the data that is covered: {'; '.join(definition['data_accesses_covered'])}.",
                f"Other uses of the same data: {definition['other_uses_of_the_data'] or _NOT_FILLED}",
                f"Released under the guarantee: {'; '.join(definition['released_under_the_guarantee'])}.",
            )
        ),
        "## What is not covered",
        "Written out by this run although it depends on the private data:",
        _table(("what", "times"), ((item["what"], item["count"]) for item in written))
        if written
        else "Nothing that the ledger knows of.",
        "Never covered by ε, and what to do about it:",
        _list(f"{item['what']}: {item['advice']}" for item in definition["never_covered"]),
    ]


def _accounting(accounting: Mapping[str, Any]) -> list[str]:
    epsilon = accounting["epsilon"]
    rho = accounting["zcdp_rho"]
    return [
        "## Accounting",
        _table(
            ("adjacency", "ε"),
            (("zero-out", _epsilon(epsilon["zero-out"])), ("replace-one", _epsilon(epsilon["replace-one"]))),
        ),
        "The whole curve, at a few δ:",
        _table(
            ("δ", "ε, zero-out", "ε, replace-one"),
            (
                (f"{row['delta']:.3g}", _epsilon(row["zero-out"]), _epsilon(row["replace-one"]))
                for row in accounting["curve"]
            ),
        ),
        _list(
            (
                f"Kind: {accounting['kind']}; {accounting['tool']} {accounting['tool_version']}, discretization "
                f"{accounting['discretization']:g}; δ of {accounting['delta_set_aside_for_rounding']:.2g} is set aside "
                "for rounding.",
                f"Composition: {accounting['composition']}.",
                *(f"Check by {item['kind']}: ε = {_epsilon(item['epsilon'])}." for item in accounting["cross_checks"]),
                f"ρ-zCDP: {f'{rho:.6g}' if rho is not None else 'none; sampled steps have no useful ρ'}.",
            )
        ),
        "### Parameters",
        _table(("name", "value"), ((name, _cell(value)) for name, value in accounting["parameters"].items())),
        "### What the numbers rest on, and how this run ensured it",
        _table(
            ("assumption", "how it was ensured"),
            ((item["assumption"], item["how_ensured"]) for item in accounting["assumptions"]),
        ),
    ]


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
        "Both commands recompute the numbers; the first also verifies the ledger.",
        f"```\n{checkable['recompute_from_the_ledger']}\n{checkable['recompute_from_the_numbers']}\n```",
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
