"""Checksums of tensors' bits, to test whether two processes, or two points in time, have the same weights.

`dpllm.engines.replicas` compares processes with them, `dpllm.training.checks.watch` compares
steps. The bits of all entries, as integers of at most 32 bits, are multiplied by fixed random odd integers of
64 bits and added up modulo 2^64. A difference in one integer is always detected; other differences are missed with
a probability of at most 2^-32, and no tolerance is needed. Integers of 64 bits would not work: half of all multiples of
a flipped highest bit, which is the sign of a float64, are 0 modulo 2^64.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_BLOCK = {"cpu": 1 << 15}  # integers multiplied at a time, so that a core's cache holds the products
_LARGE_BLOCK = 1 << 22  # other devices, where launches cost: 32 MiB of products, and as much for the random integers
_STEP = 0x5851F42D4C957F2D  # an odd number, so that the order of the blocks counts
_MODULUS = 2**64
_MIXED = (-7046029254386353131, -4658895280553007687)  # odd, of the SplitMix64 generator (Steele et al. 2014)
_WORD = 4  # bytes
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class Checksum:
    """The checksum of tensors at this time, computed on their devices; only reading it waits for them.

    Args:
        tensors: replicas that this process holds; for a sharded tensor, its own shard.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        """Queue the computation on each device."""
        self._sums: dict[torch.device, Tensor] = {}
        self._count = 0
        pending: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        lengths: Counter[tuple[torch.device, torch.dtype]] = Counter()  # of the pending blocks
        for block in _blocks(tensors):
            kind = block.device, block.dtype
            waiting = pending.setdefault(kind, [])
            if lengths[kind] + len(block) > _size(block.device):
                self._take(waiting)
                waiting.clear()
                lengths[kind] = 0
            waiting.append(block)
            lengths[kind] += len(block)
        for waiting in pending.values():
            self._take(waiting)

    def _take(self, blocks: list[Tensor]) -> None:
        if not blocks:
            return
        bits = (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).to(torch.int64, copy=True)
        self._count += len(bits)
        added = bits.mul_(_odd_integers(bits.device)[: len(bits)]).sum()
        before = self._sums.get(bits.device)
        self._sums[bits.device] = added if before is None else before * _STEP + added

    def value(self) -> int:
        """Return the checksum, 0 <= value < 2^64; waits for the devices."""
        return values([self])[0]


def values(checksums: Sequence[Checksum]) -> list[int]:
    """Return the value of each checksum; reads every device once.

    >>> first, second, third = torch.zeros(9), torch.zeros(9), torch.zeros(9).index_fill_(0, torch.tensor(4), 1e-30)
    >>> one, same, other = values([Checksum([tensor]) for tensor in (first, second, third)])
    >>> one == same, one == other
    (True, False)
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for checksum in checksums:
        for device, total in checksum._sums.items():
            by_device.setdefault(device, []).append(total)
    read = {device: iter(torch.stack(totals).tolist()) for device, totals in by_device.items()}
    found = []
    for checksum in checksums:
        value = checksum._count
        for device in checksum._sums:
            value = (value * _STEP + next(read[device])) % _MODULUS
        found.append(value)
    return found


def pieces(tensor: Any) -> Iterator[Tensor]:
    """Yield this process's plain tensors that hold a tensor's values.

    Args:
        tensor: may be sharded, quantized, not loaded, or None.
    """
    if tensor is None or tensor.is_meta:
        return
    shard = getattr(tensor, "ds_tensor", None)  # ZeRO-3 gathers the parameter from it, and empties it again
    if shard is not None:
        if shard.numel() and not shard.is_meta:
            yield shard
    elif isinstance(tensor, DTensor):
        yield from pieces(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):  # consists of several tensors
        for name in tensor.__tensor_flatten__()[0]:
            yield from pieces(getattr(tensor, name))
    else:
        yield tensor


def placed_sum(values: Tensor, start: int) -> int:
    """Return a checksum of some entries of a flattened tensor, each with a multiplier for its position.

    The checksums of the fragments of a tensor add up, modulo 2^64, to the checksum of the whole. So the number of
    processes that hold it may change. A difference in a single entry is always found.

    Args:
        values: (n,) float32 or float64.
        start: position of the first value in the flattened tensor.

    >>> whole = torch.randn(9)
    >>> (placed_sum(whole[:4], 0) + placed_sum(whole[4:], 4)) % 2**64 == placed_sum(whole, 0)
    True
    """
    words = values.detach().contiguous().view(torch.int32)
    per_entry = len(words) // max(len(values), 1)
    total, at = torch.zeros((), dtype=torch.int64, device=words.device), start * per_entry
    for block in words.split(_size(words.device)):
        places = torch.arange(at, at + len(block), dtype=torch.int64, device=words.device)
        for multiplier in _MIXED:
            places = places * multiplier
            places = places ^ (places >> 29)
        total, at = total + (block.to(torch.int64) * (places | 1)).sum(), at + len(block)
    return int(total) % _MODULUS


def _blocks(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """Yield this process's entries as flat integers, in blocks."""
    for tensor in tensors:
        for piece in pieces(tensor):
            piece = piece.detach()
            flat = (torch.view_as_real(piece) if piece.is_complex() else piece).flatten()
            integers = flat.view(_AS_INTEGER[flat.element_size()])
            width = integers.element_size()
            if width < _WORD and len(integers) * width % _WORD == 0:  # as words: fewer to multiply
                if integers.storage_offset() * width % _WORD:
                    integers = integers.clone()
                integers = integers.view(torch.int32)
            yield from integers.split(_size(integers.device))


def _size(device: torch.device) -> int:
    return _BLOCK.get(device.type, _LARGE_BLOCK)


@functools.cache
def _odd_integers(device: torch.device) -> Tensor:
    """Return (block,) int64: random, odd, public, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (_size(device),), generator=generator, dtype=torch.int64)
    return (numbers * 2 + 1).to(device)
