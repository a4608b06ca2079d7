"""One process, the whole model: nothing to reduce, and all the noise is drawn here."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dpllm.noise import NoiseSource


class SingleProcess:
    """The engine of one process.

    Args:
        noise: where the noise comes from.
    """

    def __init__(self, noise: NoiseSource) -> None:
        """Keep the source of noise."""
        self._noise = noise

    def reduce(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """The sum of one process is the total."""

    def add_noise(self, parameters: Mapping[str, nn.Parameter], noise_stddev: float) -> None:
        """Add N(0, noise_stddev^2) once to every entry of every gradient."""
        for parameter in parameters.values():
            assert parameter.grad is not None, "every trainable parameter has a gradient after the microbatches"
            self._noise.add_(parameter.grad, noise_stddev)
