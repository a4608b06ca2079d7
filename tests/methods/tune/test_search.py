"""Tests of dpllm.methods.tune.tune: what a search file may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpllm.config import ConfigError, load_recipe
from dpllm.mechanism.selection import Selection
from dpllm.methods.tune.tune import load_search, overrides_of


def written(folder: Path, text: str) -> Path:
    path = folder / "search.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_combinations_are_candidates(search_file, recipe_file):
    """Two keys with two values each; a recipe takes their values as they are."""
    search = load_search(search_file)
    assert search.selection == Selection("logarithmic", 10)
    assert len({tuple(one.values()) for one in search.candidates}) == len(search.candidates) == 4
    recipe = load_recipe(recipe_file, overrides_of(search.candidates[0]))
    assert (recipe.train["learning_rate"], recipe.privacy.clip_norm) == (1e-4, 0.5)


RUNS = "runs: {kind: geometric, mean: 3}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("candidates: {train.learning_rate: [1]}", "sections runs and candidates"),
        (RUNS + "candidate: {train.learning_rate: [1]}", "did you mean 'candidates'"),
        (RUNS + "candidates: {}", "mapping from keys"),
        (RUNS + "candidates: {train.learning_rate: 0.1}", "must be a list"),
        (RUNS + "candidates: {train.learning_rate: []}", "has no values"),
        (RUNS + "candidates: {data.path: [a, b]}", "cannot be searched over"),
        (RUNS + "candidates: {train.output_dir: [a, b]}", "cannot be searched over"),
        (RUNS + "candidates: {train.report_to: [wandb]}", "cannot be searched over"),
        (RUNS + "candidates: {privacy.noise_multiplier: [1, 2]}", "cannot be searched over"),
        (RUNS + "candidates: {privacy.selection: [1]}", "cannot be searched over"),
        ("runs: {kind: fixed, mean: 3}\ncandidates: {train.learning_rate: [1]}", "logarithmic, geometric, poisson"),
        ("runs: {kind: geometric, mean: 0}\ncandidates: {train.learning_rate: [1]}", "between 1 and"),
        (RUNS + f"candidates: {{train.learning_rate: {list(range(10_001))}}}", "more than 10,000"),
        ("runs: [", "search.yaml"),
    ],
)
def test_other_searches_are_refused(tmp_path, text, words):
    """Data, noise and outputs are the same for all runs."""
    with pytest.raises(ConfigError, match=words):
        load_search(written(tmp_path, text))
