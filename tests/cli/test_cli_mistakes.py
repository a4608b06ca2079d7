"""Every bad value of the command line, and every damaged file, is one line and exit code 2, at once."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import io
import json
import secrets
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpllm.audit.canaries import CANARIES_FILE, Canary, CanarySet
from dpllm.cli import app
from dpllm.config import PrivacyConfig
from dpllm.privacy.budget import charge, create_budget, read_budget
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, read_ledger
from dpllm.privacy.ledger_reader import CHAIN_START, next_chain
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.report.statement import JSON_FILE, write_report
from tests import children

RECIPE = """
model: {config: {model_type: gpt2}}
data: {path: records.jsonl, max_length: 16}
privacy: {target_epsilon: 8, clip_norm: 1, expected_batch_size: 10}
train: {num_train_epochs: 3, output_dir: out}
"""
COMMANDS = {
    "epsilon": "epsilon --noise-multiplier 1 --sampling-rate 0.02 --steps 100 --delta 1e-5",
    "calibrate": "calibrate --epsilon 8 --sampling-rate 0.02 --steps 100 --delta 1e-5",
    "plan": "plan --sweep --num-units 1000 --expected-batch-size 10 --steps 10 --epsilon 8",
    "budget": "budget create b.json --dataset mail --epsilon 8 --delta 1e-5 --num-units 1000",
    "audit prepare": "audit prepare --config recipe.yaml --output a",
    "audit gradient": "audit gradient --config recipe.yaml",
    "audit attack": "audit attack run",
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
    "calibrate": {
        "--epsilon": ["0", "-1", "nan", "inf", "1001", "1e6", "1e9", "1e300"],
        "--sampling-rate": ["0", "-1", "1.5", "nan"],
        "--steps": ["0", "-1", "10000001", "1000000000000"],
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
    "audit attack": {
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


def refused(words: list[str]) -> str:
    """Return the one line that a refused command prints."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and result.stdout == ""
    return lines[0]


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
    line = refused(words)
    name = option.strip("-").removeprefix("expected-").rstrip("s")
    assert name in line.replace("_", "-").replace(" ", "-") or value in line, line
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


BUDGET_CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "text for epsilon": lambda values: values.update(epsilon="eight"),
    "text for delta": lambda values: values.update(delta="1e-5"),
    "no units": lambda values: values.update(num_units=0),
    "epsilon missing": lambda values: values.pop("epsilon"),
    "entries a number": lambda values: values.update(entries=3),
    "an entry a number": lambda values: values.update(entries=[3]),
    "a step a number": lambda values: values.update(entries=[{"step": 3}]),
    "unknown adjacency": lambda values: values.update(adjacency="none"),
    "delta out of range": lambda values: values.update(delta=7.0),
    "an entry's steps a text": lambda values: values["entries"][0].update(steps_reserved="ten"),
    "an entry's steps negative": lambda values: values["entries"][0].update(steps_reserved=-3),
    "an entry of an unknown field": lambda values: values["entries"][0].update(colour="red"),
    "an entry's head a text": lambda values: values["entries"][0].update(head="x"),
    "another format": lambda values: values.update(format=99),
}


@cache
def plan_of_mail() -> PrivacyPlan:
    options = {"noise_multiplier": 2.0, "clip_norm": 1.0, "expected_batch_size": 10, "dataset": "mail", "delta": 1e-5}
    return make_plan(PrivacyConfig(**options), 500, 3)


@pytest.mark.parametrize("change", BUDGET_CHANGES.values(), ids=list(BUDGET_CHANGES))
def test_a_budget_file_with_values_of_other_kinds_is_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    """Its hash may be right all the same."""
    path = tmp_path / "b.json"
    create_budget(path, dataset="mail", epsilon=8, delta=1e-5, unit="sequence", num_units=500)
    charge(path, plan_of_mail(), "mail")
    values = json.loads(path.read_text())
    values.pop("sha256")
    change(values)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**values, "sha256": digest}))
    line = refused(["budget", "show", str(path)])
    assert str(path) in line and ("latest copy" in line or "Give the file" in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The output folder of a run of three steps."""
    plan_of_mail().save(tmp_path / PLAN_FILE)
    with Ledger.create(tmp_path / LEDGER_FILE, plan_of_mail()) as ledger:
        for number in range(3):
            ledger.append_step(number, plan_of_mail().event)
        ledger.append_end("completed")
    write_report(tmp_path, plan_of_mail(), read_ledger(tmp_path / LEDGER_FILE))
    return tmp_path


def chained(path: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Edit the lines of a ledger as another version would have written them, with hashes that fit."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("chain")
    change(lines)
    chain, text = CHAIN_START, ""
    for line in lines:
        body = json.dumps(line)
        chain = next_chain(chain, body)
        text += f'{body[:-1]}, "chain": "{chain}"}}\n'
    path.write_text(text)


LEDGER_CHANGES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "a disclosure without count": lambda lines: lines.insert(1, {"kind": "disclosure", "what": "x"}),
    "a count that is a text": lambda lines: lines.insert(1, {"kind": "disclosure", "what": "x", "count": "two"}),
    "a fact without value": lambda lines: lines.insert(1, {"kind": "fact", "name": "x"}),
    "an unknown kind": lambda lines: lines.insert(1, {"kind": "weather"}),
    "a run without entropy": lambda lines: lines[0].pop("entropy"),
    "a run without plan": lambda lines: lines[0].pop("plan_hash"),
    "a run without public facts": lambda lines: lines[0].pop("public"),
    "public facts that are a number": lambda lines: lines[0].update(public=3),
    "a step of an unknown field": lambda lines: lines[1].update(colour="red"),
    "a step with noise as text": lambda lines: lines[1].update(noise_multiplier="two"),
}


@pytest.mark.parametrize("change", LEDGER_CHANGES.values(), ids=list(LEDGER_CHANGES))
def test_a_ledger_with_values_of_other_kinds_is_one_line(
    folder: Path, change: Callable[[list[dict[str, Any]]], Any]
) -> None:
    """The chain of hashes may be right all the same, as in a file of another version."""
    chained(folder / LEDGER_FILE, change)
    assert str(folder / LEDGER_FILE) in refused(["report", str(folder)])
    verified = CliRunner().invoke(app, ["verify", str(folder)])
    assert verified.exit_code == 1 and "FAILED" in verified.stdout and "Traceback" not in verified.output


DAMAGED: dict[str, Callable[[str], str]] = {
    "not JSON": lambda text: text[:50],
    "a list": lambda text: "[]",
    "a number": lambda text: "3",
    "a field missing": lambda text: json.dumps(
        {name: value for name, value in json.loads(text).items() if name not in ("setting", "delta")}
    ),
    "an unknown field": lambda text: json.dumps({**json.loads(text), "colour": "red"}),
    "a section that is a text": lambda text: json.dumps({**json.loads(text), "definition": "x"}),
    "numbers without end": lambda text: json.dumps({**json.loads(text), "statement": {"epsilon": "1e9"}}),
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=list(DAMAGED))
@pytest.mark.parametrize("name", [JSON_FILE, PLAN_FILE])
def test_a_damaged_report_or_plan_is_one_line(folder: Path, name: str, change: Callable[[str], str]) -> None:
    """`dpllm report` refuses it or does not need it; `dpllm verify` says which check failed; neither shows a fault."""
    path = folder / name
    path.write_text(change(path.read_text()))
    shown = CliRunner().invoke(app, ["report", str(folder), "--audience", "all"])
    assert shown.exit_code in (0, 2) and "Traceback" not in shown.output, shown.output
    if shown.exit_code == 2:
        assert shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1 and str(path) in shown.stderr
    path.write_text(change(path.read_text()) if shown.exit_code == 0 and name == JSON_FILE else path.read_text())
    verified = CliRunner().invoke(app, ["verify", str(folder)])
    assert verified.exit_code == 1 and "FAILED" in verified.stdout and "Traceback" not in verified.output


CANARY_CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "canaries a number": lambda values: values.update(canaries=3),
    "a canary a number": lambda values: values.update(canaries=[3]),
    "records a number": lambda values: values["canaries"][0].update(records=3),
    "records missing": lambda values: values["canaries"][0].pop("records"),
    "candidates missing": lambda values: values.pop("candidates"),
    "candidates a text": lambda values: values.update(candidates="x"),
    "an unknown field": lambda values: values.update(colour="red"),
    "delta a text": lambda values: values.update(delta="small"),
    "a recipe that is a list": lambda values: values.update(recipe=[]),
    "no nonce": lambda values: values.pop("nonce"),
}


@pytest.mark.parametrize("change", CANARY_CHANGES.values(), ids=list(CANARY_CHANGES))
def test_a_file_of_canaries_with_values_of_other_kinds_is_one_line(
    folder: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    """Neither coins nor texts are guessed."""
    canaries = tuple(
        Canary(records=(("", f"text {number}"),), user=None, included=number % 2 == 0) for number in range(12)
    )
    made = CanarySet(
        canaries=canaries,
        kind="random-tokens",
        unit="sequence",
        delta=1e-5,
        num_units=500,
        data_sha256="0",
        created_at="2026",
        nonce=secrets.token_hex(32),
    )
    path = folder / CANARIES_FILE
    made.save(path)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    assert str(path) in refused(["audit", "run", str(folder), "--canaries", str(path)])


def test_the_canaries_of_the_table_are_fit_for_an_audit() -> None:
    """Unchanged they would be read: each refusal above is due to its change."""
    names = {field.name for field in dataclasses.fields(CanarySet)}
    assert {"canaries", "candidates", "delta", "recipe", "nonce"} <= names


def test_whoever_waits_for_a_budget_is_told_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names file and holder while the lock is still held; then the charge goes through."""
    path, told = tmp_path / "b.json", threading.Event()
    create_budget(path, dataset="mail", epsilon=8, delta=1e-5, unit="sequence", num_units=500)

    class Screen(io.StringIO):
        def flush(self) -> None:
            told.set()

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("dpllm.privacy.budget_lock._LOCK_PATIENCE", 0.0)
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
