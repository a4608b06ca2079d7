"""A program that a test started ends with all that it started, and leaves nothing open."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import children

PARENT = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1e6)"],
                          start_new_session=True, stdout=subprocess.PIPE, text=True)
print(worker.stdout.readline().strip(), flush=True)
if "leave" in sys.argv:
    import os; os._exit(0)
time.sleep(1e6)
"""


def start(*arguments):
    child = children.Child([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "up\n"
    return child


@pytest.mark.parametrize("arguments", [(), ("leave",)], ids=["running", "ended before its worker"])
def test_a_worker_in_a_session_of_its_own_ends_with_its_parent(arguments):
    """As torch's launcher starts them; also where the parent has ended and the worker has another one."""
    child = start(*arguments)
    if arguments:
        assert child.wait(children.LIMIT) == 0
    assert len(list(child.family())) == (1 if arguments else 2)
    child.kill()
    assert list(child.family()) == [] and child.returncode is not None and child.stdout.closed


def test_what_a_test_forgets_is_ended_after_it():
    """By the fixture that every test has."""
    child = start()
    children.end_all()
    assert list(child.family()) == [] and child.returncode is not None


def test_all_end_once_one_has_failed(monkeypatch):
    """A rank that waits for one that died is not waited for."""
    monkeypatch.setattr(children, "_GRACE", 0.1)
    codes = ["raise SystemExit(3)", "import time; time.sleep(1e6)"]
    processes = [children.Child([sys.executable, "-c", code]) for code in codes]
    assert children.wait_all(processes) == [3, None]
    assert all(process.returncode is not None for process in processes)


def report(word: str) -> None:
    """Print where and as what it runs, and fail."""
    print(word, os.environ["WORD"], os.getcwd(), "torch" in sys.modules, flush=True)
    raise SystemExit(5)


def sleep(word: str) -> None:
    """Start a program and wait for it."""
    subprocess.run([sys.executable, "-c", f"import time; print({word!r}, flush=True); time.sleep(1e6)"])


def test_a_fork_has_its_own_environment_and_the_libraries(tmp_path):
    """Its output, folder, variables and exit status are its own."""
    before = dict(os.environ)
    fork = children.Forked(report, "said", env={"WORD": "given"}, log=tmp_path / "log", cwd=tmp_path)
    assert children.wait_all([fork]) == [5]
    assert (tmp_path / "log").read_text().split() == ["said", "given", str(tmp_path), "True"]
    assert dict(os.environ) == before


def test_a_fork_ends_with_what_it_started(tmp_path):
    """Also when a test forgets it."""
    fork = children.Forked(sleep, "up", env=dict(os.environ), log=tmp_path / "log", cwd=tmp_path)
    children.wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text() == "up\n")
    assert fork.poll() is None
    group = [psutil.Process(fork.pid), *psutil.Process(fork.pid).children()]
    assert len(group) == 2
    children.end_all()
    assert fork.returncode == -signal.SIGKILL
    children.wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in group))


def test_what_fails_says_what_it_printed():
    """Exit status, output and errors."""
    with pytest.raises(AssertionError, match=r"(?s)exit status 3.*told"):
        children.run([sys.executable, "-c", "print('told'); raise SystemExit(3)"])
    done = children.run([sys.executable, "-c", "raise SystemExit(input())"], check=False, input="bad")
    assert done.returncode == 1 and "bad" in done.stderr


def test_waiting_ends_with_the_condition(monkeypatch):
    """And with an error where it never comes true."""
    children.wait_for(lambda: True)
    monkeypatch.setattr(children, "LIMIT", 0.0)
    with pytest.raises(AssertionError, match="waited"):
        children.wait_for(lambda: time.monotonic() < 0)
