"""Privacy events: the privacy charge of one step of a run, and its privacy loss.

Ledgers and budgets store an *event* for each step. The cost of a run's steps is the sum of the privacy losses of
*rounds*, which are independent of each other. A step of DP-SGD is one round; other mechanisms may need fewer rounds
than steps, since a unit enters only some of the steps.

Two adjacencies. *zero-out*: a unit's contribution is replaced by nothing while the public number of units stays.
*replace-one*: a unit is replaced by any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
from scipy import stats

from dpllm.mechanism import pld
from dpllm.mechanism.limits import MAX_NOISE, MAX_ROWS_DRAWN_PER_UNIT, MAX_UNITS, MIN_NOISE

_MAX_ONE_STEP_BUCKETS = 2_000_000
_MAX_COMPOSED_BUCKETS = 30_000_000


class Event(Protocol):
    """The privacy charge of one step; hashable, and equal for equal steps."""

    kind: ClassVar[str]

    @property
    def noise_multiplier(self) -> float:
        """σ: standard deviation of the noise over the clip norm; 0 means no privacy."""
        ...

    @property
    def clip_norm(self) -> float:
        """C. ε does not depend on it."""
        ...

    @property
    def moves(self) -> int:
        """The largest change of a step's sum by one unit, in clip norms."""
        ...

    @property
    def restarts(self) -> bool:
        """Whether a resumed run costs more than an uninterrupted one."""
        ...

    @property
    def is_selection(self) -> bool:
        """Whether it is one release from several complete runs, which has no ε before all of them have ended."""
        ...

    @property
    def answers(self) -> tuple[tuple[Event, int], ...] | None:
        """All private answers that it represents, with their counts; None: it is a training step."""
        ...

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the rounds of ``num_steps`` consecutive steps, starting with the first step of a run or resume."""
        ...

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        ...


class Round(Event, Protocol):
    """An event whose privacy loss is known: each step is a round, independent of the others."""

    @property
    def untruncated(self) -> Step | None:
        """The same event without truncation, if it is a plain Poisson sampled Gaussian; otherwise None."""
        ...

    @property
    def without_truncation(self) -> Round:
        """The same event without truncation; itself if it never truncates."""
        ...

    @property
    def is_bare(self) -> bool:
        """Whether there is no noise, or too little for one unit's change: no ε is computed, and inf is correct."""
        ...

    @property
    def sampling_rate(self) -> float:
        """q, the probability that a unit, or a row if rows are drawn, enters."""
        ...

    @property
    def truncates(self) -> bool:
        """Whether truncation can remove a unit because of another unit."""
        ...

    @property
    def zcdp_rho(self) -> float:
        """ρ of zero-concentrated privacy under zero-out, as if the round held all units; inf if none is known."""
        ...

    @property
    def renyi_event(self) -> dp_accounting.DpEvent | None:
        """The event in terms of dp_accounting's Rényi accountant, without truncation; None: it has none."""
        ...

    @property
    def most_epsilon(self) -> float:
        """The largest ε that is computed for it if only Rényi divergences are known; otherwise inf."""
        ...

    @property
    def library_gap(self) -> str | None:
        """Why dp_accounting has no loss distribution of the event, and what to compare instead; None: it has one."""
        ...

    def with_noise(self, noise_multiplier: float) -> Round:
        """Return the same round with a different σ."""
        ...

    def has_pair(self, adjacency: str) -> bool:
        """Return whether `parts` has distributions for this adjacency; otherwise group privacy is used."""
        ...

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of the adjacency, the loss that ``count`` rounds add, and its multiplicity.

        Args:
            count: the number of rounds.
            adjacency: "zero-out" (two directions: remove, add) or "replace-one" (one).
            width: the spacing of the grid of losses.
        """
        ...

    def grid(self, count: int, adjacency: str, width: float) -> float:
        """Return the finest grid, ``width`` or wider, on which the loss of ``count`` rounds fits in memory."""
        ...

    def dp_event(self) -> dp_accounting.DpEvent:
        """Return the event in dp_accounting's terms, for cross-checks."""
        ...


@dataclass(frozen=True)
class EventWords:
    """The description of an event for readers."""

    sampling: str
    """How units are drawn, in a few words, for a table."""
    accounted_as: str
    """How the event is accounted for, with the source."""
    options: str | None
    """The options of ``dpllm epsilon`` that give the same event; None: no options do."""
    is_sampled: bool = True
    """Whether a step's units are a random sample. False: they are visited in an order, and there is no rate q."""
    command_steps: int = 1
    """The value of ``--steps`` next to the options, for one round."""
    renyi: str = "an upper bound, looser by nature, under zero-out, without the effect of truncation"
    """The meaning of ε by Rényi accounting (`Round.renyi_event`), or why there is none."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The parameters of a step that determine its privacy cost, for all samplers; events extend it."""

    num_units: int | None = None
    """N, public. None: unknown, and then there is no truncation."""
    sampling_rate: float
    """q, the probability that a unit, or a row if rows are drawn, enters the step."""
    noise_multiplier: float
    """σ; 0 means no privacy."""
    clip_norm: float = 1.0
    """C. ε does not depend on it; the ledger stores it with the step."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        if not isinstance(self.noise_multiplier, float):
            raise ValueError(
                f"noise_multiplier must be a float, got {self.noise_multiplier!r} "
                f"({type(self.noise_multiplier).__name__}): with other number types accountants may omit "
                "terms of a composition. Write 1.0 for 1"
            )
        for name in ("sampling_rate", "noise_multiplier", "clip_norm"):
            value = getattr(self, name)
            if isinstance(value, bool | str):
                raise ValueError(f"{name} must be a number, got {value!r}")
            try:
                object.__setattr__(self, name, float(value))
            except (OverflowError, TypeError) as error:
                raise ValueError(f"{name} must be a number, got {str(value)[:40]} ({error})") from error
        for name in ("num_units", "max_batch_size", "rows_per_unit"):
            value = getattr(self, name, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if value is not None:
                object.__setattr__(self, name, int(value))
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

    @property
    def is_bare(self) -> bool:
        """Whether there is no noise, or too little for one unit's change: no ε is computed, and inf is correct."""
        return self.noise_multiplier < MIN_NOISE * self.moves

    @property
    def moves(self) -> int:
        """The largest change of the sum by one unit, in clip norms."""
        return 1

    @property
    def restarts(self) -> bool:
        """Each step is a separate round, so a resume has no extra cost."""
        return False

    @property
    def is_selection(self) -> bool:
        """A step belongs to one run."""
        return False

    @property
    def answers(self) -> tuple[tuple[Event, int], ...] | None:
        """None: it is a single step."""
        return None

    @property
    def untruncated(self) -> Step | None:
        """None: it is not a Poisson sampled Gaussian, unless the event overrides this."""
        return None

    @property
    def renyi_event(self) -> dp_accounting.DpEvent | None:
        """The same event without truncation, if it is a Poisson sampled Gaussian."""
        return None if self.untruncated is None else self.untruncated.dp_event()

    @property
    def zcdp_rho(self) -> float:
        """inf: no ρ is known, unless the event overrides this."""
        return math.inf

    @property
    def most_epsilon(self) -> float:
        """No limit, since the losses themselves are known, unless the event overrides this."""
        return math.inf

    @property
    def library_gap(self) -> str | None:
        """None: dp_accounting has the event, unless the event overrides this."""
        return None

    def _gaussian_rho(self, moved: float) -> float:
        """Return ρ of Gaussian noise, continuous or discrete, on a sum that a unit changes by ``moved`` clip norms."""
        return math.inf if self.noise_multiplier == 0 else moved**2 / (2 * self.noise_multiplier**2)

    def with_noise(self, noise_multiplier: float) -> Self:
        """Return the same round with a different σ."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class Step(Numbers):
    """A step of DP-SGD: a Gaussian sum over a Poisson sample of units, each clipped as one; truncated or not.

    Raises:
        ValueError: a field is out of range.

    >>> Step(sampling_rate=0.02, noise_multiplier=1.0).truncates
    False
    """

    kind: ClassVar[str] = "poisson"
    max_batch_size: int | None = None
    """B_max, the largest number of units in a step. None: plain Poisson sampling."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if self.max_batch_size is not None:
            if self.num_units is None:
                raise ValueError("max_batch_size needs num_units: the truncation probability depends on both")
            if self.max_batch_size < 1:
                raise ValueError(f"max_batch_size must be at least 1, got {self.max_batch_size}")

    @property
    def truncates(self) -> bool:
        """Whether truncation can remove a unit because of another unit."""
        return self.max_batch_size is not None and self.num_units is not None and self.max_batch_size < self.num_units

    @property
    def untruncated(self) -> Step:
        """The same step without truncation."""
        return dataclasses.replace(self, num_units=None, max_batch_size=None)

    @property
    def zcdp_rho(self) -> float:
        """ρ of zero-concentrated privacy: that of Gaussian noise."""
        return self._gaussian_rho(self.moves)

    @property
    def without_truncation(self) -> Step:
        """The same step without truncation."""
        return self.untruncated

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the steps: each is a round."""
        return [(dataclasses.replace(self, clip_norm=1.0), num_steps)]

    def has_pair(self, adjacency: str) -> bool:
        """Return True: both adjacencies have distributions."""
        return True

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of the adjacency, the loss that ``count`` rounds add, and its multiplicity."""
        if self.truncates:
            return [(pmf, count) for pmf in _truncated(self, adjacency, width)]
        if self.sampling_rate == 1:
            return _whole(self.noise_multiplier, count, adjacency, width)
        return [(pmf, count) for pmf in _sampled(self.noise_multiplier, self.sampling_rate, adjacency, width)]

    def grid(self, count: int, adjacency: str, width: float) -> float:
        """Return the finest grid, ``width`` or wider, on which the loss of ``count`` rounds fits in memory."""
        if self.sampling_rate == 1 and not self.truncates:
            return _grid(self.noise_multiplier / math.sqrt(count), 1.0, 1, adjacency, width)
        return _grid(self.noise_multiplier, self.sampling_rate, count, adjacency, width, self.truncates)

    def dp_event(self) -> dp_accounting.DpEvent:
        """Return the event in dp_accounting's terms."""
        if self.max_batch_size is None or self.num_units is None:
            return dp_event.PoissonSampledDpEvent(self.sampling_rate, dp_event.GaussianDpEvent(self.noise_multiplier))
        return dp_accounting.TruncatedSubsampledGaussianDpEvent(
            dataset_size=self.num_units,
            sampling_probability=self.sampling_rate,
            truncated_batch_size=self.max_batch_size,
            noise_multiplier=self.noise_multiplier,
        )

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        truncated = self.max_batch_size is not None
        return EventWords(
            sampling=f"Poisson, at most {self.max_batch_size} units" if truncated else "plain Poisson",
            accounted_as="a Gaussian sum over a truncated Poisson sample (arXiv:2508.15089)"
            if truncated
            else "a Gaussian sum over a Poisson sample",
            options=f"--num-units {self.num_units} --max-batch-size {self.max_batch_size}" if truncated else "",
        )


@dataclass(frozen=True, kw_only=True)
class NeverTruncated(Numbers):
    """Parameters of a round that is not a Poisson sampled Gaussian, and is not truncated."""

    @property
    def truncates(self) -> bool:
        """There is no truncation."""
        return False

    @property
    def without_truncation(self) -> Self:
        """Itself."""
        return self


@dataclass(frozen=True, kw_only=True)
class StepOfRows(NeverTruncated):
    """A step of DP-SGD over a Poisson sample of rows, each clipped separately, where one unit has up to k rows.

    Of a unit's k rows Binomial(k, q) are drawn, and the sum changes by at most that number times C (Charles et al.,
    arXiv:2407.07737).

    Raises:
        ValueError: a field is out of range.
    """

    kind: ClassVar[str] = "poisson rows"
    rows_per_unit: int
    """k."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if self.rows_per_unit < 1:
            raise ValueError(f"rows_per_unit must be at least 1, got {self.rows_per_unit}")
        if self.rows_per_unit > MAX_ROWS_DRAWN_PER_UNIT:
            raise ValueError(
                f"rows_per_unit must be at most {MAX_ROWS_DRAWN_PER_UNIT:,}, got {self.rows_per_unit}: the cost of "
                "more rows per unit takes too long to compute. Use fewer rows per unit"
            )

    @property
    def zcdp_rho(self) -> float:
        """ρ of zero-concentrated privacy: that of Gaussian noise on k rows."""
        return self._gaussian_rho(self.moves)

    @property
    def moves(self) -> int:
        """The largest change of the sum by one unit, in clip norms."""
        return self.rows_per_unit

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the steps: each is a round."""
        if self.rows_per_unit == 1:
            return Step(sampling_rate=self.sampling_rate, noise_multiplier=self.noise_multiplier).rounds(num_steps)
        return [(dataclasses.replace(self, clip_norm=1.0), num_steps)]

    def has_pair(self, adjacency: str) -> bool:
        """Return whether there is a pair: none is known for replacing all rows of a unit."""
        return adjacency == "zero-out"

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of "zero-out", the loss that ``count`` rounds add, and its multiplicity."""
        if self.sampling_rate == 1:
            return _whole(self.noise_multiplier / self.rows_per_unit, count, adjacency, width)
        return [(pmf, count) for pmf in _rows(self, adjacency, width)]

    def grid(self, count: int, adjacency: str, width: float) -> float:
        """Return the finest grid, ``width`` or wider, on which the loss of ``count`` rounds fits in memory."""
        if self.sampling_rate == 1:
            sigma = self.noise_multiplier / (self.rows_per_unit * math.sqrt(count))
            return _grid(sigma, 1.0, 1, "zero-out", width)
        return _grid(self.noise_multiplier / self.rows_per_unit, self.sampling_rate, count, "zero-out", width)

    def dp_event(self) -> dp_accounting.DpEvent:
        """Return the event in dp_accounting's terms."""
        rows = list(range(self.rows_per_unit + 1))
        chances = [float(chance) for chance in stats.binom.pmf(rows, self.rows_per_unit, self.sampling_rate)]
        return dp_event.MixtureOfGaussiansDpEvent(self.noise_multiplier, rows, chances)

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        return EventWords(
            sampling=f"Poisson, rows of which a unit has up to {self.rows_per_unit}",
            accounted_as=f"a mixture of Gaussians: of a user's k = {self.rows_per_unit} rows Binomial(k, q) are drawn, "
            "and each changes the sum by C (Charles et al., arXiv:2407.07737). Under replace-one, by group privacy: ε "
            "is twice a zero-out ε at a smaller δ",
            options=f"--rows-per-unit {self.rows_per_unit}",
            renyi="does not apply: it has no event for a user's rows that are drawn one by one",
        )


def dp_sgd(
    *,
    sampling_rate: float,
    noise_multiplier: float,
    num_units: int | None = None,
    max_batch_size: int | None = None,
    rows_per_unit: int = 1,
    clip_norm: float = 1.0,
) -> Step | StepOfRows:
    """Return the event of a step of DP-SGD.

    Args:
        sampling_rate: q, of a unit, or of a row if ``rows_per_unit`` is above 1.
        noise_multiplier: σ.
        num_units: N; needed with ``max_batch_size``.
        max_batch_size: B_max. None: plain Poisson sampling.
        rows_per_unit: k, the rows of one unit, each drawn and clipped separately; 1 when units are drawn.
        clip_norm: C.

    Raises:
        ValueError: a number is out of range, or two of them contradict each other.

    >>> dp_sgd(sampling_rate=0.02, noise_multiplier=1.0).kind
    'poisson'
    """
    numbers: dict[str, Any] = {"num_units": num_units, "sampling_rate": sampling_rate}
    numbers |= {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm}
    if rows_per_unit == 1:
        return Step(max_batch_size=max_batch_size, **numbers)
    if max_batch_size is not None:
        raise ValueError(
            "max_batch_size truncates a sample of units, and a truncated sample of rows has no accounting. Omit "
            "max_batch_size"
        )
    return StepOfRows(rows_per_unit=rows_per_unit, **numbers)


def chance_to_enter(rounds: Sequence[tuple[Round, int]]) -> float:
    """Return the probability that one unit, or one of its rows, enters any of these rounds."""
    if any(one.sampling_rate == 1 for one, _ in rounds):
        return 1.0
    return -math.expm1(sum(count * one.moves * math.log1p(-one.sampling_rate) for one, count in rounds))


def _pairs(adjacency: str) -> tuple[AdjacencyType, ...]:
    return (AdjacencyType.REPLACE,) if adjacency == "replace-one" else (AdjacencyType.REMOVE, AdjacencyType.ADD)


@lru_cache(maxsize=32)
def _sampled(sigma: float, rate: float, adjacency: str, width: float) -> tuple[pld.LossPmf, ...]:
    """Return one sampled Gaussian sum's loss distributions: for removing and adding a unit, or for replacing one."""
    return tuple(pld.sampled_gaussian(sigma, rate, pair, width) for pair in _pairs(adjacency))


def _whole(sigma: float, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
    """Return the loss of Gaussian sums over all units: T of them equal one with T times less variance, exactly."""
    return [(pmf, 1) for pmf in _sampled(sigma / math.sqrt(count), 1.0, adjacency, width)]


@lru_cache(maxsize=32)
def _rows(step: StepOfRows, adjacency: str, width: float) -> tuple[pld.LossPmf, ...]:
    return tuple(
        pld.sampled_rows(step.noise_multiplier, step.sampling_rate, step.rows_per_unit, pair, width)
        for pair in _pairs(adjacency)
    )


@lru_cache(maxsize=32)
def _truncated(step: Step, adjacency: str, width: float) -> tuple[pld.LossPmf, ...]:
    """Return the loss distributions of one step with truncation.

    They are the distributions that dp_accounting uses for its TruncatedSubsampledGaussianDpEvent (arXiv:2508.15089): a
    mixture of the plain Poisson pair (if the batch is not truncated) and the replace-one pair at σ/2 (if it is, since
    the unit may displace another one).
    """
    sigma, rate, most, num_units = step.noise_multiplier, step.sampling_rate, step.max_batch_size, step.num_units
    assert most is not None and num_units is not None
    plain = _sampled(sigma, rate, adjacency, width)
    truncated = float(stats.binom.sf(most - 1, num_units - 1, rate))
    # The probability that the unit is in the batch, given that the others alone would fill it.
    over = float(stats.binom.sf(most, num_units, rate))
    if truncated == 0 or over == 0:
        return plain
    rate_if_truncated = min(1.0, over * most / truncated / num_units)
    rare = pld.sampled_gaussian(sigma / 2, rate_if_truncated, AdjacencyType.REPLACE, width, truncated)
    return tuple(pld.mixture(rare, part, truncated) for part in plain)


def _grid(sigma: float, rate: float, count: int, adjacency: str, width: float, truncates: bool = False) -> float:
    if sigma == 0:
        return width
    widest = sigma / 2 if truncates or adjacency == "replace-one" else sigma
    # exp(-50) of the mass lies beyond 10 standard deviations; both signs of the loss.
    loss_range = 2 * (0.5 / widest**2 + 10 / widest)
    spread = 20 * math.sqrt(count) * _loss_deviation(sigma, rate)
    if adjacency == "replace-one":
        spread *= 2
    while loss_range / width > _MAX_ONE_STEP_BUCKETS or (3 * loss_range + spread) / width > _MAX_COMPOSED_BUCKETS:
        width *= 2
    return width


def _loss_deviation(sigma: float, sampling_rate: float) -> float:
    """Return an approximate standard deviation of one step's privacy loss, by sums over a grid of outcomes."""
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
