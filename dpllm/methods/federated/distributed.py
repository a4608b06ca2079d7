"""Noise that clients add before secure aggregation, sufficient even if some of them drop out; and its accounting.

No client and no server adds the noise of a round alone: each client of the cohort adds a share of it to its own whole
numbers, and secure aggregation shows the server only the sum of the survivors' numbers.

**Mechanism.** Let C be the clip norm, n the fewest survivors, σ the noise multiplier, s = 2^16 and γ = σC / (s √n), the
step of the grid. A client scales its update to the norm C - γ √d / 2 or less (d entries), rounds it to multiples of γ,
and adds d independent discrete Gaussian numbers of parameter s. Rounding moves an entry by at most γ/2, so the rounded
update has a norm of at most C. Sums are sums of whole numbers modulo 2^64: they are exact, and reduction modulo 2^64
comes after the sum, so it is post-processing. A round with fewer than n survivors is given up and releases nothing.

**Noise of the sum.** n shares together are, up to a factor of 1 ± τ at each point, discrete Gaussian of parameter s √n,
that is of deviation σC (Kairouz, Liu, Steinke 2021, arXiv:2102.06387: sums of discrete Gaussians). There
τ <= 10 n exp(-π² s²), which is below 10^-(10^10) for s = 2^16 and any n: it changes no digit of ε. More survivors than
n add independent noise, which is post-processing. So the Rényi divergences of one client are those of
`dpllm.mechanism.discrete` with the sensitivity C; there are no floating-point sums and no margin for them.

**Dropouts.** Which clients answer may not depend on the draw or on the records. Then the number of survivors is a sum
of independent coins, one for each of N clients, with the mean N q a, where a is the mean share of clients that would
answer. For a >= 1 - ρ, where ρ is declared, P[survivors < n] <= P[Binomial(N, q (1 - ρ)) < n] (Hoeffding 1956, theorem
4, for n - 1 <= N q (1 - ρ) - 1). The given-up rounds are counted as failures, like truncated draws: compare with the
same run that never gives up, whose rounds with fewer survivors get n shares of noise all the same. Drawn from the same
random numbers, the two runs differ with a probability of at most β, the sum over the rounds, so δ grows by (1 + e^ε) β.
A round that is given up stays charged.

**Who is protected from whom.** ε counts on the secrecy of the draw. The server draws the cohort and so knows it;
clients of one cohort see the others' public keys. Against them a round is not sampled: `against_the_server` is its
event. Secure aggregation itself is a matter of cryptography, for a server that follows its protocol; the simulation
assumes it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from scipy import stats

from dpllm.mechanism.discrete import DiscreteNoise, DiscreteStep, most_drawn
from dpllm.mechanism.events import Event, EventWords
from dpllm.mechanism.parts import Draw, Normals
from dpllm.mechanism.strategies import Workload

SHARE_BITS = 16
"""The deviation of one client's noise is 2^16 steps of the grid."""
GIVEN_UP = 1e-7
"""Over N: the probability that a run gives up any round, for which the fewest survivors are chosen."""


@dataclass(frozen=True, kw_only=True)
class DistributedStep(DiscreteStep):
    """A round of federated learning: the sum of the survivors of a Poisson cohort, with noise from each of them.

    Raises:
        ValueError: a field is out of range.
    """

    kind: ClassVar[str] = "distributed poisson"
    sensitivity: float = 1.0
    """Of the sum of whole numbers, in clip norms."""
    min_batch_size: int
    """n, the fewest survivors of a round that is not given up; the noise of n clients has the deviation σC."""
    dropouts: float
    """ρ, the largest mean share of clients that do not answer in a round, declared."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        super().__post_init__()
        if self.num_units is None:
            raise ValueError("a distributed round needs num_units: how often it is given up depends on it")
        check_dropouts(self.dropouts)
        mean = self.num_units * self.sampling_rate * (1 - self.dropouts)
        if not 1 <= self.min_batch_size <= max(1.0, mean):
            raise ValueError(
                f"min_batch_size must be between 1 and the {mean:g} clients that answer in a round on average, got "
                f"{self.min_batch_size}: lower it, or raise expected_batch_size"
            )

    @property
    def failure(self) -> float:
        """The probability that a round is truncated or given up."""
        assert self.num_units is not None
        rate = self.sampling_rate * (1 - self.dropouts)
        return super().failure + float(stats.binom.cdf(self.min_batch_size - 1, self.num_units, rate))

    @property
    def without_truncation(self) -> DiscreteStep:
        """The same round without truncation and without giving up."""
        names = {item.name for item in dataclasses.fields(DiscreteStep)}
        kept: dict[str, Any] = {name: getattr(self, name) for name in names - {"num_units", "max_batch_size"}}
        return DiscreteStep(**kept)

    @property
    def against_the_server(self) -> DiscreteStep:
        """The same round as seen by somebody who knows the cohort: without sampling."""
        return dataclasses.replace(self.without_truncation, sampling_rate=1.0)

    def words(self) -> EventWords:
        """Return the report's description of the event."""
        plain = super().words()
        return dataclasses.replace(
            plain,
            sampling=f"{plain.sampling}, at least {self.min_batch_size} survivors",
            accounted_as=f"the sum of the rounded updates of a Poisson cohort, at most {self.max_batch_size} clients, "
            f"each of norm at most C, with discrete Gaussian noise from each client; {self.min_batch_size} survivors "
            "have the noise σC together (Kairouz et al., arXiv:2102.06387): Rényi divergences at whole orders "
            "(Mironov et al., arXiv:1908.10530), the same as those of Gaussian noise; a round that is truncated or "
            f"given up counts as a failure, for dropouts of at most {self.dropouts:g} of the clients on average. Under "
            "replace-one, by group privacy: ε is twice a zero-out ε at a smaller δ",
            options=None,
        )


@dataclass(frozen=True)
class DistributedNoise(DiscreteNoise):
    """Discrete noise that each client of a cohort adds to its own update, for secure aggregation."""

    kind: ClassVar[str] = "distributed"
    only_discrete: ClassVar[bool] = True
    dropouts: float = 0.3
    """ρ, declared: the largest share of clients, on average over them, that do not answer in a round."""
    min_batch_size: int | None = None
    """n, the fewest survivors of a round that is not given up. None: the most that a run misses with probability
    1e-7/N."""

    def __post_init__(self) -> None:
        """Check the options."""
        check_dropouts(self.dropouts)
        if self.min_batch_size is not None and (
            isinstance(self.min_batch_size, bool) or not isinstance(self.min_batch_size, int) or self.min_batch_size < 2
        ):
            raise ValueError(
                f"noise.min_batch_size must be a whole number of at least 2, got {self.min_batch_size!r}: the sum of "
                "one client is that client's update"
            )

    def candidates(self, draw: Draw, workload: object) -> list[Any]:
        """Return the noise with the fewest survivors set: the most that a run misses with a probability of 1e-7/N.

        Raises:
            ValueError: cohorts are so small that two survivors are missed more often.
        """
        if self.min_batch_size is not None:
            return [self]
        assert isinstance(workload, Workload)
        rate, allowed = draw.sampling_rate * (1 - self.dropouts), GIVEN_UP / (draw.num_units * workload.num_steps)
        fewest = int(stats.binom.ppf(allowed, draw.population, rate))
        while fewest > 0 and stats.binom.cdf(fewest - 1, draw.population, rate) > allowed:
            fewest -= 1
        fewest = min(fewest, math.floor(draw.population * rate))
        if fewest < 2:
            raise ValueError(
                f"expected_batch_size={draw.expected_batch_size} with dropouts={self.dropouts:g} leaves cohorts of "
                "which fewer than two clients may survive, and their sum would be one client's update: raise "
                "expected_batch_size"
            )
        return [dataclasses.replace(self, min_batch_size=fewest)]

    def event(self, draw: Draw, noise_multiplier: float, clip_norm: float) -> Event:
        """Return a round with distributed noise.

        Raises:
            ValueError: rows are drawn.
        """
        if draw.rows_per_unit is not None:
            raise ValueError(
                "noise='distributed' draws clients, and sampling='example' draws single rows of users: leave sampling "
                "out"
            )
        fewest = self.min_batch_size or int(self.candidates(draw, Workload.prefix_sums(1))[0].min_batch_size)
        return DistributedStep(
            num_units=draw.num_units,
            sampling_rate=draw.sampling_rate,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            max_batch_size=most_drawn(draw),
            min_batch_size=fewest,
            dropouts=self.dropouts,
        )

    def stream(self, generator: Normals, num_steps: int) -> NoReturn:
        """Refuse to add the noise centrally.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "noise='distributed' is added by the clients of a federated run, each to its own update, and here one "
            "trainer sees all records: use `dpllm methods federated`, or privacy.noise=independent"
        )

    def words(self) -> str:
        """Return the noise's description, for the report."""
        return "discrete Gaussian noise, of which each client adds a share before secure aggregation,"

    def ensured(self, draw: Draw, drawn: str, noise_stddev: float) -> list[tuple[str, str]]:
        """Return the assumptions of the accounting, and how the run ensures each."""
        sampling, *_ = super().ensured(draw, drawn, noise_stddev)
        noise = (
            "The sum of a round has noise enough, although clients drop out",
            f"each client adds noise of deviation σC/√{self.min_batch_size}, drawn with whole numbers: "
            f"{self.min_batch_size} survivors have {noise_stddev:.6g} together. A round with fewer is given up, "
            "releases nothing, and stays charged",
        )
        dropouts = (
            "Whether a client answers depends neither on the draw nor on the records",
            f"declared, with a share of at most {self.dropouts:g} of all clients on average that do not answer; the "
            "accounting counts rounds that are given up as failures",
        )
        secure = (
            "The server sees only the sum of a round",
            "assumed of a deployment, by secure aggregation (Bonawitz et al., CCS 2017): a matter of cryptography, not "
            "of ε. A simulation adds up the clients' numbers modulo 2^64 in one process, which sees everything",
        )
        return [sampling, noise, dropouts, secure]


def check_dropouts(value: object) -> None:
    """Check a share of clients.

    Raises:
        ValueError: it is not a number in [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"noise.dropouts must be a number from 0 to below 1, got {value!r}: such as 0.3")
