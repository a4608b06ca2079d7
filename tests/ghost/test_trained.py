"""The trainable parameters have one name, one group and one place each."""

import pytest
import torch
from torch import nn

from dpllm.ghost import GhostError
from dpllm.ghost.groups import one_group
from dpllm.ghost.trained import TrainedParameters


def model():
    """Two layers with one weight, and a frozen layer."""
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    net["b"].weight = net["a"].weight
    net["frozen"].requires_grad_(False)
    return net


def test_a_shared_parameter_is_one_and_a_frozen_one_is_none():
    """A tied weight has one norm, so it must have one name and one group."""
    net = model()
    trained = TrainedParameters(net, lambda shapes: [[name] for name in shapes])
    assert list(trained.by_name) == ["a.weight", "a.bias", "b.bias"] and trained.num_groups == 3
    assert trained.name_of(net["b"].weight) == "a.weight"
    assert trained.groups[id(net["b"].weight)] == 0 and id(net["frozen"].weight) not in trained.groups
    assert not trained.sharded


def test_norms_add_up_in_the_widest_dtype_at_the_time():
    """A model that is converted after the clipper was attached keeps its precision."""
    net = model()
    trained = TrainedParameters(net, one_group)
    assert trained.norm_dtype == torch.float32
    net["b"].bias.data = net["b"].bias.data.double()
    assert trained.norm_dtype == torch.float64


def test_a_parameter_without_a_gradient_or_used_in_the_loss_is_named():
    """Its norm would be missing from the unit's."""
    net = model()
    trained = TrainedParameters(net, one_group)
    seen = {id(p) for p in trained.by_name.values()}
    trained.refuse_missing(seen)
    with pytest.raises(GhostError, match=r"first is b\.bias"):
        trained.refuse_missing(seen - {id(net["b"].bias)})
    trained.refuse_uses_in_loss(torch.ones(1, requires_grad=True) * 2)
    with pytest.raises(GhostError, match=r"a\.weight is used by the loss outside"):
        trained.refuse_uses_in_loss(net["b"].weight.sum(1))
