"""The program in the processes of `test_deepspeed_resume`: parts of one run through DPTrainer, and its weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, TrainerCallback

from dpllm import DPTrainer
from dpllm.engines.processes import Processes
from dpllm.privacy.identity import adopt
from dpllm.training.arguments import training_arguments
from tests.conftest import tiny_llama_config
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

    def __str__(self) -> str:
        return "-".join([self.engine, self.mode, self.dtype, *([self.optim_args] if self.optim_args else [])])


class Record(TrainerCallback):
    """Stops after a step, and records the optimizer's state after loading and at every checkpoint."""

    def __init__(self, stop: int) -> None:
        self._stop = stop
        self.trainer: Any = None
        self.states: dict[str | int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.states["loaded"] = whole_states(self.trainer.model_wrapped)

    def on_step_end(self, args, state, control, **kwargs):
        self.states[state.global_step] = whole_states(self.trainer.model_wrapped)
        control.should_training_stop = state.global_step == self._stop


def whole_states(engine: Any) -> dict[str, torch.Tensor]:
    """The master parameters as one vector, and the norm of every kind of optimizer state over all processes."""
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    found = {"parameters": torch.cat([safe_get_full_fp32_param(p).flatten().double() for p in parameters])}
    for name in MOMENTS:
        states = engine.optimizer.optimizer.state.values()
        square = sum(float(state[name].double().square().sum()) for state in states)
        found[name] = torch.tensor(Processes().sum([square])).sqrt()
    return found


def model_of(job: Job, resumed: bool) -> Any:
    """The same model on every process and in every run, but for a frozen part that a checkpoint has to bring back."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(tiny_llama_config())
    if job.mode == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    if job.mode == "partly":
        frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        if resumed:
            frozen.data.zero_()
    return model.to(torch.bfloat16) if job.dtype == "bfloat16" else model


def deepspeed_settings(engine: str) -> dict[str, Any]:
    """The files of accelerate_configs; ZeRO-3 divides small parameters too."""
    settings = json.loads((ROOT / f"accelerate_configs/deepspeed/{engine}.json").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


def train(job: Job, folder: Path, stop: int, resume: Path | None) -> dict[str | int, Any]:
    """Train until a step: no noise, and every unit in every step, so that a run has one course."""
    args = training_arguments(
        {
            "output_dir": str(folder),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 1,  # few passes compare rows with each other
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "optim_args": job.optim_args,
            "max_grad_norm": 0.0,
            "bf16": job.dtype == "bfloat16",
            "logging_steps": 2,
            "save_strategy": "steps",
            "save_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "deepspeed": deepspeed_settings(job.engine),
        }
    )
    record = Record(stop)
    trainer = DPTrainer(
        model=model_of(job, resumed=resume is not None),
        args=args,
        privacy=dataclasses.replace(privacy(), noise_multiplier=0.0, expected_batch_size=NUM_ROWS),
        train_dataset=rows(NUM_ROWS),
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    inner = trainer.optimizer.optimizer.optimizer
    steps = [float(state["step"]) for state in inner.state.values() if "step" in state]
    steps += [float(group["taken"]) for group in inner.param_groups if "taken" in group]  # CorrectedAdamW
    charged = trainer.ledger.num_steps
    dispose(trainer.model_wrapped)
    trainer.accelerator.free_memory()
    return {**record.states, "counted": steps, "charged": charged}


def parts(jobs: list[Job], runs: Path, source: str | None, begin: int, part: str, stop: int) -> list[dict]:
    """Train every job until a step, from the checkpoint of a step in a copy of another part's folder."""
    found = []
    for job in jobs:
        folder = runs / part / str(job)
        if source and torch.distributed.get_rank() == 0:
            shutil.copytree(runs / source / str(job), folder)
            adopt(folder)  # each copy goes on by itself
        torch.distributed.barrier()
        found.append(train(job, folder, stop, folder / f"checkpoint-{begin}" if source else None))
    return found
