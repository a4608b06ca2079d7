"""`dpllm methods tune`: try settings privately, and release only the best run."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli.common import AsJson, Overrides, RecipePath, command, show

if TYPE_CHECKING:
    from dpllm.methods.tune.tune import Tuning

_PRIVATE = (
    "private: the number of runs, their scores and their models. They stay in not_for_release; keep that folder and "
    "this screen to yourself"
)


@command("dpllm methods tune gpt2_e2e_lora --search search.yaml data.eval.public=true")
def tune(
    recipe: RecipePath,
    overrides: Overrides = None,
    search: Annotated[
        Path, typer.Option(help="The search file: the distribution of the number of runs, and the candidates.")
    ] = Path("search.yaml"),
    launch: Annotated[
        str,
        typer.Option(
            help="The command that trains a recipe. {recipe} is its file; without it, --config FILE is added."
        ),
    ] = "dpllm train {recipe}",
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Print the ε of the tuning and stop; nothing is drawn.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Try settings privately, and release only the best run.

    The number of runs is secret and random. The ε of the release is higher than that of one run, and far lower than
    that of all runs added up. The recipe's target ε is that of the release. The runs are compared on held-out rows,
    which must be public. The same command continues a tuning that was interrupted.
    """
    environment = dict(os.environ)  # for the runs: libraries that check the recipe change this process's environment
    from dpllm.methods.tune.tune import load_search, prepare
    from dpllm.methods.tune.tune import tune as take

    prepared = prepare(recipe, overrides or (), load_search(search))
    values, rows = _cost(prepared)
    if plan_only:
        show(values, rows, f"Private tuning of {recipe}", as_json)
        return
    if not as_json:
        show(values, rows, f"Private tuning of {recipe}", as_json)
        typer.echo(_PRIVATE)
    released = take(prepared, _runner(launch, environment), (lambda line: None) if as_json else typer.echo)
    if as_json:
        show({**values, "released": None if released is None else str(released)}, [], "", as_json)
    elif released is None:
        typer.echo("No run produced a model, so nothing is released. The tuning stays charged.")
    else:
        typer.echo(f"Released: {released} (check it with: dpllm verify {released})")


def _cost(prepared: Tuning) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the cost of a tuning before it begins, as values and as rows to print."""
    plan, selection = prepared.plan, prepared.search.selection
    one = plan.guarantee.of(plan.history_of_run)
    often, seldom = selection.number_at(0.5), selection.number_at(0.99)
    values = {
        "epsilon": plan.epsilon,
        "epsilon_of_one_run": one.epsilon,
        "delta": plan.delta,
        "adjacency": plan.adjacency,
        "noise_multiplier": plan.noise_multiplier,
        "runs": selection.kind,
        "mean_runs": selection.mean,
        "candidates": len(prepared.recipes),
    }
    rows = [
        ("ε of the release", str(plan.guarantee)),
        ("ε of one run by itself", str(one)),
        ("noise multiplier σ", f"{plan.noise_multiplier:.6g}"),
        ("runs", f"{selection.words()}; half of all tunings have at most {often}, 99 of 100 at most {seldom}"),
        ("candidates, drawn uniformly", f"{len(prepared.recipes):,}"),
        ("folder", str(prepared.folder)),
    ]
    return values, rows


def _runner(launch: str, environment: dict[str, str]) -> Callable[[Path, Path], int]:
    words = shlex.split(launch)
    if not words:
        raise ValueError("--launch is empty: give the command that trains a recipe")
    if words[0] == "dpllm":  # this installation, even if it is not on the path
        words[:1] = [sys.executable, "-m", "dpllm"]
    if not any("{recipe}" in word for word in words):
        words += ["--config", "{recipe}"]

    def run(recipe: Path, log: Path) -> int:
        with open(log, "ab") as file, _ends_with_us() as started:
            process = subprocess.Popen(
                [word.replace("{recipe}", str(recipe)) for word in words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # so that it gets Ctrl-C once, from this program
            )
            started(process)
            code = process.wait()
        return code

    return run


@contextlib.contextmanager
def _ends_with_us() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """On a signal, stop the running training and wait until it has saved its checkpoint.

    The run has no end in the record, so the next start continues it.

    Raises:
        KeyboardInterrupt: after the block, if a signal came.
    """
    running: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, _frame: Any) -> None:
        received.append(number)
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)  # without waiting: a signal may interrupt the wait itself

    def started(process: subprocess.Popen[bytes]) -> None:
        running.append(process)
        if received:
            forward(received.pop(), None)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt
