"""The program in the processes of `test_agreement`: collectives, the shared ledger, runs, refusals and evaluation.

Each check returns the observations of this process; the tests compare them between the ranks. All of them share one
start of the processes, which takes most of the time, so a check must leave the group usable: an error is the same on
all ranks.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpllm import GhostClipper
from dpllm.data.units import UnitIndex
from dpllm.engines import DataParallel, engine_for
from dpllm.engines.processes import Processes
from dpllm.ghost import NormMethod
from dpllm.mechanism.averages import average_of
from dpllm.privacy.ledger import LEDGER_FILE, LedgerError
from dpllm.training.averaging import Averaging
from dpllm.training.evaluation import measure
from dpllm.training.rows import TrainingRows
from dpllm.training.run import PrivateRun
from dpllm.training.shared_ledger import SharedLedger
from tests.distributed.setups import unreduced
from tests.training.test_run import UNITS, flat, loss_of, network, numbered, plan_of, rows_of

STEPS = 6
EVALUATED = {"several batches": (9, 2), "fewer batches than ranks": (2, 4), "as many as ranks": (4, 2)}


def everything(root: Path) -> dict[str, Any]:
    """Run all checks, in an order that is the same on every rank."""
    checks = (collectives, agreement, ledgers, ledger_errors, runs, disagreeing_runs, engines, guards, evaluations)
    return {check.__name__: check(root / check.__name__) for check in checks}


def caught(function: Callable[[], Any]) -> tuple[str, str] | None:
    """The type and the message of the error that a call raises; None without one."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def collectives(folder: Path) -> dict[str, Any]:
    here = Processes()
    calls = []

    def fail() -> None:
        calls.append(here.rank)
        raise OSError(28, "No space left on device", str(folder))

    def refuse() -> None:
        raise LedgerError("the plan differs")

    return {
        "place": (here.rank, here.size, here.is_main),
        "sum": here.sum([here.rank, 0.25, 1e300]),
        "any": (here.any(here.rank == 1), here.any(False)),
        "gather": here.gather({"rank": here.rank}),
        "from_main": here.from_main(lambda: f"made by rank {here.rank}"),
        "errors": (caught(lambda: here.from_main(fail)), caught(lambda: here.from_main(refuse))),
        "calls": calls,
        "afterwards": here.sum([1.0]),
    }


def agreement(folder: Path) -> dict[str, Any]:
    here = Processes()
    return {
        "same": caught(lambda: here.agree({"the plan": "abc", "the number of rows": 7})),
        "differs": caught(lambda: here.agree({"the plan": "abc", "the number of rows": 7 + here.rank})),
    }


def ledgers(folder: Path) -> dict[str, Any]:
    """Every rank gives a different path, to show which rank writes."""
    here, plan = Processes(), plan_of()
    path = folder / f"rank {here.rank}" / LEDGER_FILE
    ledger = SharedLedger.create(path, plan, here)
    for number in range(3):
        ledger.append_step(number, plan.event)
    ledger.append_disclosure("training loss")
    ledger.append_diagnostic("something")
    ledger.append_end("interrupted")
    ledger.close()
    again = caught(lambda: SharedLedger.create(path, plan, here))
    ledger = SharedLedger.open(path, plan, here)
    resumed_at = ledger.num_steps
    ledger.append_step(resumed_at, plan.event)
    ledger.close()
    return {
        "exists": path.exists(),
        "create again": again,
        "resumed at": resumed_at,
        "num_steps": ledger.num_steps,
        "other plan": caught(lambda: SharedLedger.open(path, plan_of(0.9), here)),
        "missing": caught(lambda: SharedLedger.open(folder / "nowhere", plan, here)),
    }


def ledger_errors(folder: Path) -> dict[str, Any]:
    """Rank 0 fails to write; the others, where nothing is wrong, must not go on."""
    here, plan = Processes(), plan_of()
    ledger = SharedLedger.create(folder / "full" / LEDGER_FILE, plan, here)
    ledger.append_step(0, plan.event)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.path.stat().st_size, hard))
    full = caught(lambda: ledger.append_step(1, plan.event))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    after_full = ledger.num_steps
    out_of_turn = caught(lambda: ledger.append_step(5, plan.event))
    ledger.close()
    closed = caught(lambda: ledger.append_step(1, plan.event))
    return {
        "full": full,
        "out of turn": out_of_turn,
        "closed": closed,
        "num_steps": (after_full, ledger.num_steps),
    }


def runs(folder: Path) -> dict[str, Any]:
    """Private runs with replicated parameters, with and without noise, and an empty step in the middle."""
    results: dict[str, Any] = {}
    for name, noise_multiplier in (("noisy", 0.8), ("noiseless", 0.0)):
        here, plan, fetched = Processes(), plan_of(noise_multiplier, num_steps=STEPS), []
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        ledger = SharedLedger.create(folder / name / LEDGER_FILE, plan, here)
        run = PrivateRun(plan, rows_of(record=fetched), ledger)
        run.attach(model, optimizer)
        steps = []
        nobody = np.zeros(plan.num_units, dtype=bool)
        for number in range(STEPS):
            unit_ids = next(run.draws(1, nobody if number == 2 else None))
            fetched.clear()
            done = run.step(unit_ids, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            steps.append((unit_ids.tolist(), list(fetched), done.num_units))
        results[name] = {"steps": steps, "parameters": flat(model), "num_steps": ledger.num_steps}
        run.detach()
    return results


def disagreeing_runs(folder: Path) -> dict[str, Any]:
    """Settings that must be equal on all ranks; a difference would make two halves of different runs."""
    here, plan = Processes(), plan_of()
    odd = here.rank == 1

    def start(name: str, rows: TrainingRows, own_plan: Any = plan) -> PrivateRun:
        return PrivateRun(own_plan, rows, SharedLedger.create(folder / name / LEDGER_FILE, plan, here))

    def freeze() -> None:
        model = DistributedDataParallel(network())
        run = start("parameters", rows_of())
        model.module[0].bias.requires_grad_(not odd)
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.3))

    def attach(name: str, **options: Any) -> None:
        """One rank would go on alone with a collective of its own, and gloo would abort both."""
        model, run = DistributedDataParallel(network()), start(name, rows_of())
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.3), **options)

    def grouped() -> TrainingRows:
        """The same rows in the same order, divided into units otherwise."""
        owner = [0, 0, 1, 2, 2] if odd else [0, 1, 1, 2, 2]
        return TrainingRows(UnitIndex.from_ids(owner), np.ones(5, dtype=np.int64), list, numbered, 2)

    def shuffled() -> TrainingRows:
        """Rows of equal lengths, in another order on one rank: a unit could be on both."""
        units, lengths = UnitIndex.one_row_per_unit(UNITS), np.ones(UNITS, dtype=np.int64)
        return TrainingRows(units, lengths, lambda n: list(UNITS - n if odd else n), numbered, 2)

    small = plan_of(num_units=UNITS)
    return {
        "plan": caught(lambda: start("plan", rows_of(), plan_of(0.9) if odd else plan_of(0.8))),
        "size": caught(lambda: start("size", rows_of(UNITS + 1 if odd else UNITS), small)),
        "order": caught(lambda: start("order", rows_of(reverse=odd))),
        "grouping": caught(lambda: start("grouping", grouped())),
        "contents": caught(lambda: start("contents", shuffled())),
        "parameters": caught(freeze),
        "average": caught(lambda: attach("average", averaging=Averaging(average_of("ema"), 4) if odd else None)),
        "norms": caught(lambda: attach("norms", norm_method=NormMethod(backward_passes=2) if odd else None)),
    }


def engines(folder: Path) -> dict[str, Any]:
    """Ways of spreading a model that are refused."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def refusal(model: Any) -> tuple[str, str] | None:
        return caught(lambda: engine_for(model, optimizer_of(model)))

    compressed = DistributedDataParallel(network())
    compressed.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    mesh = init_device_mesh("cpu", (2,))
    half_sharded = network()
    fully_shard(half_sharded, mesh=mesh)
    half_sharded.register_parameter("adapter", nn.Parameter(torch.zeros(3)))
    return {
        "plain": refusal(network()),
        "comm hook": refusal(compressed),
        "fsdp1": refusal(FullyShardedDataParallel(network(), device_id=torch.device("cpu"))),
        "adapter outside": refusal(half_sharded),
        "clipper on ddp": caught(lambda: GhostClipper(DistributedDataParallel(network()), 0.5)),
        "ddp": type(engine_for(ddp := DistributedDataParallel(network()), optimizer_of(ddp))).__name__,
    }


class Unreduced(DataParallel):
    """An engine whose reduction does nothing any more."""

    def _reduce(self, own: torch.Tensor, flat: torch.Tensor) -> torch.futures.Future:
        return unreduced(self.processes.rank, own, flat)


def guards(folder: Path) -> dict[str, Any]:
    """The first update when one rank's gradient was changed, and when the ranks' sums were never added up."""
    here = Processes()
    results: dict[str, Any] = {}
    for name in ("whole", "changed on rank 1", "not reduced"):
        plan = plan_of(0.8)
        model = DistributedDataParallel(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = PrivateRun(plan, rows_of(), SharedLedger.create(folder / name / LEDGER_FILE, plan, here))
        run.attach(model, optimizer)
        if name == "not reduced":
            run._attached.engine.guard._handle.remove()  # type: ignore[union-attr]
            run._attached.engine = Unreduced(optimizer)
        run.step(next(run.draws(1)), loss_of)
        if name == "changed on rank 1" and here.rank == 1:
            model.module[0].weight.grad.mul_(0.5)
        before = flat(model)
        results[name] = (caught(optimizer.step), bool((flat(model) == before).all()))
        run.detach()
    return results


def model_and_rows(count: int) -> tuple[Any, Any, Any]:
    """A tiny language model, rows of different lengths, and their collator."""
    import datasets
    from transformers import LlamaForCausalLM

    from dpllm.data.rows import RowCollator
    from tests.conftest import tiny_llama_config

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama_config())
    ids = [[3 + (5 * row + position) % 50 for position in range(3 + row % 4)] for row in range(count)]
    return model, datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}), RowCollator(pad_token_id=0)


def evaluations(folder: Path) -> dict[str, Any]:
    """Perplexity with the rows divided over the ranks."""
    found = {}
    for name, (count, max_rows) in EVALUATED.items():
        figure = measure(*model_and_rows(count), max_rows=max_rows, processes=Processes())
        found[name] = (figure.value, figure.loss, figure.row_loss)
    return found
