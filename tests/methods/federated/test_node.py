"""The clients' side of a deployment: it answers its server, under its plan, once in each round; errors stay with it."""

from __future__ import annotations

import numpy as np
import pytest

from dpllm.methods.federated.node import Answered
from dpllm.methods.federated.secure import ProtocolError
from dpllm.methods.federated.wire import ALL, ANSWER, REQUEST, Signer, check, digest, pack, unpack
from tests.methods.federated.deployed import Deployment
from tests.methods.federated.small import SIZE, plan_of

pytest.importorskip("cryptography")
WEIGHTS = np.zeros(SIZE, "<f4").tobytes()


@pytest.fixture
def made(tmp_path):
    """Three nodes of two clients each, with a trusted server."""
    plan = plan_of(6, 3, 4, noise_multiplier=1.0)
    return Deployment(tmp_path, plan, np.ones((6, SIZE)), (2, 2, 2))


def asked(made, parts, signer=None, node=None):
    """The contents of a node's answer; None: it gives none."""
    body = pack(parts)
    found = (node or made.node(0)).reply(body, (signer or made.signer).sign(REQUEST, b"", body))
    if found is None:
        return None
    check(made.signers[0].public, found[1], ANSWER, digest(body), found[0])
    return unpack(found[0])


def update(made, number, client=0, **changes):
    common = {"task": "update", "round": number, "plan": made.plan.hash, "weights": WEIGHTS, **changes}
    return {ALL: common, str(client): {}}


def test_only_the_server_is_answered(made):
    """Whoever reaches Flower's port can start a run there; without the server's key the nodes are silent."""
    assert asked(made, update(made, 0), Signer.new()) is None
    assert "a request without the server's signature is not answered" in made.lines
    assert asked(made, update(made, 0))["0"]["update"]


def test_a_round_is_answered_once_and_the_plans_rounds_only(made):
    """Replayed requests of the server have its signature; the memory is on the disk, also after a restart."""
    node = made.node(0)
    assert asked(made, update(made, 1), node=node)["0"]["update"]
    for number in (1, 0, 4, -1):
        assert asked(made, update(made, number), node=node) == {ALL: {"refused": "protocol"}}
    assert asked(made, update(made, 1)) == {ALL: {"refused": "protocol"}}  # a new process
    assert asked(made, update(made, 1, client=1))["1"]["update"]
    assert asked(made, update(made, 3))["0"]["update"]
    mixed = {**update(made, 3, client=1), "0": {"round": 3}}
    assert asked(made, mixed) == {ALL: {"refused": "protocol"}}  # one client of the request answered before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"plan": "0" * 64}, "this node agreed to"),
        ({"round": "1"}, "a request without the number of its round"),
        ({"round": True}, "a request without the number of its round"),
        ({"task": "keys"}, "the server asks for 'keys'"),
        ({"task": "masked"}, "the server asks for 'masked'"),
        ({"weights": b"1234"}, "counts as away: ValueError"),
    ],
)
def test_another_request_gets_no_update(made, change, line):
    """The server learns the kind of a refusal only; the node's own log has its text."""
    training = made.node(0)
    if "weights" in change:
        training._answer = lambda *_: (_ for _ in ()).throw(ValueError("the text of a record"))
    found = asked(made, update(made, 0, **change), node=training)
    assert found in ({}, {ALL: {"refused": "protocol"}}, {ALL: {"refused": "error"}})
    assert any(line in one for one in made.lines)
    assert b"record" not in pack(found)


def test_clients_of_other_nodes_are_not_answered_for(made):
    assert asked(made, update(made, 0, client=2)) == {ALL: {"refused": "protocol"}}
    assert any("client 2, which is not of this node" in line for line in made.lines)


def test_a_node_with_the_key_of_another_one_does_not_begin(made):
    with pytest.raises(ProtocolError, match="the roster has another key of node n0"):
        made.node(0, signer=made.signers[1])


def test_a_lost_memory_is_no_new_one(made, tmp_path):
    """A damaged file could let the server ask for more rounds than ε counts."""
    asked(made, update(made, 0))
    path = Answered(tmp_path / "n0", made.plan).path
    path.write_text("[1")
    with pytest.raises(ProtocolError, match="does not say which rounds were answered"):
        made.node(0)


def test_a_round_is_on_the_disk_before_it_is_answered(made, tmp_path):
    """A node that dies while it trains has answered."""
    node = made.node(0)
    node._answer = lambda *_: (_ for _ in ()).throw(OSError("gone"))
    assert asked(made, update(made, 0), node=node) == {}
    assert asked(made, update(made, 0)) == {ALL: {"refused": "protocol"}}


def test_a_client_that_fails_silences_no_other(made):
    """The records of client 0 decide whether its training fails; the sum may then lack this client's C, and no more."""
    node = made.node(0)
    whole = node._answer

    def fails(client, request, state):
        if client == 0:
            raise RuntimeError("the text of a record")
        return whole(client, request, state)

    node._answer = fails
    found = asked(made, {**update(made, 0), "1": {}}, node=node)
    assert set(found) == {"1"} and found["1"]["update"]
    assert "client 0 failed, and counts as away: RuntimeError: the text of a record" in made.lines
