"""`dpllm federation`: a federated run over several machines, with Flower carrying the messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import Overrides, one_line_errors
from dpllm.config import ConfigError, load_recipe

app = typer.Typer(
    no_args_is_help=True,
    help="Federated training over several machines: the server has no records, and each node those of its clients.",
)


@app.command(
    epilog="Example: dpllm federation prepare hospitals.yaml deployment --node oslo=1 --node bergen=1 "
    "--host fl.example.org"
)
@one_line_errors
def prepare(
    recipe: Annotated[str, typer.Argument(help="A recipe file with a section federate.")],
    folder: Annotated[Path, typer.Argument(help="A new folder; it gets one folder for the server and one per node.")],
    overrides: Overrides = None,
    node: Annotated[
        list[str] | None, typer.Option(help="NAME=COUNT: a node, and how many clients (units) it has. Repeat it.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Name or IP address of the server, for its certificate. Repeat it.")
    ] = None,
) -> None:
    """Write the folders of a federated run over several machines: plan, roster, keys and certificates.

    N is the number of clients of all nodes together; it is public, and fixed from here on. Hand each node its folder,
    and no other one, in a way that nobody reads: it has the node's key. The server's folder stays at the server.
    """
    from dpllm.methods.federated.preparing import prepare as write
    from dpllm.privacy.plan import format_plan
    from dpllm.training.finetune import show

    nodes: dict[str, int] = {}
    for given in node or ():
        name, _, count = given.partition("=")
        if not count.isdecimal() or int(count) < 1 or name in nodes:
            raise ConfigError(f"--node {given}: give each node once, with its number of clients, such as oslo=1")
        nodes[name] = int(count)
    plan = write(load_recipe(recipe, overrides or ()), folder, nodes, host or ["localhost", "127.0.0.1"])
    show("privacy plan", format_plan(plan))
    typer.echo(f"wrote {folder}: the folder server, and one folder for each of {len(nodes)} nodes")


@app.command(epilog="Example: dpllm federation serve deployment/server --host 0.0.0.0 --port 9443")
@one_line_errors
def serve(
    folder: Annotated[Path, typer.Argument(help="The server's folder, of dpllm federation prepare.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 9443,
    wait: Annotated[float, typer.Option(help="Seconds to wait for enough clients, before each round.")] = 300.0,
    answer_within: Annotated[float, typer.Option(help="Seconds after which a node counts as away.")] = 300.0,
    keep_answers: Annotated[
        str | None, typer.Option(help="Folder for the answers as the server gets them (secure aggregation only).")
    ] = None,
) -> None:
    """Take the rounds of a federated run: plan, ledger, budget and report are at the server, the records are not.

    Starts Flower's SuperLink with TLS, and stops it after the last round. Ctrl-C ends the run after the current round,
    with the model and its report; it is not resumed.
    """
    from dpllm.methods.federated.serving import Options
    from dpllm.methods.federated.serving import serve as run

    options = Options(wait, answer_within, keep_answers, tuple(overrides or ()))
    if code := run(folder, host, port, options):
        raise typer.Exit(code)


@app.command(epilog="Example: dpllm federation node deployment/oslo --records oslo.jsonl --server fl.example.org:9443")
@one_line_errors
def node(
    folder: Annotated[Path, typer.Argument(help="The node's folder, of dpllm federation prepare.")],
    overrides: Overrides = None,
    *,
    records: Annotated[str, typer.Option(help="File, folder or glob with the records of this node's clients.")],
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
) -> None:
    """Answer the server for the clients of one node, from their records, until Ctrl-C.

    The node has its own copy of the plan and answers no request under another one, none without the server's
    signature, and no round twice. It runs no program that the server sends.
    """
    from dpllm.methods.federated.flower import QUIET
    from dpllm.methods.federated.node_program import run_node

    os.environ.update(QUIET)  # before Flower is imported
    try:
        run_node(folder, records, server, overrides or (), lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        typer.echo("the node has ended; the rounds that it answered stay counted")
