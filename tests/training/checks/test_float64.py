"""Rounding refuses no run, however ill-conditioned its model; a coupling of rows that is smaller than it does.

Numbers are compared with float64.
"""

import pytest
import torch
from torch import nn

from dpllm import GhostClipper, PrivacyConfig, PrivateRun, make_plan
from dpllm.training.checks.independence import IndependenceError, float64_operations
from tests import host_waits
from tests.mutations import kills
from tests.small_model import rows_by_number
from tests.test_host_waits import collate, losses

UNITS, WIDTH = 24, 512


class IllConditioned(nn.Module):
    """A layer whose sum nearly cancels, and whose terms have another order for one row than for many, as of a kernel.

    Rounding moves its output by 1e-4 of itself and more.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(WIDTH, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        order = torch.arange(WIDTH) if len(x) == 1 else torch.arange(WIDTH).flip(0)
        return self.head(torch.tanh(1e3 * (x[:, order] @ self.weight[order])))


class WellConditioned(IllConditioned):
    """The same layer in float64."""

    def forward(self, x):
        return self.head(torch.tanh(1e3 * (x.double() @ self.weight.double())).float())


def loss_of(model, inputs):
    return (model(inputs["x"]) - 1).square().mean(1)


def first_step(folder, loss_of, model=None):
    """Take the first step of a run, after its check of rows; return both the run and the differences found."""
    torch.manual_seed(3)
    model = IllConditioned() if model is None else model
    half = torch.randn(UNITS, WIDTH // 2)
    x = torch.cat([half, 1e-4 * torch.randn(UNITS, WIDTH // 2) - half], 1)
    with torch.no_grad():
        model.weight[WIDTH // 2 :] = model.weight[: WIDTH // 2]
    rows = rows_by_number(x, lambda rows: {"x": torch.stack(rows)})
    privacy = PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=8)
    run = PrivateRun.start(folder, make_plan(privacy, UNITS, 2), rows)
    run.attach(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    try:
        run.step(next(run.draws(1)), loss_of)
        return run, run.row_differences
    finally:
        run.detach()


def test_rounding_of_an_ill_conditioned_model_is_an_open_point(tmp_path):
    """And no refusal. A model that rounds less has no such point."""
    run, found = first_step(tmp_path / "ill", loss_of)
    assert found.norm > 2 * found.tolerance
    assert sum("float64" in point for point in run.finish()["open_points"]) == 1
    well, found = first_step(tmp_path / "well", loss_of, WellConditioned())
    assert found.norm <= found.tolerance
    assert not any("float64" in point for point in well.finish()["open_points"])


@kills(
    "a difference between rows that remains in float64 counts as rounding",
    "dpllm/training/checks/independence.py",
    "vanishes = passes.differing(exact) is None and agree",
    "vanishes = agree",
)
@kills(
    "a difference that went while rows were compared counts as rounding",
    "dpllm/training/checks/independence.py",
    " and agree(results, run(), SAME)",
    "",
)
@pytest.mark.parametrize("most", [8, 1e9])
def test_a_coupling_hides_in_no_rounding(tmp_path, most):
    """It moves norms by 1e-4, a tenth of what rounding does, for good or up to some pass of the check."""
    calls = 0

    def coupled(model, inputs):
        """Lengthens a row's gradient, and not its loss, by 3e-5 for each other row."""
        nonlocal calls
        calls += 1
        loss_B = loss_of(model, inputs)
        return loss_B + (calls <= most) * 3e-5 * (len(loss_B) - 1) * (loss_B - loss_B.detach())

    with pytest.raises(IndependenceError, match=r"The (loss|gradient norm) of a row depends on other rows"):
        first_step(tmp_path, coupled)


@kills(
    "a difference between rows counts as rounding where float64 gives no numbers",
    "dpllm/training/checks/independence.py",
    " and agree(results, exact, NEAR)\n",
    "\n",
)
def test_a_loss_without_a_value_in_float64_is_refused(tmp_path):
    """Results that are no numbers do not differ, and show nothing."""

    def of_limits(model, inputs):
        loss_B = loss_of(model, inputs)
        zero_B = torch.nan_to_num(torch.full_like(loss_B, -torch.inf)).add(3.4028235e38).clamp(-1, 1)
        return loss_B * (1 + 1e-4 * (len(loss_B) - 1)) * (1 + torch.log1p(zero_B))

    with pytest.raises(IndependenceError, match="of a row depends on other rows"):
        first_step(tmp_path, of_limits)


def lora(seed):
    """Return a Llama with LoRA and random factors, which is ill-conditioned for a few rows in a hundred, and rows."""
    model = host_waits.build(host_waits.CASES["LoRA"])
    torch.manual_seed(seed)
    return model, [torch.randint(3, host_waits.VOCABULARY, (12 - number % 3,)) for number in range(10)]


@pytest.mark.parametrize(("seed", "row"), [(807, 5), (152, 2), (1, 2)])
def test_rows_alone_and_with_others_have_one_norm_in_float64(seed, row):
    """In float32, too, a norm is that of the gradient of its pass: here that gradient differs, by up to 1.5e-3."""
    model, ids = lora(seed)
    clipper = GhostClipper(model, 0.5)
    plain, _ = lora(seed)
    parameters = [p for p in plain.parameters() if p.requires_grad]
    norms = []
    for numbers in ([row], [row, (row + 1) % 10, (row + 2) % 10, (row + 4) % 10]):
        inputs = collate([ids[number] for number in numbers])
        norm_B = clipper.backward(losses(model, inputs)).norms
        gradients = torch.autograd.grad(losses(plain, inputs)[0], parameters)
        exact = float(torch.cat([one.double().flatten() for one in gradients]).norm())
        assert float(norm_B[0]) == pytest.approx(exact, rel=2e-6)
        with float64_operations():
            norms.append(float(clipper.backward(losses(model, inputs)).norms[0]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_operation_is_the_rounded_one_of_float64(dtype):
    """Matrix products, reductions, what writes into its input, and backward passes."""
    torch.manual_seed(0)
    x, w = torch.randn(7, 300).to(dtype), torch.randn(300, 5).to(dtype).requires_grad_()
    exact = (x.double() @ w.detach().double()).to(dtype)
    total = torch.randn(7, 5).to(dtype)
    added = (total.double() + 0.3 * exact.double()).to(dtype)
    with float64_operations():
        product = x @ w
        assert total.add_(product.detach(), alpha=0.3) is total
        (gradient,) = torch.autograd.grad(product.float().square().sum(), [w])
        mean = x.mean(0, dtype=torch.float32)
        out = torch.empty(7, 5, dtype=dtype)
        torch.mm(x, w.detach(), out=out)
    assert torch.equal(product, exact) and torch.equal(total, added) and torch.equal(out, exact)
    assert product.dtype == gradient.dtype == dtype
    assert torch.equal(gradient, (x.double().mT @ (2 * exact.double()).to(dtype).double()).to(dtype))
    assert torch.equal(mean, x.double().mean(0).float())


def test_views_random_numbers_and_whole_numbers_stay():
    x, counts = torch.randn(4, 6), torch.zeros(3, dtype=torch.int64)
    torch.manual_seed(0)
    drawn = torch.rand(5), torch.nn.functional.dropout(torch.ones(50)), torch.rand(5)
    torch.manual_seed(0)
    with float64_operations():
        again = torch.rand(5), torch.nn.functional.dropout(torch.ones(50)), torch.rand(5)
        x.view(2, 12)[0, 0] = 7
        counts.add_(2)
        wide = torch.ones(3, dtype=torch.float64).add_(torch.ones(3))
    assert all(map(torch.equal, drawn, again))
    assert float(x[0, 0]) == 7 and counts.tolist() == [2, 2, 2] and wide.tolist() == [2, 2, 2]
