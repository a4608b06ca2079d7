"""One process: sums in float32, and only the necessary ones at a time."""

import gc
import weakref

import pytest
import torch
from torch import nn

from dpllm.engines.base import SingleProcess


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


def test_sums_of_a_single_microbatch_exist_one_at_a_time():
    """The float32 sums of all parameters exist at the same time only where microbatches accumulate."""
    own = parameters()
    assert collect(engine_of(own), own, 1.0, last=True) == [1, 1, 1, 1, 1]
    more = parameters()
    assert collect(engine_of(more), more, 1.0, last=False) == [1, 2, 3, 4, 5]
