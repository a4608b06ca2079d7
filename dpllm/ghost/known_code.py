"""Finds code, in a model or a loss, that a recording may not see to the end.

Place in the flow: before a pass is recorded (`dpllm.ghost.replay`). A tape sees PyTorch's operations. It does not see a
number that Python takes from a tensor's memory past them: in a compiled function of `torch.jit`, through a DLPack
capsule, or from an array of NumPy over the same memory. The code of PyTorch, transformers, PEFT, Accelerate and this
package does no such thing between the inputs and the losses; of other code nobody knows. So only passes of theirs are
recorded, and code of one's own runs as without recordings.

What is read is which package a function was written in. Looked at are all functions of a module's classes and of the
files that define them, functions and hooks that were put on a module or a parameter, objects in its attributes, what a
decorated function holds, files and tables of PyTorch and transformers whose functions models share, and modes and hooks
that see each operation or each saved tensor. It is no defence against code that hides itself.
"""

from __future__ import annotations

import collections
import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PACKAGES = frozenset(("torch", "transformers", "peft", "accelerate", "dpllm"))
"""Packages whose passes are recorded."""
_BESIDE = frozenset(
    ("huggingface_hub", "packaging", "numpy", "pybind11_builtins", "safetensors", "tqdm", "typing_extensions")
)
_AROUND = PACKAGES | _BESIDE
"""Packages whose functions may stand beside these in a file or wrap them."""
_PYTHON = sysconfig.get_path("stdlib")
# Another file of `torch._dynamo` wraps methods of all modules once a process has compiled anything.
_COMPILED = ("torch.jit", "torch._dynamo.eval_frame", "torch.fx")
_TABLES = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
    ("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"),
)
_FILES = (
    "dpllm.models.losses",
    "torch",
    "torch.functional",
    "torch.nn.functional",
    "torch.utils.checkpoint",
    "transformers.cache_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.integrations.moe",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.pytorch_utils",
)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_OF_SAVING = frozenset(
    ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
)
"""Attributes of a module with hooks that no pass runs."""
_DATA = frozenset(
    (bool, int, float, complex, str, bytes, type(None), Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device)
)
_DICTS = (dict, collections.OrderedDict)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_REPLACED = ("transformers", "peft")
"""Packages of whose classes a file's functions use methods, which somebody may have replaced."""
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def foreign_modes() -> bool:
    """Whether a mode, or a hook on saved tensors, of unknown code is on: it sees other operations in a replay."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    saved = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return not all(_is_known(type(mode).__module__) for mode in modes) or bool(saved and any(_Search().of(saved)))


def foreign(model: nn.Module | None, loss: Any = None) -> str | None:
    """Return the name of code, in a model and its loss, that is of no known package; None if there is none.

    Args:
        model: with its hooks.
        loss: a function or another callable object.
    """
    return next(_Search().of((model, loss)), None)


class _Search:
    """Visits what some objects hold, each object once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # with the objects: another one would get the number of one that is gone
        self._left: list[Any] = []
        self._files: set[str] = set()
        self._shared = False

    def of(self, things: Iterable[Any]) -> Iterator[str]:
        """Yield the names of code of no known package."""
        self._left += things
        while self._left:
            thing = self._left.pop()
            if type(thing) not in _DATA and id(thing) not in self._seen:
                self._seen[id(thing)] = thing
                yield from self._visit(thing, type(thing))

    def _visit(self, thing: Any, kind: type) -> Iterator[str]:
        # An object is asked for its type only: it may claim another class, or raise where it is asked for more.
        if issubclass(kind, torch.jit.ScriptFunction | torch.jit.ScriptModule):
            yield f"{getattr(thing, 'name', kind.__name__)} (compiled by torch.jit)"
        elif issubclass(kind, nn.Module):
            self._module(thing)
        elif issubclass(kind, Tensor):
            self._left.append(kind)
        elif issubclass(kind, type):
            yield from self._class(thing)
        elif issubclass(kind, types.FunctionType):
            module = thing.__globals__.get("__name__")  # a decorated function claims another's __module__
            if not _is_known(module, thing.__code__.co_filename):
                yield f"{module}.{thing.__code__.co_qualname}"
            self._left += (one for one in _held(thing) if _package(module) != "torch" or not isinstance(one, type))
        elif issubclass(kind, types.BuiltinFunctionType):
            owner = thing.__self__ if isinstance(thing.__self__, type) else type(thing.__self__)
            module = thing.__module__ or owner.__module__
            if not _is_known(module):
                yield f"{module}.{thing.__qualname__}"
        elif issubclass(kind, types.MethodType):
            owner = thing.__self__
            self._left += (thing.__func__, type(owner))  # whose other methods it may call
            if callable(owner):
                self._left.append(owner)
        elif issubclass(kind, functools.partial | functools.partialmethod):
            self._left += (thing.func, *thing.args, *thing.keywords.values())
        elif issubclass(kind, dict):
            self._left += dict.values(thing)
        elif issubclass(kind, _CONTAINERS):
            self._left += kind.__iter__(thing)
        elif not issubclass(kind, types.ModuleType):
            self._left.append(kind)
            if callable(thing) or not str(kind.__module__).startswith("dpllm."):
                self._left += _own(thing).values()

    def _module(self, module: nn.Module) -> None:
        own = module.__dict__
        self._left.append(type(module))
        for name, value in own.items():
            if type(value) not in _DATA and name not in _OF_SAVING and not (type(value) in _DICTS and not value):
                self._left.append(value)
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            for name in _HOOKS_OF_TENSORS:
                if tensor is not None and (hooks := getattr(tensor, name)):
                    self._left.append(hooks)
        if not self._shared:
            self._shared = True
            self._left += (getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS)
            for name, table in _TABLES:
                self._left += getattr(sys.modules.get(name), table, {}).values()
            for name in _FILES:
                self._file(name)

    def _class(self, cls: type) -> Iterator[str]:
        """Look at the functions of a class and of the file that defines it, and at its bases."""
        if not _is_known(cls.__module__):
            yield f"{cls.__module__}.{cls.__qualname__}"
        self._left += (*_functions(vars(cls)), *cls.__mro__[1:-1])
        if issubclass(cls, nn.Module) or _package(cls.__module__) in _REPLACED:
            self._file(str(cls.__module__))

    def _file(self, name: str) -> None:
        """Look at the functions of a file, and at classes that somebody put in it."""
        if name in self._files or _package(name) not in PACKAGES:
            return
        self._files.add(name)
        for value in list(getattr(sys.modules.get(name), "__dict__", {}).values()):
            if not isinstance(value, type):
                self._left += _functions({"": value})
            elif not _is_known(value.__module__) and _may_replace(value):
                self._left.append(value)
            elif value.__module__ == name and _package(name) in _REPLACED:
                self._left += _functions(vars(value))


def _functions(names: Mapping[str, Any]) -> Iterator[Any]:
    """Return what can be called among the attributes of a class or a file, besides classes."""
    for value in list(names.values()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, functools.cached_property):
            value = value.func
        for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if (callable(one) and not isinstance(one, type)) or type(one) is functools.partialmethod:
                yield one


def _may_replace(cls: type) -> bool:
    """Whether a class is derived from one that models use."""
    known = any(_package(one.__module__) in _REPLACED for one in cls.__mro__)
    return known or issubclass(cls, nn.Module | torch.autograd.Function)


def _held(function: types.FunctionType) -> Iterator[Any]:
    """Return what a function holds besides its module: what it wraps, and its defaults."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not set yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _own(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object, also of one whose class hides them."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except Exception:  # it has none, or its class refuses
        return {}
    return found if type(found) is dict else {}


def _package(module: Any) -> str:
    return str(module).partition(".")[0]


def _is_known(module: Any, file: str = "<none>") -> bool:
    """Whether a module is of a known package, and not of a user's file that is named as one of Python's."""
    package = _package(module)
    if package in sys.stdlib_module_names or package.startswith("namedtuple_"):  # whose methods Python writes
        return file.startswith(("<", _PYTHON))
    return package in _AROUND and not str(module).startswith(_COMPILED)
