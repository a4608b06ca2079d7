"""The tables in docs/ speak of tests that exist."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from tests import children

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<found>.+?) \| (?P<now>.+?) \| (?P<state>[a-z ]+) \| (?P<tests>.+?) \|$", re.MULTILINE)
STATES = {"mended", "open point", "not mended", "no fault"}


def attacks() -> list[dict[str, str]]:
    """The rows of docs/attacks.md, without the heads of its tables."""
    text = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    assert len(ROW.findall(text)) == len(lines), "a line of a table has another number of cells"
    return [row.groupdict() for row in ROW.finditer(text) if row["state"] != "state"]


def functions_in(path: Path) -> set[str]:
    """Names as pytest has them: of functions, and of methods behind their class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return functions | {
        f"{kind.name}::{node.name}" for kind in classes for node in kind.body if isinstance(node, ast.FunctionDef)
    }


def named() -> list[str]:
    """Every test that the table names, without its parameters."""
    return sorted({name for row in attacks() for name in re.findall(r"`(tests/[\w/]+\.py::[\w:]+)", row["tests"])})


@pytest.mark.parametrize("file", sorted({name.split("::")[0] for name in named()}))
def test_every_test_of_the_table_of_attacks_exists(file):
    """A test that was renamed or deleted takes its row with it."""
    assert {name.split("::", 1)[1] for name in named() if name.startswith(f"{file}::")} <= functions_in(ROOT / file)


@pytest.mark.deep
def test_every_case_of_the_table_of_attacks_is_collected():
    """A case that was renamed or deleted takes its row with it, too."""
    cases = {name for row in attacks() for name in re.findall(r"`(tests/[\w/]+\.py::[^`]+\])`", row["tests"])}
    files = sorted({name.split("::")[0] for name in cases})
    command = [sys.executable, "-m", "pytest", "-n", "0", "-o", "addopts=", "-p", "no:cacheprovider", "--collect-only"]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # it changes what is printed
    collected = children.run([*command, "-q", *files], cwd=ROOT, env=env).stdout.splitlines()
    assert len(cases) > 50 and cases <= set(collected)


def test_every_attack_has_a_test_or_is_said_to_be_open():
    """A way to an untrue ε without a test comes back."""
    rows = attacks()
    assert {row["state"] for row in rows} <= STATES
    assert not [row["found"] for row in rows if row["state"] != "not mended" and "`tests/" not in row["tests"]]
    assert len({row["found"] for row in rows}) == len(rows)


def test_the_table_of_attacks_is_linked():
    """From where breaks of the guarantee are reported."""
    assert "(docs/attacks.md)" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
