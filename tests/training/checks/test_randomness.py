"""Random numbers of a private step: secret, independent of other steps and processes, and never saved."""

import dataclasses
import functools
import io
import random

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    TrainerCallback,
    set_seed,
)

from dpllm import per_sequence_loss
from dpllm.config import ConfigError
from dpllm.data.rows import RowCollator
from dpllm.engines.processes import Processes
from dpllm.training.checks.independence import IndependenceError
from dpllm.training.checks.randomness import SecretStreams, refuse_own_generators
from dpllm.training.run import PrivateRun
from tests.conftest import tiny_llama_config
from tests.distributed import world
from tests.mutations import kills
from tests.training.test_run import ledger_of, loss_of, network, plan_of, rows_of
from tests.training.test_trainer import arguments, privacy, trainer


def states():
    """Of the three global generators, comparable."""
    legacy = np.random.get_state()
    return torch.get_rng_state().tolist(), (legacy[1].tolist(), *legacy[2:]), random.getstate()


def drawn():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def gpt2(dropout):
    config = GPT2Config(
        vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=dropout, embd_pdrop=dropout
    )
    return GPT2LMHeadModel(config)


def recorded(folder, **more):
    """A run after set_seed(42): the numbers that a loss draws in each step, and the losses under dropout.

    Without steps 1, 2, 4 and the last, in which rows are also compared with each other, with dropout off.
    """
    found = []

    def loss(outputs, labels):
        if run.state.global_step + 1 in (3, 5):
            found.append((states(), drawn(), outputs.logits.detach().double().sum().item()))
        return per_sequence_loss(outputs.logits, labels)

    set_seed(42)
    model = gpt2(0.5)
    args = arguments(folder, max_steps=6, per_device_train_batch_size=64)
    run = trainer(folder, model, args=args, compute_loss_func=loss, **more)
    run.train()
    assert found
    return found


def test_two_runs_with_one_public_seed_share_no_random_number(tmp_path):
    """Neither in the first step nor later, by any of the three generators; the dropout masks differ as well."""
    first, second = recorded(tmp_path / "a"), recorded(tmp_path / "b")
    seen = [draw for run in (first, second) for _, draws, _ in run for draw in draws]
    assert len({str(draw) for draw in seen}) == len(seen)
    generators = [str(state) for run in (first, second) for three, _, _ in run for state in three]
    assert len(set(generators)) == len(generators)


def test_a_callback_that_seeds_does_not_make_the_next_step_predictable(tmp_path):
    """`set_seed` between steps has no effect after the start of the next one."""

    class Seeding(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            set_seed(7)

    set_seed(7)
    known = str(drawn())
    assert known not in {str(draws) for _, draws, _ in recorded(tmp_path, callbacks=[Seeding()])}


def test_a_fixed_privacy_seed_repeats_the_run(tmp_path):
    """For tests; the report says that it is not private."""
    config = privacy(seed=3)
    first, second = recorded(tmp_path / "a", config=config), recorded(tmp_path / "b", config=config)
    assert [draws for _, draws, _ in first] == [draws for _, draws, _ in second]
    assert [total for *_, total in first] == [total for *_, total in second]


def test_checkpointing_recomputes_with_the_masks_of_the_forward_pass(tmp_path):
    """Without clipping and noise, dropout and a fixed privacy seed: the same weights with and without it."""

    def weights(name, **more):
        torch.manual_seed(1)
        model = gpt2(0.5)
        args = arguments(tmp_path / name, optim="sgd", learning_rate=0.5, max_steps=2, **more)
        config = privacy(seed=5, noise_multiplier=0.0, clip_norm=1e6)
        trainer(tmp_path / name, model, config=config, args=args).train()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain = weights("plain")
    torch.testing.assert_close(weights("again", gradient_checkpointing=True), plain, rtol=1e-4, atol=1e-6)


def after_steps(folder, takes, saved=None):
    """States after each of two steps of a seeded run whose loss takes this many random numbers."""
    plan = plan_of(seeded=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = PrivateRun(plan, rows_of(), ledger_of(folder, plan), seed=3)
    run.attach(model, optimizer)
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(run)

    def drawing(module, inputs):
        torch.rand(takes), np.random.rand(takes), [random.random() for _ in range(takes)]
        return loss_of(module, inputs)

    found = []
    for step in range(2):
        run.step(run.choose(np.arange(8)), drawing)
        found.append(states())
        if saved is not None:
            accelerator.save_state(saved / str(step))
        optimizer.step()
        optimizer.zero_grad()
    run.detach()
    return found


def test_the_state_after_a_step_does_not_tell_how_many_numbers_it_took(tmp_path):
    """A state that `accelerator.save_state` writes is a function of the secret and of the step's number."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = after_steps(tmp_path / "a", 5, tmp_path / "saved a")
    second = after_steps(tmp_path / "b", 911, tmp_path / "saved b")
    assert first == second and first[0] != first[1]
    for step in ("0", "1"):
        files = [tmp_path / name / step / "random_states_0.pkl" for name in ("saved a", "saved b")]
        loaded = [torch.load(io.BytesIO(file.read_bytes()), weights_only=False) for file in files]
        assert str(loaded[0]["random_state"]) == str(loaded[1]["random_state"])
        assert torch.equal(loaded[0]["torch_manual_seed"], loaded[1]["torch_manual_seed"])


def test_a_step_that_fails_leaves_no_trace_of_how_far_it_came(tmp_path):
    """The state that a handler of the error could save."""
    found = []
    for takes in (3, 700):
        folder = tmp_path / str(takes)
        folder.mkdir()
        plan, model = plan_of(seeded=True), network()
        run = PrivateRun(plan, rows_of(), ledger_of(folder, plan), seed=3)
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def failing(module, inputs, takes=takes):
            torch.rand(takes)
            raise RuntimeError("half-way")

        with pytest.raises(RuntimeError, match="half-way"):
            run.step(run.choose(np.arange(8)), failing)
        found.append(states())
        run.detach()
    assert found[0] == found[1]


def rank_numbers(root):
    """On one of two processes: numbers within a step, and after it."""
    from torch.nn.parallel import DistributedDataParallel

    from dpllm.privacy.ledger import LEDGER_FILE
    from dpllm.training.shared_ledger import SharedLedger

    plan, inside = plan_of(noise_multiplier=0.0), []
    model = DistributedDataParallel(network())
    run = PrivateRun(plan, rows_of(), SharedLedger.create(root / LEDGER_FILE, plan, Processes()))
    run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def drawing(module, inputs):
        inside.append(drawn())
        return loss_of(module, inputs)

    run.step(run.choose(np.arange(9)), drawing)
    return inside[-1], drawn()  # the last pass is the step's own; those before compare rows with each other


def test_processes_draw_apart_within_a_step_and_alike_after_it(tmp_path):
    """Equal masks on two ranks would tie rows together; a stochastic rounding has to be the same on replicas."""
    first, second = world.run(
        tmp_path / "world", "tests.training.checks.test_randomness:rank_numbers", size=2, root=tmp_path
    )
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))
    assert first[1] == second[1]


def test_a_loss_that_seeds_the_generator_is_refused(tmp_path):
    """Its numbers would be public, and the same in every microbatch."""

    def loss(outputs, labels):
        torch.manual_seed(0)
        return per_sequence_loss(outputs.logits, labels)

    with pytest.raises(ConfigError, match="0 during"):
        trainer(tmp_path, compute_loss_func=loss).train()


@pytest.mark.parametrize(
    ("seed", "draw"), [(np.random.seed, np.random.rand), (random.seed, random.random)], ids=["numpy", "python"]
)
@pytest.mark.parametrize("where", ["loss", "collator"])
def test_numbers_from_a_seed_of_numpy_or_python_are_refused(seed, draw, where, tmp_path):
    """They are public, and a row's depend on its place: the values of rows show it."""
    collator = RowCollator(pad_token_id=0)

    def loss(outputs, labels):
        loss_B = per_sequence_loss(outputs.logits, labels)
        if where == "loss":
            seed(0)
            loss_B = loss_B * torch.tensor([1.0 + draw() for _ in loss_B])
        return loss_B

    def collate(rows):
        if where == "collator":
            seed(0)
            rows = [{**row, "input_ids": [4 if draw() < 0.3 else one for one in row["input_ids"]]} for row in rows]
        return collator(rows)

    says = {"loss": "of a row depends on other rows", "collator": "sets a seed in each call"}[where]
    with pytest.raises(IndependenceError, match=says):
        trainer(tmp_path, compute_loss_func=loss, data_collator=collate).train()


def test_a_seed_within_a_fork_is_allowed(tmp_path):
    """No other object creates it, and the generator is unchanged."""

    def loss(outputs, labels):
        with torch.random.fork_rng():
            torch.manual_seed(0)
        return per_sequence_loss(outputs.logits, labels)

    trainer(tmp_path, compute_loss_func=loss).train()


class Noisy(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x


@pytest.mark.parametrize("generator", [torch.Generator(), np.random.default_rng(0), random.Random(0)])
def test_a_module_with_a_generator_of_its_own_is_refused_by_its_path(generator, tmp_path):
    """It is never seeded again."""
    model = LlamaForCausalLM(tiny_llama_config())
    model.model.layers[1].mlp.noisy = Noisy(generator)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.noisy"):
        trainer(tmp_path, model).train()


class Masking:
    seed = 42

    def __call__(self, rows):
        return {"rows": torch.stack(rows)}

    def bound(self, rows, more=None):
        return self(rows)


@pytest.mark.parametrize("collate", [Masking(), Masking().bound, functools.partial(Masking().bound, more=1)])
def test_a_collator_with_a_fixed_seed_is_refused(collate, tmp_path):
    """Also where only its method is given."""
    plan, model = plan_of(), network()
    rows = dataclasses.replace(rows_of(), collate=collate)
    run = PrivateRun(plan, rows, ledger_of(tmp_path, plan))
    with pytest.raises(ConfigError, match="seed=42"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_collator_of_transformers_has_the_seed_that_is_looked_for():
    """A renamed attribute would be missed."""
    assert hasattr(DataCollatorForLanguageModeling.__new__(DataCollatorForLanguageModeling), "seed") or (
        "seed" in DataCollatorForLanguageModeling.__dataclass_fields__
    )


def test_all_words_of_the_cpu_generator_come_from_the_secret():
    """`manual_seed` alone keeps 32 bits of it: equal low bits must not give equal numbers."""
    streams = SecretStreams(Processes(), seed=1)
    streams.separate()
    mine = torch.rand(8)
    torch.manual_seed(torch.initial_seed())
    assert not torch.equal(torch.rand(8), mine)
    streams = SecretStreams(Processes(), seed=1)
    streams.separate()
    assert torch.equal(torch.rand(8), mine)
    numbers = torch.rand(100_000)
    assert abs(float(numbers.mean()) - 0.5) < 0.01 and abs(float(numbers.std()) - 12**-0.5) < 0.01


def test_a_state_of_another_layout_is_refused(monkeypatch):
    """Seeds of 32 bits would be left, and a run that looks the same."""
    monkeypatch.setattr("dpllm.training.checks.randomness._MT_OFFSET", 32)
    with pytest.raises(ConfigError, match="secret bits"):
        SecretStreams(Processes()).separate()


class Drawing:
    """A collator or a data set with a generator as an attribute."""

    seed = None

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, rows, rng=None):
        return {"rows": torch.stack(rows)}

    def fetch(self, numbers):
        return [torch.zeros(1) for _ in numbers]


PARTS = {
    "object": lambda rng: Drawing(rng),
    "method": lambda rng: Drawing(rng).fetch,
    "partial": lambda rng: functools.partial(Drawing(rng)),
    "argument": lambda rng: functools.partial(Drawing(None), rng=rng),
    "decorated": lambda rng: functools.lru_cache(Drawing(rng).fetch),
}


@kills(
    "a collator may keep its own random generator",
    "dpllm/training/checks/randomness.py",
    "[*modules, *others, *sources]",
    "[*modules, *sources]",
)
@pytest.mark.parametrize(
    "rng", [np.random.default_rng(0), np.random.RandomState(0), random.Random(1), torch.Generator()]
)
@pytest.mark.parametrize("part", PARTS)
def test_a_collator_or_a_data_set_with_a_generator_of_its_own_is_refused_by_name(part, rng, tmp_path):
    """Its numbers shift with the rows before."""
    holder, model = PARTS[part](rng), network()
    with pytest.raises(ConfigError, match=rf"The data set has its own random generator \(rng: {type(rng).__name__}"):
        refuse_own_generators(model, [], [("The data set", holder)])
    plan = plan_of()
    run = PrivateRun(plan, dataclasses.replace(rows_of(), collate=holder), ledger_of(tmp_path, plan))
    with pytest.raises(ConfigError, match="The collator has its own random generator"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("rng", [None, np.random.mtrand._rand, random.uniform.__self__, torch.default_generator])
def test_the_global_generators_are_nobodys_own(rng):
    """Every step seeds them from secrets; `sklearn.utils.check_random_state(None)` returns NumPy's."""
    for part in PARTS.values():
        refuse_own_generators(nn.Linear(1, 1), [("The collator", part(rng))], [("The data set", part(rng))])


@pytest.mark.parametrize("place", ["by place", "by content"])
def test_numbers_from_a_seed_within_a_fork_may_not_depend_on_a_rows_place(place, tmp_path):
    """They are public and shift when a row is removed. A seed that a row itself gives is a function of the row."""

    def loss(outputs, labels):
        logits = outputs.logits
        with torch.random.fork_rng():
            if place == "by place":
                torch.manual_seed(0)
                logits = nn.functional.dropout(logits, 0.5)
            else:
                masks = []
                for row in labels:
                    torch.manual_seed(int(row[row >= 0].sum()))
                    masks.append(nn.functional.dropout(torch.ones(logits.shape[2]), 0.5).expand(logits.shape[1:]))
                logits = logits * torch.stack(masks)
        return per_sequence_loss(logits, labels)

    run = trainer(tmp_path, compute_loss_func=loss)
    if place == "by content":
        run.train()
        return
    with pytest.raises(IndependenceError, match="set within"):
        run.train()
