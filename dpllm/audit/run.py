"""The audit of a model that was trained on data with canaries.

The canaries of `dpllm.audit.prepare` are scored under the released model, by every score that only reads it, and
`dpllm.audit.result.judge` turns the scores into a verdict. First the audit checks that coins, data, plan, ledger and
model belong together, since a verdict about a different run would be worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dpllm.audit.bounds import CONFIDENCE, AuditError
from dpllm.audit.canaries import Canary, CanarySet, check_data, record_of
from dpllm.audit.result import AUDIT_FILE, PICTURE_FILE, AuditResult, judge, plot_audit
from dpllm.audit.scores import loss_score, ratio_score, token_scores
from dpllm.config import PRETRAINED_FOLDER, RECIPE_FILE, ConfigError, ModelConfig, load_recipe
from dpllm.config.formats.record_format import Text
from dpllm.data.labels import IGNORE
from dpllm.data.rows import RowCollator, tokenization_info, tokenize_records
from dpllm.models.load import load_base_model
from dpllm.privacy.accounting import History
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.stated import claimed_history
from dpllm.report.model_card import add_audit

LOSS, RATIO = "loss", "ratio to the reference"

_ADAPTER = "adapter_config.json"
_WEIGHTS = ("*model*.safetensors", "*model*.bin")


@dataclass(frozen=True, kw_only=True)
class ReleasedModel:
    """The model to audit, and its claim."""

    run_folder: Path
    """Folder of the run, with plan and ledger."""
    model_folder: Path
    """Folder of the released model: the same, or a checkpoint of the run."""
    history: History | None
    """The steps charged, which are the claim. None: nothing is claimed."""
    delta: float
    """δ of the claim; if there is none, δ of the recipe."""
    plan_hash: str | None
    """Hash of the plan; None: nothing is claimed."""


@dataclass(frozen=True, kw_only=True)
class ScoredCanaries:
    """The canaries of an audit under a released model."""

    made: CanarySet
    released: ReleasedModel
    scores: dict[str, NDArray[np.float64]]
    """Score -> (n,) values: a canary's mean over its records; first those with coins, then the candidates."""

    @property
    def main(self) -> NDArray[np.float64]:
        """The most informative score: the ratio to the reference, if there is one."""
        return self.scores.get(RATIO, self.scores[LOSS])


def audit_run(
    run_folder: str | Path,
    canaries: str | Path,
    model: str | Path | None = None,
    reference: str | None = None,
    plain: bool = False,
    confidence: float = CONFIDENCE,
) -> AuditResult:
    """Audit the model of a run, and write ``audit.json`` and ``audit.png`` into its folder.

    An audit of the model in the run's folder is added to the run's privacy report.

    Scores of a canary are means over its records: the mean log-probability of its tokens, and, if there is a reference,
    the difference from the reference's. The prefix of a rare suffix is read but not scored. The error is divided over
    all scores.

    Guarantee: a sound run fails with probability at most 1 - confidence (`judge`). Each additional model that is
    audited with the same coins, such as every checkpoint of the run, is an additional chance to fail.

    Args:
        run_folder: folder to which the training wrote plan, ledger and model.
        canaries: ``canaries.json`` of the audit, with the data file next to it.
        model: folder of a different model of the run, such as a checkpoint. None: the one in the run's folder.
        reference: folder or Hub id of a model that never saw the data. None: the run's starting model, if it is known.
        plain: the model was trained without privacy, and claims nothing.
        confidence: confidence of all bounds together.

    Raises:
        AuditError: coins, data, plan, ledger and model do not belong together.
        ValueError: one of the files cannot be read, or a model cannot be loaded.
    """
    run_folder = Path(run_folder)
    scored = scored_canaries(run_folder, canaries, model, reference, plain)
    made, released, included = scored.made, scored.released, np.array(scored.made.included)
    details: dict[str, Any] = {"model": str(released.model_folder)}
    if released.plan_hash is not None:
        details["plan"] = released.plan_hash
    judged = {name: values[: len(included)] for name, values in scored.scores.items()}
    result = judge(
        judged,
        included,
        delta=released.delta,
        history=released.history,
        canary_kind=made.kind,
        unit=made.unit,
        repetitions=len(made.canaries[0].records) * made.repetitions,
        confidence=confidence,
        details=details,
    )
    plot_audit(result, judged, included, run_folder / PICTURE_FILE, released.history)
    result.save(run_folder)
    if not plain and released.model_folder == run_folder:
        add_audit(run_folder, AUDIT_FILE, result.summary())
    return result


def scored_canaries(
    run_folder: str | Path,
    canaries: str | Path,
    model: str | Path | None = None,
    reference: str | None = None,
    plain: bool = False,
) -> ScoredCanaries:
    """Score the canaries of an audit under the model of a run, without writing anything.

    Args and errors are those of `audit_run`.
    """
    run_folder, canaries = Path(run_folder), Path(canaries)
    made = CanarySet.load(canaries)
    released = check_run(run_folder, made, Path(model) if model is not None else None, plain)
    check_data(made, canaries.parent)
    tokenizer = _tokenizer(released)
    rows = canary_rows([*made.canaries, *made.candidates], made, tokenizer)
    own = load_model_of_run(released.model_folder, run_folder, made, tokenizer)
    base = _reference(reference, run_folder, made, tokenizer)
    found = score_canaries(own, base, rows, int(tokenizer.pad_token_id))
    per_unit = len(made.canaries[0].records)
    by_unit = {name: values.reshape(-1, per_unit).mean(axis=1) for name, values in found.items()}
    return ScoredCanaries(made=made, released=released, scores=by_unit)


def check_run(run_folder: Path, made: CanarySet, model: Path | None, plain: bool) -> ReleasedModel:
    """Check that a run trained on the data of these canaries, after they were created.

    Raises:
        AuditError: the ledger is missing, or unexpected; or the run has a different plan or different data, or is older
            than the canaries.
        ValueError: plan or ledger cannot be read.
    """
    has_ledger = (run_folder / LEDGER_FILE).is_file() and (run_folder / PLAN_FILE).is_file()
    if plain and has_ledger:
        raise AuditError(f"{run_folder} holds the ledger of a private run, whose claim must be audited. Omit --plain")
    if not plain and not has_ledger:
        raise AuditError(
            f"{run_folder} holds no {LEDGER_FILE} with its {PLAN_FILE}, so the claim is unknown. Pass the folder of "
            "the run, or --plain for a model trained without privacy"
        )
    folder = model if model is not None else run_folder
    _check_age(folder, made)
    _check_recipe(run_folder / RECIPE_FILE, made)
    if plain:
        return ReleasedModel(run_folder=run_folder, model_folder=folder, history=None, delta=made.delta, plan_hash=None)
    plan, contents = PrivacyPlan.load(run_folder / PLAN_FILE), read_ledger(run_folder / LEDGER_FILE)
    if any(run["plan_hash"] != plan.hash for run in contents.runs) or any(s != plan.event for s, _ in contents.history):
        raise AuditError(
            f"{contents.path} charges steps of a different plan than the one in its folder. Restore both files"
        )
    if contents.seeded:
        raise AuditError(
            f"{run_folder} used a fixed seed, so nothing in it is private and there is no claim to audit. Train "
            "without privacy.seed"
        )
    privacy = made.recipe["privacy"]
    pairs = [
        ("units", plan.num_units, made.num_units),
        ("unit", plan.unit, made.unit),
        ("unit column", plan.unit_column, made.unit_column),
        ("rows of a user", plan.max_rows_per_unit, privacy["max_rows_per_unit"]),
    ]
    _require_same(pairs, f"{run_folder / PLAN_FILE} is not the plan of the prepared run")
    started = datetime.fromisoformat(contents.runs[0]["started_at"])
    if started < datetime.fromisoformat(made.created_at):
        raise AuditError(
            f"the run in {run_folder} began at {started:%F %T} UTC, before these canaries were made "
            f"({made.created_at}), so it cannot have used them. Train with the prepared recipe, and audit that run"
        )
    return ReleasedModel(
        run_folder=run_folder,
        model_folder=folder,
        history=claimed_history(plan, contents),
        delta=plan.delta,
        plan_hash=plan.hash,
    )


def _check_age(folder: Path, made: CanarySet) -> None:
    """Raise an error unless the folder's weights were written after the canaries were created."""
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    if not files:
        raise AuditError(f"{folder} holds no model (no {' or '.join(_WEIGHTS)}). Pass the folder of the released model")
    written = datetime.fromtimestamp(int(min(file.stat().st_mtime for file in files)), UTC)
    if written < datetime.fromisoformat(made.created_at):
        raise AuditError(
            f"the model in {folder} was written at {written:%F %T} UTC, before these canaries were made "
            f"({made.created_at}), so it cannot have used them. Audit the model that was trained on the prepared data"
        )


def _check_recipe(path: Path, made: CanarySet) -> None:
    """Raise an error unless the recipe next to the run, if there is one, names the prepared data."""
    if not path.is_file():
        return
    data = load_recipe(path).data
    if Path(data.path).name != made.data_name:
        raise AuditError(
            f"{path} trained on {data.path}, but these canaries belong to {made.data_name}: the audit belongs to a "
            "different run, or the coins were changed afterwards. Pass the canaries.json of the prepared run"
        )
    names = ("format", "columns", "max_length", "long_records", "limit")
    pairs = [(f"data.{name}", getattr(data, name), getattr(made.data, name)) for name in names]
    pairs.append(("data.eval.share", data.eval.share, made.data.eval.share))
    _require_same(pairs, f"{path} used different data settings from the prepared recipe")


def _require_same(pairs: Sequence[tuple[str, Any, Any]], what: str) -> None:
    differing = [f"{name} is {there!r}, not {here!r}" for name, there, here in pairs if there != here]
    if differing:
        raise AuditError(f"{what}: {'; '.join(differing)}. Train with the prepared recipe, and audit that run")


def canary_rows(units: Sequence[Canary], made: CanarySet, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    """Return the rows of all canary records, made as in the training; a prefix has no targets.

    Raises:
        AuditError: a canary does not fit into one row.
    """
    pairs = [pair for unit in units for pair in unit.records]
    records = datasets.Dataset.from_list([record_of(*pair, made.data) for pair in pairs])
    rows = tokenize_records(records, tokenizer, made.data)
    info = tokenization_info(rows)
    if info["records_truncated"] + info["records_split"]:
        raise AuditError(
            "canaries do not fit into rows under this model's tokenizer, so they were made for a different one. Audit "
            "the model that was trained on the prepared data"
        )
    if made.data.form.holds is not Text or not any(prefix for prefix, _ in pairs):
        return rows
    heads = tokenizer([prefix for prefix, _ in pairs], verbose=False)["input_ids"]
    labels = []
    for ids, head in zip(rows["input_ids"], heads, strict=True):
        shared = next((at for at, pair in enumerate(zip(ids, head, strict=False)) if pair[0] != pair[1]), len(head))
        labels.append([IGNORE] * shared + list(ids[shared:]))
    return rows.remove_columns("labels").add_column("labels", labels)


def score_canaries(
    model: Any, reference: Any | None, rows: datasets.Dataset, pad_token_id: int
) -> dict[str, NDArray[np.float64]]:
    """Return score -> (R,) values, one per row: `LOSS`, and `RATIO` if there is a reference.

    Raises:
        AuditError: model and reference are the same.
    """
    collator = RowCollator(pad_token_id=pad_token_id)
    own = token_scores(_on_device(model), rows, collator)
    scores = {LOSS: loss_score(own)}
    if reference is not None:
        scores[RATIO] = ratio_score(own, token_scores(_on_device(reference), rows, collator))
        if not scores[RATIO].any():
            raise AuditError(
                "the model and the reference assign every canary the same probability, so they are the same model. "
                "Pass the trained model, or a different --reference"
            )
    return scores


def _on_device(model: Any) -> Any:
    return model.to(torch.accelerator.current_accelerator() or "cpu")


def load_model_of_run(folder: Path, run_folder: Path, made: CanarySet, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load a released model: transformers weights, or PEFT adapters on the weights that they name.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if not (folder / _ADAPTER).is_file():
        return load_base_model(ModelConfig(name=str(folder), dtype="auto"), tokenizer)
    start = run_folder / PRETRAINED_FOLDER
    name = str(start) if start.is_dir() else PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    tying = made.recipe["model"]["tie_word_embeddings"]
    base = load_base_model(ModelConfig(name=name, dtype="auto", tie_word_embeddings=tying), tokenizer)
    try:
        return PeftModel.from_pretrained(base, str(folder))
    except (RuntimeError, ValueError, OSError) as error:
        words = " ".join(str(error).split())[:300]
        raise ConfigError(f"the adapters in {folder} do not fit {name}: {words}") from error


def _reference(given: str | None, run_folder: Path, made: CanarySet, tokenizer: PreTrainedTokenizerBase) -> Any | None:
    """Return the given reference, or the run's starting model; None if the run started with random weights."""
    start = run_folder / PRETRAINED_FOLDER
    name = given or (str(start) if start.is_dir() else made.recipe["model"]["name"])
    return load_base_model(ModelConfig(name=name, dtype="auto"), tokenizer) if name else None


def _tokenizer(released: ReleasedModel) -> PreTrainedTokenizerBase:
    for folder in (released.model_folder, released.run_folder):
        if (folder / "tokenizer_config.json").is_file():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            if tokenizer.pad_token_id is None:
                tokenizer.pad_token = tokenizer.eos_token
            return tokenizer
    raise AuditError(
        f"{released.model_folder} holds no tokenizer, so the canaries cannot be tokenized. Save the tokenizer with the "
        "model (tokenizer.save_pretrained)"
    )
