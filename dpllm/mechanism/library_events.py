"""Convert dp_accounting's events into dpllm's events, so that both have the same accounting.

For users who describe their mechanism with that library.
"""

from __future__ import annotations

import operator
from typing import Any

import dp_accounting
from dp_accounting import dp_event

from dpllm.mechanism.events import Event, Step


def from_dp_event(event: dp_accounting.DpEvent, count: int = 1) -> list[tuple[Event, int]]:
    """Return the steps that correspond to a dp_accounting event.

    Supported are Gaussian sums over all units or a Poisson sample of them, truncated or not, and their compositions.

    Args:
        event: an event of dp_accounting.
        count: how often it took place.

    Returns:
        (event, count) pairs: a history for `dpllm.epsilon`.

    Raises:
        ValueError: the event has a different kind, or a count is not a whole number of at least 0.

    >>> [(step, count)] = from_dp_event(
    ...     dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.0)), 1500)
    >>> step.sampling_rate, step.noise_multiplier, count
    (0.02, 1.0, 1500)
    """
    count = whole_count(count)
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return from_dp_event(event.event, count * whole_count(event.count))
    if isinstance(event, dp_event.ComposedDpEvent):
        return [pair for part in event.events for pair in from_dp_event(part, count)]
    if isinstance(event, dp_event.NoOpDpEvent):
        return []
    step = _step(event)
    if step is None:
        raise ValueError(
            f"{type(event).__name__} is not a Gaussian sum over all units or over a Poisson sample of them, so dpllm "
            "has no accounting for it. Use dp_accounting's own accountant, or describe the mechanism with "
            "dpllm.mechanism"
        )
    return [(step, count)]


def whole_count(count: Any) -> int:
    """Return how often a step ran.

    Raises:
        ValueError: it is not a whole number of at least 0.
    """
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"a step cannot run {count!r} times. Pass a whole number of at least 0")
    return number


def _step(event: dp_accounting.DpEvent) -> Step | None:
    if isinstance(event, dp_event.NonPrivateDpEvent):
        return Step(sampling_rate=1.0, noise_multiplier=0.0)
    if isinstance(event, dp_event.GaussianDpEvent):
        return Step(sampling_rate=1.0, noise_multiplier=float(event.noise_multiplier))
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        sigma = float(event.event.noise_multiplier)
        return Step(sampling_rate=event.sampling_probability, noise_multiplier=sigma)
    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        return Step(
            num_units=event.dataset_size,
            sampling_rate=event.sampling_probability,
            max_batch_size=event.truncated_batch_size,
            noise_multiplier=float(event.noise_multiplier),
        )
    return None
