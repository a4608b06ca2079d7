"""Find the noise and the number of steps for a target ε, and a bound on the batch that costs no ε.

Place in the flow: between the accounting, which it calls repeatedly, and the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from dpllm.mechanism import renyi
from dpllm.mechanism.events import Event, chance_to_enter, dp_sgd
from dpllm.mechanism.limits import MAX_TARGET_EPSILON, MIN_NOISE
from dpllm.mechanism.sampling import default_max_batch_size
from dpllm.privacy.accounting import DISCRETIZATION, History, epsilon, merge, untruncated
from dpllm.privacy.rounding import format_epsilon

_COARSE = 1e-3
_TRUNCATION_COST = 1e-3
_MOST_NOISE = 1000.0


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
        before: (step, count) pairs that have run already.

    >>> from dpllm import Step
    >>> steps_within(4.0, 1e-5, Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)
    1051
    """

    def keeps(number: int, discretization: float = DISCRETIZATION) -> bool:
        steps = [*before, (step, number)]
        return number == 0 or epsilon(steps, delta, adjacency, discretization) <= target_epsilon

    def bisect(fits: int, exceeds: int, discretization: float) -> int:
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
    return bisect(fits, min(exceeds, fits + stride), DISCRETIZATION)


def choose_max_batch_size(
    expected_batch_size: int,
    num_units: int,
    event_of: Callable[[int], Event],
    num_steps: int,
    delta: float,
    adjacency: str = "zero-out",
) -> int:
    """Return the smallest max_batch_size among b + 7 sqrt(b), b + 8 sqrt(b), ... that costs no ε.

    It costs no ε when ε is less than 1e-3 above that of the same run without truncation, at a coarse discretization.

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
    plain = epsilon(untruncated([(event_of(size), num_steps)]), delta, adjacency, _COARSE)
    while size < num_units and math.isfinite(plain):
        if epsilon([(event_of(size), num_steps)], delta, adjacency, _COARSE) < plain + _TRUNCATION_COST:
            break
        size = min(num_units, size + math.ceil(math.sqrt(expected_batch_size)))
    return size


def require_target(target_epsilon: float) -> None:
    """Refuse an ε that no run or budget can have as its target.

    Args:
        target_epsilon: ε.

    Raises:
        ValueError: it is not above 0, not finite, or too large to be calibrated within seconds.

    >>> require_target(8.0)
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be above 0 and finite, got {target_epsilon}")
    if target_epsilon > MAX_TARGET_EPSILON:
        raise ValueError(
            f"target_epsilon must be at most {MAX_TARGET_EPSILON:g}, got {target_epsilon:g}: calibrating noise to a "
            "larger ε takes too long, and such an ε protects nobody. Take one below 10"
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
    """Return the smallest noise multiplier, to a relative 1e-4, with which the run costs at most `target_epsilon`.

    Guarantee: `epsilon` of the run with the result, at the same δ and adjacency, never exceeds the target.

    Args:
        target_epsilon: the ε that the whole run may cost.
        delta: δ.
        sampling_rate: q.
        num_steps: T.
        num_units: N; needed with `max_batch_size`.
        max_batch_size: B_max. None: plain Poisson sampling.
        adjacency: "zero-out" or "replace-one".
        rows_per_unit: k, rows of a unit that are drawn singly; 1 when units are drawn.

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
    """Return the smallest noise multiplier, to a relative 1e-4, with which equal steps cost at most a target.

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
    require_target(target_epsilon)
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    cost = _cost_of(event_of, num_steps, delta, adjacency)
    exact = partial(cost, True, DISCRETIZATION)
    _check_reachable(target_epsilon, exact)
    rounds = merge([(event_of(1.0), num_steps)])
    least = MIN_NOISE * max(one.moves for one, _ in rounds)
    if chance_to_enter(rounds) <= delta and exact(least) <= target_epsilon:
        return least  # any noise would do
    if target_epsilon > renyi.HIGHEST and exact(least) == math.inf:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} is above {renyi.HIGHEST:g}, the largest ε that is computed from Rényi "
            "divergences (discrete noise, or a selection among runs). Take one below 10: such an ε protects nobody"
        )
    # The exact cost takes seconds when σ is small. A cheap cost has nearly the same shape. So σ is found on the cheap
    # cost, the small gap between the two is measured there, and this is repeated until the exact cost meets the target.
    cheap: Callable[[float], float] = partial(cost, False, DISCRETIZATION)
    start, gap = 1.0, 0.0
    if cost(True, _COARSE, _MOST_NOISE) < target_epsilon / 2:  # else the target is finer than the coarse grid
        start = solve(partial(cost, False, _COARSE), target_epsilon, start, tolerance=0.02)
        gap = cost(True, _COARSE, start) - cost(False, _COARSE, start)
        if gap > 0.02 * target_epsilon:  # truncation adds to ε; then only the truncated cost has the right shape
            cheap, gap = partial(cost, True, _COARSE), 0.0
    sigma = start
    for _ in range(12):
        aim = target_epsilon * (1 - 3e-5)
        sigma = solve(lambda s, gap=gap: cheap(s) + gap, aim, sigma, tolerance=1e-4)  # type: ignore[misc]
        reached = exact(sigma)
        if target_epsilon * (1 - 4e-4) <= reached <= target_epsilon:
            return sigma
        gap = reached - cheap(sigma)
        if not math.isfinite(gap):
            break
    return solve(exact, target_epsilon, sigma, tolerance=1e-4)


def approximate_noise(
    target_epsilon: float,
    delta: float,
    event_of: Callable[[float], Event],
    num_steps: int,
    adjacency: str = "zero-out",
) -> float:
    """Return the noise multiplier of `calibrate` to about 0.2 %, without truncation; inf if none reaches the target.

    It serves to compare mechanisms, and gives no guarantee. It takes a tenth of the time.

    Args:
        target_epsilon: the ε that all steps may cost.
        delta: δ.
        event_of: a function from σ to the event of a step.
        num_steps: T.
        adjacency: "zero-out" or "replace-one".

    >>> from dpllm import Step
    >>> round(approximate_noise(8, 1e-5, lambda sigma: Step(sampling_rate=0.0244, noise_multiplier=sigma), 410), 2)
    0.68
    """
    require_target(target_epsilon)
    cost = partial(_cost_of(event_of, num_steps, delta, adjacency), False)
    coarse = cost(_COARSE, _MOST_NOISE) < target_epsilon / 10  # else the target is finer than the coarse grid
    width = _COARSE if coarse else DISCRETIZATION
    if cost(width, _MOST_NOISE) > target_epsilon:
        return math.inf
    if chance_to_enter(merge([(event_of(1.0), num_steps)])) <= delta:
        return MIN_NOISE  # any noise would do
    return solve(partial(cost, width), target_epsilon, 1.0, tolerance=2e-3)


def _cost_of(
    event_of: Callable[[float], Event], num_steps: int, delta: float, adjacency: str
) -> Callable[[bool, float, float], float]:
    """Return ε as a function of whether truncation counts, the width of the grid, and σ."""

    def cost(truncated: bool, discretization: float, sigma: float) -> float:
        history: History = [(event_of(sigma), num_steps)]
        return epsilon(history if truncated else untruncated(history), delta, adjacency, discretization)

    return cost


def _check_reachable(target_epsilon: float, exact: Callable[[float], float]) -> None:
    """Raise when even a noise multiplier of 1000 costs more than the target."""
    least = exact(_MOST_NOISE)
    if least > target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} cannot be reached: at a noise multiplier of {_MOST_NOISE:g} the run "
            f"still costs ε = {format_epsilon(least)}. Take fewer steps, a smaller expected_batch_size, or a larger "
            "max_batch_size"
        )


def solve(cost: Callable[[float], float], target: float, start: float, tolerance: float) -> float:
    """Return a σ whose cost is in [target * (1 - tolerance), target], for a cost that falls as σ rises.

    Secant steps in log σ and log ε, where the curve is almost straight, kept inside a bracket.
    """
    aim = math.log(target * (1 - tolerance / 2))
    low, high = -math.inf, math.inf  # log σ: too little noise, enough noise
    points: list[tuple[float, float]] = []
    at = math.log(start)
    for _ in range(200):
        value = cost(math.exp(at))
        if target * (1 - tolerance) <= value <= target or (value <= target and high - low < 1e-9):
            return math.exp(at)
        low, high = (at, high) if value > target else (low, at)
        if 0 < value < math.inf:
            points = [*points[-1:], (at, math.log(value))]
        elif value == math.inf:
            points = []
        slope = -1.5
        if len(points) == 2 and points[0][0] != points[1][0]:
            slope = min(-0.2, (points[1][1] - points[0][1]) / (points[1][0] - points[0][0]))
        step = (aim - points[-1][1]) / slope if points else 1.0
        at = at + min(1.5, max(-1.5, step))
        if not low < at < high:
            at = (low + high) / 2 if math.isfinite(low + high) else (low + 0.7 if high == math.inf else high - 0.7)
        if high - low < 1e-9:
            at = high
    raise ArithmeticError(f"no noise multiplier found for a cost of {target}: the cost does not fall as noise rises")
