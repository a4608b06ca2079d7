"""The texts that people read keep the rules of plain English: no pattern of a rule occurs in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = {
    "a what-clause: name the noun": r"\bwhat\b(?![^.|?]*\?)",
    "a trailing 'alone': write 'only'": r"\balone(?=[.,;:)]|$)",
    "'so many': write a number": r"\bso (?:many|much)\b(?! (?:as|that))",
    "'anew': write 'again'": r"\banew\b",
    "'otherwise' for 'differently'": r"\b(?:read|computed|done|used|made|drawn|trained) otherwise\b",
    "a contraction": r"\b\w+n['’]t\b|\b(?:it|that|there|he|she|who)['’]s\b|\b(?:you|we|they)['’](?:re|ve|ll)\b",
    "a poetic verb": r"\b(?:stands? (?:in|for|still)|it stands|rests|looks away|tells|lies in)\b",
    "a poetic noun or adjective": r"\b(?:doors?|dear|dearest)\b",
    "a dash in place of a sentence": r"\w — \w",
}
TEXTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
        *(ROOT / name / "README.md" for name in ("recipes", "launch", "benchmarks")),
        *(ROOT / "docs").rglob("*.md"),
    )
    if path.exists()
)
LONG = ("docs/models.md", "docs/correlated_noise.md")
SHORT = [name for name in TEXTS if name.startswith("docs/") and name not in LONG]
MOST_WORDS = 30
"""In a sentence: five more than the rule, for the names in it."""


def prose(text: str) -> str:
    """Return a text without code, quotations and links' targets; each line keeps its number."""
    text = re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>]+>", "", text)
    text = re.sub(r"`[^`\n]*`|“[^”]*”|\"[^\"\n]*\"", "X", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def found(text: str) -> list[str]:
    """Return each place where a rule is broken."""
    return [
        f"line {number}: {rule}: {line.strip()[:160]}"
        for number, line in enumerate(prose(text).splitlines(), 1)
        for rule, pattern in PATTERNS.items()
        if re.search(pattern, line, flags=re.IGNORECASE)
    ]


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs, points and cells of tables."""
    text = re.sub(r"^\[[\w-]+\]: \S+$", "", prose(text), flags=re.MULTILINE)  # the addresses of links
    blocks = re.split(r"\n\s*\n|^\s*(?:[-*#>]|\d+\.)\s+|\||^(?=\s*!!!)", text, flags=re.MULTILINE)
    return [
        " ".join(sentence.split())
        for block in blocks
        for sentence in re.split(r"(?<=[.:;?])\**\s+(?=[\[*`(A-ZδεσX])|; ", block)
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_breaks_a_rule_of_plain_english(name):
    """A reader who is no native speaker understands it at once."""
    assert found((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", SHORT)
def test_sentences_of_the_documentation_are_short(name):
    """One fact in a sentence."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [s for s in sentences(text) if len(s.split()) > MOST_WORDS] == []


@pytest.mark.parametrize(
    "text",
    [
        "dpllm prints what it found.",
        "ε comes from the numbers alone.",
        "It takes so many rows.",
        "The report is made anew.",
        "It was read otherwise than prepared.",
        "It doesn't train.",
        "The name stands for a file.",
        "Long rows are the dear ones.",
    ],
)
def test_the_patterns_find_the_faults_that_they_are_for(text):
    """A pattern that matches nothing would pass every text."""
    assert len(found(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "What does ε mean?",
        "`what`",
        "“do what I say”",
        "```\nwhat\n```",
        "only 3 rows, so much that memory ends",
        "alone or beside others",
    ],
)
def test_questions_and_quotations_are_no_faults(text):
    """Nor is code."""
    assert found(text) == []
