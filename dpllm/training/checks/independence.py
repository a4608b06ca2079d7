"""Independence of rows, by value: a row's loss and gradient are the same alone and with other rows.

Place in the flow: before a private step, on the same engine; `dpllm.training.run` asks at steps 1, 2, 4, 8, … of a
process and at the last of the plan.
Clipping bounds a unit's contribution; this bounds the change of the sum only if no row changes the contributions of
others. A gradient shows some (`dpllm.ghost.weights_check`), a comparison of values shows the rest: padding that the
model reads, losses divided by counts of the batch, detached statistics, scales chosen over all rows, and state that is
carried from one microbatch to the next. Where numbers are drawn, couplings that occur at random, in some microbatches
only, are searched with several random states. State that a loss or a model carries from call to call shows when the
shortest row is run again after all others.
Random numbers that rows share leave every row's own distribution unchanged: `dpllm.training.checks.sharing`.

A microbatch of very unequal lengths is made for it (`dpllm.training.checks.row_sample`). The shortest row is run alone,
then beside other rows, then beside replaced, longer rows in another order, once beside its equal; each row is a
separate unit, and dropout is off (`dpllm.training.checks.repeatable.Repeatable`). The passes are not part of the
mechanism: nothing of them is kept. They call the user's loss, collator and data set as a training calls them, and write
into none of their objects.

A difference in steps 1 to 8 of a process is an error, and nothing of the step is computed. A later one is an open point
of the report, because the steps of a long run are paid for: the run goes on, and `push` refuses until people have
answered the point.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpllm.data.labels import IGNORE
from dpllm.data.transfer import own_copy, send
from dpllm.ghost import GhostError, UnitClipper
from dpllm.ghost.errors import is_shortage
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
    finding_of,
    in_words,
)
from dpllm.training.checks.randomness import OWN_GENERATOR, own_generator
from dpllm.training.checks.repeatable import (
    DROPOUT,
    NUMPY,
    PYTHON,
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
from dpllm.training.checks.sharing import COPIES, Pass, Sharing
from dpllm.training.out_of_memory import MicrobatchTooLargeError, device_of, free_memory

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
CHANCES = 8
"""Random states of the first check: a coupling in at least one of eight microbatches is found with certainty."""
FIRST_CALLS = 16
"""More calls of the collator in the first check, for what changes slowly with its calls."""
REFUSED = 8
"""Checks refuse in these first steps of a process. A later difference comes from something that changes during
training, or from rounding in weights that have grown."""
_Result = TypeVar("_Result")
Results = list[list[Seen]]
"""Results of passes: only those within a list are compared with each other."""
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
        self._must_pass = True  # the last check of the first `REFUSED` steps has not passed
        self._places: set[str] = set()  # in the code, and generators, from which numbers were drawn
        self._late: set[str] = set()  # findings of late checks that have an open point
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
        """Make an open point of each kind of difference that is found after `REFUSED` steps, once."""
        if finding in self._late:
            return
        self._late.add(finding)
        point = LATE.format(step=self._steps, finding=finding)
        self.points.append(point)
        if self._engine.processes.is_main:
            logger.warning("%s. PrivateRun.row_differences has the figures of the last check, which are private", point)

    def _check(self, loss_of: Callable, max_tokens: int | None, first: bool, source: Any) -> None:
        """Compare rows, and the model's configuration, before and after it."""
        config = _config_of(self._model)
        kind = own_generator(source)
        self._refuse(None if kind is None else OWN_GENERATOR.format(who="The loss", what=kind))
        self._compare(loss_of, max_tokens, first)
        now = _config_of(self._model)
        names = sorted(name for name in now.keys() | config.keys() if now.get(name) != config.get(name))
        self._refuse(CHOSEN.format(names=", ".join(names)) if names else None, "the model's configuration changed")

    def _compare(self, loss_of: Callable, max_tokens: int | None, first: bool) -> None:
        """Run the passes. Which ones follow is decided for all processes together."""
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
            self._refuse(*words)  # None: the message of another process

    def _compare_numbers(
        self, passes: Passes, worst: tuple[Seen, Seen] | None, differ: list[bool], first: bool
    ) -> tuple[tuple[Seen, Seen] | None, list[bool]]:
        """Judge random numbers of the model or the loss; return what differs for another reason than these.

        Args:
            passes: of the check.
            worst: what differs most on this process.
            differ: whether something does, on each process.
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
        """Return the passes over rows drawn for them (fewer rows if memory runs out), and what differs most."""
        wanted = _rows_wanted(self._per_step, first)
        crowd = min(FIRST[2], math.ceil(self._per_step)) if first else 0
        while True:
            maker = RowMaker(self._rows, seed_between(0, 1))  # of different numbers than the last check
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
                    "Give a smaller microbatch.tokens (in the Trainer max_tokens_per_microbatch) or "
                    f"per_device_train_batch_size, or shorten the rows (data.max_length). "
                    f"Error of the device: {message}"
                )
            if crowd > wanted:
                crowd = 0
            else:
                wanted //= 2

    def _check_making(self, maker: RowMaker, sample: Sample, first: bool) -> None:
        """Check that rows are made of their own records only.

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
        """Return the two results of one row that differ most, None if none differ by more than rounding.

        Where rounding may be larger than the bound, as in an ill-conditioned model, a difference is rounding if it
        vanishes in float64 and comes back without it; it is then an open point of the report. The second half finds
        code that treats rows differently once, or for a while. Passes that communicate with other processes are not
        repeated: there, every difference counts.

        Args:
            passes: of the check.
            run: makes the passes that are compared, the same ones each time.
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

    Each row is made once, and dpllm puts rows together, so passes differ in nothing but company.

    Args:
        clipper: attached to the model; it may not hold rows of a unit.
        model: the module that computes the losses.
        rows: rows of the run.
        loss_of: a microbatch's inputs to one loss per row (B,).
        maker: made the rows of the sample; passes use its random state.
        sample: rows of the check.
        max_tokens: the most tokens of a microbatch, padding included. None: as many as ``rows.max_rows`` have.
        in_lockstep: whether other processes run the same passes.

    Attributes:
        places: places in the code, and generators, from which any pass drew numbers.
        varies: whether a pass drew other numbers than those of dropout, which is off.
        not_held: random numbers that differ between passes and change the result, in words.
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
        """Run no pass yet."""
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
        if first and not self._in_lockstep:  # a loss that treats a row by those before does so from the first pass on
            with contextlib.suppress(Exception):  # the passes that follow say why
                seen += self.run(sample.alone).seen
        if first and sample.together is not None and not self._has_probed:
            self._probe(sample.together)
        for company in sample.companies[1 if seen else 0 :]:
            seen += self.run(company).seen
        for other in sample.between[: 1 if self._in_lockstep else None]:
            self._maker.make_again(other)  # as a step makes other rows before this one passes
            seen += self.run(Company((sample.short,), "alone, after all other rows")).seen
        for _ in range(FIRST_CALLS if first else 2):  # what changes with every second call, or slowly
            self._maker.make_again(sample.longest)
        return [seen]

    def by_chance(self, seeds: Sequence[int]) -> Results:
        """Run the shortest row alone and with another one, with the random numbers of each seed."""
        companies = [one for one in (self._sample.alone, self._sample.pair) if one is not None]
        return [[one for company in companies for one in self.run(company, seed).seen] for seed in seeds]

    def _probe(self, company: Company) -> None:
        """Measure that losses have no gradient in other rows; see `dpllm.ghost.UnitClipper.check_rows`."""
        inputs, index = self._batch(company), torch.arange(len(company.numbers))
        with self._repeatable(self._maker.seed) as mode, mode:
            self._clipper.check_rows(lambda: self._losses(inputs), index)
        self._has_probed = True

    def is_random(self) -> bool:
        """Return whether the result of the shortest row alone changes with other random numbers."""
        start, one, other = self._maker.seed, seed_between(0.0, 0.5), seed_between(0.5, 1.0)
        passes = [self.run(self._sample.alone, seed, start) for seed in (one, other, one)]
        first, second, again = (done.seen for done in passes)
        # If the same numbers give another result, that is state.
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
        return self.run(Company((self._sample.short,) * count, "beside its copies"), numbers=numbers)

    def reads_padding(self, first: Seen, other: Seen) -> bool | None:
        """Return whether a row alone, padded as beside the others, has the result that it has beside them.

        Args:
            first: its result alone.
            other: its result beside the others.

        Returns:
            None if that is not known: rows are packed, or other processes would have to run the same pass.
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
            seed: seed of the global generators. None: that of the rows.
            start: seed of the numbers given by `Repeatable`. None: ``seed``.
            numbers: other numbers.
            inputs: of these rows, padded in another way.
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
        """Return the pair of results of a row that differs most, of the first list with one beyond rounding."""
        counting, bound = counting_norm(self._clipper), self.bound()
        pairs = (compare(seen, counting, bound)[1] for seen in results)
        return next((pair for pair in pairs if pair is not None), None)

    def bound(self) -> Bound:
        """Return the largest differences that rounding explains in the passes so far."""
        return self._precision.bound()

    def _too_short(self, row: int, error: Exception) -> str:
        """Return the message for a row that the model accepts beside longer rows, but not alone."""
        return (
            f"A row of {int(self._rows.lengths[row])} tokens passes through the model beside longer rows but "
            f"not alone ({type(error).__name__}: {error}), so its result depends on its padding, or on random numbers "
            "for which the loss fails. A unit then cannot be bounded, and ε would not hold. Leave out rows this short, "
            "pad all rows to one length in the collator, or correct the branch of the loss"
        )

    def _losses(self, inputs: Mapping[str, Any]) -> Tensor:
        # Own memory: the model or the loss may write into its inputs, and a row passes several times.
        return self._loss_of(send(own_copy(inputs), device_of(self._clipper)))

    def _batch(self, company: Company) -> Mapping[str, Any]:
        return self._rows.collate.batch([self._maker.inputs[number] for number in company.numbers])

    @contextlib.contextmanager
    def _repeatable(self, seed: int, start: int | None = None, numbers: Numbers | None = None) -> Iterator[Repeatable]:
        """Enter a random state in which a mode holds the numbers of a pass, and return the mode."""
        as_written = _as_written(self._model)  # a compiled graph hides its random numbers
        with as_written, randomness(seed, numbers or Numbers()):
            mode = Repeatable(self._rows.packed, seed if start is None else start, numbers)
            try:
                yield mode
            finally:
                self._clipper.forget()  # also an aborted pass
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
