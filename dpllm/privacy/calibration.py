"""Find the noise and the number of steps for a target ε, and a bound on the batch size that costs no ε.

`least_noise` is the only search for a noise multiplier: training runs, query runs after a release, selections among
runs, sweeps and the choice of a noise mechanism use it with their own function from σ to a history.

`choose_noise` takes among a mechanism's candidates the one with the least predicted noise in the released weights.
`make_plan` calls it before it calibrates σ. All candidates are compared at the plan's ε. The choice depends only on
public constants: N, B, T, ε, δ and the workload, never on the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dpllm.mechanism.events import Event, Round, chance_to_enter, dp_sgd
from dpllm.mechanism.limits import MAX_NOISE, MAX_TARGET_EPSILON, MIN_NOISE
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.parts import Draw, Noise
from dpllm.mechanism.sampling import default_max_batch_size
from dpllm.mechanism.strategies import Workload
from dpllm.privacy.accounting import DISCRETIZATION, History, epsilon, merge, untruncated
from dpllm.privacy.rounding import format_delta, format_epsilon

if TYPE_CHECKING:
    from dpllm.privacy.plan import PrivacyPlan


_COARSE = 1e-3
_TRUNCATION_COST = 1e-3
_SMALL, _LARGE = 0.1, 100.0  # an ε outside this range uses a different grid from `DISCRETIZATION`
_ENOUGH_NOISE = (1e3, 1e5, MAX_NOISE)  # tried in turn, since ε is faster to compute for less noise


def steps_within(
    target_epsilon: float,
    delta: float,
    step: Event,
    num_steps: int,
    adjacency: str = "zero-out",
    before: History = (),
) -> int:
    """Return the largest number of equal steps, at most `num_steps`, that keeps a history within a target ε.

    Bisect on a coarse grid, which takes a tenth of the time, and then search on the fine grid around the result.

    Args:
        target_epsilon: the largest ε that all steps together may cost.
        delta: δ.
        step: the event of each further step.
        num_steps: the largest number of further steps.
        adjacency: "zero-out" or "replace-one".
        before: (step, count) pairs that have already run.

    >>> from dpllm import Step
    >>> steps_within(4.0, 1e-5, Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)
    1051
    """

    def keeps(number: int, discretization: float | None = None) -> bool:
        steps = [*before, (step, number)]
        return number == 0 or epsilon(steps, delta, adjacency, discretization) <= target_epsilon

    def bisect(fits: int, exceeds: int, discretization: float | None = None) -> int:
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (middle, exceeds) if keeps(middle, discretization) else (fits, middle)
        return fits

    if keeps(num_steps):
        return num_steps
    fits, exceeds = 0, num_steps
    near, stride = bisect(fits, exceeds, _COARSE), 1
    while fits < near < exceeds and not keeps(near):
        exceeds, near, stride = near, near - stride, 2 * stride
    fits, stride = max(fits, near), 1
    while fits + stride < exceeds and keeps(fits + stride):
        fits, stride = fits + stride, 2 * stride
    return bisect(fits, min(exceeds, fits + stride))


def choose_max_batch_size(
    expected_batch_size: int,
    num_units: int,
    event_of: Callable[[int], Event],
    num_steps: int,
    delta: float,
    adjacency: str = "zero-out",
) -> int:
    """Return the smallest max_batch_size among b + 7 sqrt(b), b + 8 sqrt(b), ... that costs no ε.

    It costs no ε if ε is less than 1e-3 above that of the same run without truncation, at a coarse discretization. For
    an ε below 0.1, the limit is one hundredth of ε.

    Args:
        expected_batch_size: b.
        num_units: N.
        event_of: a function from B_max to the event of a step.
        num_steps: T.
        delta: δ.
        adjacency: "zero-out" or "replace-one".
    """
    size = default_max_batch_size(expected_batch_size, num_units)
    if event_of(size).noise_multiplier == 0:
        return size
    width: float | None = _COARSE
    plain, most = epsilon(untruncated([(event_of(size), num_steps)]), delta, adjacency, width), _TRUNCATION_COST
    if plain < _SMALL:
        width = None
        plain = epsilon(untruncated([(event_of(size), num_steps)]), delta, adjacency)
        most = plain / 100
    while size < num_units and math.isfinite(plain):
        if epsilon([(event_of(size), num_steps)], delta, adjacency, width) < plain + most:
            break
        size = min(num_units, size + math.ceil(math.sqrt(expected_batch_size)))
    return size


def require_target(target_epsilon: float) -> None:
    """Refuse an ε that is not allowed as the target of a run or a budget.

    Raises:
        ValueError: it is not above 0, not finite, below the smallest ε that is stated, or above `MAX_TARGET_EPSILON`.

    >>> require_target(8.0)
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be above 0 and finite, got {target_epsilon}")
    if target_epsilon < DISCRETIZATION:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be reached: {DISCRETIZATION:g} is the smallest ε that is stated "
            "for any run. Set a larger one"
        )
    if target_epsilon > MAX_TARGET_EPSILON:
        raise ValueError(
            f"target_epsilon must be at most {MAX_TARGET_EPSILON:g}, got {target_epsilon:g}: such an ε protects "
            "nobody. Set one below 10"
        )


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    num_steps: int,
    num_units: int | None = None,
    max_batch_size: int | None = None,
    adjacency: str = "zero-out",
    rows_per_unit: int = 1,
) -> float:
    """Return the noise multiplier of `least_noise` for steps of DP-SGD.

    Guarantee: `epsilon` of the run with the result, at the same δ and adjacency, never exceeds the target.

    Args:
        target_epsilon: the ε that the whole run may cost.
        delta: δ.
        sampling_rate: q.
        num_steps: T.
        num_units: N; needed with `max_batch_size`.
        max_batch_size: B_max. None: plain Poisson sampling.
        adjacency: "zero-out" or "replace-one".
        rows_per_unit: k, rows of a unit that are drawn individually; 1 if units are drawn.

    Raises:
        ValueError: no noise multiplier reaches the target; the message gives the smallest ε that is reachable.

    >>> sigma = calibrate_noise_multiplier(8, delta=1e-5, sampling_rate=0.0244, num_steps=410)
    >>> round(sigma, 2)
    0.68
    """

    def event_of(sigma: float) -> Event:
        return dp_sgd(
            sampling_rate=sampling_rate,
            noise_multiplier=sigma,
            num_units=num_units,
            max_batch_size=max_batch_size,
            rows_per_unit=rows_per_unit,
        )

    return calibrate(target_epsilon, delta, event_of, num_steps, adjacency)


def calibrate(
    target_epsilon: float,
    delta: float,
    event_of: Callable[[float], Event],
    num_steps: int,
    adjacency: str = "zero-out",
) -> float:
    """Return the noise multiplier of `least_noise` for equal steps.

    Guarantee: `epsilon` of the steps with the result, at the same δ and adjacency, never exceeds the target.

    Args:
        target_epsilon: the ε that all steps may cost.
        delta: δ.
        event_of: a function from σ to the event of a step.
        num_steps: T.
        adjacency: "zero-out" or "replace-one".

    Raises:
        ValueError: no noise multiplier reaches the target; the message gives the smallest ε that is reachable.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    return least_noise(target_epsilon, delta, lambda sigma: [(event_of(sigma), num_steps)], adjacency)


def least_noise(
    target_epsilon: float,
    delta: float,
    history_of: Callable[[float], History],
    adjacency: str = "zero-out",
    *,
    before: History = (),
    exact: bool = True,
    tolerance: float = 1e-4,
) -> float:
    """Return the smallest noise multiplier with which a history costs at most a target ε.

    Guarantee: ε was computed with the result itself, as `epsilon` does, and is at most the target. It is at least
    (1 - 4 tolerance) times the target, unless ε jumps over it or the smallest possible noise multiplier suffices.
    Without `exact` there is no guarantee.

    Args:
        target_epsilon: the ε of the history and of `before` together.
        delta: δ.
        history_of: a function from σ to the history; its ε falls as σ rises.
        adjacency: "zero-out" or "replace-one".
        before: what was released earlier, whose ε does not depend on σ.
        exact: False: σ within about 0.2 %, without truncation, in a tenth of the time, to compare mechanisms; inf if no
            noise reaches the target.
        tolerance: relative tolerance of ε; a smaller one takes more time.

    Raises:
        ValueError: the target is out of range, or (`exact`) no noise multiplier reaches it; the message gives the
            smallest ε that is reachable.

    >>> from dpllm import Step
    >>> steps = lambda sigma: [(Step(sampling_rate=0.0244, noise_multiplier=sigma), 410)]
    >>> [round(least_noise(8.0, 1e-5, steps, exact=exact), 2) for exact in (True, False)]
    [0.68, 0.68]
    """
    try:
        require_target(target_epsilon)
    except ValueError:
        if exact or not 0 < target_epsilon < DISCRETIZATION:
            raise
        return math.inf

    def cost(truncated: bool, discretization: float | None, sigma: float) -> float:
        history: History = [*before, *history_of(sigma)]
        return epsilon(history if truncated else untruncated(history), delta, adjacency, discretization)

    rounds = merge(history_of(1.0))
    least = MIN_NOISE * max(one.moves for one, _ in rounds) * (1 + 1e-12)
    any_would_do = chance_to_enter(rounds) <= delta
    if not exact:
        coarse = target_epsilon >= _SMALL and cost(False, _COARSE, _ENOUGH_NOISE[0]) < target_epsilon / 10
        quick = partial(cost, False, _COARSE if coarse else None)  # else the target is finer than the coarse grid
        most, reached = _enough(quick, target_epsilon)
        if reached > target_epsilon or any_would_do:
            return math.inf if reached > target_epsilon else least
        return solve(quick, target_epsilon, 1.0, tolerance=2e-3, within=(least, most))
    _require_computed(target_epsilon, rounds, adjacency)
    full = partial(cost, True, None)
    most, reached = _enough(full, target_epsilon)
    if reached > target_epsilon:
        alone = f", and the earlier releases alone cost ε = {format_epsilon(epsilon(before, delta, adjacency))}"
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be reached: at a noise multiplier of {most:g} and "
            f"δ = {format_delta(delta)}, ε is still {format_epsilon(reached)}{alone if before else ''}. Use a "
            "larger target_epsilon, fewer steps or answers, a smaller expected_batch_size, or a larger max_batch_size"
        )
    if any_would_do and full(least) <= target_epsilon:
        return least
    # The full cost takes seconds when σ is small. A cheap cost has nearly the same shape. So σ is found on the cheap
    # cost, the small gap between the two is measured there, and this is repeated until the full cost meets the target.
    wide = _COARSE * max(1.0, target_epsilon / _LARGE)
    cheap: Callable[[float], float] = partial(cost, False, wide if target_epsilon >= _LARGE else None)
    sigma, gap, within, narrow = 1.0, 0.0, (least, most), tolerance / 10
    if target_epsilon >= _SMALL and cost(True, wide, most) < target_epsilon / 2:  # else finer than the coarse grid
        sigma = solve(partial(cost, False, wide), target_epsilon, sigma, tolerance=0.02, within=within)
        gap = cost(True, wide, sigma) - cost(False, wide, sigma)
        if gap > 0.02 * target_epsilon:  # truncation adds to ε; then only the truncated cost has the right shape
            cheap, gap = partial(cost, True, wide), 0.0
    for _ in range(12):
        aim = target_epsilon * (1 - 0.3 * tolerance)
        last, sigma = sigma, solve(lambda s, gap=gap: cheap(s) + gap, aim, sigma, tolerance, within, narrow)  # type: ignore[misc]
        reached = full(sigma)
        if target_epsilon * (1 - 4 * tolerance) <= reached <= target_epsilon:
            return sigma
        gap = reached - cheap(sigma)
        if not math.isfinite(gap) or math.isclose(sigma, last, rel_tol=narrow):  # ε jumps there
            break
    return solve(full, target_epsilon, sigma, tolerance, within, narrow)


def _enough(cost: Callable[[float], float], target_epsilon: float) -> tuple[float, float]:
    """Return a noise multiplier that meets the target and its ε; if none does, the largest possible one."""
    most = _ENOUGH_NOISE[0]
    reached = cost(most)
    for more in _ENOUGH_NOISE[1:]:
        if reached <= target_epsilon or reached == math.inf:  # no amount of noise helps
            break
        try:
            most, reached = more, cost(more)
        except ValueError:  # a number derived from σ is out of range
            break
    return most, reached


def _require_computed(target_epsilon: float, rounds: Sequence[tuple[Round, int]], adjacency: str) -> None:
    """Refuse a target above every ε that is computed for these rounds."""
    by_group_privacy = not all(one.has_pair(adjacency) for one, _ in rounds)
    largest = sum(one.most_epsilon for one, _ in rounds) * (2 if by_group_privacy else 1)
    if target_epsilon > largest:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} is above {largest:g}, the largest ε that is computed from Rényi "
            "divergences (discrete noise, a token draw, or a selection among runs). Such an ε protects nobody: set one "
            "below 10"
        )


def solve(
    cost: Callable[[float], float],
    target: float,
    start: float,
    tolerance: float,
    within: tuple[float, float] = (0.0, math.inf),
    narrow: float = 1e-9,
) -> float:
    """Return a σ whose cost is in [target * (1 - tolerance), target], for a cost that falls as σ rises.

    Secant steps in log σ and log ε, where the curve is almost straight, kept inside a bracket.

    Args:
        cost: ε as a function of σ.
        target: ε.
        start: a σ.
        tolerance: relative, of ε.
        within: the least σ, returned if it costs less than the target, and the most, returned if it costs more.
        narrow: the width in log σ of a bracket around a jump of ε at which the search ends, with the larger σ.
    """
    aim = math.log(target * (1 - tolerance / 2))
    low, high = -math.inf, math.inf  # log σ: too little noise, enough noise
    ends = [math.log(end) if end else -math.inf for end in within]
    points: list[tuple[float, float]] = []
    at = math.log(start)
    for _ in range(200):
        at = min(max(at, ends[0]), ends[1])
        value = cost(math.exp(at))
        if target * (1 - tolerance) <= value <= target or (value <= target and high - low < narrow):
            return math.exp(at)
        if at == ends[0 if value <= target else 1]:
            return math.exp(at)
        low, high = (at, high) if value > target else (low, at)
        if 0 < value < math.inf:
            points = [*points[-1:], (at, math.log(value))]
        elif value == math.inf:
            points, narrow = [], tolerance
        slope = -1.5
        if len(points) == 2 and points[0][0] != points[1][0]:
            slope = min(-0.2, (points[1][1] - points[0][1]) / (points[1][0] - points[0][0]))
        step = (aim - points[-1][1]) / slope if points else 1.0
        at = at + min(1.5, max(-1.5, step))
        if not low < at < high:
            at = (low + high) / 2 if math.isfinite(low + high) else (low + 0.7 if high == math.inf else high - 0.7)
        if high - low < narrow:
            at = high
    raise ArithmeticError(f"no noise multiplier found for a cost of {target}: the cost does not fall as noise rises")


NEARLY_LEAST = 1.05
"""A candidate that stores less noise is chosen if its predicted noise is at most this many times the least."""
_STEPS_LOOKED_AT = 1000


def choose_noise(
    noise: Noise,
    draw: Draw,
    workload: Workload,
    *,
    target_epsilon: float | None,
    noise_multiplier: float | None,
    num_steps: int,
    delta: float,
    adjacency: str,
) -> Noise:
    """Return the noise of a plan, with all its parameters.

    Among several candidates, it is the first one whose predicted noise is within 5 % of the least; earlier candidates
    store fewer tensors.

    Args:
        noise: the noise that the recipe names.
        draw: the parameters of the draw, without truncation.
        workload: the map from the noise of the steps to the released weights.
        target_epsilon: the ε of the run.
        noise_multiplier: σ, if it is given.
        num_steps: T.
        delta: δ.
        adjacency: "zero-out" or "replace-one".

    Raises:
        ValueError: there are several candidates and σ is given, or none of them reaches the target.
    """
    candidates = noise.candidates(draw, workload)
    if len(candidates) == 1:
        return candidates[0]
    if noise_multiplier is not None or target_epsilon is None:
        raise ValueError(
            "noise.bands=auto compares bands at the same ε, but noise_multiplier fixes σ instead, and more bands would "
            "then raise ε. Set target_epsilon without noise_multiplier, or a number of bands"
        )
    errors = [
        predicted_noise(candidate, draw, workload, target_epsilon, num_steps, delta, adjacency)
        for candidate in candidates
    ]
    return candidates[nearly_least(errors)]


def nearly_least(errors: Sequence[float], times: float = NEARLY_LEAST) -> int:
    """Return the number of the first entry that is at most ``times`` the least.

    >>> nearly_least([8.13, 6.68, 5.10, 5.02])
    2
    """
    least = min(errors)
    return next(number for number, error in enumerate(errors) if error <= times * least)


def predicted_noise(
    noise: Noise, draw: Draw, workload: Workload, target_epsilon: float, num_steps: int, delta: float, adjacency: str
) -> float:
    """Return σ‖wᵀM⁻¹‖, the noise standard deviation of the released weights, with σ calibrated within 0.2 %.

    Its unit is (largest learning rate) · C / b. It is inf if no σ reaches the target.

    Args:
        noise: the noise, with all its parameters.
        draw: the parameters of the draw, without truncation.
        workload: the map from the noise of the steps to the released weights.
        target_epsilon: the ε of the run.
        num_steps: T.
        delta: δ.
        adjacency: "zero-out" or "replace-one".
    """
    sigma = _calibrated(noise, draw, target_epsilon, num_steps, delta, adjacency)
    return math.inf if math.isinf(sigma) else sigma * noise.error(workload)


def _calibrated(noise: Noise, draw: Draw, target: float, num_steps: int, delta: float, adjacency: str) -> float:
    """Return σ within 0.2 %; inf if none reaches the target."""
    return least_noise(
        target, delta, lambda sigma: [(noise.event(draw, sigma, 1.0), num_steps)], adjacency, exact=False
    )


@dataclass(frozen=True)
class Prediction:
    """The predicted noise of a plan's released weights, and the noise of its steps."""

    noise: float
    """Standard deviation of the noise of the released weights, in units of (largest learning rate) · C / b."""
    independent: float
    """The same with independent noise at the same ε and δ."""
    step_ratio: float
    """r: the root mean square of the noise of a step, over that of independent noise at the same ε and δ."""

    def words(self) -> str:
        """Return the row of `dpllm plan`.

        >>> Prediction(5.0234, 8.1294, 9.4).words()
        '5.02 learning rates · C/b, 0.62 of that of independent noise at the same ε (8.13)'
        """
        return (
            f"{self.noise:.3g} learning rates · C/b, {self.noise / self.independent:.2f} of that of independent noise "
            f"at the same ε ({self.independent:.3g})"
        )

    def step_words(self, divides: bool) -> str:
        """Return the row of `dpllm plan` about single steps.

        Args:
            divides: whether the optimizer divides by the size of the noisy gradients, as Adam does.

        >>> Prediction(5.0234, 8.1294, 9.4).step_words(divides=True)
        '9.4 times that of independent noise; Adam divides by it, so its learning rate can be 9.4 times as large'
        """
        times = f"{self.step_ratio:.2g} times"
        rate = f"; Adam divides by it, so its learning rate can be {times} as large" if divides else ""
        return f"{times} that of independent noise{rate}"


def prediction(plan: PrivacyPlan, workload: Workload) -> Prediction | None:
    """Predict the noise of the released weights; None if the noise is independent, or ε is infinite."""
    mechanism, target = plan.mechanism, plan.epsilon_under(plan.adjacency)
    if plan.selection is not None:  # its ε is not the ε of one run
        return None
    if not mechanism.noise.tensors_kept or not 0 < target <= MAX_TARGET_EPSILON:
        return None
    alone, sigma = IndependentNoise(), mechanism.gradient_noise_multiplier
    independent = _calibrated(alone, mechanism.draw, target, plan.num_steps, plan.delta, plan.adjacency)
    return Prediction(
        noise=sigma * mechanism.noise.error(workload),
        independent=independent * alone.error(workload),
        step_ratio=sigma * step_noise(mechanism.noise, plan.num_steps) / independent,
    )


def step_noise(noise: Noise, num_steps: int) -> float:
    """Return the root mean square over the steps of the step noise divided by σC; many steps are sampled."""
    steps = np.unique(np.linspace(0, num_steps - 1, num=min(num_steps, _STEPS_LOOKED_AT), dtype=np.int64))
    return math.sqrt(sum(noise.variance(int(step), num_steps) for step in steps) / len(steps))
