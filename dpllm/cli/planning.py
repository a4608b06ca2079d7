"""`dpllm plan`: the cost of a run in privacy, memory and time, before paying for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dpllm import registry
from dpllm.cli.common import AnyRecipe, AsJson, Overrides, one_line_errors, show
from dpllm.cli.rates import computed_rate, rate_values, rate_words
from dpllm.cli.suggesting import (
    Around,
    Output,
    Public,
    RehearsalSteps,
    Rehearse,
    Suggest,
    SuggestOptions,
    run_suggest,
)
from dpllm.cli.sweeping import UTILIZATION, Setting, SweepOptions, run_sweep
from dpllm.config import ConfigError, load_recipe
from dpllm.config.recipe_file import method_in

if TYPE_CHECKING:
    from dpllm.config import Recipe
    from dpllm.privacy.noise_choice import Prediction
    from dpllm.privacy.plan import PrivacyPlan
    from dpllm.training.workload import UpdateRule

_INSTEAD = "With --sweep, instead of a recipe:"
Memory = Annotated[bool, typer.Option("--memory", help="Print the computed memory and communication per GPU instead.")]
Sweep = Annotated[
    bool, typer.Option("--sweep", help="Compare other batch sizes and steps for the same budget, and recommend one.")
]
Gpus = Annotated[int | None, typer.Option(help="With --memory or --sweep: number of GPUs; 1 without it.")]
Engine = Annotated[
    str | None,
    typer.Option(
        help="With --memory: single, ddp, fsdp2, zero1, zero2 or zero3; without it, all that make sense on this number "
        "of GPUs."
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
NumUnits = Annotated[
    int | None,
    typer.Option(
        help=f"{_INSTEAD} N. With --suggest: N, so that the private records are not read and need not be here."
    ),
]
Picture = Annotated[Path | None, typer.Option(help="With --sweep: write a PNG.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: dpllm plan quickstart privacy.epsilon=3\n\n"
        "Example: dpllm plan llama3_8b_chat_lora --memory --gpus 8 --engine fsdp2\n\n"
        "Example: dpllm plan quickstart --sweep privacy.noise=independent --picture sweep.png\n\n"
        "Example: dpllm plan quickstart --suggest --rehearse --output runs/suggested\n\n"
        "Example: dpllm plan --sweep --num-units 1000000 --epsilon 8 --expected-batch-size 4096 --steps 500"
    )(plan)


@one_line_errors
def plan(
    recipe: AnyRecipe = None,
    overrides: Overrides = None,
    memory: Memory = False,
    sweep: Sweep = False,
    suggest: Suggest = False,
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
    rehearse: Rehearse = False,
    public: Public = None,
    around: Around = None,
    rehearsal_steps: RehearsalSteps = None,
    output: Output = None,
    num_units: NumUnits = None,
    expected_batch_size: Annotated[
        int | None, typer.Option(help=f"{_INSTEAD} b, the expected number of units of a step.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help=f"{_INSTEAD} T, the number of steps.")] = None,
    epsilon: Annotated[float | None, typer.Option(help=f"{_INSTEAD} the ε that a run may cost.")] = None,
    delta: Annotated[float | None, typer.Option(help=f"{_INSTEAD} δ; by default 1/(10 N).")] = None,
    tokens_per_unit: Annotated[float | None, typer.Option(help=f"{_INSTEAD} the tokens of a unit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the privacy plan of a recipe, without training: every number that determines the guarantee.

    With --memory: memory and traffic of a GPU, by formulas. This needs neither private data nor a GPU.

    With --sweep: the batch size and number of steps that make most of the budget, for a recipe or for given numbers.

    With --suggest: the settings to start from, computed from the plan and the size of the model's weights. With
    --rehearse or --public FILE the learning rate is the best of a rehearsal: short trainings on public text, by the
    steps of the product, with the plan's bands and σ/b. No private record enters, and no ε is spent.
    """
    options = SuggestOptions(rehearse, public, around, rehearsal_steps, output, num_units)
    of_setting = (expected_batch_size, steps, epsilon, delta, tokens_per_unit)
    alone = any(number is not None for number in (*of_setting, None if suggest else num_units))
    sweeping = SweepOptions(
        batch_sizes, step_counts, compute, min_steps, gradient_rms, tokens_per_second, peak_tflops, picture
    )
    _refuse_combinations(
        memory, sweep, suggest, alone or sweeping != SweepOptions(), engine is not None, gpus is not None
    )
    if not suggest:
        options.refuse_without_suggest()
    if recipe is None:
        if not (sweep and alone):
            raise ValueError("give a recipe, or --sweep with the numbers of a run (dpllm plan --help)")
        setting = Setting.of_numbers(
            num_units=num_units,
            expected_batch_size=expected_batch_size,
            num_steps=steps,
            target_epsilon=epsilon,
            delta=delta,
            tokens_per_unit=tokens_per_unit,
        )
        run_sweep(setting, sweeping, gpus, as_json)
        return
    if alone:
        raise ValueError("--num-units and the other numbers replace a recipe: override the recipe's values instead")
    method = method_in(recipe, overrides or ())
    show_plan = None if method is None else registry.method(method).show_plan
    if show_plan is not None:
        if memory or sweep or suggest:
            raise ValueError(
                f"{recipe} is the recipe of a query run, which has no steps: omit --memory, --sweep, --suggest"
            )
        registry.load(show_plan)(recipe, overrides or [], as_json)
        return
    loaded = load_recipe(recipe, overrides or ())
    if memory:
        _memory(recipe, loaded, 1 if gpus is None else gpus, engine, as_json)
    elif suggest:
        run_suggest(recipe, loaded, options, as_json)
    elif sweep:
        _sweep_recipe(recipe, loaded, sweeping, gpus, as_json)
    else:
        if not as_json:  # the rest takes seconds
            typer.echo(f"planning {recipe}: loading the libraries, then the records of {loaded.data.path}")
        _show_plan(recipe, _plan_of(loaded), as_json)


def _sweep_recipe(path: Path, recipe: Recipe, options: SweepOptions, gpus: int | None, as_json: bool) -> None:
    from dpllm.mechanism.catalogue import noise_of
    from dpllm.mechanism.parts import Spec
    from dpllm.training.arguments import training_arguments
    from dpllm.training.preflight import to_plan
    from dpllm.training.workload import workload_of

    made = _plan_of(recipe).plan
    if made.selection is not None:
        raise ValueError("--sweep compares single runs: leave privacy.selection out, or --sweep")
    setting = Setting.of_recipe(path, recipe, made, with_flops=options.peak_tflops is not None)
    noise = noise_of(Spec.of(recipe.privacy.noise))
    if not noise.tensors_kept:
        run_sweep(setting, options, gpus, as_json)
        return
    arguments, average = training_arguments(to_plan(recipe.train)), recipe.train.get("average")
    run_sweep(setting, options, gpus, as_json, noise, lambda steps: workload_of(arguments, steps, average))


def _refuse_combinations(
    memory: bool, sweep: bool, suggest: bool, of_sweep: bool, with_engine: bool, with_gpus: bool
) -> None:
    """Refuse options that do not belong together."""
    kinds = [name for name, given in (("--memory", memory), ("--sweep", sweep), ("--suggest", suggest)) if given]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} cannot be combined: give one of them")
    if not sweep and of_sweep:
        raise ValueError("the options of a sweep need --sweep: add it, or omit them")
    if not memory and (with_engine or (with_gpus and not sweep)):
        raise ValueError("--gpus and --engine are options of --memory: add --memory, or omit them")


@dataclasses.dataclass(frozen=True)
class _Planned:
    """The plan of a recipe, and what can be said about it before the run.

    Attributes:
        plan: the plan.
        files: the local files that were read, each with its number of records.
        read: what a record is in them, and what was found when they were read.
        rule: the optimizer, the schedule and the average of the run.
        predicted: the predicted noise; None: the noise is independent.
        second_moment: that of the optimizer, without the known noise; None: its own.
        advice: settings that were measured worse.
        rate: the row about the learning rate, if the rule's is known.
        rates: the same as values.
        folder: the output folder.
    """

    plan: PrivacyPlan
    files: dict[str, int]
    read: list[str]
    rule: UpdateRule
    predicted: Prediction | None
    second_moment: str | None
    advice: list[str]
    rate: list[tuple[str, str]]
    rates: dict[str, Any]
    folder: str


def _plan_of(recipe: Recipe) -> _Planned:
    # These import torch, for which the other commands need not wait.
    from dpllm.data.records import reading_remarks, record_words
    from dpllm.data.rows import load_train_and_eval, sources_of, unit_index_of
    from dpllm.privacy.noise_choice import prediction
    from dpllm.training.advice import advice
    from dpllm.training.arguments import plan_for, training_arguments
    from dpllm.training.corrected_adamw import asked_second_moment
    from dpllm.training.preflight import check_recipe, to_plan
    from dpllm.training.workload import UpdateRule

    arguments = training_arguments(to_plan(recipe.train))
    for line in check_recipe(recipe, to_train=False):
        typer.echo(f"note: {line}", err=True)
    records, _ = load_train_and_eval(recipe.data, recipe.privacy)
    average = recipe.train.get("average")
    plan = plan_for(arguments, recipe.privacy, unit_index_of(records, recipe.privacy), average=average)
    rule = UpdateRule.of(arguments, plan.num_steps, average)
    predicted = prediction(plan, rule.workload())
    computed = computed_rate(recipe, plan, rule, predicted)
    rate, off = rate_words(recipe, rule, computed)
    return _Planned(
        plan=plan,
        files=sources_of(records),
        read=[*([f"a record is {words}"] if (words := record_words(records)) else []), *reading_remarks(records)],
        rule=rule,
        predicted=predicted,
        second_moment=asked_second_moment(arguments),
        advice=[*advice(plan, rule), *off],
        rate=rate,
        rates=rate_values(rule, computed),
        folder=str(arguments.output_dir),
    )


def _show_plan(path: Path, planned: _Planned, as_json: bool) -> None:
    from dpllm.privacy.plan import format_plan
    from dpllm.training.resume import run_so_far

    so_far = run_so_far(planned.folder, planned.plan)
    made, predicted = planned.plan, planned.predicted
    values = {
        **made.to_dict(),
        "hash": made.hash,
        "epsilon_zero_out": made.epsilon_under("zero-out"),
        "epsilon_replace_one": made.epsilon_under("replace-one"),
        "predicted_noise": None if predicted is None else dataclasses.asdict(predicted),
        "second_moment": planned.second_moment,
        **planned.rates,
        "advice": planned.advice,
        "files": planned.files,
        "read": planned.read,
        "run": None if so_far is None else dataclasses.asdict(so_far),
    }
    noise = []
    if predicted is not None:
        noise = [
            ("predicted noise of the released weights", predicted.words()),
            ("noise of a step", predicted.step_words(planned.rule.divides)),
        ]
    read = [(f"records of {name}", f"{count:,}") for name, count in planned.files.items()]
    read += [("read", line) for line in planned.read]
    if planned.second_moment is not None:
        words = f"{planned.second_moment}: less the known variance of the noise in it"
        noise.append(("second moment of the optimizer", words))
    advised = [("advice", line) for line in planned.advice]
    if so_far is not None:
        advised.append(("the output folder's run", so_far.words))
    show(values, [*format_plan(made), *noise, *planned.rate, *read, *advised], f"Privacy plan of {path}", as_json)


def _memory(path: Path, recipe: Recipe, gpus: int, engine: str | None, as_json: bool) -> None:
    from dpllm.planning.footprint import engines_for, footprint_of_recipe
    from dpllm.planning.footprint_text import NATURE, comparison_rows, footprint_rows, setting_of
    from dpllm.planning.model_shape import row_by_row_modules, row_by_row_words
    from dpllm.training.arguments import training_arguments
    from dpllm.training.preflight import to_plan

    arguments, batch = training_arguments(to_plan(recipe.train)), recipe.privacy.expected_batch_size
    one_unit = recipe.privacy.gradients == "per_unit"
    slow = [] if one_unit else row_by_row_modules(recipe.model)
    try:
        results = [
            footprint_of_recipe(recipe, arguments, batch, name, gpus)
            for name in ([engine] if engine else engines_for(gpus, recipe.model.quantization is not None, one_unit))
        ]
    except ConfigError as error:
        if not slow:
            raise
        words = row_by_row_words(slow, arguments.per_device_train_batch_size)
        raise ConfigError(f"{error}. Modules that run row by row: {words}") from error
    shape = results[0].shape
    values = {
        "recipe": str(path),
        "num_gpus": gpus,
        "parameters": shape.total,
        "trainable_parameters": shape.trainable,
        "nature": NATURE,
        "unit": "bytes",
        "engines": [result.to_dict() for result in results],
        "row_by_row": slow,
    }
    words = row_by_row_words(slow, results[0].run.rows)
    if as_json or engine:
        rows_of_table = [*footprint_rows(results[0]), ("run row by row", words)]
        show(values, rows_of_table, f"Memory and communication of {path}, per GPU", as_json)
        return
    unit, (head, *rows) = comparison_rows(results)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in head:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    of_them = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    console = Console(highlight=False, markup=False)
    console.print(f"Memory and communication of {path} on {of_them}, {unit} per GPU:", soft_wrap=True)
    console.print(table)
    console.print(f"{setting_of(results[0])}; {NATURE}.")
    console.print(f"Modules that run row by row: {words}.", soft_wrap=True)
