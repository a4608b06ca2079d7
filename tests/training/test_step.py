"""A private step: a clipped sum with noise, charged before it is used, divided by a public constant."""

import numpy as np
import pytest
import torch

from dpllm import GhostClipper, GhostError, NormMethod, PrivacyConfig, make_plan, per_sequence_loss
from dpllm.data.units import UnitIndex
from dpllm.engines import SingleProcess
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentStream
from dpllm.privacy.ledger import Ledger, read_ledger
from dpllm.training.microbatches import microbatches
from dpllm.training.step import private_step
from tests.ghost.test_two_passes import Growing
from tests.mutations import kills

N, T = 40, 3


def make(tmp_path, num_steps=T, **privacy):
    settings = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 8}
    plan = make_plan(PrivacyConfig(**{**settings, **privacy}), N, num_steps)
    return plan, Ledger.create(tmp_path / "ledger.jsonl", plan)


class Rows:
    """N random rows of different lengths, and their microbatches."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(4, 9, (N,), generator=generator)
        self.ids = [torch.randint(3, 61, (int(n),), generator=generator) for n in lengths]

    def collate(self, rows):
        longest = max(len(row) for row in rows)
        ids = torch.stack([torch.cat([row, row.new_zeros(longest - len(row))]) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    def batches(self, unit_ids, max_rows=3):
        lengths = np.array([len(row) for row in self.ids])
        ids = np.asarray(unit_ids, dtype=np.int64)
        return microbatches(
            lambda numbers: [self.ids[int(n)] for n in numbers],
            self.collate,
            UnitIndex.one_row_per_unit(N),
            lengths,
            ids,
            max_rows,
        )


def loss_of(model):
    def loss(inputs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        return per_sequence_loss(logits, inputs["labels"])

    return loss


def engine_of(model, kind=SingleProcess):
    return kind(torch.optim.SGD(model.parameters(), lr=0.1))


def step(model, plan, ledger, unit_ids, seed=None, max_rows=3):
    clipper = GhostClipper(model, plan.clip_norm)
    batch = Rows().batches(unit_ids, max_rows)
    done = private_step(
        clipper, batch, loss_of(model), plan, engine_of(model), ledger, IndependentStream(NoiseSource(seed))
    )
    clipper.remove()
    return done, torch.cat([p.grad.flatten().double() for p in model.parameters()])


@kills(
    "the sum is divided by the realised batch",
    "dpllm/training/step.py",
    "last=last, scale=self._scale, to_total",
    "last=last, scale=1 / max(1, microbatch.num_units), to_total",
)
def test_without_noise_the_gradient_is_the_clipped_sum_over_the_expected_batch_size(tiny_llama, tmp_path):
    """Divided by b of the plan, not by the number of units that were drawn."""
    plan, ledger = make(tmp_path, noise_multiplier=0.0)
    done, gradient = step(tiny_llama, plan, ledger, [3, 5, 7])
    expected = torch.zeros_like(gradient)
    for unit in (3, 5, 7):
        inputs = Rows().collate([Rows().ids[unit]])
        grads = torch.autograd.grad(loss_of(tiny_llama)(inputs).sum(), list(tiny_llama.parameters()))
        flat = torch.cat([g.flatten().double() for g in grads])
        expected += flat * min(1.0, 0.5 / float(flat.norm()))
    torch.testing.assert_close(gradient, expected / 8, rtol=1e-3, atol=1e-6)
    assert done.num_units == 3 and done.num_clipped == 3 and done.num_nonfinite == 0 and done.mean_loss > 0


@kills(
    "the noise is not added in the step",
    "dpllm/training/step.py",
    "        if self._to_totals:\n            return\n        name, stddev",
    "        if True:\n            return\n        name, stddev",
)
@kills(
    "the noise is added in every microbatch",
    "dpllm/training/step.py",
    "            if self._last:\n",
    "            if True:\n",
)
def test_the_noise_has_deviation_sigma_c_over_b_and_is_added_once(tiny_llama, tmp_path):
    """The noise is on every trainable entry, for any number of microbatches."""
    plan, ledger = make(tmp_path, noise_multiplier=2.0)
    _, noisy = step(tiny_llama, plan, ledger, [1, 2, 3, 4, 5], max_rows=1)
    tiny_llama.zero_grad()
    other = tmp_path / "silent"
    other.mkdir()
    quiet_plan, quiet_ledger = make(other, noise_multiplier=0.0)
    _, quiet = step(tiny_llama, quiet_plan, quiet_ledger, [1, 2, 3, 4, 5], max_rows=5)
    noise = noisy - quiet
    expected = 2.0 * 0.5 / 8
    assert float(noise.std()) == pytest.approx(expected, rel=0.05)
    assert abs(float(noise.mean())) < 5 * expected / noise.numel() ** 0.5


@kills(
    "the noise of a step with one microbatch is not written",
    "dpllm/training/step.py",
    "self._noise.write_share_(name, total.total, stddev, rank, size)",
    "total.total.zero_()",
)
@kills("the step is not charged", "dpllm/training/step.py", "    ledger.append_step(number, plan.event)\n", "")
def test_an_empty_step_is_taken_with_noise_alone(tiny_llama, tmp_path):
    """Skipping it would reveal that no unit was drawn."""
    plan, ledger = make(tmp_path)
    done, gradient = step(tiny_llama, plan, ledger, [])
    assert done.num_units == 0 and np.isnan(done.mean_loss)
    assert float(gradient.std()) == pytest.approx(0.5 / 8, rel=0.1)
    assert ledger.num_steps == 1


def test_the_step_is_in_the_ledger_before_anything_is_computed(tiny_llama, tmp_path):
    """A crash at any moment of the step leaves it charged; an uncharged update would make epsilon too small."""
    plan, ledger = make(tmp_path)

    class Crashing(SingleProcess):
        def collect(self, *args, **kwargs):
            raise MemoryError("in the middle of a step")

    clipper, engine = GhostClipper(tiny_llama, plan.clip_norm), engine_of(tiny_llama, Crashing)
    with pytest.raises(MemoryError, match="middle"):
        private_step(
            clipper, Rows().batches([1]), loss_of(tiny_llama), plan, engine, ledger, IndependentStream(NoiseSource())
        )
    assert read_ledger(ledger.path).history == [(plan.event, 1)]


def test_bfloat16_parameters_get_noise_in_float32_and_a_gradient_in_their_dtype(tiny_llama, tmp_path):
    """Rounding comes after the noise, as post-processing."""
    model = tiny_llama.bfloat16()
    plan, ledger = make(tmp_path)
    dtypes = []

    class Watching(NoiseSource):
        def add_(self, grad, noise_stddev):
            dtypes.append(grad.dtype)
            super().add_(grad, noise_stddev)

    clipper, engine = GhostClipper(model, plan.clip_norm), engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    private_step(clipper, Rows().batches([1, 2]), loss_of(model), plan, engine, ledger, IndependentStream(Watching()))
    assert set(dtypes) == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    optimizer.step()
    optimizer.zero_grad()
    private_step(clipper, Rows().batches([3]), loss_of(model), plan, engine, ledger, IndependentStream(Watching()))
    assert ledger.num_steps == 2


def test_gradients_left_over_are_refused(tiny_llama, tmp_path):
    """A gradient in .grad before the step would be released with it, unclipped."""
    plan, ledger = make(tmp_path)
    step(tiny_llama, plan, ledger, [1])
    with pytest.raises(ValueError, match="gradient from before"):
        step(tiny_llama, plan, ledger, [1])
    tiny_llama.zero_grad(set_to_none=False)
    with pytest.raises(ValueError, match="set_to_none=True"):
        step(tiny_llama, plan, ledger, [1])


def test_a_clipper_of_another_norm_is_refused(tiny_llama, tmp_path):
    """Noise is calibrated to the plan's clip norm."""
    plan, ledger = make(tmp_path)
    clipper = GhostClipper(tiny_llama, 2 * plan.clip_norm)
    with pytest.raises(ValueError, match=r"clip_norm=1\.0"):
        batch, engine = Rows().batches([1]), engine_of(tiny_llama)
        private_step(clipper, batch, loss_of(tiny_llama), plan, engine, ledger, IndependentStream(NoiseSource()))
    assert ledger.num_steps == 0


@kills(
    "the comparison of a second backward pass is not read before the update",
    "dpllm/training/step.py",
    "        clipper.settle()\n",
    "",
)
@pytest.mark.parametrize("grows", [1, 2, 3])
def test_a_second_pass_that_is_not_repeatable_reaches_no_update(grows, tiny_llama, tmp_path):
    """The host reads the comparison once a step, before the update, whichever microbatch it is of."""
    plan, ledger = make(tmp_path)
    norm_method = NormMethod(backward_passes=2)
    clipper, engine = GhostClipper(tiny_llama, plan.clip_norm, norm_method), engine_of(tiny_llama)
    calls = []

    def losses(inputs):
        calls.append(1)
        loss_B = loss_of(tiny_llama)(inputs)
        return Growing.apply(loss_B, [1.0]) if len(calls) == grows + checks else loss_B

    def take():
        batch = Rows().batches([1, 2, 3, 4, 5, 6], max_rows=2)
        private_step(clipper, batch, losses, plan, engine, ledger, IndependentStream(NoiseSource()))

    checks = 1000
    take()  # rows are compared
    tiny_llama.zero_grad()
    checks, before = 0, {name: p.detach().clone() for name, p in tiny_llama.named_parameters()}
    calls.clear()
    with pytest.raises(GhostError, match="second backward"):
        take()
    assert len(calls) == 3 and all(p.grad is None for p in tiny_llama.parameters())
    assert all(torch.equal(p, before[name]) for name, p in tiny_llama.named_parameters())
