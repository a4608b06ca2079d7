"""Losses are stored outside of the files that ε covers, and no random state is saved."""

import json
import pickle

import pytest
import torch
from transformers import TrainerCallback

from dpllm.privacy.checkpoints import MANIFEST_FILE, CheckpointError
from dpllm.privacy.ledger import read_ledger
from dpllm.training.training_log import LOG_FILE, TrainingLog
from tests.training.test_trainer import At, arguments, crash, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

NOT_COVERED = ("loss", "grad_norm", "eval_", "metric", "runtime", "samples")


def saved(folder, **more):
    """A run that logs and evaluates in every step and saves after each second."""
    args = arguments(folder, save_strategy="steps", save_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=1)
    run = trainer(folder, args=args, eval_dataset=rows(8), **more)
    run.train()
    return run


def names_in(value):
    """All keys of nested dictionaries and lists."""
    if isinstance(value, dict):
        return set(value) | {name for inner in value.values() for name in names_in(inner)}
    return {name for inner in value for name in names_in(inner)} if isinstance(value, list | tuple) else set()


def generator_states(value):
    """Return whether a loaded object holds a value that looks like the state of a generator."""
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.uint8 and value.numel() in (16, torch.get_rng_state().numel())
    if isinstance(value, dict):
        return any(generator_states(inner) for inner in value.values()) or any("rng" in str(name) for name in value)
    if isinstance(value, list | tuple):
        return len(value) >= 624 or any(generator_states(inner) for inner in value)
    return False


def test_no_file_of_a_checkpoint_holds_a_loss_or_a_random_state(tmp_path):
    """Every JSON file by its keys, every pickled one by its contents, and every file by its name."""
    run = saved(tmp_path)
    run.save_state()
    folders = [tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"]
    looked_into = set()
    for path in [path for folder in folders for path in folder.rglob("*")] + [tmp_path / "trainer_state.json"]:
        assert "rng" not in path.name and "random_state" not in path.name
        if path.name in ("privacy_report.json", MANIFEST_FILE):  # words about the run, and names of files
            continue
        if path.suffix == ".json":
            found = [name for name in names_in(json.loads(path.read_text())) if name.startswith(NOT_COVERED)]
            fields = {"eval_steps"} if path.name == "trainer_state.json" else set()
            assert set(found) <= fields, path
            looked_into.add(path.name)
        elif path.suffix in (".pt", ".pth", ".bin", ".pkl"):
            try:
                value = torch.load(path, weights_only=False)
            except pickle.UnpicklingError:
                continue
            assert not generator_states(getattr(value, "__dict__", value)), path
            looked_into.add(path.name)
    assert {"trainer_state.json", "optimizer.pt", "scheduler.pt"} <= looked_into
    state = json.loads((folders[1] / "trainer_state.json").read_text())
    assert state["global_step"] == 4 and state["best_metric"] is None
    assert [set(entry) for entry in state["log_history"]] == [{"step", "epoch", "learning_rate", "epsilon"}] * 4
    assert generator_states({"cpu": torch.get_rng_state()})  # the search finds one


class OnPrivateRows(TrainerCallback):
    """Evaluates on the training rows, in a run whose own evaluation rows are public."""

    def __init__(self):
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        self.results = self.trainer.evaluate(self.trainer.train_dataset.select(range(8)))
        self.trainer.log({"eval_of_mine": 1.5})


def test_a_checkpoint_holds_results_on_public_rows_only(tmp_path):
    """Results on other rows have the same names."""
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2, eval_strategy="epoch", logging_steps=9)
    public = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 4
    run = trainer(tmp_path, args=args, eval_dataset=public, eval_is_public=True, callbacks=[OnPrivateRows()])
    (mine,) = [one for one in run.callback_handler.callbacks if isinstance(one, OnPrivateRows)]
    mine.trainer = run
    run.train()
    run.save_state()
    for folder in (tmp_path / "checkpoint-2", tmp_path):
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        assert not [name for entry in history for name in entry if name.startswith("eval_") and entry["step"] < 2]
    assert any("eval_loss" in entry for entry in history)  # after the last step, on public rows
    assert "eval_of_mine" not in names_in(history) and "on_private_rows" not in mine.results
    assert sum("eval_loss" in entry for entry in run.state.log_history) == 3


def test_the_losses_are_in_one_file_that_the_report_lists(tmp_path):
    """And in the Trainer's own history, while it runs."""
    run = saved(tmp_path)
    logged = TrainingLog(tmp_path).read()
    assert logged == run.state.log_history
    assert sum("loss" in entry for entry in logged) == 4 and sum("eval_loss" in entry for entry in logged) == 4
    disclosed = read_ledger(tmp_path / "privacy_ledger.jsonl").disclosures
    assert any(LOG_FILE in what and "not for release" in what for what in disclosed)
    assert LOG_FILE in (tmp_path / "privacy_report.md").read_text()


def test_a_resumed_run_has_its_losses_back_without_those_of_lost_steps(tmp_path):
    """For the picture of the run; the checkpoint itself holds none of them."""
    with pytest.raises(RuntimeError, match="power cut"):
        saved(tmp_path, callbacks=[At(3, crash)])
    before = TrainingLog(tmp_path).read()
    args = arguments(tmp_path, logging_steps=1, save_strategy="no")
    again = trainer(tmp_path, args=args)
    again.train(resume_from_checkpoint=True)
    history = [entry for entry in again.state.log_history if "loss" in entry]
    steps = [entry["step"] for entry in history]
    assert steps == [1, 2, 3]  # one of the four steps was charged and lost
    assert history[:2] == [entry for entry in before if "loss" in entry][:2]
    assert TrainingLog(tmp_path).read() == again.state.log_history


@pytest.mark.parametrize(("begins", "left"), [(None, [1.0, 2.0, 2.5]), (1, [1.0, 2.5])])
def test_a_half_line_of_a_crash_is_left_out(tmp_path, begins, left):
    """The lines after it are read, and the mark of a resumed run: losses of lost steps would be there twice."""
    log = TrainingLog(tmp_path)
    log.append({"loss": 1.0, "step": 1})
    log.append({"loss": 2.0, "step": 2})
    with log.path.open("a") as file:
        file.write('{"loss": 3.0, "st' + ("\n" if begins is None else ""))
    if begins is not None:
        log.begin(begins)
    log.append({"loss": 2.5, "step": 2})
    assert [entry["loss"] for entry in log.read()] == left


def test_a_callback_that_saves_a_random_state_stops_the_save(tmp_path):
    """As the Trainer itself did."""
    run = trainer(tmp_path, args=arguments(tmp_path, save_strategy="steps", save_steps=2))
    save_scaler = run._save_scaler

    def and_a_state(folder):
        torch.save(torch.get_rng_state(), f"{folder}/rng_state_0.pth")
        save_scaler(folder)

    run._save_scaler = and_a_state
    with pytest.raises(CheckpointError, match=r"rng_state_0\.pth"):
        run.train()


def test_a_random_state_in_an_old_checkpoint_is_not_restored(tmp_path):
    """It would make the first step after the resume predictable."""
    saved(tmp_path, callbacks=None)
    folder = tmp_path / "checkpoint-2"
    torch.manual_seed(123)
    known = torch.get_rng_state()
    state = {"python": __import__("random").getstate(), "cpu": known, "numpy": __import__("numpy").random.get_state()}
    torch.save(state, folder / "rng_state.pth")
    torch.manual_seed(5)
    run = trainer(tmp_path)
    run._load_rng_state(str(folder))
    assert not torch.equal(torch.get_rng_state(), known)
