"""The result of an audit as one object: for the screen, for JSON, for the report.

`judge` computes every number from the scores, without a model.

The picture (`plot_audit`) shows how well the scores separate the canaries, and the limit that the claim sets. It is
drawn from scores and coins, which the report does not keep.

The area under the ROC curve and the true positive rates are estimates of an attack's success, each with its interval,
while `dpllm.audit.bounds` gives proofs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from dpllm.audit.bounds import (
    CONFIDENCE,
    AuditError,
    LowerBound,
    NoiseTest,
    one_run_bounds,
    power,
    power_in_words,
    trial_bounds,
)
from dpllm.config.files import write_file
from dpllm.config.values import json_value
from dpllm.privacy.accounting import History, epsilon, merge
from dpllm.privacy.risk import attack_risk, tradeoff_curve
from dpllm.privacy.rounding import down, format_delta, format_delta_limit, format_epsilon, up
from dpllm.report.checklist import REFUTED
from dpllm.report.figures import BLUE, GREY, ORANGE


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def auroc(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> Estimate:
    """Return the probability that a member scores above a non-member, counting ties as half.

    The interval uses DeLong's variance (DeLong, DeLong, Clarke-Pearson 1988) on the logit scale. There, it is below 1
    and misses less often when the area is large. An area of 1 has no variance: with n of the rarer kind, it is
    compatible with any area above 0.05^(1/n).

    Args:
        scores: (m,) the higher, the likelier a member.
        included: (m,) whether it is a member.

    Raises:
        AuditError: there are no members, or no others.

    >>> print(auroc(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False])))
    1.000 (0.224 to 1.000)
    """
    members, others = _both(scores, included)
    ranks = stats.rankdata(np.concatenate((members, others)))
    num_in, num_out = len(members), len(others)
    above_in = (ranks[:num_in] - stats.rankdata(members)) / num_out  # for each member: the share of others below it
    above_out = 1 - (ranks[num_in:] - stats.rankdata(others)) / num_in
    value = float(above_in.mean())
    variance = (above_in.var(ddof=1) / num_in if num_in > 1 else 0.0) + (
        above_out.var(ddof=1) / num_out if num_out > 1 else 0.0
    )
    least = 0.05 ** (1 / min(num_in, num_out))
    if not 0 < value < 1:
        return Estimate(value, least if value == 1 else 0.0, 1 - least if value == 0 else 1.0)
    half = float(stats.norm.ppf(0.975)) * math.sqrt(variance) / (value * (1 - value))
    low, high = special.expit(special.logit(value) + np.array([-half, half]))
    return Estimate(value, float(low), float(high))


def tpr_at(scores: NDArray[np.float64], included: NDArray[np.bool_], fpr: float, confidence: float = 0.95) -> Estimate:
    """Return the share of members found when at most a share ``fpr`` of the others is accused.

    The threshold is one of the others' scores, so with n others a rate below 1/n cannot be distinguished from 0: then
    the threshold is the highest of them. The interval is Clopper-Pearson's for that threshold.

    Args:
        scores: (m,) the higher, the likelier a member.
        included: (m,) whether it is a member.
        fpr: false positive rate, between 0 and 1.
        confidence: confidence of the interval.

    Raises:
        AuditError: there are no members, or no others, or the rate is outside [0, 1].
    """
    if not 0 <= fpr <= 1:
        raise AuditError(f"a false positive rate must be between 0 and 1, got {fpr}")
    members, others = _both(scores, included)
    accused = math.floor(fpr * len(others) + 1e-9)
    ordered = np.sort(others)[::-1]
    hits = len(members) if accused == len(others) else int((members > ordered[accused]).sum())
    found = stats.binomtest(hits, len(members)).proportion_ci(confidence, method="exact")
    return Estimate(hits / len(members), float(found.low), float(found.high))


def highest_fpr(num_others: int, fpr: float, confidence: float = 0.95) -> float:
    """Return the upper end of the interval of the true false positive rate of `tpr_at`'s threshold.

    That threshold is chosen among the scores of the others, so the share of them above it is known, but the rate in the
    population is not. By Clopper-Pearson it is at most the result, with probability ``(1 + confidence) / 2``.

    Args:
        num_others: the number of non-members.
        fpr: requested false positive rate.
        confidence: confidence of the interval; half of the error is on this side.

    >>> [round(highest_fpr(num, 0.01), 4) for num in (100, 500, 10000)]
    [0.0545, 0.0232, 0.0121]
    """
    accused = math.floor(fpr * num_others + 1e-9)
    return (
        1.0 if accused >= num_others else float(stats.beta.ppf((1 + confidence) / 2, accused + 1, num_others - accused))
    )


def shown_rates(rates: Sequence[float], num_others: int) -> list[float]:
    """Return the false positive rates that this many others can show: those at which at least one is accused.

    >>> shown_rates((1e-3, 1e-2), 500)
    [0.01]
    """
    return [rate for rate in rates if rate * num_others >= 1]


def roc_curve(
    scores: NDArray[np.float64], included: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the false and true positive rates at all thresholds, from (0, 0) to (1, 1)."""
    members, others = _both(scores, included)
    values = np.concatenate((members, others))
    is_member = np.arange(len(values)) < len(members)
    order = np.argsort(-values, kind="stable")
    last = np.append(np.diff(values[order]) != 0, True)  # equal scores are accused together
    tpr = np.cumsum(is_member[order])[last] / len(members)
    fpr = np.cumsum(~is_member[order])[last] / len(others)
    return np.concatenate(([0.0], fpr)), np.concatenate(([0.0], tpr))


def _both(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> tuple[NDArray, NDArray]:
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    members, others = scores[included], scores[~included]
    if len(members) == 0 or len(others) == 0:
        raise AuditError(f"got {len(members)} members and {len(others)} non-members. An attack needs some of both")
    return members, others


AUDIT_FILE = "audit.json"
RATES = (1e-3, 1e-2)
"""False positive rates at which true positive rates are stated."""
FAIL, CONSISTENT, NO_CLAIM = REFUTED, "consistent, not proof", "no claim to refute"
INCLUSION = "independent fair coins"


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """The results of one way to score the canaries."""

    name: str
    """Name of the score."""
    auroc: Estimate
    """Probability that an included canary scores above an excluded one."""
    tpr: Mapping[float, Estimate]
    """False positive rate -> share of the included canaries found; its interval is at the level of `tpr_confidence`."""
    bounds: tuple[LowerBound, ...]
    """Lower bounds on ε."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "auroc": self.auroc.to_dict(),
            "tpr": {f"{rate:g}": found.to_dict() for rate, found in self.tpr.items()},
            "bounds": [bound.to_dict() for bound in self.bounds],
        }


@dataclass(frozen=True, kw_only=True)
class AuditedCanaries:
    """The canaries of an audit."""

    kind: str
    """Kind of the canaries."""
    num: int
    """m."""
    num_included: int
    """Number of canaries that were included."""
    inclusion: str = INCLUSION
    """How the included canaries were chosen."""
    repetitions: int = 1
    """Rows of each canary, all in one unit."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, under the names used in an audit's file."""
        return {
            "canary_kind": self.kind,
            "num_canaries": self.num,
            "num_included": self.num_included,
            "inclusion": self.inclusion,
            "repetitions": self.repetitions,
        }


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The result of an audit."""

    claimed_epsilon: float | None
    """ε of the run under zero-out adjacency, which the coins test; None: nothing is claimed."""
    delta: float
    """δ of the claim and of the bounds."""
    unit: str
    """"sequence" or "user"."""
    adjacency: str
    """The adjacency that the coins test; always "zero-out"."""
    canaries: AuditedCanaries
    """The canaries whose scores were judged."""
    confidence: float
    """Confidence with which all bounds hold together."""
    attacks: tuple[AttackResult, ...]
    """Every scoring method that was tried; the error is divided over them."""
    tpr_bounds: Mapping[float, float] = field(default_factory=dict)
    """False positive rate -> largest true positive rate that the claim allows for any attack, at the highest true false
    positive rate that the threshold may have (`highest_fpr`)."""
    power: Mapping[str, float] = field(default_factory=dict)
    """Noise below the plan's -> share of such audits that fail under an ideal attack."""
    noise: NoiseTest | None = None
    """The test of the noise itself, if releases were observed."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further results: plan hash, files, and a method's additions."""

    @property
    def best(self) -> LowerBound:
        """The highest lower bound of all attacks and methods."""
        return max((bound for attack in self.attacks for bound in attack.bounds), key=lambda bound: bound.epsilon)

    @property
    def epsilon_lower(self) -> float:
        """ε is at least this, with `confidence`; 0: nothing was shown."""
        return self.best.epsilon

    @property
    def ceiling(self) -> float:
        """The highest bound that this many canaries could show, with perfect scores."""
        return max(bound.ceiling for attack in self.attacks for bound in attack.bounds)

    @property
    def failed(self) -> bool:
        """Whether the claim is refuted."""
        if self.claimed_epsilon is None:
            return False
        bounds = any(bound.refutes for attack in self.attacks for bound in attack.bounds)
        return bounds or (self.noise is not None and self.noise.refuted)

    @property
    def verdict(self) -> str:
        """`FAIL`, `CONSISTENT` or `NO_CLAIM`."""
        if self.claimed_epsilon is None:
            return NO_CLAIM
        return FAIL if self.failed else CONSISTENT

    def summary(self) -> str:
        """Return one sentence for the report of the run."""
        shown = (
            f"ε is at least {down(self.epsilon_lower, 2)} at {100 * self.confidence:g} % "
            f"(δ = {format_delta_limit(self.delta)}; this many could show at most {up(self.ceiling, 2)})"
        )
        made = self.canaries
        canaries = f"{made.num:,} canaries ({made.kind}) included by {made.inclusion}"
        if self.claimed_epsilon is not None and self.failed:
            noise = "" if self.noise is None or not self.noise.refuted else f"; the noise is {self.noise}"
            return (
                f"FAIL: {canaries}: {shown}{noise}, and the claim is {format_epsilon(self.claimed_epsilon)}. "
                "The claim is refuted: do not release"
            )
        return f"{self.verdict}: {canaries}: {shown}{self._power()}"

    def _power(self) -> str:
        return f"; {power_in_words(self.power)}" if self.power else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        own: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            own |= self.canaries.to_dict() if item.name == "canaries" else {item.name: getattr(self, item.name)}
        own["attacks"] = [attack.to_dict() for attack in self.attacks]
        own["tpr_bounds"] = {f"{rate:g}": bound for rate, bound in self.tpr_bounds.items()}
        own["details"] = dict(self.details)
        own["power"] = dict(self.power)
        own["noise"] = None if self.noise is None else dataclasses.asdict(self.noise)
        first = {"verdict": self.verdict, "epsilon_lower": self.epsilon_lower, "ceiling": self.ceiling}
        return {**first, "method": self.best.method, **own}

    def rows(self) -> list[tuple[str, str]]:
        """Return readable names and values."""
        claim, made = "nothing", self.canaries
        if self.claimed_epsilon is not None:
            pair = f"ε = {format_epsilon(self.claimed_epsilon)} at δ = {format_delta(self.delta)}"
            claim = f"{pair}, {self.adjacency} adjacency"
        rows = [
            ("claimed", claim),
            ("unit of privacy", f"one {self.unit}"),
            ("canaries", f"{made.num:,} ({made.kind}), {made.repetitions} row(s) each, in one unit"),
            ("included", f"{made.num_included:,}, by {made.inclusion}"),
        ]
        for attack in self.attacks:
            rows.append((f"attack: {attack.name}", f"AUROC {attack.auroc}"))
            for rate, found in attack.tpr.items():
                rows.append((f"  found at FPR {100 * rate:g} %", f"{found}{self._allowed(rate, found)}"))
            rows += [(f"  {bound.method}", self._of_bound(bound)) for bound in attack.bounds]
        best = self.best
        rows += [
            ("ε at least", f"{down(self.epsilon_lower)} at {100 * self.confidence:g} %: {best.method}"),
            ("correction", best.correction),
            ("ceiling", f"{up(self.ceiling, 2)}: the bound of {made.num:,} canaries with perfect scores"),
        ]
        if self.noise is not None:
            seen = ", ".join(f"{name} in {100 * share:.0f} %" for name, share in self.noise.power().items())
            rows.append(("noise", f"{self.noise}; this test notices {seen} of cases"))
        if self.power:
            rows.append(("power", power_in_words(self.power)))
        return [*rows, *((name, str(value)) for name, value in self.details.items()), ("verdict", self._verdict())]

    def _allowed(self, rate: float, found: Estimate) -> str:
        """Return the rate that the claim allows, compared with the lower end of the measured rate."""
        if rate not in self.tpr_bounds:
            return ""
        level = tpr_confidence(self.confidence, len(self.attacks), len(self.tpr_bounds))
        limit = highest_fpr(self.canaries.num - self.canaries.num_included, rate, level)
        words = f"; the claim allows {up(self.tpr_bounds[rate])}, since the FPR may be {100 * limit:.2g} %"
        return f"{words}: MORE than allowed" if found.low > self.tpr_bounds[rate] else words

    @staticmethod
    def _of_bound(bound: LowerBound) -> str:
        right = f"{bound.num_correct:,} of {bound.num_guesses:,} guesses right"
        return f"ε at least {down(bound.epsilon)} ({right}; ceiling {up(bound.ceiling, 2)})"

    def _verdict(self) -> str:
        if self.noise is not None and self.noise.refuted:
            weakest, least = self.noise.weakest, self.noise.highest
            where = ""
            if weakest is not None and weakest < least:
                least, where = weakest, " in some direction over the steps"
            return f"{FAIL}: the noise has a standard deviation of at most {up(least)} σC{where}. Do not release"
        if self.claimed_epsilon is not None and self.failed:
            claim = format_epsilon(self.claimed_epsilon)
            return f"{FAIL}: at least {down(self.epsilon_lower)}, but {claim} is claimed. Do not release"
        return self.verdict

    def save(self, folder: str | Path) -> Path:
        """Write `AUDIT_FILE` into a folder, with the time, and return its path."""
        path = Path(folder) / AUDIT_FILE
        values = {"format": 1, "made_at": datetime.now(UTC).isoformat(timespec="seconds"), **self.to_dict()}
        write_file(path, json_text(values))
        return path


def judge(
    scores: Mapping[str, NDArray[np.float64]],
    included: NDArray[np.bool_],
    *,
    delta: float,
    history: History | None,
    canary_kind: str,
    unit: str = "sequence",
    repetitions: int = 1,
    confidence: float = CONFIDENCE,
    independent_runs: bool = False,
    details: Mapping[str, Any] | None = None,
) -> AuditResult:
    """Compute every number of an audit.

    Guarantee: a sound run fails with probability at most 1 - confidence, for any scores, if the coins were fair,
    independent and not used to make the scores.

    Args:
        scores: attack -> (m,) one score per canary; the higher, the likelier it was included.
        included: (m,) the coins.
        delta: δ of the claim.
        history: the steps charged, which are the claim; None, or steps without noise: nothing is claimed.
        canary_kind: kind of the canaries.
        unit: unit of privacy.
        repetitions: rows of each canary.
        confidence: confidence of all bounds together.
        independent_runs: each canary was in its own run.
        details: further results to print and to store.

    Raises:
        AuditError: there is no attack, or scores and coins cannot be audited.

    >>> rng = np.random.default_rng(0)
    >>> coins = rng.random(400) < 0.5
    >>> result = judge({"none": rng.random(400)}, coins, delta=1e-5, history=None, canary_kind="numbers")
    >>> result.verdict, round(result.epsilon_lower, 2)
    ('no claim to refute', 0.0)
    """
    if not scores:
        raise AuditError("there is no score to judge. Name at least one attack")
    if history is not None and not _claims(history):
        history = None
    bounds_of = trial_bounds if independent_runs else one_run_bounds
    num_others = int((~np.asarray(included, dtype=bool)).sum())
    rates = shown_rates(RATES, num_others)
    level = tpr_confidence(confidence, len(scores), len(rates))
    attacks = tuple(
        AttackResult(
            name=name,
            auroc=auroc(values, included),
            tpr={rate: tpr_at(values, included, rate, level) for rate in rates},
            bounds=tuple(bounds_of(values, included, delta, confidence, history, len(scores))),
        )
        for name, values in scores.items()
    )
    return AuditResult(
        claimed_epsilon=None if history is None else epsilon(history, delta, "zero-out"),
        delta=delta,
        unit=unit,
        adjacency="zero-out",
        canaries=AuditedCanaries(
            kind=canary_kind,
            num=len(included),
            num_included=int(np.asarray(included).sum()),
            repetitions=repetitions,
        ),
        confidence=confidence,
        attacks=attacks,
        tpr_bounds={} if history is None else allowed_rates(history, rates, num_others, level),
        power={}
        if history is None
        else _power(history, len(included), delta, confidence, len(scores), independent_runs),
        details=details or {},
    )


def tpr_confidence(confidence: float, num_attacks: int, num_rates: int) -> float:
    """Return the level of each true positive rate's interval with which all comparisons together keep the error."""
    return 1 - (1 - confidence) / max(1, num_attacks * num_rates)


def allowed_rates(history: History, rates: Sequence[float], num_others: int, confidence: float) -> dict[float, float]:
    """Return the largest true positive rate of any attack: false positive rate -> bound.

    The threshold of a measured rate is chosen on the same non-members, so its true false positive rate is uncertain.
    The bound is stated for the upper end of its interval; stated for the rate itself, it would accuse sound runs.

    Args:
        history: the steps of the claim.
        rates: requested false positive rates.
        num_others: number of non-members on which the thresholds were chosen.
        confidence: confidence of the intervals.
    """
    limits = {rate: highest_fpr(num_others, rate, confidence) for rate in rates}
    if not limits:
        return {}
    found = attack_risk(history, false_positive_rates=tuple(limits.values())).true_positive_rate
    return {rate: found[limit] for rate, limit in limits.items()}


def _power(
    history: History, num: int, delta: float, confidence: float, tests: int, independent_runs: bool
) -> dict[str, float]:
    sizes = {"in_trials": num} if independent_runs else {"in_one_run": num}
    return power(history, delta, **sizes, confidence=confidence, tests=tests)


def _claims(history: History) -> bool:
    steps = merge(history)
    return bool(steps) and all(step.noise_multiplier > 0 for step, _ in steps)


def json_text(values: Mapping[str, Any]) -> str:
    """Return JSON for a file, with an infinite number as "inf".

    >>> print(json_text({"epsilon": float("inf")}))
    {
      "epsilon": "inf"
    }
    <BLANKLINE>
    """
    return json.dumps(json_value(values), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


PICTURE_FILE = "audit.png"
_COLOURS = (BLUE, "#5b8e7d", "#8a5a83", "#b08d2f", "#4f5d75")


def plot_audit(
    result: AuditResult,
    scores: Mapping[str, NDArray[np.float64]],
    included: NDArray[np.bool_],
    path: str | Path,
    history: History | None = None,
) -> Path:
    """Write a PNG with three panels: ROC curves, scores of both kinds of canary, and bound, claim and ceiling.

    Args:
        result: the result of the audit.
        scores: attack -> (m,) scores.
        included: (m,) the coins.
        path: path of the PNG.
        history: the steps of the claim, whose trade-off curve is drawn as the limit of every attack.

    Returns:
        The path.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 3.9), width_ratios=[1.1, 1.1, 1])
    least = 0.5 / len(included)
    rates = np.geomspace(least, 1, 80)
    left.plot(rates, rates, "--", color=GREY, linewidth=1.2, label="guessing")
    if history is not None and result.claimed_epsilon is not None:
        left.plot(*tradeoff_curve(history, false_positive_rates=rates.tolist()), color=ORANGE, label="claim allows")
    for colour, (name, values) in zip(_COLOURS, scores.items(), strict=False):
        fpr, tpr = roc_curve(values, included)
        left.plot(np.maximum(fpr, least), np.maximum(tpr, least), color=colour, drawstyle="steps-post", label=name)
    left.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.05))
    left.set(xlabel="canaries accused that were out", ylabel="canaries found that were in")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    best = max(result.attacks, key=lambda attack: max(bound.epsilon for bound in attack.bounds)).name
    values = np.asarray(scores[best])
    bins = np.histogram_bin_edges(values, 40).tolist()
    middle.hist(values[~included], bins=bins, color=GREY, alpha=0.6, label="out")
    middle.hist(values[included], bins=bins, color=BLUE, alpha=0.6, label="in")
    middle.set(xlabel=f"score: {best}", ylabel="canaries")
    middle.legend(frameon=False, fontsize=8)
    _bars(right, result)
    for panel in (left, middle, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(result.verdict, x=0.01, ha="left", color=ORANGE if result.failed else GREY)
    figure.tight_layout()
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _bars(panel: Any, result: AuditResult) -> None:
    named = [
        ("shown at least", result.epsilon_lower, BLUE, down),
        ("could show at most", result.ceiling, GREY, up),
    ]
    if result.claimed_epsilon is not None:
        named.insert(1, ("claimed", result.claimed_epsilon, ORANGE, up))
    names, values, colours, sides = zip(*named, strict=True)
    bars = panel.barh(names, values, color=colours, height=0.55)
    panel.bar_label(bars, labels=[side(value, 2) for side, value in zip(sides, values, strict=True)], padding=3)
    panel.set(xlabel=f"ε at δ = {result.delta!r}", xlim=(0, 1.2 * max(*values, 1e-3)))
    panel.invert_yaxis()
