"""A small federation: the weights are one vector, and each client always sends the same update."""

from __future__ import annotations

import numpy as np
import torch

from dpllm import PrivacyConfig, make_plan
from dpllm.methods.federated.client import Clients, SharedWeights
from dpllm.methods.federated.run import Rounds
from tests.memory_ledger import MemoryLedger

SIZE = 40


class Vector(torch.nn.Module):
    """Weights of 0."""

    def __init__(self, size=SIZE):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))


class Sends:
    """In place of a training: client u moves the weights by its row, whatever they are."""

    def __init__(self, update_UD):
        self.update_UD, self.asked = update_UD, []

    def update(self, rows, start, number):
        self.asked.append((number, rows))
        return self.update_UD[rows].astype(np.float64)


def plan_of(num_clients=30, batch=10, rounds=4, secure=False, **changes):
    """A plan over clients."""
    options = {
        "noise_multiplier": 1.0,
        "clip_norm": 1.0,
        "expected_batch_size": batch,
        "unit": "client",
        "max_rows_per_unit": 8,
        **({"randomness": "discrete", "noise": {"kind": "distributed", "dropouts": 0.2}} if secure else {}),
        **changes,
    }
    return make_plan(PrivacyConfig(**options), num_clients, rounds)


def rounds_of(plan, update_UD, clients=lambda inner: inner, rate=1.0, dropouts=0.0):
    """The rounds over clients that send these updates, the weights, and the training."""
    model, sends = Vector(update_UD.shape[1]), Sends(update_UD)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    there = clients(Clients(plan, sends, lambda client: client, dropouts))
    return Rounds(plan, MemoryLedger(), there, SharedWeights(model, "freeze_a"), optimizer), model, sends
