"""README and documentation are true: their programs run, their commands run, their targets and files exist.

README and each tutorial are run as wholes (`tests.pages`); the commands of other pages are run one by one.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import load_recipe
from dpllm.config.shipped import recipe_file
from dpllm.config.yaml12 import read_yaml
from dpllm.data.rows import load_train_and_eval, unit_index_of
from tests import children, pages
from tests.small_model import SMALL_QUICKSTART, save_small_model
from tests.tiers import deep_case

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "docs").rglob("*.md")
    if path.relative_to(ROOT).as_posix() not in pages.TUTORIALS
)
COMMANDS = [line for page in GUIDES for line in pages.commands(page, "dpllm ")]
SMALLER = [
    "train.output_dir=runs/quickstart",
    "train.max_steps=2",
    "train.use_cpu=true",
    "privacy.expected_batch_size=4",
    "privacy.delta=1e-3",
    "data.eval=0.2",
    *SMALL_QUICKSTART,
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a run in runs/quickstart, made as README says, of less data."""
    folder = tmp_path_factory.mktemp("readme")
    assert "`dpllm train quickstart`" in README
    command = [sys.executable, "-m", "dpllm", "train", "quickstart", *SMALLER]
    run = children.run(command, cwd=folder, env=ENVIRONMENT, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "held-out perplexity" in run.stdout and "ε = " in run.stdout
    return folder


PROSE = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)\b", PROSE, flags=re.MULTILINE))))
def test_every_make_target_exists(target):
    """Also those of CONTRIBUTING.md."""
    run = children.run(["make", "-n", target], cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "page",
    [
        page if page.endswith("own_mechanism.md") else deep_case(page, id=Path(page).name)
        for page in ("README.md", "examples/private_finetuning.ipynb", *pages.TUTORIALS)
    ],
)
def test_readme_and_every_tutorial_run(page, tmp_path, monkeypatch):
    """In order, in a folder of its own, with the outputs shown; a small model has the name of one on the Hub."""
    if page.endswith("tutorials/trainer.md"):
        pytest.importorskip("trl")
    for name in ("SmolLM2-135M", "SmolLM2-135M-Instruct"):
        save_small_model(tmp_path / "HuggingFaceTB" / name, hidden_size=32)
    if page == "README.md":  # the file that it speaks of, and the recipe's own output is of the quickstart
        (make_notes,) = (block for block in pages.blocks("docs/tutorials/own_data.md") if block.title)
        children.run([sys.executable, "-c", make_notes.code], cwd=tmp_path)
    if page.endswith("own_mechanism.md"):  # programs only, which need no process of their own
        monkeypatch.chdir(tmp_path)
        return pages.run_page(page)
    run = children.run([sys.executable, "-m", "tests.pages", page], cwd=tmp_path, env=ENVIRONMENT, check=False)
    assert run.returncode == 0, run.stderr[-4000:]


def test_a_page_shows_what_was_printed():
    """Numbers may differ, words may not."""
    assert pages.missing_lines("ε = 7.99 …\ndone", "ε = 3.1 at δ = 1e-5\n  done\n") == []
    assert pages.missing_lines("12 of 13 steps\nended", "3 of 1 units\ndone") == ["12 of 13 steps", "ended"]


def test_the_rules_of_a_page():
    """Comments are left out, lines are joined, and a hidden comment adds arguments."""
    (block,) = (block for block in pages.blocks("README.md", "bash") if "dpllm train recipe.yaml" in block.lines)
    assert "train.max_steps=2" in block.more
    assert pages.Block("bash", None, "# a\nb \\\nc  # d\n").lines == ["b  c"]


def test_every_tutorial_has_something_to_run():
    """And each of its outputs comes after it."""
    for page in pages.TUTORIALS:
        kinds = [block.language for block in pages.blocks(page) if block.title is None]
        assert {"python", "bash"} & set(kinds) and kinds[0] != "text"


@pytest.mark.parametrize(
    "command",
    [
        line if line.startswith("dpllm verify") else deep_case(line)
        for line in dict.fromkeys(COMMANDS)
        if "--rehearse" not in line
    ],
)
def test_every_command_of_the_guides_runs(command, workplace, monkeypatch):
    """Plain and with --json."""
    monkeypatch.chdir(workplace)
    arguments = shlex.split(command)[1:]
    for more in ([], ["--json"]):
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0 and result.stdout.strip(), result.output


def test_the_guides_have_the_commands_of_each_stage():
    """A page that lost its blocks would leave nothing to run."""
    assert {line.split()[1] for line in COMMANDS} >= {"plan", "epsilon", "report", "verify"}


@pytest.mark.deep
def test_the_rehearsal_runs(workplace, monkeypatch):
    """On less data and fewer steps; the file that it writes is sections of a recipe."""
    monkeypatch.chdir(workplace)
    (line,) = (line for line in COMMANDS if "--rehearse" in line)
    fewer = [*SMALLER, "train.max_steps=4", "public_pretrain.data.limit=200"]
    result = CliRunner().invoke(app, [*shlex.split(line)[1:], *fewer])
    assert result.exit_code == 0 and "recommended" in result.stdout, result.output
    written = read_yaml((workplace / "runs/suggested/suggestion.yaml").read_text(encoding="utf-8"))
    assert written["train"]["learning_rate"] > 0 and written["privacy"]["clip_norm"] == 0.1


def test_the_budget_is_for_the_people_of_its_recipe():
    """A run on other units than the file's is refused, so the N that a page shows has to be the recipe's."""
    path = recipe_file("quickstart_users")
    recipe = load_recipe(path)
    records, _ = load_train_and_eval(recipe.data, recipe.privacy)
    (create,) = (shlex.split(line) for line in pages.commands("docs/tutorials/release.md", "dpllm budget create"))
    shown = int(create[create.index("--num-units") + 1])
    assert shown == unit_index_of(records, recipe.privacy).num_units
    for text in (path.read_text(encoding="utf-8"), (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")):
        assert f"{shown:,}".replace(",", " ") in text


def test_every_file_it_names_exists():
    """Links, pictures and the reading list."""
    named = set(re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", PROSE)) | set(
        re.findall(r"^dpllm/\S+", PROSE, flags=re.MULTILINE)
    )
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_the_models_of_readme_are_those_of_the_table():
    """The share of the causal language models that are exact."""
    table = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (built, exact) = re.findall(r"^\| Causal language models \| full \| \d+ \| (\d+) \| (\d+) ", table, re.MULTILINE)[0]
    assert f"{exact} of {built} causal language models" in README
