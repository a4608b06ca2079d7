"""Write the formats of records and the keys of their columns into the tables of recipes/README.md: `make format`."""

from __future__ import annotations

import re
from pathlib import Path

from dpllm.config.formats.catalogue import COLUMNS, FORMATS

README = Path(__file__).resolve().parents[1] / "recipes" / "README.md"


def with_tables(text: str) -> str:
    """Return the page with a row for each format, and for each key of a column."""
    formats = "".join(f"| `{name}` | {kind.table[0]} | {kind.table[1]} |\n" for name, kind in FORMATS.items())
    keys = "".join(f"| data | `columns.{key}` | `{key}` | {own.words} |\n" for key, own in COLUMNS.items())
    keys += "| data | `columns.unit` | `null` | the column whose value identifies the unit; without it a record |\n"
    head = "| `data.format` | keys of `columns` | loss on |\n|---|---|---|\n"
    text = re.sub(re.escape(head) + r"(\|.*\n)+", lambda _: head + formats, text)
    return re.sub(r"^(\| data \| `columns\.\w+` .*\n)+", lambda _: keys, text, flags=re.MULTILINE)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
