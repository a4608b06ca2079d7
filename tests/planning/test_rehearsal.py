"""Tests of dpllm.planning.rehearsal: what is the plan's, and what never enters."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from dpllm.config import Recipe, load_recipe
from dpllm.data.records import DataError
from dpllm.data.rows import load_records
from dpllm.data.units import UnitIndex
from dpllm.planning import rehearsal
from dpllm.planning.rehearsal import (
    Rehearsal,
    Shortened,
    load_material,
    public_section,
    refuse_private_records,
    rehearse,
    shorten,
)
from dpllm.privacy.budget import read_budget
from dpllm.training.suggested_run import Suggested, suggested_run
from dpllm.training.trainer import DPTrainer
from tests.cli.test_cli import run as command
from tests.mutations import kills
from tests.small_model import WORDS

RECIPE = """
model: {{name: {model}}}
data: {{path: {folder}/private.jsonl, max_length: 32}}
privacy: {{epsilon: 8, clip_norm: 1, expected_batch_size: 20, delta: 1.0e-4, dataset: words,
  max_batch_size: 60}}
train: {{output_dir: {folder}/out, max_steps: 40, per_device_train_batch_size: 32, use_cpu: true,
  dataloader_pin_memory: false}}
"""


def texts(name: str, count: int) -> str:
    lines = [{"text": " ".join(WORDS[(n + k) % len(WORDS)] for k in range(6)) + f" {name} {n}"} for n in range(count)]
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def path(tmp_path: Path, base_model: Path) -> Path:
    (tmp_path / "public.jsonl").write_text(texts("public", 120))
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(model=base_model, folder=tmp_path))
    return file


def suggested(path: Path, *overrides: str) -> Suggested:
    return suggested_run(load_recipe(path, overrides), UnitIndex.one_row_per_unit(2000))


FIXED = ["privacy.epsilon=null", "privacy.noise_multiplier=1.5"]
BANDS = [*FIXED, "privacy.noise={kind: banded, bands: 4}"]


# ------------------------------------------------------------------- numbers


@pytest.mark.parametrize("noise", [FIXED, BANDS])
def test_a_shorter_run_keeps_the_noise_of_a_step_and_of_the_released_weights(path, noise):
    """σ/b is the plan's, and rate times noise of the released weights is equal; reference: the dense matrices."""
    run = suggested(path, *noise, "train.max_steps=160")
    short = shorten(run, num_rows=1000)
    bands = 4 if noise is BANDS else 1
    assert short.num_steps == 40 and short.num_steps % bands == 0
    assert (short.batch, short.noise_multiplier) == (20, 1.5)
    assert short.average == {"kind": "ema", "decay": 0.8}  # the same share of the steps

    def released(steps: int, decay: float) -> float:
        """The noise of the released weights over that of a step, by which AdamW divides; by matrices."""
        rates = np.minimum(1.0, np.arange(steps) / math.ceil(0.1 * steps))
        share = decay ** np.arange(steps)[::-1] / (decay ** np.arange(steps)).sum()
        moment = np.array([[0.1 * 0.9 ** (t - s) if s <= t else 0.0 for s in range(steps)] for t in range(steps)])
        moment /= 1 - 0.9 ** np.arange(1, steps + 1)[:, None]  # AdamW's bias correction
        column = np.zeros(steps)
        column[: bands if bands > 1 else 1] = run.plan.mechanism.noise.column(steps)[:bands] if bands > 1 else 1.0
        strategy = np.array([[column[t - s] if s <= t else 0.0 for s in range(steps)] for t in range(steps)])
        updates = np.tril(np.ones((steps, steps))) @ np.diag(rates) @ moment
        inverse = np.linalg.inv(strategy)
        return float(np.linalg.norm(share @ updates @ inverse) / math.sqrt((inverse**2).sum() / steps))

    assert short.rate_factor == pytest.approx(released(160, 0.95) / released(40, 0.8), rel=1e-6)
    assert short.rate_factor > 1.2
    assert "40 of 160 steps" in short.words()[0] and len(short.words()) == 2


@kills(
    "a rehearsal takes a smaller batch without less noise",
    "dpllm/planning/rehearsal.py",
    "noise_multiplier=plan.noise_multiplier * batch / plan.expected_batch_size,",
    "noise_multiplier=plan.noise_multiplier,",
)
def test_a_small_public_text_has_smaller_batches_with_the_same_noise_of_the_mean(path):
    """Batch and σ shrink by one factor, and the report of it says so."""
    run = suggested(path, *BANDS)
    short = shorten(run, num_rows=50)
    assert short.batch == 12 and short.noise_multiplier / short.batch == pytest.approx(1.5 / 20)
    assert "too few rows" in short.words()[-1]
    with pytest.raises(DataError, match="least 32"):
        shorten(run, num_rows=31)


def test_steps_are_at_least_a_cycle_and_at_most_those_of_the_run(path):
    """All steps: then the rate is that of the run."""
    run = suggested(path, *BANDS)
    whole = shorten(run, 1000, 40)
    assert whole.rate_factor == pytest.approx(1) and whole.words() == ["The rehearsal takes all steps of the run."]
    for steps in (3, 41):
        with pytest.raises(ValueError, match="between 4"):
            shorten(run, 1000, steps)


def grid_of(monkeypatch, losses: dict[float, float]) -> tuple[list[float], Rehearsal]:
    """Rehearse with given losses in place of trainings."""
    taken: list[float] = []

    def loss_of(run, material, short, rate, folder, moved):
        taken.append(rate)
        return losses[rate]

    monkeypatch.setattr(rehearsal, "_loss_of", loss_of)
    monkeypatch.setattr(rehearsal, "measure", lambda *arguments: type("M", (), {"loss": 5.0}))
    material = type("Material", (), {"base": 0, "held_out": [0], "collator": 0, "rows": [0], "source": "x"})
    short = Shortened(4, 4, 1.0, None, 1.0, 4, 4)
    made = rehearse(None, material, short, 0.01, Path("unused"), lambda rate: lambda step: None)  # type: ignore[arg-type]
    return taken, made


def test_a_fourth_rate_lies_beyond_the_better_edge(monkeypatch):
    """Three rates if the middle one is best; a best rate at the edge of four is said to be one."""
    taken, made = grid_of(monkeypatch, {0.005: 3.0, 0.01: 2.0, 0.02: 4.0})
    assert taken == [0.005, 0.01, 0.02] and made.best.rate == 0.01 and made.edge is None and len(made.notes()) == 1
    taken, made = grid_of(monkeypatch, {0.005: 3.0, 0.01: 2.0, 0.02: 1.5, 0.04: 1.6})
    assert taken[-1] == 0.04 and made.best.rate == 0.02 and made.edge is None
    taken, made = grid_of(monkeypatch, {0.005: 6.0, 0.01: 7.0, 0.02: math.inf, 0.0025: 5.5})
    assert made.best.rate == 0.0025 and made.edge == "smallest"
    assert "--around 0.0013" in made.notes()[0] and "No rate improved" in made.notes()[1]
    assert [trial.rate for trial in made.trials] == [0.0025, 0.005, 0.01, 0.02]


# -------------------------------------------------------------- what may enter


@kills(
    "a rehearsal takes the private file for public text",
    "dpllm/planning/rehearsal.py",
    "    if same is not None:",
    "    if False:",
)
def test_public_text_that_is_the_private_data_is_refused_by_name(path, tmp_path):
    """By any name of the file, without opening it; also the private held-out rows."""
    (tmp_path / "private.jsonl").write_text("{not JSON")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "private.jsonl")
    recipe = load_recipe(path)
    for name in (tmp_path / "private.jsonl", tmp_path / "link.jsonl", tmp_path / "*.jsonl", tmp_path):
        with pytest.raises(DataError, match="is a source of the private records"):
            public_section(recipe, str(name))
    held_out = load_recipe(path, [f"data.eval={tmp_path}/public.jsonl"])
    with pytest.raises(DataError, match="is a source of the private records"):
        public_section(held_out, f"{tmp_path}/public.jsonl")
    public = load_recipe(path, [f"data.eval={tmp_path}/public.jsonl", "data.eval.public=true"])
    assert public_section(public, f"{tmp_path}/public.jsonl").eval.path is None
    (tmp_path / "private.jsonl").unlink()  # also where it is absent
    with pytest.raises(DataError, match="is a source of the private records"):
        public_section(recipe, f"{tmp_path}/private.jsonl")
    with pytest.raises(DataError, match="--public"):
        public_section(recipe, None)


def test_public_data_sets_that_are_the_private_one_are_refused(path):
    """A corpus, and the same split of a data set of the Hub; another split may be public."""
    corpus = load_recipe(path, ["data.path=builtin:sotu"])
    with pytest.raises(DataError, match="source of the private records"):
        public_section(corpus, "builtin:sotu")
    stage = "public_pretrain={data: {path: a/b, max_length: 9, split: 'train[:5%]'}}"
    with pytest.raises(DataError, match="source of the private records"):
        public_section(load_recipe(path, ["data.path=a/b", stage]), None)
    other = load_recipe(path, ["data.path=a/b", stage, "public_pretrain.data.split=test"])
    assert public_section(other, None).split == "test" and public_section(other, None).max_length == 32


def test_public_text_with_private_records_is_refused_without_their_number(path, tmp_path):
    """Copies in another file are found when the private records are read; the declared bound of a stage holds."""
    (tmp_path / "private.jsonl").write_text(texts("private", 50))
    (tmp_path / "mixed.jsonl").write_text(texts("public", 30) + "".join(texts("private", 50).splitlines(True)[3:10]))
    recipe = load_recipe(path)
    private = load_records(recipe.data)
    section = public_section(recipe, f"{tmp_path}/mixed.jsonl")
    with pytest.raises(DataError, match="contains private") as error:
        refuse_private_records(recipe, section, [private])
    assert "7" not in str(error.value).replace(str(tmp_path), "")
    refuse_private_records(recipe, public_section(recipe, f"{tmp_path}/public.jsonl"), [private])
    stage = f"public_pretrain={{data: {{path: {tmp_path}/mixed.jsonl, max_length: 9}}, max_shared_records: 7}}"
    staged = load_recipe(path, [stage])
    refuse_private_records(staged, public_section(staged, None), [private])
    with pytest.raises(DataError, match="6 are declared"):
        fewer = load_recipe(path, [stage, "public_pretrain.max_shared_records=6"])
        refuse_private_records(fewer, public_section(fewer, None), [private])


def test_the_text_of_the_public_stage_is_compared_beside_other_public_text(path, tmp_path):
    """The stage trains on its whole text before the rehearsal: private records in it would reach the suggestion."""
    (tmp_path / "private.jsonl").write_text(texts("private", 50))
    (tmp_path / "copy.jsonl").write_text(texts("private", 50))
    other = f"{tmp_path}/public.jsonl"

    def staged(name: str, shared: int = 0) -> Recipe:
        stage = f"{{data: {{path: {tmp_path}/{name}, max_length: 9}}, max_shared_records: {shared}}}"
        return load_recipe(path, [f"public_pretrain={stage}"])

    with pytest.raises(DataError, match="is a source of the private records"):
        public_section(staged("private.jsonl"), other)
    recipe = staged("copy.jsonl")
    private = load_records(recipe.data)
    with pytest.raises(DataError, match=r"public_pretrain\.data\.path="):
        refuse_private_records(recipe, public_section(recipe, other), [private])
    declared = staged("copy.jsonl", 50)
    refuse_private_records(declared, public_section(declared, other), [private])


# ------------------------------------------------------------------- trainings


def test_a_training_is_one_of_the_product_with_the_plans_mechanism(path, tmp_path, monkeypatch):
    """DPTrainer gets σ/b, bands, clipping and the public rows, without data set and budget; nothing else is trained.

    Nor does it get an option of evaluations, which a rehearsal does not make: on private rows it would be refused.
    """
    budget = tmp_path / "words.budget.json"
    options = ["--dataset", "words", "--epsilon", "9", "--delta", "1e-4", "--num-units", "2000"]
    command(["budget", "create", str(budget), *options])
    two = [*FIXED, "privacy.noise={kind: banded, bands: 2}"]
    held_out = f"data.eval={{path: {tmp_path}/held_out.jsonl, public: true}}"
    best = ["train.save_strategy=best", "train.metric_for_best_model=loss", held_out]
    run = suggested(path, *two, *best, f"privacy.budget_file={budget}", "privacy.clipping=automatic")
    section = public_section(run.recipe, f"{tmp_path}/public.jsonl")
    material = load_material(run.recipe, section, tmp_path / "start", [])
    made: list[DPTrainer] = []
    init = DPTrainer.__init__

    def noted(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(DPTrainer, "__init__", noted)
    steps: list[int] = []
    short = shorten(run, len(material.rows), 2)
    loss = rehearsal._loss_of(run, material, short, 0.01, tmp_path / "rate", steps.append)
    (trainer,) = made
    plan = trainer.plan
    assert steps == [1, 2] and 0 < loss < 7
    assert plan.noise_multiplier / plan.expected_batch_size == pytest.approx(1.5 / 20)
    assert (plan.clip_norm, plan.clipping, plan.noise) == (0.1, run.plan.clipping, run.plan.noise)
    assert plan.num_units == len(material.rows) == 108 and plan.dataset is None
    assert trainer.privacy.budget_file is None and read_budget(budget).entries == ()
    assert trainer.args.learning_rate == 0.01 and trainer.args.max_steps == 2
    assert not (tmp_path / "out").exists() and not (tmp_path / "private.jsonl").exists()


@pytest.mark.deep
@pytest.mark.parametrize("staged", [False, True])
def test_a_rehearsal_end_to_end_never_opens_the_private_file(path, tmp_path, staged):
    """With a public stage, one half of its text trains the start and the other is rehearsed on."""
    (tmp_path / "private.jsonl").write_text(texts("private", 50))
    (tmp_path / "public.jsonl").write_text(texts("public", 300))
    stage = f"public_pretrain={{data: {{path: {tmp_path}/public.jsonl, max_length: 32}}}}"
    train = "public_pretrain.train={max_steps: 2, use_cpu: true, dataloader_pin_memory: false}"
    source = [stage, train, "--rehearse"] if staged else ["--public", f"{tmp_path}/public.jsonl"]
    opened: list[str] = []
    listening = True

    def listen(event: str, arguments: tuple[object, ...]) -> None:
        if listening and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(listen)  # it cannot be removed again
    try:
        text = command(
            ["plan", "suggest", str(path), "--num-units", "2000", "--rehearsal-steps", "8", "--json", *source, *BANDS]
        )
    finally:
        listening = False
    assert any("public.jsonl" in name for name in opened) and not any("private.jsonl" in name for name in opened)
    values = json.loads(text)
    trials = values["rehearsal"]["trials"]
    assert len(trials) in (3, 4) and all(math.isfinite(trial["loss"]) for trial in trials)
    best = min(trials, key=lambda trial: trial["loss"])
    assert values["rehearsal"]["best_rate"] == best["rate"]
    assert f"train.learning_rate={best['rate']}" in values["overrides"]
    assert values["privacy"]["private_records_read"] == "no" and values["privacy"]["epsilon_spent"] == 0
    assert "not checked" in values["public_text"]
    assert values["rehearsal"]["num_rows"] == (135 if staged else 270)
