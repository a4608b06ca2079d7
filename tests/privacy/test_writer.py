"""The error about a ledger in use names who uses it."""

import os
import re
import socket

import pytest

from dpllm.privacy.ledger import LEDGER_FILE, LedgerError
from dpllm.privacy.private_folder import WRITER_FILE, known_writer
from dpllm.privacy.run_folder import adopt
from tests.privacy.test_identity import PLAN, begin, resume


def test_a_second_writer_is_told_who_the_first_one_is(tmp_path, monkeypatch):
    """Host, process and job; also where a run is resumed, and in the error of people's commands."""
    begin(tmp_path, 1)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    running = resume(tmp_path)
    who = rf"\(process {os.getpid()} on {re.escape(socket.gethostname())}, job SLURM_JOB_ID=4711, since 20"
    with pytest.raises(LedgerError, match=rf"another run is writing .*{who}"):
        resume(tmp_path)
    with pytest.raises(LedgerError, match=rf"a run is writing .*{who}"):
        adopt(tmp_path)
    running.append_step(running.num_steps, PLAN.event)
    running.close()


def test_a_writer_that_no_lock_stopped_is_named_by_the_first_one(tmp_path, monkeypatch):
    """Locks that hold on one machine only: the first run finds the other's lines, and its note."""
    begin(tmp_path, 1)
    first = resume(tmp_path)
    monkeypatch.setattr("dpllm.privacy.chained_file.lock", lambda descriptor: True)
    monkeypatch.setattr("socket.gethostname", lambda: "node-b")
    resume(tmp_path).close()
    with pytest.raises(LedgerError, match="node-b"):
        first.append_step(first.num_steps, PLAN.event)
    first.close()


def test_the_note_is_for_the_owner_and_not_in_the_ledger(tmp_path):
    """A machine's name says nothing about the guarantee, and the ledger is released."""
    begin(tmp_path, 1)
    assert (tmp_path / WRITER_FILE).stat().st_mode & 0o777 == 0o600
    assert not re.search(r'"(host|pid|job)"', (tmp_path / LEDGER_FILE).read_text())
    assert [path.name for path in (tmp_path / WRITER_FILE).parent.iterdir()] == ["writer.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": 1}'])
def test_a_damaged_note_is_left_out(tmp_path, text):
    """The error says then that a run writes."""
    assert known_writer(tmp_path) == ""
    (tmp_path / WRITER_FILE).parent.mkdir()
    (tmp_path / WRITER_FILE).write_text(text)
    assert known_writer(tmp_path) == ""
