"""Record the steps that ran, durably and before any result of a step is released.

`private_step` charges each step here before the optimizer sees the noisy gradient; the report computes ε only from this
file. It has one JSON object per line, which is appended and flushed to the disk (fsync) before the call returns, so no
crash can lose a charged step. Each line contains a hash of itself and of all previous lines, so an edited, lost or
reordered line is detected, unless lines are cut off at the very end. The hash is not a signature: it protects against
accidents, and against edits by someone who does not recompute the hashes.

Kinds of lines: "run" (a process started or resumed), "step", "charge" (answers of a query run), "disclosure" (something
that depends on the private data was written out, and ε does not cover it), "fact" (a fact about the run for the
report), "score" (the model's score on public held-out records, by which `dpllm methods tune` compares runs), "open
point" (a reason not to release before people have settled it), "settled" (what people checked about such a reason, who,
and when), "public start" (the files of the public training at the start of the run, by hash), "released"
(the files of a saved model, by hash), "audit" (the verdict of an audit), "pages" (the files of the report and the model
card, by hash), "rate" (the learning rates from the update after a step on), "adopted" (people declared this copy of the
file to be the ledger), "recovered" (a crash left the previous line incomplete), "end". The line of each start names the
commit of dpllm that ran. The line of a step also holds learning rates that changed before it, which saves a separate
write. The ledger is published, so counts for single steps that depend on private rows are in a different file
(`dpllm.privacy.private_folder`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from dpllm.config.tasks import Score
from dpllm.config.versions import code_version
from dpllm.mechanism.catalogue import to_fields
from dpllm.mechanism.events import Event
from dpllm.privacy.chained_file import ChainedFile, is_copy, is_locked
from dpllm.privacy.ledger_reader import (
    ENTROPY,
    LEDGER_FORMAT,
    LedgerHead,
    LedgerNotes,
    LedgerReader,
)
from dpllm.privacy.ledger_reader import ENTROPY_SEEDED as ENTROPY_SEEDED
from dpllm.privacy.ledger_reader import ENTROPY_SYSTEM as ENTROPY_SYSTEM
from dpllm.privacy.ledger_reader import LedgerContents as LedgerContents
from dpllm.privacy.ledger_reader import LedgerError as LedgerError
from dpllm.privacy.ledger_reader import read_ledger as read_ledger
from dpllm.privacy.private_folder import append_diagnostic, is_own_process, known_writer

LEDGER_FILE = "privacy_ledger.jsonl"
REPORT_FILE = "privacy_report.json"


class _Plan(Protocol):
    @property
    def hash(self) -> str: ...
    @property
    def event(self) -> Event: ...
    @property
    def seeded(self) -> bool: ...
    @property
    def randomness(self) -> str: ...


class Ledger(ChainedFile):
    """A ledger that is open for appending. `create` and `open` return one.

    Guarantee: when an ``append_*`` call returns, its line is on the disk.
    """

    error = LedgerError

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over an open and locked file; use `create` or `open`."""
        super().__init__(path, descriptor)
        self._num_steps = 0
        self._notes = LedgerNotes()  # already in the file, so that none is written twice
        self.steps_planned: int | None = None  # of all starts together, where a resume allows fewer than the plan
        self._running = False
        self._rate: str | None = None  # of updates since the last step, and not yet written

    @classmethod
    def create(
        cls, path: str | Path, plan: _Plan, public: Sequence[str] = (), budget: Mapping[str, str] | None = None
    ) -> Ledger:
        """Start the ledger of a new run.

        Args:
            path: the file, which must not exist.
            plan: the privacy plan of the run.
            public: values that the run previously took from public data, one line each.
            budget: the budget file's name ("file") and the run's entry in it ("entry").

        Raises:
            LedgerError: the file exists.
        """
        path = Path(path)
        try:
            ledger = cls.make(path)
        except FileExistsError as error:
            raise LedgerError(
                f"{path} is the ledger of an earlier run, whose steps stay charged. Resume that run, or choose an "
                "empty output folder"
            ) from error
        ledger._append_run(plan, public, budget)
        return ledger

    @classmethod
    def open(
        cls, path: str | Path, plan: _Plan, public: Sequence[str] = (), steps_allowed: int | None = None
    ) -> Ledger:
        """Continue the ledger of a run that is resumed; everything in it stays charged.

        Args:
            path: the file.
            plan: the privacy plan, which must be the one the ledger was started with.
            public: values taken from public data since then, one line each.
            steps_allowed: steps of all starts together that the resumed run may take; None: all steps of the plan.

        Raises:
            LedgerError: the file is missing, edited, incomplete but not because of a crash, written under a different
                plan, or a copy of the file that the run wrote (`require_own_file`); or it lost lines
                (`refuse_lost_lines`).
        """
        path = Path(path)
        contents = read_ledger(path)
        for run in contents.runs:
            if run["plan_hash"] != plan.hash:
                raise LedgerError(
                    f"{path} was written under the plan {run['plan_hash'][:12]}, but this plan is {plan.hash[:12]}: "
                    "data, batch size, noise or steps differ. Resume with the configuration of the first run"
                )
        refuse_lost_lines(contents)
        require_own_file(contents)
        ledger = cls._continued(path)
        ledger._append_run(plan, public, contents.runs[0].get("budget"), steps_allowed)
        return ledger

    @classmethod
    def annotate(cls, path: str | Path) -> Ledger:
        """Open a ledger for lines that charge nothing, such as the verdict of an audit after the run.

        Raises:
            LedgerError: the file is missing or edited, or a run is writing it.
        """
        return cls._continued(Path(path))

    @classmethod
    def _continued(cls, path: Path) -> Ledger:
        ledger = cls.take(path)
        reader = LedgerReader(path)
        ledger.go_on(reader.chain, reader.num_bytes)
        ledger._num_steps, ledger._notes = reader.contents.num_steps, reader.contents.notes
        if not reader.ends_with_newline:
            ledger._write(b"\n")
        if reader.torn_tail is not None:
            ledger.append({"kind": "recovered", "line": reader.torn_tail[0], "charged": reader.torn_tail[1]})
        return ledger

    @staticmethod
    def is_locked_words(path: Path) -> str:
        """Return the error for a ledger that another run is writing."""
        remedy = "Wait for that run to end, or stop it"
        if is_own_process(path.parent):
            remedy = 'It is a run of this process: call finish("failed") on it, or restart Python'
        return (
            f"another run is writing {path}{known_writer(path.parent)}, and one ledger must not mix the steps of two "
            f"runs. {remedy}"
        )

    @property
    def num_steps(self) -> int:
        """Steps charged so far, including those of earlier starts."""
        return self._num_steps

    @property
    def head(self) -> LedgerHead:
        """The current head of the ledger."""
        return LedgerHead(self._chain, self._num_steps)

    def append_step(self, step_number: int, step: Event, threshold: float | None = None) -> None:
        """Charge a step. Call it before any result of the step is used.

        Args:
            step_number: counted from 0 over all runs of this ledger; equals `num_steps`.
            step: the event of the step.
            threshold: the clip threshold of the step, a function of earlier releases, where the clipping adapts.

        Raises:
            LedgerError: the number is not the next one, or the run has ended.
        """
        if step_number != self._num_steps:
            raise LedgerError(f"step {step_number} cannot be charged: the next one of {self.path} is {self._num_steps}")
        if not self._running:
            raise LedgerError(f"step {step_number} cannot be charged: the run in {self.path} has ended")
        adapted = {} if threshold is None else {"threshold": threshold}
        rate = {} if self._rate is None else {"rate": self._rate}
        self.append({"kind": "step", "step": step_number, **rate, **adapted, **to_fields(step)})
        self._rate_is_written()
        self._num_steps += 1

    def note_rate(self, rate: str) -> None:
        """Note the learning rates of an update after the last step, unless they equal those of the previous update.

        They are written with the next step, by `write_rate` or at the end, whichever comes first.

        Args:
            rate: the rates of all groups, separated by commas.
        """
        if rate == (self._rate or next((known for _, known in reversed(self._notes.rates)), None)):
            return
        self.write_rate()  # of an earlier update after the same step
        self._rate = rate

    def write_rate(self) -> None:
        """Write the last noted learning rates, before weights are saved."""
        if self._rate is not None:
            self.append({"kind": "rate", "step": self._num_steps, "rate": self._rate})
            self._rate_is_written()

    def _rate_is_written(self) -> None:
        if self._rate is not None:
            self._notes.rates.append((self._num_steps, self._rate))
        self._rate = None

    def append_charge(self, name: str, event: Event, count: int = 1) -> None:
        """Charge answers of a query run. Call it before any of them is computed.

        Raises:
            LedgerError: the run has ended.
            ValueError: the count is not positive.
        """
        if not self._running:
            raise LedgerError(f"{name!r} cannot be charged: the run in {self.path} has ended")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"the count of {name!r} must be a whole number of at least 1, got {count!r}")
        self.append({"kind": "charge", "name": name, "count": count, **to_fields(event)})
        self._num_steps += count

    def append_disclosure(self, what: str, count: int = 1) -> None:
        """Note that something was written out that depends on the private data and that ε does not cover."""
        if count < 1:
            raise ValueError(f"the count of a disclosure must be at least 1, got {count}")
        self.append({"kind": "disclosure", "what": what, "count": int(count)})

    def append_diagnostic(self, what: str, count: int = 1) -> None:
        """Count an event such as units whose gradient was not finite, in a file that must not be released."""
        append_diagnostic(self.path.parent, self._num_steps, what, count)

    def append_fact(self, name: str, value: str | int | float) -> None:
        """Note a fact of the run, which the report shows. A value that the ledger already holds is not written again.

        Args:
            name: name of the fact, in words, such as "largest difference of a row's loss alone and in a batch".
            value: a text of one line, or a finite number. It must depend on the private data only in ways that ε
                covers.

        Raises:
            ValueError: the name is empty, or the value is neither a text nor a finite number.
        """
        name, value = _one_line("fact's name", name), _fact_value(name, value)
        if self._notes.add_fact(name, value):
            self.append({"kind": "fact", "name": name, "value": value})

    def append_score(self, score: Score, value: float) -> None:
        """Note the score of the model on public held-out records, not rounded; nothing if it is not finite.

        Args:
            score: of the model's task.
            value: it depends on the private data only through the model, so ε covers it.
        """
        if math.isfinite(value):
            self.append({"kind": "score", **dataclasses.asdict(score), "value": float(value)})

    def append_open_point(self, text: str) -> None:
        """Note a reason not to release before people have settled it. A known text is not written again.

        Args:
            text: one line: the finding, the value and the remedy.

        Raises:
            ValueError: the text is empty.
        """
        text = _one_line("open point", text)
        if self._notes.add_open_point(text):
            self.append({"kind": "open point", "text": text})

    def append_settled(self, point: str, statement: str, by: str) -> None:
        """Note that people settled an open point of the report, with today's date.

        Raises:
            ValueError: one of them is empty.
        """
        self.append(
            {
                "kind": "settled",
                "point": _one_line("settled point", point),
                "statement": _one_line("statement about a point", statement),
                "by": _one_line("name of the person who settled a point", by),
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )

    def append_released(self, folder: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Note the files of a saved model, by size and hash, so that `dpllm verify` can check them.

        Args:
            folder: name of the model's folder, without its path.
            files: name in the folder to {"size", "hashed", "sha256"} (`dpllm.privacy.checkpoints.seal`).
        """
        self.append({"kind": "released", "folder": folder, "files": {name: dict(files[name]) for name in files}})

    def append_public_start(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Note the files of the public training at the start of the run, in the form of `append_released`."""
        self.append({"kind": "public start", "files": {name: dict(files[name]) for name in files}})

    def append_audit(self, file: str, sha256: str, summary: str) -> None:
        """Note the verdict of an audit of the run's model, which the report then shows.

        Args:
            file: name of the audit's results.
            sha256: hash of that file.
            summary: the verdict in words, for the report.
        """
        self.append({"kind": "audit", "file": file, "sha256": sha256, "summary": _one_line("audit's summary", summary)})

    def append_pages(self, files: Mapping[str, str]) -> None:
        """Note the files of the report, or the card, by hash, so that `dpllm verify` can check them.

        Hashes that the ledger already names last are not written again.

        Args:
            files: name in the ledger's folder to SHA-256.
        """
        new = {name: digest for name, digest in files.items() if self._notes.pages.get(name) != digest}
        if new:
            self.append({"kind": "pages", "files": new})
            self._notes.pages |= new

    def append_adopted(self) -> None:
        """Note that people declared this copy of the file to be the run's ledger; see `require_own_file`."""
        run = secrets.token_hex(8)
        self.append({"kind": "adopted", "run": run, "file": self.identity(run)})

    def append_end(self, reason: str, independent: bool = False) -> None:
        """Note why the run ended; afterwards no step can be charged until the ledger is opened again.

        Args:
            reason: why the run ended.
            independent: whether the reason depends neither on the private data nor on the run's releases. Only then is
                the stated ε that of the steps taken, if they are fewer than planned.
        """
        self.write_rate()
        self.append({"kind": "end", "reason": reason, **({"independent": True} if independent else {})})
        self._running = False
        self.unlock()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a line as `ChainedFile.append`, after those that other programs added."""
        self._take_notes_of_others()
        super().append(entry)

    def require_intact(self) -> None:
        """Check that the file under the ledger's name is the file that this run writes, and that it is complete.

        Raises:
            LedgerError: it was replaced, removed, cut, or written by another process. If it was replaced, this run's
                lines are saved next to it.
        """
        self._take_notes_of_others()
        super().require_intact()

    def _moved_words(self, what: str) -> str:
        return (
            f"{self.path} was {what} during the run, so this run's steps could not be charged there. Its "
            f"{self._num_steps} charged steps are saved in {self._rescue()}. Rename that file to {self.path.name}, and "
            "resume"
        )

    def _changed_words(self, size: int) -> str:
        last = known_writer(self.path.parent)
        return (
            f"{self.path} has {size} bytes, but this run wrote or read {self._size}: another process wrote to it or "
            f"cut it{f'; the last run started here{last}' if last else ''}. Make sure that only one run writes in the "
            "folder, restore the file from a backup, and resume"
        )

    def _take_notes_of_others(self) -> None:
        """Continue after lines that were added after the run ended and that charge nothing (`annotate`).

        An audit adds its verdict, and people settle open points, while a program still holds the trainer of the run.
        """
        if self._running or os.fstat(self._open).st_size <= self._size:
            return
        try:
            reader = LedgerReader(self.path, wanted=self._chain)
        except LedgerError:  # the size check reports that this run did not write the file
            return
        if reader.steps_at_wanted == reader.contents.num_steps == self._num_steps and not reader.torn_tail:
            self.go_on(reader.chain, reader.num_bytes)
            self._notes = reader.contents.notes

    def _rescue(self) -> Path:
        """Save the lines of a file that was removed or replaced."""
        path = self.path.with_name(f"{self.path.name}.{self._chain}")
        path.write_bytes(os.pread(self._open, self._size, 0))
        return path

    def _append_run(
        self,
        plan: _Plan,
        public: Sequence[str],
        budget: Mapping[str, str] | None,
        steps_allowed: int | None = None,
    ) -> None:
        run, code = secrets.token_hex(8), code_version()
        self.steps_planned = steps_allowed
        self.append(
            {
                "kind": "run",
                "run": run,
                "format": LEDGER_FORMAT,
                "plan_hash": plan.hash,
                **code._asdict(),
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "entropy": ENTROPY_SEEDED if plan.seeded else ENTROPY[plan.randomness],
                "public": list(public),
                "planned_step": to_fields(plan.event),
                "budget": dict(budget) if budget else None,
                "file": self.identity(run),
                **({} if steps_allowed is None else {"num_steps": steps_allowed}),
            }
        )
        self._running = True


def require_own_file(contents: LedgerContents) -> None:
    """Refuse to continue a copy of the ledger that its last run wrote.

    A copied folder can be resumed twice, and a folder restored from an older copy lacks the steps taken since. Each
    copy would state only the ε of its own steps, but a person in the data would bear the ε of all steps. No file shows
    which copy should continue, so people declare it with `dpllm verify FOLDER --adopt`, which adds an open point to the
    report. A file keeps its inode when its folder is renamed; cp, rsync, tar or a restored backup give it a different
    inode. Inode generations, if the file system has them, distinguish files that used the same inode one after another:
    ext4 gives a deleted file's inode to the next file. File systems that number files differently at each mount (some
    FUSE ones) also require `dpllm verify --adopt`. If an older copy overwrote the file in place, the run's report
    (`refuse_lost_lines`), its budget or a later checkpoint reveals it (`dpllm.privacy.run_folder`).

    Raises:
        LedgerError: it is a copy.
    """
    if is_copy(contents.path, *contents.notes.file):
        raise LedgerError(
            f"{contents.path} is a copy of the file that the run wrote, or was restored from one. If two copies are "
            "resumed, each states only the ε of its own steps. Resume in the original folder; if it is lost and no "
            f"other copy was resumed, first run `dpllm verify {contents.path.parent} --adopt`, which the report will "
            "state"
        )


def refuse_lost_lines(contents: LedgerContents) -> None:
    """Refuse to continue a ledger or to state an ε from it if it lacks lines from which its folder's report was made.

    A report names the hash of its ledger, and since then lines were only added. The ledger's first lines must therefore
    have that hash, unless the ledger was cut or overwritten by an older copy and lacks steps or disclosures.

    Raises:
        LedgerError: lines were lost, the report belongs to a different run, or it cannot be read.
    """
    report = contents.path.parent / REPORT_FILE
    if not report.is_file():
        return
    try:
        made_of = json.loads(report.read_text(encoding="utf-8"))["checkable"]["ledger_sha256"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(
            f"{report} cannot be read ({type(error).__name__}: {error}), so it does not show whether {contents.path} "
            "lost lines. Restore the report from a backup; if the ledger is complete, you can move the report away"
        ) from error
    read = hashlib.sha256()
    for line in contents.path.read_bytes().split(b"\n"):
        torn = read.copy()  # the ledger of a run that crashed may have ended here, without a newline
        torn.update(line)
        read.update(line + b"\n")
        if made_of in (torn.hexdigest(), read.hexdigest()):
            return
    raise LedgerError(
        f"{report} was made of lines that {contents.path} lacks, so ε could be too small: the ledger is an older "
        "copy or was cut off. Restore the ledger. If the report belongs to a different run, move it away"
    )


def is_being_written(path: str | Path) -> bool:
    """Return whether a run has this ledger open at the moment.

    Raises:
        LedgerError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return is_locked(file.fileno())
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error.strerror})") from error


def _one_line(what: str, text: str) -> str:
    words = " ".join(str(text).split())
    if not words:
        raise ValueError(f"the {what} is empty: write one line")
    return words


def _fact_value(name: str, value: str | int | float) -> str | int | float:
    if isinstance(value, str):
        return _one_line(f"value of the fact {name!r}", value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise ValueError(f"the fact {name!r} must be a text or a finite number, got {value!r}")
