"""Groups of parameters: each has separate norms and factors; a unit reaches the sensitivity over all of them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import LlamaForCausalLM

from dpllm import GhostClipper
from dpllm.ghost.refusals import GhostError
from dpllm.mechanism.clipping import sensitivity_of
from tests.conftest import tiny_llama_config


@dataclass(frozen=True)
class Halves:
    """Attention, and everything else; each is clipped to C / sqrt(2)."""

    kind: ClassVar[str] = "halves"
    clip_norm: float
    wrong: str = ""

    def groups(self, shapes):
        attention = [name for name in shapes if "self_attn" in name]
        rest = [name for name in shapes if name not in attention]
        others = {"": rest, "missing": rest[1:], "twice": [*rest, rest[0]]}
        return [attention, others[self.wrong]]

    def factors(self, norm_GU):
        return (self.clip_norm / 2**0.5 / norm_GU).clamp_max(1)

    def sensitivity(self, adjacency):
        return sensitivity_of(self.clip_norm, adjacency)

    def words(self):
        return "is clipped in halves"


def model_of(tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_llama_config(tie_word_embeddings=tied)).double()


def losses(model, ids):
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    each = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return each.view(len(ids), -1).sum(1)


def gradients(model, ids):
    """Each unit's gradient by autograd, name to (U, ...)."""
    rows = []
    for row in ids:
        model.zero_grad()
        losses(model, row[None]).sum().backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_norms_of_parameters_are_told_on_request_and_change_nothing():
    """They are those of autograd; the clipped sum is the same without them."""
    model, ids = model_of(False), torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(2))
    of_unit = gradients(model, ids)
    sums = []
    for asked in (False, True):
        clipper = GhostClipper(model, 0.5, parameter_norms=asked)
        result = clipper.backward(losses(model, ids))
        sums.append({name: p.grad.clone() for name, p in model.named_parameters()})
        clipper.remove()
        model.zero_grad()
        assert result.factors.shape == (3,) and bool(result.parameter_norms) is asked
    for name, norm_U in result.parameter_norms.items():
        torch.testing.assert_close(norm_U.double(), of_unit[name].flatten(1).norm(dim=1), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(sums[1][name], sums[0][name])


def test_a_unit_that_is_not_finite_in_one_group_contributes_nothing_to_any():
    """Its factor is 0 in both."""
    model, ids = model_of(False), torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(2))
    clipper = GhostClipper(model, clipping=Halves(0.5))
    weights = torch.tensor([1.0, float("inf"), 1.0], dtype=torch.float64)
    result = clipper.backward(losses(model, ids) * weights)
    assert (result.factors[:, 1] == 0).all() and (result.factors[:, [0, 2]] > 0).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    clipper.remove()


@pytest.mark.parametrize("wrong", ["missing", "twice"])
def test_groups_that_are_no_partition_are_refused(wrong):
    """A parameter without a group would have no bound."""
    with pytest.raises(GhostError, match="exactly one clipping group"):
        GhostClipper(model_of(False), clipping=Halves(0.5, wrong))
