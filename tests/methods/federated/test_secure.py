"""Secure aggregation: exact sums, uniform vectors at the server, and requests that no client answers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dpllm.methods.federated import secure
from dpllm.methods.federated.secure import DroppingOut, InMemory, ProtocolError, divide, recover, secure_sum
from tests.mutations import kills


class Seen:
    """A transport that keeps every answer, as a server that looks at all it receives."""

    def __init__(self, clients, gone=()):
        self.clients, self.gone, self.answers = clients, dict(gone), []
        self.num_clients = clients.num_clients

    def ask(self, requests):
        there = {client: one for client, one in requests.items() if one["task"] != self.gone.get(client)}
        there = {client: one for client, one in there.items() if not self._left(client, one["task"])}
        found = self.clients.ask(there)
        self.answers += [(requests[client]["task"], client, answer) for client, answer in found.items()]
        return found

    def _left(self, client, task):
        stages = secure.STAGES
        return client in self.gone and stages.index(task) >= stages.index(self.gone[client])


def answering(vector_UD):
    """Clients that send these vectors."""

    def answer(client, request, state):
        if request["task"] == "keys":
            return secure.make_keys(client, request, state)
        if request["task"] == "shares":
            return secure.share_secrets(request, state)
        if request["task"] == "masked":
            return {"masked": secure.mask(request, state, vector_UD[client])}
        return secure.reveal(request, state)

    return answer


def vectors(count=6, size=3000, seed=0):
    return np.random.default_rng(seed).integers(-1000, 1000, (count, size)).astype(np.int64).view(np.uint64)


REQUESTS = {"round": 0, "task": "update"}


@pytest.mark.parametrize("stage", secure.STAGES)
def test_the_sum_is_exact_whenever_clients_leave(stage):
    """Those who leave before their vector is sent are not in it; those who leave after it are."""
    vector_UD, gone = vectors(), {1: stage, 4: stage}
    clients = Seen(InMemory(6, answering(vector_UD)), gone)
    total = secure_sum(clients, {client: dict(REQUESTS) for client in range(6)}, 0, 3, 3000)
    summed = [client for client in range(6) if client not in gone or stage == "unmask"]
    assert np.array_equal(total, vector_UD[summed].sum(0))


@kills(
    "a round with fewer survivors than have noise enough is released",
    "dpllm/methods/federated/secure.py",
    "    if len(masked) < threshold:",
    "    if len(masked) < 2:",
)
@pytest.mark.parametrize("stage", secure.STAGES)
def test_a_round_of_too_few_is_given_up(stage):
    clients = Seen(InMemory(6, answering(vectors())), dict.fromkeys(range(3), stage))
    assert secure_sum(clients, {client: dict(REQUESTS) for client in range(6)}, 0, 4, 3000) is None


def test_the_server_sees_uniform_vectors():
    """All clients send zeros; each masked vector passes tests of uniformity that the vector itself fails by far."""
    zeros = np.zeros((5, 20_000), np.uint64)
    clients = Seen(InMemory(5, answering(zeros)))
    total = secure_sum(clients, {client: dict(REQUESTS) for client in range(5)}, 0, 3, 20_000)
    masked = [np.frombuffer(one["masked"], "<u8") for task, _, one in clients.answers if task == "masked"]
    assert len(masked) == 5 and not total.any()
    for vector in masked:
        assert stats.kstest(vector / 2.0**64, "uniform").pvalue > 1e-6
        low = np.bincount((vector & np.uint64(255)).astype(np.int64), minlength=256)
        assert stats.chisquare(low).pvalue > 1e-6
        assert len(np.unique(vector)) == len(vector)
    for one in range(5):  # nor do two of them cancel
        for other in range(one):
            for both in (masked[one] + masked[other], masked[one] - masked[other]):
                assert stats.kstest(both / 2.0**64, "uniform").pvalue > 1e-6


def test_masks_of_two_rounds_are_others():
    """A server that subtracts two rounds of one cohort learns nothing."""
    zeros, vectors_seen = np.zeros((3, 5000), np.uint64), []
    clients = Seen(InMemory(3, answering(zeros)))
    for number in (0, 1):
        secure_sum(clients, {client: {"round": number} for client in range(3)}, number, 2, 5000)
        vectors_seen.append([np.frombuffer(a["masked"], "<u8") for t, _, a in clients.answers if t == "masked"][-3])
    assert stats.kstest((vectors_seen[1] - vectors_seen[0]) / 2.0**64, "uniform").pvalue > 1e-6


def test_fewer_shares_than_the_threshold_tell_nothing():
    """Two of three shares lead to any secret alike; three recover it."""
    shares = divide(bytes(range(32)), range(5), 3)
    assert recover({holder: shares[holder] for holder in (4, 0, 2)}) == bytes(range(32))
    assert len({divide(bytes(32), range(5), 3)[0] for _ in range(20)}) == 20
    with pytest.raises(ProtocolError, match="belong to no secret"):
        recover({holder: shares[holder] for holder in (4, 0)})


def states_before(stage, count=4, threshold=2):
    """The memories of clients before a stage, and the request for it."""
    states = [{} for _ in range(count)]
    keys = [secure.make_keys(client, {"round": 7}, states[client]) for client in range(count)]
    asked = {
        "round": 7,
        "clients": list(range(count)),
        "mask_keys": [one["mask_key"] for one in keys],
        "seal_keys": [one["seal_key"] for one in keys],
        "threshold": threshold,
    }
    if stage == "shares":
        return states, asked
    shared = [secure.share_secrets(asked, state) for state in states]
    boxes = [
        {
            "round": 7,
            "senders": [sender for sender in range(count) if sender != one],
            "sealed": [shared[s]["sealed"][shared[s]["clients"].index(one)] for s in range(count) if s != one],
        }
        for one in range(count)
    ]
    if stage == "masked":
        return states, boxes[0]
    for state, box in zip(states, boxes, strict=True):
        secure.mask(box, state, np.zeros(3, np.uint64))
    return states, {"round": 7, "survivors": [0, 1, 2], "dropouts": [3]}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"threshold": 1}, "the threshold 1"),
        ({"threshold": 5}, "the threshold 5"),
        ({"clients": [0, 1, 1, 3]}, "a cohort of 3 clients"),
        ({"clients": [1, 0, 2, 3]}, "other keys than this client's own"),
        ({"round": 8}, "each stage of a round is answered once"),
    ],
)
def test_a_client_refuses_a_cohort(change, match):
    """A sum of one, a key that the server made itself, or keys that are there twice."""
    states, request = states_before("shares")
    with pytest.raises(ProtocolError, match=match):
        secure.share_secrets({**request, **change}, states[0])


def test_a_client_refuses_a_key_that_is_there_twice():
    states, request = states_before("shares")
    request["mask_keys"][2] = request["mask_keys"][1]
    with pytest.raises(ProtocolError, match="7 keys"):
        secure.share_secrets(request, states[0])


def test_a_client_masks_for_no_cohort_of_its_own_and_believes_no_changed_share():
    states, request = states_before("masked", threshold=3)
    changed = {**request, "sealed": [bytes(len(request["sealed"][0])), *request["sealed"][1:]]}
    few = {**request, "senders": request["senders"][:1], "sealed": request["sealed"][:1]}
    for wrong, match in ((changed, "changed on its way"), (few, "of too few"), ({**few, "senders": [9]}, "of too few")):
        with pytest.raises(ProtocolError, match=match):
            secure.mask(wrong, dict(states[0]), np.zeros(3, np.uint64))


@kills(
    "a client of secure aggregation reveals both secrets of another client",
    "dpllm/methods/federated/secure.py",
    "len(everyone) != len(survivors) + len(dropouts) or not",
    "not",
)
@pytest.mark.parametrize(
    "change",
    [
        {"survivors": [0, 1, 2, 3]},
        {"survivors": [0], "dropouts": [1, 2, 3]},
        {"survivors": [0, 1, 2], "dropouts": [9]},
        {"survivors": [0, 1, 1], "dropouts": [3]},
    ],
)
def test_a_client_never_reveals_both_secrets_of_another(change):
    """With both, the server would unmask a single vector."""
    states, request = states_before("unmask")
    with pytest.raises(ProtocolError, match="unmask"):
        secure.reveal({**request, **change}, states[0])


def test_a_client_reveals_once():
    """Asked again with the lists exchanged, it would give the other secret."""
    states, request = states_before("unmask")
    secure.reveal(request, states[0])
    with pytest.raises(ProtocolError, match="answered once"):
        secure.reveal({**request, "survivors": [0, 1, 3], "dropouts": [2]}, states[0])


@kills(
    "a client answers a round again, with fresh noise",
    "dpllm/methods/federated/secure.py",
    "    if number <= last:",
    "    if False:",
)
@pytest.mark.parametrize("stage", ["shares", "unmask", "answered"])
def test_a_client_begins_a_round_once(stage):
    """Its update with fresh noise would be one more release, and two shares of one round let a server cancel noise."""
    states, request = states_before("unmask" if stage == "answered" else stage)
    if stage == "answered":
        secure.reveal(request, states[0])
    for number in (7, 3):
        with pytest.raises(ProtocolError, match=f"asks for round {number}, and this client has begun round 7"):
            secure.make_keys(0, {"round": number}, states[0])
    secure.make_keys(0, {"round": 8}, states[0])


def test_a_client_that_refused_to_mask_reveals_nothing():
    """It has no list of senders, and is no survivor."""
    states, request = states_before("masked", threshold=3)
    with pytest.raises(ProtocolError, match="of too few"):
        secure.mask({**request, "senders": [], "sealed": []}, states[0], np.zeros(3, np.uint64))
    with pytest.raises(ProtocolError, match="sent no vector"):
        secure.reveal({"round": 7, "survivors": [1, 2, 3], "dropouts": []}, states[0])


def test_simulated_clients_leave_at_every_stage():
    """As often as asked for, before each of their answers alike."""
    left = dict.fromkeys(secure.STAGES, 0)
    for number in range(400):
        clients = DroppingOut(InMemory(10, lambda *_: {}), 0.4, 4)
        before = set(range(10))
        for stage in secure.STAGES:
            now = set(clients.ask({client: {"round": number, "task": stage} for client in before}))
            left[stage] += len(before - now)
            before = now
    assert all(320 < count < 480 for count in left.values())
