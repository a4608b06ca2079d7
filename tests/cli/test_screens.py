"""Help screens fit a terminal and their examples run; output fits 80 columns, also in a pipe."""

from __future__ import annotations

import re
import shlex
import sys
import webbrowser
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dpllm.cli.common import OWN, show_table
from dpllm.cli.program import GROUPS, app
from tests import children
from tests.cli.test_cli import EPSILON, SWEEP, recipe_of_records
from tests.privacy.test_compose import make_run
from tests.report.test_standing import folder_of

PROGRAM: Any = get_command(app)
LINES, COLUMNS = 24, 80


def commands(group: Any = PROGRAM, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, with the words that call it."""
    yield path, group
    for name, one in getattr(group, "commands", {}).items():
        yield from commands(one, path if name == OWN else (*path, name))


ALL = [(path, one) for path, one in commands() if path or one is PROGRAM]
SINGLE = [(path, one) for path, one in ALL if not hasattr(one, "commands")]


def printed(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_first_screen_has_every_command_by_topic() -> None:
    """On one screen of a terminal."""
    shown = printed("--help").splitlines()
    assert shown[0].startswith("dpllm ") and shown[0].endswith(" · private fine-tuning of language models")
    assert len(shown) <= LINES and max(map(len, shown)) <= COLUMNS
    assert [line.split()[0] for line in shown if line and line[0] != " "][1:-1] == list(GROUPS)
    assert Counter(name for group in GROUPS.values() for name in group) == Counter(list(PROGRAM.commands))
    assert all(
        f", {name}" in " ".join("\n".join(shown).split()) for name in [*PROGRAM.commands["methods"].commands][1:]
    )


def test_the_page_of_the_commands_has_each_once() -> None:
    """And no other, in 400 words at most."""
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    tables = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    first = "\n".join(re.findall(r"^\|.*?\|", tables, flags=re.MULTILINE))
    found = re.findall(r"`dpllm ([a-z ]+?)(?: [A-Z=]+)*`", first)
    assert Counter(found) == Counter(" ".join(path) for path, _ in SINGLE)
    assert len(page.split()) <= 400


@pytest.mark.parametrize("path", [" ".join(path) for path, _ in ALL])
def test_every_help_screen_fits_a_terminal(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 lines with 80 columns, also where the terminal is wider; each names the example of its command."""
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        shown = printed(*path.split(), "--help").splitlines()
        assert len(shown) <= LINES and shown[0].startswith("dpllm"), len(shown)
        assert columns == "200" or max(map(len, shown)) <= COLUMNS


@pytest.mark.parametrize(("path", "one"), SINGLE, ids=[" ".join(path) for path, _ in SINGLE])
def test_every_command_has_an_example_that_its_options_allow(path: tuple[str, ...], one: Any) -> None:
    """One, or two where it has two uses."""
    examples = one.epilog.splitlines()
    assert 1 <= len(examples) <= 2
    for line in examples:
        words = shlex.split(line)
        assert words[: 1 + len(path)] == ["dpllm", *path]
        made = one.make_context("", words[1 + len(path) :])
        given = [value for name, value in made.params.items() if value not in (None, False)]
        assert given and not made.args


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the runs and the budget of the examples."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs").mkdir(exist_ok=True)
        make_run(tmp_path / "runs" / name, dataset="notes")
    folder = tmp_path / "runs" / "quickstart"
    folder.mkdir()
    folder_of(folder)
    monkeypatch.setattr(webbrowser, "open", lambda place: place)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["recipes", "epsilon", "verify", "report", "report note", "budget create", "budget show"]
)
def test_examples_without_a_model_run(name: str, workplace: Path) -> None:
    """The others need a model or minutes: see the tests of their commands."""
    found = {" ".join(path): one for path, one in SINGLE}
    for line in found[name].epilog.splitlines():
        if name == "budget show":
            printed(*shlex.split(found["budget create"].epilog)[1:])
        assert printed(*shlex.split(line)[1:]).strip()


def outputs(folder: Path) -> dict[str, list[str]]:
    """Commands that print tables: name -> words."""
    recipe = recipe_of_records(folder, 205).name
    sizes = "model.config={model_type: gpt2, vocab_size: 100, n_embd: 32, n_head: 2, n_layer: 2}"
    banded = ["privacy.max_batch_size=60", "privacy.noise={kind: banded, bands: 4}", "train.average=ema"]
    return {
        "epsilon": EPSILON,
        "compare": [*EPSILON, "--compare"],
        "runs": ["epsilon", "runs/first", "runs/second"],
        "plan": ["plan", recipe, *banded, "train.warmup_steps=0", "train.learning_rate=1e-3"],
        "sweep": [*SWEEP, "--tokens-per-unit", "64", "--tokens-per-second", "1e5"],
        "memory": ["plan", "memory", recipe, sizes, "--gpus", "16"],
        "one engine": ["plan", "memory", recipe, sizes, "--gpus", "4", "--engine", "fsdp2"],
        "verify": ["verify", "runs/quickstart"],
        "recipes": ["recipes"],
        "methods": ["plan", "label_counts"],
    }


@pytest.mark.parametrize(
    "name", ["epsilon", "compare", "runs", "plan", "sweep", "memory", "one engine", "verify", "recipes", "methods"]
)
def test_tables_fit_80_columns_and_break_no_number(name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the width, the words are the same."""
    words = outputs(workplace)[name]
    monkeypatch.setenv("COLUMNS", "80")
    narrow = printed(*words)
    monkeypatch.setenv("COLUMNS", "120")
    wide = printed(*words)
    assert max(map(len, narrow.splitlines())) <= COLUMNS
    assert Counter(narrow.split()) == Counter(wide.split())


def test_a_table_that_is_too_wide_narrows_its_words_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers keep their line; columns of words give room."""
    rows = [("a name of several words that is long", "1,234,567.891", "a note of many words, " * 5)]
    show_table(("name", "number", "note"), rows, "", left=(0, 2))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= COLUMNS and "1,234,567.891" in shown


def test_in_a_pipe_there_are_80_columns_and_no_colours(tmp_path: Path) -> None:
    """Where nothing states a width."""
    folder_of(tmp_path)
    for words in (["verify", str(tmp_path)], ["epsilon", "--help"]):
        run = children.run(["env", "-u", "COLUMNS", sys.executable, "-m", "dpllm", *words])
        assert max(map(len, run.stdout.splitlines())) <= COLUMNS + len(str(tmp_path))
        assert not re.search("\x1b", run.stdout)
