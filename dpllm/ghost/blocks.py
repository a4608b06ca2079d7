"""Compiled blocks: the forward passes of a model's layers as full graphs, with taps.

A block is a child of an outermost ``nn.ModuleList``. Its class's forward is compiled once, so blocks of one class share
their graphs. A compiled graph has no side effects: its taps' leaves are created just before it, inside checkpoints and
FSDP2 hooks (`dpllm.ghost.taps.Sink`). A block's first call also runs it without gradients, on copies of its tensors,
to record the leaves' shapes.

Blocks that the user compiled are taken over until `Blocks.remove`, since their graphs would hide the taps.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, innermost_backend
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters

from dpllm.ghost.attach import Ladder, has_own_forward, without_cache
from dpllm.ghost.model_calls import rebuilt
from dpllm.ghost.taps import (
    PLAIN,
    Call,
    Hand,
    Host,
    LeafError,
    LinearSite,
    SpreadSite,
    TableSite,
    call_of,
    leaf_dtype,
    sink,
    wrap,
)
from dpllm.ghost.weights_check import State

logger = logging.getLogger(__name__)

_FAILURES = (TorchDynamoException, FailOnRecompileLimitHit, LeafError)
_COMPILED: dict[tuple[Any, str], Any] = {}
_MOST_SHAPES = 256  # of arguments whose leaves are remembered

Backend = tuple[Any, dict[str, Any]]
"""The backend and the other arguments of ``torch.compile``."""

Dim = int | str | tuple[Any, int]
"""An entry of a shape: a constant, "rows and tokens", or an argument's name and its dimension of the same size."""


@dataclass(frozen=True)
class CompiledBlocks:
    """The state of compilation.

    Attributes:
        blocks: paths of the compiled blocks.
        eager: why each remaining block is not compiled, by its path.
        graphs: the number of graphs traced so far.
    """

    blocks: Sequence[str] = ()
    eager: Mapping[str, str] = field(default_factory=dict)
    graphs: int = 0

    def __str__(self) -> str:
        """Return one line; blocks with the same reason are grouped."""
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.eager.items():
            by_reason.setdefault(reason, []).append(path)
        eager = "; ".join(
            f"{', '.join(paths[:3])}{', …' if len(paths) > 3 else ''}: {why}" for why, paths in by_reason.items()
        )
        text = f"{len(self.blocks)} blocks are compiled, in {self.graphs} graphs"
        return f"{text}; {len(self.eager)} stay eager ({eager})" if eager else text


class _Misfit(Exception):
    """A block whose leaves cannot be planned."""


@dataclass
class _Tap:
    """One use of a parameter in a block, or of a linear layer's weight and bias.

    Attributes:
        module: the module that uses it.
        name: the parameter's name in the module; "" for a linear layer.
        site: receives the gradients of the leaves.
        dims: the dimensions of the module's input.
        dtype: the dtype of the input, or of its cast.
    """

    module: Any
    name: str
    site: Any
    dims: tuple[Dim, ...]
    dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The parameter, or the weight of the linear layer."""
        weight: Tensor = self.module._parameters[self.name or "weight"]
        return weight

    def shape(self, shapes: Mapping[Any, torch.Size]) -> tuple[int, ...]:
        """Return the shape of the module's input, given the shapes of the block's arguments."""
        return tuple([_number(dim, shapes) for dim in self.dims])

    def leaves(self, call: Call, shapes: Mapping[Any, torch.Size]) -> list[Tensor]:
        """Return its leaves, which take no memory: the copies, or a linear layer's input and output."""
        weight, shape = self.weight, self.shape(shapes)
        zero = _zero(weight.dtype if self.name else self.dtype, weight.device)
        if self.name:
            return [zero.expand(self.site.shape_of_copies(call, weight, shape))]
        outputs = weight.shape[1 if self.site.is_transposed else 0]
        return [zero.expand(shape), zero.expand(*shape[:-1], outputs)]


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class _Plan:
    """The taps of a block, and the leaves that they need.

    Attributes:
        taps: in the order of their leaves.
        uses: the names of the parameters that they use.
    """

    def __init__(self, taps: list[_Tap]) -> None:
        self.taps, self.uses = taps, [target.name for tap in taps for target in tap.site.targets]
        # By the shapes that they depend on, and the taps whose input has not the rows first.
        self._known: dict[tuple, tuple[list[Tensor], list[_Tap]]] = {}

    def leaves(self, call: Call, shapes: Mapping[Any, torch.Size]) -> list[Tensor]:
        """Return tensors shaped like the leaves, given the shapes of the block's arguments."""
        first = self.taps[0].weight
        key = call.rows, bool(call.packed.lengths), first.dtype, first.device, *shapes.items()
        if key not in self._known:
            if len(self._known) == _MOST_SHAPES:
                self._known.clear()
            others = [tap for tap in self.taps if tap.shape(shapes)[0] != call.rows]
            self._known[key] = [leaf for tap in self.taps for leaf in tap.leaves(call, shapes)], others
        leaves, others = self._known[key]
        for tap in others:
            call.note(tap.shape(shapes), *tap.site.targets)
        return leaves

    def receive(self, hand: Hand, grads: Sequence[Tensor | None]) -> None:
        """Pass the gradients of all leaves to the taps."""
        arrived = iter(grads)
        for tap in self.taps:
            x, grad = None if tap.name else next(arrived), next(arrived)
            hand.flattens = False  # each tap for itself
            if grad is not None:  # otherwise the loss does not depend on it
                tap.site.receive(hand, grad, *(() if tap.name else (x,)))


class _Block:
    """One block: its compiled forward, and the taps of its modules.

    Raises:
        _Misfit: a module whose taps do not fit in a graph.
    """

    def __init__(self, owner: Blocks, path: str, module: nn.Module, backend: Backend) -> None:
        self._owner, self.path, self.module, self.kind = owner, path, module, type(module)
        self._plans: dict[torch.dtype | None, _Plan] = {}  # by the dtype of autocast
        if has_own_forward(module):
            raise _Misfit("has its own forward")
        self._sites = {inner: sites for inner in module.modules() if (sites := owner.sites_of(inner))}
        key = self.kind, repr(backend)
        if key not in _COMPILED:
            _COMPILED[key] = torch.compile(self.kind.forward, fullgraph=True, backend=backend[0], **backend[1])
        self._compiled = _COMPILED[key]

    @property
    def is_planned(self) -> bool:
        """Return whether the block was called, so that its leaves are known."""
        return bool(self._plans)

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the block's forward, compiled during a call of the model."""
        owner, call = self._owner, call_of(self._owner.host, self.path)
        if call is None or call.place is not None or call.poisoned_B is not None or owner.is_eager(self, call):
            return forward(*args, **kwargs)
        args, kwargs, cast = without_cache(args), without_cache(kwargs), owner.autocast
        before = counters["stats"]["unique_graphs"]
        try:
            if cast not in self._plans:
                self._plans[cast] = self._plan(forward, args, kwargs)
            plan = self._plans[cast]
            self._set_ports(plan, call, args, kwargs)
            output = self._compiled(self.module, *args, **kwargs)
        except (_Misfit, *_FAILURES) as error:
            owner.fail(self, call, error)
        else:
            owner.graphs += counters["stats"]["unique_graphs"] - before
            if call.host.in_forward:
                call.host.uses.update(plan.uses)
            return output
        finally:
            for inner in self._sites:
                inner.__dict__.pop("_tap_port", None)
        return forward(*args, **kwargs)

    def _plan(self, forward: Callable[..., Any], args: tuple, kwargs: dict) -> _Plan:
        """Run the block without gradients, on copies of its tensors, to record its modules' input shapes."""
        taps: dict[nn.Module, list[_Tap]] = {}
        shapes, state = _shapes(args, kwargs), State(self._owner.device, self.module)

        def note(inner: nn.Module, args: tuple, kwargs: dict) -> None:
            x, path = next(iter((*args, *kwargs.values()))), self._owner.path_of(inner)
            dims = tuple(_symbol(path, i, x.shape, shapes) for i in range(x.ndim))
            if inner in taps:
                raise _Misfit(f"{path} is called twice")
            dtype = leaf_dtype(x.device, x.dtype)
            taps[inner] = [_Tap(inner, name, site, dims, dtype) for name, site in self._sites[inner].items()]

        handles = []
        try:
            for inner in self._sites:
                inner.__dict__["_tap_port"] = PLAIN  # so that no use is counted
                handles.append(inner.register_forward_pre_hook(note, with_kwargs=True))
            with torch.no_grad():
                forward(*_copied(args), **_copied(kwargs))
        finally:
            state.restore()
            for handle in handles:
                handle.remove()
        return _Plan([tap for of_module in taps.values() for tap in of_module])

    def _set_ports(self, plan: _Plan, call: Call, args: tuple, kwargs: dict) -> None:
        """Give each tapped module its leaves, whose gradients go to the module's sites."""
        with_grad = torch.is_grad_enabled()
        for inner in self._sites:
            inner.__dict__["_tap_port"] = {} if with_grad else PLAIN
        if not (with_grad and plan.taps):
            return
        leaves = sink(call.anchor, Hand(call, plan.receive), plan.leaves(call, _shapes(args, kwargs)))
        place = 0
        for tap in plan.taps:
            held = tap.module._parameters
            if tap.name:
                tap.module.__dict__["_tap_port"][tap.name] = leaves[place], held[tap.name].detach()
                place += 1
            else:
                bias = held["bias"]
                port = [*leaves[place : place + 2], held["weight"].detach(), None if bias is None else bias.detach()]
                tap.module.__dict__["_tap_port"] = port
                place += 2


def _shapes(args: tuple, kwargs: dict) -> dict[Any, torch.Size]:
    named = (*enumerate(args), *kwargs.items())
    return {name: value.shape for name, value in named if isinstance(value, Tensor) and value.ndim}


def _copied(value: Any) -> Any:
    """Return nested arguments with copied tensors, since a block may write to them."""
    return value.clone() if isinstance(value, Tensor) else rebuilt(value, _copied)


def _symbol(path: str, i: int, shape: torch.Size, shapes: Mapping[Any, torch.Size]) -> Dim:
    """Return where the size of a module's input dimension i comes from; rows and tokens differ between calls."""
    if i >= 2 or i == len(shape) - 1:
        return shape[i]
    for name, given in shapes.items():
        if i < len(given) and given[i] == shape[i]:
            return name, i
    first = next(iter(shapes.values()), torch.Size())
    if i == 0 and first[:2].numel() == shape[0]:
        return "rows and tokens"
    raise _Misfit(f"{path} has an input of shape {tuple(shape)}, but the block has one of shape {tuple(first)}")


def _number(dim: Dim, shapes: Mapping[Any, torch.Size]) -> int:
    if isinstance(dim, int):
        return dim
    if isinstance(dim, str):
        return next(iter(shapes.values()))[:2].numel()
    if dim[0] not in shapes:
        raise LeafError(f"the block is called without its argument {dim[0]}")
    return shapes[dim[0]][dim[1]]


class Blocks:
    """The blocks of one model.

    Args:
        model: the model.
        host: the clipper, see `dpllm.ghost.taps.Host`.
        ladder: the taps of the model.

    Attributes:
        graphs: the number of graphs traced so far.
        device: the model's device.
    """

    def __init__(self, model: nn.Module, host: Host, ladder: Ladder) -> None:
        """Find the blocks, without compiling them."""
        self.host, self.graphs, self.device = host, 0, torch.device("cpu")
        self._ladder, self._modules = ladder, {m: path for path, m in model.named_modules()}
        lists = {path: m for m, path in self._modules.items() if isinstance(m, nn.ModuleList)}
        inner = {p for p in lists for q in lists if p != q and p.startswith(f"{q}." if q else "")}
        self._lists = {path: m for path, m in lists.items() if path not in inner}
        self._wish: Backend | None = None
        self._own: dict[nn.Module, Backend] = {}  # of the user
        self._taken: list[tuple[nn.Module, str, Any]] = []
        self._blocks: list[_Block] = []
        self._eager: dict[str, str] = {}  # reasons by path
        self._failed: dict[type, tuple[_Block, Call]] = {}
        self._is_attached, self._is_told, self._keeps_buffers = True, True, False

    def compile(self, backend: Any, options: dict[str, Any]) -> None:
        """Compile all blocks from the next loss on, with the arguments of ``torch.compile``."""
        self.detach()
        self._wish, self._is_told, self._is_attached = (backend, options), False, False
        self._failed.clear()

    @property
    def compiled(self) -> CompiledBlocks:
        """The current state of compilation."""
        paths = tuple(b.path for b in self._blocks if b.is_planned and b.path not in self._eager)
        return CompiledBlocks(paths, dict(self._eager), self.graphs)

    @property
    def autocast(self) -> torch.dtype | None:
        """The autocast dtype; None if autocast is off."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def tell(self) -> None:
        """Log the state of compilation once."""
        if not self._is_told and self._is_attached:
            self._is_told = True
            logger.info("%s", self.compiled)

    # ------------------------------------------------------------------------------- blocks of the user

    def take_over(self) -> None:
        """Replace graphs that the user compiled, since they may have been traced without the taps."""
        name = "_compiled_call_impl"
        children = [m for blocks in self._lists.values() for m in blocks if m is not None and m not in self._modules]
        found = [m for m in (*self._modules, *children) if name in m.__dict__ or type(m) is OptimizedModule]
        graphs = [(m, m, name, m.__dict__[name]) for m in found if m.__dict__.get(name) is not None]
        for wrapper in [m for m in found if type(m) is OptimizedModule]:
            inner: Any = wrapper._orig_mod
            if wrapper.forward != inner.__call__:
                graphs.append((wrapper, inner, "forward", wrapper.forward))
        for module, inner, name, graph in graphs:
            if any(p.requires_grad for p in inner.parameters()):
                self._taken.append((module, name, graph))
                module.__dict__[name] = inner.__call__ if inner is not module else None
                self._own[inner] = _backend_of(graph), {}
                self._is_attached = self._is_told = False

    # ------------------------------------------------------------------------------------------- attaching

    def attach(self) -> None:
        """Switch the blocks to compiled forwards, but not within a loss: a recomputation must repeat the first run."""
        if self._is_attached:
            return
        self.detach()
        self._is_attached, self._eager = True, {}
        self.device = next(iter(self._ladder.holders[0].own.values())).parameter.device
        candidates = dict(self._candidates())
        for module in self._own:
            path = self.path_of(module)
            if not any(f"{path}.".startswith(f"{block}.") for block in candidates):
                self._eager[path] = "was compiled by the user and is not a block"
        for path, module in candidates.items():
            if (backend := self._own.get(module, self._wish)) is not None:
                try:
                    self._blocks.append(_Block(self, path, module, backend))
                except _Misfit as misfit:
                    self._eager[path] = str(misfit)
        for block in self._blocks:
            wrap(block.module, "block", block.run)
        if self._blocks and not self._keeps_buffers:
            self._keeps_buffers = True
            _keep_buffers(1)

    def _candidates(self) -> Iterator[tuple[str, nn.Module]]:
        for path, blocks in self._lists.items():
            for name, child in blocks._modules.items():
                at = f"{path}.{name}" if path else name
                if isinstance(child, OptimizedModule):
                    at, child = f"{at}._orig_mod", child._orig_mod
                if child is not None and any(True for _ in child.children()):
                    yield at, child

    def path_of(self, module: nn.Module) -> str:
        """Return a module's path."""
        return self._modules.get(module, type(module).__name__)

    def sites_of(self, module: nn.Module) -> Mapping[str, LinearSite | SpreadSite]:
        """Return a module's sites by parameter; the key "" stands for a linear layer.

        Raises:
            _Misfit: its taps do not fit in a graph.
        """
        held, why = vars(module), ""
        sites = held.get("_tap_sites", {})
        if any(hasattr(p, "ds_id") for p in module._parameters.values()):
            why = "has parameters that ZeRO-3 gathers"
        elif "_tap_row_by_row" in held or self.path_of(module) in self._ladder.splits:
            why = "runs row by row"
        elif any(isinstance(site, TableSite) for site in sites.values()):
            why = "holds a table"
        elif "_tap_functions" in held or ("_tap_sites" not in held and self._ladder.touches(module)):
            why = "passes parameters to functions"
        elif not sites and self._ladder.holds(module):
            why = "holds experts"
        if why:
            raise _Misfit(f"{self.path_of(module)} {why}")
        return sites

    # --------------------------------------------------------------------------------------------- running

    def is_eager(self, block: _Block, call: Call) -> bool:
        """Return whether the block runs eagerly: it does not fit, or its class failed after this call began."""
        failed = self._failed.get(block.kind)
        if failed is None:
            return block.path in self._eager
        return failed[0] is block or failed[1] is not call

    def fail(self, block: _Block, call: Call, error: Exception) -> None:
        """Run a misfit block eagerly from now on, or its whole class if that cannot be compiled."""
        if isinstance(error, _Misfit):
            self._eager[block.path] = str(error)
            return
        if block.kind in self._failed:
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        text = next((line for line in lines if LeafError.__name__ in line), lines[0])
        reason = f"could not be compiled ({text[:200]})"
        self._failed[block.kind] = block, call
        self._eager |= {one.path: reason for one in self._blocks if one.kind is block.kind}
        logger.warning("Blocks of the class %s run eagerly from now on: one %s.", block.kind.__name__, reason)

    def detach(self) -> None:
        """Restore the blocks' classes; they are compiled again later."""
        for block in self._blocks:
            if vars(block.module).pop("_tap_block", None) is not None and hasattr(type(block.module), "_tap_kind"):
                block.module.__class__ = block.kind
        self._blocks = []
        self._is_attached = self._wish is None and not self._own

    def remove(self) -> None:
        """Restore the blocks' classes and the user's graphs."""
        self.detach()
        for module, name, graph in reversed(self._taken):
            module.__dict__[name] = graph
        self._taken, self._own, self._wish, self._is_attached = [], {}, None, True
        if self._keeps_buffers:
            self._keeps_buffers = False
            _keep_buffers(-1)


def _backend_of(graph: Any) -> Any:
    """Return the backend of an object that ``torch.compile`` returned."""
    for cell in getattr(graph, "__closure__", None) or ():
        callback = getattr(cell.cell_contents, "callback", None)
        if callback is not None and isinstance(cell.cell_contents, OptimizeContext):
            return innermost_backend(callback)
    return "inductor"


_KEEPING: list[Any] = [0, True]  # models with compiled blocks, and the setting before


def _keep_buffers(more: int) -> None:
    """Stop inductor from reusing graph buffers while compiled blocks exist, so that a graph can run backward twice."""
    config = torch._functorch.config
    if not _KEEPING[0]:
        _KEEPING[1] = config.donated_buffer
    _KEEPING[0] += more
    config.donated_buffer = False if _KEEPING[0] else _KEEPING[1]
