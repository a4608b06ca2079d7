"""DPTrainer: the Hugging Face ``Trainer`` with private steps.

One *logical* batch is one ``Trainer`` step: the loader yields the units drawn for it, `DPTrainer.training_step` cuts
them into microbatches and leaves one private gradient, and the Trainer's own loop does the rest. Schedules, logging,
callbacks, checkpoints and ``max_steps`` therefore count private steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Unpack

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from dpllm.config import ConfigError, PrivacyConfig, refuse_drawn_pieces
from dpllm.config.model_values import HEADS
from dpllm.config.output_folder import REPORTS, check_output_folder
from dpllm.config.values import choice
from dpllm.data.lengths import refuse_other_classes
from dpllm.data.own_rows import refuse_own_rows
from dpllm.data.raw_rows import read_keys
from dpllm.data.units import UnitIndex
from dpllm.engines import whole_state
from dpllm.engines.processes import Processes
from dpllm.engines.weights import require_finite
from dpllm.ghost import GhostClipper, NormMethod
from dpllm.mechanism.averages import LAST_FOLDER
from dpllm.mechanism.limits import NOISE_MEMORIES
from dpllm.models.ended import note_changes
from dpllm.models.given import GivenModel
from dpllm.models.merging import MERGED_FOLDER, merged
from dpllm.models.packing import refuse_unpackable
from dpllm.models.start_weights import WeightSample
from dpllm.models.starting_point import check_start, edited_start, refuse_changed_start, refuse_steering
from dpllm.models.tasks import RowLoss, default_row_loss, task_of
from dpllm.models.writing import complete_generation_config
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.checkpoints import (
    STAGING_FOLDER,
    CheckpointError,
    checkpoint_folder,
    discard_staging,
    prepare_staging,
    rotate,
    saving,
    staging_folder,
)
from dpllm.privacy.identity import note_release, refuse_other_run, snapshot
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.plan import PrivacyPlan
from dpllm.report.model_card import keep_own_card
from dpllm.report.statement import ReleaseNotes, privacy_report
from dpllm.training.advice import advice
from dpllm.training.argument_table import ARGUMENTS, Argument
from dpllm.training.arguments import compile_options, refuse_changed
from dpllm.training.averaging import checked_average
from dpllm.training.corrected_adamw import optimizer_for
from dpllm.training.fetching import refuse_ignored
from dpllm.training.head_losses import HeadLosses
from dpllm.training.noted import PrivateSources, own_parts, tokens_of_others
from dpllm.training.outlets import StartingModel
from dpllm.training.preflight import refuse_unusable_model
from dpllm.training.prepared import Prepared, agreed_arguments
from dpllm.training.restarting import begin_in, checkpoint_to_resume
from dpllm.training.row_losses import RowLosses
from dpllm.training.rows_trainer import (
    RowsTrainer,
    Unknown,
    read_privacy,
    refuse_unknown,
    require_arguments,
    require_functions,
)
from dpllm.training.screen import StepProgress, progress_of
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.signals import StopRequest, end_with_the_launcher
from dpllm.training.trainer_run import LogicalBatches, TrainerRun
from dpllm.training.training_log import LogKeeper
from dpllm.training.way_out import bytes_to_write, is_whole, rehearse, until_there_is_room
from dpllm.training.workload import UpdateRule


class _Trainer(Protocol):
    def attach(self) -> None: ...

    def sample_weights(self) -> None: ...


class SampleFirst(TrainerCallback):
    """Callback before those of the user: it samples the prepared weights, so that `attach` sees what they write."""

    def __init__(self, trainer: _Trainer) -> None:
        """Store the trainer."""
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sample."""
        self._trainer.sample_weights()


class AttachFirst(TrainerCallback):
    """Callback that calls the trainer's `attach` before an epoch's first draw; later calls do nothing.

    An engine or a part of the model that cannot be trained privately is refused here, before any charge.
    """

    def __init__(self, trainer: _Trainer) -> None:
        """Store the trainer."""
        self._trainer = trainer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach."""
        self._trainer.attach()


class WhenAttached(TrainerCallback):
    """Callback that calls a function once, when the run is open and attached, so its start can no longer be refused.

    Add it to an existing trainer, so that it comes after `AttachFirst`.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        """Store the function."""
        self._action: Callable[[], None] | None = action

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Call the function the first time."""
        action, self._action = self._action, None
        if action is not None:
            action()


class Interrupt(TrainerCallback):
    """Callback that ends the run after the current step on a signal, with a checkpoint and a correct report.

    See `dpllm.training.signals`. It also ends a resumed run when the plan's steps are used up, since steps lost in a
    crash were charged.

    Attributes:
        signal: the signal that ended the last run early. None: no signal did.

    Args:
        processes: the processes of the run; all stop after the same step.
        is_complete: returns whether all planned steps of the run are charged.
    """

    def __init__(self, processes: Processes, is_complete: Callable[[], bool]) -> None:
        """Begin without a signal."""
        self._processes, self._is_complete = processes, is_complete
        self._request, self._agreed = StopRequest(), False
        self.signal: int | None = None

    def forget(self) -> None:
        """Forget the signal that ended an earlier run."""
        self.signal = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals while the block runs."""
        self._agreed = False
        end_with_the_launcher()
        with self._request.listening():
            yield

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Stop and save on a request or at the end of the plan."""
        self._agreed = self._processes.any(self._request.requested)  # all stop after the same step, or none
        if self._agreed or self._is_complete():
            control.should_training_stop = True
            control.should_save = control.should_save or self._agreed
            control.should_evaluate = control.should_evaluate and not self._agreed  # a launcher waits only for seconds
        return control

    def has_ended_run(self) -> bool:
        """Return whether a signal ended the run before all planned steps. Called by all processes together."""
        if self._agreed and not self._is_complete():
            numbers = self._processes.gather(self._request.number)
            self.signal = next((number for number in numbers if number is not None), None)
        return self.signal is not None


class StagedCheckpoints:
    """Writes each checkpoint into a staging folder first, and renames it when all processes have written their files.

    Attributes:
        is_writing: whether a checkpoint is being written into the staging folder.

    Args:
        processes: the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        """Begin without a checkpoint."""
        self._processes = processes
        self.is_writing = False

    def output_dir(self, output: str) -> str:
        """Return the folder in which the Trainer makes a checkpoint's folder: ``output``, or its staging folder."""
        return str(Path(output) / STAGING_FOLDER) if self.is_writing else output

    def write(
        self,
        output: Path,
        step: int,
        save: Callable[[], None],
        publish: Callable[[Path, Path], None],
        limit: int | None,
    ) -> None:
        """Save a checkpoint. Called by all processes together.

        Args:
            output: folder of the run.
            step: number of the Trainer's step.
            save: saves this process's files into the staging folder.
            publish: makes the staging folder the checkpoint; called on rank 0 only.
            limit: the most checkpoints that are kept. None: all.

        Raises:
            CheckpointError: a process could not write its files; the staging folder is removed.
        """
        self._processes.from_main(lambda: prepare_staging(output, step))
        failure: CheckpointError | None = None
        self.is_writing = True
        try:
            with saving(output, step):
                save()
        except CheckpointError as error:
            failure = error
        finally:
            self.is_writing = False
        self._processes.from_main(lambda: None)
        failures = [error for error in self._processes.gather(failure) if error is not None]
        if failures:
            self._processes.from_main(lambda: discard_staging(output))
            raise failures[0]

        def finish() -> None:
            publish(staging_folder(output, step), checkpoint_folder(output, step))
            if limit:
                rotate(output, limit)
            with contextlib.suppress(OSError):  # not empty: it holds an older checkpoint to be restored
                (output / STAGING_FOLDER).rmdir()

        self._processes.from_main(finish)


logger = logging.get_logger(__name__)

_SEARCH = (
    "Hyper-parameter search trains many models on the private data, and each of them costs privacy. Search on public "
    "data, or account for every run, as `dpllm tune` does."
)


class DPTrainer(RowsTrainer):
    """Fine-tunes a transformers model with differential privacy.

    Guarantee: the released weights (each checkpoint and the final model) satisfy the (ε, δ) of `privacy_report` for
    the unit and the adjacency of ``privacy``. Logged losses and evaluation results are not covered; the report counts
    them.

    Args:
        model: any transformers model, PEFT-wrapped or not; its folder or its name on the Hub, which is loaded for the
            task that it was saved for; or a dictionary with the keys of a recipe's section ``model``, such as
            ``{"name": ..., "task": "sequence_classification", "quantization": "nf4", "peft": {...}}``.
        args: each option works, is ignored for a reason, or is refused before data are read
            (docs/training_arguments.md). ``per_device_train_batch_size`` is the microbatch, ``max_steps`` the number of
            private steps T (or ``num_train_epochs``, then T = ceil(epochs N / b)). ``gradient_accumulation_steps``
            stays 1: the logical batch is ``privacy.expected_batch_size``. ``optim_args="second_moment=corrected"``, or
            ``low_passed``, is AdamW without the known noise in its second moment (`dpllm.training.corrected_adamw`).
        privacy: the privacy guarantee, or a dictionary with the keys of a recipe's section ``privacy``.
        train_dataset: rows that can be read by number, with ``input_ids`` and ``labels`` (without labels, a causal
            language model learns all its input); or with raw columns, of which the tokenizer makes rows
            (`dpllm.data.raw_rows`): ``text``; ``prompt`` and ``completion``; ``messages``; ``text`` and ``label``. A
            stream is refused: steps draw from all N units.
        eval_dataset: rows for evaluation; its results are not covered by the guarantee.
        processing_class: the tokenizer, for raw columns, for padding and for saving. None: for a model that is given by
            its name, the one beside its weights.
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
        head: how a causal language model's losses are computed (`dpllm.training.head_losses.HeadLosses`): "auto",
            "whole" (from all logits) or "chunks". It changes them only by rounding.
        eval_is_public: declares that ``eval_dataset`` is public: schedules may follow it, and it is not a disclosure.
        start_is_independent: as for `dpllm.PrivateRun.attach`.
        noise_memory: "stored", "regenerated" or "auto", as for `dpllm.PrivateRun`.
        average: the average of the weights that is released in place of those after the last step, as a word or a
            mapping: "ema" or ``{"kind": "ema", "decay": 0.95}``, "tail" or ``{"kind": "tail", "share": 0.2}``
            (`dpllm.mechanism.averages`). After `train` the model holds it. ε does not depend on it.
        merge_adapter: whether a save after `train` also writes the model with its LoRA adapter added to its weights,
            in the folder "merged" with its own copy of the guarantee; not quantised, also if the base is.
        model_init: a function without arguments that returns the model, in place of ``model``. It is called once,
            before the plan is made, and may not read the data.
        peft_config: describes a new adapter for the model.
        compute_metrics: as for ``Trainer``; results on private rows are not covered, and the report counts them.
        preprocess_logits_for_metrics: as for ``Trainer``.
        data: how raw columns become rows: keys of a recipe's section ``data``, such as ``{"text_column": "note",
            "max_length": 512, "class_names": ["no", "yes"]}``. By default a row has as many tokens as tokenizer and
            model allow, at most 1,024. Names of classes are public facts and are never collected from the labels; they
            are written into the model's configuration.

    Raises:
        ConfigError, ValueError: an option would make the guarantee untrue; raised before any training.
    """

    rehearsal: str | None = None
    """What was rehearsed before the first step of the present or the last run, in words."""
    argument_table: ClassVar[Mapping[str, Argument]] = ARGUMENTS
    """The options of ``args`` that this trainer knows; one for a subclass of ``TrainingArguments`` adds its own."""

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        privacy: PrivacyConfig | Mapping[str, Any] | None = None,
        train_dataset: Any = None,
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
        head: str = "auto",
        eval_is_public: bool = False,
        start_is_independent: bool = False,
        noise_memory: str = "auto",
        average: Any = None,
        merge_adapter: bool = False,
        model_init: Callable[[], nn.Module] | None = None,
        peft_config: Any = None,
        compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        data: Mapping[str, Any] | None = None,
        **unknown: Unpack[Unknown],
    ) -> None:
        """Compute the plan and set up the Trainer."""
        refuse_unknown(unknown, type(self), args)
        refuse_ignored(self)
        require_functions(
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        args, privacy, keys = require_arguments(args), read_privacy(privacy), read_keys(data)
        refuse_steering(args, callbacks or [], optimizers[1], eval_is_public)
        kept, own = checked_average(average), optimizers[0] is not None
        choice("noise_memory", noise_memory, NOISE_MEMORIES)
        choice("head", head, HEADS)
        self._head = head
        if isinstance(max_tokens_per_microbatch, int) and max_tokens_per_microbatch < 1:
            raise ConfigError(f"max_tokens_per_microbatch must be at least 1, got {max_tokens_per_microbatch}")
        arguments = agreed_arguments(args, own, self.argument_table, kept, norm_method)
        private = [train_dataset] + ([] if eval_is_public or eval_dataset is None else [eval_dataset])
        given = GivenModel.of(
            model, model_init, peft_config, processing_class, keys.get("class_names"), args.seed, private
        )
        model, processing_class = given.model, given.tokenizer
        refuse_unusable_model(model, args, merge_adapter)
        self._merges = merge_adapter
        self.public, self.eval_is_public = list(public), eval_is_public
        self.notes = ReleaseNotes()  # facts about the release that only people know; set them before save_model()
        self.sources = PrivateSources(
            training=[train_dataset],
            held_out=[one for one in private[1:] if not isinstance(one, Mapping)],
            label_columns=["label", "labels", *(keys[one] for one in ("label_column", "tags_column") if one in keys)],
            class_names=keys.get("class_names"),
            preprocessing=[
                *own_parts(loss=compute_loss_func, collator=data_collator),
                *tokens_of_others(processing_class, model),
            ],
            public=[*public, str(getattr(processing_class, "name_or_path", ""))],
        )
        if pack_rows:
            refuse_unpackable(model, task_of(model), data_collator, compute_loss_func)
        check_start(model, args.output_dir, start_is_independent)
        self._start_points = Processes().from_main(lambda: edited_start(model, start_is_independent))
        self._sample = WeightSample(model)
        refuse_drawn_pieces(privacy, str(keys.get("long_records")))
        self._maker = self.row_maker(model, processing_class, keys)
        if keys and self._maker is None:
            raise ConfigError(f"data is for dpllm.DPTrainer; the options of {type(self).__name__} are in args")
        rows, held_out = self._make_rows(train_dataset, eval_dataset, privacy, data_collator)
        self._ends = self._end_with_turns(model, processing_class, rows)
        self._prepared = Prepared.of(
            model,
            arguments,
            privacy,
            rows,
            tokenizer=processing_class,
            collator=data_collator,
            max_tokens=max_tokens_per_microbatch,
            pack_rows=pack_rows,
            own_optimizer=own,
            norm_method=norm_method,
            start_is_independent=start_is_independent,
            noise_memory=noise_memory,
            average=kept,
            compile=compile_options(args),
        )
        if compute_loss_func is None and hasattr(model, "config"):
            refuse_other_classes(rows, task_of(model), getattr(model.config, "num_labels", 2))
        self._refuse_private_evaluation(held_out)
        self._start = StartingModel.of(model)
        self._head_losses: HeadLosses | None = None
        self._losses = self._row_losses(model, compute_loss_func, pack_rows)
        self._run: TrainerRun | None = None  # of the present or the last train()
        self._checkpoints = StagedCheckpoints(self.processes)
        self._interrupt = Interrupt(self.processes, lambda: self._run is not None and self._run.is_complete)
        self._log_keeper = LogKeeper(str(args.output_dir))
        super().__init__(
            model=model,
            args=arguments,
            data_collator=self._prepared.collate,
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=[SampleFirst(self), self._log_keeper, *(callbacks or []), self._interrupt, AttachFirst(self)],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_for(arguments, self._prepared.plan),
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if self.pop_callback(ProgressCallback) is not None:  # a notebook has another one
            self.add_callback(StepProgress(self._prepared.expected_batch(), lambda: self.epsilon))

    def _row_losses(self, model: nn.Module, compute_loss_func: RowLoss | None, pack_rows: bool) -> RowLosses:
        """Return the object that computes one loss per row; a trainer with other inputs may return its own."""
        if compute_loss_func is not None or task_of(model) != "causal_lm":
            if self._head == "chunks":
                raise ConfigError('head="chunks" is for the default loss of a causal language model. Leave it out')
            return RowLosses(compute_loss_func or default_row_loss(model), pack_rows)
        has_prompt = bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))
        self._head_losses = HeadLosses(self._head, has_prompt)
        return RowLosses(default_row_loss(model), pack_rows, self._head_losses)

    # -------------------------------------------------- the parts of the run, to read

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
        """The ledger of the present or the last run. None: `train` has not begun one."""
        return None if self._run is None else self._run.ledger

    @property
    def interrupted_by(self) -> int | None:
        """The signal that ended `train` early. None: no signal did."""
        return self._interrupt.signal

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
            raise ConfigError(_SEARCH)
        prepared = self._prepared
        prepared.refuse_replaced(self.train_dataset)
        if self.model_init is not None:
            raise ConfigError(
                "model_init was set on the DPTrainer, and the model that it makes was not checked: pass it to the "
                "constructor, which calls it once"
            )
        self._make_later_rows()
        self._refuse_private_evaluation(self.eval_dataset)
        refuse_changed(self.args, self.argument_table)
        refuse_steering(self.args, self.callback_handler.callbacks, self.lr_scheduler, self.eval_is_public)
        folder = Path(str(self.args.output_dir))
        restart = begin_in(folder, resume_from_checkpoint, self.processes)
        self._log_advice()
        require_finite(self._module, self.processes, "The model to train has")
        if not restart.continues:
            began = self._run is not None and self._run.ledger.num_steps > 0
            after = "after the constructor of the trainer and before train()"
            self._refuse_changed_start("in an earlier train() of this trainer" if began else after)
        self._interrupt.forget()
        checkpoint = checkpoint_to_resume(folder, restart.checkpoint, self.processes)
        if self._run is None or not self._run.is_attached:
            prepared.refuse_unclippable(self._module)
        self._rehearse_way_out(folder, restart.continues)
        ledger = prepared.open_ledger(folder, restart.continues, self.public, self.optimizer)
        with ledger.ended_on_failure():
            self._note_outlets(ledger)
            self._run = TrainerRun(prepared, ledger, checkpoint)
            self.args.max_steps = self._run.private.steps_planned
            if self.is_deepspeed_enabled:
                self._run.prepare_to_load(self.accelerator.state.deepspeed_plugin.deepspeed_config)
            if self.privacy.unused_parameters == "freeze":
                self._freeze_unused()
        with self._interrupt.listening():
            return self._train_to_the_end(self._run, folder, checkpoint, ignore_keys_for_eval)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a search trains many models on the private data.

        Raises:
            ConfigError: always; `dpllm tune` searches on public data, or charges its runs.
        """
        raise ConfigError(_SEARCH)

    def _rehearse_way_out(self, folder: Path, continues: bool) -> None:
        """Find out before any charge whether the model can be saved, loaded and used; on all processes together."""
        complete_generation_config(self._module)

        def on_main() -> str:
            new = bytes_to_write(self._module, self.args, self.plan.num_steps, self._merges)
            check_output_folder("train.output_dir", folder, REPORTS if continues else new)
            return rehearse(
                self._module,
                super(DPTrainer, self)._save,
                self.args,
                self.processing_class,
                self._merges,
                self.compute_loss_context_manager,
            )

        self.rehearsal = self.processes.from_main(on_main)
        logger.info("%s", self.rehearsal)

    def _freeze_unused(self) -> None:
        with self._losses.attention(self._module):
            names = self._run_of_now().private.freeze_unused(self._module, self._losses.after(self._prepare_inputs))
        if names and self.processes.is_main:
            logger.warning(
                "No loss reaches %d trainable parameter(s); they are frozen: %s", len(names), ", ".join(names)
            )

    def _refuse_private_evaluation(self, dataset: Any) -> None:
        """Make sure that the rows that were declared public are not the private rows.

        Raises:
            DataError: they are (`dpllm.data.own_rows`).
        """
        if self.eval_is_public:
            self.processes.together(lambda: refuse_own_rows(dataset, self._prepared.dataset))

    def _log_advice(self) -> None:
        """Log the settings that were measured worse. A caller's own optimizer or schedule is unknown."""
        if self.processes.is_main and self.optimizer is None and self.lr_scheduler is None:
            prepared = self._prepared
            for line in advice(prepared.plan, UpdateRule.of(self.args, prepared.plan.num_steps, prepared.average)):
                logger.warning("%s", line)

    def _train_to_the_end(
        self, run: TrainerRun, folder: Path, checkpoint: Path | None, ignore_keys_for_eval: Any
    ) -> TrainOutput:
        reason = "failed"
        try:
            with self._losses.attention(self._module):
                result = super().train(
                    str(checkpoint) if checkpoint else None, ignore_keys_for_eval=ignore_keys_for_eval
                )
            require_finite(self._module, self.processes, "Training ended with")
            run.private.check_before_saving()
            self._release_average()
            run.private.end_weights()
            reason = "interrupted" if self._interrupt.has_ended_run() else run.reason_of_end()
            return result
        finally:
            run.detach()
            if self._head_losses is not None:
                self._head_losses.clipper = None
            if reason in ("failed", "interrupted"):  # what is saved of it are its checkpoints
                run.end(folder, reason, self.notes)
            else:
                self._until_there_is_room(lambda: run.end(folder, reason, self.notes), folder)

    @property
    def _module(self) -> nn.Module:
        model: Any = self.model
        return model

    def _run_of_now(self) -> TrainerRun:
        assert self._run is not None, "train() makes the run"
        return self._run

    def get_train_dataloader(self) -> Any:
        """Return the units of each step, drawn by the plan's sampler; each process sees all and takes its share."""
        return LogicalBatches(self._run_of_now().private, self.train_dataset)

    def sample_weights(self) -> None:
        """Sample the weights that the Trainer has distributed, before callbacks run."""
        self._sample = WeightSample(self._module)

    def _refuse_changed_start(self, when: str) -> None:
        """Refuse weights that were written after the last sample, or note the declaration; on all processes."""
        everywhere = self.processes.gather(self._sample.changed(self._module))
        changed = sorted({name for names in everywhere for name in names})
        self._start_points += refuse_changed_start(changed, when, self._prepared.start_is_independent)

    def num_examples(self, dataloader: Any) -> int:
        """Return the public number of units, or of rows that are drawn singly, which ``Trainer`` logs."""
        if isinstance(dataloader, LogicalBatches):
            return self.plan.num_examples or self.plan.num_units
        return super().num_examples(dataloader)

    def attach(self) -> None:
        """Hook the model after the Trainer has distributed it, and before the first draw is charged."""
        if not self._run_of_now().is_attached:
            self._refuse_changed_start("at the beginning of the training, before the first step")
            for point in self._start_points:
                self._run_of_now().ledger.append_open_point(point)
        loss_of = self._losses.after(self._prepare_inputs)
        self._run_of_now().attach(
            self.model_wrapped, self.optimizer, self.is_deepspeed_enabled, loss_of, self.lr_scheduler
        )
        clipper = self._run_of_now().private.clipper
        if self._head_losses is not None and isinstance(clipper, GhostClipper):
            self._head_losses.clipper = clipper

    @property
    def _steps_began(self) -> float | None:
        return None if self._run is None else self._run.began

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Take one private step up to the optimizer; return the mean loss, a diagnostic that is not private."""
        del num_items_in_batch
        model.train()
        with self.compute_loss_context_manager():
            done = self._run_of_now().step(
                inputs["unit_ids"].numpy(),
                self._losses.after(self._prepare_inputs),
                progress_of(self.callback_handler.callbacks),
            )
        return torch.tensor(done.mean_loss, device=self.args.device)

    # ------------------------------------------------------ ε and the report

    @property
    def epsilon(self) -> float:
        """Return ε spent so far at the plan's δ, from the ledger; after `train`, the ε stated by the report."""
        if self.ledger is None or self.ledger.num_steps == 0:
            return 0.0
        if self.plan.selection is not None:
            return self.plan.epsilon
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
            note_changes(self._run.private.weights, self._module, self.ledger, self.processes)
        before = snapshot(folder) if self.args.should_save else {}
        # A checkpoint goes on from the weights of its step.
        with contextlib.nullcontext() if self._checkpoints.is_writing else self.weights_to_release():
            self._save_weights(folder, whole)
        if self._keeps_last and not self._checkpoints.is_writing:
            with self.last_weights():
                self._save_weights(folder / LAST_FOLDER, whole)
        together = self._save_merged(folder / MERGED_FOLDER) if self._merges else None
        if self.ledger is not None and self.args.should_save:
            if not self._checkpoints.is_writing:  # a checkpoint's manifest names its files
                note_release(self.ledger, folder, before)
            if together is not None:
                note_release(self.ledger, folder / MERGED_FOLDER, {})
                self._write_guarantee(folder / MERGED_FOLDER, trained=together)
            self._write_guarantee(folder)

    def _save_merged(self, folder: Path) -> Any:
        """Write the model with its adapter merged, on rank 0 and not during the training; return it, or None."""
        if not self.args.should_save or self._run is None or self._run.is_attached:
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
        """Write the model's files; at the end of a run, again until the disk has room for them."""

        def save(folder: Path) -> None:  # which takes weights out of the dictionary
            super(DPTrainer, self)._save(str(folder), None if state_dict is None else dict(state_dict))

        folder = Path(output_dir or str(self.args.output_dir))
        self._until_there_is_room(lambda: save(folder), folder, save)

    def _until_there_is_room(
        self, write: Callable[[], None], folder: Path, spare: Callable[[Path], None] | None = None
    ) -> None:
        """Write results on this process; while the run still steps, a full disk is an error, as ever."""
        stepping = self._run is None or self._run.is_attached or self._checkpoints.is_writing
        if not self.args.should_save or stepping:
            return write()
        if spare is None and is_whole(self._module):
            spare = super()._save  # type: ignore[assignment]
        until_there_is_room(write, folder, bytes_to_write(self._module, self.args, 0, self._merges), spare)

    def _save_weights(self, folder: Path, whole: bool) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(str(folder), _internal_call=True)
        elif whole:
            self._save(str(folder), state_dict=whole_state(self._module, self.processes, _is_adapter(self.model)))
        if self._ends and self.args.should_save and _is_adapter(self.model):  # PEFT saves no such configuration
            GenerationConfig(eos_token_id=self._ends).save_pretrained(str(folder))

    def _shards_suffice(self) -> bool:
        kind = str(self.accelerator.state.fsdp_plugin.state_dict_type)
        return "SHARDED" in kind and not _is_adapter(self.model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint completely or not at all; see `dpllm.privacy.checkpoints`."""
        output, step = Path(str(self.args.output_dir)), self.state.global_step
        require_finite(self._module, self.processes, f"checkpoint-{step} is not written: the model has")
        run = self._run_of_now()
        run.private.check_before_saving()
        save = functools.partial(super()._save_checkpoint, model, trial)
        self._checkpoints.write(output, step, save, run.publish, self.args.save_total_limit)

    def _get_output_dir(self, trial: Any) -> str:
        return self._checkpoints.output_dir(super()._get_output_dir(trial))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return no estimate: the Trainer's formula needs the tokens of a step, which depend on the secret draw."""
        del inputs
        return 0


def _is_adapter(model: Any) -> bool:
    return isinstance(model, PeftModel)
