"""Rehearse a run: short trainings with the plan's noise on public text, which compare learning rates without any ε.

`dpllm plan suggest --rehearse` does this before the private run. The private records are neither read nor needed: the
rehearsal has its own plan, for the public rows, in a folder that is deleted. Each training is done by
`dpllm.DPTrainer`, so it takes the product's own steps: clipping, noise, schedule and average.

What equals the plan and what is shorter:

- Batch b, clip norm, clipping, σ, and the bands and strategy of the noise are the plan's, so a step has the plan's
  noise-to-signal ratio. If the public text has too few rows for such batches, batch and σ shrink by the same factor:
  σ/b, the noise of the averaged gradient, stays the plan's, and only the sampling noise of a step grows.
- The number of steps is a quarter, in whole cycles of bands. The schedule and the average cover the same shares of the
  run. Fewer steps collect less signal, so the losses are worse than those of the run; only their order counts.
- The learning rate is multiplied by a factor with which noise moves the released weights of rehearsal and run equally
  far (`dpllm.planning.rate_scaling`): with independent noise, a quarter of the steps takes twice the rate, as in the
  rule 1/√T.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from dpllm.config import PrivacyConfig
from dpllm.data.records import DataError
from dpllm.engines.finite import NonfiniteError
from dpllm.models.load import prepare_model
from dpllm.planning.public_text import QUIET, Material
from dpllm.planning.rate_scaling import rate_factor
from dpllm.training.arguments import training_arguments
from dpllm.training.evaluation import measure
from dpllm.training.preflight import PLAIN
from dpllm.training.save_rehearsal import quiet
from dpllm.training.settings import two_digits
from dpllm.training.suggested_run import Suggested
from dpllm.training.trainer import DPTrainer
from dpllm.training.workload import UpdateRule

STEP = 2.0
"""The ratio of neighbouring learning rates."""
_SHORTER, _FEWEST_STEPS, _CYCLES = 4, 20, 2
_SMALLEST_BATCH = 8
_DROPPED = (
    *("output_dir", "max_steps", "num_train_epochs", "learning_rate", "average", "resume_from_checkpoint", "run_name"),
    *("push_to_hub", "hub_model_id", "save_steps", "eval_steps", "eval_on_start", "logging_steps"),
    *("logging_first_step", "seed", "data_seed", "metric_for_best_model", "greater_is_better"),
)
Moved = Callable[[int], None]
"""Called after each step of a training with its number."""


@dataclass(frozen=True)
class Shortened:
    """The numbers of each training of a rehearsal.

    Attributes:
        num_steps: T'.
        batch: the expected batch size, in public rows.
        noise_multiplier: σ for such batches; σ/b is the plan's.
        average: the average, over the same share of the steps. None: the last weights.
        rate_factor: the learning rate of the rehearsal over that of the run.
        batch_of_plan: b.
        num_steps_of_plan: T.
    """

    num_steps: int
    batch: int
    noise_multiplier: float
    average: dict[str, Any] | None
    rate_factor: float
    batch_of_plan: int
    num_steps_of_plan: int

    def words(self) -> list[str]:
        """Return the differences from the run, one line each."""
        found = ["The rehearsal takes all steps of the run."]
        if self.num_steps < self.num_steps_of_plan:
            found = [
                f"The rehearsal takes {self.num_steps:,} of {self.num_steps_of_plan:,} steps, each with the plan's "
                "noise-to-signal ratio. Fewer steps collect less signal, so the losses are worse than those of the "
                "run, and only their order matters.",
                f"The learning rate of the rehearsal is {self.rate_factor:.3g} times that of the run, so that noise "
                "moves the released weights equally far.",
            ]
        if self.batch < self.batch_of_plan:
            found.append(
                f"The public text has too few rows for batches of {self.batch_of_plan:,}. With batches of "
                f"{self.batch:,} and σ = {self.noise_multiplier:.3g}, σ/b equals the plan's, but each step has more "
                "sampling noise."
            )
        return found


@dataclass(frozen=True)
class Trial:
    """One training of a rehearsal.

    Attributes:
        rate: the learning rate of the run.
        rehearsed_rate: the learning rate of the rehearsal.
        loss: mean loss per target token of held-out public rows; inf if the training did not stay finite.
    """

    rate: float
    rehearsed_rate: float
    loss: float


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        trials: in the order of their rates.
        loss_before: the loss before training.
        shortened: the numbers of each training.
        source: name of the public text.
        num_rows: public rows that were trained on.
        num_held_out: number of public rows over which the losses are averaged.
    """

    trials: tuple[Trial, ...]
    loss_before: float
    shortened: Shortened
    source: str
    num_rows: int
    num_held_out: int

    @property
    def best(self) -> Trial:
        """The training with the smallest loss."""
        return min(self.trials, key=lambda trial: trial.loss)

    @property
    def edge(self) -> str | None:
        """Whether the best rate is the "largest" or the "smallest" that was tried; None: neither."""
        if self.best is self.trials[-1]:
            return "largest"
        return "smallest" if self.best is self.trials[0] else None

    def notes(self) -> tuple[str, ...]:
        """Return remarks on the recommendation."""
        found = []
        if self.edge is not None:
            beyond = two_digits(self.best.rate * (STEP if self.edge == "largest" else 1 / STEP))
            found.append(
                f"The best rate is the {self.edge} that was tried, so a better one may lie beyond it: rehearse again "
                f"with --around {beyond:g}."
            )
        if self.best.loss >= self.loss_before:
            found.append(
                "No rate improved on the start: in so few steps, noise hides the signal. Rehearse with more "
                "steps (--rehearsal-steps), or compare larger batches (dpllm plan sweep RECIPE)."
            )
        return (*found, "Each rate was trained once, so rates with nearly equal losses may change places.")


def shorten(suggested: Suggested, num_rows: int, num_steps: int | None = None) -> Shortened:
    """Return the numbers of the trainings of a rehearsal; see the module.

    Args:
        suggested: the run.
        num_rows: public rows to train on.
        num_steps: T'. None: a quarter of the run's, in whole cycles of its bands.

    Raises:
        ValueError: there are too few rows, or fewer steps than one cycle, or more than in the run.
    """
    plan, noise = suggested.plan, suggested.plan.mechanism.noise
    bands, most = int(getattr(noise, "bands", 1)), plan.num_steps
    least = min(bands, most)
    if num_steps is None:
        wanted = max(-(-most // _SHORTER), _CYCLES * bands, _FEWEST_STEPS)
        num_steps = min(most, -(-wanted // bands) * bands)
    if not least <= num_steps <= most:
        raise ValueError(
            f"--rehearsal-steps must be between {least} (one cycle of the bands) and {most} (the steps of the run), "
            f"got {num_steps}"
        )
    batch = min(plan.expected_batch_size, num_rows // bands)
    if batch < min(_SMALLEST_BATCH, plan.expected_batch_size):
        raise DataError(
            f"the public text has {num_rows} training rows, but a rehearsal with {bands} band(s) needs at least "
            f"{_SMALLEST_BATCH * bands}: give more public text (--public)"
        )
    average = dict(suggested.recipe.train["average"])
    average["decay"] = round(1 - (1 - average["decay"]) * most / num_steps, 4)
    kept = average if average["decay"] > 0 else None
    arguments = training_arguments({**PLAIN, **suggested.recipe.train})
    return Shortened(
        num_steps=num_steps,
        batch=batch,
        noise_multiplier=plan.noise_multiplier * batch / plan.expected_batch_size,
        average=kept,
        rate_factor=rate_factor(noise, suggested.rule, UpdateRule.of(arguments, num_steps, kept)),
        batch_of_plan=plan.expected_batch_size,
        num_steps_of_plan=most,
    )


def rehearse(
    suggested: Suggested,
    material: Material,
    shortened: Shortened,
    centre: float,
    folder: Path,
    begins: Callable[[float], Moved],
) -> Rehearsal:
    """Train with three learning rates around a centre, and with a fourth if the best is at an edge.

    Args:
        suggested: the run.
        material: the public rows and the start.
        shortened: the numbers of each training.
        centre: a learning rate of the run.
        folder: empty folder for the files of the trainings, to be deleted by the caller.
        begins: called before each training with its rate of the run; returns the function called after its steps.
    """
    trials: list[Trial] = []

    def take(rate: float) -> None:
        rehearsed = rate * shortened.rate_factor
        moved = begins(rate)
        loss = _loss_of(suggested, material, shortened, rehearsed, folder / f"rate{len(trials)}", moved)
        trials.append(Trial(rate, two_digits(rehearsed), loss))

    with quiet():
        before = measure(material.base, material.held_out, material.collator).loss
        for factor in (1 / STEP, 1.0, STEP):
            take(two_digits(centre * factor))
        best = min(range(3), key=lambda number: trials[number].loss)
        if best != 1:
            take(two_digits(centre * (STEP**2 if best == 2 else STEP**-2)))
    return Rehearsal(
        trials=tuple(sorted(trials, key=lambda trial: trial.rate)),
        loss_before=before,
        shortened=shortened,
        source=material.source,
        num_rows=len(material.rows),
        num_held_out=len(material.held_out),
    )


def _loss_of(
    suggested: Suggested, material: Material, shortened: Shortened, rate: float, folder: Path, moved: Moved
) -> float:
    """Train once by the product's own path, and return the held-out loss of the released weights."""
    recipe = suggested.recipe
    section = {name: value for name, value in recipe.train.items() if name not in _DROPPED}
    args = training_arguments(
        {
            **PLAIN,
            **section,
            **QUIET,
            "output_dir": str(folder),
            "max_steps": shortened.num_steps,
            "learning_rate": rate,
        }
    )
    trainer = DPTrainer(
        model=prepare_model(copy.deepcopy(material.base), recipe.model),
        args=args,
        privacy=_privacy(suggested, shortened),
        train_dataset=material.rows,
        processing_class=material.tokenizer,
        data_collator=material.collator,
        callbacks=[Steps(moved)],
        max_tokens_per_microbatch=recipe.microbatch.tokens,
        pack_rows=recipe.microbatch.pack,
        head=recipe.model.head,
        noise_memory=recipe.noise_memory,
        average=shortened.average,
        start_is_independent=True,  # the public rows need no protection
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
        model: Any = trainer.model
        loss = measure(model, material.held_out, material.collator).loss
    except NonfiniteError:
        loss = math.inf
    del trainer
    gc.collect()  # the copy of the model and the optimizer's state refer to each other
    return loss if math.isfinite(loss) else math.inf


def _privacy(suggested: Suggested, shortened: Shortened) -> PrivacyConfig:
    """Return the guarantee of the public rows: the plan's mechanism at the same σ/b, without dataset and budget."""
    plan, clipping = suggested.plan, suggested.plan.clipping.to_plain()
    if isinstance(clipping, dict) and "count_noise" in clipping:  # it is in units, as b is
        clipping["count_noise"] *= shortened.batch / plan.expected_batch_size
    return PrivacyConfig(
        clip_norm=plan.clip_norm,
        expected_batch_size=shortened.batch,
        noise_multiplier=shortened.noise_multiplier,
        clipping=clipping,
        noise=plan.noise.to_plain(),
        randomness=plan.randomness,
    )


class Steps(TrainerCallback):
    """Calls a function after each step with its number."""

    def __init__(self, moved: Moved) -> None:
        """Store the function."""
        self._moved = moved

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call the function."""
        self._moved(state.global_step)
