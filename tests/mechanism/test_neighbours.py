"""Sensitivity of every kind of clipping, by neighbours through the public API: C under zero-out, 2C under replace-one.

The units' gradients differ by ten orders of magnitude, and each unit has an opposite one, so that both bounds are
reached.
"""

import pytest
import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.mechanism.catalogue import CLIPPINGS, clipping_of
from dpllm.mechanism.parts import Spec
from tests.mechanism.kinds import CLIPPING_KINDS

C = 0.7
IN_TWO = {"kind": "groups", "parameters": {"first": "0.*", "second": "1.*"}, "shares": {"first": 1, "second": 4}}


def test_every_kind_is_tried():
    """Below, and in all tests of the bound of one group."""
    missing = set(CLIPPINGS) - {Spec.of(kind).kind for kind in CLIPPING_KINDS}
    assert not missing, f"add {', '.join(sorted(missing))} to CLIPPING_KINDS in tests/mechanism/kinds.py"


def sum_of(model, clipping, inputs, signs):
    """The clipped sum over these units, with GhostClipper."""
    clipper = GhostClipper(model, clipping=clipping)
    clipper.backward(model(inputs).squeeze(1) * signs)
    clipper.remove()
    total = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return total


@pytest.mark.parametrize("kind", [*CLIPPING_KINDS, IN_TWO], ids=str)
def test_leaving_out_a_unit_moves_the_sum_by_c_and_replacing_it_by_2c(kind):
    """Both bounds hold for every unit, and are tight for long gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
    clipping, signs = clipping_of(Spec.of(kind), C), torch.ones(11, dtype=torch.float64)
    inputs = torch.randn(11, 4, dtype=torch.float64) * torch.logspace(-5, 5, 11, dtype=torch.float64)[:, None]
    signs = signs * torch.logspace(-5, 5, 11, dtype=torch.float64)
    total, out, replaced = sum_of(model, clipping, inputs, signs), [], []
    for unit in range(11):
        others = torch.arange(11) != unit
        out.append(float((total - sum_of(model, clipping, inputs[others], signs[others])).norm()))
        opposite = torch.where(others, signs, -signs)
        replaced.append(float((total - sum_of(model, clipping, inputs, opposite)).norm()))
    assert max(out) <= C * (1 + 1e-9) and max(replaced) <= 2 * C * (1 + 1e-9)
    assert max(out) >= 0.999 * C and max(replaced) >= 1.998 * C
    assert clipping.sensitivity("zero-out") == C and clipping.sensitivity("replace-one") == 2 * C
