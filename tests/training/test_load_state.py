"""An optimizer that holds other parameters than the checkpoint's is refused: none begins again without a word."""

import pytest
import torch
from torch import nn

from dpllm.engines.processes import Processes
from dpllm.privacy.checkpoints import CheckpointError
from dpllm.training.continued_trainer import load_optimizer
from tests.mutations import kills

NAMES = ["first.weight", "second.weight"]


class Saved:
    """The state of a checkpoint after five steps.

    Args:
        options: of a group.
        groups: the parameters of each group.
        without: a parameter that has no state.
    """

    def __init__(self, options, groups, without=None):
        self.groups = [(group, options) for group in groups]
        self._without = without

    def state(self, name):
        moments = {"step": torch.tensor(5.0), "exp_avg": torch.ones(3, 3), "exp_avg_sq": torch.ones(3, 3)}
        return {} if name == self._without else moments

    def dtype(self, name):
        return torch.float32

    def weight(self, name):
        return torch.zeros(3, 3)


def load(groups, without=None):
    """Continue with one group for each of two parameters; return the steps of both."""
    model = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False), "second": nn.Linear(3, 3, bias=False)})
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [parameters[name]]} for name in NAMES], lr=0.1)
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    saved = Saved(options, groups, without)
    load_optimizer(saved, model, optimizer, [[name] for name in NAMES], None, Processes())
    return [float(optimizer.state[parameters[name]]["step"]) for name in NAMES]


def test_groups_are_found_by_their_parameters():
    """In any order."""
    assert load([NAMES[1:], NAMES[:1]]) == [5.0, 5.0]


@kills(
    "parameters without a state in the checkpoint begin again",
    "dpllm/training/continued_trainer.py",
    "        _require_same(saved, names)\n",
    "",
    case="without1",
)
@pytest.mark.parametrize(("groups", "without"), [([NAMES[:1]], None), ([NAMES[:1], NAMES[1:]], NAMES[1])])
def test_a_parameter_that_would_begin_again_is_refused(groups, without):
    """A group more than the checkpoint has, or a parameter that has no state in it."""
    with pytest.raises(CheckpointError, match=r"second\.weight"):
        load(groups, without)
