"""Attach taps to a model: choose each module's subclass, and for each parameter the narrowest exact method.

For each trained parameter the first exact method of this ladder is used:

1. its module's class is one whose computation is known (linear layers, tables, norm layers, experts, some PEFT
   layers): the module is *tapped*;
2. a module passes the parameter to ``F.linear`` or ``F.embedding``: these *functions* are tapped while it runs;
3. the module that uses it runs *row by row*, with one copy of the parameter per row;
4. the enclosing module runs row by row, and so on up to the model.

A pass without gradients during the model's first call records which module uses which parameter in which function.
`dpllm.ghost.weights_check` then compares values. Parameters without an exact method here are clipped one unit at a
time, by `dpllm.ghost.PerUnitClipper`.

In a module that runs row by row, each row gets its own copy of the parameters without a tap, so the copies' gradients
are the rows' gradients. Inner modules stay tapped; the uses recorded in single rows are combined when the last of them
has arrived. This costs one launch per row, in this module only.

Shape suffixes: B rows.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from dpllm.ghost import peft_taps
from dpllm.ghost.experts import (
    ExpertsRule,
    Routed,
    attach_partitioned,
    is_experts,
    is_wrapper,
    refuse_divided,
    train_adapters,
    train_experts,
)
from dpllm.ghost.model_calls import flatten_tensors, items_of, rebuilt, tensors_in
from dpllm.ghost.refusals import GhostError, NoRuleError
from dpllm.ghost.taps import (
    LINEAR,
    Call,
    Host,
    LinearSite,
    NoTapError,
    Site,
    SpreadSite,
    TableSite,
    TapEmbedding,
    TapLinear,
    Target,
    call_of,
    conv1d_forward,
    is_own,
    spread_class,
    subclass,
    wrap,
)
from dpllm.ghost.unit_gradients import Lookup, RowGradients, Use, sum_of

Held = tuple[Target, list[tuple[nn.Module, str]]]
"""A parameter, and the modules that hold it, each with the parameter's attribute name."""


class Split:
    """A module that runs row by row.

    Args:
        host: the clipper.
        path: of the module.
        held: the parameters that are copied for each row.
    """

    def __init__(self, host: Host, path: str, held: list[Held]) -> None:
        """Start without calls."""
        self.host, self.path, self.held = host, path, held
        self.targets = [target for target, _ in held]
        self._without_rows: set[tuple] = set()  # arguments, by name, that were once passed without the call's rows

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the module's forward during a call of the model, row by row."""
        call = call_of(self.host, self.path)
        if call is None:
            return forward(*args, **kwargs)
        present = [  # unless an enclosing module has put a copy there
            (target, places)
            for target, places in self.held
            if all(is_own(target, module._parameters.get(name)) for module, name in places)
        ]
        if call.place is not None:  # an enclosing module runs row by row
            with _in_place(present, _copies(call, present, 1), 0):
                return forward(*args, **kwargs)
        if len(call.packed.lengths) > 1:
            raise NoTapError(self.targets, "the rows are packed, so the module cannot run row by row")
        arguments = _Arguments(forward, without_cache(args), without_cache(kwargs), call.rows, self._without_rows)
        if not arguments.has_rows:
            raise NoTapError(self.targets, f"no argument has {call.rows} rows as its first dimension")
        if arguments.flattens and call.host.in_forward:
            call.host.flattens(self.targets, "row by row")
        gathered, anchor = _Gathered(call), call.anchor
        copies = _copies(call, present, call.rows)
        # In autograd's order, the gate follows everything that the rows recorded.
        gate = _Gate.apply(anchor, gathered) if torch.is_grad_enabled() else anchor
        outputs = []
        call.inside.append(self.targets)  # and remains if the module raises
        try:
            call.anchor, call.place = gate, gathered.add
            for row in range(call.rows):
                call.row = row
                own_args, own_kwargs = arguments.of(row)
                with _in_place(present, copies, row):
                    outputs.append(forward(*own_args, **own_kwargs))
        finally:
            call.anchor, call.place = anchor, None
        call.inside.pop()
        return joined(outputs)


def _copies(call: Call, present: Sequence[Held], rows: int) -> list[tuple[Tensor, ...]]:
    """Return the copies of each parameter, one per row."""
    copies = []
    for target, ((module, name), *_) in present:
        weight = module._parameters[name]
        assert weight is not None, "it was trained when the clipper was attached"
        copies.append(SpreadSite(target).copies(call, weight, torch.Size((rows, *weight.shape))).unbind(0))
    return copies


@contextlib.contextmanager
def _in_place(present: Sequence[Held], copies: Sequence[tuple[Tensor, ...]], row: int) -> Iterator[None]:
    """Replace the parameters by a row's copies, keeping their order in the modules."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for (_, places), copy in zip(present, copies, strict=True):
            for module, name in places:
                # Recurrent layers hold their parameters in additional lists, and write to them.
                for attribute in ("_flat_weights", "_flat_weight_refs"):
                    if isinstance(module, nn.RNNBase) and attribute in vars(module):
                        held.append((module.__dict__, attribute, vars(module)[attribute]))
                        module.__dict__[attribute] = list(vars(module)[attribute])
                held.append((module._parameters, name, module._parameters[name]))
                module._parameters[name] = copy[row]  # type: ignore[assignment]
        yield
    finally:
        for values, name, value in reversed(held):
            values[name] = value


class _Gate(torch.autograd.Function):
    """An anchor whose backward runs after everything that it anchors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gathered: _Gathered) -> Tensor:
        ctx.gathered = gathered
        ctx.set_materialize_grads(False)
        return anchor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        ctx.gathered.hand_over()
        return None, None


class _Gathered:
    """The uses recorded in single rows of one call of a module."""

    def __init__(self, call: Call) -> None:
        self._host, self._rows = call.host, call.rows
        self._found: dict[tuple[Target, type], dict[int, list[Use]]] = {}

    def add(self, target: Target, row: int, use: Use) -> None:
        """Record the use of one row."""
        self._found.setdefault((target, type(use)), {}).setdefault(row, []).append(use)

    def hand_over(self) -> None:
        """Pass the clipper one use over all rows for each parameter."""
        found, self._found = self._found, {}
        for (target, _), by_row in found.items():
            self._host.record(target, _together(by_row, self._rows))


def _together(by_row: dict[int, list[Any]], rows: int) -> Use:
    """Combine the uses of single rows into one use over all rows; a row without a use gets zeros."""
    like = next(iter(by_row.values()))[0]
    if isinstance(like, RowGradients):
        none = torch.zeros_like(like.value_B)
        return RowGradients(
            torch.cat([sum_of(u.value_B for u in by_row[b]) if b in by_row else none for b in range(rows)])
        )
    if isinstance(like, Routed):
        by_row = {b: [Routed.cat(uses).per_slot()] for b, uses in by_row.items()}

    def laid(name: str, fill: int = 0) -> Tensor:
        """Lay the tokens of each row end to end, (B, longest, ...)."""
        found = {b: torch.cat([getattr(use, name) for use in uses], 1) for b, uses in by_row.items()}
        none, longest = next(iter(found.values()))[:, :0], max(x.shape[1] for x in found.values())
        per_row = [found.get(b, none) for b in range(rows)]
        return torch.cat([F.pad(x, (0, 0) * (x.ndim - 2) + (0, longest - x.shape[1]), value=fill) for x in per_row])

    if isinstance(like, Lookup):
        return replace(like, index_BT=laid("index_BT"), right_BTR=laid("right_BTR"))
    index = {"index_BS": laid("index_BS", -1)} if isinstance(like, Routed) else {}
    both: Use = replace(next(iter(by_row.values()))[0], left_BTL=laid("left_BTL"), right_BTR=laid("right_BTR"), **index)
    return both


class _Arguments:
    """The arguments of a call, split into rows.

    An argument has rows if its first dimension equals the number of the call's rows. If there are as many tokens as
    rows, this is ambiguous; an argument that was once passed without rows, such as positions (T,), then has none. An
    argument is identified by its name, since calls may omit others.
    """

    def __init__(
        self, forward: Callable[..., Any], args: tuple, kwargs: dict, rows: int, without_rows: set[tuple]
    ) -> None:
        names = _names_of(forward)
        named = [(names[i] if i < len(names) else i, value) for i, value in enumerate(args)]
        paths = [(path, t.shape[0] if t.ndim else 0) for path, t in tensors_in({**dict(named), **kwargs})]
        some_have = any(size == rows and path not in without_rows for path, size in paths)
        for path, size in paths:
            if rows > 1 and size != rows and (some_have or not (size and size % rows == 0)):
                without_rows.add(path)
        whole = [size == rows and path not in without_rows for path, size in paths]
        # Rows and tokens in one dimension, rows first: only if no argument has the rows themselves.
        flat = [0 if any(whole) or size % rows else size // rows for _, size in paths]
        self._each = [1 if has else n for has, n in zip(whole, flat, strict=True)]
        self._parts, self.has_rows = [args, kwargs], any(self._each)
        self.flattens = rows > 1 and any(n > 1 for n in self._each)

    def of(self, row: int) -> Any:
        """Return the arguments of one row."""
        each = iter(self._each)

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor):
                n = next(each)
                return value[row * n : (row + 1) * n] if n else value
            return rebuilt(value, cut)

        return [cut(part) for part in self._parts]


def _names_of(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a forward's positional parameters."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def without_cache(value: Any) -> Any:
    """Replace empty key-value caches by None; otherwise each row would continue the tokens of the first."""
    length = getattr(value, "get_seq_length", None)
    if callable(length):
        return None if length() == 0 else value
    return rebuilt(value, without_cache) if isinstance(value, tuple | dict) else value


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of all rows as one output, nested like the first."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.ndim else sum_of(outputs)
    parts = [joined(items) for items in zip(*([item for _, item in items_of(one)] for one in outputs), strict=True)]
    following = iter(parts)
    return rebuilt(first, lambda _: next(following))


# ---------------------------------------------------------------------------------------------------- the ladder


TAPPED, AS_FUNCTION, ROW_BY_ROW = 0, 1, 2
"""Rungs of the ladder; each rung above ``ROW_BY_ROW`` uses the next enclosing module."""

_WITHOUT_GRADIENT = ("data", "detach", "grad")  # of tensors; no other function returns a tensor without a gradient
_NO_SPREAD = (nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.modules.conv._ConvNd, nn.RNNBase)


class Holder(NamedTuple):
    """A module that directly holds trained parameters: its path, and the parameters by their attribute names."""

    path: str
    module: nn.Module
    own: Mapping[str, Target]


class Seen(NamedTuple):
    """One use of a parameter: the path of the innermost running module, and whether the function can be tapped."""

    at: str
    served: bool


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' ``Conv1D``, whose weight is (inputs, outputs)."""
    kind = getattr(type(module), "_tap_kind", type(module))
    return bool(kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")


def is_linear(module: nn.Module) -> bool:
    """Return whether the forward pass is that of ``nn.Linear`` or ``Conv1D``, including subclasses that inherit it."""
    kind = getattr(type(module), "_tap_kind", type(module))
    return is_transposed(module) or (issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the module's ``forward`` differs from its class's, so that the class does not describe it."""
    return "forward" in vars(module)


class Ladder:
    """The taps of one model, and the rung of each parameter.

    Args:
        model: the model.
        host: the clipper.
        parameters: the trained parameters by name.

    Attributes:
        holders: the modules that directly hold trained parameters.
        rungs: the rung of each parameter, by name; 0 for all others.
        copied: parameters that are read as one copy per row.
        splits: the modules that run row by row, by path.

    Raises:
        GhostError: no module with a forward pass contains a parameter, or a table has an option that couples rows.
    """

    def __init__(self, model: nn.Module, host: Host, parameters: Mapping[str, nn.Parameter]) -> None:
        """Find the modules that hold the parameters, without changing them."""
        self._model, self._host = model, host
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._targets = {id(p): Target(name, p) for name, p in parameters.items()}
        self.holders = [Holder(path, m, own) for path, m in model.named_modules() if (own := self._held_by(m))]
        self._places = [(target, holder, name) for holder in self.holders for name, target in holder.own.items()]
        for holder in self.holders:
            if isinstance(holder.module, nn.Embedding):
                refuse_coupled_options(holder.path, holder.module)
            if is_experts(holder.module):
                refuse_divided(holder.path, holder.module)
            self._owner(holder.path)
        self.rungs: dict[str, int] = {}
        self.copied: list[Target] = []
        self.splits: dict[str, Split] = {}
        self._experts: list[ExpertsRule] = []
        self._uses: dict[str, set[Seen]] = {}
        self._tapped: dict[str, set[str]] = {}  # where, by the names of the parameters
        self._undo: dict[int, tuple[nn.Module, type[nn.Module], Any]] = {}

    def _held_by(self, module: nn.Module) -> dict[str, Target]:
        return {name: self._targets[id(p)] for name, p in module._parameters.items() if id(p) in self._targets}

    def _owner(self, path: str) -> str:
        """Return the path of the nearest module with a forward pass, starting at ``path``."""
        at = path
        while type(self._modules[at]).forward is nn.Module.forward and not has_own_forward(self._modules[at]):
            if not at:
                names = [name for _, holder, name in self._places if holder.path == path]
                raise NoRuleError(
                    f"{path}: none of the modules that contain the parameters {names} has a forward pass. Freeze these "
                    "parameters."
                )
            at = at.rpartition(".")[0]
        return at

    def discover(self, run: Callable[[], Any]) -> Any:
        """Run the model without gradients, and record which module passes which parameter to which function."""
        discovery = _Discovery(self._paths, self._note)
        handles = [
            register_module_forward_pre_hook(discovery.enter),
            register_module_forward_hook(discovery.leave, always_call=True),
        ]
        try:
            with torch.no_grad(), warnings.catch_warnings(), discovery:
                warnings.simplefilter("ignore")
                return run()
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, tensor: Tensor, at: str, served: bool) -> None:
        """Record that a module passed a tensor to a function, if the tensor is a trained parameter."""
        target = self._targets.get(id(tensor))
        if target is None and isinstance(tensor, nn.Parameter):  # FSDP2 replaces the parameter
            target = next((t for t, h, name in self._places if h.module._parameters.get(name) is tensor), None)
        if target is not None:
            self._uses.setdefault(target.name, set()).add(Seen(at, served))

    def attach(self) -> None:
        """Give every module the subclass that its parameters' rungs require."""
        of_experts = self._tap_experts()
        for path, module in self._modules.items():
            if not self.touches(module) and (found := peft_taps.tap(module, self._trained_at_first)) is not None:
                self._put(path, module, *found)
        for holder in self.holders:
            is_free = all(self._rung(t) == TAPPED and t.name not in of_experts for t in holder.own.values())
            if is_free and not self.touches(holder.module) and (tap := _tap(holder)) is not None:
                self._put(holder.path, holder.module, *tap)
        functions: dict[str, list[Target]] = {}
        splits: dict[str, list[Target]] = {}
        for target in self._targets.values():
            rung, homes = self._rung(target), self._tapped.get(target.name, ())
            for use in self._uses_of(target, rung) if target.name not in of_experts else ():
                way, at = functions, use.at
                if not use.served or rung > AS_FUNCTION:
                    way, at = splits, self._above(use.at, rung - ROW_BY_ROW)
                if use.at not in homes and target not in way.setdefault(at, []):
                    way[at].append(target)
        for at, targets in functions.items():
            self._wrap("functions", Functions(self._host, at, self._held(targets)))
        for at, targets in splits.items():
            self._refuse_gathers(at, targets)
            self.splits[at] = Split(self._host, at, self._held(targets))
            self._wrap("row_by_row", self.splits[at])
            self.copied += targets

    def _refuse_gathers(self, at: str, targets: Sequence[Target]) -> None:
        """Refuse a module that would run row by row while DeepSpeed (ZeRO-3) gathers its children at each call.

        Processes have different numbers of rows, so their collectives would not match. Even on one process, DeepSpeed's
        hooks on the children would mistake the row copies for its own parameters.
        """
        module = self._modules[at]
        if next(module.children(), None) is None or not any(hasattr(p, "ds_id") for p in module.parameters()):
            return
        names = ", ".join(target.name for target in targets[:4]) + (", ..." if len(targets) > 4 else "")
        raise GhostError(
            f"{at} would have to run row by row, because no tap is exact for {names}. This does not work with ZeRO-3, "
            "which gathers weights at every call, while processes have different numbers of rows. Use FSDP2 "
            "(accelerate_configs/fsdp2.yaml), run one GPU without sharding, or freeze these parameters"
        )

    def _uses_of(self, target: Target, rung: int) -> set[Seen]:
        uses = self._uses.get(target.name, set())
        if rung >= ROW_BY_ROW and not uses:  # by a function that no mode sees
            return {Seen(self._owner(holder.path), served=False) for own, holder, _ in self._places if own is target}
        return uses

    def _held(self, targets: Iterable[Target]) -> list[Held]:
        """Return parameters with the modules that hold them and the attribute names there."""
        return [(t, [(h.module, name) for own, h, name in self._places if own is t]) for t in targets]

    def _rung(self, target: Target) -> int:
        return self.rungs.get(target.name, TAPPED)

    def _above(self, path: str, steps: int) -> str:
        path = self._owner(path)
        for _ in range(steps):
            path = self._owner(path.rpartition(".")[0])
        return path

    def climb(self, targets: Iterable[Target]) -> bool:
        """Move these parameters to their next rung; return whether any of them had one left."""
        climbed = False
        for target in targets:
            rung = self._rung(target)
            uses = self._uses_of(target, max(rung, ROW_BY_ROW))
            if rung >= ROW_BY_ROW and not any(self._above(use.at, rung - ROW_BY_ROW) for use in uses):
                continue
            following = rung + 1
            if following == AS_FUNCTION and not any(use.served for use in uses):
                following = ROW_BY_ROW
            self.rungs[target.name], climbed = following, True
        return climbed

    def _trained_at_first(self, value: Any) -> Target | None:
        target = self._targets.get(id(value))
        return target if target is not None and self._rung(target) == TAPPED else None

    def _tap_experts(self) -> set[str]:
        """Tap experts that run through transformers' interface; return the names of their parameters."""
        served: set[str] = set()
        for path, module in self._modules.items():
            own = {name: t for name, p in module.named_parameters() if (t := self._targets.get(id(p))) is not None}
            if is_wrapper(module):
                own = {name: target for name, target in own.items() if name.startswith(("lora_A.", "lora_B."))}
                train: Callable[..., ExpertsRule] = train_adapters
            elif is_experts(module):
                own = {name: target for name, target in own.items() if "." not in name}
                train = train_experts
            else:
                continue
            if own and all(self._rung(target) == TAPPED for target in own.values()):
                try:
                    rule = train(path, module, own, self._host)
                except NoRuleError:  # a later rung is exact for it
                    continue
                if rule not in self._experts:
                    self._experts.append(rule)
                served |= {target.name for target in own.values()}
        self._experts += attach_partitioned(self._model, self._host)
        return served

    def _put(self, path: str, module: nn.Module, kind: type[nn.Module], sites: Mapping[str, Site]) -> None:
        """Give a module a subclass of its class, and the sites that its forward needs."""
        if vars(module).get("_tap_host", self._host) is not self._host:
            raise another_clipper(path or "The model")
        self._remember(module)
        module.__class__ = kind
        module.__dict__.update(_tap_host=self._host, _tap_path=path, _tap_sites=sites)
        if "" in sites:
            module.__dict__["_tap_site"] = sites[""]
        for site in sites.values():
            for target in site.targets:
                self._tapped.setdefault(target.name, set()).add(path)
            if isinstance(site, SpreadSite):
                self.copied.append(site.weight)

    def _wrap(self, way: str, taken: Functions | Split) -> None:
        self._remember(self._modules[taken.path])
        wrap(self._modules[taken.path], way, taken.run)

    def _remember(self, module: nn.Module) -> None:
        self._undo.setdefault(id(module), (module, type(module), vars(module).get("forward")))

    def used_once(self, parameter: nn.Parameter) -> bool:
        """Return whether the model's calls for a loss used the parameter once."""
        return self._host.uses[self.target_of(parameter).name] == 1

    def target_of(self, parameter: nn.Parameter) -> Target:
        """Return a trained parameter with its name."""
        return self._targets[id(parameter)]

    def touches(self, module: nn.Module) -> bool:
        """Return whether the module's forward has been replaced."""
        return id(module) in self._undo

    def holds(self, module: nn.Module) -> bool:
        """Return whether the module directly holds trained parameters."""
        return any(holder.module is module for holder in self.holders)

    def detach(self) -> None:
        """Restore every module's class."""
        for module, kind, forward in self._undo.values():
            module.__class__ = kind
            for name in [name for name in vars(module) if name.startswith("_tap_")]:
                del module.__dict__[name]
            if forward is not None:
                module.__dict__["forward"] = forward
        for rule in self._experts:
            rule.remove()
        self._undo, self._tapped, self.splits = {}, {}, {}
        self.copied, self._experts = [], []


def _tap(holder: Holder) -> tuple[type[nn.Module], dict[str, Site]] | None:
    """Return the subclass of a module of a known class, and its sites; the key "" stands for all its parameters."""
    module, own, kind = holder.module, holder.own, type(holder.module)
    if has_own_forward(module):
        return None
    transposed = is_transposed(module)
    if own.keys() <= {"weight", "bias"} and (transposed or isinstance(module, nn.Linear)):
        frozen = {id(p) for p in module._parameters.values() if p is not None and not p.requires_grad}
        tapped = subclass(kind, "linear", forward=conv1d_forward) if transposed else subclass(kind, "linear", TapLinear)
        return tapped, {"": LinearSite(own.get("weight"), own.get("bias"), transposed, frozen)}
    if isinstance(module, nn.Embedding) and own.keys() == {"weight"}:
        return subclass(kind, "table", TapEmbedding), {"": TableSite(own["weight"], module.padding_idx)}
    is_leaf = not any(True for _ in module.children())
    computes = kind.forward is not nn.Module.forward and not isinstance(module, _NO_SPREAD)
    if is_leaf and computes and all(len(target.shape) == 1 for target in own.values()):
        return spread_class(kind, tuple(own)), {name: SpreadSite(target) for name, target in own.items()}
    return None


# ---------------------------------------------------------------------------------------------------- functions

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""The parameters of ``F.embedding``."""


class Functions:
    """The trained parameters that a module passes to functions: matrix products, with their biases, and lookups.

    Routers, tied heads and layers of other libraries call ``F.linear(x, self.weight)`` or ``F.embedding``. While such
    a module runs, a function mode intercepts these calls and computes them with taps.

    Args:
        host: the clipper.
        path: of the module.
        held: the parameters, each with the modules that hold it and its names there.
    """

    def __init__(self, host: Host, path: str, held: list[Held]) -> None:
        """Start without products."""
        self.host, self.path, self.held = host, path, held
        self._products: dict[tuple[Target | None, Target | None], LinearSite] = {}  # by weight and bias

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the module's forward; during a call of the model, under a mode that intercepts the functions."""
        call = call_of(self.host, self.path)
        if call is None:
            return forward(*args, **kwargs)
        with _Mode(self, call):
            return forward(*args, **kwargs)

    def product(
        self, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, own: Target | None, own_bias: Target | None
    ) -> Tensor:
        """Compute a product during a call of the model, with taps for its trained matrix and bias.

        A matrix or bias that is computed from parameters, or that is a row's copy of one, stays in autograd.
        """
        if own is None and weight.requires_grad:
            assert own_bias is not None and bias is not None, "one of them is trained"
            y: Tensor = LINEAR(x, weight)
            return y + SpreadSite(own_bias).read(call, bias, y.shape).to(y.dtype)
        if own_bias is None and bias is not None and bias.requires_grad:
            y = self.product(call, x, weight, None, own, None)
            return y + bias.to(y.dtype)
        site = self._products.setdefault((own, own_bias), LinearSite(own, own_bias))
        return site.run(call, x, weight, bias)


class _Mode(TorchFunctionMode):
    """Computes functions of the held parameters with taps; `Functions` holds the parameters."""

    def __init__(self, functions: Functions, call: Call) -> None:
        super().__init__()
        self._functions, self._call = functions, call
        # By their current identity: FSDP2 replaces the parameters while a module runs.
        self._held = {
            id(now): target
            for target, places in functions.held
            for module, name in places
            if is_own(target, now := module._parameters.get(name))
        }

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is LINEAR:
            x, weight, bias = _arguments(args, kwargs, ("input", "weight", "bias"))
            own, own_bias = self._held.get(id(weight)), self._held.get(id(bias))
            if own is not None or own_bias is not None:
                return self._functions.product(self._call, x, weight, bias, own, own_bias)
        elif func is F.embedding:
            index, weight, padding_idx = _arguments(args, kwargs, ("input", "weight", "padding_idx"))
            if (table := self._held.get(id(weight))) is not None:
                return TableSite(table, padding_idx).run(self._call, index, weight)
        return func(*args, **kwargs)


def _arguments(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> list[Any]:
    given: list[Any] = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
    return given


def _serves(func: Any, args: Sequence[Any], kwargs: dict[str, Any], parameter: Tensor) -> bool:
    """Return whether the mode handles the parameter as this argument of the function."""
    if func is LINEAR:
        return any(one is parameter for one in _arguments(args, kwargs, ("input", "weight", "bias"))[1:])
    if func is F.embedding:
        _, weight, _, max_norm, _, by_count, sparse = _arguments(args, kwargs, _EMBEDDING)
        return weight is parameter and max_norm is None and not by_count and not sparse
    return False


def another_clipper(path: str) -> GhostError:
    """Return the error for a module that already has another clipper's taps."""
    return GhostError(
        f"{path} has another clipper. Call remove() on the clipper that is no longer used, or detach() on the run that "
        "attached it. If you have neither, load the model again."
    )


class _Discovery(TorchFunctionMode):
    """Reports the arguments of functions that return tensors, with the path of the innermost running module."""

    def __init__(self, paths: Mapping[int, str], note: Callable[[Tensor, str, bool], None]) -> None:
        super().__init__()
        self._paths, self._show, self._stack = paths, note, [""]

    def enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._paths.get(id(module), self._stack[-1]))

    def leave(self, *_: Any) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
        if name not in _WITHOUT_GRADIENT and any(True for _ in flatten_tensors(result)):
            for tensor in flatten_tensors((args, kwargs)):
                if tensor.requires_grad:
                    self._show(tensor, self._stack[-1], _serves(func, args, kwargs, tensor))
        return result


def refuse_coupled_options(path: str, table: nn.Embedding) -> None:
    """Refuse options of ``nn.Embedding`` under which a row's gradient depends on other rows or is not a plain sum."""
    if table.max_norm is not None:
        raise GhostError(f"{path}: max_norm rewrites the rows of the table that the batch looks up. Set max_norm=None.")
    if table.scale_grad_by_freq:
        raise NoRuleError(
            f"{path}: scale_grad_by_freq divides by counts over the whole batch, so a row's gradient depends on "
            "other rows. Set scale_grad_by_freq=False."
        )
