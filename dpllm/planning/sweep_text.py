"""Format a sweep for people: rows of a table, and the recommendation in words.

Printed values of ε and σ are rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpllm.planning.sweep import Sweep, SweepPoint
from dpllm.privacy.rounding import format_delta, format_epsilon, up_significant

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
