"""The parts of a report that are written for people first: its first screen, what is open, and what people noted.

Place in the flow: under `dpllm.report.models`. `dpllm.report.front` fills in the first screen, and
`dpllm.report.checklist` the points that are open.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

from pydantic import Field

from dpllm.report.kinds import OneOf, Part, Probability

SECTIONS: Final = {
    "to-do": "Still to be done",
    "do-not-publish": "Do not publish these files",
    "strength": "How strong the guarantee is",
    "setting": "The people",
    "definition": "The protection in detail",
    "not-covered": "Not covered",
    "accounting": "How the numbers were computed",
    "utility": "How useful the model is",
    "checkable": "Check it yourself",
    "checklist": "Checklist",
    "glossary": "Glossary",
}
"""Sections of the page after the first screen: anchor and title, in their order."""


_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)


def day_in_words(text: str) -> str:
    """Return a date in words; a text that is no date as it is.

    >>> day_in_words("2026-11-23T14:29:00+00:00"), day_in_words("now")
    ('23 November 2026', 'now')
    """
    try:
        day = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


class Noted(Part):
    """Facts that only people know, beside those of the setting and the definition."""

    trained_by: str | None = Field(description="Who trained the model; null: not noted.")
    base_model: str | None = Field(description="Name of the model that was fine-tuned; null: not noted.")
    license: str | None = Field(description="License of the released model; null: not noted.")
    language: tuple[str, ...] = Field(description="Languages of the model, as ISO codes; empty: not noted.")
    dataset: str | None = Field(description="Public name of the data set, where the plan has none; null: not noted.")
    preprocessing: str | None = Field(
        description="Numbers, names or settings that were computed from the records before the run; null: not noted."
    )


class Odds(Part):
    """A bound on one kind of attack."""

    attack: str = Field(description="What the attacker tries.")
    without: str = Field(description="Success without the model, in words.")
    with_the_model: str = Field(description="Largest success with the model, in words, rounded up.")
    share_without: Probability = Field(description="Success without the model.")
    at_most: Probability = Field(description="Largest success with the model.")


class Front(Part):
    """The first screen: what happened, in sentences. Numbers are rounded to two figures, to the safe side."""

    alert: str = Field(description="Whether the model may not be released yet, in one line; empty: no point is open.")
    what: str = Field(description="What was trained on what.")
    who: str = Field(description="Who trained it, who holds the data, who gets the model.")
    when: str = Field(description="When, and how many steps.")
    protected: str = Field(description="The protected unit.")
    odds: str = Field(description="The odds of an attacker, in one sentence; or why there is no guarantee.")
    table: tuple[Odds, ...] = Field(description="A few bounds; empty where there is no guarantee.")
    numbers: str = Field(description="ε and δ behind the odds, and how strong they are; empty without odds.")
    not_covered: str = Field(description="What is not covered.")
    to_do: str = Field(description="How many points are open.")


class Settled(Part):
    """An open point that people settled, as the ledger has it."""

    point: str = Field(description="The point.")
    answer: str = Field(description="What was checked.")
    by: str = Field(description="Who checked it.")
    at: str = Field(description="When it was written into the ledger, in UTC (ISO 8601).")

    @property
    def in_words(self) -> str:
        """The statement for people, with its date and its author."""
        return f"{self.answer} (settled on {day_in_words(self.at)} by {self.by})"


class KeptFiles(Part):
    """Files of a run's folder that are not for release."""

    files: str = Field(description="Which files.")
    why: str = Field(description="Why they are not for release.")


class Line(Part):
    """A line that every report must answer (Ponomareva et al., JAIR 2023)."""

    section: Annotated[str, OneOf(tuple(SECTIONS))] = Field(description="Which section of the page answers it.")
    question: str = Field(description="The question.")
    filled: bool = Field(description="Whether it is answered; otherwise it is an open point.")
