"""`dpllm epsilon`: ε of runs from their ledgers, of the numbers of one, and the least noise for a target ε."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import AsJson, SamplingRate, Steps, command, show, show_json, show_table
from dpllm.mechanism.limits import ADJACENCIES

if TYPE_CHECKING:
    from dpllm.mechanism.events import Event, Round

# The accounting imports dp_accounting and scipy, which takes a second: it is imported only to compute a number.

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN", help="Folders or ledgers of runs on the same data.", show_default=False),
]


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
        "method": "PLD",
        "tool": accounting.TOOL,
        "tool_version": accounting.tool_version(),
        "discretization": accounting.discretization_used(history, adjacency, delta=delta),
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


@command(
    "dpllm epsilon runs/first runs/second",
    "dpllm epsilon --target 8 --delta 1e-5 --sampling-rate 0.02 --steps 410",
)
def epsilon(
    runs: Runs = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="σ: noise over clip norm; 0 means no privacy.")] = None,
    target: Annotated[float | None, typer.Option(help="Compute the least σ for this ε instead.")] = None,
    sampling_rate: SamplingRate = None,
    steps: Steps = None,
    delta: Annotated[float | None, typer.Option(help="δ, below 1/N; that of the runs without it.")] = None,
    adjacency: Annotated[str | None, typer.Option(help="zero-out or replace-one.")] = None,
    num_units: Annotated[int | None, typer.Option(help="N: number of units, for --max-batch-size.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Most units of a step; any number without it.")] = None,
    rows_per_unit: Annotated[int, typer.Option(help="k: rows of a unit drawn and clipped singly.")] = 1,
    discrete_sensitivity: Annotated[
        float | None, typer.Option(help="Discrete noise: the report names this number.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also print ε by other accountants.")] = False,
    best_of: Annotated[float | None, typer.Option(help="Only the best of so many runs is released.")] = None,
    best_of_runs: Annotated[str, typer.Option(help="Law of their number, of that mean.")] = "geometric",
    dataset: Annotated[str | None, typer.Option(help="Declare the data of runs whose plan names none.")] = None,
    shared_people: Annotated[
        bool, typer.Option("--shared-people", help="Data sets of RUNs differ, and share people.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the joint ε of RUNs, the ε of a run's numbers, or σ for an ε (--target)."""
    numbers = {
        "--noise-multiplier": noise_multiplier,
        "--target": target,
        "--sampling-rate": sampling_rate,
        "--steps": steps,
        "--delta": delta,
    }
    if runs:
        more = {
            "--num-units": num_units,
            "--max-batch-size": max_batch_size,
            "--rows-per-unit": rows_per_unit if rows_per_unit != 1 else None,
            "--discrete-sensitivity": discrete_sensitivity,
            "--best-of": best_of,
            "--compare": compare or None,
        }
        if given := [name for name, one in {**numbers, "--delta": None, **more}.items() if one is not None]:
            raise ValueError(f"{given[0]} is a number of a run, and the ledgers have it: omit it, or omit the folders")
        _compose(runs, delta, adjacency, dataset, shared_people, as_json)
        return
    if dataset is not None or shared_people:
        raise ValueError("--dataset and --shared-people are about finished runs: give their folders, or omit them")
    if noise_multiplier is not None and target is not None:
        raise ValueError("--noise-multiplier is σ, and --target computes it: give one of them")
    numbers.pop("--noise-multiplier" if target is not None else "--target")
    missing = [name for name, value in numbers.items() if value is None]
    if missing or sampling_rate is None or steps is None or delta is None:
        raise ValueError(
            f"give the folder of a run, or the numbers of one: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing (dpllm epsilon --help)"
        )
    if best_of is None and best_of_runs != "geometric":
        raise ValueError("--best-of-runs is the law of the number of runs: add --best-of, their mean")
    adjacency = ADJACENCIES[0] if adjacency is None else adjacency
    if target is not None:
        from dpllm.privacy.calibration import calibrate_noise_multiplier

        if discrete_sensitivity is not None:
            raise ValueError("--target computes Gaussian noise: leave --discrete-sensitivity out")
        noise_multiplier = calibrate_noise_multiplier(
            target, delta, sampling_rate, steps, num_units, max_batch_size, adjacency, rows_per_unit
        )
    assert noise_multiplier is not None
    run = _Steps(noise_multiplier, sampling_rate, num_units, max_batch_size, rows_per_unit, discrete_sensitivity)
    step, values, rows = _cost(run, steps, delta, adjacency)
    title = "Cost of the run" if target is None else "The least noise for the target"
    if target is not None:
        values["target_epsilon"] = target
        rows.insert(0, ("target ε", f"{target:g} ({adjacency})"))
    if best_of is not None:
        _tuning(step, steps, delta, best_of, best_of_runs, values, rows)
    if compare:
        if not as_json and (best_of is not None or target is not None):
            show(values, rows, title, as_json)
        _show_comparison(step, steps, delta, adjacency, values, as_json)
        return
    _cross_check(step, steps, delta, values, rows)
    show(values, rows, title, as_json)


def _compose(
    runs: list[Path], delta: float | None, adjacency: str | None, dataset: str | None, shared: bool, as_json: bool
) -> None:
    """Print the joint ε of runs, from their ledgers."""
    from dpllm.privacy.compose import compose, composition_rows
    from dpllm.privacy.ledger import LEDGER_FILE
    from dpllm.privacy.plan import PLAN_FILE
    from dpllm.privacy.query_plan import load_plan

    folders = [path.parent if path.name == LEDGER_FILE else path for path in runs]
    if len(folders) == 1 and dataset is None and load_plan(folders[0] / PLAN_FILE).dataset is None:
        dataset = "not named"  # of one run, there are no other data that it could be confused with
    made = compose(folders, delta, adjacency, dataset, shared)
    show(made.to_dict(), composition_rows(made), "Joint cost of the runs", as_json)


def _show_comparison(
    step: Event, steps: int, delta: float, adjacency: str, values: dict[str, Any], as_json: bool
) -> None:
    """Print ε by several accountants."""
    from dpllm.privacy.comparison import compare  # imports another accountant
    from dpllm.privacy.rounding import format_delta, format_epsilon

    methods = compare([(step, steps)], delta, adjacency)
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
