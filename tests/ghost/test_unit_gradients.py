"""Norms and sums for every kind of contribution, with units of several rows and padding rows."""

import pytest
import torch

from dpllm import GhostClipper
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.norms import held, merge
from dpllm.ghost.sums import Sum, Weights
from dpllm.ghost.unit_gradients import Instance, Lookup, Outer, RowGradients, Rows
from tests.ghost.loop import squared_norms
from tests.mutations import kills

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
    return RowGradients(torch.randn(B, V, R).double())


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


METHODS = {name: NormMethod(name, fused=False) for name in ("auto", "gram", "instance", "tiled")}


def gradient_of_rows(use):
    """The gradient of each row (B, V, R)."""
    return use.instance(Rows.of(torch.arange(B), B))


def units_of(gradient_B, unit_of_row, num_units):
    """The gradient of each unit, row by row."""
    gradient_U = torch.zeros(num_units, *gradient_B.shape[1:], dtype=gradient_B.dtype)
    for b, u in enumerate(unit_of_row):
        if u >= 0:
            gradient_U[u] += gradient_B[b]
    return gradient_U


@kills(
    "what a sum's memory held before is released with its first addend",
    "dpllm/ghost/kernels.py",
    "beta=0 if is_empty else 1",
    "beta=1",
)
@kills(
    "the cross term of a tied head is deleted",
    "dpllm/ghost/norms.py",
    "sq_norm_U = sq_norm_U + 2 * _cross(x, y, rows)",
    "pass",
)
@kills(
    "the rows of a unit behind its first one are deleted from its norm",
    "dpllm/ghost/norms.py",
    "    return group.fold(uses[0].input), [group.fold(use.grad) for use in uses]\n",
    (
        "    x, grads = uses[0].input, [use.grad for use in uses]\n"
        "    return x[group.rows_GN[:, 0]], [grad[group.rows_GN[:, 0]] for grad in grads]\n"
    ),
)
@pytest.mark.parametrize("norm_method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("uses", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("unit_of_row", UNITS.values(), ids=UNITS.keys())
def test_norms_and_sums_equal_those_of_the_instances(uses, unit_of_row, norm_method):
    """Cross terms between uses, and between the rows of a unit, are part of the norm."""
    made = [make() for make in uses]
    unit_B = torch.tensor(unit_of_row)
    num_units = int(unit_B.max()) + 1
    rows = Rows.of(unit_B, num_units)
    contributions = merge([held(use, rows, norm_method) for use in made], rows, norm_method)
    gradient_B = sum(gradient_of_rows(use) for use in made)
    gradient_U = units_of(gradient_B, unit_of_row, num_units)
    sq_norm_U, slack_U = squared_norms(contributions, rows, norm_method)
    torch.testing.assert_close(sq_norm_U, gradient_U.square().sum((1, 2)))
    assert (slack_U >= 0).all() and (slack_U < 1e-9 * (1 + sq_norm_U)).all()

    factor_U = torch.rand(num_units).double()
    factor_B = torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)], 0)
    instances = isinstance(contributions[0], Instance)
    for zeros in ([], [1]):
        factor_U[zeros] = 0
        factor_B[[b for b, unit in enumerate(unit_of_row) if unit in zeros]] = 0
        total = Sum(torch.Size((V, R)), torch.float64, torch.device("cpu"))
        for contribution in contributions:
            contribution.add_weighted_(total, Weights(factor_U if instances else factor_B), norm_method)
        torch.testing.assert_close(total.total, torch.einsum("u,uvr->vr", factor_U, gradient_U))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("make", [outer, lookup, instance])
@pytest.mark.parametrize("into", ["nothing", "garbage", "a sum"])
def test_a_gradient_with_factor_0_contributes_exactly_zero_also_if_it_is_not_finite(make, value, into):
    """Not 0 * inf; and a sum that is begun takes nothing from the memory that it is written to."""
    use, rows = make(), Rows.of(torch.arange(B), B)
    use.grad[2], use.grad[4, 0, 0] = value, -value
    (one,) = (held(use, rows, NormMethod("gram")),)
    total = Sum.onto(torch.full((V, R), {"a sum": 3.0}.get(into, value)).double())
    total.is_empty = into != "a sum"
    one.add_weighted_(total, Weights(torch.tensor([1.0, 0.5, 0, 0, 0, 2.0]).double()), NormMethod())
    gradient_B = gradient_of_rows(use)
    expected = gradient_B[0] + 0.5 * gradient_B[1] + 2 * gradient_B[5] + (3 if into == "a sum" else 0)
    torch.testing.assert_close(total.total, expected)
    nobody = Sum.onto(total.total)
    nobody.is_empty = into != "a sum"
    one.add_weighted_(nobody, Weights(torch.zeros(B).double()), NormMethod())
    torch.testing.assert_close(nobody.total, expected if into == "a sum" else torch.zeros(V, R).double())


def test_merge_turns_a_mixture_into_one_instance():
    """Instances and factors of one parameter are merged before they enter a norm."""
    rows = Rows.of(torch.arange(B), B)
    uses = [outer(), instance()]
    (merged,) = merge([held(use, rows, NormMethod(algorithm="gram")) for use in uses], rows, NormMethod("gram"))
    assert isinstance(merged, Instance)
    torch.testing.assert_close(merged.value_U, sum(gradient_of_rows(use) for use in uses))


def test_the_cheaper_form_is_held():
    """A LoRA factor is held as an instance, a wide layer as its two factors, except for a unit with many rows."""
    rows = Rows.of(torch.arange(2), 2)
    narrow = Outer(torch.zeros(2, 64, 4), torch.zeros(2, 64, 512), "right")
    wide = Outer(torch.zeros(2, 64, 128), torch.zeros(2, 64, 129), "right")
    assert isinstance(held(narrow, rows, NormMethod()), Instance) and isinstance(held(wide, rows, NormMethod()), Outer)
    assert isinstance(held(wide, rows, NormMethod(algorithm="instance")), Instance)
    assert isinstance(held(narrow, rows, NormMethod(algorithm="gram")), Outer)
    assert isinstance(held(wide, Rows.of(torch.zeros(2, dtype=torch.int64), 1), NormMethod()), Instance)
    table = Lookup(torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64, 3), 65)
    assert isinstance(held(table, rows, NormMethod()), Lookup)
    assert isinstance(held(table, Rows.of(torch.zeros(2, dtype=torch.int64), 1), NormMethod()), Instance)


def test_rows_are_viewed_where_they_lie_as_their_units_do():
    """Rows are copied only if a unit's rows are not adjacent or units have different numbers of rows."""
    x = torch.randn(6, 5, 2)
    for unit_of_row in ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2]):
        (group,) = Rows.of(torch.tensor(unit_of_row), max(unit_of_row) + 1).groups
        folded = group.fold(x)
        assert folded.data_ptr() == x.data_ptr()
        torch.testing.assert_close(folded, x.view(max(unit_of_row) + 1, -1, 2))
    singles, pair = Rows.of(torch.tensor([0, 1, 1, 2, -1]), 3).groups
    torch.testing.assert_close(singles.fold(x[:5]), x[[0, 3]])
    torch.testing.assert_close(pair.fold(x[:5]), x[[1, 2]].view(1, 10, 2))


def test_a_unit_without_rows_has_no_norm():
    """Units may be missing from a microbatch; all rows may be padding."""
    rows = Rows.of(torch.tensor([0, -1, 2, 2, 0, -1]), 4)
    sq_norm_U, slack_U = squared_norms([outer()], rows, NormMethod())
    assert (sq_norm_U[[0, 2]] > 0).all() and (sq_norm_U[[1, 3]] == 0).all() and slack_U[1] == 0
    assert squared_norms([lookup()], Rows.of(torch.full((B,), -1), 0), NormMethod())[0].shape == (0,)


def test_units_that_the_caller_changes_in_place():
    """A clipper keeps no tensor of the caller's units: one that is filled again for each microbatch gives the bound."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 32).double()
    large = torch.cat([100 * torch.ones(2, 16), 1e-3 * torch.ones(2, 16)]).double()
    x = large[[0, 2, 1, 3]]  # the units 0, 1, 0, 1: a large and a small one
    clipper = GhostClipper(model, 0.5, NormMethod(algorithm="gram"))

    def clipped_sum(units):
        clipper.clip(model(x).square().sum(1), units)
        sums = []
        for parameter in clipper.parameters.values():
            clipper.add_clipped_sum_(parameter, total := Sum.of(parameter))
            sums.append(total.filled().flatten())
        return torch.cat(sums)

    buffer = torch.tensor([0, 1, 0, 1])
    wanted = clipped_sum(buffer)
    buffer.copy_(torch.tensor([1, 0, 1, 0]))
    found = clipped_sum(torch.tensor([0, 1, 0, 1]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert float(found.norm()) <= 2 * 0.5 * (1 + 1e-6)
    clipper.remove()
