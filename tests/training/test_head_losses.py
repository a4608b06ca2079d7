"""Losses in chunks of a model's head: the losses, norms and sums of all logits, and where they are not used."""

import functools

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from dpllm import GhostClipper
from dpllm.config import ConfigError
from dpllm.data.rows import PackedCollator, RowCollator
from dpllm.ghost.chunked_head import token_losses
from dpllm.ghost.sums import Sum
from dpllm.models.tasks import default_row_loss
from dpllm.training.row_losses import HeadLosses, RowLosses
from tests.conftest import tiny_llama_config
from tests.training.test_trainer import arguments, privacy, trainer, update_of

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "soft-cap": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "factor": ("Cohere", {"logit_scale": 0.25}),
    "divisor": ("Granite", {"logits_scaling": 4.0}),
    "bias": ("GPTJ", {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "rotary_dim": 4}),
}


def model_of(name, dtype=torch.float64, **peft):
    """A model of random weights with a LoRA adapter, both large enough to show in the losses."""
    kind, changes = MODELS[name]
    sizes = changes if "n_embd" in changes else {**SIZES, **changes}
    sizes = {**sizes, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", **peft))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def rows_of(packed=False):
    """Rows of different lengths, the first without a loss at its beginning."""
    lengths = (9, 5, 12, 2)
    ids = [torch.randint(3, 61, (length,)).tolist() for length in lengths]
    rows = [{"input_ids": one, "labels": list(one)} for one in ids]
    rows[0]["labels"][:4] = [-100] * 4
    return PackedCollator()(rows) if packed else RowCollator(pad_token_id=0)(rows)


def norms_and_sums(model, batch, losses, unit_index=None):
    """Losses, norms and clipped sums of one microbatch."""
    clipper = GhostClipper(model, 0.5)
    try:
        with losses.attention(model):
            loss_B = losses(model, batch)
        result = clipper.clip(loss_B, unit_index)
        sums = []
        for parameter in clipper.parameters.values():
            clipper.add_clipped_sum_(parameter, total := Sum.of(parameter))
            sums.append(total.filled().clone())
        return loss_B.detach(), result, sums
    finally:
        clipper.remove()


def assert_equal(model, batch, packed=False, unit_index=None, mode="auto", **tolerance):
    """The same from all logits and in chunks, which are used."""
    head = HeadLosses(mode)
    whole = norms_and_sums(model, batch, RowLosses(default_row_loss(model), packed), unit_index)
    chunks = norms_and_sums(model, batch, RowLosses(default_row_loss(model), packed, head), unit_index)
    for one, other in zip((whole[0], *whole[2]), (chunks[0], *chunks[2]), strict=True):
        torch.testing.assert_close(other, one, **tolerance)
    torch.testing.assert_close(chunks[1].norms, whole[1].norms, **tolerance)
    assert is_chunked(model, batch, head)


def is_chunked(model, batch, head):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with RowLosses(default_row_loss(model), "cu_seq_lens_q" in batch).attention(model):
        return head(model, inputs, batch["labels"])[1] is not None


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_has_the_losses_norms_and_sums_of_all_logits(name):
    """With a factor, a divisor or a cap of the logits, a bias, a tied head."""
    assert_equal(model_of(name), rows_of())


def test_units_of_several_rows_and_padding():
    """The head changes nothing in how rows make units."""
    assert_equal(model_of("soft-cap"), rows_of(), unit_index=torch.tensor([1, 0, 1, -1]))


def test_packed_rows():
    """Rows that are laid end to end."""
    assert_equal(model_of("llama"), rows_of(packed=True), packed=True)


def test_a_soft_prompt():
    """Its positions have no labels."""
    model = transformers.LlamaForCausalLM(tiny_llama_config()).double()
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    batch = rows_of()
    whole = RowLosses(default_row_loss(model), False)(model, batch)
    chunks = RowLosses(default_row_loss(model), False, HeadLosses(has_prompt=True))(model, batch)
    torch.testing.assert_close(chunks, whole)
    parameters = [p for p in model.parameters() if p.requires_grad]
    one, other = (torch.autograd.grad(loss.square().sum(), parameters) for loss in (whole, chunks))
    torch.testing.assert_close(other, one)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
def test_bf16(autocast):
    """Only logits are less rounded than the model's."""
    model = model_of("soft-cap", torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole, chunks = (RowLosses(default_row_loss(model), False, head)(model, BATCH) for head in (None, HeadLosses()))
        assert is_chunked(model, BATCH, HeadLosses())
    assert chunks.dtype == torch.float32
    torch.testing.assert_close(chunks, whole, rtol=0.02, atol=0.02)


BATCH = rows_of()


class Largest(TorchDispatchMode):
    """The most entries of a tensor that an operation makes."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else (made,):
            if isinstance(one, torch.Tensor):
                self.entries = max(self.entries, one.numel())
        return made


def test_there_are_never_all_logits(monkeypatch):
    """Neither in the comparison, nor in the passes."""
    few = functools.partial(token_losses, entries=4 * 61)
    monkeypatch.setattr("dpllm.training.row_losses.token_losses", few)
    model = model_of("llama")
    batch = {name: value.repeat(8, 2) for name, value in rows_of().items()}
    losses = RowLosses(default_row_loss(model), False, HeadLosses())
    with Largest() as largest:
        losses(model, batch).sum().backward()
    assert largest.entries < batch["labels"].numel() * 61 / 2


def test_where_all_logits_are_computed(caplog):
    """Heads that are trained, adapted, hooked or processed in an unknown way; the losses are right, the log has why."""
    plain = transformers.LlamaForCausalLM(tiny_llama_config()).double()
    hooked = model_of("llama")
    hooked.get_output_embeddings().register_forward_hook(lambda *_: None)
    unknown = model_of("soft-cap")
    inner = unknown.get_base_model()
    inner.forward = _doubled(inner.forward)
    twice = model_of("llama")
    twice.get_base_model().model.register_forward_hook(_also(twice.get_output_embeddings()))
    cases = {
        "trained": plain,
        "adapted": model_of("llama", task_type=None, modules_to_save=["lm_head"]),
        "hooked": hooked,
        "unknown": unknown,
        "twice": twice,
    }
    for name, model in cases.items():
        caplog.clear()
        head = HeadLosses()
        with caplog.at_level("INFO", logger="dpllm"):
            losses = RowLosses(default_row_loss(model), False, head)(model, BATCH)
        torch.testing.assert_close(losses, RowLosses(default_row_loss(model), False)(model, BATCH))
        assert not is_chunked(model, BATCH, head), name
        assert len([one for one in caplog.records if one.name.startswith("dpllm")]) == 1, name
    model = model_of("llama")
    assert is_chunked(model, BATCH, HeadLosses()) and not is_chunked(model, BATCH, HeadLosses("whole"))


def _doubled(forward):
    def doubled(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.logits = 2 * outputs.logits
        return outputs

    return doubled


def _also(head):
    def hook(module, args, outputs):
        head(outputs.last_hidden_state)

    return hook


@pytest.mark.parametrize("packed", [False, True])
def test_a_run_has_the_same_update(tmp_path, packed):
    """Two steps at σ = 0 through the Trainer, whose comparison of rows sees the losses in chunks."""
    updates = []
    for mode in ("whole", "auto"):
        torch.manual_seed(0)
        model = model_of("llama", torch.float32)
        run = trainer(
            tmp_path / mode,
            model,
            config=privacy(noise_multiplier=0.0, clip_norm=0.05, seed=3),
            args=arguments(tmp_path / mode, max_steps=2, optim="sgd", learning_rate=1.0),
            head=mode,
            pack_rows=packed,
        )
        updates.append(update_of(run))
    assert float((updates[1] - updates[0]).norm()) <= 1e-4 * float(updates[0].norm()) > 0


def test_the_option_is_checked_before_anything_is_charged(tmp_path):
    """Another word, and losses that the head has no part in."""
    with pytest.raises(ConfigError, match="head"):
        trainer(tmp_path, head="some")
    with pytest.raises(ConfigError, match="head"):
        trainer(tmp_path, head="chunks", compute_loss_func=lambda outputs, labels: outputs.logits.sum((1, 2)))
    assert not list(tmp_path.iterdir())
