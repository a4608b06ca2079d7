"""The normal numbers of `dpllm.mechanism.chacha20`, computed on a tensor's device, such as a GPU, without CPU copies.

This is the level "chacha20" of `privacy.randomness` on a GPU.

Words and numbers are those of `chacha20`, in the same order: the words bit by bit, the numbers up to the rounding of a
logarithm, a sine and a cosine in float64. The operations are PyTorch's, so this runs wherever PyTorch has 32-bit
integers and float64. A key is used on a device only after that device has reproduced the words of the standard
(RFC 8439, section 2.3.2).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpllm.mechanism.chacha20 import MAX_BLOCKS, NORMALS_OF_A_BLOCK, keystream, require_blocks

_BLOCKS_AT_A_TIME = 1 << 19  # 32 MiB of words, which a large GPU's cache holds
_TESTED = bytes(range(32)), bytes.fromhex("000000090000004a00000000"), 1  # key, nonce, counter of RFC 8439, 2.3.2


class DeviceNormals:
    """Draws standard normal numbers from one key, on a device.

    Args:
        key: 32 secret bytes that no other object uses.
        device: a device with 32-bit integers and float64.

    Raises:
        RuntimeError: the device computes words that differ from the standard's.

    >>> drawn = DeviceNormals(bytes(32), torch.device("cpu")).standard_normal(5)
    >>> drawn.shape, drawn.dtype
    (torch.Size([5]), torch.float32)
    """

    def __init__(self, key: bytes, device: torch.device) -> None:
        """Begin with block 0."""
        require_known_words(device)
        self._key, self._device, self._block = key, device, 0

    def standard_normal(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return (size,) independent N(0, 1), independent of all numbers returned before.

        Args:
            size: the number of values.
            dtype: float32 or float64.

        Raises:
            ValueError: the 2^32 blocks of the key are used up.
        """
        drawn = torch.empty(-(-size // NORMALS_OF_A_BLOCK), NORMALS_OF_A_BLOCK, dtype=dtype, device=self._device)
        for part in drawn.split(_BLOCKS_AT_A_TIME):
            box_muller(device_keystream(self._key, bytes(12), self._block, len(part), self._device), part)
            self._block += len(part)
        return drawn.view(-1)[:size]


def box_muller(words: Tensor, out: Tensor) -> None:
    """Write the normal numbers computed from blocks of the key stream, as `dpllm.mechanism.chacha20.box_muller`.

    Args:
        words: (16, n) words, int32 with the bits of unsigned ones.
        out: (n, 8), float32 or float64.
    """
    low, high = (words[first::2].double() for first in (0, 1))  # (8, n)
    for half in (low, high):
        half.add_((half < 0).double(), alpha=2.0**32)
    bits = high.mul_(2.0**32).add_(low)  # the nearest float64 to a number of 64 bits: one rounding
    radius = bits[:4].add_(0.5).mul_(2.0**-64).log_().mul_(-2).sqrt_()
    angle = bits[4:].mul_(2 * math.pi * 2.0**-64)
    out[:, :4] = (radius * angle.cos()).T
    out[:, 4:] = (radius * angle.sin()).T


def device_keystream(key: bytes, nonce: bytes, counter: int, num_blocks: int, device: torch.device) -> Tensor:
    """Return (16, num_blocks) words of the key stream, int32 with the bits of unsigned ones.

    Args:
        key: 32 bytes.
        nonce: 12 bytes.
        counter: number of the first block.
        num_blocks: n.
        device: where to compute.

    Raises:
        ValueError: key or nonce has a wrong length, or the counter would wrap around.
    """
    require_blocks(key, nonce, counter, num_blocks)
    words = np.frombuffer(b"expand 32-byte k" + key + bytes(4) + nonce, dtype="<i4").astype(np.int64)
    # `words` are small enough to reach the device as launch arguments, so no copy waits for the device.
    start = torch.stack([torch.full((num_blocks,), int(word), dtype=torch.int32, device=device) for word in words])
    numbers = torch.arange(counter, counter + num_blocks, device=device)
    start[12] = torch.where(numbers < MAX_BLOCKS // 2, numbers, numbers - MAX_BLOCKS).to(torch.int32)
    rows = list(start.clone().view(4, 4, num_blocks))
    for _ in range(10):
        _quarter_rounds(rows)
        _shift(rows, 1)
        _quarter_rounds(rows)
        _shift(rows, -1)
    return torch.cat(rows).add_(start)


def _quarter_rounds(rows: list[Tensor]) -> None:
    """Do four quarter rounds (RFC 8439, section 2.1) over the columns of four rows of (4, n), in place."""
    a, b, c, d = rows
    for to, by, turned, places in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        to.add_(by)
        turned.bitwise_xor_(to)
        lower = (turned >> (32 - places)).bitwise_and_((1 << places) - 1)  # >> repeats the sign
        turned.bitwise_left_shift_(places).bitwise_or_(lower)


def _shift(rows: list[Tensor], direction: int) -> None:
    """Rotate row i by i columns, so that the diagonals become columns, or back."""
    for number in (1, 2, 3):
        rows[number] = rows[number].roll(-number * direction, 0)


@cache
def require_known_words(device: torch.device) -> None:
    """Compare a device's words with the known ones, and with the CPU's at the end of the counters.

    Raises:
        RuntimeError: they differ.
    """
    key, nonce, counter = _TESTED
    for first, count in ((counter, 1), (MAX_BLOCKS // 2 - 2, 4), (MAX_BLOCKS - 3, 3)):
        found = device_keystream(key, nonce, first, count, device).T.cpu().contiguous().numpy().view(np.uint32)
        if not np.array_equal(found, keystream(key, nonce, first, count)):
            raise RuntimeError(
                f"{device} computes words of ChaCha20 that differ from RFC 8439, in block {first} of its key. Noise "
                "from it could be predictable. Please report the device and the PyTorch version, and set "
                "privacy.randomness=os"
            )
