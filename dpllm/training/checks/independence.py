"""Check by value that rows are independent: a row's loss and gradient are the same alone and with other rows.

`dpllm.training.run` runs the check before a private step, on the same engine, at steps 1, 2, 4, 8, … of a process and
at the last step of the plan.
Clipping bounds a unit's contribution, but the change of the sum only if no row changes the contributions of
others. A gradient shows some couplings (`dpllm.ghost.weights_check`). A comparison of values shows the rest: padding
that the model reads, losses divided by counts of the batch, detached statistics, scales chosen over all rows, and state
that is carried from one microbatch to the next. Where random numbers are drawn, couplings that occur only in some
microbatches are searched for with several random states. State that a loss or a model carries from call to call shows
when the shortest row is run again after all others.
Random numbers that rows share leave each row's own distribution unchanged; `Sharing` searches for them.

The check uses a microbatch of very unequal lengths (`dpllm.training.checks.row_sample`). The shortest row is run alone,
then in a batch with other rows, then with replaced, longer rows in a different order, and once with an identical row.
Each row is a separate unit, and dropout is off (`dpllm.training.checks.repeatable.Repeatable`). The passes are not part
of the mechanism, and none of their results is kept. They call the user's loss, collator and data set as a training
does, and write into none of their objects.

A difference in steps 1 to 8 of a process is an error, and nothing of the step is computed. A later one is an open point
of the report, because the steps of a long run are paid for: the run continues, and `push` refuses until people have
answered the point.

Clipping bounds a unit's contribution only if the random numbers of different units are independent. Which units are in
one microbatch depends on all drawn units. If rows of a microbatch share a number, then removing a unit changes the
groups of rows that share one, and so the joint distribution of the other units' contributions, by several clip
norms. A comparison of rows alone and in a batch does not show this: each row's own distribution is right.
Collators are called with one row, so only models and losses can share a number.

Two comparisons run on copies of one row:

* **By number** (`shared_draws`, `shared_generators`): copies need as many times the numbers as one row. A draw of
  PyTorch that does not grow with the copies is shared, and so are the numbers of Python's or NumPy's generator if it is
  in the same state after one row and after several. For dropout this is decisive: every number of its mask acts.
* **By force** (`Sharing.force`): a shared draw is harmless if it has no influence. Only its numbers are changed, also
  to rare values, and then no loss may change.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpllm.data.labels import IGNORE
from dpllm.data.transfer import own_copy, send
from dpllm.ghost import GhostError, UnitClipper
from dpllm.ghost.refusals import is_shortage
from dpllm.training.checks.differences import (
    NEAR,
    SAME,
    Bound,
    Differences,
    Precision,
    Seen,
    agree,
    compare,
    counting_norm,
    difference,
    finding_of,
    in_words,
)
from dpllm.training.checks.randomness import OWN_GENERATOR, own_generator
from dpllm.training.checks.repeatable import (
    DROPOUT,
    NUMPY,
    PYTHON,
    Draw,
    Numbers,
    Repeatable,
    generator_states,
    not_held,
    randomness,
    seed_between,
)
from dpllm.training.checks.row_sample import (
    CARRIED,
    REREAD,
    Company,
    IndependenceError,
    RowMaker,
    Sample,
    carries,
    is_drawn,
)
from dpllm.training.out_of_memory import MicrobatchTooLargeError, device_of, free_memory

if TYPE_CHECKING:
    from dpllm.engines.base import Engine
    from dpllm.training.rows import TrainingRows

_UNCHANGED = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}


@contextlib.contextmanager
def float64_operations() -> Iterator[None]:
    """Compute each operation of the block in float64 and round its results to the dtypes they have outside of it.

    Passes that differ by more than the bound are repeated like this, to find out whether the difference is rounding. A
    matrix product may add the terms of a row in a different order for one row than for many, and an ill-conditioned
    model amplifies the rounding error, for instance in an RMSNorm of a short vector. In a small Llama with random LoRA
    factors, the float32 gradients of a row alone and with others differ by up to 1.5e-3, while its losses agree to
    1e-7. The norms match those of these gradients to 1e-7.

    The order of terms within an operation then changes its result only where the float64 values lie on two sides of a
    rounding boundary: about one number in 10^7. A dependence on other rows remains visible: each operation reads the
    same tensors and returns the same dtypes. Rounding between operations remains, too: a loss that adds rows in chunks
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
    """Return the results of an operation in float64; None if it is left unchanged."""
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
"""Number of rows run together in the first check of a process and in later ones: the least, the share of a step's
rows, and the most. A run of 100 steps has eight checks (benchmarks/results.md has their cost)."""
CHANCES = 8
"""Random states of the first check: a coupling in at least one of eight microbatches is found with certainty."""
FIRST_CALLS = 16
"""Further collator calls in the first check, to find effects that change slowly with its calls."""
REFUSED = 8
"""A check raises an error in these first steps of a process. A later difference comes from something that changes
during training, or from rounding in weights that have grown."""
_Result = TypeVar("_Result")
Results = list[list[Seen]]
"""Results of passes: only those within a list are compared with each other."""
logger = logging.getLogger(__name__)

CHOSEN = (
    "The model's configuration changed while rows passed through it: {names}. The model chose the value from the first "
    "rows, config.json would publish it, and it affects all later rows, so ε would not hold. Set it in "
    "model.config before the run is attached"
)
LATE = (
    "The check of rows before step {step} since the start or resume found that {finding}. The checks of the first 8 "
    "steps had passed, so the run continued, and ε may not hold for its later steps. Find out what changed during the "
    "training (a loss, a collator, a callback, or rounding of larger weights), and release the model only if rounding "
    "explains the difference"
)
ROUNDED = (
    "The rounding error of this model is larger than the check of rows allows: a row's gradient alone differed from "
    "its gradient in a batch, but not with operations in float64. ε assumes exact arithmetic, and "
    "with rounding, other units' gradients depend slightly on whether a unit is present. Explain why this is "
    "acceptable, or train with wider floats or a better conditioned model"
)


class IndependenceCheck:
    """Comparison of rows alone and with others, before steps 1, 2, 4, 8, … of a process and before the last step.

    Guarantee: a check that passes leaves no gradient, sum, charge or random state behind. All processes
    run the same number of passes and reach the same verdict. After `REFUSED` steps, the verdict is an open point.

    Args:
        clipper: attached to the model; it may not store rows of an unfinished unit.
        model: the module that computes the losses.
        rows: rows of the run.
        engine: engine of the run.
        expected_batch_size: expected number of units of a step, over all processes.

    Attributes:
        last: result of the last check; None before the first.
        points: facts for the open points of the report; the same on every process after a check.
        is_drawn: whether rows are made with random numbers.
    """

    def __init__(
        self, clipper: UnitClipper, model: nn.Module, rows: TrainingRows, engine: Engine, expected_batch_size: float
    ) -> None:
        """Begin before the first step of this process."""
        self._clipper, self._model, self._rows, self._engine = clipper, model, rows, engine
        units = rows.units
        self._per_step = expected_batch_size * units.num_rows / max(1, units.num_units) / engine.processes.size
        self._steps, self._has_failed = 0, False
        self._must_pass = True  # until the last check of the first `REFUSED` steps has passed
        self._places: set[str] = set()  # places in the code, and generators, from which numbers were drawn
        self._late: set[str] = set()  # findings of late checks that already have an open point
        self.last: Differences | None = None
        self.points: list[str] = []
        self.is_drawn = False

    def before_step(
        self,
        loss_of: Callable[[Mapping], Tensor],
        max_tokens: int | None,
        is_last: bool = False,
        source: Any = None,
    ) -> None:
        """Check, if a check is due before this step. Called by all processes together.

        After a refusal, every step has a check as complete as the first, until one passes.

        Args:
            loss_of: computes one loss per row (B,) from a microbatch's inputs.
            max_tokens: the largest number of tokens of a microbatch, padding included. None: bounded by
                ``rows.max_rows`` only.
            is_last: whether the step is the last one of the plan; the check then also finds a changed loss function.
            source: the user's function in ``loss_of``, which is searched for its own random generator. None:
                ``loss_of``.

        Raises:
            IndependenceError: rows are not independent, in the first `REFUSED` steps; the same message on every
                process.
            GhostError: the clipper refuses the losses or the model.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) and not is_last and not self._has_failed:
            return
        first, self._has_failed = self._steps == 1 or self._has_failed, True
        self._must_pass |= self._steps <= REFUSED
        before = {name: parameter.grad for name, parameter in self._clipper.parameters.items()}
        try:
            try:
                self._check(loss_of, max_tokens, first, loss_of if source is None else source)
            except IndependenceError as error:
                if self._must_pass:
                    raise
                self._note_late(error.finding)
            self._has_failed = self._must_pass = False
            told = [point for points in self._engine.processes.gather(self.points) for point in points]
            self.points = list(dict.fromkeys(told))
        finally:
            for name, parameter in self._clipper.parameters.items():
                if before[name] is None:
                    parameter.grad = None

    def _note_late(self, finding: str) -> None:
        """Add an open point for each kind of difference found after `REFUSED` steps, once."""
        if finding in self._late:
            return
        self._late.add(finding)
        point = LATE.format(step=self._steps, finding=finding)
        self.points.append(point)
        if self._engine.processes.is_main:
            logger.warning("%s. PrivateRun.row_differences has the figures of the last check, which are private", point)

    def _check(self, loss_of: Callable, max_tokens: int | None, first: bool, source: Any) -> None:
        """Compare the rows, and the model's configuration before and after that."""
        config = _config_of(self._model)
        kind = own_generator(source)
        self._refuse(None if kind is None else OWN_GENERATOR.format(who="The loss", what=kind))
        self._compare(loss_of, max_tokens, first)
        now = _config_of(self._model)
        names = sorted(name for name in now.keys() | config.keys() if now.get(name) != config.get(name))
        self._refuse(CHOSEN.format(names=", ".join(names)) if names else None, "the model's configuration changed")

    def _compare(self, loss_of: Callable, max_tokens: int | None, first: bool) -> None:
        """Run the passes. All processes together decide which ones follow."""
        self.last = None
        (passes, worst), differ = self._agreed(
            lambda: self._measured(loss_of, max_tokens, first), lambda measured: measured[1] is not None
        )
        if any(self._engine.processes.gather(bool(passes.places))):
            worst, differ = self._compare_numbers(passes, worst, differ, first)
        if any(differ):
            tolerance = passes.bound().relative
            words = (
                (None,)
                if worst is None
                else (
                    in_words(worst, tolerance, passes.not_held, passes.reads_padding(*worst)),
                    finding_of(worst, tolerance),
                )
            )
            self._refuse(*words)  # None: the message comes from another process

    def _compare_numbers(
        self, passes: Passes, worst: tuple[Seen, Seen] | None, differ: list[bool], first: bool
    ) -> tuple[tuple[Seen, Seen] | None, list[bool]]:
        """Judge the random numbers of the model or the loss; return a difference with another cause.

        Args:
            passes: passes of the check.
            worst: the largest difference on this process.
            differ: whether there is a difference, on each process.
            first: whether the check is as complete as the first one of a process.
        """
        gather, new = self._engine.processes.gather, passes.places - self._places
        self._places |= new
        if first and not any(differ) and any(gather(passes.varies)):
            seeds = [seed_between(part / CHANCES, (part + 1) / CHANCES) for part in range(CHANCES)]
            worst, differ = self._agreed(lambda: self._judged(passes, lambda: passes.by_chance(seeds)), bool)
        is_random = any(differ) and any(self._agreed(passes.is_random, bool)[1])
        if is_random or (not any(differ) and any(gather(first or bool(new)))):
            self._refuse_shared(passes)
        if is_random:
            with _evaluating(self._model):  # randomness that could not be switched off: fused attention, custom kernels
                return self._agreed(lambda: self._judged(passes, lambda: passes.compared(first=False)), bool)
        return worst, differ

    def _refuse(self, message: str | None, *finding: str) -> None:
        """Raise the first message of all processes on each of them, with its finding for the report."""
        for found in self._engine.processes.gather(None if message is None else (message, *finding)):
            if found is not None:
                raise IndependenceError(*found)

    def _refuse_shared(self, passes: Passes) -> None:
        """Check that rows share no random numbers."""
        if self._rows.max_rows == 1:
            return
        tolerance, in_lockstep = passes.bound().relative, self._engine.lockstep
        sharing = Sharing(passes.copies, passes.room_for_copies(), tolerance, in_lockstep)
        self._agreed(sharing.look, bool)
        if any(self._engine.processes.gather(bool(sharing.shared or sharing.generators))):
            self._agreed(sharing.force, bool)
        self._refuse(sharing.message)

    def _measured(
        self, loss_of: Callable, max_tokens: int | None, first: bool
    ) -> tuple[Passes, tuple[Seen, Seen] | None]:
        """Return the passes over freshly drawn rows (fewer if memory runs out), and the largest difference."""
        least, share, most = FIRST if first else LATER
        wanted = min(most, max(least, int(self._per_step * share)))  # few, unless a step has many more
        crowd = min(FIRST[2], math.ceil(self._per_step)) if first else 0
        while True:
            maker = RowMaker(self._rows, seed_between(0, 1))  # with different random numbers than the last check
            try:
                sample = Sample.draw(self._rows, maker, max_tokens, wanted, first, crowd)
                self._check_making(maker, sample, first)
                passes = Passes(
                    self._clipper, self._model, self._rows, loss_of, maker, sample, max_tokens, self._engine.lockstep
                )
                return passes, self._judged(passes, functools.partial(passes.compared, first))
            except RuntimeError as error:
                if not is_shortage(error):
                    raise
                message = str(error)
            free_memory()
            if self._engine.lockstep or max(wanted, crowd) <= 1:
                raise MicrobatchTooLargeError(
                    f"Memory ran out on {max(wanted, crowd)} row(s) while the independence of rows was measured. "
                    "Set a smaller microbatch.tokens (in the Trainer max_tokens_per_microbatch) or "
                    f"per_device_train_batch_size, or shorten the rows (data.max_length). "
                    f"Error of the device: {message}"
                )
            if crowd > wanted:
                crowd = 0
            else:
                wanted //= 2

    def _check_making(self, maker: RowMaker, sample: Sample, first: bool) -> None:
        """Check that each row is made only from its own record.

        Raises:
            IndependenceError: the data set or the collator carries something from one row to the next, or the collator
                sets a seed.
        """
        others = [number for number in (sample.longest, *sample.between) if number != sample.short]
        if others and carries(maker.read, sample.short, (others[0], ([*others[1:], sample.short])[0])):
            raise IndependenceError(CARRIED)
        if first and is_drawn(maker.read, sample.longest):
            self.points.append(REREAD)
        maker.refuse_seeds(sample.longest)
        self.is_drawn |= maker.is_drawn

    def _judged(self, passes: Passes, run: Callable[[], Results]) -> tuple[Seen, Seen] | None:
        """Return the two results of one row that differ most; None if none differ by more than rounding.

        Where rounding may exceed the bound, as in an ill-conditioned model, a difference counts as rounding if it
        vanishes in float64 and returns without it; it is then an open point of the report. The second condition finds
        code that treats rows differently once, or for a while. Passes that communicate with other processes are not
        repeated: there, every difference counts.

        Args:
            passes: passes of the check.
            run: repeats the passes that are compared, the same ones each time.
        """
        results = run()
        worst = passes.differing(results)
        self.last = self.last or compare(results[0], counting_norm(self._clipper), passes.bound())[0]
        if worst is None or self._engine.lockstep:
            return worst
        with contextlib.suppress(Exception):  # such as a lack of memory: then the difference counts
            with float64_operations():
                exact = run()
            vanishes = passes.differing(exact) is None and agree(results, exact, NEAR)
            if vanishes and agree(results, run(), SAME):
                self.points.append(ROUNDED)
                return None
        return worst

    def _agreed(
        self, function: Callable[[], _Result], is_true: Callable[[_Result], bool]
    ) -> tuple[_Result, list[bool]]:
        """Return a function's result on this process, and whether ``is_true`` holds for it on each process.

        Raises:
            Exception: the function raised it on this process or on another.
        """
        result = self._engine.processes.together(function)
        return result, self._engine.processes.gather(is_true(result))


class Passes:
    """The passes of one check, through model, loss and clipper.

    Each row is made once, and dpllm combines rows, so passes differ only in the other rows of the batch.

    Args:
        clipper: attached to the model; it may not store rows of an unfinished unit.
        model: the module that computes the losses.
        rows: rows of the run.
        loss_of: computes one loss per row (B,) from a microbatch's inputs.
        maker: made the rows of the sample; passes use its random state.
        sample: rows of the check.
        max_tokens: the largest number of tokens of a microbatch, padding included. None: bounded by ``rows.max_rows``
            only.
        in_lockstep: whether other processes run the same passes.

    Attributes:
        places: places in the code, and generators, from which any pass drew numbers.
        varies: whether a pass drew random numbers other than for dropout, which is off.
        not_held: description of the random numbers that differ between passes and change the result.
    """

    def __init__(
        self,
        clipper: UnitClipper,
        model: nn.Module,
        rows: TrainingRows,
        loss_of: Callable[[Mapping], Tensor],
        maker: RowMaker,
        sample: Sample,
        max_tokens: int | None,
        in_lockstep: bool,
    ) -> None:
        """Store the arguments; no pass runs yet."""
        self._clipper, self._model, self._rows, self._loss_of = clipper, model, rows, loss_of
        self._maker, self._sample, self._max_tokens, self._in_lockstep = maker, sample, max_tokens, in_lockstep
        trained = [parameter.dtype for parameter in clipper.parameters.values()]
        self._precision = Precision(weights=min(trained, key=lambda dtype: torch.finfo(dtype).eps))
        self._has_probed = False
        self.places: set[str] = set()
        self.varies, self.not_held = False, ""

    def compared(self, first: bool) -> Results:
        """Run the companies of the sample, and the shortest row once more after each of some other rows.

        Args:
            first: whether the check is as complete as the first one of a process.

        Raises:
            IndependenceError: the collator makes a row differently when it is called again.
        """
        sample, seen = self._sample, []
        self._maker.make_again(sample.short)  # a loss may read what the collator has stored
        if first and not self._in_lockstep:  # a loss that depends on earlier rows does so from the first pass on
            with contextlib.suppress(Exception):  # the following passes report why
                seen += self.run(sample.alone).seen
        if first and sample.together is not None and not self._has_probed:
            self._probe(sample.together)
        for company in sample.companies[1 if seen else 0 :]:
            seen += self.run(company).seen
        for other in sample.between[: 1 if self._in_lockstep else None]:
            self._maker.make_again(other)  # as a step makes other rows before this one passes
            seen += self.run(Company((sample.short,), "alone, after all other rows")).seen
        for _ in range(FIRST_CALLS if first else 2):  # finds what changes with every second call, or slowly
            self._maker.make_again(sample.longest)
        return [seen]

    def by_chance(self, seeds: Sequence[int]) -> Results:
        """Run the shortest row alone and with another one, with the random numbers of each seed."""
        companies = [one for one in (self._sample.alone, self._sample.pair) if one is not None]
        return [[one for company in companies for one in self.run(company, seed).seen] for seed in seeds]

    def _probe(self, company: Company) -> None:
        """Check that losses have no gradient in other rows; see `dpllm.ghost.UnitClipper.check_rows`."""
        inputs, index = self._batch(company), torch.arange(len(company.numbers))
        with self._repeatable(self._maker.seed) as mode, mode:
            self._clipper.check_rows(lambda: self._losses(inputs), index)
        self._has_probed = True

    def is_random(self) -> bool:
        """Return whether the result of the shortest row alone changes with other random numbers."""
        start, one, other = self._maker.seed, seed_between(0.0, 0.5), seed_between(0.5, 1.0)
        passes = [self.run(self._sample.alone, seed, start) for seed in (one, other, one)]
        first, second, again = (done.seen for done in passes)
        # A different result with the same numbers comes from state, not from randomness.
        is_random = self.differing([first + second]) is not None and self.differing([first + again]) is None
        names = not_held(passes[-1].draws, passes[-1].moved) or ["from PyTorch's global generator"]
        self.not_held = ", ".join(names) if is_random else ""
        return is_random

    def room_for_copies(self) -> int:
        """Return how many copies of the shortest row are compared."""
        short = max(1, int(self._rows.lengths[self._sample.short]))
        most = COPIES if self._max_tokens is None else self._max_tokens // short
        return max(1, min(COPIES, self._rows.max_rows or COPIES, most))

    def copies(self, count: int, numbers: Numbers) -> Pass:
        """Return one pass over copies of the shortest row, for `Sharing`."""
        return self.run(Company((self._sample.short,) * count, "in a batch of its copies"), numbers=numbers)

    def reads_padding(self, first: Seen, other: Seen) -> bool | None:
        """Return whether a row alone, padded as in the batch, has the result that it has in the batch.

        Args:
            first: its result alone.
            other: its result in the batch.

        Returns:
            None if that is unknown: rows are packed, or other processes would have to run the same pass.
        """
        alone, size = first.company, len(other.company.numbers)
        if self._in_lockstep or self._rows.packed or size == 1 or len(alone.numbers) > 1:
            return None
        inputs = self._batch(other.company)
        if not all(isinstance(value, Tensor) and len(value) == size for value in inputs.values()):
            return None
        here = slice(other.place, other.place + 1)
        with contextlib.suppress(Exception):  # such as a lack of memory
            padded = self.run(alone, inputs={name: value[here] for name, value in inputs.items()})
            return self.differing([[*padded.seen, other]]) is None
        return None

    def run(
        self,
        company: Company,
        seed: int | None = None,
        start: int | None = None,
        numbers: Numbers | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Pass:
        """Run one pass.

        Args:
            company: the rows.
            seed: seed of the global generators. None: the rows' seed.
            start: seed of the numbers given by `Repeatable`. None: ``seed``.
            numbers: changed random numbers.
            inputs: the inputs of these rows, padded differently.
        """
        seed = self._maker.seed if seed is None else seed
        inputs = self._batch(company) if inputs is None else inputs
        index = torch.arange(len(company.numbers))
        with self._repeatable(seed, start, numbers) as mode:
            before = generator_states()
            try:
                with mode:
                    loss_B = self._losses(inputs)
            except Exception as error:
                if isinstance(error, GhostError) or is_shortage(error):
                    raise
                if self._has_probed and len(company.numbers) == 1:
                    raise IndependenceError(self._too_short(company.numbers[0], error)) from error
                raise
            moved = {name: state for name, state in generator_states().items() if state != before[name]}
            with mode if mode.acts else contextlib.nullcontext():  # a mode costs time in each operation
                norm_B = self._clipper.row_norms(loss_B, index)
            self._precision.on_gpu |= loss_B.device.type != "cpu"
            values = torch.stack([loss_B.detach().double(), norm_B.double()], 1).tolist()
        drawn = {one.name for one in mode.draws}
        self.varies |= bool(drawn - {DROPOUT} or moved.keys() & {NUMPY, PYTHON} or (moved and not drawn))
        self.places |= {*moved, *(f"{one.name} {one.where}" for one in mode.draws)}
        rows = zip(company.numbers, values, _targets(inputs, len(values)), strict=True)
        seen = [
            Seen(row, place, loss, norm, company, targets) for place, (row, (loss, norm), targets) in enumerate(rows)
        ]
        return Pass(seen, mode.draws, moved)

    def differing(self, results: Results) -> tuple[Seen, Seen] | None:
        """Return the pair of results of a row that differs most, from the first list with one beyond rounding."""
        counting, bound = counting_norm(self._clipper), self.bound()
        pairs = (compare(seen, counting, bound)[1] for seen in results)
        return next((pair for pair in pairs if pair is not None), None)

    def bound(self) -> Bound:
        """Return the largest differences that rounding explains in the passes so far."""
        return self._precision.bound()

    def _too_short(self, row: int, error: Exception) -> str:
        """Return the message for a row that the model accepts in a batch with longer rows, but not alone."""
        return (
            f"A row of {int(self._rows.lengths[row])} tokens passes through the model together with longer rows but "
            f"not alone ({type(error).__name__}: {error}), so its result depends on its padding, or on random numbers "
            "for which the loss fails. A unit's influence then cannot be bounded, and ε would not hold. Leave out rows "
            "this short, pad all rows to one length in the collator, or correct the branch of the loss"
        )

    def _losses(self, inputs: Mapping[str, Any]) -> Tensor:
        # A copy: the model or the loss may write into its inputs, and a row passes several times.
        return self._loss_of(send(own_copy(inputs), device_of(self._clipper)))

    def _batch(self, company: Company) -> Mapping[str, Any]:
        return self._rows.collate.batch([self._maker.inputs[number] for number in company.numbers])

    @contextlib.contextmanager
    def _repeatable(self, seed: int, start: int | None = None, numbers: Numbers | None = None) -> Iterator[Repeatable]:
        """Enter a random state in which a mode fixes the numbers of a pass, and return the mode."""
        as_written = _as_written(self._model)  # a compiled graph hides its random numbers
        with as_written, randomness(seed, numbers or Numbers()):
            mode = Repeatable(self._rows.packed, seed if start is None else start, numbers)
            try:
                yield mode
            finally:
                self._clipper.forget()  # also after an aborted pass
        self._precision.dtype = max(self._precision.dtype, mode.coarsest, key=lambda dtype: torch.finfo(dtype).eps)


def _targets(inputs: Mapping[str, Any], count: int) -> list[int]:
    """Return the number of targets of each row, 0 where labels (B, T) do not show it."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or len(labels) != count or labels.is_floating_point():
        return [0] * count
    return (labels != IGNORE).sum(1).tolist()


def _as_written(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which compiled parts of a model run without their compiled graphs."""
    marks = ("_orig_mod", "_compiled_call_impl", "_tap_block")
    compiled = any(getattr(m, mark, None) is not None for m in model.modules() for mark in marks)
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def _config_of(model: nn.Module) -> dict[str, str]:
    """Return the values of a model's configuration as its file would store them, as text; empty without one."""
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


# -------------------------------------------------------------------------------- random numbers that rows share


COPIES = 4
"""Copies of a row in a comparison."""
_TRIED = (1e-6, 0.25, 0.5, 0.75, 1 - 1e-6)  # uniform numbers; the extreme ones flip coins that are rarely one
SHARED = (
    "The model or the loss draws random numbers that all rows of a microbatch share: {what}, and {effect}. A unit's "
    "influence then depends on the other drawn units, and ε would not hold. Draw "
    "separate numbers for each row (torch.rand(B) for B rows, not one torch.rand(()) or random.random() for the "
    "batch); set rates that act on all rows at once to 0 (layerdrop, LoHa's and LoKr's rank_dropout and "
    "module_dropout, dropout of weights or of relative positions as in DeBERTa); or train with one row per microbatch "
    "(per_device_train_batch_size: 1)"
)


@dataclass(frozen=True)
class Pass:
    """One pass of rows.

    Attributes:
        seen: results of the rows, in their order.
        draws: the calls that drew numbers, in order.
        moved: the states of the global generators that changed within the model and the loss, after the pass.
    """

    seen: list[Seen]
    draws: Sequence[Draw]
    moved: Mapping[str, Any]


class Sharing:
    """The comparisons of one check for the model and the loss. Each method runs a fixed number of passes.

    Args:
        run: makes a pass over this many copies of a row, with these numbers.
        copies: number of copies for which a microbatch has room.
        tolerance: the largest relative difference of a loss that rounding explains.
        in_lockstep: whether other processes run the same passes; otherwise fewer copies are taken if memory runs out.

    Attributes:
        message: the finding, in one line; None: nothing was found.
        shared: draws that do not grow with the number of copies.
        generators: names of generators whose numbers do not grow with it.
    """

    def __init__(self, run: Callable[[int, Numbers], Pass], copies: int, tolerance: float, in_lockstep: bool) -> None:
        """Start without a result."""
        self._run, self._copies, self._tolerance, self._in_lockstep = run, copies, tolerance, in_lockstep
        self.message: str | None = None
        self.shared: frozenset[Draw] = frozenset()
        self.generators: frozenset[str] = frozenset()

    def look(self) -> None:
        """Compare the draws of one row with those of copies; takes two passes."""
        alone, self._usual = self._run(1, Numbers()), self._fitting()
        self._copies = len(self._usual.seen)
        self.shared = frozenset(shared_draws(alone.draws, self._usual.draws, self._copies))
        self.generators = shared_generators(alone.moved, self._usual.moved) if self._copies > 1 else frozenset()
        if any(one.name == DROPOUT for one in self.shared):
            self._tell("every number of a mask acts")

    def _fitting(self) -> Pass:
        """Return a pass over as many copies as fit in memory."""
        while True:
            try:
                return self._run(self._copies, Numbers())
            except RuntimeError as error:
                if not is_shortage(error) or self._in_lockstep or self._copies == 1:
                    raise
            free_memory()
            self._copies //= 2

    def force(self) -> None:
        """Compare the losses of copies while only shared numbers change; takes five passes."""
        usual = self._usual.seen
        room = self._tolerance * max(1.0, 1 / max(1e-30, abs(usual[0].loss)))  # for a norm near a loss of 0
        for to in _TRIED:
            try:
                forced = self._run(self._copies, Numbers(self.shared, self.generators, to)).seen
            except Exception as error:
                if is_shortage(error):
                    raise
                self._tell(f"the loss fails for some of them ({type(error).__name__}: {error})")
                continue
            for one, other in zip(usual, forced, strict=True):
                if difference(one.loss, other.loss, 1.0) > self._tolerance:
                    self._tell(f"the loss of a row follows them (from {one.loss:.6g} to {other.loss:.6g})")
                if difference(one.norm, other.norm, 1e-30) > room:
                    self._tell(f"the gradient norm of a row follows them (from {one.norm:.6g} to {other.norm:.6g})")

    def _tell(self, effect: str) -> None:
        words = _words(self.shared, self.generators, self._copies)
        self.message = self.message or SHARED.format(effect=effect, what=words)


def shared_draws(alone: Sequence[Draw], copies: Sequence[Draw], count: int) -> list[Draw]:
    """Return the draws of a pass over copies that need fewer numbers than ``count`` single rows do.

    Args:
        alone: draws of the row alone.
        copies: draws of its copies together, compared one by one where as many calls were made, otherwise in total by
            function and place in the code: a loop over rows makes more calls for more rows.
        count: number of copies.
    """
    if count < 2:
        return []
    if [(one.name, one.where) for one in alone] == [(one.name, one.where) for one in copies]:
        pairs = zip(alone, copies, strict=True)
        return [other for one, other in pairs if other.count < count * one.count or (other.count and not one.count)]
    totals: list[Counter[tuple[str, str]]] = [Counter(), Counter()]
    for total, draws in zip(totals, (alone, copies), strict=True):
        for one in draws:
            total[one.name, one.where] += one.count
    return [one for one in copies if totals[1][one.name, one.where] < count * totals[0][one.name, one.where]]


def shared_generators(alone: Mapping[str, Any], copies: Mapping[str, Any]) -> frozenset[str]:
    """Return Python's and NumPy's generator if they move equally far for one row and for several.

    Args:
        alone: states after a pass over one row, of generators that moved.
        copies: states after a pass over copies of it, from the same state.
    """
    return frozenset(name for name in (NUMPY, PYTHON) if name in alone and alone[name] == copies.get(name))


def _words(shared: Iterable[Draw], generators: Iterable[str], copies: int) -> str:
    """Return a description of the shared numbers: the first draw in the code, or the generators."""
    draws = sorted(shared, key=lambda one: (one.name != DROPOUT, one.where))
    if not draws:
        return f"{' and '.join(sorted(generators))} global generator gives as many numbers for one row as for {copies}"
    more = f" (or another of {len(draws)} draws)" if len(draws) > 1 else ""
    return f"{draws[0].name} at {draws[0].where} draws numbers of shape {draws[0].shape} for {copies} rows{more}"
