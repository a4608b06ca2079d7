"""Compute the curves of a run, and draw its pictures.

`plot_training` draws loss and ε over the private steps at the end of a run. The loss of a training step depends on the
private batch, and ε does not cover it, so sharing this picture is a disclosure, as the report says. The other pictures
are drawn from the report's curves alone and reveal nothing more: the trade-off of the best attack, ε over the steps,
and ε over δ, as SVG texts inside an HTML page. The same numbers give the same text: it has no date, and its ids depend
only on the contents. Colours are the page's variables ``--blue``, ``--orange`` and ``--grid``, and its text colour.

The report stores the curves, so its pictures can be drawn from the report alone. Every value is an upper bound.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dpllm.config import ConfigError
from dpllm.mechanism.limits import ADJACENCIES
from dpllm.privacy import accounting
from dpllm.privacy.accounting import Guarantee, History
from dpllm.privacy.risk import tradeoff_curve
from dpllm.privacy.rounding import up
from dpllm.report.models import Curves, DeltasByAdjacency, EpsilonOverDelta, EpsilonOverSteps, Tradeoff

BLUE, ORANGE, GREY = "#2a6f97", "#c8553d", "#6b6b6b"

_GRID = "#e6e6e6"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PAGE_COLOURS = {BLUE: f"var(--blue, {BLUE})", ORANGE: f"var(--orange, {ORANGE})", _GRID: f"var(--grid, {_GRID})"}


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
        losses: (n,) loss at each of these steps, in nats.
        epsilon_steps: (m,) private steps at which ε is known.
        epsilons: (m,) ε at each of these steps; infinite entries are omitted (a run without noise).
        path: path of the PNG.
        eval_points: (step, loss) on held-out records, drawn as points; the same kind of loss, the mean over rows.

    Returns:
        The path.

    Raises:
        ConfigError: two lists that belong together differ in length.
    """
    if len(steps) != len(losses) or len(epsilon_steps) != len(epsilons):
        raise ConfigError(
            f"{len(steps)} steps have {len(losses)} losses, and {len(epsilon_steps)} steps have {len(epsilons)} "
            "epsilons: pass one value per step"
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
            f"ε = {up(finite[-1][1], 2)}",
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
        _open_frame(panel)
    figure.align_ylabels()
    figure.tight_layout()
    path = Path(path)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def plot_tradeoff(
    false_positive_rates: Sequence[float],
    true_positive_rates: Sequence[float],
    from_epsilon_and_delta: Sequence[float],
    narrow: bool = False,
) -> str:
    """Return the trade-off curve of the best attack as an SVG text, with logarithmic axes.

    Args:
        false_positive_rates: (n,) share of the units outside the data that an attack accuses, each above 0.
        true_positive_rates: (n,) largest share of the units in the data that it finds.
        from_epsilon_and_delta: (n,) the bound that follows from the pair (ε, δ) alone.
        narrow: whether to draw for a narrow screen.

    Raises:
        ConfigError: the lists differ in length, or are empty.
    """
    _same_length(false_positive_rates, true_positive_rates, from_epsilon_and_delta)
    with _svg_panel("tradeoff", narrow) as (panel, text):
        panel.plot(false_positive_rates, from_epsilon_and_delta, ":", color=ORANGE, linewidth=1.6)
        panel.plot(false_positive_rates, true_positive_rates, "-", color=BLUE, linewidth=2.2)
        panel.plot(false_positive_rates, false_positive_rates, "--", color=GREY, linewidth=1.2)
        panel.fill_between(false_positive_rates, false_positive_rates, true_positive_rates, color=BLUE, alpha=0.12)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlim(min(false_positive_rates), 1)
        panel.set_ylim(min(false_positive_rates), 1.3)
        _powers_of_ten(panel.xaxis)
        _powers_of_ten(panel.yaxis)
        panel.set_xlabel("accused of those not in the data")
        panel.set_ylabel("found of those in the data")
        _legend(panel, ("from ε and δ alone", "at most, for any attack on this run", "blind guessing"), "lower right")
    return text[0]


def plot_epsilon_over_steps(
    steps: Sequence[int], epsilons: Sequence[float], target_epsilon: float | None = None, narrow: bool = False
) -> str:
    """Return ε over the steps of a run as an SVG text.

    Args:
        steps: (n,) numbers of steps.
        epsilons: (n,) ε after each number of steps.
        target_epsilon: the budget, drawn as a line.
        narrow: whether to draw for a narrow screen.

    Raises:
        ConfigError: the lists differ in length, or are empty.
    """
    _same_length(steps, epsilons)
    from matplotlib.ticker import MaxNLocator

    with _svg_panel("steps", narrow) as (panel, text):
        panel.plot([0, *steps], [0.0, *epsilons], ".-", color=ORANGE, linewidth=2.0, markersize=7)
        names = ["ε spent"]
        if target_epsilon is not None:
            panel.axhline(target_epsilon, color=GREY, linestyle="--", linewidth=1.2)
            names.append("budget")
        panel.set_xlim(left=0)
        panel.set_ylim(0, 1.12 * max(*epsilons, target_epsilon or 0.0))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlabel("private step")
        panel.set_ylabel("ε")
        _legend(panel, names, "lower right")
    return text[0]


def plot_epsilon_curve(
    epsilons: Sequence[float],
    deltas: Mapping[str, Sequence[float | None]],
    delta: float,
    headline: float,
    narrow: bool = False,
) -> str:
    """Return ε over δ as an SVG text, with one curve per adjacency.

    Args:
        epsilons: (n,) values of ε.
        deltas: for each adjacency, (n,) the δ of each ε; None if it is too small to be resolved.
        delta: δ of the headline, marked by a point.
        headline: ε of the headline.
        narrow: whether to draw for a narrow screen.

    Raises:
        ConfigError: the lists differ in length, or are empty.
    """
    _same_length(epsilons, *deltas.values())
    with _svg_panel("delta", narrow) as (panel, text):
        names = []
        for (name, values), (style, colour) in zip(deltas.items(), (("-", BLUE), ("--", ORANGE)), strict=True):
            known = [(at, value) for value, at in zip(epsilons, values, strict=True) if at]
            if known:
                panel.plot(*zip(*known, strict=True), style, color=colour, linewidth=2.0)
                names.append(name)
        panel.plot([delta], [headline], "o", color=GREY, markersize=7)
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        _powers_of_ten(panel.xaxis)
        panel.set_xlabel("δ")
        panel.set_ylabel("ε")
        _legend(panel, [*names, "stated in this report"], "upper right")
    return text[0]


def _same_length(*lists: Sequence[Any]) -> None:
    lengths = [len(one) for one in lists]
    if len(set(lengths)) != 1 or lengths[0] == 0:
        raise ConfigError(f"a curve needs non-empty lists of equal length, got lengths {', '.join(map(str, lengths))}")


def _open_frame(panel: Any) -> None:
    panel.grid(color=_GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _powers_of_ten(axis: Any) -> None:
    """Label only powers of ten, in plain text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def power(value: float, _position: int | None = None) -> str:
        exponent = len(f"{value:.0f}") - 1 if value >= 1 else int(f"{value:e}".partition("e")[2])
        return "1" if exponent == 0 else f"10{str(exponent).translate(_SUPERSCRIPTS)}"

    axis.set_major_locator(LogLocator(base=10, numticks=7))
    axis.set_major_formatter(FuncFormatter(power))
    axis.set_minor_locator(NullLocator())


def _legend(panel: Any, names: Sequence[str], place: str) -> None:
    lines = [line for line in panel.get_lines() if len(line.get_xdata()) > 0]
    panel.legend(lines, names, frameon=False, loc=place, labelcolor=GREY, fontsize="small")


@contextmanager
def _svg_panel(name: str, narrow: bool) -> Iterator[tuple[Any, list[str]]]:
    """Yield a panel to draw on, and a list that holds the SVG text afterwards.

    Args:
        name: of the picture; names inside the text start with it, so that several pictures can be in one page.
        narrow: for a screen of 390 pixels, where letters of the wide picture would be too small.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    texts: list[str] = []
    name = f"{name}-narrow" if narrow else name
    settings = {"svg.hashsalt": f"dpllm {name}", "svg.fonttype": "none", "font.size": 11.0}
    with style.context(["default", settings]):
        figure = Figure(figsize=(3.7, 3.5) if narrow else (7, 4.2))
        panel = figure.add_subplot()
        _open_frame(panel)
        yield panel, texts
        for part in (panel.xaxis.label, panel.yaxis.label, *panel.spines.values()):
            part.set_color(GREY) if hasattr(part, "set_color") else None
        panel.tick_params(which="both", colors=GREY)
        figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    texts.append(_inline(buffer.getvalue(), name))


def _inline(svg: str, name: str) -> str:
    """Turn an SVG file into a part of a page: no prologue, no fixed size, unique ids, the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    opening, bracket, rest = svg.partition(">")
    opening = re.sub(r' (?:width|height)="[^"]*"', "", opening)
    svg = opening + bracket + rest
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    for colour, of_the_page in _PAGE_COLOURS.items():
        svg = svg.replace(colour, of_the_page)
    svg = re.sub(rf"{GREY}|#000000", "currentColor", svg)
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE).strip() + "\n"


_COARSE = 1e-3
_STEP_POINTS = 12
_EPSILON_POINTS = 48
_LEAST_DELTA = 1e-12


@lru_cache(maxsize=8)
def curves(guarantee: Guarantee) -> Curves:
    """Return the three curves; their lists are empty if there is no step or no noise.

    Args:
        guarantee: the guarantee of the stated steps, in the order in which they ran; its history is a tuple.

    Returns:
        The largest true positive rates over false positive rates; ε after some numbers of steps, on a grid of losses
        that is ten times coarser (but never above the ε of all steps); and the δ for some values of ε, None if it is
        below 1e-12, which this composition cannot resolve.
    """
    if not accounting.merge(guarantee.history) or not guarantee.is_finite:
        return Curves(
            tradeoff=Tradeoff(false_positive_rate=(), true_positive_rate=(), from_epsilon_and_delta_alone=()),
            epsilon_over_steps=EpsilonOverSteps(steps=(), epsilon=()),
            epsilon_over_delta=EpsilonOverDelta(
                epsilon=(), delta=DeltasByAdjacency.model_validate(dict.fromkeys(ADJACENCIES, ()))
            ),
        )
    return Curves(
        tradeoff=_tradeoff(guarantee),
        epsilon_over_steps=_over_steps(guarantee),
        epsilon_over_delta=_over_delta(guarantee),
    )


def _tradeoff(guarantee: Guarantee) -> Tradeoff:
    rates, found = tradeoff_curve(guarantee.history, guarantee.adjacency)
    factor, delta = math.exp(min(guarantee.epsilon, 700.0)), guarantee.delta
    alone = np.clip(np.minimum(factor * rates + delta, 1 + (rates + delta - 1) / factor), rates, 1.0)
    return Tradeoff(
        false_positive_rate=tuple(rates.tolist()),
        true_positive_rate=tuple(found.tolist()),
        from_epsilon_and_delta_alone=tuple(alone.tolist()),
    )


def _over_steps(guarantee: Guarantee) -> EpsilonOverSteps:
    history = guarantee.history
    if any(event.is_selection for event, _ in accounting.merge(history)):
        return EpsilonOverSteps(steps=(), epsilon=())  # a selection has an ε only after all its runs
    total = guarantee.num_steps
    steps = sorted({math.ceil(total * part / _STEP_POINTS) for part in range(1, _STEP_POINTS)} | {1, total})
    values = []
    for number in steps[:-1]:
        at = accounting.epsilon(_first(history, number), guarantee.delta, guarantee.adjacency, _COARSE)
        values.append(min(guarantee.epsilon, at))
    # ε cannot decrease with more steps, so a smaller bound at a later step also holds for earlier steps.
    values = np.minimum.accumulate([*values, guarantee.epsilon][::-1])[::-1].tolist()
    return EpsilonOverSteps(steps=tuple(steps), epsilon=tuple(values))


def _first(history: History, number: int) -> list[Any]:
    """Return the first steps of a history."""
    taken, left = [], number
    for step, count in history:
        taken.append((step, min(count, left)))
        left -= min(count, left)
    return taken


def _over_delta(guarantee: Guarantee) -> EpsilonOverDelta:
    functions = {name: accounting.delta_function(guarantee.history, name, tilted=False) for name in ADJACENCIES}
    # Far enough for the larger of the two curves to fall to a thousandth of δ, or to the resolution.
    goal = max(_LEAST_DELTA, guarantee.delta / 1000)
    highest = 1e-3
    while functions["replace-one"](highest) > goal and highest < 1e6:
        highest *= 1.25
    grid = tuple(np.linspace(0.0, highest, _EPSILON_POINTS).tolist())
    found = {name: [function(at) for at in grid] for name, function in functions.items()}
    deltas = {name: tuple(at if at >= _LEAST_DELTA else None for at in values) for name, values in found.items()}
    return EpsilonOverDelta(epsilon=grid, delta=DeltasByAdjacency.model_validate(deltas))
