"""The probability that an audit notices that a run has less noise than its plan.

An audit that cannot fail shows nothing. So every verdict states the share of such audits that would refute a run with
σ/√2 and with σ/2. The best possible attacker is assumed: the scores are simulated from the trade-off curve of the
weaker run, approximated by the Gaussian mechanism with the same ε. Real attacks on a finished model score worse, so
these shares are upper limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpllm.audit.bounds import CONFIDENCE, Claim
from dpllm.privacy.accounting import History, epsilon, merge
from dpllm.privacy.risk import gaussian_distance
from dpllm.privacy.rounding import up

WEAKER = {"σ/√2": math.sqrt(2), "σ/2": 2.0}
"""Name of a weaker run's noise -> the factor by which it is smaller."""
HARDLY = 0.2
"""An audit that notices σ/2 with a smaller probability can hardly fail."""

_SIMULATIONS = 40
_SEED = 20262
_STRONGEST = 40.0  # μ of a mechanism that hides nothing, as far as a simulation can show


def power(
    history: History,
    delta: float,
    *,
    in_one_run: int = 0,
    in_trials: int = 0,
    confidence: float = CONFIDENCE,
    tests: int = 1,
) -> dict[str, float]:
    """Return the share of audits that refute a run with less noise than claimed: name of the noise -> share.

    Args:
        history: the steps that are claimed.
        delta: δ of the claim.
        in_one_run: number of canaries in one run; 0: the audit has no such test.
        in_trials: number of independent runs with one canary each; 0: the audit has none.
        confidence: confidence of the audit.
        tests: number of attacks over which the error is divided.

    >>> from dpllm.mechanism.events import Step
    >>> power([(Step(sampling_rate=1.0, noise_multiplier=1.0), 1)], 1e-5, in_trials=1000)["σ/2"] > 0.9
    True
    """
    claim = Claim(history, delta, confidence, tests)
    return {
        name: _share(claim, _mu_of(history, factor, delta), in_one_run, in_trials) for name, factor in WEAKER.items()
    }


def _share(claim: Claim, mu: float, in_one_run: int, in_trials: int) -> float:
    rng = np.random.default_rng(_SEED)
    seen = 0
    for _ in range(_SIMULATIONS):
        found = bool(in_one_run) and claim.refuted_in_one_run(*_draw(in_one_run, mu, rng))
        if in_trials and not found:
            found = claim.refuted_in_trials(*_draw(in_trials, mu, rng))
        seen += found
    return seen / _SIMULATIONS


def _draw(num: int, mu: float, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    coins = rng.random(num) < 0.5
    coins[:2] = (True, False)  # at least one of each
    return rng.standard_normal(num) + mu * coins, coins


def _mu_of(history: History, factor: float, delta: float) -> float:
    """Return μ of the Gaussian mechanism with the same ε at δ as the steps with less noise."""
    weaker = [(step.with_noise(step.noise_multiplier / factor), count) for step, count in merge(history)]
    wanted = epsilon(weaker, delta, "zero-out", 1e-3)
    return _STRONGEST if wanted == math.inf else min(_STRONGEST, gaussian_distance(wanted, delta))


@dataclass(frozen=True)
class NoiseTest:
    """A test of the noise itself, on projections of releases to which no unit contributes."""

    num: int
    """Number of projections."""
    ratio: float
    """Measured standard deviation divided by the plan's."""
    highest: float
    """The upper end of its one-sided interval, at 1 - `error`."""
    error: float
    """Probability that correct noise is refuted because of `highest`, and the same again because of `weakest`."""
    weakest: float | None = None
    """The upper end for the direction over a block's steps with the smallest deviation; None: unknown."""

    @classmethod
    def of(cls, projections: NDArray[np.float64], stddev: float, error: float) -> NoiseTest:
        """Test projections on unit vectors, which are independent N(0, stddev²) or wider if the noise is correct.

        Of n vectors of T independent normal numbers, the smallest singular value over √n is less than
        1 - √(T/n) - a/√n with probability at most exp(-a²/2) (Davidson and Szarek 2001).

        Args:
            projections: (R, T, D) of R blocks of T steps in D directions, or of one step each, in any shape.
            stddev: σC.
            error: probability that correct noise is refuted.

        >>> rng = np.random.default_rng(0)
        >>> [NoiseTest.of(rng.normal(0, sigma, 1600), 1.0, 0.01).refuted for sigma in (1.0, 0.9)]
        [False, True]
        """
        seen = np.asarray(projections, dtype=np.float64) / stddev
        weakest = None
        if seen.ndim == 3 and seen.shape[1] > 1:
            error /= 2
            num, steps = seen.shape[0] * seen.shape[2], seen.shape[1]
            lowest = 1 - math.sqrt(steps / num) - math.sqrt(-2 * math.log(error) / num)
            over_steps = np.moveaxis(seen, 1, 2).reshape(num, steps)
            if lowest > 0:
                weakest = float(np.linalg.svd(over_steps, compute_uv=False)[-1]) / math.sqrt(num) / lowest
        values = seen.ravel()
        total = float((values**2).sum())
        highest = math.sqrt(total / float(stats.chi2.ppf(error, len(values))))
        return cls(len(values), math.sqrt(total / len(values)), highest, error, weakest)

    @property
    def refuted(self) -> bool:
        """Whether the noise is smaller than the plan states."""
        return not self.highest >= 1 or (self.weakest is not None and not self.weakest >= 1)

    def power(self) -> dict[str, float]:
        """Return the share of such tests that notice less noise: name of the noise -> share."""
        critical = float(stats.chi2.ppf(self.error, self.num))
        return {name: float(stats.chi2.cdf(critical * factor**2, self.num)) for name, factor in WEAKER.items()}

    def __str__(self) -> str:
        weakest = "" if self.weakest is None else f", in some direction over the steps at most {up(self.weakest)}"
        return f"{self.ratio:.4f} of σC in {self.num:,} projections, at most {up(self.highest)}{weakest}"


def power_in_words(shares: Mapping[str, float]) -> str:
    """Return the shares as one sentence.

    >>> power_in_words({"σ/√2": 0.05, "σ/2": 0.1})
    'an ideal attack would refute σ/√2 in 5 %, σ/2 in 10 % of such audits: this audit can hardly fail'
    """
    listed = ", ".join(f"{name} in {100 * share:.0f} %" for name, share in shares.items())
    hardly = ": this audit can hardly fail" if shares and max(shares.values()) < HARDLY else ""
    return f"an ideal attack would refute {listed} of such audits{hardly}"
