"""Events of dp_accounting are converted to the same event, or refused by name."""

import dp_accounting
import pytest
from dp_accounting import dp_event

from dpllm.config import PrivacyConfig
from dpllm.mechanism.events import Step, StepOfRows
from dpllm.privacy.accounting import epsilon, from_dp_event
from dpllm.privacy.plan import PrivacyPlan, make_plan

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


GAUSSIAN = dp_event.GaussianDpEvent(1.0)


@pytest.mark.parametrize("count", [-1, 2.5, 2.0, "2", None])
def test_a_count_that_is_not_whole_or_below_zero_is_refused(count):
    """A negative count would take back what other steps cost."""
    composed = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(GAUSSIAN, count), GAUSSIAN, GAUSSIAN])
    words = "a step cannot run .* times. Pass a whole number of at least 0"
    for make in (
        lambda: epsilon([(composed, 1)], 1e-5),
        lambda: from_dp_event(composed),
        lambda: from_dp_event(GAUSSIAN, count),
        lambda: from_dp_event(dp_event.SelfComposedDpEvent(dp_event.SelfComposedDpEvent(GAUSSIAN, count), count)),
        lambda: epsilon([(Step(sampling_rate=0.1, noise_multiplier=1.0), count)], 1e-5),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_steps_of_a_composition_are_bounded_too():
    """The bound is on steps, not on pairs of a history."""
    with pytest.raises(ValueError, match="000 steps"):
        epsilon([(dp_event.SelfComposedDpEvent(GAUSSIAN, 20_000_000), 1)], 1e-5)


@pytest.fixture(scope="module")
def plan() -> PrivacyPlan:
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=10)
    return make_plan(config, num_units=200, num_steps=4)


@pytest.mark.parametrize("kind", ["plan", "mechanism", "event alone", "x", 3, None, [1]])
def test_what_is_no_history_is_refused_in_one_line(plan, kind):
    """The error shows a history."""
    named = {"plan": plan, "mechanism": plan.mechanism, "event alone": [(plan.event,)]}
    with pytest.raises(TypeError, match=r"a history is a list of \(event, count\) pairs") as raised:
        epsilon(named.get(kind, kind) if isinstance(kind, str) else kind, 1e-5)
    assert "\n" not in str(raised.value)
