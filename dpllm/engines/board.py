"""A board on which a run's processes report that they are alive, what they are doing, and why one of them fails.

A collective does not show why another process is missing: the others wait, or the connection breaks with an error that
has an address but no cause. Every process therefore has a thread that posts a heartbeat each second to the process
group's store (a `TCPStore`), with its current work. A process that fails posts its error there. It reaches the others
whatever they wait for: a collective of FSDP2, DeepSpeed or NCCL, a barrier while records are read, or a save.

* A failed process ends the others: each prints "rank 1: ..." and exits with that process's exit code, by itself as
  soon as its own collective breaks, otherwise by the thread after `GRACE` seconds.
* A process that others wait for is named after a minute; at the time limit (``train.ddp_timeout``) the thread ends the
  waiting process.

The board transmits only text: an error's message, which is printed anyway, and names of work such as "step 5". It does
not use other machines' clocks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from dpllm.config.launched import note_exit_code, process_number
from dpllm.config.mistakes import FAULT, MISTAKE, words_of

GRACE = 10.0
"""Seconds that a process has to exit by itself after another process failed."""

_BEAT = 1.0  # seconds between two heartbeats
_GONE = 4.0  # seconds without a heartbeat, after which it explains a broken connection
_SLACK = 1.0
_NAMED_AFTER = 60.0
_LIMIT = 1800.0  # torch's own limit of a collective
_STORE_TIMEOUT = timedelta(seconds=10)
_LONGEST = 2000  # characters of an error
_INTERRUPTED = 130


class OtherProcessError(RuntimeError):
    """Another process of the run failed or has ended, so this process cannot go on.

    Attributes:
        rank: the other process; None: unknown.
        exit_code: its exit code, which this process should use too.
        is_told: whether the other process reported its error.
    """

    rank: int | None = None
    exit_code: int = MISTAKE
    is_told: bool = False


@dataclass(frozen=True)
class Failure:
    """The error that ended the work of a process.

    Attributes:
        rank: the process.
        work: the collective work, as in `FailureBoard.during`; numbered, since it may recur.
        where: the innermost work, as text.
        words: the error on one line.
        code: the exit code of a program that ends with the error.
    """

    rank: int
    work: str
    where: str
    words: str
    code: int

    def to_error(self) -> OtherProcessError:
        """Return the error of a process that cannot go on because of this failure."""
        error = OtherProcessError(
            f"rank {self.rank}: {self.words.rstrip('.')} (in {self.where}). No process goes on with it, and nothing "
            "from an unfinished step is released. Fix the cause on that rank, and resume from a checkpoint"
        )
        error.rank, error.exit_code, error.is_told = self.rank, self.code, True
        return error


@dataclass(frozen=True)
class _State:
    """The last heartbeat of a process, and the seconds since a new one arrived, by the reader's clock."""

    beats: int
    since_mark: float  # seconds since the process last made progress, by its own clock
    waits: bool  # for the others, in a collective of `Processes`
    is_patient: bool  # whether its work may take any time
    where: str
    silence: float = 0.0


class FailureBoard:
    """The board of one process group; one object per process.

    One thread communicates with the store, which may not answer; another one reads what is known, and acts.

    Args:
        connect: creates a client of the store whose operations wait for no other thread's.
        rank: this process.
        size: the number of processes.
        name: the board's name within the store; the same on every process, and never reused.

    Attributes:
        limit: seconds after which a process that others wait for ends the run.
        before_end: called before a thread ends this process, whose interpreter does not shut down normally.
    """

    limit: float = _LIMIT
    before_end: Callable[[], None] | None = None

    def __init__(self, connect: Callable[[], dist.Store], rank: int, size: int, name: str) -> None:
        """Connect, and start the threads."""
        self._connect, self._rank, self._size, self._name = connect, rank, size, name
        self._store: Any = connect()
        self._numbers: Counter[str] = Counter()  # how often each work was begun
        self._works: list[str] = []  # the current work, outermost first
        self._patience: list[bool] = []
        self._place, self._waits, self._marked = "", 0, time.monotonic()
        self._worker = threading.current_thread()
        self._unwinds = False  # after an error in the innermost work
        self._follows: tuple[int | None, float] = (None, 0.0)  # the process whose end ends this work, and since when
        self._posts: list[Failure] = []  # to be sent
        self._has_failed = False
        self._failures: list[Failure] = []
        self._signs: dict[int, tuple[_State, float]] = {}  # of other processes, and when the heartbeat last changed
        self._looks_since: float | None = None  # since when their heartbeats are read; only if needed
        self._answered = time.monotonic()  # when the store last answered
        self._deadlines: dict[str, float] = {}  # work that failed elsewhere -> when this process is ended
        self._named = 0.0  # seconds of waiting that were reported
        self._over, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"dpllm board: {work.__name__}", daemon=True)
            for work in (self._talk, self._watch)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    # ------------------------------------------------------------------ what the run reports

    @contextlib.contextmanager
    def during(self, what: str, patient: bool = True) -> Iterator[None]:
        """Do work that every process does at the same time; if it fails on one process, it ends on all.

        Args:
            what: the work as text, such as "step 5".
            patient: whether it may take any time. If not, it must make progress (`mark`) within the time limit.

        Raises:
            OtherProcessError: replaces a connection error that another process's end explains.
            BaseException: the error of this process, which is posted.
        """
        self._numbers[what] += 1
        work = f"{what}#{self._numbers[what]}"
        self._works.append(work)
        self._patience.append(patient)
        self._worker, self._unwinds, self._follows = threading.current_thread(), False, (None, 0.0)
        self.mark("")
        if time.monotonic() - self._answered > _BEAT / 4:  # others learn where this process is, if it ends here
            self._wake.set()
        try:
            yield
        except OtherProcessError as error:
            self._unwinds, self._follows = True, (error.rank, time.monotonic())
            raise
        except GeneratorExit:
            raise
        except BaseException as error:
            self._unwinds = True
            found = self.cause(error)
            if found is not None:
                self._follows = found.rank, time.monotonic()
                raise found from error
            self._post(Failure(self._rank, work, self.where(), *told(error)))
            raise
        finally:
            self._works.remove(work)
            self._patience.pop()
            self.mark("")

    def mark(self, place: str | None = None) -> None:
        """Record that this process made progress.

        Args:
            place: the next part of its work, as text. None: unchanged.
        """
        self._marked, self._named, self._looks_since = time.monotonic(), 0.0, None
        if place is not None:
            self._place = place

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that this process waits for others while the block runs."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self.mark()

    def where(self) -> str:
        """Return a description of this process's current work."""
        works = list(self._works)
        return self._place or (works[-1].rpartition("#")[0] if works else "the program")

    def cause(self, error: BaseException) -> OtherProcessError | None:
        """Return the failure or end of another process that explains a connection error; None: nothing does.

        Waits a few seconds for it, since a connection breaks before the process at its other end has posted the cause.

        Args:
            error: this process's error.
        """
        if not _may_be_of_a_connection(error):
            return None
        began = time.monotonic()
        self._look_from_now_on()
        while True:
            if failure := self._failure_elsewhere():
                return failure.to_error()
            now, signs = time.monotonic(), dict(self._signs)
            gone = [rank for rank, (state, _) in signs.items() if state.beats < 0]
            if now - began > _GONE:
                if now - self._answered > _GONE - _SLACK:
                    return self._without_the_store()
                gone += [rank for rank, (_, since) in signs.items() if now - since > _GONE - _SLACK]
            if gone:
                return _ended(min(gone), signs[min(gone)][0])
            if now - began > _GONE:
                return None
            time.sleep(0.1)

    def close(self) -> None:
        """Tell the others that this process ends, and stop the threads; a second call does nothing.

        If this process failed and its end closes the store, it waits until the others have read the cause.
        """
        if self._over.is_set():
            return
        if self._has_failed and self._rank == 0 and not _launcher_holds_the_store():
            time.sleep(2.5 * _BEAT)
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_BEAT)  # no longer: the store may not answer

    # ------------------------------------------------------------------ the store, by one thread

    def _talk(self) -> None:
        """Send heartbeats and failures, and read those of others, as long as this process lives."""
        beats = 0
        while True:
            is_last = self._over.is_set()
            beats += 1
            if not self._ends_with_the_store():
                self._exchange(-1 if is_last else beats)
            if is_last:
                return
            self._wake.wait(_BEAT)
            self._wake.clear()

    def _exchange(self, sign: int) -> None:
        """Send and read everything that is pending."""
        try:
            self._store.set(self._key(f"beat/{self._rank}"), self._sign(sign))
            while self._posts:
                number = self._store.add(self._key("failures"), 1)
                self._store.set(self._key(f"failure/{number}"), json.dumps(asdict(self._posts[0])))
                del self._posts[0]
            self._read_failures()
            if self._looks_since is not None:
                self._read_signs()
            self._answered = time.monotonic()
        except Exception:  # from the connection to the store
            with contextlib.suppress(Exception):
                self._store = self._connect()

    def _ends_with_the_store(self) -> bool:
        """Return whether this process ends because rank 0 does, which holds the store; torch would warn about it."""
        if self._rank == 0 or self._posts or _launcher_holds_the_store():
            return False
        failure, (rank, since) = self._failure_elsewhere(), self._follows
        # A program may continue after an error, and begin other work only later.
        follows = rank == 0 and time.monotonic() - since < GRACE
        return follows or (failure is not None and failure.rank == 0)

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def _sign(self, beats: int) -> str:
        return json.dumps([beats, time.monotonic() - self._marked, self._waits > 0, self._is_patient, self.where()])

    def _read_failures(self) -> None:
        count = self._store.add(self._key("failures"), 0)
        while len(self._failures) < count:
            key = self._key(f"failure/{len(self._failures) + 1}")
            self._failures.append(Failure(**json.loads(self._store.get(key))))

    def _read_signs(self) -> None:
        for rank in range(self._size):
            key = self._key(f"beat/{rank}")
            if rank == self._rank or not self._store.check([key]):
                continue
            state = _State(*json.loads(self._store.get(key)))
            before, since = self._signs.get(rank, (state, time.monotonic()))
            self._signs[rank] = state, since if state.beats == before.beats else time.monotonic()

    def _post(self, failure: Failure) -> None:
        """Let the other thread send a failure; wait briefly until it has, since this process may end next."""
        self._has_failed = True
        self._posts.append(failure)
        self._wake.set()
        end = time.monotonic() + 3 * _BEAT
        while self._posts and time.monotonic() < end:
            time.sleep(0.02)

    # ------------------------------------------------------------------ the reaction, by another thread

    @property
    def _is_patient(self) -> bool:
        patience = list(self._patience)
        return not patience or patience[-1]

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_BEAT):
            now = time.monotonic()
            if now - last > _GONE:  # this process itself was stopped, and knows nothing about the others
                self._looks_since, self._answered = None, now
            last = now
            self._end_after_a_failure(now)
            if self._works or self._waits:
                self._look(now)

    def _look_from_now_on(self) -> None:
        """Start reading the others' heartbeats, which count from now on."""
        if self._looks_since is None:
            self._signs.clear()
            self._looks_since = time.monotonic()
            self._wake.set()

    def _failure_elsewhere(self) -> Failure | None:
        """Return the first failure of other processes in work that this one has begun and not ended."""
        works = set(self._works)
        return next((one for one in list(self._failures) if one.rank != self._rank and one.work in works), None)

    def _end_after_a_failure(self, now: float) -> None:
        """End this process if another process failed in the work that this one is still doing."""
        failure = self._failure_elsewhere()
        if failure is None or self._unwinds:  # this process exits by itself, and may be writing the report
            self._deadlines.clear()
            return
        if now >= self._deadlines.setdefault(failure.work, now + GRACE):
            self._end(str(failure.to_error()), failure.code)

    def _look(self, now: float) -> None:
        """Name the processes that others wait for, and end this process at the limit."""
        stale, named_after = now - self._marked, min(_NAMED_AFTER, self.limit / 2)
        if stale < min(2 * _GONE, named_after / 2):
            return
        self._look_from_now_on()
        mine = _State(0, stale, self._waits > 0, self._is_patient, self.where())
        others = {rank: replace(state, silence=now - since) for rank, (state, since) in dict(self._signs).items()}
        silent = {rank: one for rank, one in others.items() if one.silence > _GONE or one.beats < 0}
        alive = {rank: one for rank, one in {**others, self._rank: mine}.items() if rank not in silent}
        awaited = {rank: one for rank, one in alive.items() if not one.waits}
        unanswered = now - self._answered
        if unanswered > 2 * _GONE:  # the information about the others is old
            silent, alive, awaited = {}, {self._rank: mine}, {}
        words = self._words(silent, awaited, stale, unanswered)
        silences = [unanswered, *(one.silence for one in silent.values())]
        is_stuck = all(one.since_mark >= self.limit and not one.is_patient for one in awaited.values())
        if stale >= self.limit and (max(silences) >= self.limit - 3 * _GONE or (is_stuck and len(alive) > 1)):
            stack = _stack(self._worker) if self._rank in awaited else ""
            over = f"The time limit (train.ddp_timeout, {self.limit:g} s) has passed: this process exits"
            self._post(Failure(self._rank, (self._works or [""])[0], mine.where, words, MISTAKE))
            self._end(f"{words}. {over}{stack}", MISTAKE)
        tellers = [rank for rank, one in alive.items() if one.waits] or list(alive)
        differ = len({one.where for one in awaited.values()}) > 1
        is_long = stale >= 5 * named_after  # such as for a lock that an earlier run left
        is_told = unanswered > 2 * _GONE or silent or differ or len(awaited) < len(alive) or is_long
        if is_told and stale >= max(named_after, 2 * self._named) and self._rank == min(tellers):
            self._named = stale
            _say(f"{words}. The run ends after {self.limit:g} s of waiting (train.ddp_timeout)")

    def _words(self, silent: dict[int, _State], awaited: dict[int, _State], stale: float, unanswered: float) -> str:
        """Return a description of the processes that others wait for, and their work."""
        parts = [
            f"rank {rank} {'has ended' if one.beats < 0 else f'has been silent for {one.silence:.0f} s'} "
            f"(last in {one.where})"
            for rank, one in sorted(silent.items())[:8]
        ]
        if unanswered > 2 * _GONE:
            parts.append(f"{_holder()} has not answered for {unanswered:.0f} s; this process is in {self.where()}")
        places: dict[str, list[int]] = {}
        for rank, one in sorted(awaited.items()):
            places.setdefault(one.where, []).append(rank)
        for where, ranks in places.items():
            shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
            parts.append(f"rank{'s' * (len(ranks) > 1)} {shown} in {where}")
        return f"nothing came further for {stale:.0f} s: {'; '.join(parts) or 'every process waits for another'}"

    def _without_the_store(self) -> OtherProcessError:
        """Return the error for a case in which neither another process nor the store can be reached."""
        error = OtherProcessError(
            f"{_holder()} has ended or cannot be reached, so this process cannot go on. Nothing from an unfinished "
            "step is released. Read the output of that process and the system log for the cause, and resume from a "
            "checkpoint"
        )
        error.rank = None if _launcher_holds_the_store() else 0
        return error

    def _end(self, words: str, code: int) -> None:
        """End this process, whose main thread waits in a library and cannot be reached otherwise."""
        _say(f"error: {words}").join(5.0)
        note_exit_code(code)
        if self.before_end is not None:
            with contextlib.suppress(Exception):
                self.before_end()
        os._exit(code)


def open_board(rank: int, size: int, share: Callable[[Any], list[Any]]) -> FailureBoard | None:
    """Create the board of a process group; all processes call this together.

    The store is the one at MASTER_ADDR and MASTER_PORT, which the launcher or rank 0 opened. If there is none, rank 0
    opens a new one.

    Args:
        rank: this process.
        size: the number of processes.
        share: gathers a value from every process.

    Returns:
        The board; None: a process cannot reach a store.
    """
    opened: list[Any] = []  # the server must outlive its clients

    def main() -> tuple[str, int, str] | None:
        name = f"dpllm/{secrets.token_hex(8)}"
        with contextlib.suppress(Exception):
            _client(*_launchers_store())
            return "", 0, name
        with contextlib.suppress(Exception):
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
            opened.append(server)
            return host, server.port, name
        return None

    address = share(main() if rank == 0 else None)[0]
    board = None
    if address is not None:
        host, port, name = address

        def connect() -> dist.Store:
            assert opened or not port or rank
            return _client(*((host, port) if port else _launchers_store()))

        with contextlib.suppress(Exception):
            board = FailureBoard(connect, rank, size, name)
    if all(share(board is not None)):
        return board
    if board is not None:
        board.close()
    return None


def told(error: BaseException) -> tuple[str, int]:
    """Return an error on one line, and the exit code of a program that it ends."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C", _INTERRUPTED
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) and error.code else FAULT  # no other process succeeded
        return f"ended by sys.exit({error.code!r})", code
    try:
        words = words_of(error)
        one_line = " ".join(str(error).split())
    except Exception:  # from a user's class
        words, one_line = None, "its message is unreadable"
    text = words or f"{type(error).__name__}: {one_line}"
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return text, FAULT if words is None else MISTAKE


def is_first_to_say(text: str) -> bool:
    """Return whether this process is the first on its machine to print a text; without a launcher it always is.

    All processes find a mistake in the recipe, and one of them prints it. A process that alone has a mistake prints it
    regardless of its rank.
    """
    if process_number("WORLD_SIZE", 1) < 2:
        return True
    key = sha256(f"{socket.gethostname()}\n{os.environ.get('TORCHELASTIC_RESTART_COUNT')}\n{text}".encode()).hexdigest()
    try:
        mine = secrets.token_hex(8)
        first: bytes = _client(*_launchers_store()).compare_set(f"dpllm/said/{key}", "", mine)
        return first.decode() == mine
    except Exception:
        return True


def _launchers_store() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _client(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT)


def _may_be_of_a_connection(error: BaseException) -> bool:
    """Return whether an error, or one that it hides, has a class with which torch reports a broken connection."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            return True
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def _ended(rank: int, state: _State) -> OtherProcessError:
    how = (
        "has ended"
        if state.beats < 0
        else "has ended or stopped without a word (killed, or its machine is unreachable)"
    )
    error = OtherProcessError(
        f"rank {rank} {how} in {state.where}, so this process cannot go on. Nothing from an unfinished step is "
        "released. Read the output of that rank and the system log for the cause, and resume from a checkpoint"
    )
    error.rank = rank
    return error


def _launcher_holds_the_store() -> bool:
    """Whether the store is torchrun's, which outlives the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _holder() -> str:
    """Return a description of the process that holds the store."""
    return "the launcher of rank 0" if _launcher_holds_the_store() else "rank 0"


def _stack(thread: threading.Thread) -> str:
    """Return a thread's stack, for a process that others wait for."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "\n" + "".join(traceback.format_stack(frame)).rstrip()


def _say(text: str) -> threading.Thread:
    """Write a line to the error stream, in a thread, since a stopped reader blocks the writer."""

    def write() -> None:
        with contextlib.suppress(Exception):
            print(f"\n{text}", file=sys.stderr, flush=True)  # a progress bar may be on the current line

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread
