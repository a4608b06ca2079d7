"""The shared part of the commands `dpllm methods count`, `predict`, `aggregate`, `evolve` and `pate`.

Each of these methods has a `QueryCommand` (`dpllm.methods.queries.run`): the functions that read its data, plan the run
and carry it out.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import typer

import dpllm
from dpllm import registry
from dpllm.cli.common import show, show_json
from dpllm.config.output_folder import check_output_folder
from dpllm.config.recipe_file import load_query_recipe
from dpllm.config.shipped import recipe_file

if TYPE_CHECKING:
    from dpllm.methods.queries.run import QueryCommand


def query_command(method: str) -> QueryCommand:
    """Return the functions of a method, by the name of its section."""
    query = registry.method(method).query
    assert query is not None, method
    found: QueryCommand = registry.load(query)
    return found


def run_method(method: str, recipe: str, overrides: list[str], as_json: bool) -> None:
    """Carry out the query run of a recipe, and print what it released."""

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    say(f"dpllm {dpllm.__version__}: {method} {recipe_file(recipe)}")  # first: the rest takes seconds
    read = load_query_recipe(recipe, overrides, method)
    check_output_folder("output_dir", read.output_dir)
    known = query_command(method)
    say(f"output in {read.output_dir}; {known.reading}")
    data = known.read(read)
    plan = known.plan(read, data)
    say(f"the run costs {plan.guarantee} for each of N = {plan.num_units:,} units")
    with _ended_by_a_signal(read.output_dir):
        result = known.carry_out(read, data, plan, say)
    folder = read.output_dir
    if as_json:
        show_json({"folder": folder, "epsilon": plan.epsilon, "delta": plan.delta, **result})
        return
    for name, value in result.items():
        listed = ", ".join(f"{key}: {one}" for key, one in value.items()) if isinstance(value, dict) else value
        say(f"{name}: {listed}")
    say(f"report and card are in {folder} (check them with: dpllm verify {folder})")


@contextlib.contextmanager
def _ended_by_a_signal(folder: str) -> Iterator[None]:
    """End a run on Ctrl-C and SIGTERM as on an error: with an end in its ledger, a report and a card."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # the report takes seconds
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # where no signal can be handled
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:
        from dpllm.privacy.ledger import LEDGER_FILE

        charged = (Path(folder) / LEDGER_FILE).is_file()
        words = f"what was charged stays charged: dpllm report {folder}" if charged else "nothing was charged"
        typer.echo(f"stopped by a signal; {words}", err=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_query_plan(path: Path, overrides: list[str], as_json: bool) -> None:
    """Print the plan of a query run, before anything is charged."""
    recipe = load_query_recipe(path, overrides)
    known = query_command(recipe.method)
    typer.echo(f"note: {known.reading}", err=True)
    plan = known.plan(recipe, known.read(recipe))
    from dpllm.methods.queries.run import format_query_plan

    values = {
        **plan.to_dict(),
        "hash": plan.hash,
        "epsilon_zero_out": plan.epsilon_under("zero-out"),
        "epsilon_replace_one": plan.epsilon_under("replace-one"),
    }
    show(values, format_query_plan(plan), f"Privacy plan of {path}", as_json)
