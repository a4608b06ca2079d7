"""The head in chunks against autograd in float64, one row at a time: losses, gradients, norms and sums."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from dpllm.ghost.chunked_head import LogitFormula, token_losses
from dpllm.ghost.norm_method import NormMethod
from dpllm.ghost.norms import held, join, merge
from dpllm.ghost.sums import Sum, Weights
from dpllm.ghost.unit_gradients import Instance, Lookup, Outer, Rows
from tests.ghost.loop import squared_norms
from tests.mutations import kills

B, T, V = 6, 7, 23
FORMULAS = {
    "plain": LogitFormula(),
    "scale": LogitFormula(scale=0.3),
    "cap": LogitFormula(cap=3.0),
    "smoothing": LogitFormula(smoothing=0.1),
    "all": LogitFormula(0.7, 2.0, 0.1),
}
CHUNKS = {"one chunk": 1 << 24, "chunks of 6": 6 * T, "single entries": 1}
WIDTHS = {"Gram matrices": 5, "tiles": 3}  # more than 2 D tokens: tiles
UNITS = {
    "a row is a unit": [0, 1, 2, 3, 4, 5],
    "out of order": [3, 0, 5, 1, 2, 4],
    "several rows": [0, 1, 0, 2, 1, 0],
    "padding": [0, -1, 1, 0, -1, 2],
}
GRAM = NormMethod("gram", fused=False)


def plain_losses(hidden, weight, bias, target, formula):
    """What the head is compared with: all logits, and PyTorch's own cross-entropy."""
    logits = formula.scale * F.linear(hidden, weight, bias)
    if formula.cap is not None:
        logits = formula.cap * torch.tanh(logits / formula.cap)
    return F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=formula.smoothing
    ).view(target.shape)


class Case:
    """A batch, its table, and the gradients of each row by autograd, one row at a time."""

    def __init__(self, formula=None, width=5, tied=False, entries=1 << 24, with_bias=False, dtype=torch.float64):
        self.formula, self.entries, self.tied = formula or LogitFormula(), entries, tied
        self.table = torch.randn(V, width, dtype=dtype).requires_grad_()
        self.bias = torch.randn(V, dtype=dtype).requires_grad_() if with_bias else None
        self.ids, self.target = torch.randint(0, V, (2, B, T))
        self.target[0, :3], self.target[4, 2] = -100, -100
        self.mix = torch.randn(width, width, dtype=dtype)
        self.upstream = torch.randn(B, T, dtype=dtype)
        rows = [self.alone(b) for b in range(B)]
        self.gradient_B, self.bias_B = (torch.stack(x) if x[0] is not None else None for x in zip(*rows, strict=True))

    def alone(self, b):
        """The gradients of table and bias from one row."""
        table = self.table.detach().clone().requires_grad_()
        inputs = (table if self.tied else table.detach())[self.ids[b : b + 1]]
        bias = None if self.bias is None else self.bias.detach().clone().requires_grad_()
        loss = plain_losses(torch.tanh(inputs @ self.mix), table, bias, self.target[b : b + 1], self.formula)
        leaves = [table] if bias is None else [table, bias]
        grads = torch.autograd.grad((loss * self.upstream[b]).sum(), leaves)
        return grads[0], (grads[1] if bias is not None else None)

    def uses(self, here=slice(None), prepared=True):
        """The uses of the table in some rows: the head and, if it is tied, the lookup. And those of the bias."""
        found = {}
        inputs = self.table.detach()[self.ids[here]].requires_grad_()
        loss = token_losses(
            torch.tanh(inputs @ self.mix),
            self.target[here],
            self.table,
            self.bias,
            self.formula,
            lambda parameter, use: found.setdefault(id(parameter), []).append(use),
            self.ids[here] if prepared else None,
            self.entries,
        )
        (loss * self.upstream[here]).sum().backward()
        assert self.table.grad is None
        uses = found[id(self.table)]
        if self.tied:
            uses = [Lookup(self.ids[here], inputs.grad, V), *uses]
        return uses, found.get(id(self.bias), [])


def units_of(gradient_B, unit_of_row):
    total = torch.zeros(max(unit_of_row) + 1, *gradient_B.shape[1:], dtype=gradient_B.dtype)
    for b, unit in enumerate(unit_of_row):
        if unit >= 0:
            total[unit] += gradient_B[b]
    return total


def assert_equal_instances(contributions, rows, gradient_U):
    """Norms and weighted sums are those of the gradients of the units; factor 0 leaves a unit out."""
    sq_norm_U, slack_U = squared_norms(contributions, rows, GRAM)
    torch.testing.assert_close(sq_norm_U, gradient_U.square().sum((1, 2)), rtol=1e-12, atol=1e-12)
    assert (slack_U >= 0).all() and (slack_U < 1e-9 * (1 + sq_norm_U)).all()
    for factor_U in (torch.rand(rows.num_units).double(), torch.arange(rows.num_units) % 2 * 0.5):
        factor_U = factor_U.double()
        factor_B = torch.where(rows.unit_B >= 0, factor_U[rows.unit_B.clamp_min(0)], 0)
        total = Sum(gradient_U.shape[1:], torch.float64, torch.device("cpu"))
        for one in contributions:
            one.add_weighted_(total, Weights(factor_U if isinstance(one, Instance) else factor_B), GRAM)
        expected = torch.einsum("u,uvd->vd", factor_U, gradient_U)
        torch.testing.assert_close(total.total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("entries", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_losses_and_the_gradient_of_the_hidden_states_are_those_of_all_logits(formula, entries, trained):
    """With ignored labels and a bias; a frozen head and evaluation give the same."""
    weight, bias = torch.randn(V, 5).double(), torch.randn(V).double()
    hidden, upstream = torch.randn(B, T, 5).double().requires_grad_(), torch.randn(B, T).double()
    target = torch.randint(0, V, (B, T))
    target[1] = -100
    expected = plain_losses(hidden, weight, bias, target, formula)
    (grad,) = torch.autograd.grad((expected * upstream).sum(), hidden)
    weight.requires_grad_(trained)
    losses = token_losses(hidden, target, weight, bias, formula, lambda *_: None, entries=entries)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(torch.autograd.grad((losses * upstream).sum(), hidden)[0], grad)
    with torch.no_grad():
        torch.testing.assert_close(token_losses(hidden, target, weight, bias, formula, entries=entries), expected)


@kills(
    "the head's cross term with the lookup of a tied table is deleted where tiles are formed",
    "dpllm/ghost/chunked_head.py",
    "value += 2 * (looked_SD",
    "value += 0 * (looked_SD",
)
@kills(
    "the head's cross term with the lookup of a tied table is deleted where Gram matrices are formed",
    "dpllm/ghost/chunked_head.py",
    "value = value + 2 * self.scale_B[b] * cross_TS.sum()",
    "pass",
)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("entries", [1 << 24, 6 * T], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("unit_of_row", UNITS.values(), ids=UNITS.keys())
@pytest.mark.parametrize("formula", [FORMULAS["plain"], FORMULAS["all"]], ids=["plain", "all"])
def test_norms_and_sums_are_those_of_single_rows(formula, unit_of_row, entries, width, tied):
    """Also cross terms between a unit's rows, and with the lookup of a tied table, prepared in the pass or not."""
    case = Case(formula, width, tied, entries)
    unit_B = torch.tensor(unit_of_row)
    rows = Rows.of(unit_B, max(unit_of_row) + 1)
    gradient_U = units_of(case.gradient_B, unit_of_row)
    for prepared in (True, False):
        uses, _ = case.uses(prepared=prepared)
        assert_equal_instances(merge([held(one, rows, GRAM) for one in uses], rows, GRAM), rows, gradient_U)
    assert_equal_instances(
        merge([held(one, rows, NormMethod("instance")) for one in uses], rows, GRAM), rows, gradient_U
    )


@pytest.mark.parametrize("unit_of_row", UNITS.values(), ids=UNITS.keys())
def test_a_head_that_runs_twice_and_a_table_that_a_linear_layer_reads_too(unit_of_row):
    """Cross terms between two uses as a head; with a matrix product the gradients themselves are held."""
    first, second = Case(FORMULAS["all"], tied=True), Case(FORMULAS["scale"])
    rows = Rows.of(torch.tensor(unit_of_row), max(unit_of_row) + 1)
    uses = first.uses()[0] + second.uses()[0]
    gradient_B = first.gradient_B + second.gradient_B
    assert_equal_instances(merge(uses, rows, GRAM), rows, units_of(gradient_B, unit_of_row))
    outer = Outer(torch.randn(B, 4, V).double(), torch.randn(B, 4, 5).double(), "right")
    gradient_B = gradient_B + torch.einsum("btv,btd->bvd", outer.left_BTL, outer.right_BTR)
    assert_equal_instances(merge([*uses, outer], rows, GRAM), rows, units_of(gradient_B, unit_of_row))


@pytest.mark.parametrize("tied", [False, True])
def test_a_unit_over_several_passes(tied):
    """Its rows arrive in three passes, and count as one row."""
    case = Case(FORMULAS["all"], tied=tied)
    joined = []
    for here in (slice(0, 2), slice(2, 3), slice(3, B)):
        joined = join(joined, case.uses(here)[0], GRAM)
    assert_equal_instances(joined, Rows.one_unit(torch.device("cpu")), case.gradient_B.sum(0, keepdim=True))


@pytest.mark.parametrize("entries", [1 << 24, 6 * T])
def test_the_bias_of_a_trained_head(entries):
    """It has row gradients of its own."""
    case = Case(FORMULAS["all"], entries=entries, with_bias=True)
    (weight,), (bias,) = case.uses()
    rows = Rows.of(torch.arange(B), B)
    torch.testing.assert_close(weight.instance(rows), case.gradient_B)
    torch.testing.assert_close(bias.instance(rows), case.bias_B)


def test_a_row_that_is_not_finite_contributes_nothing_with_factor_0():
    """And the other rows' shares do not change."""
    case = Case()
    case.upstream[2] = float("nan")
    ((use,), _), rows = case.uses(), Rows.of(torch.arange(B), B)
    sq_norm_U, _ = squared_norms([use], rows, GRAM)
    others = torch.tensor([0, 1, 3, 4, 5])
    torch.testing.assert_close(sq_norm_U[others], case.gradient_B[others].square().sum((1, 2)))
    assert not sq_norm_U[2].isfinite()
    factor_B = torch.tensor([1, 0.5, 0, 2, 1, 1]).double()
    total = Sum.onto(torch.zeros_like(case.table))
    use.add_weighted_(total, Weights(factor_B), GRAM)
    torch.testing.assert_close(total.total, torch.einsum("b,bvd->vd", factor_B[others], case.gradient_B[others]))


def test_a_trained_head_needs_a_receiver():
    """Its gradient would be lost without an error."""
    with pytest.raises(ValueError, match="trained"):
        token_losses(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), torch.zeros(4, 3, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "width", "entries"), [(64, 64, 1 << 24), (64, 64, 1 << 14), (160, 32, 1 << 24), (3, 64, 1 << 24)]
)
@pytest.mark.parametrize("unit_of_row", [[0, 1, 2, 3, 4], [0, 0, 1, -1, 1]], ids=["rows", "several rows"])
def test_no_share_exceeds_the_clip_norm(unit_of_row, tokens, width, entries, dtype):
    """The share that is released for each unit by itself, measured in float64, tied or not; and it is not far below."""
    rows, vocabulary = Rows.of(torch.tensor(unit_of_row), max(unit_of_row) + 1), 1500
    for tied, size in itertools.product((False, True), (0.3, 3.0)):
        table = (size * torch.randn(vocabulary, width)).to(dtype).requires_grad_()
        ids, target = torch.randint(0, vocabulary, (2, len(unit_of_row), tokens))
        inputs = table.detach()[ids].requires_grad_()
        found = []
        losses = token_losses(
            inputs * 0.7, target, table, receive=lambda _, use, found=found: found.append(use), index_BT=ids,
            entries=entries,
        )  # fmt: skip
        (losses * torch.rand(len(unit_of_row), tokens)).sum().backward()
        uses = [*found, Lookup(ids, inputs.grad, vocabulary)] if tied else found
        sq_norm_U, slack_U = squared_norms(uses, rows, GRAM)
        for unit in range(rows.num_units):
            factor_B = torch.where(rows.unit_B == unit, (sq_norm_U + slack_U).rsqrt()[unit], 0)
            total = Sum(table.shape, torch.float32, torch.device("cpu"))
            for one in uses:
                one.add_weighted_(total, Weights(factor_B), GRAM)
            assert 0.99 < float(total.total.double().norm()) <= 1
