"""A private run: the parts that all steps share, on one process or on many.

Place in the flow: above the engines, below `dpllm.training.trainer`, which is one way of driving it. A loop of one's
own is another:

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
import hashlib
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dpllm.config import ConfigError
from dpllm.data.units import UnitIndex
from dpllm.engines import DeepSpeedZero, engine_for, model_inside
from dpllm.engines.processes import Processes, found_by
from dpllm.engines.protocol import Engine
from dpllm.engines.replicas import check_before_saving, check_model
from dpllm.ghost import Forms, GhostClipper
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.sampling import seeded_rng
from dpllm.models.ended import RunWeights, refuse_other_weights, sums_of_trained
from dpllm.models.starting_point import check_start, note_trained
from dpllm.privacy.identity import COMPLETED, note_own_release, run_in, snapshot
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, read_ledger
from dpllm.privacy.ledger_reader import LedgerHead
from dpllm.privacy.plan import PrivacyPlan
from dpllm.report.statement import write_report
from dpllm.training.checks import agreement
from dpllm.training.checks.independence import IndependenceCheck, IndependenceError
from dpllm.training.checks.outstanding import LEFT_OUT, DrawError, Outstanding
from dpllm.training.checks.randomness import SecretStreams, refuse_own_generators
from dpllm.training.checks.steering import Steering
from dpllm.training.checks.turns import Turns, dealing_key, mode_now
from dpllm.training.checks.watch import Watch
from dpllm.training.microbatch_size import AUTO, TOKENS_WITHOUT_MEASURE, Memory, memory_of, needed_later, rows_that_fit
from dpllm.training.microbatches import Microbatch, RowsTaken, microbatches
from dpllm.training.noted import note_units, note_users
from dpllm.training.out_of_memory import MicrobatchTooLargeError
from dpllm.training.shared_folder import require_shared_folder
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.step import StepDiagnostics, private_step, refuse_leftovers

LossOf = Callable[[Any, Mapping[str, Any]], Tensor]
"""A module and a microbatch's inputs to one loss per row (B,), each from its own row alone."""


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run; the same on every process.

    Attributes:
        units: which rows each unit has.
        lengths: (num_rows,) tokens of every row.
        fetch: row numbers to rows.
        collate: rows to the model's inputs, rows first.
        max_rows: rows of a microbatch at most; None: as many as ``max_tokens`` allows.
        max_tokens: tokens of a microbatch at most, padding included; None: as many as ``max_rows`` have; "auto": as
            many as fit into the memory of the GPU, found before the first step (`dpllm.training.microbatch_size`).
        packed: whether ``collate`` lays rows end to end (`dpllm.data.rows.PackedCollator`): there is no padding then.
            The loss is `dpllm.packed_sequence_loss`, and the model runs within `dpllm.models.packing.attention_by_row`.

    Raises:
        ConfigError: ``max_tokens`` is none of these.
    """

    units: UnitIndex
    lengths: np.ndarray
    fetch: Callable[[np.ndarray], Sequence[Any]]
    collate: Callable[[list[Any]], Mapping[str, Any]]
    max_rows: int | None
    max_tokens: int | str | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        """Check what may be a word."""
        if isinstance(self.max_tokens, str) and self.max_tokens != AUTO:
            raise ConfigError(f'max_tokens is {self.max_tokens!r}; a whole number, "auto" or None is needed')

    def longest(self, count: int) -> Microbatch:
        """A microbatch of the longest row, taken so many times; as many of them to a unit as one has at most."""
        rows = self.units.rows
        number = rows[self.lengths[rows].argmax()]
        unit_index = np.arange(count) // self.units.max_rows
        taken = RowsTaken(list(self.fetch(np.array([number]))) * count, self.lengths[[number] * count], self.collate)
        return taken.microbatch(unit_index, int(unit_index[-1]) + 1)

    @functools.cached_property
    def contents(self) -> str:
        """Hash of the rows (`dpllm.training.checks.agreement.contents`); computed once."""
        return agreement.contents(self.lengths, self.fetch)

    def facts(self) -> dict[str, Any]:
        """Facts that must be identical on every process; otherwise processes would split different draws."""
        return agreement.rows(
            self.units,
            self.lengths,
            self.fetch,
            self.collate,
            {"max_rows": self.max_rows, "max_tokens": self.max_tokens, "packed": self.packed},
            self.contents,
        )


class PrivateRun:
    """Draws units, divides them over the processes, and takes private steps; the same on every process.

    Guarantee: `draws` makes one truncated Poisson draw per step over all units, on rank 0 from 256 bits of its
    operating system, and sends it to every process; each process draws its share of the noise from entropy of its own.
    Neither is stored, so that a resumed run repeats nothing. Before every step the processes compare the step's number,
    its units and, for replicas, the trainable weights.

    Attributes:
        max_tokens: of a microbatch, in the next step: as ``rows`` say, as was found, or less after a step in which
            memory ran out.

    Args:
        plan: the constants.
        rows: the data.
        ledger: where the steps are charged.
        seed: None, or a fixed seed for tests; nothing is private then, and the report says so.

    Raises:
        DisagreementError: the processes differ in plan, data or versions.
        ConfigError: a seed without a seeded plan, or the other way round; rows that are not what the plan counts.
    """

    def __init__(self, plan: PrivacyPlan, rows: TrainingRows, ledger: SharedLedger, seed: int | None = None) -> None:
        """Make sure that the processes agree, and share the entropy of the draws."""
        if (seed is not None) != plan.seeded:
            raise ConfigError(
                f"The seed of the run is {seed} and the plan says seeded={plan.seeded}: the report would say the wrong "
                "thing about the entropy. Set privacy.seed, from which both come, or neither"
            )
        self.processes = Processes()
        self.processes.agree({"the plan": plan.hash[:12], **agreement.software(), **rows.facts()})
        agreement.check_rows(plan, rows.units)  # now: what is raised is raised by all processes
        self._plan, self.rows, self.ledger = plan, rows, ledger
        self._outstanding = Outstanding(plan, ledger)
        rng = seeded_rng(int.from_bytes(secrets.token_bytes(32), "little") if seed is None else seed)
        self._drawn = plan.mechanism.sampler.steps(rng)  # rank 0's is used
        self._turns = Turns(self.processes)
        self._deal_key = dealing_key(self.processes, lambda: secrets.randbits(128) if seed is None else seed)
        generator = NoiseSource(seed, stream=self.processes.rank)
        self._first = ledger.num_steps  # of this start or resume, with which draws and noise begin anew
        self._noise = plan.mechanism.noise.stream(generator, plan.num_steps)
        self._streams = SecretStreams(self.processes, seed)
        self.max_tokens = rows.max_tokens
        self._engine: Engine | None = None
        self._clipper: GhostClipper | None = None
        self._watch: Watch | None = None
        self._steering: Steering | None = None  # in a loop of one's own; the Trainer notes its callbacks
        self._independence: IndependenceCheck | None = None
        self._model: Any = None
        self._optimizer: Any = None
        self._own_loop = False  # what ends the ledger when `attach` fails; the Trainer does so by itself
        self._files: dict[str, tuple[int, int, int]] = {}  # in the folder before
        self._noted = False
        self.weights: RunWeights | None = None

    @classmethod
    def start(
        cls,
        folder: str | Path,
        plan: PrivacyPlan,
        rows: TrainingRows,
        public: Sequence[str] = (),
        budget_file: str | None = None,
    ) -> PrivateRun:
        """Begin a run in an empty folder, where plan and ledger are written. Called by all processes together.

        Args:
            folder: of the run.
            plan: the constants.
            rows: the data.
            public: what was learnt from public data before, one line each.
            budget_file: what all runs on ``plan.dataset`` may cost together; charged at once. None: not counted.

        Raises:
            LedgerError: the folder holds another run.
            BudgetError: the run would exceed the budget.
            ConfigError: the processes do not see one folder.
        """
        path = Path(folder) / LEDGER_FILE
        require_shared_folder(folder, Processes())
        agreement.check_rows(plan, rows.units)  # before anything is charged
        ledger = SharedLedger.create(path, plan, Processes(), public=public, budget_file=budget_file)
        with ledger.ended_on_failure():
            ledger.remember_rows(rows.contents)
            run = cls(plan, rows, ledger)
            run._own_loop, run._files = True, snapshot(folder)
        note_units(ledger, rows.units, rows.lengths)
        if plan.unit == "user":
            note_users(ledger, rows.units, plan.unit_column)
        return run

    @classmethod
    def resume(
        cls, folder: str | Path, plan: PrivacyPlan, rows: TrainingRows, budget_file: str | None = None
    ) -> PrivateRun:
        """Continue the run of a folder; its steps stay charged. Called by all processes together.

        Raises:
            LedgerError: the folder holds no run, one of another plan, one of other rows, or one charged to another
                budget file.
        """
        require_shared_folder(folder, Processes())
        ledger = SharedLedger.open(Path(folder) / LEDGER_FILE, plan, Processes(), budget_file, rows.contents)
        with ledger.ended_on_failure():
            run = cls(plan, rows, ledger)
            run._own_loop, run._files = True, snapshot(folder)
        return run

    def attach(
        self,
        model: Any,
        optimizer: Any,
        forms: Forms | None = None,
        start_is_independent: bool = False,
        schedule_is_independent: bool = False,
    ) -> None:
        """Hook a model that was prepared for its engine.

        Args:
            model: what ``accelerator.prepare`` returned (in one process: any module).
            optimizer: likewise.
            forms: how norms are computed; the default takes what costs least.
            start_is_independent: declares that starting weights and adapters hold nothing of the private rows, where
                that can be doubted (`dpllm.models.starting_point`). It becomes an open point of the report.
            schedule_is_independent: declares that learning rates and other hyperparameters that the loop sets by itself
                follow neither losses nor anything else of the private rows (`dpllm.training.checks.steering`). It
                becomes a fact of the report; without it such a change is an open point.

        Raises:
            EngineError: an engine or an option of it under which the guarantee would not hold.
            GhostError: a part of the model that cannot be clipped exactly.
            DisagreementError: the processes train different parameters.
            WatchError: the optimizer holds a trainable parameter that is not clipped.
            ConfigError: ``rows.max_tokens`` is "auto", and the processes run in lockstep; a module or the collator has
                a random generator of its own; an adapter or weights that may depend on the private rows.

        A run that `start` or `resume` made has ended then, and its budget has back what no step was charged for.
        """
        with self.ledger.ended_on_failure() if self._own_loop else contextlib.nullcontext():
            self._attach(model, optimizer, forms, start_is_independent)
            if self._own_loop:
                by_engine = isinstance(self._engine, DeepSpeedZero)
                self._steering = Steering(optimizer, self.ledger, schedule_is_independent, by_engine)

    def _attach(self, model: Any, optimizer: Any, forms: Forms | None, start_is_independent: bool) -> None:
        self._model, self._optimizer, self._noted = model_inside(model), optimizer, False
        own = getattr(self.ledger, "path", None)  # a stand-in of an audit has no file
        name = None if own is None else run_in(Path(own).parent)
        first = optimizer if self.ledger.num_steps == 0 else None
        between = [] if self.weights is None else self.weights.changed(self._model)
        points = check_start(self._model, None if name is None else name.folder, start_is_independent, first, between)
        refuse_own_generators(self._model, [("The collator", self.rows.collate)], [("The data set", self.rows.fetch)])
        self._engine = engine_for(model, optimizer)
        if self.max_tokens == AUTO and self._engine.lockstep:
            raise ConfigError(
                f'A microbatch of "auto" tokens is found by each process by itself, and under '
                f"{type(self._engine).__name__} all of them pass through each layer together. Give a number of tokens "
                "(microbatch_tokens); `dpllm plan --memory` says what a microbatch takes"
            )
        self._clipper = GhostClipper(self._model, forms=forms, clipping=self.plan.mechanism.clipping)
        self._independence = IndependenceCheck(
            self._clipper, self._model, self.rows, self._engine, self.plan.expected_batch_size
        )
        self.processes.agree(
            {
                "the trainable parameters": _digest(self._clipper.parameters),
                **agreement.computation(self._model, optimizer),
            }
        )
        check_model(self._model, self.processes)
        engine = self._engine
        hands_in = (lambda: engine.handing_in) if isinstance(engine, DeepSpeedZero) else None
        several = self.processes.size > 1
        self._watch = Watch(self._model, optimizer, self._clipper.parameters, hands_in, several)
        self.weights = RunWeights(self._model, name, self._watch.is_written)
        for point in points:
            self.ledger.append_open_point(point)

    def draws(self, num_steps: int, present_N: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """The unit numbers of the next steps, the same on every process; drawn by rank 0, independently of each other.

        A draw is charged when it is made, whether or not a step is taken over it. Called by all processes together.

        Args:
            num_steps: how many to make.
            present_N: (N,) bool, units that are there; the others contribute nothing, which makes these the draws of a
                neighbouring data set under zero-out. For audits: it is an open point. None: all are there.

        Raises:
            ValueError: the plan has no step left.
            LedgerError: a step cannot be charged.
            DisagreementError: a process draws more or less often than the others.
        """
        if present_N is not None and not bool(np.all(present_N)):
            self.ledger.append_open_point(LEFT_OUT)
        for _ in range(num_steps):
            self._outstanding.require_steps()
            drawn = self._turns.draw(lambda: next(self._drawn), self.ledger.num_steps)
            yield self._outstanding.made(drawn if present_N is None else drawn[present_N[drawn]])

    def choose(self, unit_ids: ArrayLike) -> np.ndarray:
        """Charge units of one's own choice as a draw, for tests, in a run that is not private.

        Args:
            unit_ids: (U,) the units of the next step.

        Returns:
            What `step` takes.

        Raises:
            DrawError: the run has secret randomness and noise, so its report would state an ε that is not true.
        """
        if not self.plan.seeded and self.plan.noise_multiplier > 0:
            raise DrawError(
                f"The plan states ε = {self.plan.epsilon:.4g}, which holds for units that its sampler draws. Take them "
                "from `draws`; chosen units need a run that is not private (privacy.seed, or a noise multiplier of 0)"
            )
        chosen = np.asarray(unit_ids, dtype=np.int64)
        return self._outstanding.made(self._turns.draw(lambda: chosen, self.ledger.num_steps))

    def step(self, unit_ids: np.ndarray, loss_of: LossOf) -> StepDiagnostics:
        """Take a private step over these units; see `dpllm.training.step.private_step`.

        Afterwards the private gradient stands in ``.grad`` for ``optimizer.step()``; DeepSpeed's engine has already
        updated the parameters, and its optimizer's ``step()`` as accelerate wraps it does nothing.

        Before steps 1, 2, 4, 8, … of this process, and before the last of the plan, it is measured that rows are
        independent (`dpllm.training.checks.independence`).

        Args:
            unit_ids: as `draws` gave them last; each draw is for one step.
            loss_of: called with the module to run and a microbatch's inputs.

        Raises:
            DrawError: other units, or a draw that was used.
            DisagreementError: the processes take different steps, or their weights differ.
            WatchError: something other than the noisy gradient reached weights or buffers
                (`dpllm.training.checks.watch`).
            ConfigError: no model is attached, or a global generator was seeded within the step.
            IndependenceError: a row's loss or gradient depends on other rows; the draw stays charged.
        """
        if self._engine is None or self._clipper is None or self._watch is None:
            raise ConfigError("No model is attached to the run: call attach(model, optimizer) before step()")
        watch, engine, clipper, steering = self._watch, self._engine, self._clipper, self._steering

        def ready() -> None:
            watch.before_step()
            refuse_leftovers(clipper, engine)

        mode = mode_now(self._model.training)
        self._turns.step(np.asarray(unit_ids), self.ledger.num_steps - 1, mode, found_by(ready))
        unit_ids, charged = self._outstanding.take(unit_ids)
        max_tokens = self._budget(loss_of)
        self._check_rows(lambda model, inputs: watch.look(loss_of(model, inputs)), max_tokens)
        self._note_trained()
        self._streams.separate()

        def complete() -> None:
            self._streams.check()
            self._streams.share()
            watch.complete()
            if steering is not None:
                steering.before_update()

        batch = microbatches(
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
            key=self._deal_key + self.ledger.num_steps,
        )
        try:
            done = private_step(
                clipper,
                batch,
                lambda inputs: loss_of(self._model, inputs),
                self.plan,
                engine,
                charged,
                self._noise,
                complete,
                self._first,
            )
        except BaseException:
            self._streams.share()  # a state that is saved now must not tell how many numbers the rows took
            raise
        watch.note_gradients()
        if steering is not None:
            steering.after_update()
        if done.num_nonfinite:
            self.ledger.append_diagnostic("units with a non-finite gradient, contributing zero", done.num_nonfinite)
        if done.num_divided:
            self.ledger.append_diagnostic("microbatches taken again in halves for lack of memory", done.num_divided)
        if done.max_tokens is not None:  # the same on every process, since all of them cut alike
            self.max_tokens = done.max_tokens
        return done

    def _note_trained(self) -> None:
        """Remember, from the first step on, that this run trains the model."""
        if not self._noted and self.weights is not None and self.weights.run is not None:
            note_trained(self._model, self.weights.run, begins=self.ledger.num_steps == 1)
            self.weights.note_step()
        self._noted = True

    def _check_rows(self, loss_of: LossOf, max_tokens: int | None) -> None:
        """Make sure, in the first step and ever more rarely, that no row's contribution depends on other rows."""
        assert self._independence is not None, "attach() comes first"
        try:
            self._independence.before_step(
                lambda inputs: loss_of(self._model, inputs),
                max_tokens,
                is_last=self.ledger.num_steps >= self.steps_planned,
            )
        except IndependenceError:
            if self._watch is not None:
                self._watch.explain()
            self.ledger.append_disclosure("losses of single rows, in an error message", 1)
            raise

    def _budget(self, loss_of: LossOf) -> int | None:
        """Tokens of a microbatch in the next step."""
        if isinstance(self.max_tokens, str):
            self.max_tokens = self._find_budget(loss_of)
        return self.max_tokens

    def _find_budget(self, loss_of: LossOf) -> int:
        """The largest budget that fits on every process, found by trials; nothing is charged for them."""
        assert self._clipper is not None, "attach() comes first"
        memory = self._memory()
        if memory is None:
            return TOKENS_WITHOUT_MEASURE
        units = self.rows.units
        share = self.plan.expected_batch_size * units.num_rows / units.num_units / self.processes.size
        rows = rows_that_fit(
            self._clipper,
            lambda inputs: loss_of(self._model, inputs),
            self.rows.longest,
            memory,
            most=math.ceil(share),
        )
        fewest = min(self.processes.gather(rows))
        if fewest == 0:
            raise MicrobatchTooLargeError(
                "Memory runs out on the longest row alone. Shorten the rows (data.max_length), recompute activations "
                "(train.gradient_checkpointing=true), train fewer parameters (LoRA), or shard the model "
                "(accelerate_configs/fsdp2.yaml)"
            )
        return fewest * int(self.rows.lengths[units.rows].max())

    def _memory(self) -> Memory | None:
        assert self._clipper is not None, "attach() comes first"
        parameters = list(self._clipper.parameters.values())
        return memory_of(parameters[0].device, needed_later(parameters, self._optimizer))

    def detach(self) -> None:
        """Undo the hooks; the model is as before."""
        with contextlib.suppress(RuntimeError):  # of a device that fails: must not hide what failed first
            self.end_weights()
        if self._clipper is not None:
            self._clipper.remove()
        if self._engine is not None:
            self._engine.guard.remove()
        if self._watch is not None:
            self._watch.remove()
        if self._steering is not None:
            self._steering.remove()
        self._watch = self._steering = self._engine = self._clipper = None
        self._independence = self._model = self._optimizer = None

    def finish(self, reason: str = COMPLETED, stopped_independently: bool = False) -> dict[str, Any] | None:
        """End the run: undo the hooks, close the ledger, and write the privacy report beside it.

        Save the model in the run's folder before: its files are then named in the ledger, and `dpllm verify` knows
        them.

        Args:
            reason: why it ends, for the ledger; "completed" becomes "stopped early" where planned steps are missing.
            stopped_independently: whether a run with fewer steps than planned was stopped there for a reason that
                depends neither on the private data nor on what the run released
                (`dpllm.privacy.stated.stated_history`). Without it the report states the ε of all planned steps.

        Returns:
            The report, on rank 0.

        Raises:
            WatchError: weights or buffers changed past the mechanism, on any process; the ledger stays open.
            DisagreementError: the weights of two processes differ after the last update; the ledger stays open.
        """
        self.check_before_saving()
        self.end_weights()
        self.detach()
        if self._own_loop and self.is_main:
            note_own_release(self.ledger, self.ledger.path.parent, self._files)
        self.ledger.append_end(reason, independent=stopped_independently)
        self.ledger.close()
        return write_report(self.ledger.path.parent, self.plan, read_ledger(self.ledger.path)) if self.is_main else None

    def check_saved_state(self) -> None:
        """Make sure before a save that buffers and frozen parameters are as they were when the run was attached.

        Looks at this process only; `check_before_saving` raises on all.

        Raises:
            WatchError: one is not, by its path.
        """
        if self._watch is not None:
            self._watch.check_everything()

    def check_before_saving(self) -> None:
        """As `check_saved_state`, and compare the weights of the processes; called by all of them together.

        Raises:
            WatchError: a buffer or a frozen parameter is not what it was, on any process.
            DisagreementError: the trainable weights of two replicas differ after the last update.
        """
        parameters = {} if self._clipper is None else self._clipper.parameters
        check_before_saving(parameters, self.processes, found_by(self.check_saved_state))

    def end_weights(self) -> None:
        """Take the weights of now for those that the run leaves; see `dpllm.models.ended`."""
        if self.weights is not None and self._model is not None and self.ledger.num_steps > 0:
            self.weights.end()

    @property
    def steps_planned(self) -> int:
        """Steps of all starts together: those of the plan, or fewer where a resume costs more than going on."""
        return self.ledger.steps_planned or self.plan.num_steps

    @property
    def plan(self) -> PrivacyPlan:
        """The constants of the run, which cannot be replaced."""
        return self._plan

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the files."""
        return self.processes.is_main

    @property
    def engine_name(self) -> str:
        """How the attached model is spread over the processes, as the name of a class; "none" while it is not."""
        return "none" if self._engine is None else type(self._engine).__name__

    def state_dict(self) -> dict[str, Any]:
        """For ``accelerator.register_for_checkpointing``: which plan, and how far. Never entropy.

        Raises:
            WatchError: a buffer or a frozen parameter is not what it was when the run was attached.
        """
        self.check_saved_state()
        head = self.ledger.head
        state = {"plan_hash": self.plan.hash, "num_steps": head.num_steps, "ledger": head.to_dict()}
        trained = {} if isinstance(self._engine, DeepSpeedZero) else sums_of_trained(self._model)
        return {**state, "weights": trained} if trained else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make sure that a checkpoint belongs to this run; draws and noise are fresh. Called by all processes together.

        Raises:
            LedgerError: it is of another plan or run, of a copy of the folder that went on by itself, or of steps that
                the ledger does not hold; or the weights are not those that it was saved with.
        """
        if state["plan_hash"] != self.plan.hash:
            raise LedgerError(
                f"The checkpoint was made under the plan {state['plan_hash'][:12]}, and this one is "
                f"{self.plan.hash[:12]}: data, batch size, noise or steps differ. Resume with the configuration of the "
                "first run"
            )
        refuse_other_weights(self._model, state.get("weights", {}), self.processes)
        if self._watch is not None:  # accelerate has written to the weights before it calls this
            self._watch.rebase()
        if self._steering is not None:
            self._steering.take()
        if "ledger" in state:
            self.ledger.require_prefix(LedgerHead.of(state["ledger"]), "The checkpoint")
            return
        if state["num_steps"] > self.ledger.num_steps:
            raise LedgerError(
                f"The checkpoint holds {state['num_steps']} steps, {self.ledger.path} charges {self.ledger.num_steps}: "
                "it is not the ledger of that run. Put the run's own ledger in its place"
            )
        self.ledger.append_open_point(
            "The run was resumed from a checkpoint that names no ledger: make sure that it is a checkpoint of this run."
        )


def _digest(parameters: Mapping[str, nn.Parameter]) -> str:
    shapes = [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in parameters.items()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
