"""From the steps that ran to (ε, δ), and from a target ε to the noise.

Place in the flow: the plan asks it for σ, the report asks it for the ε of the ledger. Every number is computed with
privacy loss distributions (Koskela et al., arXiv:1906.03049; "connect the dots" discretization, arXiv:2207.04380, which
only ever errs upwards) through the library dp_accounting, for a Gaussian sum over a truncated Poisson sample
(arXiv:2508.15089). Nothing here sees private data.

Two adjacencies. *zero-out*: a unit's contribution is replaced by nothing while the public number of units stays.
*replace-one*: a unit is replaced by any other.

A *history* is a list of (`Step`, count) pairs; the order does not matter.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
from scipy import optimize, stats

from dpllm.config import ADJACENCIES, MAX_NOISE, MAX_ROWS_DRAWN_PER_UNIT, MAX_TARGET_EPSILON, MAX_UNITS, MIN_NOISE
from dpllm.config.train_values import MAX_STEPS
from dpllm.mechanism.sampling import default_max_batch_size
from dpllm.privacy import pld

DISCRETIZATION = 1e-4
"""Width of the grid of privacy losses on which ε is reported."""
TOOL = "dp_accounting"

_COARSE = 1e-3
_MAX_ONE_STEP_BUCKETS = 2_000_000
_MAX_COMPOSED_BUCKETS = 30_000_000
_TRUNCATION_COST = 1e-3
_MOST_NOISE = 1000.0


def tool_version() -> str:
    """Return the version of the library that computes the privacy loss distributions."""
    return importlib.metadata.version(TOOL)


@dataclass(frozen=True)
class Step:
    """What of one step its privacy depends on.

    Raises:
        ValueError: a field is out of range.
    """

    num_units: int | None
    """N, public. None when unknown; then there is no truncation either."""
    sampling_rate: float
    """q, the probability that a unit enters the step."""
    max_batch_size: int | None
    """B_max, units that stay at most. None: plain Poisson sampling."""
    noise_multiplier: float
    """σ, standard deviation of the noise over `clip_norm`; 0 means no privacy."""
    clip_norm: float = 1.0
    """C. ε does not depend on it; the ledger keeps it with the step."""
    rows_per_unit: int = 1
    """k, how many rows of one unit are drawn, and clipped, each by itself; 1 when units are drawn."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        if not isinstance(self.noise_multiplier, float):
            raise ValueError(
                f"noise_multiplier must be a float, got {self.noise_multiplier!r} "
                f"({type(self.noise_multiplier).__name__}): with other kinds of numbers accountants are known to leave "
                "out terms of a composition. Write 1.0 for 1"
            )
        for name in ("sampling_rate", "noise_multiplier", "clip_norm"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate must be above 0 and at most 1, got {self.sampling_rate}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be at least 0 and finite, got {self.noise_multiplier}")
        if self.noise_multiplier > MAX_NOISE or 0 < self.noise_multiplier < MIN_NOISE:
            raise ValueError(
                f"noise_multiplier must be 0 or between {MIN_NOISE:g} and {MAX_NOISE:g}, got {self.noise_multiplier:g}"
            )
        if not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm must be above 0 and finite, got {self.clip_norm}")
        if self.num_units is not None and not 1 <= self.num_units <= MAX_UNITS:
            raise ValueError(f"num_units must be at least 1, and at most {MAX_UNITS:,}, got {self.num_units}")
        if self.max_batch_size is not None:
            if self.num_units is None:
                raise ValueError("max_batch_size needs num_units: how often truncation strikes depends on both")
            if self.max_batch_size < 1:
                raise ValueError(f"max_batch_size must be at least 1, got {self.max_batch_size}")
        if self.rows_per_unit < 1:
            raise ValueError(f"rows_per_unit must be at least 1, got {self.rows_per_unit}")
        if self.rows_per_unit > MAX_ROWS_DRAWN_PER_UNIT:
            raise ValueError(
                f"rows_per_unit must be at most {MAX_ROWS_DRAWN_PER_UNIT:,}, got {self.rows_per_unit}: the cost of "
                "more rows of one unit is not computed within seconds. Take fewer rows of a unit"
            )
        if self.rows_per_unit > 1 and self.max_batch_size is not None:
            raise ValueError(
                "max_batch_size truncates a sample of units; there is no accounting for a truncated sample of rows. "
                "Leave max_batch_size out"
            )


History = Sequence[tuple[Step, int]]
_Merged = tuple[tuple[Step, int], ...]


def epsilon(
    history: History, delta: float, adjacency: str = "zero-out", discretization: float = DISCRETIZATION
) -> float:
    """Return the ε for which the history is (ε, δ)-differentially private.

    Guarantee: an upper bound. The discretization rounds privacy losses up; the composition is tilted towards the ε in
    question, so that its rounding errors are small against δ, and they are added to δ
    (`dpllm.privacy.pld.Composition`). After a step the result is never 0: an ε below the resolution is given as the
    resolution. Repeated calls on a growing history are cheap, since the distribution of one step is kept.

    Under replace-one, units of several rows drawn singly (``rows_per_unit`` above 1) have no distribution of their own.
    Replacing a unit is removing one and adding another, so ε there is twice an ε' of zero-out whose δ', times
    1 + exp(ε'), is δ (group privacy; Dwork and Roth 2014, theorem 2.2 and its proof for δ > 0).

    Args:
        history: (step, count) pairs; counts of 0 are allowed.
        delta: δ, between 0 and 1.
        adjacency: "zero-out" or "replace-one".
        discretization: width of the grid of privacy losses. `discretization_used` says when a wider one was needed.

    Returns:
        ε; 0.0 for a history without steps; inf when a step has no noise, or no ε holds at this δ.

    Raises:
        ValueError: δ is out of range, or below what is cut off the tails of so many steps.

    >>> step = Step(num_units=None, sampling_rate=0.02, max_batch_size=None, noise_multiplier=1.0)
    >>> round(epsilon([(step, 1500)], delta=1e-5), 3)
    4.814
    """
    return epsilon_curve(history, [delta], adjacency, discretization)[0][1]


def epsilon_curve(
    history: History, deltas: Iterable[float], adjacency: str = "zero-out", discretization: float = DISCRETIZATION
) -> list[tuple[float, float]]:
    """Return (δ, ε) pairs of one history; see `epsilon`."""
    merged = merge(history)
    return [(delta, _epsilon(merged, delta, adjacency, discretization)) for delta in map(float, deltas)]


def delta(
    history: History, epsilon: float, adjacency: str = "zero-out", discretization: float = DISCRETIZATION
) -> float:
    """Return the δ for which the history is (ε, δ)-differentially private; an upper bound, as in `epsilon`.

    Args:
        history: (step, count) pairs.
        epsilon: ε >= 0.
        adjacency: "zero-out" or "replace-one".
        discretization: width of the grid of privacy losses.

    Returns:
        δ between 0 and 1; 0.0 for a history without steps.

    Raises:
        ValueError: ε is negative.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon}")
    return delta_function(history, adjacency, discretization)(float(epsilon))


def delta_function(
    history: History, adjacency: str = "zero-out", discretization: float = DISCRETIZATION, tilted: bool = True
) -> Callable[[float], float]:
    """Return the function from ε >= 0 to δ; each of its values is an upper bound.

    Args:
        history: (step, count) pairs.
        adjacency: "zero-out" or "replace-one".
        discretization: width of the grid of privacy losses.
        tilted: compose anew for each ε, so that the rounding error is small against any δ. Otherwise once, and rounding
            adds T 2**-50 to every δ; for many values at once.
    """
    merged = merge(history)
    _check_adjacency(adjacency)
    if not merged:
        return lambda _: 0.0
    if any(_is_bare(step) for step, _ in merged):
        return lambda _: 1.0
    if _by_group_privacy(merged, adjacency):
        single = delta_function(merged, "zero-out", discretization, tilted)
        return lambda epsilon: min(1.0, (1 + math.exp(min(700.0, epsilon / 2))) * single(epsilon / 2))
    directions = _parts(merged, adjacency, discretization_used(merged, adjacency, discretization))
    if not tilted:
        composed = [pld.compose(parts) for parts in directions]
        return lambda epsilon: max(one.delta(epsilon) for one in composed)
    return lambda epsilon: max(
        pld.compose(parts, pld.tilt_for(parts, epsilon=epsilon)).delta(epsilon) for parts in directions
    )


def merge(history: History) -> _Merged:
    """Return the history with equal steps counted together, in a fixed order, whatever their clip norm.

    Raises:
        ValueError: a count is negative, or there are more than `MAX_STEPS` steps.
    """
    counts: dict[Step, int] = {}
    for step, count in history:
        if count < 0:
            raise ValueError(f"a step can't have run {count} times")
        key = dataclasses.replace(step, clip_norm=1.0)
        if count:
            counts[key] = counts.get(key, 0) + count
    if (total := sum(counts.values())) > MAX_STEPS:
        raise ValueError(
            f"{total:,} steps are more than {MAX_STEPS:,}: their cost is not computed within seconds. Take fewer steps"
        )
    return tuple(sorted(counts.items(), key=lambda item: str(item[0])))


@lru_cache(maxsize=256)
def _epsilon(merged: _Merged, delta: float, adjacency: str, discretization: float) -> float:
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")
    _check_adjacency(adjacency)
    if not merged:
        return 0.0
    if any(_is_bare(step) for step, _ in merged):
        return math.inf
    num_steps = sum(count for _, count in merged)
    if num_steps * pld.STEP_TAIL > delta / 100:
        raise ValueError(
            f"delta={delta:g} can't be certified over {num_steps} steps: what is cut off their tails may come to "
            f"{num_steps * pld.STEP_TAIL:.1e}. Take a larger delta; one below {num_steps * pld.STEP_TAIL * 100:.1e} "
            "protects nobody better"
        )
    width = discretization_used(merged, adjacency, discretization)
    if _by_group_privacy(merged, adjacency):
        value = 2 * _epsilon_of_half(merged, delta, width)
    else:
        value = _tilted_epsilon(_parts(merged, adjacency, width), delta)
    return max(value, width)


def _tilted_epsilon(directions: list[list[tuple[pld.LossPmf, int]]], delta: float) -> float:
    return max(
        _smallest_epsilon(pld.compose(parts, pld.tilt_for(parts, delta=delta)).delta, delta) for parts in directions
    )


def _epsilon_of_half(merged: _Merged, delta: float, discretization: float) -> float:
    """Return an ε' with (1 + exp(ε')) δ' <= δ under zero-out.

    From δ' = δ downwards, each time to the δ' that the last ε' would allow, and at last a little further.
    """
    directions = _parts(merged, "zero-out", discretization)
    log_delta = at = math.log(delta)
    for attempt in range(60):
        value = _tilted_epsilon(directions, math.exp(at))
        if not value < 700:
            return math.inf
        allowed = log_delta - math.log1p(math.exp(value))
        if at <= allowed:
            return value
        at = allowed - (1e-6 * 2**attempt if at - allowed < 1e-3 else 0.0)
    return math.inf


def _smallest_epsilon(delta_of: Callable[[float], float], delta: float) -> float:
    """Return the smallest ε whose δ is at most `delta`, rounded up by no more than 1e-8 or a billionth of it."""

    def excess(at: float) -> float:
        return math.log(max(delta_of(at), 1e-300)) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > 1e6:
            return math.inf
    root = float(optimize.brentq(excess, high / 2 if high > 1 else 0.0, high, xtol=1e-9, rtol=1e-12))
    rise = 2e-9 + 2e-12 * root
    while excess(root) > 0:
        root, rise = root + rise, 2 * rise
    return root


def _check_adjacency(adjacency: str) -> None:
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(map(repr, ADJACENCIES))}, got {adjacency!r}")


def _by_group_privacy(merged: History, adjacency: str) -> bool:
    return adjacency == "replace-one" and any(step.rows_per_unit > 1 for step, _ in merged)


def _parts(merged: _Merged, adjacency: str, discretization: float) -> list[list[tuple[pld.LossPmf, int]]]:
    """Return for each direction of the adjacency what its privacy loss is the sum of."""
    directions: list[list[tuple[pld.LossPmf, int]]] = []
    for step, count in merged:
        if step.sampling_rate == 1 and not _truncates(step):
            # Without sampling, T Gaussian sums are one with T times less variance, exactly.
            sigma = step.noise_multiplier / (step.rows_per_unit * math.sqrt(count))
            step, count = Step(None, 1.0, None, sigma), 1
        pmfs = _one_step(step, adjacency, discretization)
        directions = directions or [[] for _ in pmfs]
        for direction, pmf in zip(directions, pmfs, strict=True):
            direction.append((pmf, count))
    return directions


def _is_bare(step: Step) -> bool:
    """Return whether a step has no noise, or so little for the rows of a unit that no ε is computed: inf is true."""
    return step.noise_multiplier < MIN_NOISE * step.rows_per_unit


def _truncates(step: Step) -> bool:
    return step.max_batch_size is not None and step.num_units is not None and step.max_batch_size < step.num_units


@lru_cache(maxsize=32)
def _one_step(step: Step, adjacency: str, discretization: float) -> tuple[pld.LossPmf, ...]:
    """Return the loss distributions of one step: of removing and of adding a unit, or of replacing one.

    With truncation they are those that dp_accounting gives its TruncatedSubsampledGaussianDpEvent (arXiv:2508.15089): a
    mixture of the plain Poisson pair (when the batch is not truncated) and the replace-one pair at σ/2 (when it is,
    since the unit may push another one out).
    """
    sigma, rate = step.noise_multiplier, step.sampling_rate
    pairs = (AdjacencyType.REPLACE,) if adjacency == "replace-one" else (AdjacencyType.REMOVE, AdjacencyType.ADD)
    if step.rows_per_unit > 1:
        return tuple(pld.sampled_rows(sigma, rate, step.rows_per_unit, pair, discretization) for pair in pairs)
    plain = tuple(pld.sampled_gaussian(sigma, rate, pair, discretization) for pair in pairs)
    if step.max_batch_size is None or step.num_units is None or not _truncates(step):
        return plain
    truncated = float(stats.binom.sf(step.max_batch_size - 1, step.num_units - 1, rate))
    # The chance that the unit is in the batch, given that the others alone would fill it.
    over = float(stats.binom.sf(step.max_batch_size, step.num_units, rate))
    if truncated == 0 or over == 0:
        return plain
    rate_if_truncated = min(1.0, over * step.max_batch_size / truncated / step.num_units)
    rare = pld.sampled_gaussian(sigma / 2, rate_if_truncated, AdjacencyType.REPLACE, discretization, truncated)
    return tuple(pld.mixture(rare, part, truncated) for part in plain)


def discretization_used(history: History, adjacency: str = "zero-out", discretization: float = DISCRETIZATION) -> float:
    """Return the grid width that is used when `discretization` is asked for.

    It is the one asked for unless σ is so small that a grid that fine would not fit into memory; then it is doubled
    until it does. A wider grid gives a larger ε, never a smaller one.
    """
    return max(
        (_width(step, count, adjacency, discretization) for step, count in merge(history)), default=discretization
    )


def _width(step: Step, count: int, adjacency: str, discretization: float) -> float:
    sigma = step.noise_multiplier
    if sigma == 0:
        return discretization
    if step.sampling_rate == 1 and not _truncates(step):
        sigma, count = sigma / math.sqrt(count), 1
    if step.rows_per_unit > 1:
        sigma, adjacency = sigma / step.rows_per_unit, "zero-out"
    widest = sigma / 2 if _truncates(step) or adjacency == "replace-one" else sigma
    # exp(-50) of the mass lies beyond 10 standard deviations; both signs of the loss.
    loss_range = 2 * (0.5 / widest**2 + 10 / widest)
    spread = 20 * math.sqrt(count) * _loss_deviation(sigma, step.sampling_rate)
    if adjacency == "replace-one":
        spread *= 2
    width = discretization
    while loss_range / width > _MAX_ONE_STEP_BUCKETS or (3 * loss_range + spread) / width > _MAX_COMPOSED_BUCKETS:
        width *= 2
    return width


def _loss_deviation(sigma: float, sampling_rate: float) -> float:
    """Return about the standard deviation of one step's privacy loss, by sums over a grid of outcomes."""
    outcomes = np.linspace(-8 * sigma, 1 + 8 * sigma, 4001)
    exponent = (outcomes - 0.5) / sigma**2
    sampled = sampling_rate * stats.norm.pdf(outcomes, 1, sigma)
    weight = (1 - sampling_rate) * stats.norm.pdf(outcomes, 0, sigma) + sampled
    loss = exponent
    if sampling_rate < 1:
        log_rest = math.log1p(-sampling_rate)
        loss = np.logaddexp(log_rest, math.log(sampling_rate) + exponent)
    weight /= weight.sum()
    mean = float(weight @ loss)
    return math.sqrt(float(weight @ (loss - mean) ** 2))


def steps_within(
    target_epsilon: float,
    delta: float,
    step: Step,
    num_steps: int,
    adjacency: str = "zero-out",
    before: History = (),
) -> int:
    """Return how many of `num_steps` equal steps keep a history to a target ε: the next one would exceed it.

    By bisection on a coarse grid, which takes a tenth of the time, and then around what it finds.

    Args:
        target_epsilon: what all steps together may cost.
        delta: δ.
        step: the step that is to be taken.
        num_steps: how often, at most.
        adjacency: "zero-out" or "replace-one".
        before: (step, count) pairs that have run already.

    >>> steps_within(4.0, 1e-5, Step(None, 0.02, None, 1.0), 1500)
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
    num_steps: int,
    noise_multiplier: float,
    delta: float,
    adjacency: str = "zero-out",
) -> int:
    """Return the smallest max_batch_size of the rule b + 7 sqrt(b), b + 8 sqrt(b), ... that costs nothing.

    Nothing means: ε is less than 1e-3 above that of the same run without truncation, at a coarse discretization.

    >>> choose_max_batch_size(1024, num_units=42000, num_steps=410, noise_multiplier=0.68, delta=1e-6)
    1248
    """
    size = default_max_batch_size(expected_batch_size, num_units)
    rate = expected_batch_size / num_units
    if noise_multiplier == 0:
        return size
    plain = epsilon([(Step(num_units, rate, None, noise_multiplier), num_steps)], delta, adjacency, _COARSE)
    while size < num_units and math.isfinite(plain):
        step = Step(num_units, rate, size, noise_multiplier)
        if epsilon([(step, num_steps)], delta, adjacency, _COARSE) < plain + _TRUNCATION_COST:
            break
        size = min(num_units, size + math.ceil(math.sqrt(expected_batch_size)))
    return size


def require_target(target_epsilon: float, name: str = "target_epsilon") -> None:
    """Refuse an ε that no run or budget can have as its target.

    Args:
        target_epsilon: ε.
        name: of the option, for the message.

    Raises:
        ValueError: it is not above 0, not finite, or larger than is computed within seconds.

    >>> require_target(8.0)
    """
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {target_epsilon}")
    if target_epsilon > MAX_TARGET_EPSILON:
        raise ValueError(
            f"{name} must be at most {MAX_TARGET_EPSILON:g}, got {target_epsilon:g}: noise is not calibrated "
            "to more within seconds, and a larger ε protects nobody. Take one below 10"
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
    """Return the smallest noise multiplier, to about 1e-4 of it, with which the run costs at most `target_epsilon`.

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
        ValueError: no noise multiplier reaches the target; the message says what is reachable.

    >>> sigma = calibrate_noise_multiplier(8, delta=1e-5, sampling_rate=0.0244, num_steps=410)
    >>> round(sigma, 2)
    0.68
    """
    require_target(target_epsilon)
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")

    def cost(truncated: bool, discretization: float, sigma: float) -> float:
        step = Step(num_units, sampling_rate, max_batch_size if truncated else None, sigma, rows_per_unit=rows_per_unit)
        return epsilon([(step, num_steps)], delta, adjacency, discretization)

    exact = partial(cost, True, DISCRETIZATION)
    _check_reachable(target_epsilon, exact)
    enters = -math.expm1(num_steps * rows_per_unit * math.log1p(-sampling_rate)) if sampling_rate < 1 else 1.0
    if enters <= delta and exact(least := MIN_NOISE * rows_per_unit) <= target_epsilon:
        return least  # any noise would do
    # The exact cost takes seconds where σ is small. A cheap cost has nearly its shape, so σ is found on the cheap one
    # and the small gap between the two is measured there, again and again until the exact cost meets the target.
    cheap: Callable[[float], float] = partial(cost, False, DISCRETIZATION)
    start, gap = 1.0, 0.0
    if cost(True, _COARSE, _MOST_NOISE) < target_epsilon / 2:  # else the target is finer than the coarse grid
        start = _solve(partial(cost, False, _COARSE), target_epsilon, start, tolerance=0.02)
        gap = cost(True, _COARSE, start) - cost(False, _COARSE, start)
        if gap > 0.02 * target_epsilon:  # truncation is a cost of its own; then only the truncated shape will do
            cheap, gap = partial(cost, True, _COARSE), 0.0
    sigma = start
    for _ in range(12):
        aim = target_epsilon * (1 - 3e-5)
        sigma = _solve(lambda s, gap=gap: cheap(s) + gap, aim, sigma, tolerance=1e-4)  # type: ignore[misc]
        reached = exact(sigma)
        if target_epsilon * (1 - 4e-4) <= reached <= target_epsilon:
            return sigma
        gap = reached - cheap(sigma)
        if not math.isfinite(gap):
            break
    return _solve(exact, target_epsilon, sigma, tolerance=1e-4)


def _check_reachable(target_epsilon: float, exact: Callable[[float], float]) -> None:
    """Raise when even a thousandfold noise costs more than the target."""
    least = exact(_MOST_NOISE)
    if least > target_epsilon:
        raise ValueError(
            f"target_epsilon={target_epsilon:g} can't be reached: at a noise multiplier of {_MOST_NOISE:g} the run "
            f"still costs ε={least:.3g}. Take fewer steps, a smaller expected_batch_size, or a larger max_batch_size"
        )


def _solve(cost: Callable[[float], float], target: float, start: float, tolerance: float) -> float:
    """Return a σ whose cost lies in [target * (1 - tolerance), target], for a cost that falls as σ rises.

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
