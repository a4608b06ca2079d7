"""The words of a report that only its field uses, explained for people outside of it.

Place in the flow: under `dpllm.report.pages`. The page links the first use of each word to its explanation.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Entry(NamedTuple):
    """A word and its explanation."""

    anchor: str
    """Of the entry on the page."""
    term: str
    """The word."""
    words: str
    """Its explanation."""
    pattern: str
    """Regular expression of its uses on the page."""


GLOSSARY = (
    Entry(
        "epsilon",
        "ε (epsilon)",
        "The strength of the guarantee: the smaller, the better protected. It bounds how much one unit can change the "
        "chance of any outcome of the training. At ε = 0 the model would know nothing of the data. Values up to 1 are "
        "strong, values up to 10 usual, and above 10 the number alone says little.",
        r"ε",
    ),
    Entry(
        "delta",
        "δ (delta)",
        "A small probability that belongs to ε: the chance of an outcome may exceed the bound of ε by at most δ. It is "
        "printed as 1 in N, and must be far smaller than 1 in the number of units.",
        r"δ",
    ),
    Entry(
        "unit",
        "Unit",
        "Whatever is protected as a whole: one record, or all records of one user. What several units say of the same "
        "person is protected less than what one unit says.",
        r"\bunits?\b",
    ),
    Entry(
        "adjacency",
        "Adjacency",
        "Which two data sets must be hard to distinguish. Zero-out: one unit contributes nothing in one of them. "
        "Replace-one: one unit is another one in one of them, which is asking more, so its ε is larger.",
        r"\badjacency\b|\b[Nn]eighbour\w*|\bzero-out\b|\breplace-one\b",
    ),
    Entry(
        "model",
        "Central differential privacy",
        "The setting in which a trusted trainer sees the raw data, and only what leaves the trainer is protected. It "
        "is not the name of a language model.",
        r"\bcentral differential privacy\b",
    ),
    Entry(
        "clipping",
        "Clipping",
        "Each unit's influence on a step of the training (its gradient) is cut to a fixed size, the clip norm C, so "
        "that no unit can pull the model far.",
        r"\bclip(?:s|ped|ping)?\b",
    ),
    Entry(
        "noise",
        "Noise",
        "Random numbers that are added to each step, so that the contribution of one unit disappears in them. σ is "
        "their size in relation to the clip norm.",
        r"\bnoise\b",
    ),
    Entry(
        "poisson",
        "Poisson sampling",
        "Each step draws every unit by its own secret coin, with a small probability. Nobody knows which units a step "
        "used, which makes the guarantee stronger.",
        r"\bPoisson sampl\w+",
    ),
    Entry(
        "ledger",
        "Ledger",
        "The file with a line for each step, written before the step is used. ε is computed from it, so that it counts "
        "what ran and not what was intended.",
        r"\bledger\b",
    ),
    Entry("plan", "Plan", "The file with all numbers of the guarantee, fixed before the first step.", r"\bplan\b"),
    Entry(
        "accountant",
        "Accountant, PLD, Rényi, PRV",
        "Programs that add up the ε of many steps. This report's number is by privacy loss distributions (PLD); the "
        "others check it.",
        r"\baccountants?\b|\bPLD\b",
    ),
    Entry(
        "zcdp",
        "ρ (rho), zCDP",
        "Another measure of the same guarantee, zero-concentrated differential privacy. Some guidelines state it.",
        r"ρ-zCDP",
    ),
    Entry(
        "audit",
        "Audit",
        "An attack on the finished model by its owner. It shows the least that leaks; ε bounds the most.",
        r"\baudits?\b",
    ),
)
"""Every entry, in the order in which the page lists them."""

_TAG = re.compile(r"(<[^>]*>)")
_NOT_WITHIN = ("a", "h1", "h2", "h3", "style", "title", "svg", "pre", "code")


def linked(page: str) -> str:
    """Return an HTML page whose first use of each word of the glossary is a link to its entry.

    Words within headings, links, code and pictures stay as they are, and so do those of the glossary itself.

    >>> linked("<body><h1>δ</h1><p>δ and δ</p></body>")
    '<body><h1>δ</h1><p><a class="term" href="#g-delta">δ</a> and δ</p></body>'
    """
    head, opened, rest = page.partition("<body>")
    body, glossary, tail = rest.partition('<section id="glossary">')
    pieces, within, waiting = _TAG.split(body), 0, list(GLOSSARY)
    for at, piece in enumerate(pieces):
        name = re.match(r"<(/?)([a-z0-9]+)", piece)
        if name is not None and name[2] in _NOT_WITHIN and not piece.endswith("/>"):
            within += -1 if name[1] else 1
        elif name is None and not within and piece.strip():
            pieces[at], waiting = _linked_in(piece, waiting)
    return head + opened + "".join(pieces) + glossary + tail


def _linked_in(text: str, waiting: list[Entry]) -> tuple[str, list[Entry]]:
    """Return a text with the first use of each word that waits for one, and the words that still wait."""
    found = [(match.start(), match.end(), entry) for entry in waiting if (match := re.search(entry.pattern, text))]
    parts, last, used = [], 0, []
    for start, end, entry in sorted(found, key=lambda one: one[:2]):
        if start >= last:
            parts += [text[last:start], f'<a class="term" href="#g-{entry.anchor}">{text[start:end]}</a>']
            last = end
            used.append(entry)
    return "".join([*parts, text[last:]]), [entry for entry in waiting if entry not in used]
