"""Messages between machines: their bytes come back as they were, and only the sender's signature makes them count."""

from __future__ import annotations

import json

import pytest

from dpllm.methods.federated.secure import ProtocolError
from dpllm.methods.federated.wire import (
    ALL,
    ANSWER,
    REQUEST,
    NotTrustedError,
    Signer,
    check,
    pack,
    separate,
    shared,
    unpack,
)

REQUESTS = {
    3: {"task": "masked", "round": 1, "weights": bytes(range(256)) * 9, "senders": [4, 7], "sealed": [b"", b"xy"]},
    4: {"task": "masked", "round": 1, "weights": bytes(range(256)) * 9, "senders": [], "sealed": []},
}


def test_a_message_comes_back_as_it_was_with_shared_values_once():
    """Also with empty lists and empty bytes; the weights of all clients of a node travel once."""
    message = pack(shared(REQUESTS))
    assert separate(unpack(message)) == REQUESTS
    assert len(message) < 1.2 * len(REQUESTS[3]["weights"])
    assert separate(unpack(pack(shared({3: REQUESTS[3]})))) == {3: REQUESTS[3]}


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * 7,
        (2**60).to_bytes(8, "big"),
        b"\0" * 7 + b"\2[]",
        b"\0" * 7 + b'\x11{"1":{"a":{"b":1}}}'[:18],
        pack({"1": {"a": b"abc"}})[:-1],
        pack({"1": {"a": b"abc"}}) + b"d",
        (len(head := json.dumps({"1": {"a": {"bytes": -1}}}).encode())).to_bytes(8, "big") + head,
        (len(deep := b"[" * 100_000)).to_bytes(8, "big") + deep,
    ],
    ids=["empty", "short", "huge", "list", "object", "cut", "longer", "negative", "deep"],
)
def test_other_bytes_are_no_message(message):
    """No traceback of a parser, and no memory for a length that somebody claims."""
    with pytest.raises(ProtocolError, match="a message"):
        unpack(message)


def test_a_client_is_named_by_its_number():
    with pytest.raises(ProtocolError, match="names a client that is not a number"):
        separate({ALL: {}, "x": {}})


def test_a_signature_counts_for_its_sender_purpose_request_and_bytes_only():
    """An answer is no request, and an answer to another request is no answer."""
    pytest.importorskip("cryptography")
    signer, other = Signer.new(), Signer.new()
    signature = signer.sign(ANSWER, b"request", b"body")
    check(signer.public, signature, ANSWER, b"request", b"body")
    for wrong in (
        (other.public, signature, ANSWER, b"request", b"body"),
        (signer.public, signature, REQUEST, b"request", b"body"),
        (signer.public, signature, ANSWER, b"another", b"body"),
        (signer.public, signature, ANSWER, b"request", b"other"),
        (signer.public, b"", ANSWER, b"request", b"body"),
        ("not a key", signature, ANSWER, b"request", b"body"),
    ):
        with pytest.raises(NotTrustedError, match="not signed by its sender"):
            check(*wrong)


def test_a_key_is_kept_for_its_owner(tmp_path):
    """No other user of the machine reads it, and a damaged file is an error of one line."""
    pytest.importorskip("cryptography")
    signer, path = Signer.new(), tmp_path / "signing.key"
    signer.save(path)
    assert Signer.load(path).public == signer.public and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        signer.save(path)
    path.write_text("abc")
    with pytest.raises(ProtocolError, match="holds no signing key"):
        Signer.load(path)
