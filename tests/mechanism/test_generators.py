"""The noise has the distribution that the accounting assumes, and is drawn freshly each time, in float32."""

import numpy as np
import pytest
import torch
from scipy import stats

from dpllm.mechanism.chacha20 import ChaCha20Normals
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.limits import RANDOMNESS
from tests.mutations import kills

LEVELS = pytest.mark.parametrize("level", RANDOMNESS)


@kills("the noise is deleted", "dpllm/mechanism/generators.py", "block.add_(draw(block), alpha=noise_stddev)", "pass")
@LEVELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_is_gaussian_with_the_given_deviation(dtype, level):
    """Kolmogorov-Smirnov against N(0, stddev^2), with a fixed seed so that the test cannot flicker."""
    grad = torch.zeros(100, 1000, dtype=dtype)
    NoiseSource(seed=1, randomness=level).add_(grad, 3.0)
    assert stats.kstest(grad.flatten().numpy() / 3.0, "norm").pvalue > 1e-3
    assert stats.kstest(grad.flatten().numpy() / 3.1, "norm").pvalue < 1e-3


def test_the_noise_is_added_to_what_stands_there():
    """The sum is not replaced."""
    grad = torch.full((10_000,), 5.0)
    NoiseSource(seed=1).add_(grad, 1.0)
    assert abs(float(grad.mean()) - 5) < 0.05


@LEVELS
def test_every_draw_is_independent_of_every_other(level):
    """Across tensors, steps and processes: no correlation, with fresh entropy and with a seed."""
    for source in (NoiseSource(randomness=level), NoiseSource(seed=3, randomness=level)):
        draws = [torch.zeros(20_000) for _ in range(4)]
        for draw in draws:
            source.add_(draw, 1.0)
        correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
        assert float(correlation.abs().max()) < 6 / 20_000**0.5


@LEVELS
def test_fresh_entropy_does_not_follow_torch_seeds(level):
    """set_seed() on every rank or after a resume must not repeat the noise."""
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draw = torch.zeros(100)
        NoiseSource(randomness=level).add_(draw, 1.0)
        draws.append(draw)
    assert not torch.equal(*draws)


@LEVELS
def test_a_seed_repeats_the_noise(level):
    """Only for tests; the report then says so."""
    draws = [torch.zeros(100), torch.zeros(100)]
    for draw in draws:
        NoiseSource(seed=5, randomness=level).add_(draw, 1.0)
    assert torch.equal(*draws) and draws[0].any()


def test_the_level_is_the_generator_that_draws():
    """ChaCha20 keyed by the same entropy as PCG64DXSM; a level that does not exist is refused."""
    drawn = {level: NoiseSource(seed=5, randomness=level).normal_like(torch.zeros(100)) for level in ("os", "chacha20")}
    entropy = NoiseSource(seed=5)._entropy()
    assert np.array_equal(drawn["chacha20"].numpy(), ChaCha20Normals(entropy).standard_normal(100))
    seed = np.random.SeedSequence(int.from_bytes(entropy, "little"), pool_size=8)
    pcg = np.random.Generator(np.random.PCG64DXSM(seed))
    assert np.array_equal(drawn["os"].numpy(), pcg.standard_normal(100, dtype=np.float32))
    with pytest.raises(ValueError, match="urandom"):
        NoiseSource(randomness="urandom")


@pytest.mark.parametrize(("level", "block"), [("os", 1), ("os", 7), ("os", 1000), ("chacha20", 13), ("discrete", 13)])
def test_every_entry_has_noise_of_its_own_whatever_the_block(monkeypatch, block, level):
    """Numbers drawn a block at a time are never used twice, reach every entry, and have the right deviation."""
    monkeypatch.setattr("dpllm.mechanism.generators.ENTRIES_AT_A_TIME", block)
    for source in (NoiseSource(randomness=level), NoiseSource(seed=2, randomness=level)):
        grad = torch.zeros(30, 100, dtype=torch.float64)
        source.add_(grad, 2.0)
        assert grad.unique().numel() == grad.numel() and grad.all()
        assert 1.8 < float(grad.std()) < 2.2


def test_no_noise_at_zero_deviation():
    """noise_multiplier=0: epsilon is infinite, and the sum is exact."""
    grad = torch.ones(10)
    NoiseSource().add_(grad, 0.0)
    assert torch.equal(grad, torch.ones(10))


def test_low_precision_is_refused():
    """Noise drawn or added in bfloat16 is not the noise that was accounted for."""
    with pytest.raises(ValueError, match="added in float32"):
        NoiseSource().add_(torch.zeros(3, dtype=torch.bfloat16), 1.0)


@pytest.mark.parametrize("stddev", [-1.0, float("nan")])
def test_a_deviation_that_is_none_is_refused(stddev):
    """NaN noise could be mistaken for noise."""
    with pytest.raises(ValueError, match="noise_stddev is"):
        NoiseSource().add_(torch.zeros(3), stddev)


def test_the_state_of_the_gpu_generator_holds_key_and_offset():
    """Philox is started from 64 + 62 random bits; its state is those two numbers."""
    entropies = {int.from_bytes(NoiseSource()._entropy(), "little") for _ in range(20)}
    assert len(entropies) == 20 and max(e.bit_length() for e in entropies) > 250


def test_standard_normal_numbers_like_a_tensor():
    """For mechanisms that keep their noise: shape, dtype and distribution, over several blocks."""
    total = torch.zeros(100, 1000, dtype=torch.float64)
    drawn = NoiseSource(seed=1).normal_like(total)
    assert drawn.shape == total.shape and drawn.dtype == total.dtype and not total.any()
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-3
    assert NoiseSource().normal_like(torch.zeros(0)).numel() == 0
