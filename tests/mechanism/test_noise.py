"""The noise has the distribution that the accounting assumes, is drawn afresh every time, and in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.mechanism.noise import NoiseSource


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_is_gaussian_with_the_given_deviation(dtype):
    """Kolmogorov-Smirnov against N(0, stddev^2), with a fixed seed so that the test can't flicker."""
    grad = torch.zeros(100, 1000, dtype=dtype)
    NoiseSource(seed=1).add_(grad, 3.0)
    assert stats.kstest(grad.flatten().numpy(), "norm", args=(0, 3.0)).pvalue > 1e-3
    assert stats.kstest(grad.flatten().numpy(), "norm", args=(0, 3.1)).pvalue < 1e-3


def test_the_noise_is_added_to_what_stands_there():
    """The sum is kept."""
    grad = torch.full((10_000,), 5.0)
    NoiseSource(seed=1).add_(grad, 1.0)
    assert abs(float(grad.mean()) - 5) < 0.05


def test_every_draw_is_independent_of_every_other():
    """Across tensors, steps and processes: no correlation, with fresh entropy and with a seed."""
    for source in (NoiseSource(), NoiseSource(seed=3)):
        draws = [torch.zeros(20_000) for _ in range(4)]
        for draw in draws:
            source.add_(draw, 1.0)
        correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
        assert float(correlation.abs().max()) < 6 / 20_000**0.5


def test_fresh_entropy_does_not_follow_torch_seeds():
    """set_seed() on every rank or after a resume must not repeat the noise."""
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draw = torch.zeros(100)
        NoiseSource().add_(draw, 1.0)
        draws.append(draw)
    assert not torch.equal(*draws)


def test_a_seed_repeats_the_noise():
    """For tests alone; the report then says so."""
    draws = [torch.zeros(100), torch.zeros(100)]
    for draw in draws:
        NoiseSource(seed=5).add_(draw, 1.0)
    assert torch.equal(*draws) and draws[0].any()


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_every_entry_has_noise_of_its_own_whatever_the_block(monkeypatch, block):
    """What is drawn a block at a time is never used twice, reaches every entry, and has the right deviation."""
    monkeypatch.setattr("dpllm.mechanism.noise._BLOCK", block)
    for source in (NoiseSource(), NoiseSource(seed=2)):
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
    """Noise drawn or added in bfloat16 isn't the noise that was accounted for."""
    with pytest.raises(ValueError, match="added in float32"):
        NoiseSource().add_(torch.zeros(3, dtype=torch.bfloat16), 1.0)


@pytest.mark.parametrize("stddev", [-1.0, float("nan")])
def test_a_deviation_that_is_none_is_refused(stddev):
    """NaN noise would pass for noise."""
    with pytest.raises(ValueError, match="noise_stddev is"):
        NoiseSource().add_(torch.zeros(3), stddev)


def test_the_state_of_the_gpu_generator_holds_key_and_offset():
    """Philox is started from 64 + 62 random bits; its state is those two numbers."""
    entropies = {NoiseSource()._entropy() for _ in range(20)}
    assert len(entropies) == 20 and max(e.bit_length() for e in entropies) > 250


@settings(max_examples=80, deadline=None)
@given(shape=st.lists(st.integers(0, 7), min_size=1, max_size=3), size=st.integers(1, 9))
def test_the_slices_of_all_ranks_cover_every_entry_once(shape, size):
    """Also where there are fewer entries than ranks: no entry without noise, none with that of two."""
    drawn = torch.zeros(shape, dtype=torch.int64)
    for rank in range(size):
        total = torch.zeros(shape, dtype=torch.float64)
        NoiseSource().add_share_(total, 1.0, rank, size)
        drawn += total != 0
    assert bool((drawn == 1).all())


def test_the_sum_over_ranks_has_the_variance_of_one_draw():
    """σ²C² per entry however many processes add it up, Gaussian, on top of what the ranks hold."""
    for size in (1, 2, 5):
        summed = torch.zeros(100, 1000)
        for rank in range(size):
            total = torch.full((100, 1000), 3.0)
            NoiseSource(seed=1, stream=rank).add_share_(total, 0.7, rank, size)
            summed += total
        noise = (summed - 3.0 * size).flatten()
        assert float(noise.var()) / 0.49 == pytest.approx(1, abs=0.02)
        assert stats.kstest(noise.numpy(), "norm", args=(0, 0.7)).pvalue > 1e-3


def test_streams_of_a_seed_and_fresh_entropy_differ_between_ranks():
    """Equal noise on two shards would cancel in a difference."""
    for source in (lambda rank: NoiseSource(seed=3, stream=rank), lambda rank: NoiseSource()):
        draws = []
        for rank in range(4):
            total = torch.zeros(4 * 20_000)
            source(rank).add_share_(total, 1.0, rank, 4)
            draws.append(total.view(4, -1)[rank])
        correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
        assert float(correlation.abs().max()) < 6 / 20_000**0.5


def test_ranks_draw_in_any_shape():
    """A scalar belongs to one of the ranks; a tensor whose entries can't be numbered in memory is refused."""
    scalar = torch.zeros(())
    for rank in range(3):
        NoiseSource().add_share_(scalar, 1.0, rank, 3)
    assert scalar != 0
    with pytest.raises(RuntimeError, match="view"):
        NoiseSource().add_share_(torch.zeros(4, 6).t(), 1.0, 0, 2)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_noise_of_a_rank_that_does_not_exist_is_refused(rank, size):
    """Entries of its slice would have none."""
    with pytest.raises(ValueError, match=rf"rank is {rank} of {size} processes"):
        NoiseSource().add_share_(torch.zeros(3), 1.0, rank, size)
