"""The rows of a bucket are the shards of its parameters, as FSDP2 divides them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from dpllm.engines.buckets import ShardedBucket


class Mesh:
    """Two replicas of three shards, seen by one of the processes."""

    ndim = 2

    def __init__(self, replica: int, shard: int) -> None:
        self.place = (replica, shard)

    def size(self, dim: int) -> int:
        return (2, 3)[dim]

    def get_local_rank(self, dim: int) -> int:
        return self.place[dim]

    def get_group(self, dim: int) -> str:
        return ("replicas", "shards")[dim]


def parameter(total: torch.Tensor, dim: int, mesh: Mesh) -> Any:
    """What a bucket reads of a sharded parameter."""
    chunks = total.chunk(3, dim)
    empty = total.narrow(dim, 0, 0)
    local = chunks[mesh.place[1]] if mesh.place[1] < len(chunks) else empty
    return SimpleNamespace(
        shape=total.shape,
        dtype=total.dtype,
        numel=total.numel,
        device_mesh=mesh,
        placements=(Replicate(), Shard(dim)),
        to_local=lambda: local,
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shard", [0, 1, 2])
@pytest.mark.parametrize("shapes", [[(6, 5)], [(7, 5)], [(6, 4), (2, 6), (9, 3), (1, 1)], [(3, 3), (4, 7)]])
def test_each_process_gets_its_shards(shapes, shard, dim):
    """Also where they are uneven, empty, or not of rows."""
    mesh, totals = Mesh(1, shard), [torch.randn(shape) for shape in shapes]
    every = [parameter(total, dim, mesh) for total in totals]
    bucket = ShardedBucket(every)
    assert (bucket.shards, bucket.replicas) == ("shards", ["replicas"])
    rows = bucket.packed(totals)
    assert rows.shape[0] == 3 and rows.isfinite().all()
    found = list(bucket.unpacked(rows[shard]))
    assert [one for one, _ in found] == every
    for one, part in found:
        assert torch.equal(part, one.to_local())


def test_a_large_parameter_is_not_copied():
    """Its sum is itself the tensor that is reduced."""
    mesh, total = Mesh(0, 0), torch.randn(6, 5)
    assert ShardedBucket([parameter(total, 0, mesh)]).packed([total]).data_ptr() == total.data_ptr()


def test_each_entry_of_a_shard_is_completed_by_one_of_its_replicas(monkeypatch):
    """And the results are added up over the replicas."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda part, group: groups.append(group))
    groups: list[str] = []
    results = []
    for replica in range(2):
        mesh, totals = Mesh(replica, 1), [torch.ones(7, 3), torch.ones(6, 2)]
        bucket = ShardedBucket([parameter(total, 0, mesh) for total in totals])
        part = bucket.packed(totals)[1].clone()
        bucket.complete_(part, lambda _, own: own.add_(1))
        results.append(torch.cat([shard.flatten() for _, shard in bucket.unpacked(part)]))
    assert groups == ["replicas"] * 2
    assert sorted(torch.stack(results).unique(dim=0).flatten().unique().tolist()) == [0, 2]
    assert torch.equal(results[0] + results[1], torch.full_like(results[0], 2))
