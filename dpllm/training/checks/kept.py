"""State that a loss, a collator or a data set keeps between calls: counters, running numbers, own generators.

Place in the flow: `dpllm.training.checks.independence` compares the state before and after its passes. Code that counts
its calls, or divides by a running mean of earlier losses, couples rows of different microbatches: which rows are in the
n-th microbatch depends on the units drawn. The effect may be too small, or too rare, for a comparison of values.

Plain values are read from closures, defaults, attributes, arguments of `functools.partial`, bound objects and global
variables that a function names, to a small depth; global variables of a module are followed as far as code names them.
Of the model, the values that modules of the user's own classes keep beside parameters and buffers are read, which the
watch does not compare, and what the user's own hooks on any module, and own methods of its class, reach. Objects of
libraries are left out, but for data sets and modules of PyTorch that hold others.

There are two questions. Does a row's value depend on what other rows left? The state of before they were seen is put
back for a pass (`at`): the scale of the first batch, and a maximum so far, then give other values, a cache does not.
And does it depend on the number of calls? State *moves* if the same rows, in the same order, with the same random
numbers, leave other values the second time. Moved values are set to others for a pass (`forced`), to see if they act.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import copy
import functools
import hashlib
import inspect
import io
import itertools
import math
import pickle
import queue
import random
import re
import sys
import threading
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _of_all

from dpllm.training.checks.randomness import GENERATORS, LIBRARIES, names_in

WAYS = 3
"""Ways in which moved values are set; see `forced`."""
_ROUND = math.lcm(*range(1, 21), 10**6, 2**12)  # a multiple of usual periods; exact in float64
_REPEATED = 300  # entries to which a list that grows is extended
_DEEPEST, _MOST = 8, 20_000  # depth of the search, and the most values
_ENTRIES = 16  # of the end of a long list or a large dictionary, which are searched
_NUMBERS = 1 << 16  # of a large tensor, which are compared
_COPIED = 1 << 12  # the most entries of a tensor or a container that is copied, to be put back
_MODULES = 3  # packages within each other, through which names are followed
_NEVER = {"transformers", "accelerate", "peft", "deepspeed", "tokenizers", "datasets"}  # also what is derived from them
_SKIPPED = (
    LIBRARIES
    | _NEVER
    | sys.stdlib_module_names
    | {
        *("tqdm", "wandb", "tensorboard", "mlflow", "pandas"),
        *("bitsandbytes", "torchao"),  # their layers move scales at the first call
    }
)
_SEEN = {"dpllm.training.row_losses"}  # modules of dpllm whose objects hold a user's function
_HOLDING = ("torch.utils.data.dataset", "torch.nn.modules.")  # modules of PyTorch whose objects hold a user's
_SPACES = (SimpleNamespace, argparse.Namespace, threading.local, UserDict, UserList, queue.Queue)  # they hold a user's
_BYTES = (bytearray, array.array)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, itertools.count)
_CONTAINERS = (list, dict, set, deque)
_PARTS = ("_buffers", "_parameters", "_modules")  # dictionaries of a module
_INTERNAL = frozenset(vars(nn.Module()))  # of every module
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WRITTEN = (Tensor, np.ndarray, itertools.count, *_BYTES)  # values that code changes in place
_TENSORS = (Tensor, nn.Parameter)
_RANDOM = re.compile(r"aten::(rand\w*|bernoulli_?|uniform_|normal_?|exponential_|multinomial|poisson|random_)\(")

MOVED = (
    "{who} keeps numbers that change with each call, and the values of a row follow them: {where}. Which rows are in "
    "the n-th call depends on the units that are drawn, so a unit cannot be bounded, and ε would not hold. Compute "
    "each row from that row only, or make the numbers a function of the step (count in on_step_begin of a callback)"
)
LEFT = (
    "{who} keeps what it computed from rows that it saw before, and the values of a row follow it: {where}. With the "
    "state of before those rows, a row has other values, so a unit cannot be bounded, and ε would not hold. Compute "
    "each row from that row only; give scales, bounds and statistics as constants, computed from public data"
)
MAY_ACT = (
    "{who} keeps numbers that change with each call ({where}). No effect on a row was measured. Confirm that they are "
    "for display only: a row may not depend on the rows of earlier calls, or on how many there were"
)
ITERATES = (
    "{who} holds an iterator ({where}), and how far it has come is not seen. Confirm that no value of a row follows "
    "it: which rows are in the n-th call depends on the units that are drawn"
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
        with_model: whether to search the modules of the model by themselves, where their classes are the user's own.
    """

    def __init__(self, function: Any, model: nn.Module | None = None, with_model: bool = False) -> None:
        """Search for values."""
        modules = {} if model is None else dict(model.named_modules())
        self._left_out = {id(module) for module in modules.values()}
        self.places: dict[str, Place] = {}
        self._held: list[Any] = []  # so that no other object gets the id of one
        waiting, seen = deque([("", Place(function))]), set()
        for path, place in _of_model(modules) if with_model else ():
            waiting.append((path, place))
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
        found = {path: _copied(place.value) for path, place in self.places.items()}
        self._copies = {path: value for path, value in found.items() if value is not None}

    def changed(self, before: Kept) -> list[str]:
        """Return the paths of values that were there before and are others now."""
        return [path for path, mark in self.marks.items() if before.marks.get(path, mark) != mark]

    @property
    def generators(self) -> list[str]:
        """Random generators, in words."""
        found = [(path, place.value) for path, place in self.places.items()]
        return [f"{_told(path)}: {type(one).__name__}" for path, one in found if isinstance(one, GENERATORS)]

    @property
    def iterators(self) -> list[str]:
        """Generators of Python and other iterators, whose position cannot be compared; open files are none."""
        seen = (*GENERATORS, itertools.count, io.IOBase)
        found = [(path, place.value) for path, place in self.places.items()]
        return [_told(path) for path, one in found if isinstance(one, Iterator) and not isinstance(one, seen)]

    @property
    def scripted(self) -> list[str]:
        """Functions of TorchScript that draw random numbers."""
        kinds, found = (torch.jit.ScriptFunction, torch.jit.ScriptModule), []
        for path, place in self.places.items():
            if isinstance(place.value, kinds) and id(place.value) not in self._left_out:
                graph = getattr(place.value, "inlined_graph", None)
                found += [_told(path)] if _RANDOM.search(str(graph)) else []
        return found

    def differing(self, before: Kept) -> list[str]:
        """Return the paths of values that are others now, or new."""
        paths = self.places if self._is_whole and before._is_whole else self.places.keys() & before.places.keys()
        return [path for path in paths if self._differs(path, self.places[path], before)]

    @property
    def _is_whole(self) -> bool:
        """Whether there were few enough values to search all."""
        return len(self.places) < _MOST

    def _differs(self, path: str, place: Place, before: Kept) -> bool:
        earlier = before.places.get(path)
        if earlier is None:
            return True
        if path in self.marks or path in before.marks:
            return self.marks.get(path) != before.marks.get(path)
        return earlier.value is not place.value

    @contextlib.contextmanager
    def at(self, moment: Kept) -> Iterator[None]:
        """Put back the values of a search, an earlier one or this, for the duration of the block; then those of this.

        Tensors are put back as copies, up to a size. What no holder can take back, such as an entry of a tuple or an
        attribute in a slot, stays.
        """
        try:
            self._take_away(moment)
            moment._put_back(as_copies=True)
            yield
        finally:
            self._put_back(as_copies=False)

    def undo(self, before: Kept) -> None:
        """Put back the values of an earlier search for good; containers and objects stay the same."""
        others = set(self.differing(before))
        self._take_away(before)
        before._put_back(as_copies=True, only=others)

    def _take_away(self, before: Kept) -> None:
        """Take away attributes that are new, also those that hide an attribute of the class."""
        containers = {id(place.value) for place in self.places.values()}
        for path, place in self.places.items() if self._is_whole and before._is_whole else ():
            earlier = before.places.get(path)
            if earlier is not None and earlier.holder is place.holder:
                continue
            if isinstance(place.holder, dict) and id(place.holder) not in containers:
                place.holder.pop(place.key, None)

    def _put_back(self, as_copies: bool, only: set[str] | None = None) -> None:
        """Give each place the value of this search.

        Args:
            as_copies: whether the code that runs next may write to the values.
            only: the paths. None: all.
        """
        places = {path: place for path, place in self.places.items() if only is None or path in only}
        for path, place in places.items():
            if path in self._copies and isinstance(place.value, _CONTAINERS):
                _refill(place.value, self._copies[path])
        for path, place in places.items():
            kept = self._copies.get(path, place.value)
            place.put(_copied(kept) if as_copies and isinstance(kept, _WRITTEN) else place.value)

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
        elif isinstance(one, staticmethod | classmethod | property | functools.cached_property):
            parts = ("__func__", "fget", "fset", "func")
            yield from ((f".{part}", getattr(one, part), None, None) for part in parts if hasattr(one, part))
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
    held = {}
    for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # empty
            held[name] = cell.cell_contents
            yield f".{name}", cell.cell_contents, cell, None
    values = one.__defaults__ or ()
    names = one.__code__.co_varnames[one.__code__.co_argcount - len(values) : one.__code__.co_argcount]
    yield from ((f".{name}", value, one, place) for place, (name, value) in enumerate(zip(names, values, strict=True)))
    yield from ((f".{name}", value, one.__kwdefaults__, name) for name, value in (one.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value, one.__dict__, name) for name, value in one.__dict__.items())
    names = list(dict.fromkeys(names_in(one.__code__)))
    modules = {name: value for name, value in held.items() if isinstance(value, ModuleType)}
    yield from _of_names(names, one.__globals__, modules)


def _of_names(
    names: list[str], known: dict[str, Any], held: dict[str, ModuleType]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield global variables that code names, also those of modules that it names, holds or imports as it runs."""
    imported = {name: sys.modules[name] for name in names if name not in known and name in sys.modules}
    modules = [(f".{name}", module) for name, module in {**imported, **held}.items()]
    for name in names:
        if isinstance(known.get(name), ModuleType):
            modules.append((f".{name}", known[name]))
        elif name in known:
            yield f".{name}", known[name], known, name
    for _ in range(_MODULES):
        inner = []
        for path, module in modules:
            for name in names if _is_own(module.__name__) else ():
                value = vars(module).get(name)
                if isinstance(value, ModuleType):
                    inner.append((f"{path}.{name}", value))
                elif name in vars(module):
                    yield f"{path}.{name}", value, vars(module), name
        modules = inner


def _of_model(modules: dict[str, nn.Module]) -> Iterator[tuple[str, Place]]:
    """Yield what the user's own code keeps in a model: in own modules, in hooks, and in methods put in their places."""
    kinds: set[type] = set()
    for name, module in modules.items():
        if _is_own(type(module).__module__):
            for path, value, holder, key in _of_module_of_model(module):
                yield f".{name or 'model'}{path}", Place(value, holder, key, 1)
        functions = [(part, hook) for part in _HOOKS for hook in vars(module).get(part, {}).values()]
        functions += [("forward", vars(module)["forward"])] if "forward" in vars(module) else []
        new = [kind for kind in type(module).__mro__ if kind not in kinds and not _is_own(kind.__module__)]
        functions += [(key, one) for kind in new for key, one in vars(kind).items() if inspect.isfunction(one)]
        kinds.update(new)
        for count, (part, one) in enumerate(functions):
            if not inspect.isfunction(one) or _is_own(one.__module__):
                yield f".{name or 'model'}.{part.lstrip('_')}[{count}]", Place(one, deep=1)
    everywhere = [(part, hook) for part in _HOOKS for hook in getattr(_of_all, f"_global{part}", {}).values()]
    for count, (part, one) in enumerate(everywhere):
        yield f".{part.lstrip('_')} of all modules[{count}]", Place(one, deep=1)


def _of_module_of_model(module: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield what a module keeps beside parameters, buffers and other modules, and its own methods."""
    parts = [id(vars(module).get(part)) for part in _PARTS]
    yield from (found for found in _of_object(module) if id(found[2]) not in parts)


def _of_object(one: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    own = getattr(one, "__dict__", {})
    if isinstance(one, nn.Module):
        for part in _PARTS[:1] if _is_of_library(type(one)) else _PARTS:
            yield from ((f".{name}", value, own[part], name) for name, value in own.get(part, {}).items())
        own = {name: own[name] for name in own if name not in _INTERNAL}
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
    if inspect.isclass(one) or inspect.ismodule(one):
        return False
    return isinstance(one, _SPACES) or _is_own(type(one).__module__) or type(one).__module__.startswith(_HOLDING)


def _is_of_library(kind: type) -> bool:
    """Return whether a class is derived from one that keeps much of its own, such as a model of transformers."""
    return any(base.__module__.partition(".")[0] in _NEVER for base in kind.__mro__)


def _mark(value: Any) -> Any:
    """Return something that is equal for equal values; None for other objects."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        some = value.ravel()[:: 1 + value.size // _NUMBERS]
        return value.shape, hashlib.blake2b(some.tobytes()).digest()
    if type(value) in _TENSORS and value.layout == torch.strided and value.device.type != "meta":
        flat = value.detach().resolve_conj().resolve_neg().flatten()
        flat = flat[:: 1 + flat.numel() // _NUMBERS].contiguous().cpu()
        return tuple(value.shape), hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes()).digest()
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, _BYTES):
        return type(value).__name__, hashlib.blake2b(value).digest()
    if isinstance(value, list | tuple | dict | set | deque):
        return type(value).__name__, len(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    return value.getstate() if isinstance(value, random.Random) else None


def _copied(value: Any) -> Any:
    """Return a copy of what code may change in place, a container's without its entries; None if it is too large."""
    if isinstance(value, itertools.count):
        return copy.copy(value)
    if isinstance(value, _CONTAINERS):
        return copy.copy(value) if len(value) <= _COPIED else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= _COPIED else None
    if isinstance(value, _BYTES):
        return copy.copy(value) if len(value) <= _COPIED else None
    if type(value) not in _TENSORS or value.numel() > _COPIED or value.layout != torch.strided:
        return None
    made = value.detach().clone()
    if isinstance(value, nn.Parameter):  # a trainable one is watched elsewhere, and stays the optimizer's
        return None if value.requires_grad else nn.Parameter(made, requires_grad=False)
    return made


def _refill(container: Any, entries: Any) -> None:
    """Give a container these entries."""
    if list(container) == list(entries) if isinstance(container, set) else _same_entries(container, entries):
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(entries)


def _same_entries(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    pairs = zip(one.items(), other.items(), strict=True) if isinstance(one, dict) else None
    if pairs is not None:
        return all(a is b and x is y for (a, x), (b, y) in pairs)
    return all(a is b for a, b in zip(one, other, strict=True))


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


@contextlib.contextmanager
def without_trace(*functions: Any, model: nn.Module | None = None) -> Iterator[None]:
    """Run a block that calls functions for a trial; what they keep of it is put back (`Kept`).

    The first batch that a function sees is then one of a check, which finds a scale that is taken from it.
    """
    before = [Kept(function, model) for function in functions]
    try:
        yield
    finally:
        for function, earlier in zip(functions, before, strict=True):
            Kept(function, model).undo(earlier)


def is_left(
    now: Kept, before: Kept, seeds: list[int], value: Callable[[int], Any], differ: Callable[[Any, Any], bool]
) -> bool:
    """Return whether a result differs with the state of an earlier moment; the other arguments are those of `act`.

    A result that fails, or that is not steady, shows nothing.

    Args:
        now: the values.
        before: the values of before other rows were seen.
        seeds: random states.
        value: a random state to a result.
        differ: whether two results differ.
    """
    for seed in seeds:
        found = []
        with contextlib.suppress(Exception):
            for moment in (now, before, now):
                with now.at(moment):
                    found.append(value(seed))
            usual, other, again = found
            if differ(usual, other) and not differ(usual, again):
                return True
    return False


def act(
    kept: Kept, paths: list[str], seeds: list[int], value: Callable[[int], Any], differ: Callable[[Any, Any], bool]
) -> bool:
    """Return whether forced values make a difference. A result that fails shows nothing.

    A result that is not steady shows that the values act, if it is steady while they are put back before each call.

    Args:
        kept: the values.
        paths: those that are set.
        seeds: random states.
        value: a random state to a result.
        differ: whether two results differ.
    """
    for seed in seeds:
        usual = value(seed)
        if differ(usual, value(seed)):  # a state that acts in each call, or numbers of the function's own
            with kept.at(kept):
                one = value(seed)
            with kept.at(kept):
                return not differ(one, value(seed))
        for way in range(WAYS):
            with contextlib.suppress(Exception), kept.forced(paths, way):
                if differ(usual, value(seed)):
                    return True
    return False
