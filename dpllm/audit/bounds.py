"""Lower bounds on ε from canaries that were included by coin flips, and the power of an audit.

The bounds are computed from scores and coins, without a model, and decide the verdict.

There are two situations. *One run*: m canaries, each included by an independent fair coin, one training run, a score
per canary; the scores may depend on each other in any way. *Independent runs*: one canary in each of n runs. In each,
two kinds of claim are tested: the pair (ε, δ) of any mechanism, and the trade-off curve of a family of mechanisms,
which shows far more.

* one run, (ε, δ): Steinke, Nasr, Jagielski, arXiv:2305.08846, theorem 5.2;
* one run, curve: Mahloujifar, Melis, Chaudhuri, arXiv:2410.22235;
* independent runs, (ε, δ): Clopper-Pearson intervals as in Nasr et al., arXiv:2101.04535;
* independent runs, curve: Nasr et al., arXiv:2302.07956.

A search for the best of several thresholds also finds one by chance. Here the numbers of guesses are a fixed ladder,
the error is divided over all tests, and `LowerBound.correction` states how.

**Families.** To bound ε from a trade-off curve, the audit finds the most leaking mechanism that the observations
refute. This needs a family of mechanisms, ordered by how much they leak, that contains the claimed one:

* `plan_family`: the steps of a run with their noise multiplied by a factor. The claim itself has the factor 1, so the
  claim is refuted exactly when its own trade-off curve is. The curve comes from the accountant.
* `gaussian_family`: Gaussian mechanisms, μ-GDP (Dong, Roth, Su, arXiv:1905.02383). It is used for a model whose steps
  are unknown, and is the usual comparison in the literature.

**Power.** An audit that cannot fail shows nothing. So every verdict states the share of such audits that would refute a
run with σ/√2 and with σ/2. The best possible attacker is assumed: the scores are simulated from the trade-off curve of
the weaker run, approximated by the Gaussian mechanism with the same ε. Real attacks on a finished model score worse, so
these shares are upper limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from dpllm.mechanism.events import Round
from dpllm.privacy.accounting import History, delta_function, epsilon, merge
from dpllm.privacy.risk import gaussian_distance, gaussian_epsilon
from dpllm.privacy.rounding import up

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


CONFIDENCE = 0.95
ONE_SIDED = (0.02, 0.05, 0.15, 0.5)
"""Shares of the canaries that are guessed to be included: those with the highest scores."""
TWO_SIDED = (0.05, 0.15, 0.4, 0.8)
"""Shares of the canaries that are guessed: the half with the highest scores as included, the other half as excluded.

No share is 1: fair coins rarely include exactly half, and perfect scores must be able to reach the ceiling."""
FEWEST_CANARIES = 10
CHOOSING_SHARE = 0.2
"""Share of the independent runs in which the threshold is chosen; the others test it."""
_ANY_ORDER = 20261
_Ladder = list[tuple[int, int]]  # number of guesses, number of correct guesses


class AuditError(ValueError):
    """An audit would prove nothing, or something untrue; the message states cause, place and remedy."""


@dataclass(frozen=True)
class LowerBound:
    """The lower bound of one method. All bounds of one call hold together, with the requested confidence."""

    method: str
    """Name of the method."""
    epsilon: float
    """ε is at least this, at the given δ; 0: the method showed nothing."""
    ceiling: float
    """The bound that the method would give for perfect scores of this many canaries."""
    num_guesses: int
    """Number of guesses at the best rung of the ladder."""
    num_correct: int
    """Number of correct guesses among them."""
    correction: str
    """How the error was divided."""
    refutes: bool = False
    """Whether this method refutes the claim. For a curve: the claim's own trade-off curve was refuted."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dict(vars(self))


def one_run_bounds(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    delta: float,
    confidence: float = CONFIDENCE,
    history: History | None = None,
    tests: int = 1,
) -> list[LowerBound]:
    """Return the bounds from one run: for the pair (ε, δ), and for a curve.

    Guarantee: if the run is (ε, δ)-differentially private, and, for the second, its trade-off curve is the family's,
    then all bounds are at most ε with probability ``confidence`` over the coins, for any scores.

    Args:
        scores: (m,) the higher, the likelier the canary was included.
        included: (m,) the coins.
        delta: δ of the claim.
        confidence: the joint confidence of all bounds.
        history: the steps of the run, whose curve is the claim; None: the Gaussian curve.
        tests: number of tests that use the same coins; the error is divided by it.

    Raises:
        AuditError: there are too few canaries, all coins are equal, or scores are not numbers.
    """
    scores, included = checked(scores, included, delta, confidence)
    family = plan_family(history, delta) if history is not None else gaussian_family(delta)
    rungs = _ladder(scores, included)
    error = (1 - confidence) / (2 * tests * len(rungs))
    how = _correction(2 * tests * len(rungs), f"{len(rungs)} numbers of guesses, 2 methods", tests)
    num = len(scores)
    perfect = [(guesses, guesses) for guesses, _ in rungs]

    def of_pair(ladder: _Ladder) -> tuple[float, int]:
        found = [one_run_epsilon(num, *rung, delta, error) for rung in ladder]
        best = int(np.argmax(found))
        return found[best], best

    def of_curve(ladder: _Ladder) -> tuple[float, int]:
        return one_run_curve_epsilon(num, ladder, family, error)

    claim = None if history is None else claimed_epsilon(history, delta)
    pair, best = of_pair(rungs)
    above = claim is not None and pair > claim
    bounds = [LowerBound("one run, (ε, δ)", pair, of_pair(perfect)[0], *rungs[best], how, above)]
    found, best = of_curve(rungs)
    member = family.member(1.0)  # the claim itself, if there is one
    refuted = claim is not None and any(_refuted_in_one_run(num, *rung, member, error) for rung in rungs)
    name = f"one run, curve of {family.name}"
    return [*bounds, LowerBound(name, found, of_curve(perfect)[0], *rungs[best], how, refuted)]


class Claim:
    """A test of the ε of a history at δ, without computing the bounds.

    Args:
        history: the steps that are claimed.
        delta: δ of the claim.
        confidence: the joint confidence of all bounds.
        tests: number of tests that use the same coins; the error is divided by it.
    """

    def __init__(self, history: History, delta: float, confidence: float, tests: int) -> None:
        """Compute ε and the curve of the claim."""
        self._epsilon, self._member = claimed_epsilon(history, delta), plan_family(history, delta).member(1.0)
        self._delta, self._confidence, self._tests = delta, confidence, tests

    def refuted_in_one_run(self, scores: NDArray[np.float64], included: NDArray[np.bool_]) -> bool:
        """Return whether a bound of `one_run_bounds` refutes the claim."""
        scores, included = checked(scores, included, self._delta, self._confidence)
        rungs = _ladder(scores, included)
        error = (1 - self._confidence) / (2 * self._tests * len(rungs))
        return any(
            _one_run_p_value(len(scores), *rung, self._epsilon, self._delta) < error
            or _refuted_in_one_run(len(scores), *rung, self._member, error)
            for rung in rungs
        )

    def refuted_in_trials(self, scores: NDArray[np.float64], included: NDArray[np.bool_]) -> bool:
        """Return whether a bound of `trial_bounds` refutes the claim."""
        scores, included = checked(scores, included, self._delta, self._confidence)
        begin = math.ceil(CHOOSING_SHARE * len(scores))
        threshold = _best_threshold(scores[:begin], included[:begin])
        error = (1 - self._confidence) / (2 * self._tests)
        found = _rate_bounds(scores[begin:] > threshold, included[begin:], error)
        return _epsilon_of_rates(*found, self._delta) > self._epsilon or found[1] < self._member.least_fpr(found[0])


def claimed_epsilon(history: History, delta: float) -> float:
    """Return the ε that a history claims at δ, under zero-out adjacency."""
    return epsilon(history, delta, "zero-out")


def trial_bounds(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    delta: float,
    confidence: float = CONFIDENCE,
    history: History | None = None,
    tests: int = 1,
) -> list[LowerBound]:
    """Return the bounds from independent runs with one canary each: for the pair (ε, δ), and for a curve.

    The first fifth of the runs choose the threshold; the others test it.

    Guarantee: as for `one_run_bounds`, if the runs are independent.

    Args:
        scores: (n,) one per run; the higher, the likelier the canary was included.
        included: (n,) the coins.
        delta: δ of the claim.
        confidence: the joint confidence of all bounds.
        history: the steps of one run, whose curve is the claim; None: the Gaussian curve.
        tests: number of tests that use the same coins; the error is divided by it.

    Raises:
        AuditError: there are too few runs, all coins are equal, or scores are not numbers.
    """
    scores, included = checked(scores, included, delta, confidence)
    family = plan_family(history, delta) if history is not None else gaussian_family(delta)
    begin = math.ceil(CHOOSING_SHARE * len(scores))
    threshold = _best_threshold(scores[:begin], included[:begin])
    said_in, truth = scores[begin:] > threshold, included[begin:]
    error = (1 - confidence) / (2 * tests)
    how = _correction(2 * tests, f"threshold chosen in {begin} other runs, 2 methods", tests)

    def of_pair(rates: tuple[float, float]) -> float:
        return _epsilon_of_rates(*rates, delta)

    def of_curve(rates: tuple[float, float]) -> float:
        return _curve_epsilon_of_rates(*rates, family)

    found, best = (_rate_bounds(guess, truth, error) for guess in (said_in, truth))
    correct = int((said_in == truth).sum())
    claim = None if history is None else claimed_epsilon(history, delta)
    above = claim is not None and of_pair(found) > claim
    refuted = claim is not None and found[1] < family.member(1.0).least_fpr(found[0])
    return [
        LowerBound(name, bound_of(found), bound_of(best), len(truth), correct, how, refutes)
        for name, bound_of, refutes in (
            ("independent runs, (ε, δ)", of_pair, above),
            (f"independent runs, curve of {family.name}", of_curve, refuted),
        )
    ]


def one_run_epsilon(num_canaries: int, num_guesses: int, num_correct: int, delta: float, error: float) -> float:
    """Return the ε below which this many correct guesses would be too unlikely (arXiv:2305.08846, theorem 5.2).

    Args:
        num_canaries: m.
        num_guesses: r, fixed in advance.
        num_correct: v.
        delta: δ.
        error: probability that the result is above ε.

    >>> round(one_run_epsilon(1000, 1000, 1000, 1e-5, 0.05), 2)
    5.78
    """

    def gap(at: float) -> float:
        return error - _one_run_p_value(num_canaries, num_guesses, num_correct, at, delta)

    if gap(0.0) <= 0:
        return 0.0
    high = 1.0
    while gap(high) > 0 and high < MOST_EPSILON:
        high *= 2
    return float(optimize.brentq(gap, 0.0, high, xtol=1e-6)) if gap(high) <= 0 else MOST_EPSILON


def _one_run_p_value(num_canaries: int, num_guesses: int, num_correct: int, at: float, delta: float) -> float:
    """Return P[Bin(r, e^ε/(1+e^ε)) >= v] + 2 m δ max_i P[v - i <= Bin < v] / i."""
    accuracy = special.expit(at)
    above = stats.binom.sf(num_correct - 1, num_guesses, accuracy)
    if delta == 0 or num_correct == 0:
        return float(above)
    lower = np.arange(1, num_correct + 1)
    slack = (stats.binom.sf(num_correct - lower - 1, num_guesses, accuracy) - above) / lower
    return min(1.0, float(above + 2 * num_canaries * delta * slack.max()))


def one_run_curve_epsilon(num_canaries: int, ladder: _Ladder, family: Family, error: float) -> tuple[float, int]:
    """Return ε of the most leaking member of a family that a rung refutes (arXiv:2410.22235), and the rung's number.

    Args:
        num_canaries: m.
        ladder: numbers of guesses, fixed in advance, and the numbers of correct ones.
        family: the mechanisms.
        error: the probability, for each rung, that it refutes the true mechanism.

    >>> from dpllm.audit.bounds import gaussian_family
    >>> round(one_run_curve_epsilon(1000, [(1000, 1000)], gaussian_family(1e-5), 0.05)[0], 2)
    12.33
    """
    best = 0

    def refuted(member: Member) -> bool:
        nonlocal best
        for number, rung in enumerate(ladder):
            if _refuted_in_one_run(num_canaries, *rung, member, error):
                best = number
                return True
        return False

    return family.most_refuted(refuted), best


def _refuted_in_one_run(num_canaries: int, num_guesses: int, num_correct: int, member: Member, error: float) -> bool:
    """Return whether this many correct guesses have a probability below ``error``.

    Suppose that their probability is exactly ``error``. ``right`` and ``wrong`` bound the mass of canaries guessed
    correctly and wrongly in the event that at least this many guesses are correct. Going down one correct guess at a
    time, the curve gives the least mass of the next event. The masses cannot add up to more than all guesses.
    """
    right = error * num_correct / num_canaries
    wrong = error * (num_guesses - num_correct) / num_canaries
    for below in range(num_correct - 1, -1, -1):
        least = max(wrong, member.least_fpr(right))
        if least == wrong:
            break  # both are constant from here on
        right = min(right + below / (num_guesses - below) * (least - wrong), 1.0)
        wrong = least
    return right + wrong > num_guesses / num_canaries


def checked(
    scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, confidence: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return scores and coins as arrays, after checking them.

    Raises:
        AuditError: they cannot be audited.
    """
    scores, coins = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if scores.ndim != 1 or coins.shape != scores.shape:
        raise AuditError(f"each canary needs one score and one coin, got shapes {scores.shape} and {coins.shape}")
    if coins.dtype != np.bool_:
        raise AuditError(f"the coins must be booleans, got {coins.dtype}: state whether each canary was included")
    if not 0 < delta < 1 or not 0 < confidence < 1:
        raise AuditError(f"delta and confidence must be between 0 and 1, got {delta} and {confidence}")
    if not np.isfinite(scores).all():
        raise AuditError(
            f"{int((~np.isfinite(scores)).sum())} of {len(scores)} scores are not finite: the model overflows on these "
            "canaries. Score them in float32, or use different canaries"
        )
    if len(scores) < FEWEST_CANARIES:
        raise AuditError(
            f"{len(scores)} canaries cannot show anything: even with perfect scores the bound would be "
            f"{up(_ceiling_of_few(len(scores), delta, confidence), 2)}. Use at least {FEWEST_CANARIES}, preferably 1000"
        )
    if coins.all() or not coins.any():
        raise AuditError(
            "all canaries were included, or none, so there is nothing to distinguish. Include each canary by its own "
            "fair coin (`dpllm audit prepare`)"
        )
    return scores, coins


def _ceiling_of_few(num: int, delta: float, confidence: float) -> float:
    return one_run_epsilon(num, num, num, delta, 1 - confidence) if num else 0.0


def _ladder(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> _Ladder:
    """Return the numbers of guesses and of correct ones, for fixed shares; ties are broken without the coins."""
    num = len(scores)
    shuffled = np.random.default_rng(_ANY_ORDER).permutation(num)
    truth = included[shuffled][np.argsort(-scores[shuffled], kind="stable")]
    right_in, right_out = np.cumsum(truth), np.cumsum(~truth[::-1])
    rungs = []
    for share in ONE_SIDED:
        guesses = math.ceil(share * num)
        rungs.append((guesses, int(right_in[guesses - 1])))
    for share in TWO_SIDED:
        side = max(1, math.floor(share * num / 2))
        rungs.append((2 * side, int(right_in[side - 1] + right_out[side - 1])))
    return rungs


def _correction(parts: int, of_what: str, tests: int) -> str:
    others = f", {tests} attacks" if tests > 1 else ""
    return f"Bonferroni over {parts} ({of_what}{others})"


def _best_threshold(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> float:
    """Return the score threshold whose estimated rates show the most, with a pseudo-count in each cell."""
    candidates = np.quantile(scores, np.linspace(0.02, 0.98, 97))
    said_in = scores[None, :] > candidates[:, None]
    num_in, num_out = included.sum() + 2, (~included).sum() + 2
    tpr, fpr = ((said_in & included).sum(1) + 1) / num_in, ((said_in & ~included).sum(1) + 1) / num_out
    mu = special.ndtri(tpr) - special.ndtri(fpr)
    deviation = np.sqrt(tpr * (1 - tpr) / num_in / _density(tpr) ** 2 + fpr * (1 - fpr) / num_out / _density(fpr) ** 2)
    return float(candidates[int(np.argmax(mu - deviation))])


def _density(rate: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the density of the normal distribution at the quantile of a rate."""
    return np.exp(-(special.ndtri(rate) ** 2) / 2) / math.sqrt(2 * math.pi)


def _rate_bounds(said_in: NDArray[np.bool_], truth: NDArray[np.bool_], error: float) -> tuple[float, float]:
    """Return Clopper-Pearson's smallest true and largest false positive rate, each with half of the error."""
    found, accused = int((said_in & truth).sum()), int((said_in & ~truth).sum())
    num_in, num_out = int(truth.sum()), int((~truth).sum())
    low = stats.beta.ppf(error / 2, found, num_in - found + 1) if found else 0.0
    high = stats.beta.ppf(1 - error / 2, accused + 1, num_out - accused) if accused < num_out else 1.0
    return float(low), float(high)


def _epsilon_of_rates(tpr: float, fpr: float, delta: float) -> float:
    """Return the least ε with tpr <= exp(ε) fpr + δ and 1 - fpr <= exp(ε) (1 - tpr) + δ.

    Reference: Kairouz, Oh, Viswanath, arXiv:1311.0776.
    """
    ratios = [(hit - delta) / miss for hit, miss in ((tpr, fpr), (1 - fpr, 1 - tpr)) if hit > delta]
    return max([0.0, *(math.log(ratio) for ratio in ratios if ratio > 1)])


def _curve_epsilon_of_rates(tpr: float, fpr: float, family: Family) -> float:
    return family.most_refuted(lambda member: fpr < member.least_fpr(tpr))


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
