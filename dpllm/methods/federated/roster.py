"""The roster of a deployment: the N clients of the plan, and the node that answers for each of them.

Place in the flow: written before a run, and given to the server. It is public: numbers of clients, names of nodes and
their public keys. Who is connected changes nothing in it, so nobody can join a run or take another's place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from dpllm.config import ConfigError

FORMAT = 1


@dataclass(frozen=True)
class Member:
    """A node, and its clients.

    Attributes:
        name: of the node.
        key: with which it signs its answers, 64 hexadecimal digits.
        first: number of its first client.
        count: how many clients it answers for, each of them one unit.
    """

    name: str
    key: str
    first: int
    count: int

    @property
    def clients(self) -> range:
        """The numbers of its clients."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Roster:
    """The nodes of a run, in the order of their clients.

    Raises:
        ConfigError: the clients are not 0 to N - 1, each with one node, or two nodes have one name or key.
    """

    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        """Check that each client has one node, and each node one key."""
        firsts = list(accumulate((member.count for member in self.members), initial=0))
        if not self.members or any(
            member.count < 1 or member.first != first for member, first in zip(self.members, firsts, strict=False)
        ):
            raise ConfigError(
                "the clients of a roster must be 0 to N - 1 in the order of its nodes, each of them with one node: "
                "write it again (dpllm federation prepare)"
            )
        for what, found in (("name", self._all("name")), ("key", self._all("key"))):
            if len(set(found)) != len(found):
                raise ConfigError(f"two nodes of the roster have one {what}: each node needs its own")

    def __iter__(self) -> Iterator[Member]:
        """Return the nodes one after another."""
        return iter(self.members)

    @property
    def num_clients(self) -> int:
        """N."""
        return sum(member.count for member in self.members)

    @property
    def most_clients(self) -> int:
        """The most clients of one node."""
        return max(member.count for member in self.members)

    def member(self, name: str) -> Member:
        """Return a node.

        Raises:
            ConfigError: there is none of this name.
        """
        for member in self.members:
            if member.name == name:
                return member
        raise ConfigError(f"the roster has no node {name!r}, it has {', '.join(self._all('name'))}")

    def save(self, path: Path) -> None:
        """Write the roster."""
        values = {"format": FORMAT, "nodes": [asdict(member) for member in self.members]}
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read a roster.

        Raises:
            ConfigError: the file is not a roster.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError("format")
            members = tuple(_member(one) for one in values["nodes"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a roster: write it again (dpllm federation prepare)") from error
        return cls(members)

    def _all(self, field: str) -> list[str]:
        return [str(getattr(member, field)) for member in self.members]


def _member(values: Mapping[str, object]) -> Member:
    member = Member(**values)  # type: ignore[arg-type]  # checked here
    if type(member.first) is not int or type(member.count) is not int or len(bytes.fromhex(member.key)) != 32:
        raise ValueError("a node")
    return member
