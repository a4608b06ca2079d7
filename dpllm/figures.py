"""The picture of a run: loss and ε over the private steps.

Place in the flow: at the end, beside the report. The loss of a training step is a property of the private batch, and ε
doesn't cover it; a picture that leaves the trainer's hands is a disclosure, as the report says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpllm.config import ConfigError

BLUE, ORANGE, GREY = "#2a6f97", "#c8553d", "#6b6b6b"


def plot_training(
    steps: Sequence[int],
    losses: Sequence[float],
    epsilon_steps: Sequence[int],
    epsilons: Sequence[float],
    path: str | Path,
    eval_points: Sequence[tuple[int, float]] | None = None,
) -> Path:
    """Write a PNG with two panels over the same steps: training loss above, ε spent below.

    Args:
        steps: (n,) private steps at which a loss is known.
        losses: (n,) loss of each, in nats.
        epsilon_steps: (m,) private steps at which ε is known.
        epsilons: (m,) ε of each; entries that are not finite are left out (a run without noise).
        path: where the PNG goes.
        eval_points: (step, loss) on held-out records, drawn as points; the same kind of loss, the mean over rows.

    Returns:
        The path.

    Raises:
        ConfigError: two lists that belong together differ in length.
    """
    if len(steps) != len(losses) or len(epsilon_steps) != len(epsilons):
        raise ConfigError(
            f"{len(steps)} steps have {len(losses)} losses, and {len(epsilon_steps)} steps have {len(epsilons)} "
            "epsilons: give one for each"
        )
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(7, 5.6), height_ratios=[3, 2])
    upper.plot(steps, losses, ".-", color=BLUE, linewidth=1.6, label="private batch")
    if eval_points:
        upper.plot(*zip(*eval_points, strict=True), "o", color=ORANGE, markersize=7, label="held-out records")
    upper.set_ylabel("loss (nats per token, mean over rows)")
    upper.legend(frameon=False)
    finite = [(step, value) for step, value in zip(epsilon_steps, epsilons, strict=True) if value < float("inf")]
    if finite:
        lower.plot(*zip(*finite, strict=True), ".-", color=ORANGE, linewidth=1.6)
        lower.annotate(
            f"ε = {finite[-1][1]:.2f}",
            finite[-1],
            textcoords="offset points",
            xytext=(0, -26),
            ha="right",
            color=ORANGE,
        )
        lower.set_ylim(0, 1.1 * finite[-1][1])
    else:
        lower.text(0.5, 0.5, "ε = ∞: no noise, not private", ha="center", transform=lower.transAxes, color=GREY)
    lower.set_ylabel("ε spent")
    lower.set_xlabel("private step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (upper, lower):
        panel.grid(color="#e6e6e6", linewidth=0.8)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.align_ylabels()
    figure.tight_layout()
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
