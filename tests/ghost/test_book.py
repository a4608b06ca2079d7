"""The clipper refuses unsuitable models and names the module, the reason and the remedy."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from dpllm import GhostClipper, GhostError, per_sequence_loss
from dpllm.ghost.book import Book
from dpllm.ghost.contributions import Instance
from dpllm.ghost.norm_method import NormMethod
from tests.conftest import tiny_llama_config
from tests.ghost.loop import assert_is_the_loop, flat, perturbed, row_gradients
from tests.mutations import kills
from tests.scarce import Interrupted


class Net(nn.Module):
    """Rows of 3 features to one loss per row, with a module in the middle."""

    def __init__(self, middle=None):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.middle = middle if middle is not None else nn.Identity()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))[:, 0] ** 2


def x(rows=5):
    return torch.randn(rows, 3)


def losses(model, batch):
    return model(batch["x"])


@pytest.mark.parametrize("middle", [nn.GroupNorm(2, 4), nn.RMSNorm(4)])
def test_modules_of_any_class_are_exact(middle):
    """A module without a rule is either recognised as a scale or differentiated row by row."""
    assert_is_the_loop(perturbed(Net(middle)), losses, {"x": x().double()})


def test_remove_leaves_the_model_as_it_was():
    """After remove(), ordinary training works as before."""
    model, inputs = Net(), x()
    model(inputs).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    clipper = GhostClipper(model, 0.5)
    clipper.backward(model(inputs))
    clipper.remove()
    model.zero_grad()
    model(inputs).sum().backward()
    for p, b in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, b)
    assert not model._forward_hooks and not model.first._forward_hooks and not model.first._forward_pre_hooks


@pytest.mark.parametrize("passes", [0, 1, 2])  # the first call is watched, the third is not
@pytest.mark.parametrize("end", ["forget", "remove"])
def test_a_call_that_ctrl_c_broke_off_is_ended(end, passes):
    """PyTorch runs no hooks then: a layer stayed out of training, and the watch of functions in the process."""
    model, inputs = perturbed(Net(Interrupted(4, 4))), x().double()
    clipper = GhostClipper(model, 0.5)
    for _ in range(passes):
        clipper.backward(model(inputs))
    model.middle.pressed = True
    with pytest.raises(KeyboardInterrupt):
        model(inputs)
    model.middle.pressed = False
    getattr(clipper, end)()  # before zero_grad(): the watch hides gradients from it
    model.zero_grad()
    assert all(p.requires_grad for p in model.parameters())
    assert not torch.overrides._get_current_function_mode_stack()
    if end == "remove":
        assert_is_the_loop(model, losses, {"x": inputs})
        return
    result = clipper.backward(model(inputs))
    parameters = list(clipper.parameters.values())
    found = flat([p.grad for p in parameters], parameters)
    clipper.remove()
    rows = row_gradients(model, losses, {"x": inputs})
    torch.testing.assert_close(result.factors.double(), (0.5 / rows.norm(dim=1)).clamp(max=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(found, result.factors.double() @ rows, rtol=1e-4, atol=1e-6)


def test_evaluation_between_forward_passes_changes_nothing():
    """generate() and evaluation under no_grad may run while the clipper is attached."""
    model, inputs = Net(), x()
    clipper = GhostClipper(model, 0.5)
    with torch.no_grad():
        model(inputs)
        model.first(inputs)
    assert all(p.requires_grad for p in model.parameters())
    clipper.backward(model(inputs))
    assert model.first.weight.grad is not None


@pytest.mark.parametrize(
    ("losses", "match"),
    [
        (lambda net: net(x()).mean(), r"shape \(\).*one loss per row"),
        (lambda net: net(x())[:, None], r"shape \(5, 1\)"),
        (lambda net: net(x()).detach(), "no graph"),
        (lambda net: net(x())[:0], r"shape \(0,\)"),
    ],
    ids=["scalar", "column", "no graph", "empty"],
)
def test_losses_of_another_form_are_refused(losses, match):
    """A batch mean or a broadcast column cannot be clipped per unit."""
    net = Net()
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=match):
        clipper.backward(losses(net))


@pytest.mark.parametrize(
    ("index", "match"),
    [
        (torch.zeros(4, dtype=torch.int64), r"shape \(4,\)"),
        (torch.zeros(5), "dtype torch.float32"),
        (torch.tensor([0, 1, -2, 0, 1]), "contains -2"),
    ],
)
def test_a_wrong_unit_index_is_refused(index, match):
    """Rows must be assigned to units one by one."""
    net = Net()
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=match):
        clipper.backward(net(x()), index)


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
    """torch.compile may fuse away layers that have hooks."""
    with pytest.raises(GhostError, match=r"torch\.compile"):
        GhostClipper(torch.compile(Net()), 1.0)
    net = Net()
    net.middle.compile()
    with pytest.raises(GhostError, match="middle"):
        GhostClipper(net, 1.0)
    late = Net()
    clipper = GhostClipper(late, 1.0)
    late.compile(backend="eager")
    with pytest.raises(GhostError, match="model was compiled"):
        clipper.backward(late(x(2)))


class Centred(nn.Module):
    """Couples rows, but its name does not show it."""

    def forward(self, h):
        return h - h.mean(0)


class Cumulative(nn.Module):
    """Couples rows in one direction only."""

    def forward(self, h):
        return torch.cumsum(h, 0)


@pytest.mark.parametrize("middle", [Centred(), Cumulative()])
def test_rows_that_depend_on_each_other_are_found_by_measurement(middle):
    """The first batch shows whether a row's loss has a gradient in another row."""
    net = Net(middle)
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=r"loss of row \d depends on row \d"):
        clipper.backward(net(x()))


@pytest.mark.parametrize("passes", [1, 2])
def test_a_parameter_without_part_in_the_loss_is_refused(passes):
    """No parameter silently remains untrained."""
    net = Net()
    net.unused = nn.Linear(2, 2)
    clipper = GhostClipper(net, 1.0, NormMethod(backward_passes=passes))
    with pytest.raises(GhostError, match=r"unused\.weight"):
        clipper.backward(net(x()))


def test_backward_on_the_loss_itself_is_refused():
    """It would bypass clipping; it gives no parameter a gradient."""
    net = Net()
    GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=r"GhostClipper\.backward"):
        net(x()).sum().backward()
    assert all(p.grad is None for p in net.parameters())


def test_a_module_called_on_its_own_is_refused():
    """A use outside the model's forward pass would not be seen."""
    net = Net()
    GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match="directly"):
        net.first(x())


class Transposed(nn.Module):
    """Moves the rows away from the first dimension."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, h):
        return self.inner(h.T).T


def test_rows_that_leave_the_first_dimension_are_refused():
    """Features would be mistaken for rows."""
    net = Net(Transposed())
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=r"middle\.inner"):
        clipper.backward(net(x(5)))


class Noisy(nn.Module):
    """Draws random numbers in the function that uses the parameter."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.rand(1, 4))

    def forward(self, h):
        one = h[:, None]
        return nn.functional.scaled_dot_product_attention(one, one, one + self.p, self.p[..., :1], 0.5)[:, 0]


class Mixing(nn.Module):
    """Multiplies a matrix with all rows."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.rand(5, 5))

    def forward(self, h):
        return self.p @ h


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Mixing(), r"middle\.p is used by matmul\(\) .* the 5 rows of the batch cannot be told apart"),
        (Noisy(), r"middle\.p is used by scaled_dot_product_attention\(\) .* privacy\.gradients=per_unit"),
    ],
    ids=["rows mixed", "random inside"],
)
def test_functions_that_cannot_be_served_are_refused(module, match):
    """Per-row differentiation needs a function of each row, without randomness."""
    net = Net(module)
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=match):
        clipper.backward(net(x(5)))


class Bag(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.last = nn.Linear(4, 1)

    def forward(self, index):
        return self.last(self.table(index)).sum((1, 2))


class ShiftedTable(nn.Embedding):
    """A table whose output is not a scaled lookup."""

    def forward(self, index):
        return super().forward(index).cumsum(1)


class NormedTable(nn.Embedding):
    """A table whose output is normed, as Inkling's: a table of another width cannot be put in its place."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norm = nn.RMSNorm(sizes[1], elementwise_affine=False)

    def forward(self, index):
        return self.norm(super().forward(index))


class NearlyLookup(nn.Embedding):
    """A table that adds a small number to the rows it looks up: the check is as fine as the dtype."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        nn.init.uniform_(self.weight, 0.5, 1.5)

    def forward(self, index):
        return super().forward(index) + 1e-3


class Both(nn.Embedding):
    """ProphetNet's position embeddings also return the positions."""

    def forward(self, index):
        return super().forward(index), index


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (ShiftedTable, r"\(ShiftedTable\) is not a scaled lookup"),
        (NormedTable, r"\(NormedTable\) is not a scaled lookup .* privacy\.gradients=per_unit"),
        (NearlyLookup, r"\(NearlyLookup\) is not a scaled lookup"),
        (Both, r"\(Both\) returns tuple, not a tensor of looked up rows.*freeze it"),
    ],
)
def test_a_table_that_is_no_lookup_is_refused(kind, match):
    """An overridden forward is identified by probing, and the result is verified."""
    net = Bag(kind(7, 4))
    clipper = GhostClipper(net, 1.0)
    with pytest.raises(GhostError, match=f"table {match}"):
        clipper.backward(net(torch.randint(0, 7, (3, 4))))


@kills(
    "padding rows stay in the sum",
    "dpllm/ghost/receivers.py",
    "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 0, 0)",
    "torch.where(unit_B >= 0, factor_U[unit_B.clamp_min(0)] if factor_U.numel() else 1.0, 1.0)",
)
def test_padding_rows_get_no_gradient_even_if_they_are_not_finite():
    """unit_index -1: weight 0, also for a row whose forward pass overflows."""
    net, inputs = Net(), x(3)
    clipper = GhostClipper(net, 0.5)
    clipper.backward(net(inputs[:2]))
    alone = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    inputs[2] = float("inf")
    result = clipper.backward(net(inputs), torch.tensor([0, 1, -1]))
    assert result.norms.shape == (2,)
    for p, a in zip(net.parameters(), alone, strict=True):
        torch.testing.assert_close(p.grad, a)


@kills(
    "padding rows get weight 1",
    "dpllm/ghost/book.py",
    "weight_B = (one.rows.unit_B >= 0).to(loss_B.dtype)",
    "weight_B = torch.ones_like(loss_B)",
)
def test_the_loss_of_a_padding_row_has_weight_zero():
    """The backward pass gives it no gradient, before any factor is applied."""
    net = Net()
    book = Book(net, NormMethod(algorithm="gram"))
    book.backward(net(x(3)), torch.tensor([0, -1, 1]), num_units=2)
    factored = [c for (c,) in book._pass.contributions.values() if not isinstance(c, Instance)]
    assert factored
    for contribution in factored:
        assert not contribution.grad[1].any() and contribution.grad[[0, 2]].any()


def test_only_padding_rows_leave_zero_gradients():
    """An empty step still has a gradient to add noise to."""
    net = Net()
    clipper = GhostClipper(net, 0.5)
    result = clipper.backward(net(x(1)), torch.tensor([-1]))
    assert result.norms.numel() == 0
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("passes", [1, 2])
def test_a_nonfinite_unit_contributes_exactly_zero(tiny_llama, passes):
    """And every other unit contributes the same as without it."""
    ids = torch.randint(3, 61, (3, 6))
    clipper = GhostClipper(tiny_llama, 0.1, NormMethod(backward_passes=passes))
    clipper.backward(per_sequence_loss(tiny_llama(input_ids=ids[:2]).logits, ids[:2]))
    alone = [p.grad.clone() for p in tiny_llama.parameters()]
    tiny_llama.zero_grad()
    scale = torch.tensor([1.0, 1.0, float("nan")])
    result = clipper.backward(per_sequence_loss(tiny_llama(input_ids=ids).logits, ids) * scale)
    assert result.num_nonfinite == 1 and float(result.factors[2]) == 0.0
    for p, a in zip(tiny_llama.parameters(), alone, strict=True):
        torch.testing.assert_close(p.grad, a, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("tokens", [4, 1500])
@pytest.mark.parametrize("several", [False, True], ids=["one row", "two rows"])
def test_what_a_unit_releases_through_a_large_layer_is_within_the_bound(tokens, several):
    """A million entries in one weight, as factors and as instance: the released norm is at most C and close to it."""
    torch.manual_seed(0)
    model = nn.Linear(1024, 1536)
    rows = 2 if several else 1
    clipper = GhostClipper(model, clip_norm=0.5)
    losses = model(torch.ones(rows, tokens, 1024)).sum((1, 2))
    result = clipper.backward(losses, torch.zeros(rows, dtype=torch.long))
    clipper.remove()
    released = torch.cat([p.grad.flatten().double() for p in model.parameters()]).norm()
    assert 0.5 * (1 - 2e-3) <= float(released) <= 0.5
    exact = rows * tokens * (1536 * 1024 + 1536) ** 0.5
    assert result.norms.tolist() == pytest.approx([exact], rel=1e-5)


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
    with pytest.raises(GhostError, match=rf"Rows of {limit + 1} tokens: beyond {limit} this model chooses"):
        model(input_ids=ids, attention_mask=mask)
