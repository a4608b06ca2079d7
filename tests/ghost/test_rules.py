"""A parameter is one parameter; the module of each use counts it once."""

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from dpllm import GhostClipper, GhostError
from dpllm.ghost import NormMethod
from dpllm.models.continuation import cache_of
from dpllm.models.losses import per_sequence_loss, seq2seq_loss
from tests.ghost.loop import assert_is_the_loop, perturbed

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES)),
    "albert": lambda: transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(**SIZES, embedding_size=8, classifier_dropout_prob=0.0)
    ),
    "electra": lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(**SIZES, embedding_size=16)),
    "deberta": lambda: transformers.DebertaV2ForMaskedLM(transformers.DebertaV2Config(**SIZES)),
}
FALCONS = {
    "parallel": {"parallel_attn": True, "bias": False},
    "parallel with biases": {"parallel_attn": True, "bias": True},
    "sequential": {"parallel_attn": False, "bias": True, "alibi": True},
    "new": {"new_decoder_architecture": True, "num_kv_heads": 1},
}


def token_batch(rows=4, tokens=9):
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(3, 61, (rows, tokens), generator=generator)
    labels = input_ids.clone()
    labels[1, :4] = -100
    return {"input_ids": input_ids, "labels": labels}


def masked_lm(model, batch):
    return seq2seq_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def causal_lm(model, batch):
    return per_sequence_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", HEADS)
def test_a_bias_tied_between_a_head_and_its_decoder_counts_once(name, passes):
    """Transformers' own tie: ``predictions.bias`` is ``predictions.decoder.bias``."""
    assert_is_the_loop(
        perturbed(HEADS[name]()), masked_lm, token_batch(), NormMethod(backward_passes=passes), microbatches=2
    )


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_tied_bias_counts_once_for_units_of_several_rows_and_where_it_alone_is_trained(name):
    """Cross terms of a unit's rows, and a head of which only the bias is trained."""
    model = perturbed(HEADS[name]())
    assert_is_the_loop(model, masked_lm, token_batch(), unit_index=torch.tensor([0, 1, 0, 2]))
    model.zero_grad()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name.endswith("bias"))
    assert_is_the_loop(model, masked_lm, token_batch())


def test_a_tied_bias_counts_once_with_lora_beside_it():
    """``modules_to_save`` trains the head as a whole beside the adapters."""
    model = get_peft_model(HEADS["bert"](), LoraConfig(r=2, target_modules=["query", "value"], bias="all"))
    assert_is_the_loop(perturbed(model), masked_lm, token_batch())


def test_a_tied_bias_counts_once_under_activation_checkpointing():
    """The parameters that the head uses are determined at its first call, which may be in the backward pass."""
    model = perturbed(HEADS["bert"]())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_is_the_loop(model, masked_lm, token_batch(), NormMethod(backward_passes=2))


class Head(nn.Module):
    """Uses its own bias, which its decoder holds too, under two names; and a scale that it holds twice."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(4, 4)
        self.bias = self.again = self.decoder.bias
        self.scales = nn.ParameterDict({"one": nn.Parameter(torch.rand(4))})
        self.scale = self.scales["one"]

    def forward(self, h):
        return self.decoder(h) * self.scale + torch.tanh(h * self.again) * self.scales["one"] + self.bias


@pytest.mark.parametrize("passes", [1, 2])
def test_all_uses_of_a_parameter_add_up_whoever_makes_them(passes):
    """Used by the module, by the inner module, under several names and in a container: every use counts once."""
    net = perturbed(nn.Sequential(nn.Linear(3, 4), Head(), nn.Linear(4, 1)))

    def losses(model, batch):
        return model(batch["x"]).square().sum((1, 2))

    assert_is_the_loop(
        net, losses, {"x": torch.randn(4, 3, 3, dtype=torch.float64)}, NormMethod(backward_passes=passes)
    )


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("name", FALCONS)
def test_a_model_that_adds_in_place_to_what_a_layer_returned(name, mode, passes):
    """Falcon adds the attention to the output of its MLP; its linear layers have a separate class."""
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES, use_cache=False, **FALCONS[name]))
    if mode == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    assert_is_the_loop(perturbed(model), causal_lm, token_batch(), NormMethod(backward_passes=passes))


def test_in_place_additions_under_activation_checkpointing():
    """The recomputed block adds in place as well."""
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES, use_cache=False))
    model = perturbed(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_is_the_loop(model, causal_lm, token_batch())


class Middle(nn.Module):
    """A module of unknown class, whose output is changed in place."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(4, 4) if "product" in kind else torch.rand(4) + 1)

    def forward(self, h):
        if self.kind == "product":
            return h @ self.weight.T
        if self.kind == "transposed product":
            return h @ self.weight + h
        return h * self.weight if self.kind == "scale" else torch.sin(h * self.weight)


@pytest.mark.parametrize("kind", ["product", "transposed product", "scale", "sine"])
def test_the_output_of_any_module_may_be_changed_in_place(kind):
    """For a recognised module, and for one that is run again row by row."""
    first, middle, last = nn.Linear(3, 4), Middle(kind), nn.Linear(4, 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = first, middle, last

        def forward(self, x):
            h = self.first(x)
            out = self.middle(h)
            out += h
            out.mul_(2.0)
            return self.last(out).square().sum((1, 2))

    batch = {"x": torch.randn(4, 3, 3, dtype=torch.float64)}
    assert_is_the_loop(perturbed(Net()), lambda model, batch: model(batch["x"]), batch)


def test_linear_layers_of_another_class_are_served_as_such():
    """They hold factors, not a gradient for each row."""
    net = nn.Sequential(Middle("product"), Middle("transposed product"))
    clipper = GhostClipper(net, 1.0, NormMethod("gram"))
    clipper._book.backward(net(torch.randn(3, 5, 4)).square().sum((1, 2)), torch.arange(3), 3)
    held = [type(c).__name__ for uses in clipper._book._pass.contributions.values() for c in uses]
    assert held == ["Outer", "Outer"]


class Nearly(nn.Module):
    """Linear in its input, but not in its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, h):
        return h @ torch.sin(self.weight).T


def test_a_module_that_is_nearly_linear_is_not_taken_for_it():
    """It is differentiated row by row."""
    net = perturbed(nn.Sequential(nn.Linear(3, 4), Nearly()))
    batch = {"x": torch.randn(4, 3, 3, dtype=torch.float64)}
    assert_is_the_loop(net, lambda model, batch: model(batch["x"]).square().sum((1, 2)), batch)


class Overwriting(nn.Module):
    """Adds its bias to its input in place."""

    def __init__(self, *size):
        super().__init__()
        self.bias = nn.Parameter(torch.rand(*size))

    def forward(self, h):
        h += self.bias.sum(0) if self.bias.ndim == 2 else self.bias
        return h


@pytest.mark.parametrize("size", [(4,), (2, 4)])
def test_a_module_that_overwrites_its_input_is_the_loop(size):
    """Its functions are served one by one, and an addition needs no input."""
    net = perturbed(nn.Sequential(nn.Linear(3, 4), Overwriting(*size), nn.Linear(4, 1)))
    batch = {"x": torch.randn(4, 3, 3, dtype=torch.float64)}
    assert_is_the_loop(net, lambda model, batch: model(batch["x"]).square().sum((1, 2)), batch)


def test_a_recognised_module_that_overwrites_its_input_later_is_refused():
    """It was recognised as a scale, whose input is read when its gradient is formed."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.calm = nn.Parameter(torch.rand(4) + 1), True

        def forward(self, h):
            return h * self.scale if self.calm else h.mul_(2.0) * self.scale

    net, x = nn.Sequential(nn.Linear(3, 4), Sometimes()), torch.randn(2, 3, 3)
    clipper = GhostClipper(net, 1.0)
    clipper.backward(net(x).square().sum((1, 2)))
    net[1].calm = False
    with pytest.raises(GhostError, match="Sometimes"):
        net(x)


def test_an_input_that_is_overwritten_later_is_an_error_that_says_so():
    """As in PyTorch, and with the remedy."""
    first, last = nn.Linear(3, 4), nn.Linear(4, 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            h = self.first(x) * 1.0
            out = self.last(h)
            h += 1
            return out.square().sum((1, 2))

    model = Net()
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError, match="trainable module"):
        clipper.backward(model(torch.randn(2, 3, 3)))


def test_a_second_tensor_for_a_layer_that_was_recognised_as_linear_is_refused():
    """It was recognised by one tensor."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, h, gate=None):
            return (h @ self.weight.T) * (1 if gate is None else gate)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gated = Gated()

        def forward(self, x, gate=None):
            return self.gated(x) if gate is None else self.gated(x, gate)

    model, x = Net(), torch.randn(2, 3, 4)
    clipper = GhostClipper(model, 1.0)
    clipper.backward(model(x).sum((1, 2)))
    with pytest.raises(GhostError, match="Gated"):
        model(x, x)


@pytest.mark.parametrize("config", [peft.LoHaConfig, peft.LoKrConfig])
def test_layers_that_draw_random_numbers_in_each_pass_are_refused_by_name(config):
    """PEFT's LoHa and LoKr do so for every dropout rate; their gradients for single rows cannot be recomputed."""
    model = get_peft_model(HEADS["bert"](), config(r=2, alpha=2, target_modules=["query"]))
    with pytest.raises(GhostError, match=r"layer\.0\.attention\.self\.query"):
        GhostClipper(model, 1.0)
    for name, parameter in model.named_parameters():  # the adapter frozen, something else trained
        parameter.requires_grad_(name.endswith("LayerNorm.weight"))
    GhostClipper(model, 1.0).remove()


def test_ia3_is_the_loop():
    """The remedy that the refusal of LoHa and LoKr names."""
    config = peft.IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"])
    assert_is_the_loop(perturbed(get_peft_model(HEADS["bert"](), config)), masked_lm, token_batch())


def vblora(model, **changes):
    config = {"r": 2, "num_vectors": 5, "vector_length": 4, "topk": 2, "vblora_dropout": 0.0, **changes}
    return get_peft_model(model, peft.VBLoRAConfig(**config))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_bank_of_vectors_that_layers_share_is_the_loop(passes):
    """VB-LoRA: one parameter in a container that each adapted layer holds, and the model around them keeps."""
    model = perturbed(vblora(HEADS["bert"](), target_modules=["query", "output.dense"]))
    assert any("vector_bank" in name for name, p in model.named_parameters() if p.requires_grad)
    assert_is_the_loop(model, masked_lm, token_batch(), NormMethod(backward_passes=passes))


def test_a_bank_of_vectors_on_a_llama_is_the_loop():
    """The adapter that was refused, with units of several rows."""
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2})
    model = perturbed(vblora(transformers.LlamaForCausalLM(config), target_modules=["q_proj", "v_proj"]))
    assert_is_the_loop(model, causal_lm, token_batch(), unit_index=torch.tensor([0, 1, 2, 1]))


class Bank(nn.Module):
    """Keeps a table that its two layers use; ``own``: and uses it itself."""

    def __init__(self, own=False):
        super().__init__()
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})
        self.first, self.last, self.own = Scaling(self.table), Scaling(self.table), own

    def forward(self, x):
        x = self.last(torch.tanh(self.first(x)))
        return (x * self.table["a"] if self.own else x).square().sum(1)


class Scaling(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x * self.table["a"]


@pytest.mark.parametrize("own", [False, True])
def test_a_use_by_the_module_that_keeps_the_table_counts(own):
    """Beside those of the layers that hold the table too."""
    batch = {"x": torch.randn(5, 4, dtype=torch.float64)}
    assert_is_the_loop(perturbed(Bank(own)), lambda model, batch: model(batch["x"]), batch)


def test_layers_that_are_skipped_at_random_are_refused_by_name():
    """A skipped layer has no gradient, and the run would end at some step; frozen layers may be skipped."""
    config = transformers.OPTConfig(
        vocab_size=31,
        hidden_size=8,
        ffn_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=8,
        layerdrop=0.1,
    )
    model = transformers.OPTForCausalLM(config)
    with pytest.raises(GhostError, match=r"model\.decoder"):
        GhostClipper(model, 1.0)
    model.model.decoder.layerdrop = 0.0
    GhostClipper(model, 1.0).remove()


def sequences(model, batch):
    logits = model(input_ids=batch["input_ids"], decoder_input_ids=batch["input_ids"][:, :6]).logits
    return seq2seq_loss(logits, batch["labels"][:, :6])


@pytest.mark.parametrize("attention", ["local", "transient-global"])
def test_a_relative_bias_for_blocks_is_the_loop(attention):
    """LongT5's differs from T5's: its table is looked up once for all rows, with an index (blocks, blocks)."""
    config = transformers.LongT5Config(
        vocab_size=61,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        local_radius=4,
        global_block_size=4,
        encoder_attention_type=attention,
        dropout_rate=0.0,
        use_cache=False,
    )
    assert_is_the_loop(
        perturbed(transformers.LongT5ForConditionalGeneration(config)), sequences, token_batch(tokens=12)
    )


def test_a_relative_bias_that_all_layers_make_is_the_loop():
    """UMT5 does not pass on the bias of its first layer: every layer has a table and ignores a given bias."""
    config = transformers.UMT5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, use_cache=False
    )
    assert_is_the_loop(perturbed(transformers.UMT5ForConditionalGeneration(config)), sequences, token_batch())


def test_a_model_that_is_refused_keeps_no_hook():
    """It can then be clipped in another way: one unit at a time, or with parameters frozen."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(7, 4, max_norm=1.0))
    with pytest.raises(GhostError, match="max_norm"):
        GhostClipper(model, clip_norm=1.0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model[0](torch.randn(2, 4))


def test_training_with_a_filled_cache_is_refused():
    """The position bias of T5 would be computed for the new tokens only; whatever transformers calls the cache."""
    config = transformers.T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    batch = token_batch()
    clipper = GhostClipper(model, 1.0)
    begun = {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"][:, :3], "use_cache": True}
    with torch.no_grad():
        cache = cache_of(model(**begun))
    with pytest.raises(GhostError, match="use_cache=False"):
        model(**begun, **cache)
    clipper.remove()
