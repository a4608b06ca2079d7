"""`dpllm generate`: texts from a released model, or a chat with it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpllm import registry
from dpllm.cli.common import command
from dpllm.config.values import integer, nearest

if TYPE_CHECKING:
    from dpllm.models.generation import Prompt, Sampling, TextGenerator
    from dpllm.report.verify import Standing

Folder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="The folder of a run, or of a model that it released.", show_default=False),
]
SAMPLING = "sampling"
NewTokens = Annotated[int, typer.Option(help="The most tokens of a text.", rich_help_panel=SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0: always the likeliest token.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float, typer.Option(help="Draw from the likeliest tokens of this probability together.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None, typer.Option(help="Of the draws; from the operating system without it.", rich_help_panel=SAMPLING)
]
PromptTexts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="May be repeated. Without one texts begin from nothing."),
]
PromptFile = Annotated[Path | None, typer.Option(help="A file of prompts: .txt, a line each, or records.")]
PromptColumn = Annotated[str | None, typer.Option(help="Its column of texts or messages; prompt without it.")]
BatchSize = Annotated[int, typer.Option(help="The most texts made together.", rich_help_panel=SAMPLING)]
Template = Annotated[
    bool | None,
    typer.Option(
        "--template/--no-template",
        help="Use the chat template; default: as in the run.",
        show_default=False,
        rich_help_panel=SAMPLING,
    ),
]
Unverified = Annotated[bool, typer.Option("--unverified", help="Go on although the ledger bears out no guarantee.")]
COVERED = (
    "Generated text is post-processing of the released weights: it costs no ε, however much of it is made. Prompts are "
    "not covered: do not publish text that answers a private prompt."
)
_END, _AGAIN = ("/exit", "/quit"), "/reset"


@command(
    'dpllm generate runs/quickstart --prompt "The people" -n 5',
    "dpllm generate runs/quickstart --chat",
)
def generate(
    folder: Folder,
    prompt: PromptTexts = None,
    prompts: PromptFile = None,
    prompt_column: PromptColumn = None,
    number: Annotated[int, typer.Option("--number", "-n", help="Texts for each prompt.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Talk to the model: /reset forgets, /exit ends.")] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="The most tokens of a text; 128, in a chat 256.", rich_help_panel=SAMPLING),
    ] = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    batch_size: BatchSize = 16,
    template: Template = None,
    output: Annotated[Path | None, typer.Option(help="A .jsonl file for the texts, a line each.")] = None,
    unverified: Unverified = False,
) -> None:
    """Sample texts from a released model, which have its guarantee: weights and ledger are checked first.

    Texts go to the standard output or to --output, and all else to the error stream.
    """
    integer("--number", number, 1)
    integer("--batch-size", batch_size, 1)
    if chat:
        _refuse_batch(
            prompt, prompts, prompt_column, output, {"--number": number != 1, "--batch-size": batch_size != 16}
        )
        _chat(folder, 256 if max_new_tokens is None else max_new_tokens, temperature, top_p, seed, template, unverified)
        return
    if output is not None and output.suffix != ".jsonl":
        raise ValueError(f"--output {output}: texts are written as .jsonl, a line each: change the ending")
    if output is not None and output.exists():
        raise ValueError(f"--output {output} exists already, and it is not replaced: give another name, or remove it")
    asked = prompts_of(prompt, prompts, prompt_column)
    _say(f"checking {folder}")
    check(folder, unverified)
    refuse_private_prompts(folder, asked)
    model, sampling = load(folder, 128 if max_new_tokens is None else max_new_tokens, temperature, top_p, seed)
    in_chat = uses_template(folder, model, template)
    ready = [as_chat(one) if in_chat and isinstance(one, str) and one else one for one in asked]
    repeated = [one for one in ready for _ in range(number)]
    made = (text for batch in model.sample(repeated, sampling, batch_size) for text in batch)
    lines = (
        {"prompt": asked[place // number], "sample": place % number, "text": text} for place, text in enumerate(made)
    )
    if output is None:
        for line in lines:
            _print(line, len(asked) > 1 or bool(asked[0]))
        return
    _write(output, lines, len(repeated))
    _say(f"{len(repeated):,} texts are in {output}")


def _refuse_batch(
    prompt: list[str] | None, prompts: Path | None, column: str | None, output: Path | None, more: dict[str, bool]
) -> None:
    given = {"--prompt": prompt, "--prompts": prompts, "--prompt-column": column, "--output": output}
    if names := [name for name, value in {**given, **more}.items() if value]:
        raise ValueError(f"{names[0]} is for texts, and --chat reads what is typed: omit one of them")


def _chat(
    folder: Path,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    template: bool | None,
    unverified: bool,
) -> None:
    """Talk to a model: words appear as they are made; without a chat template it continues the text so far."""
    _say(f"checking {folder}")
    check(folder, unverified)
    model, sampling = load(folder, max_new_tokens, temperature, top_p, seed)
    in_chat = uses_template(folder, model, template)
    how = (
        "by its chat template"
        if in_chat
        else "by continuing the text: it has no chat template, or was not trained with it"
    )
    _say(f"The model answers {how}. /reset forgets, /exit ends.")
    from transformers import TextStreamer

    streamer = TextStreamer(
        model.tokenizer, skip_prompt=not model.has_decoder, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    talk = _Talk(model, in_chat, max_new_tokens)
    try:
        while True:
            said = _line()
            if said is None or said.strip() in _END:
                break
            if said.strip() == _AGAIN:
                talk.forget()
            elif said.strip():
                talk.answer(said, lambda prompt: model.stream(prompt, sampling, streamer))
    except KeyboardInterrupt:
        typer.echo("")


class _Talk:
    """A conversation: messages, or one text that grows.

    Attributes:
        messages: so far, with a template.
        text: so far, without one.
    """

    def __init__(self, model: TextGenerator, in_chat: bool, max_new_tokens: int) -> None:
        self._model, self._in_chat, self._new = model, in_chat, max_new_tokens
        self.messages: list[dict[str, str]] = []
        self.text = ""

    def forget(self) -> None:
        """Begin again."""
        self.messages, self.text = [], ""
        _say("The conversation is forgotten.")

    def answer(self, said: str, stream: Callable[[Prompt], str]) -> None:
        """Add what was said, and the model's answer; a ``stream`` function prints the answer and returns it."""
        if not self._in_chat:
            self.text += said
            self._forget_the_beginning()
            self.text += stream(self.text)
            return
        self.messages.append({"role": "user", "content": said})
        while len(self.messages) > 2 and self._model.room_for(self.messages) < self._new:
            del self.messages[:2]  # the oldest turn
        self.messages.append({"role": "assistant", "content": stream(self.messages)})

    def _forget_the_beginning(self) -> None:
        """Keep the last part of the text that leaves room for an answer; at least half of what the model sees."""
        short = self._new - self._model.room_for(self.text)
        if short > 0 and self._model.sees is not None:
            ids = self._model.encode(self.text)
            kept = ids[-max(len(ids) - short, self._model.sees // 2) :]
            self.text = str(self._model.tokenizer.decode(kept, skip_special_tokens=True))


def prompts_of(prompt: list[str] | None, prompts: Path | None, column: str | None) -> Sequence[Prompt]:
    """Return the prompts of the options --prompt, --prompts and --prompt-column; one empty prompt without them.

    Raises:
        ValueError: the options contradict each other, or the file has no prompts.
    """
    if prompt and prompts is not None:
        raise ValueError("--prompt and --prompts both give prompts: give one of them")
    if column is not None and prompts is None:
        raise ValueError("--prompt-column names a column of --prompts: add --prompts FILE, or omit it")
    return _read(prompts, column) if prompts is not None else [*(prompt or ())] or [""]


def check(folder: Path, unverified: bool = False) -> None:
    """Print the guarantee of a folder.

    Raises:
        ValueError: the ledger does not bear it out, and this was not accepted.
    """
    from dpllm.report.verify import standing_of

    of_method = registry.folder_of_method(folder)
    if of_method is not None:
        raise ValueError(
            f"{folder} is the folder of {of_method.what}: give {folder / of_method.released}, which holds the released "
            "model"
        )
    remedy = f"`dpllm verify {folder}` shows every check. --unverified goes on without a guarantee"
    try:
        standing = standing_of(folder)
    except ValueError as error:
        if not unverified or not folder.is_dir():
            words = str(error)
            raise ValueError(words if not folder.is_dir() else f"{words}. --unverified goes on without one") from error
        _say(f"NO GUARANTEE: {error}.")
        return
    found = _refuted(folder, standing)
    if found is not None:
        if not unverified:
            raise ValueError(f"{folder}: {found}. {remedy}")
        _say(f"NO GUARANTEE: {found}.")
        return
    _say(standing.words)
    _say(COVERED)


def _refuted(folder: Path, standing: Standing) -> str | None:
    """Return why a folder has no guarantee; None: it has one."""
    from dpllm.models.start_weights import refuse_other_base

    failed = standing.failed
    if failed is not None:
        return f"a check fails: {failed.what}: {failed.detail}"
    if not standing.private:
        return standing.words.rstrip(".")
    try:
        refuse_other_base(folder)
    except ValueError as error:
        return str(error)
    return None


def load(
    folder: Path, max_new_tokens: int, temperature: float, top_p: float, seed: int | None
) -> tuple[TextGenerator, Sampling]:
    """Return the model of a folder, and how its texts are drawn."""
    from dpllm.models.generation import Sampling, load_generator
    from dpllm.training.save_rehearsal import quiet

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    _say("loading the model")
    with quiet():
        return load_generator(folder), sampling


def uses_template(folder: Path, model: TextGenerator, wanted: bool | None) -> bool:
    """Return whether prompts go into the chat template: as wanted, as in the run's recipe, or if there is one."""
    if wanted and not model.has_template:
        raise ValueError(f"--template: the tokenizer in {folder} has no chat template. Omit --template")
    if wanted is not None:
        return wanted
    from dpllm.config import RECIPE_FILE, load_recipe
    from dpllm.config.formats.record_format import Chat

    if not model.has_template or not (folder / RECIPE_FILE).is_file():
        return model.has_template
    return load_recipe(folder / RECIPE_FILE).data.form.holds is Chat


def refuse_private_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Check that no prompt contains a private record of the run, if its recipe and records are available.

    Raises:
        DataError: a prompt holds one; the message gives its number.
    """
    from dpllm.config import RECIPE_FILE, load_recipe
    from dpllm.data.shared_records import refuse_private_prompts

    recipe = next(
        (place / RECIPE_FILE for place in (folder, folder.resolve().parent) if (place / RECIPE_FILE).is_file()), None
    )
    if recipe is None:
        return
    texts = {}
    for number, prompt in enumerate(prompts, 1):
        parts = [prompt] if isinstance(prompt, str) else [str(message.get("content") or "") for message in prompt]
        texts[f"prompt {number}"] = "\n".join(parts)
    if not refuse_private_prompts(load_recipe(recipe), texts):
        _say("the prompts were not compared with the private records of the run, which are not at hand")


def as_chat(prompt: str) -> list[dict[str, str]]:
    """Return a prompt as the message of a user."""
    return [{"role": "user", "content": prompt}]


def _read(path: Path, column: str | None) -> list[Prompt]:
    """Return the prompts of a file.

    Raises:
        ValueError: the file cannot be read, has no such column, or a row has no prompt.
    """
    from dpllm.data.readers import Reading, read_tables, why_unreadable

    if (reason := why_unreadable(path)) is not None:
        raise ValueError(f"--prompts {path}: cannot be read: {reason}")
    if not path.is_file():
        raise ValueError(f"--prompts {path}: there is no such file")
    found: list[Prompt] = []
    for table in read_tables(path, Reading(needed=("prompt", "messages"))):
        names = table.column_names
        known = [name for name in ("prompt", "messages", "text") if name in names]
        chosen = column or (names[0] if len(names) == 1 else next(iter(known), None))
        if chosen is None or chosen not in names:
            asked = f"no column '{column}'{nearest(str(column), names) or '.'}" if column else "no column named prompt."
            raise ValueError(f"--prompts {path}: {asked} It has {', '.join(names)}: name one with --prompt-column")
        found += table.column(chosen).to_pylist()
    wrong = next((place for place, one in enumerate(found) if not _is_prompt(one)), None)
    if wrong is not None or not found:
        place = "it holds none" if wrong is None else f"record {wrong} is neither a text nor a list of messages"
        raise ValueError(f"--prompts {path}: a prompt is needed in each record, and {place}")
    return found


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        forms = {"role", "content"}, {"from", "value"}
        return bool(value) and all(isinstance(one, dict) and any(form <= set(one) for form in forms) for one in value)
    return isinstance(value, str)


def _write(path: Path, lines: Iterator[dict[str, Any]], total: int) -> None:
    from rich.console import Console
    from rich.progress import Progress

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "x", encoding="utf-8") as file, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("generating", total=total)
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            progress.advance(task)


def _print(line: dict[str, Any], with_prompt: bool) -> None:
    """Print one text, below its prompt."""
    if with_prompt:
        asked = line["prompt"]
        typer.echo(f"> {asked if isinstance(asked, str) else asked[-1]['content']}")
    typer.echo(line["text"])
    typer.echo("")


def _line() -> str | None:
    """Return a line that was typed; None at the end of the input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() then edits the line
        try:
            return input("> ")
        except EOFError:
            return None
    said = sys.stdin.readline()
    return said.rstrip("\n") if said else None


def _say(text: str) -> None:
    """Print a message to the error stream, since texts go to the standard output."""
    typer.echo(text, err=True)
