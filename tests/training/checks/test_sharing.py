"""Random numbers that rows of a microbatch share are refused; numbers of each row, and numbers without influence, pass.

Through the public API: `DPTrainer`, and `PrivateRun` with a custom loop.
"""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from dpllm.training.checks.independence import IndependenceError, shared_draws
from dpllm.training.checks.repeatable import Draw
from tests.training.checks.test_independence import GPT2, Noisy, lm_loss, rows_of, steps, trainer, unequal

MODEL = "^The model or the loss draws random numbers that (all )?rows of a microbatch share.*Draw separate numbers"


class Plain(nn.Module):
    """Logits of each token from its embedding, through one layer."""

    def __init__(self, layer=None):
        super().__init__()
        self.first, self.layer, self.last = nn.Embedding(61, 16), layer or nn.Identity(), nn.Linear(16, 61)

    def forward(self, input_ids, **kwargs):
        return type("Output", (), {"logits": self.last(self.layer(self.first(input_ids)))})()


class Acting(nn.Module):
    """A layer that is a function of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def weighted(numbers):
    """A loss whose rows are weighted by random numbers, made for a number of rows."""
    return lambda model, inputs: lm_loss(model, inputs) * (1 + numbers(len(inputs["input_ids"])))


SHARED = {
    "torch": lambda rows: float(torch.rand(()) < 0.5),
    "of one number": lambda rows: torch.rand(1).item(),
    "randint": lambda rows: torch.randint(0, 2, (1,)).item(),
    "rare": lambda rows: float(torch.rand(()) < 1e-4),
    "half as many": lambda rows: torch.rand(rows // 2 + 1).repeat(2)[:rows],
    "randperm": lambda rows: torch.randperm(7)[0].item(),
    "Python": lambda rows: float(random.random() < 0.5),
    "numpy": lambda rows: np.random.rand(),
    "Python, rare": lambda rows: float(random.random() < 0.03),
}


@pytest.mark.parametrize("numbers", SHARED.values(), ids=SHARED)
def test_a_loss_whose_rows_share_random_numbers_is_refused_before_an_update(numbers, tmp_path):
    model = Plain()
    before = model.last.weight.detach().clone()
    with pytest.raises(IndependenceError, match=MODEL) as caught:
        steps(tmp_path, model, rows_of(unequal(24).to_list(), max_rows=8), weighted(numbers), count=1)
    assert "\n" not in str(caught.value) and torch.equal(model.last.weight, before)


SEPARATE = {
    "one for each row": torch.rand,
    "loop": lambda rows: torch.stack([torch.rand(()) for _ in range(rows)]),
    "randint": lambda rows: torch.randint(0, 10, (rows,)) / 10,
    "rejection": lambda rows: nn.init.trunc_normal_(torch.empty(rows, 1), a=-0.5, b=0.5)[:, 0],
    "without influence": lambda rows: (
        0.0 * torch.rand(()) + 0.0 * torch.randint(0, 5, (2,)).sum() + 0.0 * random.random() * np.random.rand(3).sum()
    ),
    "constant": lambda rows: 0.5,
}


@pytest.mark.parametrize("numbers", SEPARATE.values(), ids=SEPARATE)
def test_numbers_of_each_row_and_those_without_influence_pass(numbers, tmp_path):
    rows = rows_of(unequal(24).to_list(), max_rows=8)
    assert steps(tmp_path, Plain(), rows, weighted(numbers), count=2)[0] == 2


def test_with_one_row_in_a_microbatch_nothing_is_shared(tmp_path):
    rows = rows_of(unequal(24).to_list(), max_rows=1)
    assert steps(tmp_path, Plain(), rows, weighted(SHARED["torch"]), count=1)[0] == 1


DEPTH = {
    "one coin for a layer": lambda x: x * (torch.rand(()) < 0.9),
    "one in the shape of a row": lambda x: x * (torch.rand(1, 1, 1) < 0.9),
    "dropout of weights": lambda x: x * nn.functional.dropout(torch.ones(16), 0.1),
    "noise on weights": lambda x: x + 1e-3 * torch.randn(16),
    "dropout of positions": lambda x: x + nn.functional.dropout(torch.ones(1, x.shape[1], 1), 0.1),
    "dropout of little influence": lambda x: x + 1e-9 * nn.functional.dropout(torch.ones(1, x.shape[1], 1), 0.1),
    "channels of all rows": lambda x: nn.functional.dropout1d(x.permute(1, 2, 0), 0.1).permute(2, 0, 1),
    "channels of one example": lambda x: nn.functional.dropout1d(x.flatten(0, 1).T, 0.1).T.view_as(x),
}


@pytest.mark.parametrize("function", DEPTH.values(), ids=DEPTH)
def test_a_model_whose_rows_share_random_numbers_is_refused(function, tmp_path):
    with pytest.raises(IndependenceError, match="loss draws"):
        steps(tmp_path, Plain(Acting(function)), rows_of(unequal(24).to_list()), count=1)


def test_dropout_noise_and_stochastic_depth_of_each_row_pass(tmp_path):
    per_row = Acting(lambda x: x * (torch.rand(len(x), 1, 1) < 0.9))
    assert steps(tmp_path / "depth", Plain(per_row), rows_of(unequal(24).to_list()), count=2)[0] == 2
    of_channels = Acting(lambda x: nn.functional.dropout1d(x.mT, 0.1).mT)
    assert steps(tmp_path / "channels", Plain(of_channels), rows_of(unequal(24).to_list()), count=2)[0] == 2
    assert steps(tmp_path / "dropout", Noisy(), rows_of(unequal(24).to_list()), count=2)[0] == 2
    with warnings.catch_warnings(action="ignore"):  # deprecated
        scripted = Acting(torch.jit.script(nn.Dropout(0.1)))
    assert steps(tmp_path / "scripted", Plain(scripted), rows_of(unequal(24).to_list()), count=2)[0] == 2
    model = GPT2LMHeadModel(GPT2Config(**GPT2, eos_token_id=2))
    assert model.config.attn_pdrop > 0
    trainer(tmp_path / "gpt2", model, steps=2).train()


def test_a_coin_that_begins_later_is_refused(tmp_path):
    calls = itertools.count()
    began = []

    def loss_of(model, inputs):
        return lm_loss(model, inputs) * (1 + (float(torch.rand(()) < 0.5) if began else 0.0))

    def after():
        if next(calls) == 0:
            began.append(True)

    with pytest.raises(IndependenceError, match=MODEL):
        steps(tmp_path, Plain(), rows_of(unequal(24).to_list()), loss_of, count=4, after=after)


def test_numbers_that_cannot_be_held_equal_are_named_as_the_cause(tmp_path):
    """Each row has its own numbers, and which ones depends on its place."""
    numbers = weighted(lambda rows: torch.tensor([random.random() for _ in range(rows)]))
    with pytest.raises(IndependenceError, match=r"torch\.rand"):
        steps(tmp_path, Plain(), rows_of(unequal(24).to_list()), numbers, count=1)


def test_a_loss_that_fails_for_some_random_numbers_is_told_so(tmp_path):
    """It passes beside other rows, and fails alone for half of the random states."""

    def loss_of(model, inputs):
        if len(inputs["input_ids"]) == 1 and torch.rand(()) < 0.5:
            raise IndexError("index -100 is out of bounds")
        return lm_loss(model, inputs)

    with pytest.raises(IndependenceError, match="IndexError"):
        steps(tmp_path, Plain(), rows_of(unequal(24).to_list()), loss_of, count=1)


def test_draws_are_compared_one_by_one_or_in_total():
    def draws(*shapes):
        return [Draw("rand", shape, "loss.py:1") for shape in shapes]

    assert shared_draws(draws((1, 5), ()), draws((4, 5), ()), 4) == draws(())
    assert shared_draws(draws((1, 5), (1,)), draws((4, 5), (5,)), 4) == []
    assert shared_draws(draws(()), draws((), (), (), ()), 4) == []
    assert shared_draws(draws(()), draws((), ()), 4) == draws((), ())
    assert shared_draws(draws((1, 3, 3)), draws((1, 12, 12)), 4) == []  # packed rows
    assert shared_draws(draws((0,)), draws((2,)), 4) == draws((2,))
