"""DeepSpeed ZeRO partitions and offloads the clipped sums as if autograd had computed them, and updates the weights.

No part of DeepSpeed is replaced. ZeRO-1 and -2 receive sums as gradients: a custom autograd Function takes a parameter
and returns a zero; its backward returns the parameter's clipped sum. ``engine.backward`` of the sum of these zeros
delivers the clipped sums to DeepSpeed's parameter hooks, and ``engine.step`` updates as in ordinary training. DeepSpeed
averages over processes, but the private sum is not a mean, so it is first multiplied by the number of processes.

ZeRO-3 would accept a gradient only for a parameter whose weights are gathered. There this engine reduces the sums
itself, in buckets, and sets each process's partition of the gradient by DeepSpeed's interface for that
(``safe_set_local_grad``). A partition is a process's part of the flattened parameter: all parts have the same size, and
the last ones are padded.

Sums are formed inside the backward pass or bucket by bucket, so that the full gradient need not exist if DeepSpeed
partitions gradients (ZeRO-2 and -3). While memory allows, whole sums are accumulated over a step's microbatches and
reduced once (`dpllm.engines.buckets`); ZeRO-1, which does not partition gradients, always does this.

ZeRO-3 gathers a module's parameters when the module is called. Mixtures of experts need two exceptions:

* A *leaf module* (``zero_optimization.leaf_module``, accelerate's ``deepspeed_moe_layer_cls_names``) has one hook for
  all trained parameters inside it. It runs when a backward pass leaves the module, and fills in zeros for missing
  gradients (deepspeed/runtime/zero/stage3.py, ``create_reduce_and_remove_grad_hooks``). In the clipper's own pass all
  are missing. DeepSpeed has leaf modules for experts that are separate modules, which processes call in different
  orders; transformers 5 stacks them in one tensor. Leaf modules are therefore switched off, and refused around trained
  parameters.
* PEFT's LoRA on a stack of experts moves the stack to another module while the experts run, and reads its factors
  without calling the layers that hold them. Both are registered with the modules that use them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpllm.engines.base import AddTo, ToTotal
from dpllm.engines.buckets import LocalSums, Work, aligned, buckets, in_turns, overlapped, reduce_scatter
from dpllm.engines.guard import EngineError, Projections, UpdateGuard, no_totals
from dpllm.engines.processes import Processes
from dpllm.ghost.experts import is_wrapper
from dpllm.ghost.kernels import accumulation_dtype
from dpllm.ghost.sums import Sum


class PartitionedBucket:
    """The layout of parameters whose sums are reduced together: one row per process.

    Args:
        parameters: of one dtype, partitioned over all processes.
        num_parts: the number of processes.
    """

    def __init__(self, parameters: Sequence[Any], num_parts: int) -> None:
        """Lay out the bucket."""
        self.parameters, self._num_parts = parameters, num_parts
        self._sizes = [int(parameter.ds_tensor.ds_numel) for parameter in parameters]
        self._starts = [0]
        for size in self._sizes:
            self._starts.append(self._starts[-1] + (size if len(parameters) == 1 else aligned(size)))

    def packed(self, totals: Sequence[Tensor]) -> Tensor:
        """Return whole sums as (number of parts, entries); a single one without a copy, if it has no padding.

        Args:
            totals: the parameters' sums, contiguous.
        """
        first, parts = totals[0], self._num_parts
        if len(totals) == 1 and first.numel() == self._sizes[0] * parts:
            return first.view(parts, -1)
        flat = first.new_zeros(parts, self._starts[-1])
        for total, start, size in zip(totals, self._starts, self._sizes, strict=False):
            for row, part in enumerate(total.flatten().split(size)):
                flat[row, start : start + len(part)] = part
        return flat

    def unpacked(self, own: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield each parameter and this process's part of its sum."""
        for parameter, start, size in zip(self.parameters, self._starts, self._sizes, strict=False):
            yield parameter, own[start : start + size]


def partitioned_buckets(parameters: Iterable[nn.Parameter], num_parts: int) -> list[PartitionedBucket]:
    """Return the buckets of a model's trained parameters, the same on every process."""
    groups = buckets(
        parameters,
        kind_of=lambda parameter: (parameter.dtype, parameter.device),
        bytes_of=lambda parameter: parameter.ds_numel * accumulation_dtype(parameter.dtype).itemsize,
    )
    return [PartitionedBucket(group, num_parts) for group in groups]


# ----------------------------------------------------------------------------------------------------------- the engine


# DeepSpeed options that private training sets, with the reason.
_NEEDED: dict[str, tuple[Any, str]] = {
    "gradient_clipping": (
        0.0,
        'it would rescale the noisy sum; privacy.clip_norm clips each unit (if it is "auto", set '
        "train.max_grad_norm=0)",
    ),
    "communication_data_type": ("fp32", "sums rounded before the noise is complete are not bounded by C"),
    "gradient_accumulation_steps": (1, "the logical batch is privacy.expected_batch_size"),
    "zero_optimization.contiguous_gradients": (False, "its buffers have the parameters' dtype and round the sums"),
    "data_types.grad_accum_dtype": ("fp32", "sums are added up in float32"),
}
# Options that change the gradient at the optimizer, the harmless values, and the reason.
_REFUSED: dict[str, tuple[tuple, str]] = {
    "fp16.enabled": ((), "its loss scaler skips steps depending on the data; use bf16"),
    "bf16.bf16_master_weights_and_grads": ((), "it rounds the sums to bfloat16"),
    "torch_autocast.enabled": ((), "it reduces the sums in bfloat16; use bf16"),
    "prescale_gradients": ((), "it rescales the sum"),
    "gradient_predivide_factor": ((1,), "it rescales the sum"),
    "sparse_gradients": ((), "it reduces other tensors instead of the clipped sums"),
    "zero_optimization.round_robin_gradients": ((), "DeepSpeed's own partition map ignores it"),
    "zero_optimization.zero_quantized_gradients": ((), "quantized gradients are not the clipped sums"),
    "zero_optimization.mics_shard_size": ((-1,), "its partial replicas are reduced by other hooks"),
    "zero_optimization.offload_param.device": (
        ("none", "cpu"),
        "a parameter's gradient cannot be set on disk",
    ),
    "zero_optimization.zenflow": ((), "it updates parameters from gradients of several steps"),
    "compression_training": ((), "it trains different weights from those that are clipped"),
    "sequence_parallel_size": ((1,), "it spreads a unit's rows, and so its norm, over processes"),
    "zero_optimization.offload_optimizer.super_offload": ((), "it updates parameters before a step's sum is complete"),
    "pipeline": ((), "it spreads a unit's layers, and so its norm, over processes"),
    "tensor_parallel": (({"autotp_size": 0}, {"autotp_size": 1}), "it spreads a unit's norm over processes"),
}
_COMPRESSING = ("onebit", "zeroone", "muon")  # optimizers that communicate or transform gradients themselves


def private_config(config: dict[str, Any]) -> None:
    """Set the options that private training needs in a DeepSpeed configuration, if they are missing or "auto".

    Args:
        config: the configuration as a nested dictionary, before ``deepspeed.initialize``; changed in place.

    Raises:
        EngineError: an option has a different value; the message names it. Or the stage is not a ZeRO stage.

    >>> config = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
    >>> private_config(config)
    >>> config["gradient_clipping"], config["communication_data_type"]
    (0.0, 'fp32')
    """
    for path, (needed, reason) in _NEEDED.items():
        *folders, name = path.split(".")
        section = config
        for folder in folders:
            section = section.setdefault(folder, {})
        if section.get(name) in (None, "auto"):
            section[name] = needed
        elif section[name] != needed:
            raise _refusal(path, section[name], reason)
    for path, (harmless, reason) in _REFUSED.items():
        value: Any = config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value and value != "auto" and value not in harmless:
            raise _refusal(path, value, reason)
    _check_rest(config)
    without_leaves(config["zero_optimization"])


def _refusal(path: str, value: Any, reason: str) -> EngineError:
    return EngineError(
        f"The DeepSpeed configuration sets {path}={value!r}, which cannot be used in private training: {reason}. "
        "Remove it"
    )


def _check_rest(config: Mapping[str, Any]) -> None:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise EngineError(
            f"The DeepSpeed configuration has zero_optimization.stage={stage}, but private training supports stages 1, "
            "2 and 3. For replicated parameters use DDP (dpllm train --config ddp)"
        )
    optimizer = str(config.get("optimizer", {}).get("type", "")).lower()
    if any(part in optimizer for part in _COMPRESSING):
        raise EngineError(
            f"The DeepSpeed configuration selects the optimizer {optimizer!r}, which compresses or transforms "
            "gradients before the update. Use AdamW"
        )


_Formed = Callable[[int, nn.Parameter], Tensor]
"""Forms this process's sum of a parameter, which is identified by its index."""


class _HandIn(torch.autograd.Function):
    """A zero whose gradient with respect to the parameter is the result of ``make``."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.make = make
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.make() * grad_output, None


class DeepSpeedZero:
    """The engine of a model prepared by DeepSpeed with ZeRO-1, -2 or -3, with or without offload.

    Args:
        engine: the return value of ``deepspeed.initialize``.

    Attributes:
        handing_in: whether a backward pass that passes clipped sums to DeepSpeed is running; no other may run.

    Raises:
        EngineError: the configuration would change the private sum before it reaches the optimizer.
    """

    early: ClassVar[None] = None

    def __init__(self, engine: Any) -> None:
        """Check the configuration as DeepSpeed parsed it, and attach the guard."""
        _check_engine(engine)
        self.processes = Processes()
        self.unfinished, self.lockstep, self.handing_in = False, True, False
        self.forms_total = False
        self._engine, self._stage = engine, engine.zero_optimization_stage()
        if self._stage == 3:
            refuse_leaves(engine.module)
            gather_adapted_stacks(engine.module)
        self.guard = UpdateGuard(engine.optimizer, self.processes, replicas=1, at_once=False)
        self._local = LocalSums(engine.module, self.processes)
        self._buckets: list[PartitionedBucket] = []
        self._has_parts = False  # DeepSpeed holds sums of earlier microbatches of the step
        self._projections = Projections(self.processes)
        self._handed: tuple[list[nn.Parameter], float] = [], 1.0

    def begin(self) -> None:
        """Begin a step; no other step is accepted until this one is finished."""
        self.guard.withdraw()
        self.unfinished, self._has_parts = True, False

    def collect(
        self,
        parameters: Mapping[str, nn.Parameter],
        add_to: AddTo,
        *,
        last: bool,
        scale: float,
        to_total: ToTotal | None = None,
    ) -> None:
        """Pass one microbatch's sums to DeepSpeed; after the last it holds the partitioned total times ``scale``.

        Raises:
            EngineError: noise is to be added to complete sums, but DeepSpeed forms them itself.
        """
        if to_total is not None:
            raise no_totals(type(self).__name__)
        every = list(parameters.values())
        for parameter in every:
            if parameter.grad is not None:
                raise EngineError(
                    "A parameter received a gradient that is not clipped, during a private step. Run nothing but "
                    "private_step() between the updates"
                )

        def share_of(number: int, parameter: nn.Parameter) -> Sum:
            total = self._local.begun(parameter)
            add_to(parameter, total)
            return total

        if not last and (self._stage == 1 or self._local.fit()):
            for number, parameter in enumerate(every):
                self._local.keep(parameter, share_of(number, parameter))
            return

        def formed(number: int, parameter: nn.Parameter) -> Tensor:
            total = share_of(number, parameter).filled()
            if not self.guard.done:
                self._projections.hand_in(number, total)
            return total

        self._handed = every, scale
        if self._stage == 3:
            self._partition(every, formed, last, scale)
        else:
            self._hand_in(every, formed, last, scale)

    def _hand_in(self, every: Sequence[nn.Parameter], formed: _Formed, last: bool, scale: float) -> None:
        """Pass the sums to DeepSpeed's hooks (ZeRO-1 and -2)."""
        for parameter in every:
            parameter.grad_dtype = accumulation_dtype(parameter.dtype)  # not rounded in between
        zeros = [_HandIn.apply(p, lambda number=number, p=p: formed(number, p)) for number, p in enumerate(every)]
        self._backward(self.processes.size * scale * torch.stack(zeros).sum(), last)

    def _partition(self, every: Sequence[nn.Parameter], formed: _Formed, last: bool, scale: float) -> None:
        """Reduce the sums, and set this process's partitions of them (ZeRO-3)."""
        self._buckets = self._buckets or partitioned_buckets(every, self.processes.size)
        if last:  # with a loss without weights, DeepSpeed uses its partitions as the gradients of the update
            self._backward(torch.zeros((), device=every[0].device, requires_grad=True).clone(), last)
        numbers = {id(parameter): number for number, parameter in enumerate(every)}
        in_turns(
            self._work(bucket, lambda p: formed(numbers[id(p)], p), scale if last else 1.0) for bucket in self._buckets
        )
        self._has_parts = not last

    def _work(self, bucket: PartitionedBucket, formed: Callable[[nn.Parameter], Tensor], scale: float) -> Work:
        """Reduce a bucket's sums, and add them to those of earlier microbatches."""
        from deepspeed.utils import safe_get_local_grad, safe_set_local_grad

        flat = bucket.packed([formed(parameter) for parameter in bucket.parameters])
        own = flat.new_empty(flat.shape[1])
        yield from overlapped(partial(self._reduce, own, flat.view(-1)))
        del flat
        for parameter, part in bucket.unpacked(own):
            if self._has_parts:
                part.add_(safe_get_local_grad(parameter))
            safe_set_local_grad(parameter, part.mul_(scale))

    def _reduce(self, own: Tensor, flat: Tensor) -> Any:
        """Begin to sum a bucket over the processes; this process gets its part."""
        return reduce_scatter(own, flat, async_op=True)

    def _backward(self, loss: Tensor, last: bool) -> None:
        engine = self._engine
        engine.set_gradient_accumulation_boundary(last)
        engine.optimizer.clear_backward_seen_flag()  # it counts microbatches in engine.forward, which is not called
        self.handing_in = True
        try:
            engine.backward(loss, scale_wrt_gas=False)
        finally:
            self.handing_in = False

    def finish(self) -> None:
        """Update the parameters; the DeepSpeed engine steps its optimizer.

        Raises:
            UpdateError: in the first step, the gradient at the optimizer was not the private sum.
        """
        if not self.guard.done:
            self._check_reduced()
        self._engine.step()
        self.guard.verify()
        self.unfinished = False

    def _check_reduced(self) -> None:
        """Compare the gradients that DeepSpeed holds for the update with those passed to it."""
        from deepspeed.utils import safe_get_full_grad

        parameters, scale = self._handed

        def wholes() -> Iterator[tuple[int, Tensor]]:
            for number, parameter in enumerate(parameters):
                whole = safe_get_full_grad(parameter)
                if whole is not None:
                    self.guard.leave(whole if self.processes.is_main else whole.new_zeros(0))
                    yield number, whole / scale

        self._projections.verify(wholes())


def _check_engine(engine: Any) -> None:
    if any(kind.__name__ == "PipelineEngine" for kind in type(engine).__mro__):
        raise EngineError(
            "DeepSpeed's PipelineEngine spreads a unit's layers, and so its norm, over processes. Use ZeRO without a "
            "pipeline (dpllm train --config zero3)"
        )
    found = {
        "gradient_clipping": (float(engine.gradient_clipping()), 0.0),
        "communication_data_type": (engine.communication_data_type, torch.float32),
        "gradient_accumulation_steps": (engine.gradient_accumulation_steps(), 1),
        "fp16.enabled": (bool(engine.fp16_enabled()), False),
    }
    if engine.bfloat16_enabled() and engine.zero_optimization_stage() >= 2:
        found["zero_optimization.contiguous_gradients"] = (bool(engine.zero_contiguous_gradients()), False)
    reasons = {name: reason for name, (_, reason) in (*_NEEDED.items(), *_REFUSED.items())}
    for name, (value, needed) in found.items():
        if value != needed:
            raise EngineError(
                f"DeepSpeed was configured with {name}={value}, but private training needs {needed}: {reasons[name]}. "
                "Pass the configuration through dpllm.engines.private_config() before accelerator.prepare()"
            )
    if (
        engine.bfloat16_enabled()
        and engine.zero_optimization_stage() < 3
        and engine.zero_offload_optimizer() is not None
    ):
        raise EngineError(
            f"ZeRO-{engine.zero_optimization_stage()} with zero_optimization.offload_optimizer copies gradients in the "
            "parameters' bfloat16, which rounds the sums. Offload with ZeRO-3 (dpllm train --config zero3_offload), "
            "or do not offload"
        )
    private_config(copy.deepcopy(engine.config))


def without_leaves(zero: dict[str, Any]) -> None:
    """Switch off DeepSpeed's default leaf modules; `refuse_leaves` checks a user's own.

    Args:
        zero: the configuration's section ``zero_optimization``; changed in place.
    """
    leaves = zero.setdefault("leaf_module", {})
    if isinstance(leaves, dict):
        leaves.setdefault("classes", [])


def refuse_leaves(model: nn.Module) -> None:
    """Refuse trained parameters inside a leaf module.

    Args:
        model: as partitioned by DeepSpeed.

    Raises:
        EngineError: DeepSpeed would reduce their gradients in the clipper's backward pass, instead of the clipped sums.
    """
    for name, parameter in model.named_parameters():
        leaf = getattr(parameter, "ds_z3_leaf_module", None)
        if leaf is not None and parameter.requires_grad:
            raise EngineError(
                f"{name} is trained but belongs to a ZeRO-3 leaf module ({type(leaf).__name__}), whose gradients "
                "DeepSpeed reduces in the wrong backward pass. Remove it from set_z3_leaf_modules(), "
                "deepspeed_moe_layer_cls_names, zero_optimization.leaf_module and "
                "zero_optimization.stage3_module_granularity_threshold. Then pass the configuration through "
                "dpllm.engines.private_config() before accelerator.prepare()"
            )


def gather_adapted_stacks(model: nn.Module) -> None:
    """Make every module that uses a stack of experts with LoRA gather it, together with the trained factors.

    Otherwise DeepSpeed's record of a module's parameters would differ from those it finds when the module is called.

    Args:
        model: as partitioned by DeepSpeed, before its first call.
    """
    import deepspeed

    for module in model.modules():
        if not is_wrapper(module):
            continue
        wrapper: Any = module
        stack = wrapper.get_param()
        deepspeed.zero.register_external_parameter(wrapper.get_base_layer(), stack)
        for parameter in (stack, *wrapper.lora_A.parameters(), *wrapper.lora_B.parameters()):
            if parameter is stack or parameter.requires_grad:
                deepspeed.zero.register_external_parameter(wrapper, parameter)
