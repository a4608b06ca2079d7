"""Tests of dpllm.config."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from dpllm.config import (
    ConfigError,
    DataConfig,
    HeldOut,
    Microbatch,
    ModelConfig,
    PrivacyConfig,
    PublicPretrainConfig,
    Recipe,
    ReleaseConfig,
    load_recipe,
    recipe_to_dict,
    save_recipe,
)
from dpllm.config.recipe import NESTED
from dpllm.config.recipe_file import load_query_recipe, method_in
from dpllm.config.schema import key_tables, recipe_schema
from dpllm.config.shipped import shipped_recipes
from dpllm.config.train_values import WARM_UP
from dpllm.config.yaml12 import read_yaml
from dpllm.methods.sections import FederatedConfig
from dpllm.training.arguments import train_schema
from dpllm.training.preflight import check_values

PRIVACY: dict[str, Any] = {"epsilon": 8, "delta": 1e-6, "clip_norm": 1, "expected_batch_size": 64}
USERS: dict[str, Any] = {"unit": "id", "max_rows_per_unit": 3}

RECIPE = """
# a comment
model:
  name: gpt2
  adapter: {r: 8, target_modules: [c_attn]}
data: {path: records.jsonl, max_length: 128}
privacy:
  epsilon: 8
  delta: 1e-6
  clip_norm: 1
  expected_batch_size: 64
train:
  learning_rate: 5e-4
  eval_strategy: no
  max_steps: 10
"""


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_whole_numbers_become_floats() -> None:
    """An int given for a float is converted: accounting must never see an int noise multiplier."""
    config = PrivacyConfig(noise_multiplier=1, clip_norm=2, expected_batch_size=np.int64(8))
    assert isinstance(config.noise_multiplier, float) and isinstance(config.clip_norm, float)
    assert type(config.expected_batch_size) is int


def test_numpy_scalars_are_python_numbers(tmp_path: Path) -> None:
    """In every section, in lists and mappings too, so that the recipe can be written; kinds stay strict."""
    recipe = Recipe(
        model=ModelConfig(name="gpt2", adapter={"r": np.int64(8)}, trust_remote_code=np.bool_(True)),
        data=DataConfig(path=np.str_("x"), max_length=np.int32(8), eval=np.float32(0.25)),
        privacy=PrivacyConfig(epsilon=np.float32(8), clip_norm=np.float16(0.5), noise={"kind": "banded", "bands": 2}),
        train={"learning_rate": np.float64(0.5), "bf16": np.bool_(False), "max_steps": np.int8(3)},
        microbatch=Microbatch(tokens=np.int64(512), pack=np.True_),
    )
    assert recipe.privacy.epsilon == 8.0 and recipe.data.eval == HeldOut(share=0.25) and recipe.model.trust_remote_code
    assert {type(value) for value in recipe.train.values()} >= {float, bool, int} and recipe.microbatch.pack is True
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    for wrong in ({"max_length": np.float32(8)}, {"max_length": np.bool_(True)}, {"limit": np.array([3])}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            DataConfig(**{"path": "x", **wrong})
    with pytest.raises(ConfigError, match="normalize_ids must be true or false"):
        PrivacyConfig(epsilon=8, normalize_ids=np.int64(1))


def test_privacy_config_is_frozen() -> None:
    """A checked configuration cannot be changed afterwards."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrivacyConfig(**PRIVACY).clip_norm = 5.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epsilon": None}, "give epsilon or noise_multiplier"),
        ({"epsilon": "8"}, "epsilon must be a finite number, got '8'"),
        ({"clip_norm": 0}, "clip_norm must be at least 1e-12, got 0"),
        ({"unit": ""}, "unit must be a text"),
        ({"unit": 3}, "unit must be a text"),
        ({"max_rows_per_unit": 3}, "max_rows_per_unit bounds the rows of a unit.*data.columns.unit"),
        ({"normalize_ids": True}, "normalize_ids is about the ids of units"),
        ({"max_batch_size": 63}, "max_batch_size=63 is below expected_batch_size=64"),
        ({"adjacency": "add-or-remove"}, "adjacency must be one of 'zero-out', 'replace-one'"),
        ({"sampling": "shuffle"}, "not Poisson sampling, and the ε of Poisson sampling does not hold"),
        ({"sampling": "poisson"}, "sampling must be one of 'unit', 'example'"),
        ({"sampling": "example"}, "draws rows of a unit singly"),
        (
            {**USERS, "sampling": "example", "max_batch_size": 99},
            "no accounting is known for a truncated sample of rows",
        ),
        ({"rows_kept": "random"}, "rows_kept chooses rows of a unit"),
        ({**USERS, "rows_kept": "last"}, "rows_kept must be one of 'first', 'random'"),
        ({"on_budget": "warn"}, "on_budget must be one of 'stop', 'error'"),
        ({"dataset": "mail", "budget_file": 3}, "budget_file must be a text"),
        ({"budget_file": "mail.json"}, "budget_file needs dataset"),
    ],
)
def test_bad_privacy_value_is_refused(change: dict[str, Any], match: str) -> None:
    """Every unusable privacy value is an error that names the field."""
    with pytest.raises(ConfigError, match=match):
        PrivacyConfig(**{**PRIVACY, **change})


def test_budget_and_noise_may_both_be_given() -> None:
    """Together they stop the run at the budget."""
    both = PrivacyConfig(**{**PRIVACY, "epsilon": 8, "noise_multiplier": 1})
    assert (both.epsilon, both.noise_multiplier, both.on_budget) == (8.0, 1.0, "stop")


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        ({}, "text"),
        ({"text": "note", "unit": "who"}, "text"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"text": "note", "label": "kind"}, "classification"),
        ({"chosen": "good", "rejected": "bad"}, "preference"),
        ({"messages": "talk"}, "chat"),
        ({"words": "w", "tags": "t"}, "tokens"),
        ({"question": "q", "context": "c", "answers": "a"}, "question_answering"),
        ({"instruction": "i", "input": "x", "output": "o"}, "instruction"),
    ],
)
def test_the_format_follows_from_the_columns(columns: dict[str, str], format: str) -> None:
    """And a format that is given with them has the same columns."""
    data = DataConfig(path="x.jsonl", max_length=8, columns=columns)
    assert data.format == format and data == DataConfig(path="x.jsonl", max_length=8, columns=columns, format=format)
    assert {key: getattr(data.form, key) for key in columns if key != "unit"} == {
        key: name for key, name in columns.items() if key != "unit"
    }


@pytest.mark.parametrize(
    "columns", [{"text": "note", "unit": "note"}, {"unit": "text"}, {"prompt": "q", "completion": "a", "unit": "q"}]
)
def test_a_text_is_no_unit(columns: dict[str, str]) -> None:
    """Texts that differ in a letter would be two people."""
    with pytest.raises(ConfigError, match=f"columns.unit={columns['unit']} is also the column of"):
        DataConfig(path="x.jsonl", columns=columns)
    assert DataConfig(path="x.jsonl", columns={"text": "q", "label": "who", "unit": "who"}).column("unit") == "who"


def test_the_unit_of_a_recipe_is_a_column(recipe_path: Path, tmp_path: Path) -> None:
    """It is written in ``data.columns`` alone, and both sections have it."""
    plain = load_recipe(recipe_path)
    assert (plain.privacy.unit, plain.privacy.protects, plain.privacy.max_rows_per_unit) == (None, "sequence", None)
    recipe = load_recipe(recipe_path, ["data.columns.unit=who"])
    assert (recipe.privacy.unit, recipe.privacy.protects, recipe.privacy.max_rows_per_unit) == ("who", "user", 16)
    assert load_recipe(recipe_path, ["data.columns.unit=who", "privacy.max_rows_per_unit=3"]).privacy.unit == "who"
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe and "unit" not in recipe_to_dict(recipe)["privacy"]
    own = PrivacyConfig(**{**PRIVACY, "unit": "who"})
    made = Recipe(model=ModelConfig(name="gpt2"), data=DataConfig(path="x", max_length=8), privacy=own)
    assert made.data.columns == {"unit": "who"}
    with pytest.raises(ConfigError, match="name two columns"):
        dataclasses.replace(made, data=DataConfig(path="x", max_length=8, columns={"unit": "other"}))
    with pytest.raises(ConfigError, match="public text has none"):
        PublicPretrainConfig(data=made.data)


def test_short_values_stand_for_mappings(recipe_path: Path) -> None:
    """`model` may be a name, and `data.eval` a share or a path; overrides reach into what they stand for."""
    assert load_recipe(recipe_path, ["model=org/base"]).model == ModelConfig(name="org/base")
    assert load_recipe(recipe_path, ["model=org/base", "model.dtype=auto"]).model.dtype == "auto"
    assert load_recipe(recipe_path).data.eval == HeldOut()
    for text, held_out in (
        ("0.05", HeldOut(share=0.05)),
        ("dev.jsonl", HeldOut(path="dev.jsonl")),
        ("{split: dev, public: true}", HeldOut(split="dev", public=True)),
        ("null", HeldOut()),
    ):
        recipe = load_recipe(recipe_path, [f"data.eval={text}"])
        assert recipe.data.eval == held_out
    public = load_recipe(recipe_path, ["data.eval=dev.jsonl", "data.eval.public=true"])
    assert public.data.eval == HeldOut(path="dev.jsonl", public=True)
    with pytest.raises(ConfigError, match="share in quotes"):
        load_recipe(recipe_path, ["data.eval='0.05'"])


def test_what_people_know_about_a_release_is_a_section(tmp_path: Path) -> None:
    """`release` is read and written out with its defaults; a value that is not a text is refused."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path).release == ReleaseConfig()
    recipe = load_recipe(path, ["release.data_holder=the clinic", "release.other_uses=none"])
    assert recipe.release == ReleaseConfig(data_holder="the clinic", other_uses="none")
    assert recipe_to_dict(recipe)["release"]["audience"] is None
    languages = load_recipe(path, ["release.language=[en, pt-BR]", "release.license=mit"]).release
    assert languages == ReleaseConfig(language=["en", "pt-BR"], license="mit")
    for code in ("English", "xxq", "[en, qqq]"):
        with pytest.raises(ConfigError, match="language must"):
            load_recipe(path, [f"release.language={code}"])
    with pytest.raises(ConfigError, match="audience"):
        load_recipe(path, ["release.audience=3"])
    with pytest.raises(ConfigError, match=r"release\.audiance"):
        load_recipe(path, ["release.audiance=all"])


def test_a_microbatch_may_be_counted_in_tokens(tmp_path: Path) -> None:
    """`microbatch.tokens` is a whole number of at least 1, or "auto", or left out."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path).microbatch.tokens is None
    assert load_recipe(path, ["microbatch.tokens=4096"]).microbatch.tokens == 4096
    assert load_recipe(path, ["microbatch.tokens=auto"]).microbatch.tokens == "auto"


def test_rows_may_be_packed(tmp_path: Path) -> None:
    """`microbatch.pack` is true or false, and for causal language models."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert load_recipe(path).microbatch.pack is False
    assert load_recipe(path, ["microbatch.pack=true"]).microbatch.pack is True
    with pytest.raises(ConfigError, match=r"model\.task="):
        Recipe(
            model=ModelConfig(name="t5", task="seq2seq_lm"),
            data=DataConfig(path="x.jsonl", max_length=8),
            privacy=PrivacyConfig(**PRIVACY),
            microbatch=Microbatch(pack=True),
        )


def test_rows_of_split_records_are_not_drawn_singly() -> None:
    """The number of rows, and with it q, would depend on the tokenizer."""
    singly = PrivacyConfig(**{**PRIVACY, **USERS, "sampling": "example"})
    data = DataConfig(path="x.jsonl", max_length=8, long_records="split")
    with pytest.raises(ConfigError, match="makes several"):
        Recipe(model=ModelConfig(name="gpt2"), data=data, privacy=singly)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, "exactly one of name .* and config .*, got neither"),
        ({"name": "gpt2", "config": {"model_type": "gpt2"}}, "got both"),
        ({"config": {"hidden_size": 8}}, "config must be a mapping with model_type"),
        ({"name": "gpt2", "task": "causal"}, "task must be one of"),
        ({"name": "gpt2", "dtype": "float16"}, "dtype must be one of"),
        ({"name": "gpt2", "tokenizer": "gpt2", "tokenizer_vocab_size": 1000}, "not both"),
        ({"name": "gpt2", "tokenizer_vocab_size": 10}, "tokenizer_vocab_size must be at least 260"),
    ],
)
def test_bad_model_value_is_refused(values: dict[str, Any], match: str) -> None:
    """Every unusable model value is an error that names the field."""
    with pytest.raises(ConfigError, match=match):
        ModelConfig(**values)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": 3}, "name must be a text"),
        (
            {
                "eval": {"share": 0.1, "public": True},
            },
            "eval.public declares public records",
        ),
        (
            {
                "eval": {"share": 0.1, "split": "test"},
            },
            "eval.share holds records out",
        ),
        ({"eval": {"shares": 0.1}}, r"unknown key 'eval.shares'; did you mean 'share'"),
        ({"eval": True}, "eval must be a share of the units, a path, or a mapping"),
        ({"eval": 0}, "eval must be a share above 0"),
        ({"format": "txt"}, "did you mean 'text'"),
        ({"columns": {"txt": "note"}}, r"unknown key 'columns.txt'; did you mean 'text'"),
        ({"columns": {"text": 3}}, "columns.text must be a text"),
        ({"columns": "note"}, "columns must be a mapping"),
        ({"columns": {"prompt": "q"}}, "prompt_completion and preference have: set data.format"),
        ({"columns": {"text": "a", "completion": "b"}}, "columns has text, completion, and no format has them all"),
        ({"columns": {"prompt": "q"}, "format": "text"}, "columns.prompt=q is not read by format=text"),
        ({"long_records": "drop"}, "long_records must be one of"),
        ({"encoding": "hex"}, "encoding='hex' is unknown; usual: utf-8"),
    ],
)
def test_bad_data_value_is_refused(change: dict[str, Any], match: str) -> None:
    """Every unusable data value is an error that names the field."""
    with pytest.raises(ConfigError, match=match):
        DataConfig(**{"path": "x.jsonl", "max_length": 8, **change})


@pytest.mark.parametrize("section", [None, [1], {1: 2}])
def test_train_section_must_be_a_mapping(section: Any) -> None:
    """The train section is a mapping of names to values."""
    data = DataConfig(path="x.jsonl", max_length=8)
    with pytest.raises(ConfigError, match="train must"):
        Recipe(model=ModelConfig(name="gpt2"), data=data, privacy=PrivacyConfig(**PRIVACY), train=section)
    with pytest.raises(ConfigError, match="train must"):
        PublicPretrainConfig(data=data, train=section)


def test_recipe_reads_yaml(recipe_path: Path) -> None:
    """A float in exponent form is a float and `no` stays a text, as YAML 1.2 has it."""
    recipe = load_recipe(recipe_path)
    assert recipe.privacy.delta == 1e-6
    assert recipe.train == {"learning_rate": 5e-4, "eval_strategy": "no", "max_steps": 10, **WARM_UP}
    assert recipe.model.adapter == {"r": 8, "target_modules": ["c_attn"]}
    assert recipe.public_pretrain is None


def test_overrides_win_and_are_parsed_as_yaml(recipe_path: Path) -> None:
    """Overrides reach nested keys, make missing sections, and carry YAML values."""
    recipe = load_recipe(
        recipe_path,
        [
            "privacy.epsilon=null",
            "privacy.noise_multiplier=1e0",
            "train.max_steps=20",
            "model.adapter.target_modules=[q, v]",
            "public_pretrain.data.path=builtin:sotu",
            "public_pretrain.data.max_length=64",
            "train.run_name=",
        ],
    )
    assert recipe.privacy.epsilon is None and recipe.privacy.noise_multiplier == 1.0
    assert recipe.train["max_steps"] == 20 and recipe.train["run_name"] is None
    assert recipe.model.adapter == {"r": 8, "target_modules": ["q", "v"]}
    assert recipe.public_pretrain is not None and recipe.public_pretrain.data.path == "builtin:sotu"


def test_saved_recipe_loads_equal(recipe_path: Path, tmp_path: Path) -> None:
    """The recipe in the output folder is the recipe that ran, including texts that look like numbers."""
    recipe = load_recipe(recipe_path, ["train.run_name='1e-6'", "train.note='yes'", "train.flag=true"])
    save_recipe(recipe, tmp_path / "resolved.yaml")
    assert load_recipe(tmp_path / "resolved.yaml") == recipe
    assert yaml.safe_load((tmp_path / "resolved.yaml").read_text())["train"]["note"] == "yes"
    assert recipe_to_dict(recipe)["train"]["run_name"] == "1e-6"


@pytest.mark.parametrize(
    ("override", "match"),
    [
        (
            "privacy.clipnorm=1",
            r"override privacy.clipnorm=1: unknown key 'privacy.clipnorm'; did you mean 'privacy.clip_norm'\?",
        ),
        ("privcy.delta=1", r"unknown key 'privcy'; did you mean 'privacy'\?"),
        (
            "public_pretrain.data.pth=1",
            r"unknown key 'public_pretrain.data.pth'; did you mean 'public_pretrain.data.path'\?",
        ),
        ("privacy.unit=id", r"unknown key 'privacy.unit'; the column .* is data\.columns\.unit"),
        ("privacy.delta=2", r"privacy\.delta must be less than 1, got 2"),
        ("model=3", "'model' must be a mapping"),
        ("microbatch=512", r"tokens, pack.*microbatch\.tokens=512"),
        ("privacy=8", r"privacy\.epsilon=8"),
        ("model.name.x=gpt2", "'model.name' is a value, not a section"),
        ("privacy.delta", "must read key=value"),
        ("privacy.delta={", "not valid YAML"),
    ],
)
def test_bad_override_is_refused(recipe_path: Path, override: str, match: str) -> None:
    """An unknown, missing or unusable key is an error that names file, dotted key and the nearest known key."""
    with pytest.raises(ConfigError, match=match):
        load_recipe(recipe_path, [override])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[1, 2]", "must be a mapping with the sections model, data"),
        ("a: {", "not valid YAML"),
        ("model: {name: a, name: b}", "key 'name' is repeated"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    """A file that is not a recipe is an error that names the file."""
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"broken.yaml.*{match}"):
        load_recipe(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A recipe that is not there is an error that names the path."""
    with pytest.raises(
        ConfigError,
        match=r"nowhere\.yaml",
    ):
        load_recipe(tmp_path / "nowhere.yaml")


def test_the_schema_of_recipes_fits_the_shipped_ones_and_no_misspelt_key() -> None:
    """An editor completes and checks with it what dpllm reads."""
    train = train_schema()
    check = jsonschema.Draft202012Validator(recipe_schema({"average": {}, "trainer": {}, **train}))
    check.check_schema(check.schema)
    assert train["learning_rate"] == {"type": "number"} and train["max_steps"] == {"type": "integer"}
    for path in shipped_recipes().values():
        text = path.read_text(encoding="utf-8")
        assert check.is_valid(read_yaml(text)), path
        for good, bad in (("privacy:", "privacy:\n  epsilom: 3"), ("data:", "dta:")):
            assert not check.is_valid(read_yaml(text.replace(f"\n{good}", f"\n{bad}", 1))), path


def test_the_tables_have_every_key_once() -> None:
    """With its default; the basic keys are few and come first."""
    basic, advanced = key_tables().split("Advanced keys")
    rows = re.findall(r"^\| ([^|]+) \| `([\w.]+)` \| ([^|]+) \| (\S.*) \|$", basic + advanced, flags=re.MULTILINE)
    found = [(section, key) for section, key, *_ in rows]
    assert len(set(found)) == len(found) and len(re.findall(r"^\| \w", basic, flags=re.MULTILINE)) < 40
    sections = {**NESTED[Recipe], "federated": FederatedConfig, "(top level)": Recipe}
    for section, kind in sections.items():
        for item in dataclasses.fields(kind):
            listed = (section, item.name) in found
            assert listed != ((section, item.name) in {("privacy", "unit"), ("(top level)", "beside")})
    defaults = {(section, key): default for section, key, default, _ in rows}
    assert defaults["privacy", "clip_norm"] == "`0.1`" and defaults["data", "path"] == "required"
    assert ("privacy", "epsilon") in found and found.index(("privacy", "epsilon")) < found.index(("privacy", "seed"))
    assert not [row for row in rows if "None" in row[-1]]


def test_sections_are_ordinary_values(recipe_path: Path) -> None:
    """Equal, copied, pickled and replaced like dataclasses; a replaced value is checked again."""
    recipe = load_recipe(recipe_path, ["federated={local_steps: 3}", "data.columns.unit=who"])
    assert copy.deepcopy(recipe) == recipe == pickle.loads(pickle.dumps(recipe))
    assert dataclasses.replace(recipe.privacy, epsilon=3).epsilon == 3.0
    with pytest.raises(ConfigError, match="epsilon must be greater than 0, got -3"):
        dataclasses.replace(recipe.privacy, epsilon=-3)
    assert recipe.beside["federated"] == FederatedConfig(local_steps=3)


def test_the_data_set_of_a_shipped_recipe_is_not_that_of_other_records() -> None:
    """Report and budget would name the wrong people; a name of one's own, and none, are accepted."""
    of_builtin = []
    for name, path in shipped_recipes().items():
        raw = read_yaml(path.read_text(encoding="utf-8"))
        if str(raw["data"].get("path")).startswith("builtin:") and "dataset" in raw["privacy"]:
            method = method_in(path)
            of_builtin.append(name)

            def load(*overrides: str, path: Path = path, method: str | None = method) -> Any:
                trains = method in (None, "federated")
                return load_recipe(path, overrides) if trains else load_query_recipe(path, overrides, str(method))

            load()
            with pytest.raises(ConfigError, match=r"privacy\.dataset"):
                load("data.path=notes.csv")
            for dataset in ("mine", "null"):
                assert load("data.path=notes.csv", f"privacy.dataset={dataset}").data.path == "notes.csv"
    assert {"clinic_notes", "quickstart", "label_counts", "federated_users"} <= {*of_builtin}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("epsilon: -1", "recipe.yaml, line 8", "privacy.epsilon must be greater than 0, got -1"),
        ("epsilon: 1001", "line 8", "privacy.epsilon must be at most 1,000, got 1001: a larger ε protects nobody"),
        ("epsilon: '8'", "line 8", "privacy.epsilon must be a finite number, got '8' (str): it is in quotes"),
        ("epsilom: 8", "line 8", "unknown key 'privacy.epsilom'; did you mean 'privacy.epsilon'?"),
        ("epsilon: 8\n  adjacency: zero", "line 9", "privacy.adjacency must be one of 'zero-out', 'replace-one', got"),
        ("epsilon: 8\n  rows_kept: random", "line 9", "privacy.rows_kept chooses rows of a unit"),
        ("epsilon: 8\n  noise: {kind: bandet}", "line 9", "privacy.noise"),
        ("", "line 7", "section 'privacy': give epsilon or noise_multiplier"),
    ],
)
def test_an_error_has_the_line_of_its_key(recipe_path: Path, text: str, place: str, words: str) -> None:
    """And its value; nothing of pydantic's own words."""
    recipe_path.write_text(RECIPE.replace("epsilon: 8", text or "delta: 1e-5").replace("  delta: 1e-6\n", "", 1))
    with pytest.raises(ConfigError) as found:
        load_recipe(recipe_path)
    assert place in str(found.value) and words in str(found.value)
    assert not re.search(r"Input should|type=|https?:|\n", str(found.value))


def test_an_error_names_the_override_that_made_it(recipe_path: Path) -> None:
    """Instead of a line."""
    for override in ("privacy.epsilon=-1", "privacy={epsilon: -1, expected_batch_size: 3}", "data.eval.share=2"):
        with pytest.raises(ConfigError, match=re.escape(f"{recipe_path}, override {override}: ")) as found:
            load_recipe(recipe_path, [override])
        assert "must be" in str(found.value)


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["privacy.epsilon=3", "privacy={epsilon: -1}"], 1),
        (["privacy={epsilon: -1}", "privacy.epsilon=-2"], 1),
        (["data.eval.path=null", "privacy.delta=1e-7"], 0),
        (["privacy.epsilon=null", "data.max_length=9"], 0),
        (["privacy.epsilon=null", "privacy.noise_multiplier=1", "privacy.noise_multiplier="], 2),
        (["data.eval.public=true", "data.eval={public: true}", "data.max_length=9"], 1),
        (["data.eval.public=true", "data.max_length=0"], 1),
        (["train.max_step=3", "train.max_steps=4"], 0),
        (["train.max_steps=4", "train.optim_args=momentum=1"], 1),
        (["model.adapter.r=4", "model.adapter={bias: some}"], 1),
        (["data.max_length=9", "train.eval_strategy=steps"], 1),
    ],
)
def test_the_override_that_causes_an_error_is_named(recipe_path: Path, overrides: list[str], blamed: int) -> None:
    """The last that wrote the key at fault, or the one with which the error appears; errors of libraries too."""
    recipe_path.write_text(
        RECIPE.replace("max_length: 128}", "max_length: 128, eval: {path: dev.jsonl, public: true}}")
    )
    with pytest.raises(ConfigError, match=re.escape(f"{recipe_path}, override {overrides[blamed]}: ")):
        check_values(load_recipe(recipe_path, [*overrides, "train.output_dir=out"]))
    recipe_path.write_text(recipe_path.read_text().replace("epsilon: 8", "epsilon: -8"))
    with pytest.raises(ConfigError, match=r"line 8: .*epsilon"):
        load_recipe(recipe_path, ["data.max_length=9", "data.eval.public=true"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.columns={text: note}", r"data\.columns\.unit=who"),
        ("data.columns=", r"data\.columns\.unit.*data\.columns=null"),
        ("data.columns=null", r"data\.columns\.unit=who"),
        ("train=", r"train\.output_dir.*train=null"),
        ("data={path: x}", r"data\.columns\.unit=who"),
        ("train.num_train_epochs=50", r"num_train_epochs=50.*max_steps=4"),
        ("data.eval={public: true}", r"eval\.public"),
        ("data.eval=5%", "data.eval.*5%"),
        ("data.eval_path=a", r"did you mean 'data\.eval'"),
        ("data.text_column=a", r"did you mean 'data\.columns\.text'"),
        ("privacy.unit_column=a", r"did you mean 'data\.columns\.unit'"),
    ],
)
def test_an_override_changes_nothing_that_it_does_not_name(tmp_path: Path, override: str, words: str) -> None:
    """No unit is lost with a mapping, no setting is hidden by another, and a hint never names another thing."""
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "model: {config: {model_type: gpt2}}\ndata: {path: x.csv, columns: {text: a, unit: who}}\n"
        "privacy: {epsilon: 8}\ntrain: {output_dir: out, max_steps: 4}\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=words):
        load_recipe(file, [override])
    assert load_recipe(file, ["data.columns={text: note, unit: null}"]).privacy.unit is None
    assert load_recipe(file, ["data.columns.text=note"]).privacy.unit == "who"
    assert load_recipe(file, ["train.max_steps=", "train.num_train_epochs=5"]).train["num_train_epochs"] == 5
