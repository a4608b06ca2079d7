"""Norms and sums over every form of contribution, with units of several rows and padding rows."""

import pytest
import torch

from dpllm.ghost.contributions import Instance, Lookup, Outer, Rows, merge, squared_norms

V, R, B = 11, 3, 6
UNITS = {
    "a row is a unit": [0, 1, 2, 3, 4, 5],
    "out of order": [3, 0, 5, 1, 2, 4],
    "several rows": [0, 1, 0, 2, 1, 0],
    "padding": [0, -1, 1, 0, -1, 2],
}


def outer(tokens=4):
    return Outer(torch.randn(B, tokens, V).double(), torch.randn(B, tokens, R).double(), "right")


def lookup(tokens=5):
    return Lookup(torch.randint(0, V, (B, tokens)), torch.randn(B, tokens, R).double(), V)


def instance():
    return Instance(torch.randn(B, V, R).double())


USES = {
    "outer": [outer],
    "lookup": [lookup],
    "instance": [instance],
    "tied head": [lookup, outer],
    "layer used twice": [outer, outer],
    "two tables": [lookup, lookup],
    "three uses": [lookup, outer, lookup],
    "mixture": [outer, instance],
}


@pytest.mark.parametrize("uses", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("unit_of_row", UNITS.values(), ids=UNITS.keys())
def test_norms_and_sums_equal_those_of_the_instances(uses, unit_of_row):
    """Cross terms between uses, and between the rows of a unit, are part of the norm."""
    contributions = [make() for make in uses]
    unit_B = torch.tensor(unit_of_row)
    num_units = int(unit_B.max()) + 1
    gradient_B = sum(c.instance() for c in contributions)
    gradient_U = torch.zeros(num_units, V, R).double()
    for b, u in enumerate(unit_of_row):
        if u >= 0:
            gradient_U[u] += gradient_B[b]
    sq_norm_U, slack_U = squared_norms(
        contributions if len(uses) > 1 and instance not in uses else merge(contributions), Rows.of(unit_B, num_units)
    )
    torch.testing.assert_close(sq_norm_U, gradient_U.square().sum((1, 2)))
    assert (slack_U >= 0).all() and (slack_U < 1e-9 * (1 + sq_norm_U)).all()

    factor_B = torch.rand(B).double()
    total = torch.zeros(V, R).double()
    for contribution in contributions:
        contribution.add_weighted_(total, factor_B)
    torch.testing.assert_close(total, torch.einsum("b,bvr->vr", factor_B, gradient_B))

    keep = torch.tensor([0, 3])
    some = torch.zeros(V, R).double()
    for contribution in contributions:
        contribution.select(keep).add_weighted_(some, factor_B[keep])
    torch.testing.assert_close(some, torch.einsum("b,bvr->vr", factor_B[keep], gradient_B[keep]))


def test_merge_turns_a_mixture_into_one_instance():
    """Instances and factors of one parameter can't be combined in a norm without becoming one."""
    contributions = [outer(), instance()]
    expected = sum(c.instance() for c in contributions)
    (merged,) = merge(contributions)
    assert isinstance(merged, Instance)
    torch.testing.assert_close(merged.value_B, expected)


def test_the_cheaper_form_is_chosen_by_shape():
    """A LoRA factor is held as an instance, a wide layer as its two factors."""
    narrow = Outer(torch.zeros(2, 64, 4), torch.zeros(2, 64, 512), "right")
    wide = Outer(torch.zeros(2, 64, 512), torch.zeros(2, 64, 512), "right")
    assert narrow.prefers_instance() and not wide.prefers_instance()
    assert isinstance(merge([narrow])[0], Instance) and isinstance(merge([wide])[0], Outer)


def test_pairs_are_chunked_without_changing_the_norm():
    """A unit with more pairs of rows than the microbatch has rows."""
    rows = Rows.of(torch.zeros(B, dtype=torch.int64), 1)
    assert rows.pairs is not None and rows.pairs[0].numel() == B * (B + 1) // 2
    c = outer()
    sq_norm_U, _ = squared_norms([c], rows)
    torch.testing.assert_close(sq_norm_U, c.instance().sum(0).square().sum()[None])
