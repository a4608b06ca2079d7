"""Messages between machines: bytes, with the signature of their sender.

Place in the flow: below `nodes` (the server's side) and `node` (the clients' side); any transport carries the bytes. A
transport encrypts, and it is not trusted to say who a message is from: requests are signed with the server's key, and
answers with the key of a node. A signature covers the purpose, the request that is answered, and every byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.methods.federated.secure import ProtocolError
from dpllm.methods.federated.transport import Content

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

REQUEST, ANSWER = "dpllm federated request 1", "dpllm federated answer 1"
"""The purposes of a signature: a request of the server, an answer of a node."""
Parts = dict[str, Content]
"""A message: the contents for, or of, each client, under its number; under "all" the values that they share."""
ALL = "all"
_LENGTH_BYTES = 8


class NotTrustedError(ProtocolError):
    """A message without the signature that it needs."""


def pack(parts: Mapping[str, Content]) -> bytes:
    """Return a message as bytes.

    Args:
        parts: the contents by name, whose values are int, float, str, bytes, or lists of int or of bytes.

    >>> unpack(pack({"3": {"round": 1, "keys": [b"ab", b"c"]}}))
    {'3': {'round': 1, 'keys': [b'ab', b'c']}}
    """
    blobs: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            blobs.append(value)
            return {"bytes": len(value)}
        return [plain(one) for one in value] if isinstance(value, list) else value

    named = {name: {key: plain(value) for key, value in content.items()} for name, content in parts.items()}
    head = json.dumps(named, separators=(",", ":")).encode()
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "big"), head, *blobs])


def unpack(message: bytes) -> Parts:
    """Return the contents of a message.

    Raises:
        ProtocolError: these bytes are no message.
    """
    try:
        end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "big")
        named, place = json.loads(message[_LENGTH_BYTES:end]), end
        parts: Parts = {}

        def value(given: Any) -> Any:
            nonlocal place
            if isinstance(given, dict):
                start, place = place, place + _size(given)
                return message[start:place]
            return [value(one) for one in given] if isinstance(given, list) else given

        for name, content in named.items():
            parts[name] = {key: value(one) for key, one in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError("a message is not of the form that dpllm writes") from error
    if place != len(message):
        raise ProtocolError(f"a message has {len(message):,} bytes, and its head describes {place:,}")
    return parts


def _size(given: Mapping[str, Any]) -> int:
    size = given["bytes"]
    if type(size) is not int or size < 0 or len(given) != 1:
        raise ValueError("no length")
    return size


def shared(requests: Mapping[int, Content]) -> Parts:
    """Return requests as one message, in which equal values are there once.

    Args:
        requests: client to its request, with the same keys.
    """
    first = next(iter(requests.values()))
    same = {key for key, value in first.items() if all(one.get(key) == value for one in requests.values())}
    own = {
        str(client): {key: value for key, value in one.items() if key not in same} for client, one in requests.items()
    }
    return {ALL: {key: first[key] for key in first if key in same}, **own}


def separate(parts: Parts) -> dict[int, Content]:
    """Return the contents for each client.

    Raises:
        ProtocolError: a name is no client's number.
    """
    common = parts.get(ALL, {})
    try:
        return {int(name): {**common, **content} for name, content in parts.items() if name != ALL}
    except ValueError as error:
        raise ProtocolError("a message names a client that is not a number") from error


def digest(message: bytes) -> bytes:
    """Return the hash by which an answer names its request."""
    return hashlib.sha256(message).digest()


class Signer:
    """A key that signs messages: the server's, or that of a node.

    Args:
        key: private Ed25519 key.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        """Keep the key."""
        self._key = key

    @classmethod
    def new(cls) -> Signer:
        """Return a new key, from the operating system."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Read a key from its file of 64 hexadecimal digits.

        Raises:
            ProtocolError: the file holds no key.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text(encoding="ascii").strip())))
        except ValueError as error:
            raise ProtocolError(f"{path} holds no signing key: prepare the folder again") from error

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner reads."""
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(self._key.private_bytes_raw().hex() + "\n", encoding="ascii")

    @property
    def public(self) -> str:
        """The public key, as 64 hexadecimal digits."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, purpose: str, about: bytes, message: bytes) -> bytes:
        """Return the signature of a message.

        Args:
            purpose: `REQUEST` or `ANSWER`.
            about: the digest of the request that is answered; empty in a request.
            message: the bytes.
        """
        return self._key.sign(_signed(purpose, about, message))


def check(public: str, signature: bytes, purpose: str, about: bytes, message: bytes) -> None:
    """Make sure that a message is signed with a key.

    Args:
        public: as `Signer.public`.
        signature: of the message.
        purpose: as in `Signer.sign`.
        about: as in `Signer.sign`.
        message: the bytes.

    Raises:
        NotTrustedError: it is not.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, _signed(purpose, about, message))
    except (InvalidSignature, ValueError, TypeError) as error:
        raise NotTrustedError("a message is not signed by its sender. It is not answered") from error


def _signed(purpose: str, about: bytes, message: bytes) -> bytes:
    return digest(purpose.encode()) + digest(about) + digest(message)
