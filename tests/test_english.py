"""Sentences of the documentation are short: a reader who is no native speaker understands them at once."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONG = ("attacks.md", "models.md", "correlated_noise.md")  # lists of cases, in the words of their tests; tables; proofs
TEXTS = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name not in LONG)
MOST_WORDS = 30
"""In a sentence: five more than the rule, for the names in it."""


def prose(text: str) -> str:
    """Return a text without code, quotations and links' targets; each line keeps its number."""
    text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text)
    text = re.sub(r"`[^`\n]*`|“[^”]*”|\"[^\"\n]*\"", "X", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs, points and cells of tables."""
    text = re.sub(r"^\[[\w-]+\]: \S+$", "", prose(text), flags=re.MULTILINE)  # the addresses of links
    blocks = re.split(r"\n\s*\n|^\s*(?:[-*#>]|\d+\.)\s+|\||^(?=\s*!!!)", text, flags=re.MULTILINE)
    return [
        " ".join(sentence.split())
        for block in blocks
        for sentence in re.split(r"(?<=[.:;?])\**\s+(?=[\[*`(A-ZδεσX])|; ", block)
    ]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_sentences_are_short(path):
    """One fact in a sentence."""
    text = path.read_text(encoding="utf-8")
    assert [s for s in sentences(text) if len(s.split()) > MOST_WORDS] == []


def test_a_long_sentence_is_found():
    """Code and quotations count as one word each."""
    long = " ".join(["word"] * 31)
    assert max(len(s.split()) for s in sentences(f"Short.\n\n{long.capitalize()}. X.")) == 31
    assert max(len(s.split()) for s in sentences(f"Short: `{long}`.\n\n```\n{long}\n```\n")) < 5
