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
  far (`rate_factor`): with independent noise, a quarter of the steps takes twice the rate, as in the
  rule 1/√T.

The public text is checked not to be the private data. If the recipe has a public stage, the stage comes first, as
before the private run. If the rehearsal has only the text of the stage, one half trains the stage and the other half is
used for the rehearsal, since rows on which the model was already trained would favour small rates.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PrinterCallback, TrainerCallback

from dpllm.config import DataConfig, HeldOut, PrivacyConfig, Recipe
from dpllm.data.records import DataError, load_records, load_train_and_eval, shared_source
from dpllm.data.rows import RowCollator, num_labels_of, tokenize_records
from dpllm.data.shared_records import shared_records
from dpllm.data.tokenization import RECORD
from dpllm.engines.finite import NonfiniteError
from dpllm.mechanism.parts import Noise
from dpllm.models.load import load_base_model, load_tokenizer, prepare_model
from dpllm.privacy.calibration import step_noise
from dpllm.training.arguments import training_arguments
from dpllm.training.evaluation import measure
from dpllm.training.finetune import start_in, train_on_public_text
from dpllm.training.preflight import PLAIN
from dpllm.training.save_rehearsal import quiet
from dpllm.training.settings import two_digits
from dpllm.training.suggested_run import Suggested
from dpllm.training.trainer import DPTrainer
from dpllm.training.weight_size import WeightSize, size_of_parameters
from dpllm.training.workload import UpdateRule

QUIET = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "push_to_hub": False,
}
"""Options of trainings whose results are compared and whose files are deleted."""
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.1, 500
_SHUFFLE = 20240229  # a public constant

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


def rate_factor(noise: Noise, run: UpdateRule, shorter: UpdateRule) -> float:
    """Return the learning rate of a shorter run over that of the run, with the same noise.

    Derivation, for the expected loss of a quadratic model. Direction i has curvature h_i, and the start is Δ_i away
    from the optimum in it. With learning rate η the released weights follow a constant gradient by ηA, where A is the
    sum of the workload's response w (`dpllm.mechanism.strategies`), and they contain noise of standard deviation ηN,
    where N = ‖wᵀM⁻¹‖ in units of σC/b. Then

        2 E L(η) = Σ_i h_i Δ_i² exp(-2 η A h_i) + η² N² Σ_i h_i,

    and at the best rate A Σ_i h_i² Δ_i² exp(-2 η A h_i) = η N² Σ_i h_i. Let u be the mean of η A h_i with the terms of
    the left sum as weights: the progress in the directions that still have a gradient. The derivative of the logarithms
    gives

        (1 + 2u) d ln η = (1 - 2u) d ln A - 2 d ln N.

    - u near 0: the weights hardly move, and nearly all of the loss remains. The best rate is proportional to A / N².
    - u = ½: it is proportional to 1 / N, for any A.
    - u large: the noise does not matter. It is proportional to 1 / A.

    Adam divides each update by about S, the root mean square of the noise of a step: η / S replaces η. Correlated
    noise of a short run has smaller steps, because noise of earlier cycles is not yet in them, so S does not cancel.

    The factor is the one for u = ½: the rate is proportional to S / N (1 / N without the division), and noise moves the
    released weights of both runs equally far. Reason: in quadratic models with curvatures h_i ∝ i^-a for a from 0.5 to
    2, whose runs leave 1 to 40 % of the loss, the exact best rate of 48 steps over that of 160 (AdamW, constant rate,
    average) was 0.9 to 1.6 with 16 bands, on average 1.08, and 1.4 to 2.1 with independent noise, on average 1.6. S / N
    gives 1.14 and 1.71; A S / N² gives 0.49 and 0.88, and 1 / N, without the size of a step, 1.43 with bands.

    Assumptions: the noise of a step is larger than its signal; each direction has the same noise; the noise in the
    weights is not affected by the curvature (in the exact ratios above it is); the optimum is the same for both runs;
    and the warm-up and the average are the same shares of both.

    Args:
        noise: noise of both runs, with all its numbers.
        run: the update rule of the run.
        shorter: the update rule of the shorter run, with the same optimizer.
    """
    return _moved_by_noise(noise, run) / _moved_by_noise(noise, shorter)


def _moved_by_noise(noise: Noise, rule: UpdateRule) -> float:
    """Return the standard deviation of the noise in the released weights, in learning rates."""
    size = step_noise(noise, len(rule.rates)) if rule.divides else 1.0
    return noise.error(rule.workload()) / size


@dataclass(frozen=True)
class Material:
    """The public rows and the start of all trainings.

    Attributes:
        base: the model without adapters; it is copied for each training.
        tokenizer: its tokenizer.
        rows: rows to train on; each is a unit.
        held_out: rows to measure.
        collator: makes tensors from rows.
        source: name of the text.
        size: the size of the trained weights.
    """

    base: Any
    tokenizer: Any
    rows: datasets.Dataset
    held_out: datasets.Dataset
    collator: RowCollator
    source: str
    size: WeightSize


def public_section(recipe: Recipe, path: str | None) -> DataConfig:
    """Return the section with which a rehearsal reads public text.

    Args:
        recipe: its public stage is used if ``path`` is None.
        path: path of public text in the form of the private records; a .txt file has one text in each line.

    Raises:
        DataError: there is no public text; or it, or the text of the public stage, is a source of the private records.
            No file is opened for this.
    """
    if path is None and recipe.public_pretrain is None:
        raise DataError(
            "a rehearsal needs public text, and the recipe has no public_pretrain section: add --public FILE"
        )
    if path is None:
        assert recipe.public_pretrain is not None
        section = _stage_section(recipe, recipe.public_pretrain.data)
    else:
        own: dict[str, Any] = {"eval": HeldOut()}
        if path.endswith(".txt"):
            own |= {"format": "text", "columns": {"text": "text"}}
        section = dataclasses.replace(recipe.data, **own, path=path, name=None, split="train", limit=None)
    for text in _sections(recipe, section):
        same = shared_source(recipe.data, text)
        if same is not None:
            raise DataError(
                f"the public text of a rehearsal, {text.path}, is a source of the private records ({same}). A "
                "rehearsal spends no ε, so it may use none of them: give public text in separate files"
            )
    return section


def _sections(recipe: Recipe, section: DataConfig) -> list[DataConfig]:
    """Return all sections whose text a rehearsal trains on; the public stage's comes first."""
    stage = recipe.public_pretrain
    return [section] if stage is None or section == _stage_section(recipe, stage.data) else [stage.data, section]


def _stage_section(recipe: Recipe, data: DataConfig) -> DataConfig:
    """Return the section with which a rehearsal reads the text of the public stage."""
    return dataclasses.replace(data, eval=HeldOut(), max_length=recipe.data.max_length)


def refuse_private_records(recipe: Recipe, section: DataConfig, records: Sequence[Any]) -> None:
    """Check that the public text of a rehearsal, and that of the public stage, contain no private records.

    Args:
        recipe: its data section reads the private records.
        section: reads the text to rehearse on.
        records: private records, and held-out ones unless they are public.

    Raises:
        DataError: it contains some. The message omits their number, which depends on the private records.
    """
    stage = recipe.public_pretrain
    for text in _sections(recipe, section):
        of_stage = stage is not None and stage.data.path == text.path
        allowed = stage.max_shared_records if stage is not None and of_stage else 0
        public = load_records(text)
        if sum(shared_records(private, recipe.data, public, text) for private in records) > allowed:
            name = "public_pretrain.data.path=" if of_stage else ""
            remedy = "" if of_stage else ", or give other public text (--public)"
            raise DataError(
                f"the public text of a rehearsal, {name}{text.path}, contains private records of "
                f"data.path={recipe.data.path} ({allowed} are declared): remove them from the public text{remedy}"
            )


def load_material(recipe: Recipe, section: DataConfig, folder: Path, callbacks: Sequence[TrainerCallback]) -> Material:
    """Read the public text, run the recipe's public stage, and hold out rows to measure.

    Args:
        recipe: its private data are not read.
        section: made by `public_section`.
        folder: empty folder for the model after the public stage, to be deleted by the caller.
        callbacks: callbacks of the public stage.

    Raises:
        ConfigError, DataError: the text or the model cannot be loaded, or there are too few records.
    """
    records, held_out = load_train_and_eval(dataclasses.replace(section, eval=HeldOut(share=_HELD_OUT_SHARE)))
    assert held_out is not None, "a share is held out"
    stage, staged = recipe.public_pretrain, None
    texts = None
    if stage is not None:
        all_staged = load_records(stage.data)
        texts = all_staged[stage.data.column("text")] if recipe.model.tokenizer_vocab_size else None
        if section.path == stage.data.path:
            if len(records) < 2:
                raise DataError(f"{section.path} has too few records for a public stage and a rehearsal: use --public")
            order = np.random.default_rng(_SHUFFLE).permutation(len(records))
            half = len(records) // 2
            staged, records = records.select(np.sort(order[:half])), records.select(np.sort(order[half:]))
        else:
            staged = all_staged
    tokenizer = load_tokenizer(recipe.model, texts)
    task, num_labels, start = recipe.model.task, num_labels_of(records, section), recipe.model
    if staged is not None:
        train_on_public_text(recipe, staged, tokenizer, num_labels, folder, QUIET, callbacks)
        start = start_in(folder, recipe.model)
    base = load_base_model(start, tokenizer, num_labels)
    num_labels = base.config.num_labels

    def rows_of(part: datasets.Dataset) -> datasets.Dataset:
        rows = tokenize_records(part, tokenizer, section, (), task, num_labels)
        return rows.remove_columns(RECORD) if RECORD in rows.column_names else rows  # each row is a unit

    measured = rows_of(held_out)
    trained = prepare_model(copy.deepcopy(base), recipe.model).parameters()
    return Material(
        base=base,
        tokenizer=tokenizer,
        rows=rows_of(records),
        held_out=measured.select(range(min(len(measured), _MOST_HELD_OUT))),
        collator=RowCollator(pad_token_id=tokenizer.pad_token_id, task=task),
        source=section.path,
        size=size_of_parameters(trained, "of the trained weights at the start of the rehearsal"),
    )
