"""Compute (ε, δ) of the steps that ran.

Calibration uses it to find σ, and the report to compute the ledger's ε. Every number is computed with privacy loss
distributions (Koskela et al., arXiv:1906.03049; "connect the dots" discretization, arXiv:2207.04380,
which only ever errs upwards) through the library dp_accounting, for a Gaussian sum over a truncated Poisson sample
(arXiv:2508.15089). Nothing here sees private data.

A *history* is a list of (event, count) pairs (`dpllm.mechanism.events`). Each pair means `count` consecutive steps,
which start with the first step of a run or of a resume. The order of the pairs does not matter.

A `Guarantee` computes ε from the history that it holds, so the ε cannot belong to different steps, a different δ or a
different adjacency.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import dp_accounting
from dp_accounting import dp_event
from scipy import optimize

from dpllm.config.versions import installed_version
from dpllm.mechanism import pld
from dpllm.mechanism.events import Event, Round, Step
from dpllm.mechanism.limits import ADJACENCIES, MAX_STEPS
from dpllm.mechanism.parts import Mechanism
from dpllm.privacy.rounding import format_delta, format_epsilon

DISCRETIZATION = 1e-4
"""Width of the grid of privacy losses for an ε between 0.1 and 100, and the smallest ε that is stated."""
_LEAST_WIDTHS, _MOST_WIDTHS = 1000, 500_000  # grid widths per ε, on the grid that follows its scale
TOOL = "dp_accounting"


def tool_version() -> str:
    """Return the version of the library that computes the privacy loss distributions."""
    return str(installed_version(TOOL))


History = Sequence[tuple[Event | Mechanism | dp_accounting.DpEvent, int]]
"""(event, count) pairs: `count` consecutive steps of an event or a mechanism of dpllm, or an event of dp_accounting."""
_Merged = tuple[tuple[Round, int], ...]


def epsilon(history: History, delta: float, adjacency: str = "zero-out", discretization: float | None = None) -> float:
    """Return the ε for which the history is (ε, δ)-differentially private.

    Guarantee: an upper bound. The discretization rounds privacy losses up. The composition is tilted towards the
    wanted ε, so that its rounding errors are small compared with δ, and they are added to δ
    (`dpllm.mechanism.pld.Composition`). After a step the result is never 0: an ε below `DISCRETIZATION` is returned as
    that number. Repeated calls on a growing history are cheap, because the distribution of one step is cached.

    The grid follows the scale of ε, since losses as small as a grid step are rounded up to several times their size: an
    ε below 0.1 is computed again on finer grids until it has 1,000 widths or they would need too much memory, and one
    above 100 on a grid of which it has at least 500,000 widths, where a finer one would take seconds.

    Under replace-one, units of several rows drawn singly (`StepOfRows`) have no distribution of their own.
    Replacing a unit is removing one and adding another, so ε there is twice an ε' of zero-out whose δ', times
    1 + exp(ε'), is δ (group privacy; Dwork and Roth 2014, theorem 2.2 and its proof for δ > 0).

    Args:
        history: (event, count) pairs, of events, mechanisms, or events of dp_accounting; counts of 0 are allowed.
        delta: δ, between 0 and 1.
        adjacency: "zero-out" or "replace-one".
        discretization: width of the grid of privacy losses, which is then the smallest ε that is returned. None: it
            follows the scale of ε. `discretization_used` returns the width that was used.

    Returns:
        ε; 0.0 for a history without steps; inf when a step has no noise, or no ε holds at this δ.

    Raises:
        ValueError: δ is out of range, or too close to the mass that is cut off the tails of this many steps.

    >>> from dpllm import Step
    >>> step = Step(sampling_rate=0.02, noise_multiplier=1.0)
    >>> round(epsilon([(step, 1500)], delta=1e-5), 3)
    4.814
    """
    return epsilon_curve(history, [delta], adjacency, discretization)[0][1]


def epsilon_curve(
    history: History, deltas: Iterable[float], adjacency: str = "zero-out", discretization: float | None = None
) -> list[tuple[float, float]]:
    """Return (δ, ε) pairs of one history; see `epsilon`."""
    merged = merge(history)
    return [(delta, _epsilon(merged, delta, adjacency, discretization)) for delta in map(float, deltas)]


def delta(
    history: History, epsilon: float, adjacency: str = "zero-out", discretization: float = DISCRETIZATION
) -> float:
    """Return the δ for which the history is (ε, δ)-differentially private; an upper bound, as in `epsilon`.

    Args:
        history: (event, count) pairs.
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
        history: (event, count) pairs.
        adjacency: "zero-out" or "replace-one".
        discretization: width of the grid of privacy losses.
        tilted: whether to compose again for each ε, so that the rounding error is small compared with any δ. False:
            compose once, and rounding adds T 2**-50 to every δ; use it for many values at once.
    """
    merged = merge(history)
    _check_adjacency(adjacency)
    if not merged:
        return lambda _: 0.0
    if any(one.is_bare for one, _ in merged):
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
    """Return the rounds that make up a history, with equal rounds counted together, in a fixed order.

    Raises:
        ValueError: a count is not a whole number of at least 0, or there are more than `MAX_STEPS` steps.
        TypeError: it is not a list of pairs, or holds something that is neither an event nor a mechanism.
    """
    try:
        pairs = [(what, count) for what, count in history]
    except (TypeError, ValueError) as error:
        raise TypeError(
            "a history is a list of (event, count) pairs, for instance [(event, 1500)] or mechanism.history(1500), got "
            f"{type(history).__name__}"
        ) from error
    steps = [(event, whole_count(number)) for what, count in pairs for event, number in _steps(what, count)]
    counts: dict[Round, int] = {}
    for step, number in steps:
        for one, count in step.rounds(number) if number else ():
            counts[one] = counts.get(one, 0) + count
    if (total := sum(number for _, number in steps)) > MAX_STEPS:
        raise ValueError(
            f"{total:,} steps exceed the limit of {MAX_STEPS:,}, since their ε takes too long. Use fewer steps"
        )
    return tuple(sorted(counts.items(), key=lambda item: str(item[0])))


def _steps(what: Event | Mechanism | dp_accounting.DpEvent, count: int) -> list[tuple[Event, int]]:
    num_steps = whole_count(count)
    if isinstance(what, dp_accounting.DpEvent):
        return from_dp_event(what, num_steps) if num_steps else []
    if isinstance(what, Mechanism):
        return what.history(num_steps)
    if isinstance(what, type) or not callable(getattr(what, "rounds", None)):
        raise TypeError(
            f"a history holds events or mechanisms, got {type(what).__name__}. Pass (event, count) pairs; a plan's "
            "event is plan.event"
        )
    return [(what, num_steps)]


def _epsilon(merged: _Merged, delta: float, adjacency: str, discretization: float | None) -> float:
    _check(merged, delta, adjacency)
    if not merged:
        return 0.0
    if discretization is None:
        return max(_on_its_scale(merged, delta, adjacency)[0], DISCRETIZATION)
    width = discretization_used(merged, adjacency, discretization)
    return max(_on_a_grid(merged, delta, adjacency, width), width)


@lru_cache(maxsize=256)
def _on_its_scale(merged: _Merged, delta: float, adjacency: str) -> tuple[float, float]:
    """Return ε, without a floor, on the grid that follows its scale, and the requested width of this grid."""

    def computed(width: float) -> float:
        return _on_a_grid(merged, delta, adjacency, discretization_used(merged, adjacency, width))

    def fits(width: float, times: int) -> bool:
        """Return whether a grid that is finer by a factor would fit in memory as well."""
        finer = discretization_used(merged, adjacency, width / times)
        return finer * times <= discretization_used(merged, adjacency, width)

    width = DISCRETIZATION
    if any(one.is_bare for one, _ in merged):
        return math.inf, width
    if not fits(width, 2):  # it takes seconds, so first check whether a wider grid suffices
        rough = computed(64 * width)
        while 2 * _MOST_WIDTHS * width <= rough < math.inf and width < 16 * DISCRETIZATION:
            width *= 2
    found = computed(width)
    while DISCRETIZATION < found < _LEAST_WIDTHS * width:
        halvings = math.ceil(math.log2(4 * _LEAST_WIDTHS * width / found))  # two more, since this ε is too large
        while halvings and not (fits(width, 2**halvings) and fits(width / 2**halvings, 8)):
            halvings -= 1
        if not halvings:
            break
        width /= 2**halvings
        found = min(found, computed(width))
    return found, width


def _check(merged: _Merged, delta: float, adjacency: str) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta}")
    _check_adjacency(adjacency)
    num_steps = sum(count for _, count in merged)
    if num_steps * pld.STEP_TAIL > delta / 100 and not any(one.is_bare for one, _ in merged):
        raise ValueError(
            f"delta={format_delta(delta)} cannot be certified over {num_steps} steps: the mass cut off from their "
            f"tails may be up to {format_delta(num_steps * pld.STEP_TAIL)}. Set a larger delta; below "
            f"{format_delta(num_steps * pld.STEP_TAIL * 100)}, a smaller delta protects nobody better"
        )


@lru_cache(maxsize=256)
def _on_a_grid(merged: _Merged, delta: float, adjacency: str, width: float) -> float:
    """Return ε on a grid that fits in memory; it may be 0."""
    if any(one.is_bare for one, _ in merged):
        return math.inf
    if _by_group_privacy(merged, adjacency):
        return 2 * _epsilon_of_half(merged, delta, width)
    return _tilted_epsilon(_parts(merged, adjacency, width), delta)


def _tilted_epsilon(directions: list[list[tuple[pld.LossPmf, int]]], delta: float) -> float:
    return max(
        _smallest_epsilon(pld.compose(parts, pld.tilt_for(parts, delta=delta)).delta, delta) for parts in directions
    )


def _epsilon_of_half(merged: _Merged, delta: float, discretization: float) -> float:
    """Return an ε' with (1 + exp(ε')) δ' <= δ under zero-out.

    Start at δ' = δ and decrease it: each time to the δ' that the last ε' allows, and at the end slightly further.
    """
    directions = _parts(merged, "zero-out", discretization)
    log_delta = at = math.log(delta)
    for attempt in range(60):
        if at < -700:  # δ' is below every number
            return math.inf
        value = _tilted_epsilon(directions, math.exp(at))
        if not value < 700:
            return math.inf
        allowed = log_delta - math.log1p(math.exp(value))
        if at <= allowed:
            return value
        at = allowed - (1e-6 * 2**attempt if at - allowed < 1e-3 else 0.0)
    return math.inf


def _smallest_epsilon(delta_of: Callable[[float], float], delta: float) -> float:
    """Return the smallest ε whose δ is at most `delta`, rounded up by at most 1e-8 or a billionth of it."""

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


def untruncated(history: History) -> list[tuple[Round, int]]:
    """Return the rounds of a history without truncation; rounds that are never truncated are returned unchanged."""
    return [(one.without_truncation, count) for one, count in merge(history)]


def of_starts(event: Event, counts: Sequence[int], planned: int | None = None) -> list[tuple[Event, int]]:
    """Return a run's steps by start, or its steps without a resume if these cost more.

    Noise that is correlated over all steps may cost less after a restart, since the steps of one start are not combined
    with those of another. But the moment of a resume may depend on the run's releases, and a mechanism's ε must cover
    its most expensive course. Gaussian sums over all units cost more, at every ε, the larger the sum of 1/σ² is. For
    other rounds, a restart never costs less than an uninterrupted run.

    Args:
        event: the event of each step.
        counts: number of steps of each start or resume.
        planned: number of steps without a resume. None: the total of all starts.
    """
    starts = [(event, count) for count in counts]
    whole = [(event, sum(counts) if planned is None else planned)]
    if len(starts) == 1:
        return starts
    costs = [_whole_cost(merge(history)) for history in (starts, whole)]
    return whole if costs[0] is not None and costs[1] is not None and costs[1] > costs[0] * (1 + 1e-12) else starts


def together(history: History) -> _Merged:
    """Return the rounds of a history; combine Gaussian sums over all units into one that costs the same.

    >>> from dpllm import Step
    >>> [(one, count)] = together([(Step(sampling_rate=1.0, noise_multiplier=sigma), 1) for sigma in (3.0, 4.0)])
    >>> round(one.noise_multiplier, 6), count
    (2.4, 1)
    """
    merged = merge(history)
    cost = _whole_cost(merged)
    if not cost or sum(count for _, count in merged) == 1:
        return merged
    ((one, _), *_) = merged
    return ((one.with_noise(1 / math.sqrt(cost)), 1),)


def _whole_cost(merged: _Merged) -> float | None:
    """Return the sum of 1/σ² of Gaussian sums over all units; None: there are other rounds, or none has noise."""
    plain = [(one.untruncated, count) for one, count in merged if not (one.truncates or one.is_bare)]
    if len(plain) < len(merged) or not all(one is not None and one.sampling_rate == 1 for one, _ in plain):
        return None
    return math.fsum(count / one.noise_multiplier**2 for one, count in plain if one is not None)


def _by_group_privacy(merged: _Merged, adjacency: str) -> bool:
    return not all(one.has_pair(adjacency) for one, _ in merged)


def _parts(merged: _Merged, adjacency: str, discretization: float) -> list[list[tuple[pld.LossPmf, int]]]:
    """Return, for each direction of the adjacency, the distributions whose sum is its privacy loss."""
    of_rounds = [one.parts(count, adjacency, discretization) for one, count in merged]
    return [list(direction) for direction in zip(*of_rounds, strict=True)]


def discretization_used(
    history: History,
    adjacency: str = "zero-out",
    discretization: float = DISCRETIZATION,
    delta: float | None = None,
) -> float:
    """Return the grid width that is used when `discretization` is requested, or for the ε at a δ.

    It is the requested width, unless σ is so small that a grid this fine would not fit into memory. Then the width is
    doubled until the grid fits. A wider grid gives a larger ε, never a smaller one.

    Args:
        history: (event, count) pairs.
        adjacency: "zero-out" or "replace-one".
        discretization: the requested width.
        delta: δ of an `epsilon` whose grid follows its scale; that scale then determines the requested width.
    """
    merged = merge(history)
    if delta is not None and merged:
        discretization = _on_its_scale(merged, delta, adjacency)[1]
    return max((one.grid(count, adjacency, discretization) for one, count in merged), default=discretization)


def from_dp_event(event: dp_accounting.DpEvent, count: int = 1) -> list[tuple[Event, int]]:
    """Return the steps that correspond to a dp_accounting event.

    Supported are Gaussian sums over all units or a Poisson sample of them, truncated or not, and their compositions.

    Args:
        event: an event of dp_accounting.
        count: how often it took place.

    Returns:
        (event, count) pairs: a history for `dpllm.epsilon`.

    Raises:
        ValueError: the event has a different kind, or a count is not a whole number of at least 0.

    >>> [(step, count)] = from_dp_event(
    ...     dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.0)), 1500)
    >>> step.sampling_rate, step.noise_multiplier, count
    (0.02, 1.0, 1500)
    """
    count = whole_count(count)
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return from_dp_event(event.event, count * whole_count(event.count))
    if isinstance(event, dp_event.ComposedDpEvent):
        return [pair for part in event.events for pair in from_dp_event(part, count)]
    if isinstance(event, dp_event.NoOpDpEvent):
        return []
    step = _step(event)
    if step is None:
        raise ValueError(
            f"{type(event).__name__} is not a Gaussian sum over all units or over a Poisson sample of them, so dpllm "
            "has no accounting for it. Use dp_accounting's own accountant, or describe the mechanism with "
            "dpllm.mechanism"
        )
    return [(step, count)]


def whole_count(count: Any) -> int:
    """Return how often a step ran.

    Raises:
        ValueError: it is not a whole number of at least 0.
    """
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"a step cannot run {count!r} times. Pass a whole number of at least 0")
    return number


def _step(event: dp_accounting.DpEvent) -> Step | None:
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return Step(sampling_rate=1.0, noise_multiplier=0.0)
    if isinstance(event, dp_event.GaussianDpEvent):
        return Step(sampling_rate=1.0, noise_multiplier=float(event.noise_multiplier))
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        sigma = float(event.event.noise_multiplier)
        return Step(sampling_rate=event.sampling_probability, noise_multiplier=sigma)
    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return Step(
            num_units=event.dataset_size,
            sampling_rate=event.sampling_probability,
            max_batch_size=event.truncated_batch_size,
            noise_multiplier=float(event.noise_multiplier),
        )
    return None


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(ε, δ)-differential privacy of what some steps release.

    >>> from dpllm import Step
    >>> steps = [(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)]
    >>> str(Guarantee(history=steps, delta=1e-5, adjacency="zero-out", unit="user"))
    'ε = 4.8137 at δ = 1e-05 (zero-out)'
    """

    history: History
    """(event, count) pairs: the steps."""
    delta: float
    """δ."""
    adjacency: str
    """Adjacency of the headline ε: "zero-out" or "replace-one"."""
    unit: str
    """"sequence" or "user"."""

    @cached_property
    def epsilon(self) -> float:
        """ε at δ under the headline's adjacency; an upper bound, inf without noise."""
        return self.under(self.adjacency)

    def under(self, adjacency: str) -> float:
        """Return ε at the same δ under "zero-out" or "replace-one"."""
        return epsilon(self.history, self.delta, adjacency)

    @property
    def by_adjacency(self) -> dict[str, float]:
        """ε at the same δ under each adjacency."""
        return {name: self.under(name) for name in ADJACENCIES}

    @property
    def other(self) -> str:
        """The adjacency that is not the headline's."""
        return next(name for name in ADJACENCIES if name != self.adjacency)

    @property
    def is_finite(self) -> bool:
        """Whether ε is finite."""
        return math.isfinite(self.epsilon)

    @property
    def one_unit(self) -> str:
        """The word for one unit: "record" or "user"."""
        return "record" if self.unit == "sequence" else "user"

    @property
    def num_steps(self) -> int:
        """Number of steps or answers in the history."""
        return sum(count for _, count in self.history)

    def of(self, history: History) -> Guarantee:
        """Return the guarantee of different steps, at the same δ, under the same adjacency, for the same unit."""
        return dataclasses.replace(self, history=history)

    def __str__(self) -> str:
        """Return ε, rounded up, and δ."""
        return f"ε = {format_epsilon(self.epsilon)} at δ = {format_delta(self.delta)} ({self.adjacency})"
