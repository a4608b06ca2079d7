"""Families of mechanisms that contain a claim, ordered by how much they leak.

To bound ε from a trade-off curve, the audit finds the most leaking mechanism that the observations refute. This needs a
family of mechanisms that contains the claimed one:

* `plan_family`: the steps of a run with their noise multiplied by a factor. The claim itself has the factor 1, so the
  claim is refuted exactly when its own trade-off curve is. The curve comes from the accountant.
* `gaussian_family`: Gaussian mechanisms, μ-GDP (Dong, Roth, Su, arXiv:1905.02383). It is used for a model whose steps
  are unknown, and is the usual comparison in the literature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from scipy import special

from dpllm.mechanism.events import Round
from dpllm.privacy.accounting import History, delta_function, epsilon, merge
from dpllm.privacy.gaussian import gaussian_epsilon

MOST_EPSILON = 50.0
"""No bound above this ε is stated; no audit of less than 10^20 canaries could show one."""

_LOSSES = np.concatenate(([0.0], np.geomspace(1e-3, 60.0, 400)))
_RATES = special.ndtr(np.linspace(-9.0, 9.0, 6001))
_COARSE = 1e-3  # grid width of the curves; every delta remains an upper bound, so a curve can only refute too little
_FARTHEST = 2.0**10


@dataclass(frozen=True)
class Member:
    """One mechanism of a family."""

    epsilon: float
    """Its ε at the family's δ."""
    least_fpr: Callable[[float], float]
    """True positive rate of a test -> its smallest possible false positive rate, rounded down."""
    fine: Callable[[], float] | None = None
    """Its ε on the fine grid of claims, if `epsilon` was computed on a coarser one."""

    @property
    def price(self) -> float:
        """Its ε at the family's δ, computed as for a claim."""
        return self.epsilon if self.fine is None else self.fine()


@dataclass(frozen=True)
class Family:
    """Mechanisms that leak more with growing strength.

    Attributes:
        name: a readable name.
        member: a function from a strength above 0 to the mechanism. Strength 1 is the claim, if there is one.
        tolerance: relative resolution of strengths.
    """

    name: str
    member: Callable[[float], Member]
    tolerance: float = 1e-3

    def most_refuted(self, refuted: Callable[[Member], bool]) -> float:
        """Return ε of the most leaking member that is refuted.

        Args:
            refuted: whether the observations contradict a member; if they contradict one, they also contradict all
                that leak less.

        Returns:
            ε, at most `MOST_EPSILON`; 0 when not even a mechanism with almost no leakage is refuted.
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


def plan_family(history: History, delta: float) -> Family:
    """Return the mechanisms that differ from a run only in their noise, which is divided by their strength.

    Args:
        history: the run's (step, count) pairs.
        delta: δ.

    Raises:
        ValueError: the run has no step, or a step without noise, so it claims nothing.

    >>> from dpllm.mechanism.events import Step
    >>> round(plan_family([(Step(sampling_rate=1.0, noise_multiplier=1.0), 1)], 1e-5).member(1.0).epsilon, 2)
    4.38
    """
    steps = merge(history)
    if not steps or any(step.noise_multiplier == 0 for step, _ in steps):
        raise ValueError("a run without steps, or with a step without noise, claims nothing: omit the history")
    return _plan_family(steps, delta)


@lru_cache(maxsize=4)  # keeps the members, because several attacks use the same ones
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
    """Return the function from a true positive rate to the least false positive rate, from δ at the losses.

    From tpr <= exp(e) fpr + D(e) and 1 - fpr <= exp(e) (1 - tpr) + D(e), for every e: any choice of losses gives a
    valid bound. It increases with tpr, so the value at the next smaller rate of a table is also valid.
    """
    factors = np.exp(_LOSSES)
    table = np.zeros_like(_RATES)
    for factor, delta in zip(factors, deltas, strict=True):
        np.maximum(table, (_RATES - delta) / factor, out=table)
        np.maximum(table, 1 - delta - factor * (1 - _RATES), out=table)
    return lambda tpr: float(table[max(0, int(np.searchsorted(_RATES, tpr, side="right")) - 1)])
