"""Values that the schedulers of an optimizer will give it, and the pace at which a loop steps them.

Place in the flow: below `dpllm.training.checks.steering`, which compares with an optimizer's hyperparameters at each
update. PyTorch's schedulers compute their values from the number of times they were stepped. Copies of them are
therefore taken before the first private step, when no loss of the run is known, and stepped as often as the loop steps
the originals. Their values are those that a sound loop has, to the last bit. The loop may choose by a loss when it
steps a scheduler, so the pace must be the same over all updates.

A scheduler with a function or a class of the user's own is not copied: a call more may change what it returns.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, ReduceLROnPlateau

from dpllm.engines.optimizers import innermost

MEMBERS = "params"
"""What `Foreseen.differing` calls a change of the parameters in the optimizer's groups."""
_TRUSTED = ("torch.", "transformers.")  # modules whose functions give the same at each call
_KEPT_BY_SCHEDULERS = ("params", "initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum")
_MOST_ORDERED = 3  # schedulers whose order is tried
_MOST_STEPS = 10_000  # of a scheduler between two updates
_ROUNDING, _TENSOR_ROUNDING = 1e-9, 1e-6
_NEAR_ZERO = 1e-12  # of a rate at the end of a cosine


class Pace:
    """Whether a loop steps one scheduler at a fixed pace: by the same amount, once in a fixed number of updates.

    Args:
        scheduler: one that no other scheduler steps.

    Attributes:
        scheduler: the same.
        follows_results: whether its steps take results, as those of ``ReduceLROnPlateau`` do: no pace is right then.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        """Take the present position."""
        self.scheduler = scheduler
        self.follows_results = _takes_results(scheduler)
        self._position, self._last, self._base = position(scheduler), _last_rates(scheduler), _base_rates(scheduler)
        self._gap = 0  # updates since it was stepped last
        self._gaps: list[int] = []  # before the first and the second time
        self._size: float | None = None

    def is_kept(self) -> bool:
        """Look at the scheduler at an update; return whether the pace is the one of earlier updates."""
        now, last = position(self.scheduler), _last_rates(self.scheduler)
        moved = now - self._position
        was_stepped = moved != 0 or last is not self._last
        self._position, self._last, self._gap = now, last, self._gap + 1
        if _base_rates(self.scheduler) != self._base or (was_stepped and self.follows_results):
            return False
        if _has_ended(self.scheduler, now):
            return moved >= 0
        if not was_stepped:
            return len(self._gaps) < 2 or self._gap < self._gaps[1]
        gap, self._gap = self._gap, 0
        if not self._gaps:
            self._gaps, self._size = [gap], moved or None  # a first step(0) moves nothing
            return moved >= 0
        if len(self._gaps) == 1:
            self._gaps.append(gap)
        size, self._size = self._size, self._size or moved
        # The first time may come within a period, and is seen at the next update.
        is_same = size is None or math.isclose(moved, size, rel_tol=_TENSOR_ROUNDING)
        return moved > 0 and is_same and gap == self._gaps[1] and self._gaps[0] <= gap + 1

    def is_kept_to_the_end(self) -> bool:
        """Whether a scheduler that was stepped once would have been due a second time by now."""
        return len(self._gaps) != 1 or self._gap <= self._gaps[0] or _has_ended(self.scheduler, self._position)


class Foreseen:
    """Values that the hyperparameters of an optimizer have where its schedulers alone change them.

    Args:
        optimizer: the innermost, before the first private step.
        holds_members: whether the groups must keep their parameters (DeepSpeed puts others there in each update).

    Attributes:
        paces: of the schedulers that are stepped.
    """

    def __init__(self, optimizer: Any, holds_members: bool = True) -> None:
        """Find the schedulers, and copy those that can be foreseen."""
        self._optimizer = optimizer
        self._members = _members(optimizer) if holds_members else None
        roots = _roots(optimizer)
        self.paces = [Pace(one) for one in roots]
        schedulers = [pace.scheduler for pace in self.paces if not pace.follows_results]
        self._unforeseen: list[LRScheduler] = []
        if len(schedulers) > _MOST_ORDERED or any(_is_own(part) for one in schedulers for part in _parts(one)):
            self._unforeseen, schedulers = schedulers, []
        self._schedulers = schedulers
        self._positions = [position(one) for one in schedulers]
        groups = _values(optimizer, reads_device=True)
        self._twins = [_Twin(groups, schedulers, order) for order in itertools.permutations(range(len(schedulers)))]
        self._seen, self._rates = groups, [_last_rates(one) for one in self._unforeseen]

    def differing(self, noted: Iterable[str], reads_device: bool) -> list[str]:
        """Hyperparameters that are not as foreseen.

        Args:
            noted: not looked at any more.
            reads_device: whether values on a device are read as well, which waits for it.

        Returns:
            Their names, and `MEMBERS`.
        """
        self._advance()
        now, left_out = self._now(), set(noted)
        unforeseen = self._unforeseen_names()
        found = [twin.differing(now, left_out | unforeseen, reads_device) for twin in self._twins]
        # Several schedulers: some one order explains the values of all updates.
        self._twins = [twin for twin, names in zip(self._twins, found, strict=True) if not names] or self._twins[:1]
        differing = min(found, key=len) | (self._set_by_others(now, reads_device) & unforeseen - left_out)
        if self._members is not None and self._members != _members(self._optimizer):
            differing.add(MEMBERS)
        return sorted(differing - left_out)

    def values(self) -> list[dict[str, Any]]:
        """The present hyperparameters, one dictionary per group, for `adopt`."""
        return _values(self._optimizer)

    def adopt(self, before: Sequence[dict[str, Any]]) -> None:
        """Take changes since ``before`` for the optimizer's own, which it computes from the private gradient."""
        now = self.values()
        for place, (old, new) in enumerate(zip(before, now, strict=False)):
            for name, value in new.items():
                if name not in old or not _agree(value, old[name], reads_device=False):
                    for twin in self._twins:
                        twin.groups[place][name] = _copied(value)
        self._seen = now

    def _now(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name not in _KEPT_BY_SCHEDULERS}
            for group in self._optimizer.param_groups
        ]

    def _advance(self) -> None:
        positions = [position(one) for one in self._schedulers]
        moved = [now - before for now, before in zip(positions, self._positions, strict=True)]
        if any(moved):
            for twin in self._twins:
                twin.advance(moved, positions)
        self._positions = positions

    def _unforeseen_names(self) -> set[str]:
        if not self._unforeseen:
            return set()
        return {"lr", "momentum", "betas"} if any(_cycles_momentum(one) for one in self._unforeseen) else {"lr"}

    def _set_by_others(self, now: Sequence[dict[str, Any]], reads_device: bool) -> set[str]:
        """Names of the values that none of the schedulers of the user's own has set."""
        rates = [_last_rates(one) for one in self._unforeseen]
        stepped = any(new is not old for new, old in zip(rates, self._rates, strict=True))
        seen, self._seen, self._rates = self._seen, self.values(), rates
        found: set[str] = set()
        for place, (group, before) in enumerate(zip(now, seen, strict=False)):
            same = all(
                _agree(group[name], before.get(name), reads_device) for name in self._unforeseen_names() & {*group}
            )
            if (stepped or not same) and not any(
                _has_set(s, group["lr"], place, reads_device) for s in self._unforeseen
            ):
                found |= self._unforeseen_names() & {*group}
        return found


class _Twin:
    """Copies of schedulers, on an optimizer that has hyperparameters only.

    Args:
        groups: the hyperparameters, copied.
        schedulers: to copy.
        order: in which they are stepped, where several moved between two updates.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], schedulers: list[LRScheduler], order: Sequence[int]) -> None:
        """Copy."""
        stand_in = _Hyperparameters([{name: _copied(value) for name, value in group.items()} for group in groups])
        memo: dict[int, Any] = {}
        for part in (part for one in schedulers for part in _parts(one)):
            for one in _attributes(part):
                if isinstance(one, Tensor):
                    memo[id(one)] = _copied(one)
                elif not isinstance(one, LRScheduler | int | float | str | list | tuple | dict | None):
                    memo[id(one)] = one  # functions, and whatever else people keep there, are shared
        for part in (part for one in schedulers for part in _parts(one)):
            memo[id(part.optimizer)] = stand_in
        self.groups = stand_in.param_groups
        self._schedulers, self._order = copy.deepcopy(schedulers, memo), order

    def advance(self, moved: Sequence[float], positions: Sequence[float]) -> None:
        """Step the copies as the originals were."""
        for number in self._order:
            steps = moved[number]
            if not 0 < steps <= _MOST_STEPS:
                continue
            with contextlib.suppress(ValueError):  # of a schedule that is over; the original has raised it, too
                if steps == int(steps):
                    for _ in range(int(steps)):
                        self._schedulers[number].step()
                    continue
                with warnings.catch_warnings():  # of parts of a step; the original has warned
                    warnings.simplefilter("ignore")
                    self._schedulers[number].step(positions[number])  # type: ignore[arg-type]

    def differing(self, now: Sequence[dict[str, Any]], left_out: set[str], reads_device: bool) -> set[str]:
        return {
            name
            for group, foreseen in zip(now, self.groups, strict=False)
            for name in group.keys() & foreseen.keys() - left_out
            if not _agree(group[name], foreseen[name], reads_device)
        }


class _Hyperparameters:
    """An optimizer as far as its schedulers need one."""

    _opt_called = True  # keeps PyTorch from warning that no update was made

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups
        self.defaults: dict[str, Any] = {}

    def step(self) -> None:
        """Do nothing."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # likewise


def position(scheduler: Any) -> float:
    """How far a scheduler is, in steps; parts of a step where warm restarts are given parts of an epoch."""
    if "last_epoch" not in vars(scheduler) and _inner(scheduler):  # ChainedScheduler keeps none
        return position(_inner(scheduler)[0])
    reached = getattr(scheduler, "last_epoch", 0)
    if isinstance(scheduler, CosineAnnealingWarmRestarts):
        return reached + scheduler.T_cur % 1
    return reached


def _has_ended(scheduler: Any, reached: float) -> bool:
    """Whether further steps change no value, or are refused by PyTorch."""
    ends = [getattr(scheduler, "total_iters", None), getattr(scheduler, "total_steps", None)]
    return type(scheduler).__module__.startswith(_TRUSTED) and any(
        end is not None and reached >= end - shift for end, shift in zip(ends, (0, 1), strict=True)
    )


def _roots(optimizer: Any) -> list[LRScheduler]:
    """The schedulers of an optimizer that no other one steps; they know it and are not known to it."""
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), LRScheduler) and innermost(one.__dict__.get("optimizer")) is optimizer
    ]
    inner = {id(part) for one in found for part in _parts(one) if part is not one}
    return [one for one in found if id(one) not in inner]


def _parts(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for one in _inner(scheduler):
        yield from _parts(one)


def _inner(scheduler: Any) -> Sequence[Any]:
    return getattr(scheduler, "_schedulers", ())


def _attributes(scheduler: Any) -> Iterator[Any]:
    for value in vars(scheduler).values():
        yield from value if isinstance(value, list | tuple) else (value,)


def _is_own(scheduler: Any) -> bool:
    """Whether its class or a function of it is the user's own."""
    functions = (one for one in _attributes(scheduler) if callable(one) and not isinstance(one, LRScheduler))
    return not type(scheduler).__module__.startswith(_TRUSTED) or any(not _is_trusted(one) for one in functions)


def _is_trusted(function: Any) -> bool:
    function = getattr(function, "func", function)  # of functools.partial
    return str(getattr(function, "__module__", "")).startswith(_TRUSTED)


def _takes_results(scheduler: Any) -> bool:
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    given = list(inspect.signature(type(scheduler).step).parameters.values())[1:]
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in given
    )


def _cycles_momentum(scheduler: Any) -> bool:
    return any(getattr(part, "cycle_momentum", False) for part in _parts(scheduler))


def _last_rates(scheduler: Any) -> Any:
    """The list that a scheduler makes at each step."""
    return getattr(scheduler, "_last_lr", None)


def _base_rates(scheduler: Any) -> list[Any]:
    return [one for part in _parts(scheduler) for one in getattr(part, "base_lrs", ()) if not isinstance(one, Tensor)]


def _has_set(scheduler: Any, rate: Any, place: int, reads_device: bool) -> bool:
    if not type(scheduler).__module__.startswith(_TRUSTED):
        return True  # a subclass may keep its last rates elsewhere
    rates = _last_rates(scheduler) or ()
    return place < len(rates) and _agree(rate, rates[place], reads_device)


def _members(optimizer: Any) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _values(optimizer: Any, reads_device: bool = False) -> list[dict[str, Any]]:
    return [
        {
            name: _copied(value) if reads_device or not _is_on_device(value) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.copy(value)


def _agree(now: Any, foreseen: Any, reads_device: bool) -> bool:
    """Whether two values are the same up to rounding; values on a device are read where that is allowed."""
    if isinstance(now, Tensor) or isinstance(foreseen, Tensor):
        both = [now, foreseen]
        if not reads_device and any(map(_is_on_device, both)):
            return True
        if any(not isinstance(one, Tensor | int | float) for one in both):
            return False
        here, there = (torch.as_tensor(one).detach().cpu().double() for one in both)
        return here.shape == there.shape and torch.allclose(here, there, _TENSOR_ROUNDING, 0.0, equal_nan=True)
    if isinstance(now, tuple | list) and isinstance(foreseen, tuple | list):
        return len(now) == len(foreseen) and all(
            _agree(one, other, reads_device) for one, other in zip(now, foreseen, strict=True)
        )
    if isinstance(now, float) and isinstance(foreseen, float | int):
        return now == foreseen or math.isclose(now, foreseen, rel_tol=_ROUNDING, abs_tol=_NEAR_ZERO)
    return bool(now == foreseen)
