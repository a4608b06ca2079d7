"""A sweep for people: rows of a table, and the recommendation in words.

Place in the flow: after `dpllm.planning.sweep`; nothing is computed here. Printed values of ε and σ are rounded up.
"""

from __future__ import annotations

from dpllm.planning.sweep import Sweep, SweepPoint
from dpllm.privacy.rounding import format_epsilon, up_significant

MARK = "→"
"""Marks the recommended row."""


def sweep_rows(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row of text for each point; columns that are empty for all points are left out.

    The first column holds `MARK` at the recommended point and "·" at the others of its compute.
    """
    known = [point for point in sweep.points if point.noise_multiplier is not None]
    columns = [
        ("", True),
        ("b", True),
        ("steps T", True),
        ("σ", True),
        ("σ/b", True),
        ("of full batch", True),
        ("effective steps", sweep.gradient_rms > 0),
        ("ε", True),
        ("epochs", True),
        ("tokens", known[0].tokens is not None),
        ("time", known[0].seconds is not None),
    ]
    rows = [[cell for cell, (_, shown) in zip(_cells(point), columns, strict=True) if shown] for point in sweep.points]
    return [name for name, shown in columns if shown], rows


def _cells(point: SweepPoint) -> list[str]:
    steps = "" if point.effective_steps is None else f"{point.effective_steps:,.3g}"
    return [
        MARK if point.recommended else "·" if point.on_line else "",
        f"{point.expected_batch_size:,}",
        f"{point.num_steps:,}",
        "none" if point.noise_multiplier is None else up_significant(point.noise_multiplier),
        "" if point.noise_to_batch_ratio is None else f"{point.noise_to_batch_ratio:.3g}",
        "" if point.share_of_full_batch is None else f"{100 * point.share_of_full_batch:.3g} %",
        steps,
        "" if point.epsilon is None else format_epsilon(point.epsilon),
        f"{point.epochs:.3g}",
        "" if point.tokens is None else format_tokens(point.tokens),
        "" if point.seconds is None else format_duration(point.seconds),
    ]


def recommendation_text(sweep: Sweep) -> str:
    """Return the recommendation as short paragraphs: the point, its reason, its noise, and its assumptions."""
    point = sweep.recommended
    assert point.noise_multiplier is not None and point.epsilon is not None
    cost = [f"{point.epochs:.3g} epochs"]
    if point.tokens is not None:
        cost.append(f"{format_tokens(point.tokens)} tokens")
    if point.seconds is not None:
        cost.append(f"about {format_duration(point.seconds)}")
    paragraphs = [
        f"Recommended: {point.num_steps:,} steps of {point.expected_batch_size:,} units each ({', '.join(cost)}). "
        f"σ = {up_significant(point.noise_multiplier)} keeps ε at {format_epsilon(point.epsilon)} for "
        f"δ = {sweep.delta:.3g}, {sweep.adjacency} adjacency.",
        f"Why: {sweep.reason}",
        f"The noise on the averaged gradient is {point.noise_to_batch_ratio:.3g} clip norms in every entry. All steps "
        f"together reach {100 * (point.share_of_full_batch or 0):.3g} % of the signal-to-noise ratio that full batches "
        f"would reach with this budget and these data. {_what_if(sweep)}",
        "Assumed: " + " ".join(f"({number}) {text}" for number, text in enumerate(sweep.assumptions, 1)),
    ]
    missing = sum(other.noise_multiplier is None for other in sweep.points)
    if missing:
        first = next(other for other in sweep.points if other.noise_multiplier is None)
        paragraphs.append(
            f"{missing} of {len(sweep.points)} points cannot reach the target; b = {first.expected_batch_size:,}, "
            f"T = {first.num_steps:,}: {first.reason}."
        )
    return "\n\n".join(paragraphs)


def _what_if(sweep: Sweep) -> str:
    changes = [
        f"{change.change}: times {change.factor:.2f}" if change.factor is not None else f"{change.change}: impossible"
        for change in sweep.what_if
    ]
    return f"Changes of that noise: {'; '.join(changes)}."


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
