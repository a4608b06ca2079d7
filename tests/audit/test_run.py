"""Tests of dpllm.audit.run and of its commands: from a recipe to a verdict, on a small model and real files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpllm.audit import run as auditing
from dpllm.audit.bounds import AuditError
from dpllm.audit.canaries import CANARIES_FILE, Canary, CanarySet
from dpllm.audit.result import AUDIT_FILE, CONSISTENT, FAIL, NO_CLAIM
from dpllm.audit.run import LOSS, PICTURE_FILE, RATIO, audit_run, canary_rows, load_model_of_run
from dpllm.config import ConfigError, PrivacyConfig, load_recipe
from dpllm.data.rows import RowCollator, load_train_and_eval, tokenize_records
from dpllm.models.losses import per_sequence_loss
from dpllm.privacy.ledger import LEDGER_FILE, Ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan
from dpllm.training import finetune
from tests import children
from tests.audit.conftest import M, call
from tests.mutations import kills

USER = ["data.columns.unit=user", "privacy.max_rows_per_unit=5"]


def memorise(prepared: Path, base: Path, folder: Path, steps: int = 100) -> Path:
    """Train on the prepared data without any privacy, until they are known by heart."""
    recipe = load_recipe(prepared / "recipe.yaml")
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    records, _ = load_train_and_eval(recipe.data)
    batch = RowCollator(pad_token_id=0)(list(tokenize_records(records, tokenizer, recipe.data)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        per_sequence_loss(model(**inputs).logits, batch["labels"]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_claim(folder: Path, made: CanarySet, noise_multiplier: float = 5.0, **changes: Any) -> Path:
    """Put a plan and a ledger beside a model that never kept them."""
    values = {"noise_multiplier": noise_multiplier, "clip_norm": 1.0, "expected_batch_size": 20, "delta": made.delta}
    num_units = changes.pop("num_units", made.num_units)
    plan = make_plan(PrivacyConfig(**{**values, **changes}), num_units, 2)
    plan.save(folder / PLAN_FILE)
    with Ledger.create(folder / LEDGER_FILE, plan) as ledger:
        for number in range(2):
            ledger.append_step(number, plan.event)
        ledger.append_end("completed")
    return folder


@pytest.fixture(scope="module")
def made(prepared: Path) -> CanarySet:
    return CanarySet.load(prepared / CANARIES_FILE)


@pytest.fixture(scope="module")
def memorised(prepared: Path, base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return memorise(prepared, base_model, tmp_path_factory.mktemp("memorised"))


@pytest.fixture
def broken(memorised: Path, made: CanarySet, tmp_path: Path) -> Path:
    """A run whose model has memorised its data, and whose ledger claims a small ε."""
    return write_claim(Path(shutil.copytree(memorised, tmp_path / "broken")), made)


class TestVerdicts:
    def test_a_private_run_is_consistent(self, prepared: Path):
        """Prepare, train with the prepared recipe, audit: all that was promised is said, and nothing is shown."""
        finetune.run(load_recipe(prepared / "recipe.yaml"))
        run = prepared / "run"
        result = call("run", run, "--canaries", prepared / CANARIES_FILE)
        assert result.exit_code == 0, result.output
        words = " ".join(result.stdout.replace("│", " ").split())
        for expected in (
            *("claimed", "zero-out adjacency", "one sequence", "60 (random-tokens), 1 row", "independent fair coins"),
            *("attack: loss", f"attack: {RATIO}", "AUROC 0.", "at 95 %", "power"),
            *("Bonferroni over", "ceiling", "the bound of 60 canaries", "verdict", CONSISTENT),
        ):
            assert expected in words
        assert "found at FPR" not in words  # about 30 that are not in the data can show no such rate
        saved = json.loads((run / AUDIT_FILE).read_text(encoding="utf-8"))
        plan = PrivacyPlan.load(run / PLAN_FILE)
        assert saved["claimed_epsilon"] == pytest.approx(plan.epsilon) and saved["delta"] == plan.delta == 1e-3
        assert saved["verdict"] == CONSISTENT and saved["details"]["plan"] == plan.hash
        found = json.loads(call("exposure", run, "--canaries", prepared / CANARIES_FILE, "--json").stdout)
        assert found["median_by_rank"] < 4 and (run / PICTURE_FILE).stat().st_size > 10_000
        assert "60 canaries (random-tokens)" in (run / "privacy_report.md").read_text(encoding="utf-8")

    def test_a_model_without_privacy_nears_the_ceiling(
        self, prepared: Path, memorised: Path, recipe_file: Path, tmp_path: Path
    ):
        """For a model that has memorised its data, the bound is nearly the ceiling that was stated in advance."""
        run = shutil.copytree(memorised, tmp_path / "plain")
        result = call("run", run, "--canaries", prepared / CANARIES_FILE, "--plain", "--json")
        assert result.exit_code == 0, result.output
        values = json.loads(result.stdout)
        assert values["verdict"] == NO_CLAIM and values["claimed_epsilon"] is None and values["delta"] == 1e-3
        options = ["--config", recipe_file, "--output", tmp_path / "a", "--canaries", M, "--json"]
        assert json.loads(call("prepare", *options).stdout)["ceiling"] == pytest.approx(values["ceiling"])
        assert values["attacks"][1]["auroc"]["value"] > 0.99
        assert 0.7 * values["ceiling"] < values["epsilon_lower"] <= values["ceiling"]
        found = json.loads(call("exposure", run, "--canaries", prepared / CANARIES_FILE, "--plain", "--json").stdout)
        assert found["median_by_rank"] > 5

    def test_a_claim_that_is_not_kept_fails(self, prepared: Path, broken: Path):
        """A ledger of much noise beside a model that saw none: FAIL, exit code 1, and the report takes it up."""
        result = call("run", broken, "--canaries", prepared / CANARIES_FILE)
        assert result.exit_code == 1 and FAIL in result.stdout, result.output
        saved = json.loads((broken / AUDIT_FILE).read_text(encoding="utf-8"))
        assert saved["epsilon_lower"] > saved["claimed_epsilon"] > 0 and saved["verdict"] == FAIL
        assert "An audit of this model refutes" in (broken / "privacy_report.md").read_text(encoding="utf-8")

    def test_another_model_of_the_run(self, prepared: Path, broken: Path, base_model: Path):
        """--model scores a checkpoint, with the claim of the run; without a tokenizer of its own it takes the run's."""
        other = broken / "checkpoint-1"
        model = AutoModelForCausalLM.from_pretrained(base_model)
        torch.nn.init.normal_(model.lm_head.weight, std=0.1)
        model.save_pretrained(other)
        result = audit_run(broken, prepared / CANARIES_FILE, model=other)
        assert result.details["model"] == str(other) and result.attacks[1].auroc.value < 0.9
        assert result.claimed_epsilon is not None and [attack.name for attack in result.attacks] == [LOSS, RATIO]

    def test_users(self, recipe_file: Path, base_model: Path, tmp_path: Path):
        """A user's score is the mean over its records, and one user is one canary."""
        folder = tmp_path / "a"
        options = ["--canaries", 20, "--length", 8, "--records-per-user", 2, "--repetitions", 2]
        result = call("prepare", "--config", recipe_file, "--output", folder, *options, "--json", *USER)
        assert result.exit_code == 0 and json.loads(result.stdout)["records_per_canary"] == 4, result.output
        run = memorise(folder, base_model, tmp_path / "run", steps=80)
        privacy = {"unit": "user", "max_rows_per_unit": 5, "expected_batch_size": 5}
        write_claim(run, CanarySet.load(folder / CANARIES_FILE), **privacy)
        found = audit_run(run, folder / CANARIES_FILE)
        assert (found.unit, found.canaries.num, found.canaries.repetitions) == ("user", 20, 4)
        assert found.attacks[1].auroc.value > 0.95

    def test_without_a_reference_the_loss_alone_is_scored(self, prepared: Path, broken: Path, monkeypatch):
        """A model that began with nothing has nothing to be compared with, and the error is not divided for it."""
        monkeypatch.setattr(auditing, "_reference", lambda *_: None)
        found = audit_run(broken, prepared / CANARIES_FILE)
        assert [attack.name for attack in found.attacks] == [LOSS] and "attacks" not in found.best.correction


class TestModels:
    def test_adapters_are_scored_on_the_weights_that_they_name(self, made, base_model, tmp_path):
        """A folder of PEFT gives the model that was trained; where public training came first, on its weights."""
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base_model), LoraConfig(r=2, target_modules=["q_proj"])
        )
        torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
        model.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(base_model)
        ids = torch.tensor([[5, 6, 7]])
        loaded = load_model_of_run(tmp_path, tmp_path, made, tokenizer)
        torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
        pretrained = AutoModelForCausalLM.from_pretrained(base_model)
        torch.nn.init.normal_(pretrained.lm_head.weight)
        pretrained.save_pretrained(tmp_path / "public_pretrain")
        loaded = load_model_of_run(tmp_path, tmp_path, made, tokenizer)
        assert torch.equal(loaded.base_model.model.lm_head.weight, pretrained.lm_head.weight)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
        with pytest.raises(ConfigError, match=r"the adapters in .* do not fit"):
            load_model_of_run(tmp_path, tmp_path, made, tokenizer)

    def test_a_prefix_is_read_and_not_scored(self, made, base_model):
        """The prefix of a rare suffix has no targets; the suffix has, to the end of the text."""
        tokenizer = AutoTokenizer.from_pretrained(base_model)
        units = [Canary(records=(("the small dog", "xq zv"),)), Canary(records=(("", "xq zv"),))]
        with_prefix, without = canary_rows(units, made, tokenizer)
        size = len(tokenizer("the small dog").input_ids)
        assert with_prefix["labels"][:size] == [-100] * size
        assert with_prefix["labels"][size:] == with_prefix["input_ids"][size:]
        assert tokenizer.decode(with_prefix["labels"][size:]) == " xq zv</s>"
        assert without["labels"][1:] == without["input_ids"][1:]


class TestRefusals:
    def refuse(self, run: Path, canaries: Path, *more: Any) -> str:
        result = call("run", run, "--canaries", canaries, *more)
        assert result.exit_code == 2 and result.stdout == "", result.output
        assert not (run / AUDIT_FILE).exists()
        return result.stderr.splitlines()[-1]

    def test_a_claim_or_none(self, prepared: Path, broken: Path, memorised: Path):
        """Without a ledger there is no claim, and with one it is not left out."""
        canaries = prepared / CANARIES_FILE
        assert "holds no privacy_ledger.jsonl with its privacy_plan.json" in self.refuse(memorised, canaries)
        assert "Omit --plain" in self.refuse(broken, canaries, "--plain")

    def test_a_model_older_than_the_canaries(self, prepared: Path, broken: Path, memorised: Path, made, tmp_path):
        """By its file, and by the ledger's first line: an earlier training cannot have seen them."""
        os.utime(broken / "model.safetensors", (1.6e9, 1.6e9))
        assert "was written at 2020-09-13" in self.refuse(broken, prepared / CANARIES_FILE)
        later = dataclasses.replace(made, created_at="2125-01-01T00:00:00+00:00")
        run = write_claim(Path(shutil.copytree(memorised, tmp_path / "run")), made)
        os.utime(run / "model.safetensors", (6e9, 6e9))
        with pytest.raises(AuditError, match="before these"):
            auditing.check_run(run, later, None, False)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_units": 400}, "units is 400, not"),
            ({"unit": "user", "max_rows_per_unit": 3}, "unit is 'user', not 'sequence'"),
            ({"seed": 3}, "used a fixed seed"),
        ],
    )
    def test_another_plan(self, prepared: Path, memorised: Path, made, tmp_path, changes, message):
        """An audit of another plan than the one that was prepared."""
        run = write_claim(Path(shutil.copytree(memorised, tmp_path / "run")), made, **changes)
        assert message in self.refuse(run, prepared / CANARIES_FILE)

    def test_a_ledger_of_another_plan(self, prepared: Path, broken: Path, made, tmp_path):
        """Plan and ledger of two runs."""
        (tmp_path / "other").mkdir()
        shutil.copy(write_claim(tmp_path / "other", made, noise_multiplier=9.0) / PLAN_FILE, broken / PLAN_FILE)
        assert "charges steps of a different plan" in self.refuse(broken, prepared / CANARIES_FILE)

    def test_other_data(self, prepared: Path, broken: Path):
        """The recipe beside the run names another data file, or reads it otherwise."""
        text = (prepared / "recipe.yaml").read_text(encoding="utf-8")
        (broken / "recipe.yaml").write_text(text.replace("records-", "else-"), encoding="utf-8")
        assert "belongs to a different run" in self.refuse(broken, prepared / CANARIES_FILE)
        (broken / "recipe.yaml").write_text(text.replace("max_length: 32", "max_length: 9"), encoding="utf-8")
        assert "data.max_length is 9, not 32" in self.refuse(broken, prepared / CANARIES_FILE)

    def test_swapped_labels(self, prepared: Path, broken: Path, tmp_path):
        """Coins that were changed after the data had been written."""
        raw = json.loads((prepared / CANARIES_FILE).read_text(encoding="utf-8"))
        for item in raw["canaries"]:
            item["included"] = not item["included"]
        (tmp_path / CANARIES_FILE).write_text(json.dumps(raw), encoding="utf-8")
        assert "was edited: its texts, order or coins" in self.refuse(broken, tmp_path / CANARIES_FILE)
        moved = tmp_path / "moved" / CANARIES_FILE
        moved.parent.mkdir()
        shutil.copy(prepared / CANARIES_FILE, moved)
        assert "is part of the hash" in self.refuse(broken, moved)

    def test_the_reference(self, prepared: Path, broken: Path):
        """One that is not there, and one that is the model itself."""
        canaries = prepared / CANARIES_FILE
        assert re.search("(can't|cannot) be loaded", self.refuse(broken, canaries, "--reference", prepared))
        assert "they are the same model" in self.refuse(broken, canaries, "--reference", broken)

    def test_no_model_no_tokenizer_another_tokenizer(self, prepared: Path, broken: Path, made, base_model, tmp_path):
        """Without them canaries cannot be scored."""
        (broken / "tokenizer_config.json").unlink()
        assert "holds no tokenizer" in self.refuse(broken, prepared / CANARIES_FILE)
        (broken / "model.safetensors").unlink()
        assert "holds no model" in self.refuse(broken, prepared / CANARIES_FILE)
        long = dataclasses.replace(made, recipe={**made.recipe, "data": {**made.recipe["data"], "max_length": 4}})
        with pytest.raises(AuditError, match="canaries do"):
            canary_rows(made.canaries, long, AutoTokenizer.from_pretrained(base_model))


@kills("copies of private records stay", "dpllm/data/private_tempdir.py", "atexit.register(remove_private_folder)", "")
def test_the_data_are_not_left_in_a_cache(prepared: Path, broken: Path, tmp_path: Path):
    """Copies of private records go with the process of the audit; `datasets` leaves empty locks."""
    command = [sys.executable, "-m", "dpllm", "audit", "run", str(broken), "--canaries", str(prepared / CANARIES_FILE)]
    cache = tmp_path / "cache"
    cache.mkdir()
    audit = children.run(command, env={**os.environ, "HF_DATASETS_CACHE": str(cache)}, check=False)
    assert audit.returncode == 1 and FAIL in audit.stdout  # it was made, and refutes this run
    assert [one for one in cache.rglob("*") if one.is_file() and one.stat().st_size] == []
