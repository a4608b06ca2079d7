"""Tests of dpllm.models.generation: texts do not depend on the batch, and prompts are encoded as in training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TextStreamer,
)

from dpllm.config import ConfigError
from dpllm.data.chat import encode_chats
from dpllm.models.generation import Sampling, TextGenerator, load_generator
from tests.mutations import kills
from tests.small_model import save_small_model

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PROMPTS = ["the small dog sees a red house and the old man", "one", "seven clouds under", ""]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("llama"), hidden_size=16)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A model with learned positions: a padded row with wrong ones would be another row."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32, "initializer_range": 0.5}
    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, **sizes)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


def likeliest(generator: TextGenerator, prompt: str, count: int) -> str:
    """The reference: one row, without padding or cache, in float64; the likeliest token each time."""
    model = generator.model.double()
    ids = generator.encode(prompt)
    begin = len(ids)
    for _ in range(count):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == generator.tokenizer.eos_token_id:
            break
        ids = [*ids, token]
    model.float()
    return generator.tokenizer.decode(ids[begin:], skip_special_tokens=True, clean_up_tokenization_spaces=False)


@kills(
    "the padding of a batch of prompts is seen",
    "dpllm/models/generation.py",
    "[0] * (longest - len(row)) + [1] * len(row)",
    "[1] * longest",
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_text_does_not_depend_on_the_batch(request, kind):
    """Of any size: padding is on the left, is masked, and moves no position."""
    generator = load_generator(request.getfixturevalue(kind), "cpu")
    greedy = Sampling(max_new_tokens=8, temperature=0)
    expected = [likeliest(generator, prompt, 8) for prompt in PROMPTS]
    assert len(set(expected)) > 1
    for size in (1, 3, 16):
        assert [text for batch in generator.sample(PROMPTS, greedy, size) for text in batch] == expected


def test_a_long_neighbour_takes_no_room(gpt2):
    """A row near the end of what the model sees gets the tokens that are left; the others get all theirs."""
    generator = load_generator(gpt2, "cpu")
    long = " ".join(["dog"] * 40)
    room = generator.room_for("dog dog dog dog dog")
    prompts = ["one", next(long[:n] for n in range(len(long), 0, -1) if generator.room_for(long[:n]) >= 3)]
    left = generator.room_for(prompts[1])
    assert 3 <= left < 20 < room
    (both,) = generator.sample(prompts, Sampling(max_new_tokens=20, temperature=0))
    assert both[0] == likeliest(generator, "one", 20) and both[1] == likeliest(generator, prompts[1], left)
    with pytest.raises(ConfigError, match="shorten"):
        list(generator.sample([long], Sampling(max_new_tokens=1)))


def test_a_temperature_of_one_draws_from_the_model(llama):
    """All tokens can come: the default of transformers, the likeliest 50, is off; top_p leaves out the others."""
    generator = load_generator(llama, "cpu")
    logits = generator.model(torch.tensor([generator.encode("one")])).logits[0, -1]
    chances = logits.double().softmax(0).sort(descending=True)
    seen = {
        text for batch in generator.sample(["one"] * 2000, Sampling(max_new_tokens=1, seed=0), 2000) for text in batch
    }
    assert len(seen) > 100
    kept = chances.indices[: int((chances.values.cumsum(0) < 0.1).sum()) + 1].tolist()
    nucleus = Sampling(max_new_tokens=1, top_p=0.1, seed=0)
    few = {text for batch in generator.sample(["one"] * 500, nucleus, 500) for text in batch}
    assert few <= {generator.tokenizer.decode([token], skip_special_tokens=True) for token in kept} and len(few) > 3


def test_a_seed_gives_the_same_texts_again(llama):
    """And none gives others."""
    generator = load_generator(llama, "cpu")

    def texts(seed: int | None) -> list[list[str]]:
        return list(generator.sample(["one"] * 4, Sampling(max_new_tokens=8, seed=seed), 2))

    assert texts(3) == texts(3) != texts(4) and texts(None) != texts(None)


def test_a_prompt_is_encoded_as_in_training(llama):
    """With the token that begins a text, without one that ends it; an empty one begins a text."""
    generator = load_generator(llama, "cpu")
    assert generator.encode("")[0] == generator.encode("one")[0] == generator.tokenizer.bos_token_id
    assert generator.tokenizer.eos_token_id not in generator.encode("one")
    assert generator.encode("") == [generator.tokenizer.bos_token_id]


def test_a_chat_prompt_is_the_beginning_of_the_training_row(llama):
    """By the same template."""
    generator = load_generator(llama, "cpu")
    generator.tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "dog"}]
    ((ids, labels),) = encode_chats([messages], generator.tokenizer, [0])
    prompt = generator.encode(messages[:1])
    assert ids[: len(prompt)] == prompt and labels[len(prompt)] != -100 and set(labels[: len(prompt)]) == {-100}
    generator.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ConfigError, match="refuses these"):
        generator.encode(messages[:1])


def test_an_adapter_is_applied_to_its_base(llama, tmp_path):
    """Also when the base that the run pretrained moved with the run's folder; the merged model says the same."""
    base = AutoModelForCausalLM.from_pretrained(llama)
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    run = tmp_path / "run"
    adapted.save_pretrained(run)
    AutoTokenizer.from_pretrained(llama).save_pretrained(run)
    greedy = Sampling(max_new_tokens=6, temperature=0)
    first = list(load_generator(run, "cpu").sample(PROMPTS, greedy))
    assert first != list(load_generator(llama, "cpu").sample(PROMPTS, greedy))
    config = run / "adapter_config.json"
    config.write_text(config.read_text().replace(str(llama), "/gone/public_pretrain"))
    with pytest.raises(ConfigError, match="/gone/public_pretrain"):
        load_generator(run, "cpu")
    shutil.copytree(llama, run / "public_pretrain")
    assert list(load_generator(run, "cpu").sample(PROMPTS, greedy)) == first
    merged = tmp_path / "merged"
    adapted.merge_and_unload().save_pretrained(merged)
    AutoTokenizer.from_pretrained(llama).save_pretrained(merged)
    assert list(load_generator(merged, "cpu").sample(PROMPTS, greedy)) == first


def test_an_encoder_decoder_answers_with_its_decoder(llama, tmp_path):
    """The prompt is no part of the text."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    tokenizer = AutoTokenizer.from_pretrained(llama)
    torch.manual_seed(0)
    T5ForConditionalGeneration(
        T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, pad_token_id=0, eos_token_id=2, **sizes)
    ).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generator = load_generator(tmp_path, "cpu")
    greedy = Sampling(max_new_tokens=5, temperature=0)
    (together,) = generator.sample(PROMPTS[:3], greedy)
    assert together == [text for prompt in PROMPTS[:3] for (text,) in generator.sample([prompt], greedy)]


def test_a_classifier_makes_no_text(llama, tmp_path):
    """One line with its class."""
    AutoModelForSequenceClassification.from_pretrained(llama, num_labels=2).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="ForSequenceClassification"):
        load_generator(tmp_path, "cpu")


@kills(
    "an adapter of a classifier writes text",
    "dpllm/models/generation.py",
    'if kind is not None and str(getattr(kind, "value", kind)) not in _WRITERS:',
    "if False:",
    case="SEQ_CLS",
)
@pytest.mark.parametrize("kind", ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION", "", "MaskedLM"])
def test_an_adapter_of_another_task_makes_no_text(llama, tmp_path, kind):
    """Its base is a language model; only the adapter, or its class, says what it was trained for."""
    if kind == "MaskedLM":
        BertForMaskedLM(BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1)).save_pretrained(tmp_path)
    else:
        auto = AutoModelForTokenClassification if kind == "TOKEN_CLS" else AutoModelForSequenceClassification
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type=kind or None)
        get_peft_model(auto.from_pretrained(llama, num_labels=2), config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot generate text"):
        load_generator(tmp_path, "cpu")


def test_a_base_without_the_weights_of_its_head_makes_no_text(llama, tmp_path):
    """transformers would draw them at random."""
    model = LlamaForCausalLM.from_pretrained(llama, tie_word_embeddings=False)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="lm_head"):
        load_generator(tmp_path, "cpu")


def test_words_are_streamed_as_they_are_made(llama, capsys):
    """What is printed is what is returned."""
    generator = load_generator(llama, "cpu")
    streamer = TextStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
    text = generator.stream("one", Sampling(max_new_tokens=8, temperature=0), streamer)
    assert capsys.readouterr().out.strip() == text.strip() == likeliest(generator, "one", 8).strip() != ""


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 2},
        {"seed": -1},
    ],
)
def test_numbers_out_of_range_are_refused(values):
    """By name."""
    with pytest.raises(ConfigError, match=next(iter(values))):
        Sampling(**values)
