"""Tokenize records into rows of token ids and labels.

Each record becomes one row, or several (`long_records: split`), and never zero, so N is the same before and after.
Every row has the number of its record. A record without any target is an error here, before training; the message gives
the record's number.

Labels follow the convention of transformers: the input ids themselves, -100 at tokens without loss, not shifted.

The class of each word, and the position of an answer, become token labels by the offsets of the tokens.
"""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import datasets
import pyarrow as pa
from datasets.utils import tqdm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dpllm.config import TASKS, ConfigError, DataConfig
from dpllm.config.formats.record_format import Chat, Completion, Question, Text, TextLabel, WordTags
from dpllm.data.chat import SILENT, encode_chats
from dpllm.data.labels import END, IGNORE, START
from dpllm.data.private_tempdir import store
from dpllm.data.records import CHATS, DataError, check_column, check_records, keep_notes
from dpllm.data.values import decoded

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20  # of text encoded together: its tokens, as Python lists, take about ten times as much memory
_PIECE_ROWS = 256

TYPES = "token_type_ids"
RECORD = "record"
"""Column of a tokenized data set: the number of the record from which a row was made."""

Example = tuple[list[int], Any]
"""Input ids of a whole record, and its labels: a list, or a class number for a classifier."""


def tokenize_records(
    records: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    keep: Sequence[str] = (),
    task: str = "causal_lm",
    num_labels: int | None = None,
) -> datasets.Dataset:
    """Return the rows of all records, in the order of the records.

    The format defines what a record holds (`dpllm.config.formats`). A text gets the end-of-sequence token (and a
    beginning token if the tokenizer adds one), with loss on every token. A completion directly follows its prompt, with
    loss on it and the end-of-sequence token. A chat is rendered by the template, with loss on the assistant's turns
    (`dpllm.data.chat`). Words are joined by spaces, with the class of a word at its first token. A question and its
    context are encoded as a pair; the labels mark the answer (`dpllm.models.losses.span_loss`), or the row's first
    token if there is no answer or it was cut off.

    A record longer than `max_length` is truncated at its end. The part before the first target (a prompt) is shortened
    from its beginning, down to half of the row, so that targets always remain. With `long_records: split`, the record
    becomes consecutive rows instead; each starts with the last token of the previous row, so every target is predicted
    once. Rows of a split record without a target (from a long prompt) are dropped, since they have no loss.

    Args:
        records: one record per row.
        tokenizer: as loaded by `dpllm.models.load.load_tokenizer`.
        config: format, columns, `max_length`, `long_records`.
        keep: columns of `records` that are copied to every row, such as the user's id.
        task: one of `dpllm.config.TASKS`; for "seq2seq_lm" the labels are only the completion.
        num_labels: number of classes, or of values; classes outside 0..num_labels-1 are refused. None: only negative
            classes are refused.

    Returns:
        Columns `input_ids`, `labels`, `record`, and those kept; for questions `token_type_ids` too, if the tokenizer
        has them. `tokenization_info` counts the records that were cut.

    Raises:
        ConfigError: format, task and `long_records` cannot be combined, or `max_length` exceeds the tokenizer's.
        DataError: `check_records` refuses the records, a record has no target, or a label is not a class.
    """
    _check_request(tokenizer, config, task)
    check_records(records, config, "records")
    for name in keep:
        check_column(records.column_names, name, "records")
        if name in ("input_ids", "labels", TYPES, RECORD):
            raise ConfigError(f"column '{name}' cannot be kept: tokenized rows have a column of that name. Rename it")
    maker = _RowMaker(tokenizer, config, task, num_labels)

    with_types = config.form.holds is Question and TYPES in tokenizer.model_input_names
    schema = _features(records, keep, task, with_types).arrow_schema

    def rows_of(piece: list[dict[str, Any]], record_numbers: list[int]) -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {name: [] for name in schema.names}
        examples = maker.encode(piece, record_numbers)
        for record, number, example in zip(piece, record_numbers, examples, strict=True):
            for ids, labels in maker.rows(example, number):
                out["input_ids"].append(ids)
                out["labels"].append(labels)
                if TYPES in out:
                    out[TYPES].append(maker.types[number])
                out[RECORD].append(number)
                for name in keep:
                    out[name].append(record[name])
        return out

    tables = (
        pa.Table.from_pydict(rows_of(_records_in(piece, records.features), numbers), schema=schema)
        for piece, numbers in _pieces(records)
    )
    rows = store(tables)
    assert rows is not None, "a record has at least one row"
    info = {
        "records": len(records),
        "rows": len(rows),
        "records_truncated": maker.counts["truncated"],
        "records_split": maker.counts["split"],
        "max_length": config.max_length,
        **({SILENT: maker.counts[SILENT]} if maker.form.holds is Chat else {}),
    }
    keep_notes(records, rows, tokenization=info, **({CHATS: "turns"} if maker.form.holds is Chat else {}))
    logger.info("tokenized %s", info)
    return rows


def _pieces(records: datasets.Dataset) -> Iterator[tuple[pa.Table, list[int]]]:
    """Yield the records and their numbers, at most `_PIECE_BYTES` together: token lists take many times their text."""
    start = 0
    columns = records.with_format("arrow")
    for table in tqdm(columns.iter(batch_size=_PIECE_ROWS), "tokenizing", -(-len(records) // _PIECE_ROWS)):
        begin = 0
        while begin < len(table):
            count = len(table) - begin
            while count > 1 and table.slice(begin, count).nbytes > _PIECE_BYTES:
                count //= 2
            yield table.slice(begin, count), list(range(start, start + count))
            begin, start = begin + count, start + count


def _records_in(piece: pa.Table, features: datasets.Features) -> list[dict[str, Any]]:
    columns = decoded(piece.to_pydict(), features)
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _features(records: datasets.Dataset, keep: Sequence[str], task: str, with_types: bool) -> datasets.Features:
    integer = datasets.Value("int32")
    labels = {"class": integer, "numbers": datasets.List(datasets.Value("float32"))}
    return datasets.Features(
        {
            "input_ids": datasets.List(integer),
            "labels": labels.get(TASKS[task].labels, datasets.List(integer)),
            **({TYPES: datasets.List(integer)} if with_types else {}),
            RECORD: datasets.Value("int64"),
            **{name: records.features[name] for name in keep},
        }
    )


def tokenization_info(rows: datasets.Dataset) -> dict[str, int]:
    """Return the counts of `tokenize_records`: records, rows, records_truncated, records_split, max_length.

    Those of chats also have the number of an assistant's turns that have no loss (`dpllm.data.chat.SILENT`).
    The counts are properties of the private text; ε does not cover them when they are written out.

    Raises:
        DataError: the data set was not made by `tokenize_records`.
    """
    try:
        return dict(json.loads(rows.info.description)["tokenization"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "this data set was not made by tokenize_records, so it has no counts: tokenize the records with it"
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on *public* text; it can encode any text.

    It adds ``<s>`` before a text; ``</s>`` ends a text and ``<pad>`` fills rows.

    Guarantee: none. A vocabulary reveals the words of its text, so never pass private text to this function.

    Args:
        texts: the public text.
        vocab_size: the most entries (fewer if the text is too short for more).
        max_length: the most tokens of a row, for `model_max_length`.

    References:
        Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words with Subword Units (ACL 2016).

    >>> tokenizer = train_tokenizer(["a rose is a rose is a rose"], vocab_size=270, max_length=32)
    >>> tokenizer.decode(tokenizer("a rose €").input_ids)
    '<s>a rose €'
    """
    special = ["<pad>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", special.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=max_length,
    )


def _check_request(tokenizer: PreTrainedTokenizerBase, config: DataConfig, task: str) -> None:
    form = config.form
    if task not in form.tasks:
        raise ConfigError(
            f"data.format={form.name!r} cannot be combined with model.task={task!r}; it requires model.task "
            f"{' or '.join(form.tasks)}"
        )
    if None not in form.trainers:
        raise ConfigError(
            f"data.format={form.name!r} has {form.about} in a record, for train.trainer={form.trainers[0]}: set it"
        )
    if config.long_records == "split" and task != "causal_lm":
        raise ConfigError(f"long_records='split' is for causal_lm; set long_records='truncate' for {task}")
    if config.max_length > tokenizer.model_max_length:
        raise ConfigError(
            f"data.max_length={config.max_length} exceeds the {tokenizer.model_max_length} tokens that the model's "
            "tokenizer allows. Lower it"
        )


class _RowMaker:
    """Maker of rows: encodes records, cuts them into rows, and counts the cuts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, task: str, num_labels: int | None
    ) -> None:
        self.tokenizer, self.config, self.task, self.num_labels = tokenizer, config, task, num_labels
        self.form = config.form
        self.counts: Counter[str] = Counter()
        self.types: dict[int, list[int]] = {}  # of the rows of records of two texts
        # The tokens that the tokenizer adds around every text, found on a text that is not a special token.
        around = self._ids(["a"])[0]
        special = set(tokenizer.all_special_ids)
        self.head = around[:1] if around[0] in special else []
        self.tail = around[-1:] if around[-1] in special and len(around) > 1 else []
        self.eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def _ids(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        encoding = self.tokenizer(
            texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )
        return encoding["input_ids"]

    def encode(self, records: list[dict[str, Any]], numbers: list[int]) -> list[Example]:
        """Return one whole example per record."""
        encoders: dict[type, Callable[[list[Any], list[int]], list[Example]]] = {
            Text: self._texts,
            Completion: self._completions,
            Chat: self._chats,
            TextLabel: self._labelled,
            WordTags: self._tagged,
            Question: self._answered,
        }
        return encoders[self.form.holds]([self.form.content(record) for record in records], numbers)

    def _texts(self, texts: list[Text], numbers: list[int]) -> list[Example]:
        del numbers
        ending = [] if self.tail else self.eos
        whole = [ids + ending for ids in self._ids([one.text for one in texts])]
        return [(ids, ids) for ids in whole]

    def _completions(self, pairs: list[Completion], numbers: list[int]) -> list[Example]:
        del numbers
        prompts, completions = self._ids([one.prompt for one in pairs]), [one.completion for one in pairs]
        if self.task == "seq2seq_lm":
            return list(zip(prompts, self._ids(completions), strict=True))
        prompts = [ids[: len(ids) - len(self.tail)] for ids in prompts]
        ends = [ids + self.eos for ids in self._ids(completions, add_special_tokens=False)]
        return [(p + c, [IGNORE] * len(p) + c) for p, c in zip(prompts, ends, strict=True)]

    def _chats(self, chats: list[Chat], numbers: list[int]) -> list[Example]:
        messages, beside = [one.messages for one in chats], [one.beside for one in chats]
        options = self.config.chat_template_kwargs
        return encode_chats(messages, self.tokenizer, numbers, beside, options, self.counts)

    def _labelled(self, pairs: list[TextLabel], numbers: list[int]) -> list[Example]:
        labels = [self._label(one.label, number) for one, number in zip(pairs, numbers, strict=True)]
        return list(zip(self._ids([one.text for one in pairs]), labels, strict=True))

    def _tagged(self, records: list[WordTags], numbers: list[int]) -> list[Example]:
        examples: list[Example] = []
        texts = [" ".join(self._words(own.words, number)) for own, number in zip(records, numbers, strict=True)]
        for tokens, own, number in zip(aligned(self.tokenizer, texts), records, numbers, strict=True):
            if len(own.words) != len(own.tags):
                raise DataError(
                    f"record {number} has {len(own.tags)} tags for {len(own.words)} words, but needs one tag per word"
                )
            classes = [self._class(tag, number) for tag in own.tags]
            self.counts["truncated"] += tokens.cut(self.config.max_length)
            examples.append((tokens.ids, tokens.word_labels(own.words, classes)))
        return examples

    def _words(self, words: list[Any], number: int) -> list[str]:
        if not all(isinstance(word, str) for word in words):
            raise DataError(f"record {number}: a word is missing or is not text: {_REMEDY}")
        return words

    def _answered(self, questions: list[Question], numbers: list[int]) -> list[Example]:
        examples: list[Example] = []
        self.types = {}
        pairs = aligned(self.tokenizer, [one.question for one in questions], [one.context for one in questions])
        for tokens, one, number in zip(pairs, questions, numbers, strict=True):
            place = answer_of(one.answers, one.context, number)
            self.counts["truncated"] += tokens.cut(self.config.max_length)
            self.types[number] = tokens.types
            examples.append((tokens.ids, tokens.answer_labels(*place) if tokens.ids else []))
        return examples

    def rows(self, example: Example, number: int) -> Iterator[Example]:
        """Yield the rows of a record: at least one, and each with a target."""
        ids, labels = example
        limit = self.config.max_length
        if self.task != "causal_lm":
            if len(ids) > limit or (self.task == "seq2seq_lm" and len(labels) > limit):
                self.counts["truncated"] += 1
                ids, labels = self._cut(ids), self._cut(labels) if self.task == "seq2seq_lm" else labels
            per_token = TASKS[self.task].label_per_token
            if not ids or labels == [] or (per_token and all(label == IGNORE for label in labels)):
                raise DataError(f"record {number} is empty, so there is nothing to learn from it: {_REMEDY}")
            yield ids, labels
            return
        if not _has_target(labels):
            raise DataError(
                f"record {number}: all labels are masked or there is nothing to predict (it has {len(ids)} tokens). A "
                f"text needs two tokens, and a chat needs an answer by the assistant: {_REMEDY}"
            )
        if len(ids) <= limit:
            yield ids, labels
        elif self.config.long_records == "split":
            self.counts["split"] += 1
            for start in range(0, len(ids) - 1, limit - 1):
                row = labels[start : start + limit]
                if _has_target(row):
                    yield ids[start : start + limit], ([IGNORE] if start else row[:1]) + row[1:]
        else:
            self.counts["truncated"] += 1
            yield self._truncate(ids, labels)

    def _truncate(self, ids: list[int], labels: list[int]) -> Example:
        limit = self.config.max_length
        first = next(position for position, label in enumerate(labels) if label != IGNORE)
        kept = min(first, max(limit - (len(ids) - first), limit // 2))
        head = self.head if kept < first and kept > len(self.head) and ids[:1] == self.head else []
        start = first - kept + len(head)
        return (head + ids[start:])[:limit], ([IGNORE] * len(head) + labels[start:])[:limit]

    def _cut(self, ids: list[int]) -> list[int]:
        """Cut to `max_length` and keep the tokenizer's closing token."""
        limit = self.config.max_length
        return ids if len(ids) <= limit else ids[: limit - len(self.tail)] + self.tail

    def _label(self, label: Any, number: int) -> int | list[float]:
        """Return a class, or a number for each output: 1 for each class of the record, or the values to predict."""
        if self.task == "sequence_classification":
            return self._class(label, number)
        if self.num_labels is None:
            raise ConfigError(f"model.task={self.task!r} needs the number of outputs: set model.num_labels")
        several = label if isinstance(label, list) else [label]
        if self.task == "regression":
            return self._values(several, number, self.num_labels)
        of_record = {self._class(one, number) for one in several}
        return [float(one in of_record) for one in range(self.num_labels)]

    def _values(self, values: list[Any], number: int, count: int) -> list[float]:
        if len(values) != count or not all(_is_number(value) for value in values):
            raise DataError(
                f"record {number}: it needs {count} finite number(s) as targets (model.num_labels), but has "
                f"{len(values)} value(s). Correct the column {self.form.labels!r}"
            )
        return [float(value) for value in values]

    def _class(self, label: Any, number: int) -> int:
        names = self.config.class_names
        if isinstance(label, str) and names is not None and label in names:
            return names.index(label)
        if isinstance(label, float) and label.is_integer():  # pandas writes 1 as 1.0 if a value is missing
            label = int(label)
        if not isinstance(label, int):
            need = f"is {type(label).__name__}, not a whole number" if names is None else "is not one of the names"
            raise DataError(
                f"record {number}: the label {need}. Write the classes as 0, 1, 2, ..., or list all their names, in "
                "order, in data.class_names"
            )
        if label < 0 or (self.num_labels is not None and label >= self.num_labels):
            bound = "at least 0" if self.num_labels is None else f"one of 0..{self.num_labels - 1} (model.num_labels)"
            raise DataError(f"record {number}: the label must be {bound}. Correct the label or model.num_labels")
        return int(label)


_REMEDY = "fill it in, or remove it from the data before this run"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _has_target(labels: list[int]) -> bool:
    """Return whether a token is predicted; the first of a row never is, because no token precedes it."""
    return any(label != IGNORE for label in labels[1:])


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
