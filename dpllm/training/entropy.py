"""The random numbers of a run: its draws, their division over the processes, the noise, and the global generators.

Place in the flow: under `dpllm.training.run`, which makes one object at each start and resume. Every kind of number has
entropy of its own from the operating system, which is never stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dpllm.engines.processes import Processes
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.regenerated import stream_of
from dpllm.mechanism.sampling import seeded_rng
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.checks.randomness import SecretStreams
from dpllm.training.checks.turns import dealing_key
from dpllm.training.shared_ledger import SharedLedger


class RunEntropy:
    """The random numbers of one start or resume of a run.

    Guarantee: no number is drawn again after a resume, since a new object takes fresh entropy. Draws use 256 bits, the
    division of units 128 bits that all processes share, and the noise of each process bits of its own.

    Attributes:
        noise: this process's share of the noise.
        first: number of steps charged before this start or resume, at which draws and noise begin again.

    Args:
        plan: plan of the run.
        processes: the processes of the run; all of them make this object together.
        ledger: the run's ledger.
        seed: None, or a fixed seed for tests; then nothing is private.
        noise_memory: whether noise of earlier steps is stored or regenerated; it changes no number.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        processes: Processes,
        ledger: SharedLedger,
        seed: int | None,
        noise_memory: str = "auto",
    ) -> None:
        """Take the entropy, and share the part that all processes need."""
        self._sampler, self._seed = plan.mechanism.sampler, seed
        self._deal_key = dealing_key(processes, lambda: secrets.randbits(128) if seed is None else seed)
        generator = NoiseSource(seed, processes.rank, plan.randomness)
        self.noise = stream_of(plan.mechanism.noise, generator, plan.num_steps, noise_memory)
        self.first = ledger.num_steps
        self._streams = SecretStreams(processes, seed)

    def draws(self) -> Iterator[NDArray[np.int64]]:
        """Return the sampler's draws, of which rank 0's are used. Called once: the sampler starts with this call."""
        return self._sampler.steps(
            seeded_rng(int.from_bytes(secrets.token_bytes(32), "little") if self._seed is None else self._seed)
        )

    def deal_key(self, num_steps: int) -> int:
        """Return the key that divides the units of a step over the processes; the same on every process."""
        return self._deal_key + num_steps

    def begin_step(self) -> None:
        """Seed the global generators of this process for a step, independently of other steps and processes."""
        self._streams.separate()

    def end_step(self) -> None:
        """Seed the global generators of all processes alike, after a check that nothing seeded them in the step.

        Raises:
            ConfigError: model, loss or collator seeded a global generator.
        """
        self._streams.check()
        self._streams.share()

    def give_up_step(self) -> None:
        """Do as `end_step` without the check, after an error.

        A state saved from now on must not reveal how many random numbers the rows took.
        """
        self._streams.share()
