"""The section ``teach``: what contradicts itself, or would write private figures, is refused when it is read."""

import pytest

from dpllm.config import ConfigError
from dpllm.methods.sections import SET_BY_TEACH, TeachConfig


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"teachers": 1}, "teachers must be at least 2"),
        ({"threshold": 30}, "threshold needs max_answers: how many votes pass the check depends on the private"),
        ({"max_answers": 30}, "max_answers belongs to threshold"),
        ({"threshold": 51, "max_answers": 3}, "threshold must be at most teachers=50, got 51"),
        ({"threshold": 30, "max_answers": 0}, "max_answers must be at least 1"),
        ({"check_noise": 0}, "check_noise must be greater than 0"),
        ({"max_prompts": 0}, "max_prompts must be at least 1"),
        ({"max_shared_records": -1}, "max_shared_records must be at least 0"),
        ({"student": "no"}, "student must be true or false"),
        ({"train": {"learning_rate": "1e-3"}}, "train.learning_rate must be a finite number"),
        ({"train": {"average": {"kind": "ema", "decay": 0.9}}}, "average is an option of the private training"),
        ({"public_prompts": ""}, "public_prompts must be a text"),
        ({"prompts_column": ""}, "prompts_column must be a text"),
        ({"prompts_split": ""}, "prompts_split must be a text"),
    ],
)
def test_values_that_cannot_be_used_are_refused(values, text):
    """By name, with the remedy."""
    with pytest.raises(ConfigError, match=text):
        TeachConfig(**{"public_prompts": "public.jsonl", **values})


@pytest.mark.parametrize("section", ["train", "student_train"])
@pytest.mark.parametrize("name", SET_BY_TEACH)
def test_options_that_would_show_a_teacher_are_refused(section, name):
    """Losses, checkpoints and evaluations of a teacher are private."""
    with pytest.raises(ConfigError, match=f"{section}.{name} "):
        TeachConfig(public_prompts="public.jsonl", **{section: {name: None}})
