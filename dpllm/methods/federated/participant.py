"""A client: it answers the server's requests with its bounded update, or with masked whole numbers and its noise.

Place in the flow: behind the transport. A client has its own copy of the plan and refuses requests under another one,
so no server can make it send an update with a larger norm or with less noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpllm.methods.federated import secure
from dpllm.methods.federated.distributed import DistributedStep
from dpllm.methods.federated.shares import Shares
from dpllm.methods.federated.transport import Content, State
from dpllm.privacy.plan import PrivacyPlan

RowsOf = Callable[[int], Sequence[Any]]


class Updates(Protocol):
    """Computes the update of a client, as `dpllm.methods.federated.local.LocalTraining` does."""

    def update(self, rows: Sequence[Any], start: NDArray[np.float32], number: int) -> NDArray[np.float64]:
        """Return the update, (d,), from the client's rows, the server's weights and the number of the round."""
        ...


class Participant:
    """Answers for the clients, each from its own rows.

    Guarantee: with distributed noise, no answer holds more of a client's records than its update of norm at most C with
    its share of noise, under masks. With a trusted server the update leaves the client as it is bounded, without noise.

    Args:
        plan: the plan that the clients agreed to.
        training: computes updates.
        rows_of: from a client's number to its rows.
    """

    def __init__(self, plan: PrivacyPlan, training: Updates, rows_of: RowsOf) -> None:
        """Take the numbers of the plan."""
        self._plan, self._training, self._rows_of = plan, training, rows_of
        self._shares = Shares.of(plan) if isinstance(plan.event, DistributedStep) else None

    def answer(self, client: int, request: Content, state: State) -> Content:
        """Return the answer to a request.

        Args:
            client: who answers.
            request: has ``task`` and ``round``.
            state: the client's memory.

        Raises:
            ProtocolError: the request is of another plan, another mode, a round that the plan does not have or that was
            answered, or not the next one of its round.
        """
        task = request["task"]
        if not 0 <= int(request["round"]) < self._plan.num_steps:
            raise secure.ProtocolError(
                f"the server asks for round {request['round']}, and the plan of this client has the rounds 0 to "
                f"{self._plan.num_steps - 1}, whose cost it agreed to. Do not answer this server"
            )
        if task == "update" and self._shares is None:
            return {"update": bounded(self._update(client, request), self._plan).astype("<f8").tobytes()}
        if task == "keys" and self._shares is not None:
            return secure.make_keys(client, request, state)
        if task == "shares" and self._shares is not None:
            self._require_threshold(request)
            return secure.share_secrets(request, state)
        if task == "masked" and self._shares is not None:
            vector = self._shares.with_noise(self._update(client, request))
            return {"masked": secure.mask(request, state, vector)}
        if task == "unmask" and self._shares is not None:
            return secure.reveal(request, state)
        raise secure.ProtocolError(
            f"the server asks for {task!r}, and the plan of this client has the noise {self._plan.noise.kind!r}: with "
            "'distributed' a client sends masked sums only, otherwise a bounded update. Give server and clients the "
            "same plan"
        )

    def _update(self, client: int, request: Content) -> NDArray[np.float64]:
        if request["plan"] != self._plan.hash:
            raise secure.ProtocolError(
                f"the server runs the plan {str(request['plan'])[:12]}, and this client agreed to "
                f"{self._plan.hash[:12]}: clip norm, noise or cohorts may differ. Give both the same plan"
            )
        start = np.frombuffer(request["weights"], "<f4").astype(np.float32)
        return self._training.update(self._rows_of(client), start, int(request["round"]))

    def _require_threshold(self, request: Content) -> None:
        event = self._plan.event
        assert isinstance(event, DistributedStep)
        if int(request["threshold"]) != event.min_batch_size:
            raise secure.ProtocolError(
                f"the server wants sums of {request['threshold']} clients, and by the plan {event.min_batch_size} or "
                "more add up: the noise of fewer is too small. Give both the same plan"
            )


def bounded(update: NDArray[np.float64], plan: PrivacyPlan) -> NDArray[np.float64]:
    """Return an update with a norm of at most C; zero where an entry is not finite.

    Args:
        update: (d,).
        plan: whose clip norm bounds it.
    """
    if not np.isfinite(update).all():
        return np.zeros_like(update)
    size = float(np.linalg.norm(update))
    return update if size <= (1 - 1e-12) * plan.clip_norm else update * ((1 - 1e-12) * plan.clip_norm / size)
