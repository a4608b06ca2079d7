"""`dpllm budget create | show | settle`: the ε that all runs on one data set may cost together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import Adjacency, AsJson, command, show

BudgetFile = Annotated[Path, typer.Argument(metavar="FILE", help="The budget file.", show_default=False)]


@command("dpllm budget create notes.json --dataset notes --epsilon 8 --delta 1e-6 --num-units 42000")
def create(
    path: BudgetFile,
    dataset: Annotated[str, typer.Option(help="Public name of the data set, as in privacy.dataset.")],
    epsilon: Annotated[float, typer.Option(help="The ε that all runs together may cost.")],
    delta: Annotated[float, typer.Option(help="δ, below 1/N; usual is 1/(10 N).")],
    num_units: Annotated[int, typer.Option(help="N: number of units (sequences or users) of the data set.")],
    unit: Annotated[str, typer.Option(help="sequence or user.")] = "sequence",
    unit_column: Annotated[str | None, typer.Option(help="The column of the user's id, with --unit user.")] = None,
    adjacency: Adjacency = "zero-out",
    shared_people: Annotated[
        bool, typer.Option("--shared-people", help="The data set grows: runs may differ in N.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create the budget file of a data set."""
    from dpllm.privacy.budget import budget_rows, create_budget

    made = create_budget(
        path,
        dataset=dataset,
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        num_units=num_units,
        unit_column=unit_column,
        adjacency=adjacency,
        shared_people=shared_people,
    )
    show(made.to_dict(), budget_rows(made), f"Budget {path}", as_json)


@command("dpllm budget show notes.json")
def show_budget(path: BudgetFile, as_json: AsJson = False) -> None:
    """Print the ε that a data set's runs have spent, and the ε that is left."""
    from dpllm.privacy.budget import budget_rows, read_budget

    budget = read_budget(path)
    show(budget.to_dict(), budget_rows(budget), f"Budget {path}", as_json)


@command("dpllm budget settle notes.json runs/crashed")
def settle(
    path: BudgetFile,
    output_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Output folder of a run that crashed.", show_default=False)
    ],
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Declare that the crash depended neither on the private data nor on the run's releases. Its ledger, "
            "report and card state this, and the steps that were not taken return to the budget.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Settle a run that crashed: if it took no step, or with --independent, unused steps return to the budget."""
    from dpllm.privacy.budget import budget_rows, read_budget
    from dpllm.report.model_card import settle_run

    steps = settle_run(path, output_dir, independent)
    budget = read_budget(path)
    show({"steps": steps, **budget.to_dict()}, budget_rows(budget), f"Budget {path}", as_json)
