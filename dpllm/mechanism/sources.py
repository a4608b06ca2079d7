"""The randomness of a loop of one's own: refuse sources that are known not to keep the guarantee.

Place in the flow: `dpllm.mechanism.starts.Start` asks, before the first draw. Runs with a ledger make their own
`dpllm.NoiseSource`, from the seed of their plan, and need no question.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dpllm.mechanism.normals import NormalGenerator

_ENTRIES = 1 << 14
_BEFORE, _DEVIATION = 3.0, 2.5
_MOST_ERRORS = 8.0
"""Standard errors. A right generator is refused with a probability below 1e-9."""


def require_secret(generator: NormalGenerator, rng: np.random.Generator | None) -> None:
    """Make sure that noise and draws are no function of a seed, as far as they say it.

    Args:
        generator: of the noise.
        rng: of the draws; None: from the operating system's entropy.

    Raises:
        ValueError: the noise has a seed, or the draws come from a generator whose origin nobody can see.
    """
    if not generator.is_secret:
        raise ValueError(
            f"{_name(generator)} has a fixed seed (is_secret is False): whoever knows it removes the noise. Pass "
            "dpllm.NoiseSource(). For a test, declare it: start(..., for_tests=True), whose history has ε = inf"
        )
    if rng is not None:
        raise ValueError(
            "the draws are asked of a generator that was passed as rng, and nobody can see whether it has a seed: who "
            "takes part has to be secret. Leave rng out; the draws then come from the operating system's entropy. For "
            "a test, declare it: start(..., for_tests=True), whose history has ε = inf"
        )


def require_generator(generator: object) -> None:
    """Make sure that an object is a `dpllm.NormalGenerator`.

    Raises:
        ValueError: it lacks a method or the statement.
    """
    if not (callable(getattr(generator, "add_", None)) and callable(getattr(generator, "normal_like", None))):
        raise ValueError(
            f"the generator of the noise is {generator!r}; pass dpllm.NoiseSource(), or an object with the methods of "
            "dpllm.NormalGenerator"
        )
    if not isinstance(getattr(generator, "is_secret", None), bool):
        raise ValueError(
            f"{_name(generator)} does not say whether its numbers are secret. Give it is_secret: True only if they "
            "come from the operating system's entropy and cannot be repeated, False if they have a seed "
            "(dpllm.NormalGenerator)"
        )


def words_of(generator: object) -> str:
    """Return how far dpllm knows the noise of a generator, as the end of a sentence."""
    if _is_ours(generator):
        return "with noise from the operating system's entropy"
    return (
        f"if all numbers of {_name(generator)} are independent, standard normal and secret. dpllm does not know this "
        "generator, and measured some of its numbers"
    )


def require_standard_normal(generator: NormalGenerator, like: Tensor) -> None:
    """Measure some numbers of a generator that is not `dpllm.NoiseSource`.

    Guarantee: none. Noise that is missing, scaled differently, repeated or not Gaussian is found; whether all numbers
    are independent and secret, no measurement shows.

    Args:
        generator: of the noise.
        like: a sum that will get noise; its dtype and device are those of the numbers.

    Raises:
        ValueError: the numbers have another distribution.
    """
    if _is_ours(generator):
        return
    zeros = like.new_zeros(_ENTRIES)

    def added() -> Tensor:
        total = zeros + _BEFORE
        generator.add_(total, _DEVIATION)
        return (total - _BEFORE) / _DEVIATION

    _measure(f"{_name(generator)}.add_", added)
    if getattr(generator, "randomness", None) != "discrete":  # which has no normal numbers
        _measure(f"{_name(generator)}.normal_like", lambda: generator.normal_like(zeros))


def _measure(name: str, draw: Callable[[], Tensor]) -> None:
    first, second = draw().double(), draw().double()
    measured = {  # of N(0, 1), each has the standard deviation of the last number, over the root of the entries
        "the mean": (first, 0.0, 1.0),
        "the variance": (first**2, 1.0, 2.0**0.5),
        "the fourth moment": (first**4, 3.0, 96.0**0.5),
        "the product of neighbours": (first[1:] * first[:-1], 0.0, 1.0),
        "the product of two calls": (first * second, 0.0, 1.0),
    }
    for what, (values, wanted, deviation) in measured.items():
        found = float(values.mean())
        if not abs(found - wanted) * _ENTRIES**0.5 <= _MOST_ERRORS * deviation:
            raise ValueError(
                f"the numbers of {name} are not independent N(0, 1): of {_ENTRIES:,}, {what} is {found:.3g} in place "
                f"of {wanted:g}. The ε of the history would not hold. Mend the generator, or pass dpllm.NoiseSource()"
            )


def _is_ours(generator: object) -> bool:
    module = sys.modules.get("dpllm.mechanism.generators")  # it loads torch, which a plan does without
    return module is not None and type(generator) is module.NoiseSource


def _name(generator: object) -> str:
    return type(generator).__name__
