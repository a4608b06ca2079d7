"""A small model with its tokenizer, records, and a recipe, for the audits of trained models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpllm.audit.canaries import CANARIES_FILE, CanarySet
from dpllm.cli.program import app
from tests.small_model import WORDS, save_small_model

RECIPE = """
model: {{name: {model}}}
data: {{path: {data}, max_length: 32, eval: 0.1}}
privacy: {{noise_multiplier: 1, clip_norm: 1, expected_batch_size: 20, delta: 1.0e-3}}
train: {{output_dir: unused, max_steps: 2, per_device_train_batch_size: 32, use_cpu: true, disable_tqdm: true,
  dataloader_pin_memory: false, learning_rate: 1.0e-3}}
"""


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small untrained model and its tokenizer."""
    return save_small_model(tmp_path_factory.mktemp("base"), hidden_size=48)


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """A recipe for 100 records, ten of them held out; each is of one of 20 users."""
    folder = tmp_path_factory.mktemp("recipe")
    lines = [
        {"text": " ".join(WORDS[(n + k * (n // 7 + 1)) % len(WORDS)] for k in range(6)) + f" {n}", "user": f"u{n % 20}"}
        for n in range(100)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=base_model, data=folder / "records.jsonl"), encoding="utf-8")
    return path


M = 60


def call(*arguments: Any) -> Any:
    """A command of the audit."""
    group = "methods" if arguments[0] == "exposure" else "audit"
    return CliRunner().invoke(app, [group, *map(str, arguments)])


@pytest.fixture(scope="session")
def prepared(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit's folder, made by the command; one whose coins fell evenly enough for the ceiling to be in reach."""
    while True:
        folder = tmp_path_factory.mktemp("audit") / "a"
        result = call("prepare", "--config", recipe_file, "--output", folder, "--canaries", M, "--length", 10)
        assert result.exit_code == 0, result.output
        if 25 <= sum(CanarySet.load(folder / CANARIES_FILE).included) <= M - 25:
            return folder
