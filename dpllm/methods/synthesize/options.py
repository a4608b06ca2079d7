"""The options of `dpllm generate` that make a synthetic data set, and what they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpllm.methods.synthesize.data_set import Labels, Request
    from dpllm.models.generation import Prompt, Sampling, TextGenerator

LabelNames = Annotated[
    str | None, typer.Option(help="Public labels, with commas; --prompt has {label} in the place of the label.")
]
LabelShares = Annotated[
    Path | None, typer.Option(help="A .json file with the public share of each label, instead of --labels.")
]
CountLabels = Annotated[
    str | None,
    typer.Option(help="Count --labels in this column of the run's private records, with noise that is charged."),
]
CountNoise = Annotated[
    float | None, typer.Option(help="Noise of a count, over its largest change by one unit; 20 without it.")
]
MinWords = Annotated[int, typer.Option(help="Leave out texts with fewer words.")]
MaxWords = Annotated[int | None, typer.Option(help="Leave out texts with more words.")]
Duplicates = Annotated[bool, typer.Option("--duplicates", help="Keep texts that the model wrote twice.")]
Blocklist = Annotated[
    Path | None, typer.Option(help="A public file of words and phrases, a line each; leave out texts that have one.")
]
FileFormat = Annotated[str, typer.Option("--format", help="Of a data set's file of texts: jsonl or parquet.")]
BudgetFile = Annotated[
    Path | None, typer.Option(help="The budget file of the people; default: as in the recipe of the run.")
]


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

    def given(self) -> list[str]:
        """Return the names of the options that were set."""
        return [f"--{'format' if name == 'file_format' else name.replace('_', '-')}" for name in self._set()]

    def _set(self) -> list[str]:
        unset: dict[str, Any] = {"min_words": 1, "duplicates": False, "file_format": "jsonl"}
        return [name for name, value in vars(self).items() if value != unset.get(name)]

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


def is_folder(output: Path | None, wishes: Wishes) -> bool:
    """Return whether --output names the folder of a data set.

    Raises:
        ValueError: options of a data set are set, and there is no folder for it.
    """
    folder = output is not None and output.suffix not in (".jsonl", ".json", ".txt", ".csv", ".parquet")
    if not folder and wishes.given():
        raise ValueError(
            f"{', '.join(wishes.given())} needs a data set with its report: give --output a folder, such as "
            "--output runs/synthetic"
        )
    return folder


def prepare(folder: Path, wishes: Wishes, prompts: Sequence[str] | None) -> Labels | None:
    """Return the labels of a data set, None if it has none; print the cost before anything is charged.

    Raises:
        ValueError: the options of labels contradict each other, or the run can have no data set.
    """
    from dpllm.methods.synthesize.data_set import plan_of
    from dpllm.privacy.rounding import format_delta, format_epsilon

    labels = _labels(wishes, prompts)
    plan = plan_of(folder, None if labels is None else labels.counted)
    with_counts = " with the counts of the labels" if plan.charges else "; the data set itself costs nothing"
    _say(f"the data set will cost ε = {format_epsilon(plan.epsilon)} at δ = {format_delta(plan.delta)}{with_counts}")
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
        extra = [name for name in ("--count-labels", "--count-noise") if name in wishes.given()]
        if extra:
            raise ValueError(f"{extra[0]} counts public labels: name all of them with --labels")
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
