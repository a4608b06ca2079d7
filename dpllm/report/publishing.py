"""Publish a private model: which files may leave the machine, and when.

Place in the flow: last, after the report and the card, which it checks as `dpllm verify` does. ε covers the weights and
nothing else that a run writes: losses, event files, optimizer and random states, training arguments and the results of
audits depend on private rows in ways that no ε covers. Only files that are known to be covered, or to hold nothing
private, are uploaded: an allow-list, so that a file of a kind that nobody thought of stays where it is.
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
from dpllm.privacy.release_words import release_words
from dpllm.privacy.run_folder import names_exactly, released_files
from dpllm.report.checklist import REFUTED
from dpllm.report.model_card import CARD_FILE, add_released, hub_id, metadata_in
from dpllm.report.pages import CHECK_FILE, in_folder
from dpllm.report.statement import HTML_FILE, JSON_FILE, MARKDOWN_FILE
from dpllm.report.verify import verify

AUDIT_FILE = "audit.json"
GUARANTEE_FILES = (CARD_FILE, MARKDOWN_FILE, HTML_FILE, JSON_FILE, PLAN_FILE, LEDGER_FILE, CHECK_FILE)
"""The card, the report and the plan, the ledger and the verifier that anyone can verify them with. A ledger holds the
steps, their public parameters, and counts of what was written out; it holds no loss and no realised batch size."""

_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
_ADAPTER_FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.index.json"),
    "generation_config.json",  # with the token that closes a turn, which the base model may not end with
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
"""In the ledger, in place of a folder's name, for the files as they are uploaded; no folder has this name."""

# Environment variables by which an integration uploads whole checkpoints; the value that each has when it is unset.
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
    """A model may not be published as it is.

    Attributes:
        points: the open points of its report, each with the way to clear it, if these are the reason.
    """

    def __init__(self, message: str, points: Sequence[str] = ()) -> None:
        """Store the points."""
        super().__init__(message)
        self.points = tuple(points)


def refuse_uploads(args: Any) -> None:
    """Refuse options by which files that ε does not cover would leave the machine during training.

    Args:
        args: ``TrainingArguments``.

    Raises:
        ConfigError: the option, and the value to set instead.
    """
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if args.push_to_hub and strategy != "end":
        raise ConfigError(
            f"train.hub_strategy={strategy} uploads checkpoints while the run goes on, before its report is complete "
            "and with files that ε does not cover. Set train.hub_strategy=end: the final model is then uploaded with "
            "its guarantee"
        )
    for name in args.report_to or ():
        if name == "flyte":
            raise ConfigError(
                "train.report_to=flyte uploads every checkpoint with states that ε does not cover. Leave flyte out of "
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
    """Return the files of a run's folder that may be uploaded, as sorted names relative to it.

    They are the weights (safetensors only, and of a sharded model the shards that its index names), the configuration
    and the code that it names, the tokenizer, the card, the report, the plan and the ledger. PEFT saves an adapter with
    another name than "default" in a folder of its name, from which weights and configuration are taken.

    Args:
        folder: of the run.
        adapter: whether the model is a PEFT adapter; whole weights beside an adapter are then not its own.
        vocabulary: further names of tokenizer files, such as a tokenizer's ``vocab_files_names``.
        adapters: the names of the model's adapters.

    Raises:
        PublishError: the folder holds no weights, a shard is missing, or the guarantee is incomplete.
    """
    folder = Path(folder)
    missing = [name for name in GUARANTEE_FILES if not (folder / name).is_file()]
    if missing:
        raise PublishError(
            f"{folder} holds no {', '.join(missing)}, so the model would be published without its guarantee. If its "
            "run has not ended, go on with it (train.resume_from_checkpoint=auto). If it has, `dpllm report RUN "
            "--write` writes the files of the report. A program saves with DPTrainer.save_model()"
        )
    own = _ADAPTER_FILES if adapter else _MODEL_FILES
    names = {name for name in (*own, *GUARANTEE_FILES, *_TOKENIZER_FILES) if _is_plain_file(folder, name)}
    plain = (one for one in adapters if Path(one).name == one and not (folder / one).is_symlink())
    inner = {f"{one}/{name}" for one in plain for name in _ADAPTER_FILES if _is_plain_file(folder, f"{one}/{name}")}
    if not names.intersection(_WEIGHTS) and not any(Path(name).name in _WEIGHTS for name in inner):
        raise PublishError(
            f"{folder} holds no {' or '.join(name for name in own if name in _WEIGHTS)}: save the whole model there "
            "with DPTrainer.save_model() first"
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
    """Make sure that a run's folder may be published.

    Args:
        folder: of the run, with model, report and card.
        force_open_points: publish with open points; the card lists them. Nothing else can be forced.

    Raises:
        PublishError: the run is not private, an audit refutes it, the files contradict each other, or an open point of
            the report is not settled.
    """
    folder = Path(folder)
    try:
        report = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
        private, audit, points = _looked_at(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PublishError(f"{folder / JSON_FILE} is not a privacy report ({error}): save the model again") from error
    if not private:
        raise PublishError(
            f"{folder} holds a run that is NOT PRIVATE, and nothing is published under its name: "
            f"{report['statement']['words']}"
        )
    if audit.startswith(REFUTED) or _audit_failed(folder / AUDIT_FILE):
        raise PublishError(
            f"An audit refutes the guarantee of {folder} ({audit or AUDIT_FILE}). It cannot be published: find out "
            "why, and report it (SECURITY.md)"
        )
    failed = [check for check in verify(folder).checks if not check.ok]
    if failed:
        remedy = "" if failed[0].has_remedy else ". Restore the files of the run"
        raise PublishError(f"{folder} does not pass `dpllm verify`: {failed[0].what}: {failed[0].detail}{remedy}")
    if points and not force_open_points:
        points = [in_folder(point, folder) for point in points]
        raise PublishError(
            f"{len(points)} open point(s) in the privacy report of {folder}: {' '.join(points)} Clear them as "
            f"{MARKDOWN_FILE} says beside each, or publish with --force-open-points (force_open_points=True): the card "
            "lists them",
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

    The files are first linked into an empty folder, which is uploaded: a file that appears meanwhile is not taken. An
    adapter's configuration is uploaded without a path of this machine (`public_configurations`).

    Args:
        folder: of the run.
        names: as `files_to_publish` returns them.
        repo_id: of an existing repository.
        message: of the commit.
        token: of the Hub; None: the one of this machine.
        revision: the branch; None: the main one.
        blocking: whether to wait.
        repo_type: the Hub's kind of repository.

    Returns:
        The commit, or a future of it.
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
    """Return the adapters' configurations among these files that name a folder of this machine, as they are uploaded.

    They name the base model as the card does, by its id on the Hub; without an id, by the folder's own name, without
    the folders above it.

    Args:
        folder: of the run, with its card.
        names: as `files_to_publish` returns them.

    Returns:
        The contents by name; nothing for a configuration that is uploaded as it is.
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
    """Write the files of the model, as they are uploaded, into the ledger of the run, by hash; report and card follow.

    Guarantee: `dpllm verify` holds on a copy of the uploaded files, and still in the folder. Where the ledger names
    exactly these files already, nothing is written.

    Args:
        folder: of the run.
        names: as `files_to_publish` returns them.
        ledger: of a run whose ledger is open (`SharedLedger`), on its first process. None: opens the folder's.

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
    """Return the files of a saved model's folder that may be uploaded; its ledger tells which adapters it has.

    Args:
        folder: of a run, or of a model that was made of it.
        vocabulary: as for `files_to_publish`.

    Raises:
        PublishError: as `files_to_publish`; or there is no such folder, or its ledger is damaged.
    """
    folder = Path(folder)
    if not (folder / LEDGER_FILE).is_file():
        raise PublishError(f"{folder} holds no {LEDGER_FILE}: give the output folder of a private run")
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
    """Return the files of a query run that may be uploaded: those that its ledger names, and those of the guarantee."""
    lacking = [name for name in (*GUARANTEE_FILES, *named) if not _is_plain_file(folder, name)]
    if lacking or not named:
        raise PublishError(
            f"{folder} holds no {', '.join(lacking)}: restore the files of the run"
            if lacking
            else f"the run in {folder} has released no file, so there is nothing to publish"
        )
    return sorted({*GUARANTEE_FILES, *named})


def repo_type_of(folder: str | Path) -> str:
    """Return the Hub's kind of repository for a folder: "model", or "dataset" for a release that is no model."""
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
        folder: of the run, or of a model that was made of it.
        repo_id: the repository; it is created if it does not exist.
        message: of the commit.
        private: whether a new repository is visible to its owner only. None: the Hub's default.
        force_open_points: as for `require_publishable`.
        revision: the branch; None: the main one.
        vocabulary: as for `files_to_publish`.

    Returns:
        The commit.

    Raises:
        PublishError: as `require_publishable` and `files_to_publish`; nothing is created or uploaded then.
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
    """Yield a folder that holds these files and nothing else."""
    # In the run's folder, so that links suffice; the underscore keeps it out of what the Trainer itself would push.
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
    """Whether an audit's result beside the model is a refutation; a result that cannot be read is treated as one."""
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
        raise PublishError(f"{folder / index} is not an index of weights ({error}): save the model again") from error
    for name in shards:
        if Path(name).name != name or not name.endswith(".safetensors") or not _is_plain_file(folder, name):
            raise PublishError(f"{folder / index} names {name!r}, which is not a shard beside it: save the model again")
    return shards


def _code_of(config: Path) -> set[str]:
    """Return the names of the Python files that a configuration's ``auto_map`` points to."""
    try:
        targets = (json.loads(config.read_text(encoding="utf-8")).get("auto_map") or {}).values()
    except (OSError, ValueError, AttributeError):
        return set()
    flat = (item for target in targets for item in (target if isinstance(target, list) else [target]))
    return {f"{item.split('.')[0]}.py" for item in flat if isinstance(item, str) and "--" not in item}
