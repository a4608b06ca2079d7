"""Buffered Toeplitz strategies: column, inverse, errors and optimum of jax_privacy, and the sensitivity by brute force.

Values of jax_privacy were computed with its commit 8967688 (August 2026), `matrix_factorization/buffered_toeplitz.py`
and `toeplitz.py`, in float64.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import linalg, optimize

from dpllm.mechanism import blt
from dpllm.mechanism.blt import best_numbers, error, inverse_numbers, product, require_numbers, sensitivity
from dpllm.mechanism.strategies import Workload
from tests.mutations import kills

GOLDEN = ((0.9, 0.5, 0.001), (0.1, 0.2, 0.5))


def column(decays, weights, num_steps):
    """The first column of C, from its definition."""
    rest = [sum(w * d**j for d, w in zip(decays, weights, strict=True)) for j in range(num_steps - 1)]
    return np.array([1.0, *rest])


def dense(decays, weights, num_steps):
    return linalg.toeplitz(column(decays, weights, num_steps), np.zeros(num_steps))


def impulse(num_steps):
    return np.eye(1, num_steps)[0]


def test_column_and_inverse_are_those_of_jax_privacy():
    """BufferedToeplitz.toeplitz_coefs and inverse."""
    assert product(*GOLDEN, impulse(6)) == pytest.approx([1, 0.8, 0.1905, 0.1310005, 0.0979000005, 0.0781100000005])
    decays, weights = inverse_numbers(*GOLDEN)
    assert decays[::-1] == pytest.approx([0.8535358949120169, 0.40221586827879585, -0.6547517631908126], rel=1e-12)
    assert -weights[::-1] == pytest.approx([-0.020572874781682435, -0.040939378027668394, -0.7384877471906491])
    found = blt.solution(*GOLDEN, impulse(6))
    assert found == pytest.approx([1, -0.8, 0.4495, -0.3382005, 0.1918310495, -0.1477123687005], abs=1e-12)


@pytest.mark.parametrize("numbers", [GOLDEN, ((0.99,), (0.1,)), ((0.0,), (1.0,)), ((0.7, 0.7), (0.3, 0.2))])
def test_products_are_those_of_the_dense_matrix(numbers):
    """C and its inverse; also with equal decays, and with the largest weight that is allowed."""
    values = np.random.default_rng(0).normal(size=60)
    matrix = dense(*numbers, 60)
    assert product(*numbers, values) == pytest.approx(matrix @ values, abs=1e-12)
    assert blt.solution(*numbers, values) == pytest.approx(np.linalg.solve(matrix, values), abs=1e-10)
    assert blt.variances(*numbers, 60) == pytest.approx((np.linalg.inv(matrix) ** 2).sum(axis=1))


@kills(
    "the sensitivity of a fixed order counts one pass",
    "dpllm/mechanism/blt.py",
    "    visits[: separation * participations : separation] = 1.0\n",
    "    visits[0] = 1.0\n",
)
@pytest.mark.parametrize(
    ("num_steps", "separation", "participations", "square"),
    [
        (20, 3, 7, 17.486012712672174),
        (100, 10, 10, 19.54761379795776),
        (100, 10, 4, 7.585181013900361),
        (410, 41, 10, 17.34942929647855),
        (410, 410, 1, 1.728882566106203),
    ],
)
def test_sensitivities_are_those_of_jax_privacy(num_steps, separation, participations, square):
    """toeplitz.minsep_sensitivity_squared."""
    assert sensitivity(*GOLDEN, num_steps, separation, participations) ** 2 == pytest.approx(square, rel=1e-11)


@pytest.mark.parametrize(("num_steps", "mean", "last"), [(20, 2.5540983981659013, 3.860536282835607)])
def test_errors_are_those_of_jax_privacy(num_steps, mean, last):
    """toeplitz.per_query_error of prefix sums: its mean, and that of the last sum."""
    assert error(*GOLDEN, Workload.prefix_sums(num_steps)) ** 2 == pytest.approx(mean, rel=1e-12)
    assert error(*GOLDEN, Workload((1.0,) * num_steps)) ** 2 == pytest.approx(last, rel=1e-12)


def patterns(num_steps, separation, participations):
    """All participations of a unit."""
    for number in range(1, participations + 1):
        for steps in itertools.combinations(range(num_steps), number):
            if all(later - earlier >= separation for earlier, later in itertools.pairwise(steps)):
                yield steps


NUMBERS = [((0.9,), (0.3,)), ((0.99, 0.2), (0.1, 0.9)), ((0.0,), (1.0,)), ((0.8, 0.5, 0.1), (0.3, 0.3, 0.4))]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("num_steps", "separation", "participations"), [(9, 2, 5), (9, 2, 3), (8, 1, 8), (10, 4, 2)])
def test_no_participation_changes_the_release_by_more(numbers, num_steps, separation, participations):
    """Over all participations of a unit and all signs of its gradients; the largest change is attained."""
    matrix = dense(*numbers, num_steps)
    stated = sensitivity(*numbers, num_steps, separation, participations)
    worst = 0.0
    for steps in patterns(num_steps, separation, participations):
        columns = matrix[:, steps]
        signs = np.array(list(itertools.product((1.0,), *[(1.0, -1.0)] * (len(steps) - 1))))
        worst = max(worst, float(np.linalg.norm(columns @ signs.T, axis=0).max()))
    assert worst <= stated <= worst * (1 + 1e-9)


def test_gradients_in_several_directions_change_it_by_no_more():
    """‖Σ_i c_i g_iᵀ‖ in Frobenius norm, for random gradients of norm 1 in three dimensions."""
    rng, matrix = np.random.default_rng(1), dense(*NUMBERS[3], 9)
    stated = sensitivity(*NUMBERS[3], 9, 2, 5)
    for steps in patterns(9, 2, 5):
        gradients = rng.normal(size=(len(steps), 3))
        gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
        assert np.linalg.norm(matrix[:, steps] @ gradients) <= stated


@pytest.mark.parametrize("numbers", [((0.95, 0.9), (0.9, -0.9)), ((0.5,), (-0.9,))])
def test_the_conditions_are_needed(numbers):
    """With a negative weight, other steps than 0, b, 2b, … change the release by more; so it is refused."""
    gram, first = np.abs(dense(*numbers, 8).T @ dense(*numbers, 8)), [0, 2, 4, 6]
    worst = max(gram[np.ix_(steps, steps)].sum() for steps in patterns(8, 2, 4))
    assert worst > 1.02 * np.linalg.norm(dense(*numbers, 8)[:, first].sum(axis=1)) ** 2
    with pytest.raises(ValueError, match=r"noise\.weights"):
        require_numbers(*numbers)


@kills("the column of a buffered strategy may rise", "dpllm/mechanism/blt.py", " or math.fsum(weights) > 1:\n", ":\n")
@pytest.mark.parametrize(
    ("decays", "weights", "text"),
    [
        ((), (), "noise.decays must be a list of 1 to 4 numbers"),
        ((0.1,) * 5, (0.1,) * 5, "noise.decays must be a list of 1 to 4 numbers"),
        ((0.5, 0.4), (0.1,), "noise has 2 decays but 1 weights"),
        ((1.0,), (0.1,), "noise.decays must be at least 0 and below 1"),
        ((-0.1,), (0.1,), "noise.decays must be at least 0 and below 1"),
        ((0.5,), (-1e-9,), "noise.weights must be at least 0"),
        ((0.5, 0.4), (0.5, 0.500000001), "with a sum of at most 1"),
    ],
)
def test_numbers_without_a_proof_are_refused(decays, weights, text):
    """The sensitivity is exact for columns that fall and are nowhere negative."""
    with pytest.raises(ValueError, match=text):
        require_numbers(decays, weights)


OPTIMA = [
    (410, 410, 1, 2, True, 2.7761717887),
    (410, 41, 10, 2, True, 11.354720104),
    (410, 41, 10, 3, True, 11.299190871),
    (2000, 100, 20, 3, False, 26.928057015),
    (1000, 1000, 1, 3, False, 3.2699178059),
]
"""T, b, k, d, mean or last of the prefix sums, and root of the loss that jax_privacy's optimize_loss found."""


@pytest.mark.parametrize(("num_steps", "separation", "participations", "buffers", "over_time", "theirs"), OPTIMA)
def test_optima_are_as_good_as_those_of_jax_privacy(num_steps, separation, participations, buffers, over_time, theirs):
    """Error times sensitivity, to 1e-6 or better. It takes 36 to 126 s, and this less than 1 s."""
    workload = Workload.prefix_sums(num_steps) if over_time else Workload((1.0,) * num_steps)
    found = best_numbers(buffers, workload, separation, participations)
    loss = error(*found, workload) * sensitivity(*found, num_steps, separation, participations)
    assert loss <= theirs * (1 + 1e-6)


@pytest.mark.deep
def test_the_optimum_of_a_long_run_is_that_of_jax_privacy():
    """The golden values of its test_optimize_single_participation_golden: n = 100 000, two buffers, last sum."""
    decays, weights = best_numbers(2, Workload((1.0,) * 100_000), 100_000, 1)
    assert decays == pytest.approx([0.9999528892, 0.9857068667], rel=1e-7)
    assert weights == pytest.approx([0.0122853238, 0.1878393665], rel=1e-6)


def test_the_slope_of_the_loss_is_right():
    """Against differences, for prefix sums and for released weights with momentum."""
    rates = np.linspace(1, 0.1, 50)
    for workload, calm in ((Workload.prefix_sums(50), 0.0), (Workload.released(rates, momentum=0.9), 0.3)):
        for separation, participations in ((50, 1), (7, 5)):
            visits = blt._visits(50, separation, participations)
            at = np.random.default_rng(2).normal(size=6)
            wrong = optimize.check_grad(
                lambda free, w=workload, v=visits, c=calm: blt._loss(free, w, v, c)[0],
                lambda free, w=workload, v=visits, c=calm: blt._loss(free, w, v, c)[1],
                at,
            )
            assert wrong < 1e-5


def test_the_fewest_buffers_that_nearly_reach_the_least_are_chosen():
    """Ten passes need one buffer, one long pass two; the numbers of each satisfy the conditions."""
    few = best_numbers(None, Workload.prefix_sums(200), 20, 10)
    more = best_numbers(None, Workload.prefix_sums(1000), 1000, 1)
    assert (len(few[0]), len(more[0])) == (1, 2)
    for numbers in (few, more):
        require_numbers(*numbers)


def test_a_little_more_error_makes_single_steps_much_calmer():
    """With momentum and linear decay: 2 % more noise in the weights, 0.4 of that in a step."""
    workload, numbers = Workload.released(1 - np.arange(410) / 410, momentum=0.9), []
    for calm in (0.0, 0.05):
        found = best_numbers(1, workload, 41, 10, calm)
        of_steps = math.sqrt(blt.variances(*found, 410).mean())
        numbers.append(np.array([error(*found, workload), of_steps]) * sensitivity(*found, 410, 41, 10))
    assert numbers[1] / numbers[0] == pytest.approx([1.0184, 0.3885], rel=1e-2)


def test_a_unit_in_every_step_leaves_nothing_to_correlate():
    """The best strategy is then the identity."""
    _, weights = best_numbers(2, Workload.prefix_sums(30), 1, 30)
    assert sum(weights) < 1e-4
