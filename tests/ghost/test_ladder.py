"""Which way a parameter takes: what runs row by row, what is refused, and what the check by value finds."""

import logging

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from dpllm import GhostClipper, GhostError, per_sequence_loss
from dpllm.ghost import CoupledError, NormMethod, NoRuleError
from tests.conftest import tiny_llama_config
from tests.ghost.loop import Net, assert_is_the_loop, perturbed
from tests.ghost.test_taps import CHOSEN, Picks, picked_losses, picks_of
from tests.mutations import kills


def x(rows=5):
    return torch.randn(rows, 3)


def losses(model, batch):
    return model(batch["x"])


class Sine(nn.Module):
    """No tap is exact for it."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.rand(4, 4) + 0.5)

    def forward(self, h):
        return torch.sin(h @ self.matrix)


class Router(nn.Module):
    """A product by a function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, h):
        return F.linear(h, self.weight)


class Around(nn.Module):
    """Runs row by row, with a tap inside."""

    def __init__(self):
        super().__init__()
        self.matrix, self.inner = nn.Parameter(torch.rand(4, 4)), nn.Linear(4, 4)

    def forward(self, h):
        return torch.sin(torch.tanh(self.inner(h)) @ self.matrix)


class Inside(nn.Module):
    """Its inner module gets no tensor with the rows first."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, h):
        return self.inner(h[None])[0]


WAYS = {
    "linear": (nn.Linear(4, 4), {}),
    "layer norm": (nn.LayerNorm(4), {}),
    "function": (Router(), {}),
    "sine": (Sine(), {"middle": ["middle.matrix"]}),
    "sine in a list": (nn.Sequential(nn.Linear(4, 4), Sine(), nn.Linear(4, 4)), {"middle.1": ["middle.1.matrix"]}),
    "group norm": (nn.GroupNorm(2, 4), {"middle": ["middle.weight", "middle.bias"]}),
    "tap within rows": (Around(), {"middle": ["middle.matrix"]}),
    "rows are not first": (Inside(), {"middle": ["middle.inner.weight", "middle.inner.bias"]}),
}


@kills(
    "a function is not served",
    "dpllm/ghost/attach.py",
    "    if func is LINEAR:\n        return any(",
    "    if func is None:\n        return any(",
    case="function",
)
@kills(
    "a weight's gradient is transposed",
    "dpllm/ghost/taps.py",
    'hand.give(self.weight, Outer(left, right, "left" if',
    'hand.give(self.weight, Outer(right, left, "left" if',
    case="linear",
)
@kills(
    "a bias gets no gradient",
    "dpllm/ghost/taps.py",
    "        if self.bias is not None:\n            hand.give",
    "        if False:\n            hand.give",
    case="linear",
)
@kills(
    "an input without the rows is taken for one with them",
    "dpllm/ghost/taps.py",
    "        if hand.has_rows and x.shape[0] != hand.call.rows:\n",
    "        if False:\n",
    case="rows are not first",
)
@kills(
    "uses in single rows are never handed over",
    "dpllm/ghost/attach.py",
    "            call.anchor, call.place = gate, gathered.add\n",
    "            call.anchor, call.place = anchor, gathered.add\n",
    case="tap within rows",
)
@kills(
    "uses in single rows are put together in another order",
    "dpllm/ghost/attach.py",
    "for b in range(rows)",
    "for b in reversed(range(rows))",
    case="tap within rows",
)
@pytest.mark.parametrize("name", WAYS)
def test_only_what_no_tap_serves_runs_row_by_row(name):
    """The smallest module, with the parameters that need it; all are the loop."""
    middle, expected = WAYS[name]
    net, batch = perturbed(Net(middle)), {"x": x(6).double()}
    assert_is_the_loop(net, losses, batch)
    clipper = GhostClipper(net, 1.0)
    assert clipper.row_by_row == {}
    clipper.backward(losses(net, batch))
    assert clipper.row_by_row == expected
    clipper.remove()


class TokensFirst(nn.Module):
    """Lays tokens and rows in one dimension, as no tap expects it; only the values show it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, h):
        return self.linear(h.transpose(0, 1).reshape(-1, 3)).view(h.shape[1], -1, 3).transpose(0, 1)


class Masking(nn.Module):
    """Masks the logits of padding as some models do: by the lowest number, or by infinity."""

    def __init__(self, first, least):
        super().__init__()
        self.first, self.head, self.least = first, nn.Linear(3, 1), least

    def forward(self, x, mask):
        return self.head(torch.tanh(self.first(x)))[..., 0].masked_fill(~mask, self.least)


@kills(
    "masked logits are part of the numbers that are compared",
    "dpllm/ghost/weights_check.py",
    "        value = value.masked_fill(value.abs() >= _MASKED, 0)\n",
    "",
)
@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -torch.inf])
def test_masked_logits_are_left_out_of_the_comparison(least):
    """The sum of a row's outputs is infinite otherwise, and shows nothing."""
    mask = (torch.arange(5) < 3).expand(6, -1)
    for first, expected in ((nn.LayerNorm(3), []), (TokensFirst(), ["first"])):
        net = Masking(first, least)
        clipper = GhostClipper(net, 1.0)
        clipper.backward(torch.logsumexp(net(torch.randn(6, 5, 3), mask), 1))
        assert list(clipper.row_by_row) == expected
        clipper.remove()


def test_the_log_says_what_runs_row_by_row(caplog):
    """By the module's path; nothing where nothing does."""
    for name, told in (("linear", 0), ("sine in a list", 1)):
        caplog.clear()
        net, batch = Net(WAYS[name][0]).double(), {"x": x(6).double()}
        clipper = GhostClipper(net, 1.0)
        with caplog.at_level(logging.INFO, "dpllm"):
            losses(net, batch)
        assert caplog.text.count("row by row") == caplog.text.count("middle.1") == told
        clipper.remove()


@kills(
    "what a module without taps computes is not compared with autograd",
    "dpllm/ghost/weights_check.py",
    "            wrong.append(name)\n",
    "            pass\n",
)
@kills(
    "gradients that differ are accepted",
    "dpllm/ghost/weights_check.py",
    "            wrong = _differ(plain.gradients, self._tapped.receiver.weighted_sums(*found), tolerance)\n",
    "            wrong = []\n",
)
def test_a_module_that_gives_other_gradients_each_time_is_refused():
    """The check names its parameter; nothing is released."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.rand(4) + 1), 0

        def forward(self, h):
            self.calls += 1
            return Scaled.apply(h, self.weight, self.calls)

    net = Net(Odd())
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=r"middle\.weight"):
        clipper.backward(net(x()))
    assert all(p.grad is None for p in net.parameters())


class Scaled(torch.autograd.Function):
    """The derivative for the weight grows with each call of the module."""

    @staticmethod
    def forward(ctx, h, weight, calls):
        ctx.save_for_backward(h, weight)
        ctx.calls = calls
        return h * weight

    @staticmethod
    def backward(ctx, grad):
        h, weight = ctx.saved_tensors
        return grad * weight, (grad * h).sum(0) * ctx.calls, None


@kills(
    "the comparison moves the random numbers",
    "dpllm/ghost/weights_check.py",
    "state.restore()\n",
    "pass\n",
)
def test_a_model_with_dropout_is_compared_without_it():
    """And computes with it: the random numbers of a run do not depend on the comparison."""
    torch.manual_seed(0)
    net, inputs = Net(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))), x(6)
    torch.manual_seed(7)
    expected = net(inputs)
    clipper = GhostClipper(net, 1e6)
    for _ in range(2):
        torch.manual_seed(7)
        value = net(inputs)
        torch.testing.assert_close(value, expected)
        assert net.middle[1].training
        clipper.backward(value)
    sums = [p.grad.clone() / 2 for p in net.parameters()]
    clipper.remove()
    net.zero_grad()
    torch.manual_seed(7)
    net(inputs).sum().backward()
    for parameter, total in zip(net.parameters(), sums, strict=True):
        torch.testing.assert_close(parameter.grad, total)


# ------------------------------------------------------------------------------------------------------ coupled rows


class Centred(nn.Module):
    """Couples rows, but its name does not show it."""

    def forward(self, h):
        return h - h.mean(0)


class Cumulative(nn.Module):
    """Couples rows in one direction only."""

    def forward(self, h):
        return torch.cumsum(h, 0)


class Mixing(nn.Module):
    """Multiplies a matrix with all rows."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.rand(5, 5))

    def forward(self, h):
        return self.p @ h


@kills(
    "coupled rows are not told from a module without a tap",
    "dpllm/ghost/weights_check.py",
    "                    self._refuse_coupled(inputs)\n",
    "",
    case="passes0-middle0",
)
@pytest.mark.parametrize("middle", [Centred(), Cumulative(), nn.Sequential(Sine(), Centred())])
@pytest.mark.parametrize("passes", [1, 2], ids=["passes0", "passes1"])
def test_rows_that_depend_on_each_other_are_refused(passes, middle):
    """Not as a module without a tap: one unit at a time, the loss would mean something else."""
    net = Net(middle)
    clipper = GhostClipper(net, 1.0, NormMethod(backward_passes=passes))
    with pytest.raises(CoupledError, match=r"row \d depends on row \d"):
        clipper.backward(net(x()))
    assert all(p.grad is None for p in net.parameters())


@kills(
    "rows are not compared in the backward pass",
    "dpllm/ghost/clipper.py",
    "                self.refuse_coupled(loss_B, weight_B > 0)\n",
    "                pass\n",
)
@kills(
    "one of two sets of rows is probed",
    "dpllm/ghost/weights_check.py",
    "else [real[:1], real[-1:]]",
    "else [real[-1:]]",
)
def test_losses_that_depend_on_each_other_are_refused():
    """The model is in order, and its outputs are mixed: a later row's loss reads the first row."""
    for mix in (lambda y: y + y.flip(0).detach() * y.flip(0), lambda y: torch.cat([y[:1] + y[1:2], y[1:]])):
        net = Net()
        clipper = GhostClipper(net, 1.0)
        with pytest.raises(CoupledError):
            clipper.backward(mix(net(x())))
        assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("counts", [(2, 0, 1, 1), (0, 2, 1, 1), (1, 1, 0, 2)], ids=str)
@pytest.mark.parametrize("kind", CHOSEN)
def test_entries_of_other_rows_in_the_first_call_are_refused(kind, counts):
    """A layer reads two entries of one row and none of another. Later calls are the concern of the checks of a run."""
    model = perturbed(Picks(CHOSEN[kind]))
    clipper = GhostClipper(model, 1.0)
    with pytest.raises(GhostError):
        clipper.backward(picked_losses(model, picks_of(*counts)))
    assert all(p.grad is None for p in model.parameters())


def test_a_matrix_over_all_rows_is_refused():
    """Its rows cannot be told apart."""
    net = Net(Mixing())
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(NoRuleError, match=r"middle\.p"):
        clipper.backward(net(x(5)))


COUPLED = {
    "batch norm": (lambda: Net(nn.BatchNorm1d(4)), r"middle \(BatchNorm1d\) couples the rows"),
    "instance norm": (lambda: Net(nn.InstanceNorm1d(4)), "InstanceNorm1d"),
    "renormalised table": (lambda: Net(nn.Embedding(5, 4, max_norm=1.0)), "middle: max_norm"),
    "frequency-scaled table": (lambda: Net(nn.Embedding(5, 4, scale_grad_by_freq=True)), "middle: scale_grad_by_freq"),
    "nothing trainable": (lambda: Net().requires_grad_(False), "no trainable parameter"),
    "data parallel": (lambda: nn.DataParallel(Net()), "DataParallel"),
}


@pytest.mark.parametrize(("make", "match"), COUPLED.values(), ids=COUPLED.keys())
def test_models_that_cannot_be_right_are_refused_at_once(make, match):
    """The path, the reason and the remedy, before any training."""
    with pytest.raises(GhostError, match=match):
        GhostClipper(make(), 1.0)


def test_a_compiled_model_is_refused():
    """Its graph would use the weights themselves; blocks are compiled by the clipper."""
    with pytest.raises(GhostError, match=r"torch\.compile"):
        GhostClipper(torch.compile(Net()), 1.0)
    late = Net()
    clipper = GhostClipper(late, 1.0)
    late.compile(backend="eager")
    with pytest.raises(GhostError, match="model was compiled"):
        clipper.backward(late(x(2)))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_parameter_without_part_in_the_loss_is_refused(passes):
    """No parameter silently remains untrained."""
    net = Net()
    net.unused = nn.Linear(2, 2)
    clipper = GhostClipper(net, 1.0, NormMethod(backward_passes=passes))
    with pytest.raises(GhostError, match=r"unused\.weight"):
        clipper.backward(net(x()))


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 16),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "rope_theta": 1e4,
            },
            8,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_position_embeddings_chosen_by_the_longest_row_are_refused_where_they_differ(rope, limit):
    """Up to the original length, other rows do not change a row's loss; beyond it a longer neighbour would."""
    model = LlamaForCausalLM(tiny_llama_config(max_position_embeddings=16, rope_parameters=rope))
    ids = torch.randint(3, 61, (2, limit + 1))
    short, mask = ids[:, :limit], torch.ones(2, limit + 1, dtype=torch.int64)
    mask[0, limit:] = 0
    with torch.no_grad():
        alone = model(input_ids=short[:1]).logits
        in_company = model(input_ids=ids, attention_mask=mask).logits[:1, :limit]
        assert float((alone - in_company).abs().max()) > 1e-6  # the refused dependence is real
        model(input_ids=short[:, : limit - 1])  # resets the frequencies
    clipper = GhostClipper(model, 1.0)
    assert clipper.backward(per_sequence_loss(model(input_ids=short).logits, short)).norms.shape == (2,)
    with pytest.raises(GhostError, match=rf"rows of {limit + 1} tokens. Beyond {limit} tokens"):
        model(input_ids=ids, attention_mask=mask)


def test_layers_that_are_skipped_at_random_are_refused_by_name():
    """A skipped layer has no gradient, and the run would end at some step; frozen layers may be skipped."""
    config = transformers.OPTConfig(
        vocab_size=31,
        hidden_size=8,
        ffn_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=8,
        layerdrop=0.1,
    )
    model = transformers.OPTForCausalLM(config)
    with pytest.raises(GhostError, match=r"model\.decoder"):
        GhostClipper(model, 1.0)
    model.model.decoder.layerdrop = 0.0
    GhostClipper(model, 1.0).remove()


@pytest.mark.parametrize("config", [peft.LoHaConfig, peft.LoKrConfig])
def test_adapters_that_draw_random_numbers_in_each_pass_are_the_loop(config):
    """They do so for every dropout rate."""
    model = get_peft_model(LlamaForCausalLM(tiny_llama_config()), config(r=2, alpha=2, target_modules=["q_proj"]))
    ids = torch.randint(3, 61, (4, 6))

    def of(model, batch):
        return per_sequence_loss(model(input_ids=batch["ids"]).logits, batch["ids"])

    assert_is_the_loop(perturbed(model), of, {"ids": ids})
