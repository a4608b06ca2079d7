"""The merged model computes what the base with its adapter computes, and is an ordinary model without quantisation."""

from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from dpllm.config import ConfigError
from dpllm.models.merging import merged, refuse_unmergeable
from tests.models.quantized import adapted, batch, save_model
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
    model = adapted(save_model(tmp_path), "nf4", peft={"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]})
    head = next(p for name, p in model.named_parameters() if "lm_head.modules_to_save" in name)
    with torch.no_grad():
        head.add_(1)
    torch.testing.assert_close(merged(model).get_output_embeddings().weight, head, rtol=0, atol=0)
    torch.testing.assert_close(logits(merged(model)), logits(model), rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_merged_are_refused_before_the_training(tmp_path):
    """The training would end without the model that was asked for."""
    folder = save_model(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ConfigError, match="the model has no adapter: leave merge_adapter out"):
        refuse_unmergeable(base, NO_SHARDS)
    scaled = get_peft_model(base, IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match="adds a LoRA adapter to the weights, and the model has IA3"):
        refuse_unmergeable(scaled, NO_SHARDS)
    with pytest.raises(ConfigError, match="an adapter with use_dora changes a quantised weight by more than a sum"):
        refuse_unmergeable(adapted(folder, "nf4", peft={"use_dora": True}), NO_SHARDS)
    whole = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(ConfigError, match="needs the whole model on one process, and DeepSpeed shards it"):
        refuse_unmergeable(whole, SimpleNamespace(deepspeed_plugin=object()))
