"""`dpllm plan`: the cost of a run in privacy, memory and time, before paying for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dpllm.cli.common import AsJson, one_line_errors, show
from dpllm.cli.sweeping import UTILIZATION, Setting, run_noise_sweep, run_sweep
from dpllm.config import Recipe, load_recipe

if TYPE_CHECKING:
    from dpllm.privacy.noise_choice import Prediction
    from dpllm.privacy.plan import PrivacyPlan
    from dpllm.training.workload import UpdateRule

Memory = Annotated[bool, typer.Option("--memory", help="Print the computed memory and communication per GPU instead.")]
Sweep = Annotated[
    bool, typer.Option("--sweep", help="Compare other batch sizes and steps for the same budget, and recommend one.")
]
Gpus = Annotated[int | None, typer.Option(help="With --memory or --sweep: number of GPUs; 1 without it.")]
Engine = Annotated[
    str | None,
    typer.Option(
        help="With --memory: single, ddp, fsdp2, fsdp2-hybrid, zero1, zero2, zero3 or zero3_offload; without it, all "
        "that make sense on this number of GPUs."
    ),
]
Counts = Annotated[str | None, typer.Option(help="With --sweep: values separated by commas; default: near the run's.")]
Compute = Annotated[
    str, typer.Option(help="With --sweep: the compute: recipe (b T), max (of the grid), or a total number of units.")
]
MinSteps = Annotated[
    int | None,
    typer.Option(
        help="With --sweep: the smallest number of steps that the optimizer needs; half of the recipe's without it."
    ),
]
GradientRms = Annotated[
    float,
    typer.Option(
        help="With --sweep: root mean square of the entries of the mean clipped gradient, in clip norms, measured on "
        "public data; 0 when unknown."
    ),
]
TokensPerSecond = Annotated[
    float | None, typer.Option(help="With --sweep: measured throughput of all GPUs together; gives the time of a run.")
]
PeakTflops = Annotated[
    float | None,
    typer.Option(help=f"With --sweep: of one GPU, of which {UTILIZATION:.0%} are used; gives the time of a run."),
]
Picture = Annotated[Path | None, typer.Option(help="With --sweep: write a PNG.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm plan recipes/quickstart.yaml privacy.target_epsilon=3\n\n"
        "Example: dpllm plan recipes/llama3_8b_chat_lora.yaml --memory --gpus 8 --engine fsdp2\n\n"
        "Example: dpllm plan recipes/quickstart.yaml --sweep privacy.noise=independent --picture sweep.png\n\n"
        "Example: dpllm plan --sweep --num-units 1000000 --epsilon 8 --expected-batch-size 4096 --steps 500"
    )(plan)


@one_line_errors
def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe file.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Replace values of the recipe.", show_default=False),
    ] = None,
    memory: Memory = False,
    sweep: Sweep = False,
    gpus: Gpus = None,
    engine: Engine = None,
    batch_sizes: Counts = None,
    step_counts: Counts = None,
    compute: Compute = "recipe",
    min_steps: MinSteps = None,
    gradient_rms: GradientRms = 0.0,
    tokens_per_second: TokensPerSecond = None,
    peak_tflops: PeakTflops = None,
    picture: Picture = None,
    num_units: Annotated[int | None, typer.Option(help="With --sweep, instead of a recipe: N.")] = None,
    expected_batch_size: Annotated[int | None, typer.Option(help="Likewise: b.")] = None,
    steps: Annotated[int | None, typer.Option(help="Likewise: T.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Likewise: the ε that a run may cost.")] = None,
    delta: Annotated[float | None, typer.Option(help="Likewise: δ; 1/(10 N) without it.")] = None,
    tokens_per_unit: Annotated[float | None, typer.Option(help="Likewise: tokens of a unit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the privacy plan of a recipe, without training: every number that determines the guarantee.

    With --memory: memory and traffic of a GPU, by formulas. This needs neither private data nor a GPU.

    With --sweep: the batch size and number of steps that make most of the budget, for a recipe or for given numbers.
    """
    numbers = (num_units, expected_batch_size, steps, epsilon, delta, tokens_per_unit)
    alone = any(number is not None for number in numbers)
    if memory and sweep:
        raise ValueError("--memory and --sweep cannot be combined: give one of them")
    of_sweep = (batch_sizes, step_counts, min_steps, gradient_rms, tokens_per_second, peak_tflops, picture)
    if not sweep and (alone or compute != "recipe" or any(of_sweep)):
        raise ValueError("the options of a sweep need --sweep: add it, or omit them")
    if not memory and (engine is not None or (gpus is not None and not sweep)):
        raise ValueError("--gpus and --engine are options of --memory: add --memory, or omit them")
    if recipe is None and not (sweep and alone):
        raise ValueError("give a recipe, or --sweep with the numbers of a run (dpllm plan --help)")
    if recipe is not None and alone:
        raise ValueError("--num-units and the other numbers replace a recipe: override the recipe's values instead")
    if recipe is None:
        setting = Setting.of_numbers(
            num_units=num_units,
            expected_batch_size=expected_batch_size,
            num_steps=steps,
            target_epsilon=epsilon,
            delta=delta,
            tokens_per_unit=tokens_per_unit,
        )
    else:
        loaded = load_recipe(recipe, overrides or ())
        if memory:
            _memory(recipe, loaded, 1 if gpus is None else gpus, engine, as_json)
            return
        planned = _plan_of(loaded)
        made = planned.plan
        if sweep and made.selection is not None:
            raise ValueError("--sweep compares single runs: leave privacy.selection out, or --sweep")
        if not sweep:
            _show_plan(recipe, planned, as_json)
            return
        setting = Setting.of_recipe(recipe, loaded, made, with_flops=peak_tflops is not None)
        if made.noise.kind != "independent":
            if any((step_counts, gradient_rms, tokens_per_second, peak_tflops, picture)):
                raise ValueError(
                    "a sweep of correlated noise takes --batch-sizes, --compute and --min-steps, and not the other "
                    "options of a sweep: omit them, or set privacy.noise=independent"
                )
            _sweep_noise(setting, loaded, batch_sizes, compute, min_steps, as_json)
            return
    fewest = -(-setting.num_steps // 2) if min_steps is None else min_steps
    rule = {"min_steps": fewest, "gradient_rms": gradient_rms}
    time = (tokens_per_second, peak_tflops, gpus or 1)
    run_sweep(setting, batch_sizes, step_counts, compute, rule, *time, picture, as_json)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """The plan of a recipe, and what can be said about it before the run.

    Attributes:
        plan: the plan.
        files: the local files that were read, each with its number of records.
        rule: the optimizer, the schedule and the average of the run.
        predicted: the predicted noise; None: the noise is independent.
        advice: settings that were measured worse.
    """

    plan: PrivacyPlan
    files: dict[str, int]
    rule: UpdateRule
    predicted: Prediction | None
    advice: list[str]


def _plan_of(recipe: Recipe) -> _Planned:
    # These import torch, for which the other commands need not wait.
    from dpllm.data.rows import load_train_and_eval, sources_of, unit_index_of
    from dpllm.privacy.noise_choice import prediction
    from dpllm.training.advice import advice
    from dpllm.training.arguments import plan_for, training_arguments
    from dpllm.training.preflight import PLAIN, check_recipe
    from dpllm.training.workload import UpdateRule

    arguments = training_arguments({**PLAIN, **recipe.train})
    for line in check_recipe(recipe, to_train=False):
        typer.echo(f"note: {line}", err=True)
    records, _ = load_train_and_eval(recipe.data, recipe.privacy)
    average = recipe.train.get("average")
    plan = plan_for(arguments, recipe.privacy, unit_index_of(records, recipe.privacy), average=average)
    rule = UpdateRule.of(arguments, plan.num_steps, average)
    return _Planned(plan, sources_of(records), rule, prediction(plan, rule.workload()), advice(plan, rule))


def _sweep_noise(
    setting: Setting, recipe: Recipe, batch_sizes: str | None, compute: str, min_steps: int | None, as_json: bool
) -> None:
    from dpllm.mechanism.catalogue import noise_of
    from dpllm.mechanism.parts import Spec
    from dpllm.training.arguments import training_arguments
    from dpllm.training.preflight import PLAIN
    from dpllm.training.workload import workload_of

    average = recipe.train.get("average")
    arguments, noise = training_arguments({**PLAIN, **recipe.train}), noise_of(Spec.of(recipe.privacy.noise))
    fewest = -(-setting.num_steps // 2) if min_steps is None else min_steps
    run_noise_sweep(
        setting, noise, lambda steps: workload_of(arguments, steps, average), batch_sizes, compute, fewest, as_json
    )


def _show_plan(path: Path, planned: _Planned, as_json: bool) -> None:
    from dpllm.privacy.plan import format_plan

    made, predicted = planned.plan, planned.predicted
    values = {
        **made.to_dict(),
        "hash": made.hash,
        "epsilon_zero_out": made.epsilon_under("zero-out"),
        "epsilon_replace_one": made.epsilon_under("replace-one"),
        "predicted_noise": None if predicted is None else dataclasses.asdict(predicted),
        "advice": planned.advice,
        "files": planned.files,
    }
    noise = []
    if predicted is not None:
        noise = [
            ("predicted noise of the released weights", predicted.words()),
            ("noise of a step", predicted.step_words(planned.rule.divides)),
        ]
    read = [(f"records of {name}", f"{count:,}") for name, count in planned.files.items()]
    advised = [("advice", line) for line in planned.advice]
    show(values, [*format_plan(made), *noise, *read, *advised], f"Privacy plan of {path}", as_json)


def _memory(path: Path, recipe: Recipe, gpus: int, engine: str | None, as_json: bool) -> None:
    from dpllm.planning.footprint import engines_for, footprint_of_recipe
    from dpllm.planning.footprint_text import NATURE, comparison_rows, footprint_rows, setting_of
    from dpllm.training.arguments import training_arguments

    # This machine need not be able to train: bf16 and tf32 refer to the GPUs.
    section = {**{name: value for name, value in recipe.train.items() if name != "tf32"}, "use_cpu": True}
    arguments, batch = training_arguments(section), recipe.privacy.expected_batch_size
    results = [
        footprint_of_recipe(recipe, arguments, batch, name, gpus)
        for name in ([engine] if engine else engines_for(gpus))
    ]
    shape = results[0].shape
    values = {
        "recipe": str(path),
        "num_gpus": gpus,
        "parameters": shape.total,
        "trainable_parameters": shape.trainable,
        "nature": NATURE,
        "unit": "bytes",
        "engines": [result.to_dict() for result in results],
    }
    if as_json or engine:
        show(values, footprint_rows(results[0]), f"Memory and communication of {path}, per GPU", as_json)
        return
    unit, (head, *rows) = comparison_rows(results)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in head:
        broken = name.replace("-", "-\n").replace("_", "_\n")  # eight engines side by side on a line of 80
        table.add_column(broken, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    of_them = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    console = Console(highlight=False, markup=False)
    console.print(f"Memory and communication of {path} on {of_them}, {unit} per GPU:", soft_wrap=True)
    console.print(table)
    console.print(f"{setting_of(results[0])}; {NATURE}.")
