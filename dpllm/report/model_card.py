"""Write the model card: the README.md of a released model, in the Hub's format.

The card takes every sentence and number of the guarantee from the privacy report. It is for people who see the model
for the first time; the report next to it has the details.

The Hub checks the values of the metadata keys that it knows and ignores the others (huggingface_hub's
``ModelCardData`` passes additional keys through; the specification, ``modelcard.md`` in huggingface/hub-docs, says
which are verified). The guarantee is therefore a separate block, ``differential_privacy``; ``model-index`` is for
benchmark metrics. The Hub refuses a whole upload if ``base_model`` is not a Hub id (transformers, issue 33922), and a
path reveals details of the machine, so a local base model is not named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from dpllm.config import TASKS, nearest
from dpllm.config.files import write_file
from dpllm.config.hub import license_metadata
from dpllm.privacy.checkpoints import MANIFEST_FILE
from dpllm.privacy.ledger import LEDGER_FILE, Ledger, LedgerContents, read_ledger, refuse_lost_lines
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.query_plan import QueryPlan, load_plan
from dpllm.privacy.rounding import up
from dpllm.privacy.run_folder import adopt, settle_crashed
from dpllm.report.checklist import SIGNED, is_sampled
from dpllm.report.definition import SELECTED
from dpllm.report.front import method_of, unit_of
from dpllm.report.models import Plan, PlanOfQueries, PrivacyReport
from dpllm.report.pages import part, template, write_pages
from dpllm.report.release_notes import ReleaseNotes, require_own_words
from dpllm.report.statement import HTML_FILE, JSON_FILE, MARKDOWN_FILE, notes_in, privacy_report, write_report

CARD_FILE = "README.md"
CARD_TEMPLATE = "model_card.md"
BLOCK = "differential_privacy"
"""Key of the metadata block that holds the machine-readable guarantee."""
TAGS = ("differential-privacy", "dp-sgd", "dpllm")
"""Tags of a private model; a model that is not private has only the last one."""

# With independent noise; the event names any other mechanism.
_MECHANISM = {
    "unit": "DP-SGD: Gaussian noise on clipped sums over truncated Poisson samples",
    "example": "DP-SGD: Gaussian noise on sums of individually clipped rows over Poisson samples of rows",
}
_NOT_KEPT = (BLOCK, "model-index", "metrics", "base_model", "base_model_relation", "library_name")
_BASE_TAG = re.compile(r"base_model:(?:[a-z]+:)?(.+)")
_PRIVACY_HEADING = "## Privacy"
_FILES = (MARKDOWN_FILE, HTML_FILE, JSON_FILE, PLAN_FILE, LEDGER_FILE)


def write_model_card(
    folder: str | Path,
    report: PrivacyReport,
    *,
    base_model: str | None,
    task: str | None,
    adapter: bool,
    num_labels: int | None = None,
    base_arguments: Mapping[str, Any] | None = None,
    embedding_rows: int | None = None,
    subfolder: str | None = None,
    loading_class: str | None = None,
    own_class: str | None = None,
    language: str | Sequence[str] | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    datasets: Sequence[str] = (),
    ledger: Any = None,
) -> Path:
    """Write the card of a model or a checkpoint into its folder, and replace the card that PEFT or the Trainer wrote.

    The text of an earlier card is replaced. Its metadata are kept: the tags, and every key that is not set here, such
    as a license, with exceptions. ``model-index`` and ``metrics`` are dropped, since they may come from an evaluation
    on private records, which ε does not cover; the report's utility figures are not repeated for the same reason.
    ``differential_privacy`` is written again. A base model and data sets that are not Hub ids are dropped.

    Args:
        folder: folder with the model, the report, the plan and the ledger.
        report: the report that `dpllm.report.statement.privacy_report` returns.
        base_model: Hub id or folder of the model that was fine-tuned. For a folder or None, the name that people noted
            in the report is used; if there is none, None uses the name in the earlier card.
        task: a key of `dpllm.config.TASKS`; None: a different task, whose class the configuration names.
        adapter: whether the folder holds a PEFT adapter instead of a full model.
        num_labels: number of classes; required for a classifier's adapter, whose base model has no such head.
        base_arguments: arguments with which an adapter's base model is loaded, by name; None: the number of classes.
        embedding_rows: number of rows in an adapter's embedding, if tokens were added to the base model.
        subfolder: the adapter's folder inside ``folder``; None: it is in ``folder``.
        loading_class: name of the transformers class that loads the model, or an adapter's base model; None: the
            task's.
        own_class: name of the model's class if it is not in transformers, so that its own code must load it.
        language: ISO codes; None: those noted in the report, if any.
        license: the Hub's identifier, or the name of a different license; None: the one noted in the report, if any.
        tags: tags for the metadata, in addition to dpllm's and the earlier card's.
        datasets: public data sets for the metadata; a name that is not a Hub id is omitted.
        ledger: the folder's ledger, if a run has it open (`SharedLedger`). None: opens it.

    Returns:
        The path of the card.

    Raises:
        ValueError: the task is unknown, the number of classes, the report, the plan or the ledger is missing, or the
            earlier card's metadata cannot be read.
    """
    folder = Path(folder)
    if task is not None and task not in TASKS:
        raise ValueError(f"task={task!r} is none of {', '.join(TASKS)}{nearest(task, TASKS)}; use None for any other")
    if adapter and task is not None and TASKS[task].needs_labels and num_labels is None:
        raise ValueError("num_labels is missing: the card of a classifier's adapter needs it to say how to load it")
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} holds no {', '.join(missing)}, which the model card links to. First write the report, the plan "
            "and the ledger there"
        )
    path = folder / CARD_FILE
    earlier = metadata_in(path)
    base = hub_id(base_model) or hub_id(report.noted.base_model)
    if base is None and base_model is None:
        base = hub_id(earlier.get("base_model"))
    if tags:
        kept = earlier.get("tags") or []
        earlier["tags"] = [*tags, *([kept] if isinstance(kept, str) else kept)]
    if datasets:
        earlier["datasets"] = list(datasets)
    data = _metadata(earlier, report, base, task, adapter, language, license)
    card = template(CARD_TEMPLATE).render(
        metadata=data.to_yaml(),
        report=report,
        base=base,
        task=task,
        adapter=adapter,
        auto_class=(loading_class or TASKS[task].auto_class) if task else None,
        arguments={"num_labels": num_labels} if base_arguments is None and num_labels else base_arguments or {},
        embedding_rows=embedding_rows,
        within={} if subfolder is None else {"subfolder": subfolder},
        own_class=own_class,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        ends=_ends_in(folder) if adapter else None,
    )
    write_pages(folder, {CARD_FILE: card}, ledger)
    return path


def _ends_in(folder: Path) -> Any:
    """Return the end-of-text tokens, which are not loaded with an adapter; None: unknown."""
    path = folder / "generation_config.json"
    return json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None


def write_release_card(folder: str | Path, report: PrivacyReport) -> Path:
    """Write the card of a query run into its folder, and replace an earlier one.

    Args:
        folder: folder with the released files, the report, the plan and the ledger.
        report: the report that `dpllm.report.statement.privacy_report` returns.

    Returns:
        The path of the card.
    """
    path = Path(folder) / CARD_FILE
    own: dict[str, Any] = {
        "language": list(report.noted.language) or None,
        **license_metadata(report.noted.license),
        "tags": [tag for tag in _tags(None, report.statement.private) if tag != "dp-sgd"],
        BLOCK: privacy_metadata(report),
    }
    data = ModelCardData(**{key: value for key, value in own.items() if value is not None})
    write_pages(folder, {CARD_FILE: template(CARD_TEMPLATE).render(metadata=data.to_yaml(), report=report)})
    return path


def add_notes(folder: str | Path, noted: Mapping[str, Any], write: bool = False) -> PrivacyReport:
    """Add notes to a run, and write its report and the card's open points again.

    Args:
        folder: the run's folder.
        noted: fields of `dpllm.report.statement.ReleaseNotes`; the others stay unchanged. Without notes, nothing is
            written, and the folder may be a checkpoint.
        write: whether to write the files even without a note.

    Returns:
        The report.

    Raises:
        ValueError: the folder holds no plan or no ledger, or they do not belong together; or there are notes and the
            folder is a checkpoint, or a run is writing its ledger.
    """
    folder = Path(folder)
    plan, contents, notes = _read(folder)
    if not noted and not write:
        return privacy_report(plan, contents, notes)
    _refuse_checkpoint(folder)
    shown = _as_recorded(folder)
    after = write_report(folder, plan, contents, dataclasses.replace(notes, **noted))
    renew_card(folder, shown, after)
    return after


def _refuse_checkpoint(folder: Path) -> None:
    if (folder / MANIFEST_FILE).is_file():
        raise ValueError(
            f"{folder} is a checkpoint, whose copy of the ledger never changes. Note facts and settle points in the "
            f"run's folder: `dpllm report {folder.parent}`"
        )


def _read(folder: Path) -> tuple[PrivacyPlan | QueryPlan, LedgerContents, ReleaseNotes]:
    for name in (PLAN_FILE, LEDGER_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name}, so it is not the folder of a private run")
    plan, contents = load_plan(folder / PLAN_FILE), read_ledger(folder / LEDGER_FILE)
    notes = notes_in(folder)
    refuse_lost_lines(contents)
    return plan, contents, notes


def settle(folder: str | Path, statements: Mapping[str, str], by: str) -> PrivacyReport:
    """Record in a run's ledger that people settled open points, and write its report and card again.

    Guarantee: the ledger holds each statement with its author and today's date, and `dpllm verify` compares report and
    card with it. Only a point that asks people to check something can be settled (`dpllm.report.checklist`).

    Args:
        folder: folder of the run, or of a model that was produced from it.
        statements: the open points as the report prints them, each with the statement of the person who checked it.
        by: that person.

    Returns:
        The report.

    Raises:
        ValueError: a text is a placeholder; a point is not open, or a statement cannot settle it; the folder is a
            checkpoint, or holds no plan or no ledger; or a run is writing its ledger.
    """
    folder = Path(folder)
    before = add_notes(folder, {})
    _refuse_checkpoint(folder)
    ways = dict(zip(before.open_points, before.how_to_clear, strict=True))
    for point in statements:
        if point not in ways or SIGNED not in ways[point]:
            raise ValueError(f"{point!r} is no open point of {folder} that a statement settles")
    for name, words in (
        ("name of the person who checked it", by),
        *(("statement", one) for one in statements.values()),
    ):
        if not words.strip():
            raise ValueError(f"the {name} is empty, but only a person's own words settle a point")
        require_own_words(f"the {name}", words)
    with _rewritten(folder), Ledger.annotate(folder / LEDGER_FILE) as ledger:
        for point, words in statements.items():
            ledger.append_settled(point, words, by)
    return add_notes(folder, {})


def add_audit(folder: str | Path, file: str, summary: str) -> None:
    """Record an audit's verdict in a run's ledger, and write its report and card again.

    Nothing is written into a checkpoint, because its manifest fixes its copy of the ledger: there, the verdict stays in
    the audit's own file.

    Raises:
        ValueError: the folder holds no plan or no ledger, or a run is writing it.
    """
    folder = Path(folder)
    if (folder / MANIFEST_FILE).is_file():
        return
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    with _rewritten(folder), Ledger.annotate(folder / LEDGER_FILE) as ledger:
        ledger.append_audit(file, digest, summary)


def add_disclosure(folder: str | Path, what: str) -> None:
    """Record in a run's ledger a result that ε does not cover, and write its report and card again.

    Raises:
        ValueError: the folder holds no plan or no ledger, or a run is writing it.
    """
    folder = Path(folder)
    with _rewritten(folder), Ledger.annotate(folder / LEDGER_FILE) as ledger:
        ledger.append_disclosure(what)


def adopt_run(folder: str | Path) -> int:
    """Adopt a copy of a run's folder (see `run_folder.adopt`), and write its report and card again if it has them.

    Returns:
        The steps that its ledger charges.

    Raises:
        ValueError: as for `dpllm.privacy.run_folder.adopt`; or the folder has a report but no plan, or its report is
            damaged. Nothing is adopted in this case.
    """
    folder = Path(folder)
    with _rewritten(folder) if _has_report(folder) else contextlib.nullcontext():
        return adopt(folder)


def note_selected(folder: str | Path, candidate: str) -> None:
    """Record in a run's ledger that a private tuning selected it, and write its report and card again.

    Raises:
        ValueError: the ledger is damaged, or a run is writing it.
    """
    folder = Path(folder)
    with _rewritten(folder), Ledger.annotate(folder / LEDGER_FILE) as ledger:
        ledger.append_fact(SELECTED, candidate)


def add_released(
    folder: str | Path, releases: Mapping[str, Mapping[str, Mapping[str, Any]]], ledger: Any = None
) -> None:
    """Record in a run's ledger the files of a model that was produced from it, and write its report and card again.

    Args:
        folder: the run's folder.
        releases: for each model folder, by name: its files, each with size and hash.
        ledger: the folder's ledger, if a run has it open (`SharedLedger`, on its first process). None: opens it.

    Raises:
        ValueError: the ledger is damaged, or a run is writing it.
    """
    folder = Path(folder)
    opened = Ledger.annotate(folder / LEDGER_FILE) if ledger is None else contextlib.nullcontext(ledger)
    with _rewritten(folder, ledger), opened as writer:
        for name, files in releases.items():
            writer.append_released(name, files)


def settle_run(path: str | Path, folder: str | Path, independent: bool = False) -> int:
    """Settle a crashed run (see `settle_crashed`), and write its report and card again if it has them.

    Guarantee: if the stop is declared independent, budget, ledger, report and card count the same steps.

    Args:
        path: the budget file.
        folder: the run's output folder.
        independent: declares that the crash depended neither on the private data nor on what the run released.

    Returns:
        The steps that its ledger charges.

    Raises:
        ValueError: as for `settle_crashed`; or the folder has a report but no plan, or its report is damaged. Nothing
            is settled in this case.
    """
    folder = Path(folder)
    with _rewritten(folder) if independent and _has_report(folder) else contextlib.nullcontext():
        return settle_crashed(path, folder, independent)


def _has_report(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (JSON_FILE, MARKDOWN_FILE, HTML_FILE))


@contextlib.contextmanager
def _rewritten(folder: Path, ledger: Any = None) -> Iterator[None]:
    """Write report and card again after the block has appended to the ledger, which a run may have open."""
    shown = _as_recorded(folder)
    yield
    plan, contents = load_plan(folder / PLAN_FILE), read_ledger(folder / LEDGER_FILE)
    renew_card(folder, shown, write_report(folder, plan, contents, notes_in(folder), opened=ledger), ledger)


def _as_recorded(folder: Path) -> PrivacyReport:
    """Return the report that a folder's card describes."""
    return privacy_report(*_read(folder))


def renew_card(folder: str | Path, before: PrivacyReport, after: PrivacyReport, ledger: Any = None) -> None:
    """Update the guarantee, the open points and the notes in the card, if there is a card.

    The rest of the card stays unchanged. If people edited it, its hash is not recorded in the ledger, since `dpllm
    verify` must not mistake their words for dpllm's.

    Args:
        folder: the run's folder.
        before: the report from which the card was written.
        after: the current report.
        ledger: the folder's ledger, if a run has it open (`SharedLedger`). None: opens it.
    """
    path = Path(folder) / CARD_FILE
    if path.is_file():
        card = path.read_text(encoding="utf-8")
        renewed = _renewed(card, before, after)
        if renewed != card:
            written = read_ledger(Path(folder) / LEDGER_FILE).notes.pages.get(CARD_FILE)
            if hashlib.sha256(card.encode("utf-8")).hexdigest() == written:
                write_pages(folder, {CARD_FILE: renewed}, ledger)
            else:
                write_file(path, renewed)


def _renewed(card: str, before: PrivacyReport, after: PrivacyReport) -> str:
    """Return the text of a card with the guarantee of a new report; the rest stays unchanged."""
    for name in ("guarantee", "not_covered", "check_it"):
        card = card.replace(_part(name, before), _part(name, after), 1)
    old, new = _part("open_points", before), _part("open_points", after)
    where = f"{old}\n\n" if old else f"{_PRIVACY_HEADING}\n\n"  # the heading that follows them
    if old != new:
        card = card.replace(where, (f"{new}\n\n" if new else "") + ("" if old else where), 1)
    card = card.replace(before.checkable.ledger_sha256, after.checkable.ledger_sha256)
    metadata = {BLOCK: privacy_metadata(after), **_noted_metadata(after)}
    if metadata == {BLOCK: privacy_metadata(before), **_noted_metadata(before)}:
        return card
    parsed = ModelCard(card, ignore_metadata_errors=True)
    for key, value in metadata.items():
        parsed.data[key] = value
    return str(parsed)


def _noted_metadata(report: PrivacyReport) -> dict[str, Any]:
    """Return the metadata that come from people's notes."""
    languages = {"language": list(report.noted.language)} if report.noted.language else {}
    return {**languages, **license_metadata(report.noted.license)}


def has_card(folder: str | Path) -> bool:
    """Return whether a folder has a model card that dpllm wrote and may therefore overwrite."""
    path = Path(folder) / CARD_FILE
    try:
        return path.is_file() and BLOCK in metadata_in(path)
    except ValueError:  # not a readable card, so dpllm did not write it
        return False


def keep_own_card(folder: str | Path) -> Path | None:
    """Copy a README.md that a person wrote before the model card replaces it. Call it in one process before saving.

    A card that dpllm wrote is not copied.

    Returns:
        The copy's path, ``README.own.md`` or with the first free number; None if there was nothing to copy.
    """
    path = Path(folder) / CARD_FILE
    if not path.is_file() or has_card(folder):
        return None
    names = ("README.own.md", *(f"README.own.{number}.md" for number in range(2, 10_000)))
    kept = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    # A copy, so that the metadata of a prepared card (a license, a language) are still used for the model's card.
    shutil.copyfile(path, kept)
    return kept


def metadata_in(path: Path) -> dict[str, Any]:
    """Return the metadata of an earlier card; empty if there is none.

    Raises:
        ValueError: the metadata cannot be read.
    """
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("---"):
        return {}
    try:
        metadata = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the metadata of {path} cannot be read ({reason}). Fix or delete that file") from error
    return metadata


def hub_id(name: Any) -> str | None:
    """Return a name if it could be a Hub id; None for a folder and for anything else."""
    if not isinstance(name, str) or not name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _metadata(
    earlier: Mapping[str, Any],
    report: PrivacyReport,
    base: str | None,
    task: str | None,
    adapter: bool,
    language: str | Sequence[str] | None,
    license: str | None,
) -> ModelCardData:
    kept = {key: value for key, value in earlier.items() if key not in _NOT_KEPT}
    kept["tags"] = _tags(kept.get("tags"), report.statement.private)
    data_sets = kept.pop("datasets", None) or []
    data_sets = [name for name in ([data_sets] if isinstance(data_sets, str) else data_sets) if hub_id(name)]
    own = {
        "base_model": base,
        "base_model_relation": None if base is None else "adapter" if adapter else "finetune",
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": TASKS[task].pipeline_tag if task else None,
        "language": ([language] if isinstance(language, str) else list(language or report.noted.language)) or None,
        **license_metadata(license or report.noted.license),
        "datasets": data_sets or None,
    }
    known = {key: value for key, value in own.items() if value is not None}
    return ModelCardData(**{**known, **kept, **known, BLOCK: privacy_metadata(report)})


def _tags(earlier: Any, private: bool) -> list[str]:
    """Return dpllm's tags and the earlier ones, except tags that name a base model by its folder.

    A model that is not private gets no tag by which people search for private models.
    """
    tags = [earlier] if isinstance(earlier, str) else list(earlier or ())
    named = {tag: _BASE_TAG.fullmatch(tag) for tag in tags if isinstance(tag, str) and tag not in TAGS}
    own = TAGS if private else TAGS[-1:]
    return [*own, *(tag for tag, base in named.items() if base is None or hub_id(base[1]))]


def privacy_metadata(report: PrivacyReport) -> dict[str, Any]:
    """Return the machine-readable guarantee; ε is infinite for every run that is not private."""
    statement, accounting, plan = report.statement, report.accounting, report.checkable.plan

    def number(value: float) -> float | str:
        return float(up(value)) if statement.private and math.isfinite(value) else "infinite"

    mechanism, numbers = _of_answers(report, plan) if isinstance(plan, PlanOfQueries) else _of_training(report, plan)
    return {
        "private": statement.private,
        "epsilon": number(statement.epsilon),
        "delta": statement.delta,
        "unit": unit_of(statement.unit),
        "adjacency": statement.adjacency,
        "epsilon_by_adjacency": {name: number(value) for name, value in statement.epsilon_by_adjacency.items()},
        "mechanism": mechanism,
        "accountant": f"PLD, {accounting.tool} {accounting.tool_version}",
        "num_units": plan.num_units,
        **numbers,
    }


def _of_answers(report: PrivacyReport, plan: PlanOfQueries) -> tuple[str, dict[str, Any]]:
    """Return a query run's mechanism and its parameters."""
    together = {} if plan.after is None else {"together_with_the_model_of": plan.after["folder"]}
    return f"{plan.method}: {report.accounting.event}", {"num_answers": report.accounting.steps.stated, **together}


def _of_training(report: PrivacyReport, plan: Plan) -> tuple[str, dict[str, Any]]:
    """Return a training run's mechanism and its parameters."""
    by_event = plan.noise != "independent" or plan.randomness == "discrete"
    rate = "sampling_rate" if is_sampled(report.checkable) else "share_of_units_in_a_step"
    return report.accounting.event if by_event else _MECHANISM[plan.sampling], {
        "noise_multiplier": plan.noise_multiplier,
        rate: plan.sampling_rate,
        "num_steps": report.accounting.steps.stated,
        **(_rounds(report, plan) if by_event else {}),
        **({} if plan.selection is None else {"best_of": plan.selection}),
    }


def _rounds(report: PrivacyReport, plan: Plan) -> dict[str, Any]:
    """Return the options of correlated noise, and the parameters that recompute ε, for rounds instead of steps.

    A round's noise multiplier is included if it differs from a step's: after a resume with BLT noise, all starts
    together cost one round with less noise.
    """
    options = {} if isinstance(plan.noise, str) else {name: at for name, at in plan.noise.items() if name != "kind"}
    if report.checkable.recompute_from_the_numbers is None:
        return options
    words = report.checkable.recompute_from_the_numbers.split()
    given = dict(zip(words[2::2], words[3::2], strict=False))
    of_group: dict[str, Any] = {"num_units_of_a_round": int(given["--num-units"])} if "--num-units" in given else {}
    if (noise := float(given["--noise-multiplier"])) != plan.noise_multiplier:
        of_group["noise_multiplier_of_a_round"] = noise
    if "--discrete-sensitivity" in given:
        of_group["discrete_sensitivity"] = float(given["--discrete-sensitivity"])
    return {
        **options,
        "rounds": int(given["--steps"]),
        "sampling_rate_of_a_round": float(given["--sampling-rate"]),
        **of_group,
        "max_batch_size": plan.max_batch_size,
    }


def guarantee_section(report: PrivacyReport) -> list[str]:
    """Return the Markdown blocks that state the guarantee and what it does not cover."""
    return [block for name in ("guarantee", "not_covered") for block in _part(name, report).strip().split("\n\n")]


def points_listed(report: PrivacyReport) -> list[str]:
    """Return the points that a card must list, as it words them: those that are open, and those that people settled."""
    lines = _part("open_points", report).split("\n")
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")]


def _part(name: str, report: PrivacyReport, **context: Any) -> str:
    """Return a part of the card, by the name of its block in the template."""
    return part(CARD_TEMPLATE, name, report=report, **context)


def own_lines(report: PrivacyReport, base: Any = None) -> set[str]:
    """Return every line that dpllm may write into a report's card, for any kind of model.

    Args:
        report: the report that `dpllm.report.statement.privacy_report` returns.
        base: Hub id of the base model, as the card names it.
    """
    names = ("open_points", "guarantee", "not_covered", "check_it", *(("use",) if method_of(report) else ()))
    texts = [_part(name, report) for name in names]
    for name in (None, hub_id(base)):
        texts += [_part("title", report, base=name, adapter=adapter) for adapter in (False, True)]
    return {line.strip() for text in texts for line in text.split("\n")}
