"""Attach a model to a run: create its engine, norms and checks, which live until the end of the run.

`dpllm.training.run` uses the parts. All are created together and removed together.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dpllm.config import ConfigError
from dpllm.engines import DeepSpeedZero, engine_for, model_inside
from dpllm.engines.base import Engine
from dpllm.engines.checksums import check_model
from dpllm.engines.guard import no_totals, refuse_unsteppable
from dpllm.engines.processes import Processes
from dpllm.ghost import NormMethod, UnitClipper
from dpllm.ghost.tapped_model import refuse_clipped
from dpllm.models.quantization import BASE_STORED_AS, make_ready, stored_as
from dpllm.models.run_weights import RunWeights
from dpllm.models.starting_point import check_start
from dpllm.models.tasks import trained_words
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.run_folder import run_in
from dpllm.report.definition import RELEASED_WEIGHTS, TRAINED_MODEL
from dpllm.training.averaging import Averaging
from dpllm.training.checks import agreement
from dpllm.training.checks.independence import IndependenceCheck
from dpllm.training.checks.randomness import refuse_own_generators
from dpllm.training.checks.watch import INDEPENDENT, LearningRates, Watch
from dpllm.training.choose_clipper import METHOD, chosen, clipper_for, in_words, rows_of_calls
from dpllm.training.corrected_adamw import SECOND_MOMENT_FACT, refuse_other_second_moment, teller, words_of
from dpllm.training.out_of_memory import AUTO
from dpllm.training.rows import LossOf, TrainingRows
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.step import call_in_lockstep

STARTING_WEIGHTS = "starting weights"
"""Name of the fact about weights that were declared independent of the private rows."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run trains a model: the options that `dpllm.PrivateRun.attach` and `dpllm.DPTrainer` have in common.

    Attributes:
        norm_method: method of computing norms; None: the cheapest for each layer.
        start_is_independent: declares that starting weights and adapters are independent of the private rows, where
            this is in doubt (`dpllm.models.starting_point`). The declaration becomes a fact of the report, and an open
            point replaces the refusal.
        gradients: how the gradients of units are computed (`dpllm.config.privacy_section.PrivacyConfig`).
        compile: arguments of `dpllm.GhostClipper.compile`, which compiles the model's blocks after the checks of the
            first step; None: nothing is compiled.
    """

    norm_method: NormMethod | None = None
    start_is_independent: bool = False
    gradients: str = "ghost"
    compile: Mapping[str, Any] | None = None


@dataclass(kw_only=True)
class Attached:
    """The parts that exist while a model is attached; plain data.

    `attach` makes them, and `dpllm.PrivateRun` uses and removes them.

    Attributes:
        model: the module that computes the losses.
        optimizer: the prepared optimizer.
        engine: engine of the model's distribution over the processes.
        clipper: per-unit norms and clipped sums.
        independence: check of the rows' independence.
        watch: watch over weights and buffers.
        weights: initial and final weights of the run.
        rates: record of the learning rates.
        is_noted: whether it was recorded that the run trains this model.
        averaging: average of the weights; None: the weights after the last step are released.
        reach_checked: whether it was checked that losses reach every trained parameter.
        tell: passes the number of each step to an optimizer that knows the noise; None: the optimizer does not.
        compile: arguments of `GhostClipper.compile` until the blocks are compiled; None: already compiled, or not
            requested.
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


def attach(
    model: Any,
    optimizer: Any,
    *,
    plan: PrivacyPlan,
    rows: TrainingRows,
    ledger: SharedLedger,
    processes: Processes,
    before: RunWeights | None,
    options: RunOptions,
    averaging: Averaging | None,
    loss_of: LossOf | None,
    lr_scheduler: Any,
) -> Attached:
    """Create all parts of an attached model, from the arguments of `dpllm.PrivateRun.attach` and the parts of its run.

    ``before`` holds the weights of the model that was previously attached to the run. Open points about the starting
    weights are noted in the ledger. Called by all processes together.

    Raises:
        EngineError, GhostError, DisagreementError, WatchError, ConfigError: see `dpllm.PrivateRun.attach`.
        ValueError: the model has more trained parameters than the noise accounting supports.
    """
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"The optimizer is of type {type(optimizer).__name__}. Pass the optimizer of the model, prepared in "
            "the same way: attach(model, optimizer)"
        )
    inside = model_inside(model)
    refuse_unsteppable(optimizer)
    tell, moment = teller(optimizer, plan), words_of(optimizer)
    path, first = getattr(ledger, "path", None), (optimizer if ledger.num_steps == 0 else None)
    name = None if path is None else run_in(Path(path).parent)  # an audit's stand-in has no file
    if name is not None:
        processes.from_main(lambda: refuse_other_second_moment(name.folder, moment))
    between: Sequence[str] = [] if before is None else before.changed(inside)
    points = check_start(inside, None if name is None else name.folder, options.start_is_independent, first, between)
    refuse_own_generators(inside)
    rows.refuse_own_generators()
    make_ready(inside)
    with contextlib.ExitStack() as undo:
        engine = engine_for(model, optimizer)
        undo.callback(engine.guard.remove)
        if plan.mechanism.noise.wants_total and not engine.forms_total:
            raise no_totals(type(engine).__name__)
        _refuse_automatic_size(rows, engine)
        gradients = chosen(options.gradients, inside, rows, loss_of, processes)
        refuse_clipped(inside.modules())  # before a draw is charged
        clipper = clipper_for(gradients, inside, plan.mechanism.clipping, options.norm_method)
        call_in_lockstep(clipper, engine)
        undo.callback(clipper.remove)
        plan.mechanism.require_entries(sum(parameter.numel() for parameter in clipper.parameters.values()))
        facts = {"the trainable parameters": _digest(clipper.parameters), "norm_method": repr(options.norm_method)}
        facts["privacy.gradients"] = gradients
        facts["train.average"] = repr(None if averaging is None else averaging.average)
        processes.agree({**facts, **agreement.computation(inside, optimizer)})
        check_model(inside, processes)
        hands_in = (lambda: engine.handing_in) if isinstance(engine, DeepSpeedZero) else None
        rates = LearningRates(optimizer, ledger)
        if lr_scheduler is not None and not isinstance(engine, DeepSpeedZero):  # which has its own scheduler
            rates.expect(lr_scheduler, (ledger.steps_planned or plan.num_steps) - ledger.num_steps)
        enter = None if averaging is None else averaging.update
        watch = Watch(inside, optimizer, clipper.parameters, hands_in, processes.size > 1, rates.note, enter)
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
            compile=options.compile,
        )
        if averaging is not None:
            _attach_average(averaging, attached, model, plan, ledger, processes)
            ledger.append_fact(RELEASED_WEIGHTS, averaging.words)
        ledger.append_fact(TRAINED_MODEL, trained_words(inside))
        ledger.append_fact(METHOD, in_words(clipper))
        if options.start_is_independent:
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
        deepspeed=model if isinstance(attached.engine, DeepSpeedZero) else None,
        weights=attached.weights,
        ledger=ledger,
        num_steps=plan.num_steps,
        processes=processes,
        accept_restored=attached.watch.accept_restored,
    )


def _refuse_automatic_size(rows: TrainingRows, engine: Engine) -> None:
    """Refuse to search for a microbatch size where all processes need the same one."""
    if rows.max_tokens == AUTO and engine.lockstep:
        raise ConfigError(
            f'With microbatch.tokens "auto", each process finds its own number of tokens, but under '
            f"{type(engine).__name__} all processes pass through each layer together. Set a number of tokens "
            "(microbatch.tokens); `dpllm plan memory` shows the memory of a microbatch"
        )


def _digest(parameters: Mapping[str, nn.Parameter]) -> str:
    shapes = [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in parameters.items()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
