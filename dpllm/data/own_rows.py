"""The number of evaluation rows that are rows of the training data, for rows that are declared public.

Place in the flow: before the run. A schedule may follow results on public rows. On rows of the private data it would
follow exact losses, which ε does not cover.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow.compute as pc

from dpllm.data.lengths import list_columns
from dpllm.data.records import DataError

_ROWS = 4096  # read together


def refuse_own_rows(evaluation: Any, training: Any) -> None:
    """Make sure that evaluation rows that are declared public are not the private rows.

    A few equal rows are allowed: a short public text may also be in the private data. Rows that are computed as they
    are read, and rows without ``input_ids``, are recognised only where the data set is the same object.

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
        shared = len(dataset) if dataset is training else _num_shared(dataset, training)
        if shared and 2 * shared > len(dataset):
            raise DataError(
                f"eval_is_public=True declares eval_dataset{f'[{name!r}]' if several else ''} public, and {shared} of "
                f"its {len(dataset)} rows are rows of train_dataset, which is private. Schedules would follow exact "
                "losses of private rows. Evaluate on other rows, or leave eval_is_public out"
            )


def _num_shared(dataset: Any, training: Any) -> int:
    """Return the number of rows of a data set whose input is that of a training row; 0 if they cannot be compared."""
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
            values = pc.fill_null(lists.values, -1).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
            ends = lists.offsets.to_numpy()
            for begin, end in itertools.pairwise(ends):
                yield values[begin:end].tobytes()
    elif isinstance(dataset, list | tuple):
        for row in dataset:
            if isinstance(row, Mapping) and row.get("input_ids") is not None:
                yield np.asarray(row["input_ids"], dtype=np.int64).tobytes()
