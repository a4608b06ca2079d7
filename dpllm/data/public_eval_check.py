"""The number of evaluation rows that are rows of the training data, for rows that are declared public.

Place in the flow: before the run. A schedule may follow results on public rows. On rows of the private data it would
follow exact losses, which ε does not cover.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import ConcatDataset, Subset

from dpllm.data.lengths import list_columns
from dpllm.data.records import DataError

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
    """Return the tokens of a row; those of both answers if it is a pair (`dpllm.data.preferences`)."""
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
