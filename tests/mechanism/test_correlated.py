"""All streams of correlated noise: each parameter gets the noise of each step once, in order, of its own slice."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from scipy import linalg

from dpllm.mechanism.banded import BandedNoise
from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.generators import NoiseSource, stream_of
from dpllm.mechanism.limits import NOISE_MEMORIES
from tests.mutations import kills
from tests.scarce import BreaksOff

NOISES = {
    "one band": BandedNoise(1),
    "optimal": BandedNoise(4),
    "geometric, two": BandedNoise(2, "geometric", ratio=0.98),
    "geometric": BandedNoise(6, "geometric", ratio=0.98),
    "free": BandedNoise(3, "free", coefficients=(0.8, 0.5, 0.3)),
    "buffered": BltNoise(3, (0.97, 0.6, 0.1), (0.2, 0.3, 0.1), 0.25),
}
CORRELATED = {name: noise for name, noise in NOISES.items() if name != "one band"}
each_noise = pytest.mark.parametrize("noise", CORRELATED.values(), ids=list(CORRELATED))


def added(stream, shape=4, dtype=torch.float32, rank=0, size=1, name="w"):
    """The noise of one step."""
    total = torch.zeros(shape, dtype=dtype)
    stream.add_share_(name, total, 1.0, rank, size)
    return total


@kills(
    "a draw without a step has no correlated noise",
    "dpllm/mechanism/noise.py",
    "for _ in range(skipped):",
    "for _ in range(0):",
)
@each_noise
def test_a_draw_without_a_step_has_noise_all_the_same(noise):
    """The units' order advanced, so the noise does too: the step after it is row t of M⁻¹ z, not row t - 1."""
    stream, whole = (noise.stream(NoiseSource(seed=2), 20) for _ in range(2))
    skipped = {3, 8, 9, 10}
    for step in range(20):
        whole.begin(step)
        expected = added(whole, 20)
        if step not in skipped:
            stream.begin(step)
            assert torch.equal(added(stream, 20), expected), step


@pytest.mark.parametrize("noise", NOISES.values(), ids=list(NOISES))
def test_as_many_tensors_are_kept_as_the_memory_plan_counts(noise):
    """Of the size of this process's slice, however many steps there are; where numbers are open, the most."""
    stream = noise.stream(NoiseSource(seed=5), 30)
    for step in range(30):
        stream.begin(step)
        added(stream, 8, rank=1, size=2)
    kept = [tensor for tensors in getattr(stream, "_kept", {}).values() for tensor in tensors]
    assert [tensor.numel() for tensor in kept] == [4] * noise.tensors_kept
    open_noise = type(noise)()
    assert noise.tensors_kept <= open_noise.tensors_kept == (4 if open_noise.kind == "blt" else 16)


@each_noise
@pytest.mark.parametrize("memory", [None, *NOISE_MEMORIES])
def test_noise_out_of_order_twice_or_left_out_is_refused(noise, memory):
    """Noise with a missing or repeated row would be a different mechanism."""
    source = NoiseSource()
    stream = noise.stream(source, 9) if memory is None else stream_of(noise, source, 9, memory)
    if memory is not None:
        with pytest.raises(ValueError, match="call begin"):
            added(stream)
    stream.begin(0)
    added(stream)
    with pytest.raises(ValueError, match="step 0"):
        added(stream)
    with pytest.raises(ValueError, match="already drawn"):
        stream.begin(0)
    stream.begin(1)
    with pytest.raises(ValueError, match="step 1"):
        stream.begin(2)


@each_noise
@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 3), (1, 4)])
def test_a_parameter_of_another_shape_or_dtype_is_refused(noise, before, after):
    """One entry's noise would be subtracted from that of several, or rounded differently."""
    stream = noise.stream(NoiseSource(), 9)
    stream.begin(0)
    added(stream, before)
    stream.begin(1)
    with pytest.raises(ValueError, match=rf"w has {after} entries \(torch.float32\) on this process, but had {before}"):
        added(stream, after)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        added(stream, before, torch.float64)


@each_noise
def test_slices_of_processes_have_streams_of_their_own(noise):
    """Each process keeps only its own slice, and every entry has the noise of one process."""
    streams, summed = [noise.stream(NoiseSource(seed=4, stream=rank), 9) for rank in range(3)], []
    for step in range(9):
        total = torch.zeros(10, dtype=torch.float64)
        for rank, stream in enumerate(streams):
            stream.begin(step)
            part = added(stream, 10, torch.float64, rank, 3)
            assert int((part != 0).sum()) == (4 if rank == 2 else 3)
            total += part
        summed.append(total)
    column = np.zeros(9)
    column[: len(noise.column(9))] = noise.column(9)
    white = linalg.toeplitz(column, np.zeros(9)) @ torch.stack(summed).numpy()
    assert np.unique(white.round(9)).size == white.size


@each_noise
@pytest.mark.parametrize("memory", [None, "stored", "regenerated"])
def test_noise_that_an_error_broke_off_is_not_continued(noise, memory):
    """At whichever operation: geometric noise of two bands went on without one of its two tensors."""

    def made():
        source = NoiseSource(seed=2)
        return noise.stream(source, 20) if memory is None else stream_of(noise, source, 20, memory)

    def steps(stream, first, last):
        for step in range(first, last):
            stream.begin(step)
            found.append(added(stream, 20))

    found = []
    steps(made(), 0, 9)
    expected, refused = found, 0
    for number in itertools.count(1):
        stream, found, broken = made(), [], BreaksOff(number, torch.OutOfMemoryError("none left"))
        steps(stream, 0, 6)
        stream.begin(6)
        with broken, contextlib.suppress(torch.OutOfMemoryError):
            added(stream, 20)
        if broken.at is None:
            break
        try:
            found.append(added(stream, 20))  # again, where the error came before anything changed
            steps(stream, 7, 9)
        except ValueError as error:
            assert "An error interrupted the noise of w in step 6" in str(error) and "Resume the run" in str(error)
            with pytest.raises(ValueError, match="interrupted"):
                stream.begin(7)
            refused += 1
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=False))
    assert refused >= 2
