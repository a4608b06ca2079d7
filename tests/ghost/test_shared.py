"""Soft prompts, which PEFT computes once for all rows: each row has a separate gradient."""

import pytest
import torch
from peft import (
    CPTConfig,
    MultitaskPromptTuningConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from dpllm import GhostClipper, GhostError
from dpllm.ghost import NormMethod
from dpllm.models.losses import per_sequence_loss, seq2seq_loss
from dpllm.models.tasks import default_row_loss
from tests.conftest import tiny_llama_config
from tests.ghost.loop import assert_is_the_loop, perturbed

# PEFT's prefix tuning uses the name that transformers 5.24 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

TOKENS = 4
HIDDEN = {"num_virtual_tokens": TOKENS, "encoder_hidden_size": 8}
CONFIGS = {
    "prompt tuning": lambda task: PromptTuningConfig(task_type=task, num_virtual_tokens=TOKENS),
    "p-tuning, MLP": lambda task: PromptEncoderConfig(task_type=task, **HIDDEN),
    "p-tuning, LSTM": lambda task: PromptEncoderConfig(
        task_type=task, **HIDDEN, encoder_reparameterization_type="LSTM", encoder_dropout=0.0
    ),
    "prefix tuning": lambda task: PrefixTuningConfig(task_type=task, num_virtual_tokens=TOKENS),
    "prefix tuning, MLP": lambda task: PrefixTuningConfig(task_type=task, **HIDDEN, prefix_projection=True),
    "several tasks": lambda task: MultitaskPromptTuningConfig(
        task_type=task, num_virtual_tokens=TOKENS, num_tasks=2, num_ranks=2
    ),
}


def causal(name):
    torch.manual_seed(1)
    model = LlamaForCausalLM(tiny_llama_config(use_cache=False))
    return perturbed(get_peft_model(model, CONFIGS[name]("CAUSAL_LM")))


def losses(model, batch):
    tasks = {"task_ids": batch["tasks"]} if model.active_peft_config.peft_type == "MULTITASK_PROMPT_TUNING" else {}
    mask = torch.ones_like(batch["ids"])
    logits = model(input_ids=batch["ids"], attention_mask=mask, **tasks).logits
    return per_sequence_loss(logits[:, -batch["ids"].shape[1] :], batch["ids"])


def batch_of(rows=4):
    ids = torch.randint(3, 61, (rows, 7), generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "tasks": torch.arange(rows) % 2}


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_soft_prompts_match_the_loop(name, passes):
    """Norms and sum, over several microbatches."""
    assert_is_the_loop(causal(name), losses, batch_of(), NormMethod(backward_passes=passes), microbatches=2)


@pytest.mark.parametrize("name", ["prompt tuning", "p-tuning, MLP", "prefix tuning"])
def test_units_of_several_rows_match_the_loop(name):
    """Cross terms between the rows of a unit."""
    assert_is_the_loop(causal(name), losses, batch_of(), unit_index=torch.tensor([0, 1, 0, 2]))


@pytest.mark.parametrize("name", ["prompt tuning", "p-tuning, LSTM", "prefix tuning"])
def test_a_microbatch_of_one_row(name):
    """There the prompt has as many rows as the batch; the sum is that of rows clipped together."""
    model, batch = causal(name), batch_of(3)
    totals = []
    for parts in ([slice(0, 3)], [slice(row, row + 1) for row in range(3)]):
        model.zero_grad()
        clipper = GhostClipper(model, 0.1)
        for part in parts:
            clipper.backward(losses(model, {key: value[part] for key, value in batch.items()}))
        totals.append(torch.cat([p.grad.flatten() for p in clipper.parameters.values()]))
        clipper.remove()
    torch.testing.assert_close(*totals, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["prompt tuning", "p-tuning, MLP", "p-tuning, LSTM", "several tasks"])
def test_prompts_under_activation_checkpointing(name, use_reentrant):
    """The prompt is outside the layers that are computed again."""
    model = causal(name)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_is_the_loop(model, losses, batch_of())


@pytest.mark.parametrize("name", ["prompt tuning", "p-tuning, MLP", "several tasks"])
def test_layers_get_all_rows_at_once(name):
    """The layers of the model don't run row by row because of a prompt."""
    model, batch = causal(name), batch_of()
    clipper = GhostClipper(model, 1.0)
    clipper.backward(losses(model, batch))
    seen = []
    handle = model.get_base_model().model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(kwargs["inputs_embeds"])), with_kwargs=True
    )
    clipper.backward(losses(model, batch))
    handle.remove()
    clipper.remove()
    assert seen == [4]


def test_two_calls_per_loss():
    """The prompt is computed twice."""

    def pair(model, batch):
        return losses(model, batch) * losses(model, batch | {"ids": batch["ids"].flip(1)})

    assert_is_the_loop(causal("p-tuning, MLP"), pair, batch_of(), NormMethod(backward_passes=2))


@pytest.mark.parametrize("name", ["prompt tuning", "prefix tuning"])
def test_the_default_loss_leaves_the_prompts_tokens_out(name):
    """The logits of prompt tuning are longer than the labels, those of prefix tuning are not."""
    model, batch = causal(name), batch_of()
    outputs = model(input_ids=batch["ids"], attention_mask=torch.ones_like(batch["ids"]))
    torch.testing.assert_close(default_row_loss(model)(outputs, batch["ids"]), losses(model, batch))


def test_encoder_decoders_match_the_loop():
    """T5 with p-tuning: its prompts go to the encoder and to the decoder."""
    config = T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False
    )
    model = get_peft_model(T5ForConditionalGeneration(config), CONFIGS["p-tuning, MLP"]("SEQ_2_SEQ_LM"))

    def seq2seq(model, batch):
        ids = batch["ids"]
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=ids).logits
        return seq2seq_loss(logits[:, -ids.shape[1] :], ids)

    assert_is_the_loop(perturbed(model), seq2seq, batch_of())


class Prompted(nn.Module):
    """A prompt that passes through other operations before it is combined with the rows."""

    def __init__(self, meet):
        super().__init__()
        self.prompt_encoder = nn.ModuleDict({"default": nn.Linear(3, 4)})
        self.last, self.meet = nn.Linear(4, 1), meet

    def forward(self, x):
        prompt = self.prompt_encoder["default"](torch.ones(1, 2, 3, dtype=x.dtype))
        return self.last(torch.tanh(self.meet(prompt, x))).square().sum((1, 2))


MEETINGS = {
    "added": lambda prompt, x: x + prompt,
    "after in place": lambda prompt, x: x * prompt.mul_(2.0).transpose(1, 2).transpose(1, 2),
    "expanded": lambda prompt, x: torch.cat([prompt.tanh().expand(len(x), -1, -1), x], 1),
    "repeated twice": lambda prompt, x: torch.cat([prompt.repeat(len(x), 2, 1), x], 1),
    "cut": lambda prompt, x: torch.cat([part.repeat(len(x), 1, 1) for part in prompt.split(1, 1)], 1) * x,
    "used twice": lambda prompt, x: x * prompt + torch.sin(prompt).repeat(len(x), 1, 1),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("meet", MEETINGS.values(), ids=MEETINGS.keys())
def test_wherever_a_prompt_meets_the_rows(meet, passes):
    """By broadcasting, expanding or repeating, once or several times."""
    x = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=False)
    model = nn.Sequential(nn.Linear(4, 4), Prompted(meet))
    assert_is_the_loop(
        perturbed(model), lambda model, batch: model(batch["x"]), {"x": x}, NormMethod(backward_passes=passes)
    )


def test_a_prompt_that_hides_the_rows():
    """It has more rows than the batch before they are cut off: exact all the same."""
    model = nn.Sequential(nn.Linear(4, 4), Prompted(lambda prompt, x: x + prompt.repeat(3, 1, 1)[:1]))
    x = torch.randn(4, 2, 4, dtype=torch.float64)
    assert_is_the_loop(perturbed(model), lambda model, batch: model(batch["x"]), {"x": x})


def test_a_prompt_that_mixes_the_rows_is_refused():
    """Through its mean with the rows."""
    model = Prompted(lambda prompt, x: x + (prompt + x).mean(0, keepdim=True))
    clipper = GhostClipper(model.double(), 1.0)
    with pytest.raises(GhostError, match="rows depend on each other"):
        clipper.backward(model(torch.randn(4, 2, 4, dtype=torch.float64)))


def test_an_encoder_that_returns_several_tensors():
    """The module around it decides which of them it uses."""

    class Two(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    model = Prompted(lambda prompt, x: x + prompt[0])
    model.prompt_encoder["default"] = Two(3, 4)
    x = torch.randn(4, 2, 4, dtype=torch.float64)
    assert_is_the_loop(perturbed(model), lambda model, batch: model(batch["x"]), {"x": x})


def test_a_hook_on_a_gradient_is_refused():
    """PEFT's CPT masks its gradient by one; the clipped sum would be formed without it."""
    config = CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]
    )
    model = get_peft_model(LlamaForCausalLM(tiny_llama_config()), config)
    with pytest.raises(GhostError, match=r"delta_embedding\.weight"):
        GhostClipper(model, 1.0)
