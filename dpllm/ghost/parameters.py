"""A model's trainable parameters: their names, the groups with separate clip factors, and their memory.

Shape suffixes: B rows, G groups of parameters (one where clipping is flat), P parameters, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpllm.ghost import kernels
from dpllm.ghost.refusals import GhostError, UnreachedError, is_packed, refuse_tensor_parallel

_SHARE = 0.8  # of the free memory that may be filled: the backward pass needs some of it too

Groups = Callable[[Mapping[str, tuple[int, ...]]], Sequence[Sequence[str]]]
"""Maps names and shapes of all trainable parameters to the names in each group."""


def shapes_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each parameter, including those that DeepSpeed has partitioned."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}


class TrainedParameters:
    """The parameters that are trainable when this object is created.

    Attributes:
        by_name: the parameters, each once.
        groups: the number of each parameter's group, by the parameter's id.
        group_P: the same, in the order of the parameters.
        num_groups: G.
        sharded: whether processes hold parts of the parameters.

    Args:
        model: the model.
        groups: maps all names and shapes to groups of names.

    Raises:
        GhostError: the model has no trainable parameter, or one that is quantised, complex or has a gradient hook; the
            groups are not a partition; or the model is tensor-parallel.
    """

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        """Find and number the parameters."""
        refuse_tensor_parallel(model)
        self.by_name: Mapping[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.by_name:
            raise GhostError(
                "The model has no trainable parameter. Set requires_grad on the parameters to train. For LoRA, first "
                "wrap the model with peft.get_peft_model."
            )
        for name, parameter in self.by_name.items():
            _refuse_untrainable(name, parameter)
        named = [list(group) for group in groups(shapes_of(self.by_name))]
        every = [name for group in named for name in group]
        if sorted(every) != sorted(self.by_name):
            wrong = sorted(set(every) ^ set(self.by_name)) or sorted({name for name in every if every.count(name) > 1})
            raise GhostError(
                f"Each trainable parameter must be in exactly one clipping group, but {wrong[0]} is in none, in "
                "several, or is not a parameter of the model. A parameter without a group would not be bounded."
            )
        self.num_groups = len(named)
        self.groups = {id(self.by_name[name]): number for number, group in enumerate(named) for name in group}
        self.group_P = torch.tensor([self.groups[id(p)] for p in self.by_name.values()])
        self.sharded = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in self.by_name.values())
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._model = model

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype in which norms are added: float64 if a parameter has it, otherwise float32."""
        wide = any(p.dtype == torch.float64 for p in self.by_name.values())
        return torch.float64 if wide else torch.float32

    def grouped(self, value_PU: Tensor) -> Tensor:
        """Sum parameters' values over the groups (G, U), in float64, so that rounding errors do not accumulate."""
        total_GU = value_PU.new_zeros(self.num_groups, value_PU.shape[1], dtype=torch.float64)
        return total_GU.index_add_(0, self.group_P.to(value_PU.device), value_PU.double()).to(value_PU.dtype)

    def refuse_missing(self, seen: Collection[int]) -> None:
        """Raise `UnreachedError` for parameters whose ids are not among those that received a gradient."""
        if missing := [name for name, p in self.by_name.items() if id(p) not in seen]:
            raise no_gradient(missing)

    def refuse_others(self, loss_B: Tensor, everywhere: bool) -> None:
        """Check that these parameters are trainable, and that no other parameter will receive a gradient.

        Args:
            loss_B: (B,) losses with a graph.
            everywhere: whether to search the model for parameters added since this object was created, and the losses'
                graph for parameters outside the model.

        Raises:
            GhostError: a parameter was frozen, unfrozen (not detected if parameters are sharded) or added after this
                object was created, or is not part of the model.
        """
        for name, parameter in self.by_name.items():
            if not parameter.requires_grad:
                raise GhostError(
                    f"{name} was frozen after GhostClipper was created, but would still be clipped and trained. Call "
                    "remove() and create a new GhostClipper for the parameters that are trained now"
                )
        others: list[str] = []
        if not self.sharded and (everywhere or any(p.requires_grad for p in self._frozen)):
            named = self._model.named_parameters()
            others = [name for name, p in named if p.requires_grad and id(p) not in self.groups]
        if others:
            raise GhostError(
                f"{others[0]} was unfrozen or added after GhostClipper was created, so its gradient would be neither "
                "clipped nor noised. Set requires_grad on all parameters first, or call remove() and create a new "
                "GhostClipper, which clips all of them together"
            )
        # Other leaf tensors are allowed: a frozen embedding's output is one if activations are recomputed.
        for leaf in leaves_of(loss_B) if everywhere else ():
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad and id(leaf) not in self.groups:
                raise GhostError(
                    f"The losses depend on a trainable parameter of shape {tuple(leaf.shape)} that is not part of "
                    "GhostClipper's model, so its gradient would be neither clipped nor noised. Make it part of that "
                    "model, or freeze it (requires_grad_(False)). Compute a reference model's output in "
                    "torch.no_grad()"
                )


def no_gradient(missing: Sequence[str]) -> UnreachedError:
    """Return the error for trainable parameters that no loss reaches."""
    return UnreachedError(
        f"No gradient reached {len(missing)} trainable parameter(s), the first is {missing[0]}. If the loss does not "
        "use it, freeze it (privacy.unused_parameters=freeze, or requires_grad_(False)); if only some rows use it, "
        "set privacy.gradients=per_unit. If activation checkpointing with use_reentrant=True cut the graph, call "
        "model.enable_input_require_grads() or set use_reentrant=False."
    )


def _refuse_untrainable(name: str, parameter: nn.Parameter) -> None:
    """Raise `GhostError` for a parameter that is quantised or complex, or whose gradient a hook changes or reads."""
    if is_packed(parameter):
        raise GhostError(
            f"{name} is quantised ({type(parameter).__name__}) and trainable, but a quantised weight has no exact "
            "gradient and its update is rounded together with neighbouring weights. Freeze it "
            "(requires_grad_(False)), and train LoRA adapters on top of it."
        )
    if parameter.is_complex():
        raise GhostError(
            f"{name} has the dtype {parameter.dtype}, but norms, sums and noise are real, so its imaginary part would "
            "not be trained. Keep two real parameters, or one of shape (..., 2) with torch.view_as_complex; or freeze "
            "it."
        )
    if any(not getattr(hook, "is_guard", False) for hook in (parameter._backward_hooks or {}).values()):
        raise GhostError(
            f"{name} has a hook on its gradient (Tensor.register_hook), but the clipped sum is computed without hooks, "
            "so a hook that masks the gradient would have no effect. Remove the hook. PEFT's CPT sets such a hook: "
            "use prompt tuning instead."
        )


def state_of_gradient(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Return a value that changes when a gradient is written to ``.grad``."""
    return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors in which losses of any shape have a gradient, each at least once.

    >>> head = nn.Linear(2, 1, bias=False)
    >>> [leaf is head.weight for leaf in leaves_of(head(torch.ones(3, 2)).sum(1))]
    [True]
    """
    return (node.variable for node in _nodes(loss) if hasattr(node, "variable"))


def nodes_of(loss: Tensor) -> Iterator[str]:
    """Yield the name of each operation in the graph behind losses, such as "AddmmBackward0"."""
    return (node.name() for node in _nodes(loss))


def _nodes(loss: Tensor) -> Iterator[Any]:
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]


class Passes:
    """Chooses between one and two backward passes, if the user set neither, and when sums are formed.

    Args:
        model: the trained model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the modules that hold trained parameters, and those that may recompute their activations."""
        modules = list(model.modules())
        self._trained = [module for module in modules if any(p.requires_grad for p in module.parameters(recurse=False))]
        self._recomputing = [module for module in modules if hasattr(module, "gradient_checkpointing")]

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on, as transformers marks it."""
        return any(module.gradient_checkpointing for module in self._recomputing)

    def needed(self, rows: int, tokens: int, device: torch.device) -> int:
        """Return 2 if activations are recomputed and one pass over such rows would not fit, otherwise 1.

        Without checkpointing, autograd holds the activations until the end, and a second pass saves little.
        """
        free = free_bytes(device) if self.recomputes else None
        return 1 if free is None or held_bytes(self._trained, rows, tokens) <= _SHARE * free else 2

    def sums_are_smaller(self, rows: int, tokens: int, finished: bool) -> bool:
        """Return whether the clipped sums take less memory than the contributions they are formed from, for such rows.

        ``finished``: each sum is immediately converted to a gradient in its parameter's dtype.
        """
        trained = {id(p): p for module in self._trained for p in module.parameters(recurse=False) if p.requires_grad}
        sums = sum(
            p.numel() * (p.itemsize if finished else kernels.accumulation_dtype(p.dtype).itemsize)
            for p in trained.values()
        )
        return sums < held_bytes(self._trained, rows, tokens)


def held_bytes(modules: Iterable[nn.Module], rows: int, tokens: int) -> int:
    """Return the bytes held for a microbatch of one row per unit: per layer the factors, or the instances if smaller.

    >>> held_bytes([nn.Linear(100, 50, bias=False)], rows=2, tokens=10)
    12000
    """
    total = 0
    for module in modules:
        for parameter in module.parameters(recurse=False):
            instance = parameter.numel() * kernels.accumulation_dtype(parameter.dtype).itemsize
            if parameter.requires_grad and parameter.ndim == 2:
                width = parameter.shape[1] if isinstance(module, nn.Embedding) else sum(parameter.shape)
                total += rows * min(instance, tokens * width * parameter.element_size())
            elif parameter.requires_grad:
                total += rows * instance
    return total


def logits_outweigh(vocabulary: int, width: int, layers: float) -> bool:
    """Return whether a token's logits and their gradient outweigh the block inputs that checkpointing keeps.

    A trained head is then computed in chunks (`dpllm.ghost.chunked_head`).

    Args:
        vocabulary: the number of logits.
        width: of the hidden states.
        layers: the number of blocks.

    >>> logits_outweigh(32_000, 2048, 16), logits_outweigh(32_000, 4096, 32)
    (True, False)
    """
    return 2 * vocabulary > layers * width


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a GPU; None on other devices, where this is unknown."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
