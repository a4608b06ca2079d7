"""Write the formats of records and the keys of their columns into the tables of recipes/README.md: `make format`."""

from __future__ import annotations

import re
from pathlib import Path

from dpllm.config.formats.catalogue import COLUMNS, FORMATS, RecordColumns

README = Path(__file__).resolve().parents[1] / "recipes" / "README.md"


def with_tables(text: str) -> str:
    """Return the page with a row for each format, and for each key of a column."""
    formats = "".join(f"| `{name}` | {kind.table[0]} | {kind.table[1]} |\n" for name, kind in FORMATS.items())
    usual = RecordColumns()
    keys = "".join(f"| data | `{key}` | `{getattr(usual, key)}` | {own.words} |\n" for key, own in COLUMNS.items())
    head = "| `data.format` | columns | loss on |\n|---|---|---|\n"
    text = re.sub(re.escape(head) + r"(\|.*\n)+", lambda _: head + formats, text)
    return re.sub(r"^(\| data \| `\w+_column` .*\n)+", lambda _: keys, text, flags=re.MULTILINE)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
