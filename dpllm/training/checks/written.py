"""Detection of writes to tensors past PyTorch's version counters: through ``.data``, or another view of the memory.

Place in the flow: under `dpllm.training.checks.watch`. Sums over the bits of the trained weights are queued on their
device right after an update and right before the next one, and compared there. A difference sets a flag on the device
permanently. The flag is read when the host waits for the device anyway, and before each save. A step therefore costs
one pass over the weights before and one after the update, and no wait.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from dpllm.engines.checksums import pieces

_BLOCK = {"cpu": 1 << 16}  # words added up at a time, few enough for a core's cache
_LARGE_BLOCK = 1 << 22  # elsewhere, where launches cost
_WIDTH = 1024  # words that share a row of a block; each row and each column has its own multiplier
_SEED = 0x7772697474656E  # of the multipliers
_NEXT = 0x5851F42D4C957F2D  # an odd number: a block's position in the sequence counts
_WORD = 8  # bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Written:
    """Comparison of the bits of tensors at two moments, without waiting for their device.

    A write is missed only if it leaves all sums unchanged; for a write that does not aim at this, the probability is
    about 2^-32.

    >>> weight, watched = torch.zeros(9), Written()
    >>> watched.take([weight])
    >>> watched.compare([weight]); watched.found()
    False
    >>> weight.data[4] = 1e-30
    >>> watched.compare([weight]); watched.found()
    True
    """

    def __init__(self) -> None:
        """Begin without sums."""
        self._sums: dict[torch.device, Tensor] = {}
        self._differ: dict[torch.device, Tensor] = {}

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Queue the sums that `compare` uses."""
        with torch.no_grad():
            self._sums = _sums(tensors)

    def compare(self, tensors: Iterable[Tensor]) -> None:
        """Queue a comparison with the last `take`; do nothing before the first one."""
        if not self._sums:
            return
        with torch.no_grad():
            now = _sums(tensors)
            for device in self._sums.keys() | now.keys():
                before, after = self._sums.get(device), now.get(device)
                present = before if before is not None else after
                assert present is not None
                differs = torch.ones_like(present) if before is None or after is None else before != after
                self._differ[device] = differs.bool() | self._differ.get(device, torch.zeros_like(differs)).bool()

    def differ(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether tensors differ now from the last `take`; `found` ignores this; waits for the devices."""
        with torch.no_grad():
            now = _sums(tensors)
        both = self._sums.keys() & now.keys()
        return self._sums.keys() != now.keys() or any(bool(self._sums[device] != now[device]) for device in both)

    def found(self) -> bool:
        """Return whether any comparison so far found a difference; waits for the devices."""
        return any(bool(flag) for flag in self._differ.values())

    @property
    def at_hand(self) -> bool:
        """Return whether `found` needs no wait, since all tensors are on the CPU."""
        return all(device.type == "cpu" for device in self._differ)


def _sums(tensors: Iterable[Tensor]) -> dict[torch.device, Tensor]:
    """Return a scalar of 64 bits per device, modulo 2^64."""
    totals: dict[torch.device, Tensor] = {}
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def add(part: Tensor) -> None:
        before = totals.get(part.device)
        totals[part.device] = part if before is None else before * _NEXT + part

    for tensor in tensors:
        for piece in pieces(tensor):
            words = _words(piece)
            if words.dtype == torch.int64 and len(words) >= _WIDTH:
                whole = len(words) // _WIDTH * _WIDTH
                for block in words[:whole].split(_size(words.device)):
                    add(_of_rows(block.view(-1, _WIDTH)))
                words = words[whole:]
            if len(words):
                small.setdefault((words.device, words.dtype), []).append(words)
    for gathered in small.values():
        for block in torch.cat(gathered).split(_size(gathered[0].device)):
            padded = torch.nn.functional.pad(block, (0, -len(block) % _WIDTH)).to(torch.int64)
            places = torch.arange(1, len(padded) // _WIDTH + 1, device=block.device).unsqueeze(1) * 2 + 1
            add(_of_rows(padded.view(-1, _WIDTH) * places))
    return totals


def _of_rows(words: Tensor) -> Tensor:
    """Return a scalar of (R, _WIDTH) words: by columns, and by rows, since exchanged rows keep every column's sum.

    Upper halves are added once more separately, since two flipped highest bits cancel.
    """
    upper, multipliers = words >> 32, _multipliers(words.device)
    columns, rows = (words.sum(dim) + upper.sum(dim) * 5 for dim in (0, 1))
    return (columns * multipliers[:_WIDTH]).sum() + (rows * multipliers[: len(rows)]).sum() * 3


def _size(device: torch.device) -> int:
    return _BLOCK.get(device.type, _LARGE_BLOCK)


def _words(piece: Tensor) -> Tensor:
    """Return a flat view of integers, of 64 bits if length and alignment allow it."""
    flat = piece.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(-1)
    words = flat.view(torch.uint8) if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.element_size()])
    width = words.element_size()
    aligned = len(words) * width % _WORD == 0 and words.storage_offset() * width % _WORD == 0
    return words.view(torch.int64) if aligned else words


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    """Return one odd number of 64 bits for each row or column of a block, always the same."""
    generator = torch.Generator().manual_seed(_SEED)
    return (torch.randint(-(2**62), 2**62, (_LARGE_BLOCK // _WIDTH,), generator=generator) * 2 + 1).to(device)
