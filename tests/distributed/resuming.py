"""What runs in the processes of `test_deepspeed_resume`: parts of one run through DPTrainer, and what was trained."""

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
from dpllm.arguments import training_arguments
from dpllm.processes import Processes
from tests.conftest import tiny_llama_config
from tests.distributed.setups import dispose
from tests.distributed.world import ROOT
from tests.test_trainer import privacy, rows

NUM_STEPS = 6
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Job:
    """One way of training."""

    engine: str
    mode: str = "full"
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.engine}-{self.mode}-{self.dtype}"


class Record(TrainerCallback):
    """Stops after a step, and keeps what the optimizer holds at the beginning and at the end."""

    def __init__(self, stop: int) -> None:
        self._stop = stop
        self.trainer: Any = None
        self.states: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.states.append(whole_states(self.trainer.model_wrapped) if state.global_step else {})

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._stop:
            self.states.append(whole_states(self.trainer.model_wrapped))
            control.should_training_stop = True


def whole_states(engine: Any) -> dict[str, torch.Tensor]:
    """The master parameters as one vector, and the norm of every kind of optimizer state over all processes."""
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    found = {"parameters": torch.cat([safe_get_full_fp32_param(p).flatten().double() for p in parameters])}
    states = engine.optimizer.optimizer.state.values()
    for name in MOMENTS:
        square = sum(float(state[name].double().square().sum()) for state in states)
        found[name] = torch.tensor(Processes().sum([square])).sqrt()
    found["steps"] = torch.tensor([float(state["step"]) for state in states])
    return found


def model_of(job: Job) -> Any:
    """The same model on every process and in every run."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(tiny_llama_config())
    if job.mode == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    return model.to(torch.bfloat16) if job.dtype == "bfloat16" else model


def deepspeed_settings(engine: str) -> dict[str, Any]:
    """What accelerate_configs ships; ZeRO-3 divides small parameters too."""
    settings = json.loads((ROOT / f"accelerate_configs/deepspeed/{engine}.json").read_text())
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return settings


def train(job: Job, folder: Path, stop: int, resume: bool) -> dict[str, Any]:
    """Train until a step: no noise, and every unit in every step, so that a run has one course."""
    args = training_arguments(
        {
            "output_dir": str(folder),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.0,
            "optim": "adamw_torch",
            "bf16": job.dtype == "bfloat16",
            "logging_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "deepspeed": deepspeed_settings(job.engine),
        }
    )
    record = Record(stop)
    trainer = DPTrainer(
        model=model_of(job),
        args=args,
        privacy=dataclasses.replace(privacy(), noise_multiplier=0.0, expected_batch_size=16),
        train_dataset=rows(16),
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    steps = trainer.ledger.num_steps
    dispose(trainer.model_wrapped)
    trainer.accelerator.free_memory()
    return {"begin": record.states[0], "end": record.states[1], "charged": steps}


def parts(jobs: list[Job], runs: Path, source: str | None, part: str, stop: int) -> list[dict[str, Any]]:
    """Train every job until a step, from a copy of what another part left; each in its own folder."""
    found = []
    for job in jobs:
        output = runs / part / str(job)
        if source and int(torch.distributed.get_rank()) == 0:
            shutil.copytree(runs / source / str(job), output)
        torch.distributed.barrier()
        found.append(train(job, output, stop, resume=source is not None))
    return found
