"""A hash of records, by which a later reading is compared with that of the training.

Place in the flow: after the records are read. It is of private text, so it is never written as it is: the ledger gets
its HMAC under a key that is not released (`dpllm.privacy.same_rows`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import datasets

_TOGETHER = 1000
"""Records that are hashed together. Another number gives another hash."""


def hash_of_records(records: datasets.Dataset, columns: Sequence[str]) -> str:
    """Return a hash of some columns of all records, in their order.

    Args:
        records: the records.
        columns: their names; those that the records lack are left out.
    """
    digest = hashlib.sha256()
    present = [name for name in dict.fromkeys(columns) if name in records.column_names]
    for table in records.select_columns(present).with_format("arrow").iter(batch_size=_TOGETHER):
        digest.update(json.dumps([table[name].to_pylist() for name in present], default=str).encode())
    return digest.hexdigest()
