"""The part of the watch over the trained weights, which change only within the optimizer's ``step``.

Place in the flow: under `dpllm.training.checks.watch`. Version counters are compared first; sums over all bits find
writes past them (`dpllm.training.checks.written`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dpllm.training.checks.stamps import Stamp, WatchError, stamp_of
from dpllm.training.checks.written import Written


class TrainedWeights:
    """The trained weights of a run, from one update to the next.

    Args:
        trainable: the clipped parameters, by name.
        stamped: whether version counters show writes. False for an engine that updates within the private step.
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter], stamped: bool) -> None:
        """Store the present weights."""
        self._trainable, self._stamped = trainable, stamped
        self._stamps: list[Stamp] = []
        self._bits = Written()
        self.take()

    def take(self) -> None:
        """Store the present weights, right after an update."""
        self._stamps = self._stamps_of_now()
        self.take_bits()

    def take_bits(self) -> None:
        """Do as `take` for the bits only."""
        self._bits.take(self._trainable.values())

    def compare_bits(self) -> None:
        """Queue a comparison with the bits of the last update, without a wait; `check_bits` reads its result."""
        self._bits.compare(self._trainable.values())

    @property
    def bits_at_hand(self) -> bool:
        """Whether `check_bits` needs no wait for a device."""
        return self._bits.at_hand

    def is_written(self) -> bool:
        """Return whether a weight is not as the last update left it, to the bit; waits for the device."""
        return self._bits.differ(self._trainable.values())

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

    def check_bits(self) -> None:
        """Read the results of all comparisons so far.

        Raises:
            WatchError: a weight was written past the version counters.
        """
        if self._bits.found():
            raise WatchError(
                "A trained parameter was written between two updates past PyTorch's version counters (through .data, "
                "or another view of its memory). The guarantee covers only weights that change by the noisy gradient. "
                "Remove the code that writes to it (a model, loss, collator or callback that uses .data); do not "
                "release any output of this run"
            )

    def _stamps_of_now(self) -> list[Stamp]:
        if not self._stamped:
            return []
        with torch.no_grad():
            return [stamp_of(parameter) for parameter in self._trainable.values()]
