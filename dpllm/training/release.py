"""The release of one step: clipped sums and their noise, passed to the engine parameter by parameter.

Place in the flow: between the norms of a microbatch and the engine, which adds up over microbatches and processes. Only
this module adds noise to the clipped sum. The update's guard receives the tensors that are passed in, and the
mechanism's statement about them.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from dpllm.engines.base import Engine
from dpllm.ghost import UnitClipper
from dpllm.ghost.sums import AddSum, Finish, Sum
from dpllm.mechanism.noise import IndependentStream
from dpllm.mechanism.parts import NoiseStream
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.microbatches import Microbatch


class Release:
    """The release of one step, from its first microbatch to the update.

    Args:
        clipper: attached to the model.
        plan: the constants.
        engine: receives the sums and holds parts of them until `finish`.
        noise: noise stream of this process, since its start or resume.
        step: number of the step, counted from that start or resume.
    """

    def __init__(self, clipper: UnitClipper, plan: PrivacyPlan, engine: Engine, noise: NoiseStream, step: int) -> None:
        """Begin the step; the engine takes no other step until this one is finished."""
        self._clipper, self._plan, self._engine, self._noise, self._step = clipper, plan, engine, noise, step
        self._names = {id(parameter): name for name, parameter in clipper.parameters.items()}
        self._num_entries = 0
        self._is_first = True  # no microbatch was collected
        engine.begin()
        noise.begin(step)

    def finisher(self, microbatch: Microbatch, last: bool) -> Finish | None:
        """Return the function that finishes gradients within the backward pass of a step's only microbatch.

        Guarantee: a gradient is made of the same clipped sum, noise and scale as by `collect`, in the same order. Its
        noise is drawn by one of the two. The noise of a pass that fails is dropped with its sums (`drop`), and that of
        the next attempt does not depend on it: so the noise has to be independent, not correlated over the steps.

        Args:
            microbatch: the microbatch whose pass comes next.
            last: whether it is the last one of the step.

        Returns:
            The function; None where sums are completed by `collect` only.
        """
        early = self._engine.early
        only = self._is_first and last and not microbatch.continues
        if early is None or not only or type(self._noise) is not IndependentStream or self._wants_total:
            return None

        def finish(parameter: nn.Parameter, add: AddSum) -> None:
            def add_to(parameter: nn.Parameter, total: Sum) -> None:
                self._hand_in(parameter, total, add, last=True)

            early.finish(parameter, add_to, self._scale)

        return finish

    def drop(self) -> None:
        """Drop the gradients of a pass that failed."""
        self._num_entries = 0
        if self._engine.early is not None:
            self._engine.early.forget()

    def collect(self, microbatch: Microbatch, last: bool) -> None:
        """Pass the clipped sum of a microbatch to the engine, and with the last one the noise.

        Args:
            microbatch: the microbatch whose units were clipped last.
            last: whether it is the last one of the step; the same on every process.
        """

        def add_to(parameter: nn.Parameter, total: Sum) -> None:
            def add(total: Sum) -> None:
                if not microbatch.continues:
                    self._clipper.add_clipped_sum_(parameter, total)

            self._hand_in(parameter, total, add, last)

        self._is_first = False
        to_total = self._complete_ if last and self._wants_total else None
        self._engine.collect(self._clipper.parameters, add_to, last=last, scale=self._scale, to_total=to_total)

    def _hand_in(self, parameter: nn.Parameter, total: Sum, add: AddSum, last: bool) -> None:
        with self._engine.guard.handing_in(total):
            if last:  # each entry's noise is drawn by one process, before the sum over processes
                self._add_noise_(parameter, total)
            add(total)  # as the last addend, so that it can make the gradient

    @property
    def _wants_total(self) -> bool:
        return self._plan.mechanism.noise.wants_total

    def _add_noise_(self, parameter: nn.Parameter, total: Sum) -> None:
        self._num_entries += int(getattr(parameter, "ds_numel", parameter.numel()))  # of all processes together
        if self._wants_total:
            return
        name, stddev = self._names[id(parameter)], self._plan.noise_stddev
        rank, size = self._engine.processes.rank, self._engine.processes.size
        if total.is_empty and type(self._noise) is IndependentStream:  # a class made from it may add something else
            self._noise.write_share_(name, total.total, stddev, rank, size)
            total.is_empty = False
        else:
            self._noise.add_share_(name, total.filled(), stddev, rank, size)

    def _complete_(self, parameter: nn.Parameter, own: Tensor) -> None:
        """Add the noise to the part of a complete sum that this process owns."""
        with self._engine.guard.handing_in(Sum.onto(own)):
            self._noise.add_share_(self._names[id(parameter)], own, self._plan.noise_stddev, rank=0, size=1)

    @property
    def _scale(self) -> float:
        """Return 1/b, a public constant; never the realised size."""
        return 1 / self._plan.expected_batch_size

    def finish(self, num_units: int) -> None:
        """Give the guard the properties of a private update, and let the engine make the update.

        Args:
            num_units: number of units in the step, over all processes.
        """
        variance = self._plan.mechanism.noise.variance(self._step, self._plan.num_steps)
        stddev = self._plan.noise_stddev * math.sqrt(variance)
        self._engine.guard.expect(num_units, self._num_entries, self._plan.clip_norm, stddev, self._scale)
        self._engine.finish()
