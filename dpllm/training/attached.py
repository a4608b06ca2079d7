"""A model attached to a run: its engine, its norms and its checks, from `PrivateRun.attach` to the end.

Place in the flow: under `dpllm.training.run`. All parts are created together and removed together.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dpllm.config import ConfigError
from dpllm.engines import DeepSpeedZero, engine_for, model_inside
from dpllm.engines.base import Engine
from dpllm.engines.errors import no_totals
from dpllm.engines.optimizers import refuse_unsteppable
from dpllm.engines.processes import Processes
from dpllm.engines.replicas import check_model
from dpllm.ghost import GhostClipper, NormMethod, PerUnitClipper, UnitClipper
from dpllm.ghost.parameters import no_gradient
from dpllm.models.ended import RunWeights, sums_of_trained
from dpllm.models.quantization import BASE_STORED_AS, make_ready, stored_as
from dpllm.models.starting_point import check_start, note_trained
from dpllm.models.tasks import trained_words
from dpllm.privacy.identity import RunName, run_in
from dpllm.privacy.plan import PrivacyPlan
from dpllm.report.definition import RELEASED_WEIGHTS, TRAINED_MODEL
from dpllm.training.averaging import Averaging
from dpllm.training.checks import agreement
from dpllm.training.checks.independence import IndependenceCheck, IndependenceError
from dpllm.training.checks.learning_rates import INDEPENDENT, LearningRates
from dpllm.training.checks.randomness import refuse_own_generators
from dpllm.training.checks.watch import Watch
from dpllm.training.choose_clipper import METHOD, chosen, clipper_for, in_words, rows_of_calls
from dpllm.training.corrected_adamw import SECOND_MOMENT_FACT, refuse_other_second_moment, teller, words_of
from dpllm.training.microbatch_size import AUTO, TOKENS_WITHOUT_MEASURE, memory_of, needed_later, rows_that_fit
from dpllm.training.out_of_memory import MicrobatchTooLargeError
from dpllm.training.rows import LossOf, TrainingRows
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.step import refuse_leftovers

STARTING_WEIGHTS = "starting weights"
"""Name of the fact about weights that were declared independent of the private rows."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Attached:
    """The parts that exist while a model is attached; see `attach`.

    Attributes:
        model: the module that computes the losses.
        optimizer: the prepared optimizer.
        engine: engine of the model's distribution over the processes.
        clipper: per-unit norms and clipped sums.
        independence: check of the rows' independence.
        watch: watch over weights and buffers.
        weights: initial and final weights of the run.
        rates: record of the learning rates.
        is_noted: whether it is recorded that the run trains this model.
        averaging: average of the weights; None: the weights after the last step are released.
        reach_checked: whether it was checked that losses reach every trained parameter.
        tell: tells the number of each step to an optimizer that knows the noise; None: it does not.
        compile: arguments of `GhostClipper.compile` until the blocks are compiled; None: they are, or shall not be.
    """

    model: Any
    optimizer: Any
    engine: Engine
    clipper: UnitClipper
    independence: IndependenceCheck
    watch: Watch
    weights: RunWeights
    rates: LearningRates
    is_noted: bool = False
    averaging: Averaging | None = None
    reach_checked: bool = False
    tell: Callable[[int], None] | None = None
    compile: Mapping[str, Any] | None = None

    def make_ready(self) -> None:
        """Check that weights and gradients are unchanged since the last update; checks this process only."""
        self.watch.before_step()
        refuse_leftovers(self.clipper, self.engine)

    def loss(self, loss_of: LossOf) -> Callable[[Mapping[str, Any]], Tensor]:
        """Return the function from a microbatch's inputs to one loss per row (B,)."""
        return functools.partial(loss_of, self.model)

    def check_rows(self, loss_of: LossOf, max_tokens: int | None, ledger: SharedLedger, steps_planned: int) -> None:
        """Check, in the first step and then less and less often, that no row's contribution depends on other rows.

        After the first steps a difference is an open point of the report, which holds no loss of a row.

        Raises:
            IndependenceError: one does; the losses of single rows in the message are noted as a disclosure.
        """
        try:
            self.independence.before_step(
                lambda inputs: self.watch.look(loss_of(self.model, inputs)),
                max_tokens,
                is_last=ledger.num_steps >= steps_planned,
                source=loss_of,
            )
            for point in self.independence.points:
                ledger.append_open_point(point)
        except IndependenceError:
            self.watch.complete()  # a tensor that was written is the likeliest cause
            ledger.append_disclosure("losses of single rows, in an error message", 1)
            raise

    def compile_blocks(self) -> None:
        """Compile the model's blocks after the checks of the first step, whose shapes would need further graphs."""
        options, self.compile = self.compile, None
        if options is None:
            return
        if isinstance(self.clipper, GhostClipper):
            self.clipper.compile(**options)
        else:
            logger.warning("torch_compile has no effect with one unit at a time: call model.compile() before training")

    def note_trained(self, num_steps: int) -> None:
        """Record, from the first step on, that this run trains the model."""
        if not self.is_noted and self.weights.run is not None:
            note_trained(self.model, self.weights.run, begins=num_steps == 1)
            self.weights.note_step()
        self.is_noted = True

    def before_update(self, number: int) -> None:
        """Compare the weights with those of the last update, and begin the update.

        Args:
            number: of the step, counted from the start or resume.
        """
        self.watch.complete()
        if isinstance(self.engine, DeepSpeedZero):  # no other engine updates within the step
            self.rates.note()
        if self.tell is not None:
            self.tell(number)

    def after_step(self) -> None:
        """Record the private gradient, and the changes made by an engine's own update."""
        self.watch.note_gradients()
        if self.averaging is not None and isinstance(self.engine, DeepSpeedZero):  # its step has updated the weights
            self.averaging.update()

    def refuse_unreached(self) -> None:
        """Check, after the first step of this process, that losses reach every trained parameter, on any process.

        In one pass for all units each microbatch shows it. Called by all processes together.

        Raises:
            GhostError: a parameter would be trained on noise only.
        """
        if self.reach_checked or not isinstance(self.clipper, PerUnitClipper):
            return
        self.reach_checked = True
        missing = self.clipper.unreached
        everywhere = self.engine.processes.gather(missing)
        if missing := [name for name in missing if all(name in one for one in everywhere)]:
            raise no_gradient(missing)

    def find_max_tokens(self, loss_of: LossOf, rows: TrainingRows, plan: PrivacyPlan, processes: Processes) -> int:
        """Return the most tokens of a microbatch that fit on every process, by trials that are not charged.

        Raises:
            MicrobatchTooLargeError: one row does not fit.
        """
        parameters = list(self.clipper.parameters.values())
        memory = memory_of(parameters[0].device, needed_later(parameters, self.optimizer))
        if memory is None:
            return TOKENS_WITHOUT_MEASURE
        units = rows.units
        share = plan.expected_batch_size * units.num_rows / units.num_units / self.engine.processes.size
        if self.clipper.one_unit:
            share = min(share, units.max_rows)
        fit = processes.together(
            lambda: rows_that_fit(self.clipper, self.loss(loss_of), rows.longest, memory, most=math.ceil(share))
        )
        fewest = min(processes.gather(fit))
        if fewest == 0:
            raise MicrobatchTooLargeError(
                "Memory runs out on one row, the longest. Shorten the rows (data.max_length), recompute activations "
                "(train.gradient_checkpointing=true), train fewer parameters (LoRA), or shard the model "
                "(dpllm train --config fsdp2)"
            )
        return fewest * int(rows.lengths[units.rows].max())

    def check_everything(self) -> None:
        """Check before a save that nothing but the noisy gradient has changed weights or buffers."""
        if self.averaging is None:
            self.watch.check_everything()
            return
        with self.averaging.hidden():  # a loop may end its run while the model holds the average
            self.watch.check_everything()

    def sums(self) -> dict[str, Any]:
        """Return checksums of the trained weights for a checkpoint; weights that an engine shards have none."""
        return {} if isinstance(self.engine, DeepSpeedZero) else sums_of_trained(self.model)

    def take_restored(self, num_updates: int) -> None:
        """Use the weights and the scheduler that a checkpoint has just restored for later comparisons.

        Args:
            num_updates: number of updates to come.
        """
        self.watch.rebase()
        self.rates.expect_again(num_updates)

    def remove(self) -> None:
        """Remove the hooks and restore the model."""
        self.clipper.remove()
        self.engine.guard.remove()
        self.watch.remove()
        if self.averaging is not None:
            self.averaging.detach()


def attach(
    model: Any,
    optimizer: Any,
    *,
    plan: PrivacyPlan,
    rows: TrainingRows,
    ledger: SharedLedger,
    processes: Processes,
    before: RunWeights | None,
    norm_method: NormMethod | None,
    start_is_independent: bool,
    gradients: str,
    loss_of: LossOf | None,
    averaging: Averaging | None = None,
    lr_scheduler: Any = None,
    compile: Mapping[str, Any] | None = None,
) -> Attached:
    """Create all parts of an attached model. Called by all processes together.

    Args:
        model: the result of ``accelerator.prepare``.
        optimizer: the optimizer, prepared in the same way.
        plan: plan of the run.
        rows: rows of the run.
        ledger: ledger of the run; open points about the starting weights are noted there.
        processes: processes of the run.
        before: the weights of the model that was attached to this run before.
        norm_method: how norms are computed.
        start_is_independent: see `dpllm.training.run.PrivateRun.attach`.
        gradients: see `dpllm.training.run.PrivateRun.attach`.
        loss_of: see `dpllm.training.run.PrivateRun.attach`.
        averaging: average of the weights that is released; None: the weights after the last step are.
        lr_scheduler: see `dpllm.training.run.PrivateRun.attach`.
        compile: see `dpllm.training.run.PrivateRun.attach`.

    Raises:
        EngineError, GhostError, DisagreementError, WatchError, ConfigError: see `dpllm.training.run.PrivateRun.attach`.
        ValueError: the model has more trained parameters than the noise has an accounting for.
    """
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"The optimizer is of the type {type(optimizer).__name__}. Pass the optimizer of the model, prepared in "
            "the same way: attach(model, optimizer)"
        )
    inside = model_inside(model)
    refuse_unsteppable(optimizer)
    tell, moment = teller(optimizer, plan), words_of(optimizer)
    name, first = _run_of(ledger), (optimizer if ledger.num_steps == 0 else None)
    if name is not None:
        processes.from_main(lambda: refuse_other_second_moment(name.folder, moment))
    between: Sequence[str] = [] if before is None else before.changed(inside)
    points = check_start(inside, None if name is None else name.folder, start_is_independent, first, between)
    refuse_own_generators(inside)
    rows.refuse_own_generators()
    make_ready(inside)
    with contextlib.ExitStack() as undo:
        engine = engine_for(model, optimizer)
        undo.callback(engine.guard.remove)
        if plan.mechanism.noise.wants_total and not engine.forms_total:
            raise no_totals(type(engine).__name__)
        _refuse_automatic_size(rows, engine)
        gradients = chosen(gradients, inside, rows, loss_of, processes)
        clipper = clipper_for(gradients, inside, plan.mechanism.clipping, norm_method)
        undo.callback(clipper.remove)
        plan.mechanism.require_entries(sum(parameter.numel() for parameter in clipper.parameters.values()))
        facts = {"the trainable parameters": _digest(clipper.parameters), "norm_method": repr(norm_method)}
        facts["privacy.gradients"] = gradients
        facts["train.average"] = repr(None if averaging is None else averaging.average)
        processes.agree({**facts, **agreement.computation(inside, optimizer)})
        check_model(inside, processes)
        hands_in = (lambda: engine.handing_in) if isinstance(engine, DeepSpeedZero) else None
        rates = LearningRates(optimizer, ledger)
        if lr_scheduler is not None and not isinstance(engine, DeepSpeedZero):  # which has its own scheduler
            rates.expect(lr_scheduler, (ledger.steps_planned or plan.num_steps) - ledger.num_steps)
        watch = Watch(inside, optimizer, clipper.parameters, hands_in, processes.size > 1, rates.note)
        undo.callback(watch.remove)
        attached = Attached(
            model=inside,
            optimizer=optimizer,
            engine=engine,
            clipper=clipper,
            independence=IndependenceCheck(
                clipper, inside, rows_of_calls(rows, clipper), engine, plan.expected_batch_size
            ),
            watch=watch,
            weights=RunWeights(inside, name, watch.is_written),
            rates=rates,
            averaging=averaging,
            tell=tell,
            compile=compile,
        )
        if averaging is not None:
            _attach_average(averaging, attached, model, plan, ledger, processes)
            undo.callback(averaging.detach)
            ledger.append_fact(RELEASED_WEIGHTS, averaging.words)
        ledger.append_fact(TRAINED_MODEL, trained_words(inside))
        ledger.append_fact(METHOD, in_words(clipper))
        if start_is_independent:
            ledger.append_fact(STARTING_WEIGHTS, INDEPENDENT)
        if moment is not None:
            ledger.append_fact(SECOND_MOMENT_FACT, moment)
        if (stored := stored_as(inside)) is not None:
            ledger.append_fact(BASE_STORED_AS, stored)
        for point in points:
            ledger.append_open_point(point)
        undo.pop_all()
    return attached


def _attach_average(
    averaging: Averaging,
    attached: Attached,
    model: nn.Module,
    plan: PrivacyPlan,
    ledger: SharedLedger,
    processes: Processes,
) -> None:
    averaging.attach(
        attached.clipper.parameters,
        attached.model,
        attached.optimizer,
        deepspeed=model if isinstance(attached.engine, DeepSpeedZero) else None,
        weights=attached.weights,
        ledger=ledger,
        num_steps=plan.num_steps,
        processes=processes,
        accept_restored=attached.watch.accept_restored,
    )


def _refuse_automatic_size(rows: TrainingRows, engine: Engine) -> None:
    """Refuse to search for the size of a microbatch where all processes need the same one."""
    if rows.max_tokens == AUTO and engine.lockstep:
        raise ConfigError(
            f'The number of tokens for "auto" is found by each process separately, but under '
            f"{type(engine).__name__} all of them pass through each layer together. Give a number of tokens "
            "(microbatch_tokens); `dpllm plan --memory` shows the memory of a microbatch"
        )


def _run_of(ledger: SharedLedger) -> RunName | None:
    own = getattr(ledger, "path", None)  # a stand-in of an audit has no file
    return None if own is None else run_in(Path(own).parent)


def _digest(parameters: Mapping[str, nn.Parameter]) -> str:
    shapes = [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in parameters.items()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
