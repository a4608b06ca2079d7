"""Identify the files of a run's starting weights by hash, so that changed weights are noticed later.

`dpllm train` writes the hash into the ledger when a run begins; a resume, `dpllm merge` and `dpllm generate`, which add
an adapter to these weights again, compare it. Every byte is read: about a second for a gigabyte on one thread, and
files are read in parallel. The model was loaded just before, so they usually come from memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from dpllm.config import ConfigError
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger

START_FILES = "files of the starting weights"
"""Name of the ledger's fact."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_MAX_THREADS = 8
_OF_TRAINING = (
    *("trainer_state.json", "training_args.bin", "trainer_log.jsonl", "train_results.json", "all_results.json"),
    *("optimizer.pt", "optimizer.bin", "optimizer_*", "*_optim_states.pt", "scheduler.pt", "scheduler.bin"),
    *("rng_state*.pth", "random_states_*.pkl", "global_step*", "zero_to_fp32.py", "pytorch_model_fsdp*"),
    *("recipe_state.pt", "epoch=*.ckpt", "last.ckpt", "lightning_logs", "hparams.yaml", "wandb/*run-*"),
    *("events.out.tfevents*", "runs/*/events.out.tfevents*"),
)
"""Files that training leaves next to weights: transformers and its examples, accelerate, DeepSpeed, Lightning."""
_OF_CHECKPOINTS = ("*/trainer_state.json", "*/optimizer.pt", "*/optimizer.bin", "*/global_step*")
_CHECKPOINT = re.compile(r"(checkpoint|global_step|epoch)[-_]?\d+")  # the name of a folder
_CARD = re.compile(r"^\s*-\s*generated_from_trainer\s*$", re.MULTILINE)  # a tag in the Trainer's model card


def start_files(name: str) -> str | None:
    """Return number, bytes and hash of the files of a model's weights; None if they are not on this machine.

    Args:
        name: a folder, or a name on the Hub, which is looked up in the cache.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = folder_of(name)
    files = [] if folder is None else weight_files(folder)
    if not files:
        return None
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(_hash, files))
    listed = "".join(f"{file.name} {one}\n" for file, one in zip(files, hashes, strict=True))
    size = sum(file.stat().st_size for file in files)
    number = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{number}, {size:,} bytes, SHA-256 {hashlib.sha256(listed.encode()).hexdigest()}"


def folder_of(name: str) -> Path | None:
    """Return the folder of a model on this machine: its own, or that of the newest revision in the cache of the Hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    cached = _in_the_cache(name)
    return None if cached is None else Path(cached).parent


def local_folders(name: str) -> list[Path]:
    """Return the folders of a model on this machine: its own, or those of all revisions in the cache of the Hub."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return [folder]
    return sorted(Path(constants.HF_HUB_CACHE).glob(f"models--{name.replace('/', '--')}/snapshots/*"))


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights: of the first kind that exists, which transformers loads."""
    kinds = [sorted(folder.glob(pattern)) for pattern in _WEIGHTS]
    return next((found for found in kinds if found), [])


def trace_of_training(folder: Path) -> str | None:
    """Return a file or folder that a training left with the weights, in checkpoints below them or next to their folder.

    Args:
        folder: folder with the weights.
    """
    found = [path for pattern in (*_OF_TRAINING, *_OF_CHECKPOINTS) for path in sorted(folder.glob(pattern))]
    if found:
        return found[0].relative_to(folder).as_posix()
    card = folder / "README.md"
    if card.is_file() and _CARD.search(card.read_text(encoding="utf-8", errors="replace")):
        return "README.md with the tag generated_from_trainer"
    place = folder.resolve()
    if _CHECKPOINT.fullmatch(place.name):
        return f"the folder name {place.name}"
    beside = [] if place.parent == Path.cwd() else sorted(place.parent.glob(_OF_CHECKPOINTS[0]))
    older = (path for path in beside if path.stat().st_mtime <= place.stat().st_mtime)  # the model was saved last
    return next((f"a {path.parent.name} next to it" for path in older if _CHECKPOINT.fullmatch(path.parent.name)), None)


def refuse_other_start(ledger: Path, name: str) -> None:
    """Check that a continued run has the starting weights with which it began.

    Args:
        ledger: ledger of the run.
        name: name of the weights, as for `start_files`.

    Raises:
        ConfigError: their files differ from those that the ledger names.
    """
    noted = read_ledger(ledger).notes.facts.get(START_FILES)
    now = start_files(name) if noted else None
    if noted and now is not None and now != noted[0]:
        raise ConfigError(
            f"the files of the starting weights {name} have changed since the run in {ledger.parent} began (then "
            f"{noted[0]}, now {now}). Its adapter belongs to the earlier weights, and the guarantee does not cover "
            "others: restore them"
        )


def refuse_other_base(folder: Path) -> None:
    """Check that the adapter in a folder is added to the starting weights on which it was trained.

    Weights that the run itself trained on public text are named by its ledger, and are checked with its other files.

    Args:
        folder: folder of a run, of a checkpoint or of a copy, with its ledger.

    Raises:
        ConfigError: see `refuse_other_start`.
        ValueError: the adapter's configuration cannot be read.
    """
    configuration, ledger = folder / "adapter_config.json", folder / LEDGER_FILE
    if not configuration.is_file() or read_ledger(ledger).notes.public_start is not None:
        return
    base = json.loads(configuration.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base:
        refuse_other_start(ledger, str(base))


def _in_the_cache(name: str) -> str | None:
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a Hub name, but a folder that no longer exists
        return None
    return cached if isinstance(cached, str) else None


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): copy the model again") from error
