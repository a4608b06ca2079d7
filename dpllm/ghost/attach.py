"""Attaching taps to a model: which module gets which subclass, and how far up the ladder a parameter has to go.

For each trained parameter, the first of these that is exact is taken:

1. its module has a class whose computation is known (linear layers, tables, norm layers, experts, some layers of
   PEFT): it is *tapped*;
2. a module hands it to ``F.linear`` or ``F.embedding``: these *functions* are tapped while the module runs;
3. the module that uses it runs *row by row*, with a copy of the parameter for each row;
4. so does the module around that one, and so on up to the model.

One pass without gradients, in the first call of the model, shows which module uses which parameter in which function.
Then values decide (`dpllm.ghost.weights_check`). What has no exact way here is clipped one unit at a time, by
`dpllm.ghost.PerUnitClipper`.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from dpllm.ghost import peft_taps
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.experts import (
    ExpertsRule,
    Stack,
    attach_partitioned,
    is_experts,
    is_wrapper,
    refuse_divided,
    train_adapters,
    train_experts,
)
from dpllm.ghost.functions import Functions, takes
from dpllm.ghost.row_split import Copied, Split
from dpllm.ghost.taps import (
    Host,
    LinearSite,
    Site,
    SpreadSite,
    TableSite,
    TapEmbedding,
    TapLinear,
    Target,
    call_of,
    conv1d_forward,
    spread_class,
    subclass,
)

TAPPED, AS_FUNCTION, ROW_BY_ROW = 0, 1, 2
"""Rungs of the ladder; each rung above ``ROW_BY_ROW`` takes the module around the one before."""

_FACT_NAMES = (
    "dtype device shape ndim requires_grad is_leaf grad grad_fn is_cuda layout data size dim numel "
    "nelement stride detach is_floating_point is_complex is_contiguous element_size itemsize nbytes "
    "data_ptr get_device names untyped_storage storage_offset is_sparse is_quantized is_meta is_nested "
    "_backward_hooks "
)
_FACTS = frozenset(_FACT_NAMES.split())
"""What functions and attributes of a tensor tell about it, without computing with its values."""
_NO_SPREAD = (nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.modules.conv._ConvNd, nn.RNNBase)


@dataclass(frozen=True)
class Holder:
    """A module that directly holds trained parameters: its path, and the parameters by their names in it."""

    path: str
    module: nn.Module
    own: Mapping[str, Target]


@dataclass(frozen=True)
class Seen:
    """A use of a parameter: the path of the innermost module that ran, and whether its function can be tapped."""

    at: str
    served: bool


def is_transposed(module: nn.Module) -> bool:
    """Whether the module is transformers' ``Conv1D``, whose weight is (inputs, outputs)."""
    kind = getattr(type(module), "_tap_kind", type(module))
    return bool(kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")


def is_linear(module: nn.Module) -> bool:
    """Whether the forward pass is that of ``nn.Linear`` or ``Conv1D``, also in a subclass that does not override it."""
    kind = getattr(type(module), "_tap_kind", type(module))
    return is_transposed(module) or (issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward)


def has_own_forward(module: nn.Module) -> bool:
    """Whether another ``forward`` was put on this module than that of its class, which then says nothing about it."""
    return "forward" in vars(module)


class Ladder:
    """The taps of one model, and the rung of each parameter.

    Args:
        model: the model.
        host: the clipper.
        parameters: the trained parameters by name.

    Attributes:
        rungs: of parameters by name; 0 for all others.
        sites: of each parameter, by its name.
        splits: of the modules that run row by row, by their paths.

    Raises:
        GhostError: a parameter in no module that has a forward pass, or an option of a table that couples rows.
    """

    def __init__(self, model: nn.Module, host: Host, parameters: Mapping[str, nn.Parameter]) -> None:
        """Find the modules that hold the parameters; nothing is changed yet."""
        self._model, self._host = model, host
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._paths = {id(module): path for path, module in reversed(self._modules.items())}
        self._targets = {id(p): Target(name, p) for name, p in parameters.items()}
        self.holders = list(self._find_holders())
        for holder in self.holders:
            if isinstance(holder.module, nn.Embedding):
                refuse_coupled_options(holder.path, holder.module)
            if is_experts(holder.module):
                refuse_divided(holder.path, holder.module)
            self._owner(holder.path)
        self.rungs: dict[str, int] = {}
        self.sites: dict[str, list[Site | Stack]] = {}
        self.splits: dict[str, Split] = {}
        self.functions: list[Functions] = []
        self.experts: list[ExpertsRule] = []
        self._uses: dict[str, set[Seen]] = {}
        self._expected: Counter[str] = Counter()  # uses that no tap sees, and that somebody hands over
        self._undo: dict[int, tuple[nn.Module, type[nn.Module], Any]] = {}

    def _find_holders(self) -> Iterator[Holder]:
        seen: set[int] = set()
        for path, module in self._modules.items():
            own = {name: self._targets[id(p)] for name, p in module._parameters.items() if id(p) in self._targets}
            if own and id(module) not in seen:
                seen.add(id(module))
                yield Holder(path, module, own)

    def _owner(self, path: str) -> str:
        """Return the path of the nearest module with a forward pass, from the one at ``path`` on."""
        at = path
        while type(self._modules[at]).forward is nn.Module.forward and not has_own_forward(self._modules[at]):
            if not at:
                names = [name for one in self.holders if one.path == path for name in one.own]
                raise NoRuleError(f"{path}: no module around the parameters {names} has a forward pass.")
            at = at.rpartition(".")[0]
        return at

    # ------------------------------------------------------------------------------------------- discovery

    def discover(self, run: Callable[[], Any]) -> Any:
        """Run the model without gradients, and note which module hands which parameter to which function."""
        stack: list[str] = []

        def enter(module: nn.Module, _: Any) -> None:
            stack.append(self._paths.get(id(module), stack[-1] if stack else ""))

        def leave(*_: Any) -> None:
            stack.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            with torch.no_grad(), warnings.catch_warnings(), _Discover(self._note, stack):
                warnings.simplefilter("ignore")
                return run()
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, func: Any, args: Any, kwargs: Any, at: str) -> None:
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    target = self._target_of(tensor)
                    if target is not None:
                        self._uses.setdefault(target.name, set()).add(Seen(at, takes(func, args, kwargs, tensor)))

    def _target_of(self, tensor: Tensor) -> Target | None:
        target = self._targets.get(id(tensor))
        if target is None and isinstance(tensor, nn.Parameter):  # FSDP2 puts another one in its place
            for holder in self.holders:
                for name, own in holder.own.items():
                    if holder.module._parameters.get(name) is tensor:
                        return own
        return target

    # ---------------------------------------------------------------------------------------------- swapping

    def attach(self) -> None:
        """Give every module the subclass that its parameters' rungs ask for."""
        tapped = self._tap_peft()
        functions: dict[str, dict[str, Target]] = {}
        splits: dict[str, dict[str, Target]] = {}
        of_experts = self._tap_experts()
        for holder in self.holders:
            own = holder.own.values()
            if self.touches(holder.module) or any(self._rung(t) != TAPPED or t.name in of_experts for t in own):
                continue
            if self._tap(holder):
                for target in own:
                    tapped.setdefault(target.name, set()).add(holder.path)
        for target in self._targets.values():
            if target.name in of_experts:
                continue
            rung, uses = self._rung(target), self._uses.get(target.name, set())
            if rung >= ROW_BY_ROW and not uses:  # by a function that no mode sees
                homes = [holder.path for holder in self.holders if target in holder.own.values()]
                uses = {Seen(self._owner(path), served=False) for path in homes}
            for use in uses:
                if use.at in tapped.get(target.name, ()):
                    continue
                if use.served and rung <= AS_FUNCTION:
                    functions.setdefault(use.at, {})[target.name] = target
                else:
                    splits.setdefault(self._above(use.at, rung - ROW_BY_ROW), {})[target.name] = target
        for at, targets in functions.items():
            self._wrap_functions(at, targets.values())
        for at, targets in splits.items():
            self._wrap_split(at, targets.values())

    def _rung(self, target: Target) -> int:
        return self.rungs.get(target.name, TAPPED)

    def _above(self, path: str, steps: int) -> str:
        path = self._owner(path)
        for _ in range(max(steps, 0)):
            if not path:
                break
            path = self._owner(path.rpartition(".")[0])
        return path

    def climb(self, targets: Iterable[Target]) -> bool:
        """Take the next rung for these parameters; return whether one of them had one left."""
        climbed = False
        for target in targets:
            rung = self._rung(target)
            uses = self._uses.get(target.name, set())
            places = [use.at for use in uses] or [h.path for h in self.holders if target in h.own.values()]
            if rung >= ROW_BY_ROW and not any(self._above(at, rung - ROW_BY_ROW) for at in places):
                continue
            following = rung + 1
            if following == AS_FUNCTION and not any(use.served for use in uses):
                following = ROW_BY_ROW
            self.rungs[target.name], climbed = following, True
        return climbed

    def _tap(self, holder: Holder) -> bool:
        """Tap a module whose class tells what it computes; return whether it does."""
        module, own = holder.module, holder.own
        kind = type(module)
        if has_own_forward(module):
            return False
        if own.keys() <= {"weight", "bias"} and (is_transposed(module) or isinstance(module, nn.Linear)):
            frozen = {id(p) for p in module._parameters.values() if p is not None and not p.requires_grad}
            site = LinearSite(own.get("weight"), own.get("bias"), is_transposed(module), frozen)
            if is_transposed(module):
                self._put(module, subclass(kind, "linear", forward=conv1d_forward), site)
            else:
                self._put(module, subclass(kind, "linear", TapLinear), site)
            return True
        if isinstance(module, nn.Embedding) and own.keys() == {"weight"}:
            self._put(module, subclass(kind, "table", TapEmbedding), TableSite(own["weight"], module.padding_idx))
            return True
        leaf = not any(True for _ in module.children())
        computes = kind.forward is not nn.Module.forward and not isinstance(module, _NO_SPREAD)
        if not (leaf and computes and all(len(target.shape) == 1 for target in own.values())):
            return False
        self._put(module, spread_class(kind, tuple(own)), None)
        module.__dict__["_tap_sites"] = {name: SpreadSite(target) for name, target in own.items()}
        for site in module.__dict__["_tap_sites"].values():
            self.sites.setdefault(site.weight.name, []).append(site)
        return True

    def _tap_peft(self) -> dict[str, set[str]]:
        """Tap layers of PEFT; return the paths where parameters are used by them, by the parameters' names."""
        tapped: dict[str, set[str]] = {}
        for path, module in self._modules.items():
            found = None if self.touches(module) else peft_taps.tap(module, self._trained_at_first)
            if found is None:
                continue
            kind, sites = found
            self._put(module, kind, None)
            module.__dict__["_tap_sites"] = sites
            for site in sites.values():
                for target in site.targets:
                    self.sites.setdefault(target.name, []).append(site)
                    tapped.setdefault(target.name, set()).add(path)
        return tapped

    def _trained_at_first(self, value: Any) -> Target | None:
        target = self._targets.get(id(value))
        return target if target is not None and self._rung(target) == TAPPED else None

    def _tap_experts(self) -> set[str]:
        """Tap experts that are computed through transformers' interface; return the names of their parameters."""
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
                except NoRuleError:  # another way is exact for it
                    continue
                if rule not in self.experts:
                    self.experts.append(rule)
                served |= {target.name for target in own.values()}
        for rule in self.experts:
            for target, stack in rule.counted():
                self.sites.setdefault(target.name, []).append(stack)
        self.experts += attach_partitioned(self._model, self._host)
        return served

    def _put(self, module: nn.Module, kind: type[nn.Module], site: Site | None) -> None:
        """Give a module a subclass of its class."""
        if vars(module).get("_tap_host", self._host) is not self._host:
            raise another_clipper(self._paths[id(module)] or "The model")
        self._undo.setdefault(id(module), (module, type(module), vars(module).get("forward")))
        module.__class__ = kind
        module.__dict__["_tap_host"], module.__dict__["_tap_path"] = self._host, self._paths[id(module)]
        if site is not None:
            module.__dict__["_tap_site"] = site
            for target in site.targets:
                self.sites.setdefault(target.name, []).append(site)

    def _wrap_functions(self, at: str, targets: Iterable[Target]) -> None:
        held = [
            (target, holder.module, name)
            for target in targets
            for holder in self.holders
            for name, own in holder.own.items()
            if own is target
        ]
        functions = Functions(self._host, held)

        def run(forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            call = call_of(self._host, at)
            if call is None:
                return forward(*args, **kwargs)
            with functions.mode(call):
                return forward(*args, **kwargs)

        self._wrap(at, "functions", run)
        self.functions.append(functions)

    def _wrap_split(self, at: str, targets: Iterable[Target]) -> None:
        copied = []
        for target in targets:
            places = [(h.module, name) for h in self.holders for name, own in h.own.items() if own is target]
            site = SpreadSite(target)
            copied.append(Copied(site, places))
            self.sites.setdefault(target.name, []).append(site)
        split = self.splits[at] = Split(self._host, at, copied)
        self._wrap(at, "row_by_row", split.run)

    def _wrap(self, at: str, way: str, run: Callable[[Callable[..., Any], tuple, dict], Any]) -> None:
        """Let a module's forward run within ``run``."""
        module = self._modules[at]
        own, kind = vars(module).get("forward"), type(module)
        self._undo.setdefault(id(module), (module, kind, own))
        if own is not None:
            module.__dict__.setdefault("_tap_forward", own)  # for copies of the module
            module.__class__ = subclass(kind, "own_forward")
            module.__dict__["forward"] = lambda *args, **kwargs: run(own, args, kwargs)
            return
        attribute = f"_tap_{way}"

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (wrapper := vars(self).get(attribute)) is None:  # somebody kept this forward for longer
                return kind.forward(self, *args, **kwargs)
            return wrapper(functools.partial(kind.forward, self), args, kwargs)

        module.__class__ = subclass(kind, way, forward=forward)
        module.__dict__[attribute] = run

    def spread(self) -> list[Target]:
        """Return the parameters of norm layers that are read as copies."""
        return [site.weight for sites in self.sites.values() for site in sites if isinstance(site, SpreadSite)]

    def used_once(self, parameter: nn.Parameter) -> bool:
        """Whether the calls of the model since `begin_uses` used the parameter once."""
        name = self.target_of(parameter).name
        uses = self._expected[name] + sum(site.uses for site in self.sites.get(name, ()))
        return uses + sum(functions.uses_of(name) for functions in self.functions) == 1

    def expect(self, parameter: nn.Parameter) -> None:
        """Count a use of a parameter that no tap sees."""
        self._expected[self.target_of(parameter).name] += 1

    def target_of(self, parameter: nn.Parameter) -> Target:
        """Return a trained parameter with its name."""
        return self._targets[id(parameter)]

    def begin_uses(self) -> None:
        """Forget the uses that were counted."""
        self._expected.clear()
        for sites in (*self.sites.values(), *(functions.sites.values() for functions in self.functions)):
            for site in sites:
                site.uses = 0

    def touches(self, module: nn.Module) -> bool:
        """Whether a module has another forward than before."""
        return id(module) in self._undo

    def holds(self, module: nn.Module) -> bool:
        """Whether a module directly holds trained parameters."""
        return any(holder.module is module for holder in self.holders)

    def detach(self) -> None:
        """Give every module its class back."""
        for module, kind, forward in self._undo.values():
            module.__class__ = kind
            for name in [name for name in vars(module) if name.startswith("_tap_")]:
                del module.__dict__[name]
            if forward is not None:
                module.__dict__["forward"] = forward
        for rule in self.experts:
            rule.remove()
        self._undo, self.sites, self.splits, self.functions, self.experts = {}, {}, {}, [], []


def another_clipper(path: str) -> GhostError:
    """Return the error for a module that another clipper has taps in."""
    return GhostError(f"{path} has another clipper: call remove() on the one that is used no more.")


class _Discover(TorchFunctionMode):
    """Shows each function, with the path of the innermost module that runs, before it is called."""

    def __init__(self, note: Callable[[Any, Any, Any, str], None], stack: list[str]) -> None:
        super().__init__()
        self._show, self._stack = note, stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
        if name not in _FACTS:
            self._show(func, args, kwargs, self._stack[-1] if self._stack else "")
        return func(*args, **kwargs)


def refuse_coupled_options(path: str, table: nn.Embedding) -> None:
    """Refuse options of ``nn.Embedding`` under which a row's gradient depends on other rows or is not a plain sum."""
    if table.max_norm is not None:
        raise GhostError(f"{path}: max_norm rewrites the rows of the table that the batch looks up. Set max_norm=None.")
    if table.scale_grad_by_freq:
        raise NoRuleError(
            f"{path}: scale_grad_by_freq divides by counts over the whole batch, so a row's gradient depends on "
            "other rows. Set scale_grad_by_freq=False."
        )
