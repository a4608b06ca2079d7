"""Texts with their labels, read from a file or from the folder of a synthetic data set.

Place in the flow: input of the evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.config.values import ConfigError, nearest
from dpllm.data.readers import read_tables, why_unreadable

TEXTS_NAMES = ("texts.jsonl", "texts.parquet")
"""Names of the file with the texts in the folder of a synthetic data set."""
TEXT, LABEL, PROMPT = "text", "label", "prompt"
"""Columns of a synthetic data set."""
_TEXT_COLUMNS = (TEXT, "completion", "ref", "sentence")


@dataclass(frozen=True)
class LabelledTexts:
    """Some texts, each with its label if they have labels.

    Raises:
        ConfigError: there is no text.
    """

    name: str
    """For tables."""
    texts: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    """(len(texts),) None: they have none."""

    def __post_init__(self) -> None:
        """Check that there is a text."""
        if not self.texts:
            raise ConfigError(f"{self.name} holds no text: give a file with texts")

    def part(self, numbers: Sequence[int]) -> LabelledTexts:
        """Return the texts with these numbers."""
        labels = None if self.labels is None else tuple(self.labels[number] for number in numbers)
        return LabelledTexts(self.name, tuple(self.texts[number] for number in numbers), labels)


def texts_file(path: str | Path) -> Path:
    """Return the file of texts: the path itself, or the file in the folder of a synthetic data set.

    Raises:
        ConfigError: there is none, or it ends in an unknown way.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in TEXTS_NAMES if (path / name).is_file()), None)
        if found is None:
            raise ConfigError(f"{path} holds neither {' nor '.join(TEXTS_NAMES)}: give a file of texts")
        return found
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file or folder")
    reason = why_unreadable(path)
    if reason is not None:
        raise ConfigError(f"{path}: cannot be read: {reason}")
    return path


def read_texts(
    path: str | Path, text_column: str | None = None, label_column: str | None = None, name: str | None = None
) -> LabelledTexts:
    """Read texts, and their labels if there are any.

    Args:
        path: a file, or the folder of a synthetic data set.
        text_column: None: "text", or another usual name.
        label_column: None: "label", if there is one.
        name: for tables; None: the path.

    Raises:
        ConfigError: no such file or column; a text is none. The message has its number and not its text.
    """
    file = texts_file(path)
    texts: list[Any] = []
    labels: list[Any] = []
    for table in read_tables(file):
        names = table.column_names
        chosen = text_column or next((one for one in _TEXT_COLUMNS if one in names), None)
        chosen = chosen or (names[0] if len(names) == 1 else None)
        if chosen is None or chosen not in names:
            asked = f"no column '{chosen}'{nearest(chosen, names) or '.'}" if chosen else "no column named text."
            raise ConfigError(f"{file}: {asked} It has {', '.join(names)}: name the column of texts")
        if label_column is not None and label_column not in names:
            raise ConfigError(
                f"{file}: no column '{label_column}'{nearest(label_column, names) or '.'} It has {', '.join(names)}: "
                "name the column of labels"
            )
        texts += table.column(chosen).to_pylist()
        known = label_column or (LABEL if LABEL in names else None)
        labels += table.column(known).to_pylist() if known is not None else []
    wrong = next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise ConfigError(f"{file}: record {wrong} has no text: fill it in, or remove it")
    missing = next((number for number, label in enumerate(labels) if label is None), None)
    if missing is not None and label_column is not None:
        raise ConfigError(f"{file}: record {missing} has no label: fill it in, or remove it")
    own = tuple(map(str, labels)) if labels and missing is None else None
    return LabelledTexts(name or str(path), tuple(texts), own)
