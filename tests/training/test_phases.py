"""The phases of a run on the screen."""

import io

import datasets
from rich.console import Console

from dpllm.config import PrivacyConfig
from dpllm.training.finetune import read_words
from dpllm.training.phases import Phases


def test_a_phase_ends_with_its_time_when_the_next_begins():
    """And once only."""
    screen = io.StringIO()
    phases = Phases(Console(file=screen, width=80))
    phases.begin("reading the records")
    phases.end("12 units")
    phases.end()
    phases.begin("planning", "the noise [that ε needs]")
    phases.begin("training")
    phases.say("a word")
    lines = screen.getvalue().splitlines()
    assert lines == [
        *("", "reading the records", "  0.0 s: 12 units", "", "planning: the noise [that ε needs]", "  0.0 s"),
        *("", "training", "  a word"),
    ]


def test_other_processes_and_a_run_without_bars_show_none(capsys):
    """The function that moves a bar can be called anyway."""
    for phases in (Phases(Console(quiet=True)), Phases(Console(), bars=False)):
        if phases.console.quiet:
            phases.begin("evaluating")
        with phases.bar(3, "row") as moved:
            moved(3)
    printed = capsys.readouterr()
    assert printed.out == printed.err == ""
    with Phases(Console()).bar(3, "row") as moved:
        moved(2)
    assert "0/3" in capsys.readouterr().err


def test_units_to_train_on_and_held_out_are_counted_alike():
    """Users beside users; the records only follow."""
    records = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "who": ["x", "y", "x"]})
    users = PrivacyConfig(
        target_epsilon=8, clip_norm=1, expected_batch_size=2, unit="user", unit_column="who", max_rows_per_unit=4
    )
    single = PrivacyConfig(target_epsilon=8, clip_norm=1, expected_batch_size=2)
    assert read_words(1437, records, users) == "1,437 users to train on, 2 users held out, with 3 records"
    assert read_words(437, records.remove_columns("who"), users) == "437 users to train on; 3 records held out"
    assert read_words(437, records, single) == "437 records to train on, 3 records held out"
    assert read_words(437, None, users) == "437 users to train on"
