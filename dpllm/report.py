"""The privacy statement of a run, as JSON and as a page that a data-protection officer can read.

Place in the flow: last. ε is computed from the ledger, so from what ran; the plan only names the numbers. What a
statement must say follows Ponomareva et al., "How to DP-fy ML" (JAIR 77, 2023). A point that only people can fill in is
listed as open, and an open point is a reason not to release yet.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpllm
from dpllm import accounting
from dpllm.ledger import Ledger, LedgerContents, read_ledger
from dpllm.markdown import render_markdown as render_markdown
from dpllm.risk import attack_risk, in_plain_words

if TYPE_CHECKING:
    from dpllm.plan import PrivacyPlan

MARKDOWN_FILE = "privacy_report.md"
JSON_FILE = "privacy_report.json"

_FORMAT = 1
_CURVE_FACTORS = (1.0, 0.1, 0.01, 0.001)
_PACKAGES = ("dp_accounting", "numpy", "scipy", "torch", "transformers", "peft")
_NEVER_COVERED = (
    ("hyper-parameter tuning (other runs on the same data)", "each run has its own ε; add them up"),
    ("choosing the model, a checkpoint or a stopping point by its results on private data", "choose on public data"),
    ("evaluation on private data", "keep the results to yourself, or evaluate on public data"),
    ("a tokenizer, vocabulary or normalisation fitted to the private text", "fit them on public text"),
    ("private records that the pretrained model had seen already", "check the source of the pretrained weights"),
    ("training loss, gradient norms and realised batch sizes", "treat logs and plots of them like the data itself"),
    ("running time and memory use, as seen by someone on the same machine", "train on a machine you control"),
    ("the exactness of floating-point noise", "the noise is a float32 Gaussian, as in all common DP libraries"),
)


@dataclass(frozen=True, kw_only=True)
class ReleaseNotes:
    """What only people know about a release; None stays an open point of the report."""

    data_holder: str | None = None
    """Who holds the raw data."""
    audience: str | None = None
    """Who will see the released model."""
    other_uses: str | None = None
    """Other uses of the same data: tuning runs, earlier models, model selection."""
    utility: Mapping[str, Any] = field(default_factory=dict)
    """Held-out metric, the same without privacy, hardware, cost: name to value."""


def privacy_report(
    plan: PrivacyPlan, ledger_contents: LedgerContents, notes: ReleaseNotes | None = None
) -> dict[str, Any]:
    """Return the privacy statement of what ran so far, as plain values that JSON can hold (an infinite ε is "inf").

    Args:
        plan: the plan of the run.
        ledger_contents: what the ledger says.
        notes: what only people know. None: those points stay open.

    Raises:
        ValueError: the ledger belongs to another plan, or charges steps that are not the plan's.
    """
    _check_belongs(plan, ledger_contents)
    notes = notes or ReleaseNotes()
    seeded = plan.seeded or ledger_contents.seeded
    history = ledger_contents.history
    zero_out, replace_one = (
        accounting.epsilon(history, plan.delta, adjacency) for adjacency in ("zero-out", "replace-one")
    )
    headline = zero_out if plan.adjacency == "zero-out" else replace_one
    report = {
        "format": _FORMAT,
        "statement": _statement(plan, ledger_contents, headline, seeded),
        "setting": {
            "model": "central differential privacy: the trainer sees the data and is trusted; the release is protected",
            "data_holder": notes.data_holder,
            "audience": notes.audience,
        },
        "definition": _definition(plan, ledger_contents, notes),
        "accounting": _accounting(plan, ledger_contents, zero_out, replace_one),
        "strength": _strength(plan, ledger_contents, headline, seeded),
        "checkable": _checkable(plan, ledger_contents),
        "utility": dict(notes.utility) or None,
        "open_points": [],
    }
    report["open_points"] = _open_points(report, ledger_contents)
    return report


def write_report(
    output_dir: str | Path,
    plan: PrivacyPlan,
    ledger: Ledger | LedgerContents,
    notes: ReleaseNotes | None = None,
) -> dict[str, Any]:
    """Write ``privacy_report.md`` and ``privacy_report.json`` into a folder, and return the report.

    Args:
        output_dir: an existing folder.
        plan: the plan of the run.
        ledger: the ledger, open or read.
        notes: what only people know.

    Raises:
        ValueError: the ledger is damaged, or of another plan.
    """
    contents = read_ledger(ledger.path) if isinstance(ledger, Ledger) else ledger
    report = privacy_report(plan, contents, notes)
    _replace(Path(output_dir) / JSON_FILE, json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    _replace(Path(output_dir) / MARKDOWN_FILE, render_markdown(report))
    return report


def notes_in(folder: str | Path) -> ReleaseNotes:
    """Return what people noted in the report that lies in a folder; nothing where there is none.

    Args:
        folder: of a run or of a checkpoint.
    """
    path = Path(folder) / JSON_FILE
    if not path.is_file():
        return ReleaseNotes()
    report = json.loads(path.read_text(encoding="utf-8"))
    return ReleaseNotes(
        data_holder=report["setting"]["data_holder"],
        audience=report["setting"]["audience"],
        other_uses=report["definition"]["other_uses_of_the_data"],
        utility=report["utility"] or {},
    )


def _replace(path: Path, text: str) -> None:
    """Write a whole file or nothing of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _check_belongs(plan: PrivacyPlan, contents: LedgerContents) -> None:
    if any(run["plan_hash"] != plan.hash for run in contents.runs):
        raise ValueError(f"{contents.path} was written under another plan; report with the plan that lies beside it")
    if any(step != plan.step for step, _ in contents.history):
        raise ValueError(f"{contents.path} charges steps that are not those of its plan; restore both from a copy")


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _statement(plan: PrivacyPlan, contents: LedgerContents, epsilon: float, seeded: bool) -> dict[str, Any]:
    unit = "record" if plan.unit == "sequence" else "user"
    if seeded:
        words = (
            "NOT PRIVATE. Sampling and noise came from a fixed seed, which is for tests. Who knows the seed can remove "
            "the noise; the figures below would hold only with secret randomness."
        )
    elif math.isinf(epsilon):
        words = (
            "NOT PRIVATE. ε is infinite: no noise was added, so nothing limits what the model reveals about any one "
            f"{unit}."
        )
    elif contents.num_steps == 0:
        words = "No step has been charged: nothing has been learnt from the private data so far."
    else:
        change = "contributed nothing" if plan.adjacency == "zero-out" else f"been another {unit}"
        words = (
            f"The training satisfies (ε, δ)-differential privacy with ε = {_up(epsilon)} and δ = {plan.delta:.3g} for "
            f"every single {unit}. Whatever is released of the model would have come out almost as likely had any one "
            f"{unit} {change}: the chance of any outcome changes at most by the factor exp(ε) = {_factor(epsilon)}, "
            f"plus {plan.delta:.3g}."
        )
    return {
        "private": not seeded and math.isfinite(epsilon),
        "words": words,
        "epsilon": _json_number(epsilon),
        "delta": plan.delta,
        "adjacency": plan.adjacency,
        "unit": plan.unit,
    }


def _up(value: float, digits: int = 4) -> str:
    """Round up for print, so that the printed bound holds."""
    return f"{math.ceil(value * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def _factor(epsilon: float) -> str:
    """Print exp(ε), rounded up to three digits."""
    if epsilon > 30:
        return f"more than {10 ** int(epsilon / math.log(10)):.0e}" if epsilon < 700 else "more than 1e300"
    value = math.exp(epsilon)
    digits = 2 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits) / 10**digits:,g}" if value < 1e5 else f"{math.ceil(value):,}"


def _definition(plan: PrivacyPlan, contents: LedgerContents, notes: ReleaseNotes) -> dict[str, Any]:
    if plan.unit == "sequence":
        unit = (
            "one record of the training data. A record longer than the model's context that was cut into several rows "
            "is still one unit. A text that stands in several records is that many units, and is protected less"
        )
    else:
        unit = (
            f"one user: all records with the same id in column '{plan.unit_column}', of which at most "
            f"{plan.max_rows_per_unit} rows were used. A person with several ids is several units"
        )
    adjacency = {
        "zero-out": "two data sets of the same public size, equal but that one unit contributes nothing in one of them",
        "replace-one": "two data sets of the same public size, equal but that one unit is another in one of them",
    }
    return {
        "unit": unit,
        "adjacency": adjacency[plan.adjacency],
        "public": ["the number of units N, and all settings in this report", *contents.public],
        "data_accesses_covered": [
            f"the {contents.num_steps} training steps in the ledger, of {len(contents.runs)} run(s)"
        ],
        "other_uses_of_the_data": notes.other_uses,
        "released_under_the_guarantee": [
            "the final weights",
            "every checkpoint",
            "the sequence of noisy gradients, and the optimizer's state, which is computed from them",
        ],
        "written_out_and_not_covered": [
            {"what": what, "count": count} for what, count in sorted(contents.disclosures.items())
        ],
        "never_covered": [{"what": what, "advice": advice} for what, advice in _NEVER_COVERED],
    }


def _accounting(plan: PrivacyPlan, contents: LedgerContents, zero_out: float, replace_one: float) -> dict[str, Any]:
    history = contents.history
    margin = accounting.rounding_margin(history)
    deltas = [plan.delta * factor for factor in _CURVE_FACTORS if margin <= plan.delta * factor / 2]
    curves = {name: accounting.epsilon_curve(history, deltas, name) for name in ("zero-out", "replace-one")}
    return {
        "kind": "privacy loss distributions (PLD), discretized pessimistically (connect the dots), composed by FFT; "
        "computed by dpllm.pld and dp_accounting, to whose results tests hold it",
        "tool": accounting.TOOL,
        "tool_version": accounting.tool_version(),
        "discretization": accounting.discretization_used(history),
        "delta_set_aside_for_rounding": margin,
        "composition": "all steps of all runs in the ledger, those lost in a crash included",
        "cross_checks": _cross_checks(plan, history),
        "zcdp_rho": _zcdp(plan, contents),
        "epsilon": {"zero-out": _json_number(zero_out), "replace-one": _json_number(replace_one)},
        "curve": [
            {"delta": at, **{name: _json_number(curve[row][1]) for name, curve in curves.items()}}
            for row, at in enumerate(deltas)
        ],
        "parameters": _parameters(plan, contents),
        "assumptions": _assumptions(plan, contents),
    }


def _cross_checks(plan: PrivacyPlan, history: accounting.History) -> list[dict[str, Any]]:
    """Return ε under zero-out by two other ways; both are upper bounds, and looser."""
    coarse = math.inf
    if plan.noise_multiplier > 0:
        coarse = accounting.library_epsilon(history, plan.delta)
    return [
        {"kind": "dp_accounting's own PLD accountant, zero-out, grid 0.001", "epsilon": _json_number(coarse)},
        {
            "kind": "Rényi accounting, zero-out, without the effect of truncation",
            "epsilon": _json_number(accounting.renyi_epsilon(history, plan.delta)),
        },
    ]


def _zcdp(plan: PrivacyPlan, contents: LedgerContents) -> float | None:
    """Return ρ = T/(2σ²) where every unit takes part in every step; sampled steps have no useful ρ."""
    whole = plan.sampling_rate == 1 and plan.max_batch_size == plan.num_units and plan.noise_multiplier > 0
    return contents.num_steps / (2 * plan.noise_multiplier**2) if whole else None


def _parameters(plan: PrivacyPlan, contents: LedgerContents) -> dict[str, Any]:
    share = plan.delta * plan.num_units
    return {
        "num_units": plan.num_units,
        "sampling_rate": plan.sampling_rate,
        "expected_batch_size": plan.expected_batch_size,
        "max_batch_size": plan.max_batch_size,
        "num_steps_planned": plan.num_steps,
        "num_steps_charged": contents.num_steps,
        "noise_multiplier": plan.noise_multiplier,
        "clip_norm": plan.clip_norm,
        "noise_stddev": plan.noise_stddev,
        "target_epsilon": plan.target_epsilon,
        "delta": plan.delta,
        "why_this_delta": (
            f"δ = {share:.3g}/N. At 1/N, publishing one unit outright would pass; the usual choice is at most 0.1/N"
        ),
        "max_rows_per_unit": plan.max_rows_per_unit,
    }


def _assumptions(plan: PrivacyPlan, contents: LedgerContents) -> list[dict[str, str]]:
    entropy = ", ".join(dict.fromkeys(run["entropy"] for run in contents.runs))
    pairs = (
        (
            "Units are drawn by Poisson sampling and cut to the maximal batch (not shuffled)",
            f"the sampler is made from the plan: q = {plan.sampling_rate:.6g}, at most {plan.max_batch_size} of "
            f"{plan.num_units} units; each step in the ledger carries these numbers",
        ),
        ("There is one draw per step", "a step's units are drawn once and only then divided into microbatches"),
        (
            "No unit contributes more than the clip norm",
            "the exact gradient norm of each unit over all trained parameters is bounded before the sum; a unit whose "
            "gradient is not finite contributes zero; a parameter without a norm rule is refused",
        ),
        (
            "A unit's gradient depends on that unit alone",
            "losses are normalised within a row; modules that mix rows, such as batch norm, are refused",
        ),
        (
            "Noise is independent in every step and parameter entry",
            f"Gaussian noise of standard deviation {plan.noise_stddev:.6g} is drawn once per step, on the complete sum",
        ),
        (
            "The noisy sum is scaled by a public constant",
            f"it is divided by the expected batch size {plan.expected_batch_size}, never by the realised one; a step "
            "without units is taken all the same",
        ),
        ("Sampling and noise can't be predicted", f"entropy: {entropy}"),
        (
            "Every step is counted",
            "each step is on the disk before its gradient is used; the lines of the ledger are chained by hashes"
            + (f"; {contents.torn_steps} step(s) torn by a crash are charged" if contents.torn_steps else ""),
        ),
    )
    return [{"assumption": assumption, "how_ensured": how} for assumption, how in pairs]


def _strength(plan: PrivacyPlan, contents: LedgerContents, epsilon: float, seeded: bool) -> dict[str, Any]:
    risk = attack_risk(contents.history, plan.adjacency)
    tier, words = _tier(epsilon, seeded)
    sentences = in_plain_words(risk, "record" if plan.unit == "sequence" else "user")
    if seeded:
        sentences = ["Not with the fixed seed of this run, but with secret randomness: " + line for line in sentences]
    figures = dataclasses.asdict(risk)
    return {
        "tier": tier,
        "words": words,
        "advantage": figures["advantage"],
        "bayes_success": {f"{prior:g}": value for prior, value in figures["bayes_success"].items()},
        "true_positive_rate": {f"{rate:g}": value for rate, value in figures["true_positive_rate"].items()},
        "in_plain_words": sentences,
    }


def _tier(epsilon: float, seeded: bool) -> tuple[str, str]:
    if seeded or math.isinf(epsilon):
        return "none", "There is no guarantee."
    if epsilon <= 1:
        return "strong", "ε of at most 1 is a strong formal guarantee."
    if epsilon <= 10:
        return (
            "reasonable",
            "ε between 1 and 10 is a reasonable guarantee; the bounds below say what it allows.",
        )
    return (
        "weak",
        "ε above 10 is a weak guarantee: the number alone is no evidence of anonymity, and an empirical audit of the "
        "model belongs with it.",
    )


def _checkable(plan: PrivacyPlan, contents: LedgerContents) -> dict[str, Any]:
    command = (
        f"dpllm epsilon --noise-multiplier {plan.noise_multiplier!r} --sampling-rate {plan.sampling_rate!r} "
        f"--steps {contents.num_steps} --delta {plan.delta!r} --num-units {plan.num_units} "
        f"--max-batch-size {plan.max_batch_size} --adjacency {plan.adjacency}"
    )
    return {
        "recompute_from_the_ledger": "dpllm report OUTPUT_DIR",
        "recompute_from_the_numbers": command,
        "plan": plan.to_dict(),
        "plan_hash": plan.hash,
        "ledger_sha256": contents.sha256,
        "runs": contents.runs,
        "ended": contents.end,
        "torn_lines": contents.torn_lines,
        "diagnostics_not_covered": contents.diagnostics,
        "versions": {
            "dpllm": dpllm.__version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _open_points(report: Mapping[str, Any], contents: LedgerContents) -> list[str]:
    points = []
    if not report["statement"]["private"]:
        points.append("This run is not private. Do not release it as such.")
    if contents.end is None:
        points.append("The run has not ended, or ended in a crash; this report covers what was charged so far.")
    named = {
        "who holds the raw data": report["setting"]["data_holder"],
        "who will see the released model": report["setting"]["audience"],
        "which other uses the same data had (tuning runs, earlier models, model selection); their ε adds up": report[
            "definition"
        ]["other_uses_of_the_data"],
        "how useful the model is: held-out metric, the same without privacy, hardware and cost": report["utility"],
    }
    points += [f"Not filled in: {name}." for name, value in named.items() if value is None]
    if report["definition"]["written_out_and_not_covered"]:
        points.append(
            "Some results that depend on the private data were written out and are not covered by ε (see below)."
        )
    return points
