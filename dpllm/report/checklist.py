"""What a privacy report must answer, line by line, and which lines are still open.

Place in the flow: below report; reads the report's values and computes nothing. The questions follow Ponomareva et al.,
"How to DP-fy ML" (JAIR 77, 2023), section 5.3. A line that nothing answers is a reason not to release yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpllm.report.disclosures import DESTINATIONS, not_kept
from dpllm.report.markdown import values_in_words
from dpllm.report.models import Findings, PrivacyReport

MOST_DIFFERENCE = 0.01
"""Two accountants that differ by more than this share of ε disagree."""
REFUTED = "FAIL"
"""What the summary of an audit begins with when the audit refutes the claim."""
_LEAST_DIFFERENCE = 0.002  # the PRV estimate is itself no more accurate than that

_Lines = list[tuple[str, str | None]]


def completed(findings: Findings) -> PrivacyReport:
    """Return a report with its checklist and its open points.

    Args:
        findings: everything else of the report.
    """
    plain: dict[str, Any] = findings.model_dump(mode="json", by_alias=True)
    plain["checklist"] = checklist(plain)
    plain["open_points"] = open_points(plain)
    return PrivacyReport.model_validate(plain)


def checklist(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every line as {section, question, answer, filled}.

    Args:
        report: a report, all but its checklist and its open points.
    """
    sections: dict[str, _Lines] = {
        "setting": _setting(report),
        "definition": _definition(report["definition"]),
        "accounting": _accounting(report["statement"], report["accounting"]),
        "strength": _strength(report["strength"]),
        "checkable": _checkable(report["checkable"], report["noted_open_points"]),
        "utility": _utility(report["utility"]),
    }
    return [
        {"section": section, "question": question, "answer": answer, "filled": answer is not None}
        for section, lines in sections.items()
        for question, answer in lines
    ]


def open_points(report: Mapping[str, Any]) -> list[str]:
    """Return the reasons not to release yet.

    Args:
        report: a report with its checklist, all but its open points.
    """
    points = []
    if not report["statement"]["private"]:
        points.append("This run is not private. Do not release it as such.")
    if report["checkable"]["ended"] is None:
        points.append("The run has not ended, or ended in a crash. Resume it, or release nothing of it.")
    steps = report["accounting"]["steps"]
    if steps["charged"] > steps["planned"]:
        points.append(f"{steps['charged']} steps were charged, more than the {steps['planned']} planned.")
    audit = report["strength"]["audit"]
    if audit is not None and str(audit).startswith(REFUTED):
        points.append("An audit of this model refutes the claim. Do not release it (see below).")
    points += report["noted_open_points"]
    points += disagreements(report["accounting"])
    points += [f"Not filled in: {line['question']}" for line in report["checklist"] if not line["filled"]]
    away = _not_kept(report["definition"])
    if away:
        points.append(
            "Some results that depend on the private data were written out, are not covered by ε, and may be outside "
            f"this run's folder or in this report: {'; '.join(away)}. Keep them from whoever gets the model."
        )
    return points


def _not_kept(definition: Mapping[str, Any]) -> list[str]:
    """Return which of the results that were written out are not known to stay with the run."""
    destinations = [value for fact in definition["facts"] if fact["name"] == DESTINATIONS for value in fact["values"]]
    return not_kept([item["what"] for item in definition["written_out_and_not_covered"]], map(str, destinations))


def disagreements(accounting: Mapping[str, Any]) -> list[str]:
    """Return a line for each estimate by another accountant that differs from ours by more than 1 %.

    Both numbers are of the same steps under zero-out. Differences below 0.002 are within the other accountant's own
    error, and don't count. Upper bounds that are looser by nature are not held against ours, unless ours lies above.
    """
    lines = []
    for check in accounting["cross_checks"]:
        other, ours = check["epsilon"], check["pld_of_the_same_steps"]
        if other is None or ours is None or other == ours:
            continue
        if isinstance(other, str) or isinstance(ours, str):
            apart = math.inf
        else:
            apart = abs(other - ours) if check["bounds"] is not None else ours - other
        if apart > _LEAST_DIFFERENCE and apart > MOST_DIFFERENCE * _finite(ours):
            lines.append(
                f"The two accountants disagree: {check['name']} says ε = {_number(other)}, and the PLD of the same "
                f"steps says {_number(ours)}. Find out which is wrong before relying on either."
            )
    return lines


def _finite(value: float | str) -> float:
    return 0.0 if isinstance(value, str) else value


def _number(value: float | str) -> str:
    """Print ε, rounded up."""
    return "infinite" if isinstance(value, str) else f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"


def _setting(report: Mapping[str, Any]) -> _Lines:
    setting = report["setting"]
    return [
        ("Which setting of differential privacy, and who is trusted?", setting["model"]),
        ("Who holds the raw data?", setting["data_holder"]),
        ("Who will see the released model?", setting["audience"]),
        ("Which data set is it (its public name)?", report["definition"]["dataset"]),
    ]


def _definition(definition: Mapping[str, Any]) -> _Lines:
    written = definition["written_out_and_not_covered"]
    counts = "; ".join(f"{item['what']}: {item['count']} times" for item in written)
    never = "; ".join(item["what"] for item in definition["never_covered"])
    facts = "; ".join(f"{fact['name']}: {values_in_words(fact)}" for fact in definition["facts"])
    lines: _Lines = [
        ("Which uses of the data does the guarantee cover?", "; ".join(definition["data_accesses_covered"])),
        (
            "Which other uses had the same data (tuning runs, earlier models, model selection)? Their ε adds up.",
            definition["other_uses_of_the_data"],
        ),
        ("What may be released under the guarantee?", "; ".join(definition["released_under_the_guarantee"])),
        ("What was written out that the guarantee does not cover?", counts or "nothing that the ledger knows of"),
        ("What does the guarantee never cover?", never),
        ("What is one unit of privacy?", definition["unit"]),
        ("Which data sets are neighbours?", definition["adjacency"]),
        ("What is taken as public?", "; ".join(definition["public"])),
        ("What did the run find out about itself?", facts or "no facts noted"),
    ]
    return lines


def _accounting(statement: Mapping[str, Any], accounting: Mapping[str, Any]) -> _Lines:
    by_adjacency = accounting["epsilon"]
    values = ", ".join(f"{name}: ε = {_number(value)}" for name, value in by_adjacency.items())
    checks = [
        f"{check['name']}: ε = {_number(check['epsilon'])}"
        for check in accounting["cross_checks"]
        if check["epsilon"] is not None
    ]
    charged = {f"entry {entry['entry']} of {entry['file']}" for entry in accounting["budget"]}
    budget = f"; charged to the budget of the data set: {', '.join(sorted(charged))}" if charged else ""
    rho = accounting["zcdp_rho"]
    parameters = accounting["parameters"]
    return [
        ("What is the guarantee?", f"ε = {_number(statement['epsilon'])}, δ = {statement['delta']:.3g}"),
        ("What is ε under each adjacency that the sampler supports?", values),
        (
            "How was it accounted for, with which tool, version and discretization?",
            f"{accounting['kind']}; {accounting['tool']} {accounting['tool_version']}, discretization "
            f"{accounting['discretization']:g}; each step as {accounting['event']}",
        ),
        ("What do other accountants say?", "; ".join(checks) or None),
        ("How were steps, phases and runs composed?", accounting["composition"] + budget),
        ("How many steps were asked for, planned and taken, and why did it stop?", accounting["steps"]["words"]),
        (
            "What is ε at other δ?",
            "; ".join(f"δ = {row['delta']:.3g}: ε = {_number(row['zero-out'])}" for row in accounting["curve"])
            + " (zero-out)",
        ),
        (
            "What is ρ of zero-concentrated privacy?",
            "infinite" if isinstance(rho, str) else f"{rho:.6g}, without the gain from sampling",
        ),
        (
            "With which parameters did the mechanism run?",
            f"N = {parameters['num_units']}, q = {parameters['sampling_rate']:.6g}, expected batch "
            f"{parameters['expected_batch_size']}, at most {parameters['max_batch_size']}, "
            f"T = {parameters['num_steps_charged']}, σ = {parameters['noise_multiplier']:.6g}, "
            f"C = {parameters['clip_norm']:g}",
        ),
        ("Why this δ?", parameters["why_this_delta"]),
        (
            "What does the number rest on, and how did the run ensure it?",
            "; ".join(f"{item['assumption']}: {item['how_ensured']}" for item in accounting["assumptions"]),
        ),
    ]


def _strength(strength: Mapping[str, Any]) -> _Lines:
    audit = strength["audit"]
    if audit is None and strength["tier"] != "weak":
        audit = "none noted; it is asked for above ε = 10"
    return [
        ("How strong is the guarantee?", f"{strength['tier']}: {strength['words']}"),
        ("What can an attacker achieve at most?", " ".join(strength["in_plain_words"])),
        ("What did an empirical audit find?", audit),
    ]


def _checkable(checkable: Mapping[str, Any], open_points: Sequence[str]) -> _Lines:
    noted = " ".join(open_points) or "nothing"
    versions = ", ".join(f"{name} {version}" for name, version in checkable["versions"].items() if version)
    return [
        ("With which code did it run?", versions),
        ("What identifies the configuration?", f"the plan, SHA-256 {checkable['plan_hash']}"),
        ("What identifies the record of the run?", f"the ledger, SHA-256 {checkable['ledger_sha256']}"),
        ("Which command checks everything again?", checkable["verify"]),
        ("What did the run itself note as a reason not to release yet?", noted),
    ]


def _utility(utility: Mapping[str, Any] | None) -> _Lines:
    named = "; ".join(f"{name}: {value}" for name, value in utility.items()) if utility else None
    return [("How useful is it: held-out metric, the same without privacy, hardware and cost?", named)]
