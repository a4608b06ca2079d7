"""The innermost optimizer is found inside its wrappers."""

import pytest
import torch
from accelerate import Accelerator

from dpllm.engines.optimizers import innermost
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
