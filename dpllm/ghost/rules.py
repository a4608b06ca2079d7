"""The choice of a rule for each module, and the modules that have no rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpllm.ghost import expert_adapters
from dpllm.ghost.call import Call, has_own_forward, tensors_of
from dpllm.ghost.embedding import EmbeddingRule, RelativeBiasRule, gives_relative_bias
from dpllm.ghost.errors import GhostError, NoRuleError
from dpllm.ghost.experts import ExpertsRule, Host, is_experts
from dpllm.ghost.linear import LinearRule, is_linear
from dpllm.ghost.norm import LayerNormRule, ScaleRule, offset_of
from dpllm.ghost.normalisation import recognised
from dpllm.ghost.origins import origins_of
from dpllm.ghost.refusals import coupling, is_fp8, is_packed, refuse_router_loss

After = Callable[[nn.Module, tuple, dict, Any, "int | None"], Any]

# Modules through which one row changes another row's loss or gradient, with the reason. Names, because most of them
# live in libraries that this package does not import; the independence of rows is also measured on the first batch
# (`book.Book`).
_COUPLED = (
    (r"(Lazy|Sync|Frozen)?_?BatchNorm.*", "batch statistics mix the rows; use layer or group normalisation"),
    (r"InstanceNorm.*", "running statistics mix the rows; use layer or group normalisation"),
)

_WITHOUT_RULE = {
    "LycorisLayer": "is a layer of PEFT's LoHa or LoKr: it draws a random number in every training pass, also with "
    "module_dropout=0, so the gradients of single rows cannot be recomputed",
    "BOFTLayer": "is a layer of PEFT's BOFT: it multiplies matrices that all rows share, which cannot be told apart by "
    "rows",
}
"""Base classes of PEFT's layers whose gradients per row have no rule, with the reason."""


@dataclass
class Site:
    """One module that holds trainable parameters.

    Attributes:
        path: the module's name within the model.
        module: the module whose forward pass uses the parameters.
        trainable: the parameters by their names within the module.
    """

    path: str
    module: nn.Module
    trainable: dict[str, nn.Parameter] = field(default_factory=dict)

    def holders(self) -> list[tuple[nn.Module, str]]:
        """Return the module that holds each parameter, and its name there."""
        places = (name.rpartition(".") for name in self.trainable)
        return [(self.module.get_submodule(inside), name) for inside, _, name in places]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, each once.

    Raises:
        GhostError: there is none, one is quantised or complex, or a hook changes or reads the gradient of one.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise GhostError(
            "The model has no trainable parameter. Set requires_grad on the parameters to train (for LoRA: wrap the "
            "model with peft.get_peft_model before)."
        )
    for name, parameter in parameters.items():
        if is_packed(parameter):
            raise GhostError(
                f"{name} is quantised ({type(parameter).__name__}) and trainable: the update of a weight in this form "
                "is rounded by the weights beside it, and it has no exact gradient. Freeze it "
                "(requires_grad_(False)), and train LoRA adapters on top of it."
            )
        if parameter.is_complex():
            raise GhostError(
                f"{name} has the dtype {parameter.dtype}, and norms, sums and noise are those of real numbers: its "
                "imaginary part would not be trained. Keep two real parameters, or one of the shape (..., 2), and use "
                "torch.view_as_complex; or freeze it."
            )
        if parameter._backward_hooks:
            raise GhostError(
                f"{name} has a hook on its gradient (Tensor.register_hook), and the clipped sum is formed without one: "
                "a hook that masks the gradient would have no effect. Remove the hook; instead of PEFT's CPT, which "
                "sets one, use prompt tuning."
            )
    return parameters


def two_passes_over_shards() -> GhostError:
    """Return the error for a sharded model that is to be clipped in two passes."""
    return GhostError(
        "Two backward passes (NormMethod(backward_passes=2)) need parameters that stay whole from the first to the "
        "second, and a process that holds a gradient of the whole model; this one's are sharded. Use "
        "NormMethod(backward_passes=1) with smaller microbatches, or a replicated model."
    )


def refuse_coupled_modules(model: nn.Module) -> None:
    """Raise `GhostError` for a module through which rows of a batch affect each other, trainable or not."""
    for path, module in model.named_modules():
        kind = type(module).__name__
        for pattern, reason in _COUPLED:
            if re.fullmatch(pattern, kind):
                error = GhostError if "Norm" in kind else NoRuleError  # running statistics are carried between calls
                raise error(f"{path or 'the model'} ({kind}) couples the rows of a batch: {reason}.")
        if (found := coupling(module)) is not None:
            raise (GhostError if is_fp8(module) else NoRuleError)(
                f"{path or 'the model'} ({kind}) couples the rows of a batch: {found}."
            )
    refuse_router_loss(model)


def refuse_skipped_layers(model: nn.Module) -> None:
    """Raise `GhostError` where whole layers with trainable parameters are left out of a pass at random.

    In such a pass the parameters of a layer receive no gradient, which looks like a graph that was cut.
    """
    holders = [(path, module) for path, module in model.named_modules() if "layerdrop" in vars(module)]
    for path, module in holders or [("the model's config", model)]:
        rate = module.layerdrop if holders else getattr(getattr(model, "config", None), "layerdrop", 0)
        if isinstance(rate, int | float) and rate > 0 and any(p.requires_grad for p in module.parameters()):
            raise NoRuleError(
                f"{path} has layerdrop={rate}: whole layers are skipped at random, and their parameters then have no "
                "gradient. Set layerdrop to 0 there (and in the model's config); use dropout instead."
            )


def refuse_switching(model: nn.Module) -> None:
    """Raise `GhostError` for a module that a short row switches to another attention, for all later rows.

    BigBird and BigBird-Pegasus do (transformers, ``set_attention_type`` in their forward passes).
    """
    for path, module in model.named_modules():
        if vars(module).get("attention_type") == "block_sparse":
            raise GhostError(
                f"{path or 'the model'} ({type(module).__name__}) leaves its block-sparse attention for good at the "
                "first batch of short rows, so one unit changes the gradients of all later ones. Load the model with "
                'attention_type="original_full", or call its set_attention_type("original_full").'
            )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise `GhostError` for a wrapped model: compiled, or with its own reducer."""
    refuse_replicating(model)
    for path, module in model.named_modules():
        refuse_compiled(path or "The model", module)


def refuse_replicating(model: nn.Module) -> None:
    """Raise `GhostError` for a model wrapped by replicas with their own reducer."""
    if isinstance(model, nn.DataParallel):
        raise GhostError(
            "nn.DataParallel splits the batch where the hooks cannot see it. Use one process per device instead."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise GhostError(
            "DistributedDataParallel reduces unclipped gradients with its own hooks. Give GhostClipper the model "
            "inside (model.module); dpllm.engines.engine_for reduces the clipped sum."
        )


def refuse_tensor_parallel(model: nn.Module) -> None:
    """Raise `GhostError` for a model whose layers are divided over processes that compute the same rows together.

    transformers divides by its ``tp_plan``, PyTorch by ``parallelize_module``. FSDP2 divides parameters too, and
    gathers them for each layer.
    """
    modules = list(model.modules())
    size = max(getattr(module, "_tp_size", None) or 1 for module in modules)
    gathered = any(isinstance(module, FSDPModule) for module in modules)
    divided = [] if gathered else [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if size > 1 or divided:
        what = f"{divided[0]} is divided over processes" if divided else f"tp_size={size}"
        raise GhostError(
            f"The model is tensor-parallel ({what}): each process has a part of a unit's gradient, so a unit could not "
            "be bounded there. Load the model without distributed_config and parallelize_module, and shard it with "
            "FSDP2 (dpllm train --config fsdp2)."
        )


def refuse_compiled(path: str, module: nn.Module) -> None:
    """Raise `GhostError` for a module that was compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        raise _compiled(path)


def _compiled(path: str) -> GhostError:
    return NoRuleError(
        f"{path} was compiled with torch.compile, which may fuse away a layer that has hooks. Give GhostClipper "
        "the model before compilation, and train that one."
    )


def find_sites(model: nn.Module) -> list[Site]:
    """Return every module that directly holds trainable parameters.

    Parameters in a container without a forward pass (``nn.ParameterDict``) belong to the nearest module around it
    that has one; T5's table of relative positions belongs to its attention. A container that several modules hold
    (VB-LoRA's bank of vectors) belongs to each of them, and not to a module around them that only keeps it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[int, dict[int, tuple[str, str]]] = {}  # of each holder: its owners, with their paths and its own there
    for path, module in modules.items():
        if not _own_trainable(module):
            continue
        owner_path = _owner_of(modules, path)
        owners = places.setdefault(id(module), {})
        if not owners or type(module).forward is nn.Module.forward:
            owners.setdefault(id(modules[owner_path]), (owner_path, path))
    sites: dict[int, Site] = {}
    for owners in places.values():
        paths = [owner_path for owner_path, _ in owners.values()]
        for key, (owner_path, path) in owners.items():
            if any(_is_around(owner_path, other) for other in paths):
                continue  # a use there is refused, like any use outside the modules that hold a parameter
            site = sites.setdefault(key, Site(owner_path, modules[owner_path]))
            inside = path[len(owner_path) :].lstrip(".")
            own = _own_trainable(modules[path])
            site.trainable.update({f"{inside}.{name}" if inside else name: p for name, p in own.items()})
    return list(sites.values())


def _own_trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return {name: parameter for name, parameter in own if parameter.requires_grad}


def _owner_of(modules: dict[str, nn.Module], path: str) -> str:
    """Return the path of the module whose forward pass uses the parameters of the one at ``path``."""
    owner_path = path
    while type(modules[owner_path]).forward is nn.Module.forward or _parent_supplies(modules, owner_path):
        if not owner_path:
            names = sorted(_own_trainable(modules[path]))
            raise NoRuleError(f"{path}: no module around the parameters {names} has a forward pass.")
        owner_path = owner_path.rpartition(".")[0]
    return owner_path


def _is_around(path: str, other: str) -> bool:
    """Whether the module at ``path`` is around the one at ``other``."""
    return path != other and (not path or other.startswith(f"{path}."))


def _parent_supplies(modules: dict[str, nn.Module], path: str) -> bool:
    """Whether the module is never called: a table that its parent looks up once for all rows, or LoRA of experts."""
    parent, _, name = path.rpartition(".")
    if name == "relative_attention_bias":
        return gives_relative_bias(modules[parent])
    above, _, factors = parent.rpartition(".")
    return factors in ("lora_A", "lora_B") and expert_adapters.is_wrapper(modules[above])


class _Entered(NamedTuple):
    """A call of a site that runs.

    Attributes:
        owned: whether the site's rule applies to it.
        versions: of its inputs; None if the module is of a known class, or has no rule.
        parameters: in the places of the trainable ones.
    """

    owned: bool
    versions: list[int] | None
    parameters: Sequence[nn.Parameter]


_BROKEN_OFF = _Entered(owned=False, versions=None, parameters=())  # before it was noted


class Served:
    """A site with its rule, if it has one.

    The rule of a module of unknown class is chosen at its first use, from what it computes. If there is none, the
    functions that the module calls are served one by one (`dpllm.ghost.uses`).
    """

    def __init__(self, site: Site, book: Host) -> None:
        """Choose the rule if the class determines it."""
        self.site, self.book = site, book
        self.experts: ExpertsRule | None = None
        self.before: Callable[[nn.Module, tuple, dict, int | None], tuple[tuple, dict] | None] | None = None
        self._after: After | None = None
        path, module, trainable = site.path, site.module, site.trainable
        _refuse_without_rule(path, module)
        own = has_own_forward(module)
        if not own and is_linear(module):
            self._after = LinearRule.of(path, module, trainable, book).after
        elif isinstance(module, nn.Embedding):
            self._after = EmbeddingRule(path, module, trainable, book).after
        elif not own and isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward:
            self._after = LayerNormRule(path, module, trainable, book).after
        elif trainable.keys() == {"relative_attention_bias.weight"} and gives_relative_bias(module):
            self.before = RelativeBiasRule(path, module, trainable, book).before
        elif expert_adapters.is_wrapper(module):
            self.experts = expert_adapters.train(path, module, trainable, book)
            self._after = _as_it_is
        elif is_experts(module):
            self.experts = ExpertsRule.on(path, module, book)
            self.experts.train(trainable)
            self._after = _as_it_is
        # The inputs of a module that was recognised are read after its call, so the call must not change them.
        self.is_known = self._after is not None or self.before is not None
        self._decided = self.is_known
        named = zip(site.trainable.items(), site.holders(), strict=True)
        self._places = tuple((name, own, *place) for (name, own), place in named)
        self._calls: list[_Entered] = []
        self._forward = vars(module).get("forward")

    def present(self) -> list[nn.Parameter]:
        """Return the tensors in the places of the trainable parameters; a sharded model (FSDP2) puts others there.

        Raises:
            GhostError: a caller put another tensor there, or another ``forward`` on the module.
        """
        if vars(self.site.module).get("forward") is not self._forward:
            raise NoRuleError(
                f"{self.site.path} ({type(self.site.module).__name__}) got another forward after GhostClipper was "
                "made, so its gradients would be those of the forward before. Make GhostClipper after the change."
            )
        present = []
        for name, own, holder, place in self._places:
            live = getattr(holder, place)
            present.append(live)
            if live is not own and not isinstance(own, DTensor):
                raise NoRuleError(
                    f"{self.site.path} ({type(self.site.module).__name__}) was called with another tensor in the place "
                    f"of {name}, as torch.func.functional_call does, so its gradient would be taken for that of the "
                    "parameter. Use the tensor in a function, such as torch.nn.functional.linear, or freeze both."
                )
        return present

    @property
    def is_steady(self) -> bool:
        """Whether a rule that only reads outputs applies to all calls: then nothing runs before them."""
        return self._after is not None

    def enter(self, args: tuple, kwargs: dict, tensors: Sequence[Tensor], present: Sequence[nn.Parameter]) -> bool:
        """Return whether the module's rule applies to this call; if not, its functions are served one by one.

        Args:
            args: of the call.
            kwargs: of the call.
            tensors: among them.
            present: in the places of the trainable parameters.
        """
        if not self._decided and torch.is_grad_enabled():
            self._after, self._decided = self._recognise(args, kwargs), True
        applies = (self._after is not None or self.before is not None) and not any(map(origins_of, tensors))
        versions = [t._version for t in tensors] if applies and not self.is_known else None
        self._calls.append(_Entered(applies, versions, present))
        return applies

    def leave(self, args: tuple, kwargs: dict, broke_off: bool) -> _Entered:
        """Return what is known of the call that ends.

        Raises:
            GhostError: the module wrote to one of its inputs.
        """
        call = self._calls.pop() if self._calls else _BROKEN_OFF
        before = call.versions
        if before is not None and not broke_off and [t._version for t in tensors_of(args, kwargs)] != before:
            raise NoRuleError(
                f"{self.site.path} ({type(self.site.module).__name__}) changes its input in place, so its original "
                f"input is lost for the per-row gradients of {sorted(self.site.trainable)}. Let it work on a copy, "
                "or freeze these parameters."
            )
        return call

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: Any, rows: int | None) -> Any:
        """Tap the module's output."""
        return output if self._after is None else self._after(module, args, kwargs, output, rows)

    def _recognise(self, args: tuple, kwargs: dict) -> After | None:
        """Recognise a module of unknown class as a feature scale or a linear layer; its call is tried on copies.

        A module that is given an object, such as a key-value cache, is not tried: the call could change the object.
        """
        module, trainable = self.site.module, self.site.trainable
        sizes = sorted(p.ndim for p in trainable.values())
        if sizes not in ([1], [2], [1, 2]) or not _plain((args, kwargs)):
            return None
        call = Call(module, args, kwargs)
        call.tensors = [t.detach().clone() for t in call.tensors]
        versions = [t._version for t in call.tensors]
        devices = {t.device for t in call.tensors if t.device.type != "cpu"}
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=next((d.type for d in devices), "cuda")):
            output = call.again({}, call.tensors)
            if [t._version for t in call.tensors] != versions or not isinstance(output, Tensor):
                return None
            if len(trainable) == 1:
                ((name, weight),) = trainable.items()
                offset = offset_of(call, name, module.get_parameter(name), output)
                if offset is not None:
                    normalisation = recognised(call, name, module.get_parameter(name))
                    return ScaleRule(name, weight, offset, normalisation, self.book).after
            linear = LinearRule.recognise(module, trainable, call, output, self.book)
        return linear.after if linear else None


def _refuse_without_rule(path: str, module: nn.Module) -> None:
    """Raise `GhostError` for a trained layer of a kind that is known to have no gradients per row."""
    for kind in type(module).__mro__:
        if (reason := _WITHOUT_RULE.get(kind.__name__)) is not None:
            raise NoRuleError(
                f"{path} ({type(module).__name__}) {reason}. Use LoRA (also with use_dora or use_rslora) or IA3 "
                "instead, or freeze this adapter."
            )


def _as_it_is(module: nn.Module, args: tuple, kwargs: dict, output: Any, rows: int | None) -> Any:
    """Return the output unchanged: the rule of a module that uses none of its parameters, or is tapped inside."""
    del module, args, kwargs, rows
    return output


def _plain(value: Any) -> bool:
    """Whether a module's arguments are tensors, numbers and words, in nested tuples, lists and dicts."""
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    return value is None or isinstance(value, (Tensor, bool, int, float, str, torch.dtype, torch.device))
