"""Define the sentences about one kind of private release, which report, page and card use.

The plan of a query run names the kind. The sentences belong to a method (`dpllm.registry`), whose file imports no
numeric code.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpllm import registry


@dataclass(frozen=True, kw_only=True)
class ReleaseWords:
    """The sentences about one kind of private release."""

    name: str
    """Value of `QueryPlan.method`: a few words, unique."""
    result: str
    """The release, as in the title of page and card: "counts of labels"."""
    what: str
    """What was done, without a full stop at the end; the report adds the data set and the number of units."""
    mechanism: str
    """How an answer is computed and bounded, for experts; the report also lists the plan's settings."""
    released: tuple[str, ...]
    """What may be released under the guarantee."""
    adjacency: str
    """Which data sets are neighbours for this method, and why: a clause that follows "zero-out: "."""
    not_covered: tuple[tuple[str, str], ...]
    """Uses of the data that ε does not cover, each with what to do about it."""
    assumptions: tuple[tuple[str, str], ...]
    """The assumptions behind the numbers, and how the run ensured each."""
    use: str
    """How a reader of the card uses the released files: one paragraph of Markdown."""
    has_model: bool = True
    """Whether a public model, which may have seen private records before, reads or writes texts."""
    is_model: bool = False
    """Whether the release is a model; otherwise the Hub stores it as a data set."""


def release_words() -> dict[str, ReleaseWords]:
    """Return the sentences of every kind of private release of the installed methods, by name."""
    return {words.name: words for method in registry.methods() for words in method.words}


def require_release(name: str) -> str:
    """Refuse a kind of release that no installed method defines.

    Raises:
        MethodError: no installed method defines it.
    """
    if name not in release_words():
        raise registry.MethodError(
            f"no installed method defines the release {name!r}; installed are {registry.installed()}. "
            "Install dpllm completely"
        )
    return name
