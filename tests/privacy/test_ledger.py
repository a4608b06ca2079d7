"""Tests of dpllm.privacy.ledger."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dpllm.mechanism.events import Step
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.ledger import ENTROPY_SEEDED, ENTROPY_SYSTEM, Ledger, LedgerError, is_being_written, read_ledger
from dpllm.privacy.private_folder import read_diagnostics
from tests.mutations import kills

STEP = Step(num_units=1000, sampling_rate=0.02, max_batch_size=52, noise_multiplier=1.0, clip_norm=0.5)


@dataclass(frozen=True)
class Plan:
    hash: str = "a" * 64
    event: Step = STEP
    seeded: bool = False
    randomness: str = "os"


PLAN = Plan()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "privacy_ledger.jsonl"


def write(path: Path, num_steps: int, end: str | None = "completed") -> None:
    with Ledger.create(path, PLAN, public=["pretrained on old speeches"]) as ledger:
        for number in range(num_steps):
            ledger.append_step(number, PLAN.event)
        if end is not None:
            ledger.append_end(end)


def test_ledger_reads_back_what_ran(path: Path) -> None:
    """Runs, steps, disclosures, diagnostics and the end are all there, counts summed."""
    with Ledger.create(path, PLAN, public=["old speeches"]) as ledger:
        for number in range(3):
            ledger.append_step(number, PLAN.event)
            ledger.append_disclosure("training loss")
        ledger.append_disclosure("evaluation on private rows", 2)
        ledger.append_diagnostic("units with a non-finite gradient", 4)
        ledger.append_step(
            3, Step(num_units=1000, sampling_rate=0.02, max_batch_size=52, noise_multiplier=2.0, clip_norm=0.5)
        )
        assert ledger.num_steps == 4
        ledger.append_end("completed")
    contents = read_ledger(path)
    assert contents.history == [
        (PLAN.event, 3),
        (Step(num_units=1000, sampling_rate=0.02, max_batch_size=52, noise_multiplier=2.0, clip_norm=0.5), 1),
    ]
    assert contents.num_steps == 4
    assert contents.disclosures == {"training loss": 3, "evaluation on private rows": 2}
    assert read_diagnostics(path.parent) == {"units with a non-finite gradient": 4}
    assert "finite" not in path.read_text()  # a ledger is published
    assert contents.end == "completed" and contents.torn_lines == []
    assert contents.public == ["old speeches"] and not contents.seeded
    run = contents.runs[0]
    assert run["plan_hash"] == PLAN.hash and run["entropy"] == ENTROPY_SYSTEM and run["started_at"].endswith("+00:00")


def test_each_line_is_on_disk_before_the_call_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every append ends in an fsync of a file that then holds the line."""
    sizes: list[int] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        real(descriptor)
        sizes.append(path.stat().st_size)

    monkeypatch.setattr(os, "fsync", record)
    with Ledger.create(path, PLAN) as ledger:
        appends: list[Callable[[], None]] = [
            lambda: ledger.append_step(0, PLAN.event),
            lambda: ledger.append_disclosure("training loss"),
            lambda: ledger.append_end("completed"),
        ]
        for append in appends:
            count, size = len(sizes), path.stat().st_size
            append()
            assert len(sizes) == count + 1 and sizes[-1] > size
            assert path.read_bytes().endswith(b"\n")


def test_append_does_not_read_the_file(path: Path) -> None:
    """An append costs the same for any ledger: it adds one line and rewrites nothing."""
    with Ledger.create(path, PLAN) as ledger:
        for number in range(20):
            before = path.read_bytes()
            ledger.append_step(number, PLAN.event)
            after = path.read_bytes()
            assert after.startswith(before) and after[len(before) :].count(b"\n") == 1


def test_resumed_ledger_keeps_what_was_charged(path: Path) -> None:
    """Steps of an interrupted run stay, and those of the resumed one come on top."""
    write(path, 3, end=None)
    with Ledger.open(path, PLAN, public=["a glossary"]) as ledger:
        assert ledger.num_steps == 3
        ledger.append_step(3, PLAN.event)
        ledger.append_end("completed")
    contents = read_ledger(path)
    assert contents.num_steps == 4 and len(contents.runs) == 2 and contents.end == "completed"
    assert contents.public == ["pretrained on old speeches", "a glossary"]
    assert contents.runs[0]["run"] != contents.runs[1]["run"]


def test_no_end_after_a_crash(path: Path) -> None:
    """A run without an end line is seen as not ended, also after an earlier run that did end."""
    write(path, 1)
    Ledger.open(path, PLAN).close()
    assert read_ledger(path).end is None


@pytest.mark.parametrize("keep", [1, 10, 24, 30, 100])
def test_torn_step_is_charged(path: Path, keep: int) -> None:
    """A step line cut by a crash counts, wherever it was cut, before and after the run is resumed."""
    write(path, 3, end=None)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:keep])
    contents = read_ledger(path)
    assert contents.num_steps == 3 and contents.torn_lines == [4] and contents.torn_steps == 1
    with Ledger.open(path, PLAN) as ledger:
        assert ledger.num_steps == 3
        ledger.append_step(3, PLAN.event)
    contents = read_ledger(path)
    assert contents.history == [(PLAN.event, 4)] and contents.torn_lines == [4] and len(contents.runs) == 2
    assert epsilon(contents.history, 1e-4) == epsilon([(PLAN.event, 4)], 1e-4)


def test_torn_note_is_reported_and_not_charged(path: Path) -> None:
    """A torn line that cannot have been a step is listed and costs nothing."""
    with Ledger.create(path, PLAN) as ledger:
        ledger.append_step(0, PLAN.event)
        ledger.append_disclosure("training loss")
    path.write_bytes(path.read_bytes()[:-20])
    contents = read_ledger(path)
    assert contents.num_steps == 1 and contents.torn_lines == [3] and contents.torn_steps == 0
    Ledger.open(path, PLAN).close()
    assert read_ledger(path).torn_lines == [3]


def test_lost_newline_is_mended(path: Path) -> None:
    """A complete last line without its newline is not torn; resuming puts the newline back."""
    write(path, 2, end=None)
    path.write_bytes(path.read_bytes()[:-1])
    assert read_ledger(path).num_steps == 2 and read_ledger(path).torn_lines == []
    with Ledger.open(path, PLAN) as ledger:
        ledger.append_step(2, PLAN.event)
    assert read_ledger(path).history == [(PLAN.event, 3)]


def _edit(data: bytes, number: int, new: Callable[[bytes], bytes]) -> bytes:
    lines = data.splitlines(keepends=True)
    lines[number - 1] = new(lines[number - 1])
    return b"".join(lines)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda data: _edit(data, 3, lambda line: line.replace(b"1.0", b"9.0")), 3),
        (lambda data: _edit(data, 3, lambda line: b""), 3),
        (lambda data: _edit(data, 3, lambda line: line + line), 4),
        (lambda data: _edit(data, 5, lambda line: b"\n" + line), 5),
    ],
)
def test_damage_is_found_with_its_line(path: Path, damage: Callable[[bytes], bytes], line: int) -> None:
    """An edited, lost, doubled, cut or inserted line is an error with the line's number, for reading and resuming."""
    write(path, 5)
    path.write_bytes(damage(path.read_bytes()))
    for use in (lambda: read_ledger(path), lambda: Ledger.open(path, PLAN)):
        with pytest.raises(LedgerError, match=f"line {line}: .*ε cannot be computed"):
            use()


def test_after_a_write_that_failed_nothing_more_is_charged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line may be partly there or not on the disk; a resumed run reads the rest and repairs the file."""
    with Ledger.create(path, PLAN) as ledger:
        ledger.append_step(0, PLAN.event)

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="space left"):
                ledger.append_step(1, PLAN.event)
        with pytest.raises(LedgerError, match="repairs"):
            ledger.append_step(1, PLAN.event)
        assert ledger.num_steps == 1
    assert read_ledger(path).num_steps == 2  # it reached the file all the same, and is charged


def test_steps_are_consecutive(path: Path) -> None:
    """A step out of turn cannot be charged, so none can be forgotten."""
    with Ledger.create(path, PLAN) as ledger:
        with pytest.raises(LedgerError, match="step 1"):
            ledger.append_step(1, PLAN.event)
        ledger.append_step(0, PLAN.event)
        with pytest.raises(LedgerError, match="0 cannot"):
            ledger.append_step(0, PLAN.event)


def test_no_step_after_the_end(path: Path) -> None:
    """After the end of a run only notes can follow, until the ledger is opened again."""
    with Ledger.create(path, PLAN) as ledger:
        ledger.append_end("completed")
        with pytest.raises(LedgerError, match="has ended"):
            ledger.append_step(0, PLAN.event)
        ledger.append_disclosure("evaluation on private rows")
    assert read_ledger(path).disclosures == {"evaluation on private rows": 1}


def test_closed_ledger_takes_nothing(path: Path) -> None:
    """An append to a closed ledger fails instead of being lost."""
    ledger = Ledger.create(path, PLAN)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.append_step(0, PLAN.event)


def test_existing_ledger_is_not_overwritten(path: Path) -> None:
    """Steps charged by an earlier run cannot be erased by a new start."""
    write(path, 1)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="earlier run"):
        Ledger.create(path, PLAN)
    assert path.read_bytes() == before


def test_other_plan_is_refused(path: Path) -> None:
    """A run cannot be resumed under other privacy numbers."""
    write(path, 1)
    with pytest.raises(LedgerError, match="aaaaaaaaaaaa"):
        Ledger.open(path, Plan(hash="b" * 64))


def test_missing_and_empty_ledgers_are_refused(path: Path) -> None:
    """Without a ledger there is no ε."""
    with pytest.raises(LedgerError, match="cannot be read"):
        read_ledger(path)
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="names no run"):
        read_ledger(path)
    path.write_bytes(b'{"kind": "st')
    with pytest.raises(LedgerError, match="torn before"):
        read_ledger(path)


def test_seeded_run_is_marked(path: Path) -> None:
    """The ledger remembers a fixed seed for ever, also when a later run had real entropy."""
    Ledger.create(path, Plan(seeded=True)).close()
    Ledger.open(path, PLAN).close()
    contents = read_ledger(path)
    assert contents.seeded and contents.runs[0]["entropy"] == ENTROPY_SEEDED


def test_the_ledger_names_the_generator_of_the_noise(tmp_path: Path) -> None:
    """A cipher keyed by the operating system is no fixed seed; words that this version does not know are."""
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path, dataclasses.replace(PLAN, randomness="chacha20")):
        pass
    contents = read_ledger(path)
    assert contents.runs[0]["entropy"].startswith("operating system; noise by ChaCha20") and not contents.seeded


@kills("a note in the ledger may count nothing", "dpllm/privacy/ledger.py", "if count < 1:", "if False:")
def test_counts_are_positive(path: Path) -> None:
    """A note that counts nothing is a mistake of the caller."""
    with Ledger.create(path, PLAN) as ledger:
        with pytest.raises(ValueError, match="disclosure"):
            ledger.append_disclosure("training loss", 0)
        with pytest.raises(ValueError, match="diagnostic"):
            ledger.append_diagnostic("x", -1)


def test_two_runs_cannot_write_one_ledger_at_once(path: Path) -> None:
    """Their steps would be charged over each other; when the first ends, closes or dies, the next may go on."""
    first = Ledger.create(path, PLAN)
    first.append_step(0, PLAN.event)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="is writing"):
        Ledger.open(path, PLAN)
    assert path.read_bytes() == before
    first.append_end("interrupted")
    second = Ledger.open(path, PLAN)
    second.append_step(1, PLAN.event)
    second.close()
    Ledger.open(path, PLAN).append_step(2, PLAN.event)
    assert read_ledger(path).num_steps == 3


def test_facts_and_open_points_are_noted_once(path: Path) -> None:
    """Each distinct value of a fact and each open point has one line, over all runs of the ledger."""
    with Ledger.create(path, PLAN) as ledger:
        ledger.append_fact("largest difference", 2e-6)
        ledger.append_fact("largest difference", 2e-6)
        ledger.append_open_point("rows have\nequal lengths")
    with Ledger.open(path, PLAN) as ledger:
        ledger.append_fact("largest difference", 2e-6)
        ledger.append_fact("largest difference", 3e-6)
        ledger.append_fact("units are made", "from record ids")
        ledger.append_open_point("rows have equal lengths")
        ledger.append_open_point("the folder was moved")
    notes = read_ledger(path).notes
    assert notes.facts == {"largest difference": [2e-6, 3e-6], "units are made": ["from record ids"]}
    assert notes.open_points == ["rows have equal lengths", "the folder was moved"]
    assert path.read_text().count('"kind": "fact"') == 3 and path.read_text().count('"kind": "open point"') == 2


@kills(
    "the last learning rate is lost",
    "dpllm/privacy/ledger.py",
    """        self.write_rate()
        self.append({"kind": "end",""",
    """        self.append({"kind": "end",""",
)
def test_each_change_of_the_learning_rates_is_written_with_the_next_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the line of the next step, which needs no write of its own; a constant rate has one entry, over a resume too.

    The lines are chained like all others, also where the clipping adapts.
    """
    real, syncs = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: syncs.append(real(descriptor)))
    with Ledger.create(path, PLAN) as ledger:
        before = len(syncs)
        for number, rate in enumerate(["0.1, 0.2", "0.1, 0.2", "0.05, 0.1"]):
            ledger.append_step(number, PLAN.event, threshold=0.5 + number)
            ledger.note_rate(rate)
        assert len(syncs) == before + 3
        ledger.write_rate()  # before a save
        ledger.write_rate()
        assert len(syncs) == before + 4
        ledger.append_end("stopped early")
    with Ledger.open(path, PLAN) as ledger:
        ledger.append_step(3, PLAN.event)
        ledger.note_rate("0.05, 0.1")
        ledger.append_step(4, PLAN.event)
        ledger.note_rate("1e-05, 0.1")
        ledger.append_end("completed")
    contents = read_ledger(path)
    assert contents.notes.rates == [(1, "0.1, 0.2"), (3, "0.05, 0.1"), (5, "1e-05, 0.1")]
    assert contents.notes.thresholds == [0.5, 1.5, 2.5] and contents.num_steps == 5
    path.write_text(path.read_text().replace("0.05, 0.1", "0.07, 0.1"))
    with pytest.raises(LedgerError, match="line 5"):
        read_ledger(path)


def test_a_statement_that_settles_a_point_has_a_line_with_its_date(path: Path) -> None:
    """Each is kept, in order; an empty one is refused before a line is written."""
    with Ledger.create(path, PLAN) as ledger:
        ledger.append_open_point("rows have equal lengths")
        ledger.append_end("completed")
    with Ledger.annotate(path) as ledger:
        ledger.append_settled("rows have equal lengths", "each is a\nrecord", "A. Meyer")
        before = path.read_bytes()
        for texts in ((" ", "fine", "A. Meyer"), ("point", "", "A. Meyer"), ("point", "fine", "\n")):
            with pytest.raises(ValueError, match="write one line"):
                ledger.append_settled(*texts)
    assert path.read_bytes() == before
    (line,) = read_ledger(path).notes.settled
    assert (line["point"], line["statement"], line["by"]) == ("rows have equal lengths", "each is a record", "A. Meyer")
    assert abs(datetime.now(UTC) - datetime.fromisoformat(line["at"])).total_seconds() < 3600


def test_an_ended_run_goes_on_after_lines_that_others_added(path: Path) -> None:
    """People settle a point while the trainer is still there. A run that goes on, or a step of others, is an error."""
    with Ledger.create(path, PLAN) as ledger:
        ledger.append_step(0, PLAN.event)
        ledger.append_end("completed")
        with Ledger.annotate(path) as other:
            other.append_settled("rows have equal lengths", "each is a record", "A. Meyer")
        ledger.append_fact("largest difference", 2e-6)
        contents = read_ledger(path)
        assert contents.notes.settled and contents.notes.facts == {"largest difference": [2e-6]}
        with Ledger.open(path, PLAN) as resumed:
            resumed.append_step(1, PLAN.event)
            resumed.append_end("completed")
        with pytest.raises(LedgerError, match="process wrote"):
            ledger.append_fact("largest difference", 3e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, True, [1], " "])
def test_a_fact_is_a_text_or_a_finite_number(path: Path, value: object) -> None:
    """Anything else is refused before a line is written."""
    with Ledger.create(path, PLAN) as ledger:
        before = path.read_bytes()
        with pytest.raises(ValueError, match="fact 'x"):
            ledger.append_fact("x", value)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="write one line"):
            ledger.append_open_point(" \n")
    assert path.read_bytes() == before


def test_a_ledger_that_was_replaced_while_the_run_goes_on_is_an_error(path: Path) -> None:
    """Steps would go to a file without a name; its lines are saved, and putting them back mends it."""
    with Ledger.create(path, PLAN) as ledger:
        ledger.append_step(0, PLAN.event)
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        ledger.append_step(1, PLAN.event)
        os.replace(copy, path)
        for charge in (
            lambda: ledger.append_step(2, PLAN.event),
            ledger.require_intact,
            lambda: ledger.append_end("x"),
        ):
            with pytest.raises(LedgerError, match="file during"):
                charge()
        (saved,) = path.parent.glob(f"{path.name}.*")
        path.unlink()
        with pytest.raises(LedgerError, match="removed during"):
            ledger.append_step(2, PLAN.event)
    assert read_ledger(saved).num_steps == 2


def test_a_ledger_that_another_process_writes_or_cuts_is_an_error(path: Path) -> None:
    """On file systems whose locks do not work this is the only guard."""
    with Ledger.create(path, PLAN) as ledger:
        size = path.stat().st_size
        ledger.append_step(0, PLAN.event)
        os.truncate(path, size)
        with pytest.raises(LedgerError, match=rf"has {size} bytes, but this run wrote or read"):
            ledger.append_step(1, PLAN.event)


@kills(
    "a copied ledger goes on",
    "dpllm/privacy/ledger.py",
    "    if is_copy(contents.path, *contents.notes.file):\n",
    "    if False:\n",
)
def test_a_copied_ledger_is_not_continued_unless_adopted(path: Path) -> None:
    """Two copies that both go on would each state the ε of their own steps."""
    write(path, 2, end=None)
    renamed = path.with_name("renamed.jsonl")
    os.rename(path, renamed)
    Ledger.open(renamed, PLAN).close()  # the same file
    copy = path.with_name("copy.jsonl")
    copy.write_bytes(renamed.read_bytes())
    with pytest.raises(LedgerError, match="--adopt"):
        Ledger.open(copy, PLAN)
    with Ledger.annotate(copy) as ledger:
        ledger.append_adopted()
    Ledger.open(copy, PLAN).close()
    assert read_ledger(copy).num_steps == 2 and len(read_ledger(copy).runs) == 3


def test_a_copy_that_has_the_inode_of_the_deleted_original_is_a_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is deleted and restored from a backup: ext4 uses an inode again at once, with a new generation."""
    generation = [7]

    def of_the_inode(descriptor: int, request: int, buffer: bytearray) -> None:
        buffer[:4] = generation[0].to_bytes(4, sys.byteorder)

    monkeypatch.setattr(fcntl, "ioctl", of_the_inode)
    write(path, 2, end=None)
    Ledger.open(path, PLAN).close()
    generation[0] = 8
    with pytest.raises(LedgerError, match="--adopt"):
        Ledger.open(path, PLAN)

    def unknown(descriptor: int, request: int, buffer: bytearray) -> None:
        raise OSError(25, "Inappropriate ioctl for device")

    other = path.with_name("other.jsonl")  # where there is no generation, the inode has to do
    monkeypatch.setattr(fcntl, "ioctl", unknown)
    write(other, 2, end=None)
    monkeypatch.setattr(fcntl, "ioctl", of_the_inode)
    Ledger.open(other, PLAN).close()


@pytest.mark.parametrize("lost", [1, 40, 400])
def test_a_last_line_of_nul_bytes_is_charged(path: Path, lost: int) -> None:
    """A block that a power cut lost comes back as zeros: it may have been a step."""
    write(path, 3, end=None)
    with path.open("ab") as file:
        file.write(b"\0" * lost)
    contents = read_ledger(path)
    assert contents.num_steps == 4 and contents.torn_steps == 1
    Ledger.open(path, PLAN).close()
    assert read_ledger(path).num_steps == 4


def test_a_torn_line_that_certainly_was_no_step_is_not_charged(path: Path) -> None:
    """Every other kind, as far as its name is there."""
    write(path, 1, end=None)
    with path.open("ab") as file:
        file.write(b'{"kind": "open point", "te')
    assert read_ledger(path).num_steps == 1


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As Lustre and NFS answer without the option; no empty ledger is left that would burn the folder."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(LedgerError, match="locks"):
        Ledger.create(path, PLAN)
    assert not path.exists()


def test_a_system_whose_locks_hide_a_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows: the package can be imported there, and no run begins unlocked."""
    write(path, 1, end=None)
    monkeypatch.setattr("dpllm.privacy.chained_file.fcntl", None)
    for use in (lambda: Ledger.annotate(path), lambda: Ledger.create(path.with_name("new.jsonl"), PLAN)):
        with pytest.raises(LedgerError, match="macOS"):
            use()
    assert not path.with_name("new.jsonl").exists()
    with pytest.raises(LedgerError, match="locked file"):
        is_being_written(path)


def test_the_lock_of_a_process_that_was_killed_is_free(path: Path) -> None:
    """While it lives, nobody else writes; another version's plain flock of the same file is respected."""
    code = (
        "import sys, time; from dpllm.privacy.ledger import Ledger; ledger = Ledger.annotate(sys.argv[1]); "
        "print('held', flush=True); time.sleep(3600)"
    )
    write(path, 1, end=None)
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert is_being_written(path)
        with pytest.raises(LedgerError, match="is writing"):
            Ledger.open(path, PLAN)
    finally:
        holder.kill()
        holder.communicate()
    assert not is_being_written(path)
    with open(path, "r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="is writing"):
            Ledger.open(path, PLAN)
    Ledger.open(path, PLAN).close()
