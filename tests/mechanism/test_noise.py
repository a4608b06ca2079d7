"""Every entry of a sum gets the noise of exactly one process, for every shape and number of processes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.mechanism.banded import BandedNoise
from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentNoise, IndependentStream
from tests.mutations import kills


@kills(
    "noise that is written is zero",
    "dpllm/mechanism/generators.py",
    "torch.mul(draw(block), noise_stddev, out=block)",
    "block.zero_()",
)
@pytest.mark.parametrize("randomness", ["os", "chacha20"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("stddev", [0.0, 0.7])
def test_noise_that_is_written_is_what_is_added_to_zeros(randomness, rank, size, stddev):
    """With the same bits, and nothing of what the memory held before."""
    added, written = torch.zeros(5, 7), torch.full((5, 7), torch.nan)
    IndependentStream(NoiseSource(3, rank, randomness)).add_share_("w", added, stddev, rank, size)
    IndependentStream(NoiseSource(3, rank, randomness)).write_share_("w", written, stddev, rank, size)
    assert torch.equal(added, written)


class Doubled(NoiseSource):
    """A source of one's own."""

    def add_(self, grad, noise_stddev):
        super().add_(grad, 2 * noise_stddev)


def test_a_source_of_ones_own_adds_to_zeros():
    """What it adds is its own, so its base class writes nothing for it."""
    total = torch.full((100, 1000), torch.nan)
    IndependentStream(Doubled(3)).write_share_("w", total, 1.0, 0, 1)
    assert float(total.std()) == pytest.approx(2, abs=0.02)


@settings(max_examples=80, deadline=None)
@given(shape=st.lists(st.integers(0, 7), min_size=1, max_size=3), size=st.integers(1, 9))
def test_the_slices_of_all_ranks_cover_every_entry_once(shape, size):
    """Also where there are fewer entries than ranks: no entry without noise, none with that of two."""
    drawn = torch.zeros(shape, dtype=torch.int64)
    for rank in range(size):
        total = torch.zeros(shape, dtype=torch.float64)
        IndependentStream(NoiseSource()).add_share_("w", total, 1.0, rank, size)
        drawn += total != 0
    assert bool((drawn == 1).all())


def test_the_sum_over_ranks_has_the_variance_of_one_draw():
    """σ²C² per entry for every number of processes, Gaussian, on top of the values that the ranks hold."""
    for size in (1, 2, 5):
        summed = torch.zeros(100, 1000)
        for rank in range(size):
            total = torch.full((100, 1000), 3.0)
            IndependentStream(NoiseSource(seed=1, stream=rank)).add_share_("w", total, 0.7, rank, size)
            summed += total
        noise = (summed - 3.0 * size).flatten()
        assert float(noise.var()) / 0.49 == pytest.approx(1, abs=0.02)
        assert stats.kstest(noise.numpy() / 0.7, "norm").pvalue > 1e-3


@kills(
    "the processes draw one stream of noise",
    "dpllm/mechanism/generators.py",
    "np.random.SeedSequence([seed, stream])",
    "np.random.SeedSequence([seed, 0])",
)
def test_streams_of_a_seed_and_fresh_entropy_differ_between_ranks():
    """Equal noise on two shards would cancel in a difference."""
    for source in (lambda rank: NoiseSource(seed=3, stream=rank), lambda rank: NoiseSource()):
        draws = []
        for rank in range(4):
            total = torch.zeros(4 * 20_000)
            IndependentStream(source(rank)).add_share_("w", total, 1.0, rank, 4)
            draws.append(total.view(4, -1)[rank])
        correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(4)
        assert float(correlation.abs().max()) < 6 / 20_000**0.5


def test_ranks_draw_in_any_shape():
    """A scalar belongs to one of the ranks; a tensor whose entries cannot be numbered in memory is refused."""
    scalar = torch.zeros(())
    for rank in range(3):
        IndependentStream(NoiseSource()).add_share_("w", scalar, 1.0, rank, 3)
    assert scalar != 0
    with pytest.raises(RuntimeError, match="view"):
        IndependentStream(NoiseSource()).add_share_("w", torch.zeros(4, 6).t(), 1.0, 0, 2)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_noise_of_a_rank_that_does_not_exist_is_refused(rank, size):
    """Entries of its slice would have none."""
    with pytest.raises(ValueError, match=rf"rank is {rank} of {size} processes"):
        IndependentStream(NoiseSource()).add_share_("w", torch.zeros(3), 1.0, rank, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.complex64])
@pytest.mark.parametrize(
    "noise", [IndependentNoise(), BandedNoise(1), BandedNoise(4), BltNoise(1, (0.9,), (0.2,), 0.5)]
)
def test_noise_of_lower_precision_is_refused(noise, dtype):
    """Rounding would undo a part of it, and the precision would tell whether anybody was drawn."""
    stream = noise.stream(NoiseSource(), 8)
    stream.begin(0)
    with pytest.raises(ValueError, match="added in float32"):
        stream.add_share_("w", torch.zeros(6, dtype=dtype), 1.0, 0, 1)
