"""Keys of noise: the derivation of RFC 5869, one key for each address, and no way out of the process."""

import copy
import hashlib
import hmac
import io
import os
import pickle
import sys

import pytest
import torch

from dpllm.mechanism.chacha20 import SecretKey
from tests import children
from tests.mutations import kills


def hkdf_extract(salt, entropy):
    """RFC 5869, section 2.2."""
    return hmac.new(salt, entropy, hashlib.sha256).digest()


def hkdf_expand(pseudorandom, info, size):
    """RFC 5869, section 2.3."""
    output, last = b"", b""
    for number in range(1, -(-size // 32) + 1):
        last = hmac.new(pseudorandom, last + info + bytes([number]), hashlib.sha256).digest()
        output += last
    return output[:size]


@pytest.mark.parametrize(
    ("entropy", "salt", "info", "size", "pseudorandom", "output"),
    [
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            42,
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            "0b" * 22,
            "",
            "",
            42,
            "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_derivation_is_that_of_the_standard(entropy, salt, info, size, pseudorandom, output):
    """RFC 5869, appendices A.1 and A.3."""
    assert hkdf_extract(bytes.fromhex(salt), bytes.fromhex(entropy)).hex() == pseudorandom
    assert hkdf_expand(bytes.fromhex(pseudorandom), bytes.fromhex(info), size).hex() == output
    secret = os.urandom(40)
    derived = hkdf_expand(hkdf_extract(b"dpllm noise, version 1", secret), b"n" + (7).to_bytes(8, "little"), 32)
    assert SecretKey(secret).derive(7) == derived


def test_every_address_has_its_own_key_and_every_key_its_own_addresses():
    """Also texts and numbers that are equal when written one after another, and names that hold a separator."""
    one, other = SecretKey(b"a" * 32), SecretKey(b"b" * 32)
    addresses = [(step, name, rank, size, block) for step in (0, 1, 256) for name in ("w", "w.1", "") for rank, size in
                 ((0, 1), (0, 2), (1, 2)) for block in (0, 1, 2**63)]  # fmt: skip
    addresses += [
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        ("a", "b", "c"),
        (1, "1"),
        ("1", 1),
        (),
        (1,),
        (1, 0),
        ("\ud800",),
    ]
    keys = [key.derive(*address) for key in (one, other) for address in addresses]
    assert len(set(keys)) == 2 * len(addresses) and all(len(key) == 32 for key in keys)
    assert one.derive(3, "w") == SecretKey(b"a" * 32).derive(3, "w")


def test_a_key_does_not_leave_the_process():
    """It is not printed, copied, pickled or put into a checkpoint, nor is an object that holds it."""
    entropy = os.urandom(32)
    key = SecretKey(entropy)
    assert repr(key) == str(key) == f"{key}" == "SecretKey(...)"
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda held: torch.save({"held": held}, io.BytesIO())):
        for held in (key, [key]):
            if copied is copy.copy and held is not key:
                continue  # a list beside it, with the same key
            with pytest.raises(TypeError, match="in the memory of one process"):
                copied(held)


@kills(
    "a fork draws the noise of its parent",
    "dpllm/mechanism/chacha20.py",
    "        if os.getpid() != self._process:\n",
    "        if False:\n",
)
def test_a_key_is_refused_in_a_fork():
    """Parent and child would draw the same noise."""
    code = """
import os
from dpllm.mechanism.chacha20 import SecretKey
key = SecretKey(os.urandom(32))
key.derive("w")
child = os.fork()
if not child:
    try:
        key.derive("w")
    except ValueError as error:
        os._exit(7 if "a fork of it, so both would draw the same noise" in str(error) else 1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert children.run([sys.executable, "-c", code]).stdout == "7\n"


@pytest.mark.parametrize("entropy", [b"", bytes(31)])
def test_too_little_entropy_is_refused(entropy):
    """A short key could be guessed."""
    with pytest.raises(ValueError, match=f"at least 32 bytes of entropy, got {len(entropy)}"):
        SecretKey(entropy)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_beyond_its_bytes_is_refused(number):
    """It would have the address of another number."""
    with pytest.raises(ValueError, match="an address number"):
        SecretKey(bytes(32)).derive(number)
