"""What each extra of pyproject.toml brings, what the rest does without it, and the one line that says how to get it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from dpllm.config import ConfigError
from dpllm.config.extras import EXTRAS, PACKAGES, require
from dpllm.training.arguments import training_arguments
from tests import children
from tests.pages import blocks
from tests.test_imports import EVERY_MODULE

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITHOUT_EXTRAS = f"""
import importlib, pkgutil, sys
for name in {sorted({module for modules in EXTRAS.values() for module in modules})}:
    sys.modules[name] = None
import dpllm
"""


def packages(requirements):
    """Return the names of packages, those of named extras included."""
    found = set()
    for requirement in requirements:
        own = re.fullmatch(r"dpllm\[(.*)\]", requirement)
        if own:
            found |= {name for extra in own[1].split(",") for name in packages(PROJECT["optional-dependencies"][extra])}
        else:
            found.add(re.match(r"[\w-]+", requirement)[0])
    return found


def test_the_table_of_extras_is_that_of_the_project():
    """Every extra but the developers' is known by the modules that it installs, and the core has none of them."""
    all_extras = PROJECT["optional-dependencies"].items()
    extras = {name: packages(wanted) for name, wanted in all_extras if name not in ("dev", "docs")}
    assert extras == {
        name: {PACKAGES.get(module, module.replace("_", "-")) for module in modules} for name, modules in EXTRAS.items()
    }
    assert not set.union(*extras.values()) & packages(PROJECT["dependencies"])


def test_the_page_of_installation_names_every_extra_and_no_other():
    """Each is installed by its name."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"dpllm\[(\w+)\]", text)) == set(EXTRAS) | {"docs", "dev"}


def test_the_quickstart_has_no_tools_of_developers():
    """The developers' set-up has them, with everything that the quickstart and the other extras have."""
    wanted = PROJECT["optional-dependencies"]
    tools = packages(wanted["dev"])
    assert {"mypy", "pytest", "ruff", "triton", "deepspeed", "mkdocs-material"} <= tools
    assert not tools & packages([*PROJECT["dependencies"], *wanted["quickstart"]])
    place = ["make", "-n", "VENV=not-there"]
    quickstart = children.run([*place, "quickstart"], cwd=ROOT).stdout
    assert "requirements.lock" in quickstart and "dev" not in quickstart.replace("/dev/null", "")
    assert "requirements-dev.lock" in children.run([*place, "setup"], cwd=ROOT).stdout


def test_the_core_imports_and_trains_without_extras(tmp_path):
    """The first program of the tutorial, from its data to the report of the run."""
    program = blocks("docs/tutorials/trainer.md", "python")[0].code
    code = f"{WITHOUT_EXTRAS}{EVERY_MODULE}\n__name__ = 'readme'\n{program}"
    assert "DPTrainer" in code
    run = children.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr[-2000:]
    assert list(tmp_path.rglob("privacy_report.json"))


@pytest.mark.parametrize("launched", [False, True])
def test_deepspeed_is_asked_for_by_name(launched, tmp_path, monkeypatch):
    """By the recipe, or by the accelerate configuration."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(launched).lower())
    section = {"output_dir": str(tmp_path), "deepspeed": None if launched else "ds.json"}
    with pytest.raises(ConfigError, match=r"dpllm\[deepspeed\]"):
        training_arguments(section)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_that_is_installed_is_no_error(extra):
    """All of them are, where the tests run, but for those of `dpllm methods evaluate` and of workbooks."""
    if extra in ("synthetic", "excel"):
        pytest.importorskip(EXTRAS[extra][-1], reason=f"the extra {extra!r} is not installed")
    require(extra, "a test")
