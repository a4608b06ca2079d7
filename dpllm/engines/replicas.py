"""Compare the weights on several processes, to ensure that replicas are equal.

`dpllm.training.step` uses this in every step, and `dpllm.training.run` when a model is attached. The bound on a step
assumes that all processes compute the same function; otherwise the sum would depend on the process to which a unit is
assigned. Weights can diverge without any error, for instance by a different learning rate on one process, an edit on
one process, or an optimizer with its own randomness. Replicas are therefore compared by the bits of all entries
(`dpllm.engines.checksums`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.engines.checksums import Checksum, values
from dpllm.engines.processes import DisagreementError, Processes, told_by_rank
from dpllm.ghost.refusals import scales_of

_TRIPLE = 3  # numbers of one kind of parameters


class Replicas:
    """The trainable weights of all processes before a step.

    Args:
        parameters: the trainable parameters by name.
        processes: all processes of the run.
    """

    def __init__(self, parameters: Mapping[str, Tensor], processes: Processes) -> None:
        """Queue the checksum; in a single process there is nothing to compare."""
        kinds = _by_place(parameters.values(), processes) if processes.size > 1 else []
        self._places = [place for place, _ in kinds] or [0]
        self._checksums = [Checksum(tensors) for _, tensors in kinds] or [Checksum(())]

    def numbers(self) -> list[float]:
        """Return the input of `check`, for each kind of parameters: an id of this process's shards, and their checksum.

        Each number is exact in float64. Parameters that all processes hold form one kind, sharded parameters form
        another.
        """
        found = []
        for place, value in zip(self._places, values(self._checksums), strict=True):
            found += [float(place), float(value >> 32), float(value & 0xFFFFFFFF)]
        return found

    @staticmethod
    def check(everywhere: Sequence[Sequence[float]], step: int) -> None:
        """Check that processes with the same shards have the same bits.

        Args:
            everywhere: the numbers of every process, in the order of the ranks.
            step: the step's index, from 1.

        Raises:
            DisagreementError: they differ; the same error on every process.
        """
        if differing(everywhere):
            raise DisagreementError(
                f"The trainable weights differ between processes before step {step} "
                f"({told_by_rank([_shown(one) for one in everywhere])}), so a unit's gradient and the bound on the sum "
                f"would depend on the process that computes them. Step {step} is charged, but does not change the "
                "weights. Use the same optimizer, learning rate and scheduler on every process, without per-process "
                "randomness, apply the same weight changes everywhere, and resume from a checkpoint"
            )


def check_before_saving(
    parameters: Mapping[str, nn.Parameter], processes: Processes, error: Exception | None = None
) -> None:
    """Check that the weights to be saved are the same on every replica; all processes call this together.

    No step follows a run's last update, so no other check would find a difference.

    Args:
        parameters: the trainable parameters by name.
        processes: all processes of the run.
        error: an earlier error of this process, which all processes then raise.

    Raises:
        DisagreementError: replicas differ; the same error on every process.
        Exception: the ``error`` of the first process that has one.
    """
    here = Replicas(parameters, processes)
    everywhere = processes.gather_numbers([*here.numbers(), float(error is not None)])
    processes.raise_found(error, [one[-1] for one in everywhere])
    weights = [one[:-1] for one in everywhere]
    if differing(weights):
        raise DisagreementError(
            "The trainable weights differ between processes after the last update "
            f"({told_by_rank([_shown(one) for one in weights])}), so the model that one of them would save is not the "
            "trained model. Nothing is saved. Use the same optimizer, learning rate and scheduler on every process, "
            "apply the same weight changes everywhere, and resume from a checkpoint"
        )


def differing(everywhere: Sequence[Sequence[float]]) -> bool:
    """Return whether, in a triple of numbers, two processes with the same first number differ in the others."""
    for at in range(0, len(everywhere[0]), _TRIPLE):
        first_of: dict[float, list[float]] = {}
        triples = [list(one[at : at + _TRIPLE]) for one in everywhere]
        if any(first_of.setdefault(triple[0], triple) != triple for triple in triples):
            return True
    return False


def _shown(numbers: Sequence[float]) -> str:
    pairs = (numbers[at + 1 : at + _TRIPLE] for at in range(0, len(numbers), _TRIPLE))
    return " ".join(f"{int(high):08x}{int(low):08x}" for high, low in pairs)


def check_model(model: nn.Module, processes: Processes) -> None:
    """Check that all processes hold the same model: parameters, including frozen ones, and buffers.

    Raises:
        DisagreementError: replicas differ; on every process.
    """
    if processes.size == 1:
        return
    weights: dict[str, Tensor] = dict(model.named_parameters())
    scales = [scale for module in model.modules() for scale in scales_of(module).values()]
    weights.update((f"scale {at}", scale) for at, scale in enumerate(scales))
    buffers = {str(at): buffer for at, buffer in enumerate(model.buffers()) if not isinstance(buffer, DTensor)}
    for what, tensors in (("parameters", weights), ("buffers", buffers)):
        chosen = processes.gather_numbers(Replicas(tensors, processes).numbers())
        if differing(chosen):
            raise DisagreementError(
                f"The processes hold different {what} ({told_by_rank([_shown(one) for one in chosen])}), including "
                "frozen ones, so a unit's gradient would depend on the process that computes it. Load the same "
                "weights on every process, and change them before accelerator.prepare()"
            )


def _replicated(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that several processes may hold.

    ZeRO-3 partitions have one owner each; its small parameters, which it keeps whole everywhere, have several.
    """
    # Detached, they are plain tensors: their values are compared, not the partitions that ZeRO-3 attaches to them.
    return [p.detach() for p in parameters if not hasattr(p, "ds_id") or _is_kept_whole(p)]


def _is_kept_whole(parameter: Any) -> bool:
    return bool(getattr(parameter, "ds_persist", False)) and parameter.numel() == parameter.ds_numel


def _by_place(parameters: Iterable[Tensor], processes: Processes) -> list[tuple[int, list[Tensor]]]:
    """Return the parameters that all processes hold, then those that are sharded.

    Returns:
        For each kind in the model, a number that is equal on processes with the same shard of every parameter (0 for
        parameters without shards), and the tensors that several processes may hold. The kinds are the same on every
        process.
    """
    whole: list[Tensor] = []
    divided: list[Tensor] = []
    coordinates: list[list[int]] = []
    for parameter in parameters:
        place: list[int] = []
        if isinstance(parameter, DTensor):
            here = parameter.device_mesh.get_coordinate() or [processes.rank]
            place = [at for at, p in zip(here, parameter.placements, strict=False) if p.is_shard()]
        coordinates += [place] if place else []
        (divided if place else whole).append(parameter)
    number = int.from_bytes(hashlib.sha256(repr(coordinates).encode()).digest()[:6], "little")
    kinds = [(0, _replicated(whole))] if whole or not divided else []
    return kinds + ([(number, _replicated(divided))] if divided else [])
