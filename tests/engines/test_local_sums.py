"""Whole sums are kept between microbatches where they are small beside the weights, or memory is left for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dpllm.engines import buckets
from dpllm.engines.buckets import LocalSums, free_memory, sums_are_small, sums_fit
from dpllm.engines.processes import Processes


def model(trained: int, frozen: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A module of trained and frozen entries."""
    module = nn.Module()
    module.trained = nn.Parameter(torch.zeros(trained, dtype=dtype))
    module.frozen = nn.Parameter(torch.zeros(frozen, dtype=dtype), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("trained", "frozen", "dtype", "small"),
    [
        (1000, 0, torch.bfloat16, False),  # all weights: what sharding divides
        (1000, 0, torch.float32, False),
        (100, 300, torch.bfloat16, True),  # 400 bytes of sums, 800 of weights
        (100, 299, torch.bfloat16, False),
        (100, 100, torch.float32, True),
        (100, 100, torch.float64, True),
    ],
)
def test_sums_are_small_up_to_half_the_memory_of_the_weights(trained, frozen, dtype, small):
    """In float32, or wider as the weights."""
    assert sums_are_small(model(trained, frozen, dtype)) == small


def test_weights_of_other_processes_do_not_count():
    """Under ZeRO-3 a process holds its partition; the sums are of the whole parameter."""

    def partitioned(entries: int, requires_grad: bool) -> Any:
        return SimpleNamespace(
            ds_tensor=torch.zeros(entries // 4, dtype=torch.bfloat16),
            ds_numel=entries,
            numel=lambda: 0,
            requires_grad=requires_grad,
            dtype=torch.bfloat16,
        )

    def zero3(trained: int, frozen: int) -> Any:
        every = [partitioned(trained, True), partitioned(frozen, False)]
        return SimpleNamespace(parameters=lambda: every)

    assert sums_are_small(zero3(100, 1600)) and not sums_are_small(zero3(100, 1400))


class Together(Processes):
    """This process, and others whose numbers are given."""

    def __init__(self, *others: float) -> None:
        super().__init__()
        self.others, self.asked = others, 0

    def gather_numbers(self, values):
        self.asked += 1
        return [list(values), *([one] for one in self.others)]


# of 100 trained entries in bfloat16: 400 bytes of sums, and 1200 of the first update; of the device a tenth
NEEDED = 400 + 1200 + 1000


@pytest.mark.parametrize(("free", "others", "fits"), [(NEEDED, (), True), (NEEDED - 1, (), False)])
def test_sums_fit_into_memory_that_is_left(free, others, fits, monkeypatch):
    """Beside the optimizer's state, which an update makes later, and a margin."""
    monkeypatch.setattr(buckets, "free_memory", lambda device, processes: (free, 10_000.0))
    assert sums_fit(model(100, 0), Together(*others)) == fits


def test_one_process_without_memory_decides_for_all(monkeypatch):
    """The reductions are collectives, so that all of them have to do the same; one that cannot measure keeps none."""
    monkeypatch.setattr(buckets, "free_memory", lambda device, processes: (1e9, 1e9))
    assert sums_fit(model(100, 0), Together(5.0)) and not sums_fit(model(100, 0), Together(5.0, -1.0))
    monkeypatch.setattr(buckets, "free_memory", lambda device, processes: None)
    assert not sums_fit(model(100, 0), Together())


def test_the_choice_is_made_once(monkeypatch):
    """Memory that is taken later changes nothing: a step's sums are in one form."""
    monkeypatch.setattr(buckets, "free_memory", lambda device, processes: (1e9, 1e9))
    processes = Together()
    sums = LocalSums(model(100, 0), processes)
    assert sums.fit()
    monkeypatch.setattr(buckets, "free_memory", lambda device, processes: (0.0, 1e9))
    assert sums.fit() and processes.asked == 1


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    """Each has its part of what a CPU's memory has left; the memory of other devices is unknown."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    free, total = free_memory(torch.device("cpu"), Processes())
    assert 0 < free <= total
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu"), Processes())[1] == total / 4
    assert free_memory(torch.device("meta"), Processes()) is None


def test_a_kept_sum_is_continued():
    """It is handed out once; then another begins."""
    one = model(3, 0)
    sums = LocalSums(one, Together())
    total = sums.begun(one.trained)
    total.add_(torch.ones(3))
    sums.keep(one.trained, total)
    assert sums.begun(one.trained) is total and sums.begun(one.trained).is_empty
