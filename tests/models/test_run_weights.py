"""A run's final weights are recognised: in a later save, and at the start of another run of the process."""

import copy
import gc
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM, TrainerCallback

from dpllm import PrivateRun, per_sequence_loss
from dpllm.config import ConfigError
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.tiers import deep_case
from tests.training.test_run import FEATURES, loop, loss_of, network, plan_of, rows_of
from tests.training.test_trainer import arguments
from tests.training.test_trainer import small_trainer as trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")


def open_points(run):
    return run.privacy_report()["open_points"]


def require_open_point_of_a_change(run):
    """A save of the run's final weights has no such point; a save of other weights has one."""
    run.save_model()
    assert not any("changed after the end" in point for point in open_points(run))
    with torch.no_grad():
        run.model.lm_head.weight[3] += 1
    run.save_model()
    assert any("lm_head.weight changed after the end of the private training" in point for point in open_points(run))


def test_weights_that_changed_after_the_training_are_an_open_point(tmp_path):
    """Between the end and the save they may have changed in any way, also by other training."""
    run = trainer(tmp_path)
    run.train()
    require_open_point_of_a_change(run)
    assert "lm_head.weight changed" in (tmp_path / "README.md").read_text()


def test_another_model_in_the_place_of_the_trained_one_is_an_open_point(tmp_path):
    """Its parameters have the same names."""
    run = trainer(tmp_path)
    run.train()
    run.model = LlamaForCausalLM(tiny_llama_config())
    run.save_model()
    assert any("other parameter(s) changed after the end" in point for point in open_points(run))


@pytest.mark.parametrize("how", ["deepcopy", deep_case("state_dict")])
def test_a_copy_of_trained_weights_is_refused_or_declared(how, tmp_path):
    """They hold the first run's steps, which the second run's ledger does not charge."""
    start = LlamaForCausalLM(tiny_llama_config())
    run = trainer(tmp_path / "a", copy.deepcopy(start))
    run.train()
    model = copy.deepcopy(run.model if how == "deepcopy" else start)
    if how == "state_dict":
        model.load_state_dict(run.model.state_dict())
    with pytest.raises(ConfigError, match=rf"a copy of those that the private run of {tmp_path / 'a'} trained"):
        trainer(tmp_path / "b", model).train()
    declared = trainer(tmp_path / "c", model, start_is_independent=True)
    declared.train()
    assert any("a copy of those" in point for point in open_points(declared))
    again = trainer(tmp_path / "d", start)  # the first run's starting weights belong to no run
    again.train()
    assert not any("a copy of those" in point for point in open_points(again))


@kills(
    "the runs of a process are forgotten with their models",
    "dpllm/models/run_weights.py",
    "for one in _RUNS if one.run != own for",
    "for one in _RUNS if one.run != own and one.model is not None for",
)
def test_a_copy_of_weights_is_known_after_model_and_run_are_gone(tmp_path):
    """A sweep that keeps the best weights, and begins the next run at them."""

    model = LlamaForCausalLM(tiny_llama_config())

    def swept():
        run = trainer(tmp_path / "a", copy.deepcopy(model))
        run.train()
        return copy.deepcopy(run.model.state_dict())

    best = swept()
    gc.collect()
    model.load_state_dict(best)
    with pytest.raises(ConfigError, match=rf"a copy of those that the private run of {tmp_path / 'a'} trained"):
        trainer(tmp_path / "b", model)


def failed(folder, steps, error, model=None):
    """A run that was stopped by this error after these steps."""

    def loss(outputs, labels):
        if run.state.global_step == steps:
            raise error("stopped")
        return per_sequence_loss(outputs.logits, labels)

    run = trainer(folder, model, compute_loss_func=loss)
    with pytest.raises(error, match="stopped"):
        run.train()
    return run


@pytest.mark.grid(1)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_weights_of_a_run_that_did_not_end_are_known_again(error, steps, tmp_path):
    """It failed in its first step, or in a later one: copies of weights that took a step are an earlier run's."""
    start = LlamaForCausalLM(tiny_llama_config())
    run = failed(tmp_path / "a", steps, error, copy.deepcopy(start))
    assert read_ledger(tmp_path / "a" / LEDGER_FILE).num_steps == steps + 1
    again = trainer(tmp_path / "b", copy.deepcopy(start))  # the first run's starting weights belong to no run
    again.train()
    copied = copy.deepcopy(run.model)
    if steps == 0:
        trainer(tmp_path / "c", copied).train()
        return
    with pytest.raises(ConfigError, match=rf"a copy of those that the private run of {tmp_path / 'a'} trained"):
        trainer(tmp_path / "c", copied).train()


def test_weights_that_changed_after_a_failure_are_an_open_point(tmp_path):
    """The report of a failed run describes its last weights, like any other report."""
    require_open_point_of_a_change(failed(tmp_path, 2, RuntimeError))


def begun(folder, model, num_steps=2):
    """A custom loop, not finished."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PrivateRun.start(folder, plan_of(), rows_of())
    run.attach(model, optimizer)
    loop(run, optimizer, num_steps)
    return run, optimizer


def trained_otherwise(model, optimizer):
    """A step of other training."""
    loss_of(model, {"rows": torch.ones(3, FEATURES + 1)}).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_that_a_loop_of_ones_own_trained_is_refused_in_another_folder(tmp_path):
    """In the same folder the ledger counts both parts."""
    model = network()
    run, optimizer = begun(tmp_path / "a", model, 1)
    for _ in range(2):
        run.detach()
        run.attach(model, optimizer)
    run.detach()
    with pytest.raises(ConfigError, match="trained earlier"):
        begun(tmp_path / "b", model)


def test_weights_of_a_loop_that_was_left_are_known_again(tmp_path):
    """Nothing says that it ended: no finish(), no detach()."""
    model = network()
    run, _ = begun(tmp_path / "a", model)
    with pytest.raises(ConfigError, match=rf"a copy of those that the private run of {tmp_path / 'a'} trained"):
        begun(tmp_path / "b", copy.deepcopy(model))
    begun(tmp_path / "c", network(), 0)[0].detach()
    run.detach()


def test_an_optimizer_with_moments_is_refused_or_declared(tmp_path):
    """Moments of private gradients without noise would move the weights in the first steps."""
    model = LlamaForCausalLM(tiny_llama_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(3, 61, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    weights = copy.deepcopy(model.state_dict())
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(weights)
    run = trainer(tmp_path / "a", model, optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match="moments"):
        run.train()
    assert read_ledger(tmp_path / "a" / LEDGER_FILE).num_steps == 0
    declared = trainer(tmp_path / "b", model, optimizers=(optimizer, None), start_is_independent=True)
    declared.train()
    assert any("moments of updates" in point for point in open_points(declared))


def test_an_optimizer_that_begins_at_a_constant_is_none_with_moments(tmp_path):
    model = LlamaForCausalLM(tiny_llama_config())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3, initial_accumulator_value=0.1)
    run = trainer(tmp_path, model, optimizers=(optimizer, None))
    run.train()
    assert not any("moments" in point for point in open_points(run))


@pytest.mark.parametrize("how", ["the same model", "a copy"])
def test_a_folder_that_was_emptied_holds_another_run(how, tmp_path):
    """The second run's ledger does not charge the first one's steps: a notebook cell that is run again."""
    model = network()
    run, _ = begun(tmp_path / "a", model)
    run.finish()
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ConfigError, match=rf"by the private run of {tmp_path / 'a'}|that the private run of"):
        begun(tmp_path / "a", copy.deepcopy(model) if how == "a copy" else model)
    shutil.rmtree(tmp_path / "a")
    begun(tmp_path / "a", network())


def test_weights_that_changed_while_a_run_had_let_go_of_them_are_refused_or_declared(tmp_path):
    """Other training may have taken place between `detach` and `attach`; the run's ledger does not contain it."""
    model = network()
    run, optimizer = begun(tmp_path, model, 1)
    run.detach()
    trained_otherwise(model, optimizer)
    with pytest.raises(ConfigError, match=r"0\.bias"):
        run.attach(model, optimizer)
    run.attach(model, optimizer, start_is_independent=True)
    points = run.finish()["open_points"]
    assert any("changed between detach() and attach()" in point for point in points)


@pytest.mark.parametrize("changed", [True, False])
def test_weights_that_changed_between_detach_and_the_end_are_an_open_point(changed, tmp_path):
    """The report of a loop of one's own is of the weights as the run left them; the loop saves them by itself."""
    model = network()
    run, optimizer = begun(tmp_path, model, 1)
    run.detach()
    if changed:
        trained_otherwise(model, optimizer)
    points = run.finish()["open_points"]
    assert any("changed after the end of the private training" in point for point in points) == changed


def test_weights_that_are_saved_in_mid_run_are_those_of_the_run_or_an_open_point(tmp_path):
    """Other weights may replace them for a while; a save in the meantime is checked."""

    class Swapping(TrainerCallback):
        def __init__(self, saves):
            self.saves = saves

        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                kept = copy.deepcopy(model.state_dict())
                for parameter in model.parameters():
                    parameter.data.mul_(0.9)
                if self.saves:
                    run.save_model(str(tmp_path / "average"))
                for name, parameter in model.named_parameters():
                    parameter.data.copy_(kept[name])

    for saves in (False, True):
        run = trainer(tmp_path / str(saves), callbacks=[Swapping(saves)])
        run.train()
        assert any("saved in the middle of the training" in point for point in open_points(run)) == saves


def test_weights_that_were_put_back_to_the_start_begin_another_run(tmp_path):
    """As in a sweep in one process; each part that was not restored is another run's release."""
    model = LlamaForCausalLM(tiny_llama_config())
    start = copy.deepcopy(model.state_dict())
    trainer(tmp_path / "a", model, args=arguments(tmp_path / "a", max_steps=1)).train()
    trained = copy.deepcopy(model.state_dict())
    model.load_state_dict({**start, "model.norm.weight": trained["model.norm.weight"]})
    with pytest.raises(ConfigError, match="trained earlier"):
        trainer(tmp_path / "b", model, args=arguments(tmp_path / "b", max_steps=1))
    model.load_state_dict(start)
    trainer(tmp_path / "c", model, args=arguments(tmp_path / "c", max_steps=1)).train()
    with pytest.raises(ConfigError, match="trained earlier"):
        trainer(tmp_path / "d", model, args=arguments(tmp_path / "d", max_steps=1))
