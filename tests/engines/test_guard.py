"""The guard of the first update: silent on the private sum, an error on any other gradient at the optimizer."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.engines import SingleProcess
from dpllm.engines.base import set_gradient
from dpllm.engines.guard import Projections, UpdateError, UpdateGuard
from dpllm.engines.processes import Processes
from dpllm.ghost.sums import Sum
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentStream
from dpllm.privacy.plan import PrivacyPlan
from dpllm.training.microbatches import Microbatch
from dpllm.training.step import private_step
from tests.memory_ledger import MemoryLedger
from tests.mutations import kills

FEATURES, OUTPUTS, EXPECTED = 24, 12, 8
LOSS_SCALE = 65536.0  # of a loss scaler that was not undone
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def plan_of(noise_multiplier, clip_norm=0.5):
    return PrivacyPlan(
        unit="sequence",
        adjacency="zero-out",
        num_units=100,
        sampling_rate=EXPECTED / 100,
        expected_batch_size=EXPECTED,
        max_batch_size=30,
        num_steps=1000,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        delta=1e-3,
    )


def network(dtype=torch.float32):
    layers = [nn.Linear(FEATURES, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, OUTPUTS)]
    return nn.Sequential(*layers).to(dtype)


def microbatches(sizes, dtype=torch.float32):
    for size in sizes:
        rows = max(size, 1)
        inputs = {"x": torch.randn(rows, FEATURES, dtype=dtype), "y": 1 + torch.randn(rows, OUTPUTS, dtype=dtype)}
        yield Microbatch(inputs, torch.arange(rows) if size else torch.tensor([-1]), size)


class Run:
    """A network, its engine, and private steps up to the optimizer."""

    def __init__(
        self,
        noise_multiplier=0.8,
        dtype=torch.float32,
        kind=torch.optim.SGD,
        trained=slice(None),
        clip_norm=0.5,
        wrap=lambda optimizer: optimizer,
    ):
        self.plan, self.dtype, self.model = plan_of(noise_multiplier, clip_norm), dtype, network(dtype)
        self.optimizer = wrap(kind(list(self.model.parameters())[trained], lr=1e-3))
        self.engine = SingleProcess(self.optimizer)
        self.clipper, self.ledger = GhostClipper(self.model, clip_norm), MemoryLedger()

    def loss_of(self, inputs):
        return (self.model(inputs["x"]) - inputs["y"]).square().mean(1)

    def private(self, sizes=(3, 3, 1), seed=None):
        batch = microbatches(sizes, self.dtype)
        noise = IndependentStream(NoiseSource(seed))
        return private_step(self.clipper, batch, self.loss_of, self.plan, self.engine, self.ledger, noise)

    def gradients(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("sizes", [(5,), (3, 3, 1), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("noise_multiplier", [0.0, 0.8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_private_step_passes(dtype, noise_multiplier, sizes, kind):
    """One microbatch or several, an empty step, padding, every dtype: no error; the guard is disabled afterwards."""
    run = Run(noise_multiplier, dtype, kind)
    run.private(sizes)
    assert not run.engine.guard.done
    run.optimizer.step()
    assert run.engine.guard.done


@kills(
    "what was handed in for an update that was left out counts for the next one",
    "dpllm/engines/guard.py",
    "        self._handed_in, self._left = 0.0, None\n",
    "        pass\n",
)
def test_an_update_that_is_left_out_is_no_fault_of_the_next_one():
    """A loop may drop the gradient of a step, which stays charged."""
    run = Run()
    for _ in range(2):
        run.private()
        run.optimizer.zero_grad()
    run.private()
    run.optimizer.step()
    assert run.engine.guard.done


def test_gradients_that_are_not_clipped_pass():
    """A clip norm above every gradient: the sum is far shorter than C times the number of units."""
    for noise_multiplier in (0.0, 1e-3):
        run = Run(noise_multiplier, clip_norm=1e4)
        run.private()
        run.optimizer.step()


@kills("the guard looks away", "dpllm/engines/guard.py", "            raise _refusal(", "            _refusal(")
def test_wrappers_around_the_optimizer_are_looked_through(accelerator):
    """accelerate's optimizer is an Optimizer itself; the guard watches the one that makes the update."""

    class Outer:
        def __init__(self, optimizer):
            self.optimizer = optimizer
            self.step, self.zero_grad = optimizer.step, optimizer.zero_grad

    for wrap in (accelerator.prepare, lambda optimizer: Outer(accelerator.prepare(optimizer))):
        for tampered in (False, True):
            run = Run(kind=torch.optim.AdamW, wrap=wrap)
            assert type(run.optimizer) is not torch.optim.AdamW
            run.private(seed=1)
            if tampered:
                run.model[0].weight.grad.mul_(0.5)
            with pytest.raises(UpdateError, match="private sum") if tampered else nullcontext():
                run.optimizer.step()
            assert run.engine.guard.done != tampered


def clip(run):
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in run.gradients()]))
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.5 * float(norm))


def scaled(factor):
    def scale(run):
        for grad in run.gradients():
            grad.mul_(factor)

    return scale


def replace(run):
    run.clipper.remove()
    run.optimizer.zero_grad()
    (batch,) = microbatches((7,), run.dtype)
    run.loss_of(batch.inputs).mean().backward()


def add_noise(run):
    for grad in run.gradients():
        grad.add_(0.8 * 0.5 / EXPECTED * torch.randn_like(grad))


def add_gradient(run):
    before = [grad.clone() for grad in run.gradients()]
    replace(run)
    for grad, private in zip(run.gradients(), before, strict=True):
        grad.add_(private)


def forget(run):
    run.model[0].weight.grad = None


def overflow(run):
    run.model[0].weight.grad[0, 0] = float("nan")


@pytest.mark.parametrize(
    "tamper",
    [clip, scaled(1 / EXPECTED), scaled(LOSS_SCALE), scaled(0), replace, add_noise, add_gradient, forget, overflow],
    ids=["clip", "divide", "multiply", "zero", "replace", "add noise", "add gradient", "forget", "overflow"],
)
@pytest.mark.parametrize("noise_multiplier", [0.0, 0.8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_anything_else_is_stopped_before_the_update(dtype, noise_multiplier, tamper):
    """Rescaled, replaced, zeroed, noisier, mixed or incomplete: an error, and the parameters do not change."""
    run = Run(noise_multiplier, dtype)
    run.private(seed=1)
    tamper(run)
    before = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(UpdateError, match="private sum"):
        run.optimizer.step()
    assert all(torch.equal(b, p) for b, p in zip(before, run.model.parameters(), strict=True))


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.8])
def test_an_optimizer_over_some_of_the_parameters_is_an_error(noise_multiplier):
    """The share of the others is charged and never used, as with an engine whose hooks no longer fire."""
    run = Run(noise_multiplier, trained=slice(2, None))
    run.private(seed=1)
    with pytest.raises(UpdateError, match="not the private sum"):
        run.optimizer.step()


def test_a_private_step_that_the_engine_loses_is_an_error():
    """An empty update would still change the weights with Adam."""
    run = Run()
    run.private()
    run.optimizer.zero_grad()
    with pytest.raises(UpdateError, match="expected between"):
        run.optimizer.step()


def test_an_update_before_any_private_step_is_an_error():
    """For instance by a custom loop that computes its gradient with backward()."""
    run = Run()
    replace(run)
    with pytest.raises(UpdateError, match="stepped"):
        run.optimizer.step()


def test_the_first_step_alone_is_checked():
    """The guard protects against a program that is wrong from the start, at no cost later; it ignores later steps."""
    run = Run()
    run.private()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.private()
    scaled(1 / EXPECTED)(run)
    run.optimizer.step()


def test_the_message_names_what_differs_and_what_to_do():
    """The two numbers and the remedy, but no other value that depends on the data."""
    run = Run(0.0)
    run.private(seed=1)
    scaled(LOSS_SCALE)(run)
    with pytest.raises(UpdateError, match="expected between"):
        run.optimizer.step()


@pytest.mark.parametrize("entries", [1, 30, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_false_alarm_in_many_first_steps(dtype, entries):
    """Fresh noise each time, from few entries to many, with signals far below the noise and far above it."""
    generator = torch.Generator().manual_seed(1)
    for trial in range(300):
        parameter = nn.Parameter(torch.zeros(entries, dtype=dtype))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        guard = UpdateGuard(optimizer, Processes(), replicas=1)
        clip_norm, units = 10.0 ** (trial % 7 - 3), trial % 5
        noise_stddev = 0.7 * clip_norm * (trial % 3 > 0)
        total = torch.zeros(entries)
        for unit in range(units):
            with guard.handing_in(Sum.onto(total)):
                share = torch.randn(entries, generator=generator)
                total += clip_norm * share / share.norm()
                if unit == units - 1:
                    NoiseSource().add_(total, noise_stddev)
        if units == 0:
            with guard.handing_in(Sum.onto(total)):
                NoiseSource().add_(total, noise_stddev)
        guard.expect(units, entries, clip_norm, noise_stddev, scale=1 / EXPECTED)
        set_gradient(parameter, total / EXPECTED)
        optimizer.step()
        assert guard.done


def test_what_adds_up_to_zero_is_seen_as_well():
    """The gradient of a softmax head sums to zero, and so does the added tensor: the norm reveals it."""
    run = Run()
    run.private()
    extra = torch.randn_like(run.model[3].weight.grad)
    run.model[3].weight.grad.add_(extra - extra.mean(), alpha=1e-3)
    with pytest.raises(UpdateError, match="its norm is"):
        run.optimizer.step()


def test_a_refused_gradient_stays_refused():
    """Catching the error and stepping again must not apply it."""
    run = Run()
    run.private()
    run.model[0].weight.grad.mul_(3)
    before = run.model[0].weight.detach().clone()
    for _ in range(2):
        with pytest.raises(UpdateError, match="private sum"):
            run.optimizer.step()
    assert torch.equal(run.model[0].weight, before)


@pytest.mark.parametrize("change", [lambda t: t * 0.5, lambda t: t + (torch.randn(6) - 0), lambda t: 0 * t])
def test_projections_see_what_an_engine_did_out_of_sight(change):
    """A total that was rescaled, added to or dropped differs in its projection; the right one passes."""
    torch.manual_seed(0)
    parts = [torch.randn(6) for _ in range(3)]
    projections = Projections(Processes())
    for part in parts:
        projections.hand_in(0, part)
    total = sum(parts)
    assert projections.verify(iter([(0, total)])) == pytest.approx(float(total.square().sum()))
    with pytest.raises(UpdateError, match="projection"):
        projections.verify(iter([(0, change(total))]))
