"""Tests of `dpllm methods synthesize` and `dpllm methods evaluate`: the whole way on the command line, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpllm.methods.synthesize.data_set import BLOCKED
from dpllm.methods.synthesize.evaluation import DISCLOSED, EVALUATION_FILE
from dpllm.models import generation
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.verify import verify
from tests.cli.test_generate import invoke, refused
from tests.methods.synthesize.test_data_set import records_of
from tests.report.test_standing import folder_of
from tests.small_model import save_small_model


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished private run of 500 records; its model is a small one that was loaded elsewhere."""
    loaded = generation.load_generator(save_small_model(tmp_path / "model", hidden_size=16), "cpu")
    monkeypatch.setattr(generation, "load_generator", lambda folder: loaded)
    (tmp_path / "run").mkdir()
    return records_of(folder_of(tmp_path / "run"), ["pub"] * 300 + ["cafe"] * 200)


def made(run: Path, *more: str, number: int = 4) -> list[str]:
    output = ["--output", str(run.parent / "made"), "--max-new-tokens", "4"]
    return ["methods", "synthesize", str(run), "-n", str(number), *output, *more]


def test_a_data_set_with_counted_labels(run):
    """The cost is printed before; the folder verifies; the evaluation is listed in its ledger."""
    labels = ["--prompt", "kind: {label}", "--labels", "pub, cafe", "--count-labels", "kind"]
    result = invoke(made(run, *labels, "--count-noise", "5", "--seed", "7", "--min-words", "0"))
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert lines[0] == f"checking {run}" and any("will cost ε = " in line for line in lines)
    folder = run.parent / "made"
    texts = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
    assert 1 <= len(texts) <= 4 and {text["prompt"] for text in texts} <= {"kind: pub", "kind: cafe"}
    assert verify(folder).ok and read_ledger(folder / LEDGER_FILE).num_steps == 1
    assert "costs nothing: 7" in (folder / "README.md").read_text()
    real = run.parent / "real.jsonl"
    real.write_text('{"ref": "the small dog", "label": "pub"}\n{"ref": "a man", "label": "cafe"}\n')
    plain = ["--no-mauve", "--no-classifier", "--text-column", "ref"]
    result = invoke(["methods", "evaluate", str(folder), "--real", str(real), "--train", str(real), *plain])
    assert result.exit_code == 0, result.output
    assert "ε does not cover them" in result.stderr and "longest common run: largest" in result.stdout
    assert (folder / EVALUATION_FILE).is_file() and verify(folder).ok
    assert read_ledger(folder / LEDGER_FILE).disclosures == {DISCLOSED: 1}
    for name in ("figures.json", "figures/own.json"):
        result = invoke(
            ["methods", "evaluate", str(folder), "--real", str(real), *plain, "--output", str(folder / name)]
        )
        assert result.exit_code == 2 and "is for release, and results on private text are not" in result.stderr
        assert not (folder / name).exists() and read_ledger(folder / LEDGER_FILE).disclosures == {DISCLOSED: 1}
    result = invoke(["methods", "evaluate", str(folder), "--real", str(real), "--real-is-public", *plain, "--json"])
    assert json.loads(result.stdout)["reads_training"] is False
    assert read_ledger(folder / LEDGER_FILE).disclosures == {DISCLOSED: 1}
    result = invoke(["methods", "evaluate", str(folder / "texts.jsonl"), "--real", str(real), *plain])
    assert result.exit_code == 0, result.output
    assert read_ledger(folder / LEDGER_FILE).disclosures == {DISCLOSED: 2}  # the file of the folder is named, too


def test_public_shares_and_prompts(run, tmp_path):
    """Neither reads the records; the data set itself costs nothing."""
    (run / "private.jsonl").unlink()
    (tmp_path / "shares.json").write_text('{"pub": 3, "cafe": 1}')
    (tmp_path / "words.txt").write_text("# none\n")
    options = ["--label-shares", str(tmp_path / "shares.json"), "--blocklist", str(tmp_path / "words.txt")]
    result = invoke(made(run, "--prompt", "{label}", *options, "--format", "parquet", "--duplicates"))
    assert result.exit_code == 0 and "the data set itself costs nothing" in result.stderr, result.output
    assert (tmp_path / "made" / "texts.parquet").is_file() and verify(tmp_path / "made").ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--labels", "a,b"], r"need one --prompt with {label}"),
        (["--labels", "a,b", "--prompt", "kind"], r"has no {label}"),
        (["--labels", "a", "--prompt", "{label}"], "at least two classes"),
        (["--labels", "a,a", "--prompt", "{label}"], "named twice"),
        (["--count-labels", "kind"], "name all of them with --labels"),
        (["--labels", "a,b", "--prompt", "{label}", "--count-noise", "5"], "name the column to count"),
        (["--labels", "a,b", "--prompt", "{label}", "--count-labels", "kind"], "none of the 2 classes"),
        (["--labels", "pub,cafe", "--prompt", "{label}", "--count-labels", "sort"], "no column 'sort'"),
        (["--labels", "pub,cafe", "--label-shares", "x.json", "--prompt", "{label}"], "give one of them"),
        (["--label-shares", "x.json", "--prompt", "{label}"], "cannot be read"),
        (["--format", "csv"], "one of jsonl, parquet"),
        (["--blocklist", "nowhere.txt"], "--blocklist nowhere.txt cannot be read"),
        (["--max-words", "0"], "max_words"),
    ],
)
def test_mistakes_are_one_line_and_charge_nothing(run, options, words):
    assert words in refused(made(run, *options))
    assert not (run.parent / "made").exists()


def test_a_blocklist_is_an_open_point(run, tmp_path):
    """A list of patients' names shows by the texts that are missing who is in the records, and no program sees that."""
    (tmp_path / "words.txt").write_text("Mary Miller\n")
    result = invoke(made(run, "--blocklist", str(tmp_path / "words.txt"), "--min-words", "0"))
    assert result.exit_code == 0, result.output
    assert BLOCKED in read_ledger(tmp_path / "made" / LEDGER_FILE).notes.open_points
    assert "Is the list public?" in (tmp_path / "made" / "README.md").read_text() and verify(tmp_path / "made").ok


def test_evaluate_names_the_mistake(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "x"}\n')
    at = str(tmp_path / "t.jsonl")
    plain = ["--no-mauve", "--no-classifier"]
    assert "no such file" in refused(["methods", "evaluate", str(tmp_path / "none.jsonl"), "--real", at, *plain])
    assert "change the extension" in refused(["methods", "evaluate", at, "--real", at, "--output", "x.txt", *plain])
    assert "ngram" in refused(["methods", "evaluate", at, "--real", at, "--ngram", "0", *plain])
