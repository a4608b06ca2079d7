"""Secure aggregation: the server learns the sum of the survivors' vectors modulo 2^64, and no single vector.

The protocol is that of Bonawitz et al. (CCS 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", section 4, for a server that follows it), with a complete graph: every client of a cohort shares a mask with
every other one.

1. *keys*: each client sends two public keys of X25519, one for masks and one for sealed messages.
2. *shares*: each client draws the seed of a mask of its own, and divides this seed and its private mask key into shares
   (Shamir), of which n recover the secret. It seals one share of both for every other client; the server passes it on.
3. *masked*: each client adds to its vector the mask of its seed and, for each other client, their common mask, which
   one of the two adds and the other subtracts.
4. *unmask*: of each survivor the others reveal shares of its seed, and of each dropout shares of its mask key. They
   reveal one of the two for each client, and answer once per round. The server subtracts the masks that are left.

n is the fewest survivors of the plan, so a round that goes on has n shares of noise, and one that cannot go on is given
up. Masks are the key stream of ChaCha20 under keys of 256 bits, and every mask entry is uniform modulo 2^64.

Flower has a protocol of this kind (`SecAggPlusWorkflow`). It is not used: its masks come from a Mersenne Twister with a
seed of 32 bits (`pseudo_rand_gen`, version 1.41), it rounds floats itself, clips each vector after the noise, and gives
up when a client leaves before its keys are shared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from dpllm.mechanism.keys import SecretKey

Content = dict[str, Any]
"""A message: names to int, float, str, bytes, list[int] or list[bytes]."""
State = dict[str, Any]
"""The memory of a client between two messages, of the same kinds of values; it stays with the client."""
Answer = Callable[[int, Content, State], Content]
"""From a client's number, a request and the client's memory, which it may change, to its answer."""


class Clients(Protocol):
    """The clients as the server sees them: numbers from 0 to N - 1."""

    @property
    def num_clients(self) -> int:
        """N, public and fixed."""
        ...

    def ask(self, requests: Mapping[int, Content]) -> dict[int, Content]:
        """Send each client its request and return the answers of those who gave one.

        Args:
            requests: number of a client to its request.
        """
        ...


class InMemory:
    """Clients of this process, which answer one after another; for simulations.

    Args:
        num_clients: N.
        answer: computes the answer of each.
    """

    def __init__(self, num_clients: int, answer: Answer) -> None:
        """Begin with empty memories."""
        self.num_clients, self._answer = num_clients, answer
        self._states: dict[int, State] = {}

    def ask(self, requests: Mapping[int, Content]) -> dict[int, Content]:
        """Let each client answer."""
        found = {}
        for client, request in requests.items():
            found[client] = self._answer(client, dict(request), self._states.setdefault(client, {}))
        return found


class DroppingOut:
    """Clients of which some leave a round before its end, at random; for simulations.

    A client leaves each round with the given probability, before one of its answers, each of them equally likely.

    Args:
        clients: the clients.
        share: the probability.
        answers: how many answers a client gives in a round.
    """

    def __init__(self, clients: Clients, share: float, answers: int) -> None:
        """Begin without a round."""
        self._clients, self._share, self._answers = clients, share, answers
        self._random = secrets.SystemRandom()
        self._round = -1
        self._left: dict[int, int] = {}

    @property
    def num_clients(self) -> int:
        """N."""
        return self._clients.num_clients

    def ask(self, requests: Mapping[int, Content]) -> dict[int, Content]:
        """Ask the clients that are still there."""
        there = {}
        for client, request in requests.items():
            if request["round"] != self._round:
                self._round, self._left = int(request["round"]), {}
            if client not in self._left:
                leaves = self._random.random() < self._share
                self._left[client] = self._random.randrange(self._answers) if leaves else self._answers
            if self._left[client] > 0:
                self._left[client] -= 1
                there[client] = request
        return self._clients.ask(there)


STAGES = ("keys", "shares", "masked", "unmask")
_PRIME = 2**521 - 1
_SECRET_BYTES, _SHARE_BYTES = 32, 66


class ProtocolError(ValueError):
    """A request that a client of secure aggregation must not answer."""


# ----------------------------------------------------------------------------------------------------------- client


def make_keys(client: int, request: Content, state: State) -> Content:
    """Begin a round: draw two pairs of keys, and forget the secrets of all rounds before.

    Args:
        client: own number.
        request: has ``round``.
        state: the client's memory, which must last over all rounds of a run.

    Raises:
        ProtocolError: the client has begun this round, or a later one, before.
    """
    number, last = int(request["round"]), int(state.get("last", -1))
    if number <= last:
        raise ProtocolError(
            f"the server asks for round {number}, and this client has begun round {last} before: each round is "
            "answered once, since ε counts it once. Do not answer this server"
        )
    state.clear()
    keys = {name: _new_key() for name in ("mask", "seal")}
    state.update({f"{name}_key": _private_bytes(key) for name, key in keys.items()})
    state.update({"round": number, "last": number, "client": client, "stage": "keys"})
    return {f"{name}_key": _public_bytes(key) for name, key in keys.items()}


def share_secrets(request: Content, state: State) -> Content:
    """Divide the own secrets among the clients of the cohort.

    Args:
        request: ``clients`` and their ``mask_keys`` and ``seal_keys``, and ``threshold``.
        state: the client's memory.

    Raises:
        ProtocolError: fewer clients than the threshold, keys that are there twice, or other keys than the own ones.
    """
    _advance(request, state, "shares")
    clients, threshold = [int(client) for client in request["clients"]], int(request["threshold"])
    masks, seals = list(request["mask_keys"]), list(request["seal_keys"])
    me = int(state["client"])
    different, num_keys = len(set(clients)), len({*masks, *seals})
    if not 2 <= threshold <= different or len(clients) != different or num_keys != 2 * different:
        raise ProtocolError(
            f"a cohort of {different} clients with {num_keys} keys and the threshold {threshold}: a sum of at least 2 "
            "clients with two keys each is needed. Do not answer this server"
        )
    own = {name: _public_bytes(_key(state[f"{name}_key"])) for name in ("mask", "seal")}
    if me not in clients or (masks[clients.index(me)], seals[clients.index(me)]) != (own["mask"], own["seal"]):
        raise ProtocolError("the server passed on other keys than this client's own. Do not answer this server")
    seed = secrets.token_bytes(_SECRET_BYTES)
    parts = [divide(secret, clients, threshold) for secret in (seed, state["mask_key"])]
    others = [client for client in clients if client != me]
    sealed = []
    for other in others:
        key = _common(state["seal_key"], seals[clients.index(other)], "seal", state["round"], me, other)
        sealed.append(_seal(key, parts[0][other] + parts[1][other]))
    state.update({"seed": seed, "clients": clients, "mask_keys": masks, "seal_keys": seals, "threshold": threshold})
    state["own_shares"] = parts[0][me] + parts[1][me]
    return {"clients": others, "sealed": sealed}


def mask(request: Content, state: State, vector: NDArray[np.uint64]) -> bytes:
    """Return the own vector under all masks.

    Args:
        request: ``senders`` and the ``sealed`` shares of each of them for this client.
        state: the client's memory.
        vector: (d,) whole numbers modulo 2^64.

    Returns:
        The bytes of (d,) numbers modulo 2^64, little-endian.

    Raises:
        ProtocolError: fewer clients are left than the threshold, or a message is not from its sender.
    """
    _advance(request, state, "masked")
    clients, me = list(state["clients"]), int(state["client"])
    senders = [int(sender) for sender in request["senders"]]
    if len(set(senders) | {me}) < int(state["threshold"]) or not set(senders) <= set(clients) - {me}:
        raise ProtocolError(
            f"{len(set(senders))} other clients are left, with a threshold of {state['threshold']}: the sum would be "
            "of too few. This round cannot go on"
        )
    masked = vector + stream(state["seed"], vector.size)
    held = []
    for sender, sealed in zip(senders, request["sealed"], strict=True):
        place = clients.index(sender)
        key = _common(state["seal_key"], state["seal_keys"][place], "seal", state["round"], sender, me)
        held.append(_open(key, sealed))
        pair = stream(_pair(state["mask_key"], state["mask_keys"][place], state["round"], me, sender), vector.size)
        masked = masked + pair if me < sender else masked - pair
    state.update({"senders": senders, "held": held})
    return masked.astype("<u8").tobytes()


def reveal(request: Content, state: State) -> Content:
    """Return shares of the seeds of survivors and of the mask keys of dropouts, once, and forget the round.

    Args:
        request: ``survivors`` and ``dropouts``.
        state: the client's memory.

    Raises:
        ProtocolError: fewer survivors than the threshold, a client on both lists, one without shares here, or no vector
            was sent.
    """
    _advance(request, state, "unmask")
    if "senders" not in state:
        raise ProtocolError("this client sent no vector in this round, so it reveals nothing. Leave it out")
    survivors, dropouts = ([int(one) for one in request[name]] for name in ("survivors", "dropouts"))
    held = {int(state["client"]): state["own_shares"], **dict(zip(state["senders"], state["held"], strict=True))}
    everyone, threshold = {*survivors, *dropouts}, int(state["threshold"])
    if len(survivors) < threshold or len(everyone) != len(survivors) + len(dropouts) or not everyone <= set(held):
        raise ProtocolError(
            f"the server asks for the shares of {len(survivors)} survivors and {len(dropouts)} dropouts; both of one "
            f"client, of an unknown one, or of fewer than {threshold} survivors are not given: they could unmask a "
            "single vector"
        )
    last = state["last"]
    state.clear()
    state["last"] = last
    seeds = [held[client][:_SHARE_BYTES] for client in survivors]
    keys = [held[client][_SHARE_BYTES:] for client in dropouts]
    return {"seeds": seeds, "keys": keys}


def _advance(request: Content, state: State, stage: str) -> None:
    """Go to the next stage of the round.

    Raises:
        ProtocolError: it is another stage or round.
    """
    before = STAGES[STAGES.index(stage) - 1]
    if state.get("stage") != before or state.get("round") != int(request["round"]):
        raise ProtocolError(
            f"the server asks for stage {stage!r} of round {request['round']}, and this client is at stage "
            f"{state.get('stage')!r} of round {state.get('round')}: each stage of a round is answered once"
        )
    state["stage"] = stage


# ----------------------------------------------------------------------------------------------------------- server


def secure_sum(
    clients: Clients, requests: Mapping[int, Content], number: int, threshold: int, size: int
) -> NDArray[np.uint64] | None:
    """Return the sum of the survivors' vectors modulo 2^64; None: the round is given up.

    Args:
        clients: all clients.
        requests: number of each client of the cohort to the request for its vector, to which the sealed shares are
            added.
        number: of the round.
        threshold: n, the fewest survivors, also after unmasking.
        size: d.
    """
    common: Content = {"round": number}
    keys = clients.ask({client: {**common, "task": "keys"} for client in requests})
    if len(keys) < threshold:
        return None
    cohort = sorted(keys)
    listed = {f"{name}_keys": [keys[client][f"{name}_key"] for client in cohort] for name in ("mask", "seal")}
    asked = {**common, "task": "shares", "clients": cohort, **listed, "threshold": threshold}
    shared = clients.ask(dict.fromkeys(cohort, asked))
    if len(shared) < threshold:
        return None
    boxes: dict[int, dict[int, bytes]] = {client: {} for client in shared}
    for sender, answer in shared.items():
        for receiver, sealed in zip(answer["clients"], answer["sealed"], strict=True):
            if receiver in boxes:
                boxes[receiver][sender] = sealed
    to_mask = {}
    for client, box in boxes.items():
        given = {"senders": list(box), "sealed": list(box.values())}
        to_mask[client] = {**requests[client], **common, "task": "masked", **given}
    answers = clients.ask(to_mask)
    masked = {client: answer for client, answer in answers.items() if len(answer["masked"]) == 8 * size}
    if len(masked) < threshold:
        return None
    total = np.zeros(size, np.uint64)
    for answer in masked.values():
        total = total + np.frombuffer(answer["masked"], "<u8").astype(np.uint64, copy=False)
    survivors = sorted(masked)
    dropouts = sorted(set(shared) - set(masked))
    last = {**common, "task": "unmask", "survivors": survivors, "dropouts": dropouts}
    revealed = clients.ask(dict.fromkeys(survivors, last))
    if len(revealed) < threshold:
        return None
    return _unmasked(total, revealed, survivors, dropouts, dict(zip(cohort, listed["mask_keys"], strict=True)), number)


def _unmasked(
    total: NDArray[np.uint64],
    revealed: Mapping[int, Content],
    survivors: Sequence[int],
    dropouts: Sequence[int],
    mask_keys: Mapping[int, bytes],
    number: int,
) -> NDArray[np.uint64]:
    """Subtract the masks that are left in a sum."""
    for place in range(len(survivors)):
        seed = recover({holder: answer["seeds"][place] for holder, answer in revealed.items()})
        total = total - stream(seed, total.size)
    for place, client in enumerate(dropouts):
        key = recover({holder: answer["keys"][place] for holder, answer in revealed.items()})
        for other in survivors:  # who added its side of their common mask
            pair = stream(_pair(key, mask_keys[other], number, client, other), total.size)
            total = total - pair if other < client else total + pair
    return total


# ----------------------------------------------------------------------------------------------------------- secrets


def divide(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Return a share of a secret for each holder; any ``threshold`` of them recover it, fewer tell nothing (Shamir).

    Args:
        secret: 32 bytes.
        holders: their numbers, at least 0, no two equal.
        threshold: how many shares are needed.

    >>> shares = divide(bytes(range(32)), [0, 3, 7], 2)
    >>> recover({7: shares[7], 0: shares[0]}) == bytes(range(32))
    True
    """
    numbers = [int.from_bytes(secret, "little"), *(secrets.randbelow(_PRIME) for _ in range(threshold - 1))]

    def at(place: int) -> int:
        value = 0
        for number in reversed(numbers):
            value = (value * place + number) % _PRIME
        return value

    return {holder: at(holder + 1).to_bytes(_SHARE_BYTES, "little") for holder in holders}


def recover(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of which holders have these shares.

    Raises:
        ProtocolError: they are not shares of one secret of 32 bytes.
    """
    values = {holder + 1: int.from_bytes(share, "little") for holder, share in shares.items()}
    secret = 0
    for place, value in values.items():
        above = below = 1
        for other in values:
            if other != place:
                above, below = above * other % _PRIME, below * (other - place) % _PRIME
        secret = (secret + value * above * pow(below, -1, _PRIME)) % _PRIME
    if secret >= 2 ** (8 * _SECRET_BYTES):
        raise ProtocolError("the revealed shares belong to no secret: a client answered wrongly, and the sum is lost")
    return secret.to_bytes(_SECRET_BYTES, "little")


def stream(key: bytes, size: int) -> NDArray[np.uint64]:
    """Return (size,) numbers modulo 2^64 from the key stream of ChaCha20; a key is used for one round."""
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * size)), "<u8").astype(np.uint64)


def _pair(private: bytes, public: bytes, number: int, one: int, other: int) -> bytes:
    """Return the key of the common mask of two clients, the same for both."""
    return _common(private, public, "mask", number, min(one, other), max(one, other))


def _common(private: bytes, public: bytes, purpose: str, number: int, first: int, second: int) -> bytes:
    """Return 32 bytes that only two clients can compute, for one purpose, round and direction."""
    agreed = _key(private).exchange(X25519PublicKey.from_public_bytes(public))
    return SecretKey(agreed).derive(f"secure aggregation, {purpose}", number, first, second)


def _seal(key: bytes, text: bytes) -> bytes:
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)  # the key is of one message


def _open(key: bytes, sealed: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag as error:
        raise ProtocolError("a sealed share was changed on its way, or is not from its sender") from error


def _new_key() -> Any:
    return X25519PrivateKey.generate()


def _key(private: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(private)


def _private_bytes(key: X25519PrivateKey) -> bytes:
    return key.private_bytes_raw()


def _public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()
