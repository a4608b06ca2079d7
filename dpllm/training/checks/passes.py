"""The passes of one check of independence: rows alone and with others, through collator, model and clipper.

Place in the flow: below `dpllm.training.checks.independence`, which says which passes run and judges them. The collator
and the reading of rows are checked first, because they are taken for functions of single rows afterwards.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.data.labels import IGNORE
from dpllm.data.transfer import send
from dpllm.ghost import GhostError, UnitClipper
from dpllm.ghost.memory import is_shortage
from dpllm.training.checks.carried import carried_by, doubts
from dpllm.training.checks.companies import SHORTEST, Company, Sample
from dpllm.training.checks.differences import Bound, Precision, Seen, compare, counting_norm
from dpllm.training.checks.drawn import Alone, part_of, unmeasured
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
from dpllm.training.checks.sharing import FAILS, FEWEST, PLACES, STATES, Pass, copied, of_collator
from dpllm.training.microbatches import Microbatch, RowsTaken
from dpllm.training.out_of_memory import device_of

if TYPE_CHECKING:
    from dpllm.engines.base import Engine
    from dpllm.training.rows import TrainingRows

CHANCES = 8
"""Random states of the first check: a coupling in at least one of eight microbatches is found with certainty."""
_BESIDE = 8  # rows of the company in which a collator that draws numbers is checked


class IndependenceError(GhostError):
    """A row's loss or gradient depends on other rows, so that a unit cannot be bounded.

    Attributes:
        finding: what was found, without a private value: an open point of the report names it.
    """

    def __init__(self, message: str, finding: str = "rows of a microbatch were not independent of each other") -> None:
        """Store the finding; the message may hold losses of single rows."""
        super().__init__(message)
        self.finding = finding


@dataclass(frozen=True)
class Setup:
    """The model, the rows and the settings of one check.

    Attributes:
        clipper: attached to the model; it may not hold rows of a unit.
        model: the module that computes the losses.
        rows: rows of the run.
        engine: engine of the run.
        loss_of: a microbatch's inputs to one loss per row (B,).
        max_tokens: the most tokens of a microbatch, padding included. None: as many as ``rows.max_rows`` have.
        seed: of the check, different from that of the last one.
    """

    clipper: UnitClipper
    model: nn.Module
    rows: TrainingRows
    engine: Engine
    loss_of: Callable[[Mapping], Tensor]
    max_tokens: int | None
    seed: int


@dataclass
class Found:
    """Results of the checks of a process, beside their verdicts.

    Attributes:
        points: facts for the open points of the report; the same on every process after a check.
        num_passes: (rows, tokens with padding) that went through the model for checks.
        is_drawn: whether the collator draws random numbers.
        is_reread: whether rows differ when they are read again.
    """

    points: list[str] = field(default_factory=list)
    num_passes: tuple[int, int] = (0, 0)
    is_drawn: bool = False
    is_reread: bool = False

    def count(self, rows: TrainingRows, numbers: Sequence[int]) -> None:
        """Count rows that pass through the model."""
        lengths = rows.lengths[list(numbers)]
        tokens = lengths.sum() if rows.packed else len(lengths) * lengths.max()
        self.num_passes = (self.num_passes[0] + len(lengths), self.num_passes[1] + int(tokens))


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


class Passes:
    """The passes of one check."""

    def __init__(self, setup: Setup, found: Found, sample: Sample, first: bool) -> None:
        """Check the collator and the reading of the rows; no row passes through the model yet.

        Args:
            setup: of the check.
            found: receives the results beside the verdict.
            sample: rows of the check.
            first: whether the check is as complete as the first one of a process.

        Raises:
            IndependenceError: the collator or the reading of rows couples them.
        """
        self._setup, self._found, self.sample = setup, found, sample
        self.seen: list[Seen] = []
        self.numbers = _Numbers()
        trained = [parameter.dtype for parameter in setup.clipper.parameters.values()]
        self._precision = Precision(weights=min(trained, key=lambda dtype: torch.finfo(dtype).eps))
        self.not_held = ""  # random numbers that differ between passes and change the result
        self.is_carried = False  # whether the first row had another result after all others
        self._has_probed = False
        self._collated: dict[tuple[int, tuple[int, ...]], Microbatch] = {}  # by seed and rows
        rows, short = setup.rows, sample.together[0]
        early = self._early() if first and not found.is_drawn and not setup.engine.lockstep else []
        if (message := carried_by(rows, sample)) is not None:
            raise IndependenceError(message)
        found.points += doubts(rows, sample)
        some = list(dict.fromkeys([short, *sample.replaced, *sample.together]))[:SHORTEST]
        self._alone = Alone.of(rows.collate, [] if rows.packed else [sample.rows[number] for number in some])
        found.is_drawn = found.is_drawn or self._alone.differ()
        found.is_reread = found.is_reread or not sample.refetched
        self.early = [] if found.is_drawn else early
        if found.is_drawn and rows.max_rows != 1:
            self._refuse_unmeasured(short)
        if (found.is_drawn or not sample.refetched) and rows.max_rows != 1:
            self._refuse_shared_by_collator(STATES if first else FEWEST)

    def _early(self) -> list[Seen]:
        """Return the result of a row that nothing has seen in this check, before any other pass.

        A loss or a collator that treats a row by what it has seen already (rows that it knows, the largest loss, the
        longest row) does so from the first passes on, and the same in all later ones. One of the shortest rows: after
        the longest, what follows the longest row so far would not change any more. Nothing, if the row does not pass
        by itself: the passes that follow say why.
        """
        rows, sample = self._setup.rows, self.sample
        lengths = [int(rows.lengths[number]) for number in sample.rows]
        numbers = np.setdiff1d(np.asarray(rows.units.rows), np.array(list(sample.rows)))
        least = int(rows.lengths[numbers].min(initial=max(lengths)))
        numbers = numbers[rows.lengths[numbers] == least]
        if not len(numbers) or least == max(lengths) > min(lengths):
            return []
        number = int(secrets.SystemRandom().choice(numbers.tolist()))
        try:
            if not sample.refetched:
                row = rows.fetch(np.array([number]))[0]
                self.sample = dataclasses.replace(sample, rows={**sample.rows, number: row})
            return self.run(Company((number,), "alone, before all other rows"))
        except Exception:
            return []

    def _refuse_unmeasured(self, short: int) -> None:
        """Check that a collator which draws numbers makes each row from that row only, and that it marks padding."""
        rows = self._setup.rows
        message = unmeasured(rows.collate, rows.fetch, short, np.asarray(rows.units.rows), rows.lengths)
        part = self._drawn(Company((short,), ""), self._setup.seed)
        if message is None and part is not None:
            sample, most = self.sample, min(_BESIDE, rows.max_rows or _BESIDE)  # replaced rows begin with a long one
            few = list(dict.fromkeys([short, *sample.replaced, *sample.together, *sample.crowd]))[:most]
            message = self._alone.changed(rows.collate, [sample.rows[number] for number in few], part.inputs)
        if message is not None:
            raise IndependenceError(message)

    def _refuse_shared_by_collator(self, states: int) -> None:
        """Check that rows share no random numbers of the collator, or of the reading of rows."""
        rows, sample = self._setup.rows, self.sample
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
        rows = self._setup.rows
        short = max(1, int(rows.lengths[self.sample.together[0]]))
        return max(
            1,
            min(
                PLACES,
                rows.max_rows or PLACES,
                PLACES if self._setup.max_tokens is None else self._setup.max_tokens // short,
            ),
        )

    def copies(self, count: int, numbers: Numbers) -> Pass:
        """Return the result of one pass over copies of the shortest row, for `Sharing`."""
        seed = secrets.SystemRandom().getrandbits(32) if numbers.is_real else None
        seen = self.run(Company(self.sample.together[:1] * count, "beside its copies"), seed, numbers=numbers)
        return Pass([one.loss for one in seen], [one.norm for one in seen], self.numbers.draws, self.numbers.moved)

    def run(
        self,
        company: Company,
        seed: int | None = None,
        start: int | None = None,
        numbers: Numbers | None = None,
        between: Company | None = None,
    ) -> list[Seen]:
        """Return loss and norm of each row of one pass.

        Args:
            company: the rows.
            seed: seed of the global generators. None: the seed of the check.
            start: seed of the numbers given by `Repeatable`. None: ``seed``.
            numbers: other numbers; the rows stay as they are.
            between: rows that are collated after these and before the pass, as a step does that fetches ahead: a loss
                that reads what the collator has stored reads theirs.
        """
        seed = self._setup.seed if seed is None else seed
        taken = self._drawn(company, seed if start is None and numbers is None else self._setup.seed)
        with self._repeatable(seed, start, numbers):
            taken = taken or self._taken(company)
            if between is not None:
                self._taken(between)
            try:
                loss_B = self._losses(company, taken.inputs)
            except Exception as error:
                if isinstance(error, GhostError) or is_shortage(error):
                    raise
                if self._has_probed and len(company.numbers) == 1:
                    if self._fails_at_random(company):
                        words = FAILS.format(error=f"{type(error).__name__}: {error}")
                        raise IndependenceError(words) from error
                    raise IndependenceError(self._too_short(company.numbers[0], error)) from error
                raise
            norm_B = self._setup.clipper.row_norms(loss_B, taken.unit_index)
            self._precision.on_gpu |= loss_B.device.type != "cpu"
            values = torch.stack([loss_B.detach().double(), norm_B.double()], 1).tolist()
        return [
            Seen(row, place, loss, norm, company, targets)
            for place, (row, (loss, norm), targets) in enumerate(
                zip(company.numbers, values, _targets(taken.inputs, len(values)), strict=True)
            )
        ]

    def with_seed(self, seed: int) -> list[Seen]:
        """Return loss and norm of the shortest row alone and beside another, with other random numbers."""
        pair = self.sample.together[:2]
        companies = (Company(pair[:1], "alone"), Company(pair, "beside another row, with other random numbers"))
        return [one for company in companies for one in self.run(company, seed)]

    def probe(self) -> None:
        """Measure that losses have no gradient in other rows; see `dpllm.ghost.UnitClipper.check_rows`."""
        company = Company(self.sample.probed, "")
        drawn = self._drawn(company, self._setup.seed)
        with self._repeatable(self._setup.seed):
            taken = drawn or self._taken(company)
            self._setup.clipper.check_rows(lambda: self._losses(company, taken.inputs), taken.unit_index)
        self._has_probed = True

    def is_random(self) -> bool:
        """Return whether the result of the shortest row alone changes with other random numbers."""
        alone, start = Company(self.sample.together[:1], "alone"), self._setup.seed
        one, other = seed_between(0.0, 0.5), seed_between(0.5, 1.0)
        first, second, again = (self.run(alone, seed, start) for seed in (one, other, one))
        apart = [self.differ(first, found) for found in (second, again)]
        # the same numbers give another result: that is state
        is_random = apart[0] and not apart[1] and not self.is_carried
        names = not_replaced(self.numbers.draws, self.numbers.moved) if is_random else []
        self.not_held = ", ".join(names or ["from PyTorch's global generator"] if is_random else [])
        return is_random

    def differ(self, one: list[Seen], other: list[Seen]) -> bool:
        """Return whether two results of a row differ by more than rounding."""
        return compare([*one, *other], counting_norm(self._setup.clipper), self.bound())[1] is not None

    def bound(self) -> Bound:
        """Return the largest differences that rounding explains in the passes so far."""
        return self._precision.bound()

    def tolerance(self) -> float:
        """Return the largest relative difference of a row with many targets."""
        return self.bound().relative

    def _too_short(self, row: int, error: Exception) -> str:
        """Return the message for a row that the model accepts beside longer rows, but not alone."""
        return (
            f"A row of {int(self._setup.rows.lengths[row])} tokens passes through the model beside longer rows but "
            f"not alone ({type(error).__name__}: {error}), so the model's result for it depends on its padding. A "
            "unit then cannot be bounded, and ε would not hold. Leave out rows this short, or pad all rows to one "
            "length in the collator"
        )

    def _fails_at_random(self, company: Company) -> bool:
        """Return whether a row that the model did not accept alone is accepted alone with other random numbers."""
        taken = self._drawn(company, self._setup.seed) or self._taken(company)
        for part in range(0 if self._setup.engine.lockstep else CHANCES):
            seed = seed_between(part / CHANCES, (part + 1) / CHANCES)
            try:
                with same_randomness(seed), Repeatable(self._setup.rows.packed, seed):
                    self._losses(company, taken.inputs)
            except Exception:
                continue
            finally:
                self._setup.clipper.forget()
            return True
        return False

    def _losses(self, company: Company, inputs: Mapping[str, Any]) -> Tensor:
        self._found.count(self._setup.rows, company.numbers)
        before = generator_states()
        loss_B = self._setup.loss_of(send(inputs, device_of(self._setup.clipper)))
        self.numbers.moved = {name: state for name, state in generator_states().items() if state != before[name]}
        return loss_B

    def _taken(self, company: Company) -> Any:
        rows = self._setup.rows
        own = self.sample.fetched(company.numbers, rows.fetch)
        taken = RowsTaken(own, rows.lengths[list(company.numbers)], rows.collate)
        return taken.microbatch(np.arange(len(own)), len(own))

    def _drawn(self, company: Company, seed: int) -> Microbatch | None:
        """Return rows out of the batch of all rows if the collator draws random numbers; None if it does not."""
        if not self._found.is_drawn:
            return None
        sample = self.sample  # a collator of single rows is never given two
        together = () if self._setup.rows.max_rows == 1 else (*sample.together, *sample.replaced, *sample.crowd)
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
        start, packed = seed if start is None else start, self._setup.rows.packed
        as_written = _as_written(self._setup.model)  # a compiled graph hides its random numbers
        with as_written, randomness(seed, numbers or Numbers()), Repeatable(packed, start, numbers) as mode:
            try:
                yield
            finally:
                self._setup.clipper.forget()  # also an aborted pass
        self.numbers.note(mode.draws)
        self._precision.dtype = max(self._precision.dtype, mode.dtype, key=lambda dtype: torch.finfo(dtype).eps)


def _targets(inputs: Mapping[str, Any], count: int) -> list[int]:
    """Return the number of targets of each row, 0 where labels (B, T) do not show it."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or len(labels) != count or labels.is_floating_point():
        return [0] * count
    return (labels != IGNORE).sum(1).tolist()


def _as_written(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which compiled parts of a model run without their compiled graphs."""
    compiled = any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
