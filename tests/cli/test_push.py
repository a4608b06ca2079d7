"""`dpllm merge` and `dpllm push` on a finished run of a recipe with LoRA."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from peft import PeftModel
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dpllm.cli.program import app
from dpllm.config import ConfigError, load_recipe
from dpllm.models.start_weights import START_FILES, start_files
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.run_folder import is_finished
from dpllm.report.model_card import add_notes, adopt_run, write_model_card
from dpllm.report.publishing import GUARANTEE_FILES
from dpllm.report.verify import verify
from dpllm.training import finetune
from tests.mutations import kills
from tests.small_model import WORDS, save_small_model

RECIPE = """
model: {{name: {folder}/base, adapter: {{r: 2, target_modules: all-linear}}}}
data: {{path: {folder}/records.jsonl, max_length: 16}}
privacy: {{noise_multiplier: 1, clip_norm: 1, expected_batch_size: 20, delta: 1.0e-3, dataset: words}}
train: {{output_dir: {folder}/run, max_steps: 2, per_device_train_batch_size: 32, use_cpu: true, disable_tqdm: true,
  dataloader_pin_memory: false, learning_rate: 0.1, save_strategy: steps, save_steps: 2, logging_strategy: "no",
  average: {{kind: ema, decay: 0.5, keep_last: true}}}}
release: {{data_holder: a, audience: b, other_uses: none}}
"""
PARTS = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("releasing")
    save_small_model(folder / "base", hidden_size=16)
    lines = [json.dumps({"text": " ".join(WORDS[(n + k) % len(WORDS)] for k in range(5)) + f" {n}"}) for n in range(99)]
    (folder / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder), encoding="utf-8")
    assert finetune.run(load_recipe(folder / "recipe.yaml")) == 0
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def hub(monkeypatch):
    """What a Hub would receive."""
    received = SimpleNamespace(created=[], files=None)

    def create(client, repo_id, *, private, exist_ok, repo_type):
        assert repo_type == "model"
        received.created.append((repo_id, private))
        return SimpleNamespace(repo_id=repo_id)

    def upload(client, *, repo_id, folder_path, **more):
        folder = Path(folder_path)
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        received.files, received.more = set(files), more
        received.contents = {name: path.read_bytes() for name, path in files.items()}
        return f"https://hub/{repo_id}/commit/1"

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    return received


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def complaints(folder):
    return [check for check in verify(folder).checks if not check.ok]


@pytest.mark.parametrize("place", [None, "elsewhere"])
def test_a_merged_model_computes_the_same_and_has_its_own_guarantee(run, tmp_path, place):
    """It is an ordinary model; run and model both verify, also when the model is elsewhere."""
    folder = run / "merged" if place is None else tmp_path / place
    result = call("merge", run, *([] if place is None else [folder]))
    assert result.exit_code == 0 and f"dpllm verify {folder}" in result.stdout, result.output
    whole = AutoModelForCausalLM.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(load_recipe(run / "recipe.yaml").model.name)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        alone, want = base(ids).logits.clone(), PeftModel.from_pretrained(base, run)(ids).logits
        torch.testing.assert_close(whole(ids).logits, want, rtol=1e-4, atol=1e-5)
        assert float((want - alone).abs().max()) > 1e-3
    assert complaints(run) == [] and complaints(folder) == []
    reports = [json.loads((one / "privacy_report.json").read_text()) for one in (run, folder)]
    assert reports[0]["statement"] == reports[1]["statement"]
    assert {path.name for path in run.iterdir()} >= PARTS and not (folder / "adapter_config.json").exists()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert complaints(folder)
    again = call("merge", run, folder)
    assert again.exit_code == 2 and "already exists" in again.stderr


@kills(
    "weights that the ledger does not name are merged under its guarantee",
    "dpllm/training/merge_run.py",
    "    failed = [check for check in verify(run).checks if not check.ok]\n",
    "    failed: list[Any] = []\n",
)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda run: (run / "adapter_config.json").unlink(), "holds no adapter_config.json"),
        (lambda run: (run / "recipe.yaml").unlink(), "holds no recipe.yaml"),
        (lambda run: (run / "privacy_ledger.jsonl").unlink(), "not the folder of a private run"),
        (lambda run: (run / "adapter_model.safetensors").write_bytes(b"other"), "does not pass `dpllm verify`"),
    ],
)
def test_a_folder_that_is_not_that_of_a_run_with_an_adapter_is_refused(run, change, error):
    """Weights that the ledger does not name get no guarantee; nothing is written."""
    change(run)
    before = sorted(path.name for path in run.iterdir())
    result = call("merge", run)
    assert result.exit_code == 2 and error in result.stderr
    assert sorted(path.name for path in run.iterdir()) == before


@kills(
    "an adapter is merged with any weights",
    "dpllm/training/merge_run.py",
    "        _refuse_another_base(run, recipe.model)\n",
    "",
)
def test_an_adapter_is_not_added_to_other_weights(run, tmp_path, monkeypatch):
    """The merged model would have the guarantee of a run that did not make it; a relative name is no other one."""
    recipe = run / "recipe.yaml"
    own = recipe.read_text(encoding="utf-8")
    base = load_recipe(recipe).model.name
    shutil.copytree(base, tmp_path / "plain")
    recipe.write_text(own.replace(base, str(tmp_path / "plain")), encoding="utf-8")
    assert "was trained on" in call("merge", run).output
    recipe.write_text(own, encoding="utf-8")
    card = Path(base) / "README.md"
    card.write_text("---\ndifferential_privacy:\n  private: true\n---\n", encoding="utf-8")
    try:
        assert "a private run according to its README.md" in call("merge", run).output
    finally:
        card.unlink()
    assert not (run / "merged").exists()
    monkeypatch.chdir(Path(base).parent)
    recipe.write_text(own.replace(base, Path(base).name), encoding="utf-8")
    assert call("merge", run).exit_code == 0


@kills(
    "starting weights that were replaced are not noticed by a merge",
    "dpllm/training/merge_run.py",
    "    refuse_other_start(run / LEDGER_FILE, str(model.name))\n",
    "",
)
@kills(
    "starting weights that were replaced are not noticed by a sampling from the adapter",
    "dpllm/models/start_weights.py",
    "        refuse_other_start(ledger, str(base))\n",
    "        pass\n",
)
def test_starting_weights_that_were_replaced_are_noticed(run):
    """Only the ledger can tell: the folder has the same name, and no card or ledger of its own."""
    base = load_recipe(run / "recipe.yaml").model.name
    assert read_ledger(run / "privacy_ledger.jsonl").notes.facts[START_FILES] == [start_files(base)]
    assert "files of the starting weights" in (run / "privacy_report.md").read_text(encoding="utf-8")
    weights = Path(base) / "model.safetensors"
    own = weights.read_bytes()
    weights.write_bytes(own[:-1] + bytes([own[-1] ^ 1]))
    try:
        refused = call("merge", run)
        assert refused.exit_code == 2 and "have changed since the run in" in refused.stderr
        assert not (run / "merged").exists()
        refused = call("generate", run, "--max-new-tokens", "1")
        assert refused.exit_code == 2 and "have changed since the run in" in refused.stderr
        assert "NO GUARANTEE" in call("generate", run, "--max-new-tokens", "1", "--unverified").stderr
        more = ["train.resume_from_checkpoint=true", f"train.output_dir={run}"]
        with pytest.raises(ConfigError, match="changed since"):
            finetune.run(load_recipe(run / "recipe.yaml", more))
    finally:
        weights.write_bytes(own)
    assert call("merge", run).exit_code == 0


def test_a_dry_run_lists_what_would_leave_and_what_stays(run, hub):
    """And uploads nothing."""
    (run / "notes.txt").write_text("private", encoding="utf-8")
    values = json.loads(call("push", run, "me/model", "--dry-run", "--json").stdout)
    assert PARTS | set(GUARANTEE_FILES) <= set(values["uploaded"])
    assert {"notes.txt", "recipe.yaml"} <= set(values["stay"]) and not set(values["uploaded"]) & set(values["stay"])
    assert any(name.startswith("checkpoint-2/") for name in values["stay"])
    shown = call("push", run, "me/model", "--dry-run").stdout
    assert "would be uploaded:\n  README.md" in shown and "Nothing was uploaded" in shown
    assert "\n  notes.txt\n" in shown and "\n  checkpoint-2/ (" in shown
    assert hub.created == [] and hub.files is None


def test_a_push_uploads_the_listed_files_and_no_other(run, hub):
    """To a repository with the visibility that was asked for; a merged model is pushed from its own folder."""
    uploaded = json.loads(call("push", run, "me/model", "--dry-run", "--json").stdout)["uploaded"]
    result = call("push", run, "me/model", "--private")
    assert result.exit_code == 0 and "Published: https://hub/me/model/commit/1" in result.stdout
    assert hub.created == [("me/model", True)] and hub.files == set(uploaded)
    assert call("merge", run).exit_code == 0
    assert call("push", run / "merged", "me/merged").exit_code == 0
    assert "model.safetensors" in hub.files and not hub.files & PARTS


def received_in(folder, hub) -> Path:
    """The folder of someone who downloads what a Hub received."""
    for name, content in hub.contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def lines_of(run):
    return (run / "privacy_ledger.jsonl").read_text().count("\n")


@pytest.mark.parametrize("noted", [None, "someone/base"])
def test_an_uploaded_adapter_has_no_path_of_this_machine(run, hub, tmp_path, noted):
    """It names its base by the id that people noted or by the folder's name; the run itself goes on to load from it."""
    own = (run / "adapter_config.json").read_bytes()
    base = load_recipe(run / "recipe.yaml").model.name
    if noted is not None:
        write_model_card(run, add_notes(run, {"base_model": noted}), base_model=base, task="causal_lm", adapter=True)
    result = call("push", run, "me/model")
    assert result.exit_code == 0, result.output
    want = noted or Path(base).name
    assert f"adapter_config.json names the base model {want} there" in result.stdout
    for name, content in hub.contents.items():
        assert str(tmp_path).encode() not in content and str(Path(base).parent).encode() not in content, name
    copy = received_in(tmp_path / "copy", hub)
    assert json.loads((copy / "adapter_config.json").read_text())["base_model_name_or_path"] == want
    assert complaints(copy) == [] and complaints(run) == []
    assert (run / "last_step").is_dir() and not (copy / "last_step").exists()
    assert (run / "adapter_config.json").read_bytes() == own and is_finished(run)
    lines = lines_of(run)
    assert call("push", run, "me/model").exit_code == 0 and lines_of(run) == lines
    assert call("merge", run).exit_code == 0
    weights = copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert complaints(copy)


@kills(
    "the command publishes without looking at the report",
    "dpllm/report/publishing.py",
    "    require_publishable(folder, force_open_points=force_open_points)\n    names = published_files(",
    "    names = published_files(",
)
def test_open_points_and_changed_files_are_refused_before_anything_is_created(run, hub):
    """Open points can be forced, and nothing else."""
    report = json.loads((run / "privacy_report.json").read_text())
    assert report["open_points"] == []
    adopt_run(run)  # an open point: steps of another copy would not be charged here
    for more in ([], ["--dry-run"]):
        refused = call("push", run, "me/model", *more)
        assert refused.exit_code == 2 and "adopted by hand" in refused.stderr
        lines = refused.stderr.splitlines()
        assert lines[0] == "open points:" and lines[1].startswith("  1. ") and "dpllm report . " not in refused.stderr
        assert lines[-1].startswith("error: ") and "--force-open-points" in lines[-1]
    assert hub.created == []
    assert call("push", run, "me/model", "--force-open-points").exit_code == 0
    (run / "adapter_model.safetensors").write_bytes(b"other")
    hub.files = None
    assert call("push", run, "me/model", "--force-open-points").exit_code == 2 and hub.files is None


def test_a_folder_that_is_no_run_is_named(tmp_path, hub):
    """By the file that it lacks."""
    for words in (["push", tmp_path, "me/model"], ["merge", tmp_path]):
        result = call(*words)
        assert result.exit_code == 2 and "holds no privacy_ledger.jsonl" in result.stderr
