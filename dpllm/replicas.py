"""Checksums of the weights that several processes hold, so that replicas are seen to be one.

Place in the flow: below the engines, used by `dpllm.step` in every step and by `dpllm.run` when a model is attached.
The bound on a step rests on all processes computing the same function: otherwise the sum depends on which process a
unit was dealt to. Weights drift apart without any error, for instance by another learning rate on one process, an edit
on one process, or an optimizer with randomness of its own. Replicas are therefore compared bit by bit: the bits of all
entries, as integers, times fixed random integers, added up modulo 2^64. A difference anywhere escapes with a chance of
2^-32 at most, and nothing needs a tolerance.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.processes import DisagreementError, Processes, told_by_rank

_BLOCK = {"cpu": 1 << 15}  # entries multiplied at a time, so that a core's cache holds the products
_LARGE_BLOCK = 1 << 22  # elsewhere, where launches cost: 32 MiB of products, and as much for the random integers
_STEP = 0x5851F42D4C957F2D  # an odd number: a block's place in the sequence counts
_WORD = 2**64
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """Of tensors as they are now; computed on their devices, read later, so that nothing waits for a GPU.

    Args:
        tensors: of which this process holds a replica; of a sharded one its own shard.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Queue the computation on each device."""
        self._sums: dict[torch.device, Tensor] = {}
        pending: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for piece in _pieces(tensors):
            waiting = pending.setdefault((piece.device, piece.dtype), [])
            if sum(len(one) for one in waiting) + len(piece) > _block(piece.device):
                self._take(waiting)
                waiting.clear()
            waiting.append(piece)
        for waiting in pending.values():
            self._take(waiting)

    def _take(self, pieces: list[Tensor]) -> None:
        if not pieces:
            return
        bits = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(torch.int64, copy=True)
        added = bits.mul_(_integers(bits.device)[: len(bits)]).sum()
        before = self._sums.get(bits.device)
        self._sums[bits.device] = added if before is None else before * _STEP + added

    def value(self) -> int:
        """The checksum, 0 <= value < 2^64; waits for the devices."""
        total = 0
        for one in self._sums.values():
            total = (total * _STEP + int(one.item())) % _WORD
        return total


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The entries of this process as flat integers, in pieces of a block at most."""
    for tensor in tensors:
        for part in _plain(tensor):
            flat = (torch.view_as_real(part) if part.is_complex() else part).flatten()
            yield from flat.view(_AS_INTEGER[flat.element_size()]).split(_block(flat.device))


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors of numbers that this process holds of one that may be sharded, quantized or not loaded."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name))
    elif not tensor.is_meta:
        yield tensor


def _block(device: torch.device) -> int:
    return _BLOCK.get(device.type, _LARGE_BLOCK)


@functools.cache
def _integers(device: torch.device) -> Tensor:
    """(block,) int64: random, public, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (_block(device),), generator=generator, dtype=torch.int64).to(device)


class Replicas:
    """The trainable weights of all processes before a step.

    Args:
        parameters: the trainable parameters by name.
        processes: all processes of the run.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], processes: Processes) -> None:
        """Queue the checksum; in a single process there is nothing to compare."""
        self._several = processes.size > 1
        self._place = _place(parameters.values(), processes) if self._several else 0
        self._checksum = Checksum(_replicated(parameters.values()) if self._several else ())

    def numbers(self) -> list[float]:
        """What `check` needs from every process: which shards it holds, and their checksum; each exact in float64."""
        value = self._checksum.value()
        return [float(self._place), float(value >> 32), float(value & 0xFFFFFFFF)]

    @staticmethod
    def check(everywhere: Sequence[Sequence[float]], step: int) -> None:
        """Make sure that processes which hold the same shards hold the same bits.

        Args:
            everywhere: the numbers of every process, in the order of the ranks.
            step: which step this is, counted from 1.

        Raises:
            DisagreementError: they differ; the same error on every process.
        """
        if differing(everywhere):
            raise DisagreementError(
                f"The trainable weights differ between processes before step {step} "
                f"({told_by_rank([_shown(one) for one in everywhere])}), so a unit's gradient would depend on the "
                f"process it was dealt to, and the bound on the sum with it. Step {step} is charged, and nothing of it "
                "reaches the weights. Give every process the same optimizer, learning rate and scheduler, change "
                "weights on all of them alike, and use no optimizer with randomness of its own on each process; then "
                "resume from a checkpoint"
            )


def differing(everywhere: Sequence[Sequence[float]]) -> bool:
    """Whether two processes with the same first number differ in the others."""
    first_of: dict[float, Sequence[float]] = {}
    return any(list(first_of.setdefault(one[0], one)) != list(one) for one in everywhere)


def _shown(numbers: Sequence[float]) -> str:
    return f"{int(numbers[1]):08x}{int(numbers[2]):08x}"


def check_model(model: nn.Module, processes: Processes) -> None:
    """Make sure that all processes hold one model: parameters, also frozen ones, and buffers.

    Raises:
        DisagreementError: replicas differ; on every process.
    """
    if processes.size == 1:
        return
    parameters = list(model.parameters())
    mine = [float(_place(parameters, processes))]
    for tensors in (_replicated(parameters), [buffer for buffer in model.buffers() if not isinstance(buffer, DTensor)]):
        value = Checksum(tensors).value()
        mine += [float(value >> 32), float(value & 0xFFFFFFFF)]
    everywhere = processes.gather_numbers(mine)
    for what, at in (("parameters", 1), ("buffers", 3)):
        chosen = [[one[0] if at == 1 else 0.0, *one[at : at + 2]] for one in everywhere]
        if differing(chosen):
            raise DisagreementError(
                f"The processes hold different {what} ({told_by_rank([_shown(one) for one in chosen])}), frozen ones "
                "included, so a unit's gradient would depend on the process it was dealt to. Load the same weights on "
                "every process, and change them before accelerator.prepare()"
            )


def _replicated(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Parameters that several processes may hold; the partitions of ZeRO-3 have one owner each."""
    return [p for p in parameters if not hasattr(p, "ds_id")]


def _place(parameters: Iterable[Tensor], processes: Processes) -> int:
    """A number that processes have in common which hold the same shard of every parameter; 0 without shards."""
    coordinates = []
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            here = parameter.device_mesh.get_coordinate() or [processes.rank]
            coordinates.append([at for at, p in zip(here, parameter.placements, strict=False) if p.is_shard()])
    if not any(coordinates):
        return 0
    return int.from_bytes(hashlib.sha256(repr(coordinates).encode()).digest()[:6], "little")
