"""The words for one kind of private release, which report, page and card take from here.

Place in the flow: below the plan of a query run, which names the kind. The words belong to a method
(`dpllm.registry`), whose file imports nothing that computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpllm import registry


@dataclass(frozen=True, kw_only=True)
class ReleaseWords:
    """The words for one kind of private release."""

    name: str
    """Value of `QueryPlan.method`: a few words, unique."""
    result: str
    """The release, as the title of page and card has it: "counts of labels"."""
    what: str
    """What was done, without a full stop at the end; the report adds the data set and the number of units."""
    mechanism: str
    """How an answer is made and bounded, for readers who know the field; the plan's settings are listed beside it."""
    released: tuple[str, ...]
    """What may be released under the guarantee."""
    adjacency: str
    """What the neighbouring data sets are for this method, and why: a clause that follows "zero-out: "."""
    not_covered: tuple[tuple[str, str], ...]
    """Uses of the data that ε does not cover, each with what to do about it."""
    assumptions: tuple[tuple[str, str], ...]
    """What the numbers rest on, each with how the run ensured it."""
    use: str
    """How a reader of the card uses the released files: one paragraph of Markdown."""
    has_model: bool = True
    """Whether a public model reads or writes texts, which may have seen private records before."""
    is_model: bool = False
    """Whether the release is a model; otherwise the Hub keeps it as a data set."""


def release_words() -> dict[str, ReleaseWords]:
    """Return the words of every kind of private release that the installed methods make, by name."""
    return {words.name: words for method in registry.methods() for words in method.words}


def require_release(name: str) -> str:
    """Refuse a kind of release of which no installed method has the words.

    Raises:
        MethodError: it is of no installed method.
    """
    if name not in release_words():
        raise registry.MethodError(
            f"the release {name!r} belongs to no installed method; installed are {registry.installed()}. "
            "Install dpllm whole"
        )
    return name
