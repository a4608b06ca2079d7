"""Quantised bases: rows stay apart, frozen weights stay as they are, and what is not exact is refused by name."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from dpllm import GhostClipper
from dpllm.config import ConfigError, ModelConfig
from dpllm.ghost import GhostError
from dpllm.ghost.refusals import is_packed, scales_of
from dpllm.models.load import load_model, load_tokenizer
from dpllm.models.quantization import calibration_points, make_ready, refuse_sharding, stored_as
from dpllm.training.checks.watch import Watch, WatchError
from tests.ghost.loop import flat, row_gradients
from tests.models.quantized import KINDS, adapted, batch, losses, save_model
from tests.mutations import kills

bnb = pytest.importorskip("bitsandbytes", reason="pip install 'dpllm[quantization]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

# Processors round the products of a row alone and of four rows differently: the logits of these models, without dpllm,
# differ by up to 6e-6. A run refuses 2e-5; the smallest difference that a coupling of rows was seen to make is 4.6e-4.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"))


def watch_of(model):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Watch(model, torch.optim.SGD(trained.values(), lr=0.1), trained)


def norms_of(model, inputs):
    clipper = GhostClipper(model, 1.0)
    try:
        return clipper.backward(losses(model, inputs)).norms.double()
    finally:
        clipper.remove()
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_unit_has_the_same_norm_alone_and_in_company(folder, kind, checkpointing):
    """Also beside a row of one repeated token, and by plain autograd of single rows; the sum is clipped as the loop."""
    model = adapted(folder, kind)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    inputs = batch()
    inputs["ids"][3] = 7
    rows = row_gradients(model, losses, inputs)
    together = norms_of(model, inputs)
    alone = torch.cat([norms_of(model, {"ids": inputs["ids"][row : row + 1]}) for row in range(4)])
    torch.testing.assert_close(together, alone, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(together, rows.norm(dim=1), rtol=ROUNDING, atol=0)
    clipper = GhostClipper(model, float(together.median()))
    result = clipper.backward(losses(model, inputs))
    clipper.remove()
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = result.factors.double() @ rows
    assert float((flat([p.grad for p in trained], trained) - expected).norm()) <= ROUNDING * float(expected.norm())
    assert all(p.grad is None for p in model.parameters() if is_packed(p))


def test_outlier_columns_of_8_bits_are_refused_and_the_remedy_holds(folder):
    """The default of BitsAndBytesConfig; without outlier columns the model is accepted and exact (the test above)."""
    wrong = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(GhostError, match=r"llm_int8_threshold=0\.0"):
        GhostClipper(wrong, 1.0)
    remedy = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    GhostClipper(AutoModelForCausalLM.from_pretrained(folder, quantization_config=remedy), 1.0).remove()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_evaluation_leaves_the_stored_weights_and_their_backward_pass(folder, kind):
    """On some processors bitsandbytes would rewrite 4-bit weights at the first call without gradients."""
    model = adapted(folder, kind)
    watch = watch_of(model)
    model.eval()
    with torch.no_grad():
        losses(model, batch())
    model.train()
    losses(model, batch()).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    watch.check_everything()


def test_a_bias_is_converted_before_the_run(tmp_path):
    """bitsandbytes converts it to the type of the products at the first call."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, "gpt2"), quantization_config=config)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).train()
    make_ready(model)
    watch = watch_of(model)
    losses(model, batch()).sum().backward()
    watch.check_everything()
    assert {p.dtype for name, p in model.named_parameters() if name.endswith("c_attn.base_layer.bias")} == {
        torch.bfloat16
    }


@kills(
    "scales of quantised weights are not watched",
    "dpllm/training/checks/watch.py",
    "_SCALE: scales_of(module)",
    "_SCALE: {}",
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scales_of_quantised_weights_are_watched_like_the_weights(folder, kind):
    """They are neither parameters nor buffers, and decide the values of the weights."""
    model = adapted(folder, kind)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")
    scales = scales_of(layer)
    double = ["weight.nested_absmax", "weight.nested_code", "weight.offset"]
    of_4_bits = ["weight.absmax", "weight.code", *(double if kind == "nf4" or kind == "fp4" else [])]
    assert sorted(scales) == (["SCB"] if kind == "int8" else sorted(of_4_bits))
    watch = watch_of(model)
    watch.check_everything()
    next(iter(scales.values())).add_(1)
    with pytest.raises(WatchError, match=r"q_proj\.base_layer"):
        watch.check_everything()


def test_weights_in_a_layout_without_a_backward_pass_are_refused(folder):
    """Before anything is charged; a stranger may have evaluated the model before."""
    model = adapted(folder, "nf4")
    layer = model.get_submodule("base_model.model.model.layers.1.mlp.up_proj.base_layer")
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.base_layer"):
        make_ready(model)


@kills("a quantised weight may be trained", "dpllm/ghost/parameters.py", "if is_packed(parameter):", "if False:")
def test_a_quantised_weight_is_never_trained():
    """Packed values may have a floating type (bnb_4bit_quant_storage), with which PyTorch allows a gradient."""
    layer = bnb.nn.Linear4bit(64, 64, quant_storage=torch.float32).to("cpu")
    model = nn.Sequential(nn.Linear(64, 64), layer)
    GhostClipper(model.requires_grad_(False)[0].requires_grad_(True), 1.0).remove()
    layer.weight.requires_grad_(True)
    with pytest.raises(GhostError, match="Params4bit"):
        GhostClipper(model, 1.0)
    trained = nn.Sequential(bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=True))
    with pytest.raises(GhostError, match="Int8Params"):
        GhostClipper(trained, 1.0)


def test_the_head_of_a_classifier_is_new_and_is_not_quantised(tmp_path):
    """transformers would quantise a head of two layers, which could not be trained then."""
    folder = save_model(tmp_path, "roberta")
    model = adapted(folder, "nf4", task="sequence_classification", num_labels=2)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if name.endswith(".dense")}
    assert {kind for name, kind in kinds.items() if "classifier" in name} == {"Linear"}
    assert "Linear4bit" in {type(module).__name__ for module in model.modules()}
    trained = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    assert trained and all("classifier.modules_to_save" in name for name in trained)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config` or equivalent parameters:UserWarning")
def test_files_that_are_quantised_already_are_used_as_they_are(folder, tmp_path):
    """A recipe that names another form, or no adapter, is told so: transformers would only log a line."""
    adapted(folder, "nf4").unload().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    for given in (None, "nf4"):
        assert stored_as(adapted(str(tmp_path), given)) == "nf4 (bitsandbytes, scales quantised to 8 bits)"
    for given in ("fp4", {"kind": "nf4", "double": False}, "int8"):
        with pytest.raises(ConfigError, match="quantised already"):
            adapted(str(tmp_path), given)
    model = ModelConfig(name=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        load_model(model, load_tokenizer(model))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nf4", "nf4 (bitsandbytes, scales quantised to 8 bits)"),
        ({"kind": "fp4", "double": False}, "fp4 (bitsandbytes)"),
        ("int8", "int8 (bitsandbytes, no outlier columns)"),
    ],
    ids=str,
)
def test_the_stored_form_is_named_and_has_no_question(folder, kind, words):
    """The scales of bitsandbytes are computed from the weights only."""
    model = adapted(folder, kind)
    assert stored_as(model) == words and calibration_points(model) == []


def calibrated(**config):
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(quantization_config=config)
    return model


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "auto-round", "a later method"])
def test_a_calibrated_base_is_accepted_with_the_question_where_its_texts_came_from(method):
    """Their stored weights follow activations of sample texts, which may be private records."""
    model = calibrated(quant_method=method, bits=4)
    (point,) = calibration_points(model)
    assert point.startswith(f"The frozen weights were quantised by {method}, which is usually calibrated")
    assert "confirm that the calibration data are public" in point
    assert stored_as(model) == f"{method}, as the weights came (4 bits)"


def test_the_question_names_the_calibration_data_but_does_not_print_texts():
    """A list of texts may be the private records themselves."""
    assert "names 'c4'" in calibration_points(calibrated(quant_method="gptq", dataset="c4"))[0]
    point = calibration_points(calibrated(quant_method="gptq", dataset=["my secret", "another"]))[0]
    assert "names 2 texts" in point and "secret" not in point
    assert calibration_points(nn.Linear(2, 2)) == [] and stored_as(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    ("args", "launched", "shards"),
    [
        (SimpleNamespace(deepspeed_plugin=object()), "false", "DeepSpeed"),
        (SimpleNamespace(deepspeed_plugin=None), "true", "FSDP"),
        (SimpleNamespace(deepspeed_plugin=None, fsdp="full_shard"), "false", "FSDP"),
    ],
)
def test_quantised_weights_are_not_sharded(folder, monkeypatch, args, launched, shards):
    """Not verified, so refused before a model is distributed; a model that is not quantised passes."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", launched)
    for model in (None, adapted(folder, "nf4")):
        with pytest.raises(ConfigError, match=f"quantised, and private sums were not verified for {shards}"):
            refuse_sharding(model, args)
    refuse_sharding(nn.Linear(2, 2), args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    refuse_sharding(None, SimpleNamespace(deepspeed_plugin=None))
