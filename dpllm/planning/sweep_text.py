"""Format a sweep for people: rows of a table, the recommendation in words, and a picture.

Printed values of ε and σ are rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.planning.sweep import Sweep, SweepPoint, equal_compute
from dpllm.privacy.rounding import format_delta, format_epsilon, up_significant
from dpllm.report.figures import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MARK = "→"
"""Marks the recommended row."""

SHOWN = 12
"""Rows of compared noises, in addition to those with independent noise and those without sampling."""


def sweep_rows(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of text; columns that are empty for all points are left out.

    With independent noise alone there is a row for each point. Where noises are compared, the rows are those with the
    least noise, the recommended point, and all points with independent noise or a fixed order, with their ranks.
    The first column holds `MARK` at the recommended point, and "·" at the others of its compute if there is a grid.
    """
    alone, first = not sweep.correlated, sweep.points[0]
    grid = any(not point.on_line for point in sweep.points)

    def of(name: str, words: Callable[[Any], str]) -> Callable[[SweepPoint], str]:
        """Return a cell that is empty where the value is None."""
        return lambda point: "" if (value := getattr(point, name)) is None else words(value)

    def mark(point: SweepPoint) -> str:
        return MARK if point.recommended else "·" if point.on_line and (grid or alone) else ""

    def sigma(point: SweepPoint) -> str:
        return "none" if point.noise_multiplier is None else up_significant(point.noise_multiplier)

    ranks = {id(point): f"{rank}" for rank, point in enumerate(sweep.points, 1)}
    columns: list[tuple[str, bool, Callable[[SweepPoint], str]]] = [
        ("", True, mark),
        ("rank", not alone, lambda point: ranks[id(point)]),
        ("noise", not alone, of("noise", str)),
        ("b", True, of("expected_batch_size", "{:,}".format)),
        ("steps T", True, of("num_steps", "{:,}".format)),
        ("σ", True, sigma),
        ("σ/b", alone, of("noise_to_batch_ratio", "{:.3g}".format)),
        ("of full batch", alone, of("share_of_full_batch", lambda share: f"{100 * share:.3g} %")),
        ("effective steps", sweep.gradient_rms > 0, of("effective_steps", "{:,.3g}".format)),
        ("ε", alone, of("epsilon", format_epsilon)),
        ("epochs", alone, of("epochs", "{:.3g}".format)),
        ("tokens", alone and first.tokens is not None, of("tokens", format_tokens)),
        ("time", alone and first.seconds is not None, of("seconds", format_duration)),
        ("predicted noise", not alone, of("relative", "{:.3f}".format)),
        ("tensors kept", not alone, of("tensors_kept", str)),
        ("units", not alone, lambda point: "sampled" if point.sampled else "fixed order"),
    ]
    points = [
        point
        for rank, point in enumerate(sweep.points, 1)
        if rank <= SHOWN or point.recommended or not point.tensors_kept or not point.sampled
    ]
    columns = [column for column in columns if column[1]]
    return [name for name, *_ in columns], [[cell(point) for *_, cell in columns] for point in points]


def recommendation_text(sweep: Sweep) -> str:
    """Return the recommendation as short paragraphs: the point, its reason, its noise, and its assumptions.

    Where noises are compared, it also names the point with independent noise and the one without sampling.
    """
    paragraphs = [
        *(_noise_compared(sweep) if sweep.correlated else _noise_alone(sweep)),
        "Assumed: " + " ".join(f"({number}) {text}" for number, text in enumerate(sweep.assumptions, 1)),
    ]
    missing = [point for point in sweep.points if point.noise_multiplier is None]
    if missing:
        first = missing[0]
        paragraphs.append(
            f"{len(missing)} of {len(sweep.points)} points cannot reach the target; b = {first.expected_batch_size:,}, "
            f"T = {first.num_steps:,}: {first.reason}."
        )
    return "\n\n".join(paragraphs)


def _size(point: SweepPoint) -> str:
    return f"{point.num_steps:,} steps of {point.expected_batch_size:,} units"


def _noise_alone(sweep: Sweep) -> list[str]:
    point = sweep.recommended
    assert point.noise_multiplier is not None and point.epsilon is not None and point.share_of_full_batch is not None
    cost = [f"{point.epochs:.3g} epochs"]
    if point.tokens is not None:
        cost.append(f"{format_tokens(point.tokens)} tokens")
    if point.seconds is not None:
        cost.append(f"about {format_duration(point.seconds)}")
    changes = [
        f"{change.change}: {'impossible' if change.factor is None else f'times {change.factor:.2f}'}"
        for change in sweep.what_if
    ]
    return [
        f"Recommended: {_size(point)} each ({', '.join(cost)}). "
        f"σ = {up_significant(point.noise_multiplier)} keeps ε at {format_epsilon(point.epsilon)} for "
        f"δ = {format_delta(sweep.budget.delta)}, {sweep.budget.adjacency} adjacency.",
        f"Why: {sweep.reason}",
        f"The noise on the averaged gradient is {point.noise_to_batch_ratio:.3g} clip norms per entry. All steps "
        f"together reach {100 * point.share_of_full_batch:.3g} % of the signal-to-noise ratio of full batches "
        f"with the same budget and data. Changes of that noise: {'; '.join(changes)}.",
    ]


def _noise_compared(sweep: Sweep) -> list[str]:
    chosen, plain, fixed = sweep.recommended, sweep.recommended_independent, sweep.recommended_without_sampling
    texts = [
        f"Recommended: {_size(chosen)} with privacy.noise={_override(chosen.options)}. The predicted noise is "
        f"{chosen.relative:.3f} times that of the recipe's batch size with independent noise.",
        f"With independent noise: {_size(plain)}, predicted noise {plain.relative:.3f}.",
    ]
    if chosen.sampled and fixed is not None:
        texts.append(
            f"Without sampling: {_size(fixed)} in a fixed order with privacy.noise={_override(fixed.options)}, "
            f"predicted noise {fixed.relative:.3f}. This is for units that cannot be sampled, and recommended only if "
            "the recipe has noise=blt. The one fine-tuning that was measured was about as good as with 16 bands, but a "
            "resume is charged as a second release of all units, and ε under replace-one is larger."
        )
    compared = f"{len(sweep.points)} points were compared; --json lists all of them."
    return [*texts, f"Why: {sweep.reason} {compared}"]


def _override(options: dict[str, Any] | str) -> str:
    """Return the noise as an override of a recipe; the run's plan finds the same numbers of the strategy."""
    if isinstance(options, str):
        return options
    named = [f"{name}: {options[name]}" for name in ("kind", "bands", "strategy", "buffers") if name in options]
    return f"{{{', '.join(named)}}}"


def format_tokens(tokens: float) -> str:
    """Return a count of tokens for people.

    >>> format_tokens(950), format_tokens(1.23e9), format_tokens(5.3e13)
    ('950', '1.2 B', '53 T')
    """
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # A value that would be rounded to a thousand of a unit is shown in the next unit.
        if tokens >= 0.9995 * size:
            return f"{tokens / size:.{1 if tokens < 9.95 * size else 0}f} {name}"
    return f"{tokens:.0f}"


def format_duration(seconds: float) -> str:
    """Return a time for people, in its two largest units.

    >>> format_duration(42.3), format_duration(12_000), format_duration(1_000_000)
    ('42 s', '3 h 20 min', '11 d 14 h')
    """
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


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
