"""Signals in real processes: under a launcher, in a terminal and without one; and the files they leave."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpllm.privacy.checkpoints import verify
from dpllm.privacy.ledger import read_ledger
from dpllm.training.signals import exit_code

ROOT = Path(__file__).parents[2]
LIMIT = 400  # seconds; only catches a deadlock
PROGRAM = """
import os, sys
from pathlib import Path
from transformers import TrainerCallback
from dpllm.training.signals import exit_code
from tests.training.test_trainer import arguments, trainer

class Ready(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            Path(args.output_dir, f"ready.{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))

run = trainer(sys.argv[1], args=arguments(sys.argv[1], max_steps=20_000, logging_strategy="no"), callbacks=[Ready()])
run.train()
code = exit_code(run.interrupted_by) if run.interrupted_by is not None else 1
sys.stdout.flush()
os._exit(code if "RANK" not in os.environ else 0)
"""
# Makes the terminal that it was given on descriptor 0 its own, as a shell's jobs have it, and becomes the program.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="parents and terminals are looked at as Linux has them")


def environment():
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def start(tmp_path):
    """Starts commands; kills the remaining processes of their sessions at the end."""
    started = []
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def run(*command, **more):
        process = subprocess.Popen(
            [*command, str(script), str(tmp_path / "out")],
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **more},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        for pid in [process.pid, *pids_of(tmp_path / "out")]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def pids_of(folder):
    return [int(path.read_text()) for path in folder.glob("ready.*") if path.read_text()]


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(condition, what):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def ready(folder, count=1):
    until(lambda: len(pids_of(folder)) == count, "the program does not train")
    return sorted(pids_of(folder))


def ended_in_order(folder):
    """The ledger's end, a whole checkpoint of the last step, and a report of as many."""
    ledger = read_ledger(folder / "privacy_ledger.jsonl")
    assert ledger.end == "interrupted"
    verify(folder / f"checkpoint-{ledger.num_steps}")
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["accounting"]["steps"]["charged"] == ledger.num_steps


@pytest.mark.deep
def test_ctrl_c_in_a_terminal_below_accelerate_launch(start, tmp_path):
    """The launcher ends as its child does: no traceback, no orphan, exit code 0."""
    master, slave = pty.openpty()
    process = start(sys.executable, "-c", IN_TERMINAL, *ACCELERATE, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    (pid,) = ready(tmp_path / "out")
    os.write(master, b"\x03")
    screen = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # the last process that held the terminal has gone
            break
        if not part:
            break
        screen += part
    os.close(master)
    assert process.wait(LIMIT) == 0
    text = screen.decode(errors="replace")
    assert "SIGINT: finishing this step" in text and "Traceback" not in text
    assert not alive(pid)
    ended_in_order(tmp_path / "out")


@pytest.mark.deep
def test_a_launcher_that_dies_takes_its_child_with_it_in_order(start, tmp_path):
    """Without a terminal; accelerate's launcher forwards nothing."""
    process = start(*ACCELERATE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (pid,) = ready(tmp_path / "out")
    process.terminate()
    assert process.wait(LIMIT) == -signal.SIGTERM
    until(lambda: not alive(pid), "an orphan goes on")
    ended_in_order(tmp_path / "out")


@pytest.mark.deep
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(start, tmp_path):
    """And the launcher takes it for success."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(*launcher, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pids = ready(tmp_path / "out", count=2)
    os.kill(int((tmp_path / "out" / "ready.1").read_text()), signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert not any(alive(pid) for pid in pids)
    ended_in_order(tmp_path / "out")


def test_exit_codes(monkeypatch):
    """As shells count; below a launcher Ctrl-C is no crash."""
    monkeypatch.setattr("dpllm.training.signals.launched", lambda: False)
    assert [exit_code(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == [130, 143, 129]
    monkeypatch.setattr("dpllm.training.signals.launched", lambda: True)
    assert [exit_code(number) for number in (signal.SIGINT, signal.SIGTERM)] == [0, 143]


def test_a_shell_is_no_launcher():
    """The rest of its command line, after the program's name, has no influence."""
    command = "from dpllm.training.signals import launched; print(launched())"
    line = f'cd /; : accelerate torchrun; "{sys.executable}" -c "{command}"; true'
    done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
