"""The plan: every number the guarantee rests on, fixed before the run.

Place in the flow: made from the privacy configuration, the public number of units and the number of steps. The
sampler, the noise and the privacy event all come from it and from nothing else, so they can't drift apart. Microbatch
size, number of machines, engine and precision are not in it: they can't change ε.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dpllm.accounting import Step, calibrate_noise_multiplier, choose_max_batch_size, epsilon
from dpllm.config import ADJACENCIES, UNITS, PrivacyConfig
from dpllm.sampling import TruncatedPoissonSampler

PLAN_FILE = "privacy_plan.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """The constants of a private run. All of them are public.

    Made by `make_plan`; `load` reads one back.

    Raises:
        ValueError: the numbers contradict each other.
    """

    unit: str
    """"sequence" or "user"."""
    adjacency: str
    """Adjacency of the headline ε, "zero-out" or "replace-one"."""
    num_units: int
    """N."""
    sampling_rate: float
    """q = b / N."""
    expected_batch_size: int
    """b, which the noisy sum is divided by."""
    max_batch_size: int
    """B_max."""
    num_steps: int
    """T."""
    noise_multiplier: float
    """σ, without unit."""
    clip_norm: float
    """C, in units of the gradient."""
    delta: float
    """δ."""
    target_epsilon: float | None = None
    """The ε that σ was calibrated to; None when σ was given."""
    max_rows_per_unit: int | None = None
    """Rows of one user that may be used; None at sequence level."""
    unit_column: str | None = None
    """The column of the user's id; None at sequence level."""
    seeded: bool = False
    """Whether sampling and noise come from a fixed seed; then nothing is private."""

    def __post_init__(self) -> None:
        """Check that the numbers fit together."""
        checks = {
            "num_units >= 1": self.num_units >= 1,
            "num_steps >= 1": self.num_steps >= 1,
            "1 <= expected_batch_size <= num_units": 1 <= self.expected_batch_size <= self.num_units,
            "expected_batch_size <= max_batch_size <= num_units": (
                self.expected_batch_size <= self.max_batch_size <= self.num_units
            ),
            "sampling_rate = expected_batch_size / num_units": (
                self.num_units >= 1 and self.sampling_rate == self.expected_batch_size / self.num_units
            ),
            "0 <= noise_multiplier < inf": 0 <= self.noise_multiplier < math.inf,
            "0 < clip_norm < inf": 0 < self.clip_norm < math.inf,
            "0 < delta < 1/num_units": self.num_units >= 1 and self.delta > 0 and self.delta * self.num_units < 1,
            f"unit in {UNITS}": self.unit in UNITS,
            f"adjacency in {ADJACENCIES}": self.adjacency in ADJACENCIES,
        }
        broken = [rule for rule, holds in checks.items() if not holds]
        if broken:
            raise ValueError(f"a privacy plan needs {'; '.join(broken)}. Make the plan with make_plan")

    @property
    def noise_stddev(self) -> float:
        """σC: standard deviation of the noise in every entry of the summed gradient."""
        return self.noise_multiplier * self.clip_norm

    @property
    def sampler(self) -> TruncatedPoissonSampler:
        """The sampler that every step of the run must use."""
        return TruncatedPoissonSampler(self.num_units, self.sampling_rate, self.max_batch_size)

    @property
    def step(self) -> Step:
        """What is charged for one step."""
        return Step(self.num_units, self.sampling_rate, self.max_batch_size, self.noise_multiplier, self.clip_norm)

    @cached_property
    def epsilon(self) -> float:
        """ε of all planned steps under the plan's adjacency; inf without noise."""
        return self.epsilon_under(self.adjacency)

    def epsilon_under(self, adjacency: str) -> float:
        """Return ε of all planned steps under "zero-out" or "replace-one"."""
        return epsilon([(self.step, self.num_steps)], self.delta, adjacency)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the plan's fields, in hexadecimal; equal exactly for equal plans."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the plan and its hash as JSON."""
        text = json.dumps({**self.to_dict(), "hash": self.hash}, indent=2, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PrivacyPlan:
        """Read a plan that `save` wrote.

        Raises:
            ValueError: the file is missing, is no plan, or was edited.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} can't be read ({error.strerror})") from error
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error})") from error
        names = {item.name for item in dataclasses.fields(cls)}
        if not isinstance(raw, dict) or set(raw) != names | {"format", "hash"} or raw["format"] != _FORMAT:
            raise ValueError(f"{path} is not a privacy plan of format {_FORMAT}")
        plan = cls(**{name: raw[name] for name in names})
        if plan.hash != raw["hash"]:
            raise ValueError(f"{path} was edited: its numbers don't match its hash. Restore it, or make a new plan")
        return plan


def make_plan(privacy: PrivacyConfig, num_units: int, num_steps: int) -> PrivacyPlan:
    """Fix the numbers of a run: q, δ, B_max, and σ, calibrated when a target ε is given.

    Args:
        privacy: the configuration.
        num_units: N, the units of the training data. Public from here on.
        num_steps: T, the steps to take.

    Returns:
        The plan. With a target, ``plan.epsilon <= privacy.target_epsilon``.

    Raises:
        ValueError: the data set is empty or smaller than a batch, δ is too large, there is no step to take, or the
            target can't be reached.

    >>> privacy = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=20)
    >>> make_plan(privacy, num_units=1000, num_steps=50).delta
    0.0001
    """
    if num_units < 1:
        raise ValueError("the training data is an empty data set: there is no unit to train on")
    if num_steps < 1:
        raise ValueError(
            f"num_steps must be at least 1, got {num_steps}; set train.max_steps or train.num_train_epochs"
        )
    size = privacy.expected_batch_size
    if size > num_units:
        raise ValueError(
            f"expected_batch_size={size} exceeds the number of units, {num_units}: a unit enters a step at most once. "
            f"Take {num_units} or fewer"
        )
    delta = privacy.delta if privacy.delta is not None else 1 / (10 * num_units)
    if delta * num_units >= 1:
        raise ValueError(
            f"delta={delta:g} is not below 1/N = {1 / num_units:.3g} for N={num_units} units: publishing one unit "
            f"outright would satisfy it. Take 1/(10 N) = {1 / (10 * num_units):.3g}, or leave delta out"
        )
    rate = size / num_units
    noise_multiplier, max_batch_size = _noise_and_bound(privacy, rate, num_units, num_steps, delta)
    return PrivacyPlan(
        unit=privacy.unit,
        adjacency=privacy.adjacency,
        num_units=num_units,
        sampling_rate=rate,
        expected_batch_size=size,
        max_batch_size=max_batch_size,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        clip_norm=privacy.clip_norm,
        delta=delta,
        target_epsilon=privacy.target_epsilon,
        max_rows_per_unit=privacy.max_rows_per_unit,
        unit_column=privacy.unit_column,
        seeded=privacy.seed is not None,
    )


def _noise_and_bound(
    privacy: PrivacyConfig, rate: float, num_units: int, num_steps: int, delta: float
) -> tuple[float, int]:
    """Return σ and B_max. When neither is given, B_max is chosen at the σ that would do without truncation."""
    noise_multiplier = privacy.noise_multiplier
    max_batch_size = privacy.max_batch_size
    if max_batch_size is not None:
        max_batch_size = min(max_batch_size, num_units)
    else:
        tentative = noise_multiplier
        if tentative is None:
            assert privacy.target_epsilon is not None  # the configuration holds exactly one of the two
            tentative = calibrate_noise_multiplier(
                privacy.target_epsilon, delta, rate, num_steps, adjacency=privacy.adjacency
            )
        max_batch_size = choose_max_batch_size(
            privacy.expected_batch_size, num_units, num_steps, tentative, delta, privacy.adjacency
        )
    if noise_multiplier is None:
        assert privacy.target_epsilon is not None
        noise_multiplier = calibrate_noise_multiplier(
            privacy.target_epsilon, delta, rate, num_steps, num_units, max_batch_size, privacy.adjacency
        )
    return noise_multiplier, max_batch_size


def format_plan(plan: PrivacyPlan) -> list[tuple[str, str]]:
    """Return the plan as (name, value) rows for people."""
    rows = [
        ("unit of privacy", plan.unit if plan.unit == "sequence" else f"user (column {plan.unit_column})"),
        ("units N", f"{plan.num_units:,}"),
        ("sampling rate q", f"{plan.sampling_rate:.6g}"),
        ("units per step: expected b, at most", f"{plan.expected_batch_size:,}, {plan.max_batch_size:,}"),
        ("steps T", f"{plan.num_steps:,}"),
        ("noise multiplier σ", f"{plan.noise_multiplier:.6g}"),
        ("clip norm C", f"{plan.clip_norm:g}"),
        ("noise standard deviation σC", f"{plan.noise_stddev:.6g}"),
        ("δ", f"{plan.delta:.3g}"),
        ("ε, zero-out", format_epsilon(plan.epsilon_under("zero-out"))),
        ("ε, replace-one", format_epsilon(plan.epsilon_under("replace-one"))),
        ("adjacency of the headline", plan.adjacency),
    ]
    if plan.max_rows_per_unit is not None:
        rows.insert(1, ("rows of one user at most", str(plan.max_rows_per_unit)))
    if plan.seeded:
        rows.insert(0, ("NOT PRIVATE", "a fixed seed makes sampling and noise predictable"))
    return rows


def format_epsilon(value: float) -> str:
    """Return ε for people, rounded up so that what is printed holds; without noise it says so.

    >>> format_epsilon(7.99991), format_epsilon(math.inf)
    ('8.0000', 'infinite: no privacy')
    """
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}" if math.isfinite(value) else "infinite: no privacy"
