"""Write the formats of records and the keys of a recipe into the tables of recipes/README.md: `make format`."""

from __future__ import annotations

import re
from pathlib import Path

from dpllm.config.formats.catalogue import FORMATS
from dpllm.config.schema import key_tables

README = Path(__file__).resolve().parents[1] / "recipes" / "README.md"
_KEYS = re.compile(r"^\| section \| key \| default \| meaning \|\n.*\Z", flags=re.MULTILINE | re.DOTALL)


def with_tables(text: str) -> str:
    """Return the page with a row for each format, and at its end the tables of all keys."""
    formats = "".join(f"| `{name}` | {kind.table[0]} | {kind.table[1]} |\n" for name, kind in FORMATS.items())
    head = "| `data.format` | keys of `columns` | loss on |\n|---|---|---|\n"
    text = re.sub(re.escape(head) + r"(\|.*\n)+", lambda _: head + formats, text)
    return _KEYS.sub(lambda _: key_tables(), text)


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
