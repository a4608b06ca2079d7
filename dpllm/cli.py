"""The command line: `dpllm epsilon | calibrate | plan | report`.

Place in the flow: a thin door to accounting, plan and report; nothing is computed here. With `--json` a command prints
one JSON object and nothing else. What can't be done is one line, `error: ...`, on the error stream, and exit code 2.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from dpllm import accounting
from dpllm.config import ADJACENCIES, Recipe, load_recipe
from dpllm.ledger import LEDGER_FILE, read_ledger
from dpllm.plan import PLAN_FILE, PrivacyPlan, format_epsilon, format_plan, make_plan

app = typer.Typer(
    name="dpllm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Differentially private fine-tuning of language models: what a run costs, before and after it.",
)

_Command = TypeVar("_Command", bound=Callable[..., None])

SamplingRate = Annotated[float, typer.Option(help="q: expected batch size over number of units.")]
Steps = Annotated[int, typer.Option(help="T: number of steps.")]
Delta = Annotated[float, typer.Option(help="δ, below 1/N; usual is 1/(10 N).")]
NumUnits = Annotated[int | None, typer.Option(help="N: number of units. Needed with --max-batch-size.")]
MaxBatchSize = Annotated[
    int | None, typer.Option(help="Units that enter one step at most. Without it: plain Poisson sampling.")
]
Adjacency = Annotated[
    str, typer.Option(help="What a neighbouring data set is: zero-out (a unit against nothing) or replace-one.")
]
Memory = Annotated[bool, typer.Option("--memory", help="Print memory and communication per GPU instead, on paper.")]
Gpus = Annotated[int | None, typer.Option(help="With --memory: number of GPUs; 1 without it.")]
Engine = Annotated[
    str | None,
    typer.Option(
        help="With --memory: single, ddp, fsdp2, fsdp2-hybrid, zero1, zero2, zero3 or zero3_offload; without it, all "
        "that make sense on so many GPUs."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def _one_line_errors(command: _Command) -> _Command:
    """Turn what the library refuses into one line on the error stream and exit code 2."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, OSError) as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error

    return guarded  # type: ignore[return-value]


def _show(values: Mapping[str, Any], rows: Iterable[tuple[str, str]], title: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_finite(values), ensure_ascii=False, allow_nan=False))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


def _finite(value: Any) -> Any:
    """Return the value with every infinite number as the text "inf", which JSON can hold."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _method(history: accounting.History, adjacency: str) -> dict[str, Any]:
    return {
        "method": "PLD",
        "tool": accounting.TOOL,
        "tool_version": accounting.tool_version(),
        "discretization": accounting.discretization_used(history, adjacency),
    }


def _cost(step: accounting.Step, steps: int, delta: float, adjacency: str) -> tuple[dict[str, Any], list[Any]]:
    """Return what a run of one kind of step costs: values for machines, and rows for people."""
    history = [(step, steps)]
    if adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {adjacency!r}")
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    costs = {name: accounting.epsilon(history, delta, name) for name in ADJACENCIES}
    values = {
        "epsilon": costs[adjacency],
        "adjacency": adjacency,
        "epsilon_zero_out": costs["zero-out"],
        "epsilon_replace_one": costs["replace-one"],
        "delta": delta,
        "noise_multiplier": step.noise_multiplier,
        "sampling_rate": step.sampling_rate,
        "steps": steps,
        "num_units": step.num_units,
        "max_batch_size": step.max_batch_size,
        **_method(history, adjacency),
    }
    sampling = "plain Poisson" if step.max_batch_size is None else f"Poisson, at most {step.max_batch_size} units"
    rows = [
        ("ε, zero-out", format_epsilon(costs["zero-out"])),
        ("ε, replace-one", format_epsilon(costs["replace-one"])),
        ("δ", f"{delta:g}"),
        ("noise multiplier σ", f"{step.noise_multiplier:.6g}"),
        ("sampling rate q", f"{step.sampling_rate:g}"),
        ("steps T", str(steps)),
        ("sampling", sampling),
        ("computed with", f"PLD, {values['tool']} {values['tool_version']}, grid {values['discretization']:g}"),
    ]
    return values, rows


@app.command(epilog="Example: dpllm epsilon --noise-multiplier 1.0 --sampling-rate 0.02 --steps 1500 --delta 1e-5")
@_one_line_errors
def epsilon(
    noise_multiplier: Annotated[
        float, typer.Option(help="σ: noise standard deviation over clip norm. 0 means no privacy.")
    ],
    sampling_rate: SamplingRate,
    steps: Steps,
    delta: Delta,
    num_units: NumUnits = None,
    max_batch_size: MaxBatchSize = None,
    adjacency: Adjacency = "zero-out",
    as_json: AsJson = False,
) -> None:
    """Print the ε that a run costs."""
    step = accounting.Step(num_units, sampling_rate, max_batch_size, noise_multiplier)
    values, rows = _cost(step, steps, delta, adjacency)
    _show(values, rows, "What the run costs", as_json)


@app.command(epilog="Example: dpllm calibrate --epsilon 8 --delta 1e-5 --sampling-rate 0.0244 --steps 410")
@_one_line_errors
def calibrate(
    target_epsilon: Annotated[float, typer.Option("--epsilon", help="The ε that the whole run may cost.")],
    delta: Delta,
    sampling_rate: SamplingRate,
    steps: Steps,
    num_units: NumUnits = None,
    max_batch_size: MaxBatchSize = None,
    adjacency: Adjacency = "zero-out",
    as_json: AsJson = False,
) -> None:
    """Print the smallest noise multiplier σ that keeps a run within a target ε."""
    noise_multiplier = accounting.calibrate_noise_multiplier(
        target_epsilon, delta, sampling_rate, steps, num_units, max_batch_size, adjacency
    )
    step = accounting.Step(num_units, sampling_rate, max_batch_size, noise_multiplier)
    values, rows = _cost(step, steps, delta, adjacency)
    values["target_epsilon"] = target_epsilon
    rows.insert(0, ("target ε", f"{target_epsilon:g} ({adjacency})"))
    _show(values, rows, "The least noise that keeps the target", as_json)


@app.command(
    epilog="Example: dpllm plan recipes/quickstart.yaml privacy.target_epsilon=3\n\n"
    "Example: dpllm plan recipes/llama3_8b_chat_lora.yaml --memory --gpus 8 --engine fsdp2"
)
@_one_line_errors
def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Replace values of the recipe.", show_default=False),
    ] = None,
    memory: Memory = False,
    gpus: Gpus = None,
    engine: Engine = None,
    as_json: AsJson = False,
) -> None:
    """Print the privacy plan of a recipe, without training: every number that the guarantee rests on.

    With --memory: what a GPU holds and sends, by formulas. Neither private data nor a GPU are needed for it.
    """
    loaded = load_recipe(recipe, overrides or ())
    if memory:
        _memory(recipe, loaded, 1 if gpus is None else gpus, engine, as_json)
        return
    if gpus is not None or engine is not None:
        raise ValueError("--gpus and --engine say what --memory is computed for: add --memory, or leave them out")
    # These bring torch with them, which the other commands needn't wait for.
    from dpllm.arguments import training_arguments
    from dpllm.data import load_train_and_eval, unit_index_of
    from dpllm.trainer import num_private_steps

    arguments = training_arguments(loaded.train)
    records, _ = load_train_and_eval(loaded.data)
    num_units = unit_index_of(records, loaded.privacy).num_units
    made = make_plan(loaded.privacy, num_units, num_private_steps(arguments, loaded.privacy, num_units))
    values = {
        **made.to_dict(),
        "hash": made.hash,
        "epsilon_zero_out": made.epsilon_under("zero-out"),
        "epsilon_replace_one": made.epsilon_under("replace-one"),
    }
    _show(values, format_plan(made), f"Privacy plan of {recipe}", as_json)


def _memory(path: Path, recipe: Recipe, gpus: int, engine: str | None, as_json: bool) -> None:
    from dpllm.arguments import training_arguments
    from dpllm.footprint import (
        NATURE,
        comparison_rows,
        engines_for,
        footprint_of_recipe,
        footprint_rows,
        setting_of,
    )

    # This machine needn't be able to train: bf16 and tf32 are those of the GPUs.
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
        _show(values, footprint_rows(results[0]), f"Memory and communication of {path}, per GPU", as_json)
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


@app.command(epilog="Example: dpllm report runs/quickstart")
@_one_line_errors
def report(
    output_dir: Annotated[Path, typer.Argument(help="The folder of a run or of a checkpoint.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Verify the ledger of a run, compute ε from it anew, and print the privacy report."""
    from dpllm.report import notes_in, privacy_report, render_markdown  # imports scipy's attack bounds only here

    for name in (PLAN_FILE, LEDGER_FILE):
        if not (output_dir / name).is_file():
            raise ValueError(f"{output_dir} holds no {name}, so it is not the folder of a private run")
    made = PrivacyPlan.load(output_dir / PLAN_FILE)
    values = privacy_report(made, read_ledger(output_dir / LEDGER_FILE), notes_in(output_dir))
    typer.echo(json.dumps(values, ensure_ascii=False, allow_nan=False) if as_json else render_markdown(values))


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
