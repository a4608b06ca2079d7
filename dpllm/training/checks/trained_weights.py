"""The part of the watch over the trained weights, which change only within the optimizer's ``step``.

Place in the flow: under `dpllm.training.checks.watch`. Version counters are compared in every step. A checksum is
queued right after an update, without a wait; it is read before a save, and where a version counter has moved: weights
that were written and put back are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dpllm.engines.checksums import Checksum, values
from dpllm.training.checks.stamps import Stamp, WatchError, stamp_of


class TrainedWeights:
    """The trained weights of a run, from one update to the next.

    Args:
        trainable: the clipped parameters, by name.
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter]) -> None:
        """Store the present weights."""
        self._trainable = trainable
        self.take()

    def take(self) -> None:
        """Store the present weights, right after an update."""
        self._stamps = self._stamps_of_now()
        self._sum = self._sum_of_now()

    def is_written(self) -> bool:
        """Return whether a weight is not as the last update left it, to the bit; waits for the device."""
        before, now = values([self._sum, self._sum_of_now()])
        return before != now

    def check(self, when: str) -> None:
        """Compare the version counters; weights that were written and put back are accepted.

        Args:
            when: the moment of the write, for the message.

        Raises:
            WatchError: a weight was written.
        """
        stamps = self._stamps_of_now()
        if self._stamps != stamps and not self.is_written():  # written, and put back
            self._stamps = stamps
        for name, before, now in zip(self._trainable, self._stamps, stamps, strict=False):
            if before != now:
                raise WatchError(
                    f"{name} was written {when}. The guarantee covers only weights that change by the noisy gradient. "
                    "Remove the code that writes to it (a callback, a second optimizer, max_norm of an embedding). "
                    "Load a checkpoint before attach(), or register the run with "
                    "accelerator.register_for_checkpointing(run)"
                )

    def check_values(self) -> None:
        """Compare the values with those that the last update left; waits for the device.

        Raises:
            WatchError: a weight has another value.
        """
        if self.is_written():
            raise WatchError(
                "A trained parameter is not as the last update left it, and no version counter of PyTorch shows when "
                "it was written (through .data, or another view of its memory). The guarantee covers only weights that "
                "change by the noisy gradient. Remove the code that writes to it; do not release any output of this "
                "run"
            )

    def _sum_of_now(self) -> Checksum:
        with torch.no_grad():
            return Checksum(self._trainable.values())

    def _stamps_of_now(self) -> list[Stamp]:
        with torch.no_grad():
            return [stamp_of(parameter) for parameter in self._trainable.values()]
