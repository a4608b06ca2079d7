"""A fast search for the least noise at every point of a grid of batch sizes and steps.

Place in the flow: below `dpllm.planning.sweep`, above accounting. The calibration of a point starts at the result of
its neighbours, so it computes two or three values of ε instead of ten. ε itself comes from accounting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import DISCRETIZATION, epsilon
from dpllm.privacy.calibration import calibrate_noise_multiplier
from dpllm.privacy.rounding import format_epsilon

TOLERANCE = 0.01
"""ε of a point is at most this share below the target."""

_COARSE = 1e-3
_COARSE_FROM = 0.5  # a smaller target is searched only on the fine grid
_MOST_NOISE = 1000.0


@dataclass(frozen=True)
class Budget:
    """The ε and δ that a run may cost, and the number of its units."""

    target: float
    """The ε that the whole run may cost."""
    delta: float
    num_units: int
    adjacency: str

    def epsilon(self, batch_size: int, num_steps: int, sigma: float, width: float) -> float:
        """Return ε of a run without truncation, on a grid of privacy losses of the given width."""
        step = Step(sampling_rate=batch_size / self.num_units, noise_multiplier=sigma)
        return epsilon([(step, num_steps)], self.delta, self.adjacency, width)


@dataclass(frozen=True)
class Noise:
    """σ and its ε, or the reason why there is none."""

    sigma: float | None
    epsilon: float | None
    reason: str | None = None
    coarse: bool = False
    """Whether the search was done on the coarse grid."""
    slope: float = -1.3
    """d log ε / d log σ at the end of the search."""


def calibrate_grid(
    budget: Budget, sizes: Sequence[tuple[int, int]], near: tuple[int, int]
) -> dict[tuple[int, int], Noise]:
    """Return the least σ of every (b, T), searched outwards from the point `near`.

    Guarantee: ``budget.epsilon`` of every point with its σ, on accounting's own grid of losses, is at most the target,
    and at most 1 % below it.
    """
    found: dict[tuple[int, int], Noise] = {}
    solved: list[tuple[float, float, float, float]] = []  # log b, log T, log σ, slope
    coarse = budget.target >= _COARSE_FROM
    for size in sorted(sizes, key=lambda item: _distance(np.log(item), np.log(near))):
        noise = least_noise(budget, *size, _expected(np.log(size), solved), coarse)
        found[size] = noise
        if noise.sigma is not None:
            solved.append((math.log(size[0]), math.log(size[1]), math.log(noise.sigma), noise.slope))
    return found


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).sum())


def _expected(at: np.ndarray, solved: Sequence[tuple[float, float, float, float]]) -> Noise:
    """Return a guess of σ and slope at (log b, log T), from the nearest solved point and a plane through five."""
    if not solved:
        return Noise(1.0, None)
    close = np.array(sorted(solved, key=lambda item: _distance(at, np.array(item[:2])))[:5])
    plane = np.linalg.lstsq(close[:, :2] - close[0, :2], close[:, 2] - close[0, 2], rcond=1e-9)[0]
    change = np.clip(plane @ (at - close[0, :2]), -1, 1)
    return Noise(math.exp(close[0, 2] + change), None, slope=float(close[0, 3]))


def least_noise(budget: Budget, batch_size: int, num_steps: int, start: Noise, coarse: bool) -> Noise:
    """Return the least σ of one point, searched from the σ and the slope of `start`.

    With `coarse` the search uses a grid of losses of width 1e-3, and its result is kept if it is good enough on
    accounting's own grid. Over many steps, or for a small target, it gives too much noise, and the search continues on
    the fine grid. If no σ up to 1000 is enough, or accounting cannot certify the setting, the result has a reason
    instead of a σ.
    """

    def on(width: float) -> Callable[[float], float]:
        return lambda sigma: budget.epsilon(batch_size, num_steps, sigma, width)

    try:
        if coarse:
            found = _solve(on(_COARSE), budget.target, start)
            if found.sigma is not None:
                start, value = found, on(DISCRETIZATION)(found.sigma)
                if budget.target * (1 - TOLERANCE) <= value <= budget.target:
                    return dataclasses.replace(found, epsilon=value, coarse=True)
        return _solve(on(DISCRETIZATION), budget.target, start)
    except ValueError as error:
        return Noise(None, None, str(error))


def refined(budget: Budget, batch_size: int, num_steps: int, coarse: Noise) -> Noise:
    """Return σ of a point, calibrated as for a plan without truncation; never larger than that of `coarse`."""
    rate = batch_size / budget.num_units
    sigma = calibrate_noise_multiplier(budget.target, budget.delta, rate, num_steps, adjacency=budget.adjacency)
    if coarse.sigma is not None and coarse.sigma <= sigma:
        return coarse
    return Noise(sigma, budget.epsilon(batch_size, num_steps, sigma, DISCRETIZATION))


def _solve(cost: Callable[[float], float], target: float, start: Noise) -> Noise:
    """Return a σ whose cost is at most half a percent below the target, by secant steps in log σ and log ε."""
    aim, most = math.log(target * (1 - TOLERANCE / 4)), math.log(_MOST_NOISE)
    low, high = -math.inf, most  # log σ: too little noise, enough noise
    best = Noise(None, None)
    last: tuple[float, float] | None = None
    at, slope = min(math.log(start.sigma or 1.0), most), start.slope
    for _ in range(200):
        value = cost(math.exp(at))
        if value <= target:
            high, best = at, Noise(math.exp(at), value, slope=slope)
        elif at >= most:
            reason = f"at a noise multiplier of {_MOST_NOISE:g} the run still costs ε = {format_epsilon(value)}"
            return Noise(None, None, reason)
        else:
            low = at
        # The cost jumps when σ is so small that accounting widens its grid; there the bracket closes on the jump.
        if best.sigma is not None and (target * (1 - TOLERANCE / 2) <= value <= target or high - low < 1e-7):
            return best
        move = 1.0  # out of an infinite ε
        if math.isfinite(value):
            if last is not None and last[0] != at:
                slope = min(-0.2, (math.log(value) - last[1]) / (at - last[0]))
            last = (at, math.log(value))
            move = min(1.5, max(-1.5, (aim - last[1]) / slope))
        at += move
        if not low < at < high:
            at = most if best.sigma is None else (low + high) / 2 if low > -math.inf else high - 0.7
    raise ArithmeticError(f"no noise multiplier found for a cost of {target}: the cost does not fall as noise rises")
