"""One private step in the order of the algorithm: charge, clip each microbatch, add the sums and the noise, update.

This is DP-SGD's gradient (Abadi et al. 2016, arXiv:1607.00133) over a truncated Poisson batch, as a sum divided by a
public constant. The optimizer's use of this gradient is post-processing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.data.transfer import send_array
from dpllm.engines.base import Engine
from dpllm.engines.checksums import Replicas
from dpllm.engines.processes import DisagreementError, Processes, found_by, told_by_rank
from dpllm.ghost import UnitClipper
from dpllm.ghost.sums import Finish, Sum
from dpllm.mechanism.noise import IndependentStream
from dpllm.mechanism.parts import AdaptiveClipping, NoiseStream
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.draws import Charges
from dpllm.training.microbatches import Microbatch
from dpllm.training.out_of_memory import OutOfMemory, Passed, Portions, attempt, device_of

STATISTIC = "the statistic of the clipping"
"""The name of the statistic in a noise stream, next to the names of parameters."""

_DIGITS = 6
"""Decimal digits of a noisy statistic. A count is a multiple of ½; the last bits of its float64 noise, which is not
exactly Gaussian, could reveal which one (Mironov 2012)."""


class StepStatistic:
    """The statistic of one step, and the new threshold from it.

    Guarantee: the threshold is the same for all units of the step. One process adds noise to the sum once, before it
    is used, and only the update uses it, divided by the plan's expected batch size.

    Args:
        clipper: attached to the model; its clipping is replaced when the step is complete.
        plan: the constants.
        noise: noise stream of this process; the step has begun.
    """

    def __init__(self, clipper: UnitClipper, plan: PrivacyPlan, noise: NoiseStream) -> None:
        """Begin without units."""
        self._clipper, self._plan, self._noise = clipper, plan, noise
        self._clipping = clipper.clipping if isinstance(clipper.clipping, AdaptiveClipping) else None
        self._sum: Tensor | None = None

    def add(self, norm_U: Tensor | None) -> None:
        """Add the units that end in a microbatch.

        Args:
            norm_U: (U,) their norms; None if none ends in it.
        """
        if self._clipping is not None and norm_U is not None:
            share = self._clipping.statistic(norm_U).double().clamp(-0.5, 0.5).sum()
            self._sum = share if self._sum is None else self._sum + share

    def finish(self, processes: Processes) -> None:
        """Add the noise, sum over the processes, and set the clipper's threshold; all processes call it together.

        Args:
            processes: all processes.

        Raises:
            DisagreementError: the processes clipped to different thresholds.
        """
        if self._clipping is None:
            return
        total = torch.tensor([float(self._sum) if self._sum is not None else 0.0], dtype=torch.float64)
        deviation = self._plan.mechanism.statistic_stddev
        self._noise.add_share_(STATISTIC, total, deviation, processes.rank, processes.size)
        everywhere = processes.gather_numbers([float(total), self._clipping.threshold])
        thresholds = [threshold for _, threshold in everywhere]
        if len(set(thresholds)) > 1:
            raise DisagreementError(
                f"The processes clip to different thresholds ({told_by_rank(thresholds)}), so a unit's gradient would "
                "depend on the process that computes it. Use the same machines and package versions on all of "
                "them, do not write to the clipper's threshold, and resume from a checkpoint"
            )
        noisy = round(sum(one for one, _ in everywhere), _DIGITS)
        self._clipper.clipping = self._clipping.updated(noisy, self._plan.expected_batch_size)


class Threshold:
    """The threshold of a run's next step. The ledger reads it; only the run's steps change it.

    Guarantee: after the first value, it takes only values that a step's noisy statistic set in its clipper. Whoever
    has this object can copy a clipper's threshold into it, so a ledger hands it over once
    (`dpllm.training.shared_ledger.SharedLedger.hand_over_threshold`).

    Args:
        value: the threshold of the first step of this start. None: the clipping does not adapt.
    """

    def __init__(self, value: float | None) -> None:
        """Store the first value."""
        self._value = value

    @property
    def value(self) -> float | None:
        """The threshold of the next step; None: the clipping does not adapt."""
        return self._value

    def give_to(self, clipper: UnitClipper, plan: PrivacyPlan) -> None:
        """Set the clipper's threshold to the one with which the step is charged; a resume continues with the last."""
        if isinstance(plan.mechanism.clipping, AdaptiveClipping) and self._value is not None:
            clipper.clipping = plan.mechanism.clipping.at(self._value)

    def follow(self, clipper: UnitClipper) -> None:
        """Copy the threshold that the step's noisy statistic set in the clipper (`StepStatistic.finish`)."""
        if isinstance(clipper.clipping, AdaptiveClipping):
            self._value = clipper.clipping.threshold


# ------------------------------------------------------------------------------------------------------ the step


class Release:
    """The release of one step: what the engine adds to the sum of each parameter, and the noise.

    Guarantee: one process draws an entry's noise, once for all microbatches, and adds it before the sum over
    the processes or, where the mechanism needs that, to the complete sum. Only this class adds noise. The update's
    guard receives the sums that are passed in, and the mechanism's statement about them.

    The engine asks for one parameter after another, since all sums at once would take as much memory as the model:
    `add_` adds to the sum that the engine stores.

    Args:
        clipper: attached to the model.
        plan: the constants.
        engine: reduces the sums and stores parts of them until `finish`.
        noise: noise stream of this process, since its start or resume.
        step: number of the step, counted from that start or resume.
    """

    def __init__(self, clipper: UnitClipper, plan: PrivacyPlan, engine: Engine, noise: NoiseStream, step: int) -> None:
        """Begin the step; the engine takes no other step until this one is finished."""
        self._clipper, self._plan, self._engine, self._noise, self._step = clipper, plan, engine, noise, step
        self._names = {id(parameter): name for name, parameter in clipper.parameters.items()}
        self._to_totals = plan.mechanism.noise.wants_total
        self._scale = 1 / plan.expected_batch_size  # public, never the realised size
        self._num_entries = 0
        self._is_first = True  # no microbatch was collected yet
        self._last = self._continues = False  # describe the microbatch whose sums are added
        engine.begin()
        noise.begin(step)

    def add_(self, parameter: nn.Parameter, total: Sum) -> None:
        """Add this process's share of one parameter: the noise (with the last microbatch only), then the clipped sum.

        The clipped sum is the last addend, so that the kernel that computes it can also write the gradient.
        """
        with self._engine.guard.handing_in(total):
            if self._last:
                self._add_noise_(parameter, total)
            if not self._continues:  # the clipper stores the rows of a unit that continues
                self._clipper.add_clipped_sum_(parameter, total)

    def _add_noise_(self, parameter: nn.Parameter, total: Sum) -> None:
        self._num_entries += int(getattr(parameter, "ds_numel", parameter.numel()))  # of all processes together
        if self._to_totals:
            return
        name, stddev = self._names[id(parameter)], self._plan.noise_stddev
        rank, size = self._engine.processes.rank, self._engine.processes.size
        if total.is_empty and type(self._noise) is IndependentStream:  # a subclass may add something else
            self._noise.write_share_(name, total.total, stddev, rank, size)
            total.is_empty = False
        else:
            self._noise.add_share_(name, total.filled(), stddev, rank, size)

    def complete_(self, parameter: nn.Parameter, own: Tensor) -> None:
        """Add the noise to the part of a complete sum that this process owns."""
        with self._engine.guard.handing_in(Sum.onto(own)):
            self._noise.add_share_(self._names[id(parameter)], own, self._plan.noise_stddev, rank=0, size=1)

    def finish_early(self, microbatch: Microbatch, last: bool) -> Finish | None:
        """Return the function that finishes gradients within the backward pass of a step's only microbatch.

        Guarantee: a gradient is made from the same clipped sum, noise and scale as by `collect`, in the same order. One
        of the two draws its noise. The noise of a failed pass is dropped with its sums (`drop`), and the noise of the
        next attempt does not depend on it, so the noise must be independent, not correlated over the steps.

        Args:
            microbatch: the microbatch whose pass comes next.
            last: whether it is the last one of the step.

        Returns:
            The function; None where sums are completed by `collect` only.
        """
        early = self._engine.early
        only = self._is_first and last and not microbatch.continues
        if early is None or not only or type(self._noise) is not IndependentStream or self._to_totals:
            return None
        self._last = True
        return lambda parameter: early.finish(parameter, self.add_, self._scale)

    def drop(self) -> None:
        """Drop the gradients of a pass that failed."""
        self._num_entries = 0
        if self._engine.early is not None:
            self._engine.early.forget()

    def collect(self, microbatch: Microbatch, last: bool) -> None:
        """Let the engine add up the clipped sums of a microbatch, and with the last one the noise.

        Args:
            microbatch: the microbatch whose units were clipped last.
            last: whether it is the last one of the step; the same on every process.
        """
        self._is_first, self._last, self._continues = False, last, microbatch.continues
        to_total = self.complete_ if last and self._to_totals else None
        self._engine.collect(self._clipper.parameters, self.add_, last=last, scale=self._scale, to_total=to_total)

    def finish(self, num_units: int) -> None:
        """Pass the properties of a private update to the guard, and let the engine update.

        Args:
            num_units: number of units in the step, over all processes.
        """
        variance = self._plan.mechanism.noise.variance(self._step, self._plan.num_steps)
        stddev = self._plan.noise_stddev * math.sqrt(variance)
        self._engine.guard.expect(num_units, self._num_entries, self._plan.clip_norm, stddev, self._scale)
        self._engine.finish()


Progress = Callable[[float], None]
"""Called with the completed share of a step, from 0 to 1."""


def unseen(done: float) -> None:
    """Show no progress."""
    del done


@dataclass(frozen=True)
class StepDiagnostics:
    """Counts of a step, over all processes. They depend on the data, and the guarantee covers none of them.

    Attributes:
        mean_loss: mean of the rows' losses; NaN for an empty step.
        num_units: number of units in the step.
        num_nonfinite: number of units with a non-finite gradient; its non-finite parts contributed zero.
        num_clipped: number of units whose gradient norm over all parameters exceeded the clip norm, or the threshold
            of the step where the clipping adapts. A clipping that is not flat may scale down other units too.
        num_divided: how often memory ran out and a microbatch was run again in halves.
        max_tokens: the largest number of tokens of a microbatch, padding included, in the rest of the step; None if
            memory sufficed.
    """

    mean_loss: float
    num_units: int
    num_nonfinite: int
    num_clipped: int
    num_divided: int = 0
    max_tokens: int | None = None


def private_step(
    clipper: UnitClipper,
    batch: Iterable[Microbatch],
    loss_of: Callable[[Mapping], Tensor],
    plan: PrivacyPlan,
    engine: Engine,
    ledger: Charges,
    noise: NoiseStream,
    before_update: Callable[[], None] = lambda: None,
    first: int = 0,
    progress: Progress = unseen,
    ahead: bool = False,
) -> StepDiagnostics:
    """Take one private step up to the optimizer, charged to the ledger.

    Guarantee: if ``batch`` is this process's share of the plan's draw, the optimizer receives the output of the
    mechanism whose event is ``plan.event``, also when the batch is empty. The step is durable in the ledger before it
    is computed, so no crash can lose it. A microbatch that runs out of memory is split in half and retried, unless the
    processes run in lockstep; each unit still enters the sum once.

    Args:
        clipper: attached to the model, with the plan's clipping. If it adapts, it holds the next step's threshold
            afterwards.
        batch: the microbatches of this process; the same number on every process.
        loss_of: computes one loss per row (B,) from a microbatch's inputs on the device of the trained parameters.
        plan: the constants.
        engine: `dpllm.engines.engine_for` the prepared model. It writes the private gradient to ``.grad`` for
            ``optimizer.step()``; DeepSpeed instead updates the parameters itself.
        ledger: the ledger to charge.
        noise: source of this process's share of the noise; created again at each start and resume.
        first: number of steps charged before that start or resume.
        before_update: called when the private gradient is complete, before an engine updates the parameters. If it
            raises on one process, all processes raise its error.
        progress: called after each microbatch with the completed share of this process's work. The share depends on
            the drawn units, so it may only be shown on a screen.
        ahead: whether a thread may fetch the next microbatch while one runs: only if the data set and the collator
            share nothing with the model and the loss, and draw no random numbers.

    Raises:
        ValueError: the clipper's norm is not the plan's; ``.grad`` already holds gradients; the plan's steps are used
            up; or a step on this engine failed half-way, so its sums would be released under this step's noise.
        UpdateError: in the first step, if the optimizer receives something other than the private sum.
        DisagreementError: the trainable weights of two replicas differ; no part of the step reaches the optimizer.
        OtherProcessError: model, loss or collator failed on another process, or that process has ended. If this
            process waits for it in a library's collective, this process is ended (`dpllm.engines.board`).
        MicrobatchTooLargeError: memory ran out on a microbatch that cannot be divided.
    """
    _check(clipper, plan, ledger, engine)
    call_in_lockstep(clipper, engine)
    number = ledger.num_steps
    ledger.append_step(number, plan.event)
    release = Release(clipper, plan, engine, noise, number - first)
    processes = engine.processes
    replicas = Replicas(clipper.parameters, processes)  # the current weights; compared before any use
    tally, statistic = _Tally(clipper.threshold, progress), StepStatistic(clipper, plan, noise)
    # Nothing is fetched while rows are compared, nor ahead in a seeded run: model and collator draw numbers from the
    # same generators, and the seed fixes their order.
    ahead = ahead and not plan.seeded
    portions = Portions(batch, device_of(clipper), divisible=not engine.lockstep, ahead=ahead)

    what = f"step {number + 1}"
    told = contextlib.nullcontext() if engine.lockstep else processes.all_or_none(what)  # one collective at its end
    with processes.during(what, patient=False), told, portions:
        for microbatch, last in portions:
            processes.mark()
            check_rows = _has_to_check_rows(clipper, microbatch, engine)
            if ahead and not check_rows:
                portions.fetch_ahead()
            passed = attempt(clipper, microbatch, loss_of, check_rows, release.finish_early(microbatch, last))
            if isinstance(passed, OutOfMemory):
                release.drop()
                portions.divide(microbatch, passed)
                continue
            tally.add(passed, microbatch)
            statistic.add(passed.norm_U)
            if last:
                break
            release.collect(microbatch, last=False)
        else:
            raise AssertionError("every step has a microbatch")
    with processes.during(f"the sum of {what}", patient=False):
        release.collect(microbatch, last=True)

    def ready() -> None:
        clipper.settle()
        before_update()

    error = found_by(ready)
    done, checksums, failed = tally.over(engine, portions, replicas, error)
    try:
        Replicas.check(checksums, number + 1)
        processes.raise_found(error, failed, what)
        statistic.finish(processes)
    except Exception:
        for parameter in clipper.parameters.values():
            parameter.grad = None
        raise
    release.finish(done.num_units)
    return done


def call_in_lockstep(clipper: UnitClipper, engine: Engine) -> None:
    """Run the clipper's own passes of the model on all processes or on none, where passes communicate."""
    clipper.any_of = engine.processes.any_of if engine.lockstep and engine.processes.size > 1 else None


def refuse_unfinished(engine: Engine) -> None:
    """Check that the last step on an engine ended.

    Raises:
        ValueError: it failed half-way.
    """
    if engine.unfinished:
        raise ValueError(
            "A private step on this engine failed half-way, and parts of its sum are still stored: they would be "
            "released under another step's noise. Start again from a checkpoint."
        )


def refuse_leftovers(clipper: UnitClipper, engine: Engine) -> None:
    """Check that no part of an earlier step would be released with the next one; checks this process only.

    Raises:
        ValueError: a step on this engine failed half-way, or a parameter already has a gradient.
    """
    refuse_unfinished(engine)
    stale = [name for name, p in clipper.parameters.items() if p.grad is not None]
    if stale:
        raise ValueError(
            f"{stale[0]} has a gradient from before the step, which would be released with the step. Call zero_grad() "
            "after each update, with set_to_none=True, its default: a gradient of zeros counts as a gradient."
        )


def _check(clipper: UnitClipper, plan: PrivacyPlan, ledger: Charges, engine: Engine) -> None:
    refuse_leftovers(clipper, engine)
    if not plan.mechanism.allows(clipper.clipping):
        raise ValueError(
            f"The clipper bounds each unit by {clipper.clipping}, but the plan accounts for {plan.mechanism.clipping}. "
            "Build the clipper with plan.mechanism.clipping."
        )
    planned = ledger.steps_planned or plan.num_steps
    if ledger.num_steps >= planned:
        raise ValueError(
            f"All {planned} steps of the plan are taken and charged; another step would exceed its epsilon. "
            f"Make a plan with more steps."
        )


def _has_to_check_rows(clipper: UnitClipper, microbatch: Microbatch, engine: Engine) -> bool:
    """Return whether to check that rows are independent: once, and at the same time on processes in lockstep."""
    if clipper.rows_checked:
        return False
    several = int((microbatch.unit_index >= 0).sum()) > 1
    return engine.processes.any(several) if engine.lockstep else several


class _Tally:
    """Counts of a step, read from the device once."""

    def __init__(self, clip_norm: float, progress: Progress) -> None:
        self._clip_norm, self._progress, self._done = clip_norm, progress, 0.0
        self._units = self._rows = 0
        self._counts: Tensor | None = None  # sum of losses, non-finite units, clipped units

    def add(self, passed: Passed, microbatch: Microbatch) -> None:
        loss_B = passed.loss_B
        norm_U = loss_B.new_zeros(0) if passed.norm_U is None else passed.norm_U
        real = np.flatnonzero(microbatch.unit_index.numpy() >= 0)
        if len(real) < len(loss_B):
            loss_B = loss_B.index_select(0, send_array(real, loss_B.device))
        counts = torch.stack(
            [
                loss_B.double().sum(),
                (~torch.isfinite(norm_U)).sum().double(),
                (norm_U > self._clip_norm).sum().double(),
            ]
        )
        self._counts = counts if self._counts is None else self._counts + counts
        self._rows += len(real)
        self._units += microbatch.num_units
        self._done += microbatch.share
        self._progress(min(1.0, self._done))

    def over(
        self, engine: Engine, portions: Portions, replicas: Replicas, error: Exception | None
    ) -> tuple[StepDiagnostics, list[list[float]], list[float]]:
        """Return the counts over all processes, and each process's numbers for `Replicas.check` and error flag."""
        assert self._counts is not None, "every step has a microbatch"
        processes = engine.processes
        here = [*self._counts.tolist(), self._rows, self._units, portions.num_divided]
        everywhere = processes.gather_numbers([*here, *replicas.numbers(), float(error is not None)])
        counts = torch.tensor([one[: len(here)] for one in everywhere], dtype=torch.float64).sum(dim=0)
        loss, nonfinite, clipped, rows, units, divided = counts.tolist()
        budgets = processes.gather(portions.max_tokens) if divided else []
        done = StepDiagnostics(
            loss / rows if rows else math.nan,
            int(units),
            int(nonfinite),
            int(clipped),
            int(divided),
            min((budget for budget in budgets if budget is not None), default=None),
        )
        return done, [one[len(here) : -1] for one in everywhere], [one[-1] for one in everywhere]
