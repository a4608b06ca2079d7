"""DPTrainer: the Hugging Face ``Trainer`` with private steps.

One *logical* batch is one ``Trainer`` step: the loader yields the units drawn for it, `DPTrainer.training_step` cuts
them into microbatches and leaves one private gradient, and the Trainer's own loop does the rest. Schedules, logging,
callbacks, checkpoints and ``max_steps`` therefore count private steps.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from dpllm.config import ConfigError, PrivacyConfig
from dpllm.config.output_folder import check_output_folder
from dpllm.data.labels import BOUNDARIES
from dpllm.data.lengths import Limits, row_lengths
from dpllm.data.rows import PackedCollator, unit_index_of
from dpllm.data.units import UnitIndex
from dpllm.engines import whole_state
from dpllm.engines.deepspeed_checkpoint import complete_load, prepare_to_load
from dpllm.engines.processes import Processes
from dpllm.engines.weights import NonfiniteSteps, require_finite
from dpllm.ghost import GhostClipper, NormMethod
from dpllm.mechanism.sampling import seeded_rng
from dpllm.models.ended import note_changes
from dpllm.models.losses import packed_sequence_loss, take_labels
from dpllm.models.packing import attention_by_row, refuse_unpackable
from dpllm.models.padding import default_collator, refuse_other_padding
from dpllm.models.starting_point import check_start, refuse_steering
from dpllm.models.tasks import RowLoss, default_row_loss, task_of
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.checkpoints import (
    STAGING_FOLDER,
    CheckpointError,
    checkpoint_folder,
    discard_staging,
    prepare_staging,
    publish,
    rotate,
    saving,
    staging_folder,
)
from dpllm.privacy.identity import (
    COMPLETED,
    STOPPED_AT_BUDGET,
    note_release,
    refuse_other_run,
    snapshot,
)
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.unused import is_used
from dpllm.report.model_card import keep_own_card
from dpllm.report.statement import ReleaseNotes, privacy_report, write_report
from dpllm.training.arguments import checked_arguments, plan_for
from dpllm.training.attaching import AttachFirst
from dpllm.training.checks import agreement
from dpllm.training.fetching import reader, refuse_ignored, refuse_replaced, refuse_unreadable
from dpllm.training.noted import note_data, note_units
from dpllm.training.preflight import require_positions
from dpllm.training.restarting import begin_in, checkpoint_to_resume
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.signals import StopRequest, Terminal, end_with_the_launcher
from dpllm.training.training_log import CoveredTrainer, LogKeeper

logger = logging.get_logger(__name__)


class LogicalBatches:
    """The Trainer's data loader: each item is the set of units drawn for one private step.

    One pass is 1/q steps, the number in which every unit is expected to take part once, so that ``epoch`` in the logs
    keeps its meaning.
    """

    def __init__(self, run: PrivateRun, dataset: Any) -> None:
        """Load the draws of this run."""
        self.dataset, self._run = dataset, run

    def __len__(self) -> int:
        """Steps per expected pass over the units."""
        return max(1, round(1 / self._run.plan.sampling_rate))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Draw one pass; the draws of all passes are independent. It ends when all steps are charged."""
        if self._run.ledger.num_steps >= self._run.steps_planned:
            return
        for unit_ids in self._run.draws(len(self)):
            yield {"unit_ids": torch.from_numpy(unit_ids)}


class DPTrainer(CoveredTrainer):
    """Fine-tunes a transformers model with differential privacy.

    Guarantee: the released weights (each checkpoint and the final model) satisfy the (ε, δ) of `privacy_report` for
    the unit and the adjacency of ``privacy``. Logged losses and evaluation results are not covered; the report counts
    them.

    Args:
        model: any transformers model, PEFT-wrapped or not.
        args: ``per_device_train_batch_size`` is the microbatch, ``max_steps`` the number of private steps T (or
            ``num_train_epochs``, then T = ceil(epochs N / b)). ``gradient_accumulation_steps`` stays 1: the logical
            batch is ``privacy.expected_batch_size``.
        privacy: the privacy guarantee.
        train_dataset: tokenized rows with ``input_ids`` and ``labels`` (without labels, a causal language model
            learns all its input).
        eval_dataset: rows for evaluation; its results are not covered by the guarantee.
        processing_class: the tokenizer, for padding and for saving.
        data_collator: rows to inputs, one row each; the default pads to the longest row. A collator of transformers
            receives the columns that the model takes (``remove_unused_columns``), any other collator all columns.
        compute_loss_func: ``(outputs, labels) -> (B,)`` losses, each computed only from its own row; the default fits
            the model's task.
        callbacks: as for ``Trainer``.
        optimizers: as for ``Trainer``.
        public: earlier training on public data, one line each, for the report.
        max_tokens_per_microbatch: tokens of a microbatch, padding included. It replaces the number of rows,
            ``per_device_train_batch_size``, so that a microbatch of short rows has many. "auto": the largest number
            that fits on the GPU, found before the first step (`dpllm.training.microbatch_size`); refused if the model
            is sharded.
        pack_rows: concatenate the rows of a microbatch without padding, for causal language models. The attention
            processes each row separately (`dpllm.models.packing`) during `train`; evaluation pads as before.
        norm_method: method of computing norms (`dpllm.ghost.NormMethod`); the default is the cheapest for each layer.
        eval_is_public: declares that ``eval_dataset`` is public: schedules may follow it, and it is not a disclosure.
        start_is_independent: as for `dpllm.PrivateRun.attach`.

    Raises:
        ConfigError, ValueError: an option would make the guarantee untrue; raised before any training.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        privacy: PrivacyConfig,
        train_dataset: Any,
        eval_dataset: Any = None,
        processing_class: Any = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        compute_loss_func: RowLoss | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        public: Sequence[str] = (),
        max_tokens_per_microbatch: int | str | None = None,
        pack_rows: bool = False,
        norm_method: NormMethod | None = None,
        eval_is_public: bool = False,
        start_is_independent: bool = False,
    ) -> None:
        """Compute the plan and set up the Trainer."""
        refuse_ignored(self)
        self.privacy, self.public = privacy, list(public)
        self.notes = ReleaseNotes()  # facts about the release that only people know; set them before save_model()
        if isinstance(max_tokens_per_microbatch, int) and max_tokens_per_microbatch < 1:
            raise ConfigError(f"max_tokens_per_microbatch must be at least 1, got {max_tokens_per_microbatch}")
        if pack_rows:
            refuse_unpackable(model, task_of(model), data_collator, compute_loss_func)
        self._pack_rows, self._norm_method = pack_rows, norm_method
        self.eval_is_public, self._start_is_independent = eval_is_public, start_is_independent
        refuse_steering(args, callbacks or [], optimizers[1], eval_is_public)
        check_start(model, args.output_dir, start_is_independent)
        self.processes = Processes()
        private = self.processes.together(lambda: checked_arguments(args, own_optimizer=optimizers[0] is not None))
        self.processes.agree({**agreement.software(), **agreement.training(args)})
        refuse_unreadable(train_dataset)  # the first access to data: all earlier errors are about options
        self.units: UnitIndex = unit_index_of(train_dataset, privacy, self._draw_of_rows())
        drawn = self.units.each_row() if privacy.sampling == "example" else self.units
        self.processes.agree(
            {
                "the number of units": self.units.num_units,
                "the number of rows": len(train_dataset),
                "the privacy section": repr(privacy),
                "train.max_steps, train.num_train_epochs": (args.max_steps, args.num_train_epochs),
            }
        )
        self.plan: PrivacyPlan = plan_for(args, privacy, self.units)
        private.max_steps = self.plan.num_steps
        collate: Any = data_collator or default_collator(processing_class, model, task_of(model))
        refuse_other_padding(model, processing_class, collate)
        self._task = task_of(model)
        self._row_loss = compute_loss_func or default_row_loss(model)
        self._given_dataset = train_dataset
        self._base_name = getattr(getattr(model, "config", None), "_name_or_path", None)
        self._rows = TrainingRows(
            units=drawn,
            lengths=row_lengths(train_dataset, self._task, Limits.of(model)),
            fetch=reader(train_dataset, model, collate, args),
            collate=PackedCollator() if pack_rows else collate,
            max_rows=args.per_device_train_batch_size if max_tokens_per_microbatch is None else None,
            max_tokens=max_tokens_per_microbatch,
            packed=pack_rows,
        )
        require_positions(model, int(self._rows.lengths.max()), "the longest row has")
        self._run: PrivateRun | None = None
        self._attached = self._staging = False
        self._resumed_from: Path | None = None
        self.ledger: SharedLedger | None = None
        self._interrupt, self._log_keeper = _Interrupt(self), LogKeeper(str(private.output_dir))
        self.interrupted_by: int | None = None  # the signal that ended train() early
        super().__init__(
            model=model,
            args=private,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[self._log_keeper, *(callbacks or []), self._interrupt, AttachFirst(self)],
            optimizers=optimizers,
        )

    # ------------------------------------------------------------------ the run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train for the plan's steps and write the privacy report beside the model.

        Args:
            resume_from_checkpoint: a checkpoint of this output folder, True for its latest complete one, or "auto" to
                start if there is nothing to resume (`dpllm.training.restarting`). Any number of processes may
                continue it. The ledger is continued: steps lost in a crash stay charged, and batches and noise are
                drawn from fresh entropy.
            trial: refused; hyper-parameter search on the private data costs privacy.
            ignore_keys_for_eval: as for ``Trainer``.

        Raises:
            ValueError: the folder holds another run, its ledger is of another plan, or no checkpoint is complete.
            RunCompletedError: "auto", and the run in the folder has ended as planned.
        """
        if trial is not None:
            raise ConfigError(
                "Hyper-parameter search trains many models on the private data, and each of them costs privacy. "
                "Search on public data, or account "
                "for every run."
            )
        refuse_replaced(self.train_dataset, self._given_dataset)
        refuse_steering(self.args, self.callback_handler.callbacks, self.lr_scheduler, self.eval_is_public)
        folder = Path(str(self.args.output_dir))
        restart = begin_in(folder, resume_from_checkpoint, self.processes)
        require_finite(self._module, self.processes, "The model to train has")
        self._nonfinite = NonfiniteSteps(self.plan.expected_batch_size)
        self.interrupted_by = None
        checkpoint = checkpoint_to_resume(folder, restart.checkpoint, self.processes)
        if not self._attached:  # refused before anything is charged or written
            GhostClipper(self._module, norm_method=self._norm_method, clipping=self.plan.mechanism.clipping).remove()
        self.processes.from_main(lambda: check_output_folder("train.output_dir", folder))
        self.ledger = self._open_ledger(folder, resume=restart.continues)
        self.args.max_steps = self._steps_planned
        with self.ledger.ended_on_failure():
            self._note_outlets()
            self._run = PrivateRun(self.plan, self._rows, self.ledger, self.privacy.seed)
            self._resumed_from = checkpoint
            if checkpoint and self.is_deepspeed_enabled:
                prepare_to_load(checkpoint, self.accelerator.state.deepspeed_plugin.deepspeed_config, self.processes)
        with self._interrupt.listening():
            return self._train_to_the_end(folder, checkpoint, ignore_keys_for_eval)

    def _train_to_the_end(self, folder: Path, checkpoint: Path | None, ignore_keys_for_eval: Any) -> TrainOutput:
        assert self._run is not None, "train() makes the run"
        reason = "failed"
        try:
            by_row = attention_by_row(self._module) if self._pack_rows else contextlib.nullcontext()
            with by_row:
                result = super().train(
                    str(checkpoint) if checkpoint else None, ignore_keys_for_eval=ignore_keys_for_eval
                )
            require_finite(self._module, self.processes, "Training ended with")
            self._run.check_before_saving()
            self._run.end_weights()
            reason = "interrupted" if self._was_interrupted() else self._reason_of_end()
            return result
        finally:
            self._run.detach()
            self._attached = False
            self._end(folder, reason)

    def _was_interrupted(self) -> bool:
        """Return whether a signal ended the run before the plan's steps were taken."""
        assert self.ledger is not None
        if self._interrupt.agreed and self.ledger.num_steps < self._steps_planned:
            numbers = self.processes.gather(self._interrupt.stop.number)
            self.interrupted_by = next((number for number in numbers if number is not None), None)
        return self.interrupted_by is not None

    def _end(self, folder: Path, reason: str) -> None:
        """Note the end and write the report; after a failure, an error here must not hide the first error."""
        assert self.ledger is not None
        try:
            self.ledger.append_end(reason, independent=self.privacy.stop == "independent")
            if self.processes.is_main:
                write_report(folder, self.plan, read_ledger(self.ledger.path), self.notes)
        except (OSError, ValueError) as error:
            if reason != "failed":
                raise
            logger.error("the end of the run could not be written: %s", error)

    def _reason_of_end(self) -> str:
        planned, wanted = self._steps_planned, self.plan.num_steps_wanted or self.plan.num_steps
        if planned == wanted or (self.ledger is not None and self.ledger.num_steps < planned):
            return COMPLETED  # the ledger says "stopped early" where steps are missing
        return f"{STOPPED_AT_BUDGET}, after {planned} of {wanted} steps"

    @property
    def _steps_planned(self) -> int:
        """Return the number of steps of all starts together; see `PrivateRun.steps_planned`."""
        allowed = None if self.ledger is None else self.ledger.steps_planned
        return allowed or self.plan.num_steps

    def _draw_of_rows(self) -> np.random.Generator:
        """Return the generator that draws the rows a user keeps: secret, and the same on every process."""
        entropy = self.processes.from_main(lambda: int.from_bytes(secrets.token_bytes(32), "little"))
        return seeded_rng(entropy if self.privacy.seed is None else self.privacy.seed)

    @property
    def _module(self) -> nn.Module:
        model: Any = self.model
        return model

    def _open_ledger(self, folder: Path, resume: bool) -> SharedLedger:
        path = folder / LEDGER_FILE
        if resume:
            budget, contents = self.privacy.budget_file, self._rows.contents
            return SharedLedger.open(path, self.plan, self.processes, budget, contents, self.public)
        if self.processes.from_main(lambda: is_used(path)):
            raise ConfigError(
                f"{folder} already holds a private run ({LEDGER_FILE}). Its record is evidence for the model beside "
                f"it and is not overwritten: set "
                "train.output_dir to another folder, or resume from its checkpoint."
            )
        ledger = SharedLedger.create(path, self.plan, self.processes, self.public, self.privacy.budget_file)
        note_data(ledger, self.train_dataset, self.units, self.privacy)
        note_units(ledger, self.units, self._rows.lengths)
        ledger.remember_rows(self._rows.contents)
        return ledger

    def get_train_dataloader(self) -> Any:
        """Return the units of each step, drawn by the plan's sampler; each process sees all and takes its share."""
        assert self._run is not None, "train() makes the run"
        return LogicalBatches(self._run, self.train_dataset)

    def attach(self) -> None:
        """Hook the model after the Trainer has distributed it, and before the first draw is charged."""
        assert self._run is not None, "train() makes the run"
        if not self._attached:
            if self._resumed_from and self.is_deepspeed_enabled:
                complete_load(self.model_wrapped, self._resumed_from, self.processes)
            self._run.attach(self.model_wrapped, self.optimizer, self._norm_method, self._start_is_independent)
            self._attached = True

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Take one private step up to the optimizer; return the mean loss, a diagnostic that is not private."""
        del num_items_in_batch
        assert self._run is not None, "train() makes the run"
        model.train()
        with self.compute_loss_context_manager():
            done = self._run.step(inputs["unit_ids"].numpy(), self._loss_per_row)
        self._nonfinite.look(done.num_units, done.num_nonfinite, self.ledger.num_steps if self.ledger else 0)
        if done.num_divided:
            logger.warning(
                "Memory ran out %d time(s), and microbatches were split in half and retried; no step was lost. A "
                "microbatch has at most %d tokens from now on: set max_tokens_per_microbatch (in a recipe "
                "microbatch_tokens) to this number in the next run.",
                done.num_divided,
                self._run.max_tokens,
            )
        if done.num_nonfinite:
            logger.warning_once(
                "Some units have a non-finite gradient and contribute nothing; the report counts them. If the loss "
                "does not fall, look for "
                "overflow: a lower learning rate, bf16 instead of fp16 weights."
            )
        return torch.tensor(done.mean_loss, device=self.args.device)

    def _loss_per_row(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        inputs = dict(self._prepare_inputs(dict(inputs)))
        labels = take_labels(inputs)
        if self._pack_rows:
            return packed_sequence_loss(model(**inputs).logits, labels, inputs[BOUNDARIES])
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" not in inputs:
            shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)  # M2M100 shifts labels by itself
            inputs.update({"labels": labels} if shift is None else {"decoder_input_ids": shift(labels)})
        return self._row_loss(model(**inputs), labels)

    # ------------------------------------------------------ ε and the report

    @property
    def epsilon(self) -> float:
        """Return ε spent so far at the plan's δ, from the ledger; after `train`, the ε stated by the report."""
        if self.ledger is None or self.ledger.num_steps == 0:
            return 0.0
        return epsilon(self.ledger.history, self.plan.delta, self.plan.adjacency)

    def privacy_report(self) -> dict[str, Any]:
        """Return the privacy statement of all steps so far, from the ledger; the same as ``privacy_report.json``."""
        if self.ledger is None:
            raise ValueError("There is nothing to report before train(): call it first.")
        return privacy_report(self.plan, read_ledger(self.ledger.path), self.notes).to_dict()

    # ------------------------------------------------------------------- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, consolidated, and beside it the plan, the ledger so far, the privacy report and a model card.

        Called by all processes together; rank 0 writes. The model loads in plain transformers, an adapter in plain
        PEFT. A checkpoint of a fully sharded, fully trained model holds only shards, as set in the accelerate
        configuration.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        self._save_with_guarantee(
            folder, whole=not (_internal_call and self.is_fsdp_enabled and self._shards_suffice())
        )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_whole(self, folder: Path) -> None:
        self._save_with_guarantee(folder, whole=True)

    def _save_with_guarantee(self, folder: Path, whole: bool) -> None:
        self.processes.from_main(lambda: refuse_other_run(folder, self.ledger))
        require_finite(self._module, self.processes, f"{folder} is not written: the model has")
        if self.args.should_save and (kept := keep_own_card(folder)) is not None:
            logger.warning(
                "%s was not written by dpllm; it is kept as %s, and a model card replaces it",
                folder / "README.md",
                kept.name,
            )
        if self._run is not None:
            note_changes(self._run.weights, self._module, self.ledger, self.processes)
        before = snapshot(folder) if self.args.should_save else {}
        if not self.is_fsdp_enabled:
            super().save_model(str(folder), _internal_call=True)
        elif whole:
            self._save(str(folder), state_dict=whole_state(self._module, self.processes, _is_adapter(self.model)))
        if self.ledger is not None and self.args.should_save:
            if not self._staging:  # a checkpoint's manifest names its files
                note_release(self.ledger, folder, before)
            self._write_guarantee(folder)

    def _shards_suffice(self) -> bool:
        kind = str(self.accelerator.state.fsdp_plugin.state_dict_type)
        return "SHARDED" in kind and not _is_adapter(self.model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint completely or not at all; see `dpllm.privacy.checkpoints`."""
        output, step = Path(str(self.args.output_dir)), self.state.global_step
        require_finite(self._module, self.processes, f"checkpoint-{step} is not written: the model has")
        if self._run is not None:
            self._run.check_before_saving()
        self.processes.from_main(lambda: prepare_staging(output, step))
        failure: CheckpointError | None = None
        self._staging = True
        try:
            with saving(output, step):
                super()._save_checkpoint(model, trial)
        except CheckpointError as error:
            failure = error
        finally:
            self._staging = False
        self.processes.from_main(lambda: None)
        failures = [error for error in self.processes.gather(failure) if error is not None]
        if failures:
            self.processes.from_main(lambda: discard_staging(output))
            raise failures[0]

        def finish() -> None:
            head = None if self.ledger is None else self.ledger.mark().to_dict()
            made_by = None if self._run is None else (self.processes.size, self._run.engine_name)
            publish(staging_folder(output, step), checkpoint_folder(output, step), ledger=head, made_by=made_by)
            if limit := self.args.save_total_limit:
                rotate(output, limit)
            with contextlib.suppress(OSError):  # not empty: it holds an older checkpoint to be restored
                (output / STAGING_FOLDER).rmdir()

        self.processes.from_main(finish)

    def _get_output_dir(self, trial: Any) -> str:
        output = super()._get_output_dir(trial)
        return str(Path(output) / STAGING_FOLDER) if self._staging else output

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return no estimate: the Trainer's formula needs the tokens of a step, which depend on the secret draw."""
        del inputs
        return 0


class _Interrupt(TrainerCallback):
    """Callback that ends the run after the current step on a signal, with a checkpoint and a correct report.

    See `dpllm.training.signals`. It also ends a resumed run when the plan's steps are used up, since steps lost in a
    crash were charged.
    """

    def __init__(self, trainer: DPTrainer) -> None:
        self._trainer = trainer
        self.stop = StopRequest()
        self.agreed = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals while the block runs."""
        self.agreed = False
        end_with_the_launcher()
        with Terminal().taken(), self.stop.listening():
            yield

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stop and save on a request or at the end of the plan."""
        ledger = self._trainer.ledger
        self.agreed = self._trainer.processes.any(self.stop.requested)  # all stop after the same step, or none
        if self.agreed or (ledger is not None and ledger.num_steps >= self._trainer._steps_planned):
            control.should_training_stop = True
            control.should_save = control.should_save or self.agreed
            control.should_evaluate = control.should_evaluate and not self.agreed  # a launcher waits only for seconds
        return control


def _is_adapter(model: Any) -> bool:
    return isinstance(model, PeftModel)
