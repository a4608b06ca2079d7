"""The processes of a run, and what they have to agree on.

Place in the flow: below the engines. One process is the case of size one, so that nothing else asks which it is.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_Value = TypeVar("_Value")


class DisagreementError(ValueError):
    """The processes of one run differ in something the guarantee rests on."""


class Processes:
    """All processes of the run, as torch.distributed knows them; a single one where it isn't initialised.

    Attributes:
        rank: this process's number, 0 <= rank < size. Rank 0 writes the files.
        size: how many there are.
    """

    def __init__(self) -> None:
        """Ask torch.distributed.

        Raises:
            DisagreementError: several processes were launched and torch.distributed doesn't know of them.
        """
        self._distributed = dist.is_available() and dist.is_initialized()
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and not self._distributed:
            raise DisagreementError(
                f"{launched} processes were launched (WORLD_SIZE), but torch.distributed is not initialised, so each "
                "takes itself for the only one and would draw units and noise of its own. Create the Accelerator or "
                "the TrainingArguments first; on a machine without a GPU with use_cpu=True"
            )
        self.rank = dist.get_rank() if self._distributed else 0
        self.size = dist.get_world_size() if self._distributed else 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where collectives over small numbers run."""
        if self._distributed and dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def sum(self, values: list[float]) -> list[float]:
        """The sums over all processes, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def sum_(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return self.sum([float(flag)])[0] > 0

    def gather(self, value: _Value) -> list[_Value]:
        """Every process's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, function: Callable[[], _Value]) -> _Value:
        """Run a function on rank 0 and give every process its result, or its error.

        Raises:
            Exception: what the function raised; the same on every rank, so that all stop with one message.
        """
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = _sendable(error)
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Make sure that every process holds the same facts.

        Raises:
            DisagreementError: they differ; the message names the fact, the ranks and their values, on every rank.
        """
        everywhere = self.gather(dict(facts))
        for name in facts:
            values = [other.get(name) for other in everywhere]
            if any(value != values[0] for value in values):
                shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[:8]))
                raise DisagreementError(
                    f"The processes differ in {name} ({shown}), so their sums and noise would not be those of one "
                    "private run. Start all of them with the same recipe, data and package versions"
                )

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()


def _sendable(error: Exception) -> Exception:
    """The error itself where it survives being sent to another process, else one with its text."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
