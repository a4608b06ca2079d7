"""All outputs of a private run that the Trainer makes: logged figures, saves and checkpoints, the card, the Hub.

Each of the Trainer's own outputs is overridden here; `dpllm.DPTrainer` trains. A figure that ε does not cover is
counted in the ledger and kept out of checkpoints (`dpllm.training.training_log`), a model is saved with its guarantee,
the card states it, and an upload takes files from an allow-list (`dpllm.report.publishing`).

With an average of the weights (`dpllm.training.averaging`), the model holds the weights of the last step during the
training, and the average only for an evaluation. Afterwards it holds the average, so that whatever is
evaluated or saved is what is released. A checkpoint holds the weights of its step, and next to them the average.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from dpllm.config import TASKS, ConfigError, PrivacyConfig
from dpllm.data.shared_records import hash_of_rows, refuse_own_rows
from dpllm.data.units import UnitIndex
from dpllm.engines import whole_state
from dpllm.engines.finite import require_finite
from dpllm.engines.processes import Processes
from dpllm.mechanism.averages import LAST_FOLDER
from dpllm.models.load import changes_of_base
from dpllm.models.merging import MERGED_FOLDER, merged
from dpllm.models.run_weights import note_changes
from dpllm.models.tasks import is_of_transformers, loading_class, task_of
from dpllm.privacy.accounting import Guarantee
from dpllm.privacy.checkpoints import (
    STAGING_FOLDER,
    CheckpointError,
    checkpoint_folder,
    discard_staging,
    discard_start,
    prepare_staging,
    publish,
    rotate,
    saving,
    staging_folder,
)
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan
from dpllm.privacy.rounding import epsilon_to_log
from dpllm.privacy.run_folder import note_release, refuse_other_run, snapshot
from dpllm.report.disclosures import (
    DESTINATIONS,
    EVALUATION_DURING,
    EVALUATION_OUTSIDE,
    GRADIENT_NORM,
    LOGGED,
    ON_PRIVATE_ROWS,
    PREDICTION,
    Evaluating,
    not_covered,
    own_callbacks,
    own_methods,
    own_metrics,
    receivers,
)
from dpllm.report.model_card import has_card, keep_own_card, write_model_card
from dpllm.report.models import PrivacyReport
from dpllm.report.publishing import PublishError, files_to_publish, note_uploaded, require_publishable, upload
from dpllm.report.statement import ReleaseNotes, notes_in, privacy_report, write_report
from dpllm.training.averaging import Averaging
from dpllm.training.continued_trainer import ContinuedTrainer
from dpllm.training.ledger_notes import PrivateSources
from dpllm.training.run import PrivateRun
from dpllm.training.save_rehearsal import bytes_to_write, is_whole, until_there_is_room
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.trainer_setup import Prepared
from dpllm.training.training_log import LogKeeper, covered_state, refuse_random_states

logger = logging.get_logger(__name__)

LOST_NOTES = (
    "An earlier report in this folder could not be read, so this one lacks its notes (an audit, other uses of "
    "the data). Add them again with `dpllm report`, or confirm that there were none."
)


@dataclasses.dataclass(frozen=True)
class StartingModel:
    """The model as it was passed to the Trainer, which a card names.

    Attributes:
        name: name under which it was loaded. None: it was not loaded.
        task: see `dpllm.models.tasks.task_of`.
    """

    name: str | None
    task: str | None

    @classmethod
    def of(cls, model: Any) -> StartingModel:
        """Read name and task before training changes the model."""
        return cls(getattr(getattr(model, "config", None), "_name_or_path", None), task_of(model))

    def write_card(
        self, folder: Path, report: PrivacyReport, trained: Any, base_model: str | None = None, **metadata: Any
    ) -> None:
        """Write the card of the trained model.

        Args:
            folder: folder of the report.
            report: the privacy report.
            trained: the trained model.
            base_model: the base model's Hub id. None: `name`.
            metadata: other arguments of `dpllm.report.model_card.write_model_card`.
        """
        config, adapter = getattr(trained, "config", None), isinstance(trained, PeftModel)
        arguments, rows = changes_of_base(trained) if adapter else ({}, None)
        name = trained.active_adapter if adapter else "default"
        inner = trained.get_base_model() if adapter else trained
        known = is_of_transformers(inner)
        write_model_card(
            folder,
            report,
            base_model=base_model or self.name or None,
            task=self.task,
            adapter=adapter,
            num_labels=getattr(config, "num_labels", None) if self.task and TASKS[self.task].needs_labels else None,
            base_arguments=arguments,
            embedding_rows=rows,
            subfolder=name if isinstance(name, str) and name != "default" else None,
            loading_class=loading_class(inner) if known else None,
            own_class=None if known else type(inner).__name__,
            **metadata,
        )


class TrainerOutputs(ContinuedTrainer):
    """The Trainer's outputs, with the guarantee; `dpllm.DPTrainer` is the class to use.

    Attributes:
        notes: facts about the release that only people know; set them before ``save_model()``.
        sources: sources of the run in addition to its rows; a program that read the records adds to it before
            ``train()``.
        declared_points: open points of the report that follow from declarations outside of the Trainer; set them before
            ``train()``.
        eval_is_public: whether evaluation rows are declared public.
    """

    notes: ReleaseNotes
    sources: PrivateSources
    declared_points: Sequence[str] = ()
    eval_is_public: bool = False
    hub_model_id: Any
    _prepared: Prepared
    _start: StartingModel
    _log_keeper: LogKeeper
    _merges: bool
    _ends: Sequence[int] = ()  # tokens that end a text, if the rows are conversations
    _run: PrivateRun | None = None  # of the current or the last ``train()``
    _averaging: Averaging | None = None
    _steps_began: float | None = None  # after the callbacks at the start of the training
    _evaluating: Evaluating | None = None
    _predictions: int = 0  # calls of `predict` that run
    _log_disclosed = False
    _compared_rows: Sequence[tuple[Any, str]] = ()  # evaluation rows that are not the private ones, and their hashes
    _is_staging = False  # whether a checkpoint is being written into the staging folder

    # ------------------------------------------------------- parts of the run, to read

    @property
    def privacy(self) -> PrivacyConfig:
        """The privacy guarantee."""
        return self._prepared.privacy

    @property
    def plan(self) -> PrivacyPlan:
        """The constants of the run."""
        return self._prepared.plan

    @property
    def units(self) -> UnitIndex:
        """The rows of each unit, also if rows are drawn separately."""
        return self._prepared.units

    @property
    def processes(self) -> Processes:
        """All processes of the run."""
        return self._prepared.processes

    @property
    def ledger(self) -> SharedLedger | None:
        """The ledger of the current or the last run. None: `train` has not begun one."""
        return None if self._run is None else self._run.ledger

    @property
    def _module(self) -> nn.Module:
        model: Any = self.model
        return model

    @property
    def _is_adapter(self) -> bool:
        return isinstance(self.model, PeftModel)

    @property
    def _is_attached(self) -> bool:
        return self._run is not None and self._run.clipper is not None

    @property
    def averaging(self) -> Averaging | None:
        """The average of the weights in the current or the last run. None: the last step's weights are released."""
        return self._averaging

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of the steps so far, from the ledger; after `train`, the one that the report states."""
        if self.ledger is None or self.ledger.num_steps == 0:
            return self.plan.guarantee.of(())
        if self.plan.selection is not None:
            return self.plan.guarantee
        return self.plan.guarantee.of(self.ledger.history)

    @property
    def epsilon(self) -> float:
        """Return ε spent so far at the plan's δ, from the ledger; after `train`, the ε stated by the report."""
        return self.guarantee.epsilon

    def privacy_report(self) -> dict[str, Any]:
        """Return the privacy statement of all steps so far, from the ledger; the same as ``privacy_report.json``."""
        if self.ledger is None:
            raise ValueError("There is nothing to report before train(): call it first.")
        return privacy_report(self.plan, read_ledger(self.ledger.path), self.notes).to_dict()

    # ------------------------------------------------------------------ figures

    def disclose(self, what: str, count: int = 1) -> None:
        """Record in the ledger an output that the guarantee does not cover; the report lists it.

        Args:
            what: the output, for instance "evaluation on private rows".
            count: number of outputs.
        """
        if self.ledger is None:
            raise ValueError("There is no ledger yet: call train() first, which opens it.")
        self.ledger.append_disclosure(what, count)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the ε spent so far next to the loss, and count every figure that ε does not cover.

        Each entry is also kept in `LOG_FILE`, which the report lists as not covered.

        The Trainer's ``grad_norm`` is logged as ``noisy_grad_norm``: it is the norm of the private gradient after
        clipping and noise, which ε covers.
        """
        is_public = self._evaluating is not None and self._evaluating.public
        if self.eval_is_public and not is_public and any(name.startswith("eval_") for name in logs):
            logs = {**logs, ON_PRIVATE_ROWS: 1}
        if "grad_norm" in logs:
            logs[GRADIENT_NORM] = logs.pop("grad_norm")
        if "loss" in logs:
            logs["epsilon"] = epsilon_to_log(self.epsilon)
        if "train_runtime" in logs and self._steps_began is not None:
            _count_from(logs, time.time() - self._steps_began)
        for what, count in not_covered(logs, self._evaluating, self.is_in_train).items():
            self._note(what, count)
        super().log(logs, start_time)
        if self.ledger is not None and self.args.should_save:
            if not self._log_disclosed:
                self.disclose(LOGGED)
                self._log_disclosed = True
            self._log_keeper.log.append(self.state.log_history[-1])

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as ``Trainer`` does; the ledger counts it, unless the rows were declared public.

        Args:
            eval_dataset: rows; or None or the name of one of several: the ``eval_dataset`` of the constructor.
                ``eval_is_public`` is a declaration about that one only.
            ignore_keys: as for ``Trainer``.
            metric_key_prefix: as for ``Trainer``.
        """
        own = self.eval_dataset if eval_dataset is None else eval_dataset
        own = self.eval_dataset.get(own) if isinstance(own, str) and isinstance(self.eval_dataset, Mapping) else own
        outer = self._evaluating  # an evaluation during which a callback runs this one
        self._evaluating = Evaluating(metric_key_prefix, self._is_public(own))
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._evaluating = outer
            if outer is None:
                self._renew_report()

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predict as ``Trainer`` does; the ledger counts it, unless the rows were declared public."""
        if not self._is_public(test_dataset):
            self._note(PREDICTION, 1)
        self._predictions += 1
        try:
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._predictions -= 1
            self._renew_report()

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as ``Trainer`` does, with the average where ``average.evaluate`` asks for it.

        A direct call from a program counts as an evaluation.
        """
        outer = self._evaluating is None and not self._predictions
        public = self._is_public(getattr(dataloader, "dataset", None))
        shows = self.averaging is not None and self.averaging.average.evaluate == "average"
        with self.weights_to_release() if shows else contextlib.nullcontext():
            if outer and not public:
                self._note(EVALUATION_DURING if self.is_in_train else EVALUATION_OUTSIDE, 1)
            try:
                return super().evaluation_loop(dataloader, *args, **kwargs)
            finally:
                if outer:
                    self._renew_report()

    def _is_public(self, dataset: Any) -> bool:
        """Return whether rows are ``eval_dataset``, or one of several, and declared public; on all processes together.

        Rows that replaced it are compared with the private rows before they are used.

        Raises:
            DataError: they are the private rows (`dpllm.data.shared_records`).
        """
        several = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else ()
        if not self.eval_is_public or not any(dataset is one for one in (self.eval_dataset, *several)):
            return False
        self._refuse_private_evaluation(dataset)
        return True

    def _refuse_private_evaluation(self, dataset: Any) -> None:
        """Check that rows declared public are not the private rows; once for data sets with the same rows.

        Raises:
            DataError: they are (`dpllm.data.shared_records`).
        """
        if not self.eval_is_public or dataset is None:
            return
        rows = hash_of_rows(dataset)
        if any(dataset is one and rows == then for one, then in self._compared_rows):
            return
        self.processes.together(lambda: refuse_own_rows(dataset, self._prepared.dataset))
        self._compared_rows = [(dataset, rows), *(pair for pair in self._compared_rows if pair[0] is not dataset)]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the noisy gradient, measured without writing to it: the watch refuses any write."""
        if self.is_deepspeed_enabled:
            return super()._get_grad_norm(model, grad_norm)
        norm: Any = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _note(self, what: str, count: int) -> None:
        """Count a disclosure, including one from before the ledger was opened."""
        if self.ledger is None:
            self._noted_before[what] += count
        else:
            self.disclose(what, count)

    @property
    def _noted_before(self) -> Counter[str]:
        return self.__dict__.setdefault("_noted_before_the_ledger", Counter())

    def _note_outputs(self, ledger: SharedLedger) -> None:
        """Write the destinations of figures, the declarations and the earlier outputs into an open ledger."""
        ledger.append_fact(DESTINATIONS, receivers(self.callback_handler.callbacks))
        self.sources.note(ledger, self.model, self.plan)
        for point in self.declared_points:
            ledger.append_open_point(point)
        for name in own_callbacks(self.callback_handler.callbacks):
            ledger.append_open_point(
                f"The callback {name} runs during training, where it can read losses of private rows: make sure that "
                "neither learning rate, nor weights, nor the end of training follow them."
            )
        for name in own_methods(self):
            ledger.append_open_point(
                f"The method {name} of a custom Trainer runs during training, where it can read losses of "
                "private rows: make sure that neither learning rate, nor weights, nor the end of training follow them."
            )
        for name in own_metrics(self):
            ledger.append_open_point(
                f"The function {name} computes metrics during training, where it reads losses or outputs of private "
                "rows: make sure that neither learning rate, nor weights, nor the end of training follow them."
            )
        for what, count in self._noted_before.items():
            ledger.append_disclosure(what, count)
        self._noted_before.clear()

    def _renew_report(self) -> None:
        """Write the report and card of a finished run again, because something was counted after they were written."""
        if self.ledger is None or self.is_in_train or not self.processes.is_main:
            return
        folder = self.ledger.path.parent
        contents = read_ledger(self.ledger.path)
        if contents.end is not None:
            self._write_guarantee(folder, with_card=has_card(folder))

    # ------------------------------------------------------------------- saving

    def weights_to_release(self) -> AbstractContextManager[None]:
        """Put the weights to release into the model while a block runs; on all processes together.

        During the training these are the average, if the run has one; afterwards the model holds them anyway.
        """
        return contextlib.nullcontext() if self.averaging is None else self.averaging.shown()

    def last_weights(self) -> AbstractContextManager[None]:
        """Put the weights after the last step into the model while a block runs; on all processes together.

        Within the block, `save_model` still saves the average, which the report names; ``average.keep_last`` saves the
        last weights as well.
        """
        return contextlib.nullcontext() if self.averaging is None else self.averaging.hidden()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the consolidated model, and with it the plan, the ledger so far, the privacy report and a model card.

        Call it on all processes together; rank 0 writes. The model loads in plain transformers, an adapter in plain
        PEFT. A checkpoint of a fully sharded, fully trained model holds only shards, as set in the accelerate
        configuration.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        sharded = _internal_call and self.is_fsdp_enabled and not self.args.save_only_model and self._shards_suffice()
        self._save_with_guarantee(folder, whole=not sharded)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_with_guarantee(self, folder: Path, whole: bool) -> None:
        self.processes.from_main(lambda: refuse_other_run(folder, self.ledger))
        if self._run is not None:
            self.processes.together(functools.partial(self._run.require_attached, self._module))
        require_finite(self._module, self.processes, f"{folder} is not written: the model has")
        if self.args.should_save and (kept := keep_own_card(folder)) is not None:
            logger.warning(
                "%s was not written by dpllm; it is kept as %s, and a model card replaces it",
                folder / "README.md",
                kept.name,
            )
        if self._run is not None:
            with contextlib.nullcontext() if self._is_attached else self.weights_to_release():
                note_changes(self._run.weights, self._module, self.ledger, self.processes)
        before = snapshot(folder) if self.args.should_save else {}
        # A checkpoint continues from the weights of its step.
        with contextlib.nullcontext() if self._is_staging else self.weights_to_release():
            self._save_weights(folder, whole)
        keeps_last = self.averaging is not None and self.averaging.average.keep_last
        if keeps_last and not self._is_staging:
            with self.last_weights():
                self._save_weights(folder / LAST_FOLDER, whole)
        merged_before = snapshot(folder / MERGED_FOLDER) if self._merges and self.args.should_save else {}
        together = self._save_merged(folder / MERGED_FOLDER) if self._merges else None
        if self.ledger is not None and self.args.should_save:
            if not self._is_staging:  # a checkpoint's manifest names its files
                note_release(self.ledger, folder, before)
                if self._run is not None and self._run.is_complete:
                    discard_start(self.ledger.path.parent)
            if together is not None:
                note_release(self.ledger, folder / MERGED_FOLDER, merged_before)
                self._write_guarantee(folder / MERGED_FOLDER, trained=together)
            self._write_guarantee(folder)
        if self.ledger is not None and folder.resolve() != self.ledger.path.parent.resolve():
            self._renew_report()  # the ledger has new lines about the other folder

    def _save_merged(self, folder: Path) -> Any:
        """Write the model with its adapter merged, on rank 0 and not during the training; return it, or None."""
        if not self.args.should_save or self._run is None or self._is_attached:
            return None
        with self.weights_to_release():
            whole = merged(self._module)

        def write() -> None:
            whole.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

        self._until_there_is_room(write, folder)
        return whole

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model's files; at the end of a run, try again until the disk has room for them."""

        def save(folder: Path) -> None:  # takes weights out of the dictionary
            super(TrainerOutputs, self)._save(str(folder), None if state_dict is None else dict(state_dict))

        folder = Path(output_dir or str(self.args.output_dir))
        self._until_there_is_room(lambda: save(folder), folder, save)

    def _until_there_is_room(
        self, write: Callable[[], None], folder: Path, spare: Callable[[Path], None] | None = None
    ) -> None:
        """Write results on this process; while the run still takes steps, a full disk stays an error."""
        stepping = self._run is None or self._is_attached or self._is_staging
        if not self.args.should_save or stepping:
            return write()
        if spare is None and is_whole(self._module):
            spare = super()._save  # type: ignore[assignment]
        until_there_is_room(write, folder, bytes_to_write(self._module, self.args, 0, self._merges), spare)

    def _save_weights(self, folder: Path, whole: bool) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(str(folder), _internal_call=True)
        elif whole:
            self._save(str(folder), state_dict=whole_state(self._module, self.processes, self._is_adapter))
        if self._ends and self.args.should_save and self._is_adapter:  # PEFT saves no such configuration
            GenerationConfig(eos_token_id=self._ends).save_pretrained(str(folder))

    def _shards_suffice(self) -> bool:
        kind = str(self.accelerator.state.fsdp_plugin.state_dict_type)
        return "SHARDED" in kind and not self._is_adapter

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint completely or not at all; see `dpllm.privacy.checkpoints`.

        Raises:
            CheckpointError: a process could not write its files; the staging folder is removed.
        """
        self._publish_checkpoint(lambda folder: self._write_checkpoint(model, trial))

    def _save_start(self) -> None:
        """Save the weights before the first step as ``checkpoint-0``; on all processes together.

        A crash before the first checkpoint can then be resumed: an adapter's random weights, or those of a public
        training, exist nowhere else. It has no optimizer state, and the schedule begins at its start. The next
        checkpoint, or the model, replaces it.
        """

        def write(folder: Path) -> None:
            self._save_weights(folder, whole=True)
            if self.args.should_save:
                covered_state(self.state, self.eval_is_public).save_to_json(str(folder / TRAINER_STATE_NAME))

        self._publish_checkpoint(write)

    def _publish_checkpoint(self, write: Callable[[Path], None]) -> None:
        """Let each process write into a staging folder, which is renamed when all have written their files."""
        output, step, run = Path(str(self.args.output_dir)), self.state.global_step, self._run
        assert run is not None, "train() makes the run"
        require_finite(self._module, self.processes, f"checkpoint-{step} is not written: the model has")
        run.check_before_saving()
        self.processes.from_main(lambda: prepare_staging(output, step))
        failure: CheckpointError | None = None
        self._is_staging = True
        try:
            with saving(output, step) as staging:
                write(staging)
        except CheckpointError as error:
            failure = error
        finally:
            self._is_staging = False
        self.processes.from_main(lambda: None)
        failures = [error for error in self.processes.gather(failure) if error is not None]
        if failures:
            self.processes.from_main(lambda: discard_staging(output))
            raise failures[0]

        def finish() -> None:
            made_by = (self.processes.size, run.engine_name, self.setup.config)
            ledger = run.ledger.mark().to_dict()
            publish(staging_folder(output, step), checkpoint_folder(output, step), ledger=ledger, made_by=made_by)
            if step > 0:
                discard_start(output)
            if self.args.save_total_limit:
                rotate(output, self.args.save_total_limit)
            with contextlib.suppress(OSError):  # not empty: it holds an older checkpoint to be restored
                (output / STAGING_FOLDER).rmdir()

        self.processes.from_main(finish)

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint's files, and the average; figures that ε does not cover are never written to it."""
        whole, covered = self.state, covered_state(self.state, self.eval_is_public)
        # The Trainer looks up the states of callbacks by name, so these are removed afterwards.
        self.state = dataclasses.replace(covered, stateful_callbacks=whole.stateful_callbacks)
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{whole.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                covered_state(self.state, self.eval_is_public).save_to_json(str(folder / TRAINER_STATE_NAME))
                refuse_random_states(folder)
        finally:
            self.state = whole
        if self.averaging is not None:
            self.averaging.save(folder)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder in which the Trainer creates a checkpoint's folder."""
        output = super()._get_output_dir(trial)
        return str(Path(output) / STAGING_FOLDER) if self._is_staging else output

    def save_state(self) -> None:
        """Save ``trainer_state.json`` with the figures that ε covers; losses are in `LOG_FILE`."""
        if self.args.should_save:
            folder = Path(str(self.args.output_dir))
            covered_state(self.state, self.eval_is_public).save_to_json(str(folder / TRAINER_STATE_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save nothing: a generator's state reveals how many random numbers private rows used."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load nothing: each step draws from fresh entropy, even if an old or foreign checkpoint holds a state."""

    # --------------------------------------------------------- report and card

    def _write_guarantee(self, folder: Path, with_card: bool = True, trained: Any = None, **metadata: Any) -> None:
        """Write plan, ledger so far, report and card next to the model; for one process.

        What people or an audit added to the folder's report is kept, unless `notes` replaces it.

        Args:
            folder: folder of the model.
            with_card: whether to write the card.
            trained: the model in the folder. None: the Trainer's.
            metadata: as for `StartingModel.write_card`.
        """
        assert self.ledger is not None
        folder.mkdir(parents=True, exist_ok=True)
        opened = self.ledger if folder.resolve() == self.ledger.path.parent.resolve() else None
        if opened is None:
            self.plan.save(folder / PLAN_FILE)
            (folder / LEDGER_FILE).write_bytes(self.ledger.path.read_bytes())
        notes = self._notes_for(folder)  # first: its findings are open points of this report
        report = write_report(folder, self.plan, read_ledger(self.ledger.path), notes, opened=opened)
        if with_card:
            model = self.model if trained is None else trained
            self._start.write_card(folder, report, model, ledger=opened, **metadata)

    def _notes_for(self, folder: Path) -> ReleaseNotes:
        assert self.ledger is not None
        if folder.resolve() != self.ledger.path.parent.resolve():  # another run may have been saved there
            return self.notes
        try:
            earlier = notes_in(folder)
        except (ValueError, OSError):  # the report is written anyway, and names the notes it lacks
            self.ledger.append_open_point(LOST_NOTES)
            return self.notes
        fields = (item.name for item in dataclasses.fields(ReleaseNotes))
        return dataclasses.replace(
            self.notes, **{name: getattr(earlier, name) for name in fields if not getattr(self.notes, name)}
        )

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write the model card with the guarantee (`dpllm.report.model_card`) into the folder, from the ledger so far.

        The Trainer's own card lists training and evaluation losses, which ε does not cover, and no guarantee.

        Args:
            language: ISO code.
            license: the Hub's identifier.
            tags: tags in addition to those of dpllm.
            model_name: not used; the card says "this model".
            finetuned_from: the base model's Hub id. None: the name under which it was loaded.
            tasks: refused, like all arguments for ``model-index``.
            dataset_tags: public data sets' Hub ids, for the metadata.
            dataset: as ``dataset_tags``.
            dataset_args: refused.

        Raises:
            ValueError: before `train`, or one of the refused arguments.
        """
        del model_name
        refused = [name for name, value in (("tasks", tasks), ("dataset_args", dataset_args)) if value]
        if refused:
            raise ConfigError(
                f"create_model_card({refused[0]}=...) is for a card's evaluation results, which ε does not cover. "
                "Leave it out; pass figures for the report in DPTrainer.notes"
            )
        if self.ledger is None:
            raise ValueError("There is no guarantee for a card before train(): call it first.")
        if not self.processes.is_main:
            return
        keep_own_card(Path(str(self.args.output_dir)))
        self._write_guarantee(
            Path(str(self.args.output_dir)),
            base_model=finetuned_from,
            language=language,
            license=license,
            tags=_listed(tags),
            datasets=[*_listed(dataset_tags), *_listed(dataset)],
        )

    # ------------------------------------------------------------------ uploads

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository ``hub_model_id`` if it does not exist; with ``push_to_hub`` before any step.

        Raises:
            ConfigError: its name is not a valid Hub name, or there is no token.
        """
        if not self.is_world_process_zero():
            return
        name = self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name
        try:
            validate_repo_id(name)
            if HF_HUB_OFFLINE and self.ledger is None:  # an upload comes later, if ever
                logger.warning("HF_HUB_OFFLINE is set: whether %s can be uploaded to was not checked", name)
                return
            url = HfApi().create_repo(
                name,
                token=token if token is not None else self.args.hub_token,
                private=private if private is not None else self.args.hub_private_repo,
                exist_ok=True,
            )
        except HFValidationError as error:
            raise ConfigError(
                f"train.hub_model_id: {name!r} is not a valid Hub name: write owner/name, with letters, digits, '-', "
                "'_' and '.'"
            ) from error
        except LocalTokenNotFoundError as error:
            raise ConfigError(
                f"train.push_to_hub: there is no token for {name}: log in with `hf auth login`, or set HF_TOKEN"
            ) from error
        self.hub_model_id, self.push_in_progress = url.repo_id, None

    def push_to_hub(  # type: ignore[override]  # the Trainer swallows any keyword
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        force_open_points: bool = False,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
    ) -> Any:
        """Save the model with its guarantee, and upload it: weights, tokenizer, card, report, plan and ledger only.

        No other file of the folder is uploaded (`dpllm.report.publishing.files_to_publish`). Call it on all processes
        together.

        Args:
            commit_message: message of the commit.
            blocking: whether to wait for the upload.
            token: token for the Hub. None: ``hub_token``.
            revision: the branch; None: ``hub_revision``.
            private: whether a new repository is visible to its owner only.
            force_open_points: upload although the report has open points; the card lists them.
            language: as for `create_model_card`.
            license: as for `create_model_card`.
            tags: as for `create_model_card`.
            model_name: as for `create_model_card`.
            finetuned_from: as for `create_model_card`.
            dataset_tags: as for `create_model_card`.
            dataset: as for `create_model_card`.

        Returns:
            The commit, or its future if not ``blocking``; None on all processes except the first.

        Raises:
            PublishError: the report has an open point, the run is not private, an audit failed, or files contradict
                each other.
        """
        if self.ledger is None:
            raise PublishError("There is nothing to publish before train(): call it first; a model needs its guarantee")
        folder = Path(str(self.args.output_dir))
        self._save_with_guarantee(folder, whole=True)
        self.create_model_card(
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            dataset_tags=dataset_tags,
            dataset=dataset,
        )

        def checked() -> list[str]:
            require_publishable(folder, force_open_points=force_open_points)
            vocabulary = getattr(self.processing_class, "vocab_files_names", None) or {}
            adapters = self.model.peft_config if isinstance(self.model, PeftModel) else ()
            found = files_to_publish(
                folder, adapter=self._is_adapter, vocabulary=vocabulary.values(), adapters=adapters
            )
            note_uploaded(folder, found, self.ledger)
            return found

        names = self.processes.from_main(checked)
        if not self.is_world_process_zero():
            return None
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        assert self.hub_model_id is not None
        logger.warning("uploading to %s: %s", self.hub_model_id, ", ".join(names))
        return upload(
            folder,
            names,
            self.hub_model_id,
            message=commit_message or "End of training",
            token=token if token is not None else self.args.hub_token,
            revision=revision if revision is not None else self.args.hub_revision,
            blocking=blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload nothing during training: the report is not complete, and checkpoints hold more than ε covers."""
        del checkpoint_folder


def _count_from(logs: dict[str, float], seconds: float) -> None:
    """Replace a training's running time by that of its steps, and its rates accordingly.

    The Trainer also counts what callbacks do before the first step, such as the evaluation before a recipe's training.
    """
    if seconds <= 0:
        return
    share = logs["train_runtime"] / seconds
    for name in logs:
        if name.startswith("train_") and name.endswith("_per_second"):
            logs[name] = round(logs[name] * share, 3)
    logs["train_runtime"] = round(seconds, 4)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
