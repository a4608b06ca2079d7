"""README and documentation are true: their programs run, their commands run, their targets and files exist."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpllm.cli import app
from dpllm.config import load_recipe
from dpllm.config.yaml12 import read_yaml
from dpllm.data.rows import load_train_and_eval, unit_index_of
from tests import children, pages
from tests.small_model import save_small_model
from tests.tiers import deep_case

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return [block.code for block in pages.blocks("README.md", language)]


def commands(program: str) -> list[str]:
    return pages.commands("README.md", program)


SMALLER = [
    "train.output_dir=runs/quickstart",
    "train.max_steps=2",
    "train.use_cpu=true",
    "privacy.expected_batch_size=4",
    "privacy.delta=1e-3",
    "data.limit=300",
    "data.eval_fraction=0.2",
    "public_pretrain.data.limit=40",
    "public_pretrain.train.max_steps=1",
    "public_pretrain.train.use_cpu=true",
    "model.config.hidden_size=24",
    "model.config.num_hidden_layers=1",
    "model.tokenizer_vocab_size=300",
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the recipes in it, and in runs/quickstart a run launched as the README says, on less data."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    launch = next(line for line in commands("accelerate launch recipes") if "quickstart" in line)
    command = [str(Path(sys.executable).parent / "accelerate"), *shlex.split(launch)[1:], *SMALLER]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = children.run(command, cwd=folder, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "held-out perplexity after" in run.stdout and "ε = " in run.stdout
    return folder


def test_the_first_thing_is_a_sentence_and_two_commands():
    """A newcomer reads one screen."""
    head = README.split("```bash")[0]
    assert len(head.splitlines()) < 8
    assert [line.split("#")[0].strip() for line in blocks("bash")[0].splitlines()] == ["make quickstart", "make test"]


PROSE = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)\b", PROSE, flags=re.MULTILINE))))
def test_every_make_target_exists(target):
    """Also those of CONTRIBUTING.md."""
    run = children.run(["make", "-n", target], cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


# The first program is run by `tests/test_extras.py` too, in an interpreter of its own and without extras.
PROGRAMS = dict(zip(("trainer", "own loop", "accelerate", "researcher"), blocks("python"), strict=True))


@pytest.mark.parametrize(
    "code",
    [deep_case(code, id=name) if name == "trainer" else pytest.param(code, id=name) for name, code in PROGRAMS.items()],
)
def test_every_program_runs(code, tmp_path, monkeypatch, capsys):
    """As it stands, copied out of the README."""
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    "command",
    [
        deep_case(line) if "--sweep" in line or "--suggest" in line else line
        for line in commands("dpllm ")
        if not line.startswith("dpllm audit") and "--rehearse" not in line
    ],
)
def test_every_dpllm_command_runs(command, workplace, monkeypatch):
    """Plain and with --json."""
    monkeypatch.chdir(workplace)
    arguments = shlex.split(command)[1:]
    for more in ([], ["--json"]):
        if arguments[0] == "budget":  # a budget is made once, and shown when it has been made
            (create,) = (shlex.split(line)[1:] for line in commands("dpllm budget create"))
            Path(create[2]).unlink(missing_ok=True)
            if arguments != create:
                assert CliRunner().invoke(app, create).exit_code == 0
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0 and result.stdout.strip(), result.output


@pytest.mark.deep
def test_the_rehearsal_runs(workplace, monkeypatch):
    """On less data and fewer steps; the file that it writes is sections of a recipe."""
    monkeypatch.chdir(workplace)
    (line,) = (line for line in commands("dpllm plan") if "--rehearse" in line)
    fewer = [*SMALLER, "train.max_steps=4", "public_pretrain.data.limit=200"]
    result = CliRunner().invoke(app, [*shlex.split(line)[1:], *fewer])
    assert result.exit_code == 0 and "recommended" in result.stdout, result.output
    written = read_yaml((workplace / "runs/suggested/suggestion.yaml").read_text(encoding="utf-8"))
    assert written["train"]["learning_rate"] > 0 and written["privacy"]["clip_norm"] == 0.1


def test_the_budget_is_for_the_people_of_its_recipe():
    """A run on other units than the file's is refused, so the N that the README shows has to be the recipe's."""
    path = ROOT / "recipes" / "quickstart_users.yaml"
    recipe = load_recipe(path)
    records, _ = load_train_and_eval(recipe.data, recipe.privacy)
    (create,) = (shlex.split(line) for line in commands("dpllm budget create"))
    shown = int(create[create.index("--num-units") + 1])
    assert shown == unit_index_of(records, recipe.privacy).num_units
    for text in (path.read_text(encoding="utf-8"), (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")):
        assert f"{shown:,}".replace(",", " ") in text


FEWER = {
    "prepare": ["--canaries", "40", *SMALLER],
    "run": [],
    "attack": ["--records", "40", "--extract", "2", "--new-tokens", "24"],
    "gradient": ["--blocks", "40", "--tokens", "8", *SMALLER],
}


@pytest.mark.deep
def test_the_audit_runs_in_the_order_in_which_it_stands(workplace, monkeypatch):
    """From a recipe to data with canaries, a model trained on them, and its verdict; on less of everything."""
    monkeypatch.chdir(workplace)
    block = next(block for block in blocks("bash") if "dpllm audit prepare" in block)
    lines = [shlex.split(line.split("  #")[0]) for line in block.splitlines()]
    assert sorted(words[2] for words in lines if words[0] == "dpllm") == sorted(FEWER)
    for words in lines:
        if words[0] == "dpllm":
            result = CliRunner().invoke(app, [*words[1:], *FEWER[words[2]]])
            assert result.exit_code == 0 and result.stdout.strip(), result.output
        elif "finetune.py" in words[2]:
            accelerate = str(Path(sys.executable).parent / "accelerate")
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            run = children.run([accelerate, *words[1:]], env=environment, check=False)
            assert run.returncode == 0, run.stderr[-2000:]
    report = (workplace / "runs/audit/run/privacy_report.md").read_text(encoding="utf-8")
    assert "Empirical audit: consistent, not proof: 40 canaries" in report


@pytest.mark.parametrize("command", [line for line in commands("accelerate launch") if "runs/audit" not in line])
def test_every_launch_names_a_recipe_and_overrides_that_exist(command):
    """The recipes themselves are run by test_recipes.py."""
    words = shlex.split(command)
    recipe = words[words.index("--config") + 1]
    load_recipe(ROOT / recipe, [word for word in words[words.index("--config") + 2 :] if "=" in word])
    program = words[words.index("--config") - 1]
    assert (ROOT / program).exists()
    assert "--config_file" not in words or (ROOT / words[words.index("--config_file") + 1]).exists()


def test_every_file_it_names_exists():
    """Links, pictures and the reading list."""
    named = set(re.findall(r"\]\((?!http)([^)#]+)\)", README)) | set(
        re.findall(r"^dpllm/\S+", README, flags=re.MULTILINE)
    )
    assert len(named) >= 10
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize(
    "page",
    [page if page.endswith("own_mechanism.md") else deep_case(page, id=Path(page).stem) for page in pages.TUTORIALS],
)
def test_every_tutorial_runs(page, tmp_path):
    """In order, in a folder of its own, with the outputs that it shows; a small model has the name of one on the Hub."""
    save_small_model(tmp_path / "HuggingFaceTB" / "SmolLM2-135M", hidden_size=32)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "tests.pages", page]
    run = children.run(command, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-4000:]


def test_a_page_shows_what_was_printed():
    """Numbers may differ, words may not."""
    assert pages.missing_lines("ε = 7.99 …\ndone", "ε = 3.1 at δ = 1e-5\n  done\n") == []
    assert pages.missing_lines("12 of 13 steps\nended", "3 of 1 units\ndone") == ["12 of 13 steps", "ended"]


def test_every_tutorial_has_something_to_run():
    """And each of its outputs comes after it."""
    for page in pages.TUTORIALS:
        kinds = [block.language for block in pages.blocks(page) if block.title is None]
        assert {"python", "bash"} & set(kinds) and kinds[0] != "text"
