"""Tests of dpllm.audit.prepare and dpllm.audit.canaries: the canaries that enter the data, and the files about them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from dpllm.audit import prepare as preparing
from dpllm.audit.bounds import AuditError
from dpllm.audit.canaries import CANARIES_FILE, CanarySet, check_data, key_of, record_of
from dpllm.audit.prepare import CanaryOptions, Prepared, prepare, read_prefixes
from dpllm.config import DataConfig, load_recipe
from dpllm.data.rows import load_train_and_eval, tokenize_records, unit_index_of
from dpllm.models.load import load_tokenizer
from tests.small_model import WORDS

SMALL = CanaryOptions(num=30, length=8)
USERS = ["data.columns.unit=user", "privacy.max_rows_per_unit=6"]


def texts_of(made: CanarySet, included: bool) -> list[str]:
    """The texts of the canaries."""
    return [text for canary in made.canaries for _, text in canary.records if canary.included == included]


@pytest.fixture(scope="module")
def prepared(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(load_recipe(recipe_file), tmp_path_factory.mktemp("audit") / "a", SMALL)


class TestData:
    def test_the_included_canaries_are_in_it_and_the_others_not(self, prepared, recipe_file):
        """Records keep their order and columns; the included canaries are among them."""
        before, held_out = load_train_and_eval(load_recipe(recipe_file).data)
        recipe = load_recipe(prepared.recipe_path)
        after, held_out_after = load_train_and_eval(recipe.data)
        chosen = texts_of(prepared.made, True)
        assert [text for text in after["text"] if text not in set(chosen)] == before["text"][:]
        assert sorted(chosen + before["text"][:]) == sorted(after["text"])
        assert not set(texts_of(prepared.made, False)) & set(after["text"])
        assert held_out_after["text"][:] == held_out["text"][:]
        assert after.column_names == before.column_names and after.features == before.features
        assert [n for n, text in enumerate(after["text"]) if text in set(chosen)] != list(
            range(len(before), len(after))
        )

    def test_the_numbers_are_those_of_the_training(self, prepared):
        """N counts the included canaries; the command prints δ, the ceiling and the folder."""
        recipe = load_recipe(prepared.recipe_path)
        records, _ = load_train_and_eval(recipe.data)
        made = prepared.made
        assert made.num_units == unit_index_of(records, recipe.privacy).num_units == 90 + sum(made.included)
        assert made.delta == 1e-3 and prepared.num_records == made.num_units and 1 < prepared.ceiling < 6
        assert recipe.train["output_dir"] == str(prepared.run_folder.resolve())
        assert len(made.candidates) == len(made.canaries) == 30

    def test_no_canary_is_cut(self, prepared, base_model):
        """The training rows of a canary contain all of it."""
        recipe = load_recipe(prepared.recipe_path)
        tokenizer = load_tokenizer(recipe.model)
        records = datasets.Dataset.from_dict({"text": texts_of(prepared.made, True)})
        rows = tokenize_records(records, tokenizer, recipe.data)
        assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows["input_ids"]] == records["text"][:]
        # With the token at the end, 33 each; in one or two, neighbours may merge when the text is encoded again.
        with pytest.raises(AuditError, match=r"data\.max_length=32"):
            prepare(load_recipe(prepared.recipe_path), prepared.folder / "x", CanaryOptions(num=30, length=32))

    def test_the_coins_are_fair_and_differ_each_time(self, recipe_file, tmp_path):
        """Two audits of one recipe have other coins and other canaries; about half is in."""
        options = CanaryOptions(num=200, length=6, num_candidates=0)
        made = [prepare(load_recipe(recipe_file), tmp_path / name, options).made for name in "ab"]
        assert made[0].included != made[1].included
        assert not set(made[0].canaries) & set(made[1].canaries)
        assert all(50 < sum(one.included) < 150 for one in made) and made[0].candidates == ()

    def test_users(self, recipe_file, tmp_path):
        """A user-level canary is one new user with all its records, repeated as asked; ids are of the data's kind."""
        options = CanaryOptions(num=20, length=6, records_per_user=3, repetitions=2)
        recipe = load_recipe(recipe_file, USERS)
        made = prepare(recipe, tmp_path / "a", options).made
        records, _ = load_train_and_eval(load_recipe(tmp_path / "a" / "recipe.yaml").data)
        for canary in made.canaries:
            own = [record["text"] for record in records if record["user"] == canary.user]
            assert sorted(own) == (sorted([text for _, text in canary.records] * 2) if canary.included else [])
            assert len(canary.records) == 3 and isinstance(canary.user, str)
        assert made.num_units == 18 + sum(made.included), "of 20 users two are held out, with all their records"
        check_data(made, tmp_path / "a")

    def test_users_with_numbers(self, recipe_file, tmp_path):
        """New users of numbered ones are numbers that nobody has; by default they have as many records as fit."""
        records = [{"text": f"the dog {n}", "user": n % 20} for n in range(100)]
        data = tmp_path / "numbered.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        recipe = load_recipe(recipe_file, [*USERS, f"data.path={data}"])
        made = prepare(recipe, tmp_path / "a", CanaryOptions(num=12, length=6)).made
        assert {type(canary.user) for canary in made.canaries} == {int}
        assert min(canary.user for canary in made.canaries) >= 20 and len(made.canaries[0].records) == 6

    @pytest.mark.parametrize("form", ["prompt_completion", "chat"])
    def test_other_formats(self, recipe_file, tmp_path, form):
        """A canary is in the text that the model learns to write, behind its own prompt; other fields are empty."""
        columns: dict[str, Any] = {"prompt": "sees", "completion": "a red house"}
        if form == "chat":
            turns = [{"role": "user", "content": "who", "mood": "good"}, {"role": "assistant", "content": "a dog"}]
            columns = {"messages": turns}
        data = tmp_path / "data.jsonl"
        lines = [{**columns, "source": f"s{n}"} for n in range(40)]
        data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        overrides = [f"data.path={data}", f"data.format={form}", "data.eval=null", "data.max_length=60"]
        recipe = load_recipe(recipe_file, overrides)
        if form == "chat":
            recipe = dataclasses.replace(recipe, model=chat_model(recipe.model, tmp_path / "chat"))
        prepared = prepare(recipe, tmp_path / "a", CanaryOptions(num=12, length=8))
        check_data(prepared.made, prepared.folder)
        records, none = load_train_and_eval(load_recipe(prepared.recipe_path).data)
        assert none is None and sum(source is None for source in records["source"]) == sum(prepared.made.included)
        assert all(prefix and text for canary in prepared.made.canaries for prefix, text in canary.records)


def chat_model(model: Any, folder: Path) -> Any:
    """The model with a tokenizer that supports chats."""
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return dataclasses.replace(model, tokenizer=str(folder))


class TestKinds:
    def test_rare_suffix(self, recipe_file, tmp_path):
        """The prefix is public text, and the suffix has tokens that it does not."""
        public = tmp_path / "public.txt"
        public.write_text("\n".join(["the old man walks over one bridge", "a red house"] * 5), encoding="utf-8")
        options = CanaryOptions(num=20, length=6, kind="rare-suffix", prefixes=read_prefixes(public))
        made = prepare(load_recipe(recipe_file), tmp_path / "a", options).made
        for canary in made.canaries:
            ((prefix, text),) = canary.records
            assert any(line.startswith(prefix) for line in ("the old man walks over one bridge", "a red house"))
            assert not set(text.split()) & set(WORDS)

    def test_rare_suffix_of_the_recipes_public_text(self, recipe_file, tmp_path, base_model):
        """Without a file the prefixes come from public_pretrain, and a tokenizer is trained on it as in the run."""
        public = tmp_path / "public.jsonl"
        public.write_text(json.dumps({"text": "seven clouds over the bridge"}) + "\n", encoding="utf-8")
        text = recipe_file.read_text(encoding="utf-8").replace(
            f"name: {base_model}", "config: {model_type: llama, max_position_embeddings: 64}, tokenizer_vocab_size: 300"
        )
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text + f"public_pretrain: {{data: {{path: {public}, max_length: 16}}}}\n", encoding="utf-8")
        made = prepare(load_recipe(recipe), tmp_path / "a", CanaryOptions(num=20, length=6, kind="rare-suffix")).made
        assert all(canary.records[0][0].startswith("seven") for canary in made.canaries)

    def test_sampled(self, recipe_file, tmp_path):
        """The recipe's model writes the canaries; no two are equal."""
        options = CanaryOptions(num=20, length=8, kind="sampled", temperature=1.5)
        made = prepare(load_recipe(recipe_file), tmp_path / "a", options).made
        assert len(set(texts_of(made, True) + texts_of(made, False))) == 20 and made.kind == "sampled"


class TestFile:
    def test_it_is_its_owners_alone_and_reads_back(self, prepared):
        """Mode 0600; the file is read back as it was made, and the data's name is part of its hash."""
        path = prepared.folder / CANARIES_FILE
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert CanarySet.load(path) == prepared.made
        assert load_recipe(prepared.recipe_path).data.path.endswith(f"records-{prepared.made.hash[:12]}.parquet")
        check_data(prepared.made, prepared.folder)
        with pytest.raises(FileExistsError):
            prepared.made.save(path)

    def edited(self, prepared: Prepared, tmp_path: Path, change: Any) -> Path:
        """The file after a change by hand."""
        raw = json.loads((prepared.folder / CANARIES_FILE).read_text(encoding="utf-8"))
        change(raw)
        path = tmp_path / CANARIES_FILE
        path.write_text(json.dumps(raw), encoding="utf-8")
        return path

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda raw: raw.update(inclusion="m/2 by design"), "were included by 'm/2 by design'. The bound holds"),
            (lambda raw: raw["canaries"][3].pop("included"), "canary 3 has no coin"),
            (lambda raw: raw["canaries"][3].update(included=1), "canary 3 has no coin"),
            (lambda raw: raw["canaries"].clear(), "has no canary"),
            (lambda raw: [item.update(included=True) for item in raw["canaries"]], "30 of 30 canaries were included"),
            (lambda raw: raw["canaries"].reverse(), "edited: its texts, order or coins"),
            (lambda raw: raw["canaries"][0].update(included=not raw["canaries"][0]["included"]), "was edited"),
            (lambda raw: raw["canaries"][0].update(records=[["", "else"]]), "was edited"),
            (lambda raw: raw.update(created_at="2020-01-01T00:00:00+00:00"), "was edited"),
            (lambda raw: raw.pop("nonce"), "lacks a field that `dpllm audit prepare` writes"),
            (lambda raw: raw.pop("format"), "holds no canaries of format 1"),
        ],
    )
    def test_what_was_changed_is_refused(self, prepared, tmp_path, change, message):
        """No scores are judged by coins that nobody tossed, or that somebody changed."""
        with pytest.raises(AuditError, match=message):
            CanarySet.load(self.edited(prepared, tmp_path, change))

    def test_what_is_no_such_file_is_refused(self, tmp_path):
        """Missing, and not JSON."""
        with pytest.raises(AuditError, match="such file"):
            CanarySet.load(tmp_path / "none.json")
        (tmp_path / "text.json").write_text("coins")
        with pytest.raises(AuditError, match="is not JSON"):
            CanarySet.load(tmp_path / "text.json")

    def test_data_that_were_lost_or_replaced_are_refused(self, prepared, tmp_path):
        """Coins are those of one file of records."""
        with pytest.raises(AuditError, match="name is part"):
            check_data(prepared.made, tmp_path)
        (tmp_path / prepared.made.data_name).write_bytes(b"else")
        with pytest.raises(AuditError, match=r"canaries\.json"):
            check_data(prepared.made, tmp_path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kind": "random-token"}, "unknown kind of canary 'random-token'; did you mean 'random-tokens'"),
            ({"num": 0}, "num must be at least 1"),
            ({"num_candidates": -1}, "num_candidates must be at least 0"),
        ],
    )
    def test_options(self, options, message):
        """Values that mean nothing."""
        with pytest.raises(AuditError, match=message):
            CanaryOptions(**options)

    @pytest.mark.parametrize(
        ("options", "overrides", "message"),
        [
            ({"num": 9}, [], "9 canaries cannot show anything"),
            ({"repetitions": 2}, [], "every record is a unit"),
            ({"records_per_user": 2}, [], "every record is a unit"),
            ({"records_per_user": 4, "repetitions": 2}, USERS, "a canary user would have 8 records"),
            ({"kind": "rare-suffix"}, [], "begins with public text, but there is none"),
            ({"kind": "sampled", "temperature": 0.0}, [], "temperature must be above 0"),
            ({"num": 900, "length": 1}, [], r"only \d+ of 1800 canaries could be made"),
            ({}, ["privacy.dataset=x", "privacy.budget_file=b.json"], "counts the units without canaries"),
            ({}, ["model.task=sequence_classification", "data.format=classification"], "cannot be audited by canaries"),
        ],
    )
    def test_requests(self, recipe_file, tmp_path, options, overrides, message):
        """Canaries that could show nothing, or something untrue, are refused before anything is written."""
        with pytest.raises(AuditError, match=message):
            prepare(load_recipe(recipe_file, overrides), tmp_path / "a", CanaryOptions(**{"num": 12, **options}))
        assert not (tmp_path / "a").exists()

    def test_a_sampler_is_needed(self, recipe_file, tmp_path, base_model):
        """A model made from a configuration cannot write canaries before it was trained."""
        overrides = ["model.name=", "model.config={model_type: llama}", f"model.tokenizer={base_model}"]
        with pytest.raises(AuditError, match="names none"):
            prepare(load_recipe(recipe_file, overrides), tmp_path / "a", CanaryOptions(num=12, kind="sampled"))

    def test_a_folder_that_is_not_empty(self, recipe_file, tmp_path):
        """The coins of an earlier audit are not lost."""
        (tmp_path / "file").touch()
        with pytest.raises(AuditError, match="is not empty"):
            prepare(load_recipe(recipe_file), tmp_path, SMALL)

    def test_canaries_that_the_data_hold_already(self, recipe_file, tmp_path, monkeypatch):
        """A canary that is in the data anyway has no coin."""
        records, _ = load_train_and_eval(load_recipe(recipe_file).data)
        known = iter([("", text) for text in records["text"]])
        monkeypatch.setattr(preparing, "_texts", lambda *_: lambda num: [next(known) for _ in range(num)])
        with pytest.raises(AuditError, match="canaries are already"):
            prepare(load_recipe(recipe_file), tmp_path / "a", CanaryOptions(num=12))

    def test_prefixes_that_can_not_be_read(self, tmp_path):
        """The file of public text is missing."""
        with pytest.raises(AuditError, match="text per"):
            read_prefixes(tmp_path / "none.txt")

    def test_a_record_without_a_place_for_text(self):
        """A classifier's record has no text that a model writes."""
        with pytest.raises(AuditError, match="cannot hold"):
            record_of("", "x", DataConfig(path="x", max_length=8, format="classification"))

    def test_keys_tell_users_apart(self):
        """The same text of two users is two records."""
        config = DataConfig(path="x", max_length=8)
        keys = {key_of({"text": "a", "user": user}, config, "user") for user in "ab"}
        assert len(keys) == 2


def test_canaries_that_would_take_hours_are_refused(recipe_file, tmp_path):
    """With the bound, before any text is made."""
    with pytest.raises(AuditError, match="20000"):
        CanaryOptions(num=10**7)
    for options, match in (
        (CanaryOptions(num=20, length=10**6), r"canaries of 1000000 tokens are longer than data\.max_length"),
        (CanaryOptions(num=20, num_candidates=10**7), "but at most 20000000 are allowed"),
    ):
        with pytest.raises(AuditError, match=match):
            prepare(load_recipe(recipe_file), tmp_path / "audit", options)
