"""Tests of dpllm.data.columns: formats and ids are proposed by names and kinds; no value leaves the module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpllm.config import ConfigError
from dpllm.data.columns import columns_of, texts_of
from dpllm.data.readers import DataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def found_in(folder: Path, *records: dict) -> object:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return columns_of(str(path))


@pytest.mark.parametrize(
    ("record", "form", "columns"),
    [
        ({"id": 1, "note": "x"}, "text", {"text_column": "note"}),
        ({"title": "x", "Text": "y"}, "text", {"text_column": "Text"}),
        ({"n": 1, "beschreibung": "x"}, "text", {"text_column": "beschreibung"}),
        (
            {"answer": "y", "question": "x"},
            "prompt_completion",
            {"prompt_column": "question", "completion_column": "answer"},
        ),
        ({"messages": CHAT}, "chat", {"messages_column": "messages"}),
        ({"dialogue": CHAT, "text": "x"}, "chat", {"messages_column": "dialogue"}),
        ({"sentence": "x", "label": 0}, "classification", {"text_column": "sentence", "label_column": "label"}),
        ({"review": "x", "sentiment": "bad"}, "classification", {"text_column": "review", "label_column": "sentiment"}),
        ({"n": 1}, None, {}),
    ],
)
def test_the_format_follows_names_and_kinds(tmp_path, record, form, columns):
    """A proposal; the person decides."""
    found = found_in(tmp_path, record)
    assert found.guessed_format() == form
    assert {key: found.proposed(key) for key in columns} == columns


@pytest.mark.parametrize("name", ["patient_id", "PatientID", "user", "author_name", "mrn", "customer_no", "the_sender"])
def test_a_column_of_people_has_their_name_and_repeats(tmp_path, name):
    """A number of the record itself is no person, and neither is a column whose name says nothing of one."""
    repeated = found_in(tmp_path, {name: "a", "text": "x"}, {name: "a", "text": "y"})
    assert repeated.people == (name,) and repeated.text_column() == "text"
    assert found_in(tmp_path, {name: "a", "text": "x"}, {name: "b", "text": "y"}).people == ()
    assert found_in(tmp_path, {"ward": "a", "text": "x"}, {"ward": "a", "text": "y"}).people == ()


def test_ids_are_not_taken_for_the_text(tmp_path):
    """Also where they come first and are texts."""
    found = found_in(tmp_path, {"patient": "p1", "entry": "x"}, {"patient": "p1", "entry": "y"})
    assert found.text_column() == "entry"


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".txt", ".json"])
def test_every_kind_of_file(tmp_path, ending):
    """Cells of tables are texts; a line of a text file is one."""
    text = {".csv": "text,label\nx,1\n", ".tsv": "text\tlabel\nx\t1\n", ".txt": "x\n", ".json": '[{"text": "x"}]'}
    path = tmp_path / f"records{ending}"
    path.write_text(text[ending])
    assert columns_of(str(path)).kinds["text"] == "text"
    assert columns_of(str(tmp_path)).kinds == columns_of(str(path)).kinds


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("nowhere.jsonl", ConfigError, "no such file or folder"),
        ("nowhere", ConfigError, "no such file or folder here, and a data set of the Hub is written owner/name"),
        ("empty.jsonl", DataError, "there is no record in it"),
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
        columns_of(path)
    assert "secret" not in str(caught.value)


def test_texts_of_a_record():
    """Of messages, lists and cells."""
    assert texts_of(["a", {"role": "user", "content": "b"}, 7, None, ["c"]]) == ["a", "user", "b", "c"]
