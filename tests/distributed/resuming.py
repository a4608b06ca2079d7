"""The program in the processes of the tests of resuming: parts of one run through DPTrainer on any engine."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, TrainerCallback

from dpllm import DPTrainer
from dpllm.engines.guard import innermost
from dpllm.engines.processes import Processes
from dpllm.privacy.run_folder import adopt
from dpllm.report.verify import verify
from dpllm.training.arguments import training_arguments
from tests.conftest import tiny_llama_config
from tests.distributed.faults import FSDP2
from tests.distributed.setups import dispose
from tests.distributed.world import ROOT
from tests.training.test_trainer import privacy, rows

NUM_STEPS, NUM_ROWS = 6, 8
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Job:
    """One way of training."""

    engine: str
    mode: str = "full"
    dtype: str = "float32"
    optim_args: str | None = None
    average: bool = False

    def __str__(self) -> str:
        ways = [self.engine, self.mode, self.dtype, *([self.optim_args] if self.optim_args else [])]
        return "-".join([*ways, *(["average"] if self.average else [])])


@dataclass(frozen=True)
class Part:
    """A part of a run: on an engine until a step, from the checkpoint of a step in a copy of a folder.

    Attributes:
        job: what is trained, and on which engine.
        folder: of the run.
        stop: the last step.
        source: the folder that is copied. None: the run begins.
        begin: the step of the checkpoint.
        save_steps: how often a checkpoint is saved; the start always is.
    """

    job: Job
    folder: Path
    stop: int
    source: Path | None = None
    begin: int = 0
    save_steps: int = 1


class Record(TrainerCallback):
    """Stops after a step, and records the optimizer's state after loading and at every checkpoint."""

    def __init__(self, stop: int) -> None:
        self._stop = stop
        self.trainer: Any = None
        self.states: dict[str | int, dict[str, Any]] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.states["loaded" if state.global_step else "start"] = whole_states(self.trainer)

    def on_step_end(self, args, state, control, **kwargs):
        self.states[state.global_step] = whole_states(self.trainer)
        control.should_training_stop = state.global_step == self._stop


def whole_states(trainer: Any) -> dict[str, Any]:
    """All parameters as one vector, the norms of the optimizer's states, step counts, and the next rates."""
    parameters = dict(trainer.accelerator.unwrap_model(trainer.model_wrapped).named_parameters())
    zero = trainer.is_deepspeed_enabled
    if zero:
        from deepspeed.utils import safe_get_full_fp32_param as read
    else:
        read = whole
    trained = [read(p).detach().flatten().double() for p in parameters.values() if p.requires_grad]
    frozen = [gathered(p).flatten().double() for p in parameters.values() if not p.requires_grad]
    inner = innermost(trainer.optimizer)
    found: dict[str, Any] = {"parameters": torch.cat(trained)}
    if frozen:
        found["frozen"] = torch.cat(frozen)
    for name in MOMENTS:
        square = sum(float(whole(state[name]).double().square().sum()) for state in inner.state.values())
        found[name] = torch.tensor(Processes().sum([square]) if zero else [square]).sqrt()
    found["steps"] = {float(state["step"]) for state in inner.state.values()}
    groups = [
        group for group in trainer.optimizer.param_groups if zero or group["params"]
    ]  # DeepSpeed has no empty ones
    found["rates"], found["decays"] = ([group[name] for group in groups] for name in ("lr", "weight_decay"))
    if trainer.averaging is not None and trainer.averaging.count:
        found["average"] = trainer.averaging.count
    return found


def whole(value: Any) -> torch.Tensor:
    """A tensor of which each process may hold a part."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered(parameter: Any) -> torch.Tensor:
    """A parameter that is not trained, whole."""
    if not hasattr(parameter, "ds_id"):
        return whole(parameter)
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def model_of(job: Job, resumed: bool) -> Any:
    """The same model on every process and in every run, but for a frozen part that a checkpoint has to bring back."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(tiny_llama_config())
    if job.mode == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
        if resumed:  # and an adapter that a checkpoint has to bring back
            for name, parameter in model.named_parameters():
                if "lora_A" in name:
                    parameter.data.zero_()
    if job.mode == "partly":
        frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        if resumed:
            frozen.data.zero_()
    return model.to(torch.bfloat16) if job.dtype == "bfloat16" else model


def engine_settings(engine: str) -> dict[str, Any]:
    """The settings that select an engine: the files of accelerate_configs; ZeRO-3 divides small parameters too."""
    if engine == "fsdp2":
        AcceleratorState._reset_state(reset_partial_state=True)  # of the part before
        os.environ.update(FSDP2)
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # see fsdp2_on_cpu.py
        return {"accelerator_config": {"use_configured_state": True}}
    if not engine.startswith("zero"):
        return {}
    settings = json.loads((ROOT / f"accelerate_configs/deepspeed/{engine}.json").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return {"deepspeed": settings}


def train(part: Part) -> dict[str | int, Any]:
    """Train until a step: no noise, and every unit in every step, so that a run has one course."""
    job, resume = part.job, part.source is not None
    args = training_arguments(
        {
            "output_dir": str(part.folder),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 1,  # few passes compare rows with each other
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "optim_args": job.optim_args,
            "max_grad_norm": 0.0,
            "bf16": job.dtype == "bfloat16",
            "logging_steps": 2,
            "save_strategy": "steps",
            "save_steps": part.save_steps,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            **engine_settings(job.engine),
        }
    )
    record = Record(part.stop)
    trainer = DPTrainer(
        model=model_of(job, resumed=resume),
        args=args,
        privacy=dataclasses.replace(privacy(), noise_multiplier=0.0, expected_batch_size=NUM_ROWS),
        train_dataset=rows(NUM_ROWS),
        callbacks=[record],
        average={"kind": "ema", "decay": 0.5} if job.average else None,
    )
    record.trainer = trainer
    trainer.train(resume_from_checkpoint=str(part.folder / f"checkpoint-{part.begin}") if resume else None)
    inner = innermost(trainer.optimizer)
    steps = [float(state["step"]) for state in inner.state.values() if "step" in state]
    steps += [float(group["taken"]) for group in inner.param_groups if group.get("taken")]  # CorrectedAdamW
    charged = trainer.ledger.num_steps
    trainer.save_model()
    Processes().wait()
    checks = verify(part.folder).checks if Processes().is_main else ()
    wrong = [f"{check.what}: {check.detail}" for check in checks if not check.ok]
    dispose(trainer.model_wrapped)
    trainer.accelerator.free_memory()
    return {**record.states, "counted": steps, "charged": charged, "wrong": wrong}


def parts(parts: list[Part]) -> list[dict[str | int, Any] | str]:
    """The result of each part, or the message that refused it; all are of one engine."""
    found: list[dict[str | int, Any] | str] = []
    for part in parts:
        if part.source is not None and Processes().is_main:
            shutil.copytree(part.source, part.folder)
            adopt(part.folder)  # each copy goes on by itself
        Processes().wait()
        try:
            found.append(train(part))
        except ValueError as error:  # refused on all processes together
            found.append(f"{type(error).__name__}: {error}")
    return found
