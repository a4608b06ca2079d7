"""Finds code, in a model or a loss, that a recording may not see to the end.

Place in the flow: before a pass is recorded (`dpllm.ghost.replay`). A tape sees PyTorch's operations. It does not see a
number that Python takes from a tensor's memory past them: in a compiled function of `torch.jit`, through a DLPack
capsule, or from an array of NumPy over the same memory. The code of PyTorch, transformers, PEFT, Accelerate and this
package does no such thing between the inputs and the losses; of other code nobody knows. So only passes of theirs are
recorded, and code of one's own runs as without recordings.

What is read is which package a function was written in: all functions of a module's classes and of the file that
defines it, functions and hooks that were put on a module or a parameter, what a decorated function holds,
transformers' tables of attention functions, and modes that see each operation. It is no defence against code that
hides itself.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PACKAGES = frozenset(("torch", "transformers", "peft", "accelerate", "dpllm"))
"""Packages whose passes are recorded."""
_BESIDE = frozenset(("huggingface_hub", "packaging", "numpy", "safetensors", "typing_extensions"))
_AROUND = PACKAGES | _BESIDE
"""Packages whose functions may stand beside these in a file or wrap them."""
_PYTHON = sysconfig.get_path("stdlib")
_COMPILED = ("torch.jit", "torch._dynamo", "torch.fx")
_TABLES = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_OF_TORCH = frozenset(nn.Module().__dict__)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def foreign_modes() -> bool:
    """Whether a mode of unknown code sees each operation: those of a replay are others than those of a pass."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    return not all(_is_known(type(mode).__module__) for mode in modes)


def foreign(model: nn.Module | None, loss: Any = None) -> str | None:
    """Return the name of code, in a model and its loss, that is of no known package; None if there is none.

    Args:
        model: with its hooks.
        loss: a function or another callable object.
    """
    return next(_foreign([model, loss], {}), None)


def _foreign(things: Iterable[Any], seen: dict[int, Any]) -> Iterator[str]:
    for thing in things:
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing  # kept, so that no other object gets its number
        if isinstance(thing, torch.jit.ScriptFunction | torch.jit.ScriptModule):
            yield f"{getattr(thing, 'name', type(thing).__name__)} (compiled by torch.jit)"
        elif isinstance(thing, nn.Module):
            yield from _of_module(thing, seen)
        elif isinstance(thing, types.FunctionType):
            module = str(thing.__globals__.get("__name__"))  # a decorated function claims another's __module__
            if not _is_known(module, thing.__code__.co_filename):
                yield f"{module}.{thing.__code__.co_qualname}"
            yield from _foreign(_callables(_held(thing)), seen)
        elif isinstance(thing, types.MethodType):
            yield from _foreign((thing.__func__, thing.__self__), seen)
            yield from _of_class(type(thing.__self__), seen)  # whose other methods it may call
        elif isinstance(thing, functools.partial):
            yield from _foreign(_callables((thing.func, *thing.args, *thing.keywords.values())), seen)
        elif callable(thing) and not isinstance(thing, type | types.BuiltinFunctionType):
            yield from _of_class(type(thing), seen)
            yield from _foreign(_callables(getattr(thing, "__dict__", {}).values()), seen)


def _of_module(model: nn.Module, seen: dict[int, Any]) -> Iterator[str]:
    for module in model.modules():
        own = module.__dict__
        yield from _of_class(type(module), seen)
        yield from _foreign(_callables(v for name in _HOOKS for v in own[name].values()), seen)
        yield from _foreign(_callables(v for name, v in own.items() if name not in _OF_TORCH), seen)
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                if type(tensor) not in (nn.Parameter, torch.Tensor, nn.Buffer):
                    yield from _of_class(type(tensor), seen)
                yield from _foreign((tensor._backward_hooks or {}).values(), seen)
    tables = [getattr(sys.modules.get(name), table, {}) for name, table in _TABLES]
    yield from _foreign((function for table in tables for function in table.values()), seen)
    yield from _foreign((hook for name in _GLOBAL_HOOKS for hook in getattr(nn.modules.module, name).values()), seen)


def _of_class(cls: type, seen: dict[int, Any]) -> Iterator[str]:
    """Look at the functions of a class and its bases, and of the file that defines it."""
    for one in cls.__mro__:
        if id(one) in seen or one is object:
            continue
        seen[id(one)] = one
        if not _is_known(one.__module__):
            yield f"{one.__module__}.{one.__qualname__}"
        yield from _foreign(_functions(vars(one)), seen)
        if one is cls:
            yield from _foreign(_functions(getattr(sys.modules.get(one.__module__), "__dict__", {})), seen)


def _functions(names: Any) -> Iterator[Any]:
    for value in list(names.values()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(one, types.FunctionType):
                yield one


def _held(function: types.FunctionType) -> Iterator[Any]:
    """Return what a function holds besides its module: what it wraps, and its defaults."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not set yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _callables(values: Iterable[Any]) -> Iterator[Any]:
    """Return what can be called among values, and in lists, tuples and dictionaries of these."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _callables(value)
        elif isinstance(value, dict):
            yield from _callables(value.values())
        elif callable(value) and not isinstance(value, type):
            yield value


def _is_known(module: str, file: str = "<none>") -> bool:
    """Whether a module is of a known package, and not of a user's file that is named as one of Python's."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return file.startswith(("<", _PYTHON))
    return package in _AROUND and not module.startswith(_COMPILED)
