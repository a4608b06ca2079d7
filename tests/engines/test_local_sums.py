"""Whole sums are kept between microbatches only where they are small beside the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dpllm.engines.buckets import sums_are_small


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
