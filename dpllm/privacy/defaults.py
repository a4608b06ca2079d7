"""Rules of thumb for the settings of a run, from public numbers only: N, ε, δ, and the kind of the trained weights.

A recipe that leaves out its batch size, steps or learning rate gets them from these rules (`dpllm.training.proposals`),
`dpllm init` writes them into a new recipe, and `dpllm plan suggest` compares them with the values of a recipe. No rule
reads a record. Each rule returns the value and its reason with its source; where nothing was measured, the reason says
so.

How many units are needed. At one compute, the quality of private training follows the ratio of signal to noise, which
is at most N μ(ε, δ): μ is the distance of two unit normals that are (ε, δ) apart (`dpllm.privacy.risk`). One
fine-tuning was measured at three ε (`docs/correlated_noise.md`, `benchmarks/utility.py`: stories260K on 5 000 records
of E2E, all weights trained, 16 bands, average of the weights). The rule takes N such that N μ is as there. This scales
one measurement of one small model; it is not a law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpllm.config import PrivacyConfig
from dpllm.privacy.risk import gaussian_distance

UNITS_PER_STEP = 1 / 40
"""q of both plans whose settings were compared: 128 of 5 000 units, 1024 of 42 061."""
SMALLEST_BATCH, LARGEST_BATCH = 64, 2048
FEWEST_STEPS, MOST_STEPS = 192, 480
PASSES = 5
RANK = 16
FEWEST_UNITS = 100
MOST_TRAINED = 300_000_000
"""Models with at most this many parameters are trained as a whole."""

_STEPS_MULTIPLE = 48  # divided by each number of bands that `bands: auto` compares
_HELD_OUT, _MOST_HELD_OUT = 0.05, 1000


@dataclass(frozen=True)
class Measured:
    """One fine-tuning at one ε.

    Attributes:
        target_epsilon: ε, at δ = 2e-5.
        perplexity: held-out, after the private steps.
    """

    target_epsilon: float
    perplexity: float


MEASURED = (Measured(8.0, 2.61), Measured(3.0, 3.12), Measured(1.0, 4.26))
"""Held-out perplexity of the fine-tuning of the module's docstring."""
MEASURED_UNITS, MEASURED_DELTA = 5000, 2e-5
MEASURED_WORDS = "69 before the training, 1.94 after it without noise"


def two_digits_down(value: float) -> float:
    """Return a positive number rounded down to two digits.

    >>> two_digits_down(3.39e-6), two_digits_down(0.05)
    (3.3e-06, 0.05)
    """
    power = math.floor(math.log10(value)) - 1
    return float(f"{math.floor(value / 10**power + 1e-9)}e{power}")


def delta_for(num_units: int) -> float:
    """Return δ: 1/(10 N), rounded down to two digits.

    >>> delta_for(28_500)
    3.5e-06
    """
    return two_digits_down(1 / (10 * num_units))


def delta_reason(num_units: int) -> str:
    """Return the reason of `delta_for`."""
    return (
        f"At most 1/(10 N), with N = {num_units:,}. δ bounds the chance that ε does not hold; at 1/N, publishing one "
        "unit outright would satisfy it."
    )


def batch_and_steps(num_units: int) -> tuple[int, int]:
    """Return b and T for N units.

    b is N/40, rounded to 2^k or 3·2^k, between 64 and 2048 and at most N/4. T is that of `steps_for`.

    >>> batch_and_steps(5_000), batch_and_steps(28_500), batch_and_steps(1_000_000), batch_and_steps(120)
    ((128, 192), (768, 192), (2048, 480), (24, 192))
    """
    most = max(1, min(LARGEST_BATCH, num_units / 4))
    wanted = min(max(num_units * UNITS_PER_STEP, SMALLEST_BATCH), most)
    sizes = [size for power in range(12) for size in (2**power, 3 * 2**power) if size <= most]
    batch = min(sizes, key=lambda size: abs(math.log(size / wanted)))
    return batch, steps_for(num_units, batch)


def batch_size(privacy: PrivacyConfig, population: int) -> int:
    """Return b: the configured one, or that of `batch_and_steps`.

    Args:
        privacy: the configuration.
        population: N, or the number of rows where rows are drawn.
    """
    return privacy.expected_batch_size or batch_and_steps(population)[0]


def steps_for(num_units: int, batch: int) -> int:
    """Return T for N units of which b enter a step on average.

    T is five passes over the units, between 192 and 480, and a multiple of 48: any number of bands up to 16 that is
    compared divides it.

    >>> steps_for(5_000, 128), steps_for(5_000, 64)
    (192, 384)
    """
    steps = _STEPS_MULTIPLE * round(PASSES * num_units / batch / _STEPS_MULTIPLE)
    return min(max(steps, FEWEST_STEPS), MOST_STEPS)


def batch_reason(num_units: int, batch: int, steps: int) -> str:
    """Return the reason of `batch_and_steps`."""
    return (
        f"{batch / num_units:.1%} of the {num_units:,} units in a step on average, and {steps * batch / num_units:.1f} "
        "passes over them in all. The two plans whose settings were compared have 2.5 % and 4 to 10 passes "
        "(docs/correlated_noise.md). More steps cost time and, at the same ε, more noise in each step. "
        f"T = {steps} is a multiple of every number of bands that is compared. dpllm plan sweep RECIPE compares "
        "other sizes at the same ε."
    )


def held_out_share(num_units: int) -> float:
    """Return the share of units to hold out: 5 %, at most 1 000 units.

    >>> held_out_share(5_000), held_out_share(30_000), held_out_share(400_000)
    (0.05, 0.033, 0.0025)
    """
    return min(_HELD_OUT, two_digits_down(_MOST_HELD_OUT / num_units))


def rows_reason(rows: int, by_example: bool = False) -> str:
    """Return the reason for k, the most rows of a user."""
    if by_example:
        return (
            f"k = {rows}. Rows are drawn singly, and the accounting assumes that each user has k rows: a smaller k "
            "needs less noise and leaves more rows out."
        )
    return (
        f"At most {rows} rows of one user, a public constant. Users are drawn and clipped as a whole, so k costs no ε. "
        "More rows make a user's gradient less random and a step slower; other rows of that user are not used. A "
        "number that was chosen by looking at the users would depend on private data, and ε does not cover such a "
        "choice."
    )


def rank_reason(rank: int) -> str:
    """Return the reason for the rank of an adapter."""
    return (
        f"Rank {rank} on every linear layer. 16 is the rank of the recipes that come with dpllm; other ranks were not "
        "measured here. A higher rank fits more and receives more noise in all."
    )


def rate_range(rate: float, adapter: bool) -> tuple[float, float]:
    """Return the learning rates that are worth trying around a computed one: within a factor of 2, or 4 for adapters.

    >>> rate_range(0.06, adapter=False)
    (0.03, 0.12)
    """
    factor = 4 if adapter else 2
    return float(f"{rate / factor:.2g}"), float(f"{rate * factor:.2g}")


def range_words(rate: float, adapter: bool, correlated: bool) -> str:
    """Return a remark on the learning rates around the computed one."""
    low, high = rate_range(rate, adapter)
    span = "a quarter to four times" if adapter else "half to twice"
    if adapter:
        reason = "The rule was not measured with adapters."
    elif correlated:
        reason = (
            "With correlated noise the best measured rates were 0.8 and 1.05 times the computed one; larger ones than "
            "these were not tried."
        )
    else:
        reason = "With independent noise the best measured rate was 0.9 times the computed one."
    return f"Learning rates worth a rehearsal: {low:g} to {high:g}, {span} the computed one. {reason}"


def units_needed(target_epsilon: float, like: float = 8.0) -> int:
    """Return N for which N μ(ε, 1/(10 N)) is that of the measured fine-tuning, to two digits.

    Args:
        target_epsilon: ε of the run in question.
        like: ε of the measured fine-tuning, one of `MEASURED`.

    >>> units_needed(8.0) <= 5000
    True
    """
    wanted = MEASURED_UNITS * gaussian_distance(like, MEASURED_DELTA)
    low, high = 1.0, 1e12
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        enough = middle * gaussian_distance(target_epsilon, 1 / (10 * middle)) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return int(float(f"{high:.2g}"))


def need_words(num_units: int, target_epsilon: float, unit: str) -> list[str]:
    """Return remarks on the number of units that a useful model needs at an ε.

    Args:
        num_units: N.
        target_epsilon: ε.
        unit: "sequence" or "user".
    """
    noun = "users" if unit == "user" else "records"
    needed = [units_needed(target_epsilon, one.target_epsilon) for one in MEASURED]
    shown = [f"{n:,} {noun} for perplexity {one.perplexity:g}" for n, one in zip(needed, MEASURED, strict=True)]
    found = [
        f"How much data ε = {target_epsilon:g} needs: in one measured fine-tuning (a model of 0.26 M parameters, all "
        f"of them trained; perplexity {MEASURED_WORDS}), scaled to this ε: {', '.join(shown)}. Yours has "
        f"{num_units:,}. It is one measurement, not a law: text that the model already knows needs fewer."
    ]
    if num_units < needed[-1]:
        found.append(
            f"{num_units:,} {noun} are few for ε = {target_epsilon:g}: expect a small gain. More {noun}, or public "
            "text of the same kind first (public_pretrain), help most."
        )
    return found
