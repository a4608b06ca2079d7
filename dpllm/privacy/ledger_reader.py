"""Read a ledger, and check the chain of hashes that links its lines.

A line that was edited, lost or moved is an error. If a crash may have cut off a line, that line counts as a charged
step unless it certainly was of a different kind: charging one step too many is safe.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpllm.config.tasks import Score
from dpllm.config.versions import has_format, other_format, version_words
from dpllm.mechanism.catalogue import from_fields
from dpllm.mechanism.events import Event
from dpllm.privacy.chained_file import CHAIN_LENGTH, CHAIN_START, chained_lines, lines_of

ENTROPY_SYSTEM = "operating system"
ENTROPY_SEEDED = "fixed seed (NOT PRIVATE)"
ENTROPY = {
    "os": ENTROPY_SYSTEM,
    "chacha20": f"{ENTROPY_SYSTEM}; noise by ChaCha20 (RFC 8439), draws of units by PCG64DXSM",
    "discrete": f"{ENTROPY_SYSTEM}; exact discrete noise by ChaCha20 (RFC 8439), draws of units by PCG64DXSM",
}
"""A ledger's words for the entropy of a run without a seed, by noise generator."""

LEDGER_FORMAT = 1
"""Format of a ledger, which each start's line names."""
OLD_COUNTS = (
    "An earlier version of dpllm wrote counts of private units into the ledger, which distinguish neighbouring data "
    "sets. Publish the weights without the ledger, or train again."
)
"""The open point of a ledger with such lines."""

_STEP_START = '{"kind": "step", "step": '
_RATE, _THRESHOLD = '"rate": "', '"threshold": '
_OTHER_KINDS = (
    "run",
    "disclosure",
    "diagnostic",
    "fact",
    "open point",
    "settled",
    "public start",
    "released",
    "audit",
    "adopted",
    "pages",
    "rate",
    "score",
    "recovered",
    "end",
)
_OTHER_STARTS = tuple(f'{{"kind": "{kind}"' for kind in _OTHER_KINDS)
_PAGES_START = '{"kind": "pages", '
_OF_A_RUN = {
    **dict.fromkeys(("run", "plan_hash", "version", "entropy", "file"), str),
    **{"changed": bool, "public": list, "planned_step": dict},
}


class LedgerError(ValueError):
    """Error: the ledger was changed after the run wrote it, or does not belong to this plan."""


@dataclass(frozen=True)
class LedgerHead:
    """A position in a ledger: the hash over all lines up to it, and the steps that they charge.

    A checkpoint and a budget entry hold the head of their run. Only that run's ledger contains it: a different run's
    ledger, one that was cut before it, or one that was continued from an older copy does not.
    """

    chain: str
    num_steps: int

    def to_dict(self) -> dict[str, Any]:
        """Return the head as plain values."""
        return {"chain": self.chain, "num_steps": self.num_steps}

    @classmethod
    def of(cls, values: Any) -> LedgerHead:
        """Return a head from the plain values of `to_dict`.

        Raises:
            LedgerError: the values are not a head.
        """
        if isinstance(values, Mapping):
            chain, num_steps = values.get("chain"), values.get("num_steps")
            if isinstance(chain, str) and len(chain) == CHAIN_LENGTH and isinstance(num_steps, int) and num_steps >= 0:
                return cls(chain, num_steps)
        raise LedgerError(f"{values!r} is not a position in a ledger. Restore the file from which it was read")


@dataclass
class LedgerNotes:
    """Lines of a ledger that charge nothing."""

    facts: dict[str, list[str | int | float]] = field(default_factory=dict)
    """Facts of the run by name, each with its distinct values in the order in which they were written."""
    open_points: list[str] = field(default_factory=list)
    """Reasons not to release before people have settled them, each once."""
    settled: list[dict[str, str]] = field(default_factory=list)
    """Statements by which people settled open points: {"point", "statement", "by", "at"} each, in their order."""
    released: list[dict[str, Any]] = field(default_factory=list)
    """Models saved for release: {"folder": name, "files": {name: {"size", "hashed", "sha256"}}} each."""
    public_start: dict[str, dict[str, Any]] | None = None
    """Files of the public training at the start of the run, as in ``released``; None if there are none."""
    audits: list[dict[str, Any]] = field(default_factory=list)
    """Audits of the run's model: {"file", "sha256", "summary"} each, in their order."""
    stopped_independently: bool = False
    """Whether the last end was declared independent of the data and of all releases of the run."""
    pages: dict[str, str] = field(default_factory=dict)
    """The report's files and the card by name, each with the SHA-256 with which it was written last."""
    file: tuple[str, str] = ("", "")
    """The last run's id, and the keyed hash of the inode of the file that it wrote (`file_hash`)."""
    thresholds: list[float] = field(default_factory=list)
    """Clip thresholds of the steps with adaptive clipping, in their order."""
    rates: list[tuple[int, str]] = field(default_factory=list)
    """Learning rates: the number of a step, and the rates from its update on, until another entry follows."""
    score: tuple[Score, float] | None = None
    """The last score of the model on public held-out records, and its value; None: none was measured."""
    begun_at: list[int] = field(default_factory=list)
    """For each start or resume, the number of thresholds before it."""
    answers: dict[tuple[str, Event], int] = field(default_factory=dict)
    """Answers of a query run by name and event, with their number; they are in the history too."""

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
    """The contents of a ledger."""

    path: Path
    runs: list[dict[str, Any]] = field(default_factory=list)
    """One entry per start or resumption: run, plan_hash, version, commit and changed (whether dpllm had changes that
    are in no commit), started_at, entropy, public, planned_step, budget, file."""
    history: list[tuple[Event, int]] = field(default_factory=list)
    """The steps charged, in order. Equal neighbours are counted together, also over a restart if it does not change
    their cost."""
    begins: bool = False
    """Whether the last start or resume has taken no step yet."""
    disclosures: dict[str, int] = field(default_factory=dict)
    """Disclosures that ε does not cover, and how often each was written out."""
    notes: LedgerNotes = field(default_factory=LedgerNotes)
    """Facts and open points for the report."""
    torn_lines: list[int] = field(default_factory=list)
    """Numbers of lines (the first is 1) that a crash left incomplete."""
    torn_steps: int = 0
    """Number of those that were, or may have been, steps. They are charged."""
    end: str | None = None
    """Why the last run ended. None: it has not ended, or it crashed."""
    sha256: str = ""
    """Hash of the file without the lines at its end that name the report's files, which are written after the report
    that names this hash."""
    chain: str = ""
    """Hash over all lines, which the next line continues."""

    @property
    def head(self) -> LedgerHead:
        """The head at the end of the ledger."""
        return LedgerHead(self.chain, self.num_steps)

    @property
    def steps_allowed(self) -> int | None:
        """Steps of all starts together that the last resume allows; None: all steps of the plan."""
        allowed = self.runs[-1].get("num_steps") if self.runs else None
        return allowed if isinstance(allowed, int) else None

    @property
    def num_steps(self) -> int:
        """Steps charged."""
        return sum(count for _, count in self.history)

    @property
    def answers_end_independently(self) -> bool:
        """Whether a query run's stop was declared independent, and no torn line may be a charge that is not named."""
        return self.notes.stopped_independently and not self.torn_steps

    @property
    def seeded(self) -> bool:
        """Whether any run used a fixed seed; then nothing in the ledger is private."""
        return any(run["entropy"] not in ENTROPY.values() for run in self.runs)

    @property
    def public(self) -> list[str]:
        """The declared public values of all runs, each once."""
        return list(dict.fromkeys(line for run in self.runs for line in run["public"]))


def count_step(history: list[tuple[Event, int]], step: Event, begins: bool, times: int = 1) -> None:
    """Add a step to the steps charged so far, in place.

    Args:
        history: the steps charged so far (`LedgerContents.history`).
        step: the event of the step.
        begins: whether it is the first step of a start or of a resume.
        times: how many such steps.
    """
    if history and history[-1][0] == step and not (begins and step.restarts):
        history[-1] = (step, history[-1][1] + times)
    else:
        history.append((step, times))


def steps_at(path: str | Path, chain: str) -> int | None:
    """Return the number of steps that a ledger charges up to the line of this hash; None if no line has the hash.

    Raises:
        LedgerError: as `read_ledger`.
    """
    return LedgerReader(Path(path), wanted=chain).steps_at_wanted


def read_ledger(path: str | Path) -> LedgerContents:
    """Read and check a ledger.

    A last line that a crash left incomplete is not an error: it is listed in `torn_lines`, and if it was, or may have
    been, a step, that step is charged.

    Raises:
        LedgerError: the file is missing, or a line was edited, lost, moved or added; the message gives its number.
    """
    return LedgerReader(Path(path)).contents


def require_prefix(ledger: str | Path, head: LedgerHead, owner: str) -> None:
    """Check that a ledger contains a head.

    Args:
        ledger: the file.
        head: a head that a checkpoint or a budget recorded.
        owner: its owner, for the error: "The checkpoint runs/a/checkpoint-5".

    Raises:
        LedgerError: it does not contain the head.
    """
    if steps_at(ledger, head.chain) == head.num_steps:
        return
    charged = read_ledger(ledger).num_steps
    if head.num_steps > charged:
        raise LedgerError(
            f"{owner} holds {head.num_steps} steps, but {ledger} charges only {charged}: it is not that run's ledger, "
            "or it was cut or restored from an older copy. Replace it with the run's own latest ledger"
        )
    raise LedgerError(
        f"{owner} does not belong to {ledger}: it comes from a different run, or from a copy of this folder that was "
        "resumed separately, and its steps are not charged here. Resume from a checkpoint of this folder's run, or in "
        "the folder that made this checkpoint"
    )


def noted_before(path: str | Path, fact: str) -> tuple[bool, Any]:
    """Return whether a ledger has charged steps, and its last value of a fact (None: no value).

    Args:
        path: path of the ledger, which need not exist.
        fact: name of the fact.
    """
    contents = read_ledger(path) if Path(path).is_file() else None
    if contents is None or contents.num_steps == 0:
        return False, None
    return True, next(reversed(contents.notes.facts.get(fact) or ()), None)


class LedgerReader:
    """One pass over a ledger file."""

    def __init__(self, path: Path, wanted: str | None = None) -> None:
        """Read the file; ``wanted``: the hash of a line to look for.

        Raises:
            LedgerError: as `read_ledger`.
        """
        self.steps_at_wanted: int | None = None
        self._wanted = wanted
        try:
            data = path.read_bytes()
        except OSError as error:
            raise LedgerError(f"{path} cannot be read ({error.strerror}). Without a ledger, there is no ε") from error
        self.contents = LedgerContents(path=path)
        self.chain = CHAIN_START
        self.ends_with_newline = data.endswith(b"\n")
        self.torn_tail: tuple[int, bool] | None = None
        self._running = False
        self._steps_by_text: dict[str, Event] = {}
        lines = lines_of(data)
        self.num_bytes = len(data)
        self.contents.sha256 = hashlib.sha256(_without_pages_at_the_end(data)).hexdigest()
        try:
            self._read(lines)
        except LedgerError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise LedgerError(
                f"{path} lacks a field that this version of dpllm needs, or a field has the wrong type "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). Read it with the version that wrote "
                "it, or restore the file from a copy"
            ) from error
        self.contents.chain = self.chain
        if not self.contents.runs:
            raise LedgerError(f"{path} names no run, so nothing was charged. Start in an empty output folder")

    def _read(self, lines: list[str]) -> None:
        # The step number is kept here: counting the history again for each line would take quadratic time.
        self._num_steps = 0
        for number, line, body, chain, whole in chained_lines(lines):
            self.chain = chain
            if not whole:
                self._take_damaged(number, line, lines)
                continue
            if body.startswith(_STEP_START):
                self._take_step(number, body)
            else:
                self._take(number, json.loads(body))
            if chain == self._wanted:
                self.steps_at_wanted = self._num_steps

    def _fail(self, number: int, what: str) -> LedgerError:
        return LedgerError(
            f"{self.contents.path} line {number}: {what}. The ledger was changed after the run wrote it, so ε cannot "
            "be computed. Restore the file from a backup"
        )

    def _take_damaged(self, number: int, line: str, lines: list[str]) -> None:
        """Accept a line that a crash left incomplete: the last line, or a line with a "recovered" line after it."""
        is_last = number == len(lines) and not self.ends_with_newline
        next_line = lines[number] if number < len(lines) else ""
        recovered = next_line.startswith(f'{{"kind": "recovered", "line": {number}, ')
        if not is_last and not recovered:
            raise self._fail(number, "edited, or lines before it are missing")
        # A fragment counts as a step unless it is certainly of another kind; NUL bytes of a lost block count too.
        # The fragment itself can be edited, but the line after it, which the chain covers, records the charge.
        charged = not line.startswith(_OTHER_STARTS) or (recovered and '"charged": true' in next_line)
        self.contents.torn_lines.append(number)
        if charged:
            if not self.contents.runs:
                raise self._fail(number, "torn before the run was named")
            self._charge(from_fields(self.contents.runs[-1]["planned_step"]))
            self.contents.torn_steps += 1
        if is_last:
            self.torn_tail = (number, charged)

    def _check_run(self, number: int, entry: Mapping[str, Any]) -> None:
        """Refuse a run's line of another format, or one that lacks a field."""
        if not has_format(entry.get("format"), LEDGER_FORMAT):
            version, commit = entry.get("version"), entry.get("commit")
            writer = version_words(str(version), commit, entry.get("changed") is True) if version else None
            words = other_format("ledger", entry.get("format"), LEDGER_FORMAT, writer)
            raise LedgerError(f"{self.contents.path} line {number} {words}")
        for name, kind in _OF_A_RUN.items():
            if not isinstance(entry.get(name), kind):
                raise self._fail(number, f"the run's field {name!r} is missing, or is not of type {kind.__name__}")
        if not isinstance(entry["commit"], str | None):
            raise self._fail(number, "the run's field 'commit' is not a commit")
        budget = entry["budget"]
        if budget is not None and not (isinstance(budget, dict) and {"file", "entry"} <= set(budget)):
            raise self._fail(number, "the run's field 'budget' does not name an entry of a budget file")

    def _take_step(self, number: int, body: str) -> None:
        step_number, _, fields = body[len(_STEP_START) :].partition(", ")
        if step_number != str(self._num_steps):
            raise self._fail(number, f"step {step_number} where step {self._num_steps} was expected")
        if not self._running:
            raise self._fail(number, "a step outside a run")
        if fields.startswith(_RATE):
            rate, _, fields = fields.removeprefix(_RATE).partition('", ')
            self.contents.notes.rates.append((self._num_steps, rate))
        if fields.startswith(_THRESHOLD):
            value, _, fields = fields.removeprefix(_THRESHOLD).partition(", ")
            threshold = float(value)
            if not 0 < threshold < math.inf:
                raise self._fail(number, f"the clip threshold of a step is {threshold:g}")
            self.contents.notes.thresholds.append(threshold)
        step = self._steps_by_text.get(fields)
        if step is None:
            step = self._steps_by_text[fields] = from_fields(json.loads("{" + fields))
        self._charge(step)

    def _charge(self, step: Event, times: int = 1) -> None:
        count_step(self.contents.history, step, self.contents.begins, times)
        self.contents.begins = False
        self._num_steps += times

    def _take_answers(self, number: int, entry: dict[str, Any]) -> None:
        """Count the answers of a query run."""
        name, count = entry.pop("name"), entry.pop("count")
        if not self._running:
            raise self._fail(number, "an answer outside a run")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1 or not isinstance(name, str):
            raise self._fail(number, f"{count!r} answers of {name!r}")
        event = from_fields(entry)
        self._charge(event, count)
        answers = self.contents.notes.answers
        answers[name, event] = answers.get((name, event), 0) + count

    def _take(self, number: int, entry: dict[str, Any]) -> None:
        contents, kind = self.contents, entry.pop("kind", None)
        if kind == "run":
            self._check_run(number, entry)
            contents.begins = True
            contents.runs.append({name: entry[name] for name in entry if name != "format"})
            contents.notes.begun_at.append(len(contents.notes.thresholds))
            contents.end, contents.notes.stopped_independently = None, False
            contents.notes.file = (entry["run"], entry["file"])
            self._running = True
        elif kind == "charge":
            self._take_answers(number, entry)
        elif kind == "disclosure":
            contents.disclosures[entry["what"]] = contents.disclosures.get(entry["what"], 0) + entry["count"]
        elif kind == "fact":
            contents.notes.add_fact(entry["name"], entry["value"])
        elif kind == "open point":
            contents.notes.add_open_point(entry["text"])
        elif kind == "settled":
            contents.notes.settled.append({name: str(entry[name]) for name in ("point", "statement", "by", "at")})
        elif kind == "public start":
            contents.notes.public_start = entry["files"]
        elif kind == "released":
            contents.notes.released.append(entry)
        elif kind == "audit":
            contents.notes.audits.append(entry)
        elif kind == "pages":
            contents.notes.pages |= {str(name): str(digest) for name, digest in entry["files"].items()}
        elif kind == "rate":
            contents.notes.rates.append((int(entry["step"]), str(entry["rate"])))
        elif kind == "score":
            contents.notes.score = (Score(entry["name"], entry["larger_is_better"]), float(entry["value"]))
        elif kind == "adopted":
            contents.notes.file = (entry["run"], entry["file"])
        elif kind == "end":
            contents.end = entry["reason"]
            contents.notes.stopped_independently = entry.get("independent") is True
            self._running = False
        elif kind == "diagnostic":
            contents.notes.add_open_point(OLD_COUNTS)
        elif kind != "recovered":
            raise self._fail(number, f"unknown kind {kind!r}")


def _without_pages_at_the_end(data: bytes) -> bytes:
    """Return a ledger's bytes up to the last line that is not about the report's files."""
    lines = data.splitlines(keepends=True)
    while lines and lines[-1].startswith(_PAGES_START.encode("ascii")) and lines[-1].endswith(b"\n"):
        lines.pop()
    return b"".join(lines)
