"""Runs in two processes, with passes that run from recordings and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpllm import NormMethod
from dpllm.ghost.replay import Replay
from tests.training.test_trainer import arguments, rows, small_trainer, users


def weights(root: Path) -> dict[str, Any]:
    """The trained weights, the number of passes that were replayed on this process, and the steps charged."""
    norms, seen, found = Replay.norms, list[Replay](), dict[str, Any]()
    Replay.norms = lambda self, *given: (seen.append(self), norms(self, *given))[1]  # type: ignore[method-assign]
    for kind, replay in (("none", False), ("both", True)):
        torch.manual_seed(0)
        seen.clear()
        run = small_trainer(
            root / kind,
            dataset=rows(who=[n % 16 for n in range(64)]),
            config=users(noise_multiplier=1.0, clip_norm=0.05, seed=3, expected_batch_size=8),
            args=arguments(root / kind, per_device_train_batch_size=4, max_steps=4, optim="sgd"),
            norm_method=NormMethod(replay=replay),
        )
        run.train()
        replayed = sum(shape.replayed for one in seen[-1:] for shape in one._shapes.values())
        trained = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        found[kind] = trained, replayed, run.ledger.num_steps
        run.accelerator.free_memory()
    return found
