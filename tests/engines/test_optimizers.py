"""The innermost optimizer is found inside its wrappers, and one that cannot take a private step is refused."""

import pytest
import torch
from accelerate import Accelerator

from dpllm.engines.guard import EngineError, innermost, refuse_unsteppable
from dpllm.training.checks.agreement import computation


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_processes_compare_the_optimizer_that_updates(kind):
    """Not accelerate's wrapper, which is an optimizer of the same class around any."""
    model = torch.nn.Linear(2, 2)
    inside = kind(model.parameters(), lr=0.1)
    wrapped = Accelerator(cpu=True).prepare_optimizer(inside)
    assert wrapped is not inside and innermost(wrapped) is inside
    assert computation(model, wrapped) == computation(model, inside)
    assert kind.__name__ in computation(model, wrapped)["the optimizer"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (torch.optim.LBFGS, r"step\(\) of LBFGS needs the argument closure"),
        (torch.optim.SparseAdam, "SparseAdam takes only sparse gradients"),
    ],
)
def test_an_optimizer_that_cannot_take_a_private_step_is_refused(kind, says):
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))])
    for one in (optimizer, Accelerator(cpu=True).prepare_optimizer(optimizer)):
        with pytest.raises(EngineError, match=says):
            refuse_unsteppable(one)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "AdamW", "Adamax", "Adafactor", "RMSprop", "Rprop", "Muon"])
def test_other_optimizers_of_pytorch_are_none(name):
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2, 2))])
    optimizer_with_schedule = torch.optim.lr_scheduler.ConstantLR(optimizer).optimizer  # it wraps step()
    refuse_unsteppable(optimizer_with_schedule)
