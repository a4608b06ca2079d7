"""The probe of federated rounds for the audit: clients that send known updates, one of them far beyond the clip norm.

Place in the flow: beside the run. The round, its charge, clipping, rounding, shares of noise, secure aggregation and
the server's sum are those of the command; no model is trained and no record is read. Everybody is in each cohort, as
for a server that knows the cohorts, and as many clients drop out as the plan allows: the noise is that of the fewest
survivors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpllm.config import Recipe
from dpllm.data.rows import load_train_and_eval, unit_index_of
from dpllm.mechanism.catalogue import noise_of, spec_of
from dpllm.methods.federated.distributed import DistributedNoise, DistributedStep
from dpllm.methods.federated.local import SharedWeights
from dpllm.methods.federated.participant import Participant
from dpllm.methods.federated.rounds import Rounds, is_secure, require_federated
from dpllm.methods.federated.run import check_federated
from dpllm.methods.federated.transport import Clients, Content, InMemory
from dpllm.privacy.accounting import History
from dpllm.privacy.ledger import Ledger
from dpllm.privacy.plan import PrivacyPlan, make_plan

CANARY = "a client with an update far beyond the clip norm"
_EXCESS = 10.0  # norm of the canary's update, in clip norms
_SURVIVORS = 2
_ENTRIES = 4


def plan_of_recipe(recipe: Recipe) -> PrivacyPlan:
    """Return the plan of a recipe; of its records only the number of clients is used.

    Args:
        recipe: with the section ``federated``.

    Raises:
        ConfigError: it is not a recipe of a federated run.
    """
    args = check_federated(recipe)
    train, _ = load_train_and_eval(recipe.data, recipe.privacy)
    return make_plan(recipe.privacy, unit_index_of(train, recipe.privacy).num_units, args.max_steps)


def small_federation(plan: PrivacyPlan, rounds: int) -> PrivacyPlan:
    """Return the plan of a few clients that are all in every round, with clip norm, noise and dropouts of a plan.

    Args:
        plan: of a federated run.
        rounds: how many.

    Raises:
        ConfigError: it is not a plan of a federated run.
    """
    require_federated(plan)
    noise, count = noise_of(plan.noise), _SURVIVORS
    if isinstance(noise, DistributedNoise):
        noise = dataclasses.replace(noise, min_batch_size=_SURVIVORS)
        count = math.ceil(_SURVIVORS / (1 - noise.dropouts))
    return dataclasses.replace(
        plan,
        num_units=count,
        sampling_rate=1.0,
        expected_batch_size=count,
        max_batch_size=count,
        num_steps=rounds,
        num_steps_wanted=None,
        noise=spec_of(noise),
        target_epsilon=None,
    )


class RoundProbe:
    """Takes rounds with and without a canary.

    Args:
        plan: of `small_federation`.
        ledger: of this plan.

    Attributes:
        history: what one round costs somebody who knows the cohorts.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger) -> None:
        """Make the clients."""
        event = plan.event
        self.history: History = [(event.against_the_server if isinstance(event, DistributedStep) else event, 1)]
        self._updates = _Updates(plan)
        self._weight = torch.nn.Parameter(torch.zeros(_ENTRIES))
        model = torch.nn.ParameterList([self._weight])
        clients: Clients = InMemory(plan.num_units, Participant(plan, self._updates, lambda client: [client]).answer)
        if is_secure(plan):
            clients = _FewSurvivors(clients)
        optimizer = torch.optim.SGD([self._weight], lr=1.0)
        self._rounds = Rounds(plan, ledger, clients, SharedWeights(model, "freeze_a"), optimizer)
        self._divisor = plan.expected_batch_size

    def answer(self, there: bool) -> float:
        """Take a round, and return the released sum in the direction of the canary.

        Args:
            there: whether the canary is.

        Raises:
            ValueError: the round was given up, although enough clients survive.
        """
        self._updates.there = there
        with torch.no_grad():
            self._weight.zero_()
        if not self._rounds.take():
            raise ValueError("a round with enough survivors was given up")
        return float(self._weight.detach()[0]) * self._divisor


class _Updates:
    """In place of a training: client 0 is the canary, and the others move another entry by the clip norm."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self._clip_norm, self.there = plan.clip_norm, False

    def update(self, rows: Sequence[Any], start: NDArray[np.float32], number: int) -> NDArray[np.float64]:
        """Return the update of a client."""
        found = np.zeros(_ENTRIES)
        (client,) = rows
        if client:
            found[1] = self._clip_norm
        elif self.there:
            found[0] = _EXCESS * self._clip_norm
        return found


class _FewSurvivors:
    """Clients of which all but the first ones leave before they send their masked vector."""

    def __init__(self, clients: Clients) -> None:
        self._clients, self.num_clients = clients, clients.num_clients

    def ask(self, requests: Mapping[int, Content]) -> dict[int, Content]:
        """Ask the clients that are still there."""
        there = {one: request for one, request in requests.items() if request["task"] != "masked" or one < _SURVIVORS}
        return self._clients.ask(there)
