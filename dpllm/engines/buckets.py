"""Sum parameters over processes in buckets: while one bucket is reduced, the sums of the next one are formed.

Used by the engines that reduce clipped sums themselves (DDP, FSDP2, ZeRO-3). A bucket holds several small parameters or
one large one. Its reduction is a generator: each of its steps starts a collective and yields, and the next step waits
for it. `in_turns` interleaves the reductions, so that a bounded number of buckets is in progress at any time.

FSDP2 shards the parameters of a bucket in the same way (`ShardedBucket`): their full sums form one tensor with a row
for each shard, and one reduce-scatter over the rows gives each process its shards of all of them. A parameter that
FSDP2 cannot divide equally has padding in some rows.

Engines that partition gradients (FSDP2, ZeRO-2, ZeRO-3) can reduce the sums of each microbatch and keep only their
parts, or accumulate whole sums (`LocalSums`) and reduce them once per step, with the last microbatch. Whole sums take
4 bytes per trained entry, and divide the traffic of sums by the number of microbatches. Training without privacy has
the same choice (``no_sync``). Two rules, the same on every process, decide once per run:

* sums that take at most half the memory of a process's weights (LoRA) are always accumulated;
* other sums are accumulated if every process has enough memory left. The memory is measured when the first microbatch
  of a step has passed through the model, so that its peak counts as used: PyTorch keeps it reserved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.engines.base import ToTotal
from dpllm.engines.processes import Processes, connected
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.sums import Sum
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


# ------------------------------------------------------------------------- whole sums over a step's microbatches


_SHARE = 0.5  # of the memory of a process's weights
_MARGIN = 0.1  # of a device's memory, which stays free for longer rows, fragmentation and evaluations
_LATER = 3 * 4  # bytes per trained entry that a process holds: moments and gradient of the first update


class LocalSums:
    """The sums of whole parameters between a step's microbatches.

    Args:
        model: as its engine has divided it.
        processes: the run's processes.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        """Start without sums."""
        self._model, self._processes = model, processes
        self._fits: bool | None = None
        self._sums: dict[nn.Parameter, Sum] = {}

    def fit(self) -> bool:
        """Return whether sums are kept, the same on every process; the first call is a collective of all of them."""
        if self._fits is None:
            self._fits = sums_are_small(self._model) or sums_fit(self._model, self._processes)
        return self._fits

    def begun(self, parameter: nn.Parameter) -> Sum:
        """Return and release the sum that was kept for a parameter, or begin one of its whole shape."""
        kept = self._sums.pop(parameter, None)
        shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the shape there
        return Sum(shape, accumulation_dtype(parameter.dtype), _device_of(parameter)) if kept is None else kept

    def keep(self, parameter: nn.Parameter, total: Sum) -> None:
        """Keep a parameter's sum until the next microbatch."""
        self._sums[parameter] = total


def sums_are_small(model: nn.Module) -> bool:
    """Return whether sums of all trained parameters take at most half the memory of this process's weights.

    Args:
        model: as its engine has divided it.
    """
    return _bytes_of_sums(model) <= _SHARE * sum(map(_held, model.parameters()))


def sums_fit(model: nn.Module, processes: Processes) -> bool:
    """Return whether every process has enough memory for sums of all trained parameters; a collective of all processes.

    Args:
        model: as its engine has divided it.
        processes: the run's processes.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memory = free_memory(_device_of(trained[0]), processes)
    spare = -1.0
    if memory is not None:
        free, total = memory
        updates = sum(_LATER * _held(parameter) / parameter.element_size() for parameter in trained)
        spare = free - _MARGIN * total - _bytes_of_sums(model) - updates
    return min(one for (one,) in processes.gather_numbers([spare])) >= 0


def free_memory(device: torch.device, processes: Processes) -> tuple[float, float] | None:
    """Return a device's free and total bytes; on a CPU, this process's share of the machine's; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type != "cpu":
        return None
    memory, sharing = psutil.virtual_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", processes.size))
    return memory.available / sharing, memory.total / sharing


def _device_of(parameter: Any) -> torch.device:
    """Return the device on which a parameter's sum is formed, since FSDP2 may offload its shard to the CPU."""
    mesh = getattr(parameter, "device_mesh", None)
    return parameter.device if mesh is None else torch.device(mesh.device_type)


def _bytes_of_sums(model: nn.Module) -> int:
    return sum(
        getattr(p, "ds_numel", p.numel()) * accumulation_dtype(p.dtype).itemsize
        for p in model.parameters()
        if p.requires_grad
    )


def _held(parameter: Any) -> int:
    """Return a parameter's bytes in each process, the same number on all of them."""
    shard = getattr(parameter, "ds_tensor", None)  # of ZeRO-3, padded to equal sizes
    if shard is not None:
        return shard.numel() * shard.element_size()
    size = parameter.numel() * parameter.element_size()
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            size //= parameter.device_mesh.size(dim) if placement.is_shard() else 1
    return size
