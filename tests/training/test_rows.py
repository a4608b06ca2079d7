"""Rows of another kind are refused in one line."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from dpllm import GhostClipper, GhostError
from dpllm.config import ConfigError, PrivacyConfig
from dpllm.data.units import UnitIndex
from dpllm.privacy.ledger import LedgerError
from dpllm.privacy.plan import make_plan
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun

TEXT = [[token % 7, 1, 2] for token in range(40)]


@cache
def small_plan():
    config = PrivacyConfig(noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=8)
    return make_plan(config, num_units=40, num_steps=4)


def rows_of(**change):
    fields = {
        "units": UnitIndex.one_row_per_unit(40),
        "lengths": np.full(40, 3),
        "fetch": lambda numbers: [torch.tensor(TEXT[int(number)]).float() for number in numbers],
        "collate": lambda rows: {"rows": torch.stack(rows)},
        "max_rows": 8,
    }
    return TrainingRows(**{**fields, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"units": None}, "units is of type NoneType"),
        ({"lengths": [3] * 40}, "lengths is of type list"),
        ({"lengths": torch.full((40,), 3)}, "lengths is of type Tensor"),
        ({"lengths": np.full((40, 1), 3)}, r"lengths is an array of int64, shape \(40, 1\)"),
        ({"lengths": np.full(40, 3.0)}, "lengths is an array of float64"),
        ({"lengths": np.full(20, 3)}, "20 lengths, but units names 40 rows"),
        ({"fetch": TEXT}, "fetch is of type list"),
        ({"collate": None}, "collate is of type NoneType"),
    ],
)
def test_a_field_of_another_kind_is_refused_in_one_line(change, says):
    """With the remedy, when the rows are made."""
    with pytest.raises(ConfigError, match=says) as raised:
        rows_of(**change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fetch", "says"),
    [
        (lambda numbers: TEXT[numbers], r"fetch failed for a row number \(TypeError: .*fetch=lambda numbers"),
        (lambda numbers: {"input_ids": [1], "labels": [1]}, "returned a dict with the keys input_ids, labels, not one"),
        (lambda numbers: [], "fetch returned a list, not one row"),
    ],
    ids=["a list", "columns of a data set", "no row"],
)
def test_a_fetch_of_another_kind_is_refused_before_the_folder_is_made(fetch, says, tmp_path):
    """No ledger, and so no budget, is begun."""
    with pytest.raises(ConfigError, match=says):
        PrivateRun.start(tmp_path / "run", small_plan(), rows_of(fetch=fetch))
    assert not (tmp_path / "run" / "privacy_ledger.jsonl").exists()


def begun(folder, **change):
    model = nn.Linear(3, 1)
    run = PrivateRun.start(folder, small_plan(), rows_of(**change))
    return run, model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_collator_that_returns_a_tensor_is_refused_in_one_line(tmp_path):
    """It returns the inputs by name. Nothing is charged."""
    with pytest.raises(ConfigError, match="Tensor"):
        begun(tmp_path / "run", collate=torch.stack)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_an_optimizer_that_is_none_is_refused_in_one_line(tmp_path):
    """The run has ended, as after other errors of attach."""
    run, model, _ = begun(tmp_path / "run")
    with pytest.raises(ConfigError, match="NoneType"):
        run.attach(model, None)


@pytest.mark.parametrize("loss", [None, {"loss": 1.0}])
def test_a_loss_that_is_no_tensor_is_refused_in_one_line(loss):
    """A loss function that returns nothing, or the model's output."""
    clipper = GhostClipper(nn.Linear(3, 1), clip_norm=1.0)
    with pytest.raises(GhostError, match="a tensor with one loss per row"):
        clipper.backward(loss)


def test_a_run_is_finished_once_and_a_resume_beside_it_names_the_process(tmp_path):
    """In a notebook, the run that an error left is finished first; then the folder is free."""
    run, model, optimizer = begun(tmp_path / "run")
    run.attach(model, optimizer)
    next(run.draws(1))
    with pytest.raises(LedgerError, match="call finish"):
        PrivateRun.resume(tmp_path / "run", small_plan(), rows_of())
    run.finish("failed")
    with pytest.raises(LedgerError, match=r"already ended with finish\(\)"):
        run.finish()
    again = PrivateRun.resume(tmp_path / "run", small_plan(), rows_of())
    assert again.ledger.num_steps == 1
    again.finish("failed")


def test_rows_are_replaced_with_the_same_checks():
    """`dataclasses.replace` makes the object again."""
    with pytest.raises(ConfigError, match="type list"):
        dataclasses.replace(rows_of(), lengths=[1])
