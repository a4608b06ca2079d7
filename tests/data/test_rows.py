"""Rows, units and tensors: the training loop receives exactly the contents of the data set."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dpllm.config import ConfigError, DataConfig, PrivacyConfig
from dpllm.data.rows import (
    DataError,
    PackedCollator,
    RowCollator,
    load_records,
    load_train_and_eval,
    num_labels_of,
    tokenization_info,
    tokenize_records,
    train_tokenizer,
    unit_index_of,
)
from dpllm.mechanism.sampling import seeded_rng
from dpllm.privacy.ledger import Ledger, read_ledger
from dpllm.privacy.plan import make_plan
from dpllm.privacy.private_folder import DATA_FILES_FILE
from dpllm.report.definition import define
from dpllm.report.release_notes import ReleaseNotes
from dpllm.training.ledger_notes import note_data, note_units
from tests.mutations import kills
from tests.tiers import SHARED, needs_shared_data

TEXTS = ["The ship sails at dawn.", "A short one.", "Nobody knows what the harbour master wrote that night, or why."]
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "General!"},
    {"role": "user", "content": "What now?"},
    {"role": "assistant", "content": "We sail."},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS * 20, vocab_size=300, max_length=64)


def config(**values) -> DataConfig:
    return DataConfig(**{"path": "unused", "max_length": 64, **values})


def privacy(**values) -> PrivacyConfig:
    return PrivacyConfig(**{"clip_norm": 1.0, "expected_batch_size": 1, "noise_multiplier": 1.0, **values})


def rows_of(records, tokenizer, **values):
    options = {key: values.pop(key) for key in ("keep", "task", "num_labels") if key in values}
    return tokenize_records(datasets.Dataset.from_list(records), tokenizer, config(**values), **options)


class TestText:
    def test_every_token_is_a_target_and_the_end_is_marked(self, tokenizer):
        """A text is learned to its end."""
        rows = rows_of([{"text": text} for text in TEXTS], tokenizer)
        assert [tokenizer.decode(ids) for ids in rows["input_ids"]] == [f"<s>{text}</s>" for text in TEXTS]
        assert rows["labels"][:] == rows["input_ids"][:]
        assert rows["record"][:] == [0, 1, 2]

    def test_truncation_keeps_the_beginning_and_is_counted(self, tokenizer):
        """A long record becomes one row, and the data set counts the records that were cut."""
        rows = rows_of([{"text": text} for text in TEXTS], tokenizer, max_length=8)
        assert max(map(len, rows["input_ids"])) == 8
        assert tokenization_info(rows)["records_truncated"] == sum(len(tokenizer(t).input_ids) + 1 > 8 for t in TEXTS)
        assert tokenization_info(rows)["rows"] == 3

    @pytest.mark.parametrize("max_length", [2, 3, 7, 11])
    def test_a_split_record_has_every_target_exactly_once(self, tokenizer, max_length):
        """The rows of a record predict together the same tokens as the whole record."""
        whole = rows_of([{"text": text} for text in TEXTS], tokenizer)
        rows = rows_of([{"text": text} for text in TEXTS], tokenizer, max_length=max_length, long_records="split")
        for number, labels in enumerate(whole["labels"]):
            parts = [row["labels"][1:] for row in rows if row["record"] == number]
            assert [label for part in parts for label in part] == labels[1:]
        assert set(rows["record"][:]) == {0, 1, 2}

    def test_no_record_is_lost_or_added(self, tokenizer):
        """N is the same before and after, blank texts included."""
        records = [{"text": text} for text in ["", " ", "\n", "a", *TEXTS * 700]]
        for long_records in ("truncate", "split"):
            rows = rows_of(records, tokenizer, max_length=9, long_records=long_records)
            assert sorted(set(rows["record"][:])) == list(range(len(records)))
            assert unit_index_of(rows, privacy()).num_units == len(records)

    def test_a_record_with_nothing_to_predict_is_refused_by_number(self):
        """A row without a target has no loss; it is an error and is not dropped silently."""
        bare = train_tokenizer(TEXTS, vocab_size=300, max_length=64)
        bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
        with pytest.raises(DataError, match="record 1"):
            rows_of([{"text": "fine"}, {"text": ""}], bare)

    def test_a_length_beyond_the_tokenizers_is_refused(self, tokenizer):
        """A row longer than the model's context is an error before training, not during it."""
        with pytest.raises(ConfigError, match="max_length=65"):
            rows_of([{"text": "x"}], tokenizer, max_length=65)

    def test_kept_columns_travel_with_every_row(self, tokenizer):
        """A user's id reaches all rows of a record that is split."""
        records = [{"text": TEXTS[2], "who": "ann"}, {"text": TEXTS[1], "who": "bob"}]
        rows = rows_of(records, tokenizer, keep=("who",), max_length=8, long_records="split")
        assert len(rows) > 2
        assert {(row["record"], row["who"]) for row in rows} == {(0, "ann"), (1, "bob")}

    def test_a_column_that_cannot_be_kept_is_refused(self, tokenizer):
        """A column of the rows is never overwritten by one of the records."""
        with pytest.raises(DataError, match="column 'user"):
            rows_of([{"text": "x"}], tokenizer, keep=("user",))
        with pytest.raises(ConfigError, match="column 'record"):
            rows_of([{"text": "x", "record": 7}], tokenizer, keep=("record",))

    def test_information_of_a_foreign_data_set_is_refused(self):
        """A data set without counts is an error; counts are never invented."""
        with pytest.raises(DataError, match="tokenize_records"):
            tokenization_info(datasets.Dataset.from_list([{"input_ids": [1]}]))


class TestPromptCompletion:
    def test_the_loss_is_only_on_the_completion(self, tokenizer):
        """The prompt has no loss; the completion and its end have."""
        row = rows_of([{"prompt": "Q: ", "completion": "yes"}], tokenizer, format="prompt_completion")[0]
        assert tokenizer.decode(row["input_ids"]) == "<s>Q: yes</s>"
        learned = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(learned) == "yes</s>"
        assert row["labels"][: -len(learned)] == [-100] * (len(row["input_ids"]) - len(learned))

    def test_a_long_prompt_gives_way_to_the_completion(self, tokenizer):
        """Truncation never leaves a record without a target, nor drops the beginning-of-sequence token."""
        records = [{"prompt": "word " * 50 + "END", "completion": "yes"}]
        row = rows_of(records, tokenizer, format="prompt_completion", max_length=16)[0]
        assert len(row["input_ids"]) == 16
        text = tokenizer.decode(row["input_ids"])
        assert text.startswith("<s>") and text.endswith("ENDyes</s>")

    def test_a_long_completion_leaves_half_of_the_row_to_the_prompt(self, tokenizer):
        """Both parts keep at least half of the row."""
        records = [{"prompt": "word " * 50, "completion": "yes " * 50}]
        row = rows_of(records, tokenizer, format="prompt_completion", max_length=16)[0]
        assert (len(row["input_ids"]), sum(label != -100 for label in row["labels"])) == (16, 8)

    def test_a_split_record_leaves_rows_without_target_out_and_no_record(self, tokenizer):
        """Only rows that have no loss disappear."""
        records = [{"prompt": "word " * 50, "completion": "yes " * 50}, {"prompt": "", "completion": ""}]
        rows = rows_of(records, tokenizer, format="prompt_completion", max_length=16, long_records="split")
        assert all(any(label != -100 for label in labels[1:]) for labels in rows["labels"])
        assert set(rows["record"][:]) == {0, 1}
        learned = [label for row in rows if row["record"] == 0 for label in row["labels"][1:] if label != -100]
        assert tokenizer.decode(learned) == "yes " * 50 + "</s>"

    def test_an_encoder_decoder_gets_the_completion_as_labels(self, tokenizer):
        """Labels of an encoder-decoder may have another length than the input."""
        records = [{"prompt": "a", "completion": "a much longer completion"}]
        rows = rows_of(records, tokenizer, format="prompt_completion", task="seq2seq_lm")
        assert tokenizer.decode(rows[0]["input_ids"]) == "<s>a"
        assert len(rows[0]["labels"]) > len(rows[0]["input_ids"])
        batch = RowCollator(pad_token_id=0, task="seq2seq_lm")(list(rows))
        assert batch["labels"].shape[1] > batch["input_ids"].shape[1]


class TestChat:
    @pytest.fixture
    def chatty(self, tokenizer):
        copy = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
        )
        copy.chat_template = CHATML
        return copy

    def said(self, rows, tokenizer) -> str:
        return tokenizer.decode([label for label in rows[0]["labels"] if label != -100])

    def test_the_loss_is_on_the_assistants_turns(self, chatty):
        """Without marks in the template, the assistant's turns are learned, with their ends, without their openings."""
        rows = rows_of([{"messages": CHAT}], chatty, format="chat", max_length=200)
        assert self.said(rows, chatty) == "General!</s>We sail.</s>"
        assert "Bye" not in chatty.decode(rows[0]["input_ids"])

    def test_marks_of_the_template_decide(self, chatty):
        """A template that marks the assistant's words is followed."""
        chatty.chat_template = MARKED
        assert (
            self.said(rows_of([{"messages": CHAT}], chatty, format="chat", max_length=200), chatty)
            == "General!</s>We sail.</s>"
        )

    @pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
    def test_a_template_that_writes_the_date_gives_the_same_rows_on_another_day(self, chatty, template):
        """A run is resumed on the next day, and its rows are compared with those of its start."""
        plain = [{"messages": CHAT}]
        chatty.chat_template = template
        (undated,) = rows_of(plain, chatty, format="chat", max_length=200)
        chatty.chat_template = "\n{% set day = strftime_now('%-d %b %Y, %H:%M') %}Today: {{ day }}. " + template
        (dated,) = rows_of(plain, chatty, format="chat", max_length=200)
        assert chatty.decode(dated["input_ids"]) == "\nToday: 26 Jul 2024, 00:00. " + chatty.decode(
            undated["input_ids"]
        )
        assert self.said([dated], chatty) == self.said([undated], chatty)

    @pytest.mark.parametrize(
        "drawn", ["{{ ['a', 'b']|random }}", "{{ [['a']]|map('random')|first }}", "{{ lipsum() }}"]
    )
    def test_a_template_that_draws_random_numbers_is_refused(self, chatty, drawn):
        """After a fixed seed, leaving out a record gives each later one other numbers."""
        chatty.chat_template = drawn + CHATML
        with pytest.raises(ConfigError, match="lipsum"):
            rows_of([{"messages": CHAT}], chatty, format="chat", max_length=200)

    @kills(
        "a chat has the keys of other chats",
        "dpllm/data/messages.py",
        "message = dict(own_value(raw))",
        "message = {k: v for k, v in raw.items() if v is not None}",
    )
    @pytest.mark.parametrize("template", [CHATML, MARKED], ids=["unmarked", "marked"])
    def test_no_chat_has_keys_or_kinds_of_numbers_of_another(self, chatty, template):
        """A table gives each object the keys of all rows, in the order of the first, and makes 1 of one row 1.0."""
        chatty.chat_template = template.replace("</s>", "{{ m.call | tojson if m.call }}</s>")
        calls = {"a": 1, "b": "x"}, {"c": 1, "b": "y", "a": 2.5}
        own, other = ([{**CHAT[0], "call": call}, CHAT[1]] for call in calls)
        rows = [{"messages": other}, {"messages": own}]
        found = [rows_of(part, chatty, format="chat", max_length=200)[-1] for part in (rows[1:], rows)]
        assert found[0]["input_ids"] == found[1]["input_ids"]
        assert found[0]["labels"] == found[1]["labels"]

    def test_a_turn_that_later_messages_change_carries_no_loss(self, chatty):
        """Only text of the rendered chat is learned."""
        chatty.chat_template = (
            "{% for m in messages %}<|{{ m['role'] }}|>{% if loop.last and m['role'] == 'assistant' %}Hm. {% endif %}"
            "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )
        rows = rows_of([{"messages": CHAT}], chatty, format="chat", max_length=200)
        assert self.said(rows, chatty) == "Hm. We sail.</s>"

    @pytest.mark.parametrize("key", ["role", "content"])
    def test_a_message_without_its_parts_is_refused(self, chatty, key):
        """A message needs a role and a content."""
        broken = [CHAT[0], {k: v for k, v in CHAT[1].items() if k != key}]
        with pytest.raises(DataError, match=f"record 1: message 1 has no text in '{key}'"):
            rows_of([{"messages": CHAT}, {"messages": broken}], chatty, format="chat", max_length=200)

    @pytest.mark.parametrize(
        ("template", "messages", "message"),
        [
            (CHATML, CHAT[:1], "record 0: all labels are masked"),  # the assistant says nothing
            (
                "{{ raise_exception('roles must alternate') }}",
                CHAT,
                "record 0: the chat template refuses.*roles must alternate",
            ),
            (
                "{% for i in range(1000000000) %}x{% endfor %}",
                CHAT,
                r"record 0: the chat template refuses these messages \(.*[Rr]ange",
            ),
        ],
        ids=["no answer", "refused", "endless"],
    )
    def test_a_chat_without_a_row_is_refused(self, chatty, template, messages, message):
        """With the template's own error, which is a program's, on one line, and the number of the record."""
        chatty.chat_template = template
        with pytest.raises(DataError, match=message):
            rows_of([{"messages": messages}], chatty, format="chat", max_length=200)

    def test_a_tokenizer_without_a_template_is_refused(self, tokenizer):
        """A template is never invented."""
        with pytest.raises(ConfigError, match="needs a tokenizer"):
            rows_of([{"messages": CHAT}], tokenizer, format="chat")


class TestClassification:
    RECORDS = ({"text": "good " * 40, "label": 1}, {"text": "bad", "label": 0})

    def test_a_row_is_the_text_and_its_class(self, tokenizer):
        """The label is the class number, and a long text is truncated."""
        rows = rows_of(self.RECORDS, tokenizer, format="classification", task="sequence_classification", max_length=8)
        assert rows["labels"][:] == [1, 0]
        assert len(rows[0]["input_ids"]) == 8
        assert tokenization_info(rows)["records_truncated"] == 1

    @pytest.mark.parametrize(("first", "second"), [(True, False), (1.0, 0.0)])
    def test_whole_numbers_and_truth_values_are_classes(self, tokenizer, first, second):
        """Pandas writes 1 as 1.0 beside a missing value, and JSON has true and false."""
        records = [{"text": "good", "label": first}, {"text": "bad", "label": second}]
        rows = rows_of(records, tokenizer, format="classification", task="sequence_classification", num_labels=2)
        assert rows["labels"][:] == [1, 0]

    @pytest.mark.parametrize(
        ("label", "message"),
        [
            (2, r"record 1: the label must be one of 0..1 \(model.num_labels\)"),
            (-1, "record 1: the label must be one of 0..1"),
        ],
    )
    def test_a_label_outside_the_classes_is_refused(self, tokenizer, label, message):
        """A wrong class fails before training, by record."""
        records = [self.RECORDS[0], {"text": "bad", "label": label}]
        with pytest.raises(DataError, match=message):
            rows_of(records, tokenizer, format="classification", task="sequence_classification", num_labels=2)

    def test_names_of_classes_are_refused(self, tokenizer):
        """Names are not numbered here: the numbering would depend on which occur in the private records."""
        with pytest.raises(DataError, match="record 0"):
            rows_of([{"text": "x", "label": "yes"}], tokenizer, format="classification", task="sequence_classification")

    def test_the_number_of_classes_comes_only_from_the_schema(self):
        """The private labels are never counted."""
        plain = datasets.Dataset.from_list(list(self.RECORDS))
        named = plain.cast_column("label", datasets.ClassLabel(names=["bad", "fair", "good"]))
        assert num_labels_of(plain, config()) is None
        assert num_labels_of(named, config()) == 3

    def test_the_schema_of_a_local_file_does_not_count_classes(self, tmp_path):
        """Its author may have collected the names from the labels: a rare one would show in the shape of the head."""
        named = datasets.Dataset.from_list(list(self.RECORDS))
        named = named.cast_column("label", datasets.ClassLabel(names=["bad", "fair", "good"]))
        named.to_parquet(tmp_path / "data.parquet")
        wanted = config(path=str(tmp_path / "data.parquet"), format="classification")
        records = load_records(wanted)
        assert isinstance(records.features["label"], datasets.ClassLabel) and num_labels_of(records, wanted) is None
        declared = replace(wanted, class_names=["bad", "fair", "good"])
        assert num_labels_of(load_records(declared), declared) == 3
        with pytest.raises(DataError, match="differ in order or names"):
            load_records(replace(wanted, class_names=["good", "fair", "bad"]))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"format": "text", "task": "sequence_classification"}, "data.format='text' cannot be combined with"),
            ({"format": "classification", "task": "causal_lm"}, "cannot be combined with model.task='causal_lm'"),
            (
                {"format": "classification", "task": "sequence_classification", "long_records": "split"},
                "long_records='split' is for causal_lm",
            ),
        ],
    )
    def test_formats_and_tasks_that_do_not_go_together_are_refused(self, tokenizer, values, message):
        """A recipe that contradicts itself fails before anything is read."""
        with pytest.raises(ConfigError, match=message):
            rows_of(self.RECORDS, tokenizer, **values)


class TestUnits:
    RECORDS = tuple({"text": text, "who": who} for text, who in zip(TEXTS * 2, "abacab", strict=True))

    @pytest.mark.parametrize("long_records", ["truncate", "split"])
    @pytest.mark.parametrize(
        ("unit", "num_units"),
        [({}, 6), ({"unit": "who", "max_rows_per_unit": 2}, 3)],
    )
    def test_records_and_rows_have_the_same_number_of_units(self, tokenizer, long_records, unit, num_units):
        """N can be known without tokenizing, and tokenizing does not change it."""
        rows = rows_of(self.RECORDS, tokenizer, max_length=8, long_records=long_records, keep=("who",))
        records = datasets.Dataset.from_list(list(self.RECORDS))
        for dataset in (records, rows, list(rows)):
            assert unit_index_of(dataset, privacy(**unit)).num_units == num_units

    def test_all_rows_of_a_split_record_are_one_unit(self, tokenizer):
        """Cutting a record does not weaken its protection."""
        rows = rows_of(self.RECORDS, tokenizer, max_length=8, long_records="split")
        index = unit_index_of(rows, privacy())
        for unit in range(index.num_units):
            own = index.rows[index.offsets[unit] : index.offsets[unit + 1]]
            assert {rows[int(row)]["record"] for row in own} == {unit}
        assert index.num_rows == len(rows) > 6

    def test_numbers_in_arrow_and_in_rows_give_one_index(self, tokenizer):
        """A column of whole numbers is never a list of Python numbers, and a number that is missing is still seen."""
        rows = rows_of(self.RECORDS, tokenizer, max_length=8, long_records="split")
        user = privacy(unit="who", max_rows_per_unit=2)
        users = datasets.Dataset.from_list([{"text": "x", "who": who} for who in (7, -1, 7, 3, 7, -1)])
        for dataset, section in ((rows, privacy()), (rows.select([2, 0, 1, 3]), privacy()), (users, user)):
            of_arrow, of_rows = unit_index_of(dataset, section), unit_index_of(list(dataset), section)
            assert list(of_arrow.rows) == list(of_rows.rows) and list(of_arrow.offsets) == list(of_rows.offsets)
            assert of_arrow.rows_dropped == of_rows.rows_dropped
        with pytest.raises(ValueError, match="usable"):
            unit_index_of(datasets.Dataset.from_list([{"text": "x", "who": who} for who in (7, None)]), user)

    def test_a_column_named_record_in_raw_data_is_not_a_unit(self):
        """Only the column made by the tokenization determines which rows belong together."""
        records = datasets.Dataset.from_list([{"text": "x", "record": 1}, {"text": "y", "record": 1}])
        assert unit_index_of(records, privacy()).num_units == 2

    def test_missing_ids_columns_and_rows_are_refused(self):
        """A row that belongs to no user cannot be protected as part of one."""
        user = privacy(unit="who", max_rows_per_unit=1)
        with pytest.raises(ValueError, match="usable"):
            unit_index_of([{"who": "a"}, {"who": None}], user)
        with pytest.raises(DataError, match="column 'who"):
            unit_index_of([{"whom": "a"}], user)
        with pytest.raises(DataError, match="empty data"):
            unit_index_of([], user)


class TestCollator:
    def test_padding_is_seen_by_neither_attention_nor_loss(self):
        """Short rows are filled at the end, and the filling has no weight."""
        batch = RowCollator(pad_token_id=9)([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4]}])
        assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]
        assert all(tensor.dtype == torch.long for tensor in batch.values())

    def test_masks_and_types_of_the_rows_are_kept(self):
        """A row that comes with its own attention mask keeps it, and masked tokens are no targets."""
        row = {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0], "token_type_ids": [0, 1, 1], "other": "x"}
        batch = RowCollator(pad_token_id=0)([row, {"input_ids": [3], "token_type_ids": [0]}])
        assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
        assert batch["labels"].tolist() == [[1, 2, -100], [3, -100, -100]]
        assert batch["token_type_ids"].tolist() == [[0, 1, 1], [0, 0, 0]]
        assert "other" not in batch

    def test_a_classifier_gets_one_class_per_row(self):
        """Labels of a classifier are (B,)."""
        collate = RowCollator(pad_token_id=0, task="sequence_classification")
        assert collate([{"input_ids": [1], "labels": 2}, {"input_ids": [1], "labels": 0}])["labels"].tolist() == [2, 0]
        assert collate([{"input_ids": torch.tensor([1]), "label": 2}])["labels"].tolist() == [2]

    def test_rows_that_cannot_be_collated_are_refused(self):
        """Labels longer than the input, missing columns and empty batches are errors; nothing is guessed."""
        collate = RowCollator(pad_token_id=0)
        with pytest.raises(DataError, match="3 labels"):
            collate([{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1, 2, 3]}])
        with pytest.raises(DataError, match="a row has no 'input_ids', only text"):
            collate([{"text": "x"}])
        with pytest.raises(DataError, match="no row to collate"):
            collate([])
        with pytest.raises(DataError, match="classifier needs"):
            RowCollator(pad_token_id=0, task="sequence_classification")([{"input_ids": [1]}])
        with pytest.raises(DataError, match="a row has no 'labels'"):
            RowCollator(pad_token_id=0, task="seq2seq_lm")([{"input_ids": [1]}])
        with pytest.raises(DataError, match=r"is 0\.5, but a class is a whole number"):  # it was cut to the one below
            RowCollator(pad_token_id=0, task="sequence_classification")([{"input_ids": [1], "labels": 0.5}])

    def test_the_columns_of_the_first_row_do_not_decide_for_the_others(self):
        """Token types, or one of two columns of labels, of a row may not depend on the row before it in the batch."""
        collate = RowCollator(pad_token_id=0)
        with_types = {"input_ids": [1, 2], "token_type_ids": [0, 1]}
        for lacking in ({"input_ids": [3]}, {"input_ids": [3], "token_type_ids": None}):
            for rows in ([lacking, with_types], [with_types, lacking]):
                with pytest.raises(DataError, match="token_type_ids"):
                    collate(rows)
        rows = [{"input_ids": [1], "labels": 0, "label": 1}, {"input_ids": [1], "labels": 1}]
        classes = RowCollator(pad_token_id=0, task="sequence_classification")
        assert classes(rows)["labels"].tolist() == classes(rows[::-1])["labels"].tolist()[::-1] == [1, 1]


class TestTrainedTokenizer:
    def test_any_text_survives_it(self, tokenizer):
        """Bytes are the alphabet, so no text is unknown."""
        text = "Größe: 12 €\n🙂\t'tis"
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert ids[0] == tokenizer.bos_token_id and tokenizer.eos_token_id not in ids

    def test_it_is_saved_and_loaded(self, tokenizer, tmp_path):
        """A model folder contains its tokenizer."""
        tokenizer.save_pretrained(tmp_path)
        again = AutoTokenizer.from_pretrained(tmp_path)
        assert again(TEXTS[2]).input_ids == tokenizer(TEXTS[2]).input_ids
        assert (again.pad_token, again.model_max_length) == ("<pad>", 64)


@needs_shared_data
class TestRealText:
    @pytest.mark.parametrize(
        ("folder", "adds_bos"), [("gpt2-tokenizer", False), ("stories15M", True), ("stories260K", True)]
    )
    def test_real_tokenizers_end_a_text_once_and_begin_it_as_they_do(self, folder, adds_bos):
        """The convention of each tokenizer is kept, and only the end-of-sequence token is added."""
        real = AutoTokenizer.from_pretrained(SHARED / folder)
        ids = rows_of([{"text": TEXTS[0]}], real)[0]["input_ids"]
        assert ids == [*real(TEXTS[0]).input_ids, real.eos_token_id]
        assert (ids[0] == real.bos_token_id) == adds_bos

    def test_all_of_e2e_becomes_rows_with_the_loss_on_the_reference(self):
        """A real data set of prompts and completions keeps its size, and its longest records keep their targets."""
        real = AutoTokenizer.from_pretrained(SHARED / "stories15M")
        wanted = config(
            path=str(SHARED / "e2e" / "devset.csv"),
            format="prompt_completion",
            columns={"prompt": "mr", "completion": "ref"},
            max_length=100,
        )
        records = load_records(wanted)
        rows = tokenize_records(records, real, wanted)
        assert len(records) == len(rows) == 4672
        learned = [label for label in rows[0]["labels"] if label != -100]
        assert real.decode(learned, skip_special_tokens=True) == records[0]["ref"]
        assert min(sum(label != -100 for label in labels) for labels in rows["labels"]) > 1


def test_rows_kept_at_random_are_drawn_and_counted_the_same() -> None:
    """With rows_kept="random" a user's rows are drawn from the generator; without one the numbers are the same."""
    rows = datasets.Dataset.from_dict({"input_ids": [[1]] * 40, "who": ["a"] * 30 + ["b"] * 10})
    config = privacy(unit="who", max_rows_per_unit=5, rows_kept="random")
    first, drawn, again, other = (
        unit_index_of(rows, config, rng) for rng in (None, seeded_rng(1), seeded_rng(1), seeded_rng(2))
    )
    assert first.rows.tolist() == [0, 1, 2, 3, 4, 30, 31, 32, 33, 34]
    assert drawn.rows.tolist() == again.rows.tolist() != other.rows.tolist() != first.rows.tolist()
    assert first.num_rows == drawn.num_rows == 10 and first.rows_dropped == drawn.rows_dropped == 30
    assert all(row < 30 for row in drawn.rows_of(np.array([0]))[0])


class TestPackedCollator:
    """Tests of concatenated rows."""

    def test_rows_begin_at_the_given_boundaries(self) -> None:
        """Between two boundaries are one row's tokens, positions and labels, its first label masked."""
        batch = PackedCollator()(
            [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 1]}]
        )
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1]]
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
        assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, 1]]
        assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
        assert batch["max_length_q"] == batch["max_length_k"] == 3 and "attention_mask" not in batch

    @pytest.mark.parametrize(
        "row",
        [
            {"input_ids": []},
            {"input_ids": [1, 2], "attention_mask": [0, 1]},
            {"input_ids": [1, 2], "token_type_ids": [0, 1]},
        ],
        ids=["empty", "padding", "token types"],
    )
    def test_rows_that_would_lose_something_are_refused(self, row: dict) -> None:
        """Nothing of a row is left out silently."""
        with pytest.raises(DataError, match="cannot be packed"):
            PackedCollator()([row, row])
        with pytest.raises(DataError, match="no row to collate"):
            PackedCollator()([])


class TestNotes:
    """Tests of the notes about the data in the ledger."""

    def note(self, tmp_path, records, rows, **values):
        plan = make_plan(privacy(**values), 10, 5)
        wanted = privacy(**values)
        with Ledger.create(tmp_path / "ledger.jsonl", plan) as ledger:
            note_data(ledger, rows, unit_index_of(rows, wanted), wanted)
        return read_ledger(tmp_path / "ledger.jsonl").notes

    def rows(self, tmp_path, tokenizer, texts, **values):
        lines = "".join(f'{{"text": "{text}", "who": "{who}"}}\n' for who, text in texts)
        (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
        records, _ = load_train_and_eval(config(path=str(tmp_path / "a.jsonl")))
        return records, tokenize_records(records, tokenizer, config(), keep=("who",))

    def test_files_are_not_for_release_and_copies_are_an_open_point(self, tmp_path, tokenizer):
        """No published file names a file of records or counts its records; the report asks about copies."""
        texts = [(str(number), "a text that is long enough") for number in range(10)]
        records, rows = self.rows(tmp_path, tokenizer, texts)
        notes = self.note(tmp_path, records, rows)
        assert notes.facts == {"a record is": ["one JSON object"]}
        assert json.loads((tmp_path / DATA_FILES_FILE).read_text()) == {"a.jsonl": 10}
        assert len(notes.open_points) == 1 and "copies of other records" in notes.open_points[0]

    def test_at_user_level_no_count_is_printed_and_case_is_an_open_point(self, tmp_path, tokenizer):
        """Only the number of users is public there."""
        texts = [("Ann", "a text that is long enough"), ("ann", "another text")] * 5
        records, rows = self.rows(tmp_path, tokenizer, texts)
        notes = self.note(tmp_path, records, rows, unit="who", max_rows_per_unit=2)
        assert notes.facts == {"a record is": ["one JSON object"]}
        assert len(notes.open_points) == 1 and "differ only in case" in notes.open_points[0]

    def test_ids_that_are_each_in_one_row_are_an_open_point(self, tmp_path, tokenizer):
        """If the id of a message were used as a person's id, each message would count as a person."""
        records, rows = self.rows(tmp_path, tokenizer, [(str(number), f"text {number}") for number in range(10)])
        notes = self.note(tmp_path, records, rows, unit="who", max_rows_per_unit=2)
        assert len(notes.open_points) == 1 and "No id in column 'who' occurs twice" in notes.open_points[0]
        records, rows = self.rows(tmp_path, tokenizer, [(str(number // 2), f"text {number}") for number in range(10)])
        other = tmp_path / "other"
        other.mkdir()
        assert not self.note(other, records, rows, unit="who", max_rows_per_unit=2).open_points


def test_tokenizing_long_records_takes_little_memory(tokenizer):
    """Records are encoded a bounded number of bytes at a time, and written to the disk."""
    records = datasets.Dataset.from_list([{"text": "The ship sails at dawn. " * 2000}] * 200)
    most = []
    encode = tokenizer.__class__.__call__

    class Watched(tokenizer.__class__):
        def __call__(self, texts, **options):
            most.append(sum(map(len, texts)))
            return encode(self, texts, **options)

    watched = Watched(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", bos_token="<s>")
    rows = tokenize_records(records, watched, config(max_length=64))
    assert len(rows) == 200 and max(most) <= 1 << 20 and sum(most) > 200 * 48_000 - 1


def _tokens(count, length=7):
    return [{"input_ids": [1] * length} for _ in range(count)]


def test_pieces_of_longer_texts_without_their_record_are_refused():
    """The columns of a tokenizer show that it cut texts; each piece would count as a unit."""
    rows = [{**row, "overflow_to_sample_mapping": 0} for row in _tokens(3)]
    with pytest.raises(DataError, match="overflow_to_sample_mapping"):
        unit_index_of(datasets.Dataset.from_list(rows), privacy())
    assert unit_index_of([{**row, "record": 0} for row in rows], privacy()).num_units == 1


def test_a_record_that_only_some_rows_name_is_refused():
    """The first row does not decide for all."""
    for rows in ([*_tokens(1), {**_tokens(1)[0], "record": 0}], [{**_tokens(1)[0], "record": 0}, *_tokens(1)]):
        with pytest.raises(DataError, match="others do"):
            unit_index_of(rows, privacy())


def test_the_ledger_says_how_units_were_made_and_doubts_rows_of_one_length(tmp_path):
    """Blocks of joined documents all have one length; rows that name their record are not doubted."""
    privacy = PrivacyConfig(clip_norm=1, expected_batch_size=4, noise_multiplier=1)
    plan = make_plan(privacy, 40, 3)
    lengths = np.full(40, 128)
    for name, rows, doubted in (
        ("blocks", _tokens(40), True),
        ("records", [{**row, "record": number} for number, row in enumerate(_tokens(40))], False),
    ):
        with Ledger.create(tmp_path / name, plan) as ledger:
            note_units(ledger, unit_index_of(rows, privacy), lengths)
        contents = read_ledger(tmp_path / name)
        assert any("same number of tokens" in point for point in contents.notes.open_points) == doubted
        unit = define(plan, contents, ReleaseNotes()).unit
        assert ("one row of the training data" in unit) == doubted
        assert ("several rows is still one unit" in unit) == (not doubted)
