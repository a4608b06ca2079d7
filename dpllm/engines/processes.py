"""The processes of a run, and the facts on which they must agree.

A single process is the case of size one, so other code need not distinguish it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dpllm.engines.board import Failure, FailureBoard, OtherProcessError, open_board, told

_Value = TypeVar("_Value")
_SHOWN = 8  # facts in which processes differ
_PATIENCE = timedelta(days=7)  # of the collectives, since the board ends a process that waits in vain
_WITHOUT_A_BOARD = timedelta(hours=1)  # rank 0 may be sealing a large checkpoint


class DisagreementError(ValueError):
    """The processes of one run differ in a fact that the guarantee depends on."""


class Processes:
    """All processes of the run, as in torch.distributed; a single one if it is not initialised.

    Small values (numbers, facts, errors) are exchanged over a separate gloo group, so that their collectives neither
    wait for the GPU nor have NCCL's time limit.

    Attributes:
        rank: this process's index, 0 <= rank < size. Rank 0 writes the files.
        size: the number of processes.
    """

    def __init__(self) -> None:
        """Read rank and size from torch.distributed.

        Raises:
            DisagreementError: several processes were launched, but torch.distributed is not initialised.
        """
        self._distributed = dist.is_available() and dist.is_initialized()
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if launched > 1 and not self._distributed:
            raise DisagreementError(
                f"{launched} processes were launched (WORLD_SIZE), but torch.distributed is not initialised, so each "
                "of them would draw its own units and noise. Create the Accelerator or the TrainingArguments first; "
                "on a machine without a GPU set use_cpu=True"
            )
        self.rank = dist.get_rank() if self._distributed else 0
        self.size = dist.get_world_size() if self._distributed else 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all processes, in float64; bit-identical on every process."""
        if self.size == 1:
            return [float(value) for value in values]
        return torch.tensor(self.gather_numbers(values), dtype=torch.float64).sum(dim=0).tolist()

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Return every process's float64 numbers by rank, the same count on each: one small collective."""
        mine = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.size == 1:
            return [mine.tolist()]
        everywhere = [torch.empty_like(mine) for _ in range(self.size)]
        with connected():
            dist.all_gather(everywhere, mine, group=_host_group())
        return [one.tolist() for one in everywhere]

    def int64s_from_main(self, numbers: np.ndarray, count: int) -> np.ndarray:
        """Return rank 0's (count,) int64 numbers on every process."""
        if self.size == 1:
            return numbers
        sent = torch.from_numpy(numbers.copy()) if self.is_main else torch.empty(count, dtype=torch.int64)
        if count:
            with connected():
                dist.broadcast(sent, src=0, group=_host_group())
        return sent.numpy()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return self.any_of([flag])[0]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set in any process."""
        return [total > 0 for total in self.sum([float(flag) for flag in flags])]

    def gather(self, value: _Value) -> list[_Value]:
        """Return every process's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with connected():
            dist.all_gather_object(values, value, group=_host_group())
        return values

    def from_main(self, function: Callable[[], _Value]) -> _Value:
        """Run a function on rank 0 and return its result, or raise its error, on every process.

        Raises:
            Exception: the function's exception; the same on every rank, so that all stop with one message.
        """
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except Exception as error:
                outcome[1] = _sendable(error)
        with connected():
            dist.broadcast_object_list(outcome, src=0, group=_host_group())
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def together(self, function: Callable[[], _Value]) -> _Value:
        """Run a function on every process; if it fails on one, all raise.

        Raises:
            Exception: the error of this process.
            OtherProcessError: only other processes failed; the message has the first of them and its error.
        """
        if self.size == 1:
            return function()
        failure: Exception | None = None
        try:
            with self.during("work of all processes"):  # in which they may also communicate
                result = function()
        except OtherProcessError:
            raise
        except Exception as error:
            failure = error
        self._raise_first(failure)
        return result

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Run a block on every process; if it fails on one of them, all raise.

        Unlike `together`, it is for errors of user code: it costs one small collective if none fails, and the other
        processes get no error of a type that user code may handle. The block makes no collective.

        Args:
            what: the work that is then abandoned.

        Raises:
            OtherProcessError: it failed only on another process; the message names it and its error.
            Exception: the error of this process.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failure = error
        failed = [flag > 0 for (flag,) in self.gather_numbers([float(failure is not None)])]
        if any(failed):
            self._raise_first(failure, what)

    def _raise_first(self, own: Exception | None, what: str = "") -> None:
        """Raise this process's error, or the one that names the first process with an error; otherwise do nothing."""
        try:
            told_by = self.gather(None if own is None else told(own))
        except OtherProcessError:
            if own is None:
                raise
            told_by = []
        if own is not None:
            raise own
        where = what or ("the program" if self._board is None else self._board.where())
        for rank, one in enumerate(told_by):
            if one is not None:
                raise Failure(rank, where, where, *one).to_error()

    def raise_found(self, error: Exception | None, flags: Sequence[float], what: str = "a check") -> None:
        """Raise an error that some processes found, after a different collective has exchanged flags for it.

        Args:
            error: this process's error; None: it found none.
            flags: the flags of all processes, the same list on each; nonzero for a process with an error.
            what: the work in which the error was found.

        Raises:
            Exception: the ``error``.
            OtherProcessError: only other processes have one; the message names the first of them and its error.
        """
        if error is not None and self.size == 1:
            raise error
        if any(flags):
            self._raise_first(error, what)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that every process has the same facts.

        Raises:
            DisagreementError: they differ; the message has the fact, the ranks and their values, on every rank.
        """
        everywhere = self.gather(dict(facts))
        names = dict.fromkeys(name for facts in everywhere for name in facts)
        values = {name: [other.get(name) for other in everywhere] for name in names}
        differing = {name: one for name, one in values.items() if any(value != one[0] for value in one)}
        if differing:
            shown = "; ".join(f"{name} ({told_by_rank(one)})" for name, one in list(differing.items())[:_SHOWN])
            shown += f" and {len(differing) - _SHOWN} more values" if len(differing) > _SHOWN else ""
            raise DisagreementError(
                f"The processes differ in {shown}, so their sums and noise would not belong to one private run. Start "
                "all of them with the same recipe, data and package versions"
            )

    def wait(self) -> None:
        """Wait until every process has reached this call."""
        if self.size > 1:
            with connected():
                dist.barrier(group=_host_group())

    def during(self, what: str, patient: bool = True) -> contextlib.AbstractContextManager[None]:
        """Do work that all processes do together: an error of one ends it on all (`FailureBoard.during`).

        Args:
            what: the work as text, such as "step 5".
            patient: whether it may take any time; if not, it must make progress (`mark`) within the time limit.
        """
        board = self._board
        return contextlib.nullcontext() if board is None else board.during(what, patient)

    @staticmethod
    def mark(place: str | None = None) -> None:
        """Record that this process made progress, and where it is (`FailureBoard.mark`); nothing without a board."""
        if _hosts.board is not None:
            _hosts.board.mark(place)

    @staticmethod
    def leave() -> None:
        """Tell the others that this process ends, if it ends without the interpreter's normal shutdown."""
        if _hosts.board is not None:
            _hosts.board.close()

    def set_time_limit(self, seconds: float, before_end: Callable[[], None]) -> None:
        """Set the seconds after which a process that others wait for ends the run; called by all processes together.

        Args:
            seconds: the limit (``train.ddp_timeout``).
            before_end: called before the board ends this process (`FailureBoard`).
        """
        if self._board is not None:
            self._board.limit, self._board.before_end = float(seconds), before_end

    @property
    def _board(self) -> FailureBoard | None:
        if self.size == 1:
            return None
        _host_group()
        return _hosts.board


def told_by_rank(values: Sequence[Any], most: int = 8) -> str:
    """Return the ranks' values as text: the first ranks, and the first one that differs from rank 0.

    >>> told_by_rank(["a", "b"])
    'rank 0: a, rank 1: b'
    """
    shown = list(range(min(most, len(values))))
    odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if odd is not None and odd not in shown:
        shown.append(odd)
    return ", ".join(f"rank {rank}: {values[rank]}" for rank in shown)


@dataclass
class _Hosts:
    """The gloo group over the processes of the default group, and their board."""

    world: Any = None
    group: Any = None
    board: FailureBoard | None = None


_hosts = _Hosts()


def _host_group() -> Any:
    """Return the gloo group of all processes; created at the first collective, which all of them call together."""
    global _hosts
    world = dist.group.WORLD
    if _hosts.world is not world:
        if _hosts.board is not None:
            _hosts.board.close()
        first, size = dist.new_group(backend="gloo", timeout=_WITHOUT_A_BOARD), dist.get_world_size()

        def share(value: Any) -> list[Any]:
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=first)
            return values

        board = open_board(dist.get_rank(), size, share)
        if board is None:
            _hosts = _Hosts(world, first, None)
        else:
            _hosts = _Hosts(world, dist.new_group(backend="gloo", timeout=_PATIENCE), board)
            dist.destroy_process_group(first)
    return _hosts.group


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Wait for other processes within the block; if one cannot be reached, raise an error with the cause.

    Raises:
        OtherProcessError: replaces a connection's own error, which has an address but no cause.
    """
    board = _hosts.board
    try:
        with contextlib.nullcontext() if board is None else board.waiting():
            yield
    except RuntimeError as error:  # gloo has no error class of its own
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        if board is not None and (cause := board.cause(error)) is not None:
            raise cause from error
        words = " ".join(str(error).split())[:200]
        raise OtherProcessError(
            f"Another process of the run has ended, waits elsewhere or cannot be reached ({words}). Nothing from an "
            "unfinished step is released. Find the first error in the output of all processes, and resume from a "
            "checkpoint"
        ) from error


def found_by(check: Callable[[], None]) -> Exception | None:
    """Run a check and return its error, for `Processes.raise_found`."""
    try:
        check()
    except Exception as error:
        return error
    return None


def _sendable(error: Exception) -> Exception:
    """Return the error itself if it can be sent to another process, otherwise one with the same text."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
