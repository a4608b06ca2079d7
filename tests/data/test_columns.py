"""Tests of dpllm.data.columns: formats and ids are proposed by names and kinds; no value leaves the module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpllm.config import ConfigError, DataConfig
from dpllm.data.columns import columns_of, texts_of
from dpllm.data.readers import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def found_in(folder: Path, *records: dict) -> object:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return columns_of(DataConfig(path=str(path), max_length=2))


SAID = "It rained all day."
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]


@pytest.mark.parametrize(
    ("record", "form", "columns"),
    [
        ({"id": 1, "note": SAID}, "text", {"text": "note"}),
        ({"title": "Rain", "Text": SAID}, "text", {"text": "Text"}),
        ({"n": 1, "clinicalNote": SAID}, "text", {"text": "clinicalNote"}),
        ({"note_date": "1 May in the year 2020", "NOTE_BODY": SAID}, "text", {"text": "NOTE_BODY"}),
        ({"review": "雨が一日中降っていました"}, "text", {"text": "review"}),
        (
            {"answer": "42", "question": SAID},
            "prompt_completion",
            {"prompt": "question", "completion": "answer"},
        ),
        (
            {"instruction": SAID, "input": "", "output": "yes"},
            "instruction",
            {"instruction": "instruction", "output": "output"},
        ),
        (
            {"instruction": SAID, "context": SAID, "response": "yes", "category": "open_qa"},
            "instruction",
            {"instruction": "instruction", "input": "context", "output": "response"},
        ),
        ({"messages": CHAT}, "chat", {"messages": "messages"}),
        ({"messages": json.dumps(CHAT)}, "chat", {"messages": "messages"}),
        ({"prompt": SAID, "earlier": CHAT, "messages": CHAT}, "chat", {"messages": "messages"}),
        (
            {"messages": [*CHAT, {"role": "user", "content": [{"type": "text", "text": "so"}]}]},
            "chat",
            {"messages": "messages"},
        ),
        ({"id": "c1", "conversations": SHAREGPT}, "chat", {"messages": "conversations"}),
        ({"dialogue": CHAT, "text": SAID}, "chat", {"messages": "dialogue"}),
        (
            {"sentence": SAID, "label": 0},
            "classification",
            {"text": "sentence", "label": "label"},
        ),
        (
            {"review": SAID, "sentiment": "bad"},
            "classification",
            {"text": "review", "label": "sentiment"},
        ),
    ],
)
def test_the_format_follows_names_and_content(tmp_path, record, form, columns):
    """A proposal; the person decides."""
    found = found_in(tmp_path, record)
    assert found.guessed_format() == form
    assert {key: found.proposed(key) for key in columns} == columns


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([{"n": 1}], id="numbers"),
        pytest.param([{"beschreibung": SAID}], id="sentences without a usual name"),
        pytest.param([{"text": f"A{n:05d}"} for n in range(20)], id="ids in a usual name"),
        pytest.param([{"note": "2024-05-01"}, {"note": "2024-05-02"}], id="dates in a usual name"),
        pytest.param([{"text": "https://a.example/1"}, {"text": "https://a.example/2"}], id="addresses"),
        pytest.param([{"message_id": SAID}], id="a name about a text"),
        pytest.param([{"text": None, "n": 1}, {"text": "", "n": 2}], id="an empty column"),
        pytest.param(
            [{"question": SAID, "answer": f"{n}"} for n in range(20)], id="answers that are all other numbers"
        ),
        pytest.param([{"prompt": SAID, "completion": 7}], id="a completion that is no text"),
    ],
)
def test_without_evidence_nothing_is_proposed(tmp_path, records):
    """Neither a name alone nor sentences alone are an answer."""
    assert found_in(tmp_path, *records).guessed_format() is None


def test_labels_repeat(tmp_path):
    """Numbers that are all different are no classes."""
    found = found_in(tmp_path, *({"text": SAID, "label": n / 7} for n in range(40)))
    assert (found.guessed_format(), found.proposed("label")) == ("text", None)


def test_a_column_of_people_is_no_label_and_no_text(tmp_path):
    found = found_in(tmp_path, *({"text": SAID, "author": "Ann Lee"} for _ in range(3)))
    assert found.people == ("author",) and found.guessed_format() == "text"


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"prompt": SAID, "chosen": "yes", "rejected": "no"}, "preference"),
        ({"chosen": CHAT, "rejected": CHAT}, "preference"),
        ({"words": ["a"], "tags": [0]}, "tokens"),
        (
            {"question": SAID, "context": SAID, "answers": {"text": ["It"], "answer_start": [0]}},
            "question_answering",
        ),
    ],
)
def test_formats_without_questions_are_named(tmp_path, record, form):
    found = found_in(tmp_path, record)
    assert (found.guessed_format(), found.format_of_others()) == (None, form)


@pytest.mark.parametrize(
    "name",
    ["patient_id", "PatientID", "user", "author_name", "mrn", "customer_no", "the_sender", "reviewerID", "PAT_ID"],
)
def test_a_column_of_people_has_their_name_and_repeats(tmp_path, name):
    """A number of the record itself is no person, and neither is a column whose name says nothing of one."""
    repeated = found_in(tmp_path, {name: "a", "text": "x"}, {name: "a", "text": "y"})
    assert repeated.people == (name,)
    assert found_in(tmp_path, {name: "a", "text": "x"}, {name: "b", "text": "y"}).people == ()
    assert found_in(tmp_path, {"ward": "a", "text": "x"}, {"ward": "a", "text": "y"}).people == ()


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".txt", ".json"])
def test_every_kind_of_file(tmp_path, ending):
    """Cells of tables are texts; a line of a text file is one."""
    text = {".csv": "text,label\nx,1\n", ".tsv": "text\tlabel\nx\t1\n", ".txt": "x\n", ".json": '[{"text": "x"}]'}
    path = tmp_path / f"records{ending}"
    path.write_text(text[ending])
    assert columns_of(DataConfig(path=str(path), max_length=2)).kinds["text"] == "text"
    assert (
        columns_of(DataConfig(path=str(tmp_path), max_length=2)).kinds
        == columns_of(DataConfig(path=str(path), max_length=2)).kinds
    )


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("nowhere.jsonl", ConfigError, "no such file or folder"),
        ("nowhere", ConfigError, "no such file or folder here"),
        ("empty.jsonl", DataError, "it contains no record"),
        ("mixed.jsonl", DataError, "column 'text' holds text .*line 2"),
        ("builtin:none", ConfigError, "unknown corpus"),
    ],
)
def test_mistakes_name_the_place(tmp_path, monkeypatch, path, error, message):
    """And never a value."""
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    Path("mixed.jsonl").write_text('{"text": "secret"}\n{"text": 7}\n')
    with pytest.raises(error, match=message) as caught:
        columns_of(DataConfig(path=path, max_length=2))
    assert "secret" not in str(caught.value)


def test_columns_are_read_as_the_recipe_says(tmp_path):
    """So that a training whose records are read by a key looks at the same columns."""
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps({"version": 1, "data": [{"author": "a", "text": "x"}, {"author": "a", "text": "y"}]}))
    assert columns_of(DataConfig(path=str(nested), max_length=2, field="data")).people == ("author",)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "dev.csv").write_text("0;1;note\n5;x;y\n")
    parts = DataConfig(path=str(tmp_path / "parts"), max_length=2, split="dev", delimiter=";", columns={"text": "1"})
    assert list(columns_of(parts).kinds) == ["0", "1", "note"]


def test_texts_of_a_record():
    """Of messages, lists and cells."""
    assert texts_of(["a", {"role": "user", "content": "b"}, 7, None, ["c"]]) == ["a", "user", "b", "c"]
