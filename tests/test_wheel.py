"""What a user of the wheel has: the package, and the recipes, accelerate configs and launch scripts."""

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from tests import children
from tests.hub import HubServer
from tests.small_model import WORDS, save_small_model

ROOT = Path(__file__).parents[1]
FOLDERS = ("recipes", "accelerate_configs", "launch")
USE = """
import sys
sys.path.insert(0, sys.argv[1])
import dpllm
from dpllm.config import load_recipe
from dpllm.config.recipe_file import load_query_recipe, method_in
from dpllm.config.shipped import config_file, shipped_recipes, shipped_root
assert dpllm.__file__.startswith(sys.argv[1]) and str(shipped_root()).startswith(sys.argv[1])
for name in shipped_recipes():
    (load_recipe if method_in(name) is None else load_query_recipe)(name)
assert config_file("fsdp2").is_file() and (shipped_root() / "launch" / "common.sh").is_file()
assert (shipped_root() / "accelerate_configs" / "deepspeed" / "zero3.json").is_file()
assert "torch" not in sys.modules
"""
RECIPE = """
model: {name: base, adapter: {r: 2, target_modules: all-linear}}
data: {path: records.jsonl, max_length: 16}
privacy: {noise_multiplier: 1, clip_norm: 1, expected_batch_size: 20, delta: 1.0e-3, dataset: words}
train: {output_dir: run, max_steps: 2, per_device_train_batch_size: 32, use_cpu: true, learning_rate: 0.1,
  average: {kind: ema, decay: 0.5, keep_last: true}}
release: {data_holder: a, audience: b}
"""
DOWNLOADED = """
import sys
from huggingface_hub import snapshot_download
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = snapshot_download("me/model", local_dir="downloaded")
base = AutoModelForCausalLM.from_pretrained("base")
PeftModel.from_pretrained(base, folder)(**AutoTokenizer.from_pretrained(folder)("one two", return_tensors="pt"))
assert "dpllm" not in sys.modules
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


@pytest.mark.deep
def test_whoever_has_the_wheel_publishes_a_run_and_another_checks_the_download(wheel, tmp_path):
    """By real requests to a stand-in for the Hub: the copy loads without dpllm, verifies, and has no path of ours."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    save_small_model(tmp_path / "base", hidden_size=16)
    lines = [json.dumps({"text": " ".join(WORDS[(n + k) % len(WORDS)] for k in range(5)) + f" {n}"}) for n in range(99)]
    (tmp_path / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    with HubServer() as hub:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), **hub.environment}

        def dpllm(*words, **more):
            return children.run([sys.executable, "-m", "dpllm", *words], cwd=tmp_path, env=environment, **more)

        dpllm("train", "recipe.yaml")
        refused = dpllm("push", "run", "me/model", check=False)
        assert refused.returncode == 2 and "the same data used" in refused.stderr.replace("\n", " ")
        assert not hub.repos
        dpllm("report", "note", "run", "other_uses=none")
        dpllm("push", "run", "me/model")
        (model,) = hub.repos.values()
        assert model.large == {"adapter_model.safetensors"} and len(model.commits) == 1
        assert not any(str(tmp_path).encode() in content for content in model.files.values())
        children.run([sys.executable, "-c", DOWNLOADED], cwd=tmp_path, env=environment)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        dpllm("verify", "downloaded")
        weights = tmp_path / "downloaded" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        assert dpllm("verify", "downloaded", check=False).returncode == 1
