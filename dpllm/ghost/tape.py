"""Records the operations of a pass, and runs them again on other inputs without modules, hooks and autograd.

Place in the flow: below `dpllm.ghost.replay`, which decides when a pass is recorded and when it is replayed. A `Tape`
sees each operation of a pass below autograd, those of the backward pass among them. `program_of` makes a function of
two tapes of passes over *different* rows. It refuses whatever might carry a value of the recorded rows into a replay:

* A tensor that no recorded operation returned has to be the same object in both passes, as a weight is. A tensor made
  of Python numbers has to hold the same numbers.
* A number that the host read (``item``, ``equal``), and a shape that follows from values (``nonzero``), has to be the
  same in both passes. A replay compares it again, and stops where it differs. Operations of other libraries count
  among those whose shapes follow from values.
* Memory that was allocated without values has to be written by a recorded operation before one reads it. Otherwise a
  kernel that PyTorch does not know wrote it.
* Memory that was there before, as inputs and buffers are, is not written.
* Both passes have to run the same operations with the same numbers.

What `Tape.__torch_function__` refuses: methods that hand values to Python past PyTorch's operations.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

_READERS = frozenset(
    ("tolist", "numpy", "__array__", "__dlpack__", "storage", "untyped_storage", "_typed_storage", "__reduce_ex__")
)
"""Methods of a tensor whose values Python then has, without an operation that a tape sees."""
_READERS_BELOW = frozenset(("data_ptr", "apply_", "map_", "map2_", "_pack_padded_sequence", "_pad_packed_sequence"))
"""Functions that read them from memory, or have C++ read them."""
_SPLITS = frozenset(("tensor_split", "ctc_loss"))
"""The same, where an argument besides the first is a tensor."""
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""The same, where an argument has integers: how many of the packed sequences have a token at each place."""
_PROPERTIES = frozenset((("data", "__set__"), ("__cuda_array_interface__", "__get__")))
_WITHOUT_VALUES = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
)
_LIFTED = frozenset({"lift_fresh", "lift_fresh_copy", "lift"})  # of tensors made of Python numbers
_ALIASES = frozenset({"detach", "alias"})
_COLLECTIVE = ("c10d", "_c10d_functional", "_dtensor")


_aten = torch.ops.aten
_BINDINGS: dict[Any, Callable[..., Any]] = {
    _aten.view.default: Tensor.view,
    _aten._unsafe_view.default: Tensor.view,
    _aten.t.default: Tensor.t,
    _aten.transpose.int: Tensor.transpose,
    _aten.unsqueeze.default: Tensor.unsqueeze,
    _aten.expand.default: Tensor.expand,
    _aten.select.int: Tensor.select,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.add.Tensor: torch.add,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.cat.default: torch.cat,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.silu.default: torch.nn.functional.silu,
    _aten.mean.dim: torch.mean,
    _aten.sum.dim_IntList: torch.sum,
    _aten.pow.Tensor_Scalar: torch.pow,
}
"""The same operations with the same arguments, called in half the time."""


class RefusedError(Exception):
    """A pass that cannot be replayed; the message is the reason."""


@dataclass(frozen=True)
class Value:
    """The place of a tensor on a tape: an input, or what an operation returned."""

    number: int


@dataclass(frozen=True)
class Constant:
    """The place of a tensor that was there before, or that was made of Python numbers (``lifted``)."""

    number: int


@dataclass
class Entry:
    """One operation.

    Attributes:
        function: that was called.
        args: its arguments, with places instead of tensors.
        kwargs: the same.
        results: the places of the tensors that it returned, None for one that is an argument already, or is None.
        single: whether it returned one tensor rather than several.
        read: the numbers that it returned to Python; None if it returned tensors.
        shapes: of what it returned, where they follow from values.
    """

    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[Value | None, ...] = ()
    single: bool = True
    read: tuple[Any, ...] | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None

    @property
    def name(self) -> str:
        """The operation's name; empty for a launch."""
        return self.function._overloadpacket.__name__ if isinstance(self.function, OpOverload) else ""

    @property
    def is_view(self) -> bool:
        """Whether it returns other views of its first argument's memory, and does nothing else."""
        return isinstance(self.function, OpOverload) and self.function.is_view


class Tape(TorchDispatchMode):
    """Records operations while it is active; the pass itself runs as without it.

    Args:
        inputs: tensors that a replay gets in place of these.

    Attributes:
        entries: the operations in their order.
        constants: tensors that no operation of the pass returned.
        lifted: which of them were made of Python numbers.
        refused: why the pass cannot be replayed; None if nothing speaks against it so far.
        num_inputs: number of inputs.
        outputs: the places of its outputs, from `end`.
    """

    supports_higher_order_operators = True
    current: Tape | None = None
    """The tape that is recording; kernels that PyTorch does not know tell it of their launches."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        """Begin with the inputs."""
        super().__init__()
        self.entries: list[Entry] = []
        self.constants: list[Tensor] = []
        self.lifted: set[int] = set()
        self.refused: str | None = None
        self.num_inputs, self.outputs = len(inputs), list[Value]()
        self._places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._constants: dict[int, int] = {}
        self._memory = _Memory(self)
        self._count = 0
        for tensor in inputs:
            self._new(tensor)
            self._memory.know(tensor)
        self._watch = _Readers(self)

    def __enter__(self) -> Tape:
        """Begin to record."""
        Tape.current = self
        self._watch.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)
        self._watch.__exit__(*error)
        Tape.current = None

    def refuse(self, reason: str) -> None:
        """Note why the pass cannot be replayed."""
        self.refused = self.refused or reason

    # ------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run the operation, and record it."""
        kwargs = kwargs or {}
        if self.refused is not None or self._watch.off:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # what the tape itself reads is no reading of the model
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if not isinstance(func, OpOverload) or func.namespace in _COLLECTIVE:
            self.refuse(f"the operation {func} cannot be recorded")
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:  # a view that was taken before is another one than a later
            self.refuse(f"the operation {func} changes the shape or the memory of a tensor in place")
        name = func._overloadpacket.__name__
        places = self._placed(args, name in _LIFTED), self._placed(kwargs, lifted=False)
        self._memory.note(func, name, args, kwargs)
        result = func(*args, **kwargs)
        self._record(func, *places, result, name)
        return result

    def launch(self, function: Callable[..., None], args: tuple, writes: Sequence[Tensor]) -> None:
        """Run and record a function whose launches PyTorch does not see; a replay calls it again.

        Args:
            function: writes its results to some of its arguments.
            args: tensors, numbers, and lists and tuples of these.
            writes: the tensors that it writes.
        """
        if self.refused is None:
            with torch._C.DisableTorchFunction():
                self._memory.launched(writes, args)
                self.entries.append(Entry(function, self._placed(args, lifted=False), {}))
        self._watch.off = True
        try:
            with torch._C.DisableTorchFunction():  # Triton's interpreter reads its tensors in Python
                function(*args)
        finally:
            self._watch.off = False

    def end(self, outputs: Sequence[Tensor]) -> None:
        """Note the outputs of the pass.

        Raises:
            RefusedError: no recorded operation returned one of them.
        """
        for tensor in outputs:
            place = self._places.get(tensor)
            if place is None:
                raise RefusedError("a result of the pass was made by no operation of PyTorch")
            self.outputs.append(place)
        self._places = WeakTensorKeyDictionary()

    def _record(self, func: Any, args: tuple, kwargs: dict, result: Any, name: str) -> None:
        single = isinstance(result, Tensor)
        values = (result,) if single or not isinstance(result, (tuple, list)) else tuple(result)
        tensors = [v for v in values if v is not None]
        if not tensors:
            self.entries.append(Entry(func, args, kwargs))
        elif all(isinstance(v, (bool, int, float, complex)) for v in values):
            self.entries.append(Entry(func, args, kwargs, single=not isinstance(result, (tuple, list)), read=values))
        elif all(isinstance(v, Tensor) for v in tensors):
            follows = _shape_follows(func)
            shapes = tuple(() if v is None else tuple(v.shape) for v in values) if follows else None
            known = {id(v) for v in tensors if v in self._places or id(v) in self._constants}
            if follows and known:
                self.refuse(f"the operation {func} gives a tensor another shape, which may follow from values")
            if any(v.layout != torch.strided or v.is_nested for v in tensors):
                self.refuse(f"the operation {func} returns a tensor without strides, whose parts may have any shape")
            if name in _WITHOUT_VALUES:
                for value in tensors:
                    self._memory.begin(value)
            # A backward operation returns None for a parameter whose gradient nobody asks for.
            results = tuple(None if v is None or id(v) in known else self._new(v) for v in values)
            self.entries.append(Entry(func, args, kwargs, results, single, None, shapes))
        else:
            self.refuse(f"the operation {func} returns {[type(v).__name__ for v in values]}")

    def _new(self, tensor: Tensor) -> Value:
        place = self._places[tensor] = Value(self._count)
        self._count += 1
        return place

    def _placed(self, value: Any, lifted: bool) -> Any:
        if isinstance(value, Tensor):
            place = self._places.get(value)
            return self._constant(value, lifted) if place is None else place
        if isinstance(value, (tuple, list)):
            return type(value)(self._placed(v, lifted) for v in value)
        if isinstance(value, dict):
            return {key: self._placed(v, lifted) for key, v in value.items()}
        if isinstance(value, torch.Generator):  # a comparison would draw its numbers twice
            self.refuse("random numbers are drawn from a generator of the model's or the loss's own")
        return value

    def _constant(self, tensor: Tensor, lifted: bool) -> Constant:
        number = self._constants.get(id(tensor))
        if number is None:
            number = self._constants[id(tensor)] = len(self.constants)
            self.constants.append(tensor)
            if lifted:
                self.lifted.add(number)
            elif tensor.layout == torch.strided and not tensor.is_nested:
                self._memory.know(tensor)
        return Constant(number)


class _Memory:
    """Refuses a pass that reads memory which no recorded operation wrote, or writes to memory that was there before.

    Args:
        tape: of the pass.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._storages: dict[int, weakref.finalize] = {}  # those without values
        self._known: set[int] = set()  # those that were there before

    def know(self, tensor: Tensor) -> None:
        """Note a tensor that was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def note(self, func: Any, name: str, args: tuple, kwargs: dict) -> None:
        """Note what an operation writes and reads."""
        if func.is_view or name in _WITHOUT_VALUES or name in _ALIASES:
            return
        if not self._storages and not func._schema.is_mutable:
            return
        reads = []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written(_tensors(value))
            else:
                reads.append(value)
        self._refuse(reads)

    def launched(self, writes: Sequence[Tensor], args: tuple) -> None:
        """Note what a launch writes, and its arguments."""
        self._written(writes)
        self._refuse(args)

    def begin(self, tensor: Tensor) -> None:
        """Note a tensor that was allocated without values."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._storages[key] = weakref.finalize(storage, self._storages.pop, key, None)
        self._storages[key].atexit = False

    def _refuse(self, values: Any) -> None:
        for tensor in _tensors(values):
            if tensor.numel() and tensor.untyped_storage()._cdata in self._storages:
                self._tape.refuse("a kernel that is no operation of PyTorch wrote a tensor")

    def _written(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.numel() and tensor.untyped_storage()._cdata in self._known:  # written twice if compared
                self._tape.refuse("the pass writes to its inputs, to a buffer or to a parameter")
            if (end := self._storages.pop(tensor.untyped_storage()._cdata, None)) is not None:
                end.detach()


class _Readers(TorchFunctionMode):
    """Refuses a pass in which Python takes the values of a tensor past PyTorch's operations."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape, self.off = tape, False  # off: while a launch runs, which is recorded as a whole

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self.off and self._reads(func, args, kwargs or {}):
            self._tape.refuse(f"model or loss reads the values of a tensor past PyTorch's operations ({func.__name__})")
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _reads(func: Any, args: tuple, kwargs: dict) -> bool:
        name = getattr(func, "__name__", "").partition(".")[0]  # an overload has its name after the operation's
        if name in _SPLITS:
            return any(True for _ in _tensors((args[1:], kwargs))) and (name != "ctc_loss" or args[0].is_cuda)
        if name in _RECURRENT:
            return any(not tensor.is_floating_point() for tensor in _tensors((args, kwargs)))
        if name in ("__get__", "__set__"):
            return (_property_name(func.__self__), name) in _PROPERTIES
        return name in _READERS or name in _READERS_BELOW


@functools.cache
def _shape_follows(func: OpOverload) -> bool:
    """Whether the shapes of what an operation returns may follow from values, as far as PyTorch says.

    It marks not all overloads with ``out``, and nobody has to mark an operation of another library.
    """
    packet = func._overloadpacket
    of_packet = (getattr(packet, overload) for overload in packet.overloads())
    return func.namespace != "aten" or any(torch.Tag.dynamic_output_shape in one.tags for one in of_packet)


def _property_name(of: Any) -> str:
    return getattr(of.fget if isinstance(of, property) else of, "__name__", "")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


# --------------------------------------------------------------------------- programs


class Program:
    """A recorded pass as a function of its inputs.

    Args:
        source: of a Python function ``run(inputs)`` that returns the outputs, or None where a comparison failed.
        names: the objects that it uses.
    """

    def __init__(self, source: str, names: dict[str, Any]) -> None:
        """Compile the function."""
        namespace = dict(names)
        exec(compile(source, "<a recorded pass>", "exec"), namespace)
        self._run = namespace["run"]
        self.source = source

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        """Run the pass on other inputs; None where the host read another number, or a shape is another."""
        with torch.no_grad():
            return self._run(inputs)


def program_of(first: Tape, second: Tape) -> Program:
    """Return the pass that two tapes recorded over different rows.

    Args:
        first: of the earlier pass.
        second: of the later.

    Raises:
        RefusedError: it cannot be replayed; the message says why.
    """
    for tape in (first, second):
        if tape.refused is not None:
            raise RefusedError(tape.refused)
    alike = (first.lifted, first.outputs, len(first.entries), len(first.constants))
    if alike != (second.lifted, second.outputs, len(second.entries), len(second.constants)):
        raise RefusedError("two passes ran different operations")
    for one, other in zip(first.entries, second.entries, strict=True):
        if (one.function, repr((one.args, one.kwargs))) != (other.function, repr((other.args, other.kwargs))):
            raise RefusedError(f"two passes called {one.function} and {other.function}, or with other numbers")
        if (one.results, repr(one.read), one.shapes) != (other.results, repr(other.read), other.shapes):
            raise RefusedError(f"what {one.function} returned to Python follows from the rows")
    for number, (tensor, later) in enumerate(zip(first.constants, second.constants, strict=True)):
        if tensor is not later and not (number in first.lifted and _same_bits(tensor, later)):
            raise RefusedError("a tensor that no recorded operation made is not the same in two passes")
    return _compiled(second)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    like = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return like and torch.equal(one, other)


class _Writer:
    """Writes the source of a program."""

    def __init__(self, constants: Sequence[Tensor]) -> None:
        self.names: dict[str, Any] = {f"c{number}": tensor for number, tensor in enumerate(constants)}
        self.lines: list[str] = []
        self._of_object: dict[int, str] = {}
        self._same: dict[Value, Value | Constant] = {}  # of a value that is another one, without a graph

    def alias(self, value: Value, source: Value | Constant) -> None:
        """Note that a value is another one."""
        self._same[value] = self.root(source)

    def root(self, place: Value | Constant) -> Value | Constant:
        """Return the place that a place is an alias of, or itself."""
        return self._same.get(place, place) if isinstance(place, Value) else place

    def text(self, value: Any) -> str:
        """Return the expression of an argument."""
        if isinstance(value, Value | Constant):
            value = self.root(value)
        if isinstance(value, Value):
            return f"v{value.number}"
        if isinstance(value, Constant):
            return f"c{value.number}"
        if isinstance(value, list):
            return "[" + ", ".join(map(self.text, value)) + "]"
        if isinstance(value, tuple):
            return "(" + "".join(self.text(v) + ", " for v in value) + ")"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.name(value)  # floats keep their bits

    def name(self, value: Any) -> str:
        """Return the name of an object."""
        if id(value) not in self._of_object:
            self._of_object[id(value)] = name = f"k{len(self._of_object)}"
            self.names[name] = value
        return self._of_object[id(value)]

    def call(self, entry: Entry) -> str:
        """Return the expression of a call."""
        function = getattr(entry.function, "_op", entry.function)  # without the frame of OpOverload.__call__
        if entry.name in _LIFTED:  # a replay may write to its copy
            function = torch.clone
        elif not entry.kwargs:
            function = _BINDINGS.get(entry.function, function)
        named = [f"{key}={self.text(value)}" for key, value in entry.kwargs.items()]
        return f"{self.name(function)}({', '.join([*map(self.text, entry.args), *named])})"


def _compiled(tape: Tape) -> Program:
    outputs, writer, entries = tape.outputs, _Writer(tape.constants), list[Entry]()
    views: dict[str, Value] = {}
    for entry in tape.entries:
        source, place = entry.args[0] if entry.args else None, entry.results[0] if entry.results else None
        if place is None or not entry.is_view:
            entries.append(entry)
        elif entry.name in _ALIASES and isinstance(source, Value | Constant):
            writer.alias(place, source)
        elif (text := writer.call(entry)) in views and entry.single:
            writer.alias(place, views[text])  # a view again, for instance a weight transposed for the backward pass
        else:
            views[text] = place
            entries.append(entry)
    kept = {writer.root(value) for value in outputs}
    last = {writer.root(value): at for at, entry in enumerate(entries) for value in _values((entry.args, entry.kwargs))}
    ends: dict[int, list[str]] = {}
    for value, at in last.items():
        if value not in kept and isinstance(value, Value):
            ends.setdefault(at, []).append(writer.text(value))
    used = last.keys() | kept
    unused = {id(entry) for entry in entries if entry.is_view and used.isdisjoint(entry.results)}
    lines = ["def run(inputs):"]
    if tape.num_inputs:
        lines.append("".join(f"v{n}, " if Value(n) in used else "_, " for n in range(tape.num_inputs)) + "= inputs")
    for at, entry in enumerate(entries):
        if id(entry) in unused and at not in ends:
            continue
        lines += _lines(writer, entry, used)
        if gone := ends.get(at):
            lines.append(f"del {', '.join(gone)}")
    lines.append(f"return [{', '.join(map(writer.text, outputs))}]")
    return Program("\n    ".join(lines), writer.names)


def _lines(writer: _Writer, entry: Entry, used: Set[Value | Constant]) -> list[str]:
    """Return the lines of one operation."""
    call = writer.call(entry)
    if entry.read is not None:
        read = entry.read[0] if entry.single else list(entry.read)
        if not all(isinstance(number, int) for number in entry.read):  # 0.0 and -0.0 differ, and NaN is NaN
            return [f"if repr({call}) != {writer.name(repr(read))}: return None"]
        return [f"if {call} != {writer.name(read)}: return None"]
    named = [r if r is not None and (r in used or entry.shapes is not None) else None for r in entry.results]
    if not any(named):
        return [call]
    targets = [f"v{r.number}" if r is not None else "_" for r in named]
    lines = [f"{targets[0] if entry.single else ', '.join(targets) + ', '} = {call}"]
    for target, shape in zip(targets, entry.shapes or (), strict=False):
        if target != "_":
            lines.append(f"if {target}.shape != {writer.name(torch.Size(shape))}: return None")
    return lines


def _values(value: Any) -> Iterator[Value]:
    if isinstance(value, Value):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _values(one)
    elif isinstance(value, dict):
        yield from _values(list(value.values()))
