"""Choose batch size and number of steps: compare many ways to spend one privacy budget before paying for a run.

Place in the flow: beside the plan, before a run. `dpllm.privacy.calibration` finds σ at every point of a grid, and one
point is recommended. Nothing is trained, and no private data are read. `dpllm.planning.sweep_text` puts the result into
words, `dpllm.planning.sweep_figure` draws it.

Terms. b units are expected in a step, T steps are taken, σ keeps the run within the budget (ε, δ), C is the clip norm.

* *Noise-to-batch ratio* σ/b: standard deviation of the noise in every entry of the averaged gradient, over C. The
  quality of private training depends on σ/b and on T, and hardly on b and σ separately ("Scaling Laws for
  Differentially Private Language Models", arXiv:2501.18914, used to set up VaultGemma, arXiv:2510.15001).
* *Cumulative signal-to-noise ratio* √T b/σ: the sum of T averaged gradients has T times the signal of one and √T times
  its noise. Its unit is (signal per step)/C, which is assumed to be the same at all points.
* *Full batch* N μ: the ratio of b = N for any T, since σ is √T/μ there; μ is the distance of two unit normals that are
  (ε, δ) apart (analytic Gaussian mechanism, arXiv:1805.06530). Under replace-one adjacency, where a unit moves the sum
  twice as far, it is N μ/2.

Derived. On a line of equal compute K = b T the ratio is √(K b)/σ. In the limit of many steps at a small sampling rate
q = b/N the run is as private as normals μ = q √T √(exp(1/σ²) - 1) apart (arXiv:1911.11607, zero-out). Without T:

    (√T b/σ) / (N μ) = 1 / √(σ² (exp(1/σ²) - 1)),      d log(√T b/σ) / d log b = (1 - σ² (1 - exp(-1/σ²))) / 2.

So the share of the full batch's ratio depends only on σ. If σ is small, twice the batch and half the steps need hardly
more noise, and the ratio grows like √b. If σ is large, σ itself grows like √b, and the ratio does not grow. The
share is 90 % at σ = 1.57. `limit_share` is the first formula. The numbers of a sweep come from the accountant, not from
this formula: the limit is not a bound, and it is inaccurate when few steps see a unit.

The rule. Points of one compute are nearly the best if their √(T / ((σ/b)² + r²)) is within 10 % of the best. Of these,
the point with the smallest batch, which takes the most steps, is recommended. r is the root mean square of the entries
of the averaged clipped gradient over C; the noise in an entry is compared with it. With r = 0, noise exceeds the signal
of every step, and the rule compares √T b/σ. With r > 0, T noisy steps are worth T / (1 + (σ/b)²/r²) noiseless steps:
if all directions have the same curvature, the gain of the best step along a noisy gradient is that of the noiseless one
divided by 1 + (noise power)/(signal power) (arXiv:1812.06162, section 2.2). The bound of SGD on convex losses,
proportional to √((signal power + noise power)/T), orders points in the same way. The two papers on private training
report that, for a given compute, larger batches pay more than more steps. This rule decides how large, under the
assumptions in `Sweep.assumptions`. It is not a fitted law.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.calibration import least_noise, require_target
from dpllm.privacy.gaussian import gaussian_distance
from dpllm.privacy.rounding import format_delta, format_delta_limit

NEARLY_BEST = 0.9
"""Share of a compute line's best cumulative signal-to-noise ratio that counts as nearly the best."""

TOLERANCE = 0.01
"""ε of a point is at most this share below the target."""

_SAME_COMPUTE = 0.05
_ADJACENCIES = {"zero-out": 1.0, "replace-one": 2.0}  # largest change of the sum by one unit, in clip norms


class Point(Protocol):
    """One way to spend a budget, as far as the rule looks at it."""

    @property
    def expected_batch_size(self) -> int:
        """B."""
        ...

    @property
    def num_steps(self) -> int:
        """T."""
        ...

    @property
    def tensors_kept(self) -> int:
        """How many tensors of the gradient's size are kept between two steps."""
        ...

    @property
    def recommended(self) -> bool:
        """Whether the rule takes it."""
        ...

    def noise_over_signal(self, gradient_rms: float) -> float:
        """Return noise over signal in the released weights, up to a factor that all points share; inf without σ."""
        ...


P = TypeVar("P", bound=Point)


def recommend(points: Iterable[P], min_steps: int = 1, gradient_rms: float = 0.0) -> P:
    """Return the point of the smallest batch within 10 % of the least noise; of several, the least memory.

    Args:
        points: points of one compute.
        min_steps: points with fewer steps are left out.
        gradient_rms: r.

    Raises:
        ValueError: no point has a σ and enough steps.
    """
    usable = _usable(points, min_steps)
    if not usable:
        raise ValueError(
            f"no point of this compute both reaches the target and takes at least min_steps={min_steps} steps. "
            "Add smaller batches to the grid, raise the compute, or lower min_steps"
        )
    enough = min(point.noise_over_signal(gradient_rms) for point in usable) / NEARLY_BEST
    nearly_best = [point for point in usable if point.noise_over_signal(gradient_rms) <= enough]
    return min(nearly_best, key=lambda point: (point.expected_batch_size, point.tensors_kept))


def _usable(points: Iterable[P], min_steps: int) -> list[P]:
    return [point for point in points if point.num_steps >= min_steps and point.noise_over_signal(0.0) < math.inf]


@dataclass(frozen=True)
class Noise:
    """σ and its ε, or the reason why there is none."""

    sigma: float | None
    epsilon: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Budget:
    """The ε and δ that a run may cost, and the number of its units.

    Raises:
        ValueError: a number is out of range.
    """

    target: float
    """The ε that the whole run may cost."""
    delta: float
    num_units: int
    adjacency: str

    def __post_init__(self) -> None:
        """Check every value."""
        check_counts(None, "num_units", [self.num_units])
        require_target(self.target)
        if not 0 < self.delta * self.num_units < 1:
            raise ValueError(
                f"delta must be above 0 and below 1/N = {format_delta_limit(1 / self.num_units)} for "
                f"N={self.num_units} units, got {format_delta(self.delta)}. Take "
                f"1/(10 N) = {format_delta_limit(1 / (10 * self.num_units))}"
            )
        if self.adjacency not in _ADJACENCIES:
            raise ValueError(f"adjacency must be one of {', '.join(_ADJACENCIES)}, got {self.adjacency!r}")

    def least_noise(self, batch_size: int, num_steps: int, exact: bool = False) -> Noise:
        """Return the least σ of a point without truncation; with a reason instead if none is found.

        Args:
            batch_size: b.
            num_steps: T.
            exact: calibrate as for a plan. Otherwise that is only done where a coarse grid of losses, which takes a
                tenth of the time, leaves more than `TOLERANCE` of the target unused.
        """

        def history(sigma: float) -> list[tuple[Step, int]]:
            return [(Step(sampling_rate=batch_size / self.num_units, noise_multiplier=sigma), num_steps)]

        def found(exact: bool) -> Noise:
            sigma = least_noise(self.target, self.delta, history, self.adjacency, exact=exact)
            return Noise(sigma, math.inf if sigma == math.inf else epsilon(history(sigma), self.delta, self.adjacency))

        try:
            noise = found(exact)
            used = noise.epsilon if noise.epsilon is not None else math.inf
            return noise if exact or self.target * (1 - TOLERANCE) <= used <= self.target else found(exact=True)
        except ValueError as error:
            return Noise(None, None, str(error))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The compute cost of a unit. Every field is optional; figures that cannot be computed are then None.

    Raises:
        ValueError: a number is not positive, or the numbers do not belong together.
    """

    tokens_per_unit: float | None = None
    """Tokens of a unit, padding included: the mean or the maximum."""
    tokens_per_second: float | None = None
    """Measured throughput of all GPUs together."""
    flops_per_token: float | None = None
    """For an estimate without measurement; 6 per parameter for forward and backward of a full fine-tuning."""
    peak_flops: float | None = None
    """Peak floating-point operations per second of one GPU."""
    utilization: float | None = None
    """Share of `peak_flops` that training reaches, above 0 and at most 1."""
    gpus: int = 1

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        if self.utilization is not None and self.utilization > 1:
            raise ValueError(f"utilization is a share of peak_flops and at most 1, got {self.utilization}")
        estimate = (self.flops_per_token, self.peak_flops, self.utilization)
        if any(value is not None for value in estimate):
            if any(value is None for value in estimate):
                raise ValueError(
                    "an estimate of time needs flops_per_token, peak_flops and utilization: give all three"
                )
            if self.tokens_per_second is not None:
                raise ValueError("tokens_per_second is measured and flops_per_token estimates it: give one of the two")
        if self.tokens_per_unit is None and (self.tokens_per_second or self.flops_per_token):
            raise ValueError("the time of a run needs tokens_per_unit: give the tokens of a unit")

    def tokens(self, examples: float) -> float | None:
        """Return the tokens of this many units."""
        return None if self.tokens_per_unit is None else examples * self.tokens_per_unit

    def seconds(self, examples: float) -> float | None:
        """Return the time for this many units, in seconds.

        >>> Cost(tokens_per_unit=1000, flops_per_token=6e9, peak_flops=1e15, utilization=0.6, gpus=8).seconds(1e6)
        1250.0
        """
        tokens, rate = self.tokens(examples), self.tokens_per_second
        if self.flops_per_token is not None and self.peak_flops is not None and self.utilization is not None:
            rate = self.gpus * self.peak_flops * self.utilization / self.flops_per_token
        return None if tokens is None or rate is None else tokens / rate


@dataclass(frozen=True, kw_only=True)
class PointNoise:
    """The noise that keeps a point within the budget, and the signal that it leaves."""

    noise_multiplier: float
    """σ, the smallest one found whose ε is within the target."""
    noise_to_batch_ratio: float
    """σ/b, in units of the clip norm."""
    signal_to_noise: float
    """√T b/σ, in units of (mean clipped gradient)/(clip norm)."""
    share_of_full_batch: float
    """`signal_to_noise` over that of full batches."""
    effective_steps: float | None
    """T / (1 + (σ/b)²/r²), the equivalent number of steps without noise; None if r is unknown."""
    epsilon: float
    """ε with this σ, an upper bound; at most the target."""


@dataclass(frozen=True, kw_only=True)
class PointCompute:
    """The compute of a point, which does not depend on its noise."""

    examples: int
    """b T, units expected in all steps together."""
    epochs: float
    """b T/N."""
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One way to spend the budget."""

    expected_batch_size: int
    """b."""
    num_steps: int
    """T."""
    sampling_rate: float
    """q = b/N."""
    noise: PointNoise | None
    """None if no σ reaches the target."""
    compute: PointCompute
    on_line: bool = False
    """Whether it has the compute of the recommendation."""
    recommended: bool = False
    reason: str | None = None
    """Why there is no σ; None if there is one."""
    tensors_kept: ClassVar[int] = 0

    def noise_over_signal(self, gradient_rms: float) -> float:
        """Return √(((σ/b)² + r²) / T), or inf without a σ."""
        ratio = math.inf if self.noise is None else self.noise.noise_to_batch_ratio
        return math.hypot(ratio, gradient_rms) / math.sqrt(self.num_steps)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the figures of noise and compute beside the others."""
        own = dataclasses.asdict(self)
        noise = own["noise"] or dict.fromkeys(field.name for field in dataclasses.fields(PointNoise))
        size = {name: own[name] for name in ("expected_batch_size", "num_steps", "sampling_rate")}
        marks = {name: own[name] for name in ("on_line", "recommended", "reason")}
        return {**size, **noise, **own["compute"], **marks}


@dataclass(frozen=True)
class WhatIf:
    """The effect of a change of the recommended point on the noise of a step."""

    change: str
    noise_to_batch_ratio: float | None
    """None if the change is impossible."""
    factor: float | None
    """The ratio after the change divided by the ratio before."""


@dataclass(frozen=True, kw_only=True)
class Spending(Generic[P]):
    """Points of one privacy budget, one of which is recommended."""

    target_epsilon: float
    delta: float
    num_units: int
    adjacency: str
    compute: int
    """K, the expected units (b T) that the recommendation may use."""
    points: tuple[P, ...]

    @property
    def recommended(self) -> P:
        """The recommended point."""
        return next(point for point in self.points if point.recommended)


@dataclass(frozen=True, kw_only=True)
class Sweep(Spending[SweepPoint]):
    """A grid of points with independent noise, by batch size and steps. Made by `sweep`.

    It has the points of the line of compute K that are not in the grid as well.
    """

    compute_name: str
    """Source of K."""
    gradient_rms: float
    """r; 0 when unknown."""
    full_batch_signal_to_noise: float
    """N μ, or N μ/2 under replace-one."""
    reason: str
    """Reason for the recommended point, in words."""
    assumptions: tuple[str, ...]
    what_if: tuple[WhatIf, ...]

    @property
    def line(self) -> tuple[SweepPoint, ...]:
        """The points from which the recommended one was chosen, by batch size."""
        return tuple(point for point in self.points if point.on_line)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can hold."""
        values = dataclasses.asdict(self)
        for name in ("what_if", "assumptions"):
            values[name] = list(values[name])
        values["points"] = [point.to_dict() for point in self.points]
        return {**values, "recommended": self.recommended.to_dict()}


def default_grid(expected_batch_size: int, num_steps: int, num_units: int) -> tuple[list[int], list[int]]:
    """Return batch sizes and steps around a recipe's: 1/4, 1/2, 1, 2 and 4 times each, b at most N.

    Raises:
        ValueError: a number is not a positive integer, or b exceeds N.

    >>> default_grid(2048, 36, num_units=5000)
    ([512, 1024, 2048, 4096], [9, 18, 36, 72, 144])
    """
    check_counts(num_units, "expected_batch_size", [expected_batch_size])
    check_counts(None, "num_steps", [num_steps])
    batches = {*(max(1, expected_batch_size // part) for part in (4, 2)), *(expected_batch_size * n for n in (1, 2, 4))}
    steps = {*(max(1, num_steps // part) for part in (4, 2)), *(num_steps * n for n in (1, 2, 4))}
    return sorted(b for b in batches if b <= num_units), sorted(steps)


def sweep(
    *,
    target_epsilon: float,
    delta: float,
    num_units: int,
    expected_batch_sizes: Sequence[int],
    step_counts: Sequence[int],
    adjacency: str = "zero-out",
    compute: str | int = "centre",
    min_steps: int = 1,
    gradient_rms: float = 0.0,
    cost: Cost | None = None,
) -> Sweep:
    """Calibrate σ over a grid of batch sizes and steps, and recommend a point.

    Guarantee: `accounting.epsilon` of every point with its σ, without truncation, is at most the target. At most 1 % of
    the target is left, at the recommended point less than 0.1 %.

    Args:
        target_epsilon: the ε that a run may cost.
        delta: δ, below 1/N.
        num_units: N, public.
        expected_batch_sizes: values of b, at most N each.
        step_counts: values of T.
        adjacency: "zero-out" or "replace-one".
        compute: K = b T of the recommendation: "centre" of the grid, "max" for the grid's largest, or a number of
            examples. For each batch size the line has T = K/b, or a T of the grid that is within 5 % of it.
        min_steps: the smallest number of steps that the optimizer needs; points with fewer are not recommended.
        gradient_rms: r, ‖mean clipped gradient‖ / (C √parameters), measured on public data; 0 when unknown.
        cost: compute cost of a unit, for tokens and time.

    Raises:
        ValueError: a number is out of range, a grid is empty, or no point can be recommended.

    >>> result = sweep(target_epsilon=8.0, delta=1e-6, num_units=42_000, expected_batch_sizes=[512, 1024, 2048],
    ...                step_counts=[100, 200, 400])
    >>> result.recommended.expected_batch_size, result.recommended.num_steps
    (2048, 100)
    """
    batches, steps = sorted(set(expected_batch_sizes)), sorted(set(step_counts))
    budget = Budget(target_epsilon, delta, num_units, adjacency)
    check_counts(num_units, "expected_batch_size", batches)
    check_counts(None, "num_steps", steps)
    _check_rule(min_steps, gradient_rms)
    cost = cost or Cost()
    examples, compute_name = _compute(compute, batches, steps)
    line = _line(examples, batches, steps)
    full_batch = num_units * gaussian_distance(target_epsilon, delta) / _ADJACENCIES[adjacency]
    sizes = sorted({(b, t) for b in batches for t in steps} | set(line))
    found = {at: budget.least_noise(*at) for at in sizes}

    def point(b: int, t: int) -> SweepPoint:
        noise = found[b, t]
        return _point(budget, b, t, noise, full_batch, gradient_rms, cost, (b, t) in line)

    points = {size: point(*size) for size in sizes}
    _check_reachable(list(points.values()))
    chosen = recommend([points[at] for at in line], min_steps, gradient_rms)
    size = (chosen.expected_batch_size, chosen.num_steps)
    what_if = _what_if(budget, *size, found[size])
    found[size] = min(found[size], budget.least_noise(*size, exact=True), key=lambda noise: noise.sigma or math.inf)
    points[size] = dataclasses.replace(point(*size), recommended=True)
    reason = _reason([points[at] for at in line], points[size], gradient_rms, (examples, compute_name, min_steps))
    return Sweep(
        target_epsilon=target_epsilon,
        delta=delta,
        num_units=num_units,
        adjacency=adjacency,
        compute=examples,
        compute_name=compute_name,
        gradient_rms=gradient_rms,
        full_batch_signal_to_noise=full_batch,
        points=tuple(points.values()),
        reason=reason,
        assumptions=_assumptions(points[size], gradient_rms, cost),
        what_if=what_if,
    )


def equal_compute(points: Iterable[SweepPoint]) -> list[tuple[SweepPoint, ...]]:
    """Return the points that have a σ in groups of equal b T (within 5 %), by compute, each group by batch size."""
    groups: list[list[SweepPoint]] = []
    for point in sorted(points, key=lambda item: item.compute.examples):
        if point.noise is None:
            continue
        if groups and point.compute.examples <= (1 + _SAME_COMPUTE) * groups[-1][0].compute.examples:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [tuple(sorted(group, key=lambda item: item.expected_batch_size)) for group in groups]


def _check_reachable(points: Sequence[SweepPoint]) -> None:
    if all(point.noise is None for point in points):
        raise ValueError(f"no point of the grid reaches the target: {points[0].reason}")


def _check_rule(min_steps: int, gradient_rms: float) -> None:
    check_counts(None, "min_steps", [min_steps])
    if not 0 <= gradient_rms < math.inf:
        raise ValueError(f"gradient_rms must be at least 0 and finite, got {gradient_rms}")


def check_counts(num_units: int | None, name: str, values: Sequence[int]) -> None:
    """Refuse numbers of a grid that are no whole numbers from 1 on, or above N.

    Raises:
        ValueError: with the name of the option.
    """
    if not values:
        raise ValueError(f"the grid has no {name}: give at least one")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if num_units is not None and value > num_units:
            raise ValueError(
                f"{name}={value} exceeds the number of units, {num_units}: a unit enters a step at most once. "
                f"Take {num_units} or fewer"
            )


def _compute(compute: str | int, batches: Sequence[int], steps: Sequence[int]) -> tuple[int, str]:
    if compute == "centre":
        return batches[(len(batches) - 1) // 2] * steps[(len(steps) - 1) // 2], "that of the grid's centre"
    if compute == "max":
        return batches[-1] * steps[-1], "the largest of the grid"
    if not isinstance(compute, int) or isinstance(compute, bool) or compute < 1:
        raise ValueError(f'compute must be "centre", "max" or a positive number of examples, got {compute!r}')
    return compute, "the requested one"


def _line(examples: int, batches: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return (b, T) of the given compute, with a T of the grid if one nearly fits."""
    line = []
    for b in batches:
        nearest = min(steps, key=lambda t: abs(math.log(b * t / examples)))
        t = nearest if abs(b * nearest / examples - 1) <= _SAME_COMPUTE else examples // b
        if t >= 1:
            line.append((b, t))
    if not line:
        raise ValueError(f"{examples} examples are less than one step of the smallest batch, {batches[0]}. Raise it")
    return line


def _point(
    budget: Budget, b: int, t: int, noise: Noise, full_batch: float, gradient_rms: float, cost: Cost, on_line: bool
) -> SweepPoint:
    found = None
    if noise.sigma is not None and noise.epsilon is not None:
        ratio = noise.sigma / b
        signal = math.sqrt(t) / ratio
        found = PointNoise(
            noise_multiplier=noise.sigma,
            noise_to_batch_ratio=ratio,
            signal_to_noise=signal,
            share_of_full_batch=signal / full_batch,
            effective_steps=t / (1 + (ratio / gradient_rms) ** 2) if gradient_rms > 0 else None,
            epsilon=noise.epsilon,
        )
    return SweepPoint(
        expected_batch_size=b,
        num_steps=t,
        sampling_rate=b / budget.num_units,
        noise=found,
        compute=PointCompute(
            examples=b * t, epochs=b * t / budget.num_units, tokens=cost.tokens(b * t), seconds=cost.seconds(b * t)
        ),
        on_line=on_line,
        reason=noise.reason,
    )


def _what_if(budget: Budget, b: int, t: int, now: Noise) -> tuple[WhatIf, ...]:
    """Return the effect of twice the batch, twice the budget and twice the data on the noise of a step."""
    assert now.sigma is not None
    changes = (
        ("twice the batch, the same steps (twice the compute)", budget, 2 * b),
        ("twice the budget ε", dataclasses.replace(budget, target=2 * budget.target), b),
        (
            "twice the units N, the same batch and δ",
            dataclasses.replace(budget, num_units=2 * budget.num_units),
            b,
        ),
    )
    results = []
    for name, changed, batch in changes:
        sigma = changed.least_noise(batch, t).sigma if batch <= changed.num_units else None
        factor = None if sigma is None else sigma / batch / (now.sigma / b)
        results.append(WhatIf(name, None if sigma is None else sigma / batch, factor))
    return tuple(results)


def _reason(line: Sequence[SweepPoint], chosen: SweepPoint, gradient_rms: float, asked: tuple[int, str, int]) -> str:
    examples, compute_name, min_steps = asked
    usable = _usable(line, min_steps)
    best = min(usable, key=lambda point: point.noise_over_signal(gradient_rms))
    share = best.noise_over_signal(gradient_rms) / chosen.noise_over_signal(gradient_rms)
    measure = "√(effective steps)" if gradient_rms else "cumulative signal-to-noise ratio"
    least = f"; at least {min_steps:,} steps" if min_steps > 1 else ""
    words = [f"The compute is {compute_name}: {examples:,} examples, split in {len(usable)} ways{least}."]
    if len(usable) == 1:
        words.append("No other point is within the budget and the requested limits.")
        return " ".join(words)
    if chosen is best:
        words.append(f"This one has the highest {measure}, and no smaller batch comes within 10 % of it.")
    else:
        words.append(
            f"This one has {share:.0%} of the highest {measure} (that of batches of {best.expected_batch_size:,}) and "
            f"takes {chosen.num_steps / best.num_steps:.3g} times as many steps."
        )
    if chosen.expected_batch_size == usable[-1].expected_batch_size:
        words.append(
            "It has the largest batch of them, so larger ones may do better, if the model can be trained in fewer than "
            f"{chosen.num_steps:,} steps."
        )
    elif chosen is usable[0]:
        words.append("It has the smallest batch of them, so smaller ones may be as good.")
    return " ".join(words)


def _assumptions(chosen: SweepPoint, gradient_rms: float, cost: Cost) -> tuple[str, ...]:
    signal = (
        f"The entries of the averaged clipped gradient have a root mean square of {gradient_rms:.3g} clip norms at all "
        "points, and all directions have the same curvature."
        if gradient_rms
        else "Noise exceeds signal in every step, so that steps add up and the optimizer needs few of them. "
        "Very large batches violate this first: the smallest sufficient number of steps (min_steps), or the size of "
        "the gradient (gradient_rms), can be measured on public data and given."
    )
    texts = [
        "Every step brings the same signal for all b and T: the learning rate is tuned again for each point.",
        signal,
        "The noise added for privacy exceeds the sampling noise of the gradient (arXiv:2501.18914 also assumes this).",
        f"Repeated data teach as much as new data: the recommended point takes {chosen.compute.epochs:.3g} epochs.",
        "σ is for plain Poisson sampling. The plan of a run bounds the batch (B_max) such that this costs less than "
        "1e-3 in ε, and calibrates σ with it.",
        "At the points that are not recommended, up to 1 % of ε is unused, so σ may be slightly larger than needed.",
        "The budget is spent on one run. Tuning on the private data costs more.",
    ]
    if cost.tokens_per_second is not None:
        texts.append("Time is tokens divided by the measured rate, which does not depend on b.")
    elif cost.flops_per_token is not None:
        texts.append(
            f"Time is estimated from {cost.flops_per_token:.3g} FLOPs per token on {cost.gpus} GPUs of "
            f"{cost.peak_flops:.3g} FLOP/s at {cost.utilization:.0%} utilization; nothing was measured."
        )
    return tuple(texts)
