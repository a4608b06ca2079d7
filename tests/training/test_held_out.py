"""The text of each different prompt is compared with all its completions, and answers with people's answers."""

import contextlib
from types import SimpleNamespace

import datasets
import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from dpllm.config import DataConfig
from dpllm.data.rows import DataError, RowCollator, tokenize_records, train_tokenizer
from dpllm.data.tokenization import aligned
from dpllm.training.evaluation import HeldOut, HeldOutRows, best_span, class_counts, mean_f1, measure
from tests.small_model import WORDS
from tests.training.test_evaluation import SIZES, Rank

T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
RECORDS = [
    {"prompt": "the red dog: ", "completion": "a small bridge"},
    {"prompt": "one old man: ", "completion": "seven clouds"},
    {"prompt": "the red dog: ", "completion": " over the house "},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS)] * 3, vocab_size=320, max_length=64)


def model_of(task, tokenizer):
    torch.manual_seed(0)
    if task == "seq2seq_lm":
        config = AutoConfig.for_model("t5", vocab_size=len(tokenizer), pad_token_id=0, **T5)
        return AutoModelForSeq2SeqLM.from_config(config)
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), pad_token_id=0, **SIZES)
    return AutoModelForCausalLM.from_config(config)


def held_out(records, tokenizer, task, **values):
    values = {"format": "prompt_completion", "metrics": ["exact_match"], **values}
    config = DataConfig(path="x", max_length=32, eval=0.5, **values)
    data = datasets.Dataset.from_list(records)
    rows = tokenize_records(data, tokenizer, config, (), task)
    return HeldOut(HeldOutRows(data, rows, RowCollator(pad_token_id=0, task=task), config, tokenizer))


@pytest.mark.parametrize("task", ["causal_lm", "seq2seq_lm"])
def test_a_text_is_the_models_own_and_is_compared_with_all_references_of_its_prompt(tokenizer, task):
    """The model writes once after each different prompt; a record whose completion it writes counts."""
    model = model_of(task, tokenizer)
    found = held_out(RECORDS, tokenizer, task)
    texts = found._texts
    assert texts.references == [["a small bridge", "over the house"], ["seven clouds"]]
    model.train()
    written = texts.written(model)
    assert len(written) == 2 and model.training
    moves = []
    assert found.measure(model, moved=moves.append).figures.keys() == {"perplexity", "exact match"}
    assert sum(moves) == found.size == 5
    assert found.measure(model).more == {"exact match": 0.0}
    own = [*RECORDS, {"prompt": "one old man: ", "completion": written[1]}]
    assert held_out(own, tokenizer, task).measure(model).more == {"exact match": 0.5}


def test_prompt_and_text_have_the_tokens_of_a_row_together(tokenizer):
    """As in the training: at most max_length; the text of an encoder-decoder has as many by itself."""
    records = [{"prompt": "the " * length, "completion": "dog"} for length in (1, 14)]
    texts = held_out(records, tokenizer, "causal_lm")._texts
    assert [len(prompt) + limit for prompt, limit in zip(texts._prompts, texts._limits, strict=True)] == [32, 32]
    assert held_out(records, tokenizer, "seq2seq_lm")._texts._limits == [32, 32]


def test_an_empty_prompt_is_refused():
    """Before any training: a row without a beginning token leaves the model nothing to continue."""
    bare = train_tokenizer(["a b"], vocab_size=270, max_length=64)
    bare.backend_tokenizer.post_processor = processors.ByteLevel()
    with pytest.raises(DataError, match="record 0"):
        held_out([{"prompt": "", "completion": "dog"}], bare, "causal_lm")


QUESTIONS = [
    {"question": "who?", "context": "The red dog sees a house.", "answers": {"text": ["red dog", "dog"]}},
    {"question": "where?", "context": "an old man walks over one bridge", "answers": {"text": ["bridge"]}},
    {"question": "why?", "context": "seven clouds", "answers": {"text": []}},
]


def answering(places):
    """A model that gives the largest scores to these tokens of each row."""

    class Model(torch.nn.Linear):
        def forward(self, input_ids, **_):
            start = torch.zeros(input_ids.shape)
            end = torch.zeros(input_ids.shape)
            for row, (first, last) in enumerate(places):
                start[row, first], end[row, last] = 5.0, 5.0
            return SimpleNamespace(start_logits=start, end_logits=end, logits=start)

    return Model(1, 1)


def test_answers_are_text_of_the_context_and_any_persons_answer_counts(tokenizer):
    """Without case, punctuation and articles; the first token means that there is no answer."""
    for record in QUESTIONS:
        starts = [record["context"].index(text) for text in record["answers"]["text"]]
        record["answers"]["answer_start"] = starts
    metrics = ["exact_match", "token_f1"]
    found = held_out(QUESTIONS, tokenizer, "question_answering", format="question_answering", metrics=metrics)

    def token_at(number, text):
        record = QUESTIONS[number]
        own = next(aligned(tokenizer, [record["question"]], [record["context"]]))
        begin = record["context"].index(text)
        inside = [n for n, (a, b) in enumerate(own.places) if own.parts[n] == 1 and a < begin + len(text) and b > begin]
        return inside[0], inside[-1]

    the_dog = (token_at(0, "The")[0], token_at(0, "dog")[1])
    one_bridge = (token_at(1, "one")[0], token_at(1, "bridge")[1])
    model = answering([the_dog, one_bridge, (0, 0)])
    assert found._texts.written(model) == ["red dog", "one bridge", ""]
    assert found.measure(model).more == {"exact match": 2 / 3, "token F1": pytest.approx((1 + 2 / 3 + 1) / 3)}


def test_the_best_answer_ends_after_it_begins_and_is_in_the_context():
    """The largest two scores may belong to no answer."""
    own = torch.tensor([True, False, True, True, True])
    start, end = torch.tensor([0.0, 9.0, 1.0, 4.0, 2.0]), torch.tensor([0.0, 9.0, 5.0, 1.0, 3.0])
    assert best_span(start, end, own) == (3, 4)  # 7; (3, 2) has 9 and ends before it begins
    assert best_span(torch.tensor([9.0, 0, 0, 0, 0]), torch.tensor([1.0, 0, 0, 9.0, 0]), own) == (0, 0)
    long = torch.zeros(80)
    start, end = long.clone(), long.clone()
    start[1], end[40], end[5] = 3.0, 3.0, 1.0
    assert best_span(start, end, torch.ones(80, dtype=torch.bool)) == (1, 5)


def test_macro_f1_is_the_mean_over_the_classes_that_occur():
    """As defined, from the counts of each class: rows, words and several classes of a row."""
    torch.manual_seed(0)
    for task, shape in (("sequence_classification", (40,)), ("token_classification", (8, 5))):
        logits, labels = torch.randn(*shape, 4), torch.randint(0, 3, shape)
        if task == "token_classification":
            labels[:, 3:] = -100
        guess = logits.argmax(-1)[labels != -100].tolist()
        truth = labels[labels != -100].tolist()
        own = []
        for kind in set(guess) | set(truth):
            right = sum(a == b == kind for a, b in zip(guess, truth, strict=True))
            own.append(2 * right / (guess.count(kind) + truth.count(kind)))
        counts = class_counts(logits, labels, task).flatten().tolist()
        assert mean_f1(counts) == pytest.approx(sum(own) / len(own))
    logits, labels = torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert class_counts(logits, labels, "multi_label_classification").tolist() == [[1, 1], [2, 1], [1, 1]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_classes_of_rows_divided_over_processes_count_once(size):
    """Also where a process has no row of its own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=20, pad_token_id=0, num_labels=3, **SIZES)
    model = AutoModelForSequenceClassification.from_config(config)
    data = datasets.Dataset.from_list([{"input_ids": [n + 1, 5], "labels": n % 3} for n in range(7)])
    collator = RowCollator(pad_token_id=0, task="sequence_classification")
    alone = measure(model, data, collator, 3, macro_f1=True)
    first = [Rank(rank, size) for rank in range(size)]
    for rank in first:
        with contextlib.suppress(DataError, ValueError):  # the sums of one process alone need not give a figure
            measure(model, data, collator, 3, rank, macro_f1=True)
    found = measure(model, data, collator, 3, Rank(0, size, [rank.own for rank in first]), macro_f1=True)
    assert found.figures == pytest.approx(alone.figures) and set(found.figures) == {"accuracy", "macro F1"}
