"""The picture of attacks on real records: a ROC curve per attack, and the limit that the ledger sets for any attack.

Place in the flow: last of the attacks; one panel for each model that was attacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpllm.audit.result import roc_curve
from dpllm.methods.attacks.attacks import AttackReport
from dpllm.privacy.risk import tradeoff_curve
from dpllm.report.figures import BLUE, GREY, ORANGE

_COLOURS = (BLUE, "#5b8e7d", "#8a5a83", "#b08d2f", "#4f5d75", "#9c4a4a")


def plot_attacks(reports: Mapping[str, AttackReport], path: str | Path) -> Path:
    """Write a PNG with the ROC curves of each report, both axes logarithmic.

    Args:
        reports: title of the panel -> results of the attacks.
        path: path of the PNG.

    Returns:
        The path.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    size = len(reports)
    figure, panels = plt.subplots(1, size, figsize=(5.2 * size + 0.6, 4.8), sharey=True, squeeze=False)
    for panel, (title, report) in zip(panels[0], reports.items(), strict=True):
        least = 0.5 / report.records.num
        grid = np.geomspace(least, 1, 200)
        panel.plot(grid, grid, "--", color=GREY, linewidth=1.2, label="blind guessing")
        if report.history is not None:
            panel.plot(*tradeoff_curve(report.history, "zero-out", grid.tolist()), color=ORANGE, linewidth=2.2)
            panel.lines[-1].set_label("at most, for any attack on this run")
        for attack, colour in zip(report.attacks, _COLOURS, strict=False):
            rates, found = roc_curve(attack.scores, attack.included)
            label = f"{attack.name} (AUROC {attack.auroc.value:.3f})"
            panel.step(np.maximum(rates, least), np.maximum(found, least), where="post", color=colour, label=label)
        panel.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.3), title=title)
        panel.set_xlabel("held-out records accused")
        panel.grid(color="#e6e6e6", linewidth=0.8)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.legend(frameon=False, loc="lower right", fontsize="small")
    panels[0][0].set_ylabel("members found")
    figure.tight_layout()
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
