"""Labels of words and places of answers become labels of tokens."""

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dpllm.config import ConfigError, DataConfig
from dpllm.data.lengths import row_lengths
from dpllm.data.records import DataError, check_records
from dpllm.data.rows import RowCollator, num_labels_of, tokenization_info, tokenize_records, train_tokenizer
from dpllm.data.tokenization import Aligned, answer_of

TEXT = "Ada Lovelace lived in London and wrote the first program for an engine"


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE, whose tokens begin with the space before a word, with a pair template as BERT has."""
    trained = train_tokenizer([TEXT] * 3, vocab_size=290, max_length=64)
    trained.add_special_tokens({"sep_token": "<sep>"})
    from tokenizers.processors import TemplateProcessing

    inner = trained.backend_tokenizer
    special = [(token, inner.token_to_id(token)) for token in ("<s>", "<sep>")]
    inner.post_processor = TemplateProcessing(
        single="<s> $A <sep>", pair="<s> $A <sep> $B:1 <sep>:1", special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "sep_token": "<sep>"},
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=64,
    )


def rows_of(records, tokenizer, format, task, num_labels=None, max_length=64, **config):
    config = DataConfig(path="x", max_length=max_length, format=format, **config)
    return tokenize_records(datasets.Dataset.from_list(records), tokenizer, config, (), task, num_labels)


class TestWords:
    RECORDS = ({"words": ["Ada", "lived", "in", "London"], "tags": [1, 0, 0, 2]}, {"words": ["Ada"], "tags": [1]})

    def test_the_first_token_of_a_word_has_its_class(self, tokenizer):
        """Other tokens and special ones have none, and the text is that of the words."""
        rows = rows_of(self.RECORDS, tokenizer, "tokens", "token_classification", 3)
        ids, labels = rows[0]["input_ids"], rows[0]["labels"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "Ada lived in London"
        assert [label for label in labels if label != -100] == [1, 0, 0, 2]
        first = {tokenizer.decode(token).strip()[:1]: label for token, label in zip(ids, labels, strict=True)}
        assert first["A"] == 1 and first["l"] == 0 and first["L"] == 2
        assert labels[0] == labels[-1] == -100
        batch = RowCollator(pad_token_id=0, task="token_classification")(list(rows))
        assert batch["labels"].shape == batch["input_ids"].shape
        assert row_lengths(rows, "token_classification").tolist() == [len(ids), len(rows[1]["input_ids"])]

    def test_names_of_classes_are_numbered_by_the_recipe(self, tokenizer):
        """In its order, never in that of the records."""
        records = [{"words": ["in", "London"], "tags": ["O", "PLACE"]}]
        rows = rows_of(records, tokenizer, "tokens", "token_classification", 2, class_names=["O", "PLACE"])
        assert [label for label in rows[0]["labels"] if label != -100] == [0, 1]
        with pytest.raises(DataError, match="record 0"):
            rows_of(records, tokenizer, "tokens", "token_classification", 2)

    def test_a_long_record_is_cut_at_its_end_and_keeps_its_special_tokens(self, tokenizer):
        """Labels are cut with their tokens."""
        words = TEXT.split()
        rows = rows_of([{"words": words, "tags": [1] * len(words)}], tokenizer, "tokens", "token_classification", 2, 6)
        assert len(rows[0]["input_ids"]) == len(rows[0]["labels"]) == 6
        assert rows[0]["input_ids"][-1] == tokenizer.sep_token_id
        assert tokenization_info(rows)["records_truncated"] == 1

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"words": ["a", "b"], "tags": [1]}, "record 0 has 1 tags for 2 words"),
            ({"words": ["a"], "tags": [5]}, r"record 0: the label must be one of 0..2 \(model.num_labels\)"),
            ({"words": ["a", None], "tags": [1, 1]}, "record 0: a word is missing or is not text"),
            ({"words": [""], "tags": [1]}, "record 0 is empty"),
            ({"words": "a b", "tags": [1]}, "column 'words' holds string, but must hold lists"),
        ],
    )
    def test_records_without_a_class_for_each_word_are_refused(self, tokenizer, record, message):
        """By number, before training."""
        with pytest.raises(DataError, match=message):
            rows_of([record], tokenizer, "tokens", "token_classification", 3)

    def test_the_number_of_classes_is_that_of_the_schema(self):
        """Of a list of classes, too."""
        config = DataConfig(path="x", max_length=8, format="tokens")
        names = datasets.List(datasets.ClassLabel(names=["O", "A", "B", "C"]))
        features = datasets.Features({"words": datasets.List(datasets.Value("string")), "tags": names})
        assert num_labels_of(datasets.Dataset.from_list(list(self.RECORDS), features=features), config) == 4


class TestAnswers:
    RECORD = {  # noqa: RUF012
        "question": "Who lived in London?",
        "context": TEXT,
        "answers": {"text": ["Lovelace"], "answer_start": [4]},
    }

    def marked(self, tokenizer, row):
        ids, labels = row["input_ids"], row["labels"]
        (start,) = [n for n, label in enumerate(labels) if label > 0 and label & 1]
        (end,) = [n for n, label in enumerate(labels) if label > 0 and label & 2]
        return tokenizer.decode(ids[start : end + 1]).strip(), start

    def test_the_answer_is_marked_in_the_context(self, tokenizer):
        """Candidates are the context's tokens and the row's first one; types tell question from context."""
        rows = rows_of([self.RECORD], tokenizer, "question_answering", "question_answering")
        row = rows[0]
        assert self.marked(tokenizer, row)[0] == "Lovelace"
        second = row["input_ids"].index(tokenizer.sep_token_id) + 1
        assert row["labels"][0] == 0 and row["labels"][1:second] == [-100] * (second - 1)
        assert row["labels"][-1] == -100 and -100 not in row["labels"][second:-1]
        assert row["token_type_ids"] == [0] * second + [1] * (len(row["labels"]) - second)
        batch = RowCollator(pad_token_id=0, task="question_answering")(list(rows))
        assert batch["token_type_ids"].shape == batch["labels"].shape

    @pytest.mark.parametrize("why", ["no answer", "cut off"])
    def test_without_an_answer_the_first_token_is_marked(self, tokenizer, why):
        """The record keeps its row, so that N is the number of records."""
        record, limit = dict(self.RECORD), 64
        if why == "no answer":
            record["answers"] = {"text": [], "answer_start": []}
        else:
            record["answers"], limit = {"text": ["engine"], "answer_start": [TEXT.index("engine")]}, 20
        row = rows_of([record], tokenizer, "question_answering", "question_answering", max_length=limit)[0]
        assert self.marked(tokenizer, row)[1] == 0 and row["labels"][0] == 3 and len(row["labels"]) <= limit

    @pytest.mark.parametrize(
        ("answers", "message"),
        [
            ({"text": ["Ada"], "answer_start": [4]}, "record 7: the answer is not at character 4 of the context"),
            ({"text": ["Ada"], "answer_start": [-70]}, "record 7: an answer needs a text and a start"),
            ({"text": ["Ada"], "answer_start": []}, "record 7: an answer needs a text and a start"),
            ({"text": [""], "answer_start": [0]}, "record 7: an answer needs a text and a start"),
            ("Ada", "record 7: the answers must have "),
        ],
    )
    def test_answers_that_are_not_in_the_context_are_refused(self, answers, message):
        """The model would learn another place."""
        with pytest.raises(DataError, match=message):
            answer_of(answers, TEXT, 7)

    def test_a_tokenizer_without_places_is_refused(self, tokenizer, monkeypatch):
        """Its tokens cannot be found in the text."""
        monkeypatch.setattr(type(tokenizer), "is_fast", False)
        with pytest.raises(ConfigError, match="return the positions"):
            rows_of([self.RECORD], tokenizer, "question_answering", "question_answering")


def test_the_end_of_the_context_is_cut_before_the_question():
    """And special tokens last."""
    tokens = Aligned(list(range(7)), [0] * 7, [(0, 1)] * 7, [None, 0, 0, None, 1, 1, None])
    assert tokens.cut(6) and tokens.ids == [0, 1, 2, 3, 4, 6] and tokens.parts == [None, 0, 0, None, 1, None]
    assert tokens.cut(4) and tokens.ids == [0, 1, 3, 6]
    assert not tokens.cut(4)


class TestNumbers:
    def test_the_classes_of_a_record_are_a_vector(self, tokenizer):
        """1 for each of them; a list of names or of numbers."""
        records = [{"text": "a", "label": ["x", "z"]}, {"text": "b", "label": []}]
        rows = rows_of(
            *(records, tokenizer, "classification", "multi_label_classification", 3), class_names=["x", "y", "z"]
        )
        assert rows["labels"][:] == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
        batch = RowCollator(pad_token_id=0, task="multi_label_classification")(list(rows))
        assert batch["labels"].tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]

    def test_the_values_of_a_regression_are_kept(self, tokenizer):
        """One number, or a list of them."""
        one = rows_of([{"text": "a", "label": 0.5}], tokenizer, "classification", "regression", 1)
        two = rows_of([{"text": "a", "label": [0.5, 2.0]}], tokenizer, "classification", "regression", 2)
        assert one["labels"][:] == [[0.5]] and two["labels"][:] == [[0.5, 2.0]]

    @pytest.mark.parametrize("label", [[0.5, 1.0], float("nan"), "high"])
    def test_values_that_cannot_be_predicted_are_refused(self, tokenizer, label):
        """Another number of them, or none that is finite."""
        with pytest.raises(DataError, match="record 0"):
            rows_of([{"text": "a", "label": label}], tokenizer, "classification", "regression", 1)

    def test_the_number_of_outputs_must_be_known(self, tokenizer):
        """It is not counted in the private labels."""
        with pytest.raises(ConfigError, match="number of outputs"):
            rows_of([{"text": "a", "label": [1]}], tokenizer, "classification", "multi_label_classification")

    def test_rows_with_different_numbers_of_values_are_refused(self):
        """They do not fit one tensor."""
        collate = RowCollator(pad_token_id=0, task="regression")
        assert collate([{"input_ids": [1], "labels": np.array([1.0])}])["labels"].tolist() == [[1.0]]
        with pytest.raises(DataError, match=r"2\] target values"):
            collate([{"input_ids": [1], "labels": [1.0]}, {"input_ids": [1], "labels": [1.0, 2.0]}])
        with pytest.raises(DataError, match="needs its target values"):
            collate([{"input_ids": [1]}])


def test_labels_of_each_token_are_checked_before_training():
    """Their number, and that one of them is a target."""
    for task in ("token_classification", "question_answering"):
        with pytest.raises(DataError, match="1 labels"):
            row_lengths([{"input_ids": [3, 4], "labels": [1]}], task)
        with pytest.raises(DataError, match="row 0 has no target"):
            row_lengths(datasets.Dataset.from_list([{"input_ids": [3, 4], "labels": [-100, -100]}]), task)


def test_a_text_is_needed_where_a_question_is_asked():
    """Answers alone may be another kind."""
    config = DataConfig(path="x", max_length=8, format="question_answering")
    record = {"question": 3, "context": "a", "answers": {"text": [], "answer_start": []}}
    with pytest.raises(DataError, match="int64"):
        check_records(datasets.Dataset.from_list([record]), config, "here")
