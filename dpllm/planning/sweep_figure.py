"""Draw a sweep: noise over batch size, and signal-to-noise for each amount of compute.

Only planned numbers are drawn, no private data.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.planning.sweep import Sweep, SweepPoint, equal_compute
from dpllm.planning.sweep_text import format_tokens
from dpllm.privacy.rounding import format_delta
from dpllm.report.figures import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PALEST = "#b9d6e6"


def plot_sweep(sweep: Sweep, path: str | Path) -> Path:
    """Write the sweep as a PNG; see `draw_sweep`.

    Returns:
        The path.
    """
    path = Path(path)
    draw_sweep(sweep).savefig(path, dpi=150, format="png")
    return path


def draw_sweep(sweep: Sweep) -> Figure:
    """Return a figure of two panels over the batch size, all axes logarithmic, with the recommended point marked.

    Left: noise-to-batch ratio, with a line for each number of steps that the grid has for several batch sizes; dashes
    join points with one compute. Right: cumulative signal-to-noise ratio along each compute, as a share of that of full
    batches; the compute of the recommendation is bold, and its points show their steps.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("agg")
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    computes = [points for points in equal_compute(sweep.points) if len(points) > 1]
    for panel in (left, right):
        _style(panel, sweep)
    _draw_noise(left, sweep, computes)
    _draw_signal(right, sweep, computes)
    budget = sweep.budget
    guarantee = f"ε = {budget.target_epsilon:g} at δ = {format_delta(budget.delta)}"
    figure.suptitle(f"{guarantee}, {budget.adjacency} adjacency, N = {budget.num_units:,}", fontsize=11)
    return figure


def _draw_noise(panel: Axes, sweep: Sweep, computes: list[tuple[SweepPoint, ...]]) -> None:
    for points in computes:
        panel.plot(*_xy(points, "noise_to_batch_ratio"), "--", color=GREY, linewidth=0.8, alpha=0.7, zorder=1)
    rows: dict[int, list[SweepPoint]] = {}
    for point in sweep.points:
        if point.noise_multiplier is not None:
            rows.setdefault(point.num_steps, []).append(point)
    # A number of steps that only the line of the recommendation has is a point there, not a line.
    drawn = {steps: points for steps, points in sorted(rows.items()) if len(points) > 1 or not points[0].on_line}
    for color, (steps, row) in zip(_shades(len(drawn)), drawn.items(), strict=True):
        x, y = _xy(row, "noise_to_batch_ratio")
        panel.plot(x, y, "o-", color=color, linewidth=1.6, markersize=4, label=f"{steps:,}")
    chosen = sweep.recommended
    panel.plot(*_xy([chosen], "noise_to_batch_ratio"), "*", color=ORANGE, markersize=15, zorder=5, label="recommended")
    panel.plot([], [], "--", color=GREY, linewidth=0.8, label="equal b·T")
    panel.set_ylabel("noise-to-batch ratio σ/b  (clip norms)")
    panel.legend(frameon=False, title="steps T", fontsize=9)


def _draw_signal(panel: Axes, sweep: Sweep, computes: list[tuple[SweepPoint, ...]]) -> None:
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    chosen = sweep.recommended
    for points in computes:
        if chosen in points:
            continue
        x, y = _xy(points, "share_of_full_batch")
        panel.plot(x, y, ".--", color=GREY, linewidth=0.9, alpha=0.8)
        panel.annotate(format_tokens(points[-1].examples), (x[-1], y[-1]), **_beside(6, 0), color=GREY)
    line = [point for point in sweep.line if point.noise_multiplier is not None]
    x, y = _xy(line, "share_of_full_batch")
    label = f"b·T = {format_tokens(sweep.compute)} examples, in T steps"
    panel.plot(x, y, "o-", color=BLUE, linewidth=2.2, markersize=5, zorder=4, label=label)
    for point, at in zip(line, zip(x, y, strict=True), strict=True):
        note = panel.annotate(f"T = {point.num_steps:,}", at, **_beside(-2, 10, "center"), color=BLUE, zorder=6)
        note.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    panel.plot([], [], ".--", color=GREY, linewidth=0.9, label="other computes b·T, in examples")
    panel.plot(*_xy([chosen], "share_of_full_batch"), "*", color=ORANGE, markersize=15, zorder=5)
    panel.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    panel.annotate("full batches", (0.01, 1), xycoords=("axes fraction", "data"), **_beside(0, 3), color=GREY)
    panel.set_ylabel("cumulative signal-to-noise √T·b/σ  (share of full batches)")
    panel.set_ylim(top=1.6)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    panel.legend(frameon=False, loc="lower right", fontsize=9)


def _style(panel: Axes, sweep: Sweep) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    sizes = sorted({point.expected_batch_size for point in sweep.points})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes if len(sizes) <= 8 else sizes[:: len(sizes) // 6])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value):,}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.margins(x=0.12)
    panel.set_xlabel("expected batch size b (units)")
    panel.grid(color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _xy(points: list[SweepPoint] | tuple[SweepPoint, ...], name: str) -> tuple[list[int], list[float]]:
    return [point.expected_batch_size for point in points], [getattr(point, name) for point in points]


def _beside(right: int, up: int, align: str = "left") -> dict[str, Any]:
    """Return keywords that place a note next to a point, with offsets in points of type."""
    return {"textcoords": "offset points", "xytext": (right, up), "ha": align, "fontsize": 8}


def _shades(count: int) -> list[tuple[float, ...]]:
    """Return this many blues, from pale to dark."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("blues", [_PALEST, BLUE, "#0d2b40"])
    return [tuple(colors(0.1 + 0.9 * at / max(1, count - 1))) for at in range(count)]
