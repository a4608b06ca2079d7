"""Federated learning: clients keep their records, and a server gets noisy sums of the changes of their weights.

Place in the flow: `dpllm.methods.federated.run` is the program of `dpllm methods federated`. A round is a step of the
plan: a Poisson cohort of clients (`rounds`), each of which trains from the weights of the server (`participant`,
`local`), bounds its change and sends it. Either a trusted server adds the noise of the round, or each client adds a
share of it (`shares`) and secure aggregation shows the server only the sum (`secure`). Messages travel through a
`transport`.
"""

from __future__ import annotations

from dpllm.registry import Method

METHOD = Method(
    name="federate",
    command="federated",
    section="dpllm.methods.sections:FederateConfig",
    beside_train=True,
    events=("dpllm.methods.federated.distributed:DistributedStep",),
    noises=("dpllm.methods.federated.distributed:DistributedNoise",),
    commands=("dpllm.methods.federated.command:federated",),
)
