"""Continue a checkpoint in the Trainer: with the engine's own code, or parameter by parameter by name.

The Trainer loads what its current engine has saved on the same number of processes. A checkpoint of another engine, or
of DeepSpeed on a different number of processes, is hidden from it: model, optimizer and schedule are distributed as for
a new run, and then take the state of the checkpoint, before the run is attached.

Weights, optimizer
moments, step counts and the options of parameter groups are found by parameter names
(`dpllm.engines.saved_state`), and each process copies the entries that it holds. The optimizer's next step is then
the step that the saved run would have taken.

Guarantee: a state that the checkpoint lacks, that the optimizer does not have, or that this run would round, is an
error. Nothing silently keeps its initial value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.utils import logging

from dpllm.engines.engine_for import model_inside
from dpllm.engines.guard import EngineError, innermost
from dpllm.engines.processes import Processes
from dpllm.engines.saved_state import (
    CONFIGS,
    DDP,
    FSDP2,
    FSDP2_MODEL,
    SCHEDULER_FILE,
    SINGLE,
    SavedState,
    Setup,
    Way,
    names_of_groups,
    plain_name,
    saved_state,
    setup_of,
    write_names,
)
from dpllm.privacy.checkpoints import CheckpointError
from dpllm.training.resume import Continued
from dpllm.training.weight_shards import WeightFragments

_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # options that do not change the result
_OPTIONAL = {"initial_lr"}  # a schedule adds it


def require_exact(saved: SavedState, saved_by: Setup, model: nn.Module, now: Setup, upcasts: bool) -> None:
    """Check that no weight would be rounded, before the model is sharded and before anything is charged.

    DeepSpeed trains float32 copies of bfloat16 weights, and FSDP2 trains float32 weights under mixed precision. One
    process and DDP train the weights in the model's own dtype.

    Args:
        saved: the state of the checkpoint.
        saved_by: the engine that made it.
        model: model before it is sharded.
        now: the engine of this run.
        upcasts: whether accelerate trains float32 copies under FSDP2.

    Raises:
        CheckpointError: a trained parameter was saved in a higher precision than this run trains.
    """
    if now.config not in CONFIGS[: CONFIGS.index(FSDP2) + 1] or (now.config == FSDP2 and upcasts):
        return
    dtypes = {plain_name(name): parameter.dtype for name, parameter in model.named_parameters()}
    for name in (name for names, _ in saved.groups for name in names):
        there, here = saved.dtype(name), dtypes.get(name)
        if there is not None and here is not None and torch.promote_types(there, here) != here:
            raise CheckpointError(
                f"The checkpoint holds {name} in {_word(there)} ({saved_by}), but {now} would train it in "
                f"{_word(here)}: rounding would lose its small updates. Resume with dpllm train --config "
                f"{saved_by.config}"
            )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_weights(
    saved: SavedState, module: nn.Module, deepspeed: Any, processes: Processes, may_lack_frozen: bool
) -> None:
    """Copy weights and buffers into a distributed model. Called by all processes together.

    Args:
        saved: the state of the checkpoint.
        module: the model inside its engine's wrapper.
        deepspeed: DeepSpeed's engine; None: another engine.
        processes: all processes.
        may_lack_frozen: whether the checkpoint may lack untrained parameters, as an adapter's does.

    Raises:
        CheckpointError: the checkpoint lacks a parameter, or has one of a different size; on every process.
    """
    names = _names_by_parameter(module)
    found = processes.together(lambda: _found(saved, names, may_lack_frozen))
    divided = {name: names[name][0] for name in found if deepspeed is None or names[name][0].requires_grad}
    fragments = WeightFragments(divided, module, deepspeed, processes)

    def copy() -> None:
        with torch.no_grad():
            for name, start in fragments.starts.items():
                count = fragments.read(name).numel()
                fragments.write(name, _sized(saved, found[name], fragments.sizes[name])[start : start + count])
            for name, buffer in module.named_buffers():
                value = saved.weight(plain_name(name))
                if value is not None and value.numel() == buffer.numel():
                    _local(buffer).copy_(value.view(buffer.shape))

    processes.together(copy)
    fragments.spread()
    for name in found.keys() - divided.keys():
        _set_frozen(names[name][0], saved.weight(found[name]) if processes.is_main else None, saved, found[name])


def _names_by_parameter(module: nn.Module) -> dict[str, tuple[nn.Parameter, list[str]]]:
    """Return each parameter by its first name, with all names under which it may be saved."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return {plain_name(name): (p, names[id(p)]) for name, p in module.named_parameters()}


def _found(
    saved: SavedState, names: Mapping[str, tuple[nn.Parameter, list[str]]], may_lack_frozen: bool
) -> dict[str, str]:
    """Return the name under which each parameter was saved; absent ones are omitted where that is allowed."""
    found = {}
    for name, (parameter, others) in names.items():
        there = next((one for one in others if saved.dtype(one) is not None), None)
        if there is not None:
            found[name] = there
        elif parameter.requires_grad or not may_lack_frozen:
            raise CheckpointError(
                f"The checkpoint does not hold {name}, which this run needs. Resume with the model of the first start, "
                "and in a recipe with its section model.adapter"
            )
    return found


def _sized(saved: SavedState, name: str, size: int) -> Tensor:
    value = saved.weight(name)
    if value is None or value.numel() != size:
        raise CheckpointError(
            f"The checkpoint holds {name} with {0 if value is None else value.numel()} entries, but the model has "
            f"{size}. Resume with the model of the first start, and in a recipe with its section model.adapter"
        )
    return value.flatten()


def _set_frozen(parameter: Any, value: Tensor | None, saved: SavedState, name: str) -> None:
    """Write a parameter that DeepSpeed does not train; a sharded one from rank 0."""
    if not hasattr(parameter, "ds_id"):
        parameter.data.copy_(_sized(saved, name, parameter.numel()).view(parameter.shape))
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if value is not None:
            parameter.copy_(value.view(parameter.shape))


class _Place(NamedTuple):
    """Where an optimizer stores the state of the entries that this process has of a parameter."""

    owner: Tensor  # the key in the optimizer's state
    offset: int | None  # position of the entries in a flat owner; None: the owner is the parameter itself
    start: int  # position of the entries in the flattened parameter
    numel: int


def load_optimizer(
    saved: SavedState,
    module: nn.Module,
    optimizer: Any,
    names: Sequence[Sequence[str]],
    deepspeed: Any,
    processes: Processes,
) -> None:
    """Copy moments, step counts and options into a distributed optimizer. Called by all processes together.

    Args:
        saved: the state of the checkpoint.
        module: the model inside its engine's wrapper.
        optimizer: the prepared optimizer, before its first step.
        names: the parameters of each of its groups, from before the model was distributed.
        deepspeed: DeepSpeed's engine; None: another engine.
        processes: all processes.

    Raises:
        CheckpointError: the optimizer is a different one, has different groups, or has a state that cannot be divided;
            on every process.
    """
    parameters = {name: found[0] for name, found in _names_by_parameter(module).items()}
    trained = {name: parameters[name] for group in names for name in group}
    fragments = WeightFragments(trained, module, deepspeed, processes)
    inner = innermost(optimizer)

    names = groups_held(names, deepspeed)

    def load() -> None:
        _require_same(saved, names)
        for own, options in saved.groups:
            if not own:
                continue
            number = _group_of(own, names)
            _take_options(inner.param_groups[number], options)
            for name in own:
                place = _place(name, trained[name], fragments, inner, number, deepspeed)
                _take_state(inner, place, saved.state(name), name, fragments.sizes[name], inner.param_groups[number])

    with torch.no_grad():
        processes.together(load)


def _require_same(saved: SavedState, names: Sequence[Sequence[str]]) -> None:
    """Check that the checkpoint has one kind of state for every parameter that the optimizer updates, and no other.

    Raises:
        CheckpointError: it has none, or they differ.
    """
    here = {name for own in names for name in own}
    there = {name for own, _ in saved.groups for name in own}
    kinds = {name: frozenset(saved.state(name)) for name in sorted(there)}
    if here == there and len(set(kinds.values())) <= 1:
        return
    odd = sorted(here ^ there) or [name for name in kinds if kinds[name] != max(kinds.values(), key=len)]
    raise CheckpointError(
        f"The checkpoint's optimizer and this run's optimizer hold different state for {odd[0]} and {len(odd) - 1} "
        "other parameters, whose state would silently be reset. Resume with the model, the trained parameters and "
        "the optimizer of the first start"
    )


def groups_held(names: Sequence[Sequence[str]], deepspeed: Any) -> list[Sequence[str]]:
    """Return the parameters of each group of a prepared optimizer; DeepSpeed removes empty groups."""
    return [own for own in names if own or deepspeed is None]


def load_schedule(schedule: Any, state: Mapping[str, Any], saved: SavedState, names: Sequence[Sequence[str]]) -> None:
    """Continue a learning-rate schedule, which has a number for each group of the optimizer.

    Args:
        schedule: schedule of this run.
        state: its state in the checkpoint.
        saved: the state of the checkpoint's optimizer.
        names: the parameters of each group that this run's optimizer has (`groups_held`).
    """
    own, before = schedule.state_dict(), [set(group) for group, _ in saved.groups]
    places = [before.index(set(group)) if set(group) in before else None for group in names]

    def in_order(key: str, value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(before) or len(own.get(key, ())) != len(places):
            return value
        return [own[key][number] if place is None else value[place] for number, place in enumerate(places)]

    schedule.load_state_dict({key: in_order(key, value) for key, value in state.items()})


def _group_of(saved: Sequence[str], names: Sequence[Sequence[str]]) -> int:
    number = next((number for number, own in enumerate(names) if set(own) == set(saved)), None)
    if number is None:
        raise CheckpointError(
            f"The optimizer of this run has no group of the {len(saved)} parameters from {saved[0] if saved else '?'} "
            "on, but the checkpoint has. Resume with the model, the trained parameters and the optimizer of the first "
            "start"
        )
    return number


def _take_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    known = set(group) - _IMPLEMENTATION - _OPTIONAL - {"params"}
    wanted = set(options) - _IMPLEMENTATION - _OPTIONAL
    if known != wanted:
        raise CheckpointError(
            f"The checkpoint's optimizer has different options ({', '.join(sorted(known ^ wanted))}). Resume with "
            "the train.optim and train.optim_args, or the optimizer, of the first start"
        )
    group.update({key: options[key] for key in wanted | (_OPTIONAL & set(options))})


def _place(name: str, parameter: Any, fragments: WeightFragments, inner: Any, number: int, deepspeed: Any) -> _Place:
    count = fragments.read(name).numel() if name in fragments.starts else 0
    start = fragments.starts.get(name, 0)
    if deepspeed is None:
        return _Place(parameter, None, start, count)
    if deepspeed.zero_optimization_stage() == 3:
        zero = deepspeed.optimizer
        group, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
        return _Place(zero.fp32_partitioned_groups_flat[group], int(offset), start, count)
    (owner,) = inner.param_groups[number]["params"]
    offset = int(parameter._hp_mapping.hp_fragment_address.start) if count else 0
    return _Place(owner, offset, start, count)


def _take_state(
    inner: Any, place: _Place, states: Mapping[str, Any], name: str, size: int, group: Mapping[str, Any]
) -> None:
    made, owner = inner.state[place.owner], place.owner
    for key, value in states.items():
        if key == "step" or not torch.is_tensor(value):
            made[key] = _counter(made.get(key), value, owner, group, name)
            continue
        if value.numel() != size:
            raise CheckpointError(
                f"The optimizer's state {key} of {name} has {value.numel()} entries for {size} weights, so it cannot "
                "be divided over processes. Resume with the accelerate config and the number of processes that made "
                "the checkpoint"
            )
        part = value.flatten()[place.start : place.start + place.numel]
        dtype = torch.promote_types(owner.dtype, value.dtype)
        if place.offset is not None:
            if key not in made:
                made[key] = torch.zeros_like(owner, dtype=dtype)
            made[key][place.offset : place.offset + place.numel] = part.to(made[key])
            continue
        local = _local(owner)
        here = part.view(local.shape).to(local.device, dtype, copy=True)
        made[key] = here if local is owner else _like(owner, here)


def _like(owner: Any, local: Tensor) -> Any:
    """Return a sharded tensor with the layout of another one."""
    return DTensor.from_local(
        local, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )


def _counter(before: Any, value: Any, owner: Tensor, group: Mapping[str, Any], name: str) -> Any:
    """Return a step count for its owner; one flat owner has one count for all its parameters."""
    if before is not None and float(before) != float(value):
        raise CheckpointError(
            f"{name} has taken {float(value):g} steps, but another parameter {float(before):g}, and DeepSpeed has one "
            "count for both. Resume with the accelerate config that made the checkpoint"
        )
    if not torch.is_tensor(value):
        return value
    on_device = group.get("fused") or group.get("capturable")
    return value.detach().clone().to(_local(owner).device if on_device else "cpu")


def _local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


# ------------------------------------------------------------------------------------ the Trainer that continues


SAFE_WEIGHTS = "*model*.safetensors"  # of a model or an adapter
logger = logging.get_logger(__name__)


class ContinuedTrainer(Trainer):
    """The Trainer, which continues the checkpoints of every engine; `dpllm.DPTrainer` is the class to use."""

    _continued: Continued | None = None  # the checkpoint of the current or the last ``train()``
    _saved: SavedState | None = None  # its state, if it is loaded by name
    _optimizer_names: Sequence[Sequence[str]] | None = None  # of its parameters; None: some are not the model's

    @property
    def setup(self) -> Setup:
        """The engine of this run and its number of processes, as the accelerate config sets them."""
        processes = Processes().size
        if self.is_deepspeed_enabled:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            return Setup(f"zero{config.get('zero_optimization', {}).get('stage', 0)}", processes)
        if self.is_fsdp_enabled:
            return Setup(FSDP2, processes)
        return Setup(DDP if processes > 1 else SINGLE, processes)

    def _continue_from(self, continued: Continued | None) -> None:
        """Prepare to load a checkpoint, before the ledger is opened; on all processes together.

        Raises:
            CheckpointError, EngineError: its state cannot be read by name, or would be rounded.
        """
        self._continued, self._saved = continued, None
        if self.is_deepspeed_enabled:  # its universal format is not used here, whatever the configuration asks for
            self.accelerator.state.deepspeed_plugin.deepspeed_config.get("checkpoint", {}).pop("load_universal", None)
        if continued is None or self._is_own(continued):
            return
        model: Any = self.model
        adapters = tuple(model.peft_config) if isinstance(model, PeftModel) else ()
        upcasts = self.is_fsdp_enabled and str(self.accelerator.mixed_precision) != "no"

        def opened() -> SavedState:
            saved = saved_state(continued.checkpoint, adapters)
            if continued.way is not Way.WEIGHTS:
                require_exact(saved, setup_of(continued.checkpoint), model, self.setup, upcasts)
            return saved

        self._saved = Processes().together(opened)
        if continued.way is not Way.WEIGHTS and Processes().is_main:
            made = setup_of(continued.checkpoint)
            logger.warning(
                "%s was saved under %s: it is loaded by parameter name for %s", continued.checkpoint, made, self.setup
            )

    def _is_own(self, continued: Continued) -> bool:
        """Return whether the Trainer loads a checkpoint by itself.

        It loads bare weights into a model that is not sharded, and of FSDP2's two formats the one that this run uses.
        """
        checkpoint = continued.checkpoint
        if continued.way is Way.WEIGHTS:
            return not (self.is_deepspeed_enabled or self.is_fsdp_enabled) and any(checkpoint.rglob(SAFE_WEIGHTS))
        if continued.way is Way.LOAD and self.is_fsdp_enabled:
            sharded = "SHARDED" in str(self.accelerator.state.fsdp_plugin.state_dict_type)
            return sharded == (checkpoint / FSDP2_MODEL).is_dir()
        return continued.way is Way.LOAD

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer as ``Trainer`` does, and note which parameters its groups have."""
        made, inner = super().create_optimizer(model), self.model if model is None else model
        assert inner is not None, "the Trainer has a model"
        try:
            self._optimizer_names = names_of_groups(made, inner)
        except EngineError:  # refused later, where it matters: when the run is attached
            self._optimizer_names = None
        return made

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's weights, without changing which parameters are trained and which adapters are active.

        The Trainer makes the first of several active adapters the only one, and trains it. A checkpoint that is loaded
        by name is skipped here.

        Raises:
            CheckpointError: the weights have different shapes than the model's.
        """
        if self._saved is not None:
            return
        loaded: Any = self.model if model is None else model
        is_trained = {name: p.requires_grad for name, p in loaded.named_parameters()}
        active = list(loaded.active_adapters) if isinstance(loaded, PeftModel) else []
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"{resume_from_checkpoint} holds weights of different shapes than the model's ({reason}). Resume with "
                "the model of the first start, and in a recipe with its section model.adapter"
            ) from error
        if active and list(loaded.active_adapters) != active:
            loaded.base_model.set_adapter(active)
        for name, parameter in loaded.named_parameters():
            if parameter.requires_grad != is_trained.get(name, parameter.requires_grad):
                parameter.requires_grad_(is_trained[name])

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Distribute model and optimizer, and load the checkpoint."""
        if self._saved is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._load_by_name(self._saved)
        self._saved = None
        return prepared

    def _load_by_name(self, saved: SavedState) -> None:
        continued, processes = self._continued, Processes()
        assert continued is not None, "there is a state to load"
        module: nn.Module = model_inside(self.model_wrapped)
        deepspeed: Any = self.model_wrapped if self.is_deepspeed_enabled else None
        load_weights(saved, module, deepspeed, processes, may_lack_frozen=isinstance(module, PeftModel))
        if continued.way is Way.WEIGHTS:
            return
        if self._optimizer_names is None:
            raise CheckpointError(
                "The optimizer has parameters that do not belong to the model, so the checkpoint's state cannot be "
                f"loaded by name. Resume with dpllm train --config {setup_of(continued.checkpoint).config}"
            )
        load_optimizer(saved, module, self.optimizer, self._optimizer_names, deepspeed, processes)
        state = torch.load(continued.checkpoint / SCHEDULER_FILE, weights_only=True)
        load_schedule(self.lr_scheduler, state, saved, groups_held(self._optimizer_names, deepspeed))
        if deepspeed is not None:
            deepspeed.global_steps = self.state.global_step  # only names DeepSpeed's folder in the next checkpoint

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save optimizer and schedule as ``Trainer`` does, and the names of the optimizer's parameters."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save and self._optimizer_names is not None:
            write_names(output_dir, self._optimizer_names)
