"""benchmarks/teachers.py: the encoder averages, public and private sentences are disjoint, and the recipes are read."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from dpllm.config import load_recipe
from dpllm.config.recipe_file import load_query_recipe
from dpllm.data.rows import train_tokenizer
from tests.benchmarks.material import WORDS, program

benchmark = program("teachers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The output of the program for a tiny model of three layers."""
    folder = tmp_path_factory.mktemp("teachers")
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, vocab_size=280, max_length=64)
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")
    lines = [f"{first} {second} {third}\t{len(first) % 2}" for first in WORDS for second in WORDS for third in WORDS]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines, lines[0]]), encoding="utf-8")
    places = ["--sst2", str(folder), "--model", str(folder / "model"), "--output", str(folder / "pate")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "PUBLIC", 100)
        benchmark.main([*places, "--units", "500"])
    return folder / "pate"


@pytest.mark.deep
def test_the_first_token_has_the_average_of_the_tokens(folder):
    """The vector that a classifier reads is the norm of the centred average of the first layer's vectors and itself."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "encoder")
    model = BertModel.from_pretrained(folder / "encoder").eval()
    texts = [json.loads(line)["text"] for line in (folder / "public.jsonl").read_text().splitlines()]
    inputs = tokenizer([texts[0], f"{texts[1]} {texts[2]}"], return_tensors="pt", padding=True)
    with torch.no_grad():
        first_ND, last_ND = (model(**inputs, output_hidden_states=True).hidden_states[n][:, 0] for n in (1, 2))
        averages_MD = benchmark.averages(model, tokenizer, texts)
        own_ND = benchmark.averages(model, tokenizer, [texts[0], f"{texts[1]} {texts[2]}"])
    mean_D = averages_MD.mean(dim=0)
    scale = benchmark.SPREAD / (averages_MD - mean_D).norm(dim=1).mean()
    wanted_ND = torch.nn.functional.layer_norm(scale * (own_ND - mean_D) + first_ND, (16,))
    assert torch.allclose(last_ND, wanted_ND, atol=1e-4)
    assert math.isclose(float(last_ND.norm(dim=1).mean()), 4, rel_tol=1e-3)  # √16: a norm of weight 1


@pytest.mark.deep
def test_public_sentences_are_not_private_and_the_recipes_are_read(folder):
    """No public sentence is private, and both recipes name the same records and the same trained weights."""
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("private", "public", "dev")
    }
    assert (
        len(rows["private"]) == 500
        and len(rows["public"]) == 100
        and all(list(row) == ["text"] for row in rows["public"])
    )
    assert not {row["text"] for row in rows["private"]} & {row["text"] for row in rows["public"]}
    train = load_recipe(folder / "dpsgd.yaml")
    teach = load_query_recipe(folder / "pate.yaml", [], "pate")
    assert train.model == teach.model
    for name in ("path", "eval", "max_length"):
        assert getattr(train.data, name) == getattr(teach.data, name)
    assert train.privacy.epsilon == teach.privacy.epsilon
