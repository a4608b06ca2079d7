"""Labels, ids and file names of the private data are found in texts to publish; ordinary words are not."""

import json
import stat
from pathlib import Path

import pytest

from dpllm.privacy.private_folder import PRIVATE_FOLDER
from dpllm.report.private_strings import FEW, FILE, ID, LABEL, STRINGS_FILE, PrivateStrings, check_strings

RARE = "Creutzfeldt-Jakob (Anna K.)"


def strings(**kinds):
    found = PrivateStrings()
    for kind, texts in kinds.items():
        found.add({"labels": LABEL, "ids": ID, "files": FILE}[kind], texts)
    return found


def checked(folder: Path, found: PrivateStrings, public=(), **files):
    """The check of a folder with these files, by name, the last underscore being a dot."""
    folder.mkdir(exist_ok=True)
    found.save(folder, public)
    for name, content in files.items():
        place = folder / ".".join(name.rsplit("_", 1))
        place.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return check_strings(folder)


@pytest.mark.parametrize(
    ("kinds", "files", "place"),
    [
        ({"labels": [RARE]}, {"config_json": {"id2label": {"0": "healthy", "1": RARE}}}, "config.json (id2label)"),
        ({"labels": [RARE]}, {"config_json": {"label2id": {RARE: 1}}}, "config.json (label2id)"),
        ({"labels": [RARE]}, {"config_json": {RARE: 1}}, "config.json"),
        ({"labels": [RARE]}, {"config_json": {"a": {RARE: [1, {"c": "creutzfeldt jakob anna k"}]}}}, "config.json (a)"),
        ({"ids": ["marie.curie"]}, {"tokenizer_json": {"added_tokens": [{"content": "<marie.curie>"}]}}, "(added"),
        ({"ids": ["José Núñez"]}, {"chat_template_jinja": "{# of JOSE  NUNEZ #}"}, "chat_template.jinja"),
        ({"ids": ["patient-0017"]}, {"special_tokens_map_json": {"x": ["patient-0017"]}}, "map.json (x)"),
        ({"ids": ["123-45-6789"]}, {"README_md": "Trained on 123-45-6789 and others."}, "README.md"),
        ({"ids": [4_711_000_815]}, {"privacy_ledger_jsonl": '{"kind": "fact", "value": "4711000815"}'}, "(value)"),
        ({"files": ["records_of_Anna_K.csv"]}, {"tokenizer_config_json": {"name_or_path": "/anna_k/m"}}, "(name_or"),
        ({"files": ["Anna_K"]}, {"privacy_report_html": "<p>Anna&nbsp;<b>K</b></p>"}, "privacy_report.html"),
    ],
)  # fmt: skip
def test_a_private_string_is_found_and_not_repeated(tmp_path, kinds, files, place):
    """In keys and values, in another spelling; the check names file and key and never the string."""
    _, passed, words = checked(tmp_path / "run", strings(**kinds), **files)
    assert passed is False and place in words
    for text in (one for texts in kinds.values() for one in texts):
        assert str(text).casefold() not in words.casefold() and "anna" not in words.casefold()


def test_ordinary_strings_are_no_finding(tmp_path):
    """Words that any report holds, small numbers, and usual names of files."""
    found = strings(
        labels=["positive", "negative", "yes", "no", "train", "1", "LABEL_0"],
        ids=["u1", "17", "250000", "will", "user 3", "test"],
        files=["train.jsonl", "data.csv", "notes", "records.parquet", "home"],
    )
    page = "You will train 250000 users: user 3 and u1 have data, notes and records; yes or no, positive. Test 17 1."
    config = {"id2label": {"0": "positive", "1": "negative"}, "path": "/home/train/data"}
    assert checked(tmp_path / "run", found, README_md=page, config_json=config)[1] is True


def test_public_texts_and_what_people_noted_are_no_finding(tmp_path):
    """Declared names of classes, and a data set that people name in the report as its file is named."""
    found = strings(labels=["sarcoidosis", "lupus"], files=["e2e_nlg.csv"])
    noted = {
        "setting": {"data_holder": "the clinic", "audience": None},
        "noted": {"preprocessing": "the class lupus is in the public code book"},
        "utility": None,
        "definition": {"dataset": "E2E NLG", "other_uses_of_the_data": None},
        "settled_points": [],
    }
    config = {"id2label": {"0": "sarcoidosis", "1": "lupus"}, "path": "runs/e2e-nlg"}
    files = {"privacy_report_json": noted, "config_json": config}
    assert checked(tmp_path / "run", found, ["sarcoidosis"], **files)[1] is True
    assert checked(tmp_path / "run", found, **files)[1] is False


def test_a_label_of_many_units_is_left_to_the_question_of_the_report(tmp_path):
    """Labels count once for each unit: one person's label in many rows is rare."""
    found = PrivateStrings()
    found.add_labels([("sarcoidosis", unit) for unit in range(FEW)] + [("lupus", "one person")] * 50)
    assert list(found.kinds) == ["lupus"]


def test_the_file_holds_hashes_and_only_its_owner_reads_it(tmp_path):
    """Under a new key each time; folder 0700."""
    found = strings(ids=["marie.curie"])
    checked(tmp_path / "run", found)
    first = (tmp_path / "run" / STRINGS_FILE).read_bytes()
    checked(tmp_path / "run", found)
    assert first != (tmp_path / "run" / STRINGS_FILE).read_bytes() and b"curie" not in first
    modes = [stat.S_IMODE((tmp_path / "run" / one).stat().st_mode) for one in (PRIVATE_FOLDER, STRINGS_FILE)]
    assert modes == [0o700, 0o600]


def test_a_copy_of_the_published_files_is_not_asked_and_a_lost_file_is_not_checked(tmp_path):
    """Whoever received the files has no strings; beside the training, a lost file is named. A merged model is below."""
    (tmp_path / "copy").mkdir()
    assert check_strings(tmp_path / "copy") is None
    checked(tmp_path / "run", strings(ids=["marie.curie"]))
    (tmp_path / "run" / "merged").mkdir()
    (tmp_path / "run" / "merged" / "config.json").write_text('{"x": "marie.curie"}', encoding="utf-8")
    assert check_strings(tmp_path / "run" / "merged")[1] is False
    (tmp_path / "run" / STRINGS_FILE).unlink()
    assert check_strings(tmp_path / "run")[1] is None


def test_folders_that_the_run_lies_in_are_no_names_of_data(tmp_path):
    """They are names of the project; those of the data alone may be names of people."""
    found = PrivateStrings()
    found.add_path(tmp_path / "zebrafish" / "data" / "Anna_K" / "notes.csv", tmp_path / "zebrafish" / "runs" / "a")
    assert list(found.kinds) == ["data", "Anna_K", "notes.csv"]
