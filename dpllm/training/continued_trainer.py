"""Continue a checkpoint in the Trainer: with the engine's own code, or parameter by parameter by name.

The Trainer loads what its current engine has saved on the same number of processes. A checkpoint of another engine, or
of DeepSpeed on a different number of processes, is hidden from it: model, optimizer and schedule are distributed as for
a new run, and then take the state of the checkpoint (`dpllm.training.load_state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import Trainer
from transformers.utils import logging

from dpllm.engines.engine_for import model_inside
from dpllm.engines.guard import EngineError
from dpllm.engines.processes import Processes
from dpllm.engines.saved_state import (
    DDP,
    FSDP2,
    FSDP2_MODEL,
    SCHEDULER_FILE,
    SINGLE,
    SavedState,
    Setup,
    Way,
    names_of_groups,
    saved_state,
    setup_of,
    write_names,
)
from dpllm.privacy.checkpoints import CheckpointError
from dpllm.training.load_state import groups_held, load_optimizer, load_schedule, load_weights, require_exact
from dpllm.training.resume import Continued

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
