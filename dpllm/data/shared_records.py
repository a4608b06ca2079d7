"""Refusal of public text or rows that are private: text to train on, prompts, and all public parts of a recipe.

Place in the flow: after the private records are read, before anything is charged. A record in public training text
would be learnt without noise, and one in a prompt or context is published word for word; ε covers neither. What counts
as the same text is decided by `dpllm.data.content_index`.

A schedule may follow results on evaluation rows that are declared public (`refuse_own_rows`). On rows of the private
data it would follow exact losses, which ε does not cover.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import ConcatDataset, Subset

from dpllm.config import DataConfig, HeldOut, PrivacyUnit, Recipe
from dpllm.data.content_index import FEWEST_WORDS
from dpllm.data.lengths import list_columns
from dpllm.data.local_files import find_files
from dpllm.data.records import (
    DataError,
    index_of,
    load_train_and_eval,
    text_columns,
    unit_column_of,
)

PUBLIC_TRAINING = ("public_pretrain.data.path", "public_pretrain.max_shared_records")
"""Keys of a recipe: the public text, and the largest number of private records that it may share."""


def shared_records(
    private: datasets.Dataset,
    private_data: DataConfig,
    public: datasets.Dataset,
    public_data: DataConfig,
    privacy: PrivacyUnit | None = None,
) -> int:
    """Return the number of private records that occur in public text (`dpllm.data.content_index`).

    The number depends on the private records.

    Args:
        private: the private records.
        private_data: of their form.
        public: the public records.
        public_data: of their form.
        privacy: definition of a unit. None: a unit is one record.
    """
    index = index_of(private, private_data, unit_column_of(privacy))
    return int(index.found_in(public, text_columns(public_data)).sum())


def refuse_shared_records(
    private: datasets.Dataset,
    private_data: DataConfig,
    public: datasets.Dataset,
    public_data: DataConfig,
    allowed: int = 0,
    keys: tuple[str, str] = PUBLIC_TRAINING,
    privacy: PrivacyUnit | None = None,
) -> int:
    """Make sure that public text does not contain the private records (`shared_records`).

    The user may declare a bound on the number of shared records, which is a public constant.

    Args:
        private: the private records.
        private_data: the configuration with which they are read.
        public: the public records.
        public_data: the configuration with which they are read.
        allowed: the declared largest number of shared records (`shared_records_point`).
        keys: of the recipe, for the message: the public text, and the declared number.
        privacy: definition of a unit. None: a unit is one record.

    Returns:
        The number of shared private records.

    Raises:
        DataError: more than ``allowed`` are shared; the message gives the number, never the text.
    """
    shared = shared_records(private, private_data, public, public_data, privacy)
    if shared > allowed:
        raise DataError(
            f"{keys[0]}={public_data.path} shares {shared} of {len(private)} records with "
            f"data.path={private_data.path}: training on them without noise would reveal them, and {allowed} are "
            f"declared ({keys[1]}). Take the private records out of the public text, or, if "
            f"these texts are public (greetings), declare {keys[1]}={shared}; the "
            "report then says that epsilon does not cover them"
        )
    return shared


def refuse_shared_held_out(
    held_out: datasets.Dataset | None,
    data: DataConfig,
    public: datasets.Dataset,
    public_data: DataConfig,
    allowed: int = 0,
    keys: tuple[str, str] = PUBLIC_TRAINING,
) -> None:
    """Make sure that public text does not contain the held-out records, unless these are public; N does not count them.

    Args:
        held_out: the held-out records; None: there are none.
        data: the section that names them.
        public: as for `refuse_shared_records`, as are the other arguments.
        public_data: the configuration with which they are read.
        allowed: the declared largest number of shared records.
        keys: of the recipe.

    Raises:
        DataError: more than ``allowed`` are shared.
    """
    if held_out is not None and not data.eval.public:
        own = dataclasses.replace(
            data,
            path=data.eval.path or data.path,
            eval=HeldOut(),
        )
        refuse_shared_records(held_out, own, public, public_data, allowed, keys)


def shared_records_point(allowed: int, public_data: DataConfig, keys: tuple[str, str] = PUBLIC_TRAINING) -> list[str]:
    """Return the open point of a declared overlap of public text and private records; an empty list without one.

    It names the declared bound, which is public, not the number found, which depends on the private data.
    """
    if allowed == 0:
        return []
    return [
        f"Up to {allowed} of the private records may occur in the public text {public_data.path} "
        f"({keys[1]}), from which they are learnt without noise: epsilon does not cover these "
        "records. Confirm that their texts are public (greetings, boilerplate), or take them out of the public text."
    ]


def refuse_private_texts(
    texts: Mapping[str, str], records: datasets.Dataset, data: DataConfig, privacy: PrivacyUnit | None = None
) -> None:
    """Make sure that no public text, such as a prompt, holds a private record of `FEWEST_WORDS` words or more.

    Texts that many units have, such as a common system prompt, may occur.

    Args:
        texts: key or option -> its text.
        records: the private records.
        data: the configuration with which they are read.
        privacy: definition of a unit. None: a unit is one record.

    Raises:
        DataError: a text holds one; the message names its key, and neither the text nor the record.
    """
    long = {key: text for key, text in texts.items() if _is_long(text)}
    if not long or not (index := index_of(records, data, unit_column_of(privacy))).occurs_in(*long.values()):
        return
    for key, text in long.items():
        if index.occurs_in(text):
            raise DataError(
                f"{key} holds a record of data.path={data.path}, or most of one: it is used without noise and may be "
                "published word for word, and epsilon does not cover that. Write a text of your own there"
            )


def refuse_private_parts(recipe: Any, records: datasets.Dataset, held_out: datasets.Dataset | None = None) -> None:
    """Make sure that no text in a recipe holds a private record: prompts, contexts, questions, notes of the release.

    Args:
        recipe: a `dpllm.config.Recipe` or `dpllm.config.query_recipe.QueryRecipe`.
        records: the private records, as its section ``data`` reads them.
        held_out: those held out, which count unless they are declared public.

    Raises:
        DataError: a value holds one; the message names its key.
    """
    values = dataclasses.asdict(recipe)
    if "method" in values:
        values[values.pop("method")] = values.pop("options")
    texts = dict(_strings(values, ""))
    refuse_private_texts(texts, records, recipe.data, recipe.privacy)
    if held_out is not None and not recipe.data.eval.public:
        refuse_private_texts(texts, held_out, recipe.data)


def refuse_private_prompts(recipe: Recipe, prompts: Mapping[str, str]) -> bool:
    """Make sure that no prompt for a released model holds a private record of its run, if these are at hand.

    Args:
        recipe: of the run.
        prompts: option -> its text.

    Returns:
        Whether the records were at hand, or no prompt is long enough to hold one.

    Raises:
        DataError: a prompt holds one; the message names its option.
    """
    data = recipe.data
    if not any(map(_is_long, prompts.values())):
        return True
    try:
        if not data.path.startswith("builtin:") and not find_files(data.path):
            return False  # it would be downloaded
        records, held_out = load_train_and_eval(data, recipe.privacy)
    except ValueError:  # the records are elsewhere, or changed
        return False
    refuse_private_texts(prompts, records, data, recipe.privacy)
    if held_out is not None and not data.eval.public:
        refuse_private_texts(prompts, held_out, data)
    return True


def _is_long(text: str) -> bool:
    return (len(text.split()) if text.isascii() else len(text)) >= FEWEST_WORDS  # other scripts may have no spaces


def _strings(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield all texts in nested values, with their keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence):
        for number, inner in enumerate(value):
            yield from _strings(inner, f"{key}[{number}]")


_ROWS = 4096  # read together


def refuse_own_rows(evaluation: Any, training: Any) -> None:
    """Make sure that evaluation rows that are declared public are not the private rows.

    A few equal rows are allowed: a short public text may also be in the private data. Rows that are computed as they
    are read, and rows without ``input_ids``, are recognised only where the data set is the same object, or a part of it
    (`torch.utils.data.Subset`), or holds it (``ConcatDataset``).

    Args:
        evaluation: the rows, or a dictionary of several data sets. None: there are none.
        training: the private rows.

    Raises:
        DataError: a data set is the training data, or more than half of its rows are rows of it.
    """
    several = isinstance(evaluation, Mapping)
    for name, dataset in evaluation.items() if several else [("", evaluation)]:
        if dataset is None:
            continue
        shared = _num_shared(dataset, training)
        if shared and 2 * shared > len(dataset):
            raise DataError(
                f"eval_is_public=True declares eval_dataset{f'[{name!r}]' if several else ''} public, and {shared} of "
                f"its {len(dataset)} rows are rows of train_dataset, which is private. Schedules would follow exact "
                "losses of private rows. Evaluate on other rows, or leave eval_is_public out"
            )


def hash_of_rows(dataset: Any) -> str:
    """Return a hash of the inputs of rows that are stored, to tell whether they are those that were compared.

    Args:
        dataset: rows, or a dictionary of several data sets; rows that are computed as they are read do not count.
    """
    parts = dataset.values() if isinstance(dataset, Mapping) else getattr(dataset, "datasets", None)
    if parts is not None:
        return " ".join(map(hash_of_rows, parts))
    digest = hashlib.sha256()
    for ids in _inputs(dataset):
        digest.update(len(ids).to_bytes(8, "little") + ids)
    return digest.hexdigest()


def _num_shared(dataset: Any, training: Any) -> int:
    """Return the number of rows of a data set whose input is that of a training row; 0 if they cannot be compared."""
    if dataset is training:
        return len(dataset)
    if isinstance(dataset, ConcatDataset):
        return sum(_num_shared(part, training) for part in dataset.datasets)
    if isinstance(dataset, Subset) and dataset.dataset is training:
        return len(dataset)
    if isinstance(dataset, Subset) and isinstance(training, Subset) and dataset.dataset is training.dataset:
        same = set(training.indices)
        return sum(place in same for place in dataset.indices)
    asked = list(_inputs(dataset))
    known = set(asked)
    found = {ids for ids in _inputs(training) if ids in known} if known else set()
    return sum(ids in found for ids in asked)


def _inputs(dataset: Any) -> Iterator[bytes]:
    """Yield the input of each row, as bytes; nothing if rows are computed as they are read."""
    columns = list_columns(dataset, None)
    if columns is not None:
        for table in columns.iter(batch_size=_ROWS):
            lists = table["input_ids"].combine_chunks()
            values = pc.fill_null(lists.values.cast(pa.int64(), safe=False), -1).to_numpy(zero_copy_only=False)
            ends = lists.offsets.to_numpy()
            for begin, end in itertools.pairwise(ends):
                yield values[begin:end].tobytes()
    else:
        for row in _stored_rows(dataset):
            lists = _lists_of(row) if isinstance(row, Mapping) else []
            with contextlib.suppress(ValueError, TypeError):  # no numbers, which no training row has
                if lists:
                    yield (
                        str([len(ids) for ids in lists[:-1]])
                        .encode()
                        .join(np.asarray(ids, dtype=np.int64).tobytes() for ids in lists)
                    )


def _lists_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the tokens of a row; those of both answers if it is a pair (`dpllm.data.examples`)."""
    names = ["input_ids"] if "input_ids" in row else sorted(name for name in row if name.endswith("_input_ids"))
    return [row[name] for name in names if row[name] is not None]


def _stored_rows(dataset: Any) -> Iterator[Any]:
    """Yield the rows that are stored as they are, of a list, a data set of `datasets` or a part of either."""
    if isinstance(dataset, Subset):
        if _is_stored(dataset.dataset):
            yield from (dataset.dataset[place] for place in dataset.indices)
    elif _is_stored(dataset):
        yield from dataset


def _is_stored(dataset: Any) -> bool:
    form = getattr(dataset, "format", None)  # of `datasets`
    return isinstance(dataset, list | tuple) or (isinstance(form, Mapping) and form.get("type") != "custom")
