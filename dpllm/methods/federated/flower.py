"""Flower as the way of messages: the server's line through a Flower grid, and a node's loop at a SuperLink.

Place in the flow: below `nodes` at the server and around `node` at the clients. Flower carries signed bytes and knows
which machines are connected; sampling, noise and secure aggregation are dpllm's.

A node speaks Flower's Fleet protocol itself. Flower's own `flower-supernode` would install and execute the program that
a server sends, so that no check of a client would bind the server; it would start a process for each message, and send
the text of an error to the server. The module that speaks the protocol (`flwr.supernode.fleet_http_connection`) is not
part of Flower's public interface, so pyproject.toml admits one minor version of Flower.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dpllm.config import ConfigError
from dpllm.config.extras import require
from dpllm.methods.federated.nodes import Envelope

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

Reply = Callable[[bytes, bytes], Envelope | None]
"""From a request and its signature to the signed answer; None: no answer."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Environment of every Flower process: nothing is reported to Flower's makers."""
_RECORD, _BODY, _SIGNATURE = "dpllm", "body", "signature"
_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 60.0


def require_flower() -> None:
    """Make sure that Flower is installed.

    Raises:
        ConfigError: it is not.
    """
    require("flower", "a federated run over several machines (dpllm federation)")


class FlowerLine:
    """Carries envelopes to the machines that are connected to a SuperLink.

    Args:
        grid: of the ServerApp.
    """

    def __init__(self, grid: Grid) -> None:
        """Keep the grid."""
        self._grid = grid

    def connected(self) -> Iterable[int]:
        """Return the ids of the nodes whose heartbeat is heard."""
        return list(self._grid.get_node_ids())

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> dict[int, Envelope]:
        """Send each node its envelope; return the first answer of each that came in time.

        Args:
            envelopes: id of a node to its envelope.
            seconds: how long to wait.
        """
        from flwr.app import Message

        places = list(envelopes)
        messages = [Message(record_of(envelopes[place]), place, "query", ttl=seconds) for place in places]
        numbers = self._grid.push_messages(messages)
        waiting = {number: place for number, place in zip(numbers, places, strict=False) if number}
        found: dict[int, Envelope] = {}
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            for reply in self._grid.pull_messages(list(waiting)):
                place = waiting.pop(reply.metadata.reply_to_message_id, None)
                envelope = envelope_of(reply)
                if envelope is not None and place is not None and place == reply.metadata.src_node_id:
                    found[place] = envelope
            if waiting:
                time.sleep(_POLL_SECONDS)
        return found


def record_of(envelope: Envelope) -> RecordDict:
    """Return an envelope as Flower's record."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({_RECORD: ConfigRecord({_BODY: envelope[0], _SIGNATURE: envelope[1]})})


def envelope_of(message: Message) -> Envelope | None:
    """Return the envelope of a message; None: it holds none."""
    if message.has_error() or _RECORD not in message.content:
        return None
    record: Any = message.content[_RECORD]
    if not hasattr(record, "get"):
        return None
    body, signature = record.get(_BODY), record.get(_SIGNATURE)
    return (body, signature) if type(body) is bytes and type(signature) is bytes else None


def answer_forever(
    address: str, root: bytes, reply: Reply, say: Callable[[str], None] = print, stop: threading.Event | None = None
) -> None:
    """Answer the requests that come through a SuperLink, until ``stop`` is set or Ctrl-C.

    A connection that is lost is made again. TLS is needed, with a certificate of the given authority.

    Args:
        address: host:port of the SuperLink.
        root: certificate of the authority, PEM.
        reply: answers.
        say: prints a line for the operator of the node.
        stop: ends the loop. None: only Ctrl-C does.

    Raises:
        ConfigError: there is no connection within a minute, or the SuperLink's certificate is of another authority.
    """
    ends, connected = stop or threading.Event(), False
    while not ends.is_set():
        try:
            problem = _connect_once(address, root, reply, say, ends)
        except ConfigError:
            if not connected:
                raise
            say(f"{address} is gone: this node ends")
            return
        if problem is None:
            return
        connected = True
        say(f"the connection to {address} was lost ({problem}): connecting again")
        ends.wait(5.0)


def _connect_once(
    address: str, root: bytes, reply: Reply, say: Callable[[str], None], ends: threading.Event
) -> str | None:
    """Connect and answer; return the problem that ended the connection, or None when the loop was told to end."""
    from flwr.supernode.fleet_http_connection import http_request_response

    problem: str | None = None
    connected = False
    try:
        with http_request_response(address, False, root, None, None, _CONNECT_SECONDS) as (number, *ways):
            connected = True
            say(f"connected to {address} with TLS, as node {number}")
            try:
                _answer(_Ways(*ways), reply, say, ends)
            except Exception as error:  # Flower would only log it
                problem = f"{type(error).__name__}: {error}"
    except SystemExit as error:  # Flower's way to say that there is no connection; it printed the reason
        if not connected:
            raise ConfigError(
                f"no connection to {address} (the line above has the reason): check the address, and that the "
                "certificate of the authority in this node's folder is that of the server"
            ) from error
        problem = "Flower ended it"
    return problem


class _Ways:
    """The callbacks of Flower's connection.

    Args:
        receive, send, get_run, get_fab, pull, push, confirm: as `http_request_response` gives them.
    """

    def __init__(self, receive: Any, send: Any, get_run: Any, get_fab: Any, pull: Any, push: Any, confirm: Any) -> None:
        """Keep those that a node uses: the run's program (get_fab) is never fetched."""
        self.receive, self.send, self.pull, self.push, self.confirm = receive, send, pull, push, confirm


def _answer(ways: _Ways, reply: Reply, say: Callable[[str], None], ends: threading.Event) -> None:
    from flwr.app import Message
    from flwr.supercore.inflatable import inflatable_object as objects
    from flwr.supercore.inflatable import inflatable_utils as utils

    while not ends.is_set():
        received = ways.receive()
        if received is None:
            ends.wait(_POLL_SECONDS)
            continue
        head, tree = received
        run, number = head.metadata.run_id, head.metadata.message_id
        names = [part.object_id for part in objects.iterate_object_tree(tree)]
        contents = utils.pull_objects(names, pull_object_fn=lambda name, run=run: ways.pull(run, name))
        ways.confirm(run, number)
        request = utils.inflate_object_from_contents(number, contents)
        if not isinstance(request, Message):
            continue
        request.metadata.__dict__["_message_id"] = number  # as Flower's own node does: it is not part of the bytes
        envelope = envelope_of(request)
        answer = None if envelope is None else reply(*envelope)
        if answer is None:
            continue
        try:
            message = Message(record_of(answer), reply_to=request)
            message.metadata.__dict__["_message_id"] = message.object_id
            wanted, session = ways.send(message, objects.get_object_tree(message), 0.0)
            utils.push_objects(
                objects.get_all_nested_objects(message),
                lambda name, content, run=run, session=session: ways.push(run, session, name, content),
                object_ids_to_push=wanted,
            )
        except Exception as error:  # the server counts this node's clients as dropouts; the next request may succeed
            say(f"an answer was not delivered, perhaps it was too late ({type(error).__name__}: {error})")
