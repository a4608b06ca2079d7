"""`dpllm methods evaluate`: synthetic text beside real text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dpllm.cli.common import AsJson, command, show_json, show_table

_PRIVATE = (
    "These figures are exact results on real text. ε does not cover them: keep them to yourself, and publish none of "
    "them unless the real text is public."
)

COMPARED = "compared"


@command(
    "dpllm methods evaluate runs/synthetic --real held_out.jsonl --train private.jsonl "
    "--model roneneldan/TinyStories-33M"
)
def evaluate(
    synthetic: Annotated[
        Path, typer.Argument(help="The folder of a synthetic data set, or a file of texts.", show_default=False)
    ],
    real: Annotated[Path, typer.Option(help="Real texts that the model did not see, as a file.", show_default=False)],
    train: Annotated[Path | None, typer.Option(help="The records of the training, for the overlap with them.")] = None,
    beside: Annotated[list[Path] | None, typer.Option(help="Another set of synthetic texts; may be repeated.")] = None,
    model: Annotated[str | None, typer.Option(help="A public model whose embeddings are compared.")] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column of the real texts; text without it.", rich_help_panel=COMPARED)
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of the real labels; label without it.", rich_help_panel=COMPARED)
    ] = None,
    mauve: Annotated[
        bool, typer.Option("--mauve/--no-mauve", help="Compute MAUVE of the embeddings.", rich_help_panel=COMPARED)
    ] = True,
    classifier: Annotated[
        bool,
        typer.Option("--classifier/--no-classifier", help="Train a classifier on labels.", rich_help_panel=COMPARED),
    ] = True,
    ngram: Annotated[int, typer.Option(help="Words of a phrase that counts as shared.", rich_help_panel=COMPARED)] = 8,
    most: Annotated[
        int, typer.Option(help="The most texts of each set that are compared.", rich_help_panel=COMPARED)
    ] = 5000,
    real_is_public: Annotated[
        bool, typer.Option("--real-is-public", help="Declare that the texts of --real are public.")
    ] = False,
    canaries: Annotated[Path | None, typer.Option(help="canaries.json, if they were in the data of the run.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Its .json file; without it in not_for_release/."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Synthetic texts beside real ones: distances, a classifier, overlap.

    --model gives MAUVE and the Fréchet distance, labels a classifier of each set that is tested on the real texts.
    Results on private text are exact, and ε does not cover them: they go to not_for_release/, and the ledger of the
    data set lists that they exist.
    """
    from dpllm.config.extras import require
    from dpllm.methods.synthesize.evaluation import (
        EVALUATION_FILE,
        EvaluationSettings,
        evaluation_table,
        note_evaluation,
        require_outside,
    )
    from dpllm.methods.synthesize.evaluation import evaluate as compare
    from dpllm.methods.synthesize.texts import read_texts
    from dpllm.privacy.ledger import LEDGER_FILE

    settings = EvaluationSettings(most=most, ngram=ngram, with_mauve=mauve, with_classifier=classifier)
    folder = synthetic if synthetic.is_dir() else synthetic.parent
    path = output or (synthetic / EVALUATION_FILE if synthetic.is_dir() else None)
    if path is not None and path.suffix != ".json":
        raise ValueError(f"--output {path}: results are written as .json, with a table beside them: change the ending")
    private = not real_is_public or train is not None or canaries is not None
    if private and path is not None:
        require_outside(path)
    if classifier or (mauve and model is not None):
        require("synthetic", "evaluation by MAUVE and a classifier (--no-mauve --no-classifier does without)")
    _say(f"reading {synthetic}")
    sets = [read_texts(one, name=one.name if one.is_dir() else one.stem) for one in (synthetic, *(beside or ()))]
    held_out = read_texts(real, text_column, label_column, "held-out records")
    trained = None if train is None else read_texts(train, text_column, label_column, "training records")
    embedder = None
    if model is not None:
        from dpllm.methods.synthesize.embeddings import load_embedder
        from dpllm.planning.rehearsal import quiet

        _say(f"loading {model}")
        with quiet():
            embedder = load_embedder(model)
    if private and (synthetic.is_dir() or (folder / LEDGER_FILE).is_file()):
        note_evaluation(folder)  # before there is a result
    heard = None if canaries is None else _echo(canaries, sets[0].texts)
    found = compare(sets, held_out, trained, embedder, model, settings, _say)
    if heard is not None:
        found = replace(found, notes=(*found.notes, heard))
    if path is not None:
        found.save(path)
    if private:
        _say(_PRIVATE)
    if as_json:
        show_json({**found.to_dict(), "written": None if path is None else str(path)})
        return
    head, rows = evaluation_table(found)
    show_table(head, rows, "")
    for note in found.notes:
        typer.echo(note)
    if path is not None:
        typer.echo(f"written: {path}, {path.with_suffix('.md')}")


def _echo(path: Path, texts: Sequence[str]) -> str:
    """Return how much of the canaries is in the texts, in words."""
    from dpllm.audit.canaries import CanarySet
    from dpllm.methods.synthesize.overlap import echo

    made = CanarySet.load(path)
    own = [" ".join(text for _, text in canary.records) for canary in made.canaries]
    return str(echo(texts, own, made.included))


def _say(text: str) -> None:
    """Print about the work, apart from the results."""
    typer.echo(text, err=True)
