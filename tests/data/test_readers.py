"""Files as people bring them: each is read as it was meant, or one sentence names the file and the remedy."""

import bz2
import gzip
import json
import lzma
import os
import zipfile
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from dpllm.config import ConfigError, DataConfig, PrivacyUnit
from dpllm.data.records import DataError, load_records, load_train_and_eval, reading_remarks, sources_of
from dpllm.planning.new_recipe import model_at_hand

TEXTS = ["The first note, naïve.", 'A second one, with "quotes"\nand a break.', "00017"]
FRAME = pd.DataFrame({"text": TEXTS, "id": ["007", "008", "009"], "n": [1, 2, 3]})
LINES = "".join(json.dumps({"text": text, "id": f"00{number}"}) + "\n" for number, text in enumerate(TEXTS))
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def config(path: object, **values) -> DataConfig:
    return DataConfig(**{"path": str(path), "max_length": 64, **values})


def texts(path: object, **values) -> list[str]:
    return load_records(config(path, **values))["text"][:]


def zst(path: Path, content: bytes) -> None:
    with pa.output_stream(str(path), compression="zstd") as target:
        target.write(content)


READ = {
    "notes.jsonl": lambda path: path.write_text(LINES),
    "notes.ndjson": lambda path: path.write_text(LINES),
    "NOTES.JSONL": lambda path: path.write_text(LINES),
    "notes.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "notes.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES.encode())),
    "notes.json.xz": lambda path: path.write_bytes(lzma.compress(LINES.encode())),
    "notes.jsonl.zst": lambda path: zst(path, LINES.encode()),
    "pandas.csv": lambda path: FRAME.to_csv(path, index=False),
    "index.csv": lambda path: FRAME.to_csv(path),
    "pandas.CSV": lambda path: FRAME.to_csv(path, index=False),
    "pandas.csv.gz": lambda path: FRAME.to_csv(path, index=False),
    "zipped.csv.zst": lambda path: zst(path, FRAME.to_csv(index=False).encode()),
    "german.csv": lambda path: FRAME.to_csv(path, index=False, sep=";", decimal=","),
    "pipes.csv": lambda path: FRAME.to_csv(path, index=False, sep="|"),
    "tabs.csv": lambda path: FRAME.to_csv(path, index=False, sep="\t"),
    "spaced.csv": lambda path: path.write_text(FRAME.to_csv(index=False, quoting=1).replace('","', '", "')),
    "excel.csv": lambda path: path.write_text("sep=;\n" + FRAME.to_csv(index=False, sep=";")),
    "windows.csv": lambda path: FRAME.to_csv(path, index=False, encoding="cp1252", lineterminator="\r\n"),
    "latin.csv": lambda path: FRAME.to_csv(path, index=False, encoding="latin-1"),
    "bom.csv": lambda path: FRAME.to_csv(path, index=False, encoding="utf-8-sig"),
    "utf16.csv": lambda path: FRAME.to_csv(path, index=False, encoding="utf-16"),
    "utf16le.csv": lambda path: FRAME.to_csv(path, index=False, encoding="utf-16-le"),
    "bom.jsonl": lambda path: path.write_text(LINES, encoding="utf-8-sig"),
    "records.json": lambda path: FRAME.to_json(path, orient="records"),
    "lines.json": lambda path: FRAME.to_json(path, orient="records", lines=True),
    "pretty.json": lambda path: path.write_text("\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS)),
    "nan.jsonl": lambda path: path.write_text(LINES.replace('"id": "000"', '"score": NaN')),
    "pandas.parquet": lambda path: FRAME.to_parquet(path),
    "category.parquet": lambda path: FRAME.astype({"text": "category", "id": "category"}).to_parquet(path),
    "rich.parquet": lambda path: pq.write_table(
        pa.table(
            {
                "text": pa.array(TEXTS, pa.large_string()),
                "when": pd.to_datetime(["2020-01-01", None, "2021-01-01"]),
                "nothing": pa.nulls(3),
                "nested": [{"a": [1]}, None, {"a": []}],
            }
        ),
        path,
    ),
    "pandas.feather": lambda path: FRAME.to_feather(path),
    "stream.arrow": lambda path: datasets.Dataset.from_dict({"text": TEXTS})._data.table and _stream(path),
}


def _stream(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_stream(str(path), table.schema) as target:
        target.write_table(table)


@pytest.mark.parametrize("name", READ)
def test_what_people_bring_is_read_as_it_was_written(tmp_path, name):
    """The texts are the same in every form, line breaks and leading zeros included."""
    READ[name](tmp_path / name)
    records = load_records(config(tmp_path / name))
    expected = [text.replace("\n", "\r\n") for text in TEXTS] if name == "windows.csv" else TEXTS
    assert [text.replace("\r\n", "\n") for text in records["text"]] == [text.replace("\r\n", "\n") for text in expected]
    if "id" in records.column_names and name.endswith((".csv", ".gz", ".feather", "pandas.parquet")):
        assert records["id"][0] in ("007", "000")


SAID = {
    "letter.docx": ("letter.docx: cannot be read: .*save its text", lambda path: path.write_bytes(b"PK\x03\x04")),
    "scan.pdf": ("save its text", lambda path: path.write_bytes(b"%PDF-1.7")),
    "old.xls": (r"save the sheet as \.csv", lambda path: path.write_bytes(b"\xd0\xcf\x11\xe0")),
    "open.ods": (r"save the sheet as \.csv", lambda path: path.write_bytes(b"PK\x03\x04")),
    "all.zip": ("unpack", lambda path: zipfile.ZipFile(path, "w").close()),
    "face.PNG": ("holds no text", lambda path: path.write_bytes(b"\x89PNG")),
    "frame.pkl": ("pandas", lambda path: FRAME.to_pickle(path)),
    "notes.gz": (r"notes\.jsonl\.gz", lambda path: path.write_bytes(gzip.compress(LINES.encode()))),
    "noending": ("no ending", lambda path: path.write_text(LINES)),
    "packed.csv": (r"ends in \.gz", lambda path: path.write_bytes(gzip.compress(b"text\nx\n"))),
    "renamed.csv": (r"ends in \.xlsx or \.zip", lambda path: path.write_bytes(b"PK\x03\x04rest")),
    "table.csv": (r"ends in \.parquet", lambda path: FRAME.to_parquet(path)),
    "cut.jsonl.gz": (
        "truncated or damaged",
        lambda path: path.write_bytes(gzip.compress((LINES * 50).encode())[:-20]),
    ),
    "lines.txt": (r"data\.txt_records: line", lambda path: path.write_text(LINES)),
    "list.txt": (
        "Rename it to .json",
        lambda path: path.write_text(json.dumps([{"text": "x"}, {"text": "y"}], indent=1)),
    ),
    "false.csv.gz": ("truncated or damaged", lambda path: path.write_text("text\nx\n")),
    "false.csv.zst": ("truncated or damaged", lambda path: path.write_text("text\nx\n")),
    "false.csv.xz": ("truncated or damaged", lambda path: path.write_text("text\nx\n")),
    "pointer.jsonl": ("git lfs pull", lambda path: path.write_text(POINTER)),
    "pointer.txt": ("git lfs pull", lambda path: path.write_text(POINTER)),
    "pointer.parquet": ("git lfs pull", lambda path: path.write_text(POINTER)),
    "page.csv": ("web page", lambda path: path.write_text("<!DOCTYPE html>\n<html><body>Sign in</body></html>")),
    "page.jsonl": ("web page", lambda path: path.write_text("\n<html>\n")),
    "empty.csv": ("empty data", lambda path: path.touch()),
    "empty.jsonl.gz": ("empty data", lambda path: path.write_bytes(gzip.compress(b""))),
    "empty.parquet": ("0 bytes", lambda path: path.touch()),
    "half.parquet": ("cannot be read as parquet", lambda path: path.write_bytes(b"PAR1" + b"x" * 90)),
    "half.arrow": ("cannot be read as Arrow", lambda path: path.write_bytes(b"ARROW1" + b"x" * 90)),
    "link.csv": ("link to .*gone.csv, which does not exist", lambda path: path.symlink_to(path.parent / "gone.csv")),
    "ragged.csv": (
        r"ragged\.csv: line 3: 3 cells, but the header has 2",
        lambda p: p.write_text("text,a\nx,1\ny,2,3\n"),
    ),
    "other.csv": ("line 2: 1 cells.*';'", lambda path: path.write_text('"text;a",b,c\nx;1;2\n')),
    "nohead.csv": ("line 1 looks like a record", lambda path: path.write_text(f"17,{'a long note ' * 9}\n18,other\n")),
    "columns.json": (r"orient='records'", lambda path: FRAME.to_json(path)),
    "split.json": (r"orient='records'", lambda path: FRAME.to_json(path, orient="split")),
    "squad.json": (r"data\.field=data", lambda path: path.write_text(json.dumps({"version": 1, "data": [{"a": 1}]}))),
    "lists.json": (r"orient='records'", lambda path: path.write_text(json.dumps(FRAME.to_dict(orient="list")))),
    "title.csv": ("line 1 is a title", lambda path: path.write_text("Export of May\nid,text\n1,x\n")),
    "quoted.tsv": (r"rename it to \.csv", lambda path: path.write_text('id\ttext\n1\t"x\ny"\n')),
    "czech.csv": (
        r"line 2 .*data\.encoding",
        lambda path: path.write_bytes("text\nPříliš žluťoučký kůň\n".encode("iso8859-2")),
    ),
    "mac.csv": (r"line 2 .*data\.encoding", lambda path: path.write_bytes("text\nGröße für\n".encode("mac_roman"))),
    "comma.json": ("line 2: a comma before a closing", lambda path: path.write_text('[{"text": "x"},\n]')),
    "comma.jsonl": (
        "line 1: a comma before a closing",
        lambda path: path.write_text('{"text": "x",}\n{"text": "y"}\n'),
    ),
    "python.jsonl": ("single quotes", lambda path: path.write_text("{'text': 'x'}\n{'text': 'y'}\n")),
    "half.json": ("truncated", lambda path: path.write_text('[{"text": "x"}, {"text": ')),
    "strings.json": ("one object per record", lambda path: path.write_text('["x", "y"]')),
    "cyrillic.csv": (r"line 2 .*data\.encoding", lambda path: path.write_bytes("text\nпривет\n".encode("cp1251"))),
    "japanese.txt": (
        r"line 1 .*data\.encoding",
        lambda path: path.write_bytes("日本語の文章です\n".encode("shift_jis")),
    ),
    "mixed.txt": (
        r"line 2 .*data\.encoding",
        lambda path: path.write_bytes("naïve\n".encode() + "naïve\n".encode("cp1252")),
    ),
    "folder": ("scan.pdf: .*save its text", lambda path: (path.mkdir(), (path / "scan.pdf").touch())),
}


@pytest.mark.parametrize("name", SAID)
def test_what_cannot_be_read_is_named_with_the_remedy(tmp_path, name):
    """In one short line; in a folder as well, where nothing else is left."""
    message, write = SAID[name]
    write(tmp_path / name)
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        load_records(config(tmp_path / name))
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_keys_decide_on_what_is_found_by_looking(tmp_path):
    """Delimiter, encoding and the key of the list; what was found is said."""
    (tmp_path / "a.csv").write_text("text;id\nx,y;1\n")
    records = load_records(config(tmp_path / "a.csv"))
    assert records["text"][:] == ["x,y"] and any("';'" in line for line in reading_remarks(records))
    with pytest.raises(DataError, match=r"data\.delimiter"):
        texts(tmp_path / "a.csv", delimiter=",")
    (tmp_path / "b.json").write_text(json.dumps({"meta": {"data": [{"text": "x"}]}}))
    assert texts(tmp_path / "b.json", field="meta.data") == ["x"]
    with pytest.raises(DataError, match="It has data"):
        texts(tmp_path / "b.json", field="meta.rows")
    (tmp_path / "c.txt").write_bytes("Straße — naïve".encode("cp1252"))
    records = load_records(config(tmp_path / "c.txt"))
    assert records["text"][0] == "Straße — naïve" and any("cp1252" in line for line in reading_remarks(records))
    for key, value in (("delimiter", ";;"), ("txt_records", "page"), ("missing", "fill"), ("encoding", "none-such")):
        with pytest.raises(ConfigError, match=key):
            config("x", **{key: value})


def test_one_record_cannot_change_how_others_are_decoded(tmp_path):
    """One byte of another encoding is refused where other records could be UTF-8: they never become cp1252."""
    others = "".join(f"Grüße {number}\n" for number in range(5)).encode()
    (tmp_path / "a.txt").write_bytes(others)
    assert texts(tmp_path / "a.txt")[0] == "Grüße 0"
    (tmp_path / "a.txt").write_bytes(others + "Grüße\n".encode("cp1252"))
    with pytest.raises(DataError, match="line 6"):
        texts(tmp_path / "a.txt")


@pytest.mark.parametrize("ending", ["jsonl", "csv.gz"])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train", "validation", "test"], ["train"]),
        (["train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"], ["train-0", "train-1"]),
        (["notes_train", "notes_dev", "notes_test"], ["notes_train"]),
        (["train/a", "train/b", "valid/a", "eval/a"], ["train/a", "train/b"]),
        (["data/train-00000-of-00001", "data/dev-00000-of-00001"], ["data/train"]),
        (["notes", "test"], ["notes"]),
        (["TRAIN", "TEST"], ["TRAIN"]),
        (["a", "b"], ["a", "b"]),
        (["trained", "contest"], ["contest", "trained"]),
    ],
)
def test_only_the_split_train_is_trained_on(tmp_path, names, expected, ending):
    """Splits are recognised as `datasets` does it; a folder without such names is read as a whole."""
    for name in names:
        (tmp_path / f"{name}.{ending}").parent.mkdir(exist_ok=True)
        frame = pd.DataFrame({"text": [f"{name} {number}" for number in range(3)]})
        if ending == "jsonl":
            frame.to_json(tmp_path / f"{name}.{ending}", orient="records", lines=True)
        else:
            frame.to_csv(tmp_path / f"{name}.{ending}", index=False)
    (tmp_path / "README.md").write_text("About these data.")
    records = load_records(config(tmp_path))
    assert len(records) == 3 * len(expected)
    assert all(any(text.startswith(name) for name in expected) for text in records["text"])
    if len(names) > len(expected):
        assert "data.split" in " ".join(reading_remarks(records))
        (tmp_path / "data").mkdir(exist_ok=True)
        assert len(load_records(config(f"{tmp_path}/**/*.{ending}"))) == len(records)
    else:
        assert not reading_remarks(records)


def test_splits_of_a_folder_are_chosen_by_name(tmp_path):
    """`data.split`, `eval_split`, parts and sums of splits; a split that is not there is listed."""
    for name, size in (("train", 12), ("validation", 4), ("test", 3)):
        frame = pd.DataFrame({"text": [f"{name} {number}" for number in range(size)]})
        frame.to_json(tmp_path / f"{name}.jsonl", orient="records", lines=True)
    assert texts(tmp_path, split="test") == ["test 0", "test 1", "test 2"]
    assert texts(tmp_path, split="train[:2]+test[1:]") == ["train 0", "train 1", "test 1", "test 2"]
    assert texts(tmp_path, split="dev[:1]") == ["validation 0"]
    train, held_out = load_train_and_eval(config(tmp_path, eval={"split": "validation"}))
    assert len(train) == 12 and held_out is not None and len(held_out) == 4
    train, held_out = load_train_and_eval(config(tmp_path, eval=str(tmp_path / "test.jsonl")))
    assert len(train) == 12 and held_out is not None and len(held_out) == 3
    assert sources_of(train) == {"train.jsonl": 12}
    with pytest.raises(ConfigError, match=r"test .*train .*validation"):
        texts(tmp_path, split="train_sft")
    with pytest.raises(ConfigError, match="training split"):
        load_train_and_eval(config(tmp_path, split="validation", eval={"split": "dev"}))
    with pytest.raises(ConfigError, match="takes record"):
        texts(tmp_path, split="validation+dev")


def test_folders_of_save_to_disk_are_read(tmp_path):
    """Of a data set and of one with splits, in several files, and without the copies that `map` leaves."""
    whole = datasets.Dataset.from_dict({"text": [f"note {number}" for number in range(10)], "label": [0, 1] * 5})
    whole = whole.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    (tmp_path / "one" / "cache-1234.arrow").write_bytes((tmp_path / "one" / "data-00000-of-00002.arrow").read_bytes())
    assert texts(tmp_path / "one") == whole["text"][:]
    assert load_records(config(tmp_path / "one", format="classification"))["label"][:3] == [0, 1, 0]
    parts = datasets.DatasetDict({"train": whole, "held": whole.select(range(3))})  # held has the same first records
    parts.save_to_disk(tmp_path / "two")
    assert len(texts(tmp_path / "two")) == 10 and len(texts(tmp_path / "two", split="held")) == 3
    with pytest.raises(ConfigError, match=r"no split 'test'.*train .*held"):
        texts(tmp_path / "two", split="test")
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data-00001-of-00002\.arrow: state\.json lists this file"):
        texts(tmp_path / "one")


def test_each_file_of_a_folder_that_is_not_read_is_named(tmp_path):
    """With its reason; companions of data sets are no data, and are not named."""
    FRAME.to_csv(tmp_path / "notes.csv", index=False)
    for name in (
        "README.md",
        "README.txt",
        "LICENSE",
        ".gitattributes",
        "dataset_info.json",
        "notes.csv.md5",
        "SHA256SUMS",
    ):
        (tmp_path / name).write_text("x")
    for name in ("scan.pdf", "sheet.xls", "odd.xyz", "bare"):
        (tmp_path / name).write_text("x")
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere.csv")
    remarks = reading_remarks(load_records(config(tmp_path)))
    assert len(remarks) == 5
    for name in ("scan.pdf", "sheet.xls", "odd.xyz", "bare", "gone.csv"):
        assert any(f"not read: {name}: " in line for line in remarks)


def test_records_without_a_value_can_be_dropped_before_n_is_counted(tmp_path):
    """Each record decides on itself alone, and no count of a file gives away how many there were."""
    for name in ("a", "b"):
        rows = [{"text": f"{name} {number}" if number % 3 else None, "other": None} for number in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"data\.missing"):
        texts(tmp_path)
    records = load_records(config(tmp_path, missing="drop"))
    assert len(records) == 12 and all(records["text"]) and sources_of(records) == {"a.jsonl": 6, "b.jsonl": 6}
    assert any("missing=drop" in line and "6" not in line for line in reading_remarks(records))
    blank = [{"text": text, "chat": chat} for text in ("x", "", " \n", None) for chat in ([], [{"role": "user"}])]
    (tmp_path / "blank.jsonl").write_text("\n".join(map(json.dumps, blank)))
    assert texts(tmp_path / "blank.jsonl", missing="drop") == ["x", "x"]
    labels = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]))
    datasets.Dataset.from_dict({"text": ["x", "y"], "label": [-1, 1]}, features=labels).save_to_disk(tmp_path / "hf")
    assert texts(tmp_path / "hf", missing="drop", format="classification") == ["y"]
    rows = [{"text": "x", "who": f"p{number % 4}" if number else None} for number in range(9)]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)))
    by_user = PrivacyUnit(unit="who", max_rows_per_unit=9)
    train, _ = load_train_and_eval(config(tmp_path / "ids.jsonl", missing="drop"), by_user)
    assert len(train) == 8
    for more in ({"limit": 5}, {"split": "train[:5]"}):
        with pytest.raises(ConfigError, match="missing"):
            config(tmp_path, missing="drop", **more)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("file", ["a\nb\n\nc", "d"]),
        ("paragraph", ["a\nb", "c", "d"]),
        ("line", ["a", "b", "c", "d"]),
        (None, list("abcd")),
    ],
)
def test_a_record_of_text_files_is_what_the_key_says(tmp_path, part, expected):
    """Without the key it is a line; documents are then asked about, since each has several."""
    (tmp_path / "1.txt").write_text("a\nb\n\nc\n")
    (tmp_path / "2.txt").write_text("d\n")
    records = load_records(config(tmp_path, txt_records=part))
    assert records["text"][:] == expected
    assert any("data.txt_records" in line for line in reading_remarks(records)) == (part is None)
    (tmp_path / "3.txt").write_text("One sentence.\n\nAnother one.\n\n")  # each paragraph is a line
    assert not reading_remarks(load_records(config(tmp_path / "3.txt")))
    (tmp_path / "4.txt").write_text(LINES)  # JSON to train on as it is
    assert texts(tmp_path / "4.txt", txt_records="line") == LINES.splitlines()
    (tmp_path / "5.txt").write_text('[INST] a [/INST] b\n{name} said "yes": she left\n')
    assert len(texts(tmp_path / "5.txt")) == 2


def test_arguments_of_tools_may_be_of_any_kind(tmp_path):
    """They come back as they were written, in whichever order and file the kinds are."""
    arguments = [{"q": "x", "n": 1}, {"q": 3, "deep": {"a": [1, "b"]}}, {"n": "1"}, {"q": ["y", 2.5]}, {}]
    chats = [
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": one}}]},
            ],
            "meta": number if number % 2 else "text",
        }
        for number, one in enumerate(arguments)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, chats[:3])))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, chats[3:])))
    records = load_records(config(tmp_path, format="chat"))
    assert "meta" not in records.column_names
    for record, one in zip(records, arguments, strict=True):
        found = record["messages"][1]["tool_calls"][0]["function"]["arguments"] or {}
        assert {key: value for key, value in found.items() if value is not None} == {
            key: value for key, value in one.items() if value is not None
        }


def test_columns_of_one_name_fail_only_where_they_are_named(tmp_path):
    """As columns of several kinds do."""
    (tmp_path / "a.csv").write_text("text,more,more\nx,1,2\n")
    records = load_records(config(tmp_path / "a.csv"))
    assert records.column_names == ["text"] and records["text"][:] == ["x"]
    with pytest.raises(DataError, match="two columns are named 'more'"):
        texts(tmp_path / "a.csv", columns={"text": "more"})


def test_weights_that_are_git_lfs_pointers_are_named(tmp_path):
    """By the sentence that data get."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4}')
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(ConfigError, match=r"model\.safetensors: it is a git-lfs pointer.*git lfs pull"):
        model_at_hand(str(tmp_path))


def test_a_link_to_its_own_folder_is_not_followed(tmp_path):
    """The files are read once."""
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "again").symlink_to(tmp_path)
    assert texts(tmp_path) == ["x"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "a.csv").chmod(0)
    with pytest.raises(DataError, match=r"a\.csv: no permission to read it"):
        texts(tmp_path / "a.csv")


def test_a_workbook_is_read_by_sheet_or_its_package_is_named(tmp_path):
    """Numbers and texts of cells keep their kind; several sheets are listed."""
    path = tmp_path / "notes.xlsx"
    try:
        import openpyxl
    except ImportError:
        path.write_bytes(b"PK\x03\x04")
        with pytest.raises(ConfigError, match=r"notes\.xlsx.*openpyxl"):
            texts(path)
        return
    book = openpyxl.Workbook()
    for row in (["text", "id", "n"], *FRAME.to_numpy().tolist()):
        book.active.append(row)
    book.save(path)
    records = load_records(config(path))
    assert records["text"][:] == TEXTS and records["id"][0] == "007" and records["n"][:] == [1, 2, 3]
    book.create_sheet("Other").append(["text"])
    book.save(path)
    with pytest.raises(DataError, match=r"Sheet, Other.*data\.field"):
        texts(path)
    assert texts(path, field="Sheet") == TEXTS
