"""Noise that is drawn again equals noise that was stored, bit by bit, and no number of it is used twice."""

from __future__ import annotations

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from dpllm.mechanism import generators
from dpllm.mechanism.banded import BandedNoise
from dpllm.mechanism.generators import BlockStream, NoiseMemory, NoiseSource, memory_of, stream_of
from dpllm.mechanism.limits import NOISE_MEMORIES
from dpllm.mechanism.noise import IndependentNoise, IndependentStream
from tests.mutations import kills

BLOCK = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in small tensors, the last one shorter."""
    monkeypatch.setattr(generators, "ENTRIES_AT_A_TIME", BLOCK)


GEOMETRIC = {"strategy": "geometric", "ratio": 0.9}
FREE = {"strategy": "free", "coefficients": (0.8, 0.5, 0.3)}


def noise_of(bands, **strategy):
    return BandedNoise(bands, **strategy)


def add(stream, steps, shapes=None, dtype=torch.float32, rank=0, size=1, stddev=1.0):
    """The noise of each step, of each parameter."""
    released = []
    for step in steps:
        stream.begin(step)
        totals = {name: torch.zeros(shape, dtype=dtype) for name, shape in (shapes or {"w": (50,)}).items()}
        for name, total in totals.items():
            stream.add_share_(name, total, stddev, rank, size)
        released.append(totals)
    return released


def bits(released):
    return [total.numpy().tobytes() for totals in released for total in totals.values()]


@pytest.mark.grid
@pytest.mark.parametrize("level", ["os", "chacha20"])
@pytest.mark.parametrize(
    ("bands", "strategy"), [(2, {}), (3, FREE), (6, {}), (2, GEOMETRIC), (3, GEOMETRIC), (13, GEOMETRIC)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_regenerated_noise_equals_stored_noise_bit_by_bit(bands, strategy, level, dtype, monkeypatch):
    """Also stored in part, on every rank, with parameters of one entry and of none, and where a step was skipped."""
    shapes = {"w": (7, 11), "b": (1,), "none": (0,), "v": (BLOCK,)}
    steps, kept = [0, 1, 2, 4, 5, 6, 7, 8, 11], noise_of(bands, **strategy).tensors_kept
    monkeypatch.setattr(generators, "memory_of", lambda device: 4 * 20 * kept * dtype.itemsize)
    for rank in range(2):
        found = {}
        for memory in NOISE_MEMORIES:
            stream = stream_of(noise_of(bands, **strategy), NoiseSource(4, rank, level), 12, memory)
            found[memory] = bits(add(stream, steps, shapes, dtype, rank, 2, stddev=0.37))
            stored = {held is not None for held in stream._stored.values()}
            assert stored == {"stored": {True}, "regenerated": {False}, "auto": {True, False}}[memory]
        assert found["stored"] == found["regenerated"] == found["auto"]
        assert len(set(found["stored"])) > len(steps)


def numbers(seed, steps, name="w", entries=50, rank=0, size=1, level="os"):
    """(steps, entries) in float64: the independent numbers at the addresses of a run with this seed."""
    addressed = NoiseSource(seed, rank, level).numbers()
    blocks = [min(BLOCK, entries - first) for first in range(0, entries, BLOCK)]
    draws = [addressed.at(name, rank, size, block) for block in range(len(blocks))]
    rows = [
        torch.cat(
            [draw.normal_like(torch.zeros(n, dtype=torch.float64)) for draw, n in zip(draws, blocks, strict=True)]
        )
        for _ in range(steps)
    ]
    return torch.stack(rows).numpy()


def strategy(noise, steps):
    """M, from the noise of single impulses: its inverse is applied to the identity by the noise's own stream."""

    class Impulse:
        def __init__(self, at):
            self.at, self.drawn = at, 0

        def normal_like(self, total):
            self.drawn += 1
            return torch.full_like(total, float(self.drawn - 1 == self.at))

        def add_(self, grad, noise_stddev):
            grad.add_(self.normal_like(grad), alpha=noise_stddev)

    columns = []
    for at in range(steps):
        stream = noise.stream(Impulse(at), steps)
        columns.append([float(row["w"][0]) for row in add(stream, range(steps), {"w": (1,)}, torch.float64)])
    return np.linalg.inv(np.array(columns).T)


@kills(
    "two processes with one key draw the same noise",
    "dpllm/mechanism/generators.py",
    "self._numbers.at(name, *of, number)",
    "self._numbers.at(name, number)",
)
@kills(
    "a regenerated block begins at the present step",
    "dpllm/mechanism/generators.py",
    "            if self._order.step:\n",
    "            if False:\n",
)
@pytest.mark.parametrize("strategy_of", [{}, GEOMETRIC])
@pytest.mark.parametrize("memory", ["stored", "regenerated"])
@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 4, 5, 6], [2, 3, 6]])
def test_the_noise_is_the_inverse_of_the_strategy_times_the_numbers(memory, steps, strategy_of):
    """Row t of M⁻¹z in step t, also after draws without a step, and if the first draws had none."""
    noise = noise_of(3, **strategy_of)
    released = add(stream_of(noise, NoiseSource(9), 7, memory), steps, dtype=torch.float64)
    expected = np.linalg.inv(strategy(noise, 7)) @ numbers(9, 7)
    found = np.stack([totals["w"].numpy() for totals in released])
    np.testing.assert_allclose(found, expected[steps], atol=1e-12)


@pytest.mark.parametrize("level", ["os", "chacha20"])
def test_white_noise_is_normal_and_independent_over_entries_steps_parameters_and_ranks(level, monkeypatch):
    """M times the regenerated noise: Kolmogorov-Smirnov, and correlations at every lag, with fresh entropy."""
    monkeypatch.setattr(generators, "ENTRIES_AT_A_TIME", 700)
    noise, entries, steps = noise_of(3), 4000, 5
    rows = []
    for rank in range(2):
        stream = stream_of(noise, NoiseSource(None, rank, level), steps, "regenerated")
        released = add(stream, range(steps), {"a": (entries,), "b": (entries,)}, torch.float64, rank, 2)
        for name in ("a", "b"):
            own = np.array_split(np.stack([totals[name].numpy() for totals in released]), 2, axis=1)[rank]
            rows += list(strategy(noise, steps) @ own)
    white = np.stack(rows)  # ranks, parameters and steps; entries
    assert white.shape == (20, entries // 2)
    assert stats.kstest(white.ravel(), "norm").pvalue > 1e-8
    bound = 6 / math.sqrt(entries // 2)
    for values in (white, white**2 - 1):
        assert np.abs(np.corrcoef(values) - np.eye(20)).max() < bound
        for lag in (1, 2, 7, 8, 16, 64, 699, 700):
            assert abs((values[:, lag:] * values[:, :-lag]).mean() / values.var()) < 6 / math.sqrt(values[:, lag:].size)


@kills(
    "noise that can be drawn again is that of the first step in every step",
    "dpllm/mechanism/generators.py",
    "        self._draw += 1\n",
    "",
)
def test_no_number_is_drawn_for_two_places():
    """Other steps, names, blocks, ranks and numbers of processes; names that end in a number; two streams, two runs."""
    source = NoiseSource(3)
    streams = [stream_of(noise_of(2), source, 9, memory) for memory in ("regenerated", "stored")]
    streams += [stream_of(noise_of(2), NoiseSource(), 9, "regenerated") for _ in range(2)]
    shapes = {"w": (40,), "w1": (40,), "w.1": (40,), "": (40,)}
    white = []
    for stream in streams:
        released = add(stream, range(4), shapes, torch.float64)
        white += [
            strategy(noise_of(2), 9)[:4, :4] @ np.stack([totals[name].numpy() for totals in released])
            for name in shapes
        ]
    assert np.unique(np.concatenate(white).round(12)).size == 4 * 4 * 4 * 40

    one = source.numbers()  # one key on two ranks, by mistake: their slices have other addresses
    places = [one.at("w", rank, size, 0).normal_like(torch.zeros(50)) for rank, size in ((0, 1), (0, 2), (1, 2))]
    assert torch.cat(places).unique().numel() == 150


def test_nothing_is_stored_where_it_is_regenerated():
    """No tensor is held between the steps; stored streams hold as many as the noise says."""
    for memory, kept, strategy_of in (("regenerated", 0, {}), ("stored", 1, {}), ("stored", 1, GEOMETRIC)):
        noise = noise_of(4, **strategy_of)
        stream = stream_of(noise, NoiseSource(3), 9, memory)
        add(stream, range(9))
        held = sum(tensor.numel() for tensor in tensors(stream))
        assert held == kept * noise.tensors_kept * 50


def tensors(held, seen=None):
    """Every tensor that an object holds."""
    seen = set() if seen is None else seen
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, dict):
        yield from (tensor for value in held.values() for tensor in tensors(value, seen))
    elif hasattr(held, "__iter__") and not isinstance(held, (str, bytes)):
        yield from (tensor for value in held for tensor in tensors(value, seen))
    else:
        yield from tensors(getattr(held, "__dict__", {}), seen)


def test_geometric_noise_is_regenerated_from_two_of_every_b_draws(monkeypatch):
    """And from all of them in the first steps; the general recursion takes all."""
    counted = []
    draw = generators.NoiseSource.numbers
    monkeypatch.setattr(generators.NoiseSource, "numbers", lambda self: Counting(draw(self), counted))
    for strategy_of, expected in ((GEOMETRIC, 2 * 5), ({}, 20)):
        counted.clear()
        add(stream_of(noise_of(4, **strategy_of), NoiseSource(1), 20, "regenerated"), [19], {"w": (BLOCK,)})
        assert len(counted) == expected


class Counting:
    """Numbers at addresses that count their draws."""

    def __init__(self, numbers, counted):
        self.numbers, self.counted = numbers, counted

    def at(self, *address):
        numbers = self.numbers.at(*address)
        drawn = numbers.normal_like
        numbers.normal_like = lambda total: (self.counted.append(1), drawn(total))[1]
        return numbers


def test_auto_stores_up_to_a_share_of_the_memory(monkeypatch):
    """In the order in which blocks come, and as many of them as fit; a smaller one may still fit."""
    monkeypatch.setattr(generators, "memory_of", lambda device: 4 * 3 * 4 * (BLOCK + 2))  # of 3 tensors in float32
    limit = NoiseMemory("auto", 3)
    assert [limit.stores(torch.zeros(n)) for n in (BLOCK, BLOCK, 3, 2, 1)] == [True, False, False, True, False]


def test_the_memory_of_this_machine_is_known(monkeypatch):
    """Some bytes, divided over the processes of the machine; a container may have less than the machine."""
    whole = memory_of(torch.device("cpu"))
    assert 2**20 < whole < 2**60
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_of(torch.device("cpu")) == whole // 4
    monkeypatch.setattr(generators.Path, "read_text", lambda self, encoding: "4096\n")
    assert memory_of(torch.device("cpu")) == 1024


def test_one_band_and_independent_noise_need_no_key():
    """Each tensor of each step has fresh entropy."""
    for noise in (IndependentNoise(), noise_of(1)):
        assert not isinstance(stream_of(noise, NoiseSource(), 9, "regenerated"), BlockStream)
    assert isinstance(stream_of(IndependentNoise(), NoiseSource(), 9), IndependentStream)


def test_a_stream_is_not_copied_or_saved():
    """A copy would draw the same noise; a file would reveal it."""
    stream = stream_of(noise_of(3), NoiseSource(), 9)
    add(stream, range(2))
    for copied in (copy.deepcopy, pickle.dumps, lambda held: torch.save({"noise": held}, io.BytesIO())):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            copied(stream)
        with pytest.raises(TypeError, match="in the memory of one process"):
            copied(stream._numbers)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"total": torch.zeros(40, dtype=torch.float64)}, r"float64.*but had 40 entries .*float32"),
        ({"rank": 0, "size": 2}, "process 0 of 2"),
    ],
)
def test_a_parameter_of_another_shape_or_process_is_refused(changed, words):
    """One entry's noise would be subtracted from that of another."""
    stream = stream_of(noise_of(3), NoiseSource(), 9)
    stream.begin(0)
    stream.add_share_("w", torch.zeros(40), 1.0, 0, 1)
    stream.begin(1)
    with pytest.raises(ValueError, match=words):
        stream.add_share_("w", **{"total": torch.zeros(40), "stddev": 1.0, "rank": 0, "size": 1, **changed})


def test_a_choice_that_does_not_exist_and_low_precision_are_refused():
    """With the names of those that do; rounding would undo a part of the noise."""
    with pytest.raises(ValueError, match="noise_memory"):
        stream_of(noise_of(3), NoiseSource(), 9, "disk")
    stream = stream_of(noise_of(3), NoiseSource(), 9)
    stream.begin(0)
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        stream.add_share_("w", torch.zeros(4, dtype=torch.bfloat16), 1.0, 0, 1)
