"""The parameters that a clipper trains stay those that it was made for."""

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, PerUnitClipper
from dpllm.ghost import GhostError


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def unfreeze(net):
    net[0].requires_grad_(True)


def add(net):
    net[1].extra = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(("change", "name"), [(unfreeze, r"0\.weight"), (add, r"1\.extra")], ids=["unfrozen", "added"])
def test_a_parameter_that_becomes_trainable_later_is_refused_in_a_loop_of_ones_own(change, name):
    """Layers that are unfrozen one after another would get gradients that are neither clipped nor given noise."""
    net, x = stack(), torch.randn(3, 2, 4)
    net[0].requires_grad_(False)
    clipper = GhostClipper(net, 1e-3)
    clipper.backward(net(x).square().sum((1, 2)))
    net.zero_grad()
    change(net)
    losses = net(x).square().sum((1, 2))
    with pytest.raises(GhostError, match=f"{name} was unfrozen or added after"):
        clipper.backward(losses)
    assert all(p.grad is None for p in net.parameters())
    clipper.remove()
    again = GhostClipper(net, 1e-3)
    assert net[0].weight.requires_grad == (change is unfreeze) == ("0.weight" in again.parameters)


@pytest.mark.parametrize("call", [1, 2])
def test_a_head_within_the_loss_is_refused_in_a_loop_of_ones_own(call):
    """Its optimizer would receive raw gradients; a frozen head, or one that is a part of the model, is allowed."""
    net, head, x = stack(), nn.Linear(4, 1), torch.randn(3, 2, 4)
    clipper = GhostClipper(net, 1e-3)
    for _ in range(call - 1):
        clipper.backward(net(x).square().sum((1, 2)))
    with pytest.raises(GhostError, match="parameter of shape"):
        clipper.backward(head(net(x)).square().sum((1, 2)))
    assert head.weight.grad is None
    clipper.backward(head.requires_grad_(False)(net(x)).square().sum((1, 2)))


@pytest.mark.parametrize("make", [GhostClipper, PerUnitClipper])
def test_a_model_that_transformers_divided_is_refused(make):
    """By its mark too: releases of transformers differ in how they divide. Two processes are in tests/distributed."""
    model = nn.Sequential(nn.Linear(3, 2))
    model[0]._tp_size = 1
    make(model, 1.0).remove()
    model[0]._tp_size = 2
    with pytest.raises(GhostError, match="tensor-parallel"):
        make(model, 1.0)
