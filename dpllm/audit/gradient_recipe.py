"""The gradient audit of a recipe's model, on any engine that `accelerate launch` sets up.

This is the command `dpllm audit gradient`. No private row is read: base units and canaries are rows of random tokens.
These rows and all random starting weights are the same on every process. The audit covers the installed stack: model,
adapters, clipping, noise, engine and library versions.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dpllm.audit.bounds import CONFIDENCE, AuditError
from dpllm.audit.gradient import Basis, Design, Restarts, Steps, judge_releases, observe, unit_gradients
from dpllm.audit.result import AuditResult
from dpllm.config import PrivacyConfig, Recipe
from dpllm.config.recipe import refuse_trainer
from dpllm.config.tasks import labels_of
from dpllm.data.labels import END, START
from dpllm.data.lengths import Limits
from dpllm.data.rows import RowCollator, load_records
from dpllm.data.units import UnitIndex
from dpllm.engines import private_config
from dpllm.engines.processes import Processes
from dpllm.mechanism.averages import Average
from dpllm.mechanism.catalogue import clipping_of, noise_of, spec_of
from dpllm.mechanism.parts import AdaptiveClipping, Noise, Spec
from dpllm.mechanism.strategies import Workload
from dpllm.models.load import load_model, load_tokenizer
from dpllm.models.tasks import default_row_loss
from dpllm.privacy.ledger import LEDGER_FILE
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.arguments import training_arguments
from dpllm.training.averaging import checked_average
from dpllm.training.row_losses import RowLosses
from dpllm.training.rows import LossOf, TrainingRows
from dpllm.training.run import PrivateRun
from dpllm.training.shared_ledger import SharedLedger

MOST_STEPS = 1_000_000
"""Largest number of steps of an audit."""
MOST_UNITS = 1024
"""Largest number of canaries, and of base units: the gradient of each is held in memory."""
MOST_TOKENS = 4096
"""Largest number of tokens of a canary's row: its gradient is computed in float64."""
NOISE_PROJECTIONS = 1600
"""Smallest number of tested noise projections, if the directions allow it."""

_PUBLIC_SEED = 0  # seed of rows and starting weights, which must be the same on every process


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the command line; see `dpllm audit gradient --help`."""

    blocks: int = 1000
    canaries: int = 1
    base: int = 2
    steps: int = 1
    sampling_rate: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    tokens: int = 16
    confidence: float = CONFIDENCE

    def __post_init__(self) -> None:
        """Refuse values with which the audit would not end in reasonable time.

        Raises:
            AuditError: a value is out of range.
        """
        bounds = {
            "blocks": (1, MOST_STEPS),
            "steps": (1, MOST_STEPS),
            "canaries": (1, MOST_UNITS),
            "base": (1, MOST_UNITS),
            "tokens": (2, MOST_TOKENS),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise AuditError(f"{name} must be from {least} to {most}, got {value}")
        if self.blocks * self.steps > MOST_STEPS:
            raise AuditError(
                f"{self.blocks} blocks of {self.steps} steps are {self.blocks * self.steps} steps, but at most "
                f"{MOST_STEPS} are allowed. Lower --blocks or --steps"
            )

    @property
    def noise_directions(self) -> int:
        """Number of directions in which the noise is tested: enough to show a σ that is a tenth too small."""
        return min(8, -(-NOISE_PROJECTIONS // (self.blocks * self.steps)))

    def audit(self, privacy: PrivacyConfig, average: Average | None = None) -> tuple[Design, PrivacyPlan]:
        """Return the design of the audit, and the plan of its runs, with a recipe's mechanism.

        If steps depend on earlier ones, or an average is released, each block is a separate run. If units are in
        groups, the sampling rate is that within a group, and units that are never present fill the last one. In a fixed
        order, it is the share of the units in each step.

        Args:
            privacy: the recipe's privacy section.
            average: the average of the weights that the recipe releases.

        Raises:
            AuditError: the sampling rate does not give a whole number of units per step, the noise has open numbers, a
                block has too few steps for it, or the parts have no accounting.
        """
        asked = noise_of(Spec.of(privacy.noise))
        groups = self._groups(asked)
        group = -(-(self.base + self.canaries) // groups)
        batch = round(self.sampling_rate * group)
        if batch < 1 or abs(batch - self.sampling_rate * group) > 1e-9:
            raise AuditError(
                f"A sampling rate of {self.sampling_rate:g} does not give a whole number of {group} units. Use "
                f"{max(1, batch)}/{group} = {max(1, batch) / group:g}, or a different number of units"
            )
        correlated = asked.tensors_kept > 0
        adapts = isinstance(clipping_of(Spec.of(privacy.clipping), privacy.clip_norm), AdaptiveClipping)
        own_runs = correlated or adapts or average is not None
        design = Design(self.base, self.canaries, self.blocks, self.steps, own_runs=own_runs, average=average)
        plan = PrivacyPlan.untruncated(
            group * groups,
            batch,
            self.steps * (1 if own_runs else self.blocks),
            self.noise_multiplier,
            privacy.clip_norm,
            self.delta,
        )
        try:
            draw = plan.mechanism.draw
            noise = asked.candidates(draw, Workload.prefix_sums(self.steps))[0] if correlated else asked
            if not noise.is_sampled:
                plan = dataclasses.replace(plan, max_batch_size=batch)
            clipping, drawn_by = Spec.of(privacy.clipping), privacy.randomness
            plan = dataclasses.replace(plan, clipping=clipping, noise=spec_of(noise), randomness=drawn_by)
        except ValueError as error:
            raise AuditError(
                f"The recipe's clipping and noise cannot be audited with these settings: {error}"
            ) from error
        design.check(plan)
        return design, plan

    def _groups(self, noise: Noise) -> int:
        """Return the number of groups into which the noise divides the units.

        Raises:
            AuditError: it is open, or a block has too few steps to show how steps are correlated.
        """
        if not noise.tensors_kept:
            return 1
        groups = noise.unit_groups
        if groups is None:
            raise AuditError(
                "The recipe does not fix the bands of its noise, and the audit has no run for which to choose them. "
                "Add their number, for instance 'privacy.noise={kind: banded, bands: 4}'"
            )
        if groups == 1 and self.steps < 2:
            raise AuditError(
                f"A block has {self.steps} step, but the noise is correlated over steps. Add --steps 8, so that steps "
                "depend on each other and units recur"
            )
        if self.steps < 2 * groups:
            raise AuditError(
                f"A block has {self.steps} step(s), but the noise has {groups} bands, and units recur only after a "
                f"full cycle. Add --steps {2 * groups}, two cycles"
            )
        return groups


def audit_recipe(recipe: Recipe, settings: Settings, on_block: Callable[[], None] = lambda: None) -> AuditResult | None:
    """Audit the steps of a recipe's model. Call it on all processes together.

    Args:
        recipe: its model, mechanism, average and microbatch are used; its data are not read.
        settings: blocks, canaries, noise.
        on_block: called after each block, to show progress.

    Returns:
        The result on rank 0, None on the others.

    Raises:
        AuditError: the settings do not describe an audit, the recipe's noise has open numbers, or its average cannot be
            read.
        ConfigError: the model cannot be loaded.
        EngineError: the engine cannot be used.
    """
    refuse_trainer(recipe, "dpllm audit gradient")
    design, plan = settings.audit(recipe.privacy, checked_average(recipe.train.get("average")))
    torch.manual_seed(_PUBLIC_SEED)
    max_rows = int(recipe.train.get("per_device_train_batch_size", 8))
    model, rows = _model_and_rows(recipe, settings, max_rows, plan.num_units)
    loss_of = _loss_of(model)
    gradients = unit_gradients(model, rows, loss_of, range(design.num_base + design.num_canaries))
    basis = Basis.of(gradients, design.num_base, settings.noise_directions)
    # Not earlier: once ZeRO-3 is set up, a model is loaded in shards, on which no gradient can be computed.
    args = training_arguments({**recipe.train, "report_to": "none"})
    accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if args.bf16 else None)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    prepared, optimizer = _prepared(accelerator, model, optimizer)
    processes = Processes()
    folder = Path(processes.from_main(lambda: tempfile.mkdtemp(prefix="dpllm-audit-")))
    try:
        with accelerator.autocast():
            if design.own_runs:
                way = recipe.privacy.gradients
                runs = Restarts(folder, plan, rows, prepared, optimizer, loss_of, design.starts, design.average, way)
                seen = observe(runs, basis, design, plan.population, processes, on_block)
            else:
                ledger = SharedLedger.create(folder / LEDGER_FILE, plan, processes)
                run = PrivateRun(plan, rows, ledger)
                way = recipe.privacy.gradients  # its rows are random tokens, so its start is independent
                run.attach(prepared, optimizer, start_is_independent=True, gradients=way, loss_of=loss_of)
                release = Steps(run, prepared, optimizer, loss_of, design.steps_per_block)
                seen = observe(release, basis, design, plan.population, processes, on_block)
                run.detach()
                ledger.close()
    finally:
        if processes.is_main:
            shutil.rmtree(folder)
    kind = accelerator.distributed_type.value.lower()
    setup = f"{type(model).__name__}, {processes.size} process(es), engine of accelerate's type {kind}"
    accelerator.end_training()  # the other processes are done
    return judge_releases(seen, plan, design, setup, settings.confidence) if processes.is_main else None


def _model_and_rows(recipe: Recipe, settings: Settings, max_rows: int, num_units: int) -> tuple[Any, TrainingRows]:
    """Return the recipe's model, and rows of random tokens of two lengths, one row per unit."""
    public = recipe.public_pretrain
    texts = None
    if public and recipe.model.tokenizer_vocab_size:
        texts = load_records(public.data)[public.data.column("text")]
    tokenizer = load_tokenizer(recipe.model, texts)
    task = recipe.model.task
    model = load_model(recipe.model, tokenizer, 2)
    room = Limits.of(model).positions
    if room is not None and settings.tokens > room:
        raise AuditError(f"tokens is {settings.tokens}, but the model has {room} positions. Lower --tokens")
    rng = np.random.default_rng(_PUBLIC_SEED)
    size = int(model.config.num_labels or 2)
    examples = [_random_row(rng, settings.tokens - unit % 2, len(tokenizer), task, size) for unit in range(num_units)]
    return model, TrainingRows(
        units=UnitIndex.one_row_per_unit(len(examples)),
        lengths=np.array([len(example["input_ids"]) for example in examples]),
        fetch=lambda numbers: [examples[int(number)] for number in numbers],
        collate=RowCollator(pad_token_id=tokenizer.pad_token_id, task=task),
        max_rows=max_rows,
    )


def _random_row(rng: np.random.Generator, length: int, num_tokens: int, task: str, num_labels: int) -> dict[str, Any]:
    ids = rng.integers(0, num_tokens, max(2, length)).tolist()
    kind = labels_of(task)
    if kind == "class":
        return {"input_ids": ids, "labels": int(rng.integers(0, 2))}
    if kind == "numbers":
        return {"input_ids": ids, "labels": rng.integers(0, 2, num_labels).tolist()}
    if kind == "span":  # the first token is the answer
        return {"input_ids": ids, "labels": [START + END, *[0] * (len(ids) - 1)]}
    if kind == "tokens":
        return {"input_ids": ids, "labels": rng.integers(0, 2, len(ids)).tolist()}
    return {"input_ids": ids, "labels": rng.integers(0, num_tokens, len(ids)).tolist() if task == "seq2seq_lm" else ids}


def _loss_of(model: nn.Module) -> LossOf:
    """Return the loss per row of the model's task."""
    losses = RowLosses(default_row_loss(model), packed=False)

    def loss_of(module: Any, inputs: Mapping[str, Any]) -> Tensor:
        device = next(module.parameters()).device
        moved = {name: value.to(device) for name, value in inputs.items()}
        return losses(module, moved)

    return loss_of


def _prepared(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return the model and optimizer as prepared by the engine."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        config = plugin.deepspeed_config
        private_config(config)
        config["train_micro_batch_size_per_gpu"] = 1
        config.update(zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    return prepared, wrapped
