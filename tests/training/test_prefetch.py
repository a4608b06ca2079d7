"""One thread, which ends with its step, fetches and collates the next microbatch while the present one runs."""

from __future__ import annotations

import dataclasses
import functools
import sqlite3
import subprocess
import sys
import threading

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BatchEncoding,
    DataCollatorForSeq2Seq,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from dpllm import DPTrainer, GhostClipper, PrivacyConfig, PrivateRun, TrainingRows, make_plan
from dpllm.config import ConfigError
from dpllm.data.rows import RowCollator
from dpllm.data.transfer import own_copy
from dpllm.data.units import UnitIndex
from dpllm.engines import SingleProcess
from dpllm.engines.processes import Processes
from dpllm.mechanism.generators import NoiseSource
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.microbatches import FetchThread, microbatches
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.step import private_step
from dpllm.training.trainer_setup import shares_nothing
from tests.conftest import tiny_llama_config
from tests.memory_ledger import MemoryLedger
from tests.mutations import kills
from tests.scarce import Gate, more_than
from tests.training.test_run import loop
from tests.training.test_trainer import arguments

UNITS, ROWS, LIMIT = 12, 3, 20  # seconds after which a thread that should have been called was not


def loss(model, inputs):
    return (model(inputs["x"]) - inputs["y"]).square().mean(1)


class Data:
    """Rows of numbers; notes which threads read them, and refuses two at a time."""

    def __init__(self, before=lambda number: None):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(UNITS, 4, generator=generator)
        self.before, self.collated, self.threads, self.busy = before, 0, set(), threading.Lock()

    def fetch(self, numbers):
        return [self.x[int(number)] for number in numbers]

    def collate(self, rows):
        assert self.busy.acquire(blocking=False), "two threads collate at once"
        try:
            self.before(self.collated)
            self.collated += 1
            self.threads.add(threading.current_thread().name)
            x = torch.stack(rows)
            return {"x": x, "y": x.sum(1, keepdim=True)}
        finally:
            self.busy.release()

    def rows(self, collate=None, fetch=None, ahead=True):
        units, lengths = UnitIndex.one_row_per_unit(UNITS), np.ones(UNITS, dtype=np.int64)
        functions = fetch or self.fetch, collate or self.collate
        return TrainingRows(units, lengths, *functions, max_rows=ROWS, fetch_ahead=ahead)


class Stepped:
    """Private steps without noise on one network."""

    def __init__(self, data, loss_of=loss, refuse=None):
        torch.manual_seed(1)
        self.data, self.loss_of = data, loss_of
        gate = [] if refuse is None else [Gate(refuse)]
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 5), *gate, torch.nn.Tanh(), torch.nn.Linear(5, 1))
        privacy = PrivacyConfig(noise_multiplier=0.0, clip_norm=0.5, expected_batch_size=4)
        self.plan = make_plan(privacy, UNITS, 9)
        self.engine = SingleProcess(torch.optim.SGD(self.model.parameters(), lr=0.0))
        self.clipper = GhostClipper(self.model, 0.5)

    def take(self):
        rows = self.data.rows()
        batch = microbatches(rows.fetch, rows.collate, rows.units, rows.lengths, np.arange(UNITS), ROWS)
        noise = self.plan.mechanism.noise.stream(NoiseSource(), self.plan.num_steps)
        return private_step(
            self.clipper,
            batch,
            lambda x: self.loss_of(self.model, x),
            self.plan,
            self.engine,
            MemoryLedger(),
            noise,
            ahead=rows.fetch_ahead,
        )

    def gradient(self):
        done = self.take()
        assert done.num_units == UNITS
        gradient = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.model.zero_grad(set_to_none=True)
        return gradient


def fetching():
    """The threads of fetches that are alive."""
    return [thread for thread in threading.enumerate() if "fetch" in thread.name]


def until(holds):
    """Wait until a condition holds; return whether it does."""
    pause = threading.Event()
    for _ in range(LIMIT * 100):
        if holds():
            return True
        pause.wait(0.01)
    return False


def test_the_next_microbatch_is_collated_while_one_runs():
    """Each call of the loss but the last returns only after the collator was called once more."""
    data, calls = Data(), []

    def waits(model, inputs):
        calls.append(data.collated)
        if data.waited_for:
            assert until(lambda: data.collated >= min(ROWS * (len(calls) + 1), UNITS)), "nothing was collated meanwhile"
        return loss(model, inputs)

    data.waited_for = False
    stepped = Stepped(data, waits)
    first = stepped.gradient()  # compares rows
    data.collated, data.waited_for = 0, True
    calls.clear()
    assert torch.equal(stepped.gradient(), first)
    assert len(calls) == UNITS // ROWS and data.collated == UNITS
    assert len(data.threads) == 1 and threading.current_thread().name not in data.threads


def test_nothing_is_fetched_while_rows_are_compared():
    """The collator may change what it shares with the loss; a comparison would then see that instead of the rows."""
    data = Data()

    def compared(model, inputs):
        if not stepped.clipper.rows_checked:
            assert data.collated == ROWS and not data.busy.locked()
            assert not until_short(lambda: data.collated > ROWS)
        return loss(model, inputs)

    stepped = Stepped(data, compared)
    stepped.gradient()
    assert stepped.clipper.rows_checked and data.collated == UNITS


def until_short(holds):
    threading.Event().wait(0.02)
    return holds()


@pytest.mark.parametrize("number", range(UNITS // ROWS))
def test_an_error_of_the_collator_is_raised_where_the_step_meets_it(number):
    """The microbatches before it have run, none after it is collated, and no thread is left."""
    ran = []

    def fails(at):
        if at == number * ROWS:
            raise KeyError("no such row")

    data = Data(fails)
    stepped = Stepped(data, lambda model, inputs: (ran.append(len(inputs["x"])), loss(model, inputs))[1])
    with pytest.raises(KeyError, match="no such row"):
        stepped.take()
    assert data.collated == number * ROWS and (sum(ran[-number:]) == number * ROWS or number == 0)
    assert bool(ran) == (number > 0) and not fetching()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", [1, 3])
def test_no_thread_outlives_a_step_that_is_broken_off(error, at):
    """An error of the model, Ctrl-C and a stop: the fetch that is under way ends first, and nothing follows it."""
    data, calls = Data(lambda number: threading.Event().wait(0.05)), []

    def breaks(model, inputs):
        calls.append(1)
        if stepped.clipper.rows_checked and len(calls) > at:
            raise error
        return loss(model, inputs)

    stepped = Stepped(data, breaks)
    with pytest.raises(error):
        stepped.take()
    assert not fetching()
    collated = data.collated
    assert not until_short(lambda: data.collated > collated)


def test_a_microbatch_that_is_divided_is_collated_by_the_same_thread():
    """Memory runs out while the thread fetches the next microbatch; a collator is never called by two threads."""
    data = Data(lambda number: threading.Event().wait(0.01))
    whole = Stepped(Data()).gradient()
    stepped = Stepped(data, refuse=more_than(ROWS - 1))
    torch.testing.assert_close(stepped.gradient(), whole, rtol=1e-5, atol=1e-7)
    assert len(data.threads) == 1 and data.collated > UNITS // ROWS and not fetching()


def test_a_run_fetches_nothing_between_its_steps(tmp_path):
    """In a loop of one's own: when a step has returned, no thread is left and the collator is not called."""
    data = Data()
    privacy = PrivacyConfig(noise_multiplier=0.0, clip_norm=0.5, expected_batch_size=4)
    run = PrivateRun.start(tmp_path / "run", make_plan(privacy, UNITS, 4), data.rows())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for _ in range(3):
        run.step(run.choose(np.arange(UNITS)), loss)
        collated = data.collated
        assert not fetching() and not until_short(lambda: data.collated > collated)  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    assert len(data.threads) == 2  # of the steps, and of the checks before them


CONTAINERS = {
    "a dictionary": (lambda made: made, lambda inputs: inputs),
    "nested BatchEncoding": (lambda made: {"pair": BatchEncoding(made)}, lambda inputs: inputs["pair"]),
    "lists": (lambda made: {"both": [made["x"], (made["y"],)]}, lambda i: {"x": i["both"][0], "y": i["both"][1][0]}),
}


@kills(
    "a collator's own tensors wait to be run",
    "dpllm/data/single_rows.py",
    "        inputs = own_copy(inputs)\n",
    "",
)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_collator_that_fills_the_same_tensors_again_does_not_move_rows(name):
    """The next rows would replace those of a microbatch that waits or runs, and their units would count twice.

    Whatever holds the tensors, nothing of what the collator returned is written to.
    """
    wrap, unwrap = CONTAINERS[name]
    usual, filled = Data(), Data()
    buffers = {"x": torch.empty(1, 4), "y": torch.empty(1, 1)}
    same = wrap(buffers)

    def collate(rows):
        made = Data.collate(filled, rows)
        for name, value in made.items():
            buffers[name].copy_(value)
        return same

    def unwrapped(model, inputs):
        return loss(model, unwrap(inputs))

    whole, filled.collate = Stepped(usual).gradient(), collate
    assert torch.equal(Stepped(filled, unwrapped).gradient(), whole)
    scarce = Stepped(filled, unwrapped, more_than(ROWS - 1))
    torch.testing.assert_close(scarce.gradient(), whole, rtol=1e-5, atol=1e-7)
    assert unwrap(same)["x"] is buffers["x"]


def test_a_seeded_run_takes_its_random_numbers_in_one_order(tmp_path):
    """The collator and dropout draw from one generator; with a seed, two runs are equal."""
    found = []

    def late(model, inputs):
        threading.Event().wait(0.02)
        return loss(model, inputs)

    for name, seconds in (("first", 0), ("second", 0.05)):  # the collator draws before and after the model
        data = Data(lambda number, seconds=seconds: threading.Event().wait(seconds))
        privacy = PrivacyConfig(noise_multiplier=1.0, clip_norm=0.5, expected_batch_size=6, seed=3)

        def collate(rows, data=data):
            made = Data.collate(data, rows)
            return {"x": made["x"] + torch.rand(len(rows), 4), "y": made["y"]}

        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = make_plan(privacy, UNITS, 4)
        (tmp_path / name).mkdir()
        ledger = SharedLedger.create(tmp_path / name / "ledger.jsonl", plan, Processes())
        run = PrivateRun(plan, data.rows(collate), ledger, seed=3)
        run.attach(model, optimizer)
        loop(run, optimizer, 4, late)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def run_of(tmp_path, data, collate=None, fetch=None, model=None, loss_of=loss, ahead=True):
    """Two steps over all units in a run; return the sum of their gradients."""
    privacy = PrivacyConfig(noise_multiplier=0.0, clip_norm=0.5, expected_batch_size=UNITS)
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 1) if model is None else model
    run = PrivateRun.start(tmp_path, make_plan(privacy, UNITS, 4), data.rows(collate, fetch, ahead))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))
    total = 0
    for _ in range(2):
        run.step(run.choose(np.arange(UNITS)), loss_of)
        total = total + torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
    run.detach()
    return total


class Pass:
    """Whether a pass of the model runs, for data sets that must not run next to one."""

    def __init__(self):
        self.runs, self.met = False, 0

    def loss(self, model, inputs):
        self.runs = True
        threading.Event().wait(0.01)
        losses_B = loss(model, inputs)
        self.runs = False
        return losses_B

    def look(self):
        self.met += self.runs


def seeds(rows):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.stack(rows) + 0 * torch.rand(len(rows), 4)


EMBEDDER = torch.nn.Linear(4, 4)


def runs_a_model(rows):
    with torch.no_grad():
        return torch.stack(rows) + 0 * EMBEDDER(torch.stack(rows))


def draws(rows):
    return torch.stack(rows) + 0 * torch.rand(len(rows), 4)


@kills(
    "a data set that seeds the generators runs next to the model",
    "dpllm/training/microbatches.py",
    "self.shares |= found.shares",
    "pass",
)
@pytest.mark.parametrize("make", [seeds, runs_a_model, draws])
def test_a_collator_that_shares_numbers_or_a_model_with_the_pass_does_not_run_next_to_it(make, tmp_path):
    """Dropout would be drawn from the collator's public seed, and a checkpoint recompute another mask."""
    data, one = Data(), Pass()

    def collate(rows):
        one.look()
        x = make(rows)
        return {"x": x, "y": x.sum(1, keepdim=True)}

    run_of(tmp_path / "run", data, collate, loss_of=one.loss)
    assert one.met == 0
    one = Pass()
    run_of(tmp_path / "usual", data, lambda rows: one.look() or Data.collate(data, rows), loss_of=one.loss)
    assert one.met > 0


def test_a_data_set_that_fills_one_array_again_loses_no_row_when_memory_runs_out():
    """A microbatch that is divided is collated again, after the next rows were fetched."""
    whole, data, buffer = Stepped(Data()).gradient(), Data(), torch.empty(UNITS, 4)

    def fetch(numbers):
        for place, number in enumerate(numbers):
            buffer[place] = data.x[int(number)]
        return [buffer[place] for place in range(len(numbers))]

    data.fetch, scarce = fetch, []
    stepped = Stepped(data, refuse=lambda where, rows: bool(scarce) and more_than(ROWS - 1)(where, rows))
    stepped.gradient()  # compares rows, during which nothing is fetched
    scarce.append(True)
    torch.testing.assert_close(stepped.gradient(), whole, rtol=1e-5, atol=1e-7)


@kills(
    "a loss may read what the collator stored for the next rows",
    "dpllm/training/checks/independence.py",
    "            self._maker.make_again(other)  # as a step makes other rows before this one passes\n",
    "",
)
def test_a_loss_that_reads_what_the_collator_stored_is_refused(tmp_path):
    """The stored weights are those of the next rows when the loss reads them."""
    data = Data()

    def collate(rows):
        data.weights = torch.stack(rows).abs().sum(1)
        return Data.collate(data, rows)

    def weighted(model, inputs):
        return loss(model, inputs) * data.weights[: len(inputs["x"])]

    with pytest.raises(IndependenceError, match="collator has stored"):
        run_of(tmp_path / "run", data, collate, loss_of=weighted)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_step_that_is_broken_off_does_not_wait_for_a_data_set_that_blocks(error):
    """A read that hangs would keep Ctrl-C waiting; nothing is fetched after it."""
    released, data = threading.Event(), Data()

    def fetch(numbers, blocks=[False]):  # noqa: B006
        if blocks[0]:
            released.wait(60)
        blocks[0] = stepped.clipper.rows_checked
        return Data.fetch(data, numbers)

    def breaks(model, inputs):
        if stepped.clipper.rows_checked and data.collated > 1:
            raise error
        return loss(model, inputs)

    stepped = Stepped(data, breaks)
    data.fetch = fetch
    with pytest.raises(error):
        stepped.take()
    collated = data.collated
    released.set()
    assert until(lambda: not fetching()) and data.collated == collated


def test_a_thread_changes_no_number_of_threads_of_the_process():
    """A program may train again in a thread of its own."""
    found = []
    before = torch.get_num_threads()
    Stepped(Data()).take()
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [before] == [torch.get_num_threads()]


@pytest.mark.parametrize("bound", ["fetch", "collate"])
def test_what_only_one_thread_can_read_is_refused_before_anything_is_charged(bound, tmp_path):
    """Also in a collator, by the name of the function."""
    path = tmp_path / "rows.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE rows (value REAL)")
    data = Data()

    def reads(function):
        def call(argument):
            connection.execute("SELECT * FROM rows").fetchall()
            return function(argument)

        return call

    functions = {"fetch": data.fetch, "collate": data.collate}
    functions[bound] = reads(functions[bound])
    with pytest.raises(ConfigError, match=f"{bound} failed for a single row .*thread"):
        run_of(tmp_path / "run", data, functions["collate"], functions["fetch"])
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    free = sqlite3.connect(path, check_same_thread=False)
    run_of(tmp_path / "free", data, fetch=lambda numbers: free.execute("SELECT 1").fetchall() and data.fetch(numbers))
    connection.close()
    free.close()


def test_rows_that_draw_while_a_pass_runs_end_the_step(tmp_path):
    """Only some rows draw, after the first microbatch: masks of dropout may follow their seed. Nothing is released."""
    data = Data()

    def fetch(numbers):
        rows = data.fetch(numbers)
        return [seeds([row])[0] if number >= UNITS - 1 else row for row, number in zip(rows, numbers, strict=True)]

    with pytest.raises(ConfigError, match="fetch_ahead=False"):
        run_of(tmp_path / "ahead", data, fetch=fetch)
    usual, own = run_of(tmp_path / "usual", Data()), Data()
    assert torch.equal(run_of(tmp_path / "run", own, fetch=fetch, ahead=False), usual)
    assert own.threads == {threading.current_thread().name} and not fetching()  # the default: between passes


@dataclasses.dataclass
class Row:
    """A row whose values are filled again."""

    x: list


def changed(rows):
    for row in rows:
        row["x"] = row["x"] * (1 + row.get("times", 0))
        row["times"] = row.get("times", 0) + 1
    return torch.stack([row["x"] for row in rows])


COLLATIONS = {
    "rows changed in place": (lambda x: {"x": x}, lambda row, x: row, changed),
    "objects filled again": (
        lambda x: Row(x.tolist()),
        lambda row, x: row.x.__setitem__(slice(None), x.tolist()) or row,
        lambda rows: torch.tensor([row.x for row in rows]),
    ),
}


@pytest.mark.parametrize("name", COLLATIONS)
@pytest.mark.parametrize("ahead", [True, False])
def test_rows_are_collated_again_from_what_was_read(name, ahead, tmp_path):
    """Memory runs out; the collator has changed its rows, or the data set has filled them again. No row is changed."""
    make, fill, stack = COLLATIONS[name]
    data, scarce = Data(), []
    pool = [make(data.x[number]) for number in range(UNITS)]
    rows = [make(data.x[number]) for number in range(UNITS)]

    def fetch(numbers):
        places = range(len(numbers)) if "again" in name else map(int, numbers)
        own = pool if "again" in name else rows
        return [fill(own[place], data.x[int(number)]) for place, number in zip(places, numbers, strict=True)]

    def collate(some):
        x = stack(some)
        return {"x": x, "y": x.sum(1, keepdim=True)}

    gate = Gate(lambda where, count: bool(scarce) and more_than(ROWS - 1)(where, count))

    def once(model, inputs):
        scarce.append(None)  # from the first step on
        return loss(model, inputs)

    def model(*before):
        torch.manual_seed(5)
        return torch.nn.Sequential(*before, torch.nn.Linear(4, 1))

    whole = run_of(tmp_path / "whole", Data(), model=model())
    found = run_of(tmp_path / "run", data, collate, fetch, model(gate), once, ahead)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    assert "again" in name or repr(rows) == repr([make(x) for x in data.x])


def test_a_fetch_that_was_given_up_does_not_run_next_to_one_of_a_later_step():
    """Ctrl-C in a notebook ends the step but not a slow read; the next step waits for it."""
    released, most, inside = threading.Event(), [0], [0]

    def slow():
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        released.wait(LIMIT)
        inside[0] -= 1

    first, second = FetchThread(torch.device("cpu")), FetchThread(torch.device("cpu"))
    given_up = first.submit(slow, alone=True)
    assert until(lambda: inside[0])
    first.close(patience=0.05)
    waiting = second.submit(slow, alone=True)
    assert not until_short(waiting.done) and not given_up.done()
    released.set()
    waiting.result()
    second.close()
    assert most[0] == 1


def test_a_program_that_fails_during_a_fetch_ends_with_its_error():
    """A thread that runs PyTorch when Python ends would abort the process."""
    program = """
import threading, time, torch
from dpllm.training.microbatches import FetchThread
thread, begun = FetchThread(torch.device("cpu")), threading.Event()
def busy():
    begun.set()
    end, x = time.monotonic() + 2, torch.randn(300, 300)
    while time.monotonic() < end:
        (x @ x).sum()
thread.submit(busy, alone=True)
begun.wait()
thread.close(patience=0.1)
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3


def padding():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), pad_token="a")
    return DataCollatorForSeq2Seq(tokenizer)


class OwnTable(datasets.Dataset):
    """A table whose class the user has written."""


class OwnPadding(DataCollatorForSeq2Seq):
    """A collator whose class the user has written."""


def test_what_shares_nothing_with_the_model_is_read_ahead():
    """Tables of numbers and text that a usual collator pads; never the user's functions, or what is decoded."""
    table, pads = datasets.Dataset.from_dict({"x": [[1.0], [2.0]], "text": ["a", "b"]}), padding()
    assert shares_nothing(table, pads) and shares_nothing(table, RowCollator(pad_token_id=0))
    assert not shares_nothing(table, OwnPadding(pads.tokenizer))
    assert not shares_nothing(table, functools.wraps(default_data_collator)(lambda rows: rows))
    assert not shares_nothing(table, functools.partial(default_data_collator))
    for other in (
        table.with_transform(lambda rows: rows),
        OwnTable(table.data),
        list(table),
        table.add_column("image", [None, None], feature=datasets.Image()),
        table.add_column("sounds", [[], []], feature=datasets.List(datasets.Audio())),
    ):
        assert not shares_nothing(other, pads)


@pytest.mark.parametrize("late", [False, True])
def test_a_trainer_calls_functions_of_the_user_between_passes(late, tmp_path):
    """Collators, also with workers for the evaluation; and transforms that are set after the trainer was made."""
    rows = datasets.Dataset.from_dict({"input_ids": [[n % 90, 3 + n, 5] for n in range(24)]})
    threads = set()

    def collate(some):
        threads.add(threading.current_thread())
        ids = torch.tensor([row["input_ids"] for row in some])
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def transform(some):
        threads.add(threading.current_thread())
        return some

    privacy = PrivacyConfig(noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, expected_batch_size=12)
    args = arguments(tmp_path, max_steps=2, per_device_train_batch_size=2, dataloader_num_workers=2)
    model = LlamaForCausalLM(tiny_llama_config(vocab_size=100))
    run = DPTrainer(model, args, privacy, rows, data_collator=None if late else collate)
    if late:
        rows.set_transform(transform)
    run.train()
    assert threads == {threading.current_thread()}


def test_a_copy_of_a_view_has_its_values_only():
    """Rows of a data set in one tensor: the deep copy of PyTorch would copy the whole data set for each."""
    whole = torch.arange(3e6)
    row = own_copy(Row(whole[3:5]))
    assert row.x.tolist() == [3.0, 4.0] and row.x.untyped_storage().nbytes() == 8
