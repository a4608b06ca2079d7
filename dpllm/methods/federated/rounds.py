"""The rounds of a federated run at the server: draw, charge, ask, add up, add noise, update.

Place in the flow: between the plan and ledger of a run and its clients. A round is a step of the plan. It is charged
before a client is asked, whether or not it is given up later.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.engines.processes import Processes
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.parts import Spec
from dpllm.mechanism.sampling import secret_rng
from dpllm.methods.federated.distributed import DistributedStep
from dpllm.methods.federated.local import SharedWeights
from dpllm.methods.federated.participant import bounded
from dpllm.methods.federated.secure import STAGES, secure_sum
from dpllm.methods.federated.shares import Shares
from dpllm.methods.federated.transport import Clients, Content
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.rounding import up
from dpllm.training.draws import Charges, Draws

GIVEN_UP = "rounds given up because too few clients answered; each stays charged"
"""The diagnostic of that name."""
TOO_MANY_LEFT = (
    "A round was given up, because too few clients answered. With the dropouts that the plan declares this almost "
    "never happens: δ counts on it. Find out how many clients left on average. If it was a larger share than "
    "declared, or if leaving depended on the records or on the draw, this ε and δ do not hold."
)
"""The open point of a run with such rounds."""


def require_federated(plan: PrivacyPlan | PrivacyConfig) -> None:
    """Refuse a plan, or a section of a recipe, whose guarantee rounds over clients do not have.

    Raises:
        ConfigError: clients are not its units, they are not drawn as wholes, clipping or noise is of another kind, or
            its random numbers are not secret.
    """
    unit = plan.protects if isinstance(plan, PrivacyConfig) else plan.unit
    if unit != "user" or plan.sampling != "unit":
        raise ConfigError(
            f"a federated run protects clients, and the plan has unit={unit!r} and sampling={plan.sampling!r}: "
            "set data.columns.unit to the column of the client's id, and leave sampling out"
        )
    clipping, noise = Spec.of(plan.clipping).kind, Spec.of(plan.noise).kind
    if clipping != "flat" or noise not in ("independent", "distributed"):
        raise ConfigError(
            f"a federated run has no {clipping!r} clipping with {noise!r} noise: leave "
            "privacy.clipping out, and set privacy.noise to independent (a trusted server) or distributed (secure "
            "aggregation)"
        )
    seeded = plan.seeded if isinstance(plan, PrivacyPlan) else plan.seed is not None
    if seeded or plan.selection is not None:
        raise ConfigError(
            "a federated run takes cohorts and noise from the operating system, and is released by itself: leave "
            "privacy.seed and privacy.selection out"
        )


def is_secure(plan: PrivacyPlan) -> bool:
    """Return whether clients add the noise, so that the server sees only noisy sums."""
    return isinstance(plan.event, DistributedStep)


def answers_of_a_round(plan: PrivacyPlan) -> int:
    """Return how many answers a client gives in a round."""
    return len(STAGES) if is_secure(plan) else 1


def against_the_server(plan: PrivacyPlan) -> float:
    """Return ε of the noisy sums for somebody who knows the cohorts, for a client that is in every round.

    Args:
        plan: with distributed noise.
    """
    event = plan.event
    assert isinstance(event, DistributedStep)
    return epsilon([(event.against_the_server, plan.num_steps)], plan.delta)


def words_about_the_server(plan: PrivacyPlan) -> str:
    """Return who sees what, for the ledger's fact.

    Args:
        plan: of the run.
    """
    words = "in this simulation one process sees the records of all clients. In a deployment of its rounds "
    if not is_secure(plan):
        return words + (
            "a trusted server sees the bounded update of each client of a cohort and adds the noise; ε protects from "
            "those who see the weights that it sends out or releases"
        )
    return words + (
        "the server sees the sum of a round with the noise of its clients, and no single update (secure aggregation). "
        "It knows the cohorts, and so do their members: for them no sampling hides a client, and for one in all "
        f"{plan.num_steps} rounds ε is at most {up(against_the_server(plan))} at the same δ"
    )


def require_rounds(plan: PrivacyPlan, clients: Clients, weights: SharedWeights) -> None:
    """Refuse rounds that would not have the guarantee of the plan.

    Raises:
        ConfigError: the plan is not of a federated run, or has another number of clients.
        ValueError: the model is too large for the grid of secure aggregation.
    """
    require_federated(plan)
    if clients.num_clients != plan.num_units:
        raise ConfigError(
            f"{clients.num_clients} clients are there, and the plan has N = {plan.num_units}: the sampling rate would "
            "be another one. Make the plan for the fixed, public number of clients"
        )
    if is_secure(plan):
        Shares.of(plan).require_entries(max(weights.size(weights.of_round(number)) for number in (0, 1)))


class Rounds:
    """Takes the rounds of a run.

    Guarantee: each round has a truncated Poisson cohort from 256 bits of the operating system, over all N clients, and
    is charged before anybody is asked. The sum of updates of norm at most C gets noise of deviation σC or more, and is
    divided by the public b, never by the number of answers.

    Args:
        plan: the constants.
        ledger: to charge.
        clients: exactly the N of the plan.
        weights: of the server's model.
        optimizer: moves them; its parameters are those of ``weights``.
        schedule: of its learning rate; None: constant.

    Raises:
        ConfigError: the plan is not of a federated run, or has another number of clients.
        ValueError: the model is too large for the grid of secure aggregation.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        ledger: Charges,
        clients: Clients,
        weights: SharedWeights,
        optimizer: torch.optim.Optimizer,
        schedule: Any = None,
    ) -> None:
        """Check the plan, before anything is charged."""
        require_rounds(plan, clients, weights)
        self._plan, self._ledger, self._clients, self._weights = plan, ledger, clients, weights
        self._optimizer, self._schedule = optimizer, schedule
        self._shares = Shares.of(plan) if is_secure(plan) else None
        self._draws = Draws(plan, ledger, Processes(), plan.mechanism.sampler.steps(secret_rng()))
        self._noise = None
        if not plan.mechanism.noise.tensors_kept and self._shares is None:
            self._noise = plan.mechanism.noise.stream(NoiseSource(randomness=plan.randomness), plan.num_steps)

    def take(self) -> bool:
        """Take the next round; return whether it moved the weights. False: it was given up, and stays charged.

        Raises:
            ValueError: the plan has no round left.
            LedgerError: the round cannot be charged; nobody was asked.
        """
        number = self._ledger.num_steps
        drawn, _ = self._draws.take(self._draws.next(), mode="", error=None)
        names = self._weights.of_round(number)
        request: Content = {
            "task": "update",
            "round": number,
            "plan": self._plan.hash,
            "weights": self._weights.read().astype("<f4").tobytes(),
        }
        requests = {int(client): request for client in drawn}
        size = self._weights.size(names)
        total = self._secure(requests, number, size) if self._shares else self._trusted(requests, number, size)
        if total is not None:
            mean = total / self._plan.expected_batch_size
            for name, part in self._weights.divide(-mean, names).items():
                parameter = self._weights.parameters([name])[name]
                parameter.grad = part.to(parameter)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        if self._schedule is not None:
            self._schedule.step()
        return total is not None

    def _trusted(self, requests: dict[int, Content], number: int, size: int) -> NDArray[np.float64]:
        """Return the noisy sum of the updates, each of which is bounded again here."""
        assert self._noise is not None
        total = np.zeros(size)
        for client, answer in self._clients.ask(requests).items():
            update = np.frombuffer(answer["update"], "<f8")
            if client in requests and update.shape == (size,):
                total = total + bounded(update, self._plan)
        noisy = torch.from_numpy(total)
        self._noise.begin(number)
        self._noise.add_share_("the sum of the updates", noisy, self._plan.noise_stddev, rank=0, size=1)
        return noisy.numpy()

    def _secure(self, requests: dict[int, Content], number: int, size: int) -> NDArray[np.float64] | None:
        """Return the sum of the survivors, which hold the noise; None: there were too few."""
        event = self._plan.event
        assert self._shares is not None and isinstance(event, DistributedStep)
        found = secure_sum(self._clients, requests, number, event.min_batch_size, size)
        return None if found is None else self._shares.read(found)
