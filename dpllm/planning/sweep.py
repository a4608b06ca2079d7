"""Choose batch size, number of steps and noise: compare many ways to spend one privacy budget before paying for a run.

This happens before a run. `dpllm.privacy.calibration` finds σ at every point of a grid, with independent noise or with
every noise that a recipe allows, and one point is recommended. Nothing is trained, and no private data are read.
`dpllm.planning.sweep_text` formats the result as text, `dpllm.planning.sweep_text` draws it.

Terms. b units are expected in a step, T steps are taken, σ keeps the run within the budget (ε, δ), C is the clip norm.

* *Noise-to-batch ratio* σ/b: standard deviation of the noise in every entry of the averaged gradient, over C. The
  quality of private training depends on σ/b and on T, and hardly on b and σ separately ("Scaling Laws for
  Differentially Private Language Models", arXiv:2501.18914, used to set up VaultGemma, arXiv:2510.15001).
* *Predicted noise* (σ/b) ‖wᵀM⁻¹‖ / Σw: the standard deviation of the noise in the released weights over their response
  to a constant gradient of norm C, with the run's response w (`dpllm.mechanism.strategies`) and the noise's
  correlation M. With independent noise and equal steps it is σ / (b √T).
* *Cumulative signal-to-noise ratio* √T b/σ, with independent noise: the sum of T averaged gradients has T times the
  signal of one and √T times its noise. Its unit is (signal per step)/C, which is assumed to be the same at all points.
* *Full batch* N μ: the ratio of b = N for any T, since σ is √T/μ there; μ is the distance of two unit normals that are
  (ε, δ) apart (analytic Gaussian mechanism, arXiv:1805.06530). Under replace-one adjacency, where a unit moves the sum
  twice as far, it is N μ/2.

For independent noise, on a line of equal compute K = b T the ratio is √(K b)/σ. In the limit of many steps at
a small sampling rate q = b/N the run is as private as normals μ = q √T √(exp(1/σ²) - 1) apart (arXiv:1911.11607,
zero-out). Without T:

    (√T b/σ) / (N μ) = 1 / √(σ² (exp(1/σ²) - 1)),      d log(√T b/σ) / d log b = (1 - σ² (1 - exp(-1/σ²))) / 2.

The share of the full batch's ratio therefore depends only on σ. If σ is small, twice the batch and half the steps need
hardly more noise, and the ratio grows like √b. If σ is large, σ itself grows like √b, and the ratio does not grow. The
share is 90 % at σ = 1.57. The numbers of a sweep come from the accountant, not from this formula: the limit is not a
bound, and it is inaccurate when few steps see a unit.

The rule. Points with one compute are nearly the best if the best has at least 90 % of their noise. Of these, the point
with the smallest batch, which takes the most steps, is recommended, and of several the one that stores the fewest
tensors. With r > 0, the noise √(((σ/b)² + r²) / T) is compared, where r is the root mean square of the entries of the
averaged clipped gradient over C: T noisy steps are worth T / (1 + (σ/b)²/r²) noiseless steps. If all directions have
the same curvature, the gain of the best step along a noisy gradient is that of the noiseless one divided by
1 + (noise power)/(signal power) (arXiv:1812.06162, section 2.2). The bound of SGD on convex losses, proportional to
√((signal power + noise power)/T), orders points in the same way. With r = 0, noise exceeds the signal in every step.
The two papers on private training report that, for a given compute, larger batches pay off more than more steps. This
rule decides how large, under the assumptions in `Sweep.assumptions`. It is not a fitted law. With many bands, the noise
hardly depends on the batch, so the rule takes smaller batches and more steps.

Noise in a fixed order (`dpllm.mechanism.blt`) needs no sampling of units. Its points are listed with those of other
correlated noise, for runs whose units cannot be sampled, and recommended only if the recipe has such noise. Its
predicted noise may be the least of all, especially in a single pass. But the one fine-tuning that was measured was
about as good as with 16 bands (`docs/correlated_noise.md`), a resume is charged as a second release of all units, and ε
under replace-one is larger, so the user has to choose it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.catalogue import spec_of
from dpllm.mechanism.events import Event
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Noise
from dpllm.mechanism.strategies import Workload
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.calibration import least_noise, nearly_least, require_target
from dpllm.privacy.risk import gaussian_distance
from dpllm.privacy.rounding import format_delta, format_delta_limit

NEARLY_BEST = 0.9
"""Share of a compute line's best signal-to-noise ratio that counts as nearly the best."""

TOLERANCE = 0.01
"""ε of a point with independent noise is at most this share below the target."""

_SAME_COMPUTE = 0.05
_ADJACENCIES = {"zero-out": 1.0, "replace-one": 2.0}  # largest change of the sum by one unit, in clip norms
_INDEPENDENT = IndependentNoise()


@dataclass(frozen=True)
class NoiseMultiplier:
    """σ and its ε, or the reason why there is none."""

    sigma: float | None
    epsilon: float | None = None
    """An upper bound; None if it was not computed."""
    reason: str | None = None


@dataclass(frozen=True)
class Budget:
    """The ε and δ that a run may cost, and the number of its units.

    Raises:
        ValueError: a number is out of range.
    """

    target_epsilon: float
    """The ε that the whole run may cost."""
    delta: float
    num_units: int
    adjacency: str

    def __post_init__(self) -> None:
        """Check every value."""
        _check_counts(None, "num_units", [self.num_units])
        require_target(self.target_epsilon)
        if not 0 < self.delta * self.num_units < 1:
            raise ValueError(
                f"delta must be above 0 and below 1/N = {format_delta_limit(1 / self.num_units)} for "
                f"N={self.num_units} units, got {format_delta(self.delta)}. Take "
                f"1/(10 N) = {format_delta_limit(1 / (10 * self.num_units))}"
            )
        if self.adjacency not in _ADJACENCIES:
            raise ValueError(f"adjacency must be one of {', '.join(_ADJACENCIES)}, got {self.adjacency!r}")

    @property
    def full_batch_signal_to_noise(self) -> float:
        """N μ, or N μ/2 under replace-one."""
        return self.num_units * gaussian_distance(self.target_epsilon, self.delta) / _ADJACENCIES[self.adjacency]

    def draw(self, batch_size: int) -> Draw:
        """Return the draw of b units of N, without truncation."""
        units = self.num_units
        return Draw(num_units=units, population=units, expected_batch_size=batch_size, max_batch_size=units)

    def least_noise(
        self, batch_size: int, num_steps: int, noise: Noise = _INDEPENDENT, *, exact: bool = False, quick: bool = False
    ) -> NoiseMultiplier:
        """Return the least σ of a point without truncation; with a reason instead if none is found.

        Args:
            batch_size: b.
            num_steps: T.
            noise: the noise with all its numbers.
            exact: calibrate as for a plan. Otherwise this is done only where a coarse grid of losses, which takes a
                tenth of the time, leaves more than `TOLERANCE` of the target unused.
            quick: find σ to about 0.2 % on that grid everywhere, without its ε: enough to compare noises.
        """
        draw = self.draw(batch_size)

        def history(sigma: float) -> list[tuple[Event, int]]:
            return [(noise.event(draw, sigma, 1.0), num_steps)]

        def search(exact: bool) -> float:
            return least_noise(self.target_epsilon, self.delta, history, self.adjacency, exact=exact)

        if quick:
            if math.isfinite(sigma := search(exact=False)):
                return NoiseMultiplier(sigma)
            order = "" if noise.is_sampled else " in a fixed order"
            reason = f"ε = {self.target_epsilon:g} cannot be reached in {num_steps:,} steps{order}; raise it"
            return NoiseMultiplier(None, reason=reason)
        try:
            sigma = search(exact)
            cost = math.inf if sigma == math.inf else epsilon(history(sigma), self.delta, self.adjacency)
            if not exact and not self.target_epsilon * (1 - TOLERANCE) <= cost <= self.target_epsilon:
                return self.least_noise(batch_size, num_steps, noise, exact=True)
            return NoiseMultiplier(sigma, cost)
        except ValueError as error:
            return NoiseMultiplier(None, reason=str(error))


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
    """For an estimate without measurement; 6 per parameter for forward and backward in full fine-tuning."""
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
                raise ValueError("a time estimate needs flops_per_token, peak_flops and utilization: give all three")
            if self.tokens_per_second is not None:
                raise ValueError("tokens_per_second measures what flops_per_token estimates: give one of the two")
        if self.tokens_per_unit is None and (self.tokens_per_second or self.flops_per_token):
            raise ValueError("a run's time needs tokens_per_unit: give the number of tokens of a unit")

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

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the time, in words."""
        if self.tokens_per_second is not None:
            return ("Time is tokens divided by the measured rate, which does not depend on b.",)
        if self.flops_per_token is None:
            return ()
        return (
            f"Time is estimated from {self.flops_per_token:.3g} FLOPs per token on {self.gpus} GPUs of "
            f"{self.peak_flops:.3g} FLOP/s at {self.utilization:.0%} utilization; nothing was measured.",
        )


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One way to spend the budget."""

    options: dict[str, Any] | str
    """`privacy.noise` of a recipe."""
    expected_batch_size: int
    """b."""
    num_steps: int
    """T."""
    sampling_rate: float
    """q = b/N."""
    noise_multiplier: float | None
    """σ, the smallest one found; None if none reaches the target."""
    gain: float
    """‖wᵀM⁻¹‖ / Σw, by which `predicted_noise` exceeds σ/b; 1/√T with independent noise and equal steps."""
    relative: float | None = None
    """`predicted_noise` over that of independent noise with the recipe's batch size; None without a recipe."""
    share_of_full_batch: float | None = None
    """`signal_to_noise` over that of full batches."""
    effective_steps: float | None = None
    """T / (1 + (σ/b)²/r²), the equivalent number of steps without noise; None if r is unknown."""
    epsilon: float | None
    """ε with this σ, an upper bound; at most the target. None if it was not computed."""
    epochs: float
    """b T/N."""
    tokens: float | None
    seconds: float | None
    tensors_kept: int
    """How many tensors of the gradient's size are stored between two steps; 0 with independent noise."""
    sampled: bool
    """Whether units are drawn at random. False: they are visited in a fixed order."""
    on_line: bool
    """Whether it has the compute of the recommendation."""
    recommended: bool = False
    reason: str | None = None
    """Why there is no σ; None if there is one."""

    @property
    def noise(self) -> str:
        """Description of the noise, for instance "8 bands, geometric γ = 0.978"."""
        return _words(self.options)

    @property
    def examples(self) -> int:
        """K = b T, units expected in all steps together."""
        return self.expected_batch_size * self.num_steps

    @property
    def noise_to_batch_ratio(self) -> float | None:
        """σ/b, in units of the clip norm."""
        return None if self.noise_multiplier is None else self.noise_multiplier / self.expected_batch_size

    @property
    def signal_to_noise(self) -> float | None:
        """√T b/σ, in units of (mean clipped gradient)/(clip norm); None with correlated noise."""
        ratio = self.noise_to_batch_ratio
        return None if ratio is None or self.tensors_kept else math.sqrt(self.num_steps) / ratio

    @property
    def predicted_noise(self) -> float | None:
        """Noise over signal in the released weights."""
        return None if self.noise_multiplier is None else self.noise_over_signal()

    def noise_over_signal(self, gradient_rms: float = 0.0) -> float:
        """Return √((σ/b)² + r²) times `gain`, or inf without a σ; with r = 0 it is `predicted_noise`."""
        ratio = self.noise_to_batch_ratio
        return math.inf if ratio is None else math.hypot(ratio, gradient_rms) * self.gain

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including the computed figures."""
        computed = ("noise", "examples", "noise_to_batch_ratio", "signal_to_noise", "predicted_noise")
        return {**{name: getattr(self, name) for name in computed}, **dataclasses.asdict(self)}


def recommend(points: Iterable[SweepPoint], min_steps: int = 1, gradient_rms: float = 0.0) -> SweepPoint:
    """Return the point of the smallest batch within 10 % of the least noise; of several, the one with least memory.

    Args:
        points: points with one compute.
        min_steps: points with fewer steps are left out.
        gradient_rms: r.

    Raises:
        ValueError: no point has a σ and enough steps.
    """
    usable = sorted(_usable(points, min_steps), key=lambda point: (point.expected_batch_size, point.tensors_kept))
    if not usable:
        raise ValueError(
            f"no point with this compute reaches the target in at least min_steps={min_steps} steps. "
            "Add smaller batches to the grid, raise the compute, or lower min_steps"
        )
    return usable[nearly_least([point.noise_over_signal(gradient_rms) for point in usable], 1 / NEARLY_BEST)]


def _usable(points: Iterable[SweepPoint], min_steps: int) -> list[SweepPoint]:
    return [point for point in points if point.num_steps >= min_steps and point.noise_multiplier is not None]


@dataclass(frozen=True)
class WhatIf:
    """The effect of a change of the recommended point on the noise of a step."""

    change: str
    noise_to_batch_ratio: float | None
    """None if the change is impossible."""
    factor: float | None
    """The ratio after the change divided by the ratio before."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Points of one privacy budget, one of which is recommended. Made by `sweep`.

    Points with independent noise alone are ordered by batch size and steps; with correlated noise, by noise.
    """

    budget: Budget
    compute: int
    """K, the expected units (b T) that the recommendation may use."""
    compute_name: str
    """Source of K."""
    min_steps: int
    gradient_rms: float
    """r; 0 when unknown."""
    points: tuple[SweepPoint, ...]
    """The grid, and the points on the line of compute K that are not in it."""
    cost: Cost
    what_if: tuple[WhatIf, ...]
    """Empty if noises are compared."""

    @property
    def correlated(self) -> bool:
        """Whether several noises are compared, not independent noise alone."""
        return any(point.tensors_kept for point in self.points)

    @property
    def line(self) -> tuple[SweepPoint, ...]:
        """The points with compute K."""
        return tuple(point for point in self.points if point.on_line)

    @property
    def recommended(self) -> SweepPoint:
        """The recommended point."""
        return next(point for point in self.points if point.recommended)

    @property
    def independent(self) -> tuple[SweepPoint, ...]:
        """The points with independent noise."""
        return tuple(point for point in self.points if not point.tensors_kept)

    @property
    def recommended_independent(self) -> SweepPoint:
        """The point that the same rule selects if only independent noise is allowed."""
        return recommend([point for point in self.independent if point.on_line], self.min_steps, self.gradient_rms)

    @property
    def recommended_without_sampling(self) -> SweepPoint | None:
        """The point that the same rule selects for units that cannot be sampled; None if none reaches the target."""
        points = _usable((point for point in self.line if not point.sampled), self.min_steps)
        return recommend(points) if points else None

    @property
    def reason(self) -> str:
        """Reason for the recommended point, in words."""
        chosen = self.recommended
        if self.correlated:
            return (
                f"Of the points {'with sampled units' if chosen.sampled else 'in a fixed order'} within 10 % of the "
                "least predicted noise, it has the smallest batch and the most steps, and among those it stores the "
                "fewest tensors."
            )
        usable = _usable(self.line, self.min_steps)
        measure = "√(effective steps)" if self.gradient_rms else "cumulative signal-to-noise ratio"
        least = f"; at least {self.min_steps:,} steps" if self.min_steps > 1 else ""
        ways = f"split in {len(usable)} ways{least}"
        words = [f"The compute is {self.compute_name}: {self.compute:,} examples, {ways}."]
        if len(usable) == 1:
            return f"{words[0]} No other point meets the budget and the requested limits."
        best = min(usable, key=lambda point: point.noise_over_signal(self.gradient_rms))
        if chosen is best:
            words.append(f"This one has the highest {measure}, and no smaller batch comes within 10 % of it.")
        else:
            share = best.noise_over_signal(self.gradient_rms) / chosen.noise_over_signal(self.gradient_rms)
            words.append(
                f"This one has {share:.0%} of the highest {measure} (reached with batches of "
                f"{best.expected_batch_size:,}) and takes {chosen.num_steps / best.num_steps:.3g} times as many steps."
            )
        if chosen.expected_batch_size == usable[-1].expected_batch_size:
            words.append(
                "It has the largest of the batches, so larger ones may do better if the model can be trained in fewer "
                f"than {chosen.num_steps:,} steps."
            )
        elif chosen is usable[0]:
            words.append("It has the smallest of the batches, so smaller ones may be as good.")
        return " ".join(words)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of the recommendation, in words."""
        if self.correlated:
            return (
                f"All points expect {self.compute:,} units in total.",
                "The weights respond to the noise as to the gradient: linearly, through momentum, schedule and "
                "averaging. Curvature is ignored.",
                "The learning rate is tuned again for each point.",
                "σ is for unbounded batches, accurate to 0.2 %; the plan of a run is exact.",
            )
        signal = (
            f"The entries of the averaged clipped gradient have a root mean square of {self.gradient_rms:.3g} clip "
            "norms at all points, and all directions have the same curvature."
            if self.gradient_rms
            else "Noise exceeds signal in every step, so steps add up and the optimizer needs few of them. "
            "Very large batches violate this first. The smallest sufficient number of steps (min_steps) or the size "
            "of the gradient (gradient_rms) can be measured on public data and passed."
        )
        epochs = self.recommended.epochs
        texts = (
            "Every step has the same signal for all b and T: the learning rate is tuned again for each point.",
            signal,
            "The noise added for privacy exceeds the sampling noise of the gradient (arXiv:2501.18914 also assumes "
            "this).",
            f"Repeated data teach as much as new data: the recommended point takes {epochs:.3g} epochs.",
            "σ is for plain Poisson sampling. The plan of a run bounds the batch (B_max) such that this costs less "
            "than 1e-3 in ε, and calibrates σ accordingly.",
            "At the points that are not recommended, up to 1 % of ε is unused, so σ may be slightly larger than "
            "needed.",
            "The whole budget is spent on one run. Tuning on the private data costs more.",
        )
        return texts + self.cost.assumptions

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can represent."""
        values, fixed = dataclasses.asdict(self), self.recommended_without_sampling
        return {
            **values.pop("budget"),
            **values,
            "reason": self.reason,
            "full_batch_signal_to_noise": self.budget.full_batch_signal_to_noise,
            "what_if": list(values["what_if"]),
            "assumptions": list(self.assumptions),
            "points": [point.to_dict() for point in self.points],
            "recommended": self.recommended.to_dict(),
            "recommended_with_independent_noise": self.recommended_independent.to_dict(),
            "recommended_without_sampling": None if fixed is None else fixed.to_dict(),
        }


def default_grid(expected_batch_size: int, num_steps: int, num_units: int) -> tuple[list[int], list[int]]:
    """Return batch sizes and steps around a recipe's: 1/4, 1/2, 1, 2 and 4 times each, b at most N.

    Raises:
        ValueError: a number is not a positive integer, or b exceeds N.

    >>> default_grid(2048, 36, num_units=5000)
    ([512, 1024, 2048, 4096], [9, 18, 36, 72, 144])
    """
    _check_counts(num_units, "expected_batch_size", [expected_batch_size])
    _check_counts(None, "num_steps", [num_steps])
    batches = {*(max(1, expected_batch_size // part) for part in (4, 2)), *(expected_batch_size * n for n in (1, 2, 4))}
    steps = {*(max(1, num_steps // part) for part in (4, 2)), *(num_steps * n for n in (1, 2, 4))}
    return sorted(b for b in batches if b <= num_units), sorted(steps)


def sweep(
    *,
    target_epsilon: float,
    delta: float,
    num_units: int,
    expected_batch_sizes: Sequence[int],
    step_counts: Sequence[int] | None = None,
    adjacency: str = "zero-out",
    compute: str | int = "centre",
    min_steps: int = 1,
    gradient_rms: float = 0.0,
    cost: Cost | None = None,
    noise: Noise = _INDEPENDENT,
    workload_of: Callable[[int], Workload] | None = None,
    expected_batch_size: int | None = None,
) -> Sweep:
    """Calibrate σ for batch sizes, steps and noises, and recommend a point.

    Guarantee: with independent noise, `accounting.epsilon` of every point with its σ, without truncation, is at most
    the target. At most 1 % of the target is unused, at the recommended point less than 0.1 %. Where noises are
    compared, σ is found to about 0.2 %, without a guarantee: the plan of a run is exact.

    Args:
        target_epsilon: the ε that a run may cost.
        delta: δ, below 1/N.
        num_units: N, public.
        expected_batch_sizes: values of b, at most N each.
        step_counts: values of T. None: only points on the line, without those with fewer than ``min_steps`` steps.
        adjacency: "zero-out" or "replace-one".
        compute: K = b T of the recommendation: "centre" of the grid, "max" for the grid's largest, or a number of
            examples. For each batch size the line has T = K/b, or a T of the grid that is within 5 % of it.
        min_steps: the smallest number of steps that the optimizer needs; points with fewer are not recommended.
        gradient_rms: r, ‖mean clipped gradient‖ / (C √parameters), measured on public data; 0 when unknown.
        cost: compute cost of a unit, for tokens and time.
        noise: the noise of the recipe. If it is correlated, its candidates are compared with each other, with
            independent noise, and with noise in a fixed order. If it is noise in a fixed order, only such points
            are recommended, otherwise none of them.
        workload_of: a function from T to the workload of a run of T steps; correlated noise needs it. None: equal
            steps, whose sum is released.
        expected_batch_size: b of the recipe, with whose independent noise the points are compared.

    Raises:
        ValueError: a number is out of range, a grid is empty, or no point can be recommended.

    >>> result = sweep(target_epsilon=8.0, delta=1e-6, num_units=42_000, expected_batch_sizes=[512, 1024, 2048],
    ...                step_counts=[100, 200, 400])
    >>> result.recommended.expected_batch_size, result.recommended.num_steps
    (2048, 100)
    """
    budget = Budget(target_epsilon, delta, num_units, adjacency)
    sizes = [*expected_batch_sizes, *([] if expected_batch_size is None else [expected_batch_size])]
    _check_counts(num_units, "expected_batch_size", sizes)
    _check_counts(None, "min_steps", [min_steps])
    if step_counts is not None:
        _check_counts(None, "num_steps", step_counts)
    if not 0 <= gradient_rms < math.inf:
        raise ValueError(f"gradient_rms must be at least 0 and finite, got {gradient_rms}")
    correlated = noise.tensors_kept > 0
    if correlated and (gradient_rms or workload_of is None):
        raise ValueError("correlated noise needs workload_of and gradient_rms=0: pass workload_of only")
    batches, steps = sorted(set(sizes)), sorted(set(step_counts or ()))
    examples, compute_name = _compute(compute, batches, steps)
    if expected_batch_size is not None and examples < min_steps * expected_batch_size:
        raise ValueError(
            f"compute={examples} units is too small: b={expected_batch_size} takes fewer than min_steps={min_steps} "
            "steps with it. Raise compute, or lower min_steps"
        )
    line = _line(examples, batches, steps, min_steps)
    full_batch, cost = budget.full_batch_signal_to_noise, cost or Cost()
    workload_at = functools.cache(lambda t: None if workload_of is None else workload_of(t))

    def point(b: int, t: int, one: Noise, exact: bool = False) -> SweepPoint:
        workload = workload_at(t)
        found = budget.least_noise(b, t, one, exact=exact, quick=correlated)
        made = SweepPoint(
            options=spec_of(one).to_plain(),
            expected_batch_size=b,
            num_steps=t,
            sampling_rate=b / num_units,
            noise_multiplier=found.sigma,
            gain=1 / math.sqrt(t) if workload is None else one.error(workload) / sum(workload.response),
            epsilon=found.epsilon,
            epochs=b * t / num_units,
            tokens=cost.tokens(b * t),
            seconds=cost.seconds(b * t),
            tensors_kept=one.tensors_kept,
            sampled=one.is_sampled,
            on_line=(b, t) in line,
            reason=found.reason,
        )
        signal, ratio = made.signal_to_noise, made.noise_to_batch_ratio
        return dataclasses.replace(
            made,
            share_of_full_batch=None if signal is None else signal / full_batch,
            effective_steps=t / (1 + (ratio / gradient_rms) ** 2) if ratio is not None and gradient_rms > 0 else None,
        )

    grid = sorted({*line, *((b, t) for b in batches for t in steps)})
    points = [point(b, t, one) for b, t in grid for one in _candidates(noise, budget.draw(b), workload_at(t))]
    usable = [one for one in points if one.sampled == noise.is_sampled]
    if not _usable(usable, 1):
        why = usable[0].reason if usable else "the recipe's noise has no accounting for these batches and steps"
        raise ValueError(f"no point of the grid reaches the target: {why}")
    final = chosen = recommend([one for one in usable if one.on_line], min_steps, gradient_rms)
    if correlated:
        points.sort(key=SweepPoint.noise_over_signal)
    else:
        exact = point(chosen.expected_batch_size, chosen.num_steps, _INDEPENDENT, exact=True)
        final = min(exact, chosen, key=SweepPoint.noise_over_signal)
    points = [dataclasses.replace(final, recommended=True) if one is chosen else one for one in points]
    if expected_batch_size is not None:
        points = _compared(points, expected_batch_size)
    return Sweep(
        budget=budget,
        compute=examples,
        compute_name=compute_name,
        min_steps=min_steps,
        gradient_rms=gradient_rms,
        points=tuple(points),
        cost=cost,
        what_if=() if correlated else _what_if(budget, chosen),
    )


def _compared(points: Sequence[SweepPoint], size: int) -> list[SweepPoint]:
    """Return the points relative to the one with independent noise and the recipe's batch size."""
    (plain,) = (one for one in points if one.on_line and one.expected_batch_size == size and not one.tensors_kept)
    least = plain.noise_over_signal()
    if math.isinf(least):
        raise ValueError(
            f"the target cannot be reached with b={size} in {plain.num_steps} steps of independent noise. Take fewer "
            "steps, or a smaller batch"
        )
    return [
        one if one.predicted_noise is None else dataclasses.replace(one, relative=one.predicted_noise / least)
        for one in points
    ]


def _candidates(noise: Noise, draw: Draw, workload: Workload | None) -> list[Noise]:
    """Return independent noise, the recipe's candidates that fit into this batch's groups, and fixed-order noise."""
    if not noise.tensors_kept or workload is None:
        return [_INDEPENDENT]
    try:
        candidates = [one for one in noise.candidates(draw, workload) if one.tensors_kept]
        for one in candidates:
            one.sampler(draw)
    except ValueError:  # the groups are smaller than a batch
        candidates = []
    fixed = BltNoise().candidates(draw, workload) if noise.is_sampled else []
    return [_INDEPENDENT, *candidates, *fixed]


def _words(options: dict[str, Any] | str) -> str:
    if isinstance(options, str):
        return options
    if "bands" in options:
        ratio = f" γ = {options['ratio']:g}" if "ratio" in options else ""
        return f"{options['bands']} bands, {options.get('strategy', '')}{ratio}"
    number = options.get("buffers", "auto")
    return f"{options['kind']}, {number} buffer{'s' * (number != 1)}"


def equal_compute(points: Iterable[SweepPoint]) -> list[tuple[SweepPoint, ...]]:
    """Return the points that have a σ in groups of equal b T (within 5 %), by compute, each group by batch size."""
    groups: list[list[SweepPoint]] = []
    for point in sorted(_usable(points, 1), key=lambda item: item.examples):
        if groups and point.examples <= (1 + _SAME_COMPUTE) * groups[-1][0].examples:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [tuple(sorted(group, key=lambda item: item.expected_batch_size)) for group in groups]


def _check_counts(num_units: int | None, name: str, values: Sequence[int]) -> None:
    """Refuse numbers of a grid that are not whole numbers from 1 on, or exceed N.

    Raises:
        ValueError: a number is refused; the message names the option.
    """
    if not values:
        raise ValueError(f"the grid has no {name}: give at least one")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if num_units is not None and value > num_units:
            raise ValueError(
                f"{name}={value} exceeds the number of units, {num_units}, but a unit enters a step at most once. "
                f"Use {num_units} or fewer"
            )


def _compute(compute: str | int, batches: Sequence[int], steps: Sequence[int]) -> tuple[int, str]:
    if compute == "centre" and steps:
        return batches[(len(batches) - 1) // 2] * steps[(len(steps) - 1) // 2], "that of the grid's centre"
    if compute == "max" and steps:
        return batches[-1] * steps[-1], "the largest of the grid"
    if not isinstance(compute, int) or isinstance(compute, bool) or compute < 1:
        raise ValueError(
            f'compute must be "centre", "max" or a positive number of examples (a number if there are no step_counts), '
            f"got {compute!r}"
        )
    return compute, "the requested one"


def _line(examples: int, batches: Sequence[int], steps: Sequence[int], min_steps: int) -> list[tuple[int, int]]:
    """Return (b, T) for the given compute, with a T of the grid if one nearly fits."""
    line = []
    for b in batches:
        t = min(steps or [examples // b], key=lambda t: abs(b * t / examples - 1))
        if abs(b * t / examples - 1) > _SAME_COMPUTE:
            t = examples // b
        if t >= (1 if steps else min_steps):
            line.append((b, t))
    if not line:
        raise ValueError(f"{examples} examples are less than one step of the smallest batch, {batches[0]}: raise it")
    return line


def _what_if(budget: Budget, now: SweepPoint) -> tuple[WhatIf, ...]:
    """Return the effect of twice the batch, twice the budget and twice the data on the noise of a step."""
    b, t, before = now.expected_batch_size, now.num_steps, now.noise_to_batch_ratio
    assert before is not None
    twice_the_budget = dataclasses.replace(budget, target_epsilon=2 * budget.target_epsilon)
    changes = (
        ("twice the batch, the same steps (twice the compute)", budget, 2 * b),
        ("twice the budget ε", twice_the_budget, b),
        ("twice the units N, the same batch and δ", dataclasses.replace(budget, num_units=2 * budget.num_units), b),
    )
    results = []
    for name, changed, batch in changes:
        sigma = changed.least_noise(batch, t).sigma if batch <= changed.num_units else None
        ratio = None if sigma is None else sigma / batch
        results.append(WhatIf(name, ratio, None if ratio is None else ratio / before))
    return tuple(results)
