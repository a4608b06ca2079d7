"""Normal numbers from ChaCha20, a stream cipher: to tell them from random ones, the cipher would have to be broken.

Place in the flow: below the generators of noise; the level "chacha20" of `privacy.randomness`.

The cipher is that of RFC 8439. The package `cryptography` computes it if it is installed; otherwise NumPy computes the
same words, several times more slowly. Neither uses secret numbers as an index, so their time does not depend on them.

**From bits to normal numbers.** Box and Muller (1958), in float64, two numbers from 128 bits:

    u = (j + 1/2) / 2^64    j: 64 bits    r = sqrt(-2 ln u)
    a = 2π k / 2^64         k: 64 bits    r cos a, r sin a

u is at least 2^-65, so each number is finite and at most 9.50 in size; an exact normal number is larger with
probability 2e-21. u and a are rounded to the 53 bits of float64, relative to their size, so the steps between
neighbouring numbers are as fine in the tail as elsewhere. In float32 the result is rounded once more, to 24 bits.

**Limit.** As with every generator of floating-point numbers, the result is a rounded Gaussian (Mironov 2012). This
level removes the doubt about the source of the bits, not the one about rounding.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

NORMALS_OF_A_BLOCK = 8
"""Normal numbers from the 64 bytes of one block of ChaCha20."""

_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4")
_BLOCKS_AT_A_TIME = 4096  # 256 KiB, which stay in a processor's cache from the cipher to the logarithm
MAX_BLOCKS = 2**32
"""Blocks of one key: the counter has 32 bits."""


class ChaCha20Normals:
    """Draws standard normal numbers from one key; a second key is needed for numbers that are independent of these.

    Args:
        key: 32 secret bytes, which no other object has.

    >>> drawn = ChaCha20Normals(bytes(32)).standard_normal(5)
    >>> drawn.shape, drawn.dtype
    ((5,), dtype('float32'))
    """

    def __init__(self, key: bytes) -> None:
        """Begin with block 0."""
        self._key, self._block = key, 0

    def standard_normal(self, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        """Return (size,) independent N(0, 1), independent of all that were returned before.

        Args:
            size: how many.
            dtype: float32 or float64.

        Raises:
            ValueError: the 2^32 blocks of the key are used up: after 34 thousand million numbers.
        """
        drawn = np.empty(-(-size // NORMALS_OF_A_BLOCK) * NORMALS_OF_A_BLOCK, dtype)
        for first in range(0, len(drawn), _BLOCKS_AT_A_TIME * NORMALS_OF_A_BLOCK):
            part = drawn[first : first + _BLOCKS_AT_A_TIME * NORMALS_OF_A_BLOCK].reshape(-1, NORMALS_OF_A_BLOCK)
            box_muller(keystream(self._key, bytes(12), self._block, len(part)), part)
            self._block += len(part)
        return drawn[:size]


def box_muller(words: NDArray[np.uint32], out: NDArray[Any]) -> None:
    """Write the normal numbers of blocks of the key stream.

    Args:
        words: (n, 16) uniform 32-bit words, of a little-endian machine.
        out: (n, 8), float32 or float64.
    """
    bits = words.view(np.uint64)
    radius = bits[:, :4].astype(np.float64)
    radius += 0.5
    radius *= 2.0**-64
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    angle = bits[:, 4:].astype(np.float64)
    angle *= 2 * math.pi * 2.0**-64
    np.multiply(radius, np.cos(angle), out=out[:, :4], casting="same_kind")
    np.multiply(radius, np.sin(angle), out=out[:, 4:], casting="same_kind")


def keystream(key: bytes, nonce: bytes, counter: int, num_blocks: int) -> NDArray[np.uint32]:
    """Return (num_blocks, 16) words of the key stream of ChaCha20 (RFC 8439, section 2.4).

    Args:
        key: 32 bytes.
        nonce: 12 bytes.
        counter: number of the first block.
        num_blocks: n.

    Raises:
        ValueError: key or nonce have another length, or the counter would begin again.
    """
    require_blocks(key, nonce, counter, num_blocks)
    library = _cryptography()
    if library is None:
        return keystream_by_numpy(key, nonce, counter, num_blocks)
    first = (counter % MAX_BLOCKS).to_bytes(4, "little")  # of no block: any
    cipher = library.Cipher(library.algorithms.ChaCha20(key, first + nonce), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(64 * num_blocks)), dtype="<u4").reshape(num_blocks, 16)


def require_blocks(key: bytes, nonce: bytes, counter: int, num_blocks: int) -> None:
    """Check that ChaCha20 has these blocks.

    Raises:
        ValueError: key or nonce have another length, or the counter would begin again.
    """
    if len(key) != 32 or len(nonce) != 12:
        raise ValueError(f"ChaCha20 takes a key of 32 bytes and a nonce of 12, got {len(key)} and {len(nonce)}")
    if not 0 <= counter <= counter + num_blocks <= MAX_BLOCKS:
        raise ValueError(
            f"blocks {counter} to {counter + num_blocks} of a key were asked for, and ChaCha20 has {MAX_BLOCKS}: the "
            "numbers would repeat. Draw the others from a new key"
        )


@cache
def _cryptography() -> ModuleType | None:
    try:
        from cryptography.hazmat.primitives import ciphers
    except ImportError:
        return None
    return ciphers


def keystream_by_numpy(key: bytes, nonce: bytes, counter: int, num_blocks: int) -> NDArray[np.uint32]:
    """Return the same as `keystream`, with NumPy: rows of words, each of all blocks."""
    start = np.empty((4, 4, num_blocks), np.uint32)
    start[0] = _CONSTANTS[:, None]
    start[1:3] = np.frombuffer(key, dtype="<u4").reshape(2, 4, 1)
    start[3, 0] = np.arange(counter, counter + num_blocks, dtype=np.uint64).astype(np.uint32)
    start[3, 1:] = np.frombuffer(nonce, dtype="<u4")[:, None]
    state, spare = start.copy(), np.empty((4, num_blocks), np.uint32)
    for _ in range(10):
        _quarter_rounds(state, spare, diagonal=False)
        _quarter_rounds(state, spare, diagonal=True)
    state += start
    return np.ascontiguousarray(state.reshape(16, num_blocks).T)


def _quarter_rounds(state: NDArray[np.uint32], spare: NDArray[np.uint32], diagonal: bool) -> None:
    """Do four quarter rounds (RFC 8439, section 2.1), over the columns or over the diagonals of the state.

    Args:
        state: (4, 4, n) rows, columns, blocks; changed in place.
        spare: (4, n).
        diagonal: whether row i is taken from column i on.
    """
    a, b, c, d = state
    shift = [0, 1, 2, 3] if diagonal else [0, 0, 0, 0]
    for to, by, turned, places in ((0, 1, 3, 16), (2, 3, 1, 12), (0, 1, 3, 8), (2, 3, 1, 7)):
        rows = (a, b, c, d)
        _combine(np.add, rows[to], rows[by], (shift[by] - shift[to]) % 4)
        _combine(np.bitwise_xor, rows[turned], rows[to], (shift[to] - shift[turned]) % 4)
        np.left_shift(rows[turned], np.uint32(places), out=spare)
        np.right_shift(rows[turned], np.uint32(32 - places), out=rows[turned])
        np.bitwise_or(rows[turned], spare, out=rows[turned])


def _combine(operation: np.ufunc, target: NDArray[np.uint32], other: NDArray[np.uint32], shift: int) -> None:
    """Combine column i of one row with column i + shift of another, in place."""
    if not shift:
        operation(target, other, out=target)
        return
    operation(target[: 4 - shift], other[shift:], out=target[: 4 - shift])
    operation(target[4 - shift :], other[:shift], out=target[4 - shift :])
