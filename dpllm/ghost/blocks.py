"""Compiled blocks: the forward passes of a model's layers as full graphs, with taps.

A block is a child of one of the outermost ``nn.ModuleList``s. Its class's forward is compiled once, so blocks of one
class share their graphs. A compiled graph has no side effect: the leaves of its taps are made just before it, inside
checkpoints and the hooks of FSDP2 (`dpllm.ghost.taps.Sink`). One pass without gradients shows their shapes.

Blocks that the user compiled are taken over until `Blocks.remove`: a graph of theirs would hide its taps.
"""

from __future__ import annotations

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

from dpllm.ghost.attach import Ladder
from dpllm.ghost.row_split import without_cache
from dpllm.ghost.taps import (
    PLAIN,
    Call,
    Hand,
    Host,
    LeafError,
    LinearSite,
    Sink,
    SpreadSite,
    call_of,
    leaf_dtype,
    subclass,
)

logger = logging.getLogger(__name__)

_FAILURES = (TorchDynamoException, FailOnRecompileLimitHit, LeafError)
_COMPILED: dict[tuple[Any, str], Any] = {}

Backend = tuple[Any, dict[str, Any]]
"""The backend and the other arguments of ``torch.compile``."""

Dim = int | str | tuple[Any, int]
"""An entry of a shape: a constant, "rows and tokens", or an argument's name and its dimension of the same size."""


@dataclass(frozen=True)
class CompiledBlocks:
    """What is compiled.

    Attributes:
        blocks: paths of the compiled blocks.
        eager: the reason of each block that is not, by its path.
        graphs: how many were traced so far.
    """

    blocks: Sequence[str] = ()
    eager: Mapping[str, str] = field(default_factory=dict)
    graphs: int = 0

    def __str__(self) -> str:
        """Say it in one line; blocks with the same reason are named once."""
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


class _Block:
    """One block: its class before, its compiled forward, and the sites of its modules."""

    def __init__(self, owner: Blocks, path: str, module: nn.Module, backend: Backend) -> None:
        self.owner, self.path, self.module, self.kind = owner, path, module, type(module)
        self.sites: dict[int, tuple[Any, dict[str, LinearSite | SpreadSite]]] = {}
        self.plans: dict[int, tuple[tuple[Dim, ...], torch.dtype]] = {}
        for inner in module.modules():
            reason, sites = owner.sites_of(inner)
            if reason:
                raise _Misfit(f"{owner.path_of(inner)} {reason}")
            if sites:
                self.sites[id(inner)] = inner, sites
        key = self.kind, repr(backend)
        if key not in _COMPILED:
            _COMPILED[key] = torch.compile(self.kind.forward, fullgraph=True, backend=backend[0], **backend[1])
        self.compiled = _COMPILED[key]

    # ------------------------------------------------------------------------------------------- planning

    def watch(self, misfits: dict[str, str]) -> Iterator[Any]:
        """Register hooks that note the shapes of the modules' inputs; yield their handles."""
        shapes: dict[Any, torch.Size] = {}
        seen: set[int] = set()

        def enter(_: Any, args: tuple, kwargs: dict) -> None:
            seen.clear()
            shapes.clear()
            shapes.update(_shapes(args, kwargs))

        def note(inner: nn.Module, args: tuple, kwargs: dict) -> None:
            if not shapes:  # called by another module than the block
                return
            x = next(iter((*args, *kwargs.values())))
            try:
                plan = tuple(_symbol(i, x.shape, shapes) for i in range(x.ndim)), x.dtype
                if id(inner) in seen or self.plans.setdefault(id(inner), plan) != plan:
                    raise _Misfit("is called twice")
            except _Misfit as misfit:
                misfits.setdefault(self.path, f"{self.owner.path_of(inner)} {misfit}")
            seen.add(id(inner))

        yield self.module.register_forward_pre_hook(enter, with_kwargs=True)
        yield self.module.register_forward_hook(lambda *_: shapes.clear())
        for inner, _ in self.sites.values():
            yield inner.register_forward_pre_hook(note, with_kwargs=True)

    # -------------------------------------------------------------------------------------------- running

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Run the block's forward, compiled where a call of the model runs."""
        call = call_of(self.owner.host, self.path)
        if call is None or call.place is not None or call.poisoned_B is not None or self.owner.is_eager(self, call):
            return self.kind.forward(self.module, *args, **kwargs)
        before = counters["stats"]["unique_graphs"]
        try:
            self._set_ports(call, args, kwargs)
            output = self.compiled(self.module, *without_cache(args), **without_cache(kwargs))
        except _FAILURES as error:
            self.owner.fail(self, call, error)
        else:
            self.owner.graphs += counters["stats"]["unique_graphs"] - before
            if call.host.in_forward:
                for key in self.plans:
                    for site in self.sites[key][1].values():
                        site.uses += 1
            return output
        finally:
            for inner, _ in self.sites.values():
                inner.__dict__.pop("_tap_port", None)
        return self.kind.forward(self.module, *args, **kwargs)

    def _set_ports(self, call: Call, args: tuple, kwargs: dict) -> None:
        """Give each tapped module its leaves; their gradients go to its sites."""
        if not torch.is_grad_enabled():
            for inner, _ in self.sites.values():
                inner.__dict__["_tap_port"] = PLAIN
            return
        shapes, like, hands, ports = _shapes(args, kwargs), [], [], []
        for key, (inner, sites) in self.sites.items():
            linear = sites.get("")
            port: Any = [] if linear is not None else {}
            inner.__dict__["_tap_port"] = port
            if key not in self.plans:
                continue
            dims, dtype = self.plans[key]
            shape = _numbers(dims, shapes)
            for name, site in sites.items():
                hands.append((site, Hand(call, site)))
                if isinstance(site, LinearSite):
                    weight, bias = (inner._parameters[p] for p in ("weight", "bias"))
                    width, dtype = weight.shape[1 if site.is_transposed else 0], leaf_dtype(weight.device, dtype)
                    port += [None if p is None else p.detach() for p in (weight, bias)]
                    like += [(shape, dtype, weight.device), ((*shape[:-1], width), dtype, weight.device)]
                else:
                    weight = inner._parameters[name].detach()
                    like.append((site.shape_of_copies(call, weight, shape), weight.dtype, weight.device))
                    port[name] = weight
            ports.append(port)
        if not like:
            return
        leaves = iter(Sink.apply(call.anchor, lambda grads: _receive(hands, grads), like))
        for port in ports:
            if isinstance(port, list):
                port[:0] = [next(leaves), next(leaves)]
            else:
                port.update({name: (next(leaves), weight) for name, weight in port.items()})


def _receive(hands: list[tuple[Any, Hand]], grads: Sequence[Tensor | None]) -> None:
    arrived = iter(grads)
    for site, hand in hands:
        own = [next(arrived) for _ in range(2 if isinstance(site, LinearSite) else 1)]
        if all(grad is not None for grad in own):  # otherwise it has no part in the loss
            site.receive(hand, *own)


def _shapes(args: tuple, kwargs: dict) -> dict[Any, torch.Size]:
    named = (*enumerate(args), *kwargs.items())
    return {name: value.shape for name, value in named if isinstance(value, Tensor) and value.ndim}


def _symbol(i: int, shape: torch.Size, shapes: Mapping[Any, torch.Size]) -> Dim:
    """Return where dimension i of a module's input has its size from: rows and tokens differ from call to call."""
    if i >= 2 or i == len(shape) - 1:
        return shape[i]
    for name, given in shapes.items():
        if i < len(given) and given[i] == shape[i]:
            return name, i
    first = next(iter(shapes.values()))
    if i == 0 and first[:2].numel() == shape[0]:
        return "rows and tokens"
    raise _Misfit(f"has an input of shape {tuple(shape)}, and the block one of shape {tuple(first)}")


def _numbers(dims: tuple[Dim, ...], shapes: Mapping[Any, torch.Size]) -> tuple[int, ...]:
    def number(dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        if isinstance(dim, str):
            return next(iter(shapes.values()))[:2].numel()
        if dim[0] not in shapes:
            raise LeafError(f"the block is called without its argument {dim[0]}")
        return shapes[dim[0]][dim[1]]

    return tuple(map(number, dims))


class Blocks:
    """The blocks of one model.

    Args:
        model: the model.
        host: the clipper, see `dpllm.ghost.taps.Host`.
        ladder: the taps of the model.

    Attributes:
        graphs: how many were traced so far.
        pending: whether blocks are to be compiled whose shapes are not known yet.
    """

    def __init__(self, model: nn.Module, host: Host, ladder: Ladder) -> None:
        """Find the blocks; nothing is compiled yet."""
        self.host, self.graphs, self.pending = host, 0, False
        self._cast: torch.dtype | None = None  # of autocast, when the shapes were noted
        self._ladder, self._modules = ladder, {id(m): (path, m) for path, m in model.named_modules()}
        lists = [path for path, m in self._modules.values() if isinstance(m, nn.ModuleList)]
        self._lists = [p for p in lists if not any(p.startswith(f"{q}." if q else "") for q in lists if q != p)]
        self._wish: Backend | None = None
        self._own: dict[int, Backend] = {}  # of the user, by the id of a module
        self._taken: list[tuple[nn.Module, str, Any]] = []
        self._blocks: list[_Block] = []
        self._misfits: dict[str, str] = {}
        self._failed: dict[type, tuple[_Block, Call, str]] = {}
        self._is_told, self._keeps_buffers = True, False

    def compile(self, backend: Any, options: dict[str, Any]) -> None:
        """Compile all blocks from the next loss on; the arguments are those of ``torch.compile``."""
        self.detach()
        self._wish, self._is_told = (backend, options), False
        self._failed.clear()
        self.pending = True

    @property
    def compiled(self) -> CompiledBlocks:
        """What is compiled now."""
        eager = self._misfits | {b.path: self._failed[b.kind][2] for b in self._blocks if b.kind in self._failed}
        return CompiledBlocks(tuple(b.path for b in self._blocks if b.path not in eager), eager, self.graphs)

    def tell(self) -> None:
        """Log, once, what is compiled."""
        if not self._is_told and not self.pending:
            self._is_told = True
            logger.info("%s", self.compiled)

    # ------------------------------------------------------------------------------- blocks of the user

    def take_over(self) -> None:
        """Set graphs aside that the user compiled, as they may have been traced before the taps were there."""
        lists = [self._at(path)._modules.values() for path in self._lists]
        for module in (*(m for _, m in self._modules.values()), *(m for one in lists for m in one)):
            if module is None:
                continue
            name = "_compiled_call_impl"
            inner, graph = module, module.__dict__.get(name)
            if isinstance(module, OptimizedModule):
                inner, name = module._orig_mod, "forward"
                graph = None if module.forward == inner.__call__ else module.forward
            if graph is None or not any(p.requires_grad for p in inner.parameters()):
                continue
            self._taken.append((module, name, graph))
            module.__dict__[name] = inner.__call__ if inner is not module else None
            self._own[id(inner)] = _backend_of(graph), {}
            self.pending, self._is_told = True, False

    def have_to_be_planned(self) -> bool:
        """Whether dtypes or shapes of the blocks' leaves are not known for this call of the model."""
        return self.pending or (bool(self._blocks) and self._cast != self._autocast())

    def _autocast(self) -> torch.dtype | None:
        device = next(iter(self._ladder.holders[0].own.values())).parameter.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _at(self, path: str) -> Any:
        return next(m for p, m in self._modules.values() if p == path)

    # -------------------------------------------------------------------------------------------- planning

    def plan(self, run: Callable[[], Any]) -> None:
        """Run the model without gradients to learn the shapes, and compile what fits."""
        self.detach()
        self.pending, self._misfits, self._cast = False, {}, self._autocast()
        handles: list[Any] = []
        candidates = list(self._candidates())
        for key, (path, _) in self._modules.items():
            if key in self._own and not any(f"{path}.".startswith(f"{block}.") for block, _ in candidates):
                self._misfits[path] = "was compiled by the user and is not a block"
        for path, module in candidates:
            backend = self._own.get(id(module), self._wish)
            if backend is None:
                continue
            try:
                self._blocks.append(_Block(self, path, module, backend))
            except _Misfit as misfit:
                self._misfits[path] = str(misfit)
        try:
            for block in self._blocks:
                handles += block.watch(self._misfits)
            run()
        finally:
            for handle in handles:
                handle.remove()
        for block in self._blocks:
            if block.sites and not block.plans:
                self._misfits.setdefault(block.path, "was not called")
        self._blocks = [block for block in self._blocks if block.path not in self._misfits]
        for block in self._blocks:
            block.module.__class__ = _compiled_class(block.kind)
            block.module.__dict__["_tap_block"] = block
        if self._blocks and not self._keeps_buffers:
            self._keeps_buffers = True
            _keep_buffers(1)

    def _candidates(self) -> Iterator[tuple[str, nn.Module]]:
        for path in self._lists:
            for name, child in self._at(path)._modules.items():
                at = f"{path}.{name}" if path else name
                if isinstance(child, OptimizedModule):
                    at, child = f"{at}._orig_mod", child._orig_mod
                if child is not None and any(True for _ in child.children()):
                    yield at, child

    def path_of(self, module: nn.Module) -> str:
        """Return the path of a module."""
        return self._modules[id(module)][0] if id(module) in self._modules else type(module).__name__

    def sites_of(self, module: nn.Module) -> tuple[str, dict[str, LinearSite | SpreadSite]]:
        """Return why a module's taps do not fit in a graph, or its sites by parameter; "" is that of a linear layer."""
        held = vars(module)
        if any(hasattr(p, "ds_id") for p in module._parameters.values()):
            return "has parameters that ZeRO-3 gathers", {}
        if "_tap_row_by_row" in held or self.path_of(module) in self._ladder.splits:
            return "runs row by row", {}
        if isinstance(held.get("_tap_site"), LinearSite):
            return "", {"": held["_tap_site"]}
        if "_tap_sites" in held:
            return "", held["_tap_sites"]
        if self._ladder.touches(module):
            return "holds a table" if "_tap_site" in held else "hands parameters to functions", {}
        return "holds experts" if self._ladder.holds(module) else "", {}

    # --------------------------------------------------------------------------------------------- running

    def is_eager(self, block: _Block, call: Call) -> bool:
        """Whether a block's class failed; in that call the blocks before keep their graphs, for checkpoints."""
        failed = self._failed.get(block.kind)
        return failed is not None and (failed[0] is block or failed[1] is not call)

    def fail(self, block: _Block, call: Call, error: Exception) -> None:
        """Let a class run eagerly from now on."""
        if block.kind in self._failed:
            return
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        text = next((line for line in lines if LeafError.__name__ in line), lines[0])
        reason = f"could not be compiled ({text[:200]})"
        self._failed[block.kind] = block, call, reason
        logger.warning("Blocks of the class %s run eagerly from now on: one %s.", block.kind.__name__, reason)

    def detach(self) -> None:
        """Give the blocks their classes back; they are compiled again later."""
        for block in self._blocks:
            if vars(block.module).pop("_tap_block", None) is not None and hasattr(type(block.module), "_tap_kind"):
                block.module.__class__ = block.kind
        self._blocks = []
        self.pending = self._wish is not None or bool(self._own)

    def remove(self) -> None:
        """Give blocks their classes back, and the user's graphs."""
        self.detach()
        for module, name, graph in reversed(self._taken):
            module.__dict__[name] = graph
        self._taken, self._own, self._wish, self.pending = [], {}, None, False
        if self._keeps_buffers:
            self._keeps_buffers = False
            _keep_buffers(-1)


def _compiled_class(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        block = self.__dict__.get("_tap_block")  # none: FSDP2 made a class of this one, and the clipper was removed
        return kind.forward(self, *args, **kwargs) if block is None else block.run(args, kwargs)

    return subclass(kind, "block", forward=forward)


def _backend_of(graph: Any) -> Any:
    """Return the backend of something that ``torch.compile`` made."""
    for cell in getattr(graph, "__closure__", None) or ():
        callback = getattr(cell.cell_contents, "callback", None)
        if callback is not None and isinstance(cell.cell_contents, OptimizeContext):
            return innermost_backend(callback)
    return "inductor"


_KEEPING: list[Any] = [0, True]  # models with compiled blocks, and the setting before


def _keep_buffers(more: int) -> None:
    """Let graphs be differentiated twice while there are compiled blocks: inductor may not reuse their buffers."""
    config = torch._functorch.config
    if not _KEEPING[0]:
        _KEEPING[1] = config.donated_buffer
    _KEEPING[0] += more
    config.donated_buffer = False if _KEEPING[0] else _KEEPING[1]
