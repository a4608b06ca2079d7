"""The picture of an audit: how well the scores separate the canaries, and the limit that the claim sets.

It is drawn from scores and coins, which the report does not keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.audit.result import AuditResult
from dpllm.audit.roc import roc_curve
from dpllm.privacy.accounting import History
from dpllm.privacy.risk import tradeoff_curve
from dpllm.privacy.rounding import down, up
from dpllm.report.figures import BLUE, GREY, ORANGE

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
