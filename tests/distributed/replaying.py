"""Runs in two processes whose passes run from recordings, and the same runs without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
from transformers import TrainingArguments as training_arguments

from dpllm import DPTrainer, NormMethod
from tests.conftest import tiny_llama_config
from tests.training.test_trainer import rows, users


def run(root: Path) -> dict[str, Any]:
    """Weights with recordings on all processes, on none, and (``switched``) on one of them; and replayed passes."""
    rank = torch.distributed.get_rank()
    kinds = {"without": False, "with": True, "on one": rank == 1}
    found: dict[str, Any] = {}
    for name, replay in kinds.items():
        torch.manual_seed(0)
        adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        args = training_arguments(
            output_dir=str(root / name),
            max_steps=8,
            per_device_train_batch_size=6,
            learning_rate=1e-2,
            optim="sgd",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DPTrainer(
            get_peft_model(LlamaForCausalLM(tiny_llama_config(num_hidden_layers=1)), adapters),
            args,
            users(noise_multiplier=1.0, clip_norm=0.05, seed=3, expected_batch_size=6),
            rows(who=[n % 16 for n in range(64)]),
            norm_method=NormMethod(replay=replay),
        )
        replays: list[int] = []
        detach = trainer._train_to_the_end

        def counted(*args: Any, run=trainer, detach=detach, replays=replays) -> Any:
            attach = type(run).attach

            def noted() -> None:
                attach(run)
                replays.append(run._run_of_now().private._attached.clipper)

            run.attach = noted
            return detach(*args)

        trainer._train_to_the_end = counted
        trainer.train()
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])
        found[name] = (weights, [c.replays for c in replays], trainer.ledger.num_steps)
        trainer.accelerator.free_memory()
    return found
