"""What ran, written down durably before anything of it is released.

Place in the flow: `private_step` charges each step here before the optimizer sees the noisy gradient; the report
computes ε from this file and from nothing else. One JSON object per line, appended and flushed to the disk (fsync)
before the call returns, so that no crash can lose a charged step. Each line carries a hash of itself and of all lines
before it: an edited, lost or reordered line is found, unless lines are cut off at the very end. The hash is no
signature: it guards against accidents, and against edits by someone who does not redo the hashes.

Kinds of lines: "run" (a process started or resumed), "step", "disclosure" (something that depends on the private data
was written out, and ε does not cover it), "diagnostic", "fact" (a fact of the run for the report), "open point" (a
reason not to release before people have settled it), "recovered" (the line before was torn by a crash), "end".
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import dpllm
from dpllm.accounting import Step

LEDGER_FILE = "privacy_ledger.jsonl"
ENTROPY_SYSTEM = "operating system"
ENTROPY_SEEDED = "fixed seed (NOT PRIVATE)"

_CHAIN_START = hashlib.sha256(b"dpllm privacy ledger, format 1").hexdigest()[:16]
_CHAIN_LENGTH = 16
_SUFFIX_LENGTH = len(', "chain": ""}') + _CHAIN_LENGTH
_STEP_START = '{"kind": "step", "step": '
_STEP_FIELDS = tuple(item.name for item in dataclasses.fields(Step))


class LedgerError(ValueError):
    """The ledger is not what the run left behind, or does not belong to this plan."""


class _Plan(Protocol):
    @property
    def hash(self) -> str: ...
    @property
    def step(self) -> Step: ...
    @property
    def seeded(self) -> bool: ...


@dataclass
class LedgerNotes:
    """Lines of a ledger that charge nothing and are shown in the report."""

    facts: dict[str, list[str | int | float]] = field(default_factory=dict)
    """Facts of the run by name, each with its distinct values in the order in which they were written."""
    open_points: list[str] = field(default_factory=list)
    """Reasons not to release before people have settled them, each once."""

    def add_fact(self, name: str, value: str | int | float) -> bool:
        """Add a value of a fact; return whether it is new."""
        values = self.facts.setdefault(name, [])
        if any(type(value) is type(known) and value == known for known in values):
            return False
        values.append(value)
        return True

    def add_open_point(self, text: str) -> bool:
        """Add an open point; return whether it is new."""
        if text in self.open_points:
            return False
        self.open_points.append(text)
        return True


@dataclass
class LedgerContents:
    """What a ledger says."""

    path: Path
    runs: list[dict[str, Any]] = field(default_factory=list)
    """One entry per start or resumption: run, plan_hash, version, started_at, entropy, public, planned_step, budget."""
    history: list[tuple[Step, int]] = field(default_factory=list)
    """The steps charged, in order, equal neighbours counted together."""
    disclosures: dict[str, int] = field(default_factory=dict)
    """What was written out that ε does not cover, and how often."""
    diagnostics: dict[str, int] = field(default_factory=dict)
    """What else was counted."""
    notes: LedgerNotes = field(default_factory=LedgerNotes)
    """Facts and open points for the report."""
    torn_lines: list[int] = field(default_factory=list)
    """Numbers of lines (the first is 1) that a crash left incomplete."""
    torn_steps: int = 0
    """How many of those were, or may have been, steps. They are charged."""
    end: str | None = None
    """Why the last run ended. None: it has not ended, or crashed."""
    sha256: str = ""
    """Hash of the whole file."""

    @property
    def num_steps(self) -> int:
        """Steps charged."""
        return sum(count for _, count in self.history)

    @property
    def seeded(self) -> bool:
        """Whether any run drew from a fixed seed; then nothing in it is private."""
        return any(run["entropy"] != ENTROPY_SYSTEM for run in self.runs)

    @property
    def public(self) -> list[str]:
        """What was declared public, over all runs, each once."""
        return list(dict.fromkeys(line for run in self.runs for line in run["public"]))

    def _charge(self, step: Step) -> None:
        if self.history and self.history[-1][0] == step:
            self.history[-1] = (step, self.history[-1][1] + 1)
        else:
            self.history.append((step, 1))


class Ledger:
    """A ledger open for appending; made by `create` or `open`.

    Guarantee: when an ``append_*`` call returns, its line is on the disk.
    """

    def __init__(
        self, path: Path, descriptor: int, chain: str, num_steps: int, notes: LedgerNotes | None = None
    ) -> None:
        """Take over an open file; use `create` or `open`."""
        self.path = path
        self._descriptor: int | None = descriptor
        self._chain = chain
        self._num_steps = num_steps
        self._notes = notes or LedgerNotes()  # as the file holds them, so that none is written twice
        self._running = False
        self._torn = False

    @classmethod
    def create(
        cls, path: str | Path, plan: _Plan, public: Sequence[str] = (), budget: Mapping[str, str] | None = None
    ) -> Ledger:
        """Start the ledger of a new run.

        Args:
            path: the file, which must not exist.
            plan: the privacy plan of the run.
            public: what the run learnt from public data before, one line each.
            budget: the budget file's name ("file") and the run's entry in it ("entry").

        Raises:
            LedgerError: the file exists.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        except FileExistsError as error:
            raise LedgerError(
                f"{path} is the ledger of an earlier run, and its steps stay charged. Resume that run, or choose an "
                "empty output folder"
            ) from error
        _lock(path, descriptor)
        _sync_folder(path.parent)
        ledger = cls(path, descriptor, _CHAIN_START, 0)
        ledger._append_run(plan, public, budget)
        return ledger

    @classmethod
    def open(cls, path: str | Path, plan: _Plan, public: Sequence[str] = ()) -> Ledger:
        """Continue the ledger of a run that is resumed; everything in it stays charged.

        Args:
            path: the file.
            plan: the privacy plan, which must be the one the ledger was started with.
            public: what was learnt from public data since, one line each.

        Raises:
            LedgerError: the file is missing, edited or incomplete other than by a crash, or of another plan.
        """
        path = Path(path)
        contents = read_ledger(path)
        for run in contents.runs:
            if run["plan_hash"] != plan.hash:
                raise LedgerError(
                    f"{path} was written under the plan {run['plan_hash'][:12]}, and this one is {plan.hash[:12]}: "
                    "data, batch size, noise or steps differ. Resume with the configuration of the first run"
                )
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        _lock(path, descriptor)
        reader = _Reader(path)  # once more: from here on nobody else appends
        ledger = cls(path, descriptor, reader.chain, reader.contents.num_steps, reader.contents.notes)
        if not reader.ends_with_newline:
            ledger._write(b"\n")
        if reader.torn_tail is not None:
            ledger._append({"kind": "recovered", "line": reader.torn_tail[0], "charged": reader.torn_tail[1]})
        ledger._append_run(plan, public, contents.runs[0].get("budget"))
        return ledger

    @property
    def num_steps(self) -> int:
        """Steps charged so far, those of earlier runs included."""
        return self._num_steps

    def append_step(self, step_number: int, step: Step) -> None:
        """Charge a step. Call it before anything of the step is used.

        Args:
            step_number: counted from 0 over all runs of this ledger; equals `num_steps`.
            step: what ran.

        Raises:
            LedgerError: the number is not the next one, or the run has ended.
        """
        if step_number != self._num_steps:
            raise LedgerError(f"step {step_number} can't be charged: the next one of {self.path} is {self._num_steps}")
        if not self._running:
            raise LedgerError(f"step {step_number} can't be charged: the run in {self.path} has ended")
        self._append({"kind": "step", "step": step_number, **_fields_of(step)})
        self._num_steps += 1

    def append_disclosure(self, what: str, count: int = 1) -> None:
        """Note that something that depends on the private data was written out, which ε does not cover."""
        self._append_count("disclosure", what, count)

    def append_diagnostic(self, what: str, count: int = 1) -> None:
        """Count something worth knowing, such as units whose gradient was not finite."""
        self._append_count("diagnostic", what, count)

    def append_fact(self, name: str, value: str | int | float) -> None:
        """Note a fact of the run, which the report shows. A value that the ledger already holds isn't written again.

        Args:
            name: of the fact, in words, such as "largest difference of a row's loss alone and in a batch".
            value: a text of one line, or a finite number. It must not depend on the private data beyond what ε covers.

        Raises:
            ValueError: the name is empty, or the value is no text and no finite number.
        """
        name, value = _one_line("fact's name", name), _fact_value(name, value)
        if self._notes.add_fact(name, value):
            self._append({"kind": "fact", "name": name, "value": value})

    def append_open_point(self, text: str) -> None:
        """Note a reason not to release before people have settled it. A text that is already there isn't written again.

        Args:
            text: one line: the finding, the value and the remedy.

        Raises:
            ValueError: the text is empty.
        """
        text = _one_line("open point", text)
        if self._notes.add_open_point(text):
            self._append({"kind": "open point", "text": text})

    def append_end(self, reason: str) -> None:
        """Note why the run ended; afterwards no step can be charged until the ledger is opened again."""
        self._append({"kind": "end", "reason": reason})
        self._running = False
        assert self._descriptor is not None
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Ledger:
        """Return the ledger itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def _append_run(self, plan: _Plan, public: Sequence[str], budget: Mapping[str, str] | None) -> None:
        self._append(
            {
                "kind": "run",
                "run": secrets.token_hex(8),
                "plan_hash": plan.hash,
                "version": dpllm.__version__,
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "entropy": ENTROPY_SEEDED if plan.seeded else ENTROPY_SYSTEM,
                "public": list(public),
                "planned_step": _fields_of(plan.step),
                "budget": dict(budget) if budget else None,
            }
        )
        self._running = True

    def _append_count(self, kind: str, what: str, count: int) -> None:
        if count < 1:
            raise ValueError(f"a {kind} counts at least 1, got {count}")
        self._append({"kind": kind, "what": what, "count": int(count)})

    def _append(self, entry: dict[str, Any]) -> None:
        body = json.dumps(entry, allow_nan=False)
        chain = _next_chain(self._chain, body)
        self._write(f'{body[:-1]}, "chain": "{chain}"}}\n'.encode("ascii"))
        self._chain = chain

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            raise LedgerError(f"{self.path} is closed")
        if self._torn:
            raise LedgerError(
                f"{self.path} could not be written before, and may end in half a line. Nothing more is charged to it: "
                "make room on the disk and resume the run, which mends it"
            )
        self._torn = True  # until it is known to be on the disk
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)
        self._torn = False


def read_ledger(path: str | Path) -> LedgerContents:
    """Read and check a ledger.

    A last line that a crash left incomplete is not an error: it is listed in `torn_lines`, and when it was, or may have
    been, a step, that step is charged.

    Raises:
        LedgerError: the file is missing, or a line was edited, lost, moved or added; the message gives its number.
    """
    return _Reader(Path(path)).contents


class _Reader:
    """One pass over a ledger file."""

    def __init__(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise LedgerError(f"{path} can't be read ({error.strerror}); without a ledger there is no ε") from error
        self.contents = LedgerContents(path=path, sha256=hashlib.sha256(data).hexdigest())
        self.chain = _CHAIN_START
        self.ends_with_newline = data.endswith(b"\n")
        self.torn_tail: tuple[int, bool] | None = None
        self._running = False
        self._steps_by_text: dict[str, Step] = {}
        # A byte outside ASCII can only come from damage; it becomes a text that fits no hash.
        lines = data.decode("ascii", errors="replace").split("\n")
        if lines[-1] == "":
            lines.pop()
        self._read(lines)
        if not self.contents.runs:
            raise LedgerError(f"{path} names no run, so nothing was charged: start in an empty output folder")

    def _read(self, lines: list[str]) -> None:
        # The step number is kept here: counting the history anew for each line would take quadratic time.
        self._num_steps = 0
        for number, line in enumerate(lines, start=1):
            body = line[:-_SUFFIX_LENGTH] + "}"
            chain = _next_chain(self.chain, body)
            if line[-_SUFFIX_LENGTH:] != f', "chain": "{chain}"}}':
                self._take_damaged(number, line, lines)
                continue
            self.chain = chain
            if body.startswith(_STEP_START):
                self._take_step(number, body)
            else:
                self._take(number, json.loads(body))

    def _fail(self, number: int, what: str) -> LedgerError:
        return LedgerError(
            f"{self.contents.path} line {number}: {what}. The ledger is not what the run left behind, so ε can't be "
            "stated; restore the file from a copy"
        )

    def _take_damaged(self, number: int, line: str, lines: list[str]) -> None:
        """Accept a line torn by a crash: the last one without its newline, or one that was recovered right after."""
        is_last = number == len(lines) and not self.ends_with_newline
        next_line = lines[number] if number < len(lines) else ""
        recovered = next_line.startswith(f'{{"kind": "recovered", "line": {number}, ')
        if not is_last and not recovered:
            raise self._fail(number, "edited, or lines before it are missing")
        # A fragment too short to tell counts as a step: charging one too many is safe.
        charged = _STEP_START.startswith(line[: len(_STEP_START)])
        self.contents.torn_lines.append(number)
        if charged:
            if not self.contents.runs:
                raise self._fail(number, "torn before the run was named")
            self.contents._charge(Step(**self.contents.runs[-1]["planned_step"]))
            self.contents.torn_steps += 1
            self._num_steps += 1
        if is_last:
            self.torn_tail = (number, charged)

    def _take_step(self, number: int, body: str) -> None:
        step_number, _, fields = body[len(_STEP_START) :].partition(", ")
        if step_number != str(self._num_steps):
            raise self._fail(number, f"step {step_number} where step {self._num_steps} was due")
        if not self._running:
            raise self._fail(number, "a step outside a run")
        step = self._steps_by_text.get(fields)
        if step is None:
            step = self._steps_by_text[fields] = Step(**json.loads("{" + fields))
        self.contents._charge(step)
        self._num_steps += 1

    def _take(self, number: int, entry: dict[str, Any]) -> None:
        contents, kind = self.contents, entry.pop("kind", None)
        if kind == "run":
            contents.runs.append(entry)
            contents.end = None
            self._running = True
        elif kind == "disclosure":
            contents.disclosures[entry["what"]] = contents.disclosures.get(entry["what"], 0) + entry["count"]
        elif kind == "diagnostic":
            contents.diagnostics[entry["what"]] = contents.diagnostics.get(entry["what"], 0) + entry["count"]
        elif kind == "fact":
            contents.notes.add_fact(entry["name"], entry["value"])
        elif kind == "open point":
            contents.notes.add_open_point(entry["text"])
        elif kind == "end":
            contents.end = entry["reason"]
            self._running = False
        elif kind != "recovered":
            raise self._fail(number, f"unknown kind {kind!r}")


def is_being_written(path: str | Path) -> bool:
    """Return whether a run has this ledger open at the moment.

    Raises:
        LedgerError: the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except OSError as error:
        raise LedgerError(f"{path} can't be read ({error.strerror})") from error
    return False


def _lock(path: Path, descriptor: int) -> None:
    """Keep other processes from appending until the run ends; the system lets go when the process dies.

    Raises:
        LedgerError: another process is writing it. The descriptor is closed.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise LedgerError(
            f"{path} is being written by another run at this moment, whose steps and these would be charged over each "
            "other. Wait for it to end, or stop it"
        ) from error


def _one_line(what: str, text: str) -> str:
    words = " ".join(str(text).split())
    if not words:
        raise ValueError(f"the {what} is empty; write one line")
    return words


def _fact_value(name: str, value: str | int | float) -> str | int | float:
    if isinstance(value, str):
        return _one_line(f"value of the fact {name!r}", value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise ValueError(f"the fact {name!r} is {value!r}; give a text or a finite number")


def _fields_of(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in _STEP_FIELDS}


def _next_chain(chain: str, body: str) -> str:
    return hashlib.sha256(f"{chain}{body}".encode("utf-8", errors="replace")).hexdigest()[:_CHAIN_LENGTH]


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the system lets folders be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
