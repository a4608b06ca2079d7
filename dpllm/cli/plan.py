"""`dpllm plan` and `dpllm plan memory`: the cost of a run in privacy, memory and time, before paying for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm import registry
from dpllm.cli.common import AsJson, Overrides, RecipePath, command, show, show_table, wrapped
from dpllm.config import ConfigError, load_recipe
from dpllm.config.recipe_file import method_in
from dpllm.planning.learning_rate import computed_rate, rate_values, rate_words

if TYPE_CHECKING:
    from dpllm.config import Recipe
    from dpllm.privacy.calibration import Prediction
    from dpllm.privacy.plan import PrivacyPlan
    from dpllm.training.settings import Setting
    from dpllm.training.workload import UpdateRule


@command("dpllm plan quickstart privacy.epsilon=3")
def plan(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the privacy plan of a recipe: every number that determines the guarantee. Nothing is trained."""
    method = method_in(recipe, overrides or ())
    show_plan = None if method is None else registry.method(method).show_plan
    if show_plan is not None:
        registry.load(show_plan)(recipe, overrides or [], as_json)
        return
    load_recipe(recipe, overrides or ())  # a mistake is named before the rest, which takes seconds
    if not as_json:
        typer.echo(f"planning {recipe}: loading the libraries, then the records")
    from dpllm.training.proposals import complete_recipe

    whole, found = complete_recipe(recipe, overrides or ())
    _show_plan(recipe, plan_of(whole), found, as_json)


def training_recipe(path: Path, overrides: list[str] | None) -> Recipe:
    """Return the recipe of a training run.

    Raises:
        ValueError: it is that of a query run, which has no steps to compare and no memory of training.
    """
    if (method := method_in(path, overrides or ())) is not None:
        raise ValueError(
            f"{path} is the recipe of a query run, which has no steps: `dpllm plan {path}` has its cost, "
            f"and `{registry.method(method).invocation} {path}` carries it out"
        )
    from dpllm.training.preflight import check_values

    recipe = load_recipe(path, overrides or ())
    check_values(recipe)
    return recipe


@dataclasses.dataclass(frozen=True)
class Planned:
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


def plan_of(recipe: Recipe) -> Planned:
    """Return the plan of a recipe, from the number of its records."""
    # These import torch, for which the other commands need not wait.
    from dpllm.data.records import reading_remarks, record_words
    from dpllm.data.rows import load_train_and_eval, sources_of, unit_index_of
    from dpllm.privacy.calibration import prediction
    from dpllm.training.arguments import plan_for, training_arguments
    from dpllm.training.corrected_adamw import asked_second_moment
    from dpllm.training.preflight import check_recipe, to_plan
    from dpllm.training.workload import UpdateRule, advice

    for line in check_recipe(recipe, to_train=False):
        typer.echo(f"note: {line}", err=True)
    arguments = training_arguments(to_plan(recipe.train))
    records, _ = load_train_and_eval(recipe.data, recipe.privacy)
    average = recipe.train.get("average")
    plan = plan_for(arguments, recipe.privacy, unit_index_of(records, recipe.privacy), average=average)
    rule = UpdateRule.of(arguments, plan.num_steps, average)
    predicted = prediction(plan, rule.workload())
    computed = computed_rate(recipe, plan, rule, predicted)
    rate, off = rate_words(recipe, rule, computed)
    return Planned(
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


def _show_plan(path: Path, planned: Planned, proposed: Sequence[Setting], as_json: bool) -> None:
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
        "proposals": [{"key": one.key, "value": one.value, "reason": one.reason} for one in proposed],
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
    read += [("proposed", f"{one.override}: {one.reason}") for one in proposed]
    advised = [("advice", line) for line in planned.advice]
    if so_far is not None:
        advised.append(("the output folder's run", so_far.words))
    show(values, [*format_plan(made), *noise, *planned.rate, *read, *advised], f"Privacy plan of {path}", as_json)


@command("dpllm plan memory llama3_8b_chat_lora --gpus 8 --engine fsdp2")
def memory(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    engine: Annotated[
        str | None,
        typer.Option(help="single, ddp, fsdp2, zero1, zero2 or zero3; all that make sense without it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the memory and traffic of a GPU, computed by formulas: neither private data nor a GPU is needed."""
    path, loaded = recipe, training_recipe(recipe, overrides)
    from dpllm.planning.footprint import (
        NATURE,
        comparison_rows,
        engines_for,
        footprint_of_recipe,
        footprint_rows,
        setting_of,
    )
    from dpllm.planning.model_shape import row_by_row_modules, row_by_row_words
    from dpllm.privacy.defaults import LARGEST_BATCH
    from dpllm.training.arguments import training_arguments
    from dpllm.training.preflight import to_plan

    arguments, batch = training_arguments(to_plan(loaded.train)), loaded.privacy.expected_batch_size or LARGEST_BATCH
    one_unit = loaded.privacy.gradients == "per_unit"
    slow = [] if one_unit else row_by_row_modules(loaded.model)
    try:
        results = [
            footprint_of_recipe(loaded, arguments, batch, name, gpus)
            for name in ([engine] if engine else engines_for(gpus, loaded.model.quantization is not None, one_unit))
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
    of_them = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    show_table(head, rows, f"Memory and communication of {path} on {of_them}, {unit} per GPU:")
    typer.echo(wrapped(f"{setting_of(results[0])}; {NATURE}.\nModules that run row by row: {words}."))
