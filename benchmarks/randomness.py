"""Measure the cost of noise: nanoseconds per entry of each generator, and of stored and regenerated correlated noise.

    OMP_NUM_THREADS=1 python benchmarks/randomness.py
    OMP_NUM_THREADS=1 python benchmarks/randomness.py --entries 1e6 --bands 8 --steps 40 --json randomness.json

level       `dpllm.mechanism.generators.NoiseSource`: "os" (PCG64DXSM on the CPU), "chacha20", and "discrete", with
            the rounding of the sum. Of "chacha20" its parts too: the key stream, and the conversion of its bits to
            normal numbers
stored      one step of banded noise, after b steps, with the noise of the steps before in memory
regenerated the last of T steps: T draws per entry, in blocks of `ENTRIES_AT_A_TIME`

Times are the processor's time of this process (``time.process_time``), the least of the rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from dpllm.mechanism import chacha20
from dpllm.mechanism.banded import BandedNoise
from dpllm.mechanism.generators import NoiseSource, stream_of
from dpllm.mechanism.limits import RANDOMNESS

RATIO = 0.98  # of the geometric strategy; it does not change the time


def least(function: Callable[[], object], rounds: int) -> float:
    """Return the least time of a call, in seconds."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def parts_of_chacha20(entries: int, rounds: int) -> dict[str, float]:
    """Return nanoseconds per entry of the key stream, and of its conversion."""
    blocks = 4096
    count = blocks * chacha20.NORMALS_OF_A_BLOCK
    words, out = chacha20.keystream(bytes(32), bytes(12), 0, blocks), np.empty((blocks, 8), np.float32)
    parts: dict[str, Callable[[], object]] = {
        "key stream": lambda: chacha20.keystream(bytes(32), bytes(12), 0, blocks),
        "bits to normal numbers": lambda: chacha20.box_muller(words, out),
    }
    repeats = max(1, entries // count)

    def repeated(part: Callable[[], object]) -> None:
        for _ in range(repeats):
            part()

    return {
        name: 1e9 * least(lambda part=part: repeated(part), rounds) / (repeats * count)  # type: ignore[misc]
        for name, part in parts.items()
    }


def correlated(entries: int, bands: int, steps: int, memory: str, level: str, strategy: str | None) -> float:
    """Return the nanoseconds per entry of the last step."""
    noise = BandedNoise(bands, "geometric", ratio=RATIO) if strategy == "geometric" else BandedNoise(bands)
    stream = stream_of(noise, NoiseSource(randomness=level), steps, memory)
    total = torch.zeros(entries)
    first = steps - 1 if memory == "regenerated" else 0
    took = 0.0
    for step in range(first, steps):
        began = time.process_time()
        stream.begin(step)
        stream.add_share_("w", total, 1.0, 0, 1)
        took = time.process_time() - began
    return 1e9 * took / entries


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=float, default=4e6)
    parser.add_argument("--bands", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="T")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the numbers to this file")
    given = parser.parse_args(arguments)
    entries = int(given.entries)
    torch.set_num_threads(1)
    results: dict[str, float] = {}
    for level in RANDOMNESS:
        total, source = torch.zeros(entries), NoiseSource(randomness=level)
        results[level] = 1e9 * least(lambda t=total, s=source: s.add_(t, 1.0), given.rounds) / entries  # type: ignore[misc]
    results |= {f"chacha20: {name}": value for name, value in parts_of_chacha20(entries, given.rounds).items()}
    for strategy in ("general", "geometric"):
        for memory in ("stored", "regenerated"):
            name = f"{given.bands} bands, {strategy}, {memory}, step {given.steps}"
            results[name] = correlated(entries, given.bands, given.steps, memory, "os", strategy)
    for name, value in results.items():
        print(f"{name:<60} {value:9.1f} ns per entry")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"entries": entries, "bands": given.bands, "steps": given.steps, **results}, file, indent=2)


if __name__ == "__main__":
    main()
