"""Several processes agree or stop together: collectives, ledger, draws, shares, refusals, the guard, evaluation."""

import pytest
import torch

from dpllm.engines.processes import Processes
from dpllm.privacy.ledger import LEDGER_FILE, read_ledger
from dpllm.privacy.private_folder import read_diagnostics
from dpllm.training.evaluation import measure
from dpllm.training.run import PrivateRun
from tests.distributed import world
from tests.distributed.checks import EVALUATED, STEPS, model_and_rows
from tests.mutations import kills
from tests.training.test_run import flat, ledger_of, loss_of, network, plan_of, rows_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("agreement")


@pytest.fixture(scope="module")
def ranks(folder):
    """The results of each of two processes."""
    return world.run(folder / "world", "tests.distributed.checks:everything", size=2, root=folder)


@pytest.fixture
def seen(ranks):
    """The results of one check, one per rank."""
    return lambda check, name=None: [rank[check] if name is None else rank[check][name] for rank in ranks]


def same_error(errors, kind, *texts):
    """Every rank raised an error of this kind, with one message that contains the texts."""
    assert errors[0] == errors[1] and errors[0] is not None
    assert errors[0][0] == kind
    assert all(text in errors[0][1] for text in texts), errors[0][1]
    return True


def test_collectives_give_every_rank_the_same(seen):
    """Sums in float64, flags, values in the order of the ranks, and results of rank 0."""
    assert seen("collectives", "place") == [(0, 2, True), (1, 2, False)]
    assert seen("collectives", "sum") == [[1.0, 0.5, 2e300]] * 2
    assert seen("collectives", "any") == [(True, False)] * 2
    assert seen("collectives", "gather") == [[{"rank": 0}, {"rank": 1}]] * 2
    assert seen("collectives", "from_main") == ["made by rank 0"] * 2


def test_an_error_of_rank_zero_is_everybodys(seen, folder):
    """The same type and message on every rank, and the group can be used afterwards."""
    system, refusal = zip(*seen("collectives", "errors"), strict=True)
    assert same_error(system, "OSError", "No space left on device", str(folder))
    assert same_error(refusal, "LedgerError", "the plan differs")
    assert seen("collectives", "calls") == [[0], []]
    assert seen("collectives", "afterwards") == [[2.0]] * 2


def test_a_fact_that_differs_stops_every_rank_with_one_message(seen):
    """It names the fact, the ranks and their values, and no fact on which they agree."""
    assert seen("agreement", "same") == [None, None]
    differs = seen("agreement", "differs")
    assert same_error(differs, "DisagreementError", "differ in the number of rows (rank 0: 7, rank 1: 8)")
    assert "the plan" not in differs[0][1]


def test_rank_zero_alone_writes_the_ledger(seen, folder):
    """Every rank counts the steps; the file is one, and a ledger like any other."""
    assert seen("ledgers", "exists") == [True, False]
    assert seen("ledgers", "resumed at") == [3, 3] and seen("ledgers", "num_steps") == [4, 4]
    contents = read_ledger(folder / "ledgers" / "rank 0" / LEDGER_FILE)
    assert contents.num_steps == 4 and len(contents.runs) == 2
    assert contents.disclosures == {"training loss": 1} and read_diagnostics(contents.path.parent) == {"something": 1}


def test_a_ledger_that_cannot_be_used_is_refused_on_every_rank(seen):
    """Although only rank 0 looks at the file."""
    assert same_error(seen("ledgers", "create again"), "LedgerError", "is the ledger of an earlier run")
    assert same_error(seen("ledgers", "other plan"), "LedgerError", "was written under the plan")
    assert same_error(seen("ledgers", "missing"), "LedgerError", "cannot be read")


def test_a_step_that_rank_zero_cannot_charge_is_taken_by_nobody(seen, folder):
    """A full disk, a number out of turn, a closed file: the same error everywhere, and no count goes up."""
    assert same_error(seen("ledger_errors", "full"), "OSError", "File too large")
    assert same_error(seen("ledger_errors", "out of turn"), "LedgerError", "step 5 cannot be charged")
    assert same_error(seen("ledger_errors", "closed"), "LedgerError", "is closed")
    assert seen("ledger_errors", "num_steps") == [(1, 1), (1, 1)]
    assert read_ledger(folder / "ledger_errors" / "full" / LEDGER_FILE).num_steps == 1


@kills(
    "each process draws units of its own",
    "dpllm/training/draws.py",
    "return self._processes.int64s_from_main(drawn, int(everywhere[0][2]))",
    "return draw_on_main()",
)
@pytest.mark.parametrize("name", ["noisy", "noiseless"])
def test_every_rank_draws_the_same_units_and_takes_its_share(seen, name):
    """One draw per step over all units; the rows of each unit go to one rank, and none is left out."""
    steps = [result["steps"] for result in seen("runs", name)]
    rows = rows_of()
    padding = set(rows.units.rows[:1])
    for number, (first, second) in enumerate(zip(*steps, strict=True), start=1):
        assert first[0] == second[0] and first[2] == second[2] == len(first[0])
        if number.bit_count() == 1 or number == STEPS:  # rows are also fetched to compare them with each other
            continue
        expected, _ = rows.units.rows_of(first[0])
        assert {*first[1], *second[1]} - padding == {*expected.tolist()} - padding
        assert not ({*first[1]} & {*second[1]}) - padding
        own = [[row for row in share[1] if row not in padding] for share in (first, second)]
        assert all(len(share) == len(set(share)) for share in own)
    assert len({tuple(step[0]) for step in steps[0]}) > 1 and steps[0][2][0] == []
    assert all(result["num_steps"] == STEPS for result in seen("runs", name))


def test_replicas_stay_equal_and_are_those_of_one_process(seen, tmp_path):
    """Bit by bit between the ranks, noise included; without noise, equal to one process up to rounding."""
    for name in ("noisy", "noiseless"):
        first, second = (result["parameters"] for result in seen("runs", name))
        assert torch.equal(first, second)
    plan, model = plan_of(0.0, num_steps=STEPS), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    run = PrivateRun(plan, rows_of(), ledger_of(tmp_path, plan))
    run.attach(model, optimizer)
    start = flat(model)
    for unit_ids, _, _ in seen("runs", "noiseless")[0]["steps"]:
        run.step(run.choose(unit_ids), loss_of)
        optimizer.step()
        optimizer.zero_grad()
    alone, together = flat(model) - start, seen("runs", "noiseless")[0]["parameters"] - start
    assert float((alone - together).norm()) < 1e-5 * float(alone.norm())


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("plan", "differ in the plan's noise_multiplier (rank 0: 0.8, rank 1: 0.9)"),
        ("size", "differ in the number of units (rank 0: 40, rank 1: 41)"),
        ("order", "differ in the rows' lengths and units"),
        ("grouping", "differ in the rows' lengths and units"),
        ("contents", "differ in the rows' contents or their order"),
        ("parameters", "differ in the trainable parameters"),
        ("average", "differ in train.average (rank 0: None, rank 1: MovingAverage("),
        ("norms", "differ in norm_method (rank 0: None, rank 1: NormMethod("),
    ],
)
def test_ranks_that_disagree_stop_before_the_first_step(seen, what, text):
    """Noise, data or model: all ranks end with one message that has the remedy."""
    assert same_error(
        seen("disagreeing_runs", what), "DisagreementError", text, "with the same recipe, data and package versions"
    )


@pytest.mark.parametrize(
    ("what", "kind", "texts"),
    [
        ("plain", "EngineError", ("2 processes run, but the model (Sequential)", "accelerator.prepare()")),
        ("comm hook", "EngineError", ("communication hook", "ddp_comm_hook: no")),
        ("fsdp1", "EngineError", ("FSDP version 1", "fsdp_version: 2")),
        ("adapter outside", "EngineError", ("adapter is not sharded like the rest", "before sharding the model")),
        ("clipper on ddp", "GhostError", ("DistributedDataParallel reduces unclipped", "model.module")),
    ],
)
def test_ways_of_spreading_a_model_that_are_refused_by_name(seen, what, kind, texts):
    """Under each of them the sum would not be the private one; the message names a replacement."""
    assert same_error(seen("engines", what), kind, *texts)
    assert seen("engines", "ddp") == ["DataParallel"] * 2  # as `accelerator.prepare` wraps replicated parameters


def test_the_guard_stops_every_rank_when_one_of_them_differs(seen):
    """A gradient changed on one rank, or sums that nobody added up: no rank makes the update."""
    assert seen("guards", "whole") == [(None, False)] * 2
    for name in ("changed on rank 1", "not reduced"):
        errors, unmoved = zip(*seen("guards", name), strict=True)
        assert same_error(errors, "UpdateError", "The gradient that reaches the optimizer is not the private sum")
        assert all(unmoved)


@pytest.mark.parametrize("name", EVALUATED)
def test_a_measurement_over_ranks_is_that_of_one_process(seen, name):
    """Each row counts once, on any rank, also if a rank has none."""
    count, max_rows = EVALUATED[name]
    alone = measure(*model_and_rows(count), max_rows=max_rows)
    assert seen("evaluations", name)[0] == seen("evaluations", name)[1]
    assert seen("evaluations", name)[0] == pytest.approx((alone.value, alone.loss, alone.row_loss), rel=1e-6)
    assert Processes().size == 1
