"""Checksums of tensors' bits, to test whether two processes, or two points in time, have the same weights.

The bound on a step assumes that all processes compute the same function; otherwise the sum would depend on the process
to which a unit is assigned. Weights can diverge without any error, for instance by a different learning rate or an edit
on one process, or an optimizer with its own randomness. `Replicas` therefore compares the processes in every step, and
`dpllm.training.checks.watch` compares steps.

The bits of all entries, as integers of at most 32 bits, are multiplied by fixed random odd integers of
64 bits and added up modulo 2^64. A difference in one integer is always detected; other differences are missed with
a probability of at most 2^-32, and no tolerance is needed. Integers of 64 bits would not work: half of all multiples of
a flipped highest bit, which is the sign of a float64, are 0 modulo 2^64.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.engines.processes import DisagreementError, Processes, told_by_rank
from dpllm.ghost.refusals import scales_of

_BLOCK = {"cpu": 1 << 15}  # integers multiplied at a time, so that a core's cache holds the products
_LARGE_BLOCK = 1 << 22  # other devices, where launches cost: 32 MiB of products, and as much for the random integers
_STEP = 0x5851F42D4C957F2D  # an odd number, so that the order of the blocks counts
_MODULUS = 2**64
_MIXED = (-7046029254386353131, -4658895280553007687)  # odd, of the SplitMix64 generator (Steele et al. 2014)
_WORD = 4  # bytes
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


class Checksum:
    """The checksum of tensors at this time, computed on their devices; only reading it waits for them.

    Args:
        tensors: replicas that this process holds; for a sharded tensor, its own shard.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        """Queue the computation on each device."""
        self._sums: dict[torch.device, Tensor] = {}
        self._count = 0
        pending: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        lengths: Counter[tuple[torch.device, torch.dtype]] = Counter()  # of the pending blocks
        for block in _blocks(tensors):
            kind = block.device, block.dtype
            waiting = pending.setdefault(kind, [])
            if lengths[kind] + len(block) > _size(block.device):
                self._take(waiting)
                waiting.clear()
                lengths[kind] = 0
            waiting.append(block)
            lengths[kind] += len(block)
        for waiting in pending.values():
            self._take(waiting)

    def _take(self, blocks: list[Tensor]) -> None:
        if not blocks:
            return
        bits = (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).to(torch.int64, copy=True)
        self._count += len(bits)
        added = bits.mul_(_odd_integers(bits.device)[: len(bits)]).sum()
        before = self._sums.get(bits.device)
        self._sums[bits.device] = added if before is None else before * _STEP + added

    def value(self) -> int:
        """Return the checksum, 0 <= value < 2^64; waits for the devices."""
        return values([self])[0]


def values(checksums: Sequence[Checksum]) -> list[int]:
    """Return the value of each checksum; reads every device once.

    >>> first, second, third = torch.zeros(9), torch.zeros(9), torch.zeros(9).index_fill_(0, torch.tensor(4), 1e-30)
    >>> one, same, other = values([Checksum([tensor]) for tensor in (first, second, third)])
    >>> one == same, one == other
    (True, False)
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for checksum in checksums:
        for device, total in checksum._sums.items():
            by_device.setdefault(device, []).append(total)
    read = {device: iter(torch.stack(totals).tolist()) for device, totals in by_device.items()}
    found = []
    for checksum in checksums:
        value = checksum._count
        for device in checksum._sums:
            value = (value * _STEP + next(read[device])) % _MODULUS
        found.append(value)
    return found


def pieces(tensor: Any) -> Iterator[Tensor]:
    """Yield this process's plain tensors that hold a tensor's values.

    Args:
        tensor: may be sharded, quantized, not loaded, or None.
    """
    if tensor is None or tensor.is_meta:
        return
    shard = getattr(tensor, "ds_tensor", None)  # ZeRO-3 gathers the parameter from it, and empties it again
    if shard is not None:
        if shard.numel() and not shard.is_meta:
            yield shard
    elif isinstance(tensor, DTensor):
        yield from pieces(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):  # consists of several tensors
        for name in tensor.__tensor_flatten__()[0]:
            yield from pieces(getattr(tensor, name))
    else:
        yield tensor


def placed_sum(values: Tensor, start: int) -> int:
    """Return a checksum of some entries of a flattened tensor, each with a multiplier for its position.

    The checksums of the fragments of a tensor add up, modulo 2^64, to the checksum of the whole. So the number of
    processes that hold it may change. A difference in a single entry is always found.

    Args:
        values: (n,) float32 or float64.
        start: position of the first value in the flattened tensor.

    >>> whole = torch.randn(9)
    >>> (placed_sum(whole[:4], 0) + placed_sum(whole[4:], 4)) % 2**64 == placed_sum(whole, 0)
    True
    """
    words = values.detach().contiguous().view(torch.int32)
    per_entry = len(words) // max(len(values), 1)
    total, at = torch.zeros((), dtype=torch.int64, device=words.device), start * per_entry
    for block in words.split(_size(words.device)):
        places = torch.arange(at, at + len(block), dtype=torch.int64, device=words.device)
        for multiplier in _MIXED:
            places = places * multiplier
            places = places ^ (places >> 29)
        total, at = total + (block.to(torch.int64) * (places | 1)).sum(), at + len(block)
    return int(total) % _MODULUS


def _blocks(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """Yield this process's entries as flat integers, in blocks."""
    for tensor in tensors:
        for piece in pieces(tensor):
            piece = piece.detach()
            flat = (torch.view_as_real(piece) if piece.is_complex() else piece).flatten()
            integers = flat.view(_AS_INTEGER[flat.element_size()])
            width = integers.element_size()
            if width < _WORD and len(integers) * width % _WORD == 0:  # as words: fewer to multiply
                if integers.storage_offset() * width % _WORD:
                    integers = integers.clone()
                integers = integers.view(torch.int32)
            yield from integers.split(_size(integers.device))


def _size(device: torch.device) -> int:
    return _BLOCK.get(device.type, _LARGE_BLOCK)


@functools.cache
def _odd_integers(device: torch.device) -> Tensor:
    """Return (block,) int64: random, odd, public, the same on every process."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (_size(device),), generator=generator, dtype=torch.int64)
    return (numbers * 2 + 1).to(device)


# ------------------------------------------------------------------------------------------------------ replicas


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
