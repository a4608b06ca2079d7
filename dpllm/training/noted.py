"""Notes in the ledger about the units and the data of a run.

Place in the flow: beside run; after the data are read and before the first step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dpllm.config import PrivacyUnit
from dpllm.data.records import DOCUMENTS, may_be_documents, record_words, sources_of
from dpllm.data.tokenization import RECORD
from dpllm.data.units import ONE_ROW, UnitIndex
from dpllm.privacy.ledger import Ledger
from dpllm.report.definition import RECORDS_ARE, UNITS_MADE_OF
from dpllm.training.shared_ledger import SharedLedger

_BLOCKS, _FEWEST_BLOCKS = 0.95, 20  # this share, of at least this many rows, has the largest length
_MOST_NAMES = 20  # of files, in the report


def note_users(ledger: Ledger | SharedLedger, units: UnitIndex, column: str | None) -> None:
    """Note in the ledger the reasons to doubt that a unit is all that one person gave.

    Args:
        ledger: ledger of the run that begins.
        units: users, or rows of users that are drawn separately.
        column: column of the ids; None: a unit is a record.
    """
    for doubt in units.doubts(column):
        ledger.append_open_point(doubt)


def note_units(ledger: Ledger | SharedLedger, units: UnitIndex, lengths: np.ndarray | None = None) -> None:
    """Note in the ledger how the units were made, and a doubt if rows look like blocks cut from joined documents.

    Args:
        ledger: ledger of the run that begins.
        units: units of the rows.
        lengths: (num_rows,) tokens of every row. None: lengths are not checked.
    """
    if units.made_of is not None:
        ledger.append_fact(UNITS_MADE_OF, units.made_of)
    if lengths is None or units.made_of != ONE_ROW or len(lengths) < _FEWEST_BLOCKS:
        return
    longest = int(lengths.max())
    if longest > 1 and float((lengths == longest).mean()) >= _BLOCKS:
        ledger.append_open_point(
            f"Nearly all rows have the same {longest} tokens, and no column '{RECORD}' says which record they are "
            "from. If documents were joined and cut into blocks, a document is spread over several units and is "
            f"protected less than one: give each row the number of its record in a column '{RECORD}' "
            "(dpllm.data.rows.tokenize_records does it), or confirm that each row is a whole record."
        )


def note_data(ledger: Ledger | SharedLedger, dataset: Any, units: UnitIndex, privacy: PrivacyUnit) -> None:
    """Note in the ledger the files of the rows, and the reasons for people to check them before a release.

    Args:
        ledger: ledger of the run that begins.
        dataset: the rows, with the notes made when their records were loaded.
        units: units of the rows.
        privacy: definition of a unit. At user level the numbers of records are left out: only N is public.
    """
    words = record_words(dataset)
    if words is not None:
        ledger.append_fact(RECORDS_ARE, words)
    if may_be_documents(dataset):
        ledger.append_open_point(DOCUMENTS)
    files = sources_of(dataset)
    counted = privacy.unit == "sequence"
    if len(files) > _MOST_NAMES:
        ledger.append_fact("files of training records", f"{len(files)} files")
    else:
        for name, count in files.items():
            ledger.append_fact("files of training records", f"{name} ({count} records)" if counted else name)
    note_users(ledger, units, privacy.unit_column)
