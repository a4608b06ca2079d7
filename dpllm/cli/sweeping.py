"""The settings of `dpllm plan --sweep`: the numbers of a recipe, or numbers given directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpllm.cli.common import show_json, show_table
from dpllm.config import Recipe
from dpllm.config.values import integer

if TYPE_CHECKING:
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


def run_sweep(
    setting: Setting,
    batch_sizes: str | None,
    step_counts: str | None,
    compute: str,
    rule: Mapping[str, Any],
    tokens_per_second: float | None,
    peak_tflops: float | None,
    gpus: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Calibrate the grid, print it with the recommendation, and draw it."""
    from dpllm.planning.sweep import Cost, default_grid, sweep
    from dpllm.planning.sweep_figure import plot_sweep
    from dpllm.planning.sweep_text import recommendation_text, sweep_rows
    from dpllm.privacy.rounding import format_delta

    batches, steps = default_grid(setting.expected_batch_size, setting.num_steps, setting.num_units)
    estimated = peak_tflops is not None
    if estimated and setting.flops_per_token is None:
        raise ValueError("--peak-tflops needs a recipe, because the compute depends on its model. Give a recipe")
    made = sweep(
        target_epsilon=setting.target_epsilon,
        delta=setting.delta,
        num_units=setting.num_units,
        expected_batch_sizes=_counts("--batch-sizes", batch_sizes) or batches,
        step_counts=_counts("--step-counts", step_counts) or steps,
        adjacency=setting.adjacency,
        compute=_compute(compute, setting),
        **rule,
        cost=Cost(
            tokens_per_unit=setting.tokens_per_unit,
            tokens_per_second=tokens_per_second,
            flops_per_token=setting.flops_per_token if estimated else None,
            peak_flops=None if peak_tflops is None else peak_tflops * 1e12,
            utilization=UTILIZATION if estimated else None,
            gpus=gpus,
        ),
    )
    if picture is not None:
        plot_sweep(made, picture)
    if as_json:
        show_json({"setting": setting.name, **made.to_dict(), "picture": None if picture is None else str(picture)})
        return
    head, rows = sweep_rows(made)
    guarantee = f"ε = {setting.target_epsilon:g} at δ = {format_delta(setting.delta)}"
    title = f"Ways to spend {guarantee} on {setting.num_units:,} units"
    show_table(head, rows, title)
    console = Console(highlight=False, markup=False)
    console.print(f"\n{recommendation_text(made)}")
    if picture is not None:
        console.print(f"\nPicture: {picture}", soft_wrap=True)


def run_noise_sweep(
    setting: Setting,
    noise: Noise,
    workload_of: Callable[[int], Workload],
    batch_sizes: str | None,
    compute: str,
    min_steps: int,
    as_json: bool,
) -> None:
    """Rank batch sizes, steps and the noises of a recipe by their predicted noise, and print the recommendation.

    Args:
        setting: the numbers of the recipe.
        noise: `privacy.noise` of the recipe.
        workload_of: a function from T to the workload of a run of T steps.
        batch_sizes: values separated by commas; None: around the recipe's.
        compute: "recipe", or a number of units.
        min_steps: the smallest number of steps.
        as_json: whether to print JSON.
    """
    from dpllm.planning.sweep import default_grid
    from dpllm.planning.sweep_bands import noise_rows, noise_text, sweep_noise
    from dpllm.privacy.rounding import format_delta

    units = _compute(compute, setting)
    if not isinstance(units, int):
        raise ValueError(f"--compute={compute} is for independent noise: give recipe, or a number of units")
    made = sweep_noise(
        noise=noise,
        workload_of=workload_of,
        target_epsilon=setting.target_epsilon,
        delta=setting.delta,
        num_units=setting.num_units,
        expected_batch_size=setting.expected_batch_size,
        expected_batch_sizes=_counts("--batch-sizes", batch_sizes)
        or default_grid(setting.expected_batch_size, setting.num_steps, setting.num_units)[0],
        compute=units,
        adjacency=setting.adjacency,
        min_steps=min_steps,
    )
    if as_json:
        show_json({"setting": setting.name, **made.to_dict()})
        return
    head, rows = noise_rows(made)
    guarantee = f"ε = {setting.target_epsilon:g} at δ = {format_delta(setting.delta)}"
    title = f"Ways to spend {guarantee} on {setting.num_units:,} units"
    show_table(head, rows, title, left=(0, 2))
    Console(highlight=False, markup=False).print(f"\n{noise_text(made)}")


def _compute(text: str, setting: Setting) -> int | str:
    if text == "recipe":
        return setting.expected_batch_size * setting.num_steps
    return int(text) if text.isdecimal() else text


def _counts(option: str, text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ValueError(f"{option} must be whole numbers separated by commas, got {text!r}") from error
