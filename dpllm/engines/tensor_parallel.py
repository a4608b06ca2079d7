"""Tensor parallelism by transformers' ``tp_plan``: each process holds slices of the layers, and all run the same rows.

Place in the flow: beside the other engines. A process forms the clipped sum of its slices by itself, with norms that
were added up over the processes (`dpllm.ghost.shards`), and draws the noise of its slices. Parameters that all hold are
reduced as under DDP: the sums, and the noise that each process drew for its slice of the entries, are added up, so all
processes get the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.engines.ddp import DataParallel
from dpllm.engines.division import Division
from dpllm.engines.errors import EngineError
from dpllm.engines.guard import UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.engines.single import AddTo, ToTotal, refuse_foreign_gradients, set_gradient
from dpllm.ghost.shards import TensorShards
from dpllm.ghost.sums import Sum


class TensorParallel(DataParallel):
    """The engine of processes that together hold one model.

    Guarantee: each entry of a slice has the total and the noise of its owner; entries that all processes hold have one
    total, to which each process's noise was added in its own slice of them.

    Args:
        shards: the parts of the trainable parameters.
        parameters: the trainable parameters by name.
        optimizer: the optimizer of the run, whose first update is checked.

    Raises:
        EngineError: other processes run beside those that hold the model.
    """

    def __init__(self, shards: TensorShards, parameters: Mapping[str, nn.Parameter], optimizer: Any) -> None:
        """Attach the guard."""
        self.processes = Processes()
        if shards.size != self.processes.size:
            raise EngineError(
                f"Tensor parallelism divides the model over {shards.size} of {self.processes.size} processes; the "
                "others would hold copies of it (data parallelism beside tensor parallelism), which was not compared "
                "with one process. Set tp_size to the number of processes, or use FSDP2 "
                "(dpllm train --config fsdp2)"
            )
        self.unfinished, self.lockstep, self.forms_total = False, True, True
        self._shards = shards
        divided = frozenset(id(p) for p in parameters.values() if shards.is_divided(p))
        place = (self.processes.rank, self.processes.size)
        self.division = Division(0, 1, place, counts=place[0] == 0, owned=divided)
        # Entries that all processes hold are counted by the first.
        self.guard = UpdateGuard(optimizer, self.processes, replicas=1, is_counted=self._is_counted)
        self.early = None
        self._sums: dict[nn.Parameter, Sum] = {}

    def _is_counted(self, parameter: Tensor) -> bool:
        return id(parameter) in self.division.owned or self.division.counts

    def collect(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_to: AddTo,
        *,
        last: bool,
        scale: float,
        to_total: ToTotal | None = None,
    ) -> None:
        """Add one microbatch's sums; after the last, ``.grad`` has the total of the entries held here times ``scale``.

        Raises:
            EngineError: autograd left a gradient, which would be released unclipped.
        """
        refuse_foreign_gradients(parameters)
        for parameter in parameters.values():
            if not self._shards.is_divided(parameter):
                continue
            if last:
                self._finish(parameter, add_to, scale, to_total)
                continue
            if parameter not in self._sums:
                self._sums[parameter] = self._begun(parameter)
            add_to(parameter, self._sums[parameter])
        held_by_all = {name: p for name, p in parameters.items() if not self._shards.is_divided(p)}
        super().collect(held_by_all, add_to, last=last, scale=scale, to_total=to_total)

    def _begun(self, parameter: Any) -> Sum:
        local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Sum.of(local)

    def _leave(self, parameter: Any, gradient: Tensor) -> None:
        value: Any = gradient
        if isinstance(parameter, DTensor):
            value = DTensor.from_local(
                value,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        grad: Any = set_gradient(parameter, value)
        if self._is_counted(parameter):
            self.guard.leave(grad.to_local() if isinstance(grad, DTensor) else grad)
