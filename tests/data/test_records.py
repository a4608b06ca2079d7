"""Loading of records: every record is loaded unchanged, or there is one clear error."""

import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpllm.config import ConfigError, DataConfig, PrivacyConfig
from dpllm.data.private_tempdir import PREFIX, private_folder, remove_private_folder
from dpllm.data.records import (
    DataError,
    has_many_copies,
    load_records,
    load_train_and_eval,
    reading_remarks,
    sources_of,
)
from dpllm.data.rows import unit_index_of
from tests.mutations import kills
from tests.tiers import SHARED, needs_shared_data

TEXTS = ["The ship sails at dawn.", "A short one.", "Nobody knows what the harbour master wrote that night, or why."]


def config(**values) -> DataConfig:
    return DataConfig(**{"path": "unused", "max_length": 64, **values})


def by_user(column: str, max_rows: int) -> PrivacyConfig:
    mechanism = {"clip_norm": 1, "expected_batch_size": 1, "noise_multiplier": 1}
    return PrivacyConfig(**mechanism, unit=column, max_rows_per_unit=max_rows)


def write(path: Path, records: list[dict]) -> Path:
    dataset = datasets.Dataset.from_list(records)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(records), encoding="utf-8")
    elif path.suffix in (".csv", ".tsv"):
        dataset.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",")
    elif path.suffix == ".parquet":
        dataset.to_parquet(path)
    else:
        path.write_text("\n".join(record["text"] for record in records) + "\n", encoding="utf-8")
    return path


class TestLoading:
    @pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt"])
    def test_every_local_format_gives_the_same_records(self, tmp_path, ending):
        """The records do not depend on the format of the file."""
        path = write(tmp_path / f"data{ending}", [{"text": text} for text in TEXTS])
        assert load_records(config(path=str(path)))["text"][:] == TEXTS

    @pytest.mark.parametrize(
        ("name", "content", "texts"),
        [
            # A message that says NA or null is a record like any other.
            ("data.csv", "text\nNA\nnull\nNone\nnan\n1\n", ["NA", "null", "None", "nan", "1"]),
            ("data.tsv", 'text\tlabel\n"he said\t1\nnothing\t0\nmore"\t1\n', ['"he said', "nothing", 'more"']),
            # A blank line belongs to nobody: as a unit it would raise N and protect nobody.
            ("data.txt", "one\n\n  \t\nthree\n", ["one", "three"]),
        ],
    )
    def test_a_line_of_text_is_a_record_as_it_is_written(self, tmp_path, name, content, texts):
        """Words that look like missing values stay text, and a lone quote swallows no record."""
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        assert load_records(config(path=str(path)))["text"][:] == texts
        assert load_records(config(path=str(path), limit=2))["text"][:] == texts[:2]

    def test_a_folder_and_a_pattern_are_all_their_files_in_order_of_name(self, tmp_path):
        """Several files are one data set."""
        write(tmp_path / "b.jsonl", [{"text": "second"}])
        write(tmp_path / "a.jsonl", [{"text": "first"}])
        for path in (tmp_path, tmp_path / "*.jsonl"):
            assert load_records(config(path=str(path)))["text"][:] == ["first", "second"]

    def test_a_local_path_stands_in_for_any_split(self, tmp_path):
        """A recipe made for a Hub data set runs on a local file when only its path is changed."""
        path = write(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS])
        assert len(load_records(config(path=str(path), split="train_sft"))) == 3
        assert len(load_records(config(path=str(path), split="train_sft[:2]"))) == 2

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("missing.jsonl", "missing.jsonl: no such file or folder"),
            ("/missing/folder", "no such file or folder"),
            ("*.parquet", "no file matches"),
            ("builtin:sotou", "unknown corpus 'builtin:sotou'; did you mean 'sotu'"),
            ("empty", "the folder has no file that ends in"),
            ("mixed", "files in different formats"),
            ("notes.docx", r"notes\.docx: cannot be read: .*save its text as \.txt"),
        ],
    )
    def test_a_path_that_leads_nowhere_is_named(self, tmp_path, monkeypatch, path, message):
        """A wrong path is one clear error, not a request to the Hub."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "empty").mkdir()
        (tmp_path / "mixed").mkdir()
        write(tmp_path / "mixed" / "a.jsonl", [{"text": "x"}])
        write(tmp_path / "mixed" / "a.csv", [{"text": "x"}])
        (tmp_path / "notes.docx").write_bytes(b"x")
        with pytest.raises(ConfigError, match=message):
            load_records(config(path=path))

    def test_a_hub_name_that_cannot_be_reached_says_so(self, monkeypatch):
        """Offline, a Hub name is one clear error with the remedy."""

        def unreachable(path, name=None, split=None, **options):
            raise ConnectionError(f"Could not reach '{path}' on the Hub")

        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match="HF_HUB_OFFLINE") as caught:
            load_records(config(path="nobody/nothing", split="validation"))
        assert "\n" not in str(caught.value)

    def test_a_hub_name_is_loaded_with_its_configuration_and_split(self, monkeypatch):
        """Name and split of the recipe reach the Hub loader."""
        seen = []

        def hub(path, name=None, split=None):
            seen.append((path, name, split))
            return datasets.Dataset.from_list([{"text": split}])

        monkeypatch.setattr(datasets, "load_dataset", hub)
        wanted = config(path="some/data", name="plain", split="train_sft", eval={"split": "test_sft"})
        train, held_out = load_train_and_eval(wanted)
        assert seen == [("some/data", "plain", "train_sft"), ("some/data", "plain", "test_sft")]
        assert train["text"][:] == ["train_sft"] and held_out is not None and held_out["text"][:] == ["test_sft"]

    def test_a_split_that_takes_records_twice_is_refused(self, tmp_path, monkeypatch):
        """Each copy would be a separate record; parts of one split that do not overlap are allowed."""
        path = tmp_path / "data.txt"
        path.write_text("a\nb\nc\nd\n", encoding="utf-8")
        for split in ("train+train", "train[:50%]+train", "train[:3]+train[1:2]", "train[2:]+train[:3]"):
            with pytest.raises(ConfigError, match="takes record"):
                load_records(config(path=str(path), split=split))
        assert load_records(config(path=str(path), split="train[3:]+train[:1]"))["text"][:] == ["d", "a"]
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *given, split: datasets.Dataset.from_list([{"text": split}])
        )
        with pytest.raises(ConfigError, match="takes record"):
            load_records(config(path="some/data", split="train+test+train"))
        assert len(load_records(config(path="some/data", split="train+test"))) == 1

    def test_copies_of_hub_records_are_for_the_owner_only(self, tmp_path, monkeypatch):
        """`datasets` writes them into its cache; afterwards the process's own mask is as it was."""
        copy = tmp_path / "copy.arrow"

        def hub(path, name=None, split=None):
            copy.touch()
            return datasets.Dataset.from_list([{"text": "secret"}])

        monkeypatch.setattr(datasets, "load_dataset", hub)
        mask = os.umask(0o002)
        try:
            load_records(config(path="some/data"))
        finally:
            after = os.umask(mask)
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600 and after == 0o002

    def test_a_hub_data_set_that_is_a_program_is_read_from_its_parquet_files(self, monkeypatch):
        """A data set with a loading script is read from the files that the Hub makes of it; other errors are shown."""

        def hub(path, name=None, split=None, revision=None, data_dir=None):
            if revision is None:
                raise RuntimeError(f"Dataset scripts are no longer supported, but found {path}.py")
            if revision != "refs/convert/parquet":
                raise RuntimeError("out of memory")
            return datasets.Dataset.from_list([{"text": f"{data_dir} {split}"}])

        monkeypatch.setattr(datasets, "load_dataset", hub)
        wanted = config(path="old/data", name="plain", split="validation")
        assert load_records(wanted)["text"][:] == ["plain validation"]
        monkeypatch.setattr("dpllm.data.records.PARQUET_BRANCH", "elsewhere")
        with pytest.raises(ConfigError, match="old/data"):
            load_records(wanted)


class TestChecks:
    def test_a_missing_column_names_those_present_and_the_nearest(self, tmp_path):
        """A misspelt column is found before training."""
        path = write(tmp_path / "data.jsonl", [{"sentence": "x", "label": 1}])
        with pytest.raises(DataError, match="sentences"):
            load_records(config(path=str(path), columns={"text": "sentences"}))

    @pytest.mark.parametrize("ending", [".jsonl", ".csv"])
    def test_a_null_names_the_first_record(self, tmp_path, ending):
        """A record without text is reported by its number, not by its content."""
        path = write(
            tmp_path / f"data{ending}", [{"text": "x", "n": 1}, {"text": None, "n": 2}, {"text": None, "n": 3}]
        )
        with pytest.raises(DataError, match="nulls"):
            load_records(config(path=str(path)))
        assert len(load_records(config(path=str(path), limit=1))) == 1

    @pytest.mark.parametrize(
        ("name", "content"), [("a.csv", "text\n"), ("a.csv", ""), ("a.jsonl", ""), ("a.json", "[]"), ("a.txt", "")]
    )
    def test_an_empty_data_set_is_refused(self, tmp_path, name, content):
        """Without records there is no N and no guarantee."""
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match="empty data"):
            load_records(config(path=str(path)))


class TestHeldOut:
    @pytest.fixture
    def path(self, tmp_path):
        return str(write(tmp_path / "data.jsonl", [{"text": f"record {number}"} for number in range(50)]))

    def test_the_parts_are_disjoint_complete_and_always_the_same(self, path):
        """No record is both trained on and held out; the choice does not depend on the text of the records."""
        train, held_out = load_train_and_eval(config(path=path, eval=0.1))
        assert held_out is not None
        assert (len(train), len(held_out)) == (45, 5)
        assert sorted(train["text"][:] + held_out["text"][:]) == sorted(f"record {number}" for number in range(50))
        again, _ = load_train_and_eval(config(path=path, eval=0.1))
        assert again["text"][:] == train["text"][:]
        whole, none = load_train_and_eval(config(path=path))  # nothing is held out unless the recipe says so
        assert none is None and len(whole) == 50

    def test_held_out_records_come_from_their_own_file(self, path, tmp_path):
        """A path of held-out records takes nothing from the training records, for any limit."""
        other = write(tmp_path / "dev.csv", [{"text": text} for text in TEXTS])
        train, held_out = load_train_and_eval(config(path=path, eval=str(other), limit=2))
        assert held_out is not None and len(train) == 2 and held_out["text"][:] == TEXTS

    def test_a_share_that_leaves_nothing_is_refused(self, path):
        """There must be a record to train on."""
        with pytest.raises(DataError, match="leaves none"):
            load_train_and_eval(config(path=path, limit=1, eval=0.5))

    def test_a_split_of_a_local_file_is_refused(self, path):
        """A local file has one split, so a second one cannot be held out of it by name."""
        with pytest.raises(ConfigError, match=r"data\.eval\.split='test'"):
            load_train_and_eval(config(path=path, eval={"split": "test"}))


class TestText:
    """Cells are text: no reader guesses the kind of a value."""

    @kills(
        "ids in a CSV file are read as numbers",
        "dpllm/data/readers.py",
        "pa.array([cell or None for cell in column], pa.string())",
        "pa.array([str(int(cell)) if cell.isdigit() else cell or None for cell in column], pa.string())",
    )
    def test_ids_of_a_csv_stay_as_they_are_written(self, tmp_path):
        """2 401 patients are 2 401 units, in more than 10 000 lines, the first of which holds a lettered id."""
        lines = ["patient,text", "A17,a note of another one"]
        lines += [f"{patient:05d},note {visit} of a visit" for visit in range(10) for patient in range(2400)]
        path = tmp_path / "notes.csv"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        records = load_records(config(path=str(path)))
        privacy = by_user("patient", max_rows=10)
        assert len(records) == 24_001 and unit_index_of(records, privacy).num_units == 2401
        assert records["patient"][18] == "00017"

    def test_ids_are_the_same_in_all_files_and_pieces(self, tmp_path, monkeypatch):
        """An id in a file of numbers is text as well: one patient in two files is one unit, and 1e2 is unchanged."""
        monkeypatch.setattr("dpllm.data.readers.CHUNK_BYTES", 50)
        (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{n:05d},x{n}\n" for n in range(100)), encoding="utf-8")
        more = "".join(f"{n:05d},y{n}\n" for n in range(100)) + "B7,z\n1e2,w\n"
        (tmp_path / "b.csv").write_text("id,text\n" + more, encoding="utf-8")
        ids = load_records(config(path=str(tmp_path)))["id"][:]
        assert len(set(ids)) == 102 and "1e2" in ids and "00017" in ids

    def test_a_parquet_file_may_have_columns_of_any_kind(self, tmp_path):
        """Categories are read as their values, UUIDs as text; a column that no data set can hold is left out."""
        texts = [f"note {number}" for number in range(4)]
        ids = [uuid.UUID(int=number // 2) for number in range(4)]
        columns = {
            "text": pa.array(texts).dictionary_encode(),
            "ward": pa.array(["a", "a", "b", "b"]).dictionary_encode(),
            "patient": pa.array([one.bytes for one in ids], pa.uuid()),
            "marks": pa.array([[("k", "v")]] * 4, pa.map_(pa.string(), pa.string())),
        }
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        pq.write_table(pa.table({**columns, "text": texts, "ward": ["b", "c", "c", "c"]}), tmp_path / "b.parquet")
        records = load_records(config(path=str(tmp_path)))
        assert records["text"][:] == texts * 2 and records["patient"][0] == str(ids[0])
        assert [unit_index_of(records, by_user(column, 9)).num_units for column in ("ward", "patient")] == [3, 2]
        assert "marks" not in records.column_names
        with pytest.raises(DataError, match="column 'marks"):
            unit_index_of(records, by_user("marks", 9))

    def test_a_folder_of_save_to_disk_is_refused_with_the_remedy(self, tmp_path):
        """The JSON files of such a folder are not records."""
        (tmp_path / "state.json").write_text("{}")
        (tmp_path / "dataset_info.json").write_text("{}")
        with pytest.raises(ConfigError, match="save_to_disk"):
            load_records(config(path=str(tmp_path)))

    def test_dates_and_numbers_in_json_text_stay_text(self, tmp_path):
        """A text that looks like a date is the same text in every file."""
        write(tmp_path / "a.jsonl", [{"text": "2020-01-01", "id": "2020-01-01"}])
        write(tmp_path / "b.jsonl", [{"text": "x", "id": "007"}])
        assert load_records(config(path=str(tmp_path)))["id"][:] == ["2020-01-01", "007"]

    @pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
    def test_a_column_of_text_here_and_numbers_there_is_refused(self, tmp_path, ending):
        """Converting either could merge two people into one, or split one person into two."""
        write(tmp_path / f"a{ending}", [{"text": "x", "id": "00017"}])
        write(tmp_path / f"b{ending}", [{"text": "y", "id": 17}])
        records = load_records(config(path=str(tmp_path)))
        assert records["text"][:] == ["x", "y"]
        with pytest.raises(DataError, match=r"column 'id' holds text .*a\..* and a number .*b\."):
            unit_index_of(records, by_user("id", 2))

    @pytest.mark.parametrize(
        ("content", "options", "message"),
        [
            ('{"text": "fine"}\n{"text": \n', {}, "data.jsonl: cannot be read as json"),
            (
                '{"prompt": "a", "completion": ["b", "c"]}\n',
                {"format": "prompt_completion"},
                "column 'completion' holds list<.*>, but must hold text",
            ),
            (
                '{"label": 1}\n{"label": 2}\n',
                {"columns": {"text": "label"}},
                "column 'label' holds int64, but must hold text",
            ),
        ],
        ids=["broken", "lists", "the column of labels"],
    )
    def test_json_lines_that_are_not_text_of_one_kind_are_refused(self, tmp_path, content, options, message):
        """Nothing is written as Python would print it; the error comes before the public training."""
        path = tmp_path / "data.jsonl"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load_records(config(path=str(path), **options))

    @pytest.mark.parametrize("first", [0, 1])
    @pytest.mark.parametrize("cells", [({"fever": True}, {"fever": 0.5}), ([True], [0.5]), ([{"a": 1}], [{"a": "x"}])])
    def test_a_value_within_an_object_or_a_list_has_one_kind(self, tmp_path, cells, first):
        """Arrow makes 1.0 of true where another record has a fraction; in one file, in its pieces, and across files."""
        records = [{"text": "x", "more": cells[first]}, {"text": "y", "more": cells[1 - first]}]
        together = tmp_path / "data.jsonl"
        together.write_text("".join(json.dumps(record) + "\n" for record in records))
        for number, record in enumerate(records):
            (tmp_path / f"{number}.json").write_text(json.dumps([record]))
        for path, where in ((together, r"line 1\).*line 2\)"), (tmp_path / "*.json", r"0\.json.*1\.json")):
            loaded = load_records(config(path=str(path)))
            assert loaded["text"][:] == ["x", "y"]
            with pytest.raises(DataError, match=f"column 'more.+' holds .*{where}"):
                unit_index_of(loaded, by_user("more", 2))

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            (
                ['{"text": "x", "id": "00017"}', "", '{"text": "y", "id": 17}'],
                r"column 'id' holds text \(.*line 1\) and a number \(.*line 3\)",
            ),
            # Two large ids would become one beside a fraction.
            (
                ['{"text": "x", "id": 9007199254740993}', '{"text": "y", "id": 0.5}'],
                r"column 'id' mixes floats and whole numbers above 2\^53",
            ),
        ],
    )
    def test_a_column_of_two_kinds_fails_only_where_it_is_named(self, tmp_path, lines, message):
        """Another column of the same records is read as it is; in any chunk of the file."""
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(lines))
        records = load_records(config(path=str(path)))
        assert records["text"][:] == ["x", "y"] and "id" not in records.column_names
        with pytest.raises(DataError, match=message):
            unit_index_of(records, by_user("id", 2))
        with pytest.raises(DataError, match=message):
            load_records(config(path=str(path), columns={"text": "id"}))

    def test_fields_that_only_some_records_have_are_null_in_the_others(self, tmp_path, monkeypatch):
        """Pieces of a file that differ in their fields are one data set."""
        monkeypatch.setattr("dpllm.data.readers.CHUNK_BYTES", 1)
        records = [{"text": "one"}, {"text": "two", "more": 1}, {"text": "three", "more": None}]
        loaded = load_records(config(path=str(write(tmp_path / "data.jsonl", records))))
        assert loaded["text"][:] == ["one", "two", "three"] and loaded["more"][:] == [None, 1, None]

    def test_labels_of_a_csv_become_numbers_strictly(self, tmp_path):
        """A label is a class number in decimal digits, or a name in data.class_names."""
        path = tmp_path / "data.csv"
        path.write_text("text,label\nx,1\ny,0\n", encoding="utf-8")
        wanted = config(path=str(path), format="classification")
        assert load_records(wanted)["label"][:] == [1, 0]
        for bad in ("1.0", "01", " 1", "1e0", "good"):
            path.write_text(f"text,label\nx,1\ny,{bad}\n", encoding="utf-8")
            with pytest.raises(DataError, match="record 1"):
                load_records(wanted)
        path.write_text("text,label\nx,good\ny,bad\n", encoding="utf-8")
        assert load_records(replace(wanted, class_names=["bad", "good"]))["label"][:] == [1, 0]
        with pytest.raises(DataError, match=r"data\.class_names"):
            load_records(replace(wanted, class_names=["bad", "fine"]))


class TestFaults:
    """An error in a file gives its name, the line and the remedy."""

    @pytest.mark.parametrize("ending", [".csv", ".jsonl", ".txt", ".tsv"])
    def test_a_byte_in_another_encoding_names_file_and_line(self, tmp_path, ending):
        """With the right `data.encoding` the file is read; of Western letters it is found by looking."""
        path = tmp_path / f"data{ending}"
        lines = ['{"text": "na\u00efve"}'] * 3 if ending == ".jsonl" else ["text", "one", "na\u00efve"]
        path.write_bytes("\n".join(lines).encode("latin-1"))
        records = load_records(config(path=str(path)))
        assert records["text"][-1] == "na\u00efve" and any("cp1252" in line for line in reading_remarks(records))
        lines[-1] = lines[-1].replace("na\u00efve", "\u043f\u0440\u0438\u0432\u0435\u0442")
        path.write_bytes("\n".join(lines).encode("cp1251", errors="ignore"))
        line = 3
        with pytest.raises(DataError, match=rf"data\{ending}: line {line} is not utf-8 text: .*data\.encoding"):
            load_records(config(path=str(path)))
        assert load_records(config(path=str(path), encoding="cp1251"))["text"][-1].startswith("\u043f\u0440")
        with pytest.raises(ConfigError, match="encoding='latin-99"):
            config(encoding="latin-99")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("text,id\nx,1\ny\n", r"line 3: 1 cells, but the header has 2"),
            ("text,id\nx,1\ny,2,3\n", r"line 3: 3 cells, but the header has 2"),
            ('text,id\n"x,1\ny,2\n', r"line 3: unexpected end of data"),
            ("text,text\nx,1\n", r"two columns are named 'text'"),
            ("text,text,id\nx,1,2\n", r"two columns are named 'text'"),
        ],
    )
    def test_a_damaged_csv_names_the_line(self, tmp_path, content, message):
        """A lone quote or a missing cell swallows no record and moves no cell into another column."""
        path = tmp_path / "data.csv"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load_records(config(path=str(path)))

    def test_a_long_cell_and_a_byte_order_mark_are_read(self, tmp_path):
        """Notes may be long, and spreadsheets write a mark before the header."""
        path = tmp_path / "data.csv"
        path.write_bytes(b"\xef\xbb\xbftext,n\r\n" + b'"' + b"x" * 300_000 + b'\ny",1\r\n')
        assert len(load_records(config(path=str(path)))["text"][0]) == 300_002

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"messages": "hello"}, "column 'messages' holds string, but a chat is a list of"),
            ({"messages": ["hello"]}, "column 'messages' holds list<.*>, but a chat is a list of"),
            ({"messages": []}, "record 0: the chat has no message"),
            ({"messages": [{"role": "user"}]}, "record 0: message 0 has no text in 'content'"),
            ({"messages": [{"role": "user", "content": 3}]}, "record 0: message 0 has no text in 'content'"),
            ({"messages": {"role": "user"}}, "column 'messages' holds struct<.*>, but a chat is a list of"),
        ],
    )
    def test_a_chat_of_the_wrong_form_is_refused(self, tmp_path, record, message):
        """The error comes before the model is loaded."""
        with pytest.raises(DataError, match=message):
            load_records(config(path=str(write(tmp_path / "data.jsonl", [record])), format="chat"))


class TestFolders:
    """A folder is its files, none of them twice, and none of them held out."""

    def test_hidden_copies_are_skipped(self, tmp_path):
        """Copies left by notebooks and editors are not data; the files that are read are noted with their records."""
        for name in ("a.csv", ".ipynb_checkpoints/a-checkpoint.csv", "sub/b.csv", ".hidden.csv", "__MACOSX/._a.csv"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"text\nof {Path(name).name}\n", encoding="utf-8")
        records = load_records(config(path=str(tmp_path)))
        assert records["text"][:] == ["of a.csv", "of b.csv"]
        assert sources_of(records) == {"a.csv": 1, os.path.join("sub", "b.csv"): 1}

    def test_equal_files_are_refused(self, tmp_path):
        """A copy would double each person's contribution."""
        for name in ("notes.csv", "notes (copy).csv"):
            (tmp_path / name).write_text("text\none\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"notes\.csv"):
            load_records(config(path=str(tmp_path)))

    def test_the_held_out_file_must_not_be_trained_on(self, tmp_path):
        """It is refused as a file of the folder, through a link, as a copy, and as the same records in another file."""
        data, other = tmp_path / "data", tmp_path / "other"
        data.mkdir()
        other.mkdir()
        texts = [f"a long enough note of number {number}" for number in range(20)]
        write(data / "one.jsonl", [{"text": text} for text in texts[:10]])
        test = write(data / "two.jsonl", [{"text": text} for text in texts[10:]])
        (other / "copy.jsonl").write_bytes(test.read_bytes())
        (other / "link.jsonl").symlink_to(test)
        for place in (data, test, other / "copy.jsonl", other / "link.jsonl"):
            with pytest.raises(ConfigError, match=r"data\.path="):
                load_train_and_eval(config(path=str(data), eval=str(place)))
        write(other / "same.csv", [{"text": text} for text in texts[8:]])
        with pytest.raises(DataError, match="12 of 12 held-out"):
            load_train_and_eval(config(path=str(data), eval=str(other / "same.csv")))
        train, held_out = load_train_and_eval(config(path=str(data / "one.jsonl"), eval=str(test)))
        assert held_out is not None and (len(train), len(held_out)) == (10, 10)

    def test_the_split_that_is_trained_on_is_not_held_out(self):
        """This holds for a Hub data set as well."""
        with pytest.raises(ConfigError, match=r"data\.eval\.split='train"):
            load_train_and_eval(config(path="some/data", eval={"split": "train"}))

    def test_many_exact_copies_are_noted(self, tmp_path):
        """Records that are copies of others are separate units; short texts may well be written twice."""
        texts = [f"a long enough note of number {number % 90}" for number in range(100)]
        records, _ = load_train_and_eval(config(path=str(write(tmp_path / "a.jsonl", [{"text": t} for t in texts]))))
        assert has_many_copies(records) and has_many_copies(records.select(range(5)))
        records, _ = load_train_and_eval(config(path=str(write(tmp_path / "b.jsonl", [{"text": "ok"}] * 100))))
        assert not has_many_copies(records)


def test_copies_of_private_text_are_for_the_owner_only(tmp_path, monkeypatch):
    """Nothing is left in the cache of `datasets`: the copies are in a folder of mode 0700 that can be removed."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("dpllm.data.private_tempdir._folders", {})
    path = tmp_path / "data.csv"
    path.write_text("text\nsecret\n", encoding="utf-8")
    mask = os.umask(0)
    try:
        records = load_records(config(path=str(path)))
    finally:
        os.umask(mask)
    (folder,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder == private_folder()
    copies = [file for file in folder.rglob("*") if file.is_file()]
    assert copies and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in copies)
    remove_private_folder()
    assert not list((tmp_path / "cache").iterdir()) and records["text"][:] == ["secret"]


@pytest.mark.parametrize("cache", [".", "a file/cache"])
def test_the_folder_of_a_killed_process_is_removed(tmp_path, monkeypatch, cache):
    """The next process finds that nobody holds its lock, also in the temporary folder; a living one's folder stays."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / cache)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("dpllm.data.private_tempdir._folders", {})
    (tmp_path / "a file").touch()
    code = (
        "import os, dpllm.data.private_tempdir as s, datasets; "
        "datasets.config.HF_DATASETS_CACHE = os.environ['PLACE']; s.private_folder(); os._exit(9)"
    )
    places = {"PLACE": str(tmp_path / cache), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **places}, check=False)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 1
    own = private_folder()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a file", own]
    monkeypatch.setattr("dpllm.data.private_tempdir._folders", {})
    assert private_folder() != own and own.exists()


def test_no_folder_has_its_name_before_it_is_locked(tmp_path, monkeypatch):
    """Processes of one run begin together: one that looks at this moment would take it for abandoned."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("dpllm.data.private_tempdir._folders", {})
    seen = []

    def look(descriptor, operation):
        seen.append(list(tmp_path.glob(f"{PREFIX}*")))
        return flock(descriptor, operation)

    flock = fcntl.flock
    monkeypatch.setattr("fcntl.flock", look)
    assert private_folder().is_dir() and seen == [[]]


@needs_shared_data
def test_all_of_sst2_is_read():
    """A real tab-separated file gives as many records as it has lines."""
    wanted = config(path=str(SHARED / "sst2" / "train.tsv"), format="classification", columns={"text": "sentence"})
    records = load_records(wanted)
    assert len(records) == 67349
    assert set(records["label"][:]) == {0, 1}


def test_whole_users_are_held_out(tmp_path):
    """No user is on both sides, and all records are on one."""
    rng = np.random.default_rng(0)
    rows = [{"text": f"note {number}", "who": f"p{int(rng.integers(60))}"} for number in range(600)]
    (tmp_path / "notes.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = DataConfig(path=str(tmp_path / "notes.jsonl"), max_length=8, eval=0.2)
    train, held_out = load_train_and_eval(config, by_user("who", max_rows=4))
    assert not set(train["who"]) & set(held_out["who"]) and len(set(held_out["who"])) == 12
    assert sorted([*train["text"], *held_out["text"]]) == sorted(row["text"] for row in rows)
