"""Ways of choosing experts that couple rows are refused before anything is computed, with the reason."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from dpllm import GhostClipper, GhostError
from tests.mutations import kills
from tests.reference.zoo import FAMILIES

SMALL = {"vocab_size": 60, "d_model": 16, "d_ff": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8}


def switch():
    """Experts with a capacity."""
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**SMALL, num_experts=2, num_decoder_layers=2, num_sparse_encoder_layers=1)
    )


def nllb():
    """Tokens that are dropped by priority."""
    config = transformers.NllbMoeConfig(
        vocab_size=60,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_experts=2,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    return transformers.NllbMoeForConditionalGeneration(config)


def mixtral(**settings):
    """A Mixtral of a changed config."""
    config = FAMILIES["mixtral"].make(False).config
    for name, value in settings.items():
        setattr(config, name, value)
    return transformers.MixtralForCausalLM(config)


class Holder(nn.Module):
    """A block that holds an option of its router."""

    def __init__(self, **options):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        vars(self).update(options)


REFUSED = {
    "capacity": (switch, r"SwitchTransformers.*drops tokens beyond its capacity"),
    "batch priority": (nllb, r"NllbMoe.*(drops tokens|tokens of all rows compete)"),
    "jitter": (lambda: mixtral(router_jitter_noise=0.1), r"jitter_noise=0\.1.*router_jitter_noise=0"),
    "router loss": (lambda: mixtral(output_router_logits=True), r"config\.output_router_logits"),
    "another library's gate": (lambda: type("TopKGate", (Holder,), {})(), "a limited number of the tokens"),
    "expert choice": (lambda: Holder(use_expert_choice=True), r"expert choice.*use_expert_choice=True"),
    "prioritised": (lambda: Holder(batch_prioritized_routing=True), "tokens of all rows compete"),
    "capacity factor": (lambda: Holder(capacity_factor=1.25), r"capacity \(capacity_factor=1\.25\)"),
    "DBRX's jitter": (lambda: Holder(moe_jitter_eps=0.01), r"moe_jitter_eps=0\.01"),
    "Phi-MoE's jitter": (lambda: Holder(input_jitter_noise=0.01), r"input_jitter_noise=0\.01"),
}


@kills(
    "experts with a capacity are accepted",
    "dpllm/ghost/refusals.py",
    '("expert_capacity", "capacity_factor", ',
    '("expert_capacity", ',
)
@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_a_choice_of_experts_that_couples_rows_is_refused(make, match):
    """The path, the option and the remedy; also where nothing of it is trained."""
    torch.manual_seed(0)
    model = make()
    with pytest.raises(GhostError, match=match):
        GhostClipper(model, 1.0)
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(False)
    with pytest.raises(GhostError, match=match):
        GhostClipper(model, 1.0)


def test_a_router_loss_of_an_inner_model_is_refused():
    """A vision-language model keeps the option in its text config."""
    inner = type("Config", (), {"output_router_logits": True})()
    model = Holder()
    model.config = type("Config", (), {"sub_configs": {"text_config": None}, "text_config": inner})()
    with pytest.raises(GhostError, match=r"config\.text_config\.output_router_logits"):
        GhostClipper(model, 1.0)


@pytest.mark.parametrize(
    "options", [{"capacity_factor": None}, {"expert_capacity": 0}, {"jitter_noise": 0.0}, {"expert_choice": False}]
)
def test_options_that_are_off_are_accepted(options):
    """Only an option in use couples rows."""
    GhostClipper(Holder(**options), 1.0).remove()
