"""The division of a step's work over the processes of an engine: rows, counts and noise.

Place in the flow: a part of each engine, read by `dpllm.training`. On most engines every process takes rows of its own,
and the sums of all processes are added up. Under tensor parallelism all processes take the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dpllm.engines.processes import Processes


@dataclass(frozen=True)
class Division:
    """The share of one process.

    Attributes:
        rank: place of this process among those that take different rows.
        size: the number of those.
        sums: place of this process among those whose sums are added up, and the number of those.
        counts: whether this process's counts of rows enter sums over all processes. Of processes that take the same
            rows, one does.
        owned: ids of parameters of which this process holds entries that no other one holds, outside of the engine's
            own sums: it draws all their noise.
    """

    rank: int
    size: int
    sums: tuple[int, int]
    counts: bool = True
    owned: frozenset[int] = frozenset()

    @classmethod
    def of_rows(cls, processes: Processes) -> Division:
        """Return the share of a process that takes rows of its own."""
        return cls(processes.rank, processes.size, (processes.rank, processes.size))

    def of_noise(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return the place of this process among those whose slices of the noise cover its tensor of a parameter."""
        return (0, 1) if id(parameter) in self.owned else self.sums
