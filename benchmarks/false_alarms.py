"""Measure how often the audit accuses a sound run.

    python benchmarks/false_alarms.py --runs 200

Simulates sound runs: per canary a fair coin, and over T steps Poisson sampling at rate q and Gaussian noise σ, the
score being the likelihood ratio of the releases, the best possible score. Each run is judged as by `dpllm audit`,
at 95 %, by one run and by independent runs. A sound audit gives FAIL in at most 5 % of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats

from dpllm.audit.result import judge
from dpllm.mechanism.events import Step

DELTA = 1e-5
console = Console()


class Setting(NamedTuple):
    """A mechanism, and the number of its canaries."""

    name: str
    sampling_rate: float
    num_steps: int
    noise_multiplier: float
    num_canaries: int
    independent_runs: bool


SETTINGS = (
    Setting("full batch, one run", 1.0, 1, 1.0, 1000, False),
    Setting("sampled, one run", 0.1, 20, 0.8, 1000, False),
    Setting("full batch, independent runs", 1.0, 1, 1.0, 1000, True),
    Setting("sampled, independent runs", 0.1, 20, 0.8, 1000, True),
)


def simulate(setting: Setting, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and coins of one sound run."""
    q, sigma = setting.sampling_rate, setting.noise_multiplier
    coins = rng.random(setting.num_canaries) < 0.5
    shape = (setting.num_canaries, setting.num_steps)
    released = sigma * rng.standard_normal(shape) + (coins[:, None] & (rng.random(shape) < q))
    with np.errstate(divide="ignore"):
        absent = np.log1p(-q) if q < 1 else -np.inf
    return np.logaddexp(absent, np.log(q) + (released - 0.5) / sigma**2).sum(1), coins


def share_of_alarms(setting: Setting, runs: int, seed: int) -> dict[str, float]:
    """Judge this many sound runs, and return the highest bound over the claimed ε."""
    rng = np.random.default_rng([seed, SETTINGS.index(setting)])
    step = Step(sampling_rate=setting.sampling_rate, noise_multiplier=setting.noise_multiplier)
    alarms, nearest = 0, 0.0
    for _ in track(range(runs), setting.name, console=console, transient=True):
        scores, coins = simulate(setting, rng)
        result = judge(
            {"likelihood ratio": scores},
            coins,
            delta=DELTA,
            history=[(step, setting.num_steps)],
            canary_kind="simulated",
            independent_runs=setting.independent_runs,
        )
        alarms += result.failed
        assert result.claimed_epsilon is not None
        nearest = max(nearest, result.epsilon_lower / result.claimed_epsilon)
    most = float(stats.beta.ppf(0.95, alarms + 1, runs - alarms)) if alarms < runs else 1.0
    share = alarms / runs
    return {"runs": runs, "alarms": alarms, "share": share, "at_most": most, "highest_bound_over_claim": nearest}


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print a table, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="sound runs of each setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args(arguments)
    table = Table("sound runs", "runs", "FAIL", "share", "at most (95 %)", "highest bound / claimed ε", box=None)
    found = {}
    for setting in SETTINGS:
        row = found[setting.name] = share_of_alarms(setting, options.runs, options.seed)
        table.add_row(
            setting.name,
            f"{row['runs']}",
            f"{row['alarms']}",
            f"{row['share']:.3f}",
            f"{row['at_most']:.3f}",
            f"{row['highest_bound_over_claim']:.3f}",
        )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
