"""The workload is the linear map of an optimizer's run, and its error is that of the dense matrix."""

import numpy as np
import pytest
import torch

from dpllm.mechanism.strategies import Workload, coefficients

RATES = {
    "constant": [1.0] * 30,
    "linear": [(30 - step) / 30 for step in range(30)],
    "warm-up": [min(1.0, step / 3) for step in range(30)],
    "in pieces": [0.5] * 10 + [0.0] * 5 + [2.0] * 15,
}


def simulated(rates, momentum, bias_correction, averaging):
    """(T,) the released weights of runs whose gradient is 1 in one step and 0 in all others."""
    weights, moment, released = np.zeros(30), np.zeros(30), np.zeros(30)
    for step in range(30):
        gradient = np.zeros(30)
        gradient[step] = 1.0
        moment = momentum * moment + (1 - momentum) * gradient
        weights = weights + rates[step] * moment / (1 - momentum ** (step + 1) if bias_correction else 1.0)
        released = released + averaging[step] * weights
    return released


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("averaged", [1, 6, 30])
def test_the_response_is_that_of_a_run(rates, momentum, bias_correction, averaged):
    """In units of the largest learning rate; averages of the last weights, of the last 6 and of all."""
    averaging = np.array([0.0] * (30 - averaged) + [1 / averaged] * averaged)
    made = Workload.released(rates, momentum, bias_correction=bias_correction, averaging=averaging)
    expected = simulated(rates, momentum, bias_correction, averaging) / max(rates)
    np.testing.assert_allclose(made.response, expected, atol=1e-13)
    if averaged == 1:
        assert made == Workload.released(rates, momentum, bias_correction=bias_correction)


def test_an_exponential_average_is_one_of_the_averages():
    """Each step's share is 1 - decay times a power of the decay."""
    shares = [0.2 * 0.8 ** (29 - step) for step in range(30)]
    made = Workload.released([1.0] * 30, 0.5, averaging=shares)
    np.testing.assert_allclose(made.response, simulated([1.0] * 30, 0.5, False, shares), atol=1e-13)


@pytest.mark.parametrize("adam", [False, True])
def test_the_response_is_that_of_the_optimizers_that_run(adam):
    """Torch's SGD with momentum, up to its factor 1/(1 - β), and AdamW with a second moment that hardly changes."""
    rates = [min(1.0, (step + 1) / 5) * 1e-3 for step in range(30)]
    found = []
    for impulse in range(30):
        weights = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
        if adam:
            made = torch.optim.AdamW(weights, lr=1.0, betas=(0.9, 1 - 1e-15), eps=0.1, weight_decay=0.0)
        else:
            made = torch.optim.SGD(weights, lr=1.0, momentum=0.9)
        for step in range(30):
            made.param_groups[0]["lr"] = rates[step]
            for weight in weights:  # the second weight has the impulse in addition
                weight.grad = torch.zeros(1, dtype=torch.float64)
            weights[1].grad += 1e-9 * (step == impulse)
            made.step()
        found.append(float((weights[0] - weights[1]).detach()) / 1e-9)
    expected = np.array(Workload.released(rates, 0.9, bias_correction=adam).response) * max(rates)
    scale = 10.0
    np.testing.assert_allclose(found, scale * expected, rtol=1e-5)


@pytest.mark.parametrize("bands", [1, 4, 40])
def test_the_error_is_that_of_the_dense_matrix(bands):
    """The norm of w M⁻¹; with more bands than steps the column is cut."""
    column = coefficients(bands, 40)
    dense = np.zeros((30, 30))
    for step in range(30):
        for before in range(min(bands, step + 1)):
            dense[step, step - before] = column[before]
    made = Workload.released(RATES["in pieces"], 0.9)
    assert made.error(column) == pytest.approx(np.linalg.norm(made.response @ np.linalg.inv(dense)), rel=1e-12)


@pytest.mark.parametrize("rates", [[0.0] * 5, [0.0]])
def test_a_run_without_a_learning_rate_has_the_prefix_sums(rates):
    """For instance one step with warm-up; the noise must be designed for something."""
    assert Workload.released(rates, 0.9) == Workload.prefix_sums(len(rates))
    averaging = [1.0, 0.0, 0.0]
    assert Workload.released([0.0, 1.0, 1.0], averaging=averaging) == Workload.prefix_sums(3)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Workload.released([]), "rates must"),
        (lambda: Workload.released([1.0, -1.0]), "finite and at least 0"),
        (lambda: Workload.released([1.0], 1.0), "momentum must be at least 0 and below 1, got 1.0"),
        (lambda: Workload.released([1.0], averaging=[1.0, 0.0]), "for each of the 1 steps"),
        (lambda: Workload.released([1.0], averaging=[-1.0]), "share of at least 0"),
        (lambda: Workload((1.0, 0.5), over_time=True), "Workload.prefix_sums"),
    ],
)
def test_numbers_that_are_no_run_are_refused(make, text):
    """By the value and the range."""
    with pytest.raises(ValueError, match=text):
        make()
