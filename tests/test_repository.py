"""The files around the package: required packages, locks, workflows, hooks, images, and what they name."""

import ast
import json
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dpllm.config.extras import EXTRAS
from tests import children

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LISTED = {canonicalize_name(one.name): one.specifier for one in map(Requirement, PROJECT["dependencies"])}
LOCKS = ("requirements.lock", "requirements-dev.lock")
PINNED = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ;[^\\\n]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def imported_modules():
    """Return the top-level names of all modules outside the standard library that dpllm imports anywhere."""
    names = set()
    for path in (ROOT / "dpllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names - {"dpllm"}


def test_every_imported_package_is_listed_or_required_by_a_listed_one():
    """Extras are asked for by name (tests/test_extras.py); without Triton, PyTorch computes what its kernels do."""
    assert len(LISTED) <= 12
    needs = [Requirement(line) for name in LISTED for line in requires(name) or ()]
    brought = {canonicalize_name(need.name) for need in needs if not need.marker or need.marker.evaluate({"extra": ""})}
    optional = {module for modules in EXTRAS.values() for module in modules} | {"triton"}
    modules = packages_distributions()
    for module in imported_modules() - optional:
        owners = {canonicalize_name(name) for name in modules[module]}
        assert owners & (LISTED.keys() | brought), f"nothing in pyproject.toml brings {module}"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_every_required_package_with_hashes_and_no_address(name):
    """The versions are within the bounds of pyproject.toml. torch is in constraints.txt instead."""
    text = read(name)
    pins = {package: version for package, version, _ in PINNED.findall(text)}
    assert len(pins) == sum(line[0].isalnum() for line in text.splitlines())
    assert not re.search(r"://|@|\.(?:com|io|net|org)\b|index|find-links", text)
    assert "torch" not in pins
    pins |= re.findall(r"^(torch)==(\S+)$", read("constraints.txt"), flags=re.MULTILINE)
    for package, specifier in LISTED.items():
        assert specifier.contains(pins[package])


def test_developers_have_the_versions_of_the_quickstart():
    """And every tool of the extra dev."""
    quick, dev = ({package: version for package, version, _ in PINNED.findall(read(name))} for name in LOCKS)
    windows = {"colorama"}
    assert {name: dev.get(name) for name in quick.keys() - windows} == {
        n: v for n, v in quick.items() if n not in windows
    }
    tools = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["dev"]}
    assert tools - {"dpllm"} <= dev.keys()


def steps(workflow):
    return [
        step for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values() for step in job["steps"]
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pins_its_actions_and_may_only_read_unless_a_job_says_more(path):
    """A tag can be moved; a commit cannot."""
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) and re.fullmatch(r"  # v[\d.]+", tag) for name, tag in used)
    assert len(used) == sum("uses" in step for step in steps(path))
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def shell_commands():
    """Return the commands of workflows, hooks and images, and the page for programs that work here."""
    found = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    found += [hook["entry"] for hook in hooks]
    container = json.loads(read(".devcontainer/devcontainer.json"))
    found += [command for key, command in container.items() if key.endswith("Command")]
    found += re.findall(r"^(?:RUN|COPY) (?!--from)((?:.*\\\n)*.*)", read("Dockerfile"), flags=re.MULTILINE)
    return "\n".join([*found, read("AGENTS.md")])


def test_every_named_file_and_target_exists():
    """In workflows, hooks, images and AGENTS.md."""
    text = shell_commands()
    assert {"requirements.lock", "constraints.txt"} <= set(re.findall(r"[\w./-]+", text))
    paths = set(re.findall(r"\b[\w-][\w./-]*\.(?:txt|lock|toml|md|py|sh)\b", text))
    paths |= set(re.findall(r"`((?:dpllm|tests|docs)/[\w./]+)`", text))
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for target in set(re.findall(r"(?:^|`|&& )make ([a-z-]+)", text, flags=re.MULTILINE)):
        children.run(["make", "-n", "VENV=not-there", target], cwd=ROOT)
    tools = set(re.findall(r"\.venv/bin/([\w-]+)", text)) - {"pip", "dpllm"}
    assert [tool for tool in tools if not (Path(sys.executable).parent / tool).exists()] == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_is_complete(path):
    """GitHub shows no form that lacks a key; the form for bugs sends a wrong ε elsewhere."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    assert all(field["type"] == "markdown" or field["attributes"]["label"] for field in form["body"])
    assert path.stem != "bug" or "Report a vulnerability" in form["body"][0]["attributes"]["value"]
