"""A run is resumed on the rows that it was started with, or says that nobody could tell."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from dpllm.data.units import UnitIndex
from dpllm.privacy.ledger import LedgerError, read_ledger
from dpllm.privacy.run_folder import DIGEST, KEY_FILE
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun
from tests.mutations import kills
from tests.training.test_run import loss_of, network, plan_of, rows_of
from tests.training.test_trainer import arguments, rows, trainer

pytestmark = pytest.mark.usefixtures("rows_not_compared")

LEDGER = "privacy_ledger.jsonl"


def started(folder, steps=1):
    """A run of its own loop that ended early."""
    run = PrivateRun.start(folder, plan_of(), rows_of())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for units in run.draws(steps):
        run.step(units, loss_of)
        optimizer.step()
        optimizer.zero_grad()
    run.finish()


def other_rows():
    """As many, of the same lengths and the same people."""
    made = rows_of()
    return dataclasses.replace(made, fetch=lambda numbers: [row + 1 for row in made.fetch(numbers)])


def points(folder):
    return read_ledger(folder / LEDGER).notes.open_points


@kills(
    "the rows of a resumed run are not compared",
    "dpllm/privacy/run_folder.py",
    "    if not hmac.compare_digest(str(noted[-1]), _digest(key, contents)):\n",
    "    if False:\n",
)
def test_other_rows_of_the_same_number_are_refused_and_nothing_is_written(tmp_path):
    """Another text with as many rows, of the same lengths."""
    started(tmp_path)
    before = (tmp_path / LEDGER).read_bytes()
    with pytest.raises(LedgerError, match="differ from those"):
        PrivateRun.resume(tmp_path, plan_of(), other_rows())
    assert (tmp_path / LEDGER).read_bytes() == before


def test_the_same_rows_are_resumed_without_an_open_point(tmp_path):
    """Several times."""
    started(tmp_path)
    for _ in range(2):
        PrivateRun.resume(tmp_path, plan_of(), rows_of()).finish()
    assert not [point for point in points(tmp_path) if "could not be compared" in point]
    assert len(read_ledger(tmp_path / LEDGER).notes.facts[DIGEST]) == 1


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_without_the_key_it_is_an_open_point_once_and_compared_again_later(damage, tmp_path):
    """A folder that was copied without the files that are not for release."""
    started(tmp_path)
    key = tmp_path / KEY_FILE
    key.unlink() if damage == "missing" else key.write_text("no key")
    PrivateRun.resume(tmp_path, plan_of(), other_rows()).finish()
    (point,) = [point for point in points(tmp_path) if "could not be compared with those of its first start" in point]
    assert KEY_FILE in point
    with pytest.raises(LedgerError, match="differ from those"):
        PrivateRun.resume(tmp_path, plan_of(), rows_of())


def test_a_ledger_without_a_digest_is_an_open_point(tmp_path):
    """One of a run that crashed before it noted the rows."""
    started(tmp_path)
    path = tmp_path / LEDGER
    lines = path.read_text().splitlines(keepends=True)
    kept = next(number for number, line in enumerate(lines) if DIGEST in line)
    path.write_text("".join(lines[:kept]))  # the chain of the remaining lines holds
    (tmp_path / "privacy_report.json").unlink()
    PrivateRun.resume(tmp_path, plan_of(), rows_of()).finish()
    assert any("its ledger holds no digest of them" in point for point in points(tmp_path))


def test_the_key_is_secret_and_of_one_run(tmp_path):
    """Two runs on one data set have different digests: neither reveals that they share it, nor a text in it."""
    digests = []
    for name in ("a", "b"):
        started(tmp_path / name)
        key = tmp_path / name / KEY_FILE
        assert key.stat().st_mode & 0o077 == 0 and re.fullmatch("[0-9a-f]{64}\n", key.read_text())
        digests += read_ledger(tmp_path / name / LEDGER).notes.facts[DIGEST]
        assert key.read_text().strip() not in (tmp_path / name / LEDGER).read_text()
    assert len(set(digests)) == 2


def test_the_trainer_refuses_other_text_of_the_same_number(tmp_path):
    """As a recipe with another file would be resumed."""
    trainer(tmp_path, args=arguments(tmp_path, max_steps=2, save_steps=1, save_strategy="steps")).train()
    other = rows().map(lambda row: {"input_ids": row["input_ids"][::-1], "labels": row["labels"][::-1]})
    again = trainer(tmp_path, dataset=other, args=arguments(tmp_path, max_steps=2))
    with pytest.raises(LedgerError, match="differ from those"):
        again.train(resume_from_checkpoint=True)


def test_random_numbers_of_transforms_and_collators_make_no_other_rows():
    """Two processes, or a run and its resume, are at different places of their generators."""

    def fetch(numbers):
        return [{"input_ids": [int(number), int(np.random.randint(99))]} for number in numbers]

    def collate(rows):
        return {"input_ids": torch.tensor([row["input_ids"] for row in rows]), "mask": torch.rand(len(rows), 2)}

    units = UnitIndex.one_row_per_unit(5)
    facts = [TrainingRows(units, np.full(5, 2), fetch, collate, max_rows=2).facts() for _ in range(2)]
    assert facts[0] == facts[1]
