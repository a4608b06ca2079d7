"""Federated learning, simulated: clients keep their records, and a server gets noisy sums of the changes of weights.

A round is a step of the plan: a Poisson cohort of clients, each of which trains from the weights of the server, bounds
its change and sends it (`client`). Either a trusted server adds the noise of the round, or each client adds a share of
it (`distributed`), for secure aggregation. `run` is the program of `dpllm methods federated`.
"""

from __future__ import annotations

from dpllm.registry import Method

METHOD = Method(
    name="federated",
    section="dpllm.methods.sections:FederatedConfig",
    beside_train=True,
    events=("dpllm.methods.federated.distributed:DistributedStep",),
    noises=("dpllm.methods.federated.distributed:DistributedNoise",),
    commands=("dpllm.methods.federated.command:federated",),
)
