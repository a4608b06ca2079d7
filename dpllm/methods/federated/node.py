"""A node of a deployment: it holds the records of its clients and answers the server for them.

Place in the flow: between a transport and `participant`, on the machine of the records. A node trusts its own copy of
the plan and the server's public key, nothing else that arrives: it runs no code of the server, answers each round once,
at most as many rounds as the plan has, and says of an error only its kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from dpllm.methods.federated.roster import Member
from dpllm.methods.federated.secure import ProtocolError
from dpllm.methods.federated.transport import Answer, Content, State
from dpllm.methods.federated.wire import (
    ALL,
    ANSWER,
    REQUEST,
    NotTrustedError,
    Parts,
    Signer,
    check,
    digest,
    pack,
    separate,
    unpack,
)
from dpllm.privacy.plan import PrivacyPlan

BEGINNINGS = ("update", "keys")
"""The first task of a round: with a trusted server, with secure aggregation."""


class Answered:
    """The last round that each client of a node answered, in a file that outlives the node.

    Guarantee: a client answers a round once, and no more rounds than its plan has, also when server or node begin
    again. A round is on the disk before it is answered.

    Args:
        folder: of the node.
        plan: that the clients agreed to.

    Raises:
        ProtocolError: the file cannot be read.
    """

    def __init__(self, folder: Path, plan: PrivacyPlan) -> None:
        """Read the file, if there is one."""
        self._path, self._num_steps = folder / f"answered-{plan.hash[:16]}.json", plan.num_steps
        self._last: dict[str, int] = {}
        if self._path.exists():
            try:
                self._last = {str(name): int(last) for name, last in json.loads(self._path.read_text()).items()}
            except (ValueError, AttributeError, TypeError) as error:
                raise ProtocolError(
                    f"{self._path} does not say which rounds were answered: restore it from a copy. Without it a "
                    "server could ask for more rounds than ε counts"
                ) from error

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def begin(self, rounds: Mapping[int, int]) -> None:
        """Note that clients answer a round.

        Args:
            rounds: client to the number of its round.

        Raises:
            ProtocolError: one of them answered it or a later one before, or the plan has no such round.
        """
        for client, number in rounds.items():
            if not 0 <= number < self._num_steps:
                raise ProtocolError(
                    f"the plan has the rounds 0 to {self._num_steps - 1}, and the server asks for {number}"
                )
            last = self._last.get(str(client), -1)
            if last >= number:
                raise ProtocolError(
                    f"the server asks for round {number}, and client {client} answered round {last} of this plan "
                    "before. A second run of a plan is a second cost for the same people: prepare it with a folder of "
                    "its own, and count both in one budget file"
                )
        self._last.update({str(client): number for client, number in rounds.items()})
        new = self._path.with_suffix(".new")
        with new.open("w", encoding="ascii") as file:
            json.dump(self._last, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


class Node:
    """Answers the server's requests for the clients of one node.

    Guarantee: only requests with the server's signature, under the own plan, for own clients are answered. Nothing of
    an error but its kind leaves the node. A client that fails is away, and changes the answer of no other client.

    Args:
        member: this node in the roster.
        plan: that the clients agreed to.
        answer: computes the answer of a client (`dpllm.methods.federated.participant.Participant.answer`).
        signer: the node's key.
        server: the server's public key.
        answered: the rounds before.
        say: prints a line for the operator of the node.
    """

    def __init__(
        self,
        member: Member,
        plan: PrivacyPlan,
        answer: Answer,
        signer: Signer,
        server: str,
        answered: Answered,
        say: Callable[[str], None] = print,
    ) -> None:
        """Begin with empty memories of the clients."""
        self._member, self._plan, self._answer, self._signer = member, plan, answer, signer
        self._server, self._answered, self._say = server, answered, say
        self._states: dict[int, State] = {}
        if signer.public != member.key:
            raise ProtocolError(
                f"the roster has another key of node {member.name} than this folder: take the folder that was made for "
                "this node"
            )

    def reply(self, message: bytes, signature: bytes) -> tuple[bytes, bytes] | None:
        """Return the signed answer to a request; None: the request is not from the server, and gets none.

        Args:
            message: the request.
            signature: of it.
        """
        try:
            check(self._server, signature, REQUEST, b"", message)
        except NotTrustedError:
            self._say("a request without the server's signature is not answered")
            return None
        try:
            parts = self._answers(unpack(message))
        except ProtocolError as error:
            self._say(f"refused: {error}")
            parts = {ALL: {"refused": "protocol"}}
        except Exception as error:  # its text may hold records, and stays here
            self._say(f"failed: {type(error).__name__}: {error}")
            parts = {ALL: {"refused": "error"}}
        body = pack(parts)
        return body, self._signer.sign(ANSWER, digest(message), body)

    def _answers(self, parts: Parts) -> Parts:
        common = parts.get(ALL, {})
        if common.get("plan") != self._plan.hash:
            raise ProtocolError(
                f"the server runs the plan {str(common.get('plan'))[:12]}, and this node agreed to "
                f"{self._plan.hash[:12]}: give both the same plan"
            )
        if common.get("task") == "hello":
            return {ALL: {"node": self._member.name}}
        requests = separate(parts)
        strangers = sorted(set(requests) - set(self._member.clients))
        if strangers:
            raise ProtocolError(f"the server asks for client {strangers[0]}, which is not of this node")
        beginning = {client: _round(one) for client, one in requests.items() if one.get("task") in BEGINNINGS}
        if beginning:
            self._answered.begin(beginning)
        return {str(client): answer for client, request in requests.items() if (answer := self._one(client, request))}

    def _one(self, client: int, request: Content) -> Content:
        """Return the answer of a client; an empty one where it refuses or fails, as if it were away.

        A failure may depend on the records of this client, so it must not silence the others of the node: their sum
        would move by more than one client's C.
        """
        try:
            return self._answer(client, request, self._states.setdefault(client, {}))
        except ProtocolError as error:
            self._say(f"client {client} refuses: {error}")
        except Exception as error:  # its text may hold records, and stays here
            self._say(f"client {client} failed, and counts as away: {type(error).__name__}: {error}")
        return {}


def _round(request: Content) -> int:
    number = request.get("round")
    if type(number) is not int:
        raise ProtocolError("a request without the number of its round")
    return number
