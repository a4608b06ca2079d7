"""A step that an error or Ctrl-C breaks off, caught by a loop that goes on."""

import pytest
import torch

from tests.scarce import BreaksOff
from tests.training.test_run import attached, loss_of, plan_of

pytestmark = pytest.mark.usefixtures("rows_not_compared")

FAILS = 2  # the third step has no check of the rows before it


@pytest.mark.parametrize(
    ("within", "error"),
    [
        ("loss_of", KeyboardInterrupt()),
        ("run", KeyboardInterrupt()),
        ("collect", KeyboardInterrupt()),
        ("collect", torch.OutOfMemoryError("none left")),
        ("_add_noise_", RuntimeError("a fault")),  # it was said to come from another process
    ],
    ids=repr,
)
def test_nothing_of_a_step_that_was_broken_off_goes_into_another(within, error, tmp_path):
    """A layer stayed out of training after Ctrl-C, and the next step said that somebody had frozen it."""
    run, model, optimizer = attached(tmp_path, plan_of(num_steps=6))
    for number, unit_ids in enumerate(run.draws(FAILS + 2)):
        if number == FAILS:
            with (
                pytest.raises(type(error), match=f"^{error}$"),
                BreaksOff(1 if within == "_add_noise_" else 3, error, within),
            ):
                run.step(unit_ids, loss_of)
            assert all(p.requires_grad for p in model.parameters())
        elif number > FAILS:
            with pytest.raises(ValueError, match="failed half-way"):
                run.step(unit_ids, loss_of)
        else:
            run.step(unit_ids, loss_of)
            optimizer.step()
        optimizer.zero_grad()
    run.detach()
    assert run.ledger.num_steps == FAILS + 2
