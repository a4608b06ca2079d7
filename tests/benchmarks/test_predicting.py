"""benchmarks/predicting.py: both methods state the ε that was asked for, and the measures tell texts apart."""

from __future__ import annotations

import json
import random

import pytest
import torch

from tests.benchmarks.material import program, save_model, write_records

benchmark = program("predicting")


@pytest.mark.deep
def test_all_rows_are_measured(tmp_path):
    """Two texts of each method at one ε, the public model and real texts; the private runs are those of the product."""
    save_model(tmp_path / "model", max_length=320)
    pick = random.Random(0)
    for name, count in (("train", 120), ("dev", 30)):
        write_records(tmp_path / f"{name}.csv", pick, count, (3, 9))
    names = [("--model", "model"), ("--judge-model", "model"), ("--data", "train.csv"), ("--held-out", "dev.csv")]
    places = [word for option, name in names for word in (option, str(tmp_path / name))]
    sizes = ["--texts", "2", "--tokens", "3", "--group-size", "4", "--judge-steps", "1", "--judge-records", "100"]
    file = tmp_path / "figures.json"
    benchmark.main([*places, *sizes, "--delta", "1e-3", "--epsilon", "6", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == ["invisible-ink", "logits", "public model", "real"]
    for kind in ("invisible-ink", "logits"):
        assert 5.9 < rows[kind]["epsilon"] <= 6 and rows[kind]["clip"] > 0 and rows[kind]["texts"] == 2
    assert all(row["perplexity"] > 1 for row in rows.values())


def test_what_is_found_and_what_is_distinct():
    """Two of three texts are equal; one of two sequences of words is known."""

    class Judge:
        def __call__(self, **_):
            raise AssertionError("no text is long enough")

    class Words:
        def __call__(self, text, return_tensors):
            return {"input_ids": torch.zeros(1, 1, dtype=torch.long)}

    known = set(benchmark.grams("a rose is"))
    row = benchmark.row_of(["a rose is red", "a rose is red", "b"], Judge(), Words(), known)
    assert row["3-grams"] == 0.5 and row["distinct"] == 2 / 3 and row["perplexity"] == 1
