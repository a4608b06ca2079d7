"""Signals in real processes: under a launcher, in a terminal and without one; and the files they leave."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpllm.privacy.checkpoints import verify
from dpllm.privacy.ledger import read_ledger
from dpllm.training.signals import exit_code
from tests import children

ROOT = Path(__file__).parents[2]
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


def start(folder, *command, **more):
    """Start the program below a command."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    command = [*command, str(script), str(folder / "out")]
    return children.Child(command, cwd=ROOT, env=environment(), **{"stdin": subprocess.DEVNULL, **more})


def ready(process, folder, count=1):
    """Wait until all processes train; return their numbers, by rank."""
    files = [folder / "out" / f"ready.{rank}" for rank in range(count)]
    children.wait_for(lambda: process.poll() is not None or all(f.exists() and f.read_text() for f in files))
    return [int(file.read_text()) for file in files]


def ended_in_order(folder):
    """The ledger's end, a whole checkpoint of the last step, and a report of as many."""
    ledger = read_ledger(folder / "privacy_ledger.jsonl")
    assert ledger.end == "interrupted"
    verify(folder / f"checkpoint-{ledger.num_steps}")
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["accounting"]["steps"]["charged"] == ledger.num_steps


@pytest.mark.deep
def test_ctrl_c_in_a_terminal_below_accelerate_launch(tmp_path):
    """The launcher ends with its own traceback, and its child in order; no orphan is left."""
    master, slave = pty.openpty()
    terminal = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = start(tmp_path, sys.executable, "-c", IN_TERMINAL, *ACCELERATE, **terminal)
    os.close(slave)
    ready(process, tmp_path)
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
    process.wait(children.LIMIT)
    assert "SIGINT: finishing this step" in screen.decode(errors="replace")
    children.wait_for(lambda: not list(process.family()))
    ended_in_order(tmp_path / "out")


@pytest.mark.deep
def test_a_launcher_that_dies_takes_its_child_with_it_in_order(tmp_path):
    """Without a terminal; accelerate's launcher forwards nothing."""
    process = start(tmp_path, *ACCELERATE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ready(process, tmp_path)
    process.terminate()
    assert process.wait(children.LIMIT) == -signal.SIGTERM
    children.wait_for(lambda: not list(process.family()))
    ended_in_order(tmp_path / "out")


@pytest.mark.deep
def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(tmp_path):
    """And the launcher takes it for success."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(tmp_path, *launcher, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.kill(ready(process, tmp_path, count=2)[1], signal.SIGTERM)
    assert process.wait(children.LIMIT) == 0
    assert not list(process.family())
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
