"""`dpllm methods synthesize` and `evaluate`: a synthetic data set of a released model's texts, and its evaluation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli import generate as texts
from dpllm.cli.common import AsJson, command, show_json, show_table
from dpllm.config.values import integer

if TYPE_CHECKING:
    from dpllm.methods.synthesize.data_set import Labels
    from dpllm.models.generation import Prompt


FILTERS, COMPARED = "texts", "compared"
"""Panels of options on the help screens."""
_PRIVATE = (
    "These figures are exact results on real text. ε does not cover them: keep them to yourself, and publish none of "
    "them unless the real text is public."
)


@command(
    "dpllm methods synthesize runs/mine -n 500 --prompt 'on {label}' --labels sport,other "
    "--count-labels topic --output runs/synthetic"
)
def synthesize(
    folder: texts.Folder,
    output: Annotated[Path, typer.Option(help="A new folder for the data set with its report.", show_default=False)],
    number: Annotated[
        int,
        typer.Option("--number", "-n", help="Number of texts, shared evenly by the prompts.", show_default=False),
    ],
    prompt: texts.PromptTexts = None,
    prompts: texts.PromptFile = None,
    prompt_column: texts.PromptColumn = None,
    labels: Annotated[str | None, typer.Option(help="Public labels, with commas; a prompt has {label}.")] = None,
    label_shares: Annotated[Path | None, typer.Option(help="A .json file with the public share of each label.")] = None,
    count_labels: Annotated[
        str | None,
        typer.Option(help="Count --labels in this private column, with noise."),
    ] = None,
    count_noise: Annotated[
        float | None, typer.Option(help="Noise over the largest change by a unit. Default: 20.")
    ] = None,
    min_words: Annotated[int, typer.Option(help="Leave out texts with fewer words.", rich_help_panel=FILTERS)] = 1,
    max_words: Annotated[
        int | None, typer.Option(help="Leave out texts with more words.", rich_help_panel=FILTERS)
    ] = None,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="Keep texts that the model wrote twice.", rich_help_panel=FILTERS)
    ] = False,
    blocklist: Annotated[
        Path | None,
        typer.Option(help="Leave out texts with a phrase of this public file, one per line.", rich_help_panel=FILTERS),
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", help="Format of the file of texts: jsonl or parquet.", rich_help_panel=FILTERS)
    ] = "jsonl",
    budget: Annotated[Path | None, typer.Option(help="The budget file of the data set; default: the recipe's.")] = None,
    max_new_tokens: texts.NewTokens = 128,
    temperature: texts.Temperature = 1.0,
    top_p: texts.TopP = 1.0,
    seed: texts.Seed = None,
    batch_size: texts.BatchSize = 16,
    template: texts.Template = None,
) -> None:
    """A synthetic data set of a released model's texts, with its report.

    Texts cost nothing; --count-labels costs ε, which is charged before.
    """
    integer("--number", number, 1)
    integer("--batch-size", batch_size, 1)
    asked = texts.prompts_of(prompt, prompts, prompt_column)
    _say(f"checking {folder}")
    from rich.console import Console
    from rich.progress import Progress

    from dpllm.methods.synthesize.data_set import Request, make_data_set, plan_of
    from dpllm.methods.synthesize.texts import FilterSettings

    texts.check(folder)
    texts.refuse_private_prompts(folder, asked)
    of_labels = _labels(labels, label_shares, count_labels, count_noise, prompt)
    plan = plan_of(folder, None if of_labels is None else of_labels.counted)
    with_counts = " with the counts of the labels" if plan.charges else "; the data set itself costs nothing"
    _say(f"the data set will cost {plan.guarantee}{with_counts}")
    model, sampling = texts.load(folder, max_new_tokens, temperature, top_p, seed)
    to_model = texts.as_chat if texts.uses_template(folder, model, template) else None
    filters = FilterSettings(
        min_words=min_words, max_words=max_words, duplicates=duplicates, blocked=_blocked(blocklist)
    )
    request = Request(number=number, sampling=sampling, filters=filters, batch_size=batch_size, file_format=file_format)

    def ready(prompt: Prompt) -> Prompt:
        return to_model(prompt) if to_model is not None and isinstance(prompt, str) and prompt else prompt

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("texts", total=number)
        made = make_data_set(
            folder,
            output,
            model,
            of_labels or asked,
            request,
            budget=budget or _budget_of(folder),
            to_model=ready,
            say=_say,
            moved=lambda count: progress.advance(task, count),
        )
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in made.dropped.items())
    _say(f"{len(made.records):,} texts are in {output}, of {made.drawn:,} that the model wrote")
    if left_out:
        _say(f"left out: {left_out}")
    if made.missing:
        _say(
            f"{made.missing:,} texts are missing: the filters left out nearly all texts of some prompts. Relax them, "
            "or raise --temperature"
        )
    _say(f"dpllm verify {output}   # checks the data set and its guarantee")


def _blocked(path: Path | None) -> tuple[str, ...]:
    """Return the blocked words of a file; none without one."""
    from dpllm.methods.synthesize.texts import blocked_words

    try:
        return () if path is None else blocked_words(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--blocklist {path} cannot be read ({error})") from error


def _labels(
    labels: str | None,
    label_shares: Path | None,
    count_labels: str | None,
    count_noise: float | None,
    prompts: Sequence[str] | None,
) -> Labels | None:
    """Return the labels of a data set, None if it has none.

    Raises:
        ValueError: the options contradict each other.
    """
    from dpllm.methods.synthesize.data_set import CountedLabels, Labels
    from dpllm.methods.synthesize.texts import check_classes, public_shares

    if labels is None and label_shares is None:
        if count_labels is not None or count_noise is not None:
            name = "--count-noise" if count_labels is None else "--count-labels"
            raise ValueError(f"{name} counts public labels: name all of them with --labels")
        return None
    if labels is not None and label_shares is not None:
        raise ValueError("--labels and --label-shares both name the labels: give one of them")
    if not prompts or len(prompts) > 1:
        raise ValueError("labels need one --prompt with {label}, as the model saw prompts in training")
    if count_labels is None and count_noise is not None:
        raise ValueError("--count-noise is the noise of --count-labels: name the column to count, or omit it")
    template = prompts[0]
    if label_shares is not None:
        if count_labels is not None:
            raise ValueError("--label-shares are public, and --count-labels counts them: give one of them")
        return Labels(template=template, shares=public_shares(_read_shares(label_shares)))
    classes = check_classes([name.strip() for name in str(labels).split(",")])
    if count_labels is None:
        return Labels(template=template, shares=public_shares(dict.fromkeys(classes, 1)))
    noise = {} if count_noise is None else {"noise_multiplier": count_noise}
    return Labels(template=template, counted=CountedLabels(classes=classes, column=count_labels, **noise))


def _read_shares(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--label-shares {path} cannot be read ({error}): write {{'label': share, …}}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--label-shares {path} is not an object with a share for each label")
    return found


def _budget_of(folder: Path) -> Path | None:
    """Return the budget file in the run's recipe, if the recipe is in its folder."""
    from dpllm.config import RECIPE_FILE, load_recipe
    from dpllm.methods.synthesize.data_set import run_of

    path = run_of(folder) / RECIPE_FILE
    named = load_recipe(path).privacy.budget_file if path.is_file() else None
    return None if named is None else Path(named)


def _say(text: str) -> None:
    """Print progress to standard error."""
    typer.echo(text, err=True)


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
        str | None, typer.Option(help="Column of the real texts; default: text.", rich_help_panel=COMPARED)
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of the real labels; default: label.", rich_help_panel=COMPARED)
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
    output: Annotated[
        Path | None,
        typer.Option(help="The .json file of the results; default: in not_for_release/."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare synthetic texts with real ones: distances, a classifier, overlap.

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
        read_texts,
        require_outside,
    )
    from dpllm.methods.synthesize.evaluation import evaluate as compare
    from dpllm.privacy.ledger import LEDGER_FILE

    settings = EvaluationSettings(most=most, ngram=ngram, with_mauve=mauve, with_classifier=classifier)
    folder = synthetic if synthetic.is_dir() else synthetic.parent
    path = output or (synthetic / EVALUATION_FILE if synthetic.is_dir() else None)
    if path is not None and path.suffix != ".json":
        raise ValueError(f"--output {path}: results are written as .json: change the extension")
    private = not real_is_public or train is not None
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
    found = compare(sets, held_out, trained, embedder, model, settings, _say)
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
