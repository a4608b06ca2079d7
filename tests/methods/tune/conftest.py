"""A small model, records, a recipe and a search file, and a trainer in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dpllm.config import load_recipe
from dpllm.training import finetune
from tests.small_model import WORDS, save_small_model

RECIPE = """
model: {{name: {model}}}
data: {{path: {folder}/records.jsonl, eval: {{path: {folder}/public.jsonl, public: true}}, max_length: 32}}
privacy: {{epsilon: 8, clip_norm: 1, expected_batch_size: 20, delta: 1.0e-3, dataset: words}}
train: {{output_dir: unused, max_steps: 2, per_device_train_batch_size: 32, use_cpu: true, disable_tqdm: true,
  dataloader_pin_memory: false, learning_rate: 1.0e-3}}
release: {{data_holder: a, audience: b, other_uses: none}}
"""
SEARCH = """
runs: {kind: logarithmic, mean: 10}
candidates: {train.learning_rate: [1.0e-4, 3.0e-2], privacy.clip_norm: [0.5, 1.0]}
"""


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("base"), hidden_size=16)


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    for name, count in (("records", 100), ("public", 10)):
        lines = [
            {"text": " ".join(WORDS[(n + k) % len(WORDS)] for k in range(6)) + f" {name} {n}"} for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=base_model, folder=folder), encoding="utf-8")
    return path


@pytest.fixture
def search_file(tmp_path: Path) -> Path:
    path = tmp_path / "search.yaml"
    path.write_text(SEARCH, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def trained() -> Callable[[Path, Path], int]:
    """The program that runs recipes, called in this process; its exit code is 1 after an error."""

    def run(recipe: Path, log: Path) -> int:
        with open(log, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            try:
                return int(finetune.run(load_recipe(recipe)))
            except finetune.RunCompletedError:
                return 0
            except (ValueError, RuntimeError) as error:
                file.write(str(error))
                return 1

    return run
