"""The passes of one check of independence: rows alone and with others, through model, loss and clipper.

Place in the flow: below `dpllm.training.checks.independence`, which says which passes run and judges them. Each row is
made once (`dpllm.training.checks.row_sample`), and dpllm puts rows together, so passes differ in nothing but company.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.data.labels import IGNORE
from dpllm.data.transfer import own_copy, send
from dpllm.ghost import GhostError, UnitClipper
from dpllm.ghost.memory import is_shortage
from dpllm.training.checks.differences import Bound, Precision, Seen, compare, counting_norm
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
from dpllm.training.checks.row_sample import Company, Sample, carried_by, doubts
from dpllm.training.checks.sharing import COPIES, Pass
from dpllm.training.out_of_memory import device_of

if TYPE_CHECKING:
    from dpllm.engines.base import Engine
    from dpllm.training.rows import TrainingRows

CHANCES = 8
"""Random states of the first check: a coupling in at least one of eight microbatches is found with certainty."""


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
        is_drawn: whether rows are made with random numbers.
    """

    points: list[str] = field(default_factory=list)
    num_passes: tuple[int, int] = (0, 0)
    is_drawn: bool = False

    def count(self, rows: TrainingRows, numbers: Sequence[int]) -> None:
        """Count rows that pass through the model."""
        lengths = rows.lengths[list(numbers)]
        tokens = lengths.sum() if rows.packed else len(lengths) * lengths.max()
        self.num_passes = (self.num_passes[0] + len(lengths), self.num_passes[1] + int(tokens))


class Passes:
    """The passes of one check.

    Args:
        setup: of the check.
        found: receives the results beside the verdict.
        sample: rows of the check.

    Raises:
        IndependenceError: the collator or the data set carries something from one row to the next.
    """

    def __init__(self, setup: Setup, found: Found, sample: Sample) -> None:
        """Check how rows are made; no row passes through the model yet."""
        self._setup, self._found, self.sample = setup, found, sample
        self.draws: list[Draw] = []  # of the last pass
        self.moved: dict[str, Any] = {}  # generators that moved in it, and their states after it
        self.places: set[str] = set()  # places in the code, and generators, from which any pass drew numbers
        trained = [parameter.dtype for parameter in setup.clipper.parameters.values()]
        self._precision = Precision(weights=min(trained, key=lambda dtype: torch.finfo(dtype).eps))
        self.not_held = ""  # random numbers that differ between passes and change the result
        self.is_carried = False  # whether the first row had another result after all others
        self._has_probed = False
        self._fetched: dict[int, Any] = {}
        if (message := carried_by(setup.rows, sample)) is not None:
            raise IndependenceError(message)
        found.points += doubts(setup.rows, sample)

    def make(self, number: int) -> Any:
        """Return a row as the collator makes it now; those of all passes stay as they were made at first."""
        if number not in self._fetched:
            self._fetched[number] = self._setup.rows.fetch(np.array([number]))[0]
        with same_randomness(self._setup.seed):
            return self._setup.rows.collate.row(self._fetched[number])

    def early(self) -> list[Seen]:
        """Return the result of the shortest row before any other pass; nothing if it does not pass by itself.

        A loss that treats a row by what it has seen already, such as the longest row, does so from the first passes on.
        """
        with contextlib.suppress(Exception):  # the passes that follow say why
            return self.run(Company(self.sample.together[:1], "alone, before all other rows"))
        return []

    def room_for_copies(self) -> int:
        """Return how many copies of the shortest row are compared."""
        rows, most = self._setup.rows, self._setup.max_tokens
        short = max(1, int(rows.lengths[self.sample.together[0]]))
        return max(1, min(COPIES, rows.max_rows or COPIES, COPIES if most is None else most // short))

    def copies(self, count: int, numbers: Numbers) -> Pass:
        """Return the result of one pass over copies of the shortest row, for `Sharing`."""
        seen = self.run(Company(self.sample.together[:1] * count, "beside its copies"), numbers=numbers)
        return Pass([one.loss for one in seen], [one.norm for one in seen], self.draws, self.moved)

    def run(
        self, company: Company, seed: int | None = None, start: int | None = None, numbers: Numbers | None = None
    ) -> list[Seen]:
        """Return loss and norm of each row of one pass.

        Args:
            company: the rows.
            seed: seed of the global generators. None: the seed of the check.
            start: seed of the numbers given by `Repeatable`. None: ``seed``.
            numbers: other numbers.
        """
        seed = self._setup.seed if seed is None else seed
        inputs, index = self._batch(company), torch.arange(len(company.numbers))
        with self._repeatable(seed, start, numbers):
            try:
                loss_B = self._losses(company, inputs)
            except Exception as error:
                if isinstance(error, GhostError) or is_shortage(error):
                    raise
                if self._has_probed and len(company.numbers) == 1:
                    raise IndependenceError(self._too_short(company.numbers[0], error)) from error
                raise
            norm_B = self._setup.clipper.row_norms(loss_B, index)
            self._precision.on_gpu |= loss_B.device.type != "cpu"
            values = torch.stack([loss_B.detach().double(), norm_B.double()], 1).tolist()
        return [
            Seen(row, place, loss, norm, company, targets)
            for place, (row, (loss, norm), targets) in enumerate(
                zip(company.numbers, values, _targets(inputs, len(values)), strict=True)
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
        inputs, index = self._batch(company), torch.arange(len(company.numbers))
        with self._repeatable(self._setup.seed):
            self._setup.clipper.check_rows(lambda: self._losses(company, inputs), index)
        self._has_probed = True

    def is_random(self) -> bool:
        """Return whether the result of the shortest row alone changes with other random numbers."""
        alone, start = Company(self.sample.together[:1], "alone"), self._setup.seed
        one, other = seed_between(0.0, 0.5), seed_between(0.5, 1.0)
        first, second, again = (self.run(alone, seed, start) for seed in (one, other, one))
        apart = [self.differ(first, found) for found in (second, again)]
        # the same numbers give another result: that is state
        is_random = apart[0] and not apart[1] and not self.is_carried
        names = not_replaced(self.draws, self.moved) if is_random else []
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
            f"not alone ({type(error).__name__}: {error}), so its result depends on its padding, or on random numbers "
            "for which the loss fails. A unit then cannot be bounded, and ε would not hold. Leave out rows this short, "
            "pad all rows to one length in the collator, or correct the branch of the loss"
        )

    def _losses(self, company: Company, inputs: Mapping[str, Any]) -> Tensor:
        self._found.count(self._setup.rows, company.numbers)
        before = generator_states()
        # Own memory: the model or the loss may write into its inputs, and a row passes several times.
        loss_B = self._setup.loss_of(send(own_copy(inputs), device_of(self._setup.clipper)))
        self.moved = {name: state for name, state in generator_states().items() if state != before[name]}
        return loss_B

    def _batch(self, company: Company) -> Mapping[str, Any]:
        return self._setup.rows.collate.batch([self.sample.inputs[number] for number in company.numbers])

    @contextlib.contextmanager
    def _repeatable(self, seed: int, start: int | None = None, numbers: Numbers | None = None) -> Iterator[None]:
        start, packed = seed if start is None else start, self._setup.rows.packed
        as_written = _as_written(self._setup.model)  # a compiled graph hides its random numbers
        with as_written, randomness(seed, numbers or Numbers()), Repeatable(packed, start, numbers) as mode:
            try:
                yield
            finally:
                self._setup.clipper.forget()  # also an aborted pass
        self.draws = mode.draws
        self.places |= {*self.moved, *(f"{one.name} {one.where}" for one in mode.draws)}
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
