"""One command for the first start and for every restart: `train.resume_from_checkpoint: auto`.

Place in the flow: below `dpllm.training.trainer`. A scheduler restarts a job with the same command. This module reads
the output folder and decides whether that command starts or resumes a run; it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from dpllm.config import ConfigError
from dpllm.engines.processes import Processes
from dpllm.privacy.checkpoints import CheckpointError, differing, latest_whole, verify
from dpllm.privacy.identity import check_checkpoint, ended_as_planned, steps_of_weights
from dpllm.privacy.ledger import LEDGER_FILE, LedgerContents, read_ledger
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.stated import steps_allowed
from dpllm.training.shared_folder import require_shared_folder

logger = logging.get_logger(__name__)

AUTO_RESUME = "auto"


class RunCompletedError(ConfigError):
    """The run in this folder has ended as planned, so a restart has nothing to do."""


@dataclass(frozen=True)
class Restart:
    """The decision for a start in its output folder.

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
            charges no step.

    Raises:
        RunCompletedError: "auto", and the run in the folder has ended as planned.
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
    folder = Path(folder)
    checkpoint, passed_over = latest_whole(folder)
    if not (folder / LEDGER_FILE).exists():
        if checkpoint is not None:
            raise CheckpointError(
                f"{folder} holds {checkpoint.name} but no {LEDGER_FILE}: the steps of that run are not charged. "
                "Put the run's own ledger back, or set train.output_dir to an empty folder"
            )
        return Restart(False, False)
    ledger = read_ledger(folder / LEDGER_FILE)
    if ended_as_planned(ledger):
        raise RunCompletedError(
            f"The run in {folder} is completed ({ledger.num_steps} steps); there is nothing to resume. Set "
            "train.output_dir to another folder for another run"
        )
    if checkpoint is not None:
        return Restart(True, True)
    if ledger.num_steps:
        last = f"; {passed_over[0][0].name} is not whole ({passed_over[0][1].rstrip('.')})" if passed_over else ""
        raise CheckpointError(
            f"The ledger in {folder} charges {ledger.num_steps} steps, and no whole checkpoint holds them{last}: there "
            "is nothing to resume from. The steps stay charged; set train.output_dir to another folder for a new run, "
            "and save more often (train.save_steps)"
        )
    return Restart(False, False)  # nothing was charged: a new run may replace it (`dpllm.privacy.unused`)


def refuse_to_go_back(folder: str | Path, checkpoint: str | Path) -> None:
    """Check that the finished model of a run is not replaced by older weights.

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
    if any(not differing(folder, release["files"]) for release in reversed(ledger.notes.released)):
        raise CheckpointError(
            f"The run in {folder} is completed ({ledger.num_steps} steps) and its model is saved; {checkpoint} has "
            f"taken {taken}. A resume would take no step and replace the model by older weights. To use the older "
            f"weights, load {checkpoint}, whose report states the same ε; for another run, set train.output_dir to "
            "another folder"
        )


def begin_in(folder: str | Path, wanted: str | bool | None, processes: Processes) -> Restart:
    """Do as `restart_of` on all processes together: they check that they see one folder, and rank 0 reads it.

    Raises:
        ConfigError: the processes do not see the same folder.
        ValueError: `restart_of` raised it; on every process.
    """
    require_shared_folder(folder, processes)
    return processes.from_main(lambda: restart_of(folder, wanted))


def checkpoint_to_resume(folder: Path, wanted: str | bool | None, processes: Processes) -> Path | None:
    """Return the checkpoint to continue from, after checking that it is complete; None for a new run.

    Args:
        folder: the run's output folder.
        wanted: a checkpoint, True for the latest complete one, None or False for none.
        processes: all of them call this together.

    Raises:
        CheckpointError: the requested checkpoint, or every one, is incomplete; or it is older than a completed run.
        LedgerError: it is of another run than the folder's ledger, or the ledger was cut or restored from a copy.
    """
    if not wanted:
        return None

    def find() -> Path:
        checkpoint = whole()
        check_checkpoint(folder / LEDGER_FILE, checkpoint)
        refuse_to_go_back(folder, checkpoint)
        return checkpoint

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


def to_go_on(plan: PrivacyPlan, contents: LedgerContents) -> list[tuple[str, str]]:
    """Return how to continue a stopped run, and the steps that a resume leaves out.

    Noise that is correlated over steps begins again at a resume, so fewer steps than are left may fit into ε.

    Args:
        plan: the plan of the run.
        contents: contents of its ledger.
    """
    try:
        allowed = steps_allowed(plan, contents)
    except ValueError as error:
        return [("to go on", f"not possible: {error}")]
    command = [("to go on", "the same command with train.resume_from_checkpoint=auto")]
    if allowed is None:
        return command
    taken = contents.num_steps
    return [*command, ("it then takes", cut_short(allowed - taken, plan.num_steps - taken))]


def cut_short(steps: int, left: int) -> str:
    """Return the steps of a resumed run in words, with the reason if they are fewer than were left.

    >>> cut_short(176, 176)
    '176 private steps'

    Args:
        steps: those that it takes.
        left: those of the plan that were not taken.
    """
    words = f"{steps:,} private steps"
    if steps >= left:
        return words
    return f"{words}, not all {left:,} that were left: a resume begins new noise, and more steps would exceed ε"
