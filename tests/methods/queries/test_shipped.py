"""Every shipped recipe of a query run says what it is, and is planned at the ε that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.cli.recipes import described
from dpllm.config import ConfigError
from dpllm.config.recipe_file import load_query_recipe, method_in
from dpllm.methods.queries.command import query_command
from dpllm.registry import method, query_sections

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = [path for path in sorted(FOLDER.rglob("*.yaml")) if method_in(path) is not None]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_says_what_it_is_and_how_it_is_run(path: Path) -> None:
    """The header names the source, the cost, the result and the command; `dpllm recipes` lists it."""
    text, words = path.read_text(encoding="utf-8"), method(str(method_in(path))).invocation
    header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert f"{words} recipes/{path.name}" in header
    assert all(word in header for word in ("Source:", "Cost: ", "Result: "))
    assert words in described(text)["mode"] and "ε = " in described(text)["mode"]


def test_every_method_has_a_command() -> None:
    """And its section defaults, so that a recipe needs no options."""
    assert set(query_sections()) == {"count", "predict", "evolve", "pate", "aggregate"}
    for name, section in query_sections().items():
        section()
        assert query_command(name).reading and method(name).show_plan is not None and method(name).words


def test_the_departments_are_planned_and_counted(tmp_path: Path) -> None:
    """The recipe of the counts at ε = 1, for 6 000 patients with at most 3 notes each."""
    recipe = load_query_recipe("label_counts")
    result = CliRunner().invoke(app, ["plan", "label_counts", "--json"])
    plan = json.loads(result.stdout)
    assert plan["num_units"] == 6000 and 0.999 < plan["epsilon_zero_out"] <= 1 == recipe.privacy.epsilon
    assert plan["charges"][0]["count"] == 1 and plan["settings"]["largest change by one unit (l2), zero-out"] == 3


def test_a_stop_is_declared_after_a_crash_and_not_in_the_recipe() -> None:
    """No command would read it: a run ends with its planned answers, or by an error."""
    with pytest.raises(ConfigError, match="stop"):
        load_query_recipe("label_counts", ["privacy.stop=independent"])
