"""The texts of a synthetic data set: drawn from a model after prompts, filtered, and drawn again for those left out.

Place in the flow: between the labels and the file. Drawing from released weights is post-processing, however often it
is repeated, and the filters read generated texts only. So the number of draws costs no ε, and their seed is no secret.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from dpllm.config import ConfigError
from dpllm.methods.synthesize.filters import KEPT, TextFilter
from dpllm.methods.synthesize.texts import LABEL, PROMPT, TEXT
from dpllm.models.generation import Prompt, Sampling

MOST_ROUNDS = 10
"""A text that the filters leave out is drawn again; each prompt gets at most this many draws for a text."""
_SEEDS = 2**63


class Writer(Protocol):
    """A model that continues prompts, such as `dpllm.models.generation.TextGenerator`."""

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, batch_size: int = 16) -> Iterator[list[str]]:
        """Yield the new texts of each batch of prompts, in their order."""
        ...


@dataclass(frozen=True)
class Wanted:
    """A prompt, and the number of texts after it."""

    prompt: Prompt
    count: int
    label: str | None = None
    """The label that the prompt asks for; None: prompts have no labels."""
    to_model: Prompt | None = None
    """The prompt in the form that the model was trained with, such as a chat; None: `prompt`."""


@dataclass(frozen=True)
class Made:
    """The texts of a data set, and the draws that they took."""

    records: tuple[dict[str, Any], ...]
    """Each with "text", and "prompt" and "label" if they were asked for, mixed in their order."""
    drawn: int
    """Texts that the model wrote."""
    dropped: dict[str, int]
    """Reason of a filter -> number of texts."""
    missing: int
    """Texts that are missing after `MOST_ROUNDS` draws for each."""


def make_texts(
    model: Writer,
    wanted: Sequence[Wanted],
    sampling: Sampling,
    filters: TextFilter,
    batch_size: int = 16,
    moved: Callable[[int], None] = lambda _: None,
) -> Made:
    """Draw texts after prompts until each prompt has its number, or was drawn `MOST_ROUNDS` times for each.

    The same model, prompts, filters, batch size and seed give the same texts on the same machine.

    Args:
        model: writes texts.
        wanted: prompts with their numbers.
        sampling: how to draw; a seed counts up with each round, so that a round draws other texts than the last.
        filters: of this data set; they remember the texts that were kept.
        batch_size: the most prompts that are continued together.
        moved: called with the number of texts that were kept.

    Raises:
        ConfigError: no text is wanted, or a prompt leaves no room for a text.
    """
    if sum(one.count for one in wanted) < 1:
        raise ConfigError("no text is wanted: give a number of at least 1")
    kept: list[list[str]] = [[] for _ in wanted]
    drawn = 0
    for turn in range(MOST_ROUNDS):
        open_places = _mixed([one.count - len(own) for one, own in zip(wanted, kept, strict=True)])
        if not open_places:
            break
        seed = None if sampling.seed is None else (sampling.seed + turn) % _SEEDS
        prompts = [_given(wanted[place]) for place in open_places]
        texts = (
            text
            for batch in model.sample(prompts, dataclasses.replace(sampling, seed=seed), batch_size)
            for text in batch
        )
        before = sum(map(len, kept))
        for place, text in zip(open_places, texts, strict=True):
            drawn += 1
            if filters.verdict(text) == KEPT:
                kept[place].append(text.strip())
                moved(1)
        if sampling.temperature == 0 and sum(map(len, kept)) == before:
            break  # the likeliest text of a prompt is the same in every round
    order, taken = _mixed([len(own) for own in kept]), Counter[int]()
    records = []
    for place in order:
        records.append(_record(wanted[place], kept[place][taken[place]]))
        taken[place] += 1
    return Made(
        records=tuple(records),
        drawn=drawn,
        dropped=filters.dropped,
        missing=sum(one.count for one in wanted) - len(records),
    )


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records as JSON lines or as Parquet, by the ending of the path.

    Raises:
        ConfigError: the ending is another one.
        FileExistsError: the file exists.
    """
    if path.suffix == ".jsonl":
        with open(path, "x", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif path.suffix == ".parquet":
        with open(path, "xb") as binary:
            pq.write_table(pa.Table.from_pylist(list(records)), binary)
    else:
        raise ConfigError(
            f"{path}: texts are written as .jsonl or .parquet, not as {path.suffix or 'a file without ending'}"
        )


def _given(one: Wanted) -> Prompt:
    return one.prompt if one.to_model is None else one.to_model


def _record(one: Wanted, text: str) -> dict[str, Any]:
    label = {} if one.label is None else {LABEL: one.label}
    prompt = {PROMPT: one.prompt} if one.prompt else {}
    return {**label, **prompt, TEXT: text}


def _mixed(counts: Sequence[int]) -> list[int]:
    """Return each place as often as its count says, evenly mixed.

    >>> _mixed([4, 2, 0])
    [0, 1, 0, 0, 1, 0]
    """
    spread = [((number + 0.5) / count, place) for place, count in enumerate(counts) for number in range(count)]
    return [place for _, place in sorted(spread)]
