"""`dpllm recipes` lists, prints and copies; `dpllm --version`."""

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import dpllm
from dpllm.cli.program import app
from dpllm.config import load_recipe
from dpllm.config.shipped import shipped_recipes
from dpllm.config.yaml12 import read_yaml

ROOT = Path(__file__).parents[2]


def call(*words):
    return CliRunner().invoke(app, ["recipes", *words])


def test_each_recipe_is_listed_with_what_it_is_its_mode_and_its_cost():
    """From its own header and values, so that a new recipe is listed too."""
    listed = json.loads(call("--json").stdout)["recipes"]
    assert set(listed) == set(shipped_recipes())
    assert listed["quickstart_users"]["mode"] == "from scratch, ε = 8 per user"
    assert listed["quickstart"]["cost"].startswith("307 s")
    assert listed["qlora"]["mode"].startswith("QLoRA") and "1.7 billion" in listed["qlora"]["what"]
    shown = " ".join(call().stdout.split())
    for name, about in listed.items():
        assert all(about.values()) and name in shown
    assert "dpllm train NAME" in shown


def test_a_recipe_is_printed_as_it_is():
    """So that it can be redirected to a file."""
    assert call("quickstart").stdout == (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")


def test_a_copy_is_the_recipe_and_replaces_nothing(tmp_path, monkeypatch):
    """Under its own name here, under a new one, or in a folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert "dpllm train quickstart.yaml" in call("quickstart", "--copy").stdout
    assert call("quickstart", "--copy", "new/mine.yaml").exit_code == 0
    assert call("quickstart", "folder", "--copy").exit_code == 0
    for path in ("quickstart.yaml", "new/mine.yaml", "folder/quickstart.yaml"):
        assert load_recipe(tmp_path / path) == load_recipe(shipped_recipes()["quickstart"])
    Path("quickstart.yaml").write_text("mine", encoding="utf-8")
    again = call("quickstart", "--copy")
    assert again.exit_code == 2 and "exists already and is not replaced" in again.stderr
    assert Path("quickstart.yaml").read_text(encoding="utf-8") == "mine"


def test_all_folders_are_copied_for_a_cluster(tmp_path):
    """Scripts stay executable; a second copy is refused whole."""
    assert call("all", "--copy", str(tmp_path / "work")).exit_code == 0
    script = tmp_path / "work" / "launch" / "torchrun.sh"
    assert script.stat().st_mode & 0o100 and (tmp_path / "work" / "accelerate_configs" / "deepspeed").is_dir()
    (tmp_path / "other" / "launch").mkdir(parents=True)
    assert call("all", "--copy", str(tmp_path / "other")).exit_code == 2
    assert not (tmp_path / "other" / "recipes").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["quickstar"], "quickstar is no shipped recipe; did you mean 'quickstart'"),
        (["--copy"], "--copy needs the name of a recipe"),
        (["quickstart", "mine.yaml"], "a path is for --copy"),
    ],
)
def test_a_mistake_names_the_remedy(words, error):
    """With exit code 2."""
    result = call(*words)
    assert result.exit_code == 2 and error in result.stderr


def test_the_version():
    """`dpllm --version`."""
    assert CliRunner().invoke(app, ["--version"]).stdout == f"dpllm {dpllm.__version__}\n"


def test_the_schema_accepts_every_shipped_recipe_and_refuses_an_unknown_key():
    """An editor that has it completes keys, and marks one that dpllm would refuse."""
    result = call("--schema")
    assert result.exit_code == 0
    validator = jsonschema.Draft202012Validator(json.loads(result.stdout))
    for file in shipped_recipes().values():
        recipe = read_yaml(file.read_text(encoding="utf-8"))
        assert not list(validator.iter_errors(recipe)), file
        assert list(validator.iter_errors({**recipe, "modle": "x"})), file
