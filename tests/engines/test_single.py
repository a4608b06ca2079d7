"""One process: sums in float32, and only the necessary ones at a time."""

import gc
import weakref

import pytest
import torch
from torch import nn

from dpllm.engines import single
from dpllm.engines.single import SingleProcess


def parameters(dtype=torch.bfloat16, count=5):
    return {f"p{i}": nn.Parameter(torch.zeros(4, 8, dtype=dtype)) for i in range(count)}


def engine_of(parameters):
    return SingleProcess(torch.optim.SGD(parameters.values(), lr=0.1))


def collect(engine, parameters, value, *, last):
    """Hand in a constant per parameter; return the sizes of all float32 sums alive at each call."""
    alive, refs = [], []

    def add_to(parameter, total):
        assert total.total.dtype == torch.float32 and total.total.shape == parameter.shape
        total.filled().add_(value)
        refs.append(weakref.ref(total.total))
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))

    engine.collect(parameters, add_to, last=last, scale=0.5)
    return alive


@pytest.mark.parametrize("count", [1, 3])
def test_the_total_over_microbatches_times_the_scale_stands_in_grad(count):
    """Added up in float32 and rounded once, to the parameter's dtype."""
    own = parameters()
    engine = engine_of(own)
    for number in range(count):
        collect(engine, own, 1 + 2**-10, last=number == count - 1)
    expected = torch.tensor(0.5 * count * (1 + 2**-10)).bfloat16()
    for parameter in own.values():
        assert parameter.grad.dtype == torch.bfloat16 and (parameter.grad == expected).all()


def test_sums_of_a_single_microbatch_exist_a_bucket_at_a_time(monkeypatch):
    """The float32 sums of all parameters exist at the same time only where microbatches accumulate."""
    monkeypatch.setattr(single, "_BUCKET_BYTES", 2 * 4 * 8 * 4)  # two parameters
    own = parameters()
    assert collect(engine_of(own), own, 1.0, last=True) == [1, 1, 1, 1, 1]
    several = engine_of(parameters())
    several.processes.size = 2
    assert collect(several, parameters(), 1.0, last=True) == [1, 2, 1, 2, 1]
    engine = engine_of(parameters())
    more = parameters()
    assert collect(engine, more, 1.0, last=False) == [1, 2, 3, 4, 5]


def test_buckets_hold_every_parameter_once_in_order(monkeypatch):
    """One dtype each, and none larger than allowed unless a single parameter is."""
    monkeypatch.setattr(single, "_BUCKET_BYTES", 100)
    sizes = [10, 10, 10, 60, 1, 24, 2]
    every = [nn.Parameter(torch.zeros(n)) for n in sizes] + [nn.Parameter(torch.zeros(3).double())]
    buckets = single._buckets(every)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[10, 10], [10], [60], [1, 24], [2], [3]]
    assert [id(p) for bucket in buckets for p in bucket] == [id(p) for p in every]
