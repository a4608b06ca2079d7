"""Processes at different points of a run, or with other units, find this in the next comparison and stop."""

import numpy as np
import pytest

from dpllm.engines.processes import DisagreementError
from dpllm.training.draws import Draws
from tests.memory_ledger import MemoryLedger
from tests.mutations import kills
from tests.training.test_run import plan_of


class Two:
    """Two processes as this one sees them: the other one's numbers are this one's, with some changed.

    Args:
        changes: place in the numbers to what the other process says there.
    """

    size, is_main = 2, True

    def __init__(self, changes=None):
        self.changes = changes or {}

    def gather_numbers(self, values):
        other = list(values)
        for place, value in self.changes.items():
            other[place] = value
        return [list(values), other]

    def gather(self, value):
        return [value, "evaluation mode"]

    def raise_found(self, error, flags):
        assert error is None and not any(flags)


UNITS = np.arange(5)


def draws_of(processes, num_steps=0):
    """The draws of a run after so many charged steps."""
    ledger = MemoryLedger()
    ledger.num_steps = num_steps
    return Draws(plan_of(), ledger, processes, iter(()))


@kills(
    "the processes' places in the run are not compared",
    "dpllm/training/draws.py",
    "        if any(one[:2] != everywhere[0][:2] for one in everywhere):\n",
    "        if False:\n",
)
@pytest.mark.parametrize(
    ("call", "changes", "says"),
    [
        ("end", {0: 1.0}, "rank 0: ends the run, where step 4 is next, rank 1: draws the units of step 4"),
        ("save", {0: 4.0}, "rank 0: checks the weights before a save or the end, .* rank 1: ends the run"),
        ("end", {0: 9.0}, "rank 1: makes another call"),
    ],
)
def test_a_process_that_stops_by_itself_stops_all(call, changes, says):
    """Each of them gets the same line, with the remedy."""
    with pytest.raises(DisagreementError, match=rf"{says}.*decide on a stop on one process"):
        getattr(draws_of(Two(changes)), call)(3)
    getattr(draws_of(Two()), call)(3)


@kills(
    "the processes' units are not compared",
    "dpllm/training/draws.py",
    "            if any(one[part] != everywhere[0][part] for one in everywhere):\n",
    "            if False:\n",
)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({1: 4.0}, "rank 0: takes step 4, rank 1: takes step 5"),
        ({2: 6.0}, "differ in the units of this step"),
        ({4: 1.0}, "differ in the units of this step"),
        ({5: 1.0}, r"differ in autocast or training mode \(rank 0: training, rank 1: evaluation mode\)"),
    ],
)
def test_processes_that_take_other_units_or_another_mode_stop_before_the_step(changes, says):
    """As many units, but others, and the same units under other settings."""
    with pytest.raises(DisagreementError, match=says):
        draws_of(Two(changes), num_steps=4).take(UNITS, "training", None)
