"""How a run on one engine continues a checkpoint of another engine: the table of all pairs.

An engine is named by the accelerate config that selects it (``dpllm train --config zero3``). `ways` makes the whole
decision: either the code that saved a checkpoint loads it, or its state is read parameter by parameter
(`dpllm.engines.saved_state`) and divided again. `dpllm.training.resume.checkpoint_to_resume` decides before anything is
charged and before the model is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dpllm.engines.zero_checkpoint import divides_parameters, is_zero_checkpoint
from dpllm.privacy.checkpoints import CheckpointError, made_by
from dpllm.privacy.run_folder import steps_of_weights

SINGLE, DDP, FSDP2, ZERO1, ZERO2, ZERO3 = CONFIGS = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")
"""The engines."""
OPTIMIZER_FILE, SCHEDULER_FILE = "optimizer.pt", "scheduler.pt"  # the Trainer's names
FSDP2_OPTIMIZER, FSDP2_MODEL = "optimizer_0", "pytorch_model_fsdp_0"  # accelerate's folders
FSDP2_WHOLE_OPTIMIZER, FSDP2_WHOLE_MODEL = "optimizer.bin", "pytorch_model_fsdp.bin"  # under FULL_STATE_DICT
_CLASSES = {"SingleProcess": SINGLE, "DataParallel": DDP, "FullySharded": FSDP2}  # in manifests without a config


class Way(Enum):
    """How a checkpoint is continued."""

    LOAD = "load"
    """By the code of the engine that saved it."""
    CONVERT = "convert"
    """Parameter by parameter, by name, with optimizer and schedule."""
    WEIGHTS = "weights"
    """Only weights: the checkpoint is the start of a run, or ``save_only_model`` is set, so no other state exists."""


@dataclass(frozen=True)
class Setup:
    """An engine and its number of processes.

    Attributes:
        config: one of `CONFIGS`.
        processes: the number of processes.
    """

    config: str
    processes: int

    def __str__(self) -> str:
        """Return the text for a message."""
        return f"{self.config} on {self.processes} process{'es' if self.processes > 1 else ''}"


def ways(saved: str, now: str, same_number: bool) -> Way:
    """Return how a run on engine ``now`` continues a checkpoint of engine ``saved``.

    >>> ways("single", "ddp", False), ways("zero2", "zero2", True), ways("zero2", "zero2", False)
    (<Way.LOAD: 'load'>, <Way.LOAD: 'load'>, <Way.CONVERT: 'convert'>)
    >>> ways("fsdp2", "fsdp2", False), ways("fsdp2", "zero3", True)
    (<Way.LOAD: 'load'>, <Way.CONVERT: 'convert'>)

    Args:
        saved: one of `CONFIGS`.
        now: one of `CONFIGS`.
        same_number: whether the number of processes is the same.
    """
    if {saved, now} <= {SINGLE, DDP} or saved == now == FSDP2:
        return Way.LOAD
    return Way.LOAD if saved == now and same_number else Way.CONVERT


def setup_of(checkpoint: str | Path) -> Setup:
    """Return the engine that made a checkpoint; if the manifest has no config, from the files.

    Raises:
        CheckpointError: the manifest cannot be read, or names an engine that this version does not have.
    """
    made, checkpoint = made_by(checkpoint), Path(checkpoint)
    config = made.get("config") or _CLASSES.get(made.get("engine", "")) or _by_files(checkpoint)
    if config not in CONFIGS:
        raise CheckpointError(
            f"{checkpoint} was made by an engine {config!r}, which this version does not have. Resume with the dpllm "
            "version that made it"
        )
    return Setup(config, made.get("processes", 1))


def _by_files(checkpoint: Path) -> str:
    if is_zero_checkpoint(checkpoint):
        return ZERO3 if divides_parameters(checkpoint) else ZERO2
    sharded = (checkpoint / FSDP2_MODEL).is_dir() or (checkpoint / FSDP2_WHOLE_MODEL).is_file()
    return FSDP2 if sharded else SINGLE


def way_to_load(checkpoint: str | Path, now: Setup, weights_only: bool = False) -> Way:
    """Decide how a checkpoint is continued, from its manifest and the names of its files.

    Args:
        checkpoint: a complete checkpoint.
        now: engine and processes of this run.
        weights_only: whether this run saves and continues only weights (``save_only_model``).

    Raises:
        CheckpointError: the checkpoint lacks an optimizer or a schedule that this run would continue.
    """
    checkpoint, saved = Path(checkpoint), setup_of(checkpoint)
    if is_start(checkpoint):
        return Way.WEIGHTS
    lacks = _lacks(checkpoint, saved.config)
    if not lacks:
        return ways(saved.config, now.config, saved.processes == now.processes)
    if weights_only:
        return Way.WEIGHTS
    raise CheckpointError(
        f"{checkpoint} ({saved}) holds no {' and no '.join(lacks)}, so a resume would silently start these from "
        "scratch. Resume from another checkpoint, or, if it was saved with train.save_only_model=true, set that key "
        "to start them from scratch"
    )


def is_start(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint holds the weights before the first step, which have no other state."""
    return steps_of_weights(checkpoint) == 0


def _lacks(checkpoint: Path, config: str) -> list[str]:
    """Return descriptions of the states that a checkpoint lacks."""
    optimizers = {
        SINGLE: [checkpoint / OPTIMIZER_FILE],
        DDP: [checkpoint / OPTIMIZER_FILE],
        FSDP2: [checkpoint / FSDP2_OPTIMIZER, checkpoint / FSDP2_WHOLE_OPTIMIZER],
    }
    found = [path.exists() for path in optimizers.get(config, [])] or [is_zero_checkpoint(checkpoint)]
    lacking = [] if any(found) else ["optimizer state"]
    return lacking if (checkpoint / SCHEDULER_FILE).is_file() else [*lacking, "learning-rate schedule"]
