"""Weights that were trained or edited before a run, or before its first step, are found; ordinary models are not."""

import contextlib
import io
import shutil

import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Trainer,
    TrainerCallback,
)

from dpllm import PrivateRun
from dpllm.config import ConfigError
from dpllm.models.start_weights import WeightSample, edited_weights
from dpllm.models.starting_point import check_start, edited_start
from tests.conftest import tiny_llama_config
from tests.mutations import kills
from tests.tiers import SHARED, needs_shared_data
from tests.training.test_run import network, plan_of, rows_of
from tests.training.test_trainer import arguments, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")
STORIES = SHARED / "stories260K"
LORA = {"r": 2, "target_modules": ["q_proj"]}
of_each_kind = pytest.mark.parametrize("kind", ["causal", "base", "classes"])
LOADED = {"causal": AutoModelForCausalLM, "base": AutoModel, "classes": AutoModelForSequenceClassification}


def loaded(kind="causal", folder=STORIES, **options):
    return LOADED[kind].from_pretrained(folder, **options)


def tiny():
    return LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1))


def points(run):
    with contextlib.redirect_stdout(io.StringIO()):
        run.train()
    return [point for point in run.privacy_report()["open_points"] if "starting weights" in point]


def sgd_step(model, rate=1e-2):
    """A loop of one's own."""
    ids = torch.arange(8, 24)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    model.zero_grad()
    return model


def by_trainer(model, folder, **changes):
    args = arguments(folder, max_steps=2, **changes)
    same = Dataset.from_dict({"input_ids": [list(range(5, 13))] * 16, "labels": [list(range(5, 13))] * 16})
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(model=model, args=args, train_dataset=same).train()
    return model


def merged(model, folder):
    """An adapter that was trained elsewhere, added to the weights."""
    adapted = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))
    return adapted.merge_and_unload().requires_grad_(True)


def replaced(model, folder):
    """The weights of another training, under the name of the first."""
    torch.manual_seed(1)
    model.load_state_dict(AutoModelForCausalLM.from_config(model.config).state_dict())
    return model


def averaged(model, folder):
    other = sgd_step(loaded())
    with torch.no_grad():
        for mine, one in zip(model.parameters(), other.parameters(), strict=True):
            mine.lerp_(one, 0.5)
    return model


@needs_shared_data
@pytest.mark.parametrize("how", [merged, replaced, averaged, lambda model, folder: sgd_step(model)])
def test_a_model_that_was_trained_or_edited_in_an_earlier_cell_is_an_open_point(how, tmp_path):
    """Its name still leads to the public files."""
    model = how(loaded(), tmp_path)
    (point,) = edited_start(model, start_is_independent=False)
    assert "differ from the files of stories260K" in point and str(STORIES) not in point
    assert edited_start(model, start_is_independent=True) == []


@needs_shared_data
@pytest.mark.parametrize("declared", [False, True])
def test_a_private_run_after_a_plain_one_has_an_open_point_or_a_declaration(declared, tmp_path):
    """Of the same model. Declared independent, it is a fact of the report."""
    run = trainer(tmp_path / "a", by_trainer(loaded(), tmp_path / "plain"), start_is_independent=declared)
    assert len(points(run)) == (not declared)
    facts = {fact["name"]: fact["values"] for fact in run.privacy_report()["definition"]["facts"]}
    assert facts.get("starting weights") == (["declared independent of the private rows"] if declared else None)


def half_and_back(model):
    return model.half().float()


def resized(size):
    def resize(model):
        model.resize_token_embeddings(size)
        return model

    return resize


def with_adapter(model, **options):
    return get_peft_model(model, LoraConfig(**LORA, **options))


class Own(nn.Module):
    """A module of one's own around a model of transformers."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(4, 4)


ORDINARY = {
    "as loaded": lambda model: model,
    "bfloat16": lambda model: model.bfloat16(),
    "half precision and back": half_and_back,
    "more tokens": resized(600),
    "fewer tokens": resized(300),
    "LoRA": with_adapter,
    "PiSSA": lambda model: with_adapter(model, init_lora_weights="pissa"),
    "a saved module": lambda model: with_adapter(model, modules_to_save=["norm"]),
    "in a module": Own,
    "in training mode": lambda model: model.train(),
}


@needs_shared_data
@of_each_kind
@pytest.mark.parametrize("made", ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_model_has_the_weights_of_its_files(made, kind):
    """Casts, new heads, new tokens and adapters are not edits; PiSSA moves a part of the weights into the adapter."""
    assert edited_weights(made(loaded(kind))) == []


@needs_shared_data
@of_each_kind
@pytest.mark.parametrize("made", ["bfloat16", "more tokens", "LoRA", "a saved module", "in a module"])
def test_an_edit_is_seen_through_what_is_ordinary(made, kind):
    """Before it, as in an earlier cell of a notebook."""
    model = loaded(kind)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.01)
    ((name, names),) = edited_weights(ORDINARY[made](model))
    assert name == str(STORIES) and len(names) == 1 and "embed_tokens" in names[0]


@needs_shared_data
def test_a_model_without_files_of_its_own_is_not_compared():
    """New weights of the same configuration keep its name; a model without a name has no files."""
    torch.manual_seed(0)
    new = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(STORIES))
    assert new.config._name_or_path == str(STORIES) and edited_weights(new) == []
    assert edited_weights(tiny()) == edited_weights(nn.Linear(2, 2)) == edited_weights(None) == []


@needs_shared_data
@pytest.mark.parametrize("form", ["shards", "torch", "shards of torch", "another prefix", "half"])
def test_files_of_every_form_are_compared(form, tmp_path):
    """Only what an edit changed is named."""
    model = loaded()
    if "torch" in form:
        model.save_pretrained(tmp_path)
        state = {name: one.clone() for name, one in model.state_dict().items() if name != "lm_head.weight"}
        names = sorted(state)
        parts = (names[:20], names[20:]) if "shards" in form else (names,)
        for number, part in enumerate(parts, 1):
            end = f"-{number:05}-of-{len(parts):05}" if len(parts) > 1 else ""
            torch.save({name: state[name] for name in part}, tmp_path / f"pytorch_model{end}.bin")
        (tmp_path / "model.safetensors").unlink()
    elif form == "another prefix":
        loaded("base").save_pretrained(tmp_path)
    else:
        (model.half() if form == "half" else model).save_pretrained(tmp_path, max_shard_size="200KB")
    if "shards" not in form or "torch" not in form:
        model = loaded(folder=tmp_path, dtype=torch.float32)
    else:
        model.config._name_or_path = str(tmp_path)
    assert edited_weights(model) == []
    with torch.no_grad():
        model.model.layers[3].self_attn.k_proj.weight.mul_(1.5)
    ((_, names),) = edited_weights(model)
    assert names == ["model.layers.3.self_attn.k_proj.weight"]


@needs_shared_data
def test_any_revision_in_the_cache_of_the_hub_may_have_been_loaded(tmp_path, monkeypatch):
    """Which one was loaded is not written into the model; damaged files are not compared."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for revision, source in (("1", sgd_step(loaded())), ("2", loaded())):
        source.save_pretrained(tmp_path / "models--owner--stories" / "snapshots" / revision)
    model = loaded()
    model.config._name_or_path = "owner/stories"
    assert edited_weights(model) == []
    sgd_step(model)
    assert edited_weights(model) == []  # the first revision
    sgd_step(model)
    ((name, names),) = edited_weights(model)
    assert name == "owner/stories" and len(names) > 40
    for file in tmp_path.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    assert edited_weights(model) == []


@needs_shared_data
def test_a_loop_of_ones_own_has_the_open_point_too(tmp_path):
    """The module that is trained contains a model of transformers."""

    class Probe(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone, self.probe = backbone.requires_grad_(False), network()

        def forward(self, *args):
            return self.probe(*args)

    for name, model, expected in (("a", loaded(), 0), ("b", sgd_step(loaded()), 1)):
        run = PrivateRun.start(tmp_path / name, plan_of(), rows_of())
        whole = Probe(model)
        run.attach(whole, torch.optim.SGD(whole.probe.parameters(), lr=0.1), schedule_is_independent=True)
        report = run.finish()
        assert sum("starting weights differ" in point for point in report["open_points"]) == expected


TRACES = {
    "the Trainer's checkpoint": ("checkpoint-3/trainer_state.json", "checkpoint-3"),
    "its last folder": ("training_args.bin", "."),
    "its last folder with checkpoints": ("checkpoint-30/optimizer.pt", "."),
    "a folder that was saved beside checkpoints": ("checkpoint-30/trainer_state.json", "final"),
    "weights only": ("checkpoint-30/config.json", "checkpoint-30"),
    "accelerate": ("epoch_1/random_states_0.pkl", "epoch_1"),
    "DeepSpeed": ("zero_to_fp32.py", "."),
    "FSDP": ("optimizer_0/.metadata", "."),
    "LLaMA-Factory": ("trainer_log.jsonl", "."),
    "Lightning": ("lightning_logs/version_0/hparams.yaml", "."),
    "a log": ("runs/Nov29/events.out.tfevents.1", "."),
}


@needs_shared_data
@pytest.mark.parametrize("trace", TRACES)
def test_a_folder_of_ordinary_training_is_an_open_point(trace, tmp_path):
    """Nobody can tell from it which data were used; a folder without such files is none."""
    file, start = TRACES[trace]
    out = tmp_path / "out"
    (out / file).parent.mkdir(parents=True)
    (out / file).touch()
    (out / start).mkdir(exist_ok=True)
    for one in STORIES.iterdir():
        shutil.copy(one, out / start / one.name)
    model = loaded(folder=out / start)
    (point,) = check_start(model, None, False)
    assert "a sign of an earlier training" in point and str(tmp_path) not in point
    assert check_start(model, None, True) == []
    public = out.rename(tmp_path / "public_pretrain")  # which a recipe trains on public text
    assert check_start(loaded(folder=public / start), None, False) == check_start(loaded(), None, False) == []


@needs_shared_data
def test_the_checkpoint_of_a_plain_training_is_an_open_point_of_a_run(tmp_path):
    """Not of its public start."""
    by_trainer(loaded(), tmp_path / "plain", save_strategy="steps", save_steps=2)
    (point,) = points(trainer(tmp_path / "a", loaded(folder=tmp_path / "plain" / "checkpoint-2")))
    assert "come from checkpoint-2" in point
    assert points(trainer(tmp_path / "b", loaded())) == []


def prior(model):
    """A bias that is set to the frequencies of tokens."""
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.arange(len(model.lm_head.bias)).float().log1p())


def few_rows(model):
    """Embeddings of three words, written past the version counters."""
    model.get_input_embeddings().weight.data[[7, 30, 50]] += 0.5


def statistic(model):
    model.mean.fill_(0.3)


def with_bias():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
    model.register_buffer("mean", torch.zeros(3))
    return model


class Writing(TrainerCallback):
    def __init__(self, when, write):
        setattr(self, when, lambda args, state, control, model=None, **kwargs: write(model))


@pytest.mark.parametrize("write", [prior, few_rows, statistic])
@pytest.mark.parametrize("when", ["on_init_end", "on_train_begin", "on_epoch_begin", "between"])
def test_weights_that_are_written_before_the_first_step_are_refused_or_declared(when, write, tmp_path):
    """Numbers of all private rows could be in them, and no noise."""

    def run(name, **options):
        callbacks = [] if when == "between" else [Writing(when, write)]
        made = trainer(tmp_path / name, with_bias(), callbacks=callbacks, **options)
        if when == "between":
            write(made.model)
        return made

    with pytest.raises(ConfigError, match=r"changed .* outside of any private step"):
        run("a").train()
    declared = run("b", start_is_independent=True)
    declared.train()
    assert any("outside of any private step" in point for point in declared.privacy_report()["open_points"])


@kills(
    "a callback may write to weights before the first step",
    "dpllm/training/trainer.py",
    '        self._refuse_changed_start("at the beginning of the training, before the first step")\n',
    "",
)
def test_a_callback_that_writes_at_the_beginning_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at the beginning of the training"):
        trainer(tmp_path, with_bias(), callbacks=[Writing("on_train_begin", prior)]).train()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.bfloat16().float(),
        lambda model: model.tie_weights(),
        lambda model: model.gradient_checkpointing_enable(),
        lambda model: model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}),
        lambda model: model.requires_grad_(False).lm_head.requires_grad_(True),
    ],
    ids=["cast", "tied", "checkpointing", "the same state", "frozen"],
)
def test_what_moves_no_value_is_no_finding(change, tmp_path):
    model = with_bias()
    sample = WeightSample(model)
    change(model)
    assert sample.changed(model) == []


def test_a_run_that_goes_on_has_weights_of_its_checkpoint(tmp_path):
    """And its callbacks may not write to them either."""
    saving = arguments(tmp_path, save_strategy="steps", save_steps=2)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2
            return control

    trainer(tmp_path, tiny(), args=saving, callbacks=[Stop()]).train()
    resumed = trainer(tmp_path, tiny(), args=saving, callbacks=[Writing("on_train_begin", few_rows)])
    with pytest.raises(ConfigError, match="at the beginning of the training"):
        resumed.train(resume_from_checkpoint=True)
    trainer(tmp_path, tiny(), args=saving).train(resume_from_checkpoint=True)
