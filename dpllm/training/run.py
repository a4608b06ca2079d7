"""Run private steps on one process or many: draws, division of the units, noise, checks and ledger.

`dpllm.training.trainer` drives a run; so does a custom loop:

    model, optimizer = accelerator.prepare(model, optimizer)
    run = PrivateRun.start("runs/mine", plan, rows)
    run.attach(model, optimizer)
    for unit_ids in run.draws(plan.num_steps):
        run.step(unit_ids, loss_of)
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpllm.config import ConfigError
from dpllm.engines import DeepSpeedZero, model_inside
from dpllm.engines.checksums import check_before_saving
from dpllm.engines.processes import Processes, found_by
from dpllm.ghost import GhostClipper, GhostError, NormMethod, PerUnitClipper, UnitClipper
from dpllm.ghost.parameters import no_gradient
from dpllm.mechanism.generators import NoiseSource, stream_of
from dpllm.mechanism.sampling import seeded_rng
from dpllm.models.run_weights import RunWeights, note_changes, refuse_other_weights, sums_of_trained
from dpllm.models.starting_point import edited_start, takes_metrics
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, read_ledger
from dpllm.privacy.ledger_reader import LedgerHead
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.rounding import format_epsilon
from dpllm.privacy.run_folder import COMPLETED, note_own_release, snapshot
from dpllm.report.statement import write_report
from dpllm.training.attached import Attached, RunOptions, attach
from dpllm.training.averaging import Averaging, refuse_other_average
from dpllm.training.checks import agreement
from dpllm.training.checks.differences import Differences
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.randomness import SecretStreams
from dpllm.training.checks.watch import DECLARED, INDEPENDENT, OWN_LOOP, WatchError
from dpllm.training.choose_clipper import FROZEN, freeze_unused, in_parts
from dpllm.training.draws import LEFT_OUT, DrawError, Draws, mode_now
from dpllm.training.ledger_notes import PrivateSources, note_units, note_users
from dpllm.training.microbatches import StepBatch, microbatches
from dpllm.training.out_of_memory import (
    TOKENS_WITHOUT_MEASURE,
    MicrobatchTooLargeError,
    memory_of,
    needed_later,
    rows_that_fit,
)
from dpllm.training.resume import require_shared_folder
from dpllm.training.rows import LossOf, TrainingRows
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.step import (
    Progress,
    StepDiagnostics,
    private_step,
    refuse_leftovers,
    refuse_unfinished,
    unseen,
)

logger = logging.getLogger(__name__)


class RunEntropy:
    """The random numbers of one start or resume of a run.

    Guarantee: no random number is repeated after a resume, since a new object takes fresh entropy. Draws use 256 bits,
    the division of units 128 bits that all processes share, and each process's noise its own bits.

    Attributes:
        noise: this process's share of the noise.
        first: number of steps charged before this start or resume, at which draws and noise begin again.
        streams: seeds the global generators separately on each process within a step, and identically after it.

    Args:
        plan: plan of the run.
        processes: the processes of the run; all of them make this object together.
        ledger: the run's ledger.
        seed: None, or a fixed seed for tests, with which nothing is private.
        noise_memory: whether noise of earlier steps is stored or regenerated; it changes no value.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        processes: Processes,
        ledger: SharedLedger,
        seed: int | None,
        noise_memory: str = "auto",
    ) -> None:
        """Draw the entropy, and share the part that all processes need."""
        self._sampler, self._seed = plan.mechanism.sampler, seed
        self._deal_key = processes.from_main(lambda: secrets.randbits(128) if seed is None else seed) & (2**128 - 1)
        generator = NoiseSource(seed, processes.rank, plan.randomness)
        self.noise = stream_of(plan.mechanism.noise, generator, plan.num_steps, noise_memory)
        self.first = ledger.num_steps
        self.streams = SecretStreams(processes, seed)

    def draws(self) -> Iterator[NDArray[np.int64]]:
        """Return the sampler's draws; the processes use those of rank 0. Call it once: it starts the sampler."""
        return self._sampler.steps(
            seeded_rng(int.from_bytes(secrets.token_bytes(32), "little") if self._seed is None else self._seed)
        )

    def deal_key(self, num_steps: int) -> int:
        """Return the key that divides the units of a step over the processes; the same on every process."""
        return self._deal_key + num_steps


class PrivateRun:
    """Draws units, divides them over the processes, and takes private steps; the same on every process.

    Guarantee: `draws` makes one truncated Poisson draw per step over all units, on rank 0 from 256 bits of its
    operating system, and sends it to every process; each process draws its share of the noise from its own entropy.
    Neither is stored, so a resumed run repeats no draw and no noise. Before every step the processes compare the step's
    number, its units and, for replicas, the trainable weights.

    Attributes:
        max_tokens: the largest number of tokens of a microbatch in the next step: given by ``rows``, found by trial, or
            reduced after a step that ran out of memory.

    Args:
        plan: the constants.
        rows: the data.
        ledger: the ledger to charge.
        seed: None, or a fixed seed for tests, with which nothing is private, and the report says so.
        noise_memory: for correlated noise: "stored" keeps the noise of earlier steps, "regenerated" draws it again in
            each step, and "auto" stores as much as fits in a share of the memory (`dpllm.mechanism.generators`). It
            changes no value.

    Raises:
        DisagreementError: the processes differ in plan, data or versions.
        ConfigError: a seed is given without a seeded plan, or a seeded plan without a seed; or the plan was made for
            different rows.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        rows: TrainingRows,
        ledger: SharedLedger,
        seed: int | None = None,
        noise_memory: str = "auto",
    ) -> None:
        """Check that the processes agree, and share the entropy of the draws."""
        if (seed is not None) != plan.seeded:
            raise ConfigError(
                f"The seed of the run is {seed}, but the plan has seeded={plan.seeded}, so the report would state the "
                "entropy wrongly. Set privacy.seed, which sets both, or neither"
            )
        if plan.event.restarts and ledger.has_run:
            raise ConfigError(
                "A run in this process already uses this ledger, and its noise is correlated over steps: another run "
                "would begin a new cycle of draws and noise, which the ledger does not state. Use PrivateRun.resume"
            )
        self.processes = Processes()
        if self.processes.size > 1:
            constants = {f"the plan's {name}": repr(value) for name, value in plan.to_dict().items()}
            self.processes.agree({**constants, **agreement.software(), **rows.facts()})
        rows.check_plan(plan)  # now, so that an error is raised by all processes
        self._plan, self.rows, self.ledger = plan, rows, ledger
        # Only the run's steps move the threshold. An audit's stand-in does not adapt its clipping and has none.
        self._threshold = None if plan.mechanism.first_threshold is None else ledger.hand_over_threshold()
        self._entropy = RunEntropy(plan, self.processes, ledger, seed, noise_memory)
        self._draws = Draws(plan, ledger, self.processes, self._entropy.draws())
        self.max_tokens = rows.max_tokens
        self._attached: Attached | None = None
        self.weights: RunWeights | None = None  # of the attached model, or of the last one
        # Files in the folder before `start` or `resume`. None: the caller made the ledger, as the Trainer does.
        self._files_before: dict[str, tuple[int, int, int]] | None = None
        self._finished = False
        ledger.has_run = True

    @classmethod
    def start(
        cls,
        folder: str | Path,
        plan: PrivacyPlan,
        rows: TrainingRows,
        public: Sequence[str] = (),
        budget_file: str | None = None,
        noise_memory: str = "auto",
    ) -> PrivateRun:
        """Begin a run in an empty folder and write plan and ledger there. Call it on all processes together.

        Args:
            folder: folder of the run.
            plan: the constants.
            rows: the data.
            public: earlier training on public data, one line each.
            budget_file: file with the privacy budget of all runs on ``plan.dataset``; charged at once. None: no budget.
            noise_memory: as for the class.

        Raises:
            LedgerError: the folder holds another run.
            BudgetError: the run would exceed the budget.
            ConfigError: the processes do not see the same folder.
        """
        path = Path(folder) / LEDGER_FILE
        require_shared_folder(folder, Processes())
        rows.check_plan(plan)  # before anything is charged
        Processes().together(rows.try_reading)
        ledger = SharedLedger.create(path, plan, Processes(), public=public, budget_file=budget_file)
        with ledger.ended_on_failure():
            ledger.remember_rows(rows.contents)
            run = cls(plan, rows, ledger, noise_memory=noise_memory)
            run._files_before = snapshot(folder)
        note_units(ledger, rows.units, rows.lengths)
        note_users(ledger, rows.units, plan.unit_column)
        return run

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        plan: PrivacyPlan,
        rows: TrainingRows,
        budget_file: str | None = None,
        noise_memory: str = "auto",
    ) -> PrivateRun:
        """Continue the run of a folder; its steps stay charged. Call it on all processes together.

        Raises:
            LedgerError: the folder holds no run, or its run has a different plan, rows or budget file.
        """
        require_shared_folder(folder, Processes())
        Processes().together(rows.try_reading)
        ledger = SharedLedger.open(Path(folder) / LEDGER_FILE, plan, Processes(), budget_file, rows.contents)
        with ledger.ended_on_failure():
            run = cls(plan, rows, ledger, noise_memory=noise_memory)
            run._files_before = snapshot(folder)
        return run

    def attach(
        self,
        model: Any,
        optimizer: Any,
        norm_method: NormMethod | None = None,
        start_is_independent: bool = False,
        schedule_is_independent: bool = False,
        averaging: Averaging | None = None,
        gradients: str = "ghost",
        loss_of: LossOf | None = None,
        lr_scheduler: Any = None,
        compile: Mapping[str, Any] | None = None,
    ) -> None:
        """Hook a model that was prepared for its engine.

        Args:
            model: the result of ``accelerator.prepare`` (in one process: any module).
            optimizer: the optimizer, prepared in the same way.
            norm_method: see `dpllm.training.attached.RunOptions`.
            start_is_independent: see `dpllm.training.attached.RunOptions`.
            schedule_is_independent: declares that the learning rate and other hyperparameters set by the loop, and its
                decisions about updates, depend on no loss or anything else computed from private rows. The report
                states it as a fact; without it, the report of a custom loop has an open point. The rates are recorded
                in any case (`dpllm.training.checks.watch`).
            averaging: an average of the weights after the steps (`dpllm.training.averaging`), which the report names as
                the released weights: save the model within ``averaging.shown()``. A loop that saves its state also
                calls ``averaging.save`` and ``averaging.load``. None: the weights after the last step are released.
            gradients: see `dpllm.training.attached.RunOptions`.
            loss_of: as for `step`, for gradients="auto": a trial on synthetic rows then finds parts of the model
                without a rule. None: "auto" inspects the modules only.
            lr_scheduler: the scheduler of the optimizer, which steps once after each update. The rates of all updates
                are computed from a copy, and an update with a different rate is refused. None: rates are recorded only.
            compile: see `dpllm.training.attached.RunOptions`.

        Raises:
            EngineError: the guarantee would not hold under the engine or one of its options.
            GhostError: a part of the model cannot be clipped exactly.
            DisagreementError: the processes train different parameters.
            WatchError: the optimizer holds a trainable parameter that is not clipped.
            ConfigError: a model is already attached, and stays attached; ``rows.max_tokens`` is "auto" and the
                processes run in lockstep; a module or the collator has its own random generator; an adapter or weights
                may depend on the private rows; a resumed run has a different average; or the scheduler's ``step``
                takes metrics.

        After any other of these errors, a run made by `start` or `resume` has ended, and its uncharged steps are
        returned to the budget.
        """
        self._require_detached()
        options = RunOptions(
            norm_method=norm_method,
            start_is_independent=start_is_independent,
            gradients=gradients,
            compile=compile,
        )
        if self._files_before is None:  # the caller made the ledger, ends it and notes the sources
            _refuse_other_kinds(averaging, lr_scheduler)
            self.attach_with(options, model, optimizer, averaging, loss_of, lr_scheduler)
            return
        with self.ledger.ended_on_failure():
            _refuse_other_kinds(averaging, lr_scheduler)
            words = None if averaging is None else averaging.words
            self.processes.from_main(lambda: refuse_other_average(self.ledger.path.parent, words))
            self.attach_with(options, model, optimizer, averaging, loss_of, lr_scheduler)
            inside = model_inside(model)
            if self.ledger.num_steps == 0:
                for point in self.processes.from_main(lambda: edited_start(inside, start_is_independent)):
                    self.ledger.append_open_point(point)
            given = PrivateSources(training=[getattr(self.rows.fetch, "dataset", None)])
            given.note(self.ledger, inside, self.plan)
            if schedule_is_independent:
                self.ledger.append_fact(DECLARED, INDEPENDENT)
            else:
                self.ledger.append_open_point(OWN_LOOP)

    def attach_with(
        self,
        options: RunOptions,
        model: Any,
        optimizer: Any,
        averaging: Averaging | None,
        loss_of: LossOf | None,
        lr_scheduler: Any,
    ) -> None:
        """Hook a model as `attach` does, for a caller that itself ends the ledger after an error and notes the sources.

        The caller has also refused a scheduler whose ``step`` takes metrics.

        Raises:
            EngineError, GhostError, DisagreementError, WatchError, ConfigError: see `attach`.
        """
        self._require_detached()
        self.rows = self.rows.padded_for(model)
        self._attached = attach(
            model,
            optimizer,
            plan=self.plan,
            rows=self.rows,
            ledger=self.ledger,
            processes=self.processes,
            before=self.weights,
            options=options,
            averaging=averaging,
            loss_of=loss_of,
            lr_scheduler=lr_scheduler,
        )
        self.weights = self._attached.weights
        self._attached.reach_checked = self.ledger.unused_frozen

    def _require_detached(self) -> None:
        """Raise `ConfigError` if a model is attached: `detach` records its weights, where the next one continues."""
        if self._attached is not None:
            raise ConfigError("A model is already attached to the run: call detach() before attaching another one")

    def require_attached(self, model: Any) -> None:
        """Check that a model to be saved is the one that the run trains; checks this process only.

        Raises:
            WatchError: a different model is attached.
        """
        if self._attached is not None and model_inside(model) is not self._attached.model:
            raise WatchError(
                "The model to be saved is not the one that the run trains: it was replaced during the training, so "
                "the report would describe weights that are not in the folder. Restore the trained model before you "
                "save. Merge an adapter after train(), or with merge_adapter=True; evaluate other weights in a copy"
            )

    def freeze_unused(self, model: Any, loss_of: LossOf) -> list[str]:
        """Freeze the trainable parameters that no loss reaches, before the optimizer is made; the report names them.

        The autograd graph behind losses of synthetic rows decides which parameters, so their names reveal nothing
        about the private rows. Call it on all processes together, before ``accelerator.prepare`` and `attach`.

        Args:
            model: the module that computes the losses, on the device that ``loss_of`` uses.
            loss_of: as for `step`.

        Returns:
            The names.

        Raises:
            ConfigError: a model is attached; the parameters are sharded; synthetic rows cannot be made; or losses
                reach no parameter.
        """
        if self._attached is not None:
            raise ConfigError(
                "A model is already attached to the run. Call freeze_unused before attach and before the optimizer"
            )
        names = self.processes.together(lambda: freeze_unused(model, self.rows, loss_of))
        self.processes.agree({"the parameters that no loss reaches": names})
        for part in in_parts(names):
            self.ledger.append_fact(FROZEN, part)
        self.ledger.unused_frozen = True
        return names

    def draws(self, num_steps: int, present_N: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield the unit numbers of the next steps: independent draws of rank 0, the same on every process.

        A draw is charged when it is made, whether or not a step uses it. Call it on all processes together.

        Args:
            num_steps: number of draws.
            present_N: (N,) bool, the units present; the others contribute nothing, so these are the draws of a
                neighbouring data set under zero-out. For audits; it adds an open point. None: all units are present.

        Raises:
            ValueError: the plan has no step left; with several processes, the last step failed half-way; or a unit was
                drawn again too early for noise that is correlated over steps (`dpllm.mechanism.noise.UnitsApart`).
            DrawError: ``present_N`` has a wrong shape or dtype; nothing is drawn.
            LedgerError: a step cannot be charged.
            DisagreementError: a process draws more often or less often than the others.
        """
        if present_N is not None:
            if np.shape(present_N) != (self.rows.units.num_units,) or np.asarray(present_N).dtype != np.bool_:
                raise DrawError(
                    f"present_N has shape {np.shape(present_N)} and dtype {np.asarray(present_N).dtype}, but must be "
                    f"one bool for each of the {self.rows.units.num_units} units"
                )
            present_N = np.array(present_N)
            if not bool(present_N.all()):
                self.ledger.append_open_point(LEFT_OUT)
        for _ in range(num_steps):
            if self._attached is not None and self.processes.size > 1:  # the others may still wait in that step
                refuse_unfinished(self._attached.engine)
            yield self._draws.next(present_N)

    def choose(self, unit_ids: ArrayLike) -> np.ndarray:
        """Charge chosen units as a draw, for tests, in a run that is not private.

        Args:
            unit_ids: (U,) the units of the next step.

        Returns:
            The units to pass to `step`.

        Raises:
            DrawError: the run has secret randomness and noise, so its report would state an untrue ε.
        """
        if not self.plan.seeded and self.plan.noise_multiplier > 0:
            raise DrawError(
                f"The plan states ε = {format_epsilon(self.plan.epsilon)}, which holds only for units that its sampler "
                "draws. Take them from `draws`; chosen units need a run that is not private (privacy.seed, or a noise "
                "multiplier of 0)"
            )
        return self._draws.chosen(np.asarray(unit_ids, dtype=np.int64))

    def step(self, unit_ids: np.ndarray, loss_of: LossOf, progress: Progress = unseen) -> StepDiagnostics:
        """Take a private step on these units; see `dpllm.training.step.private_step`.

        Afterwards the private gradient is in ``.grad`` for ``optimizer.step()``. DeepSpeed's engine has already updated
        the parameters, and ``step()`` of its optimizer, as wrapped by accelerate, does nothing.

        Before steps 1, 2, 4, 8, … of this process, and before the last step of the plan, the independence of rows is
        measured (`dpllm.training.checks.independence`). Dependent rows are an error in the first 8 steps, and an open
        point of the report in later ones.

        Args:
            unit_ids: the last result of `draws`; each draw is for one step.
            loss_of: called with the module to run and a microbatch's inputs.
            progress: called with 0 after the checks that precede a step, and then as for
                `dpllm.training.step.private_step`.

        Raises:
            DrawError: the units are not the last draw, or the draw was already used.
            DisagreementError: the processes take different steps, or their weights differ.
            WatchError: something other than the noisy gradient reached weights or buffers
                (`dpllm.training.checks.watch`).
            ConfigError: no model is attached, or a global generator was seeded within the step.
            IndependenceError: a row's loss or gradient depends on other rows, in the first 8 steps of this process;
                the draw stays charged.
        """
        attached = self._attached
        if attached is None:
            raise ConfigError("No model is attached to the run: call attach(model, optimizer) before step()")
        mode = mode_now(attached.model.training)
        unit_ids, charged = self._draws.take(unit_ids, mode, found_by(lambda: self._require_unchanged(attached)))
        number = charged.num_steps - self._entropy.first
        if self._threshold is not None:
            self._threshold.give_to(attached.clipper, self.plan)
        with self.processes.during(f"step {charged.num_steps + 1}: its checks"):
            if isinstance(self.max_tokens, str):
                self.max_tokens = self._find_max_tokens(attached, loss_of)
            self._check_rows(attached, loss_of, self.max_tokens)
            self._compile_blocks(attached)
        self._note_trained(attached)
        progress(0.0)
        self._entropy.streams.separate()

        def before_update() -> None:
            self._entropy.streams.check()
            self._entropy.streams.share()
            attached.watch.complete()  # compares the weights with those of the last update
            if isinstance(attached.engine, DeepSpeedZero):  # no other engine updates within the step
                attached.rates.note()
            if attached.tell is not None:
                attached.tell(number)

        try:
            done = private_step(
                attached.clipper,
                self._microbatches(unit_ids, self.max_tokens),
                functools.partial(loss_of, attached.model),
                self.plan,
                attached.engine,
                charged,
                self._entropy.noise,
                before_update,
                self._entropy.first,
                progress,
                ahead=self.rows.fetch_ahead and not attached.independence.is_drawn,
            )
        except BaseException:
            # Without the check: a state saved from now on must not reveal how many random numbers the rows used.
            self._entropy.streams.share()
            with contextlib.suppress(GhostError, RuntimeError):  # neither may hide the first error
                attached.clipper.forget()  # Ctrl-C may leave layers without requires_grad
            raise
        attached.watch.note_gradients()
        if attached.averaging is not None and isinstance(attached.engine, DeepSpeedZero):  # it has updated the weights
            attached.averaging.update()
        self._refuse_unreached(attached)
        if self._threshold is not None:
            self._threshold.follow(attached.clipper)
        self._note(done)
        return done

    def _require_unchanged(self, attached: Attached) -> None:
        """Check that weights and gradients are unchanged since the last update; checks this process only."""
        attached.watch.before_step()
        refuse_leftovers(attached.clipper, attached.engine)

    def _find_max_tokens(self, attached: Attached, loss_of: LossOf) -> int:
        """Return the largest number of tokens of a microbatch that fits on every process, found by uncharged trials.

        Raises:
            MicrobatchTooLargeError: one row does not fit.
        """
        clipper, units = attached.clipper, self.rows.units
        parameters = list(clipper.parameters.values())
        memory = memory_of(parameters[0].device, needed_later(parameters, attached.optimizer))
        if memory is None:
            return TOKENS_WITHOUT_MEASURE
        share = self.plan.expected_batch_size * units.num_rows / units.num_units / attached.engine.processes.size
        if clipper.one_unit:
            share = min(share, units.max_rows)
        loss, longest, most = functools.partial(loss_of, attached.model), self.rows.longest, math.ceil(share)
        fit = self.processes.together(lambda: rows_that_fit(clipper, loss, longest, memory, most))
        fewest = min(self.processes.gather(fit))
        if fewest == 0:
            raise MicrobatchTooLargeError(
                "Memory runs out on one row, the longest. Shorten the rows (data.max_length), recompute activations "
                "(train.gradient_checkpointing=true), train fewer parameters (LoRA), or shard the model "
                "(dpllm train --config fsdp2)"
            )
        return fewest * int(self.rows.lengths[units.rows].max())

    def _check_rows(self, attached: Attached, loss_of: LossOf, max_tokens: int | None) -> None:
        """Check, in the first step and then less and less often, that no row's contribution depends on other rows.

        After the first steps a difference adds an open point to the report, without any loss of a row.

        Raises:
            IndependenceError: a row's contribution does; the single losses in the message are noted as a disclosure.
        """
        try:
            attached.independence.before_step(
                lambda inputs: attached.watch.look(loss_of(attached.model, inputs)),
                max_tokens,
                is_last=self.ledger.num_steps >= self.steps_planned,
                source=loss_of,
            )
            for point in attached.independence.points:
                self.ledger.append_open_point(point)
        except IndependenceError:
            attached.watch.complete()  # a tensor that was written is the most likely cause
            self.ledger.append_disclosure("losses of single rows, in an error message", 1)
            raise

    def _compile_blocks(self, attached: Attached) -> None:
        """Compile the model's blocks after the checks of the first step, whose shapes would need further graphs."""
        options, attached.compile = attached.compile, None
        if options is None:
            return
        if isinstance(attached.clipper, GhostClipper):
            attached.clipper.compile(**options)
        else:
            logger.warning("torch_compile has no effect with one unit at a time: call model.compile() before training")

    def _note_trained(self, attached: Attached) -> None:
        """Record, from the first step on, that this run trains the model."""
        if not attached.is_noted:
            attached.weights.note_step(begins=self.ledger.num_steps == 1)
        attached.is_noted = True

    def _microbatches(self, unit_ids: np.ndarray, max_tokens: int | None) -> StepBatch:
        """Return the microbatches with this process's share of the drawn units."""
        return microbatches(
            fetch=self.rows.fetch,
            collate=self.rows.collate,
            units=self.rows.units,
            lengths=self.rows.lengths,
            unit_ids=unit_ids,
            max_rows=self.rows.max_rows,
            max_tokens=max_tokens,
            packed=self.rows.packed,
            rank=self.processes.rank,
            size=self.processes.size,
            key=self._entropy.deal_key(self.ledger.num_steps),
            one_unit=self._attached is not None and self._attached.clipper.one_unit,
        )

    def _refuse_unreached(self, attached: Attached) -> None:
        """Check, after the first step of this process, that losses reach every trained parameter, on any process.

        A clipper that handles all units in one pass shows this in each microbatch. Called on all processes together.

        Raises:
            GhostError: a parameter would be trained on noise only.
        """
        if attached.reach_checked or not isinstance(attached.clipper, PerUnitClipper):
            return
        attached.reach_checked = True
        missing = attached.clipper.unreached
        everywhere = attached.engine.processes.gather(missing)
        if missing := [name for name in missing if all(name in one for one in everywhere)]:
            raise no_gradient(missing)

    def _note(self, done: StepDiagnostics) -> None:
        """Note the diagnostics of a step, and continue with smaller microbatches if memory ran out."""
        if done.num_nonfinite:
            words = "units with a non-finite gradient, which contributes zero"
            self.ledger.append_diagnostic(words, done.num_nonfinite)
        if done.num_divided:
            self.ledger.append_diagnostic("microbatches taken again in halves for lack of memory", done.num_divided)
        if done.max_tokens is not None:  # the same on every process, since all of them cut in the same way
            self.max_tokens = done.max_tokens

    def detach(self) -> None:
        """Remove the hooks and restore the model."""
        with contextlib.suppress(RuntimeError):  # a failing device must not hide the first error
            self.end_weights()
        if (attached := self._attached) is not None:
            attached.clipper.remove()
            attached.engine.guard.remove()
            attached.watch.remove()
        self._attached = None

    def finish(self, reason: str = COMPLETED, stopped_independently: bool = False) -> dict[str, Any] | None:
        """End the run: remove the hooks, close the ledger, and write the privacy report next to it.

        Call it on all processes together, not only on the main one, since it first compares the weights of all of them.
        Save the model in the run's folder first: the ledger then names its files, and `dpllm verify` recognises them.

        Args:
            reason: reason for the end, for the ledger; "completed" becomes "stopped early" if planned steps are
                missing.
            stopped_independently: whether a run with fewer steps than planned was stopped for a reason that depends
                neither on the private data nor on the run's releases (`dpllm.privacy.stated.stated_history`). If false,
                the report states the ε of all planned steps.

        Returns:
            The report, on rank 0.

        Raises:
            WatchError: weights or buffers changed outside of the mechanism, on any process; the ledger stays open.
            DisagreementError: the weights of two processes differ after the last update, or another process is at
                a different point of the run; the ledger stays open.
            LedgerError: the run has ended.
        """
        if self._finished:
            raise LedgerError(
                f"The run in {self.ledger.path.parent} has already ended with finish(), and its report is in that "
                "folder. To take the remaining steps, call PrivateRun.resume"
            )
        self._draws.end(self.ledger.num_steps)
        self.check_before_saving()
        self.end_weights()
        detached = self.weights if self._attached is None else None
        note_changes(detached, None if detached is None else detached.model, self.ledger, self.processes)
        self.detach()
        if self._files_before is not None and self.is_main:
            note_own_release(self.ledger, self.ledger.path.parent, self._files_before)
        self.ledger.append_end(reason, independent=stopped_independently)
        self.ledger.close()
        self._finished = True
        if not self.is_main:
            return None
        return write_report(self.ledger.path.parent, self.plan, read_ledger(self.ledger.path)).to_dict()

    def check_saved_state(self) -> None:
        """Check before a save that buffers and frozen parameters are unchanged since the run was attached.

        Checks this process only; `check_before_saving` raises on all.

        Raises:
            WatchError: one changed; the message names its path.
        """
        if (attached := self._attached) is not None:
            averaging = attached.averaging  # a loop may end its run while the model holds the average
            with contextlib.nullcontext() if averaging is None else averaging.hidden():
                attached.watch.check_everything()
            self.ledger.write_rate()

    def check_before_saving(self) -> None:
        """Check the saved state as `check_saved_state` does, and compare the weights of the processes; on all of them.

        Raises:
            WatchError: a buffer or a frozen parameter changed, on any process.
            DisagreementError: the trainable weights of two replicas differ after the last update, or another process
                is at a different point of the run.
        """
        self._draws.save(self.ledger.num_steps)
        parameters = {} if self._attached is None else self._attached.clipper.parameters
        check_before_saving(parameters, self.processes, found_by(self.check_saved_state))

    def end_weights(self) -> None:
        """Store the current weights as the final weights of the run; see `dpllm.models.run_weights`."""
        if self._attached is not None and self.ledger.num_steps > 0:
            self._attached.weights.end()

    @property
    def steps_planned(self) -> int:
        """Number of steps of all starts: the plan's, or fewer if a resume costs more than an uninterrupted run."""
        return self.ledger.steps_planned or self.plan.num_steps

    @property
    def plan(self) -> PrivacyPlan:
        """The constants of the run, which cannot be replaced."""
        return self._plan

    @property
    def row_differences(self) -> Differences | None:
        """How far rows alone and in a batch differed in the last check: ``loss``, ``norm`` and the ``tolerance``.

        None before the first check, and while no model is attached. The figures are of this process and serve to set
        the tolerance of a device (`dpllm.training.checks.differences.TOLERANCE`). They are computed from private rows
        and not covered by ε.
        """
        return None if self._attached is None else self._attached.independence.last

    @property
    def is_complete(self) -> bool:
        """Whether all steps of all starts are charged."""
        return self.ledger.num_steps >= self.steps_planned

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the files."""
        return self.processes.is_main

    @property
    def clipper(self) -> UnitClipper | None:
        """The clipper of the attached model; None while no model is attached."""
        return None if self._attached is None else self._attached.clipper

    @property
    def engine_name(self) -> str:
        """Class name of the engine of the attached model; "none" while no model is attached."""
        return "none" if self._attached is None else type(self._attached.engine).__name__

    def state_dict(self) -> dict[str, Any]:
        """Return plan and progress for ``accelerator.register_for_checkpointing``; never entropy.

        Raises:
            WatchError: a buffer or a frozen parameter changed since the run was attached.
        """
        self.check_saved_state()
        head = self.ledger.head
        state = {"plan_hash": self.plan.hash, "num_steps": head.num_steps, "ledger": head.to_dict()}
        attached = self._attached
        sharded = attached is not None and isinstance(attached.engine, DeepSpeedZero)  # its weights have no checksums
        trained = {} if attached is None or sharded else sums_of_trained(attached.model)
        return {**state, "weights": trained} if trained else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a checkpoint belongs to this run; draws and noise are fresh. Call it on all processes together.

        Raises:
            LedgerError: the checkpoint belongs to another plan or run, to a copy of the folder that was continued, or
                to steps that the ledger does not hold; or the weights are not those saved with it.
        """
        if not {"plan_hash", "ledger"} <= state.keys():
            raise LedgerError("The checkpoint names no plan or no ledger. Pass what state_dict() of a run returned")
        if state["plan_hash"] != self.plan.hash:
            raise LedgerError(
                f"The checkpoint was made under the plan {state['plan_hash'][:12]}, but the plan of this run is "
                f"{self.plan.hash[:12]}: data, batch size, noise or steps differ. Resume with the configuration of the "
                "first start"
            )
        model = None if self._attached is None else self._attached.model
        refuse_other_weights(model, state.get("weights", {}), self.processes)
        if self._attached is not None:  # accelerate writes to the weights before it calls this method
            self._attached.watch.rebase()
            self._attached.rates.expect_again(self.steps_planned - self.ledger.num_steps)
        self.ledger.require_prefix(LedgerHead.of(state["ledger"]), "The checkpoint")


def _refuse_other_kinds(averaging: Any, lr_scheduler: Any) -> None:
    """Refuse an average that is only a specification, and a schedule that follows a loss or an evaluation."""
    if averaging is not None and not isinstance(averaging, Averaging):
        raise ConfigError(
            f"averaging is {averaging!r}: pass Averaging(average_of({averaging!r}), num_steps) from "
            "dpllm.training.averaging"
        )
    if takes_metrics(lr_scheduler):
        raise ConfigError(
            f"lr_scheduler is a {type(lr_scheduler).__name__}, whose step() takes a loss or an evaluation. "
            "Figures of private rows would influence the weights, which ε does not cover. Use a schedule of the "
            "step number, such as LambdaLR"
        )
