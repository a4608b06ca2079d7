"""A model folder and its records, as an attack reads them."""

import json

import pytest
from transformers import LlamaForCausalLM

from dpllm.audit.bounds import AuditError
from dpllm.config import load_recipe, recipe_to_dict, save_recipe
from dpllm.data.rows import train_tokenizer
from dpllm.methods.attacks.attacks import draw_sample, load_causal_model, load_released, record_key, starting_point
from dpllm.privacy.ledger import Ledger
from dpllm.privacy.plan import make_plan
from tests.conftest import tiny_llama_config

RECIPE = """
model: {{name: {folder}}}
data: {{path: {data}, max_length: 16, eval: 0.5}}
privacy: {{noise_multiplier: 1, delta: 1.0e-3, clip_norm: 1, expected_batch_size: 10}}
train: {{output_dir: {folder}}}
"""


def write(path, texts, **columns):
    records = [
        {"text": text, **{name: values[number] for name, values in columns.items()}}
        for number, text in enumerate(texts)
    ]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


@pytest.fixture
def recipe_of(tmp_path):
    """A recipe whose data are given texts."""

    def make(texts, *overrides, **columns):
        data = write(tmp_path / "data.jsonl", texts, **columns)
        path = tmp_path / "made.yaml"
        path.write_text(RECIPE.format(folder=tmp_path / "model", data=data), encoding="utf-8")
        return load_recipe(path, overrides)

    return make


@pytest.fixture
def folder(tmp_path, recipe_of):
    """A model folder that is whole: model, tokenizer, recipe."""
    path = tmp_path / "model"
    tokenizer = train_tokenizer(["a rose is a rose"], vocab_size=270, max_length=64)
    LlamaForCausalLM(tiny_llama_config(vocab_size=len(tokenizer))).save_pretrained(path)
    tokenizer.save_pretrained(path)
    save_recipe(recipe_of([f"text {number}" for number in range(80)]), path / "recipe.yaml")
    return path


def test_a_whole_folder_is_read(folder):
    """Model, tokenizer, recipe; without a ledger there is no claim."""
    found = load_released(folder)
    assert found.history is None and found.plan is None and not found.model.training
    assert found.collator.pad_token_id == 0 and starting_point(found) == str(folder)
    sample = draw_sample(found.recipe, 100)
    rows = found.rows(sample.records)
    assert len(rows) == 80 and sample.included.sum() == 40


def test_members_are_what_was_trained_on_and_each_text_stands_once(recipe_of):
    """The draw is random, of equal size, without canaries, and reproducible."""
    recipe = recipe_of([f"text {number}" for number in range(100)])
    sample, again = draw_sample(recipe, 30, seed=1), draw_sample(recipe, 30, seed=1)
    assert len(sample.members) == len(sample.non_members) == 30
    assert set(sample.members["text"]) <= set(sample.train["text"])
    assert not set(sample.non_members["text"]) & set(sample.train["text"])
    assert sample.members["text"] == again.members["text"] != draw_sample(recipe, 30, seed=2).members["text"]
    assert set(sample.dropped.values()) == {0}
    canaries = {record_key([text]) for text in sample.train["text"][:20]}
    without = draw_sample(recipe, 50, leave_out=canaries)
    assert len(without.members) == 30 and not canaries & {record_key([text]) for text in without.members["text"]}


def test_texts_in_both_and_repeated_ones_are_dropped_and_counted(recipe_of, tmp_path):
    """Of a text that was trained on twice the bound says nothing, and one that was trained on is no non-member."""
    held_out = write(tmp_path / "held_out.jsonl", [f"other {n}" for n in range(25)] + ["text 1", "other 1", "other 1"])
    recipe = recipe_of([f"text {n}" for n in range(30)] + ["text 0"], f"data.eval={held_out}")
    sample = draw_sample(recipe, 1000)
    assert "text 0" not in sample.members["text"] and len(sample.members) == 25
    assert sorted(sample.non_members["text"]) == sorted(f"other {n}" for n in range(25))
    assert sample.dropped == {
        "trained on more than once": 1,
        "held out, and trained on as well": 1,
        "held out more than once": 2,
    }
    overlapping = recipe_of(["text 1"] * 30, f"data.eval={held_out}")
    with pytest.raises(AuditError, match="non-members can"):
        draw_sample(overlapping, 100)


def test_no_held_out_records_and_too_few_are_refused(recipe_of):
    """Nothing can be said without others, or with a handful."""
    texts = [f"text {number}" for number in range(80)]
    with pytest.raises(AuditError, match=r"data\.eval=0\.1"):
        draw_sample(recipe_of(texts, "data.eval=null"), 100)
    with pytest.raises(AuditError, match="non-members can"):
        draw_sample(recipe_of(texts, "data.eval=0.1"), 100)
    with pytest.raises(AuditError, match="5 requested"):
        draw_sample(recipe_of(texts), 5)


def test_rows_of_a_user_that_were_left_out_are_no_members(recipe_of):
    """At user level the first rows are known to be used; the rows of a secret draw are unknown."""
    texts, users = [f"text {number}" for number in range(80)], ["crowd"] * 30 + [f"user {n}" for n in range(50)]
    level = ["data.columns.unit=user", "privacy.max_rows_per_unit=2"]
    sample = draw_sample(recipe_of(texts, *level, "data.eval=0.4", user=users), 100)
    assert sum(user == "crowd" for user in sample.train["user"]) == 2
    with pytest.raises(AuditError, match=r"privacy\.rows_kept=random"):
        draw_sample(recipe_of(texts, *level, "privacy.rows_kept=random", user=users), 100)


def test_a_folder_that_lacks_something_is_refused(folder, tmp_path):
    """The missing file is named, with its origin."""
    recipe = load_recipe(folder / "recipe.yaml")
    (folder / "tokenizer_config.json").rename(folder / "elsewhere.json")
    with pytest.raises(AuditError, match="holds no tokenizer"):
        load_released(folder)
    (folder / "elsewhere.json").rename(folder / "tokenizer_config.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(AuditError, match="cannot be loaded"):
        load_released(folder)
    (folder / "recipe.yaml").unlink()
    with pytest.raises(AuditError, match=r"recipe\.yaml"):
        load_released(folder)
    for task in ("seq2seq_lm", "sequence_classification"):
        values = recipe_to_dict(recipe)
        values["model"]["task"] = task
        (folder / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
        with pytest.raises(AuditError, match=f"holds a model for {task}"):
            load_released(folder)


def test_a_run_from_a_fixed_seed_has_no_bounds(folder):
    """Nothing in it is private, so no bound may be printed beside the attacks."""
    recipe = load_recipe(folder / "recipe.yaml", ["privacy.seed=1"])
    plan = make_plan(recipe.privacy, 40, 2)
    plan.save(folder / "privacy_plan.json")
    Ledger.create(folder / "privacy_ledger.jsonl", plan).close()
    with pytest.raises(AuditError, match="used a fixed"):
        load_released(folder)


def test_a_reference_with_another_vocabulary_is_refused(folder, tmp_path):
    """Its token numbers would mean other texts."""
    LlamaForCausalLM(tiny_llama_config(vocab_size=61)).save_pretrained(tmp_path / "small")
    with pytest.raises(AuditError, match="61 tokens"):
        load_causal_model(str(tmp_path / "small"), "float32", load_released(folder).tokenizer)


def test_the_start_of_a_run_with_public_training_lies_beside_it(folder):
    """The private steps started from public_pretrain/; without it the starting model is unknown."""
    values = recipe_to_dict(load_recipe(folder / "recipe.yaml"))
    values["public_pretrain"] = {"data": {"path": "builtin:sotu", "max_length": 16}, "train": {}}
    (folder / "recipe.yaml").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(AuditError, match="lacks public_pretrain/"):
        starting_point(load_released(folder))
    (folder / "public_pretrain").mkdir()
    (folder / "public_pretrain" / "config.json").write_text("{}", encoding="utf-8")
    assert starting_point(load_released(folder)) == str(folder / "public_pretrain")
