"""Secret keys of noise, and the keys derived from them by HKDF-SHA256.

Most noise is drawn from fresh entropy, once, and needs no key. Noise that a run must be able to draw a second time is a
function of a secret key and an address: the step, the parameter and the position of its entries. Anyone with the key
can subtract the noise from the releases. So it stays in memory: no method returns it, and it cannot be copied, pickled
or used in a forked process.

The operating system may still write memory to disk, when it swaps or dumps a crashed process.
"""

from __future__ import annotations

import os
from typing import NoReturn

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

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
