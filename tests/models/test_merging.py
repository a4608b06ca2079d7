"""The merged model computes what the base with its adapter computes, and is an ordinary model without quantisation."""

from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from dpllm.config import ConfigError
from dpllm.models.merging import _refuse_other_parts, merged, refuse_unmergeable
from tests.models.quantized import adapted, batch, save_model
from tests.reference.zoo import FAMILIES
from tests.tiers import deep_case

pytest.importorskip("bitsandbytes", reason="pip install 'dpllm[quantization]'")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
NO_SHARDS = SimpleNamespace(deepspeed_plugin=None)


def logits(model):
    with torch.no_grad():
        return model.train()(input_ids=batch()["ids"]).logits


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "nf4"), ("gpt2", "nf4"), deep_case("llama", "int8"), deep_case("gpt2", "int8"), ("llama", None)],
)
def test_it_computes_the_same_and_loads_as_an_ordinary_model(tmp_path, family, kind):
    """GPT-2 stores its matrices the other way round, and bitsandbytes does not."""
    model = adapted(save_model(tmp_path / "base", family), kind)
    refuse_unmergeable(model, NO_SHARDS)
    want, names = logits(model), [name for name, _ in model.named_parameters()]
    whole = merged(model)
    assert whole.config.to_dict().get("quantization_config") is None
    whole.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for module in again.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(logits(again), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model), want, rtol=0, atol=0)
    assert [name for name, _ in model.named_parameters()] == names


def test_parts_that_are_trained_as_a_whole_are_in_it(tmp_path):
    """A head of modules_to_save is not a sum of factors."""
    model = adapted(save_model(tmp_path), "nf4", adapter={"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]})
    head = next(p for name, p in model.named_parameters() if "lm_head.modules_to_save" in name)
    with torch.no_grad():
        head.add_(1)
    torch.testing.assert_close(merged(model).get_output_embeddings().weight, head, rtol=0, atol=0)
    torch.testing.assert_close(logits(merged(model)), logits(model), rtol=1e-4, atol=1e-4)


def test_adapters_of_experts_are_merged_and_with_a_quantised_base_refused():
    """Stacks of experts are parameters without a layer; `merged` failed on them after the training."""
    targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}
    config = LoraConfig(r=2, init_lora_weights=False, **targets)
    model = get_peft_model(FAMILIES["mixtral"].make(False), config).eval()
    refuse_unmergeable(model, NO_SHARDS)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(model)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="ParamWrapper"):
        _refuse_other_parts(model)


def test_adapters_that_cannot_be_merged_are_refused_before_the_training(tmp_path):
    """The training would end without the model that was asked for."""
    folder = save_model(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match="leave merge_adapter"):
        refuse_unmergeable(base, NO_SHARDS)
    scaled = get_peft_model(base, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match="LoRA adapter"):
        refuse_unmergeable(scaled, NO_SHARDS)
    with pytest.raises(ConfigError, match="use_dora"):
        refuse_unmergeable(adapted(folder, "nf4", adapter={"use_dora": True}), NO_SHARDS)
    tokens = {"trainable_token_indices": {"embed_tokens": [1, 2]}, "target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match="embed_tokens"):
        refuse_unmergeable(adapted(folder, "nf4", adapter=tokens), NO_SHARDS)
    refuse_unmergeable(adapted(folder, None, adapter=tokens), NO_SHARDS)
    whole = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(ConfigError, match="DeepSpeed shards"):
        refuse_unmergeable(whole, SimpleNamespace(deepspeed_plugin=object()))


@pytest.mark.filterwarnings("ignore:.*tied layer is part of the adapter")
@pytest.mark.parametrize(("name", "other"), [("embed_tokens", "lm_head"), ("lm_head", "embed_tokens")])
def test_an_adapter_of_one_of_two_tied_layers_is_refused(name, other, tmp_path):
    """The sum would change both: the merged model had other logits by 20 to 90."""
    config = AutoConfig.from_pretrained(save_model(tmp_path))
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=rf"{name} has an adapter, and shares its weight with \S*{other}"):
        refuse_unmergeable(get_peft_model(model, LoraConfig(target_modules=["q_proj", name])), NO_SHARDS)
    model = AutoModelForCausalLM.from_config(config)
    refuse_unmergeable(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), NO_SHARDS)
