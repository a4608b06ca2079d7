"""A loss, a collator, a data set or a model that carries numbers from one call to the next is refused by value.

The checks only call the user's code, as a training does: what it stores holds what its own calls put there.
"""

import functools
import itertools
import queue
import random
import threading

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from dpllm import GhostError, PrivateRun, TrainingRows, per_sequence_loss
from dpllm.data.rows import RowCollator
from dpllm.data.units import UnitIndex
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.training.checks.independence import IndependenceError
from tests.mutations import kills
from tests.training.checks.test_independence import llama, privacy, rows_of, steps, trainer, unequal
from tests.training.test_run import ledger_of, plan_of

COLLATE = RowCollator(pad_token_id=0)


def of_rows(outputs, labels):
    return per_sequence_loss(outputs.logits, labels)


class Running:
    """Divides by a running mean of the losses of all rows before."""

    def __init__(self, decay):
        self.decay, self.mean = decay, None

    def __call__(self, outputs, labels):
        loss_B = of_rows(outputs, labels)
        now = loss_B.detach().mean()
        self.mean = now if self.mean is None else self.decay * self.mean + (1 - self.decay) * now
        return loss_B / self.mean


class Bank:
    """Contrasts a row with the rows of earlier calls, as a memory bank does."""

    def __init__(self):
        self.rows = []

    def __call__(self, outputs, labels):
        loss_B, mean_BV = of_rows(outputs, labels), outputs.logits.mean(1)
        if self.rows:
            loss_B = loss_B + (mean_BV @ torch.stack(self.rows).T).mean(1)
        self.rows = (self.rows + list(mean_BV.detach()))[-300:]
        return loss_B


def warming(outputs, labels, calls=itertools.count()):  # noqa: B008 - the default is the state
    """A warm-up of a thousand calls."""
    return of_rows(outputs, labels) * min(1.0, next(calls) / 1000)


class Part(torch.nn.Module):
    """A module of the user's own, for a loss or a model, with a running mean."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner, self.scale = inner, None

    def forward(self, value):
        now = float(value.detach().abs().mean())
        self.scale = now if self.scale is None else 0.9 * self.scale + 0.1 * now
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
    "running mean": lambda: Running(0.999),
    "memory bank": Bank,
    "warm-up by calls": lambda: warming,
    "module with a running mean": Nested,
}


@pytest.mark.parametrize("batch", [4, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_follows_earlier_calls_is_refused_in_the_first_step(name, batch, tmp_path):
    """The first row is run again after all others, and its loss is another one."""
    with pytest.raises(IndependenceError, match=r"The (loss|gradient norm) of a row depends on other rows"):
        trainer(tmp_path, llama(initializer_range=0.2), batch=batch, compute_loss_func=LOSSES[name]()).train()
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 1


@kills(
    "a row is not run again after all others",
    "dpllm/training/checks/independence.py",
    '            seen += self.run(Company((sample.short,), "alone, after all other rows")).seen\n',
    "",
)
@pytest.mark.parametrize("rows", [40, 5])
def test_a_slow_drift_is_seen_over_all_passes_of_a_check(rows, tmp_path):
    """Between two passes it is smaller than rounding: a warm-up of a million calls. A check runs all of 5 rows."""
    calls = itertools.count()
    run = trainer(
        tmp_path,
        llama(initializer_range=0.2),
        unequal(rows),
        config=privacy(expected_batch_size=4),
        compute_loss_func=lambda outputs, labels: of_rows(outputs, labels) * (1 + 1.5e-6 * next(calls)),
    )
    with pytest.raises(IndependenceError, match="carries state"):
        run.train()


def running(state, module, args):
    now = float(args[0].detach().abs().mean())
    state[0] = now if state[0] is None else 0.9 * state[0] + 0.1 * now
    return (args[0] / state[0],)


@pytest.mark.parametrize("where", ["attribute", "hook"])
def test_a_module_of_the_model_that_keeps_a_running_number_is_refused(where, tmp_path):
    """The watch compares buffers, and no attributes."""
    model = llama(initializer_range=0.2)
    layer = model.model.layers[0].mlp
    if where == "attribute":
        layer.down_proj = Part(layer.down_proj)
    else:
        layer.register_forward_pre_hook(functools.partial(running, [None]))
    with pytest.raises(GhostError, match=r"depend"):
        trainer(tmp_path, model).train()


class Logging:
    """Counts and averages for display, and keeps masks by their length: nothing of it enters a row's loss."""

    def __init__(self):
        self.calls, self.mean, self.weights, self.last = 0, 0.0, {}, None
        self.length = functools.lru_cache(lambda width: width)

    def __call__(self, outputs, labels):
        self.calls += 1
        CALLS.append(1)
        loss_B, width = of_rows(outputs, labels), self.length(labels.shape[1])
        self.mean = 0.9 * self.mean + 0.1 * float(loss_B.detach().mean())
        self.last = torch.ones(width) if self.last is None or len(self.last) < width else self.last
        self.weights.setdefault(width, torch.ones(()))
        return loss_B * self.weights[width] * self.last[0]


CALLS = []


def test_numbers_for_display_and_caches_raise_no_question_and_stay(tmp_path):
    loss, model, features = Logging(), llama(), {}
    CALLS.clear()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: features.update(last=output.detach()))
    run = trainer(tmp_path, model, steps=2, compute_loss_func=loss)
    run.train()
    assert features and loss.calls == len(CALLS)
    assert not any("The loss" in one or "calls" in one for one in run.privacy_report()["open_points"])


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


def test_a_collator_that_pads_to_the_longest_row_so_far_is_accepted(tmp_path):
    run = trainer(tmp_path / "trainer", llama(), data_collator=LongestSoFar())
    run.train()
    assert run.ledger.num_steps == 1
    rows = rows_of(unequal().to_list(), LongestSoFar())
    assert steps(tmp_path / "loop", llama(), rows, count=2)[0] == 2


class Shortened(TrainerCallback):
    """A curriculum: rows are cut to a length that follows the number of the step."""

    most = 4

    def __call__(self, rows):
        return COLLATE([{"input_ids": row["input_ids"][: self.most]} for row in rows])

    def on_step_begin(self, args, state, control, **kwargs):
        self.most = 4 + state.global_step


def test_a_collator_that_follows_the_number_of_the_step_is_accepted(tmp_path):
    curriculum = Shortened()
    run = trainer(tmp_path, llama(), steps=4, data_collator=curriculum, callbacks=[curriculum])
    run.train()
    assert run.ledger.num_steps == 4


class Queue:
    """Emits six tokens for each row out of what is left of all rows before, as packing collators do."""

    def __init__(self):
        self.left = []

    def __call__(self, rows):
        for row in rows:
            self.left += row["input_ids"]
        made, self.left = self.left[:3], self.left[3:]
        return COLLATE([{"input_ids": made}])


class Growing:
    """A curriculum: the more rows it has made, the more tokens it keeps."""

    calls = 0

    def __call__(self, rows):
        self.calls += 1
        return COLLATE([{"input_ids": row["input_ids"][: 2 + self.calls // 20]} for row in rows])


def in_turn(rows, tokens=itertools.cycle([1, 2])):  # noqa: B008 - the default is the state
    batch = COLLATE(rows)
    batch["input_ids"][:, 0] = next(tokens)
    return batch


def secretly(rows, secret=random.SystemRandom()):  # noqa: B008
    return COLLATE([{"input_ids": [4 if secret.random() < 0.3 else one for one in r["input_ids"]]} for r in rows])


@kills(
    "a collator may follow its own calls",
    "dpllm/training/checks/row_sample.py",
    "            if not same_values(self.inputs[number], self._rows.collate.row(self._records[number])):\n",
    "            if False:\n",
)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("collate", [in_turn, Queue(), Growing(), secretly], ids=["turn", "queue", "slowly", "own"])
def test_a_collator_whose_rows_follow_its_calls_is_refused(collate, batch, tmp_path):
    """Which call a row gets depends on the rows before it. Numbers of its own cannot be told from a queue."""
    with pytest.raises(IndependenceError, match="returned different values for a row"):
        trainer(tmp_path, llama(), batch=batch, data_collator=collate).train()


def test_a_loss_that_reads_a_rare_weight_of_the_collator_is_refused(tmp_path):
    """The weight is that of the row made last. The shortest row is run again after several others were made."""
    dataset, made = unequal().to_list(), {}

    def collate(rows):
        made["weight"] = torch.tensor([5.0 if len(row["input_ids"]) % 3 == 0 else 1.0 for row in rows])
        return COLLATE(rows)

    def loss(outputs, labels):
        return of_rows(outputs, labels) * made["weight"]

    with pytest.raises(IndependenceError, match="of a row depends on other rows"):
        trainer(tmp_path, llama(), dataset, data_collator=collate, compute_loss_func=loss).train()


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
    assert any("makes its rows at each read" in one for one in run.privacy_report()["open_points"])


class Coin:
    """A loss with a generator of its own, that changes one row of twenty."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, outputs, labels):
        return of_rows(outputs, labels) * (1 + float(torch.rand((), generator=self.generator) < 0.05))


@kills(
    "a loss may keep its own random generator",
    "dpllm/training/checks/independence.py",
    "        kind = own_generator(source)\n",
    "        kind = None\n",
)
def test_a_loss_with_its_own_generator_is_refused(tmp_path):
    """Its seed is public, and a coin of one in twenty is missed by a few random states."""
    loss = Coin(torch.Generator().manual_seed(3))
    with pytest.raises(IndependenceError, match=r"The loss has its own random generator \(generator: Generator\)"):
        trainer(tmp_path, llama(), compute_loss_func=loss).train()


def test_the_global_generators_are_no_generators_of_a_loss(tmp_path):
    """`from random import uniform` is bound to Python's generator, which every step seeds from secrets."""
    draw = random.uniform

    def loss(model, inputs):
        draw(0, 1), np.random.rand()
        return of_rows(model(inputs["input_ids"], attention_mask=inputs["attention_mask"]), inputs["labels"])

    assert steps(tmp_path, llama(), rows_of(unequal().to_list(), max_rows=1), loss, count=1)[0] == 1


# ------------------------------------------------------------- what modules of libraries store

LENGTHS = np.array([8 + 4 * (7 * number % 13) for number in range(40)])


class OfLibrary(torch.nn.Module):
    """Scales its rows by what it stored."""

    __module__ = "transformers.models.stored"

    def __init__(self, where):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(60, 8), torch.nn.Linear(8, 60)
        self.where, self.size, self.cache = where, None, {}

    def forward(self, ids):
        length, scale = ids.shape[1], 1.0
        if self.where == "longest row":
            self.cache["longest"] = max(length, self.cache.get("longest", 0))
            scale = 1 + (self.cache["longest"] > length)
        elif self.where == "cache":  # a function of the row
            scale = self.cache.setdefault(length, 1 + 1 / length)
            self.size = length
        return self.head(torch.tanh(self.table(ids) * scale))


def two_steps(folder, model, gradients="per_unit"):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 60, (int(length),), generator=generator) for length in LENGTHS]

    def loss_of(model, inputs):
        found = model(inputs["ids"])
        return per_sequence_loss(getattr(found, "logits", found), inputs["labels"])

    plan = plan_of(noise_multiplier=0.0)
    data = TrainingRows(
        UnitIndex.from_ids(list(range(40))),
        LENGTHS,
        lambda numbers: [rows[int(number)] for number in numbers],
        lambda some: {"ids": torch.stack(some), "labels": torch.stack(some)},
        max_rows=1,
    )
    run = PrivateRun(plan, data, ledger_of(folder, plan))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.attach(model, optimizer, gradients=gradients)
    try:
        for units in ([1, 2, 5], [3, 4]):
            run.step(run.choose(np.array(units)), loss_of)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        run.detach()


@pytest.mark.parametrize("gradients", ["per_unit", "ghost"])
def test_a_module_that_follows_the_longest_row_so_far_is_refused_in_the_first_step(gradients, tmp_path):
    with pytest.raises(IndependenceError, match="carries state"):
        two_steps(tmp_path, OfLibrary("longest row"), gradients)


def test_caches_of_functions_of_a_row_are_nothing(tmp_path):
    model = OfLibrary("cache")
    two_steps(tmp_path, model)
    assert model.size == LENGTHS[4]  # of the last row: nothing is put back


@kills(
    "a value that a model chose by its first rows stays in its configuration",
    "dpllm/training/checks/independence.py",
    'if names else None, "the model',
    'if False else None, "the model',
)
def test_reformer_chooses_its_buckets_by_the_first_row_and_is_refused(tmp_path):
    """The choice would be saved in config.json, too."""
    from transformers import ReformerConfig, ReformerModelWithLMHead

    torch.manual_seed(0)
    config = ReformerConfig(
        vocab_size=60, hidden_size=16, num_attention_heads=2, attention_head_size=8, feed_forward_size=16,
        attn_layers=["lsh"], axial_pos_embds=False, max_position_embeddings=256, num_buckets=None,
        lsh_attn_chunk_length=4, is_decoder=True, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model = ReformerModelWithLMHead(config).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("lm_head"))
    with pytest.raises(IndependenceError, match="num_buckets"):
        two_steps(tmp_path, model)


# ------------------------------------------------------------------ the user's objects


class Prefetching:
    """A collator that takes a prepared item from a background thread's queue in each call, and notes it."""

    def __init__(self):
        self.items, self.put, self.ended = queue.Queue(maxsize=8), [], False
        self.taken, self.last, self.sizes = [], {}, []
        self.producer = threading.Thread(target=self._produce)
        self.producer.start()

    def _produce(self):
        for number in itertools.count():
            while not self.ended:
                try:
                    self.items.put(number, timeout=0.05)
                    self.put.append(number)
                    break
                except queue.Full:
                    continue
            if self.ended:
                return

    def __call__(self, rows):
        item = self.items.get()
        self.taken.append(item)
        self.last["item"] = item
        self.sizes.append(len(rows))
        return COLLATE(rows)


def test_a_run_loses_nothing_of_a_prefetch_queue_and_writes_into_no_container(tmp_path):
    """Every item that the producer put is taken by one call of the collator, or still in the queue, in its order."""
    collate = Prefetching()
    try:
        trainer(tmp_path, llama(), batch=4, steps=2, data_collator=collate).train()
    finally:
        collate.ended = True
        collate.producer.join()
    rest = list(collate.items.queue)
    assert collate.taken + rest == collate.put == list(range(len(collate.put)))
    assert len(collate.sizes) == len(collate.taken) and collate.last == {"item": collate.taken[-1]}
    assert len(collate.taken) <= 100, "the checks of two steps and their start call the collator"


def test_the_start_of_a_run_in_one_process_makes_a_few_rows_one_at_a_time(tmp_path):
    """A mistake is found before anything is charged; there is no other process whose rows could differ."""
    calls = []

    def collate(rows):
        calls.append(len(rows))
        return COLLATE(rows)

    model, plan = llama(), plan_of(num_steps=2)
    run = PrivateRun.start(tmp_path, plan, rows_of(unequal(plan.population).to_list(), collate))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.detach()
    assert set(calls) == {1} and len(calls) <= 19
