"""The synthetic notes are always the same, belong to patients, and share no line with the public leaflets."""

import hashlib
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from dpllm.data.corpora import BUILTIN, NUM_LEAFLETS, NUM_PATIENTS, leaflets, notes


@pytest.fixture(scope="module")
def every_note():
    return notes()


def test_both_corpora_are_the_same_on_every_machine(every_note):
    """The figures of the recipe are those of these texts; a change of a template changes them."""
    hashes = [hashlib.sha256(json.dumps(records).encode()).hexdigest()[:16] for records in (every_note, leaflets())]
    assert hashes == ["d32cf22da1462eaa", "d7eb92fb031bf64b"]
    assert BUILTIN["clinic"] is notes and BUILTIN["leaflets"] is leaflets


def test_a_patient_has_several_notes_with_the_same_facts(every_note):
    """Sex, conditions and home return; a visit is never before the last one, and no note is written twice."""
    by_patient = defaultdict(list)
    for record in every_note:
        by_patient[record["patient_id"]].append(record)
    assert len(by_patient) == NUM_PATIENTS == 6000 and len(every_note) == 30_062
    assert {len(records) for records in by_patient.values()} == set(range(2, 9))
    for records in by_patient.values():
        heads = [record["header"] for record in records]
        assert len({head.partition("Known: ")[2] for head in heads}) == 1
        assert len({"Woman" in head for head in heads}) == 1
        homes = {part for record in records for part in record["note"].split(". ") if part.startswith("Lives ")}
        assert len(homes) <= 1
        assert all(b["visit"] == a["visit"] + 1 for a, b in pairwise(records))
    assert len({record["header"] + record["note"] for record in every_note}) == len(every_note)


def test_public_and_private_text_are_different(every_note):
    """Words are common to both, as in the language of any clinic; no sentence of some length is."""
    public = {sentence for record in leaflets() for sentence in record["text"].split(". ")}
    private = {sentence for record in every_note for sentence in record["note"].split(". ")}
    assert not {sentence for sentence in public & private if len(sentence) > 20}
    assert len(leaflets()) == NUM_LEAFLETS
    words = {word.strip(".,:").lower() for text in public for word in text.split()}
    own = [word.strip(".,:").lower() for text in list(private)[:2000] for word in text.split()]
    assert sum(word in words or not word.isalpha() for word in own) > 0.8 * len(own)
