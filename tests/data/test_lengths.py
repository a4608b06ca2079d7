"""Tests of dpllm.data.lengths: a data set in Arrow and a loop over its rows give the same result for every row."""

from __future__ import annotations

import tracemalloc

import datasets
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

import dpllm.data.lengths
from dpllm.data.lengths import Limits, refuse_other_classes, row_lengths
from dpllm.data.records import DataError
from tests.ghost.media import llava, whisper

TASKS = ["causal_lm", "seq2seq_lm", "sequence_classification", None]
TOKENS = st.lists(st.integers(0, 9), min_size=0, max_size=4)
LABELS = st.one_of(st.none(), st.lists(st.sampled_from([-100, -100, 3]), max_size=4))


def in_arrow(rows, *, large=False):
    kind = datasets.LargeList if large else datasets.List
    features = datasets.Features({name: kind(datasets.Value("int64")) for name in rows[0]})
    return datasets.Dataset.from_list(rows, features=features)


def outcome(dataset, task):
    """Return the lengths, or the message of the error."""
    try:
        return row_lengths(dataset, task).tolist()
    except DataError as error:
        return str(error)


@pytest.mark.grid(1)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("block", [1, 3, 4096])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_arrow_and_rows_agree(task, block, data):
    """Lengths, the first refused row and its message are the same for any size of the blocks of rows."""
    fit = data.draw(st.booleans())  # labels that fit reach the later checks
    rows = []
    for ids in data.draw(st.lists(TOKENS, min_size=1, max_size=8)):
        labels = [data.draw(st.sampled_from([-100, 3])) for _ in ids] if fit else data.draw(LABELS)
        rows.append({"input_ids": ids, "labels": labels})
    expected = outcome(rows, task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpllm.data.lengths, "_ROWS", block)
        for large in (False, True):
            assert outcome(in_arrow(rows, large=large), task) == expected
        order = list(range(len(rows)))[::-1]
        assert outcome(in_arrow(rows).select(order), task) == outcome([rows[n] for n in order], task)


@pytest.mark.parametrize(
    ("row", "task", "match"),
    [
        ({"input_ids": [3, 4], "labels": [3, 4, 5]}, "causal_lm", "row 2 has 3 labels for 2 input tokens"),
        ({"input_ids": [3, 4], "labels": [3, -100]}, "causal_lm", "row 2 has no target: all its labels are masked"),
        ({"input_ids": [3, 4], "labels": [-100]}, "seq2seq_lm", "row 2 has no target"),
        ({"input_ids": [], "labels": []}, "causal_lm", "row 2 has no input_ids: a row needs at least one token"),
        ({"input_ids": [], "labels": [3]}, None, "row 2 has no input_ids"),
        ({"input_ids": [3, None], "labels": [3, 4]}, "causal_lm", "row 2 has an entry without a token id in input_ids"),
        ({"input_ids": [3, 4], "labels": [3, None]}, "causal_lm", "row 2 has an entry without a number in its labels"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused_with_their_number(row, task, match):
    """The first of several such rows is named, in a list of rows and in Arrow."""
    good = {"input_ids": [3, 4], "labels": [3, 4]}
    rows = [good, good, row, good, row]
    for dataset in (rows, in_arrow(rows)):
        with pytest.raises(DataError, match=match):
            row_lengths(dataset, task)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_ids": [[5, 6]]}, "the input_ids of row 0 are a list of lists instead of a list of token ids"),
        ({"text": "five six"}, "row 0 has no input_ids, only text"),
        ({"input_ids": "five six"}, "the input_ids of row 0 are text: tokenize the records first"),
        ({"input_ids": ["five", "six"]}, "the input_ids of row 0 are text: tokenize the records first"),
        ({"input_ids": None}, "row 0 has no input_ids: a row needs at least one token"),
    ],
)
@pytest.mark.parametrize("arrow", [True, False])
def test_rows_of_another_form_are_refused(row, says, arrow):
    """Such rows are a tokenizer's output for one text with return_tensors, and text that was not tokenized."""
    with pytest.raises(DataError, match=says):
        row_lengths(datasets.Dataset.from_list([row]) if arrow else [row], "causal_lm", Limits(tokens=9))


@pytest.mark.parametrize("label", [9, -1])
def test_labels_that_are_no_tokens_are_refused(label):
    """The first step would fail; -100 is no token, and means that there is no target."""
    rows = [{"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [1, 2], "labels": [1, label]}]
    for dataset in (rows, in_arrow(rows)):
        with pytest.raises(DataError, match="label outside"):
            row_lengths(dataset, "causal_lm", Limits(tokens=9))
        row_lengths(dataset, "seq2seq_lm", Limits(tokens=9))


def test_a_row_without_input_in_arrow_is_refused():
    """A missing list is an empty one."""
    with pytest.raises(DataError, match="row 1 has no input_ids"):
        row_lengths(in_arrow([{"input_ids": [1]}, {"input_ids": None}]), "causal_lm")


def test_the_rows_of_a_transform_are_measured():
    """When rows are computed as they are read, the lengths are those of the computed rows, not of the stored ones."""
    stored = in_arrow([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    doubled = stored.with_transform(lambda batch: {"input_ids": [ids * 2 for ids in batch["input_ids"]]})
    assert row_lengths(doubled, "causal_lm").tolist() == [6, 2]
    assert row_lengths(stored.with_format("torch"), "causal_lm").tolist() == [3, 1]


def test_labels_of_classes_are_not_checked():
    """A classifier's label is a number, so its column has no lists."""
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2], "labels": 0}, {"input_ids": [3], "labels": 1}])
    assert row_lengths(rows, "sequence_classification").tolist() == [2, 1]


def test_no_object_per_token_is_made():
    """The lengths of 20 000 rows of 64 tokens take less than the tokens as Python lists would in one block."""
    tokens = np.ones((20_000, 64), dtype=np.int64)
    rows = in_arrow([{"input_ids": [1], "labels": [1]}]).select([])
    rows = datasets.concatenate_datasets(
        [rows, datasets.Dataset.from_dict({"input_ids": list(tokens), "labels": list(tokens)}, features=rows.features)]
    )
    tracemalloc.start()
    try:
        assert row_lengths(rows, "causal_lm").tolist() == [64] * 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 4096 * 64 * 8 * 2


@pytest.mark.parametrize("arrow", [True, False])
def test_rows_beyond_the_model_are_refused(arrow):
    """A row that the model cannot read is found before the first step, in Arrow and in a list."""
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5]}, {"input_ids": [9]}]
    dataset = in_arrow(rows) if arrow else rows
    with pytest.raises(DataError, match="3 tokens"):
        row_lengths(dataset, None, Limits(positions=2))
    with pytest.raises(DataError, match="embedding table"):
        row_lengths(dataset, None, Limits(tokens=9))
    assert row_lengths(dataset, None, Limits(3, 10)).tolist() == [2, 3, 1]


def test_the_limits_are_those_of_the_models_tables():
    """GPT-2 has a table of positions; RoBERTa's begins after its padding token; Llama has none."""
    sizes = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    )
    assert Limits.of(gpt2) == Limits(16, 40)
    roberta = transformers.RobertaConfig(**sizes, intermediate_size=8, max_position_embeddings=18, pad_token_id=1)
    assert Limits.of(transformers.RobertaForSequenceClassification(roberta)) == Limits(16, 40)
    opt = transformers.OPTConfig(**sizes, ffn_dim=8, max_position_embeddings=16, word_embed_proj_dim=8)
    assert Limits.of(transformers.OPTForCausalLM(opt)) == Limits(16, 40)
    llama = transformers.LlamaConfig(**sizes, intermediate_size=8, max_position_embeddings=16)
    assert Limits.of(transformers.LlamaForCausalLM(llama)) == Limits(None, 40)


def test_a_tower_for_images_or_sound_sets_no_limit_for_tokens():
    """Its positions count patches or frames. A model that only writes text has the lengths of its labels."""
    assert Limits.of(llava()) == Limits(None, 64)
    assert Limits.of(get_peft_model(whisper(), LoraConfig(target_modules=["q_proj"]))) == Limits(32, 64, "labels")
    rows = [{"input_features": [[0.0]], "labels": [5, -100]}, {"input_features": [[0.0]], "labels": [6, 7, 8]}]
    assert row_lengths(rows, "seq2seq_lm", Limits(32, 64, "labels")).tolist() == [2, 3]
    with pytest.raises(DataError, match="3 tokens"):
        row_lengths(rows, "seq2seq_lm", Limits(2, 64, "labels"))
    with pytest.raises(DataError, match="input_features"):
        row_lengths([{"input_features": [[0.0]]}], "seq2seq_lm", Limits(2, 64, "labels"))


def test_rows_with_other_columns_than_the_first_are_refused():
    """Collators read the columns of a batch's first row, so that one row would change the others."""
    rows = [{"input_ids": [1, 2], "token_type_ids": [0, 1]}, {"token_type_ids": [0], "input_ids": [3]}]
    assert row_lengths(rows, None).tolist() == [2, 1]
    with pytest.raises(DataError, match="token_type_ids"):
        row_lengths([*rows, {"input_ids": [4]}], None)


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        ("sequence_classification", [0, 2, -100, 1.0], [3, -1, 0.5]),
        ("token_classification", [[0, 2], [-100, 1]], [[0, 3], [-1, 0]]),
        ("question_answering", [[0, 1, 2], [3, 0, -100]], [[0, 4, 0], [-1, 0, 0]]),
    ],
)
def test_labels_that_a_head_does_not_have_are_refused(task, good, bad):
    """The loss ended in an IndexError of PyTorch after a charged step, on a GPU in a failure of the device."""
    for name, several in (("labels", True), ("label", True), ("labels", False)):
        for make in (list, datasets.Dataset.from_list):
            refuse_other_classes(make([{name: one} for one in good]), task, 3)
            for one in bad:
                rows = [{name: good[0]}, {name: one}] if several else [{name: [one] if task[0] == "s" else one}]
                with pytest.raises(DataError, match=rf"row {len(rows) - 1} has a label that is neither"):
                    refuse_other_classes(make(rows), task, 3)
    refuse_other_classes([{"labels": 9.5}], "regression", 1)
    refuse_other_classes([{"labels": "text"}, {"labels": None}, {}], task, 3)
