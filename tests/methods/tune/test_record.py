"""Tests of dpllm.methods.tune.record: the draws are made once, and what was noted cannot be changed unseen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dpllm.methods.tune.record import DrawnRun, Record, TuningError, create_record, open_record, read_record
from tests.mutations import kills

RUNS = [DrawnRun("aa", 1), DrawnRun("bb", 0), DrawnRun("cc", 1)]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return create_record(tmp_path / "not_for_release" / "tuning.jsonl", {"selected": {"kind": "x"}}, RUNS)


def test_it_is_read_as_it_was_written(record):
    """Runs, scores, failures and the choice; the file is the owner's only."""
    record.begin(0)
    record.begin(0)
    record.end(0, -3.5)
    record.begin(1)
    record.end(1, None)
    record.begin(2)
    record.end(2, -3.0)
    record.decide(2)
    again = read_record(record.path)
    assert again.runs == RUNS and again.scores == {0: -3.5, 1: None, 2: -3.0} and again.begun == {0, 1, 2}
    assert (again.selected, again.is_decided) == (2, True) and again.draws_hash == record.draws_hash
    assert record.path.stat().st_mode & 0o077 == 0 and record.path.parent.stat().st_mode & 0o077 == 0


@kills(
    "the draws of a tuning can be made again",
    "dpllm/methods/tune/record.py",
    "os.link(half, path)",
    "os.replace(half, path)",
)
def test_the_draws_are_made_once(record):
    """A second creation fails, and changes nothing."""
    before = record.path.read_bytes()
    with pytest.raises(TuningError, match="never repeated"):
        create_record(record.path, {}, [])
    assert record.path.read_bytes() == before
    assert [path.name for path in record.path.parent.iterdir()] == ["tuning.jsonl"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: [lines[0].replace('"candidate": 0', '"candidate": 1'), *lines[1:]],
        lambda lines: [lines[0].replace(', {"folder": "cc", "candidate": 1}', ""), *lines[1:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: lines[1:],
        lambda lines: [*lines[:2], lines[2].replace("-3.5", "-1.5"), *lines[3:]],
        lambda lines: [*lines, "{}"],
        lambda lines: [*lines[:-1], "no JSON"],
        lambda lines: [lines[0].replace('"kind"', ' "kind"'), *lines[1:]],
    ],
    ids=["candidate", "number of runs", "a lost line", "the first line", "a score", "an added line", "text", "spaces"],
)
def test_an_edited_record_is_refused(record, edit):
    """The number of runs, a candidate, a score: each is covered by the hashes."""
    record.begin(0)
    record.end(0, -3.5)
    record.begin(1)
    lines = edit(record.path.read_text().splitlines())
    record.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TuningError, match="was edited"):
        read_record(record.path)


def test_lines_in_an_impossible_order_are_refused(record):
    """An end without a beginning, two ends, or a run after the choice, even with right hashes."""
    record.begin(0)
    record.end(0, -1.0)
    with pytest.raises(TuningError, match="was edited"):
        record.end(0, -0.5)
        read_record(record.path)


def test_a_torn_last_line_is_left_out(record):
    """A crash in the middle of a line: the run has not ended; the next line is whole."""
    record.begin(0)
    with open(record.path, "a") as file:
        file.write('{"kind": "ended", "run": 0, "sco')
    assert read_record(record.path).scores == {}
    again, file = open_record(record.path)
    with file:
        again.end(0, -2.0)
    assert read_record(record.path).scores == {0: -2.0}


@kills(
    "a copy of a tuning's record is continued",
    "dpllm/methods/tune/record.py",
    'if is_copy(path, record.draws["id"], record.draws["file"]):',
    "if False:",
)
def test_a_copy_is_not_continued(record, tmp_path):
    """Two continuations would release two selections."""
    copy = tmp_path / "copy" / "tuning.jsonl"
    copy.parent.mkdir()
    shutil.copyfile(record.path, copy)
    assert read_record(copy).runs == RUNS  # it can be read and verified
    with pytest.raises(TuningError, match="is a copy"):
        open_record(copy)


def test_two_processes_do_not_continue_at_the_same_time(record):
    """The first one holds the lock."""
    _, file = open_record(record.path)
    with file, pytest.raises(TuningError, match="tuning now"):
        open_record(record.path)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "tuning.jsonl"
    for text in ("", "\n", json.dumps({"kind": "drawn"}) + "\n"):
        path.write_text(text)
        with pytest.raises(TuningError, match="was edited"):
            read_record(path)
    with pytest.raises(TuningError, match="cannot be read"):
        read_record(tmp_path / "none.jsonl")
