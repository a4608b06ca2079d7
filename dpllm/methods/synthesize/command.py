"""`dpllm methods synthesize`: a synthetic data set from a released model, with ledger, report and card."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm.cli import generate as texts
from dpllm.cli.common import command
from dpllm.config.values import integer

if TYPE_CHECKING:
    from dpllm.methods.synthesize.data_set import Labels, Request
    from dpllm.models.generation import Prompt, Sampling, TextGenerator

FILTERS = "texts"


@command(
    "dpllm methods synthesize runs/mine -n 500 --prompt 'on {label}' --labels sport,other "
    "--count-labels topic --output runs/synthetic"
)
def synthesize(
    folder: texts.Folder,
    output: Annotated[Path, typer.Option(help="A new folder for the data set with its report.", show_default=False)],
    number: Annotated[
        int,
        typer.Option("--number", "-n", help="Texts in all, shared evenly by the prompts.", show_default=False),
    ],
    prompt: texts.PromptTexts = None,
    prompts: texts.PromptFile = None,
    prompt_column: texts.PromptColumn = None,
    labels: Annotated[str | None, typer.Option(help="Public labels, with commas; --prompt has {label}.")] = None,
    label_shares: Annotated[Path | None, typer.Option(help="A .json file with the public share of each label.")] = None,
    count_labels: Annotated[
        str | None,
        typer.Option(help="Count --labels in this private column, with noise."),
    ] = None,
    count_noise: Annotated[
        float | None, typer.Option(help="Noise over largest change by a unit; 20 without it.")
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
        typer.Option(help="Leave out texts with a phrase of this public file, a line each.", rich_help_panel=FILTERS),
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", help="Of the file of texts: jsonl or parquet.", rich_help_panel=FILTERS)
    ] = "jsonl",
    budget: Annotated[Path | None, typer.Option(help="The budget file of the people; default: the recipe's.")] = None,
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
    wishes = Wishes(
        labels,
        label_shares,
        count_labels,
        count_noise,
        min_words,
        max_words,
        duplicates,
        blocklist,
        file_format,
        budget,
    )
    asked = texts.prompts_of(prompt, prompts, prompt_column)
    _say(f"checking {folder}")
    texts.check(folder)
    texts.refuse_private_prompts(folder, asked)
    planned = prepare(folder, wishes, prompt)
    model, sampling = texts.load(folder, max_new_tokens, temperature, top_p, seed)
    to_model = texts.as_chat if texts.uses_template(folder, model, template) else None
    make(folder, output, model, planned or asked, wishes.request(number, sampling, batch_size), wishes, to_model)


@dataclass(frozen=True)
class Wishes:
    """The options of a data set, as they were given."""

    labels: str | None
    label_shares: Path | None
    count_labels: str | None
    count_noise: float | None
    min_words: int
    max_words: int | None
    duplicates: bool
    blocklist: Path | None
    file_format: str
    budget: Path | None

    def request(self, number: int, sampling: Sampling, batch_size: int) -> Request:
        """Return the request of the data set."""
        from dpllm.methods.synthesize.data_set import Request
        from dpllm.methods.synthesize.filters import FilterSettings, blocked_words

        blocked: tuple[str, ...] = ()
        if self.blocklist is not None:
            try:
                blocked = blocked_words(self.blocklist.read_text(encoding="utf-8").splitlines())
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"--blocklist {self.blocklist} cannot be read ({error})") from error
        filters = FilterSettings(
            min_words=self.min_words, max_words=self.max_words, duplicates=self.duplicates, blocked=blocked
        )
        return Request(
            number=number, sampling=sampling, filters=filters, batch_size=batch_size, file_format=self.file_format
        )


def prepare(folder: Path, wishes: Wishes, prompts: Sequence[str] | None) -> Labels | None:
    """Return the labels of a data set, None if it has none; print the cost before anything is charged.

    Raises:
        ValueError: the options of labels contradict each other, or the run can have no data set.
    """
    from dpllm.methods.synthesize.data_set import plan_of

    labels = _labels(wishes, prompts)
    plan = plan_of(folder, None if labels is None else labels.counted)
    with_counts = " with the counts of the labels" if plan.charges else "; the data set itself costs nothing"
    _say(f"the data set will cost {plan.guarantee}{with_counts}")
    return labels


def make(
    folder: Path,
    output: Path,
    model: TextGenerator,
    wanted: Sequence[Prompt] | Labels,
    request: Request,
    wishes: Wishes,
    to_model: Callable[[Any], Prompt] | None,
) -> None:
    """Make the data set, and print what it has."""
    from rich.console import Console
    from rich.progress import Progress

    from dpllm.methods.synthesize.data_set import make_data_set

    def ready(prompt: Prompt) -> Prompt:
        return to_model(prompt) if to_model is not None and isinstance(prompt, str) and prompt else prompt

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("texts", total=request.number)
        made = make_data_set(
            folder,
            output,
            model,
            wanted,
            request,
            budget=wishes.budget or _budget_of(folder),
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


def _labels(wishes: Wishes, prompts: Sequence[str] | None) -> Labels | None:
    from dpllm.methods.synthesize.counted import CountedLabels
    from dpllm.methods.synthesize.data_set import Labels
    from dpllm.methods.synthesize.labels import check_classes, public_shares

    if wishes.labels is None and wishes.label_shares is None:
        if wishes.count_labels is not None or wishes.count_noise is not None:
            name = "--count-noise" if wishes.count_labels is None else "--count-labels"
            raise ValueError(f"{name} counts public labels: name all of them with --labels")
        return None
    if wishes.labels is not None and wishes.label_shares is not None:
        raise ValueError("--labels and --label-shares both name the labels: give one of them")
    if not prompts or len(prompts) > 1:
        raise ValueError("labels need one --prompt with {label}, as the model saw prompts in training")
    if wishes.count_labels is None and wishes.count_noise is not None:
        raise ValueError("--count-noise is the noise of --count-labels: name the column to count, or omit it")
    template = prompts[0]
    if wishes.label_shares is not None:
        if wishes.count_labels is not None:
            raise ValueError("--label-shares are public, and --count-labels counts them: give one of them")
        return Labels(template=template, shares=public_shares(_read_shares(wishes.label_shares)))
    classes = check_classes([name.strip() for name in str(wishes.labels).split(",")])
    if wishes.count_labels is None:
        return Labels(template=template, shares=public_shares(dict.fromkeys(classes, 1)))
    noise = {} if wishes.count_noise is None else {"noise_multiplier": wishes.count_noise}
    return Labels(template=template, counted=CountedLabels(classes=classes, column=wishes.count_labels, **noise))


def _read_shares(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--label-shares {path} cannot be read ({error}): write {{'label': share, …}}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--label-shares {path} holds no object with a share for each label")
    return found


def _budget_of(folder: Path) -> Path | None:
    """Return the budget file that the run's recipe names, if it is here."""
    from dpllm.config import RECIPE_FILE, load_recipe
    from dpllm.methods.synthesize.data_set import run_of

    path = run_of(folder) / RECIPE_FILE
    named = load_recipe(path).privacy.budget_file if path.is_file() else None
    return None if named is None else Path(named)


def _say(text: str) -> None:
    typer.echo(text, err=True)
