"""The attention of packed rows, and the models that cannot have it."""

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from dpllm import per_sequence_loss
from dpllm.config import ConfigError
from dpllm.data.rows import RowCollator
from dpllm.models.inputs import ATTENTION, attention_by_row, packed_attention, refuse_unpackable
from tests.reference.zoo import Case, build_model, make_batch

BOUNDARIES = torch.tensor([0, 5, 6, 9])


def states(tokens, heads=2, rows=1):
    return torch.randn(rows, heads, tokens, 4, dtype=torch.float64)


class Layer(nn.Module):
    """The attributes that the attention reads of the layer that calls it."""

    is_causal = True


@pytest.mark.parametrize("window", [None, 2, 7])
@pytest.mark.parametrize("longest", [5, None])
def test_each_row_has_the_attention_it_has_alone(window, longest):
    """Causal, scaled, with or without a window; the longest row may be given or not."""
    q, k, v = states(9), states(9), states(9)
    packed, _ = packed_attention(
        Layer(), q, k, v, None, scaling=0.7, sliding_window=window, cu_seq_lens_q=BOUNDARIES, max_length_q=longest
    )
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        here = slice(start, stop)
        score = 0.7 * q[:, :, here] @ k[:, :, here].mT
        at = torch.arange(stop - start)
        hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - (window or 99))
        alone = score.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, :, here]
        torch.testing.assert_close(packed[:, here], alone.transpose(1, 2))


def test_neither_values_nor_gradients_pass_from_row_to_row():
    """Also where they are not finite."""
    q, k, v = (states(9).requires_grad_() for _ in range(3))
    with torch.no_grad():
        for x in (q, k, v):
            x[:, :, 5] = torch.nan
    packed, _ = packed_attention(Layer(), q, k, v, None, cu_seq_lens_q=BOUNDARIES, max_length_q=5)
    assert packed[0, 5].isnan().all() and packed[0, :5].isfinite().all() and packed[0, 6:].isfinite().all()
    packed.sum().backward()
    for x in (q, k, v):
        assert x.grad[:, :, :5].isfinite().all() and x.grad[:, :, 6:].isfinite().all()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2-without-dropout"])
def test_padded_rows_and_generation_are_as_before(family):
    """Evaluation during training runs the same model on padded rows, and with a cache, token by token."""
    model, batch = build_model(Case(family, tied=True)).eval(), make_batch(Case(family).spec)
    prompt = batch.inputs["input_ids"][:2, :6]
    with torch.no_grad():
        before = model(**batch.inputs).logits
        words = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
        with attention_by_row(model):
            after = model(**batch.inputs).logits
            same = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True)
    real = batch.inputs["attention_mask"].bool()
    torch.testing.assert_close(after[real], before[real])
    assert torch.equal(words, same)


def test_left_padding_is_hidden():
    """The first tokens see only themselves, and later tokens do not see them."""
    model = build_model(Case("llama")).eval()
    ids = torch.tensor([[0, 0, 7, 8, 9]])
    mask, positions = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 0, 1, 2]])
    with torch.no_grad(), attention_by_row(model):
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, 2:]
        torch.testing.assert_close(padded, model(input_ids=ids[:, 2:]).logits)


def test_a_mask_that_the_model_made_itself_is_taken_as_it_is():
    """The visible tokens of rows that are not packed."""
    q, k, v = states(4, rows=2), states(4, rows=2), states(4, rows=2)
    visible = torch.eye(4, dtype=torch.bool).expand(2, 1, -1, -1)
    output, _ = packed_attention(Layer(), q, k, v, visible)
    torch.testing.assert_close(output, v.transpose(1, 2))


def test_the_model_has_its_own_attention_afterwards():
    """Also after an error; it is not saved with the model."""
    model = build_model(Case("llama", "lora-all-linear"))
    inner = model.get_base_model()
    before = inner.config._attn_implementation
    with pytest.raises(KeyError), attention_by_row(model):
        assert inner.config._attn_implementation == ATTENTION
        assert ATTENTION not in str(inner.config.to_dict())
        raise KeyError
    assert inner.config._attn_implementation == before != ATTENTION


OTHER_FORMS = [
    ({name: torch.tensor(1.0)}, rf"Layer needs \['{name}'\].*flash_attention_2")
    for name in ("softcap", "s_aux", "position_bias")
]


@pytest.mark.parametrize(("options", "match"), [*OTHER_FORMS, ({"is_causal": False}, "bidirectional")])
def test_an_attention_of_another_form_is_refused(options, match):
    """Unsupported parts of an attention are refused, not ignored."""
    q = states(9)
    with pytest.raises(ValueError, match=match):
        packed_attention(Layer(), q, q, q, None, cu_seq_lens_q=BOUNDARIES, **options)


def test_attention_in_both_directions_is_refused_where_the_layer_says_it():
    q, layer = states(9), Layer()
    layer.is_causal = False
    with pytest.raises(ValueError, match="bidirectional"):
        packed_attention(layer, q, q, q, None, cu_seq_lens_q=BOUNDARIES)


def small(config, **more):
    return config(
        vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, **more
    )


REFUSED = {
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=1)),
        "seq2seq_lm",
        "T5ForConditionalGeneration is not a causal language model",
    ),
    "classifier": (
        lambda: BertForSequenceClassification(small(BertConfig)),
        "sequence_classification",
        "BertForSequenceClassification is not a causal language model",
    ),
    "no positions": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2)),
        "causal_lm",
        "BloomForCausalLM accepts no row boundaries: its forward has no position_ids",
    ),
    "state space": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4)),
        "causal_lm",
        "MambaForCausalLM accepts no row boundaries",
    ),
    "no transformers model": (nn.Identity, None, "Identity is not a causal language model"),
}


@pytest.mark.parametrize(("make", "task", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_models_that_can_not_be_packed_are_refused_by_name(make, task, match):
    """Before any training, with the remedy."""
    with pytest.raises(ConfigError, match=rf"Rows cannot be packed: {match}.*set microbatch.pack to false"):
        refuse_unpackable(make(), task)


def test_what_was_made_for_padded_rows_is_refused():
    """A custom collator or loss does not know where packed rows begin."""
    model = build_model(Case("llama"))
    refuse_unpackable(model, "causal_lm", RowCollator(pad_token_id=0))
    with pytest.raises(ConfigError, match="data_collator"):
        refuse_unpackable(model, "causal_lm", list)
    with pytest.raises(ConfigError, match="compute_loss_func"):
        refuse_unpackable(model, "causal_lm", None, per_sequence_loss)
    model._supports_flash_attn = False  # transformers has no place for another attention in it
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        refuse_unpackable(model, "causal_lm")


def test_an_attention_that_can_not_be_exchanged_is_refused(monkeypatch):
    """It does not run with its own attention instead."""
    model = build_model(Case("llama"))
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with pytest.raises(ConfigError, match="LlamaForCausalLM"), attention_by_row(model):
        pass


def test_a_prompt_in_front_of_the_packed_rows_is_refused():
    """Prompt tuning puts its tokens only before the first row; boundaries that miss tokens are refused as well."""
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = get_peft_model(build_model(Case("llama", dtype="float32")), prompt)
    with pytest.raises(ConfigError, match="learned"):
        refuse_unpackable(model, "causal_lm")
    q = states(11)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        packed_attention(Layer(), q, q, q, None, cu_seq_lens_q=BOUNDARIES, max_length_q=5)
