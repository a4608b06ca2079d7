"""State that a loss, a collator or a data set keeps between calls: counters, running numbers, own generators.

Place in the flow: `dpllm.training.checks.independence` compares the state before and after its passes. Code that counts
its calls, or divides by a running mean of earlier losses, couples rows of different microbatches: which rows are in the
n-th microbatch depends on the units drawn. The effect may be too small, or too rare, for a comparison of values.

Plain values are read from closures, defaults, attributes, arguments of `functools.partial`, bound objects and global
variables that a function names, to a small depth. Modules of the model and objects of libraries are left out.
State *moves* if the same rows, in the same order, with the same random numbers, leave other values the second time: a
cache does not. Moved values are then set to others for a pass (`forced`), to see whether they act.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
import pickle
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm.training.checks.randomness import GENERATORS, LIBRARIES, names_in

WAYS = 3
"""Ways in which moved values are set; see `forced`."""
_ROUND = math.lcm(*range(1, 21), 10**6, 2**12)  # a multiple of usual periods; exact in float64
_REPEATED = 300  # entries to which a list that grows is extended
_DEEPEST, _MOST = 6, 2000  # depth of the search, and the most values
_ENTRIES = 16  # of the end of a long list or a large dictionary, which are searched
_NUMBERS = 1 << 16  # of a large tensor, which are compared
_NEVER = {"transformers", "accelerate", "peft", "deepspeed", "tokenizers", "datasets"}  # also what is derived from them
_SKIPPED = LIBRARIES | _NEVER | sys.stdlib_module_names | {"tqdm", "wandb", "tensorboard", "mlflow", "pandas"}
_SEEN = {"dpllm.training.row_losses"}  # modules of dpllm whose objects hold a user's function
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, itertools.count)
_RANDOM = re.compile(r"aten::(rand\w*|bernoulli_?|uniform_|normal_?|exponential_|multinomial|poisson|random_)\(")

MOVED = (
    "{who} keeps numbers that change with each call, and the values of a row follow them: {where}. Which rows are in "
    "the n-th call depends on the units that are drawn, so a unit cannot be bounded, and ε would not hold. Compute "
    "each row from that row only, or make the numbers a function of the step (count in on_step_begin of a callback)"
)
MAY_ACT = (
    "{who} keeps numbers that change with each call ({where}). No effect on a row was measured. Confirm that they are "
    "for display only: a row may not depend on the rows of earlier calls, or on how many there were"
)
SCRIPTED = (
    "{who} draws random numbers in TorchScript ({where}), where it cannot be seen whether rows of a microbatch share "
    "them. Remove torch.jit.script from this function, or train with one row per microbatch "
    "(per_device_train_batch_size: 1)"
)


@dataclass(frozen=True)
class Place:
    """A value that a function can reach.

    Attributes:
        value: it.
        holder: dictionary, list, class, cell or function that it is in; None: it cannot be replaced.
        key: its key or position there.
        deep: the number of steps to it.
    """

    value: Any
    holder: Any = None
    key: Any = None
    deep: int = 0

    def put(self, value: Any) -> None:
        """Replace the value, if its holder allows it."""
        with contextlib.suppress(IndexError, TypeError):
            if inspect.isclass(self.holder):
                if self.holder.__dict__.get(self.key) is not value:
                    setattr(self.holder, self.key, value)
            elif inspect.isfunction(self.holder):  # the default of an argument
                values = self.holder.__defaults__ or ()
                if values[self.key] is not value:
                    self.holder.__defaults__ = (*values[: self.key], value, *values[self.key + 1 :])
            elif isinstance(self.holder, CellType):
                self.holder.cell_contents = value
            elif self.holder is not None:
                self.holder[self.key] = value


class Kept:
    """The values that a function reaches now.

    Args:
        function: the loss, the collator, or the function that reads rows.
        model: its modules are left out.
    """

    def __init__(self, function: Any, model: nn.Module | None = None) -> None:
        """Search for values."""
        self._left_out = set() if model is None else {id(module) for module in model.modules()}
        self.places: dict[str, Place] = {}
        self._held: list[Any] = []  # so that no other object gets the id of one
        waiting, seen = deque([("", Place(function))]), set()
        while waiting and len(self.places) < _MOST:
            path, place = waiting.popleft()
            one = place.value
            if (not isinstance(one, _PLAIN) and id(one) in seen) or _is_global(one):
                continue
            seen.add(id(one))
            self._held.append(one)
            self.places[path] = place
            if place.deep < _DEEPEST:
                inner = self._inside(one, is_root=not path)
                for name, value, holder, key in inner:
                    waiting.append((path + name, Place(value, holder, key, place.deep + 1)))
        self.marks = {path: mark for path, place in self.places.items() if (mark := _mark(place.value)) is not None}

    def changed(self, before: Kept) -> list[str]:
        """Return the paths of values that were there before and are others now."""
        return [path for path, mark in self.marks.items() if before.marks.get(path, mark) != mark]

    @property
    def generators(self) -> list[str]:
        """Random generators, in words."""
        found = [(path, place.value) for path, place in self.places.items()]
        return [f"{_told(path)}: {type(one).__name__}" for path, one in found if isinstance(one, GENERATORS)]

    @property
    def scripted(self) -> list[str]:
        """Functions of TorchScript that draw random numbers."""
        kinds, found = (torch.jit.ScriptFunction, torch.jit.ScriptModule), []
        for path, place in self.places.items():
            if isinstance(place.value, kinds) and id(place.value) not in self._left_out:
                graph = getattr(place.value, "inlined_graph", None)
                found += [_told(path)] if _RANDOM.search(str(graph)) else []
        return found

    @contextlib.contextmanager
    def forced(self, paths: list[str], way: int) -> Iterator[None]:
        """Set the values of some paths to others for the duration of the block; then everything is put back.

        Counters become a multiple of all usual periods, and one less; other numbers become larger, huge and 0; lists
        become long ones.
        """
        try:
            for path in paths:
                place = self.places[path]
                other = _other(place.value, way)
                if other is not None:
                    place.put(other)
            yield
        finally:
            for place in self.places.values():
                place.put(place.value)

    def words(self, paths: list[str]) -> str:
        """Return where a few values are: no value and no key of a dictionary, since both may be private."""
        return ", ".join(list(dict.fromkeys(_told(path).partition("[")[0] for path in paths))[:3])

    def _inside(self, one: Any, is_root: bool) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield name, value, holder and key of what an object holds."""
        if isinstance(one, functools.partial):
            yield from ((".func", one.func, None, None), (".args", one.args, None, None))
            yield ".keywords", one.keywords, None, None
        elif inspect.ismethod(one):
            yield from ((".function", one.__func__, None, None), (".self", one.__self__, None, None))
        elif inspect.isfunction(one):
            if is_root or _is_own(one.__module__):
                yield from _of_function(one)
        elif inspect.isclass(one):
            if _is_own(one.__module__):
                yield from _of_class(one)
        elif isinstance(one, dict):
            for key in list(one)[-_ENTRIES * 4 :]:
                yield f"[{key!r:.40}]", one[key], one, key
        elif isinstance(one, list | tuple | deque):
            for place in range(max(0, len(one) - _ENTRIES), len(one)):
                yield f"[{place - len(one)}]", one[place], None if isinstance(one, tuple) else one, place
        elif type(one).__module__.partition(".")[0] == "datasets":
            transform = ((getattr(one, "format", None) or {}).get("format_kwargs") or {}).get("transform")
            yield ".transform", transform, None, None
        elif id(one) not in self._left_out and (is_root or _is_walked(one)):
            yield from _of_object(one)


def _is_global(one: Any) -> bool:
    """Return whether this is a global generator, which each step seeds: `from random import uniform` is bound to it."""
    known = (getattr(random.random, "__self__", None), getattr(np.random.rand, "__self__", None))
    return isinstance(one, GENERATORS) and any(
        one is other for other in (*known, torch.default_generator, *torch.cuda.default_generators)
    )


def _told(path: str) -> str:
    return path.removeprefix(".self._row_loss").lstrip(".")


def _of_function(one: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # empty
            yield f".{name}", cell.cell_contents, cell, None
    values = one.__defaults__ or ()
    names = one.__code__.co_varnames[one.__code__.co_argcount - len(values) : one.__code__.co_argcount]
    yield from ((f".{name}", value, one, place) for place, (name, value) in enumerate(zip(names, values, strict=True)))
    yield from ((f".{name}", value, one.__kwdefaults__, name) for name, value in (one.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value, one.__dict__, name) for name, value in one.__dict__.items())
    for name in dict.fromkeys(names_in(one.__code__)):
        if name in one.__globals__:
            yield f".{name}", one.__globals__[name], one.__globals__, name


def _of_object(one: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    own = getattr(one, "__dict__", {})
    if isinstance(one, nn.Module):
        own = {name: own[name] for name in own if not name.startswith("_") or name == "_buffers"}
    for kind in reversed(type(one).__mro__):
        if _is_own(kind.__module__):
            yield from _of_class(kind)
    for name in (name for kind in type(one).__mro__ for name in _slots(kind) if hasattr(one, name)):
        yield f".{name}", getattr(one, name), None, None
    for name, value in list(own.items()):  # after a value of the class that has the same name
        yield f".{name}", value, one.__dict__, name


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ()) if _is_own(kind.__module__) else ()
    return (names,) if isinstance(names, str) else tuple(names)


def _of_class(kind: type) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield values of a class, and methods for the global variables that they name."""
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") or inspect.isfunction(value):
            yield f".{name}", value, None if inspect.isroutine(value) else kind, name


def _is_own(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _SKIPPED or module in _SEEN


def _is_walked(one: Any) -> bool:
    if inspect.isclass(one) or inspect.ismodule(one) or not _is_own(type(one).__module__):
        return False
    return all(kind.__module__.partition(".")[0] not in _NEVER for kind in type(one).__mro__)


def _mark(value: Any) -> Any:
    """Return something that is equal for equal values; None for other objects."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        some = value.ravel()[:: 1 + value.size // _NUMBERS]
        return value.shape, hashlib.blake2b(some.tobytes()).digest()
    if type(value) is Tensor and value.layout == torch.strided and value.device.type != "meta":
        flat = value.detach().flatten()
        flat = flat[:: 1 + flat.numel() // _NUMBERS].contiguous().cpu()
        return tuple(value.shape), hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes()).digest()
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, list | tuple | dict | set | deque):
        return type(value).__name__, len(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    return value.getstate() if isinstance(value, random.Random) else None


def _other(value: Any, way: int) -> Any:
    """Return another value of the same kind for one of the `WAYS`; None if there is none."""
    if isinstance(value, itertools.count):
        return itertools.count(_ROUND - 1 + way)
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int):
        return (_ROUND - 1, _ROUND, 0)[way]
    if isinstance(value, np.integer):
        return type(value)(min((_ROUND - 1, _ROUND, 0)[way], np.iinfo(value.dtype).max))
    if isinstance(value, float | np.floating):
        return type(value)((_ROUND - 1, _ROUND, 2 * value + 1)[way])
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return _other_tensor(torch.from_numpy(value.copy()), way).numpy()
    if isinstance(value, Tensor) and value.dtype not in (torch.bool, torch.complex64, torch.complex128):
        return _other_tensor(value.detach().clone(), way)
    return value * math.ceil(_REPEATED / len(value)) if type(value) is list and value else None


def _other_tensor(value: Tensor, way: int) -> Tensor:
    if value.is_floating_point():
        return (2 * value + 1, torch.full_like(value, min(_ROUND, torch.finfo(value.dtype).max)), 0 * value)[way]
    most = torch.iinfo(value.dtype).max
    return torch.full_like(value, min((_ROUND - 1, _ROUND, 0)[way], most))


def act(
    kept: Kept, paths: list[str], seeds: list[int], value: Callable[[int], Any], differ: Callable[[Any, Any], bool]
) -> bool:
    """Return whether forced values make a difference. A result that fails, or that is not steady, shows nothing.

    Args:
        kept: the values.
        paths: those that are set.
        seeds: random states.
        value: a random state to a result.
        differ: whether two results differ.
    """
    for seed in seeds:
        usual = value(seed)
        if differ(usual, value(seed)):
            return False
        for way in range(WAYS):
            with contextlib.suppress(Exception), kept.forced(paths, way):
                if differ(usual, value(seed)):
                    return True
    return False
