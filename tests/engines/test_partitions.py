"""Buckets of ZeRO-3: each process gets its part of every parameter's sum, as DeepSpeed divides it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpllm.engines.deepspeed import PartitionedBucket, partitioned_buckets


def partitioned(entries: int, parts: int, dtype: torch.dtype = torch.float32) -> Any:
    """A parameter as ZeRO-3 leaves it: no entries, and the size of a partition."""
    shard = SimpleNamespace(ds_numel=-(-entries // parts))
    return SimpleNamespace(ds_numel=entries, ds_tensor=shard, dtype=dtype, device=torch.device("cpu"))


@pytest.mark.parametrize("sizes", [[12], [13], [2], [12, 7, 1, 30]])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_each_process_gets_its_part_of_each_sum(sizes, parts):
    """In the order of the entries, with zeros behind the last one; more processes than entries, too."""
    parameters = [partitioned(size, parts) for size in sizes]
    bucket = PartitionedBucket(parameters, parts)
    totals = [torch.arange(1.0, size + 1) for size in sizes]
    flat = bucket.packed(totals)
    assert flat.shape[0] == parts
    for parameter, total in zip(parameters, totals, strict=True):
        found = [next(part for p, part in bucket.unpacked(row) if p is parameter) for row in flat]
        assert all(len(part) == parameter.ds_tensor.ds_numel for part in found)
        whole = torch.cat(found)
        assert torch.equal(whole[: len(total)], total) and not whole[len(total) :].any()


def test_a_sum_without_padding_is_not_copied():
    """It may take as much memory as the largest parameter."""
    total = torch.ones(4, 6)
    assert PartitionedBucket([partitioned(24, 3)], 3).packed([total]).data_ptr() == total.data_ptr()


def test_parameters_of_one_dtype_are_reduced_together():
    """A bucket has one tensor."""
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16]
    found = partitioned_buckets([partitioned(8, 2, dtype) for dtype in dtypes], 2)
    assert [[p.dtype for p in bucket.parameters] for bucket in found] == [[torch.bfloat16] * 2, [torch.float32]]
