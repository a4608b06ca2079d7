"""Runs with privacy.gradients=per_unit: they release the sums of ghost norms, and state between calls is refused."""

import contextlib
import json

import numpy as np
import pytest
import torch
from torch import nn

from dpllm import GhostError, PrivateRun
from dpllm.engines.guard import EngineError
from dpllm.ghost import NoRuleError
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.watch import WatchError
from tests.mutations import kills
from tests.training.test_run import FEATURES, ledger_of, loss_of, network, plan_of, rows_of


def begun(folder, model, gradients="per_unit", max_rows=5, **plan):
    """A run of some units of one to three rows, attached to a model."""
    made = plan_of(**{"noise_multiplier": 0.0, **plan})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = PrivateRun(made, rows_of(max_rows=max_rows), ledger_of(folder, made))
    run.attach(model, optimizer, gradients=gradients)
    return run, optimizer


def gradients_of(run, optimizer, model, units, loss=loss_of):
    """The private gradient of each step over chosen units."""
    found = []
    for unit_ids in units:
        run.step(run.choose(np.array(unit_ids)), loss)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(found)


@kills(
    "one unit at a time, a call gets rows of several units",
    "dpllm/training/microbatches.py",
    "np.repeat(large_U | bounds.one_unit, ",
    "np.repeat(large_U, ",
)
@pytest.mark.parametrize("max_rows", [5, 1])
def test_a_run_releases_the_sums_of_ghost_norms(max_rows, tmp_path):
    """Units of one to three rows, in one call or in three; a step without a unit; the report names the method."""
    units = [[1, 5, 8, 11], [], [2, 3]]
    found = {}
    for gradients in ("ghost", "per_unit"):
        model = network()
        run, optimizer = begun(tmp_path / gradients, model, gradients, max_rows)
        found[gradients] = gradients_of(run, optimizer, model, units)
        run.finish()
    torch.testing.assert_close(found["ghost"], found["per_unit"], rtol=1e-5, atol=1e-7)
    assert float(found["per_unit"][1].abs().sum()) == 0 and float(found["per_unit"].abs().sum()) > 0
    report = json.loads((tmp_path / "per_unit" / "privacy_report.json").read_text())
    assert {"name": "gradients of units", "values": ["one unit at a time by plain autograd"]} in report["definition"][
        "facts"
    ]


def test_no_unit_moves_the_weights_by_more_than_the_clip_norm(tmp_path):
    """With C = 1e-6 and one unit of three rows, in two calls."""
    model = network()
    run, _ = begun(tmp_path, model, max_rows=2, clip_norm=1e-6)
    run.step(run.choose(np.array([2])), loss_of)
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) * 8
    assert 0.999e-6 < norm <= 1e-6
    run.detach()


class Times(torch.autograd.Function):
    """A kernel with a backward pass of its own, which no rule sees into."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


class Tuple(nn.Module):
    """Returns a tuple, and sums over the rows of a call: no rule can be exact for it."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(10)), nn.Linear(FEATURES, 10)

    def forward(self, x):
        scaled = Times.apply(self.inner(x), self.scale)
        return scaled, scaled.sum(0, keepdim=True)


class Coupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Tuple(), nn.Linear(10, 1)

    def forward(self, x):
        one, other = self.block(x)
        return self.head(torch.tanh(one + other))


def test_a_structure_without_a_rule_is_refused_with_this_remedy_and_runs_with_it(tmp_path):
    """One row in each call: its rows cannot depend on each other. With several, they do, and are refused."""
    with pytest.raises(NoRuleError, match=r"privacy\.gradients=per_unit"):
        model = Coupled()
        run, optimizer = begun(tmp_path / "ghost", model, "ghost")
        gradients_of(run, optimizer, model, [[0, 3]])
    torch.manual_seed(3)
    model = Coupled()
    run, optimizer = begun(tmp_path / "alone", model, max_rows=1)
    before = [p.detach().clone() for p in model.parameters()]
    total = gradients_of(run, optimizer, model, [[0, 2]])[0]
    run.detach()
    expected = torch.zeros_like(total)
    with torch.no_grad():
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value)
    rows = rows_of()
    for unit in (0, 2):
        numbers = [n for n, owner in enumerate(np.repeat(np.arange(40), 1 + np.arange(40) % 3)) if owner == unit]
        losses = [loss_of(model, rows.collate(list(rows.fetch(np.array([n]))))).sum() for n in numbers]
        grads = torch.autograd.grad(sum(losses), list(model.parameters()))
        gradient = torch.cat([g.flatten() for g in grads])
        expected += gradient * min(1.0, 0.5 / float(gradient.norm())) / 8
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-7)
    model = Coupled()
    run, optimizer = begun(tmp_path / "together", model)
    with pytest.raises(IndependenceError, match="depends on other rows"):
        gradients_of(run, optimizer, model, [[0, 2]])
    run.detach()


class Remembers(nn.Module):
    """Adds a part of the last call to this one, kept in a buffer, an attribute or a list."""

    def __init__(self, where):
        super().__init__()
        self.inner, self.where = network(), where
        self.past = []
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        here = x.detach().mean(0)
        if self.where == "cache":
            y = self.inner(x + (self.past[-1] if self.past else 0))
            self.past = [here]
        elif self.where == "counter":
            self.past.append(1)
            y = self.inner(x) * (1 + 0.1 * len(self.past))
        elif self.where == "buffer":
            y = self.inner(x + self.mean)
            self.mean.mul_(0.9).add_(0.1 * here)
        else:  # kept, saved, and never read
            y = self.inner(x)
            self.mean.add_(here)
        return y


@pytest.mark.parametrize(
    ("where", "error", "match"),
    [
        ("cache", IndependenceError, "carries state|keeps"),
        ("counter", IndependenceError, "carries state|keeps"),
        ("buffer", (IndependenceError, WatchError), "carries state|mean"),
        ("unread", (IndependenceError, WatchError), "mean"),
    ],
)
def test_state_that_is_carried_from_unit_to_unit_is_refused(where, error, match, tmp_path):
    """By value in the first step, and a buffer that changes by its name; nothing reaches the weights."""
    model = Remembers(where)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(error, match=match):
        attack(tmp_path, model, loss_of)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


class Experts(nn.Module):
    """A row uses one of two networks, by its first number; there may be a part that no row uses."""

    def __init__(self, least=0, unused=False):
        super().__init__()
        self.experts, self.least = nn.ModuleList([network(), network()]), least
        if unused:
            self.pooler = nn.Linear(2, 2)

    def forward(self, x):
        return torch.cat([self.experts[int(row[0] > self.least)](row[None]) for row in x])


def test_a_parameter_that_no_unit_reaches_is_refused_and_one_that_some_reach_is_not(tmp_path):
    """It would be trained on noise only. An expert that this unit does not use has the gradient 0."""
    model = Experts(1, unused=True)
    run, optimizer = begun(tmp_path / "unused", model)
    with pytest.raises(GhostError, match=r"pooler\.weight"):
        gradients_of(run, optimizer, model, [list(range(20))])
    run.detach()
    model = Experts(1)
    run, optimizer = begun(tmp_path / "some", model)
    assert bool((gradients_of(run, optimizer, model, [list(range(20)), [0]]).abs().sum(1) > 0).all())
    run.detach()


def test_a_unit_that_is_not_finite_is_counted_and_the_step_goes_on(tmp_path):
    def loss(model, inputs):
        return loss_of(model, inputs) * torch.where(inputs["rows"][:, 0] > 1.5, torch.inf, 1.0)

    model = network()
    run, _ = begun(tmp_path, model)
    done = run.step(run.choose(np.arange(20)), loss)
    assert 0 < done.num_nonfinite < 20
    total = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert bool(torch.isfinite(total).all()) and float(total.norm()) > 0
    run.detach()


@kills(
    "one unit at a time, no noise is added",
    "dpllm/training/step.py",
    "            if self._last:\n",
    "            if self._last and not self._clipper.one_unit:\n",
)
def test_the_noise_is_added_once(tmp_path):
    """With several units in a step, and without one: as many deviations in each entry as the plan says."""
    found = []
    for seed, units in enumerate(([0, 1, 2, 3, 4, 5], [])):
        model = nn.Linear(FEATURES, 500)
        made = plan_of(noise_multiplier=2.0, seeded=True, clip_norm=1e-3)
        run = PrivateRun(made, rows_of(), ledger_of(tmp_path / str(seed), made), seed)
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients="per_unit")
        run.step(
            run.choose(np.array(units, dtype=np.int64)), lambda model, inputs: model(inputs["rows"][:, :-1]).sum(1)
        )
        noise = torch.cat([p.grad.flatten() for p in model.parameters()]) * 8 / (2.0 * 1e-3)
        found.append(float(noise.std()))
        run.detach()
    assert found == pytest.approx([1, 1], rel=0.1)


def attack(folder, model, loss, units=((0, 2),), max_rows=1):
    run, optimizer = begun(folder, model, max_rows=max_rows)
    try:
        return gradients_of(run, optimizer, model, [list(one) for one in units], loss)
    finally:
        with contextlib.suppress(WatchError):
            run.detach()


def test_a_loss_that_calls_backward_is_refused(tmp_path):
    """Its gradients would stay in .grad, past the clip norm."""

    def loss(model, inputs):
        loss_B = loss_of(model, inputs)
        loss_B.sum().backward(retain_graph=True)
        return loss_B

    with pytest.raises(EngineError, match="received a gradient"):
        attack(tmp_path, network(), loss)


def test_other_than_one_loss_per_row_is_refused(tmp_path):
    with pytest.raises(GhostError, match="shape"):
        attack(tmp_path / "two", network(), lambda model, inputs: torch.cat([loss_of(model, inputs)] * 2))
    with pytest.raises(GhostError, match="one loss per row"):
        attack(tmp_path / "mean", network(), lambda model, inputs: loss_of(model, inputs).mean())


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(nn.functional.dropout(x, 0.5, self.training))


def test_a_compiled_model_is_checked_as_written_and_released_as_compiled(tmp_path):
    """Dropout in a compiled graph is not taken for a dependence on other rows; ghost refuses the model by name."""
    model = Dropped()
    model.compile(backend="aot_eager")
    with pytest.raises(NoRuleError, match=r"privacy\.gradients=per_unit"):
        begun(tmp_path / "ghost", model, "ghost")
    assert float(attack(tmp_path / "one", model, loss_of, [(0, 2), (3,)]).abs().sum()) > 0
    plain, compiled = network(), network()
    compiled.compile(backend="aot_eager")
    expected = attack(tmp_path / "plain", plain, loss_of)
    torch.testing.assert_close(attack(tmp_path / "compiled", compiled, loss_of), expected, rtol=1e-5, atol=1e-7)


class TwoTables(nn.Module):
    """Two parameters that are added up before they are used: autograd returns one tensor as the gradient of both."""

    def __init__(self):
        super().__init__()
        self.base, self.change = nn.Parameter(torch.randn(1, FEATURES)), nn.Parameter(torch.zeros(1, FEATURES))

    def forward(self, x):
        return nn.functional.linear(x, self.base + self.change)


def released_by_two_tables(folder, units, noise_multiplier):
    """Eight times the private gradient of a second step, (2, FEATURES): the guard watches the first one."""
    model, made = TwoTables(), plan_of(noise_multiplier, seeded=True, clip_norm=4.0)
    run = PrivateRun(made, rows_of(), ledger_of(folder, made), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer, gradients="per_unit")

    def loss(model, inputs):
        return model(inputs["rows"][:, :-1]).sum(1)

    found = gradients_of(run, optimizer, model, [[], units], loss)[1]
    run.detach()
    return 8 * found.view(2, FEATURES)


@kills(
    "one unit at a time, a gradient that autograd shares between parameters is taken as a sum",
    "dpllm/ghost/unit_clipper.py",
    "total.add_(gradient.to(total.dtype), alpha=factor)",
    "total.take_(gradient.to(total.dtype) if factor == 1 else gradient.to(total.dtype) * factor)",
)
def test_parameters_whose_gradient_is_one_tensor_have_sums_of_their_own(tmp_path):
    """The gradient of a unit below the clip norm was taken as the sum of both: others entered it twice (2.5 C)."""

    def share_of(unit):
        numbers = np.flatnonzero(np.repeat(np.arange(40), 1 + np.arange(40) % 3) == unit)
        gradient = torch.stack(rows_of().fetch(numbers))[:, :-1].sum(0).repeat(2, 1)
        return gradient * min(1.0, 4.0 / float(gradient.norm()))

    assert [float(share_of(unit).norm()) > 3.999 for unit in (0, 3, 6, 1, 2)].count(True) in (1, 2, 3, 4)
    for number, units in enumerate(([0, 3, 6, 1, 2], [0, 3, 6, 1], [3, 1])):
        released = released_by_two_tables(tmp_path / str(number), units, 0.0)
        expected = torch.stack([share_of(unit) for unit in units]).sum(0)
        torch.testing.assert_close(released, expected, rtol=1e-4, atol=1e-4)
        noisy = released_by_two_tables(tmp_path / f"{number} with noise", units, 1.0)
        assert not torch.equal(noisy[0], noisy[1])  # each entry has noise of its own
