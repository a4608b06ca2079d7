"""The clients of a federated run: the training of each on its own records, and the bound of its update.

The training is ordinary: any function of the client's records and of the server's weights will do, since only its
result is bounded. With a trusted server the bounded update leaves the client. With distributed noise it becomes whole
numbers with the client's share of the noise (`Shares`; the mathematics is in `dpllm.methods.federated.distributed`).

Clients share one model object, so nothing of one client may stay in it: its weights are set, its optimizer is new,
buffers and frozen weights are compared, and random numbers are seeded from the operating system for each client.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpllm.config import ConfigError
from dpllm.mechanism.chacha20 import KEY_BYTES
from dpllm.mechanism.discrete_gaussian import DiscreteGaussians
from dpllm.methods.federated.distributed import SHARE_BITS, DistributedStep
from dpllm.methods.sections import FederatedConfig
from dpllm.models.load import StartingValues
from dpllm.models.losses import per_sequence_loss, take_labels
from dpllm.privacy.plan import PrivacyPlan

_MOST_ROUNDED = 0.5
"""The largest share of C that the rounding of an update may take."""


def is_secure(plan: PrivacyPlan) -> bool:
    """Return whether clients add the noise, so that the server sees only noisy sums."""
    return isinstance(plan.event, DistributedStep)


@dataclass(frozen=True)
class Shares:
    """The grid of a plan with distributed noise.

    Raises:
        ValueError: the plan has other noise, or none.
    """

    clip_norm: float
    """C."""
    step: float
    """γ, the step of the grid."""

    @classmethod
    def of(cls, plan: PrivacyPlan) -> Self:
        """Return the grid of a plan."""
        event = plan.event
        if not isinstance(event, DistributedStep) or plan.noise_multiplier == 0:
            raise ValueError(
                "secure aggregation needs the noise of each client, and the plan has none: set "
                "privacy.noise=distributed, and an epsilon or a noise_multiplier above 0"
            )
        return cls(plan.clip_norm, plan.noise_stddev / (2**SHARE_BITS * math.sqrt(event.min_batch_size)))

    def require_entries(self, num_entries: int) -> None:
        """Refuse a model with too many trained entries d for the grid, before anything is charged.

        Raises:
            ValueError: rounding would take more than half of C.
        """
        lost = self._rounding(num_entries)
        if lost > _MOST_ROUNDED * self.clip_norm:
            raise ValueError(
                f"rounding an update of {num_entries:,} entries for secure aggregation takes {lost:.3g} of the clip "
                f"norm {self.clip_norm:g}: train fewer parameters, for instance with LoRA, or add less noise with a "
                "larger cohort"
            )

    def rounded(self, update: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round an update, (d,), to the grid, with a norm of at most C; zero if an entry is not finite.

        Raises:
            ValueError: it is too large for the grid, or its norm would exceed C.
        """
        self.require_entries(update.size)
        if not np.isfinite(update).all():
            return np.zeros(update.size, np.int64)
        size, allowed = float(np.linalg.norm(update)), self.clip_norm - self._rounding(update.size)
        factor = min(1.0, (1 - 1e-12) * allowed / size) if size > 0 else 1.0
        whole = np.rint(update * (factor / self.step)).astype(np.int64)
        if float(np.linalg.norm(whole.astype(np.float64))) * self.step > self.clip_norm:
            raise ValueError("a rounded update exceeds the clip norm, which its margin should prevent")
        return whole

    def with_noise(self, update: NDArray[np.float64]) -> NDArray[np.uint64]:
        """Return the rounded update, (d,), with this client's share of the noise, modulo 2^64.

        The noise is drawn from 256 bits of the operating system, which are not stored.
        """
        noise = DiscreteGaussians(secrets.token_bytes(KEY_BYTES), SHARE_BITS).draw(update.size)
        return (self.rounded(update) + noise).view(np.uint64)

    def read(self, total: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Convert a sum modulo 2^64, (d,), to an update."""
        return total.view(np.int64).astype(np.float64) * self.step

    def _rounding(self, num_entries: int) -> float:
        """Return the largest norm of the rounding errors of an update."""
        return 0.5 * self.step * math.sqrt(num_entries)


Collate = Callable[[Sequence[Any]], dict[str, Any]]
_LORA_A = ("lora_A", "lora_embedding_A")


class SharedWeights:
    """The weights that the server sends, and those that a round trains, as float32 vectors.

    The product of two averages is not the average of the products: averaging the factors A and B of an adapter in one
    round does not average the changes BA. So A is frozen, or rounds alternate between the factors.

    Args:
        model: its trainable parameters are sent.
        lora: "freeze_a", or "alternate": B is trained in even rounds, A in odd ones. Without an adapter both train all.

    Raises:
        ConfigError: nothing is trained.
    """

    def __init__(self, model: nn.Module, lora: str) -> None:
        """Collect the trainable parameters."""
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._factors = [name for name in self._parameters if any(f".{part}." in name for part in _LORA_A)]
        self._alternate = lora == "alternate" and bool(self._factors)
        if not self._parameters:
            raise ConfigError("the model has no trainable parameter: check model.adapter and model.freeze")

    def of_round(self, number: int) -> list[str]:
        """Return the names of the parameters that a round trains."""
        train_factors = self._alternate and number % 2 == 1
        return [name for name in self._parameters if (name in self._factors) == train_factors]

    def size(self, names: Sequence[str] | None = None) -> int:
        """Return the number of entries of these parameters; None: of all."""
        return sum(self._parameters[name].numel() for name in self._named(names))

    def read(self, names: Sequence[str] | None = None) -> NDArray[np.float32]:
        """Return a copy of these parameters, concatenated; None: of all."""
        parts = [self._parameters[name].detach().float().cpu().reshape(-1) for name in self._named(names)]
        return torch.cat(parts).numpy().copy()

    def write(self, values: NDArray[np.float32]) -> None:
        """Set all parameters.

        Raises:
            ValueError: the number of values is wrong.
        """
        if values.shape != (self.size(),):
            raise ValueError(
                f"the server's weights have {values.size:,} entries, and this model {self.size():,}: server and client "
                "have different models. Give both the same recipe and the same base model"
            )
        with torch.no_grad():
            for name, part in self.divide(values).items():
                self._parameters[name].copy_(part)

    def parameters(self, names: Sequence[str] | None = None) -> dict[str, nn.Parameter]:
        """Return these parameters; None: all."""
        return {name: self._parameters[name] for name in self._named(names)}

    def _named(self, names: Sequence[str] | None) -> Sequence[str]:
        return list(self._parameters) if names is None else names

    def divide(self, values: NDArray[Any], names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the parts of a vector of these parameters, in their shapes; None: of all."""
        shapes = {name: self._parameters[name].shape for name in self._named(names)}
        parts = torch.from_numpy(np.array(values)).split([shape.numel() for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


class LocalTraining:
    """Trains a model on the rows of one client at a time.

    Guarantee: the result depends on these rows, the given weights and fresh random numbers only.
    """

    def __init__(
        self, model: nn.Module, weights: SharedWeights, collate: Collate, config: FederatedConfig, batch_size: int
    ) -> None:
        """Store the state that no client may change."""
        self._model, self._weights, self._collate = model, weights, collate
        self._config, self._batch_size = config, batch_size
        trained = weights.parameters()
        state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
        places = {one.data_ptr() for one in trained.values()}
        self._fixed = {name: one for name, one in state.items() if one.data_ptr() not in places}
        self._before = {name: one.detach().clone() for name, one in self._fixed.items()}
        self._unsaved = {name: one.detach().clone() for name, one in model.named_buffers() if name not in state}
        self._attributes = StartingValues(model)

    def update(self, rows: Sequence[Any], start: NDArray[np.float32], number: int) -> NDArray[np.float64]:
        """Train on the rows of a client, and return the change of the round's weights, (d,).

        Raises:
            ConfigError: the training changed a buffer or a frozen weight.
        """
        names = self._weights.of_round(number)
        trained = self._weights.parameters(names)
        self._weights.write(start)
        before = self._weights.read(names).astype(np.float64)
        torch.manual_seed(secrets.randbits(63))
        order = np.random.Generator(np.random.PCG64(secrets.randbits(128)))
        optimizer = self._optimizer(list(trained.values()))
        was_training = self._model.training
        self._model.train()
        places: list[int] = []
        try:
            for _ in range(self._config.local_steps):
                if not places:
                    places = order.permutation(len(rows)).tolist()
                batch, places = places[: self._batch_size], places[self._batch_size :]
                self._step(optimizer, list(trained.values()), [rows[place] for place in batch])
        finally:  # also after a failure
            self._model.train(was_training)
            self._put_back()
        self._require_fixed()
        return self._weights.read(names).astype(np.float64) - before

    def _step(self, optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter], rows: Sequence[Any]) -> None:
        device = trained[0].device
        batch = {name: one.to(device) for name, one in self._collate(rows).items()}
        labels = take_labels(batch)
        loss = per_sequence_loss(self._model(**batch).logits, labels).mean()
        for one, grad in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            one.grad = grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _optimizer(self, trained: list[nn.Parameter]) -> torch.optim.Optimizer:
        rate = self._config.local_learning_rate
        if self._config.local_optimizer == "sgd":
            return torch.optim.SGD(trained, lr=rate)
        return torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)

    def _put_back(self) -> None:
        """Reset module state that follows the rows of this client, such as the longest (dynamic rotary embeddings)."""
        self._attributes.restore()
        for name, value in self._unsaved.items():
            self._model.get_buffer(name).copy_(value)

    def _require_fixed(self) -> None:
        """Check that buffers and frozen weights did not change: they would carry records to the next client.

        Raises:
            ConfigError: one changed.
        """
        for name, one in self._fixed.items():
            if not torch.equal(one.detach(), self._before[name]):
                raise ConfigError(
                    f"{name} changed in the training of a client, and it is not trained: it could carry the records of "
                    "one client to the next without noise. Take a model without such buffers (no batch norm)"
                )


RowsOf = Callable[[int], Sequence[Any]]


class Updates(Protocol):
    """Computes the update of a client, as `LocalTraining` does."""

    def update(self, rows: Sequence[Any], start: NDArray[np.float32], number: int) -> NDArray[np.float64]:
        """Return the update, (d,), from the client's rows, the server's weights and the number of the round."""
        ...


class Clients:
    """All clients of a run, simulated in this process; each answers from its own rows, unless it drops out.

    Guarantee: an answer is the client's update of norm at most C. With distributed noise it is rounded, and has the
    client's share of the noise.

    Args:
        plan: of the run.
        training: computes updates.
        rows_of: from a client's number to its rows.
        dropouts: the probability with which a client does not answer in a round.
    """

    def __init__(self, plan: PrivacyPlan, training: Updates, rows_of: RowsOf, dropouts: float = 0.0) -> None:
        """Read the constants of the plan."""
        self.num_clients = plan.num_units
        self._plan, self._training, self._rows_of, self._dropouts = plan, training, rows_of, dropouts
        self._shares = Shares.of(plan) if is_secure(plan) else None

    def answers(self, cohort: Sequence[int], weights: NDArray[np.float32], number: int) -> dict[int, NDArray[Any]]:
        """Return the answer of each client of a cohort that does not drop out: (d,) float64, or uint64 modulo 2^64."""
        random, found = secrets.SystemRandom(), {}
        for client in cohort:
            if not self._dropouts or random.random() >= self._dropouts:
                update = self._training.update(self._rows_of(client), weights, number)
                found[client] = self._shares.with_noise(update) if self._shares else bounded(update, self._plan)
        return found


def bounded(update: NDArray[np.float64], plan: PrivacyPlan) -> NDArray[np.float64]:
    """Scale an update, (d,), to a norm of at most C; zero if an entry is not finite."""
    if not np.isfinite(update).all():
        return np.zeros_like(update)
    size = float(np.linalg.norm(update))
    return update if size <= (1 - 1e-12) * plan.clip_norm else update * ((1 - 1e-12) * plan.clip_norm / size)
