"""What a loss, a collator or a data set takes from one call to the next: the comparisons of one check.

Place in the flow: below `dpllm.training.checks.independence`, which makes the passes. `dpllm.training.checks.kept`
finds the state, and `dpllm.training.checks.carried` compares a row after two others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dpllm.training.checks.carried import CARRIED, GATES, REREAD, UNSTEADY, after_others, is_steady
from dpllm.training.checks.companies import Sample
from dpllm.training.checks.drawn import part_of
from dpllm.training.checks.kept import ITERATES, LEFT, MAY_ACT, MOVED, SCRIPTED, Kept, act, is_left
from dpllm.training.checks.randomness import own_generator
from dpllm.training.checks.repeatable import same_randomness, seed_between
from dpllm.training.checks.sharing import same_values

if TYPE_CHECKING:
    from dpllm.training.rows import TrainingRows

LOSS, COLLATOR, DATA_SET = "The loss", "The collator", "The data set"


class BetweenCalls:
    """The state of loss, collator and data set, and how it was before a check.

    Every method returns the message of a refusal, or None, on this process only.

    Args:
        loss: the loss function.
        rows: rows of the run.
        model: the module that computes the losses.
        with_model: whether to look at what its modules keep, too; an engine that shards keeps counters there.

    Attributes:
        points: facts for the open points of the report.
    """

    def __init__(self, loss: Any, rows: TrainingRows, model: nn.Module, with_model: bool) -> None:
        """Look at the state before rows are seen."""
        self._rows, self._model, self._with_model = rows, model, with_model
        self._sources = {LOSS: loss, COLLATOR: rows.collate, DATA_SET: rows.fetch}
        self._before = {who: self.now(who) for who in self._sources}
        self.points: list[str] = []

    def now(self, who: str) -> Kept:
        """Return the present state."""
        return Kept(self._sources[who], self._model, self._with_model and who == LOSS)

    def by_kind(self) -> str | None:
        """Refuse own generators, and random numbers in TorchScript that rows may share; iterators are open points."""
        for who, kept in self._before.items():
            if kept.generators:
                return str(own_generator(who, ", ".join(kept.generators)))
            if kept.iterators:
                self.points.append(ITERATES.format(who=who, where=kept.words(kept.iterators)))
        scripted = self._before[LOSS].scripted
        if scripted and self._rows.max_rows != 1:
            return SCRIPTED.format(who=LOSS, where=", ".join(scripted))
        return None

    def is_changed(self) -> bool:
        """Whether passes have changed the state of the loss."""
        return bool(self.now(LOSS).differing(self._before[LOSS]))

    # ------------------------------------------------------- reading and collating

    def of_making(self, sample: Sample, seed: int) -> str | None:
        """Refuse a reading or collating of rows that takes something from one call to the next.

        Args:
            sample: rows of the check.
            seed: random state of the check.
        """
        rows = self._rows
        long = max(sample.rows, key=lambda one: int(rows.lengths[one]))

        def read(number: int) -> Any:
            return rows.fetch(np.array([number]))[0]

        def collated(number: int) -> Any:
            return rows.collate([copy.deepcopy(sample.rows[number])])

        for who, done, make in ((DATA_SET, "read", read), (COLLATOR, "collated", collated)):
            gates = 1 if make is read and sample.refetched else GATES
            now, message = self._moved_by_making(who, make, sample, seed)
            if message is not None:
                return message
            for row in dict.fromkeys((sample.together[0], long)):  # text may be left over of long rows only
                others = [*(number for number in sample.before if number != row), row]
                if len(others) > 1 and after_others(make, row, others, gates):
                    return CARRIED.format(who=who, done=done)
            if message := self._left_by_making(who, make, sample, now):
                return message
            if make is collated and rows.max_rows == 1 and not is_steady(make, sample.together[0]):
                self.points.append(UNSTEADY)
        if not sample.refetched:
            self.points.append(REREAD)
        return None

    def _moved_by_making(
        self, who: str, make: Callable[[int], Any], sample: Sample, seed: int
    ) -> tuple[Kept, str | None]:
        """Return the state after rows were made, and the message where its moving numbers act."""
        together, found = self._together(who, sample), []
        for _ in range(3):  # caches are filled by the first
            with same_randomness(seed):
                for number in (*sample.before, *sample.together[:1]):
                    make(number)
                together()
            found.append(self.now(who))
        before, now = found[1:]

        def value(state: int) -> Any:
            with same_randomness(state):
                return make(sample.together[0]), together()

        if moved := now.changed(before):
            words = {"who": who, "where": now.words(moved)}
            if act(now, moved, _seeds(GATES), value, _differ):
                return now, MOVED.format(**words)
            self.points.append(MAY_ACT.format(**words))
        return now, None

    def _left_by_making(self, who: str, make: Callable[[int], Any], sample: Sample, now: Kept) -> str | None:
        """Refuse what is kept of rows that were seen in this check, if other rows follow it."""
        before = self._before[who]
        few = dict.fromkeys((sample.together[0], max(sample.before, key=lambda one: int(self._rows.lengths[one]))))

        def value(number: int, state: int) -> Any:
            with same_randomness(state):
                made = make(number)
            return made if who == DATA_SET or self._rows.packed else part_of(made, [0])

        left = now.differing(before)
        for number in few if left else ():
            if is_left(now, before, _seeds(2), functools.partial(value, number), _differ):
                return LEFT.format(who=who, where=now.words(left))
        return None

    def _together(self, who: str, sample: Sample) -> Callable[[], Any]:
        """Return the reading or collating of several rows; of none where microbatches have one row."""
        numbers = sample.together if self._rows.max_rows != 1 else ()
        if len(numbers) < 2:
            return lambda: None
        if who == DATA_SET:
            return lambda: list(self._rows.fetch(np.array(numbers)))
        return lambda: self._rows.collate([copy.deepcopy(sample.rows[number]) for number in numbers])

    # ------------------------------------------------------------------ the loss

    def of_losses(
        self,
        kept: Sequence[Kept],
        seeds: Sequence[int],
        value: Callable[[int], Any],
        singles: Sequence[Callable[[int], Any]],
        differ: Callable[[Any, Any], bool],
    ) -> str | None:
        """Refuse a loss whose values follow what it keeps.

        Args:
            kept: the state after the same passes, and after them again.
            seeds: random states; none if processes run in lockstep.
            value: a random state to the results of passes.
            singles: a random state to the result of a pass of one row, for a few rows.
            differ: whether two results differ.
        """
        one, two = kept
        before = self._before[LOSS]
        if moved := two.changed(one):
            words = {"who": LOSS, "where": two.words(moved)}
            if act(two, moved, list(seeds), value, differ):
                return MOVED.format(**words)
            self.points.append(MAY_ACT.format(**words))
        left = two.differing(before)
        if left and any(is_left(two, before, list(seeds[:2]), single, differ) for single in singles):
            return LEFT.format(who=LOSS, where=two.words(left))
        return None


def _differ(one: Any, other: Any) -> bool:
    return not same_values(one, other)


def _seeds(count: int) -> list[int]:
    """Return random states that differ in the first number of every generator."""
    return [seed_between(part / count, (part + 1) / count) for part in range(count)]
