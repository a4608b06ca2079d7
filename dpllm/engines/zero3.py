"""ZeRO-3: which module gathers a parameter, and which hook takes its gradient.

DeepSpeed gathers the parameters of a module when the module is called, and takes a gradient by a hook on the
parameter. Mixtures of experts deviate from both:

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

from collections.abc import Sequence
from typing import Any

from torch import nn

from dpllm.engines.errors import EngineError
from dpllm.ghost.expert_adapters import is_wrapper


def without_leaves(zero: dict[str, Any]) -> None:
    """Switch off DeepSpeed's default leaf modules; a user's own are checked by `refuse_leaves`.

    Args:
        zero: the section ``zero_optimization`` of a configuration; changed in place.
    """
    leaves = zero.setdefault("leaf_module", {})
    if isinstance(leaves, dict):
        leaves.setdefault("classes", [])


def refuse_leaves(model: nn.Module) -> None:
    """Refuse trained parameters inside a leaf module.

    Args:
        model: as partitioned by DeepSpeed.

    Raises:
        EngineError: DeepSpeed would take their gradients in the clipper's backward pass, and not the clipped sums.
    """
    for name, parameter in model.named_parameters():
        leaf = getattr(parameter, "ds_z3_leaf_module", None)
        if leaf is not None and parameter.requires_grad:
            raise EngineError(
                f"{name} is trained, and lies in a leaf module of ZeRO-3 ({type(leaf).__name__}), whose gradients "
                "DeepSpeed takes in the wrong backward pass. Leave it out of set_z3_leaf_modules(), "
                "deepspeed_moe_layer_cls_names, zero_optimization.leaf_module and "
                "zero_optimization.stage3_module_granularity_threshold, and pass the configuration through "
                "dpllm.engines.private_config() before accelerator.prepare()"
            )


def gather(parameters: Sequence[Any]) -> None:
    """Gather parameters by one collective, as DeepSpeed does for a module's; ``GatheredParameters`` has one for each.

    Args:
        parameters: to be used within ``deepspeed.zero.GatheredParameters``, which releases them.
    """
    absent = [p for p in parameters if p.ds_status.name == "NOT_AVAILABLE" and p.ds_secondary_tensor is None]
    if len(absent) > 1 and not any(hasattr(p.ds_tensor, "ds_quant_scale") for p in absent):
        absent[0].all_gather_coalesced(absent).wait()


def gather_adapted_stacks(model: nn.Module) -> None:
    """Make every module that uses a stack of experts with LoRA gather it, and the trained factors.

    Without this, DeepSpeed's record of the parameters of a module differs from those it finds when it is called.

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
