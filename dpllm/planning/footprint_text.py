"""Format a footprint for people: rows of a table, and sizes in words."""

from __future__ import annotations

from collections.abc import Sequence

from dpllm.planning.footprint import Footprint

NATURE = "computed by dpllm.planning.footprint, not measured"

_NOISE = "noise of earlier steps, if it is stored"
_WHOLE, _SENT_THEN = "total, if whole sums are kept", "sent per step, if whole sums are kept"
_MAY_BE_NONE = (_NOISE, "average of the weights", _WHOLE, _SENT_THEN)
_SENT = ("sent per step", "of it for weights", _SENT_THEN)


def footprint_rows(result: Footprint) -> list[tuple[str, str]]:
    """Return the footprint as (name, value) rows for people; every size is per GPU."""
    run = result.run
    spread = f"{run.engine} on {run.num_gpus} GPU{'s' if run.num_gpus > 1 else ''}"
    return [
        ("engine", spread),
        *_setting(result),
        *((name, format_bytes(size)) for name, size in _parts(result) if size or name not in _MAY_BE_NONE),
        ("nature of these numbers", NATURE),
    ]


def comparison_rows(results: Sequence[Footprint]) -> tuple[str, list[tuple[str, ...]]]:
    """Return several engines side by side.

    Args:
        results: footprints of one recipe and number of GPUs.

    Returns:
        The unit of all numbers; and rows of a name and one number per footprint. The first row has the engines' names.
    """
    parts = [_parts(result) for result in results]
    unit, size_of_unit = _unit_of(max(size for part in parts for name, size in part if name not in _SENT))
    rows: list[tuple[str, ...]] = [("", *(result.run.engine for result in results))]
    for cells in zip(*parts, strict=True):
        name, sizes = cells[0][0], [size for _, size in cells]
        if any(sizes) or name not in _MAY_BE_NONE:
            rows.append((name, *(f"{size / size_of_unit:,.1f}" if size else "0" for size in sizes)))
    return unit, rows


def setting_of(result: Footprint) -> str:
    """Return the model and its microbatches on one line; it is the same for every engine."""
    return "; ".join(f"{name}: {value}" for name, value in _setting(result))


def _setting(result: Footprint) -> list[tuple[str, str]]:
    run, shape = result.run, result.shape
    return [
        ("parameters, trainable", f"{shape.total:,}, {shape.trainable:,}"),
        ("microbatch", f"{run.rows} rows of {run.tokens:,} tokens, {run.num_microbatches:,} per GPU and step"),
    ]


def _parts(result: Footprint) -> list[tuple[str, int]]:
    kept, passing, whole = result.kept, result.passing, result.with_whole_sums
    return [
        ("weights", kept.weights),
        ("clipped sum", kept.clipped_sum),
        ("optimizer state", kept.optimizer),
        (_NOISE, kept.noise),
        ("average of the weights", kept.average),
        ("gathered weights", passing.gathered),
        ("activations", passing.activations + passing.recomputed),
        ("logits and loss", passing.logits),
        ("gradient of one unit" if result.run.per_unit else "the book", passing.book),
        ("forming the sum", passing.forming),
        ("total, at most", result.total),
        ("sent per step", result.sent.total),
        ("of it for weights", result.sent.weights),
        (_WHOLE, 0 if whole is None else whole.total),
        (_SENT_THEN, 0 if whole is None else whole.sent.total),
    ]


def format_bytes(size: int) -> str:
    """Format bytes for people, in powers of 1000, the units in which GPUs and networks are sold.

    >>> format_bytes(80 * 2**30), format_bytes(1500), format_bytes(0)
    ('85.9 GB', '1.5 kB', '0 B')
    """
    unit, size_of_unit = _unit_of(size)
    return f"{size / size_of_unit:,.0f} B" if unit == "B" else f"{size / size_of_unit:,.1f} {unit}"


def _unit_of(size: int) -> tuple[str, int]:
    """Return the largest unit that a size reaches, and the unit's bytes."""
    for unit, size_of_unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= size_of_unit:
            return unit, size_of_unit
    return "B", 1
