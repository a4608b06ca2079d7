"""`dpllm push`: the model of a finished run, published with its guarantee."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, command, show_json

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)]


@command("dpllm push runs/mine my-name/my-model --private --dry-run")
def push(
    run: Run,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="The repository on the Hub, such as my-name/my-model.")
    ],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Who sees a new repository; default: the Hub's.")
    ] = None,
    force_open_points: Annotated[
        bool, typer.Option("--force-open-points", help="Publish with open points; the card lists them.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files that would be uploaded and those that stay; upload none.")
    ] = False,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Model with its privacy report",
    revision: Annotated[str | None, typer.Option(help="The branch; default: the main one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload the model of a run to the Hub with its guarantee: weights, tokenizer, card, report, plan and ledger only.

    No other file leaves the machine. A run that is not private, that an audit refutes, or whose files contradict each
    other is refused, and so is one whose report has open points. HF_ENDPOINT names another Hub; `hf auth login` logs
    in.
    """
    from dpllm.report.publishing import public_configurations, publish, published_files, require_publishable

    vocabulary = _vocabulary_of(run)
    names = published_files(run, vocabulary)
    taken = set(names)
    stay = [path.relative_to(run).as_posix() for path in sorted(run.rglob("*")) if path.is_file()]
    stay = [name for name in stay if name not in taken]
    values = {"run": str(run), "repo_id": repo_id, "uploaded": names, "stay": stay}
    if not as_json:
        _say(names, stay, "would be uploaded" if dry_run else "to be uploaded")
        for name, content in public_configurations(run, names).items():
            base = json.loads(content)["base_model_name_or_path"]
            typer.echo(f"{name} names the base model {base} there, and not its path on this machine.")
    with _open_points_listed(run):
        if dry_run:
            require_publishable(run, force_open_points=force_open_points)
            result = None
        else:
            result = publish(
                run,
                repo_id,
                message=message,
                private=private,
                force_open_points=force_open_points,
                revision=revision,
                vocabulary=vocabulary,
            )
    if as_json:
        show_json({**values, "dry_run": dry_run, "commit": None if result is None else str(result)})
    else:
        typer.echo("Nothing was uploaded (--dry-run)." if dry_run else f"Published: {result}")


@contextlib.contextmanager
def _open_points_listed(run: Path) -> Iterator[None]:
    """Print the open points for which a publication is refused, a line each, with commands that name the run.

    Raises:
        PublishError: the publication is refused.
    """
    from dpllm.report.publishing import PublishError

    try:
        yield
    except PublishError as error:
        if not error.points:
            raise
        typer.echo("open points:", err=True)
        for number, point in enumerate(error.points, 1):
            typer.echo(f"  {number}. {point}", err=True)
        raise PublishError(
            f"the privacy report of {run} has {len(error.points)} open point(s), listed above with the command that "
            "clears each. Clear them, or publish with --force-open-points: the card lists them"
        ) from error


def _vocabulary_of(run: Path) -> list[str]:
    """Return the names of the files from which a model's tokenizer is loaded."""
    if not (run / "tokenizer_config.json").is_file():
        return []
    from transformers import AutoTokenizer

    return list((AutoTokenizer.from_pretrained(run, trust_remote_code=False).vocab_files_names or {}).values())


def _say(names: list[str], stay: list[str], what: str) -> None:
    """Print the two lists."""
    typer.echo(f"{what}:")
    for name in names:
        typer.echo(f"  {name}")
    typer.echo(f"stay here ({len(stay)} files):")
    folders = Counter(name.partition("/")[0] for name in stay if "/" in name)
    for name in [*(name for name in stay if "/" not in name), *(f"{one}/ ({n} files)" for one, n in folders.items())]:
        typer.echo(f"  {name}")
