"""Make passes comparable: a row gets the same random numbers alone and in a batch with other rows.

Dropout and other random numbers are drawn for a whole microbatch, so a row's numbers depend on its position and on the
shape of the other rows. Within `Repeatable` nothing is dropped, and every other random number depends only on its
position within its row. The model stays in training mode, so code that runs only in that mode is checked too.

`dpllm.training.checks.independence` compares rows alone and with other rows in this mode.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TORCH, NUMPY, PYTHON = "PyTorch's", "NumPy's", "Python's"
"""Names of the global generators."""
DROPOUT = "dropout"
"""Name of the draws of dropout, which is off."""
_IRRATIONAL = [math.sqrt(p) % 1 for p in (2, 3, 5, 7, 11, 13, 17)]
_NEAR = 0.015  # largest distance of a first number from the requested one
_COARSE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_FUSED = {"dropout_p", "dropout"}  # arguments of fused attention and recurrent layers, forward and backward
_TIMES = 1024  # how often one draw is repeated for each row; after that, a loop draws until it gets suitable numbers
_MODES = ("dpllm", "torch._compile", "torch._dynamo", "torch._ops", "torch.utils._python_dispatch")


@dataclass(frozen=True)
class Draw:
    """An operation that draws random numbers.

    Attributes:
        name: name of the operation, or `DROPOUT`.
        shape: shape of the numbers.
        where: file and line of the caller.
        is_held: whether the numbers were replaced by those that a row always gets.
    """

    name: str
    shape: tuple[int, ...]
    where: str
    is_held: bool = True

    @property
    def count(self) -> int:
        """Number of drawn values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Numbers:
    """Random numbers of a pass that differ from the usual ones of `Repeatable`.

    Attributes:
        changed: draws that get different numbers.
        reseeded: generators, `NUMPY` or `PYTHON`, that begin in a different state.
        to: start of their sequence, between 0 and 1; a single uniform number has about this value.
    """

    changed: frozenset[Draw] = frozenset()
    reseeded: frozenset[str] = frozenset()
    to: float = 0.0


class Repeatable(TorchDispatchMode):
    """Mode that disables dropout, and makes random numbers depend only on the position within a row.

    It acts on PyTorch's operations, so it covers every function that draws, and activation checkpointing, which repeats
    layers in a backward pass. Dropout of `torch.nn` keeps all numbers and scales them as usual; dropout in fused
    kernels is disabled.

    Any other random tensor (B, ...) is filled with a fixed irregular sequence over its dimensions after the first (for
    packed rows after the first two, since the second counts the tokens of all rows). Its numbers have the right
    distribution over these dimensions, and all rows get the same numbers, so noise whose *scale* depends on other rows
    is still found. Numbers from a generator that was seeded within the pass are not changed. A draw that is repeated
    very often gets new numbers each time, so that rejection sampling ends.

    `dpllm.training.checks.independence` needs passes with other numbers (`Numbers`): some draws differ from those of
    the previous pass, and all others do not.

    Attributes:
        draws: the operations that drew random numbers, or would have without this mode, in order.
        acts: whether an operation had random numbers or dropout; otherwise its backward pass needs no mode.
        dtypes: dtypes of all results that are a single tensor.
    """

    supports_higher_order_operators = True  # they run unchanged

    def __init__(self, packed: bool, seed: int = 0, numbers: Numbers | None = None) -> None:
        """Start without draws.

        Args:
            packed: whether rows are concatenated.
            seed: determines the start of the sequence, and so every single number: `seed_between`.
            numbers: changed numbers. None: the usual ones.
        """
        super().__init__()
        self._packed, self._start, self._numbers = packed, _first(seed), numbers or Numbers()
        self._seeded_with = torch.initial_seed()
        self.draws: list[Draw] = []
        self.acts = False
        self._times: Counter[Draw] = Counter()
        self.dtypes: set[torch.dtype] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let attention compile itself within the mode (flex attention does)."""
        return True

    @property
    def coarsest(self) -> torch.dtype:
        """The coarsest floating dtype of a result, down to 16 bits: its rounding limits how closely passes agree."""
        return max(self.dtypes.intersection(_COARSE), key=_COARSE.index, default=torch.float64)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation without dropout, and replace random numbers by the row's own."""
        kwargs = kwargs or {}
        # Seeded within the pass: such numbers are public, and a dependence on a row's position must be found.
        if _is_plain(func) or torch.initial_seed() != self._seeded_with:
            result = func(*args, **kwargs)
        else:
            result = self._held(func, args, kwargs)
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
        return result

    def _held(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of an operation that may draw, with the numbers that a row always gets."""
        given, name = _by_name(func, args, kwargs), func.overloadpacket.__name__
        if dropout := _FUSED & given.keys():
            self.acts |= any(given[argument] for argument in dropout)
            return func(**{**given, **dict.fromkeys(dropout, 0.0)})
        result = func(*args, **kwargs)
        drawn = result[1] if name == "native_dropout" else result
        if given.get("generator") is not None or not isinstance(drawn, Tensor):
            return result
        is_dropout = name == "native_dropout" or (name in ("bernoulli", "bernoulli_") and _is_in_library())
        draw = Draw(DROPOUT if is_dropout else name, tuple(drawn.shape), _caller(), is_dropout or name in _VALUES)
        self.draws.append(draw)
        self.acts, is_changed = True, draw in self._numbers.changed
        if is_dropout:
            drawn.fill_(1)
        elif name in _VALUES:
            start = self._numbers.to if is_changed else self._start
            self._times[draw] += 1
            again = max(0, self._times[draw] - _TIMES)
            drawn.copy_(_VALUES[name](self._uniform(drawn, start + again * _IRRATIONAL[0]), given))
        elif is_changed:
            with same_randomness(int(self._numbers.to * 2**32)):  # later draws keep their numbers
                return func(*args, **kwargs)
        if name == "native_dropout" and given["train"] is not False and given["p"] < 1:
            result[0].copy_(given["input"] / (1 - given["p"]))
        return result

    def _uniform(self, like: Tensor, start: float) -> Tensor:
        """Return numbers in (0, 1) of this shape and device, equal in all rows, whose sequences begin at ``start``."""
        rows = min(like.ndim, 2 if self._packed else 1)
        total = torch.full((), start, dtype=torch.float64, device=like.device)
        for dimension in range(rows, like.ndim):
            steps = torch.arange(like.shape[dimension], dtype=torch.float64, device=like.device)
            steps = steps * _IRRATIONAL[(dimension - rows) % len(_IRRATIONAL)]
            total = total + steps.view(-1, *[1] * (like.ndim - dimension - 1))
        return (total % 1).clamp(1e-6, 1 - 1e-6).expand(like.shape)


def _normal(uniform: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)


def _whole(uniform: Tensor, given: Mapping[str, Any]) -> Tensor:
    low, high = given.get("low", given.get("from", 0)), given.get("high", given.get("to"))
    high = 2**24 if high is None else high  # random_() without bounds
    return torch.floor(low + (high - low) * uniform).clamp(low, high - 1)


_VALUES: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    **dict.fromkeys(("bernoulli", "bernoulli_"), lambda uniform, given: uniform < given.get("p", given["self"])),
    **dict.fromkeys(("rand", "rand_like"), lambda uniform, given: uniform),
    "uniform_": lambda uniform, given: given["from"] + (given["to"] - given["from"]) * uniform,
    **dict.fromkeys(("randn", "randn_like"), lambda uniform, given: _normal(uniform)),
    **dict.fromkeys(("normal", "normal_"), lambda uniform, given: given["mean"] + given["std"] * _normal(uniform)),
    "exponential_": lambda uniform, given: -torch.log(uniform) / given["lambd"],
    **dict.fromkeys(("randint", "randint_like", "random_"), _whole),
}
"""The values of an operation's draw, computed from uniform numbers and its arguments by name."""


@functools.cache
def _is_plain(func: Any) -> bool:
    """Return whether an operation neither draws nor has dropout."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.overloadpacket.__name__ == "_fused_sdp_choice":  # a kernel's choice is not replaced
        return True
    drops = any(one.name in _FUSED and str(one.type) == "float" for one in schema.arguments)
    return not drops and torch.Tag.nondeterministic_seeded not in func.tags


def _by_name(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return all arguments of an operation by name."""
    schema = func._schema.arguments
    given = {one.name: one.default_value for one in schema if one.has_default_value()}
    return {**given, **{one.name: value for one, value in zip(schema, args, strict=False)}, **kwargs}


def _caller() -> str:
    """Return file and line of the innermost caller outside PyTorch and this package."""
    frame = _frame_outside("torch", "dpllm")
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_in_library() -> bool:
    """Return whether a module or a function of `torch.nn` called the operation, whose own draws are dropout."""
    return str(_frame_outside(*_MODES).f_globals.get("__name__")).startswith("torch.nn.")


def _frame_outside(*packages: str) -> FrameType:
    """Return the innermost frame whose module is in none of these packages."""
    frame = sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_dotted(packages)):
        frame = frame.f_back
    return frame


@functools.cache
def _dotted(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{package}." for package in packages)


def not_held(draws: Sequence[Draw], moved: Iterable[str]) -> list[str]:
    """Return descriptions of the random numbers of a pass that `Repeatable` does not replace.

    Args:
        draws: draws of the pass.
        moved: names of the global generators that drew in it.
    """
    called = {f"torch.{one.name} at {one.where}" for one in draws if not one.is_held}
    return sorted(called | {f"{name} global generator" for name in moved if name != TORCH})


def seed_between(least: float, most: float) -> int:
    """Return a secret seed with which the first uniform number of each generator is in an interval.

    For Python's and numpy's generators after `same_randomness`, and for single numbers of torch within `Repeatable`.
    An effect that occurs at random in a share of all microbatches occurs with some seed of intervals of that size.

    Args:
        least: lower end, 0 or more.
        most: upper end, 1 or less; seeds are drawn until one fits, so the interval must not be tiny.

    >>> 0.25 <= random.Random(seed_between(0.25, 0.5)).random() < 0.5
    True
    """
    while True:
        seed = secrets.SystemRandom().getrandbits(32)
        if least <= _first(seed) < most and least <= np.random.RandomState(seed).random_sample() < most:
            return seed


def _first(seed: int) -> float:
    return random.Random(seed).random()


@contextlib.contextmanager
def same_randomness(seed: int) -> Iterator[None]:
    """Run the block with random states fixed by ``seed``; the previous states are restored after it.

    Covers torch on every device, numpy's and Python's global generators. The seed has no influence on the release.

    Args:
        seed: a whole number of at most 32 bits.
    """
    before = np.random.get_state(), random.getstate()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        _seed_torch(seed, devices)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(before[0])
            random.setstate(before[1])


def _seed_torch(seed: int, cuda_devices: Sequence[int]) -> None:
    """Seed PyTorch's generators of the devices that exist.

    ``torch.manual_seed`` also stores the seed for each kind of device that may be used later, with a formatted stack
    trace: this costs milliseconds, its list grows with every call, and the seed would outlive `same_randomness`.
    """
    if not cuda_devices and torch.accelerator.is_available():
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if cuda_devices:
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def randomness(seed: int, numbers: Numbers) -> Iterator[None]:
    """Run the block as `same_randomness` does, with the generators in ``numbers.reseeded`` in a different state."""
    with same_randomness(seed):
        if numbers.reseeded:
            other = seed_between(max(0.0, numbers.to - _NEAR), min(1.0, numbers.to + _NEAR))
            if NUMPY in numbers.reseeded:
                np.random.seed(other)
            if PYTHON in numbers.reseeded:
                random.seed(other)
        yield


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators by name."""
    own = np.random.get_state(legacy=False)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        TORCH: b"".join(one.numpy().tobytes() for one in (torch.get_rng_state(), *cuda)),
        NUMPY: (own["state"]["key"].tobytes(), int(own["state"]["pos"]), own["has_gauss"]),
        PYTHON: random.getstate(),
    }
