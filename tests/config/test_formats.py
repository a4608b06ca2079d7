"""Each format of records states by itself what it is; nothing else compares its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dpllm
from dpllm.config import TASKS, DataConfig
from dpllm.config.formats.catalogue import COLUMNS, FORMATS
from dpllm.config.formats.record_format import columns_in

PACKAGE = Path(dpllm.__file__).parent


def test_nothing_compares_the_name_of_a_format():
    """So that a new format is its own file and its line in the catalogue."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "formats"]
    comparison = re.compile(r"\.format (==|!=|in|not in) (?!FORMATS|CANARY_FORMATS)")
    assert not [path.name for path in files if comparison.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_the_columns_that_a_recipe_names(name):
    """All that it reads is its own; a task that it trains names it in return."""
    kind = FORMATS[name]
    keys = columns_in(kind)
    assert keys.keys() <= COLUMNS.keys()
    form = DataConfig(path="x", max_length=8, format=name, columns={key: f"my {key}" for key in keys}).form
    assert form.names == [*(f"my {key}" for key in keys), *kind.beside]
    assert {*form.texts, form.labels} - {None} <= {*form.names}
    held = form.content({column: f"of {column}" for column in form.names})
    assert isinstance(held, kind.holds) and all(
        f"of {column}" in str(held) for column in form.names if column not in (*kind.beside,)
    )
    assert kind.tasks and all(name in TASKS[task].formats for task in kind.tasks)


@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind().record("", "") is not None])
def test_a_record_that_a_format_writes_is_found_again(name):
    """As a canary of an audit is; another text is another record."""
    form = FORMATS[name]()
    made = form.record("Say:", "xyzzy", gap=" ")
    assert [*made] == form.required and "xyzzy" in str(form.content(made))
    assert form.key(made) == form.key(form.record("Say:", "xyzzy", gap=" ")) != form.key(form.record("Say:", "plugh"))
    hash(form.key(made))
