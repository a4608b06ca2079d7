"""A start counts its draws, goes on over several loops, and adds the noise of one stream."""

import itertools
import secrets
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpllm import GhostClipper, PrivacyConfig, epsilon, make_plan
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentNoise
from dpllm.mechanism.sampling import seeded_rng

BANDED = {"kind": "banded", "bands": 4}


def plan_of(noise):
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=4, noise=noise)
    return make_plan(config, num_units=64, num_steps=8)


def parameters():
    return {"a": torch.nn.Parameter(torch.zeros(3, 2)), "b": torch.nn.Parameter(torch.zeros(5))}


def noisy(start, loops):
    """The draws and the released gradients of loops of these lengths."""
    draws, releases = [], []
    for count in loops:
        for units in start.draws(count):
            trained = parameters()
            start.add_noise_(trained)
            draws.append(units)
            releases.append(torch.cat([p.grad.flatten() for p in trained.values()]))
    return draws, torch.stack(releases)


@pytest.mark.parametrize("noise", ["independent", BANDED], ids=["independent", "banded"])
def test_loops_over_one_start_are_one_sequence(noise):
    """Four epochs of two steps give the draws, the noise and the charge of one loop of eight."""
    mechanism, found = plan_of(noise).mechanism, []
    for loops in ([8], [2, 2, 2, 2]):
        start = mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
        found.append((*noisy(start, loops), start))
    (draws, releases, whole), (parts, other, epochs) = found
    assert all(np.array_equal(one, two) for one, two in zip(draws, parts, strict=True))
    assert torch.equal(releases, other)
    assert whole.num_steps == epochs.num_steps == 8
    real = mechanism.start(8, NoiseSource())
    noisy(real, [2, 2, 2, 2])
    assert real.history == mechanism.history(8)


def test_draws_and_noise_are_those_of_the_parts():
    """The sampler's draws, and the stream's noise with the deviation σC."""
    mechanism = plan_of(BANDED).mechanism
    draws, releases = noisy(mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True), [8])
    expected, stream = mechanism.sampler.steps(seeded_rng(5)), mechanism.noise.stream(NoiseSource(seed=3), 8)
    for step, (units, release) in enumerate(zip(draws, releases, strict=True)):
        stream.begin(step)
        sums = {name: torch.zeros_like(p.detach()) for name, p in parameters().items()}
        for name, total in sums.items():
            stream.add_share_(name, total, 0.5, rank=0, size=1)
        assert np.array_equal(units, next(expected))
        assert torch.equal(release, torch.cat([total.flatten() for total in sums.values()]))


def test_starts_that_begin_again_are_charged_each():
    """Four starts of two steps cost four cycles of correlated noise, eight steps of one start two; DP-SGD the same."""
    banded, independent = plan_of(BANDED).mechanism, plan_of("independent").mechanism
    assert epsilon(banded.history([2, 2, 2, 2]), 1e-3) == epsilon(banded.history(16), 1e-3)
    assert epsilon(banded.history([2, 2, 2, 2]), 1e-3) > 1.2 * epsilon(banded.history(8), 1e-3)
    assert epsilon(independent.history(np.array([2, 6])), 1e-3) == epsilon(independent.history([8]), 1e-3)
    with pytest.raises(ValueError, match=r"a step cannot have run 2\.5 times"):
        epsilon(banded.history([2, 2.5]), 1e-3)


def test_a_draw_is_counted_also_without_a_step_and_gets_its_noise_once():
    """A loop that is left after a draw has spent it; a second call, or one before a draw, is refused."""
    start = plan_of("independent").mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
    with pytest.raises(ValueError, match="there is no draw without noise"):
        start.add_noise_(parameters())
    next(start.draws(3))
    assert start.num_steps == 1
    start.add_noise_(parameters())
    with pytest.raises(ValueError, match="each draw gets its noise once"):
        start.add_noise_(parameters())


@pytest.mark.parametrize("noise", ["independent", BANDED], ids=["independent", "banded"])
@pytest.mark.parametrize("through", ["one loop", "another loop"])
def test_a_second_draw_before_the_noise_of_the_first_is_refused(noise, through):
    """Sums of two draws cannot share one noise; the refused draw is not counted, and the start goes on after it."""
    start = plan_of(noise).mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
    first, second = start.draws(4), start.draws(4)
    next(first)
    with pytest.raises(ValueError, match=r"draw 1 of this start has no noise.*also after an empty one"):
        next(first if through == "one loop" else second)
    assert start.num_steps == 1
    start.add_noise_(parameters())
    next(start.draws(1))
    assert start.num_steps == 2


def test_the_last_draw_of_a_loop_gets_its_noise_after_it():
    """Two generators in turn, each noise after the end of its loop: the noise of one sequence."""
    mechanism = plan_of(BANDED).mechanism
    _, expected = noisy(mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True), [8])
    start, found = mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True), []
    for _ in range(8):
        for _units in start.draws(1):
            pass
        trained = parameters()
        start.add_noise_(trained)
        found.append(torch.cat([p.grad.flatten() for p in trained.values()]))
    assert torch.equal(torch.stack(found), expected)


def test_noise_that_failed_leaves_the_draw_open():
    """A sum of a dtype without noise is refused, and the next draw as well."""
    start = plan_of("independent").mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
    draws = start.draws(2)
    next(draws)
    half = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    half.grad = torch.zeros_like(half)
    with pytest.raises(
        ValueError, match=r"the sum of a is torch.float16; noise is added to contiguous sums in float32"
    ):
        start.add_noise_({"a": half})
    with pytest.raises(ValueError, match="draw 1 of this start has no noise"):
        next(draws)


@pytest.mark.parametrize("noise", ["independent", BANDED], ids=["independent", "banded"])
def test_every_parameter_gets_noise_in_every_step(noise):
    """An empty mapping, or one that lacks a parameter, leaves the draw open: the rest would have no noise."""
    start = plan_of(noise).mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
    loop, trained = start.draws(8), parameters()
    next(loop)
    with pytest.raises(ValueError, match="got 0 parameters, and at least one are needed"):
        start.add_noise_({})
    start.add_noise_(trained)
    next(loop)
    for others in ({"a": trained["a"]}, {**trained, "c": trained["a"]}):
        with pytest.raises(ValueError, match="and 2 are needed, the same in every step"):
            start.add_noise_(others)
    with pytest.raises(ValueError, match="has no noise"):
        next(start.draws(1))
    start.add_noise_(trained)


def test_a_first_noise_that_lacks_a_parameter_of_the_clipper_is_refused():
    """It would be released without noise in every step. Other models, and clippers that were removed, do not count."""
    model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    clipper, foreign = (GhostClipper(one, clip_norm=0.5) for one in (model, other))
    start = plan_of("independent").mechanism.start(8, NoiseSource(seed=3), seeded_rng(2), for_tests=True)
    loop = start.draws(8)
    next(loop)
    clipper.backward(model(torch.ones(2, 3)).squeeze(1))
    before = model.weight.grad.clone()
    for given in ({"weight": model.weight}, {"weight": model.weight, "bias": other.bias}):
        with pytest.raises(ValueError, match=r"(bias|weight) is not among them .* released without noise"):
            start.add_noise_(given)
    assert torch.equal(model.weight.grad, before)
    start.add_noise_(clipper.parameters)
    assert not torch.equal(model.weight.grad, before) and model.bias.grad is not None
    clipper.remove()
    model.bias.requires_grad_(False)
    model.zero_grad()
    head = GhostClipper(model, clip_norm=0.5)
    assert set(head.parameters) == {"weight"}
    next(loop)
    with pytest.raises(ValueError, match="the same in every step"):
        start.add_noise_(head.parameters)
    fresh = plan_of("independent").mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
    next(fresh.draws(1))
    fresh.add_noise_(head.parameters)
    head.remove()
    foreign.remove()


@pytest.mark.parametrize("noise", ["independent", BANDED], ids=["independent", "banded"])
def test_a_call_that_failed_changes_nothing_and_is_repeated(noise):
    """A sum that cannot get noise is found before the first noise; an empty draw needs no sum at all."""
    start, trained = plan_of(noise).mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True), parameters()
    next(start.draws(1))
    for wrong in (torch.zeros(5, dtype=torch.bfloat16), torch.zeros(10)[::2]):
        trained["b"].grad_dtype, trained["b"].grad = wrong.dtype, wrong
        with pytest.raises(ValueError, match=r"the sum of b is .*GhostClipper makes such sums"):
            start.add_noise_(trained)
        assert trained["a"].grad is None or not trained["a"].grad.any()
        trained["b"].grad = None
    trained["b"].data = trained["b"].data.to(torch.bfloat16)
    start.add_noise_(trained)
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in trained.values())


def test_a_clipper_with_another_bound_is_refused():
    """Noise for C = 0.5 beside contributions of up to 1 has half the planned noise multiplier."""
    mechanism, model = plan_of("independent").mechanism, torch.nn.Linear(3, 2)
    start = mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
    next(start.draws(1))
    with pytest.raises(
        ValueError, match=r"bounds contributions by .*1\.0.*Make it with GhostClipper\(model, clipping="
    ):
        start.add_noise_(clipper := GhostClipper(model, clip_norm=1.0))
    with pytest.raises(ValueError, match="bounds contributions by"):
        start.add_noise_(dict(model.named_parameters()))
    clipper.remove()
    start.add_noise_(GhostClipper(torch.nn.Linear(3, 2), clipping=mechanism.clipping))


@pytest.mark.parametrize("sums", [[], "a", None, 3, iter([("a", 1)]), {"a": 1}])
def test_what_holds_no_sums_is_refused(sums):
    start = plan_of("independent").mechanism.start(8, NoiseSource(seed=3), seeded_rng(5), for_tests=True)
    next(start.draws(1))
    with pytest.raises(ValueError, match="pass the GhostClipper, or a mapping from names to parameters"):
        start.add_noise_(sums)


@pytest.mark.parametrize("count", ["8", 0, -1, 2.0, True, None])
def test_a_number_of_steps_is_needed(count):
    mechanism = plan_of(BANDED).mechanism
    with pytest.raises(ValueError, match="the number of steps of the plan is needed"):
        mechanism.start(count, NoiseSource())
    with pytest.raises(ValueError, match="a number of draws, 1 or more, is needed"):
        next(mechanism.start(8, NoiseSource()).draws(count))
    with pytest.raises(ValueError, match=r"the generator of the noise is None; pass dpllm.NoiseSource\(\)"):
        mechanism.start(8, None)


def test_a_threshold_that_a_loop_would_move_is_refused():
    """The loop could move it by the private norms themselves, and the printed ε would not hold."""
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=32, clipping="quantile")
    mechanism = make_plan(config, num_units=64, num_steps=8).mechanism
    with pytest.raises(ValueError, match="which only a PrivateRun or a DPTrainer makes"):
        mechanism.start(8, NoiseSource())


class Mine:
    """A generator of one's own, from the operating system's entropy."""

    is_secret = True

    def normal_like(self, total):
        generator = torch.Generator().manual_seed(secrets.randbits(63))
        return torch.randn(total.shape, dtype=total.dtype, generator=generator)

    def add_(self, grad, noise_stddev):
        grad += noise_stddev * self.normal_like(grad)


class Seeded(Mine):
    is_secret = False


class Silent:
    add_, normal_like = Mine.add_, Mine.normal_like


class Without(NoiseSource):
    """Noise that is missing, from a class of dpllm."""

    def add_(self, grad, noise_stddev):
        pass


class Twice(Mine):
    def normal_like(self, total):
        return 2 * super().normal_like(total)


class Uniform(Mine):
    def normal_like(self, total):
        return (torch.rand_like(total) - 0.5) * 12**0.5


class Repeated(Mine):
    def normal_like(self, total):
        return torch.randn(total.shape, generator=torch.Generator().manual_seed(1))


class Coupled(Mine):
    def normal_like(self, total):
        noise = super().normal_like(total).flatten()
        return ((noise + noise.roll(1)) / 2**0.5).view_as(total)


@pytest.mark.parametrize("noise", ["independent", BANDED], ids=["independent", "banded"])
def test_a_generator_of_ones_own_adds_the_noise_and_the_words_say_what_nobody_checked(noise):
    """The history is that of dpllm's own noise; that it holds depends on the generator, and the words say so."""
    mechanism = plan_of(noise).mechanism
    start = mechanism.start(8, Mine())
    _, releases = noisy(start, [8])
    assert start.history == mechanism.history(8) and 0.1 < float(releases.std()) < 1
    assert "if all numbers of Mine are independent, standard normal and secret" in start.words
    assert "does not know this generator" in start.words
    assert mechanism.start(8, NoiseSource()).words.endswith("with noise from the operating system's entropy")


@pytest.mark.parametrize(
    ("generator", "error"),
    [
        (Without(), r"Without.add_ are not independent N\(0, 1\).* the variance is 0 in place of 1"),
        (Twice(), "Twice.add_ .* the variance is"),
        (Uniform(), "Uniform.add_ .* the fourth moment is"),
        (Repeated(), "Repeated.add_ .* the product of two calls is"),
        (Coupled(), "Coupled.add_ .* the product of neighbours is"),
    ],
)
def test_noise_that_is_known_to_be_wrong_is_refused_also_for_tests(generator, error):
    """Before a sum is changed."""
    for more in ({}, {"for_tests": True}):
        start, trained = plan_of("independent").mechanism.start(8, generator, **more), parameters()
        next(start.draws(1))
        with pytest.raises(ValueError, match=error):
            start.add_noise_(trained)
        assert not any(p.grad is not None and p.grad.any() for p in trained.values())


def test_a_generator_that_does_not_say_whether_it_is_secret_is_refused():
    """Before a draw is handed out."""
    for more in ({}, {"for_tests": True}):
        with pytest.raises(ValueError, match="Silent does not say whether its numbers are secret"):
            plan_of("independent").mechanism.start(8, Silent(), **more)


@pytest.mark.parametrize(
    ("generator", "rng", "error"),
    [
        (NoiseSource(seed=1), None, "NoiseSource has a fixed seed"),
        (Seeded(), None, "Seeded has a fixed seed"),
        (NoiseSource(), seeded_rng(5), "nobody can see whether it has a seed"),
        (NoiseSource(), np.random.default_rng(), "nobody can see whether it has a seed"),
    ],
)
def test_a_source_that_may_have_a_seed_is_for_tests_and_then_nothing_is_private(generator, rng, error):
    """Whoever prints ε from the history of such a start prints inf, also with correlated noise."""
    for noise in ("independent", BANDED):
        mechanism = plan_of(noise).mechanism
        with pytest.raises(ValueError, match=error):
            mechanism.start(8, generator, rng)
        start = mechanism.start(8, generator, rng, for_tests=True)
        noisy(start, [2])
        assert epsilon(start.history, 1e-3) == float("inf") and start.words.startswith("NOT PRIVATE")


@dataclass(frozen=True)
class Drawing(IndependentNoise):
    """Draws as they are given, with the accounting of Poisson sampling."""

    given: tuple[int, ...] = ()

    def sampler(self, draw):
        return SimpleNamespace(steps=lambda rng: iter([np.array(self.given, dtype=np.int64)]))


@pytest.mark.parametrize(("given", "error"), [((3, 3, 5), "is twice in one draw"), ((-1, 5), "has the unit -1")])
def test_a_draw_with_a_unit_twice_is_refused(given, error):
    """Its contribution would be of norm 2 C; a number below 0 is another name of a unit."""
    start = replace(plan_of("independent").mechanism, noise=Drawing(given)).start(8, NoiseSource())
    with pytest.raises(ValueError, match=error):
        next(start.draws(1))


def a_step(units, rows, index=None, before=None, between=None, zero=True):
    """Take two steps over a draw of these units, with these rows; the second begins with the gradient of the first."""
    start = replace(plan_of("independent").mechanism, noise=Cycling(tuple(range(units)))).start(8, NoiseSource())
    model = torch.nn.Linear(3, 1)
    clipper = GhostClipper(model, clipping=start._mechanism.clipping)
    for _ in start.draws(2):
        if zero:
            model.zero_grad(set_to_none=zero != "zeros")
        if before is not None:
            before(model)
        for count in rows:
            if count:
                clipper.backward(model(torch.randn(count, 3)).squeeze(1), index)
            if between is not None:
                between(model)
        start.add_noise_(clipper)
    clipper.remove()


class Cycling(Drawing):
    def sampler(self, draw):
        return SimpleNamespace(steps=lambda rng: itertools.repeat(np.array(self.given, dtype=np.int64)))


@pytest.mark.parametrize("zero", [True, "zeros"])
def test_steps_over_the_drawn_units_are_taken(zero):
    """In one or several calls, with fewer units, with several rows of a unit and padding, and with nobody."""
    a_step(4, [4], zero=zero)
    a_step(4, [2, 2], zero=zero)
    a_step(4, [3], zero=zero)
    a_step(2, [5], torch.tensor([0, 0, 1, 1, -1]), zero=zero)
    a_step(0, [0], zero=zero)


@pytest.mark.parametrize(
    ("units", "rows", "index"),
    [(4, [4, 1], None), (0, [1], None), (2, [4], None), (2, [4], torch.tensor([0, 1, 1, 2]))],
    ids=["a unit again", "nobody was drawn", "rows of one unit apart", "a unit that was not drawn"],
)
def test_more_units_than_were_drawn_are_refused(units, rows, index):
    """A unit that is computed twice contributes up to 2 C, and one that was not drawn was not sampled."""
    with pytest.raises(ValueError, match=r"units were clipped in this step, and \d were drawn"):
        a_step(units, rows, index)


def add_to(model):
    model.bias.grad = torch.ones(1) if model.bias.grad is None else model.bias.grad + 1


def add_in_place(model):
    model.bias.grad.add_(1)


@pytest.mark.parametrize(
    "more",
    [{"before": add_to}, {"between": add_to}, {"between": add_in_place}, {"zero": False}],
    ids=["before", "replaced", "in place", "not emptied"],
)
def test_a_gradient_from_elsewhere_is_refused(more):
    """It would be released without a bound."""
    with pytest.raises(ValueError, match=r"the \.grad of \w+ has numbers that this clipper did not add in this step"):
        a_step(4, [2, 2], **more)
