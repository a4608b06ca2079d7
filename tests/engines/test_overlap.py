"""Buckets are reduced while the next ones are formed, a bounded number of them, in one order on all processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpllm.engines import buckets


def works(count: int, steps: int, told: list[tuple[int, int]]):
    """Works of several steps, which tell the number of the work and of the step."""

    def work(number: int):
        for step in range(steps):
            told.append((number, step))
            if step < steps - 1:
                yield

    return (work(number) for number in range(count))


@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_every_work_ends_and_few_are_under_way(count, steps):
    """Each work takes its steps in order; it waits for its k-th collective after k younger works have begun."""
    told: list[tuple[int, int]] = []
    buckets.in_turns(works(count, steps, told))
    assert sorted(told) == [(number, step) for number in range(count) for step in range(steps)]
    open_works: set[int] = set()
    for number, step in told:
        open_works = open_works | {number} if step < steps - 1 else open_works - {number}
        assert len(open_works) <= steps
    for number in range(count - 1):
        assert told.index((number, 1)) == told.index((number + 1, 0)) + steps_before(number, steps)


def steps_before(number: int, steps: int) -> int:
    """Turns between the beginning of the next work and the second step of this one: those of older works."""
    return 1 + min(number, steps - 2)


def test_an_error_ends_the_works_that_follow():
    """Nothing is left half-way in silence."""

    def work(number: int):
        yield
        if number == 1:
            raise ValueError("wrong")

    begun = []
    with pytest.raises(ValueError, match="wrong"):
        buckets.in_turns(begun.append(number) or work(number) for number in range(5))
    assert begun == [0, 1, 2]


def test_buckets_hold_every_parameter_once_in_order(monkeypatch):
    """One kind each, and none larger than allowed unless a single parameter is."""
    monkeypatch.setattr(buckets, "_BUCKET_BYTES", 100)
    sizes = [10, 10, 10, 60, 1, 24, 2]
    every = [nn.Parameter(torch.zeros(n)) for n in sizes] + [nn.Parameter(torch.zeros(3).double())]
    found = buckets.buckets(every, lambda p: p.dtype, lambda p: p.numel() * p.element_size())
    assert [[p.numel() for p in bucket] for bucket in found] == [[10, 10], [10], [60], [1, 24], [2], [3]]
    assert [id(p) for bucket in found for p in bucket] == [id(p) for p in every]
