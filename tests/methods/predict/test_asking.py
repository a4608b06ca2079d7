"""Tests of dpllm.methods.aggregate.aggregate: a group's answer depends on its own records and on public text only."""

from __future__ import annotations

import pytest
import torch

from dpllm.config import ConfigError, ModelConfig
from dpllm.methods.aggregate import aggregate as module
from dpllm.methods.aggregate.aggregate import Asker, Limits
from dpllm.models.load import load_tokenizer
from tests.mutations import kills
from tests.small_model import WORDS, save_small_model

GROUPS = [
    ["the small dog", "a red house"],
    ["the old man walks over one bridge under seven clouds"],
    [],
    ["the"],
    ["a"],
]
ASK = " and the"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<u>{{ m['content'] | trim }}</u>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = save_small_model(tmp_path_factory.mktemp("model"), hidden_size=16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # an untrained model is nearly the same for every prompt
    return model, load_tokenizer(ModelConfig(name=str(folder)))


def asker(loaded, **changes):
    limits = {"records": 3, "record_tokens": 6, "max_new_tokens": 4, "rows_per_pass": 2, **changes}
    return Asker(*loaded, "records:\n", Limits(**limits))


@torch.no_grad()
def alone(loaded, row, count):
    """The likeliest tokens after a row, one row at a time, without padding and cache."""
    model, ids = loaded[0], list(row)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(row) :]


@pytest.mark.parametrize("cached", [True, False])
def test_the_answer_is_the_likeliest_continuation_of_a_groups_prompt(loaded, cached):
    """Against one row at a time; records are cut to the public number of tokens."""
    one, tokenizer = asker(loaded, cached=cached), loaded[1]
    found = one.texts(GROUPS, ASK)
    for group, text in zip(GROUPS, found, strict=True):
        ids = [token for record in group for token in tokenizer(record, add_special_tokens=False)["input_ids"][:6]]
        start, ask = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("records:\n", ASK))
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        tokens = alone(loaded, [*bos, *start, *ids, *ask], 4)
        if tokenizer.eos_token_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(set(found)) > 1


@torch.no_grad()
def test_the_listed_answer_is_the_one_that_the_records_make_likelier(loaded):
    """Against one row at a time: the probability after the records over that without them."""
    one, answers = asker(loaded), ("dog", "seven clouds", "the old man")
    found = one.likeliest(GROUPS, ASK, answers)

    def score(group, answer):
        row, ids = one._row(group, ASK), one._answers(ASK, [answer])[0]
        logs_TV = loaded[0](torch.tensor([[*row, *ids]])).logits[0].log_softmax(dim=1)
        return sum(float(logs_TV[len(row) - 1 + at, token]) for at, token in enumerate(ids))

    for group, number in zip(GROUPS, found, strict=True):
        apart = [score(group, answer) - score([], answer) for answer in answers]
        assert apart[number] == pytest.approx(max(apart), abs=1e-9)
    assert len(set(found)) > 1


@kills(
    "the prompts of a pass are as long as its longest record makes them",
    "dpllm/methods/aggregate/aggregate.py",
    "self._greedy(part, self.length(ask))",
    "self._greedy(part, max(map(len, part)))",
)
def test_no_shape_depends_on_a_record(loaded, monkeypatch):
    """Every pass has the public length and number of rows, so other groups' answers cannot follow from a record."""
    shapes = []

    class Noted(module.Continuation):
        def __init__(self, model, rows, length, rows_per_pass, cached=True):
            shapes.append((len(rows), length, rows_per_pass))
            super().__init__(model, rows, length, rows_per_pass, cached)

    monkeypatch.setattr(module, "Continuation", Noted)
    found = []
    for other in (["the"] * 3, [" ".join(WORDS)] * 3, []):
        shapes.clear()
        one = asker(loaded)
        texts = one.texts([*GROUPS[:4], other], ASK)
        numbers = one.likeliest([*GROUPS[:4], other], ASK, ("dog", "seven clouds"))
        found.append((list(shapes), texts[:4], numbers[:4]))
    assert found[0] == found[1] == found[2]
    assert {length for _, length, _ in found[0][0]} == {asker(loaded).length(ASK)}


def test_a_model_whose_scores_are_not_numbers_answers_something(loaded):
    """It spoils the answer of a group, and nothing else."""

    class Broken:
        config, generation_config = loaded[0].config, loaded[0].generation_config

        def parameters(self):
            return loaded[0].parameters()

        def forward(self):
            raise NotImplementedError

        def __call__(self, **inputs):
            found = loaded[0](**inputs)
            found.logits[0] = torch.nan
            return found

    one = Asker(Broken(), loaded[1], "", Limits(records=3, record_tokens=6, max_new_tokens=2, rows_per_pass=1))
    assert len(one.texts(GROUPS, ASK)) == len(GROUPS)
    assert one.likeliest(GROUPS, ASK, ("dog", "man")) == [0] * len(GROUPS)


def test_a_chat_template_holds_records_and_question(loaded):
    """As one message; its begin is not doubled."""
    tokenizer = loaded[1]
    tokenizer.chat_template = TEMPLATE
    try:
        one = asker(loaded)
        row = one._row(["the dog"], ASK)
        text = tokenizer.decode(row)
        bos = tokenizer.bos_token or ""
        assert text.replace(" ", "") == f"{bos}<u>records:\nthedog{ASK}</u><a>".replace(" ", "")
        tokenizer.chat_template = "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"
        with pytest.raises(ConfigError, match="2 times"):
            asker(loaded)
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize(
    ("changes", "ask", "answers", "text"),
    [
        ({"record_tokens": 30}, ASK, (), "the model sees 64: lower data.max_length, aggregate.group_size"),
        ({"max_new_tokens": 60}, ASK, (), "the model sees 64"),
        ({}, ASK, ("dog", "the old man walks " * 20), "the model sees 64"),
    ],
)
def test_prompts_without_room_are_refused(loaded, changes, ask, answers, text):
    """With the longest records that there may be: whether they fit says nothing about them."""
    with pytest.raises(ConfigError, match=text):
        asker(loaded, **changes).require_room([(ask, answers)])


def test_a_group_with_too_many_records_is_refused(loaded):
    """The row would be longer than the public length."""
    with pytest.raises(ValueError, match="maximum"):
        asker(loaded).texts([["the"] * 4], ASK)
