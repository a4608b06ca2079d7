"""A loss, a collator or a data set that counts its calls, or keeps running numbers, is refused where they act."""

import functools
import itertools
import random
import warnings

import numpy as np
import pytest
import torch

from dpllm import per_sequence_loss
from dpllm.data.rows import RowCollator
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.kept import Kept, act
from tests.training.checks.test_independence import llama, trainer, unequal

COLLATE = RowCollator(pad_token_id=0)
TOTAL = {"calls": 0}


def of_rows(outputs, labels):
    return per_sequence_loss(outputs.logits, labels)


class Slow:
    """Divides by a slow running mean of the losses of all rows before."""

    mean = None

    def __call__(self, outputs, labels):
        loss_B = of_rows(outputs, labels)
        now = loss_B.detach().mean()
        self.mean = now if self.mean is None else 0.9999 * self.mean + 0.0001 * now
        return loss_B / self.mean


class Bank:
    """Uses the rows before once it has 300 of them."""

    def __init__(self):
        self.rows = []

    def __call__(self, outputs, labels):
        loss_B, mean_BV = of_rows(outputs, labels), outputs.logits.mean(1)
        if len(self.rows) >= 300:
            loss_B = loss_B + (mean_BV @ torch.stack(self.rows).T).mean(1)
        self.rows = (self.rows + list(mean_BV.detach()))[-300:]
        return loss_B


def every(period):
    count = 0

    def loss(outputs, labels):
        nonlocal count
        count += 1
        return of_rows(outputs, labels) * (5 if count % period == 0 else 1)

    return loss


def warming(outputs, labels, calls=itertools.count()):  # noqa: B008 - the default is the state
    return of_rows(outputs, labels) * min(1.0, next(calls) / 1e7)


def counted_in_a_global(outputs, labels):
    TOTAL["calls"] += 1
    return of_rows(outputs, labels) * (1 + TOTAL["calls"] // 1000)


def coin_of_a_hundred_calls(state, outputs, labels):
    if state[0] % 100 == 0:
        state[1] = float(random.random() < 0.5)
    state[0] += 1
    return of_rows(outputs, labels) * (1 + state[1])


LOSSES = {
    "a slow running mean": Slow,
    "a late memory bank": Bank,
    "every 200th call": lambda: every(200),
    "a warm-up by calls": lambda: warming,
    "a global counter": lambda: counted_in_a_global,
    "a coin of a hundred calls": lambda: functools.partial(coin_of_a_hundred_calls, [1, 0.0]),
}


@pytest.mark.parametrize(("name", "batch"), [*((name, 4) for name in LOSSES), ("a slow running mean", 1)])
def test_a_loss_whose_state_acts_is_refused_in_the_first_step(name, batch, tmp_path):
    """Its effect on each pass of a check is too small, or too rare, to be seen by itself."""
    with pytest.raises(IndependenceError, match=r"The loss keeps numbers that change with each call, and the values"):
        trainer(tmp_path, llama(), batch=batch, compute_loss_func=LOSSES[name]()).train()
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 1


OWN = np.random.default_rng(3)


def coin():
    return torch.rand(1)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch plans to remove it
    scripted_coin = torch.jit.script(coin)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            lambda outputs, labels: of_rows(outputs, labels) * (1 + (OWN.random() < 0.05)),
            r"own random generator \(.*OWN",
        ),
        (
            lambda outputs, labels: of_rows(outputs, labels) * (1 + float(scripted_coin() < 0.01)),
            r"draws random numbers in TorchScript \(.*scripted_coin",
        ),
    ],
    ids=["own generator", "TorchScript"],
)
def test_numbers_that_no_comparison_holds_are_refused_by_kind(loss, says, tmp_path):
    """A coin of one in twenty, or in a hundred, is missed by a few random states."""
    with pytest.raises(IndependenceError, match=says):
        trainer(tmp_path, llama(), compute_loss_func=loss).train()


class Every:
    """A collator whose every 50th batch is another one."""

    def __init__(self, period):
        self.period, self.calls = period, 0

    def __call__(self, rows):
        self.calls += 1
        batch = COLLATE(rows)
        if self.calls % self.period == 0:
            batch["input_ids"][:, 0] = 1
        return batch


def test_a_collator_that_counts_its_calls_is_refused(tmp_path):
    with pytest.raises(IndependenceError, match=r"The collator keeps numbers that change .*: calls\. Which rows"):
        trainer(tmp_path, llama(), batch=1, data_collator=Every(5000)).train()


class Logging:
    """Counts and averages for display, and keeps masks by their length: nothing of it enters a row's loss."""

    def __init__(self):
        self.calls, self.mean, self.weights, self.last = 0, 0.0, {}, None

    def __call__(self, outputs, labels):
        self.calls += 1
        loss_B = of_rows(outputs, labels)
        self.mean = 0.9 * self.mean + 0.1 * float(loss_B.detach().mean())
        width = labels.shape[1]
        if width not in self.weights:
            self.weights[width] = torch.ones(())
        if self.last is None or self.last[0] != width:
            self.last = (width, torch.ones(()))
        return loss_B * self.weights[width] * self.last[1]


class Caches(Logging):
    def __init__(self):
        super().__init__()
        self.length = functools.lru_cache(lambda width: width)

    def __call__(self, outputs, labels):
        loss_B, width = of_rows(outputs, labels), self.length(labels.shape[1])
        self.last = torch.ones(width) if self.last is None or len(self.last) < width else self.last
        self.weights.setdefault(width, torch.ones(()))
        return loss_B * self.weights[width] * self.last[0]


@pytest.mark.parametrize(("make", "is_told"), [(Logging, True), (Caches, False)])
def test_numbers_for_display_are_an_open_point_and_caches_are_nothing(make, is_told, tmp_path):
    loss = make()
    run = trainer(tmp_path, llama(), steps=2, compute_loss_func=loss)
    run.train()
    points = [one for one in run.privacy_report()["open_points"] if "numbers that change with each call" in one]
    assert len(points) == is_told and all("(calls, mean)" in one for one in points)
    if is_told:
        assert 0 < loss.calls < 1000 and 0 < loss.mean < 100, "put back after the passes that set them"


class Redrawn:
    """A data set that takes half of a row from another one, as next-sentence pairs do."""

    def __init__(self):
        self.rows = unequal().to_list()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        ids, other = self.rows[number]["input_ids"], random.choice(self.rows)["input_ids"]
        return {"input_ids": ids[: len(ids) // 2] + [*other, *ids][: len(ids) - len(ids) // 2]}


def test_rows_that_are_made_with_random_numbers_are_an_open_point(tmp_path):
    """A comparison cannot tell the text of other records from a row's own random numbers."""
    run = trainer(tmp_path, llama(), Redrawn())
    run.train()
    assert any("made again at each reading" in one for one in run.privacy_report()["open_points"])


def test_values_are_found_set_and_put_back():
    class Inner:
        count, kept = 0, None

    inner, table = Inner(), {"weight": torch.ones(2), "array": np.zeros(3), "list": [1.0], "name": "x"}

    def function(value, scale=2.0):
        inner.count += 1
        table["weight"] = table["weight"] * 0.5
        table["array"][0] += 1
        table["list"].append(1.0)
        return value * (inner.count > 10**6) + float(table["weight"].sum())

    before = Kept(function)
    function(1.0)
    now = Kept(function)
    assert {path.lstrip(".") for path in now.changed(before)} == {
        "inner.count",
        "table['weight']",
        "table['array']",
        "table['list']",
    }
    weight, array, entries = table["weight"], table["array"], table["list"]
    for way in range(3):
        with now.forced(now.changed(before), way):
            assert inner.count == 0 or inner.count > 10**6
            assert len(table["list"]) >= 300 and table["weight"] is not weight
        assert inner.count == 1 and table["weight"] is weight
        assert table["array"] is array and array.tolist() == [1, 0, 0] and table["list"] is entries
    assert Kept(function).marks == now.marks
    assert now.words(now.changed(before)) == "inner.count, table", "no key: it may be somebody's name"

    def differ(one, other):
        return one != other

    assert act(now, now.changed(before), [0], lambda seed: inner.count > 100, differ)
    assert not act(now, now.changed(before), [0], lambda seed: 1.0, differ)
    assert not act(now, now.changed(before), [0], lambda seed: random.random(), differ)


def test_a_model_and_objects_of_libraries_are_left_out():
    """Their state is watched elsewhere, or is no state of a row."""
    model = llama()

    class Held(torch.nn.Module):
        calls = 1

    held = Held()

    def function(outputs):
        return model, held, torch, np.random

    paths = set(Kept(function, held).places)
    assert {".model", ".held"} <= paths and not any(path.startswith((".model.", ".held.")) for path in paths)
    assert ".held.calls" in Kept(function).places


def test_the_global_generators_are_no_generators_of_a_loss():
    """`from random import uniform` is bound to Python's generator, which every step seeds from secrets."""
    own = random.Random(1)
    draw, default, array, mine = random.uniform, torch.default_generator, np.random.mtrand._rand, own.uniform

    def sound():
        return draw(0, 1), default, array

    def public():
        return draw(0, 1), mine(0, 1)

    assert not Kept(sound).generators
    assert Kept(public).generators == ["mine.self: Random"]
    before = Kept(sound).marks
    random.random(), np.random.rand(), torch.rand(1)
    assert Kept(sound).marks == before
