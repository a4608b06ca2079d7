"""Small audits that between them see every planted bug; run on the package beside this file, sound or mutated.

Each setup makes the bug that it is for as visible as it gets: a model of one layer, a loss of known gradient. It has so
many blocks or trials that chance hides the bug in less than one of a thousand runs.
``python -m tests.audit.planted SETUP`` prints the result as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpllm import PrivacyConfig, PrivacyPlan, PrivateRun, TrainingRows, make_plan, per_sequence_loss
from dpllm.audit.gradient import Basis, Design, Restarts, Steps, judge_releases, observe, unit_gradients
from dpllm.audit.result import AuditResult
from dpllm.data.units import UnitIndex
from dpllm.mechanism.averages import MovingAverage
from dpllm.mechanism.blt import BltNoise
from dpllm.mechanism.catalogue import spec_of
from dpllm.mechanism.parts import Draw, Spec
from dpllm.mechanism.query import Query
from dpllm.mechanism.strategies import Workload
from dpllm.methods.aggregate.combination import ThresholdedCounts
from dpllm.methods.attacks.answers import run_rounds, run_trials
from dpllm.methods.attacks.probes import CANARY, RoundProbe, probe_of, small_federation
from dpllm.methods.count.counting import CHARGE as LABEL_COUNTS
from dpllm.methods.evolve.evolution import votes_charge
from dpllm.methods.pate.prepare import NEW_TOKENS, PROMPTS, PUBLIC_VOTES, TEACHERS
from dpllm.methods.pate.votes import TOKENS, Vote
from dpllm.methods.predict import run as prediction
from dpllm.methods.predict.token_draw import TokenDraw
from dpllm.privacy.query_plan import Charge, QueryPlan
from tests.memory_ledger import MemoryLedger

CONFIDENCE = 0.999  # a sound run fails once in a thousand times at most
CLIP_NORM = 0.5
MEMORY = Path("/dev/shm")  # thousands of lines are flushed to the disk one by one


def plan_of(num_units: int, batch: int, noise_multiplier: float, num_steps: int) -> PrivacyPlan:
    """Plain Poisson sampling: nothing is cut off."""
    return PrivacyPlan.untruncated(num_units, batch, num_steps, noise_multiplier, CLIP_NORM, delta=1e-5)


def plan_with(num_units: int, batch: int, sigma: float, num_steps: int, *parts: tuple[str, Any]) -> PrivacyPlan:
    """A plan of `plan_of` with another clipping or noise."""
    changes = {name: Spec.of(value) for name, value in parts}
    return dataclasses.replace(plan_of(num_units, batch, sigma, num_steps), **changes)


def vectors(*lengths: float, absent: int = 0) -> tuple[nn.Module, TrainingRows, Callable]:
    """Units whose gradients are at right angles to each other, of these multiples of the clip norm.

    The loss is linear, so the gradient is the row, once for each of two outputs, for any weights. After them come units
    that are never present.
    """
    count = len(lengths) + absent
    table = torch.diag(torch.tensor([*lengths, *[0.0] * (absent + 4)])) * CLIP_NORM / 2**0.5
    rows = TrainingRows(
        units=UnitIndex.one_row_per_unit(count),
        lengths=np.ones(count, dtype=np.int64),
        fetch=lambda numbers: [table[int(number)] for number in numbers],
        collate=lambda rows: {"rows": torch.stack(rows)},
        max_rows=8,
    )
    torch.manual_seed(0)
    return nn.Linear(count + 4, 2, bias=False), rows, lambda model, inputs: model(inputs["rows"]).sum(1)


class Tied(nn.Module):
    """An embedding that is the head as well, with nothing between them."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.head(self.embedding(ids_BT))


def texts(*rows: tuple[list[int], list[int]]) -> TrainingRows:
    """Rows of token ids and labels, padded to the longest of their microbatch."""

    def padded(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        longest = max(len(ids) for ids, _ in rows)
        return {
            "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
        }

    return TrainingRows(
        units=UnitIndex.one_row_per_unit(len(rows)),
        lengths=np.array([len(ids) for ids, _ in rows]),
        fetch=lambda numbers: [rows[int(number)] for number in numbers],
        collate=padded,
        max_rows=16,
    )


def text_loss(model: Any, inputs: Any) -> Tensor:
    return per_sequence_loss(model(inputs["input_ids"]), inputs["labels"])


def audit(
    model: nn.Module,
    rows: TrainingRows,
    loss_of: Callable,
    design: Design,
    batch: int,
    noise_multiplier: float,
    prepare: Callable[[nn.Module], Any] = lambda model: model,
    setup: str = "one process",
    parts: Sequence[tuple[str, Any]] = (),
) -> AuditResult:
    """One attached run, all blocks of it."""
    num_units = rows.units.num_units
    plan = plan_with(num_units, batch, noise_multiplier, design.num_blocks * design.steps_per_block, *parts)
    design.check(plan)
    basis = basis_of(model, rows, loss_of, design)
    prepared = prepare(model)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1.0)
    run = PrivateRun(plan, rows, MemoryLedger())
    run.attach(prepared, optimizer)
    release = Steps(run, prepared, optimizer, loss_of, design.steps_per_block)
    seen = observe(release, basis, design, num_units)
    run.detach()
    return judge_releases(seen, plan, design, setup, CONFIDENCE)


def basis_of(model: nn.Module, rows: TrainingRows, loss_of: Callable, design: Design) -> Basis:
    taking_part = range(design.num_base + design.num_canaries)
    return Basis.of(unit_gradients(model, rows, loss_of, taking_part), design.num_base)


def long_gradient() -> AuditResult:
    """A canary five times as long as the clip norm, in every step."""
    return audit(*vectors(1, 5), Design(1, 1, 400), batch=2, noise_multiplier=1.0)


def two_processes() -> AuditResult:
    """A canary in every step of two processes that hold the whole model each: tight enough to see a factor sqrt(2)."""
    from tests.distributed.world import run

    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), "tests.audit.planted:on_ddp")[0]


def on_ddp() -> AuditResult:
    return audit(
        *vectors(1, 2),
        Design(1, 1, 2500),
        batch=2,
        noise_multiplier=0.5,
        prepare=nn.parallel.DistributedDataParallel,
        setup="ddp, 2 processes",
    )


def two_steps() -> AuditResult:
    """Half of the units in each of two steps: the difference of the releases has the noise of both."""
    return audit(*vectors(1, 2), Design(1, 1, 400, steps_per_block=2), batch=1, noise_multiplier=2.0)


def tied_head() -> AuditResult:
    """A tied model and a canary whose gradients as a lookup and as a matrix product are parallel and equally long.

    One token again and again, each time with another label; all embeddings are 0 but its own, which is so long that
    its probability is nearly 1. Both uses pull at its row with the same vector, and the labels' rows hardly count.
    """
    model, repeated = Tied(num_tokens=200, width=64), 24
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.embedding.weight[1] = 12 / 8  # norm 12
    canary = ([1] * (repeated + 1), [-100, *range(2, repeated + 2)])
    base = ([150, 150], [-100, 1])  # of its gradient, only the row of its own token is not 0
    return audit(model, texts(base, canary), text_loss, Design(1, 1, 2500), batch=2, noise_multiplier=0.5)


def witnesses() -> AuditResult:
    """Eight short rows and a long canary in one microbatch, in every step."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    rows = texts(*[([1, 2], [-100, 2])] * 8, ([3] * 65, [-100, *[4, 5] * 32]))
    return audit(model, rows, lambda m, i: per_sequence_loss(m(i["input_ids"]), i["labels"]), Design(8, 1, 300), 9, 1.0)


def epochs() -> AuditResult:
    """Blocks of as many steps as an epoch would have, one unit expected in each."""
    design = Design(num_base=7, num_canaries=1, num_blocks=2000, steps_per_block=8)
    return audit(*vectors(*[1] * 7, 2), design, batch=1, noise_multiplier=0.35)  # at 0.5, chance hid the bug in 0.65 %


def empty_steps() -> AuditResult:
    """Two units at q = 1/2, so that many steps are empty; the first row of the data has an enormous gradient."""
    return audit(*vectors(300, 1), Design(1, 1, 600, steps_per_block=8), batch=1, noise_multiplier=6.0)


@contextlib.contextmanager
def without_checks_of_rows() -> Iterator[None]:
    """Leave out the checks of the loss in the first steps of each run: they take most of the time of a short one."""
    check = PrivateRun._check_rows
    PrivateRun._check_rows = lambda self, *arguments: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrivateRun._check_rows = check  # type: ignore[method-assign]


def audit_runs(
    model: nn.Module,
    rows: TrainingRows,
    loss_of: Callable,
    design: Design,
    plan: PrivacyPlan,
    num_noise: int = 0,
    prepare: Callable[[nn.Module], Any] = lambda model: (model, torch.optim.SGD(model.parameters(), lr=1.0)),
    place: Path | None = None,
    setup: str = "one process",
) -> AuditResult:
    """Blocks that are runs of their own, with the ledger on the disk: in a place that all processes share."""
    design.check(plan)
    taking_part = range(design.num_base + design.num_canaries)
    basis = Basis.of(unit_gradients(model, rows, loss_of, taking_part), design.num_base, num_noise)
    prepared, optimizer = prepare(model)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as folder, without_checks_of_rows():
        runs = place or Path(folder)
        release = Restarts(runs, plan, rows, prepared, optimizer, loss_of, design.starts, design.average)
        seen = observe(release, basis, design, plan.population)
    return judge_releases(seen, plan, design, f"{setup}, starts of {design.starts} steps", CONFIDENCE)


def resumed() -> AuditResult:
    """Runs of two steps that break off after the first and are resumed."""
    design = Design(1, 1, num_blocks=300, steps_per_block=2, own_runs=True, steps_per_start=1)
    return audit_runs(*vectors(1, 2), design, plan_of(2, batch=1, noise_multiplier=2.0, num_steps=2))


def banded(bands: int) -> tuple[str, Any]:
    """Noise of this many bands, for `plan_with`."""
    return "noise", {"kind": "banded", "bands": bands}


def one_cycle() -> AuditResult:
    """A cycle of eight bands, with q' = 1: every unit is in one step, and nobody knows in which."""
    design = Design(1, 1, num_blocks=700, steps_per_block=8, own_runs=True)
    return audit_runs(*vectors(1, 2, absent=6), design, plan_with(8, 1, 1.0, 8, banded(8)))


def two_bands() -> AuditResult:
    """Four cycles of two bands, with q' = 1."""
    design = Design(1, 1, num_blocks=2000, steps_per_block=8, own_runs=True)
    return audit_runs(*vectors(1, 2), design, plan_with(2, 1, 1.5, 8, banded(2)))


def many_others() -> AuditResult:
    """Every second of 16 other units is long: where the groups of all of them change, it shows."""
    design = Design(16, 1, num_blocks=1000, steps_per_block=2, own_runs=True)
    lengths = [1.0, 0.01] * 8 + [2.0]
    return audit_runs(*vectors(*lengths, absent=1), design, plan_with(18, 9, 1.5, 2, banded(2)))


def resumed_bands() -> AuditResult:
    """Runs with four bands that break off after two steps, and again after two more; the noise is measured as well."""
    design = Design(1, 1, num_blocks=250, steps_per_block=4, own_runs=True, steps_per_start=2)
    return audit_runs(*vectors(1, 2, absent=2), design, plan_with(4, 1, 1.0, 8, banded(4)), num_noise=8)


def counted() -> AuditResult:
    """One of two present units of twenty is above the threshold of a clipping to a quantile."""
    design = Design(1, 1, num_blocks=400, own_runs=True)
    clipping = {"kind": "quantile", "start": 2 * CLIP_NORM, "count_noise": 2.0}
    return audit_runs(*vectors(1, 5, absent=18), design, plan_with(20, 20, 1.0, 1, ("clipping", clipping)))


class Parallel(nn.Module):
    """Layers side by side, all of the same gradient."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(num_layers))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([layer(rows) for layer in self.layers]).sum(0)


def layers() -> AuditResult:
    """A canary that is too long in each of nine layers."""
    linear, rows, loss_of = vectors(1, 5)
    model, parts = Parallel(9, linear.in_features), [("clipping", "per-layer")]
    return audit(model, rows, loss_of, Design(1, 1, 400), batch=2, noise_multiplier=1.0, parts=parts)


def fixed_order() -> AuditResult:
    """Runs of eight steps in a fixed order of two units, both in every step."""
    design = Design(1, 1, num_blocks=250, steps_per_block=8, own_runs=True)
    draw = Draw(num_units=2, population=2, expected_batch_size=2, max_batch_size=2)
    (noise,) = BltNoise(1).candidates(draw, Workload.prefix_sums(8))
    return audit_runs(*vectors(1, 2), design, plan_with(2, 2, 1.0, 8, ("noise", spec_of(noise))))


def averaged(**how: Any) -> AuditResult:
    """Runs of two steps that release the moving average of their weights."""
    design = Design(1, 1, num_blocks=250, steps_per_block=2, own_runs=True, average=MovingAverage(decay=0.5))
    return audit_runs(*vectors(1, 2), design, plan_of(2, batch=2, noise_multiplier=1.5, num_steps=2), **how)


def averaged_shards() -> AuditResult:
    """The same on FSDP2: each of two processes holds its rows of weights, gradient and average."""
    from tests.distributed.world import run

    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as folder:
        return run(Path(folder), "tests.audit.planted:on_fsdp2", place=Path(folder) / "runs")[0]


def on_fsdp2(place: Path) -> AuditResult:
    from tests.distributed.setups import prepare

    return averaged(prepare=lambda model: prepare("fsdp2", model, lr=1.0), place=place, setup="fsdp2, 2 processes")


def answers(method: str, charges: Sequence[Charge], trials: int, user: bool = False, **settings: Any) -> AuditResult:
    """All answers of a query run in each trial, with and without a canary; a user has at most three rows."""
    unit = (
        {"unit": "user", "unit_column": "person", "max_rows_per_unit": 3, "rows_kept": "first"}
        if user
        else {"unit": "sequence"}
    )
    plan = QueryPlan(
        **{**unit, "adjacency": "zero-out", "method": method, "num_units": 1000, "delta": 1e-4},
        charges=tuple(charges),
        settings=tuple(settings.items()),
        randomness="discrete" if method in ("label counts", "predicted text", "answers of groups") else "os",
    )
    probe = probe_of(plan)
    return run_trials(plan, probe, trials).result(plan, probe.canary, CONFIDENCE)


def counts(user: bool = False) -> AuditResult:
    """Noisy counts, released once."""
    event = Query(noise_multiplier=1.0, replaced=2**0.5, discrete=True)
    return answers("label counts", [Charge(name=LABEL_COUNTS, event=event, count=1)], 2000, user)


def counts_of_users() -> AuditResult:
    """The same of users with nine rows each, of which three count."""
    return counts(user=True)


def evolution() -> AuditResult:
    """Four histograms of votes."""
    return answers("private evolution", [votes_charge(2.0, 4)], 2000)


def evolution_of_users() -> AuditResult:
    """The same of users with three records each, which share a vote."""
    return answers("private evolution", [votes_charge(2.0, 4)], 2000, user=True)


def teachers() -> AuditResult:
    """Eleven teachers label twenty texts."""
    made = [Charge(name=name, event=event, count=count) for name, event, count in Vote(20).charges(4.0)]
    settings = {"teachers": 11, "classes": 2, "public texts": 20}
    return answers("public labels by PATE", made, 12000, **settings)


def confident_teachers() -> AuditResult:
    """Eleven teachers label the first two texts on which they agree, of eighty."""
    vote = Vote(80, threshold=5.0, max_answers=2)
    made = [Charge(name=name, event=event, count=count) for name, event, count in vote.charges(4.0)]
    settings = {"teachers": 11, "classes": 2, "public texts": 80, "votes for a label, threshold": 5.0}
    return answers("public labels by PATE", made, 8000, **settings)


def writing_teachers() -> AuditResult:
    """Eleven teachers write sixteen texts of five tokens: of twenty tokens in all, too little shows."""
    vote = Vote(80, answers=TOKENS)
    made = [Charge(name=name, event=event, count=count) for name, event, count in vote.charges(4.0)]
    settings = {TEACHERS: 11, PROMPTS: 16, NEW_TOKENS: 5, PUBLIC_VOTES: 0.0}
    return answers("public completions by PATE", made, 6000, **settings)


def tokens(user: bool = False, around_public: bool = True) -> AuditResult:
    """A text of forty tokens by a group of five units."""
    event = TokenDraw(noise_multiplier=5.0)
    settings = {
        prediction.QUANTITY: prediction.AROUND_PUBLIC if around_public else "logits",
        prediction.CLIP: 1.0,
        prediction.GROUP_SIZE: 5,
        prediction.TEMPERATURE: 1.0,
        prediction.TOKENS: 40,
        prediction.TEXTS_OF_GROUP: 1,
    }
    return answers("predicted text", [Charge(name=prediction.CHARGE, event=event, count=40)], 6000, user, **settings)


def tokens_of_users() -> AuditResult:
    """The same of users with three records each; the logits themselves are clipped."""
    return tokens(user=True, around_public=False)


def rounds(trials: int = 1000, **noise: Any) -> AuditResult:
    """Federated rounds of two clients with a trusted server."""
    options = {"noise_multiplier": 1.2, "clip_norm": CLIP_NORM, "expected_batch_size": 50, "delta": 1e-4}
    unit = {"unit": "client", "max_rows_per_unit": 8}
    plan = small_federation(make_plan(PrivacyConfig(**options, **unit, **noise), 100, 10), trials)
    return run_rounds(plan, RoundProbe, trials).result(plan, CANARY, CONFIDENCE)


def secure_rounds() -> AuditResult:
    """Eight clients that add the noise, of which six leave before they send it."""
    return rounds(8000, noise={"kind": "distributed", "dropouts": 0.75, "min_batch_size": 2}, randomness="discrete")


def questions(*kinds: str) -> AuditResult:
    """Questions of groups of two units: a number, listed answers and open ones, or some of these."""
    known: dict[str, Query] = {
        "number": Query(noise_multiplier=2.0, replaced=1.0, discrete=True),
        "choice": Query(noise_multiplier=2.0, replaced=1.0, discrete=True),
        "open": ThresholdedCounts(noise_multiplier=2.0, margin=4.265),  # a failure of 1e-5
    }
    events = {kind: known[kind] for kind in kinds or known}
    made = [Charge(name=f"answer to {kind!r}", event=event, count=1) for kind, event in events.items()]
    settings: dict[str, Any] = {"groups": 50, "group size, units": 2, **{f"{kind}: kind": kind for kind in events}}
    return answers("answers of groups", made, 1000, **settings)


def choices() -> AuditResult:
    """Only listed answers: in the sum of several scores, the noise of the others would hide that one has none."""
    return questions("choice")


def summary(result: AuditResult) -> dict[str, Any]:
    """A row of the table of planted bugs."""
    (attack,) = [attack for attack in result.attacks if result.best in attack.bounds][:1]
    return {
        "claimed": result.claimed_epsilon,
        "lower": result.epsilon_lower,
        "ceiling": result.ceiling,
        "attack": attack.name,
        "method": result.best.method,
        "verdict": result.verdict,
        "failed": result.failed,
        "noise": result.noise is not None and result.noise.refuted,
    }


SETUPS: dict[str, Callable[[], AuditResult]] = {
    setup.__name__: setup
    for setup in (
        *(long_gradient, two_processes, two_steps, tied_head, witnesses, epochs, empty_steps, resumed),
        *(one_cycle, two_bands, many_others, resumed_bands, counted, layers, fixed_order, averaged),
        *(averaged_shards, counts, counts_of_users, evolution, evolution_of_users, teachers, confident_teachers),
        *(writing_teachers, tokens, tokens_of_users, rounds, secure_rounds, questions, choices),
    )
}

if __name__ == "__main__":
    print(json.dumps(summary(SETUPS[sys.argv[1]]())))
