"""The part of a use that belongs to this process's slice of a parameter; several processes are in tests/distributed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dpllm.config import ConfigError
from dpllm.engines import EngineError, TensorParallel
from dpllm.ghost.contributions import Lookup, Outer, RowGradients, Rows
from dpllm.ghost.errors import GhostError
from dpllm.ghost.shards import Part
from dpllm.training.trainer_run import TrainerRun

ROWS, TOKENS, FIRST, SECOND = 3, 4, 7, 5


def randn(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


USES = {
    "outer": Outer(randn(ROWS, TOKENS, FIRST), randn(ROWS, TOKENS, SECOND), "right"),
    "lookup": Lookup(torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % FIRST, randn(ROWS, TOKENS, SECOND), FIRST),
    "rows": RowGradients(randn(ROWS, FIRST, SECOND)),
}


@pytest.mark.parametrize("kind", USES)
@pytest.mark.parametrize(("dim", "size"), [(0, FIRST), (1, SECOND)])
def test_a_use_of_a_whole_parameter_is_cut_to_the_slice(kind, dim, size):
    """Gathered outputs and vocabulary-parallel tables: of the whole gradient, each process keeps its entries."""
    rows, use = Rows.of(torch.tensor([0, 0, 1]), 2), USES[kind]
    for start, length in ((0, 3), (3, size - 3)):
        shape = [FIRST, SECOND]
        shape[dim] = length
        local = Part(tuple(shape), dim, start, size).local("weight", use)
        expected = use.instance(rows).narrow(dim + 1, start, length)
        assert torch.equal(local.instance(rows), expected) and expected.any()
        assert Part(tuple(shape), dim, start, size).local("weight", local) is local  # a use of the slice itself


def test_a_use_of_something_else_is_refused():
    """Neither the slice nor the whole: the norm would be that of another gradient."""
    with pytest.raises(GhostError, match=r"weight: this process holds a part of shape \(3, 5\), and the gradient"):
        Part((3, SECOND), 0, 0, FIRST - 1).local("weight", USES["outer"])


def test_processes_beside_those_that_hold_the_model_are_refused():
    """Data parallelism beside tensor parallelism was not compared with one process."""
    shards = SimpleNamespace(size=2)
    with pytest.raises(EngineError, match="divides the model over 2 of 1 processes"):
        TensorParallel(shards, {"weight": nn.Parameter(torch.zeros(1))}, None)


def test_the_trainer_is_refused():
    """It divides rows and saves as if each process had a model of its own."""
    run = TrainerRun.__new__(TrainerRun)
    run.is_attached, run._checkpoint, run.averaging = False, None, None
    run._prepared = SimpleNamespace(attach=lambda *_: None)
    run.private = SimpleNamespace(engine_name="TensorParallel")
    with pytest.raises(ConfigError, match=r"Use dpllm\.PrivateRun with a loop of your own"):
        run.attach(None, None, by_deepspeed=False, loss_of=None)
    assert not run.is_attached
