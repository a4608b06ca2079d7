"""Sees every function in which a trainable parameter is used outside the modules that have a rule.

A hook on a module cannot see ``F.linear(x, other.weight)`` or ``x * self.gate``: the gradient of that use would
silently be missing from norm and sum. While the model runs, this mode sees the functions that PyTorch is called with,
and which of their inputs are parameters or values computed from them. `dpllm.ghost.functional` serves these uses. An
operation that is no such function (a kernel of a library, a ``torch.autograd.Function``) leads to the parameter itself
in the graph of the losses, and is refused there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError
from torch.utils.hooks import RemovableHandle

from dpllm.ghost import orders
from dpllm.ghost.call import flatten_tensors, replace_tensors
from dpllm.ghost.errors import NoRuleError
from dpllm.ghost.experiments import Usage
from dpllm.ghost.functional import FunctionRule, Host, of_parameter
from dpllm.ghost.origins import (
    Origin,
    has_none,
    has_rows,
    late_use,
    mark_rows,
    mark_shared,
    origins_of,
    unseen_recomputation,
    unseen_use,
)

_REPLACES_LINEAR = "deepspeed.runtime.zero.linear"  # the module that defines the function


@dataclass
class _Hidden:
    """A value that was computed with gradients off.

    Attributes:
        value: kept, so that its id stays its own.
        twin: the same value with a graph.
        names: of the parameters from which it was computed.
        shown: whether a graph that leads to the value would show that these are trained.
        followed: whether another value with a twin was computed from it.
    """

    value: Tensor
    twin: Tensor
    names: tuple[str, ...]
    shown: bool
    followed: bool = False


class Twins:
    """The values of one call of the model that have twins: those in ZeRO-3's own linear function.

    DeepSpeed puts it in the place of ``F.linear``. It is a ``torch.autograd.Function``: only the functions inside it
    are seen, with gradients off. A *twin* of each value that it computes from trainable parameters is computed with
    gradients, as ``F.linear`` would compute it. Where the value is used next, its twin takes its place, so no gradient
    reaches the function. A gradient that does is an error.
    """

    def __init__(self) -> None:
        """Start without one."""
        self._by_id: dict[int, _Hidden] = {}

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._by_id)

    def clear(self) -> None:
        """Forget all."""
        self._by_id.clear()

    def names_of(self, tensors: Iterable[Tensor]) -> set[str]:
        """Return the names of the parameters from which these values were computed within the function."""
        return {name for t in tensors if id(t) in self._by_id for name in self._by_id[id(t)].names}

    def twin_of(self, tensor: Tensor) -> Tensor:
        """Return the twin of a value within the function; any other tensor as it is."""
        found = self._by_id.get(id(tensor))
        return tensor if found is None else found.twin

    def add(self, value: Tensor, twin: Tensor, names: Iterable[str], shown: bool, sources: Iterable[Tensor]) -> None:
        """Remember a value's twin.

        Args:
            value: computed with gradients off.
            twin: the same with gradients.
            names: of the parameters from which it was computed.
            shown: whether autograd would show in a graph of the value that they are trained.
            sources: the tensors from which it was computed.
        """
        hidden = [self._by_id[id(source)] for source in sources if id(source) in self._by_id]
        for one in hidden:
            one.followed = True
        shown = shown and all(one.shown for one in hidden)
        self._by_id[id(value)] = _Hidden(value, twin, tuple(sorted(names)), shown)

    def replaced(self, value: Any) -> Any:
        """Return a tensor, or nested tuples, lists and dicts, with the outputs of the function replaced by their twins.

        Raises:
            NoRuleError: a value comes from another library's function, whose own derivative is not known.
        """
        tensors = list(flatten_tensors(value)) if self._by_id else []
        if not any(id(t) in self._by_id for t in tensors):
            return value
        replaced = replace_tensors(value, iter([self._outside(t) for t in tensors]))
        return type(value)(**replaced) if isinstance(value, dict) else replaced

    def _outside(self, tensor: Tensor) -> Tensor:
        found = self._by_id.get(id(tensor))
        if found is None:
            return tensor
        if tensor.grad_fn is None and found.shown:
            return tensor  # a constant, computed with gradients off on purpose
        if getattr(getattr(tensor.grad_fn, "_forward_cls", None), "__module__", "") != _REPLACES_LINEAR:
            raise unseen_use(found.names[0])
        found.followed = True
        return found.twin

    def settle(self) -> None:
        """Make sure that no gradient can reach a value that has a twin; forget the twins.

        Raises:
            NoRuleError: it cannot be told whether a value is a constant.
        """
        found, self._by_id = self._by_id, {}
        for one in found.values():
            if one.value.requires_grad:
                one.value.register_hook(_refuse(one.names[0]))
            elif not one.followed and not one.shown:
                raise unseen_use(one.names[0])


def _refuse(name: str) -> Any:
    def refuse(_: Tensor) -> None:
        raise unseen_use(name)

    return refuse


_ATTRIBUTES = ("__set__", "__delete__")
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__  # no use of the parameter; ``zero_grad()`` has to see it


class _Names:
    """The names of the trainable parameters, and of the tensors that a sharded model puts in their places."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model, self.parameters = model, dict(parameters)
        self._name_of: dict[int, str | None] = {id(p): name for name, p in parameters.items()}

    def of(self, value: Tensor) -> str | None:
        """Return the name of a trainable parameter, None for any other tensor.

        While a module of a sharded model runs, other tensors replace its parameters; they are recognised by their
        place in the model. One that has no place yet may get it later, so nothing is remembered of it.
        """
        if id(value) not in self._name_of:
            for name, live in self._model.named_parameters():
                self._name_of.setdefault(id(live), name if name in self.parameters else None)
        return self._name_of.get(id(value))


class _Running:
    """A module that runs.

    The names of parameters are looked up when a function asks: in most calls none is watched.

    Args:
        parameters: to which a rule applies in it.
        within: whether it applies in the modules within it as well.
        around: the module that runs around it.
        names: of parameters.

    Attributes:
        with_grad: whether it was called with gradients on.
    """

    __slots__ = ("_around", "_names", "_owned", "_parameters", "_within", "with_grad")

    def __init__(
        self, parameters: Sequence[nn.Parameter], within: bool, around: _Running | None, names: _Names
    ) -> None:
        self._parameters, self._within, self._around, self._names = parameters, within, around, names
        self._owned: frozenset[str | None] | None = None
        self.with_grad = torch.is_grad_enabled()

    @property
    def owned(self) -> frozenset[str | None]:
        """The names of the parameters to which a rule applies in it."""
        if self._owned is None:
            self._owned = self._above.union(map(self._names.of, self._parameters))
        return self._owned

    @property
    def inherited(self) -> frozenset[str | None]:
        """The names of those to which it applies in the modules within it as well."""
        return self.owned if self._within else self._above

    @property
    def _above(self) -> frozenset[str | None]:
        return frozenset() if self._around is None else self._around.inherited


class _Suspended:
    """Ignores uses while a rule runs modules for itself; a class, because a generator costs more in every layer."""

    __slots__ = ("_before", "_uses")

    def __init__(self, uses: Uses) -> None:
        self._uses = uses

    def __enter__(self) -> None:
        self._before, self._uses.off = self._uses.off, True

    def __exit__(self, *_: object) -> None:
        self._uses.off = self._before


class _Guard:
    """The hook on the gradient of a parameter, and the node that has to live as long.

    Attributes:
        node: of the parameter's gradient.
        handle: of the hook.
    """

    def __init__(self, node: Any, handle: RemovableHandle) -> None:
        """Keep both."""
        self.node, self.handle = node, handle

    def __deepcopy__(self, _: dict[int, Any]) -> _Guard:
        """Return this one: a copy of a model that is watched has other parameters."""
        return self


class Uses(TorchFunctionMode):
    """Watches the calls of one model.

    All calls are watched until a backward pass succeeded, and again in the calls 2, 4, 8, …; from the first use of a
    parameter in a function on, every call is, and every call of a model that ZeRO-3 partitions. In other calls a use
    is an error: a gradient that reaches a parameter is refused in every backward pass.

    Args:
        model: the model.
        parameters: the trainable ones by name.
        host: the interface of the book.

    Attributes:
        active: whether the present call of the model, and the backward pass that follows, are watched.
        proved: whether a backward pass succeeded.
        off: whether uses are ignored, while a rule runs modules for itself.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], host: Host) -> None:
        """Remember the parameters."""
        super().__init__()
        self.active, self.proved = False, False
        self._names, self._host = _Names(model, parameters), host
        self._running: list[_Running] = []
        self._rule = FunctionRule(host)
        self._needed = any(hasattr(p, "ds_id") for p in parameters.values())  # no gradient would show a use
        self.off = self._in_backward = False
        self._calls = 0
        self._twins = Twins()
        self._handles: dict[int, _Guard] = {}

    # -------------------------------------------------------------------- when to watch

    @property
    def is_watching(self) -> bool:
        """Whether functions are seen, or values of ZeRO-3 have twins: only then do modules differ from other calls."""
        return self.active or bool(self._twins)

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Note that a call of the model begins, and watch it if necessary."""
        self._calls += 1
        self.active = False  # until the watch has begun: a call may break off before
        self._running.clear()
        self._twins.clear()
        for parameter in self._names.parameters.values():
            self.refuse_gradient_of(parameter)
        if self._needed or not self.proved or self._calls & (self._calls - 1) == 0:
            mark_rows((args, kwargs))
            self.active = True
            self.__enter__()

    def end(self, output: Any) -> Any:
        """Note that the call ended; return its output, None if it raised."""
        if self.active:
            self.__exit__(None, None, None)
        self._running.clear()
        if output is None:
            self._twins.clear()
            return None
        output = self._twins.replaced(output)
        self._twins.settle()
        return output

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Watch the modules that are recomputed in a backward pass; the pass itself is a function, which hides them.

        Raises:
            GhostError: activation checkpointing recomputed other tensors than it kept.
        """
        depth, self._in_backward = 0, True

        def begin(*_: Any) -> None:
            nonlocal depth
            depth += 1
            if depth == 1:
                self.__enter__()

        def end(_: nn.Module, args: Any, output: Any) -> Any:
            nonlocal depth
            depth -= 1
            output = self.replaced(output)
            if depth == 0:
                self.__exit__(None, None, None)
                self._twins.settle() if output is not None else self._twins.clear()
            return output

        handles: tuple[RemovableHandle, ...] = ()
        if self.active:
            handles = register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)
        try:
            yield
        except CheckpointError as error:
            raise unseen_recomputation() from error
        finally:
            self._in_backward = False
            for handle in handles:
                handle.remove()

    # ------------------------------------------------------------------- running modules

    def enter(self, owned: Sequence[nn.Parameter], within: bool = False) -> None:
        """Note that a module begins to run.

        Args:
            owned: the parameters of its own to which its rule applies.
            within: whether that rule sees their uses by the modules within it as well.
        """
        self._running.append(_Running(owned, within, self._running[-1] if self._running else None, self._names))

    def replaced(self, value: Any) -> Any:
        """Return a module's arguments with the outputs of ZeRO-3's linear function in a form that has a graph."""
        if not self._twins:
            return value
        with _Suspended(self):
            return self._twins.replaced(value)

    def found(self, given: Any, output: Any) -> Any:
        """Return the output of a module with a rule; it has no rows if what it was given has none, as in DoRA."""
        if self.active and not any(map(has_rows, flatten_tensors(given))):
            mark_rows(output, rows=False)
        return output

    def refuse_other_order(self, user: str, tensors: Sequence[Tensor]) -> None:
        """Make sure that the tensors that a use of parameters reads have the rows of the batch in order."""
        if any(map(orders.order_of, tensors)) and (rows := self._host.rows_by_themselves):
            orders.refuse_other_order(user, tensors, rows)
            self._needed |= orders.needs_every_call(tensors)

    def leave(self) -> None:
        """Note that the module returned."""
        if self._running:
            self._running.pop()

    def refuse_gradient_of(self, parameter: nn.Parameter) -> None:
        """Make sure that a gradient that reaches this parameter in a backward pass of the clipper is an error.

        A node for a parameter that ZeRO-3 partitioned would keep the shape of the partition. There the graph of the
        losses is searched, and the engine refuses a gradient that it did not set.
        """
        if id(parameter) in self._handles:
            return
        if not parameter.requires_grad or hasattr(parameter, "ds_id"):
            return
        name = self.name_of(parameter)
        if name is None:
            return
        node = torch.autograd.graph.get_gradient_edge(parameter).node

        def refuse(_: Any) -> None:
            if self._in_backward:
                raise unseen_use(name) if self.active else late_use(name)

        self._handles[id(parameter)] = _Guard(node, node.register_prehook(refuse))

    def share(self, name: str, value: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        """Return a value that all rows share, as the module that computed it from a parameter must return it."""
        self._needed = True
        self._note([name])
        leaf = Origin(name, value, receive).leaf
        if not self.active:
            self.active = True
            self.__enter__()
        return leaf

    def remove(self) -> None:
        """Undo the hooks."""
        for guard in self._handles.values():
            guard.handle.remove()
        self._handles.clear()

    def name_of(self, value: Tensor) -> str | None:
        """Return the name of a trainable parameter, None for any other tensor."""
        return self._names.of(value)

    # ------------------------------------------------------------------------ functions

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Call the function, and serve the parameters that it uses."""
        kwargs = kwargs or {}
        called = getattr(func, "__name__", "")
        if self.off or called in _ATTRIBUTES or (called == "__get__" and func == _GRADIENT):
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            args, kwargs = self._twins.replaced((args, kwargs))
        tensors = list(flatten_tensors((args, kwargs)))
        result = self._call(func, types, args, kwargs, tensors)
        with torch.no_grad():
            orders.follow(func, args, kwargs, tensors, result, self._host.rows_by_themselves)
        return result

    def _call(self, func: Any, types: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        of_rows = any(map(has_rows, tensors))
        parameters = {place: name for place, t in enumerate(tensors) if (name := self._used(t)) is not None}
        if not torch.is_grad_enabled():
            if names := self._hidden(tensors, parameters):
                return self._with_twin(func, types, args, kwargs, names)
            if parameters and getattr(func, "__name__", "") != "__get__":
                self._note(parameters.values())  # a checkpointed module, which will be recomputed with gradients
        elif parameters or any(map(origins_of, tensors)):
            return self._serve(func, args, kwargs, tensors, parameters)
        result = func(*args, **kwargs)
        if of_rows or any(map(has_none, tensors)):
            mark_rows(tensors[0] if result is None else result, of_rows)
        return result

    def _used(self, tensor: Tensor) -> str | None:
        """Return the name of a trainable parameter to which no rule of a running module applies."""
        if not isinstance(tensor, nn.Parameter):
            return None
        name = self.name_of(tensor)
        return None if name is None or (self._running and name in self._running[-1].owned) else name

    def _hidden(self, tensors: list[Tensor], parameters: dict[int, str]) -> set[str]:
        """Return the partitioned parameters that are used inside a ``torch.autograd.Function``, as ZeRO-3's linear is.

        While a module runs with gradients, a function without them is either inside one or computes a constant. The
        graph may not show the use, because partitioned parameters of layers with a rule stay out of autograd.
        """
        if self._running and not self._running[-1].with_grad:
            return set()
        names = {origin.name for t in tensors for origin in origins_of(t)} | self._twins.names_of(tensors)
        return {n for n in names.union(parameters.values()) if hasattr(self._names.parameters[n], "ds_id")}

    def _with_twin(self, func: Any, types: Any, args: tuple, kwargs: dict, names: set[str]) -> Any:
        """Call a function inside such a Function, and once more with gradients for the value's twin."""
        sources = list(flatten_tensors((args, kwargs)))
        has_twin = bool(self._twins.names_of(sources))
        twins = [self._twins.twin_of(t) for t in sources]
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        with torch.enable_grad():
            twin = self.__torch_function__(func, types, *replace_tensors((args, kwargs), iter(twins)))
        if isinstance(twin, Tensor) and (twin.requires_grad or has_twin):
            shown = all(self._names.parameters[name].requires_grad for name in names)
            self._twins.add(result, twin, names, shown, sources)
        return result

    def _note(self, names: Iterable[str]) -> None:
        """Count the uses: twice, since one value may lead to several uses, so it never counts as a single one."""
        parameters = [self._names.parameters[name] for name in names]
        self._host.note_uses(parameters + parameters)

    def _serve(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor], parameters: dict[int, str]) -> Any:
        frame = replace_tensors((args, kwargs), iter([torch.empty(0)] * len(tensors)))
        shared = list(tensors)
        for place, name in parameters.items():
            shared[place] = of_parameter(name, tensors[place], self._names.parameters[name], self._host).leaf
        places = [place for place, t in enumerate(shared) if origins_of(t)]
        count = self._host.rows_in_pass
        rows = self._rule.rows_of(func, shared, places, count)
        if not rows:
            result = self._compute(func, frame, shared)
            if any(map(has_rows, tensors)):  # a part for each row, such as a mask that a bias was added to
                mark_rows(tensors[0] if result is None else result)
            if parameters and any(origins_of(t) for t in flatten_tensors((result, args, kwargs))):
                self._needed = True
                self._note(parameters.values())
            return result
        self._needed = True
        self._note(parameters.values())
        usage = Usage(func, frame, shared, places, rows, count or 0)
        self.refuse_other_order(usage.owners, [tensors[place] for place in rows])
        if count is None or any(shared[place].ndim == 0 for place in rows):
            raise NoRuleError(
                f"{usage.owners} is used by {usage.name}() where the number of rows is not known. Call the model with "
                "a tensor whose first dimension has the rows, or freeze the parameter."
            )
        return self._rule.apply(usage)

    @staticmethod
    def _compute(func: Any, frame: tuple[tuple, dict], tensors: list[Tensor]) -> Any:
        """Compute a shared value once for all rows, in a graph of its own that checkpointing does not see."""
        origins = [origin for t in tensors for origin in origins_of(t)]
        versions = [t._version for t in tensors]
        args, kwargs = replace_tensors(frame, iter(tensors))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            result = func(*args, **kwargs)
        written = [t for t, version in zip(tensors, versions, strict=True) if t._version != version]
        for t in (*flatten_tensors(result), *written):
            if t.requires_grad:
                mark_shared(t, origins)
        return result
