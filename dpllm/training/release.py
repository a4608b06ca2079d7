"""What one step releases: clipped sums and their noise, handed to the engine parameter by parameter.

Place in the flow: between the norms of a microbatch and the engine, which adds up over microbatches and processes. Here
is the one place where clipped sum and noise meet. The update's guard is told what is handed in, and what the mechanism
says of it.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from dpllm.engines.protocol import Engine
from dpllm.ghost import GhostClipper
from dpllm.mechanism.parts import NoiseStream
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.microbatches import Microbatch


class Release:
    """The release of one step, from its first microbatch to the update.

    Args:
        clipper: attached to the model.
        plan: the constants.
        engine: where the sums go; it holds parts of them until `finish`.
        noise: of this process, at its start or resume.
        step: the number of the step, counted from there.
    """

    def __init__(self, clipper: GhostClipper, plan: PrivacyPlan, engine: Engine, noise: NoiseStream, step: int) -> None:
        """Begin; from now on the engine takes no other step until this one is finished."""
        self._clipper, self._plan, self._engine, self._noise, self._step = clipper, plan, engine, noise, step
        self._names = {id(parameter): name for name, parameter in clipper.parameters.items()}
        self._num_entries = 0
        engine.begin()
        noise.begin(step)

    def collect(self, microbatch: Microbatch, last: bool) -> None:
        """Hand in the clipped sum of a microbatch, and with the last one the noise.

        Args:
            microbatch: whose units were clipped last.
            last: whether it is the last one of the step; the same on every process.
        """

        def add_to(parameter: nn.Parameter, total: Tensor) -> None:
            with self._engine.guard.handing_in(total):
                if not microbatch.continues:
                    self._clipper.add_clipped_sum_(parameter, total)
                if last:  # each entry's noise is drawn by one process, before the sum over processes
                    self._add_noise_(parameter, total)

        self._engine.collect(self._clipper.parameters, add_to, last=last, scale=self._scale)

    def _add_noise_(self, parameter: nn.Parameter, total: Tensor) -> None:
        processes = self._engine.processes
        name, stddev = self._names[id(parameter)], self._plan.noise_stddev
        self._noise.add_share_(name, total, stddev, processes.rank, processes.size)
        self._num_entries += total.numel()

    @property
    def _scale(self) -> float:
        """1/b, a public constant, never the realised size."""
        return 1 / self._plan.expected_batch_size

    def finish(self, num_units: int) -> None:
        """Tell the guard what a private update looks like, and let the engine make it.

        Args:
            num_units: that took part, over all processes.
        """
        variance = self._plan.mechanism.noise.variance(self._step, self._plan.num_steps)
        stddev = self._plan.noise_stddev * math.sqrt(variance)
        self._engine.guard.expect(num_units, self._num_entries, self._plan.clip_norm, stddev, self._scale)
        self._engine.finish()
