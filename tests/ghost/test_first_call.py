"""What the first call of a model does not show must not be wrong in later calls."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpllm import GhostClipper, GhostError
from dpllm.ghost import NoRuleError
from tests.ghost.loop import perturbed, row_gradients
from tests.mutations import kills


class Sine(nn.Module):
    """Runs row by row. Positions (T,) have no rows, and a mask (B, T) may be left out."""

    def __init__(self):
        super().__init__()
        self.matrix, self.places = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(9, 4))

    def forward(self, h, mask=None, places=None):
        y = torch.sin(h @ self.matrix + self.places[places])
        return y if mask is None else y * mask[..., None]


class Placed(nn.Module):
    """Numbers the tokens of its rows."""

    def __init__(self):
        super().__init__()
        self.first, self.sine = nn.Linear(4, 4), Sine()

    def forward(self, x, mask=None):
        h, places = self.first(x), torch.arange(x.shape[1])
        return self.sine(h, places=places) if mask is None else self.sine(h, mask, places)


class TokensFirst(nn.Module):
    """Flattens tokens and rows, with the tokens first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h):
        flat = h.transpose(0, 1).reshape(-1, h.shape[2])
        return torch.tanh(self.linear(flat)).view(h.shape[1], h.shape[0], -1).transpose(0, 1)


class Squeezed(nn.Module):
    """Takes tokens first, and drops their dimension where there is one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h):
        y = torch.tanh(self.linear(h.transpose(0, 1).squeeze(0)))
        return y.view(h.shape[1], h.shape[0], 4).transpose(0, 1)


class One(nn.Module):
    """Uses a part of a vector."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, h):
        return h * self.vector[0] / len(self.vector)


class Gated(nn.Module):
    """Adds an inner module behind a layer that starts at zero."""

    def __init__(self, inner, gate):
        super().__init__()
        self.first, self.inner, self.gate = nn.Linear(4, 4), inner, gate
        for parameter in gate.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x):
        h = self.first(x)
        return h + self.gate(self.inner(h))


class Vector(nn.Module):
    """A gate (ReZero)."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.rand(4))

    def forward(self, h):
        return h * self.vector


@dataclass
class Output:
    """An output that is no tuple or dict."""

    y: torch.Tensor


class Wrapped(nn.Module):
    """Takes a dict and returns a dataclass."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, inputs):
        h = self.first(inputs["x"])
        return Output(h + torch.sin(self.inner(Output(h)).y))


class Within(nn.Module):
    """Takes and returns a dataclass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, given):
        return Output(self.inner(given.y))


class TimeFirst(nn.Module):
    """Returns tokens first."""

    def __init__(self):
        super().__init__()
        self.first, self.one = nn.Linear(4, 4), One()

    def forward(self, x):
        return self.one(self.first(x)).transpose(0, 1)


def batch(rows, tokens, mask=False):
    x = torch.randn(rows, tokens, 4, dtype=torch.float64)
    return {"x": x, "mask": (torch.rand(rows, tokens) > 0.3).double()} if mask else {"x": x}


def assert_every_step_is_the_loop(model, losses, batches, rates=None):
    """The parameters change between steps; norms and sums are those of a copy of the model in each."""
    parameters = list(model.parameters())
    clipper = GhostClipper(model, 0.5)
    for one, rate in zip(batches, rates or [0.1] * len(batches), strict=True):
        rows = row_gradients(model, losses, one)
        result = clipper.backward(losses(model, one))
        norms = rows.norm(dim=1)
        torch.testing.assert_close(result.norms.double(), norms, rtol=1e-6, atol=1e-12)
        total = torch.cat([p.grad.flatten() for p in parameters])
        torch.testing.assert_close(total, (0.5 / norms).clamp(max=1) @ rows, rtol=1e-5, atol=1e-9)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= rate * parameter.grad
                parameter.grad = None
    clipper.remove()


@kills(
    "arguments with a multiple of the rows may have rows",
    "dpllm/ghost/attach.py",
    "            if rows > 1 and size != rows and (some_have or not (size and size % rows == 0)):\n",
    "            if rows > 1 and size != rows and not (size and size % rows == 0):\n",
)
@pytest.mark.parametrize(
    "batches",
    [
        [batch(2, 4), batch(4, 4)],
        [batch(6, 6), batch(3, 6), batch(3, 3)],
        [batch(1, 3), batch(3, 6), batch(6, 6)],
        [batch(3, 5), batch(5, 5, mask=True), batch(3, 4), batch(4, 4, mask=True)],
        [batch(3, 5, mask=True), batch(5, 5), batch(5, 5, mask=True)],
    ],
)
def test_as_many_tokens_as_rows_later(batches):
    """Positions of single tokens are not taken for rows; arguments may be left out."""
    assert_every_step_is_the_loop(
        perturbed(Placed()), lambda model, b: model(b["x"], b.get("mask")).square().sum((1, 2)), batches
    )


@kills(
    "a call of one token settles the ladder",
    "dpllm/ghost/weights_check.py",
    "is_packed or tokens > 1\n",
    "True\n",
)
@pytest.mark.parametrize(
    "sizes", [[(4, 1), (4, 3)], [(1, 1), (1, 3), (4, 3)], [(4, 1), (1, 3), (4, 3)], [(4, 1), (4, 4)]]
)
@pytest.mark.parametrize("inner", [TokensFirst, Squeezed])
def test_one_token_or_one_row_first(sizes, inner):
    """The order of rows and tokens shows in a later call."""
    model = perturbed(nn.Sequential(inner(), nn.Linear(4, 2)))
    assert_every_step_is_the_loop(
        model, lambda model, b: model(b["x"]).square().sum((1, 2)), [batch(*size) for size in sizes]
    )


@kills(
    "parts behind zeros are not compared later",
    "dpllm/ghost/tapped_model.py",
    "again=first and self._check.begin_loss())",
    "again=False)",
)
@pytest.mark.parametrize("gate", [Vector, lambda: nn.Linear(4, 4)])
@pytest.mark.parametrize("inner", [TokensFirst, One])
def test_parts_behind_a_gate_that_starts_at_zero(inner, gate):
    """They show nothing in the first call, and are compared in later ones."""
    model = Gated(inner(), gate()).double()
    assert_every_step_is_the_loop(
        model, lambda model, b: model(b["x"]).square().sum((1, 2)), [batch(4, 3) for _ in range(3)]
    )


@pytest.mark.parametrize("inner", [TokensFirst, One, lambda: nn.GroupNorm(1, 3), lambda: nn.LayerNorm(4)])
def test_dicts_and_dataclasses(inner):
    """Inputs and outputs may be nested in them, for the model and for a module that runs row by row."""
    assert_every_step_is_the_loop(
        perturbed(Wrapped(Within(inner()))),
        lambda model, b: model({"x": b["x"]}).y.square().sum((1, 2)),
        [batch(4, 3), batch(5, 3)],
    )


def test_an_output_without_rows_first():
    """The sums over all rows are compared."""
    assert_every_step_is_the_loop(
        perturbed(TimeFirst()), lambda model, b: model(b["x"]).square().sum((0, 2)), [batch(4, 5), batch(4, 6)]
    )


def test_a_recurrent_layer_is_left_as_it_was():
    """PyTorch keeps its parameters in lists, too."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x):
            return self.layer(x)[0]

    model = perturbed(Net())
    clipper = GhostClipper(model, 0.5)
    clipper.backward(model(batch(4, 3)["x"]).square().sum((1, 2)))
    clipper.remove()
    assert all(a is b for a, b in zip(model.layer._flat_weights, model.parameters(), strict=True))
    with torch.no_grad():
        model.layer.weight_ih_l0.zero_()
    assert torch.equal(copy.deepcopy(model).layer.weight_ih_l0, model.layer.weight_ih_l0)


def test_a_parameter_that_is_frozen_later_is_an_error():
    """It would be trained otherwise."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    clipper = GhostClipper(model, 0.5)
    clipper.backward(model(batch(4, 3)["x"]).square().sum((1, 2)))
    model[1].requires_grad_(False)
    losses_B = model(batch(4, 3)["x"]).square().sum((1, 2))
    with pytest.raises(GhostError, match="frozen"):
        clipper.backward(losses_B)
    clipper.remove()


class Experts(nn.Module):
    """Each row takes one of two experts, whose tokens have the rows last."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), TokensFirst()])

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(x[:, 0, 0] == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return F.softplus(out)


def test_an_expert_that_the_first_rows_do_not_use():
    """All rows are compared then."""
    one = batch(12, 4)
    one["x"][:, 0, 0] = torch.tensor([0.0] * 6 + [1.0] * 6)
    assert_every_step_is_the_loop(perturbed(Experts()), lambda model, b: model(b["x"]).square().sum((1, 2)), [one, one])


class Unpadded(nn.Module):
    """Computes with the tokens that are not masked only."""

    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        h, out = self.first(x), torch.zeros_like(x)
        out[mask] = torch.tanh(self.inner(h[mask]))
        return out


@kills(
    "tokens that are masked later are not noticed",
    "dpllm/ghost/taps.py",
    "            elif self.follows and not has_all:\n",
    "            elif False:\n",
)
def test_tokens_that_are_masked_in_a_later_call():
    """As many tokens are left as two rows of the same length have; the first call has masked none."""
    model, mask = perturbed(Unpadded()), torch.ones(2, 6, dtype=torch.bool)
    clipper = GhostClipper(model, 0.5)
    clipper.backward(model(batch(2, 6)["x"], mask).square().sum((1, 2)))
    mask[1, 2:] = False
    losses_B = model(batch(2, 6)["x"], mask).square().sum((1, 2))
    with pytest.raises(NoRuleError, match="inner"):
        clipper.backward(losses_B)
    clipper.remove()


class Doubled(nn.Module):
    """Computes with twice as many rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, h):
        y = self.norm(torch.cat([h, h * 2]))
        return y[: len(h)] * y[len(h) :]


def test_a_norm_layer_with_other_rows_than_the_model():
    """The module around it runs row by row."""
    assert_every_step_is_the_loop(
        perturbed(nn.Sequential(nn.Linear(4, 4), Doubled())),
        lambda model, b: model(b["x"]).square().sum((1, 2)),
        [batch(4, 3), batch(3, 5)],
    )


@kills(
    "an opened gate is not noticed",
    "dpllm/ghost/weights_check.py",
    "        return is_power_of_two or any(",
    "        return is_power_of_two or False and any(",
)
def test_a_gate_that_opens_after_a_warm_up():
    """The rate of the first step is zero, so the gate is open in the third loss for the first time."""
    torch.manual_seed(0)
    model = Gated(TokensFirst(), nn.Linear(4, 4)).double()
    assert_every_step_is_the_loop(
        model,
        lambda model, b: model(b["x"]).square().sum((1, 2)),
        [batch(4, 3) for _ in range(5)],
        rates=[0, 1, 1, 1, 1],
    )


class Countdown(nn.Module):
    """Its linear layer is scaled by the number of calls, which no random state shows."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


@kills(
    "a model of which taps alone compute something else is not compared",
    "dpllm/ghost/weights_check.py",
    "                return self._suspects() or [Target(",
    "                return self._suspects() and [Target(",
)
def test_a_model_that_computes_something_else_in_each_call_is_refused():
    """Its losses cannot be those of the pass with which the taps are compared, although its layers are linear."""
    model = Countdown()
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(NoRuleError):
        model(torch.rand(3, 4))
    clipper.remove()


class Pooled(nn.Module):
    """Pools four tokens at a time, and lays the results in one dimension: tokens first, or rows first."""

    def __init__(self, inner, tokens_first):
        super().__init__()
        self.before, self.inner, self.after, self.tokens_first = nn.Linear(3, 6), inner, nn.Linear(6, 1), tokens_first

    def forward(self, x):
        h = torch.tanh(self.before(x)).unflatten(1, (-1, 4)).mean(2)
        h = h.transpose(0, 1) if self.tokens_first else h
        y = self.inner(h.reshape(-1, 6)).view(h.shape)
        return self.after(y.transpose(0, 1) if self.tokens_first else y).sum((1, 2))


class Windows(nn.Module):
    """Convolves each window by itself."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, h):
        return torch.tanh(self.conv(h.view(-1, 2, 3))).view(h.shape)


POOLED = {
    "a matrix": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
    "a norm": lambda: nn.LayerNorm(6),
    "row by row": Windows,
}


@kills(
    "rows and tokens that were one dimension in no comparison are cut as rows first",
    "dpllm/ghost/tapped_model.py",
    "            self._unseen |= found\n",
    "            pass\n",
    case="True-a matrix",
)
@kills(
    "the arguments of a module that runs row by row are cut as in no comparison",
    "dpllm/ghost/attach.py",
    "        if arguments.flattens and call.host.in_forward:",
    "        if False:",
    case="True-row by row",
)
@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.parametrize("tokens_first", [True, False])
def test_several_tokens_in_the_first_dimension_are_compared_when_they_come(tokens_first, kind):
    """One pooled token of each row is one row; with several, only a comparison shows which comes first."""
    torch.manual_seed(0)
    model = Pooled(POOLED[kind](), tokens_first).double()
    model.before.requires_grad_(False)
    clipper = GhostClipper(model, 1e9)
    for tokens in (4, 12, 8, 16):
        x = torch.randn(4, tokens, 3, dtype=torch.float64)
        model.zero_grad()
        norms = clipper.backward(model(x)).norms
        total_P = torch.cat([p.grad.flatten() for p in clipper.parameters.values()])
        expected_BP = row_gradients(model, lambda model, batch: model(batch["x"]), {"x": x})
        torch.testing.assert_close(norms.double(), expected_BP.norm(dim=1), rtol=1e-6, atol=0)
        torch.testing.assert_close(total_P, expected_BP.sum(0))
    assert bool(clipper.row_by_row) == (tokens_first or kind == "row by row")
    clipper.remove()


class Recomputed(nn.Module):
    """Lays tokens before rows in a part that is recomputed in the backward pass."""

    def __init__(self):
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def part(self, h):
        flat = h.transpose(0, 1).reshape(-1, 6)
        return torch.tanh(self.inner(flat)).view(h.shape[1], h.shape[0], 6).transpose(0, 1)

    def forward(self, x):
        h = checkpoint(self.part, torch.tanh(self.before(x)), use_reentrant=False)
        return self.after(h).sum((1, 2))


@kills(
    "a part is recomputed with other taps than it ran with",
    "dpllm/ghost/tapped_model.py",
    "        is_stale = self._is_stale and",
    "        is_stale = False and",
)
def test_a_part_is_not_recomputed_with_other_taps_than_it_ran_with():
    """The second call of a loss has several tokens, the first one; computed again, the loss is exact."""
    torch.manual_seed(0)
    model = Recomputed().double()
    x, y = torch.randn(4, 1, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    clipper = GhostClipper(model, 1e9)
    with pytest.raises(GhostError):
        clipper.backward((model(x) - model(y)) ** 2)
    assert all(p.grad is None for p in model.parameters())
    norms = clipper.backward((model(x) - model(y)) ** 2).norms
    clipper.remove()
    for row, norm in enumerate(norms):
        model.zero_grad()
        ((model(x[row : row + 1]) - model(y[row : row + 1])) ** 2).sum().backward()
        expected = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        torch.testing.assert_close(norm.double(), expected)


class Counting(nn.Module):
    """Scales by a buffer that each call in training moves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.linear(x) * self.seen


def test_the_comparison_leaves_no_trace_in_buffers():
    """Its passes start from the same buffers, and so does the call."""
    model = Counting()
    clipper = GhostClipper(model, 1.0)
    clipper.backward(model(torch.rand(4, 4)).sum(1))
    assert model.seen == 4
    clipper.remove()
