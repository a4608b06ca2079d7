"""A private run driven by a custom loop; the same over several processes is in `tests.distributed`."""

import copy
import dataclasses
import functools
import itertools
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from dpllm import GhostClipper
from dpllm.config import ConfigError, PrivacyConfig
from dpllm.data.units import UnitIndex
from dpllm.engines import EngineError, SingleProcess
from dpllm.engines.processes import Processes
from dpllm.ghost.refusals import GhostError
from dpllm.mechanism.discrete import DiscreteNoise
from dpllm.mechanism.generators import NoiseSource
from dpllm.mechanism.noise import IndependentStream
from dpllm.mechanism.sampling import seeded_rng
from dpllm.privacy.budget import create_budget, read_budget
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError, read_ledger
from dpllm.privacy.plan import PrivacyPlan, make_plan
from dpllm.privacy.private_folder import read_diagnostics
from dpllm.report.verify import verify
from dpllm.training.checks.watch import WatchError
from dpllm.training.draws import DrawError
from dpllm.training.microbatches import microbatches
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun, RunEntropy
from dpllm.training.shared_ledger import SharedLedger
from dpllm.training.step import private_step
from tests.mutations import kills
from tests.scarce import BreaksOff

pytestmark = pytest.mark.usefixtures("rows_not_compared")

UNITS, FEATURES = 40, 6


def plan_of(noise_multiplier=0.8, num_units=UNITS, num_steps=4, seeded=False, clip_norm=0.5):
    return PrivacyPlan(
        unit="user",
        adjacency="zero-out",
        num_units=num_units,
        sampling_rate=8 / num_units,
        expected_batch_size=8,
        max_batch_size=30,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        delta=1e-3,
        max_rows_per_unit=3,
        unit_column="who",
        seeded=seeded,
    )


def rows_of(num_units=UNITS, max_rows=5, record=None, reverse=False):
    """Between one and three rows per unit, each made of numbers that depend only on the row.

    Args:
        num_units: units.
        max_rows: rows of a microbatch.
        record: takes the row numbers that are fetched.
        reverse: in another order.
    """
    owner = np.repeat(np.arange(num_units), 1 + np.arange(num_units) % 3)
    lengths = 1 + (7 * np.arange(len(owner))) % 11
    values = torch.randn(len(owner), FEATURES + 1, generator=torch.Generator().manual_seed(2)) + 1

    def fetch(numbers):
        if record is not None:
            record.extend(numbers.tolist())
        return [values[int(number)] for number in numbers]

    return TrainingRows(
        units=UnitIndex.from_ids(owner[:: -1 if reverse else 1].tolist()),
        lengths=lengths[:: -1 if reverse else 1],
        fetch=fetch,
        collate=lambda rows: {"rows": torch.stack(rows)},
        max_rows=max_rows,
    )


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.Tanh(), nn.Linear(10, 1))


def loss_of(model, inputs):
    """Squared error of the last column, one per row."""
    rows = inputs["rows"]
    return (model(rows[:, :-1]).squeeze(1) - rows[:, -1]).square()


def attached(folder, plan, seed=None):
    """A run of this plan, the model it is attached to, and the optimizer."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = PrivateRun(plan, rows_of(), ledger_of(folder, plan), seed)
    run.attach(model, optimizer)
    return run, model, optimizer


OWNERS = np.repeat(np.arange(UNITS), 1 + np.arange(UNITS) % 3)
CROWDED = np.concatenate([np.arange(UNITS), np.arange(len(OWNERS) - UNITS - 5) % (UNITS - 1), [UNITS - 1] * 5])


@pytest.mark.parametrize(
    ("num_units", "singly", "owner", "each_row", "match"),
    [
        (UNITS + 1, False, OWNERS, False, "The plan is for 41 units, but the data have 40"),
        (UNITS, False, CROWDED, False, "A user has 6 rows, but the plan allows at most 3"),
        (UNITS, True, CROWDED, True, "drawn separately"),
        (UNITS, True, OWNERS, False, "rows to draw, but the data have 40"),
    ],
)
def test_rows_that_the_plan_does_not_count_are_refused(num_units, singly, owner, each_row, match, tmp_path):
    """With another number of units, or more rows of one than in the accounting, ε would be different."""
    index = UnitIndex.from_ids(owner.tolist(), 3 if owner is OWNERS else None)
    made, count = plan_of(num_units=num_units), index.num_rows
    if singly:
        sizes = {"num_examples": count, "sampling_rate": 8 / count, "max_batch_size": count}
        made = dataclasses.replace(made, sampling="example", **sizes)
    rows = dataclasses.replace(rows_of(), units=index.each_row() if each_row else index)
    with pytest.raises(ConfigError, match=match):
        PrivateRun(made, rows, ledger_of(tmp_path, made))


def ledger_of(folder, plan):
    return SharedLedger.create(folder / LEDGER_FILE, plan, Processes())


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loop(run, optimizer, num_steps, loss=loss_of):
    """The loop of the module's docstring; returns the units of each step."""
    drawn = []
    for unit_ids in run.draws(num_steps):
        drawn.append(unit_ids.tolist())
        run.step(unit_ids, loss)
        optimizer.step()
        optimizer.zero_grad()
    return drawn


def test_a_loop_of_ones_own_takes_the_steps_that_private_step_takes(tmp_path):
    """With one seed, draws, clipped sums, noise and charges are those of the parts put together by hand."""
    plan = plan_of(seeded=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path / "run", plan), seed=11)
    run.attach(model, optimizer)
    drawn = loop(run, optimizer, plan.num_steps)
    run.detach()

    twin, rows, noise = network(), rows_of(), IndependentStream(NoiseSource(11))
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.3)
    engine, clipper = SingleProcess(by_hand), GhostClipper(twin, plan.clip_norm)
    ledger = ledger_of(tmp_path / "hand", plan)
    for number, unit_ids in enumerate(islice(plan.mechanism.sampler.steps(seeded_rng(11)), plan.num_steps)):
        assert unit_ids.tolist() == drawn[number]
        batch = microbatches(rows.fetch, rows.collate, rows.units, rows.lengths, unit_ids, rows.max_rows)
        private_step(clipper, batch, lambda inputs: loss_of(twin, inputs), plan, engine, ledger, noise)
        by_hand.step()
        by_hand.zero_grad()
    # Passes that compared rows before change the last bits: the order in which gradients lie side by side follows them.
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-5, atol=1e-7)
    assert not torch.equal(flat(model), flat(network()))
    for folder in ("run", "hand"):
        assert read_ledger(tmp_path / folder / LEDGER_FILE).history == [(plan.event, plan.num_steps)]


def test_two_runs_of_one_plan_draw_other_units_and_other_noise(tmp_path):
    """Entropy comes from the operating system, even if seeds are set."""
    drawn, moved = [], []
    plan = dataclasses.replace(plan_of(), sampling_rate=1.0, expected_batch_size=UNITS, max_batch_size=UNITS)
    fewer = plan_of()
    for name in ("first", "second"):
        torch.manual_seed(0)
        np.random.seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        run = PrivateRun(plan, rows_of(), ledger_of(tmp_path / name, plan))
        run.attach(model, optimizer)
        run.step(next(run.draws(1)), loss_of)
        moved.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        other = PrivateRun(fewer, rows_of(), ledger_of(tmp_path / f"{name} other", fewer))
        drawn.append([units.tolist() for units in other.draws(4)])
    assert drawn[0] != drawn[1] and not (moved[0] == moved[1]).any()


def test_the_key_that_deals_units_to_processes_differs_between_steps_and_between_starts(tmp_path):
    """Units of equal numbers go to other processes in the next step. Draws and noise are compared above."""

    def entropy(name, plan, seed=None):
        return RunEntropy(plan, Processes(), ledger_of(tmp_path / name, plan), seed)

    seeded = entropy("seeded", plan_of(seeded=True), 5)
    assert [seeded.deal_key(step) for step in (0, 1, 7)] == [5, 6, 12]
    first, second = entropy("a", plan_of()), entropy("b", plan_of())
    assert first.first == 0 and first.deal_key(2) != second.deal_key(2)


def test_a_step_over_no_unit_is_taken_and_charged(tmp_path):
    """Only noise; skipping the step would reveal that no unit was drawn."""
    run, model, _ = attached(tmp_path, plan_of(seeded=True), seed=7)
    done = run.step(run.choose([]), loss_of)
    assert done.num_units == 0 and run.ledger.num_steps == 1 and all(p.grad.all() for p in model.parameters())


def test_steps_beyond_the_plan_are_refused(tmp_path):
    """However many are drawn."""
    run, _, optimizer = attached(tmp_path, plan_of(num_steps=2))
    with pytest.raises(ValueError, match="2 steps"):
        loop(run, optimizer, 3)
    assert read_ledger(run.ledger.path).num_steps == 2


def test_a_unit_with_a_gradient_that_is_not_finite_is_counted(tmp_path):
    """It contributes zero, and the report says how many did."""
    run, model, _ = attached(tmp_path, plan_of(seeded=True), seed=7)

    def broken(module, inputs):
        first = inputs["rows"][:, 0] == rows_of().fetch(np.array([0]))[0][0]
        return loss_of(module, inputs) * torch.where(first, float("inf"), 1.0)

    shares = []
    done = run.step(run.choose(np.arange(8)), broken, shares.append)
    assert shares[0] == 0 and shares == sorted(shares) and shares[-1] == pytest.approx(1)  # for the screen
    assert done.num_nonfinite == 1 and all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert read_diagnostics(run.ledger.path.parent) == {"units with a non-finite gradient, which contributes zero": 1}


def test_a_model_is_as_before_after_detach(tmp_path):
    """No hook stays, and it can be trained without privacy, for instance on public data."""
    run, model, optimizer = attached(tmp_path, plan_of())
    loop(run, optimizer, 1)
    with pytest.raises(GhostError, match="directly"):
        loss_of(model, rows_of().collate(rows_of().fetch(np.arange(3)))).sum().backward()
    run.detach()
    loss_of(model, rows_of().collate(rows_of().fetch(np.arange(3)))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_gradient_that_autograd_leaves_between_microbatches_is_refused(tmp_path):
    """A second loss with its own backward() would be released unclipped."""
    run, *_ = attached(tmp_path, plan_of(0.0))

    def decayed(module, inputs):
        losses = loss_of(module, inputs)
        module[0].weight.square().sum().backward()
        return losses

    with pytest.raises(EngineError, match=r"0\.weight"):
        run.step(run.choose(np.arange(8)), decayed)
    assert run.ledger.num_steps == 1


def test_an_average_that_is_only_named_is_refused_when_the_model_is_attached(tmp_path):
    """A recipe names it by a word; a loop has to keep the object."""
    run, model = PrivateRun.start(tmp_path / "run", plan_of(), rows_of()), network()
    with pytest.raises(ConfigError, match="average_of"):
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.3), averaging="ema")
    assert read_ledger(tmp_path / "run" / LEDGER_FILE).end == "failed"


def test_an_attach_that_fails_ends_the_run_and_gives_its_budget_back(tmp_path):
    """No step was charged, so the ledger ends, nothing stays reserved, and the folder can be used again."""
    plan = dataclasses.replace(plan_of(), dataset="mail")
    budget = create_budget(
        tmp_path / "mail.json",
        **{"dataset": "mail", "epsilon": 1.2 * plan.epsilon, "delta": plan.delta},
        **{"unit": plan.unit, "unit_column": plan.unit_column, "num_units": plan.num_units},
    ).path
    for start in (PrivateRun.start, PrivateRun.resume, PrivateRun.start):
        run = start(tmp_path / "run", plan, rows_of(), budget_file=str(budget))
        assert read_budget(budget).entries[-1].num_steps == plan.num_steps
        with pytest.raises(WatchError, match="optimizer holds"):
            run.attach(network(), torch.optim.SGD(network().parameters(), lr=0.3))
        assert {entry.num_steps for entry in read_budget(budget).entries} == {0}
        assert read_ledger(tmp_path / "run" / LEDGER_FILE).end == "failed"
        run.ledger.close()


def numbered(rows):
    return {"number": torch.tensor([int(row) for row in rows])}


def test_rows_are_told_apart_by_their_lengths_and_units():
    """The facts that the processes compare before they divide the rows."""
    facts = rows_of().facts()
    assert facts == rows_of().facts() and facts != rows_of(max_rows=2).facts()  # in lockstep, all would wait for ever
    assert facts["the number of units"] == UNITS and facts["the number of rows"] == len(rows_of().lengths)
    assert facts != rows_of(reverse=True).facts() and facts != rows_of(UNITS + 1).facts()
    swapped = dataclasses.replace(rows_of(), units=UnitIndex(rows_of().units.offsets, rows_of().units.rows[::-1]))
    assert facts != swapped.facts()
    groups = [UnitIndex.from_ids(owner) for owner in ([0, 0, 1, 2, 2], [0, 1, 1, 2, 2])]  # the same rows in one order
    regrouped = [TrainingRows(group, np.ones(5, dtype=np.int64), list, numbered, 2).facts() for group in groups]
    assert regrouped[0] != regrouped[1]
    units, lengths = UnitIndex.one_row_per_unit(5), np.ones(5, dtype=np.int64)
    shuffled = [TrainingRows(units, lengths, lambda n, by=by: list(by * n), numbered, 2).facts() for by in (1, -1)]
    assert shuffled[0] != shuffled[1]  # rows of equal lengths in another order


@pytest.mark.parametrize("change", ["content", "collator"])
def test_every_row_and_the_collator_are_compared(change):
    """One row of thousands differs in one number, and the collator in one setting."""
    units, lengths = UnitIndex.one_row_per_unit(5000), np.ones(5000, dtype=np.int64)

    def facts(odd_row, factor):
        def fetch(numbers):
            return [{"number": [int(n) + (n == odd_row)]} for n in numbers]

        def collate(rows, factor):
            return {"n": torch.tensor([factor * 0 + row["number"][0] for row in rows])}

        return TrainingRows(units, lengths, fetch, functools.partial(collate, factor=factor), 2).facts()

    same, other = facts(None, 1), facts(2345, 1) if change == "content" else facts(None, 2)
    assert same == facts(None, 1)
    differing = {name for name in same if same[name] != other[name]}
    assert differing == {"the rows' contents or their order" if change == "content" else "the collator"}


@pytest.mark.parametrize("kind", [torch.long, torch.float32])
def test_one_number_that_is_repeated_for_all_rows_is_compared(kind):
    """Its stride is 0, which PyTorch takes for contiguous and cannot read as bytes."""

    def facts(number):
        def collate(rows):
            return {"n": torch.tensor(number, dtype=kind).expand(len(rows))}

        one = UnitIndex.one_row_per_unit(3)
        return TrainingRows(one, np.ones(3, dtype=np.int64), lambda numbers: [0] * len(numbers), collate, 2).facts()

    name = "the rows as the collator leaves them"
    assert facts(2)[name] == facts(2)[name] != facts(3)[name]


def test_a_seed_belongs_to_a_seeded_plan(tmp_path):
    """The report takes from the plan whether anything is private."""
    plan = plan_of()
    with pytest.raises(ConfigError, match="seeded=False"):
        PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan), seed=3)


def test_the_state_of_a_run_holds_no_entropy(tmp_path):
    """A checkpoint that could repeat a draw or the noise would give both away."""
    plan = plan_of()
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    head = {"chain": read_ledger(run.ledger.path).runs and run.ledger.head.chain, "num_steps": 0}
    assert run.state_dict() == {"plan_hash": plan.hash, "num_steps": 0, "ledger": head}


def test_a_checkpoint_of_another_plan_or_ahead_of_the_ledger_is_refused(tmp_path):
    """Its steps would not be charged, or charged at another σ."""
    plan = plan_of()
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    state = run.state_dict()
    with pytest.raises(LedgerError, match=rf"made under the plan {plan_of(0.9).hash[:12]}, but the plan of this"):
        run.load_state_dict({**state, "plan_hash": plan_of(0.9).hash})
    with pytest.raises(LedgerError, match=r"privacy_ledger\.jsonl"):
        run.load_state_dict({**state, "num_steps": 3, "ledger": {**state["ledger"], "num_steps": 3}})
    for lost in state.keys() - {"num_steps"}:
        with pytest.raises(LedgerError, match="state_dict"):
            run.load_state_dict({name: value for name, value in state.items() if name != lost})
    run.load_state_dict(state)


def test_a_run_is_saved_and_resumed_by_accelerate(tmp_path, accelerator):
    """Model and optimizer come back, the steps after the checkpoint stay charged, and the units are drawn afresh."""
    plan = plan_of()
    model, optimizer = accelerator.prepare(*_with_optimizer(network()))
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    accelerator.register_for_checkpointing(run)
    run.attach(model, optimizer)
    loop(run, optimizer, 2)
    accelerator.save_state(str(tmp_path / "checkpoint"))
    saved = flat(model)
    drawn = loop(run, optimizer, 1)
    run.detach()
    run.ledger.close()

    accelerator.free_memory()
    accelerator._custom_objects.clear()
    model, optimizer = accelerator.prepare(*_with_optimizer(network()))
    resumed = PrivateRun(plan, rows_of(), SharedLedger.open(tmp_path / LEDGER_FILE, plan, Processes()))
    accelerator.register_for_checkpointing(resumed)
    accelerator.load_state(str(tmp_path / "checkpoint"))
    assert torch.equal(flat(model), saved) and resumed.ledger.num_steps == 3
    assert optimizer.state_dict()["state"][0]["step"] == 2
    resumed.attach(model, optimizer)
    assert loop(resumed, optimizer, 1) != drawn
    with pytest.raises(ValueError, match="4 steps"):
        loop(resumed, optimizer, 1)

    accelerator._custom_objects.clear()
    accelerator.register_for_checkpointing(
        PrivateRun(plan_of(0.9), rows_of(), ledger_of(tmp_path / "new", plan_of(0.9)))
    )
    with pytest.raises(LedgerError, match="Resume with the configuration of the first start"):
        accelerator.load_state(str(tmp_path / "checkpoint"))


def _with_optimizer(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@kills(
    "a draw can be stepped over twice",
    "dpllm/training/draws.py",
    "        self._outstanding = None\n        return draw\n",
    "        return draw[0], Charged(draw[1].num_steps, draw[1].step)\n",
)
def test_only_the_outstanding_draw_is_stepped_over_and_once(tmp_path):
    """Chosen units, a draw that was used, one that was changed and an older one are refused."""
    run, _, optimizer = attached(tmp_path, plan_of(num_steps=6))
    with pytest.raises(DrawError, match="No draw is outstanding"):
        run.step(np.arange(8), loss_of)
    first = next(run.draws(1))
    for other in (np.arange(8), np.repeat(first[:1], 50), first[::-1], first[1:], np.arange(UNITS)):
        with pytest.raises(DrawError, match="outstanding"):
            run.step(other, loss_of)
    kept, first[0] = first.copy(), (first[0] + 1) % UNITS
    with pytest.raises(DrawError, match="outstanding"):
        run.step(first, loss_of)
    first = kept
    run.step(first, loss_of)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(DrawError, match="already used"):
        run.step(first, loss_of)
    seen, kept = next(run.draws(1)), next(run.draws(1))
    with pytest.raises(DrawError, match="outstanding"):
        run.step(seen, loss_of)
    run.step(kept, loss_of)
    assert read_ledger(run.ledger.path).num_steps == 3  # the draw that was looked at and dropped counts


def test_units_of_ones_own_choice_need_a_run_that_is_not_private(tmp_path):
    """A shuffled epoch would carry the ε of Poisson draws."""
    plan = plan_of()
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    with pytest.raises(DrawError, match="sampler draws"):
        run.choose(np.arange(8))
    assert run.ledger.num_steps == 0


def test_units_that_are_absent_are_in_no_draw(tmp_path):
    """Audits compare neighbouring data sets: the draws are the same, without them."""
    plan = plan_of(seeded=True)
    rows, present_N = rows_of(), np.arange(UNITS) % 2 == 0
    whole = PrivateRun(plan, rows, ledger_of(tmp_path / "a", plan), seed=3)
    part = PrivateRun(plan, rows, ledger_of(tmp_path / "b", plan), seed=3)
    for all_of_it, those in zip(whole.draws(4), part.draws(4, present_N), strict=True):
        assert those.tolist() == [unit for unit in all_of_it if present_N[unit]]


@pytest.mark.parametrize(
    "present_N", [np.ones(UNITS, dtype=int), np.ones(UNITS - 1, bool), np.array(True), [1] * UNITS]
)
def test_units_that_are_present_are_told_by_one_bool_each(present_N, tmp_path):
    """Numbers would be taken for unit numbers: one unit, several times in a step. Nothing is drawn or charged."""
    plan = plan_of()
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    with pytest.raises(DrawError, match="40 units"):
        next(run.draws(1, present_N))
    assert run.ledger.num_steps == 0


def test_a_draw_that_holds_a_unit_twice_is_refused(tmp_path):
    """Each of its places would be clipped by itself."""
    plan = plan_of(noise_multiplier=0.0)
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    with pytest.raises(DrawError, match="unit twice"):
        run.choose([3, 5, 3])
    assert run.ledger.num_steps == 0


def users_plan(num_steps, **changes):
    """A plan that the library makes for users of at most three rows."""
    users = {"unit": "who", "max_rows_per_unit": 3}
    settings = {"noise_multiplier": 1.0, "clip_norm": 0.5, "expected_batch_size": 8, "delta": 1e-3, **users}
    return make_plan(PrivacyConfig(**{**settings, **changes}), UNITS, num_steps)


def banded_plan():
    noise = {"kind": "banded", "bands": 4}
    return users_plan(12, noise_multiplier=0.8, expected_batch_size=5, noise=noise)


def test_a_draw_that_could_not_be_charged_is_the_next_one(tmp_path, monkeypatch):
    """Under banded noise a unit's steps are a cycle apart, also where a loop goes on after errors of the ledger."""
    plan = banded_plan()
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    steps = {unit: [] for unit in range(UNITS)}
    charge = SharedLedger.append_step
    for step in range(plan.num_steps):
        if step % 4 == 1:
            monkeypatch.setattr(SharedLedger, "append_step", _no_disk)
            for _ in range(3):
                with pytest.raises(LedgerError, match="no disk"):
                    next(run.draws(1))
            monkeypatch.setattr(SharedLedger, "append_step", charge)
        for unit in next(run.draws(1)):
            steps[int(unit)].append(step)
    assert max(map(len, steps.values())) > 1
    assert all((later - earlier) % 4 == 0 for taken in steps.values() for earlier, later in itertools.pairwise(taken))


def _no_disk(self, step_number, step):
    raise LedgerError("no disk")


def test_a_second_run_on_the_ledger_of_one_with_correlated_noise_is_refused(tmp_path):
    """It would begin a new cycle that the ledger does not state; a run of DP-SGD has no cycles."""
    plan = banded_plan()
    ledger = ledger_of(tmp_path / "banded", plan)
    run = PrivateRun(plan, rows_of(), ledger)
    next(run.draws(1))
    with pytest.raises(ConfigError, match="already uses this ledger"):
        PrivateRun(plan, rows_of(), ledger)
    plain = plan_of()
    ledger = ledger_of(tmp_path / "plain", plain)
    for _ in range(2):
        next(PrivateRun(plain, rows_of(), ledger).draws(1))


def test_a_checkpoint_of_another_run_or_of_a_fork_is_refused(tmp_path):
    """Its head is not in the ledger of this folder, also where the ledger charges as many steps or more."""
    plan = plan_of()
    states = []
    for name in ("a", "b"):
        run = PrivateRun(plan, rows_of(), ledger_of(tmp_path / name, plan))
        for _ in run.draws(2):
            pass
        states.append(run.state_dict())
        for _ in run.draws(1):
            pass
    run.load_state_dict(states[1])
    with pytest.raises(LedgerError, match="does not belong to"):
        run.load_state_dict(states[0])


def test_a_plan_for_users_over_an_index_of_rows_is_refused(tmp_path):
    """Its report would speak of users, and ε would be that of a row."""
    plan = plan_of()
    rows = dataclasses.replace(rows_of(), units=UnitIndex.one_row_per_unit(UNITS))
    with pytest.raises(ConfigError, match="protects users"):
        PrivateRun.start(tmp_path / "run", plan, rows)
    assert not (tmp_path / "run" / LEDGER_FILE).exists()


def test_a_model_that_a_loop_of_ones_own_saved_is_known_to_verify(tmp_path):
    """A file in the folder before the run is not its model; a file saved before `finish` is named by hash."""
    folder, model = tmp_path / "run", network()
    folder.mkdir()
    (folder / "notes.log").write_text("begun")
    run = PrivateRun.start(folder, plan_of(), rows_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    loop(run, optimizer, 4)
    torch.save(model.state_dict(), folder / "model.bin")
    run.finish()
    (folder / "notes.log").write_text("done")
    assert verify(folder).ok
    torch.save(network().state_dict(), folder / "model.bin")
    (failed,) = [check for check in verify(folder).checks if not check.ok]
    assert failed.detail.startswith("model.bin is not what was saved")


@pytest.mark.parametrize(
    ("units", "unit", "doubt"),
    [
        (UnitIndex.one_row_per_unit(UNITS), "sequence", "Nearly all rows have the same number of tokens"),
        (UnitIndex.from_ids([f"message {n}" for n in range(UNITS)], 3), "user", "No id in column 'who' occurs twice"),
        (UnitIndex.from_ids([*(f"u{n}" for n in range(UNITS - 1)), "U1", "U1"], 3), "user", "differ only in case"),
        (
            dataclasses.replace(UnitIndex.one_row_per_unit(UNITS), many_copies=True),
            "sequence",
            "are copies of other records",
        ),
    ],
    ids=["blocks", "ids of messages", "case", "copies"],
)
def test_a_loop_of_ones_own_notes_the_doubts_about_its_units(units, unit, doubt, tmp_path):
    """As the Trainer does: a person may be spread over several units, and a text may be in several records."""
    single = {"unit": "sequence", "unit_column": None, "max_rows_per_unit": None} if unit == "sequence" else {}
    made = dataclasses.replace(plan_of(num_units=units.num_units), **single)
    rows = dataclasses.replace(rows_of(), units=units, lengths=np.full(units.num_rows, 8))
    PrivateRun.start(tmp_path, made, rows).ledger.close()
    assert sum(doubt in point for point in read_ledger(tmp_path / LEDGER_FILE).notes.open_points) == 1


def test_units_that_are_left_out_by_hand_are_an_open_point(tmp_path):
    """Which ones may follow their losses. All of them is all of them."""
    for name, present in (("all", np.ones(UNITS, dtype=bool)), ("some", np.arange(UNITS) > 0)):
        run = PrivateRun.start(tmp_path / name, plan_of(), rows_of())
        list(run.draws(2, present))
        points = run.finish()["open_points"]
        assert any("left out of draws by hand" in point for point in points) == (name == "some")


def test_a_step_without_a_model_says_so(tmp_path):
    run = PrivateRun.start(tmp_path, plan_of(), rows_of())
    with pytest.raises(ConfigError, match="call attach"):
        run.step(next(run.draws(1)), lambda model, inputs: model(**inputs))


def test_discrete_noise_is_refused_before_a_charge_where_an_engine_has_no_complete_sum(tmp_path, monkeypatch):
    """DeepSpeed adds up by itself: floating-point additions after the noise would show last bits of the sums."""

    def engine(model, optimizer):
        made = SingleProcess(optimizer)
        made.forms_total = False
        return made

    monkeypatch.setattr("dpllm.training.attached.engine_for", engine)
    plan = users_plan(4, randomness="discrete")
    with pytest.raises(EngineError, match="SingleProcess"):
        attached(tmp_path, plan)
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 0


@kills(
    "a run with discrete noise does not count the trained parameters",
    "dpllm/training/attached.py",
    "        plan.mechanism.require_entries(sum(parameter.numel() for parameter in clipper.parameters.values()))\n",
    "",
)
def test_discrete_noise_is_refused_before_a_charge_for_more_parameters_than_its_accounting_covers(
    tmp_path, monkeypatch
):
    """Rounding would move the sum further than the sensitivity says."""
    plan = users_plan(4, randomness="discrete")
    size = sum(parameter.numel() for parameter in network().parameters())
    monkeypatch.setattr(DiscreteNoise, "max_entries", size - 1)
    with pytest.raises(ValueError, match=f"{size} parameters are trained, but .* at most {size - 1}"):
        attached(tmp_path, plan)
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 0


def test_a_run_with_discrete_noise_passes_the_guard_and_says_what_is_proved(tmp_path):
    """The guard finds the noise that the plan states; the report names the level, and the margin for sums."""
    plan = users_plan(2, randomness="discrete")
    run, _, optimizer = attached(tmp_path, plan)
    loop(run, optimizer, 2)
    run.finish()
    assert read_ledger(tmp_path / LEDGER_FILE).history == [(plan.event, 2)] and run.engine_name == "none"
    noted = (tmp_path / "privacy_report.md").read_text(encoding="utf-8")
    assert "exact discrete noise by ChaCha20 (RFC 8439)" in noted and "a margin, not a proof" in noted


@kills(
    "a model is attached in the place of the attached one",
    "dpllm/training/run.py",
    '        if self._attached is not None:\n            raise ConfigError("A model is already attached',
    '        if False:\n            raise ConfigError("A model is already attached',
)
def test_another_model_is_attached_after_detach_only(tmp_path):
    """Otherwise nobody compares its weights with those that the run left. The run goes on with the first one."""
    run = PrivateRun.start(tmp_path, plan_of(), rows_of())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    loop(run, optimizer, 1)
    other = copy.deepcopy(model)
    with pytest.raises(ConfigError, match=r"call detach\(\)"):
        run.attach(other, torch.optim.SGD(other.parameters(), lr=0.1))
    loop(run, optimizer, 3)
    run.finish()
    assert read_ledger(tmp_path / LEDGER_FILE).end == "completed"


@kills(
    "a run is attached to a model that another run holds",
    "dpllm/training/attached.py",
    "        refuse_clipped(inside.modules())  # before a draw is charged\n",
    "",
)
@pytest.mark.parametrize("gradients", ["ghost", "per_unit"])
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.Sequential(*model)], ids=["same", "around"])
def test_a_model_that_a_run_holds_is_refused_before_a_draw_is_charged(wrap, gradients, tmp_path):
    """A notebook whose first run was left without detach(); also around the model, or by another clipper."""
    model = network()
    inner = model if wrap(model) is model else model[0]
    GhostClipper(inner, 1.0)
    run, outer = PrivateRun.start(tmp_path, plan_of(), rows_of()), wrap(model)
    with pytest.raises(GhostError, match=r"detach\(\) on the run"):
        run.attach(outer, torch.optim.SGD(outer.parameters(), lr=0.1), gradients=gradients)
    assert read_ledger(tmp_path / LEDGER_FILE).num_steps == 0


FAILS = 2  # the third step has no check of the rows before it


@pytest.mark.parametrize(
    ("within", "error"),
    [
        ("loss_of", KeyboardInterrupt()),
        ("attempt", KeyboardInterrupt()),
        ("collect", KeyboardInterrupt()),
        ("collect", torch.OutOfMemoryError("none left")),
        ("_add_noise_", RuntimeError("a fault")),  # it was said to come from another process
    ],
    ids=repr,
)
def test_nothing_of_a_step_that_was_broken_off_goes_into_another(within, error, tmp_path):
    """A layer stayed out of training after Ctrl-C, and the next step said that somebody had frozen it."""
    run, model, optimizer = attached(tmp_path, plan_of(num_steps=6))
    for number, unit_ids in enumerate(run.draws(FAILS + 2)):
        if number == FAILS:
            with (
                pytest.raises(type(error), match=f"^{error}$"),
                BreaksOff(1 if within == "_add_noise_" else 3, error, within),
            ):
                run.step(unit_ids, loss_of)
            assert all(p.requires_grad for p in model.parameters())
        elif number > FAILS:
            with pytest.raises(ValueError, match="half-way"):
                run.step(unit_ids, loss_of)
        else:
            run.step(unit_ids, loss_of)
            optimizer.step()
        optimizer.zero_grad()
    run.detach()
    assert run.ledger.num_steps == FAILS + 2
