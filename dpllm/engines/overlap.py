"""Sums of large tensors over processes, in buckets: while one bucket is on its way, the next one's sums are formed.

Place in the flow: below the engines that reduce the clipped sums themselves (DDP, FSDP2). A bucket has several small
parameters or one large one. Its work is a generator: each of its steps starts a collective and yields, the next one
waits for it. `in_turns` interleaves them, so that a bounded number of buckets is under way at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from dpllm.engines.processes import connected

_ALIGNMENT = 8  # entries; a parameter in a bucket begins where vectorised kernels can read it
_BUCKET_BYTES = 16 * 2**20  # large enough to use a link's bandwidth; a parameter of this size is reduced uncopied

# PyTorch 2.13 renames both, and warns of the names before.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Work = Iterator[None]
"""The work on one bucket; it yields after it has started a collective."""


def overlapped(start: Callable[[], Any]) -> Work:
    """Start a collective, yield while it runs, and wait for it: a part of a bucket's work.

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
    """Run each work to its end; each one that begins lets those before it take one step.

    So a work with k collectives has at most k younger ones under way, and all processes start collectives in the same
    order.

    Args:
        works: made one after another; each yields at least once.

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
    """Let each work take a step; return those that have not ended."""
    return [work for work in works if next(work, work) is None]


def buckets(
    parameters: Iterable[nn.Parameter],
    kind_of: Callable[[Any], Hashable],
    bytes_of: Callable[[Any], int],
) -> list[list[nn.Parameter]]:
    """Group parameters of one kind; each group fits in a bucket or has one parameter.

    Args:
        parameters: in the same order on every process.
        kind_of: what the parameters of a group have in common.
        bytes_of: size of a parameter's sum.
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
    """Return the number of entries that a parameter takes in a bucket with others."""
    return -(-entries // _ALIGNMENT) * _ALIGNMENT
