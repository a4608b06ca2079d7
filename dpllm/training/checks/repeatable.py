"""Comparable passes: the same rows give the same numbers, independent of the other rows of the microbatch.

Dropout and other random numbers are drawn for a whole microbatch, so a row's numbers depend on its position and on the
shape of the other rows. Within `Repeatable` nothing is dropped, and every other random number depends only on its
position within its row. The model stays in training mode, so code that runs only in that mode is checked too.

Place in the flow: below `dpllm.training.checks.independence`, which compares rows alone and with other rows.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

_DROPPING: tuple[Any, ...] = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    F.multi_head_attention_forward,
)
"""Python functions with an argument ``training``."""
_DROPPING_BUILT_IN: dict[Any, tuple[str, int]] = {
    torch.dropout: ("train", 2),
    torch.dropout_: ("train", 2),
    torch.alpha_dropout: ("train", 2),
    torch.alpha_dropout_: ("train", 2),
    torch.feature_dropout: ("train", 2),
    torch.feature_dropout_: ("train", 2),
    torch.feature_alpha_dropout: ("train", 2),
    torch.native_dropout: ("train", 2),
    torch.rrelu: ("training", 3),
    torch.rrelu_: ("training", 3),
    F.scaled_dot_product_attention: ("dropout_p", 4),
}
"""Built-in functions: name and position of the argument that causes dropout when it is not 0."""
_OF_CHANNELS: tuple[Any, ...] = (
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.feature_alpha_dropout,
    torch.feature_dropout,
    torch.feature_dropout_,
    torch.feature_alpha_dropout,
)
"""Functions that draw one number for each channel: for the first two dimensions, or the first of a single example."""
_OF_ONE_EXAMPLE = {F.dropout1d: 2, F.dropout3d: 4}
"""Functions of channels, and the number of dimensions that a single example has."""
_BACKWARD: tuple[Any, ...] = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)
_IRRATIONAL = [math.sqrt(p) % 1 for p in (2, 3, 5, 7, 11, 13, 17)]
_REPEATED = (
    torch.randint_like,
    torch.randperm,
    torch.multinomial,
    torch.normal,
    torch.poisson,
    torch.binomial,
    torch._standard_gamma,
    torch._sample_dirichlet,
    Tensor.random_,
    Tensor.geometric_,
    Tensor.log_normal_,
    Tensor.cauchy_,
    Tensor.multinomial,
)
"""Functions that draw from the global generator and are not replaced."""
TORCH, NUMPY, PYTHON = "PyTorch's", "NumPy's", "Python's"
"""Names of the global generators."""
_NEAR = 0.015  # of a first number from the one that is wanted
_PACKAGES = {"torch", "dpllm"}
_COARSE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Draw:
    """A call that draws random numbers.

    Attributes:
        name: of the function.
        shape: of the numbers; of a dropout, the shape of the tensor from which numbers are dropped, or its channels.
        where: file and line of the caller.
        is_dropout: whether the numbers drop others.
    """

    name: str
    shape: tuple[int, ...]
    where: str
    is_dropout: bool = False

    @property
    def count(self) -> int:
        """How many numbers are drawn."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Numbers:
    """The random numbers of a pass, where they are not the usual ones of `Repeatable`.

    Attributes:
        changed: draws that get other numbers.
        reseeded: generators, `NUMPY` or `PYTHON`, that begin in another state.
        to: the beginning of their sequence, between 0 and 1; a single uniform number has about this value.
    """

    changed: frozenset[Draw] = frozenset()
    reseeded: frozenset[str] = frozenset()
    to: float = 0.0


class Repeatable(TorchFunctionMode):
    """Mode that disables dropout, and makes random numbers depend only on the position within a row.

    A random tensor (B, ...) is filled with a fixed irregular sequence over its dimensions after the first (for packed
    rows after the first two, since the second counts the tokens of all rows). Its numbers have the right distribution
    over these dimensions, and all rows get the same numbers. So noise whose *scale* depends on other rows is still
    found. Numbers from a generator that was seeded within the pass are not changed.

    `dpllm.training.checks.sharing` needs passes with other numbers (`Numbers`): some draws differ from those of the
    pass before and all others do not.

    Attributes:
        draws: the calls that drew random numbers, or would have without this mode, in their order.
        dtype: the coarsest floating dtype that a function returned, down to 16 bits; its rounding limits how closely
            two passes can agree.
    """

    def __init__(self, packed: bool, seed: int = 0, numbers: Numbers | None = None) -> None:
        """Start without a recorded dtype.

        Args:
            packed: whether rows are concatenated.
            seed: determines the beginning of the sequence, and so every single number: `seed_between`.
            numbers: other numbers than these. None: these.
        """
        super().__init__()
        self._packed, self._start, self._numbers = packed, _first(seed), numbers or Numbers()
        self._name = ""
        self.draws: list[Draw] = []
        self._drawn_from = torch.initial_seed()
        self.dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD:  # PyTorch disables a mode while the mode handles a function
            with self._in_modules():
                return func(*args, **kwargs)
        if (func in _DROPPING or func in _DROPPING_BUILT_IN or func in _DRAWS) and (
            torch.initial_seed() != self._drawn_from
        ):  # seeded within the pass: such numbers are public, and a dependence on a row's position must be found
            result = func(*args, **kwargs)
        elif func in _DROPPING:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            self._note_dropout(func, bound.arguments)
            result = func(**{**bound.arguments, "training": False})
        elif func in _DROPPING_BUILT_IN:
            self._note_dropout(func, _named(args, kwargs, *_DROPPING_BUILT_IN[func]))
            result = func(*_without(args, kwargs, *_DROPPING_BUILT_IN[func]), **kwargs)
        elif func in _REPEATED:
            result = self._repeated(func, args, kwargs)
        else:
            draw, self._name = _DRAWS.get(func), getattr(func, "__name__", "")
            result = func(*args, **kwargs) if draw is None else draw(self, func, args, kwargs)
        if isinstance(result, Tensor) and result.dtype in _COARSE:
            self.dtype = min(self.dtype, result.dtype, key=lambda dtype: -torch.finfo(dtype).eps)
        return result

    @contextlib.contextmanager
    def _in_modules(self) -> Iterator[None]:
        """Enable the mode again in calls of modules: activation checkpointing repeats them in a backward pass."""
        here = threading.local()  # a GPU's backward pass runs in its own thread

        def begin(module: Any, args: Any) -> None:
            here.depth = getattr(here, "depth", 0) + 1
            if here.depth == 1:
                self.__enter__()

        def end(module: Any, args: Any, output: Any) -> None:
            here.depth -= 1
            if here.depth == 0:
                self.__exit__(None, None, None)

        handles = [
            register_module_forward_pre_hook(begin),
            register_module_forward_hook(end, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_dropout(self, func: Any, arguments: dict[str, Any]) -> None:
        """Record a call that would drop numbers; ``arguments`` by name, the tensor first."""
        rate = arguments.get("p", arguments.get("dropout_p", 1.0))
        if rate and arguments.get("training", True):
            tensor = next(value for value in arguments.values() if isinstance(value, Tensor))
            shape = tuple(tensor.shape)
            if func in _OF_CHANNELS:
                shape = shape[: 1 if tensor.ndim == _OF_ONE_EXAMPLE.get(func) else 2]
            self.draws.append(Draw(func.__name__, shape, _caller(), is_dropout=True))

    def _repeated(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of a function that draws, from another random state if this draw is to be changed."""
        result = func(*args, **kwargs)
        if kwargs.get("generator") is None and isinstance(result, Tensor):
            self.draws.append(Draw(func.__name__, tuple(result.shape), _caller()))
            if self.draws[-1] in self._numbers.changed:
                with same_randomness(int(self._numbers.to * 2**32)):  # later draws keep their numbers
                    result = func(*args, **kwargs)
        return result

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers in (0, 1) of this shape, device and dtype; equal in all rows."""
        self.draws.append(Draw(self._name, tuple(like.shape), _caller()))
        rows = min(like.ndim, 2 if self._packed else 1)
        start = self._numbers.to if self.draws[-1] in self._numbers.changed else self._start
        total = torch.full((), start, dtype=torch.float64, device=like.device)
        for dimension in range(rows, like.ndim):
            steps = torch.arange(like.shape[dimension], dtype=torch.float64, device=like.device)
            steps = steps * _IRRATIONAL[(dimension - rows) % len(_IRRATIONAL)]
            total = total + steps.view(-1, *[1] * (like.ndim - dimension - 1))
        wide = (total % 1).clamp(1e-6, 1 - 1e-6).expand(like.shape)
        return wide.to(like.dtype if like.is_floating_point() else torch.float64)


def _named(args: tuple, kwargs: dict, name: str, place: int) -> dict[str, Any]:
    """Return the tensor, the rate and whether to drop, from the arguments of a built-in function."""
    found = {"input": args[0] if args else next(iter(kwargs.values()))}
    value = kwargs.get(name, args[place] if len(args) > place else 0.0)
    if name == "dropout_p":
        return {**found, "p": value}
    return {**found, "p": kwargs.get("p", args[1] if len(args) > 1 else 1.0), "training": value}


def _caller() -> str:
    """Return file and line of the innermost caller outside PyTorch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _without(args: tuple, kwargs: dict, name: str, place: int) -> tuple:
    """Return the arguments with one of them set to zero; a keyword is changed in place."""
    off: Any = 0.0 if name == "dropout_p" else False
    if name in kwargs or len(args) <= place:
        if name in kwargs:
            kwargs[name] = off
        return args
    return (*args[:place], off, *args[place + 1 :])


_Draw = Callable[[Repeatable, Any, tuple, dict], Any]


def _like(shape_from: Callable[[Repeatable, Tensor], Tensor]) -> _Draw:
    """Return a function that makes a new tensor with the shape, dtype and device of an ordinary call."""

    def draw(mode: Repeatable, func: Any, args: tuple, kwargs: dict) -> Any:
        result = func(*args, **kwargs)
        return result if kwargs.get("generator") is not None else result.copy_(shape_from(mode, result.detach()))

    return draw


def _normal(mode: Repeatable, like: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * mode.uniform(like) - 1)


def _uniform_(mode: Repeatable, func: Any, args: tuple, kwargs: dict) -> Any:
    low, high = _pair(args, kwargs, ("from", 0.0), ("to", 1.0))
    return args[0].copy_(low + (high - low) * mode.uniform(args[0]))


def _normal_(mode: Repeatable, func: Any, args: tuple, kwargs: dict) -> Any:
    mean, std = _pair(args, kwargs, ("mean", 0.0), ("std", 1.0))
    return args[0].copy_(mean + std * _normal(mode, args[0]))


def _exponential_(mode: Repeatable, func: Any, args: tuple, kwargs: dict) -> Any:
    (rate,) = _pair(args, kwargs, ("lambd", 1.0))
    return args[0].copy_(-torch.log(mode.uniform(args[0])) / rate)


def _bernoulli_(mode: Repeatable, func: Any, args: tuple, kwargs: dict) -> Any:
    (rate,) = _pair(args, kwargs, ("p", 0.5))
    return args[0].copy_(mode.uniform(args[0]) < rate)


def _bernoulli(mode: Repeatable, func: Any, args: tuple, kwargs: dict) -> Any:
    own: Tensor = args[0] if args else kwargs["input"]
    (rate,) = _pair((own, *args[1:]), kwargs, ("p", None))
    return (mode.uniform(own) < (own if rate is None else rate)).to(own.dtype)


def _randint(mode: Repeatable, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return whole numbers; ``torch.randint(high, size)`` and ``torch.randint(low, high, size)``."""
    result = func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        return result
    bounds = [one for one in args[:2] if isinstance(one, int)]
    low = kwargs.get("low", bounds[0] if len(bounds) == 2 else 0)
    high = kwargs.get("high", bounds[-1] if bounds else 1)
    uniform = mode.uniform(torch.empty(result.shape, dtype=torch.float64, device=result.device))
    return result.copy_(torch.floor(low + (high - low) * uniform).clamp(low, high - 1))


def _pair(args: tuple, kwargs: dict, *wanted: tuple[str, Any]) -> list[Any]:
    """Return the arguments after the tensor, by position or by name."""
    return [args[n] if len(args) > n else kwargs.get(name, default) for n, (name, default) in enumerate(wanted, 1)]


_DRAWS: dict[Any, _Draw] = {
    torch.rand: _like(Repeatable.uniform),
    torch.rand_like: _like(Repeatable.uniform),
    torch.randn: _like(_normal),
    torch.randn_like: _like(_normal),
    torch.randint: _randint,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.exponential_: _exponential_,
}


def not_replaced(draws: Sequence[Draw], moved: Iterable[str]) -> list[str]:
    """Return words for the random numbers of a pass that `Repeatable` leaves as they are."""
    names = {f"torch.{func.__name__}" for func in _REPEATED}
    called = {f"torch.{one.name} at {one.where}" for one in draws if f"torch.{one.name}" in names}
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

    ``torch.manual_seed`` also keeps the seed for each kind of device that may begin later, with a formatted stack
    trace: it costs milliseconds, its list grows with every call, and the seed would outlive `same_randomness`.
    """
    if not cuda_devices and torch.accelerator.is_available():
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if cuda_devices:
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def randomness(seed: int, numbers: Numbers) -> Iterator[None]:
    """Run the block as `same_randomness` does, with the generators in ``numbers.reseeded`` in another state."""
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
