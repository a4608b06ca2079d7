"""Explain a report's technical terms to lay readers.

The page links the first use of each term to its explanation.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import yaml


class Entry(NamedTuple):
    """A technical term and its explanation."""

    anchor: str
    """Anchor of the entry on the page."""
    term: str
    """The term."""
    words: str
    """Its explanation."""
    pattern: str
    """Regular expression that matches its uses on the page."""
    of_queries: str | None = ""
    """Its explanation on a query run's page; empty: the same; None: that page has no such entry."""


@cache
def glossary(queries: bool = False) -> tuple[Entry, ...]:
    """Return every entry, in the page's order.

    Args:
        queries: whether the page is a query run's, which has no terms of training.
    """
    path = importlib.resources.files("dpllm").joinpath("report/templates/glossary.yaml")
    entries = tuple(Entry(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8")))
    if not queries:
        return entries
    return tuple(
        entry._replace(words=entry.of_queries or entry.words) for entry in entries if entry.of_queries is not None
    )


_TAG = re.compile(r"(<[^>]*>)")
_NOT_WITHIN = ("a", "h1", "h2", "h3", "style", "title", "svg", "pre", "code")


def linked(page: str, entries: Sequence[Entry]) -> str:
    """Return an HTML page in which the first use of each term links to its entry in the glossary.

    Headings, links, code, pictures and the glossary itself are left unchanged.

    Args:
        page: the page, with the glossary as its last section.
        entries: the entries of its glossary.

    >>> linked("<body><h1>δ</h1><p>δ and δ</p></body>", glossary())
    '<body><h1>δ</h1><p><a class="term" href="#g-delta">δ</a> and δ</p></body>'
    """
    head, opened, rest = page.partition("<body>")
    body, glossary, tail = rest.partition('<section id="glossary">')
    pieces, within, waiting = _TAG.split(body), 0, list(entries)
    for at, piece in enumerate(pieces):
        name = re.match(r"<(/?)([a-z0-9]+)", piece)
        if name is not None and name[2] in _NOT_WITHIN and not piece.endswith("/>"):
            within += -1 if name[1] else 1
        elif name is None and not within and piece.strip():
            pieces[at], waiting = _linked_in(piece, waiting)
    return head + opened + "".join(pieces) + glossary + tail


def _linked_in(text: str, waiting: list[Entry]) -> tuple[str, list[Entry]]:
    """Return a text with links at the first uses of the waiting terms, and the terms that still wait."""
    found = [(match.start(), match.end(), entry) for entry in waiting if (match := re.search(entry.pattern, text))]
    parts, last, used = [], 0, []
    for start, end, entry in sorted(found, key=lambda one: one[:2]):
        if start >= last:
            parts += [text[last:start], f'<a class="term" href="#g-{entry.anchor}">{text[start:end]}</a>']
            last = end
            used.append(entry)
    return "".join([*parts, text[last:]]), [entry for entry in waiting if entry not in used]
