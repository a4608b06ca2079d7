"""Sum parameters over processes in buckets: while one bucket is reduced, the sums of the next one are formed.

Used by the engines that reduce clipped sums themselves (DDP, FSDP2, ZeRO-3). A bucket holds several small parameters or
one large one. Its reduction is a generator: each of its steps starts a collective and yields, and the next step waits
for it. `in_turns` interleaves the reductions, so that a bounded number of buckets is in progress at any time.

FSDP2 shards the parameters of a bucket in the same way (`ShardedBucket`): their full sums form one tensor with a row
for each shard, and one reduce-scatter over the rows gives each process its shards of all of them. A parameter that
FSDP2 cannot divide equally has padding in some rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dpllm.engines.processes import connected
from dpllm.engines.single import ToTotal
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.mechanism.noise import slice_of

_ALIGNMENT = 8  # entries; a parameter in a bucket begins where vectorised kernels can read it
_BUCKET_BYTES = 16 * 2**20  # large enough to use a link's bandwidth; a parameter of this size is reduced uncopied

# PyTorch 2.13 renames both, and warns about the old names.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Work = Iterator[None]
"""The reduction of one bucket; it yields after it has started a collective."""


def overlapped(start: Callable[[], Any]) -> Work:
    """Start a collective, yield while it runs, and wait for it: one part of a bucket's reduction.

    Args:
        start: starts it, and returns the object to wait for.

    Raises:
        OtherProcessError: another process ended or cannot be reached.
    """
    with connected():
        running = start()
    yield
    with connected():
        running.wait()


def in_turns(works: Iterable[Work]) -> None:
    """Run the reductions to completion, interleaved: starting one advances the pending ones by one step.

    So a reduction with k collectives has at most k younger ones in progress, and all processes start collectives in the
    same order.

    Args:
        works: created one after another; each yields at least once.

    >>> def work(name):
    ...     print(name, "reduces")
    ...     yield
    ...     print(name, "is reduced")
    >>> in_turns(map(work, "ab"))
    a reduces
    b reduces
    a is reduced
    b is reduced
    """
    under_way: list[Work] = []
    for work in works:
        next(work)
        under_way = [*_further(under_way), work]
    while under_way:
        under_way = _further(under_way)


def _further(works: Iterable[Work]) -> list[Work]:
    """Advance each reduction by one step; return those that have not ended."""
    return [work for work in works if next(work, work) is None]


def buckets(
    parameters: Iterable[nn.Parameter],
    kind_of: Callable[[Any], Hashable],
    bytes_of: Callable[[Any], int],
) -> list[list[nn.Parameter]]:
    """Group parameters of one kind; each group fits in a bucket or has one parameter.

    Args:
        parameters: in the same order on every process.
        kind_of: returns what the parameters of a group have in common.
        bytes_of: returns the size of a parameter's sum.
    """
    found: dict[Hashable, list[list[nn.Parameter]]] = {}
    filled: dict[Hashable, int] = {}
    for parameter in parameters:
        kind, size = kind_of(parameter), bytes_of(parameter)
        groups = found.setdefault(kind, [])
        if not groups or filled[kind] + size > _BUCKET_BYTES:
            groups.append([])
            filled[kind] = 0
        groups[-1].append(parameter)
        filled[kind] += size
    return [group for groups in found.values() for group in groups]


def aligned(entries: int) -> int:
    """Return the number of entries that a parameter takes in a shared bucket."""
    return -(-entries // _ALIGNMENT) * _ALIGNMENT


class ShardedBucket:
    """The layout of one bucket.

    Args:
        parameters: DTensors on one mesh, of one dtype, with the same placements, one of which is sharded.

    Attributes:
        parameters: as given.
        shards: the group of processes that hold different shards.
        replicas: the groups of processes that hold the same shards, one for each dimension of the mesh.
        dtype: the parameters' dtype.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        """Lay out the bucket."""
        self.parameters, self.dtype = parameters, parameters[0].dtype
        mesh, placements = parameters[0].device_mesh, parameters[0].placements
        (split,) = (dim for dim, placement in enumerate(placements) if placement.is_shard())
        others = [dim for dim in range(mesh.ndim) if dim != split]
        self._dim, self._num_shards = placements[split].dim, mesh.size(split)
        self.shards, self.replicas = mesh.get_group(split), [mesh.get_group(dim) for dim in others]
        self._copy, self._num_copies = 0, 1  # position of this process among those with the same shards
        for dim in others:
            self._copy = self._copy * mesh.size(dim) + mesh.get_local_rank(dim)
            self._num_copies *= mesh.size(dim)
        alone = len(parameters) == 1
        self._starts = [0]
        for parameter in parameters:
            size = self._padded(parameter)
            self._starts.append(self._starts[-1] + (size if alone else aligned(size)))

    def _padded(self, parameter: Any) -> int:
        """Return the entries of a parameter's largest shard; FSDP2 divides a dimension as ``torch.chunk`` does."""
        length = parameter.shape[self._dim]
        return -(-length // self._num_shards) * (parameter.numel() // max(length, 1))

    def packed(self, totals: Sequence[Tensor]) -> Tensor:
        """Return the full sums as a tensor of (number of shards, entries); a single one without a copy, if possible.

        Args:
            totals: the parameters' sums, contiguous.
        """
        rows, first = self._num_shards, totals[0]
        if len(totals) == 1 and self._is_even(first):
            return first.view(rows, -1)
        flat = first.new_zeros(rows, self._starts[-1])
        for total, start in zip(totals, self._starts, strict=False):
            if self._is_even(total):
                width = total.numel() // rows
                flat[:, start : start + width] = total.view(rows, width)
                continue
            for row, chunk in enumerate(total.chunk(rows, self._dim)):
                flat[row, start : start + chunk.numel()] = chunk.reshape(-1)
        return flat

    def _is_even(self, total: Tensor) -> bool:
        """Return whether the shards are equal numbers of rows."""
        return self._dim == 0 and total.shape[0] % self._num_shards == 0

    def unpacked(self, part: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield each parameter and this process's shard of its sum, a view of the reduced bucket."""
        for parameter, start in zip(self.parameters, self._starts, strict=False):
            shape = parameter.to_local().shape
            yield parameter, part[start : start + math.prod(shape)].view(shape)

    def complete_(self, part: Tensor, to_total: ToTotal) -> None:
        """Change the complete sums in place, each entry by one of the processes that hold it."""
        for parameter, shard in self.unpacked(part):
            keep_slice_(shard, self._copy, self._num_copies, lambda own, p=parameter: to_total(p, own))  # type: ignore[misc]
        for group in self.replicas:
            with connected():
                dist.all_reduce(part, group=group)


def sharded_buckets(parameters: Iterable[nn.Parameter]) -> list[ShardedBucket]:
    """Return the buckets of a model's trained parameters, the same on every process."""
    groups = buckets(
        parameters,
        kind_of=lambda parameter: (parameter.device_mesh, parameter.placements, parameter.dtype),
        bytes_of=lambda parameter: parameter.numel() * accumulation_dtype(parameter.dtype).itemsize,
    )
    return [ShardedBucket(group) for group in groups]


def keep_slice_(total: Tensor, rank: int, size: int, change: Callable[[Tensor], None]) -> None:
    """Change one process's slice of a total in place, and set the other slices to zero.

    The sum of all processes' results then has every entry as its process changed it, exactly: adding zeros causes no
    rounding.

    Args:
        total: contiguous.
        rank: this process.
        size: the number of processes that hold the total.
        change: called with the slice (`dpllm.mechanism.noise.slice_of`).
    """
    own = slice_of(total, rank, size)
    change(own)
    if size > 1:
        changed = own.clone()
        total.zero_()
        own.copy_(changed)
