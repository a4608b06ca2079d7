"""`dpllm methods pate` and `dpllm plan` of its recipe, as a user runs them."""

from typer.testing import CliRunner

from dpllm.cli.program import app
from tests.cli.test_cli import as_json, run
from tests.methods.pate.school import TEACHERS, write_recipe


def test_the_commands_plan_and_teach(tmp_path):
    """The plan costs nothing; the run says each phase, and ends with the folder."""
    recipe = write_recipe(tmp_path)
    planned = as_json(["plan", str(recipe), "pate.max_prompts=3"])
    assert planned["charges"][0]["count"] == 3 and not (tmp_path / "run").exists()
    printed = run(["methods", "pate", str(recipe), "pate.max_prompts=3", f"output_dir={tmp_path / 'other'}"])
    assert f"{TEACHERS} of {TEACHERS} teachers have voted" in printed and "labels: 3" in printed
    assert f"dpllm verify {tmp_path / 'other'}" in printed
    assert len((tmp_path / "other" / "labels.jsonl").read_text().splitlines()) == 3


def test_mistakes_are_one_line(tmp_path):
    """Also those that only the public texts show."""
    recipe = write_recipe(tmp_path)
    refused = CliRunner().invoke(
        app, ["methods", "pate", str(recipe), f"pate.public_prompts={tmp_path / 'private.jsonl'}"]
    )
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert "error: pate.public_prompts=" in refused.stderr and not (tmp_path / "run").exists()
