"""The server's side of a deployment: a fixed roster, whoever is connected; an answer counts once, from its node."""

from __future__ import annotations

import numpy as np
import pytest

from dpllm.config import ConfigError
from dpllm.methods.federated.nodes import well_formed
from dpllm.methods.federated.roster import Member, Roster
from dpllm.methods.federated.wire import ALL, ANSWER, Signer, digest, pack, unpack
from tests.methods.federated.deployed import Deployment
from tests.methods.federated.small import SIZE, plan_of

pytest.importorskip("cryptography")


def deployment(tmp_path, batch=12, counts=(4, 4, 4), rounds=4):
    number = sum(counts)
    plan = plan_of(number, batch, rounds, noise_multiplier=0.0, max_batch_size=number)
    update = np.tile(np.full(SIZE, 0.5 / np.sqrt(SIZE)), (number, 1))
    return Deployment(tmp_path, plan, update, counts)


def secure_deployment(tmp_path, fewest=4):
    noise = {"kind": "distributed", "dropouts": 0.5, "min_batch_size": fewest}
    plan = plan_of(12, 12, 4, True, noise_multiplier=0.001, max_batch_size=12, noise=noise)
    update = np.tile(np.full(SIZE, 0.5 / np.sqrt(SIZE)), (12, 1))
    return Deployment(tmp_path, plan, update, (4, 4, 4))


def answered(made):
    """How many of the 12 clients a round counted, from the weights."""
    rounds, model = made.rounds()
    moved = rounds.take()
    return round(float(model.weight.detach().numpy().sum()) * 12 / (0.5 * np.sqrt(SIZE))), moved


@pytest.mark.parametrize("secure", [False, True])
def test_all_nodes_together_give_the_sum(tmp_path, secure):
    """Through bytes and signatures, as in memory."""
    made = secure_deployment(tmp_path) if secure else deployment(tmp_path)
    assert answered(made) == (12, True)


@pytest.mark.parametrize("task", ["keys", "shares", "masked", "unmask"])
def test_a_node_that_leaves_in_any_phase_is_a_dropout(tmp_path, task):
    """Its clients count nothing, or, once their masked sum is there, all; the others' noise is enough."""
    made = secure_deployment(tmp_path)
    made.wire.deaf = lambda place, body: place == 101 and unpack(body)[ALL].get("task") == task
    assert answered(made) == (12 if task == "unmask" else 8, True)


def test_with_too_few_survivors_a_round_is_given_up(tmp_path):
    made = secure_deployment(tmp_path, fewest=6)
    made.wire.deaf = lambda place, body: place != 100 and unpack(body)[ALL].get("task") == "masked"
    assert answered(made) == (0, False)


def test_who_is_there_changes_neither_the_number_of_clients_nor_the_cohort(tmp_path):
    """A third of the clients is away: the server asks a third less, and does not draw others in their place."""
    made = deployment(tmp_path, batch=6, counts=(20, 20, 20), rounds=100)
    made.wire.away = {102}
    rounds, _ = made.rounds()
    asked, whole = [], made.clients.ask
    made.clients.ask = lambda requests: asked.append(set(requests)) or whole(requests)
    for _ in range(100):
        rounds.take()
    drawn = np.array([[client in cohort for client in range(60)] for cohort in asked])
    assert made.clients.num_clients == 60
    assert abs(drawn.mean() - 0.1) < 5 * np.sqrt(0.09 / drawn.size)  # with the 40 that are there it would be 0.15
    assert abs(drawn[:, 40:].mean() - 0.1) < 5 * np.sqrt(0.09 / (drawn.size / 3))
    assert {place for place, *_ in made.wire.log} == {100, 101}


def test_a_node_that_comes_late_or_again_is_asked_from_then_on(tmp_path):
    """With a new address, as after its own restart; it answers no round a second time."""
    made = deployment(tmp_path)
    made.wire.away = {101}
    assert not made.clients.wait_for(1.0, 0.0) and "8 of 12 clients are there; away: n1" in made.lines
    assert made.clients.wait_for(0.5, 0.0)
    made.wire.nodes[201] = made.node(1)
    assert made.clients.wait_for(1.0, 0.0)
    assert answered(made) == (12, True)
    assert {place for place, (body, _), _ in made.wire.log if unpack(body)[ALL]["task"] == "update"} == {100, 102, 201}


def test_a_machine_outside_the_roster_is_never_asked(tmp_path):
    """N is that of the plan, however many are connected; nor is one that takes the name of a node."""
    made = deployment(tmp_path)
    made.wire.nodes[103] = Stranger(made.node(0), Signer.new())
    assert answered(made) == (12, True)
    assert {unpack(body)[ALL]["task"] for place, (body, _), _ in made.wire.log if place == 103} == {"hello"}
    assert any("not in the roster" in line for line in made.lines)


class Stranger:
    """A machine that answers for a node with another key; or, with the key, for clients of other nodes."""

    def __init__(self, node, signer, parts=None):
        self.node, self.signer, self.parts = node, signer, parts

    def reply(self, body, signature):
        answer = self.node.reply(body, signature)[0]
        if self.parts is not None and unpack(body)[ALL]["task"] != "hello":
            answer = pack(self.parts)
        return answer, self.signer.sign(ANSWER, digest(body), answer)


def test_a_node_answers_for_its_own_clients_only(tmp_path):
    """Answers for others', for those that were not drawn, and malformed ones count nothing."""
    made = deployment(tmp_path)
    update = np.full(SIZE, 0.5 / np.sqrt(SIZE)).tobytes()
    parts = {"0": {"update": update}, "5": {"update": update}, "77": {"update": update}, "1": {"update": "text"}}
    made.wire.nodes[100] = Stranger(made.node(0), made.signers[0], {**parts, "2": {"update": b"abc"}, "3": {}})
    assert answered(made) == (9, True)


def test_an_answer_of_an_earlier_request_counts_nothing(tmp_path):
    """A replayed answer has the signature of its node, over another request."""
    made = deployment(tmp_path)
    rounds, model = made.rounds()
    rounds.take()
    before = model.weight.detach().clone()
    old = {place: answer for place, (body, _), answer in made.wire.log if unpack(body)[ALL]["task"] == "update"}
    made.wire.exchange = lambda envelopes, seconds: old
    rounds.take()
    assert bool((model.weight == before).all())


def test_a_foreign_plan_is_refused_by_the_node(tmp_path):
    """By name in its own log; the server learns only that it refuses."""
    made = deployment(tmp_path)
    made.clients = made.connect(plan_hash="0" * 64)
    assert not made.clients.wait_for(0.1, 0.0)
    assert any("this node agreed to" in line for line in made.lines)
    assert "node n0 refuses (protocol); its own log has the reason" in made.lines


def test_a_server_that_begins_again_gets_no_second_answer(tmp_path):
    """The nodes remember the rounds of a plan, also after their own restart; the remedy is a second, counted plan."""
    made = deployment(tmp_path)
    assert answered(made) == (12, True)
    made.wire.nodes = {100 + number: made.node(number) for number in range(3)}
    made.clients = made.connect()
    assert answered(made) == (0, True)
    assert any("A second run of a plan is a second cost" in line for line in made.lines)


def test_what_the_server_keeps_has_no_update_under_secure_aggregation(tmp_path):
    """Masked numbers are uniform, and far from the update that they hide: here each entry is the same."""
    keep = tmp_path / "answers"
    keep.mkdir()
    made = secure_deployment(tmp_path)
    made.clients = made.connect(keep=keep)
    assert answered(made) == (12, True)
    seen = [unpack(path.read_bytes()) for path in sorted(keep.glob("*-masked-*"))]
    assert len(seen) == 12
    data = np.frombuffer(b"".join(next(iter(parts.values()))["masked"] for parts in seen), np.uint8)
    counts = np.bincount(data, minlength=256)
    expected = data.size / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 6 * np.sqrt(2 * 255)
    assert not list(keep.glob("*-update-*"))


@pytest.mark.parametrize(
    ("request_", "answer", "fits"),
    [
        ({"task": "update"}, {"update": bytes(16)}, True),
        ({"task": "update"}, {"update": bytes(15)}, False),
        ({"task": "update"}, {}, False),
        ({"task": "keys"}, {"mask_key": bytes(32), "seal_key": bytes(32)}, True),
        ({"task": "keys"}, {"mask_key": bytes(32), "seal_key": bytes(31)}, False),
        ({"task": "shares"}, {"clients": [1], "sealed": [b"a"]}, True),
        ({"task": "shares"}, {"clients": [1, 2], "sealed": [b"a"]}, False),
        ({"task": "shares"}, {"clients": ["1"], "sealed": [b"a"]}, False),
        ({"task": "unmask", "survivors": [1], "dropouts": []}, {"seeds": [b"s"], "keys": []}, True),
        ({"task": "unmask", "survivors": [1], "dropouts": []}, {"seeds": [], "keys": []}, False),
        ({"task": "other"}, {"update": bytes(16)}, False),
    ],
)
def test_only_answers_that_fit_their_task_reach_the_rounds(request_, answer, fits):
    assert well_formed(request_, answer) is fits


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([], "must be 0 to N - 1"),
        ([Member("a", "1" * 64, 0, 2), Member("b", "2" * 64, 1, 2)], "must be 0 to N - 1"),
        ([Member("a", "1" * 64, 1, 2)], "must be 0 to N - 1"),
        ([Member("a", "1" * 64, 0, 0)], "must be 0 to N - 1"),
        ([Member("a", "1" * 64, 0, 1), Member("b", "1" * 64, 1, 1)], "have one key"),
        ([Member("a", "1" * 64, 0, 1), Member("a", "2" * 64, 1, 1)], "have one name"),
    ],
)
def test_each_client_has_one_node_and_each_node_its_key(members, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        Roster(tuple(members))


def test_a_roster_is_read_as_it_was_written(tmp_path):
    assert Roster((Member("a", "1" * 64, 0, 10**12),)).num_clients == 10**12  # read in no time
    path, roster = tmp_path / "roster.json", Roster((Member("a", "1" * 64, 0, 3), Member("b", "2" * 64, 3, 1)))
    roster.save(path)
    assert Roster.load(path) == roster and roster.num_clients == 4 and roster.most_clients == 3
    for text in ("", "[]", '{"format": 2}', '{"format": 1, "nodes": [{"name": "a"}]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a roster"):
            Roster.load(path)
