"""Tests of dpllm.methods.tune.command: the command, and the programs that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dpllm.methods.tune import RECORD_FILE
from dpllm.methods.tune.command import _runner
from dpllm.methods.tune.record import DrawnRun, create_record, read_record
from dpllm.privacy.budget import read_budget
from tests import tiers
from tests.cli.test_cli import EPSILON, as_json, refuse, run
from tests.methods.tune.conftest import base_model, recipe_file, search_file, trained  # noqa: F401

ROOT = Path(__file__).parents[2]


def test_the_cost_is_printed_before_anything_is_drawn(recipe_file, search_file, tmp_path):  # noqa: F811
    """The ε of the release beside that of one run; the budget is not charged, and no folder is made."""
    budget, out = tmp_path / "words.budget.json", tmp_path / "out"
    options = ["--dataset", "words", "--epsilon", "9", "--delta", "1e-3", "--num-units", "100"]
    run(["budget", "create", str(budget), *options])
    command = ["methods", "tune", str(recipe_file), f"train.output_dir={out}", f"privacy.budget_file={budget}"]
    command += ["--search", str(search_file), "--plan-only"]
    values = as_json(command)
    assert 7.99 < values["epsilon"] <= 8 and values["epsilon_of_one_run"] < 4
    assert (values["runs"], values["mean_runs"], values["candidates"]) == ("logarithmic", 10, 4)
    assert not out.exists() and read_budget(budget).entries == ()
    shown = run(command)
    assert "ε of the release" in shown and "ε of one run by itself" in shown and "99 of 100 at most" in shown


def test_a_mistake_is_one_line(recipe_file, search_file):  # noqa: F811
    """As for every command."""
    assert "data.eval.public=true" in refuse(
        ["methods", "tune", str(recipe_file), "--search", str(search_file), "data.eval.public=false"]
    )
    assert "cannot be read" in refuse(["methods", "tune", str(recipe_file), "--search", "nowhere.yaml"])


def test_epsilon_of_the_best_of_another_kind():
    """Reference: dp_accounting's RepeatAndSelectDpEvent gives 8.16; the default stays geometric, with 9.26."""
    found = as_json([*EPSILON, "--best-of", "10", "--best-of-runs", "logarithmic"])["best_of"]
    assert found["epsilon"] == pytest.approx(8.16, abs=5e-3) and found["runs"] == "logarithmic"
    assert "selection must be one of" in refuse([*EPSILON, "--best-of", "10", "--best-of-runs", "fixed"])


def test_a_run_gets_the_environment_of_the_start_and_writes_a_log(tmp_path):
    """Whatever the checks of the recipe set in this process does not reach it."""
    program = "import os, sys; print(sys.argv[1:], os.environ.get('SET')); sys.exit(7)"
    (tmp_path / "program.py").write_text(program)
    start = _runner(f"{sys.executable} {tmp_path / 'program.py'}", {"SET": "before"})
    assert start(tmp_path / "run.yaml", tmp_path / "run.log") == 7
    assert (tmp_path / "run.log").read_text() == f"['--config', '{tmp_path / 'run.yaml'}'] before\n"


def test_without_a_command_of_ones_own_this_installation_trains(tmp_path):
    """`dpllm train` with the file of the run, in place of {recipe}, also where no dpllm is on the path."""
    start = _runner("dpllm train {recipe}", {"PYTHONPATH": str(ROOT)})
    assert start(tmp_path / "nowhere.yaml", tmp_path / "log") == 2
    assert f"{tmp_path / 'nowhere.yaml'}: there is no such file" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_run_once_and_is_waited_for(tmp_path, number):
    """The run can save its checkpoint; its end is not noted, since the tuning is interrupted."""
    program = (
        "import signal, sys, time, pathlib\n"
        "def stop(number, frame):\n    time.sleep(0.2)\n    print('saved', flush=True)\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, stop), signal.signal(signal.SIGINT, stop)\n"
        "pathlib.Path(sys.argv[2] + '.ready').touch()\ntime.sleep(20)\n"
    )
    (tmp_path / "program.py").write_text(program)
    ready = tmp_path / "run.yaml.ready"

    def send() -> None:
        for _ in range(500):
            if ready.exists():
                break
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        _runner(f"{sys.executable} {tmp_path / 'program.py'}", dict(os.environ))(
            ready.with_suffix(""), tmp_path / "log"
        )
    thread.join()
    assert (tmp_path / "log").read_text() == "saved\n" and signal.getsignal(number) is before


def test_verify_takes_the_folder_of_a_tuning(tmp_path):
    """Its record is checked, with exit code 1 for a run that has not ended."""
    from typer.testing import CliRunner

    from dpllm.cli.program import app

    create_record(tmp_path / RECORD_FILE, {"selected": {}, "budget": None}, [DrawnRun("aa", 0)])
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 1 and "every run that was drawn has ended: FAILED" in result.stdout


@tiers.deep
def test_a_tuning_that_is_killed_goes_on_with_the_same_command(recipe_file, tmp_path):  # noqa: F811
    """kill -9 of the whole command in the first run; the same draws, the same folders, and a released model."""
    search = tmp_path / "search.yaml"
    search.write_text("runs: {kind: geometric, mean: 1}\ncandidates: {train.learning_rate: [1.0e-2]}\n")
    program = [sys.executable, "-m", "dpllm", "methods", "tune", str(recipe_file), "--search", str(search)]
    program += [
        "--launch",
        f"{sys.executable} {ROOT / 'recipes' / 'finetune.py'}",
        f"train.output_dir={tmp_path / 'out'}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    record = tmp_path / "out" / RECORD_FILE
    first = subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL)
    while not record.exists() or not read_record(record).begun:
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    drawn = read_record(record).draws
    log = read_record(record).folder_of(0).with_suffix(".log")
    for _ in range(1500):  # the run itself was not killed, and ends
        if "done" in (log.read_text() if log.exists() else ""):
            break
        time.sleep(0.2)
    time.sleep(2)
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_record(record).draws == drawn and "its draws are taken again" in done.stdout
    assert "Released:" in done.stdout and (tmp_path / "out" / "released" / "model.safetensors").is_file()
