"""A deployment in one process: nodes that answer through bytes and signatures, and a line that can lose them."""

from __future__ import annotations

import torch

from dpllm.methods.federated.local import SharedWeights
from dpllm.methods.federated.node import Answered, Node
from dpllm.methods.federated.nodes import NodeClients
from dpllm.methods.federated.participant import Participant
from dpllm.methods.federated.roster import Member, Roster
from dpllm.methods.federated.rounds import Rounds
from dpllm.methods.federated.wire import Signer
from tests.methods.federated.small import Charged, Sends, Vector


class Wire:
    """A line to nodes of this process: address to node. ``away`` are not connected; ``log`` has what passed."""

    def __init__(self, nodes):
        self.nodes, self.away, self.log, self.deaf = dict(nodes), set(), [], lambda place, body: False

    def connected(self):
        return [place for place in self.nodes if place not in self.away]

    def exchange(self, envelopes, seconds):
        found = {}
        for place, envelope in envelopes.items():
            if place in self.away or self.deaf(place, envelope[0]):
                continue
            answer = self.nodes[place].reply(*envelope)
            self.log.append((place, envelope, answer))
            if answer is not None:
                found[place] = answer
        return found


class Deployment:
    """A server and its nodes, each with its clients; the training of small.py."""

    def __init__(self, folder, plan, update_UD, counts=(1,) * 0, node_plan=None):
        self.plan, self.lines, self.signer = plan, [], Signer.new()
        self.signers = [Signer.new() for _ in counts]
        members, first = [], 0
        for number, count in enumerate(counts):
            members.append(Member(f"n{number}", self.signers[number].public, first, count))
            first += count
        self.roster, self.folder, self.update_UD = Roster(tuple(members)), folder, update_UD
        self.node_plan = node_plan or plan
        self.wire = Wire({100 + number: self.node(number) for number in range(len(counts))})
        self.clients = self.connect()

    def node(self, number, signer=None, server=None):
        folder = self.folder / f"n{number}"
        folder.mkdir(exist_ok=True)
        training = Sends(self.update_UD)
        answer = Participant(self.node_plan, training, lambda client: client).answer
        member, server = self.roster.members[number], server or self.signer.public
        answered = Answered(folder, self.node_plan)
        return Node(member, self.node_plan, answer, signer or self.signers[number], server, answered, self.lines.append)

    def connect(self, **changes):
        """A server that begins, or begins again."""
        plan_hash = changes.pop("plan_hash", self.plan.hash)
        return NodeClients(self.wire, self.roster, self.signer, plan_hash, 1.0, self.lines.append, **changes)

    def rounds(self):
        model = Vector(self.update_UD.shape[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return Rounds(self.plan, Charged(), self.clients, SharedWeights(model, "freeze_a"), optimizer), model
