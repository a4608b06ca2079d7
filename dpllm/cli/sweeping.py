"""The settings of `dpllm plan --sweep`: the numbers of a recipe, or numbers given directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dpllm.cli.common import show_json, show_table
from dpllm.config.values import integer

if TYPE_CHECKING:
    from dpllm.config import Recipe
    from dpllm.mechanism.parts import Noise
    from dpllm.mechanism.workload import Workload
    from dpllm.privacy.plan import PrivacyPlan

UTILIZATION = 0.4
"""Share of a GPU's peak that training is assumed to reach if no throughput was measured."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One budget, and the run around which the sweep varies batch size and steps."""

    name: str
    num_units: int
    expected_batch_size: int
    num_steps: int
    target_epsilon: float
    delta: float
    adjacency: str
    tokens_per_unit: float | None
    flops_per_token: float | None = None

    @classmethod
    def of_numbers(
        cls,
        *,
        num_units: int | None,
        expected_batch_size: int | None,
        num_steps: int | None,
        target_epsilon: float | None,
        delta: float | None,
        tokens_per_unit: float | None,
    ) -> Setting:
        """Return the setting of the command line's numbers."""
        if num_units is None or expected_batch_size is None or num_steps is None or target_epsilon is None:
            raise ValueError(
                "a sweep without a recipe needs --num-units, --expected-batch-size, --steps and --epsilon: give all "
                "four, or a recipe"
            )
        for option, count in (
            ("num-units", num_units),
            ("expected-batch-size", expected_batch_size),
            ("steps", num_steps),
        ):
            integer(f"--{option}", count, 1)
        return cls(
            name="the numbers given",
            num_units=num_units,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            target_epsilon=target_epsilon,
            delta=1 / (10 * num_units) if delta is None else delta,
            adjacency="zero-out",
            tokens_per_unit=tokens_per_unit,
        )

    @classmethod
    def of_recipe(cls, path: Path, recipe: Recipe, plan: PrivacyPlan, with_flops: bool) -> Setting:
        """Return the setting of a recipe; its rows are assumed to have the maximum length.

        Raises:
            ValueError: the recipe draws rows, or its noise is discrete.
        """
        if plan.sampling == "example":
            raise ValueError('--sweep needs runs that draw whole units; set privacy.sampling="unit" for it')
        if plan.randomness == "discrete":
            raise ValueError(
                "--sweep computes the ε of Gaussian noise, and that of discrete noise is larger: sweep with "
                "privacy.randomness=os, and plan the run that you choose with privacy.randomness=discrete"
            )
        rows = plan.max_rows_per_unit or 1
        return cls(
            name=str(path),
            num_units=plan.num_units,
            expected_batch_size=plan.expected_batch_size,
            num_steps=plan.num_steps,
            target_epsilon=plan.target_epsilon if plan.target_epsilon is not None else plan.epsilon,
            delta=plan.delta,
            adjacency=plan.adjacency,
            tokens_per_unit=float(rows * recipe.data.max_length),
            flops_per_token=_flops_per_token(recipe) if with_flops else None,
        )


def _flops_per_token(recipe: Recipe) -> float:
    """Return 6 per trained parameter and 4 per frozen one: forward, backward to activations, backward to weights."""
    from dpllm.planning.model_shape import shape_of_model  # imports torch

    shape = shape_of_model(recipe.model)
    return 4.0 * shape.total + 2.0 * shape.trainable


@dataclass(frozen=True)
class SweepOptions:
    """The options of --sweep, with their defaults."""

    batch_sizes: str | None = None
    step_counts: str | None = None
    compute: str = "recipe"
    min_steps: int | None = None
    gradient_rms: float = 0.0
    tokens_per_second: float | None = None
    peak_tflops: float | None = None
    picture: Path | None = None

    def refuse_with_correlated_noise(self) -> None:
        """Refuse the options that belong to independent noise.

        Raises:
            ValueError: one of them is given.
        """
        time = (self.tokens_per_second, self.peak_tflops)
        if any((self.step_counts, self.gradient_rms, *time, self.picture)):
            raise ValueError(
                "a sweep of correlated noise takes --batch-sizes, --compute and --min-steps, and not the other "
                "options of a sweep: omit them, or set privacy.noise=independent"
            )
        if self.compute != "recipe" and not self.compute.isdecimal():
            raise ValueError(f"--compute={self.compute} is for independent noise: give recipe, or a number of units")


def run_sweep(
    setting: Setting,
    options: SweepOptions,
    gpus: int | None,
    as_json: bool,
    noise: Noise | None = None,
    workload_of: Callable[[int], Workload] | None = None,
) -> None:
    """Calibrate the points, print them with the recommendation, and draw them.

    Args:
        setting: the numbers of the run.
        options: those of the command line. Without a smallest number of steps, it is half of the run's.
        gpus: their number; None: 1.
        as_json: whether to print JSON.
        noise: correlated noise, which is compared with independent noise; None: a grid of independent noise alone.
        workload_of: with it, a function from T to the workload of a run of T steps.
    """
    from dpllm.mechanism.noise import IndependentNoise
    from dpllm.planning.sweep import Cost, default_grid, sweep
    from dpllm.planning.sweep_figure import plot_sweep
    from dpllm.planning.sweep_text import recommendation_text, sweep_rows
    from dpllm.privacy.rounding import format_delta

    batches, steps = default_grid(setting.expected_batch_size, setting.num_steps, setting.num_units)
    peak, picture = options.peak_tflops, options.picture
    if peak is not None and setting.flops_per_token is None:
        raise ValueError("--peak-tflops needs a recipe, because the compute depends on its model. Give a recipe")
    if noise is not None:
        options.refuse_with_correlated_noise()
    made = sweep(
        target_epsilon=setting.target_epsilon,
        delta=setting.delta,
        num_units=setting.num_units,
        expected_batch_sizes=_counts("--batch-sizes", options.batch_sizes) or batches,
        step_counts=None if noise is not None else _counts("--step-counts", options.step_counts) or steps,
        adjacency=setting.adjacency,
        compute=_compute(options.compute, setting),
        min_steps=-(-setting.num_steps // 2) if options.min_steps is None else options.min_steps,
        gradient_rms=options.gradient_rms,
        cost=Cost(
            tokens_per_unit=setting.tokens_per_unit,
            tokens_per_second=options.tokens_per_second,
            flops_per_token=None if peak is None else setting.flops_per_token,
            peak_flops=None if peak is None else peak * 1e12,
            utilization=None if peak is None else UTILIZATION,
            gpus=gpus or 1,
        ),
        noise=IndependentNoise() if noise is None else noise,
        workload_of=workload_of,
        expected_batch_size=None if noise is None else setting.expected_batch_size,
    )
    if picture is not None:
        plot_sweep(made, picture)
    if as_json:
        show_json({"setting": setting.name, **made.to_dict(), "picture": None if picture is None else str(picture)})
        return
    head, rows = sweep_rows(made)
    guarantee = f"ε = {setting.target_epsilon:g} at δ = {format_delta(setting.delta)}"
    title = f"Ways to spend {guarantee} on {setting.num_units:,} units"
    show_table(head, rows, title, left=(0,) if noise is None else (0, 2))
    console = Console(highlight=False, markup=False)
    console.print(f"\n{recommendation_text(made)}")
    if picture is not None:
        console.print(f"\nPicture: {picture}", soft_wrap=True)


def _compute(text: str, setting: Setting) -> int | str:
    if text == "recipe":
        return setting.expected_batch_size * setting.num_steps
    return int(text) if text.isdecimal() else text


def _counts(option: str, text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ValueError(f"{option} must be whole numbers separated by commas, got {text!r}") from error
