"""Events of dp_accounting are converted to the same event, or refused by name."""

import dp_accounting
import pytest
from dp_accounting import dp_event

from dpllm.mechanism.events import Step, StepOfRows
from dpllm.mechanism.library_events import from_dp_event
from dpllm.privacy.accounting import epsilon

POISSON = dp_event.PoissonSampledDpEvent(0.02, dp_event.GaussianDpEvent(1.0))


@pytest.mark.parametrize(
    "step",
    [
        Step(sampling_rate=0.02, noise_multiplier=1.0),
        Step(num_units=1000, sampling_rate=0.02, max_batch_size=30, noise_multiplier=1.5),
    ],
)
def test_what_we_hand_over_comes_back(step):
    """Steps of dpllm as events of that library."""
    assert from_dp_event(step.dp_event(), 7) == [(step, 7)]


def test_compositions_are_taken_apart():
    """Nested ones as well; an empty composition costs nothing."""
    twice = dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([POISSON, dp_event.GaussianDpEvent(4.0)]), 3)
    step, whole = Step(sampling_rate=0.02, noise_multiplier=1.0), Step(sampling_rate=1.0, noise_multiplier=4.0)
    assert from_dp_event(dp_event.ComposedDpEvent([twice, dp_event.NoOpDpEvent()]), 2) == [(step, 6), (whole, 6)]
    assert from_dp_event(dp_event.NonPrivateDpEvent()) == [(Step(sampling_rate=1.0, noise_multiplier=0.0), 1)]


@pytest.mark.parametrize(
    "event",
    [
        dp_event.LaplaceDpEvent(1.0),
        dp_event.PoissonSampledDpEvent(0.1, dp_event.LaplaceDpEvent(1.0)),
        StepOfRows(sampling_rate=0.1, rows_per_unit=3, noise_multiplier=1.0).dp_event(),
        dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_event.GaussianDpEvent(1.0)),
    ],
)
def test_other_events_are_refused_by_name(event):
    """Never mistaken for another event."""
    with pytest.raises(ValueError, match=f"{type(event).__name__} is not a Gaussian sum"):
        from_dp_event(event)


def test_epsilon_takes_both():
    """One function for steps from either library."""
    own = epsilon([(Step(sampling_rate=0.02, noise_multiplier=1.0), 1500)], 1e-5)
    assert epsilon([(POISSON, 1500)], 1e-5) == epsilon([(dp_event.SelfComposedDpEvent(POISSON, 1500), 1)], 1e-5) == own
