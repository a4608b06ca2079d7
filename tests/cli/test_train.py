"""`dpllm train`: the first lines, a whole run in the same process, and a launched one that a signal ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dpllm
from dpllm.config.shipped import recipe_file
from dpllm.privacy.ledger import read_ledger
from tests import children
from tests.distributed.launching import RECIPE, write_data
from tests.distributed.world import tools

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, "-m", "dpllm", "train"]


def environment() -> dict[str, str]:
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **tools()}


def test_the_first_line_is_printed_before_the_libraries_are_loaded(tmp_path):
    """Within a fraction of a second, whereas torch and the accounting take several; here neither can be loaded."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['scipy'] = sys.modules['dp_accounting'] = None\n",
        encoding="utf-8",
    )
    paths = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = children.run([*TRAIN, "quickstart"], cwd=tmp_path, env=paths, check=False)
    assert run.stdout == f"dpllm {dpllm.__version__}: training {recipe_file('quickstart')}\n"
    assert run.returncode == 1 and "dp_accounting" in run.stderr


def test_a_mistake_is_one_line_before_torch_is_loaded(tmp_path):
    """With exit code 2; nothing is written."""
    program = "import sys\nfrom dpllm.cli.program import main\n"
    code = f"{program}try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    words = [sys.executable, "-c", code, "train", "quickstart", "privacy.epsilom=3"]
    wrong = children.run(words, cwd=tmp_path, env=environment(), check=False)
    assert wrong.returncode == 2 and wrong.stdout.count("\n") == 1
    assert (
        wrong.stderr.startswith("error: quickstart, override privacy.epsilom=3: unknown key 'privacy.epsilom'")
        and wrong.stderr.count("\n") == 1
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
def test_a_run_in_one_process_tells_each_phase_and_goes_on_after_a_signal(tmp_path):
    """SIGTERM after the first steps: a checkpoint and exit code 143; the same command then ends the run."""
    write_data(tmp_path)
    words = [*TRAIN, str(RECIPE), "train.resume_from_checkpoint=auto", "train.disable_tqdm=true"]
    long = [*words, "train.max_steps=400", "train.save_steps=400", "train.output_dir=long"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(long, cwd=tmp_path, env=environment(), stdout=log, stderr=log)
        try:
            until(lambda: b"'loss'" in (tmp_path / "log").read_bytes() or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
        finally:
            process.kill()
    assert read_ledger(tmp_path / "long" / "privacy_ledger.jsonl").end == "interrupted"
    first = children.run(words, cwd=tmp_path, env=environment()).stdout
    again = children.run(words, cwd=tmp_path, env=environment()).stdout
    names = ["engine: one process", "checking the recipe", "reading the records", "planning", "public training"]
    names += ["tokenizing the records", "evaluating before", "training: 6", "report"]
    names += ["evaluating after", "saving", "done"]
    places = [first.find(f"\n{name}") for name in names]
    assert places == sorted(places) and min(places) >= 0, first
    assert "completed" in again and "\ntraining" not in again


@pytest.mark.deep
def test_a_launched_run_that_a_signal_ends_has_its_exit_code_and_no_traceback(tmp_path):
    """Two processes, by a shipped config: the workers get the signal once, and save."""
    write_data(tmp_path)
    words = [*TRAIN, str(RECIPE), "--config", "cpu_ddp", "train.max_steps=400", "train.disable_tqdm=true"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*words, "train.save_steps=400"], cwd=tmp_path, env=environment(), stdout=log, stderr=log
        )
        try:
            until(lambda: b"'loss'" in (tmp_path / "log").read_bytes() or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            code = process.wait(300)
        finally:
            process.kill()
    printed = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    assert code == 128 + signal.SIGTERM and "Traceback" not in printed, printed[-3000:]
    assert "engine: cpu_ddp, 2 processes" in printed and printed.count("SIGINT: finishing this step") == 1
    assert read_ledger(tmp_path / "out" / "privacy_ledger.jsonl").end == "interrupted"


def until(condition, limit: float = 300) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
