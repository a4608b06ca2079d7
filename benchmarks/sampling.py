"""Measure the cost of drawing and dividing a step's units, from 10^6 to 10^9 units.

    python benchmarks/sampling.py                                      # N = 10^6 ... 10^9, q = 1e-6, 1e-5, 1e-4
    python benchmarks/sampling.py --units 1e9 --rates 1e-6 --ranks 64 --json sampling.json

A step is `TruncatedPoissonSampler.draw` and then `dpllm.training.microbatches.microbatches` of one rank, which looks up
the rows (`UnitIndex.rows_of`), divides the units over the ranks (`deal`) and cuts this rank's share into microbatches,
on the index and the lengths of all N rows. Rows are not fetched and no tensor of tokens is made. `rows_of` and `deal`
are timed once more by themselves. The lengths take 4 bytes per row: 4 GB for 10^9.

Two more tables are of the division alone: its time for 10^3 to 10^5 drawn units on 1 to 512 ranks, and the balance of
the ranks in lockstep, where of the microbatches that run together the largest counts.

lockstep   tokens of a step, padding included, as a multiple of a rank's mean without padding: 1024 units of log-normal
           length (median 100, standard deviation of the logarithm 0.9), 8192 tokens in a microbatch
by itself  the same if each rank chose the best cuts of its own units (`joint_pieces` of one process)
at least   the rank with most tokens, without padding: no cuts cost less, since the ranks' units are random

mask    the usual way for comparison, O(N): ``(torch.rand(N) < q).nonzero().tolist()`` (opacus/utils/uniform_sampler.py,
        UniformWithReplacementSampler); not run above --mask-up-to. Its random numbers are multiples of 2^-24, so the
        rate at which it really draws is not q: "mask q" says which it is
peak    bytes alive at once beyond those before: Python and numpy by tracemalloc, torch by its live tensors
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from throughput import CLOCKS, LiveBytes, machine

from dpllm.data.units import UnitIndex
from dpllm.mechanism.sampling import TruncatedPoissonSampler, default_max_batch_size, secret_rng
from dpllm.training.microbatches import Bounds, Piece, deal, joint_pieces, microbatches
from dpllm.training.rows import TrainingRows

SHORTEST, LONGEST = 16, 512
SETUP_BYTES = ("index_peak", "lengths", "facts_peak", "max_rows_peak")
PARTS = ("draw", "rows_of", "deal", "microbatches")
MASK_RESOLUTION = 2.0**-24  # of torch.rand in float32
DIVIDED, DIVIDING_RANKS = (10**3, 10**4, 10**5), (1, 8, 64, 512)
BALANCED, BALANCED_RANKS, BALANCED_TOKENS, BALANCED_SEEDS = 1024, (2, 8, 64, 512), 8192, 10


@dataclass(frozen=True)
class Settings:
    """The settings."""

    units: tuple[int, ...] = (10**6, 10**7, 10**8, 10**9)
    rates: tuple[float, ...] = (1e-6, 1e-5, 1e-4)
    ranks: int = 8
    rows: int = 32
    rounds: int = 20
    mask_up_to: int = 10**8
    clock: str = "wall"


def lengths_of(num_rows: int) -> np.ndarray:
    """(num_rows,) int32, as `dpllm.data.lengths.row_lengths` gives them: spread evenly over all lengths."""
    return np.random.default_rng(0).integers(SHORTEST, LONGEST, size=num_rows, dtype=np.int32, endpoint=True)


def identity(numbers: np.ndarray) -> np.ndarray:
    """Fetch nothing: the row numbers stand for the rows."""
    return numbers


def nothing(rows: list[Any]) -> dict[str, Any]:
    """Make no tensor of the rows."""
    del rows
    return {}


@dataclass(frozen=True)
class Drawn:
    """The units of one step, and where their rows are looked up."""

    index: UnitIndex
    lengths: np.ndarray
    unit_ids: np.ndarray

    def rows_of(self) -> None:
        """Look the rows up."""
        self.index.rows_of(self.unit_ids)

    def divide(self, settings: Settings) -> None:
        """Cut the share of rank 0 into microbatches."""
        for _ in microbatches(
            fetch=identity,
            collate=nothing,
            units=self.index,
            lengths=self.lengths,
            unit_ids=self.unit_ids,
            max_rows=settings.rows,
            rank=0,
            size=settings.ranks,
        ):
            pass


def timed(function: Callable[[], Any], clock: str) -> tuple[Any, float]:
    """Return the result of one call, and its milliseconds."""
    start = CLOCKS[clock]()
    result = function()
    return result, 1000 * (CLOCKS[clock]() - start)


def peak_bytes(function: Callable[[], Any]) -> int:
    """Bytes of Python and numpy that one call has alive at once."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure_step(index: UnitIndex, lengths: np.ndarray, rate: float, settings: Settings) -> dict[str, Any]:
    """Median milliseconds of a step and of its parts, and its peak.

    Args:
        index: of all N units.
        lengths: (num_rows,) of all rows.
        rate: q.
        settings: ranks, rows of a microbatch, rounds.
    """
    units = index.num_units
    sampler = TruncatedPoissonSampler(units, rate, default_max_batch_size(max(1, round(units * rate)), units))
    rng = secret_rng()
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    counts = []
    for _ in range(settings.rounds + 1):
        unit_ids, elapsed = timed(lambda: sampler.draw(rng), settings.clock)
        counts.append(len(unit_ids))
        drawn = Drawn(index, lengths, unit_ids)
        calls = (drawn.rows_of, lambda u=unit_ids: deal(u, settings.ranks, key=0), lambda d=drawn: d.divide(settings))
        for part, own in zip(PARTS, (elapsed, *(timed(call, settings.clock)[1] for call in calls)), strict=True):
            times[part].append(own)
    warm = {part: values[1:] for part, values in times.items()}
    steps = [draw + divide for draw, divide in zip(warm["draw"], warm["microbatches"], strict=True)]
    return {
        "units": units,
        "sampling_rate": rate,
        "max_batch_size": sampler.max_batch_size,
        "median_drawn": statistics.median(counts[1:]),
        "ms": {part: statistics.median(values) for part, values in warm.items()},
        "step_ms": statistics.median(steps),
        "step_ms_range": [min(steps), max(steps)],
        "peak_bytes": max(
            peak_bytes(lambda: sampler.draw(rng)),
            peak_bytes(lambda: drawn.divide(settings)),
        ),
    }


def text_lengths(count: int, seed: int) -> np.ndarray:
    """(count,) int64, log-normal: median 100, standard deviation of the logarithm 0.9."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(100), 0.9, count))
    return np.clip(drawn, 1, BALANCED_TOKENS).astype(np.int64)


def measure_dividing(units: int, ranks: int, rounds: int, clock: str) -> dict[str, Any]:
    """Median milliseconds in which a rank divides a step's units, and its number of microbatches."""
    index, lengths, unit_ids = UnitIndex.one_row_per_unit(units), text_lengths(units, 0), np.arange(units)

    def divide() -> int:
        bounds = {"max_rows": None, "max_tokens": BALANCED_TOKENS}
        return len(microbatches(identity, nothing, index, lengths, unit_ids, rank=ranks // 2, size=ranks, **bounds))

    results = [timed(divide, clock) for _ in range(rounds + 1)][1:]
    return {
        "units": units,
        "ranks": ranks,
        "ms": statistics.median(elapsed for _, elapsed in results),
        "microbatches": results[0][0],
    }


def measure_balance(ranks: int) -> dict[str, Any]:
    """Mean over some steps: tokens in lockstep over a rank's mean, for joint cuts and for cuts of each rank."""
    ratios = []
    for seed in range(BALANCED_SEEDS):
        lengths, owner = text_lengths(BALANCED, seed), deal(np.arange(BALANCED), ranks, key=seed)
        order = np.lexsort((-lengths, owner))
        lengths, first = lengths[order], np.searchsorted(owner[order], np.arange(ranks + 1))
        one, bounds, mean = np.ones_like(lengths), Bounds(None, BALANCED_TOKENS), lengths.sum() / ranks
        shares = [lengths[begin:end] for begin, end in itertools.pairwise(first)]
        alone = [joint_pieces(np.ones_like(own), own, np.array([0, len(own)]), 0, bounds) for own in shares]
        joint = [joint_pieces(one, lengths, first, rank, bounds) for rank in range(ranks)]
        own_tokens = [[_padded(own, piece) for piece in pieces] for own, pieces in zip(shares, alone, strict=True)]
        joint_tokens = [[_padded(lengths, piece) for piece in pieces] for pieces in joint]
        together, by_itself = (
            sum(map(max, itertools.zip_longest(*tokens, fillvalue=0))) / mean for tokens in (joint_tokens, own_tokens)
        )
        ratios.append((together, by_itself, max(own.sum() for own in shares) / mean))
    together, by_itself, least = (statistics.mean(column) for column in zip(*ratios, strict=True))
    return {"ranks": ranks, "lockstep": together, "by_itself": by_itself, "at_least": least}


def _padded(lengths: np.ndarray, piece: Piece | None) -> int:
    return 0 if piece is None else (piece[1] - piece[0]) * int(lengths[piece[0]])


def mask_rate(rate: float) -> float:
    """The probability that a multiple of 2^-24, drawn uniformly from [0, 1), is below q as float32 holds it."""
    return math.ceil(float(np.float32(rate)) / MASK_RESOLUTION) * MASK_RESOLUTION


def measure_mask(units: int, rate: float, rounds: int, clock: str) -> dict[str, Any]:
    """One random number per unit, compared with q: median milliseconds, peak, and the rate at which it draws."""

    def draw() -> list[int]:
        return (torch.rand(units) < rate).nonzero(as_tuple=False).reshape(-1).tolist()

    times = [timed(draw, clock)[1] for _ in range(rounds)]
    with LiveBytes() as live:
        draw()
    return {"ms": statistics.median(times), "peak_bytes": live.peak, "sampling_rate": mask_rate(rate)}


def measure_setup(units: int, clock: str) -> tuple[dict[str, Any], tuple[UnitIndex, np.ndarray]]:
    """Measure the work that is done once per run over all N units, one row each.

    Returns:
        Seconds and bytes of making the index, of hashing it with the lengths so that processes can compare them, and of
        asking for the rows of the largest unit; the index and the lengths.
    """
    index, index_ms = timed(lambda: UnitIndex.one_row_per_unit(units), clock)
    lengths = lengths_of(units)
    rows = TrainingRows(units=index, lengths=lengths, fetch=identity, collate=nothing, max_rows=1)
    facts_peak, facts_ms = timed(lambda: peak_bytes(rows.facts), clock)
    return {
        "units": units,
        "index_s": index_ms / 1000,
        "index_peak_bytes": peak_bytes(lambda: UnitIndex.one_row_per_unit(units)),
        "lengths_bytes": lengths.nbytes,
        "facts_s": facts_ms / 1000,
        "facts_peak_bytes": facts_peak,
        "max_rows_peak_bytes": peak_bytes(lambda: index.max_rows),
    }, (index, lengths)


def measure(settings: Settings) -> dict[str, Any]:
    """Every combination of N and q, and the set-up of every N."""
    steps, setups = [], []
    for units in settings.units:
        setup, (index, lengths) = measure_setup(units, settings.clock)
        setups.append(setup)
        for rate in settings.rates:
            step = measure_step(index, lengths, rate, settings)
            step["mask"] = None
            if units <= settings.mask_up_to:
                step["mask"] = measure_mask(units, rate, min(3, settings.rounds), settings.clock)
            steps.append(step)
        del index, lengths
    return {
        "settings": asdict(settings),
        "machine": {**machine(torch.device("cpu")), "numpy": np.__version__},
        "steps": steps,
        "setup": setups,
        "dividing": [
            measure_dividing(units, ranks, settings.rounds, settings.clock)
            for units in DIVIDED
            for ranks in DIVIDING_RANKS
        ],
        "balance": [measure_balance(ranks) for ranks in BALANCED_RANKS],
    }


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _per_unit(count: int, units: int) -> str:
    return f"{_size(count)} ({count / units:.2g})"


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join('---' for _ in columns)}|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def as_markdown(report: dict[str, Any]) -> str:
    """Return four tables: a step, the work done once per run, and the time and the balance of the division."""
    where, settings = report["machine"], report["settings"]
    lines = [
        f"{where['device']}, {where['threads']} threads, numpy {where['numpy']}, PyTorch {where['torch']}; "
        f"{settings['ranks']} ranks, {settings['rows']} rows per microbatch; medians of {settings['rounds']} draws, "
        f"ms of {settings['clock']} time",
        "",
    ]
    rows = []
    for step in report["steps"]:
        mask = step["mask"]
        rows.append(
            [
                f"{step['units']:.0e}",
                f"{step['sampling_rate']:g}",
                f"{step['median_drawn']:.0f}",
                *(f"{step['ms'][part]:.3f}" for part in PARTS),
                f"**{step['step_ms']:.2f}**",
                _size(step["peak_bytes"]),
                f"{mask['ms']:.1f}" if mask else "-",
                _size(mask["peak_bytes"]) if mask else "-",
                f"{mask['sampling_rate']:.4g}" if mask else "-",
            ]
        )
    lines += _table(
        ["N", "q", "drawn", *PARTS, "step", "peak", "mask", "mask peak", "mask q"],
        rows,
    )
    lines += ["", "Once per run, one row per unit; bytes per unit in brackets:", ""]
    lines += _table(
        ["N", "index s", "facts s", "index", "lengths", "facts peak", "max_rows peak"],
        [
            [
                f"{setup['units']:.0e}",
                f"{setup['index_s']:.5f}",
                f"{setup['facts_s']:.2f}",
                *(_per_unit(setup[f"{name}_bytes"], setup["units"]) for name in SETUP_BYTES),
            ]
            for setup in report["setup"]
        ],
    )
    lines += ["", "Dividing a step's units, ms (microbatches):", ""]
    lines += _table(
        ["units", *(f"{ranks} ranks" for ranks in DIVIDING_RANKS)],
        [
            [
                f"{units:.0e}",
                *(f"{one['ms']:.1f} ({one['microbatches']})" for one in report["dividing"] if one["units"] == units),
            ]
            for units in DIVIDED
        ],
    )
    lines += ["", "Tokens of a step in lockstep over a rank's mean:", ""]
    names = ("lockstep", "by_itself", "at_least")
    lines += _table(
        ["ranks", "lockstep", "by itself", "at least"],
        [[str(one["ranks"]), *(f"{one[name]:.2f}" for name in names)] for one in report["balance"]],
    )
    return "\n".join(lines)


def _count(text: str) -> int:
    """Read a whole number, also written as 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 1 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1; write it as 1000000 or 1e6")
    return int(value)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    d = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=_count, nargs="+", default=list(d.units), metavar="N", help="units of the data")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=list(d.rates), metavar="q", help="sampling rates, above 0, at most 1"
    )
    parser.add_argument("--ranks", type=_count, default=d.ranks, help="processes (default %(default)s)")
    parser.add_argument("--rows", type=_count, default=d.rows, help="rows of a microbatch (default %(default)s)")
    parser.add_argument("--rounds", type=_count, default=d.rounds, help="timed draws (default %(default)s)")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default=d.clock, help="wall time, or processor time")
    parser.add_argument("--mask-up-to", type=_count, default=d.mask_up_to, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    for rate in options.rates:
        if not 0 < rate <= 1:
            parser.error(f"--rates has {rate:g}; a sampling rate is above 0 and at most 1")
        if rate * min(options.units) < 0.5:
            parser.error(
                f"--rates {rate:g} of {min(options.units)} units is no unit in most steps; raise one of the two"
            )
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    values = {name: getattr(options, name) for name in Settings.__dataclass_fields__}
    report = measure(Settings(**values | {"units": tuple(options.units), "rates": tuple(options.rates)}))
    print(as_markdown(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
