"""Notes in the ledger about the units and the data of a run.

Place in the flow: beside run; after the data are read and before the first step.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dpllm.config import PrivacyUnit
from dpllm.config.files import write_file
from dpllm.config.tasks import labels_of
from dpllm.data.columns import ids_in, names_in, people_in, values_in
from dpllm.data.records import DOCUMENTS, may_be_documents, record_words, sources_of
from dpllm.data.tokenization import RECORD
from dpllm.data.units import ONE_ROW, UnitIndex
from dpllm.engines.processes import Processes
from dpllm.models.model_argument import names_of_classes
from dpllm.models.tasks import task_of
from dpllm.privacy.ledger import Ledger
from dpllm.privacy.plan import PrivacyPlan
from dpllm.privacy.private_folder import DATA_FILES_FILE, private_path
from dpllm.report.definition import CLASS_NAMES, DECLARED_NAMES, OTHER_NAMES, PREPROCESSING, RECORDS_ARE, UNITS_MADE_OF
from dpllm.report.private_strings import FILE, ID, PrivateStrings
from dpllm.training.shared_ledger import SharedLedger

ONE_BY_ONE = (
    "The column '{column}' names people, and its values repeat, but a unit of privacy is one record (unit: sequence). "
    "Records of one person are protected one by one, and all of a person's together are protected less than this ε "
    "says. Train with data.columns.unit: {column}, or confirm that protection of single records is meant."
)
"""The open point of records beside a column of people."""
NAMES = "the names of the classes in config.json, "
CLASSES = "the number of the classes, class weights, or statistics of the labels"
OWN_TOKENIZER = "the vocabulary of the tokenizer, which is not the base model's"
_KNOWN_MODULES = ("dpllm", "transformers", "trl", "torch", "builtins")
_SCORE = re.compile(r"score|reward|rating|margin", re.IGNORECASE)
_BLOCKS, _FEWEST_BLOCKS = 0.95, 20  # this share, of at least this many rows, has the largest length


def note_users(ledger: Ledger | SharedLedger, units: UnitIndex, column: str | None) -> None:
    """Note in the ledger the reasons to doubt that a unit is all that one person gave.

    Args:
        ledger: ledger of the run that begins.
        units: users, or rows of users that are drawn separately.
        column: column of the ids; None: a unit is a record.
    """
    for doubt in units.doubts(column):
        ledger.append_open_point(doubt)


def note_units(
    ledger: Ledger | SharedLedger, units: UnitIndex, lengths: np.ndarray | None = None, dataset: Any = None
) -> None:
    """Note in the ledger how the units were made, and a doubt if rows look like blocks cut from joined documents.

    Args:
        ledger: ledger of the run that begins.
        units: units of the rows.
        lengths: (num_rows,) tokens of every row. None: lengths are not checked.
        dataset: the rows; padding that their ``attention_mask`` names is not counted.
    """
    if units.made_of is not None:
        ledger.append_fact(UNITS_MADE_OF, units.made_of)
    if lengths is None or units.made_of != ONE_ROW or len(lengths) < _FEWEST_BLOCKS:
        return
    if _all_as_long(lengths) and "attention_mask" in names_in(dataset):
        lengths = np.array([np.count_nonzero(mask) for mask in values_in(dataset, "attention_mask")])
    if _all_as_long(lengths):
        ledger.append_open_point(
            f"Nearly all rows have the same number of tokens, and no column '{RECORD}' says which record they are "
            "from. If documents were joined and cut into blocks, a document is spread over several units and is "
            f"protected less than one: give each row the number of its record in a column '{RECORD}' "
            "(dpllm.data.rows.tokenize_records does it), or confirm that each row is a whole record."
        )


def _all_as_long(lengths: np.ndarray) -> bool:
    longest = int(lengths.max())
    return longest > 1 and float((lengths == longest).mean()) >= _BLOCKS


def note_preprocessing(ledger: Ledger | SharedLedger, model: Any, declared: bool, others: Iterable[str] = ()) -> None:
    """Note what of a run could have been computed from all records before it, which no program can see.

    Args:
        ledger: ledger of the run that begins.
        model: to train; a classifier or a regression has names, weights or scales from somewhere.
        declared: whether the names of the classes were declared (``data.class_names``).
        others: what else there is (`own_parts`, `tokens_of_others`).
    """
    task = task_of(model)
    if labels_of(task) in ("class", "tokens") or task == "multi_label_classification":
        named = declared or names_of_classes(model) is not None
        if named:
            ledger.append_fact(CLASS_NAMES, DECLARED_NAMES if declared else OTHER_NAMES)
        ledger.append_fact(PREPROCESSING, CLASSES if declared or not named else NAMES + CLASSES)
    elif task == "regression":
        ledger.append_fact(PREPROCESSING, "the mean, the scale or the range of the targets")
    for one in others:
        ledger.append_fact(PREPROCESSING, one)


def own_parts(**parts: Any) -> list[str]:
    """Return the user's own loss or collator, in which numbers may be, in words.

    Args:
        parts: by name; None: not given.
    """
    found = []
    for name, part in parts.items():
        inner = part.func if isinstance(part, functools.partial) else part
        module = str(getattr(inner, "__module__", None) or type(inner).__module__).partition(".")[0]
        if part is not None and module not in _KNOWN_MODULES:
            words = getattr(inner, "__qualname__", type(inner).__qualname__)
            found.append(f"numbers inside of the {name} {words}")
    return found


def scores_in(dataset: Any) -> list[str]:
    """Return the columns of scores by which pairs of answers may have been chosen, in words."""
    names = [name for name in names_in(dataset) if _SCORE.search(name)]
    return [f"scale and thresholds of the rewards or scores in the column '{name}'" for name in names]


def tokens_of_others(tokenizer: Any, model: Any) -> list[str]:
    """Return the tokens of a tokenizer that are not those of the base model, in words.

    Args:
        tokenizer: of the run. Anything else than a tokenizer has none.
        model: the base model, with the name under which it was loaded.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return []
    base = getattr(getattr(model, "config", None), "_name_or_path", None) or tokenizer.name_or_path
    try:
        known = (
            AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=False).get_vocab()
            if base
            else {}
        )
    except Exception:  # any: no tokenizer is beside the weights, or it needs code
        known = {}
    own = tokenizer.get_vocab()
    if not known and base and base == tokenizer.name_or_path:
        return []
    if own.items() <= known.items():
        return []
    return ["the tokens that were added to the tokenizer" if known and known.items() <= own.items() else OWN_TOKENIZER]


@dataclass
class PrivateSources:
    """What a run was given beside its rows: texts of the data that may not be published, and what has another source.

    Attributes:
        training: the private data sets as they were given, such as with raw columns.
        held_out: private data sets for evaluation.
        paths: files and folders of the data.
        label_columns: columns of labels or tags.
        class_names: names of the classes, where they were declared. None: they were not.
        people: columns that name people, which repeat, beside those in ``training``.
        preprocessing: what could have been computed from the records before the run, in words.
        public: other texts that were declared public.
    """

    training: list[Any] = field(default_factory=list)
    held_out: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    label_columns: list[str] = field(default_factory=lambda: ["label", "labels"])
    class_names: Sequence[str] | None = None
    people: list[str] = field(default_factory=list)
    preprocessing: list[str] = field(default_factory=list)
    public: list[str] = field(default_factory=list)

    def note(self, ledger: Ledger | SharedLedger, model: Any, plan: PrivacyPlan) -> None:
        """Note in the ledger what only people know, and write the strings that are compared before a publication.

        Args:
            ledger: ledger of the run that begins.
            model: to train.
            plan: of the run.
        """
        note_preprocessing(ledger, model, self.class_names is not None, self.preprocessing)
        if plan.unit == "sequence":
            for column in dict.fromkeys([*self.people, *(name for one in self.training for name in people_in(one))]):
                ledger.append_open_point(ONE_BY_ONE.format(column=column))
        if Processes().is_main:
            folder = ledger.path.parent
            named = [getattr(getattr(model, "config", None), "_name_or_path", None), plan.dataset, plan.unit_column]
            public = [*(self.class_names or ()), *self.public, *map(str, filter(None, named))]
            self.strings(plan.unit_column, folder).save(folder, public)

    def strings(self, unit_column: str | None, folder: Path) -> PrivateStrings:
        """Return the labels, the ids and the names of files; only stored rows are read.

        Args:
            unit_column: column of the units' ids. None: a unit is a record.
            folder: of the run.
        """
        found = PrivateStrings()
        for path in self.paths:
            found.add_path(path, folder)
        for source in (*self.training, *self.held_out):
            for name in sources_of(source):  # relative to the folder of the data
                found.add(FILE, Path(name).parts[-3:])
            names = names_in(source)
            for column in dict.fromkeys([*ids_in(source), *(name for name in names if name == unit_column)]):
                found.add(ID, values_in(source, column))
            for column in dict.fromkeys(self.label_columns):
                if column in names:
                    units = values_in(source, unit_column) if unit_column in names else itertools.count()
                    pairs = zip(_labels(source, column), units, strict=False)
                    found.add_labels((label, unit) for labels, unit in pairs for label in labels)
        return found


def _labels(source: Any, column: str) -> Iterator[list[str]]:
    """Yield the labels of each row that are text, or numbers of named classes; rows of other labels have none."""
    names = None
    if isinstance(source, datasets.Dataset):
        kind = source.features[column]
        kind = getattr(kind, "feature", kind)
        if isinstance(kind, datasets.ClassLabel):
            names = kind.names
        elif getattr(kind, "dtype", None) not in ("string", "large_string"):
            return
    elif not any(isinstance(one, str) for one in _listed(source[0].get(column))):
        return
    for cell in values_in(source, column):
        values = [one for one in _listed(cell) if one is not None]
        if names is not None:
            yield [names[one] for one in values if isinstance(one, int) and 0 <= one < len(names)]
        else:
            yield [one for one in values if isinstance(one, str)]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def note_data(ledger: Ledger | SharedLedger, dataset: Any, units: UnitIndex, privacy: PrivacyUnit) -> None:
    """Write down the files of the rows, not for release, and note the reasons to check them before a release.

    Names of files may be names of people, and the number of records of each is no public fact: the ledger has neither.

    Args:
        ledger: ledger of the run that begins.
        dataset: the rows, with the notes made when their records were loaded.
        units: units of the rows.
        privacy: definition of a unit.
    """
    words = record_words(dataset)
    if words is not None:
        ledger.append_fact(RECORDS_ARE, words)
    if may_be_documents(dataset):
        ledger.append_open_point(DOCUMENTS)
    if (files := sources_of(dataset)) and Processes().is_main:
        path = private_path(ledger.path.parent, DATA_FILES_FILE)
        write_file(path, json.dumps(files, indent=1, ensure_ascii=False) + "\n")
    note_users(ledger, units, privacy.unit)
