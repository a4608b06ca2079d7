"""The largest microbatch that fits: a search over trials on known memory, and its use by a run."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.private_folder import read_diagnostics
from dpllm.training import run as private_run
from dpllm.training.microbatches import RowsTaken
from dpllm.training.out_of_memory import (
    TOKENS_WITHOUT_MEASURE,
    MicrobatchTooLargeError,
    largest_that_fits,
    needed_later,
    rows_that_fit,
)
from dpllm.training.run import PrivateRun
from tests.scarce import Gate, more_than
from tests.training.test_run import flat, ledger_of, loss_of, network, plan_of, rows_of

DEVICE = 2000
"""Bytes of the device beyond which memory runs out, where a test does not say otherwise."""


class Trials:
    """Peaks by a formula, and the numbers of rows that were tried."""

    def __init__(self, peak, device=DEVICE):
        self.peak, self.device, self.asked = peak, device, []

    def __call__(self, rows):
        self.asked.append(rows)
        peak = int(self.peak(rows))
        return peak if peak <= self.device else None


@pytest.mark.parametrize(("base", "slope"), [(0, 1), (100, 3), (900, 17), (500, 400)])
@pytest.mark.parametrize("device", [DEVICE, 1800])
def test_linear_memory_is_predicted_exactly(base, slope, device):
    """From two small trials, few more are needed, and none runs out of memory."""
    trials = Trials(lambda rows: base + slope * rows, device)
    assert largest_that_fits(trials, 1800, 10_000) == pytest.approx((1800 - base) // slope, rel=0.06)
    assert trials(trials.asked[-1]) is not None and len(trials.asked) <= 8


@pytest.mark.parametrize(
    "peak",
    [
        lambda rows: 100 + rows**2,
        lambda rows: 100 + 10 * rows + (600 if rows > 40 else 0),  # a kernel with its own workspace
        lambda rows: 100 + 40 * -(-rows // 8),  # in blocks: two small trials tell nothing about growth
        lambda rows: 1000 + 30 * rows**0.5,
        lambda rows: 100 + 1701 * (rows > 77),
    ],
)
@pytest.mark.parametrize("device", [DEVICE, 1800, 10**9])
def test_other_growth_is_searched(peak, device):
    """The result was tried and fits, and at most a tenth more would; whether excess shows as a peak or a shortage."""
    trials = Trials(peak, device)
    found = largest_that_fits(trials, 1800, 400)
    best = max(rows for rows in range(1, 401) if peak(rows) <= 1800)
    assert found in trials.asked and peak(found) <= 1800
    assert found >= best / 1.1 - 1
    assert len(trials.asked) <= 13


@pytest.mark.parametrize(
    ("peak", "most", "expected"),
    [
        (lambda rows: 2001, 9, 0),  # memory runs out on one row
        (lambda rows: 1900, 9, 1),  # one row runs, though within the margin
        (lambda rows: 1000 * rows, 9, 1),
        (lambda rows: 900 * rows, 9, 2),
        (lambda rows: rows, 1, 1),
        (lambda rows: rows, 2, 2),
        (lambda rows: rows, 37, 37),
        (lambda rows: 5, 37, 37),  # no growth that could be measured
    ],
)
def test_the_ends_of_the_search(peak, most, expected):
    """One row, none, or all that a batch has; never more than `most`."""
    trials = Trials(peak)
    assert largest_that_fits(trials, 1800, most) == expected
    assert max(trials.asked) <= most


def test_what_is_needed_later_is_kept_free():
    """Float32 sums and two values per entry for the optimizer, less the state it already holds."""
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    before = needed_later(model.parameters(), optimizer)
    assert before == 20 * (4 + 8)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert before - needed_later(model.parameters(), optimizer) == pytest.approx(20 * 8, abs=16)
    assert needed_later(model.bfloat16().parameters(), None) == 20 * (4 + 4)


class Counted:
    """A device on which every token that a gate lets through takes 10 bytes, on top of 100."""

    def __init__(self, gate, capacity):
        self.gate, self.capacity = gate, capacity

    def reset_peak(self):
        self.gate.passed.clear()

    def peak(self):
        return 100 + 10 * max(tokens for _, tokens in self.gate.passed)


def gated(refuse=lambda direction, tokens: False):
    model, gate = network(), Gate(refuse)
    model.insert(1, gate)
    return model, gate


def longest(count):
    rows = RowsTaken([torch.ones(7)] * count, np.ones(count, dtype=np.int64), lambda some: {"rows": torch.stack(some)})
    return rows.microbatch(np.arange(count), count)


@pytest.mark.grid(1)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("limit", "expected"), [(10**6, 40), (25, 25), (1, 1), (0, 0)])
def test_trials_of_a_model_leave_nothing_behind(limit, expected, direction):
    """By measure up to 40 rows, or by the shortage at fewer; no gradient, no contribution, no parameter is touched."""
    model, gate = gated(more_than(limit, direction))
    before = flat(model)
    clipper = GhostClipper(model, 0.5)
    found = rows_that_fit(clipper, lambda inputs: loss_of(model, inputs), longest, Counted(gate, 500), 1000)
    assert found == expected or (limit == 25 and 23 <= found <= 25)
    assert all(p.grad is None and p.requires_grad for p in model.parameters()) and torch.equal(flat(model), before)
    assert clipper._pass is None and not clipper._held
    assert clipper.rows_checked == (found > 1)
    clipper.remove()


def known(memory):
    """A device whose memory is known, while the block lasts."""
    return mock.patch.object(private_run, "memory_of", lambda device, needed_later: memory)


def run_on(folder, model, memory=None, max_tokens="auto"):
    """Return a run of two noiseless steps over all units, its diagnostics, and the change of the weights."""
    plan = plan_of(noise_multiplier=0.0)
    rows = dataclasses.replace(rows_of(), max_rows=None, max_tokens=max_tokens)
    folder.mkdir()
    run = PrivateRun(plan, rows, ledger_of(folder, plan))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    before, done = flat(model), []
    with known(memory):
        for _ in range(2):
            done.append(run.step(run.choose(np.arange(30)), loss_of))
            optimizer.step()
            optimizer.zero_grad()
    return run, done, flat(model) - before


def test_auto_takes_what_fits_and_moves_the_parameters_as_any_budget(tmp_path):
    """The trials change neither the update nor the charge."""
    _, _, expected = run_on(tmp_path / "given", gated()[0], max_tokens=22)
    model, gate = gated()
    run, done, moved = run_on(tmp_path / "auto", model, Counted(gate, 100 + 10 * 9))
    assert run.max_tokens == 9 * 11  # nine rows of the longest
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-7)
    contents = read_ledger(run.ledger.path)
    assert contents.num_steps == 2 and not read_diagnostics(run.ledger.path.parent) and done[0].num_divided == 0


def test_auto_on_a_cpu_is_a_fixed_number(tmp_path):
    """No trial is made."""
    with mock.patch.object(private_run, "rows_that_fit", side_effect=AssertionError("a trial")):
        run, _, _ = run_on(tmp_path / "run", gated()[0])
    assert run.max_tokens == TOKENS_WITHOUT_MEASURE


def test_auto_is_no_larger_than_a_share_of_an_expected_batch(tmp_path):
    """8 of 40 units with 79 rows are expected: 16 rows."""
    model, gate = gated()
    run, _, _ = run_on(tmp_path / "run", model, Counted(gate, 10**6))
    assert run.max_tokens == 16 * 11


def test_auto_without_room_for_one_row_charges_its_draw_only(tmp_path):
    """It is refused before the first step."""
    model, gate = gated(more_than(0))
    with pytest.raises(MicrobatchTooLargeError, match=r"one row, the longest.*max_length"):
        run_on(tmp_path / "run", model, Counted(gate, 10**6))
    assert read_ledger(tmp_path / "run" / LEDGER_FILE).num_steps == 1


def test_steps_after_a_shortage_are_cut_smaller(tmp_path):
    """The budget is halved once, the ledger lists it among the figures that are not private; the update is equal."""
    _, _, expected = run_on(tmp_path / "given", gated()[0], max_tokens=22)
    model, _ = gated(more_than(16))
    run, done, moved = run_on(tmp_path / "run", model, max_tokens=2000)
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-7)
    assert done[0].num_divided > 0 and done[1].num_divided == 0
    assert run.max_tokens == done[0].max_tokens < 2000 and done[1].max_tokens is None
    diagnostics = read_diagnostics(run.ledger.path.parent)
    assert diagnostics == {"microbatches taken again in halves for lack of memory": done[0].num_divided}
