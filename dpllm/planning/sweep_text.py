"""A sweep for people: rows of a table, and the recommendation in words.

Place in the flow: after `dpllm.planning.sweep`; nothing is computed here. Printed values of ε and σ are rounded up.
"""

from __future__ import annotations

from dpllm.planning.sweep import Sweep, SweepPoint
from dpllm.privacy.rounding import format_delta, format_epsilon, up_significant

MARK = "→"
"""Marks the recommended row."""


def sweep_rows(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row of text for each point; columns that are empty for all points are left out.

    The first column holds `MARK` at the recommended point and "·" at the others of its compute.
    """
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
        ("tokens", sweep.points[0].compute.tokens is not None),
        ("time", sweep.points[0].compute.seconds is not None),
    ]
    rows = [[cell for cell, (_, shown) in zip(_cells(point), columns, strict=True) if shown] for point in sweep.points]
    return [name for name, shown in columns if shown], rows


def _cells(point: SweepPoint) -> list[str]:
    noise, compute = point.noise, point.compute
    shown = ["none", "", "", "", ""]
    if noise is not None:
        shown = [
            up_significant(noise.noise_multiplier),
            f"{noise.noise_to_batch_ratio:.3g}",
            f"{100 * noise.share_of_full_batch:.3g} %",
            "" if noise.effective_steps is None else f"{noise.effective_steps:,.3g}",
            format_epsilon(noise.epsilon),
        ]
    return [
        MARK if point.recommended else "·" if point.on_line else "",
        f"{point.expected_batch_size:,}",
        f"{point.num_steps:,}",
        *shown,
        f"{compute.epochs:.3g}",
        "" if compute.tokens is None else format_tokens(compute.tokens),
        "" if compute.seconds is None else format_duration(compute.seconds),
    ]


def recommendation_text(sweep: Sweep) -> str:
    """Return the recommendation as short paragraphs: the point, its reason, its noise, and its assumptions."""
    point, noise, compute = sweep.recommended, sweep.recommended.noise, sweep.recommended.compute
    assert noise is not None
    cost = [f"{compute.epochs:.3g} epochs"]
    if compute.tokens is not None:
        cost.append(f"{format_tokens(compute.tokens)} tokens")
    if compute.seconds is not None:
        cost.append(f"about {format_duration(compute.seconds)}")
    paragraphs = [
        f"Recommended: {point.num_steps:,} steps of {point.expected_batch_size:,} units each ({', '.join(cost)}). "
        f"σ = {up_significant(noise.noise_multiplier)} keeps ε at {format_epsilon(noise.epsilon)} for "
        f"δ = {format_delta(sweep.delta)}, {sweep.adjacency} adjacency.",
        f"Why: {sweep.reason}",
        f"The noise on the averaged gradient is {noise.noise_to_batch_ratio:.3g} clip norms in every entry. All steps "
        f"together reach {100 * noise.share_of_full_batch:.3g} % of the signal-to-noise ratio that full batches "
        f"would reach with this budget and these data. {_what_if(sweep)}",
        "Assumed: " + " ".join(f"({number}) {text}" for number, text in enumerate(sweep.assumptions, 1)),
    ]
    missing = [other for other in sweep.points if other.noise is None]
    if missing:
        first = missing[0]
        paragraphs.append(
            f"{len(missing)} of {len(sweep.points)} points cannot reach the target; b = {first.expected_batch_size:,}, "
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
