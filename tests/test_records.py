"""Records from where they lie: every one of them, unchanged, or one clear error."""

import json
import os
from pathlib import Path

import datasets
import pytest

from dpllm.config import ConfigError, DataConfig
from dpllm.records import DataError, load_records, load_train_and_eval

SHARED = Path(os.environ.get("DPLLM_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
needs_shared_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"needs the test data at {SHARED} (or DPLLM_SHARED_DATA), which is not part of dpllm"
)

TEXTS = ["The ship sails at dawn.", "A short one.", "Nobody knows what the harbour master wrote that night, or why."]


def config(**values) -> DataConfig:
    return DataConfig(**{"path": "unused", "max_length": 64, **values})


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
        """A record is a record, whatever file it lies in."""
        path = write(tmp_path / f"data{ending}", [{"text": text} for text in TEXTS])
        assert load_records(config(path=str(path)))["text"][:] == TEXTS

    def test_words_that_look_like_missing_values_stay_text(self, tmp_path):
        """A message that says NA or null is a record like any other."""
        texts = ["NA", "null", "None", "nan", "1"]
        path = write(tmp_path / "data.csv", [{"text": text} for text in texts])
        assert load_records(config(path=str(path)))["text"][:] == texts

    def test_a_lone_quote_in_tab_separated_text_swallows_no_record(self, tmp_path):
        """The number of records is the number of lines."""
        path = tmp_path / "data.tsv"
        path.write_text('text\tlabel\n"he said\t1\nnothing\t0\nmore"\t1\n', encoding="utf-8")
        assert load_records(config(path=str(path)))["text"][:] == ['"he said', "nothing", 'more"']

    def test_blank_lines_of_a_text_file_are_records(self, tmp_path):
        """Nothing is filtered: the number of records is the N of the guarantee."""
        path = tmp_path / "data.txt"
        path.write_text("one\n\nthree\n", encoding="utf-8")
        assert load_records(config(path=str(path)))["text"][:] == ["one", "", "three"]

    def test_a_folder_and_a_pattern_are_all_their_files_in_order_of_name(self, tmp_path):
        """Several files are one data set."""
        write(tmp_path / "b.jsonl", [{"text": "second"}])
        write(tmp_path / "a.jsonl", [{"text": "first"}])
        for path in (tmp_path, tmp_path / "*.jsonl"):
            assert load_records(config(path=str(path)))["text"][:] == ["first", "second"]

    def test_a_local_path_stands_in_for_any_split(self, tmp_path):
        """A recipe made for a Hub data set runs on a local file by its path alone."""
        path = write(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS])
        assert len(load_records(config(path=str(path), split="train_sft"))) == 3
        assert len(load_records(config(path=str(path), split="train_sft[:2]"))) == 2

    def test_limit_keeps_the_first_records(self, tmp_path):
        """The limit is on records, in their order."""
        path = write(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS])
        assert load_records(config(path=str(path), limit=2))["text"][:] == TEXTS[:2]

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("missing.jsonl", "missing.jsonl: no such file or folder"),
            ("/missing/folder", "no such file or folder"),
            ("*.parquet", "no file matches"),
            ("builtin:sotou", "unknown corpus 'builtin:sotou'; did you mean 'sotu'"),
            ("empty", "the folder has no file that ends in"),
            ("mixed", "files of different kinds"),
            ("notes.docx", "can't read files that end in '.docx'"),
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
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match=r"'nobody/nothing'.*HF_HUB_OFFLINE is set.*give a local file") as caught:
            load_records(config(path="nobody/nothing", split="validation"))
        assert "\n" not in str(caught.value)

    def test_a_hub_name_is_loaded_with_its_configuration_and_split(self, monkeypatch):
        """Name and split of the recipe reach the Hub loader."""
        seen = []

        def hub(path, name=None, split=None):
            seen.append((path, name, split))
            return datasets.Dataset.from_list([{"text": split}])

        monkeypatch.setattr(datasets, "load_dataset", hub)
        wanted = config(path="some/data", name="plain", split="train_sft", eval_split="test_sft")
        train, held_out = load_train_and_eval(wanted)
        assert seen == [("some/data", "plain", "train_sft"), ("some/data", "plain", "test_sft")]
        assert train["text"][:] == ["train_sft"] and held_out is not None and held_out["text"][:] == ["test_sft"]

    def test_a_hub_data_set_that_is_a_program_is_read_from_its_parquet_files(self, monkeypatch):
        """A data set with a loading script is read from the files that the Hub makes of it; other failures are told."""

        def hub(path, name=None, split=None, revision=None, data_dir=None):
            if revision is None:
                raise RuntimeError(f"Dataset scripts are no longer supported, but found {path}.py")
            if revision != "refs/convert/parquet":
                raise RuntimeError("out of memory")
            return datasets.Dataset.from_list([{"text": f"{data_dir} {split}"}])

        monkeypatch.setattr(datasets, "load_dataset", hub)
        wanted = config(path="old/data", name="plain", split="validation")
        assert load_records(wanted)["text"][:] == ["plain validation"]
        monkeypatch.setattr("dpllm.records.PARQUET_BRANCH", "elsewhere")
        with pytest.raises(ConfigError, match=r"'old/data'.*can't be loaded from the Hub.*: out of memory"):
            load_records(wanted)

    def test_a_broken_file_is_named(self, tmp_path):
        """A file that can't be parsed is an error with its path."""
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "fine"}\n{"text": \n', encoding="utf-8")
        with pytest.raises(DataError, match=r"data.jsonl: can't be read as json"):
            load_records(config(path=str(path)))


class TestChecks:
    def test_a_missing_column_names_those_present_and_the_nearest(self, tmp_path):
        """A misspelt column is found before training."""
        path = write(tmp_path / "data.jsonl", [{"sentence": "x", "label": 1}])
        with pytest.raises(DataError, match=r"no column 'sentences'; did you mean 'sentence'\? It has the columns"):
            load_records(config(path=str(path), text_column="sentences"))

    @pytest.mark.parametrize("ending", [".jsonl", ".csv"])
    def test_a_null_names_the_first_record(self, tmp_path, ending):
        """A record without text is said by its number, not by its content."""
        path = write(
            tmp_path / f"data{ending}", [{"text": "x", "n": 1}, {"text": None, "n": 2}, {"text": None, "n": 3}]
        )
        with pytest.raises(DataError, match="column 'text' has 2 nulls, the first in record 1"):
            load_records(config(path=str(path)))
        assert len(load_records(config(path=str(path), limit=1))) == 1

    @pytest.mark.parametrize(
        ("name", "content"), [("a.csv", "text\n"), ("a.csv", ""), ("a.jsonl", ""), ("a.json", "[]"), ("a.txt", "")]
    )
    def test_an_empty_data_set_is_refused(self, tmp_path, name, content):
        """No record means no N, and no guarantee to speak of."""
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match="empty data set"):
            load_records(config(path=str(path)))

    def test_numbers_are_no_text(self, tmp_path):
        """A column of the wrong kind is refused rather than converted."""
        path = write(tmp_path / "data.jsonl", [{"text": 1}, {"text": 2}])
        with pytest.raises(DataError, match="column 'text' holds int64, but text is needed"):
            load_records(config(path=str(path)))


class TestHeldOut:
    @pytest.fixture
    def path(self, tmp_path):
        return str(write(tmp_path / "data.jsonl", [{"text": f"record {number}"} for number in range(50)]))

    def test_the_parts_are_disjoint_complete_and_always_the_same(self, path):
        """No record is trained on and held out; the choice doesn't depend on what the records say."""
        train, held_out = load_train_and_eval(config(path=path, eval_fraction=0.1))
        assert held_out is not None
        assert (len(train), len(held_out)) == (45, 5)
        assert sorted(train["text"][:] + held_out["text"][:]) == sorted(f"record {number}" for number in range(50))
        again, _ = load_train_and_eval(config(path=path, eval_fraction=0.1))
        assert again["text"][:] == train["text"][:]

    def test_without_a_held_out_part_there_is_none(self, path):
        """Nothing is held out unless the recipe says so."""
        train, held_out = load_train_and_eval(config(path=path))
        assert held_out is None and len(train) == 50

    def test_held_out_records_come_from_their_own_file(self, path, tmp_path):
        """`eval_path` leaves the training records whole, whatever the limit."""
        other = write(tmp_path / "dev.csv", [{"text": text} for text in TEXTS])
        train, held_out = load_train_and_eval(config(path=path, eval_path=str(other), limit=2))
        assert held_out is not None and len(train) == 2 and held_out["text"][:] == TEXTS

    def test_a_share_that_leaves_nothing_is_refused(self, path):
        """There must be a record to train on."""
        with pytest.raises(DataError, match="leaves none to train on"):
            load_train_and_eval(config(path=path, limit=1, eval_fraction=0.5))

    def test_a_split_of_a_local_file_is_refused(self, path):
        """A local file has one split, so a second one can't be held out of it by name."""
        with pytest.raises(ConfigError, match="give the file with the held-out records as eval_path"):
            load_train_and_eval(config(path=path, eval_split="test"))


@needs_shared_data
def test_all_of_sst2_is_read():
    """A real tab-separated file gives as many records as it has lines."""
    wanted = config(path=str(SHARED / "sst2" / "train.tsv"), format="classification", text_column="sentence")
    records = load_records(wanted)
    assert len(records) == 67349
    assert set(records["label"][:]) == {0, 1}
