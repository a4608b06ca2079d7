"""The clients of a deployment as the server sees them: a fixed roster, of which some nodes are there.

Place in the flow: between the rounds and a transport that carries bytes to connected machines (`Line`). A cohort is
drawn over the roster before this module is asked. A client whose node is away does not answer: it dropped out. So who
is there changes neither N nor the sampling rate.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from dpllm.methods.federated.node import BEGINNINGS
from dpllm.methods.federated.roster import Member, Roster
from dpllm.methods.federated.rounds import Tally
from dpllm.methods.federated.secure import STAGES, ProtocolError
from dpllm.methods.federated.transport import Content
from dpllm.methods.federated.wire import (
    ALL,
    ANSWER,
    REQUEST,
    Parts,
    Signer,
    check,
    digest,
    pack,
    separate,
    shared,
    unpack,
)

Envelope = tuple[bytes, bytes]
"""A message and its signature."""
HELLO = "hello"
_HELLO_SECONDS = 20.0
_GREETINGS = 2
"""How often a machine that does not say who it is, or refuses, is greeted."""
_POLL_SECONDS = 0.5
_LAST_OF_A_CLIENT = ("update", "masked")
_BYTES_OF = {"mask_key": 32, "seal_key": 32}


class Line(Protocol):
    """Carries envelopes to machines that are connected now, and their answers back."""

    def connected(self) -> Iterable[int]:
        """Return the addresses of the machines."""
        ...

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> dict[int, Envelope]:
        """Send each machine its envelope; return the first answer of each that came in time.

        Args:
            envelopes: address to envelope.
            seconds: how long to wait.
        """
        ...


class NodeClients:
    """The N clients of a roster, asked through their nodes.

    Guarantee: a request goes to the node of its client only, and an answer counts once, for a client that was asked,
    with the signature of its node over this request. So late answers, answers of earlier rounds, second answers and
    those of machines outside the roster count nothing.

    Attributes:
        tally: who answered so far.

    Args:
        line: to the machines.
        roster: the clients.
        signer: the server's key.
        plan_hash: of the run.
        seconds: how long a round waits for each answer.
        say: prints a line for the operator.
        keep: a folder for the answers as they came in, for people to look at. None: they are not kept.
    """

    def __init__(
        self,
        line: Line,
        roster: Roster,
        signer: Signer,
        plan_hash: str,
        seconds: float,
        say: Callable[[str], None] = print,
        keep: Path | None = None,
    ) -> None:
        """Begin without any node."""
        self._line, self._roster, self._signer, self._plan = line, roster, signer, plan_hash
        self._seconds, self._say, self._keep = seconds, say, keep
        self.tally = Tally()
        self._places: dict[str, int] = {}
        self._greeted: Counter[int] = Counter()  # how often a machine was, or `_GREETINGS` where it needs no more
        self._refused: set[tuple[str, str]] = set()

    @property
    def num_clients(self) -> int:
        """N of the roster, whoever is there."""
        return self._roster.num_clients

    def present(self) -> dict[str, int]:
        """Return the nodes that are connected and proved who they are, with their addresses."""
        connected = set(self._line.connected())
        self._greeted = Counter({place: self._greeted[place] for place in connected})
        self._greet({place for place, times in self._greeted.items() if times < _GREETINGS})
        self._places = {name: place for name, place in self._places.items() if place in connected}
        return dict(self._places)

    def wait_for(self, share: float, seconds: float) -> bool:
        """Wait until this share of the clients is there; return whether it is. Nothing is drawn meanwhile.

        Args:
            share: of N, in [0, 1].
            seconds: how long to wait.
        """
        end = time.monotonic() + seconds
        while True:
            there = self.present()
            count = sum(member.count for member in self._roster if member.name in there)
            if count >= share * self.num_clients:
                return True
            if time.monotonic() >= end:
                away = [member.name for member in self._roster if member.name not in there]
                self._say(f"{count} of {self.num_clients} clients are there; away: {', '.join(away)}")
                return False
            time.sleep(_POLL_SECONDS)

    def ask(self, requests: Mapping[int, Content]) -> dict[int, Content]:
        """Send the requests to the nodes that are there; return the answers that are signed and well-formed."""
        there = self.present() if requests else {}
        parcels: dict[int, tuple[Member, bytes]] = {}
        for member in self._roster:
            own = {client: one for client, one in requests.items() if client in member.clients}
            if own and member.name in there:
                parts = shared(own)
                parts[ALL]["plan"] = self._plan
                parcels[there[member.name]] = (member, pack(parts))
        answers: dict[int, Content] = {}
        for member, parts in self._exchange(parcels, self._seconds):
            self._refusal(member, parts)
            for client, answer in _numbered(parts).items():
                if client in requests and client in member.clients and well_formed(requests[client], answer):
                    answers[client] = answer
        self.tally.asked += sum(request["task"] in BEGINNINGS for request in requests.values())
        self.tally.answered += sum(requests[client]["task"] in _LAST_OF_A_CLIENT for client in answers)
        for member, _ in parcels.values():
            drawn = [client for client in requests if client in member.clients]
            self.tally.silences += len(drawn) > 1 and not any(client in answers for client in drawn)
        self._keep_answers(requests, answers)
        return answers

    def _greet(self, places: set[int]) -> None:
        """Ask new machines who they are."""
        parts = {ALL: {"task": HELLO, "plan": self._plan, "challenge": secrets.token_bytes(32)}}
        asked = {place: (None, pack(parts)) for place in places}
        answered = self._signed(asked, _HELLO_SECONDS) if places else []
        self._greeted.update(places)  # one that stays silent delays the rounds no longer
        for place, member in answered:
            self._greeted[place] = _GREETINGS
            if member is None:
                self._say("a machine that is not in the roster is connected: it is not asked")
            else:
                self._places[member.name] = place
                self._say(f"node {member.name} is there, with {member.count} clients")

    def _signed(self, asked: Mapping[int, tuple[None, bytes]], seconds: float) -> list[tuple[int, Member | None]]:
        """Return the machines that answered a greeting, each with the node that it is; None: no node of the roster."""
        found: list[tuple[int, Member | None]] = []
        for place, answer in self._line.exchange(self._sealed(asked), seconds).items():
            if place not in asked:
                continue
            request = digest(asked[place][1])
            member = next((one for one in self._roster if _is_signed(one, request, answer)), None)
            if member is not None and self._refusal(member, _parts(answer)):
                continue
            found.append((place, member))
        return found

    def _exchange(self, parcels: Mapping[int, tuple[Member, bytes]], seconds: float) -> list[tuple[Member, Parts]]:
        """Return the answers with the signatures of their nodes."""
        if not parcels:
            return []
        found = []
        for place, answer in self._line.exchange(self._sealed(parcels), seconds).items():
            if place in parcels and _is_signed(parcels[place][0], digest(parcels[place][1]), answer):
                found.append((parcels[place][0], _parts(answer)))
        return found

    def _sealed(self, parcels: Mapping[int, tuple[object, bytes]]) -> dict[int, Envelope]:
        return {place: (body, self._signer.sign(REQUEST, b"", body)) for place, (_, body) in parcels.items()}

    def _refusal(self, member: Member, parts: Parts) -> bool:
        """Print once that a node refuses; return whether it does."""
        reason = str(parts.get(ALL, {}).get("refused", ""))[:40]
        if reason and (member.name, reason) not in self._refused:
            self._refused.add((member.name, reason))
            self._say(f"node {member.name} refuses ({reason}); its own log has the reason")
        return bool(reason)

    def _keep_answers(self, requests: Mapping[int, Content], answers: Mapping[int, Content]) -> None:
        """Write the answers as the server got them."""
        if self._keep is None:
            return
        for client, answer in answers.items():
            name = f"round-{requests[client]['round']}-{requests[client]['task']}-client-{client}.bin"
            (self._keep / name).write_bytes(pack({str(client): answer}))


def _is_signed(member: Member, request: bytes, answer: Envelope) -> bool:
    try:
        check(member.key, answer[1], ANSWER, request, answer[0])
    except ProtocolError:
        return False
    return True


def _parts(answer: Envelope) -> Parts:
    """Return the contents of a signed answer; none where it is malformed."""
    try:
        return unpack(answer[0])
    except ProtocolError:
        return {}


def _numbered(parts: Parts) -> dict[int, Content]:
    try:
        return separate(parts)
    except ProtocolError:
        return {}


def well_formed(request: Content, answer: Content) -> bool:
    """Return whether an answer has the values of its task, so that the rounds can use it; otherwise it counts nothing.

    Args:
        request: what was asked.
        answer: what came back.
    """
    task = request["task"]
    if task == "update":
        return _is_numbers(answer.get("update"))
    if task not in STAGES:
        return False
    if task == "keys":
        return all(type(answer.get(name)) is bytes and len(answer[name]) == size for name, size in _BYTES_OF.items())
    if task == "shares":
        others, sealed = answer.get("clients"), answer.get("sealed")
        return _all(others, int) and _all(sealed, bytes) and len(others or []) == len(sealed or [])
    if task == "masked":
        return _is_numbers(answer.get("masked"))
    return all(
        _all(answer.get(name), bytes) and len(answer[name]) == len(request[listed])
        for name, listed in (("seeds", "survivors"), ("keys", "dropouts"))
    )


def _is_numbers(value: object) -> bool:
    return type(value) is bytes and len(value) % 8 == 0


def _all(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)
