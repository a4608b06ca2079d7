"""The tile sizes of the Triton programs, by the compute capability of the GPU.

The tables are fixed, and nothing is chosen by timing at run time, so that bits are reproducible.

They were chosen from compiled code only, by ``benchmarks/registers.py``: no program spills registers, and its shared
memory fits. No tile was chosen by time on any GPU yet.

Each program has few tiles, because each takes seconds to compile: a small one for short rows and narrow sides, a large
one for all others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """The square tile of a program that multiplies matrices.

    Attributes:
        block: rows and columns of the result.
        depth: terms of the inner product that are read at a time.
        num_warps: of a program, 32 threads each.
        num_stages: reads under way at a time.
    """

    block: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles on one generation of GPUs.

    Attributes:
        large_gram: for Gram matrices of more than 64 tokens.
        large_instance: for gradients of which both sides have more than 64 features.
    """

    large_gram: Tile
    large_instance: Tile

    small = Tile(64, 64, 4, 3)
    exact = Tile(64, 16, 4, 3)  # float32 outside of tensor cores
    scattered = Tile(64, 32, 8, 3)  # tensors that are read entry by entry

    def gram(self, tokens: int, exact: bool, aligned: bool) -> Tile:
        """Return the tile for the Gram matrices of rows with this many tokens.

        Args:
            tokens: of a row.
            exact: whether an input is float32.
            aligned: whether tensors can be read 16 bytes at a time.
        """
        return self.exact if exact else self.scattered if not aligned else self._by_size(tokens, self.large_gram)

    def instance(self, side: int, exact: bool, aligned: bool) -> Tile:
        """Return the tile for a gradient whose smaller side has this many features; the rest as in `gram`."""
        return self.exact if exact else self.scattered if not aligned else self._by_size(side, self.large_instance)

    def _by_size(self, size: int, large: Tile) -> Tile:
        return self.small if size <= 64 else large


# By the major number of the compute capability: 8 is Ampere and Ada, 9 Hopper, 10 and 12 Blackwell. At a depth of 64,
# the large Gram tile would spill on 8 and 12; these also have at most 99 KB of shared memory in some models.
_BY_MAJOR = {
    8: Tiles(Tile(128, 32, 8, 4), Tile(128, 32, 8, 4)),
    9: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    10: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    12: Tiles(Tile(128, 32, 8, 4), Tile(128, 32, 8, 4)),
}


@functools.cache
def tiles_of(device: torch.device) -> Tiles:
    """Return the tiles for a device."""
    return tiles_for(torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8)


def tiles_for(major: int) -> Tiles:
    """Return the tiles for a compute capability; for one that is not in the table, those that need least."""
    return _BY_MAJOR.get(major, _BY_MAJOR[8])
