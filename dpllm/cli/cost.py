"""`dpllm epsilon`, `dpllm calibrate`, `dpllm compose`: ε of steps, and the least noise for a target ε."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import (
    Adjacency,
    AsJson,
    Delta,
    MaxBatchSize,
    NumUnits,
    RowsPerUnit,
    SamplingRate,
    Steps,
    one_line_errors,
    show,
    show_json,
    show_table,
)
from dpllm.mechanism.limits import ADJACENCIES

if TYPE_CHECKING:
    from dpllm.mechanism.events import Event, Round
    from dpllm.privacy.accounting import History

# The accounting imports dp_accounting and scipy, which takes a second: it is imported only to compute a number.


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        epilog="Example: dpllm epsilon --noise-multiplier 1.0 --sampling-rate 0.02 --steps 1500 --delta 1e-5\n\n"
        "Example: dpllm epsilon --noise-multiplier 1.0 --sampling-rate 0.02 --steps 1500 --delta 1e-5 --compare"
    )(epsilon)
    app.command(epilog="Example: dpllm calibrate --epsilon 8 --delta 1e-5 --sampling-rate 0.0244 --steps 410")(
        calibrate
    )
    app.command(epilog="Example: dpllm compose runs/first runs/second")(compose)


def _method(history: History, delta: float, adjacency: str) -> dict[str, Any]:
    from dpllm.privacy import accounting

    return {
        "method": "PLD",
        "tool": accounting.TOOL,
        "tool_version": accounting.tool_version(),
        "discretization": accounting.discretization_used(history, adjacency, delta=delta),
    }


@dataclass(frozen=True)
class _Steps:
    """The options that determine the event of a step."""

    noise_multiplier: float
    sampling_rate: float
    num_units: int | None
    max_batch_size: int | None
    rows_per_unit: int
    discrete_sensitivity: float | None = None


def _event(run: _Steps) -> Round:
    """Return the event of a step."""
    from dpllm.mechanism.discrete import DiscreteStep
    from dpllm.mechanism.events import dp_sgd

    numbers = asdict(run)
    reach = numbers.pop("discrete_sensitivity")
    if reach is None:
        return dp_sgd(**numbers)
    if numbers.pop("rows_per_unit") != 1:
        raise ValueError("discrete noise has no accounting for rows drawn singly: leave --rows-per-unit out")
    return DiscreteStep(sensitivity=reach, **numbers)


def _cost(run: _Steps, steps: int, delta: float, adjacency: str) -> tuple[Event, dict[str, Any], list[Any]]:
    """Return the event of a step with these numbers, and the cost of a run: values for programs, rows for people."""
    from dpllm.privacy import accounting
    from dpllm.privacy.rounding import format_delta, format_epsilon

    step, numbers = _event(run), asdict(run)
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
        "steps": steps,
        **numbers,
        **_method(history, delta, adjacency),
    }
    rows = [
        ("ε, zero-out", format_epsilon(costs["zero-out"])),
        ("ε, replace-one", format_epsilon(costs["replace-one"])),
        ("δ", format_delta(delta)),
        ("noise multiplier σ", f"{step.noise_multiplier:.6g}"),
        ("sampling rate q", f"{step.sampling_rate:g}"),
        ("steps T", str(steps)),
        ("sampling", step.words().sampling),
        ("computed with", f"PLD, {values['tool']} {values['tool_version']}, grid {values['discretization']:g}"),
    ]
    return step, values, rows


@one_line_errors
def epsilon(
    noise_multiplier: Annotated[
        float, typer.Option(help="σ: noise standard deviation over clip norm. 0 means no privacy.")
    ],
    sampling_rate: SamplingRate,
    steps: Steps,
    delta: Delta,
    num_units: NumUnits = None,
    max_batch_size: MaxBatchSize = None,
    rows_per_unit: RowsPerUnit = 1,
    discrete_sensitivity: Annotated[
        float | None,
        typer.Option(
            help="With discrete noise, the largest change of the rounded sum by one unit, in clip norms; a report "
            "names it. Left out: Gaussian noise."
        ),
    ] = None,
    adjacency: Adjacency = "zero-out",
    compare: Annotated[bool, typer.Option("--compare", help="Also print ε by other accountants.")] = False,
    best_of: Annotated[
        float | None,
        typer.Option(
            help="Mean of the secret, random number of such runs, of which only the best is released (private tuning)."
        ),
    ] = None,
    best_of_runs: Annotated[
        str, typer.Option(help="With --best-of, the distribution of that number: logarithmic, geometric or poisson.")
    ] = "geometric",
    as_json: AsJson = False,
) -> None:
    """Print the ε of a run."""
    from dpllm.privacy.rounding import format_delta, format_epsilon

    run = _Steps(
        noise_multiplier,
        sampling_rate,
        num_units,
        max_batch_size,
        rows_per_unit,
        discrete_sensitivity,
    )
    step, values, rows = _cost(run, steps, delta, adjacency)
    if best_of is not None:
        _tuning(step, steps, delta, best_of, best_of_runs, values, rows)
    if not compare:
        _cross_check(step, steps, delta, values, rows)
        show(values, rows, "Cost of the run", as_json)
        return
    from dpllm.privacy.comparison import compare as compare_methods  # imports another accountant

    methods = compare_methods([(step, steps)], delta, adjacency)
    if as_json:
        names = ("name", "epsilon", "kind", "note")
        show_json({**values, "comparison": [{name: getattr(row, name) for name in names} for row in methods]})
        return
    show_table(
        ("method", "ε", "is", "note"),
        (
            (row.name, "-" if row.epsilon is None else format_epsilon(row.epsilon), row.kind, row.note)
            for row in methods
        ),
        f"ε at δ = {format_delta(delta)}, {adjacency}, by several accountants",
        left=(0, 2, 3),
    )


def _cross_check(step: Event, steps: int, delta: float, values: dict[str, Any], rows: list[tuple[str, str]]) -> None:
    """Add ε by dp_accounting's own accountant, an independent check; it has no event for some steps."""
    from dpllm.privacy.comparison import library_epsilon
    from dpllm.privacy.rounding import format_epsilon

    try:
        found: float | None = library_epsilon([(step, steps)], delta)
    except ValueError:
        found = None
    values["dp_accounting"] = found
    words = "does not apply to these steps" if found is None else format_epsilon(found)
    rows.insert(2, ("checked by dp_accounting, zero-out", words))


def _tuning(
    step: Event,
    steps: int,
    delta: float,
    mean_runs: float,
    runs: str,
    values: dict[str, Any],
    rows: list[tuple[str, str]],
) -> None:
    """Add ε of releasing the best of a random number of runs."""
    from dpllm.mechanism.selection import Selection
    from dpllm.privacy.comparison import best_of_epsilon
    from dpllm.privacy.rounding import format_epsilon

    found = best_of_epsilon([(step, steps)], delta, mean_runs, Selection(runs, mean_runs).shape)
    if found is None:
        what = "noise is discrete" if step.kind == "discrete poisson" else "rows of one unit are drawn singly"
        raise ValueError(f"--best-of cannot be computed if {what}; add the runs up instead")
    values["best_of"] = {"mean_runs": mean_runs, "runs": runs, "epsilon": found}
    words = f"{format_epsilon(found)} by Rényi accounting (one run: see above, by PLD)"
    rows.insert(2, (f"ε of the best of {mean_runs:g} runs on average, zero-out", words))


@one_line_errors
def calibrate(
    target_epsilon: Annotated[float, typer.Option("--epsilon", help="The ε that the whole run may cost.")],
    delta: Delta,
    sampling_rate: SamplingRate,
    steps: Steps,
    num_units: NumUnits = None,
    max_batch_size: MaxBatchSize = None,
    rows_per_unit: RowsPerUnit = 1,
    adjacency: Adjacency = "zero-out",
    as_json: AsJson = False,
) -> None:
    """Print the smallest noise multiplier σ that keeps a run within a target ε."""
    from dpllm.privacy.calibration import calibrate_noise_multiplier

    noise_multiplier = calibrate_noise_multiplier(
        target_epsilon, delta, sampling_rate, steps, num_units, max_batch_size, adjacency, rows_per_unit
    )
    run = _Steps(noise_multiplier, sampling_rate, num_units, max_batch_size, rows_per_unit)
    _, values, rows = _cost(run, steps, delta, adjacency)
    values["target_epsilon"] = target_epsilon
    rows.insert(0, ("target ε", f"{target_epsilon:g} ({adjacency})"))
    show(values, rows, "The least noise for the target", as_json)


@one_line_errors
def compose(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Output folders of runs on the same data.", show_default=False)
    ],
    delta: Annotated[float | None, typer.Option(help="δ of the composition. Without it: the δ of all runs.")] = None,
    adjacency: Annotated[
        str | None, typer.Option(help="zero-out or replace-one. Without it: the adjacency of all runs.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Declare that runs whose plan names no data set used this one.")
    ] = None,
    shared_people: Annotated[
        bool,
        typer.Option(
            "--shared-people", help="The data sets differ in name or size, and have people in common, as after growth."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the joint ε of several runs on the same data, from their ledgers."""
    from dpllm.privacy.compose import compose as compose_runs
    from dpllm.privacy.compose import composition_rows

    made = compose_runs(folders, delta, adjacency, dataset, shared_people)
    show(made.to_dict(), composition_rows(made), "Joint cost of the runs", as_json)
