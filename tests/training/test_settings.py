"""Tests of dpllm.training.settings: the rule of thumb, and suggestions as overrides and as a file."""

from __future__ import annotations

import shlex

import pytest

from dpllm.config.yaml12 import read_yaml
from dpllm.training.settings import Setting, Suggestion, flow, starting_rate


def test_the_rule_gives_the_rates_that_were_measured_best_for_a_small_model():
    """stories260K on E2E, T = 160 (docs/correlated_noise.md): .004 with independent noise, .064 with 16 bands."""
    assert starting_rate(0.1793, 160) == 0.0043
    assert starting_rate(0.1793, 160, 14.25) == 0.061  # ε = 8
    assert starting_rate(0.1793, 160, 19.5) == 0.083  # ε = 3, where .064 is the largest that was tried


def test_the_rate_follows_each_number_of_the_rule():
    """Proportional to the weights and to r, and to 1/√T."""
    one = starting_rate(1.0, 100)
    assert one == 0.03 and starting_rate(2.0, 100) == 2 * one
    assert starting_rate(1.0, 400) == one / 2 and starting_rate(1.0, 100, 3.0) == 3 * one


@pytest.mark.parametrize("numbers", [(0.0, 10, 1.0), (float("nan"), 10, 1.0), (1.0, 0, 1.0), (1.0, 10, float("inf"))])
def test_a_number_without_a_rate_is_refused(numbers):
    """A rate of 0 or nan would spend ε on nothing."""
    with pytest.raises(ValueError, match="must be positive"):
        starting_rate(*numbers)


@pytest.mark.parametrize("value", [0.0043, 1e-7, 3, True, None, "ema", [1, 0.5], {"kind": "banded", "bands": 16}])
def test_an_override_is_read_as_the_value_that_was_suggested(value):
    """By the reader of recipes."""
    assert read_yaml(flow(value)) == value


def suggestion() -> Suggestion:
    noise = {"kind": "banded", "bands": 16}
    return Suggestion(
        (
            Setting("train.learning_rate", 0.061, "the rule.", 5e-5),
            Setting("train.warmup_steps", 0.1, "the warm-up.", 0.1),
            Setting("privacy.noise", noise, "the bands.", "independent"),
        ),
        ("a note.",),
    )


def test_only_settings_that_differ_are_pasted_and_the_file_has_all_of_them():
    """The line survives a shell; the file is sections of a recipe with the reasons as comments."""
    made = suggestion()
    assert shlex.split(made.pasteable) == ["train.learning_rate=0.061", "privacy.noise={kind: banded, bands: 16}"]
    text = made.to_yaml(["first line"])
    assert text.startswith("# first line\n") and "# privacy.noise: the bands.\n" in text and "# a note.\n" in text
    assert read_yaml(text) == {
        "train": {"learning_rate": 0.061, "warmup_steps": 0.1},
        "privacy": {"noise": {"kind": "banded", "bands": 16}},
    }
    assert made.value("train.warmup_steps") == 0.1
    assert made.to_dict()["settings"][0]["reason"] == "the rule."
