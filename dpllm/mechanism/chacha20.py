"""Normal numbers from ChaCha20, a stream cipher: distinguishing them from random ones would mean breaking the cipher.

This is the level "chacha20" of `privacy.randomness`.

The cipher is that of RFC 8439, computed by the package `cryptography`.

**From bits to normal numbers.** Box and Muller (1958), in float64, two numbers from 128 bits:

    u = (j + 1/2) / 2^64    j: 64 bits    r = sqrt(-2 ln u)
    a = 2π k / 2^64         k: 64 bits    r cos a, r sin a

u is at least 2^-65, so each number is finite and at most 9.50 in size; an exact normal number is larger with
probability 2e-21. u and a are rounded to the 53 bits of float64, relative to their size, so the steps between
neighbouring numbers are as fine in the tail as elsewhere. In float32 the result is rounded once more, to 24 bits.

**Limit.** As with every generator of floating-point numbers, the result is a rounded Gaussian (Mironov 2012). This
level removes the doubt about the source of the bits, but not the one about rounding.

**Keys.** They are derived by HKDF-SHA256. Most noise is drawn from fresh entropy, once, and needs no key. Noise that a
run must be able to draw a second time is a function of a secret key and an address: the step, the parameter and the
position of its entries. Anyone with the key can subtract the noise from the releases. So it stays in memory: no method
returns it, and it cannot be copied, pickled or used in a forked process.

The operating system may still write memory to disk, when it swaps or dumps a crashed process.

**On a GPU** (`DeviceNormals`) the numbers are computed on the tensor's device, without CPU copies. Words and numbers
are the same as on the CPU, in the same order: the words bit by bit, the numbers up to the rounding of a logarithm, a
sine and a cosine in float64. The operations are PyTorch's, so this runs wherever PyTorch has 32-bit integers and
float64. A key is used on a device only after that device has reproduced the words of the standard (RFC 8439, section
2.3.2).
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

NORMALS_OF_A_BLOCK = 8
"""Normal numbers from the 64 bytes of one block of ChaCha20."""

_BLOCKS_AT_A_TIME = 4096  # 256 KiB, which stay in a processor's cache from the cipher to the logarithm
MAX_BLOCKS = 2**32
"""Blocks of one key: the counter has 32 bits."""


class ChaCha20Normals:
    """Draws standard normal numbers from one key; independent numbers need a different key.

    Args:
        key: 32 secret bytes that no other object uses.

    >>> drawn = ChaCha20Normals(bytes(32)).standard_normal(5)
    >>> drawn.shape, drawn.dtype
    ((5,), dtype('float32'))
    """

    def __init__(self, key: bytes) -> None:
        """Begin with block 0."""
        self._key, self._block = key, 0

    def standard_normal(self, size: int, dtype: Any = np.float32) -> NDArray[Any]:
        """Return (size,) independent N(0, 1), independent of all numbers returned before.

        Args:
            size: the number of values.
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
    """Write the normal numbers computed from blocks of the key stream.

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
        ValueError: key or nonce has a wrong length, or the counter would wrap around.
    """
    require_blocks(key, nonce, counter, num_blocks)
    first = (counter % MAX_BLOCKS).to_bytes(4, "little")  # of no block: any
    cipher = Cipher(ChaCha20(key, first + nonce), mode=None)
    return np.frombuffer(cipher.encryptor().update(bytes(64 * num_blocks)), dtype="<u4").reshape(num_blocks, 16)


def require_blocks(key: bytes, nonce: bytes, counter: int, num_blocks: int) -> None:
    """Check that ChaCha20 has these blocks.

    Raises:
        ValueError: key or nonce has a wrong length, or the counter would wrap around.
    """
    if len(key) != 32 or len(nonce) != 12:
        raise ValueError(f"ChaCha20 takes a key of 32 bytes and a nonce of 12, got {len(key)} and {len(nonce)}")
    if not 0 <= counter <= counter + num_blocks <= MAX_BLOCKS:
        raise ValueError(
            f"blocks {counter} to {counter + num_blocks} of a key were requested, but ChaCha20 has {MAX_BLOCKS}, and "
            "its numbers would repeat. Draw the others from a new key"
        )


KEY_BYTES = 32
"""256 bits, of which a quantum computer's search would leave 128."""
_SALT = b"dpllm noise, version 1"


class SecretKey:
    """A key of 256 bits that stays in the memory of one process.

    Args:
        entropy: at least 32 secret, uniform bytes.

    Raises:
        ValueError: there are fewer bytes.

    >>> key = SecretKey(os.urandom(32))
    >>> key.derive("noise", 1, "w") == key.derive("noise", 1, "w") != key.derive("noise", 2, "w")
    True
    >>> key
    SecretKey(...)
    """

    __slots__ = ("_entropy", "_process")

    def __init__(self, entropy: bytes) -> None:
        """Store the entropy, from which each key is derived on request."""
        if len(entropy) < KEY_BYTES:
            raise ValueError(f"a key needs at least {KEY_BYTES} bytes of entropy, got {len(entropy)}")
        self._entropy = entropy
        self._process = os.getpid()

    def derive(self, *address: int | str) -> bytes:
        """Return the 32 bytes that belong to an address; different addresses have independent bytes.

        Args:
            address: whole numbers from 0 to 2^64 - 1, and texts. Addresses are equal only if they have the same parts
                in the same order: each part is preceded by its kind and its length.

        Raises:
            ValueError: this process was forked from the one that created the key, so both would draw the same numbers;
                or a number is out of range.
        """
        if os.getpid() != self._process:
            raise ValueError(
                f"the secret key was created by process {self._process}, and process {os.getpid()} is a fork of it, so "
                "both would draw the same noise. Begin the run in the process that trains"
            )
        info = b"".join(_encoded(part) for part in address)
        return HKDF(SHA256(), KEY_BYTES, _SALT, info).derive(self._entropy)

    def __repr__(self) -> str:
        return "SecretKey(...)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a secret key stays in the memory of one process and cannot be copied, pickled or saved, since anyone who "
            "has it can subtract the noise. Start a new run instead of copying this one"
        )


def _encoded(part: int | str) -> bytes:
    if isinstance(part, str):
        text = part.encode("utf-8", "surrogatepass")
        return b"t" + len(text).to_bytes(8, "little") + text
    if not 0 <= part < 2**64:
        raise ValueError(f"an address number must be between 0 and 2^64 - 1, got {part}")
    return b"n" + int(part).to_bytes(8, "little")


_DEVICE_BLOCKS_AT_A_TIME = 1 << 19  # 32 MiB of words, which a large GPU's cache holds
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
        for part in drawn.split(_DEVICE_BLOCKS_AT_A_TIME):
            device_box_muller(device_keystream(self._key, bytes(12), self._block, len(part), self._device), part)
            self._block += len(part)
        return drawn.view(-1)[:size]


def device_box_muller(words: Tensor, out: Tensor) -> None:
    """Write the normal numbers computed from blocks of the key stream, as `box_muller`.

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
