"""Facts about a release that only people know, and their way from one report to the next.

Place in the flow: below report, which shows them. A report that is written again keeps the notes of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpllm.config.files import write_file
from dpllm.config.versions import has_format, other_format, version_words
from dpllm.privacy.ledger import REPORT_FILE as JSON_FILE
from dpllm.privacy.private_folder import private_path
from dpllm.report.disclosures import UTILITY_FILE
from dpllm.report.models import FORMAT, Noted

_TEXTS = (
    *("data_holder", "audience", "other_uses", "preprocessing", "audit"),
    *("trained_by", "base_model", "license", "dataset"),
)

SETTLED_BY = ("what was checked", "name and role")
"""Words that a report prints in the place of a statement that settles a point, and of the person who makes it."""


@dataclass(frozen=True, kw_only=True)
class ReleaseNotes:
    """What only people know about a release; None stays an open point of the report where the report asks for it."""

    data_holder: str | None = None
    """Who holds the raw data."""
    audience: str | None = None
    """Who will see the released model."""
    other_uses: str | None = None
    """Other uses of the same data: tuning runs, earlier models, model selection."""
    preprocessing: str | None = None
    """Numbers, names or settings that were computed from the records before the run, and which of them are public."""
    audit: str | None = None
    """What an empirical audit of the model found; asked for where ε is above 10."""
    utility: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the model for the report, which is published: name to value. Only figures that ε covers (measured on
    public rows, or released under the budget) or that hold nothing private, such as the hardware."""
    utility_elsewhere: Sequence[str] = ()
    """Names of figures that ε does not cover. Their values are in a file that is not for release
    (`dpllm.report.disclosures.UTILITY_FILE`)."""
    trained_by: str | None = None
    """Who trained the model and answers for it."""
    base_model: str | None = None
    """Name of the model that was fine-tuned, such as its Hub id, where it was loaded from a folder."""
    license: str | None = None
    """License of the released model: the Hub's identifier."""
    language: str | Sequence[str] | None = None
    """Languages of the model: ISO codes."""
    dataset: str | None = None
    """Public name of the data set, where the plan has none."""

    def __post_init__(self) -> None:
        """Refuse what no report can hold, before a run is trained for it.

        Raises:
            ValueError: a note is no text or only the place of one, or a figure is nothing that JSON can hold.
        """
        texts = {name: getattr(self, name) for name in _TEXTS if getattr(self, name) is not None}
        texts |= {f"language {place}": code for place, code in enumerate(self.languages, start=1)}
        texts |= {f"figure {place}": name for place, name in enumerate(self.utility_elsewhere, start=1)}
        for name, value in texts.items():
            if not isinstance(value, str):
                raise ValueError(f"the note {name} must be a text, got {value!r} ({type(value).__name__})")
            require_own_words(f"the note {name}", value)
        try:
            json.dumps(dict(self.utility), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"utility must hold texts and finite numbers, got {dict(self.utility)!r} ({error})"
            ) from error

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages as a tuple."""
        return (self.language,) if isinstance(self.language, str) else tuple(self.language or ())

    def noted(self) -> Noted:
        """Return the part of a report that holds the notes without another place in it."""
        return Noted(
            trained_by=self.trained_by,
            base_model=self.base_model,
            license=self.license,
            language=self.languages,
            dataset=self.dataset,
            preprocessing=self.preprocessing,
        )


def require_own_words(what: str, value: str) -> None:
    """Refuse a text that only takes the place of a person's words.

    Args:
        what: the text's name, for the error.
        value: the text; an empty one is no text.

    Raises:
        ValueError: it is the text that a report prints as an example, or has neither letter nor digit.
    """
    if value in SETTLED_BY or (value and not any(map(str.isalnum, value))):
        raise ValueError(f"{what} is {value!r}, which stands for words of yours: write them")


def keep_utility(folder: str | Path, figures: Mapping[str, Any]) -> None:
    """Write figures of a model that ε does not cover into a file that is not for release; for one process.

    Args:
        folder: of the run.
        figures: name to value; the file has these and no earlier ones.
    """
    path = private_path(folder, UTILITY_FILE)
    write_file(path, json.dumps(dict(figures), indent=2, ensure_ascii=False) + "\n")


def notes_in(folder: str | Path) -> ReleaseNotes:
    """Return what people noted in the report that lies in a folder; nothing where there is none.

    Args:
        folder: of a run or of a checkpoint.

    Raises:
        ValueError: the file is damaged or of another kind.
    """
    path = Path(folder) / JSON_FILE
    if not path.is_file():
        return ReleaseNotes()
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        other = not has_format(report.get("format", FORMAT), FORMAT)
        notes = ReleaseNotes() if other else notes_of(report)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a whole privacy report ({type(error).__name__}: {error}), so the notes in it cannot be "
            "read: restore it from a copy, or delete it and note again with `dpllm report`"
        ) from error
    if other:
        words = other_format("privacy report", report["format"], FORMAT, written_by(report))
        raise ValueError(f"{path} {words}, or delete the file and note again with `dpllm report`")
    return notes


def notes_of(report: Mapping[str, Any]) -> ReleaseNotes:
    """Return what people noted in a report.

    Args:
        report: as the JSON file holds it.
    """
    noted = report["noted"]
    return ReleaseNotes(
        data_holder=report["setting"]["data_holder"],
        audience=report["setting"]["audience"],
        other_uses=report["definition"]["other_uses_of_the_data"],
        audit=report["strength"]["audit_noted"],
        utility=report["utility"] or {},
        utility_elsewhere=tuple(report["utility_elsewhere"]),
        **{**noted, "language": tuple(noted["language"]) or None},
    )


def written_by(report: Mapping[str, Any]) -> str | None:
    """Return the version of dpllm that made a report, in words; None if the report does not name it.

    Args:
        report: as the JSON file holds it.
    """
    checkable = report.get("checkable")
    versions = checkable.get("versions") if isinstance(checkable, dict) else None
    version = versions.get("dpllm") if isinstance(versions, dict) else None
    if not isinstance(checkable, dict) or not isinstance(version, str):
        return None
    return version_words(version, checkable.get("commit"), checkable.get("changed") is True)
