"""A federated client: its training, the bound of its update, and its share of the noise."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from dpllm.config import ConfigError
from dpllm.data.rows import RowCollator
from dpllm.methods.federated.client import LocalTraining, SharedWeights, Shares, bounded
from dpllm.methods.sections import FederatedConfig
from tests.methods.federated.small import plan_of
from tests.mutations import kills


@pytest.mark.parametrize("size", [1, 37, 5000])
def test_rounding_never_exceeds_the_clip_norm(size):
    """Whatever the update: half a step in every entry, far too large, and 0."""
    shares, rng = Shares(clip_norm=1.0, step=1e-3), np.random.default_rng(0)
    half = np.full(size, 0.5005e-3)
    for update in (half, 50 * rng.standard_normal(size), 1e-9 * rng.standard_normal(size), np.zeros(size)):
        whole = shares.rounded(update)
        assert whole.dtype == np.int64 and np.linalg.norm(whole) * 1e-3 <= 1.0
    long = shares.rounded(50 * rng.standard_normal(size))
    assert np.linalg.norm(long) * 1e-3 > 1 - 1.1e-3 * math.sqrt(size)


def test_a_sum_modulo_2_64_is_read_as_the_sum():
    shares, rng = Shares(clip_norm=1.0, step=2.0**-12), np.random.default_rng(0)
    updates = rng.standard_normal((9, 50)) / 30
    total = sum(shares.rounded(one).view(np.uint64) for one in updates)
    assert shares.read(total) == pytest.approx(updates.sum(0), abs=9 * 2.0**-13)


@kills(
    "clients share the noise of a round among the whole cohort, so that dropouts take their part with them",
    "dpllm/methods/federated/client.py",
    "math.sqrt(event.min_batch_size)",
    "math.sqrt(event.max_batch_size)",
)
def test_the_noise_of_a_client_is_its_share():
    """Discrete Gaussian of 2^16 steps, whatever the update; n of them have σC."""
    plan = plan_of(num_clients=40, batch=40, secure=True, clip_norm=2.0, max_batch_size=40)
    shares, fewest = Shares.of(plan), plan.event.min_batch_size
    noise = shares.with_noise(np.zeros(20_000)).view(np.int64)
    assert shares.step * 2**16 * math.sqrt(fewest) == pytest.approx(plan.noise_stddev)
    assert stats.kstest(noise / 2**16, "norm").pvalue > 1e-4
    assert not np.array_equal(noise, shares.with_noise(np.zeros(20_000)).view(np.int64))


def test_models_too_large_for_the_grid_are_refused():
    shares = Shares(clip_norm=1.0, step=1e-3)
    shares.require_entries(1_000_000)
    with pytest.raises(ValueError, match="fewer parameters"):
        shares.require_entries(1_100_000)


@pytest.mark.parametrize("changes", [{}, {"secure": True, "noise_multiplier": 0.0}])
def test_secure_aggregation_without_noise_of_clients_is_refused(changes):
    with pytest.raises(ValueError, match=r"privacy\.noise=distributed"):
        Shares.of(plan_of(num_clients=40, batch=40, **changes))


ROWS = [{"input_ids": [number % 17 + 1 for number in range(start, start + 6)]} for start in range(12)]
OTHERS = [{"input_ids": [3, 3, 3, 9]}] * 5


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def adapted(model):
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return get_peft_model(copy.deepcopy(model), adapter)


def training_of(model, lora="freeze_a", **changes):
    weights = SharedWeights(model, lora)
    collator = RowCollator(pad_token_id=0)
    return LocalTraining(model, weights, collator, FederatedConfig(**changes), batch_size=12), weights


def test_no_client_changes_the_update_of_another(model):
    """All rows are in one batch, so the update is a function of rows and weights, whoever trained before."""
    training, weights = training_of(copy.deepcopy(model), local_steps=3)
    start = weights.read()
    first = training.update(ROWS, start, 0)
    training.update(OTHERS, start + 1, 1)
    assert np.abs(first).max() > 1e-3
    assert training.update(ROWS, start, 0) == pytest.approx(first, abs=1e-6)  # float32


class Fails(list):
    """Rows of a client whose second step fails, after the first one was seen."""

    def __getitem__(self, place):
        if self.pop_count:
            raise RuntimeError("a record that cannot be read")
        self.pop_count += 1
        return super().__getitem__(place)

    pop_count = 0


@pytest.mark.parametrize("fails", [False, True])
def test_the_longest_row_of_a_client_does_not_change_the_update_of_another(fails):
    """Dynamic rotary embeddings keep the frequencies of the longest row so far: it moved 0.28 of another's update."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=20, max_position_embeddings=8, initializer_range=0.3, rope_parameters=rope, **small)
    training, weights = training_of(LlamaForCausalLM(config), local_steps=2)
    rows, start = [{"input_ids": [number % 17 + 1 for number in range(12)]}], weights.read()
    first = training.update(rows, start, 0)
    long = [{"input_ids": [number % 19 + 1 for number in range(30)]}]
    if fails:
        with pytest.raises(RuntimeError, match="cannot be read"):
            training.update(Fails(long), start, 0)
    else:
        training.update(long, start, 0)
    assert np.abs(training.update(rows, start, 0) - first).max() < 1e-5 * np.abs(first).max()


def test_the_update_is_that_of_plain_training(model):
    """Three steps of SGD on all rows, in a loop of its own."""
    training, weights = training_of(copy.deepcopy(model), local_steps=3, local_learning_rate=0.2)
    start = weights.read()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2)
    ids = torch.tensor([row["input_ids"] for row in ROWS])
    for _ in range(3):
        optimizer.zero_grad()
        reference(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = torch.cat([one.detach().flatten() for one in reference.parameters()]).numpy() - start
    assert training.update(ROWS, start, 0) == pytest.approx(moved, abs=1e-5)


@pytest.mark.parametrize(("lora", "factors"), [("freeze_a", "BBB"), ("alternate", "BAB")])
def test_a_round_trains_one_factor_of_an_adapter(adapted, lora, factors):
    """The average of A and of B is not the average of BA: in each round the change is linear in one factor."""
    _, weights = training_of(adapted, lora)
    assert weights.size() > weights.size(weights.of_round(0))
    for number, factor in enumerate(factors):
        assert {f".lora_{factor}." in name for name in weights.of_round(number)} == {True}


def test_the_server_sends_both_factors(adapted):
    """A client has the server's random A, whatever its own was."""
    _, weights = training_of(adapted)
    other = weights.read() + 0.5
    weights.write(other.astype(np.float32))
    assert np.array_equal(weights.read(), other.astype(np.float32))
    with pytest.raises(ValueError, match="Give both"):
        weights.write(other[1:])


class Counts(torch.nn.Module):
    """A model with a buffer that counts, as batch norm's does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, **inputs):
        if self.training:
            self.seen += inputs["input_ids"].sum()
        return self.inner(**inputs)


def test_a_buffer_that_could_carry_records_is_refused(model):
    training, weights = training_of(Counts(copy.deepcopy(model)))
    with pytest.raises(ConfigError, match="seen changed"):
        training.update(ROWS, weights.read(), 0)


def test_a_model_without_trained_weights_is_refused(model):
    frozen = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        SharedWeights(frozen, "freeze_a")


def test_updates_are_bounded_by_the_clip_norm():
    plan, rng = plan_of(clip_norm=0.3), np.random.default_rng(0)
    for size in (1e-3, 0.3, 1e6):
        update = size * rng.standard_normal(1000) / np.sqrt(1000)
        assert np.linalg.norm(bounded(update, plan)) <= 0.3
    assert not bounded(np.array([1.0, np.inf]), plan).any()
