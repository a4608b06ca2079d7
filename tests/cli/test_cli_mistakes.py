"""Every bad value of the command line, and every damaged file, is one line and exit code 2, at once."""

from __future__ import annotations

import fcntl
import io
import json
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import PrivacyConfig
from dpllm.privacy.budget import charge, create_budget, read_budget
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.report.statement import JSON_FILE
from tests import children
from tests.cli.test_cli import refuse
from tests.report.test_standing import folder_of

RECIPE = """
model: {config: {model_type: gpt2}}
data: {path: records.jsonl, max_length: 16}
privacy: {epsilon: 8, clip_norm: 1, expected_batch_size: 10}
train: {num_train_epochs: 3, output_dir: out}
"""
COMMANDS = {
    "epsilon": "epsilon --noise-multiplier 1 --sampling-rate 0.02 --steps 100 --delta 1e-5",
    "epsilon --target": "epsilon --target 8 --sampling-rate 0.02 --steps 100 --delta 1e-5",
    "plan": "plan sweep --num-units 1000 --expected-batch-size 10 --steps 10 --epsilon 8",
    "budget": "budget create b.json --dataset mail --epsilon 8 --delta 1e-5 --num-units 1000",
    "audit prepare": "audit prepare --config recipe.yaml --output a",
    "audit gradient": "audit gradient --config recipe.yaml",
    "methods attack": "methods attack run",
}
CHANGES: dict[str, dict[str, list[str]]] = {
    "epsilon": {
        "--noise-multiplier": ["1e300", "1e30", "nan", "inf", "-1", "1e-6", "1e-300"],
        "--sampling-rate": ["0", "-1", "1.5", "nan", "inf", "1e300"],
        "--steps": ["-1", "10000001", "1000000000000"],
        "--delta": ["0", "1", "-1", "nan", "inf", "1e-300"],
        "--rows-per-unit": ["0", "-1", "10001", "1000000"],
        "--max-batch-size": ["0", "5"],
        "--num-units": ["0", "-1"],
        "--adjacency": ["add-or-remove", ""],
    },
    "epsilon --target": {
        "--target": ["0", "-1", "nan", "inf", "1001", "1e6", "1e9", "1e300"],
        "--delta": ["0", "1", "nan"],
        "--rows-per-unit": ["0", "1000000"],
    },
    "plan": {
        "--num-units": ["0", "-1"],
        "--expected-batch-size": ["0", "-1", "1001"],
        "--steps": ["0", "-1", "1000000000000"],
        "--epsilon": ["0", "-1", "nan", "inf", "1001", "1e9", "1e300"],
        "--delta": ["0", "1", "nan"],
        "--batch-sizes": ["a,b", "0"],
        "--step-counts": ["a", "0"],
        "--min-steps": ["-1"],
        "--gradient-rms": ["-1", "nan"],
    },
    "budget": {
        "--epsilon": ["0", "-1", "nan", "inf", "1e9"],
        "--delta": ["0", "1", "nan", "0.5"],
        "--num-units": ["0", "-1"],
        "--unit": ["patient"],
        "--adjacency": ["x"],
    },
    "audit prepare": {
        "--canaries": ["0", "-1", "10000000"],
        "--length": ["0", "1000000"],
        "--repetitions": ["0"],
        "--candidates": ["-1", "10000000"],
        "--temperature": ["nan", "0", "inf"],
        "--kind": ["random"],
        "--prefixes": ["nowhere.txt"],
    },
    "audit gradient": {
        "--blocks": ["0", "1000000000"],
        "--canaries": ["0", "1000000"],
        "--base": ["0"],
        "--steps": ["0", "1000000000000"],
        "--tokens": ["0", "100000"],
    },
    "methods attack": {
        "--records": ["0"],
        "--temperature": ["nan", "0", "inf"],
        "--top-k": ["-1"],
        "--span": ["0", "1000"],
        "--new-tokens": ["0"],
        "--shadows": ["-1"],
    },
}
CASES = [
    (command, option, value)
    for command, options in CHANGES.items()
    for option, values in options.items()
    for value in values
]


@pytest.mark.parametrize(("command", "option", "value"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_bad_value_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str, value: str
) -> None:
    """It names the option, there is no traceback and no file, and nothing is computed first."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    words = COMMANDS[command].split()
    if option in words:
        words[words.index(option) + 1] = value
    else:
        words += [option, value]
    line = refuse(words)
    name = option.strip("-").removeprefix("expected-").rstrip("s")
    assert name in line.replace("_", "-").replace(" ", "-") or value in line, line
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@cache
def plan_of_mail() -> PrivacyPlan:
    options = {"noise_multiplier": 2.0, "clip_norm": 1.0, "expected_batch_size": 10, "dataset": "mail", "delta": 1e-5}
    return make_plan(PrivacyConfig(**options), 500, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path)


DAMAGED: dict[str, Callable[[str], str]] = {
    "not JSON": lambda text: text[:50],
    "a list": lambda text: "[]",
    "a field missing": lambda text: json.dumps(
        {name: value for name, value in json.loads(text).items() if name not in ("setting", "delta")}
    ),
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=list(DAMAGED))
@pytest.mark.parametrize("name", [JSON_FILE, PLAN_FILE])
def test_a_damaged_report_or_plan_is_one_line(folder: Path, name: str, change: Callable[[str], str]) -> None:
    """`dpllm report` refuses it or does not need it; `dpllm verify` says which check failed; neither shows a fault."""
    path = folder / name
    path.write_text(change(path.read_text()))
    shown = CliRunner().invoke(app, ["report", "note", str(folder), "audience=all"])
    assert shown.exit_code in (0, 2) and "Traceback" not in shown.output, shown.output
    if shown.exit_code == 2:
        assert shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1 and str(path) in shown.stderr
    path.write_text(change(path.read_text()) if shown.exit_code == 0 and name == JSON_FILE else path.read_text())
    verified = CliRunner().invoke(app, ["verify", str(folder)])
    assert verified.exit_code == 1 and "FAILED" in verified.stdout and "Traceback" not in verified.output


def test_whoever_waits_for_a_budget_is_told_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names file and holder while the lock is still held; then the charge goes through."""
    path, told = tmp_path / "b.json", threading.Event()
    create_budget(path, dataset="mail", epsilon=8, delta=1e-5, unit="sequence", num_units=500)

    class Screen(io.StringIO):
        def flush(self) -> None:
            told.set()

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("dpllm.privacy.budget._LOCK_PATIENCE", 0.0)
    with open(path.with_name("b.json.lock"), "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        entries: list[str] = []
        waiting = threading.Thread(target=lambda: entries.append(charge(path, plan_of_mail(), "mail")))
        waiting.start()
        try:
            assert told.wait(timeout=children.LIMIT) and entries == []
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)
            waiting.join()
    assert screen.getvalue().startswith(f"waiting for {path}, which is locked by process")
    assert [entry.id for entry in read_budget(path).entries] == entries
