"""Start or resume a run with the same command: `train.resume_from_checkpoint: auto`.

A scheduler restarts a job with the same command. This module reads the output folder and decides whether that command
starts or resumes a run; it changes nothing.

All processes must see the same folder. If each machine has a separate folder of the same name, rank 0 writes the
ledger and every machine writes its shards into different folders: checkpoints look complete on each machine, but none
of them can be resumed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from dpllm.config import ConfigError
from dpllm.engines.processes import Processes
from dpllm.engines.saved_state import Setup, Way, way_to_load
from dpllm.privacy.checkpoints import CheckpointError, differing, latest_whole, verify
from dpllm.privacy.ledger import LEDGER_FILE, LedgerContents, is_being_written, read_ledger, require_own_file
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.run_folder import check_checkpoint, ended_as_planned, steps_of_weights
from dpllm.privacy.stated import steps_allowed

logger = logging.get_logger(__name__)

AUTO_RESUME = "auto"


class RunCompletedError(ConfigError):
    """The run in this folder has ended as planned, so a restart has nothing to do."""


@dataclass(frozen=True)
class Restart:
    """The decision how a run starts in its output folder.

    Attributes:
        checkpoint: the checkpoint to resume from; True for the latest complete one, False for none.
        continues: whether the folder's ledger is continued.
    """

    checkpoint: str | bool
    continues: bool


def restart_of(folder: str | Path, wanted: str | bool | None) -> Restart:
    """Decide between a start and a restart.

    Args:
        folder: the output folder.
        wanted: ``train.resume_from_checkpoint``: a checkpoint, True, nothing, or "auto". With "auto" the run starts if
            there is no ledger, resumes if there is a ledger and a complete checkpoint, and starts again if the ledger
            charges no step. A run that ended, but whose model was not saved, is resumed to save one.

    Raises:
        RunCompletedError: "auto", and the run in the folder has ended as planned and saved its model.
        CheckpointError: "auto", and the folder's ledger charges steps but no complete checkpoint is left; or the folder
            has checkpoints without a ledger.
        LedgerError: the ledger was edited.

    >>> restart_of("a/new/folder", "auto")
    Restart(checkpoint=False, continues=False)
    """
    if isinstance(wanted, str) and wanted.strip().lower() in ("true", "false"):
        wanted = wanted.strip().lower() == "true"
    if wanted != AUTO_RESUME:
        return Restart(wanted or False, bool(wanted))
    continues = _to_continue(Path(folder)) is not None
    return Restart(continues, continues)


def completed(folder: Path, ledger: LedgerContents) -> str | None:
    """Return what to say of a run that took its last step and saved its model; None for any other."""
    if not (ended_as_planned(ledger) and _has_model(folder, ledger)):
        return None
    return (
        f"The run in {folder} is completed ({ledger.num_steps} steps); there is nothing to resume. Set "
        "train.output_dir to another folder for another run"
    )


def _to_continue(folder: Path) -> Path | None:
    """Return the checkpoint that "auto" resumes; None where it starts a run. Raises the errors of `restart_of`."""
    checkpoint, passed_over = latest_whole(folder)
    if not (folder / LEDGER_FILE).exists():
        if checkpoint is not None:
            raise CheckpointError(
                f"{folder} holds {checkpoint.name} but no {LEDGER_FILE}, so the steps of that run are not charged. "
                "Restore the run's own ledger, or set train.output_dir to an empty folder"
            )
        return None
    ledger = read_ledger(folder / LEDGER_FILE)
    if (words := completed(folder, ledger)) is not None:
        raise RunCompletedError(words)
    if not ledger.num_steps:
        return None  # a new run may replace it (`dpllm.privacy.run_folder`)
    if checkpoint is not None:
        return checkpoint
    last = f"; {passed_over[0][0].name} is incomplete ({passed_over[0][1].rstrip('.')})" if passed_over else ""
    raise CheckpointError(
        f"The ledger in {folder} charges {ledger.num_steps} steps, but no whole checkpoint holds them{last}, so "
        "there is nothing to resume from. The steps stay charged; set train.output_dir to another folder for a new "
        "run, and save more often (train.save_steps)"
    )


def refuse_to_go_back(folder: str | Path, checkpoint: str | Path) -> None:
    """Check that the finished model of a run would not be replaced by older weights.

    All steps of such a run are charged, so a resume takes no step and would save the checkpoint's weights as the model.
    A run whose last save failed has no finished model, and can be resumed to write one.

    Args:
        folder: folder of the run.
        checkpoint: the checkpoint to resume from.

    Raises:
        CheckpointError: the run ended as planned, its model is in the folder, and the checkpoint has taken fewer steps.
    """
    ledger, taken = read_ledger(Path(folder) / LEDGER_FILE), steps_of_weights(checkpoint)
    if taken is None or taken >= ledger.num_steps or not ended_as_planned(ledger):
        return
    if _has_model(folder, ledger):
        raise CheckpointError(
            f"The run in {folder} is completed ({ledger.num_steps} steps) and its model is saved, but {checkpoint} "
            f"has taken {taken}. A resume would take no step and replace the model by older weights. To use the older "
            f"weights, load {checkpoint}, whose report states the same ε; for another run, set train.output_dir to "
            "another folder"
        )


def _has_model(folder: str | Path, ledger: LedgerContents) -> bool:
    """Return whether a model that the ledger names is in the folder; a crash may come between the end and the save."""
    return any(not differing(folder, release["files"]) for release in reversed(ledger.notes.released))


def refuse_empty_model(folder: str | Path, checkpoint: str | Path) -> None:
    """Check that a resume without remaining steps has a trained model to release.

    Args:
        folder: folder of the run.
        checkpoint: the checkpoint to resume from.

    Raises:
        CheckpointError: all steps are charged, and the checkpoint is the start of the run.
    """
    if steps_of_weights(checkpoint) != 0:
        return
    charged = read_ledger(Path(folder) / LEDGER_FILE)
    if charged.num_steps >= (charged.steps_allowed or PrivacyPlan.load(Path(folder) / PLAN_FILE).num_steps):
        raise CheckpointError(
            f"All {charged.num_steps} steps of the run in {folder} are charged, but only {checkpoint}, the weights "
            "before the first step, is left: a resume would take no step and release an untrained model. Set "
            "train.output_dir to another folder for a new run, and save more often (train.save_steps)"
        )


def begin_in(folder: str | Path, wanted: str | bool | None, processes: Processes) -> Restart:
    """Decide as `restart_of` on all processes together: they check that they see one folder, and rank 0 reads it.

    Raises:
        ConfigError: the processes do not see the same folder.
        ValueError: `restart_of` raised it; on every process.
    """
    require_shared_folder(folder, processes)
    return processes.from_main(lambda: restart_of(folder, wanted))


@dataclass(frozen=True)
class Continued:
    """The checkpoint that a run continues.

    Attributes:
        checkpoint: the folder.
        way: how this run's engine loads it.
    """

    checkpoint: Path
    way: Way


def checkpoint_to_resume(
    folder: Path, wanted: str | bool | None, processes: Processes, setup: Setup, weights_only: bool = False
) -> Continued | None:
    """Return the checkpoint to continue from, after checking that it is complete; None for a new run.

    Args:
        folder: the run's output folder.
        wanted: a checkpoint, True for the latest complete one, None or False for none.
        processes: all of them call this together.
        setup: engine and processes of this run.
        weights_only: whether this run saves and continues weights only (``save_only_model``).

    Raises:
        CheckpointError: the requested checkpoint, or every one, is incomplete; or it is older than a completed run; or
            it lacks a state that this run would continue.
        LedgerError: it belongs to a different run than the folder's ledger, or the ledger was cut or restored from a
            copy.
    """
    if not wanted:
        return None

    def find() -> Continued:
        checkpoint = whole()
        check_checkpoint(folder / LEDGER_FILE, checkpoint)
        refuse_to_go_back(folder, checkpoint)
        refuse_empty_model(folder, checkpoint)
        return Continued(checkpoint, way_to_load(checkpoint, setup, weights_only))

    def whole() -> Path:
        if not isinstance(wanted, bool):
            verify(wanted)
            return Path(wanted)
        found, passed_over = latest_whole(folder)
        for path, reason in passed_over:
            logger.warning("%s is skipped: %s", path, reason)
        if found is None:
            raise CheckpointError(
                f"{folder} holds no complete checkpoint, so there is nothing to resume. Its ledger stays as evidence "
                "of the steps that ran; start a new run in another train.output_dir"
            )
        logger.warning("resuming from %s", found)
        return found

    return processes.from_main(find)


@dataclass(frozen=True)
class RunSoFar:
    """The progress of the run in a folder.

    Attributes:
        words: the progress in words, one line.
        charged: steps that the ledger charges; None: the ledger or the plan cannot be read.
        lost: charged steps that the latest complete checkpoint does not contain; None: the run cannot be resumed now.
        left: steps that a resume takes; None as for ``lost``.
    """

    words: str
    charged: int | None = None
    lost: int | None = None
    left: int | None = None


def run_so_far(folder: str | Path, planned: PrivacyPlan) -> RunSoFar | None:
    """Read how far the run of a folder has progressed, and what a restart would do; nothing is changed.

    Args:
        folder: an output folder.
        planned: the plan of the run that would be started there.

    Returns:
        None if the folder holds no run that charged a step.
    """
    folder, charged, so_far = Path(folder), None, ""
    try:
        if not (folder / LEDGER_FILE).exists():
            return None
        contents = read_ledger(folder / LEDGER_FILE)
        if not contents.num_steps:
            return None
        plan, charged = PrivacyPlan.load(folder / PLAN_FILE), contents.num_steps
        so_far = f"{charged:,} of {plan.num_steps:,} steps are charged"
        if is_being_written(folder / LEDGER_FILE):
            return RunSoFar(f"{so_far}, and the run is under way", charged)
        if plan.hash != planned.hash:
            return RunSoFar(
                f"{so_far}, under a different plan, so this run cannot continue it. Set "
                "train.output_dir to another folder, or restore the settings of that run",
                charged,
            )
        checkpoint = _to_continue(folder)
        assert checkpoint is not None, "the ledger charges steps"
        require_own_file(contents)
        check_checkpoint(folder / LEDGER_FILE, checkpoint)
        refuse_empty_model(folder, checkpoint)
        taken = steps_of_weights(checkpoint)
        allowed = steps_allowed(plan, contents)
    except (OSError, ValueError) as error:
        return RunSoFar(f"{so_far}. {error}" if so_far else str(error), charged)
    lost = charged - (taken or 0)
    left = max(0, (plan.num_steps if allowed is None else allowed) - charged)
    words = lost_words(checkpoint.name, charged, lost, left) if lost else f"{so_far}. {_remain(left)}"
    return RunSoFar(words, charged, lost, left)


def to_go_on(plan: PrivacyPlan, contents: LedgerContents) -> list[tuple[str, str]]:
    """Return how to continue a stopped run, and the steps that a resume leaves out.

    Noise that is correlated over steps begins again at a resume, so fewer than the remaining steps may fit into ε.

    Args:
        plan: the plan of the run.
        contents: contents of its ledger.
    """
    try:
        allowed = steps_allowed(plan, contents)
    except ValueError as error:
        return [("to continue", f"not possible: {error}")]
    command = [("to continue", "the same command with train.resume_from_checkpoint=auto")]
    if allowed is None:
        return command
    taken = contents.num_steps
    return [*command, ("it then takes", cut_short(allowed - taken, plan.num_steps - taken))]


def cut_short(steps: int, left: int) -> str:
    """Return the steps of a resumed run in words, with the reason if they are fewer than remained.

    >>> cut_short(176, 176)
    '176 private steps'

    Args:
        steps: steps that it takes.
        left: steps of the plan that were not taken.
    """
    if left <= 0:
        return "no private step: all are charged"
    words = f"{steps:,} private step{'s' * (steps != 1)}"
    if steps >= left:
        return words
    return f"{words}, not all {left:,} that were left: a resume begins new noise, and more steps would exceed ε"


def lost_words(checkpoint: str, charged: int, lost: int, left: int) -> str:
    """Return in words how many charged steps a resume has lost, and how many it takes.

    >>> print(lost_words("checkpoint-16", 24, 8, 15))
    8 of 24 charged steps were lost: checkpoint-16 does not hold them, and they stay charged. 15 steps remain

    Args:
        checkpoint: name of the checkpoint.
        charged: steps that the ledger charges.
        lost: charged steps that the checkpoint's weights do not contain.
        left: steps that the resumed run takes.
    """
    were = "step was" if charged == 1 else "steps were"
    them, they = ("it", "it stays") if lost == 1 else ("them", "they stay")
    return (
        f"{lost:,} of {charged:,} charged {were} lost: {checkpoint} does not hold {them}, and {they} charged. "
        f"{_remain(left)}"
    )


def _remain(left: int) -> str:
    return "No step remains" if left == 0 else "1 step remains" if left == 1 else f"{left:,} steps remain"


def steps_words(charged: int, planned: int, lost: int) -> str:
    """Return the steps of a run in words for its summary: those charged and those in the weights.

    >>> steps_words(24, 24, 0), steps_words(24, 24, 8)
    ('24 of 24', '24 of 24 charged, 16 in the released weights (8 were lost before a resume)')

    Args:
        charged: steps that the ledger charges.
        planned: steps of the plan.
        lost: charged steps that the weights do not contain.
    """
    words = f"{charged} of {planned}"
    if not lost:
        return words
    were = "was" if lost == 1 else "were"
    return f"{words} charged, {charged - lost} in the released weights ({lost} {were} lost before a resume)"


_WAIT = 20.0  # seconds that a network file system may take to show a new file to another machine
_PAUSE = 0.2


def require_shared_folder(folder: str | Path, processes: Processes) -> None:
    """Check that every process can read the files that rank 0 writes; all processes call this together.

    Rank 0 creates the folder, writes a random number into a file, and deletes the file afterwards. Nothing else is
    changed.

    Args:
        folder: the output folder of a run.
        processes: all processes of the run.

    Raises:
        ConfigError: some processes do not see the file; the message names them and their machines.
        OSError: rank 0 cannot write into the folder; on every process.
    """
    if processes.size == 1:
        return
    folder = Path(folder)
    made: list[Path] = []

    def write() -> tuple[str, str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        name, nonce = f".shared-folder-{secrets.token_hex(8)}", secrets.token_hex(16)
        with (folder / name).open("x", encoding="ascii") as file:
            made.append(folder / name)
            file.write(nonce)
            file.flush()
            os.fsync(file.fileno())
        return name, nonce, str(folder)

    name, nonce, told = processes.from_main(write)
    try:
        answers = processes.gather((_reads(folder / name, nonce), socket.gethostname()))
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(answers) if not sees]
    if blind:
        shown = ", ".join(blind[:8]) + (f" and {len(blind) - 8} more" if len(blind) > 8 else "")
        raise ConfigError(
            f"The output folder {told} of rank 0 (on {answers[0][1]}) is not the one that {shown} sees, so files "
            "written by rank 0 cannot be read there. Set train.output_dir to the same folder on every process, on "
            "a file system that all machines share; nothing was charged"
        )


def _reads(path: Path, nonce: str) -> bool:
    """Return whether the file becomes visible in time with the right content."""
    end = time.monotonic() + _WAIT
    while True:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="ascii") == nonce:
                return True
            os.listdir(path.parent)  # makes a network file system refresh its view
        # If the folder itself does not exist, waiting for a cache does not help.
        if time.monotonic() >= end or not _may_appear(path.parent):
            return False
        time.sleep(_PAUSE)


def _may_appear(folder: Path) -> bool:
    """Return whether the folder is on a file system with a delayed view; a local disk shows a file at once."""
    try:
        kinds = {fields[1]: fields[2] for fields in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    except (OSError, IndexError):
        return True
    here = folder.resolve()
    mount = next((str(parent) for parent in (here, *here.parents) if str(parent) in kinds), "/")
    return kinds.get(mount, "") not in {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "vfat"}
