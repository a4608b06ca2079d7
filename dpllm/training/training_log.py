"""Write training losses and metrics to a file of their own, and make a Trainer state without them.

ε covers a checkpoint, so it must cover every file in it: its ``trainer_state.json`` keeps the step, the epoch, the
learning rate and ε of each log entry. Losses, gradient norms and metrics depend on private rows; they go to one file
outside all checkpoints, which the report lists as not covered.

The file is written only by appending, one JSON object per line. A resumed run marks the step from which it continues,
so that entries of lost steps are skipped.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from dpllm.privacy.checkpoints import CheckpointError
from dpllm.privacy.private_folder import private_path
from dpllm.report.disclosures import LOG_FILE, ON_PRIVATE_ROWS

_PUBLIC_ENTRIES = ("step", "epoch", "learning_rate", "epsilon")
# Fields of a TrainerState; every other field is reset, including those that a later release adds.
_PUBLIC_FIELDS = (
    *("epoch", "global_step", "max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
    *("num_train_epochs", "is_local_process_zero", "is_world_process_zero"),
)
_STEERED = ("best_metric", "best_global_step", "best_model_checkpoint")
_PUBLIC_CALLBACKS = ("TrainerControl",)
_STEERING_CALLBACKS = ("EarlyStoppingCallback",)
_RANDOM_STATES = ("rng_state*.pth", "random_states_*.pkl")


def covered_state(state: TrainerState, eval_is_public: bool = False) -> TrainerState:
    """Return a copy of a Trainer's state with only the figures that ε covers.

    Args:
        state: state of the Trainer; it is not changed.
        eval_is_public: whether evaluation rows are declared public; only results on them are then kept.

    >>> state = TrainerState(log_history=[{"loss": 2.5, "step": 1, "epsilon": 0.5}, {"eval_loss": 2.0, "step": 1}])
    >>> covered_state(state).log_history
    [{'step': 1, 'epsilon': 0.5}]
    """
    fields = _PUBLIC_FIELDS + (_STEERED if eval_is_public else ())
    names = _PUBLIC_CALLBACKS + (_STEERING_CALLBACKS if eval_is_public else ())
    known = {field.name for field in dataclasses.fields(TrainerState)}
    history = []
    for entry in state.log_history:
        public = eval_is_public and ON_PRIVATE_ROWS not in entry
        kept = {
            name: value
            for name, value in entry.items()
            if name in _PUBLIC_ENTRIES or (public and name.startswith("eval_"))
        }
        if kept.keys() - {"step", "epoch"}:
            history.append(kept)
    stateful: Any = state.stateful_callbacks or {}
    callbacks: Any = {name: value for name, value in stateful.items() if name in names}
    return TrainerState(
        **{name: getattr(state, name) for name in fields if name in known},
        log_history=history,
        stateful_callbacks=callbacks,
    )


def refuse_random_states(folder: Path) -> None:
    """Check that a checkpoint holds no file with the state of a random generator.

    Raises:
        CheckpointError: it holds such a file; the message names it.
    """
    found = sorted(path for pattern in _RANDOM_STATES for path in folder.rglob(pattern))
    if found:
        raise CheckpointError(
            f"{found[0]} holds the state of random generators, which reveals how many random numbers private rows "
            "used. A checkpoint must not contain it: remove the callback or hook that writes it"
        )


class TrainingLog:
    """The file of one run's losses and metrics; one process writes it.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        """Store the path of the file."""
        self._folder, self.path = folder, Path(folder) / LOG_FILE

    def begin(self, step: int) -> list[dict[str, Any]]:
        """Mark the step at which a run begins or continues.

        Args:
            step: step of the checkpoint from which it continues, or 0.

        Returns:
            The entries logged up to this step.
        """
        kept = [entry for entry in self.read() if entry.get("step", 0) <= step] if step else []
        if self.path.exists():
            if not self.path.read_bytes().endswith(b"\n"):  # a line truncated by a crash would swallow the next one
                with self.path.open("a", encoding="utf-8") as file:
                    file.write("\n")
            self._append({"resumed_at": step})
        return kept

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry."""
        self._append(entry)

    def read(self) -> list[dict[str, Any]]:
        """Return the entries, without those of lost steps; a line truncated by a crash is left out."""
        entries: list[dict[str, Any]] = []
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "resumed_at" in entry:
                entries = [old for old in entries if old.get("step", 0) <= entry["resumed_at"]]
            else:
                entries.append(entry)
        return entries

    def _append(self, entry: dict[str, Any]) -> None:
        private_path(self._folder, LOG_FILE)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")


class LogKeeper(TrainerCallback):
    """Callback that restores in a resumed Trainer the losses that its checkpoint does not contain."""

    def __init__(self, folder: str | Path) -> None:
        """Store the run's folder."""
        self.log = TrainingLog(folder)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Read the file of the folder of this run, on the process that writes it."""
        self.log = TrainingLog(args.output_dir)
        if state.is_world_process_zero:
            kept = self.log.begin(state.global_step)
            if kept:
                state.log_history[:] = kept
