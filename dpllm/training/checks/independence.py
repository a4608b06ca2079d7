"""Independence of rows, by value: a row's loss and gradient are the same alone and with other rows.

Place in the flow: before a private step, on the same engine; `dpllm.training.run` asks at steps 1, 2, 4, 8, … of a
process and at the last of the plan.
Clipping bounds a unit's contribution; this bounds the change of the sum only if no row changes the contributions of
others. A gradient shows some couplings (`dpllm.ghost.checks`), a comparison of values shows the rest: padding that the
model reads, losses divided by counts of the batch, detached statistics, collators that mix or reorder rows, scales
chosen over all rows, and state that is carried from one microbatch to the next. Couplings that occur at random, in some
microbatches only, are searched with several random states. State that a loss or a model carries from call to call shows
when the first row is run again after all others.
Random numbers that rows share leave every row's own distribution unchanged: `dpllm.training.checks.sharing`.

A microbatch of very unequal lengths is made for it. The shortest row is run alone, then beside other rows, then
beside replaced, longer rows in another order, once beside its equal; each row is a separate unit, and dropout is off
(`dpllm.training.checks.repeatable.Repeatable`). The passes are not part of the mechanism: nothing of them is kept. They
call the user's loss, collator and data set as a training calls them, and write into none of their objects.

A difference in steps 1 to 8 of a process is an error, and nothing of the step is computed. A later one is an open point
of the report, because the steps of a long run are paid for: the run goes on, and `push` refuses until people have
answered the point.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpllm.data.single_rows import same_values
from dpllm.ghost import UnitClipper
from dpllm.ghost.memory import is_shortage
from dpllm.training.checks.differences import (
    NEAR,
    SAME,
    Differences,
    Seen,
    agree,
    compare,
    counting_norm,
    finding_of,
    in_words,
)
from dpllm.training.checks.passes import CHANCES, Found, IndependenceError, Passes, Setup
from dpllm.training.checks.randomness import OWN_GENERATOR, own_generator
from dpllm.training.checks.repeatable import generator_states, same_randomness, seed_between
from dpllm.training.checks.row_sample import MADE_LATER, Company, Sample
from dpllm.training.checks.sharing import Sharing
from dpllm.training.out_of_memory import MicrobatchTooLargeError, free_memory

if TYPE_CHECKING:
    from dpllm.engines.base import Engine
    from dpllm.training.rows import TrainingRows

_UNCHANGED = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}


@contextlib.contextmanager
def float64_operations() -> Iterator[None]:
    """Compute each operation of the block in float64 and round its results to the dtypes they have outside of it.

    Passes that differ by more than the bound are repeated so, to find out whether the difference is rounding. A matrix
    product may add the terms of a row in a different order for one row than for many, and an ill-conditioned model
    amplifies the rounding error, for instance in an RMSNorm of a short vector. In a small Llama with random LoRA
    factors, the float32 gradients of a row alone and with others differ by up to 1.5e-3, while its losses agree to
    1e-7. The norms are those of these gradients to 1e-7.

    The order of terms within an operation then changes its result only where the float64 values lie on two sides of a
    rounding boundary: about one number in 10^7. A function of other rows remains one: each operation reads the same
    tensors and returns the same dtypes. Rounding between operations remains, too: a loss that adds rows in chunks
    differs as before.

    Operations that PyTorch does not define, and those without a float64 kernel, run as they are. Views, random numbers
    and whole numbers do not change. Attention runs as matrix products and a softmax; any other operation takes the
    memory of its tensors in float64 while it runs.

    >>> x, w = torch.rand(1, 999), torch.rand(999, 1)
    >>> with float64_operations():
    ...     product = x @ w
    >>> torch.equal(product, (x.double() @ w.double()).float())
    True
    """
    with sdpa_kernel(SDPBackend.MATH), _Float64():
        yield


class _Float64(TorchDispatchMode):
    """The mode of `float64_operations`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation, and replace the values of its results by the rounded values of float64."""
        kwargs = kwargs or {}
        wide = _in_float64(func, args, kwargs)
        result = func(*args, **kwargs)
        if wide is not None:
            for one, exact in zip(tree_leaves(result), tree_leaves(wide), strict=True):
                if isinstance(one, Tensor) and one.is_floating_point():
                    one.copy_(exact)
        return result


def _in_float64(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the results of an operation in float64; None if it stays as it is."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if func.namespace != "aten" or func.is_view or not _UNCHANGED.isdisjoint(func.tags):
        return None
    if not any(map(_is_narrow, tensors)):
        return None

    def widened(one: Any) -> Any:
        if isinstance(one, torch.dtype):
            return torch.float64 if one.is_floating_point else one
        if not isinstance(one, Tensor):
            return one
        if _is_narrow(one):
            return one.double()
        return one.clone() if func._schema.is_mutable else one  # the operation itself writes into the tensor

    try:
        return func(*tree_map(widened, args), **tree_map(widened, kwargs))
    except RuntimeError:
        return None


def _is_narrow(one: Tensor) -> bool:
    return one.is_floating_point() and one.dtype != torch.float64


FIRST, LATER = (4, 1 / 16, 64), (2, 1 / 64, 16)
"""Number of rows run together in the first check of a process and in later ones: the fewest, the share of a step's
rows, and the most. A run of 100 steps has eight checks (benchmarks/results.md has their cost)."""
OTHERS = 4
"""Rows that the first check makes before it runs the shortest row again, one after the other."""
REFUSED = 8
"""Checks refuse in these first steps of a process. A later difference comes from something that changes during
training, or from rounding in weights that have grown."""
_Result = TypeVar("_Result")
Results = list[list[Seen]]
"""Results of the passes of a check: of those with its own seed, and of those with each other seed."""
logger = logging.getLogger(__name__)

CHOSEN = (
    "The model's configuration changed while rows passed through it: {names}. The model chose the value by the rows "
    "that came first, config.json would publish it, and all later rows follow it, so ε would not hold. Set it in "
    "model.config before the run is attached"
)
LATE = (
    "The check of rows before step {step} since the start or resume found that {finding}. The checks of the first 8 "
    "steps had passed, so the run went on, and ε may not hold for its later steps. Find out what changed during the "
    "training (a loss, a collator, a callback, or rounding of larger weights), and release the model only if rounding "
    "explains the difference"
)
ROUNDED = (
    "The rounding error of this model is larger than the check of rows allows: a row's gradient alone differed from "
    "its gradient beside other rows, and no longer did with operations in float64. ε is that of exact arithmetic, and "
    "by rounding the gradients of other units depend a little on whether a unit is present. Say why this is "
    "acceptable, or train with wider floats or a better conditioned model"
)


class IndependenceCheck:
    """Comparison of rows alone and with others, before steps 1, 2, 4, 8, … of a process and before the last step.

    Guarantee: a check that passes leaves no gradient, no sum, no charge and no random state behind. All processes
    run the same number of passes and reach the same verdict. After `REFUSED` steps the verdict is an open point.

    Args:
        clipper: attached to the model; it may not hold rows of a unit.
        model: the module that computes the losses.
        rows: rows of the run.
        engine: engine of the run.
        expected_batch_size: expected number of units of a step, over all processes.

    Attributes:
        last: result of the last check; None before the first.
        found: results of the checks, beside their verdicts.
    """

    def __init__(
        self, clipper: UnitClipper, model: nn.Module, rows: TrainingRows, engine: Engine, expected_batch_size: float
    ) -> None:
        """Begin before the first step of this process."""
        self._clipper, self._model, self._rows, self._engine = clipper, model, rows, engine
        units = rows.units
        self._per_step = expected_batch_size * units.num_rows / max(1, units.num_units) / engine.processes.size
        numbers = np.asarray(units.rows)
        self._longest = numbers[[rows.lengths[numbers].argmax()]]
        self._steps, self._has_failed = 0, False
        self._must_pass = True  # the last check of the first `REFUSED` steps has not passed
        self._places: set[str] = set()  # in the code, and generators, from which numbers were drawn
        self._late: set[str] = set()  # findings of late checks that have an open point
        self.last: Differences | None = None
        self.found = Found()

    def before_step(
        self,
        loss_of: Callable[[Mapping], Tensor],
        max_tokens: int | None,
        is_last: bool = False,
        source: Any = None,
    ) -> None:
        """Check, if a check is due before this step. Called by all processes together.

        After a refusal every step has a check as complete as the first, until one passes.

        Args:
            loss_of: a microbatch's inputs to one loss per row (B,).
            max_tokens: the most tokens of a microbatch, padding included. None: as many as ``rows.max_rows`` have.
            is_last: whether the step is the last one of the plan; then a loss function that changed is found.
            source: the user's function in ``loss_of``, which is searched for a random generator of its own. None:
                ``loss_of``.

        Raises:
            IndependenceError: rows are not independent, in the first `REFUSED` steps; the same message on every
                process.
            GhostError: the losses or the model are refused by the clipper.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) and not is_last and not self._has_failed:
            return
        first, self._has_failed = self._steps == 1 or self._has_failed, True
        self._must_pass |= self._steps <= REFUSED
        seed = seed_between(0, 1)  # different from the seed of the last check
        setup = Setup(self._clipper, self._model, self._rows, self._engine, loss_of, max_tokens, seed)
        before = {name: parameter.grad for name, parameter in self._clipper.parameters.items()}
        try:
            try:
                self._check(setup, first, loss_of if source is None else source)
            except IndependenceError as error:
                if self._must_pass:
                    raise
                self._note_late(error.finding)
            self._has_failed = self._must_pass = False
            told = [point for points in self._engine.processes.gather(self.found.points) for point in points]
            self.found.points = list(dict.fromkeys(told))
        finally:
            for name, parameter in self._clipper.parameters.items():
                if before[name] is None:
                    parameter.grad = None

    def _note_late(self, finding: str) -> None:
        """Make an open point of each kind of difference that is found after `REFUSED` steps, once."""
        if finding in self._late:
            return
        self._late.add(finding)
        point = LATE.format(step=self._steps, finding=finding)
        self.found.points.append(point)
        if self._engine.processes.is_main:
            logger.warning("%s. PrivateRun.row_differences has the figures of the last check, which are private", point)

    def _check(self, setup: Setup, first: bool, source: Any) -> None:
        config = _config_of(self._model)
        self._compare(setup, first, source)
        now = _config_of(self._model)
        names = sorted(name for name in now.keys() | config.keys() if now.get(name) != config.get(name))
        self._refuse(CHOSEN.format(names=", ".join(names)) if names else None, "the model's configuration changed")

    def _compare(self, setup: Setup, first: bool, source: Any) -> None:
        kind = own_generator(source)
        self._refuse(None if kind is None else OWN_GENERATOR.format(who="The loss", what=kind))
        (passes, worst), everywhere = self._agreed(
            lambda: self._measured(setup, first), lambda measured: measured[1] is not None
        )
        # From here on all processes run the same passes, even if only one of them found a difference.
        is_random = any(everywhere) and any(self._agreed(passes.is_random, bool)[1])
        if is_random or not any(everywhere):
            self._refuse_shared(passes, first or is_random)
        if is_random:
            with _evaluating(self._model):  # randomness that could not be switched off: fused attention, custom kernels
                worst, everywhere = self._agreed(lambda: self._worst(passes, first=False), bool)
        if not any(everywhere):
            return
        if worst is None:  # on another process
            self._refuse(None)
            return
        tolerance, held = passes.tolerance(), passes.not_held if is_random else ""
        words = in_words(worst, tolerance, passes.is_carried, held)
        self._refuse(words, finding_of(worst, tolerance))

    def _refuse(self, message: str | None, *finding: str) -> None:
        """Raise the first message of all processes on each of them, with its finding for the report."""
        for found in self._engine.processes.gather(None if message is None else (message, *finding)):
            if found is not None:
                raise IndependenceError(*found)

    def _refuse_shared(self, passes: Passes, first: bool) -> None:
        """Check that rows share no random numbers; in later checks, if numbers are drawn in new places."""
        new = passes.places - self._places
        self._places |= new
        if self._rows.max_rows == 1 or not any(self._engine.processes.gather(first or bool(new))):
            return
        sharing = Sharing(passes.copies, passes.room_for_copies(), passes.tolerance, self._engine.lockstep)
        self._agreed(sharing.look, bool)
        if any(self._engine.processes.gather(bool(sharing.shared or sharing.generators))):
            self._agreed(sharing.force, bool)
        self._refuse(sharing.message)

    def _measured(self, setup: Setup, first: bool) -> tuple[Passes, tuple[Seen, Seen] | None]:
        """Return the passes over rows drawn for them (fewer rows if memory runs out), and `_worst` of them."""
        wanted = _rows_wanted(self._per_step, first)
        crowd = min(FIRST[2], math.ceil(self._per_step)) if first else 0
        while True:
            with same_randomness(setup.seed):  # collators and fetches may draw random numbers
                row = self._rows.fetch(self._longest)[0]
                before = generator_states()
                made = self._rows.collate.row(row)
                sample = Sample.draw(self._rows, setup.max_tokens, wanted, first, crowd)
                self.found.is_drawn |= generator_states() != before
                passes = Passes(setup, self.found, sample)
            try:
                worst = self._worst(passes, first)
                with same_randomness(setup.seed):  # after some dozens of its calls
                    if not same_values(made, self._rows.collate.row(row)):
                        raise IndependenceError(MADE_LATER)
                return passes, worst
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                message = str(error)
            free_memory()
            if self._engine.lockstep or max(wanted, crowd) <= 1:
                raise MicrobatchTooLargeError(
                    f"Memory ran out on {max(wanted, crowd)} row(s) while the independence of rows was measured. "
                    "Give a smaller microbatch_tokens (in the Trainer max_tokens_per_microbatch) or "
                    f"per_device_train_batch_size, or shorten the rows (data.max_length). "
                    f"Error of the device: {message}"
                )
            if crowd > wanted:
                crowd = 0
            else:
                wanted //= 2

    def _worst(self, passes: Passes, first: bool) -> tuple[Seen, Seen] | None:
        """Return the two results of one row that differ most, None if none differ by more than rounding.

        Where rounding may be larger than the bound, as in an ill-conditioned model, a difference is rounding if it
        vanishes in float64 and comes back without it; it is then an open point of the report. The second half finds
        code that treats rows differently once, or for a while. Passes that communicate with other processes are not
        repeated: there, every difference counts.
        """
        early = passes.early() if first and not self._engine.lockstep else []
        if first and len(passes.sample.probed) > 1:
            passes.probe()
        chances = CHANCES if first and len(passes.sample.together) > 1 else 0
        seeds = [seed_between(part / CHANCES, (part + 1) / CHANCES) for part in range(chances)]
        results = self._results(passes, first, seeds, early)
        self.last = compare(results[0], counting_norm(self._clipper), passes.bound())[0]
        worst = self._differing(passes, results)
        if worst is None or self._engine.lockstep:
            return worst
        is_carried = passes.is_carried
        with contextlib.suppress(Exception):  # such as a lack of memory: then the difference counts
            with float64_operations():
                exact = self._results(passes, first, seeds, passes.early() if early else [])
            vanishes = self._differing(passes, exact) is None and agree(results, exact, NEAR)
            if vanishes and agree(results, self._results(passes, first, seeds, early), SAME):
                self.found.points.append(ROUNDED)
                return None
        passes.is_carried = is_carried
        return worst

    def _results(self, passes: Passes, first: bool, seeds: Sequence[int], early: Sequence[Seen]) -> Results:
        """Run the passes of a check; return the results that are compared with each other, one list for each seed.

        Args:
            passes: of the check.
            first: whether the check is as complete as the first one of a process.
            seeds: of random numbers, for passes of two rows each.
            early: result of the shortest row before all others.
        """
        short = passes.sample.together[0]
        passes.make(short)
        seen = [one for company in passes.sample.companies(first) for one in passes.run(company)]
        by_chance = [passes.with_seed(seed) for seed in seeds]
        # A step makes other rows before this one passes: a loss that reads what the collator has stored reads theirs.
        others = [number for number in passes.sample.inputs if number != short][
            : OTHERS if first and not self._engine.lockstep else 1
        ]
        again: list[Seen] = []
        for other in others or [short]:
            passes.make(other)
            again += passes.run(Company((short,), "alone, after all other rows"))
        passes.is_carried = any(passes.differ([*early, seen[0]], [one]) for one in again)
        return [[*early, *seen, *again], *by_chance]

    def _differing(self, passes: Passes, results: Results) -> tuple[Seen, Seen] | None:
        """Return the pair that differs most, of the first results with a difference beyond rounding."""
        counting, bound = counting_norm(self._clipper), passes.bound()
        pairs = (compare(seen, counting, bound)[1] for seen in results)
        return next((pair for pair in pairs if pair is not None), None)

    def _agreed(
        self, function: Callable[[], _Result], is_true: Callable[[_Result], bool]
    ) -> tuple[_Result, list[bool]]:
        """Return a function's result on this process, and whether ``is_true`` holds for it on each process.

        Raises:
            Exception: the function raised it on this process or on another.
        """
        result = self._engine.processes.together(function)
        return result, self._engine.processes.gather(is_true(result))


def _rows_wanted(per_step: float, first: bool) -> int:
    """Return the number of rows to run together: few, unless a step has many more."""
    least, share, most = FIRST if first else LATER
    return min(most, max(least, int(per_step * share)))


def _config_of(model: nn.Module) -> dict[str, str]:
    """Return the values of a model's configuration that its file would hold, as text; none without one."""
    config: Any = getattr(model, "config", None)
    return {name: repr(value) for name, value in config.to_dict().items()} if hasattr(config, "to_dict") else {}


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode for the duration of the block."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
