"""Merge the LoRA adapter of a finished run into a separate model, with its own files of the guarantee.

The sum depends only on the public starting weights and on the trained adapter, so the guarantee of the adapter covers
it, and no ε is spent.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import AutoTokenizer

from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE, TASKS, ConfigError, ModelConfig, load_recipe
from dpllm.models.load import load_base_model
from dpllm.models.merging import MERGED_FOLDER, merged
from dpllm.models.model_argument import name_classes
from dpllm.models.start_weights import refuse_other_start
from dpllm.models.starting_point import refuse_private_start
from dpllm.models.writing import also_end_with, saved_ends
from dpllm.privacy import checkpoints
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.run_folder import is_finished, released_files
from dpllm.report.model_card import add_released
from dpllm.report.statement import notes_in, write_report
from dpllm.report.verify import verify
from dpllm.training.finetune import start_in
from dpllm.training.trainer_outputs import StartingModel

ADAPTER_FILE = "adapter_config.json"


def merge_run(run: str | Path, output: str | Path | None = None, num_labels: int | None = None) -> Path:
    """Write the model of a run with its adapter merged into its weights, not quantised; the run keeps its adapter.

    The run's ledger gets a line that names the new files by hash, and its report and card are written again.

    Args:
        run: folder of a completed run of a recipe.
        output: the new folder. None: "merged", inside the run's folder.
        num_labels: number of classes, for a classifier whose recipe takes it from the data.

    Returns:
        The new folder.

    Raises:
        ConfigError: the folder does not hold a completed run of a recipe with an adapter, its files do not match
            its ledger, its starting weights are missing or different, or ``output`` is not empty.
    """
    run = Path(run)
    folder = run / MERGED_FOLDER if output is None else Path(output)
    model, class_names = _checked(run, folder)
    tokenizer = AutoTokenizer.from_pretrained(run, trust_remote_code=model.trust_remote_code)
    if TASKS[model.task].needs_labels and model.num_labels is None and model.task != "regression":
        known = num_labels if class_names is None else len(class_names)
        if known is None:
            raise ConfigError(
                f"the recipe of {run} takes the number of classes from its data: set it (dpllm merge --num-labels)"
            )
        model = dataclasses.replace(model, num_labels=known)
    base: Any = load_base_model(model, tokenizer)
    if class_names is not None:
        name_classes(base, class_names, own=True)
    whole = merged(PeftModel.from_pretrained(base, str(run)))
    also_end_with(whole, saved_ends(run))
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_guarantee(run, folder, whole, model)
    return folder


def _checked(run: Path, folder: Path) -> tuple[ModelConfig, list[str] | None]:
    """Return the starting model of a run that can be merged into a folder, and the names of its classes."""
    for name, what in ((LEDGER_FILE, "private run"), (RECIPE_FILE, "run of a recipe"), (ADAPTER_FILE, "run with LoRA")):
        if not (run / name).is_file():
            raise ConfigError(
                f"{run} holds no {name}, so it is not the folder of a {what}. A program with DPTrainer merges with "
                "merge_adapter=True"
            )
    if not is_finished(run / ".") and read_ledger(run / LEDGER_FILE).end is None:
        raise ConfigError(f"the run in {run} has not ended: continue it with train.resume_from_checkpoint=true first")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not overwritten: name another folder, or remove it")
    failed = [check for check in verify(run).checks if not check.ok]
    if failed:
        raise ConfigError(
            f"{run} does not pass `dpllm verify`: {failed[0].what}: {failed[0].detail}. Restore the files of the run"
        )
    recipe = load_recipe(run / RECIPE_FILE)
    if recipe.public_pretrain is None:
        if recipe.model.name is None:
            raise ConfigError(
                f"the adapter in {run} was trained on random weights (model.config), which were not saved, so it "
                "cannot be merged: train with dpllm.DPTrainer(merge_adapter=True)"
            )
        _refuse_another_base(run, recipe.model)
        return recipe.model, recipe.data.class_names
    if not (run / PRETRAINED_FOLDER / "config.json").is_file():
        raise ConfigError(f"{run} lacks {PRETRAINED_FOLDER}/, the weights to which the adapter belongs: restore it")
    return start_in(run / PRETRAINED_FOLDER, recipe.model), recipe.data.class_names


def _refuse_another_base(run: Path, model: ModelConfig) -> None:
    """Check that an adapter is merged into the weights on which it was trained, as far as can be checked.

    Raises:
        ConfigError: the run's recipe names different weights, or they are now those of a private run, or their files
            have changed since the run began.
    """
    trained = json.loads((run / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if trained and _place(trained) != _place(str(model.name)):
        raise ConfigError(
            f"the adapter in {run} was trained on {trained}, but model.name in its {RECIPE_FILE} is {model.name}, "
            f"and the guarantee does not cover other weights. Restore {RECIPE_FILE}"
        )
    refuse_private_start(model.name, model.start_is_independent)
    refuse_other_start(run / LEDGER_FILE, str(model.name))


def _place(name: str) -> Path:
    """Return the folder of a model, however it is written; a name on the Hub is returned unchanged."""
    path = Path(name).expanduser()
    return path.resolve() if path.is_dir() else path


def _write_guarantee(run: Path, folder: Path, whole: Any, start: ModelConfig) -> None:
    new = checkpoints.seal(folder, [path.name for path in sorted(folder.iterdir()) if path.is_file()])
    releases = {folder.resolve().name: new}
    if folder.resolve().parent == run.resolve():  # the run's own line names all files below it
        named = released_files(read_ledger(run / LEDGER_FILE), run) or {}
        releases[run.resolve().name] = {**named, **{f"{folder.name}/{name}": entry for name, entry in new.items()}}
    add_released(run, releases)
    plan = PrivacyPlan.load(run / PLAN_FILE)
    plan.save(folder / PLAN_FILE)
    (folder / LEDGER_FILE).write_bytes((run / LEDGER_FILE).read_bytes())
    report = write_report(folder, plan, read_ledger(folder / LEDGER_FILE), notes_in(run))
    StartingModel(start.name, start.task).write_card(folder, report, whole)
