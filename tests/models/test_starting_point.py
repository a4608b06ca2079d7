"""The start and the schedules of a run are independent of the private rows, or the user declares it."""

import json
import re
import shutil

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from transformers import EarlyStoppingCallback, LlamaForCausalLM, TrainerCallback

from dpllm.config import ConfigError, DataConfig
from dpllm.data.shared_records import shared_records_point
from dpllm.models.starting_point import check_start
from dpllm.privacy.ledger import read_ledger
from dpllm.training.run import PrivateRun
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.test_attacks import Stop
from tests.training.test_run import ledger_of, network, plan_of, rows_of
from tests.training.test_trainer import arguments, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

EVALUATE = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    ("changes", "more", "match"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, "lr_scheduler_type=reduce_lr_on_plateau"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, {}, "save_strategy=best"),
        ({"metric_for_best_model": "loss"}, {}, "metric_for_best_model=loss"),
        ({}, {"callbacks": [EarlyStoppingCallback()]}, "EarlyStoppingCallback"),
        ({"lr_scheduler_type": "greedy"}, {}, "lr_scheduler_type=greedy"),
    ],
)
def test_what_follows_private_evaluation_is_refused_before_data_is_touched(changes, more, match, tmp_path):
    """And no file is left in the folder."""
    with pytest.raises(ConfigError, match=f"{match} follows exact evaluation results"):
        trainer(tmp_path, args=arguments(tmp_path, **EVALUATE, **changes), eval_dataset=rows(8), **more)
    assert not list(tmp_path.iterdir())


class Following(torch.optim.lr_scheduler.LRScheduler):
    """Recognised by its arguments, not by its class."""

    def step(self, metrics=None):
        self.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("scheduler", [torch.optim.lr_scheduler.ReduceLROnPlateau, Following])
def test_any_scheduler_whose_steps_take_results_is_refused(scheduler, tmp_path):
    """It reads the same losses."""
    model = LlamaForCausalLM(tiny_llama_config())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"a {scheduler.__name__} scheduler follows"):
        trainer(tmp_path, model, optimizers=(optimizer, scheduler(optimizer)))


def test_early_stopping_that_is_added_later_is_refused(tmp_path):
    """Before the ledger is opened."""
    run = trainer(tmp_path)
    run.add_callback(EarlyStoppingCallback())
    with pytest.raises(ConfigError, match="EarlyStoppingCallback follows"):
        run.train()
    assert not (tmp_path / "privacy_ledger.jsonl").exists()


def test_declared_public_evaluation_may_steer_and_is_no_disclosure(tmp_path):
    """Evaluation of a private model on public rows is post-processing."""
    args = arguments(tmp_path, **EVALUATE, lr_scheduler_type="reduce_lr_on_plateau", max_steps=2)
    run = trainer(tmp_path, args=args, eval_dataset=rows(8), eval_is_public=True)
    run.train()
    disclosed = read_ledger(tmp_path / "privacy_ledger.jsonl").disclosures
    assert not any("eval" in what for what in disclosed), disclosed


def adapted(kind):
    """A model whose adapter configuration names this initialisation, as PEFT leaves it."""
    model = get_peft_model(LlamaForCausalLM(tiny_llama_config()), LoraConfig(r=2, target_modules=["q_proj"]))
    model.peft_config["default"].init_lora_weights = kind
    return model


@pytest.mark.parametrize("kind", ["eva", "corda", "lora_ga", "EVA"])
def test_an_adapter_initialised_from_data_is_refused_or_declared(kind, tmp_path):
    """By the Trainer and by a custom loop; if declared, it is an open point of the report."""
    with pytest.raises(ConfigError, match=f"init_lora_weights='{kind}', which starts from statistics of data"):
        trainer(tmp_path / "a", adapted(kind))
    run = trainer(tmp_path / "b", adapted(kind), start_is_independent=True)
    if kind in ("corda", "EVA"):  # PEFT cannot load such an adapter again, which the rehearsal finds
        with pytest.raises(ConfigError, match="cannot be loaded"):
            run.train()
        return
    run.train()
    points = json.dumps(json.loads((tmp_path / "b" / "privacy_report.json").read_text()), ensure_ascii=False)
    assert "Declared independent of these records" in points


@pytest.mark.parametrize("kind", [True, False, "gaussian", "pissa", "pissa_niter_4", "olora", "loftq", "orthogonal"])
def test_an_adapter_initialised_from_weights_is_not_refused(kind, tmp_path):
    """These do not use data."""
    trainer(tmp_path, adapted(kind))


def test_a_loop_of_ones_own_refuses_it_too(tmp_path):
    """Before any hook is attached."""
    plan, model = plan_of(), network()
    model.peft_config = {"default": LoraConfig(r=2)}
    model.peft_config["default"].init_lora_weights = "corda"
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    with pytest.raises(ConfigError, match="corda"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_weights_of_an_earlier_private_run_are_refused_or_declared(tmp_path):
    """The second report would show only its own ε; base models of adapters are checked as well."""
    first = trainer(tmp_path / "first")
    first.train()
    first.save_model()
    warm = LlamaForCausalLM.from_pretrained(tmp_path / "first")
    match = re.escape(str(tmp_path / "first")) + r", a private run \(4 steps"
    with pytest.raises(ConfigError, match=match):
        trainer(tmp_path / "second", warm)
    with pytest.raises(ConfigError, match=match):
        trainer(tmp_path / "second", get_peft_model(warm, LoraConfig(r=2, target_modules=["q_proj"])))
    warm = LlamaForCausalLM.from_pretrained(tmp_path / "first")
    trainer(tmp_path / "second", warm, start_is_independent=True).train()
    assert "a private run (4 steps" in (tmp_path / "second" / "privacy_report.md").read_text()


def test_weights_of_an_earlier_run_below_the_own_folder_are_those_of_another_run(tmp_path):
    """The path of a folder does not show which ledger counts its steps; a run may use its own checkpoints."""
    first = trainer(tmp_path / "runs" / "first")
    first.train()
    first.save_model()
    warm = LlamaForCausalLM.from_pretrained(tmp_path / "runs" / "first")
    with pytest.raises(ConfigError, match="4 steps"):
        trainer(tmp_path / "runs", warm)
    own = check_start(warm, tmp_path / "runs" / "first", False)
    shutil.copytree(tmp_path / "runs" / "first", tmp_path / "runs" / "first" / "checkpoint-4")
    warm = LlamaForCausalLM.from_pretrained(tmp_path / "runs" / "first" / "checkpoint-4")
    assert own == check_start(warm, tmp_path / "runs" / "first", False) == []


@kills(
    "a model in a folder inside that of a private run passes for a public one",
    "dpllm/models/starting_point.py",
    "for above in (place, *place.parents):",
    "for above in (place,):",
)
def test_a_model_inside_the_folder_of_a_private_run_is_one_of_its(tmp_path):
    """A copied checkpoint or a student has no ledger beside it. A run counts its own; public weights are free."""
    (run := tmp_path / "run").mkdir()
    (run / "privacy_ledger.jsonl").write_text("damaged\n")
    for name in ("copies/of/checkpoint-4", "public_pretrain"):
        LlamaForCausalLM(tiny_llama_config()).save_pretrained(run / name)
    warm = LlamaForCausalLM.from_pretrained(run / "copies" / "of" / "checkpoint-4")
    for own in (None, tmp_path / "other"):
        with pytest.raises(ConfigError, match=rf"in {run}, a private run \(a ledger that cannot be read"):
            check_start(warm, own, False)
    assert check_start(LlamaForCausalLM.from_pretrained(run / "public_pretrain"), None, False) == []
    trainer(tmp_path / "own").train()
    shutil.copytree(run / "copies", tmp_path / "own" / "copies")
    warm = LlamaForCausalLM.from_pretrained(tmp_path / "own" / "copies" / "of" / "checkpoint-4")
    assert check_start(warm, tmp_path / "own", False) == []


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("recipe.yaml", "data: {path: private.jsonl}", "fine-tuned with the recipe in its recipe.yaml"),
        ("README.md", "---\ndifferential_privacy:\n  private: true\n---\n", "a private run according to its README.md"),
        ("README.md", "---\nlicense: [\ndifferential_privacy:\n---\n", "a private run according to its README.md"),
    ],
)
def test_weights_that_were_trained_on_private_records_are_known_without_a_ledger(tmp_path, name, text, match):
    """The plain half of a comparison has no ledger, and a model is copied with its card; a public model has neither."""
    LlamaForCausalLM(tiny_llama_config()).save_pretrained(tmp_path / "start")
    trainer(tmp_path / "public", LlamaForCausalLM.from_pretrained(tmp_path / "start"))
    (tmp_path / "start" / name).write_text(text)
    warm = LlamaForCausalLM.from_pretrained(tmp_path / "start")
    with pytest.raises(ConfigError, match=match):
        trainer(tmp_path / "second", warm)
    trainer(tmp_path / "third", warm, start_is_independent=True)


PUBLIC = DataConfig(path="public.txt", max_length=8)


def test_a_declared_overlap_is_an_open_point_of_the_report(tmp_path):
    """It names the declared bound, which is public, and not the number that was found."""
    run = trainer(tmp_path)
    run.declared_points = shared_records_point(30, PUBLIC)
    run.train()
    (point,) = [one for one in run.privacy_report()["open_points"] if "max_shared_records" in str(one)]
    assert "Up to 30 of the private records may occur in the public text public.txt" in str(point)
    assert shared_records_point(0, PUBLIC) == []


def test_a_model_that_a_private_run_of_this_process_trained_is_refused_or_declared(tmp_path):
    """Its weights hold the first run's steps, which the second run's ledger does not charge."""
    run = trainer(tmp_path / "a")
    run.train()
    with pytest.raises(ConfigError, match=f"trained earlier in this process by the private run of {tmp_path / 'a'}"):
        trainer(tmp_path / "b", run.model)
    declared = trainer(tmp_path / "d", run.model, start_is_independent=True)
    declared.train()
    assert any("trained earlier" in point for point in declared.privacy_report()["open_points"])
    adapter = get_peft_model(run.model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="trained earlier"):
        trainer(tmp_path / "c", adapter)


def test_a_model_that_an_adapter_of_a_private_run_was_merged_into_is_refused_or_declared(tmp_path):
    """Its weights hold the first run's steps, and none of its own modules was trained. Without the merge it is new."""
    config = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = get_peft_model(LlamaForCausalLM(tiny_llama_config()), config)
    trainer(tmp_path / "a", adapted).train()
    base = adapted.unload()
    other = get_peft_model(base, config)
    trainer(tmp_path / "b", other).train()
    again = get_peft_model(other.unload(), config)
    with torch.no_grad():
        again.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(0.1)
    merged = get_peft_model(again.merge_and_unload(), config)
    with pytest.raises(ConfigError, match=rf"changed in this process after the private run of {tmp_path / 'a'}"):
        trainer(tmp_path / "c", merged)
    declared = trainer(tmp_path / "d", merged, start_is_independent=True)
    declared.train()
    assert any("changed in this process" in point for point in declared.privacy_report()["open_points"])


def test_an_adapter_that_was_trained_before_is_an_open_point(tmp_path, monkeypatch):
    """As another process loads it: no name leads to the earlier run. A new adapter is none, nor a run that goes on."""
    base = LlamaForCausalLM(tiny_llama_config())
    base.save_pretrained(tmp_path / "base")

    def points(run):
        return [point for point in run.privacy_report()["open_points"] if "was trained before this run" in point]

    def new():
        model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))

    saving = arguments(tmp_path / "a", save_strategy="steps", save_steps=2)
    first = trainer(tmp_path / "a", new(), args=saving, callbacks=[Stop()])
    first.train()
    first.save_model()
    monkeypatch.setattr("dpllm.models.run_weights._RUNS", [])
    start = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(start, tmp_path / "a", is_trainable=True)
    second = trainer(tmp_path / "b", loaded)
    second.train()
    (point,) = points(second)
    assert "The adapter 'default' was trained before this run" in point
    resumed = trainer(tmp_path / "a", new(), args=saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.ledger.num_steps == 4 and points(first) == points(resumed) == []


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (LoraConfig(r=2, target_modules=["q_proj"]), "lora_B"),
        (LoraConfig(r=2, target_modules=["embed_tokens"]), "lora_embedding_A"),
        (AdaLoraConfig(target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1), "lora_E"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "ia3_l"),
        (VeraConfig(target_modules=["q_proj"], r=2), "vera_lambda_b"),
        (OFTConfig(target_modules=["q_proj"], oft_block_size=4, r=0), "oft_R"),
        (LoHaConfig(target_modules=["q_proj"], r=2), "hada_w2_b"),
        (LoKrConfig(target_modules=["q_proj"], r=2), "lokr_w1"),
        (LNTuningConfig(target_modules=["norm"]), "ln_tuning_layers"),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "modules_to_save"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]), "trainable_tokens_delta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_only_a_new_adapter_begins_at_nothing(config, part):
    """An open point exactly where the adapter changes the model at its start."""
    model = get_peft_model(LlamaForCausalLM(tiny_llama_config()), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert check_start(model, None, False, optimizer) == []
    (first, *_) = [p for name, p in model.named_parameters() if part in name]
    with torch.no_grad():
        first.view(-1)[-1] += 0.5
    (point,) = check_start(model, None, False, optimizer)
    assert f"its {part} differs" in point


def test_a_callback_of_ones_own_is_an_open_point(tmp_path):
    """It reads exact losses, and may let the training follow them; those of transformers are known."""

    class Reading(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            self.is_large = logs.get("loss", 0) > 1

    run = trainer(tmp_path, callbacks=[Reading()])
    run.train()
    points = [point for point in run.privacy_report()["open_points"] if "callback" in point]
    assert len(points) == 1 and "Reading runs during training" in points[0]
