"""The best of a random number of private runs: private tuning, and its privacy event.

A tuning draws a number K, performs K independent runs of one randomised algorithm (draw a candidate, train it), and
releases only the run with the best score. If K comes from one of the distributions below and stays secret, as do the
other runs, the release costs little more than one run (Liu and Talwar, arXiv:1811.07971; Papernot and Steinke,
arXiv:2110.03620). A failed run is an output of the algorithm too: it counts, with the worst score.

The cost is known as Rényi divergences, which `dpllm.mechanism.renyi` converts to a distribution of privacy losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import absl.logging
import dp_accounting
import numpy as np
from dp_accounting import dp_event
from scipy import optimize, stats

from dpllm.mechanism import pld, renyi
from dpllm.mechanism.events import Event, EventWords, NeverTruncated, Round, Step
from dpllm.mechanism.parts import Spec

KINDS = ("logarithmic", "geometric", "poisson")
MAX_MEAN = 1000
ORDERS = (*(1 + tenths / 10 for tenths in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
"""The Rényi orders of a selection: the default of dp_accounting."""
_SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
_MOST_BUCKETS = 30_000_000


@dataclass(frozen=True)
class Selection:
    """The distribution of the number of runs K.

    Raises:
        ValueError: the kind is unknown, or the mean is out of range.

    >>> Selection("logarithmic", 10).words()
    'K is logarithmic with mean 10'
    """

    kind: str
    """"logarithmic", "geometric" (both at least 1) or "poisson" (may be 0: then nothing is released)."""
    mean: float
    """The mean of K, at least 1."""

    def __post_init__(self) -> None:
        """Check kind and mean."""
        if self.kind not in KINDS:
            raise ValueError(f"selection must be one of {', '.join(KINDS)}, got {self.kind!r}")
        wrong = isinstance(self.mean, bool) or not isinstance(self.mean, int | float)
        if wrong or not 1 <= self.mean <= MAX_MEAN:
            raise ValueError(f"selection.mean must be a number of runs between 1 and {MAX_MEAN}, got {self.mean!r}")
        object.__setattr__(self, "mean", float(self.mean))

    @classmethod
    def of(cls, spec: Spec) -> Selection:
        """Return the selection that a recipe or a plan names: ``{kind: logarithmic, mean: 10}``.

        Raises:
            ValueError: an option is missing or unknown, or a value is out of range.
        """
        options = spec.plain_options
        if spec.kind in KINDS and set(options) != {"mean"}:
            raise ValueError(f"selection needs a kind and a mean: write selection: {{kind: {spec.kind}, mean: 10}}")
        return cls(spec.kind, options.get("mean", 1))

    @property
    def shape(self) -> float:
        """The shape of the distribution in dp_accounting's terms."""
        return _SHAPES[self.kind]

    def words(self) -> str:
        """Return a readable description of the distribution."""
        return f"K is {self.kind} with mean {self.mean:g}"

    def chance(self, runs: int) -> float:
        """Return the probability of K = ``runs``.

        >>> round(Selection("geometric", 10).chance(1), 3), Selection("logarithmic", 10).chance(0)
        (0.1, 0.0)
        """
        if self.kind == "poisson":
            return float(stats.poisson.pmf(runs, self.mean))
        if runs < 1 or self.mean == 1:
            return float(runs == self.mean == 1)
        if self.kind == "geometric":
            return float(stats.geom.pmf(runs, 1 / self.mean))
        return float(stats.logser.pmf(runs, _logarithmic(self.mean)))

    def number_at(self, uniform: float) -> int:
        """Return the smallest k with P[K <= k] > ``uniform``: the K that belongs to a uniform number in [0, 1).

        >>> [Selection("geometric", 10).number_at(uniform) for uniform in (0.0, 0.15, 0.99)]
        [1, 2, 44]
        """
        runs, below = 0, self.chance(0)
        while below <= uniform and runs < 1000 * MAX_MEAN:
            runs += 1
            below += self.chance(runs)
        return runs


@lru_cache(maxsize=64)
def _logarithmic(mean: float) -> float:
    """Return p of the logarithmic distribution, p^k / (-k log(1-p)), with this mean above 1."""

    def excess(at: float) -> float:  # at = log(1/γ), where γ = 1 - p; the mean is (1/γ - 1) / log(1/γ)
        return math.log(math.expm1(at) / at / mean)

    return -math.expm1(-optimize.brentq(excess, 1e-12, 60.0, xtol=1e-15, rtol=1e-14))


@dataclass(frozen=True, kw_only=True)
class SelectedRun(NeverTruncated):
    """The release of the best of K runs, each of which consists of Poisson sampled Gaussian sums.

    Raises:
        ValueError: a field is out of range.
    """

    kind: ClassVar[str] = "selected run"
    num_rounds: int
    """Rounds of one run: its steps, or for correlated noise the cycles of its groups."""
    runs: str
    """The distribution of K (`Selection.kind`)."""
    mean_runs: float
    """The mean of K."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if isinstance(self.num_rounds, bool) or not isinstance(self.num_rounds, int) or self.num_rounds < 1:
            raise ValueError(f"num_rounds must be a whole number of at least 1, got {self.num_rounds!r}")
        object.__setattr__(self, "mean_runs", self.selection.mean)

    @property
    def selection(self) -> Selection:
        """The distribution of K."""
        return Selection(self.runs, self.mean_runs)

    @property
    def one_run(self) -> tuple[Step, int]:
        """The rounds of one run: the event and its count."""
        return Step(sampling_rate=self.sampling_rate, noise_multiplier=self.noise_multiplier), self.num_rounds

    @property
    def is_selection(self) -> bool:
        """It is the release of the best of K complete runs."""
        return True

    @property
    def renyi_event(self) -> dp_accounting.DpEvent:
        """The selection itself, whose ε is based on these divergences."""
        return self.dp_event()

    @property
    def most_epsilon(self) -> float:
        """The largest ε that follows from Rényi divergences."""
        return renyi.HIGHEST

    @property
    def library_gap(self) -> str | None:
        """dp_accounting has no selection of runs."""
        return "a selection of runs; compare by Rényi accounting"

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the selections; each is a round."""
        return [(dataclasses.replace(self, clip_norm=1.0, num_units=None), num_steps)]

    def has_pair(self, adjacency: str) -> bool:
        """Return whether there is a pair; the Rényi bounds hold only for zero-out."""
        return adjacency == "zero-out"

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of "zero-out", the loss that ``count`` selections add; both directions are equal."""
        return [(_dominating(self, width), count)] * 2

    def grid(self, count: int, adjacency: str, width: float) -> float:
        """Return the finest grid, ``width`` or wider, on which the loss fits in memory (`renyi.grid`)."""
        width = renyi.grid(width)
        while 4 * count * renyi.last(_profile(self, width), width) / width > _MOST_BUCKETS:
            width *= 2
        return width

    def dp_event(self) -> dp_accounting.DpEvent:
        """Return the event in dp_accounting's terms."""
        step, count = self.one_run
        run = dp_event.SelfComposedDpEvent(step.dp_event(), count)
        return dp_event.RepeatAndSelectDpEvent(run, self.mean_runs, self.selection.shape)

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        return EventWords(
            sampling=f"plain Poisson, {self.num_rounds} rounds in each of K runs",
            accounted_as=f"the best of K runs, where {self.selection.words()}, K and the other runs stay secret, and "
            "the score uses no private record (Papernot and Steinke, arXiv:2110.03620, theorems 2 and 6): Rényi "
            "divergences, converted into a dominating distribution of privacy losses. Under replace-one, by group "
            "privacy: ε is twice a zero-out ε at a smaller δ",
            options=f"--best-of {self.mean_runs:g} --best-of-runs {self.runs}",
            command_steps=self.num_rounds,
            renyi="an upper bound by dp_accounting's RepeatAndSelectDpEvent, under zero-out (arXiv:2110.03620)",
        )


def selected_run(selection: Selection, event: Event, num_steps: int) -> SelectedRun:
    """Return the event of releasing the best of K runs.

    Raises:
        ValueError: no Rényi divergences are known for the rounds of a run.
    """
    (one, count), *others = event.rounds(num_steps)
    plain = one.untruncated
    if others or plain is None:
        raise ValueError(
            f"a selection needs runs of Poisson sampled Gaussian sums, but a step here is of the kind {one.kind!r}, "
            f"{one.words().sampling}, and no Rényi bound is known for a selection of such runs. Omit privacy.sampling, "
            "so that whole units are drawn, use privacy.randomness=chacha20 instead of discrete, or add up the cost "
            "of the runs"
        )
    if one.truncates:
        raise ValueError(
            "no Rényi bound is known for truncated samples, so a selection of such runs has no accounting. Omit "
            "privacy.max_batch_size: a run of a selection then draws batches without a limit"
        )
    return SelectedRun(
        sampling_rate=plain.sampling_rate,
        noise_multiplier=plain.noise_multiplier,
        clip_norm=event.clip_norm,
        num_rounds=count,
        runs=selection.kind,
        mean_runs=selection.mean,
    )


def _profile(event: SelectedRun, width: float) -> renyi.LogDelta:
    """Return the function from ε >= 0 to log δ that follows from the Rényi divergences."""
    orders, found = _divergences(event.sampling_rate, event.noise_multiplier, *_of_runs(event))
    more = renyi.fine_orders(width)
    return renyi.profile((*orders, *more), (*found, *_at_high_orders(event, more)))


def _at_high_orders(event: SelectedRun, orders: Sequence[int]) -> list[float]:
    """Return the divergences of the selection at whole orders (arXiv:2110.03620, theorems 2 and 6).

    With R(α) of one run and K of mean m: R(α) + log(m)/(α-1) + (1+η) ((1-1/α') R(α') - log(γ)/α') for every α', where
    K is negative binomial of shape η; where it is Poisson, R(α) + log(m)/(α-1) + m δ', for a run that is
    (log(1 + 1/(α-1)), δ')-private.
    """
    if not orders:
        return []
    step, count = event.one_run
    one = [count * renyi.sampled_gaussian(step.sampling_rate, step.noise_multiplier, order) for order in orders]
    mean = event.mean_runs
    if event.runs == "poisson":
        log_delta = renyi.profile(orders, one)(np.array([math.log1p(1 / (order - 1)) for order in orders]))
        more = mean * np.exp(log_delta)
    else:
        log_gamma = 0.0
        if mean > 1:
            log_gamma = -math.log(mean) if event.runs == "geometric" else math.log1p(-_logarithmic(mean))
        shape = event.selection.shape
        best = min((1 - 1 / order) * value - log_gamma / order for order, value in zip(orders, one, strict=True))
        more = np.full(len(orders), (1 + shape) * best)
    return [
        value + math.log(mean) / (order - 1) + float(extra)
        for order, value, extra in zip(orders, one, more, strict=True)
    ]


def _of_runs(event: SelectedRun) -> tuple[Any, ...]:
    return event.num_rounds, event.runs, event.mean_runs


@lru_cache(maxsize=64)
def _divergences(
    rate: float, sigma: float, num_rounds: int, runs: str, mean: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the Rényi orders above 1 and the finite divergences of the selection, under zero-out."""
    from dp_accounting import rdp

    event = SelectedRun(sampling_rate=rate, noise_multiplier=sigma, num_rounds=num_rounds, runs=runs, mean_runs=mean)
    accountant = rdp.RdpAccountant(ORDERS, neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    verbosity = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)  # an order whose series does not converge is left out
    try:
        accountant.compose(event.dp_event())
    finally:
        absl.logging.set_verbosity(verbosity)
    pairs = [
        (float(order), float(value))
        for order, value in zip(accountant.orders, accountant.rdp, strict=True)
        if order > 1 and 0 <= value < math.inf
    ]
    return tuple(order for order, _ in pairs), tuple(value for _, value in pairs)


@lru_cache(maxsize=16)
def _dominating(event: SelectedRun, width: float) -> pld.LossPmf:
    """Return the loss of one selection, the same in both directions."""
    return renyi.dominating(_profile(event, width), width)
