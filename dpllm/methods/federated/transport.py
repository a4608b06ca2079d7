"""The way of messages between the server and its clients: a protocol, and clients within one process.

Place in the flow: below the rounds. A message is a mapping from names to plain values, so every transport can carry it.
A client that does not answer is missing from the answers: it dropped out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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
