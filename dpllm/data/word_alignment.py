"""Align tokens with the text: turn the class of each word, or the position of an answer, into token labels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from dpllm.config import ConfigError
from dpllm.data.labels import END, IGNORE, START
from dpllm.data.records import DataError


@dataclass
class Aligned:
    """The tokens of one record, which are cut together.

    Attributes:
        ids: token ids.
        types: token types.
        places: first and last character (exclusive) of each token in its text.
        parts: 0 for a token of the first text, 1 for one of the second, None for a special token.
    """

    ids: list[int]
    types: list[int]
    places: list[tuple[int, int]]
    parts: list[int | None]

    def cut(self, limit: int) -> bool:
        """Remove tokens from the end of the last text, then of the first, until ``limit`` are left.

        Returns:
            Whether a token was removed.
        """
        excess = len(self.ids) - limit
        if excess <= 0:
            return False
        order = [
            number for part in (1, 0, None) for number in reversed(range(len(self.ids))) if self.parts[number] is part
        ]
        kept = sorted(set(range(len(self.ids))) - set(order[:excess]))
        self.ids, self.types = [self.ids[number] for number in kept], [self.types[number] for number in kept]
        self.places, self.parts = [self.places[number] for number in kept], [self.parts[number] for number in kept]
        return True

    def word_labels(self, words: Sequence[str], classes: Sequence[int]) -> list[int]:
        """Return the class of each word at its first token, -100 at other tokens. Spaces are between the words."""
        starts = list(accumulate((len(word) + 1 for word in words[:-1]), initial=0))
        labels, found = [IGNORE] * len(self.ids), -1
        for number, ((first, last), part) in enumerate(zip(self.places, self.parts, strict=True)):
            if part is None or first == last:
                continue
            word = bisect_right(starts, last - 1) - 1  # a token may begin with the space before its word
            if word > found and first < starts[word] + len(words[word]):
                labels[number], found = classes[word], word
        return labels

    def answer_labels(self, start: int, end: int) -> list[int]:
        """Return the labels of `dpllm.models.losses.span_loss` for the answer at these characters of the second text.

        Candidates are the tokens of the second text, and the row's first token, which stands for "no answer": it is
        marked if ``start`` is ``end``, or if the answer was cut off.
        """
        labels = [IGNORE if part != 1 else 0 for part in self.parts]
        labels[0] = 0
        inside = [
            number
            for number, ((first, last), part) in enumerate(zip(self.places, self.parts, strict=True))
            if part == 1 and first < end and last > start and first < last
        ]
        whole = bool(inside) and self.places[inside[-1]][1] >= end
        labels[inside[0] if whole else 0] += START
        labels[inside[-1] if whole else 0] += END
        return labels


def aligned(tokenizer: PreTrainedTokenizerBase, *texts: list[str]) -> Iterator[Aligned]:
    """Yield the tokens of each record.

    Args:
        tokenizer: one that knows the places of its tokens.
        texts: the text of each record; or two lists, for records of two texts.

    Raises:
        ConfigError: the tokenizer does not know the places of its tokens.
    """
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not return the positions of tokens in the text, which this data.format "
            "needs. Use a tokenizer of the tokenizers library (tokenizer.json)"
        )
    encoding = tokenizer(*texts, return_offsets_mapping=True, return_token_type_ids=True, verbose=False)
    for number in range(len(texts[0])):
        yield Aligned(
            ids=list(encoding["input_ids"][number]),
            types=list(encoding["token_type_ids"][number]),
            places=[tuple(place) for place in encoding["offset_mapping"][number]],
            parts=list(encoding.sequence_ids(number)),
        )


def answer_of(answers: Any, context: str, number: int) -> tuple[int, int]:
    """Return the first character of the first answer, and the one after its last; (0, 0) if there is no answer.

    Args:
        answers: {text: [...], answer_start: [...]}.
        context: the text that holds the answer.
        number: of the record, for messages.

    Raises:
        DataError: the answer is not at its place in the context, or is not given in this form.
    """
    try:
        texts, starts = list(answers["text"]), [int(start) for start in answers["answer_start"]]
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"record {number}: the answers must have the form {{text: [...], answer_start: [...]}}. Store them in this "
            "form, or set data.columns.answers"
        ) from error
    if not texts and not starts:
        return 0, 0
    if not texts or not starts or not isinstance(texts[0], str) or not texts[0] or starts[0] < 0:
        raise DataError(f"record {number}: an answer needs a text and a start; give both, or two empty lists for none")
    end = starts[0] + len(texts[0])
    if context[starts[0] : end] != texts[0]:
        raise DataError(
            f"record {number}: the answer is not at character {starts[0]} of the context. Correct answer_start, which "
            "counts characters from 0"
        )
    return starts[0], end
