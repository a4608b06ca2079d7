"""`dpllm plan sweep`: other batch sizes and steps for the same budget, for a recipe or for numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpllm.cli.common import AnyRecipe, AsJson, Overrides, command, show_json, show_table, wrapped
from dpllm.cli.plan import plan_of, training_recipe
from dpllm.config.values import integer

if TYPE_CHECKING:
    from dpllm.config import Recipe
    from dpllm.mechanism.parts import Noise
    from dpllm.mechanism.strategies import Workload
    from dpllm.privacy.plan import PrivacyPlan

UTILIZATION = 0.4
"""Share of a GPU's peak that training is assumed to reach if no throughput was measured."""
ALONE = "without RECIPE"
Counts = Annotated[str | None, typer.Option(metavar="N,…", help="Default: near the run's.")]


@command("dpllm plan sweep quickstart privacy.noise=independent --picture sweep.png")
def sweep(
    recipe: AnyRecipe = None,
    overrides: Overrides = None,
    batch_sizes: Counts = None,
    step_counts: Counts = None,
    compute: Annotated[str, typer.Option(help="recipe: its b T; max of the grid; or a number.")] = "recipe",
    min_steps: Annotated[int | None, typer.Option(help="Fewest steps; default: half of the run's.")] = None,
    gradient_rms: Annotated[
        float, typer.Option(help="Of the mean clipped gradient's entries, over C.", show_default=False)
    ] = 0.0,
    tokens_per_second: Annotated[float | None, typer.Option(help="Measured, of all GPUs; gives the time.")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help=f"Of a GPU; {UTILIZATION:.0%} of it gives the time.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    picture: Annotated[Path | None, typer.Option(help="Write a PNG.")] = None,
    num_units: Annotated[int | None, typer.Option(help="N.", rich_help_panel=ALONE)] = None,
    expected_batch_size: Annotated[int | None, typer.Option(help="b.", rich_help_panel=ALONE)] = None,
    steps: Annotated[int | None, typer.Option(help="T.", rich_help_panel=ALONE)] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε of the run.", rich_help_panel=ALONE)] = None,
    delta: Annotated[float | None, typer.Option(help="δ; default 1/(10 N).", rich_help_panel=ALONE)] = None,
    tokens_per_unit: Annotated[float | None, typer.Option(help="The tokens of a unit.", rich_help_panel=ALONE)] = None,
    as_json: AsJson = False,
) -> None:
    """Compare batch sizes and numbers of steps for the same budget, and recommend one."""
    options = SweepOptions(
        batch_sizes, step_counts, compute, min_steps, gradient_rms, tokens_per_second, peak_tflops, picture
    )
    numbers = (num_units, expected_batch_size, steps, epsilon, delta, tokens_per_unit)
    if recipe is None:
        if all(number is None for number in numbers):
            raise ValueError("give a recipe, or the numbers of a run (dpllm plan sweep --help)")
        setting = Setting.of_numbers(num_units, expected_batch_size, steps, epsilon, delta, tokens_per_unit)
        run_sweep(setting, options, gpus, as_json)
        return
    if any(number is not None for number in numbers):
        raise ValueError("--num-units and the other numbers replace a recipe: override the recipe's values instead")
    _sweep_recipe(recipe, training_recipe(recipe, overrides), options, gpus, as_json)


def _sweep_recipe(path: Path, recipe: Recipe, options: SweepOptions, gpus: int, as_json: bool) -> None:
    from dpllm.mechanism.catalogue import noise_of
    from dpllm.mechanism.parts import Spec
    from dpllm.training.arguments import training_arguments
    from dpllm.training.preflight import to_plan
    from dpllm.training.workload import workload_of

    made = plan_of(recipe).plan
    if made.selection is not None:
        raise ValueError("a sweep compares single runs: leave privacy.selection out")
    setting = Setting.of_recipe(path, recipe, made, with_flops=options.peak_tflops is not None)
    noise = noise_of(Spec.of(recipe.privacy.noise))
    if not noise.tensors_kept:
        run_sweep(setting, options, gpus, as_json)
        return
    arguments, average = training_arguments(to_plan(recipe.train)), recipe.train.get("average")
    run_sweep(setting, options, gpus, as_json, noise, lambda steps: workload_of(arguments, steps, average))


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
        num_units: int | None,
        expected_batch_size: int | None,
        steps: int | None,
        epsilon: float | None,
        delta: float | None,
        tokens_per_unit: float | None,
    ) -> Setting:
        """Return the setting of the command line's numbers."""
        if num_units is None or expected_batch_size is None or steps is None or epsilon is None:
            raise ValueError(
                "a sweep without a recipe needs --num-units, --expected-batch-size, --steps and --epsilon: give all "
                "four, or a recipe"
            )
        counts = {"num-units": num_units, "expected-batch-size": expected_batch_size, "steps": steps}
        for option, count in counts.items():
            integer(f"--{option}", count, 1)
        return cls(
            name="the numbers given",
            num_units=num_units,
            expected_batch_size=expected_batch_size,
            num_steps=steps,
            target_epsilon=epsilon,
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
            raise ValueError('a sweep needs runs that draw whole units; set privacy.sampling="unit" for it')
        if plan.randomness == "discrete":
            raise ValueError(
                "a sweep computes the ε of Gaussian noise, and that of discrete noise is larger: sweep with "
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
    """The options of a sweep, with their defaults."""

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
    gpus: int,
    as_json: bool,
    noise: Noise | None = None,
    workload_of: Callable[[int], Workload] | None = None,
) -> None:
    """Calibrate the points, print them with the recommendation, and draw them.

    Args:
        setting: the numbers of the run.
        options: those of the command line. Without a smallest number of steps, it is half of the run's.
        gpus: their number.
        as_json: whether to print JSON.
        noise: correlated noise, which is compared with independent noise; None: a grid of independent noise alone.
        workload_of: with it, a function from T to the workload of a run of T steps.
    """
    from dpllm.mechanism.noise import IndependentNoise
    from dpllm.planning.sweep import Cost, default_grid
    from dpllm.planning.sweep import sweep as compared
    from dpllm.planning.sweep_text import plot_sweep, recommendation_text, sweep_rows
    from dpllm.privacy.rounding import format_delta

    batches, steps = default_grid(setting.expected_batch_size, setting.num_steps, setting.num_units)
    peak, picture = options.peak_tflops, options.picture
    if peak is not None and setting.flops_per_token is None:
        raise ValueError("--peak-tflops needs a recipe, because the compute depends on its model. Give a recipe")
    if noise is not None:
        options.refuse_with_correlated_noise()
    made = compared(
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
            gpus=gpus,
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
    typer.echo(f"\n{wrapped(recommendation_text(made))}")
    if picture is not None:
        typer.echo(f"\nPicture: {picture}")


def _compute(text: str, setting: Setting) -> int | str:
    if text == "recipe":
        return setting.expected_batch_size * setting.num_steps
    return int(text) if text.isdecimal() else text


def _counts(option: str, text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ValueError(f"{option} must be whole numbers separated by commas, got {text!r}") from error
