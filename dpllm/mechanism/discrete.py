"""Discrete noise and its accounting: the clipped sum is rounded to a grid, and whole multiples of the grid are added.

This is the level "discrete" of `privacy.randomness`. `dpllm.mechanism.discrete_gaussian` draws the numbers.

**Mechanism.** Let S be the clipped sum of a step, n its entries, C the clip norm, s = 2^40 and γ = σC/s. The step
releases γ (round(S/γ) + Z), where Z has n independent discrete Gaussian numbers of parameter s: whole numbers x with
probability proportional to exp(-x²/(2s²)). round(S/γ) + Z is computed with whole numbers. The factor γ, the rounding to
float32 and the division by b come after it and depend on nothing else, so they are post-processing. There is no
floating-point noise, and so none of the gaps through which an output of such noise can reveal its input (Mironov 2012).

**Sensitivity.** Without a unit, the sum is S' with |S - S'| <= C. Each entry is rounded by at most half a step, so

    |round(S/γ) - round(S'/γ)| <= |S - S'|/γ + sqrt(n),

in steps of the grid, in l2 norm. Over s this is |S - S'|/(σC) + sqrt(n)/s. With n <= 2^40 the second term is at most
2^-20: the sensitivity is C (1 + σ 2^-20) for every model of up to 2^40 trained parameters, and larger ones are refused
(`MAX_ENTRIES`). An entry beyond ±2^61 steps is clamped to that, which moves two sums no further apart.
The division by γ is rounded too, by 2^-53 of S: that is within the margin of the next paragraph.

**What the sum is.** S is added up in float32: within products of matrices, over microbatches and over processes. For
given data, draws and devices it is one fixed function, and rounding it to the grid and adding the noise come after the
whole of it. But S - S' then is a unit's contribution plus the difference of two rounding errors. The accounting adds
2^-19 B_max to the sensitivity, in clip norms: 16 units in the last place of float32 (2^-24) for each of B_max
contributions of norm C, for S and for S'. These 16 units are the margin that `dpllm.ghost` takes for a product of
matrices, and measures on each GPU (`dpllm.ghost.norm_method`). This part is a margin and not a proof: no useful bound
is known for the rounding of a product whose terms cancel, or of a model's passes, which may depend on the length of
other rows. The other levels have the same gap, and no margin for it. All that follows is proved, for a sum that keeps
within the margin.

**One step, one direction.** Let u be the unit, drawn with probability q independently of the others. Whichever others
are drawn, the step's output is Q = law of x0 + Z without the unit, and P = (1-q) Q + q (Q shifted by w) with it, for a
whole vector w of norm at most Δ. exp((j-1) D_j) is jointly convex, so the mixture over the others has at most the
largest value. For a whole number j >= 2, by the binomial theorem,

    E_Q[(P/Q)^j] = sum_k binom(j, k) (1-q)^(j-k) q^k E_Q[(Q_w/Q)^k],    E_Q[(Q_w/Q)^k] = exp(k (k-1) |w|²/(2s²)).

The last equality is the reason for whole j: sum_x exp(-(k (x-w)² + (1-k) x²)/(2s²)) = exp(k (k-1) w²/(2s²)) sum_x
exp(-(x - k w)²/(2s²)), and a shift of all whole numbers by the whole number k w changes no sum (arXiv:2004.00010,
proposition 5). So the value is that of the Gaussian mechanism (Mironov, Talwar, Zhang, arXiv:1908.10530, section 3.3),
and it rises with |w|: Δ = s/σ (1 + ...) bounds it.

**The other direction.** E_P[(Q/P)^j] <= E_Q[(P/Q)^j] for every real j >= 1 (their theorem 5, for densities; here for
sums). The reflection x -> w - x exchanges Q and Q_w, and turns r = Q_w/Q into 1/r. Averaging a sum over Q f(r) with its
reflection gives half the sum of Q (f(r) + r f(1/r)), so it is enough that for f(r) = h(1-q+qr), h(t) = t^j - t^(1-j),

    f(r) + r f(1/r) >= 0    for r >= 1 (for r < 1 it is r times the same at 1/r).

With A = 1-q+qr and H = 1/(1-q+q/r), the weighted arithmetic and harmonic means of 1 and r: r f(1/r) = -(r/H) h(H),
since h(1/t) = -h(t)/t, and r = H (A-1)/(H-1). So the claim is h(A)/(A-1) >= h(H)/(H-1), the slope of h from h(1) = 0.
A >= H >= 1, and the slope rises, because h is convex there: h'' = j (j-1) (t^(j-2) - t^(-j-1)) >= 0 for t >= 1.

**The run.** Rényi divergences add up over adaptive steps, and become δ(ε) as in `dpllm.mechanism.renyi`. RdpAccountant
of dp_accounting computes them, at whole orders only. This ε is larger than that of Gaussian noise by privacy loss
distributions, since Rényi divergences are a looser account: the price of a proof.

**Truncation.** Let p = P[Binomial(N, q) > B_max], and M the same run without truncation, whose larger draws keep within
the same margin. (If B_max is so large that p < 10^-30, the least size for which this holds takes its place.) Drawn from
the same random numbers, the two runs differ with probability at most β = Tp. So from P_M(S) <= e^ε Q_M(S) + δ follows
P(S) <= P_M(S) + β <= e^ε (Q(S) + β) + δ + β: truncation adds (1 + e^ε) β to δ. Both neighbours have N units under
zero-out, and so the same p.

**Replace-one.** Replacing a unit is removing one and adding another, so ε there follows by group privacy, as for the
rows of users (`dpllm.privacy.accounting.epsilon`).

**Left out**, because nothing is proved for it here: correlated noise, sampling of rows, a threshold that adapts, and
the selection of one of several runs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from scipy import stats

from dpllm.mechanism import pld, renyi
from dpllm.mechanism.events import Event, EventWords, Numbers, Round
from dpllm.mechanism.noise import IndependentNoise, slice_of
from dpllm.mechanism.parts import Draw, Normals

if TYPE_CHECKING:
    from torch import Tensor

GRID_SHARE = 2.0**-20
"""The addition to the sensitivity by rounding to the grid, divided by σ, in clip norms."""
MAX_ENTRIES = 2**40
"""The most trained parameters for which `GRID_SHARE` bounds the rounding: sqrt(2^40) grid steps of σC 2^-40."""
SUM_SHARE = 2.0**-19
"""The margin for sums in float32, for each unit of the largest batch, in clip norms."""
_NEVER = 1e-30
ORDERS = (*range(2, 65), *range(72, 129, 8), *range(144, 257, 16), 320, 384, 448, 512, 768, 1024, 2048)
"""The Rényi orders: whole numbers."""


@dataclass(frozen=True, kw_only=True)
class DiscreteStep(Numbers):
    """A step of DP-SGD with discrete noise, over a Poisson sample of units, truncated or not.

    Raises:
        ValueError: a field is out of range.

    >>> DiscreteStep(sampling_rate=0.02, noise_multiplier=1.0, sensitivity=1.003).truncates
    False
    """

    kind: ClassVar[str] = "discrete poisson"
    max_batch_size: int | None = None
    """The size above which a draw counts as a failure: B_max, or a smaller size that draws practically never exceed.
    None: no draw counts as one."""
    sensitivity: float
    """The largest change of the rounded sum by one unit, in clip norms; above 1."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if not 1 <= self.sensitivity < math.inf:
            raise ValueError(f"sensitivity must be at least 1 and finite, got {self.sensitivity}")
        if self.max_batch_size is not None and (self.num_units is None or self.max_batch_size < 1):
            raise ValueError(
                f"max_batch_size must be at least 1 and needs num_units, got {self.max_batch_size} of {self.num_units}"
            )

    @property
    def truncates(self) -> bool:
        """Whether truncation can remove a unit because of another unit."""
        return self.max_batch_size is not None and self.num_units is not None and self.max_batch_size < self.num_units

    @property
    def failure(self) -> float:
        """The probability that the step counts as a failure: that its draw is truncated."""
        if not self.truncates:
            return 0.0
        return float(stats.binom.sf(self.max_batch_size, self.num_units, self.sampling_rate))

    @property
    def zcdp_rho(self) -> float:
        """ρ of zero-concentrated privacy: discrete noise has that of Gaussian noise (arXiv:2004.00010, theorem 4)."""
        return self._gaussian_rho(self.sensitivity)

    @property
    def most_epsilon(self) -> float:
        """The largest ε that follows from Rényi divergences."""
        return renyi.HIGHEST

    @property
    def library_gap(self) -> str | None:
        """dp_accounting has no discrete noise."""
        return "discrete noise; compare by zCDP"

    @property
    def without_truncation(self) -> DiscreteStep:
        """The same step without truncation."""
        return dataclasses.replace(self, num_units=None, max_batch_size=None)

    def rounds(self, num_steps: int) -> list[tuple[Round, int]]:
        """Return the steps: each is a round."""
        return [(dataclasses.replace(self, clip_norm=1.0), num_steps)]

    def has_pair(self, adjacency: str) -> bool:
        """Return whether there is a pair: the Rényi bounds hold for zero-out only."""
        return adjacency == "zero-out"

    def parts(self, count: int, adjacency: str, width: float) -> list[tuple[pld.LossPmf, int]]:
        """Return, per direction of "zero-out", the loss of all ``count`` steps; both directions are equal."""
        return [(_dominating(self, count, width), 1)] * 2

    def grid(self, count: int, adjacency: str, width: float) -> float:
        """Return the width of the grid (`renyi.grid`)."""
        return renyi.grid(width)

    def dp_event(self) -> dp_accounting.DpEvent:
        """Return the Gaussian event whose Rényi divergences at whole orders bound those of this one."""
        gaussian = dp_event.GaussianDpEvent(self.noise_multiplier / self.sensitivity)
        return dp_event.PoissonSampledDpEvent(self.sampling_rate, gaussian)

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        sizes = f"--num-units {self.num_units} --max-batch-size {self.max_batch_size}" if self.max_batch_size else ""
        truncated = f", at most {self.max_batch_size} units" if self.max_batch_size is not None else ""
        return EventWords(
            sampling=f"Poisson{truncated}" if truncated else "plain Poisson",
            accounted_as="a sum rounded to a grid, with discrete Gaussian noise (Canonne et al., arXiv:2004.00010), "
            f"over a Poisson sample{truncated}, with the sensitivity {self.sensitivity:.6g} C after rounding: Rényi "
            "divergences at whole orders (Mironov et al., arXiv:1908.10530), the same as those of Gaussian noise; a "
            "truncated draw counts as a failure. Under replace-one, by group privacy: ε is twice a zero-out ε at a "
            "smaller δ",
            options=f"{sizes} --discrete-sensitivity {self.sensitivity!r}".strip(),
            renyi="does not apply: ε itself is by Rényi divergences, at whole orders",
        )


@lru_cache(maxsize=64)
def divergences(event: dp_accounting.DpEvent) -> tuple[float, ...]:
    """Return the Rényi divergences of a step at `ORDERS`, in both directions of zero-out."""
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(event)
    return tuple(float(value) for value in accountant.rdp)


@lru_cache(maxsize=32)
def _dominating(step: DiscreteStep, count: int, width: float) -> pld.LossPmf:
    found = [(order, count * one) for order, one in zip(ORDERS, divergences(step.dp_event()), strict=True)]
    sigma = step.noise_multiplier / step.sensitivity
    for order in renyi.fine_orders(width):
        found.append((order, count * renyi.sampled_gaussian(step.sampling_rate, sigma, order)))
    finite = [(order, one) for order, one in found if 0 <= one < math.inf]
    log_delta = renyi.profile([order for order, _ in finite], [one for _, one in finite])
    failure = count * step.failure
    if not failure:
        return renyi.dominating(log_delta, width)
    return renyi.dominating(log_delta, width, lambda epsilons: failure * (1 + np.exp(epsilons)))


def sensitivity(noise_multiplier: float, max_batch_size: int) -> float:
    """Return the largest change of the rounded sum by one unit, in clip norms.

    >>> round(sensitivity(0.7, 1248), 5)
    1.00238
    """
    return 1 + SUM_SHARE * max_batch_size + GRID_SHARE * noise_multiplier


@lru_cache(maxsize=64)
def most_drawn(draw: Draw) -> int:
    """Return B_max, or the smaller size that a draw exceeds with a probability below 1e-30."""
    most = draw.expected_batch_size
    while most < draw.max_batch_size and stats.binom.sf(most, draw.population, draw.sampling_rate) >= _NEVER:
        most += max(1, math.isqrt(draw.expected_batch_size) // 2)
    return min(most, draw.max_batch_size)


@dataclass(frozen=True)
class DiscreteNoise(IndependentNoise):
    """Discrete Gaussian noise on the rounded sum, drawn independently in every step."""

    wants_total: ClassVar[bool] = True
    max_entries: ClassVar[int | None] = MAX_ENTRIES

    def candidates(self, draw: Draw, workload: object) -> list[IndependentNoise]:
        """Return itself, since it has no open numbers."""
        return [self]

    def max_batch_size(self, draw: Draw) -> int:
        """Return a size that a draw practically never exceeds: a smaller one would be costly under replace-one."""
        return most_drawn(draw)

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return a step with discrete noise.

        Raises:
            ValueError: single rows are drawn.
        """
        if draw.rows_per_unit is not None:
            raise ValueError(
                "randomness='discrete' has no accounting where single rows of users are drawn (sampling='example'). "
                "Draw whole users (sampling='unit'), or use randomness='chacha20'"
            )
        return DiscreteStep(
            num_units=draw.num_units,
            sampling_rate=draw.sampling_rate,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            max_batch_size=most_drawn(draw),
            sensitivity=sensitivity(noise_multiplier, most_drawn(draw)),
        )

    def stream(self, generator: Normals, num_steps: int) -> DiscreteStream:
        """Return the noise of a run.

        Raises:
            ValueError: the generator's noise is not discrete.
        """
        if getattr(generator, "randomness", None) != "discrete":
            raise ValueError(
                "the plan has randomness='discrete', but its noise was requested from a generator of different noise, "
                "so the plan's ε would not hold. Pass dpllm.NoiseSource(randomness='discrete')"
            )
        return DiscreteStream(generator)

    def words(self) -> str:
        """Return the noise's description, for the report."""
        return "discrete Gaussian noise, on a grid of 2⁻⁴⁰ standard deviations to which the sum is rounded,"

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the accounting's assumptions, and how the run ensures each of them."""
        sampling, _ = super().ensured(draw, drawn, noise_stddev)
        noise = (
            "Noise is independent in every step and parameter entry, and exact",
            f"discrete Gaussian noise of standard deviation {noise_stddev:.6g} is drawn in whole numbers, once per "
            "step, and added to the complete sum, rounded to a grid; no floating-point number enters the noise",
        )
        margin = (
            "Floating-point summation changes the distance between two neighbouring sums only slightly",
            f"a margin, not a proof: the accounting adds {SUM_SHARE * most_drawn(draw):.2g} C to the sensitivity, "
            "16 units in the last place of float32 for each contribution",
        )
        return [sampling, noise, margin]


class DiscreteStream:
    """The noise of a run; it is not stored.

    Args:
        generator: rounds to the grid and adds the noise.
    """

    def __init__(self, generator: Normals) -> None:
        """Store the generator."""
        self._generator = generator

    def begin(self, step: int) -> None:
        """Do nothing, since steps do not depend on each other."""

    def add_share_(self, name: str, total: Tensor, stddev: float, rank: int, size: int) -> None:
        """Round the complete sum to the grid and add the noise, in place.

        Raises:
            ValueError: it is one of several processes' shares of the sum, or it has less than 32 bits.
        """
        if size != 1:
            raise ValueError(
                f"{name} is one process's share out of {size}, but discrete noise is added to the complete sum: "
                "floating-point additions after it would reveal the last bits of the other shares. Use an engine that "
                "adds noise to totals"
            )
        self._generator.add_(slice_of(total, rank, size), stddev)
