"""The mechanisms that a claim may be about, ordered by how much they leak.

Place in the flow: the first of the audit's statistics. A bound on ε from a trade-off curve asks: which is the most
leaking mechanism that the observations refute? That needs a family of mechanisms, of which the claimed one is a member:

* `plan_family`: the steps of a run with their noise multiplied by a factor. The claim itself has the factor 1, so that
  the claim is refuted exactly when its own trade-off curve is. The curve comes from the accountant.
* `gaussian_family`: Gaussian mechanisms, μ-GDP (Dong, Roth, Su, arXiv:1905.02383). For a model of which no step is
  known, and what the literature compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from scipy import optimize, special

from dpllm.mechanism.events import Round
from dpllm.privacy.accounting import History, delta_function, epsilon, merge

MOST_EPSILON = 50.0
"""No bound is stated above this ε; no audit of less than 10^20 canaries could show one."""

_LOSSES = np.concatenate(([0.0], np.geomspace(1e-3, 60.0, 400)))
_RATES = special.ndtr(np.linspace(-9.0, 9.0, 6001))
_COARSE = 1e-3  # width of the grid of the curves; every delta stays an upper bound, so a curve refutes too little
_FARTHEST = 2.0**10


@dataclass(frozen=True)
class Member:
    """One mechanism of a family."""

    epsilon: float
    """Its ε at the family's δ."""
    least_fpr: Callable[[float], float]
    """True positive rate of a test -> the smallest false positive rate that it can have; never too large."""
    fine: Callable[[], float] | None = None
    """Its ε on the grid that claims are computed on, where `epsilon` is of a coarser one."""

    @property
    def price(self) -> float:
        """Its ε at the family's δ, as a claim would state it."""
        return self.epsilon if self.fine is None else self.fine()


@dataclass(frozen=True)
class Family:
    """Mechanisms that leak the more, the larger their strength.

    Attributes:
        name: for people.
        member: a strength above 0 to the mechanism. Strength 1 is the claim, where there is one.
        tolerance: how finely strengths are told apart, relatively.
    """

    name: str
    member: Callable[[float], Member]
    tolerance: float = 1e-3

    def most_refuted(self, refuted: Callable[[Member], bool]) -> float:
        """Return ε of the most leaking member that is refuted.

        Args:
            refuted: whether the observations contradict a member; if they contradict one, they do all that leak less.

        Returns:
            0 when not even a mechanism of hardly any leakage is refuted; `MOST_EPSILON` at most.
        """
        low, high = 0.0, 1.0
        if refuted(self.member(high)):
            while refuted(self.member(high)):
                low, high = high, 2 * high
                if high > _FARTHEST or self.member(low).epsilon >= MOST_EPSILON:
                    return MOST_EPSILON
        else:
            low = high / 2
            while not refuted(self.member(low)):
                low, high = low / 2, low
                if low < 1 / _FARTHEST:
                    return 0.0
        while high > low * (1 + self.tolerance):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if refuted(self.member(middle)) else (low, middle)
        return min(self.member(low).price, MOST_EPSILON)


def gaussian_family(delta: float) -> Family:
    """Return the Gaussian mechanisms; their strength is μ, sensitivity over noise.

    >>> round(gaussian_family(1e-5).member(1.0).epsilon, 2)
    4.38
    """

    def member(strength: float) -> Member:
        return Member(gaussian_epsilon(strength, delta), lambda tpr: float(special.ndtr(special.ndtri(tpr) - strength)))

    return Family("Gaussian", member, tolerance=1e-9)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return ε at δ of a μ-Gaussian mechanism (Balle, Wang, arXiv:1805.06530, theorem 8)."""

    def gap(at: float) -> float:
        return _gaussian_delta(mu, at) - delta

    if mu == 0 or gap(0.0) <= 0:
        return 0.0
    high = 1.0
    while gap(high) > 0:
        high *= 2
    return float(optimize.brentq(gap, 0.0, high, xtol=1e-9))


def _gaussian_delta(mu: float, at: float) -> float:
    return float(special.ndtr(mu / 2 - at / mu) - math.exp(at + special.log_ndtr(-mu / 2 - at / mu)))


def plan_family(history: History, delta: float) -> Family:
    """Return the mechanisms that differ from a run in their noise alone; their strength divides it.

    Args:
        history: the run's (step, count) pairs.
        delta: δ.

    Raises:
        ValueError: the run has no step, or one without noise: nothing is claimed then.

    >>> from dpllm.mechanism.events import Step
    >>> round(plan_family([(Step(sampling_rate=1.0, noise_multiplier=1.0), 1)], 1e-5).member(1.0).epsilon, 2)
    4.38
    """
    steps = merge(history)
    if not steps or any(step.noise_multiplier == 0 for step, _ in steps):
        raise ValueError("a run without steps, or with a step without noise, claims nothing: leave the history out")
    return _plan_family(steps, delta)


@lru_cache(maxsize=4)  # whose members are kept: several attacks ask for the same ones
def _plan_family(steps: tuple[tuple[Round, int], ...], delta: float) -> Family:
    @cache
    def member(strength: float) -> Member:
        scaled = [(step.with_noise(step.noise_multiplier / strength), count) for step, count in steps]
        delta_at = delta_function(scaled, "zero-out", _COARSE, tilted=False)
        deltas = np.array([delta_at(at) for at in _LOSSES])
        coarse = epsilon(scaled, delta, "zero-out", _COARSE)
        return Member(coarse, _rounded_down(deltas), lambda: epsilon(scaled, delta, "zero-out"))

    return Family("the run's own steps", member)


def _rounded_down(deltas: np.ndarray) -> Callable[[float], float]:
    """The least false positive rate for any true positive rate, from δ at the losses.

    From tpr <= exp(e) fpr + D(e) and 1 - fpr <= exp(e) (1 - tpr) + D(e), for every e: any choice of losses gives a
    valid bound. It rises with tpr, so that the value at the next smaller rate of a table is one, too.
    """
    factors = np.exp(_LOSSES)
    table = np.zeros_like(_RATES)
    for factor, delta in zip(factors, deltas, strict=True):
        np.maximum(table, (_RATES - delta) / factor, out=table)
        np.maximum(table, 1 - delta - factor * (1 - _RATES), out=table)
    return lambda tpr: float(table[max(0, int(np.searchsorted(_RATES, tpr, side="right")) - 1)])
