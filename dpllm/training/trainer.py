"""DPTrainer: the Hugging Face ``Trainer`` with private steps.

One *logical* batch is one ``Trainer`` step: the loader yields the units drawn for it, `DPTrainer.training_step` cuts
them into microbatches and computes one private gradient, and the Trainer's own loop does the rest. Schedules, logging,
callbacks, checkpoints and ``max_steps`` therefore count private steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    PreTrainedTokenizerBase,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from dpllm.config import ConfigError, PrivacyConfig, refuse_drawn_pieces
from dpllm.config.output_folder import REPORTS, check_output_folder
from dpllm.config.recipe import HEADS
from dpllm.config.values import choice
from dpllm.data.chat import ChatTemplate
from dpllm.data.lengths import input_of, refuse_other_classes
from dpllm.data.private_tempdir import remove_private_folder
from dpllm.data.raw_rows import LONGEST, RowMaker, is_raw, is_stored, read_keys
from dpllm.data.records import chats_in
from dpllm.engines.finite import NonfiniteSteps, require_finite
from dpllm.engines.processes import DisagreementError, Processes, told_by_rank
from dpllm.engines.saved_state import is_start
from dpllm.ghost import GhostClipper, NormMethod
from dpllm.mechanism.limits import NOISE_MEMORIES
from dpllm.models.inputs import num_positions, refuse_unpackable
from dpllm.models.model_argument import GivenModel, names_of_classes
from dpllm.models.start_weights import WeightSample
from dpllm.models.starting_point import check_start, edited_start, refuse_changed_start, refuse_steering, takes_metrics
from dpllm.models.tasks import RowLoss, default_row_loss, task_of
from dpllm.models.writing import also_end_with, complete_generation_config
from dpllm.privacy.checkpoints import discard_start
from dpllm.privacy.ledger import read_ledger
from dpllm.privacy.private_folder import DIAGNOSTICS_FILE
from dpllm.privacy.run_folder import (
    COMPLETED,
    LOST_STEPS,
    STOPPED_AT_BUDGET,
    lost_fact,
    lost_steps,
    steps_of_weights,
)
from dpllm.report.model_card import has_card
from dpllm.report.statement import ReleaseNotes
from dpllm.training.argument_table import ARGUMENTS, Argument
from dpllm.training.arguments import (
    Unknown,
    compile_options,
    read_privacy,
    refuse_changed,
    refuse_unknown,
    require_arguments,
    require_functions,
)
from dpllm.training.attached import RunOptions
from dpllm.training.averaging import Averaging, checked_average
from dpllm.training.checks.row_sample import refuse_reading
from dpllm.training.choose_clipper import clipper_for
from dpllm.training.corrected_adamw import optimizer_for, require_asked
from dpllm.training.ledger_notes import PrivateSources, own_parts, tokens_of_others
from dpllm.training.preflight import refuse_unusable_model
from dpllm.training.resume import AUTO_RESUME, begin_in, checkpoint_to_resume, lost_words
from dpllm.training.row_losses import HeadLosses, RowLosses
from dpllm.training.run import PrivateRun
from dpllm.training.save_rehearsal import bytes_to_write, rehearse
from dpllm.training.screen import StepProgress, progress_of
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.signals import StopRequest, end_with_the_launcher
from dpllm.training.trainer_outputs import StartingModel, TrainerOutputs
from dpllm.training.trainer_setup import (
    agreed_arguments,
    expected_batch,
    open_ledger,
    prepare,
    refuse_changed_rows,
    refuse_ignored,
    refuse_unreadable,
    shares_nothing,
)
from dpllm.training.training_log import LogKeeper
from dpllm.training.weight_shards import require_whole_saves
from dpllm.training.workload import UpdateRule, advice


class FirstCallback(TrainerCallback):
    """Callback before the user's: it samples the prepared weights, so that `attach` notices changes by callbacks."""

    def __init__(self, trainer: DPTrainer) -> None:
        """Store the trainer."""
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sample."""
        self._trainer.sample_weights()


class LastCallback(TrainerCallback):
    """Callback after the user's: it attaches the model before an epoch's first draw, and ends the run.

    An engine or a part of the model that cannot be trained privately is refused here, before any charge.
    """

    def __init__(self, trainer: DPTrainer) -> None:
        """Store the trainer."""
        self._trainer = trainer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach."""
        self._trainer.attach()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop the training where the run ends."""
        self._trainer.stop_at_end(control)


class WhenAttached(TrainerCallback):
    """Callback that calls a function once, when the run is open and attached and its start can no longer be refused.

    Add it to an existing trainer, so that it runs after `LastCallback`.
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


logger = logging.get_logger(__name__)


class LogicalBatches:
    """The Trainer's data loader: each item is the set of units drawn for one private step.

    One pass is 1/q steps, the number in which every unit is expected to take part once, so that ``epoch`` in the logs
    keeps its meaning.
    """

    def __init__(self, run: PrivateRun, dataset: Any, attach: Callable[[], None]) -> None:
        """Draw from this run; ``attach`` hooks its model before the first draw."""
        self.dataset, self._run, self._attach = dataset, run, attach

    def __len__(self) -> int:
        """Steps per expected pass over the units."""
        return max(1, round(1 / self._run.plan.sampling_rate))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Draw one pass; the draws of all passes are independent. The pass ends when all steps are charged."""
        if self._run.ledger.num_steps >= self._run.steps_planned:
            return
        self._attach()  # has no effect unless somebody removed `LastCallback`
        for unit_ids in self._run.draws(len(self)):
            yield {"unit_ids": torch.from_numpy(unit_ids)}


_CONTROLS = ("training_stop", "epoch_stop", "save", "evaluate", "log")  # decisions of a TrainerControl
_SEARCH = (
    "Hyperparameter search trains many models on the private data, and each of them costs privacy. Search on public "
    "data, or account for every run, as `dpllm methods tune` does."
)


class DPTrainer(TrainerOutputs):
    """Fine-tunes a transformers model with differential privacy.

    Guarantee: the released weights (each checkpoint and the final model) satisfy the (ε, δ) of `privacy_report` for
    the unit and the adjacency of ``privacy``. Logged losses and evaluation results are not covered; the report counts
    them.

    Args:
        model: any transformers model, PEFT-wrapped or not; its folder or its name on the Hub, which is loaded for the
            task for which it was saved; or a dictionary with the keys of a recipe's section ``model``, such as
            ``{"name": ..., "task": "sequence_classification", "quantization": "nf4", "adapter": {...}}``.
        args: each option works, is ignored for a reason, or is refused before data are read
            (docs/training_arguments.md). ``per_device_train_batch_size`` is the microbatch, ``max_steps`` the number of
            private steps T (or ``num_train_epochs``, then T = ceil(epochs N / b)). ``gradient_accumulation_steps``
            stays 1: the logical batch is ``privacy.expected_batch_size``. ``optim_args="second_moment=corrected"``, or
            ``low_passed``, is AdamW without the known noise in its second moment (`dpllm.training.corrected_adamw`).
        privacy: the privacy guarantee, or a dictionary with the keys of a recipe's section ``privacy``.
        train_dataset: rows that can be read by number, with ``input_ids`` and ``labels`` (without labels, a causal
            language model learns all its input); or rows with raw columns, which the tokenizer turns into rows
            (`dpllm.data.raw_rows`): ``text``; ``prompt`` and ``completion``; ``messages``; ``text`` and ``label``. A
            stream is refused, since steps draw from all N units.
        eval_dataset: rows for evaluation; its results are not covered by the guarantee.
        processing_class: the tokenizer, for raw columns, for padding and for saving. None: for a model given by name,
            the tokenizer stored with its weights.
        data_collator: makes inputs from rows; the default pads to the longest row. A collator of transformers
            receives the columns that the model takes (``remove_unused_columns``), any other collator all columns.
        compute_loss_func: ``(outputs, labels) -> (B,)`` losses, each computed only from its own row; the default fits
            the model's task.
        callbacks: as for ``Trainer``.
        optimizers: as for ``Trainer``.
        public: earlier training on public data, one line each, for the report.
        max_tokens_per_microbatch: tokens of a microbatch, padding included. It replaces the number of rows,
            ``per_device_train_batch_size``, so a microbatch of short rows has many. "auto": the largest number
            that fits on the GPU, found before the first step (`dpllm.training.out_of_memory`); refused if the model
            is sharded.
        pack_rows: concatenate the rows of a microbatch without padding, for causal language models. The attention
            processes each row separately (`dpllm.models.inputs`) during `train`; evaluation pads as before.
        norm_method: as for `dpllm.training.attached.RunOptions`.
        head: how a causal language model's losses are computed (`dpllm.training.row_losses.HeadLosses`): "auto",
            "whole" (from all logits) or "chunks". The choice changes them only by rounding.
        eval_is_public: declares that ``eval_dataset`` is public, so schedules may follow it and it is not a disclosure.
        start_is_independent: as for `dpllm.training.attached.RunOptions`.
        noise_memory: "stored", "regenerated" or "auto", as for `dpllm.PrivateRun`.
        average: the average of the weights to release instead of the weights after the last step, as a word or a
            mapping: "ema" or ``{"kind": "ema", "decay": 0.95}``, "tail" or ``{"kind": "tail", "share": 0.2}``
            (`dpllm.mechanism.averages`). After `train` the model holds it. ε does not depend on it.
        merge_adapter: whether a save after `train` also writes the model with its LoRA adapter merged into its weights,
            to the folder "merged" with its own copy of the guarantee. The merged model is not quantised, even if the
            base is.
        model_init: a function without arguments that returns the model, instead of ``model``. It is called once,
            before the plan is made, and may not read the data.
        peft_config: describes a new adapter for the model.
        compute_metrics: as for ``Trainer``; results on private rows are not covered, and the report counts them.
        preprocess_logits_for_metrics: as for ``Trainer``.
        data: how raw columns become rows: keys of a recipe's section ``data``, such as ``{"columns": {"text": "note"},
            "max_length": 512, "class_names": ["no", "yes"]}``. By default a row has as many tokens as tokenizer and
            model allow, at most 1,024. Class names are public facts and are never collected from the labels; they
            are written into the model's configuration.

    Raises:
        ConfigError, ValueError: an option would make the guarantee untrue; raised before any training.
    """

    rehearsal: str | None = None
    """What was rehearsed before the first step of the current or the last run, in words."""
    interrupted_by: int | None = None
    """The signal that ended the last `train` early. None: no signal did."""
    argument_table: ClassVar[Mapping[str, Argument]] = ARGUMENTS
    """The options of ``args`` that this trainer supports; one for a subclass of ``TrainingArguments`` adds its own."""
    _maker: RowMaker | None = None
    _made: Sequence[tuple[Any, Any]] = ()  # the constructor's data sets with the rows made from them
    _checkpoint: Path | None = None  # from which the run continues
    _nonfinite: NonfiniteSteps  # of the run
    _seals_start = False  # whether the weights before the first step are saved, since the run may be restarted
    _stops_on_signal = False  # whether the processes agreed, at the end of the last step, to stop on a signal

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
        columns = keys.get("columns", {})
        self.sources = PrivateSources(
            training=[train_dataset],
            held_out=[one for one in private[1:] if not isinstance(one, Mapping)],
            label_columns=["label", "labels", *(columns[one] for one in ("label", "tags") if one in columns)],
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
        self._noise_memory = noise_memory
        self._options = RunOptions(
            norm_method=norm_method,
            start_is_independent=start_is_independent,
            gradients=privacy.gradients,
            compile=compile_options(args),
        )
        self._prepared = prepare(
            model,
            arguments,
            privacy,
            rows,
            tokenizer=processing_class,
            collator=data_collator,
            max_tokens=max_tokens_per_microbatch,
            pack_rows=pack_rows,
            own_optimizer=own,
            average=kept,
        )
        if compute_loss_func is None and hasattr(model, "config"):
            refuse_other_classes(rows, task_of(model), getattr(model.config, "num_labels", 2))
        self._refuse_private_evaluation(held_out)
        self._start = StartingModel.of(model)
        self._head_losses: HeadLosses | None = None
        self._losses = self._row_losses(model, compute_loss_func, pack_rows)
        self._stop_request = StopRequest()
        self._log_keeper = LogKeeper(str(args.output_dir))
        super().__init__(
            model=model,
            args=arguments,
            data_collator=self._prepared.collate,
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=[FirstCallback(self), self._log_keeper, *(callbacks or []), LastCallback(self)],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_for(arguments, self._prepared.plan),
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if self.pop_callback(ProgressCallback) is not None:  # a notebook has a different one
            self.add_callback(StepProgress(expected_batch(self._prepared), lambda: self.epsilon))

    def _row_losses(self, model: nn.Module, compute_loss_func: RowLoss | None, pack_rows: bool) -> RowLosses:
        """Return the object that computes one loss per row; a trainer with other inputs may return its own."""
        if compute_loss_func is not None or task_of(model) != "causal_lm":
            if self._head == "chunks":
                raise ConfigError('head="chunks" is for the default loss of a causal language model. Leave it out')
            return RowLosses(compute_loss_func or default_row_loss(model), pack_rows)
        has_prompt = bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))
        self._head_losses = HeadLosses(self._head, has_prompt)
        return RowLosses(default_row_loss(model), pack_rows, self._head_losses)

    # ------------------------------------------------------------------ the run

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train for the plan's steps and write the privacy report next to the model.

        Args:
            resume_from_checkpoint: a checkpoint of this output folder, True for its latest complete one, or "auto" to
                start if there is nothing to resume (`dpllm.training.resume`). Any number of processes may
                continue it. The ledger is continued: steps lost in a crash stay charged, and batches and noise are
                drawn from fresh entropy.
            trial: refused; hyperparameter search on the private data costs privacy.
            ignore_keys_for_eval: as for ``Trainer``.

        Raises:
            ValueError: the folder holds another run, its ledger belongs to another plan, or no checkpoint is complete.
            RunCompletedError: "auto", and the run in the folder has ended as planned.
        """
        if trial is not None:
            raise ConfigError(_SEARCH)
        refuse_changed_rows(self._prepared, self.train_dataset)
        if self.model_init is not None:
            raise ConfigError(
                "model_init was set on the DPTrainer, so the model that it makes was not checked: pass it to the "
                "constructor, which calls it once"
            )
        self._make_later_rows()
        self._refuse_private_evaluation(self.eval_dataset)
        refuse_changed(self.args, self.argument_table)
        if self.args.max_steps != (steps := self.plan.num_steps if self._run is None else self._run.steps_planned):
            raise ConfigError(
                f"train.max_steps is {self.args.max_steps}, but the run was planned with {steps} steps when DPTrainer "
                "was made, and noise and ε depend on their number. Set max_steps or num_train_epochs in the arguments "
                "of DPTrainer"
            )
        refuse_steering(self.args, self.callback_handler.callbacks, self.lr_scheduler, self.eval_is_public)
        folder = Path(str(self.args.output_dir))
        self.processes.set_time_limit(self.args.ddp_timeout, remove_private_folder)
        restart = begin_in(folder, resume_from_checkpoint, self.processes)
        self._log_advice()
        require_finite(self._module, self.processes, "The model to train has")
        if not restart.continues:
            began = self._run is not None and self._run.ledger.num_steps > 0
            after = "after the constructor of the trainer and before train()"
            self._refuse_changed_start("in an earlier train() of this trainer" if began else after)
        self.interrupted_by, self._stops_on_signal = None, False
        weights_only = bool(self.args.save_only_model)
        continued = checkpoint_to_resume(folder, restart.checkpoint, self.processes, self.setup, weights_only)
        self._continue_from(continued)
        checkpoint = None if continued is None else continued.checkpoint
        saves = str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) != "no"
        self._seals_start = checkpoint is None and (saves or resume_from_checkpoint == AUTO_RESUME)
        if not self._is_attached:  # refuses a parameter that cannot be clipped, before anything is charged or written
            clipping, options = self.plan.mechanism.clipping, self._options
            clipper_for(options.gradients, self._module, clipping, options.norm_method).remove()
        self._rehearse_way_out(folder, restart.continues)
        run, reason = self._open_run(folder, restart.continues, checkpoint), "failed"
        end_with_the_launcher()
        with self._stop_request.listening():
            try:
                with self.processes.during("training"), self._losses.attention(self._module):
                    start = str(checkpoint) if checkpoint else None
                    result = super().train(start, ignore_keys_for_eval=ignore_keys_for_eval)
                require_finite(self._module, self.processes, "Training ended with")
                run.check_before_saving()
                if self.averaging is not None:
                    self.attach()  # a resume without remaining steps has not attached it
                    self.averaging.release()
                run.end_weights()
                reason = self._reason_of_end(run)
                return result
            finally:
                self.is_in_train = False  # after an error the Trainer does not reset it
                run.detach()
                if self._head_losses is not None:
                    self._head_losses.clipper = None
                if reason in ("failed", "interrupted"):  # such a run saves only checkpoints
                    self._end(run, folder, reason)
                else:
                    self._until_there_is_room(lambda: self._end(run, folder, reason), folder)

    def _open_run(self, folder: Path, continues: bool, checkpoint: Path | None) -> PrivateRun:
        """Open the ledger, charge the budget and make the run for a ``train()``; on all processes together."""
        prepared = self._prepared
        ledger = open_ledger(prepared, folder, continues, self.public, self.optimizer)
        with ledger.ended_on_failure():
            self._note_lost_steps(ledger, checkpoint)
            self._note_outputs(ledger)
            rows = replace(prepared.rows, fetch_ahead=shares_nothing(prepared.dataset, prepared.collate))
            self._run = run = PrivateRun(self.plan, rows, ledger, self.privacy.seed, self._noise_memory)
            self._averaging = None if prepared.average is None else Averaging(prepared.average, self.plan.num_steps)
            self._checkpoint, self._steps_began, self._log_disclosed = checkpoint, None, False
            self._nonfinite = NonfiniteSteps(self.plan.expected_batch_size)
            self.args.max_steps = run.steps_planned
            if self.privacy.unused_parameters == "freeze":
                self._freeze_unused()
        return run

    def _note_lost_steps(self, ledger: SharedLedger, checkpoint: Path | None) -> None:
        """Record in the ledger, and log, how many charged steps the resumed weights do not contain."""
        if checkpoint is None:
            self.processes.from_main(lambda: discard_start(ledger.path.parent))  # left by a run that took no step
            return
        contents = self.processes.from_main(lambda: read_ledger(ledger.path))
        lost = contents.num_steps - (self.processes.from_main(lambda: steps_of_weights(checkpoint)) or 0)
        if lost or lost_steps(contents):
            ledger.append_fact(LOST_STEPS, lost_fact(lost, contents))
        left = (ledger.steps_planned or self.plan.num_steps) - contents.num_steps
        if lost and self.processes.is_main:
            logger.warning("%s", lost_words(checkpoint.name, contents.num_steps, lost, left))

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a search trains many models on the private data.

        Raises:
            ConfigError: always; `dpllm methods tune` searches on public data, or charges its runs.
        """
        raise ConfigError(_SEARCH)

    def _rehearse_way_out(self, folder: Path, continues: bool) -> None:
        """Check before any charge whether the model can be saved, loaded and used; on all processes together."""
        complete_generation_config(self._module)

        def on_main() -> str:
            new = bytes_to_write(self._module, self.args, self.plan.num_steps, self._merges, self._seals_start)
            check_output_folder("train.output_dir", folder, REPORTS if continues else new)
            return rehearse(
                self._module,
                super(TrainerOutputs, self)._save,
                self.args,
                self.processing_class,
                self._merges,
                self.compute_loss_context_manager,
            )

        self.rehearsal = self.processes.from_main(on_main)
        logger.info("%s", self.rehearsal)

    def _freeze_unused(self) -> None:
        with self._losses.attention(self._module):
            names = self._run_of_now().freeze_unused(self._module, self._losses.after(self._prepare_inputs))
        if names and self.processes.is_main:
            logger.warning(
                "No loss reaches %d trainable parameter(s); they are frozen: %s", len(names), ", ".join(names)
            )

    def _log_advice(self) -> None:
        """Warn about settings that performed worse in measurements. A caller's own optimizer or schedule is unknown."""
        if self.processes.is_main and self.optimizer is None and self.lr_scheduler is None:
            prepared = self._prepared
            for line in advice(prepared.plan, UpdateRule.of(self.args, prepared.plan.num_steps, prepared.average)):
                logger.warning("%s", line)

    def stop_at_end(self, control: TrainerControl) -> None:
        """End the training after the current step on a signal, or when all steps are charged; on all processes.

        On a signal (`dpllm.training.signals`) a checkpoint is saved first. A resumed run ends when the plan's steps are
        used up, since steps lost in a crash were charged.
        """
        mine = [self._stop_request.requested, *(getattr(control, f"should_{name}") for name in _CONTROLS)]
        requests, *flags = zip(*self.processes.gather_numbers(mine), strict=True)
        for name, by_rank in zip(_CONTROLS, flags, strict=True):
            if len(set(by_rank)) > 1:
                shown = told_by_rank([bool(flag) for flag in by_rank])
                raise DisagreementError(
                    f"A callback set control.should_{name} on some processes only ({shown}), so they would wait for "
                    "each other. Decide on one process, and send the decision to the others"
                )
        stops = self._stops_on_signal = any(requests)  # all processes stop after the same step, or none does
        if stops or self._run_of_now().is_complete:
            control.should_training_stop = True
            control.should_save = control.should_save or stops
            control.should_evaluate = control.should_evaluate and not stops  # a launcher waits only a few seconds

    def _reason_of_end(self, run: PrivateRun) -> str:
        """Return the reason for which a run ended without an error, for the ledger; on all processes together."""
        if self._stops_on_signal and not run.is_complete:
            numbers = self.processes.gather(self._stop_request.number)
            self.interrupted_by = next(number for number in numbers if number is not None)
            return "interrupted"
        wanted = self.plan.num_steps_wanted or self.plan.num_steps
        if run.steps_planned == wanted or not run.is_complete:
            return COMPLETED  # the ledger writes "stopped early" where steps are missing
        return f"{STOPPED_AT_BUDGET}, after {run.steps_planned} of {wanted} steps"

    def _end(self, run: PrivateRun, folder: Path, reason: str) -> None:
        """Write the end to the ledger, and write the report; after a failure, an error here must not hide the first."""
        try:
            run.ledger.append_end(reason, independent=self.privacy.stop == "independent")
            if run.is_main:
                self._write_guarantee(folder, with_card=has_card(folder))
        except (OSError, ValueError) as error:
            if reason != "failed":
                raise
            logger.error("the end of the run could not be written: %s", error)

    def _run_of_now(self) -> PrivateRun:
        assert self._run is not None, "train() makes the run"
        return self._run

    def get_train_dataloader(self) -> Any:
        """Return the units of each step, drawn by the plan's sampler; each process sees all and takes its share."""
        return LogicalBatches(self._run_of_now(), self.train_dataset, self.attach)

    def sample_weights(self) -> None:
        """Sample the weights that the Trainer has distributed, before callbacks run."""
        self._sample = WeightSample(self._module)

    def _refuse_changed_start(self, when: str) -> None:
        """Refuse weights that changed after the last sample, or note the declaration; on all processes."""
        everywhere = self.processes.gather(self._sample.changed(self._module))
        changed = sorted({name for names in everywhere for name in names})
        self._start_points += refuse_changed_start(changed, when, self._options.start_is_independent)

    def num_examples(self, dataloader: Any) -> int:
        """Return the public number of units, or of rows that are drawn separately, which ``Trainer`` logs."""
        if isinstance(dataloader, LogicalBatches):
            return self.plan.num_examples or self.plan.num_units
        return super().num_examples(dataloader)

    def attach(self) -> None:
        """Hook the model after the Trainer has distributed it and before the first draw is charged; only once.

        The time of the steps is counted from here, after the callbacks at the start of the training.
        """
        run, averaging, checkpoint = self._run_of_now(), self.averaging, self._checkpoint
        if self._is_attached:
            return
        self._refuse_changed_start("at the beginning of the training, before the first step")
        for point in self._start_points:
            run.ledger.append_open_point(point)
        self._steps_began = time.time()
        if self.is_deepspeed_enabled and averaging is not None:
            require_whole_saves(self.model_wrapped)
        require_asked(self._prepared.arguments, self.optimizer)
        loss_of = self._losses.after(self._prepare_inputs)
        # A scheduler that follows public evaluations has no rates that could be computed before the training.
        schedule = None if takes_metrics(self.lr_scheduler) else self.lr_scheduler
        run.attach_with(self._options, self.model_wrapped, self.optimizer, averaging, loss_of, schedule)
        if averaging is not None and checkpoint and not is_start(checkpoint):
            averaging.load(checkpoint)
        if self._seals_start:
            self._seals_start = False
            self._save_start()
        if self._head_losses is not None and isinstance(run.clipper, GhostClipper):
            self._head_losses.clipper = run.clipper

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Take one private step up to the optimizer; return the mean loss, a diagnostic that is not private.

        Raises:
            NonfiniteError: no unit has had a finite gradient for half a batch of units.
            ConfigError, ValueError: see `PrivateRun.step`.
        """
        del num_items_in_batch
        run = self._run_of_now()
        model.train()
        with self.compute_loss_context_manager():
            loss_of, callbacks = self._losses.after(self._prepare_inputs), self.callback_handler.callbacks
            done = run.step(inputs["unit_ids"].numpy(), loss_of, progress_of(callbacks))
            self._nonfinite.look(done.num_units, done.num_nonfinite, run.ledger.num_steps)
        if done.num_divided:
            logger.warning(
                "Memory ran out %d time(s), and microbatches were split in half and retried; no step was lost. A "
                "microbatch has at most %d tokens from now on: set max_tokens_per_microbatch (in a recipe "
                "microbatch.tokens) to this number in the next run.",
                done.num_divided,
                run.max_tokens,
            )
        if done.num_nonfinite:
            logger.warning_once(
                "Some units have a non-finite gradient and contribute nothing; %s counts them. If the loss "
                "does not fall, look for "
                "overflow: a lower learning rate, bf16 instead of fp16 weights.",
                DIAGNOSTICS_FILE,
            )
        return torch.tensor(done.mean_loss, device=self.args.device)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the expected logical batch, from which the Trainer computes ``train_samples_per_second``.

        It is the expected, not the realised, number of units of privacy (of rows, if they are drawn separately). The
        Trainer's own number counts microbatches.
        """
        del args
        return self.plan.expected_batch_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return no estimate: the Trainer's formula needs the tokens of a step, which depend on the secret draw."""
        del inputs
        return 0

    # ------------------------------------------------------------------ raw columns

    def row_maker(self, model: Any, tokenizer: Any, keys: Mapping[str, Any]) -> RowMaker | None:
        """Return the object that makes rows from raw columns; None in a trainer that makes its rows itself.

        Args:
            model: model to train.
            tokenizer: tokenizer of the model, or None.
            keys: keys of a recipe's section ``data``.
        """
        return RowMaker(
            tokenizer=tokenizer,
            task=task_of(model),
            source=input_of(model, ""),
            num_labels=getattr(getattr(model, "config", None), "num_labels", None),
            class_names=names_of_classes(model),
            longest=num_positions(model) or LONGEST,
            keys=keys,
        )

    def _make_rows(self, train: Any, evaluation: Any, privacy: PrivacyConfig, collator: Any) -> tuple[Any, Any]:
        """Return the rows of the private data and the rows for evaluation; on all processes together.

        Raises:
            ConfigError: raw columns cannot be used with the caller's own collator.
            DataError: raw records depend on records that were read before them, or on random numbers.
        """
        keep = [privacy.unit] if privacy.protects == "user" and privacy.unit else []
        rows = self._rows_of_raw(train, "train_dataset", keep)
        if collator is not None and is_raw(train, rows):
            raise ConfigError(
                "train_dataset has raw columns, which DPTrainer tokenises and pads, but a data_collator is given as "
                "well: leave data_collator out, or tokenise the rows before"
            )
        if is_raw(train, rows) and not is_stored(train):
            Processes().together(lambda: refuse_reading(train.__getitem__, len(train)))
        self._made = ((train, rows),)
        held_out = self._rows_of_raw(evaluation, "eval_dataset")
        several = isinstance(evaluation, Mapping)
        self._made += tuple((evaluation[key], held_out[key]) for key in evaluation) if several else ()
        self._made += ((evaluation, held_out),)
        if self.eval_is_public and is_raw(train, rows):
            public = [raw for raw, made in self._made[1:] if _is_made_of(raw, made)]
            Processes().together(lambda: self._note_public_rows(rows, train, public, keep))
        return rows, held_out

    def _end_with_turns(self, model: Any, tokenizer: Any, rows: Any) -> list[int]:
        """Make a model that is trained on conversations end its texts where a turn ends.

        Surprising behaviour of the template is logged.

        Returns:
            The tokens that end a text; none if the rows were not made from conversations.
        """
        made = chats_in(rows)
        if made is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
            return []
        template = ChatTemplate(tokenizer)
        for note in template.notes(masked=made == "turns") if Processes().is_main else ():
            logger.warning("%s.", note)
        end = template.turn_end()
        return also_end_with(model, [] if end is None else [end])

    def _note_public_rows(self, rows: Any, train: Any, public: Sequence[Any], keep: Sequence[str]) -> None:
        for raw in public:
            if self._maker is not None:
                self._maker.note_public_rows(rows, train, raw, keep)

    def _rows_of_raw(self, dataset: Any, words: str, keep: Sequence[str] = ()) -> Any:
        """Return rows; those that need no change, names of data sets and None are returned unchanged."""
        if dataset is None or isinstance(dataset, str) or self._maker is None:
            return dataset
        for raw, rows in self._made:
            if dataset is raw or dataset is rows:
                return rows
        if isinstance(dataset, Mapping) and words != "train_dataset":
            return {key: self._rows_of_raw(one, f"{words}[{key!r}]") for key, one in dataset.items()}
        if words != "train_dataset" and not _has_columns(dataset):
            return dataset  # a stream, or other rows, which `Trainer` evaluates as they are
        refuse_unreadable(dataset, words)
        maker = self._maker
        return Processes().together(lambda: maker.rows(dataset, words, keep))

    def _make_later_rows(self) -> None:
        """Make rows from evaluation data that were set after the constructor."""
        self.eval_dataset = self._rows_of_raw(self.eval_dataset, "eval_dataset")

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate as ``Trainer`` does, also on raw columns; the ledger counts it, unless the rows are public."""
        self._make_later_rows()
        return super().evaluate(self._rows_of_raw(eval_dataset, "eval_dataset"), ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """Predict as ``Trainer`` does, also on raw columns; the ledger counts it, unless the rows are public."""
        self._make_later_rows()
        return super().predict(self._rows_of_raw(test_dataset, "test_dataset"), ignore_keys, metric_key_prefix)


def _is_made_of(raw: Any, rows: Any) -> bool:
    """Return whether rows were made from the raw columns of a data set."""
    return raw is not None and not isinstance(raw, str | Mapping) and _has_columns(raw) and is_raw(raw, rows)


def _has_columns(dataset: Any) -> bool:
    """Return whether rows can be read by number and are dictionaries (or texts, which are refused)."""
    if hasattr(dataset, "column_names"):
        return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return False
    return len(dataset) > 0 and isinstance(dataset[0], Mapping | str)
