"""A loss, a collator or a data set that counts its calls, or keeps running numbers, is refused where they act."""

import functools
import itertools
import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithPadding

from dpllm import per_sequence_loss
from dpllm.data.rows import RowCollator
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.kept import Kept, act, without_trace
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


def in_turn():
    factors = itertools.cycle([1.0, 5.0])
    return lambda outputs, labels: of_rows(outputs, labels) * next(factors)


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


class First:
    """Divides by the mean of the first batch."""

    scale = None

    def __call__(self, outputs, labels):
        loss_B = of_rows(outputs, labels)
        if self.scale is None:
            self.scale = float(loss_B.detach().mean())
        return loss_B / self.scale


class Largest:
    """Divides by the largest loss so far."""

    most = 0.0

    def __call__(self, outputs, labels):
        loss_B = of_rows(outputs, labels)
        self.most = max(self.most, float(loss_B.detach().max()))
        return loss_B / self.most


class Part(torch.nn.Module):
    """A module of the user's own, for a loss or a model, with a slow running mean."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner, self.scale = inner, None

    def forward(self, value):
        now = float(value.detach().abs().mean())
        self.scale = now if self.scale is None else 0.9999 * self.scale + 0.0001 * now
        value = value / self.scale
        return value if self.inner is None else self.inner(value)


class Nested(torch.nn.Module):
    """A loss whose part keeps a running mean."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.Sequential(Part())

    def forward(self, outputs, labels):
        return self.parts(of_rows(outputs, labels))


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
    """Its effect on each pass of a check is too small, or too rare, to be seen by itself.

    Which of two refusals comes first depends on the rows that were drawn.
    """
    says = r"The loss keeps (numbers that change with each call|what it computed from rows that it saw before), and"
    with pytest.raises(IndependenceError, match=says):
        trainer(tmp_path, llama(), batch=batch, compute_loss_func=LOSSES[name]()).train()
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 1


@pytest.mark.parametrize(
    ("loss", "batch", "says"),
    [
        (First, 4, r"The loss keeps what it computed from rows that it saw before, .*: scale\."),
        pytest.param(First, 1, r"The loss keeps what it computed .*: scale\.", marks=pytest.mark.deep),
        pytest.param(Largest, 4, r"The loss (keeps what it computed|of a row depends)", marks=pytest.mark.deep),
        pytest.param(Nested, 4, r"The loss keeps numbers that change .*: parts\.0\.scale\.", marks=pytest.mark.deep),
        pytest.param(in_turn, 1, r"alone it is .*, alone, after itself", marks=pytest.mark.deep),
    ],
)
def test_a_loss_that_follows_earlier_rows_or_calls_is_refused(loss, batch, says, tmp_path):
    """Numbers that no longer change when the step begins: those of the first rows, or the largest so far."""
    with pytest.raises(IndependenceError, match=says):
        trainer(tmp_path, llama(), batch=batch, compute_loss_func=loss()).train()


@pytest.mark.deep
def test_a_module_of_the_model_that_keeps_a_running_number_is_refused(tmp_path):
    """The watch compares buffers, and no attributes."""
    model = llama()
    model.model.layers[0].mlp.down_proj = Part(model.model.layers[0].mlp.down_proj)
    with pytest.raises(IndependenceError, match=r"numbers that change .*: model\.layers\.0\.mlp\.down_proj\.scale"):
        trainer(tmp_path, model).train()


def running(state, module, args):
    now = float(args[0].detach().abs().mean())
    state[0] = now if state[0] is None else 0.9999 * state[0] + 0.0001 * now
    return (args[0] / state[0],)


def by_hook(part):
    return part.register_forward_pre_hook(functools.partial(running, [None]))


def by_hook_of_all(part):
    hook = functools.partial(running, [None])
    return torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: hook(module, args) if module is part else None
    )


def by_method(part):
    forward, state = part.forward, [None]
    part.forward = lambda x: forward(*running(state, part, (x,)))


def by_method_of_its_class(part):
    kind, state = type(part), [None]
    forward = kind.forward
    kind.forward = lambda self, x: forward(self, *running(state, self, (x,)))
    return types.SimpleNamespace(remove=lambda: setattr(kind, "forward", forward))


@pytest.mark.parametrize("put", [by_hook, by_hook_of_all, by_method, by_method_of_its_class])
def test_a_hook_or_a_replaced_method_that_keeps_a_running_number_is_refused(put, tmp_path):
    """On a module of a library, whose own attributes are compared elsewhere."""
    model = llama()
    handle = put(model.model.layers[0].mlp)
    try:
        with pytest.raises(
            IndependenceError, match=r"numbers that change .*: (model\.layers\.|forward_pre_hooks of all)"
        ):
            trainer(tmp_path, model).train()
    finally:
        if handle is not None:
            handle.remove()


def test_a_hook_that_keeps_features_for_display_is_nothing(tmp_path):
    model, features = llama(), {}
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: features.update(last=output.detach()))
    run = trainer(tmp_path, model)
    run.train()
    assert features and not any("keeps numbers" in one for one in run.privacy_report()["open_points"])


class FirstLength:
    """Cuts rows to the longest of the first batch."""

    most = None

    def __call__(self, rows):
        self.most = self.most or max(len(row["input_ids"]) for row in rows)
        return COLLATE([{name: ids[: self.most] for name, ids in row.items()} for row in rows])


class LongestSoFar:
    """Pads to the longest row so far; the attention mask tells the padding."""

    most = 0

    def __call__(self, rows):
        self.most = max(self.most, *(len(row["input_ids"]) for row in rows))
        batch = COLLATE(rows)
        more = self.most - batch["input_ids"].shape[1]
        fill = {"labels": -100}
        return {
            name: torch.nn.functional.pad(value, (0, more), value=fill.get(name, 0)) for name, value in batch.items()
        }


@pytest.mark.deep
@pytest.mark.parametrize("batch", [1, 4])
def test_a_collator_that_follows_the_first_rows_is_refused_and_one_that_pads_is_not(batch, tmp_path):
    with pytest.raises(IndependenceError, match=r"The collator keeps what it computed from rows .*: most\."):
        trainer(tmp_path / "first", llama(), batch=batch, data_collator=FirstLength()).train()
    run = trainer(tmp_path / "longest", llama(), batch=batch, data_collator=LongestSoFar())
    run.train()
    assert run.ledger.num_steps == 1


@pytest.mark.deep
def test_a_collator_that_takes_values_in_turn_is_an_open_point_with_one_row_per_microbatch(tmp_path):
    """A search does not see itertools.cycle; with more rows, the rows of a batch differ."""
    tokens = itertools.cycle([1, 2])

    def collate(rows):
        batch = COLLATE(rows)
        batch["input_ids"][:, 0] = next(tokens)
        return batch

    run = trainer(tmp_path, llama(), batch=1, data_collator=collate)
    run.train()
    assert any("gives a row other values each time" in one for one in run.privacy_report()["open_points"])


class Rows(torch.utils.data.Dataset):
    """Rows whose every 5000th reading is another one."""

    def __init__(self):
        self.rows, self.calls = unequal().to_list(), 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.calls += 1
        ids = self.rows[number]["input_ids"]
        return {"input_ids": [1, *ids[1:]] if self.calls % 5000 == 0 else ids}


@pytest.mark.deep
def test_a_data_set_within_a_subset_is_searched(tmp_path):
    with pytest.raises(IndependenceError, match=r"The data set keeps numbers that change .*: dataset\.dataset\.calls"):
        trainer(tmp_path, llama(), torch.utils.data.Subset(Rows(), range(30))).train()


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


@pytest.mark.parametrize(
    "iterator",
    [(1.0 + (call > 3000) for call in itertools.count()), itertools.cycle([1.0] * 3000 + [2.0]), iter([1.0] * 3000)],
    ids=["generator", "cycle", "list"],
)
def test_an_iterator_of_a_loss_is_an_open_point(iterator, tmp_path):
    """It counts its calls where no search sees the count: here the factor of the loss changes at a later call."""
    run = trainer(
        tmp_path, llama(), compute_loss_func=lambda outputs, labels: next(iterator) * of_rows(outputs, labels)
    )
    run.train()
    points = [one for one in run.privacy_report()["open_points"] if "The loss holds an iterator (iterator)" in one]
    assert len(points) == 1


def test_a_file_is_no_iterator_whose_position_counts(tmp_path):
    """A loss may write its values to a log."""
    with (tmp_path / "log").open("w") as log:
        assert not Kept(lambda: log.write("1")).iterators


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


class Helpers:
    """What code can name past plain attributes."""

    @staticmethod
    def static():
        TOTAL["calls"] += 1

    @property
    def scale(self):
        TOTAL["more"] = TOTAL.get("more", 0)
        return 1.0

    def __call__(self):
        self.static()
        return self.scale


class Library(DataCollatorWithPadding):
    """A class made from one of transformers."""

    def __init__(self):
        self.calls = 0


def test_state_is_found_where_ordinary_code_keeps_it(monkeypatch):
    """In modules of one's own, behind methods of a class, in parts of a module, in a class made from a library's."""
    own = types.ModuleType("module_of_ones_own")
    exec("COUNT = {'calls': 0}\ndef step():\n    COUNT['calls'] += 1", vars(own))
    monkeypatch.setitem(sys.modules, "module_of_ones_own", own)
    collate, loss, subset = Library(), Nested(), torch.utils.data.Subset(Rows(), [0])
    frozen = torch.nn.Module()
    frozen.mean = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def by_attribute():
        return own.step(), collate, subset, frozen

    def by_import():
        import module_of_ones_own

        return module_of_ones_own.step()

    found = set(Kept(by_attribute).places)
    assert {".own.step.COUNT['calls']", ".collate.calls", ".subset.dataset.calls"} <= found
    assert ".frozen.mean" in found
    assert ".module_of_ones_own.step.COUNT['calls']" in Kept(by_import).places
    assert {".static.__func__.TOTAL['calls']"} <= set(Kept(Helpers()).places) and TOTAL is not None
    assert ".parts.0.scale" in Kept(loss).places
    before = Kept(by_attribute)
    own.step(), frozen.mean.data.add_(1)
    assert set(Kept(by_attribute).changed(before)) == {".own.step.COUNT['calls']", ".frozen.mean"}


def test_a_state_is_put_back_and_taken_again():
    """Numbers, containers and tensors that are written in place; what is new is gone for a while."""

    class State:
        scale = None

        def __init__(self):
            self.seen, self.mean, self.turn = [1], torch.zeros(2), itertools.count()

    state = State()

    def function():
        return state

    before, mean, seen = Kept(function), state.mean, state.seen
    state.scale, state.new = 2.0, {"a": 1}
    state.seen.append(5), state.mean.add_(1), next(state.turn)
    now = Kept(function)
    with now.at(before):
        assert state.scale is None and not hasattr(state, "new") and state.seen == [1] and state.seen is seen
        assert state.mean.tolist() == [0, 0] and next(state.turn) == 0
        state.mean.add_(7), state.seen.append(9)
    assert state.scale == 2.0 and state.new == {"a": 1} and state.seen == [1, 5] and state.seen is seen
    assert state.mean is mean and mean.tolist() == [1, 1] and next(state.turn) == 1
    for _ in range(2):
        with now.at(now):
            state.mean.add_(7)
        assert state.mean is mean and mean.tolist() == [1, 1]
    now.undo(before)
    assert state.scale is None and state.seen == [1] and state.mean.tolist() == [0, 0] and not hasattr(state, "new")


def test_a_trial_leaves_no_trace_of_the_first_rows():
    """So that the first batch is one of a check."""
    collate = FirstLength()
    with without_trace(collate):
        collate([{"input_ids": [1, 2], "labels": [1, 2]}])
        assert collate.most == 2
    assert collate.most is None


def test_a_value_that_is_never_steady_acts_if_its_state_makes_it_so():
    count = [0]

    def function(seed=0):
        count[0] += 1
        return count[0]

    before = Kept(function)
    function()
    now = Kept(function)
    assert act(now, now.changed(before), [0], function, lambda one, other: one != other)
