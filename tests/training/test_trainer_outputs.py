"""All outputs of a run through the Trainer: logged figures, the card, uploads; with a replacement for the Hub."""

import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from transformers import DefaultFlowCallback, LlamaForCausalLM, TrainerCallback

from dpllm import DPTrainer
from dpllm.config import ConfigError
from dpllm.data.records import DataError
from dpllm.privacy.checkpoints import CheckpointError
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.rounding import format_epsilon
from dpllm.report.disclosures import (
    EVALUATION_DURING,
    EVALUATION_OUTSIDE,
    FINAL_LOSS,
    LOG_FILE,
    PREDICTION,
    TRAINING_LOSS,
    own_methods,
)
from dpllm.report.model_card import metadata_in, settle
from dpllm.report.publishing import PublishError, files_to_publish, require_publishable
from dpllm.report.statement import ReleaseNotes
from dpllm.report.verify import verify
from dpllm.training.checks.watch import WatchError
from dpllm.training.trainer_outputs import LOST_NOTES
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.training.test_trainer import At, arguments, privacy, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

GUARANTEE = {
    *("README.md", "privacy_report.md", "privacy_report.html", "privacy_report.json"),
    *("privacy_plan.json", "privacy_ledger.jsonl", "check_epsilon.py"),
}
PRIVATE = {
    "audit_attacks.json": "{}",
    "attacks.json": "{}",
    "trainer_state.json": '{"global_step": 4, "log_history": [{"loss": 4.1}]}',
    "runs/events.out.tfevents.1": "losses",
    "checkpoint-2/trainer_state.json": "{}",
    "train.log": "loss 3.4",
    "records.jsonl": "the data",
}
STRAY_WEIGHTS = {
    "adapter_model.safetensors": "another model's",
    "model-00007-of-00009.safetensors": "a shard that no index names",
    "optimizer.pt": "state",
}


@kills(
    "methods of a Trainer of one's own are no open point",
    "dpllm/training/trainer_outputs.py",
    "for name in own_methods(self):",
    "for name in ():",
)
@kills(
    "a method that chooses public rows is no open point",
    "dpllm/report/disclosures.py",
    '({"get_eval_dataloader"} if getattr(trainer, "eval_is_public", False) else set())',
    "set()",
)
@pytest.mark.parametrize("public", [False, True])
def test_methods_of_ones_own_that_run_within_training_are_an_open_point(tmp_path, public):
    """They read losses, as callbacks do; of public rows, the schedule follows those that a method chooses."""

    class Own(DPTrainer):
        def create_optimizer(self, *args):  # before the first step
            return super().create_optimizer(*args)

        def get_eval_dataloader(self, *args):
            return super().get_eval_dataloader(*args)

        def training_step(self, *args):
            loss = super().training_step(*args)
            self.is_small = float(loss) < 4
            return loss

    model, config = LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1)), privacy()
    run = Own(model, arguments(tmp_path / "own", max_steps=1), config, rows(), eval_is_public=public)
    run.log = lambda *args: None
    run.train()
    points = [point for point in run.privacy_report()["open_points"] if point.startswith("The method ")]
    found = [point.split()[2].rpartition(".")[2] for point in points]
    assert found == [*(["get_eval_dataloader"] if public else []), "log", "training_step"]
    plain = trainer(tmp_path / "plain", model, start_is_independent=True, args=arguments(tmp_path / "plain"))
    assert own_methods(plain) == []


class OnTrainingRows(TrainerCallback):
    """Evaluates on the training rows, too, after each evaluation."""

    trainer = None

    def on_evaluate(self, *args, **kwargs):
        run, self.trainer = self.trainer, None
        if run is not None:
            run.evaluate(run.train_dataset, metric_key_prefix="train")


def test_an_evaluation_on_private_rows_within_one_on_public_rows_is_counted(tmp_path):
    """Of the rows that were declared public, no evaluation is."""
    public = {"a": [{"input_ids": [7, 8], "labels": [7, 8]}], "b": [{"input_ids": [5, 6], "labels": [5, 6]}]}
    added = OnTrainingRows()
    args = arguments(tmp_path, max_steps=1)
    run = trainer(tmp_path, args=args, eval_dataset=public, eval_is_public=True, callbacks=[added])
    added.trainer = run
    run.evaluate()
    run.evaluate(public["b"])
    run.train()
    assert read_ledger(run.ledger.path).disclosures[EVALUATION_OUTSIDE] == 1


@kills(
    "evaluation rows that took the place of public ones pass for public",
    "dpllm/training/trainer_outputs.py",
    "        self._refuse_private_evaluation(dataset)\n        return True",
    "        return True",
)
def test_rows_that_take_the_place_of_public_ones_are_compared_as_those(tmp_path):
    """The declaration is of rows, not of an attribute: the training rows there would steer an early stop, uncounted."""
    public, other = ([{"input_ids": ids, "labels": ids}] for ids in ([7, 8], [9, 8]))
    run = trainer(tmp_path, args=arguments(tmp_path, max_steps=1), eval_dataset=public, eval_is_public=True)
    run.train()
    for held_out in (other, {"a": other, "b": public}):
        run.eval_dataset = held_out
        run.evaluate()
    run.predict(other)
    assert EVALUATION_OUTSIDE not in read_ledger(run.ledger.path).disclosures
    other[:] = list(run.train_dataset)[:1]  # in place, and no more rows than before
    for held_out in (other, run.train_dataset, {"a": run.train_dataset, "b": public}):
        run.eval_dataset = held_out
        with pytest.raises(DataError, match="rows of train_dataset, which is private"):
            run.evaluate()
    with pytest.raises(DataError, match="rows of train_dataset, which is private"):
        run.predict(run.train_dataset)


class Replaces(TrainerCallback):
    """Puts another model in the place of the trained one, and saves it."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.trainer.model = LlamaForCausalLM(tiny_llama_config())
            if self.folder is not None:
                self.trainer.save_model(str(self.folder))
            control.should_save = True


@kills(
    "a model that the run does not train is saved with its guarantee",
    "dpllm/training/run.py",
    "if self._attached is not None and model_inside(model) is not self._attached.model:",
    "if False:",
    case="checkpoint",
)
@pytest.mark.parametrize("where", ["checkpoint", "folder"])
def test_a_model_that_replaced_the_trained_one_is_not_saved(where, tmp_path):
    """The run goes on with the first one, and says nothing of the other."""
    added = Replaces(None if where == "checkpoint" else tmp_path / "other")
    run = trainer(tmp_path / "run", callbacks=[added])
    added.trainer = run
    with pytest.raises((WatchError, CheckpointError), match="not the one that the run trains"):
        run.train()
    assert not list(tmp_path.glob("*/checkpoint-*")) and not (tmp_path / "other" / "privacy_ledger.jsonl").exists()


def test_a_save_in_another_folder_leaves_the_own_one_whole(tmp_path):
    """Its report is of the ledger, which names the other folder; and its model is not the other folder's."""
    run = trainer(tmp_path / "run")
    run.train()
    for own in (False, True):
        if own:
            run.save_model()
        run.save_model(str(tmp_path / "other"))
        for folder in (tmp_path / "run", tmp_path / "other"):
            assert verify(folder).ok, [one for one in verify(folder).checks if one.ok is False]


def test_a_report_follows_a_failed_run_and_a_card_of_its_middle(tmp_path):
    """What is evaluated after the failure is counted, and not as a part of the training."""

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                run.save_model()
            if state.global_step == 2:
                raise RuntimeError("stopped")

    run = trainer(tmp_path, eval_dataset=rows(4), callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="stopped"):
        run.train()
    assert verify(tmp_path).ok
    run.evaluate()
    contents = read_ledger(run.ledger.path)
    assert contents.disclosures[EVALUATION_OUTSIDE] == 1 and EVALUATION_DURING not in contents.disclosures
    assert verify(tmp_path).ok


def test_merged_weights_that_are_saved_again_are_those_of_the_ledger(tmp_path):
    """The copies of plan and ledger beside them are no part of the model."""
    model = get_peft_model(LlamaForCausalLM(tiny_llama_config()), LoraConfig(r=2, target_modules=["q_proj"]))
    run = trainer(tmp_path, model, merge_adapter=True)
    run.train()
    for _ in range(2):
        run.save_model()
        with torch.no_grad():
            next(p for p in run.model.parameters() if p.requires_grad).add_(0.1)
    assert verify(tmp_path / "merged").ok


def test_figures_go_to_the_folder_of_their_run(tmp_path):
    """It may be another one than the constructor was given, and than that of an earlier run."""
    run = trainer(tmp_path / "unused", start_is_independent=True)
    for name in ("a", "b"):
        run.args.output_dir = str(tmp_path / name)
        run.train()
        ledger = read_ledger(run.ledger.path)
        assert any(LOG_FILE in what for what in ledger.disclosures) and (tmp_path / name / LOG_FILE).is_file()
    assert not (tmp_path / "unused" / LOG_FILE).exists()


def test_the_average_is_saved_while_the_last_weights_are_in_the_model(tmp_path):
    """The report names it, and nothing changed after the end."""
    run = trainer(tmp_path, average="ema")
    run.train()
    average = {name: p.clone() for name, p in run.model.named_parameters()}
    with run.last_weights():
        run.save_model()
    saved = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, average[name]) for name, p in saved.named_parameters())
    assert not any("changed after the end" in point for point in run.privacy_report()["open_points"])


@kills(
    "without the callback that attaches, a draw is charged first",
    "dpllm/training/trainer.py",
    "        self._attach()  # has no effect unless somebody removed `LastCallback`\n",
    "",
)
def test_a_trainer_without_its_callbacks_trains_as_well(tmp_path):
    """As after ``trainer.callback_handler.callbacks.clear()``, for a quiet run."""
    run = trainer(tmp_path)
    run.callback_handler.callbacks = [
        one for one in run.callback_handler.callbacks if isinstance(one, DefaultFlowCallback)
    ]
    run.train()
    assert read_ledger(run.ledger.path).end == "completed"


def test_a_number_of_steps_that_is_set_later_is_refused(tmp_path):
    """The plan is made of it."""
    run = trainer(tmp_path)
    run.args.max_steps = 9
    with pytest.raises(ConfigError, match="max_steps is 9"):
        run.train()


class Hub:
    """Records the files that a client of the Hub would receive."""

    def __init__(self):
        self.created, self.uploads = [], []

    def create_repo(self, client, repo_id, **more):
        self.created.append(repo_id)
        return SimpleNamespace(repo_id=f"someone/{repo_id}")

    def upload_folder(self, client, *, repo_id, folder_path, **more):
        folder = Path(folder_path)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.uploads.append((repo_id, files, more))
        return f"commit to {repo_id}"


def download(files, folder):
    for name, contents in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)


@pytest.fixture
def hub(monkeypatch):
    stand_in = Hub()
    monkeypatch.setattr(HfApi, "create_repo", lambda client, *a, **k: stand_in.create_repo(client, *a, **k))
    monkeypatch.setattr(HfApi, "upload_folder", lambda client, **k: stand_in.upload_folder(client, **k))
    return stand_in


def settled():
    """Notes after which the only open points are outputs, and figures sent elsewhere."""
    return ReleaseNotes(
        data_holder="a hospital",
        audience="all",
        other_uses="none",
        preprocessing="none",
        audit="none",
        utility={"held-out loss": 3.2},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run that logged nothing but its last line, saved; and the trainer."""
    folder = tmp_path_factory.mktemp("finished")
    run = trainer(folder, args=arguments(folder, logging_strategy="no"), config=privacy(dataset="notes"))
    run.train()
    run.notes = settled()
    run.save_model()
    for name, text in PRIVATE.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return run


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of its folder."""
    return Path(shutil.copytree(finished.ledger.path.parent, tmp_path / "copy"))


def test_the_final_loss_is_a_disclosure_without_any_logging(finished):
    """The Trainer prints it all the same; the report names the screen."""
    assert "the screen" in str(finished.privacy_report()["definition"]["facts"])
    assert read_ledger(finished.ledger.path).disclosures[FINAL_LOSS] == 1
    assert TRAINING_LOSS not in read_ledger(finished.ledger.path).disclosures


class Slow(TrainerCallback):
    """Works for a second before the first step, as an evaluation does."""

    def on_train_begin(self, *_, **__):
        """Wait."""
        time.sleep(1)


def test_the_running_time_is_that_of_the_steps(tmp_path):
    """And so are the rates, whatever callbacks do before."""
    began = time.time()
    run = trainer(tmp_path, args=arguments(tmp_path, max_steps=2), callbacks=[Slow()])
    metrics = run.train().metrics
    seconds = metrics["train_runtime"]
    assert 0 < seconds < time.time() - began - 1
    assert metrics["train_steps_per_second"] == pytest.approx(2 / seconds, rel=0.01)
    assert metrics["train_samples_per_second"] == pytest.approx(32 / seconds, rel=0.01)


def test_create_model_card_keeps_the_guarantee(finished):
    """The Trainer's own lists losses in its place."""
    folder = finished.ledger.path.parent
    finished.create_model_card(language="en", license="mit", tags="notes", dataset="allenai/c4")
    text, metadata = (folder / "README.md").read_text(), metadata_in(folder / "README.md")
    epsilon = finished.privacy_report()["statement"]["epsilon"]
    assert format_epsilon(epsilon) in text and metadata["differential_privacy"]["private"] is True
    assert metadata["license"] == "mit" and metadata["datasets"] == ["allenai/c4"] and "notes" in metadata["tags"]
    assert "Training results" not in text
    assert [check for check in verify(folder).checks if not check.ok] == []
    with pytest.raises(ConfigError, match="dataset_args="):
        finished.create_model_card(dataset_args="test")


@kills(
    "everything in the folder is uploaded",
    "dpllm/report/publishing.py",
    "    return sorted(names)\n",
    "    return sorted(path.name for path in folder.iterdir() if path.is_file())\n",
)
def test_pushing_takes_an_allow_list(finished, hub):
    """A run whose losses stayed with it has no open point; no file that ε does not cover is uploaded."""
    report = finished.privacy_report()
    assert report["open_points"] == [] and report["definition"]["written_out_and_not_covered"]
    assert finished.push_to_hub().startswith("commit to someone/")
    _, files, more = hub.uploads[0]
    assert set(files) == {*GUARANTEE, "model.safetensors", "config.json", "generation_config.json"}
    assert more["run_as_future"] is False
    card = files["README.md"].decode()
    assert "differential_privacy" in card and "open points" not in card and FINAL_LOSS in card
    assert not list(finished.ledger.path.parent.glob("_*"))


def test_whoever_downloads_a_published_model_can_verify_it(finished, tmp_path):
    """The card asks them to. The Trainer's arguments, which the ledger names, stay with the run."""
    folder = finished.ledger.path.parent
    for name in files_to_publish(folder, adapter=False):
        shutil.copy(folder / name, tmp_path)
    assert not (tmp_path / "training_args.bin").exists() and (folder / "training_args.bin").exists()
    assert [check for check in verify(tmp_path).checks if not check.ok] == []
    (tmp_path / "training_args.bin").write_bytes(b"weights")
    (failed,) = [check for check in verify(tmp_path).checks if not check.ok]
    assert "training_args.bin has 7 bytes instead of" in failed.detail


def test_weights_that_the_ledger_does_not_name_are_neither_uploaded_nor_passed_over(copied):
    """The settings that made these files are unknown."""
    require_publishable(copied)
    for name, text in STRAY_WEIGHTS.items():
        (copied / name).write_text(text)
    assert not set(STRAY_WEIGHTS) & set(files_to_publish(copied, adapter=False))
    with pytest.raises(PublishError, match="may hold weights"):
        require_publishable(copied, force_open_points=True)


def test_files_that_are_elsewhere_are_not_uploaded(copied, tmp_path):
    """A link in the run's folder names a file, or a folder of chat templates, that no run has written."""
    folder, elsewhere = copied, tmp_path / "elsewhere"
    names = files_to_publish(folder, adapter=False)
    elsewhere.mkdir()
    for name in ("own.jinja", "vocab.json"):
        (elsewhere / name).write_text("secret")
    (folder / "vocab.json").symlink_to(elsewhere / "vocab.json")
    (folder / "additional_chat_templates").symlink_to(elsewhere)
    assert files_to_publish(folder, adapter=False) == names
    (folder / "additional_chat_templates").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "linked.jinja").symlink_to(elsewhere / "own.jinja")
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    assert files_to_publish(folder, adapter=False) == sorted([*names, "additional_chat_templates/tool.jinja"])


class Tracker(TrainerCallback):
    """An integration that shows figures to others."""

    def on_log(self, *_, **__):
        """Send them."""


@pytest.mark.parametrize("case", ["tracker", "prediction", "own words"])
def test_pushing_refuses_figures_that_went_elsewhere_unless_forced(tmp_path, hub, case):
    """Figures sent to a tracker, predicted, or disclosed by a program are open points until people settle them."""
    run = trainer(
        tmp_path, args=arguments(tmp_path, max_steps=1), config=privacy(dataset="notes"), eval_dataset=rows(8)
    )
    if case == "tracker":
        run.add_callback(Tracker())
    run.train()
    if case == "prediction":
        run.predict(rows(8))
    if case == "own words":
        run.disclose("a table of losses for the paper", 1)
    run.notes = settled()
    run.save_model()
    with pytest.raises(PublishError, match="force_open_points=True"):
        run.push_to_hub()
    assert not hub.uploads
    assert run.push_to_hub(force_open_points=True).startswith("commit to someone/")
    assert "open points" in hub.uploads[0][1]["README.md"].decode()
    points = run.privacy_report()["open_points"]  # with a tracker, its callback too
    settle(tmp_path, dict.fromkeys(points, "Only we see them."), "A. Meyer")
    run.push_to_hub()
    card = hub.uploads[1][1]["README.md"].decode()
    assert "has open points" not in card
    for point in points:
        assert f"- {point} Settled: Only we see them. (settled on " in card


def test_an_evaluation_that_stays_with_the_run_is_no_open_point(tmp_path, hub):
    """Its figures are in files that are not uploaded, and the report names those files."""
    run = trainer(
        tmp_path, args=arguments(tmp_path, max_steps=1), config=privacy(dataset="notes"), eval_dataset=rows(8)
    )
    run.train()
    loss = run.evaluate()["eval_loss"]
    run.notes = settled()
    run.save_model()
    report = run.privacy_report()
    assert report["open_points"] == [] and any("not_for_release/" in item["files"] for item in report["do_not_publish"])
    run.push_to_hub()
    files = hub.uploads[0][1]
    texts = [text.decode(errors="ignore") for name, text in files.items() if name in GUARANTEE]
    texts = [re.sub(r"(?s)<svg.*?</svg>", "", text) for text in texts]  # curves of thousands of numbers
    assert not any(re.search(rf"(?<!\d){loss:.4f}", text) for text in texts)
    left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    left -= {name.split("/")[0] for name in files}
    listed = " ".join(item["files"] for item in report["do_not_publish"])
    for name in left:
        kind = "checkpoint-*" if name.startswith("checkpoint-") else name
        assert kind in listed, name


def test_a_copy_of_the_upload_verifies_where_more_was_saved_than_is_uploaded(tmp_path, hub):
    """The weights after the last step stay with the run; a second upload of the same files adds nothing."""
    args = arguments(tmp_path / "run", max_steps=1, logging_strategy="no")
    run = trainer(tmp_path / "run", args=args, average={"kind": "ema", "decay": 0.5, "keep_last": True})
    run.train()
    run.save_model()
    run.push_to_hub(force_open_points=True)
    _, files, _ = hub.uploads[0]
    assert (tmp_path / "run" / "last_step" / "model.safetensors").exists() and "model.safetensors" in files
    assert not [name for name in files if name.startswith("last_step")]
    download(files, tmp_path / "got")
    for folder in ("got", "run"):
        assert [check for check in verify(tmp_path / folder).checks if not check.ok] == []


@pytest.mark.parametrize("names", [["mine"], ["default", "mine"]])
def test_an_adapter_with_a_name_of_its_own_is_published(tmp_path, hub, names):
    """PEFT saves it in a folder of its name: an upload found no weights, or those of another adapter only."""
    adapter = LoraConfig(target_modules=["q_proj"], r=2)
    model = get_peft_model(LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1)), adapter, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, adapter)
    model.set_adapter("mine")
    run = trainer(tmp_path / "run", model, args=arguments(tmp_path / "run", max_steps=1, logging_strategy="no"))
    run.train()
    run.save_model()
    run.push_to_hub(force_open_points=True)
    _, files, _ = hub.uploads[0]
    parts = {"adapter_config.json", "adapter_model.safetensors"}
    at_top = parts if "default" in names else set()
    assert set(files) - GUARANTEE == at_top | {f"mine/{part}" for part in parts}
    download(files, tmp_path / "got")
    assert [check for check in verify(tmp_path / "got").checks if not check.ok] == []
    shutil.copytree(tmp_path / "run" / "mine", tmp_path / "run" / "stray")
    assert not [name for name in files_to_publish(tmp_path / "run", adapter=True, adapters=["mine"]) if "stray" in name]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda folder: (folder / "README.md").write_text("# A model with ε = 0.01\n"), "does not pass `dpllm verify`"),
        (lambda folder: (folder / "audit.json").write_text('{"verdict": "FAIL", "epsilon_lower": 9}'), "refutes"),
        (
            lambda folder: (folder / "audit.json").write_text(
                '{"verdict": "consistent", "epsilon_lower": 9, "claimed_epsilon": 2}'
            ),
            "refutes",
        ),
        (lambda folder: (folder / "audit.json").write_text("{"), "refutes"),
        (lambda folder: (folder / "privacy_report.json").write_text("{}"), "is not a privacy report"),
    ],
)
def test_a_folder_that_contradicts_itself_or_was_refuted_cannot_be_published(copied, change, match):
    """Not with force either."""
    change(copied)
    with pytest.raises(PublishError, match=match):
        require_publishable(copied, force_open_points=True)


def test_what_has_no_guarantee_or_no_weights_cannot_be_published(copied):
    """By the names of the files that are missing."""
    (copied / "model.safetensors").unlink()
    with pytest.raises(PublishError, match=r"model\.safetensors"):
        files_to_publish(copied, adapter=False)
    (copied / "adapter_model.safetensors").write_text("an adapter's")
    assert "adapter_model.safetensors" in files_to_publish(copied, adapter=True)
    index = {"weight_map": {"b": "../secret.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PublishError, match=r"/secret\.safetensors"):
        files_to_publish(copied, adapter=False)
    (copied / "privacy_ledger.jsonl").unlink()
    with pytest.raises(PublishError, match=r"privacy_ledger\.jsonl"):
        files_to_publish(copied, adapter=False)


def test_a_run_that_is_not_private_is_never_published(tmp_path, hub):
    """A fixed seed is for tests."""
    run = trainer(tmp_path, config=privacy(seed=1), args=arguments(tmp_path, max_steps=1))
    with pytest.raises(PublishError, match=r"before train\(\)"):
        run.push_to_hub()
    run.train()
    with pytest.raises(PublishError, match="NOT PRIVATE"):
        run.push_to_hub(force_open_points=True)
    assert not hub.uploads and not hub.created


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_uploads_during_training_are_refused_before_data_is_read(tmp_path, strategy):
    """The default of transformers among them."""
    args = arguments(tmp_path, push_to_hub=True, hub_strategy=strategy)
    with pytest.raises(ConfigError, match=rf"hub_strategy={strategy}.*Set train\.hub_strategy=end"):
        trainer(tmp_path, dataset=object(), args=args)


@pytest.mark.parametrize(
    ("name", "variable"), [("wandb", "WANDB_LOG_MODEL"), ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS"), ("clearml", None)]
)
def test_integrations_that_upload_checkpoints_are_refused(tmp_path, monkeypatch, name, variable):
    """By the variable that makes them do so; ClearML does without any."""
    if variable:
        monkeypatch.setenv(variable, "true")
    args = arguments(tmp_path)
    args.report_to = [name]  # without the package; only the list is looked at
    with pytest.raises(ConfigError, match=rf"train\.report_to={name} uploads checkpoints.*=false"):
        trainer(tmp_path, dataset=object(), args=args)


def test_saving_with_push_to_hub_uploads_the_same_list(tmp_path, hub):
    """The Trainer pushes every file of the folder when the program saves the model."""
    run = trainer(tmp_path, args=arguments(tmp_path, push_to_hub=True, hub_strategy="end", max_steps=1))
    run.train()
    (tmp_path / "secret.txt").write_text("the data")
    with pytest.raises(PublishError, match="open point"):
        run.save_model()
    assert not hub.uploads and (tmp_path / "model.safetensors").exists()


def test_every_evaluation_and_prediction_is_counted(tmp_path):
    """This holds for any prefix, before and after training; the report and the card are renewed."""
    run = trainer(tmp_path, args=arguments(tmp_path, logging_strategy="no", max_steps=1), eval_dataset=rows(8))
    run.evaluate()
    run.train()
    run.save_model()
    run.evaluate(metric_key_prefix="test")
    run.predict(rows(4))
    counts = read_ledger(run.ledger.path).disclosures
    assert counts[EVALUATION_OUTSIDE] == 2 and counts[PREDICTION] == 1
    report = json.loads((tmp_path / "privacy_report.json").read_text())
    listed = {item["what"]: item["count"] for item in report["definition"]["written_out_and_not_covered"]}
    assert listed == counts and verify(tmp_path).ok


def test_a_readme_of_ones_own_is_kept(tmp_path):
    """The card takes its name, not its place."""
    (tmp_path / "README.md").write_text("# How we chose the notes\n")
    run = trainer(tmp_path, args=arguments(tmp_path, max_steps=1))
    run.train()
    run.save_model()
    run.save_model()
    assert (tmp_path / "README.own.md").read_text() == "# How we chose the notes\n"
    assert "differential_privacy" in metadata_in(tmp_path / "README.md")
    assert not (tmp_path / "README.own.2.md").exists()


def test_notes_that_cannot_be_read_are_an_open_point_and_not_forgotten(tmp_path):
    """People may have noted an audit that refutes the run; the report that replaces theirs says that it is missing."""
    run = trainer(tmp_path, args=arguments(tmp_path, max_steps=1), eval_dataset=rows(8))
    run.train()
    run.notes = settled()
    run.save_model()
    assert LOST_NOTES not in run.privacy_report()["open_points"]
    (tmp_path / "privacy_report.json").write_text("{")
    run.evaluate()
    assert LOST_NOTES in json.loads((tmp_path / "privacy_report.json").read_text())["open_points"]
    assert verify(tmp_path).ok


def broken_llama(value):
    model = LlamaForCausalLM(tiny_llama_config())
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = value
    return model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_before_a_step_is_charged(tmp_path, value):
    """They would train on noise only."""
    with pytest.raises(ValueError, match="up_proj"):
        trainer(tmp_path, broken_llama(value)).train()
    assert not (tmp_path / "privacy_ledger.jsonl").exists()


def test_weights_that_become_infinite_are_neither_saved_nor_called_completed(tmp_path):
    """The run has failed, and its message has the remedy."""
    args = arguments(tmp_path, save_strategy="steps", save_steps=3)
    run = trainer(tmp_path, args=args)
    run.add_callback(At(3, lambda: run.model.model.norm.weight.detach()[:1].fill_(float("inf"))))
    with pytest.raises(ValueError, match="checkpoint-3"):
        run.train()
    with pytest.raises(ValueError, match="model has weights"):
        run.save_model()
    assert read_ledger(run.ledger.path).end == "failed"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-0"]  # the start, which is finite
    assert not (tmp_path / "model.safetensors").exists()


def test_a_run_in_which_no_unit_has_a_finite_gradient_fails_at_once(tmp_path):
    """Its loss would be logged as 0, and noise would be all that it learns."""

    def loss(outputs, labels):
        return outputs.logits.float().mean(dim=(1, 2)) * float("nan")

    run = trainer(tmp_path, compute_loss_func=loss)
    with pytest.raises(ValueError, match="units up"):
        run.train()
    contents = read_ledger(run.ledger.path)
    assert contents.end == "failed" and contents.num_steps < 4
