"""Whole runs on a quantised base, as a stranger sets them up: `BitsAndBytesConfig`, PEFT and `DPTrainer`."""

import json
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback

from dpllm import DPTrainer
from dpllm.config import ConfigError
from dpllm.engines import EngineError
from dpllm.ghost import GhostError
from dpllm.models.merging import MERGED_FOLDER
from dpllm.report.verify import verify
from dpllm.training.checks.watch import WatchError
from tests.models.quantized import batch, save_model
from tests.mutations import kills
from tests.tiers import deep_case
from tests.training.test_trainer import Stop, arguments, privacy

bnb = pytest.importorskip("bitsandbytes", reason="pip install 'dpllm[quantization]'")
pytestmark = [
    pytest.mark.usefixtures("rows_not_compared"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True, "llm_int8_threshold": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("base"))


def model_of(base, prepared=False, **config):
    """A model as QLoRA's own programs make it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**config))
    if prepared:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    return get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def rows(count=48):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (count,), generator=generator)
    ids = [torch.randint(3, 250, (int(n),), generator=generator).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer(folder, model, args=None, **more):
    return DPTrainer(
        model=model,
        args=arguments(folder, max_steps=2, **(args or {})),
        privacy=more.pop("config", privacy()),
        train_dataset=rows(),
        **more,
    )


def facts(folder):
    report = json.loads((folder / "privacy_report.json").read_text())
    return {fact["name"]: fact["values"] for fact in report["definition"]["facts"]}


@pytest.mark.compares_rows
@pytest.mark.parametrize(
    ("config", "optim", "prepared"),
    [
        (NF4, "paged_adamw_8bit", True),
        deep_case(NF4, "adamw_8bit", False),
        deep_case(INT8, "paged_adamw_32bit", False),
        deep_case(INT8, "adamw_torch", True),
        deep_case({**NF4, "bnb_4bit_compute_dtype": torch.bfloat16}, "paged_lion_8bit", False),
    ],
)
def test_a_run_with_evaluations_ends_with_an_adapter_and_a_merged_model_that_verify(
    tmp_path, base, config, optim, prepared
):
    """Checkpointing, norms in float32, moments of 8 bits, a stored form in the report; all rows are compared."""
    args = {"optim": optim, "gradient_checkpointing": prepared, "eval_strategy": "steps", "eval_steps": 1}
    public = Dataset.from_dict({"input_ids": [[5, 6, 7]], "labels": [[5, 6, 7]]})
    more = {"eval_dataset": public, "eval_is_public": True, "merge_adapter": True}
    run = trainer(tmp_path, model_of(base, prepared, **config), args, **more)
    run.train()
    run.save_model()
    assert run.state.global_step == 2
    for folder in (tmp_path, tmp_path / MERGED_FOLDER):
        assert [found for found in verify(folder).checks if not found.ok] == []
    assert "bitsandbytes" in facts(tmp_path)["frozen weights are stored as"][0]
    card = (tmp_path / MERGED_FOLDER / "README.md").read_text()
    assert "AutoModelForCausalLM.from_pretrained" in card and "PeftModel" not in card
    ids = batch()["ids"]
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / MERGED_FOLDER).train()(ids).logits
        adapted = run.model.train()(ids).logits
    exact = config.get("bnb_4bit_compute_dtype") is None
    torch.testing.assert_close(whole, adapted, rtol=0, atol=1e-4 if exact else 0.2)


@kills(
    "the merged model is not named in the ledger",
    "dpllm/training/trainer_outputs.py",
    "note_release(self.ledger, folder / MERGED_FOLDER, merged_before)",
    "pass",
)
def test_a_merged_model_is_a_release_and_no_new_start_and_is_found_when_it_was_changed(tmp_path, base):
    """Its files are named by hash, in the ledger of the run and in its own copy.

    The folder has the ledger; another run that begins there would state its own ε only.
    """
    run = trainer(tmp_path, model_of(base, **NF4), merge_adapter=True)
    run.train()
    run.save_model()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / MERGED_FOLDER)
    with pytest.raises(ConfigError, match="merged, a private run"):
        trainer(tmp_path / "second", again)
    del again  # its weights are mapped from the file that is changed below
    for folder in (tmp_path, tmp_path / MERGED_FOLDER):
        assert [found for found in verify(folder).checks if not found.ok] == []
    weights = tmp_path / MERGED_FOLDER / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    for folder in (tmp_path, tmp_path / MERGED_FOLDER):
        wrong = [found for found in verify(folder).checks if not found.ok]
        assert len(wrong) == 1 and "model.safetensors" in wrong[0].detail


@pytest.mark.parametrize("config", [NF4, INT8, {"load_in_8bit": True}], ids=["nf4", "int8", "outliers"])
def test_one_unit_at_a_time_takes_any_form(tmp_path, base, config):
    """Outlier columns are then chosen over the rows of one unit; nothing else may keep numbers between calls."""
    run = trainer(tmp_path, model_of(base, **config), config=privacy(gradients="per_unit"))
    run.train()
    assert run.state.global_step == 2


@pytest.mark.parametrize("config", [NF4, deep_case(INT8)], ids=["nf4", "int8"])
def test_a_run_is_resumed_on_a_base_that_is_quantised_again(tmp_path, base, config):
    """The checkpoint holds the adapter, and moments of 8 bits; the base comes from its own files."""
    saving = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_8bit", "learning_rate": 1e-2}
    trainer(tmp_path, model_of(base, **config), saving, callbacks=[Stop(1)]).train()
    shutil.rmtree(tmp_path / "checkpoint-2", ignore_errors=True)
    again = trainer(tmp_path, model_of(base, **config), saving)
    again.train(resume_from_checkpoint=True)
    again.save_model()
    assert again.state.global_step == 2 and again.ledger.num_steps == 2
    assert [found for found in verify(tmp_path).checks if not found.ok] == []
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)


def test_outlier_columns_of_8_bits_are_refused_before_a_step_is_charged(tmp_path, base):
    """The default of load_in_8bit."""
    run = trainer(tmp_path / "run", model_of(base, load_in_8bit=True))
    with pytest.raises(GhostError, match="BitsAndBytesConfig"):
        run.train()
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


class Rescale(TrainerCallback):
    """Writes to the scales of a frozen weight, which is neither parameter nor buffer."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        layer = next(m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit))
        layer.weight.quant_state.absmax.add_(1)


class MergeInPlace(TrainerCallback):
    """Writes the trained adapter into the frozen weights, which are quantised again."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        model.merge_adapter()


@pytest.mark.parametrize("callback", [Rescale, MergeInPlace])
@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear may get different generations:UserWarning")
def test_frozen_weights_that_are_written_end_the_run(tmp_path, base, callback):
    """Also through tensors that PyTorch does not count among the model's."""
    run = trainer(tmp_path, model_of(base, **NF4), callbacks=[callback()])
    with pytest.raises(WatchError, match=r"q_proj\.base_layer\.weight"):
        run.train()


@kills(
    "weights that were calibrated with texts raise no question",
    "dpllm/models/starting_point.py",
    "points += [*calibration_points(model), *_own_code(model)]",
    "points += _own_code(model)",
)
def test_a_base_quantised_with_texts_is_an_open_point(tmp_path, base):
    """GPTQ and AWQ choose the weights by activations of sample texts."""
    model = model_of(base, **NF4)
    model.get_base_model().config.quantization_config = {"quant_method": "gptq", "bits": 4, "dataset": "c4"}
    run = trainer(tmp_path, model)
    run.train()
    run.save_model()
    (point,) = [one for one in run.privacy_report()["open_points"] if "gptq" in one]
    assert "names 'c4'" in point and point in (tmp_path / "README.md").read_text()
    assert facts(tmp_path)["frozen weights are stored as"] == ["gptq, as the weights came (4 bits)"]


def test_a_model_that_was_sharded_by_hand_is_refused(tmp_path, base):
    """Whatever way led to the engine."""
    from dpllm.engines import engine_for

    model = model_of(base, **NF4)
    model.__class__ = type("DeepSpeedEngine", (type(model),), {"module": property(lambda self: self.base_model)})
    with pytest.raises(EngineError, match="Params4bit"):
        engine_for(model, None)
