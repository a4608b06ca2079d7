"""Sentences of reports are short, on the page, in the card and in the glossary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dpllm.report.definition import TRAINED_MODEL
from dpllm.report.disclosures import (
    DESTINATIONS,
    EVALUATION_DURING,
    EVALUATION_OUTSIDE,
    FINAL_LOSS,
    HELD_OUT,
    PREDICTION,
    TRAINING_LOSS,
)
from dpllm.report.model_card import own_lines
from dpllm.report.models import PrivacyReport
from dpllm.report.models_front import SECTIONS
from dpllm.report.render import render_markdown
from dpllm.report.statement import ReleaseNotes
from tests.report.test_front import report_of
from tests.test_english import MOST_WORDS, sentences
from tests.tiers import deep_case

USERS = {"unit": "user", "unit_column": "patient", "max_rows_per_unit": 4}
WRITTEN = (TRAINING_LOSS, FINAL_LOSS, EVALUATION_DURING, EVALUATION_OUTSIDE, HELD_OUT, PREDICTION)
KINDS = [
    pytest.param({}, id="records"),
    pytest.param({**USERS, "notes": ReleaseNotes(), "rows_kept": "random"}, id="users, nothing noted"),
    pytest.param({"seed": 1, "notes": ReleaseNotes()}, id="not private"),
    deep_case({"noise_multiplier": 0}, id="without noise"),
    deep_case({"noise_multiplier": 0.2}, id="weak"),
    deep_case({"adjacency": "replace-one", "starts": (3, 5), "end": "interrupted"}, id="replaced, stopped"),
    deep_case({"noise": {"kind": "blt", "buffers": 2}, "noise_multiplier": 4.0}, id="correlated noise"),
    deep_case({"selection": {"kind": "logarithmic", "mean": 10}}, id="the best of several runs"),
    deep_case({"starts": (0,), "end": None}, id="begun"),
]


def made(folder: Path, change: dict[str, Any]) -> PrivacyReport:
    """Return the report of a run that wrote out every kind of result, with a point that a person settled."""
    facts = ((TRAINED_MODEL, "a LoRA adapter for a language model (gpt2)"), (DESTINATIONS, "TensorBoard, WandB"))
    return report_of(folder, facts=facts, written=WRITTEN, settled="Rows have one length: confirm it.", **change)


@pytest.mark.parametrize("change", KINDS)
def test_a_report_is_in_plain_words(tmp_path: Path, change: dict[str, Any]) -> None:
    """Sentences outside of the section of exact figures are short."""
    report = made(tmp_path, change)
    page, card = render_markdown(report), "\n\n".join(sorted(own_lines(report, "org/base")))
    assert not re.findall(r"[^`|]*[a-z]\.[A-Zε]\w* \w+ [^|\n]*", re.sub(r"`[^`]*`", "", page)), (
        "a space follows a sentence"
    )
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    del parts[SECTIONS["accounting"]]
    long = [one for text in (*parts.values(), card) for one in sentences(text) if len(one.split()) > MOST_WORDS]
    assert long == []
