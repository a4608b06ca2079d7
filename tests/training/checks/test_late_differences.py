"""Rows that differ first after step 8 of a process are an open point of the report, and the run goes on."""

import logging
import random
import re

import pytest
import torch

from dpllm import PrivateRun, per_sequence_loss
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.report.model_card import settle
from dpllm.report.publishing import PublishError, require_publishable
from dpllm.report.verify import verify
from dpllm.training.checks.independence import IndependenceError
from tests.mutations import kills
from tests.training.checks.test_independence import llama, lm_loss, rows_of, trainer, unequal
from tests.training.test_run import plan_of
from tests.training.test_trainer import privacy
from tests.training.test_trainer_outputs import settled

POINT = "The check of rows before step 16 since the start or resume found that the loss of a row alone and in a batch"
DISCLOSED = "losses of single rows, in an error message"


def coupled(loss_B):
    return loss_B + 10 * loss_B.mean().detach()


def late_points(report):
    return [one for one in report["open_points"] if "since the start or resume" in one]


def run_of(folder, steps, begins):
    """A trainer whose loss couples rows from a step on."""

    def loss(outputs, labels, num_items_in_batch=None):
        loss_B = per_sequence_loss(outputs.logits, labels)
        return coupled(loss_B) if run.state.global_step + 1 >= begins else loss_B

    config = privacy(expected_batch_size=8, dataset="notes")
    run = trainer(folder, llama(), steps=steps, config=config, compute_loss_func=loss)
    run.notes = settled()
    return run


@kills(
    "rows that differ late raise no question",
    "dpllm/training/checks/independence.py",
    "        self.points.append(point)\n",
    "",
)
def test_a_run_whose_rows_differ_first_after_step_8_ends_with_one_open_point(tmp_path, caplog):
    """Found before steps 16 and 32 and the last one. Push refuses until people have answered the point."""
    run = run_of(tmp_path, steps=34, begins=12)
    with caplog.at_level(logging.WARNING, logger="dpllm"):
        run.train()
    run.save_model()
    assert len([one for one in caplog.records if POINT in one.getMessage()]) == 1
    ledger = read_ledger(tmp_path / LEDGER_FILE)
    assert ledger.num_steps == 34 and DISCLOSED not in ledger.disclosures
    report = run.privacy_report()
    (point,) = late_points(report)
    assert point.startswith(POINT) and re.findall(r"\d+", point) == ["16", "8"], "no loss, and no other figure of rows"
    assert [check for check in verify(tmp_path).checks if not check.ok] == []
    with pytest.raises(PublishError, match="resume found"):
        require_publishable(tmp_path)
    settle(tmp_path, dict.fromkeys(report["open_points"], "The warm-up of the loss ends there."), "A. Meyer")
    require_publishable(tmp_path)


@kills(
    "rows that differ in the first steps are only an open point",
    "dpllm/training/checks/independence.py",
    "                if self._must_pass:\n",
    "                if False:\n",
)
@pytest.mark.parametrize("begins", [1, 2, 4, 7])
def test_rows_that_differ_in_the_first_8_steps_are_refused(begins, tmp_path):
    run = run_of(tmp_path, steps=20, begins=begins)
    with pytest.raises(IndependenceError, match="of a row depends on other rows"):
        run.train()
    ledger = read_ledger(tmp_path / LEDGER_FILE)
    assert ledger.num_steps == {1: 1, 2: 2, 4: 4, 7: 8}[begins] and ledger.disclosures[DISCLOSED] == 1


def loop(folder, run, model, steps, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.attach(model, optimizer)
    for number, unit_ids in enumerate(run.draws(steps), start=1):
        run.step(unit_ids, lambda model, inputs, number=number: loss_of(number, model, inputs))
        optimizer.step()
        optimizer.zero_grad()


def test_a_resumed_process_counts_again(tmp_path):
    """Its first step is checked as completely as the first of the run, and a difference there is an error."""
    plan, rows, model = plan_of(num_steps=24), rows_of(unequal(plan_of().population).to_list()), llama()

    def differs_from(first):
        return lambda number, model, inputs: (
            coupled(lm_loss(model, inputs)) if number >= first else lm_loss(model, inputs)
        )

    run = PrivateRun.start(tmp_path, plan, rows)
    loop(tmp_path, run, model, 18, differs_from(15))
    assert run.ledger.num_steps == 18 and run.row_differences.loss > run.row_differences.tolerance
    run.detach()
    run.ledger.close()
    run = PrivateRun.resume(tmp_path, plan, rows)
    with pytest.raises(IndependenceError, match="of a row depends on other rows"):
        loop(tmp_path, run, model, 2, differs_from(1))
    run.detach()
    run.ledger.close()
    points = [one for one in read_ledger(tmp_path / LEDGER_FILE).notes.open_points if "since the start" in one]
    assert len(points) == 1


def test_a_refusal_of_the_first_steps_is_repeated_after_them(tmp_path):
    """A loop that catches it takes no step until a check has passed, also beyond step 8."""
    plan, model, taken = plan_of(num_steps=12), llama(), []
    run = PrivateRun.start(tmp_path, plan, rows_of(unequal(plan.population).to_list()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.attach(model, optimizer)
    for number, unit_ids in enumerate(run.draws(12), start=1):

        def loss_of(model, inputs, number=number):
            loss_B = lm_loss(model, inputs)
            return coupled(loss_B) if 7 <= number <= 10 else loss_B

        try:
            run.step(unit_ids, loss_of)
        except IndependenceError:
            continue
        optimizer.step()
        optimizer.zero_grad()
        taken.append(number)
    assert taken == [1, 2, 3, 4, 5, 6, 7, 11, 12]
    run.detach()
    run.ledger.close()


def test_a_late_finding_of_another_kind_is_an_open_point_too(tmp_path):
    """Random numbers that rows share: the message of the error names figures of rows, and the point does not."""
    drawn = []

    def loss(outputs, labels, num_items_in_batch=None):
        loss_B = per_sequence_loss(outputs.logits, labels)
        if run.state.global_step + 1 < 12:
            return loss_B
        drawn.append(1)
        return loss_B * (1 + random.random())

    run = trainer(tmp_path, llama(), steps=17, compute_loss_func=loss)
    run.train()
    (point,) = late_points(run.privacy_report())
    assert drawn and "rows of a microbatch were not independent of each other" in point
