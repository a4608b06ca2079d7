"""A model's text after a prompt is its own, whatever the batch, the padding and the number of processes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from dpllm.data.rows import train_tokenizer
from dpllm.models import writing
from dpllm.models.writing import continuations

GPT2 = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a b"], vocab_size=260, max_length=16)


def model_of(kind, tokenizer):
    torch.manual_seed(3)
    values = {"vocab_size": len(tokenizer), "pad_token_id": 0}
    if kind == "t5":
        return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **values, **T5)).eval()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **values, **GPT2)).eval()


def one_by_one(model, prompt, limit):
    """The likeliest tokens, each from a forward pass over everything before it."""
    text = []
    while len(text) < limit:
        if model.config.is_encoder_decoder:
            decoder = torch.tensor([[0, *text]])
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder).logits
        else:
            logits = model(input_ids=torch.tensor([prompt + text])).logits
        text.append(int(logits[0, -1].argmax()))
        if text[-1] == 2:
            break
    return text


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_is_that_of_its_prompt_alone(tokenizer, monkeypatch, kind, batch):
    """Neither the longer prompts of its batch nor its own limit change a token; the mode is restored."""
    monkeypatch.setattr(writing, "BATCH", batch)
    model, limits = model_of(kind, tokenizer), [4, 8, 7, 1]
    model.generation_config.update(repetition_penalty=9.0, max_new_tokens=1)  # saved with a model, and not used
    found = continuations(model.train(), tokenizer, PROMPTS, limits)
    assert model.training
    assert found == [one_by_one(model.eval(), *pair) for pair in zip(PROMPTS, limits, strict=True)]


def test_a_batch_never_needs_a_position_that_the_model_lacks(tokenizer):
    """Beside a prompt of 8 tokens there is room for 8 more in a model of 16 positions."""
    model = model_of("gpt2", tokenizer)
    texts = continuations(model, tokenizer, PROMPTS, [16 - len(prompt) for prompt in PROMPTS])
    assert texts == [one_by_one(model, prompt, 8) for prompt in PROMPTS]


class Rank:
    """One of several processes, simulated in turn: keeps its own texts, and gets everybody's the second time."""

    def __init__(self, rank, size, everybodys=()):
        self.rank, self.size, self.everybodys, self.own = rank, size, list(everybodys), {}

    def gather(self, value):
        self.own = dict(value)
        return self.everybodys or [{number: [] for number in range(len(PROMPTS))}]


@pytest.mark.parametrize("size", [2, 3])
def test_prompts_divided_over_processes_are_each_continued_once(tokenizer, monkeypatch, size):
    """And every process runs the model, also one without prompts of its own."""
    monkeypatch.setattr(writing, "BATCH", 2)
    model, passes = model_of("gpt2", tokenizer), []
    monkeypatch.setattr(
        model,
        "generate",
        lambda *, inner=model.generate, synced_gpus, **more: (passes.append(synced_gpus), inner(**more))[1],
    )
    ranks = [Rank(rank, size) for rank in range(size)]
    for rank in ranks:
        continuations(model, tokenizer, PROMPTS, 4, processes=rank)
    assert passes == [True] * size
    owned = [number for rank in ranks for number in rank.own]
    assert sorted(owned) == [0, 1, 2, 3]
    everybodys = [rank.own for rank in ranks]
    alone = [one_by_one(model, prompt, 4) for prompt in PROMPTS]
    for rank in range(size):
        assert continuations(model, tokenizer, PROMPTS, 4, processes=Rank(rank, size, everybodys)) == alone
