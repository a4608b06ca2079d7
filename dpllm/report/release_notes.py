"""Store the facts about a release that only people know.

When a report is written again, it keeps the notes of the previous one.
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
"""Placeholders that a report prints for a statement that settles a point, and for the person who makes it."""


@dataclass(frozen=True, kw_only=True)
class ReleaseNotes:
    """Facts about a release that only people know. None leaves the point open if the report asks for it."""

    data_holder: str | None = None
    """Who holds the raw data."""
    audience: str | None = None
    """Who will see the released model."""
    other_uses: str | None = None
    """Other uses of the same data: tuning runs, earlier models, model selection."""
    preprocessing: str | None = None
    """Numbers, names or settings that were computed from the records before the run, and which ones are public."""
    audit: str | None = None
    """Result of an empirical audit of the model; required if ε is above 10."""
    utility: Mapping[str, Any] = field(default_factory=dict)
    """The model's figures for the published report, by name. Only figures that ε covers (measured on public rows, or
    released under the budget) or that contain nothing private, such as the hardware."""
    utility_elsewhere: Sequence[str] = ()
    """Names of figures that ε does not cover. Their values are in a file that must not be released
    (`dpllm.report.disclosures.UTILITY_FILE`)."""
    trained_by: str | None = None
    """Who trained the model and is responsible for it."""
    base_model: str | None = None
    """Name of the base model, such as its Hub id, if it was loaded from a folder."""
    license: str | None = None
    """License of the released model, as the Hub's identifier."""
    language: str | Sequence[str] | None = None
    """Languages of the model, as ISO codes."""
    dataset: str | None = None
    """Public name of the data set, if the plan has none."""

    def __post_init__(self) -> None:
        """Refuse notes that a report cannot hold, before any training.

        Raises:
            ValueError: a note is not a text or is a placeholder, or JSON cannot hold a figure.
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
                f"utility must contain only texts and finite numbers, got {dict(self.utility)!r} ({error})"
            ) from error

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages, as a tuple."""
        return (self.language,) if isinstance(self.language, str) else tuple(self.language or ())

    def noted(self) -> Noted:
        """Return the part of a report with the notes that have no other place in it."""
        return Noted(
            trained_by=self.trained_by,
            base_model=self.base_model,
            license=self.license,
            language=self.languages,
            dataset=self.dataset,
            preprocessing=self.preprocessing,
        )


def require_own_words(what: str, value: str) -> None:
    """Refuse a placeholder instead of a person's own words.

    Args:
        what: name of the text, for the error.
        value: the text; an empty text is accepted.

    Raises:
        ValueError: it is the placeholder that a report prints, or has neither letter nor digit.
    """
    if value in SETTLED_BY or (value and not any(map(str.isalnum, value))):
        raise ValueError(f"{what} is {value!r}, which is only a placeholder. Replace it with your own words")


def keep_utility(folder: str | Path, figures: Mapping[str, Any]) -> None:
    """Write a model's figures that ε does not cover into a file that must not be released. Call it in one process.

    Args:
        folder: the run's folder.
        figures: the figures by name; they replace the file's earlier ones.
    """
    path = private_path(folder, UTILITY_FILE)
    write_file(path, json.dumps(dict(figures), indent=2, ensure_ascii=False) + "\n")


def notes_in(folder: str | Path) -> ReleaseNotes:
    """Return what people noted in a folder's report; empty notes if it has no report.

    Raises:
        ValueError: the file is damaged or is not a privacy report.
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
            f"{path} is not a complete privacy report ({type(error).__name__}: {error}), so its notes cannot be read. "
            "Restore it from a backup, or delete it and note the facts again with `dpllm report`"
        ) from error
    if other:
        words = other_format("privacy report", report["format"], FORMAT, written_by(report))
        raise ValueError(f"{path} {words}, or delete the file and note the facts again with `dpllm report`")
    return notes


def notes_of(report: Mapping[str, Any]) -> ReleaseNotes:
    """Return what people noted in a report."""
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
    """Return the version of dpllm that wrote a report, in words; None if the report does not name it."""
    checkable = report.get("checkable")
    versions = checkable.get("versions") if isinstance(checkable, dict) else None
    version = versions.get("dpllm") if isinstance(versions, dict) else None
    if not isinstance(checkable, dict) or not isinstance(version, str):
        return None
    return version_words(version, checkable.get("commit"), checkable.get("changed") is True)
