"""Publish a private model: decide which files may leave the machine, and when.

Before an upload, the report and the card are checked as `dpllm verify` does. ε covers the weights and nothing else that
a run writes: losses, event files, optimizer and random states, training arguments and audit results depend on private
rows in ways that ε does not cover. An allow-list names the files that ε covers or that contain nothing private; no
other file is uploaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from dpllm.config import ConfigError
from dpllm.mechanism.averages import LAST_FOLDER
from dpllm.privacy import checkpoints
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE
from dpllm.privacy.query_plan import QueryPlan, load_plan
from dpllm.privacy.run_folder import names_exactly, released_files
from dpllm.registry import release_words
from dpllm.report.checklist import REFUTED
from dpllm.report.model_card import CARD_FILE, add_released, hub_id, metadata_in
from dpllm.report.pages import CHECK_FILE, in_folder
from dpllm.report.statement import HTML_FILE, JSON_FILE, MARKDOWN_FILE
from dpllm.report.verify import verify

AUDIT_FILE = "audit.json"
GUARANTEE_FILES = (CARD_FILE, MARKDOWN_FILE, HTML_FILE, JSON_FILE, PLAN_FILE, LEDGER_FILE, CHECK_FILE)
"""The card, the report, the plan, the ledger, and the verifier with which anyone can check them. A ledger holds the
steps, their public parameters, and counts of what was written out. It holds no losses and no realised batch sizes."""

_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
_ADAPTER_FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.index.json"),
    "generation_config.json",  # names the token that ends a turn, which may differ from the base model's
)
_INDICES = ("model.safetensors.index.json", "adapter_model.safetensors.index.json")
_WEIGHTS = ("model.safetensors", *_INDICES, "adapter_model.safetensors")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm"),
    *("target.spm", "tekken.json", "chat_template.jinja", "processor_config.json", "preprocessor_config.json"),
)
_TEMPLATES = "additional_chat_templates"
_BASE = "base_model_name_or_path"  # in an adapter's configuration
_UPLOADED = "/uploaded"
"""Stands for a folder's name in the ledger and marks the files as uploaded; no folder has this name."""

# Environment variables that make an integration upload whole checkpoints, with their defaults.
_UPLOADS = {
    "wandb": ("WANDB_LOG_MODEL", "false"),
    "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS", "false"),
    "dagshub": ("HF_DAGSHUB_LOG_ARTIFACTS", "false"),
    "clearml": ("CLEARML_LOG_MODEL", "true"),
    "dvclive": ("HF_DVCLIVE_LOG_MODEL", "false"),
    "swanlab": ("SWANLAB_LOG_MODEL", "false"),
    "comet_ml": ("COMET_LOG_ASSETS", "false"),
}
_NO = ("", "0", "false", "no", "off", "none")


class PublishError(ValueError):
    """A model may not be published in its current state.

    Attributes:
        points: the report's open points with what clears each of them, if they are the reason.
    """

    def __init__(self, message: str, points: Sequence[str] = ()) -> None:
        """Store the message and the points."""
        super().__init__(message)
        self.points = tuple(points)


def refuse_uploads(args: Any) -> None:
    """Refuse options that upload files that ε does not cover during training.

    Args:
        args: ``TrainingArguments``.

    Raises:
        ConfigError: such an option is set; the message names it and the value to set instead.
    """
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy != "end":
        raise ConfigError(
            f"train.hub_strategy={strategy} uploads checkpoints during the run, with files that ε does not cover and "
            "before the report is complete. Set train.hub_strategy=end, which uploads the final model with its "
            "guarantee"
        )
    for name in args.report_to or ():
        if name == "flyte":
            raise ConfigError(
                "train.report_to=flyte uploads every checkpoint with states that ε does not cover. Remove flyte from "
                "train.report_to"
            )
        variable, default = _UPLOADS.get(name, ("", "false"))
        value = os.environ.get(variable, default) if variable else default
        if value.strip().lower() not in _NO:
            raise ConfigError(
                f"train.report_to={name} uploads checkpoints with states that ε does not cover, because {variable} is "
                f"{value!r}. Set {variable}=false"
            )


def files_to_publish(
    folder: str | Path, *, adapter: bool, vocabulary: Iterable[str] = (), adapters: Iterable[str] = ()
) -> list[str]:
    """Return the files of a run's folder that may be uploaded, as sorted names relative to the folder.

    They are the weights (safetensors only; for a sharded model, the shards that its index names), the configuration and
    the code that it names, the tokenizer, the card, the report, the plan and the ledger. PEFT saves an adapter that is
    not called "default" in a subfolder of that name; its weights and configuration are included.

    Args:
        folder: the run's folder.
        adapter: whether the model is a PEFT adapter; full weights next to an adapter do not belong to it.
        vocabulary: additional names of tokenizer files, such as a tokenizer's ``vocab_files_names``.
        adapters: names of the model's adapters.

    Raises:
        PublishError: the folder holds no weights, a shard is missing, or a file of the guarantee is missing.
    """
    folder = Path(folder)
    missing = [name for name in GUARANTEE_FILES if not (folder / name).is_file()]
    if missing:
        raise PublishError(
            f"{folder} holds no {', '.join(missing)}, so the model would be published without its guarantee. If the "
            "run has not ended, resume it (train.resume_from_checkpoint=auto). If it has ended, `dpllm report RUN "
            "--write` writes the report's files, and DPTrainer.save_model() saves the model with all of them"
        )
    own = _ADAPTER_FILES if adapter else _MODEL_FILES
    names = {name for name in (*own, *GUARANTEE_FILES, *_TOKENIZER_FILES) if _is_plain_file(folder, name)}
    plain = (one for one in adapters if Path(one).name == one and not (folder / one).is_symlink())
    inner = {f"{one}/{name}" for one in plain for name in _ADAPTER_FILES if _is_plain_file(folder, f"{one}/{name}")}
    if not names.intersection(_WEIGHTS) and not any(Path(name).name in _WEIGHTS for name in inner):
        raise PublishError(
            f"{folder} holds no {' or '.join(name for name in own if name in _WEIGHTS)}. Save the model there with "
            "DPTrainer.save_model() first"
        )
    names.update(name for name in vocabulary if Path(name).name == name and _is_plain_file(folder, name))
    for index in names.intersection(_INDICES):
        names.update(_shards(folder, index))
    for index in (name for name in inner if Path(name).name in _INDICES):
        below = Path(index).parent
        names.update(f"{below}/{shard}" for shard in _shards(folder / below, Path(index).name))
    names |= inner
    if "config.json" in names:
        names.update(name for name in _code_of(folder / "config.json") if _is_plain_file(folder, name))
    templates = [] if (folder / _TEMPLATES).is_symlink() else sorted((folder / _TEMPLATES).glob("*.jinja"))
    names.update(f"{_TEMPLATES}/{path.name}" for path in templates if not path.is_symlink())
    return sorted(names)


def require_publishable(folder: str | Path, *, force_open_points: bool = False) -> None:
    """Check that a run's folder may be published.

    Args:
        folder: the run's folder, with model, report and card.
        force_open_points: whether to publish despite open points, which the card lists. Nothing else can be forced.

    Raises:
        PublishError: the run is not private, an audit refutes it, the files contradict each other, or the report has an
            open point.
    """
    folder = Path(folder)
    try:
        report = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        private, audit, points = _looked_at(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublishError(f"{folder / JSON_FILE} is not a privacy report ({error}). Save the model again") from error
    if not private:
        raise PublishError(
            f"the run in {folder} is NOT PRIVATE, so it cannot be published: {report['statement']['words']}"
        )
    if audit.startswith(REFUTED) or _audit_failed(folder / AUDIT_FILE):
        raise PublishError(
            f"An audit refutes the guarantee of {folder} ({audit or AUDIT_FILE}), so it cannot be published. Find the "
            "cause, and report it (SECURITY.md)"
        )
    failed = [check for check in verify(folder).checks if not check.ok]
    if failed:
        remedy = "" if failed[0].has_remedy else ". Restore the files of the run"
        raise PublishError(f"{folder} does not pass `dpllm verify`: {failed[0].what}: {failed[0].detail}{remedy}")
    if points and not force_open_points:
        points = [in_folder(point, folder) for point in points]
        raise PublishError(
            f"{len(points)} open point(s) in the privacy report of {folder}: {' '.join(points)} Clear each as "
            f"{MARKDOWN_FILE} says, or publish with --force-open-points (force_open_points=True). The card then lists "
            "them",
            points,
        )


def upload(
    folder: str | Path,
    names: Iterable[str],
    repo_id: str,
    *,
    message: str,
    token: str | None = None,
    revision: str | None = None,
    blocking: bool = True,
    repo_type: str = "model",
) -> Any:
    """Upload these files of a folder to the Hub, and no others.

    The files are first linked into an empty folder, and that folder is uploaded, so a file that appears in the meantime
    is not uploaded. An adapter's configuration is uploaded without local paths (`public_configurations`).

    Args:
        folder: the run's folder.
        names: the files, as `files_to_publish` returns them.
        repo_id: id of an existing repository.
        message: commit message.
        token: Hub token; None: this machine's.
        revision: branch; None: the main branch.
        blocking: whether to wait for the upload.
        repo_type: the Hub's kind of repository.

    Returns:
        The commit, or a future for it if not blocking.
    """
    names = list(names)
    with contextlib.ExitStack() as stack:
        staged = stack.enter_context(_only(Path(folder), names))
        client: Any = HfApi()
        result = client.upload_folder(
            repo_id=repo_id,
            repo_type=repo_type,
            folder_path=str(staged),
            allow_patterns=names,
            commit_message=message,
            token=token,
            revision=revision,
            run_as_future=not blocking,
        )
        if not blocking and hasattr(result, "add_done_callback"):
            later = stack.pop_all()
            result.add_done_callback(lambda _: later.close())
    return result


def public_configurations(folder: str | Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the uploaded form of the adapters' configurations that name a local folder.

    The uploaded form names the base model by its Hub id, like the card. Without an id, it names only the last part of
    the folder's path.

    Args:
        folder: the run's folder, with its card.
        names: the files, as `files_to_publish` returns them.

    Returns:
        The contents by name, without configurations that are uploaded unchanged.
    """
    folder, changed = Path(folder), {}
    for name in names:
        if Path(name).name != _ADAPTER_FILES[0]:
            continue
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        base = values.get(_BASE)
        if not isinstance(base, str) or not base or hub_id(base):
            continue
        public = hub_id(metadata_in(folder / CARD_FILE).get("base_model")) or Path(base).name
        if public != base:
            changed[name] = json.dumps({**values, _BASE: public}, indent=2, sort_keys=True).encode()
    return changed


def note_uploaded(folder: str | Path, names: Iterable[str], ledger: Any = None) -> None:
    """Record the hashes of the model's uploaded files in the run's ledger, and write report and card again.

    Guarantee: `dpllm verify` passes on a copy of the uploaded files, and still passes in the folder. If the ledger
    already names exactly these files, nothing is written.

    Args:
        folder: the run's folder.
        names: the files, as `files_to_publish` returns them.
        ledger: the folder's ledger, if a run has it open (`SharedLedger`, on its first process). None: opens it.

    Raises:
        ValueError: the ledger is damaged, or a run is writing it.
    """
    folder, names = Path(folder), set(names)
    contents = read_ledger(folder / LEDGER_FILE)
    files = {name: entry for name, entry in (released_files(contents, folder) or {}).items() if name in names}
    public = {name: content for name, content in public_configurations(folder, names).items() if name in files}
    with tempfile.TemporaryDirectory() as temporary:
        for name, content in public.items():
            (Path(temporary) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(temporary) / name).write_bytes(content)
        files.update(checkpoints.seal(temporary, sorted(public)))
    if files and not names_exactly(contents, files):
        add_released(folder, {_UPLOADED: files}, ledger)


def published_files(folder: str | Path, vocabulary: Iterable[str] = ()) -> list[str]:
    """Return the files of a saved model's folder that may be uploaded, with the adapters that its ledger names.

    Args:
        folder: folder of a run, or of a model that was produced from it.
        vocabulary: as for `files_to_publish`.

    Raises:
        PublishError: as for `files_to_publish`, or the folder has no ledger, or a damaged one.
    """
    folder = Path(folder)
    if not (folder / LEDGER_FILE).is_file():
        raise PublishError(f"{folder} holds no {LEDGER_FILE}. Pass the output folder of a private run")
    try:
        named = released_files(read_ledger(folder / LEDGER_FILE), folder) or {}
        queries = isinstance(load_plan(folder / PLAN_FILE), QueryPlan)
    except ValueError as error:
        raise PublishError(f"{folder} cannot be published: {error}") from error
    if queries:
        return _of_queries(folder, named)
    paths = [Path(name) for name in named if Path(name).name == "adapter_config.json" and len(Path(name).parts) < 3]
    inner = [path.parts[0] for path in paths if len(path.parts) == 2 and path.parts[0] != LAST_FOLDER]
    return files_to_publish(folder, adapter=bool(paths), vocabulary=vocabulary, adapters=inner)


def _of_queries(folder: Path, named: Mapping[str, Any]) -> list[str]:
    """Return the files of a query run that may be uploaded: those named in its ledger, and those of the guarantee."""
    lacking = [name for name in (*GUARANTEE_FILES, *named) if not _is_plain_file(folder, name)]
    if lacking or not named:
        raise PublishError(
            f"{folder} holds no {', '.join(lacking)}. Restore the run's files"
            if lacking
            else f"the run in {folder} has released no file, so there is nothing to publish"
        )
    return sorted({*GUARANTEE_FILES, *named})


def repo_type_of(folder: str | Path) -> str:
    """Return the Hub's kind of repository for a folder: "model", or "dataset" for a release that is not a model."""
    plan = load_plan(Path(folder) / PLAN_FILE)
    return "dataset" if isinstance(plan, QueryPlan) and not release_words()[plan.method].is_model else "model"


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    message: str,
    private: bool | None = None,
    force_open_points: bool = False,
    revision: str | None = None,
    vocabulary: Iterable[str] = (),
) -> Any:
    """Upload the model of a finished run to the Hub, with its guarantee and nothing else.

    Args:
        folder: folder of the run, or of a model that was produced from it.
        repo_id: the repository, which is created if it does not exist.
        message: commit message.
        private: whether only its owner can see a new repository. None: the Hub's default.
        force_open_points: as for `require_publishable`.
        revision: branch; None: the main branch.
        vocabulary: as for `files_to_publish`.

    Returns:
        The commit.

    Raises:
        PublishError: as for `require_publishable` and `files_to_publish`. Nothing is created or uploaded in this case.
    """
    require_publishable(folder, force_open_points=force_open_points)
    names = published_files(folder, vocabulary)
    note_uploaded(folder, names)
    client: Any = HfApi()
    kind = repo_type_of(folder)
    url = client.create_repo(repo_id, private=private, exist_ok=True, repo_type=kind)
    return upload(folder, names, url.repo_id, message=message, revision=revision, repo_type=kind)


@contextlib.contextmanager
def _only(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Yield a temporary folder that contains only these files."""
    # In the run's folder, so that hard links work; the Trainer itself does not push a folder with an underscore.
    with tempfile.TemporaryDirectory(prefix="_publishing-", dir=folder) as temporary:
        public = public_configurations(folder, names)
        for name in names:
            target = Path(temporary) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in public:
                target.write_bytes(public[name])
                continue
            try:
                os.link(folder / name, target)
            except OSError:  # a file system without links
                shutil.copyfile(folder / name, target)
        yield Path(temporary)


def _looked_at(report: Mapping[str, Any]) -> tuple[bool, str, list[str]]:
    return (
        bool(report["statement"]["private"]),
        str(report["strength"]["audit"] or ""),
        [
            f"{point} Cleared by: {how}."
            for point, how in zip(report["open_points"], report["how_to_clear"], strict=True)
        ],
    )


def _audit_failed(path: Path) -> bool:
    """Return whether the audit result next to the model refutes it; an unreadable result counts as a refutation."""
    if not path.is_file():
        return False
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        claimed, found = result.get("claimed_epsilon"), result["epsilon_lower"]
        return str(result["verdict"]).startswith(REFUTED) or (claimed is not None and float(found) > 1.001 * claimed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def _is_plain_file(folder: Path, name: str) -> bool:
    path = folder / name
    return path.is_file() and not path.is_symlink()


def _shards(folder: Path, index: str) -> set[str]:
    try:
        shards = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise PublishError(f"{folder / index} is not an index of weights ({error}). Save the model again") from error
    for name in shards:
        if Path(name).name != name or not name.endswith(".safetensors") or not _is_plain_file(folder, name):
            raise PublishError(f"{folder / index} names {name!r}, which is not a shard. Save the model again")
    return shards


def _code_of(config: Path) -> set[str]:
    """Return the names of the Python files that a configuration's ``auto_map`` points to."""
    try:
        targets = (json.loads(config.read_text(encoding="utf-8")).get("auto_map") or {}).values()
    except (OSError, ValueError, AttributeError):
        return set()
    flat = (item for target in targets for item in (target if isinstance(target, list) else [target]))
    return {f"{item.split('.')[0]}.py" for item in flat if isinstance(item, str) and "--" not in item}
