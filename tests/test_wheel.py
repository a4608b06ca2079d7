"""What a user of the wheel has: the package, and the recipes, accelerate configs and launch scripts."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from tests import children

ROOT = Path(__file__).parents[1]
FOLDERS = ("recipes", "accelerate_configs", "launch")
USE = """
import sys
sys.path.insert(0, sys.argv[1])
import dpllm
from dpllm.config import load_recipe
from dpllm.config.shipped import config_file, shipped_recipes, shipped_root
assert dpllm.__file__.startswith(sys.argv[1]) and str(shipped_root()).startswith(sys.argv[1])
for name in shipped_recipes():
    load_recipe(name)
assert config_file("fsdp2").is_file() and (shipped_root() / "launch" / "common.sh").is_file()
assert (shipped_root() / "accelerate_configs" / "deepspeed" / "zero3.json").is_file()
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the files that git knows; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = children.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if name.startswith(("dpllm/", *(f"{one}/" for one in FOLDERS))) or "/" not in name:
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
            target.chmod((ROOT / name).stat().st_mode)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    children.run([*pip, "--wheel-dir", str(folder), str(folder / "source")], cwd=folder)
    (made,) = folder.glob("dpllm-*.whl")
    return made


def test_the_wheel_holds_every_shipped_file_as_it_is(wheel):
    """Byte by byte, nothing beside them, and listed in its record, so that pip removes them."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    for folder in FOLDERS:
        here = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        here = {path for path in here if "__pycache__" not in path.parts}
        there = {name for name in names if name.startswith(f"dpllm/shipped/{folder}/")}
        assert there == {f"dpllm/shipped/{path.as_posix()}" for path in here} and here
        for path in here:
            assert archive.read(f"dpllm/shipped/{path.as_posix()}") == (ROOT / path).read_bytes()
    (record,) = (name for name in names if name.endswith(".dist-info/RECORD"))
    assert "dpllm/shipped/recipes/quickstart.yaml,sha256=" in archive.read(record).decode()
    assert not any(name.startswith(("tests", "benchmarks", "recipes", "launch")) for name in names)
    assert {"dpllm/py.typed", "dpllm/training/finetune.py"} <= names


def test_whoever_installed_the_wheel_has_its_recipes_by_name(wheel, tmp_path):
    """In another folder than the repository, and before torch is loaded."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    children.run([sys.executable, "-c", USE, str(tmp_path / "site")], cwd=tmp_path, env=environment)
