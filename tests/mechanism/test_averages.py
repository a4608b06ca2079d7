"""Averages as specifications: their weights over the steps, and the mistakes that are refused."""

import numpy as np
import pytest

from dpllm.mechanism.averages import AVERAGES, MovingAverage, TailMean, average_of, weights_of


@pytest.mark.parametrize(("decay", "num_steps"), [(0.95, 160), (0.5, 4), (0.999, 3)])
def test_a_moving_average_has_the_powers_of_its_decay_divided_by_their_sum(decay, num_steps):
    """The start has no weight, however short the run is."""
    powers = decay ** np.arange(num_steps - 1, -1, -1.0)
    np.testing.assert_allclose(weights_of(MovingAverage(decay=decay), num_steps), powers / powers.sum(), rtol=1e-10)


@pytest.mark.parametrize(("share", "num_steps", "last"), [(0.2, 160, 32), (0.5, 5, 2), (0.01, 10, 1), (1, 7, 7)])
def test_a_tail_mean_has_equal_weights_of_the_last_steps(share, num_steps, last):
    """At least one step counts."""
    want = np.concatenate([np.zeros(num_steps - last), np.full(last, 1 / last)])
    np.testing.assert_allclose(weights_of(TailMean(share=share), num_steps), want, rtol=1e-12)


def test_a_recipe_names_an_average_by_a_word_or_a_mapping():
    """In the form of clipping and noise."""
    assert average_of(None) is None and average_of("ema") == MovingAverage(decay=0.95)
    assert average_of({"kind": "tail", "share": 0.3, "keep_last": True}) == TailMean(share=0.3, keep_last=True)
    assert average_of(TailMean()) == TailMean() and set(AVERAGES) == {"ema", "tail"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mean", "average must be one of ema, tail, got 'mean'"),
        ({"kind": "ema", "share": 0.2}, "average.share is not an option of 'ema'; its options are evaluate,"),
        ({"kind": "ema", "decay": 1}, "average.decay must be above 0 and below 1, got 1"),
        ({"kind": "tail", "share": 0}, "average.share must be above 0 and at most 1, got 0"),
        ({"kind": "ema", "evaluate": "best"}, "average.evaluate must be one of average, last, got 'best'"),
        ({"kind": "ema", "keep_last": 1}, "average.keep_last must be true or false, got 1"),
    ],
)
def test_a_mistake_is_named(value, message):
    """With the value and what is allowed."""
    with pytest.raises(ValueError) as error:
        average_of(value)
    assert message in str(error.value)
