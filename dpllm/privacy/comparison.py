"""Compute ε of the same steps with other accountants, and compare it with the ε that dpllm reports.

No run depends on these numbers: its ε comes from `accounting.epsilon`. These methods check that ε (dp_accounting's own
accountant, Rényi accounting), or show how much it saves (zero-concentrated privacy, advanced and basic composition).

There is no accountant by the central limit theorem ("Gaussian differential privacy"), since it is not an upper bound:
at δ = 1e-5 it gives 4.455 where ε is 4.814 (σ = 1, q = 0.02, 1500 steps), at δ = 1e-6 0.494 where ε is 0.963 (σ = 0.6,
q = 1e-4, 100 000 steps).

Rényi accounting and zero-concentrated privacy hold under zero-out only: dp_accounting's Rényi accountant leaves out the
factor of 2 in the sensitivity under replace-one (google/differential-privacy, number 378).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import absl.logging
import dp_accounting
from dp_accounting import dp_event
from scipy import optimize

from dpllm.mechanism.events import Step
from dpllm.privacy import accounting
from dpllm.privacy.accounting import DISCRETIZATION, History, merge
from dpllm.privacy.rounding import up

UPPER_BOUND = "upper bound"
ESTIMATE = "estimate"
NEGLIGIBLE = 2e-3
"""The largest ε that truncation may add where an accounting without truncation is used; a plan's default adds less."""

_RELATIONS = {
    "zero-out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
_COARSE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """One row of `compare`."""

    name: str
    epsilon: float | None
    """None: the method does not apply, and `note` gives the reason."""
    kind: str
    """`UPPER_BOUND` or `ESTIMATE`."""
    note: str
    """Effects that the number includes or omits, on one line."""


def compare(history: History, delta: float, adjacency: str = "zero-out") -> list[Comparison]:
    """Return ε of a history by every method; the first row is the method that dpllm reports.

    Args:
        history: (event, count) pairs.
        delta: δ, between 0 and 1.
        adjacency: "zero-out" or "replace-one".

    Returns:
        A row per method, always the same methods in the same order.

    Raises:
        ValueError: as `accounting.epsilon`.

    >>> step = Step(sampling_rate=0.02, noise_multiplier=1.0)
    >>> [(row.name, round(row.epsilon, 1)) for row in compare([(step, 1500)], 1e-5)][1:4]
    [('PLD, dp_accounting', 4.8), ('Rényi', 5.3), ('zCDP', 932.7)]
    """
    merged = merge(history)
    reported = accounting.epsilon(merged, delta, adjacency)
    rows = [
        Comparison("PLD", reported, UPPER_BOUND, "what dpllm reports; includes sampling, truncation and rounding"),
        _row(
            "PLD, dp_accounting",
            UPPER_BOUND,
            lambda: library_epsilon(merged, delta, adjacency),
            f"its own accountant at discretization {_COARSE:g}, without a margin for rounding",
        ),
    ]
    outside = f"not under {adjacency}: the library's bound would be too low"
    truncation = "without the effect of truncation" if _truncates(merged) else "these steps do not truncate"
    if adjacency == "zero-out":
        kind = ESTIMATE if _truncates(merged) else UPPER_BOUND
        rows.append(_row("Rényi", kind, lambda: renyi_epsilon(merged, delta), f"always looser; {truncation}"))
        rho = f"ρ = {zcdp_rho(merged):.4g}; no gain from sampling"
        rows.append(Comparison("zCDP", zcdp_epsilon(merged, delta), UPPER_BOUND, rho))
    else:
        rows.append(Comparison("Rényi", None, UPPER_BOUND, outside))
        rows.append(Comparison("zCDP", None, UPPER_BOUND, "stated for zero-out only"))
    for name, method, note in (
        ("advanced composition", advanced_epsilon, "each step at its own (ε, δ/2T), then a tail bound over the steps"),
        ("basic composition", basic_epsilon, "each step at its own (ε, δ/T), added up"),
    ):
        rows.append(_row(name, UPPER_BOUND, partial(method, merged, delta, adjacency), note))
    return rows


def _row(name: str, kind: str, method: Callable[[], float | None], note: str) -> Comparison:
    """Return the row of a method; if the method raises a ValueError, its message becomes the note."""
    try:
        value = method()
    except ValueError as error:
        return Comparison(name, None, kind, str(error))
    if value is None:
        return Comparison(name, None, kind, "not defined if the rows of one unit are drawn individually")
    return Comparison(name, value, kind, note)


def _truncates(history: History) -> bool:
    return any(one.truncates for one, _ in merge(history))


def library_epsilon(
    history: History, delta: float, adjacency: str = "zero-out", discretization: float = _COARSE
) -> float:
    """Return ε as dp_accounting's own PLDAccountant computes it from its own events: a check of `accounting.epsilon`.

    On the coarse default grid it is the looser of the two. It reserves no δ for rounding.

    Raises:
        ValueError: the library has no event for such steps under this adjacency, or its grid would not fit into memory.
    """
    from dp_accounting.pld import PLDAccountant

    if adjacency not in _RELATIONS:
        raise ValueError(f"adjacency must be one of {', '.join(map(repr, _RELATIONS))}, got {adjacency!r}")
    merged = merge(history)
    if any(step.noise_multiplier == 0 for step, _ in merged):
        return math.inf
    if gap := next((one.library_gap for one, _ in merged if one.library_gap), None):
        raise ValueError(f"dp_accounting has no loss distribution of {gap}")
    if not all(one.has_pair(adjacency) for one, _ in merged):
        raise ValueError(
            f"dp_accounting has no {adjacency} event for units whose rows are drawn individually: use zero-out"
        )
    if accounting.discretization_used(merged, adjacency, discretization) > discretization:
        raise ValueError(f"its grid of width {discretization:g} would need too much memory for these steps")
    accountant = PLDAccountant(_RELATIONS[adjacency], discretization)
    for one, count in merged:
        accountant.compose(one.dp_event(), count)
    return max(float(accountant.get_epsilon(delta)), discretization) if merged else 0.0


def fine_library_epsilon(history: History, delta: float) -> tuple[float, float]:
    """Return `library_epsilon` under zero-out, accurately enough to reveal a wrong `accounting.epsilon`.

    On the coarse grid, ε is up to 3 % too large if there are very many small steps. In that case, or if ours is too
    small, ε is computed again on a grid as fine as ours.

    Returns:
        ε, and the width of the grid.

    Raises:
        ValueError: as `library_epsilon`.

    >>> step = Step(sampling_rate=1e-4, noise_multiplier=0.6)
    >>> found, grid = fine_library_epsilon([(step, 100_000)], 1e-6)
    >>> round(found, 4), grid
    (0.9638, 0.0001)
    """
    found, ours = library_epsilon(history, delta), accounting.epsilon(history, delta)
    if found > max(ours + _COARSE, ours * 1.005):
        with contextlib.suppress(ValueError):  # too large for memory: the coarse grid suffices for such a large ε
            return library_epsilon(history, delta, discretization=DISCRETIZATION), DISCRETIZATION
    return found, _COARSE


def _plain(history: History) -> list[tuple[Step, int]] | None:
    """Return the rounds as plain Poisson-sampled Gaussians; None if one of them is not."""
    plain = [(one.untruncated, count) for one, count in merge(history)]
    found = [(step, count) for step, count in plain if step is not None]
    return found if len(found) == len(plain) else None


def renyi_epsilon(history: History, delta: float) -> float | None:
    """Return ε by Rényi accounting under zero-out, without the effect of truncation: a second, independent bound.

    It is only a cross-check: when truncation costs nothing, it is looser than `accounting.epsilon`.

    Returns:
        ε, never 0 after a step; inf if a step has no noise; None if the rows of one unit are drawn individually.

    References: Mironov, Talwar, Zhang, arXiv:1908.10530, through dp_accounting's RdpAccountant.
    """
    merged = merge(history)
    if any(step.noise_multiplier == 0 for step, _ in merged):
        return math.inf
    events = [(one.renyi_event, count) for one, count in merged]
    known = [(event, count) for event, count in events if event is not None]
    if len(known) < len(events):
        return None
    return max(_renyi(known, delta), DISCRETIZATION) if known else 0.0


def best_of_epsilon(history: History, delta: float, mean_runs: float, shape: float = 1.0) -> float | None:
    """Return ε of tuning: a random number of runs with this history, of which only the best is released.

    The number of runs is drawn from a geometric distribution (shape 1), a logarithmic one (0), a Poisson one (inf) or
    a truncated negative binomial one (in between). It is kept secret, as are the other runs. A fixed number of runs
    would compose instead. The method is Rényi accounting under zero-out, since no other is known. It ignores
    truncation, so steps in which truncation costs privacy are refused. The result is never below the ε of one run.

    Args:
        history: (event, count) pairs of one run.
        delta: δ.
        mean_runs: expected number of runs, at least 1.
        shape: shape of the distribution of the number of runs, at least 0.

    Returns:
        ε; inf if a step has no noise; None if the rows of one unit are drawn individually.

    Raises:
        ValueError: a number is out of range, or the truncation of a step costs privacy.

    References: Papernot, Steinke, arXiv:2110.03620, theorems 2 and 6, through dp_accounting's RepeatAndSelectDpEvent.

    >>> step = Step(sampling_rate=0.02, noise_multiplier=1.0)
    >>> round(best_of_epsilon([(step, 1500)], 1e-5, mean_runs=10), 2)
    9.26
    """
    if not (mean_runs >= 1 and math.isfinite(mean_runs)):
        raise ValueError(f"mean_runs must be at least 1 and finite, got {mean_runs}")
    if not shape >= 0:
        raise ValueError(f"shape must be at least 0, got {shape}")
    _check_delta(delta)
    merged = merge(history)
    if not merged:
        return 0.0
    if any(step.noise_multiplier == 0 for step, _ in merged):
        return math.inf
    plain = _plain(merged)
    if plain is None:
        return None
    one_run, whole = accounting.epsilon(merged, delta), accounting.epsilon(plain, delta)
    if one_run > whole + NEGLIGIBLE:
        raise ValueError(
            f"the ε of the best of several runs ignores truncation, but truncation costs privacy here: one run has "
            f"ε = {up(one_run)}, and {up(whole)} without truncation. Raise --max-batch-size until truncation costs "
            "nothing (as a plan's default does), or add up the runs"
        )
    run = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(event, count) for event, count in _events(plain)])
    repeated = dp_event.RepeatAndSelectDpEvent(run, float(mean_runs), float(shape))
    return max(_renyi([(repeated, 1)], delta), one_run, DISCRETIZATION)


def _events(plain: list[tuple[Step, int]]) -> list[tuple[dp_accounting.DpEvent, int]]:
    return [(step.dp_event(), count) for step, count in plain]


def _renyi(events: list[tuple[dp_accounting.DpEvent, int]], delta: float) -> float:
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=_RELATIONS["zero-out"])
    verbosity = absl.logging.get_verbosity()
    # An order whose series does not converge is skipped with a warning.
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        for event, count in events:
            accountant.compose(event, count)
        return float(accountant.get_epsilon(delta))
    finally:
        absl.logging.set_verbosity(verbosity)


def zcdp_rho(history: History) -> float:
    """Return the ρ of zero-concentrated privacy under zero-out, as if every step held all units.

    One unit moves a step's sum by at most C, or by kC when k rows of a unit are clipped individually; a sum with
    discrete noise by its sensitivity (arXiv:2004.00010, theorem 4). This holds for every draw and its truncation, which
    do not depend on a unit's contribution. So ρ is the sum of k²/(2σ²) over the steps.

    References: Bun, Steinke, arXiv:1605.02065, proposition 1.6 and lemma 1.7.

    >>> zcdp_rho([(Step(sampling_rate=0.02, noise_multiplier=2.0), 100)])
    12.5
    """
    return float(sum(count * step.zcdp_rho for step, count in merge(history)))


def zcdp_epsilon(history: History, delta: float) -> float:
    """Return ε by zero-concentrated privacy under zero-out; an upper bound that gains nothing from sampling.

    It is the minimum over α > 1 of αρ + log(1 - 1/α) - log(αδ)/(α - 1). Every α gives a valid ε, so an inexact search
    for the best α is safe.

    Raises:
        ValueError: δ is out of range.

    References: `zcdp_rho`; Canonne, Kamath, Steinke, arXiv:2004.00010, proposition 12.

    >>> round(zcdp_epsilon([(Step(sampling_rate=1.0, noise_multiplier=10.0), 1)], 1e-5), 2)
    0.38
    """
    _check_delta(delta)
    rho = zcdp_rho(history)
    if rho == 0 or rho == math.inf:
        return rho

    def at(log_excess: float) -> float:
        excess = math.exp(log_excess)  # α - 1
        return (1 + excess) * rho - math.log1p(1 / excess) - (math.log1p(excess) + math.log(delta)) / excess

    around = 0.5 * math.log(math.log(1 / delta) / rho)  # the minimum of the conversion without its two logarithms
    best = optimize.minimize_scalar(at, bounds=(around - 5, around + 5), method="bounded", options={"xatol": 1e-9})
    return max(float(best.fun), DISCRETIZATION)


def basic_epsilon(history: History, delta: float, adjacency: str = "zero-out") -> float:
    """Return ε by basic composition: each of T steps is (ε₀, δ/T)-private by itself, and the ε₀ add up.

    Raises:
        ValueError: δ is out of range.
    """
    _check_delta(delta)
    merged = merge(history)
    num_steps = sum(count for _, count in merged)
    return sum(count * accounting.epsilon([(step, 1)], delta / num_steps, adjacency) for step, count in merged)


def advanced_epsilon(history: History, delta: float, adjacency: str = "zero-out") -> float:
    """Return ε by advanced composition: each of T steps is (ε₀, δ/2T)-private, and the other half of δ bounds the tail.

    The loss of an ε₀-private step is between -ε₀ and ε₀, and its mean is at most ε₀ tanh(ε₀/2). By Hoeffding's
    inequality the sum of T such losses exceeds Σ ε₀ tanh(ε₀/2) + sqrt(2 log(1/δ') Σ ε₀²) with probability at most δ'.
    When that is above the plain sum of the ε₀, the plain sum is returned.

    Raises:
        ValueError: δ is out of range.

    References: Dwork, Rothblum, Vadhan, FOCS 2010; Kairouz, Oh, Viswanath, arXiv:1311.0776, theorem 3.4 (the last of
    its three bounds, for steps that may differ).
    """
    _check_delta(delta)
    merged = merge(history)
    num_steps = sum(count for _, count in merged)
    plain = mean = squares = 0.0
    for step, count in merged:
        single = accounting.epsilon([(step, 1)], delta / (2 * num_steps), adjacency)
        if single == math.inf:
            return math.inf
        plain += count * single
        mean += count * single * math.tanh(single / 2)
        squares += count * single**2
    return min(plain, mean + math.sqrt(2 * math.log(2 / delta) * squares))


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta}")
