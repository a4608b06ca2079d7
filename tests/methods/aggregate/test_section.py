"""Tests of dpllm.methods.sections: what is no question is refused by name."""

from __future__ import annotations

import pytest

from dpllm.config import ConfigError
from dpllm.methods.sections import AggregateConfig, Question

NUMBER = {"name": "stars", "ask": "How many?", "kind": "number", "low": 1, "high": 5}
CHOICE = {"name": "side", "ask": "Which?", "kind": "choice", "answers": ["left", "right"]}
OPEN = {"name": "food", "ask": "Which food?", "kind": "open"}


def test_questions_are_read_and_written_back():
    """From mappings of a recipe, and from questions."""
    section = AggregateConfig(questions=[NUMBER, CHOICE, OPEN])
    assert AggregateConfig(questions=section.questions) == section
    assert section.questions[0] == Question(**NUMBER) and section.questions[0].low == 1.0
    assert section.questions[1].answers == ("left", "right")


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("How many?", "question 1 must be a mapping with name, ask and kind"),
        ({**NUMBER, "hihg": 5}, "question 1: unknown key 'hihg'"),
        ({"name": "stars", "kind": "open"}, "question 1: missing key 'ask'"),
        ({**OPEN, "kind": "median"}, "question 1: kind must be one of .*, got 'median'"),
        ({**OPEN, "name": "two\nlines"}, "a name of one line"),
        ({**OPEN, "low": 1}, "question 'food' of the kind 'open' has no low"),
        ({**NUMBER, "high": None}, "question 'stars' of the kind 'number' needs high"),
        ({**NUMBER, "answers": ["a", "b"]}, "of the kind 'number' has no answers"),
        ({**NUMBER, "high": 1}, "low=1 must be below high=1"),
        ({**NUMBER, "high": float("inf")}, "question 1: high must be a finite number"),
        ({**NUMBER, "low": "1"}, "question 1: low must be a finite number"),
        ({**CHOICE, "answers": ["left"]}, "answers must be a list of two texts or more"),
        ({**CHOICE, "answers": "left, right"}, "answers must be a list of two texts or more"),
        ({**CHOICE, "answers": ["left", "left"]}, "lists an answer twice"),
    ],
)
def test_what_is_no_question_is_refused(question, text):
    """By name, with the value."""
    with pytest.raises(ConfigError, match=text):
        AggregateConfig(questions=[question])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"questions": [OPEN, OPEN]}, "two questions have the name 'food'"),
        ({"questions": "food"}, "questions must be a list"),
        ({"groups": 1}, "groups"),
        ({"group_size": 0}, "group_size"),
        ({"max_words": 0}, "max_words"),
        ({"opening": 3}, "opening must be a text"),
        ({"file": "privacy_plan.json"}, "must not begin with privacy_"),
        ({"file": "answers.txt"}, "ends in .json"),
    ],
)
def test_sections_are_checked(fields, text):
    """By name."""
    with pytest.raises(ConfigError, match=text):
        AggregateConfig(**fields)
