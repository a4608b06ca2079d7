"""Independence of rows, by value: a row's loss and gradient are the same alone and with other rows.

Place in the flow: before a private step, on the same engine; `dpllm.training.run` asks at steps 1, 2, 4, 8, … of a
process and at the last of the plan.
Clipping bounds a unit's contribution; this bounds the change of the sum only if no row changes the contributions of
others. A gradient shows some couplings (`dpllm.ghost.checks`), a comparison of values shows the rest: padding that the
model reads, losses divided by counts of the batch, detached statistics, collators that mix or reorder rows, scales
chosen over all rows, and state that is carried from one microbatch to the next. Couplings that occur at random, in some
microbatches only, are searched with several random states.
Random numbers that rows share leave every row's own distribution unchanged: `dpllm.training.checks.sharing`.

A microbatch of very unequal lengths is made for it. The shortest row is run alone, then beside other rows, then
beside replaced, longer rows in another order, once beside its equal; each row is a separate unit, and dropout is off
(`dpllm.training.checks.repeatable.Repeatable`). The passes are not part of the mechanism: nothing of them is kept.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.ghost import GhostClipper, GhostError
from dpllm.training.checks.between_calls import LOSS, BetweenCalls
from dpllm.training.checks.companies import SHORTEST, Company, Sample
from dpllm.training.checks.differences import Differences, Precision, Seen, compare, in_words
from dpllm.training.checks.drawn import Alone, part_of, unmeasured
from dpllm.training.checks.kept import Kept
from dpllm.training.checks.repeatable import (
    Draw,
    Numbers,
    Repeatable,
    generator_states,
    not_replaced,
    randomness,
    same_randomness,
    seed_between,
)
from dpllm.training.checks.sharing import (
    FAILS,
    FEWEST,
    PLACES,
    STATES,
    Pass,
    Sharing,
    copied,
    of_collator,
    states_for,
)
from dpllm.training.microbatches import Microbatch, RowsTaken
from dpllm.training.out_of_memory import MicrobatchTooLargeError, free_memory

if TYPE_CHECKING:
    from dpllm.engines.protocol import Engine
    from dpllm.training.rows import TrainingRows

FIRST, LATER = (4, 1 / 16, 64), (2, 1 / 64, 16)
"""Number of rows run together in the first check of a process and in later ones: the fewest, the share of a step's
rows, and the most. A run of 100 steps has eight checks (benchmarks/results.md has their cost)."""
_GATES = 8  # random states of the first check: a coupling in at least one of eight microbatches is found with certainty
_APART = 100  # the comparisons by chance are repeated after this many times their own number of rows
_BESIDE = 8  # rows of the company in which a collator that draws numbers is checked
_Result = TypeVar("_Result")


class IndependenceError(GhostError):
    """A row's loss or gradient depends on other rows, so that a unit cannot be bounded."""


class IndependenceCheck:
    """Comparison of rows alone and with others, before steps 1, 2, 4, 8, … of a process and before the last step.

    Guarantee: a check that passes leaves no gradient, no sum, no charge and no random state behind. All processes
    run the same number of passes and reach the same verdict.

    Args:
        clipper: attached to the model; it may not hold rows of a unit.
        model: the module that computes the losses.
        rows: rows of the run.
        engine: engine of the run.
        expected_batch_size: expected number of units of a step, over all processes.

    Attributes:
        last: result of the last check; None before the first.
        num_passes: (rows, tokens with padding) that went through the model for checks.
        points: facts for the open points of the report, found so far; the same on every process.
    """

    def __init__(
        self, clipper: GhostClipper, model: nn.Module, rows: TrainingRows, engine: Engine, expected_batch_size: float
    ) -> None:
        """Begin before the first step of this process."""
        self._clipper, self._model, self._rows, self._engine = clipper, model, rows, engine
        units = rows.units
        self._per_step = expected_batch_size * units.num_rows / max(1, units.num_units) / engine.processes.size
        self._steps = self._seed = 0
        self._has_failed = self._is_drawn = False
        self._compared = _Compared()
        self.last: Differences | None = None
        self.num_passes = (0, 0)
        self.points: list[str] = []

    def before_step(
        self,
        loss_of: Callable[[Mapping], Tensor],
        max_tokens: int | None,
        is_last: bool = False,
        source: Any = None,
    ) -> None:
        """Check, if a check is due before this step. Called by all processes together.

        After a failed check every step has a check as complete as the first, until one passes.

        Args:
            loss_of: a microbatch's inputs to one loss per row (B,).
            max_tokens: the most tokens of a microbatch, padding included. None: as many as ``rows.max_rows`` have.
            is_last: whether the step is the last one of the plan; then a loss function that changed is found.
            source: the function in ``loss_of`` that is searched for state between its calls. None: ``loss_of``.

        Raises:
            IndependenceError: rows are not independent; the same message on every process.
            GhostError: the losses or the model are refused by the clipper.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) and not is_last and not self._has_failed:
            return
        first, self._has_failed = self._steps == 1 or self._has_failed, True
        self._seed = seed_between(0, 1)  # different from the seed of the last check
        before = {name: parameter.grad for name, parameter in self._clipper.parameters.items()}
        try:
            self._check(loss_of, max_tokens, first, loss_of if source is None else source)
            self._has_failed = False
            told = [point for points in self._engine.processes.gather(self.points) for point in points]
            self.points = list(dict.fromkeys(told))
        finally:
            for name, parameter in self._clipper.parameters.items():
                if before[name] is None:
                    parameter.grad = None

    def _check(self, loss_of: Callable[[Mapping], Tensor], max_tokens: int | None, first: bool, source: Any) -> None:
        state = BetweenCalls(source, self._rows, self._model, with_model=not self._engine.lockstep)
        self._refuse(state.by_kind())
        (passes, worst), everywhere = self._agreed(
            lambda: self._measured(loss_of, max_tokens, first, state), lambda measured: measured[1] is not None
        )
        # From here on all processes run the same passes, even if only one of them found a difference.
        is_random = any(everywhere) and any(self._agreed(passes.is_random, bool)[1])
        if is_random or not any(everywhere):
            self._refuse_shared(passes, first or is_random)
        if is_random:
            with _evaluating(self._model):  # randomness that could not be switched off: fused attention, custom kernels
                worst, everywhere = self._agreed(lambda: self._worst(passes, first=False), bool)
        if not any(everywhere):
            self._refuse_kept(passes, state, first)
            self.points += state.points
            return
        carried, _ = self._agreed(passes.is_carried, bool)
        held = passes.not_held if is_random else ""
        self._refuse(None if worst is None else in_words(worst, passes.seen, passes.tolerance(), carried, held))

    def _refuse(self, message: str | None) -> None:
        """Raise the first message of all processes on each of them."""
        for found in self._engine.processes.gather(message):
            if found is not None:
                raise IndependenceError(found)

    def _refuse_shared(self, passes: _Passes, first: bool) -> None:
        """Check that rows share no random numbers; in later checks, if other draws are made or much time has passed."""
        is_due = self._compared.is_due(passes.numbers.places, self._steps, self._per_step) or first
        if self._rows.max_rows == 1 or not any(self._engine.processes.gather(is_due)):
            return
        self._compared.step = self._steps
        states = states_for(min(PLACES, self._rows.max_rows or PLACES), FEWEST)
        sharing = Sharing(passes.copies, passes.room_for_copies(), states, passes.tolerance, self._engine.lockstep)
        self._agreed(sharing.look, bool)
        if any(self._engine.processes.gather(bool(sharing.shared or sharing.generators))):
            self._agreed(sharing.force, bool)
        if any(self._engine.processes.gather(sharing.is_random)):
            self._agreed(sharing.compare, bool)
        self._refuse(sharing.message)

    def _refuse_kept(self, passes: _Passes, state: BetweenCalls, first: bool) -> None:
        """Check that the loss keeps nothing from call to call that a row's value follows."""
        message = None
        if any(self._engine.processes.gather(state.is_changed())):
            kept = [self._agreed(lambda: passes.kept(state), bool)[0] for _ in range(2)]
            seeds = [] if self._engine.lockstep else _seeds(_GATES if first else 2)
            message, _ = self._agreed(
                lambda: state.of_losses(kept, seeds, passes.usual, passes.singles, passes.differ), bool
            )
        self._refuse(message)

    def _measured(
        self, loss_of: Callable[[Mapping], Tensor], max_tokens: int | None, first: bool, state: BetweenCalls
    ) -> tuple[_Passes, tuple[Seen, Seen] | None]:
        """Return the passes over rows drawn for them (fewer rows if memory runs out), and `_worst` of them."""
        wanted = _rows_wanted(self._per_step, first)
        crowd = min(FIRST[2], math.ceil(self._per_step)) if first else 0
        while True:
            with same_randomness(self._seed):  # collators and fetches may draw random numbers
                sample = Sample.draw(self._rows, max_tokens, wanted, first, crowd)
                passes = _Passes(self, loss_of, sample, self._is_drawn, first, max_tokens, state)
                self._is_drawn = passes.is_drawn
            try:
                return passes, self._worst(passes, first)
            except torch.OutOfMemoryError as error:
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

    def _worst(self, passes: _Passes, first: bool) -> tuple[Seen, Seen] | None:
        """Return the two results of one row that differ most, None if none differ by more than rounding."""
        if first and len(passes.sample.probed) > 1:
            passes.probe()
        passes.seen = [one for company in passes.sample.companies(first) for one in passes.run(company)]
        self.last, worst = compare(passes.seen, self._clipper.threshold, passes.tolerance())
        for part in range(_GATES if first and len(passes.sample.together) > 1 else 0):
            seen = passes.with_seed(seed_between(part / _GATES, (part + 1) / _GATES))
            found = compare(seen, self._clipper.threshold, passes.tolerance())[1]
            if found is not None and worst is None:  # all processes run all passes
                passes.seen, worst = seen, found
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

    def count(self, numbers: Sequence[int]) -> None:
        """Count rows that pass through the model."""
        lengths = self._rows.lengths[list(numbers)]
        tokens = lengths.sum() if self._rows.packed else len(lengths) * lengths.max()
        self.num_passes = (self.num_passes[0] + len(lengths), self.num_passes[1] + int(tokens))


def _seeds(count: int) -> list[int]:
    """Return random states that differ in the first number of every generator."""
    return [seed_between(part / count, (part + 1) / count) for part in range(count)]


def _rows_wanted(per_step: float, first: bool) -> int:
    """Return the number of rows to run together: few, unless a step has many more."""
    least, share, most = FIRST if first else LATER
    return min(most, max(least, int(per_step * share)))


@dataclass
class _Compared:
    """When rows were last compared for random numbers that they share.

    Attributes:
        places: places in the code, and generators, from which numbers were drawn.
        step: the step of the last comparison; 0 before the first.
    """

    places: set[str] = field(default_factory=set)
    step: int = 0

    def is_due(self, places: set[str], step: int, rows_per_step: float) -> bool:
        """Return whether numbers are drawn in new places, or much time has passed since the last comparison."""
        new = places - self.places
        self.places |= new
        rows = (step - self.step) * rows_per_step
        return bool(new) or (bool(self.places) and rows >= _APART * FEWEST * PLACES)


@dataclass
class _Numbers:
    """The random numbers that passes drew.

    Attributes:
        draws: of the last pass.
        moved: generators that moved in it, and their states after it.
        places: places in the code, and generators, of all passes.
    """

    draws: list[Draw] = field(default_factory=list)
    moved: dict[str, Any] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)

    def note(self, draws: list[Draw]) -> None:
        """Note the draws of a pass whose moved generators are known."""
        self.draws = draws
        self.places |= {*self.moved, *(f"{one.name} {one.where}" for one in draws)}


class _Passes:
    """The passes of one check."""

    def __init__(
        self,
        check: IndependenceCheck,
        loss_of: Callable,
        sample: Sample,
        is_drawn: bool,
        first: bool,
        max_tokens: int | None,
        state: BetweenCalls,
    ) -> None:
        self._check, self._loss_of, self.sample, self._max_tokens = check, loss_of, sample, max_tokens
        self.seen: list[Seen] = []
        self.numbers, self._precision = _Numbers(), Precision()
        self.not_held = ""  # random numbers that differ between passes and change the result
        self._has_probed = False
        rows, short = check._rows, sample.together[0]
        if (message := state.of_making(sample, check._seed)) is not None:
            raise IndependenceError(message)
        some = list(dict.fromkeys([short, *sample.replaced, *sample.together]))[:SHORTEST]
        self._alone = Alone.of(rows.collate, [] if rows.packed else [sample.rows[number] for number in some])
        self.is_drawn = is_drawn or self._alone.differ()
        self._collated: dict[tuple[int, tuple[int, ...]], Microbatch] = {}  # by seed and rows
        if self.is_drawn and rows.max_rows != 1:
            self._refuse_unmeasured(short)
        if (self.is_drawn or not sample.refetched) and rows.max_rows != 1:
            self._refuse_shared_by_collator(STATES if first else FEWEST)

    def _refuse_unmeasured(self, short: int) -> None:
        """Check that a collator which draws numbers makes each row from that row only, and that it marks padding."""
        rows = self._check._rows
        message = unmeasured(rows.collate, rows.fetch, short, np.asarray(rows.units.rows), rows.lengths)
        part = self._drawn(Company((short,), ""), self._check._seed)
        if message is None and part is not None:
            sample, most = self.sample, min(_BESIDE, rows.max_rows or _BESIDE)  # replaced rows begin with a long one
            few = list(dict.fromkeys([short, *sample.replaced, *sample.together, *sample.crowd]))[:most]
            message = self._alone.changed(rows.collate, [sample.rows[number] for number in few], part.inputs)
        if message is not None:
            raise IndependenceError(message)

    def _refuse_shared_by_collator(self, states: int) -> None:
        """Check that rows share no random numbers of the collator, or of the reading of rows."""
        rows, sample = self._check._rows, self.sample
        number = max(sample.rows, key=lambda one: int(rows.lengths[one]))  # the most numbers, and no model runs

        def read(count: int) -> list[Any]:
            return list(rows.fetch(np.array([number] * count)))

        rows_of = copied(sample.rows[number]) if sample.refetched else read
        places = min(PLACES, rows.max_rows or PLACES)
        figures = None if rows.packed else self._alone.figures
        message = of_collator(rows.collate, rows_of, figures, places, states)
        if message is not None:
            raise IndependenceError(message)

    def room_for_copies(self) -> int:
        """Return how many copies of the shortest row are compared."""
        rows = self._check._rows
        short = max(1, int(rows.lengths[self.sample.together[0]]))
        return max(
            1, min(PLACES, rows.max_rows or PLACES, PLACES if self._max_tokens is None else self._max_tokens // short)
        )

    def copies(self, count: int, numbers: Numbers) -> Pass:
        """Return the result of one pass over copies of the shortest row, for `Sharing`."""
        seed = secrets.randbits(32) if numbers.is_real else None
        seen = self.run(Company(self.sample.together[:1] * count, "beside its copies"), seed, numbers=numbers)
        return Pass([one.loss for one in seen], [one.norm for one in seen], self.numbers.draws, self.numbers.moved)

    def run(
        self, company: Company, seed: int | None = None, start: int | None = None, numbers: Numbers | None = None
    ) -> list[Seen]:
        """Return loss and norm of each row of one pass.

        Args:
            company: the rows.
            seed: seed of the global generators. None: the seed of the check.
            start: seed of the numbers given by `Repeatable`. None: ``seed``.
            numbers: other numbers; the rows stay as they are.
        """
        seed = self._check._seed if seed is None else seed
        taken = self._drawn(company, seed if start is None and numbers is None else self._check._seed)
        with self._repeatable(seed, start, numbers):
            taken = taken or self._taken(company)
            try:
                loss_B = self._losses(company, taken.inputs)
            except (GhostError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if self._has_probed and len(company.numbers) == 1:
                    if self._fails_at_random(company):
                        words = FAILS.format(error=f"{type(error).__name__}: {error}")
                        raise IndependenceError(words) from error
                    raise IndependenceError(self._too_short(company.numbers[0], error)) from error
                raise
            norm_B = self._check._clipper.clip(loss_B, taken.unit_index).norms
            self._precision.on_gpu |= loss_B.is_cuda
            values = torch.stack([loss_B.detach().double(), norm_B.double()], 1).tolist()
        return [
            Seen(row, place, loss, norm, company)
            for place, (row, (loss, norm)) in enumerate(zip(company.numbers, values, strict=True))
        ]

    def with_seed(self, seed: int) -> list[Seen]:
        """Return loss and norm of the shortest row alone and beside another, with other random numbers."""
        pair = self.sample.together[:2]
        companies = (Company(pair[:1], "alone"), Company(pair, "beside another row, with other random numbers"))
        return [one for company in companies for one in self.run(company, seed)]

    def probe(self) -> None:
        """Measure that losses have no gradient in other rows; see `dpllm.ghost.GhostClipper.check_rows`."""
        company = Company(self.sample.probed, "")
        drawn = self._drawn(company, self._check._seed)
        with self._repeatable(self._check._seed):
            taken = drawn or self._taken(company)
            self._check._clipper.check_rows(lambda: self._losses(company, taken.inputs), taken.unit_index)
        self._has_probed = True

    def is_random(self) -> bool:
        """Return whether the result of the shortest row alone changes with other random numbers."""
        alone, start = Company(self.sample.together[:1], "alone"), self._check._seed
        one, other = seed_between(0.0, 0.5), seed_between(0.5, 1.0)
        first, second, again = (self.run(alone, seed, start) for seed in (one, other, one))
        apart = [self.differ(first, found) for found in (second, again)]
        is_random = apart[0] and not apart[1]  # the same numbers give another result: that is state, see `is_carried`
        names = not_replaced(self.numbers.draws, self.numbers.moved) if is_random else []
        self.not_held = ", ".join(names or ["from PyTorch's global generator"] if is_random else [])
        return is_random

    def is_carried(self) -> bool:
        """Return whether the result of the shortest row alone differs from the first pass."""
        return self.differ(self.seen[:1], self.run(replace(self.seen[0].company, words="alone, again")))

    def usual(self, seed: int) -> list[Seen]:
        """Return loss and norm of the shortest row alone and beside others."""
        companies = [Company(self.sample.together[:1], "alone")]
        companies += [Company(self.sample.together, "beside others")] * (len(self.sample.together) > 1)
        return [one for company in companies for one in self.run(company, seed)]

    @property
    def singles(self) -> list[Callable[[int], list[Seen]]]:
        """Functions from a random state to loss and norm of one row alone: of the shortest, and of a long one."""
        numbers = dict.fromkeys((self.sample.together[0], self._long))
        return [functools.partial(self.run, Company((number,), "alone")) for number in numbers]

    @property
    def _long(self) -> int:
        """A long row, which fits into a microbatch by itself."""
        return max(self.sample.before, key=lambda number: int(self._check._rows.lengths[number]))

    def kept(self, state: BetweenCalls) -> Kept:
        """Return the state of the loss after passes over rows, always the same ones."""
        for number in (*self.sample.before[:1], self.sample.together[0], *self.sample.before[1:2]):
            self.run(Company((number,), "alone"))
        for company in self.sample.companies(False):
            self.run(company)
        return state.now(LOSS)

    def differ(self, one: list[Seen], other: list[Seen]) -> bool:
        """Return whether two results of a row differ by more than rounding."""
        return compare([*one, *other], self._check._clipper.threshold, self.tolerance())[1] is not None

    def tolerance(self) -> float:
        """Return the largest difference that rounding explains in the passes so far."""
        return self._precision.tolerance()

    def _too_short(self, row: int, error: Exception) -> str:
        """Return the message for a row that the model accepts beside longer rows, but not alone."""
        return (
            f"A row of {int(self._check._rows.lengths[row])} tokens passes through the model beside longer rows but "
            f"not alone ({type(error).__name__}: {error}), so the model's result for it depends on its padding. A "
            "unit then cannot be bounded, and ε would not hold. Leave out rows this short, or pad all rows to one "
            "length in the collator"
        )

    def _fails_at_random(self, company: Company) -> bool:
        """Return whether a row that the model did not accept alone is accepted alone with other random numbers."""
        taken = self._drawn(company, self._check._seed) or self._taken(company)
        for part in range(0 if self._check._engine.lockstep else _GATES):
            seed = seed_between(part / _GATES, (part + 1) / _GATES)
            try:
                with same_randomness(seed), Repeatable(self._check._rows.packed, seed):
                    self._losses(company, taken.inputs)
            except Exception:
                continue
            finally:
                self._check._clipper.forget()
            return True
        return False

    def _losses(self, company: Company, inputs: Mapping[str, Any]) -> Tensor:
        self._check.count(company.numbers)
        before = generator_states()
        loss_B = self._loss_of(inputs)
        self.numbers.moved = {name: state for name, state in generator_states().items() if state != before[name]}
        return loss_B

    def _taken(self, company: Company) -> Any:
        rows = self._check._rows
        own = self.sample.fetched(company.numbers, rows.fetch)
        taken = RowsTaken(own, rows.lengths[list(company.numbers)], rows.collate)
        return taken.microbatch(np.arange(len(own)), len(own))

    def _drawn(self, company: Company, seed: int) -> Microbatch | None:
        """Return rows out of the batch of all rows if the collator draws random numbers; None if it does not."""
        if not self.is_drawn:
            return None
        sample = self.sample  # a collator of single rows is never given two
        together = () if self._check._rows.max_rows == 1 else (*sample.together, *sample.replaced, *sample.crowd)
        every = tuple(dict.fromkeys([*together, *company.numbers]))
        if all(used != seed for used, _ in self._collated):
            self._collated.clear()
        if (seed, every) not in self._collated:
            with same_randomness(seed):
                self._collated[seed, every] = self._taken(Company(every, "all rows"))
        places = [every.index(number) for number in company.numbers]
        inputs = part_of(self._collated[seed, every].inputs, places, self._alone.labels_apart())
        return Microbatch(inputs, torch.arange(len(company.numbers)), len(company.numbers))

    @contextlib.contextmanager
    def _repeatable(self, seed: int, start: int | None = None, numbers: Numbers | None = None) -> Iterator[None]:
        start, packed = seed if start is None else start, self._check._rows.packed
        with randomness(seed, numbers or Numbers()), Repeatable(packed, start, numbers) as mode:
            try:
                yield
            finally:
                self._check._clipper.forget()  # also an aborted pass
        self.numbers.note(mode.draws)
        self._precision.dtype = max(self._precision.dtype, mode.dtype, key=lambda dtype: torch.finfo(dtype).eps)


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
